//! Threads that hold an engine for a short time between its steps: those of other engines, which
//! check its lease, and readers of snapshots.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

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

    /// Returns whether a thread waits to step.
    pub fn has_steppers(&self) -> bool {
        self.steppers.load(SeqCst) > 0
    }

    /// Runs a check.
    pub fn with<T>(&self, act: impl FnOnce() -> T) -> T {
        self.started.fetch_add(1, SeqCst);
        let _over = CheckGuard(&self.over);
        act()
    }
}

/// A guard that counts a completed check when it is dropped, also by a panic.
struct CheckGuard<'a>(&'a AtomicU64);

impl Drop for CheckGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panicking_budget_check_is_counted_as_completed() {
        let checks = BudgetChecks::default();
        let panic = catch_unwind(AssertUnwindSafe(|| checks.with(|| std::panic::resume_unwind(Box::new("a defect")))));
        assert!(panic.is_err());
        assert_eq!(checks.completed(), Some(1));
    }
}
