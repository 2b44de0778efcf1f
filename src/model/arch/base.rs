//! The parts that most families share: the LLaMA model, with the field names of most configs. A
//! family reads it with its own defaults and overrides what differs.

use serde_json::Value;

use super::super::config::Config;
use super::super::spec::*;
use super::rope::{RopeDefaults, rope};
use super::{act, head_dim, limits, standard_scale};
use crate::error::{Error, Result};

/// Defaults of a family for absent config fields, and the names of fields that differ between
/// families.
pub struct Defaults {
    pub tied: bool,
    /// None: hidden size / number of heads.
    pub head_dim: Option<usize>,
    pub positions: usize,
    /// Set by families whose config has another field for it. The same applies to `inner`.
    pub kv_heads: Option<usize>,
    pub inner: Option<usize>,
    pub act: (&'static str, &'static str),
    pub eps: (&'static str, f64),
    pub rope: RopeDefaults,
}

pub const DEFAULTS: Defaults = Defaults {
    tied: false,
    head_dim: None,
    positions: 2048,
    kv_heads: None,
    inner: None,
    act: ("hidden_act", "silu"),
    eps: ("rms_norm_eps", 1e-6),
    rope: RopeDefaults { theta: ("rope_theta", 10_000.0), part: None },
};

pub struct Base {
    pub vocab_size: usize,
    pub hidden: usize,
    pub layers: usize,
    pub positions: usize,
    pub inner: usize,
    pub shape: AttentionShape,
    /// `[layers]`
    pub windows: Vec<Option<usize>>,
    pub act: Act,
    pub rope: Rope,
    pub tied: bool,
    pub norms: NormStyle,
    pub biases: Biases,
    pub branch_scale: f32,
    pub embedding_scale: f32,
}

/// What all norms of a model have in common.
#[derive(Clone, Copy)]
pub struct NormStyle {
    pub kind: NormKind,
    pub bias: bool,
    pub eps: f32,
}

impl NormStyle {
    pub fn norm(&self, name: impl Into<String>, width: usize) -> Norm {
        Norm::new(name, width, self.kind, self.eps).bias(self.bias)
    }
}

/// The matrices that have a bias.
#[derive(Clone, Copy)]
pub struct Biases {
    /// Projections of queries, keys and values.
    pub qkv: bool,
    /// Output projection of attention.
    pub out: bool,
    pub mlp: bool,
}

impl Biases {
    pub const NONE: Biases = Biases { qkv: false, out: false, mlp: false };
    pub const ALL: Biases = Biases { qkv: true, out: true, mlp: true };

    pub fn all_or_none(all: bool) -> Biases {
        if all { Biases::ALL } else { Biases::NONE }
    }

    /// Reads `attention_bias`, which applies to all matrices of attention.
    pub fn of_attention(config: &Config) -> Result<Biases> {
        Ok(Biases { mlp: false, ..Biases::all_or_none(config.flag_or("attention_bias", false)?) })
    }

