// Engines that several workers compute, and their communicators.
#include <dirent.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "support.hpp"

static_assert(!std::is_copy_constructible_v<pagedllm::Communicator> && !std::is_copy_assignable_v<pagedllm::Communicator>);
static_assert(std::is_nothrow_move_constructible_v<pagedllm::Communicator> && std::is_nothrow_move_assignable_v<pagedllm::Communicator>);

namespace {

std::string group_file() {
    return (access("/dev/shm", W_OK) == 0 ? "/dev/shm"s : "/tmp"s) + "/pagedllm-cpp-" + std::to_string(getpid());
}

bool exists(const std::string &path) { return access(path.c_str(), F_OK) == 0; }

pagedllm::Communicator join(uint32_t rank, uint32_t size) {
    return pagedllm::Communicator::shared_memory(group_file(), rank, size, timeout_limit).value();
}

// The worker with rank 1, as a process. The destructor kills it if the test has not waited for it.
class Worker {
public:
    explicit Worker(uint32_t block_size = 16) {
        std::string model = light_options().model_path, group = group_file(), size = std::to_string(block_size);
        char program[] = PAGEDLLM_WORKER;
        char *arguments[] = {program, model.data(), group.data(), size.data(), nullptr};
        EXPECT_EQ(posix_spawn(&process_, program, nullptr, nullptr, arguments, environ), 0);
    }
    Worker(const Worker &) = delete;
    Worker &operator=(const Worker &) = delete;
    ~Worker() {
        if (process_ <= 0) return;
        kill(process_, SIGKILL);
        wait();
    }

    // Waits for the end of the process. Returns its exit status, or -1 if a signal has ended it.
    int wait() {
        int status = 0;
        EXPECT_EQ(waitpid(process_, &status, 0), process_);
        process_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }

private:
    pid_t process_ = 0;
};

pagedllm::Options options_of_two(pagedllm::Communicator &world) {
    pagedllm::Options options = light_options();
    options.tensor_parallel = 2;
    options.communicator = &world;
    options.worker_timeout = timeout_limit;
    return options;
}

// Checks that the engine has the tokens of one worker.
void expect_answers(pagedllm::Engine &engine) {
    pagedllm::Engine alone = open_engine();
    for (const Dialogue &dialogue : dialogues) {
        const std::string prompt = chat(dialogue.question);
        const pagedllm::Completion answer = engine.generate(greedy(prompt)).value();
        EXPECT_EQ(answer.tokens, alone.generate(greedy(prompt)).value().tokens);
        EXPECT_EQ(answer.text, dialogue.answer);
    }
}

size_t descriptors() {
    size_t count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory)) count++;
    closedir(directory);
    return count;
}

// A communicator of the host, which calls that of the library.
struct HostGroup {
    pllm_communicator inner{};
    std::atomic<int> closed{0};

    static HostGroup &of(void *data) { return *static_cast<HostGroup *>(data); }

    pllm_communicator functions() {
        pllm_communicator own = inner;
        own.user_data = this;
        own.split = nullptr;
        own.broadcast = [](void *data, void *bytes, uint64_t len, uint32_t root, uint64_t ms) {
            return of(data).inner.broadcast(of(data).inner.user_data, bytes, len, root, ms);
        };
        own.all_gather = [](void *data, const void *bytes, uint64_t len, void *out, uint64_t ms) {
            return of(data).inner.all_gather(of(data).inner.user_data, bytes, len, out, ms);
        };
        own.all_to_all = [](void *data, const void *bytes, uint64_t len, void *out, uint64_t ms) {
            return of(data).inner.all_to_all(of(data).inner.user_data, bytes, len, out, ms);
        };
        own.send = [](void *data, const void *bytes, uint64_t len, uint32_t to, uint64_t ms) {
            return of(data).inner.send(of(data).inner.user_data, bytes, len, to, ms);
        };
        own.receive = [](void *data, void *bytes, uint64_t len, uint32_t from, uint64_t ms) {
            return of(data).inner.receive(of(data).inner.user_data, bytes, len, from, ms);
        };
        own.close = [](void *data) {
            of(data).closed++;
            of(data).inner.close(of(data).inner.user_data);
        };
        return own;
    }

    void join(uint32_t rank, uint32_t size) {
        inner.struct_size = sizeof inner;
        ASSERT_TRUE(ok(pagedllm::detail::status(
            pllm_communicator_shared_memory(group_file().c_str(), rank, size, timeout_limit.count() * 1000, &inner))));
    }
};

}  // namespace

TEST(Workers, of_two_processes_have_the_tokens_of_one) {
    Worker worker;
    pagedllm::Communicator world = join(0, 2);
    EXPECT_EQ(world.rank(), 0u);
    EXPECT_EQ(world.size(), 2u);
    {
        pagedllm::Engine engine = pagedllm::Engine::create(options_of_two(world)).value();
        expect_answers(engine);
        EXPECT_TRUE(exists(group_file()));
    }
    EXPECT_FALSE(exists(group_file()));
    EXPECT_EQ(worker.wait(), 0);
}

