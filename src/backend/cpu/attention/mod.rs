//! Paged attention, with one kernel for prefill and decode.
//!
//! K is stored as `[block][kv_head][dim][token]`: a vector holds one dimension of several tokens,
//! and a score is summed over dimensions in order (`scores`). V is stored as
//! `[block][kv_head][token][dim]`: a vector holds several dimensions of one token, and the output
//! is summed over tokens in order (`values`). Softmax runs online over spans of 128 positions,
//! counted from the start of the sequence. So each query's result is one fixed sequence of
//! operations, independent of the chunk, the tile, the block size and the number of threads.
//!
//! In bf16, two dimensions of K and two tokens of V are adjacent, so that one load yields both. On
//! paths that multiply pairs, queries and probabilities are rounded to bf16 as well. A pair is then
//! one operation, which halves the number of operations of f32.
//!
//! With `Values::OfKeys`, keys and values are stored once, in the layout of values. A score is then
//! accumulated per vector lane over the dimensions of a key, and the lanes are summed at the end.
//!
//! Numbers with a scale are summed as stored: the scale multiplies the finished score, or the
//! probability before it is summed over. So a scale costs one product per query and token instead
//! of one per number.

mod scores;
mod values;

use std::marker::PhantomData;
use std::ptr::null;
use std::sync::{Mutex, PoisonError};

use super::kv::{Cached, Kv, with_cached};
use super::lanes::{self, Kernel, Lanes, load_some, store_some};
use super::matmul::{LINE, Machine};
use super::pool::Pool;
use super::{Buf, Inputs, SendPtr, elementwise};
use crate::backend::{AttentionShape, KvShape, Values};
use crate::error::{Result, try_vec};
use crate::types::batch::Batch;

/// Positions per step of the online softmax.
const SPAN: usize = 128;
/// Tokens of the smallest supported block.
const MIN_BLOCK: usize = 8;
/// Maximum number of blocks in a span.
const PARTS: usize = SPAN / MIN_BLOCK;
/// Rows of one sequence that share one pass over K and V, for all query heads of a KV head.
const TILE_ROWS: usize = 8;

/// Consecutive rows of one sequence: the unit of work, once per group of heads.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    first_row: usize,
    rows: usize,
    /// Index of the sequence's first entry in the block tables.
    table: usize,
}

/// Divides the batch's rows into tiles of one sequence each.
pub fn cut_tiles(batch: &Batch, tiles: &mut Vec<Tile>) -> Result<()> {
    tiles.clear();
    tiles.try_reserve(batch.token_count())?;
    for span in &batch.spans {
        let (first, end) = (span.first_token as usize, (span.first_token + span.tokens) as usize);
        for first_row in (first..end).step_by(TILE_ROWS) {
            tiles.push(Tile { first_row, rows: TILE_ROWS.min(end - first_row), table: span.table as usize });
        }
    }
    Ok(())
}

/// The working memory of one thread. A query is one head of one row of the tile.
pub struct AttentionScratch {
    queries: Vec<f32>, // [queries, head_dim], scaled; if rounded to bf16, the first half of each row
    scores: Vec<f32>,  // [queries, SPAN], then probabilities, rounded in the same way
    sums: Vec<f32>,    // [queries, value_dim]
    max: Vec<f32>,     // [queries]
    shrink: Vec<f32>,  // [queries], factor of the previous sums in a step
    weight: Vec<f32>,  // [queries]
    slope: Vec<f32>,   // [queries], ALiBi slope
    range: Vec<Range>, // [queries]
}

/// The range of positions that a query attends to.
#[derive(Debug, Clone, Copy, Default)]
struct Range {
    first: usize,
    end: usize,
}

impl Range {
    /// Returns the part inside `start..start + len`, relative to `start`. An empty range has `first
    /// >= end`.
    fn within(self, start: usize, len: usize) -> Range {
        Range { first: self.first.max(start) - start, end: self.end.clamp(start, start + len) - start }
    }

