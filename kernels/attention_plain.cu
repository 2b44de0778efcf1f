// Attention for heads of any width, and K and V of any type. attention.cuh describes the terms.
//
// attention_plain_<T>: the grid is (tiles, kv_heads, any number), with tiles of 128 queries. It has
// 128 threads and no dynamic shared memory.
#include "attention.cuh"

#define PLAIN_QUERIES 128
#define PLAIN_WARPS 4
#define PLAIN_MAX_DIM 576

// A token's numbers and their scale.
template <class T> struct StoredToken {
    const T *numbers; // [dim]
    float scale;
};

// The cached K and V of one KV head, for the plain kernels.
template <class T> struct PlainHead {
    StoredHead head;
    u32 dim;

    __device__ __forceinline__ StoredToken<T> keys(u32 token) const { return at(token, 0); }
    __device__ __forceinline__ StoredToken<T> values(u32 token) const { return at(token, head.values_offset); }

    __device__ __forceinline__ StoredToken<T> at(u32 token, u32 offset) const {
        const T *numbers = reinterpret_cast<const T *>(head.keys(head.block(token)) + offset);
        float scale = 1.0f;
        if constexpr (Factor<T>::SCALED) scale = reinterpret_cast<const float *>(numbers + (dim << head.block_shift))[head.slot(token)];
        return {numbers + head.slot(token) * dim, scale};
    }
};

// The state of a warp's query while it iterates over K and V. Lanes divide the dimensions, and then
// the scores of 32 tokens.
template <class T> struct PlainQuery {
    static constexpr u32 COUNT = PLAIN_MAX_DIM / WARP;
    Query query_range;
    float query[COUNT], sums[COUNT]; // dimensions lane, lane + 32, ...
    float max_score, weight;         // the maximum score times log2(e)

    __device__ __forceinline__ void begin(const Attention &a, const Query &of) {
        const float *from = a.qkv + u64(of.row) * a.row_width + of.head * a.head_dim;
        query_range = of;
        max_score = MINUS_INFINITY;
        weight = 0.0f;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 dim = i * WARP + lane_in_warp();
            query[i] = dim < a.head_dim ? from[dim] : 0.0f;
            sums[i] = 0.0f;
        }
    }

    // Processes 32 tokens starting at `token`, a multiple of 32. At least one of them is visible.
    __device__ __forceinline__ void attend(const Attention &a, const PlainHead<T> &head, u32 token) {
        u32 begin = max(query_range.first, token), end = min(query_range.last + 1, token + WARP);
        float score = MINUS_INFINITY; // of this lane's token
        for (u32 i = begin; i < end; i++) {
            float product = dot(a, head.keys(i));
            if (i - token == lane_in_warp()) score = product;
        }
        float slope = a.slopes ? a.slopes[query_range.head] : 0.0f;
        if (score != MINUS_INFINITY) score = adjusted_score(a, score * a.scale, slope, query_range.last, token + lane_in_warp()) * LOG2_E;
        float weight_of_token = update_softmax(score);
        for (u32 i = begin; i < end; i++) add_value(a, __shfl_sync(ALL_LANES, weight_of_token, i - token), head.values(i));
    }

    __device__ __forceinline__ float dot(const Attention &a, StoredToken<T> key) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 dim = i * WARP + lane_in_warp();
            if (dim < a.head_dim) sum += query[i] * to_float(key.numbers[dim]);
        }
        return warp_sum(sum) * key.scale;
    }

    // Replaces a score by its weight relative to the maximum so far.
    __device__ __forceinline__ float update_softmax(float score) {
        float before = max_score;
        max_score = fmaxf(before, warp_max(score));
        float rescale = exp2_of(before - max_score), weight_of_token = exp2_of(score - max_score);
        weight = weight * rescale + warp_sum(weight_of_token);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) sums[i] *= rescale;
        return weight_of_token;
    }

    __device__ __forceinline__ void add_value(const Attention &a, float weight_of_token, StoredToken<T> value) {
        weight_of_token *= value.scale;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 dim = i * WARP + lane_in_warp();
            if (dim < a.value_dim) sums[i] += weight_of_token * to_float(value.numbers[dim]);
        }
    }

    __device__ __forceinline__ void put(const Attention &a, float *to /* [value_dim] */, float *maxima, float *weights /* [warps] */) const {
        maxima[warp_in_block()] = max_score; // all lanes write the same value
        weights[warp_in_block()] = weight;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 dim = i * WARP + lane_in_warp();
            if (dim < a.value_dim) to[dim] = sums[i];
        }
    }
};

// A block processes every gridDim.z-th query of its tile. Its warps process 32 tokens each in turn.
template <class T> __device__ __forceinline__ void attend_plain(const Attention &a) {
    __shared__ float sums[PLAIN_WARPS][PLAIN_MAX_DIM], max_score[PLAIN_WARPS], weight[PLAIN_WARPS];
    AttentionTile tile = a.tiles[blockIdx.x];
    PlainHead<T> head = {stored_head(a, tile, token_bytes<T>(a.head_dim)), a.head_dim};
    for (u32 i = blockIdx.z; i < query_count(tile, a.group(), PLAIN_QUERIES); i += gridDim.z) {
        Query query_range = query_of(a, tile, tile.first_query + i);
        PlainQuery<T> query;
        query.begin(a, query_range);
        for (u32 token = (query_range.first / WARP + warp_in_block()) * WARP; token <= query_range.last; token += PLAIN_WARPS * WARP)
            query.attend(a, head, token);
        query.put(a, sums[warp_in_block()], max_score, weight);
        __syncthreads();
        u64 to = (u64(query_range.row) * a.heads + query_range.head) * a.value_dim;
        for (u32 dim = threadIdx.x; dim < a.value_dim; dim += blockDim.x) {
            PartialSoftmax result = initial_softmax(a.sinks, query_range.head);
            for (u32 warp = 0; warp < PLAIN_WARPS; warp++) result.add({max_score[warp], weight[warp], sums[warp][dim]});
            a.out.put(to + dim, result.sum / result.weight);
        }
        __syncthreads(); // all partial results have been read
    }
}

#define ATTENTION_PLAIN(name, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(PLAIN_WARPS *WARP, 4)                               \
        attention_plain_##name(ATTENTION_POINTERS, u32 head_dim, u32 value_dim, ATTENTION_SCALARS) { \
        wait_for_previous_kernel();                                                                  \
        attend_plain<T>(ATTENTION_OF(head_dim, value_dim, blockIdx.y));                                          \
    }

ATTENTION_PLAIN(f32, float)
ATTENTION_PLAIN(bf16, bf16)
ATTENTION_PLAIN(int8, signed char)
ATTENTION_PLAIN(f16, f16)
ATTENTION_PLAIN(fp8, e4m3)
