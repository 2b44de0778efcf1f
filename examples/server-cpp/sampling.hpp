// The members that completions and chats share: those of OpenAI, and the parameters of the library
// as extensions, whose names are those of the library and, where it has them, of vLLM.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "json.hpp"
#include "pagedllm.hpp"

namespace server {

struct StreamOptions {
    bool include_usage = false;
};

struct Dry {
    std::optional<double> multiplier, base;
    std::optional<int64_t> allowed_length, penalty_last_n;
    std::optional<std::vector<std::string>> sequence_breakers;
};

struct Beam {
    std::optional<int64_t> width, groups;
    std::optional<double> diversity_penalty, length_penalty;
    std::string early_stopping = "no";
};

// One constraint on the output.
struct StructuredOutputs {
    const JsonValue *json = nullptr;
    bool json_object = false;
    std::optional<std::string> regex, grammar;
    std::optional<std::vector<std::string>> choice;
};

void read(const JsonValue &value, const std::string &name, StreamOptions &to);
void read(const JsonValue &value, const std::string &name, Dry &to);
void read(const JsonValue &value, const std::string &name, Beam &to);
void read(const JsonValue &value, const std::string &name, StructuredOutputs &to);

// A string or an array of strings.
struct TextOrTexts {
    std::vector<std::string> texts;
};
void read(const JsonValue &value, const std::string &name, TextOrTexts &to);

// Parameters that are not set have the default of the library or of the model.
struct Parameters {
    std::string model;
    std::optional<int64_t> n, best_of;
    bool stream = false;
    std::optional<StreamOptions> stream_options;
    std::optional<double> temperature, top_p, presence_penalty, frequency_penalty;
    std::optional<int64_t> seed, max_tokens;
    TextOrTexts stop;
    std::map<std::string, double> logit_bias;
    // Extensions.
    std::optional<int64_t> top_k, no_repeat_ngram_size, min_tokens;
    std::optional<double> min_p, typical_p, top_n_sigma, xtc_probability, xtc_threshold;
    std::optional<double> mirostat_tau, mirostat_eta, repetition_penalty;
    bool ignore_eos = false;
    bool include_stop_str_in_output = false;
    std::optional<bool> skip_special_tokens;
    std::vector<uint32_t> stop_token_ids, allowed_token_ids;
    std::vector<std::string> bad_words;
    std::vector<std::vector<uint32_t>> bad_words_ids;
    std::optional<Dry> dry;
    std::optional<Beam> beam;
    std::optional<StructuredOutputs> structured_outputs;
    std::optional<int64_t> prompt_logprobs, prompt_logprobs_start, truncate_prompt_tokens;
    bool return_token_ids = false;
    std::string cache_salt;
    int32_t priority = 0;
    std::optional<int64_t> deadline_ms;

    // True if a stream ends with the usage.
    [[nodiscard]] bool wants_usage() const { return stream_options && stream_options->include_usage; }

    // Returns a request of the engine without its prompt. It refers to cache_salt.
    [[nodiscard]] pagedllm::Request request() const;
};

extern const Fields<Parameters> parameter_fields;

// Returns the number, or 0 if it is not given. Throws ApiError if it is below `least`.
uint32_t at_least(const char *name, const std::optional<int64_t> &number, int64_t least);

// Returns a schema that is given as an object, or as a string that contains it.
std::string schema_text(const JsonValue &schema);

}  // namespace server
