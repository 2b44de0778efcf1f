use super::{Claim, Order};

/// First come, first served.
pub struct FirstCome;

impl Order for FirstCome {
    fn rank(&self, _: &Claim) -> u64 {
        0
    }
}
