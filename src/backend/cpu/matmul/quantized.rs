//! Rows of numbers in the integer formats, for backends with layouts of their own. Their codes and
//! scales are those of the panels.

use half::f16;

use super::super::lanes::{Kernel, Lanes, greatest_magnitude};
use super::quantize::{self, INT8_ZERO};
use crate::types::options::Isa;

/// Quantizes a row to int8: codes of -127 to 127 as bytes. Returns the scale. None: a number is not
/// finite.
pub fn int8_row(row: &[f32], codes: &mut [u8]) -> Option<f32> {
    let scale = quantize::int8_scale(greatest_magnitude(row));
    quantize::int8(row, scale, codes);
    codes.iter_mut().for_each(|code| *code ^= INT8_ZERO as u8);
    scale.is_finite().then_some(scale)
}

/// A row in int4.
#[derive(Default)]
pub struct Int4Row {
    /// From 0 to 15. Without offsets, 8 represents 0.
    pub codes: Vec<u8>,
    /// The scale and the offset of each group. The offset is 0 without offsets.
    pub scales: Vec<(f16, f16)>,
}

impl Int4Row {
    /// Quantizes a row of whole groups. Returns false if the scales cannot represent a number.
    pub fn quantize(&mut self, row: &[f32], group: usize, offsets: bool) -> bool {
        self.codes.resize(row.len(), 0);
        self.scales.clear();
        // SAFETY: the CPU has the features of the detected path.
        unsafe { Isa::detect().run(Quantize { row, group, offsets, to: self }) };
        row.chunks_exact(group).all(quantize::fits_int4)
    }
}

struct Quantize<'a> {
    row: &'a [f32],
    group: usize,
    offsets: bool,
    to: &'a mut Int4Row,
}

impl Kernel for Quantize<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Quantize { row, group, offsets, to } = self;
        for (numbers, codes) in row.chunks_exact(group).zip(to.codes.chunks_exact_mut(group)) {
            // SAFETY: the caller guarantees the CPU features of `L`.
            to.scales.push(unsafe { quantize::int4::<L>(numbers, offsets, codes) });
        }
    }
}
