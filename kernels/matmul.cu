// The matrix product: out[r][n] = sum over k of x[r][k] * w[n][k], plus bias[n].
//
// A block computes a tile of rows and outs in steps along k. Steps of w are copied to shared memory
// in their storage type, several stages ahead, so the time of a product of few rows is that of
// reading w once. x is one step ahead in registers, and is converted to the type of w when it is
// stored to shared memory. If w is in fp8, x is converted to bf16, which has the range of f32, and
// w is converted to bf16 before the tensor cores multiply it. The rows of an fp8 matrix are
// followed by one f32 scale per row, which multiplies the finished sums.
//
// Whatever the tile, each element of out is summed over k in order, by the same instructions, and
// no sum is split among blocks or warps. Therefore a row has the same bits in every batch.
// After the last k both operands are zeros, which do not change the sums.
#include "tensor.cuh"

// A tile of ROWS x OUTS elements, of which each warp computes WARP_ROWS x WARP_OUTS. A step has
// STEP_BYTES of each row of x in shared memory. Shared memory holds STAGES steps of w.
template <u32 ROWS_, u32 OUTS_, u32 WARP_ROWS_, u32 WARP_OUTS_, u32 STEP_BYTES_, u32 STAGES_> struct MatmulTile {
    static constexpr u32 ROWS = ROWS_, OUTS = OUTS_, WARP_ROWS = WARP_ROWS_, WARP_OUTS = WARP_OUTS_;
    static constexpr u32 STEP_BYTES = STEP_BYTES_, STAGES = STAGES_;
    static constexpr u32 THREADS = ROWS / WARP_ROWS * (OUTS / WARP_OUTS) * WARP;
    // A warp's part in tensor core fragments of 16 x 8 elements.
    static constexpr u32 HIGH = WARP_ROWS / 16, WIDE = WARP_OUTS / 8;
};

// Few rows: small tiles, so that all multiprocessors read weights, with 40 KiB in flight for each.
typedef MatmulTile<16, 32, 16, 8, 256, 6> MatmulTile16;
typedef MatmulTile<16, 32, 16, 8, 512, 6> MatmulTile16OfBytes; // the same number of bytes of weights
typedef MatmulTile<64, 64, 32, 32, 128, 4> MatmulTile64;
// Many rows: as many sums per loaded number as registers can hold.
typedef MatmulTile<128, 128, 64, 64, 64, 4> MatmulTile128;

// The type in which a product with a matrix in T is computed, to which x is converted.
template <class T> struct MultipliedAs {
    typedef T Number;
};
template <> struct MultipliedAs<e4m3> {
    typedef bf16 Number;
};

// A step in shared memory. The pitch of rows is 16 bytes larger than the row, so that eight
// consecutive rows are in different banks.
template <class Tile, class T> struct StepOf {
    typedef typename MultipliedAs<T>::Number X;
    static constexpr u32 NUMBERS = Tile::STEP_BYTES / sizeof(X);
    static constexpr u32 X_PITCH = NUMBERS + 16 / sizeof(X), W_PITCH = NUMBERS + 16 / sizeof(T);
};

// Tiles of rows that are scheduled together for the same weights.
#define MATMUL_BAND 8

// Returns the elements of a row in memory, a multiple of 16 bytes, padded with zeros.
template <class T> __device__ __forceinline__ u32 pitch_of(u32 cols) {
    constexpr u32 EACH = sizeof(T) == 1 ? 16 : 8;
    return div_ceil(cols, EACH) * EACH;
}

// The operands of a block's product.
template <class T> struct Product {
    float *out;        // [rows, outs]
    const float *x;    // [rows, cols]
    const T *w;        // [outs, pitch], then, in fp8, [outs] scales
    const float *bias; // [outs] or null
    u32 rows, outs, cols, pitch;
};

// Returns the product of blockIdx.z: a strip of x with its own matrix, or the rows of an expert.
template <class T>
__device__ __forceinline__ Product<T> product_of_block(Product<T> all, const T *const *ws, const float *const *biases, const u32 *starts) {
    if (!ws) return all;
    u32 z = blockIdx.z;
    u64 first = starts ? starts[z] : u64(z) * all.rows;
    u32 rows = starts ? starts[z + 1] - starts[z] : all.rows;
    Product<T> own = {all.out + first * all.outs, all.x + first * all.cols, ws[z], nullptr, rows, all.outs, all.cols, all.pitch};
    if (biases) own.bias = biases[z];
    return own;
}

struct TilePosition {
    u32 row, out; // first row and first out
    bool valid;
};

// Returns the tile of a block. Blocks start in the order of their numbers: a band of tiles of rows
// first, and then the next outs. Weights are thus read from memory once per band, while the band's
// x stays in L2.
template <class Tile> __device__ __forceinline__ TilePosition tile_of_block(u32 rows) {
    u32 outs_tiles = gridDim.x, rows_tiles = div_ceil(rows, Tile::ROWS), block = blockIdx.y * gridDim.x + blockIdx.x;
    u32 above = block / (MATMUL_BAND * outs_tiles) * MATMUL_BAND, within = block % (MATMUL_BAND * outs_tiles);
    if (above >= rows_tiles) return TilePosition{0, 0, false};
    u32 height = rows_tiles - above < MATMUL_BAND ? rows_tiles - above : MATMUL_BAND;
    return TilePosition{(above + within % height) * Tile::ROWS, within / height * Tile::OUTS, within < height * outs_tiles};
}

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

