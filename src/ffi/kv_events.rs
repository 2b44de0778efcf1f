use std::ptr::null;
use std::time::Duration;

use super::convert::{not_null, start};
use super::{guard, guard_or, pllm_bytes, pllm_engine, pllm_error, pllm_request};
use crate::engine::{KvEventKind, KvEventView, KvEvents};
use crate::error::Result;

/// The block is in the cache from now on.
pub const PLLM_KV_EVENT_STORED: u32 = 0;
/// The block is no longer in the cache.
pub const PLLM_KV_EVENT_REMOVED: u32 = 1;
/// No block is in the cache. PLLM_KV_EVENT_STORED of each block that is there follows.
pub const PLLM_KV_EVENT_CLEARED: u32 = 2;

/// The KV pool of the engine, in the memory of its device.
pub const PLLM_KV_MEDIUM_POOL: u32 = 0;

/// An event of the prefix cache. Pointers are valid until the batch is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pllm_kv_event {
    /// Size of this struct in the library. Fields beyond it do not exist.
    pub struct_size: u64,
    /// Number of the step with this event. The first step with events has 1, and each further step
    /// with events adds 1. All events of a step take effect together.
    pub sequence_number: u64,
    /// Time of the step in seconds since 1970 (UTC).
    pub time_seconds: f64,
    /// Hash of the block, 32 bytes: its key in a KV store. NULL for PLLM_KV_EVENT_CLEARED.
    pub hash: *const u8,
    /// Hash of the block before a stored block, 32 bytes. If first_token is 0, a hash that differs
    /// between salts. NULL unless kind is PLLM_KV_EVENT_STORED.
    pub parent_hash: *const u8,
    /// Tokens of a stored block. NULL if there are none.
    pub tokens: *const u32,
    /// Number of tokens.
    pub tokens_len: u64,
    /// Position of the first token of the block in its sequence.
    pub first_token: u64,
    /// Kind of the event: PLLM_KV_EVENT_*.
    pub kind: u32,
    /// Place of the block: PLLM_KV_MEDIUM_*. Values can be added.
    pub medium: u32,
    /// Layer group of the block. Models whose layers have different attention windows have a block
    /// in each group for the same tokens. Group 0 has the longest window.
    pub group: u32,
    /// 0.
    pub reserved: u32,
}

/// A batch of KV events. The caller frees it with pllm_kv_events_free. It stays valid after the
/// engine is freed.
pub struct pllm_kv_events {
    records: Vec<pllm_kv_event>,
    // The records point into the events, which therefore do not change.
    _events: KvEvents,
}

impl pllm_kv_events {
    /// Builds the batch from `records`, which were reserved for these events.
    fn into_raw(events: KvEvents, mut records: Vec<pllm_kv_event>) -> *mut pllm_kv_events {
        records.extend(events.iter().map(record));
        Box::into_raw(Box::new(pllm_kv_events { records, _events: events }))
    }
}

fn record(event: KvEventView) -> pllm_kv_event {
    let KvEventView { kind, sequence_number, time, hash, parent, first_token, group, tokens } = event;
    pllm_kv_event {
        struct_size: size_of::<pllm_kv_event>() as u64,
        sequence_number,
        time_seconds: time,
        hash: if kind == KvEventKind::Cleared { null() } else { hash.as_ptr() },
        parent_hash: if kind == KvEventKind::Stored { parent.as_ptr() } else { null() },
        tokens: start(tokens),
        tokens_len: tokens.len() as u64,
        first_token,
        kind: match kind {
            KvEventKind::Stored => PLLM_KV_EVENT_STORED,
            KvEventKind::Removed => PLLM_KV_EVENT_REMOVED,
            KvEventKind::Cleared => PLLM_KV_EVENT_CLEARED,
        },
        medium: PLLM_KV_MEDIUM_POOL,
        group,
        reserved: 0,
    }
}

