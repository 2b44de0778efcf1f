//! Swapping changes no bit: a sequence that was swapped to host memory or to a file continues with
//! the same outputs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{self, Random, TempDir, configs, write_random_model};
use pagedllm::engine::{Engine, Executor, Fork, InFlightStep, Output, Prompt, Request, Resume, Stats, StepOutput};
use pagedllm::error::Code;
use pagedllm::types::SeqId;
use pagedllm::types::batch::{Batch, BlockMove};
use pagedllm::types::options::{BeamParams, EngineOptions, KvDtype, Preemption, SamplingParams};

const BLOCK: usize = 8;
const LARGE_POOL: u64 = 1000;
const SMALL_POOL: u64 = 24;

/// Engines over one random LLaMA.
struct Model {
    dir: TempDir,
    block_bytes: u64,
    kv_dtype: KvDtype,
}

impl Model {
    fn new(kv_dtype: KvDtype) -> Model {
        let dir = TempDir::new();
        let (_, config) = configs(512).pop().unwrap();
        write_random_model(&dir.0, &config, false, 5);
        let mut model = Model { dir, block_bytes: 0, kv_dtype };
        model.block_bytes = Engine::plan(&EngineOptions { kv_bytes: None, ..model.options(0) }).unwrap().block_bytes;
        model
    }

    fn options(&self, blocks: u64) -> EngineOptions {
        EngineOptions {
            model_dir: self.dir.0.clone(),
            kv_bytes: Some(blocks * self.block_bytes),
            kv_dtype: Some(self.kv_dtype),
            block_size: BLOCK,
            max_model_len: Some(160),
            max_batch_tokens: 64,
            max_seqs: 16,
            threads: Some(2),
            skip_tokenizer: true,
            prefix_cache: false,
            ..Default::default()
        }
    }

    fn swapping(&self, preemption: Preemption, host_blocks: u64, swap_dir: Option<PathBuf>) -> EngineOptions {
        EngineOptions { preemption, swap_bytes: host_blocks * self.block_bytes, swap_dir, ..self.options(SMALL_POOL) }
    }
}

fn sampled(i: u64, max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: if i.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed: Some(i),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        logprobs: Some(0),
        ..Default::default()
    }
}

fn prompt(len: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len).map(|_| random.below(120) as u32).collect()
}

/// By user data and index: the tokens, and the bits of their log probabilities or of the score.
type Answers = BTreeMap<(u64, u32), Vec<(u32, u32)>>;

fn collect(answers: &mut Answers, outputs: impl IntoIterator<Item = Output>) {
    for output in outputs {
        assert!(output.error.is_none(), "{:?}", output.error);
        let bits = output.logprobs.tokens.iter().map(|p| p.to_bits()).chain(std::iter::repeat(output.score.to_bits() as u32));
        answers.entry((output.user_data, output.index)).or_default().extend(output.tokens.iter().copied().zip(bits));
    }
}

fn drain(engine: &Engine, answers: &mut Answers) {
    loop {
        let report = engine.step().unwrap();
        collect(answers, engine.queue().poll(Some(Duration::ZERO)).unwrap());
        if report.unfinished == 0 {
            return;
        }
    }
}

/// Runs plain requests, samples, beams, forks of running sequences, and idle conversations whose
/// blocks other requests need.
fn everything(options: &EngineOptions) -> (Answers, Stats) {
    let engine = Engine::create(options).unwrap();
    let mut answers = Answers::new();
    let add = |user_data: u64, len: usize, n: u32, beam: bool, keep: bool| {
        let mut sampling = sampled(user_data, 24 + user_data as usize % 7);
        let beam = beam.then(|| BeamParams { width: 3, ..Default::default() });
        if beam.is_some() {
            sampling = SamplingParams { seed: None, ignore_eos: false, logprobs: None, temperature: 0.0, ..sampling };
        }
        let request = Request { n, beam, keep, user_data, ..Request::new(Prompt::Tokens(prompt(len, user_data)), sampling) };
        engine.add_request(request).unwrap().sequence(0)
    };
    // Two sequences are kept, and one of them is forked while it is idle.
    let kept = [add(1, 30, 1, false, true), add(2, 41, 1, false, true)];
    drain(&engine, &mut answers);
    let children = engine.fork(kept[0], 1, &Fork { at: Some(37), user_data: Some(50), ..Fork::default() }).unwrap();
    let more =
        [(3, 20, 4, false), (4, 33, 1, true), (5, 60, 1, false), (6, 9, 1, false), (7, 17, 2, false), (8, 45, 1, false), (9, 70, 1, false)];
    for (user_data, len, n, beam) in more {
        add(user_data, len, n, beam, false);
    }
    let parent = add(10, 12, 1, false, false);
    for step in 0..4 {
        engine.step().unwrap();
        collect(&mut answers, engine.queue().poll(Some(Duration::ZERO)).unwrap());
        if step == 1 {
            engine.fork(parent, 1, &Fork { user_data: Some(60), ..Fork::default() }).unwrap();
        }
    }
    drain(&engine, &mut answers);
    for (seq, user_data) in kept.into_iter().chain(children).zip([101, 102, 103]) {
        engine.resume(seq, Resume { keep: false, user_data: Some(user_data), ..Resume::new(sampled(user_data, 20)) }).unwrap();
    }
    for user_data in 11..15 {
        add(user_data, 30, 1, false, false);
    }
    drain(&engine, &mut answers);
    let stats = engine.stats();
    assert_eq!((stats.blocks_used, stats.idle, stats.swapped, stats.swap_blocks_used), (0, 0, 0, 0));
    (answers, stats)
}

