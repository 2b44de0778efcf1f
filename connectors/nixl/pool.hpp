// The memory of a store: a ring of its own values, which other processes read, and staging memory for
// values that are being read from them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "jobs.hpp"

namespace pllm_nixl {

using pllm_connector::KEY_BYTES;
using Key = std::array<uint8_t, KEY_BYTES>;

// Keys are hashes already.
struct HashOfKey {
    size_t operator()(const Key &key) const noexcept {
        size_t hash;
        std::memcpy(&hash, key.data(), sizeof hash);
        return hash;
    }
};

// What precedes a value in memory. A reader compares it with what the index has named, so that a value
// that has been overwritten is missing.
struct Header {
    uint64_t magic, len, sequence;
    Key key;
    uint64_t reserved;
};
static_assert(sizeof(Header) == 64);

constexpr uint64_t MAGIC = 0x314c58494e4d4c50;  // "PLMNIXL1"

// A value of the pool. Its header is at `offset`.
struct Value {
    Key key;
    uint64_t sequence, offset, len;
};

// The values in the order in which they were written. New values replace the oldest ones: which values
// other processes read is not known here, so that there is no order by use.
class Pool {
public:
    Pool(char *memory, size_t len) : memory_(memory), len_(len) {}

    // Writes a value, and appends those that it replaces to `evicted`, also an older one of this key.
    // Returns nullptr if the value is longer than the pool.
    const Value *put(const Key &key, const pllm_connector::Parts &parts, uint64_t len, std::vector<Value> &evicted);

    const Value *find(const Key &key) const;
    const char *data(const Value &value) const { return memory_ + value.offset + sizeof(Header); }
    char *address(const Value &value) const { return memory_ + value.offset; }

    // Removes a value. Returns false if there is none.
    bool remove(const Key &key);

    // The values by age, the oldest one first. Removed ones are among them: see is_live.
    const std::deque<Value> &values() const { return values_; }
    bool is_live(const Value &value) const;

private:
    void evict_oldest(std::vector<Value> &evicted);
    void clear_header(const Value &value) { std::memset(address(value), 0, sizeof(Header)); }

    char *const memory_;
    const size_t len_;
    std::deque<Value> values_;
    std::unordered_map<Key, uint64_t, HashOfKey> sequences_;
    uint64_t next_sequence_ = 1, end_ = 0;  // the offset behind the newest value
};

// Memory in which the first free range that is large enough is used.
class Staging {
public:
    Staging(char *memory, size_t len) : memory_(memory), len_(len) { free_[0] = len; }

    size_t capacity() const { return len_; }
    // Returns nullptr if no free range is large enough.
    char *allocate(size_t len);
    void free(char *data, size_t len);

private:
    char *const memory_;
    const size_t len_;
    std::map<size_t, size_t> free_;  // lengths by offset
};

}  // namespace pllm_nixl
