//! Who is let in, for how long, and what is told beforehand. The engine runs over a runner that counts, and a clock that the test turns.

#[path = "../../benches/serving/forecast.rs"]
mod forecast;
#[path = "../../benches/serving/simulation.rs"]
mod simulation;
#[path = "../../benches/serving/workload.rs"]
mod workload;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{self, Hand};
use forecast::{Errors, Hosts};
use pagedllm::engine::{Continue, Engine, Fork, InFlightStep, Output, Prompt, Request, Resume, Runner};
use pagedllm::error::{Code, Result};
use pagedllm::options::{AllocationPolicy, BatchingPolicy, BeamParams, EngineOptions, OrderPolicy, Policies, SamplingParams};
use pagedllm::scheduler::{FinishReason, StepPlan};
use workload::SHAREGPT;

const VOCAB: usize = 1000;

/// The next token is the last one plus one; each step takes so long, and its rows are counted.
struct Counting {
    logits: Vec<f32>,
    rows: Arc<AtomicUsize>,
    clock: Arc<Hand>,
    step: Duration,
    /// Everything takes so many times as long.
    slower: Arc<AtomicUsize>,
}

impl Runner for Counting {
    fn submit(&mut self, plan: &StepPlan) -> Result<InFlightStep> {
        let rows = &plan.batch.logit_rows;
        self.logits = vec![0.0; rows.len() * VOCAB];
        for (&row, logits) in rows.iter().zip(self.logits.chunks_mut(VOCAB)) {
            logits[plan.batch.tokens[row as usize] as usize + 1] = 9.0;
        }
        self.rows.fetch_add(plan.batch.rows(), Ordering::Relaxed);
        self.clock.turn(self.step * self.slower.load(Ordering::Relaxed) as u32);
        Ok(InFlightStep { logits: rows.len() })
    }

    fn wait(&mut self, _: InFlightStep) -> Result<&[f32]> {
        Ok(&self.logits)
    }
}

struct House {
    engine: Engine,
    clock: Arc<Hand>,
    rows: Arc<AtomicUsize>,
    slower: Arc<AtomicUsize>,
}

const STEP: Duration = Duration::from_millis(10);

fn house(options: EngineOptions) -> House {
    let (clock, rows, slower) = (Arc::new(Hand::default()), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
    let runner = Counting { logits: Vec::new(), rows: rows.clone(), clock: clock.clone(), step: STEP, slower: slower.clone() };
    let info = support::model_info(VOCAB, 64, 256, vec![]);
    let engine = Engine::with_clock(&options, info, None, Box::new(runner), clock.clone()).unwrap();
    House { engine, clock, rows, slower }
}

impl House {
    /// Steps until nothing is unfinished; all outputs.
    fn run(&self) -> Vec<Output> {
        let mut outputs = Vec::new();
        for _ in 0..1000 {
            let report = self.engine.step().unwrap();
            outputs.extend(self.engine.queue().poll(Some(Duration::ZERO)).unwrap());
            if report.unfinished == 0 {
                return outputs;
            }
        }
        panic!("the requests do not end");
    }

    fn add(&self, request: Request) -> u64 {
        self.engine.add_request(request).unwrap()
    }
}

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request::new(Prompt::Tokens(vec![1; prompt]), greedy(max_tokens))
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() }
}

fn within(deadline_ms: u64, request: Request) -> Request {
    Request { deadline: Some(Duration::from_millis(deadline_ms)), ..request }
}

fn tokens(outputs: &[Output], sequence: u64) -> usize {
    outputs.iter().filter(|output| output.sequence == sequence).map(|output| output.tokens.len()).sum()
}

/// It has exactly one last output.
fn finish(outputs: &[Output], sequence: u64) -> FinishReason {
    let ends: Vec<_> = outputs.iter().filter(|output| output.sequence == sequence).filter_map(|output| output.finish).collect();
    assert_eq!(ends.len(), 1);
    ends[0]
}

