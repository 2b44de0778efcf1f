// The command bench: tokens per second of prompts and of decodes.
#include <algorithm>
#include <chrono>
#include <memory>
#include <pagedllm.hpp>
#include <random>

#include "engine.hpp"
#include "format.hpp"
#include "terminal.hpp"

namespace tool {

using pagedllm::Engine;
using pagedllm::Output;
using pagedllm::Step;
using Clock = std::chrono::steady_clock;

namespace {

struct Bench {
    pagedllm::Options options;
    uint32_t prompt_tokens = 128;
    uint32_t output_tokens = 64;
    std::vector<uint32_t> batches;
    uint32_t repeats = 5;
    uint32_t warmups = 1;
    bool writes_json = false;
};

struct Measurements {
    uint32_t batch = 0;
    std::vector<double> prefill, decode;  // tokens per second of each repetition
};

// Requests with random tokens, so that no prompt is in the prefix cache.
class Load {
public:
    Load(Engine &engine, const Bench &bench) : engine_(engine), bench_(bench), vocab_size_(engine.model_info().value().vocab_size) {}

    // Returns the prompt tokens per second of requests that end with their prompts.
    double measure_prefill(uint32_t batch) {
        add(batch, 1);
        const auto begin = Clock::now();
        while (step().unfinished > 0) {
        }
        return static_cast<double>(batch) * bench_.prompt_tokens / seconds_since(begin);
    }

    // Returns the tokens per second of steps in which each sequence decodes one token.
    double measure_decode(uint32_t batch) {
        add(batch, std::nullopt);
        while (started_ < batch) step();
        const auto begin = Clock::now();
        for (uint32_t i = 0; i < bench_.output_tokens; i++) {
            const Step report = step();
            if (report.decode_tokens != batch || report.prefill_tokens != 0) {
                throw UsageError("--batch is " + std::to_string(batch) + ", of which a step ran " + std::to_string(report.decode_tokens) +
                                 " sequences; raise --kv-bytes or --max-seqs");
            }
        }
        const double seconds = seconds_since(begin);
        abort_all();
        return static_cast<double>(batch) * bench_.output_tokens / seconds;
    }

private:
    static double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

    void add(uint32_t batch, std::optional<uint32_t> max_tokens) {
        requests_.clear();
        started_ = 0;
        for (uint32_t i = 0; i < batch; i++) {
            std::vector<uint32_t> prompt(bench_.prompt_tokens);
            for (uint32_t &token : prompt) token = static_cast<uint32_t>(random_() % vocab_size_);
            pagedllm::Request request;
            request.prompt = pagedllm::Span<const uint32_t>(prompt);
            request.sampling.temperature = 0;
            request.sampling.ignore_eos = true;
            request.sampling.max_tokens = max_tokens;
            request.skip_special = false;
            requests_.push_back(engine_.add(request).value());
        }
    }

    Step step() {
        if (is_interrupted()) throw Interrupted();
        const Step report = engine_.step().value();
        const pagedllm::Outputs outputs = engine_.queue().poll().value();
        for (const Output &output : outputs) {
            if (output.error_code != pagedllm::Code{}) {
                throw pagedllm::Exception(pagedllm::Error{output.error_code, std::string(output.error_message)});
            }
            if (output.generated_tokens == 1 && !output.tokens.empty()) started_++;
        }
        return report;
    }

    void abort_all() {
        for (const uint64_t request : requests_) engine_.abort(request).value();
        while (step().unfinished > 0) {
        }
    }

