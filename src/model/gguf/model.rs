//! The model of a GGUF file, in the terms of Hugging Face: its config, and the names of its tensors.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::{Gguf, Metadata, Tensor, split};
use crate::error::{Error, Result};
use crate::model::spec::{ModelSpec, Pairs};
use crate::sys::files;

/// A value of `general.architecture`.
#[derive(Clone, Copy)]
struct Architecture {
    name: &'static str,
    /// The architecture in Hugging Face, and that of a model with experts.
    dense: Option<&'static str>,
    sparse: Option<(&'static str, ExpertNames)>,
    /// The dimensions of a head that rotate together. In files of "llama", the rows of queries and keys
    /// have another order than in Hugging Face, so that neighbours rotate.
    pairs: Pairs,
}

/// Names that Hugging Face has for the experts of a layer, and their routing.
#[derive(Clone, Copy)]
struct ExpertNames {
    block: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    /// Whether the weights of the chosen experts add up to 1 in llama.cpp, if the config has this field.
    normalized: bool,
}

const MIXTRAL: ExpertNames = ExpertNames { block: "block_sparse_moe", gate: "w1", up: "w3", down: "w2", normalized: true };
const QWEN2: ExpertNames = ExpertNames { block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj", normalized: false };
const QWEN3: ExpertNames = ExpertNames { normalized: true, ..QWEN2 };

const ARCHITECTURES: [Architecture; 5] = [
    Architecture {
        name: "llama",
        dense: Some("LlamaForCausalLM"),
        sparse: Some(("MixtralForCausalLM", MIXTRAL)),
        pairs: Pairs::Neighbours,
    },
    Architecture { name: "qwen2", dense: Some("Qwen2ForCausalLM"), sparse: None, pairs: Pairs::Halves },
    Architecture { name: "qwen3", dense: Some("Qwen3ForCausalLM"), sparse: None, pairs: Pairs::Halves },
    Architecture { name: "qwen2moe", dense: None, sparse: Some(("Qwen2MoeForCausalLM", QWEN2)), pairs: Pairs::Halves },
    Architecture { name: "qwen3moe", dense: None, sparse: Some(("Qwen3MoeForCausalLM", QWEN3)), pairs: Pairs::Halves },
];

/// Names of tensors outside of layers: in GGUF, and in Hugging Face.
const OUTSIDE: [(&str, &str); 3] = [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names of tensors of a layer.
const OF_LAYER: [(&str, &str); 15] = [
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
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    (SHARED_GATE, "mlp.shared_expert_gate"),
];

/// A vector, which is a matrix of one row in Hugging Face.
const SHARED_GATE: &str = "ffn_gate_inp_shexp";

/// Limit of the experts of a layer, each of which has a name.
const MAX_EXPERTS: usize = 1 << 12;

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
        _ if split::is_one_model(&found) => Ok(found.into_iter().next()),
        count => Err(Error::model(format!("{} has {count} GGUF files; set model_path to one of them", path.display()))),
    }
}

/// Returns the tensors of a file by the names that Hugging Face has for them. A tensor with all experts
/// of a layer becomes one for each. Other names stay as they are.
pub fn tensors(file: &Gguf) -> Result<Vec<(String, Tensor)>> {
    let (_, experts) = architecture(&file.metadata)?.in_hugging_face(&file.metadata)?;
    let mut named = Vec::new();
    for (name, tensor) in file.tensors() {
        let (base, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
        let Some((layer, part)) = base.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            let renamed = OUTSIDE.iter().find(|(gguf, _)| *gguf == base);
            named.push((renamed.map_or_else(|| name.into(), |(_, base)| format!("{base}.{suffix}")), tensor.clone()));
            continue;
        };
        let layer = format!("model.layers.{layer}");
        if let Some(names) = experts
            && let Some(matrix) = names.matrix(part)
            && let [count, _, _] = tensor.shape[..]
        {
            if count > MAX_EXPERTS {
                return Err(Error::model(format!("tensor {name} has {count} experts; at most {MAX_EXPERTS} are supported")));
            }
            for (index, expert) in tensor.split().enumerate() {
                named.push((format!("{layer}.{}.experts.{index}.{matrix}.{suffix}", names.block), expert));
            }
            continue;
        }
        let renamed = match experts {
            Some(names) if part == "ffn_gate_inp" => format!("{}.gate", names.block),
            _ => OF_LAYER.iter().find(|(gguf, _)| *gguf == part).map_or(part, |(_, name)| name).to_string(),
        };
        let mut tensor = tensor.clone();
        if part == SHARED_GATE && tensor.shape.len() == 1 {
            tensor.shape.insert(0, 1);
        }
        named.push((format!("{layer}.{renamed}.{suffix}"), tensor));
    }
    Ok(named)
}

impl ExpertNames {
    /// Returns the name of a matrix of an expert.
    fn matrix(&self, part: &str) -> Option<&'static str> {
        match part {
            "ffn_gate_exps" => Some(self.gate),
            "ffn_up_exps" => Some(self.up),
            "ffn_down_exps" => Some(self.down),
            _ => None,
        }
    }
}

impl Architecture {
    /// Returns the name of the architecture in Hugging Face, and the names of its experts.
    fn in_hugging_face(&self, metadata: &Metadata) -> Result<(&'static str, Option<ExpertNames>)> {
        let key = format!("{}.expert_count", self.name);
        let experts = metadata.whole(&key, MAX_NUMBER)?.unwrap_or(0);
        let refused = || {
            Error::unsupported(format!(
                "{key} is {experts}; GGUF files of {} must have {}",
                self.name,
                if experts > 0 { "none" } else { "experts" }
            ))
        };
        match experts {
            0 => Ok((self.dense.ok_or_else(refused)?, None)),
            _ => self.sparse.map(|(name, names)| (name, Some(names))).ok_or_else(refused),
        }
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
    let architecture = architecture(metadata)?;
    let (name, experts) = architecture.in_hugging_face(metadata)?;
    let fields = Fields { metadata, architecture: architecture.name };
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
    let mut config = json!({
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
    if let Some(names) = experts {
        config["num_experts"] = fields.required("expert_count")?.into();
        config["num_experts_per_tok"] = fields.required("expert_used_count")?.into();
        config["moe_intermediate_size"] = fields.whole("expert_feed_forward_length")?.into();
        config["shared_expert_intermediate_size"] = fields.whole("expert_shared_feed_forward_length")?.into();
        config["norm_topk_prob"] = names.normalized.into();
    }
    match config {
        Json::Object(fields) => Ok(fields),
        _ => unreachable!("the macro makes an object"),
    }
}

fn architecture(metadata: &Metadata) -> Result<Architecture> {
    let name = metadata.text("general.architecture")?.ok_or_else(|| Error::model("general.architecture is missing"))?;
    ARCHITECTURES.into_iter().find(|known| known.name == name).ok_or_else(|| {
        let known = ARCHITECTURES.map(|known| known.name).join(", ");
        Error::unsupported(format!("general.architecture is {name:.80}; supported in GGUF files are {known}"))
    })
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
    let pairs = architecture(&file.metadata)?.pairs;
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
