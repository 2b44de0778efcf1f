//! Packed weights and the one matrix product.
//!
//! Weights lie in panels of 32 output columns: `[panel][k][32]`, so that every path streams them in
//! order; where a path multiplies pairs, `[panel][k / 2][32][2]`. An output element is accumulated over k from first to last whatever the tile around it:
//! one row and a thousand rows give the same bits.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};

use super::SendPtr;
use super::lanes::{Element, Kernel, Lanes, load_some, prefetch, store_some};
use super::pool::Pool;
use crate::backend::MatrixOf;
use crate::error::{Result, try_vec};
use crate::options::{Dtype, Isa};
use crate::sys::Pages;

/// Output columns per panel.
const PANEL: usize = 32;
/// Most rows of one tile. Twelve would fit the registers, but rows a multiple of 4 KiB apart share one set of the
/// first cache, which may have eight ways.
const TILE_ROWS: usize = 8;
/// What a task's panels should weigh, so that they stay in a core's own cache while all rows pass.
const TASK_BYTES: usize = 384 << 10;
/// How far ahead of itself a product asks for weights.
const AHEAD: usize = 8192;
/// Rows are read from their source in pieces of about this size.
const LOAD_BYTES: usize = 4 << 20;

pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    dtype: Dtype,
    layout: Layout,
    pages: Pages, // [rows / 32 rounded up][layout.depth(cols)][32]
}

/// In which order a panel's elements lie.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// `[k][32]`
    Single,
    /// `[k / 2][32][2]`, the last one of an odd number beside a zero.
    Pairs,
}

impl Layout {
    fn of(isa: Isa, dtype: Dtype) -> Layout {
        if isa == Isa::Avx512Bf16 && dtype == Dtype::Bf16 { Layout::Pairs } else { Layout::Single }
    }

    /// For so many columns of the matrix, those of a panel.
    fn depth(self, cols: usize) -> usize {
        if self == Layout::Pairs { cols.next_multiple_of(2) } else { cols }
    }

    /// Where in its panel column `k` of the panel's row `n` lies.
    #[inline(always)]
    fn place(self, k: usize, n: usize) -> usize {
        if self == Layout::Pairs { (k / 2 * PANEL + n) * 2 + k % 2 } else { k * PANEL + n }
    }
}

/// A thread's rows of one tile, rounded to bf16.
pub type Rounded = Vec<u16>;

/// Numbers from one row of `Rounded` to the next: whole vectors.
#[inline(always)]
fn rounded_stride(cols: usize) -> usize {
    cols.next_multiple_of(16)
}

/// Of each thread, as long as the columns of any matrix need.
pub fn reserve_rounded(rounded: &mut Rounded, cols: usize) -> Result<()> {
    let len = TILE_ROWS * rounded_stride(cols);
    rounded.try_reserve_exact(len.saturating_sub(rounded.len()))?;
    rounded.resize(len.max(rounded.len()), 0);
    Ok(())
}

impl Matrix {
    pub fn bytes(isa: Isa, rows: usize, cols: usize, dtype: Dtype) -> u64 {
        (rows.div_ceil(PANEL) * PANEL) as u64 * Layout::of(isa, dtype).depth(cols) as u64 * dtype.bytes() as u64
    }

    pub fn load(isa: Isa, pool: &Pool, rows: usize, cols: usize, dtype: Dtype, source: crate::backend::RowSource) -> Result<Matrix> {
        let pages = Pages::zeroed(Self::bytes(isa, rows, cols, dtype) as usize)?;
        let mut matrix = Matrix { rows, cols, dtype, layout: Layout::of(isa, dtype), pages };
        let row_bytes = cols * dtype.bytes();
        let piece = (LOAD_BYTES / row_bytes.max(1)).next_multiple_of(PANEL).max(PANEL).min(rows.next_multiple_of(PANEL));
        let mut buffer = try_vec(piece * row_bytes, 0u8)?;
        for first in (0..rows).step_by(piece) {
            let count = piece.min(rows - first);
            let bytes = &mut buffer[..count * row_bytes];
            source(first, bytes)?;
            match dtype.bytes() {
                2 => matrix.pack::<2>(pool, first, bytes),
                _ => matrix.pack::<4>(pool, first, bytes),
            }
        }
        Ok(matrix)
    }

