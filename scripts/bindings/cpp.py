"""bindings/cpp/pagedllm.hpp: its hand-written parts, with the code that mirrors the C API. A line
`//: SECTION NAME` of a part is replaced by the section of the enum or struct NAME of the wrapper."""
import dataclasses
import re

from abi import NOTICE, wrapped

FOLDER = "bindings/cpp/parts"
PARTS = ["overview", "errors", "handles", "interfaces", "communicators", "kv_stores", "options", "c_structs", "outputs", "queues", "sequences", "engine", "responses"]
HEADING = f"// {NOTICE}\n// The hand-written parts of this file are in {FOLDER} of the repository.\n"

# ---- names of the wrapper ------------------------------------------------------------------------

# Structs and sets whose names do not follow from C: pllm_model_info is ModelInfo, PLLM_DTYPE Dtype.
TYPES = {
    "pllm_engine_options": "Options",
    "pllm_pin": "Prefix",
    "PLLM_E": "Code",
    "PLLM_FINISH": "FinishReason",
    "PLLM_KV_EVENT": "KvEventKind",
    "PLLM_GRAMMAR": "GrammarKind",
    "PLLM_OUTPUT": "OutputKind",
    "PLLM_STOP": "StopReason",
}
# Enums that have another type than their constants.
UNDERLYING = {"PLLM_PACKED": "uint64_t"}
# Keywords, and flags whose names do not follow from C.
VALUES = {"AUTO": "automatic", "STATIC": "static_", "PLLM_RESUME_CONTINUE": "continue_generation"}
MEMBERS = {"error": "error_message"}
FUNCTIONS = {
    "pllm_engine_add_request": "Engine::add",
    "pllm_engine_free": "the destructor of Engine",
    "pllm_engine_get_metrics": "Engine::metrics",
    "pllm_queue_create": "Engine::create_queue",
}
NUMBERS = {
    "u8": "uint8_t",
    "i32": "int32_t",
    "u32": "uint32_t",
    "i64": "int64_t",
    "u64": "uint64_t",
    "f32": "float",
    "f64": "double",
}

# Fields without a member: the wrapper's functions set them, or another member covers them.
HIDDEN = {
    "choices",
    "grammar_kind",
    "progress_data",
    "prompt_token_ids",
    "pllm_fork.n",
    "pllm_request.queue",
    "pllm_resume.queue",
}
# Options whose conversion can fail. The hand-written code checks the status of their C structs.
CHECKED = {"Fork", "Options", "Request"}
# Lists that differ from the default if they are empty.
OPTIONAL_LISTS = {"sequence_breakers"}
# The first members of structs that a program can initialize by position or by designators. They
# keep their places. All other members follow in the order of C.
FIRST = {
    "Options": """model_path device kv_bytes seed block_size kv_dtype max_model_len max_batch_tokens max_seqs prefill_chunk threads
        isa queue_capacity skip_tokenizer no_prefix_cache batch_invariant memory_fraction host_steps progress max_waiting_requests
        max_waiting_tokens max_prompt_bytes""",
    "Sampling": """temperature top_p min_p top_k max_tokens min_tokens seed ignore_eos logprobs stop stop_token_ids prompt_logprobs
        echo include_stop top_logprobs prompt_top_logprobs output_kind grammar""",
    "Request": "prompt sampling user_data n add_special skip_special best_of beam keep",
    "Resume": "sampling keep user_data skip_special logits_hook hook_data continue_generation",
    "Completion": """text tokens logprobs finish_reason prompt_tokens generated_tokens sequence score top_logprobs prompt_logprobs
        prompt_top_logprobs status timing""",
}
# Fields of an output that a Completion does not have.
NOT_COMPLETED = {"request", "user_data", "index", "error_code", "error_message", "sequence_state", "computed_tokens"}

# ---- docs ----------------------------------------------------------------------------------------

