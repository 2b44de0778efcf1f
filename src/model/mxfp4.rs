//! Matrices in MXFP4: 4-bit numbers in blocks of 32 with a common power of two as scale.

use half::bf16;

use super::checkpoint::{Checkpoint, Tensor};
use crate::error::{Error, Result, try_vec};

/// Numbers per scale.
pub const BLOCK: usize = 32;

/// The values of FP4 E2M1: one sign bit, two exponent bits, one mantissa bit.
const NUMBERS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the numbers and scales of `name` if it is stored in MXFP4: `{name}_blocks` and
/// `{name}_scales`, for `[matrices, rows, cols]`.
pub fn find<'a>(checkpoint: &'a Checkpoint, name: &str, [count, rows, cols]: [usize; 3]) -> Result<Option<(&'a Tensor, &'a Tensor)>> {
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    if checkpoint.find(&blocks).or(checkpoint.find(&scales)).is_none() {
        return Ok(None);
    }
    if !cols.is_multiple_of(BLOCK) {
        return Err(Error::model(format!("{blocks} has rows of {cols} numbers, which is not a multiple of {BLOCK}")));
    }
    let blocks = checkpoint.bytes(&blocks, &[count, rows, cols / BLOCK, BLOCK / 2])?;
    Ok(Some((blocks, checkpoint.bytes(&scales, &[count, rows, cols / BLOCK])?)))
}

/// The largest scale whose numbers fit bf16. The byte 255 represents NaN.
const MAX_SCALE: u8 = 252;

/// Rows of a matrix in its file. The first begins at element `start`, and consecutive rows are
/// `step` rows apart.
pub struct StridedRows<'a> {
    pub blocks: &'a Tensor,
    pub scales: &'a Tensor,
    pub start: usize,
    pub cols: usize,
    pub step: usize,
}

impl StridedRows<'_> {
    /// Fills `out` with whole rows in bf16, which represents each number exactly. Reads the rows in
    /// between too, in one call.
    pub fn read(&self, checkpoint: &Checkpoint, out: &mut [u8]) -> Result<()> {
        let (packed_row, scales_row) = (self.cols / 2, self.cols / BLOCK);
        let rows = (out.len() / size_of::<bf16>() / self.cols).saturating_sub(1) * self.step + 1;
        let mut piece = try_vec(rows * (packed_row + scales_row), 0u8)?;
        let (packed, powers) = piece.split_at_mut(rows * packed_row);
        checkpoint.read(self.blocks, (self.start / 2) as u64, packed)?;
        checkpoint.read(self.scales, (self.start / BLOCK) as u64, powers)?;
        let stored = packed.chunks_exact(packed_row).zip(powers.chunks_exact(scales_row)).step_by(self.step);
        for (out, (packed, powers)) in out.chunks_exact_mut(self.cols * size_of::<bf16>()).zip(stored) {
            unpack_row(packed, powers, out)?;
        }
        Ok(())
    }
}

fn unpack_row(packed: &[u8], powers: &[u8], out: &mut [u8]) -> Result<()> {
    let blocks = out.chunks_exact_mut(BLOCK * size_of::<bf16>()).zip(packed.chunks_exact(BLOCK / 2));
    for ((out, pairs), &power) in blocks.zip(powers) {
        if power > MAX_SCALE {
            return Err(Error::model(format!("an MXFP4 scale is too large for bf16 (byte {power}, limit {MAX_SCALE})")));
        }
        let scale = (power as f32 - 127.0).exp2();
        let numbers = NUMBERS.map(|number| bf16::from_f32(number * scale).to_le_bytes());
        // The low four bits of a byte come first.
        for (pair, out) in pairs.iter().zip(out.as_chunks_mut::<4>().0) {
            let ([a, b], [c, d]) = (numbers[(pair & 15) as usize], numbers[(pair >> 4) as usize]);
            *out = [a, b, c, d];
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bits_and_an_exponent_give_the_number() {
        let unpacked = |pair: u8, power: u8| {
            let mut out = [0; 2 * BLOCK];
            unpack_row(&[pair; BLOCK / 2], &[power], &mut out)?;
            let numbers: Vec<f32> = out.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect();
            assert!(numbers.chunks_exact(2).all(|pair| pair == &numbers[..2]));
            Ok::<_, Error>([numbers[0], numbers[1]])
        };
        assert_eq!(unpacked(0x31, 127).unwrap(), [0.5, 1.5]);
        assert_eq!(unpacked(0xF7, 130).unwrap(), [48.0, -48.0]);
        assert_eq!(unpacked(0x19, 120).unwrap(), [-0.5 / 128.0, 0.5 / 128.0]);
        // The extremes: subnormals of bf16, and its largest power.
        assert_eq!(unpacked(0x21, 0).unwrap(), [f32::MIN_POSITIVE / 4.0, f32::MIN_POSITIVE / 2.0]);
        assert_eq!(unpacked(0x77, 252).unwrap(), [6.0 * 2f32.powi(125); 2]);
        assert!(unpacked(0x77, 253).unwrap_err().message().contains("byte 253"));
    }
}
