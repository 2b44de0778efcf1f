//! Rows, packed for a product.
//!
//! A tile's rows are interleaved, `[word][row]`. A word is the unit of multiplication: one number
//! in f32, two in bf16, or four integers. So a product reads memory sequentially, however far apart
//! the rows were, and each number is rounded once.

use std::ops::Range;

use super::super::SendPtr;
use super::super::lanes::{Kernel, Lanes, load_some};
use super::blocks::BlockLayout;
use super::quantize::{self, INT4_ZERO, INT8_ZERO};
use super::{Format, Machine};
use crate::error::{Result, try_vec};
use crate::sys::Numbers;
use crate::types::options::{Isa, WeightFormat};

/// Maximum number of rows of a tile with 16 lanes. With the vectors of a panel, a tile has 24 sums
/// of 16 lanes, or 12 sums of 8 lanes (`NARROW_ROWS`). The register file holds them together with
/// weights and rows.
pub const FLOAT_ROWS: usize = 12;
const NARROW_ROWS: usize = 3;
/// Maximum number of rows of an integer tile with 16 lanes. Integer products have two sums each:
/// the group's and the total.
pub const BYTE_ROWS: usize = 6;
/// Maximum number of rows that are packed at once. It limits the memory of packed rows, and is
/// large enough that weights are rarely read again.
const MAX_ROWS: usize = 512;
/// Columns of a row that share a scale if weights have no groups; also the largest group.
pub const GROUP: usize = WeightFormat::GROUPS[2];
/// The smallest group of all formats.
const MIN_GROUP: usize = 16;

/// A division of rows into tiles that fit the registers, as evenly as possible.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    pub fn for_rows(isa: Isa, format: RowFormat, rows: usize) -> Tiles {
        let max_rows = match format {
            _ if !isa.has_wide_tiles() => NARROW_ROWS,
            RowFormat::Bytes { .. } => BYTE_ROWS,
            _ => FLOAT_ROWS,
        };
        Tiles { rows, count: rows.div_ceil(max_rows) }
    }

    pub fn count(self) -> usize {
        self.count
    }

    pub fn rows(self, tile: usize) -> Range<usize> {
        let (rows_per_tile, more) = (self.rows / self.count, self.rows % self.count);
        let first = |tile: usize| tile * rows_per_tile + tile.min(more);
        first(tile)..first(tile + 1)
    }
}

/// The format of packed rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RowFormat {
    /// f32, with `step` words per step of the product.
    Floats { step: usize },
    /// Two bf16 numbers per word.
    Pairs,
    /// Four integers per word, with one scale per `group` columns. `zero` is the code of a weight
    /// of 0, or None if weights have offsets.
    Bytes { group: usize, zero: Option<u32> },
}

impl RowFormat {
    pub fn for_weights(isa: Isa, weights: Format) -> RowFormat {
        match weights {
            Format::F32 | Format::F16 => RowFormat::Floats { step: 1 },
            Format::Bf16 if isa == Isa::Avx512Bf16 => RowFormat::Pairs,
            Format::Bf16 => RowFormat::Floats { step: 2 },
            Format::Int8 => RowFormat::Bytes { group: GROUP, zero: Some(INT8_ZERO) },
            Format::Int4 { group, offsets } => RowFormat::Bytes { group, zero: (!offsets).then_some(INT4_ZERO) },
            Format::Blocks(BlockLayout { codes, .. }) => RowFormat::Bytes { group: codes.group, zero: codes.zero },
        }
    }

    /// Returns the words of a row.
    fn depth(self, cols: usize) -> usize {
        match self {
            RowFormat::Floats { step } => cols.next_multiple_of(step),
            RowFormat::Pairs => cols.div_ceil(2),
            RowFormat::Bytes { .. } => cols.div_ceil(4),
        }
    }

    fn group(self, cols: usize) -> usize {
        if let RowFormat::Bytes { group, .. } = self { group } else { cols.max(1) }
    }
}

/// Storage for packed rows.
#[derive(Default)]
pub struct PackedRows {
    words: Numbers<u32>, // most formats do not use all of it
    scales: Vec<f32>,
    corrections: Vec<u32>,
}

/// The packed rows of one strip.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    words: &'a [u32],       // [tile][depth][rows of the tile]
    scales: &'a [f32],      // [tile][groups][rows of the tile]
    corrections: &'a [u32], // [tile][groups][rows of the tile]
    lens: Lens,
    pub group_words: usize,
}

/// Lengths of one row.
#[derive(Clone, Copy)]
struct Lens {
    words: usize,
    groups: usize,
}

/// The packed rows of all strips.
pub struct PackedStrips<'a> {
    all: Packed<'a>,
    rows: usize,
}

