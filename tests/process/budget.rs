//! Memory budgets that change while engines run: no request ends, the tokens stay the same, and the
//! system gets the memory back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::alone;
use crate::support::progress::Progress;
use crate::support::{self, Random, TempDir, configs, write_random_model};
use pagedllm::engine::{Engine, Executor, InFlightStep, Output, Prompt, Request, Resume, StepOutput};
use pagedllm::error::Code;
use pagedllm::memory::budget::MemoryBudget;
use pagedllm::types::RequestId;
use pagedllm::types::batch::{Batch, BlockCopy};
use pagedllm::types::options::{BeamParams, EngineOptions, KvDtype, SamplingParams};
use pagedllm::types::outputs::FinishReason;

fn model(positions: usize) -> TempDir {
    let dir = TempDir::new();
    let (_, config) = configs(positions).pop().unwrap();
    write_random_model(&dir.0, &config, false, 5);
    dir
}

fn options(dir: &TempDir) -> EngineOptions {
    EngineOptions {
        model_dir: dir.0.clone(),
        skip_tokenizer: true,
        threads: Some(1),
        block_size: 8,
        max_model_len: Some(128),
        max_batch_tokens: 48,
        max_seqs: 12,
        kv_dtype: Some(KvDtype::F32),
        ..EngineOptions::default()
    }
}

fn block_bytes(dir: &TempDir) -> u64 {
    Engine::plan(&EngineOptions { kv_bytes: Some(1 << 20), ..options(dir) }).unwrap().block_bytes
}

fn request(i: usize) -> Request {
    let prompt = (0..[3, 40, 9, 17, 64, 1, 25, 33][i % 8]).map(|k| ((k * 37 + i * 11) % 120) as u32).collect();
    let beam = (i % 8 == 5).then(|| BeamParams { width: 3, ..Default::default() });
    let sampling = SamplingParams {
        temperature: if i.is_multiple_of(2) || beam.is_some() { 0.0 } else { 0.9 },
        seed: beam.is_none().then_some(i as u64),
        max_tokens: Some(12 + i % 30),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let n = if i % 8 == 3 { 4 } else { 1 };
    Request { n, beam, keep: i % 8 == 2, ..Request::new(Prompt::Tokens(prompt), sampling) }
}

type Answers = HashMap<(RequestId, u32), (Vec<u32>, FinishReason)>;

/// Runs 24 requests, and a second turn of those that are kept. Calls `between` after each step.
fn serve(engine: &Engine, mut between: impl FnMut(&Engine)) -> Answers {
    let mut answers: HashMap<(RequestId, u32), (Vec<u32>, Option<FinishReason>)> = HashMap::new();
    let mut drain = |engine: &Engine| {
        for _ in 0..100_000 {
            let report = engine.step().unwrap();
            for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
                let (tokens, finish) = answers.entry((output.request, output.index)).or_default();
                tokens.extend(&output.tokens);
                *finish = output.finish.or(*finish);
            }
            if report.unfinished == 0 {
                return;
            }
            between(engine);
        }
        panic!("the requests do not end");
    };
    let ids: Vec<RequestId> = (0..24).map(|i| engine.add_request(request(i)).unwrap()).collect();
    drain(engine);
    for id in ids.iter().enumerate().filter(|(i, _)| i % 8 == 2).map(|(_, id)| id.sequence(0)) {
        engine.append(id, vec![7; 20]).unwrap();
        let sampling = SamplingParams { max_tokens: Some(9), ignore_eos: true, ..SamplingParams::greedy() };
        engine.resume(id, Resume::new(sampling)).unwrap();
    }
    drain(engine);
    answers.into_iter().map(|(name, (tokens, finish))| (name, (tokens, finish.unwrap()))).collect()
}

