//! An architecture as data. Sum types exclude invalid combinations.
//!
//! The types are generic over their leaves. A spec has names and shapes of its weights (`Linear`,
//! `Norm`, `Vector`), a loaded model the weights themselves, in the same structure.

mod map;
mod rope;
mod shard;
mod tensors;

use std::convert::Infallible;
use std::ops::Range;

pub use map::Role;
pub use rope::{Long, Longer, Rope};
pub use shard::{Shard, Stage};
pub use tensors::{Layout, Linear, LinearShard, Norm, PartRows, RowOrder, Run, Source, TensorPart, Vector};

pub use crate::backend::{Act, AttentionShape, Glu, NormKind, Pairs, Routing};
use crate::types::debug::debug_without_none;

/// A decoder-only transformer.
#[derive(Debug, Clone)]
pub struct Model<L = Linear, N = Norm, V = Vector> {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Maximum sequence length in positions.
    pub max_positions: usize,
    pub embedding: Embedding<L>,
    /// The rotary embeddings, to which layers refer by index.
    pub ropes: Vec<Rope>,
    pub layers: Vec<Layer<L, N, V>>,
    /// Number of layers in the checkpoint after these, which inference does not use (multi-token
    /// prediction).
    pub spare_layers: usize,
    pub final_norm: Option<N>,
    pub head: Head<L>,
}

pub type ModelSpec = Model;

impl ModelSpec {
    /// Returns true if one tensor holds all experts of a layer.
    pub fn has_experts_in_one_tensor(&self) -> bool {
        let in_one = |expert: &Expert| matches!(expert.down.parts[0].source, Source::Expert { .. });
        self.layers.iter().any(|layer| matches!(&layer.mlp, Mlp::Experts(experts) if experts.experts.iter().any(in_one)))
    }

    /// Returns the maximum number of columns of a matrix.
    pub fn max_cols(&self) -> usize {
        let mut max_cols = 0;
        let widest = |linear: &Linear, _| {
            max_cols = max_cols.max(linear.cols);
            Ok::<(), Infallible>(())
        };
        let Ok(_) = self.try_map(widest, |_| Ok(()), |_| Ok(()));
        max_cols
    }

    /// Selects the rotary frequencies for sequences of at most `max_len` positions.
    pub fn fit(&mut self, max_len: usize) {
        self.ropes.iter_mut().for_each(|rope| rope.fit(max_len));
    }
}

#[derive(Debug, Clone)]
pub struct Embedding<L = Linear> {
    pub tokens: L,
    /// Factor of the token embeddings.
    pub scale: f32,
    /// Projection from the embedding's width to the hidden size, if they differ.
    pub project: Option<L>,
    pub positions: Option<LearnedPositions<L>>,
}

#[derive(Debug, Clone)]
pub struct LearnedPositions<L = Linear> {
    pub table: L,
    /// Row of position 0 in the table.
    pub offset: usize,
}

#[derive(Debug, Clone)]
pub struct Layer<L = Linear, N = Norm, V = Vector> {
    pub residual: Residual<N>,
    /// Factor of the outputs of attention and MLP before they are added to the residual stream.
    pub branch_scale: f32,
    pub attention: Attention<L, N, V>,
    pub mlp: Mlp<L, V>,
}

/// The positions of a layer's norms relative to its two residual additions.
#[derive(Debug, Clone)]
pub enum Residual<N = Norm> {
    /// x += attention(norm(x)); x += mlp(norm(x))
    PreNorm { attention: N, mlp: N },
    /// x = norm(x + attention(x)); x = norm(x + mlp(x))
    PostNorm { attention: N, mlp: N },
    /// x += attention(norm(x)) + mlp(norm(x)), with one norm for both if `mlp` is None
    Parallel { attention: N, mlp: Option<N> },
    /// x += norm(attention(x)); x += norm(mlp(x))
    BranchNorm { attention: N, mlp: N },
    /// x += norm(attention(norm(x))); x += norm(mlp(norm(x)))
    Sandwich { attention: N, after_attention: N, mlp: N, after_mlp: N },
}

#[derive(Debug, Clone)]
pub enum Attention<L = Linear, N = Norm, V = Vector> {
    Heads(HeadAttention<L, N, V>),
    Latent(LatentAttention<L, N>),
}

/// Attention with keys and values per KV head.
#[derive(Debug, Clone)]
pub struct HeadAttention<L = Linear, N = Norm, V = Vector> {
    pub shape: AttentionShape,
    /// Queries, keys and values, stacked into one product.
    pub qkv: L,
    pub out: L,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm<N>>,
    /// Index into `Model::ropes`. None: no rotary embedding.
    pub rope: Option<usize>,
    /// `[heads]` Attention sinks: scores without a value, which take part in the softmax.
    pub sinks: Option<V>,
}

/// Latent attention (MLA). The cache holds one latent per token for all heads, and a rotated key
/// that all heads share. Keys and values of heads are not computed: the key matrices are applied to
/// the queries, and the value matrices to the attention output.
#[derive(Debug, Clone)]
pub struct LatentAttention<L = Linear, N = Norm> {
    /// Shape of attention over latents. The values are the first dimensions of the keys, which are
    /// not rotated.
    pub shape: AttentionShape,
    /// Unrotated dimensions of a head's query.
    pub unrotated: usize,
    pub queries: LatentQueries<L, N>,
    /// Projection from the hidden size to the latent and the rotated key.
    pub latent: L,
    /// Norm of the unrotated part of the latent.
    pub norm: N,
    /// Index into `Model::ropes`.
    pub rope: usize,
    /// `[heads]` Matrix from the unrotated part of a query to latent space.
    pub keys: Vec<L>,
    /// `[heads]` Matrix from the attention output in latent space to values.
    pub values: Vec<L>,
    pub out: L,
}

