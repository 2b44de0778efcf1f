//! Machines on which CUDA is old, missing or lost, and engines that share a device. Each test runs in a
//! process of its own, which has its own driver. On a machine with a device, these tests are skipped.

#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::path::Path;
use std::process::Command;

use pagedllm::backend::cuda::CudaBackend;
use pagedllm::backend::{Alloc, RowSource, Section};
use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::{Code, Error, Result};
use pagedllm::ffi::{
    PLLM_ENGINE_SKIP_TOKENIZER, pllm_engine, pllm_engine_create, pllm_engine_free, pllm_engine_health, pllm_engine_options,
    pllm_engine_options_init, pllm_error_free, pllm_error_message,
};
use pagedllm::types::options::{Dtype, EngineOptions, SamplingParams, WeightFormat};
use serde_json::json;
use support::cuda::{self, NO_CUBLASLT, OLD_DRIVER, SHIM_PARTS};
use support::{Random, TempDir, write_random_model};

const ILLEGAL_ADDRESS: i32 = 700;
/// Environment variable with the name of the test in its own process.
const CASE: &str = "PAGEDLLM_DEPLOYMENT_CASE";
/// Seconds after which a process of a test is ended.
const LIMIT: u32 = 300;

/// Runs the body of a test in a process of its own, with `parts` of the replacement.
fn in_own_process(name: &str, parts: &str, body: impl FnOnce()) {
    run_in(&std::env::current_exe().unwrap(), name, parts, body);
}

/// The same with another file of this program.
fn run_in(program: &Path, name: &str, parts: &str, body: impl FnOnce()) {
    if std::env::var("PAGEDLLM_CUDA_DEVICE").is_ok() {
        return;
    }
    if std::env::var(CASE).is_ok_and(|case| case == name) {
        // SAFETY: a call without pointers. A test that hangs ends.
        unsafe { libc::alarm(LIMIT) };
        return body();
    }
    cuda::shim(); // builds the replacement, which may take longer than the limit of a test
    let mut command = Command::new(program);
    command.args(["--exact", name, "--nocapture"]).env(CASE, name).env(SHIM_PARTS, parts);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success() && text[0].contains("1 passed"), "{}: {}\n{}", output.status, text[0], text[1]);
}

struct Model(TempDir);

impl Model {
    fn new() -> Model {
        let dir = TempDir::new();
        let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 127, "max_position_embeddings": 128,
            "eos_token_id": 2});
        write_random_model(&dir.0, &config, true, 3);
        Model(dir)
    }

    fn options(&self, device: &str) -> EngineOptions {
        EngineOptions {
            model_dir: self.0.0.clone(),
            device: device.into(),
            skip_tokenizer: true,
            kv_bytes: Some(1 << 20),
            max_batch_tokens: 32,
            max_seqs: 4,
            ..Default::default()
        }
    }

    fn create(&self, device: &str) -> Result<Engine> {
        Engine::create(&self.options(device))
    }

    /// Creates an engine on a CUDA device by the C API, which frees it.
    fn by_the_c_api(&self, device: &str) -> *mut pllm_engine {
        cuda::shim();
        let path = self.0.0.to_str().unwrap();
        let (mut options, mut engine) = (std::mem::MaybeUninit::uninit(), std::ptr::null_mut());
        // SAFETY: the options are written completely, and the strings live until the call returns.
        let error = unsafe {
            pllm_engine_options_init(options.as_mut_ptr(), size_of::<pllm_engine_options>() as u64);
            let options = options.assume_init_mut();
            (options.model_path, options.model_path_len) = (path.as_ptr().cast(), path.len() as u64);
            (options.device, options.device_len) = (device.as_ptr().cast(), device.len() as u64);
            (options.kv_bytes, options.flags) = (1 << 20, PLLM_ENGINE_SKIP_TOKENIZER);
            pllm_engine_create(options, &mut engine)
        };
        assert!(error.is_null());
        engine
    }

    /// Creates an engine on a CUDA device of the replacement.
    fn on_device(&self, device: &str) -> Result<Engine> {
        cuda::shim();
        self.create(device)
    }

    fn refused(&self, device: &str, code: Code, words: &[&str]) {
        let error = self.create(device).err().unwrap();
        assert_eq!(error.code(), code, "{error}");
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    }
}