// A thread's part of a step of x.
template <class Tile, class T> struct PartOfX {
    typedef StepOf<Tile, T> Step;
    static constexpr u32 ACROSS = Step::NUMBERS / 4, DOWN = Tile::THREADS / ACROSS, COUNT = Tile::ROWS / DOWN;
    float4 numbers[COUNT];

    static __device__ __forceinline__ u32 across() { return threadIdx.x % ACROSS * 4; }
    static __device__ __forceinline__ u32 down(u32 i) { return threadIdx.x / ACROSS + i * DOWN; }

    // Loads the part, padded with zeros.
    __device__ __forceinline__ void load(const Product<T> &p, u32 first_row, u32 first_k) {
        u32 k = first_k + across();
        const float *from = p.x + u64(first_row + down(0)) * p.cols + k;
        if (p.cols % 4 == 0) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                bool valid = first_row + down(i) < p.rows && k < p.cols;
                numbers[i] = valid ? *reinterpret_cast<const float4 *>(from + i * DOWN * p.cols) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        } else { // rows are not aligned
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                const float *row = from + i * DOWN * p.cols;
                u32 count = first_row + down(i) < p.rows && k < p.cols ? p.cols - k : 0;
                numbers[i].x = count > 0 ? row[0] : 0.0f;
                numbers[i].y = count > 1 ? row[1] : 0.0f;
                numbers[i].z = count > 2 ? row[2] : 0.0f;
                numbers[i].w = count > 3 ? row[3] : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void store(typename Step::X *to /* [ROWS, X_PITCH] */) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            typename Step::X *row = to + down(i) * Step::X_PITCH;
            if constexpr (sizeof(T) == 1) store_4_beside_bytes(row + across() / 16 * 16 + across() % 16 / 2, numbers[i]);
            else store_4(row + across(), numbers[i]);
        }
    }

    static __device__ __forceinline__ void store_4(float *to, float4 x) { *reinterpret_cast<float4 *>(to) = x; }
    template <class Half> static __device__ __forceinline__ void store_4(Half *to, float4 x) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(pack2<Half>(x.x, x.y), pack2<Half>(x.z, x.w));
    }
    // Permutes 16 numbers to match the bytes of w. ldmatrix gives a lane four consecutive bytes of
    // w, the even ones of which form one operand and the odd ones the other.
    static __device__ __forceinline__ void store_4_beside_bytes(bf16 *to, float4 x) {
        *reinterpret_cast<u32 *>(to) = pack2<bf16>(x.x, x.z);
        *reinterpret_cast<u32 *>(to + 8) = pack2<bf16>(x.y, x.w);
    }
};

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

