// The matrix product: out[r][n] = sum over k of x[r][k] * w[n][k], plus bias[n].
//
// A block computes a tile of rows and outs in steps along k. Steps of w are copied to shared memory
// in their storage type, several stages ahead, so the time of a product of few rows is that of
// reading w once. x is one step ahead in registers, and is converted to the type of w when it is
// stored to shared memory. If w is in fp8 or int8, x is converted to bf16, which has the range of f32,
// and w is converted to bf16 before the tensor cores multiply it. bf16 has all numbers of both. The
// rows of such a matrix are followed by one f32 scale per row, which multiplies the finished sums.
// After the last k both operands are zeros, which do not change the sums.
#include "matmul.cuh"

// Few rows: small tiles, so that all multiprocessors read weights, with 40 KiB in flight for each.
typedef MatmulTile<16, 32, 16, 8, 256, 6> MatmulTile16;
typedef MatmulTile<16, 32, 16, 8, 512, 6> MatmulTile16OfBytes; // the same number of bytes of weights
// 17 to 32 rows: as many blocks, with 32 KiB in flight for each. A warp widens bytes of w once for all rows.
typedef MatmulTile<32, 32, 32, 8, 256, 5> MatmulTile32;
typedef MatmulTile<32, 32, 32, 8, 512, 5> MatmulTile32OfBytes;
typedef MatmulTile<64, 64, 32, 32, 128, 4> MatmulTile64;
// Many rows: as many sums per loaded number as registers can hold.
typedef MatmulTile<128, 128, 64, 64, 64, 4> MatmulTile128;

// Starts the copy of a step of w to shared memory, padded with zeros.
template <class Tile, class T>
__device__ __forceinline__ void copy_w(T *to /* [OUTS, W_PITCH] */, const Product<T> &p, u32 first_out, u32 first_k) {
    typedef StepOf<Tile, T> Step;
    constexpr u32 NUMBERS = 16 / sizeof(T), ACROSS = Step::NUMBERS / NUMBERS, DOWN = Tile::THREADS / ACROSS;
    u32 across = threadIdx.x % ACROSS * NUMBERS, down = threadIdx.x / ACROSS;
    const T *from = p.w + u64(first_out + down) * p.pitch + first_k + across;
#pragma unroll
    for (u32 i = 0; i < Tile::OUTS / DOWN; i++) {
        u32 out = down + i * DOWN;
        bool valid = first_out + out < p.outs && first_k + across < p.pitch;
        copy_async_16(to + out * Step::W_PITCH + across, valid ? from + i * DOWN * p.pitch : p.w, valid);
    }
}

// sums += x * w over a step, by a warp on tensor cores.
template <class Tile, class T>
__device__ __forceinline__ void add_step(float (&sums)[Tile::HIGH][Tile::WIDE][4], const T *x /* [WARP_ROWS, X_PITCH] */,
                                         const T *w /* [WARP_OUTS, W_PITCH] */) {
    constexpr u32 STEP = StepOf<Tile, T>::NUMBERS, PITCH = StepOf<Tile, T>::X_PITCH; // of both
    const T *x_lane = x + lane_in_warp() % 16 * PITCH + lane_in_warp() / 16 * 8; // 16 rows of 16 numbers
    const T *w_lane = w + lane_in_warp() % 8 * PITCH + lane_in_warp() / 8 * 8;   // 8 rows of 32 numbers
#pragma unroll
    for (u32 k = 0; k < STEP; k += 32) {
        u32 a[2][Tile::HIGH][4];
#pragma unroll
        for (u32 i = 0; i < 2 * Tile::HIGH; i++) ldmatrix_x4(a[i % 2][i / 2], x_lane + i / 2 * 16 * PITCH + k + i % 2 * 16);
#pragma unroll
        for (u32 wide = 0; wide < Tile::WIDE; wide++) {
            u32 b[4];
            ldmatrix_x4(b, w_lane + wide * 8 * PITCH + k);
            u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
            for (u32 high = 0; high < Tile::HIGH; high++) mma_16816<T>(sums[high][wide], a[0][high], first);
#pragma unroll
            for (u32 high = 0; high < Tile::HIGH; high++) mma_16816<T>(sums[high][wide], a[1][high], second);
        }
    }
}

