//! Sampling: from the logits of a step to its sampled. Changes no lengths.

use std::collections::BTreeMap;

use super::active_sequence::{ActiveSequence, NewToken};
use super::beams::{Beams, request_of_beam};
use super::request::branch_seed;
use crate::batch::device_sampling::{DeviceSample, DeviceSampling};
use crate::decode::{self, Constraint, Context, Masker, NoChoice, Sample, Sampler, logprob_and_top, logprob_of};
use crate::error::{Error, Result};
use crate::scheduler::{IdMap, SampledToken, ScheduledSequence, Scheduler, StepPlan, TokenOutcome};
use crate::types::{RequestId, SeqId};

/// The result for one row, delivered after the commit.
pub type SampleResult = Result<NewToken>;

/// The most probable tokens for all sampled rows, one list after the other.
#[derive(Default)]
pub struct TopLogprobs {
    pub all: Vec<(u32, f32)>,
    /// Buffer for one row.
    row: Vec<(u32, f32)>,
}

impl TopLogprobs {
    /// Returns the log probability of `token`, and appends those of the `k` most probable tokens.
    fn add(&mut self, logits: &[f32], token: u32, k: usize) -> Result<f32> {
        let logprob = logprob_and_top(logits, token, k, &mut self.row)?;
        self.all.try_reserve(self.row.len())?;
        self.all.extend_from_slice(&self.row);
        Ok(logprob)
    }

    /// Does the same for a token that the device has sampled.
    fn add_device_sample(&mut self, device_sample: &DeviceSample, k: usize) -> Result<f32> {
        let tops =
            device_sample.tops.get(..k).ok_or_else(|| Error::internal(format!("the device reported fewer than {k} tokens of a sample")))?;
        self.all.try_reserve(k)?;
        self.all.extend(tops.iter().map(|top| (top.token, logprob_of(device_sample, top.logit))));
        Ok(logprob_of(device_sample, device_sample.logit))
    }
}

/// The log probabilities of prompt tokens that this step computed.
#[derive(Default)]
pub struct PromptLogprobs {
    logprobs: Vec<f32>,
    tops: TopLogprobs,
    /// The end of each sequence in both lists: (sequence, log probabilities, top tokens).
    ends: Vec<(SeqId, usize, usize)>,
}

impl PromptLogprobs {
    pub fn clear(&mut self) {
        self.logprobs.clear();
        self.tops.all.clear();
        self.ends.clear();
    }

    /// Returns the log probabilities and the top tokens of each sequence.
    pub fn iter(&self) -> impl Iterator<Item = (SeqId, &[f32], &[(u32, f32)])> {
        let starts = std::iter::once((0, 0)).chain(self.ends.iter().map(|&(_, logprobs, top)| (logprobs, top)));
        self.ends.iter().zip(starts).map(|(end, start)| (end.0, &self.logprobs[start.0..end.1], &self.tops.all[start.1..end.2]))
    }
}

/// The state of one sampling pass, while the logits of the runner are borrowed.
pub struct SamplingPass<'a> {
    pub scheduler: &'a Scheduler,
    pub sequences: &'a mut IdMap<SeqId, ActiveSequence>,
    pub lost: &'a [(SeqId, Error)],
    pub beams: &'a mut BTreeMap<RequestId, Box<Beams>>,
    pub sampler: &'a mut Sampler,
    pub edited: &'a mut Vec<f32>,
    pub sampled: &'a mut Vec<SampledToken>,
    pub decisions: &'a mut Vec<SampleResult>,
    pub tops: &'a mut TopLogprobs,
    pub prompts: &'a mut PromptLogprobs,
    pub stuck: &'a mut Vec<(RequestId, Error)>,
}

