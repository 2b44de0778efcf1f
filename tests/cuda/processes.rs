//! Workers that are processes, each with simulated devices of its own: their outputs, and what
//! remains when one of them is killed or stopped.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagedllm::communicator::CommunicatorHandle;
use pagedllm::communicator::shared_memory::SharedMemory;
use pagedllm::engine::Engine;
use pagedllm::error::{Code, Error};
use pagedllm::types::options::{EngineOptions, WorkerOptions};
use pagedllm::types::outputs::{FinishReason, Output};
use pagedllm::types::parallel::Division;
use serde::{Deserialize, Serialize};

use super::support::cuda::{self, Nccl};
use super::support::rank_process::RankProcess;
use super::{Model, SHORT, alone, answers, assert_freed, compare, impatient, llama, not_responded, options_for, request, run};

const PLACE: &str = "PLLM_TEST_PLACE";
/// Limit of waits that are not the subject of a test, also on a busy machine.
const BOUND: Duration = Duration::from_secs(60);
/// Requests that are unfinished at any time. Some of them wait.
const REQUESTS: usize = 4;
const DIVISIONS: [Division; 2] = [Division { tensor: 2, pipeline: 1 }, Division { tensor: 1, pipeline: 2 }];

/// The place of a process among two ranks.
#[derive(Clone, Serialize, Deserialize)]
struct Place {
    rank: usize,
    device: String,
    division: Division,
    model: PathBuf,
    timeout: Duration,
    has_nccl: bool,
}

impl Place {
    fn engine(model: &Model, division: Division) -> Place {
        Place { rank: 0, device: "cuda:0".into(), division, model: model.0.0.clone(), timeout: BOUND, has_nccl: true }
    }

    fn impatient(&self) -> Place {
        Place { timeout: SHORT, ..self.clone() }
    }

    fn worker(&self, device: &str) -> Place {
        Place { rank: 1, device: device.into(), ..self.clone() }
    }

    /// Waits for the other rank. Returns options with small steps.
    fn options(&self) -> EngineOptions {
        let world = SharedMemory::join(&self.model.join("group"), self.rank, 2, Some(BOUND)).unwrap();
        let communicator = Some(CommunicatorHandle::new(Arc::new(world)));
        let workers = WorkerOptions { division: self.division, communicator, timeout: self.timeout };
        EngineOptions { workers, ..impatient(options_for(&self.model, &self.device)) }
    }
}

fn start_rank(place: &Place) -> RankProcess {
    RankProcess::start("processes::rank_of_another_test", PLACE, &serde_json::to_string(place).unwrap())
}

/// Runs one rank for another test. Does nothing otherwise.
#[test]
fn rank_of_another_test() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let place: Place = serde_json::from_str(&place).unwrap();
    let nccl = place.has_nccl.then(|| cuda::nccl().unwrap());
    cuda::shim().pretend_devices(2);
    let options = place.options();
    if place.rank == 0 {
        let engine = Engine::create(&options).unwrap();
        generate(&engine, 10);
        println!("\nanswer: ready");
        generate(&engine, usize::MAX);
    }
    let result = Engine::run_worker(&options, &mut |_, _| true);
    nccl.into_iter().for_each(assert_freed);
    println!("\nanswer: {}", result.map_or_else(|e| format!("{:?}, {e}", e.code()), |()| "the engine was freed".into()));
}

/// Generates at least this many tokens. Leaves requests in mid-generation.
fn generate(engine: &Engine, tokens: usize) {
    let (mut generated, mut unfinished) = (0, 0);
    while generated < tokens {
        for number in unfinished..REQUESTS {
            engine.add_request(request(number, 5, 200)).unwrap();
        }
        engine.step().unwrap();
        let outputs = poll(engine);
        generated += outputs.iter().map(|output| output.tokens.len()).sum::<usize>();
        unfinished = REQUESTS - outputs.iter().filter(|output| output.finish.is_some()).count();
    }
}

fn poll(engine: &Engine) -> VecDeque<Output> {
    engine.queue().poll(Some(Duration::ZERO)).unwrap()
}

fn start(place: &Place) -> (Engine, RankProcess) {
    let worker = start_rank(&place.worker("cuda:1"));
    (Engine::create(&place.options()).unwrap(), worker)
}

