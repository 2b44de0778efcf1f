// Sampling on the device, so that logits need not be copied to the host.
//
// A row is divided into parts, with a block for each, so that few rows occupy many multiprocessors. One
// after another, four kernels sample all rows of a step:
// - draw_best finds the best token of each part;
// - draw_edit finds the most probable tokens, for log probabilities. Then it applies biases, penalties
//   and the mask, and finds the best token again. If no row needs this, it is not launched;
// - draw_weigh sums probabilities, and lists the tokens that top-k and top-p may keep. If all rows are
//   greedy, it is not launched;
// - draw_choose, with one block for each row, combines the parts and chooses the token.
//
// Each step and its roundings are those of the host's sampler (src/generation), except for the
// summation of probabilities. Here, they are integers in units of 2^-40, whose sum does not depend
// on the order. So a token does not depend on the number of parts.
#include "draw.cuh"

#define DIGITS 2048
#define NUCLEUS 256 // groups of a row's tokens whose best tokens are expected to suffice for top-p

// ---- the best token

// Finds the best token of a part, and those of its groups of threads.
__device__ void find_best(const Row &row, RowPart &own, u32 when) {
    u32 key;
    bool finite;
    u64 best = row.best(key, finite);
    if (threadIdx.x == 0) own.best[when] = finite ? best : NOT_FINITE_RANK;
    for (u32 step = 1; step < row.parts; step *= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, step));
    if (threadIdx.x % row.parts == 0) own.keys[when][threadIdx.x / row.parts] = key;
}

// Returns a logit that at least `n` tokens of the row reach. `n` is at most 512.
__device__ float bound_of(const RowPart *parts, u32 count, u32 when, u32 n) {
    u32 each = DRAW_THREADS / count;
    return float_of_key(nth_largest(parts[threadIdx.x / each].keys[when][threadIdx.x % each], n));
}

// Grid: parts, draws. 512 threads.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) draw_best(RowPart *parts /* [draws, parts] */, const float *logits /* [rows, vocab] */,
                                                                        const Draw *draws /* [draws] */, u32 vocab) {
    wait_for_previous_kernel();
    start_next_kernel();
    Row row = {logits + u64(draws[blockIdx.y].row) * vocab, vocab, blockIdx.x, gridDim.x};
    find_best(row, parts[blockIdx.y * gridDim.x + blockIdx.x], BEFORE);
}

// ---- log probabilities and edits

// Finds the sum of e^(logit - max_logit) and the most probable tokens of a part.
__device__ void find_tops(const Row &row, float max_logit, const RowPart *parts, u32 wanted, RowPart &own) {
    __shared__ u64 ranks[DRAW_THREADS];
    __shared__ u32 listed;
    float bound = wanted > 0 ? bound_of(parts, row.parts, BEFORE, wanted) : INFINITY;
    float min_logit = max_logit - 28.0f; // e^-28 is less than 2^-40
    u64 sum = 0;
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    row.visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
        constexpr u32 COUNT = sizeof(x) / sizeof(float);
        float logits[COUNT]; // -0 becomes 0
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) logits[i] = x[i] + 0.0f;
        list(ranks, listed, token, logits, bound);
        if (!(largest(x) >= min_logit)) return;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) sum += u64(exp_of(rounded_sum(x[i], -max_logit)) * UNIT);
    });
    sum = block_total(sum);
    if (threadIdx.x == 0) own.exp_sum = sum;
    const u32 count = listed;
    if (count > DRAW_THREADS) { // many tokens have the same logit
        u64 last = ~u64(0);
        for (u32 i = 0; i < wanted; i++) {
            last = row.best_after(last);
            if (threadIdx.x == 0) own.tops[i] = last;
        }
        return;
    }
    u32 better = 0;
    for (u32 i = 0; threadIdx.x < count && i < count; i++) better += ranks[i] > ranks[threadIdx.x];
    if (threadIdx.x < count && better < wanted) own.tops[better] = ranks[threadIdx.x];
    if (threadIdx.x >= count && threadIdx.x < wanted) own.tops[threadIdx.x] = 0;
}

