//! Digests of the outputs of a step. They show whether a replay has the same outputs.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::records::RecordedEnd;
use crate::error::{Error, Result};
use crate::types::SeqId;
use crate::types::outputs::{FinishReason, Logprobs, Output};

/// The digests of the outputs of a step, and those of each sequence so far.
#[derive(Default)]
pub struct OutputDigests {
    /// Digest of all outputs of the step, independent of their order.
    pub step: u64,
    /// Sequences that ended in the step.
    pub ended: Vec<RecordedEnd>,
    /// Number of outputs in the step.
    pub count: u64,
    /// Digest of all outputs of each sequence since its last end, for existing sequences only.
    sequences: HashMap<SeqId, [u8; 32]>,
}

impl OutputDigests {
    /// Reserves space for the outputs of `seqs` concurrent sequences, so that no step allocates.
    pub fn new(seqs: usize) -> Result<OutputDigests> {
        let mut digests = OutputDigests::default();
        // A map that is at most half full is rehashed in place and does not allocate.
        digests.sequences.try_reserve(2 * seqs)?;
        digests.ended.try_reserve(seqs)?;
        Ok(digests)
    }

    pub fn begin_step(&mut self) {
        (self.step, self.count) = (0, 0);
        self.ended.clear();
    }

    pub fn add(&mut self, output: &Output) {
        let before = self.sequences.remove(&output.sequence).unwrap_or_default();
        let digest = digest(&before, output);
        let (first, _) = digest.split_first_chunk::<8>().expect("a digest is longer");
        self.step = self.step.wrapping_add(u64::from_le_bytes(*first));
        self.count += 1;
        match output.finish {
            None => drop(self.sequences.insert(output.sequence, digest)),
            Some(finish) => self.ended.push(RecordedEnd {
                request: output.request,
                sequence: output.sequence,
                finish: finish.name().into(),
                generated: output.generated_tokens,
                score: output.score.to_bits(),
                digest,
            }),
        }
    }

    /// Removes the digest of a sequence that has no further outputs.
    pub fn forget(&mut self, sequence: SeqId) {
        self.sequences.remove(&sequence);
    }

    /// Panics if a sequence with a digest is unknown. For tests.
    pub fn check(&self, is_known: impl Fn(SeqId) -> bool) {
        self.sequences.keys().for_each(|&sequence| assert!(is_known(sequence), "sequence {sequence} is gone and has a digest"));
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
    numbers(&mut std::iter::once(output.computed_tokens));
    let error = output.error.as_ref().map_or("", Error::message);
    for text in [output.text.as_str(), output.finish.map_or("", FinishReason::name), error] {
        sha.update(text);
        sha.update((text.len() as u64).to_le_bytes());
    }
    sha.finalize().into()
}
