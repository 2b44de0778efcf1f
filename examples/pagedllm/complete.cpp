// The command complete: continues a prompt.
#include <unistd.h>

#include <memory>

#include "../shared/utf8.hpp"
#include "engine.hpp"
#include "format.hpp"
#include "options_generated.hpp"
#include "parameters.hpp"
#include "terminal.hpp"

namespace tool {

using pagedllm::Completion;
using pagedllm::Engine;
using pagedllm::Logprob;
using pagedllm::Output;

namespace {

struct Complete {
    pagedllm::Options options;
    Parameters parameters;
    pagedllm::Request request;
    std::optional<std::string> prompt;
    std::vector<uint32_t> prompt_token_ids;
    bool writes_json = false;
    bool shows_timing = false;

    [[nodiscard]] bool reports_logprobs() const { return parameters.sampling.logprobs || parameters.sampling.prompt_logprobs; }
};

}  // namespace

// Sets the prompt of the request. Its text must outlive the request.
static void set_prompt(Complete &complete) {
    if (!complete.prompt_token_ids.empty()) {
        if (complete.prompt) throw UsageError("both PROMPT and --prompt-token-ids are given; give one of them");
        complete.request.prompt = pagedllm::Span<const uint32_t>(complete.prompt_token_ids);
        return;
    }
    if (!complete.prompt) {
        if (is_terminal(STDIN_FILENO)) print_note("Enter the prompt. Ctrl-D ends it.");
        std::string text = Input().rest();
        if (!text.empty() && text.back() == '\n') text.pop_back();  // that of the last line
        if (text.empty()) throw UsageError("the prompt is empty (0 bytes of standard input); give PROMPT or write it to standard input");
        complete.prompt = std::move(text);
    }
    complete.request.prompt = std::string_view(*complete.prompt);
}

static std::string token_text(const Engine &engine, uint32_t token) { return utf8::printable(engine.token_bytes(token).value()); }

// ---- text ----------------------------------------------------------------------------------------

static std::string ids_text(pagedllm::Span<const uint32_t> tokens) {
    std::string text;
    for (const uint32_t token : tokens) text += (text.empty() ? "" : ",") + std::to_string(token);
    return text;
}

// Returns the most probable tokens at a position, as `278 " The" -0.12, 264 " A" -2.3`.
static std::string candidates_text(const Engine &engine, bool has_tokenizer, pagedllm::Span<const Logprob> all) {
    std::string text;
    for (const Logprob &candidate : all) {
        text += (text.empty() ? "" : ", ") + std::to_string(candidate.token);
        if (has_tokenizer) text += " " + json_string(token_text(engine, candidate.token));
        text += " " + short_number(candidate.logprob);
    }
    return text;
}

// Returns a share of the candidates of all positions.
static pagedllm::Span<const Logprob> share(const std::vector<Logprob> &all, size_t i, size_t shares) {
    const size_t size = shares ? all.size() / shares : 0;
    return {all.data() + i * size, size};
}

static std::string logprobs_table(const Engine &engine, bool has_tokenizer, const Completion &result) {
    std::vector<std::vector<std::string>> rows = {{"token", "id", "log probability", "most probable"}};
    for (size_t i = 0; i < result.prompt_logprobs.size(); i++) {
        const auto top = share(result.prompt_top_logprobs, i, result.prompt_logprobs.size());
        rows.push_back({"prompt", "", short_number(result.prompt_logprobs[i]), candidates_text(engine, has_tokenizer, top)});
    }
    for (size_t i = 0; i < result.logprobs.size() && i < result.tokens.size(); i++) {
        const auto top = share(result.top_logprobs, i, result.tokens.size());
        rows.push_back({has_tokenizer ? json_string(token_text(engine, result.tokens[i])) : "", std::to_string(result.tokens[i]),
                        short_number(result.logprobs[i]), candidates_text(engine, has_tokenizer, top)});
    }
    return table("lrrl", rows);
}

static void print_result(const Engine &engine, const Complete &complete, const Completion &result, size_t index) {
    const bool has_tokenizer = !complete.options.skip_tokenizer;
    const std::string text = has_tokenizer ? result.text : ids_text({result.tokens.data(), result.tokens.size()});
    print((complete.request.n > 1 ? "[" + std::to_string(index) + "] " : "") + text + "\n");
    if (complete.reports_logprobs()) print(logprobs_table(engine, has_tokenizer, result));
}

// ---- JSON ----------------------------------------------------------------------------------------

static void write_candidates(const Engine &engine, bool has_tokenizer, pagedllm::Span<const Logprob> all, Json &json) {
    json.key("top_logprobs").begin_array();
    for (const Logprob &candidate : all) {
        json.begin_object().member("id", candidate.token);
        if (has_tokenizer) json.member("text", token_text(engine, candidate.token));
        json.member("logprob", candidate.logprob).end_object();
    }
    json.end_array();
}

static void write_result(const Engine &engine, const Complete &complete, const Completion &result, size_t index, Json &json) {
    const bool has_tokenizer = !complete.options.skip_tokenizer;
    json.begin_object().member("index", static_cast<uint64_t>(index));
    if (has_tokenizer) json.member("text", result.text);
    json.member("finish_reason", name_of(finish_reason_choices, result.finish_reason));
    json.member("stop_reason", name_of(stop_reason_choices, result.stop_reason));
    if (result.stop_reason == pagedllm::StopReason::string) json.member("stop_string", result.stop_string);
    json.member("prompt_tokens", result.prompt_tokens).member("cached_tokens", result.cached_tokens);
    json.member("generated_tokens", result.generated_tokens).member("score", result.score);
    if (complete.parameters.sampling.prompt_logprobs) {
        json.key("prompt_logprobs").begin_array();
        for (size_t i = 0; i < result.prompt_logprobs.size(); i++) {
            json.begin_object().member("logprob", result.prompt_logprobs[i]);
            write_candidates(engine, has_tokenizer, share(result.prompt_top_logprobs, i, result.prompt_logprobs.size()), json);
            json.end_object();
        }
        json.end_array();
    }
    json.key("tokens").begin_array();
    for (size_t i = 0; i < result.tokens.size(); i++) {
        json.begin_object().member("id", result.tokens[i]);
        if (has_tokenizer) json.member("text", token_text(engine, result.tokens[i]));
        if (i < result.logprobs.size()) {
            json.member("logprob", result.logprobs[i]);
            write_candidates(engine, has_tokenizer, share(result.top_logprobs, i, result.tokens.size()), json);
        }
        json.end_object();
    }
    json.end_array();
    json.member("queued_seconds", result.timing.queued.count());
    json.member("first_token_seconds", result.timing.first_token.count());
    json.member("last_token_seconds", result.timing.last_token.count());
    json.end_object();
}

// ---- the command ---------------------------------------------------------------------------------

static void print_results(const Engine &engine, const Complete &complete, const std::vector<Completion> &results) {
    if (!complete.writes_json) {
        for (size_t i = 0; i < results.size(); i++) print_result(engine, complete, results[i], i);
        return;
    }
    Json json;
    json.begin_object().key("results").begin_array();
    for (size_t i = 0; i < results.size(); i++) write_result(engine, complete, results[i], i, json);
    print(json.end_array().end_object().text());
}

static void run_complete(Complete &complete) {
    pagedllm::Request &request = complete.request;
    request.sampling = complete.parameters.resolved();
    if (complete.parameters.has_beam) request.beam = complete.parameters.beam;
    set_prompt(complete);
    Engine engine = load(complete.options);
    // A single text is printed while it is generated.
    const bool streams = request.n == 1 && !complete.writes_json && !complete.reports_logprobs() && !complete.options.skip_tokenizer;
    std::vector<Completion> results;
    std::string timing;
    const bool is_complete = run(engine, request, [&](const Output &output) {
        if (streams) print(output.text);
        if (output.index >= results.size()) results.resize(output.index + 1);
        results[output.index].add(output, request.sampling.output_kind);
        if (output.is_last()) timing += (timing.empty() ? "" : "\n") + timing_text(output);
    });
    if (streams) {
        print("\n");
    } else {
        print_results(engine, complete, results);
    }
    if (complete.shows_timing) print_note(timing);
    if (!is_complete) throw Interrupted();
}

Command complete_command() {
    const auto complete = std::make_shared<Complete>();
    Command command{"complete", "Continue a prompt", "", {}, {}, {}};
    command.notes =
        "Without PROMPT, the prompt is standard input without the newline at its end. A single text is\n"
        "printed while it is generated. Several results are lines that begin with [INDEX].";
    const auto set_prompt = [complete](const std::string &text) { complete->prompt = text; };
    command.arguments.push_back({{"PROMPT", "", "Text to continue.", set_prompt}, false});
    std::vector<Option> own = {
        tokens("--prompt-token-ids", "ID,...", complete->prompt_token_ids, "The prompt as token ids."),
        toggle("--json", complete->writes_json, true, "Print the results with their tokens as JSON."),
        toggle("--timing", complete->shows_timing, true, "Print the times of each result to standard error."),
    };
    for (const Option &option : request_options(complete->request)) own.push_back(option);
    for (const Option &option : report_options(complete->parameters.sampling)) own.push_back(option);
    command.groups.push_back({"Completion", own});
    complete->parameters.add_to(command);
    complete->parameters.add_beam_to(command);
    add_engine_options(command, complete->options);
    command.run = [complete] { run_complete(*complete); };
    return command;
}

}  // namespace tool
