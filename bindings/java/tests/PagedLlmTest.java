// Tests of the wrapper for Java. Each public method without parameters is a test.
// usage: PagedLlmTest MODEL_DIR
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import pagedllm.PagedLlm;
import pagedllm.PagedLlm.*;

public final class PagedLlmTest {
    private static String model;

    // ---- helpers

    private static void equal(Object expected, Object actual) {
        if (!Objects.equals(expected, actual)) throw new AssertionError("expected " + expected + ", got " + actual);
    }

    private static void isTrue(boolean condition, String what) {
        if (!condition) throw new AssertionError(what);
    }

    private static void fails(Code code, String message, Runnable call) {
        try {
            call.run();
        } catch (PagedLlmException error) {
            equal(code, error.code);
            isTrue(error.getMessage().contains(message), error.getMessage());
            return;
        }
        throw new AssertionError("no error " + code);
    }

    /** Returns a request with more outputs than the queue of a stream holds, so that it pauses until they are read. */
    private static Request endless(Engine engine) {
        Request request = chat(engine, "Tell me a short story.");
        request.sampling.ignoreEos = true;
        return request;
    }

    private static Options options() {
        Options options = new Options();
        options.modelPath = model;
        options.kvBytes = 16 << 20;
        return options;
    }

    private static Engine open() {
        return Engine.open(options());
    }

    private static Request chat(Engine engine, String question) {
        Request request = new Request(engine.renderChat("[{\"role\": \"user\", \"content\": \"" + question + "\"}]"));
        request.addSpecial = false;
        request.sampling.temperature = 0;
        return request;
    }

    private static final String FRANCE = "What is the capital of France?";
    private static final String PARIS = "The capital of France is Paris.";

    // ---- requests

    public static void a_request_has_the_text_and_its_details() {
        try (Engine engine = open()) {
            Request request = chat(engine, FRANCE);
            request.userData = 7;
            request.sampling.logprobs = true;
            request.sampling.topLogprobs = 2;
            request.sampling.promptLogprobs = true;
            Completion completion = engine.generate(request);
            equal(PARIS, completion.text());
            equal(completion.tokens().length, completion.logprobs().length);
            equal(FinishReason.STOP, completion.last().finishReason);
            equal(StopReason.EOS, completion.last().stopReason);
            equal(7L, completion.last().userData);
            equal((long) completion.tokens().length, completion.last().generatedTokens);
            isTrue(completion.last().lastTokenSeconds > 0, "no time");
        }
    }

    public static void the_candidates_of_a_token_begin_with_it() {
        try (Engine engine = open()) {
            Request request = chat(engine, FRANCE);
            request.sampling.logprobs = true;
            request.sampling.topLogprobs = 3;
            try (Stream stream = engine.stream(request)) {
                for (Output output : stream) {
                    for (int i = 0; i < output.tokens.length; i++) {
                        equal(3, output.topLogprobs[i].length);
                        equal(new Logprob(output.tokens[i], output.logprobs[i]), output.topLogprobs[i][0]);
                    }
                }
            }
        }
    }

    public static void each_kind_of_option_reaches_the_library() {
        try (Engine engine = open()) {
            Request request = chat(engine, FRANCE);
            request.sampling.stop = List.of("nothing", " Paris");
            Completion stopped = engine.generate(request);
            equal("The capital of France is", stopped.text());
            equal(" Paris", stopped.last().stopString);
            request.sampling.stop = List.of();

            int paris = engine.generate(request).tokens()[5];
            request.sampling.logitBias = Map.of(paris, -100f);
            isTrue(engine.generate(request).tokens()[5] != paris, "the bias has no effect");
            request.sampling.logitBias = Map.of();
            request.sampling.badWordsIds = List.of(new int[] {paris});
            isTrue(engine.generate(request).tokens()[5] != paris, "the bad word has no effect");
            request.sampling.badWordsIds = List.of();
            request.sampling.stopTokenIds = new int[] {paris};
            equal((Integer) paris, engine.generate(request).last().stopToken);
            request.sampling.stopTokenIds = null;
            request.sampling.allowedTokenIds = new int[] {paris};
            request.sampling.maxTokens = 3;
            isTrue(Arrays.equals(new int[] {paris, paris, paris}, engine.generate(request).tokens()), "other tokens");
            request.sampling.allowedTokenIds = null;
            request.sampling.dry = new Dry();
            request.sampling.dry.sequenceBreakers = List.of();
            request.cacheSalt = "tenant".getBytes(StandardCharsets.UTF_8);
            equal(3, engine.generate(request).tokens().length);
        }
    }

