//! Granite: LLaMA with multipliers of embeddings, scores and branches, and a divisor of the logits.

use super::super::config::Config;
use super::super::spec::{Head, ModelSpec};
use super::base::{Base, Biases, DEFAULTS};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let multiplier = |name| -> Result<f32> { Ok(config.positive_or(name, 1.0)? as f32) };
    let mut base = Base {
        biases: Biases::read(config)?,
        branch_scale: multiplier("residual_multiplier")?,
        embedding_scale: multiplier("embedding_multiplier")?,
        ..Base::read(config, &DEFAULTS)?
    };
    base.shape.scale = multiplier("attention_multiplier")?;
    let model = base.model(|i| base.layer(i));
    Ok(ModelSpec { head: Head { scale: 1.0 / multiplier("logits_scaling")?, ..model.head }, ..model })
}
