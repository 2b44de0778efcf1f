//! Packed weights and the matrix product.
//!
//! Weights are stored in panels of 32 outputs, which every path streams in order (`matrix`). Rows
//! are packed once per product, in the format that the weights require, in tiles of a few
//! interleaved rows (`rows`). A tile times a panel is summed over k in order, whatever the tile: in
//! registers (`floats`, `bytes`), and between two stretches of a panel in memory. So one row and a
//! thousand rows give the same bits.

mod blocks;
mod bytes;
mod floats;
mod matrix;
mod quantize;
mod quantized;
mod rows;

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use super::SendPtr;
use super::lanes::Lanes;
use super::pool::Pool;
use crate::backend::MatrixOf;
use crate::backend::Storage;
use crate::error::{Error, Result};
use crate::types::options::{Isa, WeightFormat};
use blocks::BlockLayout;
use bytes::{BLOCK_WORDS, Bytes, Grouped, Nested, PerOutput};
use floats::{Floats, Pairs};
pub use matrix::{Matrix, PackedSection};
pub use quantized::{Int4Row, int8_row};
pub use rows::PackedRows;
use rows::{BYTE_ROWS, FLOAT_ROWS, GROUP, Packed, RowFormat, Tiles};

/// Outputs per panel.
const PANEL: usize = 32;
/// Target size of a task's panels. They fit the L2 cache of a core while all rows pass.
const TASK_BYTES: usize = 384 << 10;
/// Prefetch distance of a product in bytes of weights.
const AHEAD: usize = 8192;
/// Maximum number of tiles that a panel is multiplied with together, in stretches of `STRETCH`
/// words. The weights of a stretch and the tiles' sums stay in the L1 cache.
const TILES_TOGETHER: usize = 8;
const STRETCH: usize = 64;
// A stretch consists of whole groups and blocks, and therefore of whole steps.
const _: () = assert!(STRETCH.is_multiple_of(GROUP / 4) && STRETCH.is_multiple_of(BLOCK_WORDS));
/// Bytes of a cache line.
pub const LINE: usize = 64;

/// The packed format of a matrix's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    F32,
    F16,
    Bf16,
    Int8,
    Int4 { group: usize, offsets: bool },
    Blocks(BlockLayout),
}

impl Format {
    fn for_storage(storage: Storage) -> Result<Format> {
        match storage {
            Storage::Numbers { to, .. } => Format::for_weights(to),
            Storage::Blocks(kind) => BlockLayout::for_type(kind).map(Format::Blocks),
        }
    }

    fn for_weights(format: WeightFormat) -> Result<Format> {
        match format {
            WeightFormat::F32 => Ok(Format::F32),
            WeightFormat::F16 => Ok(Format::F16),
            WeightFormat::Bf16 => Ok(Format::Bf16),
            WeightFormat::Int8 => Ok(Format::Int8),
            WeightFormat::Int4 { group, offsets } if WeightFormat::GROUPS.contains(&group) => Ok(Format::Int4 { group, offsets }),
            WeightFormat::Int4 { group, .. } => {
                Err(Error::unsupported(format!("weight_group is {group}; give one of {:?}", WeightFormat::GROUPS)))
            }
            WeightFormat::Fp8 => Err(Error::unsupported("weight_format is fp8, which only CUDA devices support; set it to int8")),
        }
    }
}

/// CPU path and thread pool, which all products of a backend share.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    pub isa: Isa,
    pub pool: &'a Pool,
}

/// `count` strips of `rows` rows, each multiplied by its own matrix. All matrices have one shape.
pub struct Strips<'a, 'm> {
    pub rows: usize,
    pub count: usize,
    pub x: &'a [f32], // [count, rows, cols]
    pub matrix: MatrixOf<'m, Matrix>,
    pub bias: Option<&'a [f32]>, // [width]
    pub out: &'a mut [f32],      // [count, rows, width]
}

