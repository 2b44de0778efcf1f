//! Damaged models, invalid options and invalid requests. Each gives an error with the expected code
//! and a helpful message, never a panic, and does not affect other requests.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::cpu_time;
use pagedllm::engine::{Engine, Output, Prompt, Request};
use pagedllm::error::{Code, Error};
use pagedllm::types::RequestId;
use pagedllm::types::options::{EngineOptions, Isa, SamplingParams, WeightFormat};
use pagedllm::types::outputs::FinishReason;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

/// A separate model directory for one case, removed on drop.
struct Model(PathBuf);

impl Drop for Model {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Model {
    fn empty() -> Model {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("pagedllm-bad-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        Model(dir)
    }

    fn golden(name: &str) -> Model {
        Model::linked_to(&root().join("tests/data").join(name))
    }

    fn linked_to(source: &Path) -> Model {
        let model = Model::empty();
        for entry in fs::read_dir(source).unwrap() {
            let path = entry.unwrap().path();
            // Links: `write` removes a file before it creates another one, so the source is not
            // changed.
            symlink(&path, model.path(path.file_name().unwrap().to_str().unwrap())).unwrap();
        }
        model
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.path(file)).unwrap()
    }

    fn remove(&self, file: &str) {
        let _ = fs::remove_file(self.path(file));
    }

    fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        self.remove(file);
        fs::write(self.path(file), bytes).unwrap();
    }

    fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut json = serde_json::from_slice(&self.read(file)).unwrap();
        change(&mut json);
        self.write(file, json.to_string());
    }

    /// Sets a field of config.json, or removes it if `value` is null.
    fn config(&self, field: &str, value: Value) {
        self.edit("config.json", |config| set(config, field, value));
    }

    /// Small options, so that a few hundred engines take a few seconds.
    fn options(&self) -> EngineOptions {
        EngineOptions {
            model_dir: self.0.clone(),
            skip_tokenizer: true,
            threads: Some(1),
            max_batch_tokens: 16,
            max_seqs: 2,
            kv_bytes: Some(1 << 18),
            ..Default::default()
        }
    }

    fn with_text(&self) -> EngineOptions {
        EngineOptions { skip_tokenizer: false, ..self.options() }
    }
}

fn set(object: &mut Value, field: &str, value: Value) {
    match value {
        Value::Null => drop(object.as_object_mut().unwrap().remove(field)),
        value => object[field] = value,
    }
}

fn quietly<T>(run: impl FnOnce() -> Result<T, Error>) -> Result<Result<T, Error>, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => panic.downcast_ref::<&str>().unwrap_or(&"?").to_string(),
    })
}

/// The failures of a table of cases. They are reported together at the end.
#[derive(Default)]
struct Failures(Vec<String>);

impl Failures {
    fn expect<T>(&mut self, case: &str, result: Result<Result<T, Error>, String>, code: Code, words: &[&str]) {
        let wrong = match result {
            Err(panic) => format!("panicked: {panic}"),
            Ok(Ok(_)) => "succeeded".into(),
            Ok(Err(e)) if e.code() != code => format!("is {:?}, not {code:?}: {e}", e.code()),
            Ok(Err(e)) => match words.iter().find(|word| !e.message().contains(**word)) {
                Some(word) => format!("does not contain {word:?}: {e}"),
                None => return,
            },
        };
        self.0.push(format!("{case}: {wrong}"));
    }

    /// Checks that neither `plan` nor `create` accepts the model.
    fn refused(&mut self, case: &str, model: &Model, code: Code, words: &[&str]) {
        self.expect(&format!("{case} (plan)"), quietly(|| Engine::plan(&model.options())), code, words);
        self.expect(&format!("{case} (create)"), quietly(|| Engine::create(&model.options())), code, words);
    }

    fn none(self) {
        assert!(self.0.is_empty(), "{} failures:\n{}", self.0.len(), self.0.join("\n"));
    }
}

// Missing directories and files, and those of another kind.

#[test]
fn a_directory_without_a_model_is_an_io_error_with_its_name() {
    let mut failures = Failures::default();
    let missing = Model::empty();
    fs::remove_dir(&missing.0).unwrap();
    failures.refused("missing directory", &missing, Code::Io, &["model_path", missing.0.to_str().unwrap()]);
    failures.refused("empty directory", &Model::empty(), Code::Io, &["config.json", "not found"]);
    let inside = Model::empty();
    inside.write("file", "x");
    let options = EngineOptions { model_dir: inside.path("file"), ..inside.options() };
    failures.expect("file", quietly(|| Engine::create(&options)), Code::Io, &["file", "not a directory"]);
    let options = EngineOptions { model_dir: "a\0b".into(), ..inside.options() };
    failures.expect("NUL in the path", quietly(|| Engine::create(&options)), Code::Io, &["model_path"]);
    let options = EngineOptions { model_dir: PathBuf::new(), ..inside.options() };
    failures.expect("empty path", quietly(|| Engine::create(&options)), Code::Io, &["model_path"]);
    failures.none();
}

#[test]
fn a_missing_file_or_a_directory_in_its_place_is_an_io_error_with_its_name() {
    let mut failures = Failures::default();
    for file in ["config.json", "model.safetensors"] {
        let model = Model::golden("llama");
        model.remove(file);
        failures.refused(&format!("no {file}"), &model, Code::Io, &[file]);
        fs::create_dir(model.path(file)).unwrap();
        failures.refused(&format!("{file} is a directory"), &model, Code::Io, &[file]);
    }
    failures.none();
}

/// Opening a pipe would wait for its other end, which no process opens.
#[test]
fn a_pipe_in_the_place_of_a_file_is_an_error_without_a_wait() {
    let mut hung = Vec::new();
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        let model = Model::golden("llama");
        model.remove(file);
        let status = std::process::Command::new("mkfifo").arg(model.path(file)).status().unwrap();
        assert!(status.success());
        let options = model.with_text();
        let (done, answer) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(Engine::create(&options).is_err()));
        match answer.recv_timeout(Duration::from_secs(300)) {
            Ok(refused) => assert!(refused, "{file}"),
            Err(_) => hung.push(file),
        }
    }
    assert!(hung.is_empty(), "create waits forever if these files are pipes: {hung:?}");
}

// Architectures.

#[test]
fn a_config_that_is_not_a_json_object_is_a_model_error() {
    let cases: [(&str, &[u8], &str); 7] = [
        ("empty", b"", "EOF"),
        ("not JSON", b"hidden_size: 3", "line 1"),
        ("an array", b"[]", "not a JSON object"),
        ("a string", b"\"x\"", "not a JSON object"),
        ("null", b"null", "not a JSON object"),
        ("cut", b"{\"hidden_size\": 3", "EOF"),
        ("not UTF-8", b"{\"a\": \"\xff\"}", "config.json"),
    ];
    let mut failures = Failures::default();
    for (case, bytes, word) in cases {
        let model = Model::golden("llama");
        model.write("config.json", bytes);
        failures.refused(case, &model, Code::Model, &["config.json", word]);
    }
    let model = Model::golden("llama");
    model.write("config.json", "[".repeat(1 << 20));
    failures.refused("nested a million deep", &model, Code::Model, &["config.json"]);
    model.remove("config.json");
    fs::File::create(model.path("config.json")).unwrap().set_len(1 << 40).unwrap();
    failures.refused("a terabyte", &model, Code::Model, &["config.json", "1099511627776 bytes"]);
    failures.none();
}

#[test]
fn an_error_names_the_unsupported_architecture_and_the_nearest_ones() {
    let cases = [
        (json!(["MambaForCausalLM"]), json!("llama"), "MambaForCausalLM"),
        (json!(["llamaforcausallm"]), json!("llama"), "llamaforcausallm"),
        (json!([]), json!("mamba"), "mamba"),
        (json!("LlamaForCausalLM"), json!("mamba"), "mamba"),
        (json!([]), Value::Null, "absent"),
        (Value::Null, Value::Null, "absent"),
        (json!([7, null]), Value::Null, "absent"),
    ];
    let mut failures = Failures::default();
    for (architectures, model_type, word) in cases {
        let model = Model::golden("llama");
        let case = format!("{architectures} {model_type}");
        model.config("architectures", architectures);
        model.config("model_type", model_type);
        failures.refused(&case, &model, Code::Unsupported, &[word, "the nearest of the", "ForCausalLM"]);
    }
    let model = Model::golden("llama");
    model.config("model_type", json!(3));
    failures.refused("model_type is a number", &model, Code::Model, &["model_type is 3"]);
    failures.none();
}

/// Without `architectures`, `model_type` selects the family, as in transformers.
#[test]
fn model_type_selects_the_family_of_a_config_without_architectures() {
    let model = Model::golden("llama");
    model.config("architectures", Value::Null);
    assert_eq!(Engine::create(&model.options()).unwrap().info().architecture, "LlamaForCausalLM");
}

