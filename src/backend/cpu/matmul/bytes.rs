//! Tiles of integer weights.
//!
//! Rows are quantized to integers too, with a scale per group of columns (`rows`). Sums within a
//! group are exact, in 32 bits, and therefore identical on every path. The groups' results are then
//! added in f32, in order.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::lanes::{Kernel, Lanes, prefetch};
use super::{AHEAD, Args, BYTE_ROWS, Kept, LINE, PANEL, Stretch, Tiled, each_tile, for_sums};

/// Bytes of one step of a panel: four columns in int8, or eight columns in int4.
pub const STEP_BYTES: usize = PANEL * 4;

/// Words of a row in a block with several groups.
pub const BLOCK_WORDS: usize = 64;

/// Returns the position of a code's high bits in its byte of the word of high bits. The word of a
/// group has the bits of column `4 * word + byte` in byte `byte`, from bit 4, 6, 0, 2 on for the
/// four words of codes of 6 bits, and at bit 4, 5, 6, 7, 0, 1, 2, 3 for the eight words of codes of
/// 5 bits. One shift of the whole word moves them to bit 4 of their bytes.
pub const fn high_bit(bits: u32, word: usize) -> u32 {
    (4 + (bits - 4) * word as u32) % 8
}

/// An integer storage format of weights.
pub trait Whole: Copy + 'static {
    /// Bits of a weight: 4, 5, 6 or 8.
    const BITS: u32;
    /// True if each group has an offset per output. Otherwise sums start at the row's correction.
    const OFFSETS: bool;
    /// Bytes of scales and offsets before the groups of each block of `BLOCK_WORDS` words.
    const HEAD: usize = 0;
    /// Bytes of scales and offsets after the weights of each group of a panel.
    const TAIL: usize;
    /// Words of a row per step.
    const WORDS: usize = if Self::BITS == 8 { 1 } else { 2 };
    /// Number of words whose products can be added in 16 bits. Each word adds two products of a
    /// code and a byte of a row, of which the magnitude is at most 128: with 4 bits,
    /// 2 * 8 * 15 * 128 = 30,720.
    const SMALL_WORDS: usize = match Self::BITS {
        4 => 8,
        5 => 4,
        _ => 2,
    };
    /// Bytes of the high bits before the weights of each group of a panel.
    const HIGH: usize = if matches!(Self::BITS, 5 | 6) { STEP_BYTES } else { 0 };
    /// Converts vector `c` of a group's sums to f32, before it is scaled by the row's scale.
    /// `correction` is the row's, `head` the block's, `tail` the group's.
    ///
    /// # Safety
    /// As for `Lanes`. `head` is valid for `HEAD` bytes, and `tail` for `TAIL` bytes.
    unsafe fn value<L: Lanes>(dots: L::I, correction: u32, head: *const u8, tail: *const u8, c: usize) -> L::V;
    /// Finishes the sum over all groups. `_end` points behind the panel's last group.
    ///
    /// # Safety
    /// As for `Lanes`.
    unsafe fn finish<L: Lanes>(sum: L::V, _end: *const u8, _c: usize) -> L::V {
        sum
    }
}

/// One byte per weight, with one scale per output after all groups.
#[derive(Clone, Copy)]
pub struct PerOutput;

impl Whole for PerOutput {
    const BITS: u32 = 8;
    const OFFSETS: bool = false;
    const TAIL: usize = 0;
    #[inline(always)]
    unsafe fn value<L: Lanes>(dots: L::I, _correction: u32, _head: *const u8, _tail: *const u8, _c: usize) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe { L::to_f32(dots) }
    }
    #[inline(always)]
    unsafe fn finish<L: Lanes>(sum: L::V, end: *const u8, c: usize) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe { L::mul(sum, L::load(end.cast::<f32>().add(c * L::N))) }
    }
}

/// Each group of each output has a scale in f16, and, with `OFFSETS`, an offset in f16 for
/// asymmetric quantization.
#[derive(Clone, Copy)]
pub struct Grouped<const BITS: u32, const OFFSETS: bool>;

impl<const BITS: u32, const OFFSETS: bool> Whole for Grouped<BITS, OFFSETS> {
    const BITS: u32 = BITS;
    const OFFSETS: bool = OFFSETS;
    const TAIL: usize = if OFFSETS { PANEL * 4 } else { PANEL * 2 };
    #[inline(always)]
    unsafe fn value<L: Lanes>(dots: L::I, correction: u32, _head: *const u8, tail: *const u8, c: usize) -> L::V {
        let scales = tail.cast::<u16>();
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let value = L::mul(L::to_f32(dots), L::load_f16(scales.add(c * L::N)));
            match OFFSETS {
                true => L::fma(L::load_f16(scales.add(PANEL + c * L::N)), L::splat(f32::from_bits(correction)), value),
                false => value,
            }
        }
    }
}

