//! Cohere's Command R: attention and MLP side by side behind one norm without a bias, neighbouring dimensions turn together, logits
//! scaled. Its second generation has windows, and no ropes in layers that see everything.

use super::super::config::Config;
use super::super::spec::{Attention, Head, Layer, ModelSpec, Norm, NormKind, Pairs, QkNorm, QkNormOver, Residual};
use super::base::{Base, DEFAULTS, Defaults, sliding_window, windows};
use super::most;
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let base = base(config, 500_000.0)?;
    let norms_heads = config.flag_or("use_qk_norm", false)?;
    let attention = |i| Attention { qk_norm: norms_heads.then(|| norms_of_heads(&base, i)), ..base.attention(i) };
    model(config, &base, attention)
}

pub fn spec2(config: &Config) -> Result<ModelSpec> {
    let base = base(config, 10_000.0)?;
    let pattern = config.count_or("sliding_window_pattern", most::LAYERS, 4)?;
    let windows = windows(config, base.layers, sliding_window(config)?, |layer| (layer + 1) % pattern != 0)?;
    let base = Base { windows, ..base };
    model(config, &base, |i| Attention { rope: base.windows[i].map(|_| 0), ..base.attention(i) })
}

fn base(config: &Config, theta: f64) -> Result<Base> {
    let bias = config.flag_or("attention_bias", false)?;
    let rope = RopeDefaults { theta: ("rope_theta", theta), ..DEFAULTS.rope };
    let defaults = Defaults { tied: true, positions: 8192, eps: ("layer_norm_eps", 1e-5), rope, ..DEFAULTS };
    let mut base = Base { norm: NormKind::Layer, biases: (bias, bias, false), ..Base::read(config, &defaults)? };
    base.rope.pairs = Pairs::Neighbours;
    Ok(base)
}

fn model(config: &Config, base: &Base, attention: impl Fn(usize) -> Attention) -> Result<ModelSpec> {
    let model = base.model(|i| Layer {
        residual: Residual::Parallel { attention: base.norm(format!("layers.{i}.input_layernorm")), mlp: None },
        attention: attention(i),
        ..base.layer(i)
    });
    Ok(ModelSpec { head: Head { scale: config.positive_or("logit_scale", 0.0625)? as f32, ..model.head }, ..model })
}

fn norms_of_heads(base: &Base, layer: usize) -> QkNorm {
    let norm = |name, heads| Norm {
        shape: vec![heads, base.shape.head_dim],
        ..Norm::new(format!("layers.{layer}.self_attn.{name}"), 0, NormKind::Layer, base.eps)
    };
    QkNorm { over: QkNormOver::EachHead, q: norm("q_norm", base.shape.heads), k: norm("k_norm", base.shape.kv_heads) }
}