impl PackedStrips<'_> {
    pub fn of_strip(&self, strip: usize) -> Packed<'_> {
        let Packed { words, scales, corrections, lens, group_words } = self.all;
        let from = strip * self.rows;
        Packed {
            words: &words[from * lens.words..],
            scales: &scales[from * lens.groups..],
            corrections: &corrections[from * lens.groups..],
            lens,
            group_words,
        }
    }
}

impl Packed<'_> {
    /// Returns the words of a row.
    pub fn depth(&self) -> usize {
        self.lens.words
    }

    /// Returns the words of the tile that begins with this row.
    pub fn words(&self, first_row: usize) -> *const u32 {
        self.words[first_row * self.lens.words..].as_ptr()
    }

    pub fn scales(&self, first_row: usize) -> *const f32 {
        self.scales[first_row * self.lens.groups..].as_ptr()
    }

    /// Returns the corrections of the tile that begins with this row. Weights without offsets: the
    /// initial value of a group's sum, which compensates for the code of 0. Weights with offsets:
    /// the factor of the offsets, which is the sum of the row's integers in f32.
    pub fn corrections(&self, first_row: usize) -> *const u32 {
        self.corrections[first_row * self.lens.groups..].as_ptr()
    }
}

impl Lens {
    /// Returns the maximum over all formats.
    fn maximum(cols: usize) -> Lens {
        Lens { words: cols.next_multiple_of(2), groups: cols.div_ceil(MIN_GROUP) }
    }

    fn for_row(format: RowFormat, cols: usize) -> Lens {
        let groups = if let RowFormat::Bytes { group, .. } = format { cols.div_ceil(group) } else { 0 };
        Lens { words: format.depth(cols), groups }
    }
}

impl PackedRows {
    /// Returns the bytes that `reserve` allocates.
    pub fn bytes(rows: usize, cols: usize) -> u64 {
        let Lens { words, groups } = Lens::maximum(cols);
        (rows.min(MAX_ROWS) * (4 * words + 8 * groups)) as u64
    }

    /// Allocates storage for at least this many rows.
    pub fn reserve(&mut self, rows: usize, cols: usize) -> Result<()> {
        let (rows, Lens { words, groups }) = (rows.min(MAX_ROWS), Lens::maximum(cols));
        if rows * words > self.words.len() {
            self.words = Numbers::partly_used(rows * words)?;
        }
        if rows * groups > self.scales.len() {
            (self.scales, self.corrections) = (try_vec(rows * groups, 0.0)?, try_vec(rows * groups, 0)?);
        }
        Ok(())
    }

    /// Returns how many rows of this width fit the storage.
    pub fn max_rows(&self, cols: usize) -> usize {
        let Lens { words, groups } = Lens::maximum(cols.max(1));
        let max_rows = (self.words.len() / words).min(self.scales.len() / groups);
        assert!(max_rows > 0, "no buffer for rows of {cols} columns");
        max_rows
    }

    /// Packs the rows of `tiles` for each of `strips` strips. `x` returns the rows of a strip,
    /// `[rows, cols]`.
    pub fn pack<'a>(
        &'a mut self,
        Machine { isa, pool }: Machine,
        format: RowFormat,
        tiles: Tiles,
        strips: usize,
        cols: usize,
        x: &(dyn Fn(usize) -> &'a [f32] + Sync),
    ) -> PackedStrips<'a> {
        let lens = Lens::for_row(format, cols);
        let rows = strips * tiles.rows;
        let words = &mut self.words[..rows * lens.words];
        let (scales, corrections) = (&mut self.scales[..rows * lens.groups], &mut self.corrections[..rows * lens.groups]);
        let to = (SendPtr(words.as_mut_ptr()), SendPtr(scales.as_mut_ptr()), SendPtr(corrections.as_mut_ptr()));
        pool.run(strips * tiles.count, &|task, _| {
            let (strip, tile) = (task / tiles.count, tiles.rows(task % tiles.count));
            let (first, rows) = (strip * tiles.rows + tile.start, tile.len());
            // SAFETY: tiles are disjoint and inside the slices that are cut above. The CPU supports
            // `isa`.
            unsafe {
                isa.run(PackTile {
                    format,
                    cols,
                    rows,
                    x: &x(strip)[tile.start * cols..tile.end * cols],
                    words: part(to.0, first, rows, lens.words),
                    scales: part(to.1, first, rows, lens.groups),
                    corrections: part(to.2, first, rows, lens.groups),
                });
            }
        });
        PackedStrips { all: Packed { words, scales, corrections, lens, group_words: format.group(cols).div_ceil(4) }, rows: tiles.rows }
    }
}

/// Returns the part of consecutive rows of `len` elements each.
///
/// # Safety
/// The rows exist, and no other reference to them does.
unsafe fn part<'a, T>(all: SendPtr<T>, first: usize, rows: usize, len: usize) -> &'a mut [T] {
    // SAFETY: the caller upholds this function's contract.
    unsafe { std::slice::from_raw_parts_mut(all.get().add(first * len), rows * len) }
}

