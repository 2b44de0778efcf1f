//! The transformer ops over paged KV buffers, as the trait `Backend`. The module knows neither
//! sequences nor model names.
#![allow(unsafe_code)]

pub mod cpu;
pub mod cuda;
mod e4m3;

use std::ops::Range;
use std::path::Path;

use crate::batch::device_sampling::{DeviceSample, DeviceSampling, DeviceSamplingLimits};
use crate::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::error::{Error, Result};
use crate::options::{Dtype, KvDtype, WeightFormat};

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

#[derive(Clone, Copy)]
pub enum Activation {
    Plain(Act),
    /// Applied to the two halves of the output of `up`.
    Gated(Glu),
}

/// Source of the rows of a matrix.
pub struct RowSource<'a> {
    /// Reads whole rows, starting at the given row, as little-endian bytes of the matrix's dtype.
    /// Several threads may call it concurrently, in any order. Each row is read once.
    pub read: &'a (dyn Fn(usize, &mut [u8]) -> Result<()> + Sync),
    /// Reports how many more bytes have been read. The loading thread calls it from time to time,
    /// while no thread reads. An error aborts the load.
    pub advance: &'a mut dyn FnMut(usize) -> Result<()>,
}

/// Reads one piece of a packed matrix, by the number of the piece. A piece has `PACKED_PIECE`
/// bytes; the last one may be shorter. Any thread may call it.
pub type PackedSource<'a> = &'a (dyn Fn(usize, &mut [u8]) -> Result<()> + Sync);

/// Bytes per piece of a packed matrix. A piece fits the L2 cache of a core, so its checksum is
/// computed while the piece is cached.
pub const PACKED_PIECE: usize = 256 << 10;

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
#[derive(Debug, Clone, Copy, PartialEq)]
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
}

impl AttentionShape {
    /// Creates a shape with full causal attention and values beside the keys.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> AttentionShape {
        AttentionShape { heads, kv_heads, head_dim, values: Values::Own, scale, window: None, soft_cap: None, alibi: None }
    }

    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the ALiBi slope of a head. If the number of heads is a power of two, slopes are
    /// powers of 2^(-8 / heads). Otherwise the first slopes are those of the next lower power of
    /// two, and the others are every other slope of the next higher one.
    pub fn slope(&self, head: usize) -> f32 {
        let whole = 1 << self.heads.ilog2();
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

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvShape {
    pub blocks: usize,
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub values: Values,
    pub dtype: KvDtype,
}

/// The size of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchSize {
    pub tokens: usize,
    pub sequences: usize,
    pub logits: usize,
    /// Block-table entries, summed over all groups.
    pub table_entries: usize,
    pub groups: usize,
}

/// Number of rows that ops process, and number of those rows whose logits are read. A device may
/// process more rows than the batch has, as padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub rows: usize,
    pub logits: usize,
}

impl Extent {
    pub fn for_batch(batch: &Batch) -> Extent {
        Extent { rows: batch.token_count(), logits: batch.logit_rows.len() }
    }
}

/// The largest batch of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct InputLimits {
    pub max: BatchSize,
    /// Query heads per KV head, for each kind of layer.
    pub heads_per_kv: Vec<u32>,
}

/// The operations of a device. Shapes are given as `[rows, columns]`. A `Buf` holds f32 and is at
/// least as long as its shape requires.
///
/// Each row's result depends on that row only, in one fixed order of operations. It does not depend
/// on the rest of the batch.
pub trait Backend: Send + Sync {
    type Buf: Send + Sync;
    type Matrix: Send + Sync;
    type Kv: Send;
    type Inputs: Send + Default;
    /// The host tier: KV blocks, with all layers, that are swapped out of device memory.
    type Host: Send;
    /// The assignment of rows to experts.
    type Routes: Send;
    /// State of on-device sampling.
    type Sampler: Send;

