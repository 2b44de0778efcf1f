//! Mistral: LLaMA, and every layer may look through a window.

use super::super::config::Config;
use super::super::spec::ModelSpec;
use super::base::{Base, DEFAULTS, Defaults, sliding_window};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let mut base = Base::read(config, &Defaults { positions: 131_072, ..DEFAULTS })?;
    base.windows.fill(sliding_window(config)?);
    Ok(base.model(|i| base.layer(i)))
}
