//! Functions of vectors for kernels: exponentials, sums, and the ends of rows.

use super::{Element, Lanes, ROUNDER};

/// Returns `p`. For the compiler, it is another pointer: values that were loaded by `p` are loaded
/// again by the result, and need no registers in between.
#[allow(clippy::pointers_in_nomem_asm_block)] // nothing is read or written
#[inline(always)]
pub fn opaque<T>(p: *const T) -> *const T {
    let result;
    // SAFETY: there is no instruction, and the pointer stays the same.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) p => result, options(pure, nomem, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        result = p;
    }
    result
}

/// Prefetches the cache line at `p`. The address may be invalid: a prefetch does not fault.
#[inline(always)]
pub fn prefetch<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is in the target's baseline, and a prefetch is a hint that is valid for every
    // address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Returns e^x to about 2 units in the last place. Results saturate at about 1e-38 and 1e38.
#[inline(always)]
pub unsafe fn exp<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller upholds the contract of `Lanes`.
    unsafe {
        // The bounds are the first operands, because max and min return the second operand if one
        // is NaN.
        let x = L::min(L::splat(88.3), L::max(L::splat(-87.3), x));
        // x = n * ln 2 + r, with ln 2 in two parts so that r keeps its precision
        let rounded = L::fma(x, L::splat(std::f32::consts::LOG2_E), L::splat(ROUNDER));
        let n = L::sub(rounded, L::splat(ROUNDER));
        let r = L::fma(n, L::splat(-0.693_359_4), x);
        let r = L::fma(n, L::splat(2.121_944_4e-4), r);
        // Taylor coefficients, the last ones fitted to |r| <= ln 2 / 2
        let mut p = L::splat(1.987_569_1e-4);
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = L::fma(p, r, L::splat(c));
        }
        let p = L::fma(p, L::mul(r, r), L::add(r, L::splat(1.0)));
        L::mul(p, L::exp2_of_rounded(rounded))
    }
}

/// Returns e^x for x <= 0, with a relative error of 1 / 9,000 and half the operations of `exp`.
/// That suffices for results that are rounded to bf16, whose error is 1 / 512.
#[inline(always)]
pub unsafe fn exp_for_bf16<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the caller upholds the contract of `Lanes`.
    unsafe {
        let x = L::max(L::splat(-87.3), x); // propagates NaN
        // e^x = 2^n * 2^f. The polynomial for 2^f is exactly 1 at 0, so the probability of the
        // greatest score is exactly 1.
        let rounded = L::fma(x, L::splat(std::f32::consts::LOG2_E), L::splat(ROUNDER));
        let f = L::fma(x, L::splat(std::f32::consts::LOG2_E), L::sub(L::splat(ROUNDER), rounded));
        let mut p = L::splat(5.500_896_3e-2);
        for c in [2.422_110_3e-1, 6.932_829_6e-1, 1.0] {
            p = L::fma(p, f, L::splat(c));
        }
        L::mul(p, L::exp2_of_rounded(rounded))
    }
}

/// Loads up to `L::N` elements, with zeros for the rest: for the ends of rows.
#[inline(always)]
pub unsafe fn load_some<L: Lanes, E: Element>(p: *const E, count: usize) -> L::V {
    // SAFETY: the caller's pointer is valid for min(count, N) elements.
    unsafe {
        if count >= L::N {
            return E::load::<L>(p);
        }
        let mut lanes = [0.0f32; 16];
        for (i, lane) in lanes.iter_mut().enumerate().take(count) {
            *lane = p.add(i).read_unaligned().to_f32();
        }
        L::load(lanes.as_ptr())
    }
}

/// Like `load_some`, for words.
#[inline(always)]
pub unsafe fn load_some_words<L: Lanes>(p: *const u32, count: usize) -> L::I {
    // SAFETY: the caller's pointer is valid for min(count, N) words.
    unsafe {
        if count >= L::N {
            return L::load_words(p);
        }
        let mut lanes = [0u32; 16];
        std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), count);
        L::load_words(lanes.as_ptr())
    }
}

