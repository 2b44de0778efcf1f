// Runs the threads of a block as fibers of one OS thread.
//
// The lanes of a warp run one after another until they wait. They must all wait at the same point. The work of that point is executed,
// and the lanes continue. When they wait for the block, or have ended, the next warp runs. So two accesses without a barrier between
// them can happen in either order.
#include "shim.h"

#include "guarded_memory.h"

#include <link.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// Their initial value is not zero, so that they are in .tdata.
__thread dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

bool mma_is_inexact, wgmma_is_inexact;

const unsigned WARP_LANES = 32;
const size_t STACK = 64 << 10, STACK_SPREAD = 4 << 10;

// ---- switching from one stack to another

#if defined(__x86_64__)

struct Registers {
    void *stack_pointer;
};

// Saves the callee-saved registers, and continues where `to` stopped.
extern "C" __attribute__((visibility("hidden"))) void shim_switch(void **from, void *to);
asm(R"(
.text
.hidden shim_switch
.globl shim_switch
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx # not ret, whose target the processor would predict wrongly
    jmp *%rcx
.size shim_switch, . - shim_switch
)");

static void switch_stacks(Registers &from, Registers &to) { shim_switch(&from.stack_pointer, to.stack_pointer); }

static void begin_at(Registers &registers, char *stack_end, void (*entry)()) {
    void **top = reinterpret_cast<void **>(stack_end);
    *--top = nullptr; // return address of entry, which never returns
    *--top = reinterpret_cast<void *>(entry);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    registers.stack_pointer = top;
}

#else

typedef ucontext_t Registers;

static void switch_stacks(Registers &from, Registers &to) { swapcontext(&from, &to); }

static void begin_at(Registers &registers, char *stack_end, void (*entry)()) {
    getcontext(&registers);
    registers.uc_stack.ss_size = STACK - STACK_SPREAD;
    registers.uc_stack.ss_sp = stack_end - registers.uc_stack.ss_size;
    makecontext(&registers, entry, 0);
}

#endif

// ---- a block and its threads

// The point at which a fiber waits, with its data for the work of the warp.
struct WaitPoint {
    const char *name;
    Work *work; // null: the warp waits for other warps
    void *data;
    bool (*is_over)(void *data) = nullptr; // null: all warps wait for each other
};

struct Copy {
    void *shared;       // [bytes]
    const void *global; // [bytes]; null: zeros
    unsigned group, bytes;
};

struct Fiber {
    GuardedMemory stack{STACK};
    Registers registers;
    dim3 index;
    WaitPoint waits_at;
    std::vector<Copy> copies; // pending
    unsigned groups;          // committed
    std::vector<Product> products; // pending
    unsigned product_groups;       // committed
};

// Copies after which their thread arrives at a barrier, or a copy of a box, whose bytes are reported to it.
struct LateArrival {
    std::vector<Copy> copies;
    uint64_t *barrier;
    unsigned box_bytes = 0;
};

struct NamedBarrier {
    unsigned arrived, phase;
};

// The state of an OS thread that runs blocks.
struct Executor {
    std::vector<std::unique_ptr<Fiber>> fibers;
    GuardedMemory dynamic_shared{MAX_DYNAMIC_SHARED};
    size_t dynamic_shared_bytes;
    char *static_shared, *static_shared_end;
    Registers scheduler;
    Fiber *running;
    const std::function<void()> *kernel;
    std::minstd_rand random;
    std::string error;
    std::vector<LateArrival> late_arrivals;
    NamedBarrier named_barriers[16];
};

static PER_OS_THREAD Executor *executor = nullptr;

// A random permutation of 0..n, with a random start and step.
class Order {
    uint64_t n_, next_, step_;

  public:
    Order(uint64_t n, std::minstd_rand &random) : n_(n), next_(random() % n), step_(random() % n) {
        while (std::gcd(step_, n_) != 1) step_ = (step_ + 1) % n_;
    }
    uint64_t next() {
        next_ += step_;
        if (next_ >= n_) next_ -= n_; // much faster than a remainder
        return next_;
    }
};

