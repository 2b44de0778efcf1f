//! KV events: what a router needs to know of the prefix cache, and the hashes with which it finds
//! the blocks of a prompt.
//!
//! The stepping thread appends the changes of a step to the feed. Everything else, as the keys of
//! the blocks, is computed on the threads of the readers.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::transfers::store::ValueFormat;
use super::{Engine, Request};
use crate::error::{Error, Result};
use crate::kv::BlockHash;
pub use crate::kv::events::KvEventKind;
use crate::kv::events::{CacheRecord, EventBatch, EventFeed, KvEvent};
use crate::types::kv_store::BlockKey;

/// Number of events beyond the current ones for which a reader reserves space. Further events can
/// come in the meantime.
const SPARE_EVENTS: usize = 64;

/// The feed of an engine. Any thread may read it.
pub struct EventQueue {
    state: Mutex<State>,
    has_events: Condvar,
}

struct State {
    feed: EventFeed,
    /// Number of threads that wait for events.
    waiting: usize,
}

impl EventQueue {
    pub fn new(blocks: usize, block_size: usize, max_events: usize) -> Result<EventQueue> {
        let feed = EventFeed::new(blocks, block_size, max_events)?;
        Ok(EventQueue { state: Mutex::new(State { feed, waiting: 0 }), has_events: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the changes of a step. Allocates nothing.
    pub fn publish(&self, record: &mut CacheRecord) {
        if !record.has_changed() {
            return;
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut state = self.state();
        state.feed.update(record, time);
        if state.waiting > 0 {
            self.has_events.notify_all();
        }
    }

    /// Takes the unread events. If there are none, waits for them until the time has passed.
    /// `reserve` is called without the lock, before the events are taken.
    fn take(&self, timeout: Duration, mut reserve: impl FnMut(usize) -> Result<()>, batch: &mut EventBatch) -> Result<()> {
        let end = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            let unread = state.feed.unread();
            let left = end.saturating_duration_since(Instant::now());
            if unread == 0 && left.is_zero() {
                return Ok(());
            }
            if unread == 0 {
                state.waiting += 1;
                (state, _) = self.has_events.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
                state.waiting -= 1;
                continue;
            }
            if unread <= batch.capacity() {
                state.feed.take(batch);
                return Ok(());
            }
            state = self.reserve(state, unread, &mut reserve, batch)?;
        }
    }

    /// Lists the cached blocks.
    fn snapshot(&self, mut reserve: impl FnMut(usize) -> Result<()>, batch: &mut EventBatch) -> Result<()> {
        let mut state = self.state();
        loop {
            let len = state.feed.snapshot_len();
            if len <= batch.capacity() {
                state.feed.snapshot(batch);
                return Ok(());
            }
            state = self.reserve(state, len, &mut reserve, batch)?;
        }
    }

    /// Reserves space for `events` events and some more, without the lock.
    fn reserve<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        events: usize,
        reserve: &mut impl FnMut(usize) -> Result<()>,
        batch: &mut EventBatch,
    ) -> Result<MutexGuard<'a, State>> {
        let block_size = state.feed.block_size();
        drop(state);
        let events = events + events / 8 + SPARE_EVENTS;
        reserve(events)?;
        batch.reserve(events, block_size)?;
        Ok(self.state())
    }
}

/// Events in their order.
#[derive(Debug, Default)]
pub struct KvEvents {
    batch: EventBatch,
    keys: Vec<EventKeys>, // [events]
}

/// The names of a block and of the block before it, outside of the engine.
#[derive(Debug, Clone, Copy)]
struct EventKeys {
    hash: BlockKey,
    parent: BlockKey,
}

/// An event of the prefix cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvEventView<'a> {
    /// What has happened.
    pub kind: KvEventKind,
    /// Number of the step among those with events, from 1.
    pub sequence_number: u64,
    /// Time of the step in seconds since 1970.
    pub time: f64,
    /// Hash of the block, which is also its key in a KV store.
    pub hash: &'a BlockKey,
    /// Hash of the block before it. For the first block of a sequence: a hash that depends on the
    /// salt.
    pub parent: &'a BlockKey,
    /// Position of its first token in its sequence.
    pub first_token: u64,
    /// Layer group.
    pub group: u32,
    /// Tokens of a stored block. Empty for other events.
    pub tokens: &'a [u32],
}

