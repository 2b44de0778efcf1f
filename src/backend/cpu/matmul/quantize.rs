//! Numbers as whole numbers with a scale.

use half::f16;

/// What is stored for 0.
pub const INT8_ZERO: u32 = 128;
pub const INT4_ZERO: u32 = 8;

/// Adding and subtracting it rounds a small number to a whole one, which then sits in the low bits.
const ROUNDER: f32 = super::super::lanes::ROUNDER;
/// Below it everything is 0: its scale would have no inverse.
const LEAST: f32 = 1e-30;

/// The greatest absolute value; not finite where one is not.
#[inline(always)]
pub fn greatest(x: &[f32]) -> f32 {
    // As bits: what is not finite is greater than all that is.
    f32::from_bits(x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)))
}

/// Activations that share a scale, which is returned: from -127 to 127, to the nearest.
#[inline(always)]
pub fn signed(x: &[f32], out: &mut [u8]) -> f32 {
    let most = greatest(x);
    let (scale, inverse) = if most < LEAST { (0.0, 0.0) } else { (most / 127.0, 127.0 / most) };
    x.iter().zip(out).for_each(|(x, out)| *out = (x * inverse + ROUNDER).to_bits() as u8);
    scale
}

/// Of a row of weights, from -127 to 127.
pub fn int8_scale(row: &[f32]) -> f32 {
    greatest(row) / 127.0
}

/// Some weights of such a row, around `INT8_ZERO`.
pub fn int8(x: &[f32], scale: f32, out: &mut [u8]) {
    let inverse = inverse_of(scale);
    x.iter().zip(out).for_each(|(x, out)| *out = (x * inverse + ROUNDER).to_bits() as u8 ^ INT8_ZERO as u8);
}

/// A group of weights from 0 to 15 around `INT4_ZERO`: with the scale that reaches the greatest on either side, or the one that reaches one
/// step further on its side, whichever is nearer to the weights.
pub fn int4(x: &[f32], out: &mut [u8]) -> f16 {
    let furthest = x.iter().fold(0.0f32, |most, &x| if x.abs() > most.abs() { x } else { most });
    let scales = [furthest.abs() / 7.0, furthest / -8.0].map(f16::from_f32);
    let [even, further] = scales.map(|scale| error_of(x, scale.to_f32()));
    let scale = if further < even { scales[1] } else { scales[0] };
    to_int4(x, scale.to_f32(), INT4_ZERO as f32, out);
    scale
}

/// A group of weights from 0 to 15, of which 0 is the least weight: (scale, offset).
pub fn int4_with_offset(x: &[f32], out: &mut [u8]) -> (f16, f16) {
    let (least, most) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(least, most), &x| (least.min(x), most.max(x)));
    let (scale, offset) = (f16::from_f32((most - least) / 15.0), f16::from_f32(least));
    let step = scale.to_f32();
    to_int4(x, step, if step == 0.0 { 0.0 } else { -offset.to_f32() / step }, out);
    (scale, offset)
}

fn inverse_of(scale: f32) -> f32 {
    if scale.abs() < LEAST { 0.0 } else { 1.0 / scale }
}

#[inline(always)]
fn nearest(x: f32, inverse: f32, zero: f32) -> f32 {
    (x * inverse + zero).clamp(0.0, 15.0) + ROUNDER - ROUNDER
}

fn to_int4(x: &[f32], scale: f32, zero: f32, out: &mut [u8]) {
    let inverse = inverse_of(scale);
    x.iter().zip(out).for_each(|(&x, out)| *out = nearest(x, inverse, zero) as u8);
}

/// The sum of the squares by which the weights would be missed.
fn error_of(x: &[f32], scale: f32) -> f32 {
    let (inverse, zero) = (inverse_of(scale), INT4_ZERO as f32);
    let missed = |x: f32| x - (nearest(x, inverse, zero) - zero) * scale;
    x.iter().map(|&x| missed(x) * missed(x)).sum()
}
