// Sampling on the device, so that logits need not be copied to the host. One block samples one row.
//
// Each step and its roundings are those of the host's sampler (src/generation), except for the
// summation of probabilities. Here, they are integers in units of 2^-40, whose sum does not depend
// on the order.
#include "common.cuh"

#define DRAW_THREADS 512
#define DRAW_WARPS (DRAW_THREADS / WARP)
#define MAX_TOPS 20
#define NONE 0xffffffffu  // value of `logprobs` and `mask` if there are none
#define UNIT 1099511627776.0f // 2^40

struct Draw {
    u32 row, logprobs, top_k;
    float temperature, min_p, top_p, repetition_penalty, frequency_penalty, presence_penalty;
    u32 fraction_high, fraction_low; // the random number as a fraction of 2^64
    u32 edits, biases, counts, mask; // index of the first edit, number of edits of each kind, index of the mask's first word
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

// The layouts match those in src/types/batch/device_sampling.rs.
static_assert(sizeof(Draw) == 60 && sizeof(Edit) == 12 && sizeof(DeviceSample) == 24 + 8 * MAX_TOPS, "the layouts match those of the host");

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

// Computes COUNT sums over the block, in each of its threads.
template <u32 COUNT> __device__ void block_sums(u64 (&sums)[COUNT]) {
    __shared__ u64 parts[DRAW_WARPS][COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        for (int step = WARP / 2; step > 0; step /= 2) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], step);
    }
    __syncthreads(); // all threads have read the previous sums
    if (lane_in_warp() == 0) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) parts[warp_in_block()][i] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        sums[i] = 0;
#pragma unroll 1
        for (u32 warp = 0; warp < DRAW_WARPS; warp++) sums[i] += parts[warp][i];
    }
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

// A row of logits and the set of its candidate tokens. All threads of the block call its functions
// together.
struct Row {
    float *logits; // [vocab]
    u32 vocab;
    float max_logit, temperature, min_p;
    u32 min_key, equals_end; // excluded: tokens with a lower key, and tokens with this key from index equals_end on

    // Returns the sum of `weight(token)`, a u64, over all tokens.
    template <class Weight> __device__ u64 total(Weight weight) const {
        u64 sum[1] = {0};
        for (u32 token = threadIdx.x; token < vocab; token += DRAW_THREADS) sum[0] += weight(token);
        block_sums(sum);
        return sum[0];
    }

    // Returns the best token after `last`, as rank and token: the highest logit, and among equals
    // the lowest token. Adding 0 turns -0 into 0, which is equal.
    __device__ u64 best_after(u64 last) const {
        u64 best = 0;
        for (u32 token = threadIdx.x; token < vocab; token += DRAW_THREADS) {
            u64 rank = u64(key_of(logits[token] + 0.0f)) << 32 | ~token;
            if (rank < last) best = max(best, rank);
        }
        return block_max_u64(best);
    }

    __device__ __forceinline__ bool is_kept(u32 token) const {
        u32 key = key_of(logits[token]);
        return key > min_key || (key == min_key && token < equals_end);
    }

    // Returns the unnormalized probability of a logit; that of the best token is 1.
    __device__ __forceinline__ float probability_of(float logit) const {
        float probability = exp_of(rounded_sum(logit, -max_logit) / temperature);
        return probability >= min_p ? probability : 0.0f;
    }
    __device__ __forceinline__ u64 probability(u32 token) const { return is_kept(token) ? u64(probability_of(logits[token]) * UNIT) : 0; }
    __device__ __forceinline__ u64 is_candidate(u32 token) const { return is_kept(token) && probability_of(logits[token]) > 0.0f; }

    // Returns the greatest key for which the tokens with at least this key have a total weight of
    // at least `wanted`. The total of all tokens must reach `wanted`. Searches four bits at a time.
    template <class Weight> __device__ u32 threshold(u64 wanted, Weight weight) const {
        u32 key = 0;
        for (int shift = 28; shift >= 0; shift -= 4) {
            u64 sums[15] = {}; // weights of tokens with keys of at least key + ((i + 1) << shift)
            for (u32 token = threadIdx.x; token < vocab; token += DRAW_THREADS) {
                u32 own = key_of(logits[token]);
                if (own < key) continue;
                u32 digit = min((own - key) >> shift, 15u);
                u64 w = digit > 0 ? weight(token) : 0;
#pragma unroll
                for (u32 i = 0; i < 15; i++) sums[i] += digit > i ? w : 0;
            }
            block_sums(sums);
            u32 digit = 0;
#pragma unroll
            for (u32 i = 0; i < 15; i++) digit += sums[i] >= wanted;
            key += digit << shift;
        }
        return key;
    }

