//! Cohere Command R: attention and MLP in parallel after one norm without bias, rotary pairs of
//! adjacent dimensions, scaled logits. The second generation has sliding windows, and no rotary
//! embedding in layers with full attention.

use super::super::config::Config;
use super::super::spec::{Head, HeadAttention, Layer, ModelSpec, NormKind, Pairs};
use super::base::{Base, Biases, DEFAULTS, Defaults, required_window};
use super::limits;
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = base(config, 500_000.0)?;
    let norms_heads = config.flag_or("use_qk_norm", false)?;
    let qk_norm = |i| norms_heads.then(|| base.qk_norm_by_head(i, ["q_norm", "k_norm"]));
    model(config, &base, |i| HeadAttention { qk_norm: qk_norm(i), ..base.attention(i) })
}

pub fn spec2(config: &Config) -> Result<ModelSpec> {
    let base = base(config, 10_000.0)?;
    let pattern = config.count_or("sliding_window_pattern", limits::MAX_LAYERS, 4)?;
    let base = base.with_windows(config, required_window(config, 4096)?, |layer| (layer + 1) % pattern != 0)?;
    model(config, &base, |i| HeadAttention { rope: base.windows[i].map(|_| 0), ..base.attention(i) })
}

fn base(config: &Config, theta: f64) -> Result<Base> {
    let rope = RopeDefaults { theta: ("rope_theta", theta), ..DEFAULTS.rope };
    let defaults = Defaults { tied: true, positions: 8192, eps: ("layer_norm_eps", 1e-5), rope, ..DEFAULTS };
    let biases = Biases::of_attention(config)?;
    let mut base = Base { biases, ..Base::read(config, &defaults)? }.with_norms(NormKind::Layer, false);
    base.rope.pairs = Pairs::Neighbours;
    // Early configs have the context length in this field instead of `max_position_embeddings`.
    base.positions = base.positions.max(config.count_or("model_max_length", limits::MAX_POSITIONS, 1)?);
    Ok(base)
}

fn model(config: &Config, base: &Base, attention: impl Fn(usize) -> HeadAttention) -> Result<ModelSpec> {
    let model = base.model(|i| Layer { residual: base.side_by_side(i), attention: attention(i).into(), ..base.layer(i) });
    Ok(ModelSpec { head: Head { scale: config.positive_or("logit_scale", 0.0625)? as f32, ..model.head }, ..model })
}