    #[inline(always)]
    fn contains(self, token: usize) -> bool {
        self.first <= token && token < self.end
    }

    /// Returns a mask with 16 bits per token, set for those tokens of the pair that are inside.
    #[inline(always)]
    fn of_pair(self, pair: usize) -> u32 {
        let low = if self.contains(2 * pair) { 0xffff } else { 0 };
        let high = if self.contains(2 * pair + 1) { 0xffff_0000 } else { 0 };
        low | high
    }
}

impl AttentionScratch {
    pub fn bytes(shape: &AttentionShape) -> u64 {
        let per_query = (2 * shape.head_dim + SPAN + 4) * size_of::<f32>() + size_of::<Range>();
        (Self::queries(shape) * per_query) as u64
    }

    fn queries(shape: &AttentionShape) -> usize {
        TILE_ROWS * heads_at_once(shape, usize::MAX)
    }

    pub fn empty() -> AttentionScratch {
        AttentionScratch {
            queries: Vec::new(),
            scores: Vec::new(),
            sums: Vec::new(),
            max: Vec::new(),
            shrink: Vec::new(),
            weight: Vec::new(),
            slope: Vec::new(),
            range: Vec::new(),
        }
    }

    /// Grows the buffers so that they suffice for `shape` too.
    pub fn fit(&mut self, shape: &AttentionShape) -> Result<()> {
        let queries = Self::queries(shape).max(self.max.len());
        let wide = (Self::queries(shape) * shape.head_dim).max(self.sums.len());
        *self = AttentionScratch {
            queries: try_vec(wide, 0.0)?,
            scores: try_vec(queries * SPAN, 0.0)?,
            sums: try_vec(wide, 0.0)?,
            max: try_vec(queries, 0.0)?,
            shrink: try_vec(queries, 0.0)?,
            weight: try_vec(queries, 0.0)?,
            slope: try_vec(queries, 0.0)?,
            range: try_vec(queries, Range::default())?,
        };
        Ok(())
    }
}

pub fn attention(machine: Machine, scratch: &[Mutex<AttentionScratch>], args: Args, out: &mut Buf) {
    let KvShape { kv_heads, head_dim, values, .. } = args.kv.shape;
    let asked = (args.shape.kv_heads, args.shape.head_dim, args.shape.values);
    assert!(asked == (kv_heads, head_dim, values), "attention over {asked:?}; the cache has {kv_heads} x {head_dim}, {values:?}");
    let out = SendPtr(out[..args.inputs.batch.token_count() * args.shape.out_width()].as_mut_ptr());
    with_cached!(&args.kv.shape, run(machine, scratch, args, out));
}

fn run<E: Cached>(Machine { isa, pool }: Machine, scratch: &[Mutex<AttentionScratch>], args: Args, out: SendPtr<f32>) {
    // SAFETY: the CPU supports `isa`, which `Isa::run` requires.
    each_task::<E>(pool, scratch, args, out, &|attend| unsafe { isa.run(attend) });
}

#[derive(Clone, Copy)]
pub struct Args<'a> {
    pub inputs: &'a Inputs,
    /// Index of the group of layers, less than `groups`. The block tables of all groups are
    /// interleaved.
    pub group: usize,
    pub groups: usize,
    pub shape: &'a AttentionShape,
    pub sinks: Option<&'a [f32]>, // [heads]
    pub qkv: &'a [f32],           // [rows, row_width]
    pub kv: &'a Kv,
}

fn each_task<E: Cached>(pool: &Pool, scratch: &[Mutex<AttentionScratch>], args: Args, out: SendPtr<f32>, run: &(dyn Fn(Attend<E>) + Sync)) {
    let heads = args.shape.heads;
    let max_group = heads_at_once(args.shape, args.inputs.tiles.len() * heads / (2 * pool.threads()));
    let groups = heads.div_ceil(max_group);
    pool.run(args.inputs.tiles.len() * groups, &|task, worker| {
        let mut scratch = scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
        let (tile, first_head) = (args.inputs.tiles[task / groups], task % groups * max_group);
        let group = max_group.min(heads - first_head);
        // Tasks write disjoint rows and heads of `out`.
        run(Attend { args, out, tile, group, first_head, scratch: &mut scratch, element: PhantomData });
    });
}