const char *const START = "the start of the kernel", *const END = "the end of the kernel", *const BARRIER = "__syncthreads";

static void wait_at(WaitPoint point) {
    Fiber &fiber = *executor->running;
    fiber.waits_at = point;
    switch_stacks(fiber.registers, executor->scheduler);
}

static void fiber_main() {
    (*executor->kernel)();
    wait_at({END, nullptr, nullptr});
}

void fail(const std::string &error) {
    executor->error = error;
    wait_at({END, nullptr, nullptr});
    abort(); // a failed launch never resumes
}

static unsigned threads_in_block() { return blockDim.x * blockDim.y * blockDim.z; }

static void resume(Fiber &fiber) {
    executor->running = &fiber;
    threadIdx = fiber.index;
    switch_stacks(executor->scheduler, fiber.registers);
}

static bool is_same_point(const WaitPoint &a, const WaitPoint &b) {
    return a.work == b.work && (a.name == b.name || strcmp(a.name, b.name) == 0);
}

static std::string where(unsigned thread) { return "thread " + std::to_string(thread) + " at " + executor->fibers[thread]->waits_at.name; }

// Returns whether threads first, first + step, ... before `end` all wait at the same point.
static bool agree(unsigned first, unsigned end, unsigned step) {
    for (unsigned thread = first + step; thread < end; thread += step) {
        if (is_same_point(executor->fibers[first]->waits_at, executor->fibers[thread]->waits_at)) continue;
        executor->error = "threads wait at different barriers: " + where(first) + ", " + where(thread);
        return false;
    }
    return true;
}

// Runs a warp until it waits for other warps or ends. Returns false after an error.
static bool run_warp(unsigned first) {
    unsigned lanes = std::min(WARP_LANES, threads_in_block() - first);
    Order order(lanes, executor->random);
    for (;;) {
        for (unsigned i = 0; i < lanes; i++) {
            resume(*executor->fibers[first + order.next()]);
            if (!executor->error.empty()) return false;
        }
        if (!agree(first, first + lanes, 1)) return false;
        Work *work = executor->fibers[first]->waits_at.work;
        if (!work) return true;
        void *data[WARP_LANES] = {};
        for (unsigned lane = 0; lane < lanes; lane++) data[lane] = executor->fibers[first + lane]->waits_at.data;
        work(data);
    }
}

static void begin_block() {
    Executor &m = *executor;
    memset(m.dynamic_shared.end() - m.dynamic_shared_bytes, POISON, m.dynamic_shared_bytes);
    memset(m.static_shared, POISON, m.static_shared_end - m.static_shared);
    memset(m.named_barriers, 0, sizeof(m.named_barriers));
    m.late_arrivals.clear();
    for (unsigned thread = 0; thread < threads_in_block(); thread++) {
        Fiber &fiber = *m.fibers[thread];
        fiber.index = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y));
        fiber.copies.clear();
        fiber.groups = 0;
        fiber.products.clear();
        fiber.product_groups = 0;
        fiber.waits_at = {START, nullptr, nullptr};
        // Stacks are page-aligned. Without an offset they would compete for the same cache lines.
        begin_at(fiber.registers, fiber.stack.end() - thread * 128 % STACK_SPREAD, fiber_main);
    }
}

// Completes a box, or the copies of a random thread, and arrives at its barrier. Returns false if none are pending.
static bool complete_late_arrival();

// Returns whether a warp can continue without a barrier of the whole block.
static bool is_ready(unsigned first) {
    const WaitPoint &point = executor->fibers[first]->waits_at;
    return point.is_over ? point.is_over(point.data) : point.name == START;
}

// Runs all warps until each waits for another one or ends. Returns false after an error.
static bool run_warps(unsigned warps) {
    for (bool any = true; any;) {
        any = false;
        Order order(warps, executor->random);
        for (unsigned i = 0; i < warps; i++) {
            unsigned first = unsigned(order.next()) * WARP_LANES;
            if (!is_ready(first)) continue;
            any = true;
            if (!run_warp(first)) return false;
        }
        if (!any) any = complete_late_arrival();
        if (!executor->error.empty()) return false;
    }
    return true;
}

