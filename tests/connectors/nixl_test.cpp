// The store whose values move by NIXL.
#include "pagedllm_nixl.h"

#include <ctime>
#include <thread>

#include "nixl_peer.hpp"

namespace {

using std::chrono::milliseconds;

constexpr uint32_t DONE = PLLM_KV_DONE, MISSING = PLLM_KV_MISSING, FAILED = PLLM_KV_FAILED;
constexpr size_t LEN = 1000, LARGE = 3'000'000;
// The lease of options_for_tests, and the time after which a peer looks it up again.
constexpr milliseconds LEASE_ENDS{600 + 200 + 100};

std::string error_of(const Change &change) {
    auto options = options_for_tests();
    change(options);
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    char error[500];
    const int32_t code = pllm_nixl_store_open(&options, &store, error, sizeof error);
    if (code == 0) store.close(store.user_data);
    return std::to_string(code) + ": " + error;
}

std::string name_of(uint64_t number) {
    std::string text = "pagedllm:nixl:";
    char digits[3];
    for (const uint8_t byte : key_of(number)) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        text += digits;
    }
    return text;
}

uint32_t put(Client &client, uint64_t number, size_t len = LEN) { return client.put(key_of(number), value_of(number, len)).status; }
bool holds(Client &client, uint64_t number, size_t len = LEN) { return client.holds(key_of(number), value_of(number, len)); }
uint32_t status_of_get(Client &client, uint64_t number, size_t len = LEN) { return client.get(key_of(number), len).status; }

TEST(Nixl, random_operations_have_the_results_of_a_map) {
    Server server;
    for (unsigned seed = 0; seed < 2; seed++) {
        const std::string prefix = "random" + std::to_string(seed);
        Client client(open_store(server, [&](auto &o) { o.key_prefix = prefix.c_str(); }));
        run_random_operations(client, seed, 60);
    }
    Client client(open_store("127.0.0.1", server.port));
    run_random_operations(client, 9, 60);
}

TEST(Nixl, two_processes_exchange_values_both_ways) {
    Server server;
    Client client(open_store(server));
    Peer peer(server);
    const std::vector<size_t> lens = {1, 63, 64, 65, LEN, 100'000, LARGE};
    for (size_t i = 0; i < lens.size(); i++) {
        EXPECT_EQ(put(client, i, lens[i]), DONE);
        EXPECT_EQ(peer.put(100 + i, lens[i]), "0");
    }
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < lens.size(); i++) {
            EXPECT_EQ(peer.get(i, lens[i]), "0") << lens[i];
            EXPECT_TRUE(holds(client, 100 + i, lens[i])) << lens[i];
        }
    }
    EXPECT_EQ(client.wait(client.start_exists({key_of(100), key_of(1), key_of(9), key_of(106)})).status, DONE);
    EXPECT_EQ(client.last_found, (std::vector<uint8_t>{1, 1, 0, 1}));
    EXPECT_EQ(peer.execute("has 0"), "1");
    EXPECT_EQ(peer.execute("has 9"), "0");
    EXPECT_EQ(peer.get(9, LEN), std::to_string(MISSING));
    // Only the owner removes a value.
    EXPECT_EQ(peer.execute("remove 0"), std::to_string(MISSING));
    EXPECT_EQ(peer.execute("has 0"), "1");
    EXPECT_EQ(client.remove(key_of(0)).status, DONE);
    EXPECT_EQ(peer.execute("has 0"), "0");
}

