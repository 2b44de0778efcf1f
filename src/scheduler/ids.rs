//! The ids of groups, and hash maps with ids of the engine as keys.

use super::slab::Slot;

/// The identity and the position of a group. Smaller ids rank first. In the default order, the rank
/// is the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupId {
    rank: u64,
    number: u64, // unique per group
    slot: Slot,
}

impl GroupId {
    /// An id that ranks after all groups.
    pub const MAX: GroupId = GroupId { rank: u64::MAX, number: u64::MAX, slot: Slot::NONE };

    /// `number` is unique per group and ascends in order of arrival.
    pub(super) fn new(rank: u64, number: u64, slot: Slot) -> GroupId {
        GroupId { rank, number, slot }
    }

    pub(super) fn slot(self) -> Slot {
        self.slot
    }

    /// Returns the rank that the order policy computed. It is the same for all groups in first-come
    /// order.
    pub fn rank(self) -> u64 {
        self.rank
    }

    /// Returns a key that sorts the groups in reverse order.
    pub fn reverse_key(self) -> (u64, u64) {
        (u64::MAX - self.rank, u64::MAX - self.number)
    }
}