#[test]
fn a_request_ends_at_its_deadline_with_what_it_has_and_nobody_else_does() {
    let house = house(EngineOptions::default());
    let (hurried, calm) = (house.add(within(45, request(4, 50))), house.add(request(4, 50)));
    let outputs = house.run();
    // Steps begin at 0, 10, 20, 30 and 40 ms; at 50 it is over.
    assert_eq!((finish(&outputs, hurried), tokens(&outputs, hurried)), (FinishReason::Deadline, 5));
    assert_eq!((finish(&outputs, calm), tokens(&outputs, calm)), (FinishReason::Length, 50));
    let stats = house.engine.stats();
    assert_eq!((stats.finished_deadline, stats.finished_length, stats.blocks_used), (1, 1, 0));
}

#[test]
fn a_deadline_passes_in_the_queue_too() {
    let house = house(EngineOptions { max_seqs: 1, ..EngineOptions::default() });
    let (first, second) = (house.add(request(4, 20)), house.add(within(50, request(4, 20))));
    let outputs = house.run();
    assert_eq!((finish(&outputs, second), tokens(&outputs, second)), (FinishReason::Deadline, 0));
    assert_eq!(tokens(&outputs, first), 20);
}

#[test]
fn what_ends_during_its_prefill_ends_within_a_chunk() {
    let options = EngineOptions { prefill_chunk: Some(16), ..EngineOptions::default() };
    let house = house(options);
    let late = house.add(within(25, request(200, 5)));
    let outputs = house.run();
    assert_eq!((finish(&outputs, late), tokens(&outputs, late)), (FinishReason::Deadline, 0));
    assert_eq!(house.rows.load(Ordering::Relaxed), 3 * 16, "chunks that began in time, and no row more");
    let aborted = house.add(request(201, 5));
    house.engine.step().unwrap();
    house.engine.abort(aborted).unwrap();
    let outputs = house.run();
    assert_eq!(finish(&outputs, aborted), FinishReason::Abort);
    assert_eq!(house.rows.load(Ordering::Relaxed), 4 * 16, "not a row was computed after the abort");
    assert_eq!(house.engine.stats().blocks_used, 0);
}

#[test]
fn all_samples_and_all_beams_of_a_request_have_its_deadline() {
    let house = house(EngineOptions::default());
    let samples = house.add(Request { n: 3, ..within(45, request(4, 50)) });
    let beams = house.add(Request { beam: Some(BeamParams { width: 2, ..BeamParams::default() }), ..within(45, request(4, 50)) });
    let best = house.add(Request { n: 2, best_of: Some(4), ..within(45, request(4, 50)) });
    let outputs = house.run();
    for index in 0..3 {
        assert_eq!((finish(&outputs, samples + index), tokens(&outputs, samples + index)), (FinishReason::Deadline, 5));
    }
    assert_eq!(finish(&outputs, beams), FinishReason::Deadline);
    let ends: Vec<_> = outputs.iter().filter(|output| output.request == best).map(|output| (output.index, output.finish)).collect();
    assert_eq!(ends, [(0, Some(FinishReason::Deadline)), (1, Some(FinishReason::Deadline))]);
    assert_eq!(house.engine.stats().blocks_used, 0);
}

#[test]
fn each_turn_of_a_kept_sequence_has_a_deadline_of_its_own() {
    let house = house(EngineOptions::default());
    let seq = house.add(Request { keep: true, ..within(25, request(4, 50)) });
    assert_eq!(finish(&house.run(), seq), FinishReason::Deadline);
    house.clock.turn(Duration::from_secs(1));
    let again = |deadline| Resume { deadline, ..Resume::new(greedy(9)) };
    house.engine.resume(seq, again(None)).unwrap();
    let outputs = house.run();
    assert_eq!((finish(&outputs, seq), tokens(&outputs, seq)), (FinishReason::Length, 9));
    house.engine.resume(seq, again(Some(Duration::from_millis(25)))).unwrap();
    let child = house.engine.fork(seq, 1, &Fork { idle: false, ..Fork::default() }).unwrap()[0];
    let outputs = house.run();
    assert_eq!((finish(&outputs, seq), tokens(&outputs, seq)), (FinishReason::Deadline, 3));
    assert_eq!(finish(&outputs, child), FinishReason::Deadline, "a child has its parent's time");
    assert!(house.engine.sequence(seq).unwrap().idle);
}