/// Rounds a row to bf16, into the first half of its own memory.
#[inline(always)]
pub unsafe fn round_in_place<L: Lanes>(row: &mut [f32]) {
    let from = row.as_mut_ptr();
    let to = from.cast::<u16>();
    let whole = row.len() / L::N * L::N;
    // SAFETY: each vector is read before the memory that it occupies is overwritten.
    unsafe {
        for i in (0..whole).step_by(L::N) {
            L::store_bf16(to.add(i), L::load(from.add(i)));
        }
        if whole < row.len() {
            let mut rounded = [0u16; 16];
            L::store_bf16(rounded.as_mut_ptr(), load_some::<L, f32>(from.add(whole), row.len() - whole));
            std::ptr::copy_nonoverlapping(rounded.as_ptr(), to.add(whole), row.len() - whole);
        }
    }
}

/// Stores the first `count` (at most N) lanes.
#[inline(always)]
pub unsafe fn store_some<L: Lanes>(p: *mut f32, v: L::V, count: usize) {
    // SAFETY: the caller's pointer is valid for min(count, N) elements.
    unsafe {
        if count >= L::N {
            return L::store(p, v);
        }
        let mut lanes = [0.0f32; 16];
        L::store(lanes.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, count);
    }
}

/// Reduces a vector's lanes pairwise: combines its halves until one lane is left. Each step has its
/// own array, because a modified array would be kept in memory.
macro_rules! folded {
    ($lanes:expr, |$a:ident, $b:ident| $f:expr) => {{
        let lanes: [f32; 16] = $lanes;
        let (mut eight, mut four, mut two) = ([0.0; 8], [0.0; 4], [0.0; 2]);
        folded!(lanes, eight, 8, |$a, $b| $f);
        folded!(eight, four, 4, |$a, $b| $f);
        folded!(four, two, 2, |$a, $b| $f);
        let [$a, $b] = two;
        $f
    }};
    ($from:ident, $to:ident, $half:literal, |$a:ident, $b:ident| $f:expr) => {
        for i in 0..$half {
            let ($a, $b): (f32, f32) = ($from[i], $from[$half + i]);
            $to[i] = $f;
        }
    };
}

pub(in super::super) use folded;

/// Returns the sum of a vector's lanes.
#[inline(always)]
pub unsafe fn sum<L: Lanes>(v: L::V) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no path has more than 16 lanes.
    unsafe { L::store(lanes.as_mut_ptr(), v) };
    folded!(lanes, |a, b| a + b)
}

/// Returns the maximum of `min` and of the whole vectors in `x`. Ignores NaN.
#[inline(always)]
pub unsafe fn greatest<L: Lanes>(x: &[f32], min: f32) -> f32 {
    let mut lanes = [min; 16];
    // SAFETY: the caller upholds the contract of `Lanes`; no path has more than 16 lanes. `max`
    // returns its second operand if the first is NaN.
    unsafe {
        let mut max = L::splat(min);
        for chunk in x.chunks_exact(L::N) {
            max = L::max(L::load(chunk.as_ptr()), max);
        }
        L::store(lanes.as_mut_ptr(), max);
    }
    folded!(lanes, |a, b| if b > a { b } else { a })
}

