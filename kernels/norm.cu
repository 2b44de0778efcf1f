// Norms, with an optional preceding residual addition. One block per row, or per head of a row. The
// number of threads, and so the order of summation, depends on the width only.
#include "common.cuh"

enum NormKind { RMS, RMS_UNIT_OFFSET, LAYER };

// The coefficients of a norm: (x - mean) * factor * (weight + offset) + bias.
struct Scaling {
    float mean, factor, offset;
};

__device__ Scaling scaling_of(const float *x /* [width] */, u32 width, u32 kind, float eps) {
    float sum = 0.0f;
    if (kind == LAYER) {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) sum += x[i];
        sum = block_sum(sum);
    }
    float mean = sum / float(width), squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    squares = block_sum(squares);
    return Scaling{mean, 1.0f / sqrtf(squares / float(width) + eps), kind == RMS_UNIT_OFFSET ? 1.0f : 0.0f};
}

// Writes a normalized row. Each thread reads and writes the same elements, so `out` may be `x`.
__device__ void write_normed(float *out /* [width] */, const float *x /* [width] */, const float *weight /* [width] */,
                             const float *bias /* [width] or null */, u32 width, Scaling by) {
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float y = (x[i] - by.mean) * by.factor * (weight[i] + by.offset);
        out[i] = bias ? y + bias[i] : y;
    }
}

// out = norm(x). Grid: rows.
extern "C" __global__ void norm_rows(float *out /* [rows, width] */, const float *x /* [rows, width] */, const float *weight /* [width] */,
                                const float *bias /* [width] or null */, u32 width, u32 kind, float eps) {
    wait_for_previous_kernel();
    const float *row = x + u64(blockIdx.x) * width;
    write_normed(out + u64(blockIdx.x) * width, row, weight, bias, width, scaling_of(row, width, kind, eps));
}

// x += scale * y, out = norm(x). Grid: rows.
extern "C" __global__ void add_norm(float *out /* [rows, width] */, float *x /* [rows, width] */, const float *y /* [rows, width] */,
                                    const float *weight /* [width] */, const float *bias /* [width] or null */, u32 width, u32 kind, float eps,
                                    float scale) {
    wait_for_previous_kernel();
    float *row = x + u64(blockIdx.x) * width;
    const float *more = y + u64(blockIdx.x) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) row[i] += scale * more[i];
    // No synchronization: each thread reads only elements that it wrote.
    write_normed(out + u64(blockIdx.x) * width, row, weight, bias, width, scaling_of(row, width, kind, eps));
}

// x = norm(x) for heads of `dim` numbers, starting at `first`. Weight and bias have `own` heads:
// one for all heads, or one per head. Grid: rows, heads.
extern "C" __global__ void norm_heads(float *x /* [rows, stride] */, const float *weight /* [own, dim] */,
                                      const float *bias /* [own, dim] or null */, u32 first, u32 dim, u32 stride, u32 own, u32 kind, float eps) {
    wait_for_previous_kernel();
    float *head = x + u64(blockIdx.x) * stride + first + u64(blockIdx.y) * dim;
    u32 place = blockIdx.y % own * dim;
    write_normed(head, head, weight + place, bias ? bias + place : bias, dim, scaling_of(head, dim, kind, eps));
}