#[test]
fn a_changing_budget_ends_no_request_and_changes_no_token() {
    let _alone = alone();
    let dir = model(128);
    let block = block_bytes(&dir);
    let max_bytes = 80 * block;
    let engine = || Engine::create(&EngineOptions { kv_bytes: Some(max_bytes), ..options(&dir) }).unwrap();
    let expected = serve(&engine(), |_| {});
    assert!(expected.values().all(|(_, finish)| *finish == FinishReason::Length));
    let mut preemptions = 0;
    for seed in 0..6 {
        let mut random = Random(seed);
        let engine = engine();
        let answers = serve(&engine, |engine| {
            if random.below(4) > 0 {
                return;
            }
            let bytes = random.below(81) as u64 * block;
            let min_bytes = engine.budget().info().min_bytes;
            match engine.budget().resize(bytes) {
                Ok(()) => {
                    assert!(bytes >= min_bytes);
                    let (stats, info) = (engine.stats(), engine.budget().info());
                    assert_eq!(
                        (stats.blocks_total * block, info.held_bytes),
                        (bytes, bytes),
                        "no step runs, so the resize is applied immediately"
                    );
                    assert!(stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks_total);
                }
                Err(error) => {
                    assert!(error.code() == Code::Capacity && error.message().contains(&format!("need {min_bytes} bytes")), "{error}");
                    engine.budget().resize(min_bytes).unwrap();
                }
            }
        });
        assert_eq!(answers, expected, "seed {seed}");
        preemptions += engine.stats().preemptions;
    }
    assert!(preemptions > 0, "no budget caused a preemption");
}

/// Returns the resident bytes of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn memory_above_the_budget_is_returned_to_the_system() {
    let _alone = alone();
    let dir = model(2048);
    let block = block_bytes(&dir);
    let options = EngineOptions { kv_bytes: Some(2048 * block), max_model_len: Some(2048), max_batch_tokens: 512, ..options(&dir) };
    let engine = Engine::create(&options).unwrap();
    let greedy = |max_tokens| SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
    let fill = |salt: u32| {
        let prompt = (0..2000u32).map(|i| (i * 7 + salt * 31) % 120).collect();
        engine.add_request(Request { keep: true, ..Request::new(Prompt::Tokens(prompt), greedy(2)) }).unwrap();
    };
    let run = || while engine.step().unwrap().unfinished > 0 {};
    (0..8).for_each(fill);
    run();
    let full = resident();
    let stats = engine.stats();
    let held = (stats.blocks_used + stats.blocks_cached) * block;
    assert!(held > 2000 * block, "the pool is full: {stats:?}");
    engine.budget().resize(300 * block).unwrap();
    let freed = full.saturating_sub(resident());
    let expected = held - 300 * block;
    // Partial pages at the ends of two arrays in each of two layers stay resident, and other
    // allocations change, too.
    assert!(freed > expected - (1 << 20), "{freed} of {expected} bytes were returned");
    // A larger budget is available immediately.
    engine.budget().resize(2048 * block).unwrap();
    assert_eq!(engine.stats().blocks_total, 2048);
    fill(9);
    run();
    let outputs: Vec<Output> = engine.queue().poll(Some(Duration::ZERO)).unwrap().into();
    assert_eq!(outputs.iter().filter(|output| output.finish == Some(FinishReason::Length)).count(), 9);
}

