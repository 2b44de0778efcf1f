//! Random models of any family, generated from its spec, and stored beam searches.
#![allow(dead_code)] // each test file uses a part of this module

pub mod communicator;
pub mod cpu_time;
pub mod cuda;
pub mod distance;
pub mod faulty;
pub mod fp8;
pub mod progress;
mod random;
pub mod rank_process;
pub mod store;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pagedllm::engine::{Clock, ModelInfo};
use pagedllm::kv::BlockHash;
use pagedllm::model::spec::{Linear, Norm, Vector};
use pagedllm::model::{Config, family};
use pagedllm::scheduler::{Branching, NewGroup};
use pagedllm::types::options::{BeamParams, EarlyStopping, SamplingParams};
pub use random::Random;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// Runs a test on a thread with enough stack that the library starts no temporary thread, because
/// memory is counted per thread.
pub fn on_deep_stack(test: fn()) {
    let thread = std::thread::Builder::new().stack_size(256 << 20).spawn(test).unwrap();
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Returns a request of one sequence that ends at `max_len` tokens.
pub fn new_group(prompt: Vec<u32>, max_len: usize) -> NewGroup {
    let (branching, root) = (Branching::One, BlockHash::default());
    NewGroup { prompt, max_len, branching, priority: 0, keep: false, logits_from: None, prompt_only: false, root }
}

pub fn bundled_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/model")
}

/// Returns the model description for an engine with an executor of the test. Blocks have 8 slots.
pub fn model_info(vocab_size: usize, blocks: usize, max_model_len: usize, eos_token_ids: Vec<u32>) -> ModelInfo {
    ModelInfo { architecture: "of the test", eos_token_ids, ..ModelInfo::without_model(vocab_size, 8, blocks, max_model_len) }
}

/// A clock that only the test advances.
#[derive(Default)]
pub struct ManualClock(Mutex<Duration>);

impl ManualClock {
    pub fn advance(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }
}

/// A temporary directory, removed on drop.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pagedllm-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One config per shape of decoder, with `positions` positions.
pub fn configs(positions: usize) -> Vec<(&'static str, Value)> {
    let opt = |more: Value| {
        let mut config = json!({"architectures": ["OPTForCausalLM"], "hidden_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2,
            "ffn_dim": 56, "vocab_size": 131, "max_position_embeddings": positions, "eos_token_id": 2});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    vec![
        (
            "gpt2",
            json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_head": 3, "n_layer": 2, "n_positions": positions, "vocab_size": 130, "eos_token_id": 2}),
        ),
        ("opt", opt(json!({}))),
        ("opt, post-norm and with wide embeddings", opt(json!({"do_layer_norm_before": false, "word_embed_proj_dim": 64}))),
        ("opt, post-norm and projected", opt(json!({"do_layer_norm_before": false, "word_embed_proj_dim": 24}))),
        (
            "gemma 2, whose windows alternate",
            json!({"architectures": ["Gemma2ForCausalLM"], "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
                "num_hidden_layers": 2, "intermediate_size": 50, "vocab_size": 127, "max_position_embeddings": positions, "sliding_window": 37,
                "tie_word_embeddings": false, "query_pre_attn_scalar": 20, "eos_token_id": 2}),
        ),
        (
            "qwen2-moe",
            json!({"architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
                "num_hidden_layers": 2, "intermediate_size": 50, "moe_intermediate_size": 22, "shared_expert_intermediate_size": 26,
                "num_experts": 7, "num_experts_per_tok": 2, "vocab_size": 127, "max_position_embeddings": positions, "eos_token_id": 2}),
        ),
        (
            "gpt-oss, whose windows alternate and whose heads have sinks",
            json!({"architectures": ["GptOssForCausalLM"], "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
                "num_hidden_layers": 2, "intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 37,
                "vocab_size": 127, "max_position_embeddings": positions, "eos_token_id": 2, "rope_scaling": {"rope_type": "yarn", "factor": 1.0,
                    "original_max_position_embeddings": positions, "truncate": false}}),
        ),
        (
            "deepseek v3, with latents",
            json!({"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 36, "num_attention_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 24,
                "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_hidden_layers": 2, "intermediate_size": 50,
                "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 22,
                "first_k_dense_replace": 1, "vocab_size": 127, "max_position_embeddings": positions, "eos_token_id": 2}),
        ),
        (
            "llama",
            json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
                "num_hidden_layers": 2, "intermediate_size": 50, "vocab_size": 127, "max_position_embeddings": positions, "attention_bias": true,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64}, "eos_token_id": 2}),
        ),
    ]
}

