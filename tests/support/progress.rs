//! Waits that a busy machine slows and does not fail.

use std::time::{Duration, Instant};

/// A wait that makes no progress for this time fails.
const MAX_STALL: Duration = Duration::from_secs(300);

/// Detects a wait without progress.
pub struct Progress {
    counter: u64,
    since: Instant,
}

impl Progress {
    pub fn new() -> Progress {
        Progress { counter: 0, since: Instant::now() }
    }

    /// Panics with `waits_for` if the counter has had this value for too long.
    pub fn check(&mut self, counter: u64, waits_for: impl std::fmt::Display) {
        if counter != self.counter {
            *self = Progress { counter, since: Instant::now() };
        }
        assert!(self.since.elapsed() < MAX_STALL, "no progress for {MAX_STALL:?}: {waits_for}");
    }
}
