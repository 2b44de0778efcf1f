// Threads that execute the operations of a store with plain system calls.
#pragma once

#include <csignal>
#include <sys/uio.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "connector.hpp"

namespace pllm_files {

class Directory;

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

// The operations that have ended. Any thread adds them, and the thread of the engine takes them.
class Completions {
public:
    Completions();
    ~Completions();

    // Reserves memory for the end of one more operation, so that `add` cannot fail.
    void expect();
    void cancel_expected();
    void add(uint64_t token, uint32_t status, uint64_t bytes = 0) noexcept;
    uint64_t take(pllm_kv_completion *out, uint64_t capacity);

    // Waits until the event is signalled, which `add` does.
    void wait(uint64_t timeout_us);
    int event() const { return event_; }

private:
    std::mutex mutex_;
    std::vector<pllm_kv_completion> ended_;
    size_t expected_ = 0;
    int event_;
};

// The parts of a value.
using Parts = std::vector<iovec>;
Parts parts_of(const pllm_kv_buffer *buffers, uint64_t buffers_len);

// An operation. `keys` has one key, or those of `exists`.
struct Job {
    enum Kind { EXISTS, GET, PUT, REMOVE } kind;
    uint64_t token;
    std::vector<uint8_t> keys;
    uint8_t *found = nullptr;
    Parts parts = {};
    uint64_t len = 0;
};

class Threads {
public:
    Threads(Directory &directory, Completions &completions, unsigned threads);
    // Ends the operations that run. The others do not start.
    ~Threads();

    void start(Job job);

private:
    void stop();
    void run();
    void execute(Job &job);
    void exists(Job &job);
    void get(Job &job);
    void put(Job &job);
    int write(const std::string &name, Job &job);
    bool next(Job &job, std::unique_lock<std::mutex> &lock);

    Directory &directory_;
    Completions &completions_;
    std::mutex mutex_;
    std::condition_variable changed_;
    // Requests wait for reads. One thread at least is free of writes, if there are several.
    std::deque<Job> reads_, writes_;
    size_t writing_ = 0, max_writing_;
    bool stops_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace pllm_files
