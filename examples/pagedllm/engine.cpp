#include "engine.hpp"

#include "format.hpp"
#include "options_generated.hpp"
#include "terminal.hpp"

namespace tool {

using pagedllm::Engine;
using pagedllm::Error;
using pagedllm::Exception;
using pagedllm::Output;

void add_engine_options(Command &command, pagedllm::Options &options) {
    const Option model = text("MODEL", "", options.model_path, "Model directory in the layout of Hugging Face, or a GGUF file.");
    command.arguments.insert(command.arguments.begin(), {model});
    command.groups.push_back({"Engine", engine_options(options)});
}

Engine load(pagedllm::Options options) {
    ProgressBar bar("loading");
    options.progress = [&](uint64_t done, uint64_t total) {
        bar.draw(done, total);
        return !is_interrupted();
    };
    pagedllm::Result<Engine> engine = Engine::create(options);
    if (!engine && engine.error().code == pagedllm::Code::cancelled) throw Interrupted();
    return std::move(engine).value();
}

bool run(Engine &engine, const pagedllm::Request &request, const std::function<void(const Output &)> &read) {
    const pagedllm::Queue queue = engine.create_queue(PLLM_QUEUE_CAPACITY).value();
    const int event = queue.event_fd().value();
    const uint64_t id = engine.add(request, queue).value();
    bool is_aborted = false;
    for (uint32_t left = request.n; left > 0;) {
        if (!wait_readable(event)) {
            take_interrupt();
            is_aborted = true;
            const pagedllm::Status aborted = engine.abort(id);
            if (!aborted && aborted.error().code != pagedllm::Code::not_found) aborted.value();  // it has just ended
        }
        const pagedllm::Outputs outputs = queue.poll().value();
        for (const Output &output : outputs) {
            if (output.error_code != pagedllm::Code{}) throw Exception(Error{output.error_code, std::string(output.error_message)});
            read(output);
            if (output.is_last()) left--;
        }
    }
    return !is_aborted;
}

std::string timing_text(const Output &last) {
    const double first = last.timing.first_token.count();
    const double rest = last.timing.last_token.count() - first;
    std::string line = std::to_string(last.prompt_tokens) + " prompt tokens (" + std::to_string(last.cached_tokens) +
                       " cached), first token after " + short_number(first * 1000) + " ms, " + std::to_string(last.generated_tokens) +
                       " tokens";
    if (last.generated_tokens > 1 && rest > 0) {
        line += ", " + short_number(static_cast<double>(last.generated_tokens - 1) / rest) + " tokens/s";
    }
    return line;
}

}  // namespace tool
