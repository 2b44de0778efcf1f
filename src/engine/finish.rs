//! The end of sequences, requests and the engine. Each generation has exactly one last output.

use std::any::Any;
use std::sync::Arc;

use super::Stats;
use super::active_sequence::ActiveSequence;
use super::core::EngineCore;
use super::journal::Journal;
use super::live_requests::BestOfGroup;
use super::outputs::Output;
use super::queue::OutputSender;
use crate::error::Error;
use crate::scheduler::FinishReason;
use crate::sys::quiet;
use crate::types::{RequestId, SeqId};

impl EngineCore {
    /// Ends a sequence. It stays idle if it is kept.
    pub(super) fn release(&mut self, seq: SeqId) {
        self.scheduler.end(seq);
        if self.scheduler.find(seq).is_none() {
            self.requests.sequences.remove(&seq);
        }
    }

    /// Delivers the last output of a sequence: at once, or for a best-of group when all samples
    /// have ended.
    pub(super) fn finish(&mut self, sender: &Arc<OutputSender>, output: Output) {
        let request = output.request;
        let Some(group) = self.requests.best_of.get_mut(&request) else { return self.end(sender, output) };
        group.running -= 1;
        if self.scheduler.find(output.sequence).is_none() {
            self.shared.table.remove(output.sequence);
        }
        group.outputs.push(output);
        if group.running > 0 {
            return;
        }
        let BestOfGroup { returned: wanted, outputs: mut ends, .. } = self.requests.best_of.remove(&request).expect("it was just there");
        let rank = |output: &Output| (output.finish != Some(FinishReason::Error), output.score);
        ends.sort_by(|a, b| rank(b).partial_cmp(&rank(a)).unwrap_or(std::cmp::Ordering::Equal));
        for (index, output) in ends.into_iter().enumerate() {
            match index < wanted {
                true => self.end(sender, Output { index: index as u32, ..output }),
                false => {
                    self.remove_sequence(output.sequence);
                    self.shared.table.remove(output.sequence);
                }
            }
        }
    }

    /// Delivers the last output of a generation. All generations end here. A sequence that the
    /// scheduler still has stays idle.
    pub(super) fn end(&mut self, sender: &Arc<OutputSender>, output: Output) {
        self.telemetry.counts.count(output.finish);
        self.telemetry.ended(&output);
        let kept = self.scheduler.find(output.sequence).map(|sequence| sequence.tokens.len());
        self.shared.table.mark_ended(&output, kept);
        self.push_last(sender, output);
    }

    /// Ends a sequence as `end` does, together with the sequences of its request that have not been
    /// forked yet.
    pub(super) fn end_with_siblings(&mut self, sender: &Arc<OutputSender>, output: Output) {
        while let Some(index) = self.shared.table.open(output.request, Some(output.index)) {
            self.end(sender, output.for_sample(index));
        }
        self.end(sender, output);
    }

    /// Reports that an idle sequence could not be created. If the host has already resumed it, that
    /// generation has a last output of its own.
    pub(super) fn fail_import(&mut self, sender: &Arc<OutputSender>, output: Output) {
        self.remove_sequence(output.sequence);
        self.shared.table.remove(output.sequence);
        self.telemetry.counts.count(output.finish);
        self.push(sender, output);
    }

    /// Ends one running sequence between steps.
    pub(super) fn end_sequence(&mut self, seq: SeqId, finish: FinishReason, complete: impl FnOnce(Output) -> Output) {
        let runs = self.scheduler.find(seq).filter(|sequence| sequence.group.is_some());
        let Some((stays, stats)) = runs.map(|sequence| (sequence.is_kept(), sequence.stats)) else { return };
        let Some(stream) = self.requests.sequences.get_mut(&seq) else { return };
        stream.timing.set_stats(stats);
        let sender = stream.sender.clone();
        let branched = stream.branches == 1;
        let output = complete(stream.close(finish, stays, self.shared.text.as_deref(), self.delivery.empty_output()));
        if !branched {
            // The sequence has not forked yet, so this ends all samples. At most one of them is
            // kept.
            stream.exclude_samples();
            self.requests.best_of.remove(&output.request);
            self.release(seq);
            return self.end_with_siblings(&sender, output);
        }
        self.release(seq);
        self.finish(&sender, output);
    }

