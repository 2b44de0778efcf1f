// Host versions of the functions of kernels/tensor.cuh, which describes the layouts of registers.
#pragma once
#include "shim.h"

namespace shim {

struct MmaLane {
    float *d;     // [4]
    const u32 *a; // [4]
    const u32 *b; // [2]
};

// Returns the number in a half of a register; 0 is the low half.
template <class T> double number(u32 pair, u32 half) { return double(to_float(T{u16(pair >> 16 * half)})); }

// Returns a sum as tensor cores do that are not exact: with an even last bit.
inline float inexact(float sum) {
    u32 bits = float_to_bits(sum) & ~1u;
    return bits_to_float(bits);
}

// Sums in f64 and rounds once. This is more precise than a device, whose order of summation is unspecified.
template <class T> void mma_warp(void *const *lanes) {
    double a[16][16], b[16][8]; // [row][column]
    for (u32 lane = 0; lane < 32; lane++) {
        auto own = static_cast<const MmaLane *>(lanes[lane]);
        u32 g = lane / 4, t = lane % 4;
        for (u32 half = 0; half < 2; half++) {
            for (u32 r = 0; r < 4; r++) a[g + r % 2 * 8][2 * t + half + r / 2 * 8] = number<T>(own->a[r], half);
            for (u32 r = 0; r < 2; r++) b[2 * t + half + r * 8][g] = number<T>(own->b[r], half);
        }
    }
    for (u32 lane = 0; lane < 32; lane++) {
        float *d = static_cast<MmaLane *>(lanes[lane])->d;
        for (u32 r = 0; r < 4; r++) {
            u32 row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
            double sum = d[r];
            for (u32 k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            d[r] = mma_is_inexact ? inexact(float(sum)) : float(sum);
        }
    }
}

struct LdmatrixLane {
    const u16 *row; // [8]
    u32 *r;         // [4]
};

template <bool transposed> void ldmatrix_warp(void *const *lanes) {
    auto number = [&](u32 matrix, u32 row, u32 i) { return u32(static_cast<LdmatrixLane *>(lanes[8 * matrix + row])->row[i]); };
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        for (u32 m = 0; m < 4; m++) {
            u32 low = transposed ? number(m, 2 * t, g) : number(m, g, 2 * t);
            u32 high = transposed ? number(m, 2 * t + 1, g) : number(m, g, 2 * t + 1);
            static_cast<LdmatrixLane *>(lanes[lane])->r[m] = low | high << 16;
        }
    }
}

template <bool transposed> void ldmatrix(const char *what, u32 *r, const void *row) {
    check_shared(what, row, 16);
    LdmatrixLane own = {static_cast<const u16 *>(row), r};
    sync_warp(what, ALL_LANES, &own, ldmatrix_warp<transposed>);
}

} // namespace shim

template <class T> void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    shim::MmaLane own = {d, a, b};
    shim::sync_warp("mma_16816", ALL_LANES, &own, shim::mma_warp<T>);
}

inline void ldmatrix_x4(u32 (&r)[4], const void *row) { shim::ldmatrix<false>("ldmatrix_x4", r, row); }
inline void ldmatrix_x4_transposed(u32 (&r)[4], const void *row) { shim::ldmatrix<true>("ldmatrix_x4_transposed", r, row); }

inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    auto result = [&](u32 half) { return float(shim::number<bf16>(a, half) * shim::number<bf16>(b, half) + shim::number<bf16>(c, half)); };
    return pack2<bf16>(result(0), result(1));
}

inline uint4 load_once(const void *global) { return *static_cast<const uint4 *>(global); }

inline void copy_async_16(void *shared, const void *global, bool valid) { shim::copy_async("copy_async_16", shared, global, valid, 16); }
inline void copy_async_4(void *shared, const void *global, bool valid) { shim::copy_async("copy_async_4", shared, global, valid, 4); }
inline void copy_async_commit() { shim::copy_async_commit(); }
template <int n> void copy_async_wait() { shim::copy_async_wait(n); }
