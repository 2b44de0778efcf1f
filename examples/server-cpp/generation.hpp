// The work of an engine for one HTTP request: its limits, its requests and their outputs.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "json.hpp"
#include "pagedllm.hpp"
#include "sampling.hpp"

namespace server {

// An engine and the name by which clients select it.
struct Model {
    std::string name;
    std::string format;  // of reasoning and tool calls; "": that of the chat template
    pagedllm::Engine engine;
    uint64_t max_model_len;
};

// Limits of one request.
struct Limits {
    // Maximum number of sequences: prompts, samples and beams.
    int64_t max_results = 128;
    // Maximum number of alternatives for each token.
    uint32_t max_logprobs = 20;
    // Longest acceptable forecast of the time to the first token. 0: no limit.
    std::chrono::milliseconds max_wait{0};
    // Time after which a request ends with the tokens it has. 0: no limit.
    std::chrono::milliseconds max_time{std::chrono::minutes(10)};
    // Number of log probabilities of all requests in progress.
    std::shared_ptr<std::atomic<int64_t>> logprobs = std::make_shared<std::atomic<int64_t>>(0);
};

// The share of a request in the log probabilities of the server, which its destruction gives back.
class LogprobShare {
public:
    LogprobShare() = default;
    ~LogprobShare() {
        if (all_) *all_ -= count_;
    }
    LogprobShare(const LogprobShare &) = delete;
    LogprobShare &operator=(const LogprobShare &) = delete;

    // Throws ApiError if the request, or all requests together, have too many. Call it once.
    void take(const Limits &limits, int64_t count);

private:
    std::shared_ptr<std::atomic<int64_t>> all_;
    int64_t count_ = 0;
};

// A text or tokens.
struct Prompt {
    std::string text;
    std::vector<uint32_t> tokens;

    [[nodiscard]] bool empty() const { return text.empty() && tokens.empty(); }
    [[nodiscard]] pagedllm::Prompt view() const {
        if (tokens.empty()) return std::string_view(text);
        return pagedllm::Span<const uint32_t>(tokens);
    }
};

// Tokens of a request in the form of OpenAI.
struct Usage {
    uint64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;

    void write(JsonWriter &json) const;
};

// A Generation has a queue of its own, so that a slow client delays no other. It is made on a
// worker thread. From then on, one thread at a time uses it. Destroying it aborts the requests that
// have not ended.
class Generation {
public:
    virtual ~Generation() = default;
    Generation(const Generation &) = delete;
    Generation &operator=(const Generation &) = delete;

    // Returns a descriptor that is readable if take has something to do. The generation owns it.
    [[nodiscard]] int event_fd() const { return event_fd_; }

    [[nodiscard]] bool streams() const { return parameters_.stream; }
    [[nodiscard]] bool ended() const { return open_ == 0; }
    [[nodiscard]] const Usage &usage() const { return usage_; }
    [[nodiscard]] const std::string &model() const { return model_.name; }
    // Time to the first token. 0: there was none.
    [[nodiscard]] pagedllm::Seconds first_token() const { return first_token_; }

    // Takes the available outputs without waiting. If the generation streams, appends their events.
    // Throws ApiError if the computation has failed.
    void take(std::string &events);

    // Appends the events before the first output.
    virtual void begin(std::string &) {}

    // Returns the answer after the end of a generation that does not stream.
    [[nodiscard]] std::string answer();

protected:
    // `object` is the type of the answer, such as "text_completion".
    Generation(Model &model, Parameters parameters, const char *id_prefix, const char *object);

    // Adds one request for each prompt, within the limits. If one is refused, none runs.
    void start(pagedllm::Request request, const std::vector<Prompt> &prompts, const Limits &limits);

    // Appends the events of an output.
    virtual void add_events(const pagedllm::Output &output, std::string &events) = 0;
    // Writes the choice of an answer from its only output.
    virtual void write_choice(const pagedllm::Output &output, JsonWriter &json) = 0;

    // Writes an event with one choice.
    template <class Write>
    void add_event(std::string &events, Write write) const {
        const size_t size = events.size();
        try {
            events += event_begin_;
            JsonWriter json(events);
            write(json);
            events += "]}\n\n";
        } catch (...) {
            events.resize(size);  // the event of the error follows
            throw;
        }
    }

    // Returns the index of the choice of an output: those of the first prompt come first.
    [[nodiscard]] size_t choice(const pagedllm::Output &output) const { return output.user_data * results_ + output.index; }
    [[nodiscard]] size_t choices() const { return choices_; }

    // Writes finish_reason and the extension stop_reason. `calls` is true if the choice has calls.
    void write_finish(const pagedllm::Output &output, bool calls, JsonWriter &json) const;
    // Writes what the library reports, OpenAI lacks, and the request asked for.
    void write_extensions(const pagedllm::Output &output, JsonWriter &json) const;

    Model &model_;
    const Parameters parameters_;

private:
    void add(const pagedllm::Request &request, const Limits &limits);
    [[nodiscard]] pagedllm::Admission predict(const pagedllm::Request &request) const;
    void count(const pagedllm::Output &output);

    LogprobShare logprobs_held_;
    std::optional<pagedllm::Queue> queue_;
    int event_fd_ = -1;
    std::string event_begin_;  // of each event, up to its choice
    std::string head_;         // of the answer, up to its choices
    size_t results_ = 1;       // of each prompt
    size_t choices_ = 0;
    size_t open_ = 0;  // sequences that have not ended
    size_t late_ = 0;  // sequences that the deadline has ended before their first token
    Usage usage_;
    pagedllm::Seconds first_token_{0};
    // Without a stream: one output for each choice, and the memory to which they refer.
    std::vector<std::optional<pagedllm::Output>> outputs_;
    std::vector<pagedllm::Outputs> batches_;
};

// Returns an id that is unique with high probability.
std::string new_id(const std::string &prefix);

}  // namespace server
