//! A portable vector instruction set: a kernel is written once and compiled for every CPU path.
//!
//! A kernel is a struct with its arguments, and `run::<L>` is its body. `Isa::run` selects `L` and
//! calls the body inside a function that is compiled with the path's CPU features. Everything below
//! is inlined into that function.

mod path;
mod portable;
mod vectors;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use vectors::folded;
pub use vectors::{
    exp, exp_for_bf16, greatest, greatest_magnitude, load_some, load_some_words, opaque, prefetch, round_in_place, store_some, sum,
};

use crate::backend::e4m3::E4m3;

/// A vector of f32. Its methods require that the CPU has the features of the path.
#[allow(clippy::missing_safety_doc)] // one contract for all: the CPU has the features, and pointers are valid for N elements
pub trait Lanes: Copy + 'static {
    const N: usize;
    /// Maximum number of queries of a tile of attention: a tile is code of its own. On x86-64 the
    /// portable path has 1: its multiplications are calls, which tiles do not speed up, and such
    /// tiles were a quarter of all machine code of kernels.
    const ATTENTION_QUERIES: usize = 8;
    /// True if products have code for wide tiles. Others have the narrow tiles of paths with 8 lanes.
    const WIDE_TILES: bool = false;
    type V: Copy;
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_i8(p: *const i8) -> Self::V;
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// 2^i, where v is `ROUNDER` plus the integer i.
    unsafe fn exp2_of_rounded(v: Self::V) -> Self::V;
    /// Stores the low byte of each lane.
    unsafe fn store_low_bytes(p: *mut u8, v: Self::V);
    /// A vector of 32-bit words.
    type I: Copy;
    unsafe fn splat_word(x: u32) -> Self::I;
    unsafe fn load_words(p: *const u32) -> Self::I;
    /// Bitwise and.
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// Shifts each word to the left by `count` bits, or to the right if it is negative. It is a
    /// constant of -3 to 4.
    unsafe fn shift(words: Self::I, count: i32) -> Self::I;
    /// Converts signed integers to f32.
    unsafe fn to_f32(words: Self::I) -> Self::V;
    /// Converts the first bf16 of each pair. `high_bf16` converts the second.
    unsafe fn low_bf16(words: Self::I) -> Self::V;
    unsafe fn high_bf16(words: Self::I) -> Self::V;
    /// Extracts the low four bits of each byte, as bytes. `high_halves` extracts the high four
    /// bits.
    unsafe fn low_halves(words: Self::I) -> Self::I;
    unsafe fn high_halves(words: Self::I) -> Self::I;
    /// sum + the products of each lane's four bytes; `a` is unsigned, `b` signed.
    unsafe fn dot_bytes(sum: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// True if sums of small products are faster in 16 bits: the path has no instruction for
    /// `dot_bytes`.
    const SUMS_IN_16_BITS: bool = false;
    /// Adds the products of each two bytes to 16-bit lanes; `a` is unsigned, `b` signed. The caller
    /// guarantees that no sum overflows.
    unsafe fn add_products(_sum: Self::I, _a: Self::I, _b: Self::I) -> Self::I {
        unreachable!("the path sums in 32 bits")
    }
    /// sum + both 16-bit halves of each word, which are signed.
    unsafe fn add_halves(_sum: Self::I, _halves: Self::I) -> Self::I {
        unreachable!("the path sums in 32 bits")
    }
    /// True if the path multiplies pairs of bf16.
    const PAIRS: bool = false;
    /// a * b + c, where each lane of a and b is a pair of bf16: both products are added.
    unsafe fn fma_pairs(_a: Self::I, _b: Self::I, _c: Self::V) -> Self::V {
        unreachable!("the path has no pairs")
    }
    /// Rounds `rows` rows of 2 * N numbers to bf16, two per word, and transposes the words to
    /// `[word][row]`. Rows are `pitch` numbers apart.
    ///
    /// # Safety
    /// `rows` is in 1..=N. Each row has 2 * N numbers, and `out` has space for N * `rows` words.
    unsafe fn turn_pairs(_x: *const f32, _pitch: usize, _rows: usize, _out: *mut u32) {
        unreachable!("the path has no pairs")
    }
    /// Rounds N numbers to bf16, ties to even.
    unsafe fn store_bf16(_p: *mut u16, _v: Self::V) {
        unreachable!("the path has no pairs")
    }
}

/// Adding and subtracting 1.5 * 2^23 rounds a small f32 to an integer. The integer is then in the
/// low bits.
pub const ROUNDER: f32 = 12_582_912.0;

/// A storage type that is loaded as f32 lanes.
pub trait Element: Copy + Send + Sync + 'static {
    /// # Safety
    /// As for `Lanes`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L::V;
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe { L::load(p) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for half::bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const half::bf16) -> L::V {
        // SAFETY: the caller upholds this function's contract; bf16 is a transparent u16.
        unsafe { L::load_bf16(p.cast()) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16) // same result as the vector paths, also for NaN
    }
}

impl Element for half::f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const half::f16) -> L::V {
        // SAFETY: the caller upholds this function's contract; f16 is a transparent u16.
        unsafe { L::load_f16(p.cast()) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        half::f16::to_f32(self)
    }
}

impl Element for E4m3 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const E4m3) -> L::V {
        // SAFETY: the caller upholds this function's contract; E4m3 is a transparent u8.
        unsafe { L::load_e4m3(p.cast()) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        E4m3::to_f32(self)
    }
}

impl Element for i8 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const i8) -> L::V {
        // SAFETY: the caller upholds this function's contract.
        unsafe { L::load_i8(p) }
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
}

/// A kernel with its arguments.
pub trait Kernel {
    /// `PAIRS`: the kernel multiplies pairs of bf16. `BYTES`: the kernel multiplies bytes. Only
    /// such kernels are compiled for the paths with instructions for it.
    const PAIRS: bool = false;
    const BYTES: bool = false;
    /// # Safety
    /// The CPU has the features of `L`, and the kernel's pointers are valid as the kernel
    /// documents.
    unsafe fn run<L: Lanes>(self);
}
