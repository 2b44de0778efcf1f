//! The state of the step that is being planned, and its reused buffers.

use super::SchedulerOptions;
use super::plan::StepPlan;
use super::policy::StepBudget;
use super::slab::Slot;
use crate::error::Result;
use crate::kv::BlockManager;

/// The tokens of one member in the step that is being planned.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScheduledTokens {
    pub slot: Slot,
    pub tokens: usize,
    pub samples: bool,
}

/// The remaining capacity of the step that is being planned, and the buffers of plans.
pub(super) struct PlanningState {
    /// Remaining capacity by the batching policy.
    pub budget: StepBudget,
    /// The buffers of the last plan.
    pub spare_plan: StepPlan,
    /// The buffer for the members of one group.
    pub scheduled: Vec<ScheduledTokens>,
}

impl PlanningState {
    pub fn new(options: &SchedulerOptions, blocks: &BlockManager) -> Result<PlanningState> {
        let mut spare_plan = StepPlan::default();
        spare_plan.batch.reserve(options.max_batch_tokens, options.max_seqs, blocks.total(), blocks.paging().groups())?;
        spare_plan.sequences.try_reserve(options.max_seqs)?;
        let mut scheduled = Vec::new();
        scheduled.try_reserve(options.max_seqs)?;
        Ok(PlanningState { budget: StepBudget::UNLIMITED, spare_plan, scheduled })
    }

    /// Returns an empty plan with the buffers of the last one.
    pub fn take_plan(&mut self) -> StepPlan {
        let mut plan = std::mem::take(&mut self.spare_plan);
        plan.clear();
        plan
    }
}
