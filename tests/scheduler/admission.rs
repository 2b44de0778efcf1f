//! Tests of admission, deadlines and forecasts, with an executor that counts tokens and a clock
//! that the test advances.

#[path = "../../benches/serving/forecast.rs"]
mod forecast;
#[path = "../../benches/simulation/mod.rs"]
mod simulation;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::progress::Progress;
use crate::support::{self, ManualClock, cpu_time};
use forecast::{Errors, Hosts};
use pagedllm::engine::{Continue, Engine, Executor, Fork, InFlightStep, Output, Prompt, Request, Resume, StepOutput};
use pagedllm::error::{Code, Result};
use pagedllm::types::SeqId;
use pagedllm::types::batch::Batch;
use pagedllm::types::options::{AllocationPolicy, BatchingPolicy, BeamParams, EngineOptions, OrderPolicy, Policies, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use simulation::workload::SHAREGPT;

const VOCAB: usize = 1000;

/// An executor whose next token is the last one plus one. It counts tokens, and each step advances
/// the clock.
struct Counting {
    logits: Vec<f32>,
    rows: Arc<AtomicUsize>,
    clock: Arc<ManualClock>,
    step: Duration,
    /// The duration of each step is multiplied by this factor.
    slower: Arc<AtomicUsize>,
}

impl Executor for Counting {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        let rows = &batch.logit_rows;
        self.logits = vec![0.0; rows.len() * VOCAB];
        for (&row, logits) in rows.iter().zip(self.logits.chunks_mut(VOCAB)) {
            logits[batch.tokens[row as usize] as usize + 1] = 9.0;
        }
        self.rows.fetch_add(batch.token_count(), Ordering::Relaxed);
        self.clock.advance(self.step * self.slower.load(Ordering::Relaxed) as u32);
        Ok(InFlightStep::new(rows.len()))
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }
}

struct Bench {
    engine: Engine,
    clock: Arc<ManualClock>,
    rows: Arc<AtomicUsize>,
    slower: Arc<AtomicUsize>,
}

const STEP: Duration = Duration::from_millis(10);

fn bench(options: EngineOptions) -> Bench {
    let (clock, rows, slower) = (Arc::new(ManualClock::default()), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
    let executor = Counting { logits: Vec::new(), rows: rows.clone(), clock: clock.clone(), step: STEP, slower: slower.clone() };
    let info = support::model_info(VOCAB, 64, 256, vec![]);
    let engine = Engine::with_clock(&options, info, None, Box::new(executor), clock.clone()).unwrap();
    Bench { engine, clock, rows, slower }
}

impl Bench {
    /// Steps until all requests have ended, and returns all outputs.
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

    /// Adds a request. Returns the id of its first sequence.
    fn add(&self, request: Request) -> SeqId {
        self.engine.add_request(request).unwrap().sequence(0)
    }
}

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request::new(Prompt::Tokens(vec![1; prompt]), greedy(max_tokens))
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() }
}

fn with_deadline(deadline_ms: u64, request: Request) -> Request {
    Request { deadline: Some(Duration::from_millis(deadline_ms)), ..request }
}

fn tokens(outputs: &[Output], sequence: SeqId) -> usize {
    outputs.iter().filter(|output| output.sequence == sequence).map(|output| output.tokens.len()).sum()
}

/// Returns the finish reason of a sequence, which has exactly one last output.
fn finish(outputs: &[Output], sequence: SeqId) -> FinishReason {
    let ends: Vec<_> = outputs.iter().filter(|output| output.sequence == sequence).filter_map(|output| output.finish).collect();
    assert_eq!(ends.len(), 1);
    ends[0]
}

#[test]
fn only_the_request_at_its_deadline_ends_with_the_tokens_it_has() {
    let bench = bench(EngineOptions::default());
    let (limited, unlimited) = (bench.add(with_deadline(45, request(4, 50))), bench.add(request(4, 50)));
    let outputs = bench.run();
    // Steps begin at 0, 10, 20, 30 and 40 ms. At 50 ms the deadline has passed.
    assert_eq!((finish(&outputs, limited), tokens(&outputs, limited)), (FinishReason::Deadline, 5));
    assert_eq!((finish(&outputs, unlimited), tokens(&outputs, unlimited)), (FinishReason::Length, 50));
    let stats = bench.engine.stats();
    assert_eq!((stats.finished_deadline, stats.finished_length, stats.blocks_used), (1, 1, 0));
}

