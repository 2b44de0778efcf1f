// Budgets, deadlines, order, admission and telemetry.
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "support.hpp"

using pagedllm::Budget;
using pagedllm::Engine;

static pagedllm::Options host_stepped_options() {
    pagedllm::Options options = light_options();
    options.host_steps = true;
    return options;
}

// Options without kv_bytes. The test sets the budget.
static pagedllm::Options options_without_kv_bytes() {
    pagedllm::Options options = host_stepped_options();
    options.kv_bytes = 0;
    return options;
}

TEST(Budget, is_shared_by_engines_that_can_outlive_it) {
    pagedllm::Options options = options_without_kv_bytes();
    std::optional<Budget> budget = Budget::create(16 << 20, 32 << 20).value();
    options.budget = &*budget;
    EXPECT_GT(Engine::plan(options).value().max_blocks, Engine::plan(options).value().blocks);
    Engine first = Engine::create(options).value(), second = Engine::create(options).value();
    const pagedllm::BudgetInfo info = budget->info().value();
    EXPECT_EQ(info.bytes, 16u << 20);
    EXPECT_EQ(info.max_bytes, 32u << 20);
    EXPECT_EQ(info.engines, 2u);
    budget.reset();
    const std::string prompt = chat(france.question);
    second.add(greedy(prompt)).value();
    step_to_the_end(second);
    EXPECT_EQ(read_to_the_end(second.queue()).text, france.answer);
    EXPECT_EQ(first.budget().info().value().engines, 2u);
}

TEST(Budget, can_be_resized_while_its_engine_runs) {
    pagedllm::Options options = host_stepped_options();
    options.max_model_len = 256;
    Engine engine = Engine::create(options).value();
    const pagedllm::BudgetView budget = engine.budget();
    const std::string prompt = chat(france.question);
    engine.add(greedy(prompt)).value();
    engine.step().value();
    const uint64_t blocks = engine.stats().value().blocks_total;
    const uint64_t min_bytes = budget.info().value().min_bytes;
    ASSERT_TRUE(ok(budget.resize(min_bytes)));
    EXPECT_EQ(budget.info().value().bytes, min_bytes);
    EXPECT_LT(engine.stats().value().blocks_total, blocks);
    EXPECT_TRUE(fails(Code::capacity, budget.resize(min_bytes - 1)));
    EXPECT_TRUE(fails(Code::capacity, budget.resize(options.kv_bytes + 1)));
    step_to_the_end(engine);
    EXPECT_EQ(read_to_the_end(engine.queue()).text, france.answer);
}

TEST(Budget, of_one_engine_can_be_shared_with_another) {
    pagedllm::Options options = options_without_kv_bytes();
    const Engine first = Engine::create(options).value();
    const pagedllm::BudgetView budget = first.budget();
    options.budget = &budget;
    const Engine second = Engine::create(options).value();
    EXPECT_EQ(budget.info().value().engines, 2u);
}

TEST(Budget, returns_errors_after_it_is_moved_from_and_does_not_select_an_own_budget) {
    pagedllm::Options options = options_without_kv_bytes();
    Budget first = Budget::create(16 << 20).value(), second = std::move(first);
    options.budget = &first;
    EXPECT_TRUE(fails(Code::invalid_argument, first.info()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.resize(8 << 20)));
    EXPECT_TRUE(fails(Code::invalid_argument, Engine::plan(options)));
    EXPECT_TRUE(fails(Code::invalid_argument, Engine::create(options)));
    first = std::move(second);
    EXPECT_TRUE(ok(Engine::create(options)));
    EXPECT_TRUE(ok(first.resize(8 << 20)));
    EXPECT_TRUE(fails(Code::invalid_argument, Budget::create(2, 1)));
}