    Engine &engine_;
    const Bench &bench_;
    uint64_t vocab_size_;
    std::mt19937_64 random_;  // with the same numbers in each run
    std::vector<uint64_t> requests_;
    uint32_t started_ = 0;  // number of sequences with a token
};

struct Spread {
    double median, min, max;
};

}  // namespace

static Spread spread(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    const size_t middle = samples.size() / 2;
    const double median = samples.size() % 2 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
    return {median, samples.front(), samples.back()};
}

static uint32_t largest(const std::vector<uint32_t> &batches) { return *std::max_element(batches.begin(), batches.end()); }

// Options that are not given suit the largest batch.
static pagedllm::Options options_for(const Bench &bench) {
    pagedllm::Options options = bench.options;
    options.host_steps = true;
    options.skip_tokenizer = true;
    const uint32_t batch = largest(bench.batches);
    const pagedllm::Options standard;
    if (options.max_seqs == standard.max_seqs) options.max_seqs = std::max(options.max_seqs, batch);
    if (options.max_batch_tokens == standard.max_batch_tokens) {
        options.max_batch_tokens = std::max(options.max_batch_tokens, options.max_seqs);
    }
    // The first sequences decode while the prompts of the last ones are computed.
    const uint64_t prompts = uint64_t{batch} * bench.prompt_tokens;
    const uint64_t length = bench.prompt_tokens + uint64_t{bench.output_tokens} + prompts / options.max_batch_tokens + batch + 8;
    const uint64_t limit = Engine::plan(options).value().max_model_len;
    if (length > limit) {
        throw UsageError("--prompt-tokens, --output-tokens and --batch need sequences of " + std::to_string(length) + " tokens, limit " +
                         std::to_string(limit) + "; lower one of them, or raise --max-batch-tokens or --kv-bytes");
    }
    if (options.max_model_len == 0) options.max_model_len = static_cast<uint32_t>(length);
    return options;
}

static Measurements measure(Load &load, const Bench &bench, uint32_t batch) {
    Measurements result{batch, {}, {}};
    ProgressBar bar("batch " + std::to_string(batch));
    const uint32_t total = bench.warmups + bench.repeats;
    for (uint32_t i = 0; i < total; i++) {
        bar.draw(i, total);
        const double prefill = load.measure_prefill(batch);
        const double decode = load.measure_decode(batch);
        if (i < bench.warmups) continue;
        result.prefill.push_back(prefill);
        result.decode.push_back(decode);
    }
    return result;
}

static void write_rate(const char *name, const std::vector<double> &samples, Json &json) {
    const Spread rate = spread(samples);
    json.key(name).begin_object().member("median", rate.median).member("min", rate.min).member("max", rate.max);
    json.key("samples").begin_array();
    for (const double sample : samples) json.value(sample);
    json.end_array().end_object();
}

static std::string to_json(const Bench &bench, const Engine &engine, const std::vector<Measurements> &all) {
    const pagedllm::ModelInfo info = engine.model_info().value();
    Json json;
    json.begin_object().member("version", pllm_version()).member("model", bench.options.model_path);
    json.member("architecture", info.architecture).member("isa", info.isa).member("threads", info.threads);
    json.member("prompt_tokens", bench.prompt_tokens).member("output_tokens", bench.output_tokens).member("repeats", bench.repeats);
    json.key("results").begin_array();
    for (const Measurements &one : all) {
        json.begin_object().member("batch", one.batch);
        write_rate("prefill_tokens_per_second", one.prefill, json);
        write_rate("decode_tokens_per_second", one.decode, json);
        json.end_object();
    }
    return json.end_array().end_object().text();
}

static std::string to_table(const Bench &bench, const Engine &engine, const std::vector<Measurements> &all) {
    const pagedllm::ModelInfo info = engine.model_info().value();
    std::string text = std::string(info.architecture) + ", " + std::string(info.isa) + ", " + std::to_string(info.threads) +
                       " threads: prompts of " + std::to_string(bench.prompt_tokens) + " tokens, then " +
                       std::to_string(bench.output_tokens) + " decodes; tokens per second, median of " + std::to_string(bench.repeats) +
                       " (min to max)\n\n";
    std::vector<std::vector<std::string>> rows = {{"batch", "prefill", "", "decode", "", "ms per step"}};
    const auto range = [](const Spread &rate) { return "(" + short_number(rate.min) + " to " + short_number(rate.max) + ")"; };
    for (const Measurements &one : all) {
        const Spread prefill = spread(one.prefill);
        const Spread decode = spread(one.decode);
        rows.push_back({std::to_string(one.batch), short_number(prefill.median), range(prefill), short_number(decode.median), range(decode),
                        short_number(1000 * one.batch / decode.median)});
    }
    return text + table("rrlrlr", rows);
}

static void run_bench(Bench &bench) {
    if (bench.batches.empty()) bench.batches = {1, 8};
    const auto check = [](const char *name, uint32_t value) {
        if (value == 0) refuse(name, "0", "at least 1");
    };
    check("--prompt-tokens", bench.prompt_tokens);
    check("--output-tokens", bench.output_tokens);
    check("--repeats", bench.repeats);
    for (const uint32_t batch : bench.batches) check("--batch", batch);
    Engine engine = load(options_for(bench));
    Load load(engine, bench);
    std::vector<Measurements> all;
    for (const uint32_t batch : bench.batches) all.push_back(measure(load, bench, batch));
    print(bench.writes_json ? to_json(bench, engine, all) : to_table(bench, engine, all));
}

Command bench_command() {
    const auto bench = std::make_shared<Bench>();
    Command command{"bench", "Measure tokens per second", "", {}, {}, {}};
    command.notes =
        "The prompts are random token ids, so that the model needs no tokenizer. Each repetition measures\n"
        "the prompts alone and then steps in which each sequence decodes one token. The machine must be\n"
        "idle. Options of the engine that are not given suit the largest batch.";
    command.groups.push_back(
        {"Measurement",
         {number("--prompt-tokens", "N", bench->prompt_tokens, "Length of each prompt. Default 128."),
          number("--output-tokens", "N", bench->output_tokens, "Number of measured decodes of each sequence. Default 64."),
          tokens("--batch", "N,...", bench->batches, "Numbers of sequences. Default 1,8."),
          number("--repeats", "N", bench->repeats, "Number of repetitions that are measured. Default 5."),
          number("--warmups", "N", bench->warmups, "Number of repetitions before those. Default 1."),
          toggle("--json", bench->writes_json, true, "Print all measurements as JSON.")}});
    add_engine_options(command, bench->options);
    command.run = [bench] { run_bench(*bench); };
    return command;
}

}  // namespace tool
