//! Telemetry of an engine: timing, metrics and the trace. The executor advances a manual clock by a
//! fixed time per step.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use crate::support::{self, TempDir};
use openmetrics_parser::{MetricsExposition, OpenMetricsType, OpenMetricsValue, Sample, openmetrics};
use pagedllm::engine::{Clock, Engine, Executor, InFlightStep, ModelInfo, Output, Prompt, Request, StepOutput, Timing};
use pagedllm::error::{Code, Result};
use pagedllm::types::RequestId;
use pagedllm::types::batch::Batch;
use pagedllm::types::options::{BeamParams, EngineOptions, Preemption, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use serde_json::Value;

const VOCAB: usize = 50;

/// A clock that only the test and the executor advance, in milliseconds.
#[derive(Default)]
pub struct ManualClock(AtomicU64);

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(SeqCst))
    }
}

/// An executor whose steps take one millisecond per token. The next token is the last one plus one.
struct TimedExecutor {
    clock: Arc<ManualClock>,
    logits: Vec<f32>,
}

impl Executor for TimedExecutor {
    fn submit(&mut self, batch: &Batch) -> Result<InFlightStep> {
        self.clock.0.fetch_add(batch.token_count() as u64, SeqCst);
        self.logits = vec![0.0; batch.logit_rows.len() * VOCAB];
        for (&row, logits) in batch.logit_rows.iter().zip(self.logits.chunks_mut(VOCAB)) {
            logits[(batch.tokens[row as usize] as usize + 1) % VOCAB] = 9.0;
        }
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, _: InFlightStep) -> Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }
}

pub fn engine(options: EngineOptions, blocks: usize) -> (Engine, Arc<ManualClock>) {
    engine_with(options, support::model_info(VOCAB, blocks, 64, vec![]))
}

pub fn engine_with(options: EngineOptions, info: ModelInfo) -> (Engine, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    let executor = Box::new(TimedExecutor { clock: clock.clone(), logits: Vec::new() });
    (Engine::with_clock(&options, info, None, executor, clock.clone()).unwrap(), clock)
}

pub fn request(prompt: std::ops::Range<u32>, max_tokens: usize) -> Request {
    Request::new(Prompt::Tokens(prompt.collect()), SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() })
}

/// Steps until all requests have ended, and returns their last outputs, sorted by request.
fn run(engine: &Engine) -> Vec<Output> {
    while engine.step().unwrap().unfinished > 0 {}
    let mut last: Vec<Output> =
        engine.queue().poll(Some(Duration::ZERO)).unwrap().into_iter().filter(|output| output.finish.is_some()).collect();
    last.sort_by_key(|output| (output.request, output.index));
    last
}

fn ms(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms))
}

#[test]
fn the_last_output_reports_the_timing_of_the_request() {
    let (engine, clock) = engine(EngineOptions { prefill_chunk: Some(16), ..Default::default() }, 64);
    clock.0.store(1000, SeqCst);
    engine.add_request(request(0..20, 3)).unwrap();
    clock.0.fetch_add(7, SeqCst);
    let outputs = run(&engine);
    // Prefill chunks of 16 and 4 tokens, then two decode steps of one token each.
    let expected = Timing {
        requested_at: ms(1000).unwrap(),
        queued: ms(7),
        first_token: ms(27),
        last_token: ms(29),
        preemptions: 0,
        cached_tokens: 0,
    };
    assert_eq!(outputs[0].timing, expected);
    engine.add_request(request(0..20, 1)).unwrap();
    let expected =
        Timing { requested_at: ms(1029).unwrap(), queued: ms(0), first_token: ms(4), last_token: ms(4), preemptions: 0, cached_tokens: 16 };
    assert_eq!(run(&engine)[0].timing, expected);
}

#[test]
fn timing_counts_the_preemptions_of_a_sequence() {
    // Two sequences of 40 tokens do not fit into 8 blocks of 8 slots.
    let (engine, _) = engine(EngineOptions { prefix_cache: false, ..Default::default() }, 8);
    for _ in 0..2 {
        engine.add_request(request(0..8, 32)).unwrap();
    }
    let preemptions: Vec<u64> = run(&engine).iter().map(|output| output.timing.preemptions).collect();
    assert_eq!(preemptions[0], 0, "the older request keeps its blocks");
    assert_eq!((preemptions[1], engine.stats().preemptions), (1, 1));
}

