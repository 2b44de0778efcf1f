"""bindings/node/abi.js and abi.d.ts: the constants, structs and functions for koffi, the conversion
of options and results, and their types."""
import dataclasses
import re

from abi import KV_STORE_OPTIONS, NOTICE, camel, wrapped

# Types of sets whose name is not that of the set in camel case.
UNIONS = {
    "PLLM_E": "Code", "PLLM_WEIGHTS": "WeightFormat", "PLLM_OUTPUT": "OutputKind", "PLLM_FINISH": "FinishReason",
    "PLLM_STOP": "StopReason", "PLLM_KV_EVENT": "KvEventKind",
}
# Sets of reasons: none is null, and a reason that only a newer library knows is 'other'.
REASONS = {"PLLM_FINISH", "PLLM_STOP"}
# Summaries of sets whose fields have none.
SUMMARIES = {
    "PLLM_E": "Code of an error. A newer library can have codes without a name here: PLLM_E_ and a number.",
    "PLLM_KV_EVENT": "What has happened to a block of the prefix cache.",
    "PLLM_KV_MEDIUM": "Place of a KV block.",
    "PLLM_PREEMPTION": "Treatment of preempted requests.",
    "PLLM_EARLY_STOPPING": "When a beam search ends.",
    "PLLM_FINISH": "Why a sequence ended. null: it has not ended. 'other': a reason that only a newer library knows.",
    "PLLM_STOP": "What ended a sequence. null: it has not ended, or finishReason is not 'stop'. 'other': a reason that "
                 "only a newer library knows.",
}
# Names that are not in camel case: codes are those of C, instruction paths those of modelInfo().
UPPER, LOWER = "PLLM_E", "PLLM_ISA"

INTERFACES = {"pllm_engine_options": "Options", "pllm_fork": "ForkOptions"}
REQUIRED = {("pllm_engine_options", "model_path")}

# Fields that the methods of Engine fill or read, or that belong to another option.
HIDDEN = {"progress", "progress_data", "budget", "queue", "sampling", "logits_hook", "hook_data", "grammar_kind",
          "choices", "sequence_state", "error_code", "communicator"} | KV_STORE_OPTIONS
# Hidden fields that the interface has.
SHOWN = {("pllm_engine_options", "budget"): "Budget", ("pllm_fork", "queue"): "Queue"}

# Flags with another name than in C, and those that switch something off.
FLAG_NAMES = {"PLLM_ENGINE_NO_PREFIX_CACHE": "prefixCache", "PLLM_RESUME_CONTINUE": "continueGeneration"}
INVERTED = {"PLLM_ENGINE_NO_PREFIX_CACHE"}

# The rules of a grammar that are not a text.
RULES = {
    "jsonSchema": "object | boolean | string | Uint8Array", "jsonObject": "true", "choice": "(string | Uint8Array)[]",
}

# Numbers that can be larger than Number.MAX_SAFE_INTEGER.
IDS = {"request", "sequence", "user_data"}
# Fields of an output that a completion lacks.
ONLY_OUTPUT = {"error", "generatedTokens", "userData"}

# Fields of results with another form than in C: their name, type and conversion.
RESULTS = {
    ("pllm_sequence_info", "len"): ("length", "number", "c.len"),
    ("pllm_output", "error"): ("error", "PagedllmError | null", "errorOf(c)"),
    ("pllm_output", "stop_token"): (
        "stopToken", "number | null", "[STOP.eos, STOP.token].includes(c.stopReason) ? c.stopToken : null"),
    ("pllm_output", "stop_string"): (
        "stopString", "string | null", "c.stopReason === STOP.string ? text(c.stopString, c.stopStringLen) : null"),
    ("pllm_output", "logprobs"): ("logprobs", "number[] | null", "arrayOrNull(c.logprobs, f32, c.tokensLen)"),
    ("pllm_output", "top_logprobs"): (
        "topLogprobs", "Logprob[][] | null", "alternatives(c.topLogprobs, Logprob, c.topLogprobsLen, c.tokensLen)"),
    ("pllm_output", "prompt_logprobs"): (
        "promptLogprobs", "number[] | null", "arrayOrNull(c.promptLogprobs, f32, c.promptLogprobsLen)"),
    ("pllm_output", "prompt_top_logprobs"): (
        "promptTopLogprobs", "Logprob[][] | null",
        "alternatives(c.promptTopLogprobs, Logprob, c.promptTopLogprobsLen, c.promptLogprobsLen)"),
    ("pllm_admission", "first_token_seconds"): (
        "firstTokenMs", "number | null", "c.firstTokenSeconds < 0 ? null : c.firstTokenSeconds * 1000"),
    ("pllm_kv_event", "hash"): ("hash", "string | null", "hash(c.hash)"),
    ("pllm_kv_event", "parent_hash"): ("parentHash", "string | null", "hash(c.parentHash)"),
    ("pllm_plan", "kv_dtype"): ("kvDtype", "Exclude<Dtype, 'auto'>", "nameOf(DTYPE, c.kvDtype)"),
}

