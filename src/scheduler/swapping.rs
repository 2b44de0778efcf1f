//! Moves of sequences between the device and the host tier.

use super::group::Queue;
use super::slab::Slot;
use super::{BlocksResult, GroupId, Scheduler};
use crate::error::Result;
use crate::kv::{BlockId, SwapLoad};
use crate::types::SeqId;
use crate::types::batch::Moves;

impl Scheduler {
    /// Swaps these sequences out, all or nothing. Returns false if they are to be recomputed.
    pub(super) fn swap_out(&mut self, slots: &[Slot]) -> bool {
        if !self.preemption.may_swap() {
            return false;
        }
        slots.iter().for_each(|&slot| self.cut_to_computed(slot));
        let load = self.swap_out_load(slots);
        let nothing = slots.iter().all(|slot| self.sequences[*slot].table.blocks().is_empty());
        if nothing || self.blocks.is_disk_behind() || !self.preemption.prefers_swap(load) || !self.free_host_blocks(slots) {
            return false;
        }
        for &slot in slots {
            let table = &mut self.sequences[slot].table;
            if !table.swapped() {
                self.blocks.swap_out(table).expect("the host tier has room for their load");
            }
        }
        true
    }

    fn swap_out_load(&self, slots: &[Slot]) -> SwapLoad {
        self.blocks.swap_out_load(slots.iter().map(|slot| &self.sequences[*slot].table))
    }

    /// Frees enough host blocks for the swap of these sequences, by taking those of the longest
    /// idle sequences. Returns false if the tier is too small.
    fn free_host_blocks(&mut self, slots: &[Slot]) -> bool {
        if self.swap_out_load(slots).blocks > self.blocks.host_total() {
            return false;
        }
        // Each iteration recomputes the load: blocks that were mirrored by the removed sequence
        // must now be copied.
        while self.swap_out_load(slots).blocks > self.blocks.host_free() {
            let Some((.., longest)) = self.reclaimable.hosted.first() else { return false };
            self.take_blocks(longest);
        }
        true
    }

    /// Blocks that were reserved for a step that was not run have no contents.
    fn cut_to_computed(&mut self, slot: Slot) {
        self.invalidate_in_flight(slot);
        self.unmark_reclaimable(slot);
        let sequence = &mut self.sequences[slot];
        self.blocks.truncate(&mut sequence.table, sequence.computed);
    }

    /// Allocates device blocks for the group, all or nothing. Returns false if there are too few
    /// blocks.
    pub(super) fn swap_in_group(&mut self, id: GroupId) -> bool {
        let members = self.queues.groups.take_members(id);
        let back = self.swap_in(&members);
        self.queues.groups.return_members(id, members);
        back
    }

    /// Schedules the transfers of the group to the device, as many as this step may make. Returns
    /// whether the step can compute the group.
    pub(super) fn continue_swap_in_group(&mut self, id: GroupId) -> bool {
        let members = self.queues.groups.take_members(id);
        let has_arrived = self.continue_swap_in(&members);
        self.queues.groups.return_members(id, members);
        has_arrived
    }

    /// Swaps one sequence in if enough blocks are available. A long sequence needs several steps,
    /// with one call in each.
    pub fn swap_in_sequence(&mut self, id: SeqId) -> BlocksResult {
        let Some(slot) = self.sequences.find(id) else { return BlocksResult::Refused };
        if self.blocks.is_leaving(&self.sequences[slot].table) {
            return BlocksResult::Pending;
        }
        let runs = self.sequences[slot].group.is_some_and(|group| self.queues.groups[group].queue == Queue::Running);
        self.unmark_reclaimable(slot);
        while !self.swap_in(&[slot]) && self.blocks.schedule_moves_out() {}
        let has_arrived = self.continue_swap_in(&[slot]);
        if !runs {
            self.mark_reclaimable(slot);
        }
        match has_arrived {
            true => BlocksResult::Done,
            false if self.sequences[slot].table.swapped() && !self.blocks.has_queued_out() => BlocksResult::Refused,
            false => BlocksResult::Pending,
        }
    }

