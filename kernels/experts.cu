// Routing of rows to experts: choice of experts, sorting by expert, gather and combine.
#include "common.cuh"

enum Scores { SOFTMAX, SIGMOID };
enum GroupScore { BEST, BEST_TWO };

#define ROUTE_WARPS 4
#define MAX_EXPERTS 512
#define MAX_GROUPS 64

// The scores that select experts. Softmax is monotonic, so its logits suffice.
struct RowScores {
    const float *logits;     // [experts]
    const float *correction; // [experts] or null
    u32 kind;

    __device__ float of(u32 expert) const {
        if (kind == SOFTMAX) return logits[expert];
        return sigmoid(logits[expert]) + (correction ? correction[expert] : 0.0f);
    }
    // Returns the weight of an expert before normalization. `max_logit` is the largest logit of the
    // chosen experts.
    __device__ float weight(u32 expert, float max_logit) const {
        return kind == SOFTMAX ? expf(logits[expert] - max_logit) : sigmoid(logits[expert]);
    }
};

// The groups of experts: their number, how many a row chooses, and how they are scored.
struct RowGroups {
    u32 count, chosen, score;
};

// The working memory of a warp for its row.
struct RouteWorkspace {
    u32 orders[MAX_EXPERTS];
    u32 group_orders[MAX_GROUPS];
    u32 experts[MAX_EXPERTS]; // chosen, by descending score
    float weights[MAX_EXPERTS];
};

// Maps a float, including NaN, to an integer with the same order.
__device__ __forceinline__ u32 order_of(float x) {
    u32 bits = float_to_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// An order and an index as one unique number; among equal orders, the lower index has the higher
// rank. All ranks are below ALL_RANKS.
#define ALL_RANKS (~u64(0))
#define MAX_INDEX 0x7fffffffu
__device__ __forceinline__ u64 rank_of(u32 order, u32 index) { return u64(order) << 32 | (MAX_INDEX - index); }
__device__ __forceinline__ u32 index_of_rank(u64 rank) { return MAX_INDEX - u32(rank); }

// Returns the highest rank of a warp's row below `last`, so that successive calls return descending
// ranks.
__device__ u64 next_best(const u32 *orders /* [count] */, u32 count, u64 last) {
    u64 best = 0;
    for (u32 index = lane_in_warp(); index < count; index += WARP) {
        u64 rank = rank_of(orders[index], index);
        if (rank < last && rank > best) best = rank;
    }
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        u64 other = __shfl_xor_sync(ALL_LANES, best, step);
        if (other > best) best = other;
    }
    return best;
}

// Scores a group. One lane visits its experts in order, because the two best scores depend on the
// order if one is NaN.
__device__ float score_of_group(const RowScores &scores, u32 group, u32 size, u32 how) {
    float first = MINUS_INFINITY, second = MINUS_INFINITY;
    for (u32 expert = group * size; expert < (group + 1) * size; expert++) {
        float next = scores.of(expert);
        second = fmaxf(second, fminf(next, first));
        first = fmaxf(first, next);
    }
    return how == BEST ? first : first + second;
}

// Returns the chosen groups as a bit mask.
__device__ u64 choose_groups(RouteWorkspace &workspace, const RowScores &scores, RowGroups groups, u32 experts) {
    for (u32 group = lane_in_warp(); group < groups.count; group += WARP)
        workspace.group_orders[group] = order_of(score_of_group(scores, group, experts / groups.count, groups.score));
    __syncwarp();
    u64 bits = 0, last = ALL_RANKS;
    for (u32 i = 0; i < groups.chosen; i++) {
        last = next_best(workspace.group_orders, groups.count, last);
        bits |= u64(1) << index_of_rank(last);
    }
    return bits;
}

// Chooses the `top_k` best experts of a row.
__device__ void choose_experts(RouteWorkspace &workspace, const RowScores &scores, RowGroups groups, u32 experts, u32 top_k) {
    u32 size = groups.count ? experts / groups.count : experts;
    u64 chosen = groups.count ? choose_groups(workspace, scores, groups, experts) : 1;
    float excluded_score = scores.kind == SOFTMAX ? MINUS_INFINITY : 0.0f; // score of experts in groups that were not chosen
    for (u32 expert = lane_in_warp(); expert < experts; expert += WARP)
        workspace.orders[expert] = order_of(chosen >> expert / size & 1 ? scores.of(expert) : excluded_score);
    __syncwarp();
    u64 last = ALL_RANKS;
    for (u32 i = 0; i < top_k; i++) {
        last = next_best(workspace.orders, experts, last);
        if (lane_in_warp() == 0) workspace.experts[i] = index_of_rank(last);
    }
    __syncwarp();
}

// Computes the weights of the chosen experts, and returns their divisor. Each lane sums the weights
// of the chosen experts in the same order, by descending score.
__device__ float compute_weights(RouteWorkspace &workspace, const RowScores &scores, u32 experts, u32 top_k, bool normalized) {
    float max_logit = MINUS_INFINITY, sum = 0.0f;
    for (u32 i = 0; i < top_k; i++) max_logit = fmaxf(max_logit, scores.logits[workspace.experts[i]]);
    for (u32 i = lane_in_warp(); i < top_k; i += WARP) workspace.weights[i] = scores.weight(workspace.experts[i], max_logit);
    __syncwarp();
    if (normalized) {
        for (u32 i = 0; i < top_k; i++) sum += workspace.weights[i];
        return scores.kind == SOFTMAX ? sum : sum + 1e-20f; // avoids a division by zero if all weights are 0
    }
    if (scores.kind == SIGMOID) return 1.0f;
    for (u32 expert = lane_in_warp(); expert < experts; expert += WARP) sum += scores.weight(expert, max_logit);
    return warp_sum(sum);
}

