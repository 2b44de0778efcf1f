//! Who runs next, and with which blocks. Pure: no model, no bytes, no clock.

mod group;
mod plan;
mod sequence;

use std::collections::{HashMap, VecDeque};

use group::Group;
pub use group::{Branching, GroupId};
pub use plan::{Choice, Event, FinishReason, Part, StepPlan, Verdict};
pub use sequence::{SeqId, Sequence};

use crate::error::{Error, Result};
use crate::kv::{BlockId, BlockManager, Chain, blocks_for};

#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    pub max_batch_tokens: usize,
    pub max_seqs: usize,
    pub prefill_chunk: usize,
    /// How many positions a token looks back on, its own included. None: on all.
    pub window: Option<usize>,
}

/// A request, as far as the scheduler needs to know it.
#[derive(Debug)]
pub struct Arrival {
    pub id: SeqId,
    pub prompt: Vec<u32>,
    /// The length at which it ends, prompt included.
    pub max_len: usize,
    pub branching: Branching,
    /// Its sequences stay, idle, when they end.
    pub keep: bool,
    /// Logits are wanted of every row of the prompt.
    pub prompt_logits: bool,
    /// Where its chain of full blocks begins: it shares prefixes with all that begin there.
    pub root: Chain,
}

/// First come, first served, one iteration at a time. The unit is the group: a request's sequences. The oldest group can
/// always go on: it may take the blocks of every younger one, and none is admitted that alone would not fit the pool.
///
/// A group whose reader is behind is not ready. It pauses: it leaves the running and keeps its blocks until somebody
/// needs them, so that it holds up nobody. When it is ready again it goes before whoever is younger.
///
/// Idle sequences are in no group. They keep their blocks until somebody needs them, and their tokens until they are removed.
pub struct Scheduler {
    options: SchedulerOptions,
    blocks: BlockManager,
    sequences: HashMap<SeqId, Sequence>,
    groups: HashMap<GroupId, Group>,
    last_group: GroupId,
    waiting: VecDeque<GroupId>, // by age, younger than all that run
    running: Vec<GroupId>,      // by age
    paused: Vec<GroupId>,       // by age
    idle: VecDeque<SeqId>,      // the longest idle first
    pins: Vec<(u32, SeqId)>,    // by priority, the lowest first
    preemptions: u64,
    prefix: PrefixCounts,
    spare: StepPlan, // the last plan's buffers
    turns: Vec<Turn>,
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

/// A member's rows in the step that is being planned.
#[derive(Debug, Clone, Copy)]
struct Turn {
    seq: SeqId,
    rows: usize,
    samples: bool,
}

/// Blocks that admission leaves free, so that those already running need not preempt at once: 1 in 100.
const WATERMARK_PARTS: usize = 100;

impl Scheduler {
    pub fn new(options: SchedulerOptions, blocks: BlockManager) -> Result<Scheduler> {
        let mut spare = StepPlan::default();
        spare.batch.reserve(options.max_batch_tokens, options.max_seqs, blocks.total())?;
        spare.parts.try_reserve(options.max_seqs)?;
        let (mut running, mut turns) = (Vec::new(), Vec::new());
        running.try_reserve(options.max_seqs)?;
        turns.try_reserve(options.max_seqs)?;
        Ok(Scheduler {
            options,
            blocks,
            sequences: HashMap::new(),
            groups: HashMap::new(),
            last_group: 0,
            waiting: VecDeque::new(),
            running,
            paused: Vec::new(),
            idle: VecDeque::new(),
            pins: Vec::new(),
            preemptions: 0,
            prefix: PrefixCounts::default(),
            spare,
            turns,
        })
    }

    // --- what the host asks for, between steps ---

