// What the connectors share: the functions of a pllm_kv_store from a class, options of several
// versions, and errors as text.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "pagedllm.h"

#define PLLM_CONNECTOR_API extern "C" __attribute__((visibility("default")))

namespace pllm_connector {

constexpr size_t KEY_BYTES = 32;

// A failure of open: one of PLLM_E_*, and `problem (value, limit); remedy`.
struct Error {
    int32_t code;
    std::string text;
};

inline void copy_text(std::string_view text, char *out, uint64_t capacity) noexcept {
    if (!out || capacity == 0) return;
    const size_t len = std::min<size_t>(text.size(), capacity - 1);
    std::memcpy(out, text.data(), len);
    out[len] = 0;
}

// Runs a function that throws Error, and returns the code. No exception leaves a connector.
template <class Function>
int32_t guard(char *out_error, uint64_t capacity, Function &&function) noexcept {
    copy_text("", out_error, capacity);
    try {
        function();
        return 0;
    } catch (const Error &error) {
        copy_text(error.text, out_error, capacity);
        return error.code;
    } catch (const std::bad_alloc &) {
        copy_text("memory exhausted", out_error, capacity);
        return PLLM_E_OUT_OF_MEMORY;
    } catch (const std::exception &error) {
        copy_text(error.what(), out_error, capacity);
        return PLLM_E_INTERNAL;
    } catch (...) {
        copy_text("internal error: unknown exception", out_error, capacity);
        return PLLM_E_INTERNAL;
    }
}

// Writes the defaults into a struct of struct_size bytes, as the functions of the library do.
template <class Options>
void write_defaults(Options *to, uint64_t struct_size, const Options &defaults) noexcept {
    if (!to || struct_size < sizeof(uint64_t)) return;
    std::memcpy(to, &struct_size, sizeof struct_size);
    if (struct_size > 4096) return;  // refused by read_options
    std::memset(reinterpret_cast<char *>(to) + sizeof(uint64_t), 0, struct_size - sizeof(uint64_t));
    const auto known = std::min<size_t>(struct_size, sizeof(Options));
    std::memcpy(reinterpret_cast<char *>(to) + sizeof(uint64_t),
                reinterpret_cast<const char *>(&defaults) + sizeof(uint64_t), known - sizeof(uint64_t));
}

// Reads options of an older, the same or a newer version. The first version had first_size bytes.
template <class Options>
Options read_options(const Options *from, const char *name, size_t first_size, Options options) {
    if (!from) throw Error{PLLM_E_INVALID_ARGUMENT, std::string(name) + " is NULL"};
    uint64_t size;
    std::memcpy(&size, from, sizeof size);
    if (size < first_size || size > 4096)
        throw Error{PLLM_E_INVALID_ARGUMENT, std::string(name) + ".struct_size is " + std::to_string(size) + "; set it to sizeof(" +
                                                 name + "), or call " + name + "_init"};
    const char *bytes = reinterpret_cast<const char *>(from);
    const auto known = std::min<size_t>(size, sizeof(Options));
    if (std::any_of(bytes + known, bytes + size, [](char byte) { return byte != 0; }))
        throw Error{PLLM_E_UNSUPPORTED, std::string(name) + " has " + std::to_string(size) + " bytes, this library knows " +
                                            std::to_string(known) +
                                            " of them and the others are not zero; use a newer library or clear them"};
    std::memcpy(&options, bytes, known);
    return options;
}

// Checks the struct that receives the functions.
inline void check_out(const pllm_kv_store *out) {
    if (!out) throw Error{PLLM_E_INVALID_ARGUMENT, "out_store is NULL"};
    if (out->struct_size < sizeof *out)
        throw Error{PLLM_E_INVALID_ARGUMENT, "out_store->struct_size is " + std::to_string(out->struct_size) +
                                                 "; set it to sizeof(pllm_kv_store), or call pllm_kv_store_init"};
}

// Reads a string of the C API, of which len may be PLLM_NUL_TERMINATED.
inline std::string read_text(const char *text, uint64_t len, const char *name, size_t max_len) {
    if (!text) return {};
    std::string copy(text, len == PLLM_NUL_TERMINATED ? strnlen(text, max_len + 1) : std::min<uint64_t>(len, max_len + 1));
    if (copy.size() > max_len)
        throw Error{PLLM_E_INVALID_ARGUMENT, std::string(name) + " is too long (limit " + std::to_string(max_len) + " bytes); shorten it"};
    return copy;
}

inline std::string hex(const uint8_t *bytes, size_t len) {
    constexpr char digits[] = "0123456789abcdef";
    std::string text;
    text.reserve(2 * len);
    for (size_t i = 0; i < len; i++) {
        text += digits[bytes[i] >> 4];
        text += digits[bytes[i] & 15];
    }
    return text;
}

inline uint64_t total_len(const pllm_kv_buffer *buffers, uint64_t buffers_len) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < buffers_len; i++) total += buffers[i].len;
    return total;
}

// The functions of a pllm_kv_store whose user_data is a Store. An operation that throws is refused.
template <class Store>
struct Functions {
    template <class Start>
    static int32_t start(void *user_data, Start &&start) noexcept {
        try {
            return start(*static_cast<Store *>(user_data)) ? 0 : 1;
        } catch (...) {
            return 1;
        }
    }

    static int32_t exists(void *user_data, uint64_t token, const uint8_t *keys, uint64_t keys_len, uint8_t *out_found) {
        return start(user_data, [&](Store &store) { return store.exists(token, keys, keys_len, out_found); });
    }

    static int32_t get(void *user_data, uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        return start(user_data, [&](Store &store) { return store.get(token, key, buffers, buffers_len); });
    }

    static int32_t put(void *user_data, uint64_t token, const uint8_t *key, const pllm_kv_buffer *buffers, uint64_t buffers_len) {
        return start(user_data, [&](Store &store) { return store.put(token, key, buffers, buffers_len); });
    }

    static int32_t remove(void *user_data, uint64_t token, const uint8_t *key) {
        return start(user_data, [&](Store &store) { return store.remove(token, key); });
    }

    static uint64_t poll(void *user_data, uint64_t timeout_us, pllm_kv_completion *out, uint64_t capacity) {
        try {
            return static_cast<Store *>(user_data)->poll(timeout_us, out, capacity);
        } catch (...) {
            return 0;
        }
    }

    static void close(void *user_data) { delete static_cast<Store *>(user_data); }

    // Gives the store to a pllm_kv_store, whose close deletes it.
    static void write(Store *store, pllm_kv_store *out) {
        *out = {sizeof *out, store, exists, get, put, remove, poll, close};
    }
};

}  // namespace pllm_connector