# Docs that differ from those of C, by `Struct.member` or constant.
DOCS = {
    "Options.communicator": "Connection with the other workers that compute the model. Its ranks are tensor_parallel * "
    "pipeline_parallel. Null (default): this engine computes the model with the devices of this process.",
    "Options.kv_store": "Store of KV blocks outside of the pool. Null (default): none. A request first waits for the blocks of "
    "its prompt that the store has. Full blocks are written to the store. Needs the prefix cache. Each engine needs a store of its "
    "own. run_worker ignores it.",
    "Completion.text": "The whole text.",
    "Completion.tokens": "All tokens.",
    "Completion.finish_reason": "Reason of the end.",
    "Completion.prompt_logprobs": "Log probabilities of the prompt tokens except the first, if the request asked for them.",
    "Completion.sequence": "Id of the sequence: the argument of Engine::sequence if the sequence is kept.",
    "Completion.generated_tokens": "Tokens generated.",
    "Completion.stop_string": "The string of StopReason::string, else empty.",
    "Options.progress": "Reports the bytes of weights that have been read, out of total, on the thread that calls "
    "Engine::create. The result false cancels the loading. An exception cancels it as well, and Engine::create rethrows it. "
    "Empty (default): not called.",
    "Output.error_code": "Code of the error. Code::closed if the engine was freed. 0 if there is no error.",
    "Output.timing": "Set in the last output of a sequence. Zero in all others.",
    "PLLM_ISA_AUTO": "The widest instruction path of the machine.",
    "PLLM_REQUEST_KEEP": "The sequences of the request are kept when they end, for any reason, and become idle. "
    "Engine::sequence(output.sequence) takes ownership of one.",
    "PLLM_RESUME_CONTINUE": "Continue as if the sequence had never been idle, with its own parameters, counts, grammar and output "
    "kind. Of the other fields, only keep, user_data, logits_hook (null: keep it), hook_data and deadline are used. A sequence that "
    "ended by its length must be rewound first; otherwise it ends again with FinishReason::error. For generate and collect, "
    "sampling.output_kind must be the output kind of the sequence.",
    "Request.cache_salt": "A view. Requests share blocks of the prefix cache only if their salts are equal, so that tenants cannot "
    "probe the prompts of other tenants.",
    "Prefix.prompt": "Prompt as UTF-8 text or as token ids.",
    "Request.prompt": "Prompt as UTF-8 text or as token ids.",
    "Sampling.grammar": "Constraint on the output. Default: none.",
}
# Expressions in docs of C, and what replaces them.
PHRASES = [
    (r" Call pllm_\w+_init first\.", ""),
    (r" Set struct_size before the call\.", ""),
    (r" The strings need to be valid only during the call\.", ""),
    (r" NULL selects the defaults of pllm_sampling_init\.", ""),
    (r"Its pointers, except hook_data, need", "Its views need"),
    (r"Pointers are valid", "Its views are valid"),
    (r"See error and error_code", "See error_message and error_code"),
    (r"at most 3600000\.(.*) 0 \(default\): 1000\.", r"at most 1 hour.\1 0 (default): 1 second."),
    (r"0 \(default\): 10,000\.", "0 (default): 10 seconds."),
    (r"0 \(default\): 60000\.", "0 (default): 60 seconds."),
    (r"priority of pllm_request first", "Request::priority first"),
    (r"^Passed to logits_hook\.$", "Passed to logits_hook. Must be valid until the last output has been made."),
    (r"^PLLM_PREEMPTION_\*", "Treatment of preempted requests"),
    (r"^PLLM_EARLY_STOPPING_\*", "When the search stops"),
    (r"^PLLM_FINISH_\*", "Reason of the end"),
    (r": PLLM_\w+_\*", ""),
    (r" Unlimited for programs built with a header without this field\.", ""),
    (r"Do not set it for a prompt that a chat template rendered", "Set it to false for a prompt that Engine::render_chat rendered"),
    (r" 0 is unlimited for programs built with a header without \w+\.", ""),
    (r"PLLM_FORK_AT_END \(default\)", "nullopt (default): all"),
    (r"PLLM_UNLIMITED_TOKENS \(default\)", "nullopt (default)"),
    (r"NULL with a count of 0 \(default\)", "NULL (default)"),
    (r"A non-NULL pointer with a count of 0", "An empty list"),
    (r": top_logprobs_len / tokens_len for each token", ", the same number for each"),
    (r"([Ww])aiting time in milliseconds", r"\1aiting time"),
    (r"([Dd])eadline in milliseconds", r"\1eadline"),
    (r"Time in milliseconds", "Time"),
    (r"Predicted seconds until", "Predicted time until"),
    (r": seconds from", ": time from"),
    (r"Negative if", "nullopt if"),
    (r"^1 if (.*), 0 if ", r"True if \1, false if "),
    (r"^1 if ", "True if "),
    (r"\b(\w+)_ms\b", r"\1"),
    (r"  +", " "),
]