/// The query projection. Its output has the unrotated parts of all heads, followed by the rotated
/// parts of all heads.
#[derive(Debug, Clone)]
pub enum LatentQueries<L = Linear, N = Norm> {
    Direct(L),
    /// up(norm(down(x)))
    LowRank {
        down: L,
        norm: N,
        up: L,
    },
}

impl<L, N, V> Attention<L, N, V> {
    pub fn shape(&self) -> &AttentionShape {
        match self {
            Attention::Heads(HeadAttention { shape, .. }) | Attention::Latent(LatentAttention { shape, .. }) => shape,
        }
    }

    pub fn out(&self) -> &L {
        match self {
            Attention::Heads(HeadAttention { out, .. }) | Attention::Latent(LatentAttention { out, .. }) => out,
        }
    }

    /// Returns the products that read the input, each at least once.
    pub fn input_readers(&self) -> [&L; 2] {
        match self {
            Attention::Heads(HeadAttention { qkv, .. }) => [qkv, qkv],
            Attention::Latent(LatentAttention { queries: LatentQueries::Direct(first), latent, .. })
            | Attention::Latent(LatentAttention { queries: LatentQueries::LowRank { down: first, .. }, latent, .. }) => [first, latent],
        }
    }

    pub fn shape_mut(&mut self) -> &mut AttentionShape {
        match self {
            Attention::Heads(HeadAttention { shape, .. }) | Attention::Latent(LatentAttention { shape, .. }) => shape,
        }
    }
}

impl From<HeadAttention> for Attention {
    fn from(attention: HeadAttention) -> Attention {
        Attention::Heads(attention)
    }
}

#[derive(Debug, Clone)]
pub struct QkNorm<N = Norm> {
    pub over: QkNormOver,
    pub q: N,
    pub k: N,
}

/// The numbers over which a norm is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormOver {
    EachHead,
    AllHeads,
}

#[derive(Debug, Clone)]
pub enum Mlp<L = Linear, V = Vector> {
    /// down(act(up(x)))
    Plain { up: L, act: Act, down: L },
    /// down(act(gate(x)) * up(x)), with gate and up stacked into one product
    Gated { gate_up: L, act: Act, down: L },
    /// Gated MLPs, of which each row uses those with the best router scores.
    Experts(Experts<L, V>),
}

impl<L, V> Mlp<L, V> {
    /// Returns the products that read the input, each at least once. All experts are alike, so
    /// only the first one is among them.
    pub fn input_readers(&self) -> [&L; 4] {
        match self {
            Mlp::Plain { up, .. } => [up; 4],
            Mlp::Gated { gate_up, .. } => [gate_up; 4],
            Mlp::Experts(Experts { router, experts, shared, .. }) => {
                let of_expert = experts.first().map_or(router, |expert| &expert.gate_up);
                let [of_shared, gate] =
                    shared.as_ref().map_or([router; 2], |shared| [&shared.expert.gate_up, shared.gate.as_ref().unwrap_or(router)]);
                [router, of_expert, of_shared, gate]
            }
        }
    }
}

#[derive(Clone)]
pub struct Experts<L = Linear, V = Vector> {
    /// Projection from the hidden size to one logit per expert of the layer.
    pub router: L,
    /// `[experts of the layer]` Correction of the scores in the choice of experts.
    pub correction: Option<V>,
    pub routing: Routing,
    pub glu: Glu,
    /// The experts of this rank.
    pub experts: Vec<Expert<L>>,
    pub shared: Option<SharedExpert<L>>,
    /// The indices of this rank's experts in the layer. None: all experts.
    pub local: Option<Range<usize>>,
}

debug_without_none!(Experts<L, V> { router, correction, routing, glu, experts, shared; local });

impl<L, V> Experts<L, V> {
    /// Returns the indices of this rank's experts in the layer.
    pub fn local(&self) -> Range<usize> {
        self.local.clone().unwrap_or(0..self.experts.len())
    }
}

#[derive(Debug, Clone)]
pub struct Expert<L = Linear> {
    /// Gate and up, stacked into one product.
    pub gate_up: L,
    pub down: L,
}

/// An expert that every row uses: adds expert(x), or sigmoid(gate(x)) * expert(x).
#[derive(Debug, Clone)]
pub struct SharedExpert<L = Linear> {
    pub expert: Expert<L>,
    pub gate: Option<L>,
}

/// The projection from the last hidden state to logits.
#[derive(Debug, Clone)]
pub struct Head<L = Linear> {
    /// Projection from the hidden size to the embedding's width, if they differ.
    pub project: Option<L>,
    /// None: tied to the token embedding.
    pub weight: Option<L>,
    pub scale: f32,
    pub soft_cap: Option<f32>,
}

impl HeadAttention {
    /// Returns separate q, k and v projections, stacked; most families name them
    /// `{layer}.{q,k,v}_proj`.
    pub fn stacked_qkv(layer: &str, names: [&str; 3], shape: &AttentionShape, hidden: usize) -> Linear {
        let widths = [shape.q_width(), shape.kv_width(), shape.kv_width()];
        Linear::stack(names.iter().zip(widths).map(|(name, width)| TensorPart::own(format!("{layer}.{name}"), width)).collect(), hidden)
    }
}
