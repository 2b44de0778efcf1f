//! Engines of several workers: rank 0 is the engine, the others are threads. They give the results
//! of one worker, in any batch.

mod failures;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::support::{TempDir, configs, write_random_model};
use pagedllm::communicator::CommunicatorHandle;
use pagedllm::communicator::local::Local;
use pagedllm::engine::{Engine, Fork, Prompt, Request, Resume};
use pagedllm::error::Result;
use pagedllm::memory::budget::MemoryBudget;
use pagedllm::types::SeqId;
use pagedllm::types::options::{EngineOptions, Isa, KvDtype, Preemption, SamplingParams, WorkerOptions};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::parallel::Division;

const BLOCK: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(600);
const ALONE: Division = Division { tensor: 1, pipeline: 1 };
const DIVISIONS: [Division; 6] = [
    Division { tensor: 2, pipeline: 1 },
    Division { tensor: 4, pipeline: 1 },
    Division { tensor: 1, pipeline: 2 },
    Division { tensor: 1, pipeline: 3 },
    Division { tensor: 1, pipeline: 4 },
    Division { tensor: 2, pipeline: 2 },
];

/// A small model that two or four workers can divide.
struct Model(TempDir);

impl Model {
    /// Creates a LLaMA.
    fn new() -> Model {
        Model::with_seed(5)
    }

    /// Creates a LLaMA with other weights.
    fn with_seed(seed: u64) -> Model {
        Model::of_family("llama", 8, 52, seed)
    }

    /// Creates a Gemma 2, whose layers alternate between two groups of blocks.
    fn with_windows() -> Model {
        Model::of_family("gemma 2", 4, 52, 5)
    }

    fn of_family(family: &str, heads: u64, width: u64, seed: u64) -> Model {
        let dir = TempDir::new();
        let (_, mut config) = configs(512).into_iter().find(|(name, _)| name.starts_with(family)).unwrap();
        let sizes = config.as_object_mut().unwrap();
        sizes.insert("num_attention_heads".into(), heads.into());
        sizes.insert("intermediate_size".into(), width.into());
        sizes.insert("num_hidden_layers".into(), 4.into());
        write_random_model(&dir.0, &config, false, seed);
        Model(dir)
    }

    fn options(&self, blocks: usize) -> EngineOptions {
        let options = EngineOptions {
            model_dir: self.0.0.clone(),
            kv_dtype: Some(KvDtype::F32),
            isa: Some(Isa::Portable),
            block_size: BLOCK,
            max_model_len: Some(160),
            max_batch_tokens: 64,
            max_seqs: 16,
            threads: Some(1),
            skip_tokenizer: true,
            ..Default::default()
        };
        let block_bytes = Engine::plan(&options).unwrap().block_bytes;
        EngineOptions { kv_bytes: Some(blocks as u64 * block_bytes), ..options }
    }
}

/// An engine and its workers.
struct Team {
    engine: Engine,
    workers: Vec<JoinHandle<Result<()>>>,
}

fn with(options: &EngineOptions, division: Division, world: Local) -> EngineOptions {
    let communicator = Some(CommunicatorHandle::new(Arc::new(world)));
    EngineOptions { workers: WorkerOptions { division, communicator, timeout: TIMEOUT }, ..options.clone() }
}

impl Team {
    fn new(options: &EngineOptions, division: Division) -> Team {
        Team::with_first(options, options, division)
    }

    /// Starts rank 0 with options of its own.
    fn with_first(first: &EngineOptions, options: &EngineOptions, division: Division) -> Team {
        if division == ALONE {
            return Team { engine: Engine::create(first).unwrap(), workers: Vec::new() };
        }
        let mut ranks = Local::group(division.workers()).into_iter();
        let first = with(first, division, ranks.next().unwrap());
        let workers = ranks.map(|world| {
            let options = with(options, division, world);
            thread::spawn(move || Engine::run_worker(&options, &mut |_, _| true))
        });
        let workers = workers.collect();
        Team { engine: Engine::create(&first).unwrap(), workers }
    }

    /// Frees the engine, which ends the workers.
    fn end(self) {
        drop(self.engine);
        for worker in self.workers {
            worker.join().unwrap().unwrap();
        }
    }

    fn add(&self, prompt: Vec<u32>, sampling: SamplingParams, keep: bool) -> SeqId {
        self.engine.add_request(Request { keep, ..Request::new(Prompt::Tokens(prompt), sampling) }).unwrap().sequence(0)
    }

