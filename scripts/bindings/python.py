"""bindings/python/pagedllm/__init__.py: the hand-written parts, and what mirrors the C API.

A line `# generated: KIND NAME` of a part is replaced by the text that the function of KIND returns.
"""
import dataclasses
import re
import textwrap

from abi import NOTICE

PARTS = ["intro", "enums", "results", "options", "library", "conversions", "handles", "queue", "budget", "kv_store", "communicator", "engine", "responses"]

# The classes of results and options. The options of other structs are keywords of methods.
RESULTS = {
    "pllm_output": "Output", "pllm_sequence_info": "SequenceInfo", "pllm_step": "Step", "pllm_stats": "Stats",
    "pllm_admission": "Admission", "pllm_budget_info": "BudgetInfo", "pllm_plan": "Plan", "pllm_model_info": "ModelInfo",
    "pllm_kv_event": "KvEvent",
}
OPTIONS = {"pllm_dry": "Dry", "pllm_beam": "Beam", "pllm_sampling": "Sampling"}
DATACLASSES = ["pllm_output", "pllm_sequence_info", *OPTIONS]
ENUMS = {
    "PLLM_E": "Code", "PLLM_FINISH": "FinishReason", "PLLM_STOP": "StopReason", "PLLM_PACKED": "Packed", "PLLM_DTYPE": "DType",
    "PLLM_ISA": "Isa", "PLLM_WEIGHTS": "Weights", "PLLM_PREEMPTION": "Preemption", "PLLM_ORDER": "Order", "PLLM_BATCHING": "Batching",
    "PLLM_ALLOCATION": "Allocation", "PLLM_KV_EVENT": "KvEventKind", "PLLM_KV_MEDIUM": "KvMedium", "PLLM_OUTPUT": "OutputKind", "PLLM_EARLY_STOPPING": "EarlyStopping",
}
# The fields that come first, because programs can pass them by position. The others follow as in C.
FIRST = {
    "pllm_sampling": ["temperature", "top_p", "min_p", "top_k", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
                      "include_stop", "ignore_eos", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "echo",
                      "output_kind", "grammar"],
    "pllm_output": ["request", "text", "tokens", "logprobs", "finish_reason", "error", "prompt_tokens", "generated_tokens",
                    "user_data", "sequence"],
}
# Names that differ from those of C.
RENAMED = {"deadline_ms": "deadline", "len": "length", "PLLM_RESUME_CONTINUE": "continue_generation"}
# Fields that Python combines with another field or does not have.
HIDDEN = {"grammar_kind", "choices", "prompt_token_ids", "error_code", "sequence_state"}
# Structs that the library fills, or that have no options of their own.
WITHOUT_OPTIONS = ["pllm_communicator", "pllm_kv_store"]
# Parameters that a part declares and passes itself.
BY_HAND = {
    "pllm_engine_options": ["model_path", "progress"], "pllm_request": ["prompt", "sampling"], "pllm_fork": ["n"],
    "pllm_resume": ["sampling", "continue_generation"], "pllm_pin": ["prompt"],
}
# Options with a type of their own: the type, the default and the function that sets the C fields.
# If the function is None, the part sets them.
FORMS = {
    "cache_salt": ("Optional[Text]", "None", "_assign_text"),
    "deadline_ms": ("Optional[float]", "None", "_assign_deadline"),
    "grammar": ("Optional[Grammar]", "None", "_assign_grammar"),
    "kv_store": ("Optional[KvStore]", "None", None),
    "kv_store_secret": ("Optional[bytes]", "None", "_assign_text"),
    "logit_bias": ("Optional[Mapping[int, float]]", "None", "_assign_logit_bias"),
    "logits_hook": ("Optional[LogitsHook]", "None", None),
    "progress": ("Optional[Callable[[int, int], Any]]", "None", None),
    "prompt": ("Prompt", "", "_assign_prompt"),
    "bad_words_ids": ("Sequence[Sequence[int]]", "()", "_assign_token_lists"),
    "sequence_breakers": ("Optional[Sequence[Text]]", "None", "_assign_texts"),
    "stop": ("Union[Text, Sequence[Text]]", "()", "_assign_texts"),
}
# Results whose type does not follow from their role.
RESULT_FORMS = {
    "error": ("Optional[Error]", "_py_error(c)"),
    "logprobs": ("Optional[List[float]]", "_logprobs(c.logprobs, c.tokens_len)"),
    "prompt_logprobs": ("Optional[List[float]]", "_logprobs(c.prompt_logprobs, c.prompt_logprobs_len)"),
    "top_logprobs": ("Optional[List[List[Logprob]]]", "_top_logprobs(c.top_logprobs, c.top_logprobs_len, c.tokens_len)"),
    "prompt_top_logprobs": ("Optional[List[List[Logprob]]]",
                            "_top_logprobs(c.prompt_top_logprobs, c.prompt_top_logprobs_len, c.prompt_logprobs_len)"),
    "stop_token": ("Optional[int]", "c.stop_token if c.stop_reason in (StopReason.EOS, StopReason.TOKEN) else None"),
    "stop_string": ("Optional[str]", "_text(c.stop_string, c.stop_string_len) if c.stop_string else None"),
}
# The first field that programs may leave out when they create the object. So are the later ones.
OPTIONAL_FROM = {"pllm_sequence_info": "inexact", "pllm_output": "stop_reason"}
# Fields of Output that a Completion does not have.
NOT_OF_COMPLETION = ["error", "generated_tokens", "user_data", "computed_tokens"]

