// Several results, beams, grammars, log probabilities, kinds of output, and logits hooks.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <set>

#include "support.hpp"

static pagedllm::Request drawing(uint32_t tokens, uint32_t n) {
    pagedllm::Request request{"Once upon"};
    request.sampling.temperature = 1.5f;
    request.sampling.seed = 7;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = tokens;
    request.n = n;
    return request;
}

TEST(Results, have_the_requested_number) {
    pagedllm::Engine engine = open_engine();
    const auto all = engine.generate_all(drawing(20, 3)).value();
    ASSERT_EQ(all.size(), 3u);
    for (size_t i = 0; i < 3; i++) {
        EXPECT_TRUE(ok(all[i].status));
        EXPECT_EQ(all[i].finish_reason, FinishReason::length);
        EXPECT_EQ(all[i].tokens.size(), 20u);
        EXPECT_EQ(all[i].sequence, all[0].sequence + i);
    }
    EXPECT_EQ(all[0].tokens, engine.generate(drawing(20, 1)).value().tokens);
    EXPECT_TRUE(all[0].tokens != all[1].tokens && all[1].tokens != all[2].tokens);
    const auto later = engine.generate_all_async(drawing(20, 3)).get().value();
    for (size_t i = 0; i < 3; i++) EXPECT_EQ(later[i].tokens, all[i].tokens);
    EXPECT_TRUE(is_idle(engine));
}

TEST(Results, arrive_in_one_stream_that_ends_with_the_last_result) {
    pagedllm::Engine engine = open_engine();
    pagedllm::Stream stream = engine.stream(drawing(20, 3)).value();
    size_t tokens[3] = {}, ends = 0;
    for (const pagedllm::Output &output : stream) {
        ASSERT_LT(output.index, 3u);
        tokens[output.index] += output.tokens.size();
        ends += output.is_last();
    }
    EXPECT_EQ(ends, 3u);
    for (const size_t each : tokens) EXPECT_EQ(each, 20u);
    EXPECT_TRUE(ok(stream.status()));
}

TEST(Results, are_all_aborted_when_their_stream_is_destroyed) {
    pagedllm::Engine engine = open_engine();
    (void)engine.stream(drawing(PLLM_UNLIMITED_TOKENS, 3)).value().next();
    EXPECT_TRUE(eventually([&] { return engine.stats().value().finished_abort == 3 && is_idle(engine); }));
}

TEST(Results, have_their_own_errors) {
    std::optional<pagedllm::Stream> stream;
    {
        pagedllm::Engine engine = open_engine();
        stream = engine.stream(drawing(PLLM_UNLIMITED_TOKENS, 2)).value();
        ASSERT_TRUE(stream->next().has_value());
    }
    const auto all = stream->collect_all().value();
    ASSERT_EQ(all.size(), 2u);
    for (const pagedllm::Completion &one : all) EXPECT_TRUE(fails(Code::closed, one.status));
    EXPECT_TRUE(fails(Code::closed, stream->status()));
}

TEST(Completion, keeps_the_first_error) {
    pagedllm::Completion completion;
    pllm_output record{};
    record.struct_size = sizeof record;
    for (const auto &[code, message] : {std::pair{PLLM_E_MODEL, "first"}, {PLLM_E_INTERNAL, "second"}}) {
        record.error_code = code;
        record.error = message;
        record.error_len = std::string_view(message).size();
        completion.add(pagedllm::Output(record), pagedllm::OutputKind::delta);
    }
    ASSERT_FALSE(completion.status.ok());
    EXPECT_EQ(completion.status.error().code, Code::model);
    EXPECT_EQ(completion.status.error().message, "first");
}

// Makes the logits of one sequence non-finite.
static void break_logits(void *broken, uint64_t sequence, const uint32_t *, uint64_t, float *logits,
                         uint64_t vocab_size) noexcept {
    if (sequence == *static_cast<const uint64_t *>(broken)) {
        std::fill(logits, logits + vocab_size, std::numeric_limits<float>::quiet_NaN());
    }
}

TEST(Stream, keeps_the_first_error) {
    static uint64_t first_request = 1;
    std::optional<pagedllm::Stream> stream;
    {
        pagedllm::Engine engine = open_engine();
        pagedllm::Request request = drawing(PLLM_UNLIMITED_TOKENS, 2);
        request.logits_hook = break_logits;
        request.hook_data = &first_request;
        stream = engine.stream(request, 1).value();
        while (stream->status()) ASSERT_TRUE(stream->next().has_value());
    }
    const pagedllm::Error first = stream->status().error();
    EXPECT_NE(first.code, Code::closed);  // the error of the second result
    while (stream->next()) {
    }
    EXPECT_EQ(stream->status().error().message, first.message);
}

