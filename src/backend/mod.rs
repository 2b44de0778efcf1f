//! The ops of a transformer over paged buffers, as a trait. Knows no sequences and no model names.
#![allow(unsafe_code)]

pub mod cpu;
pub mod cuda;
mod e4m3;

use std::ops::Range;
use std::path::Path;

use crate::batch::draws::{DrawLimits, Drawn, Draws};
use crate::batch::{Batch, BlockCopy, BlockMove, Tail};
use crate::error::{Error, Result};
use crate::options::{Dtype, KvDtype, WeightFormat};

/// The matrix of a head.
pub type MatrixOf<'a, M> = &'a (dyn Fn(usize) -> &'a M + Sync);

/// A matrix, and what is added to what it is multiplied by.
pub type WithBias<'a, M, B> = (&'a M, Option<&'a B>);

/// The matrix of an expert, and its bias.
pub type ExpertOf<'a, M, B> = &'a dyn Fn(usize) -> WithBias<'a, M, B>;

/// An MLP's two matrices, and what happens between them.
pub struct MlpOf<'a, M, B> {
    pub up: WithBias<'a, M, B>, // [width, hidden], or twice as many rows where it is gated
    pub activation: Activation,
    pub width: usize,
    pub down: WithBias<'a, M, B>, // [hidden, width]
}

#[derive(Clone, Copy)]
pub enum Activation {
    Plain(Act),
    /// Of the two halves of what comes up.
    Gated(Glu),
}

/// Where the rows of a matrix come from.
pub struct RowSource<'a> {
    /// Serves whole rows, from this one on, as bytes of the matrix's dtype, little endian. Several threads may ask at once, in any order, for each
    /// row once.
    pub read: &'a (dyn Fn(usize, &mut [u8]) -> Result<()> + Sync),
    /// Told now and then how many bytes more have been read, by the thread that loads, while nobody reads. An error ends the loading.
    pub advance: &'a mut dyn FnMut(usize) -> Result<()>,
}

/// Serves the packed bytes of a matrix: its piece of this number, of `PACKED_PIECE` bytes or, at its end, fewer. Any thread may ask.
pub type PackedSource<'a> = &'a (dyn Fn(usize, &mut [u8]) -> Result<()> + Sync);

/// What a core's own cache holds: so what has been read is checked there.
pub const PACKED_PIECE: usize = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Relu,
    Silu,
    /// x * Phi(x), by the error function.
    Gelu,
    /// Gelu by its tanh approximation.
    GeluTanh,
}

/// How a gate and what it lets through become one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Glu {
    /// act(gate) * up
    Of(Act),
    /// gate * sigmoid(alpha * gate) * (up + 1), where the gate is at most `limit`, and what goes through it not further than that from 0.
    Clamped { alpha: f32, limit: f32 },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormKind {
    /// x / rms(x) * w, or * (1 + w) with `unit_offset`.
    Rms { unit_offset: bool },
    /// (x - mean) / std * w + b.
    Layer,
}

/// A norm with its weights.
pub struct NormOf<'a, Buf> {
    pub kind: NormKind,
    pub eps: f32,
    pub weight: &'a Buf,
    pub bias: Option<&'a Buf>,
}

/// How heads are turned: their first `rotated` dimensions, pair by pair, by the angles of their row.
pub struct Turn<'a, Buf> {
    pub rotated: usize,
    pub pairs: Pairs,
    pub angles: &'a Buf, // [rows, rotated]
}

// A derived copy would ask the same of `Buf`.
impl<Buf> Clone for NormOf<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for NormOf<'_, Buf> {}
impl<Buf> Clone for Turn<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for Turn<'_, Buf> {}

/// Which two dimensions of a head a rotary position turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// i and i + half of the rotated ones.
    Halves,
    /// 2i and 2i + 1.
    Neighbours,
}

/// How rows choose among the experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    pub experts: usize,
    /// Each row goes to so many.
    pub top_k: usize,
    pub scores: Scores,
    /// The weights of those that a row goes to add up to 1, before they are scaled.
    pub normalized: bool,
    pub scale: f32,
    pub groups: Option<ExpertGroups>,
}

