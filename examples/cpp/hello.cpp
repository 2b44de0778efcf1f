// Streams the answers to three prompts at once. The second request is aborted after a few tokens.
// usage: hello MODEL_DIR
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

#include "pagedllm.hpp"

// Draws a progress bar in one line of stderr.
static bool draw_progress(uint64_t done, uint64_t total) {
    const size_t width = 40, filled = static_cast<size_t>(total ? width * done / total : width);
    const std::string bar = std::string(filled, '#') + std::string(width - filled, '.');
    std::fprintf(stderr, "\rloading [%s] %3d%%", bar.c_str(), static_cast<int>(total ? 100 * done / total : 100));
    return true;
}

static uint64_t ask(pagedllm::Engine &engine, const std::string &question, const pagedllm::Sampling &sampling) {
    const std::string prompt = engine.render_chat(R"([{"role": "user", "content": ")" + question + R"("}])").value();
    pagedllm::Request request{prompt, sampling};
    request.add_special = false;  // the template has written the special tokens
    const uint64_t id = engine.add(request).value();
    std::cout << "[" << id << "] " << question << "\n";
    return id;
}

static const char *ending(pagedllm::FinishReason reason) {
    static const char *const endings[] = {"", " (stop)", " (length)", " (abort)", " (error)"};
    return static_cast<size_t>(reason) < std::size(endings) ? endings[static_cast<size_t>(reason)] : " (ended)";
}

static void run(const char *model) {
    pagedllm::Options options;
    options.model_path = model;
    options.progress = draw_progress;
    options.host_steps = true;  // for the same order of outputs in every run
    auto engine = pagedllm::Engine::create(options).value();
    std::fputc('\n', stderr);
    pagedllm::Sampling greedy;
    greedy.temperature = 0;
    ask(engine, "What is the capital of France?", greedy);
    const uint64_t story = ask(engine, "Tell me a short story.", greedy);
    ask(engine, "What is 7 + 5?", greedy);
    pagedllm::Step step;
    do {
        step = engine.step().value();
        for (const pagedllm::Output &output : engine.queue().poll().value()) {
            std::cout << "[" << output.request << "] " << output.text << ending(output.finish_reason) << std::endl;
            if (output.request == story && output.generated_tokens == 8 && !output.is_last()) engine.abort(story).value();
        }
    } while (step.unfinished > 0);
}

int main(int argc, char **argv) {
    try {
        run(argc > 1 ? argv[1] : "examples/model");
    } catch (const pagedllm::Exception &error) {
        std::cerr << "error " << static_cast<int>(error.code()) << ": " << error.what() << "\n";
        return 1;
    }
}
