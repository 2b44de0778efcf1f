use std::time::Duration;

use super::super::tests::{Random, add_group, sampled_token, seq_id};
use super::super::*;
use crate::kv::{BlockHash, Paging};
use crate::sys::cpu_time;
use crate::types::options::{AllocationPolicy, BatchingPolicy, OrderPolicy, Policies as Options, Preemption};

const MS: u64 = 1000;

fn scheduler(blocks: usize, max_batch_tokens: usize, max_seqs: usize, policies: Options) -> Scheduler {
    let options = SchedulerOptions { max_batch_tokens, max_seqs, prefill_chunk: max_batch_tokens, preemption: Preemption::Recompute };
    Scheduler::with_policies(options, BlockManager::new(blocks, Paging::without_windows(8), false).unwrap(), Policies::new(&policies))
        .unwrap()
}

fn by_priority(ageing: u64) -> Options {
    Options { order: OrderPolicy::Priority { ageing: Duration::from_millis(ageing) }, ..Options::default() }
}

fn batching(batching: BatchingPolicy) -> Options {
    Options { batching, ..Options::default() }
}

fn add(s: &mut Scheduler, id: u64, prompt: usize, max_len: usize, priority: i32) {
    let (prompt, branching, root) = (vec![0; prompt], Branching::One, BlockHash::default());
    add_group(s, seq_id(id), NewGroup { prompt, max_len, branching, priority, keep: false, logits_from: None, prompt_only: false, root });
}

/// Runs a step and returns its tokens per sequence.
fn step(s: &mut Scheduler) -> Vec<(u64, usize)> {
    let Some(plan) = s.schedule(|_| true) else { return Vec::new() };
    let mut rows: Vec<_> = plan.sequences.iter().map(|scheduled| (scheduled.seq.get(), scheduled.tokens)).collect();
    let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, TokenOutcome::Token(9))).collect();
    s.commit(plan, &sampled, &mut Vec::new());
    s.check();
    rows.sort_unstable();
    rows
}

#[test]
fn a_request_of_lower_priority_pauses_and_keeps_blocks_that_are_not_needed() {
    let mut s = scheduler(64, 64, 1, by_priority(1000));
    add(&mut s, 1, 20, 60, 0);
    step(&mut s);
    add(&mut s, 2, 20, 22, 1);
    assert_eq!(step(&mut s), [(2, 20)]);
    assert_eq!(step(&mut s), [(2, 1)], "the request of higher priority ends");
    assert_eq!(step(&mut s), [(1, 1)], "no token is recomputed");
    assert_eq!(s.preemptions(), 0);
}

#[test]
fn a_request_of_higher_priority_preempts_a_lower_one_if_it_needs_blocks() {
    let mut s = scheduler(6, 64, 8, by_priority(1000));
    add(&mut s, 1, 32, 40, 0);
    step(&mut s);
    add(&mut s, 2, 32, 34, 1);
    assert_eq!(step(&mut s), [(2, 32)]);
    assert_eq!((s.preemptions(), s.get(seq_id(1)).unwrap().computed), (1, 0));
    step(&mut s);
    assert_eq!(step(&mut s), [(1, 33)]);
}

#[test]
fn a_request_that_does_not_fit_beside_higher_ranks_preempts_no_lower_rank() {
    let mut s = scheduler(8, 64, 8, by_priority(1000));
    add(&mut s, 1, 32, 40, 2);
    add(&mut s, 2, 8, 16, 0);
    step(&mut s);
    add(&mut s, 3, 40, 42, 1);
    assert_eq!(step(&mut s), [(1, 1), (2, 1)], "five blocks of request 3 and five of request 1 exceed the pool of eight");
    assert_eq!((s.preemptions(), s.waiting()), (0, 1));
}

