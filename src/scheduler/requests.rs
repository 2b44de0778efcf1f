//! Commands of the host, applied between steps.

use super::group::{Queue, SequenceGroup};
use super::sequence_kv::RequestProperties;
use super::slab::Slot;
use super::{Branching, GroupId, RankInputs, Scheduler, SequenceKv};
use crate::error::{Error, Result};
use crate::kv::{BlockHash, Paging};
use crate::types::SeqId;
use crate::types::timing::SequenceStats;

/// The arguments of `prepare`, with names.
#[derive(Debug)]
pub struct NewGroup {
    pub prompt: Vec<u32>,
    /// Length in tokens at which the sequence ends, prompt included.
    pub max_len: usize,
    pub branching: Branching,
    /// Priority for the order policies that use it. Higher values rank first.
    pub priority: i32,
    /// Whether its sequences stay idle when they end.
    pub keep: bool,
    /// First row of the prompt whose logits are wanted. `None` selects the last row only.
    pub logits_from: Option<usize>,
    /// Whether the request ends when its prompt has been computed, without a generated token.
    pub prompt_only: bool,
    /// Initial block hash. Sequences with the same value share prefixes.
    pub root: BlockHash,
}

/// A group that is not queued yet, and its first sequence. The thread of the caller allocates them,
/// so that the stepping thread only inserts them.
#[derive(Debug)]
pub struct PreparedGroup {
    sequence: SequenceKv,
    group: SequenceGroup,
}

impl NewGroup {
    /// Creates the request for a pin: its prompt is computed and stays in the prefix cache.
    pub fn pin(prompt: Vec<u32>, root: BlockHash) -> NewGroup {
        let max_len = prompt.len();
        NewGroup { prompt, max_len, branching: Branching::Pin, priority: 0, keep: false, logits_from: None, prompt_only: false, root }
    }

    /// Allocates all memory that the sequences need. Runs on the thread of the caller.
    pub fn prepare(self, paging: &Paging) -> Result<PreparedGroup> {
        let NewGroup { prompt, max_len, branching, priority, keep, logits_from, prompt_only, root } = self;
        let mut sequence = SequenceKv::new(SeqId::default(), prompt, max_len, root, paging)?;
        sequence.request = RequestProperties { priority, keep, pinned: branching == Branching::Pin, prompt_only };
        sequence.logits_from = logits_from;
        let (mut members, mut shells) = (Vec::new(), Vec::new());
        members.try_reserve_exact(branching.max_members())?;
        shells.try_reserve_exact(branching.max_members() - 1)?;
        for _ in 1..branching.max_members() {
            shells.push(SequenceKv::preallocated(max_len, paging)?);
        }
        Ok(PreparedGroup { sequence, group: SequenceGroup { branching, members, shells, queue: Queue::Waiting, started: false } })
    }
}

impl PreparedGroup {
    pub fn prompt(&self) -> &[u32] {
        &self.sequence.tokens
    }

    pub fn branching(&self) -> Branching {
        self.group.branching
    }

    pub fn priority(&self) -> i32 {
        self.sequence.request.priority
    }

    /// Returns the maximum number of tokens that each sequence may generate.
    pub fn max_new_tokens(&self) -> usize {
        self.sequence.max_new_tokens()
    }
}

/// The result of an allocation for an idle sequence that is imported or exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlocksResult {
    Done,
    /// Blocks become available when later steps have copied them to the host tier.
    Pending,
    /// The pool has too few blocks.
    Refused,
}

impl Scheduler {
    /// Adds a request to the waiting queue. Its first sequence gets `id`. The sampled tokens have
    /// the ids of its forks.
    pub fn add(&mut self, id: SeqId, prepared: PreparedGroup) -> Result<()> {
        let PreparedGroup { mut sequence, group } = prepared;
        let max_blocks = self.blocks.paging().max_blocks(sequence.max_len(), self.options.max_tokens_per_step());
        assert!(max_blocks <= self.blocks.total(), "the engine refuses what can never fit");
        self.reserve(1 + group.shells.len(), sequence.max_len())?;
        sequence.id = id;
        let slot = self.sequences.insert(sequence);
        self.enqueue(slot, group);
        Ok(())
    }

