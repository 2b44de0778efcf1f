//! Rows of quantized blocks, and rows in int4, as records of 256 numbers, whose layout
//! `kernels/blocks.cu` describes.

use half::f16;

use crate::backend::blocks::Block;
use crate::backend::cpu::Int4Row;
use crate::error::Result;
use crate::types::blocks::{BlockCodes, BlockType};

/// The four pairs of a lane among 32 numbers, and their first and second numbers.
const PAIRS: [(usize, usize); 8] = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)];
/// Numbers per record. The last record of a row is padded with zeros.
const RECORD: usize = 256;

/// The codes for which there are kernels, by their bits and the numbers of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codes {
    FourBy16,
    FourBy32,
    FiveBy32,
    SixBy16,
    EightBy32,
}

/// The layout of the records of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Records {
    source: Source,
    bits: u32,
    /// Numbers that share a scale in the records.
    group: usize,
    offsets: bool,
    /// Whether the scales of groups are integers times the scale of a block.
    nested: bool,
}

/// What the records are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    Blocks(BlockType),
    /// Numbers that are quantized in groups.
    Int4 {
        group: usize,
    },
}

impl Records {
    /// Numbers that share a scale in int4. Records repeat the scale of a larger group. Without
    /// offsets they have the same size with any group, because it is a multiple of 16 bytes.
    const INT4_GROUP: usize = 32;

    /// Returns the layout of weights in int4.
    pub fn of_int4(group: usize, offsets: bool) -> Records {
        Records { source: Source::Int4 { group }, bits: 4, group: Self::INT4_GROUP, offsets, nested: false }
    }

    /// Returns the layout for a type. None: the type has no codes.
    pub fn of(kind: BlockType) -> Option<Records> {
        let codes @ BlockCodes { bits, group, .. } = kind.codes()?;
        Some(Records { source: Source::Blocks(kind), bits, group, offsets: codes.offsets(), nested: kind.block_len() == RECORD })
    }

    pub fn source(self) -> Source {
        self.source
    }

    /// Returns whether groups have offsets.
    pub fn offsets(self) -> bool {
        self.offsets
    }

    pub fn codes(self) -> Codes {
        match (self.bits, self.group) {
            (4, 16) => Codes::FourBy16,
            (4, _) => Codes::FourBy32,
            (5, _) => Codes::FiveBy32,
            (6, _) => Codes::SixBy16,
            _ => Codes::EightBy32,
        }
    }

