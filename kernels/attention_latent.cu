// Attention over latents on tensor cores, for K and V of 16 bits: one KV head, whose values are the
// first 512 of the 576 dimensions of its keys, as in DeepSeek models. attention.cuh describes the
// terms. There are no windows, slopes, soft caps and sinks.
//
//     kernel                          x                        y         z           threads
//     attention_latent_<T>_<QUERIES>  tiles * blocks_per_tile  kv_heads  1           4 * QUERIES
//     attention_latent_merge          tiles                    kv_heads  any number  any number
//
// A tile has 128 queries, or in decode 64 of one row. A block processes QUERIES of them, with
// LatentShared in dynamic shared memory. In decode, long sequences are divided into parts as in
// attention.cu, and attention_latent_merge combines their results.
//
// The sums of 64 queries fill the registers of a multiprocessor, so each warp has 64 of their 512
// dimensions (in blocks of 32 queries, 128). Scores are divided by queries and tokens instead: a warp
// computes those of 16 queries and of half of the tokens. Their weights go to all warps through
// shared memory.
#include "attention.cuh"

#define LATENT_KEY_DIM 576
#define LATENT_VALUE_DIM 512
#define LATENT_DECODE_QUERIES 64 // of a tile in decode

// The shared memory of a block. Rows have an odd number of 16-byte chunks, so that eight consecutive
// rows are in different banks.
template <class T, u32 QUERIES> struct LatentShared {
    static constexpr u32 TOKENS = QUERIES / 2; // that a block processes at a time
    static constexpr u32 STAGES = QUERIES == 64 ? 2 : 3;
    static constexpr u32 PITCH = LATENT_KEY_DIM + 8, WEIGHT_PITCH = TOKENS + 8, SUM_PITCH = LATENT_VALUE_DIM + 8;
    typedef T Latents[TOKENS][PITCH];
    T queries[QUERIES][PITCH];
    Latents latents[STAGES];
    T weights[QUERIES][WEIGHT_PITCH];
    float maxima[2][QUERIES]; // of the scores of each half of the tokens
    float rescale[QUERIES];   // the factors of the sums before the weights are added
    float restore[QUERIES];   // narrow types only: the factors that restore the scale of the scores
    float weight[2][QUERIES], max_score[QUERIES]; // at the end: total weight of each half of the tokens
};

// Asynchronous copies of latents to shared memory, up to STAGES - 1 stages ahead. Eight threads copy
// a token.
template <class T, u32 QUERIES> struct LatentStream {
    typedef LatentShared<T, QUERIES> Shared;
    static constexpr u32 STAGES = Shared::STAGES, COPIERS = 8, IN_CHUNK = 16 / sizeof(T);
    Shared &shared;
    StoredHead head;
    u32 token, end; // the first token of the next copy, and the end of the valid ones
    u32 stage;      // next stage to consume
    u32 block;      // of this thread's token of the next copy

    __device__ __forceinline__ void begin() {
        find_block();
        for (u32 i = 0; i < STAGES - 1; i++) copy_next(i);
    }

    // Returns the next tokens.
    __device__ __forceinline__ const typename Shared::Latents &next() {
        copy_async_wait<STAGES - 2>();
        __syncthreads(); // all threads have copied, and have finished with the last stage, whose memory is reused
        copy_next(stage == 0 ? STAGES - 1 : stage - 1);
        const typename Shared::Latents &ready = shared.latents[stage];
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return ready;
    }

    // Commits even if no tokens are left, so that the number of groups to wait for is constant.
    __device__ __forceinline__ void copy_next(u32 to) {
        if (token < end) copy(shared.latents[to]);
        copy_async_commit();
    }

    // Tokens after the last one are zeroed: their memory might hold NaN, which remains NaN when
    // multiplied by 0.
    __device__ __forceinline__ void copy(typename Shared::Latents &to) {
        u32 at = token + threadIdx.x / COPIERS, dim = threadIdx.x % COPIERS * IN_CHUNK;
        const u8 *from = head.keys(block) + (head.slot(at) * LATENT_KEY_DIM + dim) * sizeof(T);
#pragma unroll
        for (u32 i = 0; i < LATENT_KEY_DIM; i += COPIERS * IN_CHUNK)
            copy_async_16(&to[threadIdx.x / COPIERS][dim + i], from + i * sizeof(T), at < end);
        token += Shared::TOKENS;
        find_block(); // before the next copy, which then does not wait for the table
    }

    __device__ __forceinline__ void find_block() { block = head.block(min(token + threadIdx.x / COPIERS, end - 1)); }
};

