//! Sequences that do not run and hold blocks: they give way, one after the other, where somebody needs these.

use super::ordered::OrderedSet;
use super::sequence::Sequence;
use super::slab::Slot;
use super::{GroupId, Scheduler, SeqId};
use crate::error::Result;

/// In the order in which they are asked to give way.
#[derive(Debug, Default)]
pub(super) struct Resting {
    /// Not asked yet, since they rest.
    fresh: OrderedSet<Place>,
    /// When they were asked, others had all their blocks too, so that these would have cost more than they gave.
    sharing: OrderedSet<Place>,
}

/// When a sequence is asked, and where it lies.
pub(super) type Place = ((u64, u64), SeqId, Slot);

impl Resting {
    /// Makes room for `most` in all.
    pub fn try_reserve(&mut self, most: usize) -> Result<()> {
        self.fresh.try_reserve(most)?;
        self.sharing.try_reserve(most)
    }

    fn insert(&mut self, place: Place) {
        self.fresh.insert(place);
    }

    fn remove(&mut self, place: Place) {
        if !self.fresh.remove(place) {
            self.sharing.remove(place);
        }
    }

    /// The first that has a block of its own, or, where none has, the first. Nobody is asked about twice.
    fn next(&mut self, has_own: impl Fn(Slot) -> bool) -> Option<Slot> {
        while let Some(place) = self.fresh.first() {
            if has_own(place.2) {
                return Some(place.2);
            }
            self.fresh.remove(place);
            self.sharing.insert(place);
        }
        self.sharing.first().map(|(.., slot)| slot)
    }

    /// For tests.
    pub fn contains(&self, place: Place) -> bool {
        self.fresh.contains(place) != self.sharing.contains(place)
    }

    /// For tests.
    pub fn len(&self) -> usize {
        self.fresh.len() + self.sharing.len()
    }
}

impl Sequence {
    /// The longest idle give way first, and of those in a group the youngest.
    pub(super) fn place(&self, slot: Slot) -> Place {
        (self.group.map_or((self.idle_since, 0), GroupId::reversed), self.id, slot)
    }
}

impl Scheduler {
    /// The sequence does not run; what blocks it holds may be taken from it. In the host tier, only from those that are idle.
    pub(super) fn rest(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        if sequence.table.swapped() {
            if sequence.group.is_none() {
                self.hosted.insert(sequence.place(slot));
            }
            return;
        }
        if sequence.table.rests() || sequence.table.blocks().is_empty() {
            return;
        }
        self.blocks.rest(&mut sequence.table);
        let resting = if sequence.group.is_some() { &mut self.resting } else { &mut self.resting_idle };
        resting.insert(sequence.place(slot));
    }

    /// It keeps its blocks, or is about to lose them, or its place.
    pub(super) fn wake(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        if sequence.table.swapped() {
            self.hosted.remove(sequence.place(slot));
        }
        if !sequence.table.rests() {
            return;
        }
        self.blocks.wake(&mut sequence.table);
        let resting = if sequence.group.is_some() { &mut self.resting } else { &mut self.resting_idle };
        resting.remove(sequence.place(slot));
    }

    /// The sequence is idle from now on.
    pub(super) fn lie_idle(&mut self, slot: Slot) {
        self.last_idle += 1;
        self.sequences[slot].idle_since = self.last_idle;
        self.be_idle(slot, true);
        self.rest(slot);
    }

    /// Whether it is idle from now on, and is counted as such.
    pub(super) fn be_idle(&mut self, slot: Slot, idle: bool) {
        let before = std::mem::replace(&mut self.sequences[slot].idle, idle);
        self.idle = self.idle + idle as usize - before as usize;
    }

    pub(super) fn rest_all(&mut self, group: GroupId) {
        (0..self.groups[group].members.len()).for_each(|place| self.rest(self.groups[group].members[place]));
    }

    pub(super) fn wake_all(&mut self, group: GroupId) {
        (0..self.groups[group].members.len()).for_each(|place| self.wake(self.groups[group].members[place]));
    }

    /// Makes a block available that only those that do not run hold.
    pub(super) fn reclaim(&mut self) -> bool {
        let before = self.blocks.available();
        while self.blocks.idle_blocks() > 0 && self.blocks.available() == before && self.one_gives_way() {}
        self.blocks.available() > before
    }

    /// Takes the blocks of one that does not run: of an idle sequence, or, where none holds any, of a group's.
    pub(super) fn one_gives_way(&mut self) -> bool {
        let has_own = |slot| self.blocks.has_own(&self.sequences[slot].table);
        if let Some(slot) = self.resting_idle.next(has_own) {
            self.give_way(&[slot]);
            self.rest(slot);
            return true;
        }
        let group = self.resting.next(has_own).and_then(|slot| self.sequences[slot].group);
        group.map(|group| self.take_all_blocks(group)).is_some()
    }
}