TEST(Deadline, ends_a_request_and_keeps_its_tokens) {
    const std::string prompt = chat(france.question);
    size_t tokens = 0;
    // On a busy machine, the first step may begin after a short deadline.
    for (auto deadline = 300ms; tokens == 0 && deadline < timeout_limit; deadline *= 2) {
        Engine engine = Engine::create(host_stepped_options()).value();
        pagedllm::Request request = endless(prompt);
        request.deadline = deadline;
        engine.add(request).value();
        engine.step().value();
        std::this_thread::sleep_for(deadline + 10ms);
        step_to_the_end(engine);
        const pagedllm::Completion answer = read_to_the_end(engine.queue());
        EXPECT_EQ(answer.finish_reason, FinishReason::deadline);
        EXPECT_EQ(engine.stats().value().finished_deadline, 1u);
        tokens = answer.tokens.size();
    }
    EXPECT_EQ(tokens, 1u);
}

TEST(Deadline, applies_to_one_turn) {
    Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.keep = true;
    request.deadline = 1h;
    const pagedllm::Completion first = engine.generate(request).value();
    EXPECT_EQ(first.finish_reason, FinishReason::stop);
    pagedllm::Sequence sequence = engine.sequence(first.sequence);
    ASSERT_TRUE(ok(engine.stop()));
    pagedllm::Resume how;
    how.sampling.ignore_eos = true;
    how.keep = true;
    how.deadline = 1ms;
    pagedllm::Stream stream = sequence.stream(how).value();
    std::this_thread::sleep_for(5ms);
    ASSERT_TRUE(ok(engine.start()));
    EXPECT_EQ(stream.collect().value().finish_reason, FinishReason::deadline);
    EXPECT_TRUE(sequence.info().value().idle);
}

TEST(Deadline, is_refused_if_it_has_passed) {
    Engine engine = Engine::create(host_stepped_options()).value();
    pagedllm::Request request{"Once"};
    request.deadline = -1ms;
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add(request)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.predict_admission(request)));
}

// Runs two requests, the second with a higher priority. Returns the order in which they end.
static std::vector<uint64_t> order_of_ends(pagedllm::Order order) {
    pagedllm::Options options = host_stepped_options();
    options.max_seqs = 1;
    options.order = order;
    Engine engine = Engine::create(options).value();
    const std::string prompt = chat(france.question);
    for (uint64_t i = 0; i < 2; i++) {
        pagedllm::Request request = greedy(prompt);
        request.user_data = i;
        request.priority = static_cast<int32_t>(i);
        engine.add(request).value();
    }
    step_to_the_end(engine);
    std::vector<uint64_t> ends;
    const pagedllm::Outputs outputs = engine.queue().poll().value();
    for (const pagedllm::Output &output : outputs)
        if (output.is_last()) ends.push_back(output.user_data);
    return ends;
}

TEST(Priority, determines_the_order_only_with_order_priority) {
    EXPECT_EQ(order_of_ends(pagedllm::Order::fcfs), (std::vector<uint64_t>{0, 1}));
    EXPECT_EQ(order_of_ends(pagedllm::Order::priority), (std::vector<uint64_t>{1, 0}));
    Engine engine = Engine::create(host_stepped_options()).value();
    pagedllm::Request request{"Once"};
    request.priority = 101;
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add(request)));
}

TEST(Admission, is_predicted_without_adding_a_request) {
    pagedllm::Options options = host_stepped_options();
    options.max_waiting_requests = 1;
    Engine engine = Engine::create(options).value();
    const std::string prompt = chat(france.question);
    const pagedllm::Admission empty = engine.predict_admission(greedy(prompt)).value();
    EXPECT_TRUE(empty.admits && empty.fits_now);
    EXPECT_FALSE(empty.first_token.has_value()) << "no step has run";
    EXPECT_EQ(empty.waiting_requests, 0u);

    engine.add(greedy(prompt)).value();
    const pagedllm::Admission full = engine.predict_admission(greedy(prompt)).value();
    EXPECT_FALSE(full.admits || full.fits_now);
    EXPECT_EQ(full.waiting_requests, 1u);
    EXPECT_EQ(full.waiting_tokens, engine.tokenize(prompt, false).value().size());
    const auto refused = engine.add(greedy(prompt));
    EXPECT_TRUE(fails(Code::capacity, refused) && refused.error().is_temporary);
    EXPECT_EQ(engine.stats().value().admission_rejections, 1u);

    step_to_the_end(engine);
    const pagedllm::Queue queue = engine.create_queue(4).value();
    const pagedllm::Admission idle = engine.predict_admission(greedy(prompt), queue).value();
    EXPECT_TRUE(idle.admits && idle.fits_now);
    ASSERT_TRUE(idle.first_token.has_value());
    EXPECT_GT(idle.first_token->count(), 0);
    EXPECT_EQ(engine.step().value().unfinished, 0u) << "nothing was added";
}

