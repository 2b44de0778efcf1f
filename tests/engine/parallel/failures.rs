//! Workers that fail, end or do not fit: all of them return an error.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Instant;

use super::*;
use crate::support::communicator::Intercepted;
use pagedllm::communicator::Communicator;
use pagedllm::engine::Output;
use pagedllm::error::{Code, Error};

#[test]
fn an_engine_fails_if_a_worker_ends() {
    let model = Model::new();
    let options = model.options(200);
    let division = Division { tensor: 2, pipeline: 1 };
    let mut ranks = Local::group(2).into_iter();
    let first = with(&options, division, ranks.next().unwrap());
    let second = ranks.next().unwrap();
    let worker = thread::spawn({
        let options = options.clone();
        move || {
            // It fails after a number of calls, as if the process had ended.
            let calls = AtomicU64::new(0);
            let before = move || match calls.fetch_add(1, SeqCst) < 200 {
                true => Ok(()),
                false => Err(Error::internal("ended by the test")),
            };
            let communicator = Some(CommunicatorHandle::new(Arc::new(Intercepted { world: Arc::new(second), before })));
            Engine::run_worker(
                &EngineOptions { workers: WorkerOptions { division, communicator, timeout: TIMEOUT }, ..options },
                &mut |_, _| true,
            )
        }
    });
    let engine = Engine::create(&first).unwrap();
    for number in 0..3 {
        engine.add_request(Request::new(Prompt::Tokens(prompt(number)), greedy(100))).unwrap();
    }
    let error = loop {
        match engine.step() {
            Ok(report) => assert!(report.unfinished > 0, "the worker ends first"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("rank 1"), "{error}");
    let outputs: Vec<Output> = engine.queue().poll(Some(Duration::ZERO)).unwrap().into();
    let ended = outputs.iter().filter(|output| output.finish == Some(FinishReason::Error)).count();
    assert_eq!(ended, 3, "each request ends with an error");
    assert_eq!(engine.check().unwrap_err().code(), Code::Internal);
    assert_eq!(worker.join().unwrap().unwrap_err().message(), "internal error: ended by the test");
}

/// Starts all ranks, each with its options. Returns the errors in the order of the ranks.
fn errors_of(ranks: Vec<EngineOptions>) -> Vec<Error> {
    let mut ranks = ranks.into_iter();
    let first = ranks.next().unwrap();
    let start = |options| thread::spawn(move || Engine::run_worker(&options, &mut |_, _| true).unwrap_err());
    let workers: Vec<_> = ranks.map(start).collect();
    let mut errors = vec![Engine::create(&first).err().unwrap()];
    errors.extend(workers.into_iter().map(|worker| worker.join().unwrap()));
    errors
}

/// Returns the options of all ranks, which are the same.
fn equal_ranks(options: &EngineOptions, division: Division) -> Vec<EngineOptions> {
    Local::group(division.workers()).into_iter().map(|world| with(options, division, world)).collect()
}

#[test]
fn workers_with_other_options_are_refused_on_all_ranks() {
    let (model, windows, other_weights) = (Model::new(), Model::with_windows(), Model::with_seed(6));
    let options = model.options(200);
    let in_dir = |dir: &Path| EngineOptions { model_dir: dir.into(), ..options.clone() };
    let division = Division { tensor: 2, pipeline: 1 };
    let other_block = EngineOptions { block_size: 16, ..options.clone() };
    let no_batch = EngineOptions { max_seqs: 0, ..options.clone() };
    let no_device = EngineOptions { device: "gpu".into(), ..options.clone() };
    let no_cpu = EngineOptions { cpus: Some(vec![1023]), threads: None, ..options.clone() };
    let cases = [
        (other_block, division, "rank 0 has block_size 8, rank 1 has block_size 16"),
        (in_dir(&windows.0.0), division, "rank 0 has model LlamaForCausalLM"),
        (in_dir(&other_weights.0.0), division, "with fingerprint"),
        (in_dir(Path::new("does-not-exist")), division, "does-not-exist"),
        (no_batch, division, "max_seqs is 0"),
        (no_device, division, "device is \"gpu\""),
        (no_cpu, division, "1023"),
        (options.clone(), Division { tensor: 1, pipeline: 2 }, "tensor_parallel 1, pipeline_parallel 2"),
        (options.clone(), Division { tensor: 3, pipeline: 1 }, "tensor_parallel 3, pipeline_parallel 1"),
        (options.clone(), ALONE, "tensor_parallel 1, pipeline_parallel 1"),
    ];
    for (other, other_division, message) in cases {
        let mut ranks = Local::group(2).into_iter();
        let first = with(&options, division, ranks.next().unwrap());
        let second = with(&other, other_division, ranks.next().unwrap());
        let errors = errors_of(vec![first, second]);
        assert!(errors[0].message().contains(message), "{}", errors[0]);
        assert!(errors[1].message().contains(message) || other_division != division, "{}", errors[1]);
        assert_eq!(errors[0].code(), errors[1].code());
    }
}

#[test]
fn heads_that_do_not_divide_are_refused_on_all_ranks() {
    for error in errors_of(equal_ranks(&Model::new().options(200), Division { tensor: 3, pipeline: 1 })) {
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains('8') && error.message().contains('3'), "{error}");
    }
}

#[test]
fn rank_0_that_cannot_create_its_engine_fails_all_ranks() {
    let model = Model::new();
    let options = model.options(200);
    let unwritable = EngineOptions { journal_path: Some("does-not-exist/journal".into()), ..options.clone() };
    for division in DIVISIONS {
        let mut ranks = equal_ranks(&options, division);
        ranks[0].journal_path = unwritable.journal_path.clone();
        let errors = errors_of(ranks);
        for error in &errors {
            assert!(error.code() == Code::Io && error.message().contains("does-not-exist/journal"), "{error}");
        }
        assert!(errors[1..].iter().all(|error| error.message().starts_with("rank 0: ")), "{errors:?}");
    }
    // Workers that are threads of the engine end too.
    let listed = EngineOptions { device: "cpu,cpu".into(), ..unwritable };
    let error = Engine::create(&listed).err().unwrap();
    assert_eq!(error.code(), Code::Io, "{error}");
}

#[test]
fn the_loading_of_a_list_of_devices_can_be_cancelled() {
    let model = Model::new();
    let listed = EngineOptions { device: "cpu,cpu".into(), ..model.options(200) };
    let error = Engine::load(&listed, &mut |_, _| false).err().unwrap();
    assert_eq!(error.code(), Code::Cancelled, "{error}");
}

/// Runs a request on several workers. All exchanges of one of them fail from this number on.
/// Returns how the engine and the workers end.
fn run_with_failure(options: &EngineOptions, division: Division, failing: usize, exchange: u64) -> (Result<()>, Vec<Result<()>>) {
    let exchanges = AtomicU64::new(0);
    let before = move || match exchanges.fetch_add(1, SeqCst) < exchange {
        true => Ok(()),
        false => Err(Error::internal("ended by the test")),
    };
    let mut before = Some(before);
    let communicators = Local::group(division.workers()).into_iter().map(|world| -> Arc<dyn Communicator> {
        match world.rank() == failing {
            true => Arc::new(Intercepted { world: Arc::new(world), before: before.take().unwrap() }),
            false => Arc::new(world),
        }
    });
    let mut ranks = communicators.map(|communicator| {
        let communicator = Some(CommunicatorHandle::new(communicator));
        EngineOptions { workers: WorkerOptions { division, communicator, timeout: TIMEOUT }, ..options.clone() }
    });
    let first = ranks.next().unwrap();
    let workers: Vec<_> = ranks.map(|options| thread::spawn(move || Engine::run_worker(&options, &mut |_, _| true))).collect();
    let engine = Engine::create(&first);
    let result = engine.as_ref().map_or_else(|error| Err(error.clone()), answer);
    drop((engine, first));
    (result, workers.into_iter().map(|worker| worker.join().unwrap()).collect())
}

/// Runs a request to its end.
fn answer(engine: &Engine) -> Result<()> {
    engine.add_request(Request::new(Prompt::Tokens(prompt(0)), greedy(2)))?;
    while engine.step()?.unfinished > 0 {}
    engine.check()
}

#[test]
fn an_exchange_that_fails_at_any_time_ends_all_ranks() {
    let model = Model::new();
    let options = model.options(200);
    for division in [DIVISIONS[0], DIVISIONS[2], DIVISIONS[5]] {
        for failing in 0..division.workers() {
            // Until no exchange of the request fails.
            for exchange in 0.. {
                let began = Instant::now();
                let (engine, workers) = run_with_failure(&options, division, failing, exchange);
                assert!(began.elapsed() < TIMEOUT / 2, "{division:?}: a rank has waited for rank {failing} at exchange {exchange}");
                if engine.is_ok() {
                    assert!(exchange > 20, "{division:?}: rank {failing} has {exchange} exchanges");
                    break;
                }
                assert!(workers.iter().all(Result::is_err), "{division:?}: rank {failing} at exchange {exchange}: {workers:?}");
            }
        }
    }
}

#[test]
fn wrong_uses_are_refused() {
    let model = Model::new();
    let options = model.options(200);
    let division = Division { tensor: 2, pipeline: 1 };
    let alone = EngineOptions { workers: WorkerOptions { division, ..Default::default() }, ..options.clone() };
    let error = Engine::create(&alone).err().unwrap();
    assert_eq!(
        error.message(),
        "tensor_parallel times pipeline_parallel is 2 and communicator is NULL; set a communicator with this many ranks, or give as many devices"
    );
    let error = Engine::run_worker(&options, &mut |_, _| true).unwrap_err();
    assert!(error.message().starts_with("a worker needs others"), "{error}");

    // Rank 1 creates an engine, and rank 0 runs a worker.
    let mut ranks = Local::group(2).into_iter();
    let (first, second) = (with(&options, division, ranks.next().unwrap()), with(&options, division, ranks.next().unwrap()));
    let reversed = thread::spawn(move || Engine::run_worker(&first, &mut |_, _| true).unwrap_err());
    let error = Engine::create(&second).err().unwrap();
    assert!(error.message().starts_with("the communicator has rank 1"), "{error}");
    assert!(reversed.join().unwrap().message().starts_with("the communicator has rank 0"));
    let error = Engine::create(&second).err().unwrap();
    assert_eq!(error.message(), "the communicator is in use by another engine or worker");

    // Heads that do not divide.
    let workers = WorkerOptions { division: Division { tensor: 3, pipeline: 1 }, ..Default::default() };
    let error = Engine::plan(&EngineOptions { workers, ..options }).unwrap_err();
    assert!(error.message().contains('8') && error.message().contains('3'), "{error}");
}
