// Operations of a store that threads of its own execute: from the functions of the engine to the
// threads, and back.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <mutex>
#include <thread>
#include <vector>

#include "connector.hpp"

namespace pllm_connector {

// Starts a thread that runs no signal handler of the host. A write beyond RLIMIT_FSIZE then fails,
// and its signal does not end the process.
template <class Function>
std::thread spawn(Function &&function) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    struct Restore {
        const sigset_t &mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
    } restore{before};
    return std::thread(std::forward<Function>(function));
}

// A descriptor that is readable after `signal`, until `clear`.
class Event {
public:
    Event() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (fd_ < 0)
            throw Error{PLLM_E_CAPACITY, std::string("the system has no event descriptor (") + std::strerror(errno) + "); raise RLIMIT_NOFILE"};
    }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;
    ~Event() { ::close(fd_); }

    void signal() const noexcept { eventfd_write(fd_, 1); }
    void clear() const noexcept {
        eventfd_t value;
        eventfd_read(fd_, &value);
    }

    // Waits until the event is signalled, and clears it.
    void wait(uint64_t timeout_us) const {
        pollfd event = {fd_, POLLIN, 0};
        const timespec timeout = {static_cast<time_t>(timeout_us / 1'000'000), static_cast<long>(timeout_us % 1'000'000) * 1000};
        if (ppoll(&event, 1, &timeout, nullptr) > 0) clear();
    }

    int fd() const { return fd_; }

private:
    const int fd_;
};

// The operations that have ended. Any thread adds them, and the thread of the engine takes them.
class Completions {
public:
    // Reserves memory for the end of one more operation, so that `add` cannot fail.
    void expect() {
        std::lock_guard lock(mutex_);
        ended_.reserve(ended_.size() + expected_ + 1);
        expected_++;
    }

    void cancel_expected() {
        std::lock_guard lock(mutex_);
        expected_--;
    }

    void add(uint64_t token, uint32_t status, uint64_t bytes = 0) noexcept {
        {
            std::lock_guard lock(mutex_);
            ended_.push_back({token, bytes, status, 0});  // within the reserved memory
            expected_--;
        }
        event_.signal();
    }

    uint64_t take(pllm_kv_completion *out, uint64_t capacity) {
        std::lock_guard lock(mutex_);
        const size_t count = std::min<size_t>(ended_.size(), capacity);
        std::copy_n(ended_.begin(), count, out);
        ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(count));
        return count;
    }

    // Waits until the event is signalled, which `add` does.
    void wait(uint64_t timeout_us) { event_.wait(timeout_us); }
    int event() const { return event_.fd(); }

private:
    std::mutex mutex_;
    std::vector<pllm_kv_completion> ended_;
    size_t expected_ = 0;
    Event event_;
};

// The parts of a value.
using Parts = std::vector<iovec>;

inline Parts parts_of(const pllm_kv_buffer *buffers, uint64_t buffers_len) {
    Parts parts;
    parts.reserve(buffers_len);
    for (uint64_t i = 0; i < buffers_len; i++)
        if (buffers[i].len > 0) parts.push_back({buffers[i].data, buffers[i].len});
    return parts;
}

// An operation. `keys` has one key, or those of `exists`.
struct Job {
    enum Kind { EXISTS, GET, PUT, REMOVE } kind;
    uint64_t token;
    std::vector<uint8_t> keys;
    uint8_t *found = nullptr;
    Parts parts = {};
    uint64_t len = 0;
};

}  // namespace pllm_connector