/// What logits become, from which the weights are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// All together add up to 1.
    Softmax,
    /// Each by itself; those that choose are corrected by the layer's numbers, those that weigh are not.
    Sigmoid,
}

/// Experts in groups of equally many, which a row chooses first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// At most `MOST`.
    pub count: usize,
    /// A row goes to experts of so many.
    pub chosen: usize,
    pub score: GroupScore,
}

/// How good a group of experts is for a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// As its best one.
    Best,
    /// As its two best together.
    BestTwo,
}

impl ExpertGroups {
    pub const MOST: usize = 64;
}

impl Routing {
    pub fn softmax(experts: usize, top_k: usize, normalized: bool) -> Routing {
        Routing { experts, top_k, scores: Scores::Softmax, normalized, scale: 1.0, groups: None }
    }
}

/// Where the values of a head are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Beside its keys, and as wide.
    Own,
    /// They are the first so many dimensions of its keys.
    OfKeys(usize),
}

/// The shape of one attention layer, over rows of `[heads + 2 * kv_heads, head_dim]`: queries, keys, values. Where the values are the
/// keys', rows hold queries alone, and what is stored comes in rows of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub values: Values,
    /// What the dot product of query and key is multiplied by.
    pub scale: f32,
    /// A row sees this many positions, its own included. None: all before it.
    pub window: Option<usize>,
    /// Scores become cap * tanh(score / cap).
    pub soft_cap: Option<f32>,
    /// A score falls with the distance of its key: by this, times the head's slope, for each position.
    pub alibi: Option<f32>,
}

impl AttentionShape {
    /// One that sees all before it, and has values beside its keys.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> AttentionShape {
        AttentionShape { heads, kv_heads, head_dim, values: Values::Own, scale, window: None, soft_cap: None, alibi: None }
    }

    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// How steeply a head's scores fall: as powers of 2^(-8 / heads) where the heads number a power of two; otherwise those of the next
    /// lower power, and then every other one of the next higher.
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

    /// Of a row of queries, with what is beside them.
    pub fn row_width(&self) -> usize {
        if self.values == Values::Own { self.qkv_width() } else { self.q_width() }
    }

    /// Of a head's values.
    pub fn value_dim(&self) -> usize {
        match self.values {
            Values::Own => self.head_dim,
            Values::OfKeys(dim) => dim,
        }
    }

    /// Of what attention gives for a row.
    pub fn out_width(&self) -> usize {
        self.heads * self.value_dim()
    }
}

/// Parts of a row: `count` strips of `dim` numbers, the first at `first`, each `pitch` after the one before it; rows are `stride` apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Strips {
    pub first: usize,
    pub count: usize,
    pub dim: usize,
    pub pitch: usize,
    pub stride: usize,
}

/// The heads of a row that an op works on: `count` heads of `dim` from `first`, in rows `stride` apart.
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

/// How large a batch is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchSize {
    pub rows: usize,
    pub sequences: usize,
    pub logits: usize,
    /// Places in block tables, those of all groups together.
    pub places: usize,
    pub groups: usize,
}

/// Rows that ops are to be made of, and those of them whose logits come back. A device may compute more than a batch has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub rows: usize,
    pub logits: usize,
}

impl Extent {
    pub fn of(batch: &Batch) -> Extent {
        Extent { rows: batch.rows(), logits: batch.logit_rows.len() }
    }
}

/// The largest batch that a step can have.
#[derive(Debug, Clone, PartialEq)]
pub struct InputLimits {
    pub most: BatchSize,
    /// How many heads share a KV head, of each kind of layer.
    pub heads_per_kv: Vec<u32>,
}

/// Shapes are given as `[rows, columns]`; a `Buf` holds f32 and is at least as long as its shape says.
/// Each row's result depends on that row alone, in one fixed order of operations: the batch cannot change it.
pub trait Backend: Send + Sync {
    type Buf: Send + Sync;
    type Matrix: Send + Sync;
    type Kv: Send;
    type Inputs: Send + Default;
    /// The host tier: blocks of all layers that do not fit the device.
    type Host: Send;
    /// Which rows go to which experts.
    type Routes: Send;
    /// Where tokens are drawn from logits.
    type Drawing: Send;

