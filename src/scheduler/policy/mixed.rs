use super::{Batching, Running, StepBudget};

/// Prompt chunks and decodes together, in the order of the groups.
pub struct Mixed;

impl Batching for Mixed {
    fn step_budget(&self, _: Running) -> StepBudget {
        StepBudget::UNLIMITED
    }
}
