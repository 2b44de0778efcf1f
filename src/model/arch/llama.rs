//! LLaMA 1, 2 and 3, and models with the same architecture.

use super::super::config::Config;
use super::super::spec::ModelSpec;
use super::base::{Base, Biases, DEFAULTS};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = Base { biases: Biases::read(config)?, ..Base::read(config, &DEFAULTS)? };
    Ok(base.model(|i| base.layer(i)))
}
