// Invalid input is refused with a code and the library's message, and the engine continues.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>

#include "support.hpp"

struct InvalidOption {
    Code code;
    std::function<void(pagedllm::Options &)> change;
};

static void expect_refused(const InvalidOption &invalid, int line) {
    SCOPED_TRACE("line " + std::to_string(line));
    pagedllm::Options options = light_options();
    invalid.change(options);
    EXPECT_TRUE(fails(invalid.code, pagedllm::Engine::plan(options)));
    EXPECT_TRUE(fails(invalid.code, pagedllm::Engine::create(options)));
}
#define REFUSED(code, assignment) \
    expect_refused({Code::code, [](pagedllm::Options &options) { options.assignment; }}, __LINE__)

TEST(InvalidOptions, are_refused_with_code_and_message) {
    REFUSED(invalid_argument, model_path = "");
    REFUSED(invalid_argument, model_path = "\xff");
    REFUSED(io, model_path = "/nonexistent/model");
    REFUSED(io, model_path = "a\0b"s);
    REFUSED(io, model_path += "/config.json");
    REFUSED(unsupported, device = "cuda:99");
    REFUSED(unsupported, memory_fraction = 0.5f);
    REFUSED(unsupported, device = "toaster");
    REFUSED(invalid_argument, device = "\xff");
    REFUSED(invalid_argument, kv_dtype = pagedllm::Dtype(9));
    REFUSED(invalid_argument, weight_format = pagedllm::Weights(9));
    REFUSED(invalid_argument, weight_group = 32);
    REFUSED(invalid_argument, threads = 10000);
    REFUSED(invalid_argument, cpus = "0-,1");
    REFUSED(invalid_argument, isa = pagedllm::Isa(9));
    REFUSED(invalid_argument, block_size = 12);
    REFUSED(invalid_argument, block_size = 0);
    REFUSED(invalid_argument, threads = 100000);
    REFUSED(invalid_argument, max_batch_tokens = 0);
    REFUSED(invalid_argument, max_seqs = 0);
    REFUSED(invalid_argument, max_seqs = 100000);
    REFUSED(invalid_argument, max_model_len = 1);
    REFUSED(invalid_argument, max_model_len = 1u << 30);
    REFUSED(capacity, kv_bytes = 1);
    REFUSED(invalid_argument, preemption = pagedllm::Preemption(9));
    REFUSED(invalid_argument, preemption = pagedllm::Preemption::swap);  // without swap_bytes
    REFUSED(invalid_argument, order = pagedllm::Order(9));
    REFUSED(invalid_argument, batching = pagedllm::Batching(9));
    REFUSED(invalid_argument, allocation = pagedllm::Allocation(9));
    REFUSED(invalid_argument, ageing = -1ms);
    REFUSED(invalid_argument, ageing = std::chrono::milliseconds(int64_t{UINT32_MAX} + 1));
}

TEST(InvalidModel, is_refused_with_code_and_message) {
    const std::string dir = testing::TempDir() + "pagedllm_bad_model_" + std::to_string(std::random_device()());
    pagedllm::Options options = light_options();
    std::filesystem::create_directory(dir);
    for (const auto &file : std::filesystem::directory_iterator(options.model_path))
        std::filesystem::create_symlink(std::filesystem::absolute(file), dir + "/" + file.path().filename().string());
    options.model_path = dir;
    EXPECT_TRUE(ok(pagedllm::Engine::create(options)));
    std::filesystem::remove(dir + "/config.json");
    EXPECT_TRUE(fails(Code::io, pagedllm::Engine::create(options)));
    std::ofstream(dir + "/config.json") << "{\"architectures\": [";
    EXPECT_TRUE(fails(Code::model, pagedllm::Engine::create(options)));
    std::ofstream(dir + "/config.json") << "{\"architectures\": [\"ToasterForCausalLM\"]}";
    EXPECT_TRUE(fails(Code::unsupported, pagedllm::Engine::create(options)));
    std::filesystem::remove_all(dir);
}

// Checks after each test that the engine still answers.
class InvalidArguments : public testing::Test {
protected:
    void TearDown() override {
        const std::string prompt = chat(france.question);
        EXPECT_EQ(engine.generate(greedy(prompt)).value().text, france.answer);
        EXPECT_TRUE(is_idle(engine));
    }

