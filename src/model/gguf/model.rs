//! The model of a GGUF file, in the terms of Hugging Face: its config, and its tensors by name.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::architecture::{Architecture, MAX_NUMBER, SCORES, SIGMOID, Windows};
use super::names::{ExpertNames, Naming};
use super::{Gguf, Metadata, Tensor, split};
use crate::backend::NormKind;
use crate::error::{Error, Result, try_vec};
use crate::model::spec::{Attention, LatentAttention, Layer, Layout, Linear, ModelSpec, Norm, RowOrder, Source, TensorPart, Vector};
use crate::sys::files;

/// Limit of the pairs of a head that rotate.
const MAX_PAIRS: usize = 1 << 12;

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
        _ if split::is_one_model(&found) => Ok(found.into_iter().next()),
        count => Err(Error::model(format!("{} has {count} GGUF files; set model_path to one of them", path.display()))),
    }
}

/// Returns the tensors of a file by the names that Hugging Face has for them.
pub fn tensors(file: &Gguf) -> Result<Vec<(String, Tensor)>> {
    let metadata = &file.metadata;
    let architecture = Architecture::from_metadata(metadata)?;
    let (_, experts) = architecture.in_hugging_face(metadata)?;
    let fields = Fields { metadata, architecture };
    let (heads, dim) = fields.heads()?;
    let [queries, keys] = [heads, fields.kv_heads(heads)?].map(|heads| heads.saturating_mul(dim));
    let expert_count = fields.whole("expert_count")?.unwrap_or(0);
    Naming { file, names: architecture.names, experts, expert_count, heads, qkv_rows: [queries, keys, keys] }.tensors()
}

/// Reads the values of one architecture, and names their keys in errors.
struct Fields<'a> {
    metadata: &'a Metadata,
    architecture: Architecture,
}

impl Fields<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name)
    }

    fn whole(&self, name: &str) -> Result<Option<usize>> {
        self.metadata.whole(&self.key(name), MAX_NUMBER)
    }

    fn required(&self, name: &str) -> Result<usize> {
        self.whole(name)?.ok_or_else(|| Error::model(format!("{} is missing; convert the model again", self.key(name))))
    }

    /// Refuses another value than this one. The key may be missing.
    fn require(&self, name: &str, value: usize) -> Result<()> {
        match self.whole(name)?.filter(|&found| found != value) {
            Some(found) => Err(Error::unsupported(format!("{} is {found}; this architecture supports only {value}", self.key(name)))),
            None => Ok(()),
        }
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        self.metadata.number(&self.key(name))
    }

    /// Returns the number of query heads and the dimensions of each.
    fn heads(&self) -> Result<(usize, usize)> {
        let heads = self.required("attention.head_count")?;
        match self.whole("attention.key_length")? {
            Some(dim) => Ok((heads, dim)),
            None => Ok((heads, self.required("embedding_length")?.checked_div(heads).unwrap_or(0))),
        }
    }

    fn kv_heads(&self, heads: usize) -> Result<usize> {
        Ok(self.whole("attention.head_count_kv")?.unwrap_or(heads))
    }
}

/// Returns the config.json of the model. It has the fields of all families; each reads its own.
pub fn config(file: &Gguf) -> Result<Map<String, Json>> {
    let metadata = &file.metadata;
    let architecture = Architecture::from_metadata(metadata)?;
    let (name, experts) = architecture.in_hugging_face(metadata)?;
    let fields = Fields { metadata, architecture };
    let mut config = Map::new();
    config.insert("architectures".into(), json!([name]));
    config.insert("eos_token_id".into(), json!(end_tokens(metadata)?));
    let head_dim = add_sizes(&fields, file, &mut config)?;
    add_rope(&fields, file, head_dim, &mut config)?;
    add_factors(&fields, head_dim, &mut config)?;
    add_forms(&fields, file, &mut config)?;
    if let Some(names) = experts {
        add_experts(&fields, names, &mut config)?;
    }
    Ok(config)
}

/// Adds a value under each of its names in configs.
fn add(config: &mut Map<String, Json>, names: &[&str], value: impl Into<Json>) {
    let value = value.into();
    config.extend(names.iter().map(|name| (name.to_string(), value.clone())));
}

/// Like `add`, unless the file has no value.
fn add_some(config: &mut Map<String, Json>, names: &[&str], value: Option<impl Into<Json>>) {
    if let Some(value) = value {
        add(config, names, value);
    }
}

