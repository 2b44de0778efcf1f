//! The portable path, for every CPU.

use super::Lanes;
use crate::backend::e4m3::E4m3;

/// Eight floats in an array, compiled for the target's baseline.
#[derive(Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 8] {
    [f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)]
}

impl Lanes for Portable {
    const N: usize = 8;
    const ATTENTION_QUERIES: usize = if cfg!(target_arch = "x86_64") { 1 } else { 8 };
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
    unsafe fn or(mut a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        a.iter_mut().zip(b).for_each(|(a, b)| *a |= b);
        a
    }
    #[inline(always)]
    unsafe fn shift(words: [u32; 8], count: i32) -> [u32; 8] {
        if count < 0 { words.map(|word| word >> -count) } else { words.map(|word| word << count) }
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
}