TEST(Results, of_a_kept_request_are_sequences_with_an_index_each) {
    pagedllm::Engine engine = open_engine();
    pagedllm::Request request = drawing(4, 3);
    request.keep = true;
    const auto all = engine.generate_all(request).value();
    pagedllm::Resume how;
    how.sampling.max_tokens = 2;
    how.sampling.ignore_eos = true;
    for (uint32_t i = 0; i < 3; i++) {
        pagedllm::Sequence sequence = engine.sequence(all[i].sequence);
        EXPECT_EQ(sequence.info().value().index, i);
        EXPECT_EQ(sequence.info().value().request, all[0].sequence);
        EXPECT_EQ(sequence.generate(how).value().tokens.size(), 2u);
    }
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
}

TEST(BestOf, returns_the_best_samples_first) {
    pagedllm::Engine engine = open_engine();
    pagedllm::Request request = drawing(10, 6);
    request.sampling.logprobs = true;
    std::vector<double> scores;
    for (const auto &sample : engine.generate_all(request).value()) scores.push_back(sample.score);
    std::sort(scores.rbegin(), scores.rend());
    request.n = 2;
    request.best_of = 6;
    const auto best = engine.generate_all(request).value();
    ASSERT_EQ(best.size(), 2u);
    EXPECT_EQ(best[0].score, scores[0]);
    EXPECT_EQ(best[1].score, scores[1]);
}

TEST(Beams, are_sorted_by_score) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.n = 3;
    request.beam = pagedllm::Beam();
    const auto beams = engine.generate_all(request).value();
    ASSERT_EQ(beams.size(), 3u);
    EXPECT_EQ(beams[0].text, france.answer);
    for (size_t i = 1; i < 3; i++) {
        EXPECT_GE(beams[i - 1].score, beams[i].score);
        EXPECT_NE(beams[i - 1].text, beams[i].text);
    }
    request.beam->length_penalty = 0;  // sums of log probabilities, not means
    EXPECT_LT(engine.generate_all(request).value()[0].score, beams[0].score);
}

TEST(Grammar, constrains_the_output) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    const auto text = [&](pagedllm::Grammar grammar) {
        request.sampling.grammar = std::move(grammar);
        return engine.generate(request).value().text;
    };
    // The grammar has one text, except for white space.
    std::string json = text(pagedllm::Grammar::json_schema(
        R"({"type": "object", "properties": {"a": {"const": true}}, "required": ["a"], "additionalProperties": false})"));
    const auto is_space = [](char c) { return " \n\t\r"sv.find(c) != std::string_view::npos; };
    json.erase(std::remove_if(json.begin(), json.end(), is_space), json.end());
    EXPECT_EQ(json, R"({"a":true})");
    const std::string digits = text(pagedllm::Grammar::regex("[0-9]{5}"));
    EXPECT_TRUE(digits.size() == 5 && digits.find_first_not_of("0123456789") == std::string::npos) << digits;
    const std::set<std::string> cities = {"Berlin", "Rome", "Ro\"m"};
    EXPECT_EQ(cities.count(text(pagedllm::Grammar::choice({cities.begin(), cities.end()}))), 1u);
    EXPECT_EQ(text(pagedllm::Grammar::lark("start: \"yes\"")), "yes");
    request.sampling.max_tokens = 5;
    EXPECT_EQ(text(pagedllm::Grammar::json_object()).front(), '{');
}

TEST(Logprobs, include_the_most_probable_tokens) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.sampling.logprobs = request.sampling.prompt_logprobs = true;
    request.sampling.top_logprobs = 5;
    request.sampling.prompt_top_logprobs = 3;
    size_t prompt_tokens = 0, tokens = 0;
    for (const pagedllm::Output &output : *engine.stream(request)) {
        for (size_t i = 0; i < output.tokens.size(); i++) {
            const auto top = output.top_logprobs_of(i);
            ASSERT_EQ(top.size(), 5u);
            EXPECT_EQ(top[0].token, output.tokens[i]);
            EXPECT_EQ(top[0].logprob, output.logprobs[i]);
            EXPECT_GE(top[0].logprob, top[4].logprob);
        }
        for (size_t i = 0; i < output.prompt_logprobs.size(); i++) EXPECT_EQ(output.prompt_top_logprobs_of(i).size(), 3u);
        prompt_tokens += output.prompt_logprobs.size();
        tokens += output.tokens.size();
    }
    EXPECT_EQ(prompt_tokens, 15u);
    const pagedllm::Completion whole = engine.generate(request).value();
    EXPECT_EQ(whole.top_logprobs.size(), 5 * tokens);
    EXPECT_EQ(whole.prompt_top_logprobs.size(), 3 * prompt_tokens);
    EXPECT_LT(whole.score, 0);
    EXPECT_TRUE(engine.generate(greedy(prompt)).value().top_logprobs.empty());
}

