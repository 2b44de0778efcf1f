//! Admission: the waiting groups that a step starts, and the blocks that they need.

use super::group::SequenceGroup;
use super::slab::Slot;
use super::{GroupId, Scheduler, SequenceKv, StepPlan};
use crate::kv::blocks_for;
use crate::types::SeqId;

impl Scheduler {
    /// Replaces the youngest running groups with waiting groups that are older. The replaced groups
    /// keep their blocks while they wait.
    pub(super) fn preempt_for_higher_rank(&mut self, ready: &impl Fn(SeqId) -> bool) {
        if self.chunks.is_some() {
            return; // running groups keep their contiguous memory
        }
        while let (Some(oldest), Some(&youngest)) = (self.queues.waiting.first(), self.queues.running.last()) {
            if oldest > youngest || !self.may_run(oldest) {
                return;
            }
            if !self.is_ready(oldest, ready) {
                self.queues.waiting.pop_first();
                self.pause(oldest);
                continue;
            }
            let Some(stay) = self.make_reclaimable_for(oldest) else { return };
            self.queues.waiting.pop_first();
            while self.queues.running.len() > stay {
                let youngest = self.queues.running.pop().expect("it is one of several");
                self.wait(youngest);
            }
            self.start_group(oldest);
        }
    }

    /// Marks the youngest running groups reclaimable until the group fits beside the others.
    /// Returns how many groups keep running. Returns `None` if the group does not fit beside older
    /// groups.
    fn make_reclaimable_for(&mut self, id: GroupId) -> Option<usize> {
        let mut stay = self.queues.running.len();
        let (mut width, mut promised) = (self.queues.running_width(), self.reserved_by_running());
        while width + self.queues.groups[id].width() > self.options.max_seqs || !self.fits(id, stay, promised) {
            if stay == 0 || self.queues.running[stay - 1] < id {
                (stay..self.queues.running.len()).for_each(|place| self.unmark_group_reclaimable(self.queues.running[place]));
                return None;
            }
            stay -= 1;
            let youngest = self.queues.running[stay];
            width -= self.queues.groups[youngest].width();
            promised -= self.blocks_needed(youngest);
            self.mark_group_reclaimable(youngest);
        }
        Some(stay)
    }

    pub(super) fn admit(&mut self, plan: &mut StepPlan, ready: &impl Fn(SeqId) -> bool) {
        let before = self.preemptions();
        // `reserved_by_running` is expensive, so it is computed only if a group waits.
        let Some(first) = self.first_waiting(ready) else { return };
        let (mut next, mut width) = (Some(first), self.queues.running_width());
        let mut promised = None;
        while let Some(id) = next {
            width += self.queues.groups[id].width();
            if width > self.options.max_seqs || self.prompt_budget(plan) == 0 || !self.may_run(id) {
                return;
            }
            let beside = *promised.get_or_insert_with(|| self.reserved_by_running());
            if !self.fits(id, self.queues.running.len(), beside) || !self.take_chunks(id) {
                return;
            }
            self.queues.waiting.pop_first();
            let place = self.start_group(id);
            self.plan_group(place, plan);
            if self.preemptions() > before {
                return;
            }
            promised = Some(beside + self.blocks_needed(id));
            next = self.first_waiting(ready);
        }
    }

    /// Takes contiguous memory for a waiting group, if the allocation policy wants it. A group that
    /// does not fit an empty pool in this way runs nevertheless.
    fn take_chunks(&mut self, id: GroupId) -> bool {
        let Some(chunks) = &mut self.chunks else { return true };
        chunks.retain(|owner| self.queues.running.contains(&owner));
        let group = &self.queues.groups[id];
        let longest = group.members.iter().map(|&slot| self.sequences[slot].max_len()).max().unwrap_or(0);
        chunks.take(id, blocks_for(longest, self.blocks.block_size()), group.width()) || self.queues.running.is_empty()
    }

    /// Returns whether the group fits, with the watermark, beside `others` running groups that need
    /// `reserved_by_running` blocks. Reclaimable blocks count as free.
    pub(super) fn fits(&mut self, id: GroupId, others: usize, promised: usize) -> bool {
        if others == 0 {
            return true;
        }
        let needed = self.blocks_needed(id) + promised + self.watermark();
        if needed <= self.blocks.available() {
            return true;
        }
        // The blocks of the group itself must not be reclaimed for it.
        self.unmark_group_reclaimable(id);
        let reclaimable = self.blocks.idle_blocks();
        self.mark_group_reclaimable(id);
        needed <= self.blocks.available() + reclaimable
    }

    pub(super) fn watermark(&self) -> usize {
        self.policies.allocation.watermark(self.blocks.total())
    }

    /// Returns the number of blocks that the running groups still take from the pool.
    pub(super) fn reserved_by_running(&self) -> usize {
        self.queues.running.iter().map(|&id| self.blocks_needed(id)).sum()
    }

    /// Returns the number of blocks that the group takes from the pool for the tokens that the
    /// allocation policy requires.
    pub(super) fn blocks_needed(&self, id: GroupId) -> usize {
        let SequenceGroup { branching, members, .. } = &self.queues.groups[id];
        let sequences = || members.iter().map(|&slot| &self.sequences[slot]);
        let back = self.blocks.blocks_to_swap_in(sequences().map(|sequence| &sequence.table));
        let needed = |sequence: &SequenceKv| {
            let length = self.policies.allocation.length(sequence.tokens.len(), sequence.max_len());
            let rows = sequence.pending().clamp(1, self.options.max_tokens_per_step());
            self.blocks.needed(&sequence.table, sequence.scheduled()..length, rows)
        };
        let future_forks = branching.max_members().saturating_sub(members.len());
        back + sequences().map(needed).sum::<usize>() + self.blocks_for_forks(future_forks, members[0])
    }

    /// Returns the number of blocks that `branches` future forks of `parent` need beyond the shared
    /// full ones.
    fn blocks_for_forks(&self, branches: usize, parent: Slot) -> usize {
        if branches == 0 {
            return 0;
        }
        let parent = &self.sequences[parent];
        let (len, length) = (parent.tokens.len(), self.policies.allocation.length(parent.tokens.len(), parent.max_len()));
        branches * self.blocks.paging().blocks_beyond_shared(len, length)
    }

    /// Returns the first waiting group that is ready. Groups before it pause.
    fn first_waiting(&mut self, ready: &impl Fn(SeqId) -> bool) -> Option<GroupId> {
        while let Some(id) = self.queues.waiting.first() {
            if self.is_ready(id, ready) {
                return Some(id);
            }
            self.queues.waiting.pop_first();
            self.pause(id);
        }
        None
    }
}
