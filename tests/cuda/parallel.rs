//! Engines on several simulated CUDA devices, which exchange data by a replacement for NCCL
//! (tests/cuda). On a machine with a device, these tests are skipped.

mod processes;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, Collectives, Workers};
use pagedllm::communicator::local::Local;
use pagedllm::communicator::{Communicator, CommunicatorHandle};
use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::{Code, Error};
use pagedllm::types::options::{EngineOptions, SamplingParams, WeightFormat, WorkerOptions};
use pagedllm::types::outputs::FinishReason;
use pagedllm::types::parallel::Division;
use serde_json::{Value, json};
use support::cuda::Nccl;
use support::{Random, TempDir, configs, cuda, write_random_model};

const PATIENCE: Duration = Duration::from_secs(600);
/// Results of NCCL.
const SYSTEM_ERROR: i32 = 2;
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;

/// The replacements, for one test at a time, because their settings affect all threads. Before NCCL
/// is loaded, the error of an engine without it is kept. None: a device of this machine is used.
fn alone() -> Option<(MutexGuard<'static, ()>, &'static Nccl)> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    without_nccl();
    cuda::nccl().map(|nccl| (guard, nccl))
}

/// Returns the error of an engine with two devices before NCCL was loaded.
fn without_nccl() -> &'static Option<Error> {
    static ERROR: OnceLock<Option<Error>> = OnceLock::new();
    ERROR.get_or_init(|| {
        if !cuda::shim().pretends() {
            return None;
        }
        cuda::shim().pretend_devices(4);
        let model = Model::new(&llama());
        Engine::create(&model.options("cuda:0,cuda:1")).err()
    })
}

fn llama() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 127, "max_position_embeddings": 256, "eos_token_id": 2})
}

struct Model(TempDir);

impl Model {
    fn new(config: &Value) -> Model {
        let dir = TempDir::new();
        write_random_model(&dir.0, config, false, 3);
        Model(dir)
    }

    fn options(&self, device: &str) -> EngineOptions {
        options_for(&self.0.0, device)
    }

    /// Creates a model of many small layers.
    fn deep(layers: usize) -> Model {
        let mut config = llama();
        let sizes = [("num_hidden_layers", layers), ("hidden_size", 16), ("num_attention_heads", 1), ("num_key_value_heads", 1)];
        sizes.into_iter().for_each(|(name, size)| config[name] = size.into());
        Model::new(&config)
    }

    fn divided(&self, device: &str, tensor: usize, pipeline: usize) -> EngineOptions {
        let mut options = self.options(device);
        options.workers.division = Division { tensor, pipeline };
        options
    }
}

fn options_for(model: &Path, device: &str) -> EngineOptions {
    EngineOptions {
        model_dir: model.into(),
        device: device.into(),
        skip_tokenizer: true,
        kv_bytes: Some(1 << 20),
        max_batch_tokens: 64,
        max_seqs: 8,
        threads: device.starts_with("cpu").then_some(1),
        ..Default::default()
    }
}

/// The limit of waits that end an engine. Loading and steps of a busy machine are faster.
const SHORT: Duration = Duration::from_secs(12);

/// Options with small steps, and a short limit for waits.
fn impatient(options: EngineOptions) -> EngineOptions {
    let workers = WorkerOptions { timeout: SHORT, ..options.workers.clone() };
    EngineOptions { workers, max_batch_tokens: 8, max_seqs: 2, ..options }
}

/// The same options with a limit that no machine exceeds.
fn patient(options: &EngineOptions) -> EngineOptions {
    let workers = WorkerOptions { timeout: PATIENCE, ..options.workers.clone() };
    EngineOptions { workers, ..options.clone() }
}

/// The error of a wait that has taken too long.
fn not_responded() -> String {
    format!("another worker has not responded for {SHORT:?}")
}

/// Runs something that must end long before the limit of patient options.
fn at_once<T>(body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = body();
    assert!(start.elapsed() < PATIENCE / 2, "it took {:?}", start.elapsed());
    result
}

