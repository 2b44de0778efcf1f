// Constraints on the answer of a chat: the response format, and calls that are forced.
#pragma once

#include <optional>
#include <string>

#include "chat_prompt.hpp"

namespace server {

// Whether the model has to call a tool.
struct ToolChoice {
    std::string mode = "auto";  // "auto", "none", "required", or "named" with a name
    std::string name;

    [[nodiscard]] bool forced() const { return mode == "required" || mode == "named"; }
};
void read(const JsonValue &value, const std::string &name, ToolChoice &to);

// The format of the content: "text", "json_object" or "json_schema".
struct ResponseFormat {
    std::string type, schema_name, schema_description;
    const JsonValue *schema = nullptr;

    // Returns the constraint. nullopt: none.
    [[nodiscard]] std::optional<pagedllm::Grammar> grammar() const;
};
void read(const JsonValue &value, const std::string &name, ResponseFormat &to);

// Returns a grammar that allows only calls of the tools: a JSON array of objects with name and
// arguments, which the response parser of the format "json" takes.
pagedllm::Grammar call_grammar(const std::vector<Tool> &tools, const ToolChoice &choice, bool one_call);

}  // namespace server
