// Attention on tensor cores with mma.sync, for K and V of 8 and 16 bits. attention.cuh describes the
// terms.
//
// In decode, long sequences are divided into parts, each a tile with its own range of tokens. The
// last block of a sequence and KV head merges their results. Decode also rotates and stores the rows
// of its step if store_kv has not done so (attention_decode.cuh). Grids are (x, kv_heads, 1):
//
//     kernel                       x          a tile's queries  threads
//     attention_prefill_<T>_<DIM>  2 * tiles  128               128
//     attention_decode_<T>_<DIM>   tiles      16, of one row    32 * DECODE_WARPS
//
// Prefill needs PREFILL_STAGES * STAGE_BYTES of dynamic shared memory, or 2 * TOKENS * (3 * DIM + 8)
// bytes in int8 and fp8. Decode needs DECODE_STAGES * STAGE_BYTES, and 16 KiB more of static shared
// memory for DIM 256 in int8 and fp8.
#include "attention_decode.cuh"

#define PREFILL_QUERIES 64 // half a tile
#define PREFILL_WARPS 4
#define PREFILL_STAGES 2

// K and V in shared memory, in their storage format: the numbers of both, followed by the scales of
// both if the type has scales.
template <class T, u32 DIM> struct AttentionShared {
    static constexpr u32 TOKENS = DIM <= 128 ? 64 : 32; // tokens that a thread block reads at a time
    static constexpr u32 CHUNKS = DIM * sizeof(T) / 16; // 16-byte chunks per row, the unit of copying
    static constexpr u32 PITCH = (CHUNKS | 1) * 16 / sizeof(T); // an odd number of chunks, so that eight consecutive rows are in different banks
    static constexpr u32 TOKEN_BYTES = PITCH * sizeof(T) + (Factor<T>::SCALED ? sizeof(float) : 0);
    static constexpr u32 STAGE_BYTES = 2 * TOKENS * TOKEN_BYTES;
    // Thread blocks per multiprocessor for launch bounds; 0: the compiler decides. For these widths
    // the compiler would choose two blocks because of a few registers, where three are possible. In
    // f16 and the 8-bit types, scaled queries need too many registers for three.
    static constexpr u32 PREFILL_BLOCKS = DIM == 112 || DIM == 128 ? (Factor<T>::NARROW || Factor<T>::SCALED ? 2 : 3) : 0;
    // Decode is bound by memory bandwidth, which is 4.8 TB/s on an H200. With 132 multiprocessors
    // and a latency of 1 us, 36 KiB must be in flight per multiprocessor at all times. A thread
    // block has up to 72 KiB in flight, and two or three blocks share a multiprocessor.
    static constexpr u32 DECODE_STAGES = 72 * 1024 / STAGE_BYTES;
    static constexpr u32 DECODE_WARPS = TOKENS / 16;
};