/// Takes the events of the prefix cache since the last call, in their order. If there are none,
/// waits for the first one, up to timeout_ms milliseconds. If the time runs out, the batch is
/// empty; this is not an error.
///
/// If more than kv_events_capacity events were not read, they are dropped, and the batch is that of
/// pllm_engine_snapshot_kv_events instead. A reader that applies the events in their order
/// therefore always ends with the blocks that are cached.
///
/// Errors: PLLM_E_UNSUPPORTED if kv_events_capacity is 0; PLLM_E_OUT_OF_MEMORY, with the events
/// still to be read; the error of an engine that has failed. Any thread may call it, also during a
/// step. Two threads get different events. Free the batch with pllm_kv_events_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_poll_kv_events(
    engine: *const pllm_engine,
    timeout_ms: u32,
    out_events: *mut *mut pllm_kv_events,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_events", out_events)?;
        let mut records = Vec::new();
        let events = engine.poll_kv_events(Duration::from_millis(timeout_ms.into()), |len| reserve(&mut records, len))?;
        out_events.write(pllm_kv_events::into_raw(events, records));
        Ok(())
    })
}

/// Lists the blocks of the prefix cache: PLLM_KV_EVENT_CLEARED, and PLLM_KV_EVENT_STORED of each
/// block. The events have the number and the time of the last step with events, or 0. Later changes
/// have larger numbers. The events that pllm_engine_poll_kv_events returns are not affected.
///
/// Errors, threads and ownership: as pllm_engine_poll_kv_events. A step that ends waits while the
/// blocks are copied, about 2 ms for 100,000 blocks.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_snapshot_kv_events(
    engine: *const pllm_engine,
    out_events: *mut *mut pllm_kv_events,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_events", out_events)?;
        let mut records = Vec::new();
        let events = engine.snapshot_kv_events(|len| reserve(&mut records, len))?;
        out_events.write(pllm_kv_events::into_raw(events, records));
        Ok(())
    })
}

fn reserve(records: &mut Vec<pllm_kv_event>, len: usize) -> Result<()> {
    Ok(records.try_reserve_exact(len)?)
}

/// Computes the hashes of the full blocks of a prompt, as events and stores have them: 32 bytes for
/// each block, in the order of the blocks. Two engines have the same hashes if they have the same
/// model and weight format, kv_dtype, block_size, instruction path, kind of device, and
/// kv_store_secret. Of the request, only the prompt, text_flags, truncate_prompt_tokens and
/// cache_salt are used. Nothing is added to the engine. A request computes at least the last token
/// of its prompt, so it never uses the last block if the prompt ends with it.
///
/// group is a layer group, below the number of groups of the model; 0 exists in every model.
///
/// Errors: PLLM_E_INVALID_ARGUMENT if the prompt is invalid or group is too large;
/// PLLM_E_UNSUPPORTED if the prompt is a text and the engine has no tokenizer. Any thread may call
/// it. Free the hashes with pllm_bytes_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_hash_prompt(
    engine: *const pllm_engine,
    request: *const pllm_request,
    group: u32,
    out_hashes: *mut *mut pllm_bytes,
) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let engine = pllm_engine::get(engine)?;
        not_null("out_hashes", out_hashes)?;
        let (request, _) = pllm_request::to_request(request)?;
        let hashes = engine.hash_prompt(request, group as usize)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(hashes.as_flattened().len())?;
        bytes.extend_from_slice(hashes.as_flattened());
        out_hashes.write(pllm_bytes::into_raw(bytes));
        Ok(())
    })
}

/// Returns the number of events in a batch, 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_kv_events_len(events: *const pllm_kv_events) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { events.as_ref() }.map_or(0, |events| events.records.len() as u64)
}

/// Returns event i of a batch, or NULL if there is none. Borrowed; valid until the batch is freed.
/// Consecutive events are struct_size bytes apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_kv_events_get(events: *const pllm_kv_events, i: u64) -> *const pllm_kv_event {
    // SAFETY: the caller's contract.
    let records = unsafe { events.as_ref() }.map_or(&[][..], |events| &events.records);
    usize::try_from(i).ok().and_then(|i| records.get(i)).map_or(null(), |record| &raw const *record)
}

/// Frees a batch. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_kv_events_free(events: *mut pllm_kv_events) {
    guard_or((), || {
        if !events.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(events) });
        }
    });
}
