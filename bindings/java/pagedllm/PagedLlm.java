// Generated from src/ffi by `make header`. Do not edit.
// The hand-written parts of this file are in bindings/java/parts of the repository.
package pagedllm;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static java.lang.foreign.ValueLayout.JAVA_DOUBLE;

import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.function.Function;

/**
 * libpagedllm for Java 22 and newer: LLM serving inside your own process, over the FFM API. Run the
 * JVM with --enable-native-access=ALL-UNNAMED.
 *
 * <pre>{@code
 * Options options = new Options();
 * options.modelPath = "models/mine";
 * try (Engine engine = Engine.open(options)) {
 *     System.out.println(engine.generate(new Request("Once upon a time")).text());
 * }
 * }</pre>
 *
 * <p>Errors. A call that fails throws PagedLlmException.
 *
 * <p>Ownership. Engine, Queue, Stream, Budget and ResponseParser are AutoCloseable. close() may be
 * called at any time, also during another call on the object: the object is freed when that call
 * returns. Later calls throw Code.CLOSED.
 *
 * <p>Threads. A thread of the engine steps it, unless Engine.openWithHostSteps was called. Any thread
 * may call any method, except that only one thread may read a Stream. A blocking poll occupies its
 * thread, also a virtual one: to serve many clients, give each request its userData and let one thread
 * poll Engine.queue().
 *
 * <p>Numbers. A u32 or u64 of C is an int or a long with the same bits. Integer.toUnsignedString and
 * its relatives read a number that is larger than its type allows.
 *
 * <p>Logits hooks, KV stores and communicators are not available: the engine would call Java for each
 * token, block or message.
 */
public final class PagedLlm {
    private PagedLlm() {}

    /** Returns the version of the loaded library, such as "0.3.0". */
    public static String version() {
        return Native.string(Native.version());
    }

    /** Returns a JSON object that describes this build and machine. */
    public static String buildInfo() {
        return Native.string(Native.build_info());
    }

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

    /** Code of an error. */
    public enum Code {
        /** An argument is invalid: a value, a range, a text encoding. */
        INVALID_ARGUMENT(1),
        /** No live request, sequence or pin has this id. */
        NOT_FOUND(2),
        /** A file cannot be opened, read or written. */
        IO(3),
        /**
         * The model's files are damaged, incomplete or contradictory, or its weights are not
         * finite.
         */
        MODEL(4),
        /** This build, model or machine does not support the request. */
        UNSUPPORTED(5),
        /** A limit of memory, blocks, requests or queues does not allow it. */
        CAPACITY(6),
        /** Another thread is stepping this engine. */
        BUSY(7),
        /** The system has no memory left. */
        OUT_OF_MEMORY(8),
        /**
         * A defect of the library. If it occurs in a step, the engine has failed: each request ends
         * with FinishReason.ERROR, later calls throw the same error, and close() still works.
         */
        INTERNAL(9),
        /** The engine that owns this object has been freed. */
        CLOSED(10),
        /** The host's progress callback cancelled the call. */
        CANCELLED(11),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        Code(int value) {
            this.value = value;
        }

