//! Engines on a simulated CUDA device: its kernels run on the host (tests/cuda), and its driver
//! injects failures.

#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::backend::{Alloc, Ops, RowSource, Section};
use pagedllm::engine::{Engine, MemoryPlan, Prompt, Request, Resume};
use pagedllm::error::{Code, Error};
use pagedllm::model::spec::Role;
use pagedllm::types::batch::Batch;
use pagedllm::types::options::{Dtype, EngineOptions, Isa, KvDtype, Preemption, SamplingParams, WeightFormat};
use pagedllm::types::outputs::FinishReason;
use serde_json::{Value, json};
use support::distance::relative_distance;
use support::{Random, TempDir, configs, cuda, write_random_model};

/// Result codes of the driver.
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

/// Settings of the driver affect all threads, so tests run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A model whose heads have a tensor core kernel.
fn llama(positions: usize) -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 127, "max_position_embeddings": positions, "eos_token_id": 2})
}

/// A model whose latents have the widths of a tensor core kernel.
fn deepseek(positions: usize) -> Value {
    json!({"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 48, "num_attention_heads": 3, "q_lora_rank": 32, "kv_lora_rank": 512,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16, "num_hidden_layers": 1, "intermediate_size": 64,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "vocab_size": 127, "max_position_embeddings": positions, "eos_token_id": 2})
}

struct Model(TempDir);

impl Model {
    fn new(config: &Value, bf16: bool) -> Model {
        let dir = TempDir::new();
        write_random_model(&dir.0, config, bf16, 3);
        Model(dir)
    }

    fn options(&self, device: &str) -> EngineOptions {
        cuda::shim();
        EngineOptions {
            model_dir: self.0.0.clone(),
            device: device.into(),
            skip_tokenizer: true,
            kv_bytes: Some(4 << 20),
            max_batch_tokens: 64,
            max_seqs: 16,
            ..Default::default()
        }
    }
}

fn request(number: usize, prompt: usize, tokens: usize) -> Request {
    let mut random = Random(number as u64 + 9);
    let prompt = (0..prompt).map(|_| random.below(127) as u32).collect();
    let sampling = SamplingParams { temperature: 0.0, max_tokens: Some(tokens), ignore_eos: true, logprobs: Some(0), ..Default::default() };
    Request { user_data: number as u64, ..Request::new(Prompt::Tokens(prompt), sampling) }
}

/// With a logits hook the host samples.
fn sampled_by_the_host(request: Request) -> Request {
    Request { hook: Some(Arc::new(|_, _: &[u32], _: &mut [f32]| {})), ..request }
}

/// Tokens of each request, with their log probabilities.
type Answers = BTreeMap<u64, Vec<(u32, u32)>>;

/// Returns the outputs of all requests, or the error of a failed one.
fn run(engine: &Engine, requests: impl Iterator<Item = Request>) -> Result<Answers, Error> {
    let expected: u32 = requests.map(|request| (request.n, engine.add_request(request).unwrap()).0).sum();
    let (mut answers, mut failure, mut ended) = (Answers::new(), None, 0);
    while ended < expected {
        // The last outputs of its requests contain the error of a failed step.
        let _ = engine.step();
        for output in engine.queue().poll(Some(Default::default())).unwrap() {
            ended += output.finish.is_some() as u32;
            failure = output.error.or(failure);
            let pairs = output.tokens.iter().copied().zip(output.logprobs.tokens.iter().map(|p| p.to_bits()));
            answers.entry(output.user_data).or_default().extend(pairs);
        }
    }
    failure.map_or(Ok(answers), Err)
}

fn answers(options: &EngineOptions, requests: impl Iterator<Item = Request>) -> Answers {
    let engine = Engine::create(options).unwrap();
    run(&engine, requests).unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error()))
}

fn tokens(answers: &Answers) -> Vec<Vec<u32>> {
    answers.values().map(|pairs| pairs.iter().map(|pair| pair.0).collect()).collect()
}

fn requests() -> impl Iterator<Item = Request> {
    [5, 1, 40, 17, 90].into_iter().enumerate().map(|(i, prompt)| request(i, prompt, 12))
}

/// Returns the kernels of a layer that run in a step with a prompt of 40 tokens, and in a decode step.
/// The products of the prompt by cuBLASLt are not among them.
fn launches_of_a_layer() -> [u64; 2] {
    let run_with = |layers: u64, new_tokens: usize| {
        let mut config = llama(128);
        config["num_hidden_layers"] = layers.into();
        let engine = Engine::create(&Model::new(&config, true).options("cuda:0")).unwrap();
        let before = cuda::shim().launches();
        run(&engine, [request(1, 40, new_tokens)].into_iter()).unwrap();
        cuda::shim().launches() - before
    };
    let of_two_layers = |new_tokens| run_with(3, new_tokens) - run_with(1, new_tokens);
    let [prompt, more] = [1, 5].map(of_two_layers);
    [prompt / 2, (more - prompt) / 8]
}

#[test]
fn a_layer_takes_few_launches() {
    let _one = alone();
    if cuda::shim().pretends() {
        // Norm, store of K and V, attention, addition with norm, gate, addition: no product needs a conversion.
        // Decode has four products, with norms, gate and additions, and attention stores K and V.
        assert_eq!(launches_of_a_layer(), [6, 5]);
    }
}

