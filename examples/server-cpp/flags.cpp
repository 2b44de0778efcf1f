#include "flags.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace server {

using std::invalid_argument;

// The environment variable with API keys, separated by spaces or newlines.
static constexpr const char *keys_variable = "PAGEDLLM_API_KEYS";

// Parses a positive number or 0, and removes it from the text.
static uint64_t take_number(std::string_view &text) {
    uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc()) throw invalid_argument("must begin with a number");
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return number;
}

// Parses a number with one of the units.
static uint64_t parse_unit(std::string_view text, const std::map<std::string_view, uint64_t> &units, const char *examples) {
    const uint64_t number = take_number(text);
    const auto unit = units.find(text);
    if (unit == units.end() || number > INT64_MAX / unit->second) throw invalid_argument(std::string("must be such as ") + examples);
    return number * unit->second;
}

static uint64_t parse_size(std::string_view text) {
    return parse_unit(text, {{"", 1}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}}, "67108864, 64MiB or 4GiB");
}

static std::chrono::milliseconds parse_time(std::string_view text) {
    return std::chrono::milliseconds(parse_unit(text, {{"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}}, "500ms, 30s or 10m"));
}

template <class T>
static T parse_number(std::string_view text) {
    const uint64_t number = take_number(text);
    if (!text.empty() || number > INT32_MAX) throw invalid_argument("must be 0 to 2147483647");
    return static_cast<T>(number);
}

static float parse_fraction(const std::string &text) {
    size_t end = 0;
    const float fraction = std::stof(text, &end);
    if (end != text.size()) throw invalid_argument("must be a number");
    return fraction;
}

static boost::asio::ip::tcp::endpoint parse_address(std::string_view text) {
    const size_t colon = text.rfind(':');
    if (colon == std::string_view::npos) throw invalid_argument("must be such as 127.0.0.1:8080 or [::1]:8080");
    std::string_view host = text.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);  // IPv6
    text.remove_prefix(colon + 1);
    const uint64_t port = take_number(text);
    if (!text.empty() || port > UINT16_MAX) throw invalid_argument("the port must be 0 to 65535");
    boost::system::error_code error;
    const auto address = boost::asio::ip::make_address(std::string(host), error);
    if (error) throw invalid_argument("\"" + std::string(host) + "\" is not an IP address");
    return {address, static_cast<uint16_t>(port)};
}

static ModelFlag parse_model(const std::string &text) {
    if (const size_t equals = text.find('='); equals != std::string::npos) return {text.substr(0, equals), text.substr(equals + 1)};
    std::string name = text.substr(0, text.find_last_not_of('/') + 1);
    name = name.substr(name.rfind('/') + 1);
    if (name.size() > 5 && name.compare(name.size() - 5, 5, ".gguf") == 0) name.resize(name.size() - 5);
    return {name, text};
}

// Reads one key from each line. Empty lines and lines that begin with # are skipped.
static std::vector<std::string> read_keys(const std::string &path) {
    std::ifstream file(path);
    if (!file) throw invalid_argument("cannot be opened (" + path + ")");
    std::vector<std::string> keys;
    for (std::string line; std::getline(file, line);) {
        const size_t begin = line.find_first_not_of(" \t\r");
        if (begin == std::string::npos || line[begin] == '#') continue;
        keys.push_back(line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin));
    }
    if (keys.empty()) throw invalid_argument(path + " has no API key; an empty file would let every client in");
    return keys;
}

namespace {

struct Flag {
    std::string name, help;
    std::function<void(const std::string &)> set;
};

}  // namespace

static std::vector<Flag> all_flags(Flags &f) {
    const auto number = [](auto &to) {
        return [&to](const std::string &text) { to = parse_number<std::decay_t<decltype(to)>>(text); };
    };
    const auto size = [](uint64_t &to) { return [&to](const std::string &text) { to = parse_size(text); }; };
    const auto time = [](std::chrono::milliseconds &to) { return [&to](const std::string &text) { to = parse_time(text); }; };
    const auto add_format = [&f](const std::string &text) {
        const size_t equals = text.find('=');
        f.formats[equals == std::string::npos ? "" : text.substr(0, equals)] = text.substr(equals == std::string::npos ? 0 : equals + 1);
    };
    return {
        {"model", "[NAME=]PATH of a model directory or GGUF file; repeat it for several models",
         [&f](const std::string &text) { f.models.push_back(parse_model(text)); }},
        {"format", "[NAME=]FORMAT of reasoning and tool calls, see docs/tools.md (default: that of the chat template)", add_format},
        {"address", "IP:PORT to listen on (default 127.0.0.1:8080)", [&f](const std::string &text) { f.address = parse_address(text); }},
        {"api-keys", "file with one API key in each line (default: the keys in $PAGEDLLM_API_KEYS)",
         [&f](const std::string &text) { f.server.keys = read_keys(text); }},
        {"kv-bytes", "size of the KV pools of all models together (default 1GiB)", size(f.kv_bytes)},
        {"device", "cpu (default) or cuda:0", [&f](const std::string &text) { f.engine.device = text; }},
        {"memory-fraction", "CUDA: fraction of the free device memory for the KV pool, instead of -kv-bytes",
         [&f](const std::string &text) { f.engine.memory_fraction = parse_fraction(text); }},
        {"threads", "threads of each model (default: the CPUs divided by the models)", number(f.engine.threads)},
        {"max-model-len", "maximum length of a sequence in tokens (default: that of the model)", number(f.engine.max_model_len)},
        {"max-seqs", "maximum number of running sequences of each model (default 64)", number(f.engine.max_seqs)},
        {"max-batch-tokens", "maximum number of tokens in one step (default 512)", number(f.engine.max_batch_tokens)},
        {"max-waiting", "maximum number of waiting requests of each model (default 2048)", number(f.engine.max_waiting_requests)},
        {"max-wait", "longest acceptable forecast of the time to the first token (default: no limit)", time(f.server.limits.max_wait)},
        {"max-time", "time after which a request ends with the tokens it has; 0s: no limit (default 10m)",
         time(f.server.limits.max_time)},
        {"max-requests", "maximum number of requests in progress (default 2048)", number(f.server.max_requests)},
        {"max-connections", "maximum number of open connections; further clients wait (default 4096)", number(f.server.max_connections)},
        {"max-logprobs", "maximum number of alternatives for each token (default 20)", number(f.server.limits.max_logprobs)},
        {"max-results", "maximum number of sequences of one request (default 128)", number(f.server.limits.max_results)},
        {"max-body", "maximum size of a request (default 8MiB)", size(f.server.max_body)},
        {"max-bodies", "maximum size of all requests in progress together (default 256MiB)", size(f.server.max_bodies)},
        {"header-timeout", "time within which the headers of a request must arrive (default 10s)", time(f.server.header_timeout)},
        {"read-timeout", "time within which the body of a request must arrive (default 30s)", time(f.server.read_timeout)},
        {"write-timeout", "time within which a client must take each part of its answer (default 30s)", time(f.server.write_timeout)},
        {"idle-timeout", "time after which an idle connection is closed (default 2m)", time(f.server.idle_timeout)},
        {"keep-alive", "time after which a silent stream has a comment (default 15s)", time(f.server.keep_alive)},
        {"drain", "time for which /health fails before the server accepts no more connections (default 5s)", time(f.server.drain)},
        {"grace", "time for the requests in progress when the server shuts down (default 30s)", time(f.server.grace)},
        {"workers", "threads that parse, tokenize and format requests (default 2)", number(f.workers)},
    };
}

std::string Flags::format_of(const std::string &model) const {
    const auto own = formats.find(model);
    const auto common = formats.find("");
    return own != formats.end() ? own->second : common != formats.end() ? common->second : std::string();
}

static void check(Flags &f) {
    if (f.models.empty()) throw invalid_argument("no model; give -model PATH");
    for (const ModelFlag &model : f.models) {
        int count = 0;
        for (const ModelFlag &other : f.models) count += other.name == model.name;
        if (count > 1) throw invalid_argument("two models have the name " + model.name + "; name them: NAME=PATH");
    }
    if (f.server.max_connections < 1 || f.server.max_requests < 1 || f.server.limits.max_results < 1 || f.workers < 1) {
        throw invalid_argument("-max-connections, -max-requests, -max-results and -workers must be positive");
    }
    for (const auto time : {f.server.header_timeout, f.server.read_timeout, f.server.write_timeout, f.server.idle_timeout, f.server.keep_alive}) {
        if (time.count() <= 0) throw invalid_argument("timeouts must be positive");
    }
    if (f.engine.threads == 0 && f.models.size() > 1) {
        f.engine.threads = std::max(1u, std::thread::hardware_concurrency() / static_cast<unsigned>(f.models.size()));
    }
}

// Takes "-name value", "--name value" and "-name=value".
std::optional<Flags> parse_flags(int argc, char **argv) {
    Flags f;
    f.engine.max_waiting_requests = 2048;
    if (const char *keys = std::getenv(keys_variable)) {
        std::istringstream words(keys);
        for (std::string key; words >> key;) f.server.keys.push_back(key);
    }
    const std::vector<Flag> flags = all_flags(f);
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i];
        if (name.empty() || name[0] != '-') throw invalid_argument("unexpected argument " + name);
        name.erase(0, name.compare(0, 2, "--") == 0 ? 2 : 1);
        if (name == "h" || name == "help") {
            for (const Flag &flag : flags) std::printf("  -%s\n        %s\n", flag.name.c_str(), flag.help.c_str());
            return std::nullopt;
        }
        const size_t equals = name.find('=');
        const std::string wanted = name.substr(0, equals);
        const Flag *found = nullptr;
        for (const Flag &flag : flags) found = flag.name == wanted ? &flag : found;
        if (!found) throw invalid_argument("unknown flag -" + wanted + "; -h lists the flags");
        if (equals == std::string::npos && i + 1 == argc) throw invalid_argument("-" + wanted + " needs a value");
        try {
            found->set(equals == std::string::npos ? std::string(argv[++i]) : name.substr(equals + 1));
        } catch (const std::exception &error) {
            throw invalid_argument("-" + wanted + ": " + error.what());
        }
    }
    check(f);
    return f;
}

}  // namespace server
