//! The beam search of one request: its log probabilities, its decisions and its end.

use super::{BeamScratch, BeamSearch, BeamStep, Hypothesis};
use crate::error::{Result, try_vec};
use crate::generation::sampler::{Context, ResolvedSampling, Sample, Sampler, SamplingHistory, log_softmax};
use crate::types::options::BeamParams;

/// The beam search of one request.
pub struct Beams {
    search: BeamSearch,
    width: usize,
    histories: Vec<SamplingHistory>, // [width]
    rows: Vec<f32>,                  // [width, vocab] log probabilities, empty before the first step
    scratch: BeamScratch,
    step: BeamStep,
}

impl Beams {
    pub fn new(params: &BeamParams, n: usize, ends: &[u32], max_new_tokens: usize) -> Result<Beams> {
        let width = params.width as usize;
        Ok(Beams {
            search: BeamSearch::new(params, n, ends, max_new_tokens)?,
            width,
            histories: try_vec(width, SamplingHistory::default())?,
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
        self.histories[0] = SamplingHistory::new(sampling, prompt, prompt.len())?;
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
        let histories = &self.histories;
        let mut process = |slot: usize, row: &mut [f32]| {
            let tokens = tokens_in(slot)?;
            let generated = tokens.len() - prompt_len;
            let context = Context { tokens, prompt_len, generated, seed: 0, history: &histories[slot], allowed: None };
            Ok(sampler.process(row, sampling, &context)?)
        };
        self.search.decide(&self.rows, &mut process, &mut self.scratch, &mut self.step)?;
        Ok(&self.step)
    }

    pub fn commit(&mut self, sampling: &ResolvedSampling) -> Result<()> {
        // The first child of a beam keeps the slot and the history of its parent. The slots of
        // other children belong to no parent of this step.
        for next in self.step.next.iter().filter(|next| next.slot != next.parent) {
            self.histories[next.slot] = self.histories[next.parent].try_clone()?;
        }
        for next in &self.step.next {
            self.histories[next.slot].advance(sampling, &Sample { token: next.token, ..Sample::default() })?;
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