    void expect_refused(Code code, const pagedllm::Request &request, int line) {
        SCOPED_TRACE("line " + std::to_string(line));
        EXPECT_TRUE(fails(code, engine.add(request)));
        EXPECT_TRUE(fails(code, engine.generate(request)));
        EXPECT_TRUE(fails(code, engine.stream(request)));
        EXPECT_TRUE(fails(code, engine.generate_async(request).get()));
    }

    pagedllm::Engine engine = open_engine();
};

#define REQUEST_REFUSED(code, assignment)            \
    do {                                             \
        pagedllm::Request request{"hello"};          \
        request.assignment;                          \
        expect_refused(Code::code, request, __LINE__); \
    } while (0)

TEST_F(InvalidArguments, prompt_is_refused) {
    const std::vector<uint32_t> none, unknown = {1, 4000000000}, beyond = {1024}, many(5000, 1);
    const std::string long_text(20000, 'x');
    REQUEST_REFUSED(invalid_argument, prompt = "");
    REQUEST_REFUSED(invalid_argument, prompt = std::string_view());
    REQUEST_REFUSED(invalid_argument, prompt = none);
    REQUEST_REFUSED(invalid_argument, prompt = pagedllm::Span<const uint32_t>());
    REQUEST_REFUSED(invalid_argument, prompt = unknown);
    REQUEST_REFUSED(invalid_argument, prompt = beyond);
    REQUEST_REFUSED(invalid_argument, prompt = many);
    REQUEST_REFUSED(invalid_argument, prompt = long_text);
    for (const char *text : {"\xff", "ab\xc3", "\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80", "a\x80z"}) {
        REQUEST_REFUSED(invalid_argument, prompt = text);
        REQUEST_REFUSED(invalid_argument, sampling.stop = {text});
    }
    const auto empty = engine.add({""}), no_tokens = engine.add({none});
    EXPECT_NE(empty.error().message.find("empty"), std::string::npos) << empty.error().message;
    EXPECT_NE(no_tokens.error().message.find("empty"), std::string::npos) << no_tokens.error().message;
}

TEST_F(InvalidArguments, prompt_that_is_too_long_is_refused_with_both_numbers) {
    const uint64_t limit = engine.model_info().value().max_model_len;
    const std::vector<uint32_t> tokens(5000, 300);
    const std::string text = engine.detokenize(tokens).value();
    const auto check = [&](const pagedllm::Prompt &prompt, uint64_t prompt_tokens) {
        pagedllm::Request request;
        pagedllm::Prefix prefix;
        request.prompt = prefix.prompt = prompt;
        request.add_special = prefix.add_special = false;
        for (const pagedllm::Error &error :
             {engine.add(request).error(), engine.generate(request).error(), engine.generate_async(request).get().error(),
              engine.stream(request).error(), engine.pin(prefix).error(), engine.predict_admission(request).error()}) {
            EXPECT_EQ(error.code, Code::invalid_argument);
            EXPECT_EQ(error.prompt_tokens, prompt_tokens);
            EXPECT_EQ(error.max_model_len, limit);
        }
        try {
            (void)engine.generate(request).value();
            ADD_FAILURE() << "it did not throw";
        } catch (const pagedllm::Exception &exception) {
            EXPECT_EQ(exception.prompt_tokens(), prompt_tokens);
            EXPECT_EQ(exception.max_model_len(), limit);
        }
    };
    check(tokens, tokens.size());
    check(text, engine.tokenize(text, false).value().size());
}

TEST_F(InvalidArguments, other_errors_have_no_numbers_of_a_prompt) {
    for (const pagedllm::Error &error : {engine.generate({""}).error(), engine.abort(UINT64_MAX).error()}) {
        EXPECT_EQ(error.prompt_tokens, 0u);
        EXPECT_EQ(error.max_model_len, 0u);
    }
}

TEST_F(InvalidArguments, sampling_is_refused) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    for (const float wrong : {nan, -nan, infinity, -infinity, -1.0f}) {
        REQUEST_REFUSED(invalid_argument, sampling.temperature = wrong);
        REQUEST_REFUSED(invalid_argument, sampling.top_p = wrong);
        REQUEST_REFUSED(invalid_argument, sampling.min_p = wrong);
    }
    REQUEST_REFUSED(invalid_argument, sampling.top_p = 0);
    REQUEST_REFUSED(invalid_argument, sampling.top_p = 1.5f);
    REQUEST_REFUSED(invalid_argument, sampling.min_p = 1.5f);
    REQUEST_REFUSED(invalid_argument, sampling.stop = {""});
    REQUEST_REFUSED(invalid_argument, sampling.stop_token_ids = {1024});
    pagedllm::Request request{"hello"};
    request.sampling.max_tokens = 3;
    request.sampling.min_tokens = 4;
    expect_refused(Code::invalid_argument, request, __LINE__);
}

