// The store in a Valkey or Redis server.
#include "pagedllm_valkey.h"

#include <sys/resource.h>

#include <thread>

#include "server.hpp"

namespace {

using std::chrono::milliseconds;

using Change = std::function<void(pllm_valkey_store_options &)>;

// A store of the server's socket, or of its port.
pllm_kv_store open_store(const std::string &host, int port, const Change &change = {}) {
    pllm_valkey_store_options options;
    pllm_valkey_store_options_init(&options, sizeof options);
    options.host = host.c_str();
    options.port = static_cast<uint32_t>(port);
    if (change) change(options);
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    char error[500];
    if (pllm_valkey_store_open(&options, &store, error, sizeof error) != 0) ADD_FAILURE() << error;
    return store;
}

pllm_kv_store open_store(const Server &server, const Change &change = {}) { return open_store(server.socket_path(), server.port, change); }

std::string error_of(const Change &change) {
    pllm_valkey_store_options options;
    pllm_valkey_store_options_init(&options, sizeof options);
    change(options);
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    char error[500];
    const int32_t code = pllm_valkey_store_open(&options, &store, error, sizeof error);
    if (code == 0) store.close(store.user_data);
    return std::to_string(code) + ": " + error;
}

std::string name_of(uint64_t number) {
    std::string text = "pagedllm:kv:";
    char digits[3];
    for (const uint8_t byte : key_of(number)) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        text += digits;
    }
    return text;
}

bool puts_soon(Client &client, uint64_t number) {
    return becomes_true([&] { return client.put(key_of(number), value_of(number, 1000)).status == PLLM_KV_DONE; });
}

TEST(Valkey, random_operations_over_a_socket_have_the_results_of_a_map) {
    for (unsigned seed = 0; seed < 4; seed++) {
        Server server;
        Client client(open_store(server));
        // Operations of one round use two connections, but different keys.
        run_random_operations(client, seed, 60);
    }
}

TEST(Valkey, random_operations_over_tcp_have_the_results_of_a_map) {
    Server server;
    Client client(open_store("127.0.0.1", server.port));
    run_random_operations(client, 9, 100);
}

TEST(Valkey, names_begin_with_the_prefix_and_values_are_complete) {
    Server server;
    Client client(open_store(server));
    const Value value = value_of(1, 3'000'000);
    EXPECT_EQ(client.put(key_of(1), value).status, uint32_t{PLLM_KV_DONE});
    EXPECT_EQ(server.execute({"GET", name_of(1)}), std::string(value.begin(), value.end()));
    EXPECT_TRUE(client.holds(key_of(1), value));
    Client other(open_store(server, [](auto &o) { o.key_prefix = "other:"; }));
    EXPECT_FALSE(other.has(key_of(1)));
    Client another_database(open_store(server, [](auto &o) { o.database = 3; }));
    EXPECT_FALSE(another_database.has(key_of(1)));
    another_database.put(key_of(2), value);
    EXPECT_FALSE(client.has(key_of(2)));
}

TEST(Valkey, values_of_other_lengths_and_types_are_reported) {
    Server server;
    Client client(open_store(server));
    const auto set = [&](size_t len) { server.execute({"SET", name_of(1), std::string(len, 'x')}); };
    for (const size_t len : {1, 999, 1001}) {
        set(len);
        EXPECT_TRUE((client.get(key_of(1), 1000) == Result{PLLM_KV_DONE, len}));
    }
    // The end of a longer value is not read.
    set(1'000'000);
    EXPECT_TRUE((client.get(key_of(1), 1000) == Result{PLLM_KV_DONE, 1001}));
    set(0);
    EXPECT_EQ(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_MISSING});
    server.execute({"DEL", name_of(1)});
    server.execute({"LPUSH", name_of(1), "x"});
    EXPECT_EQ(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_FAILED});
    EXPECT_EQ(client.remove(key_of(1)).status, uint32_t{PLLM_KV_DONE});
    EXPECT_EQ(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_MISSING});
}

TEST(Valkey, a_value_expires_unless_it_is_looked_up) {
    Server server;
    Client client(open_store(server, [](auto &o) { o.ttl_seconds = 2; }));
    client.put(key_of(1), value_of(1, 1000));
    client.put(key_of(2), value_of(2, 1000));
    for (int i = 0; i < 5; i++) {
        std::this_thread::sleep_for(milliseconds(500));
        EXPECT_TRUE(client.has(key_of(1)));
    }
    EXPECT_FALSE(client.has(key_of(2)));
    EXPECT_TRUE(client.holds(key_of(1), value_of(1, 1000)));
}

