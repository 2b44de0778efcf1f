// Definitions that all kernels share: number types, sums over warps and blocks, and a host
// emulation.
//
// Every kernel is `extern "C" __global__ void name(...)` with plain pointers and scalars of 32 or
// 64 bits, and for Hopper a TensorMap. The shape of a buffer is stated beside its pointer. Activations
// are f32, or, if only products read them, in the type that these multiply; matrices, K and V have their
// storage types. A row's result depends on that row only, and sums have one fixed order: no kernel uses
// floating-point atomics.
//
// The same files compile for the host with tests/cuda/shim.h, which emulates threads with fibers.
// Therefore kernels use only these features of CUDA: threadIdx, blockIdx, blockDim, gridDim (x, y,
// z), __syncthreads, __syncthreads_count, __syncwarp, __shfl_sync, __shfl_xor_sync, __ballot_sync,
// __any_sync, static `__shared__` arrays, `__grid_constant__`, DYNAMIC_SHARED, atomicAdd on integers in shared memory,
// is_last_block, plain math functions, and the functions of tensor.cuh and hopper.cuh. All threads
// of a block, or all lanes of a warp, execute each synchronizing call, except for the barriers of
// hopper.cuh. No thread returns before all threads of its block have passed the last one.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
// Declares the block's dynamic shared memory, aligned to 16 bytes, as an array of `type`.
#define DYNAMIC_SHARED(type, name)                                \
    extern __shared__ __align__(16) unsigned char dynamic_shared_[]; \
    type *name = reinterpret_cast<type *>(dynamic_shared_)
#else
#include "shim.h"
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu
#define MINUS_INFINITY (-INFINITY)
#define NO_SLOT 0xffffffffu // the slot of a row whose K and V are not stored

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// 16-bit floating-point numbers, as their bits.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

// An 8-bit floating-point number in OCP E4M3: one sign bit, four exponent bits, three fraction
// bits. Magnitudes range from 2^-9 to 448; there are no infinities. The code that OCP defines as
// NaN is never stored; it decodes to 480.
struct e4m3 {
    u8 bits;
};
#define E4M3_MAX 448.0f

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

// Decodes through f16. The exponent bias of f16 is larger by 8, so the same bits represent 2^-8
// times the number.
__device__ __forceinline__ float to_float(e4m3 x) { return to_float(f16{u16((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.0f; }

// Rounds to the nearest number of type T, ties to even.
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

// Integers and E4M3 saturate, and NaN becomes 0.
template <> __device__ __forceinline__ signed char from_float<signed char>(float x) {
    return x == x ? static_cast<signed char>(rintf(fminf(fmaxf(x, -127.0f), 127.0f))) : 0;
}

template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
    const u32 last_place = 0x46800000; // 16384, at which the spacing of f32 equals that of E4M3 subnormals
    float size = fminf(fabsf(x), E4M3_MAX);
    u32 bits = float_to_bits(size) - (120 << 23); // difference of the exponent biases
    u32 code = size < 0.015625f ? float_to_bits(size + bits_to_float(last_place)) - last_place : (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return x == x ? e4m3{u8(code | (float_to_bits(x) >> 24 & 0x80))} : e4m3{0};
}

// Packs two numbers into a word, the first in the low half.
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

// Returns x. Compilers do not know that, so they do not move code that depends on it.
__device__ __forceinline__ u32 opaque(u32 x) {
#ifdef __CUDACC__
    asm volatile("mov.u32 %0, %0;" : "+r"(x));
#endif
    return x;
}

// The types of rows that a kernel writes.
enum Dtype { DTYPE_F32, DTYPE_F16, DTYPE_BF16 };

// Rows that a kernel writes: in f32, or as the products round them that read them.
struct Rows {
    void *numbers;
    u32 dtype;

    __device__ __forceinline__ void put(u64 place, float x) const {
        if (dtype == DTYPE_F32) static_cast<float *>(numbers)[place] = x;
        else static_cast<u16 *>(numbers)[place] = dtype == DTYPE_F16 ? from_float<f16>(x).bits : from_float<bf16>(x).bits;
    }

    // Writes two numbers from an even place on.
    __device__ __forceinline__ void put_2(u64 place, float2 two) const {
        if (dtype == DTYPE_F32) *reinterpret_cast<float2 *>(static_cast<float *>(numbers) + place) = two;
        else *reinterpret_cast<u32 *>(static_cast<u16 *>(numbers) + place) = dtype == DTYPE_F16 ? pack2<f16>(two.x, two.y) : pack2<bf16>(two.x, two.y);
    }
};

// Waits until the previous kernels of the stream have ended and their writes are visible. With
// programmatic dependent launch, which exists since sm_90, a kernel may start before that, so that
// the time of its launch is hidden. Every thread of every kernel calls this, also if it then returns
// at once: the next kernel waits for this one only. Before the call, a kernel accesses nothing that
// other kernels of the stream write, and writes nothing to global memory. So it may read its
// parameters and the weights.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Permits the next kernel to start when all blocks of this one have started, and not only when they
// end. Kernels with several large blocks per multiprocessor do not call it: the next kernel would
// fill some multiprocessors and leave others empty. On an H100 this made a layer 13 % slower.
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 thread_in_block() { return threadIdx.x; }
__device__ __forceinline__ u32 lane_in_warp() { return threadIdx.x % WARP; }
__device__ __forceinline__ u32 warp_in_block() { return threadIdx.x / WARP; }

__host__ __device__ constexpr u32 div_ceil(u32 a, u32 b) { return (a + b - 1) / b; }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Returns the sum over the lanes of a warp, with the same bits in all lanes.
__device__ __forceinline__ float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Returns the sum over a block of at most 32 whole warps, in all its threads. All threads have to
// call it.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float parts[WARP];
    x = warp_sum(x);
    __syncthreads(); // all threads have read the previous sum
    if (lane_in_warp() == 0) parts[warp_in_block()] = x;
    __syncthreads();
    return warp_sum(lane_in_warp() < blockDim.x / WARP ? parts[lane_in_warp()] : 0.0f);
}

// Returns the larger magnitude. NaN counts as infinity, so that it is not lost.
__device__ __forceinline__ float max_magnitude(float max, float x) {
    float size = fabsf(x);
    return size <= max ? max : size == size ? size : INFINITY;
}

// Returns the maximum over a block of at most 32 whole warps, in all its threads. All threads have
// to call it.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[WARP];
    x = warp_max(x);
    __syncthreads(); // all threads have read the previous maximum
    if (lane_in_warp() == 0) parts[warp_in_block()] = x;
    __syncthreads();
    return warp_max(lane_in_warp() < blockDim.x / WARP ? parts[lane_in_warp()] : MINUS_INFINITY);
}

// Returns true in the last of `blocks` blocks that call this with the same counter, in all its
// threads. It sees everything that the other blocks wrote to global memory before. All threads of a
// block have to call it. The counter is 0 before the launch, and 0 again when the last block has
// called it.
__device__ __forceinline__ bool is_last_block(u32 *counter, u32 blocks) {
    __shared__ u32 earlier;
    __syncthreads(); // all threads have written
    if (threadIdx.x == 0) {
        __threadfence();
        earlier = atomicInc(counter, blocks - 1);
        __threadfence();
    }
    __syncthreads();
    return earlier == blocks - 1;
}
