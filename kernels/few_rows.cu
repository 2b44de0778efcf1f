// The matrix product of at most 16 rows, as in decode: out[r][n] = sum over k of x[r][k] * w[n][k],
// plus bias[n]. Or, with a gate, out[r][n] = glu(sum of row n of w, sum of row outs + n). A product can
// begin with an RMS norm of x, and can end with the addition to a residual stream.
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
    static __device__ __forceinline__ void of_x(u32 (&b)[2], uint2 x) { b[0] = x.x, b[1] = x.y; }
};

// Bytes are widened to bf16 in pairs: the even ones and the odd ones.
template <class T> struct SixteenBytes {
    static constexpr u32 NUMBERS = 16, STEPS = 4;

    static __device__ __forceinline__ void of_w(u32 (&a)[4], const uint4 &upper, const uint4 &lower, u32 step) {
        u32 up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w}, wide[2];
        widen<T>(wide, up[step]);
        a[0] = wide[0], a[2] = wide[1];
        widen<T>(wide, low[step]);
        a[1] = wide[0], a[3] = wide[1];
    }
    static __device__ __forceinline__ void of_x(u32 (&b)[2], uint2 x) { b[0] = firsts(x), b[1] = seconds(x); }
};
template <> struct Sixteen<e4m3> : SixteenBytes<e4m3> {};
template <> struct Sixteen<signed char> : SixteenBytes<signed char> {};

// The rows of w of a block: two tiles of 16, of tensor cores. They are adjacent, or rows of the gate
// and the same rows of `up`.
struct RowsOfW {
    u32 first[2], end[2];
};

// What a lane reads of w, in units of 16 bytes: its places in four rows, each half of a tile.
template <class T> struct LaneOfW {
    static constexpr u32 EACH = Sixteen<T>::NUMBERS, CHUNK = 8 * EACH; // numbers of a row that a lane reads at once, and a warp
    const uint4 *w;
    u32 places[2][2];
    u32 units; // of a row

    __device__ __forceinline__ LaneOfW(const Product<T> &p, const RowsOfW &of_block)
        : w(reinterpret_cast<const uint4 *>(p.w)), units(p.pitch / EACH) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 row = min(of_block.first[i / 2] + i % 2 * 8 + lane_in_warp() / 4, of_block.end[i / 2] - 1); // beyond the end, the last row again
            places[i / 2][i % 2] = row * units + lane_in_warp() % 4;
        }
    }

    // Loads a chunk. If it is not WHOLE, zeros are behind the end of the rows.
    template <bool WHOLE> __device__ __forceinline__ void load(uint4 (&numbers)[2][2][2], u32 chunk) const {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 unit = chunk * 8 + i % 2 * 4;
            bool valid = WHOLE || unit + lane_in_warp() % 4 < units;
            numbers[i / 4][i / 2 % 2][i % 2] = valid ? load_once(w + (places[i / 4][i / 2 % 2] + unit)) : make_uint4(0, 0, 0, 0);
        }
    }
};

// Returns numbers k to k + 3 of a row in f32, as their bits. If they are not WHOLE, zeros are behind its
// end.
template <bool WHOLE> __device__ __forceinline__ uint4 four_in_f32(const float *row, u32 k, u32 cols) {
    if constexpr (WHOLE) return *reinterpret_cast<const uint4 *>(row + k);
    else
        return make_uint4(k < cols ? float_to_bits(row[k]) : 0, k + 1 < cols ? float_to_bits(row[k + 1]) : 0,
                          k + 2 < cols ? float_to_bits(row[k + 2]) : 0, k + 3 < cols ? float_to_bits(row[k + 3]) : 0);
}

// The RMS norm of rows in f32 before the product: x * (weight + offset) / sqrt(mean of x^2 + eps). The
// product multiplies x * (weight + offset), and divides the sums by the root. The blocks read all rows
// for that, so it is for very few. Without a weight, x is multiplied as it is.
struct NormBefore {
    const float *weight; // [cols] or null
    float offset, eps;

    __device__ __forceinline__ NormBefore(const float *weight, float offset, float eps)
        : weight(weight), offset(weight ? offset : 1.0f), eps(eps) {}

