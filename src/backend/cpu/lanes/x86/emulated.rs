//! AVX-512 and AVX-VNNI for tests on machines without them: a vector of 512 bits is two of AVX2.
//!
//! Functions have the names of the intrinsics that the paths use. Most apply an instruction of AVX2
//! to both halves. The others are written for single elements, as the manual of the CPU defines them.
//! No function is inlined: the compiler would take minutes for the kernels.

#![allow(non_camel_case_types, unused_unsafe)] // names of intrinsics; in contrast to them, few functions here are unsafe

use std::arch::x86_64::*;
use std::mem::transmute;

use super::Lanes;

/// Operations are calls, with which wide tiles would take the compiler minutes.
const WIDE_TILES: bool = false;

#[derive(Clone, Copy)]
pub struct __m512(__m256, __m256);
#[derive(Clone, Copy)]
pub struct __m512i(__m256i, __m256i);
/// Pairs of bf16, the first one in the low half of a word.
#[derive(Clone, Copy)]
pub struct __m512bh([[u16; 2]; 16]);
type __m256bh = [u16; 16];
type __mmask16 = u16;

/// Applies an instruction of AVX2 to both halves.
macro_rules! halves {
    ($($name:ident($($x:ident),*) = $half:ident: $v:ident;)*) => {
        $(
            #[inline(never)]
            #[target_feature(enable = "avx2,fma")]
            fn $name($($x: $v),*) -> $v {
                $v($half($($x.0),*), $half($($x.1),*))
            }
        )*
    };
}

halves! {
    _mm512_add_ps(a, b) = _mm256_add_ps: __m512;
    _mm512_sub_ps(a, b) = _mm256_sub_ps: __m512;
    _mm512_mul_ps(a, b) = _mm256_mul_ps: __m512;
    _mm512_div_ps(a, b) = _mm256_div_ps: __m512;
    _mm512_max_ps(a, b) = _mm256_max_ps: __m512;
    _mm512_min_ps(a, b) = _mm256_min_ps: __m512;
    _mm512_fmadd_ps(a, b, c) = _mm256_fmadd_ps: __m512;
    _mm512_and_si512(a, b) = _mm256_and_si256: __m512i;
    _mm512_or_si512(a, b) = _mm256_or_si256: __m512i;
    _mm512_add_epi32(a, b) = _mm256_add_epi32: __m512i;
    _mm512_add_epi16(a, b) = _mm256_add_epi16: __m512i;
    _mm512_madd_epi16(a, b) = _mm256_madd_epi16: __m512i;
    _mm512_maddubs_epi16(a, b) = _mm256_maddubs_epi16: __m512i;
    _mm512_unpacklo_epi32(a, b) = _mm256_unpacklo_epi32: __m512i;
    _mm512_unpackhi_epi32(a, b) = _mm256_unpackhi_epi32: __m512i;
    _mm512_unpacklo_epi64(a, b) = _mm256_unpacklo_epi64: __m512i;
    _mm512_unpackhi_epi64(a, b) = _mm256_unpackhi_epi64: __m512i;
}

/// Shifts the elements of both halves.
macro_rules! shifts {
    ($($name:ident = $half:ident;)*) => {
        $(
            #[inline(never)]
            #[target_feature(enable = "avx2")]
            fn $name<const COUNT: i32>(a: __m512i) -> __m512i {
                __m512i($half::<COUNT>(a.0), $half::<COUNT>(a.1))
            }
        )*
    };
}

shifts! {
    _mm512_slli_epi32 = _mm256_slli_epi32;
    _mm512_srli_epi32 = _mm256_srli_epi32;
    _mm512_slli_epi16 = _mm256_slli_epi16;
    _mm512_srli_epi16 = _mm256_srli_epi16;
    _mm512_srai_epi16 = _mm256_srai_epi16;
}

/// Converts vectors, or sets them to one number.
macro_rules! from_one {
    ($($name:ident($x:ident: $from:ty) -> $v:ident { $low:expr, $high:expr })*) => {
        $(
            #[inline(never)]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn $name($x: $from) -> $v {
                $v($low, $high)
            }
        )*
    };
}

from_one! {
    _mm512_set1_ps(x: f32) -> __m512 { _mm256_set1_ps(x), _mm256_set1_ps(x) }
    _mm512_set1_epi32(x: i32) -> __m512i { _mm256_set1_epi32(x), _mm256_set1_epi32(x) }
    _mm512_set1_epi16(x: i16) -> __m512i { _mm256_set1_epi16(x), _mm256_set1_epi16(x) }
    _mm512_castps_si512(v: __m512) -> __m512i { _mm256_castps_si256(v.0), _mm256_castps_si256(v.1) }
    _mm512_castsi512_ps(v: __m512i) -> __m512 { _mm256_castsi256_ps(v.0), _mm256_castsi256_ps(v.1) }
    _mm512_cvtepi32_ps(v: __m512i) -> __m512 { _mm256_cvtepi32_ps(v.0), _mm256_cvtepi32_ps(v.1) }
    _mm512_cvtph_ps(v: __m256i) -> __m512 { _mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(v)) }
    _mm512_cvtepu16_epi32(v: __m256i) -> __m512i {
        _mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(v))
    }
    _mm512_cvtepi8_epi32(v: __m128i) -> __m512i { _mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(v)) }
}

