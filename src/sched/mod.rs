//! Who runs next, and with which blocks. Pure: no model, no bytes, no clock.

mod plan;
mod sequence;

use std::collections::{HashMap, VecDeque};

pub use plan::{Choice, Event, FinishReason, Part, StepPlan, Verdict};
pub use sequence::{SeqId, Sequence};

use crate::error::Result;
use crate::kv::{BlockManager, blocks_for};

#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    pub max_batch_tokens: usize,
    pub max_seqs: usize,
    pub prefill_chunk: usize,
}

/// First come, first served, one iteration at a time. The oldest sequence can always go on: it may take
/// the blocks of every younger one, and none is admitted that alone would not fit the pool.
///
/// A sequence whose reader is behind is not ready. It pauses: it leaves the running and keeps its blocks until somebody
/// needs them, so that it holds up nobody. When it is ready again it goes before whoever is younger.
pub struct Scheduler {
    options: SchedulerOptions,
    blocks: BlockManager,
    sequences: HashMap<SeqId, Sequence>,
    waiting: VecDeque<SeqId>, // by age, younger than all that run
    running: Vec<SeqId>,      // by age
    paused: Vec<SeqId>,       // by age
    filled: usize,            // KV slots that hold a token's K and V
    preemptions: u64,
    spare: StepPlan, // the last plan's buffers
}

/// Blocks that admission leaves free, so that those already running need not preempt at once: 1 in 100.
const WATERMARK_PARTS: usize = 100;

impl Scheduler {
    pub fn new(options: SchedulerOptions, blocks: BlockManager) -> Result<Scheduler> {
        let mut spare = StepPlan::default();
        spare.batch.reserve(options.max_batch_tokens, options.max_seqs, blocks.total())?;
        spare.parts.try_reserve(options.max_seqs)?;
        let mut running = Vec::new();
        running.try_reserve(options.max_seqs)?;
        Ok(Scheduler {
            options,
            blocks,
            sequences: HashMap::new(),
            waiting: VecDeque::new(),
            running,
            paused: Vec::new(),
            filled: 0,
            preemptions: 0,
            spare,
        })
    }

    /// Takes a sequence of `prompt` that may grow to `max_len` tokens.
    pub fn add(&mut self, id: SeqId, prompt: Vec<u32>, max_len: usize) -> Result<()> {
        let most_blocks = blocks_for(max_len, self.blocks.block_size());
        assert!(most_blocks <= self.blocks.total(), "the engine refuses what can never fit");
        let sequence = Sequence::new(id, prompt, max_len, most_blocks)?;
        self.sequences.try_reserve(1)?;
        self.waiting.try_reserve(self.sequences.len() + 1)?;
        self.paused.try_reserve(self.sequences.len() + 1 - self.paused.len())?;
        self.sequences.insert(id, sequence);
        self.waiting.push_back(id);
        Ok(())
    }

