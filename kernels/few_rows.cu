// The matrix product of at most 16 rows, as in decode: out[r][n] = sum over k of x[r][k] * w[n][k],
// plus bias[n]. Or, with a gate, out[r][n] = glu(sum of row n of w, sum of row outs + n).
//
// Its time is that of reading w once, so as many loads as possible are in flight. Numbers of w go to
// registers without a detour through shared memory: tensor cores multiply w by x transposed, and
// the order of k in a chunk is permuted such that the 16 bytes that a lane loads are all its own
// operands. The warps of a block divide k, and their sums are added in the order of the warps.
//
// The kernels of matmul.cu sum in another order. Therefore a row has other bits than in a batch of
// more rows, and the batch-invariant mode does not use this kernel.
#include "activation.cuh"
#include "matmul.cuh"

#define FEW_OUTS 32  // per block
#define FEW_WARPS 16 // per block
#define FEW_AHEAD 2  // chunks of w that a warp loads ahead

// The numbers of type T in 16 bytes. Four consecutive ones are the operands of a lane in one
// multiplication by tensor cores.
template <class T> struct Sixteen {
    static constexpr u32 NUMBERS = 16 / sizeof(T), STEPS = NUMBERS / 4;

    // Returns the operand of two rows of w.
    static __device__ __forceinline__ void of_w(u32 (&a)[4], const uint4 &upper, const uint4 &lower, u32 step) {
        u32 up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
        a[0] = up[2 * step], a[1] = low[2 * step], a[2] = up[2 * step + 1], a[3] = low[2 * step + 1];
    }
    static __device__ __forceinline__ void of_x(u32 (&b)[2], float4 x) { b[0] = pack2<T>(x.x, x.y), b[1] = pack2<T>(x.z, x.w); }
};

// Bytes are widened to bf16 in pairs: the even ones and the odd ones.
template <> struct Sixteen<e4m3> {
    static constexpr u32 NUMBERS = 16, STEPS = 4;

    static __device__ __forceinline__ void of_w(u32 (&a)[4], const uint4 &upper, const uint4 &lower, u32 step) {
        u32 up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w}, wide[2];
        widen<e4m3>(wide, up[step]);
        a[0] = wide[0], a[2] = wide[1];
        widen<e4m3>(wide, low[step]);
        a[1] = wide[0], a[3] = wide[1];
    }
    static __device__ __forceinline__ void of_x(u32 (&b)[2], float4 x) { b[0] = pack2<bf16>(x.x, x.z), b[1] = pack2<bf16>(x.y, x.w); }
};

// Returns four numbers of a row of x, padded with zeros.
__device__ __forceinline__ float4 four_of_x(const float *row /* [cols] */, u32 k, u32 cols) {
    if (cols % 4 == 0) return k < cols ? *reinterpret_cast<const float4 *>(row + k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return make_float4(k < cols ? row[k] : 0.0f, k + 1 < cols ? row[k + 1] : 0.0f, k + 2 < cols ? row[k + 2] : 0.0f,
                       k + 3 < cols ? row[k + 3] : 0.0f);
}

// The rows of w of a block: two tiles of 16, of tensor cores. They are adjacent, or rows of the gate
// and the same rows of `up`.
struct RowsOfW {
    u32 first[2], end[2];
};

// A chunk of w of a warp: two times 16 bytes per lane of each row.
template <class T> struct ChunkOfW {
    static constexpr u32 NUMBERS = 2 * 4 * Sixteen<T>::NUMBERS; // of k
    uint4 numbers[2][2][2]; // [tile of 16 rows, half of its rows, half of the chunk]

    __device__ __forceinline__ void load(const Product<T> &p, const RowsOfW &rows, u32 first_k) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 k = first_k + i % 2 * (NUMBERS / 2) + lane_in_warp() % 4 * Sixteen<T>::NUMBERS;
            u32 row = min(rows.first[i / 4] + i / 2 % 2 * 8 + lane_in_warp() / 4, rows.end[i / 4] - 1); // rows beyond the last duplicate it
            numbers[i / 4][i / 2 % 2][i % 2] = k < p.pitch ? load_once(p.w + u64(row) * p.pitch + k) : make_uint4(0, 0, 0, 0);
        }
    }

    // sums += w * transposed x
    template <u32 TILES>
    __device__ __forceinline__ void multiply(float (&sums)[2][TILES][4], const Product<T> &p, u32 first_k) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 step = 0; step < Sixteen<T>::STEPS; step++) {
                u32 k = first_k + half * (NUMBERS / 2) + lane_in_warp() % 4 * Sixteen<T>::NUMBERS + step * 4;
                u32 b[TILES][2];
#pragma unroll
                for (u32 tile = 0; tile < TILES; tile++) {
                    u32 row = tile * 8 + lane_in_warp() / 4;
                    Sixteen<T>::of_x(b[tile], four_of_x(p.x + u64(row) * p.cols, row < p.rows ? k : p.cols, p.cols));
                }
#pragma unroll
                for (u32 high = 0; high < 2; high++) {
                    u32 a[4];
                    Sixteen<T>::of_w(a, numbers[high][0][half], numbers[high][1][half], step);
#pragma unroll
                    for (u32 tile = 0; tile < TILES; tile++) mma_16816<typename MultipliedAs<T>::Number>(sums[high][tile], a, b[tile]);
                }
            }
        }
    }
};

