// Products with matrices in blocks of integer codes, as GGUF files and weights in int4 have them, and
// their embeddings.
//
// A number is scale * (code - zero), or scale * code + offset. The tensor cores multiply x in bf16 by
// codes, which bf16 represents exactly, and a sum over the codes of a group is multiplied by the
// group's scale. Sums of x, which they compute with ones, are multiplied by the offsets. So the
// numbers of the file are not rounded.
//
// In memory, a row of a matrix consists of records of 256 numbers (src/backend/cuda/records.rs):
// - the low four bits of the codes, or all eight: for each 32 numbers and each of four lanes, the
//   numbers 4 * lane to 4 * lane + 3 of the first 16, and those of the second 16;
// - the fifth bits or the upper two bits, if codes have five or six;
// - the scales. Nested: a scale and an offset in f16, integers for all groups that multiply the scale,
//   and integers for all groups that multiply the offset. Otherwise a scale and an offset in f16 for
//   each group. Groups without offsets have only scales.
// Two flags say whether there are offsets, and whether scales are nested.
#include "matmul.cuh"

#define RECORD 256
#define WITH_OFFSETS 1
#define NESTED 2

// Few rows. A step of x has a whole record. In Q4_K, a block has 25 KiB of weights in flight.
typedef MatmulTile<16, 32, 16, 8, 512, 6> RecordTile16;
// 17 to 32 rows, or few outs: a warp decodes a record once for all rows.
typedef MatmulTile<32, 32, 32, 8, 512, 5> RecordTile32;
// Some rows: a record has four steps of x.
typedef MatmulTile<64, 64, 32, 32, 128, 3> RecordTile64;
// Prompts: a warp decodes a record once for 64 rows, and a block reads x once for 128 outs. A record
// has eight steps of x, so one record in flight is enough.
typedef MatmulTile<128, 128, 64, 32, 64, 2> RecordTile128;

// The places of a record's parts.
template <u32 BITS> struct RecordOf {
    static constexpr u32 HIGH = BITS == 8 ? RECORD : RECORD / 2, SCALES = HIGH + (BITS == 5 ? RECORD / 8 : BITS == 6 ? RECORD / 4 : 0);
};

// The form of a matrix.
struct RecordForm {
    u32 bytes; // of a record
    u32 pitch; // bytes between records in shared memory
    u32 flags;

    __device__ __forceinline__ bool offsets() const { return flags & WITH_OFFSETS; }
    __device__ __forceinline__ bool nested() const { return flags & NESTED; }
};

// Returns the form. Records in shared memory are so far apart that the lanes of a warp, or of half a
// warp if they read eight bytes, read different banks.
template <u32 BITS> __device__ __forceinline__ RecordForm form_of(u32 bytes, u32 flags) {
    return RecordForm{bytes, BITS == 8 ? div_ceil(bytes, 32) * 32 : bytes | 16, flags};
}

struct Scales {
    float scale, offset;
};

// Returns a scale and an offset, which are stored as one word.
__device__ __forceinline__ Scales both_at(const u8 *bytes) {
    u32 both = *reinterpret_cast<const u32 *>(bytes);
    return Scales{to_float(f16{u16(both)}), to_float(f16{u16(both >> 16)})};
}

// Returns the scale and the offset of a group. Both products are exact.
template <u32 GROUP> __device__ __forceinline__ Scales scales_of_group(const u8 *scales, u32 group, RecordForm form) {
    if (form.nested()) {
        const signed char *of_group = reinterpret_cast<const signed char *>(scales + 4) + group;
        Scales all = both_at(scales);
        return Scales{all.scale * to_float(of_group[0]), form.offsets() ? all.offset * to_float(of_group[RECORD / GROUP]) : 0.0f};
    }
    if (form.offsets()) return both_at(scales + group * 4);
    return Scales{to_float(*reinterpret_cast<const f16 *>(scales + group * 2)), 0.0f};
}