#[test]
fn a_waiting_request_ends_at_its_deadline() {
    let bench = bench(EngineOptions { max_seqs: 1, ..EngineOptions::default() });
    let (first, second) = (bench.add(request(4, 20)), bench.add(with_deadline(50, request(4, 20))));
    let outputs = bench.run();
    assert_eq!((finish(&outputs, second), tokens(&outputs, second)), (FinishReason::Deadline, 0));
    assert_eq!(tokens(&outputs, first), 20);
}

#[test]
fn a_request_that_ends_during_prefill_ends_within_one_chunk() {
    let options = EngineOptions { prefill_chunk: Some(16), ..EngineOptions::default() };
    let bench = bench(options);
    let late = bench.add(with_deadline(25, request(200, 5)));
    let outputs = bench.run();
    assert_eq!((finish(&outputs, late), tokens(&outputs, late)), (FinishReason::Deadline, 0));
    assert_eq!(bench.rows.load(Ordering::Relaxed), 3 * 16, "only chunks that began before the deadline are computed");
    let aborted = bench.add(request(201, 5));
    bench.engine.step().unwrap();
    bench.engine.abort(aborted.own_request()).unwrap();
    let outputs = bench.run();
    assert_eq!(finish(&outputs, aborted), FinishReason::Abort);
    assert_eq!(bench.rows.load(Ordering::Relaxed), 4 * 16, "no token is computed after the abort");
    assert_eq!(bench.engine.stats().blocks_used, 0);
}

#[test]
fn all_samples_and_all_beams_of_a_request_have_its_deadline() {
    let bench = bench(EngineOptions::default());
    let samples = bench.add(Request { n: 3, ..with_deadline(45, request(4, 50)) });
    let beams = bench.add(Request { beam: Some(BeamParams { width: 2, ..BeamParams::default() }), ..with_deadline(45, request(4, 50)) });
    let best = bench.add(Request { n: 2, best_of: Some(4), ..with_deadline(45, request(4, 50)) });
    let outputs = bench.run();
    for sample in samples.own_request().sequences(3) {
        assert_eq!((finish(&outputs, sample), tokens(&outputs, sample)), (FinishReason::Deadline, 5));
    }
    assert_eq!(finish(&outputs, beams), FinishReason::Deadline);
    let ends: Vec<_> =
        outputs.iter().filter(|output| output.request == best.own_request()).map(|output| (output.index, output.finish)).collect();
    assert_eq!(ends, [(0, Some(FinishReason::Deadline)), (1, Some(FinishReason::Deadline))]);
    assert_eq!(bench.engine.stats().blocks_used, 0);
}

#[test]
fn each_turn_of_a_kept_sequence_has_its_own_deadline() {
    let bench = bench(EngineOptions::default());
    let seq = bench.add(Request { keep: true, ..with_deadline(25, request(4, 50)) });
    assert_eq!(finish(&bench.run(), seq), FinishReason::Deadline);
    bench.clock.advance(Duration::from_secs(1));
    let again = |deadline| Resume { deadline, ..Resume::new(greedy(9)) };
    bench.engine.resume(seq, again(None)).unwrap();
    let outputs = bench.run();
    assert_eq!((finish(&outputs, seq), tokens(&outputs, seq)), (FinishReason::Length, 9));
    bench.engine.resume(seq, again(Some(Duration::from_millis(25)))).unwrap();
    let child = bench.engine.fork(seq, 1, &Fork { idle: false, ..Fork::default() }).unwrap()[0];
    let outputs = bench.run();
    assert_eq!((finish(&outputs, seq), tokens(&outputs, seq)), (FinishReason::Deadline, 3));
    assert_eq!(finish(&outputs, child), FinishReason::Deadline, "a fork has the deadline of its parent");
    assert!(bench.engine.sequence(seq).unwrap().idle);
}

