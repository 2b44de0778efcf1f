#include "chat.hpp"

#include "logprobs.hpp"
#include "tools.hpp"

namespace server {

using pagedllm::Output;
using pagedllm::ResponseParser;

struct ChatRequest {
    std::optional<int64_t> max_completion_tokens, top_logprobs;
    bool logprobs = false;
    std::optional<ResponseFormat> response_format;
    ToolChoice tool_choice;
    bool parallel_tool_calls = true;
    std::vector<std::string> modalities;
};

// The whole response of one choice.
struct Response {
    std::string content, reasoning;
    std::vector<ToolCall> calls;
};

// Returns the end of a prompt, in which a parser looks for the beginning of the reasoning.
static std::string_view tail_of(std::string_view prompt) {
    size_t begin = prompt.size() > 256 ? prompt.size() - 256 : 0;
    // The first bytes can be a part of a character.
    while (begin < prompt.size() && (static_cast<unsigned char>(prompt[begin]) & 0xc0) == 0x80) begin++;
    return prompt.substr(begin);
}

class Chat : public Generation {
public:
    Chat(Model &model, const Parameters &parameters, const ChatRequest &body, ChatPrompt prompt, const Limits &limits)
        : Generation(model, parameters, "chatcmpl-", parameters.stream ? "chat.completion.chunk" : "chat.completion"),
          logprobs_(body.logprobs),
          only_calls_(body.tool_choice.forced()) {
        if (body.tool_choice.mode == "none") prompt.tools.clear();
        pagedllm::Request request = parameters_.request();
        constrain(request, body, prompt);
        request.sampling.logprobs = logprobs_;
        request.sampling.top_logprobs = at_least("top_logprobs", body.top_logprobs, 0);
        const std::string format = only_calls_ ? "json" : model.format;
        Prompt rendered{prompt.render(model), {}};
        const std::string tail(tail_of(rendered.text));
        request.add_special = false;  // the template has written them
        if (format != "text") request.skip_special = false;  // special tokens mark the parts of a response
        start(std::move(request), {std::move(rendered)}, limits);
        has_calls_.resize(choices());
        // Only after start has limited the number of choices and the length of the prompt.
        if (format != "text") add_parsers(format, prompt, tail);
    }

    // The first event of each choice has the role.
    void begin(std::string &events) override {
        for (size_t i = 0; i < choices(); i++) {
            add_event(events, [&](JsonWriter &json) {
                begin_choice(i, json);
                json.key("delta").begin_object().member("role", "assistant").end_object();
                end_unfinished_choice(json);
            });
        }
    }

private:
    // Applies the only constraint on the output.
    static void constrain(pagedllm::Request &request, const ChatRequest &body, const ChatPrompt &prompt);
    // Adds a response parser for each choice. `tail` is the end of the rendered prompt.
    void add_parsers(const std::string &format, const ChatPrompt &prompt, const std::string &tail);
    // Parses the text of an output, and calls `use` with each delta.
    template <class Use>
    void parse(const Output &output, Use use);
    template <class Use>
    void use_deltas(const std::string &deltas, Use use);

    void add_events(const Output &output, std::string &events) override;
    void write_choice(const Output &output, JsonWriter &json) override;
    // Writes the end of a choice: its log probabilities, its reason and the extensions.
    void end_choice(const Output &output, JsonWriter &json);

    static void begin_choice(size_t index, JsonWriter &json) { json.begin_object().member("index", static_cast<uint64_t>(index)); }
    static void end_unfinished_choice(JsonWriter &json) {
        json.key("logprobs").value(nullptr).key("finish_reason").value(nullptr).end_object();
    }