// Numbers in config.json.

const COUNTS: &[(&str, &[&str])] = &[
    ("llama", &["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "num_hidden_layers"]),
    ("gpt2", &["n_embd", "n_head", "n_positions", "vocab_size", "n_layer"]),
    ("opt", &["hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size", "ffn_dim", "num_hidden_layers"]),
];
/// Fields with a default. They can be absent, but not invalid.
const OPTIONAL: &[(&str, &[&str])] = &[
    ("llama", &["num_key_value_heads", "head_dim", "max_position_embeddings"]),
    ("gpt2", &["n_inner"]),
    ("opt", &["word_embed_proj_dim"]),
];

#[test]
fn an_error_names_a_count_out_of_range_with_its_value() {
    let wrong =
        [json!(0), json!(-3), json!(3.5), json!("32"), json!(true), json!([]), json!({}), json!(1u64 << 40), json!(u64::MAX), json!(1e300)];
    let mut failures = Failures::default();
    for (golden, field) in COUNTS.iter().chain(OPTIONAL).flat_map(|(golden, fields)| fields.iter().map(move |field| (golden, field))) {
        for value in &wrong {
            let model = Model::golden(golden);
            model.config(field, value.clone());
            failures.refused(
                &format!("{golden} {field} {value}"),
                &model,
                Code::Model,
                &["config.json", &format!("{field} is {value}"), "integer from 1 to"],
            );
        }
    }
    failures.none();
}

#[test]
fn an_error_names_a_missing_required_count() {
    let mut failures = Failures::default();
    for (golden, field) in COUNTS.iter().flat_map(|(golden, fields)| fields.iter().map(move |field| (golden, field))) {
        let model = Model::golden(golden);
        model.config(field, Value::Null);
        failures.refused(&format!("{golden} without {field}"), &model, Code::Model, &["config.json", &format!("{field} is absent")]);
    }
    failures.none();
}

#[test]
fn contradictory_and_unknown_fields_are_refused() {
    type Case = (&'static str, Value, Code, &'static [&'static str]);
    let cases: &[Case] = &[
        ("llama", json!({"num_key_value_heads": 3}), Code::Model, &["4 attention heads", "3 KV heads"]),
        ("llama", json!({"num_key_value_heads": 8}), Code::Model, &["4 attention heads", "8 KV heads"]),
        ("llama", json!({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": null}), Code::Model, &["32", "5 attention heads"]),
        ("gpt2", json!({"n_head": 5}), Code::Model, &["32", "5 attention heads"]),
        ("opt", json!({"num_attention_heads": 5}), Code::Model, &["32", "5 attention heads"]),
        ("llama", json!({"head_dim": 7}), Code::Model, &["head_dim is 7", "even"]),
        ("llama", json!({"hidden_size": 36, "head_dim": null}), Code::Model, &["head_dim is 9"]),
        ("llama", json!({"hidden_act": "mish"}), Code::Unsupported, &["hidden_act is mish", "silu"]),
        ("gpt2", json!({"activation_function": "mish"}), Code::Unsupported, &["activation_function is mish"]),
        ("opt", json!({"activation_function": "mish"}), Code::Unsupported, &["activation_function is mish"]),
        ("llama", json!({"hidden_act": 5}), Code::Model, &["hidden_act is 5", "string"]),
        ("llama", json!({"tie_word_embeddings": "yes"}), Code::Model, &["tie_word_embeddings is \"yes\"", "true or false"]),
        ("llama", json!({"attention_bias": 1}), Code::Model, &["attention_bias is 1"]),
        ("llama", json!({"rms_norm_eps": 0}), Code::Model, &["rms_norm_eps is 0"]),
        ("llama", json!({"rms_norm_eps": -1e-5}), Code::Model, &["rms_norm_eps is -"]),
        ("llama", json!({"rms_norm_eps": "small"}), Code::Model, &["rms_norm_eps is \"small\""]),
        ("gpt2", json!({"layer_norm_epsilon": 0}), Code::Model, &["layer_norm_epsilon is 0"]),
        ("llama", json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}), Code::Unsupported, &["method gptq", "bf16"]),
        ("llama", json!({"quantization_config": 4}), Code::Model, &["quantization_config is 4"]),
        (
            "phi3",
            json!({"rope_parameters": {"rope_type": "longrope", "long_factor": [1], "short_factor": [1]}}),
            Code::Model,
            &["short_factor is [1]", "array of 4"],
        ),
        ("phi", json!({"rope_parameters": {"partial_rotary_factor": 0.9}}), Code::Model, &["rotary dimensions (7, head_dim is 8)", "even"]),
        ("qwen2", json!({"layer_types": ["full_attention"]}), Code::Model, &["lists 1 layers", "num_hidden_layers is 2"]),
        ("qwen2", json!({"layer_types": ["full_attention", "full_attention", "full_attention"]}), Code::Model, &["lists 3 layers"]),
        (
            "qwen2",
            json!({"layer_types": ["full_attention", "chunked_attention"]}),
            Code::Unsupported,
            &["chunked_attention", "layer 1", "sliding_attention"],
        ),
        (
            "qwen2",
            json!({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": false}),
            Code::Model,
            &["sliding_attention for layer 1", "sliding_window is absent"],
        ),
        ("llama", json!({"partial_rotary_factor": 0.5}), Code::Unsupported, &["partial_rotary_factor is 0.5"]),
        ("llama", json!({"rope_scaling": {"type": "linear", "factor": 2}}), Code::Model, &["rope_parameters and rope_scaling"]),
        ("llama", json!({"rope_interleaved": true}), Code::Unsupported, &["rope_interleaved is true"]),
        ("gemma3", json!({"attn_logit_softcapping": 30.0}), Code::Unsupported, &["attn_logit_softcapping"]),
        ("granite", json!({"logits_scaling": 1e-300}), Code::Model, &["logits_scaling is 1e-300", "above 0"]),
        ("llama", json!({"num_hidden_layers": 2}), Code::Model, &["tensor layers.2.", "not part of the model"]),
        ("llama_odd", json!({"attention_bias": false}), Code::Model, &["tensor layers.0.self_attn.k_proj.bias"]),
        ("opt", json!({"num_hidden_layers": 2}), Code::Model, &["tensor decoder.layers.2."]),
        ("mixtral", json!({"num_hidden_layers": 1024, "num_local_experts": 4096}), Code::Model, &["1024 layers with 4096", "131072"]),
        (
            "stablelm_odd",
            json!({"num_hidden_layers": 1024, "num_attention_heads": 4096, "num_key_value_heads": 1, "head_dim": 4}),
            Code::Model,
            &["1024 layers with 4096"],
        ),
        ("gemma2", json!({"use_bidirectional_attention": true}), Code::Unsupported, &["use_bidirectional_attention"]),
        ("gemma2", json!({"attn_logit_softcapping": 0}), Code::Model, &["attn_logit_softcapping is 0"]),
        ("smollm3_odd", json!({"no_rope_layers": [1, 0]}), Code::Model, &["no_rope_layers lists 2 layers"]),
        ("smollm3_odd", json!({"no_rope_layers": [1, 0, 2]}), Code::Model, &["list 1 (RoPE) or 0 (no RoPE)"]),
        ("falcon_odd", json!({"parallel_attn": false}), Code::Unsupported, &["new_decoder_architecture is true"]),
        ("mixtral", json!({"num_experts_per_tok": 5}), Code::Model, &["num_experts_per_tok is 5", "num_local_experts is 4"]),
        ("mixtral", json!({"num_local_experts": 5}), Code::Model, &["experts.4.w1.weight is missing"]),
        ("qwen3_moe", json!({"mlp_only_layers": ["first"]}), Code::Model, &["mlp_only_layers"]),
        ("mixtral", json!({"quantization_config": {"quant_method": "mxfp4"}}), Code::Unsupported, &["method mxfp4", "bf16"]),
        ("gpt_oss", json!({"quantization_config": {"quant_method": "fp8"}}), Code::Unsupported, &["method fp8", "experts in mxfp4"]),
        ("gpt_oss", json!({"rope_parameters": null}), Code::Model, &["rope_scaling is missing"]),
        ("gpt_oss", json!({"num_local_experts": 5}), Code::Model, &["experts.gate_up_proj has shape [4, ", "[5, "]),
        ("gpt_oss", json!({"intermediate_size": 25}), Code::Model, &["config.json requires [4, 32, 50]"]),
        ("gpt_oss", json!({"swiglu_limit": 0}), Code::Model, &["swiglu_limit is 0"]),
        ("gpt_oss_mxfp4_bf16", json!({"intermediate_size": 48}), Code::Model, &["config.json requires [3, 96, 2, 16]"]),
        ("gpt_oss_mxfp4_bf16", json!({"num_local_experts": 4}), Code::Model, &["gate_up_proj_blocks has shape [3, "]),
        ("deepseek_v2", json!({"topk_method": "noaux_tc"}), Code::Unsupported, &["topk_method is noaux_tc", "group_limited_greedy"]),
        ("deepseek_v2", json!({"norm_topk_prob": true}), Code::Unsupported, &["norm_topk_prob is true"]),
        ("deepseek_v2", json!({"n_group": 4}), Code::Model, &["n_group 4", "6 experts"]),
        ("deepseek_v2", json!({"topk_group": 4}), Code::Model, &["n_group 3, topk_group 4", "num_experts_per_tok 2"]),
        ("deepseek_v2", json!({"topk_group": 1, "num_experts_per_tok": 3}), Code::Model, &["topk_group 1", "num_experts_per_tok 3"]),
        ("deepseek_v3", json!({"topk_method": "greedy"}), Code::Unsupported, &["topk_method is greedy", "noaux_tc"]),
        (
            "deepseek_v3",
            json!({"rope_parameters": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "mscale_all_dim": 1e30}}),
            Code::Model,
            &["mscale_all_dim", "not a finite number"],
        ),
        ("deepseek_v3", json!({"n_group": 6}), Code::Model, &["n_group 6", "groups of at least 2"]),
        ("deepseek_v3", json!({"n_group": 65}), Code::Model, &["n_group is 65", "64"]),
        ("deepseek_v3", json!({"scoring_func": "softmax"}), Code::Unsupported, &["scoring_func is softmax", "sigmoid"]),
        ("deepseek_v3", json!({"num_experts_per_tok": 7}), Code::Model, &["num_experts_per_tok is 7", "n_routed_experts is 6"]),
        ("deepseek_v3", json!({"n_routed_experts": 8, "n_group": 4}), Code::Model, &["experts.6.gate_proj.weight is missing"]),
        ("deepseek_v3", json!({"n_shared_experts": 1}), Code::Model, &["shared_experts.gate_proj.weight has shape [24, 32]"]),
        ("deepseek_v3", json!({"first_k_dense_replace": 2}), Code::Model, &["layers.1.mlp.experts.0.down_proj"]),
        ("deepseek_v3", json!({"kv_lora_rank": 25}), Code::Model, &["config.json requires"]),
        ("deepseek_v3", json!({"qk_rope_head_dim": 7}), Code::Model, &["even"]),
        ("deepseek_v3", json!({"moe_layer_freq": 2}), Code::Unsupported, &["moe_layer_freq"]),
        ("llama", json!({"eos_token_id": -2}), Code::Model, &["eos_token_id is -2"]),
        ("llama", json!({"eos_token_id": "</s>"}), Code::Model, &["eos_token_id"]),
        ("llama", json!({"eos_token_id": 1u64 << 32}), Code::Model, &["eos_token_id is 4294967296"]),
    ];
    let mut failures = Failures::default();
    for (golden, fields, code, words) in cases {
        let model = Model::golden(golden);
        // The first source of the end tokens.
        model.remove("generation_config.json");
        fields.as_object().unwrap().iter().for_each(|(field, value)| model.config(field, value.clone()));
        failures.refused(&format!("{golden} {fields}"), &model, *code, words);
    }
    failures.none();
}

#[test]
fn an_invalid_rope_is_refused() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
    let with = |field: &str, value: Value| {
        let mut rope = llama3.clone();
        set(&mut rope, field, value);
        rope
    };
    let mut cases = vec![
        (json!({"rope_type": "spiral"}), Code::Unsupported, vec!["spiral", "llama3"]),
        (json!({"rope_type": "yarn", "factor": 4.0}), Code::Model, vec!["original_max_position_embeddings is absent"]),
        (json!({"rope_type": 4}), Code::Model, vec!["rope_type is 4"]),
        (json!({"rope_type": "yarn", "factor": -4, "original_max_position_embeddings": 32}), Code::Model, vec!["factor is -4"]),
        (json!([1]), Code::Model, vec!["rope_parameters is [1]", "object"]),
        (json!({"rope_theta": 0}), Code::Model, vec!["rope_theta is 0"]),
        (json!({"rope_theta": -1.0}), Code::Model, vec!["rope_theta is -1"]),
        (json!({"rope_theta": "big"}), Code::Model, vec!["rope_theta"]),
        (json!({"rope_type": "linear"}), Code::Model, vec!["factor is absent"]),
        (json!({"rope_type": "linear", "factor": 0}), Code::Model, vec!["factor is 0"]),
        (with("low_freq_factor", json!(4.0)), Code::Model, vec!["high_freq_factor is 4", "low_freq_factor is 4"]),
        (with("low_freq_factor", json!(5.0)), Code::Model, vec!["high_freq_factor is 4", "low_freq_factor is 5"]),
    ];
    for field in ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
        cases.push((with(field, Value::Null), Code::Model, vec![field, "absent"]));
        cases.extend([json!(0), json!(-8), json!("8")].map(|value| (with(field, value), Code::Model, vec![field, "above 0"])));
    }
    let mut failures = Failures::default();
    for (rope, code, words) in cases {
        let model = Model::golden("llama");
        model.config("rope_parameters", rope.clone());
        failures.refused(&rope.to_string(), &model, code, &words);
    }
    failures.none();
}

/// Numbers so small that a frequency is infinite. Every logit would be NaN, and every request would
/// fail.
#[test]
fn a_rope_whose_frequencies_are_not_finite_is_refused() {
    let cases = [
        json!({"rope_theta": 1e-300}),
        json!({"rope_type": "linear", "factor": 1e-300}),
        json!({"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
    ];
    let mut failures = Failures::default();
    for rope in cases {
        let model = Model::golden("llama");
        model.config("rope_parameters", rope.clone());
        failures.refused(&rope.to_string(), &model, Code::Model, &["config.json"]);
    }
    failures.none();
}

// Weights.

/// Splits a safetensors file into the header as JSON, and the data.
fn parts(bytes: &[u8]) -> (Value, Vec<u8>) {
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + header_len]).unwrap(), bytes[8 + header_len..].to_vec())
}

fn joined(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Returns the names in the order of their data.
fn names(header: &Value) -> Vec<String> {
    let mut names: Vec<_> = header.as_object().unwrap().keys().filter(|name| *name != "__metadata__").cloned().collect();
    names.sort_by_key(|name| header[name]["data_offsets"][0].as_u64());
    names
}

#[test]
fn a_truncated_or_too_long_weight_file_is_refused_with_its_lengths() {
    let whole = Model::golden("llama").read("model.safetensors");
    let header = whole.len() - parts(&whole).1.len();
    let mut failures = Failures::default();
    for len in
        [0, 1, 7, 8, 9, header / 2, header - 1, header, header + 1, whole.len() / 2, whole.len() - 1, whole.len() + 1, whole.len() + 4096]
    {
        let model = Model::golden("llama");
        let mut bytes = whole.clone();
        bytes.resize(len, 0);
        model.write("model.safetensors", bytes);
        failures.refused(
            &format!("{len} of {} bytes", whole.len()),
            &model,
            Code::Model,
            &["model.safetensors", "not a complete safetensors file", &len.to_string()],
        );
    }
    failures.none();
}

#[test]
fn a_header_length_out_of_range_is_refused_before_an_allocation() {
    let whole = Model::golden("llama").read("model.safetensors");
    let mut failures = Failures::default();
    for len in [0, 1, 200 << 20, 1 << 40, 1 << 63, u64::MAX - 7, u64::MAX] {
        let model = Model::golden("llama");
        model.write("model.safetensors", [&len.to_le_bytes(), &whole[8..]].concat());
        failures.refused(&format!("header of {len}"), &model, Code::Model, &["model.safetensors", "header"]);
    }
    // This file has the stated length, with a hole.
    let model = Model::golden("llama");
    model.write("model.safetensors", (200u64 << 20).to_le_bytes());
    fs::File::options().write(true).open(model.path("model.safetensors")).unwrap().set_len(1 << 30).unwrap();
    failures.refused("a header of 200 MB inside the file", &model, Code::Model, &["209715200"]);
    failures.none();
}

#[test]
fn a_header_that_is_not_a_table_of_tensors_is_refused() {
    let (_, data) = parts(&Model::golden("llama").read("model.safetensors"));
    let mut failures = Failures::default();
    let junk: [&[u8]; 7] = [b"{", b"[]", b"null", b"3", b"{\"a\": 3}", b"\xff\xfe\xfd", b"{\"a\": {\"dtype\": \"F32\"}}"];
    for header in junk {
        let model = Model::golden("llama");
        model.write("model.safetensors", joined(header, &data));
        failures.refused(&String::from_utf8_lossy(header), &model, Code::Model, &["model.safetensors", "header"]);
    }
    let model = Model::golden("llama");
    model.write("model.safetensors", joined("[".repeat(1 << 20).as_bytes(), &data));
    failures.refused("nested a million deep", &model, Code::Model, &["header"]);
    model.write("model.safetensors", joined(b"{}", b""));
    failures.refused("no tensors", &model, Code::Model, &["embed_tokens.weight is missing"]);
    failures.none();
}

#[test]
fn tensors_with_impossible_offsets_or_shapes_are_refused() {
    let (header, data) = parts(&Model::golden("llama").read("model.safetensors"));
    let names = names(&header);
    let (first, second, last) = (&names[0], &names[1], names.last().unwrap());
    let end = data.len() as u64;
    let last_start = header[last]["data_offsets"][0].clone();
    let cases = [
        ("two tensors in one place", second, "data_offsets", header[first]["data_offsets"].clone()),
        ("a hole before the first", first, "data_offsets", json!([4, header[first]["data_offsets"][1]])),
        ("beyond the end", last, "data_offsets", json!([last_start, end + 4])),
        ("far beyond the end", last, "data_offsets", json!([last_start, u64::MAX])),
        ("end before start", last, "data_offsets", json!([end, last_start])),
        ("negative", first, "data_offsets", json!([-4, 0])),
        ("not numbers", first, "data_offsets", json!(["0", "4"])),
        ("one offset", first, "data_offsets", json!([0])),
        ("one row less than its bytes", last, "shape", json!([1])),
        ("a shape whose product overflows", last, "shape", json!([1u64 << 40, 1u64 << 40])),
        ("a shape whose bytes overflow", last, "shape", json!([1u64 << 62])),
        ("a negative shape", last, "shape", json!([-32])),
        ("no shape", last, "shape", Value::Null),
        ("no type", last, "dtype", Value::Null),
        ("a type that does not fit its bytes", last, "dtype", json!("I64")),
        ("a type that does not exist", last, "dtype", json!("F31")),
    ];
    let mut failures = Failures::default();
    for (case, tensor, field, value) in cases {
        let model = Model::golden("llama");
        let mut header = header.clone();
        set(&mut header[tensor.as_str()], field, value);
        model.write("model.safetensors", joined(header.to_string().as_bytes(), &data));
        failures.refused(case, &model, Code::Model, &["model.safetensors", "not a complete safetensors file"]);
    }
    failures.none();
}

/// Each tensor is valid, and all tensors together have 2^64 - 8 bytes.
#[test]
fn tensors_that_add_up_to_the_whole_address_space_are_refused() {
    let size = (1u64 << 61) - 1;
    let tensors: serde_json::Map<String, Value> =
        (0..8u64).map(|i| (format!("t{i}"), json!({"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}))).collect();
    let model = Model::golden("llama");
    model.write("model.safetensors", joined(Value::Object(tensors).to_string().as_bytes(), &[0; 64]));
    let mut failures = Failures::default();
    failures.refused("8 tensors of 2^61 - 1 bytes", &model, Code::Model, &["not a complete safetensors file"]);
    failures.none();
}

type Tensors = BTreeMap<String, Stored>;
type Stored = (Dtype, Vec<usize>, Vec<u8>);

fn tensors(bytes: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(bytes).unwrap();
    file.iter().map(|(name, view)| (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))).collect()
}

fn serialized(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn an_error_names_every_missing_tensor() {
    let mut failures = Failures::default();
    for golden in ["llama", "gpt2", "opt", "opt_350m", "gpt_oss", "gpt_oss_mxfp4_bf16", "deepseek_v2_odd", "deepseek_v3"] {
        let model = Model::golden(golden);
        let whole = tensors(&model.read("model.safetensors"));
        for name in whole.keys() {
            let mut tensors = whole.clone();
            tensors.remove(name);
            model.write("model.safetensors", serialized(&tensors));
            failures.refused(&format!("{golden} without {name}"), &model, Code::Model, &[name, "missing"]);
        }
    }
    failures.none();
}

/// DeepSeek V3 has a layer after its last one, which predicts further tokens.
#[test]
fn an_extra_layer_is_ignored_only_if_the_config_declares_it() {
    let model = Model::golden("deepseek_v3");
    let mut tensors = tensors(&model.read("model.safetensors"));
    let norm = tensors["model.layers.1.input_layernorm.weight"].clone();
    tensors.insert("model.layers.2.input_layernorm.weight".into(), norm.clone());
    model.write("model.safetensors", serialized(&tensors));
    let mut failures = Failures::default();
    failures.refused("not declared", &model, Code::Model, &["tensor layers.2.input_layernorm.weight", "not part of the model"]);
    model.config("num_nextn_predict_layers", json!(1));
    Engine::create(&model.options()).unwrap();
    tensors.insert("model.layers.3.input_layernorm.weight".into(), norm);
    model.write("model.safetensors", serialized(&tensors));
    failures.refused("one more", &model, Code::Model, &["tensor layers.3.input_layernorm.weight"]);
    failures.none();
}

#[test]
fn mxfp4_of_a_wrong_type_or_beyond_the_range_of_bf16_is_refused() {
    let mut failures = Failures::default();
    let scales = "model.layers.1.mlp.experts.down_proj_scales";
    let changed = |change: &dyn Fn(&mut Stored)| {
        let model = Model::golden("gpt_oss_mxfp4_bf16");
        let mut tensors = tensors(&model.read("model.safetensors"));
        change(tensors.get_mut(scales).unwrap());
        model.write("model.safetensors", serialized(&tensors));
        model
    };
    failures.refused("signed", &changed(&|tensor| tensor.0 = Dtype::I8), Code::Unsupported, &["down_proj_scales is stored as I8", "U8"]);
    let model = changed(&|tensor| tensor.2[7] = 255);
    failures.expect("no scale", quietly(|| Engine::create(&model.options())), Code::Model, &["byte 255"]);
    failures.none();
}

#[test]
fn an_error_names_weights_that_a_format_cannot_represent() {
    let mut failures = Failures::default();
    let plan = |model: &Model, format| quietly(|| Engine::plan(&EngineOptions { weight_format: Some(format), ..model.options() }));
    let create = |model: &Model, weight_format| quietly(|| Engine::create(&EngineOptions { weight_format, ..model.options() }));
    let int4 = |group| WeightFormat::Int4 { group, offsets: false };
    let model = Model::golden("llama");
    let words = ["layers.0.mlp.down_proj.weight has 72 columns", "groups of 32"];
    failures.expect("72 columns in groups of 32", plan(&model, int4(32)), Code::Unsupported, &words);
    failures.expect("the same, loaded", create(&model, Some(int4(32))), Code::Unsupported, &words);
    for group in [0, 1, 33, 256] {
        failures.expect("unsupported groups", plan(&model, int4(group)), Code::InvalidArgument, &["weight_group is", "[32, 64, 128]"]);
    }
    for (bad, name) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let mut tensors = tensors(&model.read("model.safetensors"));
        tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap().2[4 * 32..][..4].copy_from_slice(&bad.to_le_bytes());
        model.write("model.safetensors", serialized(&tensors));
        let words = ["layers.1.mlp.up_proj.weight", "row 73 has a number that is NaN, infinite"];
        failures.expect(name, create(&model, Some(WeightFormat::Int8)), Code::Model, &words);
        // Floating-point formats keep the number, which then affects the logits.
        for format in [None, Some(WeightFormat::Bf16)] {
            let engine = create(&model, format).unwrap().unwrap();
            engine.add_request(Request::new(Prompt::Tokens(vec![5, 6]), SamplingParams::greedy())).unwrap();
            engine.step().unwrap();
            let outputs = engine.queue().poll(Some(Duration::ZERO)).unwrap();
            assert!(outputs.iter().any(|output| output.finish == Some(FinishReason::Error)), "{name} in {format:?}");
        }
    }
    failures.none();
}

#[test]
fn an_error_names_a_tensor_of_the_wrong_shape_with_both_shapes() {
    let cases: &[(&str, &[usize], &str, &[&str])] = &[
        ("llama", &[32, 72], "model.layers.1.mlp.up_proj.weight", &["layers.1.mlp.up_proj.weight", "[32, 72]", "[72, 32]"]),
        ("llama", &[72 * 32], "model.layers.1.mlp.up_proj.weight", &["layers.1.mlp.up_proj.weight", "[2304]", "[72, 32]"]),
        ("llama", &[1, 32], "model.norm.weight", &["norm.weight", "[1, 32]", "[32]"]),
        ("llama", &[16, 256], "lm_head.weight", &["lm_head.weight", "[16, 256]", "[128, 32]"]),
        ("gpt2", &[96, 32], "transformer.h.2.attn.c_attn.weight", &["h.2.attn.c_attn.weight", "[96, 32]", "[32, 96]"]),
        ("gpt2", &[32, 96], "transformer.wpe.weight", &["wpe.weight", "[32, 96]", "[96, 32]"]),
        ("opt", &[32, 98], "model.decoder.embed_positions.weight", &["embed_positions.weight", "[32, 98]", "[98, 32]"]),
    ];
    let mut failures = Failures::default();
    for (golden, shape, name, words) in cases {
        let model = Model::golden(golden);
        let mut tensors = tensors(&model.read("model.safetensors"));
        tensors.get_mut(*name).unwrap().1 = shape.to_vec();
        model.write("model.safetensors", serialized(&tensors));
        failures.refused(&format!("{golden} {name} {shape:?}"), &model, Code::Model, words);
    }
    failures.none();
}

#[test]
fn an_error_names_a_tensor_of_an_unsupported_type_and_the_supported_types() {
    let mut failures = Failures::default();
    for (dtype, bytes) in [(Dtype::I64, 8), (Dtype::F64, 8), (Dtype::I32, 4), (Dtype::U8, 1), (Dtype::BOOL, 1), (Dtype::F8_E4M3, 1)] {
        for name in ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"] {
            let model = Model::golden("llama");
            let mut tensors = tensors(&model.read("model.safetensors"));
            let (stored, shape, data) = tensors.get_mut(name).unwrap();
            *stored = dtype;
            *data = vec![0; shape.iter().product::<usize>() * bytes];
            model.write("model.safetensors", serialized(&tensors));
            let words = [name.trim_start_matches("model."), &format!("{dtype:?}"), "F32, F16, BF16"];
            failures.refused(&format!("{name} as {dtype:?}"), &model, Code::Unsupported, &words);
        }
    }
    failures.none();
}

/// Products with all experts of a layer are one operation.
#[test]
fn an_expert_that_is_stored_in_another_type_than_the_others_is_refused() {
    let mut failures = Failures::default();
    for matrix in ["w1", "w2"] {
        let model = Model::golden("mixtral");
        let mut tensors = tensors(&model.read("model.safetensors"));
        for name in ["w1", "w3", "w2"].into_iter().filter(|name| (*name == "w2") == (matrix == "w2")) {
            let key = format!("model.layers.1.block_sparse_moe.experts.2.{name}.weight");
            let (stored, shape, data) = tensors.get_mut(&key).unwrap();
            *stored = Dtype::F32;
            *data = vec![0; shape.iter().product::<usize>() * 4];
        }
        model.write("model.safetensors", serialized(&tensors));
        let words = [&format!("layers.1.block_sparse_moe.experts.2.{matrix}.weight")[..], "another type", "other experts"];
        failures.refused(&format!("{matrix} in f32"), &model, Code::Model, &words);
    }
    failures.none();
}

const INDEX: &str = "model.safetensors.index.json";
const FIRST: &str = "model-00001-of-00004.safetensors";
const SECOND: &str = "model-00002-of-00004.safetensors";
const NORM: &str = "model.norm.weight";

fn map(model: &Model, change: impl FnOnce(&mut Value)) {
    model.edit(INDEX, |index| change(&mut index["weight_map"]));
}

#[test]
fn an_index_that_does_not_match_its_shards_is_refused() {
    type Case = (&'static str, fn(&Model), Code, &'static [&'static str]);
    let cases: &[Case] = &[
        ("a missing shard", |model| model.remove(SECOND), Code::Io, &[SECOND]),
        ("an empty shard", |model| model.write(SECOND, ""), Code::Model, &[SECOND, "0 bytes"]),
        ("not JSON", |model| model.write(INDEX, "{"), Code::Model, &[INDEX]),
        ("an array", |model| model.write(INDEX, "[]"), Code::Model, &[INDEX, "not a JSON object"]),
        ("no map", |model| model.write(INDEX, "{}"), Code::Model, &[INDEX, "weight_map"]),
        ("a map that is an array", |model| map(model, |map| *map = json!([])), Code::Model, &[INDEX, "weight_map"]),
        ("a map with nothing in it", |model| map(model, |map| *map = json!({})), Code::Model, &[INDEX]),
        (
            "a tensor in no shard",
            |model| map(model, |map| map["extra.weight"] = json!(FIRST)),
            Code::Model,
            &["extra.weight", "in none of the files"],
        ),
        ("a shard that is a number", |model| map(model, |map| map[NORM] = json!(5)), Code::Model, &[NORM]),
        ("a shard without a name", |model| map(model, |map| map[NORM] = json!("")), Code::Model, &[NORM]),
        ("a shard outside", |model| map(model, |map| map[NORM] = json!("../x.safetensors")), Code::Model, &[NORM]),
        ("a shard at the root", |model| map(model, |map| map[NORM] = json!("/x.safetensors")), Code::Model, &[NORM]),
        ("a shard with NUL", |model| map(model, |map| map[NORM] = json!("x\0y")), Code::Io, &["x"]),
        ("the directory above", |model| map(model, |map| map[NORM] = json!("..")), Code::Io, &[".."]),
        (
            "one shard only",
            |model| map(model, |map| map.as_object_mut().unwrap().retain(|_, shard| shard == FIRST)),
            Code::Model,
            &["missing"],
        ),
    ];
    let mut failures = Failures::default();
    for (case, damage, code, words) in cases {
        let model = Model::golden("llama_sharded");
        damage(&model);
        failures.refused(case, &model, *code, words);
    }
    failures.none();
}

#[test]
fn an_error_names_a_tensor_in_two_shards() {
    let model = Model::golden("llama_sharded");
    let shard = model.read(SECOND);
    let name = names(&parts(&shard).0).remove(0);
    model.write("again.safetensors", shard);
    map(&model, |map| map[&name] = json!("again.safetensors"));
    // This name keeps the other shard in use, regardless of its tensors.
    map(&model, |map| map["other"] = json!(SECOND));
    let mut failures = Failures::default();
    failures.refused("twice", &model, Code::Model, &["also in another file"]);
    failures.none();
}

/// Weights are not checked for NaN when they are loaded. A request with a NaN ends with the reason,
/// and the engine continues.
#[test]
fn weights_with_nan_end_requests_and_not_the_engine() {
    let model = Model::golden("llama");
    let mut tensors = tensors(&model.read("model.safetensors"));
    tensors.get_mut("model.norm.weight").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    model.write("model.safetensors", serialized(&tensors));
    let engine = Engine::create(&model.options()).unwrap();
    for _ in 0..2 {
        let last = run(&engine, tokens(&[1, 2, 3], SamplingParams::greedy())).unwrap().outputs.pop().unwrap();
        assert_eq!(last.finish, Some(FinishReason::Error));
        assert!(last.error.as_ref().unwrap().message().contains("NaN"), "{last:?}");
    }
    assert_idle(&engine);
}

// The text side and the generation config.

#[test]
fn a_missing_or_broken_tokenizer_is_refused_only_if_it_is_loaded() {
    let whole = fs::read(root().join("tests/data/tokenizers/byte_level/tokenizer.json")).unwrap();
    let cases: [(&str, Option<&[u8]>, Code); 7] = [
        ("missing", None, Code::Io),
        ("empty", Some(b""), Code::Model),
        ("cut", Some(&whole[..whole.len() / 2]), Code::Model),
        ("an empty object", Some(b"{}"), Code::Model),
        ("an array", Some(b"[]"), Code::Model),
        ("not UTF-8", Some(b"\xff\xfe"), Code::Model),
        ("another JSON file", Some(b"{\"vocab_size\": 3}"), Code::Model),
    ];
    let mut failures = Failures::default();
    for (case, bytes, code) in cases {
        let model = Model::golden("llama");
        bytes.iter().for_each(|bytes| model.write("tokenizer.json", bytes));
        failures.expect(case, quietly(|| Engine::create(&model.with_text())), code, &["tokenizer.json"]);
        Engine::create(&model.options()).unwrap();
    }
    failures.none();
}

#[test]
fn an_error_names_a_broken_companion_file_of_a_model() {
    let mut failures = Failures::default();
    for (file, content, words) in [
        ("generation_config.json", "{", &["generation_config.json"][..]),
        ("generation_config.json", "", &["generation_config.json"]),
        ("generation_config.json", "[]", &["generation_config.json", "not a JSON object"]),
        ("generation_config.json", "{\"eos_token_id\": \"x\"}", &["generation_config.json", "eos_token_id is \"x\""]),
        ("generation_config.json", "{\"eos_token_id\": [2, -1]}", &["generation_config.json", "eos_token_id is [2,-1]"]),
        ("tokenizer_config.json", "{", &["tokenizer_config.json"]),
        ("tokenizer_config.json", "[]", &["tokenizer_config.json", "not a JSON object"]),
    ] {
        let model = Model::golden("llama");
        symlink(root().join("tests/data/tokenizers/byte_level/tokenizer.json"), model.path("tokenizer.json")).unwrap();
        model.write(file, content);
        failures.expect(&format!("{file} {content}"), quietly(|| Engine::create(&model.with_text())), Code::Model, words);
    }
    failures.none();
}

// Random damage.

/// SplitMix64: the same damage in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Flips, replaces by JSON characters, removes or duplicates up to three bytes.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 | 1 => bytes[at] ^= 1 << self.below(8),
                2 => bytes[at] = b"0123456789-.eE\"{}[],: "[self.below(22)],
                3 => drop(bytes.remove(at)),
                _ => bytes.insert(at, bytes[at]),
            }
        }
    }
}

/// Opens the damaged model. An accepted model must also generate without an internal error.
fn open_and_serve(options: &EngineOptions) -> Result<(), Error> {
    Engine::plan(options)?;
    let engine = Engine::create(options)?;
    if let Ok(text) = engine.text() {
        let encoded = text.encode("Hello, wörld! 12", true)?;
        let _ = text.decode(&encoded, false);
    }
    if engine.info().memory.max_model_len > 4 {
        run(&engine, tokens(&[0, 0, 0], SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() }))?;
    }
    engine.check()
}

/// A file of a model. `part` is damaged, and `whole` returns the file with a damaged part.
struct Target<'a> {
    model: &'a Model,
    file: &'a str,
    part: &'a [u8],
    whole: &'a dyn Fn(&[u8]) -> Vec<u8>,
}

impl Target<'_> {
    /// Damages the file in each round. A result or an error is accepted, a panic or a long wait is
    /// not.
    fn check_damage(&self, seed: u64, rounds: usize, options: &EngineOptions) {
        let mut random = Random(seed);
        let (mut accepted, mut failures) = (0, Vec::new());
        for round in 0..rounds {
            let mut bytes = self.part.to_vec();
            random.damage(&mut bytes);
            self.model.write(self.file, (self.whole)(&bytes));
            let start = cpu_time::of_thread();
            match quietly(|| open_and_serve(options)) {
                Err(panic) => failures.push(format!("round {round}: panicked: {panic}")),
                Ok(Err(e)) if e.code() == Code::Internal || e.message().is_empty() => {
                    failures.push(format!("round {round}: {:?} {e}", e.code()))
                }
                Ok(result) => accepted += result.is_ok() as usize,
            }
            let used = cpu_time::of_thread() - start;
            if used > Duration::from_secs(20) {
                failures.push(format!("round {round}: took {used:?} of CPU time"));
            }
        }
        assert!(failures.is_empty(), "{}, seed {seed}:\n{}", self.file, failures.join("\n"));
        assert!((1..rounds).contains(&accepted), "{}: {accepted} of {rounds} accepted: the damage is too weak or too strong", self.file);
    }
}

fn check_damage_to_file(model: &Model, file: &str, seed: usize, options: &EngineOptions) {
    let part = &model.read(file);
    Target { model, file, part, whole: &|bytes| bytes.to_vec() }.check_damage(seed as u64, 500, options);
}

#[test]
fn random_damage_to_a_config_gives_a_result_or_an_error() {
    for (seed, golden) in ["llama", "gpt2", "opt_350m", "llama3_rope"].iter().enumerate() {
        let model = Model::golden(golden);
        check_damage_to_file(&model, "config.json", seed, &model.options());
    }
}

/// Once with the original length of the header, and once with the length of the damaged header.
#[test]
fn random_damage_to_a_weight_file_header_gives_a_result_or_an_error() {
    for (seed, golden) in ["llama", "gpt2"].iter().enumerate() {
        let model = &Model::golden(golden);
        let bytes = model.read("model.safetensors");
        let data = parts(&bytes).1;
        let header = &bytes[..bytes.len() - data.len()];
        let file = "model.safetensors";
        Target { model, file, part: header, whole: &|header| [header, &data].concat() }.check_damage(seed as u64, 500, &model.options());
        Target { model, file, part: &header[8..], whole: &|header| joined(header, &data) }.check_damage(
            seed as u64,
            1000,
            &model.options(),
        );
    }
}

#[test]
fn random_damage_to_an_index_gives_a_result_or_an_error() {
    let model = Model::golden("llama_sharded");
    check_damage_to_file(&model, INDEX, 7, &model.options());
}

#[test]
fn random_damage_to_a_tokenizer_gives_a_result_or_an_error() {
    for (seed, tokenizer) in ["byte_level", "llama2", "metaspace"].iter().enumerate() {
        let model = Model::golden("llama");
        symlink(root().join("tests/data/tokenizers").join(tokenizer).join("tokenizer.json"), model.path("tokenizer.json")).unwrap();
        check_damage_to_file(&model, "tokenizer.json", seed, &model.with_text());
    }
}

// Engine options.

#[test]
fn invalid_engine_options_are_refused_with_the_value_and_the_range() {
    type Case = (fn(&mut EngineOptions), Code, &'static [&'static str]);
    let cases: &[Case] = &[
        (|o| o.max_model_len = Some(1), Code::InvalidArgument, &["max_model_len is 1", "128"]),
        (|o| o.max_model_len = Some(0), Code::InvalidArgument, &["max_model_len is 0"]),
        (|o| o.max_model_len = Some(129), Code::InvalidArgument, &["max_model_len is 129", "128"]),
        (|o| o.max_model_len = Some(usize::MAX), Code::InvalidArgument, &["max_model_len is 18446744073709551615"]),
        (|o| o.block_size = 12, Code::InvalidArgument, &["block_size is 12", "8, 16, 32"]),
        (|o| o.block_size = 0, Code::InvalidArgument, &["block_size is 0"]),
        (|o| o.block_size = 512, Code::InvalidArgument, &["block_size is 512"]),
        (|o| (o.max_batch_tokens, o.max_seqs) = (8, 16), Code::InvalidArgument, &["max_batch_tokens is 8", "max_seqs is 16"]),
        (|o| o.max_batch_tokens = 0, Code::InvalidArgument, &["max_batch_tokens is 0"]),
        (|o| o.max_batch_tokens = usize::MAX, Code::InvalidArgument, &["max_batch_tokens is 18446744073709551615"]),
        (|o| o.max_seqs = 0, Code::InvalidArgument, &["max_seqs is 0"]),
        (|o| (o.max_batch_tokens, o.max_seqs) = (1 << 20, 1 << 17), Code::InvalidArgument, &["max_seqs is 131072"]),
        (|o| o.prefill_chunk = Some(0), Code::InvalidArgument, &["prefill_chunk is 0"]),
        (|o| o.threads = Some(0), Code::InvalidArgument, &["threads is 0"]),
        (|o| o.threads = Some(100_000), Code::InvalidArgument, &["threads is 100000", "1024"]),
        (|o| o.device = "cuda:99".into(), Code::Unsupported, &["cuda:99", "cpu"]),
        (|o| o.device = "cuda:-1".into(), Code::Unsupported, &["device is \"cuda:-1\"", "cuda:N"]),
        (|o| o.device = "gpu".into(), Code::Unsupported, &["device is \"gpu\"", "cuda:N"]),
        (|o| o.weight_format = Some(WeightFormat::Fp8), Code::Unsupported, &["weight_format is fp8", "CUDA devices", "int8"]),
        (|o| (o.device, o.packed_dir) = ("cuda:0".into(), Some("packed".into())), Code::Unsupported, &["cuda:0", "packed_path"]),
        (|o| (o.device, o.isa) = ("cuda".into(), Some(Isa::Portable)), Code::Unsupported, &["cuda", "isa"]),
        (|o| o.device = String::new(), Code::Unsupported, &["device is \"\""]),
    ];
    let model = Model::golden("llama");
    let mut failures = Failures::default();
    for (i, (change, code, words)) in cases.iter().enumerate() {
        let mut options = model.options();
        change(&mut options);
        failures.expect(&format!("case {i} (plan)"), quietly(|| Engine::plan(&options)), *code, words);
        failures.expect(&format!("case {i} (create)"), quietly(|| Engine::create(&options)), *code, words);
    }
    failures.none();
}

