#include "connection.hpp"

#include <poll.h>

namespace pllm_valkey {
namespace {

constexpr size_t RECEIVE_BYTES = 256 << 10;
// Receives of one call, so that a fast server does not delay sends.
constexpr int MAX_RECEIVES = 32;
constexpr size_t MAX_PARTS = 64;
// A reply without a value is shorter.
constexpr uint64_t MAX_REPLY = 64 << 10;
constexpr std::string_view LINE_END = "\r\n";

void append_length(std::string &text, char type, uint64_t len) {
    text += type;
    text += std::to_string(len);
    text += LINE_END;
}

template <class Arguments>
void append_arguments(std::string &text, const Arguments &arguments, uint64_t value_len = 0) {
    append_length(text, '*', arguments.size() + (value_len > 0));
    for (const std::string_view argument : arguments) {
        append_length(text, '$', argument.size());
        text += argument;
        text += LINE_END;
    }
    if (value_len > 0) append_length(text, '$', value_len);
}

// Appends what is left of a part of an operation after the bytes that were sent.
void append_rest(std::vector<iovec> &out, const void *data, size_t len, uint64_t &sent) {
    const size_t skipped = std::min<uint64_t>(sent, len);
    sent -= skipped;
    if (len > skipped) out.push_back({const_cast<char *>(static_cast<const char *>(data)) + skipped, len - skipped});
}

uint64_t bytes_of(const Operation &operation) {
    return operation.text.size() + (operation.kind == Operation::PUT ? operation.len + LINE_END.size() : 0);
}

void append_rest_of(std::vector<iovec> &out, const Operation &operation) {
    uint64_t sent = operation.sent;
    append_rest(out, operation.text.data(), operation.text.size(), sent);
    if (operation.kind != Operation::PUT) return;
    for (const iovec &part : operation.parts) append_rest(out, part.iov_base, part.iov_len, sent);
    append_rest(out, LINE_END.data(), LINE_END.size(), sent);
}

}  // namespace

void Completions::expect() {
    ended.reserve(ended.size() + expected + 1);
    expected++;
}

void Completions::add(uint64_t token, uint32_t status, uint64_t bytes) noexcept {
    ended.push_back({token, bytes, status, 0});  // within the reserved memory
    expected--;
}

void append_command(std::string &text, std::initializer_list<std::string_view> arguments, uint64_t value_len) {
    append_arguments(text, arguments, value_len);
}

void Connection::connect(Clock::time_point now) {
    if (context_ && operations_.empty() && is_connected_ && pllm_connector::is_closed(fd())) reset();
    if (context_ || !back_off_.permits(now)) return;
    context_ = pllm_connector::open_connection(server_);
    is_connected_ = has_answered_ = false;
    last_progress_ = now;
    if (!context_) return fail(now);
    try {
        buffer_.resize(RECEIVE_BYTES);
        install_reader();
        add_setup();
    } catch (...) {
        fail(now);
        throw;
    }
}

// Values are received into the buffers of their operations.
void Connection::install_reader() {
    redisReader *reader = context_->reader;
    default_functions_ = functions_ = *reader->fn;
    functions_.createString = receive_string;
    pllm_connector::refuse_arrays(functions_);
    reader->fn = &functions_;
    reader->privdata = this;
    reader->maxbuf = 0;  // keeps the memory of the buffer
}

void *Connection::receive_string(const redisReadTask *task, char *text, size_t len) {
    auto &self = *static_cast<Connection *>(task->privdata);
    const bool is_value = task->type == REDIS_REPLY_STRING && !self.operations_.empty() && self.operations_.front().kind == Operation::GET;
    if (!is_value) return self.default_functions_.createString(task, text, len);
    self.received_ = len;
    const Operation &operation = self.operations_.front();
    if (len == operation.len) {
        for (const iovec &part : operation.parts) {
            std::memcpy(part.iov_base, text, part.iov_len);
            text += part.iov_len;
        }
    }
    char nothing = 0;
    return self.default_functions_.createString(task, &nothing, 0);
}

void Connection::add_setup() {
    Operation setup{Operation::SETUP};
    const auto commands = pllm_connector::setup_commands(server_);
    for (const auto &command : commands) append_arguments(setup.text, command);
    setup.replies = setup.missing_replies = commands.size();
    if (setup.replies > 0) operations_.push_back(std::move(setup));
}

bool Connection::start(Operation operation) {
    if (!context_) return false;
    if (operations_.empty()) last_progress_ = Clock::now();
    const bool is_expected = operation.kind != Operation::SETUP;
    if (is_expected) completions_.expect();
    try {
        operations_.push_back(std::move(operation));
    } catch (...) {
        completions_.expected--;
        throw;
    }
    return true;
}

short Connection::events() const {
    const bool wants_to_send = !is_connected_ || unsent_ < operations_.size();
    return static_cast<short>(POLLIN | (wants_to_send ? POLLOUT : 0));
}

Clock::time_point Connection::deadline() const {
    const bool waits = context_ && (!is_connected_ || !operations_.empty());
    return waits ? last_progress_ + server_.timeout : Clock::time_point::max();
}

void Connection::progress(Clock::time_point now) {
    if (!context_) return;
    const bool works = (is_connected_ || finish_connect()) && (!is_connected_ || (send(now) && receive(now)));
    if (!works || now >= deadline()) fail(now);
}

// Returns false if the attempt has failed.
bool Connection::finish_connect() {
    pollfd state = {fd(), POLLOUT, 0};
    if (poll(&state, 1, 0) == 0) return true;
    int error = 0;
    socklen_t len = sizeof error;
    if (getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &len) != 0 || error != 0) return false;
    is_connected_ = true;
    return true;
}