# Texts for which that of C makes no sense in Python.
TEXTS = {
    "pllm_engine_options.communicator": "Connection with the other workers that compute the model. Its size is tensor_parallel * "
                                        "pipeline_parallel. None: this engine computes the model with the devices of this process.",
    "pllm_engine_options.kv_store": "Store of KV blocks outside of the pool. None: none. A request first waits for the blocks of its "
                                    "prompt that the store has. Full blocks are written to the store. Needs the prefix cache. Each "
                                    "engine needs a store of its own.",
    "PLLM_FINISH_ERROR": "The computation failed. See error.",
    "pllm_output.error": "The error, with FinishReason.ERROR, with FinishReason.ABORT if the engine was closed, and, with "
                         "FinishReason.NONE, if a change of an idle sequence failed.",
    "pllm_output.top_logprobs": "The most probable tokens at the position of each token, most probable first. None if the request "
                                "did not ask for them.",
    "pllm_output.stop_token": "The token of StopReason.EOS or StopReason.TOKEN, else None.",
    "pllm_dry.sequence_breakers": "Texts that end a repetition, within a token or across tokens. None: newline, colon, quotation "
                                  "mark and asterisk, or none with skip_tokenizer. Empty: none. At most 64 texts of at most 128 bytes "
                                  "each.",
    "pllm_sampling.grammar": "Constraint on the output.",
    "pllm_request.deadline": "Seconds from now after which the request ends with FinishReason.DEADLINE and the tokens it has.",
    "pllm_fork.queue": "Queue for the outputs of the children. None: that of the parent, which must be open; the queue of stream() "
                       "is closed at its end.",
    "pllm_resume.keep": "False frees the sequence when it ends. Default True.",
}
# Names of C in texts, and what Python has in their place.
NAMES = {
    "PLLM_FORK_AT_END": "None", "PLLM_UNLIMITED_TOKENS": "None", "pllm_engine_add_request": "add()", "pllm_engine_free": "close()", "pllm_engine_get_metrics": "metrics()",
    "pllm_engine_poll_kv_events": "poll_kv_events()", "pllm_engine_start": "start()", "pllm_queue_create": "create_queue()", "pllm_request": "add()",
    "pllm_sampling_init": "Sampling", "pllm_sequence_free": "free()", "pllm_sequence_resume": "resume()", "PLLM_RESUME_*": "resume()",
}
# Changes to texts, as regular expressions. The first ones remove what only a C program needs.
CHANGES = [
    (r" ?(Call pllm_\w+_init first|Set struct_size before the call|UTF-8|Pointers are valid until [^.]*|"
     r"The (output and its pointers are|strings need to be) valid [^.]*|Unlimited for programs built [^.]*|0 is unlimited for programs [^.]*|"
     r"NULL if there (is|are) none|NULL \(default\): none)\.", ""),
    (r": UTF-8, not NUL-terminated", ""),
    (r"^PLLM_\w+_\*\. |: PLLM_\w+_\*", ""),
    (r"NULL( \(default\))?", "None"), (r"Negative if", "None if"), (r"base \^ ", "base ** "),
    (r"(text calls|later calls) return ", r"\1 raise "), (r"(longer one) is (?=PLLM_E_)", r"\1 raises "),
    (r"\n(?=PLLM_E_)", "\nThe call raises "), (r"(is|was|has been) freed", r"\1 closed"),
]
TYPES = {"u32": "c_uint32", "i32": "c_int32", "u64": "c_uint64", "i64": "c_int64", "f32": "c_float", "f64": "c_double"}