impl SamplingPass<'_> {
    /// Samples one part. `rows` are the logits of its last rows. They are undefined if the device
    /// has sampled the token.
    pub fn sample(&mut self, part: &ScheduledSequence, rows: &[f32], vocab: usize, device_sample: Option<&DeviceSample>) -> Result<()> {
        if let Some(device_sample) = device_sample {
            return self.take_device_sample(part, device_sample);
        }
        self.prompt(part, rows, vocab)?;
        if !part.samples {
            return Ok(());
        }
        let logits = &rows[rows.len() - vocab..];
        match request_of_beam(self.beams, part.seq) {
            Some(request) => {
                self.beam(request, part.seq, logits);
                Ok(())
            }
            None => self.samples(part, logits),
        }
    }

    /// Computes the log probabilities of prompt tokens, each from the logits of the previous row.
    fn prompt(&mut self, part: &ScheduledSequence, rows: &[f32], vocab: usize) -> Result<()> {
        let Some(sequence) = self.sequences.get(&part.seq) else { return Ok(()) };
        let Some(k) = sequence.sampling.params.prompt_logprobs else { return Ok(()) };
        let tokens = &self.scheduler.get(part.seq)?.tokens[..sequence.prompt_len];
        let first = part.first + part.rows - part.logits + 1;
        let emitted = tokens.get(first..).unwrap_or_default();
        let count = emitted.len().min(rows.len() / vocab);
        let PromptLogprobs { logprobs, tops, ends } = &mut *self.prompts;
        logprobs.try_reserve(count)?;
        ends.try_reserve(1)?;
        for (&token, logits) in emitted.iter().zip(rows.chunks_exact(vocab)) {
            logprobs.push(tops.add(logits, token, k as usize)?);
        }
        if count > 0 {
            ends.push((part.seq, logprobs.len(), tops.all.len()));
        }
        Ok(())
    }

    /// Samples one token, or one per sample at the end of a prompt.
    fn samples(&mut self, part: &ScheduledSequence, logits: &[f32]) -> Result<()> {
        let tokens = &self.scheduler.get(part.seq)?.tokens;
        let sequence =
            self.sequences.get_mut(&part.seq).ok_or_else(|| Error::internal("a sequence that the engine does not know was sampled"))?;
        let edited = edit(sequence, tokens, logits, self.edited)?;
        let lost = self.lost.iter().find(|(seq, _)| *seq == part.seq).map(|(_, error)| error.clone());
        // The mask has been computed before the logits.
        let mut constraint = sequence.constraint.take();
        let allowed = lost.map_or(Ok(()), Err).and_then(|()| constraint.as_mut().map(Constraint::mask).transpose());
        for i in 0..sequence.branches {
            let ActiveSequence { sampling, sampling_history: memory, prompt_len, generated, .. } = &*sequence;
            let seed = branch_seed(sequence.seed, i);
            let decision = allowed.clone().and_then(|allowed| {
                let context = Context { tokens, prompt_len: *prompt_len, generated: *generated, seed, history: memory, allowed };
                let chosen = self.sampler.choose(edited, sampling, &context);
                advance(sequence, logits, chosen.map_err(|why| attribute(why, sequence))?, self.tops)
            });
            let child = sequence.request.sequence(sequence.index + i as u32);
            self.sampled.push(SampledToken { parent: part.seq, child, outcome: outcome(sequence, &decision) });
            self.decisions.push(decision);
        }
        sequence.constraint = constraint;
        Ok(())
    }

    /// Takes the token that the device has sampled.
    fn take_device_sample(&mut self, part: &ScheduledSequence, device_sample: &DeviceSample) -> Result<()> {
        let sequence =
            self.sequences.get(&part.seq).ok_or_else(|| Error::internal("a sequence that the engine does not know was sampled"))?;
        let decision = match decode::chosen(device_sample) {
            Err(why) => Err(attribute(why, sequence)),
            Ok(chosen) => {
                let first = self.tops.all.len();
                let k = sequence.sampling.params.logprobs.unwrap_or(0) as usize;
                let logprob = if sequence.needs_logprobs() { self.tops.add_device_sample(device_sample, k)? } else { 0.0 };
                Ok(NewToken { chosen, logprob, top: first..self.tops.all.len() })
            }
        };
        self.sampled.push(SampledToken { parent: part.seq, child: part.seq, outcome: outcome(sequence, &decision) });
        self.decisions.push(decision);
        Ok(())
    }

    /// Stores the row of a beam. After the last beam, the search decides. An error ends only this
    /// request.
    fn beam(&mut self, request: RequestId, seq: SeqId, logits: &[f32]) {
        if self.stuck.iter().any(|(stuck, _)| *stuck == request) {
            return;
        }
        if let Err(error) = self.try_beam(request, seq, logits) {
            self.stuck.push((request, error));
        }
    }

    fn try_beam(&mut self, request: RequestId, seq: SeqId, logits: &[f32]) -> Result<()> {
        let sequence = &self.sequences[&request.sequence(0)];
        let beams = self.beams.get_mut(&request).expect("it was just found");
        let slot = request.sample_of(seq).expect("it was just found");
        beams.read(slot as usize, logits)?;
        if self.scheduler.members(seq).next_back() != Some(seq) {
            return Ok(());
        }
        let tokens_in = |slot: usize| Ok(self.scheduler.get(request.sequence(slot as u32))?.tokens.as_slice());
        for next in &beams.decide(self.sampler, &sequence.sampling, sequence.prompt_len, tokens_in)?.next {
            let (parent, child) = (request.sequence(next.parent as u32), request.sequence(next.slot as u32));
            self.sampled.push(SampledToken { parent, child, outcome: TokenOutcome::Token(next.token) });
            self.decisions.push(Ok(NewToken::default()));
        }
        Ok(())
    }
}

