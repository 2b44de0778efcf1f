//! Tiles of floating-point weights.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use super::super::lanes::{Kernel, Lanes, opaque, prefetch};
use super::{AHEAD, Args, FLOAT_ROWS, Kept, LINE, PANEL, Stretch, Tiled, each_tile};

/// A floating-point storage format of weights.
pub trait Stored: Copy + 'static {
    /// Number of adjacent columns of the matrix.
    const DEPTH: usize;
    /// Bytes of `DEPTH` columns of a panel.
    const STEP_BYTES: usize;
    /// Loads vector `c` of column `k` of a step. `weights` points to the step.
    ///
    /// # Safety
    /// As for `Lanes`.
    unsafe fn column<L: Lanes>(weights: *const u8, k: usize, c: usize) -> L::V;
}

impl Stored for f32 {
    const DEPTH: usize = 1;
    const STEP_BYTES: usize = PANEL * 4;
    #[inline(always)]
    unsafe fn column<L: Lanes>(weights: *const u8, _k: usize, c: usize) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe { L::load(weights.cast::<f32>().add(c * L::N)) }
    }
}

impl Stored for f16 {
    const DEPTH: usize = 1;
    const STEP_BYTES: usize = PANEL * 2;
    #[inline(always)]
    unsafe fn column<L: Lanes>(weights: *const u8, _k: usize, c: usize) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe { L::load_f16(weights.cast::<u16>().add(c * L::N)) }
    }
}

/// Stored in pairs: one load yields two columns, and each needs one operation to become f32.
impl Stored for bf16 {
    const DEPTH: usize = 2;
    const STEP_BYTES: usize = PANEL * 4;
    #[inline(always)]
    unsafe fn column<L: Lanes>(weights: *const u8, k: usize, c: usize) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let pairs = L::load_words(weights.cast::<u32>().add(c * L::N));
            if k == 0 { L::low_bf16(pairs) } else { L::high_bf16(pairs) }
        }
    }
}

/// A task: all rows times a range of panels, in f32.
pub struct Floats<'a, S> {
    args: Args<'a>,
    panels: Range<usize>,
    stored: PhantomData<S>,
}

impl<'a, S> Floats<'a, S> {
    pub fn new(args: Args<'a>, panels: Range<usize>) -> Self {
        Floats { args, panels, stored: PhantomData }
    }
}

impl<S: Stored> Kernel for Floats<'_, S> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the arguments and panels are those of this kernel, and their contract is that of
        // `run`.
        unsafe { each_tile::<L, _>(&self, &self.args, &self.panels) };
    }
}

impl<S: Stored> Tiled for Floats<'_, S> {
    const MAX_ROWS: usize = FLOAT_ROWS;
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize, stretch: Stretch, kept: &mut Kept) {
        // SAFETY: the caller guarantees panel, rows and stretch. Rows were packed to whole steps.
        unsafe {
            let mut weights = self.args.w.panel(panel).add(stretch.first / S::DEPTH * S::STEP_BYTES);
            let mut x = self.args.rows.words(first_row).add(stretch.first * R).cast::<f32>();
            let mut sums = MaybeUninit::uninit();
            let sums = stretch.begin::<L, R, C>(kept, &mut sums);
            for _ in 0..stretch.len / S::DEPTH {
                for line in (0..S::STEP_BYTES).step_by(LINE) {
                    prefetch(weights.wrapping_add(AHEAD + line));
                }
                for k in 0..S::DEPTH {
                    // Otherwise the compiler would keep the pairs of a step for its second column,
                    // and have no registers for the sums.
                    weights = opaque(weights);
                    add_products::<S, L, R, C>(weights, k, x.add(k * R), sums);
                }
                weights = weights.add(S::STEP_BYTES);
                x = x.add(S::DEPTH * R);
            }
            if !stretch.last {
                return kept.store::<L, R, C>(sums);
            }
            self.args.store::<L, R, C>(panel, first_row, sums, kept);
        }
    }
}

/// Adds the products of column `k` of a step and `R` numbers at `x`. The registers hold the sums, the
/// numbers or the vectors of weights, whichever are fewer, and one of the others.
///
/// # Safety
/// As for `Stored::column`.
#[inline(always)]
unsafe fn add_products<S: Stored, L: Lanes, const R: usize, const C: usize>(
    weights: *const u8,
    k: usize,
    x: *const f32,
    sums: &mut [[L::V; C]; R],
) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        if const { R < C } {
            let splats: [L::V; R] = std::array::from_fn(|r| L::splat(*x.add(r)));
            for c in 0..C {
                let column = S::column::<L>(weights, k, c);
                for (sums, splat) in sums.iter_mut().zip(splats) {
                    sums[c] = L::fma(splat, column, sums[c]);
                }
            }
        } else {
            let columns: [L::V; C] = std::array::from_fn(|c| S::column::<L>(weights, k, c));
            for (r, sums) in sums.iter_mut().enumerate() {
                let splat = L::splat(*x.add(r));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = L::fma(splat, column, *sum);
                }
            }
        }
    }
}

/// A task: all rows, rounded to bf16, times a range of panels of bf16 pairs.
pub struct Pairs<'a> {
    pub args: Args<'a>,
    pub panels: Range<usize>,
}

impl Kernel for Pairs<'_> {
    const PAIRS: bool = true;
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // Only the path with pairs receives such rows. For the other paths, the body is not
        // compiled.
        if const { L::PAIRS } {
            // SAFETY: the arguments and panels are those of this kernel, and their contract is that
            // of `run`.
            unsafe { each_tile::<L, _>(&self, &self.args, &self.panels) };
        }
    }
}

impl Tiled for Pairs<'_> {
    const MAX_ROWS: usize = FLOAT_ROWS;
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize, stretch: Stretch, kept: &mut Kept) {
        const STEP_BYTES: usize = PANEL * 4;
        // SAFETY: the caller guarantees panel, rows and stretch.
        unsafe {
            let mut weights = self.args.w.panel(panel).add(stretch.first * STEP_BYTES);
            let mut x = self.args.rows.words(first_row).add(stretch.first * R);
            let mut sums = MaybeUninit::uninit();
            let sums = stretch.begin::<L, R, C>(kept, &mut sums);
            for _ in 0..stretch.len {
                for line in (0..STEP_BYTES).step_by(LINE) {
                    prefetch(weights.wrapping_add(AHEAD + line));
                }
                let mut column = [L::splat_word(0); C];
                for (c, column) in column.iter_mut().enumerate() {
                    *column = L::load_words(weights.cast::<u32>().add(c * L::N));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = L::splat_word(*x.add(r));
                    for c in 0..C {
                        sums[c] = L::fma_pairs(x, column[c], sums[c]);
                    }
                }
                weights = weights.add(STEP_BYTES);
                x = x.add(R);
            }
            if !stretch.last {
                return kept.store::<L, R, C>(sums);
            }
            self.args.store::<L, R, C>(panel, first_row, sums, kept);
        }
    }
}