// Sends from the buffers of the operations. Returns false if the connection is broken.
bool Connection::send(Clock::time_point now) {
    std::vector<iovec> parts;
    while (unsent_ < operations_.size()) {
        parts.clear();
        for (size_t i = unsent_; i < operations_.size() && parts.size() < MAX_PARTS; i++) append_rest_of(parts, operations_[i]);
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = std::min<size_t>(parts.size(), MAX_PARTS);
        const ssize_t len = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (len < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
        last_progress_ = now;
        for (auto left = static_cast<uint64_t>(len); unsent_ < operations_.size();) {
            Operation &operation = operations_[unsent_];
            const uint64_t part = std::min(left, bytes_of(operation) - operation.sent);
            operation.sent += part;
            left -= part;
            if (operation.sent < bytes_of(operation)) break;
            unsent_++;
        }
    }
    return true;
}

// Receives and processes replies. Returns false if the connection is broken.
bool Connection::receive(Clock::time_point now) {
    for (int i = 0; i < MAX_RECEIVES; i++) {
        const ssize_t len = recv(fd(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
        if (len < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
        if (len == 0) return false;
        last_progress_ = now;
        redisReader *reader = context_->reader;
        if (redisReaderFeed(reader, buffer_.data(), static_cast<size_t>(len)) != REDIS_OK || !process_replies()) return false;
        // What is left is the beginning of one reply.
        const uint64_t value = operations_.empty() ? 0 : operations_.front().len;
        if (reader->len - reader->pos > value + MAX_REPLY) return false;
        if (static_cast<size_t>(len) < buffer_.size()) break;
    }
    return true;
}

bool Connection::process_replies() {
    for (;;) {
        void *object = nullptr;
        if (redisReaderGetReply(context_->reader, &object) != REDIS_OK) return false;
        if (!object) return true;
        const pllm_connector::OwnedReply owner(object);
        if (!process(*static_cast<redisReply *>(object))) return false;
    }
}

// Returns false if the server does not keep to the protocol, or refuses the set-up.
bool Connection::process(const redisReply &reply) {
    if (operations_.empty() || unsent_ == 0) return false;
    Operation &operation = operations_.front();
    const bool is_error = reply.type == REDIS_REPLY_ERROR;
    if (is_error && operation.kind == Operation::SETUP) return false;
    if (is_error) {
        operation.has_failed = true;
    } else if (!process_of(operation, reply)) {
        return false;
    }
    // A server that refuses the set-up has not answered.
    if (operation.kind != Operation::SETUP || operation.missing_replies == 1) has_answered_ = true;
    if (--operation.missing_replies > 0) return true;
    if (operation.has_failed) completions_.add(operation.token, PLLM_KV_FAILED);
    operations_.pop_front();
    unsent_--;
    return true;
}

bool Connection::process_of(Operation &operation, const redisReply &reply) {
    const bool is_last = operation.missing_replies == 1 && !operation.has_failed;
    switch (operation.kind) {
        case Operation::SETUP: return reply.type == REDIS_REPLY_STATUS;
        case Operation::EXISTS:
            if (reply.type != REDIS_REPLY_INTEGER) return false;
            operation.found[operation.replies - operation.missing_replies] = reply.integer > 0;
            if (is_last) completions_.add(operation.token, PLLM_KV_DONE);
            return true;
        case Operation::GET:
            // GETRANGE returns an empty value for a key that does not exist.
            if (reply.type != REDIS_REPLY_STRING) return false;
            completions_.add(operation.token, received_ == 0 ? PLLM_KV_MISSING : PLLM_KV_DONE, received_);
            return true;
        case Operation::PUT:
            if (reply.type != REDIS_REPLY_STATUS) return false;
            completions_.add(operation.token, PLLM_KV_DONE);
            return true;
        case Operation::REMOVE:
            if (reply.type != REDIS_REPLY_INTEGER) return false;
            completions_.add(operation.token, reply.integer > 0 ? PLLM_KV_DONE : PLLM_KV_MISSING);
            return true;
    }
    return false;
}

// Closes the connection and fails its operations.
void Connection::fail(Clock::time_point now) {
    back_off_.fail(has_answered_, now);
    reset();
}

void Connection::reset() noexcept {
    for (const Operation &operation : operations_)
        if (operation.kind != Operation::SETUP) completions_.add(operation.token, PLLM_KV_FAILED);
    operations_.clear();
    unsent_ = 0;
    context_.reset();
    is_connected_ = has_answered_ = false;
}

}  // namespace pllm_valkey