#[test]
fn engines_share_a_budget_and_use_the_memory_that_others_leave() {
    let _alone = alone();
    let dir = model(128);
    let block = block_bytes(&dir);
    let budget = MemoryBudget::new(100 * block, 200 * block).unwrap();
    let options = EngineOptions { budget: Some(budget.clone()), ..options(&dir) };
    let plan = Engine::plan(&options).unwrap();
    assert_eq!((plan.blocks, plan.max_blocks, plan.kv_bytes), (100, 200, 100 * block));
    let alone = serve(&Engine::create(&EngineOptions { budget: None, kv_bytes: Some(100 * block), ..options.clone() }).unwrap(), |_| {});
    let first = Engine::create(&options).unwrap();
    assert_eq!(serve(&first, |_| {}), alone);
    let cached = first.stats().blocks_cached + first.stats().blocks_used;
    assert!(cached > 50, "the first engine keeps its cached blocks: {cached}");
    let second = Engine::create(&options).unwrap();
    // The first engine is idle, and still releases blocks.
    assert_eq!(serve(&second, |_| assert!(budget.info().held_bytes <= 100 * block)), alone);
    assert!(
        first.stats().blocks_total < 60 && second.stats().blocks_total > 40,
        "{} and {}",
        first.stats().blocks_total,
        second.stats().blocks_total
    );
    // Both engines run on their own threads while the budget changes.
    first.start().unwrap();
    second.start().unwrap();
    let answers = |engine: &Engine| -> Vec<Vec<u32>> {
        let ids: Vec<RequestId> = (0..24).map(|i| add_when_capacity_allows(engine, i)).collect();
        let (mut tokens, mut open) = (vec![Vec::new(); 24], (0..24).map(|i| request(i).n as usize).sum::<usize>());
        let (mut progress, mut outputs) = (Progress::new(), 0);
        while open > 0 {
            progress.check(outputs, format_args!("{open} are still open"));
            for output in engine.queue().poll(Some(Duration::from_millis(100))).unwrap() {
                open -= output.finish.is_some() as usize;
                outputs += 1;
                let place = ids.iter().position(|&id| id == output.request).unwrap();
                if output.index == 0 {
                    tokens[place].extend(&output.tokens);
                }
            }
        }
        tokens
    };
    let expected: Vec<Vec<u32>> = (0..24).map(|i| tokens_of(&alone, i)).collect();
    std::thread::scope(|scope| {
        let both = [&first, &second].map(|engine| scope.spawn(|| answers(engine)));
        for bytes in [60, 100, 40, 200, 50, 100].map(|blocks| blocks * block) {
            // A resize below the reservations of running beams is refused.
            let _ = budget.resize(bytes);
            std::thread::sleep(Duration::from_millis(30));
        }
        for answers in both {
            assert_eq!(answers.join().unwrap(), expected);
        }
    });
    let mut progress = Progress::new();
    while budget.info().held_bytes > budget.info().bytes {
        progress.check(budget.info().held_bytes, format_args!("an engine holds more than the budget: {budget:?}"));
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    assert_eq!(budget.info().engines, 1);
    budget.resize(200 * block).unwrap();
    while second.stats().blocks_total < 200 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Adds request `i`. Beams need more blocks than one sequence, and are refused while the other
/// engine holds these blocks.
fn add_when_capacity_allows(engine: &Engine, i: usize) -> RequestId {
    let mut progress = Progress::new();
    loop {
        match engine.add_request(request(i)) {
            Err(error) if error.code() == Code::Capacity => {
                progress.check(engine.stats().steps, &error);
                assert!(error.message().contains("retry later"), "{error}");
                std::thread::sleep(Duration::from_millis(1));
            }
            added => return added.unwrap(),
        }
    }
}

/// Returns the tokens of request `i` in `serve` without its second turn.
fn tokens_of(answers: &Answers, i: usize) -> Vec<u32> {
    let mut ids: Vec<RequestId> = answers.keys().map(|(request, _)| *request).collect();
    ids.sort_unstable();
    ids.dedup();
    let mut tokens = answers[&(ids[i], 0)].0.clone();
    tokens.truncate(12 + i % 30);
    tokens
}

#[test]
fn invalid_budgets_are_refused_with_the_required_bytes() {
    let _alone = alone();
    let dir = model(128);
    let block = block_bytes(&dir);
    let assert_refused = |options: EngineOptions, code: Code, message: &str| {
        let error = Engine::create(&options).err().unwrap();
        assert!(error.code() == code && error.message().contains(message), "{error}, expected {message}");
    };
    let budget = MemoryBudget::new(40 * block, 40 * block).unwrap();
    let shared = || EngineOptions { budget: Some(budget.clone()), ..options(&dir) };
    assert_refused(EngineOptions { kv_bytes: Some(1), ..shared() }, Code::InvalidArgument, "kv_bytes and budget are both set");
    assert_refused(EngineOptions { max_model_len: Some(129), ..shared() }, Code::InvalidArgument, "max_model_len is 129");
    let one_block = MemoryBudget::new(block, block).unwrap();
    assert_refused(EngineOptions { budget: Some(one_block), ..options(&dir) }, Code::Capacity, "tokens of 128");
    let (first, _second) = (Engine::create(&shared()).unwrap(), Engine::create(&shared()).unwrap());
    // Each engine needs 16 blocks, so the budget of 40 blocks has too few for a third engine.
    assert_refused(shared(), Code::Capacity, "tokens of 128");
    let error = budget.resize(31 * block).unwrap_err();
    assert!(error.message().contains(&format!("need {} bytes for their longest sequences", 32 * block)), "{error}");
    // Four samples need 64 blocks, more than the budget. Two samples need 30 blocks, some of which
    // the other engine holds.
    let samples = |n, max_tokens| {
        let sampling = SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() };
        Request { n, ..Request::new(Prompt::Tokens(vec![1; 8]), sampling) }
    };
    let error = first.add_request(samples(4, 120)).unwrap_err();
    assert!(error.code() == Code::Capacity && error.message().contains("the pool has 40"), "{error}");
    let error = first.add_request(samples(2, 112)).unwrap_err();
    assert!(error.code() == Code::Capacity && error.message().contains("hold"), "{error}");
    first.add_request(samples(2, 88)).unwrap();
    assert_eq!(budget.info().min_bytes, 39 * block, "the blocks are reserved until the request ends");
    while first.step().unwrap().unfinished > 0 {}
    assert_eq!(budget.info().min_bytes, 32 * block);
}

/// An executor that shrinks the budget of its engine during each step.
struct ShrinkingExecutor {
    budget: Arc<OnceLock<Arc<MemoryBudget>>>,
    logits: Vec<f32>,
}

impl Executor for ShrinkingExecutor {
    fn submit(&mut self, batch: &Batch) -> pagedllm::error::Result<InFlightStep> {
        self.budget.get().unwrap().resize(10).unwrap();
        self.logits.resize(batch.logit_rows.len() * 8, 0.0);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, _: InFlightStep) -> pagedllm::error::Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }
}

