//! How an engine chooses among its requests.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::within;
use crate::error::{Error, Result};

/// Who comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OrderPolicy {
    #[default]
    FirstCome,
    /// The higher priority. One level is worth as much as having come so much earlier.
    Priority { ageing: Duration },
    /// Whoever is likely to generate fewer tokens. A hundred tokens are worth as much as having come so much earlier.
    ShortestPredicted { ageing: Duration },
}

/// What a step is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum BatchingPolicy {
    /// Prompts, in chunks, and decodes together, in the order of the requests.
    #[default]
    Mixed,
    /// Prompts alone, and decodes alone: these when no prompt is left, or when so many prompt tokens have held them up.
    PrefillFirst { threshold: usize },
    /// Every decode, and at most so many prompt tokens.
    DecodeFirst { budget: usize },
    /// As `Mixed`, but nobody joins until all that run have ended.
    Static,
}

/// For how many of its tokens a request needs room before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum AllocationPolicy {
    /// For those it has. Where all have grown so much that the pool is full, the last one goes, and comes back.
    #[default]
    OnDemand,
    /// For all it may come to have: nobody has to go because somebody grows.
    MaxTokens,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Policies {
    pub order: OrderPolicy,
    pub batching: BatchingPolicy,
    pub allocation: AllocationPolicy,
}

impl Policies {
    pub const DEFAULT_AGEING: Duration = Duration::from_secs(10);
    /// Longer than any request waits.
    const MOST_AGEING: Duration = Duration::from_secs(24 * 60 * 60);
    pub const DEFAULT_PREFILL_BUDGET: usize = 256;
    pub const DEFAULT_PREFILL_THRESHOLD: usize = 2048;

    pub fn validate(&self) -> Result<()> {
        if let OrderPolicy::Priority { ageing } | OrderPolicy::ShortestPredicted { ageing } = self.order
            && (ageing < Duration::from_millis(1) || ageing > Self::MOST_AGEING)
        {
            return Err(Error::invalid(format!("ageing is {ageing:?}: it must be from 1ms to {:?}", Self::MOST_AGEING)));
        }
        match self.batching {
            BatchingPolicy::Mixed | BatchingPolicy::Static => Ok(()),
            BatchingPolicy::PrefillFirst { threshold } => {
                within("the prefill threshold", threshold, super::EngineOptions::MAX_BATCH_TOKENS)
            }
            BatchingPolicy::DecodeFirst { budget } => within("the prefill budget", budget, super::EngineOptions::MAX_BATCH_TOKENS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_could_not_work_are_refused_with_their_numbers() {
        let refused = |policies: Policies, why: &str| {
            let error = policies.validate().unwrap_err();
            assert!(error.message().contains(why), "{error}, expected {why}");
        };
        let order = |order| Policies { order, ..Policies::default() };
        let batching = |batching| Policies { batching, ..Policies::default() };
        order(OrderPolicy::Priority { ageing: Policies::DEFAULT_AGEING }).validate().unwrap();
        refused(order(OrderPolicy::Priority { ageing: Duration::ZERO }), "ageing is 0ns");
        refused(order(OrderPolicy::ShortestPredicted { ageing: Duration::from_secs(100_000) }), "ageing is 100000s");
        refused(batching(BatchingPolicy::DecodeFirst { budget: 0 }), "prefill budget is 0");
        refused(batching(BatchingPolicy::PrefillFirst { threshold: usize::MAX }), "prefill threshold is");
    }
}
