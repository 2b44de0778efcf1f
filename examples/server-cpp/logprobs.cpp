#include "logprobs.hpp"

#include <cmath>
#include <map>

#include "../shared/utf8.hpp"

namespace server {

using pagedllm::Engine;
using pagedllm::Logprob;
using pagedllm::Output;
using pagedllm::Span;

// Replaces -Inf, which JSON lacks, by the value that OpenAI documents for unlikely tokens.
static float finite(float logprob) { return std::max(logprob, -9999.0f); }

// The first token of an echoed prompt has no log probability.
static void write_logprob(float logprob, JsonWriter &json) {
    if (std::isnan(logprob)) {
        json.value(nullptr);
    } else {
        json.value(finite(logprob));
    }
}

// Writes {"token", "id", "bytes", "logprob", "top_logprobs"}.
static void write_token(const Engine &engine, uint32_t token, float logprob, Span<const Logprob> top, JsonWriter &json) {
    const std::string bytes = value_of(engine.token_bytes(token));
    json.begin_object().member("token", utf8::printable(bytes)).member("id", token);
    json.key("bytes").begin_array();
    for (const char byte : bytes) json.value(static_cast<uint32_t>(static_cast<unsigned char>(byte)));
    json.end_array();
    json.key("logprob");
    write_logprob(logprob, json);
    json.key("top_logprobs").begin_array();
    for (const Logprob &candidate : top) write_token(engine, candidate.token, candidate.logprob, {}, json);
    json.end_array().end_object();
}

static void write_candidates(const Engine &engine, Span<const Logprob> top, JsonWriter &json) {
    // Tokens with the same text have one member: the more probable one, which comes first.
    std::map<std::string, float> candidates;
    for (const Logprob &candidate : top) {
        candidates.emplace(utf8::printable(value_of(engine.token_bytes(candidate.token))), finite(candidate.logprob));
    }
    json.begin_object();
    for (const auto &[text, logprob] : candidates) json.member(text, logprob);
    json.end_object();
}

void write_completion_logprobs(const Engine &engine, const Output &output, bool top, size_t &offset, JsonWriter &json) {
    std::vector<std::string> bytes;
    for (const uint32_t token : output.tokens) bytes.push_back(value_of(engine.token_bytes(token)));
    json.begin_object().key("tokens").begin_array();
    for (const std::string &token : bytes) json.value(utf8::printable(token));
    json.end_array().key("token_logprobs").begin_array();
    for (size_t i = 0; i < bytes.size(); i++) write_logprob(i < output.logprobs.size() ? output.logprobs[i] : NAN, json);
    json.end_array().key("top_logprobs");
    if (top) {
        json.begin_array();
        for (size_t i = 0; i < bytes.size(); i++) {
            if (output.top_logprobs.empty() || std::isnan(output.logprobs[i])) {
                json.value(nullptr);
            } else {
                write_candidates(engine, output.top_logprobs_of(i), json);
            }
        }
        json.end_array();
    } else {
        json.value(nullptr);
    }
    json.key("text_offset").begin_array();
    for (const std::string &token : bytes) {
        json.value(static_cast<uint64_t>(offset));
        // Counts the first byte of each character.
        for (const char byte : token) offset += (static_cast<unsigned char>(byte) & 0xc0) != 0x80;
    }
    json.end_array().end_object();
}

void write_chat_logprobs(const Engine &engine, const Output &output, JsonWriter &json) {
    if (output.logprobs.empty()) {
        json.value(nullptr);
        return;
    }
    json.begin_object().key("content").begin_array();
    for (size_t i = 0; i < output.tokens.size(); i++) {
        const Span<const Logprob> top = output.top_logprobs.empty() ? output.top_logprobs : output.top_logprobs_of(i);
        write_token(engine, output.tokens[i], output.logprobs[i], top, json);
    }
    json.end_array().end_object();
}

void write_prompt_logprobs(const Engine &engine, const Output &output, size_t start, JsonWriter &json) {
    json.begin_array();
    for (size_t i = 0; i < start; i++) json.value(nullptr);
    for (size_t i = 0; i < output.prompt_logprobs.size(); i++) {
        json.begin_object().key("logprob");
        write_logprob(output.prompt_logprobs[i], json);
        if (!output.prompt_top_logprobs.empty()) {
            json.key("top_logprobs").begin_array();
            for (const Logprob &candidate : output.prompt_top_logprobs_of(i)) {
                write_token(engine, candidate.token, candidate.logprob, {}, json);
            }
            json.end_array();
        }
        json.end_object();
    }
    json.end_array();
}

}  // namespace server
