// The members from which the prompt of a chat is rendered. /tokenize has them, too.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "generation.hpp"
#include "json.hpp"

namespace server {

// A function that the model can call.
struct Tool {
    std::string type, name;
    std::optional<std::string> description;
    const JsonValue *parameters = nullptr;
};

struct ToolCall {
    std::string id, name, arguments;
};

// A string, or an array of text parts, which are joined by newlines.
struct Content {
    std::string text;
};

struct Message {
    std::string role, name, reasoning_content, tool_call_id, refusal;
    Content content;
    std::vector<ToolCall> tool_calls;
};

void read(const JsonValue &value, const std::string &name, Tool &to);
void read(const JsonValue &value, const std::string &name, ToolCall &to);
void read(const JsonValue &value, const std::string &name, Content &to);
void read(const JsonValue &value, const std::string &name, Message &to);

struct ChatPrompt {
    std::optional<std::vector<Message>> messages;
    std::vector<Tool> tools;
    std::string reasoning_effort;
    std::map<std::string, const JsonValue *> chat_template_kwargs;
    bool continue_final_message = false;

    // Renders the prompt with the chat template of the model.
    [[nodiscard]] std::string render(const Model &model) const;
    // Writes the tools as the chat template and the response parser take them.
    void write_tools(JsonWriter &json) const;
};

extern const Fields<ChatPrompt> chat_prompt_fields;

}  // namespace server