/// Models of every decoder shape, with chunked prompts and decodes in one batch.
#[test]
fn models_have_the_outputs_of_the_cpu() {
    let _one = alone();
    for (name, config) in configs(256) {
        let model = Model::new(&config, false);
        let [on_cpu, on_device] = ["cpu", "cuda:0"].map(|device| answers(&model.options(device), requests()));
        let mut equal = 0;
        for (request, expected) in &on_cpu {
            for (i, ((token, logprob), (expected, cpu_logprob))) in on_device[request].iter().zip(expected).enumerate() {
                let [logprob, cpu_logprob] = [logprob, cpu_logprob].map(|bits| f32::from_bits(*bits));
                assert!(
                    (logprob - cpu_logprob).abs() < 1e-3,
                    "{name}: token {i} of request {request}: {logprob}, on the CPU {cpu_logprob}"
                );
                if token != expected {
                    break; // equally probable: the outputs differ from here on
                }
                equal += 1;
            }
        }
        assert!(equal > 40, "{name}: only {equal} of 60 tokens equal those of the CPU");
    }
}

/// Mean difference of the log probabilities of two engines, over their common tokens.
fn distance(found: &Answers, expected: &Answers) -> f32 {
    // After the first different token the contexts differ.
    let common = expected
        .iter()
        .flat_map(|(request, expected)| found[request].iter().zip(expected).take_while(|(found, expected)| found.0 == expected.0));
    let errors: Vec<f32> = common.map(|(found, expected)| (f32::from_bits(found.1) - f32::from_bits(expected.1)).abs()).collect();
    assert!(errors.len() > 4, "only {} tokens are equal", errors.len());
    errors.iter().sum::<f32>() / errors.len() as f32
}

/// A device with fp8 weights differs from the CPU with the same rounded weights only by rounding
/// activations to bf16. Steps of more rows, whose activations become fp8 too, differ more: on an
/// H100 by up to 0.12. Rounding the weights has a visible effect.
#[test]
fn fp8_weights_equal_rounded_weights_on_the_cpu() {
    let _one = alone();
    for (name, config) in configs(256) {
        let model = Model::new(&config, false);
        let fp8 = EngineOptions { weight_format: Some(WeightFormat::Fp8), ..model.options("cuda:0") };
        let few_rows = EngineOptions { max_batch_tokens: 16, ..fp8 };
        let many_rows = EngineOptions { max_batch_tokens: 128, ..few_rows.clone() };
        let [few, many] = [few_rows, many_rows].map(|options| answers(&options, requests()));
        let before = answers(&model.options("cpu"), requests());
        support::fp8::round_model(&model.0.0);
        let rounded = answers(&model.options("cpu"), requests());
        let errors = [&few, &many, &before].map(|other| distance(other, &rounded));
        assert!(errors[0] < 0.02 && errors[1] < 0.15 && errors[2] > 0.04, "{name}: {errors:?}");
    }
}

/// Matrices of layers take one byte per number, padded to 16, and four bytes per row. The embedding
/// and the head are as stored.
#[test]
fn weights_in_fp8_take_the_bytes_that_were_planned() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let bytes = |weight_format| {
        let options = EngineOptions { weight_format, ..model.options("cuda:0") };
        let (planned, before) = (Engine::plan(&options).unwrap().weight_bytes, shim.live_bytes());
        let engine = Engine::create(&options).unwrap();
        assert_eq!(engine.info().memory.weight_bytes, planned);
        (planned, shim.live_bytes() - before)
    };
    let ((as_stored, held), (narrow, held_narrow)) = (bytes(None), bytes(Some(WeightFormat::Fp8)));
    let rows = 2 * [8 * 64, 128, 2 * 96, 128].iter().sum::<u64>();
    let numbers = 2 * (8 * 64 * 128 + 128 * 4 * 64 + 3 * 96 * 128);
    assert_eq!(as_stored - narrow, numbers - 4 * rows);
    assert_eq!(held - held_narrow, as_stored - narrow);
}

/// Returns the numbers that a matrix has on the CPU in a format.
fn in_format(values: &[f32], cols: usize, format: WeightFormat) -> Vec<f32> {
    let (cpu, rows) = (CpuBackend::new(1, Some(Isa::Portable)).unwrap(), values.len() / cols);
    let read = |first: usize, out: &mut [u8]| {
        let values = &values[first * cols..][..out.len() / 4];
        out.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
        Ok(())
    };
    let source = RowSource { read: &read, advance: &mut |_| Ok(()) };
    let table = cpu.matrix(cols, &[Section::numbers(rows, Dtype::F32, format)], source).unwrap();
    let mut inputs = Default::default();
    cpu.upload(&Batch { tokens: (0..rows as u32).collect(), positions: vec![0; rows], ..Batch::default() }, &mut inputs).unwrap();
    let mut out = cpu.buffer(rows * cols).unwrap();
    cpu.embed(&inputs, &table, 0, 1.0, &mut out);
    cpu.read(&mut out, rows * cols).unwrap().to_vec()
}