    // Returns numbers k to k + 3 of a row, times their weights. squares += the sum of their squares.
    template <bool WHOLE> __device__ __forceinline__ uint4 weighted(uint4 x, u32 k, u32 cols, float &squares) const {
        uint4 weights = weight ? four_in_f32<WHOLE>(weight, k, cols) : make_uint4(0, 0, 0, 0);
        return make_uint4(weighted(x.x, weights.x, squares), weighted(x.y, weights.y, squares), weighted(x.z, weights.z, squares),
                          weighted(x.w, weights.w, squares));
    }

    __device__ __forceinline__ u32 weighted(u32 bits, u32 weight, float &squares) const {
        float x = bits_to_float(bits);
        squares = fmaf(x, x, squares);
        return float_to_bits(x * (bits_to_float(weight) + offset));
    }
};

// Whether products with rows in X can begin with a norm: numbers before their norm are in the range of
// X, and the accumulated squares of a lane are those of one row.
template <class X, u32 TILES> struct TakesNorm { static constexpr bool VALUE = false; };
template <> struct TakesNorm<bf16, 1> { static constexpr bool VALUE = true; };

// Returns numbers k to k + 7 of a row of x, rounded. If they are not WHOLE, zeros are behind its end.
template <bool WHOLE, bool ROUNDED, u32 TILES, class X>
__device__ __forceinline__ uint4 eight_of_x(const RowsOfX<X> &x, const NormBefore &norm, u64 row, u32 k, u32 cols, float &squares) {
    if constexpr (ROUNDED) {
        return WHOLE || k < cols ? *reinterpret_cast<const uint4 *>(x.as_rounded() + row * cols + k) : make_uint4(0, 0, 0, 0);
    } else {
        uint2 pairs[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++, k += 4) {
            uint4 four = four_in_f32<WHOLE>(x.floats() + row * cols, k, cols);
            if constexpr (TakesNorm<X, TILES>::VALUE) four = norm.weighted<WHOLE>(four, k, cols, squares);
            pairs[i] = rounded_4<X>(four);
        }
        return make_uint4(pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y);
    }
}

// The sums of a lane.
template <u32 TILES> struct LaneSums {
    float products[2][TILES][4] = {};
    float squares = 0.0f; // of the numbers of x that the lane has read
};

// sums += a chunk of w * transposed x. The operands of x are loaded first, as many as registers can
// hold.
template <bool WHOLE, bool ROUNDED, class T, u32 TILES>
__device__ __forceinline__ void add_chunk(LaneSums<TILES> &sums, const uint4 (&numbers)[2][2][2], const Product<T> &p, const NormBefore &norm,
                                          u32 chunk) {
    constexpr u32 STEPS = Sixteen<T>::STEPS, HELD = TILES * STEPS > 4 ? STEPS : 2 * STEPS; // both even
#pragma unroll
    for (u32 first = 0; first < 2 * STEPS; first += HELD) {
        u32 b[TILES][HELD][2];
#pragma unroll
        for (u32 i = 0; i < HELD / 2 * TILES; i++) {
            u32 step = first + i / TILES * 2, tile = i % TILES, row = tile * 8 + lane_in_warp() / 4;
            u32 k = chunk * LaneOfW<T>::CHUNK + (step / STEPS * 4 + lane_in_warp() % 4) * LaneOfW<T>::EACH + step % STEPS * 4;
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (row < p.rows) eight = eight_of_x<WHOLE, ROUNDED, TILES>(p.x, norm, row, k, p.cols, sums.squares);
            Sixteen<T>::of_x(b[tile][step - first], make_uint2(eight.x, eight.y));
            Sixteen<T>::of_x(b[tile][step - first + 1], make_uint2(eight.z, eight.w));
        }
#pragma unroll
        for (u32 i = 0; i < 2 * HELD; i++) {
            u32 step = first + i / 2, high = i % 2, a[4];
            Sixteen<T>::of_w(a, numbers[high][0][step / STEPS], numbers[high][1][step / STEPS], step % STEPS);
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++)
                mma_16816<typename MultipliedAs<T>::Number>(sums.products[high][tile], a, b[tile][step - first]);
        }
    }
}