    /// Returns the bytes between records in shared memory, as `form_of` in `kernels/blocks.cu`.
    pub fn shared_pitch(self) -> usize {
        if self.bits == 8 { self.bytes().next_multiple_of(32) } else { self.bytes() | 16 }
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

    /// Returns the place of the scales, after all bits of the codes.
    fn scales_at(self) -> usize {
        self.bits as usize * RECORD / 8
    }

    fn scale_bytes(self) -> usize {
        let (groups, numbers) = (RECORD / self.group, 1 + usize::from(self.offsets));
        if self.nested { 4 + numbers * groups } else { 2 * numbers * groups }
    }

    /// Stores a row of blocks. `out` is zeroed: groups beyond the end of the row have a scale of 0.
    ///
    /// Errors: `Model` if a scale is not finite.
    pub fn store_blocks(self, kind: BlockType, row: &[u8], out: &mut [u8]) -> Result<()> {
        let len = kind.block_len();
        let (zero, bytes, scales_at) = (self.code_of_zero(kind), self.bytes(), self.scales_at());
        let mut block = Block::new();
        for (index, from) in row.chunks_exact(kind.block_bytes()).enumerate() {
            block.decode(kind, from)?;
            let (record, first) = (index * len / RECORD, index * len % RECORD);
            let record = &mut out[record * bytes..][..bytes];
            for (place, codes) in block.codes[..len].as_chunks().0.iter().enumerate() {
                self.store_codes(record, first / 32 + place, codes, zero);
            }
            self.store_scales(&block, &mut record[scales_at..], first / self.group);
        }
        Ok(())
    }

    /// Stores a row in int4. `out` is zeroed, as for `store_blocks`.
    pub fn store_int4(self, row: &Int4Row, out: &mut [u8]) {
        let (bytes, scales_at) = (self.bytes(), self.scales_at());
        let codes = row.codes.as_chunks().0;
        let each = codes.len() / row.scales.len().max(1);
        for (index, codes) in codes.iter().enumerate() {
            let place = index % (RECORD / Self::INT4_GROUP);
            let record = &mut out[index * Self::INT4_GROUP / RECORD * bytes..][..bytes];
            self.store_codes(record, place, codes, 0);
            let (scale, offset) = row.scales[index / each];
            self.store_own_scales(&mut record[scales_at..], place, scale, offset);
        }
    }

    /// Stores 32 codes. Each of four lanes has four consecutive numbers of the first 16, and four
    /// of the second 16. They are four pairs; the second numbers of pairs follow the first
    /// ones.
    #[inline(always)]
    fn store_codes(self, record: &mut [u8], thirty_two: usize, codes: &[u8; 32], zero: u8) {
        for lane in 0..4 {
            let place = thirty_two * 4 + lane;
            let of_lane = |pair: usize, second: usize| codes[pair / 2 * 16 + lane * 4 + pair % 2 * 2 + second];
            if self.bits == 8 {
                let to = &mut record[place * 8..][..8];
                for (pair, second) in PAIRS {
                    to[pair / 2 * 4 + pair % 2 + 2 * second] = of_lane(pair, second).wrapping_sub(zero);
                }
                continue;
            }
            let (mut low, mut high) = (0u32, 0u32);
            // The bits above the low four. A lane has as many bytes of them as a code has such bits.
            let high_bits = self.bits as usize - 4;
            for (pair, second) in PAIRS {
                let code = u32::from(of_lane(pair, second).wrapping_sub(zero));
                low |= (code & 15) << (4 * pair + 16 * second);
                high |= (code >> 4) << (high_bits * (pair + 4 * second));
            }
            record[place * 4..][..4].copy_from_slice(&low.to_le_bytes());
            record[RECORD / 2 + place * high_bits..][..high_bits].copy_from_slice(&high.to_le_bytes()[..high_bits]);
        }
    }

    /// Returns what is subtracted from codes: in memory, the code of 0 is 0 in 8 bits, and 8 in 4
    /// bits without offsets.
    fn code_of_zero(self, kind: BlockType) -> u8 {
        let zero = kind.codes().and_then(|codes| codes.zero).unwrap_or(0) as u8;
        match self.bits {
            8 => zero,
            4 if !self.offsets => zero.wrapping_sub(8),
            _ => 0,
        }
    }

    /// Stores the scales of a block, whose first group is this one of the record.
    fn store_scales(self, block: &Block, scales: &mut [u8], first: usize) {
        if !self.nested {
            return self.store_own_scales(scales, first, block.scale, block.offset);
        }
        let groups = RECORD / self.group;
        scales[..2].copy_from_slice(&block.scale.to_le_bytes());
        scales[2..4].copy_from_slice(&block.offset.to_le_bytes());
        for group in 0..groups {
            scales[4 + group] = block.group_scales[group] as u8;
            if self.offsets {
                scales[4 + groups + group] = block.group_offsets[group] as u8;
            }
        }
    }

    /// Stores the scale of a group that is not nested, and its offset.
    fn store_own_scales(self, scales: &mut [u8], group: usize, scale: f16, offset: f16) {
        let each = 2 * (1 + usize::from(self.offsets));
        scales[group * each..][..2].copy_from_slice(&scale.to_le_bytes());
        if self.offsets {
            scales[group * each + 2..][..2].copy_from_slice(&offset.to_le_bytes());
        }
    }
}
