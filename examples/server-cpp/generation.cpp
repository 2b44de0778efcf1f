#include "generation.hpp"

#include <ctime>
#include <random>

#include "logprobs.hpp"

namespace server {

using pagedllm::FinishReason;
using pagedllm::Output;
using pagedllm::StopReason;

std::string new_id(const std::string &prefix) {
    std::random_device random;
    std::string id = prefix;
    for (int i = 0; i < 3; i++) {
        char digits[9];
        snprintf(digits, sizeof digits, "%08x", random());
        id += digits;
    }
    return id;
}

void Usage::write(JsonWriter &json) const {
    json.begin_object().member("prompt_tokens", prompt_tokens).member("completion_tokens", completion_tokens);
    json.member("total_tokens", prompt_tokens + completion_tokens);
    json.key("prompt_tokens_details").begin_object().member("cached_tokens", cached_tokens);
    json.member("cache_write_tokens", 0).end_object();  // writing to the prefix cache costs nothing
    json.end_object();
}

Generation::Generation(Model &model, Parameters parameters, const char *id_prefix, const char *object)
    : model_(model), parameters_(std::move(parameters)) {
    JsonWriter json(head_);
    json.begin_object().member("id", new_id(id_prefix)).member("object", object);
    json.member("created", static_cast<int64_t>(std::time(nullptr))).member("model", model.name).key("choices").begin_array();
    event_begin_ = "data: " + head_;
}

static size_t sequences_of(const pagedllm::Request &request) {
    const size_t samples = std::max(request.n, request.best_of);
    return request.beam ? std::max<size_t>(samples, request.beam->width) : samples;
}

static void check_results(const pagedllm::Request &request, size_t prompts, const Limits &limits) {
    const size_t sequences = sequences_of(request);
    if (sequences > static_cast<size_t>(limits.max_results) / prompts) {
        throw bad_request("n", std::to_string(prompts) + " prompts have " + std::to_string(sequences) + " sequences each (limit " +
                                   std::to_string(limits.max_results) + " in all); ask for fewer");
    }
}

// Maximum number of log probabilities of one request, and of all requests in progress. Each takes
// about 150 bytes with its JSON.
static constexpr int64_t max_logprobs = 4 << 20, max_all_logprobs = 4 * max_logprobs;

void LogprobShare::take(const Limits &limits, int64_t count) {
    if (count > max_logprobs) {
        throw bad_request("logprobs", "the answer can have " + std::to_string(count) + " log probabilities (limit " +
                                          std::to_string(max_logprobs) + "); lower max_tokens or the number of alternatives, or stream it");
    }
    all_ = limits.logprobs;
    count_ = count;
    if ((*all_ += count) > max_all_logprobs) {
        throw try_later(429, "the requests in progress have too many log probabilities together (limit " +
                                 std::to_string(max_all_logprobs) + "); try again later, lower max_tokens, or stream the answer");
    }
}

// Returns the maximum number of log probabilities that an answer holds at once. A stream holds those
// of its prompts, and all if it has only the best of several sequences.
static int64_t logprobs_of(const pagedllm::Request &request, const std::vector<Prompt> &prompts, bool streams, uint64_t max_model_len) {
    const pagedllm::Sampling &sampling = request.sampling;
    const size_t sequences = sequences_of(request);
    const bool holds_output = !streams || request.beam || sequences > request.n;
    uint64_t count = 0;
    for (const Prompt &prompt : prompts) {
        // A text has at most one token for each byte, and special tokens around it.
        uint64_t length = std::min<uint64_t>(prompt.tokens.empty() ? prompt.text.size() + 8 : prompt.tokens.size(), max_model_len);
        if (request.truncate_prompt_tokens > 0) length = std::min<uint64_t>(length, request.truncate_prompt_tokens);
        uint64_t output = holds_output ? std::min<uint64_t>(sampling.max_tokens.value_or(UINT32_MAX), max_model_len) : 0;
        if (sampling.echo) output += length;
        if (sampling.logprobs) count += sequences * output * (sampling.top_logprobs + 1ull);
        if (sampling.prompt_logprobs) count += length * (sampling.prompt_top_logprobs + 1ull);
    }
    return static_cast<int64_t>(count);
}

static void check_alternatives(const pagedllm::Sampling &sampling, const Limits &limits) {
    const uint32_t top = std::max(sampling.top_logprobs, sampling.prompt_top_logprobs);
    if (top <= limits.max_logprobs) return;
    throw bad_request("logprobs", "the request asks for " + std::to_string(top) + " log probabilities of each token (limit " +
                                      std::to_string(limits.max_logprobs) + "); ask for fewer");
}

// The process has a descriptor again when a request has ended.
template <class T>
static T value_with_descriptor(pagedllm::Result<T> result) {
    if (!result.ok() && result.error().code == pagedllm::Code::capacity) throw try_later(503, result.error().message);
    return value_of(std::move(result));
}

void Generation::start(pagedllm::Request request, const std::vector<Prompt> &prompts, const Limits &limits) {
    check_results(request, prompts.size(), limits);
    check_alternatives(request.sampling, limits);
    logprobs_held_.take(limits, logprobs_of(request, prompts, streams(), model_.max_model_len));
    results_ = request.n;
    const bool has_limit = limits.max_time.count() > 0;
    if (has_limit && (request.deadline.count() == 0 || request.deadline > limits.max_time)) request.deadline = limits.max_time;
    if (!streams()) request.sampling.output_kind = pagedllm::OutputKind::final;
    open_ = choices_ = prompts.size() * results_;
    outputs_.resize(streams() ? 0 : choices_);
    queue_ = value_with_descriptor(model_.engine.create_queue(64 + choices_));
    event_fd_ = value_with_descriptor(queue_->event_fd());
    for (size_t i = 0; i < prompts.size(); i++) {
        request.user_data = i;
        request.prompt = prompts[i].view();
        add(request, limits);
    }
}

static ApiError too_busy(const pagedllm::Admission &forecast) {
    const pagedllm::Seconds wait = forecast.first_token.value_or(pagedllm::Seconds(0));
    return try_later(429, std::to_string(forecast.waiting_requests) + " requests with " + std::to_string(forecast.waiting_tokens) +
                                 " tokens are waiting; try again later",
                             std::chrono::duration_cast<std::chrono::milliseconds>(wait));
}

// Adds a request, unless its first token would come too late.
void Generation::add(const pagedllm::Request &request, const Limits &limits) {
    if (limits.max_wait.count() > 0) {
        const pagedllm::Admission forecast = predict(request);
        if (!forecast.admits || forecast.first_token > limits.max_wait) throw too_busy(forecast);
    }
    const pagedllm::Result<uint64_t> added = model_.engine.add(request, *queue_);
    if (added.ok()) return;
    const pagedllm::Error &error = added.error();
    if (error.code != pagedllm::Code::capacity || !error.is_temporary) throw to_api_error(error);
    throw too_busy(predict(request));
}

pagedllm::Admission Generation::predict(const pagedllm::Request &request) const {
    return value_of(model_.engine.predict_admission(request, *queue_));
}

void Generation::take(std::string &events) {
    pagedllm::Outputs batch = value_of(queue_->poll());
    for (const Output &output : batch) {
        count(output);
        if (streams()) {
            add_events(output, events);
        } else if (output.is_last() && choice(output) < outputs_.size()) {
            outputs_[choice(output)] = output;
        }
    }
    if (!streams()) {
        batches_.push_back(std::move(batch));
    } else if (ended()) {
        if (parameters_.wants_usage()) {
            events += event_begin_ + "],\"usage\":";
            JsonWriter json(events);
            usage_.write(json);
            events += "}\n\n";
        }
        events += "data: [DONE]\n\n";
    }
}

// Adds an output to the usage. An output with an error is the end of the generation.
void Generation::count(const Output &output) {
    if (output.error_code != pagedllm::Code{}) throw to_api_error({output.error_code, std::string(output.error_message)});
    if (!output.is_last()) return;
    open_--;
    usage_.completion_tokens += output.generated_tokens;
    if (output.index == 0) {  // samples share their prompt
        usage_.prompt_tokens += output.prompt_tokens;
        usage_.cached_tokens += std::min(output.cached_tokens, output.prompt_tokens);
    }
    const pagedllm::Seconds first = output.timing.first_token;
    if (first.count() > 0 && (first_token_.count() == 0 || first < first_token_)) first_token_ = first;
    late_ += output.finish_reason == FinishReason::deadline && output.generated_tokens == 0;
    // An answer has what there is.
    if (late_ == choices_ && !streams()) {
        throw ApiError(504, "no token was generated before the deadline; try again later");
    }
}

std::string Generation::answer() {
    std::string text = head_;
    for (size_t i = 0; i < outputs_.size(); i++) {
        if (i > 0) text += ',';
        JsonWriter json(text);
        write_choice(outputs_[i].value(), json);
    }
    text += "],\"usage\":";
    JsonWriter json(text);
    usage_.write(json);
    text += "}\n";
    return text;
}

void Generation::write_finish(const Output &output, bool calls, JsonWriter &json) const {
    json.key("finish_reason");
    switch (output.finish_reason) {
        case FinishReason::none: json.value(nullptr); return;
        case FinishReason::length: json.value("length"); return;
        // A sequence that a deadline has ended is incomplete, as one that max_tokens has ended.
        case FinishReason::deadline: json.value("length").member("stop_reason", "deadline"); return;
        default: json.value(calls ? "tool_calls" : "stop");
    }
    if (output.stop_reason == StopReason::string) json.member("stop_reason", output.stop_string);
    if (output.stop_reason == StopReason::token) json.member("stop_reason", output.stop_token);
}

void Generation::write_extensions(const Output &output, JsonWriter &json) const {
    if (parameters_.return_token_ids && !output.tokens.empty()) {
        json.key("token_ids").begin_array();
        for (const uint32_t token : output.tokens) json.value(token);
        json.end_array();
    }
    if (output.is_last() && (parameters_.beam || parameters_.best_of)) json.member("score", output.score);
    // Of several samples, the first reports the prompt.
    if (!parameters_.prompt_logprobs || output.index != 0) return;
    const int64_t start = std::max<int64_t>(1, parameters_.prompt_logprobs_start.value_or(0));
    json.key("prompt_logprobs");
    write_prompt_logprobs(model_.engine, output, static_cast<size_t>(start), json);
}

}  // namespace server