// A request for several results.
#define RESULTS_REFUSED(code, change)                                             \
    do {                                                                          \
        pagedllm::Request request{"hello"};                                       \
        change;                                                                   \
        EXPECT_TRUE(fails(Code::code, engine.add(request)));                      \
        EXPECT_TRUE(fails(Code::code, engine.stream(request)));                   \
        EXPECT_TRUE(fails(Code::code, engine.generate_all(request)));             \
        EXPECT_TRUE(fails(Code::code, engine.generate_all_async(request).get())); \
    } while (0)

TEST_F(InvalidArguments, number_of_sequences_is_refused) {
    REQUEST_REFUSED(invalid_argument, n = 0);
    REQUEST_REFUSED(invalid_argument, n = UINT32_MAX);
    RESULTS_REFUSED(invalid_argument, (request.n = 3, request.best_of = 2));
    RESULTS_REFUSED(invalid_argument, (request.best_of = 1000));
    pagedllm::Request two{"hello"};
    two.n = 2;
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate(two)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate_async(two).get()));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.stream(two).value().collect()));
}

TEST_F(InvalidArguments, beam_is_refused) {
    pagedllm::Beam beam;
    beam.width = 1;
    RESULTS_REFUSED(invalid_argument, request.beam = beam);
    beam = {};
    beam.groups = 3;
    RESULTS_REFUSED(invalid_argument, request.beam = beam);
    beam = {};
    beam.length_penalty = 100;
    RESULTS_REFUSED(invalid_argument, request.beam = beam);
    beam = {};
    beam.early_stopping = pagedllm::EarlyStopping(9);
    RESULTS_REFUSED(invalid_argument, request.beam = beam);
    beam = {};
    RESULTS_REFUSED(invalid_argument, (request.beam = beam, request.keep = true));
}

// Each message names its field, so that no two fields are confused.
TEST_F(InvalidArguments, every_sampling_field_is_named_in_its_error) {
    const auto refused = [&](const std::string &words, const std::function<void(pagedllm::Sampling &)> &change) {
        pagedllm::Request request{"hello"};
        change(request.sampling);
        const auto result = engine.generate(request);
        ASSERT_TRUE(fails(Code::invalid_argument, result)) << words;
        EXPECT_NE(result.error().message.find(words), std::string::npos) << words << ": " << result.error().message;
    };
    const auto dry = [](auto change) {
        return [=](pagedllm::Sampling &sampling) { change(*(sampling.dry = pagedllm::Dry())); };
    };
    using S = pagedllm::Sampling;
    using D = pagedllm::Dry;
    using G = pagedllm::Grammar;
    refused("typical_p is 2", [](S &s) { s.typical_p = 2; });
    refused("top_n_sigma is -1", [](S &s) { s.top_n_sigma = -1; });
    refused("xtc_probability is 2", [](S &s) { s.xtc_probability = 2; });
    refused("xtc_threshold is 0.75", [](S &s) { s.xtc_threshold = 0.75f; });
    refused("mirostat_tau is -1", [](S &s) { s.mirostat_tau = -1; });
    refused("mirostat_eta is 2", [](S &s) { s.mirostat_tau = 5, s.mirostat_eta = 2; });
    refused("presence_penalty is 3", [](S &s) { s.presence_penalty = 3; });
    refused("frequency_penalty is -3", [](S &s) { s.frequency_penalty = -3; });
    refused("repetition_penalty is 0", [](S &s) { s.repetition_penalty = 0; });
    refused("no_repeat_ngram_size is 300", [](S &s) { s.no_repeat_ngram_size = 300; });
    refused("multiplier of pllm_dry is 101", dry([](D &d) { d.multiplier = 101; }));
    refused("base of pllm_dry is 0.5", dry([](D &d) { d.base = 0.5f; }));
    refused("sequence breaker of pllm_dry is empty", dry([](D &d) { d.sequence_breakers = {"x", ""}; }));
    refused("logit_bias of token 7", [](S &s) { s.logit_bias = {{7, 101}}; });
    refused("logit_bias token id", [](S &s) { s.logit_bias = {{1024, 1}}; });
    refused("an entry of bad_words is empty", [](S &s) { s.bad_words = {"x", ""}; });
    refused("bad_words_ids token id", [](S &s) { s.bad_words_ids = {{1}, {2, 1024}}; });
    refused("an entry of bad_words_ids is empty", [](S &s) { s.bad_words_ids = {{}}; });
    refused("allowed token id", [](S &s) { s.allowed_token_ids = {1024}; });
    refused("logprobs is 129", [](S &s) { s.logprobs = true, s.top_logprobs = 129; });
    refused("top_logprobs is 2 and flags", [](S &s) { s.top_logprobs = 2; });
    refused("prompt_logprobs is 129", [](S &s) { s.prompt_logprobs = true, s.prompt_top_logprobs = 129; });
    refused("prompt_top_logprobs is 2", [](S &s) { s.prompt_top_logprobs = 2; });
    refused("output_kind is 9", [](S &s) { s.output_kind = pagedllm::OutputKind(9); });
    refused("not valid JSON", [](S &s) { s.grammar = G::json_schema("{"); });
    refused("cannot be compiled", [](S &s) { s.grammar = G::regex("("); });
    refused("choices is empty", [](S &s) { s.grammar = G::choice({}); });
    refused("Expected token", [](S &s) { s.grammar = G::lark("nonsense"); });
    refused("grammar_kind is 9", [](S &s) { s.grammar.kind = pagedllm::GrammarKind(9); });
    refused("set grammar_kind", [](S &s) { s.grammar.text = "x"; });
}