impl KvEvents {
    /// Returns the number of events.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns whether there are no events.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the events in their order.
    pub fn iter(&self) -> impl Iterator<Item = KvEventView<'_>> {
        self.batch.events().iter().zip(&self.keys).map(|(event, keys)| self.view(event, keys))
    }

    fn view<'a>(&'a self, event: &'a KvEvent, keys: &'a EventKeys) -> KvEventView<'a> {
        let KvEvent { kind, sequence_number, time, block, .. } = *event;
        let tokens = self.batch.tokens(event);
        let first_token = block.place as u64 * self.batch.block_size() as u64;
        KvEventView { kind, sequence_number, time, hash: &keys.hash, parent: &keys.parent, first_token, group: block.group, tokens }
    }

    /// Computes the keys of the events. There is space for them.
    fn name(mut self, format: &ValueFormat) -> KvEvents {
        let name = |event: &KvEvent| match event.kind {
            KvEventKind::Stored => EventKeys { hash: format.key(&event.block.hash), parent: format.key(&event.block.parent) },
            KvEventKind::Removed => EventKeys { hash: format.key(&event.block.hash), parent: BlockKey::default() },
            KvEventKind::Cleared => EventKeys { hash: BlockKey::default(), parent: BlockKey::default() },
        };
        self.keys.extend(self.batch.events().iter().map(name));
        self
    }
}

impl Engine {
    fn events(&self) -> Result<&EventQueue> {
        self.check()?;
        let off = || Error::unsupported("kv_events_capacity is 0, so the engine records no KV events; set it");
        self.shared.events.as_deref().ok_or_else(off)
    }

    /// Takes the events of the prefix cache since the last call. If there are none, waits for them
    /// until the time has passed. If more than `kv_events_capacity` events were not read, they are
    /// replaced by the events of `snapshot_kv_events`.
    ///
    /// `reserve` is called with a number of events before they are taken. After an error of it, no
    /// event is lost.
    ///
    /// # Errors
    /// The engine records no events, or it has failed.
    pub fn poll_kv_events(&self, timeout: Duration, mut reserve: impl FnMut(usize) -> Result<()>) -> Result<KvEvents> {
        let KvEvents { mut batch, mut keys } = KvEvents::default();
        let reserve_keys = |events| keys.try_reserve_exact(events).map_err(Error::from).and_then(|()| reserve(events));
        self.events()?.take(timeout, reserve_keys, &mut batch)?;
        Ok(KvEvents { batch, keys }.name(&self.external.format))
    }

    /// Returns a `Cleared` event and the events of all cached blocks. They have the number of the
    /// last step. The events of `poll_kv_events` are not affected.
    ///
    /// # Errors
    /// As `poll_kv_events`.
    pub fn snapshot_kv_events(&self, mut reserve: impl FnMut(usize) -> Result<()>) -> Result<KvEvents> {
        let KvEvents { mut batch, mut keys } = KvEvents::default();
        let reserve_keys = |events| keys.try_reserve_exact(events).map_err(Error::from).and_then(|()| reserve(events));
        self.events()?.snapshot(reserve_keys, &mut batch)?;
        Ok(KvEvents { batch, keys }.name(&self.external.format))
    }

    /// Returns the hashes of the full blocks of a prompt in a layer group, as events have them.
    /// Only the prompt and the salt of the request are used.
    ///
    /// # Errors
    /// The prompt is invalid, or the model has no such group.
    pub fn hash_prompt(&self, request: Request, group: usize) -> Result<Vec<BlockKey>> {
        let (groups, block_size) = (self.info.paging.groups(), self.info.paging.block_size());
        if group >= groups {
            return Err(Error::invalid(format!("group is {group} and the model has {groups} layer groups; use a smaller number")));
        }
        let tokens = self.prompt_tokens(request.prompt, request.add_special, request.truncate_prompt_tokens)?;
        let mut keys = Vec::new();
        keys.try_reserve_exact(tokens.len() / block_size)?;
        let mut hash = BlockHash::root(&self.info.fingerprint, &request.salt);
        for tokens in tokens.chunks_exact(block_size) {
            hash = hash.next(tokens);
            keys.push(self.external.format.key(&hash.for_group(group)));
        }
        Ok(keys)
    }
}
