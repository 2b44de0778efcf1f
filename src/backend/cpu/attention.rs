//! Paged attention, one kernel for prefill and decode.
//!
//! K lies as `[block][kv_head][dim][token]`: a vector holds one dimension of several tokens, and a score
//! is summed over dimensions in order. V lies as `[block][kv_head][token][dim]`: a vector holds several
//! dimensions of one token, and the output is summed over tokens in order. Softmax runs online over spans of
//! 128 positions counted from the sequence's start. So each query's result is one fixed sequence of
//! operations, whatever the chunk, the tile, the block size or the number of threads.

use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

use half::bf16;

use super::lanes::{self, Element, Kernel, Lanes, load_some, store_some};
use super::pool::Pool;
use super::{Buf, Inputs, SendPtr, elementwise};
use crate::backend::{AttentionShape, KvShape};
use crate::batch::Batch;
use crate::error::{Result, try_vec};
use crate::options::{Dtype, Isa};
use crate::sys::Pages;

/// Positions per step of the online softmax.
const SPAN: usize = 128;
/// Rows of one sequence that share one pass over K and V, with all query heads of a KV head.
const TILE_ROWS: usize = 8;
/// One layer's K and V.
pub struct Kv {
    shape: KvShape,
    k: Pages,
    v: Pages,
}

impl Kv {
    pub fn new(shape: KvShape) -> Result<Kv> {
        let bytes = Self::block_bytes(&shape) as usize / 2 * shape.blocks;
        Ok(Kv { shape, k: Pages::zeroed(bytes)?, v: Pages::zeroed(bytes)? })
    }

    pub fn block_bytes(shape: &KvShape) -> u64 {
        2 * (shape.block_size * shape.kv_heads * shape.head_dim * shape.dtype.bytes()) as u64
    }
}

/// Some rows of one sequence: the unit of work, once per KV head.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    first_row: usize,
    rows: usize,
    /// The sequence's block table begins here.
    table: usize,
}

/// Cuts the batch's rows into tiles of one sequence each.
pub fn cut_tiles(batch: &Batch, tiles: &mut Vec<Tile>) -> Result<()> {
    tiles.clear();
    tiles.try_reserve(batch.rows())?;
    for span in &batch.spans {
        let (first, end) = (span.first_row as usize, (span.first_row + span.rows) as usize);
        for first_row in (first..end).step_by(TILE_ROWS) {
            tiles.push(Tile { first_row, rows: TILE_ROWS.min(end - first_row), table: span.table as usize });
        }
    }
    Ok(())
}

pub fn store_kv(pool: &Pool, inputs: &Inputs, shape: &AttentionShape, qkv: &Buf, kv: &mut Kv) {
    match kv.shape.dtype {
        Dtype::Bf16 => store::<bf16>(pool, inputs, shape, qkv, kv),
        _ => store::<f32>(pool, inputs, shape, qkv, kv),
    }
}

fn store<E: Element>(pool: &Pool, inputs: &Inputs, shape: &AttentionShape, qkv: &Buf, kv: &mut Kv) {
    let KvShape { block_size, kv_heads, head_dim, blocks, .. } = kv.shape;
    let keys = SendPtr(kv.k.bytes_mut().as_mut_ptr().cast::<E>());
    let values = SendPtr(kv.v.bytes_mut().as_mut_ptr().cast::<E>());
    pool.run(inputs.batch.rows(), &|row, _| {
        let slot = inputs.batch.slots[row] as usize;
        let (block, offset) = (slot / block_size, slot % block_size);
        assert!(block < blocks, "slot {slot} is outside the pool of {blocks} blocks");
        let row = &qkv[row * shape.qkv_width()..][..shape.qkv_width()];
        let (k, v) = row[shape.q_width()..].split_at(shape.kv_width());
        for head in 0..kv_heads {
            let start = (block * kv_heads + head) * head_dim * block_size;
            for d in 0..head_dim {
                // SAFETY: block, head, d and offset are inside the pool's shape; rows of one batch have different slots.
                unsafe {
                    keys.get().add(start + d * block_size + offset).write(E::from_f32(k[head * head_dim + d]));
                    values.get().add(start + offset * head_dim + d).write(E::from_f32(v[head * head_dim + d]));
                }
            }
        }
    });
}

