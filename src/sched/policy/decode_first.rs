use super::{Batching, Portion, Running};

/// Every decode has its row in every step, beside at most `budget` rows of prompts: this bounds how long a step takes, and so the
/// time between two tokens.
pub struct DecodeFirst {
    pub budget: usize,
}

impl Batching for DecodeFirst {
    fn portion(&self, running: Running) -> Portion {
        let prompt_rows = self.budget.min(running.most_rows() - running.decodes());
        Portion { prompt_rows, ..Portion::WHATEVER }
    }
}
