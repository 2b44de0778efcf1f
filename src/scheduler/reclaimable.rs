//! Reclaimable sequences: they do not run and hold device blocks, which can be taken from them.

use super::ordered::OrderedSet;
use super::sequence_kv::SequenceKv;
use super::slab::Slot;
use super::{GroupId, Scheduler};
use crate::error::Result;
use crate::kv::BlockManager;
use crate::types::SeqId;

/// Reclaimable sequences in the order of reclamation.
#[derive(Debug, Default)]
pub(super) struct ReclaimableSet {
    /// Sequences that have not been checked for blocks of their own.
    fresh: OrderedSet<Place>,
    /// Sequences that shared all blocks when they were checked, so that taking their blocks would
    /// have freed none.
    sharing: OrderedSet<Place>,
}

/// The order key, the id and the slot of a sequence.
pub(super) type Place = ((u64, u64), SeqId, Slot);

impl ReclaimableSet {
    /// Reserves space for `len` sequences.
    pub fn try_reserve(&mut self, len: usize) -> Result<()> {
        self.fresh.try_reserve(len)?;
        self.sharing.try_reserve(len)
    }

    fn insert(&mut self, place: Place) {
        self.fresh.insert(place);
    }

    fn remove(&mut self, place: Place) {
        if !self.fresh.remove(place) {
            self.sharing.remove(place);
        }
    }

    /// Returns the first sequence with a block of its own, or the first one if none has. Each
    /// sequence is checked once.
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

    /// Returns whether exactly one list contains the sequence. For tests.
    pub fn contains(&self, place: Place) -> bool {
        self.fresh.contains(place) != self.sharing.contains(place)
    }

    /// Returns the number of sequences. For tests.
    pub fn len(&self) -> usize {
        self.fresh.len() + self.sharing.len()
    }
}

/// All reclaimable sequences, and the number of idle ones.
#[derive(Debug, Default)]
pub(super) struct ReclaimableSequences {
    /// Sequences of groups that do not run.
    pub of_groups: ReclaimableSet,
    /// Idle sequences with device blocks.
    pub idle: ReclaimableSet,
    /// Idle sequences in the host tier.
    pub hosted: OrderedSet<Place>,
    idle_sequences: usize,
    /// Number of sequences that have become idle so far.
    last_idle: u64,
}

impl ReclaimableSequences {
    /// Reserves space for `total` sequences.
    pub fn try_reserve(&mut self, total: usize) -> Result<()> {
        self.of_groups.try_reserve(total)?;
        self.idle.try_reserve(total)?;
        self.hosted.try_reserve(total)
    }

    /// Returns the number of idle sequences, in any tier and without blocks.
    pub fn idle_sequences(&self) -> usize {
        self.idle_sequences
    }

    /// Marks the sequence reclaimable if it holds blocks. In the host tier, only idle sequences are
    /// reclaimable.
    fn mark(&mut self, blocks: &mut BlockManager, sequence: &mut SequenceKv, slot: Slot) {
        if sequence.table.swapped() {
            if sequence.group.is_none() {
                self.hosted.insert(sequence.order_key(slot));
            }
            return;
        }
        if sequence.table.is_reclaimable() || sequence.table.blocks().is_empty() {
            return;
        }
        blocks.mark_reclaimable(&mut sequence.table);
        self.set_of(sequence).insert(sequence.order_key(slot));
    }

    fn unmark(&mut self, blocks: &mut BlockManager, sequence: &mut SequenceKv, slot: Slot) {
        if sequence.table.swapped() {
            self.hosted.remove(sequence.order_key(slot));
        }
        if !sequence.table.is_reclaimable() {
            return;
        }
        blocks.unmark_reclaimable(&mut sequence.table);
        self.set_of(sequence).remove(sequence.order_key(slot));
    }

    fn set_of(&mut self, sequence: &SequenceKv) -> &mut ReclaimableSet {
        if sequence.group.is_some() { &mut self.of_groups } else { &mut self.idle }
    }

    /// Makes the sequence the one that has been idle for the shortest time.
    fn begin_idle(&mut self, sequence: &mut SequenceKv) {
        self.last_idle += 1;
        self.idle_sequences += sequence.idle_since.replace(self.last_idle).is_none() as usize;
    }

    /// Ends the idle state of the sequence, if it is idle.
    pub fn end_idle(&mut self, sequence: &mut SequenceKv) {
        self.idle_sequences -= sequence.idle_since.take().is_some() as usize;
    }
}

impl SequenceKv {
    /// Returns the order key: the longest idle sequence first, or the youngest group first.
    pub(super) fn order_key(&self, slot: Slot) -> Place {
        let key = self.group.map_or((self.idle_since.unwrap_or(0), 0), GroupId::reverse_key);
        (key, self.id, slot)
    }
}

impl Scheduler {
    /// Marks the sequence reclaimable if it holds blocks. In the host tier, only idle sequences are
    /// reclaimable.
    pub(super) fn mark_reclaimable(&mut self, slot: Slot) {
        self.reclaimable.mark(&mut self.blocks, &mut self.sequences[slot], slot);
    }

    /// Removes the sequence from the reclaimable sets, before it runs, loses its blocks, or changes
    /// its order key.
    pub(super) fn unmark_reclaimable(&mut self, slot: Slot) {
        self.reclaimable.unmark(&mut self.blocks, &mut self.sequences[slot], slot);
    }

    /// Makes the sequence idle and reclaimable.
    pub(super) fn make_idle(&mut self, slot: Slot) {
        self.reclaimable.begin_idle(&mut self.sequences[slot]);
        self.mark_reclaimable(slot);
    }

    pub(super) fn mark_group_reclaimable(&mut self, group: GroupId) {
        (0..self.queues.groups[group].members.len()).for_each(|place| self.mark_reclaimable(self.queues.groups[group].members[place]));
    }

    pub(super) fn unmark_group_reclaimable(&mut self, group: GroupId) {
        (0..self.queues.groups[group].members.len()).for_each(|place| self.unmark_reclaimable(self.queues.groups[group].members[place]));
    }

    /// Makes a block available by taking blocks of reclaimable sequences. Returns false if there
    /// are none, or if the blocks become available when later steps have copied them.
    pub(super) fn reclaim(&mut self) -> bool {
        let before = self.blocks.available();
        while self.blocks.idle_blocks() > 0 && !self.blocks.has_queued_out() && self.blocks.available() == before && self.reclaim_one() {}
        self.blocks.available() > before
    }

    /// Takes the blocks of one reclaimable sequence, or of one group if no idle sequence has
    /// blocks.
    pub(super) fn reclaim_one(&mut self) -> bool {
        let has_own = |slot| self.blocks.has_own(&self.sequences[slot].table);
        if let Some(slot) = self.reclaimable.idle.next(has_own) {
            self.take_blocks_of(&[slot]);
            self.mark_reclaimable(slot);
            return true;
        }
        let group = self.reclaimable.of_groups.next(has_own).and_then(|slot| self.sequences[slot].group);
        group.map(|group| self.take_all_blocks(group)).is_some()
    }
}