#[test]
fn an_abort_ends_all_of_a_request_that_runs_and_nobody_else() {
    let house = house(EngineOptions::default());
    let first = house.add(Request { n: 4, keep: true, ..request(4, 3) });
    let others = house.add(Request { n: 2, ..request(4, 60) });
    while (0..4).any(|i| !house.engine.sequence(first + i).is_ok_and(|sequence| sequence.idle)) {
        house.engine.step().unwrap();
    }
    house.engine.queue().poll(Some(Duration::ZERO)).unwrap();
    // Of four that were kept two run again, and one is gone.
    [1, 3].into_iter().for_each(|i| house.engine.resume(first + i, Resume::new(greedy(50))).unwrap());
    house.engine.free(first).unwrap();
    house.engine.step().unwrap();
    house.engine.abort(first).unwrap();
    let outputs = house.run();
    let ends: Vec<(u64, FinishReason)> = outputs.iter().filter_map(|output| Some((output.sequence, output.finish?))).collect();
    let (abort, length) = (FinishReason::Abort, FinishReason::Length);
    assert_eq!(ends, [(first + 1, abort), (first + 3, abort), (others, length), (others + 1, length)]);
    assert!(house.engine.sequence(first + 2).unwrap().idle);
}

/// It takes as long for each, however many they are.
#[test]
fn many_that_are_due_at_once_end_in_one_step() {
    let time = |count: usize| {
        let house = house(EngineOptions { max_seqs: 2, queue_capacity: usize::MAX / 2, ..EngineOptions::default() });
        for _ in 0..count {
            house.add(Request { n: 2, ..within(45, request(2, 9)) });
        }
        house.engine.step().unwrap();
        house.clock.turn(Duration::from_secs(1));
        let begun = std::time::Instant::now();
        house.engine.step().unwrap();
        let time = begun.elapsed();
        assert_eq!(house.engine.stats().finished_deadline, 2 * count as u64);
        time
    };
    let fastest = |count| (0..3).map(|_| time(count)).min().unwrap();
    let (few, many) = (fastest(2000), fastest(20_000));
    assert!(many < 40 * few, "{few:?} for 2,000 and {many:?} for 20,000");
}

#[test]
fn a_deadline_that_has_passed_is_refused() {
    let house = house(EngineOptions::default());
    let error = house.engine.add_request(within(0, request(4, 5))).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("has passed"), "{error}");
    house.add(Request { deadline: Some(Duration::MAX), ..request(4, 5) });
    assert_eq!(house.run().last().unwrap().finish, Some(FinishReason::Length));
}

/// Its clock goes on by itself, so that the driver has something to sleep through.
#[test]
fn the_driver_wakes_for_a_deadline_while_nobody_reads() {
    let info = support::model_info(VOCAB, 64, 256, vec![]);
    let clock = Arc::new(Hand::default());
    let runner = Counting { logits: Vec::new(), rows: Arc::default(), clock, step: Duration::ZERO, slower: Arc::default() };
    let engine = Engine::with_runner(&EngineOptions::default(), info, None, Box::new(runner)).unwrap();
    let queue = engine.create_queue(1).unwrap();
    engine.start().unwrap();
    let id = engine.add_request_to(&queue, within(50, request(4, 200))).unwrap();
    // The first token fills the queue, and the request pauses until its time has come.
    let begun = std::time::Instant::now();
    while engine.stats().finished_deadline == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "nobody woke the engine");
        std::thread::sleep(Duration::from_millis(1));
    }
    let outputs: Vec<Output> = queue.poll(None).unwrap().into();
    assert_eq!(finish(&outputs, id), FinishReason::Deadline);
}