// The sums of a block, by warp.
template <u32 TILES> struct FewSums {
    float of_warps[FEW_WARPS][8 * TILES][FEW_OUTS + 1]; // one more, so that the rows of a lane are in different banks
    float squares[FEW_WARPS][8];                        // of the rows of the first tile

    __device__ __forceinline__ void put(const LaneSums<TILES> &sums) {
#pragma unroll
        for (u32 i = 0; i < 8 * TILES; i++) {
            u32 row = i / 4 % TILES * 8 + lane_in_warp() % 4 * 2 + i % 2, out = i / 4 / TILES * 16 + i / 2 % 2 * 8 + lane_in_warp() / 4;
            of_warps[warp_in_block()][row][out] = sums.products[i / 4 / TILES][i / 4 % TILES][i % 4];
        }
        // Four lanes have read a row.
        float of_row = sums.squares + __shfl_xor_sync(ALL_LANES, sums.squares, 1);
        of_row += __shfl_xor_sync(ALL_LANES, of_row, 2);
        if (lane_in_warp() % 4 == 0) squares[warp_in_block()][lane_in_warp() / 4] = of_row;
    }

    __device__ __forceinline__ float total(u32 row, u32 out) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < FEW_WARPS; warp++) sum += of_warps[warp][row][out];
        return sum;
    }

    // Returns what the sums of a row are multiplied by.
    __device__ __forceinline__ float factor(const NormBefore &norm, u32 row, u32 cols) const {
        if (!norm.weight) return 1.0f;
        float sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < FEW_WARPS; warp++) sum += squares[warp][row];
        return 1.0f / sqrtf(sum / float(cols) + norm.eps);
    }
};

// Adds all chunks of a warp, of which the first ones are in `ahead`. `whole` is the number of chunks in
// which rows of x are aligned.
template <bool ROUNDED, class T, u32 TILES>
__device__ __forceinline__ void add_chunks(LaneSums<TILES> &sums, uint4 (&ahead)[FEW_AHEAD][2][2][2], const LaneOfW<T> &lane,
                                           const Product<T> &p, const NormBefore &norm, u32 whole) {
    u32 warp = warp_in_block();
    for (u32 first = warp; first < whole; first += FEW_AHEAD * FEW_WARPS) {
#pragma unroll
        for (u32 i = 0; i < FEW_AHEAD; i++) {
            u32 chunk = first + i * FEW_WARPS, next = chunk + FEW_AHEAD * FEW_WARPS;
            if (chunk < whole) add_chunk<true, ROUNDED>(sums, ahead[i], p, norm, chunk);
            if (next < whole) lane.template load<true>(ahead[i], next);
        }
    }
    for (u32 chunk = whole + warp; chunk * LaneOfW<T>::CHUNK < p.cols; chunk += FEW_WARPS) {
        lane.template load<false>(ahead[0], chunk);
        add_chunk<false, ROUNDED>(sums, ahead[0], p, norm, chunk);
    }
}

// Computes the sums of at most 8 * TILES rows of x with these rows of w.
template <class T, u32 TILES>
__device__ __forceinline__ void sum_few(FewSums<TILES> &result, const Product<T> &p, const NormBefore &norm, const RowsOfW &rows) {
    start_next_kernel(); // a block occupies a multiprocessor alone
    LaneSums<TILES> sums;
    uint4 ahead[FEW_AHEAD][2][2][2]; // [tile of 16 rows, half of its rows, half of the chunk]
    LaneOfW<T> lane(p, rows);
    u32 whole = p.cols % 4 == 0 ? p.cols / LaneOfW<T>::CHUNK : 0;
#pragma unroll
    for (u32 i = 0; i < FEW_AHEAD; i++)
        if (warp_in_block() + i * FEW_WARPS < whole) lane.template load<true>(ahead[i], warp_in_block() + i * FEW_WARPS);
    wait_for_previous_kernel(); // weights do not depend on it
    if (p.x.is_rounded()) add_chunks<true>(sums, ahead, lane, p, norm, whole);
    else add_chunks<false>(sums, ahead, lane, p, norm, whole);
    result.put(sums);
    __syncthreads();
}

