//! The scheduling policies of an engine.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::within;
use crate::error::{Error, Result};

/// The rank of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OrderPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Higher priority first. One level outweighs `ageing` of waiting time.
    Priority {
        /// Waiting time that equals one level of priority.
        ageing: Duration,
    },
    /// Shortest predicted output first. 100 tokens outweigh `ageing` of waiting time.
    ShortestPredicted {
        /// Waiting time that equals 100 predicted tokens.
        ageing: Duration,
    },
}

/// The composition of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum BatchingPolicy {
    /// Prompt chunks and decodes together, in the order of the requests.
    #[default]
    Mixed,
    /// Prompts and decodes in separate steps. Decodes run if no prompt is left, or after
    /// `threshold` prompt tokens.
    PrefillFirst {
        /// Number of prompt tokens after which decodes run.
        threshold: usize,
    },
    /// All decodes, and at most `budget` prompt tokens.
    DecodeFirst {
        /// Maximum number of prompt tokens in a step.
        budget: usize,
    },
    /// Static batching: as `Mixed`, but no request is admitted until the running batch has
    /// finished.
    Static,
}

/// The number of tokens for which a request needs KV blocks before it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum AllocationPolicy {
    /// The current tokens. If the pool is full later, the request with the lowest rank is
    /// preempted.
    #[default]
    OnDemand,
    /// The maximum number of tokens. The growth of a running request causes no preemption.
    MaxTokens,
    /// As `MaxTokens`, in contiguous memory of a power of two of blocks, for comparisons with
    /// systems before PagedAttention. Forecasts take it for `MaxTokens`. The C API does not
    /// have it.
    Contiguous,
}

/// The order, batching and allocation policies of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Policies {
    /// Order of requests.
    pub order: OrderPolicy,
    /// Composition of a step.
    pub batching: BatchingPolicy,
    /// Blocks that a request needs before it starts.
    pub allocation: AllocationPolicy,
}

impl Policies {
    /// Default waiting time that equals one level of priority or 100 predicted tokens.
    pub const DEFAULT_AGEING: Duration = Duration::from_secs(10);
    /// Longer than any request waits.
    const MAX_AGEING: Duration = Duration::from_secs(24 * 60 * 60);
    /// Default prompt tokens per step of `DecodeFirst`.
    pub const DEFAULT_PREFILL_BUDGET: usize = 256;
    /// Default prompt tokens of `PrefillFirst` after which decodes run.
    pub const DEFAULT_PREFILL_THRESHOLD: usize = 2048;

    /// Checks the values of the policies.
    pub fn validate(&self) -> Result<()> {
        if let OrderPolicy::Priority { ageing } | OrderPolicy::ShortestPredicted { ageing } = self.order
            && (ageing < Duration::from_millis(1) || ageing > Self::MAX_AGEING)
        {
            return Err(Error::invalid(format!("ageing is {ageing:?}; must be 1ms to {:?}", Self::MAX_AGEING)));
        }
        match self.batching {
            BatchingPolicy::Mixed | BatchingPolicy::Static => Ok(()),
            BatchingPolicy::PrefillFirst { threshold } => {
                within("the prefill threshold", threshold, crate::types::options::EngineOptions::MAX_BATCH_TOKENS)
            }
            BatchingPolicy::DecodeFirst { budget } => {
                within("the prefill budget", budget, crate::types::options::EngineOptions::MAX_BATCH_TOKENS)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_policies_are_refused_with_their_values() {
        let assert_refused = |policies: Policies, message: &str| {
            let error = policies.validate().unwrap_err();
            assert!(error.message().contains(message), "{error}, expected {message}");
        };
        let order = |order| Policies { order, ..Policies::default() };
        let batching = |batching| Policies { batching, ..Policies::default() };
        order(OrderPolicy::Priority { ageing: Policies::DEFAULT_AGEING }).validate().unwrap();
        assert_refused(order(OrderPolicy::Priority { ageing: Duration::ZERO }), "ageing is 0ns");
        assert_refused(order(OrderPolicy::ShortestPredicted { ageing: Duration::from_secs(100_000) }), "ageing is 100000s");
        assert_refused(batching(BatchingPolicy::DecodeFirst { budget: 0 }), "prefill budget is 0");
        assert_refused(batching(BatchingPolicy::PrefillFirst { threshold: usize::MAX }), "prefill threshold is");
    }
}
