//! Commands of the host, applied before the next step.

use std::time::Duration;

use super::LogitsHook;
use super::command::{Command, PendingOutput};
use super::device::Device;
use super::lifecycle::Lifecycle;
use super::live_requests::BestOfGroup;
use super::request::PreparedRequest;
use super::sequence::Generation;
use crate::error::{Error, Result};
use crate::generation::ConstraintState;
use crate::types::outputs::{FinishReason, Output};
use crate::types::timing::Timing;
use crate::types::{RequestId, SeqId};

impl Lifecycle {
    /// Applies a command. Exports and imports use the device.
    pub(super) fn apply_now(&mut self, command: Command, device: &mut Device) {
        if !matches!(command, Command::Export { .. }) {
            // Outputs of later commands come after the exported state.
            self.finish_exports_in_step();
        }
        match command {
            Command::Add { id, prepared } => self.add(id, *prepared),
            Command::End { seq } => self.end_sequence(seq, FinishReason::Abort, |output| output),
            Command::Abort { request } => self.end_request(request, FinishReason::Abort, |output| output),
            Command::Fork { parent, len, children, idle } => self.fork(parent, len, children, idle, device),
            Command::Append { seq, tokens } => {
                let result = self.append(seq, &tokens);
                self.record_outcome(seq, result);
            }
            Command::Rewind { seq, len } => {
                let result = self.rewind(seq, len);
                self.record_outcome(seq, result);
            }
            Command::Continue { seq, keep, hook, deadline, pending, requested_at } => {
                if let Err(error) = self.continue_sequence(seq, keep, hook, Timing::new(requested_at), deadline, &pending) {
                    let last = self.live.sequences.get(&seq).map_or(pending.last, |sequence| sequence.output());
                    self.end(&pending.sender, last.failed(error));
                }
            }
            Command::Resume { seq, keep, generation, pending } => {
                if let Err(error) = self.resume(seq, keep, *generation) {
                    self.end(&pending.sender, pending.last.failed(error));
                }
            }
            Command::Free { seq } => {
                self.end_sequence(seq, FinishReason::Abort, |output| output);
                self.remove_sequence(seq);
            }
            Command::Export { seq, pending } => self.export(seq, *pending, device),
            Command::Import { id, imported } => self.import(id, *imported, device),
            Command::Pin { id, group, priority, .. } => {
                let reserved = self.live.pins.try_reserve(1).map_err(Error::from);
                match reserved.and_then(|()| self.scheduler.pin(id.sequence(), *group, priority)) {
                    Ok(()) => self.live.pins.push(id),
                    Err(_) => self.table.remove_pin(id),
                }
            }
            Command::Unpin { id } => self.unpin(id.sequence()),
        }
    }

    fn add(&mut self, id: RequestId, prepared: PreparedRequest) {
        let PreparedRequest { group, mut sequence, beams, returned, store_wait, .. } = prepared;
        let echoed = sequence.params().echo.then(|| sequence.echo(group.prompt(), self.text.as_deref())).transpose();
        let mut outputs = Vec::new();
        let added = echoed.and_then(|echoed| {
            self.live.sequences.try_reserve(1)?;
            self.live.best_of.try_reserve(1)?;
            if sequence.ranked {
                outputs.try_reserve_exact(sequence.samples.count)?;
            }
            if let Some(mut beams) = beams {
                beams.begin(&sequence.generation.sampling.resolved, group.prompt())?;
                self.live.beams.insert(id, beams);
            }
            self.live.watch(id, sequence.generation.deadline)?;
            self.scheduler.add(id.sequence(0), group)?;
            Ok(echoed.flatten())
        });
        match added {
            Ok(echoed) => {
                if sequence.ranked {
                    self.live.best_of.insert(id, BestOfGroup { returned, running: sequence.samples.count, outputs });
                }
                let sender = sequence.generation.sender.clone();
                self.live.sequences.insert(id.sequence(0), sequence);
                self.begin_lookup(id, store_wait);
                echoed.into_iter().for_each(|output| self.delivery.push(&sender, output));
            }
            Err(error) => {
                let output = sequence.close(FinishReason::Error, false, None, Output::default()).failed(error);
                self.scheduler.remove(id.sequence(0));
                self.live.beams.remove(&id);
                self.end_with_siblings(&sequence.generation.sender, output);
            }
        }
    }

