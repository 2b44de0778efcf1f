//! The storage types of GGUF tensors, and the numbers that their blocks represent.

use half::{bf16, f16};

use crate::error::{Error, Result};

/// A storage type. Numbers are stored in blocks along the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names of the format
#[allow(non_camel_case_types)]
pub enum BlockType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// A storage type with its number in files, its name, the numbers per block and the bytes per block.
const TYPES: [(BlockType, u32, &str, usize, usize); 16] = [
    (BlockType::F32, 0, "F32", 1, 4),
    (BlockType::F16, 1, "F16", 1, 2),
    (BlockType::Q4_0, 2, "Q4_0", 32, 18),
    (BlockType::Q4_1, 3, "Q4_1", 32, 20),
    (BlockType::Q5_0, 6, "Q5_0", 32, 22),
    (BlockType::Q5_1, 7, "Q5_1", 32, 24),
    (BlockType::Q8_0, 8, "Q8_0", 32, 34),
    (BlockType::Q2_K, 10, "Q2_K", 256, 84),
    (BlockType::Q3_K, 11, "Q3_K", 256, 110),
    (BlockType::Q4_K, 12, "Q4_K", 256, 144),
    (BlockType::Q5_K, 13, "Q5_K", 256, 176),
    (BlockType::Q6_K, 14, "Q6_K", 256, 210),
    (BlockType::Iq4Nl, 20, "IQ4_NL", 32, 18),
    (BlockType::Iq4Xs, 23, "IQ4_XS", 256, 136),
    (BlockType::Bf16, 30, "BF16", 1, 2),
    (BlockType::Mxfp4, 39, "MXFP4", 32, 17),
];

impl BlockType {
    /// Returns the type with this number in files.
    pub fn from_number(number: u32) -> Result<BlockType> {
        match TYPES.iter().find(|entry| entry.1 == number) {
            Some(entry) => Ok(entry.0),
            None => {
                let known = TYPES.map(|entry| entry.2).join(", ");
                Err(Error::unsupported(format!("its storage type is {number}; supported are {known}")))
            }
        }
    }

    fn entry(self) -> &'static (BlockType, u32, &'static str, usize, usize) {
        TYPES.iter().find(|entry| entry.0 == self).expect("every type is in the table")
    }

    /// Returns the name that the format has for the type.
    pub fn name(self) -> &'static str {
        self.entry().2
    }

    /// Returns the numbers per block.
    pub fn block_len(self) -> usize {
        self.entry().3
    }

    /// Returns the bytes per block.
    pub fn block_bytes(self) -> usize {
        self.entry().4
    }

    /// Writes the numbers of whole blocks. A scale that is not finite is an error.
    ///
    /// # Panics
    ///
    /// If `bytes` are not whole blocks, or `out` has another length than their numbers.
    pub fn unpack(self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        assert!(bytes.len().is_multiple_of(self.block_bytes()), "the bytes are whole blocks");
        assert_eq!(bytes.len() / self.block_bytes() * self.block_len(), out.len(), "every number has a place");
        match self {
            BlockType::F32 => each(bytes, out, |bytes: &[u8; 4]| f32::from_le_bytes(*bytes)),
            BlockType::F16 => each(bytes, out, |bytes: &[u8; 2]| f16::from_le_bytes(*bytes).to_f32()),
            BlockType::Bf16 => each(bytes, out, |bytes: &[u8; 2]| bf16::from_le_bytes(*bytes).to_f32()),
            BlockType::Q4_0 => blocks(bytes, out, q4_0),
            BlockType::Q4_1 => blocks(bytes, out, q4_1),
            BlockType::Q5_0 => blocks(bytes, out, q5_0),
            BlockType::Q5_1 => blocks(bytes, out, q5_1),
            BlockType::Q8_0 => blocks(bytes, out, q8_0),
            BlockType::Q2_K => blocks(bytes, out, q2_k),
            BlockType::Q3_K => blocks(bytes, out, q3_k),
            BlockType::Q4_K => blocks(bytes, out, q4_k),
            BlockType::Q5_K => blocks(bytes, out, q5_k),
            BlockType::Q6_K => blocks(bytes, out, q6_k),
            BlockType::Iq4Nl => blocks(bytes, out, iq4_nl),
            BlockType::Iq4Xs => blocks(bytes, out, iq4_xs),
            BlockType::Mxfp4 => blocks(bytes, out, mxfp4),
        }
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn(&[u8; N]) -> f32) -> Result<()> {
    bytes.as_chunks::<N>().0.iter().zip(out).for_each(|(bytes, out)| *out = number(bytes));
    Ok(())
}

