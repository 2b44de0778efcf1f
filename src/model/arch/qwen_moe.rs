//! Qwen2-MoE and Qwen3-MoE: Qwen with experts in most layers. The first generation also has a
//! shared expert.

use super::super::config::Config;
use super::super::spec::{Experts, Glu, HeadAttention, Layer, Linear, Mlp, ModelSpec, Routing, SharedExpert};
use super::base::{Base, Biases, DEFAULTS, Defaults, optional_window};
use super::experts::{NAMES, expert, routing};
use super::limits;
use crate::error::{Error, Result};

pub fn spec2(config: &Config) -> Result<ModelSpec> {
    let biases = Biases { qkv: config.flag_or("qkv_bias", true)?, ..Biases::NONE };
    let base = Base { biases, ..Base::read(config, &Defaults { positions: 32_768, ..DEFAULTS })? };
    let last = config.whole_or("max_window_layers", limits::MAX_LAYERS, 28)?;
    let base = base.with_windows(config, optional_window(config, Some(4096))?, |layer| layer % 2 == 0 && layer < last)?;
    let sparse = Sparse::read(config, base.layers)?;
    let shared = config.count("shared_expert_intermediate_size", limits::MAX_WIDTH)?;
    Ok(base.model(|i| Layer { mlp: sparse.mlp(&base, i, Some(shared)), ..base.layer(i) }))
}

pub fn spec3(config: &Config) -> Result<ModelSpec> {
    let biases = Biases::of_attention(config)?;
    let mut base = Base { biases, ..Base::read(config, &Defaults { positions: 32_768, ..DEFAULTS })? };
    base.windows.fill(optional_window(config, Some(4096))?);
    let sparse = Sparse::read(config, base.layers)?;
    let attention = |i| HeadAttention { qk_norm: Some(base.qk_norm(i, ["q_norm", "k_norm"])), ..base.attention(i) };
    Ok(base.model(|i| Layer { attention: attention(i).into(), mlp: sparse.mlp(&base, i, None), ..base.layer(i) }))
}

/// The experts, and the layers that have them.
struct Sparse {
    routing: Routing,
    inner: usize,
    step: usize,
    dense: Vec<u64>,
}

impl Sparse {
    fn read(config: &Config, layers: usize) -> Result<Sparse> {
        let dense: Option<Vec<u64>> = config.list("mlp_only_layers")?.map_or(&[][..], Vec::as_slice).iter().map(|v| v.as_u64()).collect();
        Ok(Sparse {
            routing: routing(config, layers, config.flag_or("norm_topk_prob", false)?)?,
            inner: config.count("moe_intermediate_size", limits::MAX_WIDTH)?,
            step: config.count_or("decoder_sparse_step", limits::MAX_LAYERS, 1)?,
            dense: dense.ok_or_else(|| Error::model("config.json: mlp_only_layers has an invalid entry; list indices of layers"))?,
        })
    }

    fn mlp(&self, base: &Base, layer: usize, shared: Option<usize>) -> Mlp {
        if self.dense.contains(&(layer as u64)) || !(layer + 1).is_multiple_of(self.step) {
            return base.gated_mlp(layer);
        }
        let mlp = format!("layers.{layer}.mlp");
        Mlp::Experts(Experts {
            router: Linear::new(format!("{mlp}.gate"), self.routing.experts, base.hidden),
            correction: None,
            routing: self.routing,
            glu: Glu::Of(base.act),
            experts: (0..self.routing.experts).map(|e| expert(&format!("{mlp}.experts.{e}"), NAMES, base.hidden, self.inner)).collect(),
            shared: shared.map(|inner| SharedExpert {
                expert: expert(&format!("{mlp}.shared_expert"), NAMES, base.hidden, inner),
                gate: Some(Linear::new(format!("{mlp}.shared_expert_gate"), 1, base.hidden)),
            }),
            local: None,
        })
    }
}