// Returns the codes of a lane among 32 numbers, less the code of 0, as operands of two products.
template <u32 BITS> __device__ __forceinline__ void codes_of(u32 (&b)[2][2], const u8 *record, u32 thirty_two, bool offsets) {
    u32 place = thirty_two * 4 + lane_in_warp() % 4;
    if constexpr (BITS == 8) {
        uint2 both = *reinterpret_cast<const uint2 *>(record + place * 8);
        widen<signed char>(b[0], both.x);
        widen<signed char>(b[1], both.y);
    } else {
        const u32 number_128 = 0x43004300, number_1 = 0x3f803f80;
        // -128 less 0, 8 or 32
        const u32 minus = BITS == 6 ? 0xc320c320 : BITS == 5 || offsets ? 0xc300c300 : 0xc308c308;
        u32 low = *reinterpret_cast<const u32 *>(record + place * 4), high = 0;
        if constexpr (BITS == 5) high = record[RecordOf<5>::HIGH + place];
        if constexpr (BITS == 6) high = *reinterpret_cast<const u16 *>(record + RecordOf<6>::HIGH + place * 2);
        high |= high << (BITS == 5 ? 12 : 8); // the second number of a pair belongs in the upper half
#pragma unroll
        for (u32 pair = 0; pair < 4; pair++) {
            u32 codes = low >> 4 * pair & 0x000f000f;
            if constexpr (BITS == 5) codes |= (high >> pair & 0x00010001) << 4;
            if constexpr (BITS == 6) codes |= (high >> 2 * pair & 0x00030003) << 4;
            b[pair / 2][pair % 2] = fma_bf16x2(codes | number_128, number_1, minus);
        }
    }
}

// Starts the copy of a record of each row of w to shared memory. Rows beyond the last become zeros.
template <class Tile>
__device__ __forceinline__ void copy_records(u8 *to /* [OUTS, form.pitch] */, const Product<code> &p, RecordForm form, u32 first_out,
                                             u32 record) {
    u32 chunks = form.bytes / 16;
    const u8 *from = reinterpret_cast<const u8 *>(p.w) + u64(record) * form.bytes;
    for (u32 i = threadIdx.x; i < Tile::OUTS * chunks; i += Tile::THREADS) {
        u32 out = i / chunks, byte = i % chunks * 16;
        bool valid = first_out + out < p.outs;
        copy_async_16(to + out * form.pitch + byte, valid ? from + u64(first_out + out) * p.pitch + byte : from, valid);
    }
}

// sums += x * w over 32 numbers of a record, by a warp.
template <class Tile, u32 BITS, u32 GROUP>
__device__ __forceinline__ void add_32(float (&sums)[Tile::HIGH][Tile::WIDE][4], const bf16 *x /* [WARP_ROWS, X_PITCH] */,
                                       const u8 *w /* [WARP_OUTS, form.pitch] */, RecordForm form, u32 thirty_two) {
    constexpr u32 X_PITCH = StepOf<Tile, code>::X_PITCH, GROUPS = 32 / GROUP, EACH = 2 / GROUPS; // products of a group
    const u32 ones[2] = {0x3f803f80, 0x3f803f80};
    const bf16 *x_lane = x + lane_in_warp() % 16 * X_PITCH + lane_in_warp() / 16 * 8;
    u32 a[2][Tile::HIGH][4];
    float of_x[GROUPS][Tile::HIGH][4] = {}; // sums of x over a group
#pragma unroll
    for (u32 i = 0; i < 2 * Tile::HIGH; i++) {
        ldmatrix_x4(a[i % 2][i / 2], x_lane + i / 2 * 16 * X_PITCH + i % 2 * 16);
        if (form.offsets()) mma_16816<bf16>(of_x[i % 2 / EACH][i / 2], a[i % 2][i / 2], ones);
    }
#pragma unroll
    for (u32 wide = 0; wide < Tile::WIDE; wide++) {
        const u8 *w_wide = w + wide * 8 * form.pitch;
        u32 b[2][2];
        codes_of<BITS>(b, w_wide + lane_in_warp() / 4 * form.pitch, thirty_two, form.offsets());
        const u8 *scales = w_wide + lane_in_warp() % 4 * 2 * form.pitch + RecordOf<BITS>::SCALES; // of the outs of a sum
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            Scales of_outs[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) of_outs[i] = scales_of_group<GROUP>(scales + i * form.pitch, thirty_two * GROUPS + group, form);
#pragma unroll
            for (u32 high = 0; high < Tile::HIGH; high++) {
                float of_codes[4] = {};
#pragma unroll
                for (u32 i = 0; i < EACH; i++) mma_16816<bf16>(of_codes, a[group * EACH + i][high], b[group * EACH + i]);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float &sum = sums[high][wide][i];
                    sum = fmaf(of_outs[i % 2].scale, of_codes[i], sum);
                    if (form.offsets()) sum = fmaf(of_outs[i % 2].offset, of_x[group][high][i], sum);
                }
            }
        }
    }
}

