use super::sequence::SeqId;

/// In the order in which they came: a larger one is younger.
pub type GroupId = u64;

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
}

impl Group {
    /// Rows of a step that it may come to need.
    pub fn width(&self) -> usize {
        self.branching.width().max(self.members.len())
    }
}
