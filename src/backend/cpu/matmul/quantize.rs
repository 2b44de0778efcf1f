//! Quantization of numbers to scaled integers.

use half::f16;

use super::super::lanes::{Lanes, ROUNDER, folded, greatest_magnitude};

/// Stored code of the number 0.
pub const INT8_ZERO: u32 = 128;
pub const INT4_ZERO: u32 = 8;

/// Weights that are processed side by side. Divides every group size.
const AT_ONCE: usize = 16;
/// Numbers below are quantized to 0, because the inverse of their scale would overflow.
const MIN_MAGNITUDE: f32 = 1e-30;
/// Least-squares fits of an asymmetric int4 grid, one after the other.
const FITS: usize = 2;

/// Quantizes activations that share a scale to -127..=127, to the nearest. Returns the scale.
#[inline(always)]
pub fn signed(x: &[f32], out: &mut [u8]) -> f32 {
    let max_abs = greatest_magnitude(x);
    let (scale, inverse) = if max_abs < MIN_MAGNITUDE { (0.0, 0.0) } else { (max_abs / 127.0, 127.0 / max_abs) };
    for (x, out) in x.iter().zip(out) {
        *out = (x * inverse + ROUNDER).to_bits() as u8;
    }
    scale
}

/// Returns the scale of a row of weights, from its greatest magnitude to 127.
#[inline(always)]
pub fn int8_scale(max_abs: f32) -> f32 {
    max_abs / 127.0
}

/// Quantizes weights of such a row, with `INT8_ZERO` added.
#[inline(always)]
pub fn int8(x: &[f32], scale: f32, out: &mut [u8]) {
    let inverse = inverse_of(scale);
    for (x, out) in x.iter().zip(out) {
        *out = (x * inverse + ROUNDER).to_bits() as u8 ^ INT8_ZERO as u8;
    }
}

/// Returns false if scales and offsets in f16 cannot represent a group of weights.
#[inline(always)]
pub fn fits_int4(x: &[f32]) -> bool {
    f16::from_f32(2.0 * greatest_magnitude(x)).is_finite()
}

/// Quantizes a group of weights to 0..=15. Returns (scale, offset). Without offsets, `INT4_ZERO`
/// represents 0, and the offset is 0.
///
/// # Safety
/// As for `Lanes`. The same applies to all functions below.
#[inline(always)]
pub unsafe fn int4<L: Lanes>(x: &[f32], offsets: bool, out: &mut [u8]) -> (f16, f16) {
    // SAFETY: the caller upholds this function's contract.
    unsafe { if offsets { int4_with_offset::<L>(x, out) } else { (int4_around_zero::<L>(x, out), f16::ZERO) } }
}

/// Quantizes a group of weights to 0..=15, with `INT4_ZERO` as 0. Of two scales, it chooses the one
/// with the smaller squared error: one maps the greatest magnitude to 7 steps, the other to 8 steps
/// on the negative side.
#[inline(always)]
unsafe fn int4_around_zero<L: Lanes>(x: &[f32], out: &mut [u8]) -> f16 {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (min, max) = ends::<L>(x);
        let furthest = if max > -min { max } else { min };
        let mut best = Nearest::new::<L>(x, Grid::symmetric(f16::from_f32(furthest.abs() / 7.0)));
        best.compare::<L>(x, Grid::symmetric(f16::from_f32(furthest / -8.0)));
        to_int4::<L>(x, best.grid, out);
        best.grid.scale
    }
}

/// Quantizes a group of weights to 0..=15, where 0 represents the offset. Returns (scale, offset).
///
/// Of several grids, it chooses the one with the smallest squared error. The first one spans all
/// weights. Each of the others is the best one so far after a least-squares fit.
#[inline(always)]
unsafe fn int4_with_offset<L: Lanes>(x: &[f32], out: &mut [u8]) -> (f16, f16) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (min, max) = ends::<L>(x);
        let mut best = Nearest::new::<L>(x, Grid::asymmetric((max - min) / 15.0, min));
        for _ in 0..FITS {
            if !best.compare::<L>(x, best.grid.fitted::<L>(x)) {
                break; // the next fit would be the same
            }
        }
        to_int4::<L>(x, best.grid, out);
        (best.grid.scale, best.grid.offset)
    }
}

