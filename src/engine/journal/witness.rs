//! What one step saw of its outside, and what it said.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::records::{Ended, Fault, Resized, Step, Stuck};
use crate::engine::outputs::{Logprobs, Output};
use crate::error::{Error, Result};
use crate::sched::FinishReason;

#[derive(Default)]
pub struct Witness {
    pub step: Step,
    pub ended: Vec<Ended>,
    /// Something has changed that the outside brought about.
    pub touched: bool,
    /// Of how many groups it was asked whether they are ready, and which of these were not.
    asks: Cell<u32>,
    refused: RefCell<Vec<u32>>,
    attempts: u32,
    in_step: bool,
    /// Since the last step.
    between: Vec<Resized>,
    /// Moves between the tiers since then, and those that failed.
    moves: u32,
    stuck: Vec<Stuck>,
    /// Exports and imports in this step.
    exchanges: u32,
    /// Of all that has been said of each sequence since it last ended. None of those that are gone.
    said: HashMap<u64, [u8; 32]>,
    /// Steps so far, those that did nothing not counted.
    steps: u64,
    /// What the last step was refused, and whether it did nothing else.
    refused_before: Vec<u32>,
    quiet_before: bool,
}

impl Witness {
    /// With room for what `seqs` sequences that run at once say, so that a step makes none.
    pub fn new(seqs: usize) -> Result<Witness> {
        let mut witness = Witness::default();
        // A map that is full to the half never grows for what comes and goes.
        witness.said.try_reserve(2 * seqs)?;
        witness.ended.try_reserve(seqs)?;
        Ok(witness)
    }

    pub fn begin(&mut self, now: Duration) {
        (self.step.now, self.step.said, self.attempts, self.exchanges) = (now, 0, 0, 0);
        self.step.faults.clear();
        self.step.unmoved.clear();
        (self.in_step, self.touched) = (true, !self.between.is_empty() || !self.stuck.is_empty());
        self.step.resized.clear();
        self.step.resized.append(&mut self.between);
        self.step.refused.clear();
        self.ended.clear();
        self.asks.set(0);
        self.refused.borrow_mut().clear();
    }

    pub fn ask(&self) -> u32 {
        self.asks.replace(self.asks.get() + 1)
    }

    pub fn refused(&self, ask: u32) {
        self.refused.borrow_mut().push(ask);
    }

    /// The number of the attempt that begins.
    pub fn attempt(&mut self) -> u32 {
        self.attempts += 1;
        self.attempts
    }

    pub fn failed(&mut self, error: &Error) {
        self.step.faults.push(Fault::new(self.attempts, error));
    }

    /// The number of the export or import that was tried.
    pub fn exchange(&mut self) -> u32 {
        self.exchanges += 1;
        self.exchanges
    }

    pub fn resized(&mut self, blocks: usize, worked: bool) {
        let resized = Resized { blocks, between: !self.in_step, worked };
        if self.in_step { &mut self.step.resized } else { &mut self.between }.push(resized);
        self.touched = true;
    }

    /// The number of the moves that were made.
    pub fn moves(&mut self) -> u32 {
        self.moves += 1;
        self.moves
    }

    pub fn stuck(&mut self, stuck: Stuck) {
        self.stuck.push(stuck);
        self.touched = true;
    }

    pub fn says(&mut self, output: &Output) {
        let before = self.said.remove(&output.sequence).unwrap_or_default();
        let digest = digest(&before, output);
        let (first, _) = digest.split_first_chunk::<8>().expect("a digest is longer");
        self.step.said = self.step.said.wrapping_add(u64::from_le_bytes(*first));
        match output.finish {
            None => drop(self.said.insert(output.sequence, digest)),
            Some(finish) => self.ended.push(Ended {
                request: output.request,
                sequence: output.sequence,
                finish: finish.name().into(),
                generated: output.generated_tokens,
                score: output.score.to_bits(),
                digest,
            }),
        }
        self.touched = true;
    }

    /// The sequence is let go of: nothing more is owed of it.
    pub fn forget(&mut self, sequence: u64) {
        self.said.remove(&sequence);
    }

    /// Of which sequences it keeps what was said.
    pub fn remembered(&self) -> impl Iterator<Item = u64> {
        self.said.keys().copied()
    }

    /// Whether the step is worth writing down.
    pub fn end(&mut self, idle: bool) -> bool {
        (self.in_step, self.moves) = (false, 0);
        self.step.stuck.clear();
        self.step.stuck.append(&mut self.stuck);
        self.step.refused.clone_from(&self.refused.borrow());
        let quiet = idle && !self.touched && self.step.faults.is_empty();
        if quiet && self.quiet_before && self.refused_before == self.step.refused {
            return false;
        }
        self.quiet_before = quiet;
        self.refused_before.clone_from(&self.step.refused);
        self.steps += 1;
        self.step.number = self.steps;
        true
    }
}

/// Of all that a host sees of an output but how long it took, and of what was said before.
fn digest(before: &[u8; 32], output: &Output) -> [u8; 32] {
    let mut sha = Sha256::new();
    sha.update(before);
    let mut numbers = |numbers: &mut dyn Iterator<Item = u64>| {
        let mut count = 0u64;
        numbers.for_each(|number| {
            sha.update(number.to_le_bytes());
            count += 1;
        });
        sha.update(count.to_le_bytes());
    };
    numbers(&mut output.tokens.iter().map(|&token| token.into()));
    for Logprobs { tokens, top } in [&output.logprobs, &output.prompt_logprobs] {
        numbers(&mut tokens.iter().map(|logprob| logprob.to_bits().into()));
        numbers(&mut top.iter().flat_map(|(token, logprob)| [u64::from(*token), logprob.to_bits().into()]));
    }
    // Of a blob its size: where its last block is not full, what lies in the rest of it is nobody's.
    let Output { sequence, index, generated_tokens, score, blob, .. } = output;
    numbers(&mut [*sequence, (*index).into(), *generated_tokens, score.to_bits(), blob.len() as u64].into_iter());
    let error = output.error.as_ref().map_or("", Error::message);
    for text in [output.text.as_str(), output.finish.map_or("", FinishReason::name), error] {
        sha.update(text);
        sha.update((text.len() as u64).to_le_bytes());
    }
    sha.finalize().into()
}
