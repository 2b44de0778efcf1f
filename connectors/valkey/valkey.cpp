// The C API of the store, and the functions of its pllm_kv_store.
#include "pagedllm_valkey.h"

#include <poll.h>

#include "connection.hpp"

namespace {

using namespace pllm_valkey;
using pllm_connector::Error;
using pllm_connector::KEY_BYTES;

constexpr size_t FIRST_SIZE = 96;
static_assert(sizeof(pllm_valkey_store_options) == FIRST_SIZE);
constexpr size_t MAX_PREFIX = 256;
constexpr uint64_t MAX_TTL = 31'536'000;
constexpr uint32_t MAX_TIMEOUT = 3'600'000;
constexpr char DEFAULT_PREFIX[] = "pagedllm:kv:";

const pllm_valkey_store_options DEFAULTS = {
    sizeof(pllm_valkey_store_options),
    "127.0.0.1",
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    0,
    6379,
    0,
    0,
    0,
};

struct Settings {
    Server server;
    std::string prefix, ttl_ms;
};

class Store {
public:
    explicit Store(Settings settings) : settings_(std::move(settings)) {
        for (Connection *connection : {&reads_, &writes_}) connection->connect(Clock::now());
    }

    // With a time to live, a lookup extends it.
    bool exists(uint64_t token, const uint8_t *keys, uint64_t keys_len, uint8_t *out_found) {
        Operation operation{Operation::EXISTS, token};
        if (keys_len == 0) return false;
        operation.found = out_found;
        operation.replies = operation.missing_replies = keys_len;
        for (uint64_t i = 0; i < keys_len; i++) {
            const std::string key = name(keys + i * KEY_BYTES);
            if (settings_.ttl_ms.empty()) {
                append_command(operation.text, {"EXISTS", key});
            } else {
                append_command(operation.text, {"PEXPIRE", key, settings_.ttl_ms});
            }
        }
        return start(reads_, std::move(operation));
    }

    // One byte more than the buffers have, so that a longer value is noticed without reading all of
    // it.
    bool get(uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        Operation operation = transfer(Operation::GET, token, buffers, buffers_len);
        append_command(operation.text, {"GETRANGE", name(key), "0", std::to_string(operation.len)});
        return start(reads_, std::move(operation));
    }

    bool put(uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        Operation operation = transfer(Operation::PUT, token, buffers, buffers_len);
        if (operation.len == 0) return false;
        if (settings_.ttl_ms.empty()) {
            append_command(operation.text, {"SET", name(key)}, operation.len);
        } else {
            append_command(operation.text, {"PSETEX", name(key), settings_.ttl_ms}, operation.len);
        }
        return start(writes_, std::move(operation));
    }

    bool remove(uint64_t token, const uint8_t *key) {
        Operation operation{Operation::REMOVE, token};
        append_command(operation.text, {"UNLINK", name(key)});
        return start(reads_, std::move(operation));
    }

    uint64_t poll(uint64_t timeout_us, pllm_kv_completion *out, uint64_t capacity) {
        const auto end = Clock::now() + std::chrono::microseconds(std::min<uint64_t>(timeout_us, UINT32_MAX));
        for (;;) {
            const auto now = Clock::now();
            for (Connection *connection : {&reads_, &writes_}) connection->progress(now);
            const uint64_t count = take(out, capacity);
            if (count > 0 || now >= end) return count;
            wait(now, end);
        }
    }

private:
    std::string name(const uint8_t *key) const { return settings_.prefix + pllm_connector::hex(key, KEY_BYTES); }

    static Operation transfer(Operation::Kind kind, uint64_t token, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        Operation operation{kind, token};
        operation.parts = pllm_connector::parts_of(buffers, buffers_len);
        operation.len = pllm_connector::total_len(buffers, buffers_len);
        return operation;
    }

    static bool start(Connection &connection, Operation operation) {
        connection.connect(Clock::now());
        return connection.start(std::move(operation));
    }

    uint64_t take(pllm_kv_completion *out, uint64_t capacity) {
        auto &ended = completions_.ended;
        const size_t count = std::min<size_t>(ended.size(), capacity);
        std::copy_n(ended.begin(), count, out);
        ended.erase(ended.begin(), ended.begin() + static_cast<std::ptrdiff_t>(count));
        return count;
    }

    void wait(Clock::time_point now, Clock::time_point end) {
        pollfd descriptors[2];
        nfds_t count = 0;
        for (Connection *connection : {&reads_, &writes_}) {
            if (connection->is_open()) descriptors[count++] = {connection->fd(), connection->events(), 0};
            end = std::min(end, connection->deadline());
        }
        const auto left = std::max<int64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(end - now).count(), 0);
        const timespec timeout = {left / 1'000'000'000, left % 1'000'000'000};
        ppoll(descriptors, count, &timeout, nullptr);
    }

    const Settings settings_;
    Completions completions_;
    // Requests wait for reads, so that reads do not queue behind writes.
    Connection reads_{settings_.server, completions_}, writes_{settings_.server, completions_};
};

[[noreturn]] void refuse(const std::string &text) { throw Error{PLLM_E_INVALID_ARGUMENT, text}; }

void check(const pllm_valkey_store_options &options) {
    if (options.database > INT32_MAX) refuse("database is " + std::to_string(options.database) + "; must be at most 2147483647");
    if (options.ttl_seconds > MAX_TTL)
        refuse("ttl_seconds is " + std::to_string(options.ttl_seconds) + "; must be at most " + std::to_string(MAX_TTL));
    if (options.timeout_ms > MAX_TIMEOUT)
        refuse("timeout_ms is " + std::to_string(options.timeout_ms) + "; must be at most " + std::to_string(MAX_TIMEOUT));
    if (options.reserved != 0) refuse("reserved is " + std::to_string(options.reserved) + "; must be 0");
}

Settings settings_of(const pllm_valkey_store_options *from) {
    using pllm_connector::read_text;
    const auto options = pllm_connector::read_options(from, "pllm_valkey_store_options", FIRST_SIZE, DEFAULTS);
    check(options);
    return {pllm_connector::read_server(options),
            options.key_prefix ? read_text(options.key_prefix, options.key_prefix_len, "key_prefix", MAX_PREFIX) : DEFAULT_PREFIX,
            options.ttl_seconds > 0 ? std::to_string(options.ttl_seconds * 1000) : ""};
}

}  // namespace

PLLM_CONNECTOR_API void pllm_valkey_store_options_init(pllm_valkey_store_options *options, uint64_t struct_size) {
    pllm_connector::write_defaults(options, struct_size, DEFAULTS);
}

PLLM_CONNECTOR_API int32_t pllm_valkey_store_open(const pllm_valkey_store_options *options, pllm_kv_store *out_store, char *out_error,
                                                  uint64_t out_error_len) {
    return pllm_connector::guard(out_error, out_error_len, [&] {
        pllm_connector::check_out(out_store);
        pllm_connector::Functions<Store>::write(new Store(settings_of(options)), out_store);
    });
}