    /// Ends a sequence between steps and returns its blocks.
    pub fn remove(&mut self, id: SeqId) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&id)?;
        self.blocks.free(&mut sequence.table);
        self.filled -= sequence.computed;
        self.waiting.retain(|&other| other != id);
        self.running.retain(|&other| other != id);
        self.paused.retain(|&other| other != id);
        Some(sequence)
    }

    #[cfg(test)]
    fn get(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Reserves blocks and writes the next step down; None when there is nothing to do.
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

    fn pause_and_resume(&mut self, ready: &impl Fn(SeqId) -> bool) {
        let mut next = 0;
        while next < self.paused.len() {
            match ready(self.paused[next]) {
                true => {
                    let id = self.paused.remove(next);
                    self.wait(id);
                }
                false => next += 1,
            }
        }
        let mut next = 0;
        while next < self.running.len() {
            match ready(self.running[next]) {
                true => next += 1,
                false => {
                    let id = self.running.remove(next);
                    self.pause(id);
                }
            }
        }
    }

    fn pause(&mut self, id: SeqId) {
        let place = self.paused.partition_point(|&other| other < id);
        self.paused.insert(place, id);
    }

    fn wait(&mut self, id: SeqId) {
        let place = self.waiting.partition_point(|&other| other < id);
        self.waiting.insert(place, id);
    }

    fn run(&mut self, id: SeqId) -> usize {
        let place = self.running.partition_point(|&other| other < id);
        self.running.insert(place, id);
        place
    }

    /// Who paused and is ready again takes the place of younger ones, which keep their blocks while they wait.
    fn let_the_older_in(&mut self, ready: &impl Fn(SeqId) -> bool) {
        while let (Some(&oldest), Some(&youngest)) = (self.waiting.front(), self.running.last()) {
            if oldest > youngest {
                return;
            }
            self.waiting.pop_front();
            if !ready(oldest) {
                self.pause(oldest);
                continue;
            }
            if self.running.len() == self.options.max_seqs {
                self.running.pop();
                self.wait(youngest);
            }
            self.run(oldest);
        }
    }

    fn plan_running(&mut self, plan: &mut StepPlan) {
        let mut next = 0;
        while next < self.running.len() {
            let rows = self.rows_for(self.running[next], plan);
            if rows == 0 || !self.make_room(next, rows) {
                return;
            }
            self.write(self.running[next], rows, plan);
            next += 1;
        }
    }

    fn admit(&mut self, plan: &mut StepPlan, ready: &impl Fn(SeqId) -> bool) {
        while self.running.len() < self.options.max_seqs {
            let Some(&id) = self.waiting.front() else { return };
            if !ready(id) {
                self.waiting.pop_front();
                self.pause(id);
                continue;
            }
            let rows = self.rows_for(id, plan);
            if rows == 0 || !self.may_enter(id) {
                return;
            }
            self.waiting.pop_front();
            let place = self.run(id);
            if !self.make_room(place, rows) {
                return;
            }
            self.write(id, rows, plan);
        }
    }

    /// Whether all its tokens would fit above the watermark, beside all those of the running. What those that
    /// do not run still hold counts as free.
    fn may_enter(&self, id: SeqId) -> bool {
        let held = |id: &SeqId| self.sequences[id].table.blocks().len();
        let missing = |id: &SeqId| blocks_for(self.sequences[id].tokens.len(), self.blocks.block_size()).saturating_sub(held(id));
        let needed = missing(&id) + self.running.iter().map(missing).sum::<usize>();
        let available = self.blocks.total() - held(&id) - self.running.iter().map(held).sum::<usize>();
        let watermark = self.blocks.total().div_ceil(WATERMARK_PARTS);
        self.running.is_empty() || needed + watermark <= available
    }

    /// Rows of the sequence that this step still has room for.
    fn rows_for(&self, id: SeqId, plan: &StepPlan) -> usize {
        let room = self.options.max_batch_tokens - plan.batch.rows();
        self.sequences[&id].pending().min(self.options.prefill_chunk).min(room)
    }

    /// Blocks for the next `rows` of `running[index]`, taken from those that do not run and then from the youngest that does,
    /// where none are free. False when it was itself the youngest and had to go.
    fn make_room(&mut self, index: usize, rows: usize) -> bool {
        let id = self.running[index];
        loop {
            let sequence = self.sequences.get_mut(&id).expect("a running sequence is known");
            if self.blocks.grow(&mut sequence.table, sequence.computed + rows).is_ok() {
                return true;
            }
            if !self.reclaim() && self.preempt_youngest() == id {
                return false;
            }
        }
    }

    /// Takes the blocks of the youngest that does not run and has some.
    fn reclaim(&mut self) -> bool {
        let holds = |id: &&SeqId| !self.sequences[id].table.blocks().is_empty();
        let youngest = self.waiting.iter().rev().find(holds).max(self.paused.iter().rev().find(holds));
        youngest.copied().map(|id| self.take_blocks(id)).is_some()
    }

    fn preempt_youngest(&mut self) -> SeqId {
        let id = self.running.pop().expect("a sequence without blocks is running");
        self.take_blocks(id);
        self.wait(id);
        id
    }

    /// What the sequence computed will be computed again.
    fn take_blocks(&mut self, id: SeqId) {
        let sequence = self.sequences.get_mut(&id).expect("a queued sequence is known");
        self.blocks.free(&mut sequence.table);
        self.filled -= std::mem::take(&mut sequence.computed);
        self.preemptions += 1;
    }

    fn write(&self, id: SeqId, rows: usize, plan: &mut StepPlan) {
        let sequence = &self.sequences[&id];
        let positions = sequence.computed..sequence.computed + rows;
        plan.push(sequence, positions, |position| self.blocks.slot(&sequence.table, position));
    }

    /// The step ran: lengths advance, tokens are appended, finished sequences leave. One event per choice, in order.
    pub fn commit(&mut self, plan: StepPlan, choices: &[Choice], events: &mut Vec<Event>) {
        for part in &plan.parts {
            let sequence = self.sequences.get_mut(&part.seq).expect("a planned sequence is known");
            sequence.computed += part.rows;
            self.filled += part.rows;
        }
        events.clear();
        for choice in choices {
            let sequence = self.sequences.get_mut(&choice.seq).expect("a chosen sequence was planned");
            let finish = sequence.apply(choice.verdict);
            if finish.is_some() {
                self.remove(choice.seq);
            }
            events.push(Event { seq: choice.seq, finish });
        }
        self.spare = plan;
    }

    /// The step failed: no length has changed. Blocks it reserved stay with their sequences, for the next try.
    pub fn rollback(&mut self, plan: StepPlan) {
        self.spare = plan;
    }

    /// Sequences that do not run, the paused ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.paused.len()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that the last step passed over because they were not ready.
    pub fn paused(&self) -> usize {
        self.paused.len()
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// KV slots that hold a token's K and V.
    pub fn filled_slots(&self) -> usize {
        self.filled
    }

    /// Panics unless every invariant between two steps holds. For tests.
    pub fn check(&self) {
        self.blocks.check(self.sequences.values().map(|sequence| &sequence.table));
        let mut queued: Vec<SeqId> = self.waiting.iter().chain(&self.running).chain(&self.paused).copied().collect();
        queued.sort_unstable();
        let mut known: Vec<SeqId> = self.sequences.keys().copied().collect();
        known.sort_unstable();
        assert_eq!(queued, known, "every sequence is in exactly one queue");
        assert!(self.running.is_sorted() && self.waiting.iter().is_sorted() && self.paused.is_sorted(), "queues are ordered by age");
        if let (Some(oldest), Some(youngest)) = (self.waiting.front(), self.running.last()) {
            assert!(oldest > youngest, "nobody waits for a younger one");
        }
        let computed: usize = self.sequences.values().map(|sequence| sequence.computed).sum();
        assert_eq!(computed, self.filled, "every filled slot is counted once");
        for sequence in self.sequences.values() {
            sequence.check(self.blocks.block_size());
        }
    }
}

#[cfg(test)]
mod tests;