template <class Tile, u32 BITS, u32 GROUP>
__device__ __forceinline__ void multiply_records(const Product<code> &p, RecordForm form, TilePosition tile) {
    typedef StepOf<Tile, code> Step;
    constexpr u32 STEPS = RECORD / Step::NUMBERS, STAGES = Tile::STAGES; // steps of x in a record
    DYNAMIC_SHARED(u8, w);                                              // [STAGES, OUTS, form.pitch]
    bf16 *x = reinterpret_cast<bf16 *>(w + STAGES * Tile::OUTS * form.pitch); // [2, ROWS, X_PITCH], double buffered
    u32 records = div_ceil(p.cols, RECORD);
    u32 warp_row = warp_in_block() / (Tile::OUTS / Tile::WARP_OUTS) * Tile::WARP_ROWS;
    u32 warp_out = warp_in_block() % (Tile::OUTS / Tile::WARP_OUTS) * Tile::WARP_OUTS;
    float sums[Tile::HIGH][Tile::WIDE][4] = {};
    PartOfX<Tile, code> x_part;

    auto begin_w = [&](u32 record) {
        if (record < records) copy_records<Tile>(w + record % STAGES * Tile::OUTS * form.pitch, p, form, tile.out, record);
        copy_async_commit(); // empty at the end, so that the number of groups to wait for is constant
    };
    for (u32 record = 0; record < STAGES - 1; record++) begin_w(record);
    wait_for_previous_kernel(); // weights do not depend on it
    x_part.load(p, tile.row, 0);
    for (u32 step = 0; step < records * STEPS; step++) {
        u32 record = step / STEPS;
        bf16 *x_step = x + step % 2 * Tile::ROWS * Step::X_PITCH;
        x_part.store(p, x_step);
        x_part.load(p, tile.row, (step + 1) * Step::NUMBERS);
        if (step % STEPS == 0) copy_async_wait<STAGES - 2>();
        __syncthreads(); // the step has arrived, and all warps have finished with the last one, whose memory is reused
        if (step % STEPS == 0) begin_w(record + STAGES - 1);
        const bf16 *x_warp = x_step + warp_row * Step::X_PITCH;
        const u8 *w_warp = w + (record % STAGES * Tile::OUTS + warp_out) * form.pitch;
#pragma unroll
        for (u32 i = 0; i < Step::NUMBERS / 32; i++)
            add_32<Tile, BITS, GROUP>(sums, x_warp + i * 32, w_warp, form, step % STEPS * (Step::NUMBERS / 32) + i);
    }
    write_sums<Tile>(sums, p, tile.row + warp_row, tile.out + warp_out);
}

// As MATMUL in matmul.cu. `bytes` and `flags` are the form of the records.
#define MATMUL_RECORDS(name, BITS, GROUP, Tile)                                                                         \
    extern "C" __global__ void __launch_bounds__(Tile::THREADS) matmul_##name(                                          \
        float *out, const void *x, const code *w, const float *bias, const code *const *ws, const float *const *biases, \
        const u32 *starts, u32 rows, u32 outs, u32 cols, u32 stride, u32 bytes, u32 flags, u32 rounded) {               \
        Product<code> all = {out, {x, rounded}, w, bias, rows, outs, cols, div_ceil(cols, RECORD) * bytes, stride};     \
        if (starts) wait_for_previous_kernel();                                                                         \
        Product<code> own = product_of_block(all, ws, biases, starts);                                                  \
        TilePosition tile = tile_of_block<Tile>(own.rows);                                                              \
        if (tile.valid) multiply_records<Tile, BITS, GROUP>(own, form_of<BITS>(bytes, flags), tile);                    \
        else wait_for_previous_kernel();                                                                                \
    }

