// The command chat: a conversation over a terminal or a pipe.
#include <unistd.h>

#include <memory>

#include "engine.hpp"
#include "format.hpp"  // before the other headers of RapidJSON
#include "parameters.hpp"
#include "terminal.hpp"

#include <rapidjson/document.h>

namespace tool {

using pagedllm::Engine;
using pagedllm::Output;
using pagedllm::ResponseParser;

namespace {

struct Chat {
    pagedllm::Options options;
    Parameters parameters;
    std::chrono::milliseconds deadline{0};
    std::string system;
    std::string format = "auto";
    bool shows_reasoning = false;
    bool shows_messages = false;
    bool shows_timing = false;
};

struct Message {
    const char *role;
    std::string content;
};

// Prints the parts of a response while they arrive, and collects its content.
class ResponsePrinter {
public:
    ResponsePrinter(bool shows_reasoning, bool is_terminal) : shows_reasoning_(shows_reasoning), is_terminal_(is_terminal) {}

    // `deltas` is the JSON array of a ResponseParser.
    void print_deltas(const std::string &deltas) {
        rapidjson::Document array;
        array.Parse(deltas.data(), deltas.size());
        for (const auto &delta : array.GetArray()) {
            for (const auto &member : delta.GetObject()) {
                const std::string name = member.name.GetString();
                if (name == "content") {
                    content_ += view(member.value);
                    print_part(view(member.value), false);
                } else if (name == "reasoning_content") {
                    if (shows_reasoning_) print_part(view(member.value), true);
                } else if (name == "tool_calls") {
                    for (const auto &call : member.value.GetArray()) print_call(call);
                }
            }
        }
    }

    // Ends the response with a line.
    void finish() { print_part("\n", false); }

    [[nodiscard]] const std::string &content() const { return content_; }

private:
    static std::string_view view(const rapidjson::Value &text) { return {text.GetString(), text.GetStringLength()}; }

    // Reasoning is dim on a terminal and followed by a line break.
    void print_part(std::string_view text, bool is_reasoning) {
        if (is_reasoning != in_reasoning_) {
            if (!is_reasoning) print("\n");
            if (is_terminal_) print(is_reasoning ? "\x1b[2m" : "\x1b[0m");
            in_reasoning_ = is_reasoning;
        }
        print(text);
    }

    void print_call(const rapidjson::Value &call) {
        const auto &function = call["function"];
        std::string text;
        if (function.HasMember("name")) text = "\ncall of " + std::string(view(function["name"])) + ": ";
        if (function.HasMember("arguments")) text += view(function["arguments"]);
        content_ += text;
        print_part(text, false);
    }