// Changes a logit to a finite value, unless the token is impossible.
__device__ __forceinline__ void set_logit(float &logit, float value) {
    if (logit > MINUS_INFINITY) logit = fminf(fmaxf(value, -3.40282347e38f), 3.40282347e38f);
}

// Applies the edits of a row to the tokens of a part.
__device__ void edit(const Draw &draw, Edit *edits, const u32 *masks, const Row &row, float *logits) {
    const u32 first = row.first_token(), end = row.end_token();
    for (u32 i = threadIdx.x; i < draw.biases; i += DRAW_THREADS) {
        if (edits[i].token < first || edits[i].token >= end) continue;
        float &logit = logits[edits[i].token];
        edits[i].before = logit;
        set_logit(logit, rounded_sum(logit, bits_to_float(edits[i].value)));
    }
    __syncthreads();
    for (u32 i = draw.biases + threadIdx.x; i < draw.biases + draw.counts; i += DRAW_THREADS) {
        if (edits[i].token < first || edits[i].token >= end) continue;
        float &logit = logits[edits[i].token];
        edits[i].before = logit;
        set_logit(logit, logit > 0.0f ? logit / draw.repetition_penalty : rounded_product(logit, draw.repetition_penalty));
        float penalty = rounded_sum(rounded_product(draw.frequency_penalty, float(edits[i].value)), draw.presence_penalty);
        if (edits[i].value > 0) set_logit(logit, rounded_sum(logit, -penalty));
    }
    __syncthreads();
    const u32 masked = draw.mask != NONE ? end : 0;
#pragma unroll 8
    for (u32 token = first + threadIdx.x; token < masked; token += DRAW_THREADS) {
        if ((masks[draw.mask + token / 32] >> token % 32 & 1) == 0) logits[token] = MINUS_INFINITY;
    }
    __syncthreads();
}

// Grid: parts, draws. 512 threads. Edits the rows in place.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) draw_edit(RowPart *parts /* [draws, parts] */, float *logits /* [rows, vocab] */,
                                                                        const Draw *draws /* [draws] */, Edit *edits, const u32 *masks, u32 vocab) {
    wait_for_previous_kernel();
    start_next_kernel();
    const Draw draw = draws[blockIdx.y];
    if (draw.logprobs == NONE && !draw.is_edited()) return;
    RowPart *of_row = parts + blockIdx.y * gridDim.x, &own = of_row[blockIdx.x];
    u64 best = best_rank(of_row, gridDim.x, BEFORE);
    if (best == NOT_FINITE_RANK) return;
    float *of_draw = logits + u64(draw.row) * vocab;
    Row row = {of_draw, vocab, blockIdx.x, gridDim.x};
    if (draw.logprobs != NONE) find_tops(row, logit_of(best), of_row, draw.logprobs, own);
    if (!draw.is_edited()) return;
    edit(draw, edits + draw.edits, masks, row, of_draw);
    find_best(row, own, AFTER);
}

// ---- weights

