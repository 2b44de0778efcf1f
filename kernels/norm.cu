// Norms, with an optional preceding residual addition. One block per row, or per head of a row. The
// number of threads, and so the order of summation, depends on the width only.
#include "common.cuh"

enum NormKind { RMS, RMS_UNIT_OFFSET, LAYER };

// The coefficients of a norm: (x - mean) * factor * (weight + offset) + bias.
struct Scaling {
    float mean, factor, offset;
};

#define KEPT 8u // numbers of a row that a thread keeps in registers

// A row of a block. Its first numbers are in registers, and the others are read again for each use.
struct NormRow {
    const float *x; // [width]
    u32 width;
    float kept[KEPT]; // numbers threadIdx.x + i * blockDim.x

    __device__ __forceinline__ NormRow(const float *row, u32 width) : x(row), width(width) {
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) kept[i] = place(i) < width ? row[place(i)] : 0.0f;
    }

    // Adds scale * more to the row first, also in memory.
    __device__ __forceinline__ NormRow(float *row, u32 width, const float *more /* [width] */, float scale) : x(row), width(width) {
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) kept[i] = place(i) < width ? row[place(i)] + scale * more[place(i)] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++)
            if (place(i) < width) row[place(i)] = kept[i];
        for (u32 i = place(KEPT); i < width; i += blockDim.x) row[i] += scale * more[i]; // each thread later reads what it wrote
    }

    static __device__ __forceinline__ u32 place(u32 i) { return threadIdx.x + i * blockDim.x; }

    // Calls use(i, x[i]) for each number of this thread, in order.
    template <class Use> __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll
        for (u32 i = 0; i < KEPT; i++)
            if (place(i) < width) use(place(i), kept[i]);
        for (u32 i = place(KEPT); i < width; i += blockDim.x) use(i, x[i]);
    }

    __device__ __forceinline__ Scaling scaling(u32 kind, float eps) const {
        float sum = 0.0f;
        if (kind == LAYER) {
            for_each([&](u32, float number) { sum += number; });
            sum = block_sum(sum);
        }
        float mean = sum / float(width), squares = 0.0f;
        for_each([&](u32, float number) { squares += (number - mean) * (number - mean); });
        squares = block_sum(squares);
        return Scaling{mean, 1.0f / sqrtf(squares / float(width) + eps), kind == RMS_UNIT_OFFSET ? 1.0f : 0.0f};
    }

    // Writes the normalized row. Each thread writes the numbers that it has read, so `out` may be `x`.
    // `first` is its place in `out`.
    __device__ __forceinline__ void write(Rows out, u64 first, const float *weight /* [width] */, const float *bias /* [width] or null */,
                                          Scaling by) const {
        for_each([&](u32 i, float number) {
            float y = (number - by.mean) * by.factor * (weight[i] + by.offset);
            out.put(first + i, bias ? y + bias[i] : y);
        });
    }
};

// out = norm(x). Grid: rows.
extern "C" __global__ void norm_rows(void *out /* [rows, width] */, const float *x /* [rows, width] */, const float *weight /* [width] */,
                                     const float *bias /* [width] or null */, u32 width, u32 kind, float eps, u32 dtype) {
    start_next_kernel();
    wait_for_previous_kernel();
    NormRow row(x + u64(blockIdx.x) * width, width);
    row.write(Rows{out, dtype}, u64(blockIdx.x) * width, weight, bias, row.scaling(kind, eps));
}

// x += scale * y, out = norm(x). Grid: rows.
extern "C" __global__ void add_norm(void *out /* [rows, width] */, float *x /* [rows, width] */, const float *y /* [rows, width] */,
                                    const float *weight /* [width] */, const float *bias /* [width] or null */, u32 width, u32 kind, float eps,
                                    float scale, u32 dtype) {
    start_next_kernel();
    wait_for_previous_kernel();
    NormRow row(x + u64(blockIdx.x) * width, width, y + u64(blockIdx.x) * width, scale);
    row.write(Rows{out, dtype}, u64(blockIdx.x) * width, weight, bias, row.scaling(kind, eps));
}

// x = norm(x) for heads of `dim` numbers, starting at `first`. Weight and bias have `own` heads:
// one for all heads, or one per head. Grid: rows, heads.
extern "C" __global__ void norm_heads(float *x /* [rows, stride] */, const float *weight /* [own, dim] */,
                                      const float *bias /* [own, dim] or null */, u32 first, u32 dim, u32 stride, u32 own, u32 kind, float eps) {
    start_next_kernel();
    wait_for_previous_kernel();
    float *head = x + u64(blockIdx.x) * stride + first + u64(blockIdx.y) * dim;
    u32 place = blockIdx.y % own * dim;
    NormRow row(head, dim);
    row.write(Rows{head, DTYPE_F32}, 0, weight + place, bias ? bias + place : bias, row.scaling(kind, eps));
}
