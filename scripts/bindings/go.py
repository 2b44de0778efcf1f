"""bindings/go/*_generated.go: the constants, options and results of the Go package."""
import dataclasses
import re
from typing import List

from abi import NOTICE, wrapped

# Go tools recognize a generated file by this form of the notice.
HEAD = f'// Code generated{NOTICE.removeprefix("Generated").split(".")[0].replace("`", "")}. DO NOT EDIT.\n\npackage pagedllm\n'
C_IMPORT = '\n// #include "glue.h"\nimport "C"\n'

# Words that are not merely capitalized in a Go name.
WORDS = {word.lower(): word for word in [
    "ISA", "KV", "ID", "IDs", "EOS", "CPUs", "DRY", "XTC", "IO", "FCFS", "F16", "F32", "BF16", "FP8", "AVX", "AVX2", "AVX512", "VNNI", "LogProbs", "LogProb",
]}

# Fields and constants with a name of their own in Go.
RENAMED = {
    "kv_dtype": "KVType", "weight_format": "Weights", "penalty_last_n": "LastTokens", "stop_token_ids": "StopTokens",
    "allowed_token_ids": "AllowedTokens", "bad_words_ids": "BadTokens", "truncate_prompt_tokens": "TruncatePrompt", "eos_token_ids": "EOSTokens",
    "traces_stopped": "TraceStopped", "journals_stopped": "JournalStopped", "grammar_kind": "Grammar", "error": "Err",
    "PLLM_DTYPE_AUTO": "DTypeAuto", "PLLM_DTYPE_INT8": "INT8", "PLLM_ISA_AUTO": "ISAAuto",
}

# The flags of a default. The Go field is true if the flag is not set.
NEGATED = {"PLLM_TEXT_ADD_SPECIAL": "RawPrompt", "PLLM_TEXT_SKIP_SPECIAL": "ShowSpecial", "PLLM_REQUEST_KEEP": "LastTurn"}

# Options that are pointers, because 0 has a meaning of its own and is not the default.
POINTERS = ["sampling.temperature", "sampling.xtc_threshold", "dry.multiplier", "dry.allowed_length", "beam.length_penalty"]

# Numbers with a Go type of their own.
TYPES = {
    "seed": "uint64", "user_data": "uint64", "output.request": "RequestID", "output.sequence": "SequenceID", "output.stop_token": "uint32",
    "sequence_info.request": "RequestID", "kv_event.sequence_number": "uint64",
}

# What a pointer to a struct is in Go, how it is converted, and functions for arrays.
POINTED = {"pllm_sampling": "Sampling", "pllm_dry": "*DRY", "pllm_beam": "*Beam", "pllm_budget": "*Budget", "pllm_queue": "*Queue",
           "pllm_communicator": "*Communicator", "pllm_kv_store": "*KVStore"}
ARRAYS = {
    "u32": ("[]uint32", "tokens", "goTokens"), "u8": ("[]byte", "bytes", "goBytes"), "f32": ("[]float32", None, "goFloats"),
    "pllm_logit_bias": ("map[uint32]float64", "biases", None), "pllm_token_list": ("[][]uint32", "tokenLists", None),
}


@dataclasses.dataclass(frozen=True)
class Set:
    """A set of constants: the Go type and its doc, the prefix of names, and the form of a number
    without a name (None: the type has no method String)."""
    type: str
    doc: str
    prefix: str
    unknown: str = "%d"
    integer: str = "uint32"


# The other sets are named like their prefix. Their doc is that of the field that takes them.
SETS = {
    "PLLM_E": Set("Code", "a kind of error. The codes are errors themselves, for errors.Is. ErrClosed is also fs.ErrClosed, and ErrUnsupported is also errors.ErrUnsupported.", "Err", "code %d", "int32"),
    "PLLM_DTYPE": Set("DType", "a data type of KV blocks.", ""),
    "PLLM_ISA": Set("ISA", "an instruction path of the CPU kernels.", ""),
    "PLLM_PACKED": Set("PackedForm", "the result of Options.PackedPath.", "Packed"),
    "PLLM_PREEMPTION": Set("Preemption", "the treatment of preempted requests.", "Preemption"),
    "PLLM_OUTPUT": Set("OutputKind", "the content of each output.", "Output", None),
    "PLLM_EARLY_STOPPING": Set("EarlyStopping", "the condition that ends a beam search.", "EarlyStopping", None),
    "PLLM_FINISH": Set("FinishReason", "the reason why a sequence ended.", "Finish"),
    "PLLM_KV_EVENT": Set("KVEventKind", "the kind of a KV event.", "KV"),
    "PLLM_KV_MEDIUM": Set("KVMedium", "the place of a KV block.", "KVMedium"),
    "PLLM_STOP": Set("StopReason", "the condition that ended a sequence with FinishStop.", "Stop"),
}