#[test]
fn an_abort_ends_exactly_the_running_sequences_of_the_request() {
    let bench = bench(EngineOptions::default());
    let first = bench.add(Request { n: 4, keep: true, ..request(4, 3) }).own_request();
    let others = bench.add(Request { n: 2, ..request(4, 60) }).own_request();
    while first.sequences(4).any(|seq| !bench.engine.sequence(seq).is_ok_and(|sequence| sequence.idle)) {
        bench.engine.step().unwrap();
    }
    bench.engine.queue().poll(Some(Duration::ZERO)).unwrap();
    // Of four kept sequences, two run again and one is freed.
    [1, 3].into_iter().for_each(|i| bench.engine.resume(first.sequence(i), Resume::new(greedy(50))).unwrap());
    bench.engine.free(first.sequence(0)).unwrap();
    bench.engine.step().unwrap();
    bench.engine.abort(first).unwrap();
    let outputs = bench.run();
    let ends: Vec<(SeqId, FinishReason)> = outputs.iter().filter_map(|output| Some((output.sequence, output.finish?))).collect();
    let (abort, length) = (FinishReason::Abort, FinishReason::Length);
    assert_eq!(ends, [(first.sequence(1), abort), (first.sequence(3), abort), (others.sequence(0), length), (others.sequence(1), length)]);
    assert!(bench.engine.sequence(first.sequence(2)).unwrap().idle);
}

/// The time per request does not grow with their number.
#[test]
fn requests_with_the_same_deadline_end_in_bounded_portions() {
    let time = |count: usize| {
        let bench = bench(EngineOptions { max_seqs: 2, queue_capacity: usize::MAX / 2, ..EngineOptions::default() });
        for _ in 0..count {
            bench.add(Request { n: 2, ..with_deadline(45, request(2, 9)) });
        }
        // A step applies about 1,000 requests.
        (0..count / 900 + 2).for_each(|_| _ = bench.engine.step().unwrap());
        bench.clock.advance(Duration::from_secs(1));
        let started = cpu_time::of_thread();
        for step in 0..2 * count {
            let before = bench.engine.stats().finished_deadline;
            bench.engine.step().unwrap();
            let ended = bench.engine.stats().finished_deadline - before;
            assert!(ended <= 2 * 1024 + 2, "step {step} ends {ended} sequences");
            if before + ended == 2 * count as u64 {
                break;
            }
        }
        cpu_time::of_thread() - started
    };
    let fastest = |count| (0..3).map(|_| time(count)).min().unwrap();
    let (few, many) = (fastest(2000), fastest(20_000));
    assert!(many < 40 * few, "{few:?} for 2,000 and {many:?} for 20,000");
}

/// With `max_seqs` 1, the last request to be added runs because of its priority.
#[test]
fn a_running_request_ends_at_its_deadline_however_many_others_do() {
    let policies = Policies { order: OrderPolicy::Priority { ageing: Duration::from_secs(1000) }, ..Policies::default() };
    let bench = bench(EngineOptions { max_seqs: 1, queue_capacity: usize::MAX / 2, policies, ..EngineOptions::default() });
    for _ in 0..5000 {
        bench.add(with_deadline(10_000, request(2, 9)));
    }
    let last = bench.add(Request { priority: 5, ..with_deadline(10_001, request(2, 60)) });
    (0..8).for_each(|_| _ = bench.engine.step().unwrap());
    assert_eq!((bench.engine.stats().running, bench.engine.stats().waiting), (1, 5000));
    bench.clock.advance(Duration::from_secs(20));
    bench.engine.queue().poll(Some(Duration::ZERO)).unwrap();
    bench.engine.step().unwrap();
    let outputs = bench.engine.queue().poll(Some(Duration::ZERO)).unwrap();
    assert!(outputs.iter().any(|output| output.sequence == last && output.finish == Some(FinishReason::Deadline)));
    assert!(outputs.len() <= 1026, "{} requests end in one step", outputs.len());
}

#[test]
fn a_deadline_that_has_passed_is_refused() {
    let bench = bench(EngineOptions::default());
    let error = bench.engine.add_request(with_deadline(0, request(4, 5))).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("has passed"), "{error}");
    bench.add(Request { deadline: Some(Duration::MAX), ..request(4, 5) });
    assert_eq!(bench.run().last().unwrap().finish, Some(FinishReason::Length));
}

