//! Keeps the KV pool within the lease of the engine: before each step, after the last one, and when
//! other engines need memory.

use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use super::core::{EngineCore, Shared};
use super::journal::Journal;
use crate::batch::BlockCopy;
use crate::budget::{Call, Caller, Lease, Need};
use crate::error::Error;

/// The share of the budget that an engine holds for its KV pool.
pub struct PoolLease {
    lease: Arc<Lease>,
    /// The block moves of a shrink, kept so that a shrink need not allocate.
    moves: Vec<BlockCopy>,
}

impl PoolLease {
    pub fn new(lease: Arc<Lease>) -> PoolLease {
        PoolLease { lease, moves: Vec::new() }
    }
}

impl EngineCore {
    /// Resizes the pool as the lease allows. `steps` is set if a step starts now.
    pub(super) fn check_budget(&mut self, steps: bool) {
        self.shared.wants_check.store(false, SeqCst);
        if let Some(recorded) = self.journal.as_mut().and_then(Journal::recorded_resize) {
            recorded.into_iter().for_each(|recorded| self.resize(recorded.blocks, recorded.succeeded));
            return;
        }
        let blocks = self.scheduler.blocks();
        let (pool, used, cached) = (blocks.total(), blocks.used_blocks(), blocks.cached_blocks());
        let need = Need { pool, used, cached, next: self.scheduler.next_need(), steps };
        let total = self.pool.lease.request(need).min(blocks.capacity());
        self.resize(total, true);
    }

    /// Resizes the pool. `works` is false if a journal replays a failure of the device.
    pub(super) fn resize(&mut self, total: usize, works: bool) {
        match total.cmp(&self.scheduler.blocks().total()) {
            Ordering::Less => self.shrink(total, works),
            Ordering::Equal => return,
            Ordering::Greater => self.scheduler.grow(total),
        }
        let worked = self.scheduler.blocks().total() == total;
        self.journal.iter_mut().for_each(|journal| journal.resized(total, worked));
    }

    /// Shrinks the pool and preempts sequences if necessary. If it fails, the pool keeps its size,
    /// and the next step tries again.
    fn shrink(&mut self, total: usize, works: bool) {
        let mut moves = std::mem::take(&mut self.pool.moves);
        let smaller = self.scheduler.shrink_pool(total, &mut moves);
        // Preempted sequences may have transfers to the host tier.
        self.move_blocks();
        let moved = smaller.and_then(|()| match works {
            true => self.runner.shrink(&moves, total),
            false => Err(Error::out_of_memory()),
        });
        if moved.is_ok() {
            self.scheduler.shrink(total, &moves);
            self.pool.lease.release(total);
        }
        self.pool.moves = moves;
    }

    /// Checks the lease on behalf of another engine, while this engine does not step.
    pub(super) fn answer_caller(&mut self) {
        if !self.has_failed() {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.check_budget(false))) {
                self.fail(panic);
            }
            self.publish();
        }
        if self.has_failed() {
            self.release_all();
        }
    }

    /// Returns all memory of a failed engine.
    fn release_all(&mut self) {
        self.shared.wants_check.store(false, SeqCst);
        // After a defect the runner may be inconsistent. If its memory cannot be freed, the lease
        // stays.
        if let Ok(Ok(())) = catch_unwind(AssertUnwindSafe(|| self.runner.shrink(&[], 0))) {
            self.pool.lease.release_all();
        }
    }
}

/// Interval at which a stepping thread checks for active checks.
const A_LITTLE: Duration = Duration::from_micros(50);

/// Counts the threads that check the lease of an engine between its steps.
#[derive(Default)]
pub struct BudgetChecks {
    started: AtomicU64,
    over: AtomicU64,
    /// Number of threads that wait to step. They check the lease themselves.
    steppers: AtomicU64,
}

impl BudgetChecks {
    /// Returns the number of completed checks, or `None` if one is active.
    pub fn completed(&self) -> Option<u64> {
        // `over` must be read first, so that a check that starts later is not counted as completed.
        let over = self.over.load(SeqCst);
        (self.started.load(SeqCst) == over).then_some(over)
    }

    /// Sleeps briefly. Meanwhile no further check starts.
    pub fn wait(&self) {
        self.steppers.fetch_add(1, SeqCst);
        std::thread::sleep(A_LITTLE);
        self.steppers.fetch_sub(1, SeqCst);
    }

    fn with(&self, act: impl FnOnce()) {
        self.started.fetch_add(1, SeqCst);
        let _over = CheckGuard(&self.over);
        act();
    }
}

/// A guard that counts a completed check when it is dropped, also by a panic.
struct CheckGuard<'a>(&'a AtomicU64);

impl Drop for CheckGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// Creates the callback for the budget.
///
/// An engine with requests is stepped by its host or its own thread and then checks its lease. The
/// callback only wakes it, once per need, so that the step of one engine does not do the work of
/// another. An engine without requests is not stepped. The calling thread checks its lease, since
/// it waits for the memory. A host that resizes the budget also does this for every engine that is
/// not stepping.
pub fn callback(core: &Arc<Mutex<EngineCore>>, shared: &Shared) -> Call {
    let (core, called, checks) = (Arc::downgrade(core), shared.wants_check.clone(), shared.budget_checks.clone());
    let table = Arc::downgrade(&shared.table);
    Arc::new(move |caller| {
        let (Some(core), Some(table)) = (core.upgrade(), table.upgrade()) else { return };
        let again = caller == Caller::StillWaiting;
        if again && table.unfinished() > 0 {
            return;
        }
        // This must come first: a thread that steps, or ends the last request, reads it afterwards.
        called.store(true, SeqCst);
        let will_step = checks.steppers.load(SeqCst) > 0 || (caller != Caller::Host && table.unfinished() > 0);
        // The stepping thread checks its lease once more before it sleeps.
        let tell = || {
            if !again {
                table.wakeup.wake()
            }
        };
        if will_step {
            return tell();
        }
        checks.with(|| match core.try_lock() {
            Ok(mut core) => core.answer_caller(),
            Err(TryLockError::Poisoned(core)) => core.into_inner().answer_caller(),
            Err(TryLockError::WouldBlock) => tell(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panicking_budget_check_is_counted_as_completed() {
        let checks = BudgetChecks::default();
        let panic = catch_unwind(AssertUnwindSafe(|| checks.with(|| std::panic::resume_unwind(Box::new("a defect")))));
        assert!(panic.is_err());
        assert_eq!(checks.completed(), Some(1));
    }
}
