// Generated from src/ffi by `make header`. Do not edit.
// The hand-written parts of this file are in bindings/cpp/parts of the repository.
/*
 * libpagedllm for C++17: a header-only RAII wrapper of pagedllm.h. Link with -lpagedllm.
 *
 *     pagedllm::Options options;
 *     options.model_path = "models/mine";
 *     auto engine = pagedllm::Engine::create(options).value();
 *     auto answer = engine.generate({"Once upon a time"}).value();
 *     std::cout << answer.text << "\n";
 *
 * These rules apply to everything in this header; pagedllm.h has the others.
 *
 * Errors. A call that can fail returns Result<T>, or Status if there is no value. Test it with ok()
 * and use * and ->, or call value(), which throws Exception. With -fno-exceptions value() does not
 * exist, so that every error must be tested. -fno-rtti is supported. Besides value(), only the
 * standard library throws: std::bad_alloc, and std::system_error if generate_async cannot start a
 * thread.
 *
 * Ownership. Engine, Budget, Communicator, KvStore, Queue, Outputs, Stream, Sequence and Pin are
 * move-only and free what they own. A moved-from object can be destroyed and assigned to. Its other
 * calls return Code::invalid_argument, and its ranges are empty.
 *
 * Views. A std::string_view or Span argument needs to be valid only during the call. A returned
 * view is valid as long as its source: an Output as long as its Outputs, a ModelInfo as long as its
 * Engine.
 *
 * Threads. Unless Options::host_steps is set, a thread of the engine steps it, and sleeps while
 * there is nothing to do. Any thread may call any function of an Engine, Budget, Queue or Sequence
 * at any time. Only one thread at a time may use a Stream, an Outputs, a Communicator or a KvStore.
 * While a call on an object is in progress, no thread may move, assign or destroy the object. A call
 * on a Sequence or a Pin is also a call on its engine. All of these objects can outlive their
 * engine: requests in progress end as aborted, and later calls return Code::closed.
 */

#ifndef PAGEDLLM_HPP
#define PAGEDLLM_HPP

#include <pagedllm.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace pagedllm {

