//! Numbers as whole numbers with a scale.

use half::f16;

use super::super::lanes::{ROUNDER, folded, greatest_magnitude};

/// What is stored for 0.
pub const INT8_ZERO: u32 = 128;
pub const INT4_ZERO: u32 = 8;

/// Weights that are looked at side by side; it divides every group.
const AT_ONCE: usize = 16;
/// Below it everything is 0: its scale would have no inverse.
const LEAST: f32 = 1e-30;

/// Activations that share a scale, which is returned: from -127 to 127, to the nearest.
#[inline(always)]
pub fn signed(x: &[f32], out: &mut [u8]) -> f32 {
    let most = greatest_magnitude(x);
    let (scale, inverse) = if most < LEAST { (0.0, 0.0) } else { (most / 127.0, 127.0 / most) };
    for (x, out) in x.iter().zip(out) {
        *out = (x * inverse + ROUNDER).to_bits() as u8;
    }
    scale
}

/// Of a row of weights of which this is the greatest magnitude, from -127 to 127.
#[inline(always)]
pub fn int8_scale(most: f32) -> f32 {
    most / 127.0
}

/// Some weights of such a row, around `INT8_ZERO`.
#[inline(always)]
pub fn int8(x: &[f32], scale: f32, out: &mut [u8]) {
    let inverse = inverse_of(scale);
    for (x, out) in x.iter().zip(out) {
        *out = (x * inverse + ROUNDER).to_bits() as u8 ^ INT8_ZERO as u8;
    }
}

/// A group of weights from 0 to 15 around `INT4_ZERO`: with the scale that reaches the greatest on either side, or the one that reaches one
/// step further on its side, whichever is nearer to the weights.
#[inline(always)]
pub fn int4(x: &[f32], out: &mut [u8]) -> f16 {
    let (least, most) = ends(x);
    let furthest = if most > -least { most } else { least };
    let (even, further) = (f16::from_f32(furthest.abs() / 7.0), f16::from_f32(furthest / -8.0));
    let scale = if is_nearer(x, further.to_f32(), even.to_f32()) { further } else { even };
    to_int4(x, scale.to_f32(), INT4_ZERO as f32, out);
    scale
}

/// A group of weights from 0 to 15, of which 0 is the least weight: (scale, offset).
#[inline(always)]
pub fn int4_with_offset(x: &[f32], out: &mut [u8]) -> (f16, f16) {
    let (least, most) = ends(x);
    let (scale, offset) = (f16::from_f32((most - least) / 15.0), f16::from_f32(least));
    let step = scale.to_f32();
    to_int4(x, step, if step == 0.0 { 0.0 } else { -offset.to_f32() / step }, out);
    (scale, offset)
}

/// The least and the greatest.
#[inline(always)]
fn ends(x: &[f32]) -> (f32, f32) {
    let (mut least, mut most) = ([f32::INFINITY; AT_ONCE], [f32::NEG_INFINITY; AT_ONCE]);
    for x in x.as_chunks::<AT_ONCE>().0 {
        for (i, &x) in x.iter().enumerate() {
            least[i] = if x < least[i] { x } else { least[i] };
            most[i] = if x > most[i] { x } else { most[i] };
        }
    }
    folded_ends(least, most)
}

/// Folds are functions of their own: beside them the compiler would make other code of the loops before.
#[inline(never)]
fn folded_ends(least: [f32; AT_ONCE], most: [f32; AT_ONCE]) -> (f32, f32) {
    (folded!(least, |a, b| a.min(b)), folded!(most, |a, b| a.max(b)))
}

#[inline(never)]
fn folded_sum(sums: [f32; AT_ONCE]) -> f32 {
    folded!(sums, |a, b| a + b)
}

#[inline(always)]
fn inverse_of(scale: f32) -> f32 {
    if scale.abs() < LEAST { 0.0 } else { 1.0 / scale }
}

/// From 0 to 15, in the low bits.
#[inline(always)]
fn rounded(x: f32, inverse: f32, zero: f32) -> f32 {
    (x * inverse + zero).clamp(0.0, 15.0) + ROUNDER
}

#[inline(always)]
fn to_int4(x: &[f32], scale: f32, zero: f32, out: &mut [u8]) {
    let inverse = inverse_of(scale);
    for (x, out) in x.as_chunks::<AT_ONCE>().0.iter().zip(out.as_chunks_mut::<AT_ONCE>().0) {
        for (&x, out) in x.iter().zip(out) {
            *out = rounded(x, inverse, zero).to_bits() as u8;
        }
    }
}

/// Whether the weights would be missed by less with this scale than with the other, as the sums of squares have it.
#[inline(always)]
fn is_nearer(x: &[f32], scale: f32, other: f32) -> bool {
    let (inverse, inverse_of_other) = (inverse_of(scale), inverse_of(other));
    let mut more = [0.0; AT_ONCE];
    for x in x.as_chunks::<AT_ONCE>().0 {
        for (more, &x) in more.iter_mut().zip(x) {
            *more += missed(x, scale, inverse) - missed(x, other, inverse_of_other);
        }
    }
    folded_sum(more) < 0.0
}

/// The square by which a weight would be missed.
#[inline(always)]
fn missed(x: f32, scale: f32, inverse: f32) -> f32 {
    let zero = INT4_ZERO as f32;
    let missed = x - (rounded(x, inverse, zero) - (ROUNDER + zero)) * scale;
    missed * missed
}
