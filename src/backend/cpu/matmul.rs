//! Packed weights and the one matrix product.
//!
//! Weights lie in panels of 32 output columns: `[panel][k][32]`, so that every path streams them in
//! order. An output element is accumulated over k from first to last whatever the tile around it:
//! one row and a thousand rows give the same bits.

use half::{bf16, f16};

use super::lanes::{Element, Kernel, Lanes};
use super::pool::Pool;
use super::{Buf, SendPtr};
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
    pages: Pages, // [rows / 32 rounded up][cols][32]
}

impl Matrix {
    pub fn bytes(rows: usize, cols: usize, dtype: Dtype) -> u64 {
        (rows.div_ceil(PANEL) * PANEL) as u64 * cols as u64 * dtype.bytes() as u64
    }

    pub fn load(pool: &Pool, rows: usize, cols: usize, dtype: Dtype, source: crate::backend::RowSource) -> Result<Matrix> {
        let mut matrix = Matrix { rows, cols, dtype, pages: Pages::zeroed(Self::bytes(rows, cols, dtype) as usize)? };
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
        let cols = self.cols;
        let (packed, _) = self.pages.bytes_mut().as_chunks_mut::<N>();
        let packed = SendPtr(packed[first * cols..].as_mut_ptr());
        pool.run((elements.len() / cols).div_ceil(PANEL), &|panel, _| {
            let rows = &elements[panel * PANEL * cols..elements.len().min((panel + 1) * PANEL * cols)];
            // SAFETY: each task writes its own panel, which lies inside the pages.
            let out = unsafe { std::slice::from_raw_parts_mut(packed.get().add(panel * PANEL * cols), PANEL * cols) };
            for (n, row) in rows.chunks_exact(cols).enumerate() {
                for (k, element) in row.iter().enumerate() {
                    out[k * PANEL + n] = *element;
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
        let column = elements[n / PANEL * PANEL * self.cols..].iter().skip(n % PANEL).step_by(PANEL);
        for (k, element) in column.take(self.cols).enumerate() {
            visit(k, value(element));
        }
    }
}

/// out[r][n] = sum over k of x[r][k] * w[n][k], plus bias[n]
pub fn matmul(isa: Isa, pool: &Pool, rows: usize, x: &Buf, w: &Matrix, bias: Option<&Buf>, out: &mut Buf) {
    let (x, bias) = (&x[..rows * w.cols], bias.map(|b| &b[..w.rows]));
    let out = &mut out[..rows * w.rows];
    let args = Args { rows, x, w, bias, out: SendPtr(out.as_mut_ptr()) };
    match w.dtype {
        Dtype::F32 => run::<f32>(isa, pool, args),
        Dtype::F16 => run::<f16>(isa, pool, args),
        Dtype::Bf16 => run::<bf16>(isa, pool, args),
    }
}

#[derive(Clone, Copy)]
struct Args<'a> {
    rows: usize,
    x: &'a [f32], // [rows, cols]
    w: &'a Matrix,
    bias: Option<&'a [f32]>, // [w.rows]
    out: SendPtr<f32>,       // [rows, w.rows]
}

fn run<E: Element>(isa: Isa, pool: &Pool, args: Args) {
    let panels = args.w.rows.div_ceil(PANEL);
    let panel_bytes = PANEL * args.w.cols * size_of::<E>();
    let fair = panels.div_ceil(pool.threads() * 4); // enough tasks for every thread
    let per_task = (TASK_BYTES / panel_bytes.max(1)).clamp(1, fair.max(1));
    pool.run(panels.div_ceil(per_task), &|task, _| {
        let first = task * per_task;
        // SAFETY: the path is present; tasks write disjoint columns of `out`.
        unsafe { isa.run(Panels::<E> { args, first, last: panels.min(first + per_task), element: std::marker::PhantomData }) };
    });
}

/// A task: all rows times the panels `first..last`.
struct Panels<'a, E> {
    args: Args<'a>,
    first: usize,
    last: usize,
    element: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for Panels<'_, E> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // 16 accumulators of 16 lanes, or 12 of 8: what the register file holds beside weights and inputs.
        let tile_rows = if L::N == 16 { TILE_ROWS } else { 3 };
        for first_row in (0..self.args.rows).step_by(tile_rows) {
            let rows = tile_rows.min(self.args.rows - first_row);
            for panel in self.first..self.last {
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
        let Args { x, w, bias, out, .. } = self.args;
        // SAFETY: panel < panels and first_row + R <= rows, by the caller.
        unsafe {
            let weights = w.pages.bytes().as_ptr().cast::<E>().add(panel * PANEL * w.cols);
            let x = x.as_ptr().add(first_row * w.cols);
            let mut sums = [[L::splat(0.0); C]; R];
            for k in 0..w.cols {
                super::lanes::prefetch(weights.wrapping_add(k * PANEL + AHEAD / size_of::<E>()));
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
            for (r, sums) in sums.iter().enumerate() {
                for (c, &sum) in sums.iter().enumerate() {
                    let n = panel * PANEL + c * L::N;
                    if n < w.rows {
                        let count = w.rows - n;
                        let sum = match bias {
                            Some(bias) => L::add(sum, super::lanes::load_some::<L, f32>(bias.as_ptr().add(n), count)),
                            None => sum,
                        };
                        super::lanes::store_some::<L>(out.get().add((first_row + r) * w.rows + n), sum, count);
                    }
                }
            }
        }
    }
}
