    // ---- results --------------------------------------------------------------------------------

    /** A token and its log probability in the model's own distribution. */
    public record Logprob(int token, float logprob) {}

    /** Everything that one sequence generated, and its last output. */
    public record Completion(String text, int[] tokens, float[] logprobs, Output last) {}

    // generated: results_classes

    private static MemorySegment sized(MemorySegment c, long at, long bytes) {
        return c.get(ADDRESS, at).reinterpret(bytes);
    }

    private static boolean isNull(MemorySegment c, long at) {
        return c.get(ADDRESS, at).equals(MemorySegment.NULL);
    }

    private static byte[] bytes(MemorySegment c, long at, long lenAt) {
        return isNull(c, at) ? new byte[0] : sized(c, at, c.get(JAVA_LONG, lenAt)).toArray(JAVA_BYTE);
    }

    private static String text(MemorySegment c, long at, long lenAt) {
        return new String(bytes(c, at, lenAt), StandardCharsets.UTF_8);
    }

    private static int[] ints(MemorySegment c, long at, long lenAt) {
        return isNull(c, at) ? new int[0] : sized(c, at, 4 * c.get(JAVA_LONG, lenAt)).toArray(JAVA_INT);
    }

    // Returns null for NULL.
    private static float[] floats(MemorySegment c, long at, long lenAt) {
        return isNull(c, at) ? null : sized(c, at, 4 * c.get(JAVA_LONG, lenAt)).toArray(JAVA_FLOAT);
    }

    // Returns the most probable tokens at each of the positions, or null for NULL.
    private static Logprob[][] candidates(MemorySegment c, long at, long lenAt, long positionsAt) {
        if (isNull(c, at)) return null;
        int positions = (int) c.get(JAVA_LONG, positionsAt);
        int each = positions == 0 ? 0 : (int) c.get(JAVA_LONG, lenAt) / positions;
        MemorySegment all = sized(c, at, 8L * positions * each);
        Logprob[][] result = new Logprob[positions][each];
        for (int i = 0; i < positions * each; i++) {
            result[i / each][i % each] = new Logprob(all.get(JAVA_INT, 8L * i), all.get(JAVA_FLOAT, 8L * i + 4));
        }
        return result;
    }

    // Returns the 32 bytes of a hash, or null for NULL.
    private static byte[] hash(MemorySegment c, long at) {
        return isNull(c, at) ? null : sized(c, at, 32).toArray(JAVA_BYTE);
    }

    // Returns a struct of the library as this file knows it. Fields that an older library lacks are 0.
    private static MemorySegment known(MemorySegment pointer, long size) {
        long has = pointer.reinterpret(8).get(JAVA_LONG, 0);
        if (has >= size) return pointer.reinterpret(size);
        MemorySegment padded = Arena.ofAuto().allocate(size, 8);
        return padded.copyFrom(pointer.reinterpret(has));
    }

    // Returns the struct that a call fills, as `read` converts it.
    private static <T> T filled(long size, Function<MemorySegment, T> read, Function<MemorySegment, MemorySegment> call) {
        try (Arena arena = Arena.ofConfined()) {
            MemorySegment c = arena.allocate(size, 8);
            c.set(JAVA_LONG, 0, size);
            check(call.apply(c));
            return read.apply(c);
        }
    }

    // Returns the pointer or number that a call writes to its last parameter.
    private static MemorySegment created(Arena arena, Function<MemorySegment, MemorySegment> call) {
        MemorySegment out = arena.allocate(ADDRESS);
        check(call.apply(out));
        return out.get(ADDRESS, 0);
    }

    private static long id(Arena arena, Function<MemorySegment, MemorySegment> call) {
        MemorySegment out = arena.allocate(JAVA_LONG);
        check(call.apply(out));
        return out.get(JAVA_LONG, 0);
    }

    // Returns and frees a pllm_bytes.
    private static byte[] takenBytes(MemorySegment bytes) {
        byte[] copy = Native.bytes_data(bytes).reinterpret(Native.bytes_len(bytes)).toArray(JAVA_BYTE);
        Native.bytes_free(bytes);
        return copy;
    }

    private static String takenText(Function<MemorySegment, MemorySegment> call) {
        try (Arena arena = Arena.ofConfined()) {
            return new String(takenBytes(created(arena, call)), StandardCharsets.UTF_8);
        }
    }