// The names have different types with and without exceptions. A program that passes these objects
// between code compiled with exceptions and code compiled without fails to link.
#ifdef __cpp_exceptions
inline namespace with_exceptions {
#else
inline namespace without_exceptions {
#endif

// ---- errors -------------------------------------------------------------------------------------

// PLLM_E_*. A newer library can return codes without a name here.
enum class Code : int32_t {
    // An argument is invalid: a value, a range, a text encoding.
    invalid_argument = PLLM_E_INVALID_ARGUMENT,
    // No live request, sequence or pin has this id.
    not_found = PLLM_E_NOT_FOUND,
    // A file cannot be opened, read or written.
    io = PLLM_E_IO,
    // The model's files are damaged, incomplete or contradictory, or its weights are not finite.
    model = PLLM_E_MODEL,
    // This build, model or machine does not support the request.
    unsupported = PLLM_E_UNSUPPORTED,
    // A limit of memory, blocks, requests or queues does not allow it.
    capacity = PLLM_E_CAPACITY,
    // Another thread is stepping this engine.
    busy = PLLM_E_BUSY,
    // The system has no memory left.
    out_of_memory = PLLM_E_OUT_OF_MEMORY,
    // A defect of the library. If it occurs in a step, the engine has failed: each request ends
    // with FinishReason::error, later calls return the same error, and the destructor of Engine
    // still works.
    internal = PLLM_E_INTERNAL,
    // The engine that owns this object has been freed.
    closed = PLLM_E_CLOSED,
    // The host's progress callback cancelled the call.
    cancelled = PLLM_E_CANCELLED,
};

// An error: a code, and a message with the numbers and the remedy.
struct Error {
    Code code;
    std::string message;
    // Number of tokens of a prompt that is too long for max_model_len. 0 for any other error.
    uint64_t prompt_tokens = 0;
    // max_model_len of the engine for which a prompt is too long. 0 for any other error.
    uint64_t max_model_len = 0;
    // Whether the same call can succeed later without a change, for example when fewer requests wait.
    bool is_temporary = false;
};

#ifdef __cpp_exceptions
// The exception that value() throws.
class Exception : public std::runtime_error {
public:
    explicit Exception(const Error &error)
        : std::runtime_error(error.message),
          code_(error.code),
          prompt_tokens_(error.prompt_tokens),
          max_model_len_(error.max_model_len),
          is_temporary_(error.is_temporary) {}

    [[nodiscard]] Code code() const noexcept { return code_; }

    // As the fields of Error.
    [[nodiscard]] uint64_t prompt_tokens() const noexcept { return prompt_tokens_; }
    [[nodiscard]] uint64_t max_model_len() const noexcept { return max_model_len_; }
    [[nodiscard]] bool is_temporary() const noexcept { return is_temporary_; }

private:
    Code code_;
    uint64_t prompt_tokens_;
    uint64_t max_model_len_;
    bool is_temporary_;
};
#endif

// A value or an error.
template <class T>
class [[nodiscard]] Result {
public:
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
    [[nodiscard]] explicit operator bool() const noexcept { return ok(); }

    // Requires ok(). On a temporary, the value is moved out, so that a range-for over `*call()` is
    // safe.
    [[nodiscard]] T &operator*() & noexcept { return *get(); }
    [[nodiscard]] const T &operator*() const & noexcept { return *get(); }
    [[nodiscard]] T operator*() && { return std::move(*get()); }
    [[nodiscard]] T *operator->() noexcept { return get(); }
    [[nodiscard]] const T *operator->() const noexcept { return get(); }

    // Requires !ok().
    [[nodiscard]] const Error &error() const noexcept {
        assert(!ok());
        return *std::get_if<1>(&state_);
    }

#ifdef __cpp_exceptions
    // Returns the value. Throws Exception if there is none.
    T &value() & { return check(), *get(); }
    const T &value() const & { return check(), *get(); }
    T value() && { return check(), std::move(*get()); }
#endif

private:
    T *get() noexcept {
        assert(ok());
        return std::get_if<0>(&state_);
    }
    const T *get() const noexcept {
        assert(ok());
        return std::get_if<0>(&state_);
    }
#ifdef __cpp_exceptions
    void check() const {
        if (!ok()) throw Exception(error());
    }
#endif

    std::variant<T, Error> state_;
};

// Success or an error.
template <>
class [[nodiscard]] Result<void> {
public:
    Result() = default;
    Result(Error error) : error_(std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return error_.code == success; }
    [[nodiscard]] explicit operator bool() const noexcept { return ok(); }

    // Requires !ok().
    [[nodiscard]] const Error &error() const noexcept {
        assert(!ok());
        return error_;
    }

#ifdef __cpp_exceptions
    // Throws Exception if the call failed.
    void value() const {
        if (!ok()) throw Exception(error_);
    }
#endif

private:
    static constexpr Code success{0};  // no error has this code

    Error error_{success, {}};
};

using Status = Result<void>;

// ---- spans --------------------------------------------------------------------------------------

// A view of an array. Converts from any type with data() and size(), and to std::span in C++20. It
// is not std::span itself, so that files of one program can be compiled as C++17 and as C++20.
template <class T>
class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(T *data, size_t size) noexcept : data_(data), size_(size) {}

    template <class Array, class Element = std::remove_pointer_t<decltype(std::data(std::declval<const Array &>()))>,
              class = std::enable_if_t<std::is_convertible_v<Element (*)[], T (*)[]>>>
    constexpr Span(const Array &array) noexcept : Span(std::data(array), std::size(array)) {}

    [[nodiscard]] constexpr T *data() const noexcept { return data_; }
    [[nodiscard]] constexpr size_t size() const noexcept { return size_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] constexpr T *begin() const noexcept { return data_; }
    [[nodiscard]] constexpr T *end() const noexcept { return data_ + size_; }
    [[nodiscard]] constexpr T &operator[](size_t i) const noexcept { return assert(i < size_), data_[i]; }

private:
    T *data_ = nullptr;
    size_t size_ = 0;
};

// ---- conversions between C and C++ --------------------------------------------------------------

namespace detail {

template <auto free>
struct Free {
    template <class T>
    void operator()(T *handle) const noexcept {
        free(handle);
    }
};

template <class T, auto free>
using Handle = std::unique_ptr<T, Free<free>>;

// Converts an error and frees it.
inline Status status(pllm_error *error) {
    if (!error) return {};
    Handle<pllm_error, pllm_error_free> owned(error);
    return Error{Code(pllm_error_code(error)), pllm_error_message(error), pllm_error_prompt_tokens(error),
                 pllm_error_max_model_len(error), pllm_error_is_temporary(error) != 0};
}

// Returns the struct that `fill` fills.
template <class T, class Fill>
Result<T> filled(Fill fill) {
    T value{};
    value.struct_size = sizeof value;
    if (Status done = status(fill(&value)); !done) return done.error();
    return value;
}

// Returns the object that `make` creates, as an owning handle.
template <class T, auto free, class Make>
Result<Handle<T, free>> create(Make make) {
    T *raw = nullptr;
    if (Status done = status(make(&raw)); !done) return done.error();
    return Handle<T, free>(raw);
}

// Returns the library's defaults.
template <class T, auto init>
const T &defaults() {
    static const T value = [] {
        T filled;
        init(&filled, sizeof filled);
        return filled;
    }();
    return value;
}

inline const pllm_engine_options &engine_options_defaults() { return defaults<pllm_engine_options, pllm_engine_options_init>(); }
inline const pllm_sampling &sampling_defaults() { return defaults<pllm_sampling, pllm_sampling_init>(); }
inline const pllm_request &request_defaults() { return defaults<pllm_request, pllm_request_init>(); }
inline const pllm_dry &dry_defaults() { return defaults<pllm_dry, pllm_dry_init>(); }
inline const pllm_beam &beam_defaults() { return defaults<pllm_beam, pllm_beam_init>(); }
inline const pllm_fork &fork_defaults() { return defaults<pllm_fork, pllm_fork_init>(); }
inline const pllm_resume &resume_defaults() { return defaults<pllm_resume, pllm_resume_init>(); }
inline const pllm_pin &pin_defaults() { return defaults<pllm_pin, pllm_pin_init>(); }

inline std::string_view view(const char *text, uint64_t len) noexcept { return {text, static_cast<size_t>(len)}; }

// Copies the fields that the library provides. An older library provides fewer; the others are
// zero.
template <class T>
T known(const T &record) noexcept {
    T c{};
    std::memcpy(&c, &record, std::min(static_cast<size_t>(record.struct_size), sizeof c));
    return c;
}

// Returns the 32 bytes of a hash, or none for null.
inline std::string_view hash(const uint8_t *data) noexcept { return {reinterpret_cast<const char *>(data), data ? size_t{32} : 0}; }

template <class T>
Span<const T> view(const T *data, uint64_t len) noexcept {
    return {data, static_cast<size_t>(len)};
}

inline Result<std::string> copied(const Result<Handle<pllm_bytes, pllm_bytes_free>> &bytes) {
    if (!bytes) return bytes.error();
    return std::string(view(pllm_bytes_data(bytes->get()), pllm_bytes_len(bytes->get())));
}

}  // namespace detail

// ---- library ------------------------------------------------------------------------------------

// Returns the version of the loaded library, such as "0.3.0".
[[nodiscard]] inline std::string_view version() { return pllm_version(); }

// Returns a JSON object that describes this build and machine, as pllm_build_info does.
[[nodiscard]] inline std::string_view build_info() { return pllm_build_info(); }

// Checks that the loaded library has the ABI version of the header. Engine::create calls it.
inline Status check_abi(uint32_t header = PLLM_ABI_VERSION) {
    const uint32_t library = pllm_abi_version();
    if (library == header) return {};
    return Error{Code::unsupported, "libpagedllm " + std::string(pllm_version()) + " has ABI version " + std::to_string(library) +
                                        " (pagedllm.h: " + std::to_string(header) +
                                        "); build the program with the header of this library"};
}

// ---- memory budgets -----------------------------------------------------------------------------

// The state of a budget. Has the fields of pllm_budget_info.
using BudgetInfo = pllm_budget_info;

// A memory budget that a Budget or an Engine owns. Valid as long as its owner.
class BudgetView {
public:
    // Changes the size of the budget while its engines run. No request ends, and results do not
    // change. If the engines and their requests need more than `bytes`, the call returns
    // Code::capacity with the smallest possible size.
    Status resize(uint64_t bytes) const { return detail::status(pllm_budget_resize(budget_, bytes)); }

    Result<BudgetInfo> info() const {
        return detail::filled<BudgetInfo>([&](BudgetInfo *out) { return pllm_budget_get_info(budget_, out); });
    }

    [[nodiscard]] const pllm_budget *native() const noexcept { return budget_; }

    // Returns the handle. A budget that has been moved from is an error, because NULL selects a
    // budget of the engine's own.
    Result<const pllm_budget *> named() const {
        if (!budget_) return Error{Code::invalid_argument, "the budget has been moved from; pass another budget"};
        return budget_;
    }

protected:
    friend class Engine;
    explicit BudgetView(const pllm_budget *budget) noexcept : budget_(budget) {}

    const pllm_budget *budget_;
};

// A memory budget for KV pools, which several engines can share. It can be destroyed before its
// engines: they keep the budget.
//
//     pagedllm::Budget budget = pagedllm::Budget::create(1 << 30).value();
//     options.budget = &budget;
class Budget : public BudgetView {
public:
    // Creates a budget that resize can later raise to at most `max_bytes` (0: to `bytes`).
    static Result<Budget> create(uint64_t bytes, uint64_t max_bytes = 0) {
        auto budget = detail::create<pllm_budget, pllm_budget_free>(
            [&](pllm_budget **out) { return pllm_budget_create(bytes, max_bytes, out); });
        if (!budget) return budget.error();
        return Budget(std::move(*budget));
    }

    Budget(Budget &&other) noexcept : BudgetView(std::exchange(other.budget_, nullptr)), owned_(std::move(other.owned_)) {}
    Budget &operator=(Budget &&other) noexcept {
        budget_ = std::exchange(other.budget_, nullptr);
        owned_ = std::move(other.owned_);
        return *this;
    }

private:
    using Owned = detail::Handle<pllm_budget, pllm_budget_free>;
    explicit Budget(Owned owned) noexcept : BudgetView(owned.get()), owned_(std::move(owned)) {}

    Owned owned_;
};

// ---- structs of functions -----------------------------------------------------------------------

namespace detail {

// A struct of functions that the library takes. It is closed if no call has taken it.
template <class C>
class Interface {
public:
    Interface(Interface &&other) noexcept : c_(other.c_), state_(std::exchange(other.state_, State::moved)) {}
    Interface &operator=(Interface &&other) noexcept {
        if (this != &other) {
            close();
            c_ = other.c_;
            state_ = std::exchange(other.state_, State::moved);
        }
        return *this;
    }
    ~Interface() { close(); }

    // Gives the struct to a call of the C API that has succeeded.
    void release() noexcept { state_ = State::taken; }

protected:
    enum class State { owned, taken, moved };

    explicit Interface(const C &c) noexcept : c_(c) {}

    [[nodiscard]] const C &c() const noexcept { return c_; }
    [[nodiscard]] State state() const noexcept { return state_; }

private:
    void close() noexcept {
        if (state_ == State::owned && c_.close) c_.close(c_.user_data);
    }

    C c_;
    State state_ = State::owned;
};

}  // namespace detail

// ---- workers of several processes ---------------------------------------------------------------

// A rank of a group whose ranks compute one model: rank 0 with Engine::create, each other rank with
// run_worker. Both take the communicator of Options::communicator if they succeed, and the library
// then closes it. If they fail, destroying the communicator closes it, which the other ranks wait
// for.
//
//     auto world = pagedllm::Communicator::shared_memory("/dev/shm/my-service", rank, 2).value();
//     options.communicator = &world;
//     options.tensor_parallel = 2;
//     if (rank > 0) return pagedllm::run_worker(options).ok() ? 0 : 1;
//     auto engine = pagedllm::Engine::create(options).value();
class Communicator : public detail::Interface<pllm_communicator> {
public:
    // Joins a group of processes, or threads, of this host, which communicate through shared
    // memory. Waits until all ranks have joined. Rank 0 creates the file at `path`, usually below
    // /dev/shm. A timeout of 0 is no limit. See pllm_communicator_shared_memory.
    static Result<Communicator> shared_memory(const std::string &path, uint32_t rank, uint32_t size,
                                              std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
        if (path.find('\0') != std::string::npos) {
            return Error{Code::invalid_argument, "path has a NUL byte; pass a path of a file"};
        }
        // A negative duration becomes the shortest one.
        const auto limit = timeout.count() < 0 ? uint64_t{1} : static_cast<uint64_t>(timeout.count());
        auto c = detail::filled<pllm_communicator>([&](pllm_communicator *out) {
            return pllm_communicator_shared_memory(path.c_str(), rank, size, limit, out);
        });
        if (!c) return c.error();
        return Communicator(*c);
    }

    // Takes ownership of a communicator of the host: its own struct of functions, or that of
    // bindings/mpi.
    //
    //     pllm_communicator mpi{};
    //     mpi.struct_size = sizeof mpi;
    //     if (pllm_mpi_communicator(MPI_COMM_WORLD, &mpi) != MPI_SUCCESS) return 1;
    //     auto world = pagedllm::Communicator::adopt(mpi);
    [[nodiscard]] static Communicator adopt(const pllm_communicator &c) { return Communicator(c); }

    // Number of this rank, below size.
    [[nodiscard]] uint32_t rank() const noexcept { return c().rank; }
    // Number of ranks.
    [[nodiscard]] uint32_t size() const noexcept { return c().size; }

    // Returns the C struct. A communicator that an engine or a worker has taken, or that has been
    // moved from, is an error.
    Result<const pllm_communicator *> named() const {
        if (state() == State::taken) {
            return Error{Code::invalid_argument, "the communicator is closed, or belongs to an engine or a worker; create another one"};
        }
        if (state() == State::moved) {
            return Error{Code::invalid_argument, "the communicator has been moved from; pass another communicator"};
        }
        return &c();
    }

private:
    explicit Communicator(const pllm_communicator &c) noexcept : Interface(c) {}
};

// ---- KV stores ----------------------------------------------------------------------------------

// A store of KV blocks outside of the pool of an engine: on a disk, on another host. Engine::create
// takes the store of Options::kv_store if it succeeds, and the engine then closes it. If it fails,
// destroying the store closes it. Each engine needs a store of its own.
//
//     pllm_files_store_options files;
//     pllm_files_store_options_init(&files, sizeof files);
//     files.directory = "/var/cache/my-service/kv";
//     auto store = pagedllm::KvStore::open(pllm_files_store_open, files).value();
//     options.kv_store = &store;
//     auto engine = pagedllm::Engine::create(options).value();
class KvStore : public detail::Interface<pllm_kv_store> {
public:
    // Opens a store with the function of a connector, such as pllm_files_store_open or
    // pllm_valkey_store_open, and its options.
    template <class ConnectorOptions>
    static Result<KvStore> open(int32_t (*connector)(const ConnectorOptions *, pllm_kv_store *, char *, uint64_t),
                                const ConnectorOptions &options) {
        pllm_kv_store c{};
        c.struct_size = sizeof c;
        char text[512] = "";
        if (const int32_t code = connector(&options, &c, text, sizeof text); code != 0) return Error{Code(code), text};
        return KvStore(c);
    }

    // Takes ownership of a store of the host: its own struct of functions.
    [[nodiscard]] static KvStore adopt(const pllm_kv_store &c) { return KvStore(c); }

    // Returns the C struct. A store that an engine has taken, or that has been moved from, is an
    // error.
    Result<const pllm_kv_store *> named() const {
        if (state() == State::taken) {
            return Error{Code::invalid_argument, "the KV store belongs to another engine; open a store for each engine"};
        }
        if (state() == State::moved) {
            return Error{Code::invalid_argument, "the KV store has been moved from; pass another store"};
        }
        return &c();
    }

private:
    explicit KvStore(const pllm_kv_store &c) noexcept : Interface(c) {}
};

// ---- options and requests -----------------------------------------------------------------------

// Data type of KV blocks.
enum class Dtype : uint32_t {
    // Selected by the library.
    automatic = PLLM_DTYPE_AUTO,
    // 32-bit floating point.
    f32 = PLLM_DTYPE_F32,
    // bfloat16.
    bf16 = PLLM_DTYPE_BF16,
    // 8-bit integers with a scale in f32 for each head of each token: about half the bytes of bf16,
    // at a small cost in quality.
    int8 = PLLM_DTYPE_INT8,
    // 16-bit floating point. Values beyond 65504 are clamped.
    f16 = PLLM_DTYPE_F16,
    // 8-bit floating point (OCP E4M3) with the scales of Dtype::int8. More precise for small values
    // beside large ones, less precise for large values.
    fp8 = PLLM_DTYPE_FP8,
};

// Instruction path.
enum class Isa : uint32_t {
    // The widest instruction path of the machine.
    automatic = PLLM_ISA_AUTO,
    // Any CPU.
    portable = PLLM_ISA_PORTABLE,
    // AVX2, FMA and F16C.
    avx2 = PLLM_ISA_AVX2,
    // AVX-512 F, BW, DQ and VL.
    avx512 = PLLM_ISA_AVX512,
    // As Isa::avx512_vnni, with AVX-512 BF16: activations that are multiplied by weights or KV in
    // bf16 are rounded to bf16, and the products are summed in f32. Up to twice as fast for
    // prompts.
    avx512_bf16 = PLLM_ISA_AVX512_BF16,
    // As Isa::avx2, with AVX-VNNI: products with integer weights are faster, with the same bits.
    avx_vnni = PLLM_ISA_AVX_VNNI,
    // As Isa::avx512, with AVX-512 VNNI: products with integer weights are faster, with the same
    // bits.
    avx512_vnni = PLLM_ISA_AVX512_VNNI,
};

// Format of the weights in memory.
enum class Weights : uint32_t {
    // As in the model's files. Infinities and NaNs are kept.
    as_stored = PLLM_WEIGHTS_AS_STORED,
    // 32-bit floating point.
    f32 = PLLM_WEIGHTS_F32,
    // 16-bit floating point.
    f16 = PLLM_WEIGHTS_F16,
    // bfloat16.
    bf16 = PLLM_WEIGHTS_BF16,
    // 8-bit integers with a scale for each output. The CPU multiplies them by 8-bit activations,
    // which have a scale for every 128 values of a row. CUDA devices multiply them by activations
    // in bf16.
    int8 = PLLM_WEIGHTS_INT8,
    // 4-bit integers with a scale for each group of weight_group inputs of an output. The embedding
    // and the head are in 8 bits. Activations are as for Weights::int8.
    int4 = PLLM_WEIGHTS_INT4,
    // As Weights::int4, with an offset for each group, for 16 more bits a group. With groups of the
    // same size, it is the more precise of the two formats.
    int4_asymmetric = PLLM_WEIGHTS_INT4_ASYMMETRIC,
    // CUDA only: 8-bit floating point (OCP E4M3) with a scale for each output. The embedding and
    // the head are as stored. Products of many rows multiply by fp8 activations with a scale for
    // each row, if the device supports it. All other products, those of experts and those with
    // Options::batch_invariant multiply by bf16 activations.
    fp8 = PLLM_WEIGHTS_FP8,
};

// Treatment of preempted requests.
enum class Preemption : uint32_t {
    // Preempted requests lose their KV blocks and are recomputed when they are rescheduled.
    recompute = PLLM_PREEMPTION_RECOMPUTE,
    // Preempted requests are swapped to host memory. If it is full, they are recomputed.
    swap = PLLM_PREEMPTION_SWAP,
    // Swap or recompute, whichever costs less by the measured times.
    automatic = PLLM_PREEMPTION_AUTO,
};

// Order of the waiting requests.
enum class Order : uint32_t {
    // First come, first served.
    fcfs = PLLM_ORDER_FCFS,
    // Highest Request::priority first. It can preempt running requests of lower priority. To
    // prevent starvation, a request that has waited for ageing goes before new requests of the next
    // higher priority.
    priority = PLLM_ORDER_PRIORITY,
    // Shortest predicted output first. The prediction uses recent requests with a similar
    // max_tokens. To prevent starvation, a request that has waited for ageing goes before new
    // requests that are predicted to be up to 100 tokens shorter.
    shortest_predicted = PLLM_ORDER_SHORTEST_PREDICTED,
};

// Composition of a step.
enum class Batching : uint32_t {
    // Each step mixes prompt chunks and decodes, in the order of the requests.
    mixed = PLLM_BATCHING_MIXED,
    // Each step has either prompts or decodes, and prompts go first. After prefill_budget prompt
    // tokens, the decodes get one step.
    prefill_first = PLLM_BATCHING_PREFILL_FIRST,
    // Each step has every decode and at most prefill_budget prompt tokens: bounds the time between
    // tokens.
    decode_first = PLLM_BATCHING_DECODE_FIRST,
    // Static batching: no request is admitted until the running batch has finished. For baselines.
    static_ = PLLM_BATCHING_STATIC,
};

// Number of blocks that a request needs to start.
enum class Allocation : uint32_t {
    // Blocks are allocated as a sequence grows. If the pool is full, the last request in the order
    // is preempted.
    on_demand = PLLM_ALLOCATION_ON_DEMAND,
    // A request starts when the pool has blocks for its max_tokens, so that growing sequences cause
    // no preemption. Forks and appended tokens of running sequences are not included.
    max_tokens = PLLM_ALLOCATION_MAX_TOKENS,
};

// Options of an engine.
struct Options {
    // Model directory in the layout of Hugging Face, or a GGUF file. UTF-8.
    std::string model_path = {};
    // Device: "cpu" (default, also empty), or "cuda:0" (also "cuda") for the first CUDA device.
    // CUDA needs an NVIDIA driver for CUDA 12.0 or newer (525) and compute capability 8.0 or newer.
    // Prompts are faster with NVIDIA's cuBLAS for CUDA 12 or 13 (libcublasLt.so.12 or .13), which
    // blas_library of ModelInfo reports. A list such as "cuda:0,cuda:1" divides the model among up
    // to 64 devices of one kind, which needs NCCL (libnccl.so.2). Lists have not been tested on
    // GPUs yet.
    std::string device = {};
    // KV pool size in bytes. 0 (default): enough for max_seqs sequences of max_model_len tokens, at
    // most 1 GiB.
    uint64_t kv_bytes = detail::engine_options_defaults().kv_bytes;
    // Seed for requests without a seed of their own. Default 0.
    uint64_t seed = detail::engine_options_defaults().seed;
    // Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256.
    uint32_t block_size = detail::engine_options_defaults().block_size;
    // Data type of KV blocks. Default Dtype::automatic: f32 for models in f32, else bf16.
    Dtype kv_dtype = Dtype(detail::engine_options_defaults().kv_dtype);
    // Maximum length of a sequence in tokens, prompt and output together. 0 (default): the model's
    // own maximum, or what the pool holds.
    uint32_t max_model_len = detail::engine_options_defaults().max_model_len;
    // Maximum number of tokens in one step, prompt and decode tokens of all sequences together.
    // Default 512.
    uint32_t max_batch_tokens = detail::engine_options_defaults().max_batch_tokens;
    // Maximum number of running sequences, at most max_batch_tokens. Default 64.
    uint32_t max_seqs = detail::engine_options_defaults().max_seqs;
    // Maximum number of prompt tokens of one sequence in one step. 0 (default): max_batch_tokens.
    uint32_t prefill_chunk = detail::engine_options_defaults().prefill_chunk;
    // Number of threads, including the stepping thread. 0 (default): the number of CPUs in cpus, or
    // of CPUs on which the process may run, within the quota of its container.
    uint32_t threads = detail::engine_options_defaults().threads;
    // Instruction path. Default Isa::automatic. Results have the same bits within a path, not
    // across paths.
    Isa isa = Isa(detail::engine_options_defaults().isa);
    // Capacity, in outputs, of the engine's own queue. See Engine::create_queue. 0 (default):
    // 65536.
    uint64_t queue_capacity = detail::engine_options_defaults().queue_capacity;
    // Serve token ids only: no tokenizer is loaded, and text calls return Code::unsupported.
    bool skip_tokenizer = (detail::engine_options_defaults().flags & PLLM_ENGINE_SKIP_TOKENIZER) != 0;
    // Disable the prefix cache.
    bool no_prefix_cache = (detail::engine_options_defaults().flags & PLLM_ENGINE_NO_PREFIX_CACHE) != 0;
    // On a CUDA device: the results of a sequence do not depend on the batch, as on the CPU.
    // Slower: products of many rows do not use cuBLASLt, and attention over long sequences is not
    // split.
    bool batch_invariant = (detail::engine_options_defaults().flags & PLLM_ENGINE_BATCH_INVARIANT) != 0;
    // CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights and working
    // memory, for the KV pool. Cannot be combined with kv_bytes. 0 (default): kv_bytes is used.
    float memory_fraction = detail::engine_options_defaults().memory_fraction;
    // If false, Engine::create starts the engine's own thread. If true, the host steps the engine.
    bool host_steps = false;
    // Reports the bytes of weights that have been read, out of total, on the thread that calls
    // Engine::create. The result false cancels the loading. An exception cancels it as well, and
    // Engine::create rethrows it. Empty (default): not called.
    std::function<bool(uint64_t done, uint64_t total)> progress = nullptr;
    // Maximum number of requests, including resumed and forked sequences, that wait for their first
    // step. More are refused with Code::capacity; one can always wait. 0 (default): no limit.
    uint64_t max_waiting_requests = detail::engine_options_defaults().max_waiting_requests;
    // Maximum number of tokens that the waiting requests have to compute. 0 (default): no limit.
    uint64_t max_waiting_tokens = detail::engine_options_defaults().max_waiting_tokens;
    // Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and
    // of a text to tokenize. A longer one is Code::invalid_argument. 0 (default): 64 for each token
    // of max_model_len, at least 1048576. Tokenization takes up to 16 bytes of memory for each byte
    // of text, and up to 512 for each byte of a stretch of at most 2 MiB without a place to cut
    // (docs/models.md).
    uint64_t max_prompt_bytes = detail::engine_options_defaults().max_prompt_bytes;
    // Budget from which the KV pool takes its bytes, instead of kv_bytes. null (default): a budget
    // of its own.
    const BudgetView *budget = nullptr;
    // Size in bytes of the host tier, which holds the KV of swapped requests and idle sequences. 0
    // (default): none.
    uint64_t swap_bytes = detail::engine_options_defaults().swap_bytes;
    // Directory for the host tier. The tier is an unnamed file there, which grows as it is written
    // and disappears with the engine. A thread of the engine reads and writes it. A slow disk
    // delays only the sequences that return from it; while it is behind, others are recomputed.
    // Empty (default): the tier is in memory. If the file cannot be written or read, as on a full
    // disk, the sequence is recomputed when it returns and swap_failures of Stats counts it.
    std::string swap_path = {};
    // Treatment of preempted requests. Default Preemption::recompute. The others need swap_bytes,
    // and swap_bytes needs one of the others.
    Preemption preemption = Preemption(detail::engine_options_defaults().preemption);
    // Order of the waiting requests. Default Order::fcfs.
    Order order = Order(detail::engine_options_defaults().order);
    // Waiting time after which a request is preferred; see Order. 0 (default): 10 seconds.
    std::chrono::milliseconds ageing{detail::engine_options_defaults().ageing_ms};
    // Composition of a step. Default Batching::mixed.
    Batching batching = Batching(detail::engine_options_defaults().batching);
    // Prompt tokens for Batching::decode_first and Batching::prefill_first. 0 (default): 256 and
    // 2048.
    uint32_t prefill_budget = detail::engine_options_defaults().prefill_budget;
    // Number of blocks that a request needs to start. Default Allocation::on_demand.
    Allocation allocation = Allocation(detail::engine_options_defaults().allocation);
    // File for a trace of every step, in the format of Perfetto and chrome://tracing: the batch,
    // the times of its phases, and the phases of each sequence. UTF-8. An existing file is
    // replaced. A thread of the engine writes it, at most about one second late. If the disk fails
    // or falls behind by 256 MiB, the trace ends and traces_stopped of Stats is 1. Empty (default):
    // none.
    std::string trace_path = {};
    // File for a journal of all calls and of everything else on which steps depend. pagedllm-replay
    // repeats them bit for bit on a machine with the same instruction path. It contains prompts, as
    // tokens, and cache salts. UTF-8. An existing file is replaced. A thread of the engine writes
    // it, at most about one second late. If the disk fails or falls behind by 256 MiB, the journal
    // ends and journals_stopped of Stats is 1. Empty (default): none.
    std::string journal_path = {};
    // Value of the label model_name in Engine::metrics. UTF-8. Empty (default): the name of the
    // model directory.
    std::string model_name = {};
    // Format of the weights in memory. Fewer bits take less memory and time, and cost quality.
    // Small tensors that affect quality (routers of experts, learned positions) and the projections
    // of latents stay as stored. Default Weights::as_stored.
    Weights weight_format = Weights(detail::engine_options_defaults().weight_format);
    // Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. Smaller is more precise.
    // 0 (default): 32.
    uint32_t weight_group = detail::engine_options_defaults().weight_group;
    // Directory for packed weights. If it has the packed form of this model, weight_format and
    // library, the form is checked and read as fast as the disk. Otherwise the weights are packed
    // and the form is written, or replaced. Several models and processes can share the directory;
    // unused files are not removed. It contains weights: protect it against writing as the model is
    // protected. If it cannot be written, the engine works and packed of ModelInfo reports it.
    // UTF-8. Empty (default): weights are packed each time.
    std::string packed_path = {};
    // List of CPUs in the syntax of taskset -c, such as "0-3,8", one for each of threads. Each
    // thread of the engine is pinned to one of them, in this order. The first is for the stepping
    // thread: the engine's own thread (Engine::start) is pinned, a thread of the program is not.
    // Empty (default): threads are not pinned.
    std::string cpus = {};
    // Store of KV blocks outside of the pool. Null (default): none. A request first waits for the
    // blocks of its prompt that the store has. Full blocks are written to the store. Needs the
    // prefix cache. Each engine needs a store of its own. run_worker ignores it.
    KvStore *kv_store = nullptr;
    // Maximum number of bytes of the blocks that are read or written at a time. 0 (default):
    // 268435456.
    uint64_t kv_store_max_bytes = detail::engine_options_defaults().kv_store_max_bytes;
    // Maximum number of operations in flight, at most 65536. 0 (default): 64.
    uint32_t kv_store_max_operations = detail::engine_options_defaults().kv_store_max_operations;
    // Time in which the store must answer a lookup and read its blocks, at most 1 hour. Then the
    // request continues without the others. If no block has arrived by then, requests do not wait
    // for 8 times this time. 0 (default): 1 second.
    std::chrono::milliseconds kv_store_timeout{detail::engine_options_defaults().kv_store_timeout_ms};
    // Secret for the keys and checksums of the blocks (HMAC-SHA-256), at least 16 bytes, for a
    // store that is not trusted. Only engines with the same secret share blocks. It is copied.
    // Empty (default): none.
    std::vector<uint8_t> kv_store_secret = {};
    // Maximum number of KV events that wait for Engine::poll_kv_events, at most 1048576. 0
    // (default): no events are recorded. 16384 suits most hosts. Needs the prefix cache. Events
    // take memory of the host: about 100 bytes and 4 for each token of a block, for each event and
    // twice for each block of the pool.
    uint64_t kv_events_capacity = detail::engine_options_defaults().kv_events_capacity;
    // Connection with the other workers that compute the model. Its ranks are tensor_parallel *
    // pipeline_parallel. Null (default): this engine computes the model with the devices of this
    // process.
    Communicator *communicator = nullptr;
    // Number of workers that divide each layer. 0 (default): 1, or with a list of devices their
    // number divided by pipeline_parallel. The number of attention heads and the widths of MLPs
    // must be multiples of it, and so must the number of KV heads, unless it is a multiple of that.
    uint32_t tensor_parallel = detail::engine_options_defaults().tensor_parallel;
    // Number of groups of workers, each with some of the layers. 0 (default): 1.
    uint32_t pipeline_parallel = detail::engine_options_defaults().pipeline_parallel;
    // Time after which a wait for another worker fails. It must be longer than any step, and than
    // the difference between the times in which the workers load their parts of the model. 0
    // (default): 60 seconds.
    std::chrono::milliseconds worker_timeout{detail::engine_options_defaults().worker_timeout_ms};
};

// Content of the outputs.
enum class OutputKind : uint32_t {
    // Each output has the new tokens and the new text only.
    delta = PLLM_OUTPUT_DELTA,
    // Each output has all tokens and the whole text so far.
    cumulative = PLLM_OUTPUT_CUMULATIVE,
    // One output at the end of the sequence has all tokens and the whole text.
    final = PLLM_OUTPUT_FINAL,
};

// Kind of a constraint on the output.
enum class GrammarKind : uint32_t {
    // No constraint.
    none = PLLM_GRAMMAR_NONE,
    // A JSON text that the schema in grammar (itself a JSON text) describes. Properties come in the
    // order of "properties".
    // - "pattern" and the names of "patternProperties" are regular expressions of ECMA-262, in
    //   Unicode mode if they are valid there, otherwise by annex B. Lookarounds, backreferences and
    //   word boundaries are errors.
    // - A "format" that cannot be generated is an annotation.
    // - "propertyNames" has one of "enum", "const", "pattern" and the lengths, or a "$ref" to such
    //   a schema, in a schema without "properties" and "patternProperties". Otherwise it is an
    //   error.
    // - Keywords that cannot be generated are errors: among others "uniqueItems", "contains",
    //   "not", "if" and "dependentRequired".
    // - A grammar has at most 64 members of "patternProperties". An object has at most about 500
    //   optional properties, or 3,000 required ones. Objects with more properties of both kinds
    //   together can be refused.
    // The object "x-guidance" at the root of the schema has these options:
    // - "strict_formats" (default false): if true, the formats of JSON Schema that cannot be
    //   generated are errors: idn-email, idn-hostname, iri, iri-reference, json-pointer, regex,
    //   relative-json-pointer, uri-reference and uri-template.
    // - "lenient" (default false): if true, keywords that cannot be generated are ignored, such as
    //   "uniqueItems" in the schema of a set. The output may then violate them: check it.
    // - "coerce_one_of" (default false): if true, "oneOf" means "anyOf" if its schemas may overlap.
    //   If false, such a "oneOf" is an error.
    // - "whitespace_flexible" (default true): if false, there is no white space between the parts
    //   of the text.
    // - "whitespace_pattern" (default: one space or tab, or a line break and at most 40 of these):
    //   the text between two parts, as a regular expression of Rust.
    // - "item_separator" (default ","): a regular expression of Rust.
    // - "key_separator" (default ":"): a regular expression of Rust.
    // - "json_allowed_escapes" (default "nrbtf\\\"", with "u" if the schema has no names of
    //   properties or demands other control characters): the characters that may follow a backslash
    //   in strings.
    // - "json_allow_general_unicode_escapes" (default false): if true, strings without a pattern
    //   may write any character as \u and digits.
    json_schema = PLLM_GRAMMAR_JSON_SCHEMA,
    // Any JSON object.
    json_object = PLLM_GRAMMAR_JSON_OBJECT,
    // A text that the regular expression in grammar matches as a whole: a pattern of Python's re
    // for str. Lookarounds, backreferences, word boundaries, atomic groups, possessive quantifiers,
    // conditions, \N and the anchors of lines are errors.
    regex = PLLM_GRAMMAR_REGEX,
    // One of the texts in choices.
    choice = PLLM_GRAMMAR_CHOICE,
    // A text that the Lark grammar in grammar describes. Its regular expressions are those of
    // Python's re, with \p{Name} for Unicode properties. A schema after %json is read like that of
    // GrammarKind::json_schema, with options of its own.
    lark = PLLM_GRAMMAR_LARK,
};

// A constraint on the output. Default: none.
//
//     sampling.grammar = pagedllm::Grammar::regex("[0-9]+");
struct Grammar {
    GrammarKind kind = GrammarKind::none;
    std::string text = {};                  // the schema, regular expression or Lark grammar
    std::vector<std::string> choices = {};  // the allowed texts if kind is choice

    static Grammar json_schema(std::string schema) { return {GrammarKind::json_schema, std::move(schema)}; }
    static Grammar json_object() { return {GrammarKind::json_object}; }
    static Grammar regex(std::string expression) { return {GrammarKind::regex, std::move(expression)}; }
    static Grammar choice(std::vector<std::string> of) { return {GrammarKind::choice, {}, std::move(of)}; }
    static Grammar lark(std::string grammar) { return {GrammarKind::lark, std::move(grammar)}; }
};

// The DRY penalty: a token that would extend a repetition of length tokens loses multiplier * base
// ^ (length - allowed_length).
struct Dry {
    // Strength of the penalty. Range 0 to 100. Default 0.8. 0 disables it.
    float multiplier = detail::dry_defaults().multiplier;
    // Base of the exponential growth. Range 1 to 100. Default 1.75.
    float base = detail::dry_defaults().base;
    // Length in tokens of the longest repetition without a penalty. Default 2.
    uint32_t allowed_length = detail::dry_defaults().allowed_length;
    // Number of last tokens that are searched for repetitions. 0 (default): all.
    uint32_t penalty_last_n = detail::dry_defaults().penalty_last_n;
    // Texts that end a repetition, within a token or across tokens. nullopt (default): newline,
    // colon, quotation mark and asterisk, or none with Options::skip_tokenizer. An empty list:
    // none. At most 64 texts of at most 128 bytes each.
    std::optional<std::vector<std::string>> sequence_breakers = std::nullopt;
};

// A value that is added to the logit of a token. Has the fields of pllm_logit_bias.
using LogitBias = pllm_logit_bias;

// How a request samples its tokens, what it reports and when it ends.
// The parameters apply in this order: logit bias; repetition, frequency and presence penalty; DRY;
// exclusions and the grammar; temperature; top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or
// mirostat in their place; the draw.
struct Sampling {
    // Temperature. 0 selects greedy sampling. Range 0 to 10,000. Default 1.
    float temperature = detail::sampling_defaults().temperature;
    // Keeps the most probable tokens whose probabilities sum to at least this value. Range above 0
    // to 1. Default 1: all.
    float top_p = detail::sampling_defaults().top_p;
    // Keeps tokens whose probability is at least this fraction of the largest. Range 0 to 1.
    // Default 0: all.
    float min_p = detail::sampling_defaults().min_p;
    // Keeps the k most probable tokens. Default 0: all.
    uint32_t top_k = detail::sampling_defaults().top_k;
    // Maximum number of generated tokens. 0: only the prompt is computed and reported; n and
    // best_of must be 1, without a beam search. nullopt (default): up to max_model_len.
    std::optional<uint32_t> max_tokens = std::nullopt;
    // Number of tokens before which neither end-of-sequence tokens nor stops end the sequence.
    // Default 0.
    uint32_t min_tokens = detail::sampling_defaults().min_tokens;
    // Seed. A request with a seed generates the same tokens in any batch. nullopt (default): the
    // seed is derived from the engine's seed and the request id.
    std::optional<uint64_t> seed = std::nullopt;
    // Do not stop at end-of-sequence tokens.
    bool ignore_eos = (detail::sampling_defaults().flags & PLLM_SAMPLING_IGNORE_EOS) != 0;
    // Report the log probability of each generated token, and of the top_logprobs most probable
    // tokens.
    bool logprobs = (detail::sampling_defaults().flags & PLLM_SAMPLING_LOGPROBS) != 0;
    // Strings that end the sequence, within a token or across tokens. They do not appear in the
    // text. At most 1024 strings of 16384 bytes in all.
    std::vector<std::string> stop = {};
    // Tokens that end the sequence. They are reported in tokens, but not in the text. At most 1024.
    std::vector<uint32_t> stop_token_ids = {};
    // Report the log probability of each prompt token except the first, from prompt_logprobs_start
    // on, and of the prompt_top_logprobs most probable tokens. Of several samples, the first
    // reports them. A fork does not report them again.
    bool prompt_logprobs = (detail::sampling_defaults().flags & PLLM_SAMPLING_PROMPT_LOGPROBS) != 0;
    // The output begins with the prompt. With logprobs, the tokens of the prompt have log
    // probabilities, too: the prompt is computed from prompt_logprobs_start on even if the prefix
    // cache has it, and its output follows then.
    bool echo = (detail::sampling_defaults().flags & PLLM_SAMPLING_ECHO) != 0;
    // The stop string, or the text of the token that ends the sequence, stays in the text.
    bool include_stop = (detail::sampling_defaults().flags & PLLM_SAMPLING_INCLUDE_STOP) != 0;
    // With logprobs: number of most probable tokens reported for each generated token. At most 128.
    // Default 0.
    uint32_t top_logprobs = detail::sampling_defaults().top_logprobs;
    // With prompt_logprobs: number of most probable tokens reported for each prompt token. At most
    // 128. Default 0.
    uint32_t prompt_top_logprobs = detail::sampling_defaults().prompt_top_logprobs;
    // Content of the outputs. Default OutputKind::delta.
    OutputKind output_kind = OutputKind(detail::sampling_defaults().output_kind);
    // Constraint on the output. Default: none.
    Grammar grammar = {};
    // Parameters that are left at their default take the values of the model's
    // generation_config.json, if it has them: temperature, top_k, top_p, min_p, typical_p,
    // repetition_penalty and no_repeat_ngram_size. "do_sample": false selects temperature 0. Has no
    // effect on beam search.
    bool model_defaults = (detail::sampling_defaults().flags & PLLM_SAMPLING_MODEL_DEFAULTS) != 0;
    // Until the first token is generated or appended, each step that computes a part of the prompt,
    // but not its end, has an output with computed_tokens and without tokens or text, whatever
    // output_kind is. The other tokens of the prompt follow in later steps, because it is longer
    // than prefill_chunk or max_batch_tokens, or because the step was full. These outputs count for
    // the capacity of the queue. After a preemption the numbers can be smaller again. Of several
    // samples or beams, the first sequence reports them.
    bool prefill_progress = (detail::sampling_defaults().flags & PLLM_SAMPLING_PREFILL_PROGRESS) != 0;
    // Keeps the tokens with the most typical surprise whose probabilities sum to at least this
    // value. Range above 0 to 1. Default 1: all.
    float typical_p = detail::sampling_defaults().typical_p;
    // Keeps tokens whose logit is within this many standard deviations of the largest. Range 0 to
    // 100. Default 0: all.
    float top_n_sigma = detail::sampling_defaults().top_n_sigma;
    // Probability with which XTC removes the most probable tokens. Range 0 to 1. Default 0: never.
    float xtc_probability = detail::sampling_defaults().xtc_probability;
    // Probability from which on a token counts as a top choice for XTC. Range 0 to 0.5. Default
    // 0.1.
    float xtc_threshold = detail::sampling_defaults().xtc_threshold;
    // Mirostat 2: target surprise in bits per token. Range 0 to 100. Default 0: off.
    float mirostat_tau = detail::sampling_defaults().mirostat_tau;
    // Mirostat 2: learning rate. Range above 0 to 1. Default 0.1.
    float mirostat_eta = detail::sampling_defaults().mirostat_eta;
    // Subtracted from the logit of each token that has been generated. Range -2 to 2. Default 0.
    float presence_penalty = detail::sampling_defaults().presence_penalty;
    // Subtracted from the logit of a token for each time it has been generated. Range -2 to 2.
    // Default 0.
    float frequency_penalty = detail::sampling_defaults().frequency_penalty;
    // Divides positive logits, and multiplies negative logits, of all tokens of the prompt and the
    // output. Range 0.01 to 100. Default 1: off.
    float repetition_penalty = detail::sampling_defaults().repetition_penalty;
    // No n-gram of this many tokens occurs twice. At most 256. Default 0: off.
    uint32_t no_repeat_ngram_size = detail::sampling_defaults().no_repeat_ngram_size;
    // DRY penalty. nullopt (default): off.
    std::optional<Dry> dry = std::nullopt;
    // Values that are added to logits, from -100 to 100. Empty (default): none. At most as many as
    // the vocabulary has tokens.
    std::vector<LogitBias> logit_bias = {};
    // Texts that the output must not contain, as the tokenizer encodes them at the beginning of a
    // text, after a space and within a word. Other token sequences that spell the same text are not
    // excluded. At most 1024 texts of 65536 bytes in all.
    std::vector<std::string> bad_words = {};
    // Token sequences that the output must not contain. At most 1024 sequences of at most 256
    // tokens each.
    std::vector<std::vector<uint32_t>> bad_words_ids = {};
    // The only tokens that may be sampled. Empty (default): all. At most as many as the vocabulary
    // has tokens.
    std::vector<uint32_t> allowed_token_ids = {};
    // Position of the first prompt token whose log probability is reported, if prompt_logprobs or
    // both echo and logprobs are set. Tokens before it can come from the prefix cache. It counts in
    // the truncated prompt, and must be below its length. Default 0: all except the first token.
    uint64_t prompt_logprobs_start = detail::sampling_defaults().prompt_logprobs_start;
};

// When a beam search stops.
enum class EarlyStopping : uint32_t {
    // Stop when the best running beam, if it ended now, would not score higher than the worst
    // finished beam.
    no = PLLM_EARLY_STOPPING_NO,
    // Stop as soon as width beams are finished.
    yes = PLLM_EARLY_STOPPING_YES,
    // Stop when no running beam can reach a higher score than the worst finished beam.
    never = PLLM_EARLY_STOPPING_NEVER,
};

// Parameters of a beam search, as in generate of Hugging Face transformers: release 5, and release
// 4 for several groups.
// Logit bias, penalties and exclusions of Sampling apply to the log probabilities, in the order of
// transformers. Frequency and presence penalties and DRY, which transformers lacks, follow the
// repetition penalty. Bad words can forbid end tokens, which transformers ignores.
struct Beam {
    // Number of beams, 2 to 64. Default 4.
    uint32_t width = detail::beam_defaults().width;
    // Number of groups of beams, each with its own search. Default 1.
    uint32_t groups = detail::beam_defaults().groups;
    // Subtracted from the log probability of a token for each beam of an earlier group that chose
    // it in the same step, before the repetition penalty. Range 0 to 1,000,000. Default 0.
    float diversity_penalty = detail::beam_defaults().diversity_penalty;
    // The score of a beam is the sum of its log probabilities divided by its length to this power.
    // Range -5 to 5. Default 1.
    float length_penalty = detail::beam_defaults().length_penalty;
    // When the search stops. Default EarlyStopping::no.
    EarlyStopping early_stopping = EarlyStopping(detail::beam_defaults().early_stopping);
};

// Edits the logits of the next token of a sequence, on the stepping thread. A lambda without
// captures converts to it. pllm_logits_hook lists the functions that it may call.
using LogitsHook = void (*)(void *hook_data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits,
                            uint64_t vocab_size) noexcept;

// A view of a prompt: text or token ids.
using Prompt = std::variant<std::string_view, Span<const uint32_t>>;

// A request. Its views need to be valid only during the call.
// Initialize it as `{"text"}` or `{tokens, sampling}`, or set its fields.
struct Request {
    // Prompt as UTF-8 text or as token ids.
    Prompt prompt;
    // Sampling parameters.
    Sampling sampling = {};
    // Returned in each output of the request.
    uint64_t user_data = detail::request_defaults().user_data;
    // Number of results: samples, or best beams. Default 1. Result i has the sequence id request +
    // i; with best_of, result i is one of the ids request to request + best_of - 1. Each sequence
    // has its own last output.
    uint32_t n = detail::request_defaults().n;
    // The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
    // Engine::render_chat rendered.
    bool add_special = (detail::request_defaults().text_flags & PLLM_TEXT_ADD_SPECIAL) != 0;
    // Special tokens are left out of the text.
    bool skip_special = (detail::request_defaults().text_flags & PLLM_TEXT_SKIP_SPECIAL) != 0;
    // Number of samples to generate. If it is larger than n, the n samples with the highest log
    // probability are returned at the end, best first. 0 (default) selects n.
    uint32_t best_of = detail::request_defaults().best_of;
    // Beam search. nullopt (default) selects sampling. The n best beams are returned at the end,
    // best first, whatever output_kind is.
    // Code::invalid_argument if it is combined with best_of, keep, logits_hook, a temperature other
    // than 0 or the default, top_k, top_p, min_p, typical_p, top_n_sigma, XTC, mirostat, a seed,
    // stop strings, top_logprobs, Sampling::prompt_logprobs, Sampling::echo or a grammar.
    std::optional<Beam> beam = std::nullopt;
    // The sequences of the request are kept when they end, for any reason, and become idle.
    // Engine::sequence(output.sequence) takes ownership of one.
    bool keep = (detail::request_defaults().flags & PLLM_REQUEST_KEEP) != 0;
    // Keeps only this many tokens at the end of the prompt. 0 (default) keeps all.
    uint32_t truncate_prompt_tokens = detail::request_defaults().truncate_prompt_tokens;
    // A view. Requests share blocks of the prefix cache only if their salts are equal, so that
    // tenants cannot probe the prompts of other tenants.
    std::string_view cache_salt = {};
    // Edits the logits of each token. null (default): none.
    LogitsHook logits_hook = nullptr;
    // Passed to logits_hook. Must be valid until the last output of the request has been made.
    void *hook_data = nullptr;
    // Deadline from now. When it passes, the request ends with FinishReason::deadline and the
    // tokens it has. 0 (default): none. A negative deadline is Code::invalid_argument.
    std::chrono::milliseconds deadline{detail::request_defaults().deadline_ms};
    // Priority, -100 to 100; higher runs first. Used if the order is Order::priority. Default 0.
    // Forks inherit it.
    int32_t priority = detail::request_defaults().priority;
    // Time for which the request waits for each next block of its prompt that the KV store does not
    // have yet, because another engine computes the prompt. The engine reads each block when the
    // store has it, and computes the prompt from the first block on that has not appeared in this
    // time. If no other request can run meanwhile, a step waits for these blocks, too. 0 (default):
    // the request waits only for blocks that the store has. Code::invalid_argument if it is not 0
    // and the engine has no kv_store.
    std::chrono::milliseconds kv_store_wait{detail::request_defaults().kv_store_wait_ms};
};

class QueueView;

// Parameters of a fork.
struct Fork {
    // Number of tokens that the children share with their parent: 1 to its length, or nullopt
    // (default): all.
    std::optional<uint64_t> at = std::nullopt;
    // Each child draws from its own random stream of this seed, until it is resumed with other
    // parameters. nullopt (default): the children draw the same random numbers as their parent.
    std::optional<uint64_t> seed = std::nullopt;
    // Returned in the outputs of the children. nullopt (default): the children have the user_data
    // of the parent.
    std::optional<uint64_t> user_data = std::nullopt;
    // Queue for the outputs of the children. null (default) selects the parent's queue.
    const QueueView *queue = nullptr;
    // The children are idle until they are resumed, even if the parent runs.
    bool idle = (detail::fork_defaults().flags & PLLM_FORK_IDLE) != 0;
};

// How an idle sequence continues.
struct Resume {
    // Sampling parameters. Counts (max_tokens, min_tokens) and penalties start anew.
    Sampling sampling = {};
    // The sequences of the request are kept when they end, for any reason, and become idle.
    // Engine::sequence(output.sequence) takes ownership of one.
    bool keep = (detail::resume_defaults().flags & PLLM_REQUEST_KEEP) != 0;
    // Returned in the outputs. nullopt (default): the sequence keeps its user_data.
    std::optional<uint64_t> user_data = std::nullopt;
    // Special tokens are left out of the text.
    bool skip_special = (detail::resume_defaults().text_flags & PLLM_TEXT_SKIP_SPECIAL) != 0;
    // Edits the logits of each token. null (default): none.
    LogitsHook logits_hook = nullptr;
    // Passed to logits_hook. Must be valid until the last output has been made.
    void *hook_data = nullptr;
    // Continue as if the sequence had never been idle, with its own parameters, counts, grammar and
    // output kind. Of the other fields, only keep, user_data, logits_hook (null: keep it),
    // hook_data and deadline are used. A sequence that ended by its length must be rewound first;
    // otherwise it ends again with FinishReason::error. For generate and collect,
    // sampling.output_kind must be the output kind of the sequence.
    bool continue_generation = (detail::resume_defaults().flags & PLLM_RESUME_CONTINUE) != 0;
    // As in Request, from this call on.
    std::chrono::milliseconds deadline{detail::resume_defaults().deadline_ms};
};

// A prompt that is kept in the prefix cache.
// Initialize it as `{"text"}`, or set its fields.
struct Prefix {
    // Prompt as UTF-8 text or as token ids.
    Prompt prompt;
    // As in Request.
    std::string_view cache_salt = {};
    // Time for which the prompt is kept. 0 (default): until it is unpinned.
    std::chrono::milliseconds time_to_live{detail::pin_defaults().time_to_live_ms};
    // If a sequence cannot continue otherwise, pins are dropped, those with the lowest priority
    // first. Default 0.
    uint32_t priority = detail::pin_defaults().priority;
    // The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
    // Engine::render_chat rendered.
    bool add_special = (detail::pin_defaults().text_flags & PLLM_TEXT_ADD_SPECIAL) != 0;
};

// ---- C structs of options -----------------------------------------------------------------------

namespace detail {

inline uint32_t flag(bool on, uint32_t bit) noexcept { return on ? bit : 0; }

inline void set_text(const char *&data, uint64_t &len, const std::string &text) noexcept {
    data = text.data();
    len = text.size();
}

// Sets a text unless it is empty.
inline void set_optional_text(const char *&data, uint64_t &len, const std::string &text) noexcept {
    if (!text.empty()) set_text(data, len, text);
}

template <class C, class T>
void set_array(const C *&data, uint64_t &len, const std::vector<T> &array) noexcept {
    data = array.data();
    len = array.size();
}

// Sets an array of lists, whose views are stored in `lists`.
inline void set_lists(const pllm_token_list *&data, uint64_t &len, std::vector<pllm_token_list> &lists,
                      const std::vector<std::vector<uint32_t>> &from) {
    for (const std::vector<uint32_t> &tokens : from) {
        pllm_token_list &list = lists.emplace_back();
        set_array(list.tokens, list.tokens_len, tokens);
    }
    set_array(data, len, lists);
}

inline void set_milliseconds(int64_t &c, std::chrono::milliseconds duration) noexcept { c = duration.count(); }

// 0 means no limit. A negative duration becomes the shortest one instead.
inline void set_milliseconds(uint64_t &c, std::chrono::milliseconds duration) noexcept {
    c = duration.count() < 0 ? 1 : static_cast<uint64_t>(duration.count());
}

inline void set_milliseconds(uint32_t &c, std::chrono::milliseconds duration, const char *name, Status &status) {
    const int64_t milliseconds = duration.count();
    if (milliseconds >= 0 && milliseconds <= int64_t{UINT32_MAX}) {
        c = static_cast<uint32_t>(milliseconds);
    } else if (status) {
        status = Error{Code::invalid_argument,
                       std::string(name) + " is " + std::to_string(milliseconds) + " ms; must be 0 to 4294967295 ms"};
    }
}

// Sets a handle unless `view` is null.
template <class C, class View>
void set_handle(const C *&handle, const View *view, Status &status) {
    if (!view) return;
    const Result<const C *> named = view->named();
    if (named) {
        handle = *named;
    } else if (status) {
        status = named.error();
    }
}

// Pointers and lengths of strings, as the C API takes them.
class CStrings {
public:
    // Sets the fields of a C struct. The strings must outlive it.
    void install(const std::vector<std::string> &strings, const char *const *&data, const uint64_t *&lens, uint64_t &count) {
        for (const std::string &string : strings) {
            data_.push_back(string.data());
            lens_.push_back(string.size());
        }
        data = data_.data();
        lens = lens_.data();
        count = data_.size();
    }

    // As above, unless there is no list. An empty list is not NULL: NULL selects the default.
    void install(const std::optional<std::vector<std::string>> &strings, const char *const *&data, const uint64_t *&lens,
                 uint64_t &count) {
        static constexpr const char *none[1] = {};
        if (!strings) return;
        install(*strings, data, lens, count);
        if (!data) data = none;
    }

private:
    std::vector<const char *> data_;
    std::vector<uint64_t> lens_;
};

inline void set_grammar(pllm_sampling &c, CStrings &choices, const Grammar &grammar) {
    c.grammar_kind = static_cast<uint32_t>(grammar.kind);
    if (grammar.kind != GrammarKind::none || !grammar.text.empty()) set_text(c.grammar, c.grammar_len, grammar.text);
    choices.install(grammar.choices, c.choices, c.choice_lens, c.choice_count);
}

// Sets the prompt of a pllm_request or a pllm_pin.
template <class C>
void set_prompt(C &c, const Prompt &prompt) noexcept {
    // An empty prompt is not NULL: NULL means that no prompt is given.
    static constexpr uint32_t no_tokens[1] = {};
    if (const auto *text = std::get_if<std::string_view>(&prompt)) {
        c.prompt = text->data() ? text->data() : "";
        c.prompt_len = text->size();
    } else if (const auto *tokens = std::get_if<Span<const uint32_t>>(&prompt)) {
        c.prompt_token_ids = tokens->data() ? tokens->data() : no_tokens;
        c.prompt_token_ids_len = tokens->size();
    }
}

template <class C>
void set_salt(C &c, std::string_view salt) noexcept {
    c.cache_salt = reinterpret_cast<const uint8_t *>(salt.data());
    c.cache_salt_len = salt.size();
}

// The C struct of `from`, which must outlive it.
struct COptions {
    explicit COptions(const Options &from) {
        set_text(native.model_path, native.model_path_len, from.model_path);
        set_optional_text(native.device, native.device_len, from.device);
        native.kv_bytes = from.kv_bytes;
        native.seed = from.seed;
        native.block_size = from.block_size;
        native.kv_dtype = static_cast<uint32_t>(from.kv_dtype);
        native.max_model_len = from.max_model_len;
        native.max_batch_tokens = from.max_batch_tokens;
        native.max_seqs = from.max_seqs;
        native.prefill_chunk = from.prefill_chunk;
        native.threads = from.threads;
        native.isa = static_cast<uint32_t>(from.isa);
        native.queue_capacity = from.queue_capacity;
        native.memory_fraction = from.memory_fraction;
        native.max_waiting_requests = from.max_waiting_requests;
        native.max_waiting_tokens = from.max_waiting_tokens;
        native.max_prompt_bytes = from.max_prompt_bytes;
        native.flags = flag(from.skip_tokenizer, PLLM_ENGINE_SKIP_TOKENIZER) |
            flag(from.no_prefix_cache, PLLM_ENGINE_NO_PREFIX_CACHE) |
            flag(from.batch_invariant, PLLM_ENGINE_BATCH_INVARIANT);
        set_handle(native.budget, from.budget, status);
        native.swap_bytes = from.swap_bytes;
        set_optional_text(native.swap_path, native.swap_path_len, from.swap_path);
        native.preemption = static_cast<uint32_t>(from.preemption);
        native.order = static_cast<uint32_t>(from.order);
        set_milliseconds(native.ageing_ms, from.ageing, "ageing", status);
        native.batching = static_cast<uint32_t>(from.batching);
        native.prefill_budget = from.prefill_budget;
        native.allocation = static_cast<uint32_t>(from.allocation);
        set_optional_text(native.trace_path, native.trace_path_len, from.trace_path);
        set_optional_text(native.journal_path, native.journal_path_len, from.journal_path);
        set_optional_text(native.model_name, native.model_name_len, from.model_name);
        native.weight_format = static_cast<uint32_t>(from.weight_format);
        native.weight_group = from.weight_group;
        set_optional_text(native.packed_path, native.packed_path_len, from.packed_path);
        set_optional_text(native.cpus, native.cpus_len, from.cpus);
        set_handle(native.kv_store, from.kv_store, status);
        native.kv_store_max_bytes = from.kv_store_max_bytes;
        native.kv_store_max_operations = from.kv_store_max_operations;
        set_milliseconds(native.kv_store_timeout_ms, from.kv_store_timeout, "kv_store_timeout", status);
        set_array(native.kv_store_secret, native.kv_store_secret_len, from.kv_store_secret);
        native.kv_events_capacity = from.kv_events_capacity;
        set_handle(native.communicator, from.communicator, status);
        native.tensor_parallel = from.tensor_parallel;
        native.pipeline_parallel = from.pipeline_parallel;
        set_milliseconds(native.worker_timeout_ms, from.worker_timeout);
    }
    COptions(const COptions &) = delete;
    COptions &operator=(const COptions &) = delete;

    pllm_engine_options native = engine_options_defaults();
    Status status;  // the first error
};

// The C struct of `from`, which must outlive it.
struct CDry {
    explicit CDry(const Dry &from) {
        native.multiplier = from.multiplier;
        native.base = from.base;
        native.allowed_length = from.allowed_length;
        native.penalty_last_n = from.penalty_last_n;
        sequence_breakers.install(from.sequence_breakers,
            native.sequence_breakers, native.sequence_breaker_lens, native.sequence_breaker_count);
    }
    CDry(const CDry &) = delete;
    CDry &operator=(const CDry &) = delete;

    pllm_dry native = dry_defaults();
    CStrings sequence_breakers;
};

// The C struct of `from`, which must outlive it.
struct CSampling {
    explicit CSampling(const Sampling &from) {
        native.temperature = from.temperature;
        native.top_p = from.top_p;
        native.min_p = from.min_p;
        native.top_k = from.top_k;
        if (from.max_tokens) native.max_tokens = *from.max_tokens;
        native.min_tokens = from.min_tokens;
        if (from.seed) native.seed = *from.seed;
        stop.install(from.stop,
            native.stop, native.stop_lens, native.stop_count);
        set_array(native.stop_token_ids, native.stop_token_ids_len, from.stop_token_ids);
        native.top_logprobs = from.top_logprobs;
        native.prompt_top_logprobs = from.prompt_top_logprobs;
        native.output_kind = static_cast<uint32_t>(from.output_kind);
        set_grammar(native, choices, from.grammar);
        native.flags = flag(from.seed.has_value(), PLLM_SAMPLING_SEED) |
            flag(from.ignore_eos, PLLM_SAMPLING_IGNORE_EOS) |
            flag(from.logprobs, PLLM_SAMPLING_LOGPROBS) |
            flag(from.prompt_logprobs, PLLM_SAMPLING_PROMPT_LOGPROBS) |
            flag(from.echo, PLLM_SAMPLING_ECHO) |
            flag(from.include_stop, PLLM_SAMPLING_INCLUDE_STOP) |
            flag(from.model_defaults, PLLM_SAMPLING_MODEL_DEFAULTS) |
            flag(from.prefill_progress, PLLM_SAMPLING_PREFILL_PROGRESS);
        native.typical_p = from.typical_p;
        native.top_n_sigma = from.top_n_sigma;
        native.xtc_probability = from.xtc_probability;
        native.xtc_threshold = from.xtc_threshold;
        native.mirostat_tau = from.mirostat_tau;
        native.mirostat_eta = from.mirostat_eta;
        native.presence_penalty = from.presence_penalty;
        native.frequency_penalty = from.frequency_penalty;
        native.repetition_penalty = from.repetition_penalty;
        native.no_repeat_ngram_size = from.no_repeat_ngram_size;
        if (from.dry) native.dry = &dry.emplace(*from.dry).native;
        set_array(native.logit_bias, native.logit_bias_len, from.logit_bias);
        bad_words.install(from.bad_words,
            native.bad_words, native.bad_word_lens, native.bad_word_count);
        set_lists(native.bad_words_ids, native.bad_words_ids_len, bad_words_ids, from.bad_words_ids);
        set_array(native.allowed_token_ids, native.allowed_token_ids_len, from.allowed_token_ids);
        native.prompt_logprobs_start = from.prompt_logprobs_start;
    }
    CSampling(const CSampling &) = delete;
    CSampling &operator=(const CSampling &) = delete;

    pllm_sampling native = sampling_defaults();
    CStrings stop;
    CStrings choices;
    std::optional<CDry> dry;
    CStrings bad_words;
    std::vector<pllm_token_list> bad_words_ids;
};

// The C struct of `from`, which must outlive it.
struct CBeam {
    explicit CBeam(const Beam &from) {
        native.width = from.width;
        native.groups = from.groups;
        native.diversity_penalty = from.diversity_penalty;
        native.length_penalty = from.length_penalty;
        native.early_stopping = static_cast<uint32_t>(from.early_stopping);
    }
    CBeam(const CBeam &) = delete;
    CBeam &operator=(const CBeam &) = delete;

    pllm_beam native = beam_defaults();
};

// The C struct of `from`, which must outlive it.
struct CRequest {
    explicit CRequest(const Request &from) {
        set_prompt(native, from.prompt);
        native.sampling = &sampling.emplace(from.sampling).native;
        native.user_data = from.user_data;
        native.n = from.n;
        native.best_of = from.best_of;
        if (from.beam) native.beam = &beam.emplace(*from.beam).native;
        native.text_flags = flag(from.add_special, PLLM_TEXT_ADD_SPECIAL) |
            flag(from.skip_special, PLLM_TEXT_SKIP_SPECIAL);
        native.truncate_prompt_tokens = from.truncate_prompt_tokens;
        native.flags = flag(from.keep, PLLM_REQUEST_KEEP);
        set_salt(native, from.cache_salt);
        native.logits_hook = from.logits_hook;
        native.hook_data = from.hook_data;
        set_milliseconds(native.deadline_ms, from.deadline);
        native.priority = from.priority;
        set_milliseconds(native.kv_store_wait_ms, from.kv_store_wait, "kv_store_wait", status);
    }
    CRequest(const CRequest &) = delete;
    CRequest &operator=(const CRequest &) = delete;

    [[nodiscard]] const pllm_request *to(const pllm_queue *queue) noexcept {
        native.queue = queue;
        return &native;
    }

    pllm_request native = request_defaults();
    std::optional<CSampling> sampling;
    std::optional<CBeam> beam;
    Status status;  // the first error
};

// The C struct of `from`, which must outlive it.
struct CResume {
    explicit CResume(const Resume &from) {
        native.sampling = &sampling.emplace(from.sampling).native;
        if (from.user_data) native.user_data = *from.user_data;
        native.logits_hook = from.logits_hook;
        native.hook_data = from.hook_data;
        native.flags = flag(from.keep, PLLM_REQUEST_KEEP) |
            flag(from.user_data.has_value(), PLLM_RESUME_USER_DATA) |
            flag(from.continue_generation, PLLM_RESUME_CONTINUE);
        native.text_flags = flag(from.skip_special, PLLM_TEXT_SKIP_SPECIAL);
        set_milliseconds(native.deadline_ms, from.deadline);
    }
    CResume(const CResume &) = delete;
    CResume &operator=(const CResume &) = delete;

    [[nodiscard]] const pllm_resume *to(const pllm_queue *queue) noexcept {
        native.queue = queue;
        return &native;
    }

    pllm_resume native = resume_defaults();
    std::optional<CSampling> sampling;
};

// The C struct of `from`, which must outlive it.
struct CPrefix {
    explicit CPrefix(const Prefix &from) {
        set_prompt(native, from.prompt);
        set_salt(native, from.cache_salt);
        set_milliseconds(native.time_to_live_ms, from.time_to_live);
        native.priority = from.priority;
        native.text_flags = flag(from.add_special, PLLM_TEXT_ADD_SPECIAL);
    }
    CPrefix(const CPrefix &) = delete;
    CPrefix &operator=(const CPrefix &) = delete;

    pllm_pin native = pin_defaults();
};

// Returns the C struct of options. It points into `options`, which must outlive it.
inline Result<pllm_engine_options> c_options(const Options &options) {
    COptions c(options);
    if (!c.status) return c.status.error();
    return c.native;
}

inline pllm_pin c_pin(const Prefix &prefix) { return CPrefix(prefix).native; }

// Passes the library's progress reports to Options::progress. It catches exceptions, which must not
// cross C frames.
class ProgressCall {
public:
    explicit ProgressCall(const Options &options) : progress_(options.progress) {}

    void install(pllm_engine_options &options) {
        if (!progress_) return;
        options.progress = [](void *self, uint64_t done, uint64_t total) noexcept -> int32_t {
            return static_cast<ProgressCall *>(self)->report(done, total) ? 0 : 1;
        };
        options.progress_data = this;
    }

    void rethrow() const {
#ifdef __cpp_exceptions
        if (thrown_) std::rethrow_exception(thrown_);
#endif
    }

private:
    bool report(uint64_t done, uint64_t total) noexcept {
#ifdef __cpp_exceptions
        try {
            return progress_(done, total);
        } catch (...) {
            thrown_ = std::current_exception();
            return false;
        }
#else
        return progress_(done, total);
#endif
    }

    const std::function<bool(uint64_t, uint64_t)> &progress_;
#ifdef __cpp_exceptions
    std::exception_ptr thrown_;
#endif
};

// Makes a call that loads a model. If it succeeds, the library has the communicator.
template <class Call>
auto load(const Options &options, Call call) -> decltype(call(std::declval<const pllm_engine_options *>())) {
    if (Status same = check_abi(); !same) return same.error();
    auto c = c_options(options);
    if (!c) return c.error();
    ProgressCall progress(options);
    progress.install(*c);
    auto result = call(&*c);
    if (result && options.communicator) options.communicator->release();
    progress.rethrow();
    return result;
}

}  // namespace detail

// ---- results ------------------------------------------------------------------------------------

// Memory that an engine would allocate. Has the fields of pllm_plan.
using Plan = pllm_plan;

// Result of one step. Has the fields of pllm_step.
using Step = pllm_step;

// Counters since the creation of the engine, and its state after the last step. Has the fields of
// pllm_stats.
using Stats = pllm_stats;

// A sequence as of the last step and the calls since. Has the fields of pllm_sequence_info.
using SequenceInfo = pllm_sequence_info;

// A token and its log probability in the model's own distribution, before sampling parameters
// apply. Has the fields of pllm_logprob.
using Logprob = pllm_logprob;

// Time in seconds, as the library measures it.
using Seconds = std::chrono::duration<double>;

// Predicted admission of a request.
struct Admission {
    // True if Engine::add would accept the request, false if too many requests wait, its queue is
    // full, or a shared budget cannot reserve its blocks.
    bool admits;
    // True if no request is ahead of it and its blocks are free, so that it would start in the next
    // step.
    bool fits_now;
    // Predicted time until its first token. nullopt if no step has been measured yet.
    std::optional<Seconds> first_token;
    // Number of requests ahead of it.
    uint64_t waiting_requests;
    // Number of tokens that those requests have to compute.
    uint64_t waiting_tokens;
};

// Times of a sequence from the call that added, resumed or forked it. 0 if the event did not occur.
struct Timing {
    // Time from the call that added, resumed or forked it to its first step. 0 if it never ran.
    Seconds queued{0};
    // Time from the same call to its first token, or 0.
    Seconds first_token{0};
    // Time from the same call to its last token, or 0.
    Seconds last_token{0};
};

// Result of Options::packed_path.
enum class Packed : uint64_t {
    // packed_path was not set.
    unused = PLLM_PACKED_UNUSED,
    // The packed weights were read from packed_path.
    read = PLLM_PACKED_READ,
    // The weights were packed from the model's files and written to packed_path.
    saved = PLLM_PACKED_SAVED,
    // The weights were packed from the model's files and could not be written to packed_path.
    unsaved = PLLM_PACKED_UNSAVED,
};

// The model and the limits of its engine. Its views are valid until the engine is freed.
struct ModelInfo {
    // Name in config.json, such as "LlamaForCausalLM". UTF-8.
    std::string_view architecture;
    // Instruction path, such as "avx512".
    std::string_view isa;
    // Tokens that end a sequence.
    Span<const uint32_t> eos_token_ids;
    // Number of tokens in the vocabulary.
    uint64_t vocab_size;
    // Number of layers.
    uint64_t layers;
    // Maximum length of a sequence for which the model was made.
    uint64_t max_positions;
    // Maximum length of a sequence in this engine.
    uint64_t max_model_len;
    // Number of threads.
    uint64_t threads;
    // Result of packed_path.
    Packed packed;
    // Reason, as text, why the packed weights were not read or not written. Empty if there is
    // nothing to report.
    std::string_view packed_reason;
    // On a CUDA device: the library that computes products of many rows, such as "cuBLASLt 12.9.1
    // (/usr/lib/libcublasLt.so.12)". If none does, "own kernels: " and the reason; prompts then
    // take longer. Empty on the CPU.
    std::string_view blas_library;
};

// Reason why a sequence ended. A newer library can return values without a name here.
enum class FinishReason : uint32_t {
    // The sequence has not ended.
    none = PLLM_FINISH_NONE,
    // An end-of-sequence token, a stop token or a stop string.
    stop = PLLM_FINISH_STOP,
    // max_tokens or max_model_len was reached.
    length = PLLM_FINISH_LENGTH,
    // The host aborted the request.
    abort = PLLM_FINISH_ABORT,
    // The computation failed. See error_message and error_code.
    error = PLLM_FINISH_ERROR,
    // The deadline passed. The outputs have the tokens generated by then.
    deadline = PLLM_FINISH_DEADLINE,
};

// What ended a sequence whose reason is FinishReason::stop. A newer library can return values
// without a name here.
enum class StopReason : uint32_t {
    // The sequence has not ended, or for another reason than FinishReason::stop.
    none = PLLM_STOP_NONE,
    // An end-of-sequence token of the model.
    eos = PLLM_STOP_EOS,
    // A token of stop_token_ids.
    token = PLLM_STOP_TOKEN,
    // A string of stop.
    string = PLLM_STOP_STRING,
    // The grammar was complete.
    grammar = PLLM_STOP_GRAMMAR,
};

// Kind of a KV event. A newer library can return values without a name here.
enum class KvEventKind : uint32_t {
    // The block is in the cache from now on.
    stored = PLLM_KV_EVENT_STORED,
    // The block is no longer in the cache.
    removed = PLLM_KV_EVENT_REMOVED,
    // No block is in the cache. KvEventKind::stored of each block that is there follows.
    cleared = PLLM_KV_EVENT_CLEARED,
};

// Place of a KV block. A newer library can return values without a name here.
enum class KvMedium : uint32_t {
    // The KV pool of the engine, in the memory of its device.
    pool = PLLM_KV_MEDIUM_POOL,
};

// An event of the prefix cache. Its views are valid until the batch is freed.
struct KvEvent {
    // Number of the step with this event. The first step with events has 1, and each further step
    // with events adds 1. All events of a step take effect together.
    uint64_t sequence_number;
    // Time of the step in seconds since 1970 (UTC).
    Seconds time;
    // Hash of the block, 32 bytes: its key in a KV store. Empty for KvEventKind::cleared.
    std::string_view hash;
    // Hash of the block before a stored block, 32 bytes. If first_token is 0, a hash that differs
    // between salts. Empty unless kind is KvEventKind::stored.
    std::string_view parent_hash;
    // Tokens of a stored block. Empty if there are none.
    Span<const uint32_t> tokens;
    // Position of the first token of the block in its sequence.
    uint64_t first_token;
    // Kind of the event.
    KvEventKind kind;
    // Place of the block. Values can be added.
    KvMedium medium;
    // Layer group of the block. Models whose layers have different attention windows have a block
    // in each group for the same tokens. Group 0 has the longest window.
    uint32_t group;
};

namespace detail {

inline Timing to_timing(const pllm_output &c) {
    Timing to{};
    to.queued = Seconds(c.queued_seconds);
    to.first_token = Seconds(c.first_token_seconds);
    to.last_token = Seconds(c.last_token_seconds);
    return to;
}

inline KvEvent to_kv_event(const pllm_kv_event &c) {
    KvEvent to{};
    to.sequence_number = c.sequence_number;
    to.time = Seconds(c.time_seconds);
    to.hash = detail::hash(c.hash);
    to.parent_hash = detail::hash(c.parent_hash);
    to.tokens = detail::view(c.tokens, c.tokens_len);
    to.first_token = c.first_token;
    to.kind = KvEventKind(c.kind);
    to.medium = KvMedium(c.medium);
    to.group = c.group;
    return to;
}

inline Admission to_admission(const pllm_admission &c) {
    Admission to{};
    to.admits = c.admits != 0;
    to.fits_now = c.fits_now != 0;
    to.first_token = c.first_token_seconds < 0 ? std::nullopt : std::optional<Seconds>(c.first_token_seconds);
    to.waiting_requests = c.waiting_requests;
    to.waiting_tokens = c.waiting_tokens;
    return to;
}

inline ModelInfo to_model_info(const pllm_model_info &c) {
    ModelInfo to{};
    to.architecture = detail::view(c.architecture, c.architecture_len);
    to.isa = detail::view(c.isa, c.isa_len);
    to.eos_token_ids = detail::view(c.eos_token_ids, c.eos_token_ids_len);
    to.vocab_size = c.vocab_size;
    to.layers = c.layers;
    to.max_positions = c.max_positions;
    to.max_model_len = c.max_model_len;
    to.threads = c.threads;
    to.packed = Packed(c.packed);
    to.packed_reason = detail::view(c.packed_reason, c.packed_reason_len);
    to.blas_library = detail::view(c.blas_library, c.blas_library_len);
    return to;
}

}  // namespace detail

// An output of one sequence: new tokens, new text, or its end. A view; valid as long as its
// Outputs.
struct Output {
    // Id of the request.
    uint64_t request;
    // Id of the sequence.
    uint64_t sequence;
    // user_data of the request.
    uint64_t user_data;
    // New tokens. Empty if there are none.
    Span<const uint32_t> tokens;
    // Log probability of each token. Empty if the request did not ask for them. NaN for tokens that
    // have none: those of an echoed prompt before prompt_logprobs_start, its first one, and tokens
    // that the host appended.
    Span<const float> logprobs;
    // New text: UTF-8, not NUL-terminated, whole characters only. Empty if there is none. The text
    // can lag behind the tokens.
    std::string_view text;
    // Error message: UTF-8, not NUL-terminated. Set if finish_reason is FinishReason::error, if it
    // is FinishReason::abort because the engine was freed, and, with FinishReason::none, if an
    // export or a change of an idle sequence failed. Else empty.
    std::string_view error_message;
    // Tokens of the prompt.
    uint64_t prompt_tokens;
    // Tokens generated so far.
    uint64_t generated_tokens;
    // Index of the sequence in its request, from 0.
    uint32_t index;
    // Reason of the end. Any value but FinishReason::none marks the last output of the sequence.
    FinishReason finish_reason;
    // Code of the error. Code::closed if the engine was freed. 0 if there is no error.
    Code error_code;
    // Sum of the log probabilities of all generated tokens, if the request enables log
    // probabilities or for the best of several samples. For a beam: its score after the length
    // penalty. Else 0.
    double score;
    // The most probable tokens at the position of each token, most probable first, the same number
    // for each. Empty if the request did not ask for them.
    Span<const Logprob> top_logprobs;
    // Log probabilities of the prompt tokens except the first, from prompt_logprobs_start on, if
    // the request enables them. They come in order, before the first generated token, possibly in
    // several outputs.
    Span<const float> prompt_logprobs;
    // The most probable tokens at the position of each prompt token, as in top_logprobs.
    Span<const Logprob> prompt_top_logprobs;
    // State of an exported sequence. Empty in all other outputs.
    Span<const uint8_t> sequence_state;
    // In the last output of a sequence: number of times it was preempted.
    uint64_t preemptions;
    // In the last output of a sequence: number of its first tokens that were found in the prefix
    // cache.
    uint64_t cached_tokens;
    // What ended the sequence. StopReason::none unless finish_reason is FinishReason::stop.
    StopReason stop_reason;
    // The token of StopReason::eos or StopReason::token, else 0.
    uint32_t stop_token;
    // The string of StopReason::string: UTF-8, not NUL-terminated. Else empty.
    std::string_view stop_string;
    // Number of tokens of the sequence that are computed, or that the prefix cache had. Only in
    // outputs of Sampling::prefill_progress, otherwise 0.
    uint64_t computed_tokens;
    // Set in the last output of a sequence. Zero in all others.
    Timing timing;

    explicit Output(const pllm_output &record) noexcept : Output(0, detail::known(record)) {}

    [[nodiscard]] bool is_last() const noexcept { return finish_reason != FinishReason::none; }

    // Returns the most probable tokens at the position of tokens[i], or of prompt_logprobs[i], most
    // probable first.
    [[nodiscard]] Span<const Logprob> top_logprobs_of(size_t i) const noexcept { return share(top_logprobs, i, tokens.size()); }
    [[nodiscard]] Span<const Logprob> prompt_top_logprobs_of(size_t i) const noexcept {
        return share(prompt_top_logprobs, i, prompt_logprobs.size());
    }

private:
    // Returns part i of `shares` parts of equal size.
    static Span<const Logprob> share(Span<const Logprob> all, size_t i, size_t shares) noexcept {
        assert(i < shares);
        const size_t size = all.size() / shares;
        return {all.data() + i * size, size};
    }

    Output(int, const pllm_output &c) noexcept
        : request(c.request),
          sequence(c.sequence),
          user_data(c.user_data),
          tokens(detail::view(c.tokens, c.tokens_len)),
          logprobs(detail::view(c.logprobs, c.logprobs ? c.tokens_len : 0)),
          text(detail::view(c.text, c.text_len)),
          error_message(detail::view(c.error, c.error_len)),
          prompt_tokens(c.prompt_tokens),
          generated_tokens(c.generated_tokens),
          index(c.index),
          finish_reason(FinishReason(c.finish_reason)),
          error_code(Code(c.error_code)),
          score(c.score),
          top_logprobs(detail::view(c.top_logprobs, c.top_logprobs_len)),
          prompt_logprobs(detail::view(c.prompt_logprobs, c.prompt_logprobs_len)),
          prompt_top_logprobs(detail::view(c.prompt_top_logprobs, c.prompt_top_logprobs_len)),
          sequence_state(detail::view(c.sequence_state, c.sequence_state_len)),
          preemptions(c.preemptions),
          cached_tokens(c.cached_tokens),
          stop_reason(StopReason(c.stop_reason)),
          stop_token(c.stop_token),
          stop_string(detail::view(c.stop_string, c.stop_string_len)),
          computed_tokens(c.computed_tokens),
          timing(detail::to_timing(c)) {}
};

// A batch of outputs in the order in which they were generated. It owns the memory of its Output
// views and stays valid after the queue and the engine are freed.
class Outputs {
public:
    class Iterator {
    public:
        using iterator_category = std::input_iterator_tag;
        using value_type = Output;
        using difference_type = std::ptrdiff_t;
        using pointer = void;
        using reference = Output;

        Iterator() = default;
        [[nodiscard]] Output operator*() const noexcept { return Output(*pllm_outputs_get(batch_, i_)); }
        Iterator &operator++() noexcept { return ++i_, *this; }
        Iterator operator++(int) noexcept { return {batch_, i_++}; }
        [[nodiscard]] friend bool operator==(Iterator a, Iterator b) noexcept { return a.i_ == b.i_; }
        [[nodiscard]] friend bool operator!=(Iterator a, Iterator b) noexcept { return a.i_ != b.i_; }

    private:
        friend Outputs;
        Iterator(const pllm_outputs *batch, uint64_t i) noexcept : batch_(batch), i_(i) {}

        const pllm_outputs *batch_ = nullptr;
        uint64_t i_ = 0;
    };

    Outputs() = default;  // empty

    [[nodiscard]] size_t size() const noexcept { return static_cast<size_t>(pllm_outputs_len(batch_.get())); }
    [[nodiscard]] bool empty() const noexcept { return size() == 0; }
    [[nodiscard]] Output operator[](size_t i) const noexcept {
        assert(i < size());
        return Output(*pllm_outputs_get(batch_.get(), i));
    }
    [[nodiscard]] Iterator begin() const noexcept { return {batch_.get(), 0}; }
    [[nodiscard]] Iterator end() const noexcept { return {batch_.get(), size()}; }

private:
    using Batch = detail::Handle<pllm_outputs, pllm_outputs_free>;
    friend class QueueView;
    explicit Outputs(Batch batch) noexcept : batch_(std::move(batch)) {}

    Batch batch_;
};

// A batch of KV events in their order. It owns the memory of its KvEvent views and stays valid after
// the engine is freed.
class KvEvents {
public:
    KvEvents() = default;  // empty

    [[nodiscard]] size_t size() const noexcept { return events_.size(); }
    [[nodiscard]] bool empty() const noexcept { return events_.empty(); }
    [[nodiscard]] const KvEvent &operator[](size_t i) const noexcept { return events_[i]; }
    [[nodiscard]] auto begin() const noexcept { return events_.begin(); }
    [[nodiscard]] auto end() const noexcept { return events_.end(); }

private:
    using Batch = detail::Handle<pllm_kv_events, pllm_kv_events_free>;
    friend class Engine;
    explicit KvEvents(Batch batch) : batch_(std::move(batch)) {
        const uint64_t len = pllm_kv_events_len(batch_.get());
        events_.reserve(static_cast<size_t>(len));
        for (uint64_t i = 0; i < len; i++) events_.push_back(detail::to_kv_event(detail::known(*pllm_kv_events_get(batch_.get(), i))));
    }

    Batch batch_;
    std::vector<KvEvent> events_;
};

// Everything that one sequence generated.
struct Completion {
    // The whole text.
    std::string text;
    // All tokens.
    std::vector<uint32_t> tokens;
    // Log probability of each token. Empty if the request did not ask for them. NaN for tokens that
    // have none: those of an echoed prompt before prompt_logprobs_start, its first one, and tokens
    // that the host appended.
    std::vector<float> logprobs;
    // Reason of the end.
    FinishReason finish_reason = {};
    // Tokens of the prompt.
    uint64_t prompt_tokens = 0;
    // Tokens generated.
    uint64_t generated_tokens = 0;
    // Id of the sequence: the argument of Engine::sequence if the sequence is kept.
    uint64_t sequence = 0;
    // Sum of the log probabilities of all generated tokens, if the request enables log
    // probabilities or for the best of several samples. For a beam: its score after the length
    // penalty. Else 0.
    double score = 0;
    // The most probable tokens at the position of each token, most probable first, the same number
    // for each. Empty if the request did not ask for them.
    std::vector<Logprob> top_logprobs;
    // Log probabilities of the prompt tokens except the first, if the request asked for them.
    std::vector<float> prompt_logprobs;
    // The most probable tokens at the position of each prompt token, as in top_logprobs.
    std::vector<Logprob> prompt_top_logprobs;
    // The first error of the sequence, if any.
    Status status;
    Timing timing = {};
    // Number of times it was preempted.
    uint64_t preemptions = 0;
    // Number of its first tokens that were found in the prefix cache.
    uint64_t cached_tokens = 0;
    // What ended the sequence. StopReason::none unless finish_reason is FinishReason::stop.
    StopReason stop_reason = {};
    // The token of StopReason::eos or StopReason::token, else 0.
    uint32_t stop_token = 0;
    // The string of StopReason::string, else empty.
    std::string stop_string;

    // Adds the next output.
    void add(const Output &output, OutputKind kind) {
        // An exported state and the progress of the prompt are not part of the text.
        if (!output.sequence_state.empty() || output.computed_tokens > 0) return;
        if (kind != OutputKind::delta) {             // this output has everything so far
            text.clear();
            tokens.clear();
            logprobs.clear();
            top_logprobs.clear();
            prompt_logprobs.clear();
            prompt_top_logprobs.clear();
        }
        text += output.text;
        append(tokens, output.tokens);
        append(logprobs, output.logprobs);
        finish_reason = output.finish_reason;
        prompt_tokens = output.prompt_tokens;
        generated_tokens = output.generated_tokens;
        sequence = output.sequence;
        score = output.score;
        append(top_logprobs, output.top_logprobs);
        append(prompt_logprobs, output.prompt_logprobs);
        append(prompt_top_logprobs, output.prompt_top_logprobs);
        timing = output.timing;
        preemptions = output.preemptions;
        cached_tokens = output.cached_tokens;
        stop_reason = output.stop_reason;
        stop_token = output.stop_token;
        stop_string = output.stop_string;
        if (output.error_code != Code{} && status) status = Error{output.error_code, std::string(output.error_message)};
    }

private:
    template <class T>
    static void append(std::vector<T> &to, Span<const T> more) {
        to.insert(to.end(), more.begin(), more.end());
    }
};

// ---- queues -------------------------------------------------------------------------------------

// A timeout without limit.
inline constexpr std::chrono::milliseconds forever{-1};

// A queue that a Queue or an Engine owns. Valid as long as its owner.
class QueueView {
public:
    // Takes all outputs from the queue. If it is empty, waits up to `timeout` for the first output.
    // If the time runs out, the batch is empty. Once the engine has failed or is freed, and all
    // outputs have been taken, the call returns that error.
    Result<Outputs> poll(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) const {
        // The library waits without limit for every negative timeout; here only `forever` does.
        const int64_t milliseconds = timeout == forever ? -1 : std::max<int64_t>(timeout.count(), 0);
        auto batch = detail::create<pllm_outputs, pllm_outputs_free>(
            [&](pllm_outputs **out) { return pllm_queue_poll(queue_, milliseconds, out); });
        if (!batch) return batch.error();
        return Outputs(std::move(*batch));
    }

    // Returns an eventfd that is readable while the queue is not empty. The queue owns it: do not
    // close it. Give a dup() of it to an owner that closes it.
    Result<int> event_fd() const {
        int32_t fd = -1;
        if (Status got = detail::status(pllm_queue_get_event_fd(queue_, &fd)); !got) return got.error();
        return fd;
    }

    [[nodiscard]] const pllm_queue *native() const noexcept { return queue_; }

    // Returns the handle. A queue that has been moved from is an error, because NULL selects
    // another queue.
    Result<const pllm_queue *> named() const {
        if (!queue_) return Error{Code::invalid_argument, "the queue has been moved from; pass another queue"};
        return queue_;
    }

protected:
    friend class Engine;
    explicit QueueView(const pllm_queue *queue) noexcept : queue_(queue) {}

    const pllm_queue *queue_;
};

// A queue for some of the engine's requests. Destroying it aborts the requests that write to it.
class Queue : public QueueView {
public:
    Queue(Queue &&other) noexcept : QueueView(std::exchange(other.queue_, nullptr)), owned_(std::move(other.owned_)) {}
    Queue &operator=(Queue &&other) noexcept {
        queue_ = std::exchange(other.queue_, nullptr);
        owned_ = std::move(other.owned_);
        return *this;
    }

private:
    using Owned = detail::Handle<pllm_queue, pllm_queue_free>;
    friend class Engine;
    friend class Sequence;
    explicit Queue(Owned owned) noexcept : QueueView(owned.get()), owned_(std::move(owned)) {}

    static Result<Queue> create(const pllm_engine *engine, uint64_t capacity) {
        auto queue =
            detail::create<pllm_queue, pllm_queue_free>([&](pllm_queue **out) { return pllm_queue_create(engine, capacity, out); });
        if (!queue) return queue.error();
        return Queue(std::move(*queue));
    }

    Owned owned_;
};

// A request and its outputs, in order:
//
//     auto stream = engine.stream({"Once upon a time"}).value();
//     for (pagedllm::Output output : stream) std::cout << output.text << std::flush;
//     stream.status().value();
//
// The stream ends when all sequences of the request have ended. Output::index distinguishes them.
// Until then, forks of these sequences without a queue of their own write to this stream as well.
// Destroying the stream before its end aborts the request at the next step. Reading blocks until a
// step of another thread makes outputs: the engine's own thread or a thread of the host. Moving a
// stream invalidates its iterators.
class Stream {
public:
    class Iterator {
    public:
        using iterator_category = std::input_iterator_tag;
        using value_type = Output;
        using difference_type = std::ptrdiff_t;
        using pointer = const Output *;
        using reference = const Output &;

        Iterator() = default;  // the end
        [[nodiscard]] const Output &operator*() const noexcept { return *output_; }
        [[nodiscard]] const Output *operator->() const noexcept { return &*output_; }
        Iterator &operator++() { return output_ = stream_->next(), *this; }
        void operator++(int) { ++*this; }
        [[nodiscard]] friend bool operator==(const Iterator &a, const Iterator &b) noexcept { return a.at_end() == b.at_end(); }
        [[nodiscard]] friend bool operator!=(const Iterator &a, const Iterator &b) noexcept { return !(a == b); }

    private:
        friend Stream;
        explicit Iterator(Stream *stream) : stream_(stream), output_(stream->next()) {}
        [[nodiscard]] bool at_end() const noexcept { return !output_; }

        Stream *stream_ = nullptr;
        std::optional<Output> output_;
    };

    // Waits for the next output and returns it. It is valid until the next call. Returns nullopt at
    // the end or after an error; see status().
    [[nodiscard]] std::optional<Output> next() {
        while (left_ > 0) {
            if (read_ < batch_.size()) return read(batch_[read_++]);
            Result<Outputs> batch = queue_.poll(forever);
            if (!batch) return fail(batch.error());
            batch_ = std::move(*batch);
            read_ = 0;
        }
        return std::nullopt;
    }

    // Continues with the next output.
    [[nodiscard]] Iterator begin() { return Iterator(this); }
    [[nodiscard]] Iterator end() const noexcept { return {}; }

    // Returns the first error of the request or of the queue, or success. An aborted request is not
    // an error.
    [[nodiscard]] const Status &status() const noexcept { return status_; }

    // Returns the id of the request, for Engine::abort.
    [[nodiscard]] uint64_t request() const noexcept { return request_; }

    // Reads the remaining outputs of a request for one result.
    Result<Completion> collect() {
        if (Status one = only_one(results_); !one) return one.error();
        Result<std::vector<Completion>> all = collect_all();
        if (!status_) return status_.error();
        return std::move(all->front());
    }

    // Reads the remaining outputs of each sequence of the request, in the order of their indices.
    // Each result has a status of its own.
    Result<std::vector<Completion>> collect_all() {
        std::vector<Completion> all(results_);
        for (const Output &output : *this) {
            // Wraps around for an index before the first.
            const size_t which = output.index - first_;
            if (output.request == request_ && which < all.size()) all[which].add(output, kind_);
        }
        if (failed_) return status_.error();
        return all;
    }

private:
    friend class Engine;
    friend class Sequence;
    // A call for one result must not drop the others silently.
    static Status only_one(uint32_t n) {
        if (n <= 1) return {};
        return Error{Code::invalid_argument, "n is " + std::to_string(n) + "; use generate_all or collect_all for several results"};
    }

    Stream(Queue queue, uint64_t request, uint32_t first, uint32_t results, OutputKind kind) noexcept
        : queue_(std::move(queue)), request_(request), first_(first), results_(results), left_(results), kind_(kind) {}

    std::optional<Output> read(const Output &output) {
        if (output.request == request_) {
            if (output.is_last()) left_--;
            if (output.error_code != Code{} && status_) status_ = Error{output.error_code, std::string(output.error_message)};
        }
        return output;
    }

    std::nullopt_t fail(const Error &error) {
        left_ = 0;
        failed_ = true;
        if (status_) status_ = error;
        return std::nullopt;
    }

    Queue queue_;
    uint64_t request_;
    uint32_t first_;    // index of the first result
    uint32_t results_;  // number of results
    uint32_t left_;     // number of results that have not ended
    OutputKind kind_;
    Outputs batch_;
    size_t read_ = 0;  // number of outputs of the batch that have been read
    bool failed_ = false;
    Status status_;
};

// ---- sequences ----------------------------------------------------------------------------------

namespace detail {

// A reference to an engine that its sequences and pins share. They can outlive the engine.
class EngineRef {
public:
    EngineRef() = default;  // refers to no engine
    explicit EngineRef(pllm_engine *engine) : engine_(std::make_shared<std::atomic<pllm_engine *>>(engine)) {}

    // After a move, the call receives NULL and the library returns an error.
    template <class Call>
    Status use(Call call) const {
        pllm_engine *engine = engine_ ? engine_->load() : nullptr;
        if (engine_ && !engine) return Error{Code::closed, "the engine has been freed"};
        return status(call(engine));
    }

    [[nodiscard]] pllm_engine *native() const noexcept { return engine_ ? engine_->load() : nullptr; }

    void detach() const noexcept { engine_->store(nullptr); }

private:
    std::shared_ptr<std::atomic<pllm_engine *>> engine_;
};

// Marks the engine as freed for its sequences and pins, then frees it.
struct FreeEngine {
    EngineRef engine_ref;
    void operator()(pllm_engine *engine) const noexcept {
        engine_ref.detach();
        pllm_engine_free(engine);
    }
};

// An owned object of an engine that has an id: a sequence or a pin.
template <auto free>
class Owned {
public:
    Owned(EngineRef engine, uint64_t id) noexcept : engine_(std::move(engine)), id_(id) {}
    Owned(Owned &&other) noexcept : engine_(std::move(other.engine_)), id_(std::exchange(other.id_, 0)) {}
    Owned &operator=(Owned &&other) noexcept {
        Owned moved(std::move(other));
        std::swap(engine_, moved.engine_);
        std::swap(id_, moved.id_);
        return *this;
    }
    ~Owned() {
        if (pllm_engine *engine = engine_.native()) Handle<pllm_error, pllm_error_free>(free(engine, id_));
    }

    [[nodiscard]] const EngineRef &engine() const noexcept { return engine_; }
    [[nodiscard]] uint64_t id() const noexcept { return id_; }

    uint64_t release() noexcept {
        engine_ = {};
        return std::exchange(id_, 0);
    }

    Status free_now() {
        const Status freed = engine_.use([&](pllm_engine *engine) { return free(engine, id_); });
        release();
        return freed;
    }

private:
    EngineRef engine_;
    uint64_t id_;
};

// The C struct of `from`, which must outlive it.
struct CFork {
    explicit CFork(const Fork &from) {
        if (from.at) native.at = *from.at;
        if (from.seed) native.seed = *from.seed;
        if (from.user_data) native.user_data = *from.user_data;
        set_handle(native.queue, from.queue, status);
        native.flags = flag(from.seed.has_value(), PLLM_FORK_SEED) |
            flag(from.idle, PLLM_FORK_IDLE) |
            flag(from.user_data.has_value(), PLLM_FORK_USER_DATA);
    }
    CFork(const CFork &) = delete;
    CFork &operator=(const CFork &) = delete;

    pllm_fork native = fork_defaults();
    Status status;  // the first error
};

}  // namespace detail

// An owned sequence: its tokens and their KV blocks. Destroying it frees the sequence, and aborts
// it if it is running. If a sequence ended without being kept, there is nothing to free. Only one
// Sequence may own an id.
//
//     pagedllm::Request request{prompt};
//     request.keep = true;
//     pagedllm::Sequence story = engine.sequence(engine.generate(request).value().sequence);
//     story.append(engine.tokenize(" And then", false).value()).value();
//     std::cout << story.generate().value().text << "\n";
class Sequence {
public:
    [[nodiscard]] uint64_t id() const noexcept { return owned_.id(); }

    // Creates a sequence with the first tokens of this one. Children of a running sequence run;
    // children of an idle one are idle. If the queue of this sequence is freed, as the queue of
    // generate is, set Fork::queue.
    Result<Sequence> fork(const Fork &how = {}) const {
        auto children = fork_many(1, how);
        if (!children) return children.error();
        return std::move(children->front());
    }

    // Creates n sequences at once.
    Result<std::vector<Sequence>> fork_many(uint32_t n, const Fork &how = {}) const {
        detail::CFork c(how);
        if (!c.status) return c.status.error();
        c.native.n = n;
        // A vector would initialize all n elements. The library rejects large n before it writes an
        // id.
        const std::unique_ptr<uint64_t[]> ids(new (std::nothrow) uint64_t[n]);
        if (!ids) return Error{Code::out_of_memory, "no memory for the ids of " + std::to_string(n) + " children; reduce n"};
        const Status forked =
            use([&](pllm_engine *engine) { return pllm_sequence_fork(engine, id(), &c.native, ids.get()); });
        if (!forked) return forked.error();
        std::vector<Sequence> children;
        children.reserve(n);
        for (uint32_t i = 0; i < n; i++) children.push_back(Sequence(owned_.engine(), ids[i]));
        return children;
    }

    // Appends tokens. A running sequence continues after them from the next step on. An idle
    // sequence computes them when it is resumed.
    Status append(Span<const uint32_t> tokens) {
        return use([&](pllm_engine *engine) { return pllm_sequence_append(engine, id(), tokens.data(), tokens.size()); });
    }

    // Truncates the sequence to its first `len` tokens. Its state is as it was then.
    Status rewind(uint64_t len) {
        return use([&](pllm_engine *engine) { return pllm_sequence_rewind(engine, id(), len); });
    }

    // Continues an idle sequence; its queue stays the same. A sequence is idle from its last output
    // on.
    Status resume(const Resume &how = {}) { return resume(how, nullptr); }

    // As resume, with outputs to `queue`, a queue of the same engine.
    Status resume(const Resume &how, const QueueView &queue) {
        const auto named = queue.named();
        if (!named) return named.error();
        return resume(how, *named);
    }

    // Resumes the sequence with a queue of its own and returns its outputs as a stream. Destroying
    // the stream before its end makes the sequence idle again, or frees it if it is not kept.
    Result<Stream> stream(const Resume &how = {}, uint64_t capacity = PLLM_QUEUE_CAPACITY) {
        Result<SequenceInfo> now = info();
        if (!now) return now.error();
        Result<Queue> queue = Queue::create(owned_.engine().native(), capacity);
        if (!queue) return queue.error();
        if (Status resumed = resume(how, *queue); !resumed) return resumed.error();
        return Stream(std::move(*queue), now->request, now->index, 1, how.sampling.output_kind);
    }

    // Resumes the sequence and waits until it ends.
    Result<Completion> generate(const Resume &how = {}) {
        Result<Stream> resumed = stream(how);
        if (!resumed) return resumed.error();
        return resumed->collect();
    }

    // Exports the state of the sequence after the engine's next step and waits for it.
    // Engine::import_sequence creates a sequence from it, in this or another process. This sequence
    // is not affected. The state contains the conversation in plain text. It does not contain the
    // logits hook.
    Result<std::vector<uint8_t>> export_state() const {
        if (Result<SequenceInfo> now = info(); !now) return now.error();
        Result<Queue> queue = Queue::create(owned_.engine().native(), 1);
        if (!queue) return queue.error();
        if (Status exported = export_to(*queue); !exported) return exported.error();
        return state_of(queue->poll(forever));
    }

    // As export_state, without waiting. The state (Output::sequence_state) or an error arrives as an
    // output of the sequence in `queue`, a queue of the same engine.
    Status export_to(const QueueView &queue) const {
        const auto named = queue.named();
        if (!named) return named.error();
        return use([&](pllm_engine *engine) { return pllm_sequence_export(engine, id(), *named); });
    }

    // Reads the state of the sequence as of the last step and the calls since.
    Result<SequenceInfo> info() const {
        SequenceInfo info{};
        info.struct_size = sizeof info;
        const Status read = use([&](pllm_engine *engine) { return pllm_sequence_get_info(engine, id(), &info); });
        if (!read) return read.error();
        return info;
    }

    // Frees the sequence as the destructor does, and returns the error of that call. Afterwards
    // this object is in the moved-from state.
    Status free() { return owned_.free_now(); }

    // Gives up ownership and returns the id; the sequence is not freed. Afterwards this object is
    // in the moved-from state.
    uint64_t release() noexcept { return owned_.release(); }

private:
    friend class Engine;
    Sequence(detail::EngineRef engine, uint64_t id) noexcept : owned_(std::move(engine), id) {}

    template <class Call>
    Status use(Call call) const {
        return owned_.engine().use(call);
    }

    Status resume(const Resume &how, const pllm_queue *queue) {
        detail::CResume c(how);
        return use([&](pllm_engine *engine) { return pllm_sequence_resume(engine, id(), c.to(queue)); });
    }

    // Returns the state or the error of the only output.
    static Result<std::vector<uint8_t>> state_of(const Result<Outputs> &outputs) {
        if (!outputs) return outputs.error();
        const Output output = (*outputs)[0];
        if (output.error_code != Code{}) return Error{output.error_code, std::string(output.error_message)};
        return std::vector<uint8_t>(output.sequence_state.begin(), output.sequence_state.end());
    }

    detail::Owned<pllm_sequence_free> owned_;
};

// A prompt that is kept in the prefix cache until its time to live is over or this object is
// destroyed. If a sequence cannot continue otherwise, the pin is dropped earlier.
class Pin {
public:
    [[nodiscard]] uint64_t id() const noexcept { return owned_.id(); }

    // Unpins the prompt as the destructor does, and returns the error of that call. Afterwards this
    // object is in the moved-from state.
    Status unpin() { return owned_.free_now(); }

    // Gives up ownership and returns the id; the prompt stays pinned until its time to live is
    // over. Afterwards this object is in the moved-from state.
    uint64_t release() noexcept { return owned_.release(); }

private:
    friend class Engine;
    Pin(detail::EngineRef engine, uint64_t id) noexcept : owned_(std::move(engine), id) {}

    detail::Owned<pllm_prefix_unpin> owned_;
};

// ---- engines ------------------------------------------------------------------------------------

// An engine: one model, its KV pool and its requests. Destroying it ends every request.
class Engine {
public:
    // Computes what create would allocate, without allocating it.
    static Result<Plan> plan(const Options &options) {
        const auto c = detail::c_options(options);
        if (!c) return c.error();
        return detail::filled<Plan>([&](Plan *out) { return pllm_engine_plan(&*c, out); });
    }

    // Loads a model and creates an engine for it.
    static Result<Engine> create(const Options &options) {
        auto engine = detail::load(options, [&options](const pllm_engine_options *c) {
            auto made = detail::create<pllm_engine, pllm_engine_free>([&](pllm_engine **out) { return pllm_engine_create(c, out); });
            if (made && options.kv_store) options.kv_store->release();
            return made;
        });
        if (!engine) return engine.error();
        Engine created(std::move(*engine));
        if (Status started = options.host_steps ? Status() : created.start(); !started) return started.error();
        return created;
    }

    // Takes ownership of an engine that was created with the C API. The engine is not started.
    [[nodiscard]] static Engine adopt(pllm_engine *engine) { return Engine(Made(engine)); }

    // Returns success if the engine works, and the error that has stopped it if it has failed. Then
    // all its requests have ended, and only a new engine can serve. Any thread may call it, also
    // during a step. The call does not wait for a step.
    Status health() const { return detail::status(pllm_engine_health(native())); }

    Result<ModelInfo> model_info() const {
        auto c = detail::filled<pllm_model_info>([&](pllm_model_info *out) { return pllm_engine_get_model_info(native(), out); });
        if (!c) return c.error();
        return detail::to_model_info(*c);
    }

    Result<Stats> stats() const {
        return detail::filled<Stats>([&](Stats *out) { return pllm_engine_get_stats(native(), out); });
    }

    // Returns gauges, counters and histograms in the OpenMetrics text format, as
    // pllm_engine_get_metrics does.
    Result<std::string> metrics() const {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>(
            [&](pllm_bytes **out) { return pllm_engine_get_metrics(native(), out); }));
    }

    // Describes the engine after its current step as a JSON object: which sequences have which
    // blocks, and what the last steps computed. pllm_engine_snapshot describes its members.
    Result<std::string> snapshot(uint64_t max_blocks = UINT64_MAX, uint64_t max_sequences = UINT64_MAX) const {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>(
            [&](pllm_bytes **out) { return pllm_engine_snapshot(native(), max_blocks, max_sequences, out); }));
    }

    // Returns the budget of the KV pool: Options::budget or the engine's own. Valid as long as the
    // engine.
    [[nodiscard]] BudgetView budget() const noexcept { return BudgetView(pllm_engine_budget(native())); }

    // Predicts admission and time to first token for a request with outputs to `queue`, without
    // adding it. Any thread may call it, also during a step.
    Result<Admission> predict_admission(const Request &request, const QueueView &queue) const {
        const auto named = queue.named();
        if (!named) return named.error();
        return predict_admission(request, *named);
    }

    // As above, with outputs to the engine's own queue.
    Result<Admission> predict_admission(const Request &request) const { return predict_admission(request, nullptr); }

    // Takes the events of the prefix cache since the last call. If there are none, waits for the first
    // one until the time has passed. Needs Options::kv_events_capacity. If more events were not read,
    // the batch is that of snapshot_kv_events instead. Any thread may call it.
    Result<KvEvents> poll_kv_events(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) const {
        constexpr auto max = std::numeric_limits<uint32_t>::max();
        const auto time = static_cast<uint32_t>(std::clamp<int64_t>(timeout.count(), 0, max));
        return events([&](pllm_kv_events **out) { return pllm_engine_poll_kv_events(native(), time, out); });
    }

    // Lists the blocks of the prefix cache as events: KvEventKind::cleared, and KvEventKind::stored of
    // each block. The events of poll_kv_events are not affected. Any thread may call it.
    Result<KvEvents> snapshot_kv_events() const {
        return events([&](pllm_kv_events **out) { return pllm_engine_snapshot_kv_events(native(), out); });
    }

    // Computes the hashes of the full blocks of a prompt, as events have them. Only the prompt and the
    // salt of the request are used. Any thread may call it.
    Result<std::vector<std::string>> hash_prompt(const Request &request, uint32_t group = 0) const {
        detail::CRequest c(request);
        if (!c.status) return c.status.error();
        const auto bytes = detail::copied(detail::create<pllm_bytes, pllm_bytes_free>(
            [&](pllm_bytes **out) { return pllm_engine_hash_prompt(native(), c.to(nullptr), group, out); }));
        if (!bytes) return bytes.error();
        std::vector<std::string> hashes;
        for (size_t at = 0; at < bytes->size(); at += 32) hashes.push_back(bytes->substr(at, 32));
        return hashes;
    }

    // Adds a request and returns its id. `queue`, a queue of this engine, receives its outputs.
    Result<uint64_t> add(const Request &request, const QueueView &queue) {
        const auto named = queue.named();
        if (!named) return named.error();
        return add(request, *named);
    }

    // Adds a request with outputs to the engine's own queue.
    Result<uint64_t> add(const Request &request) { return add(request, nullptr); }

    // Aborts a request at the next step. The last output of each sequence has FinishReason::abort.
    // If the id is unknown or the request has ended, the call returns Code::not_found.
    Status abort(uint64_t request) { return detail::status(pllm_engine_abort(native(), request)); }

    // Runs one iteration. If another thread is stepping this engine, the call returns Code::busy.
    Result<Step> step() {
        return detail::filled<Step>([&](Step *out) { return pllm_engine_step(native(), out); });
    }

    // Starts the engine's own thread, which steps it. If it is already running, the call returns
    // Code::busy.
    Status start() { return detail::status(pllm_engine_start(native())); }

    // Stops the engine's own thread after the current step and joins it. Requests wait until the
    // engine is stepped again.
    Status stop() { return detail::status(pllm_engine_stop(native())); }

    // Returns the engine's own queue. Valid as long as the engine.
    [[nodiscard]] QueueView queue() const noexcept { return QueueView(pllm_engine_queue(native())); }

    // Creates a queue for some of the engine's requests. While it holds `capacity` outputs, the
    // requests that write to it pause. Other requests continue, and no output is dropped.
    Result<Queue> create_queue(uint64_t capacity) { return Queue::create(native(), capacity); }

    // Adds a request with a queue of its own and returns its outputs as a stream. The request
    // pauses while `capacity` outputs are unread.
    Result<Stream> stream(const Request &request, uint64_t capacity = PLLM_QUEUE_CAPACITY) {
        Result<Queue> queue = create_queue(capacity);
        if (!queue) return queue.error();
        Result<uint64_t> id = add(request, *queue);
        if (!id) return id.error();
        return Stream(std::move(*queue), *id, 0, request.n, request.sampling.output_kind);
    }

    // Runs a request for one result and waits for its end. Any number of threads may call it at
    // once.
    Result<Completion> generate(const Request &request) {
        Result<Stream> requested = stream_of_one(request);
        if (!requested) return requested.error();
        return requested->collect();
    }

    // As generate, for any n. Result i has index i and a status of its own.
    Result<std::vector<Completion>> generate_all(const Request &request) {
        Result<Stream> requested = stream(request);
        if (!requested) return requested.error();
        return requested->collect_all();
    }

    // As generate, on a thread of its own (std::async) that sleeps while the request runs. For many
    // requests at once, use queues and an event loop. The request is added before the call returns,
    // so its views need to be valid only during the call. Destroying the future waits for the end
    // of the request. To abort a request earlier, use stream.
    [[nodiscard]] std::future<Result<Completion>> generate_async(const Request &request) {
        return std::async(std::launch::async, [requested = stream_of_one(request)]() mutable -> Result<Completion> {
            if (!requested) return requested.error();
            return requested->collect();
        });
    }

    // As generate_all, on a thread of its own. See generate_async.
    [[nodiscard]] std::future<Result<std::vector<Completion>>> generate_all_async(const Request &request) {
        return std::async(std::launch::async, [requested = stream(request)]() mutable -> Result<std::vector<Completion>> {
            if (!requested) return requested.error();
            return requested->collect_all();
        });
    }

    // Takes ownership of a sequence: of a kept one (Output::sequence, Completion::sequence) or of a
    // released one.
    [[nodiscard]] Sequence sequence(uint64_t id) const noexcept { return Sequence(ref(), id); }

    // Creates an idle sequence from an exported state, in this or another process. Resumed with
    // Resume::continue_generation, it continues with the same bits if SequenceInfo::inexact is 0.
    // `queue`, a queue of this engine, receives its outputs.
    Result<Sequence> import_sequence(Span<const uint8_t> state, const QueueView &queue) {
        const auto named = queue.named();
        if (!named) return named.error();
        return import_sequence(state, *named);
    }

    // As above, with outputs to the engine's own queue.
    Result<Sequence> import_sequence(Span<const uint8_t> state) { return import_sequence(state, nullptr); }

    // Computes a prompt, from the next step on, and keeps its blocks in the prefix cache. Requests
    // that begin with the same tokens reuse them.
    Result<Pin> pin(const Prefix &prefix) {
        uint64_t id = 0;
        const pllm_pin c = detail::c_pin(prefix);
        if (Status pinned = detail::status(pllm_prefix_pin(native(), &c, &id)); !pinned) return pinned.error();
        return Pin(ref(), id);
    }

    Result<std::vector<uint32_t>> tokenize(std::string_view text, bool add_special = true) const {
        auto tokens = detail::create<pllm_tokens, pllm_tokens_free>([&](pllm_tokens **out) {
            return pllm_engine_tokenize(native(), text.data(), text.size(), add_special ? PLLM_TEXT_ADD_SPECIAL : 0, out);
        });
        if (!tokens) return tokens.error();
        const auto ids = detail::view(pllm_tokens_data(tokens->get()), pllm_tokens_len(tokens->get()));
        return std::vector<uint32_t>(ids.begin(), ids.end());
    }

    Result<std::string> detokenize(Span<const uint32_t> tokens, bool skip_special = true) const {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>([&](pllm_bytes **out) {
            return pllm_engine_detokenize(native(), tokens.data(), tokens.size(), skip_special ? PLLM_TEXT_SKIP_SPECIAL : 0, out);
        }));
    }

    // Returns the bytes that a token contributes to a text. They can be a part of a character. A
    // special token has its name, and an id that only the model knows has no bytes. The first call
    // reads the whole vocabulary. If the id is not below ModelInfo::vocab_size, the call returns
    // Code::invalid_argument.
    Result<std::string> token_bytes(uint32_t token) const {
        const uint8_t *bytes = nullptr;
        uint64_t len = 0;
        Status got = detail::status(pllm_engine_get_token_bytes(native(), token, &bytes, &len));
        if (!got) return got.error();
        return std::string(bytes, bytes + len);
    }

    // Renders a chat (JSON as in pllm_engine_render_chat) with the model's chat template. Add a
    // request with the result and add_special = false.
    Result<std::string> render_chat(std::string_view messages_json) const {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>([&](pllm_bytes **out) {
            return pllm_engine_render_chat(native(), messages_json.data(), messages_json.size(), out);
        }));
    }

    // Returns the C handle, for functions that this header does not have.
    [[nodiscard]] pllm_engine *native() const noexcept { return engine_.get(); }

