// Host versions of the functions of kernels/hopper.cuh.
#pragma once
#include "shim.h"

inline u32 warpgroup_in_block() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0); }
template <u32 REGISTERS> void give_registers() {}
template <u32 REGISTERS> void take_registers() {}

namespace shim {

// Shared memory begins at an address that is aligned to 16 bytes only.
const u32 SHARED_BEGIN = 48;

inline u32 shared_address(const void *shared) { return u32(static_cast<const u8 *>(shared) - static_cast<u8 *>(dynamic_shared())) + SHARED_BEGIN; }
inline const u8 *shared_pointer(u32 address) { return static_cast<u8 *>(dynamic_shared()) + address - SHARED_BEGIN; }

} // namespace shim

inline u32 shared_address(const void *shared) { return shim::shared_address(shared); }

inline void barrier_begin(PhaseBarrier &barrier, u32 count) { shim::barrier_begin(&barrier, count); }
inline void fence_barriers() {}
inline void barrier_arrive(PhaseBarrier &barrier) { shim::barrier_arrive(&barrier); }
inline void barrier_arrive_after_copies(PhaseBarrier &barrier) { shim::barrier_arrive_after_copies(&barrier); }
inline void barrier_wait(PhaseBarrier &barrier, u32 parity) { shim::barrier_wait(&barrier, parity); }
inline void barrier_arrive_and_expect(PhaseBarrier &barrier, u32 bytes) { shim::barrier_arrive_and_expect(&barrier, bytes); }
inline void named_barrier_wait(u32 number, u32 threads) { shim::named_barrier(number, threads, true); }
inline void named_barrier_arrive(u32 number, u32 threads) { shim::named_barrier(number, threads, false); }

inline void prefetch_map(const TensorMap &) {}
inline void copy_box(void *to, const TensorMap &from, u32 column, u32 row, u32 head, u32 block, PhaseBarrier &barrier) {
    static_assert(sizeof(shim::Tensor) <= sizeof(TensorMap), "the map of a device has 128 bytes");
    u32 first = shared_address(to);
    if (first % (8 * PANEL_ROW_BYTES)) shim::fail("copy_box to an address that is not aligned to 1024");
    auto address_of = [first](unsigned piece) -> void * {
        u32 address = first + piece * 16;
        return const_cast<u8 *>(shim::shared_pointer(address ^ (address >> 7 & 7) << 4));
    };
    shim::Tensor tensor;
    memcpy(&tensor, &from, sizeof(tensor));
    shim::copy_box(tensor, {int(column), int(row), int(head), int(block)}, address_of, &barrier);
}

// The bytes of a descriptor of devices: address / 16, distance of panels / 16, and distance of eight rows / 16.
struct MatrixDescriptor {
    u32 low;

    MatrixDescriptor(const void *matrix, u32 panel_bytes) : low(shared_address(matrix) / 16 | panel_bytes / 16 << 16) {}
    u64 at(u32 bytes) const { return u64(1 << 30 | 8 * PANEL_ROW_BYTES / 16) << 32 | (low + bytes / 16); }
};

namespace shim {

// Returns the number at a byte offset of a matrix, before swizzling.
template <class T> double number_at(u64 matrix, u32 offset) {
    u32 address = u32(matrix & 0x3fff) * 16 + offset;
    T number;
    memcpy(&number, shared_pointer(address ^ (address >> 7 & 7) << 4), sizeof(T));
    return double(to_float(number));
}

// Number k of row `row`, of rows that are summed over.
template <class T> double along_row(u64 matrix, u32 row, u32 k) {
    return number_at<T>(matrix, row / 8 * (u32(matrix >> 32 & 0x3fff) * 16) + row % 8 * PANEL_ROW_BYTES + k * sizeof(T));
}
// Number n of row k, of columns that are summed over.
template <class T> double across_rows(u64 matrix, u32 k, u32 n) {
    u32 panel_bytes = u32(matrix >> 16 & 0x3fff) * 16, eight_rows = u32(matrix >> 32 & 0x3fff) * 16;
    return number_at<T>(matrix, n / PANEL * panel_bytes + n % PANEL * sizeof(T) + k / 8 * eight_rows + k % 8 * PANEL_ROW_BYTES);
}

// The products of a warp, which has 16 rows of a and d.
template <class T, u32 N> void multiply_64_warp(void *const *lanes) {
    auto lane_of = [&](u32 lane) { return static_cast<const Product *>(lanes[lane]); };
    u32 first_row = threadIdx.x / WARP % 4 * 16;
    double a[16][16], b[16][N], d[16][N]; // [row][column]
    for (u32 k = 0; k < 16; k++)
        for (u32 n = 0; n < N; n++) b[k][n] = lane_of(0)->a ? across_rows<T>(lane_of(0)->b, k, n) : along_row<T>(lane_of(0)->b, n, k);
    for (u32 lane = 0; lane < WARP; lane++) {
        const Product &own = *lane_of(lane);
        u32 g = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 8; i++) {
            u32 row = g + i / 2 % 2 * 8, k = 2 * t + i % 2 + i / 4 * 8;
            a[row][k] = own.a ? number<T>(own.a[i / 2], i % 2) : along_row<T>(own.a_matrix, first_row + row, k);
        }
        for (u32 i = 0; i < N / 2; i++) d[g + i / 2 % 2 * 8][i / 4 * 8 + 2 * t + i % 2] = own.adds ? own.d[i] : 0.0;
    }
    for (u32 row = 0; row < 16; row++)
        for (u32 k = 0; k < 16; k++)
            for (u32 n = 0; n < N; n++) d[row][n] += a[row][k] * b[k][n];
    for (u32 lane = 0; lane < WARP; lane++)
        for (u32 i = 0; i < N / 2; i++) {
            float sum = float(d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
            lane_of(lane)->d[i] = wgmma_is_inexact ? inexact(sum) : sum;
        }
}

} // namespace shim

inline void fence_shared_for_tensor_cores() {}
inline void products_begin() {}
inline void products_commit() { shim::products_commit(); }
template <int n> void products_wait() { shim::products_wait(n); }
template <class Registers> void pin(Registers &) {}

template <class T, u32 N> void multiply_64(float (&d)[N / 8][4], u64 a, u64 b, bool adds) {
    shim::product({&d[0][0], a, nullptr, b, adds, shim::multiply_64_warp<T, N>});
}
template <class T, u32 N> void add_product_64(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) {
    shim::product({&d[0][0], 0, a, b, true, shim::multiply_64_warp<T, N>});
}

inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline float __fdividef(float a, float b) { return a / b; }
