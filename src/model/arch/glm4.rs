//! GLM-4: norms before and behind each branch, half of each head turns, neighbouring dimensions together.

use super::super::config::Config;
use super::super::spec::{Layer, ModelSpec, Pairs, Residual};
use super::base::{Base, DEFAULTS, Defaults};
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        head_dim: Some(128),
        positions: 131_072,
        eps: ("rms_norm_eps", 1.5625e-7),
        rope: RopeDefaults { part: ("partial_rotary_factor", 0.5), ..DEFAULTS.rope },
        ..DEFAULTS
    };
    let mut base = Base::read(config, &defaults)?;
    base.biases.0 = config.flag_or("attention_bias", true)?;
    base.rope.pairs = Pairs::Neighbours;
    Ok(base.model(|i| Layer { residual: sandwich(&base, i), mlp: base.fused_mlp(i), ..base.layer(i) }))
}

fn sandwich(base: &Base, layer: usize) -> Residual {
    let norm = |name| base.norm(format!("layers.{layer}.{name}"));
    Residual::Sandwich {
        attention: norm("input_layernorm"),
        after_attention: norm("post_self_attn_layernorm"),
        mlp: norm("post_attention_layernorm"),
        after_mlp: norm("post_mlp_layernorm"),
    }
}