    /// Runs steps until all requests have ended. Returns the tokens and log probabilities of each
    /// sequence.
    fn drain(&self) -> BTreeMap<SeqId, Vec<(u32, f32)>> {
        let mut results: BTreeMap<SeqId, Vec<(u32, f32)>> = BTreeMap::new();
        loop {
            let unfinished = self.engine.step().unwrap().unfinished;
            self.engine.check_invariants();
            self.collect(&mut results);
            if unfinished == 0 {
                return results;
            }
        }
    }

    fn collect(&self, results: &mut BTreeMap<SeqId, Vec<(u32, f32)>>) {
        for output in self.engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            assert_ne!(output.finish, Some(FinishReason::Error), "{output:?}");
            let pairs = output.tokens.iter().copied().zip(output.logprobs.tokens.iter().copied());
            results.entry(output.sequence).or_default().extend(pairs);
        }
    }
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), logprobs: Some(0), ignore_eos: true, ..SamplingParams::greedy() }
}

fn prompt(number: usize) -> Vec<u32> {
    (0..7 + 11 * number as u32).map(|k| (k * 5 + number as u32) % 120).collect()
}

/// Generates from several prompts. `together`: in one batch.
fn generate(team: &Team, together: bool) -> Vec<Vec<(u32, f32)>> {
    let mut results = Vec::new();
    let mut sequences = Vec::new();
    for number in 0..6 {
        sequences.push(team.add(prompt(number), greedy(20), false));
        if !together {
            results.extend(team.drain().into_values());
        }
    }
    if together {
        results.extend(team.drain().into_values());
    }
    assert_eq!(results.len(), sequences.len());
    results
}

fn assert_near(ours: &[Vec<(u32, f32)>], alone: &[Vec<(u32, f32)>], what: &str) {
    for (ours, alone) in ours.iter().zip(alone) {
        assert_eq!(ours.len(), alone.len(), "{what}");
        for ((token, logprob), (expected, expected_logprob)) in ours.iter().zip(alone) {
            assert_eq!(token, expected, "{what}");
            assert!((logprob - expected_logprob).abs() < 2e-4, "{what}: {logprob}, alone {expected_logprob}");
        }
    }
}

#[test]
fn several_workers_give_the_results_of_one_whatever_the_batch() {
    for model in [Model::new(), Model::with_windows()] {
        let options = model.options(200);
        let alone = generate(&Team::new(&options, ALONE), true);
        for division in DIVISIONS {
            let team = Team::new(&options, division);
            let together = generate(&team, true);
            assert_near(&together, &alone, &format!("{division:?}"));
            assert_eq!(generate(&team, false), together, "{division:?}: the bits do not depend on the batch");
            team.end();
        }
    }
}

/// A list of CPUs makes the workers threads of the engine.
#[test]
fn a_list_of_devices_gives_the_results_of_one() {
    let model = Model::new();
    let options = model.options(200);
    let one = Team::new(&options, ALONE);
    let alone = generate(&one, true);
    one.end();
    for division in [Division { tensor: 2, pipeline: 1 }, Division { tensor: 1, pipeline: 2 }] {
        let workers = WorkerOptions { division, ..options.workers.clone() };
        let listed = EngineOptions { device: "cpu,cpu".into(), workers, ..options.clone() };
        let team = Team { engine: Engine::create(&listed).unwrap(), workers: Vec::new() };
        assert_near(&generate(&team, true), &alone, &format!("{division:?}"));
        team.end();
    }
}

#[test]
fn all_workers_free_the_blocks_that_a_budget_takes_back() {
    let model = Model::with_windows();
    let alone = generate(&Team::new(&model.options(400), ALONE), true);
    for division in DIVISIONS {
        let options = model.options(400);
        let workers = WorkerOptions { division, ..Default::default() };
        let block_bytes = Engine::plan(&EngineOptions { workers, kv_bytes: None, ..options.clone() }).unwrap().block_bytes;
        let budget = MemoryBudget::new(400 * block_bytes, 400 * block_bytes).unwrap();
        let first = EngineOptions { kv_bytes: None, budget: Some(budget.clone()), ..options.clone() };
        let team = Team::with_first(&first, &EngineOptions { kv_bytes: Some(400 * block_bytes), ..options }, division);
        for number in 0..6 {
            team.add(prompt(number), greedy(20), false);
        }
        for _ in 0..5 {
            team.engine.step().unwrap();
        }
        budget.resize(60 * block_bytes).unwrap();
        team.engine.step().unwrap();
        assert!(team.engine.stats().blocks_total <= 60, "{:?}", team.engine.stats());
        let mut results: BTreeMap<SeqId, Vec<(u32, f32)>> = BTreeMap::new();
        team.collect(&mut results);
        while team.engine.step().unwrap().unfinished > 0 {
            team.engine.check_invariants();
            team.collect(&mut results);
        }
        team.collect(&mut results);
        assert_near(&results.into_values().collect::<Vec<_>>(), &alone, &format!("{division:?}"));
        team.end();
    }
}

