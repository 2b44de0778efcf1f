//! gpt-oss: attention sinks, a window in every other layer, and experts. The experts of a layer are
//! in one tensor, in MXFP4 or 16 bits.

use super::super::config::Config;
use super::super::spec::*;
use super::base::{Base, Biases, DEFAULTS, Defaults, required_window};
use super::experts::routing;
use super::rope::RopeDefaults;
use crate::error::{Error, Result};

const ALPHA: f32 = 1.702;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    if !config.has("rope_scaling") && !config.has("rope_parameters") {
        return Err(Error::model("config.json: rope_scaling is missing; this family requires it"));
    }
    let rope = RopeDefaults { theta: ("rope_theta", 150_000.0), ..DEFAULTS.rope };
    let defaults = Defaults { head_dim: Some(64), positions: 131_072, eps: ("rms_norm_eps", 1e-5), rope, ..DEFAULTS };
    let biases = Biases::all_or_none(config.flag_or("attention_bias", true)?);
    let base = Base { biases, ..Base::read(config, &defaults)? };
    let base = base.with_windows(config, required_window(config, 128)?, |layer| layer % 2 == 0)?;
    let routing = routing(config, base.layers, true)?;
    let glu = Glu::Clamped { alpha: ALPHA, limit: config.positive_or("swiglu_limit", 7.0)? as f32 };
    Ok(base.model(|i| Layer { attention: attention(&base, i).into(), mlp: Mlp::Experts(experts(&base, i, routing, glu)), ..base.layer(i) }))
}

fn attention(base: &Base, layer: usize) -> HeadAttention {
    let sinks = Vector::new(format!("layers.{layer}.self_attn.sinks"), base.shape.heads);
    HeadAttention { sinks: Some(sinks), ..base.attention(layer) }
}

fn experts(base: &Base, layer: usize, routing: Routing, glu: Glu) -> Experts {
    let matrix = |name: &str, index, rows, cols| {
        let source = Source::Expert { index, count: routing.experts };
        let part = TensorPart { name: format!("layers.{layer}.mlp.experts.{name}"), rows, source };
        Linear::stack(vec![part], cols).bias(true).layout(Layout::InOut)
    };
    let expert = |index| Expert {
        gate_up: matrix("gate_up_proj", index, 2 * base.inner, base.hidden).order(RowOrder::Alternating),
        down: matrix("down_proj", index, base.hidden, base.inner),
    };
    Experts {
        router: Linear::new(format!("layers.{layer}.mlp.router"), routing.experts, base.hidden).bias(true),
        correction: None,
        routing,
        glu,
        experts: (0..routing.experts).map(expert).collect(),
        shared: None,
        local: None,
    }
}