// Asynchronous copies of K and V to shared memory. The threads of a warp or of a block copy TOKENS
// tokens at a time, up to STAGES stages ahead.
template <class T, u32 DIM, u32 TOKENS, u32 THREADS, u32 STAGES, u32 PITCH = AttentionShared<T, DIM>::PITCH> struct KvStream {
    typedef AttentionShared<T, DIM> Shared;
    static constexpr u32 CHUNKS = Shared::CHUNKS, STAGE = Shared::STAGE_BYTES / sizeof(T);
    static constexpr u32 IN_CHUNK = 16 / sizeof(T);
    T *stages; // [STAGES], at distances of STAGE; each [(K, V), TOKENS, PITCH], followed by the scales, if any: [(K, V), TOKENS]
    StoredHead head;
    u32 first, end;  // range of valid tokens
    u32 token, step; // first token of the next copy, and the distance to the copy after it
    u32 stage;       // next stage to consume

    __device__ __forceinline__ void begin() {
        stage = 0;
        for (u32 i = 0; i < STAGES - 1; i++) copy_next(i);
    }

    // Returns K of the next tokens. V follows K.
    __device__ __forceinline__ T *next() {
        synchronize(); // all threads have finished with the last stage, whose memory is reused
        copy_next(stage == 0 ? STAGES - 1 : stage - 1);
        copy_async_wait<STAGES - 1>();
        synchronize(); // all threads have copied
        T *ready = stages + stage * STAGE;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return ready;
    }

    // Commits even if no tokens are left, so that the number of groups to wait for is constant.
    __device__ __forceinline__ void copy_next(u32 to) {
        if (token < end) copy(stages + to * STAGE);
        copy_async_commit();
        token += step;
    }

    static __device__ __forceinline__ void synchronize() {
        if constexpr (THREADS == WARP) __syncwarp();
        else __syncthreads();
    }

    // Copies tokens to a stage. Tokens outside the range are zeroed: their memory might hold NaN,
    // which remains NaN when multiplied by 0.
    __device__ __forceinline__ void copy(T *to) const {
        constexpr u32 COUNT = div_ceil(TOKENS * CHUNKS, THREADS);
        u32 blocks[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) { // looked up before any copy, so that the lookups overlap
            u32 wanted = token + (threadIdx.x % THREADS + i * THREADS) / CHUNKS;
            blocks[i] = head.block(min(max(wanted, first), end - 1));
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 n = threadIdx.x % THREADS + i * THREADS, at = token + n / CHUNKS;
            if (TOKENS * CHUNKS % THREADS != 0 && n >= TOKENS * CHUNKS) break;
            const u8 *keys = head.keys(blocks[i]) + (head.slot(at) * DIM + n % CHUNKS * IN_CHUNK) * sizeof(T);
            T *row = to + n / CHUNKS * PITCH + n % CHUNKS * IN_CHUNK;
            copy_async_16(row, keys, first <= at && at < end);
            copy_async_16(row + TOKENS * PITCH, keys + head.values_offset, first <= at && at < end);
        }
        if constexpr (Factor<T>::SCALED) copy_scales(reinterpret_cast<float *>(to + 2 * TOKENS * PITCH));
    }

    __device__ __forceinline__ void copy_scales(float *to /* [(K, V), TOKENS] */) const {
        u32 n = threadIdx.x % THREADS, at = token + n;
        if (n >= TOKENS) return;
        const u8 *keys = head.keys(head.block(min(max(at, first), end - 1))) + ((DIM << head.block_shift) + head.slot(at) * sizeof(float));
        copy_async_4(to + n, keys, first <= at && at < end);
        copy_async_4(to + TOKENS + n, keys + head.values_offset, first <= at && at < end);
    }
};

// The layout of K and V in 16 bits, as distances in numbers. The 16 dimensions of a group are in two
// chunks of a row. The two chunks of a widened row have the even and the odd dimensions, and equal chunks
// of all rows of K and V lie side by side, so that eight rows are in different banks.
template <class T, u32 DIM, u32 TOKENS> struct Layout16 {
    static constexpr bool WIDENED = Factor<T>::SCALED;
    static constexpr u32 ROW = WIDENED ? 8 : AttentionShared<T, DIM>::PITCH;
    static constexpr u32 GROUP = WIDENED ? 2 * TOKENS * ROW : 16;
    static constexpr u32 SECOND = WIDENED ? DIM / 16 * GROUP : 8; // from the first to the second chunk
};

// The stream of a prefill block, whose warps attend to the same tokens.
template <class T, u32 DIM, bool WIDENED = Factor<T>::SCALED>
struct PrefillStream : KvStream<T, DIM, AttentionShared<T, DIM>::TOKENS, PREFILL_WARPS * WARP, PREFILL_STAGES> {};

// In an 8-bit type, the threads of the block widen all bytes once for its warps. While warps multiply
// the numbers, the next bytes are copied, so one stage of bytes is enough. In shared memory it is
// followed by the numbers, and these by a copy of the scales.
template <class T, u32 DIM>
struct PrefillStream<T, DIM, true> : KvStream<T, DIM, AttentionShared<T, DIM>::TOKENS, PREFILL_WARPS * WARP, 1, DIM> {
    static constexpr u32 TOKENS = AttentionShared<T, DIM>::TOKENS, ROWS = 2 * TOKENS, GROUPS = DIM / 16;
    static constexpr u32 OF_THREAD = ROWS * GROUPS / (PREFILL_WARPS * WARP); // groups of 16 bytes
    typedef Layout16<T, DIM, TOKENS> To;

    __device__ __forceinline__ void begin() { this->copy_next(0); }