fn swapping_changes_nothing(kv_dtype: KvDtype) {
    let model = Model::new(kv_dtype);
    let (expected, stats) = everything(&model.options(LARGE_POOL));
    assert_eq!(stats.preemptions, 0);
    let file = TempDir::new();
    for (what, host_blocks, dir) in [("memory", 200, None), ("a file", 200, Some(file.0.clone())), ("little memory", 12, None)] {
        let (answers, stats) = everything(&model.swapping(Preemption::Swap, host_blocks, dir));
        assert_eq!(answers, expected, "swapped to {what}");
        assert!(stats.preemptions_swapped > 0 && stats.blocks_swapped_in > 0, "{what}: {stats:?}");
        let all = stats.preemptions_swapped == stats.preemptions;
        assert_eq!((all, stats.swap_blocks_total, stats.swap_failures), (host_blocks == 200, host_blocks, 0), "{what}: {stats:?}");
    }
    assert_eq!(std::fs::read_dir(&file.0).unwrap().count(), 0, "no swap file remains");
    let (answers, stats) = everything(&model.swapping(Preemption::Auto, 200, None));
    assert_eq!(answers, expected);
    assert!(stats.blocks_swapped_out > 0, "Auto swaps at the first preemption: {stats:?}");
    let (answers, stats) = everything(&EngineOptions { prefix_cache: true, ..model.swapping(Preemption::Swap, 200, None) });
    assert_eq!(answers, expected, "with the prefix cache");
    assert!(stats.blocks_swapped_out > 0);
}

#[test]
fn swapping_preserves_f32_outputs_bit_for_bit() {
    swapping_changes_nothing(KvDtype::F32);
}

#[test]
fn swapping_preserves_bf16_outputs_bit_for_bit() {
    swapping_changes_nothing(KvDtype::Bf16);
}

#[test]
fn swapping_preserves_int8_outputs_bit_for_bit() {
    swapping_changes_nothing(KvDtype::Int8);
}

#[test]
fn a_swapped_sequence_can_be_exported() {
    let model = Model::new(KvDtype::F32);
    let engine = Engine::create(&model.swapping(Preemption::Swap, 200, None)).unwrap();
    let state = |seq: SeqId| {
        engine.export(seq, None).unwrap();
        engine.step().unwrap();
        engine
            .queue()
            .poll(Some(Duration::ZERO))
            .unwrap()
            .iter()
            .find_map(|output| (!output.sequence_state.is_empty()).then(|| output.sequence_state.clone()))
            .unwrap()
    };
    let request = Request { keep: true, ..Request::new(Prompt::Tokens(prompt(60, 1)), sampled(1, 20)) };
    let seq = engine.add_request(request).unwrap().sequence(0);
    drain(&engine, &mut Answers::new());
    let expected = state(seq);
    engine.add_request(Request::new(Prompt::Tokens(prompt(140, 2)), sampled(2, 20))).unwrap();
    drain(&engine, &mut Answers::new());
    assert_eq!(engine.stats().swapped, 1);
    assert!(state(seq) == expected, "the exported bytes are the same");
    assert_eq!(engine.stats().swapped, 0, "the export swaps the sequence in");
}

#[test]
fn an_invalid_host_tier_is_refused_with_the_limits() {
    let model = Model::new(KvDtype::F32);
    let assert_refused = |options: EngineOptions, code: Code, message: &str| {
        let error = Engine::create(&options).map(|_| ()).unwrap_err();
        assert!(error.code() == code && error.message().contains(message), "{error}, expected {message}");
    };
    let swap =
        |swap_bytes: u64, dir: Option<&str>| EngineOptions { swap_bytes, ..model.swapping(Preemption::Swap, 1, dir.map(Into::into)) };
    assert_refused(swap(0, None), Code::InvalidArgument, "swap_bytes is 0");
    assert_refused(EngineOptions { preemption: Preemption::Auto, ..swap(0, None) }, Code::InvalidArgument, "swap_bytes is 0");
    assert_refused(
        EngineOptions { preemption: Preemption::Recompute, ..swap(1 << 20, None) },
        Code::InvalidArgument,
        "nothing would be swapped",
    );
    assert_refused(swap(model.block_bytes - 1, None), Code::Capacity, &format!("at least one block ({} bytes)", model.block_bytes));
    assert_refused(swap(u64::MAX, None), Code::Capacity, "must be at most");
    for dir in ["/dev/null", "/nonexistent", "/proc"] {
        assert_refused(swap(1 << 20, Some(dir)), Code::Io, ": cannot create a file of ");
    }
    let plan = Engine::plan(&swap(10 * model.block_bytes + 1, None)).unwrap();
    assert_eq!((plan.swap_blocks, plan.swap_bytes), (10, 10 * model.block_bytes));
}