/// Returns the tokens of some requests, or the error of a failed one.
fn run(engine: &Engine) -> Result<Vec<u32>> {
    let mut random = Random(9);
    for user_data in 0..3 {
        let prompt = (0..30).map(|_| random.below(127) as u32).collect();
        let sampling = SamplingParams { temperature: 0.0, max_tokens: Some(5), ignore_eos: true, ..Default::default() };
        engine.add_request(Request { user_data, ..Request::new(Prompt::Tokens(prompt), sampling) })?;
    }
    let (mut tokens, mut failure, mut ended): (Vec<_>, Option<Error>, _) = (vec![Vec::new(); 3], None, 0);
    while ended < 3 {
        let _ = engine.step();
        for output in engine.queue().poll(Some(Default::default())).unwrap() {
            ended += output.finish.is_some() as u32;
            failure = output.error.or(failure);
            tokens[output.user_data as usize].extend_from_slice(&output.tokens);
        }
    }
    failure.map_or(Ok(tokens.concat()), Err)
}

/// Functions that cuda.h of CUDA 12.0 declares. The replacement has what the library uses, so a newer
/// function that the library cannot do without is found here.
#[test]
fn the_library_uses_functions_of_cuda_12_only() {
    if std::env::var("PAGEDLLM_CUDA_DEVICE").is_ok() {
        return;
    }
    cuda::shim(); // builds the replacement
    let declared: BTreeSet<&str> = include_str!("cuda-12.0-functions.txt").lines().collect();
    let driver = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-shim/cuda-12.0/libcuda.so");
    let output = Command::new("nm").args(["--dynamic", "--defined-only"]).arg(driver).output().unwrap();
    let symbols = String::from_utf8(output.stdout).unwrap();
    let functions: Vec<_> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).filter(|name| name.starts_with("cu")).collect();
    assert!(functions.contains(&"cuLaunchKernelEx"), "nm printed {symbols}");
    for function in functions {
        assert!(declared.contains(function), "{function} is newer than CUDA 12.0");
    }
}

#[test]
fn a_driver_for_cuda_12_serves() {
    in_own_process("a_driver_for_cuda_12_serves", OLD_DRIVER, || {
        let (model, shim) = (Model::new(), cuda::shim());
        for newer in [c"cuCtxCreate_v4", c"cuFuncLoad"] {
            assert!(!shim.has(newer), "the replacement has {newer:?}");
        }
        let engine = model.on_device("cuda:0").unwrap();
        assert_eq!(run(&engine).unwrap().len(), 15);
        assert!(engine.info().blas_library.starts_with("cuBLASLt 12.9.1 (/"), "{}", engine.info().blas_library);
    });
}

#[test]
fn the_invariant_mode_refuses_tensor_cores_that_change_sums() {
    in_own_process("the_invariant_mode_refuses_tensor_cores_that_change_sums", "", || {
        let (model, shim) = (Model::new(), cuda::shim());
        let create = |batch_invariant| Engine::create(&EngineOptions { batch_invariant, ..model.options("cuda:0") });
        assert_eq!(run(&create(true).unwrap()).unwrap().len(), 15);
        for (mma, wgmma, instruction) in [(true, false, "(mma.sync)"), (false, true, "(wgmma)")] {
            shim.pretend_inexact(mma, wgmma);
            let error = create(true).err().unwrap();
            assert_eq!(error.code(), Code::Unsupported, "{error}");
            for words in ["PLLM_ENGINE_BATCH_INVARIANT", instruction, "create the engine without it"] {
                assert!(error.message().contains(words), "{error}");
            }
            assert_eq!(run(&create(false).unwrap()).unwrap().len(), 15);
        }
        // Other devices have no wgmma.
        shim.pretend_capability(8, 0);
        assert_eq!(run(&create(true).unwrap()).unwrap().len(), 15);
    });
}

#[test]
fn a_machine_without_a_driver_serves_on_the_cpu() {
    in_own_process("a_machine_without_a_driver_serves_on_the_cpu", "", || {
        let model = Model::new();
        // The replacement is not loaded in this process.
        model.refused("cuda:0", Code::Unsupported, &["cuda:0", "no CUDA driver (libcuda.so)", "set device to \"cpu\""]);
        assert_eq!(run(&model.create("cpu").unwrap()).unwrap().len(), 15);
    });
}

