//! Qwen2 and Qwen2.5: LLaMA with biases of queries, keys and values, and optional windows in the
//! last layers.

use super::super::config::Config;
use super::super::spec::ModelSpec;
use super::base::{Base, Biases, DEFAULTS, Defaults, optional_window};
use super::limits;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = Base { biases: Biases { qkv: true, ..Biases::NONE }, ..base(config, DEFAULTS)? };
    Ok(base.model(|i| base.layer(i)))
}

/// Reads what Qwen2 and Qwen3 share. If windows are enabled, layers from `max_window_layers` on
/// have one.
pub fn base(config: &Config, defaults: Defaults) -> Result<Base> {
    let base = Base::read(config, &Defaults { positions: 32_768, ..defaults })?;
    let first = config.whole_or("max_window_layers", limits::MAX_LAYERS, 28)?;
    base.with_windows(config, optional_window(config, Some(4096))?, |layer| layer >= first)
}