    __device__ __forceinline__ const bf16 *next() {
        copy_async_wait<0>();
        __syncthreads(); // all threads have copied, and all warps have finished with the last numbers
        const T *bytes = this->stages;
        bf16 *numbers = reinterpret_cast<bf16 *>(this->stages + ROWS * (DIM + sizeof(float)));
        widen_share(numbers, bytes);
        if (threadIdx.x < ROWS) {
            reinterpret_cast<float *>(numbers + ROWS * DIM)[threadIdx.x] = reinterpret_cast<const float *>(bytes + ROWS * DIM)[threadIdx.x];
        }
        __syncthreads(); // all bytes are widened, and their memory is reused
        this->copy_next(0);
        return numbers;
    }

    // Threads read a row in different orders. Otherwise, some of eight rows would be in the same banks.
    static __device__ __forceinline__ void widen_share(bf16 *to, const T *from /* [(K, V), TOKENS, DIM] */) {
        constexpr u32 ORDERS = GROUPS % 2 ? 1 : GROUPS % 4 ? 2 : GROUPS % 8 ? 4 : 8;
        static_assert(OF_THREAD * PREFILL_WARPS * WARP == ROWS * GROUPS && OF_THREAD % ORDERS == 0, "all threads have as many groups");
        u32 thread = opaque(threadIdx.x); // otherwise addresses take registers of the main loop
        u32 row = thread % ROWS, first = thread / ROWS * OF_THREAD, order = row / (8 / ORDERS) % ORDERS;
#pragma unroll
        for (u32 i = 0; i < OF_THREAD; i++) {
            u32 group = first + (i ^ order);
            uint4 bytes = *reinterpret_cast<const uint4 *>(from + row * DIM + group * 16);
            u32 x[2], y[2], z[2], w[2];
            widen<T>(x, bytes.x), widen<T>(y, bytes.y), widen<T>(z, bytes.z), widen<T>(w, bytes.w);
            uint4 *even = reinterpret_cast<uint4 *>(to) + group * (To::GROUP / To::ROW) + row;
            even[0] = make_uint4(x[0], y[0], z[0], w[0]);
            even[To::SECOND / To::ROW] = make_uint4(x[1], y[1], z[1], w[1]);
        }
    }
};

