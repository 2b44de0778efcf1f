//! StarCoder2: grouped-query attention with rotary embeddings, layer norms, biases and an MLP
//! without a gate.

use super::super::config::Config;
use super::super::spec::{Layer, ModelSpec, NormKind};
use super::base::{Base, Biases, DEFAULTS, Defaults, sliding_window};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let bias = config.flag_or("use_bias", true)?;
    let defaults =
        Defaults { tied: true, positions: 4096, act: ("hidden_act", "gelu_pytorch_tanh"), eps: ("norm_epsilon", 1e-5), ..DEFAULTS };
    let base = Base { biases: Biases::all_or_none(bias), ..Base::read(config, &defaults)? }.with_norms(NormKind::Layer, true);
    let base = base.with_windows(config, sliding_window(config, None)?, |_| true)?;
    Ok(base.model(|i| Layer { mlp: base.plain_mlp(i, ["c_fc", "c_proj"]), ..base.layer(i) }))
}