/// Checks that a device with weights in an integer format differs from the CPU with their numbers
/// only by rounding activations to bf16.
fn check_integers(name: &str, config: &Value, format: WeightFormat) {
    let model = Model::new(config, false);
    let on_device = EngineOptions { weight_format: Some(format), ..model.options("cuda:0") };
    let [few_rows, many_rows] = [16, 128].map(|max_batch_tokens| EngineOptions { max_batch_tokens, ..on_device.clone() });
    let [few, many] = [few_rows, many_rows].map(|options| answers(&options, requests()));
    let before = answers(&model.options("cpu"), requests());
    let vocabulary = if matches!(format, WeightFormat::Int4 { .. }) { WeightFormat::Int8 } else { format };
    support::fp8::round_model_by(&model.0.0, &|role, values, cols| match role {
        Role::Inner => in_format(values, cols, format),
        Role::Vocabulary => in_format(values, cols, vocabulary),
        Role::Exact => values.to_vec(),
    });
    let rounded = answers(&model.options("cpu"), requests());
    let errors = [&few, &many].map(|other| distance(other, &rounded));
    assert!(errors[0] < 0.02 && errors[1] < 0.02, "{name} in {format:?}: {errors:?}");
    if format != WeightFormat::Int8 {
        assert_ne!(tokens(&before), tokens(&rounded), "{name}: {format:?} rounds");
    }
}

/// All families in int8, and every form of int4.
#[test]
fn integer_weights_equal_their_numbers_on_the_cpu() {
    let _one = alone();
    for (name, config) in configs(256) {
        check_integers(name, &config, WeightFormat::Int8);
    }
    let mut config = llama(256);
    config["intermediate_size"] = 128.into();
    for group in WeightFormat::GROUPS {
        for offsets in [false, true] {
            check_integers("llama", &config, WeightFormat::Int4 { group, offsets });
        }
    }
}

/// In int8, a number takes one byte, and a row four bytes; rows are padded to 16 bytes. In int4, 256
/// numbers of a row take 144 bytes, or 160 with offsets. The embedding and the head are in int8.
#[test]
fn weights_in_integers_take_the_bytes_that_were_planned() {
    let _one = alone();
    let mut config = llama(128);
    (config["hidden_size"], config["intermediate_size"]) = (256.into(), 512.into());
    let (model, shim) = (Model::new(&config, true), cuda::shim());
    let bytes = |weight_format| {
        let options = EngineOptions { weight_format: Some(weight_format), ..model.options("cuda:0") };
        let (planned, before) = (Engine::plan(&options).unwrap().weight_bytes, shim.live_bytes());
        let engine = Engine::create(&options).unwrap();
        assert_eq!(engine.info().memory.weight_bytes, planned);
        (planned, shim.live_bytes() - before)
    };
    let int4 = |offsets| bytes(WeightFormat::Int4 { group: 64, offsets });
    let ((in_8, held_8), (in_4, held_4), (with_offsets, held_with_offsets)) = (bytes(WeightFormat::Int8), int4(false), int4(true));
    // Rows of a layer, and their numbers.
    let rows = 2 * [8 * 64, 256, 2 * 512, 256].iter().sum::<u64>();
    let numbers = 2 * (8 * 64 * 256 + 256 * 256 + 3 * 512 * 256);
    assert_eq!(in_8 - in_4, numbers + 4 * rows - numbers / 256 * 144);
    assert_eq!(with_offsets - in_4, numbers / 256 * 16);
    assert_eq!((held_8 - held_4, held_with_offsets - held_4), (in_8 - in_4, with_offsets - in_4));
}

/// Returns the relative distance of log probabilities, up to the first token that differs, because it
/// was equally probable.
fn relative_logprob_distance(found: &Answers, expected: &Answers) -> f64 {
    let (mut of_found, mut of_expected) = (Vec::new(), Vec::new());
    for (request, expected) in expected {
        for ((token, logprob), (expected_token, expected_logprob)) in found[request].iter().zip(expected) {
            of_found.push(f32::from_bits(*logprob));
            of_expected.push(f32::from_bits(*expected_logprob));
            if token != expected_token {
                break;
            }
        }
    }
    relative_distance(&of_found, &of_expected)
}

#[test]
fn every_kv_dtype_has_outputs_close_to_the_cpu() {
    let _one = alone();
    let model = Model::new(&llama(256), false); // products do not round, so only attention differs
    for kv_dtype in KvDtype::ALL {
        let options = |device| EngineOptions { kv_dtype: Some(kv_dtype), ..model.options(device) };
        let [on_cpu, on_device] = ["cpu", "cuda:0"].map(|device| answers(&options(device), requests()));
        let bound = match kv_dtype {
            KvDtype::F32 => 1e-5,
            KvDtype::F16 => 1e-3,
            KvDtype::Bf16 => 4e-3,
            // A number of K or V that is rounded to a neighbour differs by more than bf16 does.
            KvDtype::Int8 | KvDtype::Fp8 => 2e-2,
        };
        let distance = relative_logprob_distance(&on_device, &on_cpu);
        assert!(distance <= bound, "{kv_dtype:?}: the log probabilities have a relative distance of {distance:e} from those of the CPU");
    }
}

