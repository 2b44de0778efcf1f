//! The clock of the engine, which simulations and replays can replace.

use std::time::{Duration, Instant};

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// Returns the time since a fixed origin.
    fn now(&self) -> Duration;
}

/// The monotonic clock of the system.
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