    fn buffer(&self, len: usize) -> Result<Self::Buf>;
    fn vector(&self, values: &[f32]) -> Result<Self::Buf>;
    /// Creates a matrix of `[rows, cols]` from numbers in `dtype`, and stores it in `format`,
    /// packed in the backend's own layout. If the format cannot represent a number, the call
    /// returns an error. The group size of a format divides `cols`.
    fn matrix(&self, rows: usize, cols: usize, dtype: Dtype, format: WeightFormat, source: RowSource) -> Result<Self::Matrix>;
    /// Returns the packed bytes of a matrix. Their number is `matrix_bytes`.
    fn packed_bytes<'a>(&'a self, matrix: &'a Self::Matrix) -> Result<&'a [u8]>;
    /// Creates a matrix from its packed bytes.
    fn matrix_of_packed(&self, rows: usize, cols: usize, format: WeightFormat, source: PackedSource) -> Result<Self::Matrix>;
    /// Returns the name of the packed layout. Packed bytes are valid for every backend with the
    /// same name.
    fn matrix_layout(&self) -> &'static str;
    fn kv(&self, shape: KvShape) -> Result<Self::Kv>;

    /// Returns the exact number of bytes that `matrix` allocates, so that memory can be planned
    /// before it is allocated. `kv_block_bytes` does the same for one block of `kv`.
    fn matrix_bytes(&self, rows: usize, cols: usize, format: WeightFormat) -> u64;
    fn kv_block_bytes(&self, shape: &KvShape) -> u64;

    /// Returns true if the device has failed and every further operation fails too.
    fn is_lost(&self) -> bool;

    /// Returns the unallocated bytes of device memory. None: the backend uses host memory.
    fn free_bytes(&self) -> Result<Option<u64>>;

    /// Allocates working memory for attention of this shape, so that no step allocates.
    fn reserve(&self, shape: &AttentionShape) -> Result<()>;
    /// Returns the bytes that `reserve` allocates per thread.
    fn reserved_bytes(&self, shape: &AttentionShape) -> u64;

    /// Allocates working memory for products of up to `rows` rows with up to `cols` columns.
    fn reserve_rows(&self, rows: usize, cols: usize) -> Result<()>;
    fn reserved_rows_bytes(&self, rows: usize, cols: usize) -> u64;

    /// Allocates routes for up to `rows` rows. `max` bounds the number of experts and `top_k`. No
    /// step allocates more.
    fn routes(&self, rows: usize, max: Routing) -> Result<Self::Routes>;
    fn routes_bytes(&self, rows: usize, max: Routing) -> u64;

    /// Allocates input buffers for batches up to the limits, so that no step allocates.
    fn reserve_inputs(&self, _limits: &InputLimits, _inputs: &mut Self::Inputs) -> Result<()> {
        Ok(())
    }
    fn reserved_inputs_bytes(&self, _limits: &InputLimits) -> u64 {
        0
    }

    /// Allocates the state of on-device sampling; no step allocates more. None: the backend does
    /// not sample, and the caller samples from the logits.
    fn sampler(&self, _limits: DeviceSamplingLimits) -> Result<Option<Self::Sampler>> {
        Ok(None)
    }
    fn drawing_bytes(&self, _limits: DeviceSamplingLimits) -> u64 {
        0
    }