#[test]
fn a_full_queue_refuses_with_its_numbers_and_has_room_again_after_a_step() {
    let options = EngineOptions { max_waiting_requests: Some(2), max_waiting_tokens: Some(100), ..EngineOptions::default() };
    let house = house(options);
    house.add(request(60, 3));
    let error = house.engine.add_request(request(41, 3)).unwrap_err();
    assert!(error.code() == Code::Capacity && error.message().contains("60 tokens wait and max_waiting_tokens is 100"), "{error}");
    house.add(request(40, 3));
    let error = house.engine.add_request(request(1, 3)).unwrap_err();
    assert!(error.code() == Code::Capacity && error.message().contains("2 requests wait and max_waiting_requests is 2"), "{error}");
    house.engine.step().unwrap();
    let third = house.add(request(100, 3));
    house.engine.abort(third).unwrap();
    let outputs = house.run();
    assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 3);
    // What ended while it waited left the queue too.
    house.add(Request { n: 4, ..request(100, 3) });
    house.run();
    assert_eq!(house.engine.stats().admission_rejections, 2);
    // One may wait in any case.
    house.add(request(150, 3));
    house.run();
}

#[test]
fn turns_and_forks_that_wait_count_as_requests_do() {
    let options = EngineOptions { max_waiting_requests: Some(2), max_waiting_tokens: Some(50), ..EngineOptions::default() };
    let house = house(options);
    let seq = house.add(Request { keep: true, ..request(4, 3) });
    house.run();
    house.engine.append(seq, vec![7; 30]).unwrap();
    house.add(request(21, 3));
    let error = house.engine.resume(seq, Resume::new(greedy(3))).unwrap_err();
    assert!(error.message().contains("21 tokens wait and max_waiting_tokens is 50: no room for 30 more"), "{error}");
    assert!(house.engine.sequence(seq).unwrap().idle);
    house.run();
    house.engine.resume(seq, Resume::new(greedy(3))).unwrap();
    let fork = |n| house.engine.fork(seq, n, &Fork::default());
    let error = fork(2).unwrap_err();
    assert!(error.message().contains("no room for 2 more"), "{error}");
    fork(1).unwrap();
    let idle = Fork { idle: true, ..Fork::default() };
    house.engine.fork(seq, 10, &idle).unwrap();
    house.run();
}

#[test]
fn what_would_become_of_a_request_is_told_without_adding_it() {
    let house = house(EngineOptions { max_seqs: 2, max_waiting_requests: Some(1), ..EngineOptions::default() });
    let admit = |prompt| house.engine.predict_admission(house.engine.queue(), request(prompt, 5)).unwrap();
    let told = admit(8);
    assert!((told.admits, told.fits_now, told.first_token) == (true, true, None), "no step has run: {told:?}");
    house.add(request(8, 100));
    let told = admit(8);
    assert!((told.admits, told.fits_now, told.waiting_requests, told.waiting_tokens) == (false, false, 1, 8), "{told:?}");
    house.engine.step().unwrap();
    let told = admit(8);
    assert!(told.admits && told.fits_now && told.first_token.is_some(), "{told:?}");
    house.add(request(8, 100));
    house.engine.step().unwrap();
    let told = admit(8);
    assert!(told.admits && !told.fits_now, "both places are taken: {told:?}");
    assert_eq!(house.engine.step().unwrap().unfinished, 2, "nothing was added");
    let error = house.engine.predict_admission(house.engine.queue(), request(300, 5)).unwrap_err();
    assert!(error.message().contains("max_model_len is 256"), "{error}");
}

/// Alone on the engine, where every step takes as long, the forecast is exact.
#[test]
fn the_first_token_comes_when_it_was_told() {
    let house = house(EngineOptions { max_seqs: 4, prefill_chunk: Some(32), ..EngineOptions::default() });
    house.add(request(8, 50));
    for _ in 0..5 {
        house.engine.step().unwrap();
    }
    // Nothing of it is in the prefix cache.
    let long = || Request::new(Prompt::Tokens(vec![2; 200]), greedy(5));
    let told = house.engine.predict_admission(house.engine.queue(), long()).unwrap().first_token.unwrap();
    let id = house.add(long());
    let mut steps = 0;
    let mut outputs = Vec::new();
    while tokens(&outputs, id) == 0 {
        house.engine.step().unwrap();
        outputs.extend(house.engine.queue().poll(Some(Duration::ZERO)).unwrap());
        steps += 1;
    }
    let came = STEP * steps;
    assert!(told.abs_diff(came) < STEP / 2, "told {told:?}, came after {came:?}");
}

