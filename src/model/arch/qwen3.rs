//! Qwen3: LLaMA with a norm over each head of the queries and keys.

use super::super::config::Config;
use super::super::spec::{Attention, Layer, ModelSpec};
use super::base::{Base, DEFAULTS, Defaults};
use super::qwen2;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let bias = config.flag_or("attention_bias", false)?;
    let base = Base { biases: (bias, bias, false), ..qwen2::base(config, Defaults { head_dim: Some(128), ..DEFAULTS })? };
    Ok(base.model(|i| Layer { attention: Attention { qk_norm: Some(base.qk_norm(i)), ..base.attention(i) }, ..base.layer(i) }))
}
