// Rotary positions, writes of K and V to the cache, and block moves.
//
// K and V of a layer are stored as [block][K, V][kv_head][token][dim]. If the values are the first
// dimensions of the keys, they are stored as [block][kv_head][token][dim]. In int8 and fp8, the
// numbers of each head of K and of V are followed by one f32 scale per token.
#include "common.cuh"

enum Pairs { HALVES, NEIGHBOURS };

// Rotates a head: pair i by the angle whose cosine is at i and whose sine is at i + rotated / 2.
// The lanes of a warp divide the pairs.
__device__ void rotate(float *head /* [dim] */, const float *angles /* [rotated] */, u32 rotated, u32 pairs) {
    u32 count = rotated / 2;
    for (u32 i = lane_in_warp(); i < count; i += WARP) {
        u32 first = pairs == HALVES ? i : 2 * i, second = pairs == HALVES ? i + count : 2 * i + 1;
        float a = head[first], b = head[second], cosine = angles[i], sine = angles[i + count];
        head[first] = a * cosine - b * sine;
        head[second] = b * cosine + a * sine;
    }
}

// out[r] = [cosines, sines] of positions[r] * frequencies, times `amplitude`. Grid: rows.
extern "C" __global__ void angles(float *out /* [rows, 2 * count] */, const u32 *positions /* [rows] */, const float *frequencies /* [count] */,
                                  u32 count, float amplitude) {
    start_next_kernel();
    wait_for_previous_kernel();
    float *row = out + u64(blockIdx.x) * 2 * count;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        float angle = float(positions[blockIdx.x]) * frequencies[i];
        row[i] = cosf(angle) * amplitude;
        row[i + count] = sinf(angle) * amplitude;
    }
}

// Rotates heads of `dim` numbers, starting at `first`, with one warp per head. Grid: rows, heads.
extern "C" __global__ void rope(float *x /* [rows, stride] */, const float *angles /* [rows, rotated] */, u32 first, u32 dim, u32 stride,
                                u32 rotated, u32 pairs) {
    start_next_kernel();
    wait_for_previous_kernel();
    rotate(x + u64(blockIdx.x) * stride + first + u64(blockIdx.y) * dim, angles + u64(blockIdx.x) * rotated, rotated, pairs);
}

// Rounds to the nearest number of the storage type. f16 saturates, because an infinity would turn
// every result that depends on it into NaN.
template <class T> __device__ T round_to(float x) { return from_float<T>(x); }
template <> __device__ f16 round_to<f16>(float x) {
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

// Rotates queries and keys of a row, if there are angles, and writes its keys and values to its
// slot. Each warp processes one head. Grid: rows, heads / warps of a block.
template <class T>
__device__ void store_kv(u8 *kv, float *qkv, const float *angles, const u32 *slots, u32 heads, u32 kv_heads, u32 halves, u32 dim, u32 rotated,
                         u32 pairs, u32 block_shift, u32 table_groups, u32 table_group) {
    u32 row = blockIdx.x, slot = slots[u64(row) * table_groups + table_group], block_size = 1u << block_shift;
    u32 all = heads + halves * kv_heads, head_bytes = Stored<T>::head_bytes(block_size, dim);
    u8 *block = kv + u64(slot >> block_shift) * halves * kv_heads * head_bytes;
    u32 head = blockIdx.y * (blockDim.x / WARP) + warp_in_block();
    float *numbers = qkv + (u64(row) * all + head) * dim;
    if (angles && head < heads + kv_heads) rotate(numbers, angles + u64(row) * rotated, rotated, pairs);
    __syncwarp(); // other lanes read the rotated numbers
    if (heads <= head && head < all && slot != NO_SLOT)
        Stored<T>::write(block + u64(head - heads) * head_bytes, numbers, slot & (block_size - 1), block_size, dim);
}

#define STORE_KV(name, T)                                                                                                                       \
    extern "C" __global__ void store_kv_##name(u8 *kv /* blocks */, float *qkv /* [rows, heads + halves * kv_heads, dim] */,                    \
                                               const float *angles /* [rows, rotated] or null */, const u32 *slots /* [rows, table_groups] */,  \
                                               u32 heads, u32 kv_heads, u32 halves, u32 dim, u32 rotated, u32 pairs, u32 block_shift,           \
                                               u32 table_groups, u32 table_group) {                                                             \
        start_next_kernel();                                                                                                                    \
        wait_for_previous_kernel();                                                                                                             \
        store_kv<T>(kv, qkv, angles, slots, heads, kv_heads, halves, dim, rotated, pairs, block_shift, table_groups, table_group);              \
    }
STORE_KV(f32, float)
STORE_KV(bf16, bf16)
STORE_KV(int8, signed char)
STORE_KV(f16, f16)
STORE_KV(fp8, e4m3)

// Copies whole blocks, with all their levels, between tiers or within one. Level l of a tier begins
// at bases[l], with strides[l] bytes between blocks. Sizes are multiples of 4. Grid: moves, levels.
extern "C" __global__ void move_blocks(u8 *const *to_bases /* [levels] */, const u64 *to_strides /* [levels] */,
                                       u8 *const *from_bases /* [levels] */, const u64 *from_strides /* [levels] */,
                                       const u64 *bytes /* [levels] */, const u32 *moves /* [moves, (from, to)] */) {
    wait_for_previous_kernel();
    u32 level = blockIdx.y, from = moves[2 * blockIdx.x], to = moves[2 * blockIdx.x + 1];
    u8 *target = to_bases[level] + u64(to) * to_strides[level];
    const u8 *source = from_bases[level] + u64(from) * from_strides[level];
    if ((reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source) | bytes[level]) % sizeof(uint4) == 0) {
        for (u64 i = threadIdx.x; i < bytes[level] / sizeof(uint4); i += blockDim.x)
            reinterpret_cast<uint4 *>(target)[i] = reinterpret_cast<const uint4 *>(source)[i];
    } else {
        for (u64 i = threadIdx.x; i < bytes[level] / sizeof(u32); i += blockDim.x)
            reinterpret_cast<u32 *>(target)[i] = reinterpret_cast<const u32 *>(source)[i];
    }
}