/// `out[s][r][n] = sum over k of x[s][r][k] * w[s][n][k], plus bias[n]`.
pub fn product(machine: Machine, packed: &mut PackedRows, strips: Strips) {
    let Strips { rows, count, x, matrix, bias, out } = strips;
    let (cols, width) = ((matrix)(0).cols, (matrix)(0).rows);
    let (x, bias) = (&x[..count * rows * cols], bias.map(|bias| &bias[..width]));
    let out = &mut out[..count * rows * width];
    if rows * count * width == 0 {
        return;
    }
    let max_rows = packed.max_rows(cols);
    let strips_at_once = (max_rows / rows).max(1);
    for first_strip in (0..count).step_by(strips_at_once) {
        for first_row in (0..rows).step_by(max_rows) {
            let piece = Piece {
                section: 0,
                first_strip,
                strips: strips_at_once.min(count - first_strip),
                first_row,
                rows: max_rows.min(rows - first_row),
                of_rows: rows,
            };
            for section in 0..matrix(0).sections() {
                Piece { section, ..piece }.multiply(machine, packed, x, matrix, bias, SendPtr(out.as_mut_ptr()));
            }
        }
    }
}

/// The rows and strips that are packed at once, and the section of the matrices by which they are
/// multiplied.
#[derive(Clone, Copy)]
struct Piece {
    section: usize,
    first_strip: usize,
    strips: usize,
    first_row: usize,
    rows: usize,
    /// Rows of each strip in total.
    of_rows: usize,
}

impl Piece {
    fn multiply(
        self,
        Machine { isa, pool }: Machine,
        packed: &mut PackedRows,
        x: &[f32],
        matrix: MatrixOf<Matrix>,
        bias: Option<&[f32]>,
        out: SendPtr<f32>,
    ) {
        let width = matrix(self.first_strip).rows;
        let w = matrix(self.first_strip).section(self.section);
        let PackedSection { first_row: first_output, rows: outputs, cols, format, .. } = w;
        let bias = bias.map(|bias| &bias[first_output..][..outputs]);
        let row_format = RowFormat::for_weights(isa, format);
        let tiles = Tiles::for_rows(isa, row_format, self.rows);
        let first_row = |strip: usize| (self.first_strip + strip) * self.of_rows + self.first_row;
        let packed = packed
            .pack(Machine { isa, pool }, row_format, tiles, self.strips, cols, &|strip| &x[first_row(strip) * cols..][..self.rows * cols]);
        let panels = Panels::split(w, (pool.threads() * 4).div_ceil(self.strips));
        pool.run(self.strips * panels.tasks(), &|task, _| {
            let strip = task / panels.tasks();
            let matrix = matrix(self.first_strip + strip);
            let w = matrix.section(self.section);
            assert!(
                (matrix.rows, w.cols, w.rows) == (width, cols, outputs) && w.format == format,
                "the matrices of a product of strips differ in shape or format"
            );
            let out = SendPtr(out.get().wrapping_add(first_row(strip) * width + first_output));
            let args = Args { w, bias, out, pitch: width, rows: packed.of_strip(strip), row_format, tiles };
            some_panels(isa, args, panels.of_task(task % panels.tasks()));
        });
    }
}

/// A strip's rows times a section of a matrix.
#[derive(Clone, Copy)]
struct Args<'a> {
    w: PackedSection<'a>,
    bias: Option<&'a [f32]>, // [w.rows]
    out: SendPtr<f32>,       // [rows, w.rows], rows are `pitch` apart
    pitch: usize,
    rows: Packed<'a>,
    row_format: RowFormat,
    tiles: Tiles,
}

/// A division of a matrix's panels into tasks.
#[derive(Clone, Copy)]
struct Panels {
    count: usize,
    each: usize,
}

