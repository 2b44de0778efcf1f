use std::sync::Arc;

use super::convert::{self, Versioned, borrow, not_null};
use super::{guard, guard_or, pllm_engine, pllm_error};
use crate::arena::{Arena, ArenaInfo};
use crate::error::Result;
use crate::sys::process::Owner;

/// A memory budget for KV pools. Several engines of a process can share it, and its size can change
/// while they run. Any thread may use it.
///
/// An engine that needs more blocks than are free reclaims blocks that other engines only cache. An
/// engine with requests gives its cached blocks back before its next step, so step every engine
/// that has requests. An engine without requests gives them back at once.
pub struct pllm_arena {
    arena: Arc<Arena>,
    owner: Owner,
}

impl pllm_arena {
    pub(super) fn new(arena: Arc<Arena>) -> pllm_arena {
        pllm_arena { arena, owner: Owner::this_process() }
    }

    /// # Safety
    /// As `borrow`.
    pub(super) unsafe fn get<'a>(arena: *const pllm_arena) -> Result<&'a Arc<Arena>> {
        // SAFETY: the caller's contract.
        let handle = unsafe { borrow("arena", arena) }?;
        handle.owner.check()?;
        Ok(&handle.arena)
    }
}

/// The state of a budget. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_arena_info {
    /// sizeof(pllm_arena_info).
    pub struct_size: u64,
    /// Size of the budget in bytes.
    pub bytes: u64,
    /// Smallest size in bytes to which it can be resized now, given its engines and their requests.
    pub least_bytes: u64,
    /// Largest size in bytes to which it can be resized.
    pub most_bytes: u64,
    /// Bytes that the engines hold. More than bytes while engines are giving blocks back.
    pub held_bytes: u64,
    /// Engines that use the budget.
    pub engines: u64,
}

// SAFETY: repr(C), u64 only.
unsafe impl Versioned for pllm_arena_info {
    const NAME: &'static str = "pllm_arena_info";
    const FIRST_SIZE: usize = 48;
    fn defaults() -> Self {
        pllm_arena_info { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<ArenaInfo> for pllm_arena_info {
    fn from(info: ArenaInfo) -> pllm_arena_info {
        let ArenaInfo { bytes, most_bytes, least_bytes, held_bytes, engines } = info;
        pllm_arena_info { bytes, least_bytes, most_bytes, held_bytes, engines: engines as u64, ..pllm_arena_info::defaults() }
    }
}

/// Creates a budget of bytes bytes. pllm_arena_resize can later raise it to at most most_bytes (0:
/// to bytes). Nothing is allocated now. Engines created with it (pllm_engine_options.arena) reserve
/// address space for most_bytes and use memory for the blocks they fill. The budget must hold one
/// sequence of max_model_len tokens for each engine.
///
/// Free it with pllm_arena_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_create(bytes: u64, most_bytes: u64, out_arena: *mut *mut pllm_arena) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        not_null("out_arena", out_arena)?;
        let most = if most_bytes == 0 { bytes } else { most_bytes };
        out_arena.write(Box::into_raw(Box::new(pllm_arena::new(Arena::new(bytes, most)?))));
        Ok(())
    })
}

/// Frees the handle. The budget lives until its last engine is freed. NULL is allowed. Do not free
/// the result of pllm_engine_arena.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_free(arena: *mut pllm_arena) {
    guard_or((), || {
        if !arena.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(arena) });
        }
    });
}

/// Changes the size of a budget. A larger size takes effect at once. For a smaller size, the
/// engines first drop cached blocks, then the KV blocks of idle sequences, then preempt the
/// youngest running requests. No request ends, and results do not change. Used blocks are then
/// moved together, and the memory behind them is returned to the system. Engines that are not in a
/// step shrink before this function returns, the others before their next step (see
/// pllm_arena_state).
///
/// Errors: PLLM_E_CAPACITY, with the numbers, if bytes is above most_bytes, or too small for the
/// longest sequence of each engine and for the requests in progress. Any thread may call it at any
/// time.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_resize(arena: *const pllm_arena, bytes: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_arena::get(arena)? }.resize(bytes))
}

/// Reads the size of a budget and the bytes that its engines hold. Any thread may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_state(arena: *const pllm_arena, out_info: *mut pllm_arena_info) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_info, &pllm_arena::get(arena)?.info().into()) })
}

/// Returns the budget of the engine's KV pool: its own, or the one it was created with. Borrowed;
/// valid until the engine is freed. Returns NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_arena(engine: *const pllm_engine) -> *const pllm_arena {
    // SAFETY: the caller's contract.
    unsafe { engine.as_ref() }.map_or(std::ptr::null(), pllm_engine::arena)
}
