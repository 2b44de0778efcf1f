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
    static constexpr bool ALIGNED = false; // rows have a multiple of four numbers
};
template <> struct MultipliedAs<e4m3> {
    typedef bf16 Number;
    static constexpr bool ALIGNED = false;
};
template <> struct MultipliedAs<signed char> {
    typedef bf16 Number;
    static constexpr bool ALIGNED = false;
};
template <> struct MultipliedAs<code> {
    typedef bf16 Number;
    static constexpr bool ALIGNED = true;
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

// Rows of x: in f32, or already rounded to the type X in which they are multiplied. The columns of
// rounded rows are a multiple of 8.
template <class X> struct RowsOfX {
    const void *numbers;
    u32 rounded;

    __device__ __forceinline__ bool is_rounded() const { return sizeof(X) < sizeof(float) && rounded; }
    __device__ __forceinline__ const float *floats() const { return static_cast<const float *>(numbers); }
    __device__ __forceinline__ const X *as_rounded() const { return static_cast<const X *>(numbers); }
    __device__ __forceinline__ RowsOfX from(u64 first) const {
        if (is_rounded()) return RowsOfX{as_rounded() + first, rounded};
        return RowsOfX{floats() + first, rounded};
    }
};

// The operands of a block's product.
template <class T> struct Product {
    typedef RowsOfX<typename MultipliedAs<T>::Number> X;
    float *out;        // [rows, stride], of which `outs` are written
    X x;               // [rows, cols]
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
    Product<T> own = {all.out + first * all.stride, all.x.from(first * all.cols), ws[z], nullptr, rows, all.outs, all.cols, all.pitch, all.stride};
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

// Rounds four numbers, given as their bits.
template <class X> __device__ __forceinline__ uint2 rounded_4(uint4 x) {
    return make_uint2(pack2<X>(bits_to_float(x.x), bits_to_float(x.y)), pack2<X>(bits_to_float(x.z), bits_to_float(x.w)));
}

// Return the first numbers of two pairs, and the second ones.
__device__ __forceinline__ u32 firsts(uint2 pairs) { return (pairs.x & 0xffff) | pairs.y << 16; }
__device__ __forceinline__ u32 seconds(uint2 pairs) { return pairs.x >> 16 | (pairs.y & 0xffff0000); }

// Store numbers k to k + 3 of a row of x, which are rounded, beside a matrix in T.
template <class Half> __device__ __forceinline__ void store_4_for(Half, Half *row, u32 k, uint2 x) { *reinterpret_cast<uint2 *>(row + k) = x; }
// Permutes 16 numbers to match the bytes of w. ldmatrix gives a lane four consecutive bytes of w, the
// even ones of which form one operand and the odd ones the other.
__device__ __forceinline__ void store_4_beside_bytes(bf16 *row, u32 k, uint2 x) {
    bf16 *to = row + k / 16 * 16 + k % 16 / 2;
    *reinterpret_cast<u32 *>(to) = firsts(x);
    *reinterpret_cast<u32 *>(to + 8) = seconds(x);
}
__device__ __forceinline__ void store_4_for(e4m3, bf16 *row, u32 k, uint2 x) { store_4_beside_bytes(row, k, x); }
__device__ __forceinline__ void store_4_for(signed char, bf16 *row, u32 k, uint2 x) { store_4_beside_bytes(row, k, x); }
// Permutes 16 numbers to match the codes of w (blocks.cu), of which a lane has four consecutive ones.
__device__ __forceinline__ void store_4_for(code, bf16 *row, u32 k, uint2 x) {
    bf16 *to = row + k / 16 * 16 + k % 16 / 2;
    *reinterpret_cast<u32 *>(to) = x.x;
    *reinterpret_cast<u32 *>(to + 8) = x.y;
}

// A thread's part of a step of x.
template <class Tile, class T> struct PartOfX {
    typedef StepOf<Tile, T> Step;
    typedef typename Step::X X;
    static constexpr u32 ACROSS = Step::NUMBERS / 4, DOWN = Tile::THREADS / ACROSS, COUNT = Tile::ROWS / DOWN;
    uint4 numbers[COUNT]; // the bits of four numbers in f32, or, in x and y, of four rounded ones

    static __device__ __forceinline__ u32 across() { return threadIdx.x % ACROSS * 4; }
    static __device__ __forceinline__ u32 down(u32 i) { return threadIdx.x / ACROSS + i * DOWN; }

    // Loads the part, padded with zeros.
    __device__ __forceinline__ void load(const Product<T> &p, u32 first_row, u32 first_k) {
        u32 k = first_k + across(), rows = k < p.cols ? p.rows : 0;
        if (p.x.is_rounded()) {
            const X *from = p.x.as_rounded() + (u64(first_row + down(0)) * p.cols + k);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                bool valid = first_row + down(i) < rows;
                uint2 four = valid ? *reinterpret_cast<const uint2 *>(from + i * DOWN * p.cols) : make_uint2(0, 0);
                numbers[i].x = four.x;
                numbers[i].y = four.y;
            }
        } else if (MultipliedAs<T>::ALIGNED || p.cols % 4 == 0) {
            const float *from = p.x.floats() + (u64(first_row + down(0)) * p.cols + k);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                bool valid = first_row + down(i) < rows;
                numbers[i] = valid ? *reinterpret_cast<const uint4 *>(from + i * DOWN * p.cols) : make_uint4(0, 0, 0, 0);
            }
        } else { // rows are not aligned
            const float *from = p.x.floats() + u64(first_row + down(0)) * p.cols + k;
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                const float *row = from + i * DOWN * p.cols;
                u32 count = first_row + down(i) < rows ? p.cols - k : 0;
                numbers[i].x = count > 0 ? float_to_bits(row[0]) : 0;
                numbers[i].y = count > 1 ? float_to_bits(row[1]) : 0;
                numbers[i].z = count > 2 ? float_to_bits(row[2]) : 0;
                numbers[i].w = count > 3 ? float_to_bits(row[3]) : 0;
            }
        }
    }

    __device__ __forceinline__ void store(const Product<T> &p, X *to /* [ROWS, X_PITCH] */) const {
        if (p.x.is_rounded()) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) store_4_for(T(), to + down(i) * Step::X_PITCH, across(), make_uint2(numbers[i].x, numbers[i].y));
        } else {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                X *row = to + down(i) * Step::X_PITCH;
                if constexpr (sizeof(X) == sizeof(float)) *reinterpret_cast<uint4 *>(row + across()) = numbers[i];
                else store_4_for(T(), row, across(), rounded_4<X>(numbers[i]));
            }
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