/// One thread's working memory. A query is one head of one row of the tile.
pub struct Scratch {
    queries: Vec<f32>, // [queries, head_dim], scaled
    scores: Vec<f32>,  // [queries, SPAN], then probabilities
    sums: Vec<f32>,    // [queries, head_dim]
    max: Vec<f32>,     // [queries]
    weight: Vec<f32>,  // [queries]
    range: Vec<Range>, // [queries]
}

/// The positions that a query sees.
#[derive(Debug, Clone, Copy, Default)]
struct Range {
    first: usize,
    end: usize,
}

impl Range {
    /// The part inside `start..start + len`, counted from `start`; empty ranges have `first >= end`.
    fn within(self, start: usize, len: usize) -> Range {
        Range { first: self.first.max(start) - start, end: self.end.clamp(start, start + len) - start }
    }
}

impl Scratch {
    pub fn bytes(shape: &AttentionShape) -> u64 {
        let per_query = (2 * shape.head_dim + SPAN + 2) * size_of::<f32>() + size_of::<Range>();
        (Self::queries(shape) * per_query) as u64
    }

    fn queries(shape: &AttentionShape) -> usize {
        TILE_ROWS * (shape.heads / shape.kv_heads)
    }

    pub fn empty() -> Scratch {
        Scratch { queries: Vec::new(), scores: Vec::new(), sums: Vec::new(), max: Vec::new(), weight: Vec::new(), range: Vec::new() }
    }

    /// Makes room for `shape` too.
    pub fn fit(&mut self, shape: &AttentionShape) -> Result<()> {
        let queries = Self::queries(shape).max(self.max.len());
        let wide = (Self::queries(shape) * shape.head_dim).max(self.sums.len());
        *self = Scratch {
            queries: try_vec(wide, 0.0)?,
            scores: try_vec(queries * SPAN, 0.0)?,
            sums: try_vec(wide, 0.0)?,
            max: try_vec(queries, 0.0)?,
            weight: try_vec(queries, 0.0)?,
            range: try_vec(queries, Range::default())?,
        };
        Ok(())
    }
}

#[allow(clippy::too_many_arguments)]
pub fn attention(
    isa: Isa,
    pool: &Pool,
    scratch: &[Mutex<Scratch>],
    inputs: &Inputs,
    shape: &AttentionShape,
    qkv: &Buf,
    kv: &Kv,
    out: &mut Buf,
) {
    let out = &mut out[..inputs.batch.rows() * shape.q_width()];
    let args = Args { inputs, shape, qkv, kv, out: SendPtr(out.as_mut_ptr()) };
    match kv.shape.dtype {
        Dtype::Bf16 => run::<bf16>(isa, pool, scratch, args),
        _ => run::<f32>(isa, pool, scratch, args),
    }
}

#[derive(Clone, Copy)]
struct Args<'a> {
    inputs: &'a Inputs,
    shape: &'a AttentionShape,
    qkv: &'a [f32], // [rows, qkv_width]
    kv: &'a Kv,
    out: SendPtr<f32>, // [rows, q_width]
}

fn run<E: Element>(isa: Isa, pool: &Pool, scratch: &[Mutex<Scratch>], args: Args) {
    let kv_heads = args.shape.kv_heads;
    pool.run(args.inputs.tiles.len() * kv_heads, &|task, worker| {
        let mut scratch = scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
        let tile = args.inputs.tiles[task / kv_heads];
        let attend = Attend::<E> { args, tile, kv_head: task % kv_heads, scratch: &mut scratch, element: PhantomData };
        // SAFETY: the path is present; tasks write disjoint heads and rows of `out`.
        unsafe { isa.run(attend) };
    });
}

