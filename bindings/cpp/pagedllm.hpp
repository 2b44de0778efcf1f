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
 * Ownership. Engine, Budget, Queue, Outputs, Stream, Sequence and Pin are move-only and free what
 * they own. A moved-from object can be destroyed and assigned to. Its other calls return
 * Code::invalid_argument, and its ranges are empty.
 *
 * Views. A std::string_view or Span argument needs to be valid only during the call. A returned
 * view is valid as long as its source: an Output as long as its Outputs, a ModelInfo as long as its
 * Engine.
 *
 * Threads. Unless Options::host_steps is set, a thread of the engine steps it, and sleeps while
 * there is nothing to do. Any thread may call any function of an Engine, Budget, Queue or Sequence
 * at any time. Only one thread at a time may use a Stream or an Outputs. While a call on an object
 * is in progress, no thread may move, assign or destroy the object. A call on a Sequence or a Pin
 * is also a call on its engine. All of these objects can outlive their engine: requests in progress
 * end as aborted, and later calls return Code::closed.
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
    invalid_argument = PLLM_E_INVALID_ARGUMENT,
    not_found = PLLM_E_NOT_FOUND,
    io = PLLM_E_IO,
    model = PLLM_E_MODEL,
    unsupported = PLLM_E_UNSUPPORTED,
    capacity = PLLM_E_CAPACITY,
    busy = PLLM_E_BUSY,
    out_of_memory = PLLM_E_OUT_OF_MEMORY,
    internal = PLLM_E_INTERNAL,
    closed = PLLM_E_CLOSED,
    cancelled = PLLM_E_CANCELLED,
};

// An error: a code, and a message with the numbers and the remedy.
struct Error {
    Code code;
    std::string message;
};

#ifdef __cpp_exceptions
// The exception that value() throws.
class Exception : public std::runtime_error {
public:
    explicit Exception(const Error &error) : std::runtime_error(error.message), code_(error.code) {}
    [[nodiscard]] Code code() const noexcept { return code_; }

private:
    Code code_;
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
    return Error{Code(pllm_error_code(error)), pllm_error_message(error)};
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

inline const pllm_engine_options &options_defaults() { return defaults<pllm_engine_options, pllm_engine_options_init>(); }
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
inline pllm_output known(const pllm_output &record) noexcept {
    pllm_output c{};
    std::memcpy(&c, &record, std::min(static_cast<size_t>(record.struct_size), sizeof c));
    return c;
}

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

// As pllm_budget_info.
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

// ---- options and requests -----------------------------------------------------------------------

enum class Dtype : uint32_t {
    automatic = PLLM_DTYPE_AUTO,
    f32 = PLLM_DTYPE_F32,
    bf16 = PLLM_DTYPE_BF16,
    int8 = PLLM_DTYPE_INT8,
    f16 = PLLM_DTYPE_F16,
    fp8 = PLLM_DTYPE_FP8,
};

enum class Isa : uint32_t {
    automatic = PLLM_ISA_AUTO,  // the widest instruction path of the machine
    portable = PLLM_ISA_PORTABLE,
    avx2 = PLLM_ISA_AVX2,
    avx512 = PLLM_ISA_AVX512,
    // Activations that are multiplied by weights or KV in bf16 are rounded to bf16.
    avx512_bf16 = PLLM_ISA_AVX512_BF16,
    avx_vnni = PLLM_ISA_AVX_VNNI,
    avx512_vnni = PLLM_ISA_AVX512_VNNI,
};

// Format of the weights in memory.
enum class Weights : uint32_t {
    as_stored = PLLM_WEIGHTS_AS_STORED,
    f32 = PLLM_WEIGHTS_F32,
    f16 = PLLM_WEIGHTS_F16,
    bf16 = PLLM_WEIGHTS_BF16,
    int8 = PLLM_WEIGHTS_INT8,
    int4 = PLLM_WEIGHTS_INT4,
    int4_asymmetric = PLLM_WEIGHTS_INT4_ASYMMETRIC,
    fp8 = PLLM_WEIGHTS_FP8,
};

// Treatment of preempted requests.
enum class Preemption : uint32_t {
    recompute = PLLM_PREEMPTION_RECOMPUTE,
    swap = PLLM_PREEMPTION_SWAP,
    automatic = PLLM_PREEMPTION_AUTO,
};

// Order of the waiting requests.
enum class Order : uint32_t {
    fcfs = PLLM_ORDER_FCFS,
    priority = PLLM_ORDER_PRIORITY,
    shortest_predicted = PLLM_ORDER_SHORTEST_PREDICTED,
};

// Composition of a step.
enum class Batching : uint32_t {
    mixed = PLLM_BATCHING_MIXED,
    prefill_first = PLLM_BATCHING_PREFILL_FIRST,
    decode_first = PLLM_BATCHING_DECODE_FIRST,
    static_ = PLLM_BATCHING_STATIC,
};

// Number of blocks that a request needs to start.
enum class Allocation : uint32_t { on_demand = PLLM_ALLOCATION_ON_DEMAND, max_tokens = PLLM_ALLOCATION_MAX_TOKENS };

// Options of an engine. Each field is described in pllm_engine_options and has its default.
struct Options {
    std::string model_path;
    // "cpu", or "cuda:0" for the first CUDA device. Empty: the library's default.
    std::string device;
    uint64_t kv_bytes = detail::options_defaults().kv_bytes;
    uint64_t seed = detail::options_defaults().seed;
    uint32_t block_size = detail::options_defaults().block_size;
    Dtype kv_dtype = Dtype(detail::options_defaults().kv_dtype);
    uint32_t max_model_len = detail::options_defaults().max_model_len;
    uint32_t max_batch_tokens = detail::options_defaults().max_batch_tokens;
    uint32_t max_seqs = detail::options_defaults().max_seqs;
    uint32_t prefill_chunk = detail::options_defaults().prefill_chunk;
    uint32_t threads = detail::options_defaults().threads;
    Isa isa = Isa(detail::options_defaults().isa);
    uint64_t queue_capacity = detail::options_defaults().queue_capacity;
    bool skip_tokenizer = (detail::options_defaults().flags & PLLM_ENGINE_SKIP_TOKENIZER) != 0;
    bool no_prefix_cache = (detail::options_defaults().flags & PLLM_ENGINE_NO_PREFIX_CACHE) != 0;
    bool batch_invariant = (detail::options_defaults().flags & PLLM_ENGINE_BATCH_INVARIANT) != 0;
    // CUDA only: fraction of the device memory that is free after weights and working memory, for
    // the KV pool. Replaces kv_bytes. 0: kv_bytes is used.
    float memory_fraction = detail::options_defaults().memory_fraction;
    // If false, Engine::create starts the engine's own thread. If true, the host steps the engine.
    bool host_steps = false;