/// An executor whose steps take one millisecond per token. The test sets the time to swap one
/// block.
struct TimedExecutor {
    logits: Vec<f32>,
    clock: Arc<support::ManualClock>,
    /// Time to swap one block in microseconds.
    block_time: Arc<AtomicU64>,
}

impl TimedExecutor {
    fn advance(&self, moves: usize) -> pagedllm::error::Result<()> {
        self.clock.advance(Duration::from_micros(self.block_time.load(Ordering::Relaxed) * moves as u64));
        Ok(())
    }
}

impl Executor for TimedExecutor {
    fn submit(&mut self, batch: &Batch) -> pagedllm::error::Result<InFlightStep> {
        self.clock.advance(Duration::from_millis(batch.token_count() as u64));
        self.logits.resize(batch.logit_rows.len() * 8, 0.0);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, _: InFlightStep) -> pagedllm::error::Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> pagedllm::error::Result<()> {
        self.advance(moves.len())
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> pagedllm::error::Result<()> {
        self.advance(moves.len())
    }
}

/// Creates an engine with a pool of 16 blocks, and the time to swap a block.
fn timed_engine(preemption: Preemption, block_time: u64) -> (Engine, Arc<AtomicU64>) {
    let (clock, block_time) = (Arc::new(support::ManualClock::default()), Arc::new(AtomicU64::new(block_time)));
    let mut info = support::model_info(8, 16, 96, vec![]);
    info.memory.swap_blocks = 64;
    let options = EngineOptions { preemption, swap_bytes: 1, prefix_cache: false, max_batch_tokens: 512, ..EngineOptions::default() };
    let executor = TimedExecutor { logits: Vec::new(), clock: clock.clone(), block_time: block_time.clone() };
    (Engine::with_clock(&options, info, None, Box::new(executor), clock).unwrap(), block_time)
}

/// Runs two requests that together exceed the pool. Calls `after_step` with the statistics before
/// and after each step.
fn serve_two(engine: &Engine, mut after_step: impl FnMut(&Stats, &Stats)) {
    for _ in 0..2 {
        engine
            .add_request(Request::new(Prompt::Tokens(vec![1; 8]), SamplingParams { max_tokens: Some(80), ..SamplingParams::greedy() }))
            .unwrap();
    }
    loop {
        let before = engine.stats();
        let unfinished = engine.step().unwrap().unfinished;
        after_step(&before, &engine.stats());
        engine.queue().poll(Some(Duration::ZERO)).unwrap();
        if unfinished == 0 {
            break;
        }
    }
}

/// A step swaps for at most 2.5 ms in each direction, by the measured times.
#[test]
fn a_step_swaps_fewer_blocks_if_memory_is_slow() {
    let (engine, block_time) = timed_engine(Preemption::Swap, 1);
    // Returns the largest number of blocks that a step has swapped in each direction.
    let largest = || {
        let mut largest = (0, 0);
        serve_two(&engine, |before, after| {
            let moved = (after.blocks_swapped_out - before.blocks_swapped_out, after.blocks_swapped_in - before.blocks_swapped_in);
            largest = (largest.0.max(moved.0), largest.1.max(moved.1));
        });
        largest
    };
    let fast = largest();
    assert!(fast.0 > 4 && fast.1 > 4, "{fast:?}");
    block_time.store(1000, Ordering::Relaxed);
    for _ in 0..50 {
        largest();
    }
    assert_eq!(largest(), (2, 2));
}

#[test]
fn auto_preemption_eventually_retries_a_slow_host_tier() {
    let (engine, block_time) = timed_engine(Preemption::Auto, 1000);
    // Returns the number of preemptions and of those that swapped.
    let serve = || {
        let before = engine.stats();
        serve_two(&engine, |_, _| {});
        let after = engine.stats();
        (after.preemptions - before.preemptions, after.preemptions_swapped - before.preemptions_swapped)
    };
    let (preempted, swapped) = serve();
    assert!(preempted > 0 && swapped == preempted, "an untried host tier is tried, and it is fast: {swapped} of {preempted} swapped");
    block_time.store(100_000, Ordering::Relaxed);
    serve();
    assert!((0..20).all(|_| serve().1 == 0), "swapping a block takes a hundred times as long as computing a token");
    block_time.store(1000, Ordering::Relaxed);
    let again = (0..1000).position(|_| serve().1 > 0).expect("the host tier is tried again");
    assert!(again > 20, "the retry is not immediate: {again}");
    assert!((0..20).all(|_| serve().1 > 0), "the host tier is fast again");
}
