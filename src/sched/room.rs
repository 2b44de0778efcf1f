//! Blocks for a step, and who gives way where none are free.

use super::slab::Slot;
use super::{Branching, GroupId, Scheduler, StepPlan, Turn};
use crate::batch::BlockCopy;

impl Scheduler {
    /// What the group, which runs, takes from the pool, taken from those that do not run and then from the youngest that does, where
    /// `take` finds too little. False when it was itself the youngest and had to go, or to part with a member.
    pub(super) fn make_room(&mut self, id: GroupId, mut take: impl FnMut(&mut Scheduler) -> bool) -> bool {
        while !take(self) {
            let alone = self.running.len() == 1;
            // What those that rest have in common with the last one to run has to be copied as long as they have it.
            if self.reclaim() || (alone && (self.one_gives_way() || self.unpin_lowest(id))) {
                continue;
            }
            if (alone && self.part(id)) || self.preempt_youngest() == id {
                return false;
            }
        }
        true
    }

    /// The last of several samples leaves the group, and waits to go on by itself. What shared a prompt when it was admitted may
    /// have been rewound or appended to since, so that all together would never fit the pool; each alone does.
    fn part(&mut self, id: GroupId) -> bool {
        let group = &self.groups[id];
        let &[_, .., last] = group.members.as_slice() else { return false };
        if group.branching != Branching::One || self.enqueue_alone(last).is_err() {
            return false;
        }
        self.groups.change(id, |group| group.members.pop());
        self.swapping += self.give_way(&[last]) as u64;
        self.preemptions += 1;
        true
    }

    /// Blocks for the turns, all or nothing.
    pub(super) fn prepare(&mut self, turns: &[Turn], plan: &mut StepPlan) -> bool {
        let copies = &mut plan.batch.copies;
        let before = copies.len();
        for turn in turns {
            let sequence = &mut self.sequences[turn.slot];
            let write = sequence.computed..sequence.computed + turn.rows;
            if self.blocks.prepare(&mut sequence.table, write, copies).is_err() {
                self.undo_copies(before, turns.iter().map(|turn| turn.slot), copies);
                return false;
            }
        }
        true
    }

    /// Takes back the copies from `first` on; they were for `sequences`.
    pub(super) fn undo_copies(&mut self, first: usize, sequences: impl Iterator<Item = Slot> + Clone, copies: &mut Vec<BlockCopy>) {
        for copy in copies.drain(first..).rev() {
            for slot in sequences.clone() {
                self.blocks.undo(copy, &mut self.sequences[slot].table);
            }
        }
    }

    pub(super) fn preempt_youngest(&mut self) -> GroupId {
        let id = self.running.pop().expect("a group without blocks is running");
        self.take_all_blocks(id);
        self.wait(id);
        id
    }

    /// Lets go of the pin that matters least, unless it is the one that is being computed.
    pub(super) fn unpin_lowest(&mut self, group: GroupId) -> bool {
        let lowest = self.pins.iter().find(|(_, slot)| self.sequences[*slot].group != Some(group)).map(|&(_, slot)| slot);
        lowest.map(|slot| self.take_out(slot)).is_some()
    }
}
