//! Stress test: hosts make random API calls on several engines that share a changing budget. The
//! engines have random policies, one of them writes a journal, and devices and host tiers fail at
//! random. Afterwards no block is in use, no memory leaks, and every request has ended.
//! PLLM_SOAK_SECONDS sets the duration (default 5), PLLM_SOAK_SEED the seed.

mod counting;
mod host;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use counting::{live_bytes, resident_bytes, share_one_heap};
use host::{Host, Tally};
use pagedllm::backend::cpu::CpuBackend;
use pagedllm::engine::journal::{Ending, JournalFile, Replay};
use pagedllm::engine::{Engine, Executor, ModelExecutor, ModelInfo};
use pagedllm::memory::budget::{BudgetInfo, MemoryBudget};
use pagedllm::model::{BatchLimits, KvCache, KvPool, ModelFiles};
use pagedllm::types::options::{AllocationPolicy, BatchingPolicy, EngineOptions, KvDtype, OrderPolicy, Policies, Preemption};
use support::faulty::{Faults, Faulty};
use support::{Random, TempDir, configs, cpu_time, model_info, write_random_model};

const BLOCK: usize = 8;
/// Number of blocks of the budget, and the maximum of each engine.
const BLOCKS: usize = 96;
const SWAP_BLOCKS: usize = 24;
const ENGINES: usize = 3;
/// Number of hosts per engine.
const HOSTS: usize = 2;
const MAX_MODEL_LEN: usize = 128;
/// Shorter runs do not check the rare events and the memory growth.
const MIN_DURATION_FOR_GROWTH: Duration = Duration::from_secs(50);
const MAX_GROWTH_PER_MINUTE: f64 = (1 << 20) as f64;
/// After this time the heap has reached its peak. In shorter runs, and on a busy machine, the peak
/// may still rise. There the growth may be four times as fast, and only the comparison of allocated
/// bytes detects leaks.
const HEAP_PEAK_TIME: Duration = Duration::from_secs(300);

fn one_of<T: Copy>(random: &mut Random, all: &[T]) -> T {
    all[random.below(all.len())]
}

/// Draws the options of an engine at random. The first engine always swaps.
fn random_options(place: usize, random: &mut Random) -> EngineOptions {
    let ageing = Duration::from_millis(20);
    let orders = [OrderPolicy::Fcfs, OrderPolicy::Priority { ageing }, OrderPolicy::ShortestPredicted { ageing }];
    let batchings = [
        BatchingPolicy::Mixed,
        BatchingPolicy::PrefillFirst { threshold: 64 },
        BatchingPolicy::DecodeFirst { budget: 16 },
        BatchingPolicy::Static,
    ];
    let allocation = if random.below(4) == 0 { AllocationPolicy::MaxTokens } else { AllocationPolicy::OnDemand };
    EngineOptions {
        max_batch_tokens: 48,
        max_seqs: 12,
        max_waiting_requests: Some(40),
        max_waiting_tokens: Some(1500),
        preemption: if place == 0 {
            Preemption::Swap
        } else {
            one_of(random, &[Preemption::Recompute, Preemption::Swap, Preemption::Auto])
        },
        policies: Policies { order: one_of(random, &orders), batching: one_of(random, &batchings), allocation },
        prefix_cache: random.below(4) > 0,
        prefill_chunk: (random.below(2) == 0).then_some(16),
        seed: random.next(),
        ..EngineOptions::default()
    }
}

/// Creates a small LLaMA with a host tier on a device whose faults the test controls.
fn device(model: &Path, blocks: usize) -> (ModelInfo, Box<dyn Executor>, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let files = ModelFiles::open(model).unwrap();
    let backend = Faulty { cpu: CpuBackend::new(1, None).unwrap(), faults: faults.clone() };
    // Int8 keeps the pools small, so that their changing size does not hide a leak.
    let pool = KvPool { blocks, block_size: BLOCK, dtype: KvDtype::Int8 };
    let block_bytes = pool.block_bytes(&backend, &files.spec);
    let mut kv = KvCache::new(&backend, &files.spec, pool).unwrap();
    kv.add_host_tier(&backend, SWAP_BLOCKS, block_bytes).unwrap();
    let decoder = files.load(backend, BatchLimits { tokens: 48, logits: 12 }, &mut |_, _| true).unwrap();
    let mut info = model_info(files.spec.vocab_size, blocks, MAX_MODEL_LEN, vec![]);
    (info.memory.block_bytes, info.memory.swap_blocks) = (block_bytes, SWAP_BLOCKS);
    (info, Box::new(ModelExecutor::new(decoder, kv)), faults)
}