    /// Appends tokens. Does nothing if the sequence has ended and was not kept.
    fn append(&mut self, seq: SeqId, tokens: &[u32]) -> Result<()> {
        let Some(sequence) = self.live.sequences.get_mut(&seq) else { return Ok(()) };
        let before = self.scheduler.get(seq)?.tokens.len();
        if let Err(error) = self.scheduler.append(seq, tokens, self.model.max_len) {
            self.scheduler.rewind(seq, before)?;
            return Err(error);
        }
        // All or nothing.
        sequence.append(tokens, self.text.as_deref()).or_else(|error| self.rewind(seq, before).and(Err(error)))
    }

    fn rewind(&mut self, seq: SeqId, len: usize) -> Result<()> {
        let Some(sequence) = self.live.sequences.get_mut(&seq) else { return Ok(()) };
        self.scheduler.rewind(seq, len)?;
        sequence.rewind(&self.scheduler.get(seq)?.tokens, self.text.as_deref())
    }

    fn resume(&mut self, seq: SeqId, keep: bool, generation: Generation) -> Result<()> {
        let sequence = self.live.sequences.get_mut(&seq).ok_or_else(|| ended_error(seq))?;
        let tokens = &self.scheduler.get(seq)?.tokens;
        let params = generation.sampling.params();
        let (max_new_tokens, prompt_only) = (params.max_tokens.unwrap_or(self.model.max_len), params.is_prompt_only());
        let max_len = tokens.len().saturating_add(max_new_tokens).min(self.model.max_len);
        let (request, deadline) = (sequence.request, generation.deadline);
        sequence.resume(generation, tokens, max_len - tokens.len())?;
        self.live.watch(request, deadline)?;
        self.scheduler.resume(seq, max_len, keep, prompt_only)
    }

    /// Continues an idle sequence with its previous parameters and sampling state.
    fn continue_sequence(
        &mut self,
        seq: SeqId,
        keep: bool,
        hook: Option<LogitsHook>,
        timing: Timing,
        deadline: Option<Duration>,
        pending: &PendingOutput,
    ) -> Result<()> {
        let sequence = self.live.sequences.get_mut(&seq).ok_or_else(|| ended_error(seq))?;
        let generation = &mut sequence.generation;
        (generation.timing, generation.deadline) = (timing, deadline);
        (generation.sender, generation.user_data) = (pending.sender.clone(), pending.last.user_data);
        let sampling = &mut generation.sampling;
        sampling.hook = hook.or(sampling.hook.take());
        if sampling.params().grammar.is_some() && !matches!(sampling.constraint, ConstraintState::Present(_)) {
            return Err(Error::invalid("internal error: the sequence has lost its grammar; resume it with parameters"));
        }
        let (request, prompt_only) = (sequence.request, sequence.params().is_prompt_only());
        self.live.watch(request, deadline)?;
        let max_len = self.scheduler.get(seq)?.max_len();
        self.scheduler.resume(seq, max_len, keep, prompt_only)
    }

    /// Updates the known length after a command. If the command failed, reports the error: a
    /// running sequence ends, an idle one stays idle.
    fn record_outcome(&mut self, seq: SeqId, result: Result<()>) {
        if let Err(error) = result {
            let idle = self.scheduler.find(seq).is_some_and(|sequence| sequence.group.is_none());
            match self.live.sequences.get(&seq).filter(|_| idle) {
                // The sequence stays idle. The output has only the error.
                Some(sequence) => {
                    let (sender, output) = (sequence.generation.sender.clone(), Output { error: Some(error), ..sequence.output() });
                    self.delivery.push(&sender, output);
                }
                None => self.end_sequence(seq, FinishReason::Error, |output| output.failed(error)),
            }
        }
        self.update_length(seq);
    }

    pub(super) fn update_length(&self, seq: SeqId) {
        let len = self.scheduler.find(seq).map(|sequence| (seq, sequence.tokens.len()));
        self.table.update_lengths(len.into_iter());
    }
}

fn ended_error(seq: SeqId) -> Error {
    Error::not_found(format!("sequence {seq} could not be created and cannot be resumed"))
}
