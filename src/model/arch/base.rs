//! What most families share: LLaMA's model, under the field names of most configs. A family reads it with its own defaults, and says
//! what differs.

use super::super::config::Config;
use super::super::spec::*;
use super::rope::{RopeDefaults, rope};
use super::{act, head_dim, most, standard_scale};
use crate::error::{Error, Result};

/// What a config means where it is silent, and what it calls what families call differently.
pub struct Defaults {
    pub tied: bool,
    /// None: the width divided by the heads.
    pub head_dim: Option<usize>,
    pub positions: usize,
    pub act: (&'static str, &'static str),
    pub eps: (&'static str, f64),
    pub rope: RopeDefaults,
}

pub const DEFAULTS: Defaults = Defaults {
    tied: false,
    head_dim: None,
    positions: 2048,
    act: ("hidden_act", "silu"),
    eps: ("rms_norm_eps", 1e-6),
    rope: RopeDefaults { theta: ("rope_theta", 10_000.0), part: ("partial_rotary_factor", 1.0) },
};

pub struct Base {
    pub vocab_size: usize,
    pub hidden: usize,
    pub layers: usize,
    pub positions: usize,
    pub inner: usize,
    pub shape: AttentionShape,
    /// Of each layer.
    pub windows: Vec<Option<usize>>,
    pub act: Act,
    pub rope: Rope,
    pub tied: bool,
    pub norm: NormKind,
    pub norm_bias: bool,
    pub eps: f32,
    /// Of queries, keys and values; of what attention gives; of the MLP.
    pub biases: (bool, bool, bool),
    pub branch_scale: f32,
    pub embedding_scale: f32,
}

impl Base {
    pub fn read(config: &Config, defaults: &Defaults) -> Result<Base> {
        let hidden = config.count("hidden_size", most::WIDTH)?;
        let heads = config.count("num_attention_heads", most::HEADS)?;
        let kv_heads = config.count_or("num_key_value_heads", most::HEADS, heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::model(format!("config.json: {heads} attention heads do not share {kv_heads} KV heads evenly")));
        }
        let head_dim = match (config.get("head_dim"), defaults.head_dim) {
            (Some(_), _) => config.count("head_dim", most::HEAD_DIM)?,
            (None, Some(dim)) => dim,
            (None, None) => head_dim(hidden, heads)?,
        };
        let positions = config.count_or("max_position_embeddings", most::POSITIONS, defaults.positions)?;
        let rope = rope(config, head_dim, &defaults.rope)?;
        let layers = config.count("num_hidden_layers", most::LAYERS)?;
        let (eps, eps_default) = defaults.eps;
        let (act_field, act_default) = defaults.act;
        Ok(Base {
            vocab_size: config.count("vocab_size", most::VOCAB)?,
            hidden,
            layers,
            positions: rope.reach(positions).min(most::POSITIONS),
            inner: config.count("intermediate_size", most::WIDTH)?,
            shape: AttentionShape { heads, kv_heads, head_dim, scale: standard_scale(head_dim), window: None, soft_cap: None, alibi: None },
            windows: vec![None; layers],
            act: act(config, act_field, act_default)?,
            rope,
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
            norm: NormKind::Rms { unit_offset: false },
            norm_bias: false,
            eps: config.positive_or(eps, eps_default)? as f32,
            biases: (false, false, false),
            branch_scale: 1.0,
            embedding_scale: 1.0,
        })
    }

    /// A norm over the hidden size.
    pub fn norm(&self, name: impl Into<String>) -> Norm {
        Norm::new(name, self.hidden, self.norm, self.eps).bias(self.norm_bias)
    }

    /// x += attention(norm(x)); x += mlp(norm(x)), the norms under their usual names.
    pub fn pre_norm(&self, layer: usize) -> Residual {
        let norm = |name| self.norm(format!("layers.{layer}.{name}"));
        Residual::PreNorm { attention: norm("input_layernorm"), mlp: norm("post_attention_layernorm") }
    }

    pub fn shape_of(&self, layer: usize) -> AttentionShape {
        AttentionShape { window: self.windows[layer], ..self.shape }
    }

    pub fn attention(&self, layer: usize) -> Attention {
        let (name, shape) = (format!("layers.{layer}.self_attn"), self.shape_of(layer));
        let (qkv_bias, out_bias, _) = self.biases;
        Attention {
            shape,
            qkv: Attention::stacked_qkv(&name, ["q_proj", "k_proj", "v_proj"], &shape, self.hidden).bias(qkv_bias),
            out: Linear::new(format!("{name}.o_proj"), self.hidden, shape.q_width()).bias(out_bias),
            qk_norm: None,
            rope: Some(0),
        }
    }