/// Only attention rounds. Its memory is in the plan, and sequences are in several parts.
#[test]
fn latents_on_tensor_cores_have_outputs_close_to_the_cpu() {
    let _one = alone();
    let model = Model::new(&deepseek(512), false);
    for (kv_dtype, bound) in [(KvDtype::Bf16, 4e-3), (KvDtype::F16, 1e-3)] {
        let options = |device| EngineOptions { kv_dtype: Some(kv_dtype), max_seqs: 4, ..model.options(device) };
        let requests = || [5, 40, 260].into_iter().enumerate().map(|(i, prompt)| request(i, prompt, 5));
        let free = cuda::shim().live_bytes();
        let engine = Engine::create(&options("cuda:0")).unwrap();
        let MemoryPlan { weight_bytes, kv_bytes, work_bytes, .. } = engine.info().memory;
        let (allocated, planned) = (cuda::shim().live_bytes() - free, weight_bytes + kv_bytes + work_bytes);
        assert!((planned..planned + (128 << 10)).contains(&allocated), "{allocated} bytes allocated, {planned} planned");
        let before = cuda::shim().allocation_calls();
        let on_device = run(&engine, requests()).unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error()));
        assert_eq!(cuda::shim().allocation_calls(), before);
        let distance = relative_logprob_distance(&on_device, &answers(&options("cpu"), requests()));
        assert!(distance <= bound, "{kv_dtype:?}: the log probabilities have a relative distance of {distance:e} from those of the CPU");
    }
}

#[test]
fn a_repeated_run_has_the_same_bits() {
    let _one = alone();
    let model = Model::new(&llama(256), true);
    let options = model.options("cuda");
    assert_eq!(Engine::create(&options).unwrap().info().memory.kv_dtype, KvDtype::Bf16);
    assert_eq!(answers(&options, requests()), answers(&options, requests()));
}

/// With the same sampling parameters, device and host select the same tokens.
#[test]
fn device_and_host_sample_the_same_tokens() {
    let _one = alone();
    let model = Model::new(&llama(256), true);
    let plain = SamplingParams { max_tokens: Some(9), ignore_eos: true, logprobs: Some(3), seed: Some(5), ..Default::default() };
    let rules = [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { temperature: 1.3, ..plain.clone() },
        SamplingParams { top_k: 20, top_p: 0.8, min_p: 0.01, ..plain.clone() },
        SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.5, logit_bias: vec![(7, 4.0), (3, -2.0)], ..plain.clone() },
        SamplingParams { min_tokens: 5, ignore_eos: false, bad_words_ids: vec![vec![4], vec![7, 9]], ..plain.clone() },
        SamplingParams { typical_p: 0.9, ..plain.clone() }, // only the host supports it
        SamplingParams { logprobs: None, ..plain },
    ];
    let run = |hook: bool| {
        let engine = Engine::create(&model.options("cuda:0")).unwrap();
        let requests = rules.iter().enumerate().map(|(i, sampling)| {
            let request = Request { sampling: sampling.clone(), ..request(i, 5 + i, 9) };
            if hook { sampled_by_the_host(request) } else { request }
        });
        let before = cuda::shim().bytes_read();
        let answers = run(&engine, requests).unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error()));
        (answers, cuda::shim().bytes_read() - before)
    };
    let ((host, many), (device, few)) = (run(true), run(false));
    assert_eq!(tokens(&device), tokens(&host));
    for (device, host) in device.values().flatten().zip(host.values().flatten()) {
        let [device, host] = [device.1, host.1].map(f32::from_bits);
        assert!((device - host).abs() < 1e-5, "on the device {device}, on the host {host}");
    }
    assert!(few <= many / 2, "{few} bytes were read with sampling on the device, {many} with logits");
}

/// With `batch_invariant`, a sequence has the same bits in any batch, with any chunks, and after a
/// recomputation.
#[test]
fn a_batch_invariant_sequence_has_the_same_bits_in_any_batch() {
    let _one = alone();
    let model = Model::new(&llama(256), true);
    for kv_dtype in [KvDtype::Bf16, KvDtype::F16, KvDtype::Int8, KvDtype::Fp8] {
        let options = EngineOptions { batch_invariant: true, max_batch_tokens: 256, kv_dtype: Some(kv_dtype), ..model.options("cuda:0") };
        let mut by_itself = Answers::new();
        requests().for_each(|request| by_itself.extend(answers(&options, std::iter::once(request))));
        let block = 2 * 2 * 16 * 2 * kv_dtype.head_bytes(64) as u64;
        let crowded = EngineOptions { max_batch_tokens: 24, kv_bytes: Some(14 * block), max_model_len: Some(110), ..options.clone() };
        assert_eq!(answers(&options, requests()), by_itself, "{kv_dtype:?}");
        assert_eq!(answers(&crowded, requests()), by_itself, "{kv_dtype:?}");
    }
}

/// Chunks divide a prompt into other tiles of latents.
#[test]
fn a_batch_invariant_sequence_of_latents_has_the_same_bits_in_any_batch() {
    let _one = alone();
    let model = Model::new(&deepseek(64), true);
    let options = EngineOptions { batch_invariant: true, max_seqs: 2, ..model.options("cuda:0") };
    let requests = || [33, 6].into_iter().enumerate().map(|(i, prompt)| request(i, prompt, 3));
    let mut by_itself = Answers::new();
    requests().for_each(|request| by_itself.extend(answers(&options, std::iter::once(request))));
    for max_batch_tokens in [64, 13] {
        assert_eq!(answers(&EngineOptions { max_batch_tokens, ..options.clone() }, requests()), by_itself, "{max_batch_tokens}");
    }
}