impl Panels {
    /// Divides the panels into tasks. `tasks` is the number of tasks that suffices for all threads.
    fn split(w: PackedSection, tasks: usize) -> Panels {
        let count = w.rows.div_ceil(PANEL);
        Panels { count, each: (TASK_BYTES / w.panel_bytes().max(1)).clamp(1, count.div_ceil(tasks).max(1)) }
    }

    fn tasks(self) -> usize {
        self.count.div_ceil(self.each)
    }

    fn of_task(self, task: usize) -> Range<usize> {
        task * self.each..self.count.min((task + 1) * self.each)
    }
}

/// Multiplies all rows by a range of panels.
fn some_panels(isa: Isa, args: Args, panels: Range<usize>) {
    // SAFETY: the CPU supports `isa`. Tasks write disjoint columns of `out`. Rows were packed in
    // the format that the weights require.
    unsafe {
        match args.w.format {
            Format::F32 => isa.run(Floats::<f32>::new(args, panels)),
            Format::F16 => isa.run(Floats::<f16>::new(args, panels)),
            Format::Bf16 if args.row_format == RowFormat::Pairs => isa.run(Pairs { args, panels }),
            Format::Bf16 => isa.run(Floats::<bf16>::new(args, panels)),
            Format::Int8 => isa.run(Bytes::<PerOutput>::new(args, panels)),
            Format::Int4 { offsets, .. } => panels_of_groups(isa, args, panels, (false, 4, offsets)),
            Format::Blocks(layout) => {
                panels_of_groups(isa, args, panels, (layout.is_nested(), layout.codes.bits, layout.codes.offsets()));
            }
        }
    }
}

/// Multiplies all rows by a range of panels whose groups have scales: (scales are nested, bits of a
/// code, groups have offsets).
///
/// # Safety
/// As for `some_panels`: the CPU supports `isa`, and the arguments are those of the panels' format.
unsafe fn panels_of_groups(isa: Isa, args: Args, panels: Range<usize>, form: (bool, u32, bool)) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        match form {
            (false, 4, false) => isa.run(Bytes::<Grouped<4, false>>::new(args, panels)),
            (false, 4, true) => isa.run(Bytes::<Grouped<4, true>>::new(args, panels)),
            (false, 8, false) => isa.run(Bytes::<Grouped<8, false>>::new(args, panels)),
            (false, 8, true) => isa.run(Bytes::<Grouped<8, true>>::new(args, panels)),
            (true, 4, false) => isa.run(Bytes::<Nested<4, false>>::new(args, panels)),
            (true, 4, true) => isa.run(Bytes::<Nested<4, true>>::new(args, panels)),
            (true, 5, true) => isa.run(Bytes::<Nested<5, true>>::new(args, panels)),
            (true, 6, false) => isa.run(Bytes::<Nested<6, false>>::new(args, panels)),
            (true, 8, false) => isa.run(Bytes::<Nested<8, false>>::new(args, panels)),
            form => unreachable!("no type has the form {form:?}"),
        }
    }
}

/// A kernel that computes tiles of a product.
trait Tiled {
    /// Maximum number of rows of a tile on paths with 16 lanes, as `Tiles` divides rows.
    const MAX_ROWS: usize;
    /// Multiplies `R` rows by a stretch of one panel of `C` vectors.
    ///
    /// # Safety
    /// The CPU has the features of `L`. Rows, panel and stretch are inside the shapes of the
    /// kernel's arguments. `kept` holds the sums of the preceding stretches.
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize, stretch: Stretch, kept: &mut Kept);
}

