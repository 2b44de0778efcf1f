// Tests of the shim: tests/cuda/build.sh OUT_DIR test
#include "libcuda.cpp"
#include "hopper.cuh"

#include <sys/wait.h>
#include <unistd.h>

#include <random>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (condition) break;                                                       \
        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);             \
        exit(1);                                                                    \
    } while (0)

static bool contains(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

// Runs `body` in a child process. Returns the signal that ends it, or 0.
template <class Body> int signal_of(Body body) {
    pid_t child = fork();
    if (child == 0) {
        driver.process = getpid(); // as if it had not been forked
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

// ---- kernels

extern "C" __global__ void shuffles(u32 *out /* [4, 64] */, double *wide /* [64] */) {
    u32 i = threadIdx.x;
    out[i] = __shfl_sync(ALL_LANES, i, 5);
    out[64 + i] = __shfl_xor_sync(ALL_LANES, i, 9);
    out[128 + i] = __shfl_down_sync(ALL_LANES, i, 30);
    out[192 + i] = __ballot_sync(ALL_LANES, i % 3 == 0);
    wide[i] = __shfl_xor_sync(ALL_LANES, i + 0.5, 1);
}

extern "C" __global__ void block_sums(float *out /* [blocks] */, const float *x /* [blocks, threads] */) {
    float sum = block_sum(x[blockIdx.x * blockDim.x + threadIdx.x]);
    sum = block_sum(sum / float(blockDim.x)); // the second sum reuses the shared memory of the first
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void histogram(u32 *out /* [3] */, u32 *befores /* [threads] */) {
    __shared__ u32 bins[2];
    if (threadIdx.x < 2) bins[threadIdx.x] = 0;
    u32 fives = u32(__syncthreads_count(threadIdx.x % 5 == 0)), odd = u32(__syncthreads_count(threadIdx.x % 2));
    befores[threadIdx.x] = atomicAdd(&bins[threadIdx.x % 2], 3u);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = bins[0], out[1] = bins[1], out[2] = 1000 * fives + odd;
}

extern "C" __global__ void reversed(u32 *out /* [threads] */, u32 with_barrier) {
    DYNAMIC_SHARED(u32, tile);
    tile[threadIdx.x] = threadIdx.x;
    if (with_barrier) __syncthreads();
    out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void untouched(u32 *out /* [2] */) {
    DYNAMIC_SHARED(u32, dynamic);
    __shared__ u32 own[1];
    out[0] = dynamic[0];
    out[1] = own[0];
    dynamic[0] = own[0] = 0; // the next block must not see this
}

extern "C" __global__ void places(u32 *out /* [z, y, x, threads] */) {
    u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + thread % 32 - shim::lane();
}

extern "C" __global__ void diverging(u32 how) {
    u32 i = threadIdx.x;
    if (how == 0) i > 3 ? __syncthreads() : __syncwarp();
    if (how == 1 && i < 32) __syncthreads(); // the other warps have ended
    if (how == 2) i % 2 ? void(__ballot_sync(ALL_LANES, true)) : void(__shfl_sync(ALL_LANES, i, 0));
    if (how == 3 && i < 16) __syncwarp(0xffff);
}

extern "C" __global__ void past_shared() {
    DYNAMIC_SHARED(volatile u32, tile);
    tile[blockDim.x] = 1;
}

extern "C" __global__ void past_memory(u32 *x, u32 i) { x[i] = 7; }

extern "C" __global__ void misaligned(const u16 *x, u32 *out) { *out = *reinterpret_cast<const u32 *>(x + 1); }

// The registers of lane l are at index l.
template <class T> __device__ void product(float (*d)[4], const u32 (*a)[4], const u32 (*b)[2]) {
    mma_16816<T>(d[threadIdx.x], a[threadIdx.x], b[threadIdx.x]);
}
extern "C" __global__ void product_bf16(float (*d)[4], const u32 (*a)[4], const u32 (*b)[2]) { product<bf16>(d, a, b); }
extern "C" __global__ void product_f16(float (*d)[4], const u32 (*a)[4], const u32 (*b)[2]) { product<f16>(d, a, b); }

// Rows of matrix m begin with number 100 * m + 10 * row.
extern "C" __global__ void load_matrices(u32 (*out)[4] /* [32] */, u32 how) {
    __shared__ __align__(16) u16 rows[32][8];
    for (u32 i = 0; i < 8; i++) rows[threadIdx.x][i] = u16(100 * (threadIdx.x / 8) + 10 * (threadIdx.x % 8) + i);
    __syncwarp();
    const u16 *row = rows[threadIdx.x];
    if (how == 0) ldmatrix_x4(out[threadIdx.x], row);
    if (how == 1) ldmatrix_x4_transposed(out[threadIdx.x], row);
    if (how == 2) ldmatrix_x4(out[threadIdx.x], out);
    if (how == 3) ldmatrix_x4(out[threadIdx.x], row + (threadIdx.x == 31 ? 0 : 1));
}

// Writes the content of a tile of three copies after `how` groups have completed. The last copy is zero-filled.
extern "C" __global__ void copies(u32 *out /* [3, 4] */, const u32 *x /* [3, 4] */, u32 how) {
    __shared__ __align__(16) u32 tile[3][4];
    for (u32 i = 0; i < 3; i++) {
        copy_async_16(tile[i], x + 4 * i, i < 2);
        copy_async_commit();
    }
    if (how == 1) copy_async_wait<2>();
    if (how == 3) copy_async_wait<0>();
    memcpy(out, tile, sizeof(tile));
}

extern "C" __global__ void copies_of_words(u32 *out /* [2] */, const u32 *x /* [2] */) {
    __shared__ u32 tile[2];
    for (u32 i = 0; i < 2; i++) copy_async_4(&tile[i], x + i, i == 1);
    copy_async_commit();
    copy_async_wait<0>();
    memcpy(out, tile, sizeof(tile));
}

extern "C" __global__ void copy_uncommitted(u32 *out /* [4] */, const u32 *x /* [4] */) {
    __shared__ __align__(16) u32 tile[4];
    copy_async_16(tile, x, true);
    copy_async_wait<0>();
    memcpy(out, tile, sizeof(tile));
}

extern "C" __global__ void add_one(u32 *x /* [threads] */) { x[threadIdx.x]++; }

const Kernel kernel_table[] = {
    KERNEL(add_one) KERNEL(diverging) KERNEL(past_memory) KERNEL(reversed)
    {nullptr, nullptr},
};

// ---- threads

static void shuffles_return_the_value_of_the_source_lane() {
    u32 out[4][64];
    double wide[64];
    CHECK(shim::launch(1, 64, 0, shuffles, out[0], wide) == "");
    for (u32 i = 0; i < 64; i++) {
        u32 warp = i / 32 * 32, votes = 0;
        for (u32 lane = 0; lane < 32; lane++) votes |= u32((warp + lane) % 3 == 0) << lane;
        CHECK(out[0][i] == warp + 5 && out[1][i] == (i ^ 9) && out[2][i] == (i % 32 < 2 ? i + 30 : i) && out[3][i] == votes);
        CHECK(wide[i] == (i ^ 1) + 0.5);
    }
}

static void block_sums_are_correct_in_every_order() {
    for (u32 seed = 0; seed < 50; seed++) {
        shim::seed(seed);
        std::vector<float> x(3 * 96), out(3);
        for (size_t i = 0; i < x.size(); i++) x[i] = float(i);
        CHECK(shim::launch(3, 96, 0, block_sums, out.data(), x.data()) == "");
        for (int block = 0; block < 3; block++) CHECK(out[block] == 96 * 96.0f * block + 95 * 48);
    }
}

static void a_missing_barrier_gives_wrong_results() {
    int wrong = 0;
    for (u32 with_barrier : {0, 1}) {
        for (u32 run = 0; run < 20; run++) {
            u32 out[256];
            CHECK(shim::launch(1, 256, 1024, reversed, out, with_barrier) == "");
            bool right = true;
            for (u32 i = 0; i < 256; i++) right = right && out[i] == 255 - i;
            CHECK(right || !with_barrier);
            wrong += !right;
        }
    }
    CHECK(wrong == 20);
}

static void shared_memory_is_initialized_with_poison() {
    u32 out[2];
    CHECK(shim::launch(5, 1, 16, untouched, out) == "");
    CHECK(out[0] == ~0u && out[1] == ~0u);
}

static void every_thread_of_every_block_runs_once() {
    std::vector<u32> out(7 * 3 * 2 * 4 * 3 * 5);
    CHECK(shim::launch(dim3(7, 3, 2), dim3(4, 3, 5), 0, places, out.data()) == "");
    for (u32 count : out) CHECK(count == 1);
}

static void threads_that_wait_at_different_points_are_an_error() {
    const char *const places[] = {"__syncwarp", "the end of the kernel", "__ballot_sync", "with a partial lane mask"};
    for (u32 how = 0; how < 4; how++) {
        std::string error = shim::launch(1, 64, 0, diverging, how);
        CHECK(contains(error, places[how]) && (how == 3 || contains(error, "different barriers")));
    }
    CHECK(shim::launch(1, 64, 0, diverging, 9) == "");
    CHECK(contains(shim::launch(1, 1025, 0, diverging, 9), "1025 threads"));
}

static void invalid_accesses_raise_signals() {
    CHECK(signal_of([] { shim::launch(1, 32, 128, past_shared); }) == SIGSEGV);
    alignas(4) u16 x[4] = {};
    u32 out;
    CHECK(signal_of([&] { shim::launch(1, 1, 0, misaligned, x, &out); }) == SIGILL);
}

static void in_four_threads(void (*body)()) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) threads.emplace_back(body);
    for (auto &thread : threads) thread.join();
}

static void counts_and_shared_sums_are_correct_in_every_order() {
    for (u32 seed = 0; seed < 20; seed++) {
        shim::seed(seed);
        u32 out[3], befores[64];
        CHECK(shim::launch(1, 64, 0, histogram, out, befores) == "");
        CHECK(out[0] == 3 * 32 && out[1] == 3 * 32 && out[2] == 13032);
        for (u32 first = 0; first < 2; first++) {
            u32 sum = 0;
            for (u32 i = first; i < 64; i += 2) sum += befores[i]; // 0, 3, .., 93 in some order
            CHECK(sum == 3 * 31 * 32 / 2);
        }
    }
}

static void several_threads_can_launch_at_the_same_time() { in_four_threads(block_sums_are_correct_in_every_order); }

// ---- tensor cores and asynchronous copies

template <class T, class Kernel> static void check_product(Kernel kernel) {
    std::minstd_rand random(7);
    std::normal_distribution<float> normal;
    T a[16][16], b[16][8];
    for (auto &row : a) for (T &x : row) x = from_float<T>(normal(random));
    for (auto &row : b) for (T &x : row) x = from_float<T>(normal(random));
    auto pair = [](T low, T high) { return u32(low.bits) | u32(high.bits) << 16; };
    u32 a_registers[32][4], b_registers[32][2];
    float d[32][4];
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        a_registers[lane][0] = pair(a[g][2 * t], a[g][2 * t + 1]);
        a_registers[lane][1] = pair(a[g + 8][2 * t], a[g + 8][2 * t + 1]);
        a_registers[lane][2] = pair(a[g][2 * t + 8], a[g][2 * t + 9]);
        a_registers[lane][3] = pair(a[g + 8][2 * t + 8], a[g + 8][2 * t + 9]);
        b_registers[lane][0] = pair(b[2 * t][g], b[2 * t + 1][g]);
        b_registers[lane][1] = pair(b[2 * t + 8][g], b[2 * t + 9][g]);
        for (u32 i = 0; i < 4; i++) d[lane][i] = float(lane);
    }
    CHECK(shim::launch(1, 32, 0, kernel, d, a_registers, b_registers) == "");
    for (u32 row = 0; row < 16; row++) {
        for (u32 column = 0; column < 8; column++) {
            u32 lane = row % 8 * 4 + column / 2;
            double sum = lane;
            for (u32 k = 0; k < 16; k++) sum += double(to_float(a[row][k])) * to_float(b[k][column]);
            CHECK(fabs(d[lane][row / 8 * 2 + column % 2] - sum) < 1e-5);
        }
    }
}

static void tensor_core_products_equal_plain_loops() {
    check_product<bf16>(product_bf16);
    check_product<f16>(product_f16);
}

static void ldmatrix_loads_matrices_and_their_transposes() {
    for (u32 transposed : {0, 1}) {
        u32 out[32][4];
        CHECK(shim::launch(1, 32, 0, load_matrices, out, transposed) == "");
        for (u32 lane = 0; lane < 32; lane++) {
            for (u32 m = 0; m < 4; m++) {
                u32 row = transposed ? lane % 4 * 2 : lane / 4, i = transposed ? lane / 4 : lane % 4 * 2;
                u32 low = 100 * m + 10 * row + i, high = low + (transposed ? 10 : 1);
                CHECK(out[lane][m] == (low | high << 16));
            }
        }
    }
    u32 out[32][4];
    CHECK(contains(shim::launch(1, 32, 0, load_matrices, out, 2), "outside shared memory"));
    CHECK(contains(shim::launch(1, 32, 0, load_matrices, out, 3), "not aligned to 16"));
}

static void asynchronous_copies_complete_at_their_wait() {
    alignas(16) u32 x[13], out[12];
    for (u32 i = 0; i < 13; i++) x[i] = i;
    for (u32 completed : {0, 1, 3}) {
        CHECK(shim::launch(1, 1, 0, copies, out, x, completed) == "");
        for (u32 i = 0; i < 12; i++) CHECK(out[i] == (i / 4 >= completed ? ~0u : i / 4 == 2 ? 0 : i));
    }
    CHECK(shim::launch(1, 1, 0, copy_uncommitted, out, x) == "");
    CHECK(out[0] == ~0u);
    CHECK(contains(shim::launch(1, 1, 0, copies, out, x + 1, 3), "not aligned to 16"));
    CHECK(shim::launch(1, 1, 0, copies_of_words, out, x + 2) == "");
    CHECK(out[0] == 0 && out[1] == 3);
}

// Copies a box of [8, 64] numbers, from row `row` on, of a tensor [2, 4, 8, 64]. Writes its numbers in their order.
extern "C" __global__ void copies_a_box(u16 *out /* [8, 64] */, const __grid_constant__ TensorMap map, u32 row, u32 expected, u32 waits) {
    DYNAMIC_SHARED(u8, memory);
    u8 *panel = memory + (0u - shared_address(memory)) % 1024;
    PhaseBarrier &barrier = *reinterpret_cast<PhaseBarrier *>(panel + 1024);
    if (threadIdx.x == 0) barrier_begin(barrier, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_arrive_and_expect(barrier, expected);
        copy_box(panel, map, 0, row, 3, 1, barrier);
    } else {
        barrier_arrive(barrier);
    }
    if (waits) barrier_wait(barrier, 0);
    for (u32 i = threadIdx.x; i < 512; i += blockDim.x) {
        out[i] = *reinterpret_cast<const u16 *>(panel + panel_offset(i / 64, i % 64 / 8) + i % 8 * 2);
    }
}

static void a_box_arrives_in_swizzled_rows() {
    std::vector<u16> numbers(2 * 4 * 8 * 64), out(512);
    for (u32 i = 0; i < numbers.size(); i++) numbers[i] = u16(i);
    shim::Tensor tensor = {reinterpret_cast<const char *>(numbers.data()), {128, 1024, 4096}, {64, 8, 4, 2}, {64, 8, 1, 1}};
    TensorMap box_map;
    memcpy(&box_map, &tensor, sizeof(tensor));
    auto run = [&](int row, u32 expected, u32 waits) { return shim::launch(1, 64, 4096, copies_a_box, out.data(), box_map, u32(row), expected, waits); };
    for (int row : {0, 3, -2, -8, 8}) {
        CHECK(run(row, 1024, 1) == "");
        for (int i = 0; i < 512; i++) {
            int of = row + i / 64;
            CHECK(out[i] == (of < 0 || of >= 8 ? 0 : u16(((1 * 4 + 3) * 8 + of) * 64 + i % 64)));
        }
    }
    CHECK(run(0, 1024, 0) == "" && std::count(out.begin(), out.end(), u16(0xffff)) == 512);
    CHECK(contains(run(0, 512, 1), "more bytes arrive at a barrier than it expects"));
    CHECK(contains(run(0, 2048, 1), "all threads wait forever at barrier_wait"));
}

// ---- numbers

// Compares with the compiler, for all 16-bit numbers and numbers between them.
static void f16_is_rounded_to_nearest() {
    for (u32 bits = 0; bits < 0x10000; bits++) {
        _Float16 half;
        u16 short_bits = u16(bits);
        memcpy(&half, &short_bits, 2);
        float x = shim::half_to_float(short_bits);
        if (x != x) {
            CHECK(float(half) != float(half) && (shim::float_to_half(x) & 0x7fff) > 0x7c00);
            continue;
        }
        CHECK(x == float(half) && signbit(x) == signbit(float(half)) && shim::float_to_half(x) == bits);
        float next = (bits & 0x7fff) >= 0x7bff ? copysignf(65536, x) : shim::half_to_float(u16(bits + 1)), middle = x + (next - x) / 2;
        if (isinf(x)) continue;
        for (float between : {nextafterf(middle, x), middle, nextafterf(middle, next), nextafterf(next, x)}) {
            _Float16 rounded = _Float16(between);
            u16 expected;
            memcpy(&expected, &rounded, 2);
            CHECK(shim::float_to_half(between) == expected);
        }
    }
    CHECK(shim::float_to_half(INFINITY) == 0x7c00 && shim::float_to_half(-1e30f) == 0xfc00 && shim::float_to_half(-1e-30f) == 0x8000);
}

static void bf16_is_rounded_to_nearest() {
    for (u32 bits = 0; bits < 0x10000; bits++) {
        float x = shim::float_of(bits << 16);
        if (x != x) {
            CHECK((shim::float_to_bf16(x) & 0x7fff) > 0x7f80);
            continue;
        }
        CHECK(shim::float_to_bf16(x) == bits);
        if (isinf(x)) continue;
        u32 middle = bits << 16 | 0x8000;
        CHECK(shim::float_to_bf16(shim::float_of(middle - 1)) == bits);
        CHECK(shim::float_to_bf16(shim::float_of(middle)) == bits + bits % 2);
        CHECK(shim::float_to_bf16(shim::float_of(middle + 1)) == bits + 1);
    }
}

// Compares with the definition, and rounds numbers between two neighbours.
static void e4m3_is_decoded_by_its_definition_and_rounded_to_nearest() {
    auto value = [](u32 code) {
        u32 exponent = code >> 3 & 15, fraction = code & 7;
        float size = exponent ? ldexpf(float(8 + fraction), int(exponent) - 10) : ldexpf(float(fraction), -9);
        return code & 0x80 ? -size : size;
    };
    auto stored = [](float x) { return u32(from_float<e4m3>(x).bits); };
    for (u32 code = 0; code < 256; code++) CHECK(shim::bits_of(to_float(e4m3{u8(code)})) == shim::bits_of(value(code)));
    for (u32 code = 0; code < 0x7e; code++) {
        float low = value(code), high = value(code + 1), middle = (low + high) / 2;
        CHECK(stored(low) == code && stored(nextafterf(middle, low)) == code && stored(middle) == code + code % 2);
        CHECK(stored(nextafterf(middle, high)) == code + 1 && stored(-middle) == (0x80 | (code + code % 2)));
    }
    CHECK(stored(NAN) == 0 && stored(INFINITY) == 0x7e && stored(-449) == 0xfe && stored(480) == 0x7e && stored(-0.0f) == 0x80);
}

// Every byte at every position, with different neighbours.
template <class T> static void check_widening() {
    for (u32 byte = 0; byte < 256; byte++) {
        u32 four = byte | (byte ^ 0x80) << 8 | (byte + 3) % 256 << 16 | (255 - byte) << 24, pairs[2];
        widen<T>(pairs, four);
        for (u32 place = 0; place < 4; place++) {
            u8 bits = u8(four >> 8 * place);
            T number;
            memcpy(&number, &bits, 1);
            CHECK(to_float(bf16{u16(pairs[place % 2] >> place / 2 * 16)}) == to_float(number));
        }
    }
}

static void widened_bytes_equal_their_float_values() {
    check_widening<signed char>();
    check_widening<e4m3>();
}

// ---- the driver

// A context with a stream and the kernels of the test.
struct Session {
    Context *context = nullptr;
    void *stream = nullptr, *module = nullptr;

    Session() {
        CHECK(!cuInit(0) && !cuCtxCreate_v2(&context, 0, 0) && !cuStreamCreate(&stream, 1) && !cuModuleLoadData(&module, "image"));
    }
    ~Session() { CHECK(!cuCtxDestroy_v2(context)); }

    CUdeviceptr allocate(size_t bytes) {
        CUdeviceptr memory = 0;
        CHECK(!cuMemAlloc_v2(&memory, bytes));
        return memory;
    }

    template <class... Arguments> CUresult launch(const char *name, dim3 grid, dim3 block, unsigned shared, Arguments... arguments) {
        void *function = nullptr, *parameters[] = {&arguments...};
        CHECK(!cuModuleGetFunction(&function, module, name));
        LaunchConfig config = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, stream, nullptr, 0};
        return cuLaunchKernelEx(&config, function, parameters, nullptr);
    }
};

static void queued_work_runs_when_a_call_waits_for_it() {
    Session session;
    CUdeviceptr x = session.allocate(8);
    u32 sent[2] = {4, 5}, read[2] = {};
    uint64_t launches = shim_launches();
    CHECK(!cuMemcpyDtoH_v2(read, x, 8) && read[1] == ~0u); // poison
    CHECK(!cuMemcpyHtoDAsync_v2(x, sent, 8, session.stream));
    sent[0] = 9; // unpinned memory was read at once
    CHECK(!session.launch("add_one", 1, 2, 0, x) && !cuMemcpyDtoHAsync_v2(read, x, 8, session.stream));
    CHECK(read[0] == ~0u && shim_launches() == launches);
    CHECK(!cuStreamSynchronize(session.stream) && read[0] == 5 && read[1] == 6 && shim_launches() == launches + 1);
    CHECK(!cuMemsetD8_v2(x, 1, 4) && !cuMemcpyDtoH_v2(read, x, 8) && read[0] == 0x01010101 && read[1] == 6);
}

static void invalid_arguments_return_the_errors_of_the_driver() {
    Session session;
    CUdeviceptr x = session.allocate(64);
    u32 host[64];
    CHECK(cuMemcpyHtoD_v2(x + 32, host, 33) == CUDA_ERROR_INVALID_VALUE && cuMemcpyDtoH_v2(host, 1234, 4) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cuMemFree_v2(x + 16) == CUDA_ERROR_INVALID_VALUE);
    CHECK(session.launch("add_one", 0, 1, 0, x) == CUDA_ERROR_INVALID_VALUE);
    CHECK(session.launch("add_one", dim3(1, 65536), 1, 0, x) == CUDA_ERROR_INVALID_VALUE);
    CHECK(session.launch("add_one", 1, 1025, 0, x) == CUDA_ERROR_INVALID_VALUE);
    CHECK(session.launch("add_one", 1, 1, 50000, x) == CUDA_ERROR_INVALID_VALUE);
    void *function;
    CHECK(cuModuleGetFunction(&function, session.module, "missing") == CUDA_ERROR_NOT_FOUND);
    CHECK(!cuModuleGetFunction(&function, session.module, "reversed"));
    CHECK(cuFuncSetAttribute(function, FUNCTION_MAX_DYNAMIC_SHARED, 300000) == CUDA_ERROR_INVALID_VALUE);
    CHECK(!cuFuncSetAttribute(function, FUNCTION_MAX_DYNAMIC_SHARED, 227 << 10));
    CUdeviceptr out = x;
    u32 with_barrier = 1;
    void *parameters[] = {&out, &with_barrier};
    LaunchConfig config = {{1, 1, 1}, {16, 1, 1}, 227 << 10, session.stream, nullptr, 0};
    CHECK(!cuLaunchKernelEx(&config, function, parameters, nullptr) && !cuCtxSynchronize());
    Context *popped;
    CHECK(!cuCtxPopCurrent_v2(&popped) && cuCtxSynchronize() == CUDA_ERROR_INVALID_CONTEXT && !cuCtxPushCurrent_v2(popped));
}

static void allocations_are_counted_and_bounded() {
    {
        Session session;
        shim_memory(1000, 200);
        CUdeviceptr x = session.allocate(300), more;
        size_t free, total;
        CHECK(!cuMemGetInfo_v2(&free, &total) && free == 500 && total == 1000 && shim_live_allocations() == 1 && shim_live_bytes() == 300);
        CHECK(cuMemAlloc_v2(&more, 501) == CUDA_ERROR_OUT_OF_MEMORY);
        shim_memory(1 << 30, 0);
        CHECK(!cuMemFree_v2(x) && cuMemFree_v2(x) == CUDA_ERROR_INVALID_VALUE && shim_live_bytes() == 0);
        auto write = [&](u32 i) {
            return signal_of([&] { session.launch("past_memory", 1, 1, 0, x, i), cuCtxSynchronize(); });
        };
        x = session.allocate(16);
        CHECK(write(3) == 0 && write(4) == SIGSEGV);
        void *pinned;
        CHECK(!cuMemHostAlloc(&pinned, 8, 0) && shim_pinned_bytes() == 8 && !session.launch("add_one", 1, 2, 0, pinned) && !cuMemFreeHost(pinned));
    }
    CHECK(shim_live_allocations() == 0 && current() == nullptr);
}

static void a_kernel_error_persists_in_its_context() {
    Session other;
    {
        Session session;
        CUdeviceptr x = session.allocate(16);
        CHECK(!session.launch("diverging", 1, 64, 0, 0u));
        CHECK(cuStreamSynchronize(session.stream) == CUDA_ERROR_LAUNCH_FAILED && contains(shim_last_error(), "diverging: threads wait"));
        CHECK(session.context->error && cuMemAlloc_v2(&x, 16) == CUDA_ERROR_LAUNCH_FAILED && !cuMemFree_v2(x));
    }
    CHECK(!cuCtxSynchronize());
}

static void captured_work_runs_with_each_launch_of_its_graph() {
    Session session;
    CUdeviceptr x = session.allocate(4);
    CHECK(!cuMemsetD8_v2(x, 0, 4) && !cuStreamBeginCapture_v2(session.stream, 0));
    CHECK(!session.launch("add_one", 1, 1, 0, x) && !session.launch("add_one", 1, 1, 0, x));
    void *graph, *exec;
    int capturing;
    CHECK(!cuStreamIsCapturing(session.stream, &capturing) && capturing == 1);
    CHECK(!cuStreamEndCapture(session.stream, &graph) && !cuGraphInstantiateWithFlags(&exec, graph, 0) && !cuGraphDestroy(graph));
    u32 value;
    CHECK(!cuMemcpyDtoH_v2(&value, x, 4) && value == 0);
    for (int run = 0; run < 3; run++) CHECK(!cuGraphLaunch(exec, session.stream));
    CHECK(!cuGraphExecDestroy(exec) && !cuStreamSynchronize(session.stream) && !cuMemcpyDtoH_v2(&value, x, 4) && value == 6);

    CHECK(!cuStreamBeginCapture_v2(session.stream, 0) && cuStreamSynchronize(session.stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuStreamEndCapture(session.stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(!cuStreamBeginCapture_v2(session.stream, 0) && cuMemAlloc_v2(&x, 16) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuStreamEndCapture(session.stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

static void several_threads_can_have_contexts() { in_four_threads(captured_work_runs_with_each_launch_of_its_graph); }

static void events_record_the_time_of_work() {
    Session session;
    void *first, *second;
    float milliseconds;
    CHECK(!cuEventCreate(&first, 0) && !cuEventCreate(&second, 0) && !cuEventRecord(first, session.stream));
    CHECK(!cuEventRecord(second, session.stream) && cuEventElapsedTime(&milliseconds, first, second) == CUDA_ERROR_NOT_READY);
    CHECK(cuEventQuery(second) == CUDA_ERROR_NOT_READY);
    CHECK(!cuStreamWaitEvent(session.stream, first, 0) && !cuEventSynchronize(second) && !cuEventQuery(second));
    CHECK(!cuEventElapsedTime(&milliseconds, first, second) && milliseconds >= 0 && !cuEventDestroy_v2(first));
    CHECK(cuEventQuery(first) == CUDA_ERROR_INVALID_HANDLE);
}

static void a_stream_waits_for_an_event_of_another_stream() {
    Session session;
    CUdeviceptr x = session.allocate(4);
    void *other, *event;
    u32 value;
    CHECK(!cuMemsetD8_v2(x, 0, 4) && !cuStreamCreate(&other, 1) && !cuEventCreate(&event, 2));
    CHECK(!cuStreamWaitEvent(other, event, 0)); // never recorded: no wait
    CHECK(!session.launch("add_one", 1, 1, 0, x) && !cuEventRecord(event, session.stream) && !session.launch("add_one", 1, 1, 0, x));
    CHECK(!cuMemcpyDtoHAsync_v2(&value, x, 4, other) && !cuStreamSynchronize(other) && value == 0);
    CHECK(!cuStreamWaitEvent(other, event, 0) && !cuMemcpyDtoHAsync_v2(&value, x, 4, other) && !cuStreamSynchronize(other) && value == 1);
    CHECK(!cuEventRecord(event, session.stream) && !cuEventSynchronize(event));
    CHECK(!cuMemcpyDtoHAsync_v2(&value, x, 4, other) && !cuStreamSynchronize(other) && value == 2);

    shim_others_first(1);
    CHECK(!session.launch("add_one", 1, 1, 0, x) && !cuEventRecord(event, session.stream));
    CHECK(!cuMemcpyDtoHAsync_v2(&value, x, 4, other) && !cuStreamWaitEvent(session.stream, event, 0) && !cuEventRecord(event, other));
    CHECK(!cuStreamWaitEvent(session.stream, event, 0) && !session.launch("add_one", 1, 1, 0, x));
    CHECK(!cuEventSynchronize(event) && value == 3); // not 2, and not 4, whose work is blocked
    shim_others_first(0);
}

static void planned_failures_make_calls_fail() {
    Session session;
    CUdeviceptr x;
    shim_fail("cuMemAlloc_v2", 2, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(!cuMemAlloc_v2(&x, 16) && cuMemAlloc_v2(&x, 16) == CUDA_ERROR_OUT_OF_MEMORY && !cuMemAlloc_v2(&x, 16));
    shim_fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN);
    shim_fail("cuCtxSynchronize", 0, 0);
    CHECK(!cuCtxSynchronize());
    int version, value;
    const char *name;
    shim_driver_version(12040);
    CHECK(!cuDriverGetVersion(&version) && version == 12040 && !cuGetErrorName(719, &name) && !strcmp(name, "CUDA_ERROR_LAUNCH_FAILED"));
    CHECK(!cuDeviceGetAttribute(&value, 97, 0) && value == 232448 && cuDeviceGetAttribute(&value, 97, 1) == CUDA_ERROR_INVALID_DEVICE);
}

// ---- products by cuBLASLt

extern "C" {
int cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmulDescCreate(void **, int, int);
int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmul(void *, void *, const void *alpha, const void *a, void *, const void *b, void *, const void *beta, const void *c, void *,
                   void *d, void *, const void *, void *, size_t, void *stream);
}

// Two products of a weight [outputs, inputs] and activations [tokens, inputs], row-major as in the library.
static void a_row_major_product_is_a_transposed_column_major_product() {
    Session session;
    const u32 outputs = 3, inputs = 5, tokens = 2, batch = 2;
    CUdeviceptr memory = session.allocate(1024);
    auto weight = reinterpret_cast<bf16 *>(memory), x = weight + 64; // [batch, outputs, inputs], [batch, tokens, inputs]
    auto y = reinterpret_cast<float *>(x + 64), bias = y + 64;       // [batch, tokens, outputs], [outputs]
    for (u32 i = 0; i < 64; i++) {
        weight[i] = from_float<bf16>(float(i % 7));
        x[i] = from_float<bf16>(float(i % 5));
        bias[i] = float(100 * i);
    }

    void *description, *layouts[3];
    int transposed = 1, with_bias = 4, count = batch;
    CHECK(!cublasLtMatmulDescCreate(&description, 68, 0) && !cublasLtMatmulDescSetAttribute(description, 3, &transposed, 4));
    CHECK(!cublasLtMatmulDescSetAttribute(description, 7, &with_bias, 4) && !cublasLtMatmulDescSetAttribute(description, 8, &bias, 8));
    CHECK(!cublasLtMatrixLayoutCreate(&layouts[0], 14, inputs, outputs, inputs));
    CHECK(!cublasLtMatrixLayoutCreate(&layouts[1], 14, inputs, tokens, inputs));
    CHECK(!cublasLtMatrixLayoutCreate(&layouts[2], 0, outputs, tokens, outputs));
    int64_t strides[] = {outputs * inputs, tokens * inputs, tokens * outputs};
    for (int i = 0; i < 3; i++) {
        CHECK(!cublasLtMatrixLayoutSetAttribute(layouts[i], 5, &count, 4));
        CHECK(!cublasLtMatrixLayoutSetAttribute(layouts[i], 6, &strides[i], 8));
    }
    float alpha = 2, beta = 0;
    auto multiply = [&](void *a, void *b) {
        void *d = layouts[2];
        return cublasLtMatmul(nullptr, description, &alpha, weight, a, x, b, &beta, y, d, y, d, nullptr, nullptr, 0, session.stream);
    };
    CHECK(multiply(layouts[1], layouts[0]) == 7 && !multiply(layouts[0], layouts[1]) && !cuStreamSynchronize(session.stream));
    for (u32 i = 0; i < batch * tokens * outputs; i++) {
        u32 output = i % outputs, token = i / outputs % tokens, item = i / outputs / tokens;
        float sum = 0;
        for (u32 k = 0; k < inputs; k++) {
            sum += float((item * strides[0] + output * inputs + k) % 7) * float((item * strides[1] + token * inputs + k) % 5);
        }
        CHECK(y[i] == 2 * sum + bias[output]);
    }
}

static void fp8_products_are_accepted_only_in_the_form_that_devices_accept() {
    Session session;
    const u32 outputs = 16, inputs = 32, tokens = 3;
    CUdeviceptr memory = session.allocate(4096);
    auto weight = reinterpret_cast<u8 *>(memory), x = weight + outputs * inputs;               // [outputs, inputs], [tokens, inputs]
    auto scales = reinterpret_cast<float *>(x + tokens * inputs), y = scales + outputs + tokens + 1; // [outputs], [tokens]; [tokens, outputs]
    for (u32 i = 0; i < outputs * inputs; i++) weight[i] = from_float<e4m3>(float(i % 7)).bits;
    for (u32 i = 0; i < tokens * inputs; i++) x[i] = from_float<e4m3>(float(i % 5)).bits;
    for (u32 i = 0; i < outputs + tokens; i++) scales[i] = float(i + 1);
    const float *scales_of[] = {scales, scales + outputs};

    void *description, *layouts[3];
    int transposed = 1, with_bias = 4, without = 1, outer = 3, scalar = 0;
    CHECK(!cublasLtMatmulDescCreate(&description, 68, 0));
    CHECK(!cublasLtMatrixLayoutCreate(&layouts[0], 28, inputs, outputs, inputs));
    CHECK(!cublasLtMatrixLayoutCreate(&layouts[1], 28, inputs, tokens, inputs));
    CHECK(!cublasLtMatrixLayoutCreate(&layouts[2], 0, outputs, tokens, outputs));
    float alpha = 1, beta = 0;
    auto set = [&](int attribute, auto &value) { return cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof(value)); };
    auto multiply = [&] {
        void *d = layouts[2];
        return cublasLtMatmul(nullptr, description, &alpha, weight, layouts[0], x, layouts[1], &beta, y, d, y, d, nullptr, nullptr, 0, session.stream);
    };
    CHECK(!set(3, transposed) && !multiply() && !cuStreamSynchronize(session.stream) && y[1] == y[1]);
    CHECK(!set(31, outer) && multiply() == 15); // outer scales for one operand only
    CHECK(!set(32, outer) && multiply() == 7);  // without scales
    CHECK(!set(17, scales_of[0]) && !set(18, scales_of[1]) && !set(7, with_bias) && !set(8, scales_of[0]) && multiply() == 15);
    CHECK(!set(7, without) && !multiply() && !cuStreamSynchronize(session.stream));
    for (u32 i = 0; i < tokens * outputs; i++) {
        float sum = 0;
        for (u32 k = 0; k < inputs; k++) sum += float((i % outputs * inputs + k) % 7) * float((i / outputs * inputs + k) % 5);
        CHECK(y[i] == sum * float(i % outputs + 1) * float(i / outputs + outputs + 1));
    }
    shim_capability(8, 9);
    CHECK(multiply() == 15 && !set(31, scalar) && !set(32, scalar) && !multiply());
    shim_capability(8, 6);
    CHECK(multiply() == 15);
    shim_capability(9, 0);
}

#define RUN(test) test(), printf("%s\n", #test)

int main() {
    RUN(shuffles_return_the_value_of_the_source_lane);
    RUN(block_sums_are_correct_in_every_order);
    RUN(counts_and_shared_sums_are_correct_in_every_order);
    RUN(a_missing_barrier_gives_wrong_results);
    RUN(shared_memory_is_initialized_with_poison);
    RUN(every_thread_of_every_block_runs_once);
    RUN(threads_that_wait_at_different_points_are_an_error);
    RUN(invalid_accesses_raise_signals);
    RUN(several_threads_can_launch_at_the_same_time);
    RUN(tensor_core_products_equal_plain_loops);
    RUN(ldmatrix_loads_matrices_and_their_transposes);
    RUN(asynchronous_copies_complete_at_their_wait);
    RUN(a_box_arrives_in_swizzled_rows);
    RUN(f16_is_rounded_to_nearest);
    RUN(bf16_is_rounded_to_nearest);
    RUN(e4m3_is_decoded_by_its_definition_and_rounded_to_nearest);
    RUN(widened_bytes_equal_their_float_values);
    RUN(queued_work_runs_when_a_call_waits_for_it);
    RUN(invalid_arguments_return_the_errors_of_the_driver);
    RUN(allocations_are_counted_and_bounded);
    RUN(a_kernel_error_persists_in_its_context);
    RUN(captured_work_runs_with_each_launch_of_its_graph);
    RUN(several_threads_can_have_contexts);
    RUN(events_record_the_time_of_work);
    RUN(a_stream_waits_for_an_event_of_another_stream);
    RUN(planned_failures_make_calls_fail);
    RUN(a_row_major_product_is_a_transposed_column_major_product);
    RUN(fp8_products_are_accepted_only_in_the_form_that_devices_accept);
}
