#include "sampling.hpp"

#include <charconv>
#include <limits>

namespace server {

using pagedllm::Grammar;

#define FIELD(name) {#name, read_field<&Parameters::name, Parameters>}
#define IGNORED(name) {#name, ignore_field<Parameters>}
const Fields<Parameters> parameter_fields = {
    FIELD(model), FIELD(n), FIELD(best_of), FIELD(stream), FIELD(stream_options), FIELD(temperature), FIELD(top_p),
    FIELD(presence_penalty), FIELD(frequency_penalty), FIELD(seed), FIELD(max_tokens), FIELD(stop), FIELD(logit_bias),
    FIELD(top_k), FIELD(no_repeat_ngram_size), FIELD(min_tokens), FIELD(min_p), FIELD(typical_p), FIELD(top_n_sigma),
    FIELD(xtc_probability), FIELD(xtc_threshold), FIELD(mirostat_tau), FIELD(mirostat_eta), FIELD(repetition_penalty),
    FIELD(ignore_eos), FIELD(include_stop_str_in_output), FIELD(skip_special_tokens), FIELD(stop_token_ids),
    FIELD(allowed_token_ids), FIELD(bad_words), FIELD(bad_words_ids), FIELD(dry), FIELD(beam), FIELD(structured_outputs),
    FIELD(prompt_logprobs), FIELD(prompt_logprobs_start), FIELD(truncate_prompt_tokens), FIELD(return_token_ids),
    FIELD(cache_salt), FIELD(priority), FIELD(deadline_ms),
    IGNORED(user), IGNORED(metadata), IGNORED(service_tier), IGNORED(safety_identifier), IGNORED(prompt_cache_key),
    IGNORED(prompt_cache_retention), IGNORED(prompt_cache_options),
};
#undef FIELD
#undef IGNORED

void read(const JsonValue &value, const std::string &name, StreamOptions &to) {
    static const Fields<StreamOptions> fields = {
        {"include_usage", read_field<&StreamOptions::include_usage, StreamOptions>},
        // Padding against attacks on encrypted streams. The server sends none.
        {"include_obfuscation", ignore_field<StreamOptions>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, Dry &to) {
    static const Fields<Dry> fields = {
        {"multiplier", read_field<&Dry::multiplier, Dry>},
        {"base", read_field<&Dry::base, Dry>},
        {"allowed_length", read_field<&Dry::allowed_length, Dry>},
        {"penalty_last_n", read_field<&Dry::penalty_last_n, Dry>},
        {"sequence_breakers", read_field<&Dry::sequence_breakers, Dry>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, Beam &to) {
    static const Fields<Beam> fields = {
        {"width", read_field<&Beam::width, Beam>},
        {"groups", read_field<&Beam::groups, Beam>},
        {"diversity_penalty", read_field<&Beam::diversity_penalty, Beam>},
        {"length_penalty", read_field<&Beam::length_penalty, Beam>},
        {"early_stopping", read_field<&Beam::early_stopping, Beam>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, StructuredOutputs &to) {
    static const Fields<StructuredOutputs> fields = {
        {"json", read_field<&StructuredOutputs::json, StructuredOutputs>},
        {"json_object", read_field<&StructuredOutputs::json_object, StructuredOutputs>},
        {"regex", read_field<&StructuredOutputs::regex, StructuredOutputs>},
        {"choice", read_field<&StructuredOutputs::choice, StructuredOutputs>},
        {"grammar", read_field<&StructuredOutputs::grammar, StructuredOutputs>},
    };
    read_object(value, name, Part{to, fields});
}

void read(const JsonValue &value, const std::string &name, TextOrTexts &to) {
    if (value.IsString()) {
        to.texts = {std::string(view(value))};
    } else if (value.IsArray()) {
        read(value, name, to.texts);
    } else {
        throw bad_request(name, name + " is neither a string nor an array of strings; send one of them");
    }
}

uint32_t at_least(const char *name, const std::optional<int64_t> &number, int64_t least) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    if (!number) return 0;
    if (*number < least || *number > most) {
        throw bad_request(name, std::string(name) + " is " + std::to_string(*number) + "; must be " + std::to_string(least) + " to " +
                                    std::to_string(most));
    }
    return static_cast<uint32_t>(*number);
}

std::string schema_text(const JsonValue &schema) { return schema.IsString() ? std::string(view(schema)) : to_text(schema); }

// Sets a parameter of the library that the request gives. The library checks its range.
static void set(float &to, const std::optional<double> &from) {
    if (from) to = static_cast<float>(*from);
}

static void set(uint32_t &to, const char *name, const std::optional<int64_t> &from) {
    if (from) to = at_least(name, from, 0);
}

static pagedllm::Dry to_dry(const Dry &from) {
    pagedllm::Dry dry;
    set(dry.multiplier, from.multiplier);
    set(dry.base, from.base);
    set(dry.allowed_length, "dry.allowed_length", from.allowed_length);
    set(dry.penalty_last_n, "dry.penalty_last_n", from.penalty_last_n);
    dry.sequence_breakers = from.sequence_breakers;
    return dry;
}

static pagedllm::Beam to_beam(const Beam &from) {
    pagedllm::Beam beam;
    if (from.width) beam.width = at_least("beam.width", from.width, 2);
    if (from.groups) beam.groups = at_least("beam.groups", from.groups, 1);
    set(beam.diversity_penalty, from.diversity_penalty);
    set(beam.length_penalty, from.length_penalty);
    if (from.early_stopping == "no") {
        beam.early_stopping = pagedllm::EarlyStopping::no;
    } else if (from.early_stopping == "yes") {
        beam.early_stopping = pagedllm::EarlyStopping::yes;
    } else if (from.early_stopping == "never") {
        beam.early_stopping = pagedllm::EarlyStopping::never;
    } else {
        throw bad_request("beam.early_stopping",
                          "beam.early_stopping is \"" + from.early_stopping + "\"; must be \"no\", \"yes\" or \"never\"");
    }
    return beam;
}

static Grammar to_grammar(const StructuredOutputs &from) {
    std::vector<Grammar> all;
    if (from.json) all.push_back(Grammar::json_schema(schema_text(*from.json)));
    if (from.json_object) all.push_back(Grammar::json_object());
    if (from.regex) all.push_back(Grammar::regex(*from.regex));
    if (from.choice) all.push_back(Grammar::choice(*from.choice));
    if (from.grammar) all.push_back(Grammar::lark(*from.grammar));
    if (all.size() != 1) {
        throw bad_request("structured_outputs", "structured_outputs has " + std::to_string(all.size()) +
                                                    " constraints; give one of json, json_object, regex, choice and grammar");
    }
    return all.front();
}

// Converts the keys of logit_bias, which are token ids in decimal.
static std::vector<pagedllm::LogitBias> to_biases(const std::map<std::string, double> &from) {
    std::vector<pagedllm::LogitBias> biases;
    for (const auto &[key, bias] : from) {
        uint32_t token = 0;
        const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
        if (error != std::errc() || end != key.data() + key.size()) {
            throw bad_request("logit_bias", "logit_bias has the key \"" + key + "\"; keys are token ids");
        }
        biases.push_back({token, static_cast<float>(bias)});
    }
    return biases;
}

// True if the request sets a parameter to the default of the library. The library cannot
// distinguish this from a parameter that is not set, and would replace it by the default of the
// model.
static bool asks_for_library_defaults(const Parameters &p) {
    return p.temperature == 1.0 || p.top_p == 1.0 || p.min_p == 0.0 || p.typical_p == 1.0 || p.repetition_penalty == 1.0 ||
           p.top_k == 0 || p.no_repeat_ngram_size == 0;
}

static pagedllm::Sampling to_sampling(const Parameters &p) {
    pagedllm::Sampling s;
    set(s.temperature, p.temperature);
    set(s.top_p, p.top_p);
    set(s.min_p, p.min_p);
    set(s.top_k, "top_k", p.top_k);
    if (p.max_tokens) s.max_tokens = at_least("max_tokens", p.max_tokens, 0);
    set(s.min_tokens, "min_tokens", p.min_tokens);
    if (p.seed) s.seed = static_cast<uint64_t>(*p.seed);
    s.ignore_eos = p.ignore_eos;
    s.include_stop = p.include_stop_str_in_output;
    s.stop = p.stop.texts;
    s.stop_token_ids = p.stop_token_ids;
    s.model_defaults = !asks_for_library_defaults(p);
    set(s.typical_p, p.typical_p);
    set(s.top_n_sigma, p.top_n_sigma);
    set(s.xtc_probability, p.xtc_probability);
    set(s.xtc_threshold, p.xtc_threshold);
    set(s.mirostat_tau, p.mirostat_tau);
    set(s.mirostat_eta, p.mirostat_eta);
    set(s.presence_penalty, p.presence_penalty);
    set(s.frequency_penalty, p.frequency_penalty);
    set(s.repetition_penalty, p.repetition_penalty);
    set(s.no_repeat_ngram_size, "no_repeat_ngram_size", p.no_repeat_ngram_size);
    if (p.dry) s.dry = to_dry(*p.dry);
    if (p.structured_outputs) s.grammar = to_grammar(*p.structured_outputs);
    s.logit_bias = to_biases(p.logit_bias);
    s.bad_words = p.bad_words;
    s.bad_words_ids = p.bad_words_ids;
    s.allowed_token_ids = p.allowed_token_ids;
    s.prompt_logprobs = p.prompt_logprobs.has_value();
    set(s.prompt_top_logprobs, "prompt_logprobs", p.prompt_logprobs);
    s.prompt_logprobs_start = at_least("prompt_logprobs_start", p.prompt_logprobs_start, 0);
    return s;
}

pagedllm::Request Parameters::request() const {
    pagedllm::Request request;
    request.sampling = to_sampling(*this);
    if (n) request.n = at_least("n", n, 1);
    request.best_of = at_least("best_of", best_of, 1);
    request.truncate_prompt_tokens = at_least("truncate_prompt_tokens", truncate_prompt_tokens, 1);
    request.cache_salt = cache_salt;
    request.priority = priority;
    request.skip_special = skip_special_tokens.value_or(true);
    if (beam) request.beam = to_beam(*beam);
    if (deadline_ms) {
        if (*deadline_ms < 1) throw bad_request("deadline_ms", "deadline_ms is " + std::to_string(*deadline_ms) + "; must be positive");
        request.deadline = std::chrono::milliseconds(*deadline_ms);
    }
    if (stream_options && !stream) {
        throw bad_request("stream_options", "stream_options is given without \"stream\": true; remove it");
    }
    if (prompt_logprobs && stream) {
        throw bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed; remove \"stream\": true");
    }
    return request;
}

}  // namespace server
