// A Valkey or Redis server: its options, and what connections to it share.
#pragma once

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <vector>

#include "connector.hpp"

namespace pllm_connector {

using Clock = std::chrono::steady_clock;

constexpr size_t MAX_TEXT = 4096, MAX_SOCKET_PATH = 107;
constexpr uint32_t DEFAULT_SERVER_TIMEOUT = 2000;

struct Server {
    std::string host;  // or the path of a Unix socket
    int port;
    std::string username, password;
    bool has_password;
    uint32_t database;
    std::chrono::milliseconds timeout;
};

// Reads and checks the fields of options that name a server, except for the limits of database and
// timeout_ms.
template <class Options>
Server read_server(const Options &options) {
    const auto refuse = [](const std::string &text) { throw Error{PLLM_E_INVALID_ARGUMENT, text}; };
    const std::string host = read_text(options.host, options.host_len, "host", MAX_TEXT);
    if (host.empty() || host.find('\0') != std::string::npos)
        refuse("host is empty or contains a NUL byte; set it to a name, an address or a path");
    if (host[0] == '/' && host.size() > MAX_SOCKET_PATH)
        refuse("host is too long for the path of a socket (" + std::to_string(host.size()) + ", limit " + std::to_string(MAX_SOCKET_PATH) +
               " bytes); use a shorter path");
    if (options.port == 0 || options.port > 65535) refuse("port is " + std::to_string(options.port) + "; must be 1 to 65535");
    if (options.username && !options.password) refuse("username is set and password is NULL; set both");
    const uint32_t timeout = options.timeout_ms > 0 ? options.timeout_ms : DEFAULT_SERVER_TIMEOUT;
    return {host, static_cast<int>(options.port), read_text(options.username, options.username_len, "username", MAX_TEXT),
            read_text(options.password, options.password_len, "password", MAX_TEXT), options.password != nullptr, options.database,
            std::chrono::milliseconds(timeout)};
}

struct FreeContext {
    void operator()(redisContext *context) const { redisFree(context); }
};
using Context = std::unique_ptr<redisContext, FreeContext>;

struct FreeReply {
    void operator()(void *reply) const { freeReplyObject(reply); }
};
using OwnedReply = std::unique_ptr<void, FreeReply>;

// Starts to connect without waiting. Returns null if this fails at once.
inline Context open_connection(const Server &server) {
    const bool is_path = server.host[0] == '/';
    Context context(is_path ? redisConnectUnixNonBlock(server.host.c_str()) : redisConnectNonBlock(server.host.c_str(), server.port));
    if (!context || context->err != 0) return nullptr;
    fcntl(context->fd, F_SETFD, FD_CLOEXEC);
    const int on = 1;
    if (!is_path) setsockopt(context->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return context;
}

// Returns whether the server has closed an idle connection, or has sent something unexpected.
inline bool is_closed(int fd) {
    char byte;
    const ssize_t len = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return len >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

// The commands that authenticate a connection and select its database.
inline std::vector<std::vector<std::string>> setup_commands(const Server &server) {
    std::vector<std::vector<std::string>> commands;
    if (server.has_password) {
        commands.push_back({"AUTH"});
        if (!server.username.empty()) commands.back().push_back(server.username);
        commands.back().push_back(server.password);
    }
    if (server.database != 0) commands.push_back({"SELECT", std::to_string(server.database)});
    return commands;
}

// No command of the stores has an array as its reply, and a hostile server could make one large.
inline void refuse_arrays(redisReplyObjectFunctions &functions) {
    functions.createArray = [](const redisReadTask *, auto) -> void * { return nullptr; };
}

// The pauses between attempts to connect. If the server has answered on the last connection, the next
// attempt follows at once, otherwise after a pause that doubles.
class BackOff {
public:
    bool permits(Clock::time_point now) const { return now >= next_attempt_; }

    void fail(bool has_answered, Clock::time_point now) {
        pause_ = has_answered ? std::chrono::milliseconds(0) : std::clamp(2 * pause_, MIN, MAX);
        next_attempt_ = now + pause_;
    }

private:
    static constexpr std::chrono::milliseconds MIN{100}, MAX{10000};
    Clock::time_point next_attempt_ = Clock::time_point::min();
    std::chrono::milliseconds pause_{0};
};

}  // namespace pllm_connector
