//! The parameters of operations: shapes, norms, activations, rotary embeddings and routing.

use crate::types::debug::debug_without_none;

/// Function from the index of a head to its matrix.
pub type MatrixOf<'a, M> = &'a (dyn Fn(usize) -> &'a M + Sync);

/// A weight matrix and the optional bias of its product.
pub type WithBias<'a, M, B> = (&'a M, Option<&'a B>);

/// Function from the index of an expert to its matrix and bias.
pub type ExpertOf<'a, M, B> = &'a dyn Fn(usize) -> WithBias<'a, M, B>;

/// The two matrices of an MLP and the activation between them.
pub struct MlpOf<'a, M, B> {
    pub up: WithBias<'a, M, B>, // [width, hidden], or [2 * width, hidden] if gated
    pub activation: Activation,
    pub width: usize,
    pub down: WithBias<'a, M, B>, // [hidden, width]
}

/// A residual stream, and the output of a branch that is added to it: `x[r] += scale * delta[r]`.
pub struct Branch<'a, Buf> {
    pub scale: f32,
    pub x: &'a mut Buf,
    pub delta: &'a mut Buf,
}

/// The state of the addition of a branch to the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addition {
    /// The stream has the sum. The content of `delta` is unspecified.
    Done,
    /// `delta` has the output of the branch, and the stream is unchanged.
    Pending,
}

#[derive(Clone, Copy)]
pub enum Activation {
    Plain(Act),
    /// Applied to the two halves of the output of `up`.
    Gated(Glu),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Relu,
    Silu,
    /// x * Phi(x), with the exact error function.
    Gelu,
    /// The tanh approximation of `Gelu`.
    GeluTanh,
}

/// Gated activation of an MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Glu {
    /// act(gate) * up
    Of(Act),
    /// gate * sigmoid(alpha * gate) * (up + 1), with `gate` clamped to at most `limit` and `up` to
    /// [-limit, limit].
    Clamped { alpha: f32, limit: f32 },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormKind {
    /// x / rms(x) * w, or x / rms(x) * (1 + w) with `unit_offset`.
    Rms { unit_offset: bool },
    /// (x - mean) / std * w + b.
    Layer,
}

/// A normalization with its parameters.
pub struct NormOf<'a, Buf> {
    pub kind: NormKind,
    pub eps: f32,
    pub weight: &'a Buf,
    pub bias: Option<&'a Buf>,
}

/// Rotary position embedding: rotates the first `rotated` dimensions of each head, in pairs, by the
/// angles of the row.
pub struct RotaryEmbedding<'a, Buf> {
    pub rotated: usize,
    pub pairs: Pairs,
    pub angles: &'a Buf, // [rows, rotated]
}

// `derive(Clone, Copy)` would require the same of `Buf`.
impl<Buf> Clone for NormOf<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for NormOf<'_, Buf> {}
impl<Buf> Clone for RotaryEmbedding<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for RotaryEmbedding<'_, Buf> {}

/// Pairing of the dimensions that a rotary embedding rotates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// i and i + rotated / 2.
    Halves,
    /// 2i and 2i + 1.
    Neighbours,
}

/// Routing of rows to the experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    pub experts: usize,
    /// Experts per row.
    pub top_k: usize,
    pub scores: Scores,
    /// If true, the weights of a row's chosen experts are normalized to a sum of 1, before `scale`
    /// is applied.
    pub normalized: bool,
    pub scale: f32,
    pub groups: Option<ExpertGroups>,
}

/// Function from router logits to scores, which determine the experts and their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit. The correction of the layer is added for the choice of experts, but
    /// not for their weights.
    Sigmoid,
}

/// Groups of equally many experts. A row chooses groups first, and then experts within them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, at most `MAX_COUNT`.
    pub count: usize,
    /// Number of groups that a row chooses.
    pub chosen: usize,
    pub score: GroupScore,
}

/// Score of a group of experts for a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The best score in the group.
    Best,
    /// The sum of the two best scores in the group.
    BestTwo,
}

impl ExpertGroups {
    pub const MAX_COUNT: usize = 64;
}

impl Routing {
    pub fn softmax(experts: usize, top_k: usize, normalized: bool) -> Routing {
        Routing { experts, top_k, scores: Scores::Softmax, normalized, scale: 1.0, groups: None }
    }
}

/// Location of the values of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Stored beside the keys, with the same width.
    Own,
    /// The first n dimensions of the keys.
    OfKeys(usize),
}