fn request(number: usize, prompt: usize, tokens: usize) -> Request {
    let mut random = Random(number as u64 + 9);
    let prompt = (0..prompt).map(|_| random.below(127) as u32).collect();
    let sampling = SamplingParams { temperature: 0.0, max_tokens: Some(tokens), ignore_eos: true, logprobs: Some(0), ..Default::default() };
    Request { user_data: number as u64, ..Request::new(Prompt::Tokens(prompt), sampling) }
}

fn requests() -> impl Iterator<Item = Request> {
    [5, 1, 40, 17, 90].into_iter().enumerate().map(|(i, prompt)| request(i, prompt, 8))
}

/// Tokens of each request, with the bits of their log probabilities.
type Answers = BTreeMap<u64, Vec<(u32, u32)>>;

/// Returns the outputs of all requests, or the error of a failed one.
fn run(engine: &Engine, requests: impl Iterator<Item = Request>) -> Result<Answers, Error> {
    let (mut answers, mut failure, mut ended, mut expected) = (Answers::new(), None, 0, 0);
    for request in requests {
        engine.add_request(request).unwrap();
        expected += 1;
    }
    while ended < expected {
        let _ = engine.step();
        for output in engine.queue().poll(Some(Default::default())).unwrap() {
            ended += output.finish.is_some() as usize;
            if output.finish == Some(FinishReason::Error) {
                failure = output.error.or(failure);
            }
            let pairs = output.tokens.iter().copied().zip(output.logprobs.tokens.iter().map(|p| p.to_bits()));
            answers.entry(output.user_data).or_default().extend(pairs);
        }
    }
    failure.map_or(Ok(answers), Err)
}

fn answers(options: &EngineOptions) -> Result<Answers, Error> {
    let engine = Engine::create(options)?;
    Ok(run(&engine, requests()).unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error())))
}

/// Checks that tokens are equal up to equally probable ones. Returns the number of equal tokens.
fn compare(what: &str, found: &Answers, expected: &Answers) -> usize {
    compare_within(what, found, expected, 1e-3)
}

/// As `compare`, with this limit for differences of log probabilities.
fn compare_within(what: &str, found: &Answers, expected: &Answers, limit: f32) -> usize {
    let mut equal = 0;
    for (request, expected) in expected {
        for (i, ((token, logprob), (expected, of_one))) in found[request].iter().zip(expected).enumerate() {
            let [logprob, of_one] = [logprob, of_one].map(|bits| f32::from_bits(*bits));
            assert!((logprob - of_one).abs() < limit, "{what}: token {i} of request {request}: {logprob}, with one worker {of_one}");
            if token != expected {
                break;
            }
            equal += 1;
        }
    }
    assert!(equal > 25, "{what}: only {equal} of 40 tokens are equal");
    equal
}

/// Checks that nothing of an engine is left.
fn assert_freed(nccl: &Nccl) {
    let shim = cuda::shim();
    assert_eq!((nccl.ranks(), shim.live_bytes(), shim.pinned_bytes(), shim.left_in_primary()), (0, 0, 0, 0));
}

#[test]
fn a_missing_nccl_is_an_error_with_its_name() {
    let Some(_one) = alone() else { return };
    let error = without_nccl().as_ref().expect("there was no NCCL");
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.message().starts_with("libnccl.so.2 cannot be loaded (libnccl.so.2: cannot open"), "{error}");
    assert!(error.message().contains("install NCCL, or set tensor_parallel"), "{error}");
}

#[test]
fn two_devices_have_the_outputs_of_the_cpu() {
    let Some((_one, nccl)) = alone() else { return };
    let mut divided = 0;
    for (name, config) in configs(256).into_iter().chain([("llama of four heads", llama())]) {
        let model = Model::new(&config);
        let on_cpu = answers(&model.options("cpu")).unwrap();
        for (tensor, pipeline) in [(2, 1), (1, 2)] {
            match answers(&model.divided("cuda:0,cuda:1", tensor, pipeline)) {
                Ok(found) => divided += compare(&format!("{name} on {tensor} x {pipeline}"), &found, &on_cpu).min(1),
                Err(error) => assert!(tensor == 2 && error.code() == Code::InvalidArgument, "{name}: {error}"),
            }
            assert_freed(nccl);
        }
    }
    assert!(divided >= 12, "only {divided} divisions");
}

