#include "options.hpp"

#include <fstream>
#include <limits>
#include <system_error>

namespace tool {

void refuse(const std::string &name, const std::string &text, const std::string &limit) {
    throw UsageError(name + " is \"" + text + "\"; must be " + limit);
}

uint64_t read_size(const std::string &name, const std::string &text) {
    static const std::pair<const char *, unsigned> units[] = {{"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
    uint64_t number = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const std::string unit(stop, text.data() + text.size());
    for (const auto &[known, shift] : units) {
        if (error == std::errc() && unit == known && number <= std::numeric_limits<uint64_t>::max() >> shift) return number << shift;
    }
    refuse(name, text, "a number of bytes below 16777216TiB, such as 67108864, 64MiB or 4GiB");
}

std::vector<uint32_t> read_tokens(const std::string &name, const std::string &text) {
    std::vector<uint32_t> tokens;
    const char *const end = text.data() + text.size();
    for (const char *at = text.data();; at++) {
        const auto [stop, error] = std::from_chars(at, end, tokens.emplace_back());
        if (error == std::errc() && stop == end) return tokens;
        if (error != std::errc() || *stop != ',') break;
        at = stop;
    }
    refuse(name, text, "whole numbers from 0 to 4294967295 with commas between them, such as 3,14");
}

std::string text_or_file(const std::string &name, const std::string &text) {
    if (text.empty() || text[0] != '@') return text;
    const std::string path = text.substr(1);
    std::ifstream file(path, std::ios::binary);
    std::string contents;
    char part[65536];
    while (file.read(part, sizeof part) || file.gcount() > 0) contents.append(part, static_cast<size_t>(file.gcount()));
    // A directory can be opened and not be read.
    if (!file.is_open() || file.bad()) throw UsageError(name + " names the file \"" + path + "\", which cannot be read; name another file");
    return contents;
}

Option size(std::string name, std::string value, uint64_t &to, std::string help) {
    const auto set = [name, &to](const std::string &text) { to = read_size(name, text); };
    return {name, std::move(value), std::move(help), set};
}

Option duration(std::string name, std::string value, std::chrono::milliseconds &to, std::string help) {
    const auto set = [name, &to](const std::string &text) { to = std::chrono::milliseconds(read_number<uint32_t>(name, text)); };
    return {name, std::move(value), std::move(help), set};
}

Option text(std::string name, std::string value, std::string &to, std::string help) {
    return {std::move(name), std::move(value), std::move(help), [&to](const std::string &text) { to = text; }};
}

Option texts(std::string name, std::string value, std::vector<std::string> &to, std::string help) {
    return {std::move(name), std::move(value), std::move(help), [&to](const std::string &text) { to.push_back(text); }, true};
}

Option texts(std::string name, std::string value, std::optional<std::vector<std::string>> &to, std::string help) {
    const auto set = [&to](const std::string &text) {
        if (!to) to.emplace();
        if (!text.empty()) to->push_back(text);
    };
    return {std::move(name), std::move(value), std::move(help), set, true};
}

Option tokens(std::string name, std::string value, std::vector<uint32_t> &to, std::string help) {
    const auto set = [name, &to](const std::string &text) {
        const std::vector<uint32_t> more = read_tokens(name, text);
        to.insert(to.end(), more.begin(), more.end());
    };
    return {name, std::move(value), std::move(help), set, true};
}

Option token_lists(std::string name, std::string value, std::vector<std::vector<uint32_t>> &to, std::string help) {
    const auto set = [name, &to](const std::string &text) { to.push_back(read_tokens(name, text)); };
    return {name, std::move(value), std::move(help), set, true};
}

Option biases(std::string name, std::string value, std::vector<pagedllm::LogitBias> &to, std::string help) {
    const auto set = [name, &to](const std::string &text) {
        const size_t equals = text.find('=');
        if (equals == std::string::npos) refuse(name, text, "a token id and a number, such as 3=-100");
        to.push_back({read_number<uint32_t>(name, text.substr(0, equals)), read_number<float>(name, text.substr(equals + 1))});
    };
    return {name, std::move(value), std::move(help), set, true};
}

Option toggle(std::string name, bool &to, bool value, std::string help) {
    return {std::move(name), "", std::move(help), [&to, value](const std::string &) { to = value; }};
}

}  // namespace tool
