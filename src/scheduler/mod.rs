//! The scheduler: selects the sequences of each step and their KV blocks. It does not know models,
//! the contents of blocks, or clocks.

mod admission;
mod allocation;
mod block_hashes;
mod check;
mod chunks;
mod commit;
mod external;
mod group;
mod group_queues;
mod ids;
mod in_flight;
mod length_limit;
mod length_predictor;
mod ordered;
mod outcome;
mod pins;
mod plan;
mod plan_groups;
mod planning;
mod policy;
mod pool_map;
mod preemption;
mod reclaimable;
mod requests;
mod resize;
mod schedule;
mod sequence_kv;
mod sequences;
pub mod simulate;
mod slab;
mod swapping;

use chunks::Chunks;
pub use external::{PrefixLookup, PromptBlocks};
pub use group::Branching;
use group::Queue;
use group_queues::GroupQueues;
pub use ids::GroupId;
pub use length_predictor::{LengthGenerator, OutputLengthPredictor};
pub use outcome::{Event, SampledToken, TokenOutcome};
use pins::Pins;
pub use plan::{ScheduledSequence, StepPlan};
use planning::{PlanningState, ScheduledTokens};
pub use policy::{Allocation, Batching, Order, Policies, RankInputs, Running, StepBudget};
pub use pool_map::{MappedBlock, MappedSequence, PoolMap, SequenceState, TierMap};
pub use preemption::Costs;
use preemption::PreemptionState;
use reclaimable::ReclaimableSequences;
pub use requests::{BlocksResult, NewGroup, PreparedGroup};
pub use sequence_kv::SequenceKv;
use sequences::Sequences;
use slab::Slot;

use crate::error::{Error, Result};
use crate::kv::BlockManager;
use crate::types::SeqId;
use crate::types::options::{self, Preemption};

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
    policies: Policies,
    blocks: BlockManager,
    sequences: Sequences,
    queues: GroupQueues,
    reclaimable: ReclaimableSequences,
    pins: Pins,
    /// Memory of the running groups, if the allocation policy wants it contiguous.
    chunks: Option<Chunks>,
    preemption: PreemptionState,
    length_predictor: OutputLengthPredictor,
    prefix: PrefixCounts,
    planning: PlanningState,
    now: u64, // arrival time in microseconds for new requests
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
        Ok(Scheduler {
            options,
            sequences: Sequences::default(),
            queues: GroupQueues::new(options.max_seqs)?,
            reclaimable: ReclaimableSequences::default(),
            pins: Pins::default(),
            chunks: policies.allocation.is_contiguous().then(|| Chunks::new(blocks.total())).transpose()?,
            policies,
            preemption: PreemptionState::new(options.preemption),
            length_predictor: OutputLengthPredictor::default(),
            prefix: PrefixCounts::default(),
            planning: PlanningState::new(&options, &blocks)?,
            now: 0,
            blocks,
        })
    }

    pub fn find(&self, id: SeqId) -> Option<&SequenceKv> {
        self.sequences.get(id)
    }

    /// Returns a sequence, or an error that names its id.
    pub fn get(&self, id: SeqId) -> Result<&SequenceKv> {
        self.find(id).ok_or_else(|| unknown(id))
    }

    fn slot(&self, id: SeqId) -> Result<Slot> {
        self.sequences.find(id).ok_or_else(|| unknown(id))
    }

    /// Returns the members of the group of this sequence, including itself.
    pub fn members(&self, id: SeqId) -> impl DoubleEndedIterator<Item = SeqId> {
        let group = self.sequences.get(id).and_then(|sequence| sequence.group);
        let members = group.map_or(&[][..], |group| &self.queues.groups[group].members);
        members.iter().map(|&slot| self.sequences[slot].id)
    }

    /// Returns the number of sequences in waiting or paused groups.
    pub fn waiting(&self) -> usize {
        self.queues.groups.tally(Queue::Waiting).members + self.paused()
    }

    pub fn running(&self) -> usize {
        self.queues.groups.tally(Queue::Running).members
    }

    /// Returns the number of sequences in paused groups.
    pub fn paused(&self) -> usize {
        self.queues.groups.tally(Queue::Paused).members
    }

    /// Returns the running sequences, the oldest group first.
    pub fn running_sequences(&self) -> impl Iterator<Item = &SequenceKv> {
        self.members_of(self.queues.running.iter().copied())
    }

    /// Returns the preempted sequences that wait, at most as many as could run at once.
    ///
    /// In first-come order, they precede all sequences that have not run. In other orders, new
    /// sequences may be between them, and only the first `max_seqs` waiting groups are examined.
    pub fn preempted_sequences(&self) -> impl Iterator<Item = &SequenceKv> {
        let by_age = self.queues.waiting.first().is_none_or(|id| id.rank() == 0);
        let max_groups = self.options.max_seqs;
        self.members_of(self.queues.waiting.iter().take(max_groups))
            .take_while(move |sequence| sequence.started || !by_age)
            .filter(|sequence| sequence.started)
            .take(max_groups)
    }

    fn members_of<'a>(&'a self, groups: impl Iterator<Item = GroupId> + 'a) -> impl Iterator<Item = &'a SequenceKv> {
        groups.flat_map(|id| &self.queues.groups[id].members).map(|&slot| &self.sequences[slot])
    }

    /// Returns the sequences and KV blocks that are available to the next request, after the needs
    /// of the running groups.
    pub fn spare(&self) -> (usize, usize) {
        let needed = self.queues.running.iter().map(|&id| self.blocks_needed(id)).sum::<usize>() + self.watermark();
        (self.options.max_seqs - self.queues.running_width(), (self.blocks.available() + self.blocks.idle_blocks()).saturating_sub(needed))
    }

    pub fn idle(&self) -> usize {
        self.reclaimable.idle_sequences()
    }

    /// Returns the blocks that are reserved for running groups but not allocated.
    pub fn reserved_blocks(&self) -> usize {
        self.policies.allocation.reserved(&mut self.queues.running.iter().map(|&id| self.blocks_needed(id)))
    }

    /// Begins a step. `now` is the arrival time in microseconds for the following requests.
    pub fn begin_step(&mut self, now: u64) {
        self.now = now;
        self.blocks.begin_step();
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
