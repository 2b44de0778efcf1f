// Options of a command line as values: their names, their help, and the functions that read them.
#pragma once

#include <charconv>
#include <functional>
#include <limits>
#include <optional>
#include <pagedllm.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace tool {

// A wrong command line.
class UsageError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

struct Option {
    std::string name;   // such as --kv-bytes
    std::string value;  // its value in the help; empty if it has none
    std::string help;
    std::function<void(const std::string &)> set;  // throws UsageError
    bool repeats = false;                          // may be given more than once
};

// A value of an option by its name.
template <class T>
struct Choice {
    const char *name;
    T value;
};

// ---- reading of values ---------------------------------------------------------------------------

// Throws "--name is "text"; must be LIMIT".
[[noreturn]] void refuse(const std::string &name, const std::string &text, const std::string &limit);

// Reads a whole number or a number with a fraction.
template <class T>
T read_number(const std::string &name, const std::string &text) {
    T number{};
    const char *const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc() && stop == end) return number;
    if constexpr (std::is_floating_point_v<T>) {
        refuse(name, text, "a number");
    } else {
        using Limits = std::numeric_limits<T>;
        refuse(name, text, "a whole number from " + std::to_string(Limits::min()) + " to " + std::to_string(Limits::max()));
    }
}

// Reads a number of bytes, also with a unit, such as 64MiB.
uint64_t read_size(const std::string &name, const std::string &text);

// Reads whole numbers, such as token ids, with commas between them.
std::vector<uint32_t> read_tokens(const std::string &name, const std::string &text);

// Returns the contents of FILE for a text @FILE, else the text itself.
std::string text_or_file(const std::string &name, const std::string &text);

// Returns the name of a value, or "unknown" for a value of a newer library.
template <class T, size_t N>
const char *name_of(const Choice<T> (&choices)[N], T value) {
    for (const Choice<T> &choice : choices) {
        if (choice.value == value) return choice.name;
    }
    return "unknown";
}

// ---- options that set a variable -----------------------------------------------------------------

template <class T>
Option number(std::string name, std::string value, T &to, std::string help) {
    const auto set = [name, &to](const std::string &text) { to = read_number<T>(name, text); };
    return {name, std::move(value), std::move(help), set};
}

template <class T>
Option number(std::string name, std::string value, std::optional<T> &to, std::string help) {
    const auto set = [name, &to](const std::string &text) { to = read_number<T>(name, text); };
    return {name, std::move(value), std::move(help), set};
}

template <class T, size_t N>
Option choice(std::string name, const Choice<T> (&choices)[N], T &to, std::string help) {
    const auto set = [name, &choices, &to](const std::string &text) {
        std::string names;
        for (const Choice<T> &choice : choices) {
            if (choice.name == text) {
                to = choice.value;
                return;
            }
            names += std::string(names.empty() ? "" : ", ") + choice.name;
        }
        refuse(name, text, "one of " + names);
    };
    return {name, "NAME", std::move(help), set};
}

Option size(std::string name, std::string value, uint64_t &to, std::string help);
Option duration(std::string name, std::string value, std::chrono::milliseconds &to, std::string help);
Option text(std::string name, std::string value, std::string &to, std::string help);
Option texts(std::string name, std::string value, std::vector<std::string> &to, std::string help);
// The value "" selects an empty list.
Option texts(std::string name, std::string value, std::optional<std::vector<std::string>> &to, std::string help);
Option tokens(std::string name, std::string value, std::vector<uint32_t> &to, std::string help);
Option token_lists(std::string name, std::string value, std::vector<std::vector<uint32_t>> &to, std::string help);
Option biases(std::string name, std::string value, std::vector<pagedllm::LogitBias> &to, std::string help);
// An option without a value that sets the variable to `value`.
Option toggle(std::string name, bool &to, bool value, std::string help);

}  // namespace tool