/// Checks that an engine whose worker has failed in mid-generation ends all requests in time, and
/// that the process can create another engine. Returns the time, an error and the failed worker.
fn assert_ends(nccl: &Nccl, place: &Place, fail: impl FnOnce(&RankProcess)) -> (Duration, Error, RankProcess) {
    let (engine, failing) = start(&place.impatient());
    generate(&engine, 10);
    let began = Instant::now();
    fail(&failing);
    let mut errors = Vec::new();
    while errors.len() < REQUESTS {
        let _ = engine.step();
        for output in poll(&engine).into_iter().filter(|output| output.finish.is_some()) {
            assert_eq!(output.finish, Some(FinishReason::Error));
            errors.extend(output.error);
        }
        assert!(began.elapsed() < 2 * SHORT, "{} requests have ended", errors.len());
    }
    let elapsed = began.elapsed();
    let after = engine.step().err().or(engine.add_request(request(9, 5, 4)).err()).expect("the engine has failed");
    assert_eq!(after.code(), Code::Internal, "{after}");
    drop(engine);
    assert_freed(nccl);
    let (engine, worker) = start(place);
    run(&engine, [request(3, 5, 4)].into_iter()).unwrap();
    drop(engine);
    assert_eq!(worker.end(BOUND), "the engine was freed");
    (elapsed, errors.remove(0), failing)
}

#[test]
fn two_processes_have_the_outputs_of_the_cpu() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let on_cpu = answers(&model.options("cpu")).unwrap();
    // The worker may have the same device, because each process has simulated devices of its own.
    for (division, device) in DIVISIONS.into_iter().zip(["cuda:1", "cuda:0"]) {
        let place = Place::engine(&model, division);
        let worker = start_rank(&place.worker(device));
        let before = nccl.exchanges();
        compare(&format!("{division:?}"), &answers(&place.options()).unwrap(), &on_cpu);
        assert!(nccl.exchanges() > before);
        assert_eq!(worker.end(BOUND), "the engine was freed");
        assert_freed(nccl);
    }
}

#[test]
fn a_missing_nccl_of_one_process_is_an_error_of_both() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let missing = "libnccl.so.2 cannot be loaded";
    for division in DIVISIONS {
        let place = Place::engine(&model, division);
        let worker = start_rank(&Place { has_nccl: false, ..place.worker("cuda:1") });
        let error = Engine::create(&place.options()).err().unwrap();
        assert_eq!(error.code(), Code::Unsupported);
        assert!(error.message().starts_with(&format!("rank 1: {missing}")), "{error}");
        let ended = worker.end(BOUND);
        assert!(ended.starts_with(&format!("Unsupported, {missing}")), "{ended}");
        assert_freed(nccl);
    }
}

#[test]
fn a_killed_worker_process_ends_the_engine() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    for division in DIVISIONS {
        let place = Place::engine(&model, division);
        let (_, error, _) = assert_ends(nccl, &place, |worker| worker.signal(libc::SIGKILL));
        assert!(error.code() == Code::Internal && !error.message().contains(&not_responded()), "{error}");
    }
}

#[test]
fn a_stopped_worker_process_ends_the_engine_after_the_timeout() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    for division in DIVISIONS {
        let place = Place::engine(&model, division);
        let (elapsed, error, stopped) = assert_ends(nccl, &place, |worker| worker.signal(libc::SIGSTOP));
        assert!(elapsed >= SHORT, "{elapsed:?}");
        assert!(error.message().contains(&not_responded()), "{error}");
        // If the worker continues, it notices the failure too.
        stopped.signal(libc::SIGCONT);
        let ended = stopped.end(BOUND);
        assert!(ended.starts_with("Internal, "), "{ended}");
    }
}

#[test]
fn a_worker_process_ends_by_itself_when_the_engine_is_killed() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    for division in DIVISIONS {
        let place = Place::engine(&model, division).impatient();
        let worker = start_rank(&place.worker("cuda:1"));
        let mut engine = start_rank(&place);
        assert_eq!(engine.answer(), "ready");
        engine.signal(libc::SIGKILL);
        let began = Instant::now();
        let ended = worker.end(BOUND);
        assert!(ended.starts_with("Internal, "), "{ended}");
        assert!(began.elapsed() < 2 * SHORT, "{:?}", began.elapsed());
    }
}