// add_step for w in fp8: each 16-bit element of ldmatrix holds two numbers.
template <class Tile>
__device__ __forceinline__ void add_step_fp8(float (&sums)[Tile::HIGH][Tile::WIDE][4], const bf16 *x /* [WARP_ROWS, X_PITCH] */,
                                             const e4m3 *w /* [WARP_OUTS, W_PITCH] */) {
    typedef StepOf<Tile, e4m3> Step;
    // The four matrices of an ldmatrix, each 8 outs of 16 numbers: WIDE of them along the outs,
    // DEEP along k.
    constexpr u32 WIDE = Tile::WIDE % 2 == 0 ? 2 : 1, DEEP = 4 / WIDE;
    const bf16 *x_lane = x + lane_in_warp() % 16 * Step::X_PITCH + lane_in_warp() / 16 * 8;
    const e4m3 *w_lane = w + (lane_in_warp() / 8 / DEEP * 8 + lane_in_warp() % 8) * Step::W_PITCH + lane_in_warp() / 8 % DEEP * 16;
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
                u32 b[2] = {e4m3x2_to_bf16x2(bytes[i] << 8), e4m3x2_to_bf16x2(bytes[i])};
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

// Returns the scales of an out and of the next one.
template <class T> __device__ __forceinline__ float2 scales_of(const Product<T> &, u32) { return make_float2(1.0f, 1.0f); }
__device__ __forceinline__ float2 scales_of(const Product<e4m3> &p, u32 out) {
    const float *scales = reinterpret_cast<const float *>(p.w + u64(p.outs) * p.pitch);
    return make_float2(out < p.outs ? scales[out] : 0.0f, out + 1 < p.outs ? scales[out + 1] : 0.0f);
}

// out = sums * scales + bias, for a warp that starts at this row and out.
template <class Tile, class T>
__device__ __forceinline__ void write_sums(const float (&sums)[Tile::HIGH][Tile::WIDE][4], const Product<T> &p, u32 first_row,
                                           u32 first_out) {
#pragma unroll
    for (u32 wide = 0; wide < Tile::WIDE; wide++) {
        u32 out = first_out + wide * 8 + lane_in_warp() % 4 * 2;
        float2 scales = scales_of(p, out);
        float bias[2] = {p.bias && out < p.outs ? p.bias[out] : 0.0f, p.bias && out + 1 < p.outs ? p.bias[out + 1] : 0.0f};
#pragma unroll
        for (u32 i = 0; i < 2 * Tile::HIGH; i++) {
            u32 row = first_row + lane_in_warp() / 4 + i * 8;
            if (row >= p.rows) continue;
            float *to = p.out + u64(row) * p.outs + out;
            const float(&sum)[4] = sums[i / 2][wide];
            float low = fmaf(sum[i % 2 * 2], scales.x, bias[0]), high = fmaf(sum[i % 2 * 2 + 1], scales.y, bias[1]);
            if (p.outs % 2 == 0 && out < p.outs) {
                *reinterpret_cast<float2 *>(to) = make_float2(low, high);
            } else {
                if (out < p.outs) to[0] = low;
                if (out + 1 < p.outs) to[1] = high;
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
    x_part.load(p, tile.row, 0);
    for (u32 step = 0; step < steps; step++) {
        X *x_step = x + step % 2 * Tile::ROWS * Step::X_PITCH;
        x_part.store(x_step);
        x_part.load(p, tile.row, (step + 1) * STEP);
        copy_async_wait<STAGES - 2>();
        __syncthreads(); // the step has arrived, and all warps have finished with the last one, whose memory is reused
        begin_w(step + STAGES - 1);
        const X *x_warp = x_step + warp_row * Step::X_PITCH;
        const T *w_warp = w + (step % STAGES * Tile::OUTS + warp_out) * Step::W_PITCH;
        if constexpr (sizeof(T) == sizeof(float)) add_step_f32<Tile>(sums, x_warp, w_warp);
        else if constexpr (sizeof(T) == 1) add_step_fp8<Tile>(sums, x_warp, w_warp);
        else add_step<Tile>(sums, x_warp, w_warp);
    }
    write_sums<Tile>(sums, p, tile.row + warp_row, tile.out + warp_out);
}

// Without `ws`: one product of all rows with `w`, and with `bias` unless it is null. With `ws`: one
// product per blockIdx.z, with the matrix ws[z] and the bias biases[z], if there is one. Its rows
// are strip z of x, or, with `starts`, rows starts[z] to starts[z + 1] of x, which belong to expert
// z. `rows` is the number of rows of the product or of a strip. Grid: tiles of outs, tiles of rows
// (for experts: of the maximum number of rows), products. Dynamic shared memory: steps of STAGES *
// OUTS rows of w, and of 2 * ROWS rows of x.
#define MATMUL(name, T, Tile)                                                           \
    extern "C" __global__ void __launch_bounds__(Tile::THREADS) matmul_##name(          \
        float *out /* [rows, outs], [strips, rows, outs] or [routes, outs] */,          \
        const float *x /* [rows, cols], [strips, rows, cols] or [routes, cols] */,      \
        const T *w /* a matrix; null if there are ws */,                                        \
        const float *bias /* [outs] or null */,                                         \
        const T *const *ws /* [products] matrices, or null */,                       \
        const float *const *biases /* [products] of [outs] or null; or null */,         \
        const u32 *starts /* [products + 1] or null */, u32 rows, u32 outs, u32 cols) { \
        Product<T> all = {out, x, w, bias, rows, outs, cols, pitch_of<T>(cols)};        \
        Product<T> own = product_of_block(all, ws, biases, starts);                     \
        TilePosition tile = tile_of_block<Tile>(own.rows);                             \
        if (tile.valid) multiply<Tile>(own, tile);                                    \
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
        store_rounded(out, x, cols);                                                                                 \
    }

// Converts x to fp8, with one scale per row. Rows below 1e-30 become zeros, because the inverse of
// their scale would overflow. Grid: rows.
extern "C" __global__ void to_fp8(e4m3 *out /* [rows, pitch] */, float *scales /* [rows] */, const float *x /* [rows, cols] */, u32 cols) {
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
    u32 column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= outs) return;
    float *to = out + u64(blockIdx.x) * outs + column, scale = row_scales ? row_scales[blockIdx.x] * out_scales[column] : 1.0f;
    *to = fmaf(*to, scale, bias ? bias[column] : 0.0f);
}

MATMUL(bf16_16, bf16, MatmulTile16)
MATMUL(bf16_64, bf16, MatmulTile64)
MATMUL(bf16_128, bf16, MatmulTile128)
MATMUL(f16_16, f16, MatmulTile16)
MATMUL(f16_64, f16, MatmulTile64)
MATMUL(f16_128, f16, MatmulTile128)
MATMUL(f32_16, float, MatmulTile16)
MATMUL(f32_64, float, MatmulTile64)
MATMUL(f32_128, float, MatmulTile128)
MATMUL(fp8_16, e4m3, MatmulTile16OfBytes)
MATMUL(fp8_64, e4m3, MatmulTile64)
MATMUL(fp8_128, e4m3, MatmulTile128)
TO_STORED(bf16, bf16)
TO_STORED(f16, f16)
