//! The state of the scheduler from which a forecast begins.

use super::super::{GroupId, OutputLengthPredictor, Running, Scheduler, SequenceKv};
use super::Capacity;
use crate::error::{Result, try_copy};

/// A sequence that has started, as of the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PendingSequence {
    /// Number of tokens to compute before the next token is sampled.
    pub prefill: usize,
    /// Number of computed tokens.
    pub computed: usize,
    /// Number of generated tokens, and their maximum.
    pub generated: usize,
    pub max_new_tokens: usize,
    /// Rank in the order of the scheduler. Smaller values come first.
    pub rank: u64,
}

impl PendingSequence {
    fn from_sequence(sequence: &SequenceKv) -> PendingSequence {
        PendingSequence {
            prefill: if sequence.pending() > 1 { sequence.pending() } else { 0 },
            computed: sequence.computed,
            generated: sequence.generated,
            max_new_tokens: sequence.max_new_tokens(),
            rank: sequence.group.map_or(0, GroupId::rank),
        }
    }
}

/// A snapshot of the scheduler after the last step.
#[derive(Debug, Default)]
pub struct SchedulerSnapshot {
    pub length_predictor: OutputLengthPredictor,
    /// Running sequences, the oldest first.
    pub running: Vec<PendingSequence>,
    /// Preempted sequences.
    pub preempted: Vec<PendingSequence>,
    /// Sequences and KV blocks that are available after the needs of the running sequences.
    pub entries: usize,
    pub spare_blocks: usize,
}

impl SchedulerSnapshot {
    /// Reserves space for `sequences` running and `sequences` preempted sequences.
    pub fn reserve(&mut self, sequences: usize) -> Result<()> {
        self.running.try_reserve(sequences)?;
        Ok(self.preempted.try_reserve(sequences)?)
    }

    pub fn try_clone(&self) -> Result<SchedulerSnapshot> {
        Ok(SchedulerSnapshot { running: try_copy(&self.running)?, preempted: try_copy(&self.preempted)?, ..*self })
    }
}

/// The running sequences of a snapshot, for the batching policy.
pub(super) struct SnapshotRunning<'a> {
    pub running: &'a [PendingSequence],
    pub max_tokens: usize,
}

impl Running for SnapshotRunning<'_> {
    fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    fn decodes(&self) -> usize {
        self.running.iter().filter(|sequence| sequence.prefill == 0).count()
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }
}

impl Scheduler {
    /// Returns the limits of steps, and copies of the policies.
    pub fn capacity(&self) -> Capacity {
        Capacity {
            seqs: self.options.max_seqs,
            tokens: self.options.max_batch_tokens,
            chunk: self.options.max_tokens_per_step(),
            paging: self.blocks.paging().clone(),
            policies: self.policies.fork(),
        }
    }

    /// Writes the current state to `snapshot`, without an allocation.
    pub fn write_snapshot(&self, snapshot: &mut SchedulerSnapshot) {
        snapshot.running.clear();
        snapshot.running.extend(self.running_sequences().map(PendingSequence::from_sequence));
        snapshot.preempted.clear();
        snapshot.preempted.extend(self.preempted_sequences().map(PendingSequence::from_sequence));
        (snapshot.entries, snapshot.spare_blocks) = self.spare();
        snapshot.length_predictor = *self.lengths();
    }
}