/// Changes the budget until `stop` is set, and then restores its maximum.
fn vary_budget(budget: &MemoryBudget, stop: &AtomicBool) {
    let mut random = Random(99);
    let max_bytes = budget.info().max_bytes;
    while !stop.load(SeqCst) {
        // A resize below the reservations of running requests is refused.
        let _ = budget.resize(1 + random.below(max_bytes as usize) as u64);
        std::thread::sleep(Duration::from_millis(20));
    }
    budget.resize(max_bytes).unwrap();
}

/// Samples (seconds, resident bytes) while the hosts run, for this elapsed time and this CPU time,
/// so that a busy machine runs as many requests. Skips the first half, in which the heap
/// grows to its working size.
fn sample_memory(time: Duration) -> Vec<(f64, f64)> {
    let start = Instant::now();
    let mut samples = Vec::with_capacity(10_000);
    let cpu_start = cpu_time::of_process();
    while start.elapsed() < time || cpu_time::of_process() - cpu_start < time {
        std::thread::sleep(Duration::from_millis(100));
        if start.elapsed() > time / 2 {
            samples.push((start.elapsed().as_secs_f64(), resident_bytes() as f64));
        }
    }
    samples
}

/// Returns the slope of the least-squares line in bytes per minute.
fn slope(samples: &[(f64, f64)]) -> f64 {
    let n = samples.len() as f64;
    let (mean_x, mean_y) = (samples.iter().map(|s| s.0).sum::<f64>() / n, samples.iter().map(|s| s.1).sum::<f64>() / n);
    let over: f64 = samples.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    over / samples.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>() * 60.0
}

/// Runs all hosts and engines for the given time and shuts them down. Returns the counts of the
/// hosts and the memory samples.
fn stress(model: &Path, journal: &Path, time: Duration, seed: u64) -> (Tally, Vec<(f64, f64)>) {
    let mut random = Random(seed);
    let block_bytes = device(model, 1).0.memory.block_bytes;
    let budget = MemoryBudget::new(BLOCKS as u64 * block_bytes, BLOCKS as u64 * block_bytes).unwrap();
    let engine = |place| {
        let (budget, journal_path) = (Some(budget.clone()), (place == 0).then(|| journal.into()));
        let options = EngineOptions { budget, journal_path, ..random_options(place, &mut random) };
        let (info, executor, faults) = device(model, BLOCKS);
        for (point, one_in) in [(&faults.ops, 20_000), (&faults.swaps, 50), (&faults.exports, 50)] {
            point.one_in.store(one_in, SeqCst);
        }
        faults.poisoned.store(true, SeqCst);
        let engine = Engine::with_executor(&options, info, None, executor).unwrap();
        engine.start().unwrap();
        engine
    };
    let engines: Vec<Engine> = (0..ENGINES).map(engine).collect();
    let (stop, stop_varying) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut tally = Tally::default();
    let exported_states = Mutex::new(Vec::new());
    let samples = std::thread::scope(|scope| {
        let hosts: Vec<_> = (0..ENGINES * HOSTS)
            .map(|i| {
                let (engine, exported_states, stop) = (&engines[i % ENGINES], &exported_states, &stop);
                let seed = seed.wrapping_mul(1009).wrapping_add(i as u64);
                scope.spawn(move || Host::new(engine, exported_states, seed).run(stop))
            })
            .collect();
        let varying = scope.spawn(|| vary_budget(&budget, &stop_varying));
        let samples = sample_memory(time);
        stop_varying.store(true, SeqCst);
        varying.join().unwrap();
        stop.store(true, SeqCst);
        hosts.into_iter().for_each(|host| tally += host.join().unwrap());
        samples
    });
    engines.iter().for_each(Engine::stop);
    engines.iter().for_each(|engine| tally += finish(engine));
    assert_eq!(budget.info().min_bytes, (ENGINES * MAX_MODEL_LEN / BLOCK) as u64 * block_bytes, "no request has a reservation");
    drop(engines);
    let BudgetInfo { held_bytes, engines, .. } = budget.info();
    assert_eq!((held_bytes, engines), (0, 0), "the engines have returned all memory to the budget");
    (tally, samples)
}