#[test]
fn resumed_sequences_and_forks_have_their_own_timing() {
    let (engine, clock) = engine(EngineOptions::default(), 64);
    let first = engine.add_request(Request { keep: true, ..request(0..4, 2) }).unwrap().sequence(0);
    run(&engine);
    clock.0.store(500, SeqCst);
    let sampling = SamplingParams { max_tokens: Some(2), ..SamplingParams::greedy() };
    engine.resume(first, pagedllm::engine::Resume::new(sampling)).unwrap();
    let child = engine.fork(first, 1, &Default::default()).unwrap()[0];
    clock.0.store(503, SeqCst);
    let outputs = run(&engine);
    // Each of the two steps runs both sequences.
    let expected =
        Timing { requested_at: ms(500).unwrap(), queued: ms(3), first_token: ms(5), last_token: ms(7), preemptions: 0, cached_tokens: 0 };
    assert_eq!((outputs.len(), outputs[1].sequence), (2, child));
    assert!(outputs.iter().all(|output| output.timing == expected), "{outputs:?}");
}

#[test]
fn a_request_aborted_while_waiting_has_no_timing() {
    let (engine, _) = engine(EngineOptions::default(), 64);
    let id = engine.add_request(request(0..4, 2)).unwrap();
    engine.abort(id).unwrap();
    let outputs = run(&engine);
    assert_eq!((outputs[0].finish, outputs[0].timing), (Some(FinishReason::Abort), Timing::default()));
}

struct Metrics(MetricsExposition<OpenMetricsType, OpenMetricsValue>);

impl Metrics {
    fn from_engine(engine: &Engine) -> Metrics {
        Metrics(openmetrics::parse_openmetrics(&engine.metrics().unwrap()).unwrap())
    }

    /// Returns the value of the sample with this finish reason, or of the only sample.
    fn value(&self, name: &str, reason: Option<&str>) -> &OpenMetricsValue {
        let family = &self.0.families[&format!("pagedllm_{name}")];
        let model = "of the test".to_string();
        assert!(family.get_label_names().contains(&"model_name".to_string()));
        let fits = |sample: &&Sample<OpenMetricsValue>| {
            let labels = sample.get_labelset().unwrap();
            labels.get_label_value("model_name") == Some(&model) && labels.get_label_value("finished_reason") == reason
        };
        &family.iter_samples().find(fits).unwrap().value
    }