TEST(Logprobs, of_an_echoed_prompt_begin_with_nan) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.sampling.logprobs = request.sampling.echo = true;
    const pagedllm::Completion whole = engine.generate(request).value();
    ASSERT_EQ(whole.logprobs.size(), whole.tokens.size());
    ASSERT_GT(whole.tokens.size(), whole.prompt_tokens);
    EXPECT_TRUE(std::isnan(whole.logprobs[0]));
    for (size_t i = 1; i < whole.logprobs.size(); i++) EXPECT_LE(whole.logprobs[i], 0) << i;
}

TEST(Logprobs, of_a_prompt_need_no_generated_token) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.sampling.prompt_logprobs = true;
    const std::vector<float> known = engine.generate(request).value().prompt_logprobs;
    for (const std::ptrdiff_t start : {0, 5}) {
        request.sampling.max_tokens = 0;
        request.sampling.prompt_logprobs_start = static_cast<uint64_t>(start);
        const pagedllm::Completion scored = engine.generate(request).value();
        EXPECT_EQ(scored.finish_reason, pagedllm::FinishReason::length);
        EXPECT_TRUE(scored.tokens.empty() && scored.text.empty());
        const std::vector<float> rest(known.begin() + std::max<std::ptrdiff_t>(start, 1) - 1, known.end());
        EXPECT_EQ(scored.prompt_logprobs, rest);
    }
}

TEST(OutputKind, does_not_change_the_result) {
    pagedllm::Engine engine = open_engine();
    pagedllm::Request request = drawing(20, 2);
    request.sampling.logprobs = true;
    const auto want = engine.generate_all(request).value();
    for (const auto kind : {pagedllm::OutputKind::cumulative, pagedllm::OutputKind::final}) {
        request.sampling.output_kind = kind;
        const auto all = engine.generate_all(request).value();
        for (size_t i = 0; i < 2; i++) {
            EXPECT_EQ(all[i].text, want[i].text);
            EXPECT_EQ(all[i].tokens, want[i].tokens);
            EXPECT_EQ(all[i].logprobs, want[i].logprobs);
        }
        size_t outputs = 0;
        for (const pagedllm::Output &output : *engine.stream(request)) outputs += output.index < 2;
        EXPECT_EQ(outputs == 2, kind == pagedllm::OutputKind::final);
    }
}

TEST(Text, includes_the_prompt_with_echo_and_the_stop_string_with_include_stop) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    pagedllm::Request request = greedy(prompt);
    request.skip_special = false;
    request.sampling.echo = true;
    EXPECT_EQ(engine.generate(request).value().text, prompt + france.answer);
    request.sampling.echo = false;
    request.sampling.include_stop = true;
    EXPECT_EQ(engine.generate(request).value().text, france.answer + "<|end|>"s);
    request.truncate_prompt_tokens = 3;
    EXPECT_EQ(engine.generate(request).value().prompt_tokens, 3u);
}

TEST(Tokens, are_restricted_by_allowed_tokens_bad_words_and_bias) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(france.question);
    const auto with = [&](auto change) {
        pagedllm::Request request = greedy(prompt);
        request.sampling.max_tokens = 11;
        change(request.sampling);
        return engine.generate(request).value();
    };
    const auto whole = with([](pagedllm::Sampling &) {});
    EXPECT_EQ(with([](pagedllm::Sampling &s) { s.bad_words = {"Paris"}; }).text.find("Paris"), std::string::npos);
    const auto without_run = with([&](pagedllm::Sampling &s) { s.bad_words_ids = {{whole.tokens[2], whole.tokens[3]}}; });
    EXPECT_EQ(without_run.tokens[2], whole.tokens[2]);
    EXPECT_NE(without_run.tokens[3], whole.tokens[3]);
    for (const uint32_t token : with([](pagedllm::Sampling &s) { s.allowed_token_ids = {300, 279}; }).tokens)
        EXPECT_TRUE(token == 300 || token == 279);
    for (const uint32_t token : with([](pagedllm::Sampling &s) { s.logit_bias = {{300, 100}}; }).tokens) EXPECT_EQ(token, 300u);
}

