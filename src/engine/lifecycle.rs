//! The life of sequences, from their command to their last output. Each generation has exactly one
//! last output.

use std::sync::Arc;
use std::time::Duration;

use super::delivery::Delivery;
use super::held_forks::HeldForks;
use super::live_requests::{BestOfGroup, LiveRequests};
use super::masks::Masks;
use super::sequence::Sequence;
use super::sequence_table::SequenceTable;
use super::telemetry::Telemetry;
use super::transfers::Transfers;
use crate::error::{Error, Result};
use crate::output::queue::OutputSender;
use crate::scheduler::{Event, Scheduler, StepPlan};
use crate::text::Text;
use crate::types::outputs::FinishReason;
use crate::types::outputs::Output;
use crate::types::{PinId, RequestId, SeqId};

/// Maximum number of passed deadlines that a step handles. The other requests end in the next
/// steps.
const MAX_OVERDUE: usize = 1024;

/// All that the engine knows of its sequences: where they stand in the scheduler, what is sampled
/// for them, and where their outputs go. `commands` and `results` change it; sequences end here.
pub struct Lifecycle {
    // Large parts are boxed, so that an engine can be created on a small stack.
    pub scheduler: Box<Scheduler>,
    pub live: LiveRequests,
    pub delivery: Delivery,
    pub telemetry: Box<Telemetry>,
    pub transfers: Box<Transfers>,
    pub masks: Masks,
    pub forks: HeldForks,
    pub table: Arc<SequenceTable>,
    pub text: Option<Arc<Text>>,
    pub model: ModelIdentity,
    /// Buffer for the events of a commit.
    pub(super) events: Vec<Event>,
}

/// The properties of the model on which the state of sequences depends.
pub struct ModelIdentity {
    /// Fingerprint of the model, the start of all block hashes.
    pub fingerprint: [u8; 32],
    /// Instruction path that computes K and V.
    pub isa: &'static str,
    /// Maximum length of a sequence in tokens.
    pub max_len: usize,
}

impl Lifecycle {
    /// Creates the state for steps of at most `max_seqs` sequences. `journals` is set if outputs
    /// must have digests.
    pub fn new(
        scheduler: Box<Scheduler>,
        model: ModelIdentity,
        (table, text): (Arc<SequenceTable>, Option<Arc<Text>>),
        telemetry: Box<Telemetry>,
        transfers: Box<Transfers>,
        max_seqs: usize,
        journals: bool,
    ) -> Result<Lifecycle> {
        let mut events = Vec::new();
        events.try_reserve(3 * max_seqs)?;
        let (live, delivery) = (LiveRequests::default(), Delivery::new(max_seqs, journals)?);
        let masks = Masks::new(max_seqs, table.wakeup.clone());
        Ok(Lifecycle { scheduler, live, delivery, telemetry, transfers, masks, forks: HeldForks::default(), table, text, model, events })
    }

    /// Records the generations that a step has started.
    pub fn start(&mut self, plan: &StepPlan, now: Duration) {
        for part in plan.sequences.iter().filter(|part| part.begins && !part.is_stale) {
            if let Some(sequence) = self.live.deliverer_of_mut(part.seq) {
                self.telemetry.started(sequence, now);
                self.table.mark_started(sequence.request, sequence.id);
            }
        }
    }

    /// Ends a sequence. It stays idle if it is kept.
    pub fn release(&mut self, seq: SeqId) {
        self.scheduler.end(seq);
        if self.scheduler.find(seq).is_none() {
            self.live.sequences.remove(&seq);
            self.masks.forget(seq);
        }
    }

    /// Delivers the last output of a sequence: at once, or for a best-of group when all samples
    /// have ended.
    pub fn finish(&mut self, sender: &Arc<OutputSender>, output: Output) {
        let request = output.request;
        let Some(group) = self.live.best_of.get_mut(&request) else { return self.end(sender, output) };
        group.running -= 1;
        if self.scheduler.find(output.sequence).is_none() {
            self.table.remove(output.sequence);
        }
        group.outputs.push(output);
        if group.running > 0 {
            return;
        }
        let BestOfGroup { returned, mut outputs, .. } = self.live.best_of.remove(&request).expect("it was just there");
        let rank = |output: &Output| (output.finish != Some(FinishReason::Error), output.score);
        outputs.sort_by(|a, b| rank(b).partial_cmp(&rank(a)).unwrap_or(std::cmp::Ordering::Equal));
        for (index, output) in outputs.into_iter().enumerate() {
            match index < returned {
                true => self.end(sender, Output { index: index as u32, ..output }),
                false => {
                    self.remove_sequence(output.sequence);
                    self.table.remove(output.sequence);
                }
            }
        }
    }

