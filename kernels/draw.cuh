// What the kernels of draw.cu share: parameters and results, the arithmetic of the host's sampler, and
// rows of logits in parts.
#pragma once
#include "common.cuh"

#define DRAW_THREADS 512
#define DRAW_WARPS (DRAW_THREADS / WARP)
#define MAX_PARTS 16 // of a row; their number is a power of two
#define LIGHT_LOADS 8 // loads in flight per thread, in passes that only compare
#define HEAVY_LOADS 2 // the same in passes that compute powers
#define MAX_TOPS 20
#define NONE 0xffffffffu  // value of `logprobs` and `mask` if there are none
#define UNIT 1099511627776.0f // 2^40

struct Draw {
    u32 row, logprobs, top_k;
    float temperature, min_p, top_p, repetition_penalty, frequency_penalty, presence_penalty;
    u32 fraction_high, fraction_low; // the random number as a fraction of 2^64
    u32 edits, biases, counts, mask; // index of the first edit, number of edits of each kind, index of the mask's first word

    __device__ __forceinline__ bool is_edited() const { return biases + counts > 0 || mask != NONE; }
    // Returns whether top-k or top-p may exclude tokens.
    __device__ __forceinline__ bool is_filtered(u32 vocab) const { return (top_k > 0 && top_k < vocab) || top_p < 1.0f; }
};

struct Edit {
    u32 token, value;
    float before; // original logit
};

struct Top {
    u32 token;
    float logit;
};

enum Outcome : u32 { TOKEN, NOT_FINITE, EXCLUDED };

struct DeviceSample {
    Outcome outcome;
    u32 token;
    float logit, max_logit;
    u64 exp_sum; // sum of e^(logit - max_logit), in units of 2^-40
    Top tops[MAX_TOPS];
};

// What a block finds in its part of a row, before the edits of the row and after them. It writes the
// latter only if there are edits.
enum { BEFORE, AFTER };
struct RowPart {
    u64 best[2];               // rank of the best token; NOT_FINITE_RANK if a logit is not finite before the edits
    u64 exp_sum;               // sum of e^(logit - max_logit), in units of 2^-40
    u64 tops[MAX_TOPS];        // ranks of the best tokens before the edits; 0 if there are fewer
    u64 sums[DRAW_WARPS];      // weights of the ranges of the warps
    u64 listed[DRAW_THREADS];  // ranks of the tokens that top-k and top-p may keep
    u32 keys[2][DRAW_THREADS]; // of the best tokens of groups of threads; a row has 512 groups in all its parts
    u32 count;                 // of `listed`; includes the tokens that do not fit
};
#define NOT_FINITE_RANK (~u64(0))

// The layouts match those in src/types/batch/device_sampling.rs and src/backend/cuda/sampler.rs.
static_assert(sizeof(Draw) == 60 && sizeof(Edit) == 12 && sizeof(DeviceSample) == 24 + 8 * MAX_TOPS, "the layouts match those of the host");
static_assert(sizeof(RowPart) == 8512, "the size matches that of the host");