    /// Norms of each head of the queries and keys, whose weights all heads share.
    pub fn qk_norm(&self, layer: usize) -> QkNorm {
        let norm = |name| Norm::new(format!("layers.{layer}.self_attn.{name}"), self.shape.head_dim, self.norm, self.eps);
        QkNorm { over: QkNormOver::EachHead, q: norm("q_norm"), k: norm("k_norm") }
    }

    pub fn gated_mlp(&self, layer: usize) -> Mlp {
        let named = |name| format!("layers.{layer}.mlp.{name}");
        let gate_up = Linear::stack(vec![(named("gate_proj"), self.inner), (named("up_proj"), self.inner)], self.hidden);
        let down = Linear::new(named("down_proj"), self.hidden, self.inner);
        Mlp::Gated { gate_up: gate_up.bias(self.biases.2), act: self.act, down: down.bias(self.biases.2) }
    }

    /// Gate and up in one matrix.
    pub fn fused_mlp(&self, layer: usize) -> Mlp {
        let linear = |name, rows, cols| Linear::new(format!("layers.{layer}.mlp.{name}"), rows, cols).bias(self.biases.2);
        Mlp::Gated {
            gate_up: linear("gate_up_proj", 2 * self.inner, self.hidden),
            act: self.act,
            down: linear("down_proj", self.hidden, self.inner),
        }
    }

    /// An MLP without a gate, its two matrices under these names.
    pub fn plain_mlp(&self, layer: usize, [up, down]: [&str; 2]) -> Mlp {
        let linear = |name, rows, cols| Linear::new(format!("layers.{layer}.mlp.{name}"), rows, cols).bias(self.biases.2);
        Mlp::Plain { up: linear(up, self.inner, self.hidden), act: self.act, down: linear(down, self.hidden, self.inner) }
    }

    pub fn layer(&self, layer: usize) -> Layer {
        Layer {
            residual: self.pre_norm(layer),
            branch_scale: self.branch_scale,
            attention: self.attention(layer),
            mlp: self.gated_mlp(layer),
        }
    }

    /// The whole model of such layers, what is around them under its usual names.
    pub fn model(&self, layer: impl Fn(usize) -> Layer) -> ModelSpec {
        ModelSpec {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden,
            max_positions: self.positions,
            embedding: Embedding {
                tokens: Linear::new("embed_tokens", self.vocab_size, self.hidden),
                scale: self.embedding_scale,
                project: None,
                positions: None,
            },
            ropes: vec![self.rope.clone()],
            layers: (0..self.layers).map(layer).collect(),
            final_norm: Some(self.norm("norm")),
            head: Head {
                project: None,
                weight: (!self.tied).then(|| Linear::new("lm_head", self.vocab_size, self.hidden)),
                scale: 1.0,
                soft_cap: None,
            },
        }
    }
}

/// The window of each layer: `layer_types` says which have one, or, where that is absent, `slides(layer)`.
pub fn windows(config: &Config, layers: usize, window: Option<usize>, slides: impl Fn(usize) -> bool) -> Result<Vec<Option<usize>>> {
    let Some(types) = config.list("layer_types")? else {
        return Ok((0..layers).map(|layer| window.filter(|_| slides(layer))).collect());
    };
    if types.len() != layers {
        return Err(Error::model(format!("config.json: layer_types lists {} layers, num_hidden_layers is {layers}", types.len())));
    }
    let of = |(layer, kind): (usize, &serde_json::Value)| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_none() => {
            Err(Error::model(format!("config.json: layer_types says that layer {layer} slides, and sliding_window is absent")))
        }
        Some("sliding_attention") => Ok(window),
        _ => {
            let kind: String = kind.to_string().chars().take(80).collect();
            Err(Error::unsupported(format!(
                "config.json: layer_types says {kind} of layer {layer}; supported are full_attention, sliding_attention"
            )))
        }
    };
    types.iter().enumerate().map(of).collect()
}

/// The config's sliding window, if it has one.
pub fn sliding_window(config: &Config) -> Result<Option<usize>> {
    config.get("sliding_window").map(|_| config.count("sliding_window", most::POSITIONS)).transpose()
}