#[test]
fn a_machine_that_has_become_slower_is_believed() {
    let house = house(EngineOptions { prefill_chunk: Some(32), ..EngineOptions::default() });
    let told =
        || house.engine.predict_admission(house.engine.queue(), Request::new(Prompt::Tokens(vec![2; 200]), greedy(5))).unwrap().first_token;
    let work = |turns| {
        for _ in 0..turns {
            house.add(request(8, 200));
            house.run();
        }
    };
    work(10);
    // Seven chunks.
    assert!(told().unwrap().abs_diff(STEP * 7) < STEP / 2, "{:?}", told());
    house.slower.store(5, Ordering::Relaxed);
    work(25);
    assert!(told().unwrap().abs_diff(STEP * 35) < STEP, "{:?}", told());
    house.slower.store(1, Ordering::Relaxed);
    work(40);
    assert!(told().unwrap().abs_diff(STEP * 7) < STEP, "{:?}", told());
}

/// The other policies are told as well as the default ones.
#[test]
fn forecasts_go_by_the_policies_of_the_engine() {
    let ageing = Policies::DEFAULT_AGEING;
    for policies in [
        Policies { order: OrderPolicy::Priority { ageing }, ..Policies::default() },
        Policies { order: OrderPolicy::ShortestPredicted { ageing }, ..Policies::default() },
        Policies { batching: BatchingPolicy::PrefillFirst { threshold: 2048 }, ..Policies::default() },
        Policies { batching: BatchingPolicy::DecodeFirst { budget: 256 }, ..Policies::default() },
        Policies { batching: BatchingPolicy::Static, ..Policies::default() },
        Policies { allocation: AllocationPolicy::MaxTokens, ..Policies::default() },
    ] {
        let Errors { median, mean, .. } = forecast::measure(&SHAREGPT, 6.0, Hosts::DoNotKnow, policies).unwrap();
        assert!(mean > 10.0 && median < 0.25, "{policies:?}: half of the forecasts were off by {median} or more of {mean} s");
    }
}

/// Under a load that the machine cannot bear: what waits, what runs and who has to go decide.
#[test]
fn the_first_token_is_told_within_a_quarter_half_of_the_time() {
    for hosts in [Hosts::Know, Hosts::DoNotKnow] {
        let Errors { median, mean, .. } = forecast::measure(&SHAREGPT, 6.0, hosts, Policies::default()).unwrap();
        assert!(mean > 10.0, "nobody waited: {mean}");
        assert!(median < 0.25, "{hosts:?}: half of the forecasts were off by {median} or more");
    }
}

#[test]
fn a_turn_that_waits_is_expected_to_end_at_the_longest() {
    let house = house(EngineOptions { max_seqs: 1, ..EngineOptions::default() });
    for _ in 0..20 {
        house.add(request(10, 20));
    }
    house.run();
    let kept = house.add(Request { keep: true, ..request(10, 5) });
    house.run();
    let first = || house.engine.predict_admission(house.engine.queue(), request(10, 5)).unwrap().first_token.unwrap();
    let most = STEP * 256;
    house.engine.resume(kept, Resume::new(SamplingParams::default())).unwrap();
    assert!(first() < most, "resumed without an end: {:?}", first());
    house.run();
    house.engine.rewind(kept, 12).unwrap();
    house.engine.continue_sequence(kept, Continue { keep: true, ..Continue::default() }).unwrap();
    assert!(first() < most, "gone on: {:?}", first());
    house.engine.fork(kept, 1, &Fork { at: Some(11), ..Fork::default() }).unwrap();
    assert!(first() < 2 * most, "and forked: {:?}", first());
}