#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn _mm512_loadu_ps(p: *const f32) -> __m512 {
    // SAFETY: the caller guarantees 16 numbers at `p`.
    unsafe { __m512(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
}

#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn _mm512_storeu_ps(p: *mut f32, v: __m512) {
    // SAFETY: the caller guarantees space for 16 numbers at `p`.
    unsafe {
        _mm256_storeu_ps(p, v.0);
        _mm256_storeu_ps(p.add(8), v.1);
    }
}

#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn _mm512_loadu_si512(p: *const __m512i) -> __m512i {
    // SAFETY: the caller guarantees 64 bytes at `p`.
    unsafe { __m512i(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.cast::<__m256i>().add(1))) }
}

/// Stores the words whose bit in `mask` is set.
#[inline(never)]
unsafe fn _mm512_mask_storeu_epi32(p: *mut i32, mask: __mmask16, v: __m512i) {
    for (word, x) in words(v).into_iter().enumerate().filter(|(word, _)| mask >> word & 1 == 1) {
        // SAFETY: the caller guarantees space for the words of the mask.
        unsafe { p.add(word).write_unaligned(x) };
    }
}

/// Selects two 128-bit quarters of `a`, and then two of `b`, by two bits of the constant each.
#[inline(never)]
fn _mm512_shuffle_i32x4<const SELECTED: i32>(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: both types are 64 bytes of integers.
    let (a, b) = unsafe { (transmute::<__m512i, [[i32; 4]; 4]>(a), transmute::<__m512i, [[i32; 4]; 4]>(b)) };
    let quarter = |place: i32| (SELECTED >> (2 * place) & 3) as usize;
    // SAFETY: as above.
    unsafe { transmute::<[[i32; 4]; 4], __m512i>([a[quarter(0)], a[quarter(1)], b[quarter(2)], b[quarter(3)]]) }
}

#[inline(never)]
fn words(v: __m512i) -> [i32; 16] {
    // SAFETY: both types are 64 bytes of integers.
    unsafe { transmute::<__m512i, [i32; 16]>(v) }
}

/// The low byte of each word.
#[inline(never)]
fn _mm512_cvtepi32_epi8(v: __m512i) -> __m128i {
    // SAFETY: both types are 16 bytes of integers.
    unsafe { transmute::<[u8; 16], __m128i>(words(v).map(|word| word as u8)) }
}

/// sum + the products of each word's four bytes; `a` is unsigned, `b` signed.
#[inline(never)]
fn dot_bytes<const WORDS: usize>(sum: [i32; WORDS], a: [[u8; 4]; WORDS], b: [[i8; 4]; WORDS]) -> [i32; WORDS] {
    std::array::from_fn(|word| (0..4).fold(sum[word], |sum, byte| sum.wrapping_add(a[word][byte] as i32 * b[word][byte] as i32)))
}

/// A dot product of bytes, for vectors of this many words.
macro_rules! byte_dots {
    ($($name:ident: $v:ty, $words:literal;)*) => {
        $(
            #[inline(never)]
            fn $name(sum: $v, a: $v, b: $v) -> $v {
                // SAFETY: all types are integers of the same size.
                unsafe {
                    let (a, b) = (transmute::<$v, [[u8; 4]; $words]>(a), transmute::<$v, [[i8; 4]; $words]>(b));
                    transmute::<[i32; $words], $v>(dot_bytes(transmute::<$v, [i32; $words]>(sum), a, b))
                }
            }
        )*
    };
}

byte_dots! {
    _mm512_dpbusd_epi32: __m512i, 16;
    _mm256_dpbusd_avx_epi32: __m256i, 8;
}

/// Rounds to the nearest bf16, ties to even. As the instruction does, it takes denormal numbers as 0.
#[inline(never)]
fn rounded(x: f32) -> u16 {
    half::bf16::from_f32(if x.is_subnormal() { 0.0f32.copysign(x) } else { x }).to_bits()
}

#[inline(never)]
fn numbers(v: __m512) -> [f32; 16] {
    // SAFETY: both types are 64 bytes of numbers.
    unsafe { transmute::<__m512, [f32; 16]>(v) }
}

#[inline(never)]
fn _mm512_cvtneps_pbh(v: __m512) -> __m256bh {
    numbers(v).map(rounded)
}

/// The elements of `low`, and then those of `high`.
#[inline(never)]
fn _mm512_cvtne2ps_pbh(high: __m512, low: __m512) -> __m512bh {
    let all = [numbers(low), numbers(high)];
    let element = |at: usize| rounded(all[at / 16][at % 16]);
    __m512bh(std::array::from_fn(|word| [element(2 * word), element(2 * word + 1)]))
}

/// Adds the products of each pair to a number: first those of the second elements. Denormal numbers
/// are 0.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn _mm512_dpbf16_ps(sum: __m512, a: __m512bh, b: __m512bh) -> __m512 {
    let flushed = |x: f32| if x.is_subnormal() { 0.0 } else { x };
    let number = |bits: u16| flushed(f32::from_bits((bits as u32) << 16));
    let sums = numbers(sum);
    let added = |lane: usize| {
        let add = |sum: f32, at: usize| flushed(number(a.0[lane][at]).mul_add(number(b.0[lane][at]), sum));
        add(add(flushed(sums[lane]), 1), 0)
    };
    // SAFETY: both types are 64 bytes of numbers.
    unsafe { transmute::<[f32; 16], __m512>(std::array::from_fn(added)) }
}

avx512_paths!("avx2,fma,f16c");
avx2!(AvxVnni, (__m256i, _mm256_dpbusd_avx_epi32));
