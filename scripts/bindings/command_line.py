"""examples/pagedllm/options_generated.hpp: the options of the command-line tool that mirror the C API.

A field without an option is an entry of OMITTED with the reason, so that a new field stops the
generator until it has one of the two."""
import re
import textwrap

from abi import KV_STORE_OPTIONS, NOTICE
from cpp import type_name, value_name

PATH = "examples/pagedllm/options_generated.hpp"

# The structs with options, and what precedes the names of their options.
STRUCTS = {"pllm_engine_options": "", "pllm_sampling": "", "pllm_dry": "dry_", "pllm_beam": "beam_", "pllm_request": ""}
# Fields and flags of pllm_sampling that select what an output reports. A chat does not have them.
REPORTS = {"top_logprobs", "prompt_top_logprobs", "prompt_logprobs_start", "PLLM_SAMPLING_LOGPROBS", "PLLM_SAMPLING_PROMPT_LOGPROBS",
           "PLLM_SAMPLING_ECHO"}
# Fields and flags without a generated option: why, or which code of the tool has the option.
OMITTED = {
    "pllm_engine_options.model_path": "the argument MODEL",
    "pllm_engine_options.seed": "the seed of a request",
    "pllm_engine_options.model_name": "no command prints metrics",
    "pllm_engine_options.queue_capacity": "each request has a queue of its own",
    "pllm_engine_options.progress": "the progress bar",
    "pllm_engine_options.progress_data": "the progress bar",
    "pllm_engine_options.budget": "the tool has one engine",
    **{f"pllm_engine_options.{name}": "needs code" for name in KV_STORE_OPTIONS},
    "pllm_engine_options.communicator": "the tool is one process",
    "pllm_engine_options.kv_events_capacity": "no command reads events",
    "pllm_request.kv_store_wait_ms": "no command has a store",
    "pllm_sampling.output_kind": "the tool selects it",
    "PLLM_SAMPLING_PREFILL_PROGRESS": "the tool prints no progress",
    "pllm_sampling.grammar_kind": "--json-schema and others, in grammar.cpp",
    "pllm_sampling.grammar": "--json-schema and others, in grammar.cpp",
    "pllm_sampling.choices": "--choice, in grammar.cpp",
    "pllm_sampling.dry": "the options of pllm_dry",
    "PLLM_SAMPLING_SEED": "--seed",
    "PLLM_SAMPLING_MODEL_DEFAULTS": "--no-model-defaults, in parameters.cpp",
    "pllm_request.prompt": "the argument PROMPT",
    "pllm_request.prompt_token_ids": "--prompt-token-ids, in complete.cpp",
    "pllm_request.sampling": "the options of pllm_sampling",
    "pllm_request.user_data": "the tool has one request at a time",
    "pllm_request.priority": "the tool has one request at a time",
    "pllm_request.queue": "each request has a queue of its own",
    "pllm_request.beam": "the options of pllm_beam",
    "pllm_request.cache_salt": "all requests are from one user",
    "pllm_request.logits_hook": "a hook is code",
    "pllm_request.hook_data": "a hook is code",
    "PLLM_REQUEST_KEEP": "no command continues a sequence",
}
# Sets whose values are the values of options, or are shown.
SHOWN = ["PLLM_FINISH", "PLLM_STOP", "PLLM_PACKED"]
# Helps that differ from the documentation of the field or flag.
HELPS = {
    "pllm_engine_options.device": "\"cpu\" (default), or \"cuda:0\" for the first CUDA device. A list such as "
    "\"cuda:0,cuda:1\" divides the model among these devices.",
    "pllm_engine_options.threads": "Number of threads. 0 (default): the number of CPUs on which the process may run.",
    "pllm_engine_options.max_waiting_requests": "Maximum number of requests that wait for their first step. 0 (default): no limit.",
    "pllm_engine_options.swap_path": "Directory for the host tier, which is a file there. Default: the tier is in memory.",
    "pllm_engine_options.preemption": "Treatment of preempted requests: PLLM_PREEMPTION_*. Default recompute. The others need swap_bytes.",
    "pllm_engine_options.ageing_ms": "Waiting time in milliseconds after which a request is preferred. 0 (default): 10,000.",
    "pllm_engine_options.trace_path": "File for a trace of every step, in the format of Perfetto. An existing file is replaced.",
    "pllm_engine_options.journal_path": "File for a journal, from which pagedllm-replay repeats the steps. It contains prompts. An existing "
    "file is replaced.",
    "pllm_engine_options.weight_format": "Format of the weights in memory: PLLM_WEIGHTS_*. Fewer bits take less memory and time, and cost "
    "quality. Of the 4-bit formats, int4-asymmetric is more precise. Default as-stored.",
    "pllm_engine_options.packed_path": "Directory that keeps packed weights, so that the next start is faster. Default: weights are packed "
    "each time.",
    "pllm_engine_options.cpus": "CPUs to which the threads are pinned, such as 0-3,8. Default: threads are not pinned.",
    "pllm_engine_options.max_prompt_bytes": "Maximum length in bytes of a prompt. 0 (default): 64 for each token of max_model_len, at least "
    "1048576.",
    "PLLM_ENGINE_SKIP_TOKENIZER": "Load no tokenizer: prompts and outputs are token ids.",
    "PLLM_ENGINE_BATCH_INVARIANT": "On a CUDA device: the results of a sequence do not depend on the batch, as on the CPU. Slower.",
    "pllm_sampling.seed": "Seed of the random numbers. Default: the same in each run.",
    "pllm_sampling.max_tokens": "Maximum number of generated tokens. 0: only the prompt is computed. Default: up to max_model_len.",
    "PLLM_SAMPLING_PROMPT_LOGPROBS": "Report the log probability of each prompt token except the first.",
    "PLLM_SAMPLING_ECHO": "The output begins with the prompt.",
    "pllm_sampling.bad_words": "Texts that the output must not contain. At most 1024 texts of 65536 bytes in all.",
    "pllm_sampling.logit_bias": "Values that are added to the logits of tokens, from -100 to 100, as ID=VALUE.",
    "pllm_sampling.prompt_logprobs_start": "Position of the first prompt token whose log probability is reported. Default 0: all except the "
    "first token.",
    "pllm_dry.sequence_breakers": "Texts that end a repetition. Default: newline, colon, quotation mark and asterisk. At most 64 texts of at "
    "most 128 bytes each.",
    "pllm_beam.early_stopping": "When the search stops: PLLM_EARLY_STOPPING_*. Default no.",
    "pllm_request.n": "Number of results: samples, or best beams. Default 1.",
    "pllm_request.best_of": "Number of samples to generate, of which the n with the highest log probability are returned. 0 (default): n.",
    "pllm_request.deadline_ms": "Time in milliseconds after which a request ends with the tokens it has. 0 (default): none.",
    "PLLM_TEXT_ADD_SPECIAL": "The tokenizer adds no special tokens, such as BOS, to a prompt.",
    "PLLM_TEXT_SKIP_SPECIAL": "Special tokens stay in the text.",
}
# Values in helps: for a number with a unit, for an array by what it points to, and for the rest.
UNITS = {"bytes": "SIZE", "tokens": "N", "milliseconds": "MS"}
ARRAYS = {"u32": "ID,...", "pllm_logit_bias": "ID=VALUE", "pllm_token_list": "ID,..."}


