//! Qwen2 and 2.5: LLaMA with biases of queries, keys and values, and windows from some layer on.

use super::super::config::Config;
use super::super::spec::ModelSpec;
use super::base::{Base, DEFAULTS, Defaults, sliding_window, windows};
use super::most;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = Base { biases: (true, false, false), ..base(config, DEFAULTS)? };
    Ok(base.model(|i| base.layer(i)))
}

/// What all generations of Qwen share: the layers from `max_window_layers` on slide, where any do.
pub fn base(config: &Config, defaults: Defaults) -> Result<Base> {
    let base = Base::read(config, &Defaults { positions: 32_768, ..defaults })?;
    let window = if config.flag_or("use_sliding_window", false)? { sliding_window(config)? } else { None };
    let first = config.whole_or("max_window_layers", most::LAYERS, 28)?;
    Ok(Base { windows: windows(config, base.layers, window, |layer| layer >= first)?, ..base })
}
