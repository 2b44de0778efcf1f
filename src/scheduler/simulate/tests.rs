use super::super::tests::{add_group, sampled_token, seq_id};
use super::super::{Batching, Branching, NewGroup, Running, Scheduler, SchedulerOptions, StepBudget, TokenOutcome};
use super::test_times::{load, seconds};
use super::*;
use crate::kv::{BlockHash, BlockManager};
use crate::types::options;
use crate::types::options::{AllocationPolicy, BatchingPolicy, OrderPolicy, Preemption};

const SEQS: usize = 4;

fn capacity() -> Capacity {
    with(options::Policies::default())
}

fn snapshot_with(running: Vec<PendingSequence>, spare_blocks: usize) -> SchedulerSnapshot {
    let entries = SEQS - running.len();
    SchedulerSnapshot { running, entries, spare_blocks, ..SchedulerSnapshot::default() }
}

/// Returns a decoding sequence with `computed` tokens that generates up to `max_new_tokens`
/// more.
fn decoding(computed: usize, max_new_tokens: usize) -> PendingSequence {
    PendingSequence { computed, max_new_tokens, ..PendingSequence::default() }
}

fn entry(tokens: usize, max_new_tokens: usize) -> WaitingEntry {
    WaitingEntry::new(tokens, max_new_tokens, 0, Duration::ZERO)
}

fn forecast(snapshot: &SchedulerSnapshot, capacity: &Capacity, waiting: &[WaitingEntry], candidate: WaitingEntry) -> Forecast {
    snapshot.forecast(capacity, waiting, CandidateRequest { waiting: candidate, width: 1 }, Some(&seconds)).unwrap()
}

fn first_token(snapshot: &SchedulerSnapshot, waiting: &[WaitingEntry], prompt: usize) -> f64 {
    forecast(snapshot, &capacity(), waiting, entry(prompt, 9)).first_token.unwrap()
}

#[test]
fn a_prompt_in_an_idle_engine_takes_only_its_own_steps() {
    let snapshot = snapshot_with(vec![], 100);
    let expected = seconds(load(&[(64, 0)])) + seconds(load(&[(36, 64)]));
    let found = first_token(&snapshot, &[], 100);
    assert!((found / expected - 1.0).abs() < 0.02, "{found}, expected {expected}");
    let fits = |width, tokens, waiting: &[WaitingEntry]| {
        snapshot.forecast(&capacity(), waiting, CandidateRequest { waiting: entry(tokens, 9), width }, Some(&seconds)).unwrap().fits_now
    };
    assert!(fits(1, 100, &[]) && fits(4, 1600, &[]));
    assert!(!fits(5, 100, &[]) && !fits(1, 100, &[entry(1, 1)]) && !fits(1, 16 * 100 + 1, &[]));
}

#[test]
fn a_request_waits_until_a_running_sequence_ends() {
    let snapshot = snapshot_with([50, 20, 90, 70].map(|max_new_tokens| decoding(10, max_new_tokens)).into(), 100);
    let found = first_token(&snapshot, &[], 10);
    let decode = seconds(load(&[(1, 10); 4]));
    assert!((20.0 * decode..24.0 * decode).contains(&found), "{found}, a step takes {decode}");
    // With one more request in the queue, the candidate waits for the second sequence to end.
    let found = first_token(&snapshot, &[entry(10, 500)], 10);
    assert!((50.0 * decode..70.0 * decode).contains(&found), "{found}, a step takes {decode}");
}

#[test]
fn a_long_queue_is_simulated_in_growing_steps() {
    let snapshot = snapshot_with(vec![decoding(10, 10); 4], 100);
    // Four requests run at a time. Each has one prefill and 100 decode steps beside three
    // others.
    let time_per_request = 100.0 * seconds(load(&[(1, 60); 4])) / 4.0;
    for queue_len in [100, 1000, 100_000] {
        let found = first_token(&snapshot, &vec![entry(10, 100); queue_len], 10);
        let expected = queue_len as f64 * time_per_request;
        assert!((found / expected - 1.0).abs() < 0.15, "{found}, expected {expected}");
    }
}

#[test]
fn preemptions_in_a_full_pool_delay_the_first_token() {
    let running = vec![decoding(160, 100); 2];
    let full = first_token(&snapshot_with(running.clone(), 4), &[], 70);
    let large = first_token(&snapshot_with(running, 400), &[], 70);
    assert!(full > 100.0 * seconds(load(&[(1, 200)])) && large < 0.1, "{full} and {large}");
}

