//! LLaMA 1, 2 and 3, and what keeps their shape.

use super::super::config::Config;
use super::super::spec::ModelSpec;
use super::base::{Base, DEFAULTS};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let attention_bias = config.flag_or("attention_bias", false)?;
    let base = Base { biases: (attention_bias, attention_bias, config.flag_or("mlp_bias", false)?), ..Base::read(config, &DEFAULTS)? };
    Ok(base.model(|i| base.layer(i)))
}
