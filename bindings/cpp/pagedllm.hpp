/*
 * libpagedllm for C++17: RAII handles over pagedllm.h, in this one header. Link with -lpagedllm.
 *
 *     pagedllm::Options options;
 *     options.model_path = "models/mine";
 *     auto engine = pagedllm::Engine::create(options).value();
 *     auto answer = engine.generate({"Once upon a time"}).value();
 *     std::cout << answer.text << "\n";
 *
 * What holds for everything here; the rest is as pagedllm.h says:
 *
 * Errors. A call that can fail returns Result<T> (Status where there is nothing to hand out): ask ok() and use * and ->, or call
 * value(), which throws Exception. With -fno-exceptions value() does not exist, so that no failure can be passed over;
 * -fno-rtti is fine, too. Besides value(), only the standard library throws here: std::bad_alloc, and std::system_error where
 * generate_async finds no thread.
 *
 * Ownership. Engine, Arena, Queue, Outputs, Stream, Sequence and Pin are move-only and free what they own. One that has been moved
 * from may be destroyed and assigned to; its calls answer Code::invalid_argument, its ranges are empty.
 *
 * Views. std::string_view and Span going in need to live only during the call. Coming out, they live as long as what they came
 * from: an Output as its Outputs, an Info as its Engine.
 *
 * Threads. An engine computes on a thread of its own, asleep while there is nothing to do, unless Options::host_steps is set. Any
 * thread may call anything on one Engine, Arena, Queue or Sequence at any time. A Stream and an Outputs are for one thread at a
 * time. Moving, assigning or destroying an object while another call on it is under way is the caller's mistake, as with any C++
 * object; a call on a Sequence or a Pin is one on its engine, too. All of them may outlive their engine: what was under way ends
 * as aborted, what comes after as Code::closed.
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

// With and without exceptions the same names mean different types, so that a program that mixes both and hands these objects
// from one to the other does not link, instead of going wrong.
#ifdef __cpp_exceptions
inline namespace with_exceptions {
#else
inline namespace without_exceptions {
#endif

// ---- errors ----------------------------------------------------------------------------------------------------------

// PLLM_E_*. A newer library may answer with numbers that have no name here.
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

// What went wrong, with the numbers and the remedy.
struct Error {
    Code code;
    std::string message;
};

#ifdef __cpp_exceptions
// What value() throws.
class Exception : public std::runtime_error {
public:
    explicit Exception(const Error &error) : std::runtime_error(error.message), code_(error.code) {}
    [[nodiscard]] Code code() const noexcept { return code_; }

private:
    Code code_;
};
#endif

// A value, or why there is none.
template <class T>
class [[nodiscard]] Result {
public:
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
    [[nodiscard]] explicit operator bool() const noexcept { return ok(); }

    // Only where ok(). From a temporary the value is moved out, so that a range-for over `*call()` is safe.
    [[nodiscard]] T &operator*() & noexcept { return *get(); }
    [[nodiscard]] const T &operator*() const & noexcept { return *get(); }
    [[nodiscard]] T operator*() && { return std::move(*get()); }
    [[nodiscard]] T *operator->() noexcept { return get(); }
    [[nodiscard]] const T *operator->() const noexcept { return get(); }

    // Only where not ok().
    [[nodiscard]] const Error &error() const noexcept {
        assert(!ok());
        return *std::get_if<1>(&state_);
    }

#ifdef __cpp_exceptions
    // The value; throws Exception where there is none.
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

// Done, or why not.
template <>
class [[nodiscard]] Result<void> {
public:
    Result() = default;
    Result(Error error) : error_(std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return error_.code == success; }
    [[nodiscard]] explicit operator bool() const noexcept { return ok(); }

    // Only where not ok().
    [[nodiscard]] const Error &error() const noexcept {
        assert(!ok());
        return error_;
    }

#ifdef __cpp_exceptions
    // Throws Exception where it was not done.
    void value() const {
        if (!ok()) throw Exception(error_);
    }
#endif

private:
    static constexpr Code success{0};  // no error has this code

    Error error_{success, {}};
};

using Status = Result<void>;

// ---- spans -----------------------------------------------------------------------------------------------------------

// A view of an array. Converts from whatever has data() and size(), and to std::span where there is one. (Not std::span itself,
// so that the files of a program may be compiled as C++17 and C++20.)
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

// ---- between C and C++ -----------------------------------------------------------------------------------------------

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

// Takes the error over.
inline Status status(pllm_error *error) {
    if (!error) return {};
    Handle<pllm_error, pllm_error_free> owned(error);
    return Error{Code(pllm_error_code(error)), pllm_error_message(error)};
}

// The struct that `fill` fills.
template <class T, class Fill>
Result<T> filled(Fill fill) {
    T value{};
    value.struct_size = sizeof value;
    if (Status done = status(fill(&value)); !done) return done.error();
    return value;
}

// What `make` makes, owned.
template <class T, auto free, class Make>
Result<Handle<T, free>> made(Make make) {
    T *raw = nullptr;
    if (Status done = status(make(&raw)); !done) return done.error();
    return Handle<T, free>(raw);
}

// The library's own defaults.
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

// What an older library gives of a record; the rest is zero.
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

// ---- the library -----------------------------------------------------------------------------------------------------

// The version of the library that was loaded, such as "0.2.0".
[[nodiscard]] inline std::string_view version() { return pllm_version(); }

// What it offers on this machine, as JSON.
[[nodiscard]] inline std::string_view build_info() { return pllm_build_info(); }

// Whether the library that was loaded speaks the ABI that the program was built for. Engine::create asks this, too.
inline Status check_abi(uint32_t header = PLLM_ABI_VERSION) {
    const uint32_t library = pllm_abi_version();
    if (library == header) return {};
    return Error{Code::unsupported, "the program was built with pagedllm.h of ABI " + std::to_string(header) + ", libpagedllm " +
                                        pllm_version() + " has ABI " + std::to_string(library) + ": build it with its header"};
}

// ---- arenas ----------------------------------------------------------------------------------------------------------

// Plain numbers, as pagedllm.h describes them.
using ArenaInfo = pllm_arena_info;

// A budget of KV bytes that somebody else owns and keeps alive: an Arena, or the Engine for its own.
class ArenaView {
public:
    // Changes the budget while its engines run: nothing ends, and the answers are the same. Code::capacity: the engines and
    // requests there are need more, and the message says how much.
    Status resize(uint64_t bytes) const { return detail::status(pllm_arena_resize(arena_, bytes)); }

    Result<ArenaInfo> state() const {
        return detail::filled<ArenaInfo>([&](ArenaInfo *out) { return pllm_arena_state(arena_, out); });
    }

    [[nodiscard]] const pllm_arena *native() const noexcept { return arena_; }

    // Of an arena that was named. One that has been moved from is an error: NULL would mean the engine's own.
    Result<const pllm_arena *> named() const {
        if (!arena_) return Error{Code::invalid_argument, "the arena has been moved from: name another"};
        return arena_;
    }

protected:
    friend class Engine;
    explicit ArenaView(const pllm_arena *arena) noexcept : arena_(arena) {}

    const pllm_arena *arena_;
};

// A budget of KV bytes that engines may share. Those that were made with it keep it, also where this is destroyed before them.
//
//     pagedllm::Arena arena = pagedllm::Arena::create(1 << 30).value();
//     options.arena = &arena;
class Arena : public ArenaView {
public:
    // resize may later raise it to `most_bytes`; 0: no further.
    static Result<Arena> create(uint64_t bytes, uint64_t most_bytes = 0) {
        auto arena = detail::made<pllm_arena, pllm_arena_free>(
            [&](pllm_arena **out) { return pllm_arena_create(bytes, most_bytes, out); });
        if (!arena) return arena.error();
        return Arena(std::move(*arena));
    }

    Arena(Arena &&other) noexcept : ArenaView(std::exchange(other.arena_, nullptr)), owned_(std::move(other.owned_)) {}
    Arena &operator=(Arena &&other) noexcept {
        arena_ = std::exchange(other.arena_, nullptr);
        owned_ = std::move(other.owned_);
        return *this;
    }

private:
    using Owned = detail::Handle<pllm_arena, pllm_arena_free>;
    explicit Arena(Owned owned) noexcept : ArenaView(owned.get()), owned_(std::move(owned)) {}

    Owned owned_;
};

// ---- what goes in ----------------------------------------------------------------------------------------------------

enum class Dtype : uint32_t {
    automatic = PLLM_DTYPE_AUTO,
    f32 = PLLM_DTYPE_F32,
    bf16 = PLLM_DTYPE_BF16,
    int8 = PLLM_DTYPE_INT8,
    f16 = PLLM_DTYPE_F16,
    fp8 = PLLM_DTYPE_FP8,
};

enum class Isa : uint32_t {
    automatic = PLLM_ISA_AUTO, // the widest that the machine has
    portable = PLLM_ISA_PORTABLE,
    avx2 = PLLM_ISA_AVX2,
    avx512 = PLLM_ISA_AVX512,
    avx512_bf16 = PLLM_ISA_AVX512_BF16, // what is kept in bf16 is multiplied by numbers that are rounded to it
    avx_vnni = PLLM_ISA_AVX_VNNI,
    avx512_vnni = PLLM_ISA_AVX512_VNNI,
};

// How weights are kept.
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

// What becomes of those who have to give way.
enum class Preemption : uint32_t {
    recompute = PLLM_PREEMPTION_RECOMPUTE,
    swap = PLLM_PREEMPTION_SWAP,
    automatic = PLLM_PREEMPTION_AUTO,
};

// Who comes first.
enum class Order : uint32_t {
    first_come = PLLM_ORDER_FIRST_COME,
    priority = PLLM_ORDER_PRIORITY,
    shortest_predicted = PLLM_ORDER_SHORTEST_PREDICTED,
};

// What a step is made of.
enum class Batching : uint32_t {
    mixed = PLLM_BATCHING_MIXED,
    prefill_first = PLLM_BATCHING_PREFILL_FIRST,
    decode_first = PLLM_BATCHING_DECODE_FIRST,
    static_ = PLLM_BATCHING_STATIC,
};

// For how many of its tokens a request needs room before it begins.
enum class Allocation : uint32_t { on_demand = PLLM_ALLOCATION_ON_DEMAND, max_tokens = PLLM_ALLOCATION_MAX_TOKENS };

// How an engine is made; each field as in pllm_engine_options, which has the defaults.
struct Options {
    std::string model_path;
    std::string device;  // "cpu", or "cuda:0" for the first CUDA device; empty: the library's default
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
    float memory_fraction = detail::options_defaults().memory_fraction;  // of a CUDA device's, in place of kv_bytes
    // False: Engine::create also starts the engine's own thread. True: only what the host steps is computed.
    bool host_steps = false;

    // Told (bytes of weights read, bytes in all) on the thread that calls Engine::create; false cancels. What it throws cancels,
    // too, and comes out of Engine::create.
    std::function<bool(uint64_t done, uint64_t total)> progress = nullptr;

    uint64_t max_waiting_requests = detail::options_defaults().max_waiting_requests;
    uint64_t max_waiting_tokens = detail::options_defaults().max_waiting_tokens;
    // Maximum length in bytes of a text prompt, a chat or a text to tokenize. 0: 64 for each token of max_model_len, at least 1 MiB.
    uint64_t max_prompt_bytes = detail::options_defaults().max_prompt_bytes;
    const ArenaView *arena = nullptr;  // null: the engine has its own
    uint64_t swap_bytes = detail::options_defaults().swap_bytes;
    std::string swap_path = {};  // empty: the host tier is memory
    Preemption preemption = Preemption(detail::options_defaults().preemption);
    Order order = Order(detail::options_defaults().order);
    std::chrono::milliseconds ageing{detail::options_defaults().ageing_ms};
    Batching batching = Batching(detail::options_defaults().batching);
    uint32_t prefill_budget = detail::options_defaults().prefill_budget;
    Allocation allocation = Allocation(detail::options_defaults().allocation);
    std::string trace_path = {};    // empty: none
    std::string journal_path = {};  // empty: none
    std::string model_name = {};    // in metrics; empty: the model directory's name
    Weights weight_format = Weights(detail::options_defaults().weight_format);
    uint32_t weight_group = detail::options_defaults().weight_group;
    std::string packed_path = {};  // a directory that keeps packed weights; empty: they are packed each time
    std::string cpus = {};         // to which threads are pinned, such as "0-3,8"; empty: the system places them
};

// What each output holds: what is new, everything so far, or, once and at the end, everything.
enum class OutputKind : uint32_t { delta = PLLM_OUTPUT_DELTA, cumulative = PLLM_OUTPUT_CUMULATIVE, final = PLLM_OUTPUT_FINAL };

enum class GrammarKind : uint32_t {
    none = PLLM_GRAMMAR_NONE,
    json_schema = PLLM_GRAMMAR_JSON_SCHEMA,
    json_object = PLLM_GRAMMAR_JSON_OBJECT,
    regex = PLLM_GRAMMAR_REGEX,
    choice = PLLM_GRAMMAR_CHOICE,
    lark = PLLM_GRAMMAR_LARK,
};

// What the output must be; anything, where nothing is said: `sampling.grammar = pagedllm::Grammar::regex("[0-9]+")`.
struct Grammar {
    GrammarKind kind = GrammarKind::none;
    std::string text = {};                  // the schema, regular expression or Lark grammar
    std::vector<std::string> choices = {};  // one of these, where kind is choice

    static Grammar json_schema(std::string schema) { return {GrammarKind::json_schema, std::move(schema)}; }
    static Grammar json_object() { return {GrammarKind::json_object}; }
    static Grammar regex(std::string expression) { return {GrammarKind::regex, std::move(expression)}; }
    static Grammar choice(std::vector<std::string> of) { return {GrammarKind::choice, {}, std::move(of)}; }
    static Grammar lark(std::string grammar) { return {GrammarKind::lark, std::move(grammar)}; }
};

// Each field as in pllm_dry, which has the defaults.
struct Dry {
    float multiplier = detail::dry_defaults().multiplier;
    float base = detail::dry_defaults().base;
    uint32_t allowed_length = detail::dry_defaults().allowed_length;
    uint32_t penalty_last_n = detail::dry_defaults().penalty_last_n;
    std::optional<std::vector<std::string>> sequence_breakers = {};  // nullopt: the library's
};

// {token, bias}
using LogitBias = pllm_logit_bias;

// How a request chooses its tokens, what it reports and when it ends; each field as in pllm_sampling, which has the defaults.
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
    uint32_t top_logprobs = detail::sampling_defaults().top_logprobs;                // with logprobs
    uint32_t prompt_top_logprobs = detail::sampling_defaults().prompt_top_logprobs;  // with prompt_logprobs
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

// Each field as in pllm_beam, which has the defaults.
struct Beam {
    uint32_t width = detail::beam_defaults().width;
    uint32_t groups = detail::beam_defaults().groups;
    float diversity_penalty = detail::beam_defaults().diversity_penalty;
    float length_penalty = detail::beam_defaults().length_penalty;
    EarlyStopping early_stopping = EarlyStopping(detail::beam_defaults().early_stopping);
};

// Edits the logits of the next token of a sequence, on the thread that steps, which waits for it; a lambda without captures
// converts to one. What it may call meanwhile, pllm_logits_hook says.
using LogitsHook = void (*)(void *hook_data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits,
                            uint64_t vocab_size) noexcept;

// Text or token ids; a view of them.
using Prompt = std::variant<std::string_view, Span<const uint32_t>>;

// A request: `{"text"}`, `{tokens, sampling}`, or field by field. Each field as in pllm_request, which has the defaults.
struct Request {
    Prompt prompt;
    Sampling sampling = {};
    uint64_t user_data = detail::request_defaults().user_data;
    uint32_t n = detail::request_defaults().n;
    // False for a prompt that render_chat wrote.
    bool add_special = (detail::request_defaults().text_flags & PLLM_TEXT_ADD_SPECIAL) != 0;
    bool skip_special = (detail::request_defaults().text_flags & PLLM_TEXT_SKIP_SPECIAL) != 0;
    uint32_t best_of = detail::request_defaults().best_of;
    std::optional<Beam> beam = std::nullopt;
    // Its sequences stay when they end: take each over with Engine::sequence(output.sequence).
    bool keep = (detail::request_defaults().flags & PLLM_REQUEST_KEEP) != 0;
    uint32_t truncate_prompt_tokens = detail::request_defaults().truncate_prompt_tokens;
    // A view. Only requests with the same salt share what the prefix cache holds.
    std::string_view cache_salt = {};
    LogitsHook logits_hook = nullptr;
    void *hook_data = nullptr;  // lives until the request's last output has been made
    // From now on; then it ends with FinishReason::deadline and what it has. 0: none. One that has passed is refused.
    std::chrono::milliseconds deadline{detail::request_defaults().deadline_ms};
    int32_t priority = detail::request_defaults().priority;
};

class QueueView;

// How to fork. Each field as in pllm_fork, which has the defaults.
struct Fork {
    // The tokens that the children share with their parent. Nothing: all that it has when the fork is made.
    std::optional<uint64_t> at = std::nullopt;
    // Each child draws from a stream of its own of this seed. Nothing: all draw the same numbers as their parent.
    std::optional<uint64_t> seed = std::nullopt;
    std::optional<uint64_t> user_data = std::nullopt;  // nothing: the parent's
    const QueueView *queue = nullptr;                  // where the children's outputs go; null: where the parent's go
    bool idle = (detail::fork_defaults().flags & PLLM_FORK_IDLE) != 0;
};

// How an idle sequence goes on. Each field as in pllm_resume, which has the defaults.
struct Resume {
    Sampling sampling = {};
    bool keep = (detail::resume_defaults().flags & PLLM_REQUEST_KEEP) != 0;
    std::optional<uint64_t> user_data = std::nullopt;  // nothing: as before
    bool skip_special = (detail::resume_defaults().text_flags & PLLM_TEXT_SKIP_SPECIAL) != 0;
    LogitsHook logits_hook = nullptr;
    void *hook_data = nullptr;  // lives until the last output has been made
    // As if it had never been idle, with its own parameters, counts, grammar and outputs. Of the other fields only keep, user_data
    // and deadline count then; and sampling.output_kind where outputs are collected, as by generate: it must be the sequence's own.
    bool go_on = (detail::resume_defaults().flags & PLLM_RESUME_CONTINUE) != 0;
    std::chrono::milliseconds deadline{detail::resume_defaults().deadline_ms};  // as in Request, for this turn
};

// A prompt to keep in the prefix cache: `{"text"}`, or field by field. Each field as in pllm_pin, which has the defaults.
struct Prefix {
    Prompt prompt;
    std::string_view cache_salt = {};
    std::chrono::milliseconds time_to_live{detail::pin_defaults().time_to_live_ms};  // 0: until it is unpinned
    uint32_t priority = detail::pin_defaults().priority;
    bool add_special = (detail::pin_defaults().text_flags & PLLM_TEXT_ADD_SPECIAL) != 0;
};

namespace detail {

inline uint32_t flag(bool on, uint32_t bit) noexcept { return on ? bit : 0; }

// A text that is none where it is empty.
inline void set_text(const char *&data, uint64_t &len, const std::string &text) noexcept {
    if (text.empty()) return;
    data = text.data();
    len = text.size();
}

// How memory is shared out, and who comes first.
inline Status set_policies(pllm_engine_options &c, const Options &options) {
    const int64_t ageing = options.ageing.count();
    if (ageing < 0 || ageing > int64_t{UINT32_MAX}) {
        return Error{Code::invalid_argument, "ageing is " + std::to_string(ageing) + " ms: it must be from 0 to 4294967295 ms"};
    }
    c.ageing_ms = static_cast<uint32_t>(ageing);
    if (options.arena) {
        const auto arena = options.arena->named();
        if (!arena) return arena.error();
        c.arena = *arena;
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

// The C struct of what it was made from, which outlives it.
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

// Stands between the library and Options::progress: nothing that is thrown may cross the C frames.
class ProgressCall {
public:
    explicit ProgressCall(const Options &options) : progress_(options.progress) {}

    void install(pllm_engine_options &options) {
        if (!progress_) return;
        options.progress = [](void *self, uint64_t done, uint64_t total) noexcept -> int32_t {
            return static_cast<ProgressCall *>(self)->goes_on(done, total) ? 0 : 1;
        };
        options.progress_data = this;
    }

    void rethrow() const {
#ifdef __cpp_exceptions
        if (thrown_) std::rethrow_exception(thrown_);
#endif
    }

private:
    bool goes_on(uint64_t done, uint64_t total) noexcept {
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

// Strings as C takes them: where they are, and how long.
class CStrings {
public:
    // Tells the C struct of strings that outlive it.
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

// The C structs of sampling parameters, which outlive them.
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
        // No breakers are a list, too: NULL would say that they are not given.
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

    // What the output may be, and where it ends.
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

// Into a pllm_request or a pllm_pin.
template <class C>
void set_prompt(C &c, const Prompt &prompt) noexcept {
    // An empty prompt is one, too: NULL would say that there is none.
    static constexpr uint32_t no_tokens[1] = {};
    if (const auto *text = std::get_if<std::string_view>(&prompt)) {
        c.prompt = text->data() ? text->data() : "";
        c.prompt_len = text->size();
    } else if (const auto *tokens = std::get_if<Span<const uint32_t>>(&prompt)) {
        c.prompt_tokens = tokens->data() ? tokens->data() : no_tokens;
        c.prompt_tokens_len = tokens->size();
    }
}

template <class C>
void set_salt(C &c, std::string_view salt) noexcept {
    c.cache_salt = reinterpret_cast<const uint8_t *>(salt.data());
    c.cache_salt_len = salt.size();
}

// The C structs of a request, which outlives them.
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

// The C structs of a resumption, which outlives them.
class CResume {
public:
    explicit CResume(const Resume &resume) : resume_(resume_defaults()), sampling_(resume.sampling) {
        resume_.sampling = sampling_.native();
        resume_.user_data = resume.user_data.value_or(0);
        resume_.flags = flag(resume.keep, PLLM_REQUEST_KEEP) | flag(resume.user_data.has_value(), PLLM_RESUME_USER_DATA) |
                        flag(resume.go_on, PLLM_RESUME_CONTINUE);
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
    // One that would have run out already runs out at once.
    const int64_t milliseconds = prefix.time_to_live.count();
    c.time_to_live_ms = milliseconds < 0 ? 1 : static_cast<uint64_t>(milliseconds);
    c.priority = prefix.priority;
    c.text_flags = flag(prefix.add_special, PLLM_TEXT_ADD_SPECIAL);
    return c;
}

}  // namespace detail

// ---- what comes out --------------------------------------------------------------------------------------------------

// Plain numbers, as pagedllm.h describes them.
using Plan = pllm_plan;
using Step = pllm_step;
using Stats = pllm_stats;
using SequenceInfo = pllm_sequence_info;
using Logprob = pllm_logprob;

// As far as the library measures time.
using Seconds = std::chrono::duration<double>;

// What would become of a request that was added now; each field as in pllm_admission.
struct Admission {
    bool admits;
    bool fits_now;
    std::optional<Seconds> first_token;  // nothing: no step has shown yet how long steps take
    uint64_t waiting_requests;
    uint64_t waiting_tokens;
};

// How long a sequence took, from the call that asked for it. 0 where it never came to that.
struct Timing {
    Seconds queued{0};       // until its first step began
    Seconds first_token{0};  // until that was there
    Seconds last_token{0};
};

// What became of Options::packed_path.
enum class Packed : uint64_t {
    unused = PLLM_PACKED_UNUSED,
    read = PLLM_PACKED_READ,
    saved = PLLM_PACKED_SAVED,
    unsaved = PLLM_PACKED_UNSAVED,
};

// The model and the limits it is served with; lives as long as its Engine.
struct Info {
    std::string_view architecture;
    std::string_view isa;
    Span<const uint32_t> eos_token_ids;
    uint64_t vocab_size;
    uint64_t layers;
    uint64_t max_positions;
    uint64_t max_model_len;
    uint64_t threads;
    Packed packed;
    std::string_view packed_reason;  // why it was not read, or not written
};

enum class FinishReason : uint32_t {
    none = PLLM_FINISH_NONE,
    stop = PLLM_FINISH_STOP,
    length = PLLM_FINISH_LENGTH,
    abort = PLLM_FINISH_ABORT,
    error = PLLM_FINISH_ERROR,
    deadline = PLLM_FINISH_DEADLINE,
};

// News of one sequence: new tokens, new text, or its end. It is a view; it lives as long as its Outputs.
struct Output {
    uint64_t request;
    uint64_t sequence;
    uint64_t user_data;
    Span<const uint32_t> tokens;
    Span<const float> logprobs;  // one per token; empty where the request did not ask for them
    std::string_view text;       // never half a character; it may lag behind the tokens
    FinishReason finish;         // anything but none makes this the sequence's last one
    Code error_code;             // why: where finish is error, the engine was freed, or there is no blob that was asked for; else 0
    std::string_view error_message;
    uint64_t prompt_tokens;
    uint64_t generated_tokens;  // so far
    uint32_t index;             // which of the request's sequences, from 0
    double score;
    // The most probable tokens in place of each of `tokens`, as many for each; top_logprobs_of tells them apart.
    Span<const Logprob> top_logprobs;
    Span<const float> prompt_logprobs;  // of the prompt's tokens but the first, before the first token and in any number of outputs
    Span<const Logprob> prompt_top_logprobs;
    Span<const uint8_t> blob;  // of Sequence::export_to: then there is nothing else to tell. Empty in all other outputs
    // In the last one; else zero.
    Timing timing;
    uint64_t preemptions;    // how often its blocks were taken from it
    uint64_t cached_tokens;  // with how many of its first tokens the prefix cache helped

    explicit Output(const pllm_output &record) noexcept : Output(0, detail::known(record)) {}

    [[nodiscard]] bool is_last() const noexcept { return finish != FinishReason::none; }

    // The most probable tokens in place of tokens[i], or of the i-th that prompt_logprobs tells of, most probable first.
    [[nodiscard]] Span<const Logprob> top_logprobs_of(size_t i) const noexcept { return share(top_logprobs, i, tokens.size()); }
    [[nodiscard]] Span<const Logprob> prompt_top_logprobs_of(size_t i) const noexcept {
        return share(prompt_top_logprobs, i, prompt_logprobs.size());
    }

private:
    // Share i of so many equal ones.
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
          blob(detail::view(c.blob, c.blob_len)),
          timing{Seconds(c.queued_seconds), Seconds(c.first_token_seconds), Seconds(c.last_token_seconds)},
          preemptions(c.preemptions),
          cached_tokens(c.cached_tokens) {}
};

// A batch of outputs, in the order they were made. Owns what they view; outlives queue and engine.
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

// All that came of one sequence.
struct Completion {
    std::string text;
    std::vector<uint32_t> tokens;
    std::vector<float> logprobs;  // one per token, where the request asked for them
    FinishReason finish = FinishReason::none;
    uint64_t prompt_tokens = 0;
    uint64_t generated_tokens = 0;
    uint64_t sequence = 0;  // where it is kept: what Engine::sequence takes
    double score = 0;
    std::vector<Logprob> top_logprobs;  // as many for each token
    std::vector<float> prompt_logprobs;
    std::vector<Logprob> prompt_top_logprobs;  // as many for each of prompt_logprobs
    Status status;                             // what went wrong with it, if anything did
    Timing timing;
    uint64_t preemptions = 0;
    uint64_t cached_tokens = 0;

    // Takes the next output in.
    void add(const Output &output, OutputKind kind) {
        if (!output.blob.empty()) return;  // no news of the text
        if (kind != OutputKind::delta) {  // this one has it all
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
        if (output.error_code != Code{}) status = Error{output.error_code, std::string(output.error_message)};
    }

private:
    template <class T>
    static void append(std::vector<T> &to, Span<const T> more) {
        to.insert(to.end(), more.begin(), more.end());
    }
};

// ---- queues ----------------------------------------------------------------------------------------------------------

// A timeout that never runs out.
inline constexpr std::chrono::milliseconds forever{-1};

// A queue that somebody else owns and keeps alive: a Queue, or the Engine for its own.
class QueueView {
public:
    // Takes everything that is there, waiting up to `timeout` for the first. Empty: time ran out. Once the engine has failed or
    // is gone and its last outputs are taken, this is that error.
    Result<Outputs> poll(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) const {
        // A deadline that has passed is no wait, not an endless one.
        const int64_t milliseconds = timeout == forever ? -1 : std::max<int64_t>(timeout.count(), 0);
        auto batch = detail::made<pllm_outputs, pllm_outputs_free>(
            [&](pllm_outputs **out) { return pllm_queue_poll(queue_, milliseconds, out); });
        if (!batch) return batch.error();
        return Outputs(std::move(*batch));
    }

    // Readable while a poll would not have to wait; for epoll and what is built on it. It stays the queue's: do not close it,
    // dup() it for an owner that does.
    Result<int> event_fd() const {
        int32_t fd = -1;
        if (Status got = detail::status(pllm_queue_event_fd(queue_, &fd)); !got) return got.error();
        return fd;
    }

    [[nodiscard]] const pllm_queue *native() const noexcept { return queue_; }

    // Of a queue that was named. One that has been moved from is an error: NULL would mean another one.
    Result<const pllm_queue *> named() const {
        if (!queue_) return Error{Code::invalid_argument, "the queue has been moved from: name another"};
        return queue_;
    }

protected:
    friend class Engine;
    explicit QueueView(const pllm_queue *queue) noexcept : queue_(queue) {}

    const pllm_queue *queue_;
};

// A queue for some of an engine's requests. Destroying it aborts what still writes to it.
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
            detail::made<pllm_queue, pllm_queue_free>([&](pllm_queue **out) { return pllm_queue_create(engine, capacity, out); });
        if (!queue) return queue.error();
        return Queue(std::move(*queue));
    }

    Owned owned_;
};

// One request and its outputs, as they come:
//
//     auto stream = engine.stream({"Once upon a time"}).value();
//     for (pagedllm::Output output : stream) std::cout << output.text << std::flush;
//     stream.status().value();
//
// It ends when all of the request's sequences have; Output::index tells them apart. What is forked from one of them without a
// queue of its own writes here, too, for as long. Destroying the stream before its end aborts the request, at the engine's next
// step. Reading waits for what the engine's own thread computes, or another one of the host's. Moving a stream ends the use of
// its iterators.
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

    // The next output, waiting for it; it lives until the next call. Nothing: there are no more, or status() says what went
    // wrong.
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

    // Reads on from the next output.
    [[nodiscard]] Iterator begin() { return Iterator(this); }
    [[nodiscard]] Iterator end() const noexcept { return {}; }

    // What went wrong first, if anything did so far. A request that was aborted went well.
    [[nodiscard]] const Status &status() const noexcept { return status_; }

    // Its id: what Engine::abort takes.
    [[nodiscard]] uint64_t request() const noexcept { return request_; }

    // Reads what is left, to the end, of a request for one result.
    Result<Completion> collect() {
        if (Status one = only_one(results_); !one) return one.error();
        Result<std::vector<Completion>> all = collect_all();
        if (!status_) return status_.error();
        return std::move(all->front());
    }

    // Reads what is left, to the end, of each of the request's sequences, in the order of their indices. Each has a status of its
    // own.
    Result<std::vector<Completion>> collect_all() {
        std::vector<Completion> all(results_);
        for (const Output &output : *this) {
            const size_t which = output.index - first_;  // beyond all, for one before the first
            if (output.request == request_ && which < all.size()) all[which].add(output, kind_);
        }
        if (failed_) return status_.error();
        return all;
    }

private:
    friend class Engine;
    friend class Sequence;
    // Nothing is thrown away in silence.
    static Status only_one(uint32_t n) {
        if (n <= 1) return {};
        return Error{Code::invalid_argument, "n is " + std::to_string(n) + ": generate_all or collect_all gives them all"};
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
        status_ = error;
        return std::nullopt;
    }

    Queue queue_;
    uint64_t request_;
    uint32_t first_;    // index of the results
    uint32_t results_;  // how many there are
    uint32_t left_;     // of them, to end
    OutputKind kind_;
    Outputs batch_;
    size_t read_ = 0;  // of the batch
    bool failed_ = false;
    Status status_;
};

// ---- sequences -------------------------------------------------------------------------------------------------------

namespace detail {

// An engine as its sequences and pins know it: they may outlive it.
class EngineRef {
public:
    EngineRef() = default;  // knows none
    explicit EngineRef(pllm_engine *engine) : engine_(std::make_shared<std::atomic<pllm_engine *>>(engine)) {}

    // Of what has been moved from, NULL: the library says what is wrong then.
    template <class Call>
    Status use(Call call) const {
        pllm_engine *engine = engine_ ? engine_->load() : nullptr;
        if (engine_ && !engine) return Error{Code::closed, "the engine has been freed"};
        return status(call(engine));
    }

    [[nodiscard]] pllm_engine *native() const noexcept { return engine_ ? engine_->load() : nullptr; }

    void forget() const noexcept { engine_->store(nullptr); }

private:
    std::shared_ptr<std::atomic<pllm_engine *>> engine_;
};

// Frees an engine, and lets those know who may outlive it.
struct FreeEngine {
    EngineRef known;
    void operator()(pllm_engine *engine) const noexcept {
        known.forget();
        pllm_engine_free(engine);
    }
};

// What an engine knows by a number, owned.
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

// A sequence of tokens and what was computed for them, owned: destroying it frees it, and aborts it where it runs. One that ended
// without being kept is gone already; then there is nothing to free. Make no second one of the same id.
//
//     pagedllm::Request request{prompt};
//     request.keep = true;
//     pagedllm::Sequence story = engine.sequence(engine.generate(request).value().sequence);
//     story.append(engine.tokenize(" And then", false).value()).value();
//     std::cout << story.generate().value().text << "\n";
class Sequence {
public:
    [[nodiscard]] uint64_t id() const noexcept { return owned_.id(); }

    // A sequence that begins with this one's tokens. It runs where this one does, else it waits to be resumed. This one's queue
    // may be gone, that of generate among them: then name another.
    Result<Sequence> fork(const Fork &how = {}) const {
        auto children = fork_many(1, how);
        if (!children) return children.error();
        return std::move(children->front());
    }

    // Several of them at once.
    Result<std::vector<Sequence>> fork_many(uint32_t n, const Fork &how = {}) const {
        pllm_fork c = detail::fork_defaults();
        c.n = n;
        c.at = how.at.value_or(PLLM_AT_END);
        c.seed = how.seed.value_or(0);
        c.user_data = how.user_data.value_or(0);
        c.flags = detail::flag(how.seed.has_value(), PLLM_FORK_SEED) | detail::flag(how.idle, PLLM_FORK_IDLE) |
                  detail::flag(how.user_data.has_value(), PLLM_FORK_USER_DATA);
        if (how.queue) {
            const auto queue = how.queue->named();
            if (!queue) return queue.error();
            c.queue = *queue;
        }
        // Not a vector, which would write to all of it: the library refuses far smaller numbers than n may be.
        const std::unique_ptr<uint64_t[]> ids(new (std::nothrow) uint64_t[n]);
        if (!ids) return Error{Code::out_of_memory, "no memory for the ids of " + std::to_string(n) + " children: ask for fewer"};
        const Status forked =
            use([&](pllm_engine *engine) { return pllm_sequence_fork(engine, id(), &c, ids.get()); });
        if (!forked) return forked.error();
        std::vector<Sequence> children;
        children.reserve(n);
        for (uint32_t i = 0; i < n; i++) children.push_back(Sequence(owned_.engine(), ids[i]));
        return children;
    }

    // Adds tokens to its end. Where it runs it goes on after them, from the next step on; else they are computed when it resumes.
    Status append(Span<const uint32_t> tokens) {
        return use([&](pllm_engine *engine) { return pllm_sequence_append(engine, id(), tokens.data(), tokens.size()); });
    }

    // Cuts it to its first `len` tokens; everything is as it was then.
    Status rewind(uint64_t len) {
        return use([&](pllm_engine *engine) { return pllm_sequence_rewind(engine, id(), len); });
    }

    // It goes on from where it is; its outputs go where they went before. It must be idle: that it is from its last output on.
    Status resume(const Resume &how = {}) { return resume(how, nullptr); }

    // As resume; its outputs go to `queue`: one of its engine's.
    Status resume(const Resume &how, const QueueView &queue) {
        const auto named = queue.named();
        if (!named) return named.error();
        return resume(how, *named);
    }

    // Resumes it with a queue of its own, and reads it as it comes. Destroying the stream before its end makes it idle again, or
    // frees it where it is not kept.
    Result<Stream> stream(const Resume &how = {}, uint64_t capacity = PLLM_QUEUE_CAPACITY) {
        Result<SequenceInfo> now = info();
        if (!now) return now.error();
        Result<Queue> queue = Queue::create(owned_.engine().native(), capacity);
        if (!queue) return queue.error();
        if (Status resumed = resume(how, *queue); !resumed) return resumed.error();
        return Stream(std::move(*queue), now->request, now->index, 1, how.sampling.output_kind);
    }

    // Resumes it, and waits until it ends.
    Result<Completion> generate(const Resume &how = {}) {
        Result<Stream> resumed = stream(how);
        if (!resumed) return resumed.error();
        return resumed->collect();
    }

    // Writes it down, as of the engine's next step, and waits for that: Engine::import_sequence makes it anew, in this or another
    // process. This one goes on undisturbed. The bytes hold the conversation in the clear; a logits hook is not part of them.
    Result<std::vector<uint8_t>> export_blob() const {
        if (Result<SequenceInfo> known = info(); !known) return known.error();
        Result<Queue> queue = Queue::create(owned_.engine().native(), 1);
        if (!queue) return queue.error();
        if (Status asked = export_to(*queue); !asked) return asked.error();
        return blob_of(queue->poll(forever));
    }

    // As export_blob, without waiting: the bytes (Output::blob), or why there are none, come as an output of it in `queue`: one of
    // its engine's.
    Status export_to(const QueueView &queue) const {
        const auto named = queue.named();
        if (!named) return named.error();
        return use([&](pllm_engine *engine) { return pllm_sequence_export(engine, id(), *named); });
    }

    // As of the last step, and of the calls since.
    Result<SequenceInfo> info() const {
        SequenceInfo info{};
        info.struct_size = sizeof info;
        const Status known = use([&](pllm_engine *engine) { return pllm_sequence_get_info(engine, id(), &info); });
        if (!known) return known.error();
        return info;
    }

    // As destroying it, and says whether there was something to free. Afterwards it is as if it had been moved from.
    Status free() { return owned_.free_now(); }

    // Lets it live on, for who knows its id. Afterwards it is as if it had been moved from.
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

    // One output comes: the blob, or why there is none.
    static Result<std::vector<uint8_t>> blob_of(const Result<Outputs> &outputs) {
        if (!outputs) return outputs.error();
        const Output output = (*outputs)[0];
        if (output.error_code != Code{}) return Error{output.error_code, std::string(output.error_message)};
        return std::vector<uint8_t>(output.blob.begin(), output.blob.end());
    }

    detail::Owned<pllm_sequence_free> owned_;
};

// A prompt that stays in the prefix cache, until its time is over or this is destroyed. Where a sequence could not go on
// otherwise, it may have to give way earlier.
class Pin {
public:
    [[nodiscard]] uint64_t id() const noexcept { return owned_.id(); }

    // As destroying it, and says whether it was still there. Afterwards it is as if it had been moved from.
    Status unpin() { return owned_.free_now(); }

    // Lets it stay until its time is over. Afterwards it is as if it had been moved from.
    uint64_t release() noexcept { return owned_.release(); }

private:
    friend class Engine;
    Pin(detail::EngineRef engine, uint64_t id) noexcept : owned_(std::move(engine), id) {}

    detail::Owned<pllm_prefix_unpin> owned_;
};

// ---- the engine ------------------------------------------------------------------------------------------------------

// An engine: one model, its requests and their sequences. Destroying it ends them all.
class Engine {
public:
    // A dry run of create: what would be allocated, without allocating it.
    static Result<Plan> plan(const Options &options) {
        const auto c = detail::c_options(options);
        if (!c) return c.error();
        return detail::filled<Plan>([&](Plan *out) { return pllm_engine_plan(&*c, out); });
    }

    // Opens a model and makes an engine that serves it.
    static Result<Engine> create(const Options &options) {
        if (Status same = check_abi(); !same) return same.error();
        auto c = detail::c_options(options);
        if (!c) return c.error();
        detail::ProgressCall progress(options);
        progress.install(*c);
        auto engine = detail::made<pllm_engine, pllm_engine_free>([&](pllm_engine **out) { return pllm_engine_create(&*c, out); });
        progress.rethrow();
        if (!engine) return engine.error();
        Engine made(std::move(*engine));
        if (Status started = options.host_steps ? Status() : made.start(); !started) return started.error();
        return made;
    }

    // Takes over an engine that was made in C, or by a library that makes its own. It is not started here.
    [[nodiscard]] static Engine adopt(pllm_engine *engine) { return Engine(Made(engine)); }

    Result<Info> info() const {
        auto c = detail::filled<pllm_model_info>([&](pllm_model_info *out) { return pllm_engine_info(native(), out); });
        if (!c) return c.error();
        return Info{detail::view(c->architecture, c->architecture_len),
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
        return detail::filled<Stats>([&](Stats *out) { return pllm_engine_stats(native(), out); });
    }

    // What dashboards ask for, as text in the OpenMetrics format.
    Result<std::string> metrics() const {
        return detail::copied(detail::made<pllm_bytes, pllm_bytes_free>(
            [&](pllm_bytes **out) { return pllm_engine_metrics(native(), out); }));
    }

    // The budget of the KV pool, Options::arena or the engine's own; lives as long as the engine.
    [[nodiscard]] ArenaView arena() const noexcept { return ArenaView(pllm_engine_arena(native())); }

    // What would become of a request with outputs to `queue`, without adding it. Any thread may ask, also while another steps.
    Result<Admission> admit(const Request &request, const QueueView &queue) const {
        const auto named = queue.named();
        if (!named) return named.error();
        return admit(request, *named);
    }

    // The same, with outputs to the engine's own queue.
    Result<Admission> admit(const Request &request) const { return admit(request, nullptr); }

    // Adds a request and returns its id. Its outputs go to `queue`: one of this engine's.
    Result<uint64_t> add(const Request &request, const QueueView &queue) {
        const auto named = queue.named();
        if (!named) return named.error();
        return add(request, *named);
    }

    // Adds a request; its outputs go to the engine's own queue.
    Result<uint64_t> add(const Request &request) { return add(request, nullptr); }

    // Ends a request at the next step; the last output of each of its sequences says FinishReason::abort.
    Status abort(uint64_t request) { return detail::status(pllm_engine_abort(native(), request)); }

    // Runs one iteration. Code::busy: another thread is stepping, or the engine's own.
    Result<Step> step() {
        return detail::filled<Step>([&](Step *out) { return pllm_engine_step(native(), out); });
    }

    // From now on a thread of the engine's own steps. Code::busy: it does already.
    Status start() { return detail::status(pllm_engine_start(native())); }

    // Joins that thread after the step under way; requests wait until somebody steps again.
    Status stop() { return detail::status(pllm_engine_stop(native())); }

    // The engine's own queue; lives as long as the engine.
    [[nodiscard]] QueueView queue() const noexcept { return QueueView(pllm_engine_queue(native())); }

    // A queue for some of the requests, which pause while `capacity` outputs wait in it; no others do, and nothing is dropped.
    Result<Queue> create_queue(uint64_t capacity) { return Queue::create(native(), capacity); }

    // Adds a request with a queue of its own, and reads it as it comes. It pauses while `capacity` outputs wait to be read.
    Result<Stream> stream(const Request &request, uint64_t capacity = PLLM_QUEUE_CAPACITY) {
        Result<Queue> queue = create_queue(capacity);
        if (!queue) return queue.error();
        Result<uint64_t> id = add(request, *queue);
        if (!id) return id.error();
        return Stream(std::move(*queue), *id, 0, request.n, request.sampling.output_kind);
    }

    // A request for one result from beginning to end, waiting for it. Any number of threads may be in it at once.
    Result<Completion> generate(const Request &request) {
        Result<Stream> requested = stream_of_one(request);
        if (!requested) return requested.error();
        return requested->collect();
    }

    // As generate, for any n: result i is that of index i, with a status of its own.
    Result<std::vector<Completion>> generate_all(const Request &request) {
        Result<Stream> requested = stream(request);
        if (!requested) return requested.error();
        return requested->collect_all();
    }

    // As generate, in a thread of its own (std::async): one for each call under way, which sleeps while the request runs. For
    // many at once, give them queues and an event loop. The request is added before this returns, so what it views may go.
    // Destroying the future waits for the end; so, to be rid of it sooner, use stream.
    [[nodiscard]] std::future<Result<Completion>> generate_async(const Request &request) {
        return std::async(std::launch::async, [requested = stream_of_one(request)]() mutable -> Result<Completion> {
            if (!requested) return requested.error();
            return requested->collect();
        });
    }

    // As generate_all, in the same way.
    [[nodiscard]] std::future<Result<std::vector<Completion>>> generate_all_async(const Request &request) {
        return std::async(std::launch::async, [requested = stream(request)]() mutable -> Result<std::vector<Completion>> {
            if (!requested) return requested.error();
            return requested->collect_all();
        });
    }

    // Takes over a sequence: that of a request that is kept (Output::sequence, Completion::sequence), or one that was released.
    [[nodiscard]] Sequence sequence(uint64_t id) const noexcept { return Sequence(known(), id); }

    // Makes an idle sequence of what was exported, in this or another process. Resumed with Resume::go_on it goes on with the same
    // bits, on a machine that computes the same: SequenceInfo::inexact is 0 then. Its outputs go to `queue`: one of this engine's.
    Result<Sequence> import_sequence(Span<const uint8_t> blob, const QueueView &queue) {
        const auto named = queue.named();
        if (!named) return named.error();
        return import_sequence(blob, *named);
    }

    // The same; its outputs go to the engine's own queue.
    Result<Sequence> import_sequence(Span<const uint8_t> blob) { return import_sequence(blob, nullptr); }

    // Computes a prompt, from the next step on, and keeps its blocks for the requests that begin with the same tokens.
    Result<Pin> pin(const Prefix &prefix) {
        uint64_t id = 0;
        const pllm_pin c = detail::c_pin(prefix);
        if (Status pinned = detail::status(pllm_prefix_pin(native(), &c, &id)); !pinned) return pinned.error();
        return Pin(known(), id);
    }

    Result<std::vector<uint32_t>> tokenize(std::string_view text, bool add_special = true) const {
        auto tokens = detail::made<pllm_tokens, pllm_tokens_free>([&](pllm_tokens **out) {
            return pllm_engine_tokenize(native(), text.data(), text.size(), add_special ? PLLM_TEXT_ADD_SPECIAL : 0, out);
        });
        if (!tokens) return tokens.error();
        const auto ids = detail::view(pllm_tokens_data(tokens->get()), pllm_tokens_len(tokens->get()));
        return std::vector<uint32_t>(ids.begin(), ids.end());
    }

    Result<std::string> detokenize(Span<const uint32_t> tokens, bool skip_special = true) const {
        return detail::copied(detail::made<pllm_bytes, pllm_bytes_free>([&](pllm_bytes **out) {
            return pllm_engine_detokenize(native(), tokens.data(), tokens.size(), skip_special ? PLLM_TEXT_SKIP_SPECIAL : 0, out);
        }));
    }

    // Renders a conversation (JSON, as pllm_engine_render_chat describes it) with the model's chat template. Its request is
    // made with add_special = false.
    Result<std::string> render_chat(std::string_view messages_json) const {
        return detail::copied(detail::made<pllm_bytes, pllm_bytes_free>([&](pllm_bytes **out) {
            return pllm_engine_render_chat(native(), messages_json.data(), messages_json.size(), out);
        }));
    }

    // For what this header does not offer.
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

    Result<Admission> admit(const Request &request, const pllm_queue *queue) const {
        detail::CRequest request_c(request);
        auto c = detail::filled<pllm_admission>(
            [&](pllm_admission *out) { return pllm_engine_admit(native(), request_c.to(queue), out); });
        if (!c) return c.error();
        const std::optional<Seconds> first_token =
            c->first_token_seconds < 0 ? std::nullopt : std::optional<Seconds>(c->first_token_seconds);
        return Admission{c->admits != 0, c->fits_now != 0, first_token, c->waiting_requests, c->waiting_tokens};
    }

    Result<Sequence> import_sequence(Span<const uint8_t> blob, const pllm_queue *queue) {
        uint64_t id = 0;
        Status imported = detail::status(pllm_sequence_import(native(), blob.data(), blob.size(), queue, &id));
        if (!imported) return imported.error();
        return Sequence(known(), id);
    }

    [[nodiscard]] const detail::EngineRef &known() const noexcept { return engine_.get_deleter().known; }

    std::unique_ptr<pllm_engine, detail::FreeEngine> engine_;
};

}  // inline namespace
}  // namespace pagedllm

#endif  // PAGEDLLM_HPP
