#include "completions.hpp"

#include "logprobs.hpp"

namespace server {

using pagedllm::Output;

// A string, an array of strings, an array of tokens or an array of arrays of tokens.
struct Prompts {
    std::vector<Prompt> all;
};

struct CompletionRequest {
    Prompts prompt;
    std::optional<int64_t> logprobs;
    bool echo = false;
    std::string suffix;
};

static void read(const JsonValue &value, const std::string &name, Prompts &to) {
    to.all.clear();
    if (value.IsString()) {
        read(value, name, to.all.emplace_back().text);
        return;
    }
    const bool of_tokens = value.IsArray() && !value.Empty() && value[0].IsNumber();
    const bool of_texts = value.IsArray() && !value.Empty() && value[0].IsString();
    const bool of_lists = value.IsArray() && (value.Empty() || value[0].IsArray());
    if (of_tokens) {
        read(value, name, to.all.emplace_back().tokens);
    } else if (of_texts) {
        for (const JsonValue &text : value.GetArray()) read(text, name, to.all.emplace_back().text);
    } else if (of_lists) {
        for (const JsonValue &tokens : value.GetArray()) read(tokens, name, to.all.emplace_back().tokens);
    } else {
        throw bad_request(name, name + " is neither a string nor token ids; send one of them, or an array of one kind");
    }
}

class Completion : public Generation {
public:
    Completion(Model &model, Parameters parameters, const CompletionRequest &body, const Limits &limits)
        : Generation(model, std::move(parameters), "cmpl-", "text_completion"), logprobs_(body.logprobs) {
        pagedllm::Request request = parameters_.request();
        request.sampling.echo = body.echo;
        request.sampling.logprobs = logprobs_.has_value();
        request.sampling.top_logprobs = at_least("logprobs", logprobs_, 0);
        start(std::move(request), body.prompt.all, limits);
        offsets_.resize(choices());
    }

private:
    void add_events(const Output &output, std::string &events) override {
        // A token can be a part of a character, which comes with a later token.
        if (output.text.empty() && !output.is_last() && !logprobs_ && !parameters_.return_token_ids) return;
        add_event(events, [&](JsonWriter &json) { write_choice(output, json); });
    }

    void write_choice(const Output &output, JsonWriter &json) override {
        json.begin_object().member("index", static_cast<uint64_t>(choice(output))).member("text", output.text);
        json.key("logprobs");
        if (logprobs_) {
            write_completion_logprobs(model_.engine, output, *logprobs_ > 0, offsets_.at(choice(output)), json);
        } else {
            json.value(nullptr);
        }
        write_finish(output, false, json);
        write_extensions(output, json);
        json.end_object();
    }

    const std::optional<int64_t> logprobs_;
    std::vector<size_t> offsets_;  // characters of each choice so far
};

// OpenAI's default for completions.
static constexpr int64_t default_max_tokens = 16;

std::unique_ptr<Generation> start_completion(const JsonValue &json, const FindModel &find_model, const Limits &limits) {
    static const Fields<CompletionRequest> fields = {
        {"prompt", read_field<&CompletionRequest::prompt, CompletionRequest>},
        {"logprobs", read_field<&CompletionRequest::logprobs, CompletionRequest>},
        {"echo", read_field<&CompletionRequest::echo, CompletionRequest>},
        {"suffix", read_field<&CompletionRequest::suffix, CompletionRequest>},
    };
    CompletionRequest body;
    Parameters parameters;
    read_object(json, "", Part{body, fields}, Part{parameters, parameter_fields});
    Model &model = find_model(parameters.model);
    if (!body.suffix.empty()) throw unsupported("suffix", "suffix is not supported; remove it");
    if (body.prompt.all.empty()) throw bad_request("prompt", "the request has no prompt; send a string or token ids");
    for (size_t i = 0; i < body.prompt.all.size(); i++) {
        if (body.prompt.all[i].empty()) {
            throw bad_request("prompt", "prompt " + std::to_string(i) + " is empty; send at least one token");
        }
    }
    if (!parameters.max_tokens) parameters.max_tokens = default_max_tokens;
    return std::make_unique<Completion>(model, std::move(parameters), body, limits);
}

}  // namespace server
