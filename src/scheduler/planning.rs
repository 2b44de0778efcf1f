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
    /// Plans whose buffers are reused, one for each step that can be in flight.
    spare_plans: Vec<StepPlan>,
    /// Larger buffers for the block tables of the plans that are in flight.
    larger_tables: Vec<Vec<u32>>,
    /// Number of entries of block tables for which each plan has space.
    table_entries: usize,
    /// Number of steps in flight.
    pub launched: usize,
    /// Number of steps among which the decodes are divided, so that each stage of a pipeline has
    /// some.
    pub stages: usize,
    /// Number of sequences of a step after which decodes are left to the next one.
    pub max_decodes: usize,
    /// Whether the last plan left out groups because transfers of their blocks are queued.
    pub waits_for_moves: bool,
    /// The buffer for the members of one group.
    pub scheduled: Vec<ScheduledTokens>,
}

impl PlanningState {
    pub fn new(options: &SchedulerOptions, blocks: &BlockManager) -> Result<PlanningState> {
        let mut scheduled = Vec::new();
        scheduled.try_reserve(options.max_seqs)?;
        let mut planning = PlanningState {
            budget: StepBudget::UNLIMITED,
            spare_plans: Vec::new(),
            larger_tables: Vec::new(),
            table_entries: 0,
            launched: 0,
            stages: 1,
            max_decodes: usize::MAX,
            waits_for_moves: false,
            scheduled,
        };
        planning.reserve(1, options, blocks)?;
        Ok(planning)
    }

    /// Reserves the buffers of plans for `steps` steps in flight.
    pub fn reserve(&mut self, steps: usize, options: &SchedulerOptions, blocks: &BlockManager) -> Result<()> {
        self.spare_plans.try_reserve_exact(steps)?;
        self.larger_tables.try_reserve_exact(steps)?;
        while self.spare_plans.len() < steps {
            let mut plan = StepPlan::default();
            let entries = blocks.total().max(self.table_entries);
            plan.batch.reserve(options.max_batch_tokens, options.max_seqs, entries, blocks.paging().groups())?;
            plan.sequences.try_reserve(options.max_seqs)?;
            self.spare_plans.push(plan);
        }
        Ok(())
    }

    /// Reserves space for `entries` entries of block tables in each plan.
    pub fn reserve_tables(&mut self, entries: usize) -> Result<()> {
        if entries <= self.table_entries {
            return Ok(());
        }
        self.spare_plans.iter_mut().try_for_each(|plan| plan.batch.tables.try_reserve_exact(entries))?;
        self.larger_tables.clear();
        for _ in 0..self.launched {
            let mut tables = Vec::new();
            tables.try_reserve_exact(entries)?;
            self.larger_tables.push(tables);
        }
        self.table_entries = entries;
        Ok(())
    }

    /// Returns an empty plan with the buffers of an earlier one.
    pub fn take_plan(&mut self) -> StepPlan {
        self.spare_plans.pop().unwrap_or_default()
    }

    /// Keeps the buffers of a plan.
    pub fn reuse(&mut self, mut plan: StepPlan) {
        plan.clear();
        if let Some(larger) = self.larger_tables.pop()
            && larger.capacity() > plan.batch.tables.capacity()
        {
            plan.batch.tables = larger;
        }
        self.spare_plans.push(plan);
    }
}
