//! Paged attention, one kernel for prefill and decode.
//!
//! K lies as `[block][kv_head][dim][token]`: a vector holds one dimension of several tokens, and a score
//! is summed over dimensions in order. V lies as `[block][kv_head][token][dim]`: a vector holds several
//! dimensions of one token, and the output is summed over tokens in order. Softmax runs online over spans of
//! 128 positions counted from the sequence's start. So each query's result is one fixed sequence of
//! operations, whatever the chunk, the tile, the block size or the number of threads.
//!
//! Where the values of a head are the first dimensions of its keys, both lie once, as values do; then a score is summed over the vectors
//! of a key's dimensions, and these at the end.
//!
//! Numbers that have a scale are summed as they are stored: a score is scaled when its sum is made, and a
//! probability before it is summed over. So a scale costs one product for each query and token, not one for each number.

use std::marker::PhantomData;
use std::ptr::null;
use std::sync::{Mutex, PoisonError};

use half::bf16;

use super::kv::{Cached, Kv};
use super::lanes::{self, Kernel, Lanes, load_some, store_some};
use super::pool::Pool;
use super::{Buf, Inputs, SendPtr, elementwise};
use crate::backend::{AttentionShape, KvShape, Values};
use crate::batch::Batch;
use crate::error::{Result, try_vec};
use crate::options::{Isa, KvDtype};

/// Positions per step of the online softmax.
const SPAN: usize = 128;
/// Most parts of a span: a block has at least 8 tokens.
const PARTS: usize = SPAN / 8;
/// Rows of one sequence that share one pass over K and V, with all query heads of a KV head.
const TILE_ROWS: usize = 8;

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

/// One thread's working memory. A query is one head of one row of the tile.
pub struct Scratch {
    queries: Vec<f32>, // [queries, head_dim], scaled
    scores: Vec<f32>,  // [queries, SPAN], then probabilities
    sums: Vec<f32>,    // [queries, value_dim]
    max: Vec<f32>,     // [queries]
    weight: Vec<f32>,  // [queries]
    slope: Vec<f32>,   // [queries], of ALiBi
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
        let per_query = (2 * shape.head_dim + SPAN + 3) * size_of::<f32>() + size_of::<Range>();
        (Self::queries(shape) * per_query) as u64
    }

    fn queries(shape: &AttentionShape) -> usize {
        TILE_ROWS * heads_at_once(shape, usize::MAX)
    }

    pub fn empty() -> Scratch {
        Scratch {
            queries: Vec::new(),
            scores: Vec::new(),
            sums: Vec::new(),
            max: Vec::new(),
            weight: Vec::new(),
            slope: Vec::new(),
            range: Vec::new(),
        }
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
            slope: try_vec(queries, 0.0)?,
            range: try_vec(queries, Range::default())?,
        };
        Ok(())
    }
}

pub fn attention(isa: Isa, pool: &Pool, scratch: &[Mutex<Scratch>], args: Args, out: &mut Buf) {
    let out = SendPtr(out[..args.inputs.batch.rows() * args.shape.out_width()].as_mut_ptr());
    match args.kv.shape.dtype {
        KvDtype::F32 => run::<f32>(isa, pool, scratch, args, out),
        KvDtype::Bf16 => run::<bf16>(isa, pool, scratch, args, out),
        KvDtype::Int8 => run::<i8>(isa, pool, scratch, args, out),
    }
}

#[derive(Clone, Copy)]
pub struct Args<'a> {
    pub inputs: &'a Inputs,
    /// Of so many groups of layers, whose block tables lie side by side.
    pub group: usize,
    pub groups: usize,
    pub shape: &'a AttentionShape,
    pub sinks: Option<&'a [f32]>, // [heads]
    pub qkv: &'a [f32],           // [rows, row_width]
    pub kv: &'a Kv,
}

fn run<E: Cached>(isa: Isa, pool: &Pool, scratch: &[Mutex<Scratch>], args: Args, out: SendPtr<f32>) {
    let heads = args.shape.heads;
    let most = heads_at_once(args.shape, args.inputs.tiles.len() * heads / (2 * pool.threads()));
    let groups = heads.div_ceil(most);
    pool.run(args.inputs.tiles.len() * groups, &|task, worker| {
        let mut scratch = scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
        let (tile, first_head) = (args.inputs.tiles[task / groups], task % groups * most);
        let group = most.min(heads - first_head);
        let attend = Attend::<E> { args, out, tile, group, first_head, scratch: &mut scratch, element: PhantomData };
        // SAFETY: the path is present; tasks write disjoint heads and rows of `out`.
        unsafe { isa.run(attend) };
    });
}