/// Plans sampling on the device for sequences that need one token and whose logits are not used
/// otherwise.
pub fn plan_device_sampling(
    device_sampling: &mut DeviceSampling,
    plan: &StepPlan,
    vocab: usize,
    scheduler: &Scheduler,
    sequences: &mut IdMap<SeqId, ActiveSequence>,
    beams: &BTreeMap<RequestId, Box<Beams>>,
    lost: &[(SeqId, Error)],
) -> Result<()> {
    let mut row = 0;
    for part in plan.sequences.iter().filter(|part| part.logits > 0) {
        row += part.logits;
        let is_lost = lost.iter().any(|(seq, _)| *seq == part.seq);
        let is_one = part.samples && part.logits == 1 && !is_lost && request_of_beam(beams, part.seq).is_none();
        let Some(sequence) = sequences.get_mut(&part.seq).filter(|sequence| is_one && sequence.allows_device_sampling()) else { continue };
        let tokens = &scheduler.get(part.seq)?.tokens;
        let mut constraint = sequence.constraint.take();
        // If the mask fails here, it fails again in `samples`, which reports the error.
        if let Ok(allowed) = constraint.as_mut().map(Constraint::mask).transpose() {
            let ActiveSequence { sampling, sampling_history: memory, prompt_len, generated, seed, .. } = &*sequence;
            let seed = branch_seed(*seed, 0);
            let context = Context { tokens, prompt_len: *prompt_len, generated: *generated, seed, history: memory, allowed };
            let logprobs = sequence.needs_logprobs().then(|| sampling.params.logprobs.unwrap_or(0));
            decode::plan_draw(device_sampling, row as u32 - 1, vocab, logprobs, sampling, &context);
        }
        sequence.constraint = constraint;
    }
    Ok(())
}

pub fn collect_masks(masker: &mut Option<Masker>, sequences: &mut IdMap<SeqId, ActiveSequence>, lost: &mut Vec<(SeqId, Error)>) {
    // A sequence whose step is retried still has no grammar, so its error stays.
    lost.retain(|(seq, _)| sequences.contains_key(seq));
    while let Some(masked) = masker.as_mut().and_then(Masker::collect) {
        match masked.constraint {
            Ok(constraint) => sequences.get_mut(&masked.seq).expect("its mask was asked for").constraint = Some(constraint),
            Err(error) => lost.push((masked.seq, error)),
        }
    }
}

fn outcome(sequence: &ActiveSequence, decision: &SampleResult) -> TokenOutcome {
    match decision {
        Err(_) => TokenOutcome::Fail,
        Ok(NewToken { chosen, .. }) if sequence.sampling.stops_at(chosen.token) && !sequence.sampling.must_go_on(sequence.generated) => {
            TokenOutcome::Stop(chosen.token)
        }
        Ok(NewToken { chosen, .. }) => TokenOutcome::Token(chosen.token),
    }
}

/// Attributes non-finite logits to the logits hook if there is one.
fn attribute(why: NoChoice, sequence: &ActiveSequence) -> Error {
    match why {
        NoChoice::NotFinite if sequence.hook.is_some() => {
            Error::invalid("no token can be sampled: after the logits hook some logits are NaN or infinite")
        }
        _ => why.into(),
    }
}

/// Returns the logits after the logits hook.
fn edit<'a>(sequence: &ActiveSequence, tokens: &[u32], logits: &'a [f32], edited: &'a mut Vec<f32>) -> Result<&'a [f32]> {
    let Some(hook) = &sequence.hook else { return Ok(logits) };
    edited.clear();
    edited.try_reserve(logits.len())?;
    edited.extend_from_slice(logits);
    hook(sequence.sequence, tokens, edited);
    Ok(edited)
}

fn advance(sequence: &ActiveSequence, logits: &[f32], chosen: Sample, tops: &mut TopLogprobs) -> Result<NewToken> {
    let first = tops.all.len();
    let k = sequence.sampling.params.logprobs.unwrap_or(0) as usize;
    let logprob = if sequence.needs_logprobs() { tops.add(logits, chosen.token, k)? } else { 0.0 };
    Ok(NewToken { chosen, logprob, top: first..tops.all.len() })
}