    /// Adds a pin: computes a prompt and keeps its blocks. If a sequence cannot continue otherwise,
    /// the pin with the lowest priority is removed.
    pub fn pin(&mut self, id: SeqId, prepared: PreparedGroup, priority: u32) -> Result<()> {
        self.add(id, prepared)?;
        self.pins.insert(self.slot(id)?, priority);
        Ok(())
    }

    /// Reserves space for `more` sequences in all lists, and for the block tables of the largest
    /// step, with `max_len` tokens per sequence.
    fn reserve(&mut self, more: usize, max_len: usize) -> Result<()> {
        let tables = self.options.max_seqs.min(self.options.max_batch_tokens).saturating_mul(self.blocks.paging().entries(max_len));
        self.planning.reserve_tables(tables)?;
        let queues = [Queue::Waiting, Queue::Running, Queue::Paused];
        let more = more + queues.map(|queue| self.queues.groups.tally(queue).shells).iter().sum::<usize>();
        let total = self.sequences.len() + more;
        self.sequences.try_reserve(more)?;
        // Forks of one group may be split into groups of their own.
        self.queues.try_reserve(total)?;
        self.reclaimable.try_reserve(total)?;
        self.pins.try_reserve(total)
    }

    /// Adds the sequence as the first member of a new group that arrives now.
    fn enqueue(&mut self, slot: Slot, mut group: SequenceGroup) {
        self.unmark_reclaimable(slot);
        group.members.push(slot);
        let sequence = &self.sequences[slot];
        let expected = || self.length_predictor.expect(sequence.max_len().saturating_sub(sequence.tokens.len()), 0);
        let rank = self.policies.order.rank(&RankInputs { at: self.now, priority: sequence.request.priority, expected: &expected });
        self.sequences[slot].group = Some(self.queues.insert(rank, group));
        self.mark_reclaimable(slot);
    }

    /// Adds the sequence in a new group that never forks.
    pub(super) fn enqueue_alone(&mut self, slot: Slot) -> Result<()> {
        let mut members = Vec::new();
        members.try_reserve_exact(1)?;
        self.enqueue(slot, SequenceGroup { branching: Branching::One, members, shells: Vec::new(), queue: Queue::Waiting, started: false });
        Ok(())
    }

    /// Forks `parent` to `child`, which shares the first `len` tokens (`None`: all) and their
    /// blocks. The child runs if `runs` is set. If not, it is idle.
    pub fn fork(&mut self, parent: SeqId, len: Option<usize>, child: SeqId, runs: bool) -> Result<()> {
        // The table of the child is not longer than that of the parent.
        self.reserve(1, 0)?;
        let slot = self.slot(parent)?;
        let of = &self.sequences[slot];
        let len = len.unwrap_or(of.tokens.len());
        if len == 0 || len > of.tokens.len() {
            return Err(Error::invalid(format!(
                "sequence {parent} has {} tokens and cannot be forked at {len}; must be 1 to {}",
                of.tokens.len(),
                of.tokens.len()
            )));
        }
        let shell = SequenceKv::preallocated(of.max_len().max(len), self.blocks.paging())?;
        let mut forked = self.branch(slot, len, child, shell)?;
        forked.stats = SequenceStats::default();
        let slot = self.sequences.insert(forked);
        match runs {
            true => self.begin(slot),
            false => {
                self.make_idle(slot);
                Ok(())
            }
        }
    }