/// The shape of one attention layer, over rows of `[heads + 2 * kv_heads, head_dim]`: queries,
/// keys, values. With `Values::OfKeys`, rows hold queries only, and the keys to store come in a
/// separate buffer.
#[derive(Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub values: Values,
    /// Factor of the dot product of query and key.
    pub scale: f32,
    /// Sliding window in positions, including the row's own. None: all preceding positions are
    /// visible.
    pub window: Option<usize>,
    /// Scores become cap * tanh(score / cap).
    pub soft_cap: Option<f32>,
    /// ALiBi: a score decreases by this factor times the slope of the head, per position of
    /// distance to the key.
    pub alibi: Option<f32>,
    /// The place of these query heads in the whole model. None: they are all of its heads.
    pub shard: Option<HeadShard>,
}

debug_without_none!(AttentionShape { heads, kv_heads, head_dim, values, scale, window, soft_cap, alibi; shard });

/// Query heads of one rank, which are consecutive in the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShard {
    /// Index of the first one in the whole model.
    pub first: usize,
    /// Query heads of the whole model.
    pub of: usize,
}

/// A division of query heads into groups that share a KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeadGroups {
    pub kv_heads: u32,
    /// Query heads per KV head.
    pub each: u32,
    /// True if values are the first dimensions of the keys (`Values::OfKeys`).
    pub latents: bool,
}

impl AttentionShape {
    /// Creates a shape with full causal attention and values beside the keys.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> AttentionShape {
        AttentionShape { heads, kv_heads, head_dim, values: Values::Own, scale, window: None, soft_cap: None, alibi: None, shard: None }
    }

    pub fn head_groups(&self) -> HeadGroups {
        let each = (self.heads / self.kv_heads) as u32;
        HeadGroups { kv_heads: self.kv_heads as u32, each, latents: self.values != Values::Own }
    }

    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the ALiBi slope of a head. If the number of heads in the whole model is a power of
    /// two, slopes are powers of 2^(-8 / heads). Otherwise the first slopes are those of the next
    /// lower power of two, and the others are every other slope of the next higher one.
    pub fn slope(&self, head: usize) -> f32 {
        let HeadShard { first, of } = self.shard.unwrap_or(HeadShard { first: 0, of: self.heads });
        let (head, whole) = (first + head, 1 << of.ilog2());
        let exponent = match head.checked_sub(whole) {
            None => 8.0 * (head + 1) as f64 / whole as f64,
            Some(beyond) => 4.0 * (2 * beyond + 1) as f64 / whole as f64,
        };
        (-exponent).exp2() as f32
    }

    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Returns the width of a row of `qkv` as stored in memory.
    pub fn row_width(&self) -> usize {
        if self.values == Values::Own { self.qkv_width() } else { self.q_width() }
    }

    /// Returns the width of a head's values.
    pub fn value_dim(&self) -> usize {
        match self.values {
            Values::Own => self.head_dim,
            Values::OfKeys(dim) => dim,
        }
    }

    /// Returns the width of the attention output of a row.
    pub fn out_width(&self) -> usize {
        self.heads * self.value_dim()
    }
}

/// Strided parts of a row: `count` strips of `dim` numbers. The first begins at `first`, and
/// consecutive strips are `pitch` apart. Rows are `stride` apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Strips {
    pub first: usize,
    pub count: usize,
    pub dim: usize,
    pub pitch: usize,
    pub stride: usize,
}

/// The heads of a row that an op processes: `count` heads of `dim` numbers, beginning at `first`.
/// Rows are `stride` apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    pub first: usize,
    pub count: usize,
    pub dim: usize,
    pub stride: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_interpolated_for_head_counts_between_powers_of_two() {
        let slopes = |heads| -> Vec<f32> {
            let shape = AttentionShape::new(heads, heads, 8, 1.0);
            (0..heads).map(|head| shape.slope(head)).collect()
        };
        assert_eq!(slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        // The slopes of 4 heads, then the first and the third slope of 8 heads.
        assert_eq!(slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    }

    #[test]
    fn slopes_of_a_shard_are_those_of_its_heads_in_the_whole_model() {
        let whole = AttentionShape::new(6, 6, 8, 1.0);
        for first in [0, 2, 4] {
            let shape = AttentionShape { shard: Some(HeadShard { first, of: 6 }), ..AttentionShape::new(2, 2, 8, 1.0) };
            assert_eq!([0, 1].map(|head| shape.slope(head)), [0, 1].map(|head| whole.slope(first + head)));
        }
    }
}
