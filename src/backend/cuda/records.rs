//! Rows of quantized blocks as records of 256 numbers, whose layout `kernels/blocks.cu` describes.

use crate::backend::blocks::Block;
use crate::error::Result;
use crate::types::blocks::{BlockCodes, BlockType};

/// Numbers per record. The last record of a row is padded with zeros.
const RECORD: usize = 256;

/// The layout of the records of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Records {
    kind: BlockType,
    pub bits: u32,
    pub group: usize,
    offsets: bool,
    /// Whether the scales of groups are integers times the scale of a block.
    nested: bool,
}

impl Records {
    /// Returns the layout for a type. None: the type has no codes.
    pub fn of(kind: BlockType) -> Option<Records> {
        let codes @ BlockCodes { bits, group, .. } = kind.codes()?;
        Some(Records { kind, bits, group, offsets: codes.offsets(), nested: kind.block_len() == RECORD })
    }

    /// Returns the bytes of a record, which are whole pieces of 16.
    pub fn bytes(self) -> usize {
        (self.scales_at() + self.scale_bytes()).next_multiple_of(16)
    }

    pub fn row_bytes(self, cols: usize) -> usize {
        cols.div_ceil(RECORD) * self.bytes()
    }

    /// Returns the flags of the kernels.
    pub fn flags(self) -> u32 {
        u32::from(self.offsets) | u32::from(self.nested) << 1
    }

    /// Returns the place of the bits above the low four.
    fn high_at(self) -> usize {
        if self.bits == 8 { RECORD } else { RECORD / 2 }
    }

    fn scales_at(self) -> usize {
        match self.bits {
            5 | 6 => self.high_at() + (self.bits as usize - 4) * RECORD / 8,
            _ => self.high_at(),
        }
    }

    fn scale_bytes(self) -> usize {
        let (groups, numbers) = (RECORD / self.group, 1 + usize::from(self.offsets));
        if self.nested { 4 + numbers * groups } else { 2 * numbers * groups }
    }

    /// Stores a row. `out` is zeroed: groups beyond the end of the row have a scale of 0.
    ///
    /// Errors: `Model` if a scale is not finite.
    pub fn store_row(self, row: &[u8], out: &mut [u8]) -> Result<()> {
        let (kind, len) = (self.kind, self.kind.block_len());
        let mut block = Block::new();
        for (index, bytes) in row.chunks_exact(kind.block_bytes()).enumerate() {
            block.decode(kind, bytes)?;
            let (record, first) = (index * len / RECORD, index * len % RECORD);
            let record = &mut out[record * self.bytes()..][..self.bytes()];
            block.codes[..len].iter().enumerate().for_each(|(k, &code)| self.store_code(record, first + k, code));
            self.store_scales(&block, &mut record[self.scales_at()..], first / self.group);
        }
        Ok(())
    }

    /// Stores number `k` of a record.
    fn store_code(self, record: &mut [u8], k: usize, code: u8) {
        // Lanes have four consecutive numbers of the first 16, and of the second 16.
        let (place, pair, second) = (k / 32 * 4 + k % 16 / 4, k % 32 / 16 * 2 + k % 4 / 2, k % 2);
        let high = self.high_at();
        if self.bits == 8 {
            record[place * 8 + pair / 2 * 4 + pair % 2 + 2 * second] = code.wrapping_sub(self.zero());
            return;
        }
        // The code of 0 in four bits without offsets is 8.
        let code = if self.bits == 4 && !self.offsets { code + 8 - self.zero() } else { code };
        record[place * 4 + pair / 2 + 2 * second] |= (code & 15) << (4 * (pair % 2));
        match self.bits {
            5 => record[high + place] |= (code >> 4) << (pair + 4 * second),
            6 => record[high + place * 2 + second] |= (code >> 4) << (2 * pair),
            _ => {}
        }
    }

    /// Returns the code of 0.
    fn zero(self) -> u8 {
        self.kind.codes().and_then(|codes| codes.zero).unwrap_or(0) as u8
    }

    /// Stores the scales of a block, whose first group is this one of the record.
    fn store_scales(self, block: &Block, scales: &mut [u8], first: usize) {
        let (scale, offset) = (block.scale.to_le_bytes(), block.offset.to_le_bytes());
        if !self.nested {
            let each = 2 * (1 + usize::from(self.offsets));
            scales[first * each..][..2].copy_from_slice(&scale);
            if self.offsets {
                scales[first * each + 2..][..2].copy_from_slice(&offset);
            }
            return;
        }
        let groups = RECORD / self.group;
        scales[..2].copy_from_slice(&scale);
        scales[2..4].copy_from_slice(&offset);
        for group in 0..groups {
            scales[4 + group] = block.group_scales[group] as u8;
            if self.offsets {
                scales[4 + groups + group] = block.group_offsets[group] as u8;
            }
        }
    }
}