#[test]
fn a_resize_during_the_last_step_is_applied_after_it() {
    let _alone = alone();
    let budget = Arc::new(OnceLock::new());
    let executor = ShrinkingExecutor { budget: budget.clone(), logits: Vec::new() };
    // Each block has one byte.
    let engine =
        Engine::with_executor(&EngineOptions::default(), support::model_info(8, 64, 64, vec![]), None, Box::new(executor)).unwrap();
    budget.get_or_init(|| engine.budget().clone());
    let sampling = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
    engine.add_request(Request::new(Prompt::Tokens(vec![1; 40]), sampling)).unwrap();
    assert_eq!(engine.step().unwrap().unfinished, 0);
    assert_eq!((engine.budget().info().held_bytes, engine.stats().blocks_total), (10, 10));
}

/// An executor that counts how often its pool shrinks. Each shrink takes `shrink_time`.
#[derive(Default)]
struct CountingExecutor {
    logits: Vec<f32>,
    shrinks: Arc<AtomicUsize>,
    shrink_time: Duration,
}

impl Executor for CountingExecutor {
    fn submit(&mut self, batch: &Batch) -> pagedllm::error::Result<InFlightStep> {
        self.logits.resize(batch.logit_rows.len() * 8, 0.0);
        Ok(InFlightStep::new(batch.logit_rows.len()))
    }

