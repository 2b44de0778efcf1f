#include "chat_prompt.hpp"

namespace server {

const Fields<ChatPrompt> chat_prompt_fields = {
    {"messages", read_field<&ChatPrompt::messages, ChatPrompt>},
    {"tools", read_field<&ChatPrompt::tools, ChatPrompt>},
    {"reasoning_effort", read_field<&ChatPrompt::reasoning_effort, ChatPrompt>},
    {"chat_template_kwargs", read_field<&ChatPrompt::chat_template_kwargs, ChatPrompt>},
    {"continue_final_message", read_field<&ChatPrompt::continue_final_message, ChatPrompt>},
};

static void read_function(Tool &to, const JsonValue &value, const std::string &name) {
    static const Fields<Tool> fields = {
        {"name", read_field<&Tool::name, Tool>},
        {"description", read_field<&Tool::description, Tool>},
        {"parameters", read_field<&Tool::parameters, Tool>},
        // Without effect: arguments are constrained if the tool choice forces a call.
        {"strict", ignore_field<Tool>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, Tool &to) {
    static const Fields<Tool> fields = {
        {"type", read_field<&Tool::type, Tool>},
        {"function", read_function},
    };
    // Tools of another type have other members.
    if (value.IsObject() && value.HasMember("type") && value["type"].IsString() && view(value["type"]) != "function") {
        throw unsupported("tools", name + ".type is \"" + std::string(view(value["type"])) + "\"; must be \"function\"");
    }
    read_object(value, name, Part{to, fields});
    if (to.type != "function") throw unsupported("tools", name + ".type is not given; must be \"function\"");
    if (to.name.empty()) throw bad_request("tools", name + " has no name");
}

static void read_call(ToolCall &to, const JsonValue &value, const std::string &name) {
    static const Fields<ToolCall> fields = {
        {"name", read_field<&ToolCall::name, ToolCall>},
        {"arguments", read_field<&ToolCall::arguments, ToolCall>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, ToolCall &to) {
    static const Fields<ToolCall> fields = {
        {"id", read_field<&ToolCall::id, ToolCall>},
        {"function", read_call},
        {"type", ignore_field<ToolCall>},
        {"index", ignore_field<ToolCall>},
    };
    read_object(value, name, Part{to, fields});
    const auto is_object = [](const std::string &json) {
        try {
            return parse_json(json).IsObject();
        } catch (const ApiError &) {
            return false;
        }
    };
    if (to.arguments.find_first_not_of(" \t\r\n") == std::string::npos) to.arguments = "{}";
    if (!is_object(to.arguments)) {
        throw bad_request("", "the arguments of tool call \"" + to.id + "\" are not a JSON object; send the text of an object");
    }
}

void read(const JsonValue &value, const std::string &, Content &to) {
    if (value.IsString()) {
        to.text = view(value);
        return;
    }
    if (!value.IsArray()) throw bad_request("messages", "a content is neither a string nor an array of parts; send one of them");
    bool first = true;
    for (const JsonValue &part : value.GetArray()) {
        if (!part.IsObject()) throw bad_request("messages", "a part of a content is not an object; send one with type and text");
        const auto text_of = [&](const char *name) {
            const auto member = part.FindMember(name);
            return member != part.MemberEnd() && member->value.IsString() ? view(member->value) : std::string_view();
        };
        const std::string_view type = text_of("type");
        if (type != "text" && type != "refusal") {
            throw unsupported("messages", "a part of a content has the type \"" + std::string(type) + "\"; send text or refusal");
        }
        if (!first) to.text += '\n';
        to.text += text_of(type == "text" ? "text" : "refusal");
        first = false;
    }
}

void read(const JsonValue &value, const std::string &name, Message &to) {
    static const Fields<Message> fields = {
        {"role", read_field<&Message::role, Message>},
        {"content", read_field<&Message::content, Message>},
        {"name", read_field<&Message::name, Message>},
        {"reasoning_content", read_field<&Message::reasoning_content, Message>},
        {"tool_calls", read_field<&Message::tool_calls, Message>},
        {"tool_call_id", read_field<&Message::tool_call_id, Message>},
        {"refusal", read_field<&Message::refusal, Message>},
        // Members of answers that clients send back.
        {"audio", ignore_field<Message>},
        {"function_call", ignore_field<Message>},
        {"annotations", ignore_field<Message>},
    };
    read_object(value, name, Part{to, fields});
    if (to.role == "developer") to.role = "system";  // OpenAI's newer name
    if (to.role != "system" && to.role != "user" && to.role != "assistant" && to.role != "tool") {
        throw bad_request(name + ".role", name + ".role is \"" + to.role + "\"; must be system, developer, user, assistant or tool");
    }
    if (to.content.text.empty()) to.content.text = to.refusal;
}

static void write_message(const Message &message, JsonWriter &json) {
    const auto write_given = [&](const char *name, const std::string &text) {
        if (!text.empty()) json.member(name, text);
    };
    json.begin_object().member("role", message.role).member("content", message.content.text);
    write_given("name", message.name);
    write_given("reasoning_content", message.reasoning_content);
    write_given("tool_call_id", message.tool_call_id);
    if (!message.tool_calls.empty()) {
        json.key("tool_calls").begin_array();
        for (const ToolCall &call : message.tool_calls) {
            json.begin_object().member("id", call.id).member("type", "function").key("function").begin_object();
            // Templates take the arguments as an object, which APIs pass as text.
            json.member("name", call.name).key("arguments").raw(call.arguments).end_object().end_object();
        }
        json.end_array();
    }
    json.end_object();
}

void ChatPrompt::write_tools(JsonWriter &json) const {
    json.begin_array();
    for (const Tool &tool : tools) {
        json.begin_object().member("type", "function").key("function").begin_object().member("name", tool.name);
        if (tool.description) json.member("description", *tool.description);
        if (tool.parameters) json.member("parameters", *tool.parameters);
        json.end_object().end_object();
    }
    json.end_array();
}

std::string ChatPrompt::render(const Model &model) const {
    if (!messages || messages->empty()) throw bad_request("messages", "the request has no messages; send at least one");
    std::string chat;
    JsonWriter json(chat);
    json.begin_object().key("messages").begin_array();
    for (const Message &message : *messages) write_message(message, json);
    json.end_array();
    if (!tools.empty()) {
        json.key("tools");
        write_tools(json);
    }
    for (const auto &[name, value] : chat_template_kwargs) {
        if (name == "messages" || name == "tools") {
            throw bad_request("chat_template_kwargs", "chat_template_kwargs has \"" + name + "\"; send it as a member of the request");
        }
        const bool is_set = continue_final_message && (name == "continue_final_message" || name == "add_generation_prompt");
        if (!is_set) json.member(name, *value);
    }
    if (!reasoning_effort.empty() && chat_template_kwargs.count("reasoning_effort") == 0) {
        json.member("reasoning_effort", reasoning_effort);
    }
    if (continue_final_message) json.member("continue_final_message", true).member("add_generation_prompt", false);
    json.end_object();
    return value_of(model.engine.render_chat(chat));
}

}  // namespace server
