use super::{Batching, Running, StepBudget};

/// Prompt chunks and decodes together, in the order of the groups.
#[derive(Clone)]
pub struct Mixed;

impl Batching for Mixed {
    fn step_budget(&self, _: &dyn Running) -> StepBudget {
        StepBudget::UNLIMITED
    }

    fn fork(&self) -> Box<dyn Batching> {
        Box::new(self.clone())
    }
}
