// Output as JSON and as tables.
#pragma once

#include <stdexcept>

#define RAPIDJSON_HAS_STDSTRING 1
// A defect becomes an error message, and no abort.
#define RAPIDJSON_ASSERT(condition) \
    if (!(condition)) throw std::logic_error("RapidJSON: " #condition)
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tool {

// Writes JSON.
class Json {
public:
    Json() { writer_.SetIndent(' ', 2); }

    Json &begin_object() { return writer_.StartObject(), *this; }
    Json &end_object() { return writer_.EndObject(), *this; }
    Json &begin_array() { return writer_.StartArray(), *this; }
    Json &end_array() { return writer_.EndArray(), *this; }
    Json &key(std::string_view name) { return writer_.Key(name.data(), length(name)), *this; }

    Json &value(std::string_view text) { return writer_.String(text.empty() ? "" : text.data(), length(text)), *this; }
    Json &value(const char *text) { return value(std::string_view(text)); }
    Json &value(const std::string &text) { return value(std::string_view(text)); }
    Json &value(bool truth) { return writer_.Bool(truth), *this; }
    Json &value(uint64_t number) { return writer_.Uint64(number), *this; }
    Json &value(uint32_t number) { return writer_.Uint(number), *this; }
    // With the digits of its type. A number that is not finite is null.
    Json &value(float number);
    Json &value(double number);
    Json &value(std::nullptr_t) { return writer_.Null(), *this; }
    // Writes text that is JSON already, an object.
    Json &raw(std::string_view json) { return writer_.RawValue(json.data(), json.size(), rapidjson::kObjectType), *this; }

    template <class T>
    Json &member(std::string_view name, const T &to) {
        return key(name).value(to);
    }

    // Writes null for an empty text.
    Json &member_or_null(std::string_view name, std::string_view text) {
        return text.empty() ? key(name).value(nullptr) : key(name).value(text);
    }

    // Returns the JSON with the end of a line.
    [[nodiscard]] std::string text() const { return std::string(buffer_.GetString(), buffer_.GetSize()) + "\n"; }

private:
    static rapidjson::SizeType length(std::string_view text) { return static_cast<rapidjson::SizeType>(text.size()); }

    rapidjson::StringBuffer buffer_;
    rapidjson::PrettyWriter<rapidjson::StringBuffer> writer_{buffer_};
};

// Returns JSON text of a string, with its quotes. Bytes that are not UTF-8 are passed on.
std::string json_string(std::string_view text);

// Returns the rows of a table. `alignment` has l or r for each column: left or right.
std::string table(std::string_view alignment, const std::vector<std::vector<std::string>> &rows);

// 5251072 -> "5.0 MiB"
std::string bytes_text(uint64_t bytes);

// 1234.5678 -> "1235", 1.2345 -> "1.23"
std::string short_number(double number);

}  // namespace tool
