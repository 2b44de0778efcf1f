//! Deadlines: a generation that has not ended by its deadline ends with the tokens it has.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::error::Result;
use crate::types::RequestId;

/// A heap of deadlines, the earliest first. Entries of generations that ended earlier stay until
/// their time and have no effect.
#[derive(Default)]
pub struct Deadlines {
    heap: BinaryHeap<Reverse<(Duration, RequestId)>>,
}

/// Number of entries, beyond two per live generation, from which stale entries are removed.
const UNCHECKED: usize = 64;

impl Deadlines {
    pub fn add(&mut self, deadline: Duration, request: RequestId) -> Result<()> {
        self.heap.try_reserve(1)?;
        self.heap.push(Reverse((deadline, request)));
        Ok(())
    }

    /// Returns whether there are so many entries for `live` generations that most must be stale.
    pub fn has_many_stale(&self, live: usize) -> bool {
        self.heap.len() >= UNCHECKED + 2 * live
    }

    /// Replaces all entries. The new ones are not more than the old ones.
    pub fn replace(&mut self, live: impl Iterator<Item = (Duration, RequestId)>) {
        self.heap.clear();
        self.heap.extend(live.map(Reverse));
    }

    /// Removes and returns a request whose deadline has passed, once per entry.
    pub fn take_due(&mut self, now: Duration) -> Option<RequestId> {
        self.first().filter(|&first| first <= now)?;
        self.heap.pop().map(|Reverse((_, request))| request)
    }

    /// Returns the earliest entry.
    pub fn first(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse((deadline, _))| *deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_expire_in_order_and_not_early() {
        let mut deadlines = Deadlines::default();
        let at = Duration::from_millis;
        for (time, request) in [(30, 1), (10, 2), (20, 3)] {
            deadlines.add(at(time), RequestId::from_raw(request)).unwrap();
        }
        assert_eq!(deadlines.take_due(at(9)), None);
        assert_eq!(deadlines.take_due(at(20)), Some(RequestId::from_raw(2)));
        assert_eq!(deadlines.take_due(at(20)), Some(RequestId::from_raw(3)));
        assert_eq!((deadlines.take_due(at(20)), deadlines.first()), (None, Some(at(30))));
    }
}