/// Evaluates an expression for each of a tile's sums, fully unrolled. The compiler would turn a
/// loop over the sums into a memcpy, which forces them into memory. The conditions are constants, so
/// that rustc generates no code for other tiles.
macro_rules! for_sums {
    ($rows:ident, $columns:ident, |$r:ident, $c:ident| $each:expr) => {{
        const { assert!($rows <= 12 && $columns <= 4, "the tile has more sums than accumulators") };
        for_sums!($rows, $columns, $r, $c, $each, 0 1 2 3 4 5 6 7 8 9 10 11)
    }};
    ($rows:ident, $columns:ident, $r:ident, $c:ident, $each:expr, $($row:literal)*) => {
        {
            $(if const { $row < $rows } {
                let $r = $row;
                for_sums!($columns, $c, $each, 0 1 2 3);
            })*
        }
    };
    ($columns:ident, $c:ident, $each:expr, $($column:literal)*) => {
        {
            $(if const { $column < $columns } {
                let $c = $column;
                $each;
            })*
        }
    };
}
use for_sums;

/// Uninitialized storage for a tile's sums. It is filled in place: as return values, the sums would
/// be copied through memory.
type Sums<L, const R: usize, const C: usize> = MaybeUninit<[[<L as Lanes>::V; C]; R]>;

/// A tile's partial sums between two stretches of a panel.
#[repr(align(64))]
struct Kept(MaybeUninit<[[f32; PANEL]; FLOAT_ROWS]>);

/// The initial sums of the first stretch.
static ZEROS: Kept = Kept(MaybeUninit::new([[0.0; PANEL]; FLOAT_ROWS]));

impl Kept {
    /// # Safety
    /// As for `Lanes`. At least `R` rows of sums were stored.
    #[inline(always)]
    unsafe fn load<'a, L: Lanes, const R: usize, const C: usize>(&self, sums: &'a mut Sums<L, R, C>) -> &'a mut [[L::V; C]; R] {
        let (kept, places) = (self.0.as_ptr().cast::<f32>(), sums.as_mut_ptr());
        // SAFETY: a tile has at most `FLOAT_ROWS` rows and a panel `PANEL` outputs, and the macro
        // writes each sum. The caller guarantees the CPU features and that the sums were stored.
        unsafe {
            for_sums!(R, C, |r, c| (*places)[r][c] = L::load(kept.add(r * PANEL + c * L::N)));
            sums.assume_init_mut()
        }
    }

    /// # Safety
    /// As for `Lanes`.
    #[inline(always)]
    unsafe fn store<L: Lanes, const R: usize, const C: usize>(&mut self, sums: &[[L::V; C]; R]) {
        let kept = self.0.as_mut_ptr().cast::<f32>();
        // SAFETY: bounded as in `load`; the caller guarantees the CPU features of `L`.
        unsafe { for_sums!(R, C, |r, c| L::store(kept.add(r * PANEL + c * L::N), sums[r][c])) };
    }
}

/// A range of words of a panel's columns.
#[derive(Clone, Copy)]
struct Stretch {
    first: usize,
    len: usize,
    /// True if the stretch is the last of the panel.
    last: bool,
}

impl Stretch {
    /// Loads a tile's initial sums. `black_box` hides from the compiler that they may be zeros: it
    /// would create two variants and merge their sums through memory.
    ///
    /// # Safety
    /// As for `Lanes`. `kept` holds the sums of the preceding stretches.
    #[inline(always)]
    unsafe fn begin<'a, L: Lanes, const R: usize, const C: usize>(
        self,
        kept: &Kept,
        sums: &'a mut Sums<L, R, C>,
    ) -> &'a mut [[L::V; C]; R] {
        let before = black_box(if self.first > 0 { kept } else { &ZEROS });
        // SAFETY: the caller upholds this function's contract.
        unsafe { before.load::<L, R, C>(sums) }
    }
}