private:
    using Made = detail::Handle<pllm_engine, pllm_engine_free>;
    explicit Engine(Made engine) : engine_(nullptr, {detail::EngineRef(engine.get())}) { engine_.reset(engine.release()); }

    Result<Stream> stream_of_one(const Request &request) {
        if (Status one = Stream::only_one(request.n); !one) return one.error();
        return stream(request);
    }

    template <class Make>
    static Result<KvEvents> events(Make make) {
        auto batch = detail::create<pllm_kv_events, pllm_kv_events_free>(make);
        if (!batch) return batch.error();
        return KvEvents(std::move(*batch));
    }

    Result<uint64_t> add(const Request &request, const pllm_queue *queue) {
        uint64_t id = 0;
        detail::CRequest c(request);
        if (!c.status) return c.status.error();
        Status added = detail::status(pllm_engine_add_request(native(), c.to(queue), &id));
        if (!added) return added.error();
        return id;
    }

    Result<Admission> predict_admission(const Request &request, const pllm_queue *queue) const {
        detail::CRequest request_c(request);
        if (!request_c.status) return request_c.status.error();
        auto c = detail::filled<pllm_admission>(
            [&](pllm_admission *out) { return pllm_engine_predict_admission(native(), request_c.to(queue), out); });
        if (!c) return c.error();
        return detail::to_admission(*c);
    }

    Result<Sequence> import_sequence(Span<const uint8_t> state, const pllm_queue *queue) {
        uint64_t id = 0;
        Status imported = detail::status(pllm_sequence_import(native(), state.data(), state.size(), queue, &id));
        if (!imported) return imported.error();
        return Sequence(ref(), id);
    }

    [[nodiscard]] const detail::EngineRef &ref() const noexcept { return engine_.get_deleter().engine_ref; }

    std::unique_ptr<pllm_engine, detail::FreeEngine> engine_;
};