    /// Packs `[rows, cols]` elements of N bytes whose first row is the first of a panel.
    fn pack<const N: usize>(&mut self, pool: &Pool, first: usize, bytes: &[u8]) {
        let (elements, _) = bytes.as_chunks::<N>();
        let (cols, layout) = (self.cols, self.layout);
        let depth = layout.depth(cols);
        let (packed, _) = self.pages.bytes_mut().as_chunks_mut::<N>();
        let packed = SendPtr(packed[first * depth..].as_mut_ptr());
        pool.run((elements.len() / cols).div_ceil(PANEL), &|panel, _| {
            let rows = &elements[panel * PANEL * cols..elements.len().min((panel + 1) * PANEL * cols)];
            // SAFETY: each task writes its own panel, which lies inside the pages.
            let out = unsafe { std::slice::from_raw_parts_mut(packed.get().add(panel * PANEL * depth), PANEL * depth) };
            for (n, row) in rows.chunks_exact(cols).enumerate() {
                for (k, element) in row.iter().enumerate() {
                    out[layout.place(k, n)] = *element;
                }
            }
        });
    }

    /// out = row `n` as f32, times `scale`
    pub fn read_row(&self, n: usize, scale: f32, out: &mut [f32]) {
        self.visit_row(n, |k, value| out[k] = value * scale);
    }

    /// out += row `n`
    pub fn add_row(&self, n: usize, out: &mut [f32]) {
        self.visit_row(n, |k, value| out[k] += value);
    }

    fn visit_row(&self, n: usize, visit: impl FnMut(usize, f32)) {
        let bytes = self.pages.bytes();
        match self.dtype {
            Dtype::F32 => self.visit_elements(n, bytes.as_chunks::<4>().0, |e| f32::from_le_bytes(*e), visit),
            Dtype::F16 => self.visit_elements(n, bytes.as_chunks::<2>().0, |e| f16::from_le_bytes(*e).to_f32(), visit),
            Dtype::Bf16 => self.visit_elements(n, bytes.as_chunks::<2>().0, |e| bf16::from_le_bytes(*e).to_f32(), visit),
        }
    }

    fn visit_elements<T>(&self, n: usize, elements: &[T], value: impl Fn(&T) -> f32, mut visit: impl FnMut(usize, f32)) {
        let panel = &elements[n / PANEL * PANEL * self.layout.depth(self.cols)..];
        (0..self.cols).for_each(|k| visit(k, value(&panel[self.layout.place(k, n % PANEL)])));
    }
}

/// out[r][n] = sum over k of x[r][k] * w[n][k], plus bias[n]
#[allow(clippy::too_many_arguments)]
pub fn matmul(
    isa: Isa,
    pool: &Pool,
    rounded: &[Mutex<Rounded>],
    rows: usize,
    x: &[f32],
    w: &Matrix,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let (x, bias) = (&x[..rows * w.cols], bias.map(|b| &b[..w.rows]));
    let out = &mut out[..rows * w.rows];
    let args = Args { rows, x, w, bias, out: SendPtr(out.as_mut_ptr()) };
    let pieces = Pieces::of(w, pool.threads() * 4);
    pool.run(pieces.count(), &|piece, thread| some_panels(isa, args, pieces.panels(piece), &rounded[thread]));
}

/// out[s][r] = w * x[s][r], with the matrix that `matrix` gives for s, of `count` of one shape.
#[allow(clippy::too_many_arguments)]
pub fn matmul_strips(
    isa: Isa,
    pool: &Pool,
    rounded: &[Mutex<Rounded>],
    rows: usize,
    count: usize,
    x: &[f32],
    matrix: MatrixOf<Matrix>,
    out: &mut [f32],
) {
    let first = matrix(0);
    let (cols, width) = (first.cols, first.rows);
    let (x, out) = (&x[..count * rows * cols], SendPtr(out[..count * rows * width].as_mut_ptr()));
    let pieces = Pieces::of(first, (pool.threads() * 4).div_ceil(count));
    pool.run(count * pieces.count(), &|task, thread| {
        let (strip, w) = (task / pieces.count(), matrix(task / pieces.count()));
        assert_eq!((w.cols, w.rows), (cols, width), "strips are multiplied by matrices of one shape");
        let out = SendPtr(out.get().wrapping_add(strip * rows * width));
        let args = Args { rows, x: &x[strip * rows * cols..][..rows * cols], w, bias: None, out };
        some_panels(isa, args, pieces.panels(task % pieces.count()), &rounded[thread]);
    });
}

