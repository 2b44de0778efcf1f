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
 * Ownership. Engine, Queue, Outputs and Stream are move-only and free what they own. One that has been moved from may be
 * destroyed and assigned to; its calls answer Code::invalid_argument, its ranges are empty.
 *
 * Views. std::string_view and Span going in need to live only during the call. Coming out, they live as long as what they came
 * from: an Output as its Outputs, an Info as its Engine.
 *
 * Threads. An engine computes on a thread of its own, asleep while there is nothing to do, unless Options::host_steps is set. Any
 * thread may call anything on one Engine or Queue at any time. A Stream and an Outputs are for one thread at a time. Moving,
 * assigning or destroying an object while another call on it is under way is the caller's mistake, as with any C++ object.
 * Queues, streams and outputs may outlive their engine: what was under way ends as aborted, what comes after as Code::closed.
 */

#ifndef PAGEDLLM_HPP
#define PAGEDLLM_HPP

#include <pagedllm.h>

#include <algorithm>
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

// ---- what goes in ----------------------------------------------------------------------------------------------------

enum class Dtype : uint32_t { automatic = PLLM_DTYPE_AUTO, f32 = PLLM_DTYPE_F32, bf16 = PLLM_DTYPE_BF16 };

enum class Isa : uint32_t {
    automatic = PLLM_ISA_AUTO,
    portable = PLLM_ISA_PORTABLE,
    avx2 = PLLM_ISA_AVX2,
    avx512 = PLLM_ISA_AVX512,
};

// How an engine is made; each field as in pllm_engine_options, which has the defaults.
struct Options {
    std::string model_path;
    std::string device;  // empty: the library's default
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
    // False: Engine::create also starts the engine's own thread. True: only what the host steps is computed.
    bool host_steps = false;

    // Told (bytes of weights read, bytes in all) on the thread that calls Engine::create; false cancels. What it throws cancels,
    // too, and comes out of Engine::create.
    std::function<bool(uint64_t done, uint64_t total)> progress = nullptr;
};

// How a request chooses its tokens and when it ends; each field as in pllm_sampling, which has the defaults.
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
};

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
};

namespace detail {

// The C struct of what it was made from, which outlives it.
inline pllm_engine_options c_options(const Options &options) {
    pllm_engine_options c = options_defaults();
    c.model_path = options.model_path.data();
    c.model_path_len = options.model_path.size();
    if (!options.device.empty()) {
        c.device = options.device.data();
        c.device_len = options.device.size();
    }
    c.kv_bytes = options.kv_bytes;
    c.seed = options.seed;
    c.block_size = options.block_size;
    c.kv_dtype = static_cast<uint32_t>(options.kv_dtype);
    c.max_model_len = options.max_model_len;
    c.max_batch_tokens = options.max_batch_tokens;
    c.max_seqs = options.max_seqs;
    c.prefill_chunk = options.prefill_chunk;
    c.threads = options.threads;
    c.isa = static_cast<uint32_t>(options.isa);
    c.queue_capacity = options.queue_capacity;
    c.flags = options.skip_tokenizer ? PLLM_ENGINE_SKIP_TOKENIZER : 0;
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

// The C structs of a request, which outlives them.
class CRequest {
public:
    explicit CRequest(const Request &request) : request_(request_defaults()), sampling_(sampling_defaults()) {
        // An empty prompt is one, too: NULL would say that there is none.
        static constexpr uint32_t no_tokens[1] = {};
        if (const auto *text = std::get_if<std::string_view>(&request.prompt)) {
            request_.prompt = text->data() ? text->data() : "";
            request_.prompt_len = text->size();
        } else if (const auto *tokens = std::get_if<Span<const uint32_t>>(&request.prompt)) {
            request_.prompt_tokens = tokens->data() ? tokens->data() : no_tokens;
            request_.prompt_tokens_len = tokens->size();
        }
        request_.user_data = request.user_data;
        request_.n = request.n;
        request_.text_flags =
            flag(request.add_special, PLLM_TEXT_ADD_SPECIAL) | flag(request.skip_special, PLLM_TEXT_SKIP_SPECIAL);
        request_.sampling = &sampling_;
        sample(request.sampling);
    }
    CRequest(const CRequest &) = delete;
    CRequest &operator=(const CRequest &) = delete;

    [[nodiscard]] const pllm_request *to(const pllm_queue *queue) noexcept {
        request_.queue = queue;
        return &request_;
    }

private:
    static uint32_t flag(bool on, uint32_t bit) { return on ? bit : 0; }

    void sample(const Sampling &sampling) {
        sampling_.temperature = sampling.temperature;
        sampling_.top_p = sampling.top_p;
        sampling_.min_p = sampling.min_p;
        sampling_.top_k = sampling.top_k;
        sampling_.max_tokens = sampling.max_tokens;
        sampling_.min_tokens = sampling.min_tokens;
        sampling_.seed = sampling.seed.value_or(0);
        sampling_.flags = flag(sampling.seed.has_value(), PLLM_SAMPLING_SEED) |
                          flag(sampling.ignore_eos, PLLM_SAMPLING_IGNORE_EOS) | flag(sampling.logprobs, PLLM_SAMPLING_LOGPROBS);
        for (const std::string &stop : sampling.stop) {
            stops_.push_back(stop.data());
            stop_lens_.push_back(stop.size());
        }
        sampling_.stop = stops_.data();
        sampling_.stop_lens = stop_lens_.data();
        sampling_.stop_count = stops_.size();
        sampling_.stop_token_ids = sampling.stop_token_ids.data();
        sampling_.stop_token_ids_len = sampling.stop_token_ids.size();
    }

    pllm_request request_;
    pllm_sampling sampling_;
    std::vector<const char *> stops_;
    std::vector<uint64_t> stop_lens_;
};

}  // namespace detail

// ---- what comes out --------------------------------------------------------------------------------------------------

// Plain numbers, as pagedllm.h describes them.
using Plan = pllm_plan;
using Step = pllm_step;
using Stats = pllm_stats;

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
};

