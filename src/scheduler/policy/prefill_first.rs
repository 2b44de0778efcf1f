use super::{Batching, Running, StepBudget};

/// Prompts first: steps contain only prompts while there are any, then only decodes. After
/// `threshold` prompt tokens, the decodes get a step in between.
#[derive(Clone)]
pub struct PrefillFirst {
    threshold: usize,
    /// Prompt tokens since the last step with decodes.
    since: usize,
}

impl PrefillFirst {
    pub fn new(threshold: usize) -> PrefillFirst {
        PrefillFirst { threshold, since: 0 }
    }
}

impl Batching for PrefillFirst {
    fn step_budget(&self, _: &dyn Running) -> StepBudget {
        let prompt_rows = self.threshold.saturating_sub(self.since);
        StepBudget { decodes: prompt_rows == 0, max_prompt_tokens: prompt_rows, new_groups: true }
    }

    fn record_step(&mut self, prompt_rows: usize, decode_rows: usize) {
        self.since = if decode_rows > 0 { 0 } else { self.since.saturating_add(prompt_rows) };
    }

    fn fork(&self) -> Box<dyn Batching> {
        Box::new(self.clone())
    }
}
