//! Attention output: the sums of probabilities times the values of a span.

use super::super::kv::Cached;
use super::super::lanes::{Lanes, load_some, load_some_words, store_some};
use super::{Attend, Range, SPAN, Span};

/// Maximum number of queries of a tile.
const MAX_TILE: usize = 4;

/// Tokens of a span, divided by the queries of a tile that attend to them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Tokens before those that all queries attend to.
    Before,
    /// Tokens that all queries attend to.
    Shared,
    /// Tokens after those that all queries attend to.
    After,
}

impl<E: Cached> Attend<'_, E> {
    /// sums[query] += probability . V, for each query over the tokens of the span that it attends
    /// to.
    ///
    /// Queries are processed in tiles. Tokens that all queries of a tile attend to are processed
    /// together, in whole steps. Tokens before and after are processed one query at a time. The
    /// loops keep one call of each kernel in the code, because every call is inlined: written out,
    /// the copies took most of the library's compile time.
    #[inline(always)]
    pub(super) fn accumulate<L: Lanes>(&mut self, span: &Span<E>) {
        let (queries, mut query) = (self.queries(), 0);
        while query < queries {
            let tile = (queries - query).min(MAX_TILE).min(L::ATTENTION_QUERIES);
            let shared = self.shared_tokens(span, query, tile);
            for part in [Part::Before, Part::Shared, Part::After] {
                if part == Part::Shared {
                    // Constants, so that rustc generates no code for tiles that the path lacks.
                    match tile {
                        4 if const { L::ATTENTION_QUERIES >= 4 } => self.add_values::<L, 4, true>(span, query, shared),
                        3 if const { L::ATTENTION_QUERIES >= 3 } => self.add_values::<L, 3, true>(span, query, shared),
                        2 if const { L::ATTENTION_QUERIES >= 2 } => self.add_values::<L, 2, true>(span, query, shared),
                        _ => {}
                    }
                    continue;
                }
                for query in query..query + tile {
                    let Range { first, end } = self.scratch.range[query].within(span.start, span.len);
                    let own = match part {
                        Part::Before => Range { first, end: end.min(shared.first) },
                        _ => Range { first: first.max(shared.end), end },
                    };
                    self.add_own_values::<L>(span, query, own);
                }
            }
            query += tile;
        }
    }

    /// Returns the tokens that all queries of a tile attend to, in whole steps. A single query
    /// shares none: all its tokens then precede the result.
    #[inline(always)]
    fn shared_tokens(&self, span: &Span<E>, query: usize, tile: usize) -> Range {
        if tile == 1 {
            return Range { first: span.len, end: span.len };
        }
        let (mut first, mut end) = (0, span.len);
        for range in &self.scratch.range[query..query + tile] {
            let range = range.within(span.start, span.len);
            (first, end) = (first.max(range.first), end.min(range.end));
        }
        let first = first.next_multiple_of(E::DEPTH);
        Range { first, end: (end / E::DEPTH * E::DEPTH).max(first) }
    }

    /// Adds the values of one query. Its range of tokens may begin or end within a step.
    #[inline(always)]
    fn add_own_values<L: Lanes>(&mut self, span: &Span<E>, query: usize, Range { mut first, end }: Range) {
        let last_whole = end / E::DEPTH * E::DEPTH;
        while first < end {
            let begins_step = first.is_multiple_of(E::DEPTH) && first < last_whole;
            if const { E::DEPTH > 1 } && !begins_step {
                let next = end.min((first + 1).next_multiple_of(E::DEPTH));
                self.add_values::<L, 1, false>(span, query, Range { first, end: next });
                first = next;
            } else {
                self.add_values::<L, 1, true>(span, query, Range { first, end: last_whole });
                first = last_whole;
            }
        }
    }

    /// Adds the values of a range of tokens. With `WHOLE`, every step includes all of its tokens:
    /// the loop over steps then has no branch and keeps its sums in registers.
    #[inline(always)]
    fn add_values<L: Lanes, const R: usize, const WHOLE: bool>(&mut self, span: &Span<E>, query: usize, tokens: Range) {
        if tokens.first >= tokens.end {
            return;
        }
        let head_dim = self.args.shape.value_dim();
        let mut dim = 0;
        // SAFETY: dimensions are inside the head, tokens inside the span, and query + R <= queries.
        unsafe {
            if const { L::N == 16 } {
                while dim + 4 * L::N <= head_dim {
                    self.add_values_at::<L, R, 4, WHOLE>(span, query, tokens, dim, 4 * L::N);
                    dim += 4 * L::N;
                }
            }
            while dim + 2 * L::N <= head_dim {
                self.add_values_at::<L, R, 2, WHOLE>(span, query, tokens, dim, 2 * L::N);
                dim += 2 * L::N;
            }
            while dim < head_dim {
                self.add_values_at::<L, R, 1, WHOLE>(span, query, tokens, dim, L::N.min(head_dim - dim));
                dim += L::N;
            }
        }
    }

    /// Adds `R` queries by `C` vectors of dimensions from `dim`. The last vector has `width - (C -
    /// 1) * N` dimensions.
    #[inline(always)]
    unsafe fn add_values_at<L: Lanes, const R: usize, const C: usize, const WHOLE: bool>(
        &mut self,
        span: &Span<E>,
        query: usize,
        tokens: Range,
        dim: usize,
        width: usize,
    ) {
        let (head_dim, value_dim) = (self.args.kv.shape.head_dim, self.args.shape.value_dim());
        // SAFETY: the caller guarantees dimensions, tokens and queries. `width` bounds the short
        // end of a head.
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
                let start = span.values[part].wrapping_add(dim * E::DEPTH).wrapping_sub(part * span.run * head_dim);
                for step in token / E::DEPTH..stop.div_ceil(E::DEPTH) {
                    let values = start.wrapping_add(step * head_dim * E::DEPTH);
                    if Self::in_pairs::<L>() {
                        let pairs = shares.cast::<u32>().add(step);
                        let seen = if WHOLE { u32::MAX } else { tokens.of_pair(step) };
                        Self::add_pair_of_values::<L, R, C>(&mut sums, pairs, values, seen, width);
                        continue;
                    }
                    for k in 0..E::DEPTH {
                        if WHOLE || tokens.contains(step * E::DEPTH + k) {
                            Self::add_value::<L, R, C>(&mut sums, shares.add(step * E::DEPTH + k), values, k, width);
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

    /// Adds the product of the `k`th token of a step. `shares` points to the first query's
    /// probability; those of consecutive queries are SPAN apart.
    #[inline(always)]
    unsafe fn add_value<L: Lanes, const R: usize, const C: usize>(
        sums: &mut [[L::V; C]; R],
        shares: *const f32,
        values: *const E,
        k: usize,
        width: usize,
    ) {
        // SAFETY: the contract of `add_values_at` covers these accesses.
        unsafe {
            let mut value = [L::splat(0.0); C];
            for (c, value) in value.iter_mut().enumerate() {
                *value = E::load::<L>(values.wrapping_add(c * L::N * E::DEPTH), k, width - c * L::N);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let share = L::splat(*shares.add(r * SPAN));
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum = L::fma(share, value, *sum);
                }
            }
        }
    }

    /// Adds the products of two tokens. The mask `seen` clears the stored bits of a token outside
    /// the range: they are arbitrary, and a probability of 0 times NaN or infinity is not 0.
    #[inline(always)]
    unsafe fn add_pair_of_values<L: Lanes, const R: usize, const C: usize>(
        sums: &mut [[L::V; C]; R],
        shares: *const u32,
        values: *const E,
        seen: u32,
        width: usize,
    ) {
        // SAFETY: the contract of `add_values_at` covers these accesses.
        unsafe {
            let mut value = [L::splat_word(0); C];
            for (c, value) in value.iter_mut().enumerate() {
                *value = load_some_words::<L>(values.cast::<u32>().wrapping_add(c * L::N), width - c * L::N);
            }
            if seen != u32::MAX {
                for value in &mut value {
                    *value = L::and(*value, L::splat_word(seen));
                }
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let pair = L::splat_word(*shares.add(r * SPAN));
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum = L::fma_pairs(pair, value, *sum);
                }
            }
        }
    }
}
