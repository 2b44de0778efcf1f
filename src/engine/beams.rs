//! The beam search of one request: its log probabilities, its decisions and its end.

use super::core::EngineCore;
use crate::decode::{
    BeamScratch, BeamSearch, BeamStep, Context, Hypothesis, ResolvedSampling, Sample, Sampler, SamplingHistory, log_softmax,
};
use crate::error::{Error, Result, try_vec};
use crate::options::BeamParams;
use crate::scheduler::{FinishReason, SampledToken, SequenceStats, StepPlan};
use crate::types::RequestId;

/// The beam search of one request.
pub struct Beams {
    search: BeamSearch,
    width: usize,
    memories: Vec<SamplingHistory>, // [width]
    rows: Vec<f32>,                 // [width, vocab] log probabilities, empty before the first step
    scratch: BeamScratch,
    step: BeamStep,
}

impl Beams {
    pub fn new(params: &BeamParams, n: usize, ends: &[u32], max_new_tokens: usize) -> Result<Beams> {
        let width = params.width as usize;
        Ok(Beams {
            search: BeamSearch::new(params, n, ends, max_new_tokens)?,
            width,
            memories: try_vec(width, SamplingHistory::default())?,
            rows: Vec::new(),
            scratch: BeamScratch::default(),
            step: BeamStep::default(),
        })
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// Initializes the sampling history of the first beam with the prompt.
    pub fn begin(&mut self, sampling: &ResolvedSampling, prompt: &[u32]) -> Result<()> {
        self.memories[0] = SamplingHistory::new(sampling, prompt, prompt.len())?;
        Ok(())
    }

    /// Stores the log probabilities of the beam in `slot`.
    pub fn read(&mut self, slot: usize, logits: &[f32]) -> Result<()> {
        if self.rows.is_empty() {
            self.rows = try_vec(self.width * logits.len(), 0.0)?;
        }
        log_softmax(logits, &mut self.rows[slot * logits.len()..][..logits.len()]);
        Ok(())
    }

    /// Computes the next beams from the stored rows. `commit` applies them.
    pub fn decide<'a>(
        &mut self,
        sampler: &mut Sampler,
        sampling: &ResolvedSampling,
        prompt_len: usize,
        tokens_in: impl Fn(usize) -> Result<&'a [u32]>,
    ) -> Result<&BeamStep> {
        let memories = &self.memories;
        let mut process = |slot: usize, row: &mut [f32]| {
            let tokens = tokens_in(slot)?;
            let generated = tokens.len() - prompt_len;
            let context = Context { tokens, prompt_len, generated, seed: 0, history: &memories[slot], allowed: None };
            Ok(sampler.process(row, sampling, &context)?)
        };
        self.search.decide(&self.rows, &mut process, &mut self.scratch, &mut self.step)?;
        Ok(&self.step)
    }

    pub fn commit(&mut self, sampling: &ResolvedSampling) -> Result<()> {
        // The first child of a beam keeps the slot and the history of its parent. The slots of
        // other children belong to no parent of this step.
        for next in self.step.next.iter().filter(|next| next.slot != next.parent) {
            self.memories[next.slot] = self.memories[next.parent].try_clone()?;
        }
        for next in &self.step.next {
            self.memories[next.slot].advance(sampling, &Sample { token: next.token, ..Sample::default() })?;
        }
        self.search.commit(&self.step)
    }

    pub fn is_done(&self) -> bool {
        self.search.is_done()
    }

    pub fn best(&self) -> Result<Vec<Hypothesis>> {
        self.search.best()
    }
}

impl EngineCore {
    pub(super) fn is_beam(&self, sampled_token: &SampledToken) -> bool {
        self.requests.request_of_beam(sampled_token.parent).is_some()
    }

    pub(super) fn commit_beams(&mut self, plan: &StepPlan) {
        for part in plan.sampled() {
            // Once per search, for its first beam.
            let Some(request) = self.requests.request_of_beam(part.seq) else { continue };
            if self.scheduler.members(part.seq).next() != Some(part.seq)
                || self.sampling.failed_beams.iter().any(|(failed, _)| *failed == request)
            {
                continue;
            }
            let stats = self.scheduler.find(part.seq).map_or(SequenceStats::default(), |sequence| sequence.stats);
            let stream = self.requests.sequences.get_mut(&request.sequence(0)).expect("a search has a stream");
            self.telemetry.token(stream, stats);
            let sampling = stream.sampling.clone();
            let beams = self.requests.beams.get_mut(&request).expect("it was just found");
            match beams.commit(&sampling) {
                Ok(()) => {}
                Err(error) => self.sampling.failed_beams.push((request, error)),
            }
        }
    }

    /// Ends completed searches with their results, and failed ones with their errors.
    pub(super) fn end_beams(&mut self) {
        for (request, error) in std::mem::take(&mut self.sampling.failed_beams) {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
        while let Some((&request, _)) = self.requests.beams.iter().find(|(_, beams)| beams.is_done()) {
            if let Err(error) = self.emit_beams(request) {
                self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
            }
        }
    }

    fn emit_beams(&mut self, request: RequestId) -> Result<()> {
        let best = self.requests.beams[&request].best()?;
        let sequence = &self.requests.sequences[&request.sequence(0)];
        let mut outputs = Vec::new();
        for (index, hypothesis) in best.iter().enumerate() {
            outputs.push(sequence.hypothesis(index as u32, hypothesis, self.shared.text.as_deref())?);
        }
        let sender = sequence.sender.clone();
        let missing = sequence.output().failed(Error::invalid(
            "the search found fewer than n beams, because too many tokens are excluded; allow more tokens or lower n",
        ));
        self.requests.beams.remove(&request);
        self.requests.sequences.remove(&request.sequence(0));
        while let Some(index) = self.shared.table.open(request, None) {
            let output = outputs.get_mut(index as usize).map_or_else(|| missing.for_sample(index), std::mem::take);
            self.telemetry.counts.generated_tokens += output.tokens.len() as u64;
            self.end(&sender, output);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beam_search_allocates_no_logits_before_it_runs() {
        let mut beams = Beams::new(&BeamParams::default(), 1, &[], 1_000_000).unwrap();
        assert_eq!(beams.rows.capacity(), 0);
        beams.read(0, &[0.0; 50]).unwrap();
        assert_eq!(beams.rows.len(), 200);
    }
}
