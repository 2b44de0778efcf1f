//! The model of a GGUF file, in the terms of Hugging Face: its config, and the names of its tensors.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::{Gguf, Metadata};
use crate::error::{Error, Result};
use crate::model::spec::{ModelSpec, Pairs};
use crate::sys::files;

/// A value of `general.architecture`, the architecture in Hugging Face, and which dimensions of a
/// head rotate together. In files of "llama", the rows of queries and keys have another order than in
/// Hugging Face, so that neighbours rotate.
const ARCHITECTURES: [(&str, &str, Pairs); 3] = [
    ("llama", "LlamaForCausalLM", Pairs::Neighbours),
    ("qwen2", "Qwen2ForCausalLM", Pairs::Halves),
    ("qwen3", "Qwen3ForCausalLM", Pairs::Halves),
];

/// Names of tensors outside of layers: in GGUF, and in Hugging Face.
const OUTSIDE: [(&str, &str); 3] = [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names of tensors of a layer.
const OF_LAYER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Limit of numbers in the metadata. The config has narrower ones.
const MAX_NUMBER: usize = u32::MAX as usize;

/// Returns the GGUF file at a path: the file itself, or that of a directory without a config.json.
pub fn find(path: &Path) -> Result<Option<PathBuf>> {
    if path.is_file() && path.extension().is_some_and(|extension| extension == "gguf") {
        return Ok(Some(path.into()));
    }
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(None);
    }
    let mut found = files::with_extension(path, "gguf")?;
    match found.len() {
        0 | 1 => Ok(found.pop()),
        count => Err(Error::model(format!("{} has {count} GGUF files; set model_path to one of them", path.display()))),
    }
}

/// Returns the name that Hugging Face has for a tensor. Other names stay as they are.
pub fn tensor_name(name: &str) -> String {
    let (base, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
    let renamed = |names: &[(&'static str, &'static str)], base: &str| names.iter().find(|(gguf, _)| *gguf == base).map(|(_, name)| *name);
    if let Some(name) = renamed(&OUTSIDE, base) {
        return format!("{name}.{suffix}");
    }
    match base.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => format!("model.layers.{layer}.{}.{suffix}", renamed(&OF_LAYER, part).unwrap_or(part)),
        None => name.into(),
    }
}

/// Reads the values of one architecture, and names their keys in errors.
struct Fields<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Fields<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn whole(&self, name: &str) -> Result<Option<usize>> {
        self.metadata.whole(&self.key(name), MAX_NUMBER)
    }

    fn required(&self, name: &str) -> Result<usize> {
        self.whole(name)?.ok_or_else(|| Error::model(format!("{} is missing; convert the model again", self.key(name))))
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        self.metadata.number(&self.key(name))
    }
}

/// Returns the config.json of the model.
pub fn config(file: &Gguf) -> Result<Map<String, Json>> {
    let metadata = &file.metadata;
    let (architecture, name, _) = architecture(metadata)?;
    let fields = Fields { metadata, architecture };
    if metadata.whole("split.count", MAX_NUMBER)?.is_some_and(|count| count > 1) {
        return Err(Error::unsupported("the model is split over several files; merge them with llama-gguf-split --merge"));
    }
    if fields.whole("expert_count")?.is_some_and(|count| count > 0) {
        return Err(Error::unsupported(format!(
            "{} is above 0; GGUF files of models with experts are not supported",
            fields.key("expert_count")
        )));
    }
    let embedding = file.tensor("token_embd.weight").ok_or_else(|| Error::model("tensor token_embd.weight is missing"))?;
    let heads = fields.required("attention.head_count")?;
    let hidden = fields.required("embedding_length")?;
    let head_dim = match fields.whole("attention.key_length")? {
        Some(dim) => dim,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let positions = fields.required("context_length")?;
    for (name, whole) in [("rope.dimension_count", head_dim), ("attention.value_length", head_dim), ("attention.sliding_window", positions)]
    {
        if let Some(value) = fields.whole(name)?.filter(|&value| value != whole) {
            return Err(Error::unsupported(format!("{} is {value}; this architecture supports only {whole}", fields.key(name))));
        }
    }
    let has = |name: &str| file.tensor(name).is_some();
    let config = json!({
        "architectures": [name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": fields.required("block_count")?,
        "intermediate_size": fields.required("feed_forward_length")?,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon")?,
        "rope_theta": fields.number("rope.freq_base")?.unwrap_or(10_000.0),
        "rope_scaling": rope_scaling(&fields)?,
        "tie_word_embeddings": !has("output.weight"),
        "attention_bias": has("blk.0.attn_output.bias"),
        "mlp_bias": has("blk.0.ffn_down.bias"),
        "eos_token_id": end_tokens(metadata)?,
    });
    match config {
        Json::Object(fields) => Ok(fields),
        _ => unreachable!("the macro makes an object"),
    }
}

fn architecture(metadata: &Metadata) -> Result<(&str, &'static str, Pairs)> {
    let name = metadata.text("general.architecture")?.ok_or_else(|| Error::model("general.architecture is missing"))?;
    match ARCHITECTURES.into_iter().find(|(known, ..)| *known == name) {
        Some((_, architecture, pairs)) => Ok((name, architecture, pairs)),
        None => {
            let known = ARCHITECTURES.map(|(known, ..)| known).join(", ");
            Err(Error::unsupported(format!("general.architecture is {name:.80}; supported in GGUF files are {known}")))
        }
    }
}

fn rope_scaling(fields: &Fields) -> Result<Json> {
    let key = fields.key("rope.scaling.type");
    let factor = fields.number("rope.scaling.factor")?;
    match (fields.metadata.text(&key)?.unwrap_or("none"), factor) {
        ("none", _) | ("linear", None) => Ok(Json::Null),
        ("linear", Some(factor)) => Ok(json!({"rope_type": "linear", "factor": factor})),
        ("yarn", factor) => Ok(json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.required("rope.scaling.original_context_length")?,
        })),
        (other, _) => Err(Error::unsupported(format!("{key} is {other:.80}; supported are none, linear, yarn"))),
    }
}

fn end_tokens(metadata: &Metadata) -> Result<Vec<usize>> {
    let mut tokens = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(token) = metadata.whole(key, MAX_NUMBER)?.filter(|token| !tokens.contains(token)) {
            tokens.push(token);
        }
    }
    Ok(tokens)
}

/// Changes what a file stores differently than Hugging Face: the pairs that rotate together, and the
/// factors of the frequencies of LLaMA 3.
pub fn adapt(file: &Gguf, spec: &mut ModelSpec) -> Result<()> {
    let (_, _, pairs) = architecture(&file.metadata)?;
    for rope in &mut spec.ropes {
        rope.pairs = pairs;
        if let Some(tensor) = file.tensor("rope_freqs.weight") {
            let mut factors = vec![0.0; rope.frequencies.len()];
            if tensor.shape != [factors.len()] {
                return Err(Error::model(format!("rope_freqs.weight has shape {:?}; must be [{}]", tensor.shape, factors.len())));
            }
            file.read_f32(tensor, 0, &mut factors)?;
            if let Some(factor) = factors.iter().find(|factor| !factor.is_normal() || **factor < 0.0) {
                return Err(Error::model(format!("rope_freqs.weight has the factor {factor}; must be above 0")));
            }
            rope.frequencies.iter_mut().zip(&factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
    }
    Ok(())
}