    /// Takes a request. Its first sequence has its id; those it branches into have the next ones.
    pub fn add(&mut self, arrival: Arrival) -> Result<()> {
        let Arrival { id, prompt, max_len, branching, keep, prompt_logits, root } = arrival;
        let most_blocks = blocks_for(max_len, self.blocks.block_size());
        assert!(most_blocks <= self.blocks.total(), "the engine refuses what can never fit");
        let mut sequence = Sequence::new(id, prompt, max_len, root, self.blocks.block_size())?;
        sequence.keep = keep;
        sequence.logits_from = prompt_logits.then_some(0);
        self.reserve(1)?;
        self.sequences.insert(id, sequence);
        self.enqueue(id, branching)
    }

    /// Makes room for `more` sequences in every list that one can be in.
    fn reserve(&mut self, more: usize) -> Result<()> {
        let most = self.sequences.len() + more;
        self.sequences.try_reserve(more)?;
        self.groups.try_reserve(more)?;
        self.waiting.try_reserve(most.saturating_sub(self.waiting.len()))?;
        self.paused.try_reserve(most.saturating_sub(self.paused.len()))?;
        self.pins.try_reserve(most.saturating_sub(self.pins.len()))?;
        Ok(self.idle.try_reserve(most.saturating_sub(self.idle.len()))?)
    }

    /// A new youngest group of one.
    fn enqueue(&mut self, id: SeqId, branching: Branching) -> Result<()> {
        let mut members = Vec::new();
        members.try_reserve_exact(branching.width())?;
        members.push(id);
        self.last_group += 1;
        self.get_mut(id)?.group = Some(self.last_group);
        self.groups.insert(self.last_group, Group { id: self.last_group, branching, members });
        self.waiting.push_back(self.last_group);
        Ok(())
    }

    /// `child` shares the first `len` tokens of `parent` (None: all) and their blocks. It runs where the parent does, unless `idle`.
    pub fn fork(&mut self, parent: SeqId, len: Option<usize>, child: SeqId, idle: bool) -> Result<()> {
        self.reserve(1)?;
        let of = self.get(parent)?;
        let len = len.unwrap_or(of.tokens.len());
        if len == 0 || len > of.tokens.len() {
            return Err(Error::invalid(format!("sequence {parent} has {} tokens: it cannot fork at {len}", of.tokens.len())));
        }
        let runs = of.group.is_some() && !idle;
        let forked = self.branch(parent, len, child)?;
        self.sequences.insert(child, forked);
        match runs {
            true => self.begin(child),
            false => {
                self.idle.push_back(child);
                Ok(())
            }
        }
    }

    /// A sequence that shares the first `len` tokens of `parent`, and the blocks of those that are computed.
    fn branch(&mut self, parent: SeqId, len: usize, child: SeqId) -> Result<Sequence> {
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
        sequence.allow(sequence.max_len.saturating_add(tokens.len()).clamp(len, longest), block_size)?;
        sequence.tokens.extend_from_slice(tokens);
        Ok(())
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
        self.blocks.truncate(&mut sequence.table, sequence.computed);
        Ok(())
    }

    /// Whether a sequence cut to `len` tokens would look back on blocks that are gone.
    fn looks_back_on_gone(&self, sequence: &Sequence, len: usize) -> bool {
        self.first_seen(len.saturating_sub(1)) < sequence.table.gone() * self.blocks.block_size()
    }

    /// The first position that the token at `position` looks back on.
    fn first_seen(&self, position: usize) -> usize {
        self.options.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// An idle sequence goes on, until it has `max_len` tokens.
    pub fn resume(&mut self, id: SeqId, max_len: usize, keep: bool) -> Result<()> {
        self.reserve(1)?;
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
        self.idle.retain(|&other| other != id);
        self.begin(id)
    }

    /// Ends a sequence between steps: it becomes idle if it is to be kept, else it is gone.
    pub fn end(&mut self, id: SeqId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let (group, keep) = (sequence.group.take(), sequence.keep);
        // Blocks that were reserved for a step that did not come.
        self.blocks.truncate(&mut sequence.table, sequence.computed);
        self.leave(id, group);
        match keep {
            true if group.is_some() => self.idle.push_back(id),
            true => {}
            false => drop(self.remove(id)),
        }
    }

    /// Forgets a sequence, whatever it does, and lets go of its blocks.
    pub fn remove(&mut self, id: SeqId) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&id)?;
        self.blocks.free(&mut sequence.table);
        self.leave(id, sequence.group);
        self.idle.retain(|&other| other != id);
        self.pins.retain(|&(_, other)| other != id);
        Some(sequence)
    }