    public static void grammars_constrain_the_text() {
        try (Engine engine = open()) {
            Request request = chat(engine, FRANCE);
            request.sampling.grammar = Grammar.choice(List.of("Rome", "Oslo"));
            isTrue(List.of("Rome", "Oslo").contains(engine.generate(request).text()), "no choice");
            request.sampling.grammar = Grammar.regex("[0-9]{3}");
            isTrue(engine.generate(request).text().matches("[0-9]{3}"), "no match");
            request.sampling.grammar = Grammar.jsonSchema("{\"enum\": [12]}");
            equal("12", engine.generate(request).text());
            request.sampling.grammar = Grammar.jsonSchema("{");
            fails(Code.INVALID_ARGUMENT, "", () -> engine.generate(request));
        }
    }

    public static void a_request_has_several_results_or_beams() {
        try (Engine engine = open()) {
            Request request = new Request("Once");
            request.n = 3;
            request.sampling.seed = 5L;
            request.sampling.maxTokens = 6;
            List<Completion> results = engine.generateAll(request);
            equal(3, results.size());
            for (int i = 0; i < 3; i++) equal(i, results.get(i).last().index);
            equal(results.get(1).text(), engine.generateAll(request).get(1).text());
            request.sampling.seed = null;
            request.beam = new Beam();
            isTrue(engine.generateAll(request).get(0).last().score >= engine.generateAll(request).get(2).last().score, "no order");
            request.n = 1;
            request.prompt = null;
            request.beam = null;
            request.promptTokenIds = engine.tokenize("Once", true);
            equal(6, engine.generate(request).tokens().length);
        }
    }

    public static void each_kind_of_output_makes_the_same_completion() {
        try (Engine engine = open()) {
            Request request = chat(engine, FRANCE);
            request.sampling.logprobs = true;
            int[] tokens = engine.generate(request).tokens();
            for (OutputKind kind : OutputKind.values()) {
                request.sampling.outputKind = kind;
                Completion completion = engine.generate(request);
                equal(PARIS, completion.text());
                isTrue(Arrays.equals(tokens, completion.tokens()), "other tokens");
                equal(tokens.length, completion.logprobs().length);
            }
        }
    }

    public static void closing_a_stream_aborts_its_request() {
        try (Engine engine = open()) {
            Request request = endless(engine);
            for (int i = 0; i < 20; i++) {
                try (Stream stream = engine.stream(request)) {
                    stream.next();
                }
            }
            while (engine.stats().running > 0) Thread.onSpinWait();
            equal(PARIS, engine.generate(chat(engine, FRANCE)).text());
        }
    }

    public static void many_threads_get_the_text_of_one() throws Exception {
        try (Engine engine = open(); ExecutorService threads = Executors.newVirtualThreadPerTaskExecutor()) {
            List<Future<String>> answers = new ArrayList<>();
            for (int i = 0; i < 100; i++) answers.add(threads.submit(() -> engine.generate(chat(engine, FRANCE)).text()));
            for (Future<String> answer : answers) equal(PARIS, answer.get());
        }
    }

