// How the threads of a block take turns as fibers of one OS thread.
//
// All lanes of a warp run until they wait, one after another. Then they must all wait at the same place: the work of that place is done,
// and they go on. When they wait for the block, or have ended, the next warp has its turn. So of two accesses that no barrier separates
// each may come first, as the orders are drawn.
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

// They begin with ones, and so lie in .tdata.
__thread dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

const unsigned WARP_LANES = 32;
const size_t STACK = 64 << 10, STACK_SPREAD = 4 << 10;

// ---- switching from one stack to another

#if defined(__x86_64__)

struct Registers {
    void *stack_pointer;
};

// Saves what a called function must preserve, and goes on where `to` stopped.
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
    *--top = nullptr; // where entry, which never returns, would return to
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

// Where a fiber waits, with what for its warp.
struct Place {
    const char *name;
    Work *work; // null: of the whole block
    void *mine;
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
    Place place;
    std::vector<Copy> copies; // under way
    unsigned groups;          // committed
};

// What an OS thread needs to run blocks.
struct Machine {
    std::vector<std::unique_ptr<Fiber>> fibers;
    GuardedMemory dynamic_shared{MAX_DYNAMIC_SHARED};
    size_t dynamic_shared_bytes;
    char *static_shared, *static_shared_end;
    Registers scheduler;
    Fiber *running;
    const std::function<void()> *kernel;
    std::minstd_rand random;
    std::string error;
};

static PER_OS_THREAD Machine *machine = nullptr;

// All of 0..n once, from a random one in random steps: of each two, either may come first.
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

const char *const END = "its end", *const BARRIER = "__syncthreads";

static void wait_at(Place place) {
    Fiber &fiber = *machine->running;
    fiber.place = place;
    switch_stacks(fiber.registers, machine->scheduler);
}

static void fiber_main() {
    (*machine->kernel)();
    wait_at({END, nullptr, nullptr});
}

void fail(const std::string &why) {
    machine->error = why;
    wait_at({END, nullptr, nullptr});
    abort(); // nobody goes on with a launch that failed
}

static unsigned threads_in_block() { return blockDim.x * blockDim.y * blockDim.z; }

static void resume(Fiber &fiber) {
    machine->running = &fiber;
    threadIdx = fiber.index;
    switch_stacks(machine->scheduler, fiber.registers);
}

static bool same_place(const Place &a, const Place &b) {
    return a.work == b.work && (a.name == b.name || strcmp(a.name, b.name) == 0);
}

static std::string where(unsigned thread) { return "thread " + std::to_string(thread) + " at " + machine->fibers[thread]->place.name; }

// Whether threads first, first + step, ... before `end` all wait at the same place.
static bool agree(unsigned first, unsigned end, unsigned step) {
    for (unsigned thread = first + step; thread < end; thread += step) {
        if (same_place(machine->fibers[first]->place, machine->fibers[thread]->place)) continue;
        machine->error = "threads wait at different barriers: " + where(first) + ", " + where(thread);
        return false;
    }
    return true;
}

// Until it waits for the block. Whether all went well.
static bool run_warp(unsigned first) {
    unsigned lanes = std::min(WARP_LANES, threads_in_block() - first);
    Order order(lanes, machine->random);
    for (;;) {
        for (unsigned i = 0; i < lanes; i++) {
            resume(*machine->fibers[first + order.next()]);
            if (!machine->error.empty()) return false;
        }
        if (!agree(first, first + lanes, 1)) return false;
        Work *work = machine->fibers[first]->place.work;
        if (!work) return true;
        void *brought[WARP_LANES] = {};
        for (unsigned lane = 0; lane < lanes; lane++) brought[lane] = machine->fibers[first + lane]->place.mine;
        work(brought);
    }
}

static void begin_block() {
    Machine &m = *machine;
    memset(m.dynamic_shared.end() - m.dynamic_shared_bytes, POISON, m.dynamic_shared_bytes);
    memset(m.static_shared, POISON, m.static_shared_end - m.static_shared);
    for (unsigned thread = 0; thread < threads_in_block(); thread++) {
        Fiber &fiber = *m.fibers[thread];
        fiber.index = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y));
        fiber.copies.clear();
        fiber.groups = 0;
        // Stacks lie at multiples of a page: without this they would share the same few lines of the cache.
        begin_at(fiber.registers, fiber.stack.end() - thread * 128 % STACK_SPREAD, fiber_main);
    }
}

static bool run_block() {
    begin_block();
    unsigned threads = threads_in_block(), warps = (threads + WARP_LANES - 1) / WARP_LANES;
    do {
        Order order(warps, machine->random);
        for (unsigned i = 0; i < warps; i++)
            if (!run_warp(unsigned(order.next()) * WARP_LANES)) return false;
        if (!agree(0, threads, WARP_LANES)) return false;
    } while (machine->fibers[0]->place.name == BARRIER);
    return true;
}