#[test]
fn four_devices_in_two_stages_have_the_outputs_of_the_cpu() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let on_cpu = answers(&model.options("cpu")).unwrap();
    for (tensor, pipeline) in [(2, 2), (4, 1)] {
        let found = answers(&model.divided("cuda:0,cuda:1,cuda:2,cuda:3", tensor, pipeline)).unwrap();
        compare(&format!("{tensor} x {pipeline}"), &found, &on_cpu);
        assert_freed(nccl);
    }
}

/// Parts of columns are whole groups, so a division does not change weights in int4. In int8 the
/// scale of a row is that of its part.
#[test]
fn two_devices_with_integer_weights_have_the_outputs_of_one() {
    let Some((_one, nccl)) = alone() else { return };
    let mut config = llama();
    config["intermediate_size"] = 128.into();
    let model = Model::new(&config);
    let int4 = |offsets| WeightFormat::Int4 { group: 32, offsets };
    for (format, limit) in [(WeightFormat::Int8, 0.1), (int4(false), 0.01), (int4(true), 0.01)] {
        let with = |options: EngineOptions| EngineOptions { weight_format: Some(format), ..options };
        let on_one = answers(&with(model.options("cuda:0"))).unwrap();
        for (tensor, pipeline) in [(2, 1), (1, 2)] {
            let options = with(model.divided("cuda:0,cuda:1", tensor, pipeline));
            let planned = Engine::plan(&options).unwrap();
            let engine = Engine::create(&options).unwrap();
            assert_eq!(engine.info().memory, planned, "{format:?}");
            let found = run(&engine, requests()).unwrap();
            drop(engine);
            compare_within(&format!("{format:?} on {tensor} x {pipeline}"), &found, &on_one, limit);
            assert_freed(nccl);
        }
    }
    // 96 columns of two ranks are not whole groups.
    let model = Model::new(&llama());
    let options = EngineOptions { weight_format: Some(int4(false)), ..model.divided("cuda:0,cuda:1", 2, 1) };
    let error = Engine::plan(&options).err().unwrap();
    let words = ["groups of 32", "48 columns per rank", "weight_format to int8"];
    assert!(error.code() == Code::Unsupported && words.iter().all(|word| error.message().contains(word)), "{error}");
}

/// The end of one communicator could wait for an exchange of another one.
#[test]
fn each_device_has_one_communicator() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let engine = Engine::create(&model.divided("cuda:0,cuda:1,cuda:2,cuda:3", 2, 2)).unwrap();
    assert_eq!(nccl.ranks(), 4);
    drop(engine);
    assert_freed(nccl);
}

