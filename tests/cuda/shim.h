// The CUDA language for g++, so that kernels run on a machine without a GPU. kernels/common.cuh lists the features that kernels may use.
//
// The threads of a block are fibers of one OS thread. The blocks of a launch run one after another. Several OS threads can launch at the
// same time. Fibers and blocks run in an order drawn from the seed, and shared memory contains 0xFF when a block begins. This reveals
// missing barriers and uninitialized numbers. An access beyond dynamic shared memory is a SIGSEGV.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <string>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__ static const
#define __grid_constant__
// Without an initial value, so that it is in .tbss, which each block initializes with 0xFF.
#define __shared__ static thread_local
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(shim::dynamic_shared())
// Data of an OS thread that is not shared memory of a block.
#define PER_OS_THREAD __attribute__((section(".tdata"))) __thread

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern __thread dim3 threadIdx, blockIdx, blockDim, gridDim;

#define VECTORS(type, name)                                                                                  \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                 \
    struct name##3 { type x, y, z; };                                                                        \
    struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };                                           \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                         \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                              \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(float, float)
VECTORS(int, int)
VECTORS(unsigned, uint)
#undef VECTORS

namespace shim {

// Whether the products of instructions change sums to which they add zero.
extern bool mma_is_inexact, wgmma_is_inexact;

const unsigned MAX_THREADS = 1024;
const size_t MAX_DYNAMIC_SHARED = 227 << 10;
const int POISON = 0xff;

// Runs a kernel to its end. Returns its error, or an empty string.
std::string run(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()> &kernel);

template <class... Parameters, class... Arguments>
std::string launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, void (*kernel)(Parameters...), Arguments... arguments) {
    return run(grid, block, dynamic_shared_bytes, [&] { kernel(arguments...); });
}

// Sets the seed for the order of fibers and blocks in the next launches. The default is the environment variable SHIM_SEED.
void seed(uint32_t seed);

// Ends the launch with this error.
[[noreturn]] void fail(const std::string &error);

// Waits until all threads of the block have called it.
void sync_block();

// Waits until all lanes of the warp have called it, and then runs `work` once with the `data` of each lane.
// lanes: [32]; null for missing threads of a partial warp
typedef void Work(void *const *lanes);
void sync_warp(const char *what, unsigned mask, void *data, Work *work);

unsigned lane();
void *dynamic_shared();
// Ends the launch if the address is not in shared memory, or not aligned to `bytes`.
void check_shared(const char *what, const void *address, unsigned bytes);

// See copy_async_* in tensor.cuh.
void copy_async(const char *what, void *shared, const void *global, bool valid, unsigned bytes);
void copy_async_commit();
void copy_async_wait(unsigned pending);

// See kernels/hopper.cuh. Copies that a barrier waits for are as late as possible.
void barrier_begin(uint64_t *barrier, unsigned count);
void barrier_arrive(uint64_t *barrier);
void barrier_arrive_after_copies(uint64_t *barrier);
void barrier_wait(uint64_t *barrier, unsigned parity);
void barrier_arrive_and_expect(uint64_t *barrier, unsigned bytes);

// A tensor of 16-bit numbers and the size of its boxes, the innermost dimension first, as cuTensorMapEncodeTiled of libcuda.cpp encodes
// them. Strides are in bytes.
struct Tensor {
    const char *begin;
    uint64_t strides[3];
    uint32_t dims[4], box[4];
};

// Copies a box as late as possible, and reports its bytes to the barrier. `to` is the address of each of its pieces of 16 bytes.
void copy_box(const Tensor &from, const int (&at)[4], const std::function<void *(unsigned piece)> &to, uint64_t *barrier);
// Returns the number of boxes that were copied so far, by all threads.
uint64_t boxes();
void named_barrier(unsigned number, unsigned threads, bool waits);

// A lane's part of a product of a warpgroup. A warp's products are computed when it waits for them.
struct Product {
    float *d;
    uint64_t a_matrix; // in shared memory, if `a` is null
    const uint32_t *a; // in registers
    uint64_t b;
    bool adds;
    Work *work; // gets the lanes' products
    unsigned group = 0;
};
void product(Product product);
void products_commit();
void products_wait(unsigned pending);

struct Shuffle {
    uint64_t value;
    unsigned source;
};
Work shuffle_lanes;
Work count_votes; // data: an unsigned vote (0 or 1), replaced by the mask of lanes with 1
Work nothing;

template <class T> T shuffle(const char *what, unsigned mask, T x, unsigned source) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "shuffles move at most 8 bytes");
    Shuffle shuffle = {0, source};
    memcpy(&shuffle.value, &x, sizeof(T));
    sync_warp(what, mask, &shuffle, shuffle_lanes);
    memcpy(&x, &shuffle.value, sizeof(T));
    return x;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float half_to_float(uint16_t half) {
    uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
    return float_of(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13);
}

// Rounds to nearest, ties to even. NaN becomes the NaN of devices.
inline uint16_t float_to_half(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000u, bits = bits_of(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fff;
    if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00u);                                      // 65520 and more
    if (bits < 0x38800000u) return uint16_t(sign | (bits_of(fabsf(x) + 0.5f) - bits_of(0.5f))); // the addition rounds to multiples of 2^-24
    return uint16_t(sign | (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13);
}

inline uint16_t float_to_bf16(float x) {
    uint32_t bits = bits_of(x);
    if (x != x) return 0x7fff;
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

} // namespace shim

inline void __syncthreads() { shim::sync_block(); }
inline int __syncthreads_count(bool vote) {
    __shared__ unsigned votes;
    __syncthreads(); // all threads have read the previous count
    if (threadIdx.x == 0) votes = 0;
    __syncthreads();
    votes += vote;
    __syncthreads();
    return int(votes);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::sync_warp("__syncwarp", mask, nullptr, shim::nothing); }

template <class T> T __shfl_sync(unsigned mask, T x, int source) { return shim::shuffle("__shfl_sync", mask, x, unsigned(source) % 32); }
template <class T> T __shfl_xor_sync(unsigned mask, T x, int bits) {
    return shim::shuffle("__shfl_xor_sync", mask, x, shim::lane() ^ unsigned(bits));
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned step) {
    unsigned source = shim::lane() + step;
    return shim::shuffle("__shfl_down_sync", mask, x, source < 32 ? source : shim::lane());
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    unsigned votes = vote;
    shim::sync_warp("__ballot_sync", mask, &votes, shim::count_votes);
    return votes;
}

// The threads of a block take turns, so this is atomic within a block. Only for shared memory.
template <class T> T atomicAdd(T *p, T x) {
    shim::check_shared("atomicAdd", p, sizeof(T));
    T before = *p;
    *p += x;
    return before;
}

// Counts in global memory. The blocks of a launch run one after another, so this is atomic, and the writes of a block are visible to later ones.
inline unsigned atomicInc(unsigned *p, unsigned limit) {
    unsigned before = *p;
    *p = before >= limit ? 0 : before + 1;
    return before;
}
inline void __threadfence() {}

template <class T> T __ldg(const T *p) { return *p; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

template <class A, class B> constexpr typename std::common_type<A, B>::type min(A a, B b) {
    if constexpr (std::is_floating_point<A>::value) return fmin(a, b);
    else return typename std::common_type<A, B>::type(a) < typename std::common_type<A, B>::type(b) ? a : b;
}
template <class A, class B> constexpr typename std::common_type<A, B>::type max(A a, B b) {
    if constexpr (std::is_floating_point<A>::value) return fmax(a, b);
    else return typename std::common_type<A, B>::type(a) < typename std::common_type<A, B>::type(b) ? b : a;
}