    /// Uploads a batch. Returns the extent that the following ops have to use.
    fn upload(&self, batch: &Batch, inputs: &mut Self::Inputs) -> Result<Extent>;
    /// Marks the end of a batch's ops. A device that has deferred their execution starts it.
    fn begin(&self) {}
    /// Uploads a batch for the next decode size that the device captures in advance, so that later
    /// steps of that size replay the captured ops. `_max` bounds the sizes. `_batch` is a decode
    /// batch of one row; its results are discarded. None: all sizes are captured.
    fn keep(&self, _max: &BatchSize, _batch: &Batch, _inputs: &mut Self::Inputs) -> Result<Option<Extent>> {
        Ok(None)
    }
    /// Returns true if the backend uses the `next_slots` of a decode step with this many rows.
    fn works_ahead(&self, _rows: usize) -> bool {
        false
    }
    /// Returns true if the lookahead step, predicted from the last step, is in flight.
    fn is_ahead(&self) -> bool {
        false
    }
    /// Cancels the lookahead step: waits for the step in flight and discards it. Required if the
    /// predicted step does not follow, or if blocks are about to change.
    fn forget_foreseen(&self) {}
    /// Waits for the ops that compute the buffer. Returns its first `len` numbers.
    fn read<'a>(&'a self, buf: &'a mut Self::Buf, len: usize) -> Result<&'a [f32]>;
    /// Like `read`, for the logits of a step: `rows` rows of `width` numbers. Only the rows in
    /// `_runs` are valid; the contents of the others are unspecified.
    fn read_rows<'a>(
        &'a self,
        buf: &'a mut Self::Buf,
        width: usize,
        rows: usize,
        _runs: impl Iterator<Item = Range<usize>>,
    ) -> Result<&'a [f32]> {
        self.read(buf, rows * width)
    }
    /// Samples a token from each row of `vocab` logits that `draws` names. Modifies these rows.
    fn draw<'a>(
        &'a self,
        _drawing: &'a mut Self::Sampler,
        _vocab: usize,
        _logits: &mut Self::Buf,
        _draws: &DeviceSampling,
    ) -> Result<&'a [DeviceSample]> {
        Err(Error::internal("this backend does not support device sampling"))
    }

    /// Allocates a host tier of `blocks` blocks with `block_bytes` each, all layers included. The
    /// memory is anonymous, or, if `dir` is set, an unnamed file in `dir`.
    fn host(&self, blocks: usize, block_bytes: u64, dir: Option<&Path>) -> Result<Self::Host>;
    /// Copies whole blocks, with all layers, to the host tier. Each host block occurs at most once.
    /// After an error, the contents of the destination blocks are undefined.
    fn swap_out(&self, moves: &[BlockMove], layers: &[Self::Kv], host: &mut Self::Host) -> Result<()>;
    /// Copies whole blocks from the host tier to the device. Each device block occurs at most once.
    fn swap_in(&self, moves: &[BlockMove], host: &mut Self::Host, layers: &mut [Self::Kv]) -> Result<()>;

    /// Copies whole blocks in every layer. No block is both a source and a destination.
    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Self::Kv]);
    /// Returns the memory of all blocks from index `from` on to the system. Their contents are
    /// lost, even if the call fails.
    fn discard_blocks(&self, from: usize, layer: &mut Self::Kv) -> Result<()>;
    /// Appends the stored bytes of these blocks to `out`. For the tail block, only the filled slots
    /// are copied and the others are zero, because unused slots may hold data of other requests.
    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Self::Kv, out: &mut Vec<u8>) -> Result<()>;
    /// Writes these blocks from the beginning of `bytes`, the output of `read_blocks`. Returns the
    /// remaining bytes.
    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Self::Kv, bytes: &'a [u8]) -> Result<&'a [u8]>;
    /// Returns a description of the layer's KV layout. Bytes of `read_blocks` are valid for every
    /// layer with the same description.
    fn kv_layout(&self, layer: &Self::Kv) -> String;

    /// `out[r] = table[tokens[r]] * scale`
    fn embed(&self, inputs: &Self::Inputs, table: &Self::Matrix, scale: f32, out: &mut Self::Buf);
    /// `x[r] += table[positions[r] + offset]`
    fn add_positions(&self, inputs: &Self::Inputs, table: &Self::Matrix, offset: usize, x: &mut Self::Buf);
    /// `out[r] = w * x[r] + bias`
    fn matmul(&self, rows: usize, x: &Self::Buf, w: &Self::Matrix, bias: Option<&Self::Buf>, out: &mut Self::Buf);
    /// `out[r] = down * activation(up * x[r])`. `wide` and `narrow` hold intermediate results of
    /// `mlp_rows` rows. `narrow` is used only by gated activations.
    fn mlp(
        &self,
        rows: usize,
        x: &Self::Buf,
        mlp: MlpOf<Self::Matrix, Self::Buf>,
        wide: &mut Self::Buf,
        narrow: &mut Self::Buf,
        out: &mut Self::Buf,
    ) {
        let MlpOf { up, activation, width, down } = mlp;
        self.matmul(rows, x, up.0, up.1, wide);
        match activation {
            Activation::Plain(act) => {
                self.activate(rows * width, act, wide);
                self.matmul(rows, wide, down.0, down.1, out);
            }
            Activation::Gated(glu) => {
                self.gate(rows, width, glu, wide, narrow);
                self.matmul(rows, narrow, down.0, down.1, out);
            }
        }
    }
    /// Returns how many of `rows` rows an MLP processes at once; the result does not decrease as
    /// `rows` grows. A backend that returns fewer than `rows` overrides `mlp`.
    fn mlp_rows(&self, rows: usize) -> usize {
        rows
    }
    /// x += scale * y, over `len` numbers.
    fn add(&self, len: usize, scale: f32, x: &mut Self::Buf, y: &Self::Buf);
    /// `out[r] = norm(x[r])`, rows of `width`.
    fn norm(&self, rows: usize, width: usize, norm: NormOf<Self::Buf>, x: &Self::Buf, out: &mut Self::Buf);
    /// `x[r] += scale * y[r]`, `out[r] = norm(x[r])`
    #[allow(clippy::too_many_arguments)]
    fn add_norm(
        &self,
        rows: usize,
        width: usize,
        scale: f32,
        y: &Self::Buf,
        norm: NormOf<Self::Buf>,
        x: &mut Self::Buf,
        out: &mut Self::Buf,
    );
    /// x = norm(x) for each head. Weight and bias have the size of one head and apply to all heads,
    /// or the size of all heads together.
    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Self::Buf>, x: &mut Self::Buf);
    /// `out[r] = [cos..., sin...]` of `position[r] * frequency`, times `amplitude`, for all
    /// `frequencies`.
    fn angles(&self, inputs: &Self::Inputs, frequencies: &Self::Buf, amplitude: f32, out: &mut Self::Buf);
    fn rope(&self, rows: usize, heads: Heads, turn: RotaryEmbedding<Self::Buf>, x: &mut Self::Buf);
    /// Rotates the queries and keys of each row of `qkv`, and writes its K and V to the row's slot
    /// in the tables of `group`. With `Values::OfKeys`, `qkv` holds the keys only, and the caller
    /// rotates them.
    fn store_kv(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<RotaryEmbedding<Self::Buf>>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
    );
    /// `out[r]` = attention of the row's queries over the stored K and V, up to the row's own
    /// position. `sinks`: one additional score per head, without a value.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        shape: &AttentionShape,
        sinks: Option<&Self::Buf>,
        qkv: &Self::Buf,
        kv: &Self::Kv,
        out: &mut Self::Buf,
    );
    /// `out[h][r] = x[r][strip h]`
    fn split_strips(&self, rows: usize, strips: Strips, x: &Self::Buf, out: &mut Self::Buf);
    /// `out[r][strip h] = x[h][r]`
    fn join_strips(&self, rows: usize, strips: Strips, x: &Self::Buf, out: &mut Self::Buf);
    /// `out[h][r] = matrix(h) * x[h][r]`, for h in 0..count.
    fn matmul_strips(&self, rows: usize, count: usize, x: &Self::Buf, matrix: MatrixOf<Self::Matrix>, out: &mut Self::Buf);
    /// x = act(x), over `len` numbers.
    fn activate(&self, len: usize, act: Act, x: &mut Self::Buf);
    /// `out[r] = glu(x[r][..width], x[r][width..])`
    fn gate(&self, rows: usize, width: usize, glu: Glu, x: &Self::Buf, out: &mut Self::Buf);
    /// Chooses the experts with the best scores for each row, and computes their weights. `logits`
    /// is `[rows, experts]`, `correction` is `[experts]`.
    fn route(&self, rows: usize, routing: Routing, correction: Option<&Self::Buf>, logits: &Self::Buf, routes: &mut Self::Routes);
    /// `out[i] = x[row of route i]`, rows of `width`. Routes to the same expert are adjacent.
    fn gather_routes(&self, routes: &Self::Routes, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// `out[i] = w * x[i] + bias`, with w and bias of route i's expert: one product per expert that
    /// has rows.
    fn matmul_routes(&self, routes: &Self::Routes, x: &Self::Buf, expert: ExpertOf<Self::Matrix, Self::Buf>, out: &mut Self::Buf);
    /// `out[r]` = sum of `x[i] * weight` over the routes of row r, in order of descending score;
    /// rows of `width`.
    fn combine_routes(&self, routes: &Self::Routes, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// `x[r] += sigmoid(gates[r]) * y[r]`, rows of `width`.
    fn add_gated(&self, rows: usize, width: usize, gates: &Self::Buf, x: &mut Self::Buf, y: &Self::Buf);
    /// `out[i] = x[logit_rows[i]]`, rows of `width`.
    fn gather(&self, inputs: &Self::Inputs, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// x *= scale, then x = cap * tanh(x / cap) if there is a cap; over `len` numbers.
    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Self::Buf);
}

/// Returns the error for a row with a number that the format cannot represent.
fn no_such_number(row: usize, format: WeightFormat) -> Error {
    Error::model(format!("row {row} has a number that is NaN, infinite or too large for weight_format {}", format.name()))
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
}
