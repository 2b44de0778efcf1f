use std::time::Duration;

use super::{Order, RankInputs};

/// Shortest predicted output first, as `OutputLengthPredictor` predicts. A request that has waited
/// for `ageing` ranks like a new one that is 100 tokens shorter.
pub struct ShortestPredicted {
    pub ageing: Duration,
}

const TOKENS: f64 = 100.0;

impl Order for ShortestPredicted {
    fn rank(&self, inputs: &RankInputs<'_>) -> u64 {
        let later = (inputs.expected)() as f64 / TOKENS * self.ageing.as_micros() as f64;
        inputs.at.saturating_add(later as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_predicted_tokens_equal_one_ageing_time() {
        let order = ShortestPredicted { ageing: Duration::from_secs(10) };
        let rank = |at: u64, expected: usize| order.rank(&RankInputs { at, priority: 0, expected: &|| expected });
        assert_eq!(rank(0, 300), rank(20_000_000, 100));
        assert!(rank(19_999_999, 100) < rank(0, 300));
    }
}
