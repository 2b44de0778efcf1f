//! Panels of blocks, as files store them: codes, scales and offsets are packed, and never rounded
//! again.
//!
//! Layout of a block of a panel of 32 outputs:
//! - If the block has several groups: `[32]` scales of the block in f16, and then `[32]` offsets.
//! - For each group:
//!   - For codes of 5 and 6 bits, one word per output with their high bits: see `high_bit`.
//!   - Codes, or their low four bits, as in int8 and int4.
//!   - `[32]` scales, and then `[32]` offsets: in f16 if the block has one group, and otherwise
//!     signed bytes, which are multiplied by those of the block.
//!
//! Types without offsets have none of the offsets.

use super::super::lanes::{Kernel, Lanes, prefetch};
use super::bytes::{BLOCK_WORDS, STEP_BYTES, high_bit};
use super::{LINE, PANEL};
use crate::backend::blocks::Block;
use crate::error::{Error, Result};
use crate::types::blocks::{BlockCodes, BlockType};

/// Prefetch distance in bytes of a row while it is packed.
const ROW_AHEAD: usize = 256;
/// Columns of the longest block.
const MAX_BLOCK: usize = 4 * BLOCK_WORDS;

/// The layout of a block of a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLayout {
    kind: BlockType,
    pub codes: BlockCodes,
}

impl BlockLayout {
    pub fn for_type(kind: BlockType) -> Result<BlockLayout> {
        match kind.codes() {
            Some(codes) => Ok(BlockLayout { kind, codes }),
            None => Err(Error::unsupported(format!("internal error: {} has no codes", kind.name()))),
        }
    }

    /// Returns whether the scale of a group is a multiple of that of its block.
    pub fn is_nested(self) -> bool {
        self.kind.block_len() > self.codes.group
    }

    /// Returns the bytes of a panel of `cols` columns.
    pub fn panel_bytes(self, cols: usize) -> usize {
        cols / self.kind.block_len() * self.block_bytes()
    }

    fn block_bytes(self) -> usize {
        self.head_bytes() + self.groups() * self.group_bytes()
    }

    fn groups(self) -> usize {
        self.kind.block_len() / self.codes.group
    }

    /// Returns 2 if groups have a scale and an offset, and 1 if they have a scale only.
    fn factors(self) -> usize {
        1 + self.codes.offsets() as usize
    }

    /// Returns the bytes before the first group.
    fn head_bytes(self) -> usize {
        if self.is_nested() { self.factors() * PANEL * 2 } else { 0 }
    }

    fn high_bytes(self) -> usize {
        if self.has_high_bits() { STEP_BYTES } else { 0 }
    }

    fn has_high_bits(self) -> bool {
        matches!(self.codes.bits, 5 | 6)
    }

    /// Returns the bytes of the codes of a group without high bits.
    fn code_bytes(self) -> usize {
        let bits = if self.codes.bits == 8 { 8 } else { 4 };
        self.codes.group * PANEL * bits / 8
    }

    fn group_bytes(self) -> usize {
        let factor_bytes = if self.is_nested() { 1 } else { 2 };
        self.high_bytes() + self.code_bytes() + self.factors() * PANEL * factor_bytes
    }

    /// Writes a block of output `n`.
    #[inline(always)]
    fn store(self, block: &Block, n: usize, out: &mut [u8]) {
        let (head, groups) = out.split_at_mut(self.head_bytes());
        if self.is_nested() {
            [block.scale, block.offset].iter().zip(head.chunks_exact_mut(2 * PANEL)).for_each(|(number, out)| {
                out.as_chunks_mut().0[n] = number.to_le_bytes();
            });
        }
        for (group, out) in groups.chunks_exact_mut(self.group_bytes()).enumerate() {
            let codes = &block.codes[group * self.codes.group..][..self.codes.group];
            let (high, out) = out.split_at_mut(self.high_bytes());
            let (low, tail) = out.split_at_mut(self.code_bytes());
            if self.has_high_bits() {
                high.as_chunks_mut().0[n] = high_bits(self.codes.bits, codes).to_le_bytes();
            }
            if self.codes.bits == 8 {
                let steps = low.as_chunks_mut::<STEP_BYTES>().0;
                steps.iter_mut().zip(codes.as_chunks::<4>().0).for_each(|(step, codes)| step.as_chunks_mut().0[n] = *codes);
            } else {
                let steps = low.as_chunks_mut::<STEP_BYTES>().0;
                for (step, codes) in steps.iter_mut().zip(codes.as_chunks::<8>().0) {
                    let eight = u64::from_le_bytes(*codes) & 0x0f0f_0f0f_0f0f_0f0f;
                    step.as_chunks_mut().0[n] = (eight as u32 | (eight >> 28) as u32).to_le_bytes();
                }
            }
            if self.is_nested() {
                let numbers = [block.group_scales[group], block.group_offsets[group]];
                numbers.iter().zip(tail.chunks_exact_mut(PANEL)).for_each(|(number, out)| out[n] = *number as u8);
            } else {
                [block.scale, block.offset].iter().zip(tail.chunks_exact_mut(2 * PANEL)).for_each(|(number, out)| {
                    out.as_chunks_mut().0[n] = number.to_le_bytes();
                });
            }
        }
    }