    // Returns the first token at which the cumulative weight exceeds `target`. The total of all
    // tokens must exceed it. Each warp sums a range of tokens, and the warp whose range contains
    // the position searches it.
    template <class Weight> __device__ u32 locate(u64 target, Weight weight) const {
        __shared__ u64 runs[DRAW_WARPS];
        __shared__ u32 found;
        u32 length = div_ceil(div_ceil(vocab, DRAW_WARPS), WARP) * WARP, first = warp_in_block() * length, end = min(first + length, vocab);
        u64 sum = 0;
        for (u32 token = first + lane_in_warp(); token < end; token += WARP) sum += weight(token);
        for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        __syncthreads();
        if (lane_in_warp() == 0) runs[warp_in_block()] = sum;
        if (threadIdx.x == 0) found = vocab - 1;
        __syncthreads();
        u64 before = 0;
        for (u32 warp = 0; warp < warp_in_block(); warp++) before += runs[warp];
        if (before <= target && target < before + sum) {
            u32 token = find(target - before, first, end, weight);
            if (lane_in_warp() == 0) found = token;
        }
        __syncthreads();
        return found;
    }

    // Searches a range of tokens, by the lanes of a warp.
    template <class Weight> __device__ u32 find(u64 target, u32 first, u32 end, Weight weight) const {
        for (u32 start = first;; start += WARP) {
            u32 token = start + lane_in_warp();
            u64 upto = token < end ? weight(token) : 0;
            for (u32 step = 1; step < WARP; step *= 2) {
                u64 before = __shfl_sync(ALL_LANES, upto, (lane_in_warp() + WARP - step) % WARP);
                if (lane_in_warp() >= step) upto += before;
            }
            u32 beyond = __ballot_sync(ALL_LANES, upto > target);
            if (beyond != 0) return start + __popc((beyond & (0u - beyond)) - 1);
            if (start + WARP >= end) return end - 1;
            target -= __shfl_sync(ALL_LANES, upto, WARP - 1);
        }
    }

    // Excludes tokens with lower keys than `key`, and all but the first `count` candidates with
    // this key.
    __device__ void keep(u32 key, u64 count) {
        u32 last = locate(count - 1, [&](u32 token) { return u64(key_of(logits[token]) == key && is_candidate(token)); });
        min_key = key, equals_end = last + 1;
    }

    __device__ void keep_top_k(u32 k) {
        auto counted = [&](u32 token) { return is_candidate(token); };
        if (k == 0 || total(counted) <= k) return;
        u32 key = threshold(k, counted);
        keep(key, k - total([&](u32 token) { return key_of(logits[token]) > key ? is_candidate(token) : 0; }));
    }

    __device__ void keep_top_p(float p) {
        if (p >= 1.0f) return;
        auto weighed = [&](u32 token) { return probability(token); };
        u64 all = total(weighed), wanted = min(max(u64(ceil(double(p) * double(all))), u64(1)), all);
        u32 key = threshold(wanted, weighed);
        u64 above = total([&](u32 token) { return key_of(logits[token]) > key ? probability(token) : 0; });
        u64 each = u64(probability_of(float_of_key(key)) * UNIT); // not 0, because these tokens are needed to reach `wanted`
        keep(key, (wanted - above + each - 1) / each);
    }
};

// Changes a logit to a finite value, unless the token is impossible.
__device__ __forceinline__ void set_logit(float &logit, float value) {
    if (logit > MINUS_INFINITY) logit = fminf(fmaxf(value, -3.40282347e38f), 3.40282347e38f);
}

__device__ void edit(const Draw &draw, Edit *edits, const u32 *masks, float *logits, u32 vocab) {
    for (u32 i = threadIdx.x; i < draw.biases; i += DRAW_THREADS) {
        float &logit = logits[edits[i].token];
        edits[i].before = logit;
        set_logit(logit, rounded_sum(logit, bits_to_float(edits[i].value)));
    }
    __syncthreads();
    for (u32 i = draw.biases + threadIdx.x; i < draw.biases + draw.counts; i += DRAW_THREADS) {
        float &logit = logits[edits[i].token];
        edits[i].before = logit;
        set_logit(logit, logit > 0.0f ? logit / draw.repetition_penalty : rounded_product(logit, draw.repetition_penalty));
        float penalty = rounded_sum(rounded_product(draw.frequency_penalty, float(edits[i].value)), draw.presence_penalty);
        if (edits[i].value > 0) set_logit(logit, rounded_sum(logit, -penalty));
    }
    __syncthreads();
    for (u32 token = threadIdx.x; draw.mask != NONE && token < vocab; token += DRAW_THREADS) {
        if ((masks[draw.mask + token / 32] >> token % 32 & 1) == 0) logits[token] = MINUS_INFINITY;
    }
    __syncthreads();
}

