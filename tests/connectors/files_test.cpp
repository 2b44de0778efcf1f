// The store in a directory.
#include "pagedllm_files.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "contract.hpp"

namespace {

constexpr size_t MIB = 1 << 20;

pllm_kv_store open_store(const std::string &directory, uint32_t io, uint64_t max_bytes = 256 * MIB) {
    pllm_files_store_options options;
    pllm_files_store_options_init(&options, sizeof options);
    options.directory = directory.c_str();
    options.max_bytes = max_bytes;
    options.io = io;
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    char error[500];
    if (pllm_files_store_open(&options, &store, error, sizeof error) != 0) ADD_FAILURE() << error;
    return store;
}

// The error of an open that fails, after its code.
std::string error_of(const pllm_files_store_options &options) {
    pllm_kv_store store{};
    store.struct_size = sizeof store;
    char error[500];
    const int32_t code = pllm_files_store_open(&options, &store, error, sizeof error);
    if (code == 0) store.close(store.user_data);
    return std::to_string(code) + ": " + error;
}

std::string error_of(const std::string &directory) {
    pllm_files_store_options options;
    pllm_files_store_options_init(&options, sizeof options);
    options.directory = directory.c_str();
    return error_of(options);
}

std::string hex(const Key &key) {
    std::string text;
    char digits[3];
    for (const uint8_t byte : key) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        text += digits;
    }
    return text;
}

fs::path path_of(const fs::path &directory, const Key &key) { return directory / hex(key).substr(0, 1) / hex(key); }

void write_file(const fs::path &path, const std::string &text) { std::ofstream(path) << text; }

// Bytes of all values, which other processes may be removing.
uint64_t bytes_in(const fs::path &directory) {
    uint64_t bytes = 0;
    std::error_code error;
    for (fs::recursive_directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
        std::error_code gone;
        const uint64_t len = entry->is_regular_file(gone) ? entry->file_size(gone) : 0;
        if (!gone) bytes += len;
    }
    return bytes;
}

size_t count_files(const fs::path &directory) {
    size_t count = 0;
    for (const auto &entry : fs::directory_iterator(directory)) count += entry.is_regular_file();
    return count;
}