    fn number(&self, name: &str) -> f64 {
        match self.value(name, None) {
            OpenMetricsValue::Gauge(value) => value.as_f64(),
            OpenMetricsValue::Counter(counter) => counter.value.as_f64(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// Returns the sum, the count and the buckets that are not empty.
    fn histogram(&self, name: &str) -> (f64, u64, Vec<(f64, f64)>) {
        let OpenMetricsValue::Histogram(histogram) = self.value(name, None) else { panic!("{name} is not a histogram") };
        let (mut buckets, mut before) = (Vec::new(), 0.0);
        for bucket in &histogram.buckets {
            let count = bucket.count.as_f64();
            buckets.extend((count > before).then_some((bucket.upper_bound, count - before)));
            before = count;
        }
        (histogram.sum.as_ref().unwrap().as_f64(), histogram.count.unwrap(), buckets)
    }
}

#[test]
fn metrics_match_the_executed_steps() {
    let (engine, clock) = engine(EngineOptions { max_seqs: 2, max_batch_tokens: 32, ..Default::default() }, 64);
    let ids: Vec<RequestId> =
        [(0..20, 3), (20..30, 2), (30..31, 9)].map(|(prompt, max_tokens)| engine.add_request(request(prompt, max_tokens)).unwrap()).into();
    clock.0.store(10, SeqCst);
    // Step 1 has 30 tokens. Step 2 has 2 tokens and finishes the second request. In step 3 the
    // third request starts while the first one generates its last token.
    for _ in 0..3 {
        engine.step().unwrap();
    }
    engine.abort(ids[2]).unwrap();
    engine.step().unwrap();
    let metrics = Metrics::from_engine(&engine);
    let histogram = |name: &str| metrics.histogram(name);
    assert_eq!(histogram("iteration_tokens_total"), (34.0, 3, vec![(2.0, 2.0), (32.0, 1.0)]));
    assert_eq!(histogram("time_to_first_token_seconds"), (0.04 + 0.04 + 0.044, 3, vec![(0.05, 3.0)]));
    assert_eq!(histogram("inter_token_latency_seconds"), (0.002 + 0.002 + 0.002, 3, vec![(0.0025, 3.0)]));
    assert_eq!(histogram("request_queue_time_seconds"), (0.01 + 0.01 + 0.042, 3, vec![(0.01, 2.0), (0.05, 1.0)]));
    assert_eq!(histogram("request_prefill_time_seconds"), (0.03 + 0.03 + 0.002, 3, vec![(0.0025, 1.0), (0.05, 2.0)]));
    assert_eq!(histogram("request_decode_time_seconds"), (0.002 + 0.004, 3, vec![(0.0005, 1.0), (0.0025, 1.0), (0.005, 1.0)]));
    assert_eq!(histogram("e2e_request_latency_seconds"), (0.042 + 0.044 + 0.044, 3, vec![(0.05, 3.0)]));
    assert_eq!(histogram("request_prompt_tokens"), (31.0, 3, vec![(1.0, 1.0), (16.0, 1.0), (32.0, 1.0)]));
    assert_eq!(histogram("request_generation_tokens"), (6.0, 3, vec![(1.0, 1.0), (2.0, 1.0), (4.0, 1.0)]));
    let ended = |reason| match metrics.value("request_success", Some(reason)) {
        OpenMetricsValue::Counter(counter) => counter.value.as_f64(),
        other => panic!("{other:?}"),
    };
    assert_eq!(["stop", "length", "abort", "error"].map(ended), [0.0, 2.0, 1.0, 0.0]);
    let expected = [("prompt_tokens", 31.0), ("generation_tokens", 6.0), ("num_requests_running", 0.0), ("num_preemptions", 0.0)];
    expected.into_iter().for_each(|(name, value)| assert_eq!(metrics.number(name), value, "{name}"));
}

#[test]
fn metrics_report_queue_state_and_prefix_cache_hits() {
    let (engine, _) = engine(EngineOptions { max_seqs: 1, ..Default::default() }, 8);
    for _ in 0..2 {
        engine.add_request(request(0..20, 3)).unwrap();
    }
    engine.step().unwrap();
    let refused = engine.add_request(Request { n: 1, ..request(0..20, 40) }).map(drop);
    assert!(refused.is_ok(), "a request that fits into the empty pool is not refused");
    let metrics = Metrics::from_engine(&engine);
    assert_eq!((metrics.number("num_requests_running"), metrics.number("num_requests_waiting")), (1.0, 1.0));
    assert_eq!(metrics.number("kv_cache_usage_perc"), 3.0 / 8.0);
    run(&engine);
    let metrics = Metrics::from_engine(&engine);
    let expected =
        [("prompt_tokens_cached", 32.0), ("prefix_cache_hits", 32.0), ("prefix_cache_queries", 57.0), ("kv_cache_usage_perc", 0.0)];
    expected.into_iter().for_each(|(name, value)| assert_eq!(metrics.number(name), value, "{name}"));
    let OpenMetricsValue::Info = metrics.value("cache_config", None) else { panic!("cache_config is not an info metric") };
    let labels = metrics.0.families["pagedllm_cache_config"].iter_samples().next().unwrap().get_labelset().unwrap();
    assert_eq!(["block_size", "num_blocks"].map(|name| labels.get_label_value(name).unwrap()), ["8", "8"]);
}

#[test]
fn metrics_report_the_host_tier_the_budget_and_the_model_name() {
    let (clock, mut info) = (Arc::new(ManualClock::default()), support::model_info(VOCAB, 10, 64, vec![]));
    info.memory.swap_blocks = 20;
    let named = EngineOptions {
        model_name: Some("a \"name\"".into()),
        preemption: Preemption::Swap,
        swap_bytes: 1,
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let executor = || Box::new(TimedExecutor { clock: clock.clone(), logits: Vec::new() });
    let engine = Engine::with_clock(&named, info.clone(), None, executor(), clock.clone()).unwrap();
    assert!(engine.metrics().unwrap().contains(r#"pagedllm_num_requests_running{model_name="a \"name\""} 0"#));
    let unnamed = EngineOptions { model_name: None, ..named };
    let engine = Engine::with_clock(&unnamed, info, None, executor(), clock.clone()).unwrap();
    for first in 0..2 {
        engine.add_request(request(first..first + 30, 20)).unwrap();
    }
    while engine.stats().swap_blocks_used == 0 {
        engine.step().unwrap();
    }
    let metrics = Metrics::from_engine(&engine);
    let used = engine.stats().swap_blocks_used as f64;
    let expected = [
        ("num_requests_swapped", 1.0),
        ("cpu_cache_usage_perc", used / 20.0),
        ("num_preemptions", 1.0),
        ("num_preemptions_swapped", 1.0),
        ("kv_blocks_swapped_out", used),
        ("kv_blocks_swapped_in", 0.0),
        ("swap_failures", 0.0),
        ("discard_failures", 0.0),
        ("kv_cache_blocks", 10.0),
        ("kv_cache_blocks_cached", 0.0),
        ("kv_cache_blocks_out_of_window", 0.0),
        ("budget_bytes", 10.0),
        ("budget_held_bytes", 10.0),
        ("budget_engines", 1.0),
    ];
    expected.into_iter().for_each(|(name, value)| assert_eq!(metrics.number(name), value, "{name}"));
    run(&engine);
    assert_eq!(
        (Metrics::from_engine(&engine).number("kv_blocks_swapped_in"), Metrics::from_engine(&engine).number("cpu_cache_usage_perc")),
        (used, 0.0)
    );
}

#[test]
fn a_request_over_the_waiting_limit_is_counted_as_rejected() {
    let (engine, _) = engine(EngineOptions { max_waiting_requests: Some(1), ..Default::default() }, 8);
    engine.add_request(request(0..2, 6)).unwrap();
    let refused = engine.add_request(request(0..2, 6)).unwrap_err();
    assert_eq!((refused.code(), engine.stats().admission_rejections), (Code::Capacity, 1));
    engine.add_request(request(0..0, 60)).unwrap_err();
    assert_eq!(Metrics::from_engine(&engine).number("admission_rejections"), 1.0, "an invalid request is not counted as rejected");
}

#[test]
fn each_sample_has_timing_and_shared_prompt_tokens_count_once() {
    let (engine, _) = engine(EngineOptions::default(), 64);
    engine.add_request(request(0..20, 1)).unwrap();
    engine.add_request(Request { n: 3, ..request(0..20, 2) }).unwrap();
    let outputs = run(&engine);
    assert!(outputs[1..].iter().all(|output| output.timing.cached_tokens == 0 && output.timing.last_token > output.timing.first_token));
    engine.add_request(Request { n: 3, ..request(0..20, 2) }).unwrap();
    let outputs = run(&engine);
    assert!(outputs.iter().all(|output| output.timing.cached_tokens == 16), "{outputs:?}");
    assert_eq!((engine.stats().prompt_tokens_cached, Metrics::from_engine(&engine).histogram("time_to_first_token_seconds").1), (16, 7));
}

#[test]
fn all_beams_of_a_request_have_the_same_timing() {
    let (engine, _) = engine(EngineOptions::default(), 64);
    let beam = Some(BeamParams { width: 2, ..Default::default() });
    engine
        .add_request(Request { n: 2, beam, sampling: SamplingParams { max_tokens: Some(3), ..Default::default() }, ..request(0..4, 3) })
        .unwrap();
    let outputs = run(&engine);
    // The prompt has 4 tokens, and each later step has 2.
    let expected =
        Timing { requested_at: Duration::ZERO, queued: ms(0), first_token: ms(4), last_token: ms(8), preemptions: 0, cached_tokens: 0 };
    assert!(outputs.len() == 2 && outputs.iter().all(|output| output.timing == expected), "{outputs:?}");
}

/// Parses the events of a trace, whether or not its array is closed.
fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let closed = if text.trim_end().ends_with(']') { text } else { format!("{text}]") };
    serde_json::from_str(&closed).unwrap()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"] == name).collect()
}

#[test]
fn a_trace_contains_every_step_and_the_phases_of_each_sequence() {
    let dir = TempDir::new();
    let path = dir.0.join("trace.json");
    let (engine, clock) = engine(EngineOptions { trace_path: Some(path.clone()), ..Default::default() }, 64);
    for prompt in [0..20, 20..30] {
        engine.add_request(request(prompt, 3)).unwrap();
    }
    clock.0.store(10, SeqCst);
    run(&engine);
    engine.step().unwrap();
    // The last step has no work, so another thread writes the trace. The array is still open.
    while std::fs::read_to_string(&path).unwrap().matches(r#""name":"step""#).count() < 3 {
        std::thread::yield_now();
    }
    let open = events(&path);
    let steps = named(&open, "step");
    let args = |key: &str| steps.iter().map(|step| step["args"][key].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!((args("prefill_tokens"), args("decode_tokens"), args("sequences")), (vec![30, 0, 0], vec![0, 2, 2], vec![2, 2, 2]));
    assert_eq!((args("blocks_used")[0], args("blocks_free")[0], args("preemptions")), (5, 59, vec![0, 0, 0]));
    for step in &steps {
        let end = |event: &Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
        let within = |event: &&&Value| event["ts"].as_f64() >= step["ts"].as_f64() && end(event) <= end(step);
        let time = |name: &str| named(&open, name).iter().filter(within).map(|event| event["dur"].as_f64().unwrap()).sum::<f64>();
        assert_eq!((time("run"), time("schedule") + time("decide") + time("commit")), (step["dur"].as_f64().unwrap(), 0.0));
    }
    let span = |name: &str| {
        named(&open, name).iter().map(|event| (event["id"].as_u64().unwrap(), event["ts"].as_f64().unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(span("queued"), [(1, 0.0), (1, 10_000.0), (2, 0.0), (2, 10_000.0)]);
    assert_eq!(span("prefill"), [(1, 10_000.0), (1, 40_000.0), (2, 10_000.0), (2, 40_000.0)]);
    assert_eq!(span("decode"), [(1, 40_000.0), (1, 44_000.0), (2, 40_000.0), (2, 44_000.0)]);
    assert!(named(&open, "end").iter().all(|event| event["args"]["finish"] == "length" && event["args"]["generated_tokens"] == 3));
    drop(engine);
    assert!(std::fs::read_to_string(&path).unwrap().ends_with("]\n") && events(&path) == open, "dropping the engine closes the array");
}

#[test]
fn a_full_disk_stops_the_trace_and_steps_continue() {
    let (engine, _) = engine(EngineOptions { trace_path: Some("/dev/full".into()), ..Default::default() }, 64);
    for _ in 0..3 {
        engine.add_request(request(0..20, 3)).unwrap();
        assert_eq!(run(&engine)[0].finish, Some(FinishReason::Length));
    }
    // Another thread writes the trace.
    while engine.stats().traces_stopped == 0 {
        engine.step().unwrap();
    }
    assert_eq!((engine.stats().traces_stopped, Metrics::from_engine(&engine).number("traces_stopped")), (1, 1.0));
}

#[test]
fn a_trace_file_that_cannot_be_opened_is_an_error_with_its_path() {
    let dir = TempDir::new();
    let pipe = dir.0.join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // A pipe without a reader cannot be opened for writing.
    let _reader = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    for path in ["/nonexistent/trace.json".into(), pipe] {
        let options = EngineOptions { trace_path: Some(path.clone()), ..Default::default() };
        let executor = Box::new(TimedExecutor { clock: Arc::default(), logits: Vec::new() });
        let error = Engine::with_executor(&options, support::model_info(VOCAB, 8, 64, vec![]), None, executor).map(drop).unwrap_err();
        assert!(error.code() == Code::Io && error.message().contains(path.to_str().unwrap()), "{error}");
    }
}