    /// Ends the sequences of a group. `group` is its first sequence.
    pub(super) fn end_group(&mut self, group: SeqId, error: &Error) {
        self.unpin(group);
        match self.requests.request_of_beam(group) {
            Some(request) => self.end_request(request, FinishReason::Error, |output| output.failed(error.clone())),
            None => {
                for seq in self.scheduler.members(group).collect::<Vec<_>>() {
                    self.end_sequence(seq, FinishReason::Error, |output| output.failed(error.clone()));
                }
            }
        }
    }

    /// Ends all running sequences of a request.
    pub(super) fn end_request(&mut self, request: RequestId, finish: FinishReason, complete: impl Fn(Output) -> Output) {
        self.end_where(request, |_| true, finish, complete);
    }

    /// Ends the running sequences of a request that `which` selects.
    pub(super) fn end_where(
        &mut self,
        request: RequestId,
        which: impl Fn(&ActiveSequence) -> bool,
        finish: FinishReason,
        complete: impl Fn(Output) -> Output,
    ) {
        if self.requests.beams.contains_key(&request)
            && self.requests.sequences.get(&request.sequence(0)).is_none_or(|sequence| !which(sequence))
        {
            return;
        }
        if let Some(beams) = self.requests.beams.remove(&request) {
            request.sequences(beams.width() as u32).for_each(|seq| drop(self.scheduler.remove(seq)));
            if let Some(mut sequence) = self.requests.sequences.remove(&request.sequence(0)) {
                let output = complete(sequence.close(finish, false, None, Output::default()));
                self.end_with_siblings(&sequence.sender, output);
            }
            return;
        }
        for seq in self.shared.table.ids(request) {
            if self.requests.sequences.get(&seq).is_some_and(&which) {
                self.end_sequence(seq, finish, &complete);
            }
        }
    }

    /// Handles a defect: the state of the core may be inconsistent, so all requests end and later
    /// calls return the error.
    pub(super) fn fail(&mut self, panic: Box<dyn Any + Send>) -> Error {
        let what = quiet::panic_message(&*panic);
        let error = Error::internal(format!("the engine has failed ({what}); free it and create another"));
        self.end_all(&error, |output| output.failed(error.clone()));
        error
    }

    /// Handles the loss of the device: all requests end with the error, and later calls return it.
    pub(super) fn lose_device(&mut self, error: &Error) {
        self.end_all(error, |output| output.failed(error.clone()));
    }

    /// Closes the engine: all requests end, and all readers are notified.
    pub fn close(&mut self) {
        let error = Error::closed("the engine has been freed");
        self.end_all(&error, |output| Output { finish: Some(FinishReason::Abort), error: Some(error.clone()), ..output });
        self.journal.iter_mut().for_each(Journal::close);
        self.publish();
    }

    /// Handles a defect outside of a step, using only the table.
    pub fn fail_without_core(&self) {
        let table = &self.shared.table;
        let error = Error::internal("the engine's thread has failed; free the engine and create another");
        table.fail(&error, |sender, last| {
            sender.push_last(&mut last.failed(error.clone()));
            sender.notify();
        });
        table.close_queues(&error);
    }

    fn end_all(&mut self, error: &Error, complete: impl Fn(Output) -> Output) {
        let table = self.shared.table.clone();
        table.fail(error, |sender, last| {
            // A generation that no step has processed is not part of the stream yet.
            let runs = self.scheduler.find(last.sequence).is_some_and(|sequence| sequence.group.is_some());
            let output = match self.requests.sequences.remove(&last.sequence).filter(|_| runs) {
                Some(mut stream) => stream.close(FinishReason::Error, false, None, Output::default()),
                None => last,
            };
            self.end(&sender, complete(output));
        });
    }
}

impl Stats {
    fn count(&mut self, finish: Option<FinishReason>) {
        match finish {
            Some(FinishReason::Stop) => self.finished_stop += 1,
            Some(FinishReason::Length) => self.finished_length += 1,
            Some(FinishReason::Abort) => self.finished_abort += 1,
            Some(FinishReason::Error) => self.finished_error += 1,
            Some(FinishReason::Deadline) => self.finished_deadline += 1,
            None => {}
        }
    }
}
