//! The x86-64 paths: AVX2 and AVX-512, with and without VNNI and BF16.

use std::arch::x86_64::*;

use super::Lanes;

/// True if 16 lanes have wide tiles (build.rs).
const WIDE_TILES: bool = cfg!(wide_tiles);

macro_rules! lanes {
    ($name:ident, $n:literal, $v:ty, $set1:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $mul:ident, $div:ident,
     $max:ident, $min:ident, $fma:ident, words: $words:tt, dot: $dot:tt, bf16: |$p:ident| $bf16:expr, f16: |$q:ident| $f16:expr, i8: |$r:ident| $i8:expr,
     e4m3: |$s:ident| $e4m3:expr, exp2: |$e:ident| $exp2:expr, low_bytes: |$t:ident, $w:ident| $low_bytes:expr $(, $more:tt)?) => {
        #[derive(Clone, Copy)]
        pub struct $name;
        // All bodies rely on the trait's contract, which guarantees the CPU features and the
        // validity of pointers.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Lanes for $name {
            const N: usize = $n;
            const WIDE_TILES: bool = $n == 16 && WIDE_TILES;
            const ATTENTION_QUERIES: usize = if $n == 16 && !WIDE_TILES { 2 } else { 8 };
            type V = $v;
            #[inline(always)]
            unsafe fn splat(x: f32) -> $v {
                unsafe { $set1(x) }
            }
            #[inline(always)]
            unsafe fn load(p: *const f32) -> $v {
                unsafe { $load(p) }
            }
            #[inline(always)]
            unsafe fn load_bf16($p: *const u16) -> $v {
                unsafe { $bf16 }
            }
            #[inline(always)]
            unsafe fn load_f16($q: *const u16) -> $v {
                unsafe { $f16 }
            }
            #[inline(always)]
            unsafe fn load_i8($r: *const i8) -> $v {
                unsafe { $i8 }
            }
            #[inline(always)]
            unsafe fn load_e4m3($s: *const u8) -> $v {
                unsafe { $e4m3 }
            }
            #[inline(always)]
            unsafe fn store(p: *mut f32, v: $v) {
                unsafe { $store(p, v) }
            }
            #[inline(always)]
            unsafe fn add(a: $v, b: $v) -> $v {
                unsafe { $add(a, b) }
            }
            #[inline(always)]
            unsafe fn sub(a: $v, b: $v) -> $v {
                unsafe { $sub(a, b) }
            }
            #[inline(always)]
            unsafe fn mul(a: $v, b: $v) -> $v {
                unsafe { $mul(a, b) }
            }
            #[inline(always)]
            unsafe fn div(a: $v, b: $v) -> $v {
                unsafe { $div(a, b) }
            }
            #[inline(always)]
            unsafe fn max(a: $v, b: $v) -> $v {
                unsafe { $max(a, b) }
            }
            #[inline(always)]
            unsafe fn min(a: $v, b: $v) -> $v {
                unsafe { $min(a, b) }
            }
            #[inline(always)]
            unsafe fn fma(a: $v, b: $v, c: $v) -> $v {
                unsafe { $fma(a, b, c) }
            }
            #[inline(always)]
            unsafe fn exp2_of_rounded($e: $v) -> $v {
                unsafe { $exp2 }
            }
            #[inline(always)]
            unsafe fn store_low_bytes($t: *mut u8, $w: $v) {
                unsafe { $low_bytes }
            }
            words!($words);
            dot!($dot);
            $(pairs!($more);)?
        }
    };
}

macro_rules! words {
    (($i:ty, $v:ty, $splat:ident, $load:ident, $to_f32:ident, $cast:ident, $shift_up:ident, $shift_down:ident, $and:ident, $or:ident)) => {
        type I = $i;
        #[inline(always)]
        unsafe fn splat_word(x: u32) -> $i {
            unsafe { $splat(x as i32) }
        }
        #[inline(always)]
        unsafe fn load_words(p: *const u32) -> $i {
            unsafe { $load(p.cast()) }
        }
        #[inline(always)]
        unsafe fn and(a: $i, b: $i) -> $i {
            unsafe { $and(a, b) }
        }
        #[inline(always)]
        unsafe fn or(a: $i, b: $i) -> $i {
            unsafe { $or(a, b) }
        }
        #[inline(always)]
        unsafe fn shift(words: $i, count: i32) -> $i {
            unsafe {
                match count {
                    -3 => $shift_down::<3>(words),
                    -2 => $shift_down::<2>(words),
                    -1 => $shift_down::<1>(words),
                    0 => words,
                    1 => $shift_up::<1>(words),
                    2 => $shift_up::<2>(words),
                    3 => $shift_up::<3>(words),
                    4 => $shift_up::<4>(words),
                    _ => unreachable!("the count is one of the constants above"),
                }
            }
        }
        #[inline(always)]
        unsafe fn to_f32(words: $i) -> $v {
            unsafe { $to_f32(words) }
        }
        #[inline(always)]
        unsafe fn low_bf16(words: $i) -> $v {
            unsafe { $cast($shift_up::<16>(words)) }
        }
        #[inline(always)]
        unsafe fn high_bf16(words: $i) -> $v {
            unsafe { $cast($and(words, $splat(0xffff_0000u32 as i32))) }
        }
        #[inline(always)]
        unsafe fn low_halves(words: $i) -> $i {
            unsafe { $and(words, $splat(0x0f0f_0f0f)) }
        }
        #[inline(always)]
        unsafe fn high_halves(words: $i) -> $i {
            unsafe { $and($shift_down::<4>(words), $splat(0x0f0f_0f0f)) }
        }
    };
}