#[test]
fn own_kernels_replace_a_missing_cublaslt_and_the_engine_reports_it() {
    in_own_process("own_kernels_replace_a_missing_cublaslt_and_the_engine_reports_it", NO_CUBLASLT, || {
        let model = Model::new();
        let engine = model.on_device("cuda:0").unwrap();
        assert_eq!(run(&engine).unwrap().len(), 15);
        let report = &engine.info().blas_library;
        for words in ["own kernels: ", "libcublasLt.so.13 and libcublasLt.so.12", "/usr/local/cuda/lib64", "install NVIDIA's cuBLAS"] {
            assert!(report.contains(words), "{report}");
        }
        assert_eq!(model.create("cpu").unwrap().info().blas_library, "");
    });
}

#[test]
fn cublaslt_is_found_in_a_python_package_beside_the_library() {
    let name = "cublaslt_is_found_in_a_python_package_beside_the_library";
    let (packages, program) = (TempDir::new(), std::env::current_exe().unwrap());
    let [own, blas] = ["pagedllm", "nvidia/cublas/lib"].map(|folder| packages.0.join(folder));
    let copy = own.join("program");
    if std::env::var(CASE).is_err() {
        cuda::shim(); // builds the replacement
        for folder in [&own, &blas] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-shim/libcublasLt.so.12");
        std::fs::copy(built, blas.join("libcublasLt.so.12")).unwrap();
        std::fs::copy(program, &copy).unwrap();
    }
    run_in(&copy, name, NO_CUBLASLT, || {
        let engine = Model::new().on_device("cuda:0").unwrap();
        let report = &engine.info().blas_library;
        assert!(report.starts_with("cuBLASLt 12.9.1 (") && report.ends_with("/nvidia/cublas/lib/libcublasLt.so.12)"), "{report}");
        assert_eq!(run(&engine).unwrap().len(), 15);
    });
}

#[test]
fn engines_of_a_device_share_its_context() {
    in_own_process("engines_of_a_device_share_its_context", "", || {
        let (model, shim) = (Model::new(), cuda::shim());
        shim.pretend_devices(2);
        let first = model.on_device("cuda:0").unwrap();
        assert_eq!(shim.contexts(), 1);
        let second = model.create("cuda:0").unwrap();
        assert_eq!(shim.contexts(), 1);
        let other = model.create("cuda:1").unwrap();
        assert_eq!(shim.contexts(), 2);
        let expected = run(&first).unwrap();
        // At the same time, from several threads.
        let found = std::thread::scope(|scope| {
            let threads = [&first, &second, &other].map(|engine| scope.spawn(move || run(engine).unwrap()));
            threads.map(|thread| thread.join().unwrap())
        });
        assert!(found.iter().all(|found| *found == expected), "{found:?}, alone {expected:?}");
        drop(first);
        assert_eq!((shim.contexts(), run(&second).unwrap()), (2, expected));
        drop((second, other));
        assert_eq!((shim.contexts(), shim.live_bytes(), shim.pinned_bytes()), (0, 0, 0));
    });
}

#[test]
fn a_lost_context_fails_the_engines_that_share_it_and_no_other() {
    in_own_process("a_lost_context_fails_the_engines_that_share_it_and_no_other", "", || {
        let (model, shim) = (Model::new(), cuda::shim());
        shim.pretend_devices(2);
        let [faulty, shares, other, cpu] = ["cuda:0", "cuda:0", "cuda:1", "cpu"].map(|device| model.on_device(device).unwrap());
        let expected = run(&shares).unwrap();
        let on_cpu = run(&cpu).unwrap();
        shim.fail("cuGraphLaunch", 2, ILLEGAL_ADDRESS);
        for engine in [&faulty, &shares] {
            let error = run(engine).unwrap_err();
            for words in ["CUDA_ERROR_ILLEGAL_ADDRESS", "free all engines of this process on this device"] {
                assert!(error.message().contains(words), "{error}");
            }
            assert_eq!(run(engine).unwrap_err(), error, "later requests are refused");
        }
        assert_eq!((run(&other).unwrap(), run(&cpu).unwrap()), (expected.clone(), on_cpu));
        // Also before the failed engines are freed.
        let next = model.create("cuda:0").unwrap();
        assert_eq!(run(&next).unwrap(), expected);
        drop((faulty, shares));
        assert_eq!(run(&next).unwrap(), expected);
        drop((next, other));
        assert_eq!((shim.contexts(), shim.live_bytes()), (0, 0));
    });
}