static bool run_block() {
    begin_block();
    unsigned threads = threads_in_block(), warps = (threads + WARP_LANES - 1) / WARP_LANES;
    for (;;) {
        if (!run_warps(warps) || !agree(0, threads, WARP_LANES)) return false;
        const char *name = executor->fibers[0]->waits_at.name;
        if (name == END) return true;
        if (name != BARRIER) {
            executor->error = std::string("all threads wait forever at ") + name;
            return false;
        }
        for (unsigned thread = 0; thread < threads; thread++) executor->fibers[thread]->waits_at.name = START;
    }
}

// ---- launches

// Finds the .tbss of this module in the calling OS thread, which contains the `__shared__` arrays of all kernels.
static int find_static_shared(dl_phdr_info *module, size_t, void *) {
    const ElfW(Phdr) *tls = nullptr;
    bool is_this_module = false;
    for (int i = 0; i < module->dlpi_phnum; i++) {
        const ElfW(Phdr) &segment = module->dlpi_phdr[i];
        uintptr_t offset = reinterpret_cast<uintptr_t>(&find_static_shared) - module->dlpi_addr - segment.p_vaddr;
        if (segment.p_type == PT_LOAD && offset < segment.p_memsz) is_this_module = true;
        if (segment.p_type == PT_TLS) tls = &segment;
    }
    if (!is_this_module) return 0;
    executor->static_shared = static_cast<char *>(module->dlpi_tls_data) + tls->p_filesz;
    executor->static_shared_end = static_cast<char *>(module->dlpi_tls_data) + tls->p_memsz;
    return 1;
}

static std::mutex idle_mutex;
static std::vector<std::unique_ptr<Executor>> idle;

static std::unique_ptr<Executor> take_executor() {
    std::lock_guard<std::mutex> lock(idle_mutex);
    if (idle.empty()) return std::make_unique<Executor>();
    auto taken = std::move(idle.back());
    idle.pop_back();
    return taken;
}

static void return_executor(std::unique_ptr<Executor> used) {
    std::lock_guard<std::mutex> lock(idle_mutex);
    idle.push_back(std::move(used));
}

static uint32_t seed_of_environment() {
    const char *text = getenv("SHIM_SEED");
    return text ? uint32_t(strtoul(text, nullptr, 10)) : 1;
}

static std::atomic<uint32_t> next_seed{seed_of_environment()};

void seed(uint32_t seed) { next_seed = seed; }

static bool run_grid() {
    uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
    Order order(blocks, executor->random);
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t block = order.next();
        blockIdx = dim3(unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y), unsigned(block / gridDim.x / gridDim.y));
        if (!run_block()) return false;
    }
    return true;
}

std::string run(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()> &kernel) {
    uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (threads == 0 || threads > MAX_THREADS) return "invalid block size: " + std::to_string(threads) + " threads";
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return "empty grid";
    if (dynamic_shared_bytes > MAX_DYNAMIC_SHARED) return "too much dynamic shared memory: " + std::to_string(dynamic_shared_bytes) + " bytes";

    auto own = take_executor();
    executor = own.get();
    dl_iterate_phdr(find_static_shared, nullptr);
    while (own->fibers.size() < threads) own->fibers.push_back(std::make_unique<Fiber>());
    own->dynamic_shared_bytes = (dynamic_shared_bytes + 15) / 16 * 16;
    own->kernel = &kernel;
    own->random.seed(next_seed.fetch_add(1) * 0x9e3779b9u);
    own->error.clear();
    gridDim = grid;
    blockDim = block;

    std::string error;
    if (!run_grid()) {
        std::string x = std::to_string(blockIdx.x), y = std::to_string(blockIdx.y), z = std::to_string(blockIdx.z);
        error = own->error + " (block " + x + ", " + y + ", " + z + ")";
    }
    executor = nullptr;
    return_executor(std::move(own));
    return error;
}

// ---- functions that kernels call

void sync_block() { wait_at({BARRIER, nullptr, nullptr}); }

