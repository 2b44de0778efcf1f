//! The invariants between two steps. For tests.

use super::group::Queue;
use super::slab::Slot;
use super::{GroupId, Scheduler};
use crate::types::SeqId;
use crate::types::batch::BlockCopy;

impl Scheduler {
    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check(&self) {
        self.check_with(&[]);
    }

    /// Does the same while a step with these copies is in flight.
    pub fn check_with(&self, copies: &[BlockCopy]) {
        self.blocks.check(self.sequences.values().map(|sequence| &sequence.table), copies);
        self.queues.check();
        assert!(self.queues.running_width() <= self.options.max_seqs, "more sequences run than max_seqs");
        self.check_places();
        self.check_reclaimable();
        for sequence in self.sequences.values() {
            sequence.check(self.blocks.block_size());
            let full = sequence.computed / self.blocks.block_size();
            self.blocks.check_found(&sequence.table, &sequence.known_block_hashes()[..full.min(sequence.known_block_hashes().len())]);
        }
    }

    /// Returns the ids of all sequences. For tests.
    pub fn ids(&self) -> impl Iterator<Item = SeqId> {
        self.sequences.values().map(|sequence| sequence.id)
    }

    /// Panics unless exactly the sequences that hold device blocks and do not run are reclaimable.
    fn check_reclaimable(&self) {
        let (mut reclaimable, mut hosted) = (0, 0);
        for slot in self.known_slots() {
            let sequence = &self.sequences[slot];
            let runs = match sequence.group {
                Some(group) => self.queues.groups[group].queue == Queue::Running,
                None => !sequence.is_idle(),
            };
            let on_device = !sequence.table.swapped() && !sequence.table.blocks().is_empty();
            assert_eq!(sequence.table.is_reclaimable(), !runs && on_device, "sequence {} is reclaimable and runs, or neither", sequence.id);
            if sequence.table.is_reclaimable() {
                let places = if sequence.group.is_some() { &self.reclaimable.of_groups } else { &self.reclaimable.idle };
                assert!(places.contains(sequence.order_key(slot)), "sequence {} is missing among the reclaimable ones", sequence.id);
                reclaimable += 1;
            }
            if sequence.table.swapped() && sequence.is_idle() {
                assert!(
                    self.reclaimable.hosted.contains(sequence.order_key(slot)),
                    "sequence {} is missing among the idle ones of the host tier",
                    sequence.id
                );
                hosted += 1;
            }
        }
        assert_eq!(
            self.reclaimable.of_groups.len() + self.reclaimable.idle.len(),
            reclaimable,
            "the number of reclaimable sequences is wrong"
        );
        assert_eq!(self.reclaimable.hosted.len(), hosted, "the number of idle sequences in the host tier is wrong");
    }

    /// Panics unless every sequence is found by its id and is a member of a group, idle, or pinned.
    fn check_places(&self) {
        let mut members: Vec<Slot> = Vec::new();
        for group in self.queues.groups.values() {
            assert!(!group.members.is_empty(), "a group has no members");
            members.extend(&group.members);
        }
        members.sort_unstable();
        assert!(members.windows(2).all(|pair| pair[0] != pair[1]), "a sequence is a member of two groups");
        let mut idle = 0;
        for slot in self.known_slots() {
            let sequence = &self.sequences[slot];
            assert_eq!(self.sequences.find(sequence.id), Some(slot), "sequence {} is not found by its id", sequence.id);
            assert_eq!(members.binary_search(&slot).is_ok(), sequence.group.is_some(), "sequence {} and its group disagree", sequence.id);
            let contains = |group: GroupId| self.queues.groups[group].members.contains(&slot);
            assert!(sequence.group.is_none_or(contains), "sequence {} is no member of its group", sequence.id);
            assert!(
                sequence.group.is_some() || sequence.is_idle() || sequence.request.pinned,
                "sequence {} has no group and is neither idle nor pinned",
                sequence.id
            );
            assert!(sequence.group.is_none() || !sequence.is_idle(), "sequence {} is idle in a group", sequence.id);
            assert_eq!(
                self.pins.contains(slot),
                sequence.request.pinned,
                "sequence {} is pinned and not in the list of pins, or the reverse",
                sequence.id
            );
            idle += sequence.is_idle() as usize;
        }
        assert_eq!(self.idle(), idle, "the number of idle sequences is wrong");
    }

    fn known_slots(&self) -> impl Iterator<Item = Slot> {
        self.sequences.slots().filter(|slot| self.sequences.in_slot(*slot).is_some())
    }
}