// Chooses each row's experts, by descending score and then by ascending index, and computes their
// weights. One warp per row, ROUTE_WARPS warps per block. `groups` is 0 if there are no groups.
extern "C" __global__ void route(u32 *experts_of /* [rows, top_k] */, float *weights /* [rows, top_k] */,
                                 const float *logits /* [rows, experts] */, const float *correction /* [experts] or null */, u32 rows,
                                 u32 experts, u32 top_k, u32 scores, u32 normalized, float scale, u32 groups, u32 groups_chosen,
                                 u32 group_score) {
    wait_for_previous_kernel();
    __shared__ RouteWorkspace workspaces[ROUTE_WARPS];
    RouteWorkspace &workspace = workspaces[warp_in_block()];
    u32 row = blockIdx.x * ROUTE_WARPS + warp_in_block();
    if (row >= rows) return; // warps do not synchronize with each other
    RowScores own = {logits + u64(row) * experts, correction, scores};
    choose_experts(workspace, own, RowGroups{groups, groups_chosen, group_score}, experts, top_k);
    float sum = compute_weights(workspace, own, experts, top_k, normalized);
    for (u32 i = lane_in_warp(); i < top_k; i += WARP) {
        experts_of[u64(row) * top_k + i] = workspace.experts[i];
        weights[u64(row) * top_k + i] = workspace.weights[i] / sum * scale;
    }
}

#define SORT_WARPS 8

// Sorts the routes by expert, and then by row. One block of SORT_WARPS warps per expert; each warp
// has a part of the choices. It counts choices of lower experts and of its own expert, and then
// writes the latter to their positions.
extern "C" __global__ void sort_routes(u32 *starts /* [experts + 1] */, u32 *__restrict__ sources /* [routes], the row of each */,
                                       u32 *__restrict__ places /* [rows, top_k], the route of each choice */,
                                       const u32 *__restrict__ experts_of /* [rows, top_k] */, u32 rows, u32 experts, u32 top_k) {
    wait_for_previous_kernel();
    __shared__ u32 before[SORT_WARPS], own[SORT_WARPS];
    u32 routes = rows * top_k, expert = blockIdx.x, warp = warp_in_block(), lane = lane_in_warp();
    u32 part = div_ceil(div_ceil(routes, WARP), SORT_WARPS) * WARP, first = warp * part;
    u32 end = first + part < routes ? first + part : routes;

    u32 count_before = 0, count_own = 0;
#pragma unroll 4
    for (u32 choices = first; choices < end; choices += WARP) {
        u32 of = choices + lane < end ? experts_of[choices + lane] : experts;
        count_before += __popc(__ballot_sync(ALL_LANES, of < expert));
        count_own += __popc(__ballot_sync(ALL_LANES, of == expert));
    }
    if (lane == 0) {
        before[warp] = count_before;
        own[warp] = count_own;
    }
    __syncthreads();

    u32 start = 0, next = 0;
    for (u32 other = 0; other < SORT_WARPS; other++) {
        start += before[other];
        next += other < warp ? own[other] : 0;
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert == experts - 1) starts[experts] = routes;
    }

    next += start;
#pragma unroll 4
    for (u32 choices = first; choices < end; choices += WARP) {
        u32 choice = choices + lane, of = choice < end ? experts_of[choice] : experts;
        u32 here = __ballot_sync(ALL_LANES, of == expert);
        if (of == expert) {
            u32 route = next + __popc(here & ((1u << lane) - 1));
            sources[route] = choice / top_k;
            places[choice] = route;
        }
        next += __popc(here);
    }
}

template <class N> __device__ __forceinline__ void copy_row(float *to, const float *from, u32 width) {
    for (u32 i = threadIdx.x; i < width / (sizeof(N) / sizeof(float)); i += blockDim.x)
        reinterpret_cast<N *>(to)[i] = reinterpret_cast<const N *>(from)[i];
}

// out[i] = x[sources[i]] for the routes to `experts` experts. Grid: routes.
extern "C" __global__ void gather_routes(float *out /* [routes, width] */, const float *x /* [rows, width] */,
                                         const u32 *sources /* [routes] */, const u32 *starts /* [experts + 1] */, u32 experts, u32 width) {
    wait_for_previous_kernel();
    if (blockIdx.x < starts[0] || blockIdx.x >= starts[experts]) return;
    float *to = out + u64(blockIdx.x) * width;
    const float *from = x + u64(sources[blockIdx.x]) * width;
    if (width % 4 == 0) copy_row<float4>(to, from, width);
    else copy_row<float>(to, from, width);
}

// out[r] = sum of x[place] * weight over the choices of row r among `experts` experts, by descending
// score. Grid: rows.
extern "C" __global__ void combine_routes(float *out /* [rows, width] */, const float *x /* [routes, width] */,
                                          const u32 *places /* [rows, top_k] */, const float *weights /* [rows, top_k] */,
                                          const u32 *starts /* [experts + 1] */, u32 experts, u32 width, u32 top_k) {
    wait_for_previous_kernel();
    u64 choices = u64(blockIdx.x) * top_k;
    u32 first = starts[0], end = starts[experts];
    for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 4
        for (u32 i = 0; i < top_k; i++) {
            u32 place = places[choices + i];
            if (place >= first && place < end) sum += x[u64(place) * width + column] * weights[choices + i];
        }
        out[u64(blockIdx.x) * width + column] = sum;
    }
}
