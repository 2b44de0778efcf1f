#include "index.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace pllm_nixl {
namespace {

// Commands that are sent before their replies are read.
constexpr size_t MAX_PIPELINE = 512;
// A reply is shorter: the longest one is the metadata of an agent.
constexpr size_t MAX_REPLY = 1 << 20;
constexpr std::chrono::milliseconds MIN_BACK_OFF{100}, MAX_BACK_OFF{10000};

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
        // The server may have closed an idle connection.
        char byte;
        const ssize_t len = recv(context_->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (len < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
        context_.reset();
    }
    if (now < next_attempt_) return false;
    const bool is_path = server_.host[0] == '/';
    context_.reset(is_path ? redisConnectUnixNonBlock(server_.host.c_str()) : redisConnectNonBlock(server_.host.c_str(), server_.port));
    has_answered_ = false;
    setup_replies_ = 0;
    if (!context_ || context_->err != 0) {
        fail(now);
        return false;
    }
    fcntl(context_->fd, F_SETFD, FD_CLOEXEC);
    const int on = 1;
    if (!is_path) setsockopt(context_->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    limit_replies();
    bool works = true;
    if (server_.has_password) {
        works = append(server_.username.empty() ? std::vector<std::string>{"AUTH", server_.password}
                                                : std::vector<std::string>{"AUTH", server_.username, server_.password});
        setup_replies_++;
    }
    if (server_.database != 0) {
        works = works && append({"SELECT", std::to_string(server_.database)});
        setup_replies_++;
    }
    if (!works) fail(now);
    return works;
}

// No command has an array as its reply, and a hostile server could make one large.
void Index::limit_replies() {
    functions_ = *context_->reader->fn;
    functions_.createArray = [](const redisReadTask *, auto) -> void * { return nullptr; };
    context_->reader->fn = &functions_;
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
    struct FreeReply {
        void operator()(void *reply) const { freeReplyObject(reply); }
    };
    if (redisBufferRead(context_.get()) != REDIS_OK) return false;
    for (;;) {
        void *object = nullptr;
        if (redisGetReplyFromReader(context_.get(), &object) != REDIS_OK) return false;
        if (!object) break;
        const std::unique_ptr<void, FreeReply> owner(object);
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

// Closes the connection. If the server has answered on it, the next command connects at once, otherwise
// after a pause that doubles.
void Index::fail(Clock::time_point now) {
    back_off_ = has_answered_ ? std::chrono::milliseconds(0) : std::clamp(2 * back_off_, MIN_BACK_OFF, MAX_BACK_OFF);
    next_attempt_ = now + back_off_;
    context_.reset();
}

}  // namespace pllm_nixl
