//! Qwen3: LLaMA with a norm of each head of queries and keys.

use super::super::config::Config;
use super::super::spec::{HeadAttention, Layer, ModelSpec};
use super::base::{Base, Biases, DEFAULTS, Defaults};
use super::qwen2;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let biases = Biases::of_attention(config)?;
    let base = Base { biases, ..qwen2::base(config, Defaults { head_dim: Some(128), ..DEFAULTS })? };
    let attention = |i| HeadAttention { qk_norm: Some(base.qk_norm(i, ["q_norm", "k_norm"])), ..base.attention(i) };
    Ok(base.model(|i| Layer { attention: attention(i).into(), ..base.layer(i) }))
}
