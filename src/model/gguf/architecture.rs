//! The architectures of GGUF files: their names in Hugging Face, and those of their tensors.

use super::{Metadata, Tensor};
use crate::error::{Error, Result};
use crate::model::spec::Pairs;

/// A value of `general.architecture`.
#[derive(Clone, Copy)]
pub struct Architecture {
    pub name: &'static str,
    /// The architecture in Hugging Face, and that of a model with experts.
    dense: Option<&'static str>,
    sparse: Option<(&'static str, ExpertNames)>,
    /// The dimensions of a head that rotate together, if they differ from Hugging Face. The converter of
    /// llama.cpp permutes the rows of queries and keys of "llama" and "granite", so that dimensions 2i
    /// and 2i + 1 form a pair.
    pub pairs: Option<Pairs>,
    pub windows: Windows,
    /// Whether a part of a head may stay unrotated.
    pub partial_rope: bool,
    /// The matrix that has a bias if `attention_bias` is set.
    pub biased: &'static str,
    /// Whether branches that are parallel have separate norms, as branches in sequence have.
    pub parallel_norms: bool,
    /// The number of layers of the model that scales scores by its width per head. The file does not
    /// say it.
    pub scaled_by_width: Option<usize>,
    names: Names,
}

/// The layers with a sliding window.
#[derive(Clone, Copy)]
pub enum Windows {
    None,
    /// All layers, if the file has a window.
    Optional,
    /// All layers but each nth.
    ExceptEach(usize),
}

/// Names that Hugging Face has for the experts of a layer, and their routing.
#[derive(Clone, Copy)]
pub struct ExpertNames {
    pub block: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    /// Whether the weights of the chosen experts add up to 1 in llama.cpp, if the config has this field.
    pub normalized: bool,
}

/// Names of tensors that differ from the usual ones: in GGUF, and in Hugging Face.
#[derive(Clone, Copy)]
struct Names {
    layers: &'static str,
    outside: &'static [(&'static str, &'static str)],
    of_layer: &'static [(&'static str, &'static str)],
}

/// Usual names of tensors outside of layers.
const OUTSIDE: [(&str, &str); 3] = [("token_embd", "embed_tokens"), ("output_norm", "norm"), ("output", "lm_head")];

/// Usual names of tensors of a layer.
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

const USUAL: Names = Names { layers: "layers", outside: &[], of_layer: &[] };
const SANDWICH: Names = Names {
    of_layer: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    ..USUAL
};
const GLM4: Names = Names {
    of_layer: &[
        ("post_attention_norm", "post_self_attn_layernorm"),
        ("post_ffw_norm", "post_mlp_layernorm"),
        ("ffn_up", "mlp.gate_up_proj"),
    ],
    ..USUAL
};
const PHI2: Names = Names {
    outside: &[("output_norm", "final_layernorm")],
    of_layer: &[("attn_output", "self_attn.dense"), ("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")],
    ..USUAL
};
const PHI3: Names = Names { of_layer: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")], ..USUAL };
const STARCODER2: Names = Names { of_layer: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")], ..USUAL };
const STABLELM: Names =
    Names { of_layer: &[("attn_q_norm", "self_attn.q_layernorm.norms"), ("attn_k_norm", "self_attn.k_layernorm.norms")], ..USUAL };
const GPT2: Names = Names {
    layers: "h",
    outside: &[("token_embd", "wte"), ("position_embd", "wpe"), ("output_norm", "ln_f")],
    of_layer: &[
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
    ],
};
const GPTNEOX: Names = Names {
    outside: &[("token_embd", "embed_in"), ("output_norm", "final_layer_norm"), ("output", "embed_out")],
    of_layer: &[
        ("attn_qkv", "attention.query_key_value"),
        ("attn_output", "attention.dense"),
        ("ffn_up", "mlp.dense_h_to_4h"),
        ("ffn_down", "mlp.dense_4h_to_h"),
    ],
    ..USUAL
};
const FALCON: Names = Names {
    layers: "h",
    outside: &[("token_embd", "word_embeddings"), ("output_norm", "ln_f")],
    of_layer: &[
        ("attn_norm_2", "ln_attn"),
        ("attn_qkv", "self_attention.query_key_value"),
        ("attn_output", "self_attention.dense"),
        ("ffn_up", "mlp.dense_h_to_4h"),
        ("ffn_down", "mlp.dense_4h_to_h"),
    ],
};

const MIXTRAL: ExpertNames = ExpertNames { block: "block_sparse_moe", gate: "w1", up: "w3", down: "w2", normalized: true };
const QWEN2: ExpertNames = ExpertNames { block: "mlp", gate: "gate_proj", up: "up_proj", down: "down_proj", normalized: false };
const QWEN3: ExpertNames = ExpertNames { normalized: true, ..QWEN2 };

const fn dense(name: &'static str, in_hugging_face: &'static str, names: Names) -> Architecture {
    Architecture {
        name,
        dense: Some(in_hugging_face),
        sparse: None,
        pairs: None,
        windows: Windows::None,
        partial_rope: false,
        biased: "attn_output",
        parallel_norms: false,
        scaled_by_width: None,
        names,
    }
}

const fn sparse(name: &'static str, in_hugging_face: &'static str, experts: ExpertNames) -> Architecture {
    Architecture { dense: None, sparse: Some((in_hugging_face, experts)), ..dense(name, in_hugging_face, USUAL) }
}

const ARCHITECTURES: [Architecture; 20] = [
    Architecture {
        sparse: Some(("MixtralForCausalLM", MIXTRAL)),
        pairs: Some(Pairs::Neighbours),
        ..dense("llama", "LlamaForCausalLM", USUAL)
    },
    dense("qwen2", "Qwen2ForCausalLM", USUAL),
    dense("qwen3", "Qwen3ForCausalLM", USUAL),
    sparse("qwen2moe", "Qwen2MoeForCausalLM", QWEN2),
    sparse("qwen3moe", "Qwen3MoeForCausalLM", QWEN3),
    dense("gemma", "GemmaForCausalLM", USUAL),
    Architecture { windows: Windows::ExceptEach(2), scaled_by_width: Some(46), ..dense("gemma2", "Gemma2ForCausalLM", SANDWICH) },
    Architecture { windows: Windows::ExceptEach(6), scaled_by_width: Some(62), ..dense("gemma3", "Gemma3ForCausalLM", SANDWICH) },
    Architecture { partial_rope: true, ..dense("phi2", "PhiForCausalLM", PHI2) },
    Architecture { windows: Windows::Optional, partial_rope: true, ..dense("phi3", "Phi3ForCausalLM", PHI3) },
    dense("falcon", "FalconForCausalLM", FALCON),
    Architecture { windows: Windows::Optional, ..dense("starcoder2", "Starcoder2ForCausalLM", STARCODER2) },
    Architecture { partial_rope: true, ..dense("stablelm", "StableLmForCausalLM", STABLELM) },
    dense("gpt2", "GPT2LMHeadModel", GPT2),
    Architecture { partial_rope: true, parallel_norms: true, ..dense("gptneox", "GPTNeoXForCausalLM", GPTNEOX) },
    dense("command-r", "CohereForCausalLM", USUAL),
    Architecture { windows: Windows::ExceptEach(4), ..dense("cohere2", "Cohere2ForCausalLM", USUAL) },
    Architecture { partial_rope: true, biased: "attn_q", ..dense("glm4", "Glm4ForCausalLM", GLM4) },
    Architecture { pairs: Some(Pairs::Neighbours), ..dense("granite", "GraniteForCausalLM", USUAL) },
    dense("olmo2", "Olmo2ForCausalLM", SANDWICH),
];

/// Limit of numbers in the metadata. The config has narrower ones.
pub const MAX_NUMBER: usize = u32::MAX as usize;
/// Limit of the experts of a layer, each of which has a name.
const MAX_EXPERTS: usize = 1 << 12;

impl Architecture {
    pub fn from_metadata(metadata: &Metadata) -> Result<Architecture> {
        let name = metadata.text("general.architecture")?.ok_or_else(|| Error::model("general.architecture is missing"))?;
        ARCHITECTURES.into_iter().find(|known| known.name == name).ok_or_else(|| {
            let known = ARCHITECTURES.map(|known| known.name).join(", ");
            Error::unsupported(format!("general.architecture is {name:.80}; supported in GGUF files are {known}"))
        })
    }

    /// Returns the name of the architecture in Hugging Face, and the names of its experts.
    pub fn in_hugging_face(&self, metadata: &Metadata) -> Result<(&'static str, Option<ExpertNames>)> {
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

    /// Adds a tensor by its name in Hugging Face, without the prefix of the family. A tensor with all
    /// experts of a layer becomes one for each, and so does one with the norms of all heads if each has
    /// its own name. Unknown names stay as they are.
    pub fn rename(
        &self,
        experts: Option<ExpertNames>,
        has: impl Fn(&str) -> bool,
        (name, tensor): (&str, &Tensor),
        named: &mut Vec<(String, Tensor)>,
    ) -> Result<()> {
        let (base, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
        let Some((number, part)) = base.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            let renamed = find(self.names.outside, &OUTSIDE, base);
            named.push((renamed.map_or_else(|| name.into(), |base| format!("{base}.{suffix}")), tensor.clone()));
            return Ok(());
        };
        let Ok(number) = number.parse::<u32>() else {
            named.push((name.into(), tensor.clone()));
            return Ok(());
        };
        let layer = format!("{}.{number}", self.names.layers);
        if let Some(names) = experts
            && let Some(matrix) = names.matrix(part)
            && let [count, _, _] = tensor.shape[..]
        {
            let expert = |index| format!("{layer}.{}.experts.{index}.{matrix}.{suffix}", names.block);
            return split(tensor, name, count, expert, named);
        }
        let renamed = match experts {
            Some(names) if part == "ffn_gate_inp" => format!("{}.gate", names.block),
            // In Falcon with two norms, the first is that of the MLP.
            _ if part == "attn_norm" && has(&format!("blk.{number}.attn_norm_2.weight")) => "ln_mlp".into(),
            _ => find(self.names.of_layer, &OF_LAYER, part).unwrap_or(part).into(),
        };
        if renamed.ends_with(".norms")
            && let [heads, _] = tensor.shape[..]
        {
            return split(tensor, name, heads, |head| format!("{layer}.{renamed}.{head}.{suffix}"), named);
        }
        let mut tensor = tensor.clone();
        if part == SHARED_GATE && tensor.shape.len() == 1 {
            tensor.shape.insert(0, 1);
        }
        named.push((format!("{layer}.{renamed}.{suffix}"), tensor));
        Ok(())
    }
}

/// Returns the name of a tensor in Hugging Face.
fn find(own: &[(&str, &'static str)], usual: &[(&str, &'static str)], part: &str) -> Option<&'static str> {
    own.iter().chain(usual).find(|(gguf, _)| *gguf == part).map(|(_, name)| *name)
}

/// Adds the `count` tensors along the outermost dimension.
fn split(tensor: &Tensor, name: &str, count: usize, named_as: impl Fn(usize) -> String, named: &mut Vec<(String, Tensor)>) -> Result<()> {
    if count > MAX_EXPERTS {
        return Err(Error::model(format!("tensor {name} has {count} experts or heads; at most {MAX_EXPERTS} are supported")));
    }
    named.try_reserve(count)?;
    named.extend(tensor.split().enumerate().map(|(index, part)| (named_as(index), part)));
    Ok(())
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
