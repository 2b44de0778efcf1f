use std::time::Duration;

use super::{Claim, Order};

/// Whoever is likely to generate the fewest tokens first. Who has waited for `ageing` comes before those that come then with
/// a hundred tokens less.
///
/// A guess is all that there is: hosts ask alike for what is alike, so a request will generate as much as those before it that
/// were allowed about as many tokens (up to the same power of two), and what it is allowed while there have been none.
pub struct ShortestPredicted {
    ageing: Duration,
    /// By the logarithm of what was allowed: a running average of what was generated, over some sixteen sequences.
    averages: [Option<f64>; usize::BITS as usize + 1],
}

const TOKENS: f64 = 100.0;
const MEMORY: f64 = 16.0;

impl ShortestPredicted {
    pub fn new(ageing: Duration) -> ShortestPredicted {
        ShortestPredicted { ageing, averages: [None; usize::BITS as usize + 1] }
    }

    fn predict(&self, most: usize) -> f64 {
        self.averages[kind(most)].unwrap_or(most as f64).min(most as f64)
    }
}

fn kind(most: usize) -> usize {
    (usize::BITS - most.leading_zeros()) as usize
}

impl Order for ShortestPredicted {
    fn rank(&self, claim: &Claim) -> u64 {
        let later = self.predict(claim.most) / TOKENS * self.ageing.as_micros() as f64;
        claim.at.saturating_add(later as u64)
    }

    fn learn(&mut self, most: usize, generated: usize) {
        let average = self.averages[kind(most)].get_or_insert(generated as f64);
        *average += (generated as f64 - *average) / MEMORY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_requests_alike_have_generated_is_expected_of_the_next() {
        let mut order = ShortestPredicted::new(Duration::from_secs(1));
        assert_eq!(order.predict(1000), 1000.0, "nothing is known: it may use all that it is allowed");
        order.learn(900, 40);
        assert_eq!(order.predict(1000), 40.0);
        (0..200).for_each(|_| order.learn(600, 80));
        assert!((79.0..80.1).contains(&order.predict(1000)), "{}", order.predict(1000));
        assert_eq!(order.predict(30), 30.0, "it is allowed less, and is of another kind");
        order.learn(31, 100);
        assert_eq!(order.predict(30), 30.0, "nobody generates more than it is allowed");
    }

    #[test]
    fn a_hundred_tokens_more_are_as_much_as_the_ageing_time_later() {
        let order = ShortestPredicted::new(Duration::from_secs(10));
        let rank = |at: u64, most| order.rank(&Claim { at, priority: 0, most });
        assert_eq!(rank(0, 300), rank(20_000_000, 100));
        assert!(rank(19_999_999, 100) < rank(0, 300));
    }
}
