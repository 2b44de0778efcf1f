//! Mixtral: Mistral with experts instead of the MLP.

use super::super::config::Config;
use super::super::spec::{Experts, Glu, Layer, Linear, Mlp, ModelSpec};
use super::base::{Base, DEFAULTS, Defaults, sliding_window};
use super::experts::{Names, expert, routing};
use super::rope::RopeDefaults;
use crate::error::Result;

const NAMES: Names = Names { gate: "w1", up: "w3", down: "w2" };

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let rope = RopeDefaults { theta: ("rope_theta", 1_000_000.0), ..DEFAULTS.rope };
    let base = Base::read(config, &Defaults { positions: 131_072, eps: ("rms_norm_eps", 1e-5), rope, ..DEFAULTS })?;
    let base = base.with_windows(config, sliding_window(config, None)?, |_| true)?;
    let routing = routing(config, base.layers, true)?;
    Ok(base.model(|i| {
        let moe = format!("layers.{i}.block_sparse_moe");
        let experts = Experts {
            router: Linear::new(format!("{moe}.gate"), routing.experts, base.hidden),
            correction: None,
            routing,
            glu: Glu::Of(base.act),
            experts: (0..routing.experts).map(|e| expert(&format!("{moe}.experts.{e}"), NAMES, base.hidden, base.inner)).collect(),
            shared: None,
            local: None,
        };
        Layer { mlp: Mlp::Experts(experts), ..base.layer(i) }
    }))
}
