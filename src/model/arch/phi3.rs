//! Phi-3 and Phi-4: LLaMA with fused QKV, fused gate and up, and LongRoPE.

use super::super::config::Config;
use super::super::spec::{HeadAttention, Layer, Linear, ModelSpec};
use super::base::{Base, DEFAULTS, Defaults, sliding_window};
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let rope = RopeDefaults { part: Some(("partial_rotary_factor", 1.0)), ..DEFAULTS.rope };
    let base = Base::read(config, &Defaults { positions: 4096, eps: ("rms_norm_eps", 1e-5), rope, ..DEFAULTS })?;
    let base = base.with_windows(config, sliding_window(config, None)?, |_| true)?;
    Ok(base.model(|i| {
        let qkv = Linear::new(format!("layers.{i}.self_attn.qkv_proj"), base.shape.qkv_width(), base.hidden);
        Layer { attention: HeadAttention { qkv, ..base.attention(i) }.into(), mlp: base.fused_mlp(i), ..base.layer(i) }
    }))
}
