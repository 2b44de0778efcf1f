//! GPT-NeoX and Pythia: queries, keys and values of each head together in one matrix, a quarter of each head turns, attention and MLP
//! side by side, each behind a norm of its own.

use super::super::config::Config;
use super::super::spec::{Attention, Embedding, Head, Layer, Layout, Linear, ModelSpec, NormKind, Residual};
use super::base::{Base, DEFAULTS, Defaults};
use super::most;
use super::rope::RopeDefaults;
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let defaults = Defaults {
        act: ("hidden_act", "gelu"),
        eps: ("layer_norm_eps", 1e-5),
        rope: RopeDefaults { theta: ("rotary_emb_base", 10_000.0), part: ("rotary_pct", 0.25) },
        ..DEFAULTS
    };
    // Each head has its own K and V.
    let heads = config.count("num_attention_heads", most::HEADS)?;
    let base = Base::read(&config.with(&[("num_key_value_heads", heads)]), &defaults)?;
    let bias = config.flag_or("attention_bias", true)?;
    let base = Base { norm: NormKind::Layer, norm_bias: true, biases: (bias, bias, true), ..base };
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
        attention: fused_attention(base, layer, &named("attention")),
        mlp: base.plain_mlp(layer, ["dense_h_to_4h", "dense_4h_to_h"]),
    }
}

/// What each KV head has, its queries, key and value, is together in `query_key_value`.
pub fn fused_attention(base: &Base, layer: usize, name: &str) -> Attention {
    let (shape, hidden, (qkv_bias, out_bias, _)) = (base.shape_of(layer), base.hidden, base.biases);
    let layout = Layout::ByKvHead { queries: shape.heads / shape.kv_heads, head_dim: shape.head_dim };
    Attention {
        qkv: Linear::new(format!("{name}.query_key_value"), shape.qkv_width(), hidden).bias(qkv_bias).layout(layout),
        out: Linear::new(format!("{name}.dense"), hidden, shape.q_width()).bias(out_bias),
        ..base.attention(layer)
    }
}