ZERO = "The zero value of each field selects the library's default."
ZERO_BUT = "Only {} is required: the zero value of each other field selects the library's default."


@dataclasses.dataclass(frozen=True)
class Type:
    """A Go struct: its name, the beginning of its doc, and text after the first sentence."""
    name: str
    begin: str
    more: str = ""


OPTIONS = {
    "engine_options": Type("Options", "Options are the", ZERO_BUT.format("ModelPath") + " A number that is negative or too large is ErrInvalidArgument."),
    "request": Type("Request", "A Request is a prompt with its parameters.", ZERO_BUT.format("a prompt")),
    "sampling": Type("Sampling", "Sampling is", ZERO + " If 0 has a meaning of its own, the field is a pointer, made with [Ptr]:\n"
                     "\tpagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 100} // greedy"),
    "dry": Type("DRY", "DRY is", ZERO),
    "beam": Type("Beam", "Beam has the", ZERO),
    "fork": Type("Fork", "A Fork has the", ZERO),
    "resume": Type("Resume", "A Resume is", ZERO),
    "pin": Type("Prefix", "A Prefix is", ZERO_BUT.format("a prompt")),
}
RESULTS = {
    "budget_info": Type("BudgetInfo", "A BudgetInfo is"),
    "plan": Type("Plan", "A Plan is the"),
    "model_info": Type("ModelInfo", "ModelInfo is"),
    "admission": Type("Admission", "An Admission is the"),
    "step": Type("StepReport", "A StepReport is the"),
    "stats": Type("Stats", "Stats are"),
    "output": Type("Output", "An Output is"),
    "sequence_info": Type("SequenceInfo", "SequenceInfo is"),
    "kv_event": Type("KVEvent", "A KVEvent is"),
}
STRUCTS = {**OPTIONS, **RESULTS}


@dataclasses.dataclass(frozen=True)
class Member:
    """A field of a Go struct. `code` copies it to or from the C struct `c`."""
    name: str
    type: str
    doc: str
    code: str = ""


# Fields that the package presents in another form, and None for those it does not present.
SPECIAL = {
    "engine_options.progress": Member(
        "Progress", "func(done, total int64)",
        "Progress, if not nil, reports the bytes of weights that have been read, out of total, from time to time and once at the end. "
        "It runs on the goroutine that called Open. To cancel the loading, cancel the context of Open."),
    "engine_options.progress_data": None,
    "request.queue": None, "request.logits_hook": None, "request.hook_data": None,
    "resume.queue": None, "resume.logits_hook": None, "resume.hook_data": None,
    "fork.n": None,
    "sampling.grammar_kind": Member("Grammar", "Grammar", "Grammar is the constraint on the output.", "v.Grammar.set(args, c)"),
    "sampling.grammar": None, "sampling.choices": None,
    "kv_event.time_seconds": Member("Time", "time.Time", "Time is the time of the step.", "v.Time = goTime(c.time_seconds)"),
    "kv_event.hash": Member("Hash", "KVHash", "Hash is the hash of the block: its key in a KV store. Zero for KVCleared.", "v.Hash = goHash(c.hash)"),
    "kv_event.parent_hash": Member(
        "ParentHash", "KVHash", "ParentHash is the hash of the block before a stored block. If FirstToken is 0, it is a hash that differs between salts. "
                                "Zero unless Kind is KVStored.", "v.ParentHash = goHash(c.parent_hash)"),
    "output.error_code": None,
    "output.queued_seconds": Member(
        "Timing", "Timing", "Timing has the times of the sequence, in its last output. It is zero in all other outputs.",
        "".join(f"v.Timing.{name} = goDuration(c.{field}_seconds)\n" for name, field in [("Queued", "queued"), ("FirstToken", "first_token"), ("LastToken", "last_token")])),
    "output.first_token_seconds": None, "output.last_token_seconds": None,
    "output.error": Member("Err", "error", "Err is an *Error if FinishReason is FinishError, or FinishAbort because the engine was closed; else nil.",
                           "v.Err = goError(c.error_code, c.error, c.error_len)"),
    "output.logprobs": Member("LogProbs", "[]float32", "LogProbs has the log probability of each token. nil if the request did not ask for them. "
                              "NaN for tokens that have none: those of an echoed prompt before PromptLogProbsStart, its first one, and tokens that the host appended.",
                              "v.LogProbs = goFloats(c.logprobs, c.tokens_len)"),
    "output.top_logprobs": Member(
        "TopLogProbs", "[][]LogProb", "TopLogProbs has the most probable tokens at the position of each token, most probable first. nil if the request did not ask for them.",
        "v.TopLogProbs = goLogProbs(c.top_logprobs, c.top_logprobs_len, c.tokens_len)"),
    "output.prompt_top_logprobs": Member(
        "PromptTopLogProbs", "[][]LogProb", "PromptTopLogProbs has the most probable tokens at the position of each token of PromptLogProbs.",
        "v.PromptTopLogProbs = goLogProbs(c.prompt_top_logprobs, c.prompt_top_logprobs_len, c.prompt_logprobs_len)"),
    "output.sequence_state": Member(
        "sequenceState", "[]byte", "sequenceState is the state of an exported sequence. Sequence.Export receives it in a queue of its own.",
        "v.sequenceState = goBytes(c.sequence_state, c.sequence_state_len)"),
}

