//! Falcon: queries, keys and values in one matrix, grouped by KV head. The first form has one KV
//! head, the second several. Attention and MLP are parallel, after one norm or two.

use super::super::config::Config;
use super::super::spec::{Embedding, Head, HeadAttention, Layer, Linear, Mlp, ModelSpec, NormKind, Residual};
use super::base::{Base, Biases, DEFAULTS, Defaults};
use super::limits;
use crate::error::{Error, Result};

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let form = Form::read(config)?;
    let hidden = config.count("hidden_size", limits::MAX_WIDTH)?;
    let defaults = Defaults {
        tied: true,
        kv_heads: Some(form.kv_heads),
        inner: Some(config.count_or("ffn_hidden_size", limits::MAX_WIDTH, 4 * hidden)?),
        act: ("activation", "gelu"),
        eps: ("layer_norm_epsilon", 1e-5),
        ..DEFAULTS
    };
    let biases = Biases::all_or_none(config.flag_or("bias", false)?);
    let mut base = Base { biases, ..Base::read(config, &defaults)? }.with_norms(NormKind::Layer, true);
    base.shape.alibi = form.alibi.then_some(base.shape.scale);
    let model = base.model(|i| layer(&base, i, &form));
    let named = |name| Linear::new(name, base.vocab_size, base.hidden);
    Ok(ModelSpec {
        embedding: Embedding { tokens: named("word_embeddings"), ..model.embedding },
        final_norm: Some(base.norm("ln_f")),
        head: Head { weight: (!base.tied).then(|| named("lm_head")), ..model.head },
        ..model
    })
}

/// The parameters in which Falcon models differ.
struct Form {
    kv_heads: usize,
    /// True if ALiBi replaces the rotary embedding.
    alibi: bool,
    norms: Norms,
}

enum Norms {
    /// Attention, then MLP, each after its own norm.
    InTurn,
    /// Attention and MLP in parallel, after one norm.
    One,
    Two,
}

impl Form {
    fn read(config: &Config) -> Result<Form> {
        let heads = config.count("num_attention_heads", limits::MAX_HEADS)?;
        let grouped = config.flag_or("new_decoder_architecture", false)?;
        let many = config.count_or("num_kv_heads", limits::MAX_HEADS, heads)?;
        let norms = match (grouped, config.flag_or("parallel_attn", true)?, config.count_or("num_ln_in_parallel_attn", 2, 2)?) {
            (true, true, 2) => Norms::Two,
            (_, true, _) => Norms::One,
            (false, false, _) => Norms::InTurn,
            (true, false, _) => {
                return Err(Error::unsupported(
                    "config.json: new_decoder_architecture is true, but parallel_attn is false; this combination is not supported",
                ));
            }
        };
        let alibi = config.flag_or("alibi", false)?;
        Ok(Form { alibi, kv_heads: if grouped || !config.flag_or("multi_query", true)? { many } else { 1 }, norms })
    }
}

fn layer(base: &Base, layer: usize, form: &Form) -> Layer {
    let named = |name: &str| format!("h.{layer}.{name}");
    let norm = |name| base.norm(named(name));
    let linear = |name, rows, cols| Linear::new(named(name), rows, cols).bias(base.biases.mlp);
    Layer {
        residual: match form.norms {
            Norms::InTurn => Residual::PreNorm { attention: norm("input_layernorm"), mlp: norm("post_attention_layernorm") },
            Norms::One => Residual::Parallel { attention: norm("input_layernorm"), mlp: None },
            Norms::Two => Residual::Parallel { attention: norm("ln_attn"), mlp: Some(norm("ln_mlp")) },
        },
        branch_scale: 1.0,
        attention: HeadAttention { rope: (!form.alibi).then_some(0), ..base.attention_by_kv_head(layer, &named("self_attention")) }.into(),
        mlp: Mlp::Plain {
            up: linear("mlp.dense_h_to_4h", base.inner, base.hidden),
            act: base.act,
            down: linear("mlp.dense_4h_to_h", base.hidden, base.inner),
        },
    }
}