enum class FinishReason : uint32_t {
    none = PLLM_FINISH_NONE,
    stop = PLLM_FINISH_STOP,
    length = PLLM_FINISH_LENGTH,
    abort = PLLM_FINISH_ABORT,
    error = PLLM_FINISH_ERROR,
};

// News of one request: new tokens, new text, or its end. It is a view; it lives as long as its Outputs.
struct Output {
    uint64_t request;
    uint64_t sequence;
    uint64_t user_data;
    Span<const uint32_t> tokens;
    Span<const float> logprobs;  // one per token; empty where the request did not ask for them
    std::string_view text;       // never half a character; it may lag behind the tokens
    FinishReason finish;         // anything but none makes this the last one
    Code error_code;             // this and the message where finish is error, and where the engine was freed; else 0
    std::string_view error_message;
    uint64_t prompt_tokens;
    uint64_t generated_tokens;  // so far
    uint32_t index;

    explicit Output(const pllm_output &record) noexcept : Output(0, detail::known(record)) {}

    [[nodiscard]] bool is_last() const noexcept { return finish != FinishReason::none; }

private:
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
          index(c.index) {}
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

// All that came of one request.
struct Completion {
    std::string text;
    std::vector<uint32_t> tokens;
    std::vector<float> logprobs;  // one per token, where the request asked for them
    FinishReason finish = FinishReason::none;
    uint64_t prompt_tokens = 0;
    uint64_t generated_tokens = 0;
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
    explicit Queue(Owned owned) noexcept : QueueView(owned.get()), owned_(std::move(owned)) {}