/// Returns the dimensions of a head, or with latent attention those that rotate.
fn add_sizes(fields: &Fields, file: &Gguf, config: &mut Map<String, Json>) -> Result<usize> {
    let embedding = file.tensor("token_embd.weight").ok_or_else(|| Error::model("tensor token_embd.weight is missing"))?;
    let (heads, head_dim) = fields.heads()?;
    let head_dim = match fields.whole("attention.kv_lora_rank")? {
        Some(rank) => add_latent(fields, head_dim, rank, config)?,
        None => {
            fields.require("attention.value_length", head_dim)?;
            head_dim
        }
    };
    add(config, &["vocab_size"], embedding.shape[0]);
    add(config, &["hidden_size", "n_embd"], fields.required("embedding_length")?);
    add(config, &["num_hidden_layers", "n_layer"], fields.required("block_count")?);
    add(config, &["intermediate_size", "ffn_hidden_size", "n_inner"], fields.required("feed_forward_length")?);
    add(config, &["num_attention_heads", "n_head"], heads);
    add(config, &["num_key_value_heads", "num_kv_heads"], fields.kv_heads(heads)?);
    add(config, &["head_dim"], head_dim);
    let positions = fields.required("context_length")?;
    add(config, &["max_position_embeddings", "n_positions"], positions);
    const WINDOW: &str = "attention.sliding_window";
    match fields.architecture.windows {
        Windows::None => fields.require(WINDOW, positions)?,
        Windows::Optional => add_some(config, &["sliding_window"], fields.whole(WINDOW)?.filter(|&window| window > 0)),
        Windows::ExceptEach(layers) => {
            add(config, &["sliding_window"], fields.required(WINDOW)?);
            fields.require("attention.sliding_window_pattern", layers)?;
        }
    }
    Ok(head_dim)
}

/// Adds the sizes of latent attention. Returns the dimensions of a head that rotate.
fn add_latent(fields: &Fields, key_length: usize, rank: usize, config: &mut Map<String, Json>) -> Result<usize> {
    // Files whose kv_b_proj has two parts have the sizes of latents under the usual keys.
    let head_dim = fields.whole("attention.key_length_mla")?.unwrap_or(key_length);
    let values = match fields.whole("attention.value_length_mla")? {
        Some(values) => values,
        None => fields.required("attention.value_length")?,
    };
    let rotated = fields.required("rope.dimension_count")?;
    add(config, &["kv_lora_rank"], rank);
    add_some(config, &["q_lora_rank"], fields.whole("attention.q_lora_rank")?.filter(|&rank| rank > 0));
    add(config, &["qk_rope_head_dim"], rotated);
    add(config, &["qk_nope_head_dim"], head_dim.saturating_sub(rotated));
    add(config, &["v_head_dim"], values);
    Ok(rotated)
}

fn add_rope(fields: &Fields, file: &Gguf, head_dim: usize, config: &mut Map<String, Json>) -> Result<()> {
    if let Some(sections) = fields.metadata.get(&fields.key("rope.dimension_sections")) {
        return Err(Error::unsupported(format!(
            "{} is {sections:?}; positions of several dimensions are not supported",
            fields.key("rope.dimension_sections")
        )));
    }
    add(config, &["rope_theta", "rotary_emb_base"], fields.number("rope.freq_base")?.unwrap_or(10_000.0));
    add_some(config, &["rope_local_base_freq"], fields.number("rope.freq_base_swa")?);
    match fields.architecture.partial_rope {
        true => {
            // The family rounds the product with the dimensions down.
            let part = |rotated| (rotated as f64 + 0.5) / head_dim as f64;
            let rotated = fields.whole("rope.dimension_count")?.filter(|&rotated| rotated != head_dim);
            add_some(config, &["partial_rotary_factor", "rotary_pct"], Some(rotated.map_or(1.0, part)));
        }
        false => fields.require("rope.dimension_count", head_dim)?,
    }
    add(config, &["rope_scaling"], rope_scaling(fields, file)?);
    Ok(())
}

/// Adds numbers that norms, scores and logits use.
fn add_factors(fields: &Fields, head_dim: usize, config: &mut Map<String, Json>) -> Result<()> {
    add_some(config, &["rms_norm_eps"], fields.number("attention.layer_norm_rms_epsilon")?);
    add_some(config, &["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"], fields.number("attention.layer_norm_epsilon")?);
    add_some(config, &["attn_logit_softcapping"], fields.number("attn_logit_softcapping")?);
    add_some(config, &["final_logit_softcapping"], fields.number("final_logit_softcapping")?);
    let scale = fields.number("attention.scale")?.filter(|&scale| scale != 0.0);
    add(config, &["attention_multiplier"], scale.unwrap_or(1.0 / (head_dim as f64).sqrt()));
    add_some(config, &["embedding_multiplier"], fields.number("embedding_scale")?);
    add_some(config, &["residual_multiplier"], fields.number("residual_scale")?);
    add_some(config, &["logit_scale", "logits_scaling"], fields.number("logit_scale")?);
    let by_width = fields.architecture.scaled_by_width == fields.whole("block_count")?;
    let heads = fields.required("attention.head_count")?;
    let scalar = if by_width { fields.required("embedding_length")?.checked_div(heads).unwrap_or(0) } else { head_dim };
    add(config, &["query_pre_attn_scalar"], scalar);
    Ok(())
}