template <class T> __device__ __forceinline__ float with_bias(const Product<T> &p, float sum, u32 out) {
    return fmaf(sum, scales_of(p, out).x, p.bias ? p.bias[out] : 0.0f);
}

// What a product does with its numbers: out = y, or out += scale * y.
struct Addition {
    u32 adds;
    float scale;

    __device__ __forceinline__ void put(float *out, float y) const { *out = adds ? *out + scale * y : y; }
};

template <class T, u32 TILES> __device__ __forceinline__ void multiply_few(const Product<T> &p, const NormBefore &norm, Addition to) {
    __shared__ FewSums<TILES> sums;
    u32 first = blockIdx.x * FEW_OUTS;
    sum_few(sums, p, norm, RowsOfW{{first, first + 16}, {p.outs, p.outs}});
    for (u32 i = threadIdx.x; i < p.rows * FEW_OUTS; i += FEW_WARPS * WARP) {
        u32 row = i / FEW_OUTS, out = i % FEW_OUTS;
        if (first + out >= p.outs) continue;
        float sum = sums.total(row, out) * sums.factor(norm, row, p.cols);
        to.put(p.out + (u64(row) * p.stride + first + out), with_bias(p, sum, first + out));
    }
}

template <class T, u32 TILES>
__device__ __forceinline__ void multiply_few_gated(const Product<T> &p, const NormBefore &norm, Rows result, Glu by) {
    __shared__ FewSums<TILES> sums;
    u32 first = blockIdx.x * 16, width = p.outs / 2;
    sum_few(sums, p, norm, RowsOfW{{first, width + first}, {width, p.outs}});
    for (u32 i = threadIdx.x; i < p.rows * 16; i += FEW_WARPS * WARP) {
        u32 row = i / 16, out = i % 16;
        if (first + out >= width) continue;
        float factor = sums.factor(norm, row, p.cols), gate = with_bias(p, sums.total(row, out) * factor, first + out);
        float up = with_bias(p, sums.total(row, 16 + out) * factor, width + first + out);
        result.put(u64(row) * width + first + out, gated(by, gate, up));
    }
}

// x is in f32, or `rounded`. With a weight of a norm, it is in f32, for at most 8 rows and not in f16.
// Gated results are in `dtype`. Grid: tiles of 32 outs, or of 16 of each half of them with a gate. 512
// threads.
#define FEW_ROWS(name, T, TILES)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(FEW_WARPS *WARP)                                                                          \
        few_rows_##name(float *out /* [rows, stride] */, const void *x /* [rows, cols] */, const T *w /* a matrix */,                      \
                        const float *bias /* [outs] or null */, const float *norm /* [cols] or null */, u32 rows, u32 outs, u32 cols,      \
                        u32 stride, u32 rounded, float offset, float eps, u32 adds, float scale) {                                         \
        Product<T> product = {out, {x, rounded}, w, bias, rows, outs, cols, pitch_of<T>(cols), stride};                                    \
        multiply_few<T, TILES>(product, NormBefore(norm, offset, eps), Addition{adds, scale});                                             \
    }                                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(FEW_WARPS *WARP)                                                                          \
        few_rows_gated_##name(void *out /* [rows, outs / 2] */, const void *x /* [rows, cols] */, const T *w /* a matrix */,               \
                              const float *bias /* [outs] or null */, const float *norm /* [cols] or null */, u32 rows, u32 outs,          \
                              u32 cols, u32 rounded, float offset, float eps, u32 act, float alpha, float limit, u32 dtype) {              \
        Product<T> product = {nullptr, {x, rounded}, w, bias, rows, outs, cols, pitch_of<T>(cols), 0};                                     \
        multiply_few_gated<T, TILES>(product, NormBefore(norm, offset, eps), Rows{out, dtype}, Glu{act, alpha, limit});                    \
    }

FEW_ROWS(bf16_8, bf16, 1)
FEW_ROWS(bf16_16, bf16, 2)
FEW_ROWS(f16_8, f16, 1)
FEW_ROWS(f16_16, f16, 2)
FEW_ROWS(fp8_8, e4m3, 1)
FEW_ROWS(fp8_16, e4m3, 2)
FEW_ROWS(int8_8, signed char, 1)
FEW_ROWS(int8_16, signed char, 2)