// Grid: parts, draws. 512 threads.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) draw_weigh(RowPart *parts /* [draws, parts] */, const float *logits /* [rows, vocab] */,
                                                                         const Draw *draws /* [draws] */, u32 vocab) {
    wait_for_previous_kernel();
    start_next_kernel();
    __shared__ u32 listed;
    const Draw draw = draws[blockIdx.y];
    RowPart *of_row = parts + blockIdx.y * gridDim.x, &own = of_row[blockIdx.x];
    Best best = best_of(draw, of_row, gridDim.x);
    if (!best.finite || !best.has_token() || !(draw.temperature > 0.0f)) return;
    const bool filtered = draw.is_filtered(vocab), limited = filtered && draw.top_k > 0;
    if (limited && draw.top_k > DRAW_THREADS) return; // draw_choose searches the row
    Row row = {logits + u64(draw.row) * vocab, vocab, blockIdx.x, gridDim.x};
    Probabilities probabilities = {logit_of(best.rank), draw.temperature, draw.min_p};
    float bound = INFINITY; // no token is listed
    if (filtered) {
        // At least this many tokens reach the bound. The margin exceeds the rounding errors of
        // probabilities: if min-p excludes a token above the bound, it excludes all below.
        float reached = bound_of(of_row, gridDim.x, draw.is_edited() ? AFTER : BEFORE, limited ? draw.top_k : NUCLEUS);
        bound = fmaxf(reached - 0.001f * draw.temperature, probabilities.logit_bound(-88.0f));
    }
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    if (limited) {
        row.visit_all<LIGHT_LOADS>([&](u32 token, auto &x) { list(own.listed, listed, token, x, bound); });
    } else {
        float min_logit = probabilities.logit_bound(-28.0f);
        u64 sum = 0;
        row.visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
            if (!(largest(x) >= min_logit)) return; // these tokens have no weight
#pragma unroll
            for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) sum += probabilities.weight_of(x[i]);
            list(own.listed, listed, token, x, bound);
        });
        for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (lane_in_warp() == 0) own.sums[warp_in_block()] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) own.count = listed;
}

// ---- the choice

// Adds to a sum in shared memory. Devices add 64-bit numbers there in a loop that repeats until no
// other thread interferes, but 32-bit numbers in one instruction.
__device__ __forceinline__ void add_shared(u64 *sum, u64 x) {
    u32 *halves = reinterpret_cast<u32 *>(sum), low = u32(x);
    u32 high = u32(x >> 32) + (atomicAdd(&halves[0], low) + low < low);
    if (high > 0) atomicAdd(&halves[1], high);
}

// Shared memory of a block.
struct Scratch {
    u64 weights[DIGITS]; // of the tokens with each digit, or of the listed tokens
    u64 ranks[DRAW_THREADS];
};

// Chooses a token of a row with random numbers. All threads of the block call its functions together.
struct Choice {
    Row row; // all of it, in one part
    Probabilities probabilities;
    const RowPart *parts;
    u32 count; // of the parts
    Scratch *scratch;
    u32 min_key, equals_end; // excluded: tokens with a lower key, and tokens with this key from index equals_end on

    __device__ __forceinline__ bool is_kept(u32 token, float logit) const {
        u32 key = key_of(logit);
        return key > min_key || (key == min_key && token < equals_end);
    }

    // Returns the first token from `begin` on at which the cumulative weight exceeds `target`, which the
    // weight of the tokens up to `end` exceeds. `weight(token, logit)` is a u64. Divides the range into
    // one for each warp, until there is one token for each thread.
    template <class Weight> __device__ u32 token_at(u64 target, u32 begin, u32 end, Weight weight) const {
        __shared__ u32 found;
        while (end - begin > DRAW_THREADS) {
            u32 length = div_ceil(end - begin, DRAW_WARPS), own = begin + warp_in_block() * length;
            u64 sum = 0;
#pragma unroll 4
            for (u32 token = own + lane_in_warp(); token < min(own + length, end); token += WARP) sum += weight(token, row.logits[token]);
            begin += warp_with(target, sum) * length, end = min(begin + length, end);
        }
        u32 token = begin + threadIdx.x;
        u64 own = token < end ? weight(token, row.logits[token]) : 0, before = total_before(own);
        if (threadIdx.x == 0) found = row.vocab - 1;
        __syncthreads();
        if (before <= target && target - before < own) found = token;
        __syncthreads();
        return found;
    }

