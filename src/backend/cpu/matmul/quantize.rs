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

/// Quantizes a group of weights to 0..=15, with `INT4_ZERO` as 0. Of two scales, it chooses the one
/// with the smaller squared error: one maps the greatest magnitude to 7 steps, the other to 8 steps
/// on the negative side.
///
/// # Safety
/// As for `Lanes`. The same applies to all functions below.
#[inline(always)]
pub unsafe fn int4<L: Lanes>(x: &[f32], out: &mut [u8]) -> f16 {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (min, max) = ends::<L>(x);
        let furthest = if max > -min { max } else { min };
        let (even, further) = (f16::from_f32(furthest.abs() / 7.0), f16::from_f32(furthest / -8.0));
        let scale = if is_nearer::<L>(x, further.to_f32(), even.to_f32()) { further } else { even };
        to_int4::<L>(x, Steps::new(scale.to_f32(), INT4_ZERO as f32), out);
        scale
    }
}

/// Quantizes a group of weights to 0..=15, where 0 represents the minimum. Returns (scale, offset).
#[inline(always)]
pub unsafe fn int4_with_offset<L: Lanes>(x: &[f32], out: &mut [u8]) -> (f16, f16) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (min, max) = ends::<L>(x);
        let (scale, offset) = (f16::from_f32((max - min) / 15.0), f16::from_f32(min));
        let step = scale.to_f32();
        to_int4::<L>(x, Steps::new(step, if step == 0.0 { 0.0 } else { -offset.to_f32() / step }), out);
        (scale, offset)
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

/// A uniform quantization grid of sixteen numbers.
#[derive(Clone, Copy)]
struct Steps {
    scale: f32,
    inverse: f32,
    /// The position of 0 on the grid; it need not be an integer.
    zero: f32,
}

impl Steps {
    #[inline(always)]
    fn new(scale: f32, zero: f32) -> Steps {
        Steps { scale, inverse: inverse_of(scale), zero }
    }

    /// Returns the nearest grid position of each weight, from 0 to 15, in the low bits.
    #[inline(always)]
    unsafe fn nearest<L: Lanes>(self, x: L::V) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let place = L::add(L::mul(x, L::splat(self.inverse)), L::splat(self.zero));
            L::add(L::min(L::max(place, L::splat(0.0)), L::splat(15.0)), L::splat(ROUNDER))
        }
    }

    /// Returns the squared quantization error of each weight.
    #[inline(always)]
    unsafe fn missed<L: Lanes>(self, x: L::V) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let from_zero = L::sub(self.nearest::<L>(x), L::splat(ROUNDER + self.zero));
            let missed = L::sub(x, L::mul(from_zero, L::splat(self.scale)));
            L::mul(missed, missed)
        }
    }
}

#[inline(always)]
unsafe fn to_int4<L: Lanes>(x: &[f32], steps: Steps, out: &mut [u8]) {
    for (x, out) in x.chunks_exact(L::N).zip(out.chunks_exact_mut(L::N)) {
        // SAFETY: the caller upholds this function's contract; chunks hold whole vectors.
        unsafe { L::store_low_bytes(out.as_mut_ptr(), steps.nearest::<L>(L::load(x.as_ptr()))) };
    }
}

/// Returns true if `scale` has a smaller sum of squared errors than `other`.
#[inline(always)]
unsafe fn is_nearer<L: Lanes>(x: &[f32], scale: f32, other: f32) -> bool {
    let (one, other) = (Steps::new(scale, INT4_ZERO as f32), Steps::new(other, INT4_ZERO as f32));
    // SAFETY: the caller upholds this function's contract; chunks hold whole vectors.
    unsafe {
        let mut more: Wide<L> = [L::splat(0.0); 2];
        for x in x.as_chunks::<AT_ONCE>().0 {
            for (i, x) in x.chunks_exact(L::N).enumerate() {
                let x = L::load(x.as_ptr());
                more[i] = L::add(more[i], L::sub(one.missed::<L>(x), other.missed::<L>(x)));
            }
        }
        folded!(lanes_of::<L>(more), |a, b| a + b) < 0.0
    }
}
