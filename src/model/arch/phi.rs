//! Phi-1 and Phi-2: attention and MLP side by side behind one norm, a part of each head turns, biases everywhere, in the head too.

use super::super::config::Config;
use super::super::spec::{Attention, Head, Layer, Linear, ModelSpec, Norm, NormKind, QkNorm, QkNormOver, Residual};
use super::base::{Base, DEFAULTS, Defaults};
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        act: ("hidden_act", "gelu_new"),
        eps: ("layer_norm_eps", 1e-5),
        rope: RopeDefaults { part: ("partial_rotary_factor", 0.5), ..DEFAULTS.rope },
        ..DEFAULTS
    };
    let base = Base { norm: NormKind::Layer, norm_bias: true, biases: (true, true, true), ..Base::read(config, &defaults)? };
    let norms_heads = config.flag_or("qk_layernorm", false)?;
    let model = base.model(|i| layer(&base, i, norms_heads));
    let head = Linear::new("lm_head", base.vocab_size, base.hidden).bias(true);
    Ok(ModelSpec { final_norm: Some(base.norm("final_layernorm")), head: Head { weight: Some(head), ..model.head }, ..model })
}

fn layer(base: &Base, layer: usize, norms_heads: bool) -> Layer {
    let named = |name| format!("layers.{layer}.self_attn.{name}");
    let attention = base.attention(layer);
    let norm = |name| Norm::new(named(name), base.shape.head_dim, base.norm, base.eps).bias(true);
    let qk_norm = norms_heads.then(|| QkNorm { over: QkNormOver::EachHead, q: norm("q_layernorm"), k: norm("k_layernorm") });
    let out = Linear::new(named("dense"), base.hidden, base.shape.q_width()).bias(true);
    Layer {
        residual: Residual::Parallel { attention: base.norm(format!("layers.{layer}.input_layernorm")), mlp: None },
        branch_scale: 1.0,
        attention: Attention { out, qk_norm, ..attention },
        mlp: base.plain_mlp(layer, ["fc1", "fc2"]),
    }
}
