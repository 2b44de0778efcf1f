//! Storage types of quantized matrices: integer codes in blocks along the rows.

use super::options::Dtype;
use crate::error::{Error, Result};

/// A storage type of GGUF files. Numbers are stored in blocks along the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names of the format
#[allow(non_camel_case_types)]
pub enum BlockType {
    F32,
    F16,
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
    Bf16,
    Mxfp4,
}

/// A storage type with its number in files, its name, the numbers per block and the bytes per
/// block.
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

// The index of a type in the table is its discriminant.
const _: () = {
    let mut index = 0;
    while index < TYPES.len() {
        assert!(TYPES[index].0 as usize == index, "the order of the types is that of the table");
        index += 1;
    }
};

/// The meaning of the codes of a block: a number is `scale * (code - zero)`, or, without a zero,
/// `scale * code + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCodes {
    /// Bits of a code in memory: 4, 5, 6 or 8.
    pub bits: u32,
    /// Number of consecutive codes that share a scale and an offset.
    pub group: usize,
    /// The code of the number 0. None: groups have offsets.
    pub zero: Option<u32>,
}

impl BlockType {
    /// Returns all types.
    pub fn all() -> impl Iterator<Item = BlockType> {
        TYPES.iter().map(|entry| entry.0)
    }

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
        &TYPES[self as usize]
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

    /// Returns the bytes of a row of `cols` numbers, which are whole blocks.
    pub fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_len() * self.block_bytes()
    }

    /// Returns the type of numbers that are stored one by one.
    pub fn dtype(self) -> Option<Dtype> {
        match self {
            BlockType::F32 => Some(Dtype::F32),
            BlockType::F16 => Some(Dtype::F16),
            BlockType::Bf16 => Some(Dtype::Bf16),
            _ => None,
        }
    }

    /// Returns the meaning of the codes. None: the numbers are not scaled integers.
    ///
    /// Codes have at least the bits of the file. Types that are rare in files have more, so that
    /// they need no kernels of their own.
    pub fn codes(self) -> Option<BlockCodes> {
        let codes = |bits, group, zero| Some(BlockCodes { bits, group, zero });
        match self {
            BlockType::F32 | BlockType::F16 | BlockType::Bf16 | BlockType::Mxfp4 => None,
            BlockType::Q4_0 => codes(4, 32, Some(8)),
            BlockType::Q4_1 => codes(4, 32, None),
            BlockType::Q5_0 => codes(8, 32, Some(16)),
            BlockType::Q5_1 => codes(8, 32, None),
            BlockType::Q8_0 | BlockType::Iq4Nl | BlockType::Iq4Xs => codes(8, 32, Some(128)),
            BlockType::Q2_K => codes(4, 16, None),
            BlockType::Q3_K => codes(4, 16, Some(4)),
            BlockType::Q4_K => codes(4, 32, None),
            BlockType::Q5_K => codes(5, 32, None),
            BlockType::Q6_K => codes(6, 16, Some(32)),
        }
    }
}

impl BlockCodes {
    /// Returns whether groups have offsets.
    pub fn offsets(self) -> bool {
        self.zero.is_none()
    }
}
