//! Allocation of blocks for a step, and preemption if the pool has too few.

use super::slab::Slot;
use super::{Branching, GroupId, ScheduledTokens, Scheduler, StepPlan};
use crate::types::batch::BlockCopy;

/// The result of an allocation for a running group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AllocationResult {
    Done,
    /// The group itself was the youngest. It was preempted or lost a member.
    Preempted,
    /// Blocks become available when later steps have copied them to the host tier.
    Pending,
}

impl Scheduler {
    /// Calls `take` until it succeeds. After each failure, takes blocks of reclaimable sequences,
    /// then of the youngest running group.
    pub(super) fn allocate_or_preempt(&mut self, id: GroupId, mut take: impl FnMut(&mut Scheduler) -> bool) -> AllocationResult {
        loop {
            if self.is_leaving(id) {
                self.planning.waits_for_moves = true;
                return AllocationResult::Pending;
            }
            if take(self) {
                return AllocationResult::Done;
            }
            if self.blocks.schedule_moves_out() {
                continue;
            }
            if self.blocks.has_queued_out() {
                self.planning.waits_for_moves = true;
                return AllocationResult::Pending;
            }
            if self.reclaim() || self.blocks.has_queued_out() {
                continue;
            }
            let alone = self.queues.running.len() == 1;
            // The last running group also needs the blocks that it shares with reclaimable
            // sequences, since it would copy them otherwise.
            if alone && (self.reclaim_one() || self.unpin_lowest(id)) {
                continue;
            }
            if (alone && self.split_group(id)) || self.preempt_youngest() == id {
                return AllocationResult::Preempted;
            }
        }
    }

    /// Returns whether this step still copies blocks of the group to the host tier.
    fn is_leaving(&self, id: GroupId) -> bool {
        self.blocks.swapped() > 0 && self.queues.groups[id].members.iter().any(|&slot| self.blocks.is_leaving(&self.sequences[slot].table))
    }

    /// Moves the last of several samples to a waiting group of its own.
    ///
    /// After admission, rewinds and appends may have ended the sharing of the prompt, so that the
    /// samples no longer fit the pool together. Each one fits alone.
    fn split_group(&mut self, id: GroupId) -> bool {
        let group = &self.queues.groups[id];
        let &[_, .., last] = group.members.as_slice() else { return false };
        if group.branching != Branching::One || self.enqueue_alone(last).is_err() {
            return false;
        }
        self.queues.groups.change(id, |group| group.members.pop());
        let swapped = self.take_blocks_of(&[last]);
        self.preemption.record(swapped);
        true
    }

    /// Allocates blocks for the chunks, all or nothing.
    pub(super) fn prepare(&mut self, chunks: &[ScheduledTokens], plan: &mut StepPlan) -> bool {
        let copies = &mut plan.batch.copies;
        let before = copies.len();
        for chunk in chunks {
            let sequence = &mut self.sequences[chunk.slot];
            let write = sequence.scheduled()..sequence.scheduled() + chunk.tokens;
            if self.blocks.prepare(&mut sequence.table, write, copies).is_err() {
                self.undo_copies(before, chunks.iter().map(|chunk| chunk.slot), copies);
                return false;
            }
        }
        true
    }

    /// Reverts the copies from index `first` on, which were made for `sequences`.
    pub(super) fn undo_copies(&mut self, first: usize, sequences: impl Iterator<Item = Slot> + Clone, copies: &mut Vec<BlockCopy>) {
        for copy in copies.drain(first..).rev() {
            let undone = sequences.clone().filter(|&slot| self.blocks.undo(copy, &mut self.sequences[slot].table)).count();
            if undone == 0 {
                // The sequence has ended or lost its blocks.
                self.blocks.release_copied(&[copy]);
            }
        }
    }

    pub(super) fn preempt_youngest(&mut self) -> GroupId {
        let id = self.queues.running.pop().expect("a group without blocks is running");
        self.take_all_blocks(id);
        self.wait(id);
        id
    }

    /// Removes the pin with the lowest priority, except one that is being computed by `group`.
    pub(super) fn unpin_lowest(&mut self, group: GroupId) -> bool {
        let lowest = self.pins.iter().find(|slot| self.sequences[*slot].group != Some(group));
        lowest.map(|slot| self.take_out(slot)).is_some()
    }
}
