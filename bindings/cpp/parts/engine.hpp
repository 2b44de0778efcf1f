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
