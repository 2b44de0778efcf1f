// generate, futures and streams, with and without the engine's own thread.
#include <atomic>
#include <future>

#include "support.hpp"

TEST(Generate, returns_the_answer_and_its_counts) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.sampling.logprobs = true;
    const pagedllm::Completion answer = engine.generate(request).value();
    EXPECT_EQ(answer.text, france.answer);
    EXPECT_EQ(answer.finish_reason, FinishReason::stop);
    EXPECT_EQ(answer.prompt_tokens, engine.tokenize(prompt, false).value().size());
    EXPECT_EQ(answer.generated_tokens, answer.tokens.size());
    EXPECT_EQ(answer.logprobs.size(), answer.tokens.size());
    EXPECT_TRUE(is_idle(engine));
}

TEST(ResponseParser, separates_content_and_tool_calls) {
    pagedllm::Engine engine = open_engine();
    auto parser = pagedllm::ResponseParser::create(engine, R"({"format": "hermes"})").value();
    EXPECT_EQ(parser.feed("Hi <tool_call>{\"name").value(), R"([{"content":"Hi"}])");
    const std::string call = parser.feed("\": \"f\", \"arguments\": {}}").value();
    EXPECT_NE(call.find(R"("id":"call_0")"), std::string::npos) << call;
    EXPECT_EQ(parser.feed({}).value(), "[]");
    EXPECT_EQ(parser.finish().value(), "[]");
    EXPECT_TRUE(fails(Code::invalid_argument, parser.finish()));
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::ResponseParser::create("{}")));
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::ResponseParser::create(engine, R"({"format": "x"})")));
    EXPECT_TRUE(pagedllm::ResponseParser::create(R"({"format": "json"})"));
}

TEST(Generate, accepts_text_and_tokens) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    const std::vector<uint32_t> tokens = engine.tokenize(prompt, false).value();
    pagedllm::Sampling greedy;
    greedy.temperature = 0;
    EXPECT_EQ(engine.generate({tokens, greedy}).value().text, france.answer);
    // The prompt has its special tokens. add_special adds one more.
    const pagedllm::Completion twice = engine.generate({prompt, greedy}).value();
    EXPECT_EQ(twice.prompt_tokens, engine.tokenize(prompt).value().size());
    greedy.max_tokens = 4;
    const pagedllm::Completion shortened = engine.generate({tokens, greedy}).value();
    EXPECT_EQ(shortened.finish_reason, FinishReason::length);
    EXPECT_EQ(shortened.tokens.size(), 4u);
}

TEST(Generate, ends_at_stop_strings_and_stop_tokens) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    const pagedllm::Completion whole = engine.generate(request).value();
    request.sampling.stop = {"never generated", "e is P"};
    const pagedllm::Completion stopped = engine.generate(request).value();
    EXPECT_EQ(stopped.text, "The capital of Franc");
    EXPECT_EQ(stopped.finish_reason, FinishReason::stop);
    request.sampling.stop = {};
    request.sampling.stop_token_ids = {whole.tokens[3]};
    EXPECT_EQ(engine.generate(request).value().tokens.size(), 4u);
}

static void expect_stop(const pagedllm::Completion &answer, StopReason reason, uint32_t token, const std::string &string) {
    EXPECT_EQ(answer.finish_reason, FinishReason::stop);
    EXPECT_EQ(answer.stop_reason, reason);
    EXPECT_EQ(answer.stop_token, token);
    EXPECT_EQ(answer.stop_string, string);
}

TEST(StopReason, has_the_token_or_the_string_that_ended_the_sequence) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    const pagedllm::Completion whole = engine.generate(request).value();
    expect_stop(whole, StopReason::eos, 5, "");  // <|end|>
    for (const auto kind : {pagedllm::OutputKind::delta, pagedllm::OutputKind::cumulative, pagedllm::OutputKind::final}) {
        request.sampling.output_kind = kind;
        request.sampling.stop = {"never generated", "e is P"};
        expect_stop(engine.generate(request).value(), StopReason::string, 0, "e is P");
        request.sampling.stop = {};
        request.sampling.stop_token_ids = {whole.tokens[3]};
        expect_stop(engine.generate(request).value(), StopReason::token, whole.tokens[3], "");
        request.sampling.stop_token_ids = {};
    }
    request.sampling.grammar = pagedllm::Grammar::choice({"Rome", "Berlin"});
    expect_stop(engine.generate(request).value(), StopReason::grammar, 0, "");
}