    /// Delivers the last output of a generation. All generations end here. A sequence that the
    /// scheduler still has stays idle.
    pub fn end(&mut self, sender: &Arc<OutputSender>, output: Output) {
        self.telemetry.counts.count(output.finish);
        self.telemetry.ended(&output);
        self.transfers.store.iter_mut().for_each(|store| store.loads.remove(output.request));
        let kept = self.scheduler.find(output.sequence).map(|sequence| sequence.tokens.len());
        self.table.mark_ended(&output, kept);
        self.delivery.push_last(sender, output);
    }

    /// Ends a sequence as `end` does, together with the sequences of its request that have not been
    /// forked yet.
    pub fn end_with_siblings(&mut self, sender: &Arc<OutputSender>, output: Output) {
        while let Some(index) = self.table.first_pending(output.request, Some(output.index)) {
            self.end(sender, output.for_sample(index));
        }
        self.end(sender, output);
    }

    /// Reports that an idle sequence could not be created. If the host has already resumed it, that
    /// generation has a last output of its own.
    pub fn fail_import(&mut self, sender: &Arc<OutputSender>, output: Output) {
        self.remove_sequence(output.sequence);
        self.table.remove(output.sequence);
        self.telemetry.counts.count(output.finish);
        self.delivery.push(sender, output);
    }

    /// Ends one running sequence between steps.
    pub fn end_sequence(&mut self, seq: SeqId, finish: FinishReason, complete: impl FnOnce(Output) -> Output) {
        if self.scheduler.find(seq).is_some_and(|sequence| sequence.group.is_some()) {
            self.flush_echo(seq);
        }
        // The token was committed before the end.
        if let Some(token) = self.masks.take_token(seq) {
            self.emit_pending_token(seq, token, Ok(false));
        }
        let runs = self.scheduler.find(seq).filter(|sequence| sequence.group.is_some());
        let Some((stays, stats)) = runs.map(|sequence| (sequence.is_kept(), sequence.stats)) else { return };
        let Some(sequence) = self.live.sequences.get_mut(&seq) else { return };
        sequence.generation.timing.set_stats(stats);
        let sender = sequence.generation.sender.clone();
        let branched = sequence.samples.count == 1;
        let output = complete(sequence.close(finish, stays, self.text.as_deref(), self.delivery.empty_output()));
        if !branched {
            // The sequence has not forked yet, so this ends all samples. At most one of them is
            // kept.
            sequence.exclude_samples();
            self.live.best_of.remove(&output.request);
            self.release(seq);
            return self.end_with_siblings(&sender, output);
        }
        self.release(seq);
        self.finish(&sender, output);
    }

    /// Ends the sequences of a group. `group` is its first sequence.
    pub fn end_group(&mut self, group: SeqId, error: &Error) {
        self.unpin(group);
        match self.live.request_of_beam(group) {
            Some(request) => self.end_request(request, FinishReason::Error, |output| output.failed(error.clone())),
            None => {
                for seq in self.scheduler.members(group).collect::<Vec<_>>() {
                    self.end_sequence(seq, FinishReason::Error, |output| output.failed(error.clone()));
                }
            }
        }
    }

    /// Ends all running sequences of a request.
    pub fn end_request(&mut self, request: RequestId, finish: FinishReason, complete: impl Fn(Output) -> Output) {
        self.end_where(request, |_| true, finish, complete);
    }

