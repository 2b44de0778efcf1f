// Tensor core and asynchronous copy instructions, each as one function. tests/cuda/shim.h provides
// host versions.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__

// d += a * b by a warp: a is [16, 16], b is [16, 8], d is [16, 8] in f32.
//
// With g = lane / 4 and t = lane % 4, each register has two numbers, the first in the low half.
// a[0]: row g, columns 2t and 2t + 1; a[1]: row g + 8, the same columns. a[2]: row g, columns 2t +
// 8 and 2t + 9; a[3]: row g + 8, the same columns. b[0]: rows 2t and 2t + 1 of column g; b[1]: rows
// 2t + 8 and 2t + 9. d[0], d[1]: row g, columns 2t and 2t + 1; d[2], d[3]: row g + 8, the same
// columns.
template <class T> __device__ __forceinline__ void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);

template <> __device__ __forceinline__ void mma_16816<bf16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <> __device__ __forceinline__ void mma_16816<f16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// a * b + c for each of two bf16 numbers.
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Loads four matrices of 8 rows of 16 bytes from shared memory. Lane l passes the address of row l
// % 8 of matrix l / 8. Register m of a lane holds numbers 2 * (lane % 4) and the next of row lane /
// 4 of matrix m. Transposed, it holds number lane / 4 of rows 2 * (lane % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void *row) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&r)[4], const void *row) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Starts a copy of 16 or 4 bytes to shared memory, or fills it with zeros if `valid` is false. Both
// addresses are aligned to the size. Copies since the last commit form a group. wait<n> waits until
// at most n groups of this thread are pending. Other threads see the data after __syncthreads.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, bool valid) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_async_4(void *shared, const void *global, bool valid) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(valid ? 4 : 0) : "memory");
}

// Loads 16 aligned bytes that no other thread loads, and that no kernel of this launch writes.
__device__ __forceinline__ uint4 load_once(const void *global) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(global));
    return x;
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int n> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

#else
#include "shim_tensor.h"
#endif

// Converts four bytes to bf16, which represents all their values: pairs[0] holds bytes 0 and 2,
// pairs[1] bytes 1 and 3.
template <class T> __device__ __forceinline__ void widen(u32 (&pairs)[2], u32 four);

// 128 plus the low seven bits, minus 128, or minus 256 if the sign bit is set: setting the sign bit
// increments the exponent of 128, which doubles it.
template <> __device__ __forceinline__ void widen<signed char>(u32 (&pairs)[2], u32 four) {
    const u32 number_128 = 0x43004300, minus_1 = 0xbf80bf80;
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        u32 bytes = four >> 8 * odd;
        pairs[odd] = fma_bf16x2((bytes & 0x00800080) | number_128, minus_1, (bytes & 0x007f007f) | number_128);
    }
}

// Converts two numbers, the upper bytes of the halves of `pair`. The exponent bias of bf16 is
// larger by 120, so the same bits represent 2^-120 times the number.
__device__ __forceinline__ u32 e4m3x2_to_bf16x2(u32 pair) {
    const u32 number_2_to_120 = 0x7b807b80, minus_0 = 0x80008000;
    return fma_bf16x2((pair >> 4 & 0x07f007f0) | (pair & 0x80008000), number_2_to_120, minus_0);
}

template <> __device__ __forceinline__ void widen<e4m3>(u32 (&pairs)[2], u32 four) {
    pairs[0] = e4m3x2_to_bf16x2(four << 8);
    pairs[1] = e4m3x2_to_bf16x2(four);
}
