    // ---- options --------------------------------------------------------------------------------

    /** A constraint on the output. */
    public static final class Grammar {
        private final int kind;
        private final String text;
        private final List<String> choices;

        private Grammar(int kind, String text, List<String> choices) {
            this.kind = kind;
            this.text = text;
            this.choices = choices;
        }

        /** A JSON text that the schema, itself a JSON text, describes. */
        public static Grammar jsonSchema(String schema) {
            return new Grammar(GRAMMAR_JSON_SCHEMA, schema, List.of());
        }

        /** Any JSON object. */
        public static Grammar jsonObject() {
            return new Grammar(GRAMMAR_JSON_OBJECT, null, List.of());
        }

        /** A text that the regular expression, in the syntax of Python, matches as a whole. */
        public static Grammar regex(String expression) {
            return new Grammar(GRAMMAR_REGEX, expression, List.of());
        }

        /** One of the texts. */
        public static Grammar choice(List<String> texts) {
            return new Grammar(GRAMMAR_CHOICE, null, List.copyOf(texts));
        }

        /** A text that the Lark grammar describes. */
        public static Grammar lark(String grammar) {
            return new Grammar(GRAMMAR_LARK, grammar, List.of());
        }

        private void putInto(MemorySegment c, long kindAt, long textAt, long lenAt, long choicesAt, long lensAt, long countAt, Arena arena) {
            c.set(JAVA_INT, kindAt, kind);
            putText(c, textAt, lenAt, text, arena);
            putTexts(c, choicesAt, lensAt, countAt, choices, arena);
        }
    }

    // generated: grammar_kinds

    /** Reports the bytes of weights that have been read. The result false cancels the loading. */
    @FunctionalInterface
    public interface Progress {
        boolean report(long done, long total);
    }

    // generated: options_classes

    private static void putFlag(MemorySegment c, long at, int flag, boolean on) {
        c.set(JAVA_INT, at, on ? c.get(JAVA_INT, at) | flag : c.get(JAVA_INT, at) & ~flag);
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    // Copies bytes. The copy of an empty array is not NULL.
    private static MemorySegment copy(byte[] bytes, Arena arena) {
        MemorySegment to = arena.allocate(Math.max(bytes.length, 1));
        MemorySegment.copy(bytes, 0, to, JAVA_BYTE, 0, bytes.length);
        return to;
    }

    private static MemorySegment copy(int[] numbers, Arena arena) {
        MemorySegment to = arena.allocate(Math.max(numbers.length, 1) * 4L, 4);
        MemorySegment.copy(numbers, 0, to, JAVA_INT, 0, numbers.length);
        return to;
    }

    private static void putText(MemorySegment c, long at, long lenAt, String text, Arena arena) {
        if (text != null) putBytes(c, at, lenAt, utf8(text), arena);
    }

    private static void putBytes(MemorySegment c, long at, long lenAt, byte[] bytes, Arena arena) {
        if (bytes == null) return;
        c.set(ADDRESS, at, copy(bytes, arena));
        c.set(JAVA_LONG, lenAt, bytes.length);
    }

    private static void putInts(MemorySegment c, long at, long lenAt, int[] numbers, Arena arena) {
        if (numbers == null) return;
        c.set(ADDRESS, at, copy(numbers, arena));
        c.set(JAVA_LONG, lenAt, numbers.length);
    }

    private static void putTexts(MemorySegment c, long at, long lensAt, long countAt, List<String> texts, Arena arena) {
        if (texts == null) return;
        MemorySegment pointers = arena.allocate(ADDRESS, Math.max(texts.size(), 1));
        MemorySegment lens = arena.allocate(JAVA_LONG, Math.max(texts.size(), 1));
        for (int i = 0; i < texts.size(); i++) {
            byte[] bytes = utf8(texts.get(i));
            pointers.setAtIndex(ADDRESS, i, copy(bytes, arena));
            lens.setAtIndex(JAVA_LONG, i, bytes.length);
        }
        c.set(ADDRESS, at, pointers);
        c.set(ADDRESS, lensAt, lens);
        c.set(JAVA_LONG, countAt, texts.size());
    }

    private static void putTokenLists(MemorySegment c, long at, long lenAt, List<int[]> lists, Arena arena) {
        if (lists.isEmpty()) return;
        MemorySegment to = arena.allocate(16L * lists.size(), 8);
        for (int i = 0; i < lists.size(); i++) putInts(to, 16L * i, 16L * i + 8, lists.get(i), arena);
        c.set(ADDRESS, at, to);
        c.set(JAVA_LONG, lenAt, lists.size());
    }

    private static void putBiases(MemorySegment c, long at, long lenAt, Map<Integer, Float> biases, Arena arena) {
        if (biases.isEmpty()) return;
        MemorySegment to = arena.allocate(8L * biases.size(), 4);
        long place = 0;
        for (Map.Entry<Integer, Float> bias : biases.entrySet()) {
            to.set(JAVA_INT, place, bias.getKey());
            to.set(JAVA_FLOAT, place + 4, bias.getValue());
            place += 8;
        }
        c.set(ADDRESS, at, to);
        c.set(JAVA_LONG, lenAt, biases.size());
    }
