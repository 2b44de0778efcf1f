//! Sampling: from the logits of a step to its sampled tokens. Changes no lengths.

use super::live_requests::LiveRequests;
use super::sequence::Sequence;
use crate::error::{Error, Result};
use crate::executor::StepOutput;
use crate::generation::SamplingState;
use crate::generation::output_processor::NewToken;
use crate::generation::sampler::drawing;
use crate::generation::sampler::{Sample, Sampler, logprob_and_top, logprob_of};
use crate::scheduler::{SampledToken, ScheduledSequence, Scheduler, StepPlan, TokenOutcome};
use crate::types::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
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

/// The sampled tokens of a step, until they are committed.
#[derive(Default)]
pub struct SampledStep {
    pub tokens: Vec<SampledToken>,
    /// One result per sampled token.
    pub results: Vec<SampleResult>,
    pub tops: TopLogprobs,
    pub prompts: PromptLogprobs,
    /// Requests that end with an error.
    pub failed: Vec<(RequestId, Error)>,
}

impl SampledStep {
    fn clear(&mut self) {
        self.tokens.clear();
        self.results.clear();
        self.tops.all.clear();
        self.prompts.clear();
        self.failed.clear();
    }

    pub fn has_failed(&self, request: RequestId) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == request)
    }
}

/// Sampling of the tokens of a step.
pub struct Sampling {
    vocab_size: usize,
    sampler: Sampler,
    /// Logits that a logits hook edits.
    edited: Vec<f32>,
    /// Samples to draw on the device. Empty if the executor cannot sample.
    on_device: DeviceSampling,
    samples_on_device: bool,
    pub step: SampledStep,
}

impl Sampling {
    /// Creates the state for steps of at most `max_seqs` sequences. `limits` are those of the
    /// device, if the executor can sample.
    pub fn new(vocab_size: usize, max_seqs: usize, limits: Option<DeviceSamplingLimits>) -> Result<Sampling> {
        let mut sampling = Sampling {
            vocab_size,
            sampler: Sampler::new(vocab_size)?,
            edited: Vec::new(),
            samples_on_device: limits.is_some(),
            on_device: limits.map_or(Ok(DeviceSampling::default()), DeviceSampling::new)?,
            step: SampledStep::default(),
        };
        sampling.step.tokens.try_reserve(max_seqs)?;
        sampling.step.results.try_reserve(max_seqs)?;
        Ok(sampling)
    }

    /// Plans sampling on the device for sequences that need one token and whose logits are not used
    /// otherwise.
    pub fn plan_on_device(&mut self, plan: &mut StepPlan, scheduler: &Scheduler, requests: &mut LiveRequests) -> Result<&DeviceSampling> {
        if !self.samples_on_device {
            return Ok(&self.on_device);
        }
        self.on_device.clear();
        let mut row = 0;
        for part in plan.sequences.iter_mut().filter(|part| part.logits > 0) {
            row += part.logits;
            let is_one = part.samples && !part.is_stale && part.logits == 1 && requests.request_of_beam(part.seq).is_none();
            let Some(sequence) = requests.sequences.get_mut(&part.seq).filter(|sequence| is_one && sequence.allows_device_sampling())
            else {
                continue;
            };
            let tokens = &scheduler.get(part.seq)?.tokens;
            let logprobs = sequence.needs_logprobs().then(|| sequence.params().logprobs.unwrap_or(0));
            let sampling = &mut sequence.generation.sampling;
            let sample = self.on_device.rows.len() as u32;
            // If the mask fails here, it fails again in `samples`, which reports the error.
            let is_planned = sampling.plan_draw(&mut self.on_device, row as u32 - 1, self.vocab_size, logprobs, tokens);
            part.device_sample = is_planned.unwrap_or(false).then_some(sample);
        }
        Ok(&self.on_device)
    }

    /// Samples the tokens of a step from the result of the executor.
    pub fn sample(
        &mut self,
        plan: &StepPlan,
        StepOutput { logits, device_samples }: StepOutput,
        scheduler: &Scheduler,
        requests: &mut LiveRequests,
    ) -> Result<()> {
        self.step.clear();
        let mut rest = logits;
        for part in plan.sequences.iter().filter(|part| part.logits > 0) {
            let (rows, others) = rest.split_at(part.logits * self.vocab_size);
            rest = others;
            match part.device_sample.and_then(|sample| device_samples.get(sample as usize)) {
                _ if part.is_stale => {}
                Some(device_sample) => self.take_device_sample(part, device_sample, requests)?,
                None => self.sample_from_logits(part, rows, scheduler, requests)?,
            }
        }
        Ok(())
    }

    /// Samples one part. `rows` are the logits of its last rows.
    fn sample_from_logits(
        &mut self,
        part: &ScheduledSequence,
        rows: &[f32],
        scheduler: &Scheduler,
        requests: &mut LiveRequests,
    ) -> Result<()> {
        self.prompt(part, rows, scheduler, requests)?;
        if !part.samples {
            return Ok(());
        }
        let logits = &rows[rows.len() - self.vocab_size..];
        match requests.request_of_beam(part.seq) {
            Some(request) => {
                self.beam(request, part.seq, logits, scheduler, requests);
                Ok(())
            }
            None => self.samples(part, logits, scheduler, requests),
        }
    }