// Returns the logit that the model computed. If the token has edits, its first edit has saved it.
// All threads of the block call it.
__device__ float logit_before(const Draw &draw, const Edit *edits, const float *logits, u32 token) {
    u32 count = draw.biases + draw.counts, left = 0; // number of edits from the matching one to the end
    for (u32 i = threadIdx.x; i < count; i += DRAW_THREADS) {
        if (edits[i].token == token) left = max(left, count - i);
    }
    left = u32(block_max_u64(left));
    return left > 0 ? edits[count - left].before : logits[token];
}

__device__ __forceinline__ u32 token_of(u64 rank) { return ~u32(rank); }
__device__ __forceinline__ float logit_of(u64 rank) { return float_of_key(u32(rank >> 32)); }

// Reports the sum of e^(logit - max_logit) and the most probable tokens, for log probabilities.
__device__ void write_logprobs(const Draw &draw, const Row &row, DeviceSample *sample) {
    u64 exp_sum = row.total([&](u32 token) { return u64(exp_of(rounded_sum(row.logits[token], -row.max_logit)) * UNIT); });
    if (threadIdx.x == 0) sample->exp_sum = exp_sum;
    u64 last = ~u64(0);
    for (u32 i = 0; i < draw.logprobs && i < row.vocab; i++) {
        last = row.best_after(last);
        if (threadIdx.x == 0) sample->tops[i] = Top{token_of(last), logit_of(last)};
    }
}

// Grid: draws. 512 threads. Edits the rows in place.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS) draw_rows(DeviceSample *all /* [draws] */, float *logits /* [rows, vocab] */,
                                                                     const Draw *draws /* [draws] */, Edit *edits, const u32 *masks, u32 vocab) {
    wait_for_previous_kernel();
    const Draw draw = draws[blockIdx.x];
    DeviceSample *sample = all + blockIdx.x;
    edits += draw.edits;
    Row row = {logits + u64(draw.row) * vocab, vocab, 0.0f, draw.temperature, draw.min_p, 0, 0};
    bool not_finite = row.total([&](u32 token) { return u64(!(row.logits[token] < INFINITY)); }) > 0;
    u64 best = row.best_after(~u64(0));
    row.max_logit = logit_of(best);
    if (threadIdx.x == 0) *sample = DeviceSample{not_finite ? NOT_FINITE : TOKEN, 0, 0.0f, row.max_logit, 0, {}};
    if (not_finite) return; // uniform over the block
    __syncthreads();
    if (draw.logprobs != NONE) write_logprobs(draw, row, sample);
    if (draw.biases + draw.counts > 0 || draw.mask != NONE) {
        edit(draw, edits, masks, row.logits, vocab);
        best = row.best_after(~u64(0));
        row.max_logit = logit_of(best);
    }
    u32 token = token_of(best);
    if (row.max_logit > MINUS_INFINITY && draw.temperature > 0.0f) {
        row.keep_top_k(draw.top_k);
        row.keep_top_p(draw.top_p);
        auto weighed = [&](u32 token) { return row.probability(token); };
        u64 fraction = u64(draw.fraction_high) << 32 | draw.fraction_low;
        token = row.locate(high_product(fraction, row.total(weighed)), weighed);
    }
    float logit = draw.logprobs != NONE ? logit_before(draw, edits, row.logits, token) : 0.0f;
    if (threadIdx.x == 0) {
        sample->outcome = row.max_logit > MINUS_INFINITY ? TOKEN : EXCLUDED;
        sample->token = token;
        sample->logit = logit;
    }
}

// Replaces the placeholders of a batch by the tokens that the previous step has sampled. If sampling
// failed, the token is arbitrary, and the host ignores the row. One thread per placeholder.
extern "C" __global__ void fill_placeholders(u32 *tokens /* [rows] */, const u32 *placeholders /* [count, 2]: token, sample */,
                                             const DeviceSample *samples, u32 count) {
    wait_for_previous_kernel();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const DeviceSample &sample = samples[placeholders[2 * i + 1]];
    tokens[placeholders[2 * i]] = sample.outcome == TOKEN ? sample.token : 0;
}
