    // ---- errors ---------------------------------------------------------------------------------

    /** An error of the library: a code, and a message with the numbers and the remedy. */
    public static final class PagedLlmException extends RuntimeException {
        private static final long serialVersionUID = 1;

        public final Code code;
        /** Number of tokens of a prompt that is too long for maxModelLen. 0 for any other error. */
        public final long promptTokens;
        /** maxModelLen of the engine for which a prompt is too long. 0 for any other error. */
        public final long maxModelLen;
        /** Whether the same call can succeed later without a change, for example when fewer requests wait. */
        public final boolean isTemporary;

        private PagedLlmException(Code code, String message, long promptTokens, long maxModelLen, boolean isTemporary) {
            super(message);
            this.code = code;
            this.promptTokens = promptTokens;
            this.maxModelLen = maxModelLen;
            this.isTemporary = isTemporary;
        }

        private PagedLlmException(Code code, String message) {
            this(code, message, 0, 0, false);
        }
    }

    // Throws the error of a call and frees it. NULL is success.
    private static void check(MemorySegment error) {
        if (error.equals(MemorySegment.NULL)) return;
        PagedLlmException thrown = new PagedLlmException(Code.of(Native.error_code(error)), Native.string(Native.error_message(error)),
                Native.error_prompt_tokens(error), Native.error_max_model_len(error),
                Native.error_is_temporary(error) != 0);
        Native.error_free(error);
        throw thrown;
    }

    // Returns the error of an output, or null.
    private static PagedLlmException errorOf(MemorySegment output) {
        int code = output.get(JAVA_INT, Output.ERROR_CODE);
        return code == 0 ? null : new PagedLlmException(Code.of(code), text(output, Output.ERROR, Output.ERROR_LEN));
    }

    // ---- constants ------------------------------------------------------------------------------

    // generated: enums
