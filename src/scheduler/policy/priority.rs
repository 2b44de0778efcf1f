use std::time::Duration;

use super::{Order, RankInputs};
use crate::types::options::MAX_PRIORITY;

/// Higher priority first. A request that has waited for `ageing` ranks like a new one that is one
/// level higher.
pub struct Priority {
    pub ageing: Duration,
}

impl Order for Priority {
    fn rank(&self, inputs: &RankInputs<'_>) -> u64 {
        let levels_below = MAX_PRIORITY.saturating_sub(inputs.priority).max(0) as u64;
        inputs.at.saturating_add(levels_below.saturating_mul(self.ageing.as_micros() as u64))
    }
}
