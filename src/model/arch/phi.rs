//! Phi-1 and Phi-2: attention and MLP in parallel after one norm, partially rotated heads, biases
//! in all matrices, including the head.

use super::super::config::Config;
use super::super::spec::{Head, HeadAttention, Layer, Linear, ModelSpec, NormKind};
use super::base::{Base, Biases, DEFAULTS, Defaults};
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        act: ("hidden_act", "gelu_new"),
        eps: ("layer_norm_eps", 1e-5),
        rope: RopeDefaults { part: Some(("partial_rotary_factor", 0.5)), ..DEFAULTS.rope },
        ..DEFAULTS
    };
    let base = Base { biases: Biases::ALL, ..Base::read(config, &defaults)? }.with_norms(NormKind::Layer, true);
    let norms_heads = config.flag_or("qk_layernorm", false)?;
    let model = base.model(|i| layer(&base, i, norms_heads));
    let head = Linear::new("lm_head", base.vocab_size, base.hidden).bias(true);
    Ok(ModelSpec { final_norm: Some(base.norm("final_layernorm")), head: Head { weight: Some(head), ..model.head }, ..model })
}

fn layer(base: &Base, layer: usize, norms_heads: bool) -> Layer {
    let out = Linear::new(format!("layers.{layer}.self_attn.dense"), base.hidden, base.shape.q_width()).bias(true);
    let qk_norm = norms_heads.then(|| base.qk_norm(layer, ["q_layernorm", "k_layernorm"]));
    Layer {
        residual: base.side_by_side(layer),
        branch_scale: 1.0,
        attention: HeadAttention { out, qk_norm, ..base.attention(layer) }.into(),
        mlp: base.plain_mlp(layer, ["fc1", "fc2"]),
    }
}
