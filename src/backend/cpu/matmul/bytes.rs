//! Tiles of weights in whole numbers.
//!
//! Rows come in whole numbers too, each group of their columns with a scale of its own (`rows`). Within a group sums are exact, in 32 bits: so
//! every path has the same. Groups are then added up in f32, first to last.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::lanes::{Kernel, Lanes, prefetch};
use super::{AHEAD, Args, BYTE_ROWS, Kept, LINE, PANEL, Stretch, Tiled, each_tile, for_sums};

/// Bytes of four columns of a panel, a byte each; or of eight, half a byte each.
pub const STEP_BYTES: usize = PANEL * 4;

/// How whole numbers are stored.
pub trait Whole: Copy + 'static {
    /// Words of a row that a step takes.
    const WORDS: usize;
    /// Whether a group has an offset for each output. Otherwise sums begin with the row's correction.
    const OFFSETS: bool;
    /// Bytes behind the weights of each group of a panel: its scales and offsets.
    const TAIL: usize;
    /// The bytes for word `k` of a step.
    /// # Safety
    /// As for `Lanes`.
    unsafe fn bytes<L: Lanes>(step: L::I, k: usize) -> L::I;
    /// What vector `c` of a group's sums stands for, before it is scaled as the row is; `correction` is the row's, the tail the group's.
    /// # Safety
    /// As for `Lanes`.
    unsafe fn value<L: Lanes>(dots: L::I, correction: u32, tail: *const u8, c: usize) -> L::V;
    /// All groups' sum, before it is stored; `end` lies behind the panel's last group.
    /// # Safety
    /// As for `Lanes`.
    unsafe fn finish<L: Lanes>(sum: L::V, _end: *const u8, _c: usize) -> L::V {
        sum
    }
}

/// A byte each, with one scale for each output, behind all groups.
#[derive(Clone, Copy)]
pub struct Int8;

impl Whole for Int8 {
    const WORDS: usize = 1;
    const OFFSETS: bool = false;
    const TAIL: usize = 0;
    #[inline(always)]
    unsafe fn bytes<L: Lanes>(step: L::I, _k: usize) -> L::I {
        step
    }
    #[inline(always)]
    unsafe fn value<L: Lanes>(dots: L::I, _correction: u32, _tail: *const u8, _c: usize) -> L::V {
        // SAFETY: the caller's contract.
        unsafe { L::to_f32(dots) }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::V, end: *const u8, c: usize) -> L::V {
        // SAFETY: the caller's contract.
        unsafe { L::mul(sum, L::load(end.cast::<f32>().add(c * L::N))) }
    }
}

/// Half a byte each; each group of each output has a scale in f16, and an offset where weights need not lie around 0.
#[derive(Clone, Copy)]
pub struct Int4<const OFFSETS: bool>;

impl<const OFFSETS: bool> Whole for Int4<OFFSETS> {
    const WORDS: usize = 2;
    const OFFSETS: bool = OFFSETS;
    const TAIL: usize = if OFFSETS { PANEL * 4 } else { PANEL * 2 };
    #[inline(always)]
    unsafe fn bytes<L: Lanes>(step: L::I, k: usize) -> L::I {
        // SAFETY: the caller's contract.
        unsafe { if k == 0 { L::low_halves(step) } else { L::high_halves(step) } }
    }
    #[inline(always)]
    unsafe fn value<L: Lanes>(dots: L::I, correction: u32, tail: *const u8, c: usize) -> L::V {
        let scales = tail.cast::<u16>();
        // SAFETY: the caller's contract.
        unsafe {
            let value = L::mul(L::to_f32(dots), L::load_f16(scales.add(c * L::N)));
            match OFFSETS {
                true => L::fma(L::load_f16(scales.add(PANEL + c * L::N)), L::splat(f32::from_bits(correction)), value),
                false => value,
            }
        }
    }
}

/// A task: all rows times some panels.
pub struct Bytes<'a, W> {
    args: Args<'a>,
    panels: Range<usize>,
    whole: PhantomData<W>,
}

impl<'a, W> Bytes<'a, W> {
    pub fn new(args: Args<'a>, panels: Range<usize>) -> Self {
        Bytes { args, panels, whole: PhantomData }
    }
}

impl<W: Whole> Kernel for Bytes<'_, W> {
    const BYTES: bool = true;
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: they are its own.
        unsafe { each_tile::<L, _>(&self, &self.args, &self.panels) };
    }
}

impl<W: Whole> Tiled for Bytes<'_, W> {
    const MOST_ROWS: usize = BYTE_ROWS;
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize, stretch: Stretch, kept: &mut Kept) {
        let rows = self.args.rows;
        // SAFETY: the caller's contract; rows were packed to whole steps and groups.
        unsafe {
            let groups = stretch.first / rows.group_words; // those before
            let mut weights = self.args.w.panel(panel).add(stretch.first / W::WORDS * STEP_BYTES + groups * W::TAIL);
            let mut x = rows.words(first_row).add(stretch.first * R);
            let (mut scales, mut corrections) = (rows.scales(first_row).add(groups * R), rows.corrections(first_row).add(groups * R));
            let mut sums = MaybeUninit::uninit();
            let sums = stretch.begin::<L, R, C>(kept, &mut sums);
            let mut words_left = stretch.len;
            while words_left > 0 {
                let words = words_left.min(rows.group_words);
                words_left -= words;
                let mut dots = [[L::splat_word(0); C]; R];
                if !W::OFFSETS {
                    for (r, dots) in dots.iter_mut().enumerate() {
                        *dots = [L::splat_word(*corrections.add(r)); C];
                    }
                }
                dots_of::<L, W, R, C>(weights, x, words, &mut dots);
                (weights, x) = (weights.add(words / W::WORDS * STEP_BYTES), x.add(words * R));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let scale = L::splat(*scales.add(r));
                    for c in 0..C {
                        sums[c] = L::fma(W::value::<L>(dots[r][c], *corrections.add(r), weights, c), scale, sums[c]);
                    }
                }
                (scales, corrections, weights) = (scales.add(R), corrections.add(R), weights.add(W::TAIL));
            }
            if !stretch.last {
                return kept.store::<L, R, C>(sums);
            }
            for_sums!(R, C, |r, c| sums[r][c] = W::finish::<L>(sums[r][c], weights, c));
            self.args.store::<L, R, C>(panel, first_row, sums, kept);
        }
    }
}

/// dots[r][c] += the products of so many words
/// # Safety
/// As for `Lanes`; weights and x reach so far.
#[inline(always)]
unsafe fn dots_of<L: Lanes, W: Whole, const R: usize, const C: usize>(
    weights: *const u8,
    x: *const u32,
    words: usize,
    dots: &mut [[L::I; C]; R],
) {
    // SAFETY: the caller's contract: weights and x reach so far.
    unsafe {
        let (mut weights, mut x) = (weights, x);
        for _ in 0..words / W::WORDS {
            for line in (0..STEP_BYTES).step_by(LINE) {
                prefetch(weights.wrapping_add(AHEAD + line));
            }
            for k in 0..W::WORDS {
                let mut column = [L::splat_word(0); C];
                for (c, column) in column.iter_mut().enumerate() {
                    *column = W::bytes::<L>(L::load_words(weights.cast::<u32>().add(c * L::N)), k);
                }
                for (r, dots) in dots.iter_mut().enumerate() {
                    let x = L::splat_word(*x.add(k * R + r));
                    for c in 0..C {
                        dots[c] = L::dot_bytes(dots[c], column[c], x);
                    }
                }
            }
            weights = weights.add(STEP_BYTES);
            x = x.add(W::WORDS * R);
        }
    }
}
