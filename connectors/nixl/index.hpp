// The index in a Valkey or Redis server: commands that are sent together, and their replies.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "jobs.hpp"
#include "server.hpp"

namespace pllm_nixl {

using pllm_connector::Clock;
using pllm_connector::Server;

struct Reply {
    // FAILED: the server has refused the command, or does not answer.
    enum Kind { FAILED, NOTHING, DONE, NUMBER, TEXT } kind = FAILED;
    int64_t number = 0;
    std::string text = {};
};

class Index {
public:
    // `stop` ends `run` early.
    Index(const Server &server, const pllm_connector::Event &stop) : server_(server), stop_(stop) {}
    Index(const Index &) = delete;
    Index &operator=(const Index &) = delete;

    using Then = std::function<void(const Reply &)>;

    // Adds a command for the next `run`. `then` processes its reply.
    void add(std::vector<std::string> command, Then then = {});

    // Sends the commands, waits for their replies, and processes them. If the server is not there, hangs
    // for `timeout` or breaks the protocol, the connection is closed and the replies are FAILED.
    void run() { run(server_.timeout); }
    void run(std::chrono::milliseconds timeout);

    // Forgets the commands that were added.
    void clear() { commands_.clear(); }

    // The number of connections on which the server has answered.
    uint64_t connections() const { return connections_; }

private:
    struct Command {
        std::vector<std::string> arguments;
        Then then;
    };

    bool connect(Clock::time_point now);
    bool exchange(std::vector<Command> &commands, size_t first, size_t last, std::chrono::milliseconds timeout);
    bool append(const std::vector<std::string> &arguments);
    bool receive(std::vector<Command> &commands, size_t &next, size_t last);
    bool wait(bool wants_to_send, Clock::time_point deadline) const;
    void fail(Clock::time_point now);

    const Server server_;
    const pllm_connector::Event &stop_;
    std::vector<Command> commands_;
    pllm_connector::Context context_;
    redisReplyObjectFunctions functions_;
    size_t setup_replies_ = 0;  // that are missing
    bool has_answered_ = false;
    uint64_t connections_ = 0;
    pllm_connector::BackOff back_off_;
};

}  // namespace pllm_nixl
