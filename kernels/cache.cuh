// The rotation of queries and keys, and the storage format of K and V.
//
// K and V of a layer are stored as [block][K, V][kv_head][token][dim]. If the values are the first
// dimensions of the keys, they are stored as [block][kv_head][token][dim]. In int8 and fp8, the
// numbers of each head of K and of V are followed by one f32 scale per token.
#pragma once
#include "common.cuh"

enum Pairs { HALVES, NEIGHBOURS };

// The rotation of a row's heads.
struct Rotation {
    const float *angles; // [rotated]: the cosines of all pairs, and then their sines; null if `rotated` is 0
    u32 rotated, pairs;

    // Returns cosine and sine of pair i.
    __device__ __forceinline__ float2 angle(u32 i) const { return make_float2(angles[i], angles[i + rotated / 2]); }
};

struct Pair {
    u32 first, second;
};

// Returns the dimensions of pair i of a head. Dimensions that are not rotated are pairs of neighbours.
__device__ __forceinline__ Pair pair_of(u32 i, const Rotation &rotation) {
    u32 count = rotation.rotated / 2;
    return rotation.pairs == HALVES && i < count ? Pair{i, i + count} : Pair{2 * i, 2 * i + 1};
}

// Rotates a pair by an angle, given as cosine and sine. The roundings are explicit, so that all
// kernels have the same bits.
__device__ __forceinline__ float2 rotated_pair(float2 pair, float2 angle) {
    return make_float2(fmaf(pair.x, angle.x, -(pair.y * angle.y)), fmaf(pair.y, angle.x, pair.x * angle.y));
}

// Rounds to the nearest number of the storage type. f16 saturates, because an infinity would turn
// every result that depends on it into NaN.
template <class T> __device__ T round_to(float x) { return from_float<T>(x); }
template <> __device__ __forceinline__ f16 round_to<f16>(float x) {
    const float limit = 65504.0f;
    return from_float<f16>(x == x ? fminf(fmaxf(x, -limit), limit) : x);
}

// Writes K or V of one token and head to its block, by one warp.
template <class T> struct Stored {
    static __host__ __device__ constexpr u32 head_bytes(u32 block_size, u32 dim) { return block_size * dim * sizeof(T); }
    static __device__ void write(u8 *head, const float *numbers /* [dim] */, u32 token, u32, u32 dim) {
        T *to = reinterpret_cast<T *>(head) + u64(token) * dim;
        for (u32 i = lane_in_warp(); i < dim; i += WARP) to[i] = round_to<T>(numbers[i]);
    }
};

// Storage as multiples of a scale, with `limit` as the largest multiple.
template <class T> struct StoredMultiples {
    static __host__ __device__ constexpr u32 head_bytes(u32 block_size, u32 dim) { return block_size * (dim + sizeof(float)); }
    static __device__ void write(u8 *head, const float *numbers /* [dim] */, u32 token, u32 block_size, u32 dim, float limit) {
        float scale = scale_of(numbers, dim, limit), divisor = scale == 0.0f ? 1.0f : scale; // all numbers are stored as 0 * scale
        T *to = reinterpret_cast<T *>(head) + u64(token) * dim;
        for (u32 i = lane_in_warp(); i < dim; i += WARP) to[i] = round_to<T>(numbers[i] / divisor);
        if (lane_in_warp() == 0) reinterpret_cast<float *>(head + u64(block_size) * dim)[token] = scale;
    }
    // Returns the scale that maps the largest magnitude to `limit`. If a number is not finite, the
    // scale is NaN, and so is every result computed with it. If the scale would be subnormal, it is
    // 0.
    static __device__ float scale_of(const float *numbers /* [dim] */, u32 dim, float limit) {
        float magnitude = 0.0f;
        for (u32 i = lane_in_warp(); i < dim; i += WARP) magnitude = max_magnitude(magnitude, numbers[i]);
        float scale = warp_max(magnitude) / limit;
        return scale > 3.4028235e38f ? NAN : scale < 1.17549435e-38f ? 0.0f : scale;
    }
};

template <> struct Stored<signed char> : StoredMultiples<signed char> {
    static __device__ void write(u8 *head, const float *numbers, u32 token, u32 block_size, u32 dim) {
        StoredMultiples::write(head, numbers, token, block_size, dim, 127.0f);
    }
};
template <> struct Stored<e4m3> : StoredMultiples<e4m3> {
    static __device__ void write(u8 *head, const float *numbers, u32 token, u32 block_size, u32 dim) {
        StoredMultiples::write(head, numbers, token, block_size, dim, E4M3_MAX);
    }
};
