//! Deadlines: a generation that has not ended by its deadline ends with the tokens it has.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::core::EngineCore;
use crate::error::Result;
use crate::scheduler::FinishReason;
use crate::types::RequestId;

/// A heap of deadlines, the earliest first. Entries of generations that ended earlier stay until
/// their time and have no effect.
#[derive(Default)]
pub struct Deadlines {
    heap: BinaryHeap<Reverse<(Duration, RequestId)>>,
}

impl Deadlines {
    fn add(&mut self, deadline: Duration, request: RequestId) -> Result<()> {
        self.heap.try_reserve(1)?;
        self.heap.push(Reverse((deadline, request)));
        Ok(())
    }

    /// Removes and returns a request whose deadline has passed, once per entry.
    fn take_due(&mut self, now: Duration) -> Option<RequestId> {
        self.first().filter(|&first| first <= now)?;
        self.heap.pop().map(|Reverse((_, request))| request)
    }

    fn first(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse((deadline, _))| *deadline)
    }
}

/// Number of entries, beyond two per sequence, from which stale entries are removed.
const UNCHECKED: usize = 64;

impl EngineCore {
    /// Adds the deadline of a generation of the request.
    pub(super) fn watch(&mut self, request: RequestId, deadline: Option<Duration>) -> Result<()> {
        let Some(deadline) = deadline else { return Ok(()) };
        if self.requests.deadlines.heap.len() >= UNCHECKED + 2 * self.requests.sequences.len() {
            let live = self.requests.sequences.values().filter_map(|sequence| Some(Reverse((sequence.deadline?, sequence.request))));
            self.requests.deadlines.heap.clear();
            self.requests.deadlines.heap.extend(live);
        }
        self.requests.deadlines.add(deadline, request)
    }

    /// Ends the generations whose deadline has passed.
    pub(super) fn end_overdue(&mut self) {
        let now = self.now;
        while let Some(request) = self.requests.deadlines.take_due(now) {
            let is_due = |deadline: Option<Duration>| deadline.is_some_and(|deadline| deadline <= now);
            self.end_where(request, |sequence| is_due(sequence.deadline), FinishReason::Deadline, |output| output);
        }
    }

    /// Returns how long the engine may sleep: until the first deadline or the end of a pin.
    pub fn max_sleep(&self) -> Option<Duration> {
        let pins = self.requests.pins.iter().filter_map(|pin| pin.until);
        let first = pins.chain(self.requests.deadlines.first()).min()?;
        Some(first.saturating_sub(self.shared.clock.now()))
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
