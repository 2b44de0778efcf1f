//! Quantized blocks of files: their codes, and the numbers that they represent.

use half::f16;

use crate::error::{Error, Result};
use crate::types::blocks::BlockType;

/// Maximum of codes per block, and of groups.
const MAX_CODES: usize = 256;
const MAX_GROUPS: usize = 16;

/// A block of integer codes. `BlockType::codes` has the group size and the code of 0.
///
/// The scale of a group is the block's scale times an integer, and so is its offset. The products
/// are exact in f32. In a block of one group, the integers are 1. Files that subtract an offset
/// have it negated here.
pub struct Block {
    pub codes: [u8; MAX_CODES],
    pub scale: f16,
    pub offset: f16,
    pub group_scales: [i8; MAX_GROUPS],
    pub group_offsets: [i8; MAX_GROUPS],
}

impl Block {
    pub fn new() -> Block {
        Block { codes: [0; MAX_CODES], scale: f16::ZERO, offset: f16::ZERO, group_scales: [1; MAX_GROUPS], group_offsets: [1; MAX_GROUPS] }
    }

    /// Decodes a block. Codes beyond its length keep their values.
    ///
    /// Errors: `Model` if a scale is not finite.
    ///
    /// # Panics
    ///
    /// If the type has no codes, or `bytes` is not one block.
    #[inline(always)]
    pub fn decode(&mut self, kind: BlockType, bytes: &[u8]) -> Result<()> {
        match kind {
            BlockType::Q4_0 => self.q4_0(whole(bytes)),
            BlockType::Q4_1 => self.q4_1(whole(bytes)),
            BlockType::Q5_0 => self.q5_0(whole(bytes)),
            BlockType::Q5_1 => self.q5_1(whole(bytes)),
            BlockType::Q8_0 => self.q8_0(whole(bytes)),
            BlockType::Q2_K => self.q2_k(whole(bytes)),
            BlockType::Q3_K => self.q3_k(whole(bytes)),
            BlockType::Q4_K => self.q4_k(whole(bytes)),
            BlockType::Q5_K => self.q5_k(whole(bytes)),
            BlockType::Q6_K => self.q6_k(whole(bytes)),
            BlockType::Iq4Nl => self.iq4_nl(whole(bytes)),
            BlockType::Iq4Xs => self.iq4_xs(whole(bytes)),
            BlockType::F32 | BlockType::F16 | BlockType::Bf16 | BlockType::Mxfp4 => {
                unreachable!("{} has no codes", kind.name())
            }
        }
        match self.scale.is_finite() && self.offset.is_finite() {
            true => Ok(()),
            false => Err(not_finite(self.scale, self.offset)),
        }
    }

    /// Writes the numbers of the codes.
    ///
    /// # Panics
    ///
    /// If the type has no codes, or `out` is longer than a block.
    pub fn numbers(&self, kind: BlockType, out: &mut [f32]) {
        let codes = kind.codes().expect("the type has codes");
        let (scale, offset) = (self.scale.to_f32(), self.offset.to_f32());
        for (group, (out, chunk)) in out.chunks_mut(codes.group).zip(self.codes.chunks(codes.group)).enumerate() {
            let scale = scale * f32::from(self.group_scales[group]);
            let pairs = out.iter_mut().zip(chunk);
            match codes.zero {
                Some(zero) => pairs.for_each(|(out, &code)| *out = scale * (f32::from(code) - zero as f32)),
                None => {
                    let offset = offset * f32::from(self.group_offsets[group]);
                    pairs.for_each(|(out, &code)| *out = scale * f32::from(code) + offset);
                }
            }
        }
    }

    fn q4_0(&mut self, block: &[u8; 18]) {
        self.scale = half(block, 0);
        self.nibbles(0, &block[2..]);
    }

    fn q4_1(&mut self, block: &[u8; 20]) {
        (self.scale, self.offset) = (half(block, 0), half(block, 2));
        self.nibbles(0, &block[4..]);
    }

    fn q5_0(&mut self, block: &[u8; 22]) {
        self.scale = half(block, 0);
        self.nibbles(0, &block[6..]);
        self.fifth_bits([block[2], block[3], block[4], block[5]]);
    }