#[test]
fn a_device_with_too_little_memory_is_refused_with_the_numbers() {
    in_own_process("a_device_with_too_little_memory_is_refused_with_the_numbers", "", || {
        let (model, shim) = (Model::new(), cuda::shim());
        let engine = model.on_device("cuda:0").unwrap();
        let expected = run(&engine).unwrap();
        let (total, left) = (1 << 30, 300_000);
        shim.pretend_memory(total, total - shim.live_bytes() - left);
        model.refused("cuda:0", Code::OutOfMemory, &["device memory", "of 1073741824"]);
        assert_eq!(run(&engine).unwrap(), expected);
        shim.pretend_memory(total, 0);
        assert_eq!(run(&model.create("cuda:0").unwrap()).unwrap(), expected);
    });
}

#[test]
fn a_matrix_whose_source_fails_leaves_no_memory() {
    in_own_process("a_matrix_whose_source_fails_leaves_no_memory", "", || {
        let shim = cuda::shim();
        let backend = CudaBackend::new(0, false).unwrap();
        // It fails after several transfers were queued.
        let read = |first: usize, out: &mut [u8]| {
            out.fill(0);
            if first < 300 { Ok(()) } else { Err(Error::model("the file ends here")) }
        };
        let sections = [Section::numbers(700, Dtype::F32, WeightFormat::F32)];
        let before = (shim.live_bytes(), shim.pinned_bytes());
        let error = backend.matrix(1 << 14, &sections, RowSource { read: &read, advance: &mut |_| Ok(()) }).err().unwrap();
        assert_eq!(error.message(), "the file ends here");
        backend.end_loading();
        assert_eq!((shim.live_bytes(), shim.pinned_bytes()), before);
    });
}

/// Returns the error that an engine reports about itself, or an empty text.
fn health(engine: *const pllm_engine) -> String {
    // SAFETY: the engine lives, and the message is copied before the error is freed.
    unsafe {
        let error = pllm_engine_health(engine);
        if error.is_null() {
            return String::new();
        }
        let message = CStr::from_ptr(pllm_error_message(error)).to_string_lossy().into_owned();
        pllm_error_free(error);
        message
    }
}

/// Runs a function in a fork of this process, and returns whether it has succeeded.
fn in_fork(call: impl FnOnce() + std::panic::UnwindSafe) -> bool {
    // SAFETY: the child only calls the library, and ends without running destructors of the parent.
    match unsafe { libc::fork() } {
        0 => {
            let failed = std::panic::catch_unwind(call).is_err();
            // SAFETY: ends the child.
            unsafe { libc::_exit(failed.into()) }
        }
        child => {
            let mut status = 1;
            // SAFETY: the child exists, and the status is written.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status == 0
        }
    }
}

#[test]
fn cuda_in_a_fork_is_refused_with_the_reason() {
    in_own_process("cuda_in_a_fork_is_refused_with_the_reason", "", || {
        let model = Model::new();
        let engine = model.by_the_c_api("cuda:0");
        assert_eq!(health(engine), "");
        let refused = in_fork(std::panic::AssertUnwindSafe(|| {
            // SAFETY: a call without pointers. A child that hangs ends.
            unsafe { libc::alarm(60) };
            let error = health(engine);
            assert!(error.contains("is a fork"), "{error}");
            model.refused("cuda:0", Code::Unsupported, &["is a fork of one that has used CUDA", "set device to \"cpu\""]);
            // SAFETY: this process does not use the engine afterwards.
            unsafe { pllm_engine_free(engine) };
        }));
        assert!(refused, "the child fails or hangs");
        assert_eq!(health(engine), "");
        // SAFETY: as above.
        unsafe { pllm_engine_free(engine) };
        assert_eq!(run(&model.create("cuda:0").unwrap()).unwrap().len(), 15);
    });
}

/// The application has used CUDA before the fork, and not the library.
#[test]
fn a_driver_that_does_not_start_in_a_fork_is_refused_with_the_reason() {
    in_own_process("a_driver_that_does_not_start_in_a_fork_is_refused_with_the_reason", "", || {
        let model = Model::new();
        cuda::shim().start();
        assert!(in_fork(std::panic::AssertUnwindSafe(|| {
            // SAFETY: as above.
            unsafe { libc::alarm(60) };
            model.refused("cuda:0", Code::Unsupported, &["is a fork of one that has used CUDA"]);
        })));
        assert_eq!(run(&model.create("cuda:0").unwrap()).unwrap().len(), 15);
    });
}