TEST(Nixl, many_reads_wait_for_staging_memory) {
    Server server;
    Peer peer(server);
    for (uint64_t number = 0; number < 16; number++) EXPECT_EQ(peer.put(number, 400'000), "0");
    EXPECT_EQ(peer.put(16, 2'000'000), "0");
    Client client(open_store(server, [](auto &o) { o.staging_bytes = 1 << 20; }));
    std::vector<uint64_t> tokens;
    for (uint64_t number = 0; number < 16; number++) tokens.push_back(client.start_get(key_of(number), 400'000, 3));
    for (uint64_t number = 0; number < 16; number++) {
        EXPECT_TRUE((client.wait(tokens[number]) == Result{DONE, 400'000}));
        EXPECT_TRUE(client.last_value == value_of(number, 400'000)) << number;
    }
    EXPECT_EQ(status_of_get(client, 16, 2'000'000), FAILED) << "the value is longer than the staging memory";
}

TEST(Nixl, values_of_other_lengths_are_reported) {
    Server server;
    Client owner(open_store(server)), reader(open_store(server));
    put(owner, 1);
    for (Client *client : {&owner, &reader}) {
        EXPECT_TRUE((client->get(key_of(1), LEN - 1) == Result{DONE, LEN}));
        EXPECT_TRUE((client->get(key_of(1), 10 * LEN) == Result{DONE, LEN}));
        EXPECT_TRUE(holds(*client, 1));
    }
}

TEST(Nixl, a_killed_process_costs_its_values_only) {
    Server server;
    Client client(open_store(server));
    Peer peer(server), survivor(server);
    for (uint64_t number = 0; number < 20; number++) EXPECT_EQ(peer.put(number, LARGE), "0");
    EXPECT_EQ(survivor.put(100, LARGE), "0");
    EXPECT_TRUE(holds(client, 0, LARGE));
    std::vector<uint64_t> tokens;
    for (uint64_t number = 0; number < 10; number++) tokens.push_back(client.start_get(key_of(number), LARGE));
    client.poll();
    const auto begin = Clock::now();
    peer.end(SIGKILL);
    for (const uint64_t token : tokens) {
        const uint32_t status = client.wait(token).status;
        EXPECT_TRUE(status == DONE || status == MISSING) << status;
    }
    EXPECT_EQ(status_of_get(client, 11, LARGE), MISSING);
    EXPECT_LT(Clock::now() - begin, milliseconds(5000));
    EXPECT_TRUE(holds(client, 100, LARGE));
    std::this_thread::sleep_for(LEASE_ENDS);
    EXPECT_FALSE(client.has(key_of(12)));
    EXPECT_EQ(status_of_get(client, 12, LARGE), MISSING);
    // The entry was removed.
    EXPECT_TRUE(becomes_true([&] { return server.execute({"EXISTS", name_of(12)}) == "0"; }));
    EXPECT_EQ(survivor.get(13, LARGE), std::to_string(MISSING));
    EXPECT_EQ(put(client, 14), DONE);
    EXPECT_EQ(survivor.get(14, LEN), "0");
}

TEST(Nixl, reads_from_a_process_that_hangs_are_given_up) {
    Server server;
    Client client(open_store(server, [](auto &o) { o.timeout_ms = 500; }));
    Peer peer(server);
    for (uint64_t number = 0; number < 8; number++) EXPECT_EQ(peer.put(number, LARGE), "0");
    // The first transfer also connects.
    EXPECT_TRUE(becomes_true([&] { return holds(client, 0, LARGE); }));
    peer.send(SIGSTOP);
    std::vector<uint64_t> tokens;
    for (uint64_t number = 0; number < 8; number++) tokens.push_back(client.start_get(key_of(number), LARGE));
    const auto begin = Clock::now();
    for (const uint64_t token : tokens) EXPECT_EQ(client.wait(token).status, MISSING);
    EXPECT_LT(Clock::now() - begin, milliseconds(3000));
    std::this_thread::sleep_for(LEASE_ENDS);
    EXPECT_FALSE(client.has(key_of(1)));
    // Its values come back, although the reader has removed entries in the meantime.
    peer.send(SIGCONT);
    EXPECT_TRUE(becomes_true([&] { return holds(client, 1, LARGE) && holds(client, 2, LARGE); }));
}

TEST(Nixl, the_values_of_a_closed_store_are_absent_at_once) {
    Server server;
    Client client(open_store(server, [](auto &o) { o.lease_ms = 100; }));
    Peer peer(server);
    EXPECT_EQ(peer.put(1, LEN), "0");
    EXPECT_TRUE(holds(client, 1));
    EXPECT_EQ(peer.end(0), 0);
    EXPECT_EQ(status_of_get(client, 1), MISSING);
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_FALSE(client.has(key_of(1)));
    EXPECT_EQ(server.execute({"KEYS", "*agent*"}).size(), 1u) << "only the lease of the client";
}

TEST(Nixl, the_oldest_values_are_evicted) {
    Server server;
    Client owner(open_store(server, [](auto &o) { o.max_bytes = 1 << 20; })), reader(open_store(server));
    for (uint64_t number = 0; number < 100; number++) EXPECT_EQ(put(owner, number, 50'000 + number % 7 * 1000), DONE);
    uint64_t held = 0;
    for (uint64_t number = 0; number < 100; number++) {
        const size_t len = 50'000 + number % 7 * 1000;
        // The reader first: the owner would remove an entry that is left.
        const bool is_found = reader.has(key_of(number)), is_held = owner.has(key_of(number));
        held += is_held;
        EXPECT_EQ(is_found, is_held) << number;
        EXPECT_EQ(holds(owner, number, len), is_held) << number;
        EXPECT_EQ(holds(reader, number, len), is_held) << number;
        EXPECT_TRUE(is_held || number < 85) << number;
    }
    EXPECT_GE(held, 15u);
    EXPECT_LE(held, 20u);
    EXPECT_EQ(put(owner, 200, 2'000'000), FAILED) << "the value is longer than the pool";
    EXPECT_TRUE(holds(owner, 99, 50'000 + 99 % 7 * 1000));
}

TEST(Nixl, a_value_that_has_been_overwritten_is_missing) {
    Server server;
    Client owner(open_store(server, [](auto &o) { o.max_bytes = 1 << 20; })), reader(open_store(server));
    put(owner, 1, 500'000);
    const std::string entry = server.execute({"GET", name_of(1)});
    EXPECT_TRUE(holds(reader, 1, 500'000));
    for (uint64_t number = 2; number < 6; number++) put(owner, number, 500'000);
    EXPECT_EQ(server.execute({"EXISTS", name_of(1)}), "0");
    server.execute({"SET", name_of(1), entry});
    EXPECT_EQ(status_of_get(reader, 1, 500'000), MISSING);
    EXPECT_TRUE(becomes_true([&] { return server.execute({"EXISTS", name_of(1)}) == "0"; }));
    // The owner does not believe the index either.
    server.execute({"SET", name_of(1), entry});
    EXPECT_EQ(status_of_get(owner, 1, 500'000), MISSING);
    EXPECT_TRUE(holds(reader, 5, 500'000));
}

TEST(Nixl, damaged_entries_of_the_index_are_failures_or_misses) {
    Server server;
    Client owner(open_store(server)), reader(open_store(server));
    put(owner, 1);
    const std::string entry = server.execute({"GET", name_of(1)});
    const auto status_with = [&](const std::string &text) {
        server.execute({"SET", name_of(2), text});
        return status_of_get(reader, 2);
    };
    for (const std::string &text : {std::string(), std::string("x"), std::string(1'000'000, '1'), "2" + entry.substr(1), entry + " 1"})
        EXPECT_EQ(status_with(text), FAILED) << text.substr(0, 200);
    EXPECT_EQ(status_with(entry), MISSING) << "the value of another key";
    EXPECT_EQ(status_with("1 " + std::string(32, '0') + entry.substr(34)), MISSING) << "an unknown agent";
    EXPECT_EQ(status_with(entry.substr(0, 35) + "1000 3e8 1"), MISSING) << "an address outside of the memory";
    EXPECT_EQ(status_with(entry.substr(0, 35) + "fffffffffffffff0 3e8 1"), MISSING) << "an address that overflows";
    server.execute({"DEL", name_of(2)});
    server.execute({"LPUSH", name_of(2), "x"});
    EXPECT_EQ(status_of_get(reader, 2), FAILED);
    EXPECT_TRUE(becomes_true([&] { return holds(reader, 1); }));
}

TEST(Nixl, without_an_index_operations_fail_at_once_and_values_return_with_it) {
    Server server;
    server.stop(SIGTERM);
    Client client(open_store(server)), reader(open_store(server));
    const auto begin = Clock::now();
    for (uint64_t i = 0; i < 50; i++) {
        EXPECT_EQ(put(client, i), FAILED);
        EXPECT_EQ(status_of_get(client, 100), FAILED);
        EXPECT_EQ(client.wait(client.start_exists({key_of(100)})).status, FAILED);
    }
    EXPECT_LT(Clock::now() - begin, milliseconds(1500));
    server.start();
    // Announced later, although the writes have failed.
    EXPECT_TRUE(becomes_true([&] { return holds(reader, 49); }));
    // The server has lost its data.
    server.stop(SIGKILL);
    server.start();
    for (const uint64_t number : {0, 20, 49}) EXPECT_TRUE(becomes_true([&] { return holds(reader, number); }));
}

TEST(Nixl, an_index_that_hangs_fails_operations_after_the_timeout) {
    Server server;
    const auto options = [](auto &o) { o.timeout_ms = 300; };
    Client client(open_store(server, options));
    EXPECT_EQ(put(client, 1), DONE);
    server.send(SIGSTOP);
    const auto begin = Clock::now();
    EXPECT_EQ(status_of_get(client, 2), FAILED);
    EXPECT_EQ(put(client, 3), FAILED);
    EXPECT_LT(Clock::now() - begin, milliseconds(2000));
    EXPECT_TRUE(holds(client, 1)) << "own values need no index";
    server.send(SIGCONT);
    EXPECT_TRUE(becomes_true([&] { return put(client, 4) == DONE; }));
}

TEST(Nixl, a_store_without_operations_uses_little_cpu) {
    Server server;
    Peer peer(server);
    Client client(open_store(server));
    ASSERT_EQ(peer.put(1, 1000), "0");
    EXPECT_TRUE(client.holds(key_of(1), value_of(1, 1000)));
    const auto cpu_seconds = [] { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; };
    const double before = cpu_seconds();
    usleep(1'000'000);
    EXPECT_LT(cpu_seconds() - before, 0.2);
}

TEST(Nixl, close_does_not_wait_for_an_index_or_a_process_that_hangs) {
    Server server;
    Client client(open_store(server));
    Peer peer(server);
    EXPECT_EQ(peer.put(1, LARGE), "0");
    EXPECT_TRUE(holds(client, 1, LARGE));
    peer.send(SIGSTOP);
    client.start_get(key_of(1), LARGE);
    std::this_thread::sleep_for(milliseconds(100));
    server.send(SIGSTOP);
    for (uint64_t number = 2; number < 8; number++) client.start_get(key_of(number), LARGE);
    std::this_thread::sleep_for(milliseconds(100));
    const auto begin = Clock::now();
    client.close();
    EXPECT_LT(Clock::now() - begin, milliseconds(1500));
    server.send(SIGCONT);
    peer.send(SIGCONT);
}

TEST(Nixl, operations_in_flight_are_bounded) {
    Server server;
    Client client(open_store(server));
    server.send(SIGSTOP);
    uint64_t refused = 0;
    for (uint64_t number = 0; number < 5000; number++) refused += client.start_get(key_of(number), 10, 1) == REFUSED;
    EXPECT_GT(refused, 0u);
    server.send(SIGCONT);
}

TEST(Nixl, a_password_and_a_database_are_used) {
    Server server({"--requirepass", "secret"});
    const auto with_password = [](auto &o) { o.password = "secret"; o.database = 1; };
    Client client(open_store(server, with_password)), reader(open_store(server, with_password));
    EXPECT_EQ(put(client, 1), DONE);
    EXPECT_TRUE(holds(reader, 1));
    Client stranger(open_store(server, [](auto &o) { o.password = "wrong"; }));
    for (int i = 0; i < 3; i++) EXPECT_EQ(status_of_get(stranger, 1), FAILED);
}

TEST(NixlWithoutLibrary, a_missing_library_is_an_error) {
    EXPECT_EQ(error_of([](auto &o) { o.library = "/nowhere/libnixl_capi.so"; }),
              "5: NIXL cannot be loaded (/nowhere/libnixl_capi.so: cannot open shared object file: No such file or directory); install "
              "NIXL, and set library to the path of its libnixl_capi.so");
    EXPECT_EQ(error_of([](auto &o) { o.library = "libhiredis.so"; }),
              "5: libhiredis.so is no C API of NIXL, or an old one (nixl_capi_create_agent is missing); install NIXL 1.x");
}

TEST(Nixl, a_missing_backend_is_an_error) {
    EXPECT_EQ(error_of([](auto &o) { o.backend = "NOTHING"; }),
              "5: backend is NOTHING, which NIXL cannot load; set NIXL_PLUGIN_DIR to the folder of its plugins");
}

TEST(NixlWithoutLibrary, wrong_options_are_refused) {
    const std::string long_text(5000, 'x'), long_path = "/" + std::string(107, 'x');
    EXPECT_EQ(error_of([](auto &o) { o.port = 0; }), "1: port is 0; must be 1 to 65535");
    EXPECT_EQ(error_of([](auto &o) { o.host = ""; }), "1: host is empty or contains a NUL byte; set it to a name, an address or a path");
    EXPECT_EQ(error_of([&](auto &o) { o.host = long_path.c_str(); }),
              "1: host is too long for the path of a socket (108, limit 107 bytes); use a shorter path");
    EXPECT_EQ(error_of([&](auto &o) { o.key_prefix = long_text.c_str(); }), "1: key_prefix is too long (limit 256 bytes); shorten it");
    EXPECT_EQ(error_of([](auto &o) { o.username = "x"; }), "1: username is set and password is NULL; set both");
    EXPECT_EQ(error_of([](auto &o) { o.max_bytes = 1000; }), "1: max_bytes is 1000; must be 1048576 to 70368744177664");
    EXPECT_EQ(error_of([](auto &o) { o.staging_bytes = 0; }), "1: staging_bytes is 0; must be 1048576 to 70368744177664");
    EXPECT_EQ(error_of([](auto &o) { o.database = UINT32_MAX; }), "1: database is 4294967295; must be 0 to 2147483647");
    EXPECT_EQ(error_of([](auto &o) { o.timeout_ms = UINT32_MAX; }), "1: timeout_ms is 4294967295; must be 0 to 3600000");
    EXPECT_EQ(error_of([](auto &o) { o.lease_ms = 99; }), "1: lease_ms is 99; must be 100 to 3600000");
    EXPECT_EQ(error_of([](auto &o) { o.struct_size = 8; }).substr(0, 3), "1: ");
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    EXPECT_EQ(pllm_nixl_store_open(nullptr, &store, nullptr, 0), PLLM_E_INVALID_ARGUMENT);
}

}  // namespace

int main(int argc, char **argv) {
    if (argc == 3 && std::string(argv[1]) == "peer") return run_peer(argv[2]);
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
