use super::{Batching, Running, StepBudget};

/// Decodes first: each step contains all decodes and at most `budget` prompt tokens. This bounds
/// the duration of a step and thus the time between two tokens.
#[derive(Clone)]
pub struct DecodeFirst {
    pub budget: usize,
}

impl Batching for DecodeFirst {
    fn step_budget(&self, running: &dyn Running) -> StepBudget {
        let prompt_rows = self.budget.min(running.max_tokens().saturating_sub(running.decodes()));
        StepBudget { max_prompt_tokens: prompt_rows, ..StepBudget::UNLIMITED }
    }

    fn fork(&self) -> Box<dyn Batching> {
        Box::new(self.clone())
    }
}