// The state of a warp's 16 queries while it iterates over K and V, TOKENS at a time. In the layout
// of tensor core fragments, a lane holds parts of two queries: lane / 4 and lane / 4 + 8.
template <class T, u32 DIM, u32 TOKENS> struct WarpQueries {
    typedef typename Factor<T>::Type Number;
    static constexpr u32 PITCH = AttentionShared<T, DIM>::PITCH;
    typedef Layout16<T, DIM, TOKENS> Layout;
    static constexpr bool SCALED = Factor<T>::SCALED;
    // True if a warp widens bytes in registers: in decode, where warps have different tokens.
    static constexpr bool WIDENS = SCALED && TOKENS == 16;
    // True if queries are kept in shared memory: widening the bytes of heads this wide leaves no
    // registers for them.
    static constexpr bool SHARES = WIDENS && DIM == 256;
    u32 queries[SHARES ? 1 : DIM / 16][4]; // fragment a of mma
    float sums[DIM / 8][4];   // fragment d of mma
    float max_score[2], weight[2]; // the maximum score times log2(e); this lane's part of the weight
    float slope[2];
    float restore[2];         // narrow types only: the factor that restores the scale of a query's scores
    u32 last[2];             // last position that a query attends to
    u32 all_first, all_last; // positions that all queries attend to
    float power;             // score * power is the log2 of the weight

    // Starts with query `number` of `count`. Queries beyond the last one duplicate it. `numbers_of`
    // returns the numbers of a query.
    template <class NumbersOf>
    __device__ __forceinline__ void begin(const Attention &a, const AttentionTile &tile, const float *sinks, u32 number, u32 count,
                                          NumbersOf numbers_of) {
        u32 end = tile.first_query + count - 1;
        all_first = query_of(a, tile, min(number + 15, end)).first;
        all_last = query_of(a, tile, min(number, end)).last;
        power = a.slopes || a.soft_cap > 0.0f ? LOG2_E : a.scale * LOG2_E;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            Query query = query_of(a, tile, min(number + lane_in_warp() / 4 + 8 * half, end));
            last[half] = query.last;
            slope[half] = a.slopes ? a.slopes[query.head] : 0.0f;
            PartialSoftmax none = initial_softmax(sinks, query.head);
            max_score[half] = none.max_score;
            weight[half] = lane_in_warp() % 4 == 0 ? none.weight : 0.0f;
            const float *numbers = numbers_of(query);
            float factor = 1.0f;
            if constexpr (Factor<T>::NARROW) narrow(numbers, factor, restore[half]);
            load(numbers, half, factor);
        }
#pragma unroll
        for (u32 i = 0; i < DIM / 8 * 4; i++) sums[i / 4][i % 4] = 0.0f;
    }

    // Computes the power of two that scales a query's largest magnitude to between 1 and 2, within
    // the range of f32, and its inverse.
    static __device__ __forceinline__ void narrow(const float *query /* [DIM] */, float &factor, float &restore) {
        float magnitude = 0.0f;
#pragma unroll
        for (u32 i = lane_in_warp() % 4; i < DIM; i += 4) magnitude = fmaxf(magnitude, fabsf(query[i]));
        narrowing_factor(query_max(magnitude), factor, restore);
    }

    __device__ __forceinline__ void load(const float *query /* [DIM] */, u32 half, float factor) {
#pragma unroll
        for (u32 i = 0; i < DIM / 16; i++) {
            if constexpr (SCALED) {
                float4 four = *reinterpret_cast<const float4 *>(query + i * 16 + lane_in_warp() % 4 * 4);
                query_register(i, half) = pack2<Number>(four.x * factor, four.z * factor);
                query_register(i, half + 2) = pack2<Number>(four.y * factor, four.w * factor);
            } else {
                const float *from = query + i * 16 + lane_in_warp() % 4 * 2;
                query_register(i, half) = pack2<Number>(from[0] * factor, from[1] * factor);
                query_register(i, half + 2) = pack2<Number>(from[8] * factor, from[9] * factor);
            }
        }
    }

    __device__ __forceinline__ u32 &query_register(u32 i, u32 which) {
        if constexpr (SHARES) {
            __shared__ __align__(16) u32 all[AttentionShared<T, DIM>::DECODE_WARPS][DIM / 16][WARP][4]; // each thread reads only what it wrote
            return all[warp_in_block()][i][lane_in_warp()][which];
        } else return queries[i][which];
    }

    // Attends to tokens whose K is in shared memory, followed by V and the scales of both, if the type has scales.
    template <class Stored> __device__ __forceinline__ void attend(const Attention &a, const Stored *keys, u32 token) {
        float scores[TOKENS / 8][4] = {}; // fragment d of mma
        constexpr u32 VALUES = TOKENS * (WIDENS ? PITCH : Layout::ROW), SCALES = 2 * TOKENS * (WIDENS ? PITCH : DIM);
        const float *scales = SCALED ? reinterpret_cast<const float *>(keys + SCALES) : nullptr; // [(K, V), TOKENS]
        if constexpr (WIDENS) multiply_bytes_of_keys(scores, keys);
        else multiply_keys(scores, keys);
        if constexpr (SCALED) scale_scores(scores, scales);
        if constexpr (Factor<T>::NARROW) restore_scale(scores);
        if (a.slopes || a.soft_cap > 0.0f) adjust(scores, a, token);
        if (token < all_first || token + TOKENS - 1 > all_last) mask_scores(scores, last, a.window, token);
        update_softmax(scores);
        if constexpr (WIDENS) add_bytes_of_values(scores, keys + VALUES, scales + TOKENS);
        else add_values(scores, keys + VALUES, scales + TOKENS);
    }

    __device__ __forceinline__ void multiply_keys(float (&scores)[TOKENS / 8][4], const Number *keys) {
        const Number *lane_row = keys + (lane_in_warp() % 8 + lane_in_warp() / 16 * 8) * Layout::ROW + lane_in_warp() / 8 % 2 * Layout::SECOND;
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k++) {
#pragma unroll
            for (u32 n = 0; n < TOKENS / 16; n++) {
                u32 b[4];
                ldmatrix_x4(b, lane_row + n * 16 * Layout::ROW + k * Layout::GROUP);
                u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
                mma_16816<Number>(scores[2 * n], queries[k], low);
                mma_16816<Number>(scores[2 * n + 1], queries[k], high);
            }
        }
    }

    __device__ __forceinline__ void multiply_bytes_of_keys(float (&scores)[TOKENS / 8][4], const T *keys /* [TOKENS, PITCH] */) {
        const T *lane_row = keys + lane_in_warp() % 16 * PITCH + lane_in_warp() / 16 * 16;
#pragma unroll
        for (u32 k = 0; k < DIM / 16; k += 2) { // if DIM / 16 is odd, the upper half of the last load is unused
#pragma unroll
            for (u32 n = 0; n < TOKENS / 16; n++) {
                u32 b[4];
                ldmatrix_x4(b, lane_row + n * 16 * PITCH + k * 16);
#pragma unroll
                for (u32 m = 0; m < min(4u, (DIM / 16 - k) * 2); m++) {
                    const u32(&query)[4] = reinterpret_cast<const u32(&)[4]>(query_register(k + m / 2, 0));
                    u32 pairs[2];
                    widen<T>(pairs, b[m]);
                    mma_16816<Number>(scores[2 * n + m % 2], query, pairs);
                }
            }
        }
    }

    static __device__ __forceinline__ void scale_scores(float (&scores)[TOKENS / 8][4], const float *scales /* [TOKENS] */) {
#pragma unroll
        for (u32 n = 0; n < TOKENS / 8; n++) {
            float2 two = *reinterpret_cast<const float2 *>(scales + score_column(n, 0));
#pragma unroll
            for (u32 i = 0; i < 4; i++) scores[n][i] *= i % 2 ? two.y : two.x;
        }
    }

    __device__ __forceinline__ void restore_scale(float (&scores)[TOKENS / 8][4]) const {
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) scores[i / 4][i % 4] *= restore[i % 4 / 2];
    }

    __device__ __forceinline__ void adjust(float (&scores)[TOKENS / 8][4], const Attention &a, u32 token) {
#pragma unroll
        for (u32 n = 0; n < TOKENS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                scores[n][i] = adjusted_score(a, scores[n][i] * a.scale, slope[i / 2], last[i / 2], token + score_column(n, i));
        }
    }

    // Replaces scores by weights relative to the maximum so far.
    __device__ __forceinline__ void update_softmax(float (&scores)[TOKENS / 8][4]) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float before = max_score[half], chunk_max = MINUS_INFINITY;
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++) chunk_max = fmaxf(chunk_max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            max_score[half] = fmaxf(before, query_max(chunk_max) * power);
            float base = max_score[half] == MINUS_INFINITY ? 0.0f : max_score[half]; // if no token has been visible yet, all weights are 0
            float rescale = exp2_of(before - base);
            weight[half] *= rescale;
#pragma unroll
            for (u32 i = 0; i < TOKENS / 4; i++) {
                float &score = scores[i / 2][2 * half + i % 2];
                score = exp2_of(fmaf(score, power, -base));
                weight[half] += score;
            }
#pragma unroll
            for (u32 i = 0; i < DIM / 4; i++) sums[i / 2][2 * half + i % 2] *= rescale;
        }
    }

    // Returns the weights of 16 tokens from 16 * k on as fragment a of mma. If the type has scales, the
    // weights are multiplied by those of V.
    static __device__ __forceinline__ void pack_weights(u32 (&a)[4], const float (&weights)[TOKENS / 8][4], u32 k, const float *scales) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float *pair = &weights[2 * k + i / 2][i % 2 * 2];
            float2 two = make_float2(pair[0], pair[1]);
            if constexpr (SCALED) { // the scale of a token outside the window may be NaN
                float2 scale = *reinterpret_cast<const float2 *>(scales + score_column(2 * k + i / 2, 0));
                two = make_float2(two.x == 0.0f ? 0.0f : two.x * scale.x, two.y == 0.0f ? 0.0f : two.y * scale.y);
            }
            a[i] = pack2<Number>(two.x, two.y);
        }
    }

    __device__ __forceinline__ void add_values(const float (&weights)[TOKENS / 8][4], const Number *values, const float *scales /* [TOKENS] */) {
        const Number *lane_row = values + lane_in_warp() % 16 * Layout::ROW + lane_in_warp() / 16 * Layout::SECOND;
#pragma unroll
        for (u32 k = 0; k < TOKENS / 16; k++) {
            u32 a[4];
            pack_weights(a, weights, k, scales);
#pragma unroll
            for (u32 n = 0; n < DIM / 16; n++) {
                u32 b[4];
                ldmatrix_x4_transposed(b, lane_row + k * 16 * Layout::ROW + n * Layout::GROUP);
                u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
                mma_16816<Number>(sums[2 * n], a, left);
                mma_16816<Number>(sums[2 * n + 1], a, right);
            }
        }
    }

    // Adds the values of an 8-bit type. Even matrices of sums hold the even dimensions of a register,
    // odd matrices the odd dimensions.
    __device__ __forceinline__ void add_bytes_of_values(const float (&weights)[TOKENS / 8][4], const T *values /* [TOKENS, PITCH] */,
                                                        const float *scales /* [TOKENS] */) {
        const T *lane_row = values + lane_in_warp() % 16 * PITCH + lane_in_warp() / 16 * 16;
#pragma unroll
        for (u32 k = 0; k < TOKENS / 16; k++) {
            u32 a[4];
            pack_weights(a, weights, k, scales);
#pragma unroll
            for (u32 n = 0; n < DIM / 16; n += 2) {
                u32 b[4];
                ldmatrix_x4_transposed(b, lane_row + k * 16 * PITCH + n * 16);
#pragma unroll
                for (u32 m = 0; m < min(2u, DIM / 16 - n); m++) {
                    u32 low[2], high[2];
                    widen<T>(low, b[2 * m]);
                    widen<T>(high, b[2 * m + 1]);
                    u32 even[2] = {low[0], high[0]}, odd[2] = {low[1], high[1]};
                    mma_16816<Number>(sums[2 * (n + m)], a, even);
                    mma_16816<Number>(sums[2 * (n + m) + 1], a, odd);
                }
            }
        }
    }

    // Returns the sums of two adjacent dimensions: the lane's pair n of a query. `first_of_two`
    // returns the first of these dimensions.
    __device__ __forceinline__ float2 two_sums(u32 n, u32 half) const {
        if constexpr (SCALED) return make_float2(sums[n / 2 * 2][2 * half + n % 2], sums[n / 2 * 2 + 1][2 * half + n % 2]);
        return make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
    }
    static __device__ __forceinline__ u32 first_of_two(u32 n, u32 lane) {
        if constexpr (SCALED) return n / 2 * 16 + lane % 4 * 4 + n % 2 * 2;
        return n * 8 + lane % 4 * 2;
    }

    // Passes a lane's dimensions of a query's sums, times `factor`, to write(dimension, two numbers).
    // Adding 0 normalizes -0, whose sign would depend on tokens outside the window.
    template <class Write> __device__ __forceinline__ void write_sums(u32 half, float factor, Write write) const {
        u32 lane = SCALED && !WIDENS ? opaque(lane_in_warp()) : lane_in_warp(); // otherwise registers of the main loop spill
#pragma unroll
        for (u32 n = 0; n < DIM / 8; n++) {
            float2 two = two_sums(n, half);
            write(first_of_two(n, lane), make_float2(two.x * factor + 0.0f, two.y * factor + 0.0f));
        }
    }

    // Returns a query's weight, summed over its four lanes.
    __device__ __forceinline__ float total_weight(u32 half) const { return query_sum(weight[half]); }
};

