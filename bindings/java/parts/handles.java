    // ---- handles --------------------------------------------------------------------------------

    // An object of the library. It is freed after close() when no call uses it.
    private static final class Handle {
        private final String what;
        private final MemorySegment pointer;
        private final Runnable free;
        private int uses;
        private boolean isClosed;

        Handle(String what, MemorySegment pointer, Runnable free) {
            this.what = what;
            this.pointer = pointer;
            this.free = free;
        }

        <T> T during(Function<MemorySegment, T> call) {
            synchronized (this) {
                if (isClosed) throw new PagedLlmException(Code.CLOSED, "the " + what + " is closed");
                uses++;
            }
            try {
                return call.apply(pointer);
            } finally {
                release();
            }
        }

        void close() {
            synchronized (this) {
                if (isClosed) return;
                isClosed = true;
                uses++;
            }
            release();
        }

        private void release() {
            boolean isLast;
            synchronized (this) {
                isLast = --uses == 0 && isClosed;
            }
            if (isLast) free.run();
        }
    }

    /** A memory budget that the KV pools of several engines share. */
    public static final class Budget implements AutoCloseable {
        private final Handle handle;
        private final boolean isOwned; // that of an engine is freed with the engine

        private Budget(Handle handle, boolean isOwned) {
            this.handle = handle;
            this.isOwned = isOwned;
        }

        private <T> T during(Function<MemorySegment, T> call) {
            return handle.during(pointer -> call.apply(isOwned ? pointer : Native.engine_budget(pointer)));
        }

        /** Creates a budget that resize can later raise to at most maxBytes (0: to bytes). */
        public static Budget create(long bytes, long maxBytes) {
            try (Arena arena = Arena.ofConfined()) {
                MemorySegment budget = created(arena, out -> Native.budget_create(bytes, maxBytes, out));
                return new Budget(new Handle("budget", budget, () -> Native.budget_free(budget)), true);
            }
        }

        public void resize(long bytes) {
            during(budget -> {
                check(Native.budget_resize(budget, bytes));
                return null;
            });
        }

        public BudgetInfo info() {
            return during(budget -> filled(BudgetInfo.SIZE, BudgetInfo::new, out -> Native.budget_get_info(budget, out)));
        }

        /** Frees the budget. Its engines keep what they have. Closing the budget of an engine has no effect. */
        @Override
        public void close() {
            if (isOwned) handle.close();
        }

        // Calls with the pointer of a budget, or with NULL.
        private static <T> T during(Budget budget, Function<MemorySegment, T> call) {
            return budget == null ? call.apply(MemorySegment.NULL) : budget.during(call);
        }
    }