/// Runs `body` on a device for each rank. Returns the results in the order of the ranks.
fn on_devices<T: Send + 'static>(ranks: usize, body: impl Fn(CudaBackend, usize) -> T + Copy + Send + 'static) -> Vec<T> {
    cuda::shim().pretend_devices(4);
    let start = |world: Local| {
        thread::spawn(move || {
            let (rank, world) = (world.rank(), Arc::new(world));
            let mut backend = CudaBackend::for_worker(rank, false).unwrap();
            backend.join(Workers { tensor: world.clone(), world, timeout: PATIENCE }).unwrap();
            body(backend, rank)
        })
    };
    let threads: Vec<_> = Local::group(ranks).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Both sides of the limit up to which each rank adds all numbers.
#[test]
fn sums_are_added_in_the_order_of_the_ranks() {
    let Some((_one, _)) = alone() else { return };
    fn numbers(rank: usize, len: usize) -> Vec<f32> {
        let mut random = Random(rank as u64 + 1);
        (0..len).map(|_| (random.below(2_000_001) as f32 - 1e6) * 10f32.powi(random.below(9) as i32 - 12)).collect()
    }
    for (ranks, len) in [(2, 1), (2, 65_536), (2, 65_537), (3, 7), (3, 43_690), (3, 43_691), (3, 100_001)] {
        let expected: Vec<u32> = {
            let all: Vec<Vec<f32>> = (0..ranks).map(|rank| numbers(rank, len)).collect();
            (0..len).map(|i| all.iter().skip(1).fold(all[0][i], |sum, x| sum + x[i]).to_bits()).collect()
        };
        let found = on_devices(ranks, move |backend, rank| {
            backend.reserve_exchange(len).unwrap();
            let mut x = backend.vector(&numbers(rank, len)).unwrap();
            backend.all_reduce(len, &mut x);
            backend.read(&mut x, len).unwrap().iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        });
        for (rank, found) in found.into_iter().enumerate() {
            assert!(found == expected, "{len} numbers on rank {rank} of {ranks}");
        }
    }
}

/// Benchmarks do this on a machine with one device.
#[test]
fn a_rank_that_is_alone_exchanges_numbers_with_itself() {
    let Some((_one, _)) = alone() else { return };
    let are_equal = on_devices(1, |backend, _| {
        let sent: Vec<f32> = (0..5000).map(|i| i as f32).collect();
        let mut received = backend.vector(&vec![f32::NAN; sent.len()]).unwrap();
        backend.exchange_with_itself(sent.len(), &backend.vector(&sent).unwrap(), &mut received);
        backend.read(&mut received, sent.len()).unwrap() == sent
    });
    assert_eq!(are_equal, [true]);
}

/// The application may share the primary context, and its flags make a wait for a stream spin or
/// sleep.
#[test]
fn the_flags_of_primary_contexts_do_not_matter() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    let unused = ["cuDevicePrimaryCtxSetFlags_v2", "cuStreamSynchronize"];
    unused.into_iter().for_each(|function| cuda::shim().fail(function, 1, 999));
    answers(&model.options("cuda:0,cuda:1")).unwrap();
    unused.into_iter().for_each(|function| cuda::shim().fail(function, 0, 0));
}

/// A launch blocks if about 1,000 launches are queued, and the watchdog cannot end that. The
/// simulated devices run their queues only when the host waits.
#[test]
fn the_queue_of_a_device_is_limited() {
    let Some((_one, _)) = alone() else { return };
    // A stage has more than 900 launches.
    let model = Model::deep(150);
    let engine = Engine::create(&patient(&impatient(model.divided("cuda:0,cuda:1", 1, 2)))).unwrap();
    let ended = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let observer = scope.spawn(|| {
            let mut most = 0;
            while !ended.load(Relaxed) {
                most = cuda::shim().queued().max(most);
                thread::sleep(Duration::from_millis(1));
            }
            most
        });
        run(&engine, [request(0, 1, 2)].into_iter()).unwrap();
        ended.store(true, Relaxed);
        observer.join().unwrap()
    });
    // Of both devices.
    assert!((400..1400).contains(&most), "{most} launches are queued");
}

/// The order of addition depends on neither the length of a message nor the batch.
#[test]
fn the_bits_of_a_sequence_do_not_depend_on_the_batch() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    let options = EngineOptions { batch_invariant: true, ..model.options("cuda:0,cuda:1") };
    let together = answers(&options).unwrap();
    let engine = Engine::create(&options).unwrap();
    for (number, request) in requests().enumerate() {
        let alone = run(&engine, [request].into_iter()).unwrap();
        assert_eq!(alone[&(number as u64)], together[&(number as u64)], "request {number}");
    }
}

/// Rank 0 samples on its device, and the others get the tokens from it, so logits stay on the
/// device.
#[test]
fn sampling_stays_on_the_device_of_rank_0() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    let engine = Engine::create(&model.options("cuda:0,cuda:1")).unwrap();
    let sampled = |request: Request| Request { sampling: SamplingParams { logprobs: None, ..request.sampling.clone() }, ..request };
    let before = cuda::shim().bytes_read();
    run(&engine, [request(1, 10, 30)].into_iter().map(sampled)).unwrap();
    let each = (cuda::shim().bytes_read() - before) / 30;
    assert!(each < 4 * 127, "{each} bytes are read for each token");
}