// add_step for w in bytes: each 16-bit element of ldmatrix holds two numbers.
template <class Tile, class T>
__device__ __forceinline__ void add_step_of_bytes(float (&sums)[Tile::HIGH][Tile::WIDE][4], const bf16 *x /* [WARP_ROWS, X_PITCH] */,
                                                  const T *w /* [WARP_OUTS, W_PITCH] */) {
    typedef StepOf<Tile, T> Step;
    // The four matrices of an ldmatrix, each 8 outs of 16 numbers: WIDE of them along the outs,
    // DEEP along k.
    constexpr u32 WIDE = Tile::WIDE % 2 == 0 ? 2 : 1, DEEP = 4 / WIDE;
    const bf16 *x_lane = x + lane_in_warp() % 16 * Step::X_PITCH + lane_in_warp() / 16 * 8;
    const T *w_lane = w + (lane_in_warp() / 8 / DEEP * 8 + lane_in_warp() % 8) * Step::W_PITCH + lane_in_warp() / 8 % DEEP * 16;
#pragma unroll
    for (u32 k = 0; k < Step::NUMBERS; k += 16 * DEEP) {
        u32 a[DEEP][Tile::HIGH][4];
#pragma unroll
        for (u32 i = 0; i < DEEP * Tile::HIGH; i++)
            ldmatrix_x4(a[i % DEEP][i / DEEP], x_lane + i / DEEP * 16 * Step::X_PITCH + k + i % DEEP * 16);
#pragma unroll
        for (u32 wide = 0; wide < Tile::WIDE; wide += WIDE) {
            u32 bytes[4];
            ldmatrix_x4(bytes, w_lane + wide * 8 * Step::W_PITCH + k);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 b[2];
                widen<T>(b, bytes[i]);
#pragma unroll
                for (u32 high = 0; high < Tile::HIGH; high++) mma_16816<bf16>(sums[high][wide + i / DEEP], a[i % DEEP][high], b);
            }
        }
    }
}