fn with(policies: options::Policies) -> Capacity {
    let policies = Policies::new(&policies);
    Capacity { seqs: SEQS, tokens: 64, chunk: 64, paging: Paging::without_windows(16), policies }
}

#[test]
fn order_policy_determines_rank() {
    let ageing = Duration::from_secs(10);
    let by_priority = with(options::Policies { order: OrderPolicy::Priority { ageing }, ..options::Policies::default() });
    // These are the ranks that the scheduler would compute.
    let running: Vec<PendingSequence> = vec![PendingSequence { rank: 1_000_000_000, ..decoding(10, 100) }; 4];
    let snapshot = snapshot_with(running, 100);
    let at = |priority| WaitingEntry::new(10, 100, priority, Duration::ZERO);
    let waiting = [at(0); 20];
    let urgent = forecast(&snapshot, &by_priority, &waiting, at(5));
    let step = seconds(load(&[(10, 0), (1, 10), (1, 10), (1, 10)]));
    assert!(urgent.fits_now && urgent.requests_before == 0, "{urgent:?}");
    assert!((urgent.first_token.unwrap() / step - 1.0).abs() < 0.05, "the request preempts a running one: {urgent:?}");
    let normal = forecast(&snapshot, &by_priority, &waiting, at(0));
    assert!(!normal.fits_now && (normal.requests_before, normal.tokens_before) == (20, 200), "{normal:?}");
    assert!(normal.first_token.unwrap() > 100.0 * step, "{normal:?}");
    // Shortest predicted first: the request with fewer tokens than all others comes first.
    let shortest = with(options::Policies { order: OrderPolicy::ShortestPredicted { ageing }, ..options::Policies::default() });
    let requests_before = |max_new_tokens| forecast(&snapshot, &shortest, &[entry(10, 100); 20], entry(10, max_new_tokens)).requests_before;
    assert_eq!((requests_before(50), requests_before(200)), (0, 20));
}

#[test]
fn max_tokens_allocation_waits_for_blocks_of_all_tokens() {
    let reserves = with(options::Policies { allocation: AllocationPolicy::MaxTokens, ..options::Policies::default() });
    // The spare blocks have space for 320 more tokens.
    let snapshot = snapshot_with(vec![decoding(160, 100)], 20);
    let result = |max_new_tokens| forecast(&snapshot, &reserves, &[], entry(20, max_new_tokens));
    assert!(result(300).fits_now && result(300).first_token.unwrap() < 0.1);
    assert!(!result(301).fits_now && result(301).first_token.unwrap() > 100.0 * seconds(load(&[(1, 160)])));
}

#[test]
fn batching_policy_determines_the_steps() {
    let snapshot = snapshot_with(vec![decoding(10, 1000)], 100);
    let time_to_first_token = |batching, prompt| {
        let capacity = with(options::Policies { batching, ..options::Policies::default() });
        forecast(&snapshot, &capacity, &[], entry(prompt, 9)).first_token.unwrap()
    };
    let assert_near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.05, "{found}, expected {expected}");
    // The prompt runs in chunks of 10 tokens, each beside one decode.
    let chunks = (0..4).map(|i| seconds(load(&[(10, 10 * i), (1, 10 + i)]))).sum();
    assert_near(time_to_first_token(BatchingPolicy::DecodeFirst { budget: 10 }, 40), chunks);
    // The prefill runs alone, with one decode step after 30 tokens.
    let alone = seconds(load(&[(30, 0)])) + seconds(load(&[(1, 10)])) + seconds(load(&[(20, 30)]));
    assert_near(time_to_first_token(BatchingPolicy::PrefillFirst { threshold: 30 }, 50), alone);
    // No sequence joins a running batch.
    assert!(time_to_first_token(BatchingPolicy::Static, 40) > 990.0 * seconds(load(&[(1, 20)])));
    assert!(time_to_first_token(BatchingPolicy::Mixed, 40) < 0.1);
}

/// A batching policy that alternates steps of prompts and steps of decodes.
#[derive(Clone, Default)]
struct Alternate {
    decodes_next: bool,
}

impl Batching for Alternate {
    fn step_budget(&self, _: &dyn Running) -> StepBudget {
        match self.decodes_next {
            true => StepBudget { max_prompt_tokens: 0, ..StepBudget::UNLIMITED },
            false => StepBudget { decodes: false, ..StepBudget::UNLIMITED },
        }
    }

