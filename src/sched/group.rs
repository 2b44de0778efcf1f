use std::ops::Index;

use super::sequence::Sequence;
use super::slab::{Slab, Slot};
use crate::error::Result;

/// Which group, and where it stands: the smaller one comes first. In the default order that is who came first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupId {
    rank: u64,
    number: u64, // each has its own
    slot: Slot,
}

impl GroupId {
    /// After all there can be.
    pub const MAX: GroupId = GroupId { rank: u64::MAX, number: u64::MAX, slot: Slot::NONE };

    /// Where the order of the policy puts it: the same for all, where that goes by age.
    pub fn rank(self) -> u64 {
        self.rank
    }

    /// The last one is the smallest.
    pub fn reversed(self) -> (u64, u64) {
        (u64::MAX - self.rank, u64::MAX - self.number)
    }
}

/// Into how many sequences a request branches at its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Branching {
    /// One stream.
    One,
    /// So many samples, which end one by one.
    Samples(usize),
    /// So many beams: a beam that is sampled and not chosen is dropped.
    Beams(usize),
    /// None: its tokens are computed and stay where they can be found.
    Pin,
}

impl Branching {
    /// Most sequences at once.
    pub fn width(self) -> usize {
        match self {
            Branching::One | Branching::Pin => 1,
            Branching::Samples(n) | Branching::Beams(n) => n,
        }
    }
}

/// Where a group stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    Waiting,
    Running,
    Paused,
}

/// A request's sequences: they run, wait and are preempted together.
#[derive(Debug)]
pub struct Group {
    pub branching: Branching,
    pub members: Vec<Slot>,
    /// What its next branches are made of, so that none has to wait for memory. A beam that is dropped comes back here.
    pub shells: Vec<Sequence>,
    pub queue: Queue,
    /// It has run, if only to wait again.
    pub begun: bool,
}

impl Group {
    /// Rows of a step that it may come to need.
    pub fn width(&self) -> usize {
        self.branching.width().max(self.members.len())
    }

    fn tally(&self) -> Tally {
        Tally { members: self.members.len(), width: self.width(), shells: self.shells.len() }
    }
}

/// What the groups of a queue come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub members: usize,
    pub width: usize,
    pub shells: usize,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.members += other.members;
        self.width += other.width;
        self.shells += other.shells;
    }

    fn subtract(&mut self, other: Tally) {
        self.members -= other.members;
        self.width -= other.width;
        self.shells -= other.shells;
    }
}

/// The groups there are, and what those of each queue come to: counted as they change, since nobody should have to walk over all.
#[derive(Debug, Default)]
pub struct Groups {
    slab: Slab<Group>,
    last: u64, // counts those that came
    tallies: [Tally; 3],
}

impl Groups {
    pub fn try_reserve(&mut self, more: usize) -> Result<()> {
        self.slab.try_reserve(more)
    }

    /// A group that comes now.
    pub fn insert(&mut self, rank: u64, group: Group) -> GroupId {
        self.last += 1;
        self.tallies[group.queue as usize].add(group.tally());
        GroupId { rank, number: self.last, slot: self.slab.insert(group) }
    }

    pub fn remove(&mut self, id: GroupId) -> Group {
        let group = self.slab.remove(id.slot);
        self.tallies[group.queue as usize].subtract(group.tally());
        group
    }

    /// The only way to change a group: the tallies follow.
    pub fn change<T>(&mut self, id: GroupId, change: impl FnOnce(&mut Group) -> T) -> T {
        let group = &mut self.slab[id.slot];
        self.tallies[group.queue as usize].subtract(group.tally());
        let result = change(group);
        self.tallies[group.queue as usize].add(group.tally());
        result
    }

    /// The members, for who changes everything but them; to be given back.
    pub fn lend(&mut self, id: GroupId) -> Vec<Slot> {
        std::mem::take(&mut self.slab[id.slot].members)
    }

    pub fn give_back(&mut self, id: GroupId, members: Vec<Slot>) {
        self.slab[id.slot].members = members;
    }

    pub fn tally(&self, queue: Queue) -> Tally {
        self.tallies[queue as usize]
    }

    pub fn len(&self) -> usize {
        self.slab.len()
    }

    /// How many there may be before anything is allocated. For tests.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.slab.room()
    }

    pub fn values(&self) -> impl Iterator<Item = &Group> {
        self.slab.values()
    }

    /// Panics unless the tallies are those of the groups. For tests.
    pub fn check(&self) {
        for queue in [Queue::Waiting, Queue::Running, Queue::Paused] {
            let mut tally = Tally::default();
            self.values().filter(|group| group.queue == queue).for_each(|group| tally.add(group.tally()));
            assert_eq!(self.tally(queue), tally, "what is {queue:?} is counted");
        }
    }
}

impl Index<GroupId> for Groups {
    type Output = Group;

    #[inline]
    fn index(&self, id: GroupId) -> &Group {
        &self.slab[id.slot]
    }
}
