// The C API of the store, and the functions of its pllm_kv_store.
#include "pagedllm_nixl.h"

#include <exception>

#include "worker.hpp"

namespace {

using namespace pllm_nixl;
using pllm_connector::Error;
using pllm_connector::Job;

constexpr size_t FIRST_SIZE = 136;
static_assert(sizeof(pllm_nixl_store_options) == FIRST_SIZE);
constexpr size_t MAX_PREFIX = 256, MAX_NAME = 256;
constexpr uint64_t MIN_BYTES = 1 << 20, MAX_BYTES = uint64_t{64} << 40;
constexpr uint32_t DEFAULT_LEASE = 10000, MIN_LEASE = 100, MAX_TIME = 3'600'000;
constexpr char DEFAULT_PREFIX[] = "pagedllm:nixl:", DEFAULT_BACKEND[] = "UCX";

const pllm_nixl_store_options DEFAULTS = {
    sizeof(pllm_nixl_store_options),
    nullptr,
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    "127.0.0.1",
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    nullptr,
    PLLM_NUL_TERMINATED,
    uint64_t{1} << 30,
    uint64_t{64} << 20,
    6379,
    0,
    0,
    0,
};

class Store {
public:
    Store(const Settings &settings, const Api &api, const std::string &backend) : worker_(settings, api, backend, completions_) {}

    bool exists(uint64_t token, const uint8_t *keys, uint64_t keys_len, uint8_t *out_found) {
        if (keys_len == 0) return false;
        Job job{Job::EXISTS, token, {keys, keys + keys_len * KEY_BYTES}};
        job.found = out_found;
        return worker_.start(std::move(job));
    }

    bool get(uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        return transfer(Job::GET, token, key, buffers, buffers_len);
    }

    bool put(uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        return transfer(Job::PUT, token, key, buffers, buffers_len);
    }

    bool remove(uint64_t token, const uint8_t *key) { return worker_.start({Job::REMOVE, token, {key, key + KEY_BYTES}}); }

    uint64_t poll(uint64_t timeout_us, pllm_kv_completion *out, uint64_t capacity) {
        const auto end = Clock::now() + std::chrono::microseconds(std::min<uint64_t>(timeout_us, UINT32_MAX));
        for (;;) {
            const uint64_t count = completions_.take(out, capacity);
            const auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - Clock::now()).count();
            if (count > 0 || left <= 0) return count;
            completions_.wait(static_cast<uint64_t>(left));
        }
    }

private:
    bool transfer(Job::Kind kind, uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        Job job{kind, token, {key, key + KEY_BYTES}};
        job.parts = pllm_connector::parts_of(buffers, buffers_len);
        job.len = pllm_connector::total_len(buffers, buffers_len);
        return job.len > 0 && worker_.start(std::move(job));
    }

    pllm_connector::Completions completions_;
    Worker worker_;
};

[[noreturn]] void refuse(const std::string &text) { throw Error{PLLM_E_INVALID_ARGUMENT, text}; }

void check_range(const char *name, uint64_t value, uint64_t min, uint64_t max) {
    if (value < min || value > max)
        refuse(std::string(name) + " is " + std::to_string(value) + "; must be " + std::to_string(min) + " to " + std::to_string(max));
}

void check(const pllm_nixl_store_options &options) {
    check_range("max_bytes", options.max_bytes, MIN_BYTES, MAX_BYTES);
    check_range("staging_bytes", options.staging_bytes, MIN_BYTES, MAX_BYTES);
    check_range("database", options.database, 0, INT32_MAX);
    check_range("timeout_ms", options.timeout_ms, 0, MAX_TIME);
    if (options.lease_ms != 0) check_range("lease_ms", options.lease_ms, MIN_LEASE, MAX_TIME);
}

Settings settings_of(const pllm_nixl_store_options &options) {
    using pllm_connector::read_text;
    check(options);
    const uint32_t lease = options.lease_ms > 0 ? options.lease_ms : DEFAULT_LEASE;
    return {pllm_connector::read_server(options),
            options.key_prefix ? read_text(options.key_prefix, options.key_prefix_len, "key_prefix", MAX_PREFIX) : DEFAULT_PREFIX,
            options.max_bytes, options.staging_bytes, std::chrono::milliseconds(lease)};
}

// NIXL's threads inherit that they run no signal handler of the host.
Store *create(const Settings &settings, const Api &api, const std::string &backend) {
    Store *store = nullptr;
    std::exception_ptr error;
    pllm_connector::spawn([&] {
        try {
            store = new Store(settings, api, backend);
        } catch (...) {
            error = std::current_exception();
        }
    }).join();
    if (error) std::rethrow_exception(error);
    return store;
}

}  // namespace

PLLM_CONNECTOR_API void pllm_nixl_store_options_init(pllm_nixl_store_options *options, uint64_t struct_size) {
    pllm_connector::write_defaults(options, struct_size, DEFAULTS);
}

PLLM_CONNECTOR_API int32_t pllm_nixl_store_open(const pllm_nixl_store_options *options, pllm_kv_store *out_store, char *out_error,
                                                uint64_t out_error_len) {
    return pllm_connector::guard(out_error, out_error_len, [&] {
        using pllm_connector::read_text;
        pllm_connector::check_out(out_store);
        const auto known = pllm_connector::read_options(options, "pllm_nixl_store_options", FIRST_SIZE, DEFAULTS);
        const Settings settings = settings_of(known);
        const std::string backend = known.backend ? read_text(known.backend, known.backend_len, "backend", MAX_NAME) : DEFAULT_BACKEND;
        const Api api = load_api(read_text(known.library, known.library_len, "library", pllm_connector::MAX_TEXT));
        pllm_connector::Functions<Store>::write(create(settings, api, backend), out_store);
    });
}
