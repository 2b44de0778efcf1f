#include "pool.hpp"

namespace pllm_nixl {
namespace {

constexpr size_t ALIGNMENT = 64;

size_t aligned(size_t len) { return (len + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

}  // namespace

bool Pool::is_live(const Value &value) const {
    const auto found = sequences_.find(value.key);
    return found != sequences_.end() && found->second == value.sequence;
}

const Value *Pool::find(const Key &key) const {
    const auto found = sequences_.find(key);
    // The sequence numbers in the queue are consecutive.
    return found == sequences_.end() ? nullptr : &values_[found->second - values_.front().sequence];
}

bool Pool::remove(const Key &key) {
    const Value *value = find(key);
    if (!value) return false;
    clear_header(*value);
    return sequences_.erase(key) > 0;
}

void Pool::evict_oldest(std::vector<Value> &evicted) {
    const Value value = values_.front();
    if (is_live(value)) {
        evicted.push_back(value);
        remove(value.key);
    }
    values_.pop_front();
}

const Value *Pool::put(const Key &key, const pllm_connector::Parts &parts, uint64_t len, std::vector<Value> &evicted) {
    if (len > len_ - sizeof(Header)) return nullptr;
    const size_t size = aligned(sizeof(Header) + len);
    if (size > len_) return nullptr;
    if (const Value *known = find(key)) {
        evicted.push_back(*known);
        remove(key);
    }
    if (end_ + size > len_) {
        while (!values_.empty() && values_.front().offset >= end_) evict_oldest(evicted);
        end_ = 0;
    }
    while (!values_.empty() && values_.front().offset >= end_ && values_.front().offset < end_ + size) evict_oldest(evicted);
    char *to = memory_ + end_ + sizeof(Header);
    for (const iovec &part : parts) {
        std::memcpy(to, part.iov_base, part.iov_len);
        to += part.iov_len;
    }
    const Header header = {MAGIC, len, next_sequence_, key, 0};
    std::memcpy(memory_ + end_, &header, sizeof header);
    values_.push_back({key, next_sequence_, end_, len});
    try {
        sequences_[key] = next_sequence_;
    } catch (...) {
        values_.pop_back();
        throw;
    }
    next_sequence_++;
    end_ += size;
    return &values_.back();
}

char *Staging::allocate(size_t len) {
    const size_t size = aligned(len);
    for (auto range = free_.begin(); range != free_.end(); ++range) {
        if (range->second < size) continue;
        const auto [offset, available] = *range;
        if (available > size) free_[offset + size] = available - size;
        free_.erase(offset);
        return memory_ + offset;
    }
    return nullptr;
}

void Staging::free(char *data, size_t len) {
    const auto offset = static_cast<size_t>(data - memory_);
    auto range = free_.emplace(offset, aligned(len)).first;
    const auto next = std::next(range);
    if (next != free_.end() && next->first == range->first + range->second) {
        range->second += next->second;
        free_.erase(next);
    }
    if (range == free_.begin()) return;
    const auto previous = std::prev(range);
    if (previous->first + previous->second != range->first) return;
    previous->second += range->second;
    free_.erase(range);
}

}  // namespace pllm_nixl