    // Reports the bytes of weights that have been read, out of total, on the thread that calls
    // Engine::create. The result false cancels the loading. An exception cancels it as well, and
    // Engine::create rethrows it.
    std::function<bool(uint64_t done, uint64_t total)> progress = nullptr;

    uint64_t max_waiting_requests = detail::options_defaults().max_waiting_requests;
    uint64_t max_waiting_tokens = detail::options_defaults().max_waiting_tokens;
    // Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to, and
    // of a text to tokenize. 0: 64 for each token of max_model_len, at least 1048576.
    uint64_t max_prompt_bytes = detail::options_defaults().max_prompt_bytes;
    const BudgetView *budget = nullptr;  // null: a budget of the engine's own
    uint64_t swap_bytes = detail::options_defaults().swap_bytes;
    std::string swap_path = {};  // empty: the host tier is in memory
    Preemption preemption = Preemption(detail::options_defaults().preemption);
    Order order = Order(detail::options_defaults().order);
    std::chrono::milliseconds ageing{detail::options_defaults().ageing_ms};
    Batching batching = Batching(detail::options_defaults().batching);
    uint32_t prefill_budget = detail::options_defaults().prefill_budget;
    Allocation allocation = Allocation(detail::options_defaults().allocation);
    std::string trace_path = {};    // empty: none
    std::string journal_path = {};  // empty: none
    // Label model_name of the metrics; empty: the name of the model directory.
    std::string model_name = {};
    Weights weight_format = Weights(detail::options_defaults().weight_format);
    uint32_t weight_group = detail::options_defaults().weight_group;
    // Directory for packed weights; empty: weights are packed each time.
    std::string packed_path = {};
    // CPUs to which threads are pinned, such as "0-3,8"; empty: threads are not pinned.
    std::string cpus = {};
};

// Content of each output: the new part, everything so far, or one output with everything at the
// end.
enum class OutputKind : uint32_t { delta = PLLM_OUTPUT_DELTA, cumulative = PLLM_OUTPUT_CUMULATIVE, final = PLLM_OUTPUT_FINAL };

enum class GrammarKind : uint32_t {
    none = PLLM_GRAMMAR_NONE,
    json_schema = PLLM_GRAMMAR_JSON_SCHEMA,
    json_object = PLLM_GRAMMAR_JSON_OBJECT,
    regex = PLLM_GRAMMAR_REGEX,
    choice = PLLM_GRAMMAR_CHOICE,
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

// The DRY penalty. Each field is described in pllm_dry and has its default.
struct Dry {
    float multiplier = detail::dry_defaults().multiplier;
    float base = detail::dry_defaults().base;
    uint32_t allowed_length = detail::dry_defaults().allowed_length;
    uint32_t penalty_last_n = detail::dry_defaults().penalty_last_n;
    // nullopt: the library's default.
    std::optional<std::vector<std::string>> sequence_breakers = {};
};

// A value that is added to the logit of a token: {token, bias}.
using LogitBias = pllm_logit_bias;

// How a request samples its tokens, what it reports and when it ends. Each field is described in
// pllm_sampling and has its default.
struct Sampling {
    float temperature = detail::sampling_defaults().temperature;
    float top_p = detail::sampling_defaults().top_p;
    float min_p = detail::sampling_defaults().min_p;
    uint32_t top_k = detail::sampling_defaults().top_k;
    uint32_t max_tokens = detail::sampling_defaults().max_tokens;
    uint32_t min_tokens = detail::sampling_defaults().min_tokens;
    std::optional<uint64_t> seed = std::nullopt;
    bool ignore_eos = (detail::sampling_defaults().flags & PLLM_SAMPLING_IGNORE_EOS) != 0;
    bool logprobs = (detail::sampling_defaults().flags & PLLM_SAMPLING_LOGPROBS) != 0;
    std::vector<std::string> stop = {};
    std::vector<uint32_t> stop_token_ids = {};
    bool prompt_logprobs = (detail::sampling_defaults().flags & PLLM_SAMPLING_PROMPT_LOGPROBS) != 0;
    bool echo = (detail::sampling_defaults().flags & PLLM_SAMPLING_ECHO) != 0;
    bool include_stop = (detail::sampling_defaults().flags & PLLM_SAMPLING_INCLUDE_STOP) != 0;
    uint32_t top_logprobs = detail::sampling_defaults().top_logprobs;  // requires logprobs
    // Requires prompt_logprobs.
    uint32_t prompt_top_logprobs = detail::sampling_defaults().prompt_top_logprobs;
    OutputKind output_kind = OutputKind(detail::sampling_defaults().output_kind);
    Grammar grammar = {};
    float typical_p = detail::sampling_defaults().typical_p;
    float top_n_sigma = detail::sampling_defaults().top_n_sigma;
    float xtc_probability = detail::sampling_defaults().xtc_probability;
    float xtc_threshold = detail::sampling_defaults().xtc_threshold;
    float mirostat_tau = detail::sampling_defaults().mirostat_tau;
    float mirostat_eta = detail::sampling_defaults().mirostat_eta;
    float presence_penalty = detail::sampling_defaults().presence_penalty;
    float frequency_penalty = detail::sampling_defaults().frequency_penalty;
    float repetition_penalty = detail::sampling_defaults().repetition_penalty;
    uint32_t no_repeat_ngram_size = detail::sampling_defaults().no_repeat_ngram_size;
    std::optional<Dry> dry = std::nullopt;
    std::vector<LogitBias> logit_bias = {};
    std::vector<std::string> bad_words = {};
    std::vector<std::vector<uint32_t>> bad_words_ids = {};
    std::vector<uint32_t> allowed_token_ids = {};  // empty: all
};

enum class EarlyStopping : uint32_t {
    no = PLLM_EARLY_STOPPING_NO,
    yes = PLLM_EARLY_STOPPING_YES,
    never = PLLM_EARLY_STOPPING_NEVER,
};

// Parameters of a beam search. Each field is described in pllm_beam and has its default.
struct Beam {
    uint32_t width = detail::beam_defaults().width;
    uint32_t groups = detail::beam_defaults().groups;
    float diversity_penalty = detail::beam_defaults().diversity_penalty;
    float length_penalty = detail::beam_defaults().length_penalty;
    EarlyStopping early_stopping = EarlyStopping(detail::beam_defaults().early_stopping);
};

// Edits the logits of the next token of a sequence, on the stepping thread. A lambda without
// captures converts to it. pllm_logits_hook lists the functions that it may call.
using LogitsHook = void (*)(void *hook_data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits,
                            uint64_t vocab_size) noexcept;

// A view of a prompt: text or token ids.
using Prompt = std::variant<std::string_view, Span<const uint32_t>>;

// A request: `{"text"}`, `{tokens, sampling}`, or field by field. Each field is described in
// pllm_request and has its default.
struct Request {
    Prompt prompt;
    Sampling sampling = {};
    uint64_t user_data = detail::request_defaults().user_data;
    uint32_t n = detail::request_defaults().n;
    // Set it to false for a prompt that render_chat rendered.
    bool add_special = (detail::request_defaults().text_flags & PLLM_TEXT_ADD_SPECIAL) != 0;
    bool skip_special = (detail::request_defaults().text_flags & PLLM_TEXT_SKIP_SPECIAL) != 0;
    uint32_t best_of = detail::request_defaults().best_of;
    std::optional<Beam> beam = std::nullopt;
    // The sequences of the request are kept when they end. Engine::sequence(output.sequence) takes
    // ownership of one.
    bool keep = (detail::request_defaults().flags & PLLM_REQUEST_KEEP) != 0;
    uint32_t truncate_prompt_tokens = detail::request_defaults().truncate_prompt_tokens;
    // A view. Requests share blocks of the prefix cache only if their salts are equal.
    std::string_view cache_salt = {};
    LogitsHook logits_hook = nullptr;
    void *hook_data = nullptr;  // valid until the last output of the request has been generated
    // Time from now after which the request ends with FinishReason::deadline and the tokens it has.
    // 0: none. A negative deadline is Code::invalid_argument.
    std::chrono::milliseconds deadline{detail::request_defaults().deadline_ms};
    int32_t priority = detail::request_defaults().priority;
};

class QueueView;

// Parameters of a fork. Each field is described in pllm_fork and has its default.
struct Fork {
    // Number of tokens that the children share with their parent. nullopt: all.
    std::optional<uint64_t> at = std::nullopt;
    // Each child draws from its own random stream of this seed. nullopt: the children draw the same
    // random numbers as their parent.
    std::optional<uint64_t> seed = std::nullopt;
    std::optional<uint64_t> user_data = std::nullopt;  // nullopt: the parent's
    const QueueView *queue = nullptr;  // queue of the children's outputs; null: the parent's queue
    bool idle = (detail::fork_defaults().flags & PLLM_FORK_IDLE) != 0;
};

// How an idle sequence continues. Each field is described in pllm_resume and has its default.
struct Resume {
    Sampling sampling = {};
    bool keep = (detail::resume_defaults().flags & PLLM_REQUEST_KEEP) != 0;
    std::optional<uint64_t> user_data = std::nullopt;  // nullopt: the sequence keeps its user_data
    bool skip_special = (detail::resume_defaults().text_flags & PLLM_TEXT_SKIP_SPECIAL) != 0;
    LogitsHook logits_hook = nullptr;
    void *hook_data = nullptr;  // valid until the last output has been generated
    // Continue as if the sequence had never been idle, with its own parameters, counts, grammar and
    // output kind. Of the other fields, only keep, user_data, logits_hook, hook_data and deadline
    // are used. For generate and collect, sampling.output_kind must be the output kind of the
    // sequence.
    bool continue_generation = (detail::resume_defaults().flags & PLLM_RESUME_CONTINUE) != 0;
    // As in Request, from this call on.
    std::chrono::milliseconds deadline{detail::resume_defaults().deadline_ms};
};

// A prompt that is kept in the prefix cache: `{"text"}`, or field by field. Each field is described
// in pllm_pin and has its default.
struct Prefix {
    Prompt prompt;
    std::string_view cache_salt = {};
    // 0: until it is unpinned.
    std::chrono::milliseconds time_to_live{detail::pin_defaults().time_to_live_ms};
    uint32_t priority = detail::pin_defaults().priority;
    bool add_special = (detail::pin_defaults().text_flags & PLLM_TEXT_ADD_SPECIAL) != 0;
};

namespace detail {

inline uint32_t flag(bool on, uint32_t bit) noexcept { return on ? bit : 0; }

// Sets a text unless it is empty.
inline void set_text(const char *&data, uint64_t &len, const std::string &text) noexcept {
    if (text.empty()) return;
    data = text.data();
    len = text.size();
}

// Sets the fields of memory limits, preemption and scheduling policies.
inline Status set_policies(pllm_engine_options &c, const Options &options) {
    const int64_t ageing = options.ageing.count();
    if (ageing < 0 || ageing > int64_t{UINT32_MAX}) {
        return Error{Code::invalid_argument, "ageing is " + std::to_string(ageing) + " ms; must be 0 to 4294967295 ms"};
    }
    c.ageing_ms = static_cast<uint32_t>(ageing);
    if (options.budget) {
        const auto budget = options.budget->named();
        if (!budget) return budget.error();
        c.budget = *budget;
    }
    c.max_waiting_requests = options.max_waiting_requests;
    c.max_waiting_tokens = options.max_waiting_tokens;
    c.max_prompt_bytes = options.max_prompt_bytes;
    c.swap_bytes = options.swap_bytes;
    set_text(c.swap_path, c.swap_path_len, options.swap_path);
    c.preemption = static_cast<uint32_t>(options.preemption);
    c.order = static_cast<uint32_t>(options.order);
    c.batching = static_cast<uint32_t>(options.batching);
    c.prefill_budget = options.prefill_budget;
    c.allocation = static_cast<uint32_t>(options.allocation);
    return {};
}

// Returns the C struct of options. It points into `options`, which must outlive it.
inline Result<pllm_engine_options> c_options(const Options &options) {
    pllm_engine_options c = options_defaults();
    c.model_path = options.model_path.data();
    c.model_path_len = options.model_path.size();
    set_text(c.device, c.device_len, options.device);
    c.kv_bytes = options.kv_bytes;
    c.seed = options.seed;
    c.block_size = options.block_size;
    c.weight_format = static_cast<uint32_t>(options.weight_format);
    c.weight_group = options.weight_group;
    set_text(c.packed_path, c.packed_path_len, options.packed_path);
    set_text(c.cpus, c.cpus_len, options.cpus);
    c.kv_dtype = static_cast<uint32_t>(options.kv_dtype);
    c.max_model_len = options.max_model_len;
    c.max_batch_tokens = options.max_batch_tokens;
    c.max_seqs = options.max_seqs;
    c.prefill_chunk = options.prefill_chunk;
    c.threads = options.threads;
    c.isa = static_cast<uint32_t>(options.isa);
    c.queue_capacity = options.queue_capacity;
    c.flags = flag(options.skip_tokenizer, PLLM_ENGINE_SKIP_TOKENIZER) | flag(options.no_prefix_cache, PLLM_ENGINE_NO_PREFIX_CACHE) |
              flag(options.batch_invariant, PLLM_ENGINE_BATCH_INVARIANT);
    c.memory_fraction = options.memory_fraction;
    set_text(c.trace_path, c.trace_path_len, options.trace_path);
    set_text(c.journal_path, c.journal_path_len, options.journal_path);
    set_text(c.model_name, c.model_name_len, options.model_name);
    if (Status policies = set_policies(c, options); !policies) return policies.error();
    return c;
}

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

private:
    std::vector<const char *> data_;
    std::vector<uint64_t> lens_;
};

// The C structs of a Sampling, which must outlive them.
class CSampling {
public:
    explicit CSampling(const Sampling &sampling) : c_(sampling_defaults()) {
        draw(sampling);
        penalize(sampling);
        report(sampling);
        constrain(sampling);
    }
    CSampling(const CSampling &) = delete;
    CSampling &operator=(const CSampling &) = delete;

