// Handles, results, spans and ranges.
#include <array>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "support.hpp"

#if __cplusplus >= 202002L
#include <ranges>
#include <span>
static_assert(std::ranges::input_range<pagedllm::Outputs> && std::ranges::input_range<pagedllm::Stream>);
static_assert(std::is_convertible_v<pagedllm::Span<const uint32_t>, std::span<const uint32_t>>);
static_assert(std::is_convertible_v<std::span<uint32_t>, pagedllm::Span<const uint32_t>>);
#endif

template <class T>
constexpr bool is_move_only = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
                              std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T>;
static_assert(is_move_only<pagedllm::Engine> && is_move_only<pagedllm::Queue>);
static_assert(is_move_only<pagedllm::Outputs> && is_move_only<pagedllm::Stream>);
static_assert(is_move_only<pagedllm::Sequence> && is_move_only<pagedllm::Pin> && is_move_only<pagedllm::Budget>);
static_assert(!std::is_convertible_v<std::vector<uint64_t>, pagedllm::Span<const uint32_t>>);
static_assert(!std::is_convertible_v<const std::vector<uint32_t> &, pagedllm::Span<uint32_t>>);

TEST(Library, has_the_abi_of_its_header) {
    EXPECT_TRUE(ok(pagedllm::check_abi()));
    EXPECT_TRUE(fails(Code::unsupported, pagedllm::check_abi(PLLM_ABI_VERSION + 1)));
    EXPECT_NE(pagedllm::version().find('.'), std::string_view::npos);
    EXPECT_NE(pagedllm::build_info().find(pagedllm::version()), std::string_view::npos);
}

TEST(Defaults, of_options_equal_the_librarys) {
    pllm_engine_options expected;
    pllm_engine_options_init(&expected, sizeof expected);
    const pagedllm::Options options;
    pllm_engine_options c = pagedllm::detail::c_options(options).value();
    EXPECT_EQ(c.model_path_len, 0u);
    c.model_path = expected.model_path;
    c.model_path_len = expected.model_path_len;
    EXPECT_EQ(std::memcmp(&c, &expected, sizeof c), 0);
}

TEST(Defaults, of_requests_equal_the_librarys) {
    pllm_request expected;
    pllm_request_init(&expected, sizeof expected);
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    const pagedllm::Request request{"x"};
    pagedllm::detail::CRequest made(request);
    pllm_request c = *made.to(nullptr);
    EXPECT_EQ(std::memcmp(c.sampling, &sampling, sizeof sampling), 0);
    EXPECT_EQ(c.prompt_len, 1u);
    c.prompt = expected.prompt;
    c.prompt_len = expected.prompt_len;
    c.sampling = expected.sampling;
    EXPECT_EQ(std::memcmp(&c, &expected, sizeof c), 0);
}

TEST(Defaults, of_other_arguments_equal_the_librarys) {
    pllm_dry dry;
    pllm_dry_init(&dry, sizeof dry);
    pllm_beam beam;
    pllm_beam_init(&beam, sizeof beam);
    pagedllm::Request request{"x"};
    request.sampling.dry = pagedllm::Dry();
    request.beam = pagedllm::Beam();
    pagedllm::detail::CRequest made(request);
    const pllm_request &c = *made.to(nullptr);
    EXPECT_EQ(std::memcmp(c.sampling->dry, &dry, sizeof dry), 0);
    EXPECT_EQ(std::memcmp(c.beam, &beam, sizeof beam), 0);

    pllm_resume resume;
    pllm_resume_init(&resume, sizeof resume);
    const pagedllm::Resume how;
    pllm_resume c_resume = *pagedllm::detail::CResume(how).to(nullptr);
    c_resume.sampling = resume.sampling;
    EXPECT_EQ(std::memcmp(&c_resume, &resume, sizeof resume), 0);

    pllm_pin pin;
    pllm_pin_init(&pin, sizeof pin);
    pllm_pin c_pin = pagedllm::detail::c_pin({"x"});
    c_pin.prompt = pin.prompt;
    c_pin.prompt_len = pin.prompt_len;
    EXPECT_EQ(std::memcmp(&c_pin, &pin, sizeof pin), 0);
}

