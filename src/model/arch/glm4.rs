//! GLM-4: norms before and after each branch. Half of each head is rotated, in pairs of adjacent
//! dimensions.

use super::super::config::Config;
use super::super::spec::{Layer, ModelSpec, Pairs};
use super::base::{Base, DEFAULTS, Defaults};
use super::rope::RopeDefaults;
use crate::error::Result;

const NORMS: [&str; 4] = ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"];

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        head_dim: Some(128),
        positions: 131_072,
        eps: ("rms_norm_eps", 1.5625e-7),
        rope: RopeDefaults { part: Some(("partial_rotary_factor", 0.5)), ..DEFAULTS.rope },
        ..DEFAULTS
    };
    let mut base = Base::read(config, &defaults)?;
    base.biases.qkv = config.flag_or("attention_bias", true)?;
    base.rope.pairs = Pairs::Neighbours;
    Ok(base.model(|i| Layer { residual: base.sandwich(i, NORMS), mlp: base.fused_mlp(i), ..base.layer(i) }))
}