        private static Code of(long value) {
            for (Code known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

    /** Data type of KV blocks. */
    public enum Dtype {
        /** Selected by the library. */
        AUTO(0),
        /** 32-bit floating point. */
        F32(1),
        /** bfloat16. */
        BF16(2),
        /**
         * 8-bit integers with a scale in f32 for each head of each token: about half the bytes of
         * bf16, at a small cost in quality.
         */
        INT8(3),
        /** 16-bit floating point. Values beyond 65504 are clamped. */
        F16(4),
        /**
         * 8-bit floating point (OCP E4M3) with the scales of INT8. More precise for small values
         * beside large ones, less precise for large values.
         */
        FP8(5),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        Dtype(int value) {
            this.value = value;
        }

        private static Dtype of(long value) {
            for (Dtype known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

    /** Instruction path. */
    public enum Isa {
        /**
         * The widest instruction path of the machine: AVX512_BF16, AVX512_VNNI, AVX512, AVX_VNNI,
         * AVX2, PORTABLE.
         */
        AUTO(0),
        /** Any CPU. */
        PORTABLE(1),
        /** AVX2, FMA and F16C. */
        AVX2(2),
        /** AVX-512 F, BW, DQ and VL. */
        AVX512(3),
        /**
         * As AVX512_VNNI, with AVX-512 BF16: activations that are multiplied by weights or KV in
         * bf16 are rounded to bf16, and the products are summed in f32. Up to twice as fast for
         * prompts.
         */
        AVX512_BF16(4),
        /** As AVX2, with AVX-VNNI: products with integer weights are faster, with the same bits. */
        AVX_VNNI(5),
        /**
         * As AVX512, with AVX-512 VNNI: products with integer weights are faster, with the same
         * bits.
         */
        AVX512_VNNI(6);

        private final int value;

        Isa(int value) {
            this.value = value;
        }
    }

    /** Format of the weights in memory. */
    public enum WeightFormat {
        /** As in the model's files. Infinities and NaNs are kept. */
        AS_STORED(0),
        /** 32-bit floating point. */
        F32(1),
        /** 16-bit floating point. */
        F16(2),
        /** bfloat16. */
        BF16(3),
        /**
         * 8-bit integers with a scale for each output. The CPU multiplies them by 8-bit
         * activations, which have a scale for every 128 values of a row. CUDA devices multiply them
         * by activations in bf16.
         */
        INT8(4),
        /**
         * 4-bit integers with a scale for each group of weightGroup inputs of an output. The
         * embedding and the head are in 8 bits. Activations are as for INT8.
         */
        INT4(5),
        /**
         * As INT4, with an offset for each group, for 16 more bits a group. With groups of the same
         * size, it is the more precise of the two formats.
         */
        INT4_ASYMMETRIC(6),
        /**
         * CUDA only: 8-bit floating point (OCP E4M3) with a scale for each output. The embedding
         * and the head are as stored. Products of many rows multiply by fp8 activations with a
         * scale for each row, if the device supports it. All other products, those of experts and
         * those with batchInvariant multiply by bf16 activations.
         */
        FP8(7);

        private final int value;

        WeightFormat(int value) {
            this.value = value;
        }
    }

    /** Result of packedPath. */
    public enum Packed {
        /** packedPath was not set. */
        UNUSED(0),
        /** The packed weights were read from packedPath. */
        READ(1),
        /** The weights were packed from the model's files and written to packedPath. */
        SAVED(2),
        /**
         * The weights were packed from the model's files and could not be written to packedPath.
         */
        UNSAVED(3),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        Packed(int value) {
            this.value = value;
        }

        private static Packed of(long value) {
            for (Packed known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

    /** Treatment of preempted requests. */
    public enum Preemption {
        /** Preempted requests lose their KV blocks and are recomputed when they are rescheduled. */
        RECOMPUTE(0),
        /** Preempted requests are swapped to host memory. If it is full, they are recomputed. */
        SWAP(1),
        /** Swap or recompute, whichever costs less by the measured times. */
        AUTO(2);

        private final int value;

        Preemption(int value) {
            this.value = value;
        }
    }

    /** Order of the waiting requests. */
    public enum Order {
        /** First come, first served. */
        FCFS(0),
        /**
         * Highest priority of Request first. It can preempt running requests of lower priority. To
         * prevent starvation, a request that has waited for ageingMs goes before new requests of
         * the next higher priority.
         */
        PRIORITY(1),
        /**
         * Shortest predicted output first. The prediction uses recent requests with a similar
         * maxTokens. To prevent starvation, a request that has waited for ageingMs goes before new
         * requests that are predicted to be up to 100 tokens shorter.
         */
        SHORTEST_PREDICTED(2);

        private final int value;

        Order(int value) {
            this.value = value;
        }
    }

    /** Composition of a step. */
    public enum Batching {
        /** Each step mixes prompt chunks and decodes, in the order of the requests. */
        MIXED(0),
        /**
         * Each step has either prompts or decodes, and prompts go first. After prefillBudget prompt
         * tokens, the decodes get one step.
         */
        PREFILL_FIRST(1),
        /**
         * Each step has every decode and at most prefillBudget prompt tokens: bounds the time
         * between tokens.
         */
        DECODE_FIRST(2),
        /**
         * Static batching: no request is admitted until the running batch has finished. For
         * baselines.
         */
        STATIC(3);

        private final int value;

        Batching(int value) {
            this.value = value;
        }
    }

    /** Number of blocks that a request needs to start. */
    public enum Allocation {
        /**
         * Blocks are allocated as a sequence grows. If the pool is full, the last request in the
         * order is preempted.
         */
        ON_DEMAND(0),
        /**
         * A request starts when the pool has blocks for its maxTokens, so that growing sequences
         * cause no preemption. Forks and appended tokens of running sequences are not included.
         */
        MAX_TOKENS(1);

        private final int value;

        Allocation(int value) {
            this.value = value;
        }
    }

    /** Content of the outputs. */
    public enum OutputKind {
        /** Each output has the new tokens and the new text only. */
        DELTA(0),
        /** Each output has all tokens and the whole text so far. */
        CUMULATIVE(1),
        /** One output at the end of the sequence has all tokens and the whole text. */
        FINAL(2);

        private final int value;

        OutputKind(int value) {
            this.value = value;
        }
    }

    /** When a beam search ends. */
    public enum EarlyStopping {
        /**
         * Stop when the best running beam, if it ended now, would not score higher than the worst
         * finished beam.
         */
        NO(0),
        /** Stop as soon as width beams are finished. */
        YES(1),
        /** Stop when no running beam can reach a higher score than the worst finished beam. */
        NEVER(2);

        private final int value;

        EarlyStopping(int value) {
            this.value = value;
        }
    }

    /** Why a sequence ended. */
    public enum FinishReason {
        /** The sequence has not ended. */
        NONE(0),
        /** An end-of-sequence token, a stop token or a stop string. */
        STOP(1),
        /** maxTokens or maxModelLen was reached. */
        LENGTH(2),
        /** The host aborted the request. */
        ABORT(3),
        /** The computation failed. See Output.error. */
        ERROR(4),
        /** The deadline passed. The outputs have the tokens generated by then. */
        DEADLINE(5),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        FinishReason(int value) {
            this.value = value;
        }

        private static FinishReason of(long value) {
            for (FinishReason known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

    /** What ended a sequence whose reason is FinishReason.STOP. */
    public enum StopReason {
        /** The sequence has not ended, or for another reason than FinishReason.STOP. */
        NONE(0),
        /** An end-of-sequence token of the model. */
        EOS(1),
        /** A token of stopTokenIds. */
        TOKEN(2),
        /** A string of stop. */
        STRING(3),
        /** The grammar was complete. */
        GRAMMAR(4),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        StopReason(int value) {
            this.value = value;
        }

        private static StopReason of(long value) {
            for (StopReason known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

    /** What has happened to a block of the prefix cache. */
    public enum KvEventKind {
        /** The block is in the cache from now on. */
        STORED(0),
        /** The block is no longer in the cache. */
        REMOVED(1),
        /** No block is in the cache. STORED of each block that is there follows. */
        CLEARED(2),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        KvEventKind(int value) {
            this.value = value;
        }

        private static KvEventKind of(long value) {
            for (KvEventKind known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

    /** Place of a KV block. */
    public enum KvMedium {
        /** The KV pool of the engine, in the memory of its device. */
        POOL(0),
        /** A value that only a newer library knows. */
        UNKNOWN(Integer.MIN_VALUE);

        private final int value;

        KvMedium(int value) {
            this.value = value;
        }

        private static KvMedium of(long value) {
            for (KvMedium known : values()) if (known.value == value) return known;
            return UNKNOWN;
        }
    }

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

    private static final int GRAMMAR_JSON_SCHEMA = 1;
    private static final int GRAMMAR_JSON_OBJECT = 2;
    private static final int GRAMMAR_REGEX = 3;
    private static final int GRAMMAR_CHOICE = 4;
    private static final int GRAMMAR_LARK = 5;

    /** Reports the bytes of weights that have been read. The result false cancels the loading. */
    @FunctionalInterface
    public interface Progress {
        boolean report(long done, long total);
    }

    /** Options of an engine. */
    public static final class Options {
        /** Model directory in the layout of Hugging Face, or a GGUF file. */
        public String modelPath = null;
        /**
         * Device: "cpu" (default), or "cuda:0" (also "cuda") for the first CUDA device. CUDA needs
         * an NVIDIA driver for CUDA 12.0 or newer (525) and compute capability 8.0 or newer.
         * Prompts are faster with NVIDIA's cuBLAS for CUDA 12 or 13 (libcublasLt.so.12 or .13),
         * which blasLibrary of modelInfo() reports. A list such as "cuda:0,cuda:1" divides the
         * model among up to 64 devices of one kind, which needs NCCL (libnccl.so.2). Lists have not
         * been tested on GPUs yet.
         */
        public String device = null;
        /**
         * KV pool size in bytes. 0 (default): enough for maxSeqs sequences of maxModelLen tokens,
         * at most 1 GiB.
         */
        public long kvBytes = 0L;
        /** Seed for requests without a seed of their own. Default 0. */
        public long seed = 0L;
        /** Tokens per KV block: 8, 16 (default), 32, 64, 128 or 256. */
        public int blockSize = 16;
        /** Data type of KV blocks. Default Dtype.AUTO: f32 for models in f32, else bf16. */
        public Dtype kvDtype = Dtype.AUTO;
        /**
         * Maximum length of a sequence in tokens, prompt and output together. 0 (default): the
         * model's own maximum, or what the pool holds.
         */
        public int maxModelLen = 0;
        /**
         * Maximum number of tokens in one step, prompt and decode tokens of all sequences together.
         * Default 512.
         */
        public int maxBatchTokens = 512;
        /** Maximum number of running sequences, at most maxBatchTokens. Default 64. */
        public int maxSeqs = 64;
        /**
         * Maximum number of prompt tokens of one sequence in one step. 0 (default): maxBatchTokens.
         */
        public int prefillChunk = 0;
        /**
         * Number of threads, including the stepping thread. 0 (default): the number of CPUs in
         * cpus, or of CPUs on which the process may run, within the quota of its container.
         */
        public int threads = 0;
        /**
         * Instruction path. Default Isa.AUTO. Results have the same bits within a path, not across
         * paths.
         */
        public Isa isa = Isa.AUTO;
        /** Serve token ids only: no tokenizer is loaded, and text calls throw Code.UNSUPPORTED. */
        public boolean skipTokenizer = false;
        /** false disables the prefix cache. Default true. */
        public boolean prefixCache = true;
        /**
         * On a CUDA device: the results of a sequence do not depend on the batch, as on the CPU.
         * Slower: products of many rows do not use cuBLASLt, and attention over long sequences is
         * not split.
         */
        public boolean batchInvariant = false;
        /**
         * Capacity, in outputs, of the engine's own queue. See createQueue(). 0 (default): 65536.
         */
        public long queueCapacity = 0L;
        /**
         * Maximum number of requests, including resumed and forked sequences, that wait for their
         * first step. More are refused with Code.CAPACITY; one can always wait. 0 (default): no
         * limit.
         */
        public long maxWaitingRequests = 0L;
        /**
         * Maximum number of tokens that the waiting requests have to compute. 0 (default): no
         * limit.
         */
        public long maxWaitingTokens = 0L;
        /**
         * Budget from which the KV pool takes its bytes, instead of kvBytes. Default: a budget of
         * its own.
         */
        public Budget budget = null;
        /**
         * Size in bytes of the host tier, which holds the KV of swapped requests and idle
         * sequences. 0 (default): none.
         */
        public long swapBytes = 0L;
        /**
         * Directory for the host tier. The tier is an unnamed file there, which grows as it is
         * written and disappears with the engine. A thread of the engine reads and writes it. A
         * slow disk delays only the sequences that return from it; while it is behind, others are
         * recomputed. Default: the tier is in memory. If the file cannot be written or read, as on
         * a full disk, the sequence is recomputed when it returns and swapFailures of stats()
         * counts it.
         */
        public String swapPath = null;
        /**
         * Treatment of preempted requests. Default Preemption.RECOMPUTE. The others need swapBytes,
         * and swapBytes needs one of the others.
         */
        public Preemption preemption = Preemption.RECOMPUTE;
        /** Order of the waiting requests. Default Order.FCFS. */
        public Order order = Order.FCFS;
        /**
         * Waiting time in milliseconds after which a request is preferred; see Order. 0 (default):
         * 10,000.
         */
        public int ageingMs = 0;
        /** Composition of a step. Default Batching.MIXED. */
        public Batching batching = Batching.MIXED;
        /**
         * Prompt tokens for Batching.DECODE_FIRST and Batching.PREFILL_FIRST. 0 (default): 256 and
         * 2048.
         */
        public int prefillBudget = 0;
        /** Number of blocks that a request needs to start. Default Allocation.ON_DEMAND. */
        public Allocation allocation = Allocation.ON_DEMAND;
        /**
         * File for a trace of every step, in the format of Perfetto and chrome://tracing: the
         * batch, the times of its phases, and the phases of each sequence. An existing file is
         * replaced. A thread of the engine writes it, at most about one second late. If the disk
         * fails or falls behind by 256 MiB, the trace ends and tracesStopped of stats() is 1.
         * Default: none.
         */
        public String tracePath = null;
        /**
         * File for a journal of all calls and of everything else on which steps depend.
         * pagedllm-replay repeats them bit for bit on a machine with the same instruction path. It
         * contains prompts, as tokens, and cache salts. An existing file is replaced. A thread of
         * the engine writes it, at most about one second late. If the disk fails or falls behind by
         * 256 MiB, the journal ends and journalsStopped of stats() is 1. Default: none.
         */
        public String journalPath = null;
        /** Value of the label model_name in metrics(). Default: the name of the model directory. */
        public String modelName = null;
        /**
         * Format of the weights in memory. Fewer bits take less memory and time, and cost quality.
         * Small tensors that affect quality (routers of experts, learned positions) and the
         * projections of latents stay as stored. Default WeightFormat.AS_STORED.
         */
        public WeightFormat weightFormat = WeightFormat.AS_STORED;
        /**
         * Number of inputs that share a scale in 4-bit formats: 32, 64 or 128. Smaller is more
         * precise. 0 (default): 32.
         */
        public int weightGroup = 0;
        /**
         * Directory for packed weights. If it has the packed form of this model, weightFormat and
         * library, the form is checked and read as fast as the disk. Otherwise the weights are
         * packed and the form is written, or replaced. Several models and processes can share the
         * directory; unused files are not removed. It contains weights: protect it against writing
         * as the model is protected. If it cannot be written, the engine works and packed of
         * modelInfo() reports it. Default: weights are packed each time.
         */
        public String packedPath = null;
        /**
         * List of CPUs in the syntax of taskset -c, such as "0-3,8", one for each of threads. Each
         * thread of the engine is pinned to one of them, in this order. The first is for the
         * stepping thread: the engine's own thread (start()) is pinned, a thread of the program is
         * not. Default: threads are not pinned.
         */
        public String cpus = null;
        /**
         * CUDA only: fraction, 0.01 to 1, of the device memory that is free after weights and
         * working memory, for the KV pool. Cannot be combined with kvBytes. 0 (default): kvBytes is
         * used.
         */
        public float memoryFraction = 0.0f;
        /**
         * Maximum length in bytes of a text prompt, of a chat's JSON and the prompt it renders to,
         * and of a text to tokenize. A longer one is Code.INVALID_ARGUMENT. 0 (default): 64 for
         * each token of maxModelLen, at least 1048576. Tokenization takes up to 16 bytes of memory
         * for each byte of text, and up to 512 for each byte of a stretch of at most 2 MiB without
         * a place to cut (docs/models.md).
         */
        public long maxPromptBytes = 0L;
        /**
         * Maximum number of KV events that wait for pollKvEvents(), at most 1048576. 0 (default):
         * no events are recorded. 16384 suits most hosts. Needs the prefix cache. Events take
         * memory of the host: about 100 bytes and 4 for each token of a block, for each event and
         * twice for each block of the pool.
         */
        public long kvEventsCapacity = 0L;
        /**
         * Number of workers that divide each layer. 0 (default): 1, or with a list of devices their
         * number divided by pipelineParallel. The number of attention heads and the widths of MLPs
         * must be multiples of it, and so must the number of KV heads, unless it is a multiple of
         * that.
         */
        public int tensorParallel = 0;
        /** Number of groups of workers, each with some of the layers. 0 (default): 1. */
        public int pipelineParallel = 0;
        /**
         * Time in milliseconds after which a wait for another worker fails. It must be longer than
         * any step, and than the difference between the times in which the workers load their parts
         * of the model. 0 (default): 60000.
         */
        public long workerTimeoutMs = 0L;
        private static final long PROGRESS_OFFSET = 104;
        private static final long BUDGET_OFFSET = 136;

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(368, 8);
            Native.engine_options_init(c, 368);
            putText(c, 8, 16, modelPath, arena);
            putText(c, 24, 32, device, arena);
            c.set(JAVA_LONG, 40, kvBytes);
            c.set(JAVA_LONG, 48, seed);
            c.set(JAVA_INT, 56, blockSize);
            c.set(JAVA_INT, 60, kvDtype.value);
            c.set(JAVA_INT, 64, maxModelLen);
            c.set(JAVA_INT, 68, maxBatchTokens);
            c.set(JAVA_INT, 72, maxSeqs);
            c.set(JAVA_INT, 76, prefillChunk);
            c.set(JAVA_INT, 80, threads);
            c.set(JAVA_INT, 84, isa.value);
            putFlag(c, 88, 1, skipTokenizer);
            putFlag(c, 88, 2, !prefixCache);
            putFlag(c, 88, 4, batchInvariant);
            c.set(JAVA_LONG, 96, queueCapacity);
            c.set(JAVA_LONG, 120, maxWaitingRequests);
            c.set(JAVA_LONG, 128, maxWaitingTokens);
            c.set(JAVA_LONG, 144, swapBytes);
            putText(c, 152, 160, swapPath, arena);
            c.set(JAVA_INT, 168, preemption.value);
            c.set(JAVA_INT, 172, order.value);
            c.set(JAVA_INT, 176, ageingMs);
            c.set(JAVA_INT, 180, batching.value);
            c.set(JAVA_INT, 184, prefillBudget);
            c.set(JAVA_INT, 188, allocation.value);
            putText(c, 192, 200, tracePath, arena);
            putText(c, 208, 216, journalPath, arena);
            putText(c, 224, 232, modelName, arena);
            c.set(JAVA_INT, 240, weightFormat.value);
            c.set(JAVA_INT, 244, weightGroup);
            putText(c, 248, 256, packedPath, arena);
            putText(c, 264, 272, cpus, arena);
            c.set(JAVA_FLOAT, 280, memoryFraction);
            c.set(JAVA_LONG, 288, maxPromptBytes);
            c.set(JAVA_LONG, 336, kvEventsCapacity);
            c.set(JAVA_INT, 352, tensorParallel);
            c.set(JAVA_INT, 356, pipelineParallel);
            c.set(JAVA_LONG, 360, workerTimeoutMs);
            return c;
        }
    }

    /**
     * The DRY penalty: a token that would extend a repetition of length tokens loses multiplier *
     * base ** (length - allowedLength).
     */
    public static final class Dry {
        /** Strength of the penalty. Range 0 to 100. Default 0.8. 0 disables it. */
        public float multiplier = 0.8f;
        /** Base of the exponential growth. Range 1 to 100. Default 1.75. */
        public float base = 1.75f;
        /** Length in tokens of the longest repetition without a penalty. Default 2. */
        public int allowedLength = 2;
        /** Number of last tokens that are searched for repetitions. 0 (default): all. */
        public int penaltyLastN = 0;
        /**
         * Texts that end a repetition, within a token or across tokens. Default: newline, colon,
         * quotation mark and asterisk, or none with skipTokenizer. An empty list: none. At most 64
         * texts of at most 128 bytes each.
         */
        public List<String> sequenceBreakers = null;

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(48, 8);
            Native.dry_init(c, 48);
            c.set(JAVA_FLOAT, 8, multiplier);
            c.set(JAVA_FLOAT, 12, base);
            c.set(JAVA_INT, 16, allowedLength);
            c.set(JAVA_INT, 20, penaltyLastN);
            putTexts(c, 24, 32, 40, sequenceBreakers, arena);
            return c;
        }
    }

    /**
     * How a request samples its tokens, what it reports and when it ends. The parameters apply in
     * this order: logit bias; repetition, frequency and presence penalty; DRY; exclusions and the
     * grammar; temperature; top-n-sigma, min-p, top-k, typical-p, top-p, XTC, or mirostat in their
     * place; the draw.
     */
    public static final class Sampling {
        /**
         * Seed. A request with a seed generates the same tokens in any batch. null (default): the
         * seed is derived from the engine's seed and the request id.
         */
        public Long seed = null;
        /**
         * Tokens that end the sequence. They are reported in tokens, but not in the text. At most
         * 1024.
         */
        public int[] stopTokenIds = null;
        /**
         * Strings that end the sequence, within a token or across tokens. They do not appear in the
         * text. At most 1024 strings of 16384 bytes in all.
         */
        public List<String> stop = List.of();
        /** Temperature. 0 selects greedy sampling. Range 0 to 10,000. Default 1. */
        public float temperature = 1.0f;
        /**
         * Keeps the most probable tokens whose probabilities sum to at least this value. Range
         * above 0 to 1. Default 1: all.
         */
        public float topP = 1.0f;
        /**
         * Keeps tokens whose probability is at least this fraction of the largest. Range 0 to 1.
         * Default 0: all.
         */
        public float minP = 0.0f;
        /** Keeps the k most probable tokens. Default 0: all. */
        public int topK = 0;
        /**
         * Maximum number of generated tokens. 0: only the prompt is computed and reported; n and
         * bestOf must be 1, without a beam search. Default: up to maxModelLen.
         */
        public Integer maxTokens = null;
        /**
         * Number of tokens before which neither end-of-sequence tokens nor stops end the sequence.
         * Default 0.
         */
        public int minTokens = 0;
        /** Do not stop at end-of-sequence tokens. */
        public boolean ignoreEos = false;
        /**
         * Report the log probability of each generated token, and of the topLogprobs most probable
         * tokens.
         */
        public boolean logprobs = false;
        /**
         * Report the log probability of each prompt token except the first, from
         * promptLogprobsStart on, and of the promptTopLogprobs most probable tokens. Of several
         * samples, the first reports them. A fork does not report them again.
         */
        public boolean promptLogprobs = false;
        /**
         * The output begins with the prompt. With logprobs, the tokens of the prompt have log
         * probabilities, too: the prompt is computed from promptLogprobsStart on even if the prefix
         * cache has it, and its output follows then.
         */
        public boolean echo = false;
        /** The stop string, or the text of the token that ends the sequence, stays in the text. */
        public boolean includeStop = false;
        /**
         * Parameters that are left at their default take the values of the model's
         * generation_config.json, if it has them: temperature, topK, topP, minP, typicalP,
         * repetitionPenalty and noRepeatNgramSize. "do_sample": false selects temperature 0. Has no
         * effect on beam search.
         */
        public boolean modelDefaults = false;
        /**
         * Until the first token is generated or appended, each step that computes a part of the
         * prompt, but not its end, has an output with computedTokens and without tokens or text,
         * whatever outputKind is. The other tokens of the prompt follow in later steps, because it
         * is longer than prefillChunk or maxBatchTokens, or because the step was full. These
         * outputs count for the capacity of the queue. After a preemption the numbers can be
         * smaller again. Of several samples or beams, the first sequence reports them.
         */
        public boolean prefillProgress = false;
        /**
         * Keeps the tokens with the most typical surprise whose probabilities sum to at least this
         * value. Range above 0 to 1. Default 1: all.
         */
        public float typicalP = 1.0f;
        /**
         * Keeps tokens whose logit is within this many standard deviations of the largest. Range 0
         * to 100. Default 0: all.
         */
        public float topNSigma = 0.0f;
        /**
         * Probability with which XTC removes the most probable tokens. Range 0 to 1. Default 0:
         * never.
         */
        public float xtcProbability = 0.0f;
        /**
         * Probability from which on a token counts as a top choice for XTC. Range 0 to 0.5. Default
         * 0.1.
         */
        public float xtcThreshold = 0.1f;
        /** Mirostat 2: target surprise in bits per token. Range 0 to 100. Default 0: off. */
        public float mirostatTau = 0.0f;
        /** Mirostat 2: learning rate. Range above 0 to 1. Default 0.1. */
        public float mirostatEta = 0.1f;
        /**
         * Subtracted from the logit of each token that has been generated. Range -2 to 2. Default
         * 0.
         */
        public float presencePenalty = 0.0f;
        /**
         * Subtracted from the logit of a token for each time it has been generated. Range -2 to 2.
         * Default 0.
         */
        public float frequencyPenalty = 0.0f;
        /**
         * Divides positive logits, and multiplies negative logits, of all tokens of the prompt and
         * the output. Range 0.01 to 100. Default 1: off.
         */
        public float repetitionPenalty = 1.0f;
        /** No n-gram of this many tokens occurs twice. At most 256. Default 0: off. */
        public int noRepeatNgramSize = 0;
        /**
         * With logprobs: number of most probable tokens reported for each generated token. At most
         * 128. Default 0.
         */
        public int topLogprobs = 0;
        /**
         * With promptLogprobs: number of most probable tokens reported for each prompt token. At
         * most 128. Default 0.
         */
        public int promptTopLogprobs = 0;
        /** Content of the outputs. Default OutputKind.DELTA. */
        public OutputKind outputKind = OutputKind.DELTA;
        /** Constraint on the output. null (default): none. */
        public Grammar grammar = null;
        /** DRY penalty. Default: off. */
        public Dry dry = null;
        /**
         * Values that are added to logits, from -100 to 100. Default: none. At most as many as the
         * vocabulary has tokens.
         */
        public Map<Integer, Float> logitBias = Map.of();
        /**
         * Texts that the output must not contain, as the tokenizer encodes them at the beginning of
         * a text, after a space and within a word. Other token sequences that spell the same text
         * are not excluded. At most 1024 texts of 65536 bytes in all.
         */
        public List<String> badWords = List.of();
        /**
         * Token sequences that the output must not contain. At most 1024 sequences of at most 256
         * tokens each.
         */
        public List<int[]> badWordsIds = List.of();
        /**
         * The only tokens that may be sampled. Default: all. At most as many as the vocabulary has
         * tokens.
         */
        public int[] allowedTokenIds = null;
        /**
         * Position of the first prompt token whose log probability is reported, if promptLogprobs
         * or both echo and logprobs are set. Tokens before it can come from the prefix cache. It
         * counts in the truncated prompt, and must be below its length. Default 0: all except the
         * first token.
         */
        public long promptLogprobsStart = 0L;

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(272, 8);
            Native.sampling_init(c, 272);
            if (seed != null) c.set(JAVA_LONG, 8, seed);
            putFlag(c, 80, 1, seed != null);
            putInts(c, 16, 24, stopTokenIds, arena);
            putTexts(c, 32, 40, 48, stop, arena);
            c.set(JAVA_FLOAT, 56, temperature);
            c.set(JAVA_FLOAT, 60, topP);
            c.set(JAVA_FLOAT, 64, minP);
            c.set(JAVA_INT, 68, topK);
            if (maxTokens != null) c.set(JAVA_INT, 72, maxTokens);
            c.set(JAVA_INT, 76, minTokens);
            putFlag(c, 80, 2, ignoreEos);
            putFlag(c, 80, 4, logprobs);
            putFlag(c, 80, 8, promptLogprobs);
            putFlag(c, 80, 16, echo);
            putFlag(c, 80, 32, includeStop);
            putFlag(c, 80, 64, modelDefaults);
            putFlag(c, 80, 128, prefillProgress);
            c.set(JAVA_FLOAT, 88, typicalP);
            c.set(JAVA_FLOAT, 92, topNSigma);
            c.set(JAVA_FLOAT, 96, xtcProbability);
            c.set(JAVA_FLOAT, 100, xtcThreshold);
            c.set(JAVA_FLOAT, 104, mirostatTau);
            c.set(JAVA_FLOAT, 108, mirostatEta);
            c.set(JAVA_FLOAT, 112, presencePenalty);
            c.set(JAVA_FLOAT, 116, frequencyPenalty);
            c.set(JAVA_FLOAT, 120, repetitionPenalty);
            c.set(JAVA_INT, 124, noRepeatNgramSize);
            c.set(JAVA_INT, 128, topLogprobs);
            c.set(JAVA_INT, 132, promptTopLogprobs);
            c.set(JAVA_INT, 136, outputKind.value);
            if (grammar != null) grammar.putInto(c, 140, 144, 152, 160, 168, 176, arena);
            if (dry != null) c.set(ADDRESS, 184, dry.toC(arena));
            putBiases(c, 192, 200, logitBias, arena);
            putTexts(c, 208, 216, 224, badWords, arena);
            putTokenLists(c, 232, 240, badWordsIds, arena);
            putInts(c, 248, 256, allowedTokenIds, arena);
            c.set(JAVA_LONG, 264, promptLogprobsStart);
            return c;
        }
    }

    /**
     * Parameters of a beam search, as in generate of Hugging Face transformers: release 5, and
     * release 4 for several groups. Logit bias, penalties and exclusions of Sampling apply to the
     * log probabilities, in the order of transformers. Frequency and presence penalties and DRY,
     * which transformers lacks, follow the repetition penalty. Bad words can forbid end tokens,
     * which transformers ignores.
     */
    public static final class Beam {
        /** Number of beams, 2 to 64. Default 4. */
        public int width = 4;
        /** Number of groups of beams, each with its own search. Default 1. */
        public int groups = 1;
        /**
         * Subtracted from the log probability of a token for each beam of an earlier group that
         * chose it in the same step, before the repetition penalty. Range 0 to 1,000,000. Default
         * 0.
         */
        public float diversityPenalty = 0.0f;
        /**
         * The score of a beam is the sum of its log probabilities divided by its length to this
         * power. Range -5 to 5. Default 1.
         */
        public float lengthPenalty = 1.0f;
        /** When a beam search ends. Default EarlyStopping.NO. */
        public EarlyStopping earlyStopping = EarlyStopping.NO;

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(32, 8);
            Native.beam_init(c, 32);
            c.set(JAVA_INT, 8, width);
            c.set(JAVA_INT, 12, groups);
            c.set(JAVA_FLOAT, 16, diversityPenalty);
            c.set(JAVA_FLOAT, 20, lengthPenalty);
            c.set(JAVA_INT, 24, earlyStopping.value);
            return c;
        }
    }

    /** A request. */
    public static final class Request {
        /** Prompt as UTF-8 text. */
        public String prompt = null;
        /** Prompt as token ids, instead of prompt. */
        public int[] promptTokenIds = null;
        /** Sampling parameters. */
        public Sampling sampling = new Sampling();
        /** Returned in each output of the request. */
        public long userData = 0L;
        /**
         * Number of results: samples, or best beams. Default 1. Result i has the sequence id
         * request + i; with bestOf, result i is one of the ids request to request + bestOf - 1.
         * Each sequence has its own last output.
         */
        public int n = 1;
        /**
         * The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
         * renderChat() rendered. Default true.
         */
        public boolean addSpecial = true;
        /** Special tokens are left out of the text. Default true. */
        public boolean skipSpecial = true;
        /** Queue for the outputs. null (default): the engine's own queue. */
        public Queue queue = null;
        /**
         * Number of samples to generate. If it is larger than n, the n samples with the highest log
         * probability are returned at the end, best first. 0 (default) selects n.
         */
        public int bestOf = 0;
        /** Keeps only this many tokens at the end of the prompt. 0 (default) keeps all. */
        public int truncatePromptTokens = 0;
        /**
         * The sequences are kept when they end, for any reason, and become idle. resume() continues
         * one; free() frees it.
         */
        public boolean keep = false;
        /**
         * Beam search. Default: sampling. The n best beams are returned at the end, best first,
         * whatever outputKind is. Code.INVALID_ARGUMENT if it is combined with bestOf, keep, a
         * temperature other than 0 or the default, topK, topP, minP, typicalP, topNSigma, XTC,
         * mirostat, a seed, stop strings, topLogprobs, promptLogprobs, echo or a grammar.
         */
        public Beam beam = null;
        /**
         * Requests share blocks of the prefix cache only if their salts are equal, so that tenants
         * cannot probe the prompts of other tenants. Default: the empty salt.
         */
        public byte[] cacheSalt = null;
        /**
         * Deadline in milliseconds from now. When it passes, the request ends with
         * FinishReason.DEADLINE and the tokens it has. 0 (default): none. A negative deadline is
         * Code.INVALID_ARGUMENT.
         */
        public long deadlineMs = 0L;
        /**
         * Priority, -100 to 100; higher runs first. Used if the order is Order.PRIORITY. Default 0.
         * Forks inherit it.
         */
        public int priority = 0;
        /**
         * Time in milliseconds for which the request waits for each next block of its prompt that
         * the KV store does not have yet, because another engine computes the prompt. The engine
         * reads each block when the store has it, and computes the prompt from the first block on
         * that has not appeared in this time. If no other request can run meanwhile, a step waits
         * for these blocks, too. 0 (default): the request waits only for blocks that the store has.
         * Code.INVALID_ARGUMENT if it is not 0 and the engine has no kvStore.
         */
        public int kvStoreWaitMs = 0;
        private static final long QUEUE_OFFSET = 64;

        public Request() {}

        public Request(String prompt) {
            this.prompt = prompt;
        }

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(152, 8);
            Native.request_init(c, 152);
            putText(c, 8, 16, prompt, arena);
            putInts(c, 24, 32, promptTokenIds, arena);
            if (sampling != null) c.set(ADDRESS, 40, sampling.toC(arena));
            c.set(JAVA_LONG, 48, userData);
            c.set(JAVA_INT, 56, n);
            putFlag(c, 60, 1, addSpecial);
            putFlag(c, 60, 2, skipSpecial);
            c.set(JAVA_INT, 72, bestOf);
            c.set(JAVA_INT, 76, truncatePromptTokens);
            putFlag(c, 80, 1, keep);
            if (beam != null) c.set(ADDRESS, 88, beam.toC(arena));
            putBytes(c, 96, 104, cacheSalt, arena);
            c.set(JAVA_LONG, 128, deadlineMs);
            c.set(JAVA_INT, 136, priority);
            c.set(JAVA_INT, 144, kvStoreWaitMs);
            return c;
        }
    }

    /** Parameters of a fork. */
    public static final class ForkOptions {
        /**
         * Number of tokens that the children share with their parent: 1 to its length. null
         * (default): all.
         */
        public Long at = null;
        /**
         * Each child draws from its own random stream of this seed, until it is resumed with other
         * parameters. null (default): the children draw the same random numbers as their parent.
         */
        public Long seed = null;
        /**
         * Returned in the outputs of the children. null (default): the children have the userData
         * of the parent.
         */
        public Long userData = null;
        /** Queue for the outputs of the children. Default: the parent's queue. */
        public Queue queue = null;
        /** Number of children. Default 1. */
        public int n = 1;
        /** The children are idle until they are resumed, even if the parent runs. */
        public boolean idle = false;
        private static final long QUEUE_OFFSET = 32;

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(48, 8);
            Native.fork_init(c, 48);
            if (at != null) c.set(JAVA_LONG, 8, at);
            if (seed != null) c.set(JAVA_LONG, 16, seed);
            putFlag(c, 44, 1, seed != null);
            if (userData != null) c.set(JAVA_LONG, 24, userData);
            putFlag(c, 44, 4, userData != null);
            c.set(JAVA_INT, 40, n);
            putFlag(c, 44, 2, idle);
            return c;
        }
    }

    /** How an idle sequence continues. */
    public static final class Resume {
        /** Sampling parameters. Counts (maxTokens, minTokens) and penalties start anew. */
        public Sampling sampling = new Sampling();
        /** Queue for the outputs. null (default) keeps the queue of the sequence. */
        public Queue queue = null;
        /** Returned in the outputs. null (default): the sequence keeps its userData. */
        public Long userData = null;
        /** The sequence is kept when it ends. Default true. */
        public boolean keep = true;
        /**
         * Continue as if the sequence had never been idle, with its own parameters, counts, grammar
         * and output kind. Of the other fields only queue, userData (null: keep it), deadlineMs and
         * keep are used. A sequence that ended by its length must be rewound first; otherwise it
         * ends again with FinishReason.ERROR.
         */
        public boolean continueGeneration = false;
        /** Special tokens are left out of the text. Default true. */
        public boolean skipSpecial = true;
        /** As in Request, from this call on. */
        public long deadlineMs = 0L;
        private static final long QUEUE_OFFSET = 16;

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(64, 8);
            Native.resume_init(c, 64);
            if (sampling != null) c.set(ADDRESS, 8, sampling.toC(arena));
            if (userData != null) c.set(JAVA_LONG, 24, userData);
            putFlag(c, 32, 2, userData != null);
            putFlag(c, 32, 1, keep);
            putFlag(c, 32, 4, continueGeneration);
            putFlag(c, 36, 2, skipSpecial);
            c.set(JAVA_LONG, 56, deadlineMs);
            return c;
        }
    }

    /** A prompt that is kept in the prefix cache. */
    public static final class Pin {
        /** Prompt as UTF-8 text. */
        public String prompt = null;
        /** Prompt as token ids. */
        public int[] promptTokenIds = null;
        /** As in Request. */
        public byte[] cacheSalt = null;
        /** Time in milliseconds for which the prompt is kept. 0 (default): until it is unpinned. */
        public long timeToLiveMs = 0L;
        /**
         * If a sequence cannot continue otherwise, pins are dropped, those with the lowest priority
         * first. Default 0.
         */
        public int priority = 0;
        /**
         * The tokenizer adds its special tokens, such as BOS. Set it to false for a prompt that
         * renderChat() rendered. Default true.
         */
        public boolean addSpecial = true;

        public Pin() {}

        public Pin(String prompt) {
            this.prompt = prompt;
        }

        private MemorySegment toC(Arena arena) {
            MemorySegment c = arena.allocate(72, 8);
            Native.pin_init(c, 72);
            putText(c, 8, 16, prompt, arena);
            putInts(c, 24, 32, promptTokenIds, arena);
            putBytes(c, 40, 48, cacheSalt, arena);
            c.set(JAVA_LONG, 56, timeToLiveMs);
            c.set(JAVA_INT, 64, priority);
            putFlag(c, 68, 1, addSpecial);
            return c;
        }
    }

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

    // ---- results --------------------------------------------------------------------------------

    /** A token and its log probability in the model's own distribution. */
    public record Logprob(int token, float logprob) {}

    /** Everything that one sequence generated, and its last output. */
    public record Completion(String text, int[] tokens, float[] logprobs, Output last) {}

    /** The state of a budget. */
    public static final class BudgetInfo {
        private static final long SIZE = 48;

        /** Size of the budget in bytes. */
        public final long bytes;
        /**
         * Smallest size in bytes to which it can be resized now, given its engines and their
         * requests.
         */
        public final long minBytes;
        /** Largest size in bytes to which it can be resized. */
        public final long maxBytes;
        /** Bytes that the engines hold. More than bytes while engines are giving blocks back. */
        public final long heldBytes;
        /** Engines that use the budget. */
        public final long engines;

        private BudgetInfo(MemorySegment c) {
            bytes = c.get(JAVA_LONG, 8);
            minBytes = c.get(JAVA_LONG, 16);
            maxBytes = c.get(JAVA_LONG, 24);
            heldBytes = c.get(JAVA_LONG, 32);
            engines = c.get(JAVA_LONG, 40);
        }
    }

    /** Memory that an engine would allocate. */
    public static final class Plan {
        private static final long SIZE = 112;

        /** Bytes of the weights. */
        public final long weightBytes;
        /** Bytes of the KV pool. */
        public final long kvBytes;
        /**
         * Bytes of activations, logits and working memory of kernels. Small tables are not
         * included.
         */
        public final long workBytes;
        /** Number of KV blocks. */
        public final long blocks;
        /** Tokens per KV block. */
        public final long blockSize;
        /** Bytes of one KV block: of all layers, or of the layers of one group. */
        public final long blockBytes;
        /** Maximum length of a sequence in tokens, prompt and output together. */
        public final long maxModelLen;
        /** Number of sequences of maxModelLen tokens that fit at the same time. */
        public final long fullSequences;
        /** Data type of KV blocks. */
        public final Dtype kvDtype;
        /** Maximum number of KV blocks, if the budget grows to its maximum. */
        public final long maxBlocks;
        /** Bytes of the host tier, in memory or in its file. */
        public final long swapBytes;
        /** Number of KV blocks in the host tier. */
        public final long swapBlocks;
        /**
         * Number of layer groups with KV blocks of their own. A sequence has one block of each
         * group for every blockSize tokens. For a group of layers with a window it has only the
         * blocks inside the window.
         */
        public final long kvGroups;

        private Plan(MemorySegment c) {
            weightBytes = c.get(JAVA_LONG, 8);
            kvBytes = c.get(JAVA_LONG, 16);
            workBytes = c.get(JAVA_LONG, 24);
            blocks = c.get(JAVA_LONG, 32);
            blockSize = c.get(JAVA_LONG, 40);
            blockBytes = c.get(JAVA_LONG, 48);
            maxModelLen = c.get(JAVA_LONG, 56);
            fullSequences = c.get(JAVA_LONG, 64);
            kvDtype = Dtype.of(c.get(JAVA_LONG, 72));
            maxBlocks = c.get(JAVA_LONG, 80);
            swapBytes = c.get(JAVA_LONG, 88);
            swapBlocks = c.get(JAVA_LONG, 96);
            kvGroups = c.get(JAVA_LONG, 104);
        }
    }

    /** The model and the limits of its engine. */
    public static final class ModelInfo {
        private static final long SIZE = 136;

        /** Name in config.json, such as "LlamaForCausalLM". */
        public final String architecture;
        /** Instruction path, such as "avx512". */
        public final String isa;
        /** Tokens that end a sequence. */
        public final int[] eosTokenIds;
        /** Number of tokens in the vocabulary. */
        public final long vocabSize;
        /** Number of layers. */
        public final long layers;
        /** Maximum length of a sequence for which the model was made. */
        public final long maxPositions;
        /** Maximum length of a sequence in this engine. */
        public final long maxModelLen;
        /** Number of threads. */
        public final long threads;
        /** Result of packedPath. */
        public final Packed packed;
        /**
         * Reason, as text, why the packed weights were not read or not written. Empty if there is
         * nothing to report.
         */
        public final String packedReason;
        /**
         * On a CUDA device: the library that computes products of many rows, such as "cuBLASLt
         * 12.9.1 (/usr/lib/libcublasLt.so.12)". If none does, "own kernels: " and the reason;
         * prompts then take longer. Empty on the CPU.
         */
        public final String blasLibrary;

        private ModelInfo(MemorySegment c) {
            architecture = text(c, 8, 16);
            isa = text(c, 24, 32);
            eosTokenIds = ints(c, 40, 48);
            vocabSize = c.get(JAVA_LONG, 56);
            layers = c.get(JAVA_LONG, 64);
            maxPositions = c.get(JAVA_LONG, 72);
            maxModelLen = c.get(JAVA_LONG, 80);
            threads = c.get(JAVA_LONG, 88);
            packed = Packed.of(c.get(JAVA_LONG, 96));
            packedReason = text(c, 104, 112);
            blasLibrary = text(c, 120, 128);
        }
    }

    /** Predicted admission of a request. */
    public static final class Admission {
        private static final long SIZE = 48;

        /**
         * true if add() would accept the request, false if too many requests wait, its queue is
         * full, or a shared budget cannot reserve its blocks.
         */
        public final boolean admits;
        /**
         * true if no request is ahead of it and its blocks are free, so that it would start in the
         * next step.
         */
        public final boolean fitsNow;
        /** Predicted seconds until its first token. Negative if no step has been measured yet. */
        public final double firstTokenSeconds;
        /** Number of requests ahead of it. */
        public final long waitingRequests;
        /** Number of tokens that those requests have to compute. */
        public final long waitingTokens;

        private Admission(MemorySegment c) {
            admits = c.get(JAVA_LONG, 8) != 0;
            fitsNow = c.get(JAVA_LONG, 16) != 0;
            firstTokenSeconds = c.get(JAVA_DOUBLE, 24);
            waitingRequests = c.get(JAVA_LONG, 32);
            waitingTokens = c.get(JAVA_LONG, 40);
        }
    }

    /** Result of one step. */
    public static final class Step {
        private static final long SIZE = 48;

        /**
         * Number of requests, exports and imports that have not ended, and of commands left to the
         * next steps. While it is not 0, step again, and poll the queues: requests whose queue is
         * full wait for that.
         */
        public final long unfinished;
        /** Number of prompt tokens computed. */
        public final long prefillTokens;
        /** Number of decode tokens computed. */
        public final long decodeTokens;
        /** Number of sequences in the step. */
        public final long sequences;
        /**
         * Number of sequences that were skipped because their queue is full, or because they wait
         * for a slow grammar.
         */
        public final long paused;

        private Step(MemorySegment c) {
            unfinished = c.get(JAVA_LONG, 8);
            prefillTokens = c.get(JAVA_LONG, 16);
            decodeTokens = c.get(JAVA_LONG, 24);
            sequences = c.get(JAVA_LONG, 32);
            paused = c.get(JAVA_LONG, 40);
        }
    }

    /** Counters since the creation of the engine, and its state after the last step. */
    public static final class Stats {
        private static final long SIZE = 344;

        /** Sequences that wait for their first or next step. */
        public final long waiting;
        /** Sequences that run. */
        public final long running;
        /** KV blocks of the pool. */
        public final long blocksTotal;
        /** KV blocks in use. */
        public final long blocksUsed;
        /**
         * Unused KV blocks that are in the prefix cache. They are evicted when blocks are needed.
         */
        public final long blocksCached;
        /** KV blocks that are neither in use nor cached. */
        public final long blocksFree;
        /**
         * Fraction of the token slots of all used and reserved blocks that hold K and V of a token.
         * 1 if there are none.
         */
        public final double slotUtilization;
        /** Steps. */
        public final long steps;
        /** Prompt tokens computed. Tokens that are recomputed after a preemption count again. */
        public final long promptTokens;
        /** Tokens generated. */
        public final long generatedTokens;
        /** Preemptions. */
        public final long preemptions;
        /** Results that ended with FinishReason.STOP: one for each sequence of a request. */
        public final long finishedStop;
        /** Results that ended with FinishReason.LENGTH: one for each sequence of a request. */
        public final long finishedLength;
        /** Results that ended with FinishReason.ABORT: one for each sequence of a request. */
        public final long finishedAbort;
        /** Results that ended with FinishReason.ERROR: one for each sequence of a request. */
        public final long finishedError;
        /**
         * Waiting sequences that the last step skipped because their queue is full, or because they
         * wait for a slow grammar.
         */
        public final long paused;
        /** Kept sequences that wait to be resumed or freed. */
        public final long idle;
        /** Blocks copied because a sequence wrote to a shared block. */
        public final long blocksCopied;
        /** Prompt tokens looked up in the prefix cache. */
        public final long prefixQueries;
        /** Prompt tokens found in the prefix cache, which were not computed. */
        public final long prefixHits;
        /** Results that ended with FinishReason.DEADLINE: one for each sequence of a request. */
        public final long finishedDeadline;
        /** Requests refused because of maxWaitingRequests, maxWaitingTokens or a full queue. */
        public final long admissionRejections;
        /** Steps that failed and were tried again, in part or as a whole. */
        public final long stepsFailed;
        /** Preemptions that swapped the request to the host tier. The others were recomputed. */
        public final long preemptionsSwapped;
        /** Sequences whose KV is in the host tier. */
        public final long swapped;
        /** KV blocks of the host tier. */
        public final long swapBlocksTotal;
        /** KV blocks in use in the host tier. */
        public final long swapBlocksUsed;
        /** Blocks moved to the host tier. */
        public final long blocksSwappedOut;
        /** Blocks moved back from the host tier. */
        public final long blocksSwappedIn;
        /** Moves that failed, as on a full disk. Their sequences were recomputed. */
        public final long swapFailures;
        /** Tokens at the start of sequences that were found in the prefix cache. */
        public final long promptTokensCached;
        /**
         * 1 if tracePath was set and the trace has ended because the disk failed or fell behind.
         */
        public final long tracesStopped;
        /**
         * 1 if journalPath was set and the journal has ended because the disk failed or fell
         * behind.
         */
        public final long journalsStopped;
        /**
         * Times that the KV pool shrank and the system did not take the memory back, as after
         * mlockall. The budget is kept, but the memory of the process does not shrink.
         */
        public final long discardFailures;
        /**
         * Blocks that sequences do not hold because they are outside the windows of their layers.
         * Blocks of forks count once for each fork.
         */
        public final long blocksOutOfWindow;
        /** KV blocks looked up in the KV store. */
        public final long kvStoreQueries;
        /** KV blocks read from the KV store, with a valid checksum. */
        public final long kvStoreHits;
        /** KV blocks written to the KV store. */
        public final long kvStoreStored;
        /**
         * Full KV blocks that were not written to the KV store, because it was slow or the pool had
         * evicted them.
         */
        public final long kvStoreDropped;
        /** Operations of the KV store that failed or took too long, and damaged blocks. */
        public final long kvStoreFailures;
        /** Bytes read from the KV store. */
        public final long kvStoreBytesRead;
        /** Bytes written to the KV store. */
        public final long kvStoreBytesWritten;

        private Stats(MemorySegment c) {
            waiting = c.get(JAVA_LONG, 8);
            running = c.get(JAVA_LONG, 16);
            blocksTotal = c.get(JAVA_LONG, 24);
            blocksUsed = c.get(JAVA_LONG, 32);
            blocksCached = c.get(JAVA_LONG, 40);
            blocksFree = c.get(JAVA_LONG, 48);
            slotUtilization = c.get(JAVA_DOUBLE, 56);
            steps = c.get(JAVA_LONG, 64);
            promptTokens = c.get(JAVA_LONG, 72);
            generatedTokens = c.get(JAVA_LONG, 80);
            preemptions = c.get(JAVA_LONG, 88);
            finishedStop = c.get(JAVA_LONG, 96);
            finishedLength = c.get(JAVA_LONG, 104);
            finishedAbort = c.get(JAVA_LONG, 112);
            finishedError = c.get(JAVA_LONG, 120);
            paused = c.get(JAVA_LONG, 128);
            idle = c.get(JAVA_LONG, 136);
            blocksCopied = c.get(JAVA_LONG, 144);
            prefixQueries = c.get(JAVA_LONG, 152);
            prefixHits = c.get(JAVA_LONG, 160);
            finishedDeadline = c.get(JAVA_LONG, 168);
            admissionRejections = c.get(JAVA_LONG, 176);
            stepsFailed = c.get(JAVA_LONG, 184);
            preemptionsSwapped = c.get(JAVA_LONG, 192);
            swapped = c.get(JAVA_LONG, 200);
            swapBlocksTotal = c.get(JAVA_LONG, 208);
            swapBlocksUsed = c.get(JAVA_LONG, 216);
            blocksSwappedOut = c.get(JAVA_LONG, 224);
            blocksSwappedIn = c.get(JAVA_LONG, 232);
            swapFailures = c.get(JAVA_LONG, 240);
            promptTokensCached = c.get(JAVA_LONG, 248);
            tracesStopped = c.get(JAVA_LONG, 256);
            journalsStopped = c.get(JAVA_LONG, 264);
            discardFailures = c.get(JAVA_LONG, 272);
            blocksOutOfWindow = c.get(JAVA_LONG, 280);
            kvStoreQueries = c.get(JAVA_LONG, 288);
            kvStoreHits = c.get(JAVA_LONG, 296);
            kvStoreStored = c.get(JAVA_LONG, 304);
            kvStoreDropped = c.get(JAVA_LONG, 312);
            kvStoreFailures = c.get(JAVA_LONG, 320);
            kvStoreBytesRead = c.get(JAVA_LONG, 328);
            kvStoreBytesWritten = c.get(JAVA_LONG, 336);
        }
    }

    /** An output of one sequence: new tokens, new text, its end, or the progress of its prompt. */
    public static final class Output {
        private static final long SIZE = 264;
        private static final long ERROR_CODE = 112;
        private static final long ERROR = 72;
        private static final long ERROR_LEN = 80;

        /** What ended the sequence. StopReason.NONE unless finishReason is FinishReason.STOP. */
        public final StopReason stopReason;
        /** Id of the request. */
        public final long request;
        /** Id of the sequence. */
        public final long sequence;
        /** userData of the request. */
        public final long userData;
        /** New tokens. Empty if there are none. */
        public final int[] tokens;
        /**
         * Log probability of each token. null if the request did not ask for them. NaN for tokens
         * that have none: those of an echoed prompt before promptLogprobsStart, its first one, and
         * tokens that the host appended.
         */
        public final float[] logprobs;
        /**
         * New text, whole characters only. Empty if there is none. The text can lag behind the
         * tokens.
         */
        public final String text;
        /**
         * The error if finishReason is ERROR, if it is ABORT because the engine was closed, or if a
         * change of an idle sequence failed. Else null.
         */
        public final PagedLlmException error;
        /** Tokens of the prompt. */
        public final long promptTokens;
        /** Tokens generated so far. */
        public final long generatedTokens;
        /** Index of the sequence in its request, from 0. */
        public final int index;
        /**
         * Why a sequence ended. Any value but FinishReason.NONE marks the last output of the
         * sequence.
         */
        public final FinishReason finishReason;
        /**
         * Sum of the log probabilities of all generated tokens, if the request enables log
         * probabilities or for the best of several samples. For a beam: its score after the length
         * penalty. Else 0.
         */
        public final double score;
        /**
         * The most probable tokens at the position of each token, most probable first. null if the
         * request did not ask for them.
         */
        public final Logprob[][] topLogprobs;
        /**
         * Log probabilities of the prompt tokens except the first, from promptLogprobsStart on, if
         * the request enables them. They come in order, before the first generated token, possibly
         * in several outputs.
         */
        public final float[] promptLogprobs;
        /** The most probable tokens at the position of each prompt token, as in topLogprobs. */
        public final Logprob[][] promptTopLogprobs;
        /** State of an exported sequence. null in all other outputs. */
        public final byte[] sequenceState;
        /**
         * In the last output of a sequence: seconds from the call that added, resumed or forked it
         * to its first step. 0 if it never ran, and in all other outputs.
         */
        public final double queuedSeconds;
        /**
         * In the last output of a sequence: seconds from the same call to its first token, or 0.
         */
        public final double firstTokenSeconds;
        /** In the last output of a sequence: seconds from the same call to its last token, or 0. */
        public final double lastTokenSeconds;
        /** In the last output of a sequence: number of times it was preempted. */
        public final long preemptions;
        /**
         * In the last output of a sequence: number of its first tokens that were found in the
         * prefix cache.
         */
        public final long cachedTokens;
        /** The token that ended the sequence, if stopReason is EOS or TOKEN. Else null. */
        public final Integer stopToken;
        /** The string that ended the sequence, if stopReason is STRING. Else null. */
        public final String stopString;
        /**
         * Number of tokens of the sequence that are computed, or that the prefix cache had. Only in
         * outputs of prefillProgress, otherwise 0.
         */
        public final long computedTokens;

        private Output(MemorySegment c) {
            stopReason = StopReason.of(c.get(JAVA_INT, 232));
            request = c.get(JAVA_LONG, 8);
            sequence = c.get(JAVA_LONG, 16);
            userData = c.get(JAVA_LONG, 24);
            tokens = ints(c, 32, 40);
            logprobs = floats(c, 48, 40);
            text = text(c, 56, 64);
            error = errorOf(c);
            promptTokens = c.get(JAVA_LONG, 88);
            generatedTokens = c.get(JAVA_LONG, 96);
            index = c.get(JAVA_INT, 104);
            finishReason = FinishReason.of(c.get(JAVA_INT, 108));
            score = c.get(JAVA_DOUBLE, 120);
            topLogprobs = candidates(c, 128, 136, 40);
            promptLogprobs = floats(c, 144, 152);
            promptTopLogprobs = candidates(c, 160, 168, 152);
            sequenceState = isNull(c, 176) ? null : bytes(c, 176, 184);
            queuedSeconds = c.get(JAVA_DOUBLE, 192);
            firstTokenSeconds = c.get(JAVA_DOUBLE, 200);
            lastTokenSeconds = c.get(JAVA_DOUBLE, 208);
            preemptions = c.get(JAVA_LONG, 216);
            cachedTokens = c.get(JAVA_LONG, 224);
            stopToken = stopReason == StopReason.EOS || stopReason == StopReason.TOKEN ? (Integer) c.get(JAVA_INT, 236) : null;
            stopString = stopReason == StopReason.STRING ? text(c, 240, 248) : null;
            computedTokens = c.get(JAVA_LONG, 256);
        }

        /** Returns whether this is the last output of its sequence. */
        public boolean isLast() {
            return finishReason != FinishReason.NONE;
        }
    }

    /** A sequence as of the last step and the calls since. */
    public static final class SequenceInfo {
        private static final long SIZE = 40;

        /** Id of the request that created it. */
        public final long request;
        /** Number of its tokens, prompt and output. */
        public final long len;
        /**
         * Index of the sequence in its request, from 0. With bestOf it is not the rank of the
         * result.
         */
        public final int index;
        /** true if it waits to be resumed or freed, false if it runs or waits to run. */
        public final boolean idle;
        /**
         * true if it was imported from a machine or an instruction path that does not compute the
         * same bits.
         */
        public final boolean inexact;

        private SequenceInfo(MemorySegment c) {
            request = c.get(JAVA_LONG, 8);
            len = c.get(JAVA_LONG, 16);
            index = c.get(JAVA_INT, 24);
            idle = c.get(JAVA_INT, 28) != 0;
            inexact = c.get(JAVA_LONG, 32) != 0;
        }
    }

    /** An event of the prefix cache. */
    public static final class KvEvent {
        private static final long SIZE = 80;

        /**
         * Number of the step with this event. The first step with events has 1, and each further
         * step with events adds 1. All events of a step take effect together.
         */
        public final long sequenceNumber;
        /** Time of the step in seconds since 1970 (UTC). */
        public final double timeSeconds;
        /** Hash of the block, 32 bytes: its key in a KV store. null for KvEventKind.CLEARED. */
        public final byte[] hash;
        /**
         * Hash of the block before a stored block, 32 bytes. If firstToken is 0, a hash that
         * differs between salts. null unless kind is KvEventKind.STORED.
         */
        public final byte[] parentHash;
        /** Tokens of a stored block. Empty if there are none. */
        public final int[] tokens;
        /** Position of the first token of the block in its sequence. */
        public final long firstToken;
        /** Kind of the event. */
        public final KvEventKind kind;
        /** Place of the block. Values can be added. */
        public final KvMedium medium;
        /**
         * Layer group of the block. Models whose layers have different attention windows have a
         * block in each group for the same tokens. Group 0 has the longest window.
         */
        public final int group;

        private KvEvent(MemorySegment c) {
            sequenceNumber = c.get(JAVA_LONG, 8);
            timeSeconds = c.get(JAVA_DOUBLE, 16);
            hash = hash(c, 24);
            parentHash = hash(c, 32);
            tokens = ints(c, 40, 48);
            firstToken = c.get(JAVA_LONG, 56);
            kind = KvEventKind.of(c.get(JAVA_INT, 64));
            medium = KvMedium.of(c.get(JAVA_INT, 68));
            group = c.get(JAVA_INT, 72);
        }
    }

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

    // ---- library --------------------------------------------------------------------------------

    // The functions of C.
    private static final class Native {
        private static final int EXPECTED_ABI = 1;
        private static final int ADD_SPECIAL = 1;
        private static final int SKIP_SPECIAL = 2;
        private static final int QUEUE_CAPACITY = 64;

        private static final SymbolLookup LIBRARY = load();

        private static final MethodHandle ABI_VERSION = find("pllm_abi_version",
                FunctionDescriptor.of(JAVA_INT));

        static int abi_version() {
            try {
                return (int) ABI_VERSION.invokeExact();
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle VERSION = find("pllm_version",
                FunctionDescriptor.of(ADDRESS));

        static MemorySegment version() {
            try {
                return (MemorySegment) VERSION.invokeExact();
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BUILD_INFO = find("pllm_build_info",
                FunctionDescriptor.of(ADDRESS));

        static MemorySegment build_info() {
            try {
                return (MemorySegment) BUILD_INFO.invokeExact();
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ERROR_CODE = find("pllm_error_code",
                FunctionDescriptor.of(JAVA_INT, ADDRESS));

        static int error_code(MemorySegment error) {
            try {
                return (int) ERROR_CODE.invokeExact(error);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ERROR_MESSAGE = find("pllm_error_message",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment error_message(MemorySegment error) {
            try {
                return (MemorySegment) ERROR_MESSAGE.invokeExact(error);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ERROR_PROMPT_TOKENS = find("pllm_error_prompt_tokens",
                FunctionDescriptor.of(JAVA_LONG, ADDRESS));

        static long error_prompt_tokens(MemorySegment error) {
            try {
                return (long) ERROR_PROMPT_TOKENS.invokeExact(error);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ERROR_MAX_MODEL_LEN = find("pllm_error_max_model_len",
                FunctionDescriptor.of(JAVA_LONG, ADDRESS));

        static long error_max_model_len(MemorySegment error) {
            try {
                return (long) ERROR_MAX_MODEL_LEN.invokeExact(error);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ERROR_IS_TEMPORARY = find("pllm_error_is_temporary",
                FunctionDescriptor.of(JAVA_INT, ADDRESS));

        static int error_is_temporary(MemorySegment error) {
            try {
                return (int) ERROR_IS_TEMPORARY.invokeExact(error);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ERROR_FREE = find("pllm_error_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void error_free(MemorySegment error) {
            try {
                ERROR_FREE.invokeExact(error);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BUDGET_CREATE = find("pllm_budget_create",
                FunctionDescriptor.of(ADDRESS, JAVA_LONG, JAVA_LONG, ADDRESS));

        static MemorySegment budget_create(long bytes, long maxBytes, MemorySegment outBudget) {
            try {
                return (MemorySegment) BUDGET_CREATE.invokeExact(bytes, maxBytes, outBudget);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BUDGET_FREE = find("pllm_budget_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void budget_free(MemorySegment budget) {
            try {
                BUDGET_FREE.invokeExact(budget);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BUDGET_RESIZE = find("pllm_budget_resize",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG));

        static MemorySegment budget_resize(MemorySegment budget, long bytes) {
            try {
                return (MemorySegment) BUDGET_RESIZE.invokeExact(budget, bytes);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BUDGET_GET_INFO = find("pllm_budget_get_info",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment budget_get_info(MemorySegment budget, MemorySegment outInfo) {
            try {
                return (MemorySegment) BUDGET_GET_INFO.invokeExact(budget, outInfo);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_BUDGET = find("pllm_engine_budget",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment engine_budget(MemorySegment engine) {
            try {
                return (MemorySegment) ENGINE_BUDGET.invokeExact(engine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle DRY_INIT = find("pllm_dry_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void dry_init(MemorySegment dry, long structSize) {
            try {
                DRY_INIT.invokeExact(dry, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BEAM_INIT = find("pllm_beam_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void beam_init(MemorySegment beam, long structSize) {
            try {
                BEAM_INIT.invokeExact(beam, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_OPTIONS_INIT = find("pllm_engine_options_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void engine_options_init(MemorySegment options, long structSize) {
            try {
                ENGINE_OPTIONS_INIT.invokeExact(options, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_PLAN = find("pllm_engine_plan",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_plan(MemorySegment options, MemorySegment outPlan) {
            try {
                return (MemorySegment) ENGINE_PLAN.invokeExact(options, outPlan);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_CREATE = find("pllm_engine_create",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_create(MemorySegment options, MemorySegment outEngine) {
            try {
                return (MemorySegment) ENGINE_CREATE.invokeExact(options, outEngine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle WORKER_RUN = find("pllm_worker_run",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment worker_run(MemorySegment options) {
            try {
                return (MemorySegment) WORKER_RUN.invokeExact(options);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_FREE = find("pllm_engine_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void engine_free(MemorySegment engine) {
            try {
                ENGINE_FREE.invokeExact(engine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_HEALTH = find("pllm_engine_health",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment engine_health(MemorySegment engine) {
            try {
                return (MemorySegment) ENGINE_HEALTH.invokeExact(engine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_GET_MODEL_INFO = find("pllm_engine_get_model_info",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_get_model_info(MemorySegment engine, MemorySegment outInfo) {
            try {
                return (MemorySegment) ENGINE_GET_MODEL_INFO.invokeExact(engine, outInfo);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle REQUEST_INIT = find("pllm_request_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void request_init(MemorySegment request, long structSize) {
            try {
                REQUEST_INIT.invokeExact(request, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SAMPLING_INIT = find("pllm_sampling_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void sampling_init(MemorySegment sampling, long structSize) {
            try {
                SAMPLING_INIT.invokeExact(sampling, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_ADD_REQUEST = find("pllm_engine_add_request",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_add_request(MemorySegment engine, MemorySegment request, MemorySegment outRequest) {
            try {
                return (MemorySegment) ENGINE_ADD_REQUEST.invokeExact(engine, request, outRequest);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_PREDICT_ADMISSION = find("pllm_engine_predict_admission",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_predict_admission(MemorySegment engine, MemorySegment request, MemorySegment outAdmission) {
            try {
                return (MemorySegment) ENGINE_PREDICT_ADMISSION.invokeExact(engine, request, outAdmission);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_ABORT = find("pllm_engine_abort",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG));

        static MemorySegment engine_abort(MemorySegment engine, long request) {
            try {
                return (MemorySegment) ENGINE_ABORT.invokeExact(engine, request);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_STEP = find("pllm_engine_step",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_step(MemorySegment engine, MemorySegment outStep) {
            try {
                return (MemorySegment) ENGINE_STEP.invokeExact(engine, outStep);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_START = find("pllm_engine_start",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment engine_start(MemorySegment engine) {
            try {
                return (MemorySegment) ENGINE_START.invokeExact(engine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_STOP = find("pllm_engine_stop",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment engine_stop(MemorySegment engine) {
            try {
                return (MemorySegment) ENGINE_STOP.invokeExact(engine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_QUEUE = find("pllm_engine_queue",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment engine_queue(MemorySegment engine) {
            try {
                return (MemorySegment) ENGINE_QUEUE.invokeExact(engine);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_GET_STATS = find("pllm_engine_get_stats",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_get_stats(MemorySegment engine, MemorySegment outStats) {
            try {
                return (MemorySegment) ENGINE_GET_STATS.invokeExact(engine, outStats);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_SNAPSHOT = find("pllm_engine_snapshot",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, JAVA_LONG, ADDRESS));

        static MemorySegment engine_snapshot(MemorySegment engine, long maxBlocks, long maxSequences, MemorySegment outJson) {
            try {
                return (MemorySegment) ENGINE_SNAPSHOT.invokeExact(engine, maxBlocks, maxSequences, outJson);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_GET_METRICS = find("pllm_engine_get_metrics",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_get_metrics(MemorySegment engine, MemorySegment outText) {
            try {
                return (MemorySegment) ENGINE_GET_METRICS.invokeExact(engine, outText);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle QUEUE_CREATE = find("pllm_queue_create",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment queue_create(MemorySegment engine, long capacity, MemorySegment outQueue) {
            try {
                return (MemorySegment) QUEUE_CREATE.invokeExact(engine, capacity, outQueue);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle QUEUE_FREE = find("pllm_queue_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void queue_free(MemorySegment queue) {
            try {
                QUEUE_FREE.invokeExact(queue);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle QUEUE_GET_EVENT_FD = find("pllm_queue_get_event_fd",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment queue_get_event_fd(MemorySegment queue, MemorySegment outFd) {
            try {
                return (MemorySegment) QUEUE_GET_EVENT_FD.invokeExact(queue, outFd);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle QUEUE_POLL = find("pllm_queue_poll",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment queue_poll(MemorySegment queue, long timeoutMs, MemorySegment outOutputs) {
            try {
                return (MemorySegment) QUEUE_POLL.invokeExact(queue, timeoutMs, outOutputs);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle OUTPUTS_LEN = find("pllm_outputs_len",
                FunctionDescriptor.of(JAVA_LONG, ADDRESS));

        static long outputs_len(MemorySegment outputs) {
            try {
                return (long) OUTPUTS_LEN.invokeExact(outputs);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle OUTPUTS_GET = find("pllm_outputs_get",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG));

        static MemorySegment outputs_get(MemorySegment outputs, long i) {
            try {
                return (MemorySegment) OUTPUTS_GET.invokeExact(outputs, i);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle OUTPUTS_FREE = find("pllm_outputs_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void outputs_free(MemorySegment outputs) {
            try {
                OUTPUTS_FREE.invokeExact(outputs);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle FORK_INIT = find("pllm_fork_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void fork_init(MemorySegment fork, long structSize) {
            try {
                FORK_INIT.invokeExact(fork, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle RESUME_INIT = find("pllm_resume_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void resume_init(MemorySegment resume, long structSize) {
            try {
                RESUME_INIT.invokeExact(resume, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle PIN_INIT = find("pllm_pin_init",
                FunctionDescriptor.ofVoid(ADDRESS, JAVA_LONG));

        static void pin_init(MemorySegment pin, long structSize) {
            try {
                PIN_INIT.invokeExact(pin, structSize);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_FORK = find("pllm_sequence_fork",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS, ADDRESS));

        static MemorySegment sequence_fork(MemorySegment engine, long sequence, MemorySegment how, MemorySegment outSequences) {
            try {
                return (MemorySegment) SEQUENCE_FORK.invokeExact(engine, sequence, how, outSequences);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_APPEND = find("pllm_sequence_append",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS, JAVA_LONG));

        static MemorySegment sequence_append(MemorySegment engine, long sequence, MemorySegment tokens, long tokensLen) {
            try {
                return (MemorySegment) SEQUENCE_APPEND.invokeExact(engine, sequence, tokens, tokensLen);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_REWIND = find("pllm_sequence_rewind",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, JAVA_LONG));

        static MemorySegment sequence_rewind(MemorySegment engine, long sequence, long len) {
            try {
                return (MemorySegment) SEQUENCE_REWIND.invokeExact(engine, sequence, len);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_RESUME = find("pllm_sequence_resume",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment sequence_resume(MemorySegment engine, long sequence, MemorySegment how) {
            try {
                return (MemorySegment) SEQUENCE_RESUME.invokeExact(engine, sequence, how);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_FREE = find("pllm_sequence_free",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG));

        static MemorySegment sequence_free(MemorySegment engine, long sequence) {
            try {
                return (MemorySegment) SEQUENCE_FREE.invokeExact(engine, sequence);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_GET_INFO = find("pllm_sequence_get_info",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment sequence_get_info(MemorySegment engine, long sequence, MemorySegment outInfo) {
            try {
                return (MemorySegment) SEQUENCE_GET_INFO.invokeExact(engine, sequence, outInfo);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_EXPORT = find("pllm_sequence_export",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment sequence_export(MemorySegment engine, long sequence, MemorySegment queue) {
            try {
                return (MemorySegment) SEQUENCE_EXPORT.invokeExact(engine, sequence, queue);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle SEQUENCE_IMPORT = find("pllm_sequence_import",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_LONG, ADDRESS, ADDRESS));

        static MemorySegment sequence_import(MemorySegment engine, MemorySegment state, long stateLen, MemorySegment queue, MemorySegment outSequence) {
            try {
                return (MemorySegment) SEQUENCE_IMPORT.invokeExact(engine, state, stateLen, queue, outSequence);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle PREFIX_PIN = find("pllm_prefix_pin",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment prefix_pin(MemorySegment engine, MemorySegment pin, MemorySegment outPin) {
            try {
                return (MemorySegment) PREFIX_PIN.invokeExact(engine, pin, outPin);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle PREFIX_UNPIN = find("pllm_prefix_unpin",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG));

        static MemorySegment prefix_unpin(MemorySegment engine, long pin) {
            try {
                return (MemorySegment) PREFIX_UNPIN.invokeExact(engine, pin);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_TOKENIZE = find("pllm_engine_tokenize",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_LONG, JAVA_INT, ADDRESS));

        static MemorySegment engine_tokenize(MemorySegment engine, MemorySegment text, long len, int flags, MemorySegment outTokens) {
            try {
                return (MemorySegment) ENGINE_TOKENIZE.invokeExact(engine, text, len, flags, outTokens);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_DETOKENIZE = find("pllm_engine_detokenize",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_LONG, JAVA_INT, ADDRESS));

        static MemorySegment engine_detokenize(MemorySegment engine, MemorySegment tokens, long len, int flags, MemorySegment outText) {
            try {
                return (MemorySegment) ENGINE_DETOKENIZE.invokeExact(engine, tokens, len, flags, outText);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_GET_TOKEN_BYTES = find("pllm_engine_get_token_bytes",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_INT, ADDRESS, ADDRESS));

        static MemorySegment engine_get_token_bytes(MemorySegment engine, int token, MemorySegment outBytes, MemorySegment outLen) {
            try {
                return (MemorySegment) ENGINE_GET_TOKEN_BYTES.invokeExact(engine, token, outBytes, outLen);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_RENDER_CHAT = find("pllm_engine_render_chat",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment engine_render_chat(MemorySegment engine, MemorySegment messagesJson, long len, MemorySegment outText) {
            try {
                return (MemorySegment) ENGINE_RENDER_CHAT.invokeExact(engine, messagesJson, len, outText);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle TOKENS_DATA = find("pllm_tokens_data",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment tokens_data(MemorySegment tokens) {
            try {
                return (MemorySegment) TOKENS_DATA.invokeExact(tokens);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle TOKENS_LEN = find("pllm_tokens_len",
                FunctionDescriptor.of(JAVA_LONG, ADDRESS));

        static long tokens_len(MemorySegment tokens) {
            try {
                return (long) TOKENS_LEN.invokeExact(tokens);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle TOKENS_FREE = find("pllm_tokens_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void tokens_free(MemorySegment tokens) {
            try {
                TOKENS_FREE.invokeExact(tokens);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BYTES_DATA = find("pllm_bytes_data",
                FunctionDescriptor.of(ADDRESS, ADDRESS));

        static MemorySegment bytes_data(MemorySegment bytes) {
            try {
                return (MemorySegment) BYTES_DATA.invokeExact(bytes);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BYTES_LEN = find("pllm_bytes_len",
                FunctionDescriptor.of(JAVA_LONG, ADDRESS));

        static long bytes_len(MemorySegment bytes) {
            try {
                return (long) BYTES_LEN.invokeExact(bytes);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle BYTES_FREE = find("pllm_bytes_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void bytes_free(MemorySegment bytes) {
            try {
                BYTES_FREE.invokeExact(bytes);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle RESPONSE_PARSER_CREATE = find("pllm_response_parser_create",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment response_parser_create(MemorySegment engine, MemorySegment settingsJson, long len, MemorySegment outParser) {
            try {
                return (MemorySegment) RESPONSE_PARSER_CREATE.invokeExact(engine, settingsJson, len, outParser);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle RESPONSE_PARSER_FEED = find("pllm_response_parser_feed",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_LONG, ADDRESS));

        static MemorySegment response_parser_feed(MemorySegment parser, MemorySegment text, long len, MemorySegment outDeltas) {
            try {
                return (MemorySegment) RESPONSE_PARSER_FEED.invokeExact(parser, text, len, outDeltas);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle RESPONSE_PARSER_FINISH = find("pllm_response_parser_finish",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment response_parser_finish(MemorySegment parser, MemorySegment outDeltas) {
            try {
                return (MemorySegment) RESPONSE_PARSER_FINISH.invokeExact(parser, outDeltas);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle RESPONSE_PARSER_FREE = find("pllm_response_parser_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void response_parser_free(MemorySegment parser) {
            try {
                RESPONSE_PARSER_FREE.invokeExact(parser);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_POLL_KV_EVENTS = find("pllm_engine_poll_kv_events",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_INT, ADDRESS));

        static MemorySegment engine_poll_kv_events(MemorySegment engine, int timeoutMs, MemorySegment outEvents) {
            try {
                return (MemorySegment) ENGINE_POLL_KV_EVENTS.invokeExact(engine, timeoutMs, outEvents);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_SNAPSHOT_KV_EVENTS = find("pllm_engine_snapshot_kv_events",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));

        static MemorySegment engine_snapshot_kv_events(MemorySegment engine, MemorySegment outEvents) {
            try {
                return (MemorySegment) ENGINE_SNAPSHOT_KV_EVENTS.invokeExact(engine, outEvents);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle ENGINE_HASH_PROMPT = find("pllm_engine_hash_prompt",
                FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS, JAVA_INT, ADDRESS));

        static MemorySegment engine_hash_prompt(MemorySegment engine, MemorySegment request, int group, MemorySegment outHashes) {
            try {
                return (MemorySegment) ENGINE_HASH_PROMPT.invokeExact(engine, request, group, outHashes);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle KV_EVENTS_LEN = find("pllm_kv_events_len",
                FunctionDescriptor.of(JAVA_LONG, ADDRESS));

        static long kv_events_len(MemorySegment events) {
            try {
                return (long) KV_EVENTS_LEN.invokeExact(events);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle KV_EVENTS_GET = find("pllm_kv_events_get",
                FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_LONG));

        static MemorySegment kv_events_get(MemorySegment events, long i) {
            try {
                return (MemorySegment) KV_EVENTS_GET.invokeExact(events, i);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static final MethodHandle KV_EVENTS_FREE = find("pllm_kv_events_free",
                FunctionDescriptor.ofVoid(ADDRESS));

        static void kv_events_free(MemorySegment events) {
            try {
                KV_EVENTS_FREE.invokeExact(events);
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        // Finds the library by the property pagedllm.library, the environment variable PAGEDLLM_LIBRARY, or
        // as the dynamic linker does.
        private static SymbolLookup load() {
            String named = System.getProperty("pagedllm.library", System.getenv("PAGEDLLM_LIBRARY"));
            String path = named == null || named.isEmpty() ? "libpagedllm.so." + EXPECTED_ABI : named;
            SymbolLookup library;
            try {
                library = SymbolLookup.libraryLookup(path, Arena.global());
            } catch (IllegalArgumentException error) {
                throw new UnsatisfiedLinkError(path + " cannot be loaded; install the package for this machine, or set PAGEDLLM_LIBRARY to "
                        + "the path of the library");
            }
            int version = (int) number(library, "pllm_abi_version", path);
            if (version != EXPECTED_ABI) {
                throw new UnsatisfiedLinkError(path + " has ABI version " + version + " (this file: " + EXPECTED_ABI
                        + "); use the file and the library of one release");
            }
            return library;
        }

        private static int number(SymbolLookup library, String name, String path) {
            MemorySegment function = library.find(name)
                    .orElseThrow(() -> new UnsatisfiedLinkError(path + " has no " + name + "; set PAGEDLLM_LIBRARY to the path of the library"));
            try {
                return (int) Linker.nativeLinker().downcallHandle(function, FunctionDescriptor.of(JAVA_INT)).invokeExact();
            } catch (Throwable thrown) {
                throw unexpected(thrown);
            }
        }

        private static MethodHandle find(String name, FunctionDescriptor descriptor) {
            MemorySegment function = LIBRARY.find(name).orElseThrow(() -> new UnsatisfiedLinkError(
                    "the library has no " + name + "; use the file and the library of one release"));
            return Linker.nativeLinker().downcallHandle(function, descriptor);
        }

        // Returns a text of the library that ends with NUL.
        static String string(MemorySegment text) {
            return text.reinterpret(Long.MAX_VALUE).getString(0);
        }

        // A call of C throws nothing.
        private static AssertionError unexpected(Throwable thrown) {
            return new AssertionError(thrown);
        }
    }
}