void sync_warp(const char *what, unsigned mask, void *data, Work *work) {
    if (mask != 0xffffffffu) fail(std::string(what) + " with a partial lane mask");
    wait_at({what, work, data});
}

unsigned lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % WARP_LANES; }

void *dynamic_shared() { return executor->dynamic_shared.end() - executor->dynamic_shared_bytes; }

void check_shared(const char *what, const void *address, unsigned bytes) {
    auto at = static_cast<const char *>(address);
    const char *dynamic_end = executor->dynamic_shared.end();
    bool is_dynamic = at >= dynamic_end - executor->dynamic_shared_bytes && at + bytes <= dynamic_end;
    bool is_static = at >= executor->static_shared && at + bytes <= executor->static_shared_end;
    if (!is_dynamic && !is_static) fail(std::string(what) + " of an address outside shared memory");
    if (reinterpret_cast<uintptr_t>(address) % bytes) fail(std::string(what) + " of a shared address not aligned to " + std::to_string(bytes));
}

// The destination is poison until the wait. The source is read at the wait, the latest time on a device.
void copy_async(const char *what, void *shared, const void *global, bool valid, unsigned bytes) {
    check_shared(what, shared, bytes);
    if (reinterpret_cast<uintptr_t>(global) % bytes) fail(std::string(what) + " of a global address not aligned to " + std::to_string(bytes));
    memset(shared, POISON, bytes);
    Fiber &fiber = *executor->running;
    fiber.copies.push_back({shared, valid ? global : nullptr, fiber.groups, bytes});
}

void copy_async_commit() { executor->running->groups++; }

static void complete(const Copy &copy) {
    if (copy.global) memcpy(copy.shared, copy.global, copy.bytes);
    else memset(copy.shared, 0, copy.bytes);
}

void copy_async_wait(unsigned pending) {
    Fiber &fiber = *executor->running;
    auto copy = fiber.copies.begin();
    for (; copy != fiber.copies.end() && copy->group + pending < fiber.groups; ++copy) complete(*copy);
    fiber.copies.erase(fiber.copies.begin(), copy);
}

// ---- barriers in shared memory

struct Phases {
    uint16_t count, pending;
    unsigned parity : 1; // of the phase in progress
    int bytes : 31;      // that are expected and have not arrived
};
static_assert(sizeof(Phases) == sizeof(uint64_t), "a barrier has 8 bytes");

// Counts arrivals and expected bytes, which are negative if bytes have arrived. Ends the phase if nothing is missing.
static void count(uint64_t *barrier, unsigned arrivals, int bytes) {
    Phases phases;
    memcpy(&phases, barrier, sizeof(phases));
    phases.pending -= arrivals;
    phases.bytes += bytes;
    if (phases.pending == 0 && phases.bytes < 0) executor->error = "more bytes arrive at a barrier than it expects";
    if (phases.pending == 0 && phases.bytes == 0) phases.pending = phases.count, phases.parity ^= 1;
    memcpy(barrier, &phases, sizeof(phases));
}

void barrier_begin(uint64_t *barrier, unsigned count) {
    check_shared("barrier_begin", barrier, sizeof(*barrier));
    Phases phases = {uint16_t(count), uint16_t(count), 0, 0};
    memcpy(barrier, &phases, sizeof(phases));
}

void barrier_arrive(uint64_t *barrier) {
    count(barrier, 1, 0);
}

void barrier_arrive_and_expect(uint64_t *barrier, unsigned bytes) {
    count(barrier, 1, int(bytes));
}

void barrier_arrive_after_copies(uint64_t *barrier) {
    executor->late_arrivals.push_back({std::move(executor->running->copies), barrier});
    executor->running->copies.clear();
}

static std::atomic<uint64_t> copied_boxes;

uint64_t boxes() { return copied_boxes; }

