//! Who runs next, and with which blocks. Pure: no model, no bytes, no clock.

mod check;
mod commit;
mod foresight;
mod group;
mod host;
mod ids;
mod lengths;
mod ordered;
mod plan;
mod policy;
mod queues;
mod resize;
mod resting;
mod room;
mod sequence;
mod sequences;
mod slab;
mod swapping;
mod turns;

pub use group::{Branching, GroupId};
use group::{Groups, Queue};
pub use host::{Arrival, Newcomer};
pub use ids::IdMap;
pub use lengths::{Drawn, Lengths};
use ordered::OrderedSet;
pub use plan::{Choice, Event, FinishReason, Part, StepPlan, Verdict};
use policy::Portion;
pub use policy::{Allocation, Batching, Claim, Order, Policies, Running, order};
use resting::{Place, Resting};
pub use sequence::{Past, SeqId, Sequence};
use sequences::Sequences;
use slab::Slot;
pub use swapping::Costs;
use turns::Turn;

use crate::error::{Error, Result};
use crate::kv::BlockManager;
use crate::options::{self, Preemption};

#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    pub max_batch_tokens: usize,
    pub max_seqs: usize,
    pub prefill_chunk: usize,
    /// Where the blocks of those go who have to give way.
    pub preemption: Preemption,
}

impl SchedulerOptions {
    /// The most rows that one sequence has in a step.
    pub fn rows_at_once(&self) -> usize {
        self.prefill_chunk.min(self.max_batch_tokens)
    }
}

/// One iteration at a time. The unit is the group: a request's sequences. Groups stand in an order, by default that in which
/// they came; where a comment calls one older or younger than another, it comes before or after it in this order. The oldest group
/// can always go on: it may take the blocks of every younger one, and none is admitted that alone would not fit the pool.
///
/// A group whose reader is behind is not ready. It pauses: it leaves the running and keeps its blocks until somebody
/// needs them, so that it holds up nobody, and costs a step nothing. When it is ready again, and `look_again` has said that somebody
/// may be, it goes before whoever is younger.
///
/// Who has to give way waits in the host tier, or is computed again: a group as a whole, and before any that came later.
///
/// Idle sequences are in no group. They keep their blocks until somebody needs them, and their tokens until they are removed.
pub struct Scheduler {
    options: SchedulerOptions,
    blocks: BlockManager,
    policies: Policies,
    sequences: Sequences,
    groups: Groups,
    now: u64, // in microseconds: when what comes now has come
    waiting: OrderedSet<GroupId>,
    running: Vec<GroupId>, // the oldest first
    paused: OrderedSet<GroupId>,
    looks_again: bool,          // some of the paused may be ready
    aside: OrderedSet<GroupId>, // they wait too, while a step of others is planned; between steps there are none
    idle: usize,
    last_idle: u64,            // counts those that became idle
    resting: Resting,          // in groups that do not run
    resting_idle: Resting,     // in none
    hosted: OrderedSet<Place>, // idle, in the host tier
    pins: Vec<(u32, Slot)>,    // by priority, the lowest first
    preemptions: u64,
    preemptions_swapped: u64,
    swapping: u64, // preemptions whose moves are still to be made
    costs: Costs,
    lengths: Lengths,
    prefix: PrefixCounts,
    spare: StepPlan, // the last plan's buffers
    turns: Vec<Turn>,
    /// What the step that is being planned may still hold.
    portion: Portion,
}