    public static void one_thread_can_read_the_outputs_of_all_requests() {
        try (Engine engine = Engine.openWithHostSteps(options(), null)) {
            for (int i = 0; i < 10; i++) {
                Request request = chat(engine, FRANCE);
                request.userData = i;
                engine.add(request);
            }
            String[] texts = new String[10];
            Arrays.fill(texts, "");
            Step step;
            do {
                step = engine.step();
                for (Output output : engine.queue().poll()) texts[(int) output.userData] += output.text;
            } while (step.unfinished > 0);
            for (String text : texts) equal(PARIS, text);
        }
    }

    // ---- sequences

    public static void a_sequence_is_kept_forked_rewound_and_moved() {
        try (Engine engine = open(); Queue queue = engine.createQueue(1000)) {
            Request request = chat(engine, FRANCE);
            request.keep = true;
            request.queue = queue;
            long id = engine.add(request);
            String text = "";
            long sequence = 0;
            for (Output last = null; last == null || !last.isLast();) {
                for (Output output : queue.poll(-1)) {
                    text += output.text;
                    sequence = output.sequence;
                    last = output;
                }
            }
            equal(PARIS, text);
            equal(id, engine.sequenceInfo(sequence).request);
            isTrue(engine.sequenceInfo(sequence).idle, "it runs");
            long length = engine.sequenceInfo(sequence).len;
            ForkOptions how = new ForkOptions();
            how.n = 2;
            long[] children = engine.fork(sequence, how);
            equal(2, children.length);
            engine.rewind(children[0], length - 2);
            engine.append(children[0], new int[] {3});
            while (engine.sequenceInfo(children[0]).len != length - 1) Thread.onSpinWait();
            Resume resume = new Resume();
            resume.keep = false;
            resume.sampling.temperature = 0;
            resume.sampling.maxTokens = 2;
            engine.resume(children[0], resume);
            engine.exportSequence(sequence, engine.queue());
            byte[] state = engine.queue().poll(-1).get(0).sequenceState;
            isTrue(state.length > 100, "no state");
            long imported = engine.importSequence(state, queue);
            equal(length, engine.sequenceInfo(imported).len);
            engine.free(imported);
            engine.free(sequence);
            engine.free(children[1]);
            long gone = sequence;
            fails(Code.NOT_FOUND, "", () -> engine.free(gone));
        }
    }

    // ---- text

    public static void text_is_utf8_in_both_directions() {
        try (Engine engine = open()) {
            String text = "Grüße, 日本 \uD83D\uDE00 \0 end";
            int[] tokens = engine.tokenize(text, false);
            equal(text, engine.detokenize(tokens, true));
            StringBuilder bytes = new StringBuilder();
            for (int token : tokens) bytes.append(new String(engine.tokenBytes(token), StandardCharsets.ISO_8859_1));
            equal(text, new String(bytes.toString().getBytes(StandardCharsets.ISO_8859_1), StandardCharsets.UTF_8));
            equal(0, engine.tokenize("", false).length);
            equal("", engine.detokenize(new int[0], true));
        }
    }

    public static void a_parser_separates_reasoning() {
        try (ResponseParser parser = new ResponseParser(null, "{\"format\": \"think\"}")) {
            String deltas = parser.feed("<think>a</think>b") + parser.finish();
            isTrue(deltas.contains("{\"reasoning_content\":\"a\"}") && deltas.contains("{\"content\":\"b\"}"), deltas);
            fails(Code.INVALID_ARGUMENT, "", parser::finish);
        }
        try (Engine engine = open(); ResponseParser parser = new ResponseParser(engine, "{}")) {
            isTrue(parser.feed("x").contains("x"), "no content");
        }
    }

    // ---- memory and state