def type_name(name):
    """pllm_model_info -> ModelInfo, PLLM_DTYPE -> Dtype"""
    words = re.sub("^pllm_", "", name.lower()).split("_")
    return TYPES.get(name) or "".join(word.capitalize() for word in words)


def element(field):
    return NUMBERS.get(field.target) or type_name(field.target)


def value_name(constant):
    return VALUES.get(constant.name) or VALUES.get(constant.short) or constant.short.lower()


def capitalized(text):
    return text[:1].upper() + text[1:]


@dataclasses.dataclass
class Member:
    name: str
    type: str
    value: str = ""  # the initializer with its `=` or braces
    doc: str = ""
    write: str = ""  # the statement that copies the member of `from` to the C struct `native`
    storage: str = ""  # memory that the C struct points to, as a member beside `native`
    read: str = ""  # the expression that converts the field of the C struct `c`
    can_fail: bool = False  # whether `write` sets `status`


# Members without a field of C or in another form, by the name of the field.
SPECIAL = {
    "communicator": Member("communicator", "Communicator *", " = nullptr",
                           write="set_handle(native.communicator, from.communicator, status);", can_fail=True),
    "kv_store": Member("kv_store", "KvStore *", " = nullptr", write="set_handle(native.kv_store, from.kv_store, status);", can_fail=True),
    "cache_salt": Member("cache_salt", "std::string_view", " = {}", write="set_salt(native, from.cache_salt);"),
    "grammar": Member("grammar", "Grammar", " = {}", write="set_grammar(native, choices, from.grammar);", storage="CStrings choices"),
    "progress": Member("progress", "std::function<bool(uint64_t done, uint64_t total)>", " = nullptr"),
    "prompt": Member("prompt", "Prompt", write="set_prompt(native, from.prompt);"),
    "sampling": Member(
        "sampling",
        "Sampling",
        " = {}",
        write="native.sampling = &sampling.emplace(from.sampling).native;",
        storage="std::optional<CSampling> sampling",
    ),
}
EXTRA = {
    "Options": [
        Member(
            "host_steps",
            "bool",
            " = false",
            "If false, Engine::create starts the engine's own thread. If true, the host steps the engine.",
        )
    ],
    "Completion": [Member("status", "Status", doc="The first error of the sequence, if any.")],
}