    /// The group has one member less, and is gone without any.
    fn leave(&mut self, id: SeqId, group: Option<GroupId>) {
        let Some(group) = group.and_then(|group| self.groups.get_mut(&group)) else { return };
        group.members.retain(|&other| other != id);
        if group.members.is_empty() {
            let id = group.id;
            self.groups.remove(&id);
            self.waiting.retain(|&other| other != id);
            self.running.retain(|&other| other != id);
            self.paused.retain(|&other| other != id);
        }
    }

    /// Computes a prompt and keeps its blocks; where a sequence could not go
    /// on otherwise, pins of the lowest priority give way.
    pub fn pin(&mut self, id: SeqId, prompt: Vec<u32>, priority: u32, root: Chain) -> Result<()> {
        let max_len = prompt.len();
        self.add(Arrival { id, prompt, max_len, branching: Branching::Pin, keep: false, prompt_logits: false, root })?;
        let place = self.pins.partition_point(|&(other, _)| other <= priority);
        self.pins.insert(place, (priority, id));
        Ok(())
    }

    /// Takes an idle sequence of which `computed` tokens have been computed elsewhere, and says into which blocks these go:
    /// none, where there is no room; then all will be computed again.
    pub fn import(&mut self, id: SeqId, tokens: Vec<u32>, computed: usize, max_len: usize, root: Chain) -> Result<&[BlockId]> {
        self.reserve(1)?;
        let mut sequence = Sequence::new(id, tokens, max_len, root, self.blocks.block_size())?;
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
        self.idle.push_back(id);
        Ok(self.sequences[&id].table.blocks())
    }

    pub fn get(&self, id: SeqId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or_else(|| unknown(id))
    }

    fn get_mut(&mut self, id: SeqId) -> Result<&mut Sequence> {
        self.sequences.get_mut(&id).ok_or_else(|| unknown(id))
    }

    /// The sequences that run together with this one, itself included.
    pub fn members(&self, id: SeqId) -> &[SeqId] {
        let group = self.sequences.get(&id).and_then(|sequence| sequence.group);
        group.map_or(&[], |group| &self.groups[&group].members)
    }

    // --- one step ---

    /// Reserves blocks and writes the next step down; None when there is nothing to do. `ready` is asked about a group's
    /// first member.
    pub fn schedule(&mut self, ready: impl Fn(SeqId) -> bool) -> Option<StepPlan> {
        let mut plan = std::mem::take(&mut self.spare);
        plan.clear();
        let before = self.preemptions;
        self.pause_and_resume(&ready);
        self.let_the_older_in(&ready);
        self.plan_running(&mut plan);
        if self.preemptions == before {
            self.admit(&mut plan, &ready);
        }
        if plan.parts.is_empty() {
            self.spare = plan;
            return None;
        }
        Some(plan)
    }

    fn is_ready(&self, id: GroupId, ready: &impl Fn(SeqId) -> bool) -> bool {
        let group = &self.groups[&id];
        group.branching == Branching::Pin || ready(group.members[0])
    }

    fn pause_and_resume(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut next = 0;
        while next < self.paused.len() {
            match self.is_ready(self.paused[next], ready) {
                true => {
                    let id = self.paused.remove(next);
                    self.wait(id);
                }
                false => next += 1,
            }
        }
        let mut next = 0;
        while next < self.running.len() {
            match self.is_ready(self.running[next], ready) {
                true => next += 1,
                false => {
                    let id = self.running.remove(next);
                    self.pause(id);
                }
            }
        }
    }

    fn pause(&mut self, id: GroupId) {
        let place = self.paused.partition_point(|&other| other < id);
        self.paused.insert(place, id);
    }