    [[nodiscard]] const pllm_sampling *native() const noexcept { return &c_; }

private:
    void draw(const Sampling &sampling) {
        c_.temperature = sampling.temperature;
        c_.top_p = sampling.top_p;
        c_.min_p = sampling.min_p;
        c_.top_k = sampling.top_k;
        c_.typical_p = sampling.typical_p;
        c_.top_n_sigma = sampling.top_n_sigma;
        c_.xtc_probability = sampling.xtc_probability;
        c_.xtc_threshold = sampling.xtc_threshold;
        c_.mirostat_tau = sampling.mirostat_tau;
        c_.mirostat_eta = sampling.mirostat_eta;
        c_.seed = sampling.seed.value_or(0);
        c_.flags |= flag(sampling.seed.has_value(), PLLM_SAMPLING_SEED);
    }

    void penalize(const Sampling &sampling) {
        c_.presence_penalty = sampling.presence_penalty;
        c_.frequency_penalty = sampling.frequency_penalty;
        c_.repetition_penalty = sampling.repetition_penalty;
        c_.no_repeat_ngram_size = sampling.no_repeat_ngram_size;
        if (!sampling.dry) return;
        dry_ = dry_defaults();
        dry_.multiplier = sampling.dry->multiplier;
        dry_.base = sampling.dry->base;
        dry_.allowed_length = sampling.dry->allowed_length;
        dry_.penalty_last_n = sampling.dry->penalty_last_n;
        c_.dry = &dry_;
        if (!sampling.dry->sequence_breakers) return;
        breakers_.install(*sampling.dry->sequence_breakers, dry_.sequence_breakers, dry_.sequence_breaker_lens,
                          dry_.sequence_breaker_count);
        // An empty list is not NULL: NULL selects the default breakers.
        static constexpr const char *none[1] = {};
        if (!dry_.sequence_breakers) dry_.sequence_breakers = none;
    }

