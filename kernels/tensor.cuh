// What only tensor cores and the copy unit can do, each as one function. On the host tests/cuda/shim.h has the same in plain code.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__

// d += a * b, of a warp: a is [16, 16], b [16, 8], d [16, 8] in f32. With g = lane / 4 and t = lane % 4, each register of two numbers, the first low:
// a[0] is row g, columns 2t and 2t + 1; a[1] row g + 8; a[2] row g, columns 2t + 8 and 2t + 9; a[3] row g + 8, those.
// b[0] is rows 2t and 2t + 1 of column g; b[1] rows 2t + 8 and 2t + 9.
// d[0], d[1] are row g, columns 2t and 2t + 1; d[2], d[3] row g + 8.
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

// a * b + c, of each of two numbers in bf16.
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Four matrices of 8 rows of 16 bytes in shared memory: lane l gives the address of row l % 8 of matrix l / 8. Register m of a lane is, of matrix
// m, row lane / 4, numbers 2 * (lane % 4) and the next; transposed: numbers lane / 4 of the rows 2 * (lane % 4) and the next.
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

// Begins to copy 16 bytes to shared memory, or 4, both addresses aligned to as many; zeros where there is nothing to copy. What was begun since the last
// commit is a group; wait<n> waits until at most n groups of this thread are under way. Others see it after __syncthreads.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, bool there) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_async_4(void *shared, const void *global, bool there) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(there ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int n> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

#else
#include "shim_tensor.h"
#endif

// Four bytes as numbers in bf16, which has all of them: pairs[0] those at even places, pairs[1] those at odd ones.
template <class T> __device__ __forceinline__ void widen(u32 (&pairs)[2], u32 four);

// 128 and the low seven bits, less 128, or less 256 where there is a sign: it stands where an exponent ends, and doubles.
template <> __device__ __forceinline__ void widen<signed char>(u32 (&pairs)[2], u32 four) {
    const u32 number_128 = 0x43004300, minus_1 = 0xbf80bf80;
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        u32 bytes = four >> 8 * odd;
        pairs[odd] = fma_bf16x2((bytes & 0x00800080) | number_128, minus_1, (bytes & 0x007f007f) | number_128);
    }
}

// Two numbers, the upper bytes of the halves of `pair`. In bf16, whose exponent counts from 120 further down, the same bits are 2^-120 of the number.
__device__ __forceinline__ u32 e4m3x2_to_bf16x2(u32 pair) {
    const u32 number_2_to_120 = 0x7b807b80, minus_0 = 0x80008000;
    return fma_bf16x2((pair >> 4 & 0x07f007f0) | (pair & 0x80008000), number_2_to_120, minus_0);
}

template <> __device__ __forceinline__ void widen<e4m3>(u32 (&pairs)[2], u32 four) {
    pairs[0] = e4m3x2_to_bf16x2(four << 8);
    pairs[1] = e4m3x2_to_bf16x2(four);
}
