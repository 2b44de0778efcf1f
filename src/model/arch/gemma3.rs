//! Gemma 3, its text model: as Gemma 2 with norms over queries and keys in place of soft caps, five of six layers through a window
//! and with a rope of their own.

use super::super::config::Config;
use super::super::spec::{Attention, Head, Layer, ModelSpec};
use super::base::{Base, DEFAULTS, Defaults, required_window, windows};
use super::gemma2::{self, NORMS, soft_cap};
use super::most;
use super::rope::{RopeDefaults, local_rope};
use crate::error::{Error, Result};

const GLOBAL: RopeDefaults = RopeDefaults { theta: ("rope_theta", 1_000_000.0), ..DEFAULTS.rope };
const LOCAL: RopeDefaults = RopeDefaults { theta: ("rope_local_base_freq", 10_000.0), ..DEFAULTS.rope };

pub fn spec(config: &Config) -> Result<ModelSpec> {
    if config.has("attn_logit_softcapping") {
        return Err(Error::unsupported("config.json: attn_logit_softcapping is given: Gemma 3 has no soft cap of scores"));
    }
    let mut base = gemma2::base(config, Defaults { positions: 131_072, rope: GLOBAL, ..DEFAULTS })?;
    let pattern = config.count_or("sliding_window_pattern", most::LAYERS, 6)?;
    base.windows = windows(config, base.layers, required_window(config, 4096)?, |layer| (layer + 1) % pattern != 0)?;
    let local = local_rope(config, base.shape.head_dim, &LOCAL)?;
    let model = base.model(|i| Layer { residual: base.sandwich(i, NORMS), attention: attention(&base, i), ..base.layer(i) });
    let soft_cap = soft_cap(config, "final_logit_softcapping", None)?;
    Ok(ModelSpec { ropes: vec![base.rope.clone(), local], head: Head { soft_cap, ..model.head }, ..model })
}

fn attention(base: &Base, layer: usize) -> Attention {
    let rope = base.windows[layer].map_or(0, |_| 1);
    Attention { qk_norm: Some(base.qk_norm(layer, ["q_norm", "k_norm"])), rope: Some(rope), ..base.attention(layer) }
}
