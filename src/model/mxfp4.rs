//! Matrices in MXFP4: numbers of four bits, 32 of them with a power of two in common.

use half::bf16;

use super::checkpoint::{Checkpoint, Tensor};
use crate::error::{Error, Result};

/// Numbers that share a scale.
const BLOCK: usize = 32;

/// What four bits say: a sign, two bits of exponent, one of mantissa.
const NUMBERS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The numbers and scales of `name`, if it is stored so: `{name}_blocks` and `{name}_scales`, for `[matrices, rows, cols]`.
pub fn find<'a>(checkpoint: &'a Checkpoint, name: &str, [count, rows, cols]: [usize; 3]) -> Result<Option<(&'a Tensor, &'a Tensor)>> {
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    if checkpoint.find(&blocks).is_none() {
        return Ok(None);
    }
    if !cols.is_multiple_of(BLOCK) {
        return Err(Error::model(format!("{blocks} has rows of {cols} numbers: in MXFP4 they are a multiple of {BLOCK}")));
    }
    let blocks = checkpoint.bytes(&blocks, &[count, rows, cols / BLOCK, BLOCK / 2])?;
    Ok(Some((blocks, checkpoint.bytes(&scales, &[count, rows, cols / BLOCK])?)))
}

/// Fills `out` with the numbers from `start` on, whole blocks, in bf16, which holds each of them exactly.
pub fn read(checkpoint: &Checkpoint, blocks: &Tensor, scales: &Tensor, start: usize, out: &mut [u8], piece: &mut Vec<u8>) -> Result<()> {
    let count = out.len() / size_of::<bf16>();
    let len = count / 2 + count / BLOCK;
    piece.clear();
    piece.try_reserve(len)?;
    piece.resize(len, 0);
    let (packed, powers) = piece.split_at_mut(count / 2);
    checkpoint.read(blocks, (start / 2) as u64, packed)?;
    checkpoint.read(scales, (start / BLOCK) as u64, powers)?;
    for (block, (pairs, power)) in out.chunks_exact_mut(BLOCK * size_of::<bf16>()).zip(packed.chunks_exact(BLOCK / 2).zip(powers)) {
        unpack(pairs, *power, block);
    }
    Ok(())
}

/// The lower four bits of a byte come first.
fn unpack(pairs: &[u8], power: u8, out: &mut [u8]) {
    let scale = (power as f64 - 127.0).exp2();
    for (pair, out) in pairs.iter().zip(out.chunks_exact_mut(2 * size_of::<bf16>())) {
        for (bits, out) in [pair & 15, pair >> 4].into_iter().zip(out.chunks_exact_mut(size_of::<bf16>())) {
            out.copy_from_slice(&bf16::from_f64(NUMBERS[bits as usize] as f64 * scale).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bits_and_a_power_of_two_are_a_number() {
        let mut out = [0; 4];
        for (pair, power, expected) in [(0x31, 127, [0.5, 1.5]), (0xF7, 130, [48.0, -48.0]), (0x19, 120, [-0.5 / 128.0, 0.5 / 128.0])] {
            unpack(&[pair], power, &mut out);
            let found: Vec<f32> = out.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect();
            assert_eq!(found, expected);
        }
    }
}
