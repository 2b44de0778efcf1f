//! The table of sequences. Other modules use ids. The scheduler uses slots, so that a step needs no
//! lookup by id.

use std::ops::{Index, IndexMut};

use super::SequenceKv;
use super::slab::{Slab, Slot};
use crate::error::Result;
use crate::types::SeqId;
use crate::types::id_map::IdMap;

/// The sequences of the scheduler, by slot and by id.
#[derive(Debug, Default)]
pub struct Sequences {
    slab: Slab<SequenceKv>,
    slots: IdMap<SeqId, Slot>,
}

impl Sequences {
    /// Reserves space for `more` sequences.
    pub fn try_reserve(&mut self, more: usize) -> Result<()> {
        // A map that is at most half full is rehashed in place. A fuller one could allocate at any
        // insertion.
        self.slots.try_reserve(self.len() + 2 * more)?;
        self.slab.try_reserve(more)
    }

    pub fn insert(&mut self, sequence: SequenceKv) -> Slot {
        let id = sequence.id;
        let slot = self.slab.insert(sequence);
        self.slots.insert(id, slot);
        slot
    }

    pub fn remove(&mut self, slot: Slot) -> SequenceKv {
        let sequence = self.slab.remove(slot);
        self.slots.remove(&sequence.id);
        sequence
    }

    pub fn find(&self, id: SeqId) -> Option<Slot> {
        self.slots.get(&id).copied()
    }

    /// Finds a sequence that is probably in the slot `guess`.
    #[inline]
    pub fn find_near(&self, guess: Slot, id: SeqId) -> Option<Slot> {
        match self.slab.get(guess) {
            Some(sequence) if sequence.id == id => Some(guess),
            _ => self.find(id),
        }
    }

    pub fn get(&self, id: SeqId) -> Option<&SequenceKv> {
        self.find(id).map(|slot| &self.slab[slot])
    }

    pub fn len(&self) -> usize {
        self.slab.len()
    }

    /// Returns two sequences, the second one mutable.
    pub fn two(&mut self, one: Slot, other: Slot) -> (&SequenceKv, &mut SequenceKv) {
        self.slab.two(one, other)
    }

    /// Returns all slots, including empty ones.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + use<> {
        self.slab.slots()
    }

    pub fn in_slot(&self, slot: Slot) -> Option<&SequenceKv> {
        self.slab.get(slot)
    }

    pub fn values(&self) -> impl Iterator<Item = &SequenceKv> {
        self.slab.values()
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut SequenceKv> {
        self.slab.values_mut()
    }
}

impl Index<Slot> for Sequences {
    type Output = SequenceKv;

    #[inline]
    fn index(&self, slot: Slot) -> &SequenceKv {
        &self.slab[slot]
    }
}

impl IndexMut<Slot> for Sequences {
    #[inline]
    fn index_mut(&mut self, slot: Slot) -> &mut SequenceKv {
        &mut self.slab[slot]
    }
}
