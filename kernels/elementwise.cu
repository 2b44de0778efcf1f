// Elementwise ops: sums, activations, gates, soft caps, and row copies.
#include "activation.cuh"

// Distributes `count` numbers over the threads of a one-dimensional grid (grid-stride loop).
#define FOR_EACH(i, count) \
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x, end_ = (count); i < end_; i += u64(gridDim.x) * blockDim.x)

// x = act(x)
extern "C" __global__ void activate(float *x /* [count] */, u64 count, u32 act) {
    start_next_kernel();
    wait_for_previous_kernel();
    FOR_EACH(i, count) x[i] = activated(act, x[i]);
}

// Defines row and column of a thread for data in rows of `width`. Threads beyond the last column
// return. Grid: rows, columns / blockDim.
#define ROW_AND_COLUMN(width)                                                      \
    u64 row = blockIdx.x, column = u64(blockIdx.y) * blockDim.x + threadIdx.x; \
    if (column >= (width)) return

// out = glu(gate, up)
extern "C" __global__ void gate(void *out /* [rows, width] in `dtype` */, const float *x /* [rows, gate and up, width] */, u32 width, u32 act,
                                float alpha, float limit, u32 dtype) {
    start_next_kernel();
    wait_for_previous_kernel();
    ROW_AND_COLUMN(width);
    const float *both = x + row * 2 * width + column;
    Rows{out, dtype}.put(row * width + column, gated(Glu{act, alpha, limit}, both[0], both[width]));
}

// x += scale * y
extern "C" __global__ void add(float *x /* [count] */, const float *y /* [count] */, u64 count, float scale) {
    start_next_kernel();
    wait_for_previous_kernel();
    FOR_EACH(i, count) x[i] += scale * y[i];
}

// x = the sum of the numbers of all ranks, added in their order. Those of this rank are in x.
extern "C" __global__ void sum_ranks(float *x /* [count] */, const float *received /* [ranks, pitch] */, u64 count, u64 pitch, u32 ranks,
                                     u32 own) {
    start_next_kernel();
    wait_for_previous_kernel();
    FOR_EACH(i, count) {
        float sum = own == 0 ? x[i] : received[i];
        for (u32 rank = 1; rank < ranks; rank++) sum += rank == own ? x[i] : received[rank * pitch + i];
        x[i] = sum;
    }
}

// x += sigmoid(gate of the row) * y
extern "C" __global__ void add_gated(float *x /* [rows, width] */, const float *y /* [rows, width] */, const float *gates /* [rows] */, u32 width) {
    start_next_kernel();
    wait_for_previous_kernel();
    ROW_AND_COLUMN(width);
    x[row * width + column] += sigmoid(gates[row]) * y[row * width + column];
}

// x = cap * tanh(x * scale / cap), or x * scale if the cap is 0
extern "C" __global__ void scale_and_cap(float *x /* [count] */, u64 count, float scale, float cap) {
    start_next_kernel();
    wait_for_previous_kernel();
    FOR_EACH(i, count) {
        float scaled = x[i] * scale;
        x[i] = cap > 0.0f ? cap * tanhf(scaled / cap) : scaled;
    }
}

// out[h][r] = strip h of row r. Strip h has `dim` numbers, starting at first + h * pitch; rows are
// `stride` apart. Grid: strips * rows, columns.
extern "C" __global__ void split_strips(float *out /* [strips, rows, dim] */, const float *x /* [rows, stride] */, u32 rows, u32 first, u32 dim,
                                        u32 pitch, u32 stride) {
    start_next_kernel();
    wait_for_previous_kernel();
    ROW_AND_COLUMN(dim);
    u32 strip = blockIdx.x / rows;
    out[row * dim + column] = x[u64(blockIdx.x % rows) * stride + first + u64(strip) * pitch + column];
}

// strip h of row r = x[h][r]. Grid: strips * rows, columns.
extern "C" __global__ void join_strips(float *out /* [rows, stride] */, const float *x /* [strips, rows, dim] */, u32 rows, u32 first, u32 dim,
                                       u32 pitch, u32 stride) {
    start_next_kernel();
    wait_for_previous_kernel();
    ROW_AND_COLUMN(dim);
    u32 strip = blockIdx.x / rows;
    out[u64(blockIdx.x % rows) * stride + first + u64(strip) * pitch + column] = x[row * dim + column];
}

// out[i] = x[wanted[i]]
extern "C" __global__ void gather(float *out /* [count, width] */, const float *x /* [rows, width] */, const u32 *wanted /* [count] */, u32 width) {
    start_next_kernel();
    wait_for_previous_kernel();
    ROW_AND_COLUMN(width);
    out[row * width + column] = x[u64(wanted[row]) * width + column];
}

// out[r] = table[tokens[r] - first] * scale, or 0 for a token that is not among the `count` of the table
template <class T>
__device__ void embed(float *out, const T *table, const u32 *tokens, u32 first, u32 count, u32 cols, u32 pitch, float scale) {
    ROW_AND_COLUMN(cols);
    u32 place = tokens[row] - first; // too large for a token below `first`
    out[row * cols + column] = place < count ? to_float(table[u64(place) * pitch + column]) * scale : 0.0f;
}

// x[r] += table[positions[r] + offset]
template <class T> __device__ void add_positions(float *x, const T *table, const u32 *positions, u32 cols, u32 pitch, u32 offset) {
    ROW_AND_COLUMN(cols);
    x[row * cols + column] += to_float(table[(u64(positions[row]) + offset) * pitch + column]);
}

#define TABLES(name, T)                                                                                                                         \
    extern "C" __global__ void embed_##name(float *out /* [rows, cols] */, const T *table /* [count, pitch] */, const u32 *tokens /* [rows] */,  \
                                            u32 first, u32 count, u32 cols, u32 pitch, float scale) {                                           \
        start_next_kernel();                                                                                                                    \
        wait_for_previous_kernel();                                                                                                             \
        embed(out, table, tokens, first, count, cols, pitch, scale);                                                                            \
    }                                                                                                                                           \
    extern "C" __global__ void add_positions_##name(float *x /* [rows, cols] */, const T *table /* [positions, pitch] */,                       \
                                                    const u32 *positions /* [rows] */, u32 cols, u32 pitch, u32 offset) {                       \
        start_next_kernel();                                                                                                                    \
        wait_for_previous_kernel();                                                                                                             \
        add_positions(x, table, positions, cols, pitch, offset);                                                                                \
    }

// embed for a table in int8, whose rows are followed by their scales
extern "C" __global__ void embed_int8(float *out /* [rows, cols] */, const signed char *table /* [count, pitch], then [count] f32 */,
                                      const u32 *tokens /* [rows] */, u32 first, u32 count, u32 cols, u32 pitch, float scale) {
    start_next_kernel();
    wait_for_previous_kernel();
    ROW_AND_COLUMN(cols);
    u32 place = tokens[row] - first;
    const float *scales = reinterpret_cast<const float *>(table + u64(count) * pitch);
    out[row * cols + column] = place < count ? scales[place] * to_float(table[u64(place) * pitch + column]) * scale : 0.0f;
}

TABLES(f32, float)
TABLES(f16, f16)
TABLES(bf16, bf16)