#[test]
fn ageing_prevents_starvation_of_a_low_priority() {
    let mut s = scheduler(16, 64, 1, by_priority(10));
    add(&mut s, 1, 8, 12, -3);
    let (mut started_at, mut next) = (None, 2);
    for ms in 0..200 {
        s.begin_step(ms * MS);
        add(&mut s, next, 8, 9, 2); // one request arrives before each step and needs one step
        next += 1;
        if step(&mut s).iter().any(|(seq, _)| *seq == 1) && started_at.is_none() {
            started_at = Some(ms);
        }
    }
    assert!(s.get(seq_id(1)).is_err(), "the request has finished");
    assert_eq!(started_at, Some(50), "five levels of 10 ms each");
}

#[test]
fn forks_and_resumed_sequences_inherit_the_priority_of_the_request() {
    let mut s = scheduler(64, 64, 1, by_priority(1000));
    let (prompt, branching, root) = (vec![0; 8], Branching::One, BlockHash::default());
    add_group(
        &mut s,
        seq_id(1),
        NewGroup { prompt, max_len: 9, branching, priority: 5, keep: true, logits_from: None, prompt_only: false, root },
    );
    step(&mut s);
    s.fork(seq_id(1), None, seq_id(2), false).unwrap();
    add(&mut s, 3, 8, 20, 4);
    s.resume(seq_id(2), 20, false, false).unwrap();
    assert_eq!(step(&mut s), [(2, 1)]);
}

#[test]
fn the_shortest_predicted_output_runs_first_by_recent_requests_with_its_limit() {
    let order = OrderPolicy::ShortestPredicted { ageing: Duration::from_secs(10) };
    let mut s = scheduler(256, 64, 1, Options { order, ..Options::default() });
    add(&mut s, 1, 8, 508, 0); // limited to 500 tokens and the last in order
    add(&mut s, 2, 8, 108, 0);
    assert_eq!(step(&mut s), [(2, 8)]);
    (0..99).for_each(|_| drop(step(&mut s)));
    assert_eq!(step(&mut s), [(1, 8)], "the other request has finished");
    // It stops after five tokens, so requests with the same limit are no longer predicted to be
    // long.
    for _ in 0..4 {
        let plan = s.schedule(|_| true).unwrap();
        s.commit(plan, &[sampled_token(seq_id(1), TokenOutcome::Token(9))], &mut Vec::new());
    }
    let plan = s.schedule(|_| true).unwrap();
    s.commit(plan, &[sampled_token(seq_id(1), TokenOutcome::Stop(9))], &mut Vec::new());
    add(&mut s, 3, 8, 108, 0);
    add(&mut s, 4, 8, 408, 0);
    assert_eq!(step(&mut s), [(4, 8)]);
}

#[test]
fn decodes_run_first_and_prompts_use_at_most_their_budget() {
    let mut s = scheduler(256, 64, 8, batching(BatchingPolicy::DecodeFirst { budget: 10 }));
    add(&mut s, 1, 4, 100, 0);
    step(&mut s);
    add(&mut s, 2, 25, 100, 0);
    add(&mut s, 3, 4, 100, 0);
    assert_eq!(step(&mut s), [(1, 1), (2, 10)]);
    assert_eq!(step(&mut s), [(1, 1), (2, 10)]);
    assert_eq!(step(&mut s), [(1, 1), (2, 5), (3, 4)]);
    assert_eq!(step(&mut s), [(1, 1), (2, 1), (3, 1)]);
}

#[test]
fn decode_first_schedules_decodes_before_a_prompt_of_higher_rank() {
    let ordered = Options { batching: BatchingPolicy::DecodeFirst { budget: 64 }, ..by_priority(1000) };
    for (policies, expected) in [(ordered, vec![(1, 1), (2, 15)]), (by_priority(1000), vec![(2, 16)])] {
        let mut s = scheduler(256, 16, 8, policies);
        add(&mut s, 1, 4, 100, 0);
        step(&mut s);
        add(&mut s, 2, 60, 100, 1);
        assert_eq!(step(&mut s), expected);
    }
}

