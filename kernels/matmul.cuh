// What the matrix products have in common: tiles, operands, and rows of x in shared memory.
//
// In matmul.cu and blocks.cu, each element of out is summed over k in order, by the same
// instructions, whatever the tile, and no sum is split among blocks or warps. Therefore a row has
// the same bits in every batch.
#pragma once
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

// A number of a matrix in blocks of integer codes, which has no size of its own.
struct code {
    u8 bits;
};

// The type in which a product with a matrix in T is computed, to which x is converted.
template <class T> struct MultipliedAs {
    typedef T Number;
};
template <> struct MultipliedAs<e4m3> {
    typedef bf16 Number;
};
template <> struct MultipliedAs<signed char> {
    typedef bf16 Number;
};
template <> struct MultipliedAs<code> {
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
    float *out;        // [rows, stride], of which `outs` are written
    const float *x;    // [rows, cols]
    const T *w;        // [outs, pitch], then, in fp8 and int8, [outs] scales
    const float *bias; // [outs] or null
    u32 rows, outs, cols, pitch;
    u32 stride; // numbers between rows of out
};

// Returns the product of blockIdx.z: a strip of x with its own matrix, or the rows of an expert.
template <class T>
__device__ __forceinline__ Product<T> product_of_block(Product<T> all, const T *const *ws, const float *const *biases, const u32 *starts) {
    if (!ws) return all;
    u32 z = blockIdx.z;
    u64 first = starts ? starts[z] : u64(z) * all.rows;
    u32 rows = starts ? starts[z + 1] - starts[z] : all.rows;
    Product<T> own = {all.out + first * all.stride, all.x + first * all.cols, ws[z], nullptr, rows, all.outs, all.cols, all.pitch, all.stride};
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

// Store numbers k to k + 3 of a row of x, beside a matrix in T.
__device__ __forceinline__ void store_4_for(float, float *row, u32 k, float4 x) { *reinterpret_cast<float4 *>(row + k) = x; }
template <class Half> __device__ __forceinline__ void store_4_for(Half, Half *row, u32 k, float4 x) {
    *reinterpret_cast<uint2 *>(row + k) = make_uint2(pack2<Half>(x.x, x.y), pack2<Half>(x.z, x.w));
}
// Permutes 16 numbers to match the bytes of w. ldmatrix gives a lane four consecutive bytes of w, the
// even ones of which form one operand and the odd ones the other.
__device__ __forceinline__ void store_4_beside_bytes(bf16 *row, u32 k, float4 x) {
    bf16 *to = row + k / 16 * 16 + k % 16 / 2;
    *reinterpret_cast<u32 *>(to) = pack2<bf16>(x.x, x.z);
    *reinterpret_cast<u32 *>(to + 8) = pack2<bf16>(x.y, x.w);
}
__device__ __forceinline__ void store_4_for(e4m3, bf16 *row, u32 k, float4 x) { store_4_beside_bytes(row, k, x); }
__device__ __forceinline__ void store_4_for(signed char, bf16 *row, u32 k, float4 x) { store_4_beside_bytes(row, k, x); }
// Permutes 16 numbers to match the codes of w (blocks.cu), of which a lane has four consecutive ones.
__device__ __forceinline__ void store_4_for(code, bf16 *row, u32 k, float4 x) {
    bf16 *to = row + k / 16 * 16 + k % 16 / 2;
    *reinterpret_cast<u32 *>(to) = pack2<bf16>(x.x, x.y);
    *reinterpret_cast<u32 *>(to + 8) = pack2<bf16>(x.z, x.w);
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
            store_4_for(T(), to + down(i) * Step::X_PITCH, across(), numbers[i]);
        }
    }
};

// Returns the scales of an out and of the next one.
template <class T> __device__ __forceinline__ float2 scales_of(const Product<T> &, u32) { return make_float2(1.0f, 1.0f); }
template <class T> __device__ __forceinline__ float2 scales_behind(const Product<T> &p, u32 out) {
    const float *scales = reinterpret_cast<const float *>(p.w + u64(p.outs) * p.pitch);
    return make_float2(out < p.outs ? scales[out] : 0.0f, out + 1 < p.outs ? scales[out + 1] : 0.0f);
}
__device__ __forceinline__ float2 scales_of(const Product<e4m3> &p, u32 out) { return scales_behind(p, out); }
__device__ __forceinline__ float2 scales_of(const Product<signed char> &p, u32 out) { return scales_behind(p, out); }

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
            float *to = p.out + u64(row) * p.stride + out;
            const float(&sum)[4] = sums[i / 2][wide];
            float low = fmaf(sum[i % 2 * 2], scales.x, bias[0]), high = fmaf(sum[i % 2 * 2 + 1], scales.y, bias[1]);
            if (out + 1 < p.outs && reinterpret_cast<u64>(to) % sizeof(float2) == 0) {
                *reinterpret_cast<float2 *>(to) = make_float2(low, high);
            } else {
                if (out < p.outs) to[0] = low;
                if (out + 1 < p.outs) to[1] = high;
            }
        }
    }
}