// Runs one of several workers that compute a model with the engine of rank 0, which is in another
// process or thread. The options are those of the engine, with a communicator of another rank.
// Loads this worker's part of the model, and returns success when the engine is destroyed.
// Options::progress can cancel the loading. An error ends the engine, too. See pllm_worker_run.
inline Status run_worker(const Options &options) {
    return detail::load(options, [](const pllm_engine_options *c) { return detail::status(pllm_worker_run(c)); });
}

// ---- responses -----------------------------------------------------------------------------------

// Separates reasoning, content and tool calls of one response while it is generated.
//
//     ResponseParser parser = ResponseParser::create(engine, R"({"tools": [...]})").value();
//     std::string deltas = parser.feed(output.text).value();  // [{"content": "..."}]
class ResponseParser {
public:
    // `settings_json` is documented at pllm_response_parser_create. Feed the texts of a request with
    // skip_special = false. The parser does not need the engine later.
    static Result<ResponseParser> create(const Engine &engine, std::string_view settings_json = "{}") {
        return of(engine.native(), settings_json);
    }

    // Creates a parser without an engine. The settings must name a format.
    static Result<ResponseParser> create(std::string_view settings_json) { return of(nullptr, settings_json); }

    // Returns the deltas of the next piece as a JSON array, as a chat completion streams them.
    Result<std::string> feed(std::string_view text) {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>([&](pllm_bytes **out) {
            return pllm_response_parser_feed(parser_.get(), text.data() ? text.data() : "", text.size(), out);
        }));
    }

    // Ends the response and returns the last deltas.
    Result<std::string> finish() {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>(
            [&](pllm_bytes **out) { return pllm_response_parser_finish(parser_.get(), out); }));
    }

private:
    using Owned = detail::Handle<pllm_response_parser, pllm_response_parser_free>;
    explicit ResponseParser(Owned parser) noexcept : parser_(std::move(parser)) {}

    static Result<ResponseParser> of(const pllm_engine *engine, std::string_view settings_json) {
        auto parser = detail::create<pllm_response_parser, pllm_response_parser_free>([&](pllm_response_parser **out) {
            return pllm_response_parser_create(engine, settings_json.data(), settings_json.size(), out);
        });
        if (!parser) return parser.error();
        return ResponseParser(std::move(*parser));
    }

    Owned parser_;
};

}  // inline namespace
}  // namespace pagedllm

#endif  // PAGEDLLM_HPP