TEST(Result, returns_its_value_or_throws_its_error) {
    pagedllm::Result<std::string> good("value"s), bad(pagedllm::Error{Code::busy, "try later"});
    EXPECT_TRUE(good.ok() && good);
    EXPECT_EQ(*good, "value");
    EXPECT_EQ(good->size(), 5u);
    EXPECT_EQ(good.value(), "value");
    EXPECT_EQ(std::move(good).value(), "value");
    EXPECT_FALSE(bad.ok() || bad);
    EXPECT_EQ(bad.error().code, Code::busy);
    try {
        (void)bad.value();
        FAIL() << "it did not throw";
    } catch (const pagedllm::Exception &exception) {
        EXPECT_EQ(exception.code(), Code::busy);
        EXPECT_STREQ(exception.what(), "try later");
    }
    const pagedllm::Error too_long{Code::invalid_argument, "too long", 7, 5};
    try {
        pagedllm::Status(too_long).value();
        FAIL() << "it did not throw";
    } catch (const pagedllm::Exception &exception) {
        EXPECT_EQ(exception.prompt_tokens(), 7u);
        EXPECT_EQ(exception.max_model_len(), 5u);
    }
    const pagedllm::Status done, not_done(pagedllm::Error{Code::closed, "closed"});
    EXPECT_TRUE(done.ok());
    EXPECT_NO_THROW(done.value());
    EXPECT_THROW(not_done.value(), pagedllm::Exception);
}

TEST(Span, views_contiguous_containers) {
    const std::vector<uint32_t> vector = {1, 2, 3};
    const std::array<uint32_t, 3> array = {1, 2, 3};
    const uint32_t plain[] = {1, 2, 3};
    for (const pagedllm::Span<const uint32_t> &span : {pagedllm::Span<const uint32_t>(vector), {array}, {plain}, {plain, 3}}) {
        EXPECT_EQ(span.size(), 3u);
        EXPECT_EQ(std::accumulate(span.begin(), span.end(), 0u), 6u);
        EXPECT_EQ(span[2], 3u);
    }
    EXPECT_TRUE(pagedllm::Span<const uint32_t>().empty());
}

TEST(Engine, keeps_its_requests_when_it_is_moved) {
    pagedllm::Engine first = open_engine();
    const std::string prompt = chat(france.question);
    first.add(greedy(prompt)).value();
    pagedllm::Engine second = std::move(first);
    EXPECT_EQ(read_to_the_end(second.queue()).text, france.answer);
    first = std::move(second);
    EXPECT_EQ(first.generate(greedy(prompt)).value().text, france.answer);
}

TEST(Engine, is_healthy_while_it_works) {
    pagedllm::Engine engine = open_engine();
    EXPECT_TRUE(ok(engine.health()));
    const std::string prompt = chat(france.question);
    const pagedllm::Stream stream = engine.stream(endless(prompt)).value();
    EXPECT_TRUE(ok(engine.health()));
    EXPECT_TRUE(ok(engine.stop()));  // a stopped engine can be started again
    EXPECT_TRUE(ok(engine.health()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate({""})));
    EXPECT_TRUE(ok(engine.health()));
}

TEST(Engine, returns_errors_after_it_is_moved_from) {
    pagedllm::Engine engine = host_stepped_engine(), other = std::move(engine);
    const pagedllm::Queue queue = other.create_queue(4).value();
    const pagedllm::Request request{"hello"};
    EXPECT_EQ(engine.native(), nullptr);
    EXPECT_TRUE(fails(Code::invalid_argument, engine.health()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.model_info()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.stats()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.metrics()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.budget().info()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.budget().resize(1 << 24)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.predict_admission(request)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.predict_admission(request, queue)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.start()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.stop()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.step()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add(request)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add(request, queue)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.abort(1)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.queue().poll()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.queue().event_fd()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.create_queue(4)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.stream(request)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate(request)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate_async(request).get()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate_all(request)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate_all_async(request).get()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.sequence(1).info()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.pin({"hello"})));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.tokenize("a")));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.detokenize(std::vector<uint32_t>{5})));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.token_bytes(5)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.render_chat("[]")));
}

