#include "trace.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <random>
#include <vector>

#include "../shared/utf8.hpp"

namespace server {

static bool is_control(char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; }

// A client must not be able to begin a line of the log, or to write to a terminal that shows it.
static std::string quoted(const std::string &bytes) {
    const std::string text = utf8::repaired(bytes);
    if (text.find_first_of(" =\"\\") == std::string::npos && std::none_of(text.begin(), text.end(), is_control)) return text;
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') result += '\\';
        result += is_control(c) ? utf8::escape(c) : std::string(1, c);
    }
    return result + '"';
}

void log_line(const char *level, std::string_view message,
              std::initializer_list<std::pair<std::string_view, std::string>> attributes) noexcept {
    try {
        const auto now = std::chrono::system_clock::now();
        const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
        const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
        std::tm utc{};
        gmtime_r(&seconds, &utc);
        char time[64];
        const size_t length = std::strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%S", &utc);
        snprintf(time + length, sizeof time - length, ".%03dZ", static_cast<int>(milliseconds));
        std::string line = std::string("time=") + time + " level=" + level + " msg=" + quoted(std::string(message));
        for (const auto &[name, value] : attributes) {
            if (!value.empty()) line += " " + std::string(name) + "=" + quoted(value);
        }
        line += '\n';
        std::fwrite(line.data(), 1, line.size(), stderr);
    } catch (...) {  // without memory, the line is lost
    }
}

static std::string random_hex(int bytes) {
    thread_local std::mt19937_64 random{std::random_device{}()};
    std::string text;
    for (int i = 0; i < bytes; i++) {
        static const char digits[] = "0123456789abcdef";
        const auto byte = random() % 256;
        text += {digits[byte / 16], digits[byte % 16]};
    }
    return text;
}

static bool is_hex(std::string_view text, size_t bytes) {
    return text.size() == 2 * bytes && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

static bool is_zero(std::string_view text) { return text.find_first_not_of('0') == std::string_view::npos; }

TraceContext TraceContext::from_header(std::string_view traceparent) {
    std::vector<std::string_view> fields;
    for (size_t begin = 0; begin <= traceparent.size() && fields.size() < 6;) {
        const size_t end = std::min(traceparent.find('-', begin), traceparent.size());
        fields.push_back(traceparent.substr(begin, end - begin));
        begin = end + 1;
    }
    // Version 00 has four fields, and later versions can have more.
    const bool is_valid = fields.size() >= 4 && is_hex(fields[0], 1) && fields[0] != "ff" && (fields[0] != "00" || fields.size() == 4) &&
                          is_hex(fields[1], 16) && is_hex(fields[2], 8) && is_hex(fields[3], 1) && !is_zero(fields[1]) &&
                          !is_zero(fields[2]);
    if (!is_valid) return {random_hex(16), random_hex(8), "01"};
    return {std::string(fields[1]), random_hex(8), std::string(fields[3])};
}

}  // namespace server
