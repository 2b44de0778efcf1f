//! What the host asks for, between steps.

use super::{Branching, Claim, Group, GroupId, Past, Scheduler, SeqId, Sequence, unknown};
use crate::error::{Error, Result};
use crate::kv::{BlockId, Chain, blocks_for};

/// A request, as far as the scheduler needs to know it.
#[derive(Debug)]
pub struct Arrival {
    pub id: SeqId,
    pub prompt: Vec<u32>,
    /// The length at which it ends, prompt included.
    pub max_len: usize,
    pub branching: Branching,
    /// For orders that go by it; the higher comes first.
    pub priority: i32,
    /// Its sequences stay, idle, when they end.
    pub keep: bool,
    /// Logits are wanted of every row of the prompt.
    pub prompt_logits: bool,
    /// Where its chain of full blocks begins: it shares prefixes with all that begin there.
    pub root: Chain,
}

impl Scheduler {
    /// Takes a request. Its first sequence has its id; those it branches into have the next ones.
    pub fn add(&mut self, arrival: Arrival) -> Result<()> {
        let Arrival { id, prompt, max_len, branching, priority, keep, prompt_logits, root } = arrival;
        let most_blocks = blocks_for(max_len, self.blocks.block_size());
        assert!(most_blocks <= self.blocks.total(), "the engine refuses what can never fit");
        let mut sequence = Sequence::new(id, prompt, max_len, root, self.blocks.block_size())?;
        (sequence.keep, sequence.priority) = (keep, priority);
        sequence.logits_from = prompt_logits.then_some(0);
        self.reserve(1, max_len)?;
        self.sequences.insert(id, sequence);
        self.enqueue(id, branching)
    }

    /// Makes room for `more` sequences in every list that one can be in, and in a step for the tables of as many as it can take, of
    /// `max_len` tokens each, shared or not.
    fn reserve(&mut self, more: usize, max_len: usize) -> Result<()> {
        let tables = self.options.max_seqs.min(self.options.max_batch_tokens).saturating_mul(blocks_for(max_len, self.blocks.block_size()));
        self.spare.clear();
        self.spare.batch.tables.try_reserve_exact(tables)?;
        let most = self.sequences.len() + more;
        self.sequences.try_reserve(more)?;
        self.groups.try_reserve(more)?;
        self.paused.try_reserve(most.saturating_sub(self.paused.len()))?;
        self.pins.try_reserve(most.saturating_sub(self.pins.len()))?;
        Ok(self.idle.try_reserve(most.saturating_sub(self.idle.len()))?)
    }

    /// A new group of one, which comes now.
    pub(super) fn enqueue(&mut self, id: SeqId, branching: Branching) -> Result<()> {
        let mut members = Vec::new();
        members.try_reserve_exact(branching.width())?;
        members.push(id);
        self.wake(id);
        self.last_group += 1;
        let group = GroupId::new(self.policies.order.rank(&self.claim(id)?), self.last_group);
        self.get_mut(id)?.group = Some(group);
        self.groups.insert(group, Group { id: group, branching, members, begun: false });
        self.waiting.insert(group);
        self.rest(id);
        Ok(())
    }

    fn claim(&self, id: SeqId) -> Result<Claim> {
        let sequence = self.get(id)?;
        Ok(Claim { at: self.now, priority: sequence.priority, most: sequence.max_len.saturating_sub(sequence.tokens.len()) })
    }

    /// `child` shares the first `len` tokens of `parent` (None: all) and their blocks. It runs where the parent does, unless `idle`.
    pub fn fork(&mut self, parent: SeqId, len: Option<usize>, child: SeqId, idle: bool) -> Result<()> {
        // Its table is no longer than the parent's.
        self.reserve(1, 0)?;
        let of = self.get(parent)?;
        let len = len.unwrap_or(of.tokens.len());
        if len == 0 || len > of.tokens.len() {
            return Err(Error::invalid(format!("sequence {parent} has {} tokens: it cannot fork at {len}", of.tokens.len())));
        }
        let runs = of.group.is_some() && !idle;
        let mut forked = self.branch(parent, len, child)?;
        forked.past = Past::default();
        self.sequences.insert(child, forked);
        match runs {
            true => self.begin(child),
            false => {
                self.lie_idle(child);
                Ok(())
            }
        }
    }