    /// Builds a sequence from `shell` that shares the first `len` tokens of `parent`, and the
    /// blocks of the computed ones.
    pub(super) fn branch(&mut self, parent: Slot, len: usize, child: SeqId, shell: SequenceKv) -> Result<SequenceKv> {
        let of = &self.sequences[parent];
        let mut forked = of.branch(shell, child, len, self.blocks.paging())?;
        forked.computed = if self.blocks.sees_null_block(&of.table, len) { 0 } else { of.computed.min(len) };
        self.blocks.fork(&of.table, forked.computed, &mut forked.table);
        Ok(forked)
    }

    /// Adds a sequence to the waiting queue. Its last token is recomputed for the logits of the
    /// next one.
    fn begin(&mut self, slot: Slot) -> Result<()> {
        let sequence = &mut self.sequences[slot];
        sequence.computed = sequence.computed.min(sequence.tokens.len() - 1);
        self.enqueue_alone(slot)
    }

    /// Appends tokens. A running sequence continues after them, and its maximum length grows by
    /// their number.
    pub fn append(&mut self, id: SeqId, tokens: &[u32], max_model_len: usize) -> Result<()> {
        let slot = self.slot(id)?;
        self.invalidate_in_flight(slot);
        let paging = self.blocks.paging();
        let sequence = &mut self.sequences[slot];
        let len = sequence.tokens.len() + tokens.len();
        if len > max_model_len || (sequence.group.is_some() && !sequence.request.has_room(len, max_model_len)) {
            return Err(Error::invalid(format!(
                "sequence {id} has {} tokens and max_model_len is {max_model_len}; {} more do not fit",
                sequence.tokens.len(),
                tokens.len()
            )));
        }
        sequence.append(tokens, max_model_len, paging)?;
        let sequence = &self.sequences[slot];
        if let Some(group) = sequence.group {
            self.queues
                .groups
                .change(group, |group| group.shells.iter_mut().try_for_each(|shell| shell.reserve_for_fork(sequence, paging)))?;
        }
        self.reserve(0, sequence.max_len())
    }

    /// Truncates the sequence to its first `len` tokens.
    pub fn rewind(&mut self, id: SeqId, len: usize) -> Result<()> {
        let block_size = self.blocks.block_size();
        let slot = self.slot(id)?;
        self.invalidate_in_flight(slot);
        let gone = self.blocks.sees_null_block(&self.sequences[slot].table, len);
        let sequence = &mut self.sequences[slot];
        if len == 0 || len > sequence.tokens.len() {
            return Err(Error::invalid(format!(
                "sequence {id} has {} tokens and cannot be rewound to {len}; must be 1 to {}",
                sequence.tokens.len(),
                sequence.tokens.len()
            )));
        }
        sequence.truncate(len, block_size);
        if gone {
            sequence.computed = 0;
        }
        if sequence.group.is_some() {
            sequence.computed = sequence.computed.min(len - 1);
        }
        let computed = sequence.computed;
        self.truncate(slot, computed);
        Ok(())
    }

    /// Releases the blocks beyond the first `computed` tokens, and updates the reclaimable sets.
    pub(super) fn truncate(&mut self, slot: Slot, computed: usize) {
        let rests = self.sequences[slot].table.is_reclaimable() || self.sequences[slot].is_idle();
        self.unmark_reclaimable(slot);
        self.blocks.truncate(&mut self.sequences[slot].table, computed);
        if rests {
            self.mark_reclaimable(slot);
        }
    }

    /// Continues an idle sequence until it has `max_len` tokens, or with `prompt_only` until its
    /// tokens have been computed.
    pub fn resume(&mut self, id: SeqId, max_len: usize, keep: bool, prompt_only: bool) -> Result<()> {
        self.reserve(1, max_len)?;
        let slot = self.slot(id)?;
        let sequence = &mut self.sequences[slot];
        if sequence.group.is_some() {
            return Err(Error::invalid(format!("sequence {id} runs already; resume it after its end")));
        }
        let (len, request) = (sequence.tokens.len(), RequestProperties { keep, prompt_only, ..sequence.request });
        if !request.has_room(len, max_len) {
            return Err(Error::invalid(format!("sequence {id} has {len} tokens of at most {max_len}; rewind it before resuming it")));
        }
        sequence.raise_max_len(max_len, self.blocks.paging())?;
        sequence.request = request;
        sequence.generated = 0;
        sequence.started = false;
        sequence.stats = SequenceStats::default();
        self.begin(slot)?;
        self.reclaimable.end_idle(&mut self.sequences[slot]);
        Ok(())
    }

