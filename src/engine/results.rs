//! The results of a step: commits the sampled tokens and turns them into outputs.

use super::lifecycle::Lifecycle;
use super::masks::{Advance, PendingToken};
use super::sampling::{SampleResult, SampledStep, TopLogprobs};
use super::sequence::Sequence;
use super::sequence_view::SequenceView;
use super::step_inputs::Inputs;
use crate::error::try_copy;
use crate::error::{Error, Result};
use crate::generation::grammar::MaskId;
use crate::generation::output_processor::NewToken;
use crate::generation::sampler::branch_seed;
use crate::scheduler::{Event, SampledToken, StepPlan};
use crate::types::outputs::{FinishReason, Output};
use crate::types::timing::SequenceStats;
use crate::types::{RequestId, SeqId};

impl Lifecycle {
    /// Commits a computed plan with its sampled tokens, and queues its outputs.
    pub fn commit(&mut self, plan: StepPlan, step: &mut SampledStep, source: &mut dyn Inputs) {
        let mut events = std::mem::take(&mut self.events);
        let sampled = std::mem::take(&mut step.tokens);
        self.telemetry.computed(&plan);
        self.masks.begin_commit();
        // The state of an exported sequence comes before the tokens that follow it.
        self.finish_exports_in_step();
        self.emit_prefill_progress(&plan);
        self.commit_beams(&plan, step);
        self.scheduler.commit(plan, &sampled, &mut events);
        self.emit_prompt_logprobs(step);
        for event in &events {
            match *event {
                // Tokens of beams are delivered when the search has finished.
                Event::Forked { sampled_token } | Event::Advanced { sampled_token, .. } if self.is_beam(&sampled[sampled_token]) => {}
                Event::Forked { sampled_token } => self.start_sample(&sampled[sampled_token], step),
                Event::Advanced { sampled_token, finish, stats } => {
                    let (child, result) = (sampled[sampled_token].child, &step.results[sampled_token]);
                    self.emit_token(child, result, &step.tops, finish, stats, source)
                }
                Event::Failed { sampled_token } => self.fail_sample(&sampled[sampled_token], Error::out_of_memory(), step),
                Event::Dropped { .. } => {}
            }
        }
        self.end_failed(step);
        self.end_beams();
        let len = |sampled_token: &SampledToken| Some((sampled_token.child, self.scheduler.find(sampled_token.child)?.tokens.len()));
        self.table.update_lengths(sampled.iter().filter_map(len));
        (self.events, step.tokens) = (events, sampled);
    }

    fn emit_prefill_progress(&mut self, plan: &StepPlan) {
        // The scheduler counts the tokens of beams, too, and forgets the others when a sequence
        // continues.
        for part in plan.sequences.iter().filter(|part| !part.samples && !part.is_stale && part.generated == 0) {
            let Some(sequence) = self.live.sequences.get(&part.seq).filter(|sequence| sequence.reports_progress()) else { continue };
            let output = sequence.prefill_progress(part.first + part.tokens, self.delivery.empty_output());
            self.delivery.push(&sequence.generation.sender, output);
        }
    }

    fn emit_prompt_logprobs(&mut self, step: &mut SampledStep) {
        let SampledStep { prompts, failed, .. } = step;
        for (seq, logprobs, top) in prompts.iter() {
            let Some(sequence) = self.live.sequences.get_mut(&seq) else { continue };
            let (request, sender) = (sequence.request, sequence.generation.sender.clone());
            match sequence.emit_prompt(logprobs, top, self.delivery.empty_output()) {
                Ok(outputs) => outputs.into_iter().flatten().for_each(|output| self.delivery.push(&sender, output)),
                Err(error) => failed.push((request, error)),
            }
        }
    }

    /// Delivers an echo that is still pending: the sequence ends, or its first token comes after a
    /// rewind has shortened the prompt to tokens that had been computed.
    pub(super) fn flush_echo(&mut self, seq: SeqId) {
        let Some(sequence) = self.live.sequences.get_mut(&seq).filter(|sequence| sequence.has_echo()) else { return };
        let (sender, echo) = (sequence.generation.sender.clone(), sequence.take_echo());
        match echo {
            Ok(output) => output.into_iter().for_each(|output| self.delivery.push(&sender, output)),
            Err(error) => self.end_sequence(seq, FinishReason::Error, |output| output.failed(error)),
        }
    }

