//! Names of the tensors of GGUF files in Hugging Face.

use super::{Gguf, Tensor};
use crate::error::{Error, Result};

/// Names of tensors that differ from the usual ones: in GGUF, and in Hugging Face.
#[derive(Clone, Copy)]
pub struct Names {
    layers: &'static str,
    outside: &'static [(&'static str, &'static str)],
    /// After a name that ends with a dot, Hugging Face has the number of a head: files have one
    /// tensor for all heads.
    of_layer: &'static [(&'static str, &'static str)],
}

/// Names that Hugging Face has for the experts of a layer, and their routing.
#[derive(Clone, Copy)]
pub struct ExpertNames {
    block: &'static str,
    router: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    /// Whether the weights of the chosen experts add up to 1, unless the file says it.
    pub normalized: bool,
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

pub const USUAL: Names = Names { layers: "layers", outside: &[], of_layer: &[] };
pub const SANDWICH: Names = Names {
    of_layer: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
    ],
    ..USUAL
};
pub const GLM4: Names = Names {
    of_layer: &[
        ("post_attention_norm", "post_self_attn_layernorm"),
        ("post_ffw_norm", "post_mlp_layernorm"),
        ("ffn_up", "mlp.gate_up_proj"),
    ],
    ..USUAL
};
pub const PHI2: Names = Names {
    outside: &[("output_norm", "final_layernorm")],
    of_layer: &[("attn_output", "self_attn.dense"), ("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")],
    ..USUAL
};
pub const PHI3: Names = Names { of_layer: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")], ..USUAL };
pub const STARCODER2: Names = Names { of_layer: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")], ..USUAL };
pub const STABLELM: Names =
    Names { of_layer: &[("attn_q_norm", "self_attn.q_layernorm.norms."), ("attn_k_norm", "self_attn.k_layernorm.norms.")], ..USUAL };
pub const GPT2: Names = Names {
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
pub const GPTNEOX: Names = Names {
    outside: &[("token_embd", "embed_in"), ("output_norm", "final_layer_norm"), ("output", "embed_out")],
    of_layer: &[
        ("attn_qkv", "attention.query_key_value"),
        ("attn_output", "attention.dense"),
        ("ffn_up", "mlp.dense_h_to_4h"),
        ("ffn_down", "mlp.dense_4h_to_h"),
    ],
    ..USUAL
};
pub const FALCON: Names = Names {
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
pub const GPT_OSS: Names = Names { of_layer: &[("attn_sinks", SINKS), ("post_attention_norm", "post_attention_layernorm")], ..USUAL };
pub const DEEPSEEK2: Names = Names {
    of_layer: &[
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        ("attn_kv_b", "self_attn.kv_b_proj"),
        // The two parts of kv_b_proj; that of keys is transposed.
        ("attn_k_b", "self_attn.k_b_proj."),
        ("attn_v_b", "self_attn.v_b_proj."),
        ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
        ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
        ("exp_probs_b", CORRECTION),
    ],
    ..USUAL
};

/// Names without ".weight" or ".bias" in Hugging Face.
const SINKS: &str = "self_attn.sinks";
const CORRECTION: &str = "mlp.gate.e_score_correction_bias";

pub const QWEN2_EXPERTS: ExpertNames =
    ExpertNames { block: "mlp", router: "mlp.gate", gate: "gate_proj", up: "up_proj", down: "down_proj", normalized: false };
pub const QWEN3_EXPERTS: ExpertNames = ExpertNames { normalized: true, ..QWEN2_EXPERTS };
pub const GPT_OSS_EXPERTS: ExpertNames = ExpertNames { router: "mlp.router", ..QWEN3_EXPERTS };
pub const MIXTRAL_EXPERTS: ExpertNames =
    ExpertNames { block: "block_sparse_moe", router: "block_sparse_moe.gate", gate: "w1", up: "w3", down: "w2", normalized: true };

/// Limit of the experts or heads of a tensor, each of which has a name.
const MAX_EXPERTS: usize = 1 << 12;

/// Gives tensors their names in Hugging Face, without the prefix of the family. Tensors of several
/// matrices are split.
pub struct Naming<'a> {
    pub file: &'a Gguf,
    pub names: Names,
    pub experts: Option<ExpertNames>,
    pub expert_count: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Rows of the queries, keys and values of a layer.
    pub qkv_rows: [usize; 3],
}

type Named = Vec<(String, Tensor)>;

impl Naming<'_> {
    /// Returns all tensors of the file. Unknown names stay as they are.
    pub fn tensors(&self) -> Result<Named> {
        let mut named = Vec::new();
        for (name, tensor) in self.file.tensors() {
            let (base, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
            let of_layer = base.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            match of_layer.and_then(|(number, part)| Some((number.parse::<u32>().ok()?, part))) {
                Some((layer, part)) => self
                    .add_of_layer(&mut named, (layer, part, suffix), tensor)
                    .map_err(|error| error.within(format_args!("tensor {name}")))?,
                None => {
                    let renamed = find(self.names.outside, &OUTSIDE, base);
                    named.push((renamed.map_or_else(|| name.into(), |base| format!("{base}.{suffix}")), tensor.clone()));
                }
            }
        }
        Ok(named)
    }

    fn add_of_layer(&self, named: &mut Named, (layer, part, suffix): (u32, &str, &str), tensor: &Tensor) -> Result<()> {
        if part == "attn_qkv" && !self.names.of_layer.iter().any(|(gguf, _)| *gguf == part) {
            // The family has three matrices.
            let pieces = tensor.pieces(&self.qkv_rows)?;
            let add = |(part, piece)| self.add_of_layer(named, (layer, part, suffix), &piece);
            return ["attn_q", "attn_k", "attn_v"].into_iter().zip(pieces).try_for_each(add);
        }
        let prefix = format!("{}.{layer}", self.names.layers);
        if let Some(experts) = self.experts
            && let Some(matrices) = experts.matrices(part)
            && tensor.shape.len() == if suffix == "bias" { 2 } else { 3 }
        {
            reserve(named, matrices.len(), tensor, self.expert_count)?;
            for (index, expert) in tensor.clone().split().enumerate() {
                let pieces = expert.pieces(&vec![expert.shape[0] / matrices.len(); matrices.len()])?;
                let name = |matrix| format!("{prefix}.{}.experts.{index}.{matrix}.{suffix}", experts.block);
                named.extend(matrices.iter().map(name).zip(pieces));
            }
            return Ok(());
        }
        let renamed = match self.experts {
            Some(experts) if part == "ffn_gate_inp" => experts.router,
            // In Falcon with two norms, the first is that of the MLP.
            _ if part == "attn_norm" && self.file.tensor(&format!("blk.{layer}.attn_norm_2.weight")).is_some() => "ln_mlp",
            _ => find(self.names.of_layer, &OF_LAYER, part).unwrap_or(part),
        };
        if renamed.ends_with('.') && tensor.shape.len() > 1 {
            // Norms may belong to KV heads.
            reserve(named, 1, tensor, tensor.shape[0].min(self.heads))?;
            named.extend(tensor.clone().split().enumerate().map(|(head, tensor)| (format!("{prefix}.{renamed}{head}.{suffix}"), tensor)));
            return Ok(());
        }
        let mut tensor = tensor.clone();
        if part == SHARED_GATE && tensor.shape.len() == 1 {
            tensor.shape.insert(0, 1);
        }
        let name =
            if [SINKS, CORRECTION].contains(&renamed) { format!("{prefix}.{renamed}") } else { format!("{prefix}.{renamed}.{suffix}") };
        named.push((name, tensor));
        Ok(())
    }
}

/// Returns the name of a tensor in Hugging Face.
fn find(own: &[(&str, &'static str)], usual: &[(&str, &'static str)], part: &str) -> Option<&'static str> {
    own.iter().chain(usual).find(|(gguf, _)| *gguf == part).map(|(_, name)| *name)
}

/// Reserves `each` places for every tensor along the outermost dimension, of which there must be
/// `count`.
fn reserve(named: &mut Named, each: usize, tensor: &Tensor, count: usize) -> Result<()> {
    if tensor.shape[0] != count || count > MAX_EXPERTS {
        let problem = format!("{} experts or heads; the metadata have {count}, of at most {MAX_EXPERTS}", tensor.shape[0]);
        return Err(Error::model(problem));
    }
    Ok(named.try_reserve(each * count)?)
}

impl ExpertNames {
    /// Returns the names of the matrices of each expert in a tensor.
    fn matrices(&self, part: &str) -> Option<Vec<&'static str>> {
        match part {
            "ffn_gate_exps" => Some(vec![self.gate]),
            "ffn_up_exps" => Some(vec![self.up]),
            "ffn_gate_up_exps" => Some(vec![self.gate, self.up]),
            "ffn_down_exps" => Some(vec![self.down]),
            _ => None,
        }
    }
}