/// The vectors of the `AT_ONCE` weights that are processed side by side. The number of lanes is the
/// same on every path, so that sums have the same order. A path with 16 lanes uses the first vector
/// only.
type Wide<L> = [<L as Lanes>::V; 2];

/// Stores the lanes of a wide vector to an array.
#[inline(always)]
unsafe fn lanes_of<L: Lanes>(wide: Wide<L>) -> [f32; AT_ONCE] {
    const { assert!(L::N == AT_ONCE || 2 * L::N == AT_ONCE, "a group must fill one or two vectors") };
    let mut lanes = [0.0; AT_ONCE];
    for (lanes, vector) in lanes.chunks_exact_mut(L::N).zip(wide) {
        // SAFETY: the caller upholds this function's contract; a chunk has space for N lanes.
        unsafe { L::store(lanes.as_mut_ptr(), vector) };
    }
    lanes
}

/// Returns minimum and maximum.
#[inline(always)]
unsafe fn ends<L: Lanes>(x: &[f32]) -> (f32, f32) {
    // SAFETY: the caller upholds this function's contract; chunks hold whole vectors.
    unsafe {
        let (mut min, mut max): (Wide<L>, Wide<L>) = ([L::splat(f32::INFINITY); 2], [L::splat(f32::NEG_INFINITY); 2]);
        for x in x.as_chunks::<AT_ONCE>().0 {
            for (i, x) in x.chunks_exact(L::N).enumerate() {
                let x = L::load(x.as_ptr());
                (min[i], max[i]) = (L::min(x, min[i]), L::max(x, max[i]));
            }
        }
        let (min, max) = (lanes_of::<L>(min), lanes_of::<L>(max));
        (folded!(min, |a, b| if b < a { b } else { a }), folded!(max, |a, b| if b > a { b } else { a }))
    }
}

#[inline(always)]
fn inverse_of(scale: f32) -> f32 {
    if scale.abs() < MIN_MAGNITUDE { 0.0 } else { 1.0 / scale }
}

/// A uniform quantization grid of sixteen numbers: `offset` plus 0 to 15 times `scale`.
#[derive(Clone, Copy)]
struct Grid {
    scale: f16,
    /// Rounded to f16 if the grid is asymmetric. Otherwise `low` is `INT4_ZERO` steps below 0.
    offset: f16,
    step: f32,
    inverse: f32,
    low: f32,
    /// The position of 0 on the grid; it need not be an integer.
    zero: f32,
}

impl Grid {
    #[inline(always)]
    fn symmetric(scale: f16) -> Grid {
        let step = scale.to_f32();
        let zero = INT4_ZERO as f32;
        Grid { scale, offset: f16::ZERO, step, inverse: inverse_of(step), low: -zero * step, zero }
    }

    /// Rounds the scale and the offset to f16.
    #[inline(always)]
    fn asymmetric(scale: f32, offset: f32) -> Grid {
        let (scale, offset) = (f16::from_f32(scale), f16::from_f32(offset));
        let (step, low) = (scale.to_f32(), offset.to_f32());
        let zero = if step == 0.0 { 0.0 } else { -low / step };
        Grid { scale, offset, step, inverse: inverse_of(step), low, zero }
    }