    void report(const Sampling &sampling) {
        c_.top_logprobs = sampling.top_logprobs;
        c_.prompt_top_logprobs = sampling.prompt_top_logprobs;
        c_.output_kind = static_cast<uint32_t>(sampling.output_kind);
        c_.flags |= flag(sampling.logprobs, PLLM_SAMPLING_LOGPROBS) |
                    flag(sampling.prompt_logprobs, PLLM_SAMPLING_PROMPT_LOGPROBS) | flag(sampling.echo, PLLM_SAMPLING_ECHO);
    }

    // Sets the fields of limits, stops, grammar and exclusions.
    void constrain(const Sampling &sampling) {
        c_.max_tokens = sampling.max_tokens;
        c_.min_tokens = sampling.min_tokens;
        c_.flags |= flag(sampling.ignore_eos, PLLM_SAMPLING_IGNORE_EOS) | flag(sampling.include_stop, PLLM_SAMPLING_INCLUDE_STOP);
        stop_.install(sampling.stop, c_.stop, c_.stop_lens, c_.stop_count);
        c_.stop_token_ids = sampling.stop_token_ids.data();
        c_.stop_token_ids_len = sampling.stop_token_ids.size();
        c_.grammar_kind = static_cast<uint32_t>(sampling.grammar.kind);
        if (sampling.grammar.kind != GrammarKind::none || !sampling.grammar.text.empty()) {
            c_.grammar = sampling.grammar.text.data();
            c_.grammar_len = sampling.grammar.text.size();
        }
        choices_.install(sampling.grammar.choices, c_.choices, c_.choice_lens, c_.choice_count);
        c_.logit_bias = sampling.logit_bias.data();
        c_.logit_bias_len = sampling.logit_bias.size();
        bad_words_.install(sampling.bad_words, c_.bad_words, c_.bad_word_lens, c_.bad_word_count);
        for (const std::vector<uint32_t> &word : sampling.bad_words_ids) bad_words_ids_.push_back({word.data(), word.size()});
        c_.bad_words_ids = bad_words_ids_.data();
        c_.bad_words_ids_len = bad_words_ids_.size();
        c_.allowed_token_ids = sampling.allowed_token_ids.data();
        c_.allowed_token_ids_len = sampling.allowed_token_ids.size();
    }