def text_of(abi, key, text, own=None):
    """The text in the words of Python. Constants of the enum `own` have no prefix."""
    if key in TEXTS:
        return TEXTS[key]

    def name(match):
        word = match[0]
        known = {**NAMES, **RESULTS, **OPTIONS, **{f"{set_}_*": enum for set_, enum in ENUMS.items()}}
        if word in known:
            return known[word]
        constant = next((constant for constant in abi.constants if constant.name == word), None)
        assert constant, f"the text of {key} mentions {word}: add it to NAMES"
        if constant.set in ENUMS:
            return constant.short if constant.set == own else f"{ENUMS[constant.set]}.{constant.short}"
        return flag_name(constant)

    for pattern, replacement in CHANGES:
        text = re.sub(pattern, replacement, text)
    return re.sub(r"PLLM_\w+\*?|pllm_\w+", name, text).strip()


def flag_name(constant):
    return RENAMED.get(constant.name, constant.short.lower().removeprefix("no_"))


def flags_of(abi, struct):
    """The flags of a struct, each with its field."""
    return {constant.name: (constant, field) for field in struct.fields for constant in abi.flags(field)}


@dataclasses.dataclass
class Option:
    name: str
    type: str
    default: str
    doc: str
    code: str  # sets the fields of the C struct `c` from the value {}; empty if the part does it


def options(abi, struct):
    """The options of a struct, in the order of C, with one for each flag."""
    flags = flags_of(abi, struct)
    found = []
    for field in struct.fields:
        if not field.is_data or field.role == "user_data" or field.name in HIDDEN:
            continue
        if field.is_flags:
            # The option of the same name sets a flag such as SEED.
            found += [flag_option(abi, struct, field, constant) for constant, its_field in flags.values()
                      if its_field is field and not any(constant.short.lower() == one.name for one in struct.fields)]
        else:
            found.append(option(abi, struct, field, flags))
    return ordered(struct, found)


def ordered(struct, items):
    first = FIRST.get(struct.name, [])
    return sorted(items, key=lambda one: first.index(one.name) if one.name in first else len(first))


def flag_option(abi, struct, field, constant):
    name = flag_name(constant)
    doc, value = constant.doc, "{}"
    if field.default & constant.value:
        doc += " Default True."
    if constant.short.startswith("NO_"):
        doc, value = f"False: {doc[0].lower()}{doc[1:]}", "_inverted({})"
    doc = text_of(abi, f"{struct.name}.{name}", doc)
    return Option(name, "Optional[bool]", "None", doc, f'_assign_flag(c, "{field.name}", _{constant.name[5:]}, {value})')


