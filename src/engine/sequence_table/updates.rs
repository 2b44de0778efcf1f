//! What the stepping thread reads and changes in the table: it takes the commands, and reports
//! which generations have started and ended.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{RequestEntry, SequenceTable, TableState};
use crate::engine::command::{Command, PendingOutput};
use crate::engine::sequence_view::SequenceView;
use crate::engine::wait_queue::{WaitQueue, WaitingEntry};
use crate::error::{Error, Result};
use crate::output::queue::{OutputSender, Writers};
use crate::types::outputs::Output;
use crate::types::{PinId, RequestId, SeqId};

impl SequenceTable {
    /// Moves the commands of a step to `commands`. The pins that have expired are among them.
    pub fn take_commands(&self, now: Duration, commands: &mut VecDeque<Command>) {
        let mut state = self.lock();
        let TableState { pins, inbox, .. } = &mut *state;
        pins.retain(|pin| {
            // Without memory for the command, the pin expires in a later step.
            let expires = pin.until.is_some_and(|until| until <= now) && inbox.reserve().is_ok();
            if expires {
                inbox.push(Command::Unpin { id: pin.id }, 0);
            }
            !expires
        });
        inbox.take(commands);
        if inbox.left() > 0 {
            self.wakeup.wake();
        }
    }

    /// Returns when the first pin expires.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.lock().pins.iter().filter_map(|pin| pin.until).min()
    }

    /// Adds a sequence that was created by a step, as one of the samples of a request.
    pub fn insert_fork(&self, seq: SeqId, view: SequenceView) -> Result<()> {
        let mut state = self.lock();
        state.sequences.try_reserve(1)?;
        let priority = state.sequences.get(&view.request.sequence(0)).map_or(0, |first| first.priority);
        state.sequences.insert(seq, SequenceView { priority, ..view });
        Ok(())
    }

    /// Updates the lengths of sequences after a step.
    pub fn update_lengths(&self, lens: impl Iterator<Item = (SeqId, usize)>) {
        let mut state = self.lock();
        let TableState { sequences, inbox, .. } = &mut *state;
        for (seq, len) in lens {
            // The length already includes commands that the step has not applied.
            if let Some(view) = sequences.get_mut(&seq).filter(|view| inbox.is_taken(view.last_command)) {
                view.len = len;
            }
        }
    }

    /// Records the end of a generation. If the sequence is kept, `kept` is its length.
    pub fn mark_ended(&self, output: &Output, kept: Option<usize>) {
        let mut state = self.lock();
        match kept {
            Some(len) => {
                if let Some(view) = state.sequences.get_mut(&output.sequence) {
                    (view.len, view.idle) = (len, true);
                }
            }
            None => drop(state.sequences.remove(&output.sequence)),
        }
        let TableState { requests, waiting, .. } = &mut *state;
        if let Some(ending) = requests.get_mut(&output.request) {
            let is_over = |pending: &mut PendingOutput| pending.last.index == output.index;
            ending.pending.extract_if(.., is_over).for_each(|pending| waiting.leave(pending.ticket));
            if ending.pending.is_empty() {
                requests.remove(&output.request);
            }
        }
    }

    /// Returns the index of the first sequence of the request with a pending last output, except
    /// `beside`.
    pub fn first_pending(&self, request: RequestId, beside: Option<u32>) -> Option<u32> {
        let state = self.lock();
        state.requests.get(&request)?.pending.iter().map(|pending| pending.last.index).find(|&index| Some(index) != beside)
    }

    /// Returns ids that include those of all running sequences of the request.
    pub fn ids(&self, request: RequestId) -> impl Iterator<Item = SeqId> + use<> {
        request.sequences(self.lock().requests.get(&request).map_or(0, |entry| entry.width))
    }

    /// Removes a sequence that was never created or is not returned.
    pub fn remove(&self, seq: SeqId) {
        self.lock().sequences.remove(&seq);
    }

    pub fn remove_pin(&self, id: PinId) {
        self.lock().pins.retain(|pin| pin.id != id);
    }

    /// Removes a generation from the waiting queue after its first step.
    pub fn mark_started(&self, request: RequestId, seq: SeqId) {
        let mut state = self.lock();
        let TableState { requests, waiting, .. } = &mut *state;
        let mut pending = requests.get_mut(&request).into_iter().flat_map(|entry| &mut entry.pending);
        if let Some(pending) = pending.find(|pending| pending.last.sequence == seq) {
            waiting.leave(pending.ticket.take());
        }
    }

    /// Returns whether a request with `tokens` tokens would be admitted to the waiting queue.
    pub fn would_admit(&self, sender: &OutputSender, tokens: usize) -> bool {
        sender.check_space().and_then(|()| self.lock().waiting.total().check(self.limits, 1, tokens)).is_ok()
    }

    /// Returns all waiting entries in order of arrival.
    ///
    /// The lock is held for at most `AT_ONCE` entries (100 KB, some microseconds), so that the call
    /// delays neither the stepping thread nor other callers. Entries that come or go during the
    /// call may be missing or included.
    pub fn waiting(&self) -> Result<Vec<WaitingEntry>> {
        const AT_ONCE: usize = 4096;
        let (mut all, mut last) = (Vec::new(), None);
        loop {
            all.try_reserve(AT_ONCE)?;
            let seen = self.lock().waiting.copy(last, AT_ONCE, &mut all);
            if seen.is_none() {
                return Ok(all);
            }
            last = seen;
        }
    }

    pub fn rejections(&self) -> u64 {
        self.lock().rejections
    }

    pub fn unfinished(&self) -> u64 {
        self.lock().requests.len() as u64
    }

    /// Returns the number of commands that the last step has left.
    pub fn left_commands(&self) -> u64 {
        self.lock().inbox.left() as u64
    }

    /// Makes all later commands fail with `error`. Calls `last` for each pending generation, with
    /// its queue and its last output if it has not started.
    pub fn fail(&self, error: &Error, mut last: impl FnMut(Arc<OutputSender>, Output)) {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| error.clone());
        state.inbox.clear();
        state.sequences.clear();
        state.waiting = WaitQueue::default();
        let mut requests = std::mem::take(&mut state.requests);
        drop(state);
        // Sorted by id, so that a replay has the same order. Without memory for the ids, the order
        // is undefined.
        let mut ids = Vec::new();
        if ids.try_reserve_exact(requests.len()).is_ok() {
            ids.extend(requests.keys().copied());
            ids.sort_unstable();
        }
        let mut end = |entry: RequestEntry| entry.pending.into_iter().for_each(|pending| last(pending.sender, pending.last));
        ids.into_iter().filter_map(|id| requests.remove(&id)).for_each(&mut end);
        requests.into_values().for_each(end);
    }

    /// Closes all queues, after `fail` and the last outputs.
    pub fn close_queues(&self, error: &Error) {
        let senders = self.lock().senders.clone();
        senders.iter().filter_map(Weak::upgrade).for_each(|sender| sender.close(error));
    }
}

impl Writers for SequenceTable {
    fn abort_writers(&self, sender: &Arc<OutputSender>) {
        let mut state = self.lock();
        state.senders.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(sender)));
        // Writers hold a reference too.
        if Arc::strong_count(sender) == 1 {
            return;
        }
        let mut orphans = Vec::new();
        for (&request, entry) in &state.requests {
            let writes = |pending: &&PendingOutput| Arc::ptr_eq(&pending.sender, sender);
            // Without memory for the command, the sequence runs to its end, and its outputs are
            // discarded.
            if orphans.try_reserve(entry.pending.len()).is_err() {
                continue;
            }
            match entry.pending.iter().all(|pending| writes(&pending)) {
                true => orphans.push(Command::Abort { request }),
                // Other sequences of the request were resumed with another queue.
                false => orphans.extend(entry.pending.iter().filter(writes).map(|pending| Command::End { seq: pending.last.sequence })),
            }
        }
        for orphan in &orphans {
            // As above, without memory the sequence runs to its end.
            let _ = match *orphan {
                Command::Abort { request } => state.abort(request),
                Command::End { seq } => state.end(seq),
                _ => Ok(()),
            };
        }
        drop(state);
        if !orphans.is_empty() {
            self.wakeup.wake();
        }
    }
}