#[test]
fn memory_fraction_sizes_the_pool() {
    let _one = alone();
    let model = Model::new(&llama(128), true);
    let blocks = |fraction| {
        let options = EngineOptions { kv_bytes: None, memory_fraction: Some(fraction), ..model.options("cuda:0") };
        Engine::create(&options).map(|engine| engine.info().memory.kv_bytes)
    };
    let (half, tenth) = (blocks(0.5).unwrap(), blocks(0.1).unwrap());
    assert!(half > 300 << 20 && half.abs_diff(5 * tenth) < 1 << 20, "pools of {half} and {tenth} bytes, of 1 GiB");
    for fraction in [0.0, 1.5, f32::NAN] {
        assert_eq!(blocks(fraction).unwrap_err().code(), Code::InvalidArgument);
    }
    let both = EngineOptions { memory_fraction: Some(0.5), ..model.options("cuda:0") };
    assert!(Engine::create(&both).err().unwrap().message().contains("kv_bytes"));
    let on_cpu = EngineOptions { kv_bytes: None, memory_fraction: Some(0.5), ..model.options("cpu") };
    assert_eq!(Engine::create(&on_cpu).err().unwrap().code(), Code::Unsupported);
}

/// With a pool for a part of the sequences, swapped sequences continue with the same bits.
#[test]
fn swapped_sequences_continue_with_the_same_bits() {
    let _one = alone();
    let model = Model::new(&llama(128), false);
    let requests = || (0..6).map(|i| request(i, 20, 40));
    let roomy = answers(&model.options("cuda:0"), requests());
    let block = 2 * 2 * 16 * 2 * 64 * 4;
    for swap_dir in [None, Some(std::env::temp_dir())] {
        let tight = EngineOptions {
            kv_bytes: Some(12 * block),
            max_model_len: Some(100),
            swap_bytes: 64 * block,
            preemption: Preemption::Swap,
            swap_dir,
            ..model.options("cuda:0")
        };
        let engine = Engine::create(&tight).unwrap();
        let swapped = run(&engine, requests()).unwrap();
        assert!(engine.stats().preemptions > 0);
        assert_eq!(tokens(&swapped), tokens(&roomy));
    }
}

/// A swap while a failed step is in flight does not hide the failure: the step is recomputed.
#[test]
fn a_step_that_fails_beside_a_swap_is_retried() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), false), cuda::shim());
    let requests = || (0..6).map(|i| request(i, 20, 40));
    let expected = answers(&model.options("cuda:0"), requests());
    let block = 2 * 2 * 16 * 2 * 64 * 4;
    let tight = EngineOptions {
        kv_bytes: Some(12 * block),
        max_model_len: Some(100),
        swap_bytes: 64 * block,
        preemption: Preemption::Swap,
        ..model.options("cuda:0")
    };
    let (mut swaps, mut failures) = (0, 0);
    // The failing launches include those of a sampling after which the next step begins with a swap.
    let graphs = (1..80).step_by(6).map(|nth| ("cuGraphLaunch", nth));
    for (function, nth) in graphs.chain((104..=112).map(|nth| ("cuLaunchKernelEx", nth))) {
        let engine = Engine::create(&tight).unwrap();
        shim.fail(function, nth, OUT_OF_MEMORY);
        assert_eq!(tokens(&run(&engine, requests()).unwrap()), tokens(&expected), "{function}, call {nth}");
        shim.fail(function, 0, 0);
        (swaps, failures) = (swaps + engine.stats().blocks_swapped_out, failures + engine.stats().steps_failed);
    }
    assert!(!shim.pretends() || (swaps > 0 && failures > 5), "{swaps} swaps, {failures} failures");
}

/// The engine allocates all device memory at its creation: for prompts and decodes, sampling and
/// logits, copies and swaps.
#[test]
fn no_step_allocates_device_memory() {
    let _one = alone();
    for (i, (name, config)) in configs(256).into_iter().enumerate() {
        // Every second engine has a host tier. The prompts of the others fill the pool in one step.
        let swaps = i % 2 == 0;
        let model = Model::new(&config, false);
        let plan = Engine::plan(&model.options("cuda:0")).unwrap();
        let tight = EngineOptions {
            kv_bytes: Some(9 * plan.groups as u64 * plan.block_bytes),
            max_model_len: Some(110),
            max_seqs: 4,
            max_batch_tokens: if swaps { 64 } else { 512 },
            swap_bytes: if swaps { 64 * plan.block_bytes } else { 0 },
            preemption: if swaps { Preemption::Swap } else { Preemption::Recompute },
            ..model.options("cuda:0")
        };
        let free = cuda::shim().live_bytes();
        let engine = Engine::create(&tight).unwrap();
        let MemoryPlan { weight_bytes, kv_bytes, work_bytes, .. } = engine.info().memory;
        let (allocated, planned) = (cuda::shim().live_bytes() - free, weight_bytes + kv_bytes + work_bytes);
        // The plan does not include the lists of matrices and moves.
        assert!((planned..planned + (128 << 10)).contains(&allocated), "{name}: {allocated} bytes allocated, {planned} planned");
        let before = cuda::shim().allocation_calls();
        let several = |i| {
            let mut request = request(i, [3, 70, 20][i % 3], 20);
            request.sampling.temperature = (i % 2) as f32;
            request.n = 1 + (i % 4 == 1) as u32;
            request.sampling.typical_p = if i % 5 == 1 { 0.5 } else { 1.0 };
            request
        };
        run(&engine, (0..8).map(several)).unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error()));
        let stats = engine.stats();
        assert!(stats.preemptions > 0 && stats.blocks_copied > 0, "{name}: {stats:?}");
        assert_eq!(stats.preemptions_swapped > 0, swaps, "{name}: {stats:?}");
        assert_eq!(cuda::shim().allocation_calls(), before, "{name}");
    }
}

