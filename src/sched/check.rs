//! The invariants between two steps. For tests.

use std::collections::BTreeSet;

use super::{GroupId, Scheduler, SeqId, Sequence};

impl Scheduler {
    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check(&self) {
        self.blocks.check(self.sequences.values().map(|sequence| &sequence.table));
        self.check_queues();
        self.check_places();
        self.check_resting();
        for sequence in self.sequences.values() {
            let pinned = self.pins.iter().any(|(_, pin)| *pin == sequence.id);
            sequence.check(self.blocks.block_size(), pinned);
            let full = sequence.computed / self.blocks.block_size();
            self.blocks.check_found(&sequence.table, &sequence.known_chains()[..full.min(sequence.known_chains().len())]);
        }
    }

    fn check_queues(&self) {
        let mut queued: Vec<GroupId> = self.waiting.iter().chain(&self.running).chain(&self.paused).copied().collect();
        queued.sort_unstable();
        let mut known: Vec<GroupId> = self.groups.keys().copied().collect();
        known.sort_unstable();
        assert_eq!(queued, known, "every group is in exactly one queue");
        assert!(self.running.is_sorted() && self.paused.is_sorted(), "queues are ordered by age");
        let waits = |id: &GroupId| !self.running.contains(id);
        let members: usize = self.groups.values().filter(|group| waits(&group.id)).map(|group| group.members.len()).sum();
        assert_eq!(self.waiting(), members, "whoever is in a group that does not run is counted as waiting");
        assert!(self.width() <= self.options.max_seqs, "every running sequence has its row");
    }

    /// Who holds blocks rests unless it runs or is a pin's, and has its place among those that give way.
    fn check_resting(&self) {
        let mut resting = 0;
        for (id, sequence) in &self.sequences {
            let runs = match sequence.group {
                Some(group) => self.running.contains(&group),
                None => !self.idle.contains(id),
            };
            let on_device = !sequence.table.swapped() && !sequence.table.blocks().is_empty();
            assert_eq!(sequence.table.rests(), !runs && on_device, "sequence {id} rests unless it runs");
            if sequence.table.rests() {
                let places = if sequence.group.is_some() { &self.resting } else { &self.resting_idle };
                assert!(places.contains(sequence.place()), "sequence {id} has its place");
                resting += 1;
            }
        }
        let hosted = self.sequences.values().filter(|sequence| sequence.table.swapped() && self.idle.contains(&sequence.id));
        assert!(hosted.map(Sequence::place).collect::<BTreeSet<_>>() == self.hosted, "whoever is idle in the host tier has its place");
        assert_eq!(self.resting.len() + self.resting_idle.len(), resting, "whoever has a place rests");
    }

    /// Every sequence is a member of its group, idle, or pinned.
    fn check_places(&self) {
        let mut places: Vec<SeqId> = self.idle.iter().copied().collect();
        places.extend(self.pins.iter().filter(|(_, seq)| self.sequences[seq].group.is_none()).map(|(_, seq)| seq));
        for group in self.groups.values() {
            assert!(!group.members.is_empty(), "a group has members");
            assert!(group.members.iter().all(|seq| self.sequences[seq].group == Some(group.id)), "a member knows its group");
            places.extend(&group.members);
        }
        places.sort_unstable();
        let mut known: Vec<SeqId> = self.sequences.keys().copied().collect();
        known.sort_unstable();
        assert_eq!(places, known, "every sequence has exactly one place");
    }
}