/// Each block of each output has a scale in f16. Each group has a signed byte, whose product with
/// it is the scale of the group. With `OFFSETS`, the same applies to offsets.
#[derive(Clone, Copy)]
pub struct Nested<const BITS: u32, const OFFSETS: bool>;

impl<const BITS: u32, const OFFSETS: bool> Whole for Nested<BITS, OFFSETS> {
    const BITS: u32 = BITS;
    const OFFSETS: bool = OFFSETS;
    const HEAD: usize = if OFFSETS { PANEL * 4 } else { PANEL * 2 };
    const TAIL: usize = if OFFSETS { PANEL * 2 } else { PANEL };
    #[inline(always)]
    unsafe fn value<L: Lanes>(dots: L::I, correction: u32, head: *const u8, tail: *const u8, c: usize) -> L::V {
        let (block, group) = (head.cast::<u16>(), tail.cast::<i8>());
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            let number = |first: usize| L::mul(L::load_f16(block.add(first + c * L::N)), L::load_i8(group.add(first + c * L::N)));
            let value = L::mul(L::to_f32(dots), number(0));
            match OFFSETS {
                true => L::fma(number(PANEL), L::splat(f32::from_bits(correction)), value),
                false => value,
            }
        }
    }
}

/// A task: all rows times a range of panels.
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
        // SAFETY: the arguments and panels are those of this kernel, and their contract is that of
        // `run`.
        unsafe { each_tile::<L, _>(&self, &self.args, &self.panels) };
    }
}

