//! The parts that families with experts share.

use super::super::config::Config;
use super::super::spec::{Expert, Linear, Routing, TensorPart};
use super::limits;
use crate::error::{Error, Result};

/// Names of an expert's matrices.
#[derive(Clone, Copy)]
pub struct Names {
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

pub const NAMES: Names = Names { gate: "gate_proj", up: "up_proj", down: "down_proj" };

pub fn expert(name: &str, names: Names, hidden: usize, inner: usize) -> Expert {
    let stacked = [names.gate, names.up].map(|part| TensorPart::own(format!("{name}.{part}"), inner)).to_vec();
    Expert { gate_up: Linear::stack(stacked, hidden), down: Linear::new(format!("{name}.{}", names.down), hidden, inner) }
}

/// Reads the routing. The number of experts has one of two field names, depending on the family and
/// the version of transformers.
pub fn routing(config: &Config, layers: usize, normalized: bool) -> Result<Routing> {
    let experts = if config.has("num_local_experts") { "num_local_experts" } else { "num_experts" };
    routing_among(config, experts, layers, normalized)
}

/// Reads the routing. `experts` is the name of the field with the number of experts.
pub fn routing_among(config: &Config, experts: &str, layers: usize, normalized: bool) -> Result<Routing> {
    let count = config.count(experts, limits::MAX_EXPERTS)?;
    limits::check_tensor_count(layers, count, experts)?;
    let top_k = config.count("num_experts_per_tok", limits::MAX_EXPERTS)?;
    if top_k > count {
        return Err(Error::model(format!("config.json: num_experts_per_tok is {top_k}, but {experts} is {count}; give at most {count}")));
    }
    Ok(Routing::softmax(count, top_k, normalized))
}