    /// Reads the block of output `n` that `store` wrote.
    fn load(self, panel_block: &[u8], n: usize, block: &mut Block) {
        let half = |bytes: &[u8]| half::f16::from_le_bytes(bytes.as_chunks().0[n]);
        let (head, groups) = panel_block.split_at(self.head_bytes());
        let mut numbers = [&mut block.scale, &mut block.offset];
        numbers.iter_mut().zip(head.chunks_exact(2 * PANEL)).for_each(|(number, bytes)| **number = half(bytes));
        for (group, bytes) in groups.chunks_exact(self.group_bytes()).enumerate() {
            let (high, bytes) = bytes.split_at(self.high_bytes());
            let (low, tail) = bytes.split_at(self.code_bytes());
            let high = if self.has_high_bits() { u32::from_le_bytes(high.as_chunks().0[n]) } else { 0 };
            for (k, code) in block.codes[group * self.codes.group..][..self.codes.group].iter_mut().enumerate() {
                *code = match self.codes.bits {
                    8 => low[k / 4 * STEP_BYTES + n * 4 + k % 4],
                    bits => {
                        let four = low[k / 8 * STEP_BYTES + n * 4 + k % 4] >> (k % 8 / 4 * 4) & 15;
                        let high = (high >> (k % 4 * 8)) as u8 >> high_bit(bits, k / 4) & ((1 << (bits - 4)) - 1);
                        four | high << 4
                    }
                };
            }
            if self.is_nested() {
                let mut numbers = [&mut block.group_scales[group], &mut block.group_offsets[group]];
                numbers.iter_mut().zip(tail.chunks_exact(PANEL)).for_each(|(number, bytes)| **number = bytes[n] as i8);
            } else {
                numbers.iter_mut().zip(tail.chunks_exact(2 * PANEL)).for_each(|(number, bytes)| **number = half(bytes));
            }
        }
    }

    /// Calls `visit` with the column and the number of each column of output `n`.
    pub fn visit_row(self, panel: &[u8], n: usize, mut visit: impl FnMut(usize, f32)) {
        let (mut block, mut numbers) = (Block::new(), [0.0; MAX_BLOCK]);
        let numbers = &mut numbers[..self.kind.block_len()];
        for (place, bytes) in panel.chunks_exact(self.block_bytes()).enumerate() {
            self.load(bytes, n, &mut block);
            block.numbers(self.kind, numbers);
            numbers.iter().enumerate().for_each(|(k, &number)| visit(place * self.kind.block_len() + k, number));
        }
    }
}

/// Returns the word of the high bits of a group's codes.
#[inline(always)]
fn high_bits(bits: u32, codes: &[u8]) -> u32 {
    let words = codes.as_chunks::<4>().0.iter().enumerate();
    words.fold(0, |all, (word, codes)| all | (u32::from_le_bytes(*codes) >> 4 & 0x0f0f_0f0f) << high_bit(bits, word))
}

/// The rows of one panel, as blocks of a file.
pub struct PackBlocks<'a> {
    pub layout: BlockLayout,
    pub row_bytes: usize,
    pub rows: &'a [u8], // [rows, row_bytes]
    pub panel: &'a mut [u8],
    /// Receives the first row with a scale that is not finite, and the error.
    pub refused: &'a mut Option<(usize, Error)>,
}

impl Kernel for PackBlocks<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // The compiler unrolls the loops of a constant type. All others share one copy of the code.
        match self.layout.kind {
            BlockType::Q4_0 => self.pack(BlockType::Q4_0),
            BlockType::Q8_0 => self.pack(BlockType::Q8_0),
            BlockType::Q4_K => self.pack(BlockType::Q4_K),
            BlockType::Q5_K => self.pack(BlockType::Q5_K),
            BlockType::Q6_K => self.pack(BlockType::Q6_K),
            kind => self.pack(kind),
        }
    }
}

impl PackBlocks<'_> {
    /// Packs one block of all rows at a time, so that the destination stays in the L1 cache. The
    /// hardware does not prefetch as many rows.
    #[inline(always)]
    fn pack(self, kind: BlockType) {
        let PackBlocks { layout, row_bytes, rows, panel, refused } = self;
        let layout = BlockLayout { kind, codes: kind.codes().unwrap_or(layout.codes) };
        let mut block = Block::new();
        for (place, out) in panel.chunks_exact_mut(layout.block_bytes()).enumerate() {
            for (n, row) in rows.chunks_exact(row_bytes).enumerate() {
                let bytes = &row[place * layout.kind.block_bytes()..][..layout.kind.block_bytes()];
                for line in (0..bytes.len()).step_by(LINE) {
                    prefetch(bytes.as_ptr().wrapping_add(ROW_AHEAD + line));
                }
                if let Err(error) = block.decode(layout.kind, bytes)
                    && refused.as_ref().is_none_or(|(row, _)| n < *row)
                {
                    *refused = Some((n, error));
                }
                layout.store(&block, n, out);
            }
        }
    }
}
