// What decode attention does beside its main loop: it rotates queries, stores K and V of the step's
// own tokens, and merges the results of parts.
#pragma once
#include "attention.cuh"
#include "cache.cuh"

#define DECODE_QUERIES 16

// The rotation and the storage of the rows of a step. If there are no slots, store_kv has done both.
struct NewTokens {
    u8 *kv;              // blocks
    const float *angles; // [rows, rotated] or null
    const u32 *slots;    // [rows, table_groups] or null
    u32 rotated, pairs;

    __device__ __forceinline__ u32 slot(const Attention &a, u32 row) const {
        return slots ? slots[u64(row) * a.table_groups + a.table_group] : NO_SLOT;
    }
};

// K and V of a row's own token, for one KV head. While the kernel runs, they are not in the cache.
template <class T, u32 DIM> struct NewToken {
    static constexpr u32 CHUNKS = DIM * sizeof(T) / 16, BYTES = div_ceil(Stored<T>::head_bytes(1, DIM), 16) * 16;
    float numbers[2][DIM];              // K, rotated, and V
    __align__(16) u8 stored[2][BYTES]; // each as in a block of one token

    __device__ __forceinline__ float scale(u32 half) const { return *reinterpret_cast<const float *>(stored[half] + DIM); }

    // Rounds K (`half` 0) or V (1), by one warp.
    __device__ __forceinline__ void round(u32 half) { Stored<T>::write(stored[half], numbers[half], 0, 1, DIM); }

    // Copies K or V to the token's slot, by one warp, after a barrier.
    __device__ __forceinline__ void store(u32 half, u8 *kv, const StoredHead &head, u32 slot) const {
        u32 place = slot & ((1u << head.block_shift) - 1);
        u8 *to = kv + (head.keys(slot >> head.block_shift) - head.kv) + half * head.values_offset;
        uint4 *chunks = reinterpret_cast<uint4 *>(to + place * DIM * sizeof(T));
        for (u32 i = lane_in_warp(); i < CHUNKS; i += WARP) chunks[i] = reinterpret_cast<const uint4 *>(stored[half])[i];
        if (Factor<T>::SCALED && lane_in_warp() == 0) reinterpret_cast<float *>(to + (DIM << head.block_shift))[place] = scale(half);
    }

    // Puts K and V among 16 tokens in shared memory, by one warp. The copies have zeroed their row. If
    // no token is before this one, there were no copies, and the other rows are zeroed here.
    template <u32 PITCH> __device__ __forceinline__ void put(T *keys /* [(K, V), 16, PITCH], then scales, if any: [(K, V), 16] */, u32 row) const {
        for (u32 i = lane_in_warp(); i < 2 * 16 * CHUNKS; i += WARP) {
            u32 half = i / (16 * CHUNKS), token = i / CHUNKS % 16, chunk = i % CHUNKS;
            uint4 found = {0, 0, 0, 0};
            if (token == row) found = reinterpret_cast<const uint4 *>(stored[half])[chunk];
            else if (row != 0) continue;
            *reinterpret_cast<uint4 *>(keys + (half * 16 + token) * PITCH + chunk * (16 / sizeof(T))) = found;
        }
        if constexpr (Factor<T>::SCALED) {
            float *scales = reinterpret_cast<float *>(keys + 2 * 16 * PITCH);
            u32 half = lane_in_warp() / 16, token = lane_in_warp() % 16;
            if (token == row) scales[lane_in_warp()] = scale(half);
            else if (row == 0) scales[lane_in_warp()] = 0.0f;
        }
    }
};