class Wrapper:
    """The methods that take a name of the wrapper return the section of that name."""

    def __init__(self, abi):
        self.abi = abi
        self.records = {type_name(struct.name): struct for struct in abi.records}
        self.choices = {field.set for struct in abi.records for field in struct.fields if field.role == "choice"}
        self.flag_owners = {}
        for struct in abi.records:
            for field in struct.fields:
                for flag in self.abi.flags(field):
                    self.flag_owners.setdefault(flag.name, struct)

    # ---- texts -----------------------------------------------------------------------------------

    def text(self, doc, null="null", struct=None):
        """Returns a doc with the names of the wrapper. `null` is the word for NULL."""
        for pattern, replacement in PHRASES:
            doc = re.sub(pattern, replacement, doc, flags=re.M)
        doc = re.sub(r"\bPLLM_(\w+?)_\*", lambda match: type_name(f"PLLM_{match[1]}"), doc)
        for constant in sorted(self.abi.constants, key=lambda constant: -len(constant.name)):
            doc = doc.replace(constant.name, self.constant(constant, struct))
        types = {record.name for record in self.abi.structs}
        doc = re.sub(r"\bpllm_\w+", lambda match: (type_name if match[0] in types else function_name)(match[0]), doc)
        if null == "empty":
            doc = re.sub(r"(^|\. )NULL\b", r"\1Empty", doc, flags=re.M)
        return re.sub(r"\bNULL\b", null, doc)

    def constant(self, constant, struct):
        """Returns the enumerator, the member that stands for a flag, or the name in C."""
        if constant.set in self.choices:
            return f"{type_name(constant.set)}::{value_name(constant)}"
        if struct and any(constant in self.abi.flags(field) for field in struct.fields):
            return value_name(constant)
        owner = self.flag_owners.get(constant.name)
        return f"{type_name(owner.name)}::{value_name(constant)}" if owner else constant.name

    # ---- sections --------------------------------------------------------------------------------

    def doc(self, name):
        struct = self.records[name]
        return wrapped(self.text(struct.doc, struct=struct), "// ")

    def fields(self, name):
        has_options = name in self.records and self.records[name].init
        text = ""
        for member in self.options(name) if has_options else self.results(name):
            doc = DOCS.get(f"{name}.{member.name}") or member.doc
            if member.name:
                text += wrapped(doc, "// ", 96) if doc else ""
                text += f"{member.type}{'' if member.type.endswith('*') else ' '}{member.name}{member.value};\n"
        return text

    def enum(self, name):
        constants = next(constants for set_name, constants in self.abi.sets.items() if type_name(set_name) == name)
        underlying = UNDERLYING.get(constants[0].set) or NUMBERS[constants[0].type]
        text = f"enum class {name} : {underlying} {{\n"
        for constant in constants:
            text += wrapped(DOCS.get(constant.name) or self.text(constant.doc), "    // ")
            text += f"    {value_name(constant)} = {constant.name},\n"
        return text + "};\n"

    def defaults(self, name):
        c = self.records[name].name
        return f"inline const {c} &{self.records[name].short}_defaults() {{ return defaults<{c}, {c}_init>(); }}\n"

    # ---- options ---------------------------------------------------------------------------------

    def flag_members(self, struct, field):
        """Returns a member for each flag that does not only mark a field as set."""
        marked = {mark.name for mark in filter(None, (self.mark(struct, other) for other in struct.fields))}
        terms = []
        for flag in self.abi.flags(field):
            name = value_name(flag)
            terms.append(f"flag(from.{name}{'.has_value()' if flag.name in marked else ''}, {flag.name})")
            if flag.name not in marked:
                value = f" = (detail::{struct.short}_defaults().{field.name} & {flag.name}) != 0"
                yield Member(name, "bool", value, DOCS.get(flag.name) or self.text(flag.doc, struct=struct))
        yield Member("", "", write=f"native.{field.name} = " + " |\n    ".join(terms) + ";")

    def mark(self, struct, field):
        """Returns the flag that marks a number as set: PLLM_FORK_SEED for seed of pllm_fork."""
        flags = [flag for other in struct.fields for flag in self.abi.flags(other)]
        return next((flag for flag in flags if flag.short == field.name.upper()), None)

    def option(self, struct, field):
        """Returns the member for a field of options that is not a set of flags."""
        name, is_optional = field.name, self.is_optional(struct, field)
        null = "nullopt" if is_optional else "empty" if field.role in ("text", "texts", "array") else "null"
        doc = self.text(field.doc, null, struct)
        if name in SPECIAL:
            return dataclasses.replace(SPECIAL[name], doc=doc)
        if name.endswith("_ms"):
            return self.duration(struct, field, doc)
        if field.role == "array":
            return self.array(field, doc)
        copy = f"native.{name} = from.{name};"
        default, value = f"detail::{struct.short}_defaults().{name}", " = nullptr"
        storage, can_fail = "", False
        if field.role == "number":
            kind, value = NUMBERS[field.type], f" = {default}"
            if is_optional:
                copy, doc = f"if (from.{name}) native.{name} = *from.{name};", self.marked(struct, field, doc)
        elif field.role == "choice":
            kind = type_name(field.set)
            value, copy = f" = {kind}({default})", f"native.{name} = static_cast<{NUMBERS[field.type]}>(from.{name});"
        elif field.role == "text":
            # A text that can be missing is NULL if it is empty.
            setter = "set_optional_text" if "NULL" in field.doc else "set_text"
            kind, value, copy = "std::string", " = {}", f"{setter}(native.{name}, native.{field.len}, from.{name});"
        elif field.role == "texts":
            kind, value, storage = "std::vector<std::string>", " = {}", f"CStrings {name}"
            copy = f"{name}.install(from.{name},\n    native.{name}, native.{field.lens}, native.{field.count});"
        elif field.role == "pointer" and is_optional:
            kind, storage = type_name(field.target), f"std::optional<C{type_name(field.target)}> {name}"
            copy = f"if (from.{name}) native.{name} = &{name}.emplace(*from.{name}).native;"
        elif field.role == "pointer":
            kind, can_fail = f"const {type_name(field.target)}View *", True
            copy = f"set_handle(native.{name}, from.{name}, status);"
        else:
            kind = {"callback": type_name(field.type), "user_data": "void *"}[field.role]
        if is_optional:
            kind, value = f"std::optional<{kind}>", " = std::nullopt"
        return Member(name, kind, value, doc, copy, storage, can_fail=can_fail)

    def is_optional(self, struct, field):
        """A number with a flag that marks it, or whose default is a special value; an optional
        list; or a pointer to options."""
        if field.role == "number":
            return self.mark(struct, field) is not None or field.default in (2**32 - 1, 2**64 - 1)
        return field.name in OPTIONAL_LISTS or field.target in {record.name for record in self.abi.records if record.init}

    def marked(self, struct, field, doc):
        """Returns the doc of a number, and what its flag says about a request without the flag."""
        mark = self.mark(struct, field)
        if not mark:
            return doc
        # "Seed, used with MARK." or "With MARK: returned in.."
        doc = re.sub(rf", used with {field.name}\b|^With {field.name}: ", "", doc)
        unset = self.text(mark.doc, struct=struct).split("Without this flag ")[1]
        return f"{capitalized(doc)} nullopt (default): {unset}"

    def duration(self, struct, field, doc):
        name = field.name.removesuffix("_ms")
        # A u32 cannot hold all durations.
        can_fail = field.type == "u32"
        arguments = f', "{name}", status' if can_fail else ""
        value = f"{{detail::{struct.short}_defaults().{field.name}}}"
        copy = f"set_milliseconds(native.{field.name}, from.{name}{arguments});"
        return Member(name, "std::chrono::milliseconds", value, doc, copy, can_fail=can_fail)

    def array(self, field, doc):
        name, target = field.name, f"native.{field.name}, native.{field.len}"
        if field.target == "pllm_token_list":
            kind, storage = "std::vector<std::vector<uint32_t>>", f"std::vector<pllm_token_list> {name}"
            return Member(name, kind, " = {}", doc, f"set_lists({target}, {name}, from.{name});", storage)
        return Member(name, f"std::vector<{element(field)}>", " = {}", doc, f"set_array({target}, from.{name});")

    def options(self, name):
        struct = self.records[name]
        members = list(EXTRA.get(name, []))
        for field in struct.fields:
            if self.abi.flags(field):
                members += self.flag_members(struct, field)
            elif field.is_data and not {field.name, f"{struct.name}.{field.name}"} & HIDDEN:
                members.append(self.option(struct, field))
        return ordered(name, members)

    def c_struct(self, name):
        """The struct in namespace detail that holds the C struct of an options struct."""
        struct, members = self.records[name], self.options(name)
        text = f"// The C struct of `from`, which must outlive it.\nstruct C{name} {{\n"
        text += f"    explicit C{name}(const {name} &from) {{\n"
        for member in members:
            text += "".join(f"        {line}\n" for line in member.write.split("\n") if line)
        text += f"    }}\n    C{name}(const C{name} &) = delete;\n    C{name} &operator=(const C{name} &) = delete;\n\n"
        if f"{struct.name}.queue" in HIDDEN:
            text += f"    [[nodiscard]] const {struct.name} *to(const pllm_queue *queue) noexcept {{\n"
            text += "        native.queue = queue;\n        return &native;\n    }\n\n"
        text += f"    {struct.name} native = {struct.short}_defaults();\n"
        text += "".join(f"    {member.storage};\n" for member in members if member.storage)
        if any(member.can_fail for member in members):
            if name not in CHECKED:
                raise SystemExit(f"{FOLDER}: the conversion of {name} can fail; check its status and add it to CHECKED")
            text += "    Status status;  // the first error\n"
        return text + "};\n"

    # ---- results ---------------------------------------------------------------------------------

    def result(self, struct, field):
        """Returns the member for a field of a result."""
        name, value = MEMBERS.get(field.name, field.name), f"c.{field.name}"
        doc = self.text(field.doc, "empty", struct)
        if field.role == "text":
            return Member(name, "std::string_view", doc=doc, read=f"detail::view({value}, c.{field.len})")
        if field.role == "pointer" and field.target == "u8":
            return Member(name, "std::string_view", doc=doc, read=f"detail::hash({value})")
        if field.role in ("array", "pointer"):
            # The only pointer without a length has an element for each token.
            length = f"c.{field.len}" if field.role == "array" else f"{value} ? c.tokens_len : 0"
            return Member(name, f"Span<const {element(field)}>", doc=doc, read=f"detail::view({value}, {length})")
        if field.role == "choice":
            return Member(name, type_name(field.set), doc=doc, read=f"{type_name(field.set)}({value})")
        if name.endswith("_seconds"):
            name = name.removesuffix("_seconds")
            if "Negative if" not in field.doc:
                return Member(name, "Seconds", doc=doc, read=f"Seconds({value})")
            read = f"{value} < 0 ? std::nullopt : std::optional<Seconds>({value})"
            return Member(name, "std::optional<Seconds>", doc=doc, read=read)
        if field.is_bool:
            return Member(name, "bool", doc=doc, read=f"{value} != 0")
        return Member(name, NUMBERS[field.type], doc=doc, read=value)

    def results(self, name):
        """Returns the members of a result struct. An Output has its times in a Timing."""
        struct = self.records["Output" if name in ("Timing", "Completion") else name]
        members, times = [], []
        for field in struct.fields:
            if field.is_data:
                is_time = struct.name == "pllm_output" and field.name.endswith("_seconds")
                (times if is_time else members).append(self.result(struct, field))
        if name == "Timing":
            members = [dataclasses.replace(time, value="{0}", doc=of_last_output(time.doc)) for time in times]
        elif times:
            members.append(Member("timing", "Timing", read="detail::to_timing(c)"))
        if name == "Completion":
            members = [completed(member) for member in members if member.name not in NOT_COMPLETED] + EXTRA[name]
        return ordered(name, members)

    def initializers(self, name):
        return ": " + ",\n  ".join(f"{member.name}({member.read})" for member in self.results(name)) + " {}\n"

    def conversion(self, name):
        """The function in namespace detail that converts a C struct to a result."""
        struct = "pllm_output" if name == "Timing" else self.records[name].name
        function = "to_" + re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
        text = f"inline {name} {function}(const {struct} &c) {{\n    {name} to{{}};\n"
        text += "".join(f"    to.{member.name} = {member.read};\n" for member in self.results(name))
        return text + "    return to;\n}\n"

    def clear(self, name):
        return "".join(f"{member.name}.clear();\n" for member in self.results(name) if accumulates(member))

    def add(self, name):
        text = ""
        for member in self.results(name):
            if member.type.startswith("std::vector"):
                text += f"append({member.name}, output.{member.name});\n"
            elif member.name != "status":
                text += f"{member.name} {'+=' if accumulates(member) else '='} output.{member.name};\n"
        return text

    def alias(self, name):
        struct = self.records[name]
        return wrapped(f"{self.text(struct.doc)} Has the fields of {struct.name}.", "// ") + f"using {name} = {struct.name};\n"