    fn swap_in(&mut self, slots: &[Slot]) -> bool {
        let swapped = |s: &Scheduler, slot: &Slot| s.sequences[*slot].table.swapped();
        if !slots.iter().any(|slot| swapped(self, slot)) {
            return true;
        }
        if self.blocks.blocks_to_swap_in(slots.iter().map(|slot| &self.sequences[*slot].table)) > self.blocks.available() {
            return false;
        }
        for &slot in slots {
            let table = &mut self.sequences[slot].table;
            if table.swapped() {
                self.blocks.swap_in(table).expect("it was counted before");
            }
        }
        true
    }

    fn continue_swap_in(&mut self, slots: &[Slot]) -> bool {
        let mut have_arrived = true;
        for &slot in slots {
            let table = &mut self.sequences[slot].table;
            if table.is_on_device() {
                continue;
            }
            match !table.swapped() && self.blocks.continue_swap_in(table) {
                true => self.index_all(slot),
                false => have_arrived = false,
            }
        }
        have_arrived
    }

    /// Inserts the full blocks of the sequence into the prefix cache.
    fn index_all(&mut self, slot: Slot) {
        let block_size = self.blocks.block_size();
        let sequence = &mut self.sequences[slot];
        if self.blocks.caches_prefixes() {
            let full = sequence.computed / block_size;
            sequence.block_hashes(full, block_size);
            let (table, source) = sequence.table_and_hashes();
            (0..full).for_each(|place| self.blocks.index(table, place, &source));
        }
    }

    /// Limits the transfers between the tiers to `max_moves` blocks per step and direction.
    pub fn limit_moves(&mut self, max_moves: usize) {
        self.blocks.limit_moves(max_moves);
    }

    /// Makes the host tier one whose contents another thread reads: `next_to_read`.
    pub fn read_host_ahead(&mut self) -> Result<()> {
        self.blocks.read_host_ahead()
    }

    /// Lowers the limit of this step's transfers to the host tier.
    pub fn lower_limit_out(&mut self, max_moves: usize) {
        self.blocks.lower_limit_out(max_moves);
    }

    /// Returns the next host block that another thread must read.
    pub fn next_to_read(&mut self) -> Option<BlockId> {
        self.blocks.next_to_read()
    }

    /// Schedules the transfer of a host block that another thread has read, unless it was
    /// cancelled.
    pub fn finish_read(&mut self, host: BlockId) {
        self.blocks.finish_read(host);
    }

    /// Lets the sequences that wait for a host block be recomputed, because another thread could
    /// not read it. Returns false if the transfer was cancelled.
    pub fn fail_read(&mut self, host: BlockId) -> bool {
        let has_failed = self.blocks.fail_read(host);
        if has_failed {
            self.take_lost_blocks();
        }
        has_failed
    }

    /// Returns whether groups wait for transfers that the next step continues.
    pub fn waits_for_moves(&self) -> bool {
        self.planning.waits_for_moves || (self.blocks.has_queued_out() && self.queues.waiting.first().is_some())
    }

    /// Returns the transfers that must precede the computation. The caller reports their result
    /// with `record_moves`.
    pub fn moves(&self) -> &Moves {
        self.blocks.moves()
    }

    /// Records the result of the transfers. Lost sequences are recomputed. Before the call, roll
    /// back a plan that uses blocks whose return has failed.
    pub fn record_moves(&mut self, out: bool, back: bool) {
        self.preemption.record_moves_out(out, self.blocks.has_queued_out());
        if !(out && back) {
            self.blocks.mark_lost(!out, !back);
            self.take_lost_blocks();
        }
        self.blocks.clear_moves();
    }

    /// Lets the sequences whose blocks a disk has not taken yet be recomputed. Returns false if
    /// there are none.
    pub fn drop_queued_out(&mut self) -> bool {
        let has_some = self.blocks.mark_queued_out();
        if has_some {
            self.take_lost_blocks();
        }
        has_some
    }

    fn take_lost_blocks(&mut self) {
        for slot in self.sequences.slots() {
            if self.sequences.in_slot(slot).is_some_and(|sequence| self.blocks.is_lost(&sequence.table)) {
                self.take_blocks(slot);
            }
        }
    }
}
