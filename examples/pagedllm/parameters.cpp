#include "parameters.hpp"

#include "options_generated.hpp"

namespace tool {

using pagedllm::Grammar;

// Calls `note` for each option that is given.
static std::vector<Option> with_note(std::vector<Option> options, const std::function<void(const std::string &name)> &note) {
    for (Option &option : options) {
        option.set = [name = option.name, set = option.set, note](const std::string &text) {
            set(text);
            note(name);
        };
    }
    return options;
}

static std::vector<Option> grammar_options(Grammar &to) {
    const auto of = [&to](const std::string &name, Grammar (*make)(std::string)) {
        return [name, make, &to](const std::string &text) { to = make(text_or_file(name, text)); };
    };
    const auto add_choice = [&to](const std::string &text) {
        if (to.kind != pagedllm::GrammarKind::choice) to = Grammar::choice({});
        to.choices.push_back(text);
    };
    return {
        {"--json-schema", "SCHEMA", "The output is JSON that this schema describes, or the schema in a file, as @FILE.",
         of("--json-schema", Grammar::json_schema)},
        {"--json-object", "", "The output is any JSON object.", [&to](const std::string &) { to = Grammar::json_object(); }},
        {"--regex", "REGEX", "The output matches this regular expression of Python as a whole.", of("--regex", Grammar::regex)},
        {"--choice", "TEXT", "The output is one of the texts of all --choice.", add_choice, true},
        {"--lark", "GRAMMAR", "The output is a text of this Lark grammar, or of the grammar in a file, as @FILE.",
         of("--lark", Grammar::lark)},
    };
}

void Parameters::add_to(Command &command) {
    std::vector<Option> options = with_note(sampling_options(sampling), [this](const std::string &name) { given.insert(name); });
    options.push_back(toggle("--no-model-defaults", has_model_defaults, false,
                             "Parameters that are not given have the defaults of the library and not those of the model's "
                             "generation_config.json."));
    command.groups.push_back({"Sampling", options});
    const auto note_dry = [this](const std::string &) { has_dry = true; };
    command.groups.push_back({"DRY penalty (off by default)", with_note(dry_options(dry), note_dry)});
    const auto note_grammar = [this](const std::string &name) { grammars.insert(name); };
    command.groups.push_back({"Grammar (at most one)", with_note(grammar_options(sampling.grammar), note_grammar)});
}

void Parameters::add_beam_to(Command &command) {
    const auto note_beam = [this](const std::string &) { has_beam = true; };
    command.groups.push_back({"Beam search (off by default)", with_note(beam_options(beam), note_beam)});
}

pagedllm::Sampling Parameters::resolved() const {
    if (grammars.size() > 1) throw UsageError(*grammars.begin() + " and " + *grammars.rbegin() + " are given; give one of them");
    pagedllm::Sampling result = sampling;
    if (has_dry) result.dry = dry;
    // The library replaces each parameter that has its default by that of the model. Without model
    // defaults, a parameter that is given has its value in any case.
    const pagedllm::Sampling standard;
    const auto asks_for = [this](const char *name, bool is_standard) { return is_standard && given.count(name) > 0; };
    result.model_defaults = has_model_defaults && !asks_for("--temperature", sampling.temperature == standard.temperature) &&
                            !asks_for("--top-p", sampling.top_p == standard.top_p) &&
                            !asks_for("--min-p", sampling.min_p == standard.min_p) &&
                            !asks_for("--top-k", sampling.top_k == standard.top_k) &&
                            !asks_for("--typical-p", sampling.typical_p == standard.typical_p) &&
                            !asks_for("--repetition-penalty", sampling.repetition_penalty == standard.repetition_penalty) &&
                            !asks_for("--no-repeat-ngram-size", sampling.no_repeat_ngram_size == standard.no_repeat_ngram_size);
    return result;
}

}  // namespace tool