    /// Ends the running sequences of a request that `which` selects.
    pub fn end_where(
        &mut self,
        request: RequestId,
        which: impl Fn(&Sequence) -> bool,
        finish: FinishReason,
        complete: impl Fn(Output) -> Output,
    ) {
        if self.live.beams.contains_key(&request) && self.live.sequences.get(&request.sequence(0)).is_none_or(|sequence| !which(sequence)) {
            return;
        }
        if let Some(beams) = self.live.beams.remove(&request) {
            request.sequences(beams.width() as u32).for_each(|seq| drop(self.scheduler.remove(seq)));
            if let Some(mut sequence) = self.live.sequences.remove(&request.sequence(0)) {
                let output = complete(sequence.close(finish, false, None, Output::default()));
                self.end_with_siblings(&sequence.generation.sender, output);
            }
            return;
        }
        for seq in self.table.ids(request) {
            if self.live.sequences.get(&seq).is_some_and(|sequence| which(sequence)) {
                self.end_sequence(seq, finish, &complete);
            }
        }
    }

    /// Ends everything: all requests end with an output that `complete` completes, and later calls
    /// return the error.
    pub fn end_all(&mut self, error: &Error, complete: impl Fn(Output) -> Output) {
        self.transfers.cancel_all();
        self.masks.clear();
        self.forks.clear();
        let table = self.table.clone();
        table.fail(error, |sender, last| {
            // A generation that no step has processed is not part of the sequence yet.
            let runs = self.scheduler.find(last.sequence).is_some_and(|sequence| sequence.group.is_some());
            let output = match self.live.sequences.remove(&last.sequence).filter(|_| runs) {
                Some(mut sequence) => {
                    let echo = sequence.take_echo().unwrap_or_default();
                    echo.into_iter().for_each(|echo| self.delivery.push(&sender, echo));
                    sequence.close(FinishReason::Error, false, None, Output::default())
                }
                None => last,
            };
            self.end(&sender, complete(output));
        });
    }

    /// Ends the generations whose deadline has passed: all that run, and a bounded number of
    /// others.
    pub fn end_overdue(&mut self, now: Duration) {
        for _ in 0..MAX_OVERDUE {
            let Some(request) = self.live.deadlines.take_due(now) else { return };
            self.end_due(request, now);
        }
        for _ in 0..self.scheduler.running() {
            let Some(request) = self.running_overdue(now) else { return };
            self.end_due(request, now);
        }
    }

    fn running_overdue(&self, now: Duration) -> Option<RequestId> {
        let mut running = self.scheduler.running_sequences().filter_map(|sequence| self.live.deliverer_of(sequence.id));
        running.find(|sequence| sequence.generation.deadline.is_some_and(|deadline| deadline <= now)).map(|sequence| sequence.request)
    }

    fn end_due(&mut self, request: RequestId, now: Duration) {
        let is_due = |deadline: Option<Duration>| deadline.is_some_and(|deadline| deadline <= now);
        self.end_where(request, |sequence| is_due(sequence.generation.deadline), FinishReason::Deadline, |output| output);
    }

    /// Ends the requests whose outputs could not be queued.
    pub fn end_undeliverable(&mut self) {
        while let Some((request, error)) = self.delivery.next_undeliverable() {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
    }

    /// Removes the pin whose blocks the sequence holds, if there is one.
    pub fn unpin(&mut self, seq: SeqId) {
        if let Some(place) = self.live.pins.iter().position(|pin| pin.sequence() == seq) {
            self.release_pin(place);
        }
    }

    fn release_pin(&mut self, place: usize) {
        let id: PinId = self.live.pins.swap_remove(place);
        self.scheduler.remove(id.sequence());
        self.table.remove_pin(id);
    }

    /// Removes the pins whose sequence the scheduler has removed.
    pub fn remove_lost_pins(&mut self) {
        let mut next = 0;
        while let Some(pin) = self.live.pins.get(next) {
            match self.scheduler.find(pin.sequence()) {
                None => self.release_pin(next),
                Some(_) => next += 1,
            }
        }
    }

    /// Removes a sequence in any state, without an output.
    pub fn remove_sequence(&mut self, id: SeqId) -> Option<Box<Sequence>> {
        self.scheduler.remove(id);
        self.delivery.forget(id);
        self.masks.forget(id);
        self.live.sequences.remove(&id)
    }
}