TEST(EverySamplingParameter, changes_the_result) {
    pagedllm::Engine engine = open_engine();
    const auto plain = engine.generate(drawing(60, 1)).value().tokens;
    const auto differs = [&](const char *name, auto change) {
        pagedllm::Request request = drawing(60, 1);
        change(request.sampling);
        EXPECT_NE(engine.generate(request).value().tokens, plain) << name;
    };
    using S = pagedllm::Sampling;
    differs("typical_p", [](S &s) { s.typical_p = 0.1f; });
    differs("top_n_sigma", [](S &s) { s.top_n_sigma = 0.5f; });
    differs("xtc", [](S &s) { s.xtc_probability = 1, s.xtc_threshold = 0; });
    differs("mirostat", [](S &s) { s.mirostat_tau = 1; });
    differs("presence_penalty", [](S &s) { s.presence_penalty = 2; });
    differs("frequency_penalty", [](S &s) { s.frequency_penalty = 2; });
    differs("repetition_penalty", [](S &s) { s.repetition_penalty = 3; });
    differs("no_repeat_ngram_size", [](S &s) { s.no_repeat_ngram_size = 1; });
    differs("dry", [](S &s) { s.dry = pagedllm::Dry{50, 1.75f, 0, 0, {{"\n"}}}; });
}

TEST(Sampling, empty_dry_breakers_differ_from_the_default_breakers) {
    pagedllm::Engine engine = open_engine();
    const std::vector<uint32_t> colon = engine.tokenize(":", false).value();
    ASSERT_EQ(colon.size(), 1u);
    const auto repeats = [&](std::optional<std::vector<std::string>> breakers) {
        pagedllm::Request request{"Hello"};
        request.sampling.temperature = 0;
        request.sampling.max_tokens = 12;
        request.sampling.ignore_eos = true;
        request.sampling.logit_bias = {{colon[0], 90}};
        request.sampling.dry = pagedllm::Dry{100, 4, 1, 0, std::move(breakers)};
        const std::vector<uint32_t> tokens = engine.generate(request).value().tokens;
        return std::count(tokens.begin(), tokens.end(), colon[0]);
    };
    EXPECT_EQ(repeats(std::nullopt), 12);
    EXPECT_EQ(repeats({{"?", ":"}}), 12);
    EXPECT_LT(repeats({{"?"}}), 12);
    EXPECT_LT(repeats(std::vector<std::string>{}), 12);
}

// Selects token 300 and counts its calls.
static void select_300(void *calls, uint64_t, const uint32_t *tokens, uint64_t tokens_len, float *logits,
                     uint64_t vocab_size) noexcept {
    ++*static_cast<std::atomic<int> *>(calls);
    if (tokens_len > 0 && tokens[0] < vocab_size) logits[300] = 1000;
}
template <class Hook>
constexpr bool is_hook = std::is_convertible_v<Hook, pagedllm::LogitsHook>;
static_assert(is_hook<decltype(&select_300)>);
static_assert(!is_hook<void (*)(void *, uint64_t, const uint32_t *, uint64_t, float *, uint64_t)>, "a hook must be noexcept");

TEST(LogitsHook, edits_the_logits_of_every_token_of_its_request) {
    pagedllm::Engine engine = open_engine();
    // Static, because ThreadSanitizer does not see that the library synchronizes its threads.
    static std::atomic<int> calls{0};
    pagedllm::Request request = drawing(5, 1);
    request.logits_hook = select_300;
    request.hook_data = &calls;
    request.keep = true;
    const auto all = engine.generate(request).value();
    EXPECT_EQ(all.tokens, std::vector<uint32_t>(5, 300));
    EXPECT_EQ(calls, 5);
    pagedllm::Sequence sequence = engine.sequence(all.sequence);
    pagedllm::Resume how;
    how.sampling = request.sampling;
    EXPECT_EQ(sequence.generate(how).value().tokens.size(), 5u);
    EXPECT_EQ(calls, 5);  // a new turn has the hook of its Resume, here none
    how.logits_hook = select_300;
    how.hook_data = &calls;
    EXPECT_EQ(sequence.generate(how).value().tokens, std::vector<uint32_t>(5, 300));
    EXPECT_EQ(calls, 10);
}
