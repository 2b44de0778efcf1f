//! A portable vector instruction set: a kernel is written once and compiled for every CPU path.
//!
//! A kernel is a struct with its arguments, and `run::<L>` is its body. `Isa::run` selects `L` and
//! calls the body inside a function that is compiled with the path's CPU features. Everything below
//! is inlined into that function.

use crate::backend::e4m3::E4m3;
use crate::options::Isa;

/// A vector of f32. Its methods require that the CPU has the features of the path.
#[allow(clippy::missing_safety_doc)] // one contract for all: the CPU has the features, and pointers are valid for N elements
pub trait Lanes: Copy + 'static {
    const N: usize;
    /// True if attention has code for tiles of several queries. On x86-64 the portable path has
    /// none: its multiplications are calls, which tiles do not speed up, and such tiles were a
    /// quarter of all machine code of kernels.
    const ATTENTION_TILES: bool = true;
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

impl Isa {
    pub fn is_present(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_present() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Isa::Avx512.is_present() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512Vnni.is_present() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_present()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Returns the widest path that the CPU supports.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.is_present()).unwrap_or(Isa::Portable)
    }

    /// Returns true if vectors have 512 bits.
    pub(super) fn is_512(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16)
    }

    /// # Safety
    /// `self.is_present()`, and the kernel's pointers are valid as the kernel documents.
    #[inline]
    pub(super) unsafe fn run<K: Kernel>(self, kernel: K) {
        // SAFETY: the caller guarantees that `self` is present, so each branch's CPU features are
        // too.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 if K::PAIRS => run_avx512_bf16(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512Vnni if K::BYTES => run_avx512_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 => run_avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni if K::BYTES => run_avx_vnni(kernel),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni | Isa::Avx2 => run_avx2(kernel),
                _ => kernel.run::<Portable<false>>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx512Bf16>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512_vnni<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx512Vnni>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
unsafe fn run_avx_vnni<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::AvxVnni>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: this function enables all CPU features of the lane type.
    unsafe { kernel.run::<x86::Avx2>() }
}

/// Eight floats in an array, compiled for the target's baseline. With `PAIRS`, it also emulates
/// multiplication of bf16 pairs, so that kernels for pairs can be tested on every CPU.
#[derive(Clone, Copy)]
pub struct Portable<const PAIRS: bool = false>;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 8] {
    [f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)]
}