# Fields that the C struct does not have.
EXTRA = {
    "engine_options": Member(
        "HostSteps", "bool",
        "HostSteps is true if the host steps the engine with Engine.Step, or starts it later with Engine.Start. By default, Open starts the engine's own thread."),
    "sampling": Member(
        "PromptOnly", "bool", "PromptOnly computes and reports the prompt, and generates no tokens. N must be 1, and MaxTokens 0.",
        'if v.PromptOnly {\n\targs.setPromptOnly(&c.max_tokens, v.MaxTokens)\n}'),
}

# Fields of Output that Completion does not have (None), or has with another doc.
COMPLETION = {
    "Request": None, "UserData": None, "Index": None, "sequenceState": None, "ComputedTokens": None,
    "Text": "Text is the whole text.",
    "Sequence": "Sequence is the id of the sequence, for Engine.Sequence if the request has Keep.",
    "Err": SPECIAL["output.error"].doc,
    "GeneratedTokens": "GeneratedTokens is the number of generated tokens. Tokens of an echoed prompt do not count.",
    "FinishReason": "FinishReason is the reason why the sequence ended. FinishNone if an error occurred before the end.",
}

# Docs for which the C text does not suit.
DOCS = {
    "engine_options.communicator": "Communicator is the connection with the other workers that compute the model. Its size is TensorParallel * "
                                   "PipelineParallel. nil: this engine computes the model with the devices of this process.",
    "engine_options.kv_store": "KVStore is the store of KV blocks outside of the pool. nil: none. A request first waits for the blocks of its prompt "
                               "that the store has. Full blocks are written to the store. Needs the prefix cache. Each engine needs a store of "
                               "its own. RunWorker ignores it.",
    "engine_options.kv_store_secret": "KVStoreSecret is the secret for the keys and checksums of the blocks (HMAC-SHA-256), at least 16 bytes, for a "
                                      "store that is not trusted. Only engines with the same secret share blocks. nil: none.",
    "engine_options.queue_capacity": "QueueCapacity is the number of unread outputs at which the requests that write to a queue pause. "
                                     "0: 65536 for the engine's own queue, and 64 for the queue of each stream.",
    "sampling.max_tokens": "MaxTokens is the maximum number of generated tokens. 0: up to Options.MaxModelLen. See also PromptOnly.",
    "fork.at": "At is the number of tokens that the children share with their parent: 1 to its length. 0: all.",
    "output.sequence": "Sequence is the id of the sequence, for Engine.Sequence if the request has Keep.",
    "output.stop_reason": "StopReason is the condition that ended the sequence. StopNone unless FinishReason is FinishStop.",
    "output.stop_token": "StopToken is the token that ended the sequence if StopReason is StopEOS or StopToken, else 0.",
    "output.stop_string": "StopString is the string that ended the sequence if StopReason is StopString, else \"\".",
    "RawPrompt": "RawPrompt is true if the tokenizer must not add its special tokens, such as BOS. Set it for a prompt that RenderChat rendered.",
    "ShowSpecial": "ShowSpecial keeps special tokens in the text.",
    "LastTurn": "LastTurn frees the sequence when it ends. By default it is kept and can be resumed again.",
    "PLLM_REQUEST_KEEP": "Keep keeps the sequences of the request when they end, for any reason. Engine.Sequence takes ownership of one.",
    "PLLM_FORK_IDLE": "Idle makes the children idle until they are resumed, even if the parent runs.",
    "PLLM_RESUME_CONTINUE": "Continue continues as if the sequence had never been idle, with its own parameters, counts, grammar and output kind. "
                            "Of the other fields, only UserData, LastTurn and Deadline are used. "
                            "A sequence that ended by its length must be rewound first; otherwise it ends again with FinishError. "
                            "For Generate, Sampling.OutputKind must be the output kind of the sequence.",
    "PLLM_FINISH_ERROR": "FinishError: the computation failed. See Output.Err.",
    "PLLM_E_CLOSED": "ErrClosed: the engine, the budget, the queue or the sequence has been closed.",
    "PLLM_E_CANCELLED": "ErrCancelled: the loading was cancelled. Open returns the error of the context instead.",
}

