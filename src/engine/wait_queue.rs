//! The waiting queue and its limits.

use std::collections::VecDeque;

use crate::error::{Error, Result};
pub use crate::scheduler::simulate::WaitingEntry;
use crate::types::options::EngineOptions;

/// The limits of the waiting queue. The maximum value means no limit.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    pub requests: usize,
    pub tokens: usize,
}

impl QueueLimits {
    pub fn from_options(options: &EngineOptions) -> QueueLimits {
        QueueLimits {
            requests: options.max_waiting_requests.unwrap_or(usize::MAX),
            tokens: options.max_waiting_tokens.unwrap_or(usize::MAX),
        }
    }
}

/// The number of generations that have not had a step, and of the tokens that they must compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitingTotals {
    pub requests: usize,
    pub tokens: usize,
}

impl WaitingTotals {
    /// Checks whether `requests` more requests with `tokens` tokens in total may wait. An empty
    /// queue accepts any single request.
    pub fn check(&self, limits: QueueLimits, requests: usize, tokens: usize) -> Result<()> {
        if self.requests == 0 && requests == 1 {
            return Ok(());
        }
        if requests > limits.requests.saturating_sub(self.requests) {
            return Err(Error::full(format!(
                "the waiting queue is full ({} requests, {requests} more, max_waiting_requests is {}); add the request later",
                self.requests, limits.requests
            )));
        }
        if tokens > limits.tokens.saturating_sub(self.tokens) {
            return Err(Error::full(format!(
                "the waiting queue is full ({} tokens, {tokens} more, max_waiting_tokens is {}); add the request later",
                self.tokens, limits.tokens
            )));
        }
        Ok(())
    }

    pub fn enter(&mut self, tokens: usize) {
        self.requests += 1;
        self.tokens += tokens;
    }

    fn leave(&mut self, tokens: usize) {
        self.requests -= 1;
        self.tokens -= tokens;
    }
}

/// A ticket of the waiting queue. Tickets ascend and are not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The waiting queue in order of arrival. A removed entry leaves a gap. There are at most twice as
/// many places as entries, plus `GAPS`.
#[derive(Debug, Default)]
pub struct WaitQueue {
    entries: VecDeque<(Ticket, Option<WaitingEntry>)>,
    given: u64,
    total: WaitingTotals,
}

const GAPS: usize = 64;

impl WaitQueue {
    pub fn total(&self) -> WaitingTotals {
        self.total
    }

    /// Reserves space for one more entry.
    pub fn reserve(&mut self) -> Result<()> {
        Ok(self.entries.try_reserve(1)?)
    }

    /// Appends an entry, for which space has been reserved.
    pub fn enter(&mut self, waits: WaitingEntry) -> Ticket {
        self.given += 1;
        let place = Ticket(self.given);
        self.entries.push_back((place, Some(waits)));
        self.total.enter(waits.tokens as usize);
        place
    }

    /// Removes an entry without allocating, since it is called in a step.
    pub fn leave(&mut self, place: Option<Ticket>) {
        let Some(Ok(at)) = place.map(|place| self.entries.binary_search_by_key(&place, |&(place, _)| place)) else { return };
        let Some(waits) = self.entries[at].1.take() else { return };
        self.total.leave(waits.tokens as usize);
        while let Some((_, None)) = self.entries.front() {
            self.entries.pop_front();
        }
        if self.entries.len() > GAPS + 2 * self.total.requests {
            self.entries.retain(|(_, waits)| waits.is_some());
        }
    }

    /// Appends the entries among the `max_entries` places after `last`. Returns the last of these
    /// places. `None` if there are no more.
    pub fn copy(&self, last: Option<Ticket>, max_entries: usize, to: &mut Vec<WaitingEntry>) -> Option<Ticket> {
        let from = last.map_or(0, |last| self.entries.partition_point(|&(place, _)| place <= last));
        let piece = self.entries.range(from..self.entries.len().min(from + max_entries));
        to.extend(piece.clone().filter_map(|&(_, waits)| waits));
        piece.last().map(|&(place, _)| place)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_full_waiting_queue_is_an_error_with_the_limits() {
        let limits = QueueLimits { requests: 2, tokens: 100 };
        let mut waiting = WaitingTotals::default();
        waiting.check(limits, 1, 1000).unwrap();
        waiting.enter(60);
        waiting.check(limits, 1, 40).unwrap();
        let error = waiting.check(limits, 1, 41).unwrap_err();
        assert!(error.message().contains("(60 tokens, 41 more, max_waiting_tokens is 100)"), "{error}");
        waiting.enter(40);
        let error = waiting.check(limits, 1, 1).unwrap_err();
        assert!(error.message().contains("(2 requests, 1 more, max_waiting_requests is 2)"), "{error}");
        waiting.leave(60);
        assert_eq!(waiting, WaitingTotals { requests: 1, tokens: 40 });
    }

    fn entry(tokens: usize) -> WaitingEntry {
        WaitingEntry::new(tokens, 9, 0, Duration::ZERO)
    }

    /// Copies the queue in chunks of `chunk` entries and returns the prompt tokens of all entries.
    fn all(queue: &WaitQueue, chunk: usize) -> Vec<u32> {
        let (mut all, mut last) = (Vec::new(), None);
        loop {
            last = queue.copy(last, chunk, &mut all);
            if last.is_none() {
                return all.iter().map(|entry| entry.tokens).collect();
            }
        }
    }

    #[test]
    fn removed_entries_leave_the_others_in_order() {
        let mut queue = WaitQueue::default();
        let tickets: Vec<Ticket> = (1..=1000).map(|tokens| queue.enter(entry(tokens))).collect();
        let mut expected: Vec<u32> = (1..=1000).collect();
        // Entries leave from the middle, from the front, and from the end.
        for i in (0..1000).step_by(3).chain(0..100).chain(700..1000) {
            queue.leave(Some(tickets[i]));
            queue.leave(Some(tickets[i]));
            expected.retain(|&tokens| tokens != i as u32 + 1);
            assert!(queue.entries.len() <= GAPS + 2 * expected.len() + 1, "gaps are removed");
        }
        queue.leave(None);
        let total = WaitingTotals { requests: expected.len(), tokens: expected.iter().sum::<u32>() as usize };
        assert_eq!(queue.total(), total);
        [1, 7, 5000].into_iter().for_each(|chunk| assert_eq!(all(&queue, chunk), expected));
    }

    #[test]
    fn chunked_copies_keep_the_order_while_entries_change() {
        let mut queue = WaitQueue::default();
        let tickets: Vec<Ticket> = (1..=100).map(|tokens| queue.enter(entry(tokens))).collect();
        let mut copied = Vec::new();
        let last = queue.copy(None, 50, &mut copied);
        tickets[..80].iter().for_each(|&ticket| queue.leave(Some(ticket)));
        queue.enter(entry(101));
        assert_eq!(queue.copy(last, 1000, &mut copied), Some(Ticket(101)));
        assert_eq!(copied.iter().map(|entry| entry.tokens).collect::<Vec<_>>(), (1..=50).chain(81..=101).collect::<Vec<_>>());
    }
}
