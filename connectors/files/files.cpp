// The C API of the store, and the functions of its pllm_kv_store.
#include "pagedllm_files.h"

#include <chrono>
#include <climits>
#include <memory>
#include <optional>

#include "directory.hpp"
#include "ring.hpp"
#include "threads.hpp"

namespace {

using namespace pllm_files;

constexpr size_t FIRST_SIZE = 40;
static_assert(sizeof(pllm_files_store_options) == FIRST_SIZE);
constexpr size_t MAX_PATH = 4000;
constexpr uint64_t MIN_BYTES = 1 << 20;
constexpr unsigned DEFAULT_THREADS = 4, MAX_THREADS = 64;

const pllm_files_store_options DEFAULTS = {
    sizeof(pllm_files_store_options), nullptr, PLLM_NUL_TERMINATED, uint64_t{10} << 30, PLLM_FILES_IO_AUTO, 0,
};

class Store {
public:
    Store(const std::string &path, const pllm_files_store_options &options) : directory_(path, options.max_bytes) {
        std::string reason;
        if (options.io != PLLM_FILES_IO_THREADS) ring_ = Ring::create(directory_, completions_, reason);
        if (options.io == PLLM_FILES_IO_URING && !ring_)
            throw Error{PLLM_E_UNSUPPORTED, "io is PLLM_FILES_IO_URING and " + reason + "; use PLLM_FILES_IO_AUTO"};
        // With a ring, the thread looks for keys and removes values only.
        const unsigned threads = options.threads > 0 ? options.threads : DEFAULT_THREADS;
        threads_.emplace(directory_, completions_, ring_ ? 1 : threads);
    }

    bool exists(uint64_t token, const uint8_t *keys, uint64_t keys_len, uint8_t *out_found) {
        Job job{Job::EXISTS, token, {keys, keys + keys_len * pllm_connector::KEY_BYTES}};
        job.found = out_found;
        return start(std::move(job));
    }

    bool get(uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        return transfer(Job::GET, token, key, buffers, buffers_len);
    }

    bool put(uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        return transfer(Job::PUT, token, key, buffers, buffers_len);
    }

    bool remove(uint64_t token, const uint8_t *key) {
        return start({Job::REMOVE, token, {key, key + pllm_connector::KEY_BYTES}});
    }

    uint64_t poll(uint64_t timeout_us, pllm_kv_completion *out, uint64_t capacity) {
        if (ring_) ring_->progress();
        uint64_t count = completions_.take(out, capacity);
        if (count > 0 || timeout_us == 0) return count;
        // The steps of an operation of the ring signal the event, too.
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(std::min<uint64_t>(timeout_us, UINT32_MAX));
        for (;;) {
            const auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - std::chrono::steady_clock::now()).count();
            completions_.wait(left > 0 ? static_cast<uint64_t>(left) : 0);
            if (ring_) ring_->progress();
            count = completions_.take(out, capacity);
            if (count > 0 || left <= 0) return count;
        }
    }

private:
    bool transfer(Job::Kind kind, uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        Job job{kind, token, {key, key + pllm_connector::KEY_BYTES}};
        job.parts = pllm_connector::parts_of(buffers, buffers_len);
        job.len = pllm_connector::total_len(buffers, buffers_len);
        return start(std::move(job));
    }

    bool start(Job job) {
        const bool is_transfer = job.kind == Job::GET || job.kind == Job::PUT;
        const bool fits_ring = is_transfer && !job.parts.empty() && job.parts.size() <= IOV_MAX && job.len <= INT_MAX / 2;
        completions_.expect();
        try {
            if (ring_ && fits_ring) {
                ring_->start(std::move(job));
            } else {
                threads_->start(std::move(job));
            }
        } catch (...) {
            completions_.cancel_expected();
            throw;
        }
        return true;
    }

    Completions completions_;
    Directory directory_;
    std::unique_ptr<Ring> ring_;
    std::optional<Threads> threads_;
};

void check(const pllm_files_store_options &options, const std::string &path) {
    const auto refuse = [](const std::string &text) { throw Error{PLLM_E_INVALID_ARGUMENT, text}; };
    if (path.empty()) refuse("directory is empty; set it to the path of a directory");
    if (path.find('\0') != std::string::npos) refuse("directory contains a NUL byte; remove it");
    if (options.max_bytes < MIN_BYTES || options.max_bytes > INT64_MAX)
        refuse("max_bytes is " + std::to_string(options.max_bytes) + "; must be " + std::to_string(MIN_BYTES) + " to " +
               std::to_string(INT64_MAX));
    if (options.io > PLLM_FILES_IO_URING) refuse("io is " + std::to_string(options.io) + "; use one of PLLM_FILES_IO_*");
    if (options.threads > MAX_THREADS)
        refuse("threads is " + std::to_string(options.threads) + "; must be at most " + std::to_string(MAX_THREADS));
}

}  // namespace

PLLM_CONNECTOR_API void pllm_files_store_options_init(pllm_files_store_options *options, uint64_t struct_size) {
    pllm_connector::write_defaults(options, struct_size, DEFAULTS);
}

PLLM_CONNECTOR_API int32_t pllm_files_store_open(const pllm_files_store_options *options, pllm_kv_store *out_store, char *out_error,
                                                 uint64_t out_error_len) {
    return pllm_connector::guard(out_error, out_error_len, [&] {
        pllm_connector::check_out(out_store);
        const auto known = pllm_connector::read_options(options, "pllm_files_store_options", FIRST_SIZE, DEFAULTS);
        const std::string path = pllm_connector::read_text(known.directory, known.directory_len, "directory", MAX_PATH);
        check(known, path);
        pllm_connector::Functions<Store>::write(new Store(path, known), out_store);
    });
}