/// Returns how many heads of one KV head a task processes. With `Values::OfKeys`, all heads share
/// one KV head, which is too much work for one thread. A task then takes `fair` heads, within
/// bounds.
fn heads_at_once(shape: &AttentionShape, fair: usize) -> usize {
    const MANY: usize = 16;
    match shape.values {
        Values::Own => shape.heads / shape.kv_heads,
        Values::OfKeys(_) => fair.clamp(1, MANY.min(shape.heads)),
    }
}

/// The rows of one tile and some heads of one KV head.
struct Attend<'a, E> {
    args: Args<'a>,
    out: SendPtr<f32>, // [rows, out_width]
    tile: Tile,
    group: usize,
    first_head: usize,
    scratch: &'a mut AttentionScratch,
    element: PhantomData<E>,
}

/// Addresses of K and V of the positions `start..start + len`, in parts of `run` tokens.
struct Span<E> {
    start: usize,
    len: usize,
    run: usize,
    keys: [*const E; PARTS],   // [head_dim / DEPTH][block_size][DEPTH], starting at the part's first token
    values: [*const E; PARTS], // [run / DEPTH][head_dim][DEPTH]
    /// Valid only if the element type has scales.
    key_scales: [*const f32; PARTS], // [run]
    value_scales: [*const f32; PARTS], // [run]
}

impl<E> Span<E> {
    #[inline(always)]
    fn none() -> Span<E> {
        let (numbers, scales) = ([null(); PARTS], [null(); PARTS]);
        Span { start: 0, len: 0, run: 1, keys: numbers, values: numbers, key_scales: scales, value_scales: scales }
    }
}

impl<E: Cached> Kernel for Attend<'_, E> {
    const PAIRS: bool = E::DEPTH == 2;
    // No closures here: a closure that is not inlined is compiled without the CPU features of the
    // path.
    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        self.begin::<L>();
        let queries = self.queries();
        let first = self.scratch.range[0].first; // positions ascend with the rows, so the first row has the earliest
        let end = self.scratch.range[queries - 1].end;
        // References are swapped because the structs are too large to copy each time.
        let (mut span, mut next) = (&mut Span::none(), &mut Span::none());
        self.find(span, first / SPAN * SPAN, end);
        while span.len > 0 {
            self.find(next, span.start + SPAN, end);
            self.score::<L>(span, next);
            self.raise::<L>(span.start);
            for query in 0..queries {
                self.soften::<L>(query, span.start);
                if E::SCALED {
                    self.scale_shares::<L>(query, span);
                }
                if Self::in_pairs::<L>() {
                    // SAFETY: the caller guarantees the CPU features of `L`.
                    unsafe { lanes::round_in_place::<L>(&mut self.scratch.scores[query * SPAN..][..SPAN]) };
                }
            }
            self.accumulate::<L>(span);
            std::mem::swap(&mut span, &mut next);
        }
        self.finish::<L>();
    }
}