#[test]
fn an_error_names_an_unavailable_instruction_path() {
    let model = Model::golden("llama");
    for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_present()) {
        let error = Engine::create(&EngineOptions { isa: Some(isa), ..model.options() }).err().unwrap();
        assert_eq!(error.code(), Code::Unsupported);
        assert!(error.message().contains(isa.name()), "{error}");
    }
}

/// Returns the number after `before` in a message.
fn number(message: &str, before: &str) -> u64 {
    let rest = message.split_once(before).unwrap_or_else(|| panic!("no {before:?} in {message:?}")).1;
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

#[test]
fn the_error_of_a_too_small_kv_pool_names_the_bytes_that_suffice() {
    let model = Model::golden("llama");
    for (max_model_len, block_size) in [(Some(64), 16), (Some(128), 8), (Some(2), 256), (Some(100), 32), (None, 16)] {
        let with = |kv_bytes| EngineOptions { kv_bytes: Some(kv_bytes), max_model_len, block_size, ..model.options() };
        for too_small in [1, 1000] {
            let error = Engine::create(&with(too_small)).err().unwrap();
            assert_eq!(error.code(), Code::Capacity, "{error}");
            let enough = number(error.message(), "raise kv_bytes to ");
            assert_eq!(Engine::create(&with(enough - 1)).err().unwrap().code(), Code::Capacity);
            let engine = Engine::create(&with(enough)).unwrap();
            let max_len = engine.info().memory.max_model_len;
            assert_eq!(max_len, max_model_len.unwrap_or(16));
            let out = run(&engine, tokens(&vec![3; max_len - 1], SamplingParams::greedy())).unwrap();
            assert_eq!((out.tokens.len(), out.finish), (1, FinishReason::Length));
        }
    }
}

/// More memory than any machine has is an out-of-memory error. A plan does not allocate it.
#[test]
fn a_kv_pool_that_exceeds_the_machine_is_an_error() {
    let model = Model::golden("llama");
    for kv_bytes in [1 << 50, u64::MAX] {
        let options = EngineOptions { kv_bytes: Some(kv_bytes), ..model.options() };
        assert!(Engine::plan(&options).unwrap().kv_bytes <= kv_bytes);
        // With overcommit, the system accepts the allocation.
        if fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "1") {
            continue;
        }
        assert_eq!(Engine::create(&options).err().map(|e| e.code()), Some(Code::OutOfMemory), "{kv_bytes}");
    }
}

