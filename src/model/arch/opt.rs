//! OPT: learned positions, starting at row 2. The 350M model has post-norms and projected
//! embeddings.

use super::super::config::Config;
use super::super::spec::*;
use super::{act, head_dim, limits, standard_scale};
use crate::error::Result;

/// Fixed in transformers; the config has no field for it.
const EPS: f32 = 1e-5;
/// Number of unused rows at the beginning of the position table.
const POSITION_OFFSET: usize = 2;

pub fn spec(config: &Config) -> Result<ModelSpec> {
    let hidden = config.count("hidden_size", limits::MAX_WIDTH)?;
    let width = config.count_or("word_embed_proj_dim", limits::MAX_WIDTH, hidden)?;
    let heads = config.count("num_attention_heads", limits::MAX_HEADS)?;
    let positions = config.count("max_position_embeddings", limits::MAX_POSITIONS)?;
    let vocab_size = config.count("vocab_size", limits::MAX_VOCAB)?;
    let tied = config.flag_or("tie_word_embeddings", true)?;
    let pre_norm = config.flag_or("do_layer_norm_before", true)?;
    let final_norm = pre_norm && !config.flag_or("_remove_final_layer_norm", false)?;
    let family = Opt {
        hidden,
        heads,
        head_dim: head_dim(hidden, heads)?,
        inner: config.count("ffn_dim", limits::MAX_WIDTH)?,
        act: act(config, "activation_function", "relu")?,
        bias: config.flag_or("enable_bias", true)?,
        pre_norm,
    };
    let projected = width != hidden;
    Ok(ModelSpec {
        vocab_size,
        hidden_size: hidden,
        max_positions: positions,
        embedding: Embedding {
            tokens: Linear::new("decoder.embed_tokens", vocab_size, width),
            scale: 1.0,
            project: projected.then(|| Linear::new("decoder.project_in", hidden, width)),
            positions: Some(LearnedPositions {
                table: Linear::new("decoder.embed_positions", positions + POSITION_OFFSET, hidden),
                offset: POSITION_OFFSET,
            }),
        },
        ropes: Vec::new(),
        layers: (0..config.count("num_hidden_layers", limits::MAX_LAYERS)?).map(|i| family.layer(i)).collect(),
        spare_layers: 0,
        final_norm: final_norm.then(|| family.norm("decoder.final_layer_norm".into())),
        head: Head {
            project: projected.then(|| Linear::new("decoder.project_out", width, hidden)),
            weight: (!tied).then(|| Linear::new("lm_head", vocab_size, width)),
            scale: 1.0,
            soft_cap: None,
        },
    })
}

struct Opt {
    hidden: usize,
    heads: usize,
    head_dim: usize,
    inner: usize,
    act: Act,
    bias: bool,
    pre_norm: bool,
}

impl Opt {
    fn norm(&self, name: String) -> Norm {
        Norm::new(name, self.hidden, NormKind::Layer, EPS).bias(true)
    }

    fn layer(&self, index: usize) -> Layer {
        let Opt { hidden, heads, head_dim, inner, .. } = *self;
        let layer = format!("decoder.layers.{index}");
        let linear = |name: &str, rows, cols| Linear::new(format!("{layer}.{name}"), rows, cols).bias(self.bias);
        let shape = AttentionShape::new(heads, heads, head_dim, standard_scale(head_dim));
        let (attention, mlp) = (self.norm(format!("{layer}.self_attn_layer_norm")), self.norm(format!("{layer}.final_layer_norm")));
        Layer {
            branch_scale: 1.0,
            residual: if self.pre_norm { Residual::PreNorm { attention, mlp } } else { Residual::PostNorm { attention, mlp } },
            attention: HeadAttention {
                shape,
                qkv: HeadAttention::stacked_qkv(&format!("{layer}.self_attn"), ["q_proj", "k_proj", "v_proj"], &shape, hidden)
                    .bias(self.bias),
                out: linear("self_attn.out_proj", hidden, hidden),
                qk_norm: None,
                rope: None,
                sinks: None,
            }
            .into(),
            mlp: Mlp::Plain { up: linear("fc1", inner, hidden), act: self.act, down: linear("fc2", hidden, inner) },
        }
    }
}
