//! Who comes first, what a step is made of, and for how much a group needs room: three questions that the scheduler asks. Each
//! answer is a file.

mod decode_first;
mod first_come;
mod max_tokens;
mod mixed;
mod on_demand;
mod prefill_first;
mod priority;
mod shortest;
mod static_batch;

use super::{Branching, Scheduler};
use crate::options::{self, AllocationPolicy, BatchingPolicy, OrderPolicy};

/// Who comes first. Whoever comes first can always go on, at the cost of all that come later.
pub trait Order: Send + Sync {
    /// Where a group stands, from the moment it comes to its end: the smaller, the earlier; among equals, who came first. So that
    /// nobody waits for ever, it must grow with the time.
    fn rank(&self, claim: &Claim) -> u64;
}

/// What an order may go by.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// When it came, in microseconds.
    pub at: u64,
    pub priority: i32,
    /// Tokens that it is likely to generate.
    pub expected: usize,
}

/// What a step is made of.
pub trait Batching: Send {
    fn portion(&self, running: Running) -> Portion;

    /// A step ran, with so many rows of either kind.
    fn ran(&mut self, _prompt_rows: usize, _decode_rows: usize) {}
}

/// What a step may hold. Where nothing comes of it, the step holds whatever it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Portion {
    /// Sequences that have all but their last token computed take their row.
    pub decodes: bool,
    /// Most rows of the others together.
    pub prompt_rows: usize,
    /// Groups that have not run yet may begin.
    pub newcomers: bool,
}

impl Portion {
    pub const WHATEVER: Portion = Portion { decodes: true, prompt_rows: usize::MAX, newcomers: true };
}

/// Those that run, as a step begins.
#[derive(Clone, Copy)]
pub struct Running<'a>(pub(super) &'a Scheduler);

impl Running<'_> {
    pub fn is_empty(self) -> bool {
        self.0.running.is_empty()
    }

    /// Rows of those that decode.
    pub fn decodes(self) -> usize {
        let Scheduler { groups, sequences, running, .. } = self.0;
        let decodes = running
            .iter()
            .map(|&id| &groups[id])
            .filter(|group| group.branching != Branching::Pin && group.members.iter().all(|&slot| sequences[slot].pending() == 1));
        decodes.map(|group| group.members.len()).sum()
    }

    /// Most rows of a step.
    pub fn most_rows(self) -> usize {
        self.0.options.max_batch_tokens
    }
}

/// For how much a group needs room.
pub trait Allocation: Send {
    /// A sequence of `len` tokens that may have `max_len` needs room for so many.
    fn length(&self, len: usize, max_len: usize) -> usize;

    /// Of `total` blocks, those that admission leaves free.
    fn watermark(&self, total: usize) -> usize;

    /// Blocks that nobody else may have, though nothing is in them yet: of what `needs` says of each that runs.
    fn reserved(&self, needs: &mut dyn Iterator<Item = usize>) -> usize;
}

/// The answers that an engine was made with.
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
        OrderPolicy::FirstCome => Box::new(first_come::FirstCome),
        OrderPolicy::Priority { ageing } => Box::new(priority::Priority { ageing }),
        OrderPolicy::ShortestPredicted { ageing } => Box::new(shortest::ShortestPredicted { ageing }),
    }
}

#[cfg(test)]
mod tests;
