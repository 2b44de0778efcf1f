//! SmolLM3: LLaMA without rotary embedding in every fourth layer.

use super::super::config::Config;
use super::super::spec::{HeadAttention, Layer, ModelSpec};
use super::base::{Base, Biases, DEFAULTS, Defaults, list_of_layers, optional_window};
use super::limits;
use super::rope::RopeDefaults;
use crate::error::{Error, Result};

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let rope = RopeDefaults { theta: ("rope_theta", 2_000_000.0), ..DEFAULTS.rope };
    let base = Base::read(config, &Defaults { tied: true, positions: 32_768, rope, ..DEFAULTS })?;
    let turns = layers_that_turn(config, base.layers)?;
    let base = Base { biases: Biases::read(config)?, ..base };
    let base = base.with_windows(config, optional_window(config, None)?, |layer| !turns[layer])?;
    Ok(base.model(|i| Layer { attention: HeadAttention { rope: turns[i].then_some(0), ..base.attention(i) }.into(), ..base.layer(i) }))
}

/// Returns the layers with a rotary embedding. In `no_rope_layers`, 1 means that the layer has one.
fn layers_that_turn(config: &Config, layers: usize) -> Result<Vec<bool>> {
    let Some(list) = list_of_layers(config, "no_rope_layers", layers)? else {
        let interval = config.count_or("no_rope_layer_interval", limits::MAX_LAYERS, 4)?;
        return Ok((0..layers).map(|layer| (layer + 1) % interval != 0).collect());
    };
    let turns: Option<Vec<bool>> = list.iter().map(|flag| flag.as_u64().filter(|&flag| flag <= 1).map(|flag| flag == 1)).collect();
    turns.ok_or_else(|| Error::model("config.json: no_rope_layers has an invalid entry; list 1 (RoPE) or 0 (no RoPE) for each layer"))
}
