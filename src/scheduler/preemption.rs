//! Preemption: swap to the host tier, or recomputation.

use super::slab::Slot;
use super::{GroupId, Scheduler};
use crate::kv::SwapLoad;
use crate::types::options::Preemption;

/// The measured costs in seconds, 0 if not measured. The scheduler knows no other durations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Costs {
    /// Transfer of one block between the tiers.
    pub block: f64,
    /// Computation of one prompt token.
    pub token: f64,
}

impl Costs {
    /// Returns whether a swap in both directions costs no more than recomputation. Without
    /// measurement, a swap is preferred.
    fn prefers_swap(&self, load: SwapLoad) -> bool {
        self.token == 0.0 || 2.0 * load.blocks as f64 * self.block <= load.tokens as f64 * self.token
    }
}

/// The preemption mode, its costs, and the number of preemptions.
#[derive(Debug)]
pub(super) struct PreemptionState {
    mode: Preemption,
    pub costs: Costs,
    preemptions: u64,
    swapped: u64,
    /// Number of preemptions whose transfers are pending.
    swapping: u64,
}

impl PreemptionState {
    pub fn new(mode: Preemption) -> PreemptionState {
        PreemptionState { mode, costs: Costs::default(), preemptions: 0, swapped: 0, swapping: 0 }
    }

    /// Returns whether the mode allows swapping.
    pub fn may_swap(&self) -> bool {
        self.mode != Preemption::Recompute
    }

    /// Returns whether to swap sequences of this load, if swapping is allowed.
    pub fn prefers_swap(&self, load: SwapLoad) -> bool {
        self.mode == Preemption::Swap || self.costs.prefers_swap(load)
    }

    /// Counts a preemption.
    pub fn record(&mut self, swapped: bool) {
        self.preemptions += 1;
        self.swapping += swapped as u64;
    }

    /// Records whether the transfers of a step to the host tier have succeeded, and whether others
    /// are queued.
    pub fn record_moves_out(&mut self, succeeded: bool, others_queued: bool) {
        if succeeded && others_queued {
            return;
        }
        self.swapped += if succeeded { self.swapping } else { 0 };
        self.swapping = 0;
    }
}

impl Scheduler {
    pub fn preemptions(&self) -> u64 {
        self.preemption.preemptions
    }

    /// Returns the number of preemptions that swapped to the host tier.
    pub fn preemptions_swapped(&self) -> u64 {
        self.preemption.swapped
    }

    /// Returns the treatment of the KV blocks of preempted requests.
    pub fn preemption(&self) -> Preemption {
        self.preemption.mode
    }

    pub fn set_costs(&mut self, costs: Costs) {
        self.preemption.costs = costs;
    }

    pub(super) fn take_all_blocks(&mut self, id: GroupId) {
        let members = self.queues.groups.take_members(id);
        let swapped = self.take_blocks_of(&members);
        self.preemption.record(swapped);
        self.queues.groups.return_members(id, members);
    }

    /// Takes the blocks of these sequences, all or nothing. Returns true if they were swapped to
    /// the host tier.
    ///
    /// Otherwise their tokens are recomputed, except those that the prefix cache still has.
    pub(super) fn take_blocks_of(&mut self, slots: &[Slot]) -> bool {
        let swaps = self.swap_out(slots);
        if !swaps {
            slots.iter().for_each(|&slot| self.take_blocks(slot));
        }
        slots.iter().for_each(|&slot| self.count_preemption(slot));
        swaps
    }

    /// Counts a preemption, except for an idle sequence.
    fn count_preemption(&mut self, slot: Slot) {
        let sequence = &mut self.sequences[slot];
        sequence.stats.preemptions += sequence.group.is_some() as u64;
    }

    /// Drops the computed state of the sequence in either tier.
    pub(super) fn take_blocks(&mut self, slot: Slot) {
        self.invalidate_in_flight(slot);
        self.unmark_reclaimable(slot);
        let sequence = &mut self.sequences[slot];
        self.blocks.free(&mut sequence.table);
        sequence.computed = 0;
    }
}