impl<E: Cached> Attend<'_, E> {
    /// Returns true if queries and probabilities are rounded to bf16 and multiplied in pairs.
    #[inline(always)]
    fn in_pairs<L: Lanes>() -> bool {
        L::PAIRS && E::DEPTH == 2
    }

    fn queries(&self) -> usize {
        self.tile.rows * self.group
    }

    fn kv_head(&self) -> usize {
        self.first_head / (self.args.shape.heads / self.args.shape.kv_heads)
    }

    fn row_and_head(&self, query: usize) -> (usize, usize) {
        (self.tile.first_row + query / self.group, self.first_head + query % self.group)
    }

    /// Copies and scales the queries, and clears the sums.
    #[inline(always)]
    fn begin<L: Lanes>(&mut self) {
        let AttentionShape { head_dim, scale, window, alibi, .. } = *self.args.shape;
        for query in 0..self.queries() {
            let (row, head) = self.row_and_head(query);
            let from = &self.args.qkv[row * self.args.shape.row_width() + head * head_dim..][..head_dim];
            for (to, from) in self.scratch.queries[query * head_dim..][..head_dim].iter_mut().zip(from) {
                *to = from * scale;
            }
            if Self::in_pairs::<L>() {
                // SAFETY: the caller guarantees the CPU features of `L`.
                unsafe { lanes::round_in_place::<L>(&mut self.scratch.queries[query * head_dim..][..head_dim]) };
            }
            let end = self.args.inputs.batch.positions[row] as usize + 1;
            self.scratch.range[query] = Range { first: end.saturating_sub(window.unwrap_or(end)), end };
            // A sink acts as a score that precedes all others.
            let sink = self.args.sinks.map(|sinks| sinks[head]);
            self.scratch.max[query] = sink.unwrap_or(f32::NEG_INFINITY);
            self.scratch.weight[query] = if sink.is_some() { 1.0 } else { 0.0 };
            if let Some(steepness) = alibi {
                self.scratch.slope[query] = steepness * self.args.shape.slope(head);
            }
        }
        let len = self.queries() * self.args.shape.value_dim();
        self.scratch.sums[..len].fill(0.0);
    }

    /// Sets `span` to the positions from `start`, a multiple of SPAN, to at most `end`. If `start`
    /// is not less than `end`, the span is empty. Array entries after the last part are unchanged.
    #[inline(always)]
    fn find(&self, span: &mut Span<E>, start: usize, end: usize) {
        let KvShape { block_size, head_dim, blocks, .. } = self.args.kv.shape;
        (span.start, span.len, span.run) = (start, end.min(start + SPAN).saturating_sub(start), block_size.min(SPAN));
        for part in 0..span.len.div_ceil(span.run) {
            let position = start + part * span.run;
            let entry = position / block_size * self.args.groups + self.args.group;
            let block = self.args.inputs.batch.tables[self.tile.table + entry] as usize;
            assert!(block < blocks, "block {block} of a table is outside the pool of {blocks} blocks");
            let [keys, values] = self.args.kv.head::<E>(block, self.kv_head());
            let offset = position % block_size;
            span.keys[part] = keys.numbers.wrapping_add(offset * E::DEPTH);
            span.values[part] = values.numbers.wrapping_add(offset * head_dim);
            span.key_scales[part] = keys.scales.wrapping_add(offset);
            span.value_scales[part] = values.scales.wrapping_add(offset);
        }
    }

    /// Updates each query's maximum over the visible scores, and computes the factor that rescales
    /// its sums.
    #[inline(always)]
    fn raise<L: Lanes>(&mut self, span: usize) {
        let queries = self.queries();
        for query in 0..queries {
            let Range { first, end } = self.scratch.range[query].within(span, SPAN);
            self.scratch.shrink[query] = self.scratch.max[query];
            if first >= end {
                continue;
            }
            let scores = &mut self.scratch.scores[query * SPAN..][..SPAN];
            if self.args.shape.alibi.is_some() {
                let position = self.scratch.range[query].end - 1;
                for (token, score) in scores.iter_mut().enumerate().take(end).skip(first) {
                    *score -= self.scratch.slope[query] * (position - (span + token)) as f32;
                }
            }
            // SAFETY: SPAN is a multiple of every path's lanes, as `greatest` requires.
            unsafe {
                if let Some(cap) = self.args.shape.soft_cap {
                    elementwise::soft_cap::<L>(&mut scores[first..end], cap);
                }
                if end - first < SPAN {
                    scores[..first].fill(f32::NEG_INFINITY);
                    scores[end..].fill(f32::NEG_INFINITY);
                }
                self.scratch.max[query] = lanes::greatest::<L>(scores, self.scratch.max[query]);
            }
        }
        for (shrink, max) in self.scratch.shrink[..queries].chunks_mut(L::N).zip(self.scratch.max[..queries].chunks(L::N)) {
            // SAFETY: `load_some` and `store_some` do not access memory beyond the given lengths.
            unsafe {
                let old = load_some::<L, f32>(shrink.as_ptr(), shrink.len());
                let fallen = L::sub(old, load_some::<L, f32>(max.as_ptr(), max.len()));
                store_some::<L>(shrink.as_mut_ptr(), lanes::exp::<L>(fallen), shrink.len());
            }
        }
    }

    /// One step of the online softmax for one query: replaces scores by exp(score - maximum).
    #[inline(always)]
    fn soften<L: Lanes>(&mut self, query: usize, span: usize) {
        let Range { first, end } = self.scratch.range[query].within(span, SPAN);
        if first >= end {
            return;
        }
        let scores = &mut self.scratch.scores[query * SPAN..][..SPAN];
        let (max, shrink) = (self.scratch.max[query], self.scratch.shrink[query]);
        // SAFETY: SPAN is a multiple of every path's lanes. `load_some` and `store_some` do not
        // access memory beyond the end of the sums.
        unsafe {
            for chunk in scores.chunks_exact_mut(L::N) {
                let below = L::sub(L::load(chunk.as_ptr()), L::splat(max));
                let share = if Self::in_pairs::<L>() { lanes::exp_for_bf16::<L>(below) } else { lanes::exp::<L>(below) };
                L::store(chunk.as_mut_ptr(), share);
            }
            if end - first < SPAN {
                scores[..first].fill(0.0);
                scores[end..].fill(0.0);
            }
            let mut total = L::splat(0.0);
            for chunk in scores.chunks_exact(L::N) {
                total = L::add(total, L::load(chunk.as_ptr()));
            }
            self.scratch.weight[query] = self.scratch.weight[query] * shrink + lanes::sum::<L>(total);
            if shrink != 1.0 {
                let value_dim = self.args.shape.value_dim();
                for chunk in self.scratch.sums[query * value_dim..][..value_dim].chunks_mut(L::N) {
                    let sum = load_some::<L, f32>(chunk.as_ptr(), chunk.len());
                    store_some::<L>(chunk.as_mut_ptr(), L::mul(sum, L::splat(shrink)), chunk.len());
                }
            }
        }
    }

    /// probability[query][token] *= scale of the token's V
    #[inline(always)]
    fn scale_shares<L: Lanes>(&mut self, query: usize, span: &Span<E>) {
        let width = L::N.min(span.run);
        let mut token = 0;
        while token < span.len {
            // SAFETY: a block's scales and the query's scores have `width` valid tokens from each
            // vector's first.
            unsafe {
                let scale = load_some::<L, f32>(span.value_scales[token / span.run].add(token % span.run), width);
                let shares = self.scratch.scores.as_mut_ptr().add(query * SPAN + token);
                store_some::<L>(shares, L::mul(load_some::<L, f32>(shares, width), scale), width);
            }
            token += width;
        }
    }

    /// out[row][head] = sums / weight
    #[inline(always)]
    fn finish<L: Lanes>(&mut self) {
        let (value_dim, out_width) = (self.args.shape.value_dim(), self.args.shape.out_width());
        for query in 0..self.queries() {
            let (row, head) = self.row_and_head(query);
            let sums = &self.scratch.sums[query * value_dim..][..value_dim];
            // SAFETY: row and head are inside `out`, and only this task writes them.
            unsafe {
                let out = self.out.get().add(row * out_width + head * value_dim);
                let weight = L::splat(self.scratch.weight[query]);
                for (i, chunk) in sums.chunks(L::N).enumerate() {
                    store_some::<L>(out.add(i * L::N), L::div(load_some::<L, f32>(chunk.as_ptr(), chunk.len()), weight), chunk.len());
                }
            }
        }
    }
}