impl<W: Whole> Tiled for Bytes<'_, W> {
    const MAX_ROWS: usize = BYTE_ROWS;
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&self, panel: usize, first_row: usize, stretch: Stretch, kept: &mut Kept) {
        let rows = self.args.rows;
        // SAFETY: the caller guarantees panel, rows and stretch. Rows were packed to whole steps
        // and groups.
        unsafe {
            // Words, groups and blocks before the stretch.
            let (words, groups) = (stretch.first, stretch.first / rows.group_words);
            let before = words / W::WORDS * STEP_BYTES + groups * (W::HIGH + W::TAIL) + words / BLOCK_WORDS * W::HEAD;
            let mut weights = self.args.w.panel(panel).add(before);
            let mut x = rows.words(first_row).add(stretch.first * R);
            let (mut scales, mut corrections) = (rows.scales(first_row).add(groups * R), rows.corrections(first_row).add(groups * R));
            let mut head = weights;
            let mut sums = MaybeUninit::uninit();
            let sums = stretch.begin::<L, R, C>(kept, &mut sums);
            let mut words_left = stretch.len;
            while words_left > 0 {
                let words = words_left.min(rows.group_words);
                // A stretch consists of whole blocks.
                if W::HEAD > 0 && (stretch.len - words_left).is_multiple_of(BLOCK_WORDS) {
                    head = weights;
                    weights = weights.add(W::HEAD);
                }
                words_left -= words;
                let mut dots = [[L::splat_word(0); C]; R];
                if !W::OFFSETS {
                    for (r, dots) in dots.iter_mut().enumerate() {
                        *dots = [L::splat_word(*corrections.add(r)); C];
                    }
                }
                if const { W::HIGH > 0 } {
                    dots_with_high_bits::<L, W, R, C>(weights, x, &mut dots);
                } else {
                    dots_of::<L, W, R, C>(weights, x, words, &mut dots);
                }
                (weights, x) = (weights.add(W::HIGH + words / W::WORDS * STEP_BYTES), x.add(words * R));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let scale = L::splat(*scales.add(r));
                    for c in 0..C {
                        sums[c] = L::fma(W::value::<L>(dots[r][c], *corrections.add(r), head, weights, c), scale, sums[c]);
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

/// Returns the low bits of the weights that belong to word `k` of a step.
///
/// # Safety
/// As for `Lanes`.
#[inline(always)]
unsafe fn low_bits<L: Lanes, W: Whole>(step: L::I, k: usize) -> L::I {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        match (W::WORDS, k) {
            (1, _) => step,
            (_, 0) => L::low_halves(step),
            _ => L::high_halves(step),
        }
    }
}

/// `dots[r][c] +=` the products of `words` words.
///
/// # Safety
/// As for `Lanes`. `weights` and `x` are valid for `words` words.
#[inline(always)]
unsafe fn dots_of<L: Lanes, W: Whole, const R: usize, const C: usize>(
    weights: *const u8,
    x: *const u32,
    words: usize,
    dots: &mut [[L::I; C]; R],
) {
    // SAFETY: the caller guarantees that `weights` and `x` are valid for `words` words.
    unsafe {
        let (mut weights, mut x) = (weights, x);
        let at_once = if Dots::<L, W, R, C>::IN_16_BITS { W::SMALL_WORDS } else { words };
        let mut left = words;
        while left > 0 {
            let some = at_once.min(left);
            left -= some;
            let mut sums = Dots::<L, W, R, C>::begin(dots);
            for _ in 0..some / W::WORDS {
                for line in (0..STEP_BYTES).step_by(LINE) {
                    prefetch(weights.wrapping_add(AHEAD + line));
                }
                for k in 0..W::WORDS {
                    let mut column = [L::splat_word(0); C];
                    for (c, column) in column.iter_mut().enumerate() {
                        *column = low_bits::<L, W>(L::load_words(weights.cast::<u32>().add(c * L::N)), k);
                    }
                    sums.add(column, x.add(k * R));
                }
                weights = weights.add(STEP_BYTES);
                x = x.add(W::WORDS * R);
            }
            sums.flush(dots);
        }
    }
}

/// Sums of products of a few words.
struct Dots<L: Lanes, W, const R: usize, const C: usize>([[L::I; C]; R], PhantomData<W>);

impl<L: Lanes, W: Whole, const R: usize, const C: usize> Dots<L, W, R, C> {
    /// True if products are summed in 16 bits, where that is faster and they have less than 8 bits.
    const IN_16_BITS: bool = L::SUMS_IN_16_BITS && W::BITS < 8;

    /// # Safety
    /// As for `Lanes`. The same applies to all functions.
    #[inline(always)]
    unsafe fn begin(dots: &[[L::I; C]; R]) -> Self {
        const { assert!(W::BITS == 8 || 2 * W::SMALL_WORDS * ((1 << W::BITS) - 1) * 128 <= i16::MAX as usize) };
        // SAFETY: the caller upholds this function's contract.
        Dots(unsafe { if Self::IN_16_BITS { [[L::splat_word(0); C]; R] } else { *dots } }, PhantomData)
    }

    /// Adds the products of a word of the weights with a word of each row, which begin at `x`.
    #[inline(always)]
    unsafe fn add(&mut self, column: [L::I; C], x: *const u32) {
        // SAFETY: the caller upholds this function's contract, and `x` is valid for R words.
        unsafe {
            for (r, sums) in self.0.iter_mut().enumerate() {
                let x = L::splat_word(*x.add(r));
                for c in 0..C {
                    sums[c] = match Self::IN_16_BITS {
                        true => L::add_products(sums[c], column[c], x),
                        false => L::dot_bytes(sums[c], column[c], x),
                    };
                }
            }
        }
    }

    /// Moves the sums to `dots`.
    #[inline(always)]
    unsafe fn flush(&mut self, dots: &mut [[L::I; C]; R]) {
        // SAFETY: the caller upholds this function's contract.
        unsafe {
            for (dot, sum) in dots.as_flattened_mut().iter_mut().zip(self.0.as_flattened_mut()) {
                if Self::IN_16_BITS {
                    *dot = L::add_halves(*dot, *sum);
                    *sum = L::splat_word(0);
                } else {
                    *dot = *sum;
                }
            }
        }
    }
}

/// `dots[r][c] +=` the products of a group whose weights have high bits. They fill one word per
/// output.
///
/// # Safety
/// As for `Lanes`. `weights` and `x` are valid for a group.
#[inline(always)]
unsafe fn dots_with_high_bits<L: Lanes, W: Whole, const R: usize, const C: usize>(
    weights: *const u8,
    x: *const u32,
    dots: &mut [[L::I; C]; R],
) {
    // SAFETY: the caller guarantees that `weights` and `x` are valid for the words of a group.
    unsafe {
        let mut high = [L::splat_word(0); C];
        for (c, high) in high.iter_mut().enumerate() {
            *high = L::load_words(weights.cast::<u32>().add(c * L::N));
        }
        let mask = L::splat_word(if W::BITS == 5 { 0x1010_1010 } else { 0x3030_3030 });
        let mut sums = Dots::<L, W, R, C>::begin(dots);
        // Unrolled, so that shifts are by constants.
        macro_rules! each_word {
            ($($word:literal)*) => {
                $(if const { $word < if W::BITS == 5 { 8 } else { 4 } } {
                    let step = weights.add((1 + $word / 2) * STEP_BYTES);
                    let mut column = [L::splat_word(0); C];
                    for (c, column) in column.iter_mut().enumerate() {
                        let low = low_bits::<L, W>(L::load_words(step.cast::<u32>().add(c * L::N)), $word % 2);
                        let place = const { high_bit(W::BITS, $word) as i32 };
                        *column = L::or(low, L::and(L::shift(high[c], 4 - place), mask));
                    }
                    for line in (0..STEP_BYTES / 2).step_by(LINE) {
                        prefetch(step.wrapping_add(AHEAD + $word % 2 * STEP_BYTES / 2 + line));
                    }
                    sums.add(column, x.add($word * R));
                    if ($word + 1) % W::SMALL_WORDS == 0 {
                        sums.flush(dots);
                    }
                })*
            };
        }
        each_word!(0 1 2 3 4 5 6 7);
    }
}
