//! OLMo 2: norms after the branches only, and norms over all queries and all keys together.

use super::super::config::Config;
use super::super::spec::{HeadAttention, Layer, ModelSpec, QkNorm, QkNormOver, Residual};
use super::base::{Base, Biases, DEFAULTS, Defaults};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults { eps: ("rms_norm_eps", 1e-5), ..DEFAULTS };
    let base = Base { biases: Biases::of_attention(config)?, ..Base::read(config, &defaults)? };
    Ok(base.model(|i| {
        let norm = |name| base.norm(format!("layers.{i}.{name}"));
        let residual = Residual::BranchNorm { attention: norm("post_attention_layernorm"), mlp: norm("post_feedforward_layernorm") };
        Layer { residual, attention: attention(&base, i).into(), ..base.layer(i) }
    }))
}

fn attention(base: &Base, layer: usize) -> HeadAttention {
    let norm = |name, width| base.norms.norm(format!("layers.{layer}.self_attn.{name}"), width);
    let (q, k) = (norm("q_norm", base.shape.q_width()), norm("k_norm", base.shape.kv_width()));
    HeadAttention { qk_norm: Some(QkNorm { over: QkNormOver::AllHeads, q, k }), ..base.attention(layer) }
}
