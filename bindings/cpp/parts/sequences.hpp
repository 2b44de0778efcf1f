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

//: c_struct Fork

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
