//! One request's beam search: the rows it decides on, what each beam's past means for them, and how it ends.

use std::collections::BTreeMap;

use super::core::Core;
use crate::decode::{BeamScratch, BeamSearch, BeamStep, Chosen, Context, Hypothesis, Memory, NoChoice, Rules, Sampler, log_softmax};
use crate::error::{Error, Result, try_vec};
use crate::options::BeamParams;
use crate::sched::{Choice, FinishReason, StepPlan};

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

impl Core {
    pub(super) fn is_beam(&self, choice: &Choice) -> bool {
        request_of_beam(&self.beams, choice.parent).is_some()
    }

    pub(super) fn commit_beams(&mut self, plan: &StepPlan) {
        for part in plan.sampled() {
            // Once for each search: its first beam speaks for all.
            let Some(request) = request_of_beam(&self.beams, part.seq) else { continue };
            if self.scheduler.members(part.seq).first() != Some(&part.seq) || self.stuck.iter().any(|(stuck, _)| *stuck == request) {
                continue;
            }
            let rules = self.streams[&request].rules.clone();
            let beams = self.beams.get_mut(&request).expect("it was just found");
            match beams.commit(&rules) {
                Ok(()) => {}
                Err(error) => self.stuck.push((request, error)),
            }
        }
    }

    /// Searches that are done give their results, and those that cannot go on give the reason.
    pub(super) fn end_beams(&mut self) {
        for (request, error) in std::mem::take(&mut self.stuck) {
            self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
        }
        let done = |(&request, beams): (&u64, &Beams)| beams.is_done().then_some(request);
        while let Some(request) = self.beams.iter().find_map(done) {
            if let Err(error) = self.tell_beams(request) {
                self.end_request(request, FinishReason::Error, |output| output.failed(error.clone()));
            }
        }
    }

    fn tell_beams(&mut self, request: u64) -> Result<()> {
        let best = self.beams[&request].best()?;
        let stream = &self.streams[&request];
        let mut outputs = Vec::new();
        for (index, hypothesis) in best.iter().enumerate() {
            outputs.push(stream.hypothesis(index as u32, hypothesis, self.shared.text.as_deref())?);
        }
        let outbox = stream.outbox.clone();
        let missing =
            stream.output().failed(Error::invalid("fewer beams than n were found: so many tokens are excluded that no more could end"));
        self.beams.remove(&request);
        self.streams.remove(&request);
        for index in self.shared.registry.open(request) {
            let output = outputs.get_mut(index as usize).map_or_else(|| missing.of(index), std::mem::take);
            self.counts.generated_tokens += output.tokens.len() as u64;
            self.end(&outbox, output);
        }
        Ok(())
    }
}

/// The request that the beam `seq` belongs to, if it is one.
pub fn request_of_beam(beams: &BTreeMap<u64, Beams>, seq: u64) -> Option<u64> {
    let (&request, beams) = beams.range(..=seq).next_back()?;
    (seq - request < beams.width() as u64).then_some(request)
}
