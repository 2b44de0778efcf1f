//! Gemma: LLaMA with scaled embeddings, norms around 1, wide heads and a GELU gate.

use super::super::config::Config;
use super::super::spec::{ModelSpec, NormKind};
use super::base::{Base, DEFAULTS, Defaults};
use crate::error::Result;

const ACT: &str = "gelu_pytorch_tanh";

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = base(config, Defaults { act: ("hidden_act", ACT), positions: 8192, ..DEFAULTS })?;
    Ok(base.model(|i| base.layer(i)))
}

/// What all generations of Gemma share.
pub fn base(config: &Config, defaults: Defaults) -> Result<Base> {
    let bias = config.flag_or("attention_bias", false)?;
    let base = Base::read(config, &Defaults { tied: true, head_dim: Some(256), ..defaults })?;
    Ok(Base {
        norm: NormKind::Rms { unit_offset: true },
        biases: (bias, bias, false),
        embedding_scale: (base.hidden as f32).sqrt(),
        ..base
    })
}
