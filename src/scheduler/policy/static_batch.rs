use super::{Batching, Running, StepBudget};

/// Static batching: no group is admitted until the running batch has finished. Systems before Orca
/// worked this way, and the PagedAttention paper compares with it.
#[derive(Clone)]
pub struct Static;

impl Batching for Static {
    fn step_budget(&self, running: &dyn Running) -> StepBudget {
        StepBudget { new_groups: running.is_empty(), ..StepBudget::UNLIMITED }
    }

    fn fork(&self) -> Box<dyn Batching> {
        Box::new(self.clone())
    }
}
