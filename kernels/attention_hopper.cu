// Prefill attention for Hopper: K and V in 16 bits, heads of 64 and 128. attention.cuh describes the
// terms.
//
// attention_wgmma_<T>_<DIM>: the grid is (tiles * kv_heads), with tiles of 128 queries. It has 384
// threads and HOPPER_SHARED bytes of dynamic shared memory. The kernels exist only in code for
// sm_90a.
//
// After the common parameters follow a tensor map of the layer's KV cache, [block][K, V and
// kv_head][token][dim], and the tokens of its boxes. If they are 0, the kernel does not read the map.
//
// One warpgroup copies K and V to shared memory, HOPPER_CHUNK tokens at a time. Two warpgroups
// compute 64 queries each. A warpgroup's tensor core products and its softmax overlap: the products
// of a chunk are in progress while the softmax of the next one is computed. Furthermore, the
// warpgroups take turns, so that one computes its softmax while the tensor cores work for the other.
#include "attention.cuh"
#include "hopper.cuh"

#define HOPPER_QUERIES 128
#define HOPPER_WARPS 8 // that compute
#define HOPPER_THREADS ((HOPPER_WARPS + 4) * WARP)

// Numbers of named barriers.
#define QUERIES_READY 1 // plus the index of the warpgroup
#define TURN 3          // plus the index of the warpgroup

#define HOPPER_CHUNK 128u     // tokens that are copied and multiplied at a time
#define HOPPER_STAGES 2u      // chunks in shared memory
#define HOPPER_TOLERANCE 8.0f // the maximum score is updated if it would grow by more than this, as a log2

// The shared memory of a block. K, V and queries are matrices in panels.
template <u32 DIM> struct HopperShared {
    static constexpr u32 PANELS = DIM / PANEL;
    u16 queries[2][PANELS][64][PANEL];
    u16 keys[HOPPER_STAGES][PANELS][HOPPER_CHUNK][PANEL];
    u16 values[HOPPER_STAGES][PANELS][HOPPER_CHUNK][PANEL];
    PhaseBarrier keys_full[HOPPER_STAGES], values_full[HOPPER_STAGES];   // arrivals: the threads that copy
    PhaseBarrier keys_empty[HOPPER_STAGES], values_empty[HOPPER_STAGES]; // arrivals: the warps that compute
    float restore[HOPPER_QUERIES];                                     // narrow types only: see WarpgroupQueries

    // Dynamic shared memory is aligned to 16 bytes only.
    static constexpr u32 ALIGNMENT = 8 * PANEL_ROW_BYTES;
    static __device__ __forceinline__ HopperShared &get() {
        DYNAMIC_SHARED(u8, memory);
        return *reinterpret_cast<HopperShared *>(memory + (0u - shared_address(memory)) % ALIGNMENT);
    }

    __device__ __forceinline__ void begin_barriers() {
        for (u32 i = 0; i < HOPPER_STAGES; i++) {
            barrier_begin(keys_full[i], WARPGROUP);
            barrier_begin(values_full[i], WARPGROUP);
            barrier_begin(keys_empty[i], HOPPER_WARPS);
            barrier_begin(values_empty[i], HOPPER_WARPS);
        }
        fence_barriers();
    }
};

#define HOPPER_SHARED(DIM) (sizeof(HopperShared<DIM>) + HopperShared<DIM>::ALIGNMENT)

// The next stage to fill or to read, and the parity of its phase.
struct StageCursor {
    u32 stage, parity;

