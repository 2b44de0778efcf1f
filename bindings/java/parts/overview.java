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
