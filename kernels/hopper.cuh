// Instructions of Hopper (sm_90a), each as one function: tensor cores that a warpgroup uses
// asynchronously, barriers in shared memory, copies of boxes of a tensor (TMA), and the division of
// registers among warpgroups.
//
// A warpgroup is 4 consecutive warps, the first of which has a number divisible by 4.
// tests/cuda/shim_hopper.h provides host versions.
#pragma once
#include "tensor.cuh"

#define WARPGROUP 128

// A matrix in shared memory is stored in panels of 64 numbers of 16 bits, which is 128 bytes. A
// panel has its rows one after another, and begins at a multiple of 1024 bytes. The eight 16-byte
// chunks of a row are swizzled, so that neither eight chunks of a row nor one chunk of eight rows
// share banks.
#define PANEL 64u           // numbers per row of a panel
#define PANEL_ROW_BYTES 128 // bytes per row of a panel

// Returns the byte offset of a 16-byte chunk in a panel.
__device__ __forceinline__ u32 panel_offset(u32 row, u32 chunk) { return row * PANEL_ROW_BYTES + ((chunk ^ row % 8) * 16); }

// A barrier whose phase ends after a number of arrivals. Phases alternate between parity 0 and 1.
typedef u64 PhaseBarrier;

// A tensor of 16-bit numbers with four dimensions in global memory, and the size of the boxes that
// are copied from it: 64 numbers of some rows, which become a part of a panel. The driver encodes it
// (tensor_map.rs).
struct __align__(128) TensorMap {
    u64 opaque[16];
};

#ifdef __CUDACC__

__device__ __forceinline__ u32 shared_address(const void *shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

// Returns the number of this thread's warpgroup in its block, as a value that the compiler knows to
// be the same in all lanes.
__device__ __forceinline__ u32 warpgroup_in_block() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0); }

// Sets the maximum number of registers of the warpgroup's threads. `take` waits until other
// warpgroups have given up enough.
template <u32 REGISTERS> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <u32 REGISTERS> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// ---- barriers

__device__ __forceinline__ void barrier_begin(PhaseBarrier &barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}

// Makes the barriers that this thread has initialized visible to copies of boxes.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(PhaseBarrier &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives when all asynchronous copies that this thread has started are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(PhaseBarrier &barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives, and delays the end of the phase until copies of boxes have reported this many bytes more.
__device__ __forceinline__ void barrier_arrive_and_expect(PhaseBarrier &barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// Loads a map that copies need later.
__device__ __forceinline__ void prefetch_map(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Copies the box at [block, head, row, column] to a panel, from a row on that is a multiple of 8. The
// bytes are reported to the barrier when they have arrived.
__device__ __forceinline__ void copy_box(void *to, const TensorMap &from, u32 column, u32 row, u32 head, u32 block, PhaseBarrier &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                     shared_address(to)),
                 "l"(&from), "r"(column), "r"(row), "r"(head), "r"(block), "r"(shared_address(&barrier))
                 : "memory");
}

// Waits for the end of the phase with this parity. The phase before the first one has parity 1 and
// has ended.
__device__ __forceinline__ void barrier_wait(PhaseBarrier &barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(&barrier)),
                 "r"(parity)
                 : "memory");
}

// Barriers between warps of a block, by number from 1 to 15. `threads` counts those that wait and
// those that only arrive.
__device__ __forceinline__ void named_barrier_wait(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(u32 number, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- tensor cores

// Describes a matrix in panels to the tensor cores. `panel_bytes` is the distance of its panels; it
// matters only for matrices whose rows are summed over.
struct MatrixDescriptor {
    u32 low;

    __device__ __forceinline__ MatrixDescriptor(const void *matrix, u32 panel_bytes)
        : low(shared_address(matrix) / 16 | panel_bytes / 16 << 16) {}

    // Returns the descriptor of the part that begins `bytes` later.
    __device__ __forceinline__ u64 at(u32 bytes) const {
        const u32 swizzle_128_bytes = 1 << 30, eight_rows = 8 * PANEL_ROW_BYTES / 16;
        return u64(swizzle_128_bytes | eight_rows) << 32 | (low + bytes / 16);
    }
};

// Makes data that this thread has written to shared memory, or has seen after a barrier, visible to
// the tensor cores.
__device__ __forceinline__ void fence_shared_for_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Precedes products after registers that they read or add to were changed.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most n groups are pending.
template <int n> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory"); }

// Prevents the compiler from moving accesses to these registers across this point.
template <u32 n> __device__ __forceinline__ void pin(float (&numbers)[n][4]) {
#pragma unroll
    for (u32 i = 0; i < n * 4; i++) asm volatile("" : "+f"(numbers[i / 4][i % 4])::"memory");
}
template <u32 n> __device__ __forceinline__ void pin(u32 (&numbers)[n][4]) {
#pragma unroll
    for (u32 i = 0; i < n * 4; i++) asm volatile("" : "+r"(numbers[i / 4][i % 4])::"memory");
}

// d = a * b, or d += a * b if `adds`, by a warpgroup: a is [64, 16], b is [16, N], d is [64, N] in
// f32. a and b are in shared memory, both with rows along the 16. A warp has 16 rows of d, in the
// layout of mma_16816.
template <class T, u32 N> __device__ __forceinline__ void multiply_64(float (&d)[N / 8][4], u64 a, u64 b, bool adds);

// d += a * b. a is in registers, in the layout of mma_16816. b is in shared memory, with rows along
// the N.
template <class T, u32 N> __device__ __forceinline__ void add_product_64(float (&d)[N / 8][4], const u32 (&a)[4], u64 b);

#define QUAD(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define QUADS_4(d, n) QUAD(d, n), QUAD(d, n + 1), QUAD(d, n + 2), QUAD(d, n + 3)
#define QUADS_8(d) QUADS_4(d, 0), QUADS_4(d, 4)
#define QUADS_16(d) QUADS_8(d), QUADS_4(d, 8), QUADS_4(d, 12)
#define NAMES_32                                                                                                                    \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64                                                                                                                    \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define WGMMA(T, N, NAMES, QUADS, A0, A1, A2, A3, A4)                                                                               \
    template <> __device__ __forceinline__ void multiply_64<T, N>(float(&d)[N / 8][4], u64 a, u64 b, bool adds) {                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2 ", 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" NAMES "}, %" #A0 ", %" #A1 ", p, 1, 1, 0, 0;\n}" \
                     : QUADS(d)                                                                                                     \
                     : "l"(a), "l"(b), "r"(u32(adds))                                                                               \
                     : "memory");                                                                                                   \
    }                                                                                                                               \
    template <> __device__ __forceinline__ void add_product_64<T, N>(float(&d)[N / 8][4], const u32(&a)[4], u64 b) {                 \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" NAMES "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3    \
                     "}, %" #A4 ", 1, 1, 1, 1;"                                                                                     \
                     : QUADS(d)                                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                           \
                     : "memory");                                                                                                   \
    }

WGMMA(bf16, 64, NAMES_32, QUADS_8, 32, 33, 34, 35, 36)
WGMMA(bf16, 128, NAMES_64, QUADS_16, 64, 65, 66, 67, 68)
WGMMA(f16, 64, NAMES_32, QUADS_8, 32, 33, 34, 35, 36)
WGMMA(f16, 128, NAMES_64, QUADS_16, 64, 65, 66, 67, 68)

#undef WGMMA

#else
#include "shim_hopper.h"
#endif