# Docs of options whose C form differs too much: (interface, name).
DOCS = {
    ("Options", "prefixCache"): "false disables the prefix cache. Default true.",
    ("Options", "queueCapacity"): "Capacity, in outputs, of Engine.queue. While it is full, its requests pause. "
                                  "0 (default): 65536.",
    ("ForkOptions", "at"): "Number of tokens that the children share with their parent: 1 to its length. Default: all.",
    ("Sampling", "grammar"): "Constraint on the output. Default: none.",
    ("Sampling", "keep"): "The sequences are kept when they end, for any reason, and become idle. resume() continues "
                          "one; free() frees it. Default: false for a new request, true for a resumed sequence.",
    ("Sampling", "deadlineMs"): "Milliseconds from now after which the sequence ends with 'deadline' and the tokens it "
                                "has. Default: none.",
    ("Options", "modelName"): "Value of the label model_name in metrics(). Default: the name of the model directory.",
    ("Output", "error"): "The error if finishReason is 'error', if it is 'abort' because the engine was closed, or "
                         "if an export or a change of an idle sequence failed. Else null.",
    ("FinishReason", "error"): "The computation failed. See the property error.",
    ("Generated", "stopToken"): "The token that ended the sequence, if stopReason is 'eos' or 'token'. Else null.",
    ("Generated", "stopString"): "The string that ended the sequence, if stopReason is 'string'. Else null.",
}

# What the functions and structs of C in docs are here.
REFERENCES = {
    "pllm_engine_get_metrics": "metrics()", "pllm_queue_create": "createQueue()", "pllm_engine_add_request": "add()",
    "pllm_sequence_resume": "resume()", "pllm_sequence_free": "free()", "pllm_engine_start": "start()",
    "pllm_engine_free": "close()", "pllm_engine_poll_kv_events": "pollKvEvents()", "pllm_stats": "stats()", "pllm_model_info": "modelInfo()",
}
# Phrases of docs about C, and their replacements.
PHRASES = [
    (r" *(Call pllm_\w+ first|Set struct_size before the call|UTF-8|NULL if the prompt is given as \w+)\.", ""),
    (r" *(The strings|Its pointers, except hook_data,) need to be valid only during the call\.", ""),
    (r" *(The output and its pointers|Pointers) (are|is) valid until the \w+ is freed\.", ""),
    (r": UTF-8, not NUL-terminated\b", ""),
    (r": PLLM_\w+_\*(, not PLLM_\w+)?\.", "."),
    (r"NULL \(default\)( selects|:)", "Default:"),
    (r"NULL with a count of 0 \(default\):", "Default:"),
    (r"A non-NULL pointer with a count of 0:", "An empty list:"),
    (r" \(default, also NULL\)", " (default)"),
    (r"Else NULL\b", "Else null"),
    (r"NULL if there (are none|is none)", "Empty if there \\1"),
    (r"\bNULL\b", "null"),
    (r" in (grammar|choices)\b( \(itself a JSON text\))?", ""),
    (r" \^ ", " ** "),
    (r"\bcalls return\b", "calls throw"),
    (r"\bDo not set it for a prompt that a chat template rendered\b",
     "Set it to false for a prompt that renderChat() rendered"),
    (r", logits_hook\b", ""),
    (r": top_logprobs_len / tokens_len for each token", ""),
    (r" 0 is unlimited for programs built with a header without \w+\.", ""),
    (r"PLLM_UNLIMITED_TOKENS \(default\):", "Default:"),
]