    pllm_sampling c_;
    pllm_dry dry_{};
    CStrings stop_, choices_, bad_words_, breakers_;
    std::vector<pllm_token_list> bad_words_ids_;
};

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

// The C structs of a request, which must outlive them.
class CRequest {
public:
    explicit CRequest(const Request &request) : request_(request_defaults()), sampling_(request.sampling) {
        set_prompt(request_, request.prompt);
        set_salt(request_, request.cache_salt);
        request_.user_data = request.user_data;
        request_.n = request.n;
        request_.best_of = request.best_of;
        request_.truncate_prompt_tokens = request.truncate_prompt_tokens;
        request_.text_flags =
            flag(request.add_special, PLLM_TEXT_ADD_SPECIAL) | flag(request.skip_special, PLLM_TEXT_SKIP_SPECIAL);
        request_.flags = flag(request.keep, PLLM_REQUEST_KEEP);
        request_.logits_hook = request.logits_hook;
        request_.hook_data = request.hook_data;
        request_.deadline_ms = request.deadline.count();
        request_.priority = request.priority;
        request_.sampling = sampling_.native();
        if (request.beam) search(*request.beam);
    }
    CRequest(const CRequest &) = delete;
    CRequest &operator=(const CRequest &) = delete;

    [[nodiscard]] const pllm_request *to(const pllm_queue *queue) noexcept {
        request_.queue = queue;
        return &request_;
    }

private:
    void search(const Beam &beam) {
        beam_ = beam_defaults();
        beam_.width = beam.width;
        beam_.groups = beam.groups;
        beam_.diversity_penalty = beam.diversity_penalty;
        beam_.length_penalty = beam.length_penalty;
        beam_.early_stopping = static_cast<uint32_t>(beam.early_stopping);
        request_.beam = &beam_;
    }

