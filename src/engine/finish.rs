//! The end of sequences, requests and the engine. Each turn has exactly one last output.

use std::any::Any;
use std::sync::Arc;

use super::Stats;
use super::active_sequence::ActiveSequence;
use super::core::EngineCore;
use super::journal::Journal;
use super::outputs::Output;
use super::queue::OutputSender;
use crate::error::Error;
use crate::scheduler::FinishReason;
use crate::sys::quiet;

/// A best-of group: samples of which the best are returned when all have ended.
pub struct BestOfGroup {
    pub wanted: usize,
    /// Number of samples that have not ended.
    pub open: usize,
    pub ends: Vec<Output>,
}

impl EngineCore {
    /// Ends a sequence. It stays idle if it is kept.
    pub(super) fn release(&mut self, seq: u64) {
        self.scheduler.end(seq);
        if self.scheduler.find(seq).is_none() {
            self.streams.remove(&seq);
        }
    }

    /// Delivers the last output of a sequence: at once, or for a best-of group when all samples
    /// have ended.
    pub(super) fn finish(&mut self, outbox: &Arc<OutputSender>, output: Output) {
        let request = output.request;
        let Some(contest) = self.contests.get_mut(&request) else { return self.end(outbox, output) };
        contest.open -= 1;
        if self.scheduler.find(output.sequence).is_none() {
            self.shared.registry.remove(output.sequence);
        }
        contest.ends.push(output);
        if contest.open > 0 {
            return;
        }
        let BestOfGroup { wanted, mut ends, .. } = self.contests.remove(&request).expect("it was just there");
        let rank = |output: &Output| (output.finish != Some(FinishReason::Error), output.score);
        ends.sort_by(|a, b| rank(b).partial_cmp(&rank(a)).unwrap_or(std::cmp::Ordering::Equal));
        for (index, output) in ends.into_iter().enumerate() {
            match index < wanted {
                true => self.end(outbox, Output { index: index as u32, ..output }),
                false => {
                    self.remove_sequence(output.sequence);
                    self.shared.registry.remove(output.sequence);
                }
            }
        }
    }

    /// Delivers the last output of a turn. All turns end here. A sequence that the scheduler still
    /// has stays idle.
    pub(super) fn end(&mut self, outbox: &Arc<OutputSender>, output: Output) {
        self.counts.count(output.finish);
        self.insight.ended(&output);
        let kept = self.scheduler.find(output.sequence).map(|sequence| sequence.tokens.len());
        self.shared.registry.mark_ended(&output, kept);
        self.emit_last(outbox, output);
    }

    /// Ends a sequence as `end` does, together with the sequences of its request that have not been
    /// forked yet.
    pub(super) fn end_with_siblings(&mut self, outbox: &Arc<OutputSender>, output: Output) {
        while let Some(index) = self.shared.registry.open(output.request, Some(output.index)) {
            self.end(outbox, output.for_sample(index));
        }
        self.end(outbox, output);
    }

    /// Reports that an idle sequence could not be created. If the host has already resumed it, that
    /// turn has a last output of its own.
    pub(super) fn fail_import(&mut self, outbox: &Arc<OutputSender>, output: Output) {
        self.remove_sequence(output.sequence);
        self.shared.registry.remove(output.sequence);
        self.counts.count(output.finish);
        self.push(outbox, output);
    }

    /// Ends one running sequence between steps.
    pub(super) fn end_sequence(&mut self, seq: u64, finish: FinishReason, complete: impl FnOnce(Output) -> Output) {
        let runs = self.scheduler.find(seq).filter(|sequence| sequence.group.is_some());
        let Some((stays, past)) = runs.map(|sequence| (sequence.keep, sequence.past)) else { return };
        let Some(stream) = self.streams.get_mut(&seq) else { return };
        stream.timing.set_stats(past);
        let outbox = stream.outbox.clone();
        let branched = stream.branches == 1;
        let output = complete(stream.close(finish, stays, self.shared.text.as_deref(), std::mem::take(&mut self.blank)));
        if !branched {
            // The sequence has not forked yet, so this ends all samples. At most one of them is
            // kept.
            stream.exclude_samples();
            self.contests.remove(&output.request);
            self.release(seq);
            return self.end_with_siblings(&outbox, output);
        }
        self.release(seq);
        self.finish(&outbox, output);
    }

    /// Ends all running sequences of a request.
    pub(super) fn end_request(&mut self, request: u64, finish: FinishReason, complete: impl Fn(Output) -> Output) {
        self.end_where(request, |_| true, finish, complete);
    }

    /// Ends the running sequences of a request that `which` selects.
    pub(super) fn end_where(
        &mut self,
        request: u64,
        which: impl Fn(&ActiveSequence) -> bool,
        finish: FinishReason,
        complete: impl Fn(Output) -> Output,
    ) {
        if self.beams.contains_key(&request) && self.streams.get(&request).is_none_or(|stream| !which(stream)) {
            return;
        }
        if let Some(beams) = self.beams.remove(&request) {
            (request..request + beams.width() as u64).for_each(|seq| drop(self.scheduler.remove(seq)));
            if let Some(mut stream) = self.streams.remove(&request) {
                let output = complete(stream.close(finish, false, None, Output::default()));
                self.end_with_siblings(&stream.outbox, output);
            }
            return;
        }
        for seq in self.shared.registry.ids(request) {
            if self.streams.get(&seq).is_some_and(&which) {
                self.end_sequence(seq, finish, &complete);
            }
        }
    }

    /// Handles a defect: the state of the core may be inconsistent, so all requests end and later
    /// calls return the error.
    pub(super) fn fail(&mut self, panic: Box<dyn Any + Send>) -> Error {
        let what = quiet::said(&*panic);
        let error = Error::internal(format!("a defect of libpagedllm stopped this engine: {what}; free it and create another"));
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

    /// Handles a defect outside of a step, using only the registry.
    pub fn fail_without_core(&self) {
        let registry = &self.shared.registry;
        let error = Error::internal("a defect of libpagedllm stopped this engine's thread; free it and create another");
        registry.fail(&error, |outbox, last| {
            outbox.push_last(&mut last.failed(error.clone()));
            outbox.notify();
        });
        registry.close_queues(&error);
    }

    fn end_all(&mut self, error: &Error, complete: impl Fn(Output) -> Output) {
        let registry = self.shared.registry.clone();
        registry.fail(error, |outbox, last| {
            // A turn that no step has processed is not part of the stream yet.
            let runs = self.scheduler.find(last.sequence).is_some_and(|sequence| sequence.group.is_some());
            let output = match self.streams.remove(&last.sequence).filter(|_| runs) {
                Some(mut stream) => stream.close(FinishReason::Error, false, None, Output::default()),
                None => last,
            };
            self.end(&outbox, complete(output));
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
