//! The scheduler: selects the sequences of each step and their KV blocks. It does not know models,
//! the contents of blocks, or clocks.

mod check;
mod commit;
mod group;
mod ids;
mod length_predictor;
mod lookahead;
mod ordered;
mod outcome;
mod plan;
mod plan_groups;
mod policy;
mod preemption;
mod queues;
mod reclaimable;
mod requests;
mod resize;
mod sequence;
mod sequences;
mod slab;
mod swapping;

pub use group::Branching;
use group::{Queue, SequenceGroups};
pub use ids::{GroupId, IdMap};
pub use length_predictor::{LengthGenerator, OutputLengthPredictor};
use ordered::OrderedSet;
pub use outcome::{Event, FinishReason, SampledToken, SequenceStats, TokenOutcome};
pub use plan::{ScheduledSequence, StepPlan};
use plan_groups::ScheduledTokens;
use policy::StepBudget;
pub use policy::{Allocation, Batching, Order, Policies, RankInputs, Running, order};
use reclaimable::{Place, ReclaimableSet};
pub use requests::{NewGroup, PreparedGroup};
pub use sequence::Sequence;
use sequences::Sequences;
use slab::Slot;
pub use swapping::Costs;

use crate::error::{Error, Result};
use crate::kv::BlockManager;
use crate::options::{self, Preemption};
use crate::types::SeqId;

/// The limits of steps, and the preemption mode.
#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    pub max_batch_tokens: usize,
    pub max_seqs: usize,
    pub prefill_chunk: usize,
    /// Treatment of the KV blocks of preempted requests.
    pub preemption: Preemption,
}

impl SchedulerOptions {
    /// Returns the maximum number of tokens of one sequence in one step.
    pub fn max_tokens_per_step(&self) -> usize {
        self.prefill_chunk.min(self.max_batch_tokens)
    }
}

/// The scheduler, which plans one step at a time.
///
/// The unit of scheduling is the group: the sequences of one request. The order policy ranks the
/// groups, by default by arrival. In comments, an older group ranks before a younger one. The
/// oldest group can always continue: it may take the blocks of all younger groups, and every
/// admitted group fits the pool alone.
///
/// A group whose queue is full is not ready and pauses. It leaves the running list and keeps its
/// blocks until other groups need them. Paused groups cost a step nothing. After `recheck_paused`,
/// the next step resumes the paused groups that are ready, in their rank.
///
/// A preempted group is swapped to the host tier or recomputed, as a whole. It is rescheduled
/// before younger groups.
///
/// Idle sequences belong to no group. They keep their blocks until other sequences need them, and
/// their tokens until they are removed.
pub struct Scheduler {
    options: SchedulerOptions,
    blocks: BlockManager,
    policies: Policies,
    sequences: Sequences,
    groups: SequenceGroups,
    now: u64, // arrival time in microseconds for new requests
    waiting: OrderedSet<GroupId>,
    running: Vec<GroupId>, // in rank order
    paused: OrderedSet<GroupId>,
    looks_again: bool, // some paused groups may be ready
    /// Waiting groups that are excluded while a step of selected groups is planned. Empty between
    /// steps.
    set_aside: OrderedSet<GroupId>,
    idle: usize,
    last_idle: u64,                   // number of sequences that have become idle so far
    reclaimable: ReclaimableSet,      // reclaimable sequences of groups that do not run
    reclaimable_idle: ReclaimableSet, // reclaimable idle sequences
    hosted: OrderedSet<Place>,        // idle sequences in the host tier
    pins: Vec<(u32, Slot)>,           // in ascending order of priority
    preemptions: u64,
    preemptions_swapped: u64,
    swapping: u64, // preemptions whose transfers are pending
    costs: Costs,
    length_predictor: OutputLengthPredictor,
    prefix: PrefixCounts,
    spare_plan: StepPlan, // the buffers of the last plan
    scheduled: Vec<ScheduledTokens>,
    /// Remaining capacity of the step that is being planned.
    step_budget: StepBudget,
}

/// The number of tokens that were looked up in the prefix cache, and the number found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    pub queries: u64,
    pub hits: u64,
}

impl PrefixCounts {
    fn count(&mut self, looked_for: usize, found: usize) {
        self.queries += looked_for as u64;
        self.hits += found as u64;
    }
}

impl Scheduler {
    /// Creates a scheduler with the default policies.
    pub fn new(options: SchedulerOptions, blocks: BlockManager) -> Result<Scheduler> {
        Scheduler::with_policies(options, blocks, Policies::new(&options::Policies::default()))
    }

