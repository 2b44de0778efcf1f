use std::sync::Arc;

use super::convert::{self, Versioned, borrow, not_null};
use super::{guard, guard_or, pllm_engine, pllm_error};
use crate::error::Result;
use crate::memory::budget::{BudgetInfo, MemoryBudget};
use crate::sys::process::Owner;

/// A memory budget for KV pools. Several engines of a process can share it, and its size can change
/// while they run. Any thread may use it.
///
/// An engine that needs more blocks than are free reclaims blocks that other engines only cache. An
/// engine with requests gives its cached blocks back before its next step, so step every engine
/// that has requests. An engine without requests gives them back at once.
pub struct pllm_budget {
    budget: Arc<MemoryBudget>,
    owner: Owner,
}

impl pllm_budget {
    pub(super) fn new(budget: Arc<MemoryBudget>) -> pllm_budget {
        pllm_budget { budget, owner: Owner::this_process() }
    }

    /// # Safety
    /// As `borrow`.
    pub(super) unsafe fn get<'a>(budget: *const pllm_budget) -> Result<&'a Arc<MemoryBudget>> {
        // SAFETY: the caller's contract.
        let handle = unsafe { borrow("budget", budget) }?;
        handle.owner.check()?;
        Ok(&handle.budget)
    }
}

/// The state of a budget. Set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct pllm_budget_info {
    /// sizeof(pllm_budget_info).
    pub struct_size: u64,
    /// Size of the budget in bytes.
    pub bytes: u64,
    /// Smallest size in bytes to which it can be resized now, given its engines and their requests.
    pub min_bytes: u64,
    /// Largest size in bytes to which it can be resized.
    pub max_bytes: u64,
    /// Bytes that the engines hold. More than bytes while engines are giving blocks back.
    pub held_bytes: u64,
    /// Engines that use the budget.
    pub engines: u64,
}

// SAFETY: repr(C), u64 only.
unsafe impl Versioned for pllm_budget_info {
    const NAME: &'static str = "pllm_budget_info";
    const FIRST_SIZE: usize = 48;
    fn defaults() -> Self {
        pllm_budget_info { struct_size: size_of::<Self>() as u64, ..Default::default() }
    }
}

impl From<BudgetInfo> for pllm_budget_info {
    fn from(info: BudgetInfo) -> pllm_budget_info {
        let BudgetInfo { bytes, max_bytes, min_bytes, held_bytes, engines } = info;
        pllm_budget_info { bytes, min_bytes, max_bytes, held_bytes, engines: engines as u64, ..pllm_budget_info::defaults() }
    }
}

/// Creates a budget of bytes bytes. pllm_budget_resize can later raise it to at most max_bytes (0:
/// to bytes). Nothing is allocated now. Engines created with it (pllm_engine_options.budget)
/// reserve address space for max_bytes and use memory for the blocks they fill. The budget must
/// hold one sequence of max_model_len tokens for each engine.
///
/// Free it with pllm_budget_free.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_budget_create(bytes: u64, max_bytes: u64, out_budget: *mut *mut pllm_budget) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        not_null("out_budget", out_budget)?;
        let most = if max_bytes == 0 { bytes } else { max_bytes };
        out_budget.write(Box::into_raw(Box::new(pllm_budget::new(MemoryBudget::new(bytes, most)?))));
        Ok(())
    })
}

/// Frees the handle. The budget lives until its last engine is freed. NULL is allowed. Do not free
/// the result of pllm_engine_budget.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_budget_free(budget: *mut pllm_budget) {
    guard_or((), || {
        if !budget.is_null() {
            // SAFETY: the caller's contract; it came from Box::into_raw.
            drop(unsafe { Box::from_raw(budget) });
        }
    });
}

/// Changes the size of a budget. A larger size takes effect at once. For a smaller size, the
/// engines first drop cached blocks, then the KV blocks of idle sequences, then preempt the
/// youngest running requests. No request ends, and results do not change. Used blocks are then
/// moved together, and the memory behind them is returned to the system. Engines that are not in a
/// step shrink before this function returns, the others before their next step (see
/// pllm_budget_get_info).
///
/// Errors: PLLM_E_CAPACITY, with the numbers, if bytes is above max_bytes, or too small for the
/// longest sequence of each engine and for the requests in progress. Any thread may call it at any
/// time.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_budget_resize(budget: *const pllm_budget, bytes: u64) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { pllm_budget::get(budget)? }.resize(bytes))
}

/// Reads the size of a budget and the bytes that its engines hold. Any thread may call it.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_budget_get_info(budget: *const pllm_budget, out_info: *mut pllm_budget_info) -> *mut pllm_error {
    // SAFETY: the caller's contract.
    guard(|| unsafe { convert::write(out_info, &pllm_budget::get(budget)?.info().into()) })
}

/// Returns the budget of the engine's KV pool: its own, or the one it was created with. Borrowed;
/// valid until the engine is freed. Returns NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pllm_engine_budget(engine: *const pllm_engine) -> *const pllm_budget {
    // SAFETY: the caller's contract.
    unsafe { engine.as_ref() }.map_or(std::ptr::null(), pllm_engine::budget)
}