TEST(Valkey, a_server_without_memory_fails_writes_only) {
    Server server({"--maxmemory", "3mb", "--maxmemory-policy", "noeviction"});
    Client client(open_store(server));
    EXPECT_EQ(client.put(key_of(1), value_of(1, 100'000)).status, uint32_t{PLLM_KV_DONE});
    uint32_t status = PLLM_KV_DONE;
    for (uint64_t number = 2; number < 100 && status == PLLM_KV_DONE; number++)
        status = client.put(key_of(number), value_of(number, 100'000)).status;
    EXPECT_EQ(status, uint32_t{PLLM_KV_FAILED});
    EXPECT_TRUE(client.holds(key_of(1), value_of(1, 100'000)));
}

TEST(Valkey, a_password_is_sent_and_a_wrong_one_fails_operations) {
    Server server({"--requirepass", "secret"});
    Client client(open_store(server, [](auto &o) { o.password = "secret"; o.database = 1; }));
    EXPECT_EQ(client.put(key_of(1), value_of(1, 1000)).status, uint32_t{PLLM_KV_DONE});
    EXPECT_TRUE(client.holds(key_of(1), value_of(1, 1000)));
    Client user(open_store(server, [](auto &o) { o.username = "default"; o.password = "secret"; o.database = 1; }));
    EXPECT_TRUE(user.has(key_of(1)));
    for (const char *password : {"wrong", static_cast<const char *>(nullptr)}) {
        Client stranger(open_store(server, [&](auto &o) { o.password = password; }));
        for (int i = 0; i < 3; i++) EXPECT_EQ(stranger.get(key_of(1), 1000).status, uint32_t{PLLM_KV_FAILED});
    }
}

TEST(Valkey, without_a_server_operations_fail_at_once_and_succeed_when_it_starts) {
    Server server;
    server.stop(SIGTERM);
    Client client(open_store(server));
    const auto begin = Clock::now();
    for (int i = 0; i < 100; i++) EXPECT_EQ(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_FAILED});
    EXPECT_LT(Clock::now() - begin, milliseconds(1000));
    server.start();
    EXPECT_TRUE(puts_soon(client, 1));
}

TEST(Valkey, operations_in_flight_fail_when_the_server_is_killed) {
    Server server;
    Client client(open_store(server));
    std::vector<uint64_t> tokens;
    client.put(key_of(0), value_of(0, 2'000'000));
    server.send(SIGSTOP);
    for (uint64_t number = 0; number < 32; number++) {
        tokens.push_back(client.start_put(key_of(number + 1), value_of(number, 1'000'000)));
        tokens.push_back(client.start_get(key_of(0), 2'000'000));
        tokens.push_back(client.start_exists({key_of(0), key_of(1)}));
    }
    for (int i = 0; i < 20; i++) client.poll();
    const auto begin = Clock::now();
    server.stop(SIGKILL);
    for (const uint64_t token : tokens) EXPECT_EQ(client.wait(token).status, uint32_t{PLLM_KV_FAILED});
    EXPECT_LT(Clock::now() - begin, milliseconds(1500));
    server.start();
    EXPECT_TRUE(puts_soon(client, 1));
}

TEST(Valkey, an_idle_connection_that_the_server_has_closed_costs_no_operation) {
    Server server;
    Client client(open_store(server));
    EXPECT_TRUE(puts_soon(client, 1));
    server.stop(SIGTERM);
    server.start();
    EXPECT_EQ(client.put(key_of(2), value_of(2, 1000)).status, uint32_t{PLLM_KV_DONE});
    EXPECT_FALSE(client.has(key_of(1)));
}

TEST(Valkey, operations_of_a_hanging_server_fail_after_the_timeout) {
    Server server;
    Client client(open_store(server, [](auto &o) { o.timeout_ms = 300; }));
    EXPECT_TRUE(puts_soon(client, 1));
    server.send(SIGSTOP);
    std::vector<uint64_t> tokens;
    for (uint64_t number = 0; number < 16; number++) {
        tokens.push_back(client.start_put(key_of(number + 2), value_of(number, 1'000'000)));
        tokens.push_back(client.start_get(key_of(1), 1000));
    }
    const auto begin = Clock::now();
    for (const uint64_t token : tokens) EXPECT_EQ(client.wait(token).status, uint32_t{PLLM_KV_FAILED});
    EXPECT_GT(Clock::now() - begin, milliseconds(200));
    EXPECT_LT(Clock::now() - begin, milliseconds(3000));
    server.send(SIGCONT);
    EXPECT_TRUE(puts_soon(client, 100));
    EXPECT_TRUE(becomes_true([&] { return client.holds(key_of(1), value_of(1, 1000)); }));
}

TEST(Valkey, close_does_not_wait_for_a_hanging_server) {
    Server server;
    Client client(open_store(server));
    EXPECT_TRUE(puts_soon(client, 1));
    server.send(SIGSTOP);
    for (uint64_t number = 0; number < 16; number++) {
        client.start_put(key_of(number), value_of(number, 1'000'000));
        client.start_get(key_of(1), 1000);
    }
    client.poll();
    const auto begin = Clock::now();
    client.close();
    EXPECT_LT(Clock::now() - begin, milliseconds(500));
    server.send(SIGCONT);
}

// A server that answers each connection with the same bytes.
class HostileServer {
public:
    explicit HostileServer(std::string answer) : answer_(std::move(answer)), listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t len = sizeof address;
        if (bind(listener_, reinterpret_cast<sockaddr *>(&address), len) != 0 || listen(listener_, 8) != 0) std::abort();
        getsockname(listener_, reinterpret_cast<sockaddr *>(&address), &len);
        port = ntohs(address.sin_port);
        thread_ = std::thread([this] { run(); });
    }
    ~HostileServer() {
        shutdown(listener_, SHUT_RDWR);
        thread_.join();
        close(listener_);
    }
    int port = 0;

private:
    void run() {
        for (int fd; (fd = accept(listener_, nullptr, nullptr)) >= 0; close(fd)) {
            char bytes[1 << 16];
            if (recv(fd, bytes, sizeof bytes, 0) <= 0) continue;
            for (size_t sent = 0; sent < answer_.size();) {
                const ssize_t len = send(fd, answer_.data() + sent, answer_.size() - sent, MSG_NOSIGNAL);
                if (len <= 0) break;
                sent += static_cast<size_t>(len);
            }
        }
    }
    const std::string answer_;
    const int listener_;
    std::thread thread_;
};

TEST(Valkey, answers_of_a_hostile_server_are_failures) {
    std::vector<std::string> answers = {"",
                                        "HTTP/1.1 400 Bad Request\r\n\r\n",
                                        "$-5\r\n",
                                        "$99999999999999999999999\r\n",
                                        "*1000000000\r\n",
                                        "*2\r\n$1\r\nx\r\n$1\r\ny\r\n",
                                        ":1\r\n:1\r\n:1\r\n:1\r\n",
                                        "+OK\r\n+OK\r\n+OK\r\n",
                                        "$1000\r\n" + std::string(500, 'x'),
                                        "$900000000\r\n" + std::string(50'000'000, 'x'),
                                        "-" + std::string(50'000'000, 'x')};
    std::mt19937 random(1);
    for (int i = 0; i < 30; i++) {
        std::string answer(random() % 300, ' ');
        for (auto &byte : answer) byte = "$*:+-\r\n0123456789x"[random() % 18];
        answers.push_back(answer);
    }
    for (const auto &answer : answers) {
        HostileServer server(answer);
        Client client(open_store("127.0.0.1", server.port, [](auto &o) { o.timeout_ms = 200; }));
        const uint64_t get = client.start_get(key_of(1), 1000), put = client.start_put(key_of(2), Value(100'000));
        const uint64_t exists = client.start_exists({key_of(1), key_of(2)}), remove = client.start_remove(key_of(1));
        const std::string shown = answer.substr(0, 40);
        EXPECT_NE(client.wait(get).status, uint32_t{PLLM_KV_DONE}) << shown;
        for (const uint64_t token : {put, exists, remove}) client.wait(token);
        EXPECT_NE(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_DONE}) << shown;
    }
    // The answers themselves have 150 MB with the copy of one. Sanitizers use several times as
    // much.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    EXPECT_LT(usage.ru_maxrss, 400'000) << "KiB";
#endif
}

TEST(Valkey, wrong_options_are_refused) {
    const std::string long_text(5000, 'x'), long_path = "/" + std::string(107, 'x');
    EXPECT_EQ(error_of([](auto &o) { o.port = 0; }), "1: port is 0; must be 1 to 65535");
    EXPECT_EQ(error_of([](auto &o) { o.port = 65536; }), "1: port is 65536; must be 1 to 65535");
    EXPECT_EQ(error_of([](auto &o) { o.host = ""; }), "1: host is empty or contains a NUL byte; set it to a name, an address or a path");
    EXPECT_EQ(error_of([&](auto &o) { o.host = long_path.c_str(); }),
              "1: host is too long for the path of a socket (108, limit 107 bytes); use a shorter path");
    EXPECT_EQ(error_of([&](auto &o) { o.key_prefix = long_text.c_str(); }), "1: key_prefix is too long (limit 256 bytes); shorten it");
    EXPECT_EQ(error_of([](auto &o) { o.username = "x"; }), "1: username is set and password is NULL; set both");
    EXPECT_EQ(error_of([](auto &o) { o.database = UINT32_MAX; }), "1: database is 4294967295; must be at most 2147483647");
    EXPECT_EQ(error_of([](auto &o) { o.ttl_seconds = UINT64_MAX; }), "1: ttl_seconds is 18446744073709551615; must be at most 31536000");
    EXPECT_EQ(error_of([](auto &o) { o.timeout_ms = UINT32_MAX; }), "1: timeout_ms is 4294967295; must be at most 3600000");
    EXPECT_EQ(error_of([](auto &o) { o.reserved = 1; }), "1: reserved is 1; must be 0");
    EXPECT_EQ(error_of([](auto &o) { o.struct_size = 8; }).substr(0, 3), "1: ");
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    EXPECT_EQ(pllm_valkey_store_open(nullptr, &store, nullptr, 0), PLLM_E_INVALID_ARGUMENT);
}

TEST(Valkey, a_host_name_that_does_not_exist_costs_operations) {
    Client client(open_store("no-such-host.invalid", 6379));
    EXPECT_EQ(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_FAILED});
}

}  // namespace