/// Adds what the presence of tensors says.
fn add_forms(fields: &Fields, file: &Gguf, config: &mut Map<String, Json>) -> Result<()> {
    let has = |name: &str| file.tensor(name).is_some();
    let of_queries = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
    add(config, &["tie_word_embeddings"], !has("output.weight"));
    add(config, &["attention_bias"], has(&format!("blk.0.{}.bias", fields.architecture.biased)));
    add(config, &["use_bias", "use_qkv_bias", "bias"], of_queries);
    add(config, &["mlp_bias"], has("blk.0.ffn_down.bias"));
    add(config, &["qk_layernorm", "use_qk_norm"], has("blk.0.attn_q_norm.weight"));
    let parallel = match fields.architecture.parallel_norms {
        true => fields.metadata.flag(&fields.key("use_parallel_residual"))?.unwrap_or(true),
        false => !has("blk.0.ffn_norm.weight"),
    };
    add(config, &["use_parallel_residual"], parallel);
    add(config, &["new_decoder_architecture"], true);
    add(config, &["num_ln_in_parallel_attn"], if has("blk.0.attn_norm_2.weight") { 2 } else { 1 });
    Ok(())
}

fn add_experts(fields: &Fields, names: ExpertNames, config: &mut Map<String, Json>) -> Result<()> {
    add(config, &["num_experts", "n_routed_experts"], fields.required("expert_count")?);
    add(config, &["num_experts_per_tok"], fields.required("expert_used_count")?);
    add(config, &["moe_intermediate_size"], fields.whole("expert_feed_forward_length")?);
    add(config, &["shared_expert_intermediate_size"], fields.whole("expert_shared_feed_forward_length")?);
    add(config, &["norm_topk_prob"], fields.metadata.flag(&fields.key("expert_weights_norm"))?.unwrap_or(names.normalized));
    add_some(config, &["n_shared_experts"], fields.whole("expert_shared_count")?.filter(|&shared| shared > 0));
    add(config, &["first_k_dense_replace"], fields.whole("leading_dense_block_count")?.unwrap_or(0));
    add(config, &["routed_scaling_factor"], fields.number("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0));
    // Files without these keys choose among all experts.
    let groups = fields.whole("expert_group_count")?.filter(|&groups| groups > 0);
    add(config, &["n_group"], groups.unwrap_or(1));
    add(config, &["topk_group"], fields.whole("expert_group_used_count")?.filter(|_| groups.is_some()).unwrap_or(1));
    let (scores, method) = match (fields.whole(SCORES)? == Some(SIGMOID), groups) {
        (true, _) => ("sigmoid", "noaux_tc"),
        (false, Some(2..)) => ("softmax", "group_limited_greedy"),
        (false, _) => ("softmax", "greedy"),
    };
    add(config, &["scoring_func"], scores);
    add(config, &["topk_method"], method);
    Ok(())
}

fn rope_scaling(fields: &Fields, file: &Gguf) -> Result<Json> {
    let key = fields.key("rope.scaling.type");
    let factor = fields.number("rope.scaling.factor")?;
    if let (Some(long), Some(short)) = (file.tensor("rope_factors_long.weight"), file.tensor("rope_factors_short.weight")) {
        return Ok(json!({
            "rope_type": "longrope",
            "long_factor": numbers(file, long)?,
            "short_factor": numbers(file, short)?,
            "original_max_position_embeddings": fields.required("rope.scaling.original_context_length")?,
            "attention_factor": fields.number("rope.scaling.attn_factor")?,
        }));
    }
    match (fields.metadata.text(&key)?.unwrap_or("none"), factor) {
        ("none", _) | ("linear", None) => Ok(Json::Null),
        ("linear", Some(factor)) => Ok(json!({"rope_type": "linear", "factor": factor})),
        ("yarn", factor) => yarn(fields, factor),
        (other, _) => Err(Error::unsupported(format!("{key} is {other:.80}; supported are none, linear, yarn"))),
    }
}

fn yarn(fields: &Fields, factor: Option<f64>) -> Result<Json> {
    for name in ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"] {
        if let Some(found) = fields.number(name)?.filter(|&found| found != 1.0) {
            return Err(Error::unsupported(format!("{} is {found}; with YaRN, only 1 is supported", fields.key(name))));
        }
    }
    let multiplier = fields.number("rope.scaling.yarn_log_multiplier")?;
    let scales = multiplier.map(|multiplier| match fields.architecture.yarn_in_tenths {
        true => (10.0 * multiplier, 10.0 * multiplier),
        false => (1.0, multiplier),
    });
    let mut yarn = Map::new();
    add(&mut yarn, &["rope_type"], "yarn");
    add_some(&mut yarn, &["factor"], factor);
    add(&mut yarn, &["original_max_position_embeddings"], fields.required("rope.scaling.original_context_length")?);
    add_some(&mut yarn, &["beta_fast"], fields.number("rope.scaling.yarn_beta_fast")?);
    add_some(&mut yarn, &["beta_slow"], fields.number("rope.scaling.yarn_beta_slow")?);
    add_some(&mut yarn, &["mscale"], scales.map(|(scale, _)| scale));
    add_some(&mut yarn, &["mscale_all_dim"], scales.map(|(_, all_dims)| all_dims));
    add(&mut yarn, &["truncate"], fields.architecture.whole_yarn);
    Ok(yarn.into())
}

/// Reads a number for each pair of a head's dimensions.
fn numbers(file: &Gguf, tensor: &Tensor) -> Result<Vec<f32>> {
    if !matches!(tensor.shape[..], [count] if count <= MAX_PAIRS) {
        return Err(Error::model(format!(
            "a tensor of RoPE factors has shape {:?}; must be one dimension up to {MAX_PAIRS}",
            tensor.shape
        )));
    }
    let mut numbers = try_vec(tensor.shape.iter().product(), 0.0)?;
    file.read_f32(tensor, 0, &mut numbers)?;
    Ok(numbers)
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

/// Changes what a file stores differently than Hugging Face: the pairs that rotate together, the
/// factors of the frequencies of LLaMA 3, the order of rows and columns, norms with an offset, and
/// matrices that are one tensor there and several here.
pub fn adapt(file: &Gguf, spec: &mut ModelSpec) -> Result<()> {
    let architecture = Architecture::from_metadata(&file.metadata)?;
    for rope in &mut spec.ropes {
        rope.pairs = architecture.pairs.unwrap_or(rope.pairs);
        if let Some(tensor) = file.tensor("rope_freqs.weight") {
            if tensor.shape != [rope.frequencies.len()] {
                return Err(Error::model(format!("rope_freqs.weight has shape {:?}; must be [{}]", tensor.shape, rope.frequencies.len())));
            }
            let factors = numbers(file, tensor)?;
            if let Some(factor) = factors.iter().find(|factor| !factor.is_normal() || **factor < 0.0) {
                return Err(Error::model(format!("rope_freqs.weight has the factor {factor}; must be above 0")));
            }
            rope.frequencies.iter_mut().zip(&factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
    }
    if file.tensor("blk.0.attn_k_b.weight").is_some() {
        spec.layers.iter_mut().enumerate().for_each(|(index, layer)| separate_heads(index, layer));
    }
    *spec = spec.try_map(
        |linear, _| Ok::<Linear, Error>(matrix(linear)),
        |norm| {
            // The weights include the offset.
            let kind = if let NormKind::Rms { .. } = norm.kind { NormKind::Rms { unit_offset: false } } else { norm.kind };
            Ok::<Norm, Error>(Norm { kind, ..norm.clone() })
        },
        |vector| Ok::<Vector, Error>(vector.clone()),
    )?;
    Ok(())
}

/// Takes the matrices of the heads of latent attention from tensors for keys and for values.
fn separate_heads(index: usize, layer: &mut Layer) {
    let Attention::Latent(LatentAttention { keys, values, .. }) = &mut layer.attention else { return };
    for (matrices, name) in [(keys, "k_b_proj"), (values, "v_b_proj")] {
        for (head, matrix) in matrices.iter_mut().enumerate() {
            *matrix = Linear::new(format!("layers.{index}.self_attn.{name}.{head}"), matrix.rows(), matrix.cols);
        }
    }
}

/// Returns where a matrix is in the file.
fn matrix(linear: &Linear) -> Linear {
    let mut linear = linear.clone();
    if let [TensorPart { source: Source::Rows { .. }, .. }] = linear.parts[..] {
        return linear;
    }
    if let [part] = &linear.parts[..]
        && let Source::Expert { index, .. } = part.source
        && let Some((block, matrix)) = part.name.rsplit_once('.')
    {
        let names = if matrix == "gate_up_proj" { &["gate_proj", "up_proj"][..] } else { &[matrix] };
        let rows = part.rows / names.len();
        linear.parts = names.iter().map(|name| TensorPart::own(format!("{block}.{index}.{name}"), rows)).collect();
        linear.order = RowOrder::Same;
    }
    // All queries precede all keys and values, and matrices are [out, in].
    if let RowOrder::ByKvHead { .. } = linear.order {
        linear.order = RowOrder::Same;
    }
    linear.layout(Layout::OutIn)
}