/// Multiplies all tiles by a range of panels. If there are few tiles, a panel is multiplied with
/// all of them, stretch by stretch, so that one stretch is computed while the next is loaded from
/// memory. If there are many tiles, each is multiplied alone. Each number of rows has its own
/// unrolled loop.
///
/// # Safety
/// As for `Tiled::tile`. Arguments and panels are those of the kernel.
#[inline(always)]
unsafe fn each_tile<L: Lanes, T: Tiled>(kernel: &T, args: &Args, panels: &Range<usize>) {
    let (tiles, words) = (args.tiles, args.rows.depth());
    macro_rules! tile_of {
        ($rows:expr, $panel:expr, $stretch:expr, $kept:expr, $columns:literal: $($count:literal)*) => {
            match $rows.len() {
                // SAFETY: the caller upholds the contract of `tile`. Stretches are consecutive, and
                // each tile has its own partial sums.
                $($count => unsafe { kernel.tile::<L, $count, $columns>($panel, $rows.start, $stretch, $kept) },)*
                rows => unreachable!("a tile of {rows} rows"),
            }
        };
    }
    let mut places = [const { Kept(MaybeUninit::uninit()) }; TILES_TOGETHER];
    let few = (2..=TILES_TOGETHER).contains(&tiles.count());
    let (tiles_at_once, words_at_once) = if few { (tiles.count(), STRETCH) } else { (1, words.max(1)) };
    for first_tile in (0..tiles.count()).step_by(tiles_at_once) {
        for panel in panels.clone() {
            for first in (0..words.max(1)).step_by(words_at_once) {
                let len = words_at_once.min(words - first);
                let stretch = Stretch { first, len, last: first + len == words };
                for (tile, kept) in (first_tile..first_tile + tiles_at_once).zip(&mut places) {
                    let rows = tiles.rows(tile);
                    // Constants, so that rustc generates no code for the tiles of other paths.
                    if const { L::WIDE_TILES && T::MAX_ROWS == FLOAT_ROWS } {
                        tile_of!(rows, panel, stretch, kept, 2: 1 2 3 4 5 6 7 8 9 10 11 12)
                    } else if const { L::WIDE_TILES } {
                        tile_of!(rows, panel, stretch, kept, 2: 1 2 3 4 5 6)
                    } else if const { L::N == 16 } {
                        tile_of!(rows, panel, stretch, kept, 2: 1 2 3)
                    } else {
                        tile_of!(rows, panel, stretch, kept, 4: 1 2 3)
                    }
                }
            }
        }
    }
}

impl Args<'_> {
    /// Writes a tile of `out`. If the panel has fewer than `PANEL` outputs, the tile is written
    /// through `kept`.
    #[inline(always)]
    unsafe fn store<L: Lanes, const R: usize, const C: usize>(
        &self,
        panel: usize,
        first_row: usize,
        sums: &[[L::V; C]; R],
        kept: &mut Kept,
    ) {
        let Args { w, bias, out, pitch, .. } = *self;
        let first = panel * PANEL;
        // SAFETY: the caller guarantees that the tile is inside `out`. There are as many biases as
        // outputs.
        unsafe {
            if w.rows - first < PANEL {
                kept.store::<L, R, C>(sums);
                return self.store_end(first, first_row, R, kept);
            }
            let out = out.get().add(first_row * pitch + first);
            match bias.map(|bias| bias[first..].as_ptr()) {
                Some(bias) => {
                    for_sums!(R, C, |r, c| L::store(out.add(r * pitch + c * L::N), L::add(sums[r][c], L::load(bias.add(c * L::N)))))
                }
                None => for_sums!(R, C, |r, c| L::store(out.add(r * pitch + c * L::N), sums[r][c])),
            }
        }
    }

    /// # Safety
    /// `rows` rows are in `kept`, and `out` contains them from `first_row` on.
    #[cold]
    #[inline(never)]
    unsafe fn store_end(&self, first: usize, first_row: usize, rows: usize, kept: &Kept) {
        let Args { w, bias, out, pitch, .. } = *self;
        for row in 0..rows {
            for n in first..w.rows {
                // SAFETY: the caller guarantees the rows in `kept` and in `out`.
                unsafe {
                    let sum = *kept.0.as_ptr().cast::<f32>().add(row * PANEL + n - first);
                    *out.get().add((first_row + row) * pitch + n) = bias.map_or(sum, |bias| sum + bias[n]);
                }
            }
        }
    }
}