    fn q5_1(&mut self, block: &[u8; 24]) {
        (self.scale, self.offset) = (half(block, 0), half(block, 2));
        self.nibbles(0, &block[8..]);
        self.fifth_bits([block[4], block[5], block[6], block[7]]);
    }

    fn q8_0(&mut self, block: &[u8; 34]) {
        self.scale = half(block, 0);
        self.codes.iter_mut().zip(&block[2..]).for_each(|(code, byte)| *code = byte ^ 128);
    }

    /// Sixteen groups, each with a scale and an offset of four bits.
    fn q2_k(&mut self, block: &[u8; 84]) {
        let (scales, bytes) = block.split_at(16);
        (self.scale, self.offset) = (half(block, 80), -half(block, 82));
        for (group, packed) in scales.iter().enumerate() {
            self.group_scales[group] = (packed & 15) as i8;
            self.group_offsets[group] = (packed >> 4) as i8;
        }
        self.pairs(&bytes[..64]);
    }

    /// Sixteen groups, each with a scale of six bits. The third bit of a number is in a mask.
    fn q3_k(&mut self, block: &[u8; 110]) {
        let (mask, rest) = block.split_at(32);
        let (bytes, scales) = rest.split_at(64);
        self.scale = half(block, 108);
        for group in 0..16 {
            let low = scales[group % 8] >> (4 * (group / 8)) & 15;
            let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
            self.group_scales[group] = (low | high << 4) as i8 - 32;
        }
        self.pairs(bytes);
        for (part, codes) in self.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            codes.iter_mut().zip(mask).for_each(|(code, mask)| *code |= (mask >> part & 1) << 2);
        }
    }

    /// Eight groups. The groups of a pair have the low and the high bits of the same bytes.
    fn q4_k(&mut self, block: &[u8; 144]) {
        (self.scale, self.offset) = (half(block, 0), -half(block, 2));
        self.six_bits(&block[4..16]);
        for pair in 0..4 {
            self.nibbles(64 * pair, &block[16 + 32 * pair..][..32]);
        }
    }

    /// As Q4_K. The fifth bits of all groups are in 32 bytes, a bit per group.
    fn q5_k(&mut self, block: &[u8; 176]) {
        (self.scale, self.offset) = (half(block, 0), -half(block, 2));
        self.six_bits(&block[4..16]);
        for pair in 0..4 {
            self.nibbles(64 * pair, &block[48 + 32 * pair..][..32]);
        }
        for (group, codes) in self.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            codes.iter_mut().zip(&block[16..48]).for_each(|(code, bits)| *code |= (bits >> group & 1) << 4);
        }
    }

    /// Sixteen groups, each with a scale of eight bits. The upper two bits of the codes have bytes
    /// of their own.
    fn q6_k(&mut self, block: &[u8; 210]) {
        let (low, rest) = block.split_at(128);
        let (high, scales) = rest.split_at(64);
        self.scale = half(block, 208);
        self.group_scales.iter_mut().zip(scales).for_each(|(scale, &byte)| *scale = byte as i8);
        for part in 0..8 {
            let (half, quarter) = (part / 4, part % 4);
            let four = &low[64 * half + 32 * (quarter % 2)..][..32];
            let two = &high[32 * half..][..32];
            let (four_shift, two_shift) = (4 * (quarter / 2), 2 * quarter);
            for ((code, four), two) in self.codes[32 * part..][..32].iter_mut().zip(four).zip(two) {
                *code = four >> four_shift & 15 | (two >> two_shift & 3) << 4;
            }
        }
    }

    fn iq4_nl(&mut self, block: &[u8; 18]) {
        self.scale = half(block, 0);
        self.nibbles(0, &block[2..]);
        self.codes[..32].iter_mut().for_each(|code| *code = UNEVEN[usize::from(*code)]);
    }

    /// Eight groups, each with a scale of six bits.
    fn iq4_xs(&mut self, block: &[u8; 136]) {
        self.scale = half(block, 0);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for group in 0..8 {
            let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
            let high = (high >> (2 * group) & 3) as u8;
            self.group_scales[group] = (low | high << 4) as i8 - 32;
            self.nibbles(32 * group, &block[8 + 16 * group..][..16]);
        }
        self.codes.iter_mut().for_each(|code| *code = UNEVEN[usize::from(*code)]);
    }

    /// Stores the low four bits of all bytes as codes from `first` on, and then the high four bits.
    /// There are 16 or 32 bytes. Words of eight bytes stay in registers; a loop over bytes takes two
    /// to three times as long.
    #[inline(always)]
    fn nibbles(&mut self, first: usize, bytes: &[u8]) {
        const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
        let (low, high) = self.codes[first..first + 2 * bytes.len()].split_at_mut(bytes.len());
        let codes = low.as_chunks_mut().0.iter_mut().zip(high.as_chunks_mut().0);
        for ((low, high), eight) in codes.zip(bytes.as_chunks().0) {
            let eight = u64::from_le_bytes(*eight);
            (*low, *high) = ((eight & LOW).to_le_bytes(), (eight >> 4 & LOW).to_le_bytes());
        }
    }

    /// Adds the fifth bits of 32 codes.
    #[inline(always)]
    fn fifth_bits(&mut self, bits: [u8; 4]) {
        let bits = u32::from_le_bytes(bits);
        self.codes[..32].iter_mut().enumerate().for_each(|(i, code)| *code |= (bits >> i & 1) as u8 * 16);
    }

    /// Stores codes of two bits: each 32 bytes hold four parts of 32 codes.
    #[inline(always)]
    fn pairs(&mut self, bytes: &[u8]) {
        for (part, codes) in self.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let bytes = &bytes[part / 4 * 32..][..32];
            codes.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte >> (2 * (part % 4)) & 3);
        }
    }

    /// Stores the scales and offsets of Q4_K and Q5_K, of six bits each.
    #[inline(always)]
    fn six_bits(&mut self, packed: &[u8]) {
        for group in 0..8 {
            let (scale, offset) = match group {
                0..4 => (packed[group] & 63, packed[group + 4] & 63),
                _ => (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4),
            };
            (self.group_scales[group], self.group_offsets[group]) = (scale as i8, offset as i8);
        }
    }
}