// Requests.

#[derive(Debug)]
struct Run {
    outputs: Vec<Output>,
    tokens: Vec<u32>,
    text: String,
    finish: FinishReason,
}

fn tokens(prompt: &[u32], sampling: SamplingParams) -> Request {
    Request::new(Prompt::Tokens(prompt.to_vec()), sampling)
}

/// Steps until the request has ended.
fn run(engine: &Engine, request: Request) -> Result<Run, Error> {
    let id = engine.add_request(request)?;
    let mut outputs = Vec::new();
    for _ in 0..10_000 {
        let report = engine.step()?;
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap().into_iter().filter(|output| output.request == id));
        if report.unfinished == 0 {
            break;
        }
    }
    let finish = outputs.last().and_then(|output| output.finish).expect("the request has ended");
    assert_eq!(outputs.iter().filter(|output| output.finish.is_some()).count(), 1);
    let tokens = outputs.iter().flat_map(|output| output.tokens.clone()).collect();
    let text = outputs.iter().map(|output| output.text.as_str()).collect();
    Ok(Run { outputs, tokens, text, finish })
}

#[track_caller]
fn assert_idle(engine: &Engine) {
    let stats = engine.stats();
    assert_eq!((stats.blocks_free + stats.blocks_cached, stats.blocks_used), (stats.blocks_total, 0), "{stats:?}");
    assert_eq!((stats.waiting, stats.running, stats.slot_utilization), (0, 0, 1.0), "{stats:?}");
}