#[test]
fn prefill_first_runs_prompts_alone_up_to_the_threshold() {
    let mut s = scheduler(256, 16, 8, batching(BatchingPolicy::PrefillFirst { threshold: 40 }));
    add(&mut s, 1, 4, 100, 0);
    assert_eq!(step(&mut s), [(1, 4)]);
    assert_eq!(step(&mut s), [(1, 1)], "no prompt is left");
    add(&mut s, 2, 60, 100, 0);
    assert_eq!(step(&mut s), [(2, 16)]);
    assert_eq!(step(&mut s), [(2, 16)]);
    assert_eq!(step(&mut s), [(2, 8)], "the threshold of 40 tokens is reached");
    assert_eq!(step(&mut s), [(1, 1)]);
    assert_eq!(step(&mut s), [(2, 16)]);
    assert_eq!(step(&mut s), [(2, 4)]);
    assert_eq!(step(&mut s), [(1, 1), (2, 1)]);
}

#[test]
fn a_static_batch_admits_no_request_until_it_has_finished() {
    let mut s = scheduler(256, 64, 2, batching(BatchingPolicy::Static));
    add(&mut s, 1, 4, 6, 0);
    add(&mut s, 2, 4, 9, 0);
    add(&mut s, 3, 4, 9, 0);
    assert_eq!(step(&mut s), [(1, 4), (2, 4)]);
    assert_eq!(step(&mut s), [(1, 1), (2, 1)], "request 1 ends");
    (0..3).for_each(|_| assert_eq!(step(&mut s), [(2, 1)]));
    assert_eq!(step(&mut s), [(3, 4)]);
}

/// Adds requests to a small pool one after the other. Returns the number of preemptions and the
/// largest number of running sequences.
fn preemptions(allocation: AllocationPolicy, batching: BatchingPolicy) -> (u64, usize) {
    let mut random = Random(7);
    let mut s = scheduler(32, 64, 16, Options { allocation, batching, ..Options::default() });
    let mut max_running = 0;
    for id in 1..300 {
        let prompt = 1 + random.below(60);
        add(&mut s, id, prompt, prompt + 1 + random.below(80), 0);
        (0..4).for_each(|_| drop(step(&mut s)));
        max_running = max_running.max(s.running());
        let blocks = s.blocks();
        assert!(
            s.reserved_blocks() == 0 || s.blocks().used_blocks() + s.reserved_blocks() <= blocks.total(),
            "the pool covers the reserved blocks"
        );
    }
    while !step(&mut s).is_empty() {}
    assert_eq!((s.waiting(), s.running()), (0, 0));
    (s.preemptions(), max_running)
}

#[test]
fn a_request_with_blocks_for_max_tokens_is_never_preempted() {
    for batching in [BatchingPolicy::Mixed, BatchingPolicy::PrefillFirst { threshold: 50 }, BatchingPolicy::DecodeFirst { budget: 9 }] {
        let (on_demand, reserved) = (preemptions(AllocationPolicy::OnDemand, batching), preemptions(AllocationPolicy::MaxTokens, batching));
        assert!(on_demand.0 > 20, "only {} preemptions", on_demand.0);
        assert_eq!(reserved.0, 0);
        assert!(reserved.1 < on_demand.1, "fewer sequences run at once: {}, not {}", reserved.1, on_demand.1);
        let contiguous = preemptions(AllocationPolicy::Contiguous, batching);
        assert_eq!(contiguous.0, 0);
        assert!(contiguous.1 <= reserved.1, "contiguous memory holds more: {}, not {}", contiguous.1, reserved.1);
    }
}