TEST(Options, for_scheduling_and_swap_reach_the_library) {
    pagedllm::Options options = host_stepped_options();
    const uint64_t plain = Engine::plan(options).value().block_bytes;
    options.kv_dtype = pagedllm::Dtype::int8;
    options.swap_bytes = 1 << 20;
    options.swap_path = testing::TempDir();
    options.preemption = pagedllm::Preemption::automatic;
    options.max_waiting_tokens = 5;
    options.ageing = 3s;
    options.batching = pagedllm::Batching::decode_first;
    options.prefill_budget = 4;
    options.allocation = pagedllm::Allocation::max_tokens;
    const pagedllm::Plan plan = Engine::plan(options).value();
    EXPECT_EQ(plan.kv_dtype, PLLM_DTYPE_INT8);
    EXPECT_LT(plan.block_bytes, plain);
    EXPECT_GT(plan.swap_blocks, 0u);

    Engine engine = Engine::create(options).value();
    EXPECT_EQ(engine.stats().value().swap_blocks_total, plan.swap_blocks);
    const std::string prompt = chat(france.question);
    engine.add(endless(prompt, 100)).value();
    EXPECT_TRUE(fails(Code::capacity, engine.add(greedy(prompt)))) << "max_waiting_tokens";
    EXPECT_EQ(engine.step().value().prefill_tokens, 4u) << "prefill_budget";
    step_to_the_end(engine);
    options.swap_path = "/nonexistent";
    EXPECT_TRUE(fails(Code::io, Engine::create(options)));
}

TEST(Options, with_a_packed_path_save_weights_and_read_them_back) {
    using pagedllm::Packed;
    pagedllm::Options options = host_stepped_options();
    EXPECT_EQ(Engine::create(options).value().model_info().value().packed, Packed::unused);
    options.packed_path = testing::TempDir() + "pagedllm_packed_" + std::to_string(std::random_device()());
    EXPECT_TRUE(fails(Code::io, Engine::create(options)));
    std::filesystem::create_directory(options.packed_path);
    for (const Packed packed : {Packed::saved, Packed::read}) {
        const Engine engine = Engine::create(options).value();
        const pagedllm::ModelInfo info = engine.model_info().value();
        EXPECT_EQ(info.packed, packed);
        EXPECT_EQ(info.packed_reason, packed == Packed::saved ? "no packed weights yet" : "");
    }
    std::filesystem::remove_all(options.packed_path);
}

TEST(Options, with_paths_write_a_trace_and_a_journal) {
    const std::string dir = testing::TempDir() + "pagedllm_paths_" + std::to_string(std::random_device()());
    std::filesystem::create_directory(dir);
    pagedllm::Options options = light_options();
    options.trace_path = dir + "/trace.json";
    options.journal_path = dir + "/journal";
    {
        Engine engine = Engine::create(options).value();
        const std::string prompt = chat(france.question);
        EXPECT_TRUE(ok(engine.generate(greedy(prompt))));
        EXPECT_EQ(engine.stats().value().traces_stopped + engine.stats().value().journals_stopped, 0u);
    }
    std::stringstream trace;
    trace << std::ifstream(options.trace_path).rdbuf();
    EXPECT_NE(trace.str().find("prefill"), std::string::npos);
    EXPECT_GT(std::filesystem::file_size(options.journal_path), 0u);
    std::filesystem::remove_all(dir);
}