/// Checks that no sequence and no block is in use. Returns the counts of the engine.
fn finish(engine: &Engine) -> Tally {
    while engine.step().unwrap_or_default().sequences > 0 {}
    engine.check_invariants();
    let stats = engine.stats();
    assert_eq!(
        (stats.waiting, stats.running, stats.idle, stats.blocks_used),
        (0, 0, 0, 0),
        "no sequence and no block is in use: {stats:?}"
    );
    assert_eq!((stats.swapped, stats.swap_blocks_used, stats.journals_stopped), (0, 0, 0), "{stats:?}");
    assert_eq!(stats.blocks_free + stats.blocks_cached, stats.blocks_total, "no block is lost");
    Tally {
        failed_steps: stats.steps_failed,
        preemptions: stats.preemptions,
        swapped_in: stats.blocks_swapped_in,
        failed_moves: stats.swap_failures,
        rejections: stats.admission_rejections,
        ..Tally::default()
    }
}

/// Replays the journal of the first engine, which must give the same results.
fn replay(model: &Path, journal: &Path) {
    let (info, executor, _) = device(model, BLOCKS);
    let summary = Replay::with_executor(JournalFile::open(journal).unwrap(), info, None, executor).unwrap().run().unwrap();
    assert_eq!((&summary.difference, &summary.ending), (&None, &Some(Ending::Closed)), "{summary:?}");
    assert!(summary.steps > 5 && summary.requests > 5, "{summary:?}");
}

fn number_from_env(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|number| number.parse().unwrap())
}

#[test]
fn a_stress_run_leaks_no_memory_and_loses_no_request() {
    let time = Duration::from_secs(number_from_env("PLLM_SOAK_SECONDS").unwrap_or(5));
    let by_clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = number_from_env("PLLM_SOAK_SEED").unwrap_or_else(by_clock);
    println!("PLLM_SOAK_SEED={seed}");
    let mut random = Random(seed);
    for EngineOptions { policies, preemption, prefix_cache, .. } in (0..ENGINES).map(|place| random_options(place, &mut random)) {
        println!("{policies:?}, {preemption:?}, prefix cache: {prefix_cache}");
    }
    let (dir, journals) = (TempDir::new(), TempDir::new());
    let (model, journal) = (&dir.0, &journals.0.join("journal"));
    let (_, config) = configs(512).pop().unwrap();
    write_random_model(model, &config, false, 5);
    // A short first run makes the allocations that happen once per process.
    share_one_heap();
    stress(model, journal, time / 10, seed);
    replay(model, journal);
    let before = live_bytes();
    let (tally, samples) = stress(model, journal, time, seed);
    assert_eq!(live_bytes() - before, samples.capacity() as i64 * size_of::<(f64, f64)>() as i64, "memory leaks");
    let slope = slope(&samples);
    println!("{time:?}: {tally:?}\nresident memory grew by {:.0} KiB a minute", slope / 1024.0);
    assert!(tally.ended > 0 && tally.failed_steps > 0 && tally.preemptions > 0, "no failed step or no preemption: {tally:?}");
    assert!(tally.swapped_in > 0 && tally.moved > 0, "no sequence was swapped in or imported: {tally:?}");
    assert!(time < MIN_DURATION_FOR_GROWTH || tally.failed_moves > 0 && tally.rejections > 0, "no failed swap or no rejection: {tally:?}");
    let max_growth = if time < HEAP_PEAK_TIME { 4.0 * MAX_GROWTH_PER_MINUTE } else { MAX_GROWTH_PER_MINUTE };
    assert!(time < MIN_DURATION_FOR_GROWTH || slope < max_growth, "resident memory grew by {slope} bytes a minute (limit {max_growth})");
}
