// The contract of pllm_kv_store as tests use it: operations of a store, and a test with random
// ones.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pagedllm.h"

using Key = std::array<uint8_t, 32>;
using Value = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

inline Key key_of(uint64_t number) {
    std::mt19937_64 random(number);
    Key key;
    for (auto &byte : key) byte = static_cast<uint8_t>(random());
    return key;
}

inline Value value_of(uint64_t number, size_t len) {
    std::mt19937_64 random(number);
    Value value(len);
    for (auto &byte : value) byte = static_cast<uint8_t>(random());
    return value;
}

// Forks. What is in the buffer of the standard output is not printed twice.
inline pid_t fork_child() {
    std::fflush(nullptr);
    return fork();
}

// A folder that is removed at the end.
struct TempDir {
    fs::path path;
    TempDir() {
        std::string name = (fs::temp_directory_path() / "pllm-connector-XXXXXX").string();
        if (!mkdtemp(name.data())) std::abort();
        path = name;
    }
    ~TempDir() { fs::remove_all(path); }
    std::string operator/(const std::string &name) const { return (path / name).string(); }
};

struct Result {
    uint32_t status;
    uint64_t bytes;
    bool operator==(const Result &other) const { return status == other.status && bytes == other.bytes; }
};

// The token of an operation that the store has refused.
constexpr uint64_t REFUSED = 0;
constexpr auto LONG = std::chrono::seconds(20);

// Calls the functions of a store as the engine does. Its buffers are freed after the completion
// only, so that AddressSanitizer notices a later use.
class Client {
public:
    explicit Client(const pllm_kv_store &store) : store_(store) {}
    Client(const Client &) = delete;
    Client &operator=(const Client &) = delete;
    ~Client() { close(); }

    void close() {
        if (store_.close) store_.close(store_.user_data);
        store_.close = nullptr;
        operations_.clear();
    }

    uint64_t start_exists(const std::vector<Key> &keys) {
        Operation operation;
        for (const Key &key : keys) operation.keys.insert(operation.keys.end(), key.begin(), key.end());
        operation.found.resize(keys.size());
        return start(std::move(operation), [&](uint64_t token, Operation &op) {
            return store_.exists(store_.user_data, token, op.keys.data(), keys.size(), op.found.data());
        });
    }

    // The value is split into `parts` buffers.
    uint64_t start_get(const Key &key, size_t len, size_t parts = 2) { return start_transfer(key, Value(len), parts, store_.get); }
    uint64_t start_put(const Key &key, Value value, size_t parts = 2) { return start_transfer(key, std::move(value), parts, store_.put); }

    uint64_t start_remove(const Key &key) {
        Operation operation;
        operation.keys.assign(key.begin(), key.end());
        return start(std::move(operation), [&](uint64_t token, Operation &op) {
            return store_.remove(store_.user_data, token, op.keys.data());
        });
    }

    // Polls once.
    void poll(uint64_t timeout_us = 1000, uint64_t capacity = 64) {
        std::vector<pllm_kv_completion> completions(capacity);
        const uint64_t count = store_.poll(store_.user_data, timeout_us, completions.data(), capacity);
        ASSERT_LE(count, capacity);
        for (uint64_t i = 0; i < count; i++) {
            const auto found = operations_.find(completions[i].token);
            ASSERT_NE(found, operations_.end()) << "an unknown token";
            ASSERT_FALSE(found->second.is_done) << "a second completion";
            found->second.is_done = true;
            found->second.result = {completions[i].status, completions[i].bytes};
        }
    }

    bool is_done(uint64_t token) const { return token == REFUSED || operations_.at(token).is_done; }

    // Waits for the end of an operation. A refused one counts as failed.
    Result wait(uint64_t token, std::chrono::milliseconds limit = LONG) {
        for (const auto end = Clock::now() + limit; !is_done(token);) {
            poll();
            if (Clock::now() > end) {
                ADD_FAILURE() << "an operation does not end";
                return {99, 0};
            }
        }
        if (token == REFUSED) return {PLLM_KV_FAILED, 0};
        const auto operation = operations_.extract(token);
        last_value = std::move(operation.mapped().value);
        last_found = std::move(operation.mapped().found);
        return operation.mapped().result;
    }

    Result put(const Key &key, const Value &value) { return wait(start_put(key, value)); }
    Result get(const Key &key, size_t len) { return wait(start_get(key, len)); }
    Result remove(const Key &key) { return wait(start_remove(key)); }
    bool has(const Key &key) { return wait(start_exists({key})).status == PLLM_KV_DONE && last_found[0] == 1; }
    bool holds(const Key &key, const Value &value) {
        return get(key, value.size()) == Result{PLLM_KV_DONE, value.size()} && last_value == value;
    }