def option_name(name):
    """kv_bytes -> --kv-bytes"""
    return "--" + name.replace("_", "-")


def choice_name(constant):
    """PLLM_WEIGHTS_AS_STORED -> as-stored"""
    return constant.short.lower().replace("_", "-")


def choices_name(set_name):
    """PLLM_FINISH -> finish_reason_choices"""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type_name(set_name)).lower() + "_choices"


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def lines(text):
    """Divides a text in lines. Each line but the last one ends with a space."""
    found = textwrap.wrap(text, 80, break_long_words=False, break_on_hyphens=False)
    return [f"{line} " for line in found[:-1]] + found[-1:]


class Generator:
    def __init__(self, abi):
        self.abi = abi
        self.unused = set(OMITTED) | set(HELPS)

    def is_omitted(self, key):
        self.unused.discard(key)
        return key in OMITTED

    def help(self, key, doc, struct):
        self.unused.discard(key)
        text = HELPS.get(key, doc)
        text = re.sub(r" ?(UTF-8|NULL \(default\): (none|all)\.)", "", text) if text.endswith("UTF-8.") else text
        text = re.sub(r"NULL \(default\)", "Default", text)
        text = re.sub(r"(PLLM_\w+)_\*", lambda match: ", ".join(map(choice_name, self.abi.sets[match[1]])), text)
        known = {constant.name: constant for constant in self.abi.constants}
        flags = {flag.name for field in struct.fields for flag in self.abi.flags(field)}

        def name(match):
            constant = known[match[0]]
            return self.flag_name(constant, 0) if constant.name in flags else choice_name(constant)

        text = re.sub(r"PLLM_\w+", name, text)
        for owner in {struct.name, "pllm_engine_options"}:
            names = [field.name for field in self.abi.struct(owner).fields if "_" in field.name]
            pattern = rf"\b({'|'.join(sorted(names, key=len, reverse=True))})\b"
            text = re.sub(pattern, lambda match: option_name(STRUCTS[owner] + match[1]), text)
        if re.search(r"PLLM_|pllm_|NULL", text):
            raise SystemExit(f"{PATH}: the help of {key} is for C programs ({text}); add it to HELPS")
        return "\n".join(quoted(line) for line in lines(text))

    def flag_name(self, constant, default):
        name = constant.short.lower()
        return option_name(f"no_{name}" if default else name)

    def flag(self, struct, field, constant):
        default = field.default & constant.value
        name = value_name(constant)
        help_ = self.help(constant.name, constant.doc, struct)
        return f"toggle({quoted(self.flag_name(constant, default))}, to.{name}, {'false' if default else 'true'},\n{help_})"

    def option(self, struct, field):
        name, member = option_name(STRUCTS[struct.name] + field.name), field.name.removesuffix("_ms")
        help_ = self.help(f"{struct.name}.{field.name}", field.doc, struct)
        if field.role == "choice":
            return f"choice({quoted(name)}, {choices_name(field.set)}, to.{member},\n{help_})"
        if field.role == "number":
            value = UNITS.get(field.unit) or ("X" if field.type in ("f32", "f64") else "N")
            kind = "size" if value == "SIZE" else "duration" if value == "MS" else "number"
        elif field.role == "text":
            value = "DIR" if field.doc.startswith("Directory") else "FILE" if field.doc.startswith("File") else "TEXT"
            kind = "text"
        elif field.role == "texts":
            value, kind = "TEXT", "texts"
        elif field.role == "array" and field.target in ARRAYS:
            value, kind = ARRAYS[field.target], {"u32": "tokens", "pllm_logit_bias": "biases", "pllm_token_list": "token_lists"}[field.target]
        else:
            raise SystemExit(f"{PATH}: {struct.name}.{field.name} needs an option; add it to OMITTED with the reason if it has none")
        return f"{kind}({quoted(name)}, {quoted(value)}, to.{member},\n{help_})"

    def options(self, struct):
        items, reports = [], []
        for field in struct.fields:
            flags = self.abi.flags(field)
            for flag in flags:
                if not self.is_omitted(flag.name):
                    (reports if flag.name in REPORTS else items).append(self.flag(struct, field, flag))
            if not flags and field.is_data and not self.is_omitted(f"{struct.name}.{field.name}"):
                (reports if field.name in REPORTS else items).append(self.option(struct, field))
        text = self.function(struct.short.removesuffix("_options"), struct, items)
        return text + ("\n" + self.function("report", struct, reports) if reports else "")

    def function(self, name, struct, items):
        body = "".join(f"{item},\n" for item in items).replace("\n", "\n" + 12 * " ")
        body = re.sub(r"^ +(?=[a-z])", 8 * " ", body, flags=re.M).rstrip() + "\n"
        return (f"inline std::vector<Option> {name}_options(pagedllm::{type_name(struct.name)} &to) {{\n    return {{\n        {body}"
                "    };\n}\n")

    def choices(self, set_name, constants):
        kind = type_name(set_name)
        values = "".join(f"    {{{quoted(choice_name(constant))}, pagedllm::{kind}::{value_name(constant)}}},\n" for constant in constants)
        return f"inline constexpr Choice<pagedllm::{kind}> {choices_name(set_name)}[] = {{\n{values}}};\n"


def files(abi, _root):
    generator = Generator(abi)
    structs = [abi.struct(name) for name in STRUCTS]
    sets = {field.set for struct in structs for field in struct.fields
            if field.role == "choice" and f"{struct.name}.{field.name}" not in OMITTED}
    shown = [name for name in abi.sets if name in sets or name in SHOWN]
    text = f"// {NOTICE}\n// The options of the tool that mirror the C API: scripts/bindings/command_line.py.\n"
    text += "#pragma once\n\n#include \"options.hpp\"\n\nnamespace tool {\n\n"
    text += "\n".join(generator.choices(name, abi.sets[name]) for name in shown)
    text += "\n" + "\n".join(generator.options(struct) for struct in structs)
    if generator.unused:
        raise SystemExit(f"{PATH}: OMITTED or HELPS has {', '.join(sorted(generator.unused))}, which the C API does not have; delete it")
    return {PATH: text + "\n}  // namespace tool\n"}
