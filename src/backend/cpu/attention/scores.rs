//! Attention scores: the dot products of each query with the keys of a span.

use std::ptr::null;

use super::super::kv::Cached;
use super::super::lanes::{self, Lanes, load_some, load_some_words, store_some};
use super::{Attend, LINE, MIN_BLOCK, SPAN, Span};
use crate::backend::{KvShape, Values};

/// Steps over the keys that are prefetched together.
const STEPS_PER_PREFETCH: usize = 4;

/// Addresses to prefetch while scores are computed, a few lines at a time. Blocks are scattered, so
/// the hardware prefetcher cannot predict them, and prefetching all lines at once would stall.
#[derive(Clone, Copy)]
struct Prefetcher<E> {
    /// V of the same tokens in this span.
    values: *const E,
    /// K of the tokens at the same offset in the next span.
    keys: *const E,
}

impl<E: Cached> Prefetcher<E> {
    /// Prefetches for the steps from `first` on. Keys have `row` elements per step. The values of
    /// the vector of tokens are distributed evenly over all steps, `values` elements each.
    #[inline(always)]
    fn prefetch(self, first: usize, row: usize, values: usize) {
        let line = LINE / size_of::<E>();
        for step in (0..STEPS_PER_PREFETCH).step_by((line / row).max(1)) {
            lanes::prefetch(self.keys.wrapping_add((first + step) * row));
        }
        for element in (0..STEPS_PER_PREFETCH * values).step_by(line) {
            lanes::prefetch(self.values.wrapping_add(first * values + element));
        }
    }
}