    fn buffer(&self, len: usize) -> Result<Self::Buf>;
    fn vector(&self, values: &[f32]) -> Result<Self::Buf>;
    /// A matrix of `[rows, cols]`, which comes in `dtype` and is stored in `format`, packed as this backend likes it. A number that the format
    /// does not have is an error; a group of a format divides `cols`.
    fn matrix(&self, rows: usize, cols: usize, dtype: Dtype, format: WeightFormat, source: RowSource) -> Result<Self::Matrix>;
    /// The bytes of one, as they are packed: as many as `matrix_bytes` says.
    fn packed_bytes<'a>(&'a self, matrix: &'a Self::Matrix) -> Result<&'a [u8]>;
    /// The same matrix again.
    fn matrix_of_packed(&self, rows: usize, cols: usize, format: WeightFormat, source: PackedSource) -> Result<Self::Matrix>;
    /// How matrices are packed: bytes of one are right for a backend that says the same.
    fn matrix_layout(&self) -> &'static str;
    fn kv(&self, shape: KvShape) -> Result<Self::Kv>;

    /// Bytes that `matrix` and `kv` will take; exact, so that a plan can be made before anything is allocated.
    fn matrix_bytes(&self, rows: usize, cols: usize, format: WeightFormat) -> u64;
    fn kv_block_bytes(&self, shape: &KvShape) -> u64;

    /// Whether nothing can be computed any more, whatever is asked for.
    fn is_lost(&self) -> bool;

    /// Bytes of a memory of its own that nobody has taken. None: its memory is the host's.
    fn free_bytes(&self) -> Result<Option<u64>>;

    /// Makes room for attention of this shape, so that no step has to.
    fn reserve(&self, shape: &AttentionShape) -> Result<()>;
    /// What that takes for each thread.
    fn reserved_bytes(&self, shape: &AttentionShape) -> u64;

    /// Makes room for products of so many rows of at most so many columns.
    fn reserve_rows(&self, rows: usize, cols: usize) -> Result<()>;
    fn reserved_rows_bytes(&self, rows: usize, cols: usize) -> u64;

    /// Room for the routes of so many rows, at most so many experts, and each row's at most `top_k`; no step makes more.
    fn routes(&self, rows: usize, most: Routing) -> Result<Self::Routes>;
    fn routes_bytes(&self, rows: usize, most: Routing) -> u64;

    /// Makes room for batches, so that no step has to.
    fn reserve_inputs(&self, _limits: &InputLimits, _inputs: &mut Self::Inputs) -> Result<()> {
        Ok(())
    }
    fn reserved_inputs_bytes(&self, _limits: &InputLimits) -> u64 {
        0
    }

    /// Room for draws; no step makes more. None: whoever reads the logits draws.
    fn drawing(&self, _limits: DrawLimits) -> Result<Option<Self::Drawing>> {
        Ok(None)
    }
    fn drawing_bytes(&self, _limits: DrawLimits) -> u64 {
        0
    }