def option(abi, struct, field, flags):
    name = RENAMED.get(field.name, field.name)
    type_, default, setter = form(struct, field)
    places = f'"{field.lens}", "{field.count}", ' if field.role == "texts" else ""
    code = f'{setter}(c, "{field.name}", {places}{{}})' if setter else ""
    if setter == "_assign_struct":
        code = f'_assign_struct(c, "{field.name}", _c_{field.target[5:]}, {{}})'
    text = field.doc
    if default == "()":
        text = text.replace("NULL (default)", "Empty")
    # A field "with PLLM_SET_FLAG" sets the flag.
    implied = re.search(r"(?:, used )?[Ww]ith (PLLM_\w+)(: )?", text)
    constant, flag_field = flags.get(implied[1], (None, None)) if implied else (None, None)
    if constant:
        text = text.replace(implied[0], "")
        without = re.search(r"Without this flag (.*)", constant.doc)
        text = text[0].upper() + text[1:] + (f" None: {without[1]}" if without else f" Implies {flag_name(constant)}.")
        code += f'\n_assign_flag(c, "{flag_field.name}", _{constant.name[5:]}, _given({{}}))'
    return Option(name, type_, default, text_of(abi, f"{struct.name}.{name}", text), code)


def form(struct, field):
    """The type of an option, its default and the function that sets it."""
    if field.name in FORMS:
        return FORMS[field.name]
    if field.role == "choice":
        return f"Optional[{ENUMS[field.set]}]", "None", "_assign"
    if field.role == "text":
        return ("Optional[Path]", "None", "_assign_path") if field.name.endswith("_path") else ("Optional[str]", "None", "_assign_text")
    if field.role == "texts":
        return "Sequence[Text]", "()", "_assign_texts"
    if field.role == "array":
        assert field.target == "u32", f"{struct.name}.{field.name}: add it to FORMS"
        return "Sequence[int]", "()", "_assign_tokens"
    if field.role == "pointer" and field.target in OPTIONS:
        return f"Optional[{OPTIONS[field.target]}]", "None", "_assign_struct"
    if field.role == "pointer":  # the part keeps the object alive during the call
        return f"Optional[{field.target[5:].capitalize()}]", "None", None
    return f"Optional[{number(field)}]", "None", "_assign"


def number(field):
    return "float" if field.type in ("f32", "f64") else "int"


@dataclasses.dataclass
class Result:
    name: str
    type: str
    default: str
    doc: str
    code: str  # reads the value from the C struct `c`


def results(abi, struct):
    """The fields of a result."""
    found = []
    for field in struct.fields:
        if not field.is_data or field.name in HIDDEN:
            continue
        name = RENAMED.get(field.name, field.name)
        type_, code = result_form(struct, field)
        text = field.doc.replace("1 if", "True if", 1).replace(", 0 if", ", False if") if type_ == "bool" else field.doc
        default = ""
        if text.startswith("In the last output of a sequence: "):  # times and counts that differ between runs
            default = "field(compare=False)"
        if field.offset >= offset_of(struct, OPTIONAL_FROM.get(struct.name)):
            default = default_of(type_)
        found.append(Result(name, type_, default, text_of(abi, f"{struct.name}.{name}", text), code))
    return ordered(struct, found)


def result_form(struct, field):
    """The type of a result, and the expression that reads it."""
    value = f"c.{field.name}"
    if struct.name == "pllm_output" and field.name in RESULT_FORMS:
        return RESULT_FORMS[field.name]
    if field.is_bool and struct.name != "pllm_stats":  # the counters of Stats stay numbers
        return "bool", f"bool({value})"
    if "Negative if" in field.doc:
        return "Optional[float]", f"None if {value} < 0 else {value}"
    if field.role == "pointer" and field.target == "u8":
        return "Optional[bytes]", f"_hash({value})"
    if field.role == "choice":
        return ENUMS[field.set], f"_member({ENUMS[field.set]}, {value})"
    if field.role == "text":
        return "str", f"_text({value}, c.{field.len})"
    if field.role == "array":
        assert field.target in TYPES, f"{struct.name}.{field.name}: add it to RESULT_FORMS"
        kind = "float" if field.target in ("f32", "f64") else "int"
        return f"List[{kind}]", f"_numbers({TYPES[field.target]}, {value}, c.{field.len})"
    return number(field), value


def default_of(type_):
    """The value of a field in the struct of an older library, which does not have it."""
    if type_ in ENUMS.values():
        return f"{type_}.NONE"
    return "None" if type_.startswith("Optional") else {"bool": "False", "int": "0", "float": "0.0", "str": '""'}[type_]