TEST_F(InvalidArguments, pinned_prompt_is_refused) {
    const std::vector<uint32_t> beyond = {1024}, many(5000, 1);
    for (const pagedllm::Prompt &prompt : {pagedllm::Prompt(""), {"\xff"}, {beyond}, {many}})
        EXPECT_TRUE(fails(Code::invalid_argument, engine.pin({prompt})));
    pagedllm::Options options = light_options();
    options.no_prefix_cache = true;
    EXPECT_TRUE(fails(Code::unsupported, pagedllm::Engine::create(options).value().pin({"hello"})));
}

TEST_F(InvalidArguments, text_and_tokens_are_refused) {
    EXPECT_TRUE(fails(Code::invalid_argument, engine.tokenize("a\x80z")));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.detokenize(std::vector<uint32_t>{5, 1024})));
    for (const uint32_t unknown : {1024u, UINT32_MAX}) EXPECT_TRUE(fails(Code::invalid_argument, engine.token_bytes(unknown)));
    for (const char *chat : {"", "{", "3", "null", "{\"messages\": 3}", "[{\"role\": \"user\"}", "[] x", "\xff"})
        EXPECT_TRUE(fails(Code::invalid_argument, engine.render_chat(chat))) << chat;
    EXPECT_TRUE(fails(Code::invalid_argument, engine.render_chat({})));
}

TEST_F(InvalidArguments, unknown_id_is_not_found) {
    for (const uint64_t unknown : {uint64_t(0), uint64_t(1) << 40, UINT64_MAX})
        EXPECT_TRUE(fails(Code::not_found, engine.abort(unknown)));
    const std::string prompt = chat(cow.question);
    const uint64_t ended = engine.add(greedy(prompt)).value();
    read_to_the_end(engine.queue());
    EXPECT_TRUE(fails(Code::not_found, engine.abort(ended)));
    const uint64_t aborted = engine.add(endless(prompt)).value();
    EXPECT_TRUE(ok(engine.abort(aborted)));
    read_to_the_end(engine.queue());
    EXPECT_TRUE(fails(Code::not_found, engine.abort(aborted)));
}

TEST_F(InvalidArguments, queue_is_refused) {
    EXPECT_TRUE(fails(Code::invalid_argument, engine.create_queue(0)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.stream({"hello"}, 0)));
    pagedllm::Engine other = open_engine();
    const pagedllm::Queue queue = other.create_queue(4).value();
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add({"hello"}, queue)));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.add({"hello"}, other.queue())));
}

