//! The load of steps, from which a caller derives their cost.

use super::super::StepPlan;

/// The load of one or several steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepLoad {
    pub steps: usize,
    pub tokens: usize,
    /// Number of tokens of sequences with several tokens in the step. Counted only for plans.
    pub prompt_tokens: usize,
    /// Number of positions whose K and V are read, once per sequence and step.
    pub positions: usize,
    /// Number of positions that are read, once per row.
    pub products: usize,
}

impl StepLoad {
    pub fn for_plan(plan: &StepPlan) -> StepLoad {
        let mut load = StepLoad { steps: 1, ..StepLoad::default() };
        for scheduled in &plan.sequences {
            load.add(1, scheduled.tokens, scheduled.first);
            load.prompt_tokens += if scheduled.tokens > 1 { scheduled.tokens } else { 0 };
        }
        load
    }

    /// Adds a sequence that computes `tokens` tokens in each of `steps` steps, after `first`
    /// positions.
    pub fn add(&mut self, steps: usize, tokens: usize, first: usize) {
        let visible = steps * first + tokens * steps * (steps + 1) / 2;
        self.tokens += tokens * steps;
        self.positions += visible;
        self.products += tokens * visible;
    }
}

/// The step times that tests of forecasts assume.
#[cfg(test)]
pub mod test_times {
    use super::StepLoad;

    /// Returns the true time of a step in these tests.
    pub fn seconds(load: StepLoad) -> f64 {
        0.01 * load.steps as f64 + 1e-4 * load.tokens as f64 + 1e-5 * load.positions as f64 + 1e-6 * load.products as f64
    }

    /// Returns the load of one step with these sequences, each with its tokens and first position.
    pub fn load(sequences: &[(usize, usize)]) -> StepLoad {
        let mut load = StepLoad { steps: 1, ..StepLoad::default() };
        sequences.iter().for_each(|&(tokens, first)| load.add(1, tokens, first));
        load
    }
}