// Returns this block's half of a tile. Tiles with the longest context are last in a sequence and
// start first, which balances the load at the end.
__device__ __forceinline__ AttentionTile prefill_tile(const Attention &a) {
    u32 half = gridDim.x - 1 - blockIdx.x;
    AttentionTile tile = a.tiles[half / 2];
    tile.first_query += half % 2 * PREFILL_QUERIES;
    return tile;
}

// Writes the result. Loads the tile again, so that it occupies no registers in the main loop.
template <u32 DIM, class Queries> __device__ __forceinline__ void write_prefill(const Attention &a, const Queries &queries) {
    AttentionTile tile = prefill_tile(a);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 number = warp_in_block() * 16 + lane_in_warp() / 4 + 8 * half;
        float factor = 1.0f / queries.total_weight(half);
        if (number >= query_count(tile, a.group(), PREFILL_QUERIES)) continue;
        Query query = query_of(a, tile, tile.first_query + number);
        u64 to = (u64(query.row) * a.heads + query.head) * DIM;
        Rows out = {a.out.numbers, opaque(a.out.dtype)}; // otherwise registers of the main loop spill
        queries.write_sums(half, factor, [&](u32 dim, float2 two) { out.put_2(to + dim, two); });
    }
}

template <class T, u32 DIM> __device__ __forceinline__ void attend_prefill(const Attention &a) {
    constexpr u32 TOKENS = AttentionShared<T, DIM>::TOKENS;
    DYNAMIC_SHARED(T, stages);
    AttentionTile tile = prefill_tile(a);
    u32 count = query_count(tile, a.group(), PREFILL_QUERIES);
    if (count == 0) return;
    u32 first = query_of(a, tile, tile.first_query).first, end = query_of(a, tile, tile.first_query + count - 1).last + 1;
    u32 token = first / TOKENS * TOKENS;
    StoredHead head = stored_head(a, tile, token_bytes<T>(DIM));
    PrefillStream<T, DIM> stream = {{stages, head, first, end, token, TOKENS, 0}};
    stream.begin();
    WarpQueries<T, DIM, TOKENS> queries;
    queries.begin(a, tile, a.sinks, tile.first_query + warp_in_block() * 16, count,
                  [&](const Query &query) { return a.qkv + u64(query.row) * a.row_width + query.head * DIM; });
    for (; token < end; token += TOKENS) queries.attend(a, stream.next(), token);
    write_prefill<DIM>(a, queries);
}

