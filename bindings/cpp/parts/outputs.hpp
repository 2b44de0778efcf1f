// ---- results ------------------------------------------------------------------------------------

//: alias Plan

//: alias Step

//: alias Stats

//: alias SequenceInfo

//: alias Logprob

// Time in seconds, as the library measures it.
using Seconds = std::chrono::duration<double>;

//: doc Admission
struct Admission {
    //: fields Admission
};

// Times of a sequence from the call that added, resumed or forked it. 0 if the event did not occur.
struct Timing {
    //: fields Timing
};

// Result of Options::packed_path.
//: enum Packed

//: doc ModelInfo
struct ModelInfo {
    //: fields ModelInfo
};

// Reason why a sequence ended. A newer library can return values without a name here.
//: enum FinishReason

// What ended a sequence whose reason is FinishReason::stop. A newer library can return values
// without a name here.
//: enum StopReason

// Kind of a KV event. A newer library can return values without a name here.
//: enum KvEventKind

// Place of a KV block. A newer library can return values without a name here.
//: enum KvMedium

//: doc KvEvent
struct KvEvent {
    //: fields KvEvent
};

namespace detail {

//: conversion Timing

//: conversion KvEvent

//: conversion Admission

//: conversion ModelInfo

}  // namespace detail

// An output of one sequence: new tokens, new text, or its end. A view; valid as long as its
// Outputs.
struct Output {
    //: fields Output

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
        //: initializers Output
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
    //: fields Completion

    // Adds the next output.
    void add(const Output &output, OutputKind kind) {
        // An exported state and the progress of the prompt are not part of the text.
        if (!output.sequence_state.empty() || output.computed_tokens > 0) return;
        if (kind != OutputKind::delta) {             // this output has everything so far
            //: clear Completion
        }
        //: add Completion
        if (output.error_code != Code{} && status) status = Error{output.error_code, std::string(output.error_message)};
    }

private:
    template <class T>
    static void append(std::vector<T> &to, Span<const T> more) {
        to.insert(to.end(), more.begin(), more.end());
    }
};