    __device__ __forceinline__ void advance() {
        stage = stage + 1 == HOPPER_STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// The tokens of a tile. Those that no query attends to are zeroed: their memory might hold NaN,
// which remains NaN when multiplied by 0.
struct TokenRange {
    u32 first, end;
    __device__ __forceinline__ bool contains(u32 token) const { return token - first < end - first; }
    __device__ __forceinline__ u32 nearest(u32 token) const { return min(max(token, first), end - 1); }
};

// ---- copying K and V

// A warp of the warpgroup that copies. It copies 32 tokens of each chunk. Each lane looks up the place of
// one of them: its block for BOXES, or the address of its keys.
template <u32 DIM, bool BOXES> struct HopperCopier {
    static constexpr u32 PANELS = DIM / PANEL, LANES = DIM / 8; // lanes per token
    typedef u16 Matrix[PANELS][HOPPER_CHUNK][PANEL];
    StoredHead head;
    const TensorMap &map;
    u32 box_tokens, kv_head, kv_heads;
    TokenRange range;
    u32 first_row; // of this warp in a chunk

    __device__ __forceinline__ void run(HopperShared<DIM> &shared, u32 token) {
        StageCursor keys = {0, 1}, values = {0, 1};
        u64 now = place_of(token), next = place_of(token + HOPPER_CHUNK);
        copy(shared.keys, shared.keys_full, shared.keys_empty, keys, false, now, token);
        for (; token < range.end; token += HOPPER_CHUNK) {
            u64 later = place_of(token + 2 * HOPPER_CHUNK); // looked up now, so that its latency overlaps
            if (token + HOPPER_CHUNK < range.end) copy(shared.keys, shared.keys_full, shared.keys_empty, keys, false, next, token + HOPPER_CHUNK);
            copy(shared.values, shared.values_full, shared.values_empty, values, true, now, token);
            now = next, next = later;
        }
    }

    // Returns the place of this lane's token.
    __device__ __forceinline__ u64 place_of(u32 token) const {
        u32 block = head.block(own_token(token));
        return BOXES ? block : keys_of(block, token);
    }
    __device__ __forceinline__ u64 keys_of(u32 block, u32 token) const {
        return reinterpret_cast<u64>(head.keys(block)) + head.slot(own_token(token)) * DIM * sizeof(u16);
    }
    __device__ __forceinline__ u32 own_token(u32 token) const { return range.nearest(token + first_row + lane_in_warp()); }

    // Copies a chunk of K, or of V. Boxes have no zeros for tokens that no query attends to, so chunks that
    // contain such tokens are copied token by token.
    __device__ __forceinline__ void copy(Matrix (&stages)[HOPPER_STAGES], PhaseBarrier (&full)[HOPPER_STAGES],
                                         PhaseBarrier (&empty)[HOPPER_STAGES], StageCursor &cursor, bool values, u64 place, u32 token) const {
        barrier_wait(empty[cursor.stage], cursor.parity);
        Matrix &to = stages[cursor.stage];
        bool whole = range.contains(token) && range.contains(token + HOPPER_CHUNK - 1);
        if (BOXES && whole) copy_boxes(to, full[cursor.stage], values, u32(place), token);
        else copy_tokens(to, full[cursor.stage], (BOXES ? keys_of(u32(place), token) : place) + values * head.values_offset, token);
        cursor.advance();
    }

    // The first lanes of a box's tokens copy a panel each.
    __device__ __forceinline__ void copy_boxes(Matrix &to, PhaseBarrier &full, bool values, u32 block, u32 token) const {
        u32 panel = lane_in_warp() % box_tokens, row = lane_in_warp() - panel;
        if (panel >= PANELS) return barrier_arrive(full);
        barrier_arrive_and_expect(full, box_tokens * PANEL_ROW_BYTES);
        copy_box(to[panel][first_row + row], map, panel * PANEL, head.slot(token + first_row + row), values * kv_heads + kv_head, block, full);
    }

    // `from` is the address of this lane's token.
    __device__ __forceinline__ void copy_tokens(Matrix &to, PhaseBarrier &full, u64 from, u32 token) const {
        constexpr u32 AT_ONCE = WARP / LANES; // tokens
        u32 own = lane_in_warp() / LANES, chunk = lane_in_warp() % LANES;
        u8 *panel = reinterpret_cast<u8 *>(to[chunk / 8]);
        u32 offset = panel_offset(first_row + own, chunk % 8);
        token += first_row + own;
#pragma unroll 4
        for (u32 i = 0; i < WARP; i += AT_ONCE) {
            const u8 *of_token = reinterpret_cast<const u8 *>(__shfl_sync(ALL_LANES, from, i + own));
            // Rows that differ by i have their chunks swizzled differently: own + i has the bits of both.
            copy_async_16(panel + ((offset + i * PANEL_ROW_BYTES) ^ i % 8 * 16), of_token + chunk * 16, range.contains(token + i));
        }
        barrier_arrive_after_copies(full);
    }
};

// ---- queries

// The state of a warpgroup's 64 queries while it iterates over K and V. In the layout of tensor core
// fragments, a lane holds parts of two queries of its warp: lane / 4 and lane / 4 + 8.
template <class T, u32 DIM, bool ADJUSTS> struct WarpgroupQueries {
    static constexpr u32 LANES = DIM / 8; // lanes per query that is read
    typedef HopperShared<DIM> Shared;
    float sums[DIM / 8][4];
    float max_score[2], weight[2]; // the maximum score times log2(e); this lane's part of the weight
    float rescale[2];              // the factor of the sums after the last chunk
    float factor[2];               // the factor of products
    float slope[2];
    float power;             // score * power is the log2 of the weight
    u32 last[2];             // last position that a query attends to
    u32 all_first, all_last; // positions that all queries of the warp attend to

    // Writes queries `number` and later to shared memory. Queries beyond `end` duplicate the last one.
    // In narrow types, each query is multiplied by a power of two that brings its largest magnitude to
    // between 1 and 2; `restore` is the inverse.
    static __device__ __forceinline__ void store(const Attention &a, const AttentionTile &tile, u16 (&to)[DIM / PANEL][64][PANEL],
                                                 float *restore /* [64] */, u32 number, u32 end) {
        u32 lane = threadIdx.x % LANES;
#pragma unroll
        for (u32 i = 0; i < 64; i += WARPGROUP / LANES) {
            u32 row = i + threadIdx.x % WARPGROUP / LANES;
            Query query = query_of(a, tile, min(number + row, end - 1));
            const float4 *from = reinterpret_cast<const float4 *>(a.qkv + u64(query.row) * a.row_width + query.head * DIM + lane * 8);
            float4 low = from[0], high = from[1];
            float scale = 1.0f;
            if constexpr (Factor<T>::NARROW) scale = narrow(low, high, restore[row]);
            uint4 packed = {pack2<T>(low.x * scale, low.y * scale), pack2<T>(low.z * scale, low.w * scale),
                            pack2<T>(high.x * scale, high.y * scale), pack2<T>(high.z * scale, high.w * scale)};
            *reinterpret_cast<uint4 *>(reinterpret_cast<u8 *>(to[lane / 8]) + panel_offset(row, lane % 8)) = packed;
        }
    }

    // Returns the factor of a query, of which this lane has eight numbers. Both the factor and its
    // inverse are within the range of f32.
    static __device__ __forceinline__ float narrow(float4 low, float4 high, float &restore) {
        float magnitude = fmaxf(fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(low.z), fabsf(low.w))),
                                fmaxf(fmaxf(fabsf(high.x), fabsf(high.y)), fmaxf(fabsf(high.z), fabsf(high.w))));
#pragma unroll
        for (u32 step = 1; step < LANES; step *= 2) magnitude = fmaxf(magnitude, __shfl_xor_sync(ALL_LANES, magnitude, step));
        float factor;
        narrowing_factor(magnitude, factor, restore); // all lanes of the query write the same value
        return factor;
    }