// The partial results of a block's warps, in the shared memory of K and V.
template <class T, u32 DIM> struct SharedPartials {
    static constexpr u32 WARPS = AttentionShared<T, DIM>::DECODE_WARPS, PITCH = DIM + 8;
    float sums[WARPS][16][PITCH], max_score[WARPS][16], weight[WARPS][16];

    template <class Queries> __device__ __forceinline__ void put(const Queries &queries) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 warp = warp_in_block(), query = lane_in_warp() / 4 + 8 * half;
            queries.write_sums(half, 1.0f, [&](u32 dim, float2 two) { *reinterpret_cast<float2 *>(&sums[warp][query][dim]) = two; });
            weight[warp][query] = queries.total_weight(half); // the four lanes write the same value
            max_score[warp][query] = queries.max_score[half];
        }
    }

    __device__ __forceinline__ PartialSoftmax merged(u32 query, u32 dim) const {
        PartialSoftmax result = initial_softmax(nullptr, 0);
        for (u32 warp = 0; warp < WARPS; warp++) result.add({max_score[warp][query], weight[warp][query], sums[warp][query][dim]});
        return result;
    }
};

// Writes `out` if there is one part, and otherwise this block's partial results, which the last block
// merges.
template <class T, u32 DIM>
__device__ __forceinline__ void write_decode(const Attention &a, const SharedPartials<T, DIM> &partials, const PartialResults &results) {
    AttentionTile tile = a.tiles[blockIdx.x]; // again, so that it occupies no registers in the main loop
    for (u32 i = threadIdx.x; i < query_count(tile, a.group(), DECODE_QUERIES) * DIM; i += blockDim.x) {
        u32 number = i / DIM, dim = i % DIM;
        Query query = query_of(a, tile, tile.first_query + number);
        PartialSoftmax part = partials.merged(number, dim);
        if (tile.parts == 1) {
            PartialSoftmax result = initial_softmax(a.sinks, query.head);
            result.add(part);
            a.out.put((u64(query.row) * a.heads + query.head) * DIM + dim, result.sum / result.weight);
        } else {
            float *to = results.part(a, tile.partial + tile.part, number, DIM);
            to[dim] = part.sum;
            if (dim == 0) to[DIM] = part.max_score, to[DIM + 1] = part.weight;
        }
    }
    if (tile.parts > 1 && is_last_block(results.count(a, tile.partial), tile.parts)) merge_parts<DIM>(a, tile, results);
}