/// The engine has a real clock, so that the stepping thread sleeps until the deadline.
#[test]
fn the_stepping_thread_wakes_at_a_deadline_while_the_queue_is_full() {
    let info = support::model_info(VOCAB, 64, 256, vec![]);
    let clock = Arc::new(ManualClock::default());
    let executor = Counting { logits: Vec::new(), rows: Arc::default(), clock, step: Duration::ZERO, slower: Arc::default() };
    let engine = Engine::with_executor(&EngineOptions::default(), info, None, Box::new(executor)).unwrap();
    let queue = engine.create_queue(1).unwrap();
    engine.start().unwrap();
    let id = engine.add_request_to(&queue, with_deadline(50, request(4, 200))).unwrap();
    // The first token fills the queue, and the request pauses until its deadline.
    let mut progress = Progress::new();
    while engine.stats().finished_deadline == 0 {
        progress.check(engine.stats().steps, "the stepping thread did not wake");
        std::thread::sleep(Duration::from_millis(1));
    }
    let outputs: Vec<Output> = queue.poll(None).unwrap().into();
    assert_eq!(finish(&outputs, id.sequence(0)), FinishReason::Deadline);
}

#[test]
fn a_full_wait_queue_refuses_with_its_numbers_until_a_step_frees_room() {
    let options = EngineOptions { max_waiting_requests: Some(2), max_waiting_tokens: Some(100), ..EngineOptions::default() };
    let bench = bench(options);
    bench.add(request(60, 3));
    let error = bench.engine.add_request(request(41, 3)).unwrap_err();
    assert!(error.code() == Code::Capacity && error.message().contains("(60 tokens, 41 more, max_waiting_tokens is 100)"), "{error}");
    bench.add(request(40, 3));
    let error = bench.engine.add_request(request(1, 3)).unwrap_err();
    assert!(error.code() == Code::Capacity && error.message().contains("(2 requests, 1 more, max_waiting_requests is 2)"), "{error}");
    bench.engine.step().unwrap();
    let third = bench.add(request(100, 3));
    bench.engine.abort(third.own_request()).unwrap();
    let outputs = bench.run();
    assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 3);
    // A request that ends while it waits leaves the queue, too.
    bench.add(Request { n: 4, ..request(100, 3) });
    bench.run();
    assert_eq!(bench.engine.stats().admission_rejections, 2);
    // One request can always wait.
    bench.add(request(150, 3));
    bench.run();
}

#[test]
fn waiting_turns_and_forks_count_as_waiting_requests() {
    let options = EngineOptions { max_waiting_requests: Some(2), max_waiting_tokens: Some(50), ..EngineOptions::default() };
    let bench = bench(options);
    let seq = bench.add(Request { keep: true, ..request(4, 3) });
    bench.run();
    bench.engine.append(seq, vec![7; 30]).unwrap();
    bench.add(request(21, 3));
    let error = bench.engine.resume(seq, Resume::new(greedy(3))).unwrap_err();
    assert!(error.message().contains("(21 tokens, 30 more, max_waiting_tokens is 50)"), "{error}");
    assert!(bench.engine.sequence(seq).unwrap().idle);
    bench.run();
    bench.engine.resume(seq, Resume::new(greedy(3))).unwrap();
    let fork = |n| bench.engine.fork(seq, n, &Fork::default());
    let error = fork(2).unwrap_err();
    assert!(error.message().contains("2 more, max_waiting_requests is 2"), "{error}");
    fork(1).unwrap();
    let idle = Fork { idle: true, ..Fork::default() };
    bench.engine.fork(seq, 10, &idle).unwrap();
    bench.run();
}

#[test]
fn predict_admission_does_not_add_the_request() {
    let bench = bench(EngineOptions { max_seqs: 2, max_waiting_requests: Some(1), ..EngineOptions::default() });
    let admit = |prompt| bench.engine.predict_admission(bench.engine.queue(), request(prompt, 5)).unwrap();
    let forecast = admit(8);
    assert!((forecast.admits, forecast.fits_now, forecast.first_token) == (true, true, None), "no step has run: {forecast:?}");
    bench.add(request(8, 100));
    let forecast = admit(8);
    assert!(
        (forecast.admits, forecast.fits_now, forecast.waiting_requests, forecast.waiting_tokens) == (false, false, 1, 8),
        "{forecast:?}"
    );
    bench.engine.step().unwrap();
    let forecast = admit(8);
    assert!(forecast.admits && forecast.fits_now && forecast.first_token.is_some(), "{forecast:?}");
    bench.add(request(8, 100));
    bench.engine.step().unwrap();
    let forecast = admit(8);
    assert!(forecast.admits && !forecast.fits_now, "two sequences are running: {forecast:?}");
    assert_eq!(bench.engine.step().unwrap().unfinished, 2, "predict_admission added nothing");
    let error = bench.engine.predict_admission(bench.engine.queue(), request(300, 5)).unwrap_err();
    assert!(error.message().contains("max_model_len is 256"), "{error}");
}