# Functions and structs in docs.
NAMES = {
    "pllm_engine_add_request": "Queue.Add", "pllm_engine_free": "Engine.Close", "pllm_engine_get_metrics": "Engine.Metrics",
    "pllm_engine_poll_kv_events": "Engine.PollKVEvents", "pllm_engine_start": "Engine.Start", "pllm_queue_create": "Engine.NewQueue",
    **{f"pllm_{short}": entry.name for short, entry in STRUCTS.items()},
}

# Fields whose name is one word of plain English. They are names in the texts of these structs only.
PLAIN = {"request": ["n"], "PLLM_STOP": ["stop"], "PLLM_EARLY_STOPPING": ["width"], "engine_options": ["cpus"]}

# Sentences of C.
DROPPED = [
    r"Call \w+_init first\.", r"Set struct_size before the call\.", r"Pointers are valid [^.]*\.", r"The strings need to be valid [^.]*\.",
    r"Its pointers, [^.]*\.", r"The output and its pointers [^.]*\.", r"NULL selects the defaults of pllm_sampling_init\.", r"UTF-8\.",
    r"Unlimited for programs built with a header without this field\.", r"Default 0\.(?= |$)",
]
REWORDED = [
    (r"^UTF-8\. ", ""), (r": UTF-8, not NUL-terminated,", ","), (r"resumed or freed", "resumed or closed"), (r", used with \w+\.", "."),
    (r": PLLM_\w+_\*", ""), (r" \(default\)(?= selects| keeps|:)", ""), (r" in milliseconds", ", in whole milliseconds,"),
    (r"\bseconds (from|until)", r"time \1"), (r"NULL with a count of 0", "NULL"), (r"A non-NULL pointer with a count of 0", "Empty"),
    (r"logits_hook, ", ""), (r"_stopped of pllm_stats is 1", "_stopped of pllm_stats is true"), (r"More than bytes", "More than Bytes"),
    (r"each of threads", "each of Threads"), (r"multiplier \* base \^", "Multiplier * Base ^"), (r"^(On a [^:]*):", r"\1,"),
]

# The first words of texts, which decide how a text follows the name of a field.
VERBS = {"Keeps": "keeps", "Divides": "divides", "Serve": "serves", "Disable": "disables", "Report": "reports", "Do": "does",
         "Returned": "is returned", "Subtracted": "is subtracted", "As": "is as", "Sampling": "has the sampling",
         "Directory": "is a directory", "File": "is a file", "List": "is a list"}
CLAUSES = ("No ", "Each ", "each ", "If ", "Requests share ", "The output begins ", "The stop string, ", "The score of ", "On a ")
COUNTED = r"((Unused|Kept|Waiting|Prompt|KV) )*(Bytes|Blocks|Engines|Moves|Preemptions|Requests|Results|Sequences|Steps|Times|Tokens)\b"
CONDITIONS = {"CUDA only: ": "for CUDA only", "Mirostat 2: ": "for mirostat 2", "In the last output of a sequence: ": "in the last output of a sequence"}