// ---- launches

// This module's .tbss of the calling OS thread: the `__shared__` arrays of all its kernels.
static int find_static_shared(dl_phdr_info *module, size_t, void *) {
    const ElfW(Phdr) *tls = nullptr;
    bool ours = false;
    for (int i = 0; i < module->dlpi_phnum; i++) {
        const ElfW(Phdr) &segment = module->dlpi_phdr[i];
        uintptr_t offset = reinterpret_cast<uintptr_t>(&find_static_shared) - module->dlpi_addr - segment.p_vaddr;
        if (segment.p_type == PT_LOAD && offset < segment.p_memsz) ours = true;
        if (segment.p_type == PT_TLS) tls = &segment;
    }
    if (!ours) return 0;
    machine->static_shared = static_cast<char *>(module->dlpi_tls_data) + tls->p_filesz;
    machine->static_shared_end = static_cast<char *>(module->dlpi_tls_data) + tls->p_memsz;
    return 1;
}

static std::mutex idle_mutex;
static std::vector<std::unique_ptr<Machine>> idle;

static std::unique_ptr<Machine> take_machine() {
    std::lock_guard<std::mutex> lock(idle_mutex);
    if (idle.empty()) return std::make_unique<Machine>();
    auto taken = std::move(idle.back());
    idle.pop_back();
    return taken;
}

static void give_back(std::unique_ptr<Machine> used) {
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
    Order order(blocks, machine->random);
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t block = order.next();
        blockIdx = dim3(unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y), unsigned(block / gridDim.x / gridDim.y));
        if (!run_block()) return false;
    }
    return true;
}

std::string run(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()> &kernel) {
    uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (threads == 0 || threads > MAX_THREADS) return "a block of " + std::to_string(threads) + " threads";
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return "a grid of no blocks";
    if (dynamic_shared_bytes > MAX_DYNAMIC_SHARED) return std::to_string(dynamic_shared_bytes) + " bytes of dynamic shared memory";

    auto own = take_machine();
    machine = own.get();
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
    machine = nullptr;
    give_back(std::move(own));
    return error;
}

// ---- what kernels call

void meet_block() { wait_at({BARRIER, nullptr, nullptr}); }

void meet_warp(const char *what, unsigned mask, void *mine, Work *work) {
    if (mask != 0xffffffffu) fail(std::string(what) + " of some lanes only");
    wait_at({what, work, mine});
}

unsigned lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % WARP_LANES; }

void *dynamic_shared() { return machine->dynamic_shared.end() - machine->dynamic_shared_bytes; }

void check_shared(const char *what, const void *address, unsigned bytes) {
    auto at = static_cast<const char *>(address);
    const char *dynamic_end = machine->dynamic_shared.end();
    bool is_dynamic = at >= dynamic_end - machine->dynamic_shared_bytes && at + bytes <= dynamic_end;
    bool is_static = at >= machine->static_shared && at + bytes <= machine->static_shared_end;
    if (!is_dynamic && !is_static) fail(std::string(what) + " of an address outside of shared memory");
    if (reinterpret_cast<uintptr_t>(address) % bytes) fail(std::string(what) + " of a shared address not aligned to " + std::to_string(bytes));
}

// What another thread reads, or this one reads too early, is poison. The source is read as late as it can be on a device.
void copy_async(const char *what, void *shared, const void *global, bool there, unsigned bytes) {
    check_shared(what, shared, bytes);
    if (reinterpret_cast<uintptr_t>(global) % bytes) fail(std::string(what) + " of a global address not aligned to " + std::to_string(bytes));
    memset(shared, POISON, bytes);
    Fiber &fiber = *machine->running;
    fiber.copies.push_back({shared, there ? global : nullptr, fiber.groups, bytes});
}

void copy_async_commit() { machine->running->groups++; }

void copy_async_wait(unsigned under_way) {
    Fiber &fiber = *machine->running;
    auto copy = fiber.copies.begin();
    for (; copy != fiber.copies.end() && copy->group + under_way < fiber.groups; ++copy) {
        if (copy->global) memcpy(copy->shared, copy->global, copy->bytes);
        else memset(copy->shared, 0, copy->bytes);
    }
    fiber.copies.erase(fiber.copies.begin(), copy);
}

void shuffle_lanes(void *const *lanes) {
    uint64_t values[WARP_LANES];
    memset(values, POISON, sizeof(values));
    for (unsigned lane = 0; lane < WARP_LANES; lane++)
        if (lanes[lane]) values[lane] = static_cast<Shuffle *>(lanes[lane])->value;
    for (unsigned lane = 0; lane < WARP_LANES; lane++) {
        if (!lanes[lane]) continue;
        auto mine = static_cast<Shuffle *>(lanes[lane]);
        mine->value = values[mine->source % WARP_LANES];
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