// The state of a warp. It computes scores of 16 queries and half of the tokens. In the layout of
// tensor core fragments, a lane holds parts of two of these queries: lane / 4 and lane / 4 + 8. The
// sums are those of all queries of the block, in some dimensions.
template <class T, u32 QUERIES> struct LatentWarp {
    typedef LatentShared<T, QUERIES> Shared;
    typedef typename Shared::Latents Latents;
    static constexpr u32 WARPS = QUERIES / 8, TOKENS = Shared::TOKENS / 2, PITCH = Shared::PITCH;
    static constexpr u32 DIMS = LATENT_VALUE_DIM / WARPS; // of the sums
    Shared &shared;
    float sums[QUERIES / 16][DIMS / 8][4]; // fragment d of mma
    float scores[TOKENS / 8][4];           // fragment d of mma, replaced by the weights
    float max_score[2], weight[2];         // the maximum score times log2(e); this lane's part of the weight
    u32 last[2];                           // last position that a query attends to
    u32 all_last;                          // last position that all queries of the block attend to
    u32 groups;                            // of 16 queries, in the block
    float power;                           // score * power is the log2 of the weight

    __device__ __forceinline__ explicit LatentWarp(Shared &shared) : shared(shared) {}

    __device__ __forceinline__ u32 first_query() const { return warp_in_block() / 2 * 16; }
    __device__ __forceinline__ u32 token_half() const { return warp_in_block() % 2; }
    __device__ __forceinline__ u32 own_query(u32 half) const { return first_query() + lane_in_warp() / 4 + 8 * half; }
    __device__ __forceinline__ bool has_scores() const { return first_query() < groups * 16; }

    // Starts with the `count` queries of a tile. Queries beyond the last one duplicate it.
    __device__ __forceinline__ void begin(const Attention &a, const AttentionTile &tile, u32 count) {
        u32 end = tile.first_query + count - 1;
        groups = div_ceil(count, 16);
        all_last = query_of(a, tile, tile.first_query).last;
        power = a.scale * LOG2_E;
        for (u32 number = warp_in_block(); number < groups * 16; number += WARPS)
            load(a, query_of(a, tile, min(tile.first_query + number, end)), number);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            last[half] = query_of(a, tile, min(tile.first_query + own_query(half), end)).last;
            max_score[half] = MINUS_INFINITY;
            weight[half] = 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < QUERIES / 16 * DIMS / 8 * 4; i++) sums[i / (DIMS / 2)][i / 4 % (DIMS / 8)][i % 4] = 0.0f;
    }

    // Rounds a query into shared memory.
    __device__ __forceinline__ void load(const Attention &a, Query query, u32 number) {
        const float *from = a.qkv + u64(query.row) * a.row_width + query.head * LATENT_KEY_DIM + lane_in_warp() * 2;
        float2 pairs[LATENT_KEY_DIM / 64];
#pragma unroll
        for (u32 i = 0; i < LATENT_KEY_DIM / 64; i++) pairs[i] = *reinterpret_cast<const float2 *>(from + i * 64);
        float factor = 1.0f;
        if constexpr (Factor<T>::NARROW) {
            float magnitude = 0.0f, restore;
#pragma unroll
            for (u32 i = 0; i < LATENT_KEY_DIM / 64; i++) magnitude = fmaxf(magnitude, fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)));
            narrowing_factor(warp_max(magnitude), factor, restore);
            shared.restore[number] = restore; // all lanes write the same value
        }
