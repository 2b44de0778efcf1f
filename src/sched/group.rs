use std::hash::{Hash, Hasher};

use super::sequence::SeqId;

/// Which group, and where it stands: the smaller one comes first. In the default order that is who came first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupId {
    rank: u64,
    number: u64,
}

impl GroupId {
    /// After all there can be.
    pub const MAX: GroupId = GroupId { rank: u64::MAX, number: u64::MAX };

    pub fn new(rank: u64, number: u64) -> GroupId {
        GroupId { rank, number }
    }

    /// The last one is the smallest.
    pub fn reversed(self) -> (u64, u64) {
        (u64::MAX - self.rank, u64::MAX - self.number)
    }
}

impl Hash for GroupId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.number); // each has its own
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

/// A request's sequences: they run, wait and are preempted together.
#[derive(Debug)]
pub struct Group {
    pub id: GroupId,
    pub branching: Branching,
    pub members: Vec<SeqId>,
    /// It has run, if only to wait again.
    pub begun: bool,
}

impl Group {
    /// Rows of a step that it may come to need.
    pub fn width(&self) -> usize {
        self.branching.width().max(self.members.len())
    }
}
