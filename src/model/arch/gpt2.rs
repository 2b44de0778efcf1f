//! GPT-2: learned positions, fused QKV, weights stored as Conv1D.

use super::super::config::Config;
use super::super::spec::*;
use super::{act, head_dim, limits, standard_scale};
use crate::error::Result;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let hidden = config.count("n_embd", limits::MAX_WIDTH)?;
    let heads = config.count("n_head", limits::MAX_HEADS)?;
    let positions = config.count("n_positions", limits::MAX_POSITIONS)?;
    let vocab_size = config.count("vocab_size", limits::MAX_VOCAB)?;
    let tied = config.flag_or("tie_word_embeddings", true)?;
    let family = Gpt2 {
        hidden,
        heads,
        head_dim: head_dim(hidden, heads)?,
        inner: config.count_or("n_inner", limits::MAX_WIDTH, 4 * hidden)?,
        eps: config.positive_or("layer_norm_epsilon", 1e-5)? as f32,
        act: act(config, "activation_function", "gelu_new")?,
        scaled: config.flag_or("scale_attn_weights", true)?,
        scaled_by_layer: config.flag_or("scale_attn_by_inverse_layer_idx", false)?,
    };
    Ok(ModelSpec {
        vocab_size,
        hidden_size: hidden,
        max_positions: positions,
        embedding: Embedding {
            tokens: Linear::new("wte", vocab_size, hidden),
            scale: 1.0,
            project: None,
            positions: Some(LearnedPositions { table: Linear::new("wpe", positions, hidden), offset: 0 }),
        },
        ropes: Vec::new(),
        layers: (0..config.count("n_layer", limits::MAX_LAYERS)?).map(|i| family.layer(i)).collect(),
        spare_layers: 0,
        final_norm: Some(family.norm("ln_f".into())),
        head: Head { project: None, weight: (!tied).then(|| Linear::new("lm_head", vocab_size, hidden)), scale: 1.0, soft_cap: None },
    })
}

struct Gpt2 {
    hidden: usize,
    heads: usize,
    head_dim: usize,
    inner: usize,
    eps: f32,
    act: Act,
    scaled: bool,
    scaled_by_layer: bool,
}

impl Gpt2 {
    fn norm(&self, name: String) -> Norm {
        Norm::new(name, self.hidden, NormKind::Layer, self.eps).bias(true)
    }

    fn layer(&self, index: usize) -> Layer {
        let Gpt2 { hidden, heads, head_dim, inner, .. } = *self;
        let conv = |name: &str, rows, cols| Linear::new(format!("h.{index}.{name}"), rows, cols).bias(true).layout(Layout::InOut);
        let scale = if self.scaled { standard_scale(head_dim) } else { 1.0 };
        let scale = if self.scaled_by_layer { scale / (index + 1) as f32 } else { scale };
        let shape = AttentionShape::new(heads, heads, head_dim, scale);
        Layer {
            branch_scale: 1.0,
            residual: Residual::PreNorm { attention: self.norm(format!("h.{index}.ln_1")), mlp: self.norm(format!("h.{index}.ln_2")) },
            attention: HeadAttention {
                shape,
                qkv: conv("attn.c_attn", shape.qkv_width(), hidden),
                out: conv("attn.c_proj", hidden, hidden),
                qk_norm: None,
                rope: None,
                sinks: None,
            }
            .into(),
            mlp: Mlp::Plain { up: conv("mlp.c_fc", inner, hidden), act: self.act, down: conv("mlp.c_proj", hidden, inner) },
        }
    }
}
