// A connection to a server, on which operations are pipelined. hiredis connects and parses replies;
// values are sent from the buffers of the engine and received into them.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "jobs.hpp"
#include "server.hpp"

namespace pllm_valkey {

using pllm_connector::Clock;
using pllm_connector::Server;

// The operations that have ended. Memory for them is reserved when they start.
struct Completions {
    std::vector<pllm_kv_completion> ended;
    size_t expected = 0;

    void expect();
    void add(uint64_t token, uint32_t status, uint64_t bytes = 0) noexcept;
};

// An operation: commands, and as many replies.
struct Operation {
    // SETUP authenticates and selects the database.
    enum Kind { SETUP, EXISTS, GET, PUT, REMOVE } kind;
    uint64_t token = 0;
    std::string text = {};  // what is sent; for PUT without the value and its end
    pllm_connector::Parts parts = {};
    uint64_t len = 0;  // of the parts
    uint8_t *found = nullptr;
    uint64_t replies = 1, missing_replies = 1;
    uint64_t sent = 0;
    bool has_failed = false;
};

// Appends a command to a text, without the value of `value_len` bytes if that is not 0.
void append_command(std::string &text, std::initializer_list<std::string_view> arguments, uint64_t value_len = 0);

class Connection {
public:
    Connection(const Server &server, Completions &completions) : server_(server), completions_(completions) {}
    Connection(const Connection &) = delete;
    Connection &operator=(const Connection &) = delete;
    ~Connection() { reset(); }

    // Starts to connect, unless there is a connection, or the last attempt has failed a short time
    // ago.
    void connect(Clock::time_point now);

    // Starts an operation. Returns false if there is no connection.
    bool start(Operation operation);

    bool is_open() const { return context_ != nullptr; }
    int fd() const { return context_->fd; }
    short events() const;

    // Sends and receives what is possible without waiting.
    void progress(Clock::time_point now);

    // The time at which the connection counts as hung.
    Clock::time_point deadline() const;

private:
    static void *receive_string(const redisReadTask *task, char *text, size_t len);
    void install_reader();
    bool finish_connect();
    void add_setup();
    bool send(Clock::time_point now);
    bool receive(Clock::time_point now);
    bool process_replies();
    bool process(const redisReply &reply);
    bool process_of(Operation &operation, const redisReply &reply);
    void fail(Clock::time_point now);
    void reset() noexcept;

    const Server &server_;
    Completions &completions_;
    pllm_connector::Context context_;
    redisReplyObjectFunctions functions_, default_functions_;
    bool is_connected_ = false, has_answered_ = false;
    std::deque<Operation> operations_;
    size_t unsent_ = 0;  // the first operation that has not been sent completely
    uint64_t received_ = 0;  // length of the value of the current reply
    std::vector<char> buffer_;
    Clock::time_point last_progress_;
    pllm_connector::BackOff back_off_;
};

}  // namespace pllm_valkey
