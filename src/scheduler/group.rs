use std::ops::Index;

use super::ids::GroupId;
use super::sequence_kv::SequenceKv;
use super::slab::{Slab, Slot};
use crate::error::Result;

/// The number of sequences that a request forks into at its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Branching {
    /// One sequence.
    One,
    /// Samples, which end independently.
    Samples(usize),
    /// Beams. A sampled beam that is not chosen is dropped.
    Beams(usize),
    /// No sampling: the tokens are computed and stay in the prefix cache.
    Pin,
}

impl Branching {
    /// Returns the maximum number of concurrent sequences.
    pub fn max_members(self) -> usize {
        match self {
            Branching::One | Branching::Pin => 1,
            Branching::Samples(n) | Branching::Beams(n) => n,
        }
    }
}

/// The queue of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    Waiting,
    Running,
    Paused,
}

/// The sequences of one request, which run, wait and are preempted together.
#[derive(Debug)]
pub struct SequenceGroup {
    pub branching: Branching,
    pub members: Vec<Slot>,
    /// Preallocated sequences for future forks, so that no step waits for memory. A dropped beam
    /// returns to this list.
    pub shells: Vec<SequenceKv>,
    pub queue: Queue,
    /// Whether the group has run before.
    pub started: bool,
}

impl SequenceGroup {
    /// Returns the maximum number of sequences of the group in a step.
    pub fn width(&self) -> usize {
        self.branching.max_members().max(self.members.len())
    }

    fn totals(&self) -> QueueTotals {
        QueueTotals { members: self.members.len(), width: self.width(), shells: self.shells.len() }
    }
}

/// The totals over all groups of a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueTotals {
    pub members: usize,
    pub width: usize,
    pub shells: usize,
}

impl QueueTotals {
    fn add(&mut self, other: QueueTotals) {
        self.members += other.members;
        self.width += other.width;
        self.shells += other.shells;
    }

    fn subtract(&mut self, other: QueueTotals) {
        self.members -= other.members;
        self.width -= other.width;
        self.shells -= other.shells;
    }
}

/// All groups, and the totals of each queue. The totals are updated with each change, since a scan
/// would be too slow.
#[derive(Debug, Default)]
pub struct SequenceGroups {
    slab: Slab<SequenceGroup>,
    last: u64, // number of groups inserted so far
    tallies: [QueueTotals; 3],
}

impl SequenceGroups {
    pub fn try_reserve(&mut self, more: usize) -> Result<()> {
        self.slab.try_reserve(more)
    }

    /// Inserts a group that arrives now.
    pub fn insert(&mut self, rank: u64, group: SequenceGroup) -> GroupId {
        self.last += 1;
        self.tallies[group.queue as usize].add(group.totals());
        GroupId::new(rank, self.last, self.slab.insert(group))
    }

    pub fn remove(&mut self, id: GroupId) -> SequenceGroup {
        let group = self.slab.remove(id.slot());
        self.tallies[group.queue as usize].subtract(group.totals());
        group
    }

    /// Changes a group and updates the totals. Groups must not be changed in another way.
    pub fn change<T>(&mut self, id: GroupId, change: impl FnOnce(&mut SequenceGroup) -> T) -> T {
        let group = &mut self.slab[id.slot()];
        self.tallies[group.queue as usize].subtract(group.totals());
        let result = change(group);
        self.tallies[group.queue as usize].add(group.totals());
        result
    }

    /// Takes the member list out of the group, so that a caller can iterate over it while it
    /// changes other parts of the scheduler. `give_back` returns it.
    pub fn take_members(&mut self, id: GroupId) -> Vec<Slot> {
        std::mem::take(&mut self.slab[id.slot()].members)
    }

    pub fn return_members(&mut self, id: GroupId, members: Vec<Slot>) {
        self.slab[id.slot()].members = members;
    }

    pub fn tally(&self, queue: Queue) -> QueueTotals {
        self.tallies[queue as usize]
    }

    pub fn len(&self) -> usize {
        self.slab.len()
    }

    /// Returns how many groups fit without an allocation. For tests.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    pub fn values(&self) -> impl Iterator<Item = &SequenceGroup> {
        self.slab.values()
    }

    /// Panics unless the totals match the groups. For tests.
    pub fn check(&self) {
        for queue in [Queue::Waiting, Queue::Running, Queue::Paused] {
            let mut totals = QueueTotals::default();
            self.values().filter(|group| group.queue == queue).for_each(|group| totals.add(group.totals()));
            assert_eq!(self.tally(queue), totals, "what is {queue:?} is counted");
        }
    }
}

impl Index<GroupId> for SequenceGroups {
    type Output = SequenceGroup;

    #[inline]
    fn index(&self, id: GroupId) -> &SequenceGroup {
        &self.slab[id.slot()]
    }
}