    /// Creates the sequence of a sample when the first token of its parent is sampled several
    /// times.
    fn start_sample(&mut self, sampled_token: &SampledToken, step: &mut SampledStep) {
        self.flush_echo(sampled_token.parent);
        let reserved = self.live.sequences.try_reserve(1).map_err(Error::from);
        let Some(unstarted) = self.live.sequences.get_mut(&sampled_token.parent).map(|parent| parent.samples.preallocated.pop()) else {
            self.scheduler.remove(sampled_token.child);
            return;
        };
        match reserved.and_then(|()| self.sample_of(&self.live.sequences[&sampled_token.parent], unstarted, sampled_token.child)) {
            Ok((sequence, echo)) => {
                let sender = sequence.generation.sender.clone();
                self.live.sequences.insert(sampled_token.child, sequence);
                echo.into_iter().for_each(|output| self.delivery.push(&sender, output));
            }
            Err(error) => {
                self.scheduler.remove(sampled_token.child);
                self.fail_sample(sampled_token, error, step);
            }
        }
    }

    /// Returns the sequence of a sample, and the output with the echoed prompt.
    fn sample_of(&self, parent: &Sequence, unstarted: Option<Box<Sequence>>, child: SeqId) -> Result<(Box<Sequence>, Option<Output>)> {
        let index = parent.request.sample_of(child).expect("a sample has an id of its request");
        let mut sequence = match unstarted {
            Some(mut sequence) => sequence.copy(parent).map(|()| sequence),
            None => parent.fork(),
        }?;
        (sequence.id, sequence.index) = (child, index);
        let sampling = &mut sequence.generation.sampling;
        sampling.seed = branch_seed(sampling.seed, index as usize);
        let echo = parent.repeat_echo(&sequence)?;
        self.table.insert_fork(child, SequenceView::from_sequence(&sequence, parent.generation.sampling.prompt_len()))?;
        Ok((sequence, echo))
    }

    fn fail_sample(&mut self, sampled_token: &SampledToken, error: Error, step: &mut SampledStep) {
        if let Some(request) = self.live.request_of_beam(sampled_token.parent) {
            return step.failed.push((request, error));
        }
        let Some(parent) = self.live.sequences.get(&sampled_token.parent) else { return };
        let index = parent.request.sample_of(sampled_token.child).expect("a sample has an id of its request");
        let output = parent.output().for_sample(index).failed(error);
        let sender = parent.generation.sender.clone();
        self.finish(&sender, output);
    }

    /// Turns a committed sampled token into an output. If its grammar takes long, the output
    /// follows with the mask.
    fn emit_token(
        &mut self,
        seq: SeqId,
        result: &SampleResult,
        tops: &TopLogprobs,
        finish: Option<FinishReason>,
        stats: SequenceStats,
        source: &mut dyn Inputs,
    ) {
        self.flush_echo(seq);
        let Some(sequence) = self.live.sequences.get_mut(&seq) else { return };
        sequence.samples.finish();
        sequence.generation.timing.set_stats(stats);
        let is_prompt_only = sequence.params().is_prompt_only();
        if is_prompt_only {
            self.telemetry.prompt_ends(sequence);
        }
        let mut close = |finish| {
            let (stays, text, reusable) = (self.scheduler.find(seq).is_some(), self.text.as_deref(), self.delivery.empty_output());
            sequence.close(finish, stays, text, reusable)
        };
        let new = match result {
            Err(why) => {
                let output = close(FinishReason::Error).failed(why.clone());
                return self.deliver(seq, output);
            }
            Ok(_) if is_prompt_only => {
                let output = close(FinishReason::Length);
                return self.deliver(seq, output);
            }
            Ok(new) => new,
        };
        let top = &tops.all[new.top.clone()];
        let complete = match self.masks.advance(&mut sequence.generation.sampling.constraint, new.sample.token, source) {
            Advance::Known(complete) => complete,
            // The end of the grammar does not change an output that is the last one.
            Advance::Pending(_) if finish == Some(FinishReason::Stop) => Ok(false),
            Advance::Pending(id) => match self.hold_token(id, seq, new, top, finish, stats) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
        };
        self.deliver_token(seq, new, top, complete, finish, stats);
    }

