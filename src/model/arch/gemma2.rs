//! Gemma 2: norms before and behind each branch, every other layer through a window, soft caps on scores and logits.

use super::super::config::Config;
use super::super::spec::{Head, Layer, ModelSpec, Residual};
use super::base::{Base, DEFAULTS, Defaults, sliding_window, windows};
use super::{gemma, most, standard_scale};
use crate::error::{Error, Result};

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let mut base = base(config, Defaults { positions: 8192, ..DEFAULTS })?;
    base.windows = windows(config, base.layers, sliding_window(config)?, |layer| layer % 2 == 0)?;
    base.shape.soft_cap = soft_cap(config, "attn_logit_softcapping", Some(50.0))?;
    let model = base.model(|i| Layer { residual: sandwich(&base, i), ..base.layer(i) });
    let soft_cap = soft_cap(config, "final_logit_softcapping", Some(30.0))?;
    Ok(ModelSpec { head: Head { soft_cap, ..model.head }, ..model })
}

/// What Gemma 2 and 3 share.
pub fn base(config: &Config, defaults: Defaults) -> Result<Base> {
    if config.flag_or("use_bidirectional_attention", false)? {
        return Err(Error::unsupported("config.json: use_bidirectional_attention is true: tokens that see later ones are not supported"));
    }
    let mut base = gemma::base(config, Defaults { act: ("hidden_activation", "gelu_pytorch_tanh"), ..defaults })?;
    base.shape.scale = standard_scale(config.count_or("query_pre_attn_scalar", most::WIDTH, 256)?);
    Ok(base)
}

/// A cap that is null is none; where the field is absent it is the default.
pub fn soft_cap(config: &Config, name: &str, default: Option<f64>) -> Result<Option<f32>> {
    match config.has(name) {
        true => Ok(Some(config.positive(name)? as f32)),
        false => Ok(default.map(|cap| cap as f32).filter(|_| !config.is_null(name))),
    }
}

pub fn sandwich(base: &Base, layer: usize) -> Residual {
    let norm = |name| base.norm(format!("layers.{layer}.{name}"));
    Residual::Sandwich {
        attention: norm("input_layernorm"),
        after_attention: norm("post_attention_layernorm"),
        mlp: norm("pre_feedforward_layernorm"),
        after_mlp: norm("post_feedforward_layernorm"),
    }
}