def go_name(name):
    """max_seqs -> MaxSeqs"""
    stem = re.sub(r"_(ms|seconds)$", "", name)
    return RENAMED.get(name) or "".join(WORDS.get(word, word.capitalize()) for word in stem.lower().split("_"))


def lower(text):
    """The text with a lower-case first letter, unless it begins with a name such as KV."""
    return text[0].lower() + text[1:] if re.match(r"[A-Z]([a-z]|\b[^0-9-])", text) else text


def comment(text, indent):
    """A comment. A paragraph is one line of the text, and code begins with a tab."""
    lines = lambda line: f"{indent}//{line}\n" if line.startswith("\t") else wrapped(line, f"{indent}// ", 100 - 3 * len(indent))
    return f"{indent}//\n".join(lines(line) for line in text.split("\n"))


def spoken(constant):
    """The name of a constant in texts: bf16, out of memory."""
    if constant.set != "PLLM_E":
        return constant.short.lower()
    return "i/o" if constant.short == "IO" else constant.short.lower().replace("_", " ")


class Writer:
    def __init__(self, abi):
        self.abi = abi
        self.constants = {constant.name: constant for constant in abi.constants}
        self.sets = dict(SETS)
        for field in [field for record in abi.records for field in record.fields if field.role == "choice" and f"{record.short}.{field.name}" not in SPECIAL]:
            name = go_name(field.set.removeprefix("PLLM_"))
            self.sets.setdefault(field.set, Set(name, f"the {lower(field.doc.partition(':')[0])}.", name))

    def constant_name(self, constant):
        prefix = self.sets[constant.set].prefix if constant.set in self.sets else ""
        return RENAMED.get(constant.name) or prefix + go_name(constant.short)

    def names(self, text, place):
        """Replaces the C names in the text of a struct (by its short name) or of a set."""
        here = {"request": ["request", "sampling", "beam"], "resume": ["resume", "sampling"]}.get(place, [place])

        def replace(match):
            name = match[0]
            if name in self.constants:
                constant = self.constants[name]
                owner = next((short for short in here + list(OPTIONS) if name in self.flags_of(short)), None)
                return self.qualified(self.flag_name(name, owner), owner, here) if owner else self.constant_name(constant)
            if f"{place}_{name}" in self.constants:
                return self.constant_name(self.constants[f"{place}_{name}"])
            if name.endswith("_*"):
                return self.sets[name[:-2]].type
            if name in NAMES:
                return NAMES[name]
            owner = next((short for short in [*here, *STRUCTS] if self.owns(short, name)), None)
            is_name = "_" in name or name in PLAIN.get(place, [])
            return self.qualified(go_name(name), owner, here) if is_name and owner else name

        text = re.sub(r"\b(\w+) of pllm_(\w+)", lambda match: f"{NAMES['pllm_' + match[2]]}.{go_name(match[1])}" if self.owns(match[2], match[1]) else match[0], text)
        return re.sub(r"(?<!label )\b[A-Za-z]\w*\b\*?", replace, text)

    def owns(self, short, name):
        record = next((record for record in self.abi.records if record.short == short), None)
        return record is not None and any(field.name == name for field in record.fields)

    def qualified(self, name, owner, here):
        return name if owner in here else f"{STRUCTS[owner].name}.{name}"

    def flags_of(self, short):
        """The flags that the fields of a struct take, each with the field."""
        flags = {}
        record = next((record for record in self.abi.records if record.short == short), None)
        for field in record.fields if record else []:
            flags.update({flag.name: field for flag in self.abi.flags(field)})
        return flags

    def flag_name(self, flag, short):
        negated = self.flags_of(short)[flag].default & self.constants[flag].value
        return NEGATED[flag] if negated else go_name(self.constants[flag].short)

    def text(self, name, type, field_text, place):
        """The doc of a field from its text in the C header."""
        text = field_text
        for pattern, new in REWORDED:
            text = re.sub(pattern, new, text)
        for pattern in DROPPED:
            text = re.sub(f" ?{pattern}", "", text)
        zero = '""' if type == "string" else "0" if re.match(r"u?int|float|time", type) else "nil"
        text = re.sub(r"\bNULL\b", zero, text)
        text = re.sub(r"\bDefault ([\d.]+): ", f"{zero}: ", text)
        text = re.sub(r"\bDefault ([\d.]+)\.(?= |$)", rf"{zero}: \1.", text)
        text = re.sub(r" +(?=[:.])", "", text).strip()
        if type == "time.Duration":
            text = re.sub(r"0: ([\d,]+)\.", lambda match: f"0: {int(match[1].replace(',', '')) // 1000} s.", text)
        if "*time" in type:
            text = text.replace("Negative if", "nil if")
        return self.names(self.sentence(name, type, text), place)

    def sentence(self, name, type, text):
        """The text as a sentence about the field."""
        for start, condition in CONDITIONS.items():
            if text.startswith(start):
                return f"{name} is, {condition}, the {text.removeprefix(start)}"
        flag, _, rest = text.removeprefix("With ").partition(": ")
        if flag in self.constants:
            return f"{name} is, with {flag}, the {rest}"
        first, _, rest = text.partition(" ")
        if type == "bool" and text.startswith("1 if"):
            return f"{name} is true {rest.replace(', 0 if', ', and false if')}"
        if first in VERBS:
            return f"{name} {VERBS[first]} {rest}"
        if text.startswith(CLAUSES) or type == "bool":
            return f"{name}: {lower(text)}"
        if type.startswith(("[]", "map")):
            verb = "has" if type[-1] == "4" or type[-1] == "2" and "float" in type else "are"
            article = "" if re.match(r"[^.]* that |The ", text) and not text.startswith("The only") else "the "
            return f"{name} {verb} {article}{lower(text).removeprefix('the ')}"
        if re.match(COUNTED, text, re.IGNORECASE):
            return f"{name} is the number of {lower(text)}"
        if text.startswith(("A ", "The ")):
            return f"{name} is {lower(text)}"
        return f"{name} is the {lower(text)}"

    def type_of(self, record, field):
        key = f"{record.short}.{field.name}"
        if field.role == "choice":
            return self.sets[field.set].type
        if field.role == "text":
            return "string"
        if field.role == "texts":
            return "[]string"
        if field.role == "array":
            return ARRAYS[field.target][0]
        if field.role in ("pointer", "callback", "user_data"):
            return POINTED[field.target]
        if field.name.endswith("_ms"):
            return "time.Duration"
        if field.name.endswith("_seconds"):
            return "*time.Duration" if "Negative if" in field.doc else "time.Duration"
        if key in POINTERS:
            return "*float64" if field.type == "f32" else "*int"
        if field.is_bool:
            return "bool"
        if field.type in ("f32", "f64"):
            return "float64"
        return TYPES.get(key) or TYPES.get(field.name) or ("int64" if re.search(r"(^|_)bytes$", field.name) else "int")

    def members(self, record, code):
        """The Go fields of a struct. `code(record, field, name, type)` copies a field."""
        members: List[Member] = []
        for field in record.fields:
            key = f"{record.short}.{field.name}"
            flags = [flag for flag, holder in self.flags_of(record.short).items() if holder is field]
            if key in SPECIAL:
                members += [SPECIAL[key]] if SPECIAL[key] else []
            elif flags:
                members += [self.flag(record, field, flag) for flag in flags if self.flagged(record, flag) is None]
            elif field.is_data:
                type, name = self.type_of(record, field), go_name(field.name)
                flag = self.flagged_by(record, field)
                type = f"*{type}" if flag else type
                members.append(Member(name, type, DOCS.get(key) or self.doc(record, field, name, type, flag), code(record, field, name, type)))
        return members + ([EXTRA[record.short]] if record.short in EXTRA else [])

    def doc(self, record, field, name, type, flag):
        text = field.doc
        if field.role == "choice" and text.startswith("PLLM_"):
            text = self.sets[field.set].doc.removeprefix("the ").capitalize() + text.partition(".")[2]
        if flag:
            text = text.removeprefix(f"With {flag}: ")
            text = text[0].upper() + text[1:] + " " + re.sub(r".*Without this flag ", "nil: ", self.constants[flag].doc)
        return self.text(name, type, text, record.short)

    def flagged(self, record, flag):
        """The field that a flag makes valid: PLLM_SAMPLING_SEED for seed."""
        name = self.constants[flag].short.lower()
        return next((field for field in record.fields if field.name == name and field.role == "number"), None)

    def flagged_by(self, record, field):
        return next((flag for flag in self.flags_of(record.short) if self.flagged(record, flag) is field), None)

    def flag(self, record, field, flag):
        name = self.flag_name(flag, record.short)
        doc = DOCS.get(name) or DOCS.get(flag) or self.text(name, "bool", self.constants[flag].doc, record.short)
        operator = "&^=" if field.default & self.constants[flag].value else "|="
        return Member(name, "bool", doc, f"if v.{name} {{\n\tc.{field.name} {operator} C.{flag}\n}}")

    def to_c(self, record, field, name, type):
        """The code that sets a field of a C struct."""
        value, target = f"v.{name}", f"c.{field.name}"
        flag = self.flagged_by(record, field)
        if flag:
            return f"if {value} != nil {{\n\t{target} = C.uint64_t(*{value})\n\tc.flags |= C.{flag}\n}}"
        if field.name == "prompt":
            return "c.prompt, c.prompt_len, c.prompt_token_ids, c.prompt_token_ids_len = args.prompt(v.Prompt, v.PromptTokenIDs)"
        if field.name == "prompt_token_ids" or field.target in ("pllm_budget", "pllm_queue", "pllm_communicator", "pllm_kv_store"):
            return ""  # prompt sets it, or the caller
        if field.role == "text":
            required = "NULL" not in field.doc
            return f"{target}, c.{field.len} = args.text({value})" if required else f"args.setText(&{target}, &c.{field.len}, {value})"
        if field.role == "texts":
            return f"{target}, c.{field.lens}, c.{field.count} = args.texts({value})"
        if field.role == "array":
            return f"{target}, c.{field.len} = args.{ARRAYS[field.target][1]}({value})"
        if field.role == "pointer":
            set_it = f"{target} = {value}.toC(args)"
            return f"if {value} != nil {{\n\t{set_it}\n}}" if type[0] == "*" else set_it
        if field.role == "choice" or type == "uint64":
            assert field.default == 0, f"the zero value of {record.name}.{field.name} is not its default"
            return f"{target} = C.uint{field.type[1:]}_t({value})"
        if type == "time.Duration":
            if field.type == "i64":  # the library checks it
                return f"{target} = C.int64_t(wholeMilliseconds({value}))"
            return f'args.setMilliseconds{field.type[1:]}(&{target}, "{name}", {value})'
        kind = {"f32": "Float", "u32": "Uint32", "u64": "Uint64", "i32": "Int32"}[field.type]
        if type[0] == "*":
            return f"set{kind}From(&{target}, {value})" if kind == "Float" else f'args.set{kind}From(&{target}, "{name}", {value})'
        if kind == "Float":
            return f"args.setFloat(&{target}, {value})"
        return f'args.set{kind}(&{target}, "{name}", {f"int64({value})" if kind == "Uint64" and type == "int" else value})'

    def from_c(self, record, field, name, type):
        """The code that copies a field of a C struct."""
        source = f"c.{field.name}"
        if field.role == "text":
            return f"v.{name} = goText({source}, c.{field.len})"
        if field.role == "array":
            return f"v.{name} = {ARRAYS[field.target][2]}({source}, c.{field.len})"
        if type == "*time.Duration":
            return f"if {source} >= 0 {{\n\tv.{name} = Ptr(goDuration({source}))\n}}"
        if type == "bool":
            return f"v.{name} = {source} != 0"
        return f"v.{name} = goDuration({source})" if type == "time.Duration" else f"v.{name} = {type}({source})"

    def struct(self, entry, record, members):
        """The declaration of a struct."""
        paragraphs = record.doc
        for pattern in DROPPED:
            paragraphs = re.sub(f" ?{pattern}", "", paragraphs)
        for pattern, new in REWORDED:
            paragraphs = re.sub(pattern, new, paragraphs)
        first, *rest = paragraphs.strip().split("\n")
        doc = entry.begin if entry.begin.endswith(".") else f"{entry.begin} {lower(first)}"
        doc = "\n".join(self.names(line, record.short) for line in [doc, *rest])
        if entry.more:
            doc += ("\n" if rest else " ") + entry.more
        return declaration(entry.name, doc, members)

    def set(self, name, constants):
        """The type of a set and its constants."""
        entry = self.sets[name]
        article = "A " if name == "PLLM_E" else ""
        text = f"\n{comment(f'{article}{entry.type} is {entry.doc}', '')}type {entry.type} {entry.integer}\n\nconst (\n"
        for constant in constants:
            doc = DOCS.get(constant.name) or self.names(f"{self.constant_name(constant)}: {lower(constant.doc)}", name)
            text += comment(doc, "\t") + f"\t{self.constant_name(constant)} {entry.type} = C.{constant.name}\n"
        text += ")\n"
        if entry.unknown:
            text += self.string(entry, {self.constant_name(constant): spoken(constant) for constant in constants})
        return text

    def string(self, entry, names):
        """The method String of a set."""
        receiver = entry.type[0].lower()
        cases = "".join(f'\tcase {name}:\n\t\treturn "{text}"\n' for name, text in names.items())
        example = list(names.values())[:2][-1]
        return (f'\n// String returns the name, such as "{example}".\nfunc ({receiver} {entry.type}) String() string {{\n\tswitch {receiver} {{\n'
                f'{cases}\t}}\n\treturn fmt.Sprintf("{entry.unknown}", {entry.integer}({receiver}))\n}}\n')


