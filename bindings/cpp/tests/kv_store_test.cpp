// KV stores, with the files connector.
#include <pagedllm_files.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <type_traits>

#include "support.hpp"

static_assert(!std::is_copy_constructible_v<pagedllm::KvStore> && !std::is_copy_assignable_v<pagedllm::KvStore>);
static_assert(std::is_nothrow_move_constructible_v<pagedllm::KvStore> && std::is_nothrow_move_assignable_v<pagedllm::KvStore>);

namespace {

class KvStores : public testing::Test {
protected:
    KvStores() {
        std::string path = std::filesystem::temp_directory_path() / "pagedllm-cpp-XXXXXX";
        folder = mkdtemp(path.data());
        for (uint32_t i = 0; i < 500; i++) prompt.push_back(3 + i * i % 250);  // 31 full blocks and 4 tokens
    }
    ~KvStores() override { std::filesystem::remove_all(folder); }

    pagedllm::Result<pagedllm::KvStore> open(const std::string &directory) {
        pllm_files_store_options files;
        pllm_files_store_options_init(&files, sizeof files);
        files.directory = directory.c_str();
        return pagedllm::KvStore::open(pllm_files_store_open, files);
    }

    pagedllm::KvStore open() { return open(folder / "store").value(); }

    // An engine writes its blocks while it is destroyed, and the tests must not depend on time.
    pagedllm::Options with_store(pagedllm::KvStore &store) {
        pagedllm::Options options = light_options();
        options.kv_store = &store;
        options.kv_store_timeout = timeout_limit;
        return options;
    }

    pagedllm::Completion answer(pagedllm::Engine &engine) {
        pagedllm::Request request{prompt};
        request.sampling.temperature = 0;
        request.sampling.ignore_eos = true;
        request.sampling.max_tokens = 24;
        return engine.generate(request).value();
    }

    std::filesystem::path folder;
    std::vector<uint32_t> prompt;
};

// A store of the host that has nothing and counts its calls of close, which the engine makes on a
// thread of its own.
struct EmptyStore {
    std::atomic<int> closed{0};

    pllm_kv_store functions() {
        pllm_kv_store store{};
        store.struct_size = sizeof store;
        store.user_data = this;
        store.exists = [](void *, uint64_t, const uint8_t *, uint64_t, uint8_t *) -> int32_t { return 1; };
        store.get = store.put = [](void *, uint64_t, const uint8_t *, const pllm_kv_buffer *, uint64_t) -> int32_t { return 1; };
        store.remove = [](void *, uint64_t, const uint8_t *) -> int32_t { return 1; };
        store.poll = [](void *, uint64_t, pllm_kv_completion *, uint64_t) -> uint64_t { return 0; };
        store.close = [](void *self) { static_cast<EmptyStore *>(self)->closed++; };
        return store;
    }
};

TEST_F(KvStores, share_blocks_between_engines) {
    pagedllm::Engine alone = open_engine();
    const pagedllm::Completion expected = answer(alone);
    EXPECT_EQ(expected.cached_tokens, 0u);
    for (const uint64_t cached : {0u, 496u}) {
        pagedllm::KvStore store = open();
        pagedllm::Options options = with_store(store);
        options.kv_store_max_bytes = 64 << 20;
        options.kv_store_max_operations = 8;
        options.kv_store_secret.assign(16, 7);
        pagedllm::Engine engine = pagedllm::Engine::create(options).value();
        const pagedllm::Completion completion = answer(engine);
        EXPECT_EQ(completion.tokens, expected.tokens);
        EXPECT_EQ(completion.cached_tokens, cached);
        EXPECT_EQ(engine.stats().value().kv_store_hits, cached / 16);
    }
    pagedllm::KvStore store = open();
    pagedllm::Options options = with_store(store);
    options.kv_store_secret.assign(16, 8);
    pagedllm::Engine other = pagedllm::Engine::create(options).value();
    EXPECT_EQ(answer(other).cached_tokens, 0u) << "the secret is another one";
}

TEST_F(KvStores, return_the_errors_of_the_connector) {
    std::ofstream(folder / "other") << "a file";
    const auto refused = open(folder);
    EXPECT_TRUE(fails(Code::invalid_argument, refused));
    EXPECT_NE(refused.error().message.find(folder.string()), std::string::npos) << refused.error().message;
    EXPECT_TRUE(fails(Code::io, open("/nowhere/store")));
}

TEST_F(KvStores, refuse_wrong_options_and_stay_with_the_host) {
    EmptyStore empty;
    pagedllm::KvStore store = pagedllm::KvStore::adopt(empty.functions());
    pagedllm::Options options = with_store(store);
    options.kv_store_secret.assign(15, 7);
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
    options = with_store(store);
    options.kv_store_max_operations = 65537;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
    options = with_store(store);
    options.kv_store_timeout = -1ms;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
    options = with_store(store);
    options.no_prefix_cache = true;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)));
    options = with_store(store);
    options.progress = [](uint64_t, uint64_t) -> bool { throw std::runtime_error("enough"); };
    EXPECT_THROW((void)pagedllm::Engine::create(options), std::runtime_error);
    // A worker does not take the store.
    options = with_store(store);
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::run_worker(options)));
    EXPECT_TRUE(ok(pagedllm::Engine::plan(options)));
    EXPECT_EQ(empty.closed, 0);
    EXPECT_TRUE(ok(pagedllm::Engine::create(options)));
    EXPECT_EQ(empty.closed, 1);
}

TEST_F(KvStores, are_closed_once) {
    EmptyStore first, second, third;
    {
        pagedllm::KvStore store = pagedllm::KvStore::adopt(first.functions());
        pagedllm::KvStore moved = std::move(store);
        EXPECT_EQ(first.closed, 0);
        EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(with_store(store))));
        moved = pagedllm::KvStore::adopt(second.functions());
        EXPECT_EQ(first.closed, 1);
        {
            pagedllm::Engine engine = pagedllm::Engine::create(with_store(moved)).value();
            answer(engine);
            EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(with_store(moved))));
            moved = pagedllm::KvStore::adopt(third.functions());
            EXPECT_EQ(second.closed, 0);
        }
        EXPECT_EQ(second.closed, 1);
        EXPECT_EQ(third.closed, 0);
    }
    EXPECT_EQ(first.closed, 1);
    EXPECT_EQ(second.closed, 1);
    EXPECT_EQ(third.closed, 1);
}

}  // namespace
