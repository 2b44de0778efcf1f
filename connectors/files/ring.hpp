// Reads and writes of values with io_uring. Only the thread of the engine uses it.
#pragma once

#include <memory>

#include "threads.hpp"

namespace pllm_files {

class Directory;

class Ring {
public:
    virtual ~Ring() = default;

    // Starts a GET or a PUT.
    virtual void start(Job job) = 0;

    // Starts what waits, and processes what has ended. Does not wait.
    virtual void progress() = 0;

    // Returns nullptr and the reason if the system does not permit io_uring, or if the library was
    // built without it.
    static std::unique_ptr<Ring> create(Directory &directory, Completions &completions, std::string &reason);
};

}  // namespace pllm_files
