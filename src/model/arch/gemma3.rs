//! Gemma 3, text model: Gemma 2 with norms of queries and keys instead of soft caps. Five of six
//! layers have a window and a separate rotary embedding.

use super::super::config::Config;
use super::super::spec::{Head, HeadAttention, Layer, ModelSpec};
use super::base::{Base, DEFAULTS, Defaults, required_window};
use super::gemma2::{self, NORMS, soft_cap};
use super::limits;
use super::rope::{RopeDefaults, local_rope};
use crate::error::{Error, Result};

const GLOBAL: RopeDefaults = RopeDefaults { theta: ("rope_theta", 1_000_000.0), ..DEFAULTS.rope };
const LOCAL: RopeDefaults = RopeDefaults { theta: ("rope_local_base_freq", 10_000.0), ..DEFAULTS.rope };

pub fn spec(config: &Config) -> Result<ModelSpec> {
    if config.has("attn_logit_softcapping") {
        return Err(Error::unsupported("config.json: attn_logit_softcapping is set; this family does not support it"));
    }
    let base = gemma2::base(config, Defaults { positions: 131_072, rope: GLOBAL, ..DEFAULTS })?;
    let pattern = config.count_or("sliding_window_pattern", limits::MAX_LAYERS, 6)?;
    let base = base.with_windows(config, required_window(config, 4096)?, |layer| (layer + 1) % pattern != 0)?;
    let local = local_rope(config, base.shape.head_dim, &LOCAL)?;
    let model = base.model(|i| Layer { residual: base.sandwich(i, NORMS), attention: attention(&base, i).into(), ..base.layer(i) });
    let soft_cap = soft_cap(config, "final_logit_softcapping", None)?;
    Ok(ModelSpec { ropes: vec![base.rope.clone(), local], head: Head { soft_cap, ..model.head }, ..model })
}

/// Reads the text model of a multimodal checkpoint. Its config is nested, and omits fields that
/// have the values of the first model.
pub fn spec_of_text(config: &Config) -> Result<ModelSpec> {
    let text = config.object("text_config")?.ok_or_else(|| Error::model("config.json: text_config is missing"))?;
    spec(&text.or(&[
        ("vocab_size", 262_208),
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 26),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
    ]))
}

fn attention(base: &Base, layer: usize) -> HeadAttention {
    let rope = base.windows[layer].map_or(0, |_| 1);
    HeadAttention { qk_norm: Some(base.qk_norm(layer, ["q_norm", "k_norm"])), rope: Some(rope), ..base.attention(layer) }
}