/// Writes a model directory of random weights, in bf16 or f32.
pub fn write_random_model(dir: &Path, config: &Value, bf16: bool, seed: u64) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let config = Config::load(dir, "config.json").unwrap();
    let mut shapes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let cell = std::cell::RefCell::new(&mut shapes);
    let linear = |linear: &Linear, _| {
        for part in &linear.parts {
            cell.borrow_mut().insert(part.weight(), part.tensor_shape(&linear.stored_shape(part)));
            if linear.bias {
                cell.borrow_mut().insert(part.bias(), part.tensor_shape(&[part.rows]));
            }
        }
        Ok::<(), ()>(())
    };
    let norm = |norm: &Norm| {
        let suffixes = if norm.bias { &["weight", "bias"][..] } else { &["weight"] };
        for (part, suffix) in norm.parts.iter().flat_map(|part| suffixes.iter().map(move |suffix| (part, suffix))) {
            cell.borrow_mut().insert(format!("{part}.{suffix}"), norm.shape.clone());
        }
        Ok(())
    };
    let vector = |vector: &Vector| {
        cell.borrow_mut().insert(vector.name.clone(), vec![vector.len]);
        Ok(())
    };
    (family(&config).unwrap().spec)(&config).unwrap().try_map(linear, norm, vector).unwrap();
    let mut random = Random(seed);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let bytes = values(&name, &shape, bf16, &mut random);
            (name, shape, bytes)
        })
        .collect();
    let dtype = if bf16 { safetensors::Dtype::BF16 } else { safetensors::Dtype::F32 };
    let views = tensors.iter().map(|(name, shape, bytes)| (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// Returns weights that are large enough for attention and logits to be far from uniform.
fn values(name: &str, shape: &[usize], bf16: bool, random: &mut Random) -> Vec<u8> {
    let (base, scale) = match shape {
        [_] if name.ends_with("weight") => (1.0, 0.3),
        [_] => (0.0, 0.3),
        [.., cols] => (0.0, 3.0 / (*cols as f32).sqrt()),
        [] => unreachable!("a tensor has dimensions"),
    };
    let mut bytes = Vec::new();
    for _ in 0..shape.iter().product() {
        let value = base + scale * random.unit();
        match bf16 {
            true => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
            false => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}

/// A beam search with the results of transformers. See tests/data/beams/make_beams.py.
pub struct BeamCase {
    pub model: String,
    pub prompt: Vec<u32>,
    pub params: BeamParams,
    pub eos: Vec<u32>,
    pub max_tokens: usize,
    /// Penalties, exclusions, and the conditions for the end of beams.
    pub sampling: SamplingParams,
    /// [width], best first: the generated tokens and their score.
    pub expected: Vec<(Vec<u32>, f32)>,
}

/// Returns the parameters of the logits processors of a case.
fn sampling(case: &Value) -> SamplingParams {
    let list = |key: &str| case[key].as_array().cloned().unwrap_or_default();
    let token = |value: &Value| value.as_u64().unwrap() as u32;
    SamplingParams {
        min_tokens: case["min_tokens"].as_u64().unwrap() as usize,
        repetition_penalty: case["repetition_penalty"].as_f64().unwrap_or(1.0) as f32,
        no_repeat_ngram_size: case["no_repeat_ngram_size"].as_u64().unwrap_or(0) as u32,
        bad_words_ids: list("bad_words_ids").iter().map(|word| word.as_array().unwrap().iter().map(token).collect()).collect(),
        logit_bias: list("logit_bias").iter().map(|pair| (token(&pair[0]), pair[1].as_f64().unwrap() as f32)).collect(),
        ..SamplingParams::default()
    }
}

impl BeamCase {
    fn read(case: &Value) -> BeamCase {
        let whole = |key: &str| case[key].as_u64().unwrap() as usize;
        let real = |key: &str| case[key].as_f64().unwrap() as f32;
        let tokens = |value: &Value| value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect::<Vec<_>>();
        let sequences = case["sequences"].as_array().unwrap().iter().map(tokens);
        let scores = case["scores"].as_array().unwrap().iter().map(|score| score.as_f64().unwrap() as f32);
        BeamCase {
            model: case["model"].as_str().unwrap().into(),
            prompt: tokens(&case["prompt"]),
            params: BeamParams {
                width: whole("width") as u32,
                groups: whole("groups") as u32,
                diversity_penalty: real("diversity_penalty"),
                length_penalty: real("length_penalty"),
                early_stopping: match case["early_stopping"].as_str().unwrap() {
                    "yes" => EarlyStopping::Yes,
                    "no" => EarlyStopping::No,
                    "never" => EarlyStopping::Never,
                    other => panic!("early_stopping is {other}"),
                },
            },
            eos: tokens(&case["eos"]),
            max_tokens: whole("max_tokens"),
            sampling: sampling(case),
            expected: sequences.zip(scores).collect(),
        }
    }

    /// Returns a name for messages.
    pub fn name(&self) -> String {
        let BeamCase { model, prompt, params, eos, max_tokens, sampling, .. } = self;
        format!("{model} after {prompt:?}, {params:?}, end tokens {eos:?}, {max_tokens} tokens, {sampling:?}")
    }
}

/// `file` is beams.json or groups.json.
pub fn beam_cases(file: &str) -> Vec<BeamCase> {
    let text = std::fs::read_to_string(goldens().join("beams").join(file)).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    json["cases"].as_array().unwrap().iter().map(BeamCase::read).collect()
}