#[derive(Clone, Copy)]
struct Args<'a> {
    rows: usize,
    x: &'a [f32], // [rows, cols]
    w: &'a Matrix,
    bias: Option<&'a [f32]>, // [w.rows]
    out: SendPtr<f32>,       // [rows, w.rows]
}

/// A matrix's panels in pieces, one for each task.
#[derive(Clone, Copy)]
struct Pieces {
    panels: usize,
    each: usize,
}

impl Pieces {
    /// `tasks`: so many are enough for every thread.
    fn of(w: &Matrix, tasks: usize) -> Pieces {
        let panels = w.rows.div_ceil(PANEL);
        let panel_bytes = PANEL * w.cols * w.dtype.bytes();
        Pieces { panels, each: (TASK_BYTES / panel_bytes.max(1)).clamp(1, panels.div_ceil(tasks).max(1)) }
    }

    fn count(self) -> usize {
        self.panels.div_ceil(self.each)
    }

    fn panels(self, piece: usize) -> Range<usize> {
        piece * self.each..self.panels.min((piece + 1) * self.each)
    }
}

/// All rows times some panels; `rounded` is the thread's.
fn some_panels(isa: Isa, args: Args, panels: Range<usize>, rounded: &Mutex<Rounded>) {
    // SAFETY: the path is present; tasks write disjoint columns of `out`.
    unsafe {
        match (args.w.dtype, args.w.layout) {
            // Only the path of pairs packs them.
            (_, Layout::Pairs) => {
                isa.run(PairPanels { args, panels, rounded: &mut rounded.lock().unwrap_or_else(PoisonError::into_inner) })
            }
            (Dtype::F32, _) => isa.run(Panels::<f32> { args, panels, element: PhantomData }),
            (Dtype::F16, _) => isa.run(Panels::<f16> { args, panels, element: PhantomData }),
            (Dtype::Bf16, _) => isa.run(Panels::<bf16> { args, panels, element: PhantomData }),
        }
    }
}

/// A task: all rows times the panels `first..last`.
struct Panels<'a, E> {
    args: Args<'a>,
    panels: Range<usize>,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Panels<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // 16 accumulators of 16 lanes, or 12 of 8: what the register file holds beside weights and inputs.
        let tile_rows = if L::N == 16 { TILE_ROWS } else { 3 };
        for first_row in (0..self.args.rows).step_by(tile_rows) {
            let rows = tile_rows.min(self.args.rows - first_row);
            for panel in self.panels.clone() {
                // SAFETY: rows and panel are inside the shapes of `args`.
                unsafe { self.tile_of::<L>(panel, first_row, rows) };
            }
        }
    }
}

impl<E: Element> Panels<'_, E> {
    /// Each number of rows is its own unrolled loop.
    #[inline(always)]
    unsafe fn tile_of<L: Lanes>(&self, panel: usize, first_row: usize, rows: usize) {
        macro_rules! tiles {
            ($columns:literal: $($rows:literal)*) => {
                match rows {
                    // SAFETY: the caller's contract.
                    $($rows => unsafe { self.tile::<L, $rows, $columns>(panel, first_row) },)*
                    _ => unreachable!("a tile has at most {TILE_ROWS} rows"),
                }
            };
        }
        if L::N == 16 { tiles!(2: 1 2 3 4 5 6 7 8) } else { tiles!(4: 1 2 3) }
    }

    /// `R` rows by one panel of `C` vectors: the whole sum over k in registers.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize) {
        let Args { x, w, .. } = self.args;
        // SAFETY: panel < panels and first_row + R <= rows, by the caller.
        unsafe {
            let weights = w.pages.bytes().as_ptr().cast::<E>().add(panel * PANEL * w.cols);
            let x = x.as_ptr().add(first_row * w.cols);
            let mut sums = [[L::splat(0.0); C]; R];
            for k in 0..w.cols {
                prefetch(weights.wrapping_add(k * PANEL + AHEAD / size_of::<E>()));
                let mut column = [L::splat(0.0); C];
                for (c, column) in column.iter_mut().enumerate() {
                    *column = E::load::<L>(weights.add(k * PANEL + c * L::N));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = L::splat(*x.add(r * w.cols + k));
                    for c in 0..C {
                        sums[c] = L::fma(x, column[c], sums[c]);
                    }
                }
            }
            self.args.store::<L, R, C>(panel, first_row, &sums);
        }
    }
}