/// One tile's rows through one KV head.
struct Attend<'a, E> {
    args: Args<'a>,
    tile: Tile,
    kv_head: usize,
    scratch: &'a mut Scratch,
    element: PhantomData<E>,
}

/// The part of one block that lies in the span: `len` tokens from `offset` in the block, at `start` in the span.
#[derive(Clone, Copy)]
struct Piece {
    block: usize,
    offset: usize,
    start: usize,
    len: usize,
}

impl<E: Element> Kernel for Attend<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        // SAFETY: shapes and block tables hold together as the scheduler made them.
        unsafe {
            self.begin();
            let queries = self.queries();
            let first = self.scratch.range[0].first; // rows ascend, so the first row sees the earliest
            let end = self.scratch.range[queries - 1].end;
            for span in (first / SPAN * SPAN..end).step_by(SPAN) {
                self.for_pieces(span, end, |this, piece| this.score::<L>(piece));
                for query in 0..queries {
                    self.soften::<L>(query, span);
                }
                self.for_pieces(span, end, |this, piece| this.accumulate::<L>(span, piece));
            }
            self.finish();
        }
    }
}

impl<E: Element> Attend<'_, E> {
    fn group(&self) -> usize {
        self.args.shape.heads / self.args.shape.kv_heads
    }

    fn queries(&self) -> usize {
        self.tile.rows * self.group()
    }

    /// Where a query's head begins in a row of queries, and its row.
    fn row_and_column(&self, query: usize) -> (usize, usize) {
        let (row, head) = (query / self.group(), self.kv_head * self.group() + query % self.group());
        (self.tile.first_row + row, head * self.args.shape.head_dim)
    }

    /// Copies the scaled queries and clears the sums.
    #[inline(always)]
    fn begin(&mut self) {
        let AttentionShape { head_dim, scale, window, .. } = *self.args.shape;
        for query in 0..self.queries() {
            let (row, column) = self.row_and_column(query);
            let from = &self.args.qkv[row * self.args.shape.qkv_width() + column..][..head_dim];
            for (to, from) in self.scratch.queries[query * head_dim..][..head_dim].iter_mut().zip(from) {
                *to = from * scale;
            }
            let end = self.args.inputs.batch.positions[row] as usize + 1;
            self.scratch.range[query] = Range { first: end.saturating_sub(window.unwrap_or(end)), end };
            self.scratch.max[query] = f32::NEG_INFINITY;
            self.scratch.weight[query] = 0.0;
        }
        let len = self.queries() * head_dim;
        self.scratch.sums[..len].fill(0.0);
    }

    /// The blocks' parts of the span that starts at position `span`, in order, up to `end`.
    #[inline(always)]
    unsafe fn for_pieces(&mut self, span: usize, end: usize, mut visit: impl FnMut(&mut Self, Piece)) {
        let block_size = self.args.kv.shape.block_size;
        let mut position = span;
        while position < end.min(span + SPAN) {
            let offset = position % block_size;
            let len = (block_size - offset).min(span + SPAN - position);
            let block = self.args.inputs.batch.tables[self.tile.table + position / block_size] as usize;
            visit(self, Piece { block, offset, start: position - span, len });
            position += len;
        }
    }

    /// scores[query][piece] = query . K
    #[inline(always)]
    fn score<L: Lanes>(&mut self, piece: Piece) {
        let queries = self.queries();
        for start in (0..piece.len).step_by(L::N) {
            let mut query = 0;
            // SAFETY: query + R <= queries; the tokens are inside the piece.
            unsafe {
                while query + 8 <= queries {
                    self.score_tile::<L, 8>(piece, start, query);
                    query += 8;
                }
                while query + 2 <= queries {
                    self.score_tile::<L, 2>(piece, start, query);
                    query += 2;
                }
                if query < queries {
                    self.score_tile::<L, 1>(piece, start, query);
                }
            }
        }
    }

    /// Scores of `R` queries against one vector of tokens.
    #[inline(always)]
    unsafe fn score_tile<L: Lanes, const R: usize>(&mut self, piece: Piece, start: usize, query: usize) {
        let KvShape { block_size, kv_heads, head_dim, .. } = self.args.kv.shape;
        let count = piece.len - start;
        // SAFETY: the block is in the pool, the queries and scores in the scratch; `count` bounds the short end.
        unsafe {
            let keys = self.args.kv.k.bytes().as_ptr().cast::<E>();
            let keys = keys.add((piece.block * kv_heads + self.kv_head) * head_dim * block_size + piece.offset + start);
            let queries = self.scratch.queries.as_ptr().add(query * head_dim);
            let mut sums = [L::splat(0.0); R];
            for d in 0..head_dim {
                let key = load_some::<L, E>(keys.add(d * block_size), count);
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = L::fma(L::splat(*queries.add(r * head_dim + d)), key, *sum);
                }
            }
            for (r, &sum) in sums.iter().enumerate() {
                store_some::<L>(self.scratch.scores.as_mut_ptr().add((query + r) * SPAN + piece.start + start), sum, count);
            }
        }
    }

    /// One query's step of the online softmax: its scores become probabilities against the running maximum.
    #[inline(always)]
    fn soften<L: Lanes>(&mut self, query: usize, span: usize) {
        let Range { first, end } = self.scratch.range[query].within(span, SPAN);
        if first >= end {
            return;
        }
        let head_dim = self.args.shape.head_dim;
        let scores = &mut self.scratch.scores[query * SPAN..][..SPAN];
        // SAFETY: SPAN is a multiple of every path's lanes; `load_some` and `store_some` bound the sums' ends.
        unsafe {
            if let Some(cap) = self.args.shape.soft_cap {
                elementwise::soft_cap::<L>(&mut scores[first..end], cap);
            }
            scores[..first].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
            let old = self.scratch.max[query];
            let new = scores.iter().fold(old, |max, &score| if score > max { score } else { max });
            let mut total = L::splat(0.0);
            for chunk in scores.chunks_exact_mut(L::N) {
                L::store(chunk.as_mut_ptr(), lanes::exp::<L>(L::sub(L::load(chunk.as_ptr()), L::splat(new))));
            }
            scores[..first].fill(0.0);
            scores[end..].fill(0.0);
            for chunk in scores.chunks_exact(L::N) {
                total = L::add(total, L::load(chunk.as_ptr()));
            }
            let kept = lanes::exp::<L>(L::splat(old - new));
            let mut factor = [0.0; 16];
            L::store(factor.as_mut_ptr(), kept);
            self.scratch.max[query] = new;
            self.scratch.weight[query] = self.scratch.weight[query] * factor[0] + lanes::sum::<L>(total);
            for chunk in self.scratch.sums[query * head_dim..][..head_dim].chunks_mut(L::N) {
                let sum = load_some::<L, f32>(chunk.as_ptr(), chunk.len());
                store_some::<L>(chunk.as_mut_ptr(), L::mul(sum, kept), chunk.len());
            }
        }
    }

    /// sums[query] += probability . V, for each query over its own tokens of the piece.
    #[inline(always)]
    fn accumulate<L: Lanes>(&mut self, span: usize, piece: Piece) {
        const R: usize = 4;
        let queries = self.queries();
        for query in (0..queries / R * R).step_by(R) {
            let ranges: [Range; R] = std::array::from_fn(|r| self.seen(query + r, span, piece));
            let first = ranges.iter().map(|r| r.first).max().unwrap_or(0);
            let end = ranges.iter().map(|r| r.end).min().unwrap_or(0);
            if first >= end {
                ranges.iter().enumerate().for_each(|(r, &range)| self.add_values::<L, 1>(piece, query + r, range));
                continue;
            }
            // The tokens that all of them see go together; those before and after, one query at a time.
            for (r, range) in ranges.iter().enumerate() {
                self.add_values::<L, 1>(piece, query + r, Range { first: range.first, end: first });
            }
            self.add_values::<L, R>(piece, query, Range { first, end });
            for (r, range) in ranges.iter().enumerate() {
                self.add_values::<L, 1>(piece, query + r, Range { first: end, end: range.end });
            }
        }
        for query in queries / R * R..queries {
            self.add_values::<L, 1>(piece, query, self.seen(query, span, piece));
        }
    }

    /// The query's tokens of the piece, counted from the piece's start.
    #[inline(always)]
    fn seen(&self, query: usize, span: usize, piece: Piece) -> Range {
        self.scratch.range[query].within(span + piece.start, piece.len)
    }

    #[inline(always)]
    fn add_values<L: Lanes, const R: usize>(&mut self, piece: Piece, query: usize, tokens: Range) {
        if tokens.first >= tokens.end {
            return;
        }
        let head_dim = self.args.shape.head_dim;
        let mut dim = 0;
        // SAFETY: dimensions are inside the head, tokens inside the piece, query + R <= queries.
        unsafe {
            if L::N == 16 {
                while dim + 4 * L::N <= head_dim {
                    self.add_values_at::<L, R, 4>(piece, query, tokens, dim, 4 * L::N);
                    dim += 4 * L::N;
                }
            }
            while dim + 2 * L::N <= head_dim {
                self.add_values_at::<L, R, 2>(piece, query, tokens, dim, 2 * L::N);
                dim += 2 * L::N;
            }
            while dim < head_dim {
                self.add_values_at::<L, R, 1>(piece, query, tokens, dim, L::N.min(head_dim - dim));
                dim += L::N;
            }
        }
    }

    /// `R` queries by `C` vectors of dimensions from `dim`, the last of them `width - (C - 1) * N` long.
    #[inline(always)]
    unsafe fn add_values_at<L: Lanes, const R: usize, const C: usize>(
        &mut self,
        piece: Piece,
        query: usize,
        tokens: Range,
        dim: usize,
        width: usize,
    ) {
        let KvShape { block_size, kv_heads, head_dim, .. } = self.args.kv.shape;
        // SAFETY: the caller's contract; `width` bounds the short end of a head.
        unsafe {
            let values = self.args.kv.v.bytes().as_ptr().cast::<E>();
            let values = values.add(((piece.block * kv_heads + self.kv_head) * block_size + piece.offset) * head_dim + dim);
            let shares = self.scratch.scores.as_ptr().add(query * SPAN + piece.start);
            let out = self.scratch.sums.as_mut_ptr().add(query * head_dim + dim);
            let mut sums = [[L::splat(0.0); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = load_some::<L, f32>(out.add(r * head_dim + c * L::N), width - c * L::N);
                }
            }
            for token in tokens.first..tokens.end {
                let mut value = [L::splat(0.0); C];
                for (c, value) in value.iter_mut().enumerate() {
                    *value = load_some::<L, E>(values.add(token * head_dim + c * L::N), width - c * L::N);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let share = L::splat(*shares.add(r * SPAN + token));
                    for c in 0..C {
                        sums[c] = L::fma(share, value[c], sums[c]);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    store_some::<L>(out.add(r * head_dim + c * L::N), sum, width - c * L::N);
                }
            }
        }
    }

    /// out[row][head] = sums / weight
    #[inline(always)]
    fn finish(&mut self) {
        let (head_dim, q_width) = (self.args.shape.head_dim, self.args.shape.q_width());
        for query in 0..self.queries() {
            let (row, column) = self.row_and_column(query);
            let sums = &self.scratch.sums[query * head_dim..][..head_dim];
            for (d, sum) in sums.iter().enumerate() {
                // SAFETY: row and head are inside `out`, and this task's alone.
                unsafe { self.args.out.get().add(row * q_width + column + d).write(sum / self.scratch.weight[query]) };
            }
        }
    }
}