    Value last_value;
    std::vector<uint8_t> last_found;

private:
    struct Operation {
        std::vector<uint8_t> keys, found;
        Value value;
        bool is_done = false;
        Result result{};
    };

    template <class Call>
    uint64_t start(Operation operation, Call call) {
        const uint64_t token = ++last_token_;
        auto &kept = operations_[token] = std::move(operation);
        if (call(token, kept) == 0) return token;
        operations_.erase(token);
        return REFUSED;
    }

    template <class Function>
    uint64_t start_transfer(const Key &key, Value value, size_t parts, Function function) {
        Operation operation;
        operation.keys.assign(key.begin(), key.end());
        operation.value = std::move(value);
        return start(std::move(operation), [&](uint64_t token, Operation &op) {
            std::vector<pllm_kv_buffer> buffers;
            const size_t len = op.value.size();
            for (size_t i = 0; i < parts; i++)
                buffers.push_back({op.value.data() + len * i / parts, len * (i + 1) / parts - len * i / parts});
            return function(store_.user_data, token, op.keys.data(), buffers.data(), buffers.size());
        });
    }

    pllm_kv_store store_;
    std::map<uint64_t, Operation> operations_;
    uint64_t last_token_ = 0;
};

// Runs rounds of random operations, each round with distinct keys in flight, and compares the
// results with a map.
inline void run_random_operations(Client &client, unsigned seed, int rounds) {
    std::mt19937 random(seed);
    const auto below = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
    std::map<size_t, Value> model;
    for (int round = 0; round < rounds; round++) {
        std::vector<size_t> numbers(48);
        for (size_t i = 0; i < numbers.size(); i++) numbers[i] = i;
        std::shuffle(numbers.begin(), numbers.end(), random);
        numbers.resize(1 + below(numbers.size()));
        std::vector<std::pair<uint64_t, std::function<void()>>> started;
        for (const size_t number : numbers) {
            const Key key = key_of(number);
            const auto known = model.find(number);
            const size_t len = known == model.end() ? 100 : known->second.size(), parts = 1 + below(5);
            switch (below(5)) {
                case 0:
                case 1: {
                    // A key names its contents, so a value is not replaced.
                    const Value value = known == model.end() ? value_of(random(), 1 + below(100'000)) : known->second;
                    model[number] = value;
                    const uint64_t token = client.start_put(key, value, parts);
                    started.emplace_back(token, [&client, token] { EXPECT_EQ(client.wait(token).status, uint32_t{PLLM_KV_DONE}); });
                    break;
                }
                case 2: {
                    const Value expected = known == model.end() ? Value() : known->second;
                    const uint64_t token = client.start_get(key, len, parts);
                    started.emplace_back(token, [&client, token, expected] {
                        const Result result = client.wait(token);
                        if (expected.empty()) {
                            EXPECT_EQ(result.status, uint32_t{PLLM_KV_MISSING});
                        } else {
                            EXPECT_TRUE((result == Result{PLLM_KV_DONE, expected.size()}));
                            EXPECT_TRUE(client.last_value == expected);
                        }
                    });
                    break;
                }
                case 3: {
                    const bool expected = known != model.end();
                    const uint64_t token = client.start_exists({key, key_of(1'000'000 + number)});
                    started.emplace_back(token, [&client, token, expected] {
                        EXPECT_EQ(client.wait(token).status, uint32_t{PLLM_KV_DONE});
                        EXPECT_EQ(client.last_found, (std::vector<uint8_t>{expected, 0}));
                    });
                    break;
                }
                case 4: {
                    const uint32_t expected = known == model.end() ? PLLM_KV_MISSING : PLLM_KV_DONE;
                    model.erase(number);
                    const uint64_t token = client.start_remove(key);
                    started.emplace_back(token, [&client, token, expected] { EXPECT_EQ(client.wait(token).status, expected); });
                    break;
                }
            }
        }
        std::shuffle(started.begin(), started.end(), random);
        for (auto &[token, check] : started) {
            ASSERT_NE(token, REFUSED);
            check();
        }
    }
}

// Waits until a condition holds.
inline bool becomes_true(const std::function<bool()> &condition, std::chrono::milliseconds limit = LONG) {
    for (const auto end = Clock::now() + limit; !condition();) {
        if (Clock::now() > end) return false;
        usleep(5000);
    }
    return true;
}
