//! Who has to go, and where to: to the host tier and back, or to be computed again.

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
        self.token == 0.0 || 2.0 * load.blocks as f64 * self.block <= load.slots as f64 * self.token
    }
}

impl Scheduler {
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }

    pub(super) fn take_all_blocks(&mut self, id: GroupId) {
        let members = std::mem::take(&mut self.groups.get_mut(&id).expect("who is preempted is known").members);
        self.swapping += self.give_way(&members) as u64;
        self.preemptions += 1;
        self.groups.get_mut(&id).expect("who is preempted is known").members = members;
    }

    /// Takes the blocks of these, all or nothing: into the host tier, or else what they computed will be computed again, unless
    /// the prefix index can still find it. True: they are in the host tier.
    pub(super) fn give_way(&mut self, seqs: &[SeqId]) -> bool {
        let swaps = self.swap_out(seqs);
        if !swaps {
            seqs.iter().for_each(|&seq| self.take_blocks(seq));
        }
        seqs.iter().for_each(|&seq| self.count_preemption(seq));
        swaps
    }

    /// One that is idle has nothing to go on with.
    pub(super) fn count_preemption(&mut self, seq: SeqId) {
        let sequence = self.sequences.get_mut(&seq).expect("who gives way is known");
        sequence.past.preemptions += sequence.group.is_some() as u64;
    }

    fn swap_out(&mut self, seqs: &[SeqId]) -> bool {
        if self.options.preemption == Preemption::Recompute {
            return false;
        }
        seqs.iter().for_each(|&seq| self.cut_to_computed(seq));
        let load = self.load_out(seqs);
        let worth = self.options.preemption == Preemption::Swap || self.costs.favour_swapping(load);
        let nothing = seqs.iter().all(|seq| self.sequences[seq].table.blocks().is_empty());
        if nothing || !worth || !self.make_host_room(seqs) {
            return false;
        }
        for seq in seqs {
            let table = &mut self.sequences.get_mut(seq).expect("who gives way is known").table;
            if !table.swapped() {
                self.blocks.swap_out(table).expect("the host tier has room for their load");
            }
        }
        true
    }

    fn load_out(&self, seqs: &[SeqId]) -> Load {
        self.blocks.load_out(seqs.iter().map(|seq| &self.sequences[seq].table))
    }

    /// Room in the host tier for what these would move there. Where there is too little, those that have been idle the longest lose theirs.
    fn make_host_room(&mut self, seqs: &[SeqId]) -> bool {
        if self.load_out(seqs).blocks > self.blocks.host_total() {
            return false;
        }
        // What they had in common with these has to move then, too.
        while self.load_out(seqs).blocks > self.blocks.host_free() {
            let Some(&(_, longest)) = self.hosted.first() else { return false };
            self.take_blocks(longest);
        }
        true
    }

    /// Blocks that were reserved for a step that did not come hold nothing.
    fn cut_to_computed(&mut self, seq: SeqId) {
        self.wake(seq);
        let sequence = self.sequences.get_mut(&seq).expect("who gives way is known");
        self.blocks.truncate(&mut sequence.table, sequence.computed);
    }

    /// What the sequence computed is lost, wherever it lies.
    pub(super) fn take_blocks(&mut self, seq: SeqId) {
        self.wake(seq);
        let sequence = self.sequences.get_mut(&seq).expect("a known sequence holds blocks");
        self.blocks.free(&mut sequence.table);
        sequence.computed = 0;
    }

    /// Brings back of the group what lies in the host tier, all or nothing. False: there are not enough blocks.
    pub(super) fn bring_back(&mut self, id: GroupId) -> bool {
        if self.blocks.swapped() == 0 {
            return true; // nobody lies there
        }
        let members = std::mem::take(&mut self.groups.get_mut(&id).expect("a running group is known").members);
        let back = self.swap_in(&members);
        self.groups.get_mut(&id).expect("a running group is known").members = members;
        back
    }

    /// Brings back one sequence, where there are blocks for it that nobody holds.
    pub fn fetch(&mut self, id: SeqId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        let runs = sequence.group.is_some_and(|group| self.running.contains(&group));
        self.wake(id);
        self.swap_in(&[id]);
        if !runs {
            self.rest(id);
        }
    }

    fn swap_in(&mut self, seqs: &[SeqId]) -> bool {
        let swapped = |s: &Scheduler, seq: &SeqId| s.sequences[seq].table.swapped();
        if !seqs.iter().any(|seq| swapped(self, seq)) {
            return true;
        }
        if self.blocks.needed_back(seqs.iter().map(|seq| &self.sequences[seq].table)) > self.blocks.available() {
            return false;
        }
        for seq in seqs {
            let table = &mut self.sequences.get_mut(seq).expect("who comes back is known").table;
            if table.swapped() {
                self.blocks.swap_in(table).expect("it was counted before");
            }
        }
        // Once all have what was counted: one block may turn out to be there already.
        seqs.iter().for_each(|&seq| self.index_all(seq));
        true
    }

    /// What is full can be found again.
    fn index_all(&mut self, seq: SeqId) {
        let block_size = self.blocks.block_size();
        let sequence = self.sequences.get_mut(&seq).expect("who comes back is known");
        if self.blocks.keeps_prefixes() {
            let full = sequence.computed / block_size;
            sequence.chains(full, block_size);
            let (table, chains) = sequence.table_and_chains();
            (table.gone()..full).for_each(|place| self.blocks.index(table, place, chains));
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
            let lost: Vec<SeqId> = self.sequences.values().filter(|seq| self.blocks.is_spoilt(&seq.table)).map(|seq| seq.id).collect();
            lost.into_iter().for_each(|seq| self.take_blocks(seq));
        }
        self.blocks.settle_moves();
    }
}