    fn wait(&mut self, id: GroupId) {
        let place = self.waiting.partition_point(|&other| other < id);
        self.waiting.insert(place, id);
    }

    fn run(&mut self, id: GroupId) -> usize {
        let place = self.running.partition_point(|&other| other < id);
        self.running.insert(place, id);
        self.find_prefixes(id);
        place
    }

    /// Members without blocks take those that the prefix index still has.
    fn find_prefixes(&mut self, id: GroupId) {
        let block_size = self.blocks.block_size();
        for seq in &self.groups[&id].members {
            let sequence = self.sequences.get_mut(seq).expect("a member is known");
            if !self.blocks.keeps_prefixes() || !sequence.table.blocks().is_empty() {
                continue;
            }
            // The last token is computed in any case: its logits choose the next one. And so is every other whose logits are wanted.
            let useful = sequence.logits_from.unwrap_or(usize::MAX).min(sequence.tokens.len() - 1);
            sequence.chains(useful / block_size, block_size);
            let (table, chains) = sequence.table_and_chains();
            self.prefix.count(useful, self.blocks.reuse(table, &chains[..useful / block_size]) * block_size);
            sequence.computed = sequence.table.blocks().len() * block_size;
        }
    }

    /// Who paused and is ready again takes the place of younger ones, which keep their blocks while they wait.
    fn let_the_older_in(&mut self, ready: &impl Fn(SeqId) -> bool) {
        while let (Some(&oldest), Some(&youngest)) = (self.waiting.front(), self.running.last()) {
            if oldest > youngest {
                return;
            }
            self.waiting.pop_front();
            if !self.is_ready(oldest, ready) {
                self.pause(oldest);
                continue;
            }
            while self.width() + self.groups[&oldest].width() > self.options.max_seqs {
                let Some(youngest) = self.running.pop() else { break };
                self.wait(youngest);
            }
            self.run(oldest);
        }
    }

    /// Rows that the running may come to need in one step.
    fn width(&self) -> usize {
        self.running.iter().map(|id| self.groups[id].width()).sum()
    }

    fn plan_running(&mut self, plan: &mut StepPlan) {
        let mut next = 0;
        while next < self.running.len() {
            if !self.plan_group(next, plan) {
                return;
            }
            next += 1;
        }
    }

    fn admit(&mut self, plan: &mut StepPlan, ready: &impl Fn(SeqId) -> bool) {
        while let Some(&id) = self.waiting.front() {
            if !self.is_ready(id, ready) {
                self.waiting.pop_front();
                self.pause(id);
                continue;
            }
            let places = self.options.max_seqs - self.width();
            let room = self.options.max_batch_tokens - plan.batch.rows();
            if self.groups[&id].width() > places || room == 0 || !self.may_enter(id) {
                return;
            }
            self.waiting.pop_front();
            let place = self.run(id);
            if !self.plan_group(place, plan) {
                return;
            }
        }
    }

