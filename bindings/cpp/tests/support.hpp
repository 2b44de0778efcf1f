// What the tests share: small engines with the bundled model, its answers, and assertions.
#ifndef PAGEDLLM_TESTS_SUPPORT_HPP
#define PAGEDLLM_TESTS_SUPPORT_HPP

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "pagedllm.hpp"

using namespace std::chrono_literals;
using namespace std::string_literals;
using namespace std::string_view_literals;
using pagedllm::Code;
using pagedllm::FinishReason;
using pagedllm::StopReason;

// Upper limit of all waits, also under sanitizers.
inline constexpr std::chrono::seconds timeout_limit{600};

struct Dialogue {
    const char *question, *answer;
};

// From examples/model/expected.json.
inline constexpr Dialogue dialogues[] = {
    {"What is the capital of France?", "The capital of France is Paris."},
    {"What is 7 + 5?", "12"},
    {"What does a cow say?", "A cow says moo."},
    {"What is the opposite of hot?", "The opposite of hot is cold."},
    {"How do you say hello in Japanese?", "Hello in Japanese is こんにちは."},
};
inline constexpr Dialogue france = dialogues[0], cow = dialogues[2], japanese = dialogues[4];

inline std::string chat(const std::string &question) { return "<s><|user|>\n" + question + "<|end|>\n<|assistant|>\n"; }

// A greedy request. Views the prompt.
inline pagedllm::Request greedy(const std::string &prompt) {
    pagedllm::Request request{prompt};
    request.sampling.temperature = 0;
    request.add_special = false;
    return request;
}

// A greedy request for exactly max_tokens tokens; 0: up to max_model_len.
inline pagedllm::Request endless(const std::string &prompt,
                                 uint32_t max_tokens = PLLM_UNLIMITED_TOKENS) {
    pagedllm::Request request = greedy(prompt);
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = max_tokens;
    return request;
}

inline pagedllm::Options light_options() {
    const char *model = std::getenv("PAGEDLLM_MODEL");
    pagedllm::Options options;
    options.model_path = model ? model : PAGEDLLM_MODEL_DIR;
    options.kv_bytes = 16 << 20;
    options.threads = 1;
    return options;
}

inline pagedllm::Engine open_engine() { return pagedllm::Engine::create(light_options()).value(); }

// The test steps this engine.
inline pagedllm::Engine host_stepped_engine() {
    pagedllm::Options options = light_options();
    options.host_steps = true;
    return pagedllm::Engine::create(options).value();
}

// EXPECT_TRUE(ok(result)) prints the error.
template <class T>
testing::AssertionResult ok(const pagedllm::Result<T> &result) {
    if (result) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "error " << static_cast<int>(result.error().code) << ": " << result.error().message;
}

// EXPECT_TRUE(fails(code, result)): the error has this code and a message.
template <class T>
testing::AssertionResult fails(Code code, const pagedllm::Result<T> &result) {
    if (result) return testing::AssertionFailure() << "the call succeeded";
    if (result.error().code == code && result.error().message.size() > 9) return testing::AssertionSuccess();
    return ok(result);
}

// Waits until the condition holds. Returns false after the time limit.
template <class Condition>
bool eventually(Condition condition) {
    for (const auto end = std::chrono::steady_clock::now() + timeout_limit; std::chrono::steady_clock::now() < end;) {
        if (condition()) return true;
        std::this_thread::sleep_for(1ms);
    }
    return false;
}

// No request is left and no block is in use.
inline bool is_idle(const pagedllm::Stats &stats) {
    return stats.running == 0 && stats.waiting == 0 && stats.blocks_used == 0 &&
           stats.blocks_free + stats.blocks_cached == stats.blocks_total;
}

// Waits, because an output can be read before its step is counted.
inline bool is_idle(const pagedllm::Engine &engine) {
    return eventually([&] { return is_idle(engine.stats().value()); });
}

inline void step_to_the_end(pagedllm::Engine &engine) {
    while (engine.step().value().unfinished > 0) {
    }
}

// Reads the outputs of a request until its last output.
inline pagedllm::Completion read_to_the_end(const pagedllm::QueueView &queue) {
    pagedllm::Completion all;
    while (all.finish_reason == FinishReason::none) {
        const pagedllm::Outputs outputs = queue.poll(timeout_limit).value();
        if (outputs.empty()) throw std::runtime_error("no output within the time limit");
        for (const pagedllm::Output &output : outputs) {
            all.text += output.text;
            all.tokens.insert(all.tokens.end(), output.tokens.begin(), output.tokens.end());
            all.finish_reason = output.finish_reason;
        }
    }
    return all;
}

#endif
