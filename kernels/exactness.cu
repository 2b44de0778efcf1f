// A check of the device for the batch-invariant mode: tensor cores return the sums to which they add
// with the same bits where the product is zero. Tiles are padded with zeros, so the bits of a row
// would otherwise depend on its tile.
//
// The numbers are finite bits of a hash. +0 and -0 are the same sum.
#include "hopper.cuh"

#define EXACTNESS_THREADS 128
#define EXACTNESS_ROUNDS 8 // products of each kind by a warp

enum Zeros { ALL_OF_A, ALL_OF_B, UPPER_HALF_OF_A, ZEROS_KINDS };

__device__ __forceinline__ u32 hashed(u32 x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

// The place of the first number of a thread in a round. The numbers of a round have 256 places.
__device__ __forceinline__ u32 first_place(u32 round) { return ((blockIdx.x * EXACTNESS_ROUNDS + round) * EXACTNESS_THREADS + threadIdx.x) * 256; }

// The exponents of two numbers that are not finite.
template <class T> struct NotFinite;
template <> struct NotFinite<bf16> { static constexpr u32 EXPONENT = 0x7f80; };
template <> struct NotFinite<f16> { static constexpr u32 EXPONENT = 0x7c00; };

template <class T> __device__ __forceinline__ u32 finite_pair(u32 place) {
    u32 pair = hashed(place), exponent = NotFinite<T>::EXPONENT;
    if ((pair & exponent) == exponent) pair ^= 0x4000;
    if ((pair >> 16 & exponent) == exponent) pair ^= 0x40000000;
    return pair;
}

__device__ __forceinline__ float finite_sum(u32 place) {
    u32 bits = hashed(~place);
    return bits_to_float((bits & 0x7f800000) == 0x7f800000 ? bits ^ 0x40000000 : bits);
}

__device__ __forceinline__ bool differ(float before, float after) {
    u32 a = float_to_bits(before), b = float_to_bits(after);
    return a != b && (a | b) << 1 != 0;
}

// Fills a, in the layout of mma_16816.
template <class T> __device__ __forceinline__ void fill_a(u32 (&a)[4], u32 place, u32 zeros) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[i] = zeros == ALL_OF_A || (zeros == UPPER_HALF_OF_A && i % 2 == 0) ? 0 : finite_pair<T>(place + i);
}

template <u32 N> __device__ __forceinline__ void fill_sums(float (&sums)[N][4], u32 place) {
#pragma unroll
    for (u32 i = 0; i < 4 * N; i++) sums[i / 4][i % 4] = finite_sum(place + i);
}

// Returns whether a sum changed whose product is zero.
template <u32 N> __device__ __forceinline__ bool have_changed(const float (&sums)[N][4], u32 place, u32 zeros) {
    bool changed = false;
#pragma unroll
    for (u32 i = 0; i < 4 * N; i++)
        if (zeros != UPPER_HALF_OF_A || i % 4 < 2) changed |= differ(finite_sum(place + i), sums[i / 4][i % 4]);
    return changed;
}

template <class T> __device__ __forceinline__ bool mma_changes_sums(u32 place, u32 zeros) {
    u32 a[4], b[2];
    float sums[1][4];
    fill_a<T>(a, place, zeros);
    for (u32 i = 0; i < 2; i++) b[i] = zeros == ALL_OF_B ? 0 : finite_pair<T>(place + 4 + i);
    fill_sums(sums, place);
    mma_16816<T>(sums[0], a, b);
    return have_changed(sums, place, zeros);
}

// *changed = 1 if mma.sync changes sums. It is 0 before. Grid: any.
extern "C" __global__ void sums_after_mma(u32 *changed) {
    wait_for_previous_kernel();
    for (u32 round = 0; round < EXACTNESS_ROUNDS; round++)
        for (u32 zeros = 0; zeros < ZEROS_KINDS; zeros++) {
            bool in_bf16 = mma_changes_sums<bf16>(first_place(round), zeros), in_f16 = mma_changes_sums<f16>(first_place(round), zeros);
            if (in_bf16 || in_f16) *changed = 1;
        }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)

// Returns dynamic shared memory for b. A panel begins at a multiple of 1024 bytes.
__device__ __forceinline__ u32 *shared_for_b() {
    DYNAMIC_SHARED(u8, memory);
    return reinterpret_cast<u32 *>(memory + (0u - shared_address(memory)) % 1024);
}

// b is 16 rows of 128 numbers in two panels, of which products with fewer numbers read the first.
template <class T, u32 N> __device__ __forceinline__ bool wgmma_changes_sums(u32 *b, u32 place, u32 zeros) {
    constexpr u32 PANEL_BYTES = 16 * PANEL_ROW_BYTES;
    for (u32 i = threadIdx.x; i < 2 * PANEL_BYTES / sizeof(u32); i += EXACTNESS_THREADS)
        b[i] = zeros == ALL_OF_B ? 0 : finite_pair<T>(place + 4 + i / EXACTNESS_THREADS);
    fence_shared_for_tensor_cores();
    __syncthreads();
    u32 a[1][4];
    float sums[N / 8][4];
    fill_a<T>(a[0], place, zeros);
    fill_sums(sums, place);
    pin(a), pin(sums);
    products_begin();
    add_product_64<T, N>(sums, a[0], MatrixDescriptor(b, PANEL_BYTES).at(0));
    products_commit();
    products_wait<0>();
    pin(sums);
    __syncthreads(); // before b changes
    return have_changed(sums, place, zeros);
}

// The same for wgmma, in the forms that attention_hopper.cu uses for values. Dynamic shared memory:
// two panels of 16 rows, and 1024 bytes for their alignment.
extern "C" __global__ void sums_after_wgmma(u32 *changed) {
    wait_for_previous_kernel();
    u32 *b = shared_for_b();
    for (u32 round = 0; round < EXACTNESS_ROUNDS; round++)
        for (u32 zeros = 0; zeros < ZEROS_KINDS; zeros++) {
            u32 place = first_place(round);
            bool narrow_bf16 = wgmma_changes_sums<bf16, 64>(b, place, zeros), wide_bf16 = wgmma_changes_sums<bf16, 128>(b, place, zeros);
            bool narrow_f16 = wgmma_changes_sums<f16, 64>(b, place, zeros), wide_f16 = wgmma_changes_sums<f16, 128>(b, place, zeros);
            if (narrow_bf16 || wide_bf16 || narrow_f16 || wide_f16) *changed = 1;
        }
}
#endif