// Adds four products to a sum, in order.
__device__ __forceinline__ float add_dot(float sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

// add_step in f32, in which each lane computes the sums of its tensor core fragment.
template <class Tile>
__device__ __forceinline__ void add_step_f32(float (&sums)[Tile::HIGH][Tile::WIDE][4], const float *x /* [WARP_ROWS, X_PITCH] */,
                                             const float *w /* [WARP_OUTS, W_PITCH] */) {
    constexpr u32 STEP = StepOf<Tile, float>::NUMBERS, PITCH = StepOf<Tile, float>::X_PITCH; // of both
    const float *x_lane = x + lane_in_warp() / 4 * PITCH;
    const float *w_lane = w + lane_in_warp() % 4 * 2 * PITCH;
    for (u32 k = 0; k < STEP; k += 4) {
        float4 a[Tile::HIGH][2];
#pragma unroll
        for (u32 i = 0; i < 2 * Tile::HIGH; i++) a[i / 2][i % 2] = *reinterpret_cast<const float4 *>(x_lane + i * 8 * PITCH + k);
#pragma unroll
        for (u32 i = 0; i < 2 * Tile::WIDE; i++) {
            float4 b = *reinterpret_cast<const float4 *>(w_lane + (i / 2 * 8 + i % 2) * PITCH + k);
#pragma unroll
            for (u32 high = 0; high < Tile::HIGH; high++) {
                float(&sum)[4] = sums[high][i / 2];
                sum[i % 2] = add_dot(sum[i % 2], a[high][0], b);
                sum[2 + i % 2] = add_dot(sum[2 + i % 2], a[high][1], b);
            }
        }
    }
}

template <class Tile, class T> __device__ __forceinline__ void multiply(const Product<T> &p, TilePosition tile) {
    typedef StepOf<Tile, T> Step;
    typedef typename Step::X X;
    constexpr u32 STEP = Step::NUMBERS, STAGES = Tile::STAGES;
    DYNAMIC_SHARED(T, w);                                               // [STAGES, OUTS, W_PITCH]
    X *x = reinterpret_cast<X *>(w + STAGES * Tile::OUTS * Step::W_PITCH); // [2, ROWS, X_PITCH], double buffered
    u32 steps = div_ceil(p.cols, STEP);
    u32 warp_row = warp_in_block() / (Tile::OUTS / Tile::WARP_OUTS) * Tile::WARP_ROWS;
    u32 warp_out = warp_in_block() % (Tile::OUTS / Tile::WARP_OUTS) * Tile::WARP_OUTS;
    float sums[Tile::HIGH][Tile::WIDE][4] = {};
    PartOfX<Tile, T> x_part;

    auto begin_w = [&](u32 step) {
        if (step < steps) copy_w<Tile>(w + step % STAGES * Tile::OUTS * Step::W_PITCH, p, tile.out, step * STEP);
        copy_async_commit(); // empty at the end, so that the number of groups to wait for is constant
    };
    for (u32 step = 0; step < STAGES - 1; step++) begin_w(step);
    wait_for_previous_kernel(); // weights do not depend on it
    x_part.load(p, tile.row, 0);
    for (u32 step = 0; step < steps; step++) {
        X *x_step = x + step % 2 * Tile::ROWS * Step::X_PITCH;
        x_part.store(p, x_step);
        x_part.load(p, tile.row, (step + 1) * STEP);
        copy_async_wait<STAGES - 2>();
        __syncthreads(); // the step has arrived, and all warps have finished with the last one, whose memory is reused
        begin_w(step + STAGES - 1);
        const X *x_warp = x_step + warp_row * Step::X_PITCH;
        const T *w_warp = w + (step % STAGES * Tile::OUTS + warp_out) * Step::W_PITCH;
        if constexpr (sizeof(T) == sizeof(float)) add_step_f32<Tile>(sums, x_warp, w_warp);
        else if constexpr (sizeof(T) == 1) add_step_of_bytes<Tile>(sums, x_warp, w_warp);
        else add_step<Tile>(sums, x_warp, w_warp);
    }
    write_sums<Tile>(sums, p, tile.row + warp_row, tile.out + warp_out);
}

// Without `ws`: one product of all rows with `w`, and with `bias` unless it is null. With `ws`: one
// product per blockIdx.z, with the matrix ws[z] and the bias biases[z], if there is one. Its rows
// are strip z of x, or, with `starts`, rows starts[z] to starts[z + 1] of x, which belong to expert
// z. `rows` is the number of rows of the product or of a strip. x is in f32, or `rounded`. Grid: tiles of outs, tiles of rows
// (for experts: of the maximum number of rows), products. Dynamic shared memory: steps of STAGES *
// OUTS rows of w, and of 2 * ROWS rows of x.
#define MATMUL(name, T, Tile)                                                           \
    extern "C" __global__ void __launch_bounds__(Tile::THREADS) matmul_##name(          \
        float *out /* [rows, stride], [strips, rows, stride] or [routes, stride] */,    \
        const void *x /* [rows, cols], [strips, rows, cols] or [routes, cols] */,       \
        const T *w /* a matrix; null if there are ws */,                                        \
        const float *bias /* [outs] or null */,                                         \
        const T *const *ws /* [products] matrices, or null */,                       \
        const float *const *biases /* [products] of [outs] or null; or null */,         \
        const u32 *starts /* [products + 1] or null */, u32 rows, u32 outs, u32 cols, u32 stride, u32 rounded) { \
        Product<T> all = {out, {x, rounded}, w, bias, rows, outs, cols, pitch_of<T>(cols), stride};        \
        if (starts) wait_for_previous_kernel();                                         \
        Product<T> own = product_of_block(all, ws, biases, starts);                     \
        TilePosition tile = tile_of_block<Tile>(own.rows);                             \
        if (tile.valid) multiply<Tile>(own, tile);                                    \
        else wait_for_previous_kernel();                                              \
    }

