//! StableLM: LLaMA with layer norms, in which a quarter of each head is rotated. The 12B model has
//! parallel branches and a separate norm per head.

use super::super::config::Config;
use super::super::spec::{HeadAttention, Layer, ModelSpec, NormKind, QkNorm};
use super::base::{Base, Biases, DEFAULTS, Defaults};
use super::limits;
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        positions: 4096,
        eps: ("layer_norm_eps", 1e-5),
        rope: RopeDefaults { part: Some(("partial_rotary_factor", 0.25)), ..DEFAULTS.rope },
        ..DEFAULTS
    };
    let biases = Biases { qkv: config.flag_or("use_qkv_bias", false)?, ..Biases::NONE };
    let base = Base { biases, ..Base::read(config, &defaults)? }.with_norms(NormKind::Layer, true);
    let parallel = config.flag_or("use_parallel_residual", false)?;
    let norms_heads = config.flag_or("qk_layernorm", false)?;
    if norms_heads {
        limits::check_tensor_count(base.layers, base.shape.heads, "num_attention_heads")?;
    }
    Ok(base.model(|i| {
        let attention = HeadAttention { qk_norm: norms_heads.then(|| norms_of_heads(&base, i)), ..base.attention(i) };
        Layer { residual: if parallel { base.side_by_side(i) } else { base.pre_norm(i) }, attention: attention.into(), ..base.layer(i) }
    }))
}

/// Returns norms of queries and keys with one tensor per head.
fn norms_of_heads(base: &Base, layer: usize) -> QkNorm {
    let parts = |name, heads| (0..heads).map(|head| format!("layers.{layer}.self_attn.{name}.norms.{head}")).collect();
    let mut norms = base.qk_norm(layer, ["", ""]);
    (norms.q.parts, norms.k.parts) = (parts("q_layernorm", base.shape.heads), parts("k_layernorm", base.shape.kv_heads));
    (norms.q.bias, norms.k.bias) = (false, false);
    norms
}
