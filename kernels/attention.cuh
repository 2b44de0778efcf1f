// What the attention kernels have in common: arguments, tiles, and the format of the KV cache.
//
// K and V of a layer are stored as [block][K, V][kv_head][token][dim]. If the values are the first
// dimensions of the keys, they are stored as [block][kv_head][token][dim]. In int8 and fp8, the
// numbers of each head of K and of V are followed by one f32 scale per token.
//
// A query is one head of one row. The queries of all heads that share a KV head, over all rows of a
// sequence, are numbered row by row. A tile is a range of them, so that K and V are read once for
// the tile. A tile without rows is skipped. group = heads / kv_heads, the heads that share a KV
// head.
//
// Softmax runs online over tokens, counted from the start of the sequence, independent of the tile.
// Tokens that a query does not attend to leave its sums unchanged, bit for bit (in 16-bit formats,
// only if their stored numbers are finite). Therefore a query's result depends neither on the
// other queries of its tile nor on how its sequence was divided into steps.
#pragma once
#include "tensor.cuh"

#define LOG2_E 1.44269504088896f
#define ALL_POSITIONS 0x80000000u // greater than any sequence length

struct AttentionTile {
    u32 first_row, rows; // of the sequence, in this step
    u32 table;           // index of the sequence's first entry in `tables`
    u32 first_query;
    // In decode:
    u32 part_len;    // tokens of each part of the sequence but the last
    u32 part, parts; // the part of this tile, and the number of parts
    u32 partial;     // index of the partial result of the first part, if there are several
};

// The arguments of all attention kernels.
struct Attention {
    Rows out;                   // [rows, heads, value_dim]
    const float *qkv;           // [rows, row_width], each row beginning with the queries: [heads, head_dim]
    const u8 *kv;               // blocks
    const AttentionTile *tiles; // [gridDim.x]
    const u32 *positions;       // [rows]
    const u32 *tables;          // [places, table_groups]
    const float *slopes;        // [heads] or null: ALiBi slopes, by which a score decreases per position of distance
    const float *sinks;         // [heads] or null: scores that precede all others, without a value
    u32 row_width, heads, kv_heads;
    u32 head_dim, value_dim; // value_dim < head_dim: the values are the first dimensions of the keys
    u32 block_shift;         // log2 of the tokens per block
    u32 table_groups, table_group;
    u32 window;            // number of positions that a query attends to, including its own
    float scale, soft_cap; // soft_cap is 0 if there is none
    u32 kv_head;           // of this thread block

    __device__ __forceinline__ u32 group() const { return heads / kv_heads; }
};

// Kernel parameters in their common order. Some kernels take more between and after them. `window`
// is 0 for full causal attention. `dtype` is the type of `out`.
#define ATTENTION_POINTERS                                                                                           \
    void *out, const float *qkv, u8 *kv, const AttentionTile *tiles, const u32 *positions, const u32 *tables, \
        const float *slopes, const float *sinks, u32 row_width, u32 heads, u32 kv_heads
#define ATTENTION_SCALARS u32 block_shift, u32 table_groups, u32 table_group, u32 window, float scale, float soft_cap, u32 dtype
#define ATTENTION_OF(head_dim, value_dim, kv_head)                                                                               \
    Attention{Rows{out, dtype}, qkv, kv, tiles, positions, tables, slopes, sinks, row_width, heads, kv_heads, head_dim, value_dim, block_shift, \
              table_groups, table_group, window == 0 ? ALL_POSITIONS : window, scale, soft_cap, kv_head}

// 2^x by the special function unit; exact for x = 0.
__device__ __forceinline__ float exp2_of(float x) {
#ifdef __CUDACC__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return exp2f(x);
#endif
}

// A query and the range of positions that it attends to.
struct Query {
    u32 row, head, first, last;
};

__device__ __forceinline__ Query query_of(const Attention &a, const AttentionTile &tile, u32 number) {
    u32 row = tile.first_row + number / a.group(), last = a.positions[row];
    return {row, a.kv_head * a.group() + number % a.group(), last + 1 - min(last + 1, a.window), last};
}

// Returns the number of queries of a tile, at most `limit`.
__device__ __forceinline__ u32 query_count(const AttentionTile &tile, u32 group, u32 limit) {
    u32 end = tile.rows * group;
    return tile.first_query < end ? min(limit, end - tile.first_query) : 0;
}

// Applies ALiBi and the soft cap to a score.
__device__ __forceinline__ float adjusted_score(const Attention &a, float score, float slope, u32 query, u32 token) {
    score -= slope * float(int(query - token));
    return a.soft_cap > 0.0f ? a.soft_cap * tanhf(score * (1.0f / a.soft_cap)) : score;
}