    /// Ends a sequence between steps. It becomes idle if it is kept, otherwise it is removed.
    pub fn end(&mut self, id: SeqId) {
        if let Some(slot) = self.sequences.find(id) {
            self.end_slot(slot);
        }
    }

    pub(super) fn end_slot(&mut self, slot: Slot) {
        self.invalidate_in_flight(slot);
        self.unmark_reclaimable(slot);
        let sequence = &mut self.sequences[slot];
        let (group, keep) = (sequence.group.take(), sequence.request.keep);
        // Releases blocks that were reserved for a step that was not run.
        self.blocks.truncate(&mut sequence.table, sequence.computed);
        self.leave_group(slot, group);
        match keep {
            true if group.is_some() => self.make_idle(slot),
            true => self.mark_reclaimable(slot),
            false => drop(self.take_out(slot)),
        }
    }

    /// Releases the blocks of an idle sequence, so that its tokens are recomputed.
    pub fn drop_blocks(&mut self, id: SeqId) {
        if let Some(slot) = self.sequences.find(id) {
            self.take_blocks(slot);
        }
    }

    /// Removes a sequence in any state and releases its blocks.
    pub fn remove(&mut self, id: SeqId) -> Option<SequenceKv> {
        self.sequences.find(id).map(|slot| self.take_out(slot))
    }

    pub(super) fn take_out(&mut self, slot: Slot) -> SequenceKv {
        self.unmark_reclaimable(slot);
        self.reclaimable.end_idle(&mut self.sequences[slot]);
        let mut sequence = self.sequences.remove(slot);
        self.blocks.free(&mut sequence.table);
        self.leave_group(slot, sequence.group);
        if sequence.request.pinned {
            self.pins.remove(slot);
        }
        sequence
    }

    /// Removes a member from its group. An empty group is removed.
    pub(super) fn leave_group(&mut self, slot: Slot, group: Option<GroupId>) {
        if let Some(id) = group {
            self.queues.remove_member(id, slot);
        }
    }

    /// Adds an idle sequence without blocks, whose KV was computed elsewhere. `adopt` allocates its
    /// blocks.
    pub fn import(&mut self, id: SeqId, tokens: Vec<u32>, max_len: usize, logits_from: Option<usize>, root: BlockHash) -> Result<()> {
        self.reserve(1, max_len.max(tokens.len()))?;
        let mut sequence = SequenceKv::new(id, tokens, max_len, root, self.blocks.paging())?;
        sequence.logits_from = logits_from;
        sequence.hashes.mark_private();
        let slot = self.sequences.insert(sequence);
        self.make_idle(slot);
        Ok(())
    }

    /// Allocates the blocks that are visible after `computed` tokens, for an idle sequence without
    /// blocks. Their contents are copied from elsewhere.
    pub fn adopt(&mut self, id: SeqId, computed: usize) -> BlocksResult {
        let Some(slot) = self.sequences.find(id) else { return BlocksResult::Refused };
        if self.blocks.paging().visible_blocks(computed) > self.blocks.total() {
            return BlocksResult::Refused;
        }
        while self.blocks.adopt(&mut self.sequences[slot].table, computed).is_err() {
            if self.blocks.schedule_moves_out() || self.reclaim() {
                continue;
            }
            return if self.blocks.has_queued_out() { BlocksResult::Pending } else { BlocksResult::Refused };
        }
        let sequence = &mut self.sequences[slot];
        self.blocks.fill(&sequence.table, 0..computed);
        sequence.computed = computed;
        self.mark_reclaimable(slot);
        BlocksResult::Done
    }
}