C_TYPES = {"u32": "uint32_t", "i32": "int32_t", "u64": "uint64_t", "i64": "int64_t", "f32": "float", "f64": "double"}
TOKEN_IDS = "ArrayLike<number> & Iterable<number>"
# Arrays of options: the setter and the type, by the type of an element.
ARRAYS = {
    "u32": ("set.tokens", TOKEN_IDS),
    "pllm_token_list": ("set.tokenLists", f"({TOKEN_IDS})[]"),
    "pllm_logit_bias": ("set.logitBiases", "Record<number, number>"),
}


@dataclasses.dataclass(frozen=True)
class Option:
    name: str
    type: str
    setter: str  # None if a method of Engine sets it
    doc: str
    required: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    type: str
    value: str
    doc: str


def files(abi, _root):
    node = Node(abi)
    return {"bindings/node/abi.js": node.module(), "bindings/node/abi.d.ts": node.declarations()}


def pascal(name):
    return name[0].upper() + camel(name)[1:]


def interface(name):
    return INTERFACES.get(name, pascal(name.removeprefix("pllm_")))


def union(set_name):
    return UNIONS.get(set_name) or pascal(constants_name(set_name).lower())


def constants_name(set_name):
    return set_name.removeprefix("PLLM_")


def constant_name(constant):
    if constant.set == UPPER:
        return constant.short
    return constant.short.lower() if constant.set == LOWER else camel(constant.short.lower())


def member(constant):
    return f"{constants_name(constant.set)}.{constant_name(constant)}"


def statement(text):
    """Returns a line, or several if it is too long."""
    if len(text) <= 100:
        return text + "\n"
    start, inner, end = re.fullmatch(r"(.*?[{(]) ?(.*?),? ?([})].*)", text).groups()
    return f"{start}\n{wrapped(inner + ',', '  ')}{end}\n"


def comment(doc, indent=""):
    if not doc:
        return ""
    doc = re.sub(r"\n(?!- |\n)", "\n\n", doc)
    line = f"{indent}/** {doc} */\n"
    if "\n" not in doc and len(line) <= 101:
        return line
    return f"{indent}/**\n{wrapped(doc, f'{indent} * ')}{indent} */\n"