// Multiplication and addition that are not fused into an FMA, because the host rounds after each.
__device__ __forceinline__ float rounded_product(float a, float b) {
#ifdef __CUDACC__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
__device__ __forceinline__ float rounded_sum(float a, float b) {
#ifdef __CUDACC__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

// e^x for x <= 0, bit-identical to `exp` in src/generation/sampler/rows.rs.
__device__ __forceinline__ float exp_of(float x) {
    const float MIN = -87.0f, ROUNDER = 12582912.0f;
    float bounded = fmaxf(x, MIN), rounded = rounded_sum(rounded_product(bounded, 1.44269504088896f), ROUNDER), n = rounded - ROUNDER;
    float r = rounded_sum(rounded_sum(bounded, -rounded_product(n, 355.0f / 512.0f)), -rounded_product(n, -2.1219444e-4f));
    const float series[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    float power = 1.0f / 5040.0f;
#pragma unroll
    for (int i = 0; i < 7; i++) power = rounded_sum(rounded_product(power, r), series[i]);
    float scale = bits_to_float((float_to_bits(rounded) << 23) + float_to_bits(1.0f));
    return x < MIN ? 0.0f : rounded_product(power, scale);
}

// Maps a float to an integer with the same order, with -0 before 0.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = float_to_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_key(u32 key) { return bits_to_float(key >> 31 ? key & 0x7fffffffu : ~key); }

__device__ __forceinline__ u64 high_product(u64 a, u64 b) {
#ifdef __CUDACC__
    return __umul64hi(a, b);
#else
    return u64((unsigned __int128)a * b >> 64);
#endif
}

// Returns the sum over the block, in each of its threads.
__device__ u64 block_total(u64 x) {
    __shared__ u64 parts[DRAW_WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    __syncthreads(); // all threads have read the previous sum
    if (lane_in_warp() == 0) parts[warp_in_block()] = x;
    __syncthreads();
    u64 sum = 0;
    for (u32 warp = 0; warp < DRAW_WARPS; warp++) sum += parts[warp];
    return sum;
}

// Returns the sum over the threads before this one.
__device__ u64 total_before(u64 x) {
    __shared__ u64 parts[DRAW_WARPS];
    u64 upto = x;
    for (u32 step = 1; step < WARP; step *= 2) {
        u64 before = __shfl_sync(ALL_LANES, upto, (lane_in_warp() + WARP - step) % WARP);
        if (lane_in_warp() >= step) upto += before;
    }
    __syncthreads();
    if (lane_in_warp() == WARP - 1) parts[warp_in_block()] = upto;
    __syncthreads();
    u64 before = upto - x;
    for (u32 warp = 0; warp < warp_in_block(); warp++) before += parts[warp];
    return before;
}

__device__ u64 block_max_u64(u64 x) {
    __shared__ u64 parts[DRAW_WARPS];
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, u64(__shfl_xor_sync(ALL_LANES, x, step)));
    __syncthreads();
    if (lane_in_warp() == 0) parts[warp_in_block()] = x;
    __syncthreads();
    for (u32 warp = 0; warp < DRAW_WARPS; warp++) x = max(x, parts[warp]);
    return x;
}

// Returns the greatest key that at least `n` threads reach. `n` is at most the number of threads.
__device__ u32 nth_largest(u32 key, u32 n) {
    u32 found = 0;
#pragma unroll 1
    for (u32 bit = 1u << 31; bit > 0; bit /= 2) {
        if (u32(__syncthreads_count(key >= (found | bit))) >= n) found |= bit;
    }
    return found;
}

// Tokens rank by key, and tokens with the same key by ascending id.
__device__ __forceinline__ u64 rank_of(float logit, u32 token) { return u64(key_of(logit)) << 32 | ~token; }
__device__ __forceinline__ u32 token_of(u64 rank) { return ~u32(rank); }
__device__ __forceinline__ float logit_of(u64 rank) { return float_of_key(u32(rank >> 32)); }

template <u32 COUNT> __device__ __forceinline__ float largest(const float (&x)[COUNT]) {
    float max = x[0];
#pragma unroll
    for (u32 i = 1; i < COUNT; i++) max = fmaxf(max, x[i]);
    return max;
}

// Adds the ranks of tokens to a list of at most 512, in no particular order. `count`, in shared memory,
// includes the tokens that do not fit.
template <u32 COUNT>
__device__ __forceinline__ void list(u64 *ranks, u32 &count, u32 token, const float (&x)[COUNT], float min_logit) {
    if (!(largest(x) >= min_logit)) return;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        if (!(x[i] >= min_logit)) continue;
        u32 at = atomicAdd(&count, 1u);
        if (at < DRAW_THREADS) ranks[at] = rank_of(x[i], token + i);
    }
}

// A part of a row of logits. The row is divided into ranges, one for each warp of each part. All threads
// of the block call the functions together.
struct Row {
    const float *logits; // [vocab]
    u32 vocab, part, parts;

    // Number of tokens before the first one at an address that is a multiple of 16 bytes.
    __device__ __forceinline__ u32 head() const { return min(u32(-(reinterpret_cast<uintptr_t>(logits) / sizeof(float)) % 4), vocab); }

    // Returns the first token of a range. `range` is the number of ranges for the end of the last one.
    __device__ u32 start_of(u32 range, u32 ranges) const {
        u32 quads = (vocab - head()) / 4;
        return range == 0 ? 0 : range >= ranges ? vocab : head() + 4 * min(range * div_ceil(quads, ranges), quads);
    }
    __device__ u32 first_token() const { return start_of(part * DRAW_WARPS, parts * DRAW_WARPS); }
    __device__ u32 end_token() const { return start_of((part + 1) * DRAW_WARPS, parts * DRAW_WARPS); }

    // Calls `visit(token, logits)` for all tokens, where `logits` are those of one or four tokens
    // from `token` on. Each warp visits its range, and each thread its tokens in ascending order. A
    // thread loads LOADS times 16 bytes before it visits.
    template <u32 LOADS, class Visit> __device__ __forceinline__ void visit_all(Visit visit) const {
        u32 first = head(), quads = (vocab - first) / 4, length = div_ceil(quads, parts * DRAW_WARPS);
        u32 begin = min((part * DRAW_WARPS + warp_in_block()) * length, quads), end = min(begin + length, quads);
        const float4 *quad = reinterpret_cast<const float4 *>(logits + first);
        if (part == 0 && threadIdx.x < first) visit_one(threadIdx.x, visit);
        for (u32 start = begin + lane_in_warp(); start < end; start += LOADS * WARP) {
            float4 loaded[LOADS];
#pragma unroll
            for (u32 i = 0; i < LOADS; i++) {
                if (start + i * WARP < end) loaded[i] = quad[start + i * WARP];
            }
#pragma unroll
            for (u32 i = 0; i < LOADS; i++) {
                if (start + i * WARP >= end) break;
                const float four[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
                visit(first + 4 * (start + i * WARP), four);
            }
        }
        u32 tail = first + 4 * quads + DRAW_THREADS - 1 - threadIdx.x;
        if (part == parts - 1 && tail < vocab) visit_one(tail, visit);
    }
    template <class Visit> __device__ __forceinline__ void visit_one(u32 token, Visit visit) const {
        const float one[1] = {logits[token]};
        visit(token, one);
    }

    // Returns the best token as a rank: the highest logit, and among equals the lowest token. Adding
    // 0 turns -0 into 0, which is equal. `own_key` is the key of the best token that this thread
    // visits.
    __device__ u64 best(u32 &own_key, bool &finite) const {
        float max = MINUS_INFINITY;
        u32 at = 0; // the tokens that were visited with the best one
        bool not_finite = false;
        visit_all<LIGHT_LOADS>([&](u32 token, auto &x) {
#pragma unroll
            for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) not_finite |= !(x[i] < INFINITY);
            if (largest(x) > max) max = largest(x), at = token;
        });
        own_key = key_of(max + 0.0f);
        finite = __syncthreads_count(not_finite) == 0;
        u64 rank = block_max_u64(rank_of(max + 0.0f, at));
        u32 token = token_of(rank);
        const float logit = logit_of(rank);
        while (logit > MINUS_INFINITY && token + 1 < vocab && logits[token] < logit) token++;
        return rank_of(logit, token);
    }

    // Returns the best token after `last`.
    __device__ u64 best_after(u64 last) const {
        u64 best = 0;
        visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
#pragma unroll
            for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) {
                u64 rank = rank_of(x[i] + 0.0f, token + i);
                if (rank < last) best = max(best, rank);
            }
        });
        return block_max_u64(best);
    }
};