// Converts x to the storage type of a matrix, padded with zeros, as an operand for cuBLASLt. Grid:
// rows.
template <class T> __device__ void store_rounded(T *out, const float *x, u32 cols) {
    u32 pitch = pitch_of<T>(cols);
    for (u32 k = threadIdx.x * 2; k < pitch; k += blockDim.x * 2) {
        const float *from = x + u64(blockIdx.x) * cols + k;
        *reinterpret_cast<u32 *>(out + u64(blockIdx.x) * pitch + k) = pack2<T>(k < cols ? from[0] : 0.0f, k + 1 < cols ? from[1] : 0.0f);
    }
}

#define TO_STORED(name, T)                                                                                           \
    extern "C" __global__ void to_##name(T *out /* [rows, pitch] */, const float *x /* [rows, cols] */, u32 cols) { \
        wait_for_previous_kernel();                                                                                 \
        store_rounded(out, x, cols);                                                                                 \
    }

// Converts x to fp8, with one scale per row. Rows below 1e-30 become zeros, because the inverse of
// their scale would overflow. Grid: rows.
extern "C" __global__ void to_fp8(e4m3 *out /* [rows, pitch] */, float *scales /* [rows] */, const float *x /* [rows, cols] */, u32 cols) {
    wait_for_previous_kernel();
    const float *row = x + u64(blockIdx.x) * cols;
    float magnitude = 0.0f;
    for (u32 k = threadIdx.x; k < cols; k += blockDim.x) magnitude = max_magnitude(magnitude, row[k]);
    magnitude = block_max(magnitude);
    float inverse = magnitude < 1e-30f ? 0.0f : E4M3_MAX / magnitude;
    if (threadIdx.x == 0) scales[blockIdx.x] = magnitude < 1e-30f ? 0.0f : magnitude / E4M3_MAX;
    u32 pitch = pitch_of<e4m3>(cols);
    for (u32 k = threadIdx.x * 4; k < pitch; k += blockDim.x * 4) {
        u32 four = 0;
        for (u32 i = 0; i < 4; i++) four |= u32(from_float<e4m3>(k + i < cols ? row[k + i] * inverse : 0.0f).bits) << 8 * i;
        *reinterpret_cast<u32 *>(out + u64(blockIdx.x) * pitch + k) = four;
    }
}

// Completes a product in fp8: out = out * scales + bias. Without `row_scales`, it adds only the
// bias. Grid: rows, columns / blockDim.
extern "C" __global__ void scale_product(float *out /* [rows, outs] */, const float *row_scales /* [rows] or null */,
                                         const float *out_scales /* [outs] */, const float *bias /* [outs] or null */, u32 outs) {
    wait_for_previous_kernel();
    u32 column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= outs) return;
    float *to = out + u64(blockIdx.x) * outs + column, scale = row_scales ? row_scales[blockIdx.x] * out_scales[column] : 1.0f;
    *to = fmaf(*to, scale, bias ? bias[column] : 0.0f);
}

MATMUL(bf16_16, bf16, MatmulTile16)
MATMUL(bf16_32, bf16, MatmulTile32)
MATMUL(bf16_64, bf16, MatmulTile64)
MATMUL(bf16_128, bf16, MatmulTile128)
MATMUL(f16_16, f16, MatmulTile16)
MATMUL(f16_32, f16, MatmulTile32)
MATMUL(f16_64, f16, MatmulTile64)
MATMUL(f16_128, f16, MatmulTile128)
MATMUL(f32_16, float, MatmulTile16)
MATMUL(f32_64, float, MatmulTile64)
MATMUL(f32_128, float, MatmulTile128)
MATMUL(fp8_16, e4m3, MatmulTile16OfBytes)
MATMUL(fp8_32, e4m3, MatmulTile32OfBytes)
MATMUL(fp8_64, e4m3, MatmulTile64)
MATMUL(fp8_128, e4m3, MatmulTile128)
MATMUL(int8_16, signed char, MatmulTile16OfBytes)
MATMUL(int8_32, signed char, MatmulTile32OfBytes)
MATMUL(int8_64, signed char, MatmulTile64)
MATMUL(int8_128, signed char, MatmulTile128)
TO_STORED(bf16, bf16)
TO_STORED(f16, f16)