TEST_F(InvalidArguments, second_stepping_thread_is_refused) {
    EXPECT_TRUE(fails(Code::busy, engine.step()));
    EXPECT_TRUE(fails(Code::busy, engine.start()));
    for (int i = 0; i < 2; i++) EXPECT_TRUE(ok(engine.stop()));  // no error if the engine is stopped
    EXPECT_TRUE(ok(engine.step()));
    EXPECT_TRUE(ok(engine.start()));
}
TEST(InvalidText, longer_than_max_prompt_bytes_is_refused) {
    pagedllm::Options options = light_options();
    options.max_prompt_bytes = 100;
    pagedllm::Engine engine = pagedllm::Engine::create(options).value();
    const std::string longest(100, 'x');
    EXPECT_TRUE(engine.tokenize(longest));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.tokenize(longest + "x")));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.generate({longest + "x"})));
    EXPECT_TRUE(fails(Code::invalid_argument, engine.render_chat("[{\"role\": \"user\", \"content\": \"" + longest + "\"}]")));
}

TEST(InvalidText, is_refused_without_a_tokenizer) {
    pagedllm::Options options = light_options();
    options.skip_tokenizer = true;
    pagedllm::Engine engine = pagedllm::Engine::create(options).value();
    const std::vector<uint32_t> tokens = {5, 6, 7};
    pagedllm::Request request{tokens};
    request.sampling.max_tokens = 3;
    EXPECT_TRUE(fails(Code::unsupported, engine.generate({"hello"})));
    EXPECT_TRUE(fails(Code::unsupported, engine.tokenize("hello")));
    EXPECT_TRUE(fails(Code::unsupported, engine.detokenize(tokens)));
    EXPECT_TRUE(fails(Code::unsupported, engine.token_bytes(5)));
    EXPECT_TRUE(fails(Code::unsupported, engine.render_chat("[]")));
    request.sampling.stop = {"x"};
    EXPECT_TRUE(fails(Code::unsupported, engine.generate(request)));
    request.sampling.stop = {};
    const pagedllm::Completion answer = engine.generate(request).value();
    EXPECT_FALSE(answer.tokens.empty());
    EXPECT_EQ(answer.text, "");
}

TEST(Text, with_nul_bytes_and_non_ascii_characters_is_complete) {
    pagedllm::Engine engine = open_engine();
    const std::string_view text = "a\0b, \0\0 日本 😀"sv;
    const std::vector<uint32_t> tokens = engine.tokenize(text, false).value();
    EXPECT_EQ(engine.detokenize(tokens).value(), text);
    EXPECT_EQ(engine.tokenize({}).value(), engine.tokenize("").value());
    EXPECT_EQ(engine.detokenize({}).value(), "");
    pagedllm::Request request{text};
    request.sampling.max_tokens = 1;
    request.add_special = false;
    EXPECT_EQ(engine.generate(request).value().prompt_tokens, tokens.size());
}

TEST(Text, consists_of_the_bytes_of_its_tokens) {
    pagedllm::Engine engine = open_engine();
    const std::string_view text = "a\0b, 日本 😀"sv;
    std::string bytes;
    for (const uint32_t token : engine.tokenize(text, false).value()) bytes += engine.token_bytes(token).value();
    EXPECT_EQ(bytes, text);
    EXPECT_EQ(engine.token_bytes(5).value(), "<|end|>");
    for (uint32_t token = 0; token < 1024; token++) EXPECT_TRUE(ok(engine.token_bytes(token))) << token;
}

TEST(Text, of_a_chat_is_rendered_by_the_chat_template) {
    pagedllm::Engine engine = open_engine();
    EXPECT_EQ(engine.render_chat(R"([{"role": "user", "content": "こんにちは?"}])").value(), chat("こんにちは?"));
}

TEST(Text, has_whole_characters_and_stops_at_non_ascii_stop_strings) {
    pagedllm::Engine engine = open_engine();
    const std::string prompt = chat(japanese.question);
    pagedllm::Request request = greedy(prompt);
    for (const pagedllm::Output &output : *engine.stream(request)) {
        if (output.text.empty()) continue;
        const auto is_continuation = [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; };
        EXPECT_FALSE(is_continuation(output.text.front()));
        EXPECT_TRUE(ok(engine.tokenize(output.text))) << "text that is not UTF-8";
    }
    request.sampling.stop = {"に"};
    EXPECT_EQ(engine.generate(request).value().text, "Hello in Japanese is こん");
}