#pragma unroll
        for (u32 i = 0; i < LATENT_KEY_DIM / 64; i++)
            *reinterpret_cast<u32 *>(&shared.queries[number][i * 64 + lane_in_warp() * 2]) = pack2<T>(pairs[i].x * factor, pairs[i].y * factor);
    }

    __device__ __forceinline__ void attend(const Attention &a, const Latents &latents, u32 token) {
        if (has_scores()) multiply_keys(a, &latents[token_half() * TOKENS], token + token_half() * TOKENS);
        __syncthreads(); // the maxima are written
        if (has_scores()) update_softmax();
        __syncthreads(); // the weights are written
        add_values(latents);
    }

    // Computes the scores, and writes their maxima.
    __device__ __forceinline__ void multiply_keys(const Attention &a, const T (*keys)[PITCH] /* [TOKENS] */, u32 token) {
        const T *query_row = &shared.queries[first_query() + lane_in_warp() % 16][lane_in_warp() / 16 * 8];
        const T *key_row = &keys[lane_in_warp() % 8][lane_in_warp() / 8 * 8];
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) scores[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < LATENT_KEY_DIM; k += 32) {
            u32 left[4], right[4];
            ldmatrix_x4(left, query_row + k);
            ldmatrix_x4(right, query_row + k + 16);
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++) {
                u32 b[4];
                ldmatrix_x4(b, key_row + n * 8 * PITCH + k);
                u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
                mma_16816<T>(scores[n], left, low);
                mma_16816<T>(scores[n], right, high);
            }
        }
        if constexpr (Factor<T>::NARROW) restore_scale();
        if (token + TOKENS - 1 > all_last) mask_scores(scores, last, a.window, token);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float largest = MINUS_INFINITY;
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++) largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            shared.maxima[token_half()][own_query(half)] = query_max(largest); // the four lanes write the same value
        }
    }

    __device__ __forceinline__ void restore_scale() {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float restore = shared.restore[own_query(half)];
#pragma unroll
            for (u32 i = 0; i < TOKENS / 4; i++) scores[i / 2][2 * half + i % 2] *= restore;
        }
    }

    // Computes the weights relative to the maximum so far, and writes them. Both warps of a query
    // compute the same maximum.
    __device__ __forceinline__ void update_softmax() {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 query = own_query(half);
            float before = max_score[half], largest = fmaxf(shared.maxima[0][query], shared.maxima[1][query]);
            max_score[half] = fmaxf(before, largest * power);
            float base = max_score[half] == MINUS_INFINITY ? 0.0f : max_score[half]; // if all scores are -infinity, all weights are 0
            float rescale = exp2_of(before - base);
            weight[half] *= rescale;
            shared.rescale[query] = rescale; // all lanes of the query write the same value
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++) {
                float(&pair)[4] = scores[n];
#pragma unroll
                for (u32 i = 2 * half; i < 2 * half + 2; i++) {
                    pair[i] = exp2_of(fmaf(pair[i], power, -base));
                    weight[half] += pair[i];
                }
                T *to = &shared.weights[query][token_half() * TOKENS + score_column(n, 0)];
                *reinterpret_cast<u32 *>(to) = pack2<T>(pair[2 * half], pair[2 * half + 1]);
            }
        }
    }

    __device__ __forceinline__ void add_values(const Latents &latents) {
        u32 row = lane_in_warp() % 16, chunk = lane_in_warp() / 16 * 8;
        rescale_sums();
#pragma unroll
        for (u32 k = 0; k < Shared::TOKENS; k += 16) {
            u32 b[DIMS / 16][4];
#pragma unroll
            for (u32 n = 0; n < DIMS / 16; n++) ldmatrix_x4_transposed(b[n], &latents[k + row][warp_in_block() * DIMS + n * 16 + chunk]);
#pragma unroll
            for (u32 m = 0; m < QUERIES / 16; m++) {
                if (m >= groups) break;
                u32 weights[4];
                ldmatrix_x4(weights, &shared.weights[m * 16 + row][k + chunk]);
#pragma unroll
                for (u32 n = 0; n < DIMS / 16; n++) {
                    u32 left[2] = {b[n][0], b[n][1]}, right[2] = {b[n][2], b[n][3]};
                    mma_16816<T>(sums[m][2 * n], weights, left);
                    mma_16816<T>(sums[m][2 * n + 1], weights, right);
                }
            }
        }
    }

    // Multiplies sums whose maximum has changed. A factor of 1 would not change their bits.
    __device__ __forceinline__ void rescale_sums() {
#pragma unroll
        for (u32 m = 0; m < QUERIES / 16; m++) {
            if (m >= groups) break;
            const float *factors = &shared.rescale[m * 16 + lane_in_warp() / 4];
            float factor[2] = {factors[0], factors[8]};
            if (!__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) continue;
#pragma unroll
            for (u32 i = 0; i < DIMS / 2; i++) sums[m][i / 4][i % 4] *= factor[i % 4 / 2];
        }
    }

    // Writes the results to shared memory. All warps have finished with queries and latents, whose
    // memory they reuse.
    __device__ __forceinline__ void put(float (*to)[Shared::SUM_PITCH] /* [QUERIES] */) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float total = query_sum(weight[half]);
            if (!has_scores()) continue;
            shared.weight[token_half()][own_query(half)] = total; // the four lanes write the same value
            shared.max_score[own_query(half)] = max_score[half];
        }
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8 * DIMS / 8; i++) {
            u32 m = i / (DIMS / 8) / 2, half = i / (DIMS / 8) % 2, n = i % (DIMS / 8);
            float *two = &to[m * 16 + lane_in_warp() / 4 + 8 * half][warp_in_block() * DIMS + n * 8 + lane_in_warp() % 4 * 2];
            *reinterpret_cast<float2 *>(two) = make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
        }
    }
};

