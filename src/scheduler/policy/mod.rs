//! The policies of the scheduler: order, batching and allocation. Each policy is a file.

mod decode_first;
mod fcfs;
mod max_tokens;
mod mixed;
mod on_demand;
mod prefill_first;
mod priority;
mod shortest;
mod static_batch;

use std::sync::Arc;

use crate::types::options;
use crate::types::options::{AllocationPolicy, BatchingPolicy, OrderPolicy};

/// The order of groups. The first group can always continue, at the expense of all later ones.
pub trait Order: Send + Sync {
    /// Returns the rank of a group, fixed from its arrival to its end. Smaller values are scheduled
    /// first, and equal values in order of arrival. To exclude starvation, the rank must grow with
    /// time.
    fn rank(&self, inputs: &RankInputs<'_>) -> u64;

    /// Returns the rank of every group, if all have the same. A forecast then ranks no request.
    fn common_rank(&self) -> Option<u64> {
        None
    }
}

/// The inputs of an order policy.
#[derive(Clone, Copy)]
pub struct RankInputs<'a> {
    /// Arrival time in microseconds.
    pub at: u64,
    pub priority: i32,
    /// Returns the predicted number of output tokens. It is a function, since the prediction takes
    /// longer than all else and few policies use it.
    pub expected: &'a dyn Fn() -> usize,
}

/// The composition of steps.
///
/// The scheduler calls the policy for each step. A forecast calls a copy of it for simulated steps.
pub trait Batching: Send + Sync {
    fn step_budget(&self, running: &dyn Running) -> StepBudget;

    /// Records that a step with these numbers of tokens has run.
    fn record_step(&mut self, _prompt_rows: usize, _decode_rows: usize) {}

    /// Returns a copy in the same state.
    fn fork(&self) -> Box<dyn Batching>;
}

/// The limits of a step. If no sequence fits them, the step is planned without limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBudget {
    /// Whether sequences with one pending token may be scheduled.
    pub decodes: bool,
    /// Maximum number of tokens of all other sequences.
    pub max_prompt_tokens: usize,
    /// Whether groups that have not run may start.
    pub new_groups: bool,
}

impl StepBudget {
    pub const UNLIMITED: StepBudget = StepBudget { decodes: true, max_prompt_tokens: usize::MAX, new_groups: true };
}

/// The running groups at the start of a step, in the scheduler or in a forecast.
pub trait Running {
    fn is_empty(&self) -> bool;

    /// Returns the number of decode tokens.
    fn decodes(&self) -> usize;

    /// Returns the maximum number of tokens in a step.
    fn max_tokens(&self) -> usize;
}

/// The number of blocks that a group needs to start.
pub trait Allocation: Send + Sync {
    /// Returns the number of tokens for which a sequence of `len` tokens, at most `max_len`, needs
    /// blocks.
    fn length(&self, len: usize, max_len: usize) -> usize;

    /// Returns how many of `total` blocks admission leaves free.
    fn watermark(&self, total: usize) -> usize;

    /// Returns the number of blocks that are reserved for running groups but not allocated. `needs`
    /// are the missing blocks of each group.
    fn reserved(&self, needs: &mut dyn Iterator<Item = usize>) -> usize;

    /// Returns whether each sequence also needs contiguous memory of this length to start.
    fn is_contiguous(&self) -> bool {
        false
    }
}

/// The policies of an engine.
pub struct Policies {
    pub order: Arc<dyn Order>,
    pub batching: Box<dyn Batching>,
    pub allocation: Arc<dyn Allocation>,
}

impl Policies {
    pub fn new(options: &options::Policies) -> Policies {
        Policies {
            order: match options.order {
                OrderPolicy::Fcfs => Arc::new(fcfs::Fcfs),
                OrderPolicy::Priority { ageing } => Arc::new(priority::Priority { ageing }),
                OrderPolicy::ShortestPredicted { ageing } => Arc::new(shortest::ShortestPredicted { ageing }),
            },
            batching: match options.batching {
                BatchingPolicy::Mixed => Box::new(mixed::Mixed),
                BatchingPolicy::PrefillFirst { threshold } => Box::new(prefill_first::PrefillFirst::new(threshold)),
                BatchingPolicy::DecodeFirst { budget } => Box::new(decode_first::DecodeFirst { budget }),
                BatchingPolicy::Static => Box::new(static_batch::Static),
            },
            allocation: match options.allocation {
                AllocationPolicy::OnDemand => Arc::new(on_demand::OnDemand),
                AllocationPolicy::MaxTokens => Arc::new(max_tokens::MaxTokens { contiguous: false }),
                AllocationPolicy::Contiguous => Arc::new(max_tokens::MaxTokens { contiguous: true }),
            },
        }
    }

    /// Returns the same order and allocation, and a copy of the batching policy in the same state.
    pub fn fork(&self) -> Policies {
        Policies { order: self.order.clone(), batching: self.batching.fork(), allocation: self.allocation.clone() }
    }
}

#[cfg(test)]
mod tests;