/// With steps of equal duration and no other requests, the forecast is exact.
#[test]
fn the_first_token_arrives_at_its_predicted_time() {
    let bench = bench(EngineOptions { max_seqs: 4, prefill_chunk: Some(32), ..EngineOptions::default() });
    bench.add(request(8, 50));
    for _ in 0..5 {
        bench.engine.step().unwrap();
    }
    // The prefix cache has no block of this prompt.
    let long = || Request::new(Prompt::Tokens(vec![2; 200]), greedy(5));
    let predicted = bench.engine.predict_admission(bench.engine.queue(), long()).unwrap().first_token.unwrap();
    let id = bench.add(long());
    let mut steps = 0;
    let mut outputs = Vec::new();
    while tokens(&outputs, id) == 0 {
        bench.engine.step().unwrap();
        outputs.extend(bench.engine.queue().poll(Some(Duration::ZERO)).unwrap());
        steps += 1;
    }
    let actual = STEP * steps;
    assert!(predicted.abs_diff(actual) < STEP / 2, "predicted {predicted:?}, actual {actual:?}");
}

#[test]
fn forecasts_follow_the_speed_of_the_machine() {
    let bench = bench(EngineOptions { prefill_chunk: Some(32), ..EngineOptions::default() });
    let predicted =
        || bench.engine.predict_admission(bench.engine.queue(), Request::new(Prompt::Tokens(vec![2; 200]), greedy(5))).unwrap().first_token;
    let work = |turns| {
        for _ in 0..turns {
            bench.add(request(8, 200));
            bench.run();
        }
    };
    work(10);
    // The prompt has seven chunks.
    assert!(predicted().unwrap().abs_diff(STEP * 7) < STEP / 2, "{:?}", predicted());
    bench.slower.store(5, Ordering::Relaxed);
    work(25);
    assert!(predicted().unwrap().abs_diff(STEP * 35) < STEP, "{:?}", predicted());
    bench.slower.store(1, Ordering::Relaxed);
    work(40);
    assert!(predicted().unwrap().abs_diff(STEP * 7) < STEP, "{:?}", predicted());
}

/// Forecasts of other policies are as accurate as those of the default ones.
#[test]
fn forecasts_follow_the_policies_of_the_engine() {
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

/// Under overload, forecasts depend on waiting and running requests, and on preemptions.
#[test]
fn half_of_the_first_tokens_are_predicted_within_a_quarter() {
    for hosts in [Hosts::Know, Hosts::DoNotKnow] {
        let Errors { median, mean, .. } = forecast::measure(&SHAREGPT, 6.0, hosts, Policies::default()).unwrap();
        assert!(mean > 10.0, "requests waited only {mean} s");
        assert!(median < 0.25, "{hosts:?}: half of the forecasts were off by {median} or more");
    }
}

#[test]
fn a_waiting_turn_without_a_limit_is_predicted_to_end_before_max_model_len() {
    let bench = bench(EngineOptions { max_seqs: 1, ..EngineOptions::default() });
    for _ in 0..20 {
        bench.add(request(10, 20));
    }
    bench.run();
    let kept = bench.add(Request { keep: true, ..request(10, 5) });
    bench.run();
    let first = || bench.engine.predict_admission(bench.engine.queue(), request(10, 5)).unwrap().first_token.unwrap();
    let max = STEP * 256;
    bench.engine.resume(kept, Resume::new(SamplingParams::default())).unwrap();
    assert!(first() < max, "resumed without a limit: {:?}", first());
    bench.run();
    bench.engine.rewind(kept, 12).unwrap();
    bench.engine.continue_sequence(kept, Continue { keep: true, ..Continue::default() }).unwrap();
    assert!(first() < max, "continued: {:?}", first());
    bench.engine.fork(kept, 1, &Fork { at: Some(11), ..Fork::default() }).unwrap();
    assert!(first() < 2 * max, "forked: {:?}", first());
}
