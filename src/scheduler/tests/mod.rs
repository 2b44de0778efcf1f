//! Unit tests of the scheduler, and their helpers.

mod in_flight;
mod pauses;
mod prompts;
mod sequences;
mod steps;
mod swapping;
mod windows;

use super::*;
use crate::kv::{BlockHash, Paging, blocks_for};

fn scheduler(blocks: usize, block_size: usize, max_batch_tokens: usize, max_seqs: usize, prefill_chunk: usize) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens, max_seqs, prefill_chunk, preemption: Preemption::Recompute };
    Scheduler::new(options, BlockManager::new(blocks, Paging::without_windows(block_size), false).unwrap()).unwrap()
}

pub fn seq_id(id: u64) -> SeqId {
    SeqId::from_raw(id)
}

fn add(scheduler: &mut Scheduler, id: u64, prompt: Vec<u32>, max_len: usize) {
    add_branching(scheduler, id, prompt, max_len, Branching::One);
}

fn add_branching(scheduler: &mut Scheduler, id: u64, prompt: Vec<u32>, max_len: usize, branching: Branching) {
    let root = BlockHash::default();
    add_group(
        scheduler,
        seq_id(id),
        NewGroup { prompt, max_len, branching, priority: 0, keep: false, logits_from: None, prompt_only: false, root },
    );
}

pub fn add_group(scheduler: &mut Scheduler, id: SeqId, group: NewGroup) {
    let prepared = group.prepare(scheduler.blocks.paging()).unwrap();
    scheduler.add(id, prepared).unwrap();
}

/// Adds an idle sequence of 16 tokens whose K and V were computed elsewhere.
fn import(scheduler: &mut Scheduler, id: SeqId, tokens: Vec<u32>) {
    scheduler.import(id, tokens, 40, None, BlockHash::default()).unwrap();
    assert_eq!(scheduler.adopt(id, 16), BlocksResult::Done);
}

pub fn sampled_token(seq: SeqId, outcome: TokenOutcome) -> SampledToken {
    SampledToken { parent: seq, child: seq, outcome }
}

/// Runs a step with `outcome` for every sampled token. Returns the tokens per sequence.
fn step(scheduler: &mut Scheduler, outcome: TokenOutcome) -> Vec<(u64, usize)> {
    step_with(scheduler, outcome, |_| true)
}

fn step_with(scheduler: &mut Scheduler, outcome: TokenOutcome, ready: impl Fn(u64) -> bool) -> Vec<(u64, usize)> {
    scheduler.begin_step(scheduler.now);
    scheduler.recheck_paused();
    let plan = scheduler.schedule(|seq| ready(seq.get()));
    scheduler.record_moves(true, true);
    let Some(plan) = plan else { return Vec::new() };
    let rows = plan.sequences.iter().map(|scheduled| (scheduled.seq.get(), scheduled.tokens)).collect();
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, outcome)).collect();
    scheduler.commit(plan, &sampled, &mut Vec::new());
    scheduler.check();
    rows
}

pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// Adds two samples of a prompt of 16 tokens. The first step forks them.
fn two_samples(s: &mut Scheduler, max_len: usize, prompt_logits: bool) {
    let group = NewGroup {
        prompt: vec![0; 16],
        max_len,
        branching: Branching::Samples(2),
        priority: 0,
        keep: false,
        logits_from: prompt_logits.then_some(0),
        prompt_only: false,
        root: BlockHash::default(),
    };
    add_group(s, seq_id(1), group);
    let plan = s.schedule(|_| true).unwrap();
    let sampled = [1, 2].map(|child| SampledToken { parent: seq_id(1), child: seq_id(child), outcome: TokenOutcome::Token(child as u32) });
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
}