    fn record_step(&mut self, _: usize, decode_rows: usize) {
        self.decodes_next = decode_rows == 0;
    }

    fn fork(&self) -> Box<dyn Batching> {
        Box::new(self.clone())
    }
}

fn alternating() -> Policies {
    Policies { batching: Box::new(Alternate::default()), ..Policies::new(&options::Policies::default()) }
}

/// Runs a step of the scheduler. Returns its tokens per sequence, and its load.
fn step(scheduler: &mut Scheduler) -> (Vec<(u64, usize)>, StepLoad) {
    let plan = scheduler.schedule(|_| true).unwrap();
    let tokens = plan.sequences.iter().map(|scheduled| (scheduled.seq.get(), scheduled.tokens)).collect();
    let (load, sampled) = (StepLoad::for_plan(&plan), plan.sampled().map(|scheduled| sampled_token(scheduled.seq, TokenOutcome::Token(9))));
    let sampled: Vec<_> = sampled.collect();
    scheduler.commit(plan, &sampled, &mut Vec::new());
    (tokens, load)
}

/// A scheduler with these policies and the limits of `capacity`.
fn scheduler(policies: Policies) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens: 64, max_seqs: SEQS, prefill_chunk: 64, preemption: Preemption::Recompute };
    let blocks = BlockManager::new(4000, Paging::without_windows(16), false).unwrap();
    Scheduler::with_policies(options, blocks, policies).unwrap()
}

fn add(scheduler: &mut Scheduler, id: u64, prompt: usize, max_new_tokens: usize) {
    let (max_len, branching, root) = (prompt + max_new_tokens, Branching::One, BlockHash::default());
    let prompt = vec![0; prompt];
    add_group(
        scheduler,
        seq_id(id),
        NewGroup { prompt, max_len, branching, priority: 0, keep: false, logits_from: None, prompt_only: false, root },
    );
}

fn snapshot_of(scheduler: &Scheduler) -> SchedulerSnapshot {
    let mut snapshot = SchedulerSnapshot::default();
    scheduler.write_snapshot(&mut snapshot);
    snapshot
}

#[test]
fn the_scheduler_and_the_forecast_follow_a_policy_that_neither_knows() {
    let mut s = scheduler(alternating());
    let capacity = s.capacity();
    add(&mut s, 1, 10, 1000);
    assert_eq!([step(&mut s).0, step(&mut s).0], [[(1, 10)], [(1, 1)]]);
    let predicted = forecast(&snapshot_of(&s), &capacity, &[], entry(150, 9));
    add(&mut s, 2, 150, 50);
    let steps = [(); 5].map(|()| step(&mut s));
    assert_eq!(steps.each_ref().map(|(tokens, _)| tokens[..].to_vec()), [[(2, 64)], [(1, 1)], [(2, 64)], [(1, 1)], [(2, 22)]]);
    let actual: f64 = steps.iter().map(|&(_, load)| seconds(load)).sum();
    assert!((predicted.first_token.unwrap() / actual - 1.0).abs() < 1e-9, "{predicted:?}, actual {actual}");
}

/// Returns the predicted and the actual seconds until the first token of a request behind 40
/// others.
fn behind_40_requests(policies: Policies) -> (f64, f64) {
    let (prompt, max_new_tokens) = (500, 20);
    let mut s = scheduler(policies);
    let capacity = s.capacity();
    (1..=SEQS as u64).for_each(|id| add(&mut s, id, prompt, max_new_tokens));
    step(&mut s);
    let predicted = forecast(&snapshot_of(&s), &capacity, &[entry(prompt, max_new_tokens); 40], entry(prompt, max_new_tokens));
    (5..=45).for_each(|id| add(&mut s, id, prompt, max_new_tokens));
    let mut actual = 0.0;
    while s.find(seq_id(45)).is_some_and(|sequence| sequence.generated == 0) {
        actual += seconds(step(&mut s).1);
    }
    (predicted.first_token.unwrap(), actual)
}

#[test]
fn turns_of_several_steps_follow_a_policy_that_the_forecast_does_not_know() {
    let (predicted, actual) = behind_40_requests(alternating());
    assert!((predicted / actual - 1.0).abs() < 0.1, "{predicted}, actual {actual}");
    let (_, mixed) = behind_40_requests(Policies::new(&options::Policies::default()));
    assert!(actual > 1.15 * mixed, "{actual}, and {mixed} with prompts and decodes in the same steps");
}
