// Numbers of 8 bits as OCP's E4M3 has them: a sign, four bits of exponent, three of fraction. Up to 448, without infinities, and one NaN.
#pragma once
#include "common.cuh"

// Its bits are what memory holds.
struct e4m3 {
    u8 bits;
};

#define E4M3_MOST 448.0f
#define E4M3_NAN 0x7fu

// The nearest there is, of two the even one. What is beyond the most becomes that.
__device__ __forceinline__ u8 e4m3_of(float x) {
    u32 bits = float_to_bits(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return E4M3_NAN;
    if (size > float_to_bits(E4M3_MOST)) return u8(sign | 0x7eu);
    // Below 2^-6 there are multiples of 2^-9, to which the addition rounds.
    if (size < 0x3c800000u) return u8(sign | (float_to_bits(fabsf(x) + 16384.0f) - float_to_bits(16384.0f)));
    return u8(sign | ((size + 0x7ffffu + (size >> 20 & 1u) - (120u << 23)) >> 20));
}

__device__ __forceinline__ float e4m3_to_float(u8 x) {
    u32 sign = u32(x & 0x80u) << 24, size = x & 0x7fu;
    if (size == E4M3_NAN) return bits_to_float(sign | 0x7fc00000u);
    return bits_to_float(sign | size << 20) * 0x1p120f; // as what its bits are in f32, which is smaller by that
}

// Two numbers, the upper bytes of the halves of `pair`, in bf16, which has them all. For numbers only: a NaN becomes 480.
__device__ __forceinline__ u32 e4m3x2_to_bf16x2(u32 pair) {
    u32 smaller = (pair & 0x80008000u) | (pair >> 4 & 0x07f007f0u); // by 2^120, those below 2^-6, too
#ifdef __CUDACC__
    u32 factors = 0x7b807b80u; // 2^120
    __nv_bfloat162 exact = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&smaller), *reinterpret_cast<__nv_bfloat162 *>(&factors));
    return *reinterpret_cast<u32 *>(&exact);
#else
    return pack2<bf16>(to_float(bf16{u16(smaller)}) * 0x1p120f, to_float(bf16{u16(smaller >> 16)}) * 0x1p120f);
#endif
}