    // Returns the first token at which the cumulative weight exceeds `target_of(total weight)`, which the
    // total has to exceed.
    template <class Target, class Weight> __device__ u32 locate(float min_logit, Target target_of, Weight weight) const {
        u64 sum = 0;
        row.visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
            if (!(largest(x) >= min_logit)) return; // these tokens have no weight
#pragma unroll
            for (u32 i = 0; i < sizeof(x) / sizeof(float); i++) sum += weight(token + i, x[i]);
        });
        u64 target = target_of(block_total(sum));
        u32 warp = warp_with(target, sum);
        return token_at(target, row.start_of(warp, DRAW_WARPS), row.start_of(warp + 1, DRAW_WARPS), weight);
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
            row.visit_all<HEAVY_LOADS>([&](u32 token, auto &x) {
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
        equals_end = locate(float_of_key(key), [&](u64) { return last; }, equals) + 1;
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

    // Returns the total weight that top-p keeps.
    static __device__ u64 top_p_weight(float p, u64 all) { return min(max(u64(ceil(double(p) * double(all))), u64(1)), all); }

    // Returns the weight of this thread's range of the row. Threads beyond the last range have none.
    __device__ u64 weight_of_range() const {
        return threadIdx.x < count * DRAW_WARPS ? parts[threadIdx.x / DRAW_WARPS].sums[threadIdx.x % DRAW_WARPS] : 0;
    }

    // Reads the lists of all parts as one. Returns the number of their tokens, and one of them for each
    // thread, as a rank. If a list or the block cannot hold all, the number exceeds that of the threads.
    __device__ u32 listed_token(u64 &rank) const {
        u32 listed = 0;
        for (u32 i = 0; i < count; i++) {
            u32 at = threadIdx.x - listed, of_part = parts[i].count;
            if (threadIdx.x >= listed && at < of_part) rank = parts[i].listed[at];
            listed += of_part;
        }
        return listed;
    }

    // Chooses if top-k or top-p keep few tokens. Otherwise, returns NONE. Compares each listed token
    // with each.
    __device__ u32 from_lists(const Draw &draw, u64 fraction) const {
        __shared__ u32 found;
        const bool limited = draw.top_k > 0;
        if (draw.top_k > DRAW_THREADS) return NONE;
        u64 rank = 0, weight = 0; // of this thread's token; 0 if it has none
        const u32 listed = listed_token(rank);
        if (listed > DRAW_THREADS) return NONE;
        if (rank > 0 && !(probabilities.of(logit_of(rank)) > 0.0f)) rank = 0;
        if (rank > 0) weight = probabilities.weight_of(logit_of(rank));
        scratch->ranks[threadIdx.x] = rank, scratch->weights[threadIdx.x] = weight;
        __syncthreads();
        u32 better = 0;
        u64 ahead = 0; // weight of the better tokens
        for (u32 i = 0; threadIdx.x < listed && i < listed; i++) {
            if (scratch->ranks[i] > rank) better++, ahead += scratch->weights[i];
        }
        if (limited && better >= draw.top_k) weight = 0;
        u64 sum = block_total(weight);
        if (draw.top_p < 1.0f) {
            u64 wanted = top_p_weight(draw.top_p, limited ? sum : block_total(weight_of_range()));
            if (sum < wanted) return NONE;
            if (ahead >= wanted) weight = 0;
            sum = block_total(weight);
        }
        scratch->weights[threadIdx.x] = weight;
        if (threadIdx.x == 0) found = row.vocab - 1;
        __syncthreads();
        u64 target = high_product(fraction, sum), before = 0; // weight of the tokens with lower ids
        for (u32 i = 0; weight > 0 && i < listed; i++) {
            if (u32(scratch->ranks[i]) > u32(rank)) before += scratch->weights[i];
        }
        if (before <= target && target - before < weight) found = token_of(rank);
        __syncthreads();
        return found;
    }

    // Chooses among all tokens, whose weights draw_weigh has summed.
    __device__ u32 from_sums(u64 fraction) const {
        __shared__ u32 range;
        __shared__ u64 rest;
        if (threadIdx.x == 0) range = 0, rest = 0;
        u64 own = weight_of_range(), target = high_product(fraction, block_total(own)), before = total_before(own);
        if (before <= target && target - before < own) range = threadIdx.x, rest = target - before;
        __syncthreads();
        const u32 ranges = count * DRAW_WARPS;
        auto weighed = [&](u32, float logit) { return probabilities.weight_of(logit); };
        return token_at(rest, row.start_of(range, ranges), row.start_of(range + 1, ranges), weighed);
    }

    // Chooses among the tokens that top-k and top-p keep, by a search of the whole row.
    __device__ u32 from_row(const Draw &draw, u64 fraction) {
        auto counted = [&](float logit) { return u64(probabilities.of(logit) > 0.0f); };
        if (draw.top_k > 0) keep_best(probabilities.logit_bound(-88.0f), counted, [&](u64) { return u64(draw.top_k); });
        auto weighed = [&](float logit) { return probabilities.weight_of(logit); };
        float min_logit = probabilities.logit_bound(-28.0f);
        if (draw.top_p < 1.0f) keep_best(min_logit, weighed, [&](u64 all) { return top_p_weight(draw.top_p, all); });
        auto kept = [&](u32 token, float logit) { return is_kept(token, logit) ? probabilities.weight_of(logit) : 0; };
        return locate(min_logit, [&](u64 all) { return high_product(fraction, all); }, kept);
    }

    __device__ u32 choose(const Draw &draw) {
        u64 fraction = u64(draw.fraction_high) << 32 | draw.fraction_low;
        if (!draw.is_filtered(row.vocab)) return from_sums(fraction);
        u32 token = from_lists(draw, fraction);
        return token != NONE ? token : from_row(draw, fraction);
    }
};

// Combines the most probable tokens of the parts.
__device__ void write_logprobs(const RowPart *parts, u32 count, u32 wanted, u64 *ranks, DeviceSample *sample) {
    static_assert(MAX_PARTS * MAX_TOPS <= DRAW_THREADS, "each thread has at most one token");
    u64 exp_sum = 0, rank = 0;
    for (u32 i = 0; i < count; i++) exp_sum += parts[i].exp_sum;
    if (threadIdx.x == 0) sample->exp_sum = exp_sum;
    if (threadIdx.x < count * wanted) rank = parts[threadIdx.x / wanted].tops[threadIdx.x % wanted];
    ranks[threadIdx.x] = rank;
    __syncthreads();
    u32 better = 0;
    for (u32 i = 0; rank > 0 && i < count * wanted; i++) better += ranks[i] > rank;
    if (rank > 0 && better < wanted) sample->tops[better] = Top{token_of(rank), logit_of(rank)};
    __syncthreads(); // before the ranks change
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

// Grid: draws. 512 threads. `count` is the number of parts of a row.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1) draw_choose(DeviceSample *all /* [draws] */, const RowPart *parts /* [draws, count] */,
                                                                          const float *logits /* [rows, vocab] */, const Draw *draws /* [draws] */,
                                                                          const Edit *edits, u32 vocab, u32 count) {
    wait_for_previous_kernel();
    __shared__ Scratch scratch;
    const Draw draw = draws[blockIdx.x];
    const RowPart *of_row = parts + blockIdx.x * count;
    DeviceSample *sample = all + blockIdx.x;
    const Best best = best_of(draw, of_row, count);
    if (threadIdx.x == 0) *sample = DeviceSample{best.finite ? TOKEN : NOT_FINITE, 0, 0.0f, best.max_before, 0, {}};
    if (!best.finite) return; // uniform over the block
    __syncthreads();
    if (draw.logprobs != NONE) write_logprobs(of_row, count, draw.logprobs, scratch.ranks, sample);
    Row row = {logits + u64(draw.row) * vocab, vocab, 0, 1};
    u32 token = token_of(best.rank);
    if (best.has_token() && draw.temperature > 0.0f) {
        Probabilities probabilities = {logit_of(best.rank), draw.temperature, draw.min_p};
        token = Choice{row, probabilities, of_row, count, &scratch, 0, 0}.choose(draw);
    }
    float logit = draw.logprobs != NONE ? logit_before(draw, edits + draw.edits, row.logits, token) : 0.0f;
    if (threadIdx.x == 0) {
        sample->outcome = best.has_token() ? TOKEN : EXCLUDED;
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
