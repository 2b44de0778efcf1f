//! The record of the current step: its inputs and the digests of its outputs.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::records::{FailedAttempt, FailedMove, RecordedEnd, Resized, Step};
use crate::engine::outputs::{Logprobs, Output};
use crate::error::{Error, Result};
use crate::scheduler::FinishReason;
use crate::types::SeqId;

/// The inputs and the digests of the current step.
#[derive(Default)]
pub struct StepRecorder {
    pub step: Step,
    pub ended: Vec<RecordedEnd>,
    /// Whether a command, a resize, a failed transfer or an output makes the step worth recording.
    pub must_record: bool,
    /// Number of readiness checks in the step, and the indices of those that failed.
    readiness_checks: Cell<u32>,
    refused: RefCell<Vec<u32>>,
    attempts: u32,
    in_step: bool,
    /// Resizes since the last step.
    between: Vec<Resized>,
    /// Number of transfers since the last step, and those that failed.
    moves: u32,
    stuck: Vec<FailedMove>,
    /// Number of exports and imports in this step.
    exchanges: u32,
    /// Digest of all outputs of each sequence since its last end, for existing sequences only.
    digests: HashMap<SeqId, [u8; 32]>,
    /// Number of written steps.
    steps: u64,
    /// Failed readiness checks of the last step, and whether that step did nothing else.
    refused_before: Vec<u32>,
    quiet_before: bool,
}

impl StepRecorder {
    /// Reserves space for the outputs of `seqs` concurrent sequences, so that no step allocates.
    pub fn new(seqs: usize) -> Result<StepRecorder> {
        let mut recorder = StepRecorder::default();
        // A map that is at most half full is rehashed in place and does not allocate.
        recorder.digests.try_reserve(2 * seqs)?;
        recorder.ended.try_reserve(seqs)?;
        Ok(recorder)
    }

    pub fn begin(&mut self, now: Duration) {
        (self.step.now, self.step.digest, self.attempts, self.exchanges) = (now, 0, 0, 0);
        self.step.failed_attempts.clear();
        self.step.failed_exchanges.clear();
        (self.in_step, self.must_record) = (true, !self.between.is_empty() || !self.stuck.is_empty());
        self.step.resized.clear();
        self.step.resized.append(&mut self.between);
        self.step.refused.clear();
        self.ended.clear();
        self.readiness_checks.set(0);
        self.refused.borrow_mut().clear();
    }

    pub fn next_command(&self) -> u32 {
        self.readiness_checks.replace(self.readiness_checks.get() + 1)
    }

    pub fn mark_refused(&self, index: u32) {
        self.refused.borrow_mut().push(index);
    }

    /// Returns the number of the attempt that starts.
    pub fn attempt(&mut self) -> u32 {
        self.attempts += 1;
        self.attempts
    }

    pub fn failed(&mut self, error: &Error) {
        self.step.failed_attempts.push(FailedAttempt::new(self.attempts, error));
    }

    /// Returns the number of the export or import.
    pub fn exchange(&mut self) -> u32 {
        self.exchanges += 1;
        self.exchanges
    }

    pub fn resized(&mut self, blocks: usize, worked: bool) {
        let resized = Resized { blocks, between: !self.in_step, succeeded: worked };
        if self.in_step { &mut self.step.resized } else { &mut self.between }.push(resized);
        self.must_record = true;
    }

    /// Returns the number of the transfer.
    pub fn moves(&mut self) -> u32 {
        self.moves += 1;
        self.moves
    }

    pub fn record_failed_move(&mut self, stuck: FailedMove) {
        self.stuck.push(stuck);
        self.must_record = true;
    }

    pub fn record_output(&mut self, output: &Output) {
        let before = self.digests.remove(&output.sequence).unwrap_or_default();
        let digest = digest(&before, output);
        let (first, _) = digest.split_first_chunk::<8>().expect("a digest is longer");
        self.step.digest = self.step.digest.wrapping_add(u64::from_le_bytes(*first));
        match output.finish {
            None => drop(self.digests.insert(output.sequence, digest)),
            Some(finish) => self.ended.push(RecordedEnd {
                request: output.request,
                sequence: output.sequence,
                finish: finish.name().into(),
                generated: output.generated_tokens,
                score: output.score.to_bits(),
                digest,
            }),
        }
        self.must_record = true;
    }

    /// Removes the digest of a sequence that has no further outputs.
    pub fn remove(&mut self, sequence: SeqId) {
        self.digests.remove(&sequence);
    }

    /// Returns the sequences with a digest.
    pub fn digested(&self) -> impl Iterator<Item = SeqId> {
        self.digests.keys().copied()
    }

    /// Ends the step. Returns whether it must be written.
    pub fn end(&mut self, idle: bool) -> bool {
        (self.in_step, self.moves) = (false, 0);
        self.step.failed_moves.clear();
        self.step.failed_moves.append(&mut self.stuck);
        self.step.refused.clone_from(&self.refused.borrow());
        let quiet = idle && !self.must_record && self.step.failed_attempts.is_empty();
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

/// Returns the digest of the previous outputs and of everything that a host sees of this one,
/// except its times.
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
    // Only the size of a sequence state is included, since the unused slots of its last block are
    // undefined.
    let Output { sequence, index, generated_tokens, score, sequence_state, .. } = output;
    numbers(&mut [sequence.get(), (*index).into(), *generated_tokens, score.to_bits(), sequence_state.len() as u64].into_iter());
    let error = output.error.as_ref().map_or("", Error::message);
    for text in [output.text.as_str(), output.finish.map_or("", FinishReason::name), error] {
        sha.update(text);
        sha.update((text.len() as u64).to_le_bytes());
    }
    sha.finalize().into()
}