MATMUL_RECORDS(codes4_by32_16, 4, 32, RecordTile16)
MATMUL_RECORDS(codes4_by32_32, 4, 32, RecordTile32)
MATMUL_RECORDS(codes4_by32_64, 4, 32, RecordTile64)
MATMUL_RECORDS(codes4_by32_128, 4, 32, RecordTile128)
MATMUL_RECORDS(codes4_by16_16, 4, 16, RecordTile16)
MATMUL_RECORDS(codes4_by16_32, 4, 16, RecordTile32)
MATMUL_RECORDS(codes4_by16_64, 4, 16, RecordTile64)
MATMUL_RECORDS(codes4_by16_128, 4, 16, RecordTile128)
MATMUL_RECORDS(codes5_by32_16, 5, 32, RecordTile16)
MATMUL_RECORDS(codes5_by32_32, 5, 32, RecordTile32)
MATMUL_RECORDS(codes5_by32_64, 5, 32, RecordTile64)
MATMUL_RECORDS(codes5_by32_128, 5, 32, RecordTile128)
MATMUL_RECORDS(codes6_by16_16, 6, 16, RecordTile16)
MATMUL_RECORDS(codes6_by16_32, 6, 16, RecordTile32)
MATMUL_RECORDS(codes6_by16_64, 6, 16, RecordTile64)
MATMUL_RECORDS(codes6_by16_128, 6, 16, RecordTile128)
MATMUL_RECORDS(codes8_by32_16, 8, 32, RecordTile16)
MATMUL_RECORDS(codes8_by32_32, 8, 32, RecordTile32)
MATMUL_RECORDS(codes8_by32_64, 8, 32, RecordTile64)
MATMUL_RECORDS(codes8_by32_128, 8, 32, RecordTile128)

// Returns number k of a record.
template <u32 BITS, u32 GROUP> __device__ __forceinline__ float number_of(const u8 *record, u32 k, RecordForm form) {
    u32 place = k / 32 * 4 + k % 16 / 4, pair = k % 32 / 16 * 2 + k % 4 / 2, second = k % 2;
    Scales own = scales_of_group<GROUP>(record + RecordOf<BITS>::SCALES, k / GROUP, form);
    float code;
    if constexpr (BITS == 8) {
        code = to_float(static_cast<signed char>(record[place * 8 + pair / 2 * 4 + pair % 2 + 2 * second]));
    } else {
        u32 bits = *reinterpret_cast<const u32 *>(record + place * 4) >> (4 * pair + 16 * second) & 15;
        if (BITS == 5) bits |= (record[RecordOf<BITS>::HIGH + place] >> (pair + 4 * second) & 1) << 4;
        if (BITS == 6) bits |= (*reinterpret_cast<const u16 *>(record + RecordOf<BITS>::HIGH + place * 2) >> (2 * pair + 8 * second) & 3) << 4;
        code = float(bits) - (BITS == 6 ? 32.0f : BITS == 5 || form.offsets() ? 0.0f : 8.0f);
    }
    return fmaf(own.scale, code, own.offset);
}

// out[r] = table[tokens[r] - first] * scale, or 0 for a token that is not among the `count` of the table.
// Grid: rows, columns.
#define EMBED_RECORDS(name, BITS, GROUP)                                                                                                   \
    extern "C" __global__ void embed_##name(float *out /* [rows, cols] */, const u8 *table /* [count, records] */,                         \
                                            const u32 *tokens /* [rows] */, u32 first, u32 count, u32 cols, float scale, u32 bytes,        \
                                            u32 flags) {                                                                                   \
        wait_for_previous_kernel();                                                                                                        \
        u32 column = blockIdx.y * blockDim.x + threadIdx.x;                                                                                \
        if (column >= cols) return;                                                                                                        \
        u32 place = tokens[blockIdx.x] - first; /* too large for a token below `first` */                                                  \
        const u8 *record = table + u64(place) * div_ceil(cols, RECORD) * bytes + column / RECORD * bytes;                                  \
        float number = place < count ? number_of<BITS, GROUP>(record, column % RECORD, form_of<BITS>(bytes, flags)) * scale : 0.0f;        \
        out[u64(blockIdx.x) * cols + column] = number;                                                                                     \
    }

EMBED_RECORDS(codes4_by32, 4, 32)
EMBED_RECORDS(codes4_by16, 4, 16)
EMBED_RECORDS(codes5_by32, 5, 32)
EMBED_RECORDS(codes6_by16, 6, 16)
EMBED_RECORDS(codes8_by32, 8, 32)