def offset_of(struct, name):
    return struct.field(name).offset if name else struct.size


# ---- the kinds of markers ------------------------------------------------------------------------


def commented(code, doc, width):
    """A line with the text after it, or before it if it is too long."""
    if not doc:
        return code + "\n"
    line = f"{code}  # {doc}"
    if len(line) <= width:
        return line + "\n"
    return "".join(f"# {one}\n" for one in fill(doc, width - 2)) + code + "\n"


def fill(text, width, **indents):
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **indents)


def members(abi, name, width):
    return "".join(commented(f"{one.short} = {one.value}", text_of(abi, one.name, one.doc, name), width) for one in abi.sets[name])


def class_(abi, name, width):
    struct = abi.struct(name)
    return class_text(struct.name, {**RESULTS, **OPTIONS}[name], text_of(abi, name, struct.doc), fields_of(abi, struct), width)


def class_text(struct, name, doc, fields, width):
    head = f"@dataclass(frozen=True)\nclass {name}:\n" if struct in DATACLASSES else f"class {name}(NamedTuple):\n"
    width -= 4
    # Room for the quotation marks.
    paragraphs = ["\n".join(fill(paragraph, width - 6)) for paragraph in doc.split("\n")]
    end = "\n" if "\n" in doc or "\n" in paragraphs[0] else ""
    body = '"""' + "\n\n".join(paragraphs) + end + '"""\n'
    for one in fields:
        body += commented(f"{one.name}: {one.type}" + (f" = {one.default}" if one.default else ""), one.doc, width)
    return head + textwrap.indent(body, "    ")


def fields_of(abi, struct):
    return (options if struct.init else results)(abi, struct)


def completion(abi, _name, width):
    fields = [dataclasses.replace(one, doc="") for one in fields_of(abi, abi.struct("pllm_output")) if one.name not in NOT_OF_COMPLETION]
    doc = "Everything that one sequence generated, until its end, an abort or its deadline.\nThe fields are as in Output."
    return class_text("pllm_output", "Completion", doc, fields, width)


def keywords(abi, name):
    return [one for one in options(abi, abi.struct(name)) if one.name not in BY_HAND[name]]


def listed(items, width):
    """Lines with the items, each with a comma. NUL stands for a space at which no line is broken."""
    return "\n".join(fill(", ".join(item.replace(" ", "\0") for item in items) + ",", width)).replace("\0", " ") + "\n"


def parameters(abi, name, width):
    return listed([f"{one.name}: {one.type} = {one.default}" for one in keywords(abi, name)], width)


def arguments(abi, name, width):
    """The keywords that the function _c_NAME takes."""
    return listed([f"{one.name}={one.name}" for one in keywords(abi, name) if one.code], width)