TEST(StopReason, is_none_if_the_sequence_ends_for_another_reason) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    const pagedllm::Completion shortened = engine.generate(endless(prompt, 4)).value();
    EXPECT_EQ(shortened.finish_reason, FinishReason::length);
    EXPECT_EQ(shortened.stop_reason, StopReason::none);
    EXPECT_EQ(shortened.stop_token, 0u);
    EXPECT_EQ(shortened.stop_string, "");
}

TEST(StopReason, is_in_the_last_output_only) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.sampling.stop = {"Paris"};
    pagedllm::Stream stream = engine.stream(request).value();
    for (const pagedllm::Output &output : stream) {
        EXPECT_EQ(output.stop_reason, output.is_last() ? StopReason::string : StopReason::none);
        EXPECT_EQ(output.stop_string, output.is_last() ? "Paris" : "");
        EXPECT_EQ(output.stop_token, 0u);
    }
    EXPECT_TRUE(ok(stream.status()));
}

TEST(StopReason, keeps_values_of_newer_libraries) {
    pllm_output record{};
    record.struct_size = sizeof record;
    record.finish_reason = record.stop_reason = 99;
    const pagedllm::Output output(record);
    EXPECT_TRUE(output.is_last());
    EXPECT_EQ(output.finish_reason, FinishReason(99));
    EXPECT_EQ(output.stop_reason, StopReason(99));
}

TEST(StopReason, is_none_in_outputs_of_an_older_library) {
    pllm_output record{};
    record.finish_reason = PLLM_FINISH_STOP;
    record.stop_reason = PLLM_STOP_STRING;
    record.stop_string = "x";
    record.stop_string_len = 1;
    record.struct_size = offsetof(pllm_output, stop_reason);
    const pagedllm::Output output(record);
    EXPECT_EQ(output.finish_reason, FinishReason::stop);
    EXPECT_EQ(output.stop_reason, StopReason::none);
    EXPECT_TRUE(output.stop_string.empty());
}

TEST(Generate, refuses_stop_strings_beyond_their_limit_with_value_and_limit) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.sampling.stop = {std::string(16384, 'x')};
    EXPECT_EQ(engine.generate(request).value().text, france.answer);
    request.sampling.stop.push_back("x");
    const pagedllm::Result<pagedllm::Completion> refused = engine.generate(request);
    EXPECT_TRUE(fails(Code::invalid_argument, refused));
    EXPECT_NE(refused.error().message.find("stop is too large (16385 bytes in all, at most 16384)"), std::string::npos);
}

TEST(Generate, repeats_its_tokens_with_a_seed_and_zero_is_a_seed) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat("Tell me a short story.");
    pagedllm::Request request = endless(prompt, 20);
    request.sampling.temperature = 1.5f;
    const auto tokens = [&](std::optional<uint64_t> seed) {
        request.sampling.seed = seed;
        return engine.generate(request).value().tokens;
    };
    EXPECT_EQ(tokens(0), tokens(0));
    EXPECT_NE(tokens(0), tokens(1));
    EXPECT_NE(tokens(std::nullopt), tokens(std::nullopt));
}