    /// Whether all its tokens would fit above the watermark, beside all those of the running. What those that do not run still
    /// hold counts as free.
    fn may_enter(&self, id: GroupId) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let watermark = self.blocks.total().div_ceil(WATERMARK_PARTS);
        let needed = self.needed(id) + self.running.iter().map(|&id| self.needed(id)).sum::<usize>() + watermark;
        needed <= self.blocks.available() || needed <= self.blocks.available() + self.reclaimable(id)
    }

    /// Blocks that the group takes from the pool until all its tokens are computed.
    fn needed(&self, id: GroupId) -> usize {
        let needed = |seq: &SeqId| {
            let sequence = &self.sequences[seq];
            self.blocks.needed(&sequence.table, sequence.computed..sequence.tokens.len())
        };
        self.groups[&id].members.iter().map(needed).sum()
    }

    /// Blocks that only the idle hold, and the groups that do not run, without group `but`.
    fn reclaimable(&self, but: GroupId) -> usize {
        let groups = self.waiting.iter().chain(&self.paused).filter(|&&id| id != but);
        let members = groups.flat_map(|id| &self.groups[id].members);
        members.chain(&self.idle).map(|seq| self.blocks.exclusive(&self.sequences[seq].table)).sum()
    }

    /// Plans the rows of `running[place]`. False: the step is full, or the group had to go.
    fn plan_group(&mut self, place: usize, plan: &mut StepPlan) -> bool {
        let id = self.running[place];
        let mut turns = std::mem::take(&mut self.turns);
        let planned = loop {
            self.take_turns(id, plan, &mut turns);
            if turns.is_empty() || self.make_room(place, &turns, plan) {
                break !turns.is_empty();
            }
            if self.running.get(place) != Some(&id) {
                break false;
            }
            // It has one member less: the others may fit.
        };
        if planned {
            turns.iter().for_each(|turn| self.write(*turn, plan));
        }
        self.turns = turns;
        planned
    }

    /// What the group's members can do in this step. One alone goes on as far as it can. Several choose together, one row each,
    /// once each has computed all that it has; who came back after a preemption shares again what it shared before.
    fn take_turns(&mut self, id: GroupId, plan: &StepPlan, turns: &mut Vec<Turn>) {
        turns.clear();
        let room = self.options.max_batch_tokens - plan.batch.rows();
        let logits = self.options.max_seqs - plan.batch.logit_rows.len();
        let pin = self.groups[&id].branching == Branching::Pin;
        let members = std::mem::take(&mut self.groups.get_mut(&id).expect("a running group is known").members);
        let may_choose = |s: &Scheduler| !pin && members.iter().all(|seq| s.sequences[seq].pending() == 1);
        if members.len() > 1 && !may_choose(self) {
            self.catch_up(&members, room, plan, turns);
        }
        // They may have caught up without computing anything, by sharing alone.
        if turns.is_empty() && may_choose(self) {
            if members.len() <= room.min(logits) {
                turns.extend(members.iter().map(|&seq| Turn { seq, rows: 1, samples: true }));
            }
        } else if let &[seq] = members.as_slice() {
            let rows = self.rows_for(seq, room, plan);
            let samples = rows == self.sequences[&seq].pending() && !pin;
            if rows > 0 && (logits > 0 || !samples) {
                turns.push(Turn { seq, rows, samples });
            }
        }
        self.groups.get_mut(&id).expect("a running group is known").members = members;
    }

    /// Members compute what they have, all but the last token. A member that begins as an older one does waits for that one to
    /// have computed what both have, and takes its blocks.
    fn catch_up(&mut self, members: &[SeqId], mut room: usize, plan: &StepPlan, turns: &mut Vec<Turn>) {
        for (place, &seq) in members.iter().enumerate() {
            if !self.share(seq, &members[..place]) {
                continue;
            }
            let rows = self.rows_for(seq, room, plan).min(self.sequences[&seq].pending() - 1);
            if rows > 0 {
                turns.push(Turn { seq, rows, samples: false });
                room -= rows;
            }
        }
    }

    /// False: one of the `older` is about to compute what this one also has.
    fn share(&mut self, seq: SeqId, older: &[SeqId]) -> bool {
        let sequence = &self.sequences[&seq];
        // Neither has its last token computed.
        let common = |other: &SeqId| {
            sequence.common(&self.sequences[other]).min(sequence.tokens.len() - 1).min(self.sequences[other].tokens.len() - 1)
        };
        let Some((common, best)) = older.iter().map(|other| (common(other), *other)).max_by_key(|&(common, _)| common) else { return true };
        if common <= sequence.computed || sequence.pending() == 1 {
            return true;
        }
        if self.sequences[&best].computed < common {
            return false;
        }
        if self.looks_back_on_gone(&self.sequences[&best], common + 1) {
            return true;
        }
        if let Ok(table) = self.blocks.fork(&self.sequences[&best].table, common, blocks_for(sequence.max_len, self.blocks.block_size())) {
            let sequence = self.sequences.get_mut(&seq).expect("a member is known");
            self.blocks.free(&mut sequence.table);
            (sequence.table, sequence.computed) = (table, common);
        }
        true
    }

    /// Rows of the sequence in a step that has room for so many.
    fn rows_for(&self, seq: SeqId, room: usize, plan: &StepPlan) -> usize {
        let sequence = &self.sequences[&seq];
        let rows = sequence.pending().min(self.options.prefill_chunk).min(room);
        let Some(from) = sequence.logits_from else { return rows };
        // Every running sequence has a row of logits; who wants more has those that nobody may need.
        let taken: usize = plan.parts.iter().map(|part| part.logits.saturating_sub(1)).sum();
        let logits =
            (self.options.max_seqs - self.width() + 1).saturating_sub(taken).min(self.options.max_seqs - plan.batch.logit_rows.len());
        rows.min(from.saturating_sub(sequence.computed) + logits)
    }

    /// Blocks for the turns of `running[place]`, taken from those that do not run and then from the youngest that does, where
    /// none are free. False when it was itself the youngest and had to go, or to part with a member.
    fn make_room(&mut self, place: usize, turns: &[Turn], plan: &mut StepPlan) -> bool {
        let id = self.running[place];
        while !self.prepare(turns, plan) {
            let alone = self.running.len() == 1;
            if self.reclaim() || (alone && self.unpin_lowest(id)) {
                continue;
            }
            if (alone && self.part(id)) || self.preempt_youngest() == id {
                return false;
            }
        }
        true
    }

    /// The last of several samples leaves the group, and waits to go on by itself. What shared a prompt when it was admitted may
    /// have been rewound or appended to since, so that all together would never fit the pool; each alone does.
    fn part(&mut self, id: GroupId) -> bool {
        let group = &self.groups[&id];
        let &[_, .., last] = group.members.as_slice() else { return false };
        if group.branching != Branching::One || self.enqueue(last, Branching::One).is_err() {
            return false;
        }
        self.groups.get_mut(&id).expect("a running group is known").members.pop();
        self.take_blocks(last);
        self.preemptions += 1;
        true
    }

    /// All or nothing.
    fn prepare(&mut self, turns: &[Turn], plan: &mut StepPlan) -> bool {
        let copies = &mut plan.batch.copies;
        let before = copies.len();
        for turn in turns {
            let sequence = self.sequences.get_mut(&turn.seq).expect("a running sequence is known");
            let write = sequence.computed..sequence.computed + turn.rows;
            if self.blocks.prepare(&mut sequence.table, write, copies).is_err() {
                self.undo_copies(before, turns.iter().map(|turn| turn.seq), copies);
                return false;
            }
        }
        true
    }

    /// Takes back the copies from `first` on; they were for `sequences`.
    fn undo_copies(&mut self, first: usize, sequences: impl Iterator<Item = SeqId> + Clone, copies: &mut Vec<crate::batch::BlockCopy>) {
        for copy in copies.drain(first..).rev() {
            for seq in sequences.clone() {
                let sequence = self.sequences.get_mut(&seq).expect("a planned sequence is known");
                self.blocks.undo(copy, &mut sequence.table);
            }
        }
    }

    /// Takes the blocks of the longest idle, or of the youngest that does not run, and has some.
    fn reclaim(&mut self) -> bool {
        let holds = |seq: &SeqId| !self.sequences[seq].table.blocks().is_empty();
        if let Some(seq) = self.idle.iter().copied().find(holds) {
            self.take_blocks(seq);
            return true;
        }
        let some_hold = |id: &&GroupId| self.groups[id].members.iter().any(holds);
        let youngest = self.waiting.iter().rev().find(some_hold).max(self.paused.iter().rev().find(some_hold));
        youngest.copied().map(|id| self.take_all_blocks(id)).is_some()
    }

    fn preempt_youngest(&mut self) -> GroupId {
        let id = self.running.pop().expect("a group without blocks is running");
        self.take_all_blocks(id);
        self.wait(id);
        id
    }

    fn take_all_blocks(&mut self, id: GroupId) {
        for place in 0..self.groups[&id].members.len() {
            self.take_blocks(self.groups[&id].members[place]);
        }
        self.preemptions += 1;
    }

    /// What the sequence computed will be computed again, unless the prefix index can still find it.
    fn take_blocks(&mut self, seq: SeqId) {
        let sequence = self.sequences.get_mut(&seq).expect("a known sequence holds blocks");
        self.blocks.free(&mut sequence.table);
        sequence.computed = 0;
    }

    /// Lets go of the pin that matters least, unless it is the one that is being computed.
    fn unpin_lowest(&mut self, group: GroupId) -> bool {
        let lowest = self.pins.iter().find(|(_, seq)| self.sequences[seq].group != Some(group)).map(|&(_, seq)| seq);
        lowest.map(|seq| self.remove(seq)).is_some()
    }

    fn write(&self, turn: Turn, plan: &mut StepPlan) {
        let sequence = &self.sequences[&turn.seq];
        let positions = sequence.computed..sequence.computed + turn.rows;
        plan.push(sequence, positions, turn.samples, |position| self.blocks.slot(&sequence.table, position));
    }

    /// The step ran: lengths advance, sequences fork and are dropped, tokens are appended, finished sequences leave.
    pub fn commit(&mut self, plan: StepPlan, choices: &[Choice], events: &mut Vec<Event>) {
        events.clear();
        self.blocks.settle(&plan.batch.copies);
        plan.parts.iter().for_each(|part| self.advance(part));
        self.fork_chosen(choices, events);
        self.drop_beams(&plan, choices, events);
        for (choice, Choice { child, verdict, .. }) in choices.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(child) else { continue };
            let finish = sequence.apply(*verdict);
            if finish.is_some() {
                self.end(*child);
            }
            events.push(Event::Advanced { choice, finish });
        }
        self.spare = plan;
    }

    /// The part's rows are computed, and what they filled can be found from now on.
    fn advance(&mut self, part: &Part) {
        let block_size = self.blocks.block_size();
        let computed = part.first + part.rows;
        let first = self.first_seen(computed);
        let sequence = self.sequences.get_mut(&part.seq).expect("a planned sequence is known");
        self.blocks.fill(&sequence.table, part.first..computed);
        sequence.computed = computed;
        if let Some(from) = &mut sequence.logits_from {
            *from = computed.max(*from);
        }
        if self.blocks.keeps_prefixes() {
            sequence.chains(computed / block_size, block_size);
            let (table, chains) = sequence.table_and_chains();
            for (place, chain) in chains.iter().enumerate().take(computed / block_size).skip(part.first / block_size) {
                self.blocks.index(table, place, *chain);
            }
        }
        self.blocks.slide(&mut sequence.table, first);
        if sequence.group.is_some_and(|group| self.groups[&group].branching == Branching::Pin) && sequence.pending() == 0 {
            let group = sequence.group.take();
            self.leave(part.seq, group);
        }
    }

    /// Children come into being before any token is appended; one that takes a dropped beam's id takes its place.
    fn fork_chosen(&mut self, choices: &[Choice], events: &mut Vec<Event>) {
        let mut born: Vec<(usize, Sequence)> = Vec::new();
        for (choice, Choice { parent, child, .. }) in choices.iter().enumerate().filter(|(_, choice)| choice.parent != choice.child) {
            let len = self.sequences[parent].tokens.len();
            match born.try_reserve(1).map_err(Error::from).and_then(|()| self.branch(*parent, len, *child)) {
                Ok(sequence) => born.push((choice, sequence)),
                Err(_) => events.push(Event::Failed { choice }),
            }
        }
        for (choice, mut sequence) in born {
            let Choice { parent, child, .. } = choices[choice];
            let group = self.sequences[&parent].group.expect("who chooses is in a group");
            if let Some(mut dropped) = self.sequences.remove(&child) {
                self.blocks.free(&mut dropped.table);
            } else {
                let group = self.groups.get_mut(&group).expect("a group with members is known");
                group.members.push(child);
                if let Branching::Samples(_) = group.branching {
                    group.branching = Branching::One;
                }
            }
            sequence.group = Some(group);
            self.sequences.insert(child, sequence);
            events.push(Event::Forked { choice });
        }
    }

    /// Beams that were sampled and that no choice goes on with.
    fn drop_beams(&mut self, plan: &StepPlan, choices: &[Choice], events: &mut Vec<Event>) {
        for part in plan.sampled() {
            let group = self.sequences.get(&part.seq).and_then(|sequence| sequence.group);
            let beams = group.is_some_and(|group| matches!(self.groups[&group].branching, Branching::Beams(_)));
            if beams && !choices.iter().any(|choice| choice.child == part.seq) {
                self.remove(part.seq);
                events.push(Event::Dropped { seq: part.seq });
            }
        }
    }

    /// The step failed: no length has changed. Blocks it reserved stay with their sequences, for the next try.
    pub fn rollback(&mut self, mut plan: StepPlan) {
        let mut copies = std::mem::take(&mut plan.batch.copies);
        self.undo_copies(0, plan.parts.iter().map(|part| part.seq), &mut copies);
        plan.batch.copies = copies;
        self.spare = plan;
    }

    // --- what there is ---

    /// Sequences in groups that do not run, the paused ones included.
    pub fn waiting(&self) -> usize {
        self.count(self.waiting.iter().chain(&self.paused))
    }

    pub fn running(&self) -> usize {
        self.count(self.running.iter())
    }

    /// Sequences that the last step passed over because they were not ready.
    pub fn paused(&self) -> usize {
        self.count(self.paused.iter())
    }

    fn count<'a>(&self, groups: impl Iterator<Item = &'a GroupId>) -> usize {
        groups.map(|id| self.groups[id].members.len()).sum()
    }

    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub fn prefix(&self) -> PrefixCounts {
        self.prefix
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check(&self) {
        self.blocks.check(self.sequences.values().map(|sequence| &sequence.table));
        self.check_queues();
        self.check_places();
        for sequence in self.sequences.values() {
            let pinned = self.pins.iter().any(|(_, pin)| *pin == sequence.id);
            sequence.check(self.blocks.block_size(), pinned);
            let full = sequence.computed / self.blocks.block_size();
            self.blocks.check_found(&sequence.table, &sequence.known_chains()[..full.min(sequence.known_chains().len())]);
        }
    }

    fn check_queues(&self) {
        let mut queued: Vec<GroupId> = self.waiting.iter().chain(&self.running).chain(&self.paused).copied().collect();
        queued.sort_unstable();
        let mut known: Vec<GroupId> = self.groups.keys().copied().collect();
        known.sort_unstable();
        assert_eq!(queued, known, "every group is in exactly one queue");
        assert!(self.running.is_sorted() && self.waiting.iter().is_sorted() && self.paused.is_sorted(), "queues are ordered by age");
        if let (Some(oldest), Some(youngest)) = (self.waiting.front(), self.running.last()) {
            assert!(oldest > youngest, "nobody waits for a younger one");
        }
        assert!(self.width() <= self.options.max_seqs, "every running sequence has its row");
    }

    /// Every sequence is a member of its group, idle, or pinned.
    fn check_places(&self) {
        let mut places: Vec<SeqId> = self.idle.iter().copied().collect();
        places.extend(self.pins.iter().filter(|(_, seq)| self.sequences[seq].group.is_none()).map(|(_, seq)| seq));
        for group in self.groups.values() {
            assert!(!group.members.is_empty(), "a group has members");
            assert!(group.members.iter().all(|seq| self.sequences[seq].group == Some(group.id)), "a member knows its group");
            places.extend(&group.members);
        }
        places.sort_unstable();
        let mut known: Vec<SeqId> = self.sequences.keys().copied().collect();
        known.sort_unstable();
        assert_eq!(places, known, "every sequence has exactly one place");
    }
}

fn unknown(id: SeqId) -> Error {
    Error::not_found(format!("sequence {id} is unknown or has ended"))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
