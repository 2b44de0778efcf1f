// Threads that execute the operations of a store with plain system calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "jobs.hpp"

namespace pllm_files {

class Directory;

using pllm_connector::Completions;
using pllm_connector::Job;
using pllm_connector::Parts;

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