/// Implements `dot_bytes` with one instruction, or with 16-bit products of the even bytes and
/// of the odd bytes.
macro_rules! dot {
    (($i:ty, $dot:ident)) => {
        #[inline(always)]
        unsafe fn dot_bytes(sum: $i, a: $i, b: $i) -> $i {
            unsafe { $dot(sum, a, b) }
        }
    };
    (($i:ty, $add:ident, $madd:ident, $and:ident, $set1:ident, $up:ident, $down:ident, $down_signed:ident, $add_16:ident, $madd_bytes:ident)) => {
        const SUMS_IN_16_BITS: bool = true;
        #[inline(always)]
        unsafe fn add_products(sum: $i, a: $i, b: $i) -> $i {
            unsafe { $add_16(sum, $madd_bytes(a, b)) }
        }
        #[inline(always)]
        unsafe fn add_halves(sum: $i, halves: $i) -> $i {
            unsafe { $add(sum, $madd(halves, $set1(1))) }
        }
        #[inline(always)]
        unsafe fn dot_bytes(sum: $i, a: $i, b: $i) -> $i {
            unsafe {
                let even = $madd($and(a, $set1(0xff)), $down_signed::<8>($up::<8>(b)));
                let odd = $madd($down::<8>(a), $down_signed::<8>(b));
                $add($add(sum, even), odd)
            }
        }
    };
}

macro_rules! avx512 {
    ($name:ident, $dot:tt $(, $more:tt)?) => {
        lanes!($name, 16, __m512, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps, _mm512_div_ps,
    _mm512_max_ps, _mm512_min_ps, _mm512_fmadd_ps,
    words: (__m512i, __m512, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_cvtepi32_ps, _mm512_castsi512_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_and_si512, _mm512_or_si512),
    dot: $dot,
    bf16: |p| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))),
    f16: |p| _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
    i8: |p| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))),
    e4m3: |p| {
        // The algorithm of `E4m3::to_f32`.
        let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()))), _mm256_set1_epi16(0xbfffu16 as i16));
        _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
    },
    exp2: |v| _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32::<23>(_mm512_castps_si512(v)), _mm512_castps_si512(_mm512_set1_ps(1.0)))),
    low_bytes: |p, v| _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) $(, $more)?);
    };
}

/// Operations of AVX-512 BF16.
macro_rules! pairs {
    (bf16) => {
        const PAIRS: bool = true;
        #[inline(always)]
        unsafe fn fma_pairs(a: __m512i, b: __m512i, c: __m512) -> __m512 {
            unsafe { _mm512_dpbf16_ps(c, std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b)) }
        }
        #[inline(always)]
        unsafe fn turn_pairs(x: *const f32, pitch: usize, rows: usize, out: *mut u32) {
            unsafe { turn_pairs(x, pitch, rows, out) }
        }
        #[inline(always)]
        unsafe fn store_bf16(p: *mut u16, v: __m512) {
            unsafe { _mm256_storeu_si256(p.cast(), std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v))) }
        }
    };
}

/// Rounds the rows of `turn_pairs` to bf16. The last row replaces missing ones.
macro_rules! rounded_rows {
    ($x:ident, $pitch:ident, $rows:ident: $($r:literal)*) => {
        // SAFETY: each of the caller's rows has 32 numbers.
        [$(unsafe {
            let x = $x.add($r.min($rows - 1) * $pitch);
            std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x.add(16)), _mm512_loadu_ps(x)))
        }),*]
    };
}

/// Replaces each pair of vectors by the results of the two shuffles.
macro_rules! shuffled {
    ($v:ident, $low:expr, $high:expr, $(($a:literal $b:literal))*) => {
        $(($v[$a], $v[$b]) = ($low($v[$a], $v[$b]), $high($v[$a], $v[$b]));)*
    };
}