/// Returns the greatest absolute value. If a number is not finite, neither is the result.
#[inline(always)]
pub fn greatest_magnitude(x: &[f32]) -> f32 {
    // Compared as bits: infinities and NaN are greater than every finite number.
    let mut max_bits = 0;
    for x in x {
        max_bits = max_bits.max(x.to_bits() & 0x7fff_ffff);
    }
    f32::from_bits(max_bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::lanes::Kernel;
    use crate::backend::e4m3::E4m3;
    use crate::types::options::Isa;

    struct Exp<'a> {
        for_bf16: bool,
        x: &'a mut [f32],
    }
    impl Kernel for Exp<'_> {
        #[inline(always)]
        unsafe fn run<L: Lanes>(self) {
            for chunk in self.x.chunks_mut(L::N) {
                // SAFETY: `load_some` and `store_some` stay inside the chunk.
                unsafe {
                    let x = load_some::<L, f32>(chunk.as_ptr(), chunk.len());
                    let exp = if self.for_bf16 { exp_for_bf16::<L>(x) } else { exp::<L>(x) };
                    store_some::<L>(chunk.as_mut_ptr(), exp, chunk.len());
                }
            }
        }
    }

    struct TurnPairs<'a> {
        x: &'a [f32], // [rows, pitch]
        pitch: usize,
        words: &'a mut [u32],
    }
    impl Kernel for TurnPairs<'_> {
        const PAIRS: bool = true;
        #[inline(always)]
        unsafe fn run<L: Lanes>(self) {
            let rows = self.x.len() / self.pitch;
            assert!((1..=L::N).contains(&rows) && self.pitch >= 2 * L::N && self.words.len() >= L::N * rows);
            // SAFETY: the assertion above checks the contract of `turn_pairs`.
            unsafe { L::turn_pairs(self.x.as_ptr(), self.pitch, rows, self.words.as_mut_ptr()) };
        }
    }

    #[test]
    fn pairs_are_adjacent_and_nothing_is_written_beyond_them() {
        if !Isa::Avx512Bf16.can_run() {
            return eprintln!("skipped: this machine has neither AVX-512 BF16 nor AVX2");
        }
        const POISON: u32 = 0xdead_beef;
        let pitch = 37;
        for rows in 1..=16 {
            let x: Vec<f32> = (0..rows * pitch).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut words = vec![POISON; 16 * rows + 16];
            // SAFETY: the path can run.
            unsafe { Isa::Avx512Bf16.run(TurnPairs { x: &x, pitch, words: &mut words }) };
            let bits = |row: usize, k: usize| half::bf16::from_f32(x[row * pitch + k]).to_bits() as u32;
            for (place, &word) in words.iter().enumerate() {
                let (k, row) = (place / rows, place % rows);
                let expected = if k < 16 { bits(row, 2 * k) | bits(row, 2 * k + 1) << 16 } else { POISON };
                assert_eq!(word, expected, "{rows} rows: word {k} of row {row}");
            }
        }
    }

    #[test]
    fn exp_of_nan_is_nan_on_every_path() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.can_run()) {
            let mut x = [f32::NAN; 17];
            // SAFETY: the path can run.
            unsafe { isa.run(Exp { for_bf16: false, x: &mut x }) };
            assert!(x.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn exp_is_accurate_to_a_few_ulps_on_every_path() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.can_run()) {
            let xs: Vec<f32> = (-8700..8800).map(|i| i as f32 * 0.01).collect();
            let mut ys = xs.clone();
            // SAFETY: the path can run.
            unsafe { isa.run(Exp { for_bf16: false, x: &mut ys }) };
            for (x, y) in xs.iter().zip(&ys) {
                let exact = (*x as f64).exp();
                assert!(((*y as f64) / exact - 1.0).abs() < 4e-7, "{} exp({x}) = {y}, not {exact}", isa.name());
            }
        }
    }

    #[test]
    fn exp_for_bf16_is_accurate_beyond_its_rounding_on_every_path() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.can_run()) {
            let xs: Vec<f32> = (0..87_000).map(|i| i as f32 * -0.001).chain([f32::NEG_INFINITY, f32::NAN]).collect();
            let mut ys = xs.clone();
            // SAFETY: the path can run.
            unsafe { isa.run(Exp { for_bf16: true, x: &mut ys }) };
            assert_eq!(ys[0], 1.0, "{}", isa.name());
            assert!(
                ys.pop().is_some_and(f32::is_nan) && ys.pop().is_some_and(|smallest| (0.0..1.3e-38).contains(&smallest)),
                "{}",
                isa.name()
            );
            for (x, y) in xs.iter().zip(&ys) {
                let exact = (*x as f64).exp();
                assert!(((*y as f64) / exact - 1.0).abs() < 1.1e-4, "{} exp({x}) = {y}, not {exact}", isa.name());
            }
        }
    }

    struct ReadE4m3<'a>(&'a [E4m3], &'a mut [f32]);
    impl Kernel for ReadE4m3<'_> {
        #[inline(always)]
        unsafe fn run<L: Lanes>(self) {
            for (from, to) in self.0.chunks(L::N).zip(self.1.chunks_mut(L::N)) {
                // SAFETY: `load_some` and `store_some` stay inside the chunks.
                unsafe { store_some::<L>(to.as_mut_ptr(), load_some::<L, E4m3>(from.as_ptr(), from.len()), from.len()) };
            }
        }
    }

    #[test]
    fn every_8_bit_number_decodes_to_the_same_value_on_every_path() {
        let codes: Vec<E4m3> = (0..=255).map(E4m3).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.can_run()) {
            // The second iteration has vectors that are not full.
            for first in [0, 3] {
                let mut read = vec![f32::NAN; codes.len() - first];
                // SAFETY: the path can run.
                unsafe { isa.run(ReadE4m3(&codes[first..], &mut read)) };
                for (code, read) in codes[first..].iter().zip(read) {
                    assert_eq!(read.to_bits(), code.to_f32().to_bits(), "{} {code:?}: {read}", isa.name());
                }
            }
        }
    }
}