/// Heads of one KV head that one task takes. Where one is all heads', they are more than one thread's work: then so many as are `fair`,
/// within bounds.
fn heads_at_once(shape: &AttentionShape, fair: usize) -> usize {
    const MANY: usize = 16;
    match shape.values {
        Values::Own => shape.heads / shape.kv_heads,
        Values::OfKeys(_) => fair.clamp(1, MANY.min(shape.heads)),
    }
}

/// One tile's rows through some heads of one KV head.
struct Attend<'a, E> {
    args: Args<'a>,
    out: SendPtr<f32>, // [rows, out_width]
    tile: Tile,
    group: usize,
    first_head: usize,
    scratch: &'a mut Scratch,
    element: PhantomData<E>,
}

/// Where the K and V of the positions `start..start + len` lie, in parts of `run` tokens.
struct Span<E> {
    start: usize,
    len: usize,
    run: usize,
    keys: [*const E; PARTS],   // [head_dim][block_size] from the part's first token on
    values: [*const E; PARTS], // [run][head_dim]
    /// Nothing where the type has none.
    key_scales: [*const f32; PARTS], // [run]
    value_scales: [*const f32; PARTS], // [run]
}

impl<E: Cached> Kernel for Attend<'_, E> {
    // No closures here: a closure that is not inlined is compiled without the path's features, instruction by instruction.
    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        self.begin();
        let queries = self.queries();
        let first = self.scratch.range[0].first; // rows ascend, so the first row sees the earliest
        let end = self.scratch.range[queries - 1].end;
        let mut span = self.span(first / SPAN * SPAN, end);
        while span.len > 0 {
            let next = self.span(span.start + SPAN, end);
            self.score::<L>(&span, &next);
            for query in 0..queries {
                self.soften::<L>(query, span.start);
                if E::SCALED {
                    self.scale_shares::<L>(query, &span);
                }
            }
            self.accumulate::<L>(&span);
            span = next;
        }
        self.finish::<L>();
    }
}

