use super::{Order, RankInputs};

/// First come, first served.
pub struct Fcfs;

impl Order for Fcfs {
    fn rank(&self, _: &RankInputs) -> u64 {
        0
    }
}