// Warps process 16 tokens each in turn, and each warp has its own copies of K and V. The row's own
// token is not copied from the cache, where it is stored by one block of those that attend to it.
template <class T, u32 DIM>
__device__ __forceinline__ void attend_decode(const Attention &a, const NewTokens &tokens, const PartialResults &results) {
    typedef AttentionShared<T, DIM> Shared;
    constexpr u32 STAGES = Shared::DECODE_STAGES, THREADS = Shared::DECODE_WARPS * WARP, QUERY_PITCH = DIM + 8;
    typedef KvStream<T, DIM, 16, WARP, STAGES> Stream;
    DYNAMIC_SHARED(T, stages); // [STAGES], each divided among the warps
    __shared__ NewToken<T, DIM> own;
    AttentionTile tile = a.tiles[blockIdx.x];
    if (tile.rows == 0) return;
    Query query_range = query_of(a, tile, tile.first_query); // the same for all queries of the row
    u32 slot = tokens.slot(a, tile.first_row), part = tile.part * tile.part_len;
    u32 first = max(query_range.first, part), end = min(query_range.last + 1, part + tile.part_len);
    bool has_own = tokens.slots && end > query_range.last;
    u32 own_token = has_own ? query_range.last : ALL_POSITIONS;
    u32 token = first / Shared::TOKENS * Shared::TOKENS + warp_in_block() * 16;
    StoredHead head = stored_head(a, tile, token_bytes<T>(DIM));
    Stream stream = {stages + warp_in_block() * (Stream::STAGE / Shared::DECODE_WARPS), head, first, min(end, own_token), token, Shared::TOKENS, 0};
    stream.begin();

    // The last stage is unused until the main loop.
    static_assert(STAGES > 1 && 16 * QUERY_PITCH * sizeof(float) <= Shared::STAGE_BYTES, "queries fit in a stage");
    float *rotated = reinterpret_cast<float *>(stages + (STAGES - 1) * Stream::STAGE); // [queries, QUERY_PITCH]
    u32 count = query_count(tile, a.group(), DECODE_QUERIES), first_head = a.kv_head * a.group() + tile.first_query;
    rotate_heads<DIM, THREADS>(a, tile, tokens, count, count + (has_own ? 2 : 0), [&](u32 number, u32 dim, float x) {
        (number < count ? rotated + number * QUERY_PITCH : own.numbers[number - count])[dim] = x;
    });
    __syncthreads();
    WarpQueries<T, DIM, 16> queries;
    queries.begin(a, tile, nullptr, tile.first_query, count, [&](const Query &query) { return rotated + (query.head - first_head) * QUERY_PITCH; });
    if (has_own && warp_in_block() < 2) own.round(warp_in_block());
    __syncthreads(); // all warps have read the queries, whose memory is used for copies
    if (slot != NO_SLOT && has_own && tile.first_query == 0 && warp_in_block() < 2) own.store(warp_in_block(), tokens.kv, head, slot);
    for (; token < end; token += Shared::TOKENS) {
        T *keys = stream.next();
        if (own_token - token < 16) {
            own.template put<Shared::PITCH>(keys, own_token - token);
            __syncwarp();
        }
        queries.attend(a, keys, token);
    }

    __syncthreads(); // all warps have finished with K and V, whose memory the partial results reuse
    static_assert(sizeof(SharedPartials<T, DIM>) <= STAGES * Shared::STAGE_BYTES, "all partial results fit");
    SharedPartials<T, DIM> &partials = *reinterpret_cast<SharedPartials<T, DIM> *>(stages);
    partials.put(queries);
    __syncthreads();
    write_decode(a, partials, results);
}