    /// Reads `attention_bias` and `mlp_bias`.
    pub fn read(config: &Config) -> Result<Biases> {
        Ok(Biases { mlp: config.flag_or("mlp_bias", false)?, ..Biases::of_attention(config)? })
    }
}

impl Base {
    pub fn read(config: &Config, defaults: &Defaults) -> Result<Base> {
        refuse_true(config, &["rope_interleaved", "use_mrope"])?;
        let hidden = config.count("hidden_size", limits::MAX_WIDTH)?;
        let heads = config.count("num_attention_heads", limits::MAX_HEADS)?;
        let kv_heads = defaults.kv_heads.map_or_else(|| config.count_or("num_key_value_heads", limits::MAX_HEADS, heads), Ok)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::model(format!(
                "config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads; correct num_key_value_heads"
            )));
        }
        let head_dim = match (config.get("head_dim"), defaults.head_dim) {
            (Some(_), _) => config.count("head_dim", limits::MAX_HEAD_DIM)?,
            (None, Some(dim)) => dim,
            (None, None) => head_dim(hidden, heads)?,
        };
        let positions = config.count_or("max_position_embeddings", limits::MAX_POSITIONS, defaults.positions)?;
        let rope = rope(config, head_dim, &defaults.rope)?;
        let layers = config.count("num_hidden_layers", limits::MAX_LAYERS)?;
        let (eps, eps_default) = defaults.eps;
        let (act_field, act_default) = defaults.act;
        Ok(Base {
            vocab_size: config.count("vocab_size", limits::MAX_VOCAB)?,
            hidden,
            layers,
            positions: rope.reach(positions).min(limits::MAX_POSITIONS),
            inner: defaults.inner.map_or_else(|| config.count("intermediate_size", limits::MAX_WIDTH), Ok)?,
            shape: AttentionShape::new(heads, kv_heads, head_dim, standard_scale(head_dim)),
            windows: vec![None; layers],
            act: act(config, act_field, act_default)?,
            rope,
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
            norms: NormStyle { kind: NormKind::Rms { unit_offset: false }, bias: false, eps: config.positive_or(eps, eps_default)? as f32 },
            biases: Biases::NONE,
            branch_scale: 1.0,
            embedding_scale: 1.0,
        })
    }

    /// Sets the window of the layers that `layer_types` selects or, if it is absent,
    /// `slides(layer)`.
    pub fn with_windows(self, config: &Config, window: Option<usize>, slides: impl Fn(usize) -> bool) -> Result<Base> {
        Ok(Base { windows: windows(config, self.layers, window, slides)?, ..self })
    }

    /// Sets the kind of all norms, and whether they have a bias.
    pub fn with_norms(self, kind: NormKind, bias: bool) -> Base {
        Base { norms: NormStyle { kind, bias, ..self.norms }, ..self }
    }

    /// Returns a norm over the hidden size.
    pub fn norm(&self, name: impl Into<String>) -> Norm {
        self.norms.norm(name, self.hidden)
    }

    /// x += attention(norm(x)); x += mlp(norm(x)), with the usual names of the norms.
    pub fn pre_norm(&self, layer: usize) -> Residual {
        let norm = |name| self.norm(format!("layers.{layer}.{name}"));
        Residual::PreNorm { attention: norm("input_layernorm"), mlp: norm("post_attention_layernorm") }
    }

    pub fn shape_of(&self, layer: usize) -> AttentionShape {
        AttentionShape { window: self.windows[layer], ..self.shape }
    }

    /// Returns norms before and after each branch. The four names are in the order of execution.
    pub fn sandwich(&self, layer: usize, [attention, after_attention, mlp, after_mlp]: [&str; 4]) -> Residual {
        let norm = |name| self.norm(format!("layers.{layer}.{name}"));
        Residual::Sandwich {
            attention: norm(attention),
            after_attention: norm(after_attention),
            mlp: norm(mlp),
            after_mlp: norm(after_mlp),
        }
    }

    /// Returns attention and MLP in parallel, after one norm.
    pub fn side_by_side(&self, layer: usize) -> Residual {
        Residual::Parallel { attention: self.norm(format!("layers.{layer}.input_layernorm")), mlp: None }
    }

    pub fn attention(&self, layer: usize) -> HeadAttention {
        let (name, shape) = (format!("layers.{layer}.self_attn"), self.shape_of(layer));
        HeadAttention {
            shape,
            qkv: HeadAttention::stacked_qkv(&name, ["q_proj", "k_proj", "v_proj"], &shape, self.hidden).bias(self.biases.qkv),
            out: Linear::new(format!("{name}.o_proj"), self.hidden, shape.q_width()).bias(self.biases.out),
            qk_norm: None,
            rope: Some(0),
            sinks: None,
        }
    }

    /// Returns attention with `query_key_value`, whose rows are grouped by KV head: its queries,
    /// key and value.
    pub fn attention_by_kv_head(&self, layer: usize, name: &str) -> HeadAttention {
        let (shape, hidden) = (self.shape_of(layer), self.hidden);
        let order = RowOrder::ByKvHead { queries: shape.heads / shape.kv_heads, head_dim: shape.head_dim };
        HeadAttention {
            qkv: Linear::new(format!("{name}.query_key_value"), shape.qkv_width(), hidden).bias(self.biases.qkv).order(order),
            out: Linear::new(format!("{name}.dense"), hidden, shape.q_width()).bias(self.biases.out),
            ..self.attention(layer)
        }
    }

    /// Returns norms of each head of queries and keys, with weights shared by all heads.
    pub fn qk_norm(&self, layer: usize, [q, k]: [&str; 2]) -> QkNorm {
        let norm = |name| self.norms.norm(format!("layers.{layer}.self_attn.{name}"), self.shape.head_dim);
        QkNorm { over: QkNormOver::EachHead, q: norm(q), k: norm(k) }
    }

    /// Like `qk_norm`, but with weights per head, in one tensor for all heads.
    pub fn qk_norm_by_head(&self, layer: usize, names: [&str; 2]) -> QkNorm {
        let of_heads = |norm: Norm, heads| Norm { shape: vec![heads, self.shape.head_dim], bias: false, ..norm };
        let QkNorm { over, q, k } = self.qk_norm(layer, names);
        QkNorm { over, q: of_heads(q, self.shape.heads), k: of_heads(k, self.shape.kv_heads) }
    }

    pub fn gated_mlp(&self, layer: usize) -> Mlp {
        let named = |name| format!("layers.{layer}.mlp.{name}");
        let gate_up = Linear::stack(
            vec![TensorPart::own(named("gate_proj"), self.inner), TensorPart::own(named("up_proj"), self.inner)],
            self.hidden,
        );
        let down = Linear::new(named("down_proj"), self.hidden, self.inner);
        Mlp::Gated { gate_up: gate_up.bias(self.biases.mlp), act: self.act, down: down.bias(self.biases.mlp) }
    }

    /// Returns a gated MLP with gate and up in one matrix.
    pub fn fused_mlp(&self, layer: usize) -> Mlp {
        let linear = |name, rows, cols| Linear::new(format!("layers.{layer}.mlp.{name}"), rows, cols).bias(self.biases.mlp);
        Mlp::Gated {
            gate_up: linear("gate_up_proj", 2 * self.inner, self.hidden),
            act: self.act,
            down: linear("down_proj", self.hidden, self.inner),
        }
    }

    /// Returns an MLP without a gate. The two names are those of its matrices.
    pub fn plain_mlp(&self, layer: usize, [up, down]: [&str; 2]) -> Mlp {
        let linear = |name, rows, cols| Linear::new(format!("layers.{layer}.mlp.{name}"), rows, cols).bias(self.biases.mlp);
        Mlp::Plain { up: linear(up, self.inner, self.hidden), act: self.act, down: linear(down, self.hidden, self.inner) }
    }

    pub fn layer(&self, layer: usize) -> Layer {
        Layer {
            residual: self.pre_norm(layer),
            branch_scale: self.branch_scale,
            attention: self.attention(layer).into(),
            mlp: self.gated_mlp(layer),
        }
    }

    /// Returns a model of these layers, with the usual names of the other tensors.
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
            spare_layers: 0,
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

