#include "tools.hpp"

namespace server {

using pagedllm::Grammar;

void read(const JsonValue &value, const std::string &name, ToolChoice &to) {
    if (value.IsString()) {
        to.mode = view(value);
        if (to.mode != "auto" && to.mode != "none" && to.mode != "required") {
            throw bad_request(name, name + " is \"" + to.mode + "\"; must be \"auto\", \"none\", \"required\" or a function");
        }
        return;
    }
    static const Fields<ToolChoice> function_fields = {{"name", read_field<&ToolChoice::name, ToolChoice>}};
    static const Fields<ToolChoice> fields = {
        {"type", read_field<&ToolChoice::mode, ToolChoice>},
        {"function", [](ToolChoice &choice, const JsonValue &function, const std::string &path) {
             read_object(function, path, Part{choice, function_fields});
         }},
    };
    if (value.IsObject()) read_object(value, name, Part{to, fields});
    if (to.mode != "function") {
        throw unsupported(name, name + " is not supported; send \"auto\", \"none\", \"required\" or a function");
    }
    to.mode = "named";
}

static void read_schema(ResponseFormat &to, const JsonValue &value, const std::string &name) {
    static const Fields<ResponseFormat> fields = {
        {"name", read_field<&ResponseFormat::schema_name, ResponseFormat>},
        {"description", read_field<&ResponseFormat::schema_description, ResponseFormat>},
        {"schema", read_field<&ResponseFormat::schema, ResponseFormat>},
        {"strict", ignore_field<ResponseFormat>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, ResponseFormat &to) {
    static const Fields<ResponseFormat> fields = {
        {"type", read_field<&ResponseFormat::type, ResponseFormat>},
        {"json_schema", read_schema},
    };
    read_object(value, name, Part{to, fields});
}

std::optional<Grammar> ResponseFormat::grammar() const {
    if (type == "text") return std::nullopt;
    if (type == "json_object") return Grammar::json_object();
    if (type != "json_schema") {
        throw bad_request("response_format",
                          "response_format.type is \"" + type + "\"; must be \"text\", \"json_object\" or \"json_schema\"");
    }
    if (!schema) throw bad_request("response_format", "response_format has no schema; send one");
    return Grammar::json_schema(to_text(*schema));
}

// Copies the definitions of a schema to those of the whole grammar, because references such as
// #/$defs/x are resolved from its root.
static void hoist_definitions(const JsonValue &schema, std::map<std::string, const JsonValue *> &definitions) {
    if (!schema.IsObject()) throw bad_request("tools", "the parameters of a tool are not a JSON schema; send an object");
    const auto own = schema.FindMember("$defs");
    if (own == schema.MemberEnd() || !own->value.IsObject()) return;
    for (const auto &definition : own->value.GetObject()) {
        const std::string name(view(definition.name));
        const auto [known, is_new] = definitions.emplace(name, &definition.value);
        if (!is_new && *known->second != definition.value) {
            throw bad_request("tools", "two tools define $defs/" + name + " differently; rename one");
        }
    }
}

Grammar call_grammar(const std::vector<Tool> &tools, const ToolChoice &choice, bool one_call) {
    std::map<std::string, const JsonValue *> definitions;
    std::string schema;
    JsonWriter json(schema);
    json.begin_object().member("type", "array").member("minItems", 1);
    if (one_call || choice.mode == "named") json.member("maxItems", 1);
    json.key("items").begin_object().key("anyOf").begin_array();
    size_t count = 0;
    for (const Tool &tool : tools) {
        if (choice.mode == "named" && tool.name != choice.name) continue;
        count++;
        json.begin_object().member("type", "object").key("properties").begin_object();
        json.key("name").begin_object().member("const", tool.name).end_object();
        json.key("arguments");
        if (tool.parameters) {
            hoist_definitions(*tool.parameters, definitions);
            json.value(*tool.parameters);
        } else {
            json.begin_object().member("type", "object").end_object();
        }
        json.end_object().key("required").begin_array().value("name").value("arguments").end_array();
        json.member("additionalProperties", false).end_object();
    }
    if (count == 0) {
        const std::string name = choice.name.empty() ? "a tool" : choice.name;
        throw bad_request("tool_choice", "tool_choice forces a call of \"" + name + "\", which is not in tools");
    }
    json.end_array().end_object().key("$defs").begin_object();
    for (const auto &[name, definition] : definitions) json.member(name, *definition);
    json.end_object().end_object();
    return Grammar::json_schema(schema);
}

}  // namespace server