impl<E: Cached> Attend<'_, E> {
    /// scores[query][token] = query . K, for all tokens of the span.
    #[inline(always)]
    pub(super) fn score<L: Lanes>(&mut self, span: &Span<E>, next: &Span<E>) {
        if self.args.shape.values != Values::Own {
            // SAFETY: all rows of the span are stored, as `score_rows` requires.
            return unsafe { self.score_rows::<L>(span, next) };
        }
        // A block may be half a vector on the widest paths. On the other paths it is at least one
        // vector, and the constant condition below removes the code for halves and for two vectors.
        let halves = span.run == MIN_BLOCK;
        let mut token = 0;
        while token < span.len {
            // SAFETY: every vector begins inside the span, as `score_tokens` requires.
            unsafe {
                if const { L::N > MIN_BLOCK } {
                    if halves {
                        self.score_tokens::<L, 1, true>(span, next, token);
                        token += MIN_BLOCK;
                        continue;
                    }
                    if token + L::N < span.len {
                        self.score_tokens::<L, 2, false>(span, next, token);
                        token += 2 * L::N;
                        continue;
                    }
                }
                self.score_tokens::<L, 1, false>(span, next, token);
                token += L::N;
            }
        }
    }

    /// Computes the scores if keys have the layout of values, `[token][dim]`: each score is summed
    /// over the vectors of a row. Prefetches the next span's rows.
    #[inline(always)]
    unsafe fn score_rows<L: Lanes>(&mut self, span: &Span<E>, next: &Span<E>) {
        const R: usize = 4;
        let (queries, row_bytes) = (self.queries(), self.args.shape.head_dim * size_of::<E>());
        for token in (0..span.len).step_by(R) {
            for ahead in token..(token + R).min(next.len) {
                let row = next.values[ahead / next.run].wrapping_add(ahead % next.run * self.args.shape.head_dim);
                for byte in (0..row_bytes).step_by(LINE) {
                    lanes::prefetch(row.wrapping_byte_add(byte));
                }
            }
            let tokens = R.min(span.len - token);
            let mut query = 0;
            // SAFETY: query + R <= queries, and the tokens are in the span.
            unsafe {
                if const { L::ATTENTION_QUERIES >= R } {
                    while query + R <= queries && tokens == R {
                        self.score_tile_of_rows::<L, R, R>(span, token, query);
                        query += R;
                    }
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

    /// Computes the scores of `Q` queries by `T` tokens. Each score is one fixed sequence of
    /// operations, independent of the tile.
    #[inline(always)]
    unsafe fn score_tile_of_rows<L: Lanes, const Q: usize, const T: usize>(&mut self, span: &Span<E>, token: usize, query: usize) {
        let head_dim = self.args.shape.head_dim;
        // SAFETY: the caller guarantees that queries and tokens exist. `load_some` does not read
        // beyond the rows' ends.
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
                    *number = E::load::<L>(key.add(dim), 0, width);
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

    /// Computes the scores of all queries for `C` vectors of tokens, or for half a vector. The
    /// first tile of queries also prefetches.
    #[inline(always)]
    unsafe fn score_tokens<L: Lanes, const C: usize, const HALF: bool>(&mut self, span: &Span<E>, next: &Span<E>, token: usize) {
        let queries = self.queries();
        let mut ahead = [Prefetcher { values: null(), keys: null() }; C];
        for (c, ahead) in ahead.iter_mut().enumerate() {
            *ahead = self.ahead(span, next, token + c * L::N);
        }
        let mut query = 0;
        macro_rules! tiles_of {
            ($rows:literal) => {
                while const { L::ATTENTION_QUERIES >= $rows } && queries - query >= $rows {
                    // SAFETY: query + $rows <= queries. The caller guarantees the tokens.
                    unsafe {
                        match query {
                            0 => self.score_tile::<L, $rows, C, HALF, true>(span, token, query, ahead),
                            _ => self.score_tile::<L, $rows, C, HALF, false>(span, token, query, ahead),
                        }
                    }
                    query += $rows;
                }
            };
        }
        tiles_of!(8);
        tiles_of!(4);
        tiles_of!(3);
        tiles_of!(2);
        tiles_of!(1);
    }

    #[inline(always)]
    fn ahead(&self, span: &Span<E>, next: &Span<E>, token: usize) -> Prefetcher<E> {
        let values = span.values[token / span.run].wrapping_add(token % span.run * self.args.shape.head_dim);
        // If the next span is shorter, prefetch this span's keys again: they are cached, so it
        // costs nothing.
        let of_keys = if token < next.len { next } else { span };
        if E::SCALED {
            lanes::prefetch(span.value_scales[token / span.run]);
            lanes::prefetch(of_keys.key_scales[token / span.run]);
        }
        Prefetcher { values, keys: of_keys.keys[token / span.run].wrapping_add(token % span.run * E::DEPTH) }
    }

    #[inline(always)]
    unsafe fn score_tile<L: Lanes, const R: usize, const C: usize, const HALF: bool, const AHEAD: bool>(
        &mut self,
        span: &Span<E>,
        token: usize,
        query: usize,
        ahead: [Prefetcher<E>; C],
    ) {
        let KvShape { block_size, head_dim, .. } = self.args.kv.shape;
        // A compile-time constant: with a variable width, the compiler does not keep the sums in
        // registers.
        let width = if HALF { MIN_BLOCK } else { L::N };
        let (steps, row) = (head_dim / E::DEPTH, block_size * E::DEPTH);
        // SAFETY: a block's keys have `width` valid tokens from each vector's first. Queries and
        // scores are in the scratch.
        unsafe {
            let mut keys = [span.keys[0]; C];
            for (c, keys) in keys.iter_mut().enumerate() {
                let token = token + c * width;
                *keys = span.keys[token / span.run].wrapping_add(token % span.run * E::DEPTH);
            }
            let queries = self.scratch.queries.as_ptr().add(query * head_dim);
            let mut sums = [[L::splat(0.0); C]; R];
            for first in (0..steps).step_by(STEPS_PER_PREFETCH) {
                if AHEAD {
                    for ahead in ahead {
                        ahead.prefetch(first, row, width * E::DEPTH);
                    }
                }
                for step in first..steps.min(first + STEPS_PER_PREFETCH) {
                    let query = queries.add(step * if Self::in_pairs::<L>() { 1 } else { E::DEPTH });
                    Self::add_step::<L, R, C>(&mut sums, query, head_dim, keys, width);
                    for keys in &mut keys {
                        *keys = keys.wrapping_add(row);
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

    /// Adds the products of one step over the keys. `query` points to the first query's numbers of
    /// this step; consecutive queries are `pitch` apart.
    #[inline(always)]
    unsafe fn add_step<L: Lanes, const R: usize, const C: usize>(
        sums: &mut [[L::V; C]; R],
        query: *const f32,
        pitch: usize,
        keys: [*const E; C],
        width: usize,
    ) {
        // SAFETY: the contract of `score_tile` covers these accesses.
        unsafe {
            if Self::in_pairs::<L>() {
                let mut key = [L::splat_word(0); C];
                for (key, keys) in key.iter_mut().zip(keys) {
                    *key = load_some_words::<L>(keys.cast(), width);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let pair = L::splat_word(*query.add(r * pitch).cast::<u32>());
                    for (sum, key) in sums.iter_mut().zip(key) {
                        *sum = L::fma_pairs(pair, key, *sum);
                    }
                }
                return;
            }
            for k in 0..E::DEPTH {
                let mut key = [L::splat(0.0); C];
                for (key, keys) in key.iter_mut().zip(keys) {
                    *key = E::load::<L>(keys, k, width);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let number = L::splat(*query.add(r * pitch + k));
                    for (sum, key) in sums.iter_mut().zip(key) {
                        *sum = L::fma(number, key, *sum);
                    }
                }
            }
        }
    }
}