/// Returns the window of each layer. `layer_types` or, if it is absent, `slides(layer)` selects the
/// layers with a window.
fn windows(config: &Config, layers: usize, window: Option<usize>, slides: impl Fn(usize) -> bool) -> Result<Vec<Option<usize>>> {
    let Some(types) = list_of_layers(config, "layer_types", layers)? else {
        return Ok((0..layers).map(|layer| window.filter(|_| slides(layer))).collect());
    };
    let of = |(layer, kind): (usize, &Value)| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_none() => Err(Error::model(format!(
            "config.json: layer_types has sliding_attention for layer {layer}, but sliding_window is absent or disabled"
        ))),
        Some("sliding_attention") => Ok(window),
        _ => {
            let kind: String = kind.to_string().chars().take(80).collect();
            Err(Error::unsupported(format!(
                "config.json: layer_types has {kind} for layer {layer}; supported are full_attention, sliding_attention"
            )))
        }
    };
    types.iter().enumerate().map(of).collect()
}

/// Returns a config list with one entry per layer, if it is present.
pub fn list_of_layers<'a>(config: &'a Config, name: &str, layers: usize) -> Result<Option<&'a Vec<Value>>> {
    let list = config.list(name)?;
    match list.filter(|list| list.len() != layers) {
        Some(list) => Err(Error::model(format!("config.json: {name} lists {} layers, but num_hidden_layers is {layers}", list.len()))),
        None => Ok(list),
    }
}

/// Returns the config's sliding window: None if it is null, and the default if it is absent.
pub fn sliding_window(config: &Config, default: Option<usize>) -> Result<Option<usize>> {
    match config.has("sliding_window") {
        true => Ok(Some(config.count("sliding_window", limits::MAX_POSITIONS)?)),
        false => Ok(default.filter(|_| !config.is_null("sliding_window"))),
    }
}

/// Like `sliding_window`, for families whose window applies only with `use_sliding_window`.
pub fn optional_window(config: &Config, default: Option<usize>) -> Result<Option<usize>> {
    if config.flag_or("use_sliding_window", false)? { sliding_window(config, default) } else { Ok(None) }
}

/// Like `sliding_window`, for families in which some layers always have a window.
pub fn required_window(config: &Config, default: usize) -> Result<Option<usize>> {
    let window = sliding_window(config, Some(default))?;
    window
        .map(Some)
        .ok_or_else(|| Error::model("config.json: sliding_window is null; this family has layers with sliding attention, so give its size"))
}

/// Rejects configs with unsupported flags instead of ignoring them.
pub fn refuse_true(config: &Config, flags: &[&str]) -> Result<()> {
    for &flag in flags {
        if config.flag_or(flag, false)? {
            return Err(Error::unsupported(format!("config.json: {flag} is true; only false is supported")));
        }
    }
    Ok(())
}