/// The codes of IQ4_NL and IQ4_XS plus 128. They are closer to each other around zero.
const UNEVEN: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

fn whole<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.try_into().expect("the bytes are one block")
}

/// Returns the f16 at a byte of a block.
fn half(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

#[cold]
fn not_finite(scale: f16, offset: f16) -> Error {
    let number = if scale.is_finite() { offset } else { scale };
    Error::model(format!("a scale of a block is {number}; download the file again"))
}

/// Writes the numbers of whole blocks. A scale that is not finite is an error.
///
/// # Panics
///
/// If `bytes` are not whole blocks, or `out` has another length than their
/// numbers.
pub fn unpack(kind: BlockType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let blocks = bytes.chunks_exact(kind.block_bytes());
    assert!(blocks.remainder().is_empty(), "the bytes are whole blocks");
    assert_eq!(blocks.len() * kind.block_len(), out.len(), "every number has a place");
    if let Some(dtype) = kind.dtype() {
        dtype.visit(bytes, |i, number| out[i] = number);
        return Ok(());
    }
    let mut block = Block::new();
    for (bytes, out) in blocks.zip(out.chunks_exact_mut(kind.block_len())) {
        match kind {
            BlockType::Mxfp4 => mxfp4(whole(bytes), out)?,
            _ => {
                block.decode(kind, bytes)?;
                block.numbers(kind, out);
            }
        }
    }
    Ok(())
}

/// The numbers of FP4 E2M1, doubled. The sign of zero is lost, as in the reference.
const DOUBLED_FP4: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

fn mxfp4(block: &[u8; 17], out: &mut [f32]) -> Result<()> {
    if block[0] == u8::MAX {
        return Err(Error::model("a scale of a block is NaN; download the file again"));
    }
    // Half of the scale, which is 2 to the power of the byte minus 127.
    let half_scale = (f64::from(block[0]) - 128.0).exp2() as f32;
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[1..]) {
        *low = half_scale * DOUBLED_FP4[usize::from(byte & 15)];
        *high = half_scale * DOUBLED_FP4[usize::from(byte >> 4)];
    }
    Ok(())
}