impl Args<'_> {
    /// Writes a tile of `out`.
    #[inline(always)]
    unsafe fn store<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize, sums: &[[L::V; C]; R]) {
        let Args { w, bias, out, .. } = *self;
        for (r, sums) in sums.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                let n = panel * PANEL + c * L::N;
                if n >= w.rows {
                    break;
                }
                let count = w.rows - n;
                // SAFETY: the caller's tile is inside `out`, and `count` columns of it are left.
                unsafe {
                    let sum = match bias {
                        Some(bias) => L::add(sum, load_some::<L, f32>(bias.as_ptr().add(n), count)),
                        None => sum,
                    };
                    store_some::<L>(out.get().add((first_row + r) * w.rows + n), sum, count);
                }
            }
        }
    }
}

/// A task: all rows, rounded to bf16, times panels of pairs.
struct PairPanels<'a> {
    args: Args<'a>,
    panels: Range<usize>,
    rounded: &'a mut Rounded,
}

impl Kernel for PairPanels<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        // Only lanes of pairs are given such panels: for the others nothing of what follows is compiled.
        if !L::PAIRS {
            return;
        }
        for first_row in (0..self.args.rows).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(self.args.rows - first_row);
            // SAFETY: rows and panels are inside the shapes of `args`.
            unsafe { self.round::<L>(first_row, rows) };
            for panel in self.panels.clone() {
                // SAFETY: as above.
                unsafe { self.tile_of::<L>(panel, first_row, rows) };
            }
        }
    }
}

impl PairPanels<'_> {
    #[inline(always)]
    unsafe fn round<L: Lanes>(&mut self, first_row: usize, rows: usize) {
        let (cols, stride) = (self.args.w.cols, rounded_stride(self.args.w.cols));
        for r in 0..rows {
            let x = &self.args.x[(first_row + r) * cols..][..cols];
            let out = &mut self.rounded[r * stride..][..stride];
            for k in (0..cols).step_by(L::N) {
                // SAFETY: a row of `rounded` holds whole vectors.
                unsafe { L::store_bf16(out[k..].as_mut_ptr(), load_some::<L, f32>(x[k..].as_ptr(), cols - k)) };
            }
        }
    }

    #[inline(always)]
    unsafe fn tile_of<L: Lanes>(&self, panel: usize, first_row: usize, rows: usize) {
        macro_rules! tiles {
            ($($rows:literal)*) => {
                match rows {
                    // SAFETY: the caller's contract.
                    $($rows => unsafe { self.tile::<L, $rows, 2>(panel, first_row) },)*
                    _ => unreachable!("a tile has at most {TILE_ROWS} rows"),
                }
            };
        }
        tiles!(1 2 3 4 5 6 7 8)
    }

    /// `R` rows by one panel of `C` vectors: the whole sum over k in registers, a pair at a time.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize) {
        let w = self.args.w;
        let pairs = w.layout.depth(w.cols) / 2;
        let stride = rounded_stride(self.args.w.cols) / 2;
        // SAFETY: panel < panels and first_row + R <= rows, by the caller; a pair is as wide as an f32.
        unsafe {
            let weights = w.pages.bytes().as_ptr().cast::<f32>().add(panel * PANEL * pairs);
            let x = self.rounded.as_ptr().cast::<f32>();
            let mut sums = [[L::splat(0.0); C]; R];
            for pair in 0..pairs {
                prefetch(weights.wrapping_add(pair * PANEL + AHEAD / size_of::<f32>()));
                let mut column = [L::splat(0.0); C];
                for (c, column) in column.iter_mut().enumerate() {
                    *column = L::load(weights.add(pair * PANEL + c * L::N));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = L::splat(x.add(r * stride + pair).read_unaligned());
                    for c in 0..C {
                        sums[c] = L::fma_pairs(x, column[c], sums[c]);
                    }
                }
            }
            self.args.store::<L, R, C>(panel, first_row, &sums);
        }
    }
}
