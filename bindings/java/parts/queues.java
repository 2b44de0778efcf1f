    // ---- queues ---------------------------------------------------------------------------------

    /** A queue of outputs. Closing it aborts the requests that write to it. */
    public static final class Queue implements AutoCloseable {
        private final Handle handle;
        private final boolean isOwned; // the engine's own queue is freed with the engine

        private Queue(Handle handle, boolean isOwned) {
            this.handle = handle;
            this.isOwned = isOwned;
        }

        private <T> T during(Function<MemorySegment, T> call) {
            return handle.during(pointer -> call.apply(isOwned ? pointer : Native.engine_queue(pointer)));
        }

        // Calls with the pointer of a queue, or with NULL.
        private static <T> T during(Queue queue, Function<MemorySegment, T> call) {
            return queue == null ? call.apply(MemorySegment.NULL) : queue.during(call);
        }

        /** Takes all outputs. Waits up to timeoutMs for the first one; -1 waits without limit. */
        public List<Output> poll(long timeoutMs) {
            return during(queue -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment batch = created(arena, out -> Native.queue_poll(queue, timeoutMs, out));
                    try {
                        return outputs(batch);
                    } finally {
                        Native.outputs_free(batch);
                    }
                }
            });
        }

        /** Takes all outputs without waiting. */
        public List<Output> poll() {
            return poll(0);
        }

        /** Returns an eventfd that is readable while the queue is not empty. The queue closes it. */
        public int eventFd() {
            return during(queue -> {
                try (Arena arena = Arena.ofConfined()) {
                    MemorySegment out = arena.allocate(JAVA_INT);
                    check(Native.queue_get_event_fd(queue, out));
                    return out.get(JAVA_INT, 0);
                }
            });
        }

        /** Frees the queue. Closing the queue of an engine has no effect. */
        @Override
        public void close() {
            if (isOwned) handle.close();
        }

        private static List<Output> outputs(MemorySegment batch) {
            int count = (int) Native.outputs_len(batch);
            List<Output> outputs = new ArrayList<>(count);
            for (int i = 0; i < count; i++) outputs.add(new Output(known(Native.outputs_get(batch, i), Output.SIZE)));
            return outputs;
        }
    }

    /**
     * A request and its outputs, in order. It ends when all sequences of the request have ended. Closing
     * it aborts the request. An output with an error throws it.
     */
    public static final class Stream implements AutoCloseable, Iterable<Output>, Iterator<Output> {
        private final Engine engine;
        private final Queue queue;
        private final long request;
        private final OutputKind kind;
        private int left;
        private Iterator<Output> batch = List.<Output>of().iterator();

        private Stream(Engine engine, Queue queue, long id, Request request) {
            this.engine = engine;
            this.queue = queue;
            this.request = id;
            this.left = request.n;
            this.kind = request.sampling == null ? OutputKind.DELTA : request.sampling.outputKind;
        }

        /** Returns the id of the request, for Engine.abort. */
        public long request() {
            return request;
        }

        @Override
        public Iterator<Output> iterator() {
            return this;
        }

        @Override
        public boolean hasNext() {
            return left > 0;
        }

        /** Waits for the next output. */
        @Override
        public Output next() {
            if (left <= 0) throw new NoSuchElementException("the request has ended");
            while (!batch.hasNext()) batch = queue.poll(-1).iterator();
            Output output = batch.next();
            if (output.request == request && output.isLast()) left--;
            if (output.error != null) throw output.error;
            return output;
        }

        /** Reads the remaining outputs. Returns a completion for each sequence, in the order of their indices. */
        public List<Completion> collect() {
            List<List<Output>> byIndex = new ArrayList<>();
            while (hasNext()) {
                Output output = next();
                while (byIndex.size() <= output.index) byIndex.add(new ArrayList<>());
                // A cumulative output has everything so far.
                if (kind == OutputKind.CUMULATIVE) byIndex.get(output.index).clear();
                byIndex.get(output.index).add(output);
            }
            return byIndex.stream().map(Stream::completion).toList();
        }

        private static Completion completion(List<Output> outputs) {
            StringBuilder text = new StringBuilder();
            outputs.forEach(output -> text.append(output.text));
            int[] tokens = outputs.stream().flatMapToInt(output -> Arrays.stream(output.tokens)).toArray();
            float[] logprobs = new float[tokens.length];
            int count = 0;
            for (Output output : outputs) {
                if (output.logprobs == null) continue;
                System.arraycopy(output.logprobs, 0, logprobs, count, output.logprobs.length);
                count += output.logprobs.length;
            }
            return new Completion(text.toString(), tokens, count > 0 ? logprobs : null, outputs.get(outputs.size() - 1));
        }

        @Override
        public void close() {
            // Another thread may wait in next(): it gets the last output of the aborted request.
            if (left > 0) engine.abortIfRunning(request);
            queue.close();
        }
    }