/// Logits use the widest buffer of the layers.
#[test]
fn only_the_logits_of_the_work_buffers_are_pinned() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let before = shim.pinned_bytes();
    let pinned = |max_batch_tokens| {
        let _engine = Engine::create(&EngineOptions { max_batch_tokens, max_seqs: 4, ..model.options("cuda:0") }).unwrap();
        shim.pinned_bytes() - before
    };
    let (few, many) = (pinned(512), pinned(2048));
    // Tokens, positions, slots, tables and tiles are pinned. Eight heads of 64 numbers are not.
    assert!(few > 0 && many - few < 1536 * 64, "{few} pinned bytes for 512 rows, {many} for 2,048");
}

/// If an allocation of a new engine fails, the engine frees all its memory.
#[test]
fn a_failed_device_allocation_is_an_error_without_leaks() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let options = model.options("cuda:0");
    let before = shim.live_bytes();
    let mut refused = 0;
    for nth in 1.. {
        shim.fail("cuMemAlloc_v2", nth, OUT_OF_MEMORY);
        match Engine::create(&options) {
            Ok(_) => break,
            Err(error) => {
                assert_eq!(error.code(), Code::OutOfMemory, "{error}");
                assert!(error.message().contains("not enough device memory ("), "{error}");
                refused += 1;
            }
        }
        assert_eq!(shim.live_bytes(), before, "device memory after allocation {nth} failed");
    }
    shim.fail("cuMemAlloc_v2", 0, 0);
    assert!(refused > 20, "only {refused} allocations failed");
    assert_eq!(shim.live_bytes(), before);
}

/// After an error that destroys the context, the requests end with the error and the memory is
/// freed. Another engine works.
#[test]
fn a_lost_device_ends_only_its_requests() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let options = model.options("cuda:0");
    let before = shim.live_bytes();
    let expected = answers(&options, requests());
    for nth in [1, 9, 60] {
        let engine = Engine::create(&options).unwrap();
        shim.fail("cuLaunchKernelEx", nth, ILLEGAL_ADDRESS);
        let error = run(&engine, requests()).unwrap_err();
        shim.fail("cuLaunchKernelEx", 0, 0);
        assert!(error.message().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        assert_eq!(engine.add_request(request(9, 3, 3)).unwrap_err(), error, "later requests are refused");
        drop(engine);
        assert_eq!(shim.live_bytes(), before);
    }
    assert_eq!(answers(&options, requests()), expected);
}

/// The engine retries a step after a transient error. The outputs do not change.
#[test]
fn a_step_is_retried_after_a_failed_launch() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let options = model.options("cuda:0");
    let expected = answers(&options, requests());
    for nth in [1, 20, 75] {
        let engine = Engine::create(&options).unwrap();
        shim.fail("cuLaunchKernelEx", nth, OUT_OF_MEMORY);
        let found = run(&engine, requests()).unwrap();
        shim.fail("cuLaunchKernelEx", 0, 0);
        assert_eq!(tokens(&found), tokens(&expected));
    }
}

/// A failure to record decode steps fails the creation of the engine. If the launch of a recorded
/// step, of the next one, or a copy fails, the engine retries the step. The outputs do not change.
#[test]
fn recorded_steps_are_retried_after_a_failure() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let options = model.options("cuda:0");
    let expected = answers(&options, requests());
    for function in ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphUpload"] {
        for nth in [1, 5] {
            shim.fail(function, nth, OUT_OF_MEMORY);
            let error = Engine::create(&options).err().unwrap();
            assert_eq!(error.code(), Code::OutOfMemory, "{function}: {error}");
            assert!(error.message().contains("record its decode steps"), "{function}: {error}");
        }
    }
    let steps = [
        "cuGraphLaunch",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
    ];
    for (function, nth) in steps.into_iter().flat_map(|function| [1, 2, 8].map(|nth| (function, nth))) {
        let engine = Engine::create(&options).unwrap();
        shim.fail(function, nth, OUT_OF_MEMORY);
        assert_eq!(tokens(&run(&engine, requests()).unwrap()), tokens(&expected), "{function}, call {nth}");
        // The step that was launched behind the failed one is recomputed too.
        assert!(!shim.pretends() || (1..=2).contains(&engine.stats().steps_failed), "{function}, call {nth}");
    }
    shim.fail("cuGraphLaunch", 3, ILLEGAL_ADDRESS);
    let engine = Engine::create(&options).unwrap();
    let error = run(&engine, requests()).unwrap_err();
    assert!(error.message().contains("failed to launch a graph"), "{error}");
    shim.fail("cuGraphLaunch", 0, 0);
}

