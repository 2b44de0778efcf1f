//! After warm-up, a step of several workers allocates nothing, on any of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pagedllm::communicator::local::Local;
use pagedllm::communicator::shared_memory::SharedMemory;
use pagedllm::communicator::{Communicator, CommunicatorHandle};
use pagedllm::engine::{Engine, Prompt, Request, StepReport};
use pagedllm::types::options::{EngineOptions, Preemption, SamplingParams, WorkerOptions};
use pagedllm::types::parallel::Division;

use super::failing_allocator::{Site, count_allocations, start_counting, stop_counting};
use crate::support::communicator::Intercepted;
use crate::support::{TempDir, configs, write_random_model};

const TIMEOUT: Duration = Duration::from_secs(600);
const WARM_UP: usize = 300;
const STEPS: usize = 150;
/// Number of windows of `STEPS` steps, one of which must be free of allocations, because a later
/// step can be larger than all before it.
const WINDOWS: usize = 4;

/// Counts the allocations of a worker's thread while `is_on` is set. The worker calls its
/// communicator in each step.
#[derive(Debug, Default)]
struct Counts {
    is_on: AtomicBool,
    calls: AtomicUsize,
    found: Mutex<BTreeMap<Site, usize>>,
}

impl Counts {
    fn before_call(&self) {
        if self.is_on.load(SeqCst) {
            self.calls.fetch_add(1, SeqCst);
            start_counting();
        } else {
            stop_counting(&mut self.found.lock().unwrap());
        }
    }
}

/// Returns a communicator that counts the allocations of the thread that calls it.
fn counting(world: Arc<dyn Communicator>, counts: Arc<Counts>) -> Arc<dyn Communicator> {
    let before = move || {
        counts.before_call();
        Ok(())
    };
    Arc::new(Intercepted { world, before })
}

/// Writes a LLaMA that four workers can divide.
fn model() -> TempDir {
    let dir = TempDir::new();
    let (_, mut config) = configs(192).into_iter().find(|(name, _)| name.starts_with("llama")).unwrap();
    let sizes = config.as_object_mut().unwrap();
    for (name, size) in [("num_attention_heads", 8), ("intermediate_size", 52), ("num_hidden_layers", 4)] {
        sizes.insert(name.into(), size.into());
    }
    write_random_model(&dir.0, &config, false, 5);
    dir
}

fn options(model: PathBuf, division: Division, world: Arc<dyn Communicator>) -> EngineOptions {
    let communicator = Some(CommunicatorHandle::new(world));
    EngineOptions {
        model_dir: model,
        skip_tokenizer: true,
        threads: Some(1),
        max_seqs: 12,
        max_batch_tokens: 64,
        max_model_len: Some(192),
        kv_bytes: Some(128 << 10),
        swap_bytes: 64 << 10,
        preemption: Preemption::Swap,
        workers: WorkerOptions { division, communicator, timeout: TIMEOUT },
        ..Default::default()
    }
}

/// Adds a request if there are few, and runs a step.
fn step(engine: &Engine, number: usize, step: impl FnOnce() -> StepReport) {
    if engine.stats().waiting + engine.stats().running < 14 {
        let temperature = (number % 2) as f32;
        let sampling = SamplingParams { temperature, ignore_eos: true, max_tokens: Some(30 + number % 80), ..Default::default() };
        let prompt = (0..20 + number % 60).map(|place| (place * 7 + number * 11) as u32 % 120).collect();
        engine.add_request(Request::new(Prompt::Tokens(prompt), sampling)).unwrap();
    }
    assert!(step().unfinished > 0);
    drop(engine.queue().poll_batch(Some(Duration::ZERO), |_| Ok(())).unwrap());
}

/// Returns the allocations in a window of steps by the engine and by its workers.
fn window(engine: &Engine, workers: &[Arc<Counts>]) -> BTreeMap<Site, usize> {
    let mut found = BTreeMap::new();
    workers.iter().for_each(|worker| worker.is_on.store(true, SeqCst));
    (0..STEPS).for_each(|number| step(engine, number, || count_allocations(&mut found, || engine.step()).unwrap()));
    workers.iter().for_each(|worker| worker.is_on.store(false, SeqCst));
    // In these steps, all workers notice it.
    (0..WARM_UP).for_each(|number| step(engine, number, || engine.step().unwrap()));
    for worker in workers {
        assert!(worker.calls.swap(0, SeqCst) >= STEPS, "{worker:?}");
        found.append(&mut worker.found.lock().unwrap());
    }
    found.retain(|site, _| site.name().starts_with("src/"));
    found
}

/// Runs an engine with these ranks, of which `join` returns one on its own thread.
fn run(division: Division, join: impl Fn(usize) -> Arc<dyn Communicator> + Sync) {
    let model = model();
    thread::scope(|scope| {
        let workers: Vec<_> = (1..division.workers())
            .map(|rank| {
                let counts = Arc::new(Counts::default());
                let (own_counts, join, model) = (counts.clone(), &join, &model);
                let run =
                    move || Engine::run_worker(&options(model.0.clone(), division, counting(join(rank), own_counts)), &mut |_, _| true);
                (scope.spawn(run), counts)
            })
            .collect();
        let engine = Engine::create(&options(model.0.clone(), division, join(0))).unwrap();
        let counts: Vec<_> = workers.iter().map(|(_, counts)| counts.clone()).collect();
        (0..WARM_UP).for_each(|number| step(&engine, number, || engine.step().unwrap()));
        let mut found = BTreeMap::new();
        let is_free = (0..WINDOWS).any(|_| {
            found = window(&engine, &counts);
            found.is_empty()
        });
        assert!(is_free, "{division:?}: {found:#?}");
        assert!(engine.stats().preemptions > 10, "{:?}", engine.stats());
        drop(engine);
        workers.into_iter().for_each(|(worker, _)| worker.join().unwrap().unwrap());
    });
}

#[test]
fn a_warm_step_of_several_workers_allocates_nothing() {
    for (tensor, pipeline) in [(2, 1), (1, 2), (2, 2)] {
        let division = Division { tensor, pipeline };
        let ranks: Vec<_> = Local::group(division.workers()).into_iter().map(|rank| Arc::new(rank) as Arc<dyn Communicator>).collect();
        run(division, |rank| ranks[rank].clone());
    }
}

#[test]
fn a_warm_step_of_workers_with_shared_memory_allocates_nothing() {
    let dir = TempDir::new();
    for (tensor, pipeline) in [(2, 1), (1, 2)] {
        let path = dir.0.join(format!("{tensor}x{pipeline}"));
        run(Division { tensor, pipeline }, |rank| Arc::new(SharedMemory::join(&path, rank, 2, Some(TIMEOUT)).unwrap()));
    }
}
