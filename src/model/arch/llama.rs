//! LLaMA 1, 2 and 3, and what keeps their shape.

use super::super::config::Config;
use super::super::spec::*;
use super::{act, head_dim, most, rope::rope, standard_scale};
use crate::error::{Error, Result};

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let hidden = config.count("hidden_size", most::WIDTH)?;
    let heads = config.count("num_attention_heads", most::HEADS)?;
    let kv_heads = config.count_or("num_key_value_heads", most::HEADS, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(Error::model(format!("config.json: {heads} attention heads do not share {kv_heads} KV heads evenly")));
    }
    let head_dim = match config.get("head_dim") {
        Some(_) => config.count("head_dim", most::HEAD_DIM)?,
        None => head_dim(hidden, heads)?,
    };
    if !head_dim.is_multiple_of(2) {
        return Err(Error::model(format!("config.json: head_dim is {head_dim}: rotary positions turn pairs, so it must be even")));
    }
    let shape = AttentionShape { heads, kv_heads, head_dim, scale: standard_scale(head_dim), window: None, soft_cap: None };
    let vocab_size = config.count("vocab_size", most::VOCAB)?;
    let tied = config.flag_or("tie_word_embeddings", false)?;
    let family = Llama {
        hidden,
        shape,
        inner: config.count("intermediate_size", most::WIDTH)?,
        eps: config.positive_or("rms_norm_eps", 1e-6)? as f32,
        act: act(config, "hidden_act", "silu")?,
        attention_bias: config.flag_or("attention_bias", false)?,
        mlp_bias: config.flag_or("mlp_bias", false)?,
    };
    Ok(ModelSpec {
        vocab_size,
        hidden_size: hidden,
        max_positions: config.count_or("max_position_embeddings", most::POSITIONS, 2048)?,
        embedding: Embedding { tokens: Linear::new("embed_tokens", vocab_size, hidden), scale: 1.0, project: None, positions: None },
        ropes: vec![rope(config, head_dim)?],
        layers: (0..config.count("num_hidden_layers", most::LAYERS)?).map(|i| family.layer(i)).collect(),
        final_norm: Some(family.norm("norm".into())),
        head: Head { project: None, weight: (!tied).then(|| Linear::new("lm_head", vocab_size, hidden)), scale: 1.0, soft_cap: None },
    })
}

struct Llama {
    hidden: usize,
    shape: AttentionShape,
    inner: usize,
    eps: f32,
    act: Act,
    attention_bias: bool,
    mlp_bias: bool,
}

impl Llama {
    fn norm(&self, name: String) -> Norm {
        Norm { name, width: self.hidden, kind: NormKind::Rms { unit_offset: false }, eps: self.eps, bias: false }
    }

    fn layer(&self, index: usize) -> Layer {
        let Llama { hidden, shape, inner, .. } = *self;
        let (attn, mlp) = (format!("layers.{index}.self_attn"), format!("layers.{index}.mlp"));
        Layer {
            residual: Residual::PreNorm {
                attention: self.norm(format!("layers.{index}.input_layernorm")),
                mlp: self.norm(format!("layers.{index}.post_attention_layernorm")),
            },
            attention: Attention {
                shape,
                qkv: Attention::stacked_qkv(&attn, ["q_proj", "k_proj", "v_proj"], &shape, hidden).bias(self.attention_bias),
                out: Linear::new(format!("{attn}.o_proj"), hidden, shape.q_width()).bias(self.attention_bias),
                qk_norm: None,
                rope: Some(0),
            },
            mlp: Mlp::Gated {
                gate_up: Linear::stack(vec![(format!("{mlp}.gate_proj"), inner), (format!("{mlp}.up_proj"), inner)], hidden)
                    .bias(self.mlp_bias),
                act: self.act,
                down: Linear::new(format!("{mlp}.down_proj"), hidden, inner).bias(self.mlp_bias),
            },
        }
    }
}
