//! The outcome of a step: the sampled tokens that a commit applies, and the changes that it makes.

use crate::types::SeqId;
use crate::types::outputs::FinishReason;
use crate::types::timing::SequenceStats;

/// The decision for one row of logits. Two sampled tokens with the same parent fork it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledToken {
    /// The sequence whose logits were sampled.
    pub parent: SeqId,
    /// The sequence that gets the token: the parent itself, or a new fork of it.
    pub child: SeqId,
    pub outcome: TokenOutcome,
}

/// The outcome of sampling for one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenOutcome {
    Token(u32),
    /// This token ends the sequence.
    Stop(u32),
    /// The prompt is computed, and no token follows it.
    Complete,
    /// No token could be sampled.
    Fail,
}

/// A change that a commit has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The child of the sampled token shares the blocks of its parent.
    Forked { sampled_token: usize },
    /// A beam that was not continued in place is removed. A fork with the same id is a new
    /// sequence.
    Dropped { seq: SeqId },
    /// The sampled token was applied. `finish` is set if it ended the sequence. `stats` are the
    /// statistics of the sequence.
    Advanced { sampled_token: usize, finish: Option<FinishReason>, stats: SequenceStats },
    /// The sampled token needed a fork for which there was no memory.
    Failed { sampled_token: usize },
}