    /// A sequence that shares the first `len` tokens of `parent`, and the blocks of those that are computed.
    pub(super) fn branch(&mut self, parent: SeqId, len: usize, child: SeqId) -> Result<Sequence> {
        let of = self.sequences.get(&parent).ok_or_else(|| unknown(parent))?;
        let mut forked = of.branch(child, len, self.blocks.block_size())?;
        let computed = if self.looks_back_on_gone(of, len) { 0 } else { of.computed.min(len) };
        forked.table = self.blocks.fork(&of.table, computed, blocks_for(of.max_len.max(len), self.blocks.block_size()))?;
        forked.computed = computed;
        Ok(forked)
    }

    /// Queues a sequence that is whole: its last token gives the logits of the next.
    fn begin(&mut self, id: SeqId) -> Result<()> {
        let sequence = self.get_mut(id)?;
        sequence.computed = sequence.computed.min(sequence.tokens.len() - 1);
        self.enqueue(id, Branching::One)
    }

    /// More tokens at the end; a running sequence goes on after them, and may become longer by so many.
    pub fn append(&mut self, id: SeqId, tokens: &[u32], longest: usize) -> Result<()> {
        let block_size = self.blocks.block_size();
        let sequence = self.get_mut(id)?;
        let len = sequence.tokens.len() + tokens.len();
        if len > longest || (sequence.group.is_some() && len >= longest) {
            return Err(Error::invalid(format!(
                "sequence {id} has {} tokens and max_model_len is {longest}: {} more do not fit",
                sequence.tokens.len(),
                tokens.len()
            )));
        }
        sequence.append(tokens, longest, block_size)?;
        let max_len = sequence.max_len;
        self.reserve(0, max_len)
    }

    /// Cuts the sequence to its first `len` tokens.
    pub fn rewind(&mut self, id: SeqId, len: usize) -> Result<()> {
        let block_size = self.blocks.block_size();
        let gone = self.looks_back_on_gone(self.get(id)?, len);
        let sequence = self.sequences.get_mut(&id).ok_or_else(|| unknown(id))?;
        if len == 0 || len > sequence.tokens.len() {
            return Err(Error::invalid(format!("sequence {id} has {} tokens: it cannot be rewound to {len}", sequence.tokens.len())));
        }
        sequence.cut(len, block_size);
        if gone {
            sequence.computed = 0;
        }
        if sequence.group.is_some() {
            sequence.computed = sequence.computed.min(len - 1);
        }
        let computed = sequence.computed;
        self.truncate(id, computed);
        Ok(())
    }