impl<E: Cached> Attend<'_, E> {
    fn queries(&self) -> usize {
        self.tile.rows * self.group
    }

    fn kv_head(&self) -> usize {
        self.first_head / (self.args.shape.heads / self.args.shape.kv_heads)
    }

    fn row_and_head(&self, query: usize) -> (usize, usize) {
        (self.tile.first_row + query / self.group, self.first_head + query % self.group)
    }

    /// Copies the scaled queries and clears the sums.
    #[inline(always)]
    fn begin(&mut self) {
        let AttentionShape { head_dim, scale, window, alibi, .. } = *self.args.shape;
        for query in 0..self.queries() {
            let (row, head) = self.row_and_head(query);
            let from = &self.args.qkv[row * self.args.shape.row_width() + head * head_dim..][..head_dim];
            for (to, from) in self.scratch.queries[query * head_dim..][..head_dim].iter_mut().zip(from) {
                *to = from * scale;
            }
            let end = self.args.inputs.batch.positions[row] as usize + 1;
            self.scratch.range[query] = Range { first: end.saturating_sub(window.unwrap_or(end)), end };
            // A sink is a score that has been seen before all others.
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

    /// The positions from `start`, a multiple of SPAN, up to `end`; none where `start` is beyond it.
    #[inline(always)]
    fn span(&self, start: usize, end: usize) -> Span<E> {
        let KvShape { block_size, head_dim, .. } = self.args.kv.shape;
        let len = end.min(start + SPAN).saturating_sub(start);
        let (numbers, scales) = ([null(); PARTS], [null(); PARTS]);
        let mut span =
            Span { start, len, run: block_size.min(SPAN), keys: numbers, values: numbers, key_scales: scales, value_scales: scales };
        for part in 0..len.div_ceil(span.run) {
            let position = start + part * span.run;
            let entry = position / block_size * self.args.groups + self.args.group;
            let block = self.args.inputs.batch.tables[self.tile.table + entry] as usize;
            let [keys, values] = self.args.kv.head::<E>(block, self.kv_head());
            let offset = position % block_size;
            span.keys[part] = keys.numbers.wrapping_add(offset);
            span.values[part] = values.numbers.wrapping_add(offset * head_dim);
            span.key_scales[part] = keys.scales.wrapping_add(offset);
            span.value_scales[part] = values.scales.wrapping_add(offset);
        }
        span
    }

    /// Asks for what comes soon: this span's values, the next one's keys. Blocks lie scattered, so the hardware cannot guess.
    #[inline(always)]
    fn ask_for(&self, span: &Span<E>, next: &Span<E>, part: usize) {
        let KvShape { block_size, head_dim, .. } = self.args.kv.shape;
        let line = 64 / size_of::<E>();
        for element in (0..span.run * head_dim).step_by(line) {
            lanes::prefetch(span.values[part].wrapping_add(element));
        }
        if part * next.run < next.len {
            for dim in (0..head_dim).step_by(line.div_ceil(block_size)) {
                for token in (0..next.run).step_by(line) {
                    lanes::prefetch(next.keys[part].wrapping_add(dim * block_size + token));
                }
            }
        }
        if E::SCALED {
            lanes::prefetch(span.value_scales[part]);
            lanes::prefetch(next.key_scales[part]);
        }
    }

    /// scores[query][token] = query . K, for all tokens of the span
    #[inline(always)]
    fn score<L: Lanes>(&mut self, span: &Span<E>, next: &Span<E>) {
        if self.args.shape.values != Values::Own {
            // SAFETY: the span's rows are stored.
            return unsafe { self.score_rows::<L>(span, next) };
        }
        let width = L::N.min(span.run);
        let mut token = 0;
        while token < span.len {
            if token % span.run == 0 {
                self.ask_for(span, next, token / span.run);
            }
            let second = token + width;
            // SAFETY: both vectors begin in the span.
            unsafe {
                if L::N == 16 && width == L::N && second < span.len {
                    if second % span.run == 0 {
                        self.ask_for(span, next, second / span.run);
                    }
                    self.score_tokens::<L, 2>(span, token, width);
                    token += 2 * width;
                } else {
                    self.score_tokens::<L, 1>(span, token, width);
                    token += width;
                }
            }
        }
    }

    /// The same where keys lie as values do, `[token][dim]`: each score is a sum over the vectors of a row. Asks for the next span's rows.
    #[inline(always)]
    unsafe fn score_rows<L: Lanes>(&mut self, span: &Span<E>, next: &Span<E>) {
        const R: usize = 4;
        let (queries, row_bytes) = (self.queries(), self.args.shape.head_dim * size_of::<E>());
        for token in (0..span.len).step_by(R) {
            for ahead in token..(token + R).min(next.len) {
                let row = next.values[ahead / next.run].wrapping_add(ahead % next.run * self.args.shape.head_dim);
                for byte in (0..row_bytes).step_by(64) {
                    lanes::prefetch(row.wrapping_byte_add(byte));
                }
            }
            let tokens = R.min(span.len - token);
            let mut query = 0;
            // SAFETY: query + R <= queries; the tokens are in the span.
            unsafe {
                while query + R <= queries && tokens == R {
                    self.score_tile_of_rows::<L, R, R>(span, token, query);
                    query += R;
                }
                while query < queries {
                    for token in token..token + tokens {
                        self.score_tile_of_rows::<L, 1, 1>(span, token, query);
                    }
                    query += 1;
                }
            }
        }
    }

    /// `Q` queries by `T` tokens. Each score is one fixed sequence of operations, whatever the tile.
    #[inline(always)]
    unsafe fn score_tile_of_rows<L: Lanes, const Q: usize, const T: usize>(&mut self, span: &Span<E>, token: usize, query: usize) {
        let head_dim = self.args.shape.head_dim;
        // SAFETY: the caller's contract; `load_some` bounds the rows' ends.
        unsafe {
            let mut keys = [span.values[0]; T];
            for (t, key) in keys.iter_mut().enumerate() {
                *key = span.values[(token + t) / span.run].add((token + t) % span.run * head_dim);
            }
            let queries = self.scratch.queries.as_ptr().add(query * head_dim);
            let mut sums = [[L::splat(0.0); T]; Q];
            let mut dim = 0;
            while dim < head_dim {
                let width = L::N.min(head_dim - dim);
                let mut numbers = [L::splat(0.0); T];
                for (number, key) in numbers.iter_mut().zip(keys) {
                    *number = load_some::<L, E>(key.add(dim), width);
                }
                for (q, sums) in sums.iter_mut().enumerate() {
                    let query = load_some::<L, f32>(queries.add(q * head_dim + dim), width);
                    for (sum, number) in sums.iter_mut().zip(numbers) {
                        *sum = L::fma(query, number, *sum);
                    }
                }
                dim += L::N;
            }
            for (q, sums) in sums.iter().enumerate() {
                for (t, sum) in sums.iter().enumerate() {
                    let token = token + t;
                    let scale = if E::SCALED { *span.value_scales[token / span.run].add(token % span.run) } else { 1.0 };
                    self.scratch.scores[(query + q) * SPAN + token] = lanes::sum::<L>(*sum) * scale;
                }
            }
        }
    }

    /// Scores of all queries against `C` vectors of `width` tokens.
    #[inline(always)]
    unsafe fn score_tokens<L: Lanes, const C: usize>(&mut self, span: &Span<E>, token: usize, width: usize) {
        let queries = self.queries();
        let mut query = 0;
        // SAFETY: query + R <= queries; the tokens are the caller's.
        unsafe {
            while query + 8 <= queries {
                self.score_tile::<L, 8, C>(span, token, width, query);
                query += 8;
            }
            while query + 2 <= queries {
                self.score_tile::<L, 2, C>(span, token, width, query);
                query += 2;
            }
            if query < queries {
                self.score_tile::<L, 1, C>(span, token, width, query);
            }
        }
    }

    #[inline(always)]
    unsafe fn score_tile<L: Lanes, const R: usize, const C: usize>(&mut self, span: &Span<E>, token: usize, width: usize, query: usize) {
        let KvShape { block_size, head_dim, .. } = self.args.kv.shape;
        // SAFETY: a block's keys reach `width` tokens from each vector's first; queries and scores are in the scratch.
        unsafe {
            let mut keys = [span.keys[0]; C];
            for (c, keys) in keys.iter_mut().enumerate() {
                let token = token + c * width;
                *keys = span.keys[token / span.run].add(token % span.run);
            }
            let queries = self.scratch.queries.as_ptr().add(query * head_dim);
            let mut sums = [[L::splat(0.0); C]; R];
            for d in 0..head_dim {
                let mut key = [L::splat(0.0); C];
                for (key, keys) in key.iter_mut().zip(keys) {
                    *key = load_some::<L, E>(keys.add(d * block_size), width);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let number = L::splat(*queries.add(r * head_dim + d));
                    for (sum, key) in sums.iter_mut().zip(key) {
                        *sum = L::fma(number, key, *sum);
                    }
                }
            }
            if E::SCALED {
                for c in 0..C {
                    let token = token + c * width;
                    let scale = load_some::<L, f32>(span.key_scales[token / span.run].add(token % span.run), width);
                    for sums in &mut sums {
                        sums[c] = L::mul(sums[c], scale);
                    }
                }
            }
            let scores = self.scratch.scores.as_mut_ptr().add(query * SPAN + token);
            for (r, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    store_some::<L>(scores.add(r * SPAN + c * width), sum, width);
                }
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
        let value_dim = self.args.shape.value_dim();
        let position = self.scratch.range[query].end - 1;
        let scores = &mut self.scratch.scores[query * SPAN..][..SPAN];
        if self.args.shape.alibi.is_some() {
            for (token, score) in scores.iter_mut().enumerate().take(end).skip(first) {
                *score -= self.scratch.slope[query] * (position - (span + token)) as f32;
            }
        }
        // SAFETY: SPAN is a multiple of every path's lanes; `load_some` and `store_some` bound the sums' ends.
        unsafe {
            if let Some(cap) = self.args.shape.soft_cap {
                elementwise::soft_cap::<L>(&mut scores[first..end], cap);
            }
            scores[..first].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
            let old = self.scratch.max[query];
            let new = lanes::greatest::<L>(scores, old);
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
            for chunk in self.scratch.sums[query * value_dim..][..value_dim].chunks_mut(L::N) {
                let sum = load_some::<L, f32>(chunk.as_ptr(), chunk.len());
                store_some::<L>(chunk.as_mut_ptr(), L::mul(sum, kept), chunk.len());
            }
        }
    }

    /// probability[query][token] *= the scale of the token's V
    #[inline(always)]
    fn scale_shares<L: Lanes>(&mut self, query: usize, span: &Span<E>) {
        let width = L::N.min(span.run);
        let mut token = 0;
        while token < span.len {
            // SAFETY: a block's scales, and the query's scores, reach `width` tokens from each vector's first.
            unsafe {
                let scale = load_some::<L, f32>(span.value_scales[token / span.run].add(token % span.run), width);
                let shares = self.scratch.scores.as_mut_ptr().add(query * SPAN + token);
                store_some::<L>(shares, L::mul(load_some::<L, f32>(shares, width), scale), width);
            }
            token += width;
        }
    }

    /// sums[query] += probability . V, for each query over its own tokens of the span.
    #[inline(always)]
    fn accumulate<L: Lanes>(&mut self, span: &Span<E>) {
        const R: usize = 4;
        let queries = self.queries();
        for query in (0..queries / R * R).step_by(R) {
            let mut ranges = [Range::default(); R];
            ranges.copy_from_slice(&self.scratch.range[query..query + R]);
            let (mut first, mut end) = (0, span.len);
            for range in &mut ranges {
                *range = range.within(span.start, span.len);
                (first, end) = (first.max(range.first), end.min(range.end));
            }
            let end = end.max(first);
            // The tokens that all of them see go together; those before and after, one query at a time.
            for (r, range) in ranges.iter().enumerate() {
                self.add_values::<L, 1>(span, query + r, Range { first: range.first, end: range.end.min(first) });
            }
            self.add_values::<L, R>(span, query, Range { first, end });
            for (r, range) in ranges.iter().enumerate() {
                self.add_values::<L, 1>(span, query + r, Range { first: range.first.max(end), end: range.end });
            }
        }
        for query in queries / R * R..queries {
            self.add_values::<L, 1>(span, query, self.scratch.range[query].within(span.start, span.len));
        }
    }

    #[inline(always)]
    fn add_values<L: Lanes, const R: usize>(&mut self, span: &Span<E>, query: usize, tokens: Range) {
        if tokens.first >= tokens.end {
            return;
        }
        let head_dim = self.args.shape.value_dim();
        let mut dim = 0;
        // SAFETY: dimensions are inside the head, tokens inside the span, query + R <= queries.
        unsafe {
            if L::N == 16 {
                while dim + 4 * L::N <= head_dim {
                    self.add_values_at::<L, R, 4>(span, query, tokens, dim, 4 * L::N);
                    dim += 4 * L::N;
                }
            }
            while dim + 2 * L::N <= head_dim {
                self.add_values_at::<L, R, 2>(span, query, tokens, dim, 2 * L::N);
                dim += 2 * L::N;
            }
            while dim < head_dim {
                self.add_values_at::<L, R, 1>(span, query, tokens, dim, L::N.min(head_dim - dim));
                dim += L::N;
            }
        }
    }

    /// `R` queries by `C` vectors of dimensions from `dim`, the last of them `width - (C - 1) * N` long.
    #[inline(always)]
    unsafe fn add_values_at<L: Lanes, const R: usize, const C: usize>(
        &mut self,
        span: &Span<E>,
        query: usize,
        tokens: Range,
        dim: usize,
        width: usize,
    ) {
        let (head_dim, value_dim) = (self.args.kv.shape.head_dim, self.args.shape.value_dim());
        // SAFETY: the caller's contract; `width` bounds the short end of a head.
        unsafe {
            let shares = self.scratch.scores.as_ptr().add(query * SPAN);
            let out = self.scratch.sums.as_mut_ptr().add(query * value_dim + dim);
            let mut sums = [[L::splat(0.0); C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = load_some::<L, f32>(out.add(r * value_dim + c * L::N), width - c * L::N);
                }
            }
            let mut token = tokens.first;
            while token < tokens.end {
                let part = token / span.run;
                let stop = tokens.end.min((part + 1) * span.run);
                let values = span.values[part].wrapping_add(dim).wrapping_sub(part * span.run * head_dim);
                for token in token..stop {
                    let mut value = [L::splat(0.0); C];
                    for (c, value) in value.iter_mut().enumerate() {
                        *value = load_some::<L, E>(values.wrapping_add(token * head_dim + c * L::N), width - c * L::N);
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let share = L::splat(*shares.add(r * SPAN + token));
                        for (sum, value) in sums.iter_mut().zip(value) {
                            *sum = L::fma(share, value, *sum);
                        }
                    }
                }
                token = stop;
            }
            for (r, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    store_some::<L>(out.add(r * value_dim + c * L::N), sum, width - c * L::N);
                }
            }
        }
    }

    /// out[row][head] = sums / weight
    #[inline(always)]
    fn finish<L: Lanes>(&mut self) {
        let (value_dim, out_width) = (self.args.shape.value_dim(), self.args.shape.out_width());
        for query in 0..self.queries() {
            let (row, head) = self.row_and_head(query);
            let sums = &self.scratch.sums[query * value_dim..][..value_dim];
            // SAFETY: row and head are inside `out`, and this task's alone.
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