    pllm_request request_;
    CSampling sampling_;
    pllm_beam beam_{};
};

// The C structs of a pllm_resume. The Resume must outlive them.
class CResume {
public:
    explicit CResume(const Resume &resume) : resume_(resume_defaults()), sampling_(resume.sampling) {
        resume_.sampling = sampling_.native();
        resume_.user_data = resume.user_data.value_or(0);
        resume_.flags = flag(resume.keep, PLLM_REQUEST_KEEP) | flag(resume.user_data.has_value(), PLLM_RESUME_USER_DATA) |
                        flag(resume.continue_generation, PLLM_RESUME_CONTINUE);
        resume_.text_flags = flag(resume.skip_special, PLLM_TEXT_SKIP_SPECIAL);
        resume_.logits_hook = resume.logits_hook;
        resume_.hook_data = resume.hook_data;
        resume_.deadline_ms = resume.deadline.count();
    }
    CResume(const CResume &) = delete;
    CResume &operator=(const CResume &) = delete;

    [[nodiscard]] const pllm_resume *to(const pllm_queue *queue) noexcept {
        resume_.queue = queue;
        return &resume_;
    }

private:
    pllm_resume resume_;
    CSampling sampling_;
};

inline pllm_pin c_pin(const Prefix &prefix) noexcept {
    pllm_pin c = pin_defaults();
    set_prompt(c, prefix.prompt);
    set_salt(c, prefix.cache_salt);
    // 0 means no limit. A negative time to live becomes the shortest one instead.
    const int64_t milliseconds = prefix.time_to_live.count();
    c.time_to_live_ms = milliseconds < 0 ? 1 : static_cast<uint64_t>(milliseconds);
    c.priority = prefix.priority;
    c.text_flags = flag(prefix.add_special, PLLM_TEXT_ADD_SPECIAL);
    return c;
}

}  // namespace detail

// ---- results ------------------------------------------------------------------------------------

// As the structs of pagedllm.h.
using Plan = pllm_plan;
using Step = pllm_step;
using Stats = pllm_stats;
using SequenceInfo = pllm_sequence_info;
using Logprob = pllm_logprob;

// Time in seconds, as the library measures it.
using Seconds = std::chrono::duration<double>;

// Predicted admission of a request. Each field is described in pllm_admission.
struct Admission {
    bool admits;
    bool fits_now;
    std::optional<Seconds> first_token;  // nullopt: no step has been measured yet
    uint64_t waiting_requests;
    uint64_t waiting_tokens;
};

// Times of a sequence from the call that added, resumed or forked it. 0 if the event did not occur.
struct Timing {
    Seconds queued{0};       // to its first step
    Seconds first_token{0};  // to its first token
    Seconds last_token{0};   // to its last token
};

// Result of Options::packed_path.
enum class Packed : uint64_t {
    unused = PLLM_PACKED_UNUSED,
    read = PLLM_PACKED_READ,
    saved = PLLM_PACKED_SAVED,
    unsaved = PLLM_PACKED_UNSAVED,
};

// The model and the limits of its engine. Valid until the Engine is destroyed.
struct ModelInfo {
    std::string_view architecture;
    std::string_view isa;
    Span<const uint32_t> eos_token_ids;
    uint64_t vocab_size;
    uint64_t layers;
    uint64_t max_positions;
    uint64_t max_model_len;
    uint64_t threads;
    Packed packed;
    std::string_view packed_reason;  // why the packed weights were not read or not written
};

enum class FinishReason : uint32_t {
    none = PLLM_FINISH_NONE,
    stop = PLLM_FINISH_STOP,
    length = PLLM_FINISH_LENGTH,
    abort = PLLM_FINISH_ABORT,
    error = PLLM_FINISH_ERROR,
    deadline = PLLM_FINISH_DEADLINE,
};

// An output of one sequence: new tokens, new text, or its end. A view; valid as long as its
// Outputs.
struct Output {
    uint64_t request;
    uint64_t sequence;
    uint64_t user_data;
    Span<const uint32_t> tokens;
    Span<const float> logprobs;  // one for each token; empty if the request did not ask for them
    std::string_view text;       // whole characters only; it can lag behind the tokens
    FinishReason finish;         // any value but none marks the last output of the sequence
    // Set if finish is error, if the engine was freed, or if an export or a change failed; else 0.
    Code error_code;
    std::string_view error_message;
    uint64_t prompt_tokens;
    uint64_t generated_tokens;  // so far
    uint32_t index;             // index of the sequence in its request, from 0
    double score;
    // The most probable tokens at the position of each token, the same number for each. See
    // top_logprobs_of.
    Span<const Logprob> top_logprobs;
    // Log probabilities of the prompt tokens except the first. They come before the first generated
    // token, possibly in several outputs.
    Span<const float> prompt_logprobs;
    Span<const Logprob> prompt_top_logprobs;
    // State of a sequence from Sequence::export_to. Empty in all other outputs.
    Span<const uint8_t> sequence_state;
    // Set in the last output of a sequence; zero in all others.
    Timing timing;
    uint64_t preemptions;    // number of times the sequence was preempted
    uint64_t cached_tokens;  // number of its first tokens that were found in the prefix cache