/// Tokens that were looked for in the prefix index, and those that were there.
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
    /// With the default policies.
    pub fn new(options: SchedulerOptions, blocks: BlockManager) -> Result<Scheduler> {
        Scheduler::with_policies(options, blocks, Policies::new(&options::Policies::default()))
    }

    pub fn with_policies(options: SchedulerOptions, blocks: BlockManager, policies: Policies) -> Result<Scheduler> {
        let mut spare = StepPlan::default();
        spare.batch.reserve(options.max_batch_tokens, options.max_seqs, blocks.total(), blocks.paging().groups())?;
        spare.parts.try_reserve(options.max_seqs)?;
        let (mut running, mut turns) = (Vec::new(), Vec::new());
        running.try_reserve(options.max_seqs)?;
        turns.try_reserve(options.max_seqs)?;
        Ok(Scheduler {
            options,
            blocks,
            policies,
            sequences: Sequences::default(),
            groups: Groups::default(),
            now: 0,
            waiting: OrderedSet::default(),
            running,
            paused: OrderedSet::default(),
            looks_again: false,
            aside: OrderedSet::default(),
            idle: 0,
            last_idle: 0,
            resting: Resting::default(),
            resting_idle: Resting::default(),
            hosted: OrderedSet::default(),
            pins: Vec::new(),
            preemptions: 0,
            preemptions_swapped: 0,
            swapping: 0,
            costs: Costs::default(),
            lengths: Lengths::default(),
            prefix: PrefixCounts::default(),
            spare,
            turns,
            portion: Portion::WHATEVER,
        })
    }

    pub fn find(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(id)
    }

    /// As `find`, for whoever wants to be told.
    pub fn get(&self, id: SeqId) -> Result<&Sequence> {
        self.find(id).ok_or_else(|| unknown(id))
    }

    fn slot(&self, id: SeqId) -> Result<Slot> {
        self.sequences.find(id).ok_or_else(|| unknown(id))
    }

    /// The sequences that run together with this one, itself included.
    pub fn members(&self, id: SeqId) -> impl DoubleEndedIterator<Item = SeqId> {
        let group = self.sequences.get(id).and_then(|sequence| sequence.group);
        let members = group.map_or(&[][..], |group| &self.groups[group].members);
        members.iter().map(|&slot| self.sequences[slot].id)
    }

    /// Sequences in groups that do not run, the paused ones included.
    pub fn waiting(&self) -> usize {
        self.groups.tally(Queue::Waiting).members + self.paused()
    }

    pub fn running(&self) -> usize {
        self.groups.tally(Queue::Running).members
    }

    /// Sequences that the last step passed over because they were not ready.
    pub fn paused(&self) -> usize {
        self.groups.tally(Queue::Paused).members
    }

    /// Sequences that run, the oldest group's first.
    pub fn running_sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.members_of(self.running.iter().copied())
    }

    /// Sequences that ran, and wait to go on, as far as they could run at once. By age they come before all that have not run; otherwise
    /// some of these may stand between them, and no more are looked at than could run.
    pub fn preempted_sequences(&self) -> impl Iterator<Item = &Sequence> {
        let by_age = self.waiting.first().is_none_or(|id| id.rank() == 0);
        let most = self.options.max_seqs;
        self.members_of(self.waiting.iter().take(most))
            .take_while(move |sequence| sequence.begun || !by_age)
            .filter(|sequence| sequence.begun)
            .take(most)
    }

    fn members_of<'a>(&'a self, groups: impl Iterator<Item = GroupId> + 'a) -> impl Iterator<Item = &'a Sequence> {
        groups.flat_map(|id| &self.groups[id].members).map(|&slot| &self.sequences[slot])
    }

    /// Sequences, and KV blocks, that the next request may have beside all that the running need.
    pub fn spare(&self) -> (usize, usize) {
        let needed = self.running.iter().map(|&id| self.needed(id)).sum::<usize>() + self.watermark();
        (self.options.max_seqs - self.width(), (self.blocks.available() + self.blocks.idle_blocks()).saturating_sub(needed))
    }

    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Blocks that are set aside for those that run, though nothing is in them yet.
    pub fn reserved_blocks(&self) -> usize {
        self.policies.allocation.reserved(&mut self.running.iter().map(|&id| self.needed(id)))
    }

    /// What comes from now on has come at this time, in microseconds.
    pub fn set_time(&mut self, now: u64) {
        self.now = now;
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Of the preemptions: those of groups that went to the host tier.
    pub fn preemptions_swapped(&self) -> u64 {
        self.preemptions_swapped
    }

    /// What becomes of those who have to give way.
    pub fn preemption(&self) -> Preemption {
        self.options.preemption
    }

    /// How many tokens turns choose.
    pub fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    /// The sequence ends by itself now.
    pub fn learn(&mut self, id: SeqId) {
        if let Some(sequence) = self.sequences.get(id) {
            self.lengths.observe(sequence.most(), sequence.generated);
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