/// The rows of one tile.
struct PackTile<'a> {
    format: RowFormat,
    cols: usize,
    rows: usize,
    x: &'a [f32],               // [rows, cols]
    words: &'a mut [u32],       // [words, rows]
    scales: &'a mut [f32],      // [groups, rows]
    corrections: &'a mut [u32], // [groups, rows]
}

impl Kernel for PackTile<'_> {
    const PAIRS: bool = true;
    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        match self.format {
            RowFormat::Floats { .. } => self.copy(),
            // Only the path with pairs selects this format.
            RowFormat::Pairs if L::PAIRS => self.round::<L>(),
            RowFormat::Pairs => unreachable!("the path has no pairs"),
            RowFormat::Bytes { group, zero } => self.quantize(group, zero),
        }
    }
}

impl PackTile<'_> {
    #[inline(always)]
    fn copy(&mut self) {
        let rows = self.rows;
        for (r, x) in self.x.chunks_exact(self.cols).enumerate() {
            spread(&mut self.words[r..], rows, x.len(), |k| x[k].to_bits());
        }
        self.words[self.cols * rows..].fill(0);
    }

    /// Rounds and transposes one vector of words of all rows at a time, and then the ends of the
    /// rows one by one.
    #[inline(always)]
    fn round<L: Lanes>(&mut self) {
        let (rows, cols) = (self.rows, self.cols);
        const { assert!(FLOAT_ROWS <= 16, "the transposition takes at most 16 rows") };
        let whole = cols / (2 * L::N) * (2 * L::N);
        for k in (0..whole).step_by(2 * L::N) {
            let (x, words) = (&self.x[k..(rows - 1) * cols + k + 2 * L::N], &mut self.words[k / 2 * rows..][..L::N * rows]);
            // SAFETY: the slices above bound the rows and the words. A tile has at most as many
            // rows as a vector has lanes.
            unsafe { L::turn_pairs(x.as_ptr(), cols, rows, words.as_mut_ptr()) };
        }
        for (r, x) in self.x.chunks_exact(cols).enumerate() {
            for k in (whole..cols).step_by(L::N) {
                let (mut rounded, count) = ([0u16; 16], L::N.min(cols - k));
                // SAFETY: no vector has more than 16 lanes, and `load_some` reads `count` numbers
                // only.
                unsafe { L::store_bf16(rounded.as_mut_ptr(), load_some::<L, f32>(x[k..].as_ptr(), count)) };
                let pairs = &rounded.as_chunks::<2>().0[..count.div_ceil(2)];
                spread(&mut self.words[k / 2 * rows + r..], rows, pairs.len(), |pair| {
                    let [low, high] = pairs[pair];
                    low as u32 | (high as u32) << 16
                });
            }
        }
    }

    #[inline(always)]
    fn quantize(&mut self, group: usize, zero: Option<u32>) {
        for r in 0..self.rows {
            for (place, x) in self.x[r * self.cols..][..self.cols].chunks(group).enumerate() {
                // Constant lengths: each has its own unrolled loop.
                match x.len() {
                    128 => self.quantize_group(r, place, group, &x[..128], zero),
                    64 => self.quantize_group(r, place, group, &x[..64], zero),
                    32 => self.quantize_group(r, place, group, &x[..32], zero),
                    16 => self.quantize_group(r, place, group, &x[..16], zero),
                    _ => self.quantize_group(r, place, group, x, zero),
                }
            }
        }
    }

    #[inline(always)]
    fn quantize_group(&mut self, r: usize, place: usize, group: usize, x: &[f32], zero: Option<u32>) {
        let (rows, mut bytes) = (self.rows, [0u8; GROUP]); // pads the last word
        self.scales[place * rows + r] = quantize::signed(x, &mut bytes[..x.len()]);
        let total: i32 = bytes[..x.len()].iter().map(|byte| *byte as i8 as i32).sum();
        self.corrections[place * rows + r] = match zero {
            Some(zero) => (total as u32).wrapping_mul(zero.wrapping_neg()),
            None => (total as f32).to_bits(),
        };
        let words = &bytes.as_chunks::<4>().0[..x.len().div_ceil(4)];
        spread(&mut self.words[place * (group / 4) * rows + r..], rows, words.len(), |k| u32::from_le_bytes(words[k]));
    }
}

/// Writes `word(k)` to every `rows`th word, for k in 0..count.
#[inline(always)]
fn spread(words: &mut [u32], rows: usize, count: usize, word: impl Fn(usize) -> u32) {
    assert!(count == 0 || (count - 1) * rows < words.len());
    for k in 0..count {
        // SAFETY: the assertion above bounds the index.
        unsafe { *words.get_unchecked_mut(k * rows) = word(k) };
    }
}
