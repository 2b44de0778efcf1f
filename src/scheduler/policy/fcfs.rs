use super::{Order, RankInputs};

/// First come, first served.
pub struct Fcfs;

impl Order for Fcfs {
    fn rank(&self, _: &RankInputs<'_>) -> u64 {
        0
    }

    fn common_rank(&self) -> Option<u64> {
        Some(0)
    }
}
