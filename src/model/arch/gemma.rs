//! Gemma: LLaMA with scaled embeddings, norm weights with an offset of 1, wide heads and a GELU
//! gate.

use super::super::config::Config;
use super::super::spec::{ModelSpec, NormKind};
use super::base::{Base, Biases, DEFAULTS, Defaults, refuse_true};
use crate::error::Result;

pub const ACT: (&str, &str) = ("hidden_activation", "gelu_pytorch_tanh");

pub fn spec(config: &Config) -> Result<ModelSpec> {
    // Early configs have `gelu`, but the models were trained with its tanh approximation.
    let named = !config.has(ACT.0) && config.text_or("hidden_act", "gelu")? != "gelu";
    let act = if named { ("hidden_act", ACT.1) } else { ACT };
    let base = base(config, Defaults { act, positions: 8192, ..DEFAULTS })?;
    Ok(base.model(|i| base.layer(i)))
}

/// Reads what all generations of Gemma share.
pub fn base(config: &Config, defaults: Defaults) -> Result<Base> {
    refuse_true(config, &["use_bidirectional_attention"])?;
    let base = Base::read(config, &Defaults { tied: true, head_dim: Some(256), ..defaults })?;
    let base = base.with_norms(NormKind::Rms { unit_offset: true }, false);
    Ok(Base { biases: Biases::of_attention(config)?, embedding_scale: (base.hidden as f32).sqrt(), ..base })
}
