// JSON: strict reading of requests by tables of their members, and writing of answers.
#pragma once

#include <stdexcept>

#define RAPIDJSON_HAS_STDSTRING 1
// A defect becomes an error of its request, and does not end the process.
#define RAPIDJSON_ASSERT(condition) \
    if (!(condition)) throw std::logic_error("RapidJSON: " #condition)
#include <rapidjson/document.h>
#include <rapidjson/writer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "errors.hpp"

namespace server {

using JsonValue = rapidjson::Value;

// Parses the body of a request. Throws ApiError if it is not one JSON value in UTF-8.
rapidjson::Document parse_json(const std::string &body);

// Returns a value as text. The order of members is kept: in a schema, it is the order in which the
// model writes them.
std::string to_text(const JsonValue &value);

inline std::string_view view(const JsonValue &text) { return {text.GetString(), text.GetStringLength()}; }

// Throws "name is a string; must be of type integer".
[[noreturn]] void wrong_type(const std::string &name, const JsonValue &value, const char *type);

// Each read converts a value to the type of `to`, or throws ApiError with the name.
void read(const JsonValue &value, const std::string &name, bool &to);
void read(const JsonValue &value, const std::string &name, int64_t &to);
void read(const JsonValue &value, const std::string &name, int32_t &to);
void read(const JsonValue &value, const std::string &name, uint32_t &to);
void read(const JsonValue &value, const std::string &name, double &to);
void read(const JsonValue &value, const std::string &name, std::string &to);
// Keeps the value itself, which is valid as long as its document.
void read(const JsonValue &value, const std::string &name, const JsonValue *&to);

template <class T>
void read(const JsonValue &value, const std::string &name, std::optional<T> &to);
template <class T>
void read(const JsonValue &value, const std::string &name, std::vector<T> &to);
template <class T>
void read(const JsonValue &value, const std::string &name, std::map<std::string, T> &to);

template <class T>
void read(const JsonValue &value, const std::string &name, std::optional<T> &to) {
    read(value, name, to.emplace());
}

template <class T>
void read(const JsonValue &value, const std::string &name, std::vector<T> &to) {
    if (!value.IsArray()) wrong_type(name, value, "array");
    to.clear();
    for (const JsonValue &element : value.GetArray()) {
        // Only the names of members need the index.
        const std::string path = element.IsObject() ? name + "[" + std::to_string(to.size()) + "]" : name;
        read(element, path, to.emplace_back());
    }
}

template <class T>
void read(const JsonValue &value, const std::string &name, std::map<std::string, T> &to) {
    if (!value.IsObject()) wrong_type(name, value, "object");
    for (const auto &member : value.GetObject()) read(member.value, name, to[std::string(view(member.name))]);
}

// A table of the members of an object that is read into a T.
template <class T>
using Fields = std::unordered_map<std::string_view, void (*)(T &, const JsonValue &, const std::string &)>;

// Returns the entry of a table for a field of T.
template <auto field, class T>
void read_field(T &object, const JsonValue &value, const std::string &name) {
    read(value, name, object.*field);
}

// Ignores a member that does not change the answer.
template <class T>
void ignore_field(T &, const JsonValue &, const std::string &) {}

// A part of a request with the table of its members.
template <class T>
struct Part {
    T &object;
    const Fields<T> &fields;

    bool read_member(std::string_view name, const JsonValue &value, const std::string &path) const {
        const auto field = fields.find(name);
        if (field == fields.end()) return false;
        if (!value.IsNull()) field->second(object, value, path);  // null is a member that is not given
        return true;
    }
};
template <class T>
Part(T &, const Fields<T> &) -> Part<T>;

// Reads the members of an object into the parts that know them. Unknown members are errors, so that
// no parameter is ignored silently. `path` is "" for the body.
template <class... T>
void read_object(const JsonValue &value, const std::string &path, Part<T>... parts) {
    if (!value.IsObject()) wrong_type(path, value, "object");
    for (const auto &member : value.GetObject()) {
        const std::string name(view(member.name));
        const std::string full = path.empty() ? name : path + "." + name;
        if (!(parts.read_member(name, member.value, full) || ...)) throw unknown_parameter(name);
    }
}

// Writes JSON to the end of a string.
class JsonWriter {
public:
    explicit JsonWriter(std::string &out) : sink_{out}, writer_(sink_) {}

    JsonWriter &begin_object() { return writer_.StartObject(), *this; }
    JsonWriter &end_object() { return writer_.EndObject(), *this; }
    JsonWriter &begin_array() { return writer_.StartArray(), *this; }
    JsonWriter &end_array() { return writer_.EndArray(), *this; }

    JsonWriter &key(std::string_view name) { return writer_.Key(name.data(), length(name)), *this; }

    JsonWriter &value(std::string_view text) { return writer_.String(text.empty() ? "" : text.data(), length(text)), *this; }
    JsonWriter &value(const char *text) { return value(std::string_view(text)); }
    JsonWriter &value(const std::string &text) { return value(std::string_view(text)); }
    JsonWriter &value(bool truth) { return writer_.Bool(truth), *this; }
    JsonWriter &value(uint64_t number) { return writer_.Uint64(number), *this; }
    JsonWriter &value(uint32_t number) { return writer_.Uint(number), *this; }
    JsonWriter &value(int64_t number) { return writer_.Int64(number), *this; }
    JsonWriter &value(int number) { return writer_.Int(number), *this; }
    // A number must be finite. A float has the digits of a float.
    JsonWriter &value(float number);
    JsonWriter &value(double number) { return writer_.Double(number), *this; }
    JsonWriter &value(std::nullptr_t) { return writer_.Null(), *this; }
    JsonWriter &value(const JsonValue &json) { return json.Accept(writer_), *this; }
    // Writes text that is JSON already.
    JsonWriter &raw(std::string_view json) { return writer_.RawValue(json.data(), json.size(), rapidjson::kObjectType), *this; }

    template <class T>
    JsonWriter &member(std::string_view name, const T &to) {
        return key(name).value(to);
    }
    // Writes null for an empty text.
    JsonWriter &member_or_null(std::string_view name, std::string_view text) {
        return text.empty() ? key(name).value(nullptr) : key(name).value(text);
    }

private:
    // The output of RapidJSON's writer.
    struct Sink {
        using Ch = char;
        std::string &out;
        void Put(char c) { out.push_back(c); }
        void Flush() {}
    };

    static rapidjson::SizeType length(std::string_view text) { return static_cast<rapidjson::SizeType>(text.size()); }

    Sink sink_;
    rapidjson::Writer<Sink> writer_;
};

}  // namespace server
