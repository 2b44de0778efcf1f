// A libcuda.so for machines without a device: the functions of the driver API that libpagedllm calls, on the shim. Functions for tests begin
// with shim_.
//
// Queued work runs only when a call waits for it, after the earlier work of its stream and the work of other streams for which that waits. A
// read without a wait therefore finds poison. With shim_others_first, all other streams run first, so that a copy without a wait comes too
// late.
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "guarded_memory.h"
#include "kernel_table.h"
#include "shim.h"

#define API extern "C" __attribute__((visibility("default")))

// Name, number, and text of cuGetErrorString.
#define RESULTS(R)                                                                             \
    R(CUDA_SUCCESS, 0, "no error")                                                             \
    R(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                         \
    R(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                            \
    R(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                   \
    R(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                         \
    R(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                \
    R(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                         \
    R(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                               \
    R(CUDA_ERROR_NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device") \
    R(CUDA_ERROR_ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered")                \
    R(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                               \
    R(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
    R(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                     \
    R(CUDA_ERROR_NOT_READY, 600, "device not ready")                                           \
    R(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")             \
    R(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch")      \
    R(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated")               \
    R(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                            \
    R(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                             \
    R(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                                \
    R(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing") \
    R(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture") \
    R(CUDA_ERROR_UNKNOWN, 999, "unknown error")

#define NUMBER(name, number, text) name = number,
enum CUresult { RESULTS(NUMBER) };
typedef uint64_t CUdeviceptr;

const size_t DEFAULT_SHARED = 48 << 10;
const int FUNCTION_PTX_VERSION = 5, FUNCTION_MAX_DYNAMIC_SHARED = 8, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2, EVENT_DISABLE_TIMING = 2;

// ---- state of the driver

struct Context;
struct Stream;

// A point in a stream at which an event was recorded.
struct Mark {
    std::shared_ptr<Stream> stream;
    bool passed = false;
};

// Work of a stream: a function that returns its error, or a mark of another stream to wait for.
struct Work {
    std::function<std::string()> run;
    std::shared_ptr<Mark> after;
};

// The object of a handle. It is destroyed with its context.
struct Object {
    Context *owner;
    virtual ~Object() = default;
};

struct Module : Object {};

struct Function : Object {
    const Kernel *kernel;
    size_t max_shared = DEFAULT_SHARED;
};

struct Event : Object {
    unsigned flags;
    std::shared_ptr<Mark> mark; // of the last record
    std::chrono::steady_clock::time_point at;
};

struct Graph : Object {
    std::vector<Work> works;
};

struct GraphExec : Object {
    std::vector<Work> works;
};

struct Stream : Object {
    std::deque<Work> queue;
    std::shared_ptr<Graph> capture; // null: the stream does not capture
    bool invalidated = false;
    int mode;
    std::thread::id capturing_thread;
};

// Never deleted, so that a thread in which it is still current gets CUDA_ERROR_CONTEXT_IS_DESTROYED.
struct Context {
    int device;
    bool alive = true;
    CUresult error = CUDA_SUCCESS; // result of every later call
    bool busy = false; // a thread runs queued work
    int retained = 0; // users of a primary context
    std::shared_ptr<Stream> default_stream = std::make_shared<Stream>();
};

struct Allocation {
    Context *owner;
    size_t bytes;
    bool on_device;
    std::unique_ptr<GuardedMemory> memory;
};

struct PlannedFailure {
    int calls_until;
    CUresult result;
};

struct Driver {
    std::mutex mutex; // protects the following fields
    std::condition_variable_any idle;
    pid_t process = 0; // that called cuInit; in its forks every call fails
#ifdef SHIM_CUDA_12_0
    int version = 12000;
#else
    int version = 13000;
#endif
    int devices = 1, capability[2] = {9, 0};
    size_t memory_total = size_t(1) << 30, memory_used_by_others = 0;
    std::map<void *, std::shared_ptr<Object>> objects;
    std::map<CUdeviceptr, Allocation> allocations;
    std::map<int, Context *> primary; // by device, while it is retained
    uint64_t left_in_primary = 0; // objects that were not destroyed before the last release
    std::map<std::string, PlannedFailure> planned;
    bool others_first = false;
    int contexts = 0;
    uint64_t launches = 0;
    uint64_t bytes_read = 0; // copied from devices to the host
    uint64_t allocation_calls = 0;
    std::string last_error;
};

static Driver driver;

// The stack of current contexts of this thread.
struct ContextStack {
    Context *contexts[16];
    int depth;
};
static PER_OS_THREAD ContextStack stack = {};

static Context *current() { return stack.depth ? stack.contexts[stack.depth - 1] : nullptr; }

// ---- common part of all calls

// Errors after which a context cannot be used any more.
static bool is_sticky(CUresult result) { return result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED; }

static CUresult planned_failure(const char *api) {
    auto found = driver.planned.find(api);
    if (found == driver.planned.end() || --found->second.calls_until > 0) return CUDA_SUCCESS;
    CUresult result = found->second.result;
    driver.planned.erase(found);
    if (current() && is_sticky(result)) current()->error = result;
    return result;
}

template <class Body> CUresult driver_call(const char *api, Body body) {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (CUresult planned = planned_failure(api)) return planned;
    return driver.process == getpid() ? body() : CUDA_ERROR_NOT_INITIALIZED;
}

template <class Body> CUresult context_call(const char *api, Body body) {
    return driver_call(api, [&]() -> CUresult {
        Context *context = current();
        if (!context) return CUDA_ERROR_INVALID_CONTEXT;
        if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        return context->error ? context->error : body(*context);
    });
}

template <class T> CUresult set_output(T *out, T value) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = value;
    return CUDA_SUCCESS;
}

// ---- handles

template <class T> std::shared_ptr<T> find(void *handle) {
    auto found = driver.objects.find(handle);
    return found == driver.objects.end() ? nullptr : std::dynamic_pointer_cast<T>(found->second);
}

template <class T> std::shared_ptr<T> make(Context &owner) {
    auto object = std::make_shared<T>();
    object->owner = &owner;
    driver.objects[object.get()] = object;
    return object;
}

template <class T> CUresult destroy(const char *api, void *handle) {
    return driver_call(api, [&] {
        if (!find<T>(handle)) return CUDA_ERROR_INVALID_HANDLE;
        driver.objects.erase(handle);
        return CUDA_SUCCESS;
    });
}

static std::shared_ptr<Stream> find_stream(Context &context, void *handle) {
    return handle ? find<Stream>(handle) : context.default_stream;
}

// ---- work

static CUresult enqueue(Context &context, void *stream_handle, Work work) {
    auto stream = find_stream(context, stream_handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture) stream->capture->works.push_back(std::move(work));
    else stream->queue.push_back(std::move(work));
    return CUDA_SUCCESS;
}

static CUresult enqueue(Context &context, void *stream_handle, std::function<std::string()> run) {
    return enqueue(context, stream_handle, Work{std::move(run), nullptr});
}

static std::vector<std::shared_ptr<Stream>> streams_of(Context &context) {
    std::vector<std::shared_ptr<Stream>> streams = {context.default_stream};
    for (auto &[handle, object] : driver.objects)
        if (auto stream = std::dynamic_pointer_cast<Stream>(object); stream && stream->owner == &context) streams.push_back(stream);
    return streams;
}

static void run_first(Context &context, Stream &stream) {
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (!work.run) return; // the mark has passed
    driver.mutex.unlock();
    std::string error = work.run();
    driver.mutex.lock();
    if (error.empty()) return;
    driver.last_error = error;
    context.error = CUDA_ERROR_LAUNCH_FAILED;
    for (auto &other : streams_of(context)) other->queue.clear();
}

static bool is_blocked(const Stream &stream) { return stream.queue.front().after && !stream.queue.front().after->passed; }

// Runs work until the mark has passed, or all work if the mark is null.
static void run_stream(Context &context, Stream &stream, const Mark *mark) {
    while (!stream.queue.empty() && !(mark && mark->passed)) {
        if (is_blocked(stream)) {
            auto after = stream.queue.front().after;
            run_stream(context, *after->stream, after.get());
        } else {
            run_first(context, stream);
        }
    }
}

static void run_others(Context &context, const Stream &stream) {
    for (auto &other : streams_of(context))
        while (other.get() != &stream && !other->queue.empty() && !is_blocked(*other)) run_first(context, *other);
}

// Work runs without the mutex, so that other contexts can run.
template <class Body> CUresult run_exclusively(Context &context, Body body) {
    driver.idle.wait(driver.mutex, [&] { return !context.busy; });
    context.busy = true;
    body();
    context.busy = false;
    driver.idle.notify_all();
    return context.error;
}

// Runs all queued work.
static CUresult wait_for(Context &context) {
    return run_exclusively(context, [&] {
        for (auto &stream : streams_of(context)) run_stream(context, *stream, nullptr);
    });
}

static CUresult wait_for(Context &context, const std::shared_ptr<Stream> &stream, const Mark *mark = nullptr) {
    return run_exclusively(context, [&] {
        if (driver.others_first) run_others(context, *stream);
        run_stream(context, *stream, mark);
    });
}

static CUresult wait_for(Context &context, const std::shared_ptr<Mark> &mark) {
    return mark ? wait_for(context, mark->stream, mark.get()) : context.error;
}

// Fails while a stream captures, because the call would wait for work that does not run.
static CUresult check_no_capture(Context &context) {
    for (auto &[handle, object] : driver.objects) {
        auto stream = dynamic_cast<Stream *>(object.get());
        if (!stream || stream->owner != &context || !stream->capture || stream->mode == CAPTURE_RELAXED) continue;
        if (stream->mode == CAPTURE_THREAD_LOCAL && stream->capturing_thread != std::this_thread::get_id()) continue;
        stream->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

static CUresult enqueue_and_wait(Context &context, std::function<std::string()> work) {
    if (CUresult capturing = check_no_capture(context)) return capturing;
    if (CUresult refused = enqueue(context, nullptr, std::move(work))) return refused;
    return wait_for(context);
}

// ---- memory

static size_t pinned_bytes() {
    size_t bytes = 0;
    for (auto &[address, allocation] : driver.allocations)
        if (!allocation.on_device) bytes += allocation.bytes;
    return bytes;
}

static size_t live_bytes(int device) {
    size_t bytes = 0;
    for (auto &[address, allocation] : driver.allocations)
        if (allocation.on_device && (device < 0 || allocation.owner->device == device)) bytes += allocation.bytes;
    return bytes;
}

static size_t free_bytes(int device) {
    size_t used = driver.memory_used_by_others + live_bytes(device);
    return driver.memory_total - std::min(driver.memory_total, used);
}

static CUresult allocate(Context &context, CUdeviceptr *out, size_t bytes, bool on_device) {
    if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    driver.allocation_calls++;
    if (CUresult capturing = check_no_capture(context)) return capturing;
    if (on_device && bytes > free_bytes(context.device)) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t rounded = (bytes + 15) / 16 * 16;
    try {
        auto memory = std::make_unique<GuardedMemory>(rounded);
        char *begin = memory->end() - rounded;
        memset(begin, shim::POISON, rounded);
        *out = reinterpret_cast<CUdeviceptr>(begin);
        driver.allocations[*out] = {&context, bytes, on_device, std::move(memory)};
        return CUDA_SUCCESS;
    } catch (const std::bad_alloc &) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
}

static CUresult release(const char *api, CUdeviceptr address, bool on_device) {
    return driver_call(api, [&]() -> CUresult {
        auto found = driver.allocations.find(address);
        if (found == driver.allocations.end() || found->second.on_device != on_device) return CUDA_ERROR_INVALID_VALUE;
        Context &owner = *found->second.owner;
        if (CUresult capturing = check_no_capture(owner)) return capturing;
        wait_for(owner); // as the driver does, so that no work uses freed memory
        driver.allocations.erase(address);
        return CUDA_SUCCESS;
    });
}

// Returns whether these bytes are in an allocation of the driver, on the device or on the host.
static bool is_allocated(CUdeviceptr address, size_t bytes) {
    auto after = driver.allocations.upper_bound(address);
    if (after == driver.allocations.begin()) return false;
    auto &[begin, allocation] = *std::prev(after);
    return address - begin <= allocation.bytes && bytes <= allocation.bytes - (address - begin);
}

static std::function<std::string()> copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return [=] {
        memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
        return std::string();
    };
}

static CUdeviceptr address_of(const void *host) { return reinterpret_cast<CUdeviceptr>(host); }

// Unpinned memory is read at once, as by the driver, because the caller may change it afterwards.
static std::function<std::string()> copy_from_host(CUdeviceptr to, const void *host, size_t bytes, bool captured) {
    if (captured || is_allocated(address_of(host), bytes)) return copy(to, address_of(host), bytes);
    std::string copied(static_cast<const char *>(host), bytes);
    return [=] {
        memcpy(reinterpret_cast<void *>(to), copied.data(), bytes);
        return std::string();
    };
}

static std::function<std::string()> fill(CUdeviceptr to, unsigned char value, size_t bytes) {
    return [=] {
        memset(reinterpret_cast<void *>(to), value, bytes);
        return std::string();
    };
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    return context_call(__func__, [&](Context &context) { return allocate(context, out, bytes, true); });
}

API CUresult cuMemFree_v2(CUdeviceptr address) { return release(__func__, address, true); }

API CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned) {
    return context_call(__func__, [&](Context &context) { return allocate(context, reinterpret_cast<CUdeviceptr *>(out), bytes, false); });
}

API CUresult cuMemFreeHost(void *address) { return release(__func__, address_of(address), false); }

API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    return context_call(__func__, [&](Context &context) {
        *free = free_bytes(context.device);
        *total = driver.memory_total;
        return CUDA_SUCCESS;
    });
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, void *stream) {
    return context_call(__func__, [&](Context &context) {
        if (!is_allocated(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
        auto queued_to = find_stream(context, stream);
        return enqueue(context, stream, copy_from_host(to, from, bytes, queued_to && queued_to->capture));
    });
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *stream) {
    return context_call(__func__, [&](Context &context) {
        if (!is_allocated(from, bytes)) return CUDA_ERROR_INVALID_VALUE;
        driver.bytes_read += bytes;
        return enqueue(context, stream, copy(address_of(to), from, bytes));
    });
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream) {
    return context_call(__func__, [&](Context &context) {
        return is_allocated(to, bytes) && is_allocated(from, bytes) ? enqueue(context, stream, copy(to, from, bytes)) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void *stream) {
    return context_call(__func__, [&](Context &context) {
        return is_allocated(to, bytes) ? enqueue(context, stream, fill(to, value, bytes)) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return context_call(__func__, [&](Context &context) {
        return is_allocated(to, bytes) ? enqueue_and_wait(context, copy(to, address_of(from), bytes)) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return context_call(__func__, [&](Context &context) {
        return is_allocated(from, bytes) ? enqueue_and_wait(context, copy(address_of(to), from, bytes)) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return context_call(__func__, [&](Context &context) {
        return is_allocated(to, bytes) && is_allocated(from, bytes) ? enqueue_and_wait(context, copy(to, from, bytes)) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    return context_call(__func__, [&](Context &context) {
        return is_allocated(to, bytes) ? enqueue_and_wait(context, fill(to, value, bytes)) : CUDA_ERROR_INVALID_VALUE;
    });
}

// ---- the driver and its devices

API CUresult cuInit(unsigned) {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (CUresult planned = planned_failure(__func__)) return planned;
    if (driver.devices == 0) return CUDA_ERROR_NO_DEVICE;
    if (driver.process && driver.process != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    driver.process = getpid();
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
    std::lock_guard<std::mutex> lock(driver.mutex);
    if (CUresult planned = planned_failure(__func__)) return planned;
    return set_output(version, driver.version);
}

#define NAME_OF(name, number, text) {number, #name, text},
static const struct {
    int number;
    const char *name, *text;
} RESULT_NAMES[] = {RESULTS(NAME_OF)};

API CUresult cuGetErrorName(int result, const char **name) {
    for (auto &known : RESULT_NAMES)
        if (known.number == result) return set_output(name, known.name);
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(int result, const char **text) {
    for (auto &known : RESULT_NAMES)
        if (known.number == result) return set_output(text, known.text);
    return CUDA_ERROR_INVALID_VALUE;
}

template <class Body> CUresult device_call(const char *api, int device, Body body) {
    return driver_call(api, [&]() -> CUresult { return device >= 0 && device < driver.devices ? body() : CUDA_ERROR_INVALID_DEVICE; });
}

API CUresult cuDeviceGetCount(int *count) {
    return driver_call(__func__, [&] { return set_output(count, driver.devices); });
}

API CUresult cuDeviceGet(int *device, int ordinal) {
    return device_call(__func__, ordinal, [&] { return set_output(device, ordinal); });
}

API CUresult cuDeviceGetName(char *name, int length, int device) {
    return device_call(__func__, device, [&] {
        if (length <= 0) return CUDA_ERROR_INVALID_VALUE;
        strncpy(name, "Shim", size_t(length));
        name[length - 1] = 0;
        return CUDA_SUCCESS;
    });
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    return device_call(__func__, device, [&] { return set_output(bytes, driver.memory_total); });
}

// Returns the maximum bytes of shared memory of a block on devices with this compute capability.
static size_t max_shared() {
    int major = driver.capability[0], minor = driver.capability[1];
    if (major == 12 || (major == 8 && minor != 0)) return 99 << 10;
    return major == 8 ? 163 << 10 : shim::MAX_DYNAMIC_SHARED;
}

// The attributes of an H200 that the library queries.
API CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    return device_call(__func__, device, [&] {
        switch (attribute) {
        case 1: return set_output(value, int(shim::MAX_THREADS));        // MAX_THREADS_PER_BLOCK
        case 8: return set_output(value, int(DEFAULT_SHARED));           // MAX_SHARED_MEMORY_PER_BLOCK
        case 10: return set_output(value, 32);                           // WARP_SIZE
        case 16: return set_output(value, 132);                          // MULTIPROCESSOR_COUNT
        case 19: return set_output(value, 1);                            // CAN_MAP_HOST_MEMORY
        case 36: return set_output(value, 3201000);                      // MEMORY_CLOCK_RATE, in kHz
        case 37: return set_output(value, 6144);                         // GLOBAL_MEMORY_BUS_WIDTH, in bits
        case 38: return set_output(value, 60 << 20);                     // L2_CACHE_SIZE
        case 39: return set_output(value, 2048);                         // MAX_THREADS_PER_MULTIPROCESSOR
        case 41: return set_output(value, 1);                            // UNIFIED_ADDRESSING
        case 75: return set_output(value, driver.capability[0]);         // COMPUTE_CAPABILITY_MAJOR
        case 76: return set_output(value, driver.capability[1]);         // COMPUTE_CAPABILITY_MINOR
        case 81: return set_output(value, 228 << 10);                    // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        case 97: return set_output(value, int(max_shared()));            // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        default: return CUDA_ERROR_INVALID_VALUE;
        }
    });
}

// ---- contexts

static CUresult push(Context *context) {
    if (stack.depth == sizeof(stack.contexts) / sizeof(*stack.contexts)) return CUDA_ERROR_ILLEGAL_STATE;
    stack.contexts[stack.depth++] = context;
    return CUDA_SUCCESS;
}

// The version that all drivers have. cuCtxCreate_v4 exists since CUDA 12.5.
API CUresult cuCtxCreate_v2(Context **out, unsigned, int device) {
    return device_call(__func__, device, [&] {
        auto context = new Context;
        context->device = device;
        driver.contexts++;
        *out = context;
        return push(context);
    });
}

// Destroys all objects of the context. Returns their number, without the functions of modules.
static uint64_t destroy_context(Context &context) {
    wait_for(context);
    context.alive = false;
    driver.contexts--;
    uint64_t destroyed = 0;
    for (auto i = driver.objects.begin(); i != driver.objects.end();) {
        bool owned = i->second->owner == &context;
        destroyed += owned && !std::dynamic_pointer_cast<Function>(i->second);
        i = owned ? driver.objects.erase(i) : std::next(i);
    }
    for (auto i = driver.allocations.begin(); i != driver.allocations.end();) {
        bool owned = i->second.owner == &context;
        destroyed += owned;
        i = owned ? driver.allocations.erase(i) : std::next(i);
    }
    if (current() == &context) stack.depth--;
    return destroyed;
}

API CUresult cuCtxDestroy_v2(Context *context) {
    return driver_call(__func__, [&] {
        if (!context || !context->alive || context->retained) return CUDA_ERROR_INVALID_CONTEXT;
        destroy_context(*context);
        return CUDA_SUCCESS;
    });
}

API CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return device_call(__func__, device, [&] {
        *flags = 0;
        return set_output(active, int(driver.primary.count(device)));
    });
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(int device, unsigned) {
    return device_call(__func__, device, [&] { return CUDA_SUCCESS; });
}

API CUresult cuDevicePrimaryCtxRetain(Context **out, int device) {
    return device_call(__func__, device, [&] {
        Context *&context = driver.primary[device];
        if (!context) {
            context = new Context;
            context->device = device;
            driver.contexts++;
        }
        context->retained++;
        return set_output(out, context);
    });
}

// The last release destroys all objects. The library destroys its own objects before, since the application may use the context longer.
API CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    return device_call(__func__, device, [&] {
        auto found = driver.primary.find(device);
        if (found == driver.primary.end()) return CUDA_ERROR_INVALID_CONTEXT;
        Context &context = *found->second;
        if (--context.retained > 0) return CUDA_SUCCESS;
        driver.primary.erase(found);
        driver.left_in_primary += destroy_context(context);
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxPushCurrent_v2(Context *context) {
    return driver_call(__func__, [&] { return context && context->alive ? push(context) : CUDA_ERROR_INVALID_CONTEXT; });
}

API CUresult cuCtxPopCurrent_v2(Context **out) {
    return driver_call(__func__, [&] {
        if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
        if (out) *out = current();
        stack.depth--;
        return CUDA_SUCCESS;
    });
}

API CUresult cuCtxSetCurrent(Context *context) {
    return driver_call(__func__, [&] {
        if (context && !context->alive) return CUDA_ERROR_INVALID_CONTEXT;
        if (stack.depth) stack.depth--;
        return context ? push(context) : CUDA_SUCCESS;
    });
}

API CUresult cuCtxGetCurrent(Context **out) {
    return driver_call(__func__, [&] { return set_output(out, current()); });
}

API CUresult cuCtxSynchronize() {
    return context_call(__func__, [&](Context &context) {
        CUresult capturing = check_no_capture(context);
        return capturing ? capturing : wait_for(context);
    });
}

// ---- streams and events

API CUresult cuStreamCreate(void **out, unsigned) {
    return context_call(__func__, [&](Context &context) { return set_output<void *>(out, make<Stream>(context).get()); });
}

API CUresult cuStreamDestroy_v2(void *handle) { return destroy<Stream>(__func__, handle); }

API CUresult cuStreamSynchronize(void *handle) {
    return context_call(__func__, [&](Context &context) {
        auto stream = find_stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (!stream->capture) return wait_for(context, stream);
        stream->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    });
}

API CUresult cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    return context_call(__func__, [&](Context &context) {
        auto event = find<Event>(handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        return event->mark ? enqueue(context, stream, Work{nullptr, event->mark}) : CUDA_SUCCESS; // never recorded: no wait
    });
}

API CUresult cuEventCreate(void **out, unsigned flags) {
    return context_call(__func__, [&](Context &context) {
        auto event = make<Event>(context);
        event->flags = flags;
        return set_output<void *>(out, event.get());
    });
}

API CUresult cuEventDestroy_v2(void *handle) { return destroy<Event>(__func__, handle); }

API CUresult cuEventRecord(void *handle, void *stream) {
    return context_call(__func__, [&](Context &context) {
        auto event = find<Event>(handle);
        auto recorded_in = find_stream(context, stream);
        if (!event || !recorded_in) return CUDA_ERROR_INVALID_HANDLE;
        auto mark = event->mark = std::make_shared<Mark>(Mark{recorded_in});
        return enqueue(context, stream, [=] {
            mark->passed = true;
            event->at = std::chrono::steady_clock::now();
            return std::string();
        });
    });
}

API CUresult cuEventSynchronize(void *handle) {
    return context_call(__func__, [&](Context &context) {
        auto event = find<Event>(handle);
        return event ? wait_for(context, event->mark) : CUDA_ERROR_INVALID_HANDLE;
    });
}

// Runs no work: that happens only in calls that wait.
API CUresult cuEventQuery(void *handle) {
    return context_call(__func__, [&](Context &) {
        auto event = find<Event>(handle);
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        return !event->mark || event->mark->passed ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

API CUresult cuEventElapsedTime(float *milliseconds, void *first, void *second) {
    return context_call(__func__, [&](Context &) {
        auto begin = find<Event>(first), end = find<Event>(second);
        if (!begin || !end || (begin->flags | end->flags) & EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
        auto passed = [](auto &event) { return event->mark && event->mark->passed; };
        if (!passed(begin) || !passed(end)) return CUDA_ERROR_NOT_READY;
        return set_output(milliseconds, std::chrono::duration<float, std::milli>(end->at - begin->at).count());
    });
}

// ---- kernels

API CUresult cuModuleLoadData(void **out, const void *image) {
    return context_call(__func__, [&](Context &context) {
        return image ? set_output<void *>(out, make<Module>(context).get()) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuModuleUnload(void *handle) { return destroy<Module>(__func__, handle); }

#ifndef SHIM_CUDA_12_0 // exists since CUDA 12.4
API CUresult cuFuncLoad(void *function) {
    return context_call(__func__, [&](Context &) { return find<Function>(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; });
}
#endif

API CUresult cuModuleGetFunction(void **out, void *module, const char *name) {
    return context_call(__func__, [&](Context &context) {
        if (!find<Module>(module)) return CUDA_ERROR_INVALID_HANDLE;
        for (const Kernel *kernel = kernel_table; kernel->name; kernel++) {
            if (strcmp(kernel->name, name) != 0) continue;
            // code for sm_90a only
            if (strstr(name, "_wgmma") && driver.capability[0] != 9) break;
            auto function = make<Function>(context);
            function->kernel = kernel;
            return set_output<void *>(out, function.get());
        }
        return CUDA_ERROR_NOT_FOUND;
    });
}

API CUresult cuFuncSetAttribute(void *handle, int attribute, int value) {
    return context_call(__func__, [&](Context &) {
        auto function = find<Function>(handle);
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        if (attribute != FUNCTION_MAX_DYNAMIC_SHARED) return CUDA_ERROR_INVALID_VALUE;
        if (value < 0 || size_t(value) > shim::MAX_DYNAMIC_SHARED) return CUDA_ERROR_INVALID_VALUE;
        function->max_shared = size_t(value);
        return CUDA_SUCCESS;
    });
}

API CUresult cuFuncGetAttribute(int *value, int attribute, void *handle) {
    return context_call(__func__, [&](Context &) {
        auto function = find<Function>(handle);
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        switch (attribute) {
        case 0: return set_output(value, int(shim::MAX_THREADS)); // MAX_THREADS_PER_BLOCK
        case FUNCTION_PTX_VERSION: return set_output(value, 90);
        case FUNCTION_MAX_DYNAMIC_SHARED: return set_output(value, int(function->max_shared));
        default: return CUDA_ERROR_INVALID_VALUE;
        }
    });
}

// CUlaunchConfig.
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned attribute_count;
};

static bool fits(const Function &function, dim3 grid, dim3 block, size_t shared) {
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) return false;
    if (!block.x || !block.y || !block.z || block.x > 1024 || block.y > 1024 || block.z > 64) return false;
    return block.x * block.y * block.z <= shim::MAX_THREADS && shared <= function.max_shared;
}

static std::string run_kernel(const Kernel &kernel, dim3 grid, dim3 block, size_t shared, const std::function<void()> &bound) {
    std::string error = shim::run(grid, block, shared, bound);
    std::lock_guard<std::mutex> lock(driver.mutex);
    driver.launches++;
    return error.empty() ? error : kernel.name + (": " + error);
}

// Attributes are accepted and have no effect: kernels of a stream run one after the other.
API CUresult cuLaunchKernelEx(const LaunchConfig *config, void *handle, void **parameters, void **extra) {
    return context_call(__func__, [&](Context &context) {
        auto function = find<Function>(handle);
        if (!function) return CUDA_ERROR_INVALID_HANDLE;
        if (extra) return CUDA_ERROR_NOT_SUPPORTED;
        dim3 grid(config->grid[0], config->grid[1], config->grid[2]), block(config->block[0], config->block[1], config->block[2]);
        size_t shared = config->shared;
        if (!fits(*function, grid, block, shared)) return CUDA_ERROR_INVALID_VALUE;
        const Kernel *kernel = function->kernel;
        return enqueue(context, config->stream,
                       [=, bound = kernel->bind(parameters)] { return run_kernel(*kernel, grid, block, shared, bound); });
    });
}

// ---- tensor maps

// Encodes a tensor and its boxes, of the kind that kernels copy: four dimensions, numbers of 16 bits, rows of 128 bytes in shared memory
// that are swizzled, and zeros outside the tensor.
API CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *begin, const uint64_t *dims, const uint64_t *strides,
                                    const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int, int fill) {
    const int UINT16 = 1, SWIZZLE_128_BYTES = 3;
    return context_call(__func__, [&](Context &) -> CUresult {
        if (type != UINT16 || rank != 4 || interleave != 0 || swizzle != SWIZZLE_128_BYTES || fill != 0) return CUDA_ERROR_NOT_SUPPORTED;
        if (address_of(map) % 64 || address_of(begin) % 16 || box[0] * sizeof(uint16_t) != 128) return CUDA_ERROR_INVALID_VALUE;
        shim::Tensor tensor = {static_cast<const char *>(begin), {strides[0], strides[1], strides[2]}, {}, {}};
        for (unsigned i = 0; i < 4; i++) {
            if (dims[i] == 0 || dims[i] > UINT32_MAX || box[i] == 0 || box[i] > 256 || steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
            if (i < 3 && (strides[i] % 16 || strides[i] >= uint64_t(1) << 40)) return CUDA_ERROR_INVALID_VALUE;
            tensor.dims[i] = uint32_t(dims[i]), tensor.box[i] = box[i];
        }
        if (!is_allocated(address_of(begin), dims[3] * strides[2])) return CUDA_ERROR_INVALID_VALUE;
        memcpy(map, &tensor, sizeof(tensor));
        return CUDA_SUCCESS;
    });
}

// ---- graphs

API CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    return context_call(__func__, [&](Context &) {
        auto stream = find<Stream>(handle); // the default stream cannot capture
        if (!stream) return handle ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
        stream->capture = std::make_shared<Graph>();
        stream->mode = mode;
        stream->capturing_thread = std::this_thread::get_id();
        return CUDA_SUCCESS;
    });
}

API CUresult cuStreamEndCapture(void *handle, void **out) {
    return context_call(__func__, [&](Context &context) {
        auto stream = find<Stream>(handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
        auto captured = std::move(stream->capture);
        *out = nullptr;
        if (std::exchange(stream->invalidated, false)) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        auto graph = make<Graph>(context);
        graph->works = std::move(captured->works);
        return set_output<void *>(out, graph.get());
    });
}

// 0: none, 1: active, 2: invalidated
API CUresult cuStreamIsCapturing(void *handle, int *status) {
    return context_call(__func__, [&](Context &context) {
        auto stream = find_stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        return set_output(status, !stream->capture ? 0 : stream->invalidated ? 2 : 1);
    });
}

API CUresult cuGraphInstantiateWithFlags(void **out, void *handle, unsigned long long) {
    return context_call(__func__, [&](Context &context) {
        auto graph = find<Graph>(handle);
        if (!graph) return CUDA_ERROR_INVALID_VALUE;
        auto exec = make<GraphExec>(context);
        exec->works = graph->works;
        return set_output<void *>(out, exec.get());
    });
}

API CUresult cuGraphUpload(void *handle, void *stream) {
    return context_call(__func__, [&](Context &context) -> CUresult {
        return find<GraphExec>(handle) && find_stream(context, stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuGraphLaunch(void *handle, void *stream) {
    return context_call(__func__, [&](Context &context) -> CUresult {
        auto exec = find<GraphExec>(handle);
        if (!exec) return CUDA_ERROR_INVALID_VALUE;
        for (const Work &work : exec->works)
            if (CUresult refused = enqueue(context, stream, work)) return refused;
        return CUDA_SUCCESS;
    });
}

API CUresult cuGraphExecDestroy(void *handle) { return destroy<GraphExec>(__func__, handle); }
API CUresult cuGraphDestroy(void *handle) { return destroy<Graph>(__func__, handle); }

// ---- functions for libcublasLt.so.12 and libnccl.so.2

// Queues a function with a copy of its data.
API CUresult shim_enqueue(void *stream, void (*function)(void *data), const void *data, size_t bytes) {
    return context_call(__func__, [&](Context &context) {
        std::vector<char> copied(static_cast<const char *>(data), static_cast<const char *>(data) + bytes);
        return enqueue(context, stream, [=]() mutable {
            function(copied.data());
            return std::string();
        });
    });
}

// Counts a call of another library. Returns its planned error, or 0.
API int shim_planned_failure(const char *api) {
    std::lock_guard<std::mutex> lock(driver.mutex);
    return planned_failure(api);
}

// Returns the device of the current context, and whether the context is the primary one.
API CUresult shim_current_device(int *device, int *primary) {
    return context_call(__func__, [&](Context &context) {
        *primary = context.retained > 0;
        return set_output(device, context.device);
    });
}

// Returns whether these bytes are allocated.
API int shim_is_allocated(CUdeviceptr address, size_t bytes) {
    std::lock_guard<std::mutex> lock(driver.mutex);
    return is_allocated(address, bytes);
}

// Returns the compute capability times 10.
API int shim_device_capability() {
    std::lock_guard<std::mutex> lock(driver.mutex);
    return 10 * driver.capability[0] + driver.capability[1];
}

// ---- functions for tests

template <class Body> auto locked(Body body) {
    std::lock_guard<std::mutex> lock(driver.mutex);
    return body();
}

// Makes the nth call of a function from now on fail. If n <= 0, no call fails.
API void shim_fail(const char *api, int nth, int result) {
    locked([&] {
        if (nth > 0) driver.planned[api] = {nth, CUresult(result)};
        else driver.planned.erase(api);
    });
}

API void shim_driver_version(int version) {
    locked([&] { driver.version = version; });
}

API void shim_devices(int count) {
    locked([&] { driver.devices = count; });
}

API void shim_capability(int major, int minor) {
    locked([&] {
        driver.capability[0] = major;
        driver.capability[1] = minor;
    });
}

// Sets the memory of each device, and the part that other processes use.
API void shim_memory(uint64_t total, uint64_t used) {
    locked([&] {
        driver.memory_total = total;
        driver.memory_used_by_others = used;
    });
}

// Number of contexts that have not been destroyed.
API int shim_contexts() {
    return locked([] { return driver.contexts; });
}

// Number of allocations on devices and of pinned memory.
API uint64_t shim_live_allocations() {
    return locked([] { return uint64_t(driver.allocations.size()); });
}

// Allocated bytes of all devices.
API uint64_t shim_live_bytes() {
    return locked([] { return uint64_t(live_bytes(-1)); });
}

// Bytes of pinned memory.
API uint64_t shim_pinned_bytes() {
    return locked([] { return uint64_t(pinned_bytes()); });
}

// Number of objects that were left in primary contexts when they were released.
API uint64_t shim_left_in_primary() {
    return locked([] { return driver.left_in_primary; });
}

// Whether the work of all other streams runs before the work that is waited for.
API void shim_others_first(int whether) {
    locked([&] { driver.others_first = whether; });
}

// Number of queued work items that have not run.
API uint64_t shim_queued() {
    return locked([] {
        uint64_t works = 0;
        for (auto &[handle, object] : driver.objects)
            if (auto stream = std::dynamic_pointer_cast<Stream>(object)) works += stream->queue.size();
        return works;
    });
}

// Whether the products of instructions change sums to which they add zero.
API void shim_inexact(int mma, int wgmma) {
    locked([&] { shim::mma_is_inexact = mma, shim::wgmma_is_inexact = wgmma; });
}

// Number of kernels that have run.
API uint64_t shim_launches() {
    return locked([] { return driver.launches; });
}

// Number of boxes that kernels have copied.
API uint64_t shim_boxes() { return shim::boxes(); }

// Number of calls that allocate device memory or pinned memory.
API uint64_t shim_allocation_calls() {
    return locked([] { return driver.allocation_calls; });
}

// Total bytes copied from devices to the host.
API uint64_t shim_bytes_read() {
    return locked([] { return driver.bytes_read; });
}

// Error of the last failed kernel. Valid until another kernel fails.
API const char *shim_last_error() {
    return locked([] { return driver.last_error.c_str(); });
}

API void shim_seed(uint32_t seed) { shim::seed(seed); }