/// Checks that an engine with this failure ends its request within a bounded time, and that the
/// process can create another.
fn assert_ends(nccl: &Nccl, options: &EngineOptions, fail: impl FnOnce(), expected: &[&str]) {
    let engine = Engine::create(options).unwrap();
    run(&engine, [request(0, 5, 4)].into_iter()).unwrap();
    fail();
    let error = run(&engine, [request(1, 5, 60)].into_iter()).expect_err("a worker has failed");
    assert!(expected.iter().any(|expected| error.message().contains(expected)), "{error}");
    let after = engine.step().err().or(engine.add_request(request(2, 5, 4)).err()).expect("the engine has failed");
    assert_eq!(after.code(), Code::Internal, "{after}");
    drop(engine);
    assert_freed(nccl);
    run(&Engine::create(&patient(options)).unwrap(), [request(3, 5, 4)].into_iter()).unwrap();
}

#[test]
fn an_error_of_a_call_ends_the_engine() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    for division in [(2, 1), (1, 2)] {
        let options = patient(&impatient(model.divided("cuda:0,cuda:1", division.0, division.1)));
        let expected = ["NCCL failed to exchange data with other workers: unhandled system error (2)", "rank 1 has ended"];
        at_once(|| assert_ends(nccl, &options, || cuda::shim().fail("ncclGroupEnd", 21, SYSTEM_ERROR), &expected));
    }
}

#[test]
fn an_error_during_an_exchange_ends_the_engine() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let options = patient(&impatient(model.options("cuda:0,cuda:1")));
    let expected = ["remote process exited or there was a network error (6)", "rank 1 has ended"];
    at_once(|| assert_ends(nccl, &options, || cuda::shim().fail("nccl_exchange", 12, REMOTE_ERROR), &expected));
}

#[test]
fn a_worker_that_hangs_ends_the_engine_after_the_timeout() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    for division in [(2, 1), (1, 2)] {
        let options = impatient(model.divided("cuda:0,cuda:1", division.0, division.1));
        let fail = || cuda::shim().fail("nccl_exchange", 9, IN_PROGRESS);
        assert_ends(nccl, &options, fail, &[&not_responded()]);
    }
}

#[test]
fn an_abort_that_does_not_return_is_left_behind() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let engine = Engine::create(&impatient(model.options("cuda:0,cuda:1"))).unwrap();
    nccl.hold_aborts(true);
    cuda::shim().fail("nccl_exchange", 12, REMOTE_ERROR);
    let error = run(&engine, [request(1, 5, 60)].into_iter()).expect_err("a worker has failed");
    assert_eq!(error.code(), Code::Internal, "{error}");
    drop(engine);
    assert_eq!(aborting_threads(), 2, "both devices");
    nccl.hold_aborts(false);
    let began = Instant::now();
    while aborting_threads() > 0 {
        assert!(began.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(10));
    }
    assert_freed(nccl);
}

/// Returns the number of threads that call ncclCommAbort.
fn aborting_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path());
    threads.filter(|thread| std::fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "pagedllm-abort\n")).count()
}

#[test]
fn an_operation_that_fails_on_one_device_ends_the_engine() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let options = patient(&impatient(model.options("cuda:0,cuda:1")));
    let expected = ["too many resources requested for launch", "rank 1 has ended"];
    at_once(|| assert_ends(nccl, &options, || cuda::shim().fail("cuLaunchKernelEx", 31, 701), &expected));
}

/// Memory that the first exchange uses is freed only when that has ended.
#[test]
fn a_first_exchange_that_hangs_is_an_error_after_the_timeout() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    cuda::shim().fail("nccl_exchange", 1, IN_PROGRESS);
    let error = Engine::create(&impatient(model.options("cuda:0,cuda:1"))).err().unwrap();
    assert!(error.message().contains(&not_responded()) || error.message().contains("rank 1"), "{error}");
    assert_freed(nccl);
}

/// An error before the ranks connect is an error of all, with its reason.
#[test]
fn a_rank_that_cannot_prepare_is_an_error_on_all_ranks() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    for nth in [1, 2] {
        cuda::shim().fail("ncclGetVersion", nth, SYSTEM_ERROR);
        let error = Engine::create(&patient(&model.options("cuda:0,cuda:1"))).err().unwrap();
        assert!(error.message().ends_with("NCCL failed to report its version: unhandled system error (2)"), "{error}");
        assert_freed(nccl);
    }
}