fn seeded() -> SamplingParams {
    SamplingParams { seed: Some(11), max_tokens: Some(12), ignore_eos: true, logprobs: Some(0), ..Default::default() }
}

/// Returns the results of a request, except its id.
fn signature(run: &Run) -> (Vec<u32>, Vec<u32>, String, FinishReason) {
    let logprobs = run.outputs.iter().flat_map(|output| output.logprobs.tokens.iter().map(|x| x.to_bits())).collect();
    (run.tokens.clone(), logprobs, run.text.clone(), run.finish)
}

type BadRequest = (&'static str, Request, Code, &'static [&'static str]);

fn bad_requests() -> Vec<BadRequest> {
    let sampling = SamplingParams::greedy;
    let with = |change: fn(&mut SamplingParams)| {
        let mut params = sampling();
        change(&mut params);
        tokens(&[1, 2, 3], params)
    };
    let invalid = Code::InvalidArgument;
    vec![
        ("token beyond the vocabulary", tokens(&[1, 128], sampling()), invalid, &["prompt token 1 is 128", "128 tokens"]),
        ("largest token", tokens(&[u32::MAX], sampling()), invalid, &["prompt token 0 is 4294967295"]),
        ("empty prompt", tokens(&[], sampling()), invalid, &["empty"]),
        (
            "as long as max_model_len",
            tokens(&[1; 64], sampling()),
            invalid,
            &["prompt is 64 tokens", "max_model_len is 64", "shorten the prompt to 63"],
        ),
        ("longer", tokens(&[1; 65], sampling()), invalid, &["prompt is 65 tokens", "the KV pool holds 64"]),
        ("longer than the model", tokens(&[1; 1000], sampling()), invalid, &["prompt is 1000 tokens"]),
        ("temperature NaN", with(|p| p.temperature = f32::NAN), invalid, &["temperature is NaN"]),
        ("temperature inf", with(|p| p.temperature = f32::INFINITY), invalid, &["temperature is inf"]),
        ("temperature -1", with(|p| p.temperature = -1.0), invalid, &["temperature is -1"]),
        ("top_p NaN", with(|p| p.top_p = f32::NAN), invalid, &["top_p is NaN"]),
        ("top_p 0", with(|p| p.top_p = 0.0), invalid, &["top_p is 0"]),
        ("top_p 1.5", with(|p| p.top_p = 1.5), invalid, &["top_p is 1.5"]),
        ("min_p NaN", with(|p| p.min_p = f32::NAN), invalid, &["min_p is NaN"]),
        ("min_p -0.1", with(|p| p.min_p = -0.1), invalid, &["min_p is -0.1"]),
        ("min_p 2", with(|p| p.min_p = 2.0), invalid, &["min_p is 2"]),
        ("max_tokens 0 of two samples", Request { n: 2, ..with(|p| p.max_tokens = Some(0)) }, invalid, &["max_tokens is 0", "2 samples"]),
        ("min above max", with(|p| (p.min_tokens, p.max_tokens) = (5, Some(4))), invalid, &["min_tokens is 5", "max_tokens is 4"]),
        ("stop token out of range", with(|p| p.stop_token_ids = vec![3, 128]), invalid, &["stop token id 128", "128 tokens"]),
        ("empty stop string", with(|p| p.stop = vec![String::new()]), invalid, &["stop string is empty"]),
        ("stop string without a tokenizer", with(|p| p.stop = vec!["x".into()]), Code::Unsupported, &["tokenizer", "stop_token_ids"]),
        ("text without a tokenizer", Request::new(Prompt::Text("hello".into()), sampling()), Code::Unsupported, &["skip_tokenizer"]),
        ("n = 0", Request { n: 0, ..with(|_| ()) }, invalid, &["n is 0"]),
        ("n = 2", Request { n: 2, ..with(|_| ()) }, Code::Capacity, &["2 sequences of 64 tokens", "need 8 KV blocks", "the pool has 4"]),
    ]
}

/// An engine with KV for 64 tokens, fewer than the 128 positions of the model.
fn small_engine(model: &Model) -> Engine {
    let block_bytes = Engine::plan(&model.options()).unwrap().block_bytes;
    Engine::create(&EngineOptions { kv_bytes: Some(4 * block_bytes), ..model.options() }).unwrap()
}

#[test]
fn an_invalid_request_does_not_change_the_results_of_later_ones() {
    let engine = small_engine(&Model::golden("llama"));
    assert_eq!(engine.info().memory.max_model_len, 64);
    let before = signature(&run(&engine, tokens(&[5, 6, 7, 8], seeded())).unwrap());
    let mut failures = Failures::default();
    for (case, request, code, words) in bad_requests() {
        failures.expect(case, quietly(|| engine.add_request(request)), code, words);
        assert_eq!(signature(&run(&engine, tokens(&[5, 6, 7, 8], seeded())).unwrap()), before, "{case}");
        assert_idle(&engine);
    }
    failures.none();
    assert_eq!(engine.step().unwrap().unfinished, 0);
}

#[test]
fn an_invalid_request_does_not_change_a_running_one() {
    let engine = small_engine(&Model::golden("llama"));
    let before = signature(&run(&engine, tokens(&[5, 6, 7, 8], seeded())).unwrap());
    let id = engine.add_request(tokens(&[5, 6, 7, 8], seeded())).unwrap();
    let mut outputs = Vec::new();
    for (_, request, _, _) in bad_requests() {
        assert!(engine.add_request(request).is_err());
        engine.step().unwrap();
        outputs.extend(engine.queue().poll(Some(Duration::ZERO)).unwrap());
    }
    assert!(outputs.iter().all(|output| output.request == id));
    let tokens = outputs.iter().flat_map(|output| output.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens, before.0);
    assert_idle(&engine);
}

#[test]
fn a_prompt_one_token_short_of_the_limit_gets_one_token() {
    let engine = small_engine(&Model::golden("llama"));
    let out = run(&engine, tokens(&[1; 63], SamplingParams { ignore_eos: true, ..SamplingParams::greedy() })).unwrap();
    assert_eq!((out.tokens.len(), out.finish), (1, FinishReason::Length));
    assert_idle(&engine);
}

#[test]
fn only_a_live_request_can_be_aborted() {
    let engine = small_engine(&Model::golden("llama"));
    let unknown = |id| engine.abort(id).err().map(|e| (e.code(), e.message().contains(&id.to_string())));
    for id in [0, 1, 999, u64::MAX].map(RequestId::from_raw) {
        assert_eq!(unknown(id), Some((Code::NotFound, true)), "{id}");
    }
    let finished = run(&engine, tokens(&[1, 2], seeded())).unwrap().outputs[0].request;
    assert_eq!(unknown(finished), Some((Code::NotFound, true)));
    let aborted = engine.add_request(tokens(&[1, 2], seeded())).unwrap();
    engine.step().unwrap();
    engine.abort(aborted).unwrap();
    engine.step().unwrap();
    assert_eq!(unknown(aborted), Some((Code::NotFound, true)));
    let ends: Vec<_> = engine.queue().poll(Some(Duration::ZERO)).unwrap().into_iter().filter_map(|output| output.finish).collect();
    assert_eq!(ends, [FinishReason::Abort]);
    assert_idle(&engine);
}

/// The request is neither computed nor kept.
#[test]
fn a_request_that_is_aborted_twice_before_its_first_step_ends_once() {
    let engine = small_engine(&Model::golden("llama"));
    let id = engine.add_request(tokens(&[1, 2], seeded())).unwrap();
    engine.abort(id).unwrap();
    let _ = engine.abort(id);
    assert_eq!(engine.step().unwrap().unfinished, 0);
    let outputs = engine.queue().poll(Some(Duration::ZERO)).unwrap();
    assert_eq!(outputs.len(), 1);
    assert_eq!((outputs[0].finish, outputs[0].generated_tokens), (Some(FinishReason::Abort), 0));
    assert_idle(&engine);
}

/// Every token is a stop token, and min_tokens excludes stop tokens.
#[test]
fn a_request_that_excludes_every_token_ends_without_affecting_others() {
    let engine = small_engine(&Model::golden("llama"));
    let before = signature(&run(&engine, tokens(&[5, 6], seeded())).unwrap());
    let nothing = SamplingParams { stop_token_ids: (0..128).collect(), min_tokens: 2, ..SamplingParams::greedy() };
    let out = run(&engine, tokens(&[5, 6], nothing)).unwrap();
    assert_eq!((out.finish, out.outputs.len()), (FinishReason::Error, 1));
    let error = out.outputs[0].error.as_ref().unwrap();
    assert_eq!(error.code(), Code::InvalidArgument);
    let message = error.message();
    assert!(
        message.contains("all are excluded, by min_tokens") && !message.contains("weights"),
        "the message names the parameter of the request: {message}"
    );
    assert_eq!(signature(&run(&engine, tokens(&[5, 6], seeded())).unwrap()), before);
    assert_idle(&engine);
}

#[test]
fn invalid_text_requests_do_not_change_later_results() {
    let model = Model::linked_to(&root().join("examples/model"));
    let engine = Engine::create(&EngineOptions { kv_bytes: Some(8 << 20), max_batch_tokens: 64, ..model.with_text() }).unwrap();
    let question = |change: fn(&mut Request)| {
        let prompt = engine.text().unwrap().render_chat(r#"[{"role": "user", "content": "What is 7 + 5?"}]"#).unwrap();
        let mut request = Request { add_special: false, ..Request::new(Prompt::Text(prompt), SamplingParams::greedy()) };
        change(&mut request);
        request
    };
    let before = signature(&run(&engine, question(|_| ())).unwrap());
    assert_eq!(before.2, "12");
    let mut failures = Failures::default();
    let cases: [BadRequest; 7] = [
        ("empty text", question(|r| r.prompt = Prompt::Text(String::new())), Code::InvalidArgument, &["empty"]),
        (
            "long text",
            question(|r| r.prompt = Prompt::Text("one two three ".repeat(2000))),
            Code::InvalidArgument,
            &["max_model_len is 1024"],
        ),
        (
            "empty stop string",
            question(|r| r.sampling.stop = vec!["a".into(), String::new()]),
            Code::InvalidArgument,
            &["stop string is empty"],
        ),
        ("stop token", question(|r| r.sampling.stop_token_ids = vec![1024]), Code::InvalidArgument, &["stop token id 1024"]),
        ("temperature", question(|r| r.sampling.temperature = f32::NAN), Code::InvalidArgument, &["temperature"]),
        ("n", question(|r| r.n = u32::MAX), Code::InvalidArgument, &["needs 4294967295 sequences at once", "max_seqs is"]),
        ("token", question(|r| r.prompt = Prompt::Tokens(vec![1024])), Code::InvalidArgument, &["prompt token 0 is 1024"]),
    ];
    for (case, request, code, words) in cases {
        failures.expect(case, quietly(|| engine.add_request(request)), code, words);
    }
    for chat in ["", "{", "3", "{}", "[{\"role\": \"user\"}", "{\"messages\": 3}", &"[".repeat(1 << 20)] {
        failures.expect(chat, quietly(|| engine.text()?.render_chat(chat)), Code::InvalidArgument, &["chat"]);
    }
    failures.expect("detokenize", quietly(|| engine.text()?.decode(&[5, u32::MAX], true)), Code::InvalidArgument, &["4294967295"]);
    failures.none();
    assert_eq!(signature(&run(&engine, question(|_| ())).unwrap()), before);
    assert_idle(&engine);
}

/// A wrong value is an error of the requests that want it, not of the engine.
#[test]
fn requests_can_take_the_sampling_parameters_of_the_model() {
    let file = "generation_config.json";
    let model = Model::golden("llama");
    let run = |sampling: SamplingParams| {
        let engine = Engine::create(&model.options()).unwrap();
        engine.add_request(Request::new(
            Prompt::Tokens(vec![5, 6, 7]),
            SamplingParams { seed: Some(3), max_tokens: Some(20), ignore_eos: true, ..sampling },
        ))?;
        let mut tokens = Vec::new();
        while engine.step().unwrap().unfinished > 0 {}
        engine.queue().poll(None).unwrap().into_iter().for_each(|output| tokens.extend(output.tokens));
        Ok::<_, Error>(tokens)
    };
    let wanted = |sampling| run(SamplingParams { model_defaults: true, ..sampling });
    let plain = run(SamplingParams::default()).unwrap();
    assert_eq!(wanted(SamplingParams::default()).unwrap(), plain, "the model has no such file");
    model.write(
        file,
        json!({"temperature": 0.3, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "min_p": null, "eos_token_id": 2}).to_string(),
    );
    let recommended = SamplingParams { temperature: 0.3, top_k: 5, top_p: 0.9, repetition_penalty: 1.2, ..SamplingParams::default() };
    assert_eq!(wanted(SamplingParams::default()).unwrap(), run(recommended.clone()).unwrap());
    assert_eq!(run(SamplingParams::default()).unwrap(), plain, "not wanted");
    let own = SamplingParams { top_k: 2, ..SamplingParams::default() };
    assert_eq!(wanted(own).unwrap(), run(SamplingParams { top_k: 2, ..recommended }).unwrap(), "own values stay");
    model.write(file, json!({"do_sample": false, "temperature": 0.3}).to_string());
    assert_eq!(wanted(SamplingParams::default()).unwrap(), run(SamplingParams::greedy()).unwrap());
    for wrong in [json!({"temperature": "0.6"}), json!({"top_k": -1}), json!({"top_p": [0.9]}), json!({"do_sample": 1})] {
        model.write(file, wrong.to_string());
        let error = wanted(SamplingParams::default()).unwrap_err();
        assert!(error.code() == Code::Model && error.message().starts_with("generation_config.json: "), "{error}");
        assert_eq!(run(SamplingParams::default()).unwrap(), plain);
    }
    model.write(file, json!({"top_p": 1.5}).to_string());
    assert!(wanted(SamplingParams::default()).unwrap_err().message().contains("top_p is 1.5"));
}
