//! Answers the calls of the memory budget: when other engines need memory, the lease is checked
//! between steps too.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, TryLockError};

use super::core::EngineCore;
use super::shared::Shared;
use crate::memory::budget::{Call, Caller};

/// Creates the callback for the budget.
///
/// An engine with requests is stepped by its host or its own thread and then checks its lease. The
/// callback only wakes it, once per need, so that the step of one engine does not do the work of
/// another. An engine without requests is not stepped. The calling thread checks its lease, since
/// it waits for the memory. A host that resizes the budget also does this for every engine that is
/// not stepping.
pub fn callback(core: &Arc<Mutex<EngineCore>>, shared: &Shared) -> Call {
    let (core, called, checks) = (Arc::downgrade(core), shared.wants_check.clone(), shared.budget_checks.clone());
    let snapshots = shared.snapshots.clone();
    let table = Arc::downgrade(&shared.table);
    Arc::new(move |caller| {
        let (Some(core), Some(table)) = (core.upgrade(), table.upgrade()) else { return };
        let again = caller == Caller::StillWaiting;
        if again && table.unfinished() > 0 {
            return;
        }
        // This must come first: a thread that steps, or ends the last request, reads it afterwards.
        called.store(true, SeqCst);
        let will_step = checks.has_steppers() || (caller != Caller::Host && table.unfinished() > 0);
        // The stepping thread checks its lease once more before it sleeps.
        let tell = || {
            if !again {
                table.wakeup.wake()
            }
        };
        if will_step {
            return tell();
        }
        checks.with(|| {
            loop {
                match core.try_lock() {
                    Ok(mut core) => return core.answer_caller(),
                    Err(TryLockError::Poisoned(core)) => return core.into_inner().answer_caller(),
                    Err(TryLockError::WouldBlock) if snapshots.reads_core() => std::thread::yield_now(),
                    Err(TryLockError::WouldBlock) => return tell(),
                }
            }
        });
    })
}

/// Answers the calls that arrived during a step, unless another thread is stepping already.
///
/// After the last request, the lease is checked even without a call, since no further step would
/// return the freed blocks.
pub fn answer_calls(core: &Mutex<EngineCore>, shared: &Shared) {
    if shared.table.unfinished() == 0 {
        shared.wants_check.store(true, SeqCst);
    }
    while shared.wants_check.load(SeqCst) {
        match core.try_lock() {
            Ok(mut core) => core.answer_caller(),
            Err(_) => return,
        }
    }
}
