//! Gemma 2: norms before and after each branch, a window in every other layer, soft caps of scores
//! and logits.

use super::super::config::Config;
use super::super::spec::{Head, Layer, ModelSpec};
use super::base::{Base, DEFAULTS, Defaults, required_window};
use super::{gemma, limits, standard_scale};
use crate::error::Result;

/// A layer's norms, in the order of execution.
pub const NORMS: [&str; 4] = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"];

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = base(config, Defaults { positions: 8192, ..DEFAULTS })?;
    let mut base = base.with_windows(config, required_window(config, 4096)?, |layer| layer % 2 == 0)?;
    base.shape.soft_cap = soft_cap(config, "attn_logit_softcapping", Some(50.0))?;
    let model = base.model(|i| Layer { residual: base.sandwich(i, NORMS), ..base.layer(i) });
    let soft_cap = soft_cap(config, "final_logit_softcapping", Some(30.0))?;
    Ok(ModelSpec { head: Head { soft_cap, ..model.head }, ..model })
}

/// Reads what Gemma 2 and 3 share.
pub fn base(config: &Config, defaults: Defaults) -> Result<Base> {
    let mut base = gemma::base(config, Defaults { act: gemma::ACT, ..defaults })?;
    base.shape.scale = standard_scale(config.count_or("query_pre_attn_scalar", limits::MAX_WIDTH, 256)?);
    Ok(base)
}

/// Reads a soft cap. If the field is null, there is none; if it is absent, the default applies.
pub fn soft_cap(config: &Config, name: &str, default: Option<f64>) -> Result<Option<f32>> {
    match config.has(name) {
        true => Ok(Some(config.positive(name)? as f32)),
        false => Ok(default.map(|cap| cap as f32).filter(|_| !config.is_null(name))),
    }
}