// Returns the offset of a query's partial result: sums, maximum score and weight.
__device__ __forceinline__ u64 latent_partial(u32 index, u32 kv_heads, u32 group, u32 query) {
    return ((u64(index) * kv_heads + blockIdx.y) * min(u32(LATENT_DECODE_QUERIES), group) + query) * (LATENT_VALUE_DIM + 2);
}

// Writes `out` if there is one part, and otherwise this block's part of `partial`. `first` is the
// first of the block's `count` queries in its tile. Adding 0 normalizes -0, whose sign would depend on
// tokens that the query does not attend to.
template <class T, u32 QUERIES>
__device__ __forceinline__ void write_latents(const Attention &a, const AttentionTile &tile, const LatentShared<T, QUERIES> &shared,
                                              const float (*sums)[LatentShared<T, QUERIES>::SUM_PITCH] /* [QUERIES] */, u32 first, u32 count,
                                              float *partial /* layout: see attention_latent_merge */) {
    bool whole = tile.parts <= 1;
    Rows rows = whole ? a.out : Rows{partial, DTYPE_F32};
    for (u32 number = warp_in_block(); number < count; number += blockDim.x / WARP) {
        Query query = query_of(a, tile, tile.first_query + number);
        float weight = shared.weight[0][number] + shared.weight[1][number], factor = whole ? 1.0f / weight : 1.0f;
        u64 to = whole ? (u64(query.row) * a.heads + query.head) * LATENT_VALUE_DIM : latent_partial(tile.partial + tile.part, a.kv_heads, a.group(), first + number);
        for (u32 dim = lane_in_warp() * 2; dim < LATENT_VALUE_DIM; dim += 2 * WARP) {
            float2 two = *reinterpret_cast<const float2 *>(&sums[number][dim]);
            rows.put_2(to + dim, make_float2(two.x * factor + 0.0f, two.y * factor + 0.0f));
        }
        if (!whole && lane_in_warp() == 0) rows.put_2(to + LATENT_VALUE_DIM, make_float2(shared.max_score[number], weight));
    }
}