    fn wait(&mut self, _: InFlightStep) -> pagedllm::error::Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&self.logits))
    }

    fn shrink(&mut self, _: &[BlockCopy], _: usize) -> pagedllm::error::Result<()> {
        std::thread::sleep(self.shrink_time);
        self.shrinks.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Creates an engine on a budget of 64 blocks of one byte. Returns the number of its shrinks, too.
fn engine_on(budget: &Arc<MemoryBudget>, shrink_time: Duration) -> (Engine, Arc<AtomicUsize>) {
    let options = EngineOptions { budget: Some(budget.clone()), max_batch_tokens: 16, max_seqs: 4, ..EngineOptions::default() };
    let executor = CountingExecutor { shrink_time, ..CountingExecutor::default() };
    let shrinks = executor.shrinks.clone();
    (Engine::with_executor(&options, support::model_info(8, 64, 64, vec![]), None, Box::new(executor)).unwrap(), shrinks)
}

fn add(engine: &Engine, first: u32, prompt: u32, max_tokens: usize) {
    let prompt = (0..prompt).map(|i| (first + i * i) % 8).collect();
    let sampling = SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() };
    engine.add_request(Request::new(Prompt::Tokens(prompt), sampling)).unwrap();
}

fn finish_all(engine: &Engine) {
    while engine.step().unwrap().unfinished > 0 {}
}

#[test]
fn a_step_shrinks_only_engines_that_are_not_being_stepped() {
    let _alone = alone();
    let budget = MemoryBudget::new(64, 64).unwrap();
    let (lender, shrinks) = engine_on(&budget, Duration::ZERO);
    // The cached blocks fill the budget.
    let fill = || {
        (0..8).for_each(|first| add(&lender, first, 60, 1));
        finish_all(&lender);
    };
    fill();
    let (borrower, _) = engine_on(&budget, Duration::ZERO);
    add(&lender, 3, 9, 50);
    lender.step().unwrap();
    (0..2).for_each(|first| add(&borrower, first, 50, 10));
    let (before, blocks) = (shrinks.load(Ordering::SeqCst), lender.stats().blocks_total);
    for _ in 0..5 {
        borrower.step().unwrap();
    }
    assert_eq!(
        (shrinks.load(Ordering::SeqCst), lender.stats().blocks_total),
        (before, blocks),
        "the step of the borrower does not shrink the lender, which is being stepped"
    );
    lender.step().unwrap();
    assert!(shrinks.load(Ordering::SeqCst) > before && lender.stats().blocks_total < blocks, "the lender shrinks at its own next step");
    [&borrower, &lender].into_iter().for_each(finish_all);
    // The lender is not stepped any more.
    fill();
    let (before, blocks) = (shrinks.load(Ordering::SeqCst), lender.stats().blocks_total);
    (0..4).for_each(|first| add(&borrower, first, 50, 10));
    finish_all(&borrower);
    assert!(shrinks.load(Ordering::SeqCst) > before && lender.stats().blocks_total < blocks, "the borrower shrinks the lender");
    assert_eq!(borrower.stats().preemptions, 0);
}

/// Creates two engines of the model in `dir` on a budget of 80 blocks. Each needs at least 8 blocks
/// for its longest sequence.
fn pair(dir: &TempDir, max_seqs: usize) -> (Arc<MemoryBudget>, Engine, Engine) {
    let bytes = 80 * block_bytes(dir);
    let budget = MemoryBudget::new(bytes, bytes).unwrap();
    let options = EngineOptions {
        budget: Some(budget.clone()),
        max_model_len: Some(64),
        max_seqs,
        max_batch_tokens: 400,
        prefix_cache: false,
        ..options(dir)
    };
    (budget, Engine::create(&options).unwrap(), Engine::create(&options).unwrap())
}

fn add_many(engine: &Engine, count: u32, prompt: u32, max_tokens: usize) {
    for i in 0..count {
        let prompt = (0..prompt).map(|k| (k * 37 + i * 11) % 120).collect();
        let sampling = SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
        engine.add_request(Request::new(Prompt::Tokens(prompt), sampling)).unwrap();
    }
}

