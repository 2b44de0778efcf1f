// The thread of a store. It alone uses the agent, the index and the memory, after they were created.
#pragma once

#include <atomic>
#include <list>

#include "agent.hpp"
#include "index.hpp"
#include "peers.hpp"
#include "pool.hpp"

namespace pllm_nixl {

struct Settings {
    Server server;
    std::string prefix;
    size_t max_bytes, staging_bytes;
    std::chrono::milliseconds lease;
};

// Pages that NIXL registers.
class Memory {
public:
    explicit Memory(size_t len);
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory();
    char *data() const { return data_; }
    size_t len() const { return len_; }

private:
    char *data_;
    size_t len_;
};

// Where the index says that a value is.
struct Location {
    std::string agent;
    uint64_t address, len, sequence;
};

class Worker {
public:
    Worker(const Settings &settings, const Api &api, const std::string &backend, pllm_connector::Completions &completions);
    // Ends all operations without a completion.
    ~Worker();

    // Returns false if too many operations are in flight.
    bool start(pllm_connector::Job job);

private:
    // An operation whose commands are in the index. GET and EXISTS look for locations.
    struct Task {
        pllm_connector::Job job;
        bool is_done = false, has_failed = false;
        std::vector<std::pair<size_t, Location>> located = {};  // with the position of the key
    };

    // A value that waits for staging memory, or that is being read.
    struct Read {
        pllm_connector::Job job;
        Location location;
        Clock::time_point deadline;
        char *staging = nullptr;
        Handle request = nullptr;
        bool is_done = false;
    };

    void run();
    void take_jobs(std::vector<Task> &tasks);
    void process(std::vector<Task> &tasks);
    void begin(Task &task);
    void put(Task &task);
    void remove(Task &task);
    void find(Task &task);
    void locate(Task &task, size_t position, const Key &key);
    void look_up_peers(const std::vector<Task> &tasks);
    void end(Task &task);
    void end_get(Task &task);
    void complete(pllm_connector::Job &job, bool &is_done, uint32_t status, uint64_t bytes = 0);

    void progress_reads();
    bool progress(Read &read, Clock::time_point now);
    void start_read(Read &read, Clock::time_point now);
    void end_read(Read &read);
    static size_t size_of(const Read &read);

    void renew_lease(Clock::time_point now);
    void announce();
    void set_entry(const Value &value, Index::Then then);
    void remove_entry(const Key &key, const std::string &location, Index::Then then = {});
    std::string location_of(const Value &value) const;
    std::string name_of(const Key &key) const;
    void wait(Clock::time_point now) const;
    void leave();

    const Settings settings_;
    pllm_connector::Completions &completions_;
    Memory memory_;
    Agent agent_;
    const std::string metadata_;
    Pool pool_;
    Staging staging_;
    pllm_connector::Event wake_, stop_;
    Index index_;
    Peers peers_;
    std::list<Read> reads_;
    Clock::time_point renewed_{}, next_renewal_{};
    uint64_t announced_connections_ = 0;
    uint64_t next_announced_ = 0;  // sequence number from which on values are announced again
    size_t announcements_ = 0;     // that are left

    std::mutex mutex_;
    std::vector<pllm_connector::Job> jobs_;  // that have not begun
    std::atomic<size_t> in_flight_{0};
    std::atomic<bool> stops_{false};
    std::thread thread_;
};

}  // namespace pllm_nixl
