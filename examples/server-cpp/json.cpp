#include "json.hpp"

#include <rapidjson/error/en.h>

#include <charconv>

namespace server {

// The writer calls itself for each level of a value.
static constexpr int max_depth = 200;

// Returns how deeply arrays and objects are nested.
static int depth_of(const std::string &json) {
    int depth = 0;
    int deepest = 0;
    bool in_string = false;
    for (size_t i = 0; i < json.size(); i++) {
        const char c = json[i];
        if (in_string) {
            if (c == '\\') i++;
            if (c == '"') in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            deepest = std::max(deepest, ++depth);
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return deepest;
}

rapidjson::Document parse_json(const std::string &body) {
    if (const int depth = depth_of(body); depth > max_depth) {
        throw bad_request("", "the JSON is nested too deeply (" + std::to_string(depth) + " levels, limit " + std::to_string(max_depth) +
                                  "); send a flatter object");
    }
    rapidjson::Document document;
    document.Parse<rapidjson::kParseValidateEncodingFlag | rapidjson::kParseFullPrecisionFlag>(body.data(), body.size());
    if (!document.HasParseError()) return document;
    const std::string place = " (at byte " + std::to_string(document.GetErrorOffset()) + ")";
    if (document.GetParseError() == rapidjson::kParseErrorStringInvalidEncoding) {
        throw bad_request("", "the body is not UTF-8" + place + "; encode it as UTF-8");
    }
    if (document.GetParseError() == rapidjson::kParseErrorDocumentRootNotSingular) {
        throw bad_request("", "the body has more than one JSON value" + place + "; send one object");
    }
    throw bad_request("", "the body is not JSON" + place + ": " + rapidjson::GetParseError_En(document.GetParseError()));
}

std::string to_text(const JsonValue &value) {
    std::string text;
    JsonWriter(text).value(value);
    return text;
}

void wrong_type(const std::string &name, const JsonValue &value, const char *type) {
    static const char *const names[] = {"null", "bool", "bool", "object", "array", "string", "number"};
    const std::string what = name.empty() ? "the body" : name;
    throw bad_request(name, what + " is a " + names[value.GetType()] + "; must be of type " + type);
}

void read(const JsonValue &value, const std::string &name, bool &to) {
    if (!value.IsBool()) wrong_type(name, value, "boolean");
    to = value.GetBool();
}

void read(const JsonValue &value, const std::string &name, int64_t &to) {
    if (!value.IsInt64()) wrong_type(name, value, "integer");
    to = value.GetInt64();
}

void read(const JsonValue &value, const std::string &name, int32_t &to) {
    if (!value.IsInt()) wrong_type(name, value, "integer");
    to = value.GetInt();
}

void read(const JsonValue &value, const std::string &name, uint32_t &to) {
    if (!value.IsUint()) wrong_type(name, value, "integer from 0 to 4294967295");
    to = value.GetUint();
}

void read(const JsonValue &value, const std::string &name, double &to) {
    if (!value.IsNumber()) wrong_type(name, value, "number");
    to = value.GetDouble();
}

void read(const JsonValue &value, const std::string &name, std::string &to) {
    if (!value.IsString()) wrong_type(name, value, "string");
    to = view(value);
}

void read(const JsonValue &value, const std::string &, const JsonValue *&to) { to = &value; }

JsonWriter &JsonWriter::value(float number) {
    char digits[64];
    const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
    return raw({digits, static_cast<size_t>(end - digits)});
}

}  // namespace server