fn blocks<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; BYTES], &mut [f32; LEN]) -> Result<()>,
) -> Result<()> {
    bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<LEN>().0).try_for_each(|(bytes, out)| unpack(bytes, out))
}

/// Returns the f16 at a byte of a block. It is a scale or an offset.
fn scale(block: &[u8], at: usize) -> Result<f32> {
    let scale = f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    match scale.is_finite() {
        true => Ok(scale),
        false => Err(Error::model(format!("a scale of a block is {scale}; download the file again"))),
    }
}

/// Calls a function with the index and the four bits of each number: the low bits of all bytes come
/// first.
fn nibbles(bytes: &[u8], mut visit: impl FnMut(usize, u8)) {
    for (i, byte) in bytes.iter().enumerate() {
        visit(i, byte & 15);
        visit(i + bytes.len(), byte >> 4);
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) -> Result<()> {
    let d = scale(block, 0)?;
    nibbles(&block[2..], |i, q| out[i] = d * (f32::from(q) - 8.0));
    Ok(())
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) -> Result<()> {
    let (d, min) = (scale(block, 0)?, scale(block, 2)?);
    nibbles(&block[4..], |i, q| out[i] = d * f32::from(q) + min);
    Ok(())
}

/// Returns the fifth bit of each number, at its place.
fn fifth_bits(block: &[u8], at: usize) -> impl Fn(usize) -> u8 {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |i| (bits >> i & 1) as u8 * 16
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) -> Result<()> {
    let (d, fifth) = (scale(block, 0)?, fifth_bits(block, 2));
    nibbles(&block[6..], |i, q| out[i] = d * (f32::from(q + fifth(i)) - 16.0));
    Ok(())
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) -> Result<()> {
    let (d, min, fifth) = (scale(block, 0)?, scale(block, 2)?, fifth_bits(block, 4));
    nibbles(&block[8..], |i, q| out[i] = d * f32::from(q + fifth(i)) + min);
    Ok(())
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) -> Result<()> {
    let d = scale(block, 0)?;
    block[2..].iter().zip(out).for_each(|(&q, out)| *out = d * f32::from(q as i8));
    Ok(())
}

/// Sixteen groups of 16 numbers, each with a scale and an offset of four bits.
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) -> Result<()> {
    let (scales, bytes) = block.split_at(16);
    let (d, min) = (scale(block, 80)?, scale(block, 82)?);
    for (i, out) in out.iter_mut().enumerate() {
        let (half, part, byte) = (i / 128, i / 32 % 4, i % 32);
        let group = scales[i / 16];
        let q = bytes[32 * half + byte] >> (2 * part) & 3;
        *out = d * f32::from(group & 15) * f32::from(q) - min * f32::from(group >> 4);
    }
    Ok(())
}