// Passes the numbers of the first `heads` heads among a tile's queries, K and V to
// write(head, dimension, number). Rotates queries and K. Loads have no conditions, so that those of
// a batch overlap.
template <u32 DIM, u32 THREADS, class Write>
__device__ __forceinline__ void rotate_heads(const Attention &a, const AttentionTile &tile, const NewTokens &tokens, u32 queries, u32 heads,
                                             Write write) {
    constexpr u32 PAIRS = DIM / 2, BATCH = 4;
    const float *row = a.qkv + u64(tile.first_row) * a.row_width;
    Rotation rotation = {tokens.angles + u64(tile.first_row) * tokens.rotated, tokens.rotated, tokens.pairs};
    u32 last = heads * PAIRS - 1, rotated = tokens.rotated / 2;
    for (u32 begin = threadIdx.x; begin <= last; begin += BATCH * THREADS) {
        float2 numbers[BATCH], angles[BATCH] = {};
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            u32 at = min(begin + i * THREADS, last), head = at / PAIRS;
            u32 query = a.kv_head * a.group() + tile.first_query + head, stored = a.heads + a.kv_head + (head - queries) * a.kv_heads;
            const float *from = row + (head < queries ? query : stored) * DIM;
            Pair pair = pair_of(at % PAIRS, rotation);
            numbers[i] = make_float2(from[pair.first], from[pair.second]);
        }
        if (rotated > 0) {
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) angles[i] = rotation.angle(min(min(begin + i * THREADS, last) % PAIRS, rotated - 1));
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            u32 at = begin + i * THREADS, head = at / PAIRS;
            if (at > last) break;
            if (at % PAIRS < rotated && head <= queries) numbers[i] = rotated_pair(numbers[i], angles[i]);
            Pair pair = pair_of(at % PAIRS, rotation);
            write(head, pair.first, numbers[i].x);
            write(head, pair.second, numbers[i].y);
        }
    }
}

// The results of parts, and how many parts of each tile have ended.
struct PartialResults {
    u32 *ended;   // [partial results, kv_heads]; zeros before and after a launch, and counted at a tile's first partial result
    float *parts; // [partial results, kv_heads, min(16, group), dim + 4]: sums, maximum score and weight

    __device__ __forceinline__ float *part(const Attention &a, u32 index, u32 query, u32 dim) const {
        return parts + ((u64(index) * a.kv_heads + a.kv_head) * min(u32(DECODE_QUERIES), a.group()) + query) * (dim + 4);
    }
    __device__ __forceinline__ u32 *count(const Attention &a, u32 index) const { return ended + index * a.kv_heads + a.kv_head; }
};

// out = the combination of all parts of a tile and the sink. The parts have one order, whichever
// block merges them.
template <u32 DIM> __device__ __forceinline__ void merge_parts(const Attention &a, const AttentionTile &tile, const PartialResults &results) {
    constexpr u32 FOURS = DIM / 4, BATCH = 8; // loads that overlap
    for (u32 i = threadIdx.x; i < query_count(tile, a.group(), DECODE_QUERIES) * FOURS; i += blockDim.x) {
        u32 number = i / FOURS, dim = i % FOURS * 4;
        Query query = query_of(a, tile, tile.first_query + number);
        PartialSoftmax none = initial_softmax(a.sinks, query.head), merged[4] = {none, none, none, none};
        for (u32 begin = 0; begin < tile.parts; begin += BATCH) {
            float4 sums[BATCH];
            float2 scale[BATCH]; // maximum score and weight
#pragma unroll
            for (u32 nth = 0; nth < BATCH; nth++) {
                const float *part = results.part(a, tile.partial + min(begin + nth, tile.parts - 1), number, DIM);
                sums[nth] = *reinterpret_cast<const float4 *>(part + dim);
                scale[nth] = *reinterpret_cast<const float2 *>(part + DIM);
            }
#pragma unroll
            for (u32 nth = 0; nth < BATCH; nth++) {
                if (begin + nth >= tile.parts) break;
                const float four[4] = {sums[nth].x, sums[nth].y, sums[nth].z, sums[nth].w};
#pragma unroll
                for (u32 j = 0; j < 4; j++) merged[j].add({scale[nth].x, scale[nth].y, four[j]});
            }
        }
        u64 to = (u64(query.row) * a.heads + query.head) * DIM + dim;
        a.out.put_2(to, make_float2(merged[0].sum / merged[0].weight, merged[1].sum / merged[1].weight));
        a.out.put_2(to + 2, make_float2(merged[2].sum / merged[2].weight, merged[3].sum / merged[3].weight));
    }
}