template <class T, u32 QUERIES> __device__ __forceinline__ void attend_latents(const Attention &a, u32 blocks_per_tile, float *partial) {
    typedef LatentShared<T, QUERIES> Shared;
    DYNAMIC_SHARED(Shared, shared);
    // Tiles with the longest context are last in a sequence and start first, which balances the load
    // at the end.
    u32 block = gridDim.x - 1 - blockIdx.x, first = block % blocks_per_tile * QUERIES;
    AttentionTile tile = a.tiles[block / blocks_per_tile];
    tile.first_query += first;
    u32 count = query_count(tile, a.group(), QUERIES);
    if (count == 0) return;
    u32 token = 0, end = query_of(a, tile, tile.first_query + count - 1).last + 1;
    if (tile.parts > 1) token = tile.part * tile.part_len, end = min(end, token + tile.part_len);
    StoredHead head = stored_head(a, tile, token_bytes<T>(LATENT_KEY_DIM));
    LatentStream<T, QUERIES> stream = {*shared, head, token, end, 0, 0};
    stream.begin();
    LatentWarp<T, QUERIES> warp(*shared);
    warp.begin(a, tile, count);
    for (; token < end; token += Shared::TOKENS) warp.attend(a, stream.next(), token);
    __syncthreads(); // all warps have finished with queries and latents
    static_assert(sizeof(float[QUERIES][Shared::SUM_PITCH]) <= offsetof(Shared, weights), "the sums fit into their memory");
    float(*sums)[Shared::SUM_PITCH] = reinterpret_cast<float(*)[Shared::SUM_PITCH]>(shared);
    warp.put(sums);
    __syncthreads();
    write_latents<T, QUERIES>(a, tile, *shared, sums, first, count, partial);
}

// out = the combination of all parts. If there is one part, attention_latent has written the result.
extern "C" __global__ void attention_latent_merge(void *out /* [rows, heads, 512] in `dtype` */,
                                                  const float *partial /* [partial results, kv_heads, min(64, group), 514] */,
                                                  const AttentionTile *tiles /* [tiles] */, u32 heads, u32 kv_heads, u32 dtype) {
    start_next_kernel();
    wait_for_previous_kernel();
    AttentionTile tile = tiles[blockIdx.x];
    if (tile.parts <= 1 || tile.part > 0) return;
    u32 group = heads / kv_heads, count = query_count(tile, group, LATENT_DECODE_QUERIES);
    for (u32 query = blockIdx.z; query < count; query += gridDim.z) {
        u64 to = (u64(tile.first_row) * heads + blockIdx.y * group + tile.first_query + query) * LATENT_VALUE_DIM;
        for (u32 i = threadIdx.x; i < LATENT_VALUE_DIM; i += blockDim.x) {
            PartialSoftmax result = initial_softmax(nullptr, 0);
            for (u32 nth = 0; nth < tile.parts; nth++) {
                const float *part = partial + latent_partial(tile.partial + nth, kv_heads, group, query);
                result.add({part[LATENT_VALUE_DIM], part[LATENT_VALUE_DIM + 1], part[i]});
            }
            Rows{out, dtype}.put(to + i, result.sum / result.weight);
        }
    }
}

// ---- kernel definitions

#define ATTENTION_LATENT(name, T, QUERIES)                                                                                         \
    extern "C" __global__ void __launch_bounds__(LatentWarp<T, QUERIES>::WARPS *WARP, 1) attention_latent_##name##_##QUERIES(      \
        ATTENTION_POINTERS, u32 blocks_per_tile, ATTENTION_SCALARS, float *partial /* layout: see attention_latent_merge */) {     \
        wait_for_previous_kernel();                                                                                                \
        attend_latents<T, QUERIES>(ATTENTION_OF(LATENT_KEY_DIM, LATENT_VALUE_DIM, blockIdx.y), blocks_per_tile, partial);          \
    }

ATTENTION_LATENT(bf16, bf16, 64)
ATTENTION_LATENT(bf16, bf16, 32)
ATTENTION_LATENT(f16, f16, 64)
ATTENTION_LATENT(f16, f16, 32)