    /// Gives back the blocks beyond the first `computed` tokens; who rests without any gives way no more.
    fn truncate(&mut self, id: SeqId, computed: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let rests = sequence.table.rests() || self.idle.contains(&id);
        self.wake(id);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            self.blocks.truncate(&mut sequence.table, computed);
        }
        if rests {
            self.rest(id);
        }
    }

    /// Whether a sequence cut to `len` tokens would look back on blocks that are gone.
    pub(super) fn looks_back_on_gone(&self, sequence: &Sequence, len: usize) -> bool {
        self.first_seen(len.saturating_sub(1)) < sequence.table.gone() * self.blocks.block_size()
    }

    /// The first position that the token at `position` looks back on.
    pub(super) fn first_seen(&self, position: usize) -> usize {
        self.options.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// An idle sequence goes on, until it has `max_len` tokens.
    pub fn resume(&mut self, id: SeqId, max_len: usize, keep: bool) -> Result<()> {
        self.reserve(1, max_len)?;
        let block_size = self.blocks.block_size();
        let sequence = self.get_mut(id)?;
        if sequence.group.is_some() {
            return Err(Error::invalid(format!("sequence {id} runs already: it can be resumed when it has ended")));
        }
        let len = sequence.tokens.len();
        if len >= max_len {
            return Err(Error::invalid(format!("sequence {id} has {len} tokens and may have {max_len}: rewind it before it is resumed")));
        }
        sequence.allow(max_len, block_size)?;
        sequence.keep = keep;
        sequence.generated = 0;
        sequence.begun = false;
        sequence.past = Past::default();
        self.begin(id)?;
        self.idle.remove(&id);
        Ok(())
    }

    /// Ends a sequence between steps: it becomes idle if it is to be kept, else it is gone.
    pub fn end(&mut self, id: SeqId) {
        self.wake(id);
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let (group, keep) = (sequence.group.take(), sequence.keep);
        // Blocks that were reserved for a step that did not come.
        self.blocks.truncate(&mut sequence.table, sequence.computed);
        self.leave(id, group);
        match keep {
            true if group.is_some() => self.lie_idle(id),
            true => self.rest(id),
            false => drop(self.remove(id)),
        }
    }

    /// Forgets a sequence, whatever it does, and lets go of its blocks.
    pub fn remove(&mut self, id: SeqId) -> Option<Sequence> {
        self.wake(id);
        let mut sequence = self.sequences.remove(&id)?;
        self.blocks.free(&mut sequence.table);
        self.leave(id, sequence.group);
        self.idle.remove(&id);
        self.pins.retain(|&(_, other)| other != id);
        Some(sequence)
    }

    /// The group has one member less, and is gone without any.
    pub(super) fn leave(&mut self, id: SeqId, group: Option<GroupId>) {
        let Some(group) = group.and_then(|group| self.groups.get_mut(&group)) else { return };
        group.members.retain(|&other| other != id);
        if group.members.is_empty() {
            let id = group.id;
            self.groups.remove(&id);
            if let Ok(place) = self.running.binary_search(&id) {
                self.running.remove(place);
            } else if let Ok(place) = self.paused.binary_search(&id) {
                self.paused.remove(place);
            } else {
                self.waiting.remove(&id);
            }
        }
    }

    /// Computes a prompt and keeps its blocks; where a sequence could not go
    /// on otherwise, pins of the lowest priority give way.
    pub fn pin(&mut self, id: SeqId, prompt: Vec<u32>, priority: u32, root: Chain) -> Result<()> {
        let max_len = prompt.len();
        self.add(Arrival { id, prompt, max_len, branching: Branching::Pin, priority: 0, keep: false, prompt_logits: false, root })?;
        let place = self.pins.partition_point(|&(other, _)| other <= priority);
        self.pins.insert(place, (priority, id));
        Ok(())
    }

    /// Takes an idle sequence of which `computed` tokens have been computed elsewhere, and says into which blocks these go:
    /// none, where there is no room; then all will be computed again.
    pub fn import(
        &mut self,
        id: SeqId,
        tokens: Vec<u32>,
        computed: usize,
        max_len: usize,
        logits_from: Option<usize>,
        root: Chain,
    ) -> Result<&[BlockId]> {
        self.reserve(1, max_len.max(tokens.len()))?;
        let mut sequence = Sequence::new(id, tokens, max_len, root, self.blocks.block_size())?;
        sequence.logits_from = logits_from;
        while self.blocks.prepare(&mut sequence.table, 0..computed, &mut Vec::new()).is_err() {
            if !self.reclaim() {
                break;
            }
        }
        if !sequence.table.blocks().is_empty() {
            self.blocks.fill(&sequence.table, 0..computed);
            sequence.computed = computed;
        }
        self.sequences.insert(id, sequence);
        self.lie_idle(id);
        Ok(self.sequences[&id].table.blocks())
    }
}