    /// Takes a batch, and says of how many rows the ops are to be that follow.
    fn upload(&self, batch: &Batch, inputs: &mut Self::Inputs) -> Result<Extent>;
    /// All ops of the batch have been given: a device that waited for the last may begin.
    fn begin(&self) {}
    /// As `upload`, of the next of the decode steps that the device wants to have seen, so that it need not be told each op again: of some number of
    /// rows, within this room. What it computes is nobody's; the batch is one of a row. None: it has seen them all.
    fn keep(&self, _most: &BatchSize, _batch: &Batch, _inputs: &mut Self::Inputs) -> Result<Option<Extent>> {
        Ok(None)
    }
    /// Whether the `next_slots` of a decode step of so many rows are of any use.
    fn works_ahead(&self, _rows: usize) -> bool {
        false
    }
    /// Whether the step that was foreseen of the last one is under way.
    fn is_ahead(&self) -> bool {
        false
    }
    /// It will not come, or blocks will not hold what they held: waits for what is under way, and forgets it.
    fn forget_foreseen(&self) {}
    /// The first numbers of a buffer, once they are computed.
    fn read<'a>(&'a self, buf: &'a mut Self::Buf, len: usize) -> Result<&'a [f32]>;
    /// As `read`, of the step's rows of logits, which are of `width`, those in these runs alone. What the others hold is anything.
    fn read_rows<'a>(
        &'a self,
        buf: &'a mut Self::Buf,
        width: usize,
        rows: usize,
        _runs: impl Iterator<Item = Range<usize>>,
    ) -> Result<&'a [f32]> {
        self.read(buf, rows * width)
    }
    /// Draws a token from each of the rows of `vocab` logits that `draws` names, and edits these rows on the way.
    fn draw<'a>(&'a self, _drawing: &'a mut Self::Drawing, _vocab: usize, _logits: &mut Self::Buf, _draws: &Draws) -> Result<&'a [Drawn]> {
        Err(Error::internal("tokens were to be drawn by a backend that draws none"))
    }

    /// Room for blocks of `block_bytes`, all their layers together: in memory, or in a file in `dir` that has no name.
    fn host(&self, blocks: usize, block_bytes: u64, dir: Option<&Path>) -> Result<Self::Host>;
    /// Copies whole blocks, all layers of each, to the host tier. No host block is there twice. After an error nothing is known of
    /// those that were to be written.
    fn swap_out(&self, moves: &[BlockMove], layers: &[Self::Kv], host: &mut Self::Host) -> Result<()>;
    /// Copies them back. No device block is there twice.
    fn swap_in(&self, moves: &[BlockMove], host: &mut Self::Host, layers: &mut [Self::Kv]) -> Result<()>;

    /// Copies whole blocks in every layer. No block is both read and written.
    fn copy_blocks(&self, copies: &[BlockCopy], layers: &mut [Self::Kv]);
    /// Gives the memory of all blocks from this one on back. What they held is lost, also where that fails.
    fn discard_blocks(&self, from: usize, layer: &mut Self::Kv) -> Result<()>;
    /// Appends the bytes of these blocks, as they are stored, to `out`. Of those of the tail only the slots that hold something, and zeros for
    /// the others: what is in them may be somebody else's.
    fn read_blocks(&self, blocks: &[u32], tail: Tail, layer: &Self::Kv, out: &mut Vec<u8>) -> Result<()>;
    /// Takes them back, from the beginning of `bytes`, and returns the rest.
    fn write_blocks<'a>(&self, blocks: &[u32], layer: &mut Self::Kv, bytes: &'a [u8]) -> Result<&'a [u8]>;
    /// How K and V of a layer are stored: bytes read from one are right in another that says the same.
    fn kv_layout(&self, layer: &Self::Kv) -> String;

    /// out[r] = table[tokens[r]] * scale
    fn embed(&self, inputs: &Self::Inputs, table: &Self::Matrix, scale: f32, out: &mut Self::Buf);
    /// x[r] += table[positions[r] + offset]
    fn add_positions(&self, inputs: &Self::Inputs, table: &Self::Matrix, offset: usize, x: &mut Self::Buf);
    /// out[r] = w * x[r] + bias
    fn matmul(&self, rows: usize, x: &Self::Buf, w: &Self::Matrix, bias: Option<&Self::Buf>, out: &mut Self::Buf);
    /// out[r] = down * activation(up * x[r]). `wide` and `narrow` are for what lies between, of as many rows as `mlp_rows` says; where nothing is gated,
    /// `narrow` is not touched.
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
    /// How many of so many rows are in the middle of an MLP at once: never fewer of more. Whoever says fewer than all has an `mlp` of its own.
    fn mlp_rows(&self, rows: usize) -> usize {
        rows
    }
    /// x += scale * y, over `len` numbers
    fn add(&self, len: usize, scale: f32, x: &mut Self::Buf, y: &Self::Buf);
    /// out[r] = norm(x[r]), rows of `width`
    fn norm(&self, rows: usize, width: usize, norm: NormOf<Self::Buf>, x: &Self::Buf, out: &mut Self::Buf);
    /// x[r] += scale * y[r], out[r] = norm(x[r])
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
    /// x = norm(x) of each head. Weights and bias are one head's, for all, or all heads', one after the other.
    fn norm_heads(&self, rows: usize, heads: Heads, norm: NormOf<Self::Buf>, x: &mut Self::Buf);
    /// out[r] = [cos..., sin...] of position[r] * frequency, times `amplitude`, for all that `frequencies` holds
    fn angles(&self, inputs: &Self::Inputs, frequencies: &Self::Buf, amplitude: f32, out: &mut Self::Buf);
    fn rope(&self, rows: usize, heads: Heads, turn: Turn<Self::Buf>, x: &mut Self::Buf);
    /// Turns the queries and keys of each row of `qkv`, and writes its K and V to its slot of the group of layers. Where the values are the keys',
    /// its rows are these, and turn elsewhere.
    fn store_kv(
        &self,
        inputs: &Self::Inputs,
        group: usize,
        shape: &AttentionShape,
        turn: Option<Turn<Self::Buf>>,
        qkv: &mut Self::Buf,
        kv: &mut Self::Kv,
    );
    /// out[r] = attention of the row's queries over K and V as they are stored, up to the row's own position. `sinks`: a score more for
    /// each head, behind which there is nothing.
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
    /// out[h][r] = x[r][strip h]
    fn split_strips(&self, rows: usize, strips: Strips, x: &Self::Buf, out: &mut Self::Buf);
    /// out[r][strip h] = x[h][r]
    fn join_strips(&self, rows: usize, strips: Strips, x: &Self::Buf, out: &mut Self::Buf);
    /// out[h][r] = w * x[h][r] with the matrix that `matrix` gives for h, of `count`
    fn matmul_strips(&self, rows: usize, count: usize, x: &Self::Buf, matrix: MatrixOf<Self::Matrix>, out: &mut Self::Buf);
    /// x = act(x), over `len` numbers
    fn activate(&self, len: usize, act: Act, x: &mut Self::Buf);
    /// out[r] = glu(x[r][..width], x[r][width..])
    fn gate(&self, rows: usize, width: usize, glu: Glu, x: &Self::Buf, out: &mut Self::Buf);
    /// Chooses each row's experts, those of its best scores, and their weights. `logits` is `[rows, experts]`, `correction` `[experts]`.
    fn route(&self, rows: usize, routing: Routing, correction: Option<&Self::Buf>, logits: &Self::Buf, routes: &mut Self::Routes);
    /// out[i] = x[row of route i], rows of `width`. Routes to the same expert are neighbours.
    fn gather_routes(&self, routes: &Self::Routes, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// out[i] = w * x[i] + bias with what `expert` gives for the expert of route i: one product per expert that has rows.
    fn matmul_routes(&self, routes: &Self::Routes, x: &Self::Buf, expert: ExpertOf<Self::Matrix, Self::Buf>, out: &mut Self::Buf);
    /// out[r] = the sum of x[i] * weight over the routes of row r, the best first; rows of `width`
    fn combine_routes(&self, routes: &Self::Routes, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// x[r] += sigmoid(gates[r]) * y[r], rows of `width`
    fn add_gated(&self, rows: usize, width: usize, gates: &Self::Buf, x: &mut Self::Buf, y: &Self::Buf);
    /// out[i] = x[logit_rows[i]], rows of `width`
    fn gather(&self, inputs: &Self::Inputs, width: usize, x: &Self::Buf, out: &mut Self::Buf);
    /// x = cap * tanh(x / cap) where there is a cap, after x *= scale; over `len` numbers
    fn scale_and_cap(&self, len: usize, scale: f32, soft_cap: Option<f32>, x: &mut Self::Buf);
}

/// Of a matrix: a format does not have what this row holds.
fn no_such_number(row: usize, format: WeightFormat) -> Error {
    Error::model(format!("row {row} holds a number that is infinite, not a number or too large for weight_format {}", format.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_powers_of_two_around_the_heads() {
        let slopes = |heads| -> Vec<f32> {
            let shape = AttentionShape::new(heads, heads, 8, 1.0);
            (0..heads).map(|head| shape.slope(head)).collect()
        };
        assert_eq!(slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        // Those of 4, then the first and the third of 8.
        assert_eq!(slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    }
}