    explicit Output(const pllm_output &record) noexcept : Output(0, detail::known(record)) {}

    [[nodiscard]] bool is_last() const noexcept { return finish != FinishReason::none; }

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
          finish(FinishReason(c.finish_reason)),
          error_code(Code(c.error_code)),
          error_message(detail::view(c.error, c.error_len)),
          prompt_tokens(c.prompt_tokens),
          generated_tokens(c.generated_tokens),
          index(c.index),
          score(c.score),
          top_logprobs(detail::view(c.top_logprobs, c.top_logprobs_len)),
          prompt_logprobs(detail::view(c.prompt_logprobs, c.prompt_logprobs_len)),
          prompt_top_logprobs(detail::view(c.prompt_top_logprobs, c.prompt_top_logprobs_len)),
          sequence_state(detail::view(c.sequence_state, c.sequence_state_len)),
          timing{Seconds(c.queued_seconds), Seconds(c.first_token_seconds), Seconds(c.last_token_seconds)},
          preemptions(c.preemptions),
          cached_tokens(c.cached_tokens) {}
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

// Everything that one sequence generated.
struct Completion {
    std::string text;
    std::vector<uint32_t> tokens;
    std::vector<float> logprobs;  // one for each token if the request asked for them
    FinishReason finish = FinishReason::none;
    uint64_t prompt_tokens = 0;
    uint64_t generated_tokens = 0;
    uint64_t sequence = 0;  // argument of Engine::sequence if the sequence is kept
    double score = 0;
    std::vector<Logprob> top_logprobs;  // the same number for each token
    std::vector<float> prompt_logprobs;
    std::vector<Logprob> prompt_top_logprobs;  // the same number for each of prompt_logprobs
    Status status;                             // the first error of the sequence, if any
    Timing timing;
    uint64_t preemptions = 0;
    uint64_t cached_tokens = 0;