static void generate_from_sixteen_threads(pagedllm::Engine &engine) {
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (size_t i = 0; i < 16; i++) {
        threads.emplace_back([&, i] {
            for (size_t j = 0; j < 3; j++) {
                const Dialogue &dialogue = dialogues[(i + j) % std::size(dialogues)];
                const std::string prompt = chat(dialogue.question);
                const auto answer = engine.generate(greedy(prompt));
                EXPECT_TRUE(ok(answer));
                right += answer.ok() && answer->text == dialogue.answer;
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(right, 16 * 3);
    EXPECT_TRUE(is_idle(engine));
}

TEST(Generate, works_from_sixteen_threads_if_the_engine_steps) {
    pagedllm::Engine engine = open_engine();
    generate_from_sixteen_threads(engine);
}

TEST(Generate, works_from_sixteen_threads_if_the_host_steps) {
    pagedllm::Engine engine = host_stepped_engine();
    std::atomic<bool> answered{false};
    std::thread stepper([&] {
        while (!answered) engine.step().value();
    });
    generate_from_sixteen_threads(engine);
    answered = true;
    stepper.join();
}

TEST(Generate, continues_after_the_engine_is_stopped_and_started) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    auto answer = engine.generate_async(endless(prompt, 300));
    const auto generated = [&] { return engine.stats().value().generated_tokens; };
    for (uint64_t tokens = 50; tokens <= 200; tokens += 50) {
        EXPECT_TRUE(eventually([&] { return generated() >= tokens; }));
        EXPECT_TRUE(ok(engine.stop()) && ok(engine.start()));
    }
    EXPECT_EQ(answer.get().value().tokens.size(), 300u);
}

TEST(Generate, ends_when_another_thread_aborts_it) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Stream stream = engine.stream(endless(prompt)).value();
    ASSERT_TRUE(stream.next().has_value());
    std::thread([&] { EXPECT_TRUE(ok(engine.abort(stream.request()))); }).join();
    const pagedllm::Completion rest = stream.collect().value();
    EXPECT_EQ(rest.finish_reason, FinishReason::abort);
    EXPECT_TRUE(ok(stream.status()));
}

TEST(Future, returns_the_answer_after_the_prompt_is_destroyed) {
    pagedllm::Engine engine = open_engine();
    std::vector<std::future<pagedllm::Result<pagedllm::Completion>>> answers;
    for (const Dialogue &dialogue : dialogues) {
        std::string prompt = chat(dialogue.question);
        answers.push_back(engine.generate_async(greedy(prompt)));
        prompt.assign(prompt.size(), '#');
    }
    for (size_t i = 0; i < answers.size(); i++) EXPECT_EQ(answers[i].get().value().text, dialogues[i].answer);
    EXPECT_TRUE(is_idle(engine));
}

TEST(Future, returns_the_error_of_a_refused_request) {
    pagedllm::Engine engine = open_engine();
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate_async({""}).get()));
}

TEST(Future, waits_for_the_end_in_its_destructor) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    (void)engine.generate_async(greedy(prompt));
    EXPECT_EQ(engine.stats().value().finished_stop, 1u);
}

TEST(Stream, returns_each_output_when_it_is_generated) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(japanese.question);
    pagedllm::Stream stream = engine.stream(greedy(prompt)).value();
    std::string text;
    uint64_t outputs = 0, tokens = 0;
    FinishReason finish = FinishReason::none;
    for (const pagedllm::Output &output : stream) {
        EXPECT_EQ(output.request, stream.request());
        EXPECT_EQ(finish, FinishReason::none);
        tokens += output.tokens.size();
        EXPECT_EQ(output.generated_tokens, tokens);
        text += output.text;
        finish = output.finish_reason;
        outputs++;
    }
    EXPECT_TRUE(ok(stream.status()));
    EXPECT_EQ(text, japanese.answer);
    EXPECT_EQ(finish, FinishReason::stop);
    EXPECT_GT(outputs, 5u);
    EXPECT_FALSE(stream.next().has_value());
    EXPECT_EQ(stream.begin(), stream.end());
    EXPECT_TRUE(is_idle(engine));
}

TEST(Stream, destroyed_early_aborts_its_request_and_frees_its_blocks) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    {
        pagedllm::Stream stream = engine.stream(endless(prompt)).value();
        for (int i = 0; i < 3; i++) ASSERT_TRUE(stream.next().has_value());
        EXPECT_GT(engine.stats().value().blocks_used, 0u);
    }
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
    EXPECT_EQ(engine.stats().value().finished_abort, 1u);
}

TEST(Stream, continues_after_a_break) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Stream stream = engine.stream(greedy(prompt)).value();
    std::string text;
    for (const pagedllm::Output &output : stream) {
        text += output.text;
        if (output.generated_tokens == 4) break;
    }
    EXPECT_EQ(text + stream.collect().value().text, france.answer);
}