def declaration(name, doc, members):
    fields = "".join(comment(member.doc, "\t") + f"\t{member.name} {member.type}\n" for member in members)
    return f"\n{comment(doc, '')}type {name} struct {{\n{fields}}}\n"


def method(name, members, signature, before="", after=""):
    """A method of a struct that copies the members."""
    receiver = name[0].lower()
    lines = [line for member in members for line in member.code.split("\n") if line]
    body = re.sub(r"\bv\.", f"{receiver}.", "".join(f"\t{line}\n" for line in lines))
    return f"\nfunc ({receiver} *{name}) {signature} {{\n{before}{body}{after}}}\n"


def completion(outputs):
    """All outputs of a sequence in one struct, and the method that adds an output."""

    def member(output):
        if output.type.startswith("[]"):
            doc, code = f"{output.name} has the {output.name} of all outputs.", f"append(v.{output.name}, output.{output.name}...)"
        elif output.name in ("PromptTokens", "GeneratedTokens"):  # 0 in the output of a fork that failed
            doc, code = output.doc, f"max(v.{output.name}, output.{output.name})"
        else:
            doc, code = f"{output.name} is as in the last Output.", f"output.{output.name}"
        doc = COMPLETION.get(output.name, doc)
        return dataclasses.replace(output, doc=doc, code=f"v.{output.name} = {code}" if output.name != "Text" else "")

    members = [member(output) for output in outputs if COMPLETION.get(output.name, "") is not None]
    text = declaration("Completion", "A Completion is everything that one sequence generated.", members)
    text += "\n// add adds the next output, except its text.\n"
    return text + method("Completion", members, "add(output *Output)").lstrip("\n")


def files(abi, _root):
    writer = Writer(abi)
    constants = HEAD + C_IMPORT + '\nimport "fmt"\n'
    constants += "".join(writer.set(name, abi.sets[name]) for name in writer.sets)
    options = HEAD + C_IMPORT + '\nimport "time"\n'
    for short, entry in OPTIONS.items():
        record = abi.struct(f"pllm_{short}")
        members = writer.members(record, writer.to_c)
        new = f"\tc := new(C.{record.name})\n\tC.{record.name}_init(c, C.sizeof_{record.name})\n\targs.Pin(c)\n"
        options += writer.struct(entry, record, members)
        options += method(entry.name, members, f"toC(args *arguments) *C.{record.name}", new, "\treturn c\n")
    results = HEAD + C_IMPORT + '\nimport "time"\n'
    for short, entry in RESULTS.items():
        record = abi.struct(f"pllm_{short}")
        members = writer.members(record, writer.from_c)
        results += writer.struct(entry, record, members)
        results += method(entry.name, members, f"fromC(c *C.{record.name})")
        if short == "output":
            results += completion(members)
    texts = {"constants": constants, "options": options, "results": results}
    return {f"bindings/go/{name}_generated.go": text for name, text in texts.items()}