    /// Returns the nearest grid position of each weight, from 0 to 15, plus `ROUNDER`.
    #[inline(always)]
    unsafe fn nearest<L: Lanes>(self, x: L::V) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let place = L::add(L::mul(x, L::splat(self.inverse)), L::splat(self.zero));
            L::add(L::min(L::max(place, L::splat(0.0)), L::splat(15.0)), L::splat(ROUNDER))
        }
    }

    /// Returns the sum of squared quantization errors.
    #[inline(always)]
    unsafe fn error<L: Lanes>(self, x: &[f32]) -> f32 {
        // SAFETY: the caller upholds this function's contract; chunks hold whole vectors.
        unsafe {
            let mut errors: Wide<L> = [L::splat(0.0); 2];
            for x in x.as_chunks::<AT_ONCE>().0 {
                for (i, x) in x.chunks_exact(L::N).enumerate() {
                    let x = L::load(x.as_ptr());
                    let position = L::sub(self.nearest::<L>(x), L::splat(ROUNDER));
                    let missed = L::sub(x, L::add(L::mul(position, L::splat(self.step)), L::splat(self.low)));
                    errors[i] = L::add(errors[i], L::mul(missed, missed));
                }
            }
            sum_of::<L>(errors)
        }
    }

    /// Returns the asymmetric grid that has the smallest sum of squared errors if each weight keeps
    /// its position.
    #[inline(always)]
    unsafe fn fitted<L: Lanes>(self, x: &[f32]) -> Grid {
        // SAFETY: the caller upholds this function's contract; chunks hold whole vectors.
        unsafe {
            let nothing: Wide<L> = [L::splat(0.0); 2];
            let (mut positions, mut squares, mut weights, mut products) = (nothing, nothing, nothing, nothing);
            for x in x.as_chunks::<AT_ONCE>().0 {
                for (i, x) in x.chunks_exact(L::N).enumerate() {
                    let x = L::load(x.as_ptr());
                    let position = L::sub(self.nearest::<L>(x), L::splat(ROUNDER));
                    // Distances from the offset: sums of large weights would be inexact.
                    let weight = L::sub(x, L::splat(self.low));
                    positions[i] = L::add(positions[i], position);
                    squares[i] = L::add(squares[i], L::mul(position, position));
                    weights[i] = L::add(weights[i], weight);
                    products[i] = L::add(products[i], L::mul(position, weight));
                }
            }
            let (positions, squares) = (sum_of::<L>(positions), sum_of::<L>(squares));
            let (weights, products) = (sum_of::<L>(weights), sum_of::<L>(products));
            let count = x.len() as f32;
            let variance = count * squares - positions * positions;
            if variance <= 0.0 {
                return self; // all weights have the same position
            }
            let scale = (count * products - positions * weights) / variance;
            Grid::asymmetric(scale, self.low + (weights - scale * positions) / count)
        }
    }
}

/// The grid with the smallest sum of squared errors so far.
struct Nearest {
    grid: Grid,
    error: f32,
}

impl Nearest {
    #[inline(always)]
    unsafe fn new<L: Lanes>(x: &[f32], grid: Grid) -> Nearest {
        // SAFETY: the caller upholds this function's contract.
        Nearest { grid, error: unsafe { grid.error::<L>(x) } }
    }

    /// Keeps the earlier grid if the errors are equal. Returns true if the new one is nearer.
    #[inline(always)]
    unsafe fn compare<L: Lanes>(&mut self, x: &[f32], grid: Grid) -> bool {
        // SAFETY: the caller upholds this function's contract.
        let error = unsafe { grid.error::<L>(x) };
        let is_nearer = error < self.error;
        if is_nearer {
            *self = Nearest { grid, error };
        }
        is_nearer
    }
}

/// Returns the sum of all lanes. The order of additions is the same on every path.
#[inline(always)]
unsafe fn sum_of<L: Lanes>(wide: Wide<L>) -> f32 {
    // SAFETY: the caller upholds this function's contract.
    folded!(unsafe { lanes_of::<L>(wide) }, |a, b| a + b)
}

#[inline(always)]
unsafe fn to_int4<L: Lanes>(x: &[f32], grid: Grid, out: &mut [u8]) {
    for (x, out) in x.chunks_exact(L::N).zip(out.chunks_exact_mut(L::N)) {
        // SAFETY: the caller upholds this function's contract; chunks hold whole vectors.
        unsafe { L::store_low_bytes(out.as_mut_ptr(), grid.nearest::<L>(L::load(x.as_ptr()))) };
    }
}
