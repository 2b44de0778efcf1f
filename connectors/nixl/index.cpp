#include "index.hpp"

#include <poll.h>

namespace pllm_nixl {
namespace {

// Commands that are sent before their replies are read.
constexpr size_t MAX_PIPELINE = 512;
// A reply is shorter: the longest one is the metadata of an agent.
constexpr size_t MAX_REPLY = 1 << 20;

Reply reply_of(const redisReply &from) {
    switch (from.type) {
        case REDIS_REPLY_NIL: return {Reply::NOTHING};
        case REDIS_REPLY_STATUS: return {Reply::DONE};
        case REDIS_REPLY_INTEGER: return {Reply::NUMBER, from.integer};
        case REDIS_REPLY_STRING: return {Reply::TEXT, 0, std::string(from.str, from.len)};
        default: return {};
    }
}

}  // namespace

void Index::add(std::vector<std::string> command, Then then) { commands_.push_back({std::move(command), std::move(then)}); }

void Index::run(std::chrono::milliseconds timeout) {
    std::vector<Command> commands;
    commands.swap(commands_);
    bool works = commands.empty() || connect(Clock::now());
    for (size_t first = 0; first < commands.size(); first += MAX_PIPELINE) {
        const size_t last = std::min(first + MAX_PIPELINE, commands.size());
        works = works && exchange(commands, first, last, timeout);
        if (!works)
            for (size_t i = first; i < last; i++)
                if (commands[i].then) commands[i].then(Reply{});
    }
}

// Returns false if there is no connection, and the last attempt has failed a short time ago.
bool Index::connect(Clock::time_point now) {
    if (context_) {
        if (!pllm_connector::is_closed(context_->fd)) return true;
        context_.reset();
    }
    if (!back_off_.permits(now)) return false;
    context_ = pllm_connector::open_connection(server_);
    has_answered_ = false;
    if (!context_) {
        fail(now);
        return false;
    }
    functions_ = *context_->reader->fn;
    pllm_connector::refuse_arrays(functions_);
    context_->reader->fn = &functions_;
    const auto setup = pllm_connector::setup_commands(server_);
    setup_replies_ = setup.size();
    const bool works = std::all_of(setup.begin(), setup.end(), [this](const auto &command) { return append(command); });
    if (!works) fail(now);
    return works;
}

bool Index::append(const std::vector<std::string> &arguments) {
    std::vector<const char *> data;
    std::vector<size_t> lens;
    for (const std::string &argument : arguments) {
        data.push_back(argument.data());
        lens.push_back(argument.size());
    }
    return redisAppendCommandArgv(context_.get(), static_cast<int>(data.size()), data.data(), lens.data()) == REDIS_OK;
}

// Returns false if the connection has been closed. The commands that have no reply are then FAILED.
bool Index::exchange(std::vector<Command> &commands, size_t first, size_t last, std::chrono::milliseconds timeout) {
    bool works = true;
    for (size_t i = first; i < last && works; i++) works = append(commands[i].arguments);
    auto deadline = Clock::now() + timeout;
    int is_sent = 0;
    for (size_t next = first; works && next < last;) {
        works = wait(is_sent == 0, deadline) && (is_sent != 0 || redisBufferWrite(context_.get(), &is_sent) == REDIS_OK);
        const size_t before = next;
        works = works && receive(commands, next, last);
        if (next > before) deadline = Clock::now() + timeout;
    }
    if (!works) fail(Clock::now());
    return works;
}

// Waits until the socket is readable, or writable if there is something to send. Returns false after the
// deadline, and if the store stops.
bool Index::wait(bool wants_to_send, Clock::time_point deadline) const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd descriptors[2] = {{context_->fd, static_cast<short>(POLLIN | (wants_to_send ? POLLOUT : 0)), 0}, {stop_.fd(), POLLIN, 0}};
    const int count = poll(descriptors, 2, static_cast<int>(left));
    if (count < 0) return errno == EINTR;
    return count > 0 && descriptors[1].revents == 0;
}

// Reads what has arrived, and processes complete replies. Returns false if the connection is broken, the
// server does not keep to the protocol, or it refuses the set-up.
bool Index::receive(std::vector<Command> &commands, size_t &next, size_t last) {
    if (redisBufferRead(context_.get()) != REDIS_OK) return false;
    for (;;) {
        void *object = nullptr;
        if (redisGetReplyFromReader(context_.get(), &object) != REDIS_OK) return false;
        if (!object) break;
        const pllm_connector::OwnedReply owner(object);
        const auto &reply = *static_cast<redisReply *>(object);
        if (setup_replies_ > 0) {
            if (reply.type != REDIS_REPLY_STATUS) return false;
            setup_replies_--;
            continue;
        }
        if (next == last) return false;
        if (!has_answered_) connections_++;
        has_answered_ = true;
        Then then;
        then.swap(commands[next++].then);
        if (then) then(reply_of(reply));
    }
    const redisReader *reader = context_->reader;
    return reader->len - reader->pos <= MAX_REPLY;
}

// Closes the connection.
void Index::fail(Clock::time_point now) {
    back_off_.fail(has_answered_, now);
    context_.reset();
}

}  // namespace pllm_nixl