// Runs a function in a child process, and returns its status.
template <class Function>
int in_child(Function function) {
    const pid_t child = fork_child();
    if (child == 0) {
        function();
        _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

// Puts a value of 60,000 bytes. Until old values have been evicted, the store refuses it.
void put_soon(Client &client, uint64_t number) {
    EXPECT_TRUE(becomes_true([&] { return client.put(key_of(number), value_of(number, 60'000)).status == PLLM_KV_DONE; }));
}

class Files : public testing::TestWithParam<uint32_t> {
protected:
    pllm_kv_store open(uint64_t max_bytes = 256 * MIB) { return open_store(directory, GetParam(), max_bytes); }
    TempDir temporary;
    const std::string directory = temporary / "store";
};

INSTANTIATE_TEST_SUITE_P(, Files, testing::Values(PLLM_FILES_IO_THREADS, PLLM_FILES_IO_URING),
                         [](const auto &io) { return io.param == PLLM_FILES_IO_URING ? "uring" : "threads"; });

TEST_P(Files, random_operations_have_the_results_of_a_map) {
    for (unsigned seed = 0; seed < 4; seed++) {
        fs::remove_all(directory);
        Client client(open());
        run_random_operations(client, seed, 40);
    }
}

TEST_P(Files, values_survive_the_store) {
    const Value value = value_of(1, 300'000);
    {
        Client client(open());
        EXPECT_EQ(client.put(key_of(1), value).status, uint32_t{PLLM_KV_DONE});
    }
    for (const uint32_t io : {PLLM_FILES_IO_THREADS, PLLM_FILES_IO_URING}) {
        Client client(open_store(directory, io));
        EXPECT_TRUE(client.has(key_of(1)) && client.holds(key_of(1), value));
    }
    EXPECT_EQ(count_files(directory + "/tmp"), 0u);
}

TEST_P(Files, a_value_of_many_buffers_is_written_and_read) {
    Client client(open());
    const Value value = value_of(1, 50'000);
    EXPECT_EQ(client.wait(client.start_put(key_of(1), value, 3000)).status, uint32_t{PLLM_KV_DONE});
    EXPECT_TRUE((client.wait(client.start_get(key_of(1), value.size(), 3000)) == Result{PLLM_KV_DONE, value.size()}));
    EXPECT_TRUE(client.last_value == value);
}

TEST_P(Files, a_truncated_value_is_reported_and_replaced) {
    Client client(open());
    const Value value = value_of(1, 100'000);
    client.put(key_of(1), value);
    for (const uint64_t len : {99'999, 80, 0}) {
        fs::resize_file(path_of(directory, key_of(1)), len);
        EXPECT_TRUE((client.get(key_of(1), value.size()) == Result{PLLM_KV_DONE, len}));
        EXPECT_EQ(client.put(key_of(1), value).status, uint32_t{PLLM_KV_DONE});
        EXPECT_TRUE(client.holds(key_of(1), value));
    }
    fs::resize_file(path_of(directory, key_of(1)), 100'001);
    EXPECT_TRUE((client.get(key_of(1), value.size()) == Result{PLLM_KV_DONE, 100'001}));
    EXPECT_EQ(client.remove(key_of(1)).status, uint32_t{PLLM_KV_DONE});
    EXPECT_EQ(client.get(key_of(1), value.size()).status, uint32_t{PLLM_KV_MISSING});
}

TEST_P(Files, other_kinds_of_files_in_place_of_values_are_failures) {
    Client client(open());
    const auto place = [&](uint64_t number) { return path_of(directory, key_of(number)); };
    fs::create_directory(place(1));
    ASSERT_EQ(mkfifo(place(2).c_str(), 0600), 0);
    write_file(temporary / "secret", std::string(100, 'x'));
    fs::create_symlink(temporary / "secret", place(3));
    for (const uint64_t number : {1, 2, 3}) {
        EXPECT_EQ(client.get(key_of(number), 100).status, uint32_t{PLLM_KV_FAILED}) << number;
        client.remove(key_of(number));
    }
    // A put replaces everything but a directory.
    EXPECT_EQ(client.put(key_of(1), value_of(1, 100)).status, uint32_t{PLLM_KV_FAILED});
    fs::create_symlink(temporary / "secret", place(3));
    EXPECT_EQ(client.put(key_of(3), value_of(3, 100)).status, uint32_t{PLLM_KV_DONE});
    EXPECT_TRUE(client.holds(key_of(3), value_of(3, 100)));
    EXPECT_EQ(fs::file_size(temporary / "secret"), 100u);
    EXPECT_EQ(count_files(directory + "/tmp"), 0u);
}

TEST_P(Files, the_least_recently_used_values_are_evicted) {
    Client client(open(4 * MIB));
    const auto put = [&](uint64_t number) { put_soon(client, number); };
    write_file(directory + "/notes", "foreign");
    write_file(directory + "/0/notes", std::string(3 * MIB, 'x'));
    for (uint64_t number = 0; number < 60; number++) put(number);
    usleep(20'000);  // more than the resolution of file times
    for (uint64_t number = 0; number < 20; number++) EXPECT_TRUE(client.has(key_of(number)));
    usleep(20'000);
    for (uint64_t number = 60; number < 80; number++) put(number);
    // 80 values exceed the budget of 68. Those from 20 on were used longest ago.
    EXPECT_LT(bytes_in(directory) - 3 * MIB, 4 * MIB);
    for (uint64_t number = 0; number < 20; number++) EXPECT_TRUE(client.holds(key_of(number), value_of(number, 60'000))) << number;
    for (uint64_t number = 60; number < 80; number++) EXPECT_TRUE(client.has(key_of(number))) << number;
    for (uint64_t number = 20; number < 28; number++) EXPECT_FALSE(client.has(key_of(number))) << number;
    EXPECT_TRUE(fs::exists(directory + "/notes") && fs::exists(directory + "/0/notes"));
}

TEST_P(Files, the_order_of_use_survives_the_store) {
    {
        Client client(open(4 * MIB));
        for (uint64_t number = 0; number < 60; number++) put_soon(client, number);
        usleep(20'000);
        EXPECT_TRUE(client.has(key_of(0)));
    }
    usleep(20'000);
    Client client(open(4 * MIB));
    for (uint64_t number = 60; number < 80; number++) put_soon(client, number);
    EXPECT_LT(bytes_in(directory), 4 * MIB);
    EXPECT_TRUE(client.has(key_of(0)));
    EXPECT_FALSE(client.has(key_of(1)));
}

TEST_P(Files, the_end_of_a_prefix_is_evicted_first) {
    std::vector<Key> prefix;
    for (uint64_t number = 0; number < 60; number++) prefix.push_back(key_of(number));
    {
        Client client(open(4 * MIB));
        for (uint64_t number = 0; number < 60; number++) put_soon(client, number);
        client.wait(client.start_exists(prefix));
        usleep(20'000);
        for (uint64_t number = 100; number < 120; number++) put_soon(client, number);
        EXPECT_LT(bytes_in(directory), 4 * MIB);
    }
    // Another store, because an eviction of the first one may not have ended: it has no order.
    Client client(open(4 * MIB));
    client.wait(client.start_exists(prefix));
    const auto found = client.last_found;
    EXPECT_TRUE(std::is_sorted(found.rbegin(), found.rend()));
    EXPECT_EQ(found.front(), 1);
    EXPECT_EQ(found.back(), 0);
}

TEST_P(Files, a_value_larger_than_the_budget_is_refused) {
    Client client(open(MIB));
    EXPECT_EQ(client.put(key_of(1), Value(2 * MIB)).status, uint32_t{PLLM_KV_FAILED});
    EXPECT_EQ(client.put(key_of(2), Value(1000)).status, uint32_t{PLLM_KV_DONE});
}

TEST_P(Files, close_ends_the_use_of_the_buffers) {
    for (int i = 0; i < 20; i++) {
        Client client(open());
        for (uint64_t number = 0; number < 100; number++) {
            client.start_put(key_of(number), value_of(number, 50'000));
            client.start_get(key_of(number), 50'000);
            client.start_exists({key_of(number)});
        }
        client.poll(0);
        client.close();  // frees the buffers
    }
}

TEST_P(Files, a_directory_that_vanishes_costs_values) {
    Client client(open());
    client.put(key_of(1), Value(1000));
    fs::remove_all(directory);
    EXPECT_EQ(client.get(key_of(1), 1000).status, uint32_t{PLLM_KV_MISSING});
    EXPECT_FALSE(client.has(key_of(1)));
    EXPECT_EQ(client.put(key_of(1), Value(1000)).status, uint32_t{PLLM_KV_FAILED});
    EXPECT_EQ(client.remove(key_of(1)).status, uint32_t{PLLM_KV_MISSING});
    EXPECT_FALSE(fs::exists(directory));
}

TEST_P(Files, a_read_only_directory_is_read) {
    const Value value = value_of(1, 1000);
    { Client(open()).put(key_of(1), value); }
    const auto run = [&] {
        if (getuid() == 0 && setuid(65534) != 0) _exit(2);
        Client client(open());
        EXPECT_TRUE(client.has(key_of(1)) && client.holds(key_of(1), value));
        EXPECT_EQ(client.put(key_of(2), value).status, uint32_t{PLLM_KV_FAILED});
        EXPECT_EQ(client.remove(key_of(1)).status, uint32_t{PLLM_KV_FAILED});
    };
    // Another user may look into the directories and read.
    fs::permissions(temporary.path, fs::perms::all);
    for (const auto &entry : fs::recursive_directory_iterator(directory))
        fs::permissions(entry, entry.is_directory() ? fs::perms(0555) : fs::perms(0444));
    fs::permissions(directory, fs::perms(0555));
    EXPECT_EQ(in_child(run), 0);
    for (const auto &entry : fs::recursive_directory_iterator(directory))
        if (entry.is_directory()) fs::permissions(entry, fs::perms(0700));
    fs::permissions(directory, fs::perms(0700));
}

TEST_P(Files, a_limit_of_file_sizes_fails_writes_and_sends_no_signal) {
    const auto run = [&] {
        Client client(open());
        const rlimit limit = {65536, 65536};
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        EXPECT_EQ(client.put(key_of(1), Value(200'000)).status, uint32_t{PLLM_KV_FAILED});
        EXPECT_EQ(client.put(key_of(2), Value(50'000)).status, uint32_t{PLLM_KV_DONE});
    };
    EXPECT_EQ(in_child(run), 0);
    EXPECT_EQ(count_files(directory + "/tmp"), 0u);
}

TEST_P(Files, on_a_full_disk_old_values_make_space_for_new_ones) {
    fs::create_directory(directory);
    if (mount("tmpfs", directory.c_str(), "tmpfs", 0, "size=8m") != 0) GTEST_SKIP() << "a mount needs rights: " << std::strerror(errno);
    {
        Client client(open());
        size_t failures = 0;
        uint64_t number = 0;
        for (; number < 120; number++) failures += client.put(key_of(number), value_of(number, 100'000)).status != PLLM_KV_DONE;
        EXPECT_GT(failures, 0u);
        EXPECT_TRUE(becomes_true([&] {
            number++;
            return client.put(key_of(number), value_of(number, 100'000)).status == PLLM_KV_DONE;
        }));
        EXPECT_TRUE(client.holds(key_of(number), value_of(number, 100'000)));
        EXPECT_FALSE(client.has(key_of(0)));
        EXPECT_EQ(count_files(directory + "/tmp"), 0u);
    }
    EXPECT_EQ(umount(directory.c_str()), 0);
}

// Puts and gets values of a common set, checks what it gets, and returns the number of hits.
int share_values(Client &client, unsigned seed, int count) {
    std::mt19937 random(seed);
    int hits = 0;
    for (int i = 0; i < count; i++) {
        const uint64_t number = random() % 300;
        const Value value = value_of(number, 30'000);
        const Result result = client.get(key_of(number), value.size());
        if (result.status == PLLM_KV_DONE) {
            EXPECT_TRUE(result.bytes == value.size() && client.last_value == value) << number;
            hits++;
        } else {
            client.start_put(key_of(number), value);
        }
    }
    return hits;
}

TEST_P(Files, two_processes_share_values_within_the_budget) {
    const pid_t child = fork_child();
    if (child == 0) {
        {
            Client client(open(5 * MIB));
            share_values(client, 1, 2000);
        }
        _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    uint64_t most = 0;
    int hits = 0;
    {
        Client client(open(5 * MIB));
        for (unsigned i = 0; i < 20; i++) {
            hits += share_values(client, 100 + i, 100);
            most = std::max(most, bytes_in(directory));
        }
    }
    int status;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_GT(hits, 100);
    // All 300 values have 9 MB. Each process writes at most a sixteenth between its scans, and 100
    // values in flight.
    EXPECT_LT(most, 5 * MIB + 2 * 5 * MIB / 16 + 2 * MIB);
    EXPECT_TRUE(becomes_true([&] { return Client(open(5 * MIB)), bytes_in(directory) <= 5 * MIB; }));
}

TEST_P(Files, a_killed_process_leaves_complete_values) {
    const pid_t child = fork_child();
    if (child == 0) {
        Client client(open());
        for (uint64_t number = 0;; number++) client.wait(client.start_put(key_of(number), value_of(number, 200'000)));
    }
    EXPECT_TRUE(becomes_true([&] { return bytes_in(directory) > 3 * MIB; }));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    // What it was writing is removed when it is old.
    write_file(directory + "/tmp/abandoned", "x");
    const timespec old[2] = {{1, 0}, {1, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, (directory + "/tmp/abandoned").c_str(), old, 0), 0);
    Client client(open());
    EXPECT_TRUE(becomes_true([&] { return !fs::exists(directory + "/tmp/abandoned"); }));
    size_t found = 0;
    for (uint64_t number = 0; client.has(key_of(number)); number++, found++)
        EXPECT_TRUE(client.holds(key_of(number), value_of(number, 200'000)));
    EXPECT_GT(found, 10u);
}

TEST(FilesOpen, another_format_is_refused) {
    TempDir temporary;
    const std::string directory = temporary / "store";
    Client(open_store(directory, PLLM_FILES_IO_AUTO)).close();
    write_file(directory + "/pagedllm-kv-store", "pagedllm files store 2\n");
    EXPECT_EQ(error_of(directory), "5: another version has written the directory of the store (" + directory +
                                       ": \"pagedllm files store 2\" instead of \"pagedllm files store 1\"); use another directory, or "
                                       "delete this one");
    write_file(directory + "/pagedllm-kv-store", std::string(1000, '\x01'));
    EXPECT_EQ(error_of(directory).substr(0, 3), "5: ");
    // As a power failure can leave it.
    write_file(directory + "/pagedllm-kv-store", "");
    EXPECT_EQ(error_of(directory), "0: ");
    EXPECT_EQ(fs::file_size(directory + "/pagedllm-kv-store"), 23u);
}

TEST(FilesOpen, a_directory_with_other_files_is_refused) {
    TempDir temporary;
    write_file(temporary / "letter", "x");
    EXPECT_EQ(error_of(temporary.path.string()), "1: the directory of the store has other files (" + temporary.path.string() +
                                                     ": letter); use an empty directory or one that does not exist");
    EXPECT_EQ(count_files(temporary.path), 1u);
}

TEST(FilesOpen, a_directory_that_cannot_be_created_is_an_error) {
    TempDir temporary;
    write_file(temporary / "file", "x");
    for (const char *name : {"file", "file/store", "no/store"}) EXPECT_EQ(error_of(temporary / name).substr(0, 3), "3: ");
}

TEST(FilesOpen, several_threads_create_one_store) {
    for (int i = 0; i < 10; i++) {
        TempDir temporary;
        std::vector<pid_t> children;
        for (int child = 0; child < 4; child++) {
            children.push_back(fork_child());
            if (children.back() == 0) _exit(error_of(temporary / "store").substr(0, 3) == "0: " ? 0 : 1);
        }
        for (const pid_t child : children) {
            int status;
            waitpid(child, &status, 0);
            EXPECT_EQ(status, 0);
        }
        EXPECT_EQ(count_files(temporary / "store"), 1u);
    }
}

TEST(FilesOpen, wrong_options_are_refused) {
    TempDir temporary;
    const std::string directory = temporary / "store";
    pllm_files_store_options defaults;
    pllm_files_store_options_init(&defaults, sizeof defaults);
    defaults.directory = directory.c_str();
    const auto error = [&](const std::function<void(pllm_files_store_options &)> &change) {
        pllm_files_store_options options = defaults;
        change(options);
        return error_of(options);
    };
    EXPECT_EQ(error([](auto &o) { o.max_bytes = 1000; }), "1: max_bytes is 1000; must be 1048576 to 9223372036854775807");
    EXPECT_EQ(error([](auto &o) { o.io = 3; }), "1: io is 3; use one of PLLM_FILES_IO_*");
    EXPECT_EQ(error([](auto &o) { o.threads = 65; }), "1: threads is 65; must be at most 64");
    EXPECT_EQ(error([](auto &o) { o.directory = nullptr; }), "1: directory is empty; set it to the path of a directory");
    EXPECT_EQ(error([](auto &o) { o.directory_len = 0; }), "1: directory is empty; set it to the path of a directory");
    EXPECT_EQ(error([](auto &o) { o.struct_size = 0; }).substr(0, 3), "1: ");
    EXPECT_EQ(error([](auto &o) { o.struct_size = 1 << 20; }).substr(0, 3), "1: ");
    const std::string long_name(5000, 'x');
    EXPECT_EQ(error([&](auto &o) { o.directory = long_name.c_str(); }), "1: directory is too long (limit 4000 bytes); shorten it");
    EXPECT_FALSE(fs::exists(directory));
    EXPECT_EQ(pllm_files_store_open(&defaults, nullptr, nullptr, 0), PLLM_E_INVALID_ARGUMENT);
    pllm_kv_store store{};
    EXPECT_EQ(pllm_files_store_open(&defaults, &store, nullptr, 0), PLLM_E_INVALID_ARGUMENT);
    EXPECT_EQ(pllm_files_store_open(nullptr, &store, nullptr, 0), PLLM_E_INVALID_ARGUMENT);
    struct {
        pllm_files_store_options options;
        uint64_t later;
    } newer = {defaults, 0};
    newer.options.struct_size = sizeof newer;
    EXPECT_EQ(error_of(newer.options), "0: ");
    newer.later = 1;
    EXPECT_EQ(error_of(newer.options).substr(0, 3), "5: ");
}

}  // namespace
