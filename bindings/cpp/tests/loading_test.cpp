// Loading: progress, cancellation, plans and options.
#include <stdexcept>

#include "support.hpp"

TEST(Progress, increases_up_to_the_total_on_the_calling_thread) {
    pagedllm::Options options = light_options();
    std::vector<uint64_t> seen;
    uint64_t bytes = 0;
    options.progress = [&, thread = std::this_thread::get_id()](uint64_t done, uint64_t total) {
        EXPECT_EQ(std::this_thread::get_id(), thread);
        EXPECT_TRUE(seen.empty() || total == bytes);
        EXPECT_TRUE(seen.empty() || done >= seen.back());
        bytes = total;
        seen.push_back(done);
        return true;
    };
    EXPECT_TRUE(ok(pagedllm::Engine::create(options)));
    ASSERT_GT(seen.size(), 2u);
    EXPECT_LT(seen.front(), bytes);
    EXPECT_EQ(seen.back(), bytes);
}

TEST(Progress, cancels_loading_if_it_returns_false) {
    pagedllm::Options options = light_options();
    for (const int last : {1, 3}) {
        int calls = 0;
        options.progress = [&](uint64_t, uint64_t) { return ++calls < last; };
        EXPECT_TRUE(fails(Code::cancelled, pagedllm::Engine::create(options)));
        EXPECT_EQ(calls, last);
    }
}

TEST(Progress, cancels_loading_and_rethrows_if_it_throws) {
    struct Mine : std::runtime_error {
        using std::runtime_error::runtime_error;
    };
    pagedllm::Options options = light_options();
    int calls = 0;
    options.progress = [&](uint64_t, uint64_t) -> bool { throw Mine("after " + std::to_string(++calls)); };
    try {
        (void)pagedllm::Engine::create(options);
        FAIL() << "it did not throw";
    } catch (const Mine &mine) {
        EXPECT_STREQ(mine.what(), "after 1");
    }
    options.progress = nullptr;
    EXPECT_TRUE(ok(pagedllm::Engine::create(options)));
}

TEST(Engine, matches_its_plan) {
    const pagedllm::Options options = light_options();
    const pagedllm::Plan plan = pagedllm::Engine::plan(options).value();
    const pagedllm::Engine engine = pagedllm::Engine::create(options).value();
    const pagedllm::ModelInfo info = engine.model_info().value();
    const pagedllm::Stats stats = engine.stats().value();
    EXPECT_LE(plan.kv_bytes, options.kv_bytes);
    EXPECT_EQ(plan.blocks, stats.blocks_total);
    EXPECT_EQ(plan.max_model_len, info.max_model_len);
    EXPECT_EQ(info.architecture, "LlamaForCausalLM");
    EXPECT_EQ(info.threads, 1u);
    EXPECT_EQ(info.vocab_size, 1024u);
    EXPECT_FALSE(info.isa.empty());
    ASSERT_FALSE(info.eos_token_ids.empty());
    EXPECT_LT(info.eos_token_ids[0], info.vocab_size);
    EXPECT_GE(info.max_positions, info.max_model_len);
    EXPECT_GT(info.layers, 0u);
}

TEST(Engine, passes_every_option_to_the_library) {
    pagedllm::Options options = light_options();
    options.device = "cpu";
    options.kv_dtype = pagedllm::Dtype::f32;
    options.isa = pagedllm::Isa::portable;
    options.block_size = 32;
    options.max_model_len = 96;
    options.max_batch_tokens = 24;
    options.max_seqs = 3;
    options.prefill_chunk = 5;
    options.threads = 2;
    options.queue_capacity = 1;
    options.seed = 7;
    const pagedllm::Plan plan = pagedllm::Engine::plan(options).value();
    EXPECT_EQ(plan.block_size, 32u);
    EXPECT_EQ(plan.kv_dtype, PLLM_DTYPE_F32);
    options.host_steps = true;
    pagedllm::Engine engine = pagedllm::Engine::create(options).value();
    EXPECT_EQ(engine.model_info().value().isa, "portable");
    EXPECT_EQ(engine.model_info().value().max_model_len, 96u);
    EXPECT_EQ(engine.model_info().value().threads, 2u);
    const std::vector<uint32_t> prompt(20, 7);
    pagedllm::Request request{prompt};
    request.sampling.ignore_eos = true;
    for (int i = 0; i < 4; i++) engine.add(request).value();
    const pagedllm::Step first = engine.step().value();
    EXPECT_EQ(first.sequences, 3u);        // max_seqs
    EXPECT_EQ(first.prefill_tokens, 15u);  // prefill_chunk of each
    options.host_steps = false;
    const auto tokens = [&](uint64_t seed) {
        options.seed = seed;
        return pagedllm::Engine::create(options).value().generate(request).value().tokens;
    };
    EXPECT_EQ(tokens(7), tokens(7));
    EXPECT_NE(tokens(7), tokens(8));
}

TEST(Engine, can_be_created_and_freed_many_times) {
    for (int i = 0; i < 20; i++) {
        pagedllm::Engine engine = i % 2 ? open_engine() : host_stepped_engine();
        const std::string prompt = chat(france.question);
        engine.add(endless(prompt)).value();
    }
}