/// Stores the words that vector `from` has, for the rows that exist.
macro_rules! store_words {
    ($v:ident, $out:ident, $rows:ident: $(($word:literal $from:literal))*) => {
        let there: __mmask16 = 0xffff >> (16 - $rows);
        // SAFETY: the caller's buffer has space for these words.
        $(unsafe { _mm512_mask_storeu_epi32($out.add($word * $rows).cast(), there, $v[$from]) };)*
    };
}

/// The AVX-512 paths, on the instructions that the module has imported. `features` are those of
/// the function that transposes pairs.
macro_rules! avx512_paths {
    ($features:literal) => {
        /// Transposes 16 rows of 16 words in four steps of shuffles. Each step is written out per
        /// vector, so that all vectors stay in registers.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn turn_pairs(x: *const f32, pitch: usize, rows: usize, out: *mut u32) {
            let mut v: [__m512i; 16] =
                rounded_rows!(x, pitch, rows: 0usize 1usize 2usize 3usize 4usize 5usize 6usize 7usize 8usize 9usize 10usize 11usize 12usize 13usize 14usize 15usize);
            // Unpack low and high within each 128-bit quarter: words of two rows, then of four.
            shuffled!(v, _mm512_unpacklo_epi32, _mm512_unpackhi_epi32, (0 1)(2 3)(4 5)(6 7)(8 9)(10 11)(12 13)(14 15));
            shuffled!(v, _mm512_unpacklo_epi64, _mm512_unpackhi_epi64, (0 2)(1 3)(4 6)(5 7)(8 10)(9 11)(12 14)(13 15));
            // Shuffle whole quarters, even and odd: words of eight rows, then of all. Of each four
            // words, the second and the third end up swapped.
            shuffled!(v, _mm512_shuffle_i32x4::<0x88>, _mm512_shuffle_i32x4::<0xdd>, (0 4)(1 5)(2 6)(3 7)(8 12)(9 13)(10 14)(11 15));
            shuffled!(v, _mm512_shuffle_i32x4::<0x88>, _mm512_shuffle_i32x4::<0xdd>, (0 8)(1 9)(2 10)(3 11)(4 12)(5 13)(6 14)(7 15));
            store_words!(v, out, rows: (0 0)(1 2)(2 1)(3 3)(4 4)(5 6)(6 5)(7 7)(8 8)(9 10)(10 9)(11 11)(12 12)(13 14)(14 13)(15 15));
        }

        avx512!(
            Avx512,
            (
                __m512i,
                _mm512_add_epi32,
                _mm512_madd_epi16,
                _mm512_and_si512,
                _mm512_set1_epi16,
                _mm512_slli_epi16,
                _mm512_srli_epi16,
                _mm512_srai_epi16,
                _mm512_add_epi16,
                _mm512_maddubs_epi16
            )
        );
        avx512!(Avx512Vnni, (__m512i, _mm512_dpbusd_epi32));
        avx512!(Avx512Bf16, (__m512i, _mm512_dpbusd_epi32), bf16);
    };
}

avx512_paths!("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl");

macro_rules! avx2 {
    ($name:ident, $dot:tt) => {
        lanes!($name, 8, __m256, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_div_ps,
    _mm256_max_ps, _mm256_min_ps, _mm256_fmadd_ps,
    words: (__m256i, __m256, _mm256_set1_epi32, _mm256_loadu_si256, _mm256_cvtepi32_ps, _mm256_castsi256_ps, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_and_si256, _mm256_or_si256),
    dot: $dot,
    bf16: |p| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))),
    f16: |p| _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
    i8: |p| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))),
    e4m3: |p| {
        let halves = _mm_and_si128(_mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast()))), _mm_set1_epi16(0xbfffu16 as i16));
        _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0))
    },
    exp2: |v| _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32::<23>(_mm256_castps_si256(v)), _mm256_castps_si256(_mm256_set1_ps(1.0)))),
    low_bytes: |p, v| {
        // The bytes of each 128-bit half are then adjacent, at its beginning.
        let bytes = _mm256_shuffle_epi8(_mm256_castps_si256(v), _mm256_set1_epi32(0x0c08_0400));
        p.cast::<[i32; 2]>().write_unaligned([_mm256_extract_epi32::<0>(bytes), _mm256_extract_epi32::<4>(bytes)])
    });
    };
}

avx2!(
    Avx2,
    (
        __m256i,
        _mm256_add_epi32,
        _mm256_madd_epi16,
        _mm256_and_si256,
        _mm256_set1_epi16,
        _mm256_slli_epi16,
        _mm256_srli_epi16,
        _mm256_srai_epi16,
        _mm256_add_epi16,
        _mm256_maddubs_epi16
    )
);
avx2!(AvxVnni, (__m256i, _mm256_dpbusd_avx_epi32));

/// The paths above that few machines have, on instructions that most machines have.
#[cfg(test)]
pub mod emulated;