    // Starts with this warp's queries: `number` and later.
    __device__ __forceinline__ void begin(const Attention &a, const AttentionTile &tile, const float *restore /* [16] */, u32 number, u32 end) {
        all_first = query_of(a, tile, min(number + 15, end - 1)).first;
        all_last = query_of(a, tile, min(number, end - 1)).last;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 nth = lane_in_warp() / 4 + 8 * half;
            Query query = query_of(a, tile, min(number + nth, end - 1));
            last[half] = query.last;
            slope[half] = ADJUSTS && a.slopes ? a.slopes[query.head] : 0.0f;
            PartialSoftmax none = initial_softmax(a.sinks, query.head);
            max_score[half] = none.max_score;
            weight[half] = lane_in_warp() % 4 == 0 ? none.weight : 0.0f;
            factor[half] = Factor<T>::NARROW ? a.scale * restore[nth] : a.scale;
            if (!ADJUSTS) factor[half] *= LOG2_E;
        }
#pragma unroll
        for (u32 i = 0; i < DIM / 8 * 4; i++) sums[i / 4][i % 4] = 0.0f;
    }

    static __device__ __forceinline__ void multiply_keys(float (&scores)[HOPPER_CHUNK / 8][4], const u16 (&queries)[DIM / PANEL][64][PANEL],
                                                         const u16 (&keys)[DIM / PANEL][HOPPER_CHUNK][PANEL]) {
        MatrixDescriptor a(queries, 0), b(keys, 0);
        products_begin();
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k++) {
            u32 panel = k / 4, in_panel = k % 4 * 32;
            multiply_64<T, HOPPER_CHUNK>(scores, a.at(panel * sizeof(queries[0]) + in_panel), b.at(panel * sizeof(keys[0]) + in_panel), k > 0);
        }
        products_commit();
    }

    __device__ __forceinline__ void add_values(const u32 (&weights)[HOPPER_CHUNK / 16][4], const u16 (&values)[DIM / PANEL][HOPPER_CHUNK][PANEL]) {
        MatrixDescriptor b(values, sizeof(values[0]));
        products_begin();
#pragma unroll
        for (u32 k = 0; k < HOPPER_CHUNK / 16; k++) add_product_64<T, DIM>(sums, weights[k], b.at(k * 16 * PANEL_ROW_BYTES));
        products_commit();
    }

    // Replaces products of queries and keys by weights.
    __device__ __forceinline__ void weigh(float (&scores)[HOPPER_CHUNK / 8][4], const Attention &a, u32 token) {
        if constexpr (ADJUSTS) adjust(scores, a, token);
        if (token < all_first || token + HOPPER_CHUNK - 1 > all_last) mask_scores(scores, last, a.window, token);
#pragma unroll
        for (u32 half = 0; half < 2; half++) update_softmax(scores, half);
    }

    __device__ __forceinline__ void adjust(float (&scores)[HOPPER_CHUNK / 8][4], const Attention &a, u32 token) {
#pragma unroll
        for (u32 n = 0; n < HOPPER_CHUNK / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                float score = fmaf(-slope[i / 2], float(int(last[i / 2] - (token + score_column(n, i)))), scores[n][i] * factor[i / 2]);
                scores[n][i] = a.soft_cap > 0.0f ? capped(score, a.soft_cap) : score;
            }
        }
    }

    // Returns soft_cap * tanh(score / soft_cap), with an error relative to soft_cap.
    static __device__ __forceinline__ float capped(float score, float soft_cap) {
        float power = exp2_of(score * (2.0f * LOG2_E / soft_cap));
        return soft_cap - __fdividef(2.0f * soft_cap, power + 1.0f);
    }

    // Replaces a query's scores by weights relative to a maximum score. The maximum is updated only if
    // it would grow by more than HOPPER_TOLERANCE, because each update costs a multiplication of all sums.
    // Weights are then at most 2^HOPPER_TOLERANCE.
    __device__ __forceinline__ void update_softmax(float (&scores)[HOPPER_CHUNK / 8][4], u32 half) {
        const float power = ADJUSTS ? LOG2_E : factor[half];
        float before = max_score[half], chunk_max = MINUS_INFINITY;
#pragma unroll
        for (u32 n = 0; n < HOPPER_CHUNK / 8; n++) chunk_max = fmaxf(chunk_max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        chunk_max = query_max(chunk_max) * power;
        if (chunk_max > before + HOPPER_TOLERANCE) max_score[half] = chunk_max;
        float base = max_score[half] == MINUS_INFINITY ? 0.0f : max_score[half]; // if no token has been visible yet, all weights are 0
        rescale[half] = exp2_of(before - base);
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < HOPPER_CHUNK / 4; i++) {
            float &score = scores[i / 2][2 * half + i % 2];
            score = exp2_of(fmaf(score, power, -base));
            sum += score;
        }
        weight[half] = fmaf(weight[half], rescale[half], sum);
    }

    // Multiplies the sums after an update of the maximum score. Multiplications by 1 are skipped.
    __device__ __forceinline__ void rescale_sums() {
        if (!__any_sync(ALL_LANES, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
        for (u32 i = 0; i < DIM / 8 * 4; i++) sums[i / 4][i % 4] *= rescale[i % 4 / 2];
    }

    static __device__ __forceinline__ void pack(u32 (&weights)[HOPPER_CHUNK / 16][4], const float (&scores)[HOPPER_CHUNK / 8][4]) {
#pragma unroll
        for (u32 i = 0; i < HOPPER_CHUNK / 4; i++) weights[i / 4][i % 4] = pack2<T>(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
    }

    // Writes the results. Adding 0 normalizes -0, whose sign would depend on tokens outside the window.
    __device__ __forceinline__ void write(const Attention &a, const AttentionTile &tile, u32 number, u32 end) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float total = query_sum(weight[half]);
            u32 own = number + lane_in_warp() / 4 + 8 * half;
            if (own >= end) continue;
            Query query = query_of(a, tile, own);
            u64 to = (u64(query.row) * a.heads + query.head) * DIM + lane_in_warp() % 4 * 2;
            float inverse = 1.0f / total;
#pragma unroll
            for (u32 n = 0; n < DIM / 8; n++)
                a.out.put_2(to + n * 8, make_float2(fmaf(sums[n][2 * half], inverse, 0.0f), fmaf(sums[n][2 * half + 1], inverse, 0.0f)));
        }
    }
};