// ---- kernel definitions

#define ATTENTION_ON_TENSOR_CORES(name, T, DIM)                                                                                         \
    extern "C" __global__ void __launch_bounds__(PREFILL_WARPS *WARP, AttentionShared<T, DIM>::PREFILL_BLOCKS)                          \
        attention_prefill_##name##_##DIM(ATTENTION_POINTERS, ATTENTION_SCALARS) {                                                       \
        wait_for_previous_kernel();                                                                                                     \
        attend_prefill<T, DIM>(ATTENTION_OF(DIM, DIM, blockIdx.y));                                                                                 \
    }                                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(AttentionShared<T, DIM>::DECODE_WARPS *WARP)                                           \
        attention_decode_##name##_##DIM(ATTENTION_POINTERS, ATTENTION_SCALARS, const float *angles /* see NewTokens */,                 \
                                        const u32 *slots, u32 rotated, u32 pairs, u32 *ended /* see PartialResults */, float *partial) { \
        wait_for_previous_kernel();                                                                                                     \
        attend_decode<T, DIM>(ATTENTION_OF(DIM, DIM, blockIdx.y), NewTokens{kv, angles, slots, rotated, pairs},                         \
                              PartialResults{ended, partial});                                                                          \
    }

#define ATTENTION_OF_EACH_WIDTH(name, T)    \
    ATTENTION_ON_TENSOR_CORES(name, T, 64)  \
    ATTENTION_ON_TENSOR_CORES(name, T, 80)  \
    ATTENTION_ON_TENSOR_CORES(name, T, 96)  \
    ATTENTION_ON_TENSOR_CORES(name, T, 112) \
    ATTENTION_ON_TENSOR_CORES(name, T, 128) \
    ATTENTION_ON_TENSOR_CORES(name, T, 256)

ATTENTION_OF_EACH_WIDTH(bf16, bf16)
ATTENTION_OF_EACH_WIDTH(f16, f16)
ATTENTION_OF_EACH_WIDTH(int8, signed char)
ATTENTION_OF_EACH_WIDTH(fp8, e4m3)
