//! One request's beam search: the rows it decides on, and what each beam's past means for them.

use crate::decode::{BeamScratch, BeamSearch, BeamStep, Chosen, Context, Hypothesis, Memory, NoChoice, Rules, Sampler, log_softmax};
use crate::error::{Result, try_vec};
use crate::options::BeamParams;

pub struct Beams {
    search: BeamSearch,
    width: usize,
    memories: Vec<Memory>, // [width]
    rows: Vec<f32>,        // [width, vocab] log probabilities, as the processors left them
    raw: Vec<f32>,         // [vocab]
    scratch: BeamScratch,
    step: BeamStep,
}

impl Beams {
    pub fn new(params: &BeamParams, n: usize, ends: &[u32], max_new_tokens: usize, vocab: usize) -> Result<Beams> {
        let width = params.width as usize;
        Ok(Beams {
            search: BeamSearch::new(params, n, ends, max_new_tokens)?,
            width,
            memories: try_vec(width, Memory::default())?,
            rows: try_vec(width * vocab, 0.0)?,
            raw: try_vec(vocab, 0.0)?,
            scratch: BeamScratch::default(),
            step: BeamStep::default(),
        })
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// The first beam has the prompt behind it.
    pub fn begin(&mut self, rules: &Rules, prompt: &[u32]) -> Result<()> {
        self.memories[0] = Memory::new(rules, prompt, prompt.len())?;
        Ok(())
    }

    /// Takes in the logits of the beam in `slot`.
    pub fn read(
        &mut self,
        slot: usize,
        logits: &[f32],
        sampler: &mut Sampler,
        rules: &Rules,
        tokens: &[u32],
        prompt_len: usize,
    ) -> std::result::Result<(), NoChoice> {
        log_softmax(logits, &mut self.raw);
        let context =
            Context { tokens, prompt_len, generated: tokens.len() - prompt_len, seed: 0, memory: &self.memories[slot], allowed: None };
        let row = sampler.process(&self.raw, rules, &context)?;
        self.rows[slot * row.len()..][..row.len()].copy_from_slice(row);
        Ok(())
    }

    /// What follows from the rows that were read; changes nothing that `commit` does not.
    pub fn decide(&mut self) -> Result<&BeamStep> {
        let rows: Vec<&[f32]> = self.rows.chunks_exact(self.raw.len()).collect();
        self.search.decide(&rows, &mut self.scratch, &mut self.step)?;
        Ok(&self.step)
    }

    pub fn commit(&mut self, rules: &Rules) -> Result<()> {
        let mut memories = try_vec(self.width, Memory::default())?;
        for next in &self.step.next {
            memories[next.slot] = self.memories[next.parent].try_clone()?;
            memories[next.slot].advance(rules, &Chosen { token: next.token, ..Chosen::default() })?;
        }
        self.memories = memories;
        self.search.commit(&self.step);
        Ok(())
    }

    pub fn is_done(&self) -> bool {
        self.search.is_done()
    }

    pub fn best(&self) -> Result<Vec<Hypothesis>> {
        self.search.best()
    }
}