/// Sixteen groups of 16 numbers, each with a scale of six bits. The third bit of a number is in a mask.
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) -> Result<()> {
    let (mask, rest) = block.split_at(32);
    let (bytes, rest) = rest.split_at(64);
    let d = scale(block, 108)?;
    let group_scale = |group: usize| {
        let low = rest[group % 8] >> (4 * (group / 8)) & 15;
        let high = rest[8 + group % 4] >> (2 * (group / 4)) & 3;
        d * (f32::from(low | high << 4) - 32.0)
    };
    for (i, out) in out.iter_mut().enumerate() {
        let (half, part, byte) = (i / 128, i / 32 % 4, i % 32);
        let low = bytes[32 * half + byte] >> (2 * part) & 3;
        let third = mask[byte] >> (i / 32) & 1;
        *out = group_scale(i / 16) * (f32::from(low) - if third == 0 { 4.0 } else { 0.0 });
    }
    Ok(())
}

/// Returns the scale and the offset of a group of Q4_K and Q5_K, of six bits each.
fn six_bits(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, min) = match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4),
    };
    (f32::from(scale), f32::from(min))
}

/// Eight groups of 32 numbers. The groups of a pair have the low and the high bits of the same bytes.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) -> Result<()> {
    let (d, min) = (scale(block, 0)?, scale(block, 2)?);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (group_scale, group_min) = six_bits(&block[4..16], group);
        let (d, min) = (d * group_scale, min * group_min);
        let bytes = &block[16 + group / 2 * 32..][..32];
        let shift = group % 2 * 4;
        bytes.iter().zip(out).for_each(|(byte, out)| *out = d * f32::from(byte >> shift & 15) - min);
    }
    Ok(())
}

/// As Q4_K. The fifth bits of all groups are in 32 bytes, a bit per group.
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) -> Result<()> {
    let (d, min) = (scale(block, 0)?, scale(block, 2)?);
    let fifth = &block[16..48];
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (group_scale, group_min) = six_bits(&block[4..16], group);
        let (d, min) = (d * group_scale, min * group_min);
        let bytes = &block[48 + group / 2 * 32..][..32];
        let shift = group % 2 * 4;
        for ((byte, fifth), out) in bytes.iter().zip(fifth).zip(out) {
            let q = byte >> shift & 15 | (fifth >> group & 1) << 4;
            *out = d * f32::from(q) - min;
        }
    }
    Ok(())
}

/// Sixteen groups of 16 numbers, each with a scale of eight bits.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) -> Result<()> {
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    let d = scale(block, 208)?;
    for (i, out) in out.iter_mut().enumerate() {
        let (half, part, byte) = (i / 128, i / 32 % 4, i % 32);
        let four = low[64 * half + 32 * (part % 2) + byte] >> (4 * (part / 2)) & 15;
        let two = high[32 * half + byte] >> (2 * part) & 3;
        *out = d * f32::from(scales[i / 16] as i8) * (f32::from(four | two << 4) - 32.0);
    }
    Ok(())
}

/// The numbers of IQ4_NL and IQ4_XS, which are closer to each other around zero.
const UNEVEN: [f32; 16] = [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) -> Result<()> {
    let d = scale(block, 0)?;
    nibbles(&block[2..], |i, q| out[i] = d * UNEVEN[usize::from(q)]);
    Ok(())
}

/// Eight groups of 32 numbers, each with a scale of six bits.
fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) -> Result<()> {
    let d = scale(block, 0)?;
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let high = (high >> (2 * group) & 3) as u8;
        let d = d * (f32::from(low | high << 4) - 32.0);
        nibbles(&block[8 + 16 * group..][..16], |i, q| out[i] = d * UNEVEN[usize::from(q)]);
    }
    Ok(())
}

/// The numbers of FP4 E2M1, doubled. The sign of zero is lost, as in the reference.
const DOUBLED_FP4: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) -> Result<()> {
    if block[0] == u8::MAX {
        return Err(Error::model("a scale of a block is NaN; download the file again"));
    }
    // Half of the scale, which is 2 to the power of the byte minus 127.
    let d = (f64::from(block[0]) - 128.0).exp2() as f32;
    nibbles(&block[1..], |i, q| out[i] = d * DOUBLED_FP4[usize::from(q)]);
    Ok(())
}
