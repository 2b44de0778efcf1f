//! What other threads tell the stepping thread between its steps: that there is work, and which
//! queues are full.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Result;
use crate::types::QueueId;
use crate::types::id_map::IdMap;

/// Wakes the sleeping stepping thread. A wake-up before the sleep is not lost.
#[derive(Default)]
pub struct Wakeup {
    is_woken: Mutex<bool>,
    changed: Condvar,
    full: Mutex<FullQueues>,
}

/// The queues that contain as many outputs as they may.
#[derive(Default)]
struct FullQueues {
    ids: IdMap<QueueId, ()>,
    /// Number of changes of `ids`.
    version: u64,
}

impl Wakeup {
    pub fn wake(&self) {
        *self.is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    /// Sleeps until `wake` is called or the time has passed.
    pub fn wait(&self, timeout: Option<Duration>) {
        let woken = self.is_woken.lock().unwrap_or_else(PoisonError::into_inner);
        let not_yet = |woken: &mut bool| !*woken;
        let mut woken = match timeout {
            Some(timeout) => self.changed.wait_timeout_while(woken, timeout, not_yet).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait_while(woken, not_yet).unwrap_or_else(PoisonError::into_inner),
        };
        *woken = false;
    }

    fn full(&self) -> MutexGuard<'_, FullQueues> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves memory for `queues` queues, so that marking them never allocates.
    pub fn reserve(&self, queues: usize) -> Result<()> {
        let mut full = self.full();
        // A map that is at most half full is rehashed in place.
        let more = (2 * queues).saturating_sub(full.ids.len());
        Ok(full.ids.try_reserve(more)?)
    }

    /// Records that a queue is full.
    pub fn mark_full(&self, queue: QueueId) {
        let mut full = self.full();
        full.version += full.ids.insert(queue, ()).is_none() as u64;
    }

    /// Records that a queue is no longer full, and wakes the stepping thread.
    pub fn mark_emptied(&self, queue: QueueId) {
        let mut full = self.full();
        full.version += full.ids.remove(&queue).is_some() as u64;
        drop(full);
        self.wake();
    }

    /// Sets `queues` to the full queues in ascending order if they have changed since `version`.
    /// Returns whether they have.
    pub fn read_full_queues(&self, version: &mut u64, queues: &mut Vec<QueueId>) -> bool {
        let full = self.full();
        // Without memory, the next step tries again.
        if full.version == *version || queues.try_reserve(full.ids.len().saturating_sub(queues.len())).is_err() {
            return false;
        }
        *version = full.version;
        queues.clear();
        queues.extend(full.ids.keys());
        drop(full);
        queues.sort_unstable();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_queues_are_read_once_per_change() {
        let wakeup = Wakeup::default();
        let (mut version, mut queues) = (0, Vec::new());
        let mut read = || wakeup.read_full_queues(&mut version, &mut queues).then(|| queues.clone());
        assert_eq!(read(), None);
        let [first, second] = [3, 1].map(QueueId::from_raw);
        wakeup.mark_full(first);
        wakeup.mark_full(second);
        wakeup.mark_full(second);
        assert_eq!(read(), Some(vec![second, first]));
        assert_eq!(read(), None);
        wakeup.mark_emptied(first);
        assert_eq!(read(), Some(vec![second]));
        wakeup.mark_emptied(first);
        assert_eq!(read(), None, "nothing has changed");
    }

    #[test]
    fn a_wake_up_before_the_sleep_is_not_lost() {
        let wakeup = Wakeup::default();
        wakeup.wake();
        wakeup.wait(None);
    }
}
