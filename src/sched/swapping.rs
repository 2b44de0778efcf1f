//! Who has to go, and where to: to the host tier and back, or to be computed again.

use super::group::Queue;
use super::slab::Slot;
use super::{GroupId, Scheduler, SeqId};
use crate::batch::Moves;
use crate::kv::Load;
use crate::options::Preemption;

/// What moving and computing cost, in seconds, as far as it has been measured: 0 where it has not. The only thing that the
/// scheduler is told of time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Costs {
    /// Of a block that moves from one tier to the other.
    pub block: f64,
    /// Of a prompt token that is computed.
    pub token: f64,
}

impl Costs {
    /// Whether moving out and back costs no more than computing again. What was never tried is.
    fn favour_swapping(&self, load: Load) -> bool {
        self.token == 0.0 || 2.0 * load.blocks as f64 * self.block <= load.tokens as f64 * self.token
    }
}

impl Scheduler {
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }

    pub(super) fn take_all_blocks(&mut self, id: GroupId) {
        let members = self.groups.lend(id);
        self.swapping += self.give_way(&members) as u64;
        self.preemptions += 1;
        self.groups.give_back(id, members);
    }

    /// Takes the blocks of these, all or nothing: into the host tier, or else what they computed will be computed again, unless
    /// the prefix index can still find it. True: they are in the host tier.
    pub(super) fn give_way(&mut self, slots: &[Slot]) -> bool {
        let swaps = self.swap_out(slots);
        if !swaps {
            slots.iter().for_each(|&slot| self.take_blocks(slot));
        }
        slots.iter().for_each(|&slot| self.count_preemption(slot));
        swaps
    }

    /// One that is idle has nothing to go on with.
    pub(super) fn count_preemption(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        sequence.past.preemptions += sequence.group.is_some() as u64;
    }

    fn swap_out(&mut self, slots: &[Slot]) -> bool {
        if self.options.preemption == Preemption::Recompute {
            return false;
        }
        slots.iter().for_each(|&slot| self.cut_to_computed(slot));
        let load = self.load_out(slots);
        let worth = self.options.preemption == Preemption::Swap || self.costs.favour_swapping(load);
        let nothing = slots.iter().all(|slot| self.sequences[*slot].table.blocks().is_empty());
        if nothing || !worth || !self.make_host_room(slots) {
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

    fn load_out(&self, slots: &[Slot]) -> Load {
        self.blocks.load_out(slots.iter().map(|slot| &self.sequences[*slot].table))
    }

    /// Room in the host tier for what these would move there. Where there is too little, those that have been idle the longest lose theirs.
    fn make_host_room(&mut self, slots: &[Slot]) -> bool {
        if self.load_out(slots).blocks > self.blocks.host_total() {
            return false;
        }
        // What they had in common with these has to move then, too.
        while self.load_out(slots).blocks > self.blocks.host_free() {
            let Some((.., longest)) = self.hosted.first() else { return false };
            self.take_blocks(longest);
        }
        true
    }

    /// Blocks that were reserved for a step that did not come hold nothing.
    fn cut_to_computed(&mut self, slot: Slot) {
        self.wake(slot);
        let sequence = &mut self.sequences[slot];
        self.blocks.truncate(&mut sequence.table, sequence.computed);
    }

    /// What the sequence computed is lost, wherever it lies.
    pub(super) fn take_blocks(&mut self, slot: Slot) {
        self.wake(slot);
        let sequence = &mut self.sequences[slot];
        self.blocks.free(&mut sequence.table);
        sequence.computed = 0;
    }

    /// Brings back of the group what lies in the host tier, all or nothing. False: there are not enough blocks.
    pub(super) fn bring_back(&mut self, id: GroupId) -> bool {
        let members = self.groups.lend(id);
        let back = self.swap_in(&members);
        self.groups.give_back(id, members);
        back
    }

    /// Brings back one sequence, where there are blocks for it that nobody holds.
    pub fn fetch(&mut self, id: SeqId) {
        let Some(slot) = self.sequences.find(id) else { return };
        let runs = self.sequences[slot].group.is_some_and(|group| self.groups[group].queue == Queue::Running);
        self.wake(slot);
        self.swap_in(&[slot]);
        if !runs {
            self.rest(slot);
        }
    }

    fn swap_in(&mut self, slots: &[Slot]) -> bool {
        let swapped = |s: &Scheduler, slot: &Slot| s.sequences[*slot].table.swapped();
        if !slots.iter().any(|slot| swapped(self, slot)) {
            return true;
        }
        if self.blocks.needed_back(slots.iter().map(|slot| &self.sequences[*slot].table)) > self.blocks.available() {
            return false;
        }
        for &slot in slots {
            let table = &mut self.sequences[slot].table;
            if table.swapped() {
                self.blocks.swap_in(table).expect("it was counted before");
            }
        }
        // Once all have what was counted: one block may turn out to be there already.
        slots.iter().for_each(|&slot| self.index_all(slot));
        true
    }

    /// What is full can be found again.
    fn index_all(&mut self, slot: Slot) {
        let block_size = self.blocks.block_size();
        let sequence = &mut self.sequences[slot];
        if self.blocks.keeps_prefixes() {
            let full = sequence.computed / block_size;
            sequence.chains(full, block_size);
            let (table, chains) = sequence.table_and_chains();
            (0..full).for_each(|place| self.blocks.index(table, place, chains));
        }
    }

    /// What has to move before the device writes or computes anything. Whoever moves it says so with `moved`.
    pub fn moves(&self) -> &Moves {
        self.blocks.moves()
    }

    /// The moves were made, or have failed. What could not be moved is lost, and will be computed again. A plan that counts on what
    /// did not come back must have been rolled back before.
    pub fn moved(&mut self, out: bool, back: bool) {
        self.preemptions_swapped += if out { self.swapping } else { 0 };
        self.swapping = 0;
        if !(out && back) {
            self.blocks.spoil(!out, !back);
            for slot in self.sequences.slots() {
                if self.sequences.in_slot(slot).is_some_and(|sequence| self.blocks.is_spoilt(&sequence.table)) {
                    self.take_blocks(slot);
                }
            }
        }
        self.blocks.settle_moves();
    }
}