TEST(Timing, is_in_the_last_output) {
    Engine engine = open_engine();
    const std::string prompt = chat("Tell me a short story about a small ship and the sea.");
    const pagedllm::Completion first = engine.generate(endless(prompt, 30)).value();
    EXPECT_GT(first.timing.queued.count(), 0);
    EXPECT_GT(first.timing.first_token, first.timing.queued);
    EXPECT_GT(first.timing.last_token, first.timing.first_token);
    EXPECT_LT(first.timing.last_token, timeout_limit);
    EXPECT_EQ(first.cached_tokens + first.preemptions, 0u);
    EXPECT_GT(engine.generate(endless(prompt, 30)).value().cached_tokens, 0u);
    pagedllm::Stream stream = engine.stream(endless(prompt, 30)).value();
    for (const pagedllm::Output &output : stream) EXPECT_EQ(output.timing.last_token.count() > 0, output.is_last());
}

TEST(Metrics, are_an_openmetrics_text) {
    Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    const pagedllm::Completion answer = engine.generate(greedy(prompt)).value();
    const std::string text = engine.metrics().value();
    EXPECT_NE(text.find("pagedllm_generation_tokens_total{"), std::string::npos) << text;
    EXPECT_NE(text.find("} " + std::to_string(answer.tokens.size()) + "\n"), std::string::npos) << text;
    EXPECT_EQ(text.substr(text.size() - 6), "# EOF\n");
}

TEST(Snapshot, has_the_blocks_and_the_steps) {
    Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    EXPECT_TRUE(engine.generate(greedy(prompt)));
    const std::string text = engine.snapshot().value();
    EXPECT_NE(text.find(",\"cached\"]"), std::string::npos) << text;
    EXPECT_NE(text.find("\"decode_tokens\":1"), std::string::npos) << text;
    EXPECT_NE(engine.snapshot(0, 0).value().find("\"runs\":[]"), std::string::npos);
}

TEST(KvEvents, give_the_blocks_of_a_prompt_with_the_hashes_of_hash_prompt) {
    pagedllm::Options options = light_options();
    options.kv_events_capacity = 1000;
    Engine engine = Engine::create(options).value();
    std::string prompt = "One";
    for (int i = 0; i < 40; i++) prompt += " and one";
    const pagedllm::Request request = endless(prompt, 40);
    const std::vector<std::string> hashes = engine.hash_prompt(request).value();
    ASSERT_GE(hashes.size(), 2u);
    ASSERT_TRUE(ok(engine.generate(request)));
    const pagedllm::KvEvents events = engine.poll_kv_events(1s).value();
    ASSERT_GE(events.size(), hashes.size());
    for (size_t i = 0; i < hashes.size(); i++) {
        EXPECT_EQ(events[i].kind, pagedllm::KvEventKind::stored);
        EXPECT_EQ(events[i].medium, pagedllm::KvMedium::pool);
        EXPECT_EQ(events[i].hash, hashes[i]);
        EXPECT_EQ(events[i].first_token, 16 * i);
        EXPECT_EQ(events[i].tokens.size(), 16u);
        EXPECT_GT(events[i].time.count(), 1e9);
        EXPECT_EQ(events[i].parent_hash == hashes[i - (i > 0)], i > 0);
    }
    EXPECT_TRUE(engine.poll_kv_events().value().empty());
    const pagedllm::KvEvents all = engine.snapshot_kv_events().value();
    EXPECT_EQ(all[0].kind, pagedllm::KvEventKind::cleared);
    EXPECT_TRUE(all[0].hash.empty() && all[0].tokens.empty());
    EXPECT_EQ(all.size(), events.size() + 1);
    EXPECT_TRUE(fails(Code::invalid_argument, engine.hash_prompt(request, 1)));
    EXPECT_TRUE(fails(Code::unsupported, open_engine().poll_kv_events()));
    EXPECT_TRUE(fails(Code::unsupported, open_engine().snapshot_kv_events()));
}