/// The blocks of a sequence in several parts count which of them is the last. A failed step leaves no
/// counts behind.
#[test]
fn sequences_in_parts_are_retried_after_a_failure() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(512), true), cuda::shim());
    let options = model.options("cuda:0");
    let long = || [300, 270].into_iter().enumerate().map(|(i, prompt)| request(i, prompt, 8));
    let expected = answers(&options, long());
    for (function, nth) in [("cuGraphLaunch", 1), ("cuGraphLaunch", 3), ("cuLaunchKernelEx", 100), ("cuLaunchKernelEx", 112)] {
        let engine = Engine::create(&options).unwrap();
        shim.fail(function, nth, OUT_OF_MEMORY);
        let found = run(&engine, long()).unwrap();
        shim.fail(function, 0, 0);
        assert_eq!(tokens(&found), tokens(&expected), "{function}, call {nth}");
        assert!(!shim.pretends() || engine.stats().steps_failed > 0, "{function}, call {nth}");
    }
}

/// The device computes the next step while the host processes the tokens of the previous one: also
/// beside prompts, and when a sequence ends. A request that arrives joins the step after the one in
/// flight.
#[test]
fn the_next_step_is_in_flight_before_it_is_called() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    if !shim.pretends() {
        return println!("skipped: a real device does not report its queue");
    }
    let engine = Engine::create(&model.options("cuda:0")).unwrap();
    for (i, tokens) in [6, 12, 30].into_iter().enumerate() {
        engine.add_request(request(i, 5 + i, tokens)).unwrap();
    }
    for token in 1..=30 {
        if token == 20 {
            engine.add_request(request(9, 5, 3)).unwrap();
        }
        let report = engine.step().unwrap();
        let decodes = [6, 12, 30].into_iter().filter(|&tokens| token <= tokens).count() as u64;
        let expected = match token {
            1 => (5 + 6 + 7, 0),
            21 => (5, 1),
            22 | 23 => (0, 2),
            _ => (0, decodes),
        };
        assert_eq!((report.prefill_tokens, report.decode_tokens), expected, "token {token}");
        assert_eq!(shim.queued() > 0, token < 30, "token {token}");
    }
    assert_eq!(engine.step().unwrap().unfinished, 0);
    drop(engine);
    assert_eq!(shim.queued(), 0);
}

/// A sequence that the host samples is left out of every second step. The others are not.
#[test]
fn a_sequence_sampled_by_the_host_does_not_keep_the_next_step_from_being_in_flight() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(128), true), cuda::shim());
    let engine = Engine::create(&model.options("cuda:0")).unwrap();
    engine.add_request(request(0, 5, 12)).unwrap();
    engine.add_request(sampled_by_the_host(request(1, 5, 6))).unwrap();
    assert_eq!(engine.step().unwrap().prefill_tokens, 10);
    for token in 2..=12 {
        let report = engine.step().unwrap();
        assert_eq!(report.decode_tokens, 1 + (token % 2 == 1 && token <= 11) as u64, "token {token}");
        assert!(!shim.pretends() || (shim.queued() > 0) == (token < 12), "token {token}");
    }
    let found = engine.queue().poll(Some(Default::default())).unwrap();
    let of = |number: u64| found.iter().filter(move |output| output.user_data == number).flat_map(|output| output.tokens.clone());
    let expected = answers(&model.options("cuda:0"), [request(0, 5, 12), sampled_by_the_host(request(1, 5, 6))].into_iter());
    assert_eq!([of(0), of(1)].map(Iterator::collect::<Vec<u32>>), *tokens(&expected), "the tokens are those of the requests");
}

/// While requests start and end, and steps in flight are discarded, each request has the outputs of
/// an engine that samples on the host.
#[test]
fn steps_in_flight_do_not_change_outputs() {
    let _one = alone();
    let model = Model::new(&llama(256), true);
    let roomy = EngineOptions { batch_invariant: true, max_model_len: Some(110), ..model.options("cuda:0") };
    let some = |number: usize| {
        let mut random = Random(number as u64 + 77);
        let mut request = request(number, 1 + random.below(40), 1 + random.below(30));
        request.sampling.temperature = (number % 3) as f32 / 2.0;
        request.sampling.seed = Some(number as u64);
        request.sampling.ignore_eos = false;
        request.sampling.stop_token_ids = vec![random.below(127) as u32, random.below(127) as u32];
        request
    };
    let block = 2 * 2 * 16 * 2 * 64 * 2;
    let tight = EngineOptions { kv_bytes: Some(9 * block), swap_bytes: 40 * block, preemption: Preemption::Swap, ..roomy.clone() };
    for (seed, options) in [(1, &roomy), (2, &tight)] {
        cuda::shim().let_others_first(seed == 2);
        let engine = Engine::create(options).unwrap();
        let (mut random, mut ids, mut found) = (Random(seed), BTreeMap::new(), BTreeMap::<u64, (Vec<u32>, bool)>::new());
        let mut ahead = 0;
        for step in 0..150 {
            if step < 120 && random.below(4) == 0 {
                let number = ids.len();
                ids.insert(number, engine.add_request(some(number)).unwrap());
            }
            if random.below(25) == 0 && !ids.is_empty() {
                let _ = engine.abort(ids[&random.below(ids.len())]);
            }
            engine.step().unwrap_or_else(|e| panic!("{e}: {}", cuda::shim().last_error()));
            ahead += (cuda::shim().queued() > 0) as usize;
            for output in engine.queue().poll(Some(Default::default())).unwrap() {
                let (tokens, ended) = found.entry(output.user_data).or_default();
                tokens.extend(&output.tokens);
                *ended |= matches!(output.finish, Some(FinishReason::Stop | FinishReason::Length));
            }
        }
        assert_eq!(engine.stats().preemptions > 0, seed == 2);
        assert!(ahead > 20 || seed == 2 || !cuda::shim().pretends(), "{ahead} of 150 steps were followed by a step in flight");
        let ended = found.values().filter(|(_, ended)| *ended).count();
        assert!(found.len() > 10 && ended > 5, "{ended} of {} requests ended by themselves", found.len());
        let expected = answers(&roomy, found.keys().map(|&number| sampled_by_the_host(some(number as usize))));
        for ((number, (found, ended)), expected) in found.iter().zip(tokens(&expected)) {
            assert!(
                if *ended { *found == expected } else { expected.starts_with(found) },
                "request {number}: {found:?}, sampled by the host {expected:?}"
            );
        }
        cuda::shim().let_others_first(false);
    }
}