class Node:
    def __init__(self, abi):
        self.abi = abi
        self.constants = {constant.name: constant for constant in abi.constants}
        chosen = {field.set for struct in abi.records for field in struct.fields if field.role == "choice"}
        # The sets of which a field takes one constant. A grammar is an object instead.
        self.choices = [name for name in abi.sets if name in chosen and name != "PLLM_GRAMMAR"]
        self.inputs = [struct for struct in abi.records if struct.init]
        nested = {field.target for struct in self.inputs for field in struct.fields}
        self.results = [struct for struct in abi.records if not struct.init and struct.name not in nested]

    # ---- docs

    def prose(self, text):
        """Returns a doc of C with the names of JavaScript."""
        for pattern, replacement in PHRASES:
            text = re.sub(pattern, replacement, text)
        text = re.sub(r"^(PLLM_\w+)_\*\.", lambda found: self.summary(found[1]), text)
        text = re.sub(r"PLLM_[A-Z0-9_]+\*?", lambda found: self.constant_in_docs(found[0]), text)
        text = re.sub(r"pllm_[a-z_]+", lambda found: REFERENCES.get(found[0]) or interface(found[0]), text)
        field = lambda found: camel(found[0]) if self.is_field(found[0]) else found[0]
        text = re.sub(r"\b[a-z]+(_[a-z0-9]+)+\b", field, text)
        return re.sub(" +", " ", text).strip()

    def is_field(self, name):
        return any(field.name == name for struct in self.abi.records for field in struct.fields)

    def constant_in_docs(self, name):
        if name.endswith("_*"):
            return union(name[:-2])
        constant = self.constants.get(name)
        if not constant or not constant.set or constant.set == UPPER:
            return name
        if constant.set not in self.choices:
            value = ": false" if name in INVERTED else ""
            return FLAG_NAMES.get(name, constant_name(constant)) + value
        return "null" if constant.short == "NONE" else f"'{constant_name(constant)}'"

    def summary(self, set_name):
        """Returns the first sentence of the field that takes a constant of the set."""
        fields = [field for struct in self.abi.records for field in struct.fields if field.set == set_name]
        doc = SUMMARIES.get(set_name) or self.prose(fields[0].doc)
        return doc.split(". ")[0].rstrip(".") + "."

    # ---- options

    def options(self, struct):
        """Returns the options in the order in which they are set: the flags last, because other
        options imply some of them."""
        flags = {constant.name: (constant, field) for field in struct.fields for constant in self.abi.flags(field)}
        options = []
        for field in struct.fields:
            shown = SHOWN.get((struct.name, field.name))
            if shown:
                options.append(Option(camel(field.name), shown, None, self.prose(field.doc)))
            elif field.name == "grammar":
                choices = struct.field("choices")
                texts = f"set.texts('{camel(choices.lens)}', '{camel(choices.count)}')"
                options.append(Option("grammar", "Grammar", f"set.grammar(GRAMMAR, {texts})", ""))
            elif field.is_data and field.name not in HIDDEN and not self.abi.flags(field):
                options.append(self.option(struct, field, flags))
        for constant, field in flags.values():
            name = FLAG_NAMES.get(constant.name, constant_name(constant))
            if constant.short.lower() not in [field.name for field in struct.fields]:
                how = "notFlag" if constant.name in INVERTED else "flag"
                doc = self.prose(constant.doc) + (" Default true." if field.default & constant.value else "")
                options.append(Option(name, "boolean", f"set.{how}('{camel(field.name)}', {member(constant)})", doc))
        return options

    def option(self, struct, field, flags):
        setter, doc = self.setter(field), field.doc
        implied = re.search(r"(, used )?[Ww]ith (PLLM_\w+)(: |\.)", doc)
        if implied and implied[2] in flags:
            constant, flag_field = flags[implied[2]]
            setter = f"set.withFlag({setter}, '{camel(flag_field.name)}', {member(constant)})"
            doc = doc.replace(implied[0], "." if implied[1] else "")
            doc = doc[0].upper() + doc[1:]
            _, without, default = constant.doc.partition("Without this flag")
            doc += f" If it is left out,{default}" if without else ""
        required = (struct.name, field.name) in REQUIRED
        return Option(camel(field.name), self.option_type(field), setter, self.prose(doc), required)

    def setter(self, field):
        if field.name == "deadline_ms":
            return "set.deadline"
        if field.role == "number":
            return f"set.{field.type}"
        if field.role == "choice":
            return f"set.choice({constants_name(field.set)})"
        if field.role == "texts":
            return f"set.texts('{camel(field.lens)}', '{camel(field.count)}')"
        if field.role == "text" or field.target == "u8":
            return "set.text"
        if field.role == "array":
            return ARRAYS[field.target][0]
        assert field.role == "pointer", f"{field.name}: a method of Engine has to convert it, so it belongs to HIDDEN"
        return f"set.record({camel(field.target.removeprefix('pllm_'))})"

    def option_type(self, field):
        if field.role == "number":
            return "number | bigint" if field.type == "u64" else "number"
        if field.role == "choice":
            return union(field.set)
        if field.role == "texts":
            return "string | Uint8Array | (string | Uint8Array)[]"
        if field.role == "text" or field.target == "u8":
            return "string | Uint8Array"
        if field.role == "array":
            return ARRAYS[field.target][1]
        return interface(field.target)

    # ---- results

    def result(self, struct, field):
        name, c_name, doc = camel(field.name), f"c.{camel(field.name)}", self.prose(field.doc)
        if field.name.endswith("_seconds"):
            doc = doc.replace("seconds", "milliseconds")
        if (struct.name, field.name) in RESULTS:
            result = Result(*RESULTS[struct.name, field.name], doc.replace("Negative if", "null if"))
            if result.type.endswith("[] | null") and "null" not in doc:
                result = dataclasses.replace(result, doc=f"{doc} null if the request did not ask for them.")
            return result
        if field.name.endswith("_seconds"):
            return Result(name.replace("Seconds", "Ms"), "number", f"{c_name} * 1000", doc)
        if field.role == "choice":
            read = "reasonOf" if field.set in REASONS else "nameOf"
            return Result(name, union(field.set), f"{read}({constants_name(field.set)}, {c_name})", doc)
        if field.role == "text":
            return Result(name, "string", f"text({c_name}, c.{camel(field.len)})", doc)
        if field.role == "array":
            return Result(name, "number[]", f"array({c_name}, {field.target}, c.{camel(field.len)})", doc)
        # The statistics are numbers that can be added.
        if field.is_bool and struct.name != "pllm_stats":
            return Result(name, "boolean", f"{c_name} !== 0", re.sub(", 0 if ", ", false if ", f"true{doc[1:]}"))
        return Result(name, "number | bigint" if field.name in IDS else "number", c_name, doc)

    def results_of(self, struct):
        return [self.result(struct, field) for field in struct.fields if field.is_data and field.name not in HIDDEN]

    # ---- abi.js

    def module(self):
        text = f"'use strict';\n// {NOTICE}\n"
        text += "// The constants, structs and functions of C, and the conversion of options and results.\n"
        text += statement("const { PagedllmError, alternatives, array, arrayOrNull, hash, koffi, loadLibrary, nameOf, reasonOf, set, "
                          "struct, text } = require('./runtime.js');") + "\n"
        exported = []
        for constant in self.abi.constants:
            if not constant.set:
                text += f"const {constant.short} = {constant.value}{'n' if constant.value > 2**53 else ''};\n"
                exported.append(constant.short)
        text += "\n"
        for name, constants in self.abi.sets.items():
            values = ", ".join(f"{constant_name(constant)}: {constant.value}" for constant in constants)
            text += statement(f"const {constants_name(name)} = {{ {values} }};")
            exported.append(constants_name(name))
        text += "\n// ---- structs and callbacks\n\n"
        text += "".join(f"const {name} = '{c_type}';\n" for name, c_type in C_TYPES.items())
        text += "const pointer = 'void *';\nconst to = koffi.pointer;\nconst pointers = to(pointer);\nconst lengths = to(u64);\n"
        for callback in self.abi.callbacks:
            arguments = ", ".join(self.plain(argument.type) for argument in callback.arguments)
            text += f"const {pascal(callback.short)} = to(koffi.proto({self.plain(callback.returns)}, [{arguments}]));\n"
        for struct in self.in_order():
            fields = "".join(f"  {camel(field.name)}: {self.field_type(field)},\n" for field in struct.fields)
            text += f"const {pascal(struct.short)} = struct('{struct.name}', {struct.size}, {{\n{fields}}});\n"
            exported.append(pascal(struct.short))
        text += "\n// ---- functions\n\nconst library = loadLibrary(ABI_VERSION);\nconst lib = {};\n"
        text += "function declare(name, result, ...args) {\n  lib[name] = library.func(`pllm_${name}`, result, args);\n}\n"
        for function in self.abi.functions:
            types = ", ".join([self.returned(function), *map(self.passed, function.arguments)])
            text += f"declare('{function.short}', {types});\n"
        text += "\n// ---- options: setters in the order in which they apply\n\n"
        for struct in [struct for struct in self.in_order() if struct.init]:
            options = self.options(struct)
            required = [option.name for option in options if option.required]
            text += f"const {camel(struct.short)} = {{\n  type: {pascal(struct.short)},\n  init: lib.{struct.short}_init,\n"
            text += f"  required: {required},\n" if required else ""
            setters = "".join(f"    {option.name}: {option.setter},\n" for option in options if option.setter)
            text += f"  set: {{\n{setters}  }},\n}};\n"
            exported.append(camel(struct.short))
        text += "\n// ---- results\n\n"
        text += "const codeOf = (code) => `PLLM_E_${nameOf(E, code) ?? code}`;\n"
        text += "const errorOf = ({ errorCode, error, errorLen }) =>\n"
        text += "  (errorCode ? new PagedllmError(codeOf(errorCode), text(error, errorLen)) : null);\n"
        for struct in self.results:
            if struct.fields[0].role == "struct_size":
                fields = "".join(f"    {result.name}: {result.value},\n" for result in self.results_of(struct))
                text += f"\nfunction to{pascal(struct.short)}(c) {{\n  return {{\n{fields}  }};\n}}\n"
                exported.append(f"to{pascal(struct.short)}")
        return text + "\n" + statement(f"module.exports = {{ {', '.join([*exported, 'codeOf', 'errorOf', 'lib'])} }};")

    def in_order(self):
        """Returns the structs, each after those to which it points."""
        done = {}

        def add(struct):
            for field in struct.fields:
                if field.target in records:
                    add(records[field.target])
            done[struct.name] = struct

        records = {struct.name: struct for struct in self.abi.records}
        for struct in self.abi.records:
            add(struct)
        return list(done.values())

    def is_record(self, name):
        return any(struct.name == name for struct in self.abi.records)

    def plain(self, c_type):
        return c_type if c_type in C_TYPES else "'void'" if c_type == "void" else "pointer"

    def field_type(self, field):
        if field.role == "callback":
            return pascal(field.type.removeprefix("pllm_"))
        if field.role == "texts":
            return "pointers"
        if field.role == "length" and "*" in field.type:
            return "lengths"
        if self.is_record(field.target):
            return f"to({pascal(field.target.removeprefix('pllm_'))})"
        return self.plain(field.type)

    def returned(self, function):
        # The data of a pllm_bytes does not end with NUL.
        is_text = function.returns == "const char *" and not function.name.endswith("_data")
        return "'str'" if is_text else self.plain(function.returns)

    def passed(self, argument):
        target = argument.type.removeprefix("const ").removesuffix("*").strip()
        if self.is_record(target):
            pointer = f"to({pascal(target.removeprefix('pllm_'))})"
            return pointer if argument.type.startswith("const ") else f"koffi.inout({pointer})"
        if argument.name.startswith("out_"):
            return f"koffi.out(to({self.plain(target)}))"
        return self.plain(argument.type)

    # ---- abi.d.ts

    def declarations(self):
        text = f"// {NOTICE}\n"
        text += "// An option that is left out has the library's default. A text as a Uint8Array is UTF-8.\n"
        text += "import type { Budget, PagedllmError, Queue } from './pagedllm.js';\n"
        for name in self.choices:
            text += "\n" + self.union(name)
        text += "\n" + self.grammar()
        sampling, request, resume = (self.abi.struct(f"pllm_{name}") for name in ("sampling", "request", "resume"))
        resumed = [option.name for option in self.options(resume)]
        common = [option for option in self.options(request) if option.name in resumed]
        for struct in self.inputs:
            options = self.options(struct)
            if struct is sampling:
                options += common
            if struct is request:
                options = [option for option in options if option not in common]
            if struct is not resume:
                extends = " extends Sampling" if struct is request else ""
                text += "\n" + self.option_interface(struct, extends, options)
        for struct in self.results:
            results = self.results_of(struct)
            if struct.name == "pllm_output":
                both = [result for result in results if result.name not in ONLY_OUTPUT]
                doc = "The tokens and text of a sequence: all of them, or the new ones."
                text += "\n" + self.result_interface("Generated", "", doc, both)
                results = [result for result in results if result.name in ONLY_OUTPUT]
                text += "\n" + self.result_interface("Output", " extends Generated", self.prose(struct.doc), results)
            else:
                text += "\n" + self.result_interface(interface(struct.name), "", self.prose(struct.doc), results)
        return text

    def union(self, set_name):
        name = union(set_name)
        doc = (SUMMARIES.get(set_name) or self.summary(set_name)) + "\n"
        names = []
        for constant in self.abi.sets[set_name]:
            if set_name in REASONS and constant.short == "NONE":
                continue
            value = constant.name if set_name == UPPER else constant_name(constant)
            names.append(f"'{value}'")
            doc += f"\n- '{value}': {DOCS.get((name, value)) or self.prose(constant.doc)}"
        names += ["(string & {})"] if set_name == UPPER else ["'other'", "null"] if set_name in REASONS else []
        line = f"export type {name} = {' | '.join(names)};\n"
        if len(line) > 101:
            line = f"export type {name} =\n" + "".join(f"  | {value}\n" for value in names).rstrip("\n") + ";\n"
        return comment(doc) + line

    def grammar(self):
        text = "/** A constraint on the output: one of these. */\nexport type Grammar ="
        for constant in self.abi.sets["PLLM_GRAMMAR"]:
            if constant.short != "NONE":
                name = constant_name(constant)
                rule = RULES.get(name, "string | Uint8Array")
                text += "\n" + comment(self.prose(constant.doc), "  ") + f"  | {{ {name}: {rule} }}"
        return text + ";\n"

    def option_interface(self, struct, extends, options):
        name = interface(struct.name)
        text = comment(self.prose(struct.doc)) + f"export interface {name}{extends} {{\n"
        for option in options:
            text += comment(DOCS.get((name, option.name), option.doc), "  ")
            text += f"  {option.name}{'' if option.required else '?'}: {option.type};\n"
        return text + "}\n"

    def result_interface(self, name, extends, doc, results):
        text = comment(doc) + f"export interface {name}{extends} {{\n"
        for result in results:
            text += comment(DOCS.get((name, result.name), result.doc), "  ") + f"  {result.name}: {result.type};\n"
        return text + "}\n"
