// Sampling on the device, so that logits need not be copied to the host. One block samples one row.
//
// Each step and its roundings are those of the host's sampler (src/generation), except for the
// summation of probabilities. Here, they are integers in units of 2^-40, whose sum does not depend
// on the order.
#include "common.cuh"

#define DRAW_THREADS 512
#define DRAW_WARPS (DRAW_THREADS / WARP)
#define LIGHT_LOADS 8 // loads in flight per thread, in passes that only compare
#define HEAVY_LOADS 2 // the same in passes that compute powers
#define DIGITS 2048
#define NUCLEUS 256 // parts of the vocabulary whose best tokens are expected to suffice for top-p
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

// Adds to a sum in shared memory. Devices add 64-bit numbers there in a loop that repeats until no
// other thread interferes, but 32-bit numbers in one instruction.
__device__ __forceinline__ void add_shared(u64 *sum, u64 x) {
    u32 *halves = reinterpret_cast<u32 *>(sum), low = u32(x);
    u32 high = u32(x >> 32) + (atomicAdd(&halves[0], low) + low < low);
    if (high > 0) atomicAdd(&halves[1], high);
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

// Shared memory of a block.
struct Scratch {
    u64 weights[DIGITS];              // of the tokens with each digit, or of the listed tokens
    u64 ranks[DRAW_THREADS];          // of the listed tokens
    u32 tokens[DRAW_THREADS], listed; // `listed` includes the tokens that do not fit
};

// A row of logits and the set of its candidate tokens. All threads of the block call its functions
// together.
struct Row {
    float *logits; // [vocab]
    u32 vocab;
    Scratch *scratch;
    float max_logit, temperature, min_p;
    u32 min_key, equals_end; // excluded: tokens with a lower key, and tokens with this key from index equals_end on

    // Number of tokens before the first one at an address that is a multiple of 16 bytes.
    __device__ __forceinline__ u32 head() const { return min(u32(-(reinterpret_cast<uintptr_t>(logits) / sizeof(float)) % 4), vocab); }

    // Returns the first token of a warp's range.
    __device__ u32 start_of(u32 warp) const {
        u32 quads = (vocab - head()) / 4;
        return warp == 0 ? 0 : warp >= DRAW_WARPS ? vocab : head() + 4 * min(warp * div_ceil(quads, DRAW_WARPS), quads);
    }

    // Calls `visit(token, logits)` for all tokens, where `logits` are those of one or four tokens
    // from `token` on. Each warp visits a range, and each thread its tokens in ascending order. A
    // thread loads LOADS times 16 bytes before it visits.
    template <u32 LOADS, class Visit> __device__ __forceinline__ void visit_all(Visit visit) const {
        u32 first = head(), quads = (vocab - first) / 4, length = div_ceil(quads, DRAW_WARPS);
        u32 begin = min(warp_in_block() * length, quads), end = min(begin + length, quads);
        const float4 *quad = reinterpret_cast<const float4 *>(logits + first);
        if (threadIdx.x < first) visit_one(threadIdx.x, visit);
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
        if (tail < vocab) visit_one(tail, visit);
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
        while (token + 1 < vocab && logits[token] < logit_of(rank)) token++;
        return rank_of(logit_of(rank), token);
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

    __device__ __forceinline__ bool is_kept(u32 token, float logit) const {
        u32 key = key_of(logit);
        return key > min_key || (key == min_key && token < equals_end);
    }

    // Returns the unnormalized probability of a logit; that of the best token is 1.
    __device__ __forceinline__ float probability_of(float logit) const {
        float x = rounded_sum(logit, -max_logit);
        float probability = exp_of(temperature == 1.0f ? x : x / temperature);
        return probability >= min_p ? probability : 0.0f;
    }
    __device__ __forceinline__ u64 weight_of(float logit) const { return u64(probability_of(logit) * UNIT); }

    // Returns a lower bound of the logits whose probability is at least e^power and at least min_p.
    // It is slightly too low, because roundings are not considered.
    __device__ float logit_bound(float power) const { return max_logit + temperature * (fmaxf(power, logf(min_p)) - 0.001f); }

    // Adds tokens to the list, in no particular order.
    template <u32 COUNT> __device__ __forceinline__ void list(u32 token, const float (&x)[COUNT], float min_logit) const {
        if (!(largest(x) >= min_logit)) return;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if (!(x[i] >= min_logit)) continue;
            u32 at = atomicAdd(&scratch->listed, 1u);
            if (at < DRAW_THREADS) scratch->tokens[at] = token + i;
        }
    }
    __device__ void clear_list() const {
        __syncthreads(); // all threads have read the previous list
        if (threadIdx.x == 0) scratch->listed = 0;
        __syncthreads();
    }

    // Returns the first token at which the cumulative weight exceeds `target_of(total weight)`, which
    // the total has to exceed. `weight(token, logit)` is a u64. Divides the vocabulary into a range
    // for each warp, and then the range with the token, until there is one token for each thread.
    template <class Weight, class Target> __device__ u32 locate(float min_logit, Weight weight, Target target_of) const {
        __shared__ u32 found;
        u64 sum = 0;
        visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
            if (!(largest(x) >= min_logit)) return; // these tokens have no weight
#pragma unroll
            for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) sum += weight(token + i, x[i]);
        });
        u64 target = target_of(block_total(sum));
        u32 warp = warp_with(target, sum), begin = start_of(warp), end = start_of(warp + 1);
        while (end - begin > DRAW_THREADS) {
            u32 length = div_ceil(end - begin, DRAW_WARPS), own = begin + warp_in_block() * length;
            sum = 0;
#pragma unroll 4
            for (u32 token = own + lane_in_warp(); token < min(own + length, end); token += WARP) sum += weight(token, logits[token]);
            warp = warp_with(target, sum);
            begin += warp * length, end = min(begin + length, end);
        }
        u32 token = begin + threadIdx.x;
        u64 own = token < end ? weight(token, logits[token]) : 0, before = total_before(own);
        if (threadIdx.x == 0) found = vocab - 1;
        __syncthreads();
        if (before <= target && target - before < own) found = token;
        __syncthreads();
        return found;
    }

    // Returns the warp at which the cumulative sum of the threads exceeds `target`. Subtracts the sum
    // of the warps before it from `target`.
    __device__ u32 warp_with(u64 &target, u64 sum) const {
        __shared__ u64 runs[DRAW_WARPS];
        for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        __syncthreads();
        if (lane_in_warp() == 0) runs[warp_in_block()] = sum;
        __syncthreads();
        u32 warp = 0;
        while (warp < DRAW_WARPS - 1 && target >= runs[warp]) target -= runs[warp++];
        return warp;
    }

    // Keeps the fewest candidates whose weight reaches `wanted_of(total weight)`, best first. Equal
    // logits have equal weights. Searches the key of the last one by its digits.
    template <class Weight, class Wanted> __device__ void keep_best(float min_logit, Weight weight, Wanted wanted_of) {
        u64 wanted = 0;
        u32 key = 0, known = 0; // bits of the key that are known
#pragma unroll 1
        for (u32 shift : {21u, 10u, 0u}) {
            for (u32 i = threadIdx.x; i < DIGITS; i += DRAW_THREADS) scratch->weights[i] = 0;
            __syncthreads();
            visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
                if (!(largest(x) >= min_logit)) return;
#pragma unroll
                for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) {
                    u32 own = key_of(x[i]);
                    if (((own ^ key) & known) != 0 || !is_kept(token + i, x[i])) continue;
                    u64 w = weight(x[i]);
                    if (w > 0) add_shared(&scratch->weights[(own >> shift) % DIGITS], w);
                }
            });
            __syncthreads();
            if (known == 0) {
                u64 sum = 0;
                for (u32 i = threadIdx.x; i < DIGITS; i += DRAW_THREADS) sum += scratch->weights[i];
                u64 all = block_total(sum);
                wanted = wanted_of(all);
                if (wanted >= all) return;
            }
            key |= digit_with(wanted) << shift;
            known = ~0u << shift;
        }
        u64 last = (wanted - 1) / weight(float_of_key(key)); // among the candidates with this key
        auto equals = [&](u32 token, float logit) { return u64(key_of(logit) == key && is_kept(token, logit)); };
        equals_end = locate(float_of_key(key), equals, [&](u64) { return last; }) + 1;
        min_key = key;
    }

    // Returns the digit at which the cumulative weight reaches `wanted`, from the highest digit on.
    // Subtracts the weight of higher digits from `wanted`.
    __device__ u32 digit_with(u64 &wanted) const {
        __shared__ u32 found;
        __shared__ u64 rest;
        const u32 EACH = DIGITS / DRAW_THREADS;
        u32 digit = DIGITS - 1 - EACH * threadIdx.x; // the highest of this thread's digits
        u64 sum = 0;
        for (u32 i = 0; i < EACH; i++) sum += scratch->weights[digit - i];
        u64 before = total_before(sum);
        if (before < wanted && wanted - before <= sum) {
            u64 left = wanted - before;
            while (scratch->weights[digit] < left) left -= scratch->weights[digit--];
            found = digit, rest = left;
        }
        __syncthreads();
        wanted = rest;
        u32 result = found;
        __syncthreads(); // before `found` and the weights change
        return result;
    }

    // Samples if top-k or top-p keep few tokens. Otherwise, returns NONE. Lists the tokens above a
    // bound that the best tokens of all threads provide, at most one per thread, and compares each
    // with each. `own_key` is that of `best`.
    __device__ u32 sample_from_list(const Draw &draw, u64 fraction, u32 own_key) const {
        __shared__ u32 found;
        const bool limited = draw.top_k > 0;
        if (draw.top_k > DRAW_THREADS) return NONE;
        // At least this many tokens reach the bound. The margin exceeds the rounding errors of
        // probabilities: if min-p excludes a token above the bound, it excludes all below.
        float bound = float_of_key(nth_largest(own_key, limited ? draw.top_k : NUCLEUS)) - 0.001f * temperature;
        bound = fmaxf(bound, logit_bound(-88.0f));
        u64 all = 0; // weight of all candidates, unless top-k limits them
        clear_list();
        if (limited) {
            visit_all<LIGHT_LOADS>([&](u32 token, auto &x) { list(token, x, bound); });
        } else {
            float min_logit = logit_bound(-28.0f);
            visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
                if (!(largest(x) >= min_logit)) return;
#pragma unroll
                for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) all += weight_of(x[i]);
                list(token, x, bound);
            });
        }
        all = block_total(all);
        const u32 listed = scratch->listed;
        if (listed > DRAW_THREADS) return NONE;
        u64 rank = 0, weight = 0; // of this thread's token; 0 if it has none
        if (threadIdx.x < listed) {
            u32 token = scratch->tokens[threadIdx.x];
            float logit = logits[token];
            if (probability_of(logit) > 0.0f) rank = rank_of(logit, token), weight = weight_of(logit);
            scratch->ranks[threadIdx.x] = rank, scratch->weights[threadIdx.x] = weight;
        }
        __syncthreads();
        u32 better = 0;
        u64 ahead = 0; // weight of the better tokens
        for (u32 i = 0; threadIdx.x < listed && i < listed; i++) {
            if (scratch->ranks[i] > rank) better++, ahead += scratch->weights[i];
        }
        if (limited && better >= draw.top_k) weight = 0;
        u64 sum = block_total(weight);
        if (draw.top_p < 1.0f) {
            u64 wanted = top_p_weight(draw.top_p, limited ? sum : all);
            if (sum < wanted) return NONE;
            if (ahead >= wanted) weight = 0;
            sum = block_total(weight);
        }
        if (threadIdx.x < listed) scratch->weights[threadIdx.x] = weight;
        if (threadIdx.x == 0) found = vocab - 1;
        __syncthreads();
        u64 target = high_product(fraction, sum), before = 0; // weight of the tokens with lower ids
        for (u32 i = 0; weight > 0 && i < listed; i++) {
            if (u32(scratch->ranks[i]) > u32(rank)) before += scratch->weights[i];
        }
        if (before <= target && target - before < weight) found = token_of(rank);
        __syncthreads();
        return found;
    }

    // Returns the total weight that top-p keeps.
    static __device__ u64 top_p_weight(float p, u64 all) { return min(max(u64(ceil(double(p) * double(all))), u64(1)), all); }

    __device__ u32 sample(const Draw &draw, u32 own_key) {
        u64 fraction = u64(draw.fraction_high) << 32 | draw.fraction_low;
        if ((draw.top_k > 0 && draw.top_k < vocab) || draw.top_p < 1.0f) {
            u32 token = sample_from_list(draw, fraction, own_key);
            if (token != NONE) return token;
            auto counted = [&](float logit) { return u64(probability_of(logit) > 0.0f); };
            if (draw.top_k > 0) keep_best(logit_bound(-88.0f), counted, [&](u64) { return u64(draw.top_k); });
            auto weighed = [&](float logit) { return weight_of(logit); };
            if (draw.top_p < 1.0f) keep_best(logit_bound(-28.0f), weighed, [&](u64 all) { return top_p_weight(draw.top_p, all); });
        }
        auto weighed = [&](u32 token, float logit) { return is_kept(token, logit) ? weight_of(logit) : 0; };
        return locate(logit_bound(-28.0f), weighed, [&](u64 all) { return high_product(fraction, all); });
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
    const u32 masked = draw.mask != NONE ? vocab : 0;
#pragma unroll 8
    for (u32 token = threadIdx.x; token < masked; token += DRAW_THREADS) {
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

// Reports the sum of e^(logit - max_logit) and the most probable tokens, for log probabilities.
// `own_key` is that of `best`.
__device__ void write_logprobs(const Draw &draw, const Row &row, u32 own_key, DeviceSample *sample) {
    const u32 count = draw.logprobs;
    float bound = count > 0 ? float_of_key(nth_largest(own_key, count)) : INFINITY; // at least `count` tokens reach it
    float min_logit = row.max_logit - 28.0f; // e^-28 is less than 2^-40
    u64 sum = 0;
    row.clear_list();
    row.visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
        row.list(token, x, bound);
        if (!(largest(x) >= min_logit)) return;
#pragma unroll
        for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) sum += u64(exp_of(rounded_sum(x[i], -row.max_logit)) * UNIT);
    });
    sum = block_total(sum);
    if (threadIdx.x == 0) sample->exp_sum = sum;
    const u32 listed = row.scratch->listed;
    if (listed > DRAW_THREADS) { // many tokens have the same logit
        u64 last = ~u64(0);
        for (u32 i = 0; i < count && i < row.vocab; i++) {
            last = row.best_after(last);
            if (threadIdx.x == 0) sample->tops[i] = Top{token_of(last), logit_of(last)};
        }
        return;
    }
    u64 rank = 0;
    if (threadIdx.x < listed) {
        u32 token = row.scratch->tokens[threadIdx.x];
        rank = row.scratch->ranks[threadIdx.x] = rank_of(row.logits[token] + 0.0f, token);
    }
    __syncthreads();
    u32 better = 0;
    for (u32 i = 0; threadIdx.x < listed && i < listed; i++) better += row.scratch->ranks[i] > rank;
    if (threadIdx.x < listed && better < count) sample->tops[better] = Top{token_of(rank), logit_of(rank)};
}

