//! Swapping changes no bit: whoever had to wait in the host tier, in memory or in a file, goes on as if nothing had been.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{self, Random, TempDir, configs, write_random_model};
use pagedllm::batch::BlockMove;
use pagedllm::engine::{Engine, Fork, InFlightStep, Output, Prompt, Request, Resume, Runner, Stats};
use pagedllm::error::Code;
use pagedllm::options::{BeamParams, EngineOptions, KvDtype, Preemption, SamplingParams};
use pagedllm::scheduler::StepPlan;

const BLOCK: usize = 8;
const ROOMY: u64 = 1000;
const CRAMPED: u64 = 24;

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
        EngineOptions { preemption, swap_bytes: host_blocks * self.block_bytes, swap_dir, ..self.options(CRAMPED) }
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

/// By user data and index: tokens, and the bits of what was said of them.
type Answers = BTreeMap<(u64, u32), Vec<(u32, u32)>>;

fn note(answers: &mut Answers, outputs: impl IntoIterator<Item = Output>) {
    for output in outputs {
        assert!(output.error.is_none(), "{:?}", output.error);
        let bits = output.logprobs.tokens.iter().map(|p| p.to_bits()).chain(std::iter::repeat(output.score.to_bits() as u32));
        answers.entry((output.user_data, output.index)).or_default().extend(output.tokens.iter().copied().zip(bits));
    }
}

fn drain(engine: &Engine, answers: &mut Answers) {
    loop {
        let report = engine.step().unwrap();
        note(answers, engine.queue().poll(Some(Duration::ZERO)).unwrap());
        if report.unfinished == 0 {
            return;
        }
    }
}

/// Plain requests, samples, beams, forks of what runs, and conversations that rest while others need their blocks.
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
        engine.add_request(request).unwrap()
    };
    // Two that stay, of which one is forked while it is idle.
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
        note(&mut answers, engine.queue().poll(Some(Duration::ZERO)).unwrap());
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
    let (expected, stats) = everything(&model.options(ROOMY));
    assert_eq!(stats.preemptions, 0);
    let file = TempDir::new();
    for (what, host_blocks, dir) in [("memory", 200, None), ("a file", 200, Some(file.0.clone())), ("little memory", 12, None)] {
        let (answers, stats) = everything(&model.swapping(Preemption::Swap, host_blocks, dir));
        assert_eq!(answers, expected, "swapped to {what}");
        assert!(stats.preemptions_swapped > 0 && stats.blocks_swapped_in > 0, "{what}: {stats:?}");
        let all = stats.preemptions_swapped == stats.preemptions;
        assert_eq!((all, stats.swap_blocks_total, stats.swap_failures), (host_blocks == 200, host_blocks, 0), "{what}: {stats:?}");
    }
    assert_eq!(std::fs::read_dir(&file.0).unwrap().count(), 0, "nothing is left behind");
    let (answers, stats) = everything(&model.swapping(Preemption::Auto, 200, None));
    assert_eq!(answers, expected);
    assert!(stats.blocks_swapped_out > 0, "the first time it tries: {stats:?}");
    let (answers, stats) = everything(&EngineOptions { prefix_cache: true, ..model.swapping(Preemption::Swap, 200, None) });
    assert_eq!(answers, expected, "with prefixes");
    assert!(stats.blocks_swapped_out > 0);
}

#[test]
fn swapping_changes_no_bit_of_f32() {
    swapping_changes_nothing(KvDtype::F32);
}

#[test]
fn swapping_changes_no_bit_of_bf16() {
    swapping_changes_nothing(KvDtype::Bf16);
}

#[test]
fn swapping_changes_no_bit_of_int8() {
    swapping_changes_nothing(KvDtype::Int8);
}

