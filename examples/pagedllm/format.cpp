#include "format.hpp"

#include <rapidjson/writer.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace tool {

template <class T>
static std::string digits_of(T number) {
    char digits[64];
    const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
    return {digits, end};
}

Json &Json::value(float number) {
    if (!std::isfinite(number)) return value(nullptr);
    const std::string digits = digits_of(number);
    writer_.RawValue(digits.data(), digits.size(), rapidjson::kNumberType);
    return *this;
}

Json &Json::value(double number) {
    if (!std::isfinite(number)) return value(nullptr);
    writer_.Double(number);
    return *this;
}

std::string json_string(std::string_view text) {
    rapidjson::StringBuffer buffer;
    rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
    writer.String(text.empty() ? "" : text.data(), static_cast<rapidjson::SizeType>(text.size()));
    return {buffer.GetString(), buffer.GetSize()};
}

// Returns the number of characters.
static size_t width(const std::string &text) {
    const auto begins_character = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; };
    return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

std::string table(std::string_view alignment, const std::vector<std::vector<std::string>> &rows) {
    std::vector<size_t> widths(alignment.size());
    for (const auto &row : rows) {
        for (size_t i = 0; i < row.size(); i++) widths.at(i) = std::max(widths.at(i), width(row[i]));
    }
    std::string text;
    for (const auto &row : rows) {
        std::string line;
        for (size_t i = 0; i < row.size(); i++) {
            const std::string space(widths[i] - width(row[i]), ' ');
            line += (i > 0 ? "  " : "") + (alignment[i] == 'r' ? space + row[i] : row[i] + space);
        }
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
}

std::string bytes_text(uint64_t bytes) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    auto number = static_cast<double>(bytes);
    size_t unit = 0;
    for (; number >= 1024 && unit + 1 < std::size(units); unit++) number /= 1024;
    char text[64];
    std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", number, units[unit]);
    return text;
}

std::string short_number(double number) {
    char text[64];
    std::snprintf(text, sizeof text, number >= 100 ? "%.0f" : number >= 10 ? "%.1f" : "%.2f", number);
    return text;
}

}  // namespace tool
