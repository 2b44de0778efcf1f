use super::{Batching, Portion, Running};

/// Decodes first: each step contains all decodes and at most `budget` prompt tokens. This bounds
/// the duration of a step and thus the time between two tokens.
pub struct DecodeFirst {
    pub budget: usize,
}

impl Batching for DecodeFirst {
    fn portion(&self, running: Running) -> Portion {
        let prompt_rows = self.budget.min(running.max_rows() - running.decodes());
        Portion { prompt_rows, ..Portion::WHATEVER }
    }
}
