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

use super::{Branching, Scheduler};
use crate::options::{self, AllocationPolicy, BatchingPolicy, OrderPolicy};

/// The order of groups. The first group can always continue, at the expense of all later ones.
pub trait Order: Send + Sync {
    /// Returns the rank of a group, fixed from its arrival to its end. Smaller values are scheduled
    /// first, and equal values in order of arrival. To exclude starvation, the rank must grow with
    /// time.
    fn rank(&self, inputs: &RankInputs) -> u64;
}

/// The inputs of an order policy.
#[derive(Debug, Clone, Copy)]
pub struct RankInputs {
    /// Arrival time in microseconds.
    pub at: u64,
    pub priority: i32,
    /// Predicted number of output tokens.
    pub expected: usize,
}

/// The composition of steps.
pub trait Batching: Send {
    fn step_budget(&self, running: Running) -> StepBudget;

    /// Records that a step with these numbers of tokens has run.
    fn record_step(&mut self, _prompt_rows: usize, _decode_rows: usize) {}
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

/// A view of the running groups at the start of a step.
#[derive(Clone, Copy)]
pub struct Running<'a>(pub(super) &'a Scheduler);

impl Running<'_> {
    pub fn is_empty(self) -> bool {
        self.0.queues.running.is_empty()
    }

    /// Returns the number of decode tokens.
    pub fn decodes(self) -> usize {
        let Scheduler { queues, sequences, .. } = self.0;
        let decodes = queues
            .running
            .iter()
            .map(|&id| &queues.groups[id])
            .filter(|group| group.branching != Branching::Pin && group.members.iter().all(|&slot| sequences[slot].pending() == 1));
        decodes.map(|group| group.members.len()).sum()
    }

    /// Returns the maximum number of tokens in a step.
    pub fn max_tokens(self) -> usize {
        self.0.options.max_batch_tokens
    }
}

/// The number of blocks that a group needs to start.
pub trait Allocation: Send {
    /// Returns the number of tokens for which a sequence of `len` tokens, at most `max_len`, needs
    /// blocks.
    fn length(&self, len: usize, max_len: usize) -> usize;

    /// Returns how many of `total` blocks admission leaves free.
    fn watermark(&self, total: usize) -> usize;

    /// Returns the number of blocks that are reserved for running groups but not allocated. `needs`
    /// are the missing blocks of each group.
    fn reserved(&self, needs: &mut dyn Iterator<Item = usize>) -> usize;
}

/// The policies of an engine.
pub struct Policies {
    pub order: Box<dyn Order>,
    pub batching: Box<dyn Batching>,
    pub allocation: Box<dyn Allocation>,
}

impl Policies {
    pub fn new(options: &options::Policies) -> Policies {
        Policies {
            order: order(options.order),
            batching: match options.batching {
                BatchingPolicy::Mixed => Box::new(mixed::Mixed),
                BatchingPolicy::PrefillFirst { threshold } => Box::new(prefill_first::PrefillFirst::new(threshold)),
                BatchingPolicy::DecodeFirst { budget } => Box::new(decode_first::DecodeFirst { budget }),
                BatchingPolicy::Static => Box::new(static_batch::Static),
            },
            allocation: match options.allocation {
                AllocationPolicy::OnDemand => Box::new(on_demand::OnDemand),
                AllocationPolicy::MaxTokens => Box::new(max_tokens::MaxTokens),
            },
        }
    }
}

pub fn order(policy: OrderPolicy) -> Box<dyn Order> {
    match policy {
        OrderPolicy::Fcfs => Box::new(fcfs::Fcfs),
        OrderPolicy::Priority { ageing } => Box::new(priority::Priority { ageing }),
        OrderPolicy::ShortestPredicted { ageing } => Box::new(shortest::ShortestPredicted { ageing }),
    }
}

#[cfg(test)]
mod tests;