    const bool logprobs_;
    const bool only_calls_;  // a grammar allows only calls
    // The parsers separate reasoning, content and tool calls. Without them, all is content.
    std::vector<ResponseParser> parsers_;
    std::vector<bool> has_calls_;
};

void Chat::constrain(pagedllm::Request &request, const ChatRequest &body, const ChatPrompt &prompt) {
    pagedllm::Grammar &grammar = request.sampling.grammar;
    const std::optional<pagedllm::Grammar> format = body.response_format ? body.response_format->grammar() : std::nullopt;
    const int constraints = (grammar.kind != pagedllm::GrammarKind::none) + format.has_value() + body.tool_choice.forced();
    if (constraints > 1) {
        throw bad_request("", "the request has several constraints on the output; give one of structured_outputs, a response format, "
                              "and a tool choice that forces a call");
    }
    if (format) grammar = *format;
    if (body.tool_choice.forced()) grammar = call_grammar(prompt.tools, body.tool_choice, !body.parallel_tool_calls);
}

void Chat::add_parsers(const std::string &format, const ChatPrompt &prompt, const std::string &tail) {
    for (size_t i = 0; i < choices(); i++) {
        std::string settings;
        JsonWriter json(settings);
        json.begin_object().member("prompt", tail).member("tool_call_id_prefix", new_id("call_") + "_");
        if (!format.empty()) json.member("format", format);
        if (!prompt.tools.empty()) {
            json.key("tools");
            prompt.write_tools(json);
        }
        json.end_object();
        parsers_.push_back(value_of(ResponseParser::create(model_.engine, settings)));
    }
}

template <class Use>
void Chat::use_deltas(const std::string &deltas, Use use) {
    if (deltas == "[]") return;
    // The memory of a document is allocated here as long as it is small.
    char memory[4096];
    rapidjson::MemoryPoolAllocator<> allocator(memory, sizeof memory);
    rapidjson::Document document(&allocator);
    document.Parse(deltas.data(), deltas.size());
    if (!document.IsArray()) throw ApiError(500, "internal error: the deltas of a response are not an array");
    for (const JsonValue &delta : document.GetArray()) {
        // A call that max_tokens has cut before its arguments is no content.
        if (!only_calls_ || !delta.HasMember("content")) use(delta);
    }
}

template <class Use>
void Chat::parse(const Output &output, Use use) {
    if (parsers_.empty()) {
        if (output.text.empty()) return;
        JsonValue delta(rapidjson::kObjectType);
        rapidjson::MemoryPoolAllocator<> allocator;
        const auto length = static_cast<rapidjson::SizeType>(output.text.size());
        delta.AddMember("content", JsonValue(output.text.data(), length, allocator), allocator);
        use(delta);
        return;
    }
    ResponseParser &parser = parsers_.at(choice(output));
    if (!output.text.empty()) use_deltas(value_of(parser.feed(output.text)), use);
    if (output.is_last()) use_deltas(value_of(parser.finish()), use);
}

void Chat::end_choice(const Output &output, JsonWriter &json) {
    json.key("logprobs");
    if (logprobs_) {
        write_chat_logprobs(model_.engine, output, json);
    } else {
        json.value(nullptr);
    }
    write_finish(output, has_calls_.at(choice(output)), json);
    write_extensions(output, json);
    json.end_object();
}

// The last event of an output also has the log probabilities and, at the end of a choice, the
// reason.
void Chat::add_events(const Output &output, std::string &events) {
    std::string previous;
    const size_t index = choice(output);
    parse(output, [&](const JsonValue &delta) {
        if (delta.HasMember("tool_calls")) has_calls_.at(index) = true;
        if (!previous.empty()) {
            add_event(events, [&](JsonWriter &json) {
                begin_choice(index, json);
                json.key("delta").raw(previous);
                end_unfinished_choice(json);
            });
        }
        previous = to_text(delta);
    });
    const bool has_more = output.is_last() || (logprobs_ && !output.tokens.empty()) || parameters_.return_token_ids;
    if (previous.empty() && !has_more) return;
    add_event(events, [&](JsonWriter &json) {
        begin_choice(index, json);
        json.key("delta").raw(previous.empty() ? "{}" : previous);
        end_choice(output, json);
    });
}

static void add_call(const JsonValue &delta, Response &response) {
    const auto text_of = [](const JsonValue &object, const char *name) {
        const auto member = object.FindMember(name);
        return member != object.MemberEnd() && member->value.IsString() ? view(member->value) : std::string_view();
    };
    const JsonValue &function = delta["function"];
    if (const std::string_view id = text_of(delta, "id"); !id.empty()) {
        response.calls.push_back({std::string(id), std::string(text_of(function, "name")), ""});
    }
    if (!response.calls.empty()) response.calls.back().arguments += text_of(function, "arguments");
}

void Chat::write_choice(const Output &output, JsonWriter &json) {
    Response response;
    parse(output, [&](const JsonValue &delta) {
        if (delta.HasMember("content")) response.content += view(delta["content"]);
        if (delta.HasMember("reasoning_content")) response.reasoning += view(delta["reasoning_content"]);
        if (!delta.HasMember("tool_calls")) return;
        for (const JsonValue &call : delta["tool_calls"].GetArray()) add_call(call, response);
    });
    has_calls_.at(choice(output)) = !response.calls.empty();
    begin_choice(choice(output), json);
    json.key("message").begin_object().member("role", "assistant").key("content");
    if (response.content.empty() && !response.calls.empty()) {
        json.value(nullptr);
    } else {
        json.value(response.content);
    }
    json.key("refusal").value(nullptr);
    if (!response.reasoning.empty()) json.member("reasoning_content", response.reasoning);
    if (!response.calls.empty()) {
        json.key("tool_calls").begin_array();
        for (size_t i = 0; i < response.calls.size(); i++) {
            const ToolCall &call = response.calls[i];
            json.begin_object().member("index", static_cast<uint64_t>(i)).member("id", call.id).member("type", "function");
            json.key("function").begin_object();
            json.member("name", call.name).member("arguments", call.arguments).end_object().end_object();
        }
        json.end_array();
    }
    json.end_object();
    end_choice(output, json);
}

static void check(const ChatRequest &body, Parameters &parameters) {
    if (body.max_completion_tokens) {
        if (parameters.max_tokens && parameters.max_tokens != body.max_completion_tokens) {
            throw bad_request("max_tokens", "max_tokens and max_completion_tokens differ; send max_completion_tokens");
        }
        at_least("max_completion_tokens", body.max_completion_tokens, 0);
        parameters.max_tokens = body.max_completion_tokens;
    }
    for (const std::string &modality : body.modalities) {
        if (modality != "text") throw unsupported("modalities", "modalities has more than \"text\"; remove the others");
    }
    if (body.top_logprobs && !body.logprobs) {
        throw bad_request("top_logprobs", "top_logprobs is given without \"logprobs\": true; set it");
    }
}

std::unique_ptr<Generation> start_chat(const JsonValue &json, const FindModel &find_model, const Limits &limits) {
    static const Fields<ChatRequest> fields = {
        {"max_completion_tokens", read_field<&ChatRequest::max_completion_tokens, ChatRequest>},
        {"logprobs", read_field<&ChatRequest::logprobs, ChatRequest>},
        {"top_logprobs", read_field<&ChatRequest::top_logprobs, ChatRequest>},
        {"response_format", read_field<&ChatRequest::response_format, ChatRequest>},
        {"tool_choice", read_field<&ChatRequest::tool_choice, ChatRequest>},
        {"parallel_tool_calls", read_field<&ChatRequest::parallel_tool_calls, ChatRequest>},
        {"modalities", read_field<&ChatRequest::modalities, ChatRequest>},
        {"store", ignore_field<ChatRequest>},
        {"verbosity", ignore_field<ChatRequest>},
    };
    ChatRequest body;
    ChatPrompt prompt;
    Parameters parameters;
    read_object(json, "", Part{body, fields}, Part{prompt, chat_prompt_fields}, Part{parameters, parameter_fields});
    Model &model = find_model(parameters.model);
    check(body, parameters);
    return std::make_unique<Chat>(model, parameters, body, std::move(prompt), limits);
}

}  // namespace server
