// CUDA's words for g++, so that kernels run on a machine without a GPU. kernels/common.cuh says which of them kernels may use.
//
// The threads of a block are fibers of one OS thread, the blocks of a launch run one after another, and several OS threads may launch at
// the same time. Fibers and blocks run in an order drawn from the seed, and shared memory is full of 0xFF when a block begins: a missing
// barrier or a number that nobody wrote shows. A read or write behind the end of dynamic shared memory is a SIGSEGV.
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
// Without an initial value, so that it lies in .tbss: what begins as 0xFF.
#define __shared__ static thread_local
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(shim::dynamic_shared())
// What an OS thread keeps to itself and must not be taken for shared memory.
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

const unsigned MAX_THREADS = 1024;
const size_t MAX_DYNAMIC_SHARED = 227 << 10;
const int POISON = 0xff;

// Runs a kernel to its end. Says what it did wrong, nothing if nothing.
std::string run(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()> &kernel);

template <class... Parameters, class... Arguments>
std::string launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, void (*kernel)(Parameters...), Arguments... arguments) {
    return run(grid, block, dynamic_shared_bytes, [&] { kernel(arguments...); });
}

// The order in which fibers and blocks of the next launches run; at first what the environment's SHIM_SEED says.
void seed(uint32_t seed);

// Ends the launch with this error.
[[noreturn]] void fail(const std::string &why);

// The threads of a block wait for each other.
void meet_block();

// The lanes of a warp wait for each other. Each leaves the address of what it brings; when all are there, `work` is done for all of them.
// lanes: [32], null where a warp that is not whole has no thread
typedef void Work(void *const *lanes);
void meet_warp(const char *what, unsigned mask, void *mine, Work *work);

unsigned lane();
void *dynamic_shared();
// Whether so many bytes there are aligned to their number, and in shared memory.
void check_shared(const char *what, const void *address, unsigned bytes);

// As copy_async_* in tensor.cuh.
void copy_async(const char *what, void *shared, const void *global, bool there, unsigned bytes);
void copy_async_commit();
void copy_async_wait(unsigned under_way);

struct Shuffle {
    uint64_t value;
    unsigned source;
};
Work shuffle_lanes;
Work count_votes; // of unsigned: 0 or 1, then the lanes that had 1
Work nothing;

template <class T> T shuffle(const char *what, unsigned mask, T x, unsigned source) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "what a shuffle moves");
    Shuffle mine = {0, source};
    memcpy(&mine.value, &x, sizeof(T));
    meet_warp(what, mask, &mine, shuffle_lanes);
    memcpy(&x, &mine.value, sizeof(T));
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

// The nearest, of two the even one. NaN becomes the one that devices make.
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

inline void __syncthreads() { shim::meet_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::meet_warp("__syncwarp", mask, nullptr, shim::nothing); }

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
    shim::meet_warp("__ballot_sync", mask, &votes, shim::count_votes);
    return votes;
}

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