TEST(Queue, returns_errors_after_it_is_moved_from_and_does_not_select_the_engines_queue) {
    pagedllm::Engine engine = host_stepped_engine();
    const std::string prompt = chat(cow.question);
    pagedllm::Queue first = engine.create_queue(4).value(), second = std::move(first);
    EXPECT_TRUE(fails(Code::invalid_argument, first.poll()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.event_fd()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add(greedy(prompt), first)));
    EXPECT_EQ(engine.step().value().unfinished, 0u);
    first = std::move(second);
    engine.add(greedy(prompt), first).value();
    engine.step().value();
    EXPECT_FALSE(first.poll().value().empty());
}

TEST(Queue, aborts_its_requests_when_it_is_assigned_to) {
    pagedllm::Engine engine = host_stepped_engine();
    const std::string prompt = chat(cow.question);
    pagedllm::Queue queue = engine.create_queue(4).value();
    engine.add(endless(prompt), queue).value();
    queue = engine.create_queue(4).value();
    EXPECT_EQ(engine.step().value().unfinished, 0u);
    EXPECT_EQ(engine.stats().value().finished_abort, 1u);
    EXPECT_TRUE(queue.poll().value().empty());
}

TEST(Stream, can_be_moved_early_and_ends_after_it_is_moved_from) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Stream first = engine.stream(greedy(prompt)).value();
    std::string text;
    for (int i = 0; i < 3; i++) text += first.next()->text;
    pagedllm::Stream second = std::move(first);
    EXPECT_FALSE(first.next().has_value());
    EXPECT_TRUE(fails(Code::invalid_argument, first.status()));
    EXPECT_EQ(text + second.collect().value().text, france.answer);
    EXPECT_TRUE(is_idle(engine));
}

TEST(Outputs, are_a_range_that_can_outlive_its_engine) {
    pagedllm::Outputs outputs;
    EXPECT_TRUE(outputs.empty() && outputs.begin() == outputs.end());
    std::vector<uint64_t> ids;
    {
        pagedllm::Engine engine = host_stepped_engine();
        for (uint64_t i = 0; i < 3; i++) {
            const std::string prompt = chat(france.question);
            pagedllm::Request request = greedy(prompt);
            request.user_data = 100 + i;
            request.sampling.logprobs = i == 1;
            ids.push_back(engine.add(request).value());
        }
        step_to_the_end(engine);
        outputs = engine.queue().poll().value();
    }
    ASSERT_GT(outputs.size(), 3u);
    std::string texts[3];
    size_t seen = 0;
    for (const pagedllm::Output &output : outputs) {
        const uint64_t which = output.user_data - 100;
        ASSERT_LT(which, 3u);
        EXPECT_EQ(output.request, ids[which]);
        EXPECT_EQ(output.request, outputs[seen].request);
        EXPECT_EQ(output.text.data(), outputs[seen].text.data());
        EXPECT_EQ(output.logprobs.size(), which == 1 ? output.tokens.size() : 0);
        EXPECT_TRUE(output.error_message.empty());
        texts[which] += output.text;
        seen++;
    }
    EXPECT_EQ(seen, outputs.size());
    for (const std::string &text : texts) EXPECT_EQ(text, france.answer);
    pagedllm::Outputs moved = std::move(outputs);
    EXPECT_EQ(moved.size(), seen);
    EXPECT_TRUE(outputs.empty() && outputs.begin() == outputs.end());
}