// Grid: draws. 512 threads. Edits the rows in place.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1) draw_rows(DeviceSample *all /* [draws] */, float *logits /* [rows, vocab] */,
                                                                     const Draw *draws /* [draws] */, Edit *edits, const u32 *masks, u32 vocab) {
    wait_for_previous_kernel();
    __shared__ Scratch scratch;
    const Draw draw = draws[blockIdx.x];
    DeviceSample *sample = all + blockIdx.x;
    edits += draw.edits;
    Row row = {logits + u64(draw.row) * vocab, vocab, &scratch, 0.0f, draw.temperature, draw.min_p, 0, 0};
    u32 own_key;
    bool finite;
    u64 best = row.best(own_key, finite);
    row.max_logit = logit_of(best);
    if (threadIdx.x == 0) *sample = DeviceSample{finite ? TOKEN : NOT_FINITE, 0, 0.0f, row.max_logit, 0, {}};
    if (!finite) return; // uniform over the block
    __syncthreads();
    if (draw.logprobs != NONE) write_logprobs(draw, row, own_key, sample);
    if (draw.biases + draw.counts > 0 || draw.mask != NONE) {
        edit(draw, edits, masks, row.logits, vocab);
        best = row.best(own_key, finite);
        row.max_logit = logit_of(best);
    }
    u32 token = token_of(best);
    if (row.max_logit > MINUS_INFINITY && draw.temperature > 0.0f) token = row.sample(draw, own_key);
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