#[test]
fn workers_that_cannot_connect_are_an_error_on_all_ranks() {
    let Some((_one, nccl)) = alone() else { return };
    let model = Model::new(&llama());
    let options = impatient(model.options("cuda:0,cuda:1"));
    cuda::shim().fail("ncclGetUniqueId", 1, SYSTEM_ERROR);
    let error = Engine::create(&options).err().unwrap();
    assert_eq!(error.message(), "internal error: NCCL failed to create an identity: unhandled system error (2)");
    assert_freed(nccl);
    // One rank fails, and the other one waits for it in vain.
    cuda::shim().fail("ncclCommInitRank", 1, SYSTEM_ERROR);
    let error = at_once(|| Engine::create(&patient(&options)).err().unwrap());
    // The reason is that of the rank that has failed.
    assert!(error.message().ends_with("NCCL failed to connect the workers: unhandled system error (2)"), "{error}");
    run(&Engine::create(&patient(&options)).unwrap(), [request(0, 5, 4)].into_iter()).unwrap();
}

#[test]
fn a_rank_that_never_comes_is_an_error_after_the_timeout() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    let mut ranks = Local::group(2);
    let mut options = impatient(model.divided("cuda:0", 2, 1));
    options.workers.communicator = Some(CommunicatorHandle::new(Arc::new(ranks.remove(0))));
    let error = Engine::create(&options).err().unwrap();
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().starts_with(&format!("internal error: rank 1 has sent nothing for {}.", SHORT.as_secs())), "{error}");
}

#[test]
fn the_memory_plan_counts_the_exchange_and_steps_allocate_nothing() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    let options = model.options("cuda:0,cuda:1");
    let planned = Engine::plan(&options).unwrap();
    let engine = Engine::create(&options).unwrap();
    assert_eq!(engine.info().memory, planned);
    run(&engine, [request(0, 5, 3)].into_iter()).unwrap();
    let before = cuda::shim().allocation_calls();
    run(&engine, requests()).unwrap();
    assert_eq!(cuda::shim().allocation_calls(), before);
}

#[test]
fn the_memory_for_exchanges_is_that_of_the_plan() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    // Workers of one stage add rows of partial results. Stages only send them, and rank 0 receives
    // logits.
    let work_bytes = |tensor, pipeline| Engine::plan(&model.divided("cuda:0", tensor, pipeline)).unwrap().work_bytes;
    assert_eq!(work_bytes(1, 2) - work_bytes(1, 1), 8 * 127 * 4);
    let backend = on_devices(2, |backend, _| backend).pop().unwrap();
    assert_eq!(backend.reserved_exchange_bytes(64 * 64, 2), 2 * 64 * 64 * 4);
    let mut reserved = 0;
    for (number, len) in [1_024, 64 * 64, 100_001].into_iter().enumerate() {
        let (before, planned) = (cuda::shim().live_bytes(), backend.reserved_exchange_bytes(len, 2));
        backend.reserve_exchange(len).unwrap();
        // The memory of the first exchange is replaced, too.
        assert!(number == 0 || cuda::shim().live_bytes() - before == planned - reserved, "{len} numbers");
        reserved = planned;
    }
}

#[test]
fn lists_of_devices_must_match_the_numbers_of_workers() {
    let Some((_one, _)) = alone() else { return };
    let model = Model::new(&llama());
    let message = |options: &EngineOptions| Engine::create(options).err().unwrap().message().to_string();
    let three = message(&model.divided("cuda:0,cuda:1,cuda:2", 2, 1));
    assert_eq!(
        three,
        "device names 3 devices, and tensor_parallel 2 times pipeline_parallel 1 is 2; give the same number, or leave tensor_parallel out"
    );
    assert!(message(&model.options("cuda:0,cpu")).contains("has CPUs and CUDA devices"));
    assert!(message(&model.options("cuda:1,cuda:1")).contains("names device 2 twice"));
    assert!(message(&model.options("cuda:0,")).contains("must be \"cpu\" or \"cuda:N\""));
    assert!(message(&impatient(model.options("cuda:0,cuda:7"))).contains("this machine has 4 CUDA devices"));
}
