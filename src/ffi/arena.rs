use std::sync::Arc;

use super::convert::{self, Versioned, borrow, not_null};
use super::{guard, guard_or, pllm_engine, pllm_error};
use crate::arena::{Arena, ArenaInfo};
use crate::error::Result;
use crate::sys::process::Owner;

/// A budget of KV bytes that engines of this process may share, and that may change while they run. Any thread may use it.
///
/// An engine that needs more than there is asks the others for what they only cache. Those that have requests give it before their next
/// step, so step an engine as long as it has any; of those that have none, the step of the engine that asks takes it.
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

/// An arena as it is now. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_arena_info {
    /// sizeof(pllm_arena_info)
    pub struct_size: u64,
    pub bytes: u64,
    /// What it can be resized to: from least_bytes, for the engines and requests there are, to most_bytes.
    pub least_bytes: u64,
    pub most_bytes: u64,
    /// What the engines hold: more than bytes while they are on their way down.
    pub held_bytes: u64,
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

/// Makes a budget of so many bytes, which pllm_arena_resize may later raise to most_bytes (0: no further). Nothing is allocated:
/// engines made with it (pllm_engine_options.arena) map what most_bytes would take, and touch only what they use. Each needs room
/// for its longest sequence (max_model_len). Free it with pllm_arena_free.
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

/// Lets go of the arena; engines that were made with it keep it alive. NULL is fine. Not for what pllm_engine_arena returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_free(arena: *mut pllm_arena) {
    guard_or((), || {
        if !arena.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(arena) });
        }
    });
}

/// Changes the budget, at any time, from any thread. More is there at once. Where it becomes less, engines go down together: those
/// in which no step is under way before this returns, others before their next step (pllm_arena_info tells). First goes what is only cached, then
/// idle sequences lose their K and V, then the youngest that run are preempted: nothing ends, and the answers are the same. What is left
/// moves together, and the memory beyond goes back to the system. Less than the longest sequences of the engines and the requests
/// under way need is refused with the number that would do: PLLM_E_CAPACITY.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_resize(arena: *const pllm_arena, bytes: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_arena::get(arena)? }.resize(bytes))
}

/// The budget, and what the engines hold of it. May be called from any thread.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_arena_state(arena: *const pllm_arena, out_info: *mut pllm_arena_info) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_info, &pllm_arena::get(arena)?.info().into()) })
}

/// The budget of the engine's KV pool, its own or the one that it was made with, borrowed: it lives as long as the engine. NULL for
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_arena(engine: *const pllm_engine) -> *const pllm_arena {
    // SAFETY: the caller's contract.
    unsafe { engine.as_ref() }.map_or(std::ptr::null(), pllm_engine::arena)
}