// ---- the main loop

// The warpgroups that compute take turns in issuing products.
struct Turns {
    u32 warpgroup; // 0 or 1

    __device__ __forceinline__ void begin() const {
        if (warpgroup == 1) end();
    }
    __device__ __forceinline__ void wait() const {
        named_barrier_wait(TURN + warpgroup, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void end() const {
        named_barrier_arrive(TURN + 1 - warpgroup, 2 * WARPGROUP);
    }
};

// Waits for a stage.
__device__ __forceinline__ void wait_full(PhaseBarrier (&full)[HOPPER_STAGES], StageCursor cursor) {
    barrier_wait(full[cursor.stage], cursor.parity);
    fence_shared_for_tensor_cores();
}

// Returns a stage that this warp's products have read.
__device__ __forceinline__ void release(PhaseBarrier (&empty)[HOPPER_STAGES], StageCursor &cursor) {
    if (lane_in_warp() == 0) barrier_arrive(empty[cursor.stage]);
    cursor.advance();
}

// Computes 64 queries, from the tile's query 64 * warpgroup on.
template <class T, u32 DIM, bool ADJUSTS>
__device__ __forceinline__ void attend_hopper_queries(const Attention &a, const AttentionTile &tile, TokenRange range, u32 token, u32 warpgroup) {
    typedef WarpgroupQueries<T, DIM, ADJUSTS> Queries;
    HopperShared<DIM> &shared = HopperShared<DIM>::get();
    u32 end = tile.first_query + query_count(tile, a.group(), HOPPER_QUERIES);
    u32 number = tile.first_query + warpgroup * 64, of_warp = warp_in_block() % 4 * 16;
    Queries::store(a, tile, shared.queries[warpgroup], shared.restore + warpgroup * 64, number, end);
    fence_shared_for_tensor_cores();
    named_barrier_wait(QUERIES_READY + warpgroup, WARPGROUP);

    Queries queries;
    queries.begin(a, tile, shared.restore + warpgroup * 64 + of_warp, number + of_warp, end);
    float scores[HOPPER_CHUNK / 8][4];
    u32 weights[HOPPER_CHUNK / 16][4];
    StageCursor keys = {0, 0}, values = {0, 0};
    Turns turns = {warpgroup};
    const u16(&stored)[DIM / PANEL][64][PANEL] = shared.queries[warpgroup];

    turns.begin();
    wait_full(shared.keys_full, keys);
    Queries::multiply_keys(scores, stored, shared.keys[keys.stage]);
    products_wait<0>();
    pin(scores);
    release(shared.keys_empty, keys);
    queries.weigh(scores, a, token);
    Queries::pack(weights, scores);
    for (token += HOPPER_CHUNK; token < range.end; token += HOPPER_CHUNK) {
        wait_full(shared.keys_full, keys);
        turns.wait();
        Queries::multiply_keys(scores, stored, shared.keys[keys.stage]);
        wait_full(shared.values_full, values);
        queries.add_values(weights, shared.values[values.stage]);
        turns.end();
        products_wait<1>();
        pin(scores);
        release(shared.keys_empty, keys);
        queries.weigh(scores, a, token);
        pin(scores);
        products_wait<0>();
        pin(queries.sums), pin(scores), pin(weights);
        release(shared.values_empty, values);
        queries.rescale_sums();
        Queries::pack(weights, scores);
    }
    wait_full(shared.values_full, values);
    queries.add_values(weights, shared.values[values.stage]);
    products_wait<0>();
    pin(queries.sums);
    queries.write(a, tile, number + of_warp, end);
}

// The KV head and the tile of a thread block. Blocks of one tile follow each other. Tiles with the
// longest context are last in a sequence and start first, which balances the load at the end.
__device__ __forceinline__ u32 hopper_kv_head(u32 kv_heads) { return blockIdx.x % kv_heads; }
__device__ __forceinline__ AttentionTile hopper_tile(const Attention &a) { return a.tiles[(gridDim.x - 1 - blockIdx.x) / a.kv_heads]; }

template <class T, u32 DIM>
__device__ __forceinline__ void attend_hopper(const Attention &a, const AttentionTile &tile, const TensorMap &map, u32 box_tokens) {
    HopperShared<DIM> &shared = HopperShared<DIM>::get();
    u32 count = query_count(tile, a.group(), HOPPER_QUERIES), warpgroup = warpgroup_in_block();
    if (count == 0) return;
    TokenRange range = {query_of(a, tile, tile.first_query).first, query_of(a, tile, tile.first_query + count - 1).last + 1};
    u32 token = range.first / HOPPER_CHUNK * HOPPER_CHUNK;
    if (threadIdx.x == 0) shared.begin_barriers();
    __syncthreads();
    if (warpgroup == 0) {
        give_registers<40>();
        StoredHead head = stored_head(a, tile, DIM * sizeof(u16));
        u32 first_row = warp_in_block() * WARP;
        if (box_tokens > 0) HopperCopier<DIM, true>{head, map, box_tokens, a.kv_head, a.kv_heads, range, first_row}.run(shared, token);
        else HopperCopier<DIM, false>{head, map, 0, a.kv_head, a.kv_heads, range, first_row}.run(shared, token);
    } else {
        take_registers<232>();
        if (a.slopes || a.soft_cap > 0.0f) attend_hopper_queries<T, DIM, true>(a, tile, range, token, warpgroup - 1);
        else attend_hopper_queries<T, DIM, false>(a, tile, range, token, warpgroup - 1);
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define ATTENTION_ON_HOPPER(name, T, DIM)                                                                                       \
    extern "C" __global__ void __launch_bounds__(HOPPER_THREADS, 1) attention_wgmma_##name##_##DIM(                              \
        ATTENTION_POINTERS, ATTENTION_SCALARS, const __grid_constant__ TensorMap map, u32 box_tokens) {                         \
        if (box_tokens > 0 && threadIdx.x == 0) prefetch_map(map);                                                              \
        wait_for_previous_kernel();                                                                                             \
        Attention attention = ATTENTION_OF(DIM, DIM, hopper_kv_head(kv_heads));                                                 \
        attend_hopper<T, DIM>(attention, hopper_tile(attention), map, box_tokens);                                              \
    }
ATTENTION_ON_HOPPER(bf16, bf16, 64)
ATTENTION_ON_HOPPER(bf16, bf16, 128)
ATTENTION_ON_HOPPER(f16, f16, 64)
ATTENTION_ON_HOPPER(f16, f16, 128)
#endif
