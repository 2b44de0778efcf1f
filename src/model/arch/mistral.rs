//! Mistral: LLaMA with an optional sliding window.

use super::super::config::Config;
use super::super::spec::ModelSpec;
use super::base::{Base, DEFAULTS, Defaults, sliding_window};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = Base::read(config, &Defaults { positions: 131_072, ..DEFAULTS })?;
    let base = base.with_windows(config, sliding_window(config, Some(4096))?, |_| true)?;
    Ok(base.model(|i| base.layer(i)))
}