/// The pool is smaller than its maximum from the start: because of the budget, or of another
/// engine.
#[test]
fn all_workers_have_the_pool_that_a_budget_grants_at_the_start() {
    let model = Model::new();
    let options = model.options(400);
    let alone = generate(&Team::new(&options, ALONE), true);
    let list = EngineOptions { device: "cpu,cpu".into(), ..options.clone() };
    for (division, options) in DIVISIONS.into_iter().map(|division| (division, &options)).chain([(ALONE, &list)]) {
        let workers = WorkerOptions { division, ..Default::default() };
        let block_bytes = Engine::plan(&EngineOptions { workers, kv_bytes: None, ..options.clone() }).unwrap().block_bytes;
        let all = EngineOptions { kv_bytes: Some(400 * block_bytes), ..options.clone() };
        let with_budget = |bytes| {
            let budget = MemoryBudget::new(bytes * block_bytes, 400 * block_bytes).unwrap();
            EngineOptions { kv_bytes: None, budget: Some(budget), ..options.clone() }
        };
        let team = Team::with_first(&with_budget(60), &all, division);
        let blocks = team.engine.stats().blocks_total;
        assert!(blocks <= 60, "{division:?}: {blocks} blocks");
        assert_near(&generate(&team, true), &alone, &format!("{division:?}"));
        team.end();

        let shared = with_budget(400);
        let other = Engine::create(&EngineOptions { device: "cpu".into(), ..shared.clone() }).unwrap();
        let team = Team::with_first(&shared, &all, division);
        assert_near(&generate(&team, true), &alone, &format!("{division:?} beside another engine"));
        team.end();
        drop(other);
    }
}

#[test]
fn all_workers_swap_and_recompute_the_same_blocks() {
    let model = Model::new();
    let alone = generate(&Team::new(&model.options(200), ALONE), true);
    for division in DIVISIONS {
        for preemption in [Preemption::Recompute, Preemption::Swap] {
            let small = model.options(20);
            let swap_bytes = if preemption == Preemption::Swap { small.kv_bytes.unwrap() * 3 } else { 0 };
            let options = EngineOptions { preemption, swap_bytes, max_model_len: Some(96), prefix_cache: false, ..small };
            // Each worker has a part of a block, so that the same bytes hold more blocks.
            let blocks = |options: &EngineOptions| {
                let workers = WorkerOptions { division, ..Default::default() };
                Engine::plan(&EngineOptions { workers, ..options.clone() }).unwrap().block_bytes
            };
            let kv_bytes = Some(20 * blocks(&options));
            let team = Team::new(&EngineOptions { kv_bytes, ..options }, division);
            let together = generate(&team, true);
            let stats = team.engine.stats();
            assert!(stats.preemptions > 0, "{stats:?}");
            assert!(preemption == Preemption::Recompute || stats.blocks_swapped_out > 0, "{stats:?}");
            assert_near(&together, &alone, &format!("{division:?} {preemption:?}"));
            team.end();
        }
    }
}

#[test]
fn sequences_can_be_forked_exported_and_imported() {
    let model = Model::new();
    let options = model.options(200);
    for division in DIVISIONS {
        let team = Team::new(&options, division);
        let kept = team.add(prompt(3), greedy(9), true);
        team.drain();
        let engine = &team.engine;
        engine.export(kept, None).unwrap();
        let mut state = Vec::new();
        while state.is_empty() {
            engine.step().unwrap();
            for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
                state.extend_from_slice(&output.sequence_state);
            }
        }
        let [fork, import] = [engine.fork(kept, 1, &Fork::default()).unwrap()[0], engine.import(engine.queue(), &state).unwrap()];
        for seq in [kept, fork, import] {
            engine.append(seq, vec![5, 6, 7]).unwrap();
            engine.resume(seq, Resume::new(greedy(12))).unwrap();
        }
        let results = team.drain();
        assert_eq!(results[&kept].len(), 12);
        assert_eq!(results[&fork], results[&kept], "{division:?}");
        assert_eq!(results[&import], results[&kept], "{division:?}");
        team.end();
    }
}
