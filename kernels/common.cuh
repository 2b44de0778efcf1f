// What all kernels share: number types, sums over a warp and a block, and how a kernel is written so that it also runs on the host.
//
// Every kernel is `extern "C" __global__ void name(...)` of plain pointers and scalars of 32 or 64 bits; the shape of what a pointer points to stands
// beside it. Activations are f32, matrices and K and V what they are stored as. A result depends on its own row alone, and is summed in one
// fixed order: nothing here adds atomically.
//
// The same files compile for the host against tests/cuda/shim.h, where threads are fibers. So kernels use of CUDA only: threadIdx, blockIdx,
// blockDim, gridDim (x, y, z), __syncthreads, __syncwarp, __shfl_sync, __shfl_xor_sync, __ballot_sync, static `__shared__` arrays,
// DYNAMIC_SHARED, plain math functions, and what tensor.cuh offers. All threads of a block, or all lanes of a warp, reach each of these that
// waits; and none returns before the others of its block have passed the last.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
// The block's dynamic shared memory, aligned to 16 bytes, as an array of `type`.
#define DYNAMIC_SHARED(type, name)                                \
    extern __shared__ __align__(16) unsigned char dynamic_shared_[]; \
    type *name = reinterpret_cast<type *>(dynamic_shared_)
#else
#include "shim.h"
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu
#define NO_NUMBER (-INFINITY)
#define NOWHERE 0xffffffffu // the slot of a row whose K and V are not kept

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// Numbers of 16 bits. Their bits are what memory holds.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

// A number of 8 bits in floating point, OCP's E4M3: a sign, four bits of exponent, three of fraction; from 2^-9 to 448, and no infinities. The code
// that OCP calls NaN is never stored; read, it is 480.
struct e4m3 {
    u8 bits;
};
#define E4M3_MOST 448.0f

__device__ __forceinline__ float bits_to_float(u32 bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

__device__ __forceinline__ u32 float_to_bits(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bf16 x) { return bits_to_float(u32(x.bits) << 16); }

__device__ __forceinline__ float to_float(f16 x) {
#ifdef __CUDACC__
    return __half2float(__ushort_as_half(x.bits));
#else
    return shim::half_to_float(x.bits);
#endif
}

__device__ __forceinline__ float to_float(signed char x) { return float(x); }

// In f16, whose exponent counts from 8 further down, the same bits are 2^-8 of the number.
__device__ __forceinline__ float to_float(e4m3 x) { return to_float(f16{u16((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.0f; }

// The nearest there is; of two the even one.
template <class T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
#ifdef __CUDACC__
    return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    return bf16{shim::float_to_bf16(x)};
#endif
}

template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
#ifdef __CUDACC__
    return f16{__half_as_ushort(__float2half_rn(x))};
#else
    return f16{shim::float_to_half(x)};
#endif
}

// Of whole numbers, and of those in E4M3, what is beyond the greatest becomes it, and NaN 0.
template <> __device__ __forceinline__ signed char from_float<signed char>(float x) {
    return x == x ? static_cast<signed char>(rintf(fminf(fmaxf(x, -127.0f), 127.0f))) : 0;
}

template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
    const u32 last_place = 0x46800000; // of so great a number, 16384, it is that of those that are less than normal
    float size = fminf(fabsf(x), E4M3_MOST);
    u32 bits = float_to_bits(size) - (120 << 23); // of the exponent's offset
    u32 code = size < 0.015625f ? float_to_bits(size + bits_to_float(last_place)) - last_place : (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return x == x ? e4m3{u8(code | (float_to_bits(x) >> 24 & 0x80))} : e4m3{0};
}

// Two numbers as they lie in memory, the first in the low half.
template <class T> __device__ __forceinline__ u32 pack2(float low, float high) {
    return u32(from_float<T>(low).bits) | u32(from_float<T>(high).bits) << 16;
}

#ifdef __CUDACC__
template <> __device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<u32 *>(&pair);
}
template <> __device__ __forceinline__ u32 pack2<f16>(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<u32 *>(&pair);
}
#endif

__device__ __forceinline__ u32 thread_in_block() { return threadIdx.x; }
__device__ __forceinline__ u32 lane_in_warp() { return threadIdx.x % WARP; }
__device__ __forceinline__ u32 warp_in_block() { return threadIdx.x / WARP; }

__host__ __device__ constexpr u32 div_ceil(u32 a, u32 b) { return (a + b - 1) / b; }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The sum over the lanes of a warp, in each of them; the same bits in all.
__device__ __forceinline__ float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The sum over a block of whole warps, at most 32, in each of its threads. All of them call it.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float parts[WARP];
    x = warp_sum(x);
    __syncthreads(); // the last sum has been read
    if (lane_in_warp() == 0) parts[warp_in_block()] = x;
    __syncthreads();
    return warp_sum(lane_in_warp() < blockDim.x / WARP ? parts[lane_in_warp()] : 0.0f);
}

// The size that is farther from 0; of a number that is none it is infinite, so that it is not lost.
__device__ __forceinline__ float greater_size(float most, float x) {
    float size = fabsf(x);
    return size <= most ? most : size == size ? size : INFINITY;
}

// The greatest over such a block, in the same way.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[WARP];
    x = warp_max(x);
    __syncthreads(); // the last one has been read
    if (lane_in_warp() == 0) parts[warp_in_block()] = x;
    __syncthreads();
    return warp_max(lane_in_warp() < blockDim.x / WARP ? parts[lane_in_warp()] : NO_NUMBER);
}