def documentation(abi, name, width):
    lines = []
    for one in keywords(abi, name):
        doc = one.doc.replace("\n", " ").removeprefix(f"{one.name.capitalize()}: ")
        lines += fill(f"{one.name}: {doc}", width, subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def constants(abi, _name, _width):
    """The constants that no enum has."""
    found = [one for one in abi.constants if one.set not in ENUMS]
    return "".join(f"_{one.name[5:]} = {one.value}\n" for one in found)


def title(name):
    return "_" + "".join(word.capitalize() for word in name.removeprefix("pllm_").split("_"))


def structs(abi, _name, width):
    """The callbacks and the structs with fields."""
    text = ""
    for callback in abi.callbacks:
        types = [c_type(abi, callback.returns), *(TYPES.get(one.type, "c_void_p") for one in callback.arguments)]
        text += f"{title(callback.name)} = ctypes.CFUNCTYPE({', '.join(types)})\n"
    for struct in abi.records:
        fields = [f'("{one.name}", {c_type(abi, one.type, struct.name in RESULTS)})' for one in struct.fields]
        text += f"\n\nclass {title(struct.name)}(ctypes.Structure):\n    _fields_ = [\n"
        text += textwrap.indent(listed(fields, width - 8), " " * 8) + "    ]\n"
    return text


def c_type(abi, type_, is_result=False):
    """The type of ctypes. Pointers in results are addresses, because their texts do not end with NUL."""
    target = re.sub(r"^const | \*$", "", type_)
    if not type_.endswith("*"):
        return "None" if type_ == "void" else TYPES.get(type_) or title(type_)
    if is_result or type_.endswith("* *") and target != "const char *" or target == "void":
        return "c_void_p"
    if target in ("char", "u8"):
        return "c_char_p"
    if target == "const char *":
        return "ctypes.POINTER(c_char_p)"
    is_record = any(struct.name == target for struct in abi.records)
    return f"ctypes.POINTER({TYPES.get(target) or title(target)})" if is_record or target in TYPES else "c_void_p"


def functions(abi, _name, width):
    """The type of the result and of the arguments of each function."""
    text = "_FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {\n"
    for function in abi.functions:
        # Of the texts, only those of pllm_bytes_data have a length and no NUL at the end.
        ends_with_nul = function.returns == "const char *" and not function.name.endswith("_data")
        result = "_Failure" if function.returns == "pllm_error *" else c_type(abi, function.returns, not ends_with_nul)
        is_address = lambda one: one.name.startswith("out_") or one.type.removeprefix("const ").startswith("pllm_")
        types = ["c_void_p" if is_address(one) else c_type(abi, one.type) for one in function.arguments]
        text += f'    "{function.name}": ({result}, [{", ".join(types)}]),\n'
    return text + "}\n"


def setters(abi, _name, width):
    """The functions that convert options to C structs."""
    texts = []
    for struct in (one for one in abi.records if one.init and one.name not in WITHOUT_OPTIONS):
        mine = [one for one in options(abi, struct) if one.code]
        short = struct.short
        if struct.name in OPTIONS:
            head, prefix = f"def _c_{short}({short}: {OPTIONS[struct.name]}) -> Any:\n", f"{short}."
        else:
            declared = [one.name + ": " + one.type + (f" = {one.default}" if one.default else "") for one in mine]
            declared.sort(key=lambda one: "=" in one)
            lines = textwrap.indent(listed(declared, width - len(f"def _c_{short}(")), " " * len(f"def _c_{short}(")).strip()
            head, prefix = f"def _c_{short}(*, {lines.rstrip(',')}) -> Any:\n", ""
        body = f"c = _defaults({title(struct.name)}, _lib.{struct.name}_init)\n"
        # Explicit flags come last, because they override implied ones.
        for one in sorted(mine, key=lambda one: one.code.startswith("_assign_flag")):
            body += one.code.replace("{}", prefix + one.name) + "\n"
        texts.append(head + textwrap.indent(body + "return c\n", "    "))
    return "\n\n".join(texts)


def readers(abi, _name, _width):
    """The functions that convert C structs to results."""
    texts = []
    for name, kind in RESULTS.items():
        values = "".join(f"        {one.name}={one.code},\n" for one in results(abi, abi.struct(name)))
        texts.append(f"def _py_{name[5:]}(c: Any) -> {kind}:\n    return {kind}(\n{values.rstrip()[:-1]})\n")
    return "\n\n".join(texts)


KINDS = {
    "members": members, "class": class_, "completion": completion, "parameters": parameters, "arguments": arguments,
    "documentation": documentation, "constants": constants, "structs": structs, "functions": functions, "setters": setters,
    "readers": readers,
}


def files(abi, root):
    def generated(match):
        indent, kind, name = match.groups()
        text = KINDS[kind](abi, name, 100 - len(indent))
        return textwrap.indent(text, indent)

    parts = root / "bindings" / "python" / "parts"
    source = "\n\n".join((parts / f"{part}.py").read_text() for part in PARTS)
    text = re.sub(r"^( *)# generated: (\w+) ?(\w*)\n", generated, source, flags=re.M)
    return {"bindings/python/pagedllm/__init__.py": f"# {NOTICE}\n# The hand-written parts are in bindings/python/parts.\n{text}"}
