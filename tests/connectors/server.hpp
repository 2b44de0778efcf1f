// A Valkey or Redis server for a test.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "contract.hpp"

// A port of the loopback device that is free now.
inline int free_port() {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof address;
    if (bind(fd, reinterpret_cast<sockaddr *>(&address), len) != 0) std::abort();
    getsockname(fd, reinterpret_cast<sockaddr *>(&address), &len);
    close(fd);
    return ntohs(address.sin_port);
}

class Server {
public:
    explicit Server(std::vector<std::string> options = {}) : options_(std::move(options)), port(free_port()) { start(); }
    ~Server() { stop(SIGKILL); }

    void start() {
        std::vector<std::string> arguments = {"",         "--port",      std::to_string(port), "--unixsocket", socket_path(), "--save", "",
                                              "--bind",   "127.0.0.1",   "--dir",              directory_.path.string(),
                                              "--logfile", directory_ / "log"};
        arguments.insert(arguments.end(), options_.begin(), options_.end());
        process_ = fork_child();
        if (process_ == 0) {
            for (const char *program : {"valkey-server", "redis-server"}) {
                std::vector<char *> pointers;
                arguments[0] = program;
                for (auto &argument : arguments) pointers.push_back(argument.data());
                pointers.push_back(nullptr);
                execvp(program, pointers.data());
            }
            _exit(127);
        }
        EXPECT_TRUE(becomes_true([&] { return connect() != nullptr; })) << "neither valkey-server nor redis-server runs";
    }

    void stop(int signal) {
        if (process_ > 0) {
            kill(process_, signal);
            waitpid(process_, nullptr, 0);
        }
        process_ = 0;
    }

    // SIGSTOP, SIGCONT.
    void send(int signal) const { kill(process_, signal); }

    std::string socket_path() const { return directory_ / "socket"; }

    // Executes a command with values of any bytes, and returns its reply as text.
    std::string execute(const std::vector<std::string> &command) const {
        const auto context = connect();
        if (!context) return "no connection";
        std::vector<const char *> pointers;
        std::vector<size_t> lens;
        for (const auto &argument : command) {
            pointers.push_back(argument.data());
            lens.push_back(argument.size());
        }
        auto *reply = static_cast<redisReply *>(
            redisCommandArgv(context.get(), static_cast<int>(command.size()), pointers.data(), lens.data()));
        if (!reply) return "no reply";
        const std::string text = reply->str ? std::string(reply->str, reply->len) : std::to_string(reply->integer);
        freeReplyObject(reply);
        return text;
    }

private:
    struct Free {
        void operator()(redisContext *context) const { redisFree(context); }
    };

    std::unique_ptr<redisContext, Free> connect() const {
        std::unique_ptr<redisContext, Free> context(redisConnectUnix(socket_path().c_str()));
        return context && context->err == 0 ? std::move(context) : nullptr;
    }

    TempDir directory_;
    std::vector<std::string> options_;
    pid_t process_ = 0;

public:
    const int port;
};