    pub fn with_policies(options: SchedulerOptions, blocks: BlockManager, policies: Policies) -> Result<Scheduler> {
        let mut spare = StepPlan::default();
        spare.batch.reserve(options.max_batch_tokens, options.max_seqs, blocks.total(), blocks.paging().groups())?;
        spare.sequences.try_reserve(options.max_seqs)?;
        let (mut running, mut chunks) = (Vec::new(), Vec::new());
        running.try_reserve(options.max_seqs)?;
        chunks.try_reserve(options.max_seqs)?;
        Ok(Scheduler {
            options,
            blocks,
            policies,
            sequences: Sequences::default(),
            groups: SequenceGroups::default(),
            now: 0,
            waiting: OrderedSet::default(),
            running,
            paused: OrderedSet::default(),
            looks_again: false,
            set_aside: OrderedSet::default(),
            idle: 0,
            last_idle: 0,
            reclaimable: ReclaimableSet::default(),
            reclaimable_idle: ReclaimableSet::default(),
            hosted: OrderedSet::default(),
            pins: Vec::new(),
            preemptions: 0,
            preemptions_swapped: 0,
            swapping: 0,
            costs: Costs::default(),
            length_predictor: OutputLengthPredictor::default(),
            prefix: PrefixCounts::default(),
            spare_plan: spare,
            scheduled: chunks,
            step_budget: StepBudget::UNLIMITED,
        })
    }

    pub fn find(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(id)
    }

    /// Returns a sequence, or an error that names its id.
    pub fn get(&self, id: SeqId) -> Result<&Sequence> {
        self.find(id).ok_or_else(|| unknown(id))
    }

    fn slot(&self, id: SeqId) -> Result<Slot> {
        self.sequences.find(id).ok_or_else(|| unknown(id))
    }

    /// Returns the members of the group of this sequence, including itself.
    pub fn members(&self, id: SeqId) -> impl DoubleEndedIterator<Item = SeqId> {
        let group = self.sequences.get(id).and_then(|sequence| sequence.group);
        let members = group.map_or(&[][..], |group| &self.groups[group].members);
        members.iter().map(|&slot| self.sequences[slot].id)
    }

    /// Returns the number of sequences in waiting or paused groups.
    pub fn waiting(&self) -> usize {
        self.groups.tally(Queue::Waiting).members + self.paused()
    }

    pub fn running(&self) -> usize {
        self.groups.tally(Queue::Running).members
    }

    /// Returns the number of sequences in paused groups.
    pub fn paused(&self) -> usize {
        self.groups.tally(Queue::Paused).members
    }

    /// Returns the running sequences, the oldest group first.
    pub fn running_sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.members_of(self.running.iter().copied())
    }

    /// Returns the preempted sequences that wait, at most as many as could run at once.
    ///
    /// In first-come order, they precede all sequences that have not run. In other orders, new
    /// sequences may be between them, and only the first `max_seqs` waiting groups are examined.
    pub fn preempted_sequences(&self) -> impl Iterator<Item = &Sequence> {
        let by_age = self.waiting.first().is_none_or(|id| id.rank() == 0);
        let max_groups = self.options.max_seqs;
        self.members_of(self.waiting.iter().take(max_groups))
            .take_while(move |sequence| sequence.started || !by_age)
            .filter(|sequence| sequence.started)
            .take(max_groups)
    }

    fn members_of<'a>(&'a self, groups: impl Iterator<Item = GroupId> + 'a) -> impl Iterator<Item = &'a Sequence> {
        groups.flat_map(|id| &self.groups[id].members).map(|&slot| &self.sequences[slot])
    }

    /// Returns the sequences and KV blocks that are available to the next request, after the needs
    /// of the running groups.
    pub fn spare(&self) -> (usize, usize) {
        let needed = self.running.iter().map(|&id| self.blocks_needed(id)).sum::<usize>() + self.watermark();
        (
            self.options.max_seqs - self.running_sequences_limit(),
            (self.blocks.available() + self.blocks.idle_blocks()).saturating_sub(needed),
        )
    }

    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Returns the blocks that are reserved for running groups but not allocated.
    pub fn reserved_blocks(&self) -> usize {
        self.policies.allocation.reserved(&mut self.running.iter().map(|&id| self.blocks_needed(id)))
    }

    /// Sets the arrival time in microseconds for the following requests.
    pub fn set_time(&mut self, now: u64) {
        self.now = now;
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Returns the number of preemptions that swapped to the host tier.
    pub fn preemptions_swapped(&self) -> u64 {
        self.preemptions_swapped
    }

    /// Returns the treatment of the KV blocks of preempted requests.
    pub fn preemption(&self) -> Preemption {
        self.options.preemption
    }

    /// Returns the output length predictor.
    pub fn lengths(&self) -> &OutputLengthPredictor {
        &self.length_predictor
    }

    /// Records the output length of a sequence that ends by itself.
    pub fn record_length(&mut self, id: SeqId) {
        if let Some(sequence) = self.sequences.get(id) {
            self.length_predictor.observe(sequence.max_new_tokens(), sequence.generated);
        }
    }

    pub fn prefix(&self) -> PrefixCounts {
        self.prefix
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }
}

fn unknown(id: SeqId) -> Error {
    Error::not_found(format!("sequence {id} is unknown or has ended"))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