#[test]
fn an_idle_engine_yields_all_blocks_above_its_minimum() {
    let _alone = alone();
    let dir = model(512);
    let (_, busy, idle) = pair(&dir, 30);
    add_many(&idle, 1, 10, 3);
    finish_all(&idle);
    add_many(&busy, 30, 30, 30);
    for _ in 0..10 {
        busy.step().unwrap();
    }
    assert_eq!((idle.stats().blocks_total, busy.stats().blocks_total), (8, 72));
}

#[test]
fn blocks_freed_in_the_last_step_are_available_to_other_engines() {
    let _alone = alone();
    let dir = model(512);
    let (_, first, second) = pair(&dir, 9);
    // All these requests end in the same step.
    add_many(&first, 9, 40, 24);
    (0..3).for_each(|_| assert!(first.step().unwrap().unfinished > 0));
    add_many(&second, 9, 30, 34);
    for _ in 0..3 {
        second.step().unwrap();
        first.step().unwrap();
    }
    assert!(second.stats().blocks_total < 20, "the first engine holds the rest: {:?}", second.stats());
    finish_all(&first);
    assert_eq!(first.stats().blocks_total, 8);
    second.step().unwrap();
    assert!(second.stats().blocks_total > 50, "{:?}", second.stats());
    finish_all(&second);
}

/// An executor with a defect.
struct PanickingExecutor;

impl Executor for PanickingExecutor {
    fn submit(&mut self, _: &Batch) -> pagedllm::error::Result<InFlightStep> {
        panic!("a defect");
    }

    fn wait(&mut self, _: InFlightStep) -> pagedllm::error::Result<StepOutput<'_>> {
        Ok(StepOutput::from_logits(&[]))
    }
}

#[test]
fn a_failed_engine_releases_its_share_of_the_budget() {
    let _alone = alone();
    let budget = MemoryBudget::new(100, 100).unwrap();
    let options = EngineOptions { budget: Some(budget.clone()), max_batch_tokens: 16, max_seqs: 4, ..EngineOptions::default() };
    for starts in [false, true] {
        let info = support::model_info(8, 64, 30, vec![]);
        let failing = Engine::with_executor(&options, info, None, Box::new(PanickingExecutor)).unwrap();
        let (other, _) = engine_on(&budget, Duration::ZERO);
        add(&failing, 1, 20, 4);
        match starts {
            true => failing.start().unwrap(),
            false => assert_eq!(failing.step().unwrap_err().code(), Code::Internal),
        }
        let mut progress = Progress::new();
        while budget.info().min_bytes > 8 {
            progress.check(budget.info().min_bytes, format_args!("the failed engine keeps its share: {budget:?}"));
            std::thread::sleep(Duration::from_millis(1));
        }
        (0..4).for_each(|first| add(&other, first, 50, 10));
        other.step().unwrap();
        assert_eq!(other.stats().blocks_total, budget.info().held_bytes);
        finish_all(&other);
    }
}

#[test]
fn budget_resizes_never_make_a_step_return_busy() {
    let _alone = alone();
    let budget = MemoryBudget::new(64, 64).unwrap();
    let (engine, shrinks) = engine_on(&budget, Duration::from_millis(1));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                [20, 64].into_iter().for_each(|bytes| budget.resize(bytes).unwrap());
            }
        });
        // The system decides how often each thread runs.
        for first in (0..60).chain(60..10_000).take_while(|&i| i < 60 || shrinks.load(Ordering::SeqCst) <= 20) {
            add(&engine, first, 9, 20);
            while engine.step().expect("no other thread steps the engine").unfinished > 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        done.store(true, Ordering::SeqCst);
    });
    assert!(shrinks.load(Ordering::SeqCst) > 20, "{shrinks:?}");
}