void copy_box(const Tensor &from, const int (&at)[4], const std::function<void *(unsigned piece)> &to, uint64_t *barrier) {
    const unsigned PIECE = 16, NUMBER = sizeof(uint16_t);
    unsigned bytes = from.box[0] * from.box[1] * from.box[2] * from.box[3] * NUMBER;
    std::vector<Copy> copies;
    for (unsigned piece = 0; piece < bytes / PIECE; piece++) {
        unsigned rest = piece * PIECE / NUMBER;
        const char *source = from.begin;
        for (unsigned i = 0; i < 4; i++) {
            int64_t index = int64_t(at[i]) + rest % from.box[i];
            rest /= from.box[i];
            if (index < 0 || index >= from.dims[i]) source = nullptr; // zeros
            if (source) source += index * int64_t(i == 0 ? NUMBER : from.strides[i - 1]);
        }
        check_shared("copy_box", to(piece), PIECE);
        memset(to(piece), POISON, PIECE);
        copies.push_back({to(piece), source, 0, PIECE});
    }
    copied_boxes++;
    executor->late_arrivals.push_back({std::move(copies), barrier, bytes});
}

static bool complete_late_arrival() {
    auto &all = executor->late_arrivals;
    if (all.empty()) return false;
    std::swap(all[executor->random() % all.size()], all.back());
    std::for_each(all.back().copies.begin(), all.back().copies.end(), complete);
    int bytes = int(all.back().box_bytes);
    count(all.back().barrier, bytes == 0, -bytes);
    all.pop_back();
    return true;
}

struct AwaitedPhase {
    const uint64_t *barrier;
    unsigned parity;
};

static bool has_phase_ended(void *data) {
    auto awaited = static_cast<const AwaitedPhase *>(data);
    Phases phases;
    memcpy(&phases, awaited->barrier, sizeof(phases));
    return phases.parity != awaited->parity;
}

void barrier_wait(uint64_t *barrier, unsigned parity) {
    check_shared("barrier_wait", barrier, sizeof(*barrier));
    AwaitedPhase awaited = {barrier, parity};
    wait_at({"barrier_wait", nullptr, &awaited, has_phase_ended});
}

struct AwaitedNamedBarrier {
    const NamedBarrier *barrier;
    unsigned phase;
};

static bool has_named_phase_ended(void *data) {
    auto awaited = static_cast<const AwaitedNamedBarrier *>(data);
    return awaited->barrier->phase != awaited->phase;
}

void named_barrier(unsigned number, unsigned threads, bool waits) {
    if (number == 0 || number > 15) fail("named barrier " + std::to_string(number));
    NamedBarrier &barrier = executor->named_barriers[number];
    AwaitedNamedBarrier awaited = {&barrier, barrier.phase};
    if (++barrier.arrived == threads) barrier.arrived = 0, barrier.phase++;
    if (waits) wait_at({"named_barrier_wait", nullptr, &awaited, has_named_phase_ended});
}

// ---- products of warpgroups

void product(Product product) {
    Fiber &fiber = *executor->running;
    product.group = fiber.product_groups;
    fiber.products.push_back(product);
}

void products_commit() { executor->running->product_groups++; }

void products_wait(unsigned pending) {
    Fiber &fiber = *executor->running;
    size_t ready = 0;
    while (ready < fiber.products.size() && fiber.products[ready].group + pending < fiber.product_groups) ready++;
    for (size_t i = 0; i < ready; i++) sync_warp("products_wait", 0xffffffffu, &fiber.products[i], fiber.products[i].work);
    fiber.products.erase(fiber.products.begin(), fiber.products.begin() + ready);
}

void shuffle_lanes(void *const *lanes) {
    uint64_t values[WARP_LANES];
    memset(values, POISON, sizeof(values));
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        if (lanes[lane]) values[lane] = static_cast<Shuffle *>(lanes[lane])->value;
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        if (!lanes[lane]) continue;
        auto shuffle = static_cast<Shuffle *>(lanes[lane]);
        shuffle->value = values[shuffle->source % WARP_LANES];
    }
}

void count_votes(void *const *lanes) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        if (lanes[lane]) votes |= *static_cast<unsigned *>(lanes[lane]) << lane;
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        if (lanes[lane]) *static_cast<unsigned *>(lanes[lane]) = votes;
}

void nothing(void *const *) {}

} // namespace shim