    bool shows_reasoning_;
    bool is_terminal_;
    bool in_reasoning_ = false;
    std::string content_;
};

}  // namespace

static std::string to_json(const std::vector<Message> &messages) {
    std::string json;
    for (const Message &message : messages) {
        json += json.empty() ? "[" : ", ";
        json += std::string(R"({"role": ")") + message.role + R"(", "content": )" + json_string(message.content) + "}";
    }
    return json + "]";
}

// Prints the answer to the last message and returns its content. Ctrl-C ends the answer.
static std::string answer(Engine &engine, const Chat &chat, const std::vector<Message> &messages, bool &is_interrupted) {
    const std::string prompt = engine.render_chat(to_json(messages)).value();
    const std::string settings = R"({"format": )" + json_string(chat.format) + R"(, "prompt": )" + json_string(prompt) + "}";
    ResponseParser parser = ResponseParser::create(engine, settings).value();
    pagedllm::Request request{prompt, chat.parameters.resolved()};
    request.add_special = false;   // the template has written the special tokens
    request.skip_special = false;  // they mark the parts of a response
    request.deadline = chat.deadline;
    const bool on_terminal = is_terminal(STDOUT_FILENO);
    ResponsePrinter printer(chat.shows_reasoning || on_terminal, on_terminal);
    std::string timing;
    is_interrupted = !run(engine, request, [&](const Output &output) {
        printer.print_deltas(parser.feed(output.text).value());
        if (output.is_last()) timing = timing_text(output);
    });
    printer.print_deltas(parser.finish().value());
    printer.finish();
    if (chat.shows_timing) print_note(timing);
    return printer.content();
}

// Reads a message: a line, and the next ones while a line ends with a backslash.
static std::optional<std::string> read_message(Input &input, bool is_interactive) {
    std::string message;
    for (const char *prompt = "> ";; prompt = "  ") {
        if (is_interactive) print(prompt);
        std::optional<std::string> line = input.line();
        if (!line) return message.empty() ? std::nullopt : std::optional<std::string>(message);
        if (line->empty() || line->back() != '\\') return message + *line;
        line->back() = '\n';
        message += *line;
    }
}

// Adds a message and its answer to the chat. An answer that Ctrl-C ended stays in the chat.
static void take_turn(Engine &engine, const Chat &chat, std::vector<Message> &messages, std::string text, bool is_interactive) {
    messages.push_back({"user", std::move(text)});
    bool is_interrupted = false;
    try {
        std::string content = answer(engine, chat, messages, is_interrupted);
        messages.push_back({"assistant", std::move(content)});
    } catch (const pagedllm::Exception &error) {
        if (!is_interactive || error.code() == pagedllm::Code::internal) throw;
        messages.pop_back();
        print_note(std::string("pagedllm: ") + error.what());
    }
    if (is_interrupted && !is_interactive) throw Interrupted();
}

static void run_chat(const Chat &chat) {
    static_cast<void>(chat.parameters.resolved());  // contradictions, before the model is loaded
    Engine engine = load(chat.options);
    const bool is_interactive = is_terminal(STDIN_FILENO);
    if (is_interactive) print_note("Ctrl-C ends an answer, Ctrl-D the chat. A line that ends with \\ continues in the next one.");
    std::vector<Message> messages;
    if (!chat.system.empty()) messages.push_back({"system", chat.system});
    Input input;
    for (;;) {
        std::optional<std::string> text;
        try {
            text = read_message(input, is_interactive);
        } catch (const Interrupted &) {
            if (!is_interactive) throw;
            take_interrupt();
            print("\n");
            continue;
        }
        if (!text) break;
        if (text->find_first_not_of(" \t\r\n") == std::string::npos) continue;
        if (chat.shows_messages) print("> " + *text + "\n");
        take_turn(engine, chat, messages, std::move(*text), is_interactive);
    }
    if (is_interactive) print("\n");
}

Command chat_command() {
    const auto chat = std::make_shared<Chat>();
    Command command{"chat", "Chat with a model", "", {}, {}, {}};
    command.notes =
        "Each line of standard input is a message; an empty line is none. Ctrl-C ends an answer,\n"
        "which stays in the chat, and Ctrl-D ends the chat.";
    const auto set_system = [chat](const std::string &text) { chat->system = text_or_file("--system", text); };
    command.groups.push_back(
        {"Chat",
         {{"--system", "TEXT", "System prompt, or the system prompt in a file, as @FILE.", set_system},
          duration("--deadline-ms", "MS", chat->deadline, "Time in milliseconds after which an answer ends. 0 (default): none."),
          text("--format", "FORMAT", chat->format,
               "How the model writes its reasoning and tool calls: a name of docs/tools.md. Default auto: as its chat template shows."),
          toggle("--show-reasoning", chat->shows_reasoning, true, "Print the reasoning even if standard output is no terminal."),
          toggle("--show-messages", chat->shows_messages, true, "Print each message before its answer."),
          toggle("--timing", chat->shows_timing, true, "Print the times of each answer to standard error.")}});
    chat->parameters.add_to(command);
    add_engine_options(command, chat->options);
    command.run = [chat] { run_chat(*chat); };
    return command;
}

}  // namespace tool