    /// Keeps a committed token until another thread has advanced the grammar.
    fn hold_token(
        &mut self,
        id: MaskId,
        seq: SeqId,
        new: &NewToken,
        top: &[(u32, f32)],
        finish: Option<FinishReason>,
        stats: SequenceStats,
    ) -> Result<()> {
        let token = PendingToken { new: new.clone(), top: try_copy(top)?, finish, stats };
        let sequence = self.live.sequences.get_mut(&seq).expect("its token has just been sampled");
        self.masks.hold(id, (sequence.request, seq), &mut sequence.generation.sampling.constraint, token)?;
        self.scheduler.invalidate(seq);
        Ok(())
    }

    /// Delivers a token that was pending.
    pub(super) fn emit_pending_token(&mut self, seq: SeqId, token: PendingToken, complete: Result<bool>) {
        let PendingToken { new, top, finish, stats } = token;
        self.deliver_token(seq, &new, &top, complete, finish, stats);
    }

    /// Delivers a token. A stop string in its text, or the end of the grammar, ends the sequence.
    fn deliver_token(
        &mut self,
        seq: SeqId,
        new: &NewToken,
        top: &[(u32, f32)],
        complete: Result<bool>,
        finish: Option<FinishReason>,
        stats: SequenceStats,
    ) {
        let Some(sequence) = self.live.sequences.get_mut(&seq) else { return };
        self.telemetry.counts.generated_tokens += 1;
        self.telemetry.token(sequence, stats);
        let output = sequence.advance(new, top, complete, finish, self.text.as_deref(), self.delivery.empty_output());
        self.deliver(seq, output);
    }

    /// Delivers an output of a generation, which may be the last one.
    fn deliver(&mut self, seq: SeqId, output: Output) {
        let Some(sequence) = self.live.sequences.get_mut(&seq) else { return };
        if !sequence.is_delivered(&output) {
            self.delivery.reuse(output);
            return;
        }
        let sender = sequence.generation.sender.clone();
        match output.finish {
            None => self.delivery.push(&sender, output),
            Some(finish) => {
                if finish == FinishReason::Stop {
                    // The scheduler has already removed a sequence that ended in another way.
                    self.scheduler.record_length(seq);
                }
                self.release(seq);
                self.finish(&sender, output);
            }
        }
    }

    fn is_beam(&self, sampled_token: &SampledToken) -> bool {
        self.live.request_of_beam(sampled_token.parent).is_some()
    }

    fn commit_beams(&mut self, plan: &StepPlan, step: &mut SampledStep) {
        for part in plan.sampled() {
            // Once per search, for its first beam.
            let Some(request) = self.live.request_of_beam(part.seq) else { continue };
            if self.scheduler.members(part.seq).next() != Some(part.seq) || step.has_failed(request) {
                continue;
            }
            let stats = self.scheduler.find(part.seq).map_or(SequenceStats::default(), |sequence| sequence.stats);
            let sequence = self.live.sequences.get_mut(&request.sequence(0)).expect("a search has a sequence");
            self.telemetry.token(sequence, stats);
            let beams = self.live.beams.get_mut(&request).expect("it was just found");
            match beams.commit(&sequence.generation.sampling.resolved) {
                Ok(()) => {}
                Err(error) => step.failed.push((request, error)),
            }
        }
    }

    fn end_failed(&mut self, step: &mut SampledStep) {
        for (request, error) in step.failed.drain(..) {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
    }

    /// Ends completed searches with their results.
    fn end_beams(&mut self) {
        while let Some((&request, _)) = self.live.beams.iter().find(|(_, beams)| beams.is_done()) {
            if let Err(error) = self.emit_beams(request) {
                self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
            }
        }
    }

    fn emit_beams(&mut self, request: RequestId) -> Result<()> {
        let best = self.live.beams[&request].best()?;
        let sequence = &self.live.sequences[&request.sequence(0)];
        let mut outputs = Vec::new();
        for (index, hypothesis) in best.iter().enumerate() {
            outputs.push(sequence.hypothesis(index as u32, hypothesis, self.text.as_deref())?);
        }
        let sender = sequence.generation.sender.clone();
        let missing = sequence.output().failed(Error::invalid(
            "the search found fewer than n beams, because too many tokens are excluded; allow more tokens or lower n",
        ));
        self.live.beams.remove(&request);
        self.live.sequences.remove(&request.sequence(0));
        while let Some(index) = self.table.first_pending(request, None) {
            let output = outputs.get_mut(index as usize).map_or_else(|| missing.for_sample(index), std::mem::take);
            self.telemetry.counts.generated_tokens += output.tokens.len() as u64;
            self.end(&sender, output);
        }
        Ok(())
    }
}