#[test]
fn contiguous_memory_is_reserved_in_powers_of_two_and_released_at_the_end() {
    let mut s = scheduler(20, 64, 8, Options { allocation: AllocationPolicy::Contiguous, ..Options::default() });
    // Each needs 5 blocks, and takes 8 of the 16 and 4 of the pool.
    (1..=3).for_each(|id| add(&mut s, id, 38, 40, 0));
    add(&mut s, 4, 8, 9, 0);
    assert_eq!(step(&mut s), [(1, 38), (2, 26)]);
    assert_eq!(step(&mut s), [(1, 1), (2, 12)], "the first one that does not fit delays all others");
    assert_eq!(step(&mut s), [(2, 1), (3, 38), (4, 8)], "in the memory of the first one, and in the last 4 blocks");
    while !step(&mut s).is_empty() {}
    assert_eq!((s.preemptions(), s.running(), s.waiting()), (0, 0, 0));
}

#[test]
fn a_request_beyond_every_chunk_runs_alone() {
    let mut s = scheduler(12, 64, 8, Options { allocation: AllocationPolicy::Contiguous, ..Options::default() });
    add(&mut s, 1, 70, 80, 0);
    add(&mut s, 2, 8, 16, 0);
    let mut steps = Vec::new();
    while s.running() + s.waiting() > 0 {
        steps.push(step(&mut s));
    }
    assert_eq!(steps[0], [(1, 64)]);
    assert!(steps.iter().any(|step| step.iter().any(|(id, _)| *id == 2)));
}

#[test]
fn blocks_are_reserved_for_samples_that_are_not_forked_yet() {
    let mut s = scheduler(16, 64, 8, Options { allocation: AllocationPolicy::MaxTokens, ..Options::default() });
    let (prompt, branching, root) = (vec![0; 12], Branching::Samples(3), BlockHash::default());
    add_group(
        &mut s,
        seq_id(1),
        NewGroup { prompt, max_len: 40, branching, priority: 0, keep: false, logits_from: None, prompt_only: false, root },
    );
    add(&mut s, 10, 8, 32, 0);
    // One block of the shared prompt, and four more for each of three samples. No block is left for
    // the fourth block of the other request.
    assert_eq!(step(&mut s), [(1, 12)]);
    assert_eq!(s.blocks().used_blocks() + s.reserved_blocks(), 13);
}

/// Returns the shortest of 20 CPU times, which depends least on other processes.
fn shortest_duration(mut act: impl FnMut()) -> Duration {
    let time = || {
        let started = cpu_time::of_thread();
        act();
        cpu_time::of_thread() - started
    };
    std::iter::repeat_with(time).take(20).min().expect("20 durations were measured")
}

/// Measures 500 steps of four running requests, and 100 additions and removals, while `waiting`
/// requests wait.
fn cost_with_waiting(waiting: u64) -> (Duration, Duration) {
    let mut random = Random(3);
    let mut s = scheduler(64, 64, 4, by_priority(1));
    for id in 1..=2 * waiting {
        s.begin_step(id * MS);
        add(&mut s, id, 8, 400, random.below(100) as i32);
    }
    (1..=waiting).for_each(|id| drop(s.remove(seq_id(2 * id))));
    let steps = shortest_duration(|| {
        for _ in 0..500 {
            let plan = s.schedule(|_| true).unwrap();
            let sampled: Vec<SampledToken> = plan.sampled().map(|scheduled| sampled_token(scheduled.seq, TokenOutcome::Token(9))).collect();
            s.commit(plan, &sampled, &mut Vec::new());
        }
    });
    let mut id = 2 * waiting;
    let changes = shortest_duration(|| {
        for _ in 0..100 {
            id += 1;
            add(&mut s, id, 8, 400, random.below(100) as i32);
            s.remove(seq_id(id));
        }
    });
    assert!(s.waiting() as u64 > waiting / 2);
    s.check();
    (steps, changes)
}

#[test]
fn the_cost_of_steps_and_additions_does_not_grow_with_the_waiting_requests() {
    let (few, many) = (cost_with_waiting(500), cost_with_waiting(50_000));
    // A linear search among the waiting requests would take a hundred times as long.
    assert!(many.0 < 10 * few.0, "500 steps: {:?}, not {:?}", many.0, few.0);
    assert!(many.1 < 10 * few.1, "100 additions and removals: {:?}, not {:?}", many.1, few.1);
}
