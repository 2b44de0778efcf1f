// Streams the answers to three prompts at once. The second request is aborted after a few tokens.
// usage: Hello MODEL_DIR
// PAGEDLLM_LIBRARY: path of libpagedllm.so; default: libpagedllm.so.1 of the system.
import pagedllm.PagedLlm.Engine;
import pagedllm.PagedLlm.FinishReason;
import pagedllm.PagedLlm.Options;
import pagedllm.PagedLlm.Output;
import pagedllm.PagedLlm.PagedLlmException;
import pagedllm.PagedLlm.Request;

public final class Hello {
    private static long ask(Engine engine, String question) {
        Request request = new Request(engine.renderChat("[{\"role\": \"user\", \"content\": \"" + question + "\"}]"));
        request.addSpecial = false; // the template has written the special tokens
        request.sampling.temperature = 0;
        long id = engine.add(request);
        System.out.println("[" + id + "] " + question);
        return id;
    }

    private static void run(String model) {
        Options options = new Options();
        options.modelPath = model;
        // The program steps the engine, for the same order of outputs in every run.
        try (Engine engine = Engine.openWithHostSteps(options, null)) {
            ask(engine, "What is the capital of France?");
            long story = ask(engine, "Tell me a short story.");
            ask(engine, "What is 7 + 5?");
            while (engine.step().unfinished > 0) print(engine, story);
            print(engine, story);
        }
    }

    private static void print(Engine engine, long story) {
        for (Output output : engine.queue().poll()) {
            String ending = output.finishReason == FinishReason.NONE ? "" : " (" + output.finishReason.name().toLowerCase() + ")";
            System.out.println("[" + output.request + "] " + output.text + ending);
            if (output.request == story && output.generatedTokens == 8 && !output.isLast()) engine.abort(story);
        }
    }

    public static void main(String[] arguments) {
        try {
            run(arguments.length > 0 ? arguments[0] : "examples/model");
        } catch (PagedLlmException error) {
            System.err.println("error " + error.code + ": " + error.getMessage());
            System.exit(1);
        }
    }
}
