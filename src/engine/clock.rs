//! The time, as the engine reads it: one that a simulation or a replay can turn itself.

use std::time::{Duration, Instant};

pub trait Clock: Send + Sync {
    /// Since some moment that stays the same.
    fn now(&self) -> Duration;
}

/// The machine's own, which never goes back.
pub struct SystemClock {
    began: Instant,
}

impl Default for SystemClock {
    fn default() -> SystemClock {
        SystemClock { began: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }
}