// The probabilities of the tokens of a row. They are not normalized; that of the best token is 1.
struct Probabilities {
    float max_logit, temperature, min_p;

    __device__ __forceinline__ float of(float logit) const {
        float x = rounded_sum(logit, -max_logit);
        float probability = exp_of(temperature == 1.0f ? x : x / temperature);
        return probability >= min_p ? probability : 0.0f;
    }
    __device__ __forceinline__ u64 weight_of(float logit) const { return u64(of(logit) * UNIT); }

    // Returns a lower bound of the logits whose probability is at least e^power and at least min_p.
    // It is slightly too low, because roundings are not considered.
    __device__ float logit_bound(float power) const { return max_logit + temperature * (fmaxf(power, logf(min_p)) - 0.001f); }
};

// Returns the best rank of a row. `when`: BEFORE or AFTER the edits.
__device__ __forceinline__ u64 best_rank(const RowPart *parts, u32 count, u32 when) {
    u64 best = 0;
    for (u32 i = 0; i < count; i++) best = max(best, parts[i].best[when]);
    return best;
}

// The best token of a row.
struct Best {
    bool finite; // no logit is NaN or infinite, except for -infinity
    float max_before; // the largest logit before the edits
    u64 rank; // after the edits; its logit is -infinity if no token is allowed

    __device__ __forceinline__ bool has_token() const { return logit_of(rank) > MINUS_INFINITY; }
};

__device__ __forceinline__ Best best_of(const Draw &draw, const RowPart *parts, u32 count) {
    u64 before = best_rank(parts, count, BEFORE);
    if (before == NOT_FINITE_RANK) return Best{false, 0.0f, before};
    return Best{true, logit_of(before), draw.is_edited() ? best_rank(parts, count, AFTER) : before};
}
