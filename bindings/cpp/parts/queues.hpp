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
