use super::{Claim, Order};

/// First come, first served.
pub struct Fcfs;

impl Order for Fcfs {
    fn rank(&self, _: &Claim) -> u64 {
        0
    }
}
