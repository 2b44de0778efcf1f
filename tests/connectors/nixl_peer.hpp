// A store in another process, which a test commands by pipes.
#pragma once

#include "pagedllm_nixl.h"

#include <cstring>
#include <iostream>
#include <sstream>

#include "server.hpp"

using Change = std::function<void(pllm_nixl_store_options &)>;

inline pllm_nixl_store_options options_for_tests() {
    pllm_nixl_store_options options;
    pllm_nixl_store_options_init(&options, sizeof options);
    options.library = std::getenv("NIXL_LIBRARY");  // set by run.sh
    options.max_bytes = 64 << 20;
    options.staging_bytes = 16 << 20;
    options.lease_ms = 600;
    return options;
}

inline pllm_kv_store open_store(const std::string &host, int port = 6379, const Change &change = {}) {
    auto options = options_for_tests();
    options.host = host.c_str();
    options.port = static_cast<uint32_t>(port);
    if (change) change(options);
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    char error[500];
    if (pllm_nixl_store_open(&options, &store, error, sizeof error) != 0) {
        std::cerr << error << std::endl;
        std::abort();
    }
    return store;
}

inline pllm_kv_store open_store(const Server &server, const Change &change = {}) {
    return open_store(server.socket_path(), server.port, change);
}

// Executes the commands of the other process: put, get and has with a number and a length. The values
// are those of value_of. Prints one line for each.
inline int run_peer(const char *host) {
    Client client(open_store(host));
    std::cout << "ready" << std::endl;
    for (std::string command; std::getline(std::cin, command);) {
        std::istringstream words(command);
        std::string verb;
        uint64_t number = 0;
        size_t len = 0;
        words >> verb >> number >> len;
        const Key key = key_of(number);
        if (verb == "put") {
            std::cout << client.put(key, value_of(number, len)).status;
        } else if (verb == "get") {
            const Result result = client.get(key, len);
            const bool is_equal = client.last_value == value_of(number, len);
            std::cout << (result.status == PLLM_KV_DONE && !is_equal ? "damaged" : std::to_string(result.status));
        } else if (verb == "remove") {
            std::cout << client.remove(key).status;
        } else {
            std::cout << client.has(key);
        }
        std::cout << std::endl;
    }
    return 0;
}

class Peer {
public:
    explicit Peer(const Server &server) {
        int to[2], from[2];
        if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) std::abort();
        const std::string host = server.socket_path();
        process_ = fork_child();
        if (process_ == 0) {
            dup2(to[0], 0);
            dup2(from[1], 1);
            execl("/proc/self/exe", "nixl_test", "peer", host.c_str(), nullptr);
            _exit(127);
        }
        close(to[0]);
        close(from[1]);
        to_ = to[1];
        from_ = fdopen(from[0], "r");
        EXPECT_EQ(answer(), "ready");
    }
    Peer(const Peer &) = delete;
    Peer &operator=(const Peer &) = delete;
    ~Peer() {
        end(SIGKILL);
        std::fclose(from_);
    }

    // Executes a command, and returns its answer.
    std::string execute(const std::string &command) const {
        const std::string line = command + "\n";
        if (write(to_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return "no process";
        return answer();
    }

    std::string put(uint64_t number, size_t len) const { return execute("put " + std::to_string(number) + " " + std::to_string(len)); }
    std::string get(uint64_t number, size_t len) const { return execute("get " + std::to_string(number) + " " + std::to_string(len)); }

    void send(int signal) const { kill(process_, signal); }

    // Ends the process: by a signal, or with 0 by the end of its input, so that it closes its store.
    int end(int signal) {
        if (process_ == 0) return 0;
        if (signal != 0) kill(process_, signal);
        close(to_);
        int status = 0;
        waitpid(process_, &status, 0);
        process_ = 0;
        return status;
    }

private:
    std::string answer() const {
        char line[100];
        if (!std::fgets(line, sizeof line, from_)) return "no answer";
        return std::string(line, std::strlen(line) - 1);
    }

    pid_t process_ = 0;
    int to_ = -1;
    std::FILE *from_ = nullptr;
};
