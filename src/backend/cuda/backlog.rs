//! The limit of the work that is queued on a device with other workers.
//!
//! The driver queues about 1,000 launches of a stream, and then a launch blocks the host without a
//! limit. If another worker did not respond, the watchdog could not end that. So the host waits
//! before, where the watchdog ends its wait.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::context::Event;

/// Launches of a window. The host waits for the previous window before it begins the next one. A
/// product by cuBLASLt counts as one launch and has up to three.
const WINDOW: usize = 256;
/// Launches that count as much as an exchange, since the queues of NCCL are shorter.
pub const OF_EXCHANGE: usize = 16;

/// The work that was queued.
pub struct Backlog(Mutex<Windows>);

pub struct Windows {
    /// Launches in the current window.
    count: usize,
    /// Events after the last launches of the previous window and of the one before.
    pub ends: [Event; 2],
}

impl Backlog {
    pub fn new(ends: [Event; 2]) -> Backlog {
        Backlog(Mutex::new(Windows { count: 0, ends }))
    }

    /// Counts launches. If they complete a window, the caller waits for the first end, and records
    /// it.
    pub fn count(&self, launches: usize) -> Option<MutexGuard<'_, Windows>> {
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        windows.count += launches;
        if windows.count < WINDOW {
            return None;
        }
        windows.count = 0;
        windows.ends.swap(0, 1);
        Some(windows)
    }
}