// The sums of a block, by warp.
template <u32 TILES> struct FewSums {
    float of_warps[FEW_WARPS][8 * TILES][FEW_OUTS + 1]; // one more, so that the rows of a lane are in different banks

    __device__ __forceinline__ void put(const float (&sums)[2][TILES][4]) {
#pragma unroll
        for (u32 i = 0; i < 8 * TILES; i++) {
            u32 row = i / 4 % TILES * 8 + lane_in_warp() % 4 * 2 + i % 2, out = i / 4 / TILES * 16 + i / 2 % 2 * 8 + lane_in_warp() / 4;
            of_warps[warp_in_block()][row][out] = sums[i / 4 / TILES][i / 4 % TILES][i % 4];
        }
    }

    __device__ __forceinline__ float total(u32 row, u32 out) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < FEW_WARPS; warp++) sum += of_warps[warp][row][out];
        return sum;
    }
};

// Computes the sums of at most 8 * TILES rows of x with these rows of w.
template <class T, u32 TILES>
__device__ __forceinline__ void sum_few(FewSums<TILES> &result, const Product<T> &p, const RowsOfW &rows) {
    constexpr u32 NUMBERS = ChunkOfW<T>::NUMBERS, STRIDE = FEW_WARPS * NUMBERS;
    float sums[2][TILES][4] = {};
    start_next_kernel(); // a block occupies a multiprocessor alone
    ChunkOfW<T> chunks[FEW_AHEAD];
#pragma unroll
    for (u32 i = 0; i < FEW_AHEAD; i++) chunks[i].load(p, rows, (i * FEW_WARPS + warp_in_block()) * NUMBERS);
    wait_for_previous_kernel(); // weights do not depend on it
    for (u32 first = warp_in_block() * NUMBERS; first < p.cols; first += FEW_AHEAD * STRIDE) {
#pragma unroll
        for (u32 i = 0; i < FEW_AHEAD; i++) {
            chunks[i].multiply(sums, p, first + i * STRIDE);
            chunks[i].load(p, rows, first + (i + FEW_AHEAD) * STRIDE);
        }
    }
    result.put(sums);
    __syncthreads();
}

template <class T> __device__ __forceinline__ float with_bias(const Product<T> &p, float sum, u32 out) {
    return fmaf(sum, scales_of(p, out).x, p.bias ? p.bias[out] : 0.0f);
}

template <class T, u32 TILES> __device__ __forceinline__ void multiply_few(const Product<T> &p) {
    __shared__ FewSums<TILES> sums;
    u32 first = blockIdx.x * FEW_OUTS;
    sum_few(sums, p, RowsOfW{{first, first + 16}, {p.outs, p.outs}});
    for (u32 i = threadIdx.x; i < p.rows * FEW_OUTS; i += FEW_WARPS * WARP) {
        u32 row = i / FEW_OUTS, out = i % FEW_OUTS;
        if (first + out < p.outs) p.out[u64(row) * p.stride + first + out] = with_bias(p, sums.total(row, out), first + out);
    }
}

template <class T, u32 TILES> __device__ __forceinline__ void multiply_few_gated(const Product<T> &p, Glu by) {
    __shared__ FewSums<TILES> sums;
    u32 first = blockIdx.x * 16, width = p.outs / 2;
    sum_few(sums, p, RowsOfW{{first, width + first}, {width, p.outs}});
    for (u32 i = threadIdx.x; i < p.rows * 16; i += FEW_WARPS * WARP) {
        u32 row = i / 16, out = i % 16;
        if (first + out >= width) continue;
        float gate = with_bias(p, sums.total(row, out), first + out), up = with_bias(p, sums.total(row, 16 + out), width + first + out);
        p.out[u64(row) * p.stride + first + out] = gated(by, gate, up);
    }
}

// Grid: tiles of 32 outs, or of 16 of each half of them with a gate. 512 threads.
#define FEW_ROWS(name, T, TILES)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(FEW_WARPS *WARP)                                                                          \
        few_rows_##name(float *out /* [rows, stride] */, const float *x /* [rows, cols] */, const T *w /* a matrix */,                     \
                        const float *bias /* [outs] or null */, u32 rows, u32 outs, u32 cols, u32 stride) {                                \
        multiply_few<T, TILES>(Product<T>{out, x, w, bias, rows, outs, cols, pitch_of<T>(cols), stride});                                  \
    }                                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(FEW_WARPS *WARP)                                                                          \
        few_rows_gated_##name(float *out /* [rows, outs / 2] */, const float *x /* [rows, cols] */, const T *w /* a matrix */,             \
                              const float *bias /* [outs] or null */, u32 rows, u32 outs, u32 cols, u32 act, float alpha, float limit) {   \
        multiply_few_gated<T, TILES>(Product<T>{out, x, w, bias, rows, outs, cols, pitch_of<T>(cols), outs / 2}, Glu{act, alpha, limit});  \
    }

FEW_ROWS(bf16_8, bf16, 1)
FEW_ROWS(bf16_16, bf16, 2)
FEW_ROWS(f16_8, f16, 1)
FEW_ROWS(f16_16, f16, 2)
FEW_ROWS(fp8_8, e4m3, 1)
FEW_ROWS(fp8_16, e4m3, 2)
