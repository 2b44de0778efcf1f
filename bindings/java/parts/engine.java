    // ---- engines --------------------------------------------------------------------------------

    /** An engine: one model, its KV pool and its requests. Closing it ends every request. */
    public static final class Engine implements AutoCloseable {
        private final Handle handle;
        private final Queue queue;

        private Engine(MemorySegment engine) {
            handle = new Handle("engine", engine, () -> Native.engine_free(engine));
            queue = new Queue(handle, false);
        }

        /** Loads a model and creates an engine for it, with a thread that steps it. */
        public static Engine open(Options options) {
            return open(options, null);
        }

        /** As open. `progress` is called on this thread while weights are loaded; what it throws is thrown. */
        public static Engine open(Options options, Progress progress) {
            Engine engine = openWithHostSteps(options, progress);
            try {
                engine.start();
                return engine;
            } catch (RuntimeException error) {
                engine.close();
                throw error;
            }
        }

        /** As open, without a thread: the program calls step(). */
        public static Engine openWithHostSteps(Options options, Progress progress) {
            ProgressCall call = new ProgressCall(progress);
            try (Arena arena = Arena.ofConfined()) {
                return Budget.during(options.budget, budget -> {
                    MemorySegment c = options.toC(arena);
                    c.set(ADDRESS, Options.BUDGET_OFFSET, budget);
                    if (progress != null) c.set(ADDRESS, Options.PROGRESS_OFFSET, call.stub(arena));
                    return new Engine(created(arena, out -> Native.engine_create(c, out)));
                });
            } catch (PagedLlmException error) {
                if (call.thrown != null) throw call.thrown;
                throw error;
            }
        }

        /** Computes what open would allocate, without allocating it. */
        public static Plan plan(Options options) {
            try (Arena arena = Arena.ofConfined()) {
                return Budget.during(options.budget, budget -> {
                    MemorySegment c = options.toC(arena);
                    c.set(ADDRESS, Options.BUDGET_OFFSET, budget);
                    return filled(Plan.SIZE, Plan::new, out -> Native.engine_plan(c, out));
                });
            }
        }

        /** Frees the engine: ends its requests, joins its threads and returns its memory. */
        @Override
        public void close() {
            handle.close();
        }

        private void call(Function<MemorySegment, MemorySegment> call) {
            handle.during(engine -> {
                check(call.apply(engine));
                return null;
            });
        }

        // ---- requests

        /** Adds a request with outputs to request.queue, or to the engine's own queue. Returns its id. */
        public long add(Request request) {
            return add(request, request.queue);
        }

        private long add(Request request, Queue queue) {
            return withRequest(request, queue, (engine, c, arena) -> id(arena, out -> Native.engine_add_request(engine, c, out)));
        }

        /** Predicts admission and time to first token for a request, without adding it. */
        public Admission predictAdmission(Request request) {
            return withRequest(request, request.queue,
                    (engine, c, arena) -> filled(Admission.SIZE, Admission::new, out -> Native.engine_predict_admission(engine, c, out)));
        }

        private interface RequestCall<T> {
            T apply(MemorySegment engine, MemorySegment request, Arena arena);
        }

        private <T> T withRequest(Request request, Queue queue, RequestCall<T> call) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment c = request.toC(arena);
                    return Queue.during(queue, pointer -> {
                        c.set(ADDRESS, Request.QUEUE_OFFSET, pointer);
                        return call.apply(engine, c, arena);
                    });
                }
            });
        }

        /** Aborts a request at the next step. */
        public void abort(long request) {
            call(engine -> Native.engine_abort(engine, request));
        }

        private void abortIfRunning(long request) {
            try {
                abort(request);
            } catch (PagedLlmException error) {
                if (error.code != Code.NOT_FOUND && error.code != Code.CLOSED) throw error;
            }
        }

        /** Adds a request with a queue of its own and returns its outputs as a stream. */
        public Stream stream(Request request) {
            Queue own = createQueue(Native.QUEUE_CAPACITY);
            try {
                return new Stream(this, own, add(request, own), request);
            } catch (RuntimeException error) {
                own.close();
                throw error;
            }
        }

        /** Runs a request and waits for its end. Returns a completion for each result. */
        public List<Completion> generateAll(Request request) {
            try (Stream stream = stream(request)) {
                return stream.collect();
            }
        }

        /** As generateAll, for one result. */
        public Completion generate(Request request) {
            if (request.n != 1) throw new IllegalArgumentException("n is " + request.n + "; use generateAll for several results");
            return generateAll(request).get(0);
        }

        // ---- steps and queues

        /** Runs one iteration. */
        public Step step() {
            return handle.during(engine -> filled(Step.SIZE, Step::new, out -> Native.engine_step(engine, out)));
        }

        /** Starts the engine's own thread, which steps it. */
        public void start() {
            call(Native::engine_start);
        }

        /** Stops the engine's own thread after the current step. */
        public void stop() {
            call(Native::engine_stop);
        }

        /** Returns the engine's own queue. Closing it has no effect. */
        public Queue queue() {
            return queue;
        }

        /** Returns the budget of the KV pool: options.budget or the engine's own. */
        public Budget budget() {
            return new Budget(handle, false);
        }

        /** Creates a queue. While it holds `capacity` outputs, the requests that write to it pause. */
        public Queue createQueue(long capacity) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment created = created(arena, out -> Native.queue_create(engine, capacity, out));
                    return new Queue(new Handle("queue", created, () -> Native.queue_free(created)), true);
                }
            });
        }

        // ---- sequences

        /** Creates sequences with the first tokens of this one. Returns their ids. */
        public long[] fork(long sequence, ForkOptions how) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment c = how.toC(arena);
                    // The library refuses a larger n before it writes an id.
                    long room = Math.max(1, Math.min(Integer.toUnsignedLong(how.n), stats().blocksTotal));
                    MemorySegment ids = arena.allocate(JAVA_LONG, room);
                    return Queue.during(how.queue, queue -> {
                        c.set(ADDRESS, ForkOptions.QUEUE_OFFSET, queue);
                        check(Native.sequence_fork(engine, sequence, c, ids));
                        return ids.toArray(JAVA_LONG);
                    });
                }
            });
        }

        /** Appends tokens to a sequence. */
        public void append(long sequence, int[] tokens) {
            call(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    return Native.sequence_append(engine, sequence, copy(tokens, arena), tokens.length);
                }
            });
        }

        /** Truncates a sequence to its first `length` tokens. */
        public void rewind(long sequence, long length) {
            call(engine -> Native.sequence_rewind(engine, sequence, length));
        }

        /** Continues an idle sequence, with outputs to how.queue, or to the queue it had. */
        public void resume(long sequence, Resume how) {
            call(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment c = how.toC(arena);
                    return Queue.during(how.queue, queue -> {
                        c.set(ADDRESS, Resume.QUEUE_OFFSET, queue);
                        return Native.sequence_resume(engine, sequence, c);
                    });
                }
            });
        }

        /** Frees a sequence. */
        public void free(long sequence) {
            call(engine -> Native.sequence_free(engine, sequence));
        }

        public SequenceInfo sequenceInfo(long sequence) {
            return handle.during(engine -> filled(SequenceInfo.SIZE, SequenceInfo::new, out -> Native.sequence_get_info(engine, sequence, out)));
        }

        /** Writes the state of a sequence to a queue, as an output with sequenceState. null: to the queue of its other outputs. */
        public void exportSequence(long sequence, Queue to) {
            call(engine -> Queue.during(to, queue -> Native.sequence_export(engine, sequence, queue)));
        }

        /** Creates an idle sequence from an exported state, with outputs to `queue`, or to the engine's own. Returns its id. */
        public long importSequence(byte[] state, Queue queue) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment copied = copy(state, arena);
                    return Queue.during(queue, to -> id(arena, out -> Native.sequence_import(engine, copied, state.length, to, out)));
                }
            });
        }

        /** Computes a prompt and keeps its blocks in the prefix cache. Returns the id of the pin. */
        public long pin(Pin prefix) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment c = prefix.toC(arena);
                    return id(arena, out -> Native.prefix_pin(engine, c, out));
                }
            });
        }

        public void unpin(long pin) {
            call(engine -> Native.prefix_unpin(engine, pin));
        }

        // ---- text

        /** Returns the tokens of a text, with the special tokens that the tokenizer adds to a prompt if addSpecial. */
        public int[] tokenize(String text, boolean addSpecial) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    byte[] bytes = utf8(text);
                    MemorySegment copied = copy(bytes, arena);
                    MemorySegment tokens = created(arena, out -> Native.engine_tokenize(engine, copied, bytes.length, addSpecial ? Native.ADD_SPECIAL : 0, out));
                    int[] ids = Native.tokens_data(tokens).reinterpret(4 * Native.tokens_len(tokens)).toArray(JAVA_INT);
                    Native.tokens_free(tokens);
                    return ids;
                }
            });
        }

        public String detokenize(int[] tokens, boolean skipSpecial) {
            return handle.during(engine -> takenText(out -> {
                try (Arena arena = Arena.ofConfined()) {
                    return Native.engine_detokenize(engine, copy(tokens, arena), tokens.length, skipSpecial ? Native.SKIP_SPECIAL : 0, out);
                }
            }));
        }

        /** Returns the bytes that a token contributes to a text. They can be a part of a character. */
        public byte[] tokenBytes(int token) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment out = arena.allocate(16, 8);
                    check(Native.engine_get_token_bytes(engine, token, out, out.asSlice(8)));
                    return bytes(out, 0, 8);
                }
            });
        }

        /** Renders a chat, as the JSON of pllm_engine_render_chat, with the model's chat template. */
        public String renderChat(String messagesJson) {
            return handle.during(engine -> takenText(out -> {
                try (Arena arena = Arena.ofConfined()) {
                    byte[] bytes = utf8(messagesJson);
                    return Native.engine_render_chat(engine, copy(bytes, arena), bytes.length, out);
                }
            }));
        }

        // ---- state

        /** Throws the error that has stopped the engine, if it has failed. */
        public void checkHealth() {
            call(Native::engine_health);
        }

        public ModelInfo modelInfo() {
            return handle.during(engine -> filled(ModelInfo.SIZE, ModelInfo::new, out -> Native.engine_get_model_info(engine, out)));
        }

        public Stats stats() {
            return handle.during(engine -> filled(Stats.SIZE, Stats::new, out -> Native.engine_get_stats(engine, out)));
        }

        /** Returns the numbers of stats() and histograms in the OpenMetrics text format. */
        public String metrics() {
            return handle.during(engine -> takenText(out -> Native.engine_get_metrics(engine, out)));
        }

        /**
         * Describes the engine after its current step as a JSON object: which sequences have which blocks, and what the last steps
         * computed. It has the first maxBlocks blocks of each tier and at most maxSequences sequences. pllm_engine_snapshot in the
         * C header describes the members.
         */
        public String snapshot(long maxBlocks, long maxSequences) {
            return handle.during(engine -> takenText(out -> Native.engine_snapshot(engine, maxBlocks, maxSequences, out)));
        }

        /** Takes the events of the prefix cache since the last call, waiting up to timeoutMs for the first one. */
        public List<KvEvent> pollKvEvents(int timeoutMs) {
            return events((engine, out) -> Native.engine_poll_kv_events(engine, timeoutMs, out));
        }

        /** Lists the blocks of the prefix cache as events. */
        public List<KvEvent> snapshotKvEvents() {
            return events(Native::engine_snapshot_kv_events);
        }

        private List<KvEvent> events(java.util.function.BinaryOperator<MemorySegment> call) {
            return handle.during(engine -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment batch = created(arena, out -> call.apply(engine, out));
                    List<KvEvent> events = new ArrayList<>();
                    for (long i = 0; i < Native.kv_events_len(batch); i++) events.add(new KvEvent(known(Native.kv_events_get(batch, i), KvEvent.SIZE)));
                    Native.kv_events_free(batch);
                    return events;
                }
            });
        }

        /** Computes the hashes of the full blocks of a prompt, 32 bytes each. */
        public byte[][] hashPrompt(Request request, int group) {
            return withRequest(request, null, (engine, c, arena) -> {
                byte[] all = takenBytes(created(arena, out -> Native.engine_hash_prompt(engine, c, group, out)));
                byte[][] hashes = new byte[all.length / 32][];
                for (int i = 0; i < hashes.length; i++) hashes[i] = Arrays.copyOfRange(all, 32 * i, 32 * (i + 1));
                return hashes;
            });
        }
    }

    // Calls Progress from C. An exception must not reach C, so it cancels the loading and is kept.
    private static final class ProgressCall {
        private static final MethodHandle REPORT = method();
        private final Progress progress;
        private RuntimeException thrown;

        ProgressCall(Progress progress) {
            this.progress = progress;
        }

        MemorySegment stub(Arena arena) {
            return Linker.nativeLinker().upcallStub(REPORT.bindTo(this), FunctionDescriptor.of(JAVA_INT, ADDRESS, JAVA_LONG, JAVA_LONG), arena);
        }

        int report(MemorySegment data, long done, long total) {
            try {
                return progress.report(done, total) ? 0 : 1;
            } catch (RuntimeException error) {
                thrown = error;
            } catch (Throwable error) {
                thrown = new IllegalStateException(error);
            }
            return 1;
        }

        private static MethodHandle method() {
            try {
                MethodType type = MethodType.methodType(int.class, MemorySegment.class, long.class, long.class);
                return MethodHandles.lookup().findVirtual(ProgressCall.class, "report", type);
            } catch (ReflectiveOperationException error) {
                throw new AssertionError(error);
            }
        }
    }

    /** Separates reasoning, content and tool calls of one response while it is generated. */
    public static final class ResponseParser implements AutoCloseable {
        private final Handle handle;

        /**
         * Creates a parser. The settings are the JSON of pllm_response_parser_create. Without an engine
         * (null), they must name a format. The parser does not need the engine later.
         */
        public ResponseParser(Engine engine, String settingsJson) {
            MemorySegment parser = engine == null ? create(MemorySegment.NULL, settingsJson) : engine.handle.during(pointer -> create(pointer, settingsJson));
            handle = new Handle("response parser", parser, () -> Native.response_parser_free(parser));
        }

        private static MemorySegment create(MemorySegment engine, String settings) {
            try (Arena arena = Arena.ofConfined()) {
                byte[] bytes = utf8(settings);
                MemorySegment copied = copy(bytes, arena);
                return created(arena, out -> Native.response_parser_create(engine, copied, bytes.length, out));
            }
        }

        /** Returns the deltas of the next piece as a JSON array, as a chat completion streams them. */
        public String feed(String text) {
            return handle.during(parser -> takenText(out -> {
                try (Arena arena = Arena.ofConfined()) {
                    byte[] bytes = utf8(text);
                    return Native.response_parser_feed(parser, copy(bytes, arena), bytes.length, out);
                }
            }));
        }

        /** Ends the response and returns the last deltas. */
        public String finish() {
            return handle.during(parser -> takenText(out -> Native.response_parser_finish(parser, out)));
        }

        @Override
        public void close() {
            handle.close();
        }
    }