// The cached K and V of one KV head of a sequence.
struct StoredHead {
    const u8 *kv;                 // blocks
    const u32 *tables;            // [places, table_groups]
    u32 table, table_groups;      // index of the sequence's first block, and the distance to the next
    u32 block_shift, block_bytes; // block_bytes: K and V of all heads
    u32 keys_offset, values_offset;   // byte offset of the head's K in a block, and of its V from its K

    __device__ __forceinline__ u32 block(u32 token) const { return tables[table + (token >> block_shift) * table_groups]; }
    __device__ __forceinline__ u32 slot(u32 token) const { return token & ((1u << block_shift) - 1); }
    __device__ __forceinline__ const u8 *keys(u32 block) const { return kv + (u64(block) * block_bytes + keys_offset); }
};

__device__ __forceinline__ StoredHead stored_head(const Attention &a, const AttentionTile &tile, u32 token_bytes) {
    u32 head_bytes = token_bytes << a.block_shift, half_bytes = a.kv_heads * head_bytes;
    StoredHead head = {a.kv, a.tables, tile.table + a.table_group, a.table_groups, a.block_shift, half_bytes, a.kv_head * head_bytes, 0};
    if (a.value_dim == a.head_dim) head.block_bytes = 2 * half_bytes, head.values_offset = half_bytes;
    return head;
}

// A partial softmax over some tokens: the maximum score, the sum of the weights 2^(score -
// max_score), and the sum of the weighted values.
struct PartialSoftmax {
    float max_score, weight, sum;

    __device__ __forceinline__ void add(PartialSoftmax part) {
        if (part.max_score == MINUS_INFINITY && part.weight == 0.0f) return; // no tokens
        float before = max_score;
        max_score = fmaxf(before, part.max_score);
        float rescale = exp2_of(before - max_score), part_rescale = exp2_of(part.max_score - max_score);
        weight = fmaf(weight, rescale, part.weight * part_rescale);
        sum = fmaf(sum, rescale, part.sum * part_rescale);
    }
};

// Returns the initial partial softmax, before all tokens: the sink, if there is one.
__device__ __forceinline__ PartialSoftmax initial_softmax(const float *sinks, u32 head) {
    if (sinks) return {sinks[head] * LOG2_E, 1.0f, 0.0f};
    return {MINUS_INFINITY, 0.0f, 0.0f};
}

// The type in which K and V of storage type T are multiplied. 8-bit types are converted to bf16,
// which represents all their values and has the range of f32. So queries, and weights times a
// scale, do not overflow, and they underflow only near the limit of f32.
template <class T> struct Factor {
    typedef T Type;
    static constexpr bool SCALED = false, NARROW = false;
};
template <> struct Factor<signed char> {
    typedef bf16 Type;
    static constexpr bool SCALED = true, NARROW = false;
};
// f16 has a range of 2^-24 to 65504 only, so queries are scaled into it.
template <> struct Factor<f16> {
    typedef f16 Type;
    static constexpr bool SCALED = false, NARROW = true;
};
template <> struct Factor<e4m3> : Factor<signed char> {};

// Computes the power of two that scales a query in a narrow type, whose largest magnitude this is, to
// between 1 and 2, within the range of f32, and its inverse.
__device__ __forceinline__ void narrowing_factor(float magnitude, float &factor, float &restore) {
    u32 exponent = min(max(float_to_bits(magnitude) >> 23, 1u), 253u);
    restore = bits_to_float(exponent << 23);
    factor = bits_to_float((254 - exponent) << 23);
}

// Return the maximum and the sum over the four lanes that have a query's scores in the fragments of
// tensor cores, in all of them.
__device__ __forceinline__ float query_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ float query_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Returns the token of score i of fragment n, relative to the first token.
__device__ __forceinline__ u32 score_column(u32 n, u32 i) { return n * 8 + lane_in_warp() % 4 * 2 + i % 2; }

// Masks scores outside the window. For tokens after the query, the unsigned difference wraps to a
// value beyond every window.
template <u32 FRAGMENTS>
__device__ __forceinline__ void mask_scores(float (&scores)[FRAGMENTS][4], const u32 (&last)[2], u32 window, u32 token) {
#pragma unroll
    for (u32 n = 0; n < FRAGMENTS; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (last[i / 2] - (token + score_column(n, i)) >= window) scores[n][i] = MINUS_INFINITY;
    }
}

// Returns the bytes of K or V of one head and token.
template <class T> __device__ __forceinline__ u32 token_bytes(u32 dim) { return dim * sizeof(T) + (Factor<T>::SCALED ? sizeof(float) : 0); }
