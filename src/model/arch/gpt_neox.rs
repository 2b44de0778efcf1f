//! GPT-NeoX and Pythia: queries, keys and values in one matrix, grouped by head. A quarter of each
//! head is rotated. Attention and MLP are parallel, each after its own norm.

use super::super::config::Config;
use super::super::spec::{Embedding, Head, Layer, Linear, ModelSpec, NormKind, Residual};
use super::base::{Base, Biases, DEFAULTS, Defaults};
use super::limits;
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        kv_heads: Some(config.count("num_attention_heads", limits::MAX_HEADS)?),
        act: ("hidden_act", "gelu"),
        eps: ("layer_norm_eps", 1e-5),
        rope: RopeDefaults { theta: ("rotary_emb_base", 10_000.0), part: Some(("rotary_pct", 0.25)) },
        ..DEFAULTS
    };
    let bias = config.flag_or("attention_bias", true)?;
    let biases = Biases { qkv: bias, out: bias, mlp: true };
    let base = Base { biases, ..Base::read(config, &defaults)? }.with_norms(NormKind::Layer, true);
    let parallel = config.flag_or("use_parallel_residual", true)?;
    let model = base.model(|i| layer(&base, i, parallel));
    let named = |name| Linear::new(name, base.vocab_size, base.hidden);
    Ok(ModelSpec {
        embedding: Embedding { tokens: named("embed_in"), ..model.embedding },
        final_norm: Some(base.norm("final_layer_norm")),
        head: Head { weight: (!base.tied).then(|| named("embed_out")), ..model.head },
        ..model
    })
}

fn layer(base: &Base, layer: usize, parallel: bool) -> Layer {
    let named = |name| format!("layers.{layer}.{name}");
    let (attention, mlp) = (base.norm(named("input_layernorm")), base.norm(named("post_attention_layernorm")));
    Layer {
        residual: if parallel { Residual::Parallel { attention, mlp: Some(mlp) } } else { Residual::PreNorm { attention, mlp } },
        branch_scale: 1.0,
        attention: base.attention_by_kv_head(layer, &named("attention")).into(),
        mlp: base.plain_mlp(layer, ["dense_h_to_4h", "dense_4h_to_h"]),
    }
}
