//! StableLM: LLaMA with layer norms and a quarter of each head that turns; the 12B form has its branches side by side and a norm of
//! its own for each head.

use super::super::config::Config;
use super::super::spec::{Attention, Layer, ModelSpec, Norm, NormKind, QkNorm, QkNormOver, Residual};
use super::base::{Base, DEFAULTS, Defaults};
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        positions: 4096,
        eps: ("layer_norm_eps", 1e-5),
        rope: RopeDefaults { part: ("partial_rotary_factor", 0.25), ..DEFAULTS.rope },
        ..DEFAULTS
    };
    let biases = (config.flag_or("use_qkv_bias", false)?, false, false);
    let base = Base { norm: NormKind::Layer, norm_bias: true, biases, ..Base::read(config, &defaults)? };
    let parallel = config.flag_or("use_parallel_residual", false)?;
    let norms_heads = config.flag_or("qk_layernorm", false)?;
    Ok(base.model(|i| {
        let side_by_side = || Residual::Parallel { attention: base.norm(format!("layers.{i}.input_layernorm")), mlp: None };
        let attention = Attention { qk_norm: norms_heads.then(|| norms_of_heads(&base, i)), ..base.attention(i) };
        Layer { residual: if parallel { side_by_side() } else { base.pre_norm(i) }, attention, ..base.layer(i) }
    }))
}

fn norms_of_heads(base: &Base, layer: usize) -> QkNorm {
    let norm = |name, heads| Norm {
        parts: (0..heads).map(|head| format!("layers.{layer}.self_attn.{name}.norms.{head}")).collect(),
        ..Norm::new("", base.shape.head_dim, NormKind::Layer, base.eps)
    };
    let (q, k) = (norm("q_layernorm", base.shape.heads), norm("k_layernorm", base.shape.kv_heads));
    QkNorm { over: QkNormOver::EachHead, q, k }
}