impl<const PAIRS: bool> Lanes for Portable<PAIRS> {
    const N: usize = 8;
    const ATTENTION_TILES: bool = !cfg!(target_arch = "x86_64");
    type V = [f32; 8];
    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 8] {
        // SAFETY: the caller's pointer is valid for 8 elements.
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> [f32; 8] {
        // SAFETY: the caller's pointer is valid for 8 elements.
        each(|i| f32::from_bits((unsafe { p.add(i).read_unaligned() } as u32) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> [f32; 8] {
        // SAFETY: the caller's pointer is valid for 8 elements.
        each(|i| half::f16::from_bits(unsafe { p.add(i).read_unaligned() }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; 8] {
        // SAFETY: the caller's pointer is valid for 8 elements.
        each(|i| unsafe { p.add(i).read() } as f32)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> [f32; 8] {
        // SAFETY: the caller's pointer is valid for 8 elements.
        each(|i| E4m3(unsafe { p.add(i).read() }).to_f32())
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; 8]) {
        // SAFETY: the caller's pointer is valid for 8 elements.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        // Two roundings: without an FMA instruction, a fused operation would be a library call per
        // element.
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn exp2_of_rounded(v: [f32; 8]) -> [f32; 8] {
        each(|i| f32::from_bits((v[i].to_bits() << 23).wrapping_add(1.0f32.to_bits())))
    }
    #[inline(always)]
    unsafe fn store_low_bytes(p: *mut u8, v: [f32; 8]) {
        // SAFETY: the caller's pointer is valid for 8 bytes.
        unsafe { p.cast::<[u8; 8]>().write(v.map(|x| x.to_bits() as u8)) }
    }
    type I = [u32; 8];
    #[inline(always)]
    unsafe fn splat_word(x: u32) -> [u32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load_words(p: *const u32) -> [u32; 8] {
        // SAFETY: the caller's pointer is valid for 8 words.
        unsafe { p.cast::<[u32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn and(mut a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        a.iter_mut().zip(b).for_each(|(a, b)| *a &= b);
        a
    }
    #[inline(always)]
    unsafe fn to_f32(words: [u32; 8]) -> [f32; 8] {
        each(|i| words[i] as i32 as f32)
    }
    #[inline(always)]
    unsafe fn low_bf16(words: [u32; 8]) -> [f32; 8] {
        each(|i| f32::from_bits(words[i] << 16))
    }
    #[inline(always)]
    unsafe fn high_bf16(words: [u32; 8]) -> [f32; 8] {
        each(|i| f32::from_bits(words[i] & 0xffff_0000))
    }
    #[inline(always)]
    unsafe fn low_halves(words: [u32; 8]) -> [u32; 8] {
        words.map(|word| word & 0x0f0f_0f0f)
    }
    #[inline(always)]
    unsafe fn high_halves(words: [u32; 8]) -> [u32; 8] {
        words.map(|word| word >> 4 & 0x0f0f_0f0f)
    }
    #[inline(always)]
    unsafe fn dot_bytes(mut sum: [u32; 8], a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
            for (a, b) in a.to_le_bytes().into_iter().zip(b.to_le_bytes()) {
                *sum = sum.wrapping_add((a as i32 * b as i8 as i32) as u32);
            }
        }
        sum
    }
    const PAIRS: bool = PAIRS;
    #[inline(always)]
    unsafe fn fma_pairs(a: [u32; 8], b: [u32; 8], c: [f32; 8]) -> [f32; 8] {
        // SAFETY: the portable path requires no CPU features.
        unsafe { Self::fma(Self::low_bf16(a), Self::low_bf16(b), Self::fma(Self::high_bf16(a), Self::high_bf16(b), c)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: [f32; 8]) {
        // SAFETY: the caller's pointer is valid for 8 numbers.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(v.map(|x| half::bf16::from_f32(x).to_bits())) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

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
        (($i:ty, $v:ty, $splat:ident, $load:ident, $to_f32:ident, $cast:ident, $shift_up:ident, $shift_down:ident, $and:ident)) => {
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
        (($i:ty, $add:ident, $madd:ident, $and:ident, $set1:ident, $up:ident, $down:ident, $down_signed:ident)) => {
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
        words: (__m512i, __m512, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_cvtepi32_ps, _mm512_castsi512_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_and_si512),
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

    /// Transposes 16 rows of 16 words in four steps of shuffles. Each step is written out per
    /// vector, so that all vectors stay in registers.
    #[inline]
    #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn turn_pairs(x: *const f32, pitch: usize, rows: usize, out: *mut u32) {
        macro_rules! turned {
            ($($r:literal)*) => {
                // SAFETY: each of the caller's rows has 32 numbers. The last row replaces missing
                // ones.
                [$(unsafe {
                    let x = x.add($r.min(rows - 1) * pitch);
                    std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x.add(16)), _mm512_loadu_ps(x)))
                }),*]
            };
        }
        // Replaces each pair of vectors by the results of the two shuffles.
        macro_rules! step {
            ($v:ident, $low:expr, $high:expr, $(($a:literal $b:literal))*) => {
                $(($v[$a], $v[$b]) = ($low($v[$a], $v[$b]), $high($v[$a], $v[$b]));)*
            };
        }
        let mut v: [__m512i; 16] =
            turned!(0usize 1usize 2usize 3usize 4usize 5usize 6usize 7usize 8usize 9usize 10usize 11usize 12usize 13usize 14usize 15usize);
        // Unpack low and high within each 128-bit quarter: words of two rows, then of four.
        step!(v, _mm512_unpacklo_epi32, _mm512_unpackhi_epi32, (0 1)(2 3)(4 5)(6 7)(8 9)(10 11)(12 13)(14 15));
        step!(v, _mm512_unpacklo_epi64, _mm512_unpackhi_epi64, (0 2)(1 3)(4 6)(5 7)(8 10)(9 11)(12 14)(13 15));
        // Shuffle whole quarters, even and odd: words of eight rows, then of all. Of each four
        // words, the second and the third end up swapped.
        step!(v, _mm512_shuffle_i32x4::<0x88>, _mm512_shuffle_i32x4::<0xdd>, (0 4)(1 5)(2 6)(3 7)(8 12)(9 13)(10 14)(11 15));
        step!(v, _mm512_shuffle_i32x4::<0x88>, _mm512_shuffle_i32x4::<0xdd>, (0 8)(1 9)(2 10)(3 11)(4 12)(5 13)(6 14)(7 15));
        let there: __mmask16 = 0xffff >> (16 - rows);
        macro_rules! stored {
            ($(($word:literal $from:literal))*) => {
                // SAFETY: the caller's buffer has space for these words.
                $(unsafe { _mm512_mask_storeu_epi32(out.add($word * rows).cast(), there, v[$from]) };)*
            };
        }
        stored!((0 0)(1 2)(2 1)(3 3)(4 4)(5 6)(6 5)(7 7)(8 8)(9 10)(10 9)(11 11)(12 12)(13 14)(14 13)(15 15));
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
            _mm512_srai_epi16
        )
    );
    avx512!(Avx512Vnni, (__m512i, _mm512_dpbusd_epi32));
    avx512!(Avx512Bf16, (__m512i, _mm512_dpbusd_epi32), bf16);

    macro_rules! avx2 {
        ($name:ident, $dot:tt) => {
            lanes!($name, 8, __m256, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_div_ps,
        _mm256_max_ps, _mm256_min_ps, _mm256_fmadd_ps,
        words: (__m256i, __m256, _mm256_set1_epi32, _mm256_loadu_si256, _mm256_cvtepi32_ps, _mm256_castsi256_ps, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_and_si256),
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
            _mm256_srai_epi16
        )
    );
    avx2!(AvxVnni, (__m256i, _mm256_dpbusd_avx_epi32));
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

pub(super) use folded;

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
        if !Isa::Avx512Bf16.is_present() {
            return eprintln!("skipped: this machine has no AVX-512 BF16");
        }
        const POISON: u32 = 0xdead_beef;
        let pitch = 37;
        for rows in 1..=16 {
            let x: Vec<f32> = (0..rows * pitch).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut words = vec![POISON; 16 * rows + 16];
            // SAFETY: the CPU supports the path.
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
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_present()) {
            let mut x = [f32::NAN; 17];
            // SAFETY: the CPU supports the path.
            unsafe { isa.run(Exp { for_bf16: false, x: &mut x }) };
            assert!(x.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn exp_is_accurate_to_a_few_ulps_on_every_path() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_present()) {
            let xs: Vec<f32> = (-8700..8800).map(|i| i as f32 * 0.01).collect();
            let mut ys = xs.clone();
            // SAFETY: the CPU supports the path.
            unsafe { isa.run(Exp { for_bf16: false, x: &mut ys }) };
            for (x, y) in xs.iter().zip(&ys) {
                let exact = (*x as f64).exp();
                assert!(((*y as f64) / exact - 1.0).abs() < 4e-7, "{} exp({x}) = {y}, not {exact}", isa.name());
            }
        }
    }

    #[test]
    fn exp_for_bf16_is_accurate_beyond_its_rounding_on_every_path() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_present()) {
            let xs: Vec<f32> = (0..87_000).map(|i| i as f32 * -0.001).chain([f32::NEG_INFINITY, f32::NAN]).collect();
            let mut ys = xs.clone();
            // SAFETY: the CPU supports the path.
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
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_present()) {
            // The second iteration has vectors that are not full.
            for first in [0, 3] {
                let mut read = vec![f32::NAN; codes.len() - first];
                // SAFETY: the CPU supports the path.
                unsafe { isa.run(ReadE4m3(&codes[first..], &mut read)) };
                for (code, read) in codes[first..].iter().zip(read) {
                    assert_eq!(read.to_bits(), code.to_f32().to_bits(), "{} {code:?}: {read}", isa.name());
                }
            }
        }
    }
}