    /// Computes the log probabilities of prompt tokens, each from the logits of the previous row.
    fn prompt(&mut self, part: &ScheduledSequence, rows: &[f32], scheduler: &Scheduler, requests: &LiveRequests) -> Result<()> {
        let Some(sequence) = requests.sequences.get(&part.seq) else { return Ok(()) };
        let Some(k) = sequence.params().prompt_alternatives() else { return Ok(()) };
        let tokens = &scheduler.get(part.seq)?.tokens[..sequence.generation.sampling.prompt_len()];
        let first = part.first + part.tokens - part.logits + 1;
        let emitted = tokens.get(first..).unwrap_or_default();
        let count = emitted.len().min(rows.len() / self.vocab_size);
        let PromptLogprobs { logprobs, tops, ends } = &mut self.step.prompts;
        logprobs.try_reserve(count)?;
        ends.try_reserve(1)?;
        for (&token, logits) in emitted.iter().zip(rows.chunks_exact(self.vocab_size)) {
            logprobs.push(tops.add(logits, token, k as usize)?);
        }
        if count > 0 {
            ends.push((part.seq, logprobs.len(), tops.all.len()));
        }
        Ok(())
    }

    /// Samples one token, or one per sample at the end of a prompt, or none if the request
    /// computes its prompt only.
    fn samples(&mut self, part: &ScheduledSequence, logits: &[f32], scheduler: &Scheduler, requests: &mut LiveRequests) -> Result<()> {
        let tokens = &scheduler.get(part.seq)?.tokens;
        let sequence = requests.sampled(part.seq)?;
        if sequence.params().is_prompt_only() {
            self.step.tokens.push(SampledToken { parent: part.seq, child: part.seq, outcome: TokenOutcome::Complete });
            self.step.results.push(Ok(NewToken::default()));
            return Ok(());
        }
        let edited = sequence.generation.sampling.apply_hook(part.seq, tokens, logits, &mut self.edited)?;
        for i in 0..sequence.samples.count {
            let sampling = &mut sequence.generation.sampling;
            let sample = sampling.choose(&mut self.sampler, edited, tokens, i);
            let result = sample.and_then(|sample| new_token(sequence, logits, sample, &mut self.step.tops));
            let child = sequence.request.sequence(sequence.index + i as u32);
            self.step.tokens.push(SampledToken { parent: part.seq, child, outcome: outcome(&sequence.generation.sampling, &result) });
            self.step.results.push(result);
        }
        Ok(())
    }

    /// Takes the token that the device has sampled.
    fn take_device_sample(&mut self, part: &ScheduledSequence, device_sample: &DeviceSample, requests: &mut LiveRequests) -> Result<()> {
        let sequence = requests.sampled(part.seq)?;
        let result = match drawing::chosen(device_sample) {
            Err(why) => Err(why.into()),
            Ok(sample) => {
                let first = self.step.tops.all.len();
                let k = sequence.params().logprobs.unwrap_or(0) as usize;
                let logprob = if sequence.needs_logprobs() { self.step.tops.add_device_sample(device_sample, k)? } else { 0.0 };
                Ok(NewToken { sample, logprob, top: first..self.step.tops.all.len() })
            }
        };
        self.step.tokens.push(SampledToken { parent: part.seq, child: part.seq, outcome: outcome(&sequence.generation.sampling, &result) });
        self.step.results.push(result);
        Ok(())
    }

    /// Stores the row of a beam. After the last beam, the search decides. An error ends only this
    /// request.
    fn beam(&mut self, request: RequestId, seq: SeqId, logits: &[f32], scheduler: &Scheduler, requests: &mut LiveRequests) {
        if self.step.has_failed(request) {
            return;
        }
        if let Err(error) = self.try_beam(request, seq, logits, scheduler, requests) {
            self.step.failed.push((request, error));
        }
    }

    fn try_beam(
        &mut self,
        request: RequestId,
        seq: SeqId,
        logits: &[f32],
        scheduler: &Scheduler,
        requests: &mut LiveRequests,
    ) -> Result<()> {
        let sampling = &requests.sequences[&request.sequence(0)].generation.sampling;
        let beams = requests.beams.get_mut(&request).expect("it was just found");
        let slot = request.sample_of(seq).expect("it was just found");
        beams.read(slot as usize, logits)?;
        if scheduler.members(seq).next_back() != Some(seq) {
            return Ok(());
        }
        let tokens_in = |slot: usize| Ok(scheduler.get(request.sequence(slot as u32))?.tokens.as_slice());
        for next in &beams.decide(&mut self.sampler, &sampling.resolved, sampling.prompt_len(), tokens_in)?.next {
            let (parent, child) = (request.sequence(next.parent as u32), request.sequence(next.slot as u32));
            self.step.tokens.push(SampledToken { parent, child, outcome: TokenOutcome::Token(next.token) });
            self.step.results.push(Ok(NewToken::default()));
        }
        Ok(())
    }
}

fn outcome(sampling: &SamplingState, result: &SampleResult) -> TokenOutcome {
    match result {
        Err(_) => TokenOutcome::Fail,
        Ok(NewToken { sample, .. }) if sampling.stops_at(sample.token) => TokenOutcome::Stop(sample.token),
        Ok(NewToken { sample, .. }) => TokenOutcome::Token(sample.token),
    }
}

fn new_token(sequence: &Sequence, logits: &[f32], sample: Sample, tops: &mut TopLogprobs) -> Result<NewToken> {
    let first = tops.all.len();
    let k = sequence.params().logprobs.unwrap_or(0) as usize;
    let logprob = if sequence.needs_logprobs() { tops.add(logits, sample.token, k)? } else { 0.0 };
    Ok(NewToken { sample, logprob, top: first..tops.all.len() })
}