/// A sequence that was imported into the blocks of another one does not take its result in flight,
/// even with the same token, position and blocks.
#[test]
fn an_imported_sequence_does_not_take_a_result_in_flight() {
    let _one = alone();
    let model = Model::new(&llama(128), true);
    let options = EngineOptions { prefix_cache: false, ..model.options("cuda:0") };
    let outputs = |engine: &Engine| {
        while engine.step().unwrap().unfinished > 0 {}
        engine.queue().poll(Some(Default::default())).unwrap()
    };
    let other = Engine::create(&options).unwrap();
    let third = tokens(&run(&other, std::iter::once(request(0, 20, 3))).unwrap())[0][2];
    // Its length and its last token equal those of the other sequence.
    let mut same_length = Request { keep: true, ..request(1, 22, 1) };
    same_length.sampling.logit_bias = vec![(third, 100.0)];
    let seq = other.add_request(same_length).unwrap().sequence(0);
    outputs(&other);
    other.export(seq, None).unwrap();
    let state = outputs(&other).into_iter().find(|output| !output.sequence_state.is_empty()).unwrap().sequence_state;
    let generate_from_state = |engine: &Engine| {
        let seq = engine.import(engine.queue(), &state).unwrap();
        engine.resume(seq, Resume { keep: false, ..Resume::new(request(0, 1, 6).sampling) }).unwrap();
        outputs(engine).iter().filter(|output| output.sequence == seq).flat_map(|output| output.tokens.clone()).collect::<Vec<u32>>()
    };
    let expected = generate_from_state(&Engine::create(&options).unwrap());
    let engine = Engine::create(&options).unwrap();
    let left = engine.add_request(request(0, 20, 40)).unwrap();
    for _ in 0..3 {
        engine.step().unwrap();
    }
    assert!(!cuda::shim().pretends() || cuda::shim().queued() > 0);
    engine.abort(left).unwrap();
    assert_eq!(generate_from_state(&engine), expected);
}

/// Attention splits long sequences into parts. A step in flight can be the first one with another
/// part.
#[test]
fn a_step_in_flight_can_add_a_part_of_attention() {
    let _one = alone();
    let model = Model::new(&llama(512), true);
    let by_host = |hook: bool| {
        let request = request(0, 250, 14);
        let request = if hook { sampled_by_the_host(request) } else { request };
        answers(&model.options("cuda:0"), std::iter::once(request))
    };
    for (ahead, expected) in by_host(false)[&0].iter().zip(&by_host(true)[&0]) {
        let [logprob, cpu_logprob] = [ahead.1, expected.1].map(f32::from_bits);
        assert!(ahead.0 == expected.0 && (logprob - cpu_logprob).abs() < 1e-5, "{ahead:?}, sampled by the host {expected:?}");
    }
}

#[test]
fn an_unsuitable_device_is_refused_with_the_reason() {
    let _one = alone();
    let (model, shim) = (Model::new(&llama(64), true), cuda::shim());
    let refused = |device: &str, words: &[&str]| {
        let error = Engine::create(&model.options(device)).err().unwrap();
        assert_eq!(error.code(), Code::Unsupported, "{error}");
        assert!(words.iter().all(|word| error.message().contains(word)), "{error}");
    };
    refused("cuda:1", &["cuda:1", "1 CUDA devices"]);
    shim.pretend_devices(0);
    refused("cuda:0", &["cuda:0", "0 CUDA devices"]);
    shim.pretend_devices(1);
    shim.pretend_driver(11_080);
    refused("cuda:0", &["CUDA 11.8", "at least 12.0", "update the NVIDIA driver"]);
    shim.pretend_driver(13_000);
    shim.pretend_capability(7, 5);
    refused("cuda:0", &["cuda:0", "compute capability 7.5", "at least 8.0"]);
    shim.pretend_capability(9, 0);
    Engine::create(&model.options("cuda:0")).unwrap();
}