TEST(Workers, of_a_list_of_devices_have_the_tokens_of_one) {
    pagedllm::Options options = light_options();
    options.device = "cpu,cpu";
    pagedllm::Engine engine = pagedllm::Engine::create(options).value();
    expect_answers(engine);
    options.tensor_parallel = 3;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
}

TEST(Workers, with_other_options_fail_on_both_ranks) {
    Worker worker(32);
    pagedllm::Communicator world = join(0, 2);
    const auto refused = pagedllm::Engine::create(options_of_two(world));
    EXPECT_TRUE(fails(Code::invalid_argument, refused));
    EXPECT_NE(refused.error().message.find("block_size"), std::string::npos) << refused.error().message;
    EXPECT_EQ(worker.wait(), PLLM_E_INVALID_ARGUMENT);
}

TEST(Workers, need_a_communicator_of_another_rank) {
    pagedllm::Options options = light_options();
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::run_worker(options)));
    options.tensor_parallel = 2;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::run_worker(options)));
    options.tensor_parallel = 1;
    pagedllm::Communicator world = join(0, 1);
    options.communicator = &world;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::run_worker(options)));
    // The call has failed, so the communicator still belongs to the host.
    EXPECT_TRUE(ok(pagedllm::Engine::create(options)));
}

TEST(Workers, rethrow_the_exception_of_progress) {
    Worker worker;
    pagedllm::Communicator world = join(0, 2);
    pagedllm::Options options = options_of_two(world);
    options.progress = [](uint64_t, uint64_t) -> bool { throw std::runtime_error("enough"); };
    EXPECT_THROW((void)pagedllm::Engine::create(options), std::runtime_error);
    EXPECT_EQ(worker.wait(), PLLM_E_CANCELLED);
}

TEST(Communicators, that_an_engine_has_taken_are_refused) {
    pagedllm::Communicator world = join(0, 1);
    pagedllm::Options options = light_options();
    options.communicator = &world;
    {
        const pagedllm::Engine engine = pagedllm::Engine::create(options).value();
        const auto second = pagedllm::Engine::create(options);
        EXPECT_TRUE(fails(Code::invalid_argument, second));
        // The text of the library.
        EXPECT_EQ(second.error().message, "the communicator is closed, or belongs to an engine or a worker; create another one");
    }
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::run_worker(options)));
}

TEST(Communicators, that_are_not_used_are_closed) {
    const size_t before = descriptors();
    for (int i = 0; i < 20; i++) {
        pagedllm::Communicator first = join(0, 1);
        EXPECT_TRUE(exists(group_file()));
        pagedllm::Communicator second = std::move(first);
        EXPECT_TRUE(exists(group_file()));
        EXPECT_TRUE(fails(Code::invalid_argument, first.named()));
        pagedllm::Options options = light_options();
        options.communicator = &first;
        EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
    }
    EXPECT_FALSE(exists(group_file()));
    EXPECT_EQ(descriptors(), before);
}

TEST(Communicators, that_are_assigned_to_are_closed_before) {
    HostGroup group;
    group.join(0, 1);
    pagedllm::Communicator world = pagedllm::Communicator::adopt(group.functions());
    EXPECT_EQ(group.closed, 0);
    // A struct without functions can be destroyed, too.
    world = pagedllm::Communicator::adopt(pllm_communicator{});
    EXPECT_EQ(group.closed, 1);
}

TEST(Communicators, of_the_host_connect_workers_and_are_closed_once) {
    HostGroup group, group_of_worker;
    // Both ranks need such a communicator: the library makes other calls with its own.
    std::thread worker([&] {
        group_of_worker.join(1, 2);
        pagedllm::Communicator world = pagedllm::Communicator::adopt(group_of_worker.functions());
        EXPECT_TRUE(ok(pagedllm::run_worker(options_of_two(world))));
    });
    group.join(0, 2);
    pagedllm::Communicator world = pagedllm::Communicator::adopt(group.functions());
    {
        pagedllm::Engine engine = pagedllm::Engine::create(options_of_two(world)).value();
        expect_answers(engine);
        // Its user data may be invalid after the engine has closed it, so no second call reaches
        // the library.
        EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options_of_two(world))));
        EXPECT_EQ(group.closed, 0);
    }
    worker.join();
    EXPECT_EQ(group.closed, 1);
    EXPECT_EQ(group_of_worker.closed, 1);
    world = join(0, 1);
    EXPECT_EQ(group.closed, 1);
}

TEST(Communicators, return_the_errors_of_the_library) {
    const auto join_as = [](const std::string &path, uint32_t rank, uint32_t size) {
        return pagedllm::Communicator::shared_memory(path, rank, size, 10ms);
    };
    EXPECT_TRUE(fails(Code::invalid_argument, join_as(group_file(), 2, 2)));
    EXPECT_TRUE(fails(Code::io, join_as(group_file(), 0, 2)));  // rank 1 does not join in time
    EXPECT_TRUE(fails(Code::io, join_as("/nowhere/group", 0, 1)));
    EXPECT_TRUE(fails(Code::invalid_argument, join_as(group_file() + "\0x"s, 0, 1)));
    EXPECT_FALSE(exists(group_file()));
}
