// The commands plan and inspect: what an engine would need, and what a model is.
#include <memory>

#include "../shared/utf8.hpp"
#include "engine.hpp"
#include "format.hpp"
#include "options_generated.hpp"
#include "terminal.hpp"

namespace tool {

using pagedllm::Engine;

namespace {

struct Report {
    pagedllm::Options options;
    bool writes_json = false;
};

}  // namespace

// ---- plan ----------------------------------------------------------------------------------------

static std::string plan_json(const pagedllm::Plan &plan) {
    Json json;
    json.begin_object().member("weight_bytes", plan.weight_bytes).member("kv_bytes", plan.kv_bytes);
    json.member("work_bytes", plan.work_bytes).member("blocks", plan.blocks).member("block_size", plan.block_size);
    json.member("block_bytes", plan.block_bytes).member("max_model_len", plan.max_model_len);
    json.member("full_sequences", plan.full_sequences).member("kv_dtype", name_of(dtype_choices, pagedllm::Dtype(plan.kv_dtype)));
    json.member("max_blocks", plan.max_blocks).member("swap_bytes", plan.swap_bytes).member("swap_blocks", plan.swap_blocks);
    return json.member("kv_groups", plan.kv_groups).end_object().text();
}

static std::string plan_table(const pagedllm::Plan &plan) {
    const auto count = [](uint64_t number) { return std::to_string(number); };
    std::vector<std::vector<std::string>> rows = {
        {"weights", bytes_text(plan.weight_bytes)},
        {"KV pool", bytes_text(plan.kv_bytes)},
        {"working memory", bytes_text(plan.work_bytes)},
        {"together", bytes_text(plan.weight_bytes + plan.kv_bytes + plan.work_bytes)},
        {"host tier", plan.swap_bytes ? bytes_text(plan.swap_bytes) + ", " + count(plan.swap_blocks) + " blocks" : "none"},
        {"KV blocks", count(plan.blocks) + " of " + count(plan.block_size) + " tokens in " +
                          name_of(dtype_choices, pagedllm::Dtype(plan.kv_dtype)) + ", " + bytes_text(plan.block_bytes) + " each"},
    };
    if (plan.max_blocks != plan.blocks) rows.push_back({"KV blocks at most", count(plan.max_blocks)});
    if (plan.kv_groups > 1) rows.push_back({"layer groups", count(plan.kv_groups) + ", each with blocks of its own"});
    rows.push_back({"longest sequence", count(plan.max_model_len) + " tokens"});
    rows.push_back({"such sequences that fit", count(plan.full_sequences)});
    return table("ll", rows);
}

static void run_plan(const Report &report) {
    const pagedllm::Plan plan = Engine::plan(report.options).value();
    print(report.writes_json ? plan_json(plan) : plan_table(plan));
}

Command plan_command() {
    const auto report = std::make_shared<Report>();
    Command command{"plan", "Print the memory that a model needs", "", {}, {}, {}};
    command.notes = "Reads the headers of the model's files, and allocates none of this memory.";
    command.groups.push_back({"Output", {toggle("--json", report->writes_json, true, "Print the plan as JSON, in bytes.")}});
    add_engine_options(command, report->options);
    command.run = [report] { run_plan(*report); };
    return command;
}

// ---- inspect -------------------------------------------------------------------------------------

namespace {

struct Inspection {
    pagedllm::ModelInfo info;
    pagedllm::Plan plan;
    pagedllm::Weights weight_format;
    bool has_tokenizer;
    bool has_chat_template;
    std::string template_error;           // why the template cannot be used
    std::vector<uint32_t> prompt_tokens;  // special tokens that the tokenizer adds to a prompt
};

}  // namespace

// The chat template is there unless the library reports that the model has none.
static void inspect_template(const Engine &engine, Inspection &to) {
    const auto rendered = engine.render_chat(R"([{"role": "user", "content": "Hello"}])");
    to.has_chat_template = rendered.ok() || rendered.error().code != pagedllm::Code::unsupported;
    if (!rendered) to.template_error = rendered.error().message;
}

static Inspection inspect(const Engine &engine, const pagedllm::Options &options) {
    Inspection result{};
    result.info = engine.model_info().value();
    result.plan = Engine::plan(options).value();
    result.weight_format = options.weight_format;
    const auto tokens = engine.tokenize("");
    result.has_tokenizer = tokens.ok();
    if (!tokens && tokens.error().code != pagedllm::Code::unsupported) tokens.value();
    if (tokens) result.prompt_tokens = *tokens;
    inspect_template(engine, result);
    return result;
}

static void write_tokens(const Engine &engine, bool has_tokenizer, pagedllm::Span<const uint32_t> tokens, Json &json) {
    json.begin_array();
    for (const uint32_t token : tokens) {
        json.begin_object().member("id", token);
        if (has_tokenizer) json.member("text", utf8::printable(engine.token_bytes(token).value()));
        json.end_object();
    }
    json.end_array();
}

static std::string inspect_json(const Engine &engine, const Inspection &model) {
    const pagedllm::ModelInfo &info = model.info;
    Json json;
    json.begin_object().member("architecture", info.architecture).member("isa", info.isa).member("layers", info.layers);
    json.member("vocab_size", info.vocab_size).member("max_positions", info.max_positions).member("max_model_len", info.max_model_len);
    json.member("threads", info.threads).key("eos_token_ids");
    write_tokens(engine, model.has_tokenizer, info.eos_token_ids, json);
    json.member("has_tokenizer", model.has_tokenizer).key("prompt_token_ids");
    write_tokens(engine, model.has_tokenizer, {model.prompt_tokens.data(), model.prompt_tokens.size()}, json);
    json.member("has_chat_template", model.has_chat_template).member_or_null("chat_template_error", model.template_error);
    json.member("weight_format", name_of(weights_choices, model.weight_format)).member("weight_bytes", model.plan.weight_bytes);
    json.member("kv_dtype", name_of(dtype_choices, pagedllm::Dtype(model.plan.kv_dtype))).member("kv_groups", model.plan.kv_groups);
    json.member("packed", name_of(packed_choices, info.packed)).member_or_null("packed_reason", info.packed_reason);
    json.member_or_null("blas_library", info.blas_library);
    return json.key("library").raw(pllm_build_info()).end_object().text();
}

static std::string tokens_text(const Engine &engine, bool has_tokenizer, pagedllm::Span<const uint32_t> tokens) {
    std::string text;
    for (const uint32_t token : tokens) {
        text += (text.empty() ? "" : ", ") + std::to_string(token);
        if (has_tokenizer) text += " " + json_string(utf8::printable(engine.token_bytes(token).value()));
    }
    return text.empty() ? "none" : text;
}

static std::string inspect_table(const Engine &engine, const Inspection &model) {
    const pagedllm::ModelInfo &info = model.info;
    const auto count = [](uint64_t number) { return std::to_string(number); };
    std::vector<std::vector<std::string>> rows = {
        {"architecture", std::string(info.architecture)},
        {"layers", count(info.layers)},
        {"vocabulary", count(info.vocab_size) + " tokens"},
        {"longest sequence", count(info.max_model_len) + " tokens here, " + count(info.max_positions) + " of the model"},
        {"end-of-sequence tokens", tokens_text(engine, model.has_tokenizer, info.eos_token_ids)},
        {"tokenizer", model.has_tokenizer ? "yes" : "no"},
    };
    if (model.has_tokenizer) {
        const pagedllm::Span<const uint32_t> added{model.prompt_tokens.data(), model.prompt_tokens.size()};
        rows.push_back({"added to a prompt", tokens_text(engine, true, added)});
    }
    rows.push_back({"chat template", model.has_chat_template ? "yes" : "no"});
    if (model.has_chat_template && !model.template_error.empty()) rows.push_back({"chat template error", model.template_error});
    rows.push_back({"weights", std::string(name_of(weights_choices, model.weight_format)) + ", " + bytes_text(model.plan.weight_bytes)});
    rows.push_back({"KV", name_of(dtype_choices, pagedllm::Dtype(model.plan.kv_dtype))});
    if (model.plan.kv_groups > 1) rows.push_back({"layer groups", count(model.plan.kv_groups)});
    if (info.packed != pagedllm::Packed::unused) rows.push_back({"packed weights", name_of(packed_choices, info.packed)});
    if (!info.packed_reason.empty()) rows.push_back({"packed weights, reason", std::string(info.packed_reason)});
    rows.push_back({"instruction path", std::string(info.isa)});
    if (!info.blas_library.empty()) rows.push_back({"BLAS library", std::string(info.blas_library)});
    rows.push_back({"threads", count(info.threads)});
    return table("ll", rows);
}

static void run_inspect(const Report &report) {
    const Engine engine = load(report.options);
    const Inspection model = inspect(engine, report.options);
    print(report.writes_json ? inspect_json(engine, model) : inspect_table(engine, model));
}

Command inspect_command() {
    const auto report = std::make_shared<Report>();
    Command command{"inspect", "Print what a model is", "", {}, {}, {}};
    command.notes = "Loads the model, because the library describes loaded models only.";
    command.groups.push_back({"Output", {toggle("--json", report->writes_json, true, "Print the description as JSON.")}});
    add_engine_options(command, report->options);
    command.run = [report] { run_inspect(*report); };
    return command;
}

}  // namespace tool