def function_name(name):
    """pllm_engine_start -> Engine::start"""
    kind, _, method = name.removeprefix("pllm_").partition("_")
    return FUNCTIONS.get(name) or f"{kind.capitalize()}::{method}"


def ordered(name, members):
    first = FIRST.get(name, "").split()
    return sorted(members, key=lambda member: first.index(member.name) if member.name in first else len(first))


def accumulates(member):
    """Whether a Completion has what all outputs of its sequence have, not only what the last one has."""
    return member.type.startswith("std::vector") or member.name == "text"


def of_last_output(doc):
    """Returns the doc of a value that only the last output of a sequence has."""
    return capitalized(re.sub(r"^In the last output of a sequence: |, and in all other outputs", "", doc))


def completed(member):
    """Returns the member of a Completion for that of an Output."""
    kind = re.sub(r"^Span<const (.*)>$", r"std::vector<\1>", member.type).replace("std::string_view", "std::string")
    value = "" if kind.startswith("std::") else " = 0" if kind in NUMBERS.values() else " = {}"
    return dataclasses.replace(member, type=kind, value=value, doc=of_last_output(member.doc))


def files(abi, root):
    wrapper, used = Wrapper(abi), set()

    def section(match):
        indent, kind, name = match.groups()
        used.add((kind, name))
        return "".join(f"{indent}{line}".rstrip() + "\n" for line in getattr(wrapper, kind)(name).splitlines())

    parts = [(root / FOLDER / f"{part}.hpp").read_text() for part in PARTS]
    text = HEADING + "\n".join(re.sub(r"^( *)//: (\w+) (\w+)\n", section, part, flags=re.M) for part in parts)
    needed = {("enum", type_name(name)) for name in wrapper.choices}
    options = [name for name, struct in wrapper.records.items() if struct.init]
    needed |= {(kind, name) for name in options for kind in ("defaults", "fields", "c_struct")}
    missing = sorted(" ".join(item) for item in needed - used)
    if missing:
        raise SystemExit(f"{FOLDER}: no part has the lines {', '.join(f'`//: {item}`' for item in missing)}")
    return {"bindings/cpp/pagedllm.hpp": text}