    Owned owned_;
};

// One request and its outputs, as they come:
//
//     auto stream = engine.stream({"Once upon a time"}).value();
//     for (pagedllm::Output output : stream) std::cout << output.text << std::flush;
//     stream.status().value();
//
// Destroying it before the end aborts the request, at the engine's next step. Reading waits for what the engine's own thread
// computes, or another one of the host's. Moving a stream ends the use of its iterators.
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
        while (!ended_) {
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

    // What went wrong, if anything did so far. A request that was aborted went well.
    [[nodiscard]] const Status &status() const noexcept { return status_; }

    // Its id: what Engine::abort takes.
    [[nodiscard]] uint64_t request() const noexcept { return request_; }

    // Reads what is left, to the end.
    Result<Completion> collect() {
        Completion all;
        for (const Output &output : *this) {
            all.text += output.text;
            all.tokens.insert(all.tokens.end(), output.tokens.begin(), output.tokens.end());
            all.logprobs.insert(all.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
            all.finish = output.finish;
            all.prompt_tokens = output.prompt_tokens;
            all.generated_tokens = output.generated_tokens;
        }
        if (!status_) return status_.error();
        return all;
    }

private:
    friend class Engine;
    Stream(Queue queue, uint64_t request) noexcept : queue_(std::move(queue)), request_(request) {}

    std::optional<Output> read(const Output &output) {
        ended_ = output.is_last();
        if (output.error_code != Code{}) status_ = Error{output.error_code, std::string(output.error_message)};
        return output;
    }

    std::nullopt_t fail(const Error &error) {
        ended_ = true;
        status_ = error;
        return std::nullopt;
    }

    Queue queue_;
    uint64_t request_;
    Outputs batch_;
    size_t read_ = 0;  // of the batch
    bool ended_ = false;
    Status status_;
};

// ---- the engine ------------------------------------------------------------------------------------------------------

// An engine: one model and its requests. Destroying it ends them all.
class Engine {
public:
    // A dry run of create: what would be allocated, without allocating it.
    static Result<Plan> plan(const Options &options) {
        const pllm_engine_options c = detail::c_options(options);
        return detail::filled<Plan>([&](Plan *out) { return pllm_engine_plan(&c, out); });
    }

    // Opens a model and makes an engine that serves it.
    static Result<Engine> create(const Options &options) {
        if (Status same = check_abi(); !same) return same.error();
        pllm_engine_options c = detail::c_options(options);
        detail::ProgressCall progress(options);
        progress.install(c);
        auto engine = detail::made<pllm_engine, pllm_engine_free>([&](pllm_engine **out) { return pllm_engine_create(&c, out); });
        progress.rethrow();
        if (!engine) return engine.error();
        Engine made(std::move(*engine));
        if (Status started = options.host_steps ? Status() : made.start(); !started) return started.error();
        return made;
    }

    // Takes over an engine that was made in C, or by a library that makes its own. It is not started here.
    [[nodiscard]] static Engine adopt(pllm_engine *engine) noexcept { return Engine(Owned(engine)); }

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
                    c->threads};
    }

    Result<Stats> stats() const {
        return detail::filled<Stats>([&](Stats *out) { return pllm_engine_stats(native(), out); });
    }

    // Adds a request and returns its id. Its outputs go to `queue`: one of this engine's.
    Result<uint64_t> add(const Request &request, const QueueView &queue) {
        // NULL would mean the engine's own queue.
        if (native() && !queue.native()) return Error{Code::invalid_argument, "the queue has been moved from: name another"};
        uint64_t id = 0;
        detail::CRequest c(request);
        Status added = detail::status(pllm_engine_add_request(native(), c.to(queue.native()), &id));
        if (!added) return added.error();
        return id;
    }

    // Adds a request; its outputs go to the engine's own queue.
    Result<uint64_t> add(const Request &request) { return add(request, queue()); }

    // Ends a request at the next step; its last output says FinishReason::abort.
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
    Result<Queue> create_queue(uint64_t capacity) {
        auto queue = detail::made<pllm_queue, pllm_queue_free>(
            [&](pllm_queue **out) { return pllm_queue_create(native(), capacity, out); });
        if (!queue) return queue.error();
        return Queue(std::move(*queue));
    }

    // Adds a request with a queue of its own, and reads it as it comes. It pauses while `capacity` outputs wait to be read.
    Result<Stream> stream(const Request &request, uint64_t capacity = PLLM_QUEUE_CAPACITY) {
        Result<Queue> queue = create_queue(capacity);
        if (!queue) return queue.error();
        Result<uint64_t> id = add(request, *queue);
        if (!id) return id.error();
        return Stream(std::move(*queue), *id);
    }

    // A request from beginning to end, waiting for it. Any number of threads may be in it at once.
    Result<Completion> generate(const Request &request) {
        Result<Stream> requested = stream(request);
        if (!requested) return requested.error();
        return requested->collect();
    }

    // As generate, in a thread of its own (std::async): one for each call under way, which sleeps while the request runs. For
    // many at once, give them queues and an event loop. The request is added before this returns, so what it views may go.
    // Destroying the future waits for the end; so, to be rid of it sooner, use stream.
    [[nodiscard]] std::future<Result<Completion>> generate_async(const Request &request) {
        return std::async(std::launch::async, [requested = stream(request)]() mutable -> Result<Completion> {
            if (!requested) return requested.error();
            return requested->collect();
        });
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
    using Owned = detail::Handle<pllm_engine, pllm_engine_free>;
    explicit Engine(Owned engine) noexcept : engine_(std::move(engine)) {}

    Owned engine_;
};

}  // inline namespace
}  // namespace pagedllm

#endif  // PAGEDLLM_HPP