#[test]
fn what_lies_in_the_host_tier_can_be_exported() {
    let model = Model::new(KvDtype::F32);
    let engine = Engine::create(&model.swapping(Preemption::Swap, 200, None)).unwrap();
    let state = |seq: u64| {
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
    let seq = engine.add_request(request).unwrap();
    drain(&engine, &mut Answers::new());
    let expected = state(seq);
    engine.add_request(Request::new(Prompt::Tokens(prompt(140, 2)), sampled(2, 20))).unwrap();
    drain(&engine, &mut Answers::new());
    assert_eq!(engine.stats().swapped, 1);
    assert!(state(seq) == expected, "the same bytes");
    assert_eq!(engine.stats().swapped, 0, "it came back for that");
}

#[test]
fn a_host_tier_that_cannot_be_is_refused_with_the_numbers() {
    let model = Model::new(KvDtype::F32);
    let refused = |options: EngineOptions, code: Code, says: &str| {
        let error = Engine::create(&options).map(|_| ()).unwrap_err();
        assert!(error.code() == code && error.message().contains(says), "{error}, not {says}");
    };
    let swap =
        |swap_bytes: u64, dir: Option<&str>| EngineOptions { swap_bytes, ..model.swapping(Preemption::Swap, 1, dir.map(Into::into)) };
    refused(swap(0, None), Code::InvalidArgument, "swap_bytes is 0");
    refused(EngineOptions { preemption: Preemption::Auto, ..swap(0, None) }, Code::InvalidArgument, "swap_bytes is 0");
    refused(EngineOptions { preemption: Preemption::Recompute, ..swap(1 << 20, None) }, Code::InvalidArgument, "nothing would be swapped");
    refused(swap(model.block_bytes - 1, None), Code::Capacity, &format!("a block has {}", model.block_bytes));
    refused(swap(u64::MAX, None), Code::Capacity, "it must be at most");
    for dir in ["/dev/null", "/nonexistent", "/proc"] {
        refused(swap(1 << 20, Some(dir)), Code::Io, "can be made there");
    }
    let plan = Engine::plan(&swap(10 * model.block_bytes + 1, None)).unwrap();
    assert_eq!((plan.swap_blocks, plan.swap_bytes), (10, 10 * model.block_bytes));
}

/// A row takes a millisecond, and a block that moves as long as the test says.
struct Moving {
    logits: Vec<f32>,
    clock: Arc<support::Hand>,
    block: Arc<AtomicU64>, // in microseconds
}

impl Moving {
    fn turn(&self, moves: usize) -> pagedllm::error::Result<()> {
        self.clock.turn(Duration::from_micros(self.block.load(Ordering::Relaxed) * moves as u64));
        Ok(())
    }
}

impl Runner for Moving {
    fn submit(&mut self, plan: &StepPlan) -> pagedllm::error::Result<InFlightStep> {
        self.clock.turn(Duration::from_millis(plan.batch.rows() as u64));
        self.logits.resize(plan.batch.logit_rows.len() * 8, 0.0);
        Ok(InFlightStep { logits: plan.batch.logit_rows.len() })
    }

    fn wait(&mut self, _: InFlightStep) -> pagedllm::error::Result<&[f32]> {
        Ok(&self.logits)
    }

    fn swap_out(&mut self, moves: &[BlockMove]) -> pagedllm::error::Result<()> {
        self.turn(moves.len())
    }

    fn swap_in(&mut self, moves: &[BlockMove]) -> pagedllm::error::Result<()> {
        self.turn(moves.len())
    }
}

#[test]
fn a_tier_that_was_slow_once_is_tried_again_some_day() {
    let (clock, block) = (Arc::new(support::Hand::default()), Arc::new(AtomicU64::new(1000)));
    let mut info = support::model_info(8, 16, 96, vec![]);
    info.memory.swap_blocks = 64;
    let options = EngineOptions {
        preemption: Preemption::Auto,
        swap_bytes: 1,
        prefix_cache: false,
        max_batch_tokens: 512,
        ..EngineOptions::default()
    };
    let runner = Moving { logits: Vec::new(), clock: clock.clone(), block: block.clone() };
    let engine = Engine::with_clock(&options, info, None, Box::new(runner), clock).unwrap();
    // Two that outgrow the pool: how often one gave way, and how often by moving.
    let serve = || {
        let before = engine.stats();
        for _ in 0..2 {
            engine
                .add_request(Request::new(Prompt::Tokens(vec![1; 8]), SamplingParams { max_tokens: Some(80), ..SamplingParams::greedy() }))
                .unwrap();
        }
        while engine.step().unwrap().unfinished > 0 {
            engine.queue().poll(Some(Duration::ZERO)).unwrap();
        }
        let after = engine.stats();
        (after.preemptions - before.preemptions, after.preemptions_swapped - before.preemptions_swapped)
    };
    let (preempted, swapped) = serve();
    assert!(preempted > 0 && swapped == preempted, "what was never tried is, and it is cheap: {swapped} of {preempted}");
    block.store(100_000, Ordering::Relaxed);
    serve();
    assert!((0..20).all(|_| serve().1 == 0), "a block costs a hundred times as much as a row");
    block.store(1000, Ordering::Relaxed);
    let again = (0..1000).position(|_| serve().1 > 0).expect("it is tried again");
    assert!(again > 20, "not at once: {again}");
    assert!((0..20).all(|_| serve().1 > 0), "and is cheap again");
}