    // Adds the next output.
    void add(const Output &output, OutputKind kind) {
        if (!output.sequence_state.empty()) return;  // an exported state is not part of the text
        if (kind != OutputKind::delta) {         // this output has everything so far
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
        append(top_logprobs, output.top_logprobs);
        append(prompt_logprobs, output.prompt_logprobs);
        append(prompt_top_logprobs, output.prompt_top_logprobs);
        finish = output.finish;
        prompt_tokens = output.prompt_tokens;
        generated_tokens = output.generated_tokens;
        sequence = output.sequence;
        score = output.score;
        timing = output.timing;
        preemptions = output.preemptions;
        cached_tokens = output.cached_tokens;
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
        pllm_fork c = detail::fork_defaults();
        c.n = n;
        c.at = how.at.value_or(PLLM_FORK_AT_END);
        c.seed = how.seed.value_or(0);
        c.user_data = how.user_data.value_or(0);
        c.flags = detail::flag(how.seed.has_value(), PLLM_FORK_SEED) | detail::flag(how.idle, PLLM_FORK_IDLE) |
                  detail::flag(how.user_data.has_value(), PLLM_FORK_USER_DATA);
        if (how.queue) {
            const auto queue = how.queue->named();
            if (!queue) return queue.error();
            c.queue = *queue;
        }
        // A vector would initialize all n elements. The library rejects large n before it writes an
        // id.
        const std::unique_ptr<uint64_t[]> ids(new (std::nothrow) uint64_t[n]);
        if (!ids) return Error{Code::out_of_memory, "no memory for the ids of " + std::to_string(n) + " children; reduce n"};
        const Status forked =
            use([&](pllm_engine *engine) { return pllm_sequence_fork(engine, id(), &c, ids.get()); });
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
        if (Status same = check_abi(); !same) return same.error();
        auto c = detail::c_options(options);
        if (!c) return c.error();
        detail::ProgressCall progress(options);
        progress.install(*c);
        auto engine = detail::create<pllm_engine, pllm_engine_free>([&](pllm_engine **out) { return pllm_engine_create(&*c, out); });
        progress.rethrow();
        if (!engine) return engine.error();
        Engine created(std::move(*engine));
        if (Status started = options.host_steps ? Status() : created.start(); !started) return started.error();
        return created;
    }

    // Takes ownership of an engine that was created with the C API. The engine is not started.
    [[nodiscard]] static Engine adopt(pllm_engine *engine) { return Engine(Made(engine)); }

    Result<ModelInfo> model_info() const {
        auto c = detail::filled<pllm_model_info>([&](pllm_model_info *out) { return pllm_engine_get_model_info(native(), out); });
        if (!c) return c.error();
        return ModelInfo{detail::view(c->architecture, c->architecture_len),
                    detail::view(c->isa, c->isa_len),
                    detail::view(c->eos_token_ids, c->eos_token_ids_len),
                    c->vocab_size,
                    c->layers,
                    c->max_positions,
                    c->max_model_len,
                    c->threads,
                    Packed(c->packed),
                    detail::view(c->packed_reason, c->packed_reason_len)};
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

    Result<uint64_t> add(const Request &request, const pllm_queue *queue) {
        uint64_t id = 0;
        detail::CRequest c(request);
        Status added = detail::status(pllm_engine_add_request(native(), c.to(queue), &id));
        if (!added) return added.error();
        return id;
    }

    Result<Admission> predict_admission(const Request &request, const pllm_queue *queue) const {
        detail::CRequest request_c(request);
        auto c = detail::filled<pllm_admission>(
            [&](pllm_admission *out) { return pllm_engine_predict_admission(native(), request_c.to(queue), out); });
        if (!c) return c.error();
        const std::optional<Seconds> first_token =
            c->first_token_seconds < 0 ? std::nullopt : std::optional<Seconds>(c->first_token_seconds);
        return Admission{c->admits != 0, c->fits_now != 0, first_token, c->waiting_requests, c->waiting_tokens};
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

}  // inline namespace
}  // namespace pagedllm

#endif  // PAGEDLLM_HPP