    public static void plans_and_statistics_have_their_numbers() {
        Plan plan = Engine.plan(options());
        equal(16L << 20, plan.kvBytes);
        equal(Dtype.BF16, plan.kvDtype);
        try (Engine engine = open()) {
            ModelInfo info = engine.modelInfo();
            equal("LlamaForCausalLM", info.architecture);
            equal(List.of(5, 1), Arrays.stream(info.eosTokenIds).boxed().toList());
            equal(Packed.UNUSED, info.packed);
            engine.generate(chat(engine, FRANCE));
            equal(1L, engine.stats().finishedStop);
            isTrue(engine.metrics().contains("pagedllm_generation_tokens_total"), "no metrics");
            isTrue(engine.snapshot(1000, 1000).contains(",\"cached\"]"), "no cached blocks");
            isTrue(engine.predictAdmission(chat(engine, FRANCE)).admits, "no admission");
            engine.checkHealth();
            isTrue(PagedLlm.buildInfo().contains("LlamaForCausalLM"), "no architectures");
            equal(true, PagedLlm.version().matches("\\d+\\.\\d+\\.\\d+"));
        }
    }

    public static void engines_share_a_budget() {
        try (Budget budget = Budget.create(32 << 20, 64 << 20)) {
            Options options = options();
            options.kvBytes = 0;
            options.budget = budget;
            try (Engine first = Engine.open(options); Engine second = Engine.open(options)) {
                equal(2L, budget.info().engines);
                equal(PARIS, first.generate(chat(first, FRANCE)).text());
                equal(PARIS, second.generate(chat(second, FRANCE)).text());
                budget.resize(48 << 20);
                equal(48L << 20, first.budget().info().bytes);
            }
            equal(0L, budget.info().engines);
        }
    }

    public static void events_have_the_hashes_of_the_prompt() {
        Options options = options();
        options.kvEventsCapacity = 1000;
        try (Engine engine = Engine.open(options)) {
            Request request = chat(engine, "Tell me a short story.");
            engine.generate(request);
            byte[][] hashes = engine.hashPrompt(request, 0);
            isTrue(hashes.length > 0, "no full block");
            KvEvent stored = engine.pollKvEvents(1000).stream().filter(event -> event.kind == KvEventKind.STORED).findFirst().orElseThrow();
            isTrue(Arrays.equals(hashes[0], stored.hash), "another hash");
            equal(0L, stored.firstToken);
            equal(KvEventKind.CLEARED, engine.snapshotKvEvents().get(0).kind);
        }
    }

    public static void a_prefix_can_be_pinned() {
        try (Engine engine = open()) {
            Request request = chat(engine, "Hello ".repeat(60));
            Pin pin = new Pin(request.prompt);
            pin.addSpecial = false;
            long id = engine.pin(pin);
            while (engine.stats().blocksUsed < 4) Thread.onSpinWait();
            isTrue(engine.generate(request).last().cachedTokens >= 64, "not cached");
            engine.unpin(id);
            fails(Code.NOT_FOUND, "", () -> engine.unpin(id));
        }
    }

    // ---- errors and lifetimes

    public static void errors_have_a_code_and_the_numbers() {
        Options missing = options();
        missing.modelPath = "missing";
        fails(Code.IO, "missing", () -> Engine.open(missing));
        missing.modelPath = null;
        fails(Code.INVALID_ARGUMENT, "model_path", () -> Engine.open(missing));
        Options wrong = options();
        wrong.threads = -1;
        fails(Code.INVALID_ARGUMENT, "threads", () -> Engine.open(wrong));
        try (Engine engine = open()) {
            Request request = chat(engine, FRANCE);
            request.sampling.topP = 7;
            fails(Code.INVALID_ARGUMENT, "top_p is 7", () -> engine.add(request));
            try {
                engine.generate(new Request("Hello ".repeat(2000)));
                throw new AssertionError("no error");
            } catch (PagedLlmException error) {
                isTrue(error.promptTokens > error.maxModelLen && error.maxModelLen == 1024 && !error.isTemporary, error.getMessage());
            }
            try {
                engine.start();
                throw new AssertionError("no error");
            } catch (PagedLlmException error) {
                isTrue(error.code == Code.BUSY && error.isTemporary, "the thread of the engine is running");
            }
            fails(Code.NOT_FOUND, "", () -> engine.abort(999));
            fails(Code.INVALID_ARGUMENT, "", () -> engine.renderChat("no JSON"));
            fails(Code.INVALID_ARGUMENT, "", () -> engine.tokenBytes(-1));
            equal(PARIS, engine.generate(chat(engine, FRANCE)).text());
        }
    }

    public static void loading_can_be_cancelled_by_a_result_or_an_exception() {
        fails(Code.CANCELLED, "", () -> Engine.open(options(), (done, total) -> false));
        try {
            Engine.open(options(), (done, total) -> {
                throw new IllegalStateException("stop");
            });
            throw new AssertionError("no error");
        } catch (IllegalStateException error) {
            equal("stop", error.getMessage());
        }
        long[] last = new long[2];
        Engine.open(options(), (done, total) -> {
            last[0] = done;
            last[1] = total;
            return true;
        }).close();
        isTrue(last[1] > 0 && last[0] == last[1], "no progress");
    }

    public static void closed_objects_refuse_calls() {
        Engine engine = open();
        Queue queue = engine.createQueue(10);
        Stream stream = engine.stream(endless(engine));
        engine.close();
        engine.close();
        fails(Code.CLOSED, "the engine is closed", engine::stats);
        fails(Code.CLOSED, "", () -> engine.queue().poll());
        fails(Code.CLOSED, "", () -> {
            while (stream.hasNext()) stream.next();
        });
        stream.close();
        queue.close();
        fails(Code.CLOSED, "the queue is closed", queue::poll);
        Budget budget = Budget.create(1 << 20, 0);
        budget.close();
        fails(Code.CLOSED, "the budget is closed", budget::info);
    }

    public static void objects_can_be_closed_while_threads_use_them() throws Exception {
        for (int i = 0; i < 10; i++) {
            Engine engine = open();
            Request request = endless(engine);
            try (ExecutorService threads = Executors.newFixedThreadPool(4)) {
                Callable<String> read = () -> {
                    try {
                        return engine.generate(request).text();
                    } catch (PagedLlmException error) {
                        return error.code.name();
                    }
                };
                List<Future<String>> results = new ArrayList<>();
                for (int j = 0; j < 4; j++) results.add(threads.submit(read));
                Thread.sleep(i);
                engine.close();
                for (Future<String> result : results) equal("CLOSED", result.get());
            }
        }
    }

    // ---- workers

    public static void workers_of_a_list_of_devices_have_the_tokens_of_one() {
        Options options = options();
        options.device = "cpu,cpu";
        options.workerTimeoutMs = 300_000;
        try (Engine alone = open(); Engine layers = Engine.open(options)) {
            options.pipelineParallel = 2;
            try (Engine stages = Engine.open(options)) {
                for (String question : List.of(FRANCE, "What is 7 + 5?", "What does a cow say?")) {
                    Request request = chat(alone, question);
                    int[] expected = alone.generate(request).tokens();
                    isTrue(Arrays.equals(expected, layers.generate(request).tokens()), "other tokens of two parts of each layer");
                    isTrue(Arrays.equals(expected, stages.generate(request).tokens()), "other tokens of two stages");
                }
            }
        }
        options.tensorParallel = 3;
        fails(Code.INVALID_ARGUMENT, "tensor_parallel", () -> Engine.open(options));
    }

    // ---- main

    public static void main(String[] arguments) throws Exception {
        model = arguments[0];
        int passed = 0;
        int failed = 0;
        for (Method method : PagedLlmTest.class.getDeclaredMethods()) {
            if (!Modifier.isPublic(method.getModifiers()) || method.getParameterCount() > 0) continue;
            try {
                if (System.getenv("VERBOSE") != null) System.err.println(method.getName());
                method.invoke(null);
                passed++;
            } catch (InvocationTargetException error) {
                System.err.print(method.getName() + ": ");
                error.getCause().printStackTrace();
                failed++;
            }
        }
        System.out.println(passed + " passed, " + failed + " failed");
        System.exit(failed == 0 ? 0 : 1);
    }
}
