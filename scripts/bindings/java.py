"""bindings/java/pagedllm/PagedLlm.java: the hand-written parts, and what mirrors the C API. A line
`// generated: KIND` of a part is replaced by the text that the method KIND returns."""
import html
import re

from abi import KV_STORE_OPTIONS, NOTICE, camel, wrapped
from node import FLAG_NAMES, INVERTED, Node, interface, union

FOLDER = "bindings/java/parts"
PATH = "bindings/java/pagedllm/PagedLlm.java"
PARTS = ["overview", "errors", "options", "results", "handles", "queues", "engine", "library"]

PRIMITIVES = {"u32": "int", "i32": "int", "u64": "long", "i64": "long", "f32": "float", "f64": "double", "void": "void"}
BOXES = {"int": "Integer", "long": "Long", "float": "Float"}
LAYOUTS = {"int": "JAVA_INT", "long": "JAVA_LONG", "float": "JAVA_FLOAT", "double": "JAVA_DOUBLE"}
ENUMS = ["PLLM_E", "PLLM_DTYPE", "PLLM_ISA", "PLLM_WEIGHTS", "PLLM_PACKED", "PLLM_PREEMPTION", "PLLM_ORDER", "PLLM_BATCHING",
         "PLLM_ALLOCATION", "PLLM_OUTPUT", "PLLM_EARLY_STOPPING", "PLLM_FINISH", "PLLM_STOP", "PLLM_KV_EVENT", "PLLM_KV_MEDIUM"]
# Fields of options that the parts set, or that Java does not have.
HIDDEN = {"progress", "progress_data", "queue", "budget", "logits_hook", "hook_data", "grammar_kind", "choices",
          "communicator"} | KV_STORE_OPTIONS
# Hidden pointers whose places the parts need.
PLACED = {"progress", "queue", "budget"}
# Fields of results that the parts or another field cover.
HIDDEN_RESULTS = {"error_code"}
# Constants that the parts need, and their names.
NUMBERS = {"PLLM_ABI_VERSION": "EXPECTED_ABI", "PLLM_QUEUE_CAPACITY": "QUEUE_CAPACITY", "PLLM_TEXT_ADD_SPECIAL": "ADD_SPECIAL",
           "PLLM_TEXT_SKIP_SPECIAL": "SKIP_SPECIAL"}
# Options that differ from an empty list if they are not given.
NULLABLE = {"sequence_breakers"}
OPTION_ARRAYS = {"u32": ("int[]", "putInts"), "u8": ("byte[]", "putBytes"), "pllm_logit_bias": ("Map<Integer, Float>", "putBiases"),
                 "pllm_token_list": ("List<int[]>", "putTokenLists")}
RESULTS = {
    ("pllm_output", "error"): ("PagedLlmException", "errorOf(c)"),
    ("pllm_output", "stop_token"): (
        "Integer", "stopReason == StopReason.EOS || stopReason == StopReason.TOKEN ? (Integer) c.get(JAVA_INT, {offset}) : null"),
    ("pllm_output", "stop_string"): ("String", "stopReason == StopReason.STRING ? text(c, {offset}, {len}) : null"),
    ("pllm_output", "logprobs"): ("float[]", "floats(c, {offset}, {tokens_len})"),
    ("pllm_output", "prompt_logprobs"): ("float[]", "floats(c, {offset}, {len})"),
    ("pllm_output", "top_logprobs"): ("Logprob[][]", "candidates(c, {offset}, {len}, {tokens_len})"),
    ("pllm_output", "prompt_top_logprobs"): ("Logprob[][]", "candidates(c, {offset}, {len}, {prompt_logprobs_len})"),
    ("pllm_output", "sequence_state"): ("byte[]", "isNull(c, {offset}) ? null : bytes(c, {offset}, {len})"),
    ("pllm_kv_event", "hash"): ("byte[]", "hash(c, {offset})"),
    ("pllm_kv_event", "parent_hash"): ("byte[]", "hash(c, {offset})"),
}
# Docs that differ from those of C: (class, member).
DOCS = {
    ("Options", "modelPath"): "Model directory in the layout of Hugging Face, or a GGUF file.",
    ("Options", "queueCapacity"): "Capacity, in outputs, of the engine's own queue. See createQueue(). 0 (default): 65536.",
    ("Options", "prefixCache"): "false disables the prefix cache. Default true.",
    ("Options", "modelName"): "Value of the label model_name in metrics(). Default: the name of the model directory.",
    ("ForkOptions", "at"): "Number of tokens that the children share with their parent: 1 to its length. null (default): all.",
    ("Request", "keep"): "The sequences are kept when they end, for any reason, and become idle. resume() continues one; free() frees it.",
    ("Request", "promptTokenIds"): "Prompt as token ids, instead of prompt.",
    ("Resume", "keep"): "The sequence is kept when it ends. Default true.",
    ("Request", "sampling"): "Sampling parameters.",
    ("Resume", "sampling"): "Sampling parameters. Counts (maxTokens, minTokens) and penalties start anew.",
    ("Request", "queue"): "Queue for the outputs. null (default): the engine's own queue.",
    ("Sampling", "grammar"): "Constraint on the output. null (default): none.",
    ("Output", "error"): "The error if finishReason is ERROR, if it is ABORT because the engine was closed, or if a change of an idle "
                         "sequence failed. Else null.",
    ("Output", "stopToken"): "The token that ended the sequence, if stopReason is EOS or TOKEN. Else null.",
    ("Output", "stopString"): "The string that ended the sequence, if stopReason is STRING. Else null.",
    ("FinishReason", "ERROR"): "The computation failed. See Output.error.",
}
# Methods and constructors of classes.
EXTRA = {
    "Output": """
        /** Returns whether this is the last output of its sequence. */
        public boolean isLast() {
            return finishReason != FinishReason.NONE;
        }
""",
    "Request": """
        public Request() {}

        public Request(String prompt) {
            this.prompt = prompt;
        }
""",
    "Pin": """
        public Pin() {}

        public Pin(String prompt) {
            this.prompt = prompt;
        }
""",
}
SUMMARIES = {
    "Code": "Code of an error.",
    "KvEventKind": "What has happened to a block of the prefix cache.",
    "KvMedium": "Place of a KV block.",
    "Preemption": "Treatment of preempted requests.",
    "EarlyStopping": "When a beam search ends.",
    "FinishReason": "Why a sequence ended.",
    "StopReason": "What ended a sequence whose reason is FinishReason.STOP.",
}


def comment(doc, indent):
    if not doc:
        return ""
    doc = html.escape(doc.replace("\n", " "), quote=False)
    line = f"{indent}/** {doc} */\n"
    return line if len(line) <= 101 else f"{indent}/**\n{wrapped(doc, f'{indent} * ')}{indent} */\n"


class Java(Node):
    """Shares the selection of structs and the texts with the wrapper for Node."""

    def __init__(self, abi):
        super().__init__(abi)
        self.missing = {name for name in abi.sets if name in self.choices or name == "PLLM_E"} - set(ENUMS)
        if self.missing:
            raise SystemExit(f"{PATH}: ENUMS lacks {', '.join(sorted(self.missing))}")

    # ---- docs

    def constant_in_docs(self, name):
        if name.endswith("_*"):
            return union(name[:-2])
        constant = self.constants.get(name)
        if not constant or not constant.set:
            return name
        if constant.set in ENUMS:
            return f"{union(constant.set)}.{constant.short}"
        return self.flag_name(constant) + (": false" if name in INVERTED else "")

    def doc(self, owner, name, text):
        doc = DOCS.get((owner, name)) or self.prose(text)
        doc = re.sub(rf"\b{owner}\.(?=[A-Z])", "", doc)
        if re.search(r"PLLM_(?!E_)|pllm_|NULL", doc):
            raise SystemExit(f"{PATH}: the text of {owner}.{name} is for C programs ({doc}); add it to DOCS")
        return doc

    @staticmethod
    def flag_name(constant):
        return FLAG_NAMES.get(constant.name) or camel(constant.short.lower())

    # ---- enums

    def enums(self):
        text = ""
        read = {"PLLM_E"} | {field.set for struct in self.results for field in struct.fields if field.role == "choice"}
        for set_name in ENUMS:
            name, constants = union(set_name), self.abi.sets[set_name]
            text += comment(SUMMARIES.get(name) or self.summary(set_name), "    ") + f"    public enum {name} {{\n"
            for constant in constants:
                text += comment(self.doc(name, constant.short, constant.doc), "        ") + f"        {constant.short}({constant.value}),\n"
            if set_name in read:
                text += comment("A value that only a newer library knows.", "        ") + "        UNKNOWN(Integer.MIN_VALUE),\n"
            text = text.removesuffix(",\n") + ";\n\n        private final int value;\n\n"
            text += f"        {name}(int value) {{\n            this.value = value;\n        }}\n"
            if set_name in read:
                text += f"\n        private static {name} of(long value) {{\n"
                text += f"            for ({name} known : values()) if (known.value == value) return known;\n"
                text += "            return UNKNOWN;\n        }\n"
            text += "    }\n\n"
        return text

    def grammar_kinds(self):
        return "".join(f"    private static final int GRAMMAR_{constant.short} = {constant.value};\n"
                       for constant in self.abi.sets["PLLM_GRAMMAR"] if constant.short != "NONE")

    # ---- options

    def mark(self, struct, field):
        """The flag that marks a number as given, with the field of the flag."""
        for other in struct.fields:
            for flag in self.abi.flags(other):
                if flag.short == field.name.upper():
                    return flag, other
        return None

    def options_classes(self):
        return "".join(self.options_class(struct) for struct in self.inputs if struct.name != "pllm_kv_store")

    def options_class(self, struct):
        name = interface(struct.name)
        members, code, places = "", "", ""
        for field in struct.fields:
            if field.name in PLACED and field.is_data:
                places += f"        private static final long {field.name.upper()}_OFFSET = {field.offset};\n"
                if field.role == "pointer":
                    members += comment(self.doc(name, field.name, field.doc), "        ")
                    members += f"        public {interface(field.target)} {field.name} = null;\n"
            for flag in self.abi.flags(field):
                if not any(flag.short == other.name.upper() for other in struct.fields):
                    members += self.flag_member(name, field, flag)
                    code += self.flag_code(field, flag)
            if field.is_data and not self.abi.flags(field) and field.name not in HIDDEN:
                member, line = self.option_member(name, struct, field)
                members, code = members + member, code + line
        text = comment(self.doc(name, "", struct.doc), "    ") + f"    public static final class {name} {{\n{members}{places}\n"
        text += EXTRA.get(name, "").lstrip("\n") + ("\n" if name in EXTRA else "")
        text += "        private MemorySegment toC(Arena arena) {\n"
        text += f"            MemorySegment c = arena.allocate({struct.size}, 8);\n            Native.{struct.short}_init(c, {struct.size});\n"
        return text + f"{code}            return c;\n        }}\n    }}\n\n"

    def flag_member(self, owner, field, flag):
        default = bool(field.default & flag.value) != (flag.name in INVERTED)
        doc = self.doc(owner, self.flag_name(flag), flag.doc)
        if default and "Default" not in doc:
            doc += " Default true."
        return comment(doc, "        ") + f"        public boolean {self.flag_name(flag)} = {str(default).lower()};\n"

    def flag_code(self, field, flag):
        given = ("!" if flag.name in INVERTED else "") + self.flag_name(flag)
        return f"            putFlag(c, {field.offset}, {flag.value}, {given});\n"

    def option_member(self, owner, struct, field):
        name, at, doc = camel(field.name), field.offset, field.doc
        mark = self.mark(struct, field)
        kind, value, code = "", "", ""
        if field.name == "grammar":
            kind, value = "Grammar", "null"
            choices = struct.field("choices")
            places = [struct.field("grammar_kind").offset, at, struct.field(field.len).offset]
            places += [choices.offset, struct.field(choices.lens).offset, struct.field(choices.count).offset]
            code = f"if (grammar != null) grammar.putInto(c, {', '.join(map(str, places))}, arena);"
        elif field.role == "number":
            kind = PRIMITIVES[field.type]
            value, code = f"{field.default}{'f' if kind == 'float' else 'L' if kind == 'long' else ''}", f"c.set({LAYOUTS[kind]}, {at}, {name});"
            if mark or field.default in (2**32 - 1, 2**64 - 1):
                kind, value = BOXES[kind], "null"
                code = f"if ({name} != null) {code}"
                if mark:
                    doc = re.sub(r"(, used )?[Ww]ith PLLM_\w+(: |\.)", lambda found: "." if found[1] else "", doc)
                    doc = f"{doc[0].upper()}{doc[1:]} null (default):{mark[0].doc.split('Without this flag')[1]}"
                    code += f"\nputFlag(c, {mark[1].offset}, {mark[0].value}, {name} != null);"
        elif field.role == "choice":
            kind = union(field.set)
            default = next(constant for constant in self.abi.sets[field.set] if constant.value == field.default)
            value, code = f"{kind}.{default.short}", f"c.set(JAVA_INT, {at}, {name}.value);"
        elif field.role == "text":
            kind, value = "String", "null"
            code = f"putText(c, {at}, {struct.field(field.len).offset}, {name}, arena);"
        elif field.role == "texts":
            kind, value = "List<String>", "null" if field.name in NULLABLE else "List.of()"
            code = f"putTexts(c, {at}, {struct.field(field.lens).offset}, {struct.field(field.count).offset}, {name}, arena);"
        elif field.role == "array":
            kind, put = OPTION_ARRAYS[field.target]
            value = "null" if kind.endswith("[]") else "Map.of()" if kind.startswith("Map") else "List.of()"
            code = f"{put}(c, {at}, {struct.field(field.len).offset}, {name}, arena);"
        elif field.role == "pointer":
            kind = interface(field.target)
            value = "new Sampling()" if kind == "Sampling" else "null"
            code = f"if ({name} != null) c.set(ADDRESS, {at}, {name}.toC(arena));"
        else:
            raise SystemExit(f"{PATH}: {struct.name}.{field.name} has no form in Java; add it to HIDDEN")
        member = comment(self.doc(owner, name, doc), "        ") + f"        public {kind} {name} = {value};\n"
        return member, "".join(f"            {line}\n" for line in code.split("\n"))

    # ---- results

    def results_classes(self):
        return "".join(self.result_class(struct) for struct in self.results
                       if struct.fields[0].role == "struct_size" and struct.init is False)

    def result_class(self, struct):
        name = interface(struct.name)
        places = {field.name: field.offset for field in struct.fields}
        members, code = "", ""
        # What ended a sequence is read first, because others depend on it.
        for field in sorted(struct.fields, key=lambda field: field.name != "stop_reason"):
            if not field.is_data or field.name in HIDDEN_RESULTS:
                continue
            kind, read = RESULTS.get((struct.name, field.name)) or self.read(struct, field)
            lens = {"len": places.get(field.len or f"{field.name}_len", 0), **{key: places.get(key, 0) for key in ("tokens_len", "prompt_logprobs_len")}}
            read = read.format(offset=field.offset, **lens)
            doc = self.doc(name, camel(field.name), field.doc)
            if kind == "boolean":
                doc = re.sub(", 0 if ", ", false if ", "true" + doc[1:])
            members += comment(doc, "        ") + f"        public final {kind} {camel(field.name)};\n"
            code += f"            {camel(field.name)} = {read};\n"
        text = comment(self.doc(name, "", struct.doc), "    ") + f"    public static final class {name} {{\n"
        text += f"        private static final long SIZE = {struct.size};\n"
        if name == "Output":  # for the error
            for place in ("error_code", "error", "error_len"):
                text += f"        private static final long {place.upper()} = {places[place]};\n"
        text += f"\n{members}\n        private {name}(MemorySegment c) {{\n{code}        }}\n{EXTRA.get(name, '')}    }}\n\n"
        return text

    def read(self, struct, field):
        if field.role == "choice":
            layout = LAYOUTS[PRIMITIVES[field.type]]
            return union(field.set), f"{union(field.set)}.of(c.get({layout}, {{offset}}))"
        if field.role == "text":
            return "String", "text(c, {offset}, {len})"
        if field.role == "array" and field.target == "u32":
            return "int[]", "ints(c, {offset}, {len})"
        if field.role == "array" and field.target == "u8":
            return "byte[]", "bytes(c, {offset}, {len})"
        if field.role == "number":
            kind = PRIMITIVES[field.type]
            if field.is_bool and struct.name != "pllm_stats":
                return "boolean", f"c.get({LAYOUTS[kind]}, {{offset}}) != 0"
            return kind, f"c.get({LAYOUTS[kind]}, {{offset}})"
        raise SystemExit(f"{PATH}: {struct.name}.{field.name} has no form in Java; add it to RESULTS")

    # ---- functions

    def constants_lines(self):
        text = ""
        for constant in self.abi.constants:
            if constant.name in NUMBERS:
                text += f"        private static final int {NUMBERS[constant.name]} = {constant.value};\n"
        return text

    def functions(self):
        text = ""
        for function in self.abi.functions:
            result = self.java_type(function.returns)
            arguments = [(self.java_type(argument.type), camel(argument.name)) for argument in function.arguments]
            layouts = ", ".join(self.layout(kind) for kind, _ in arguments)
            descriptor = f"FunctionDescriptor.ofVoid({layouts})" if result == "void" else "FunctionDescriptor.of(" + ", ".join(
                filter(None, [self.layout(result), layouts])) + ")"
            handle = function.short.upper()
            parameters = ", ".join(f"{kind} {name}" for kind, name in arguments)
            names = ", ".join(name for _, name in arguments)
            call = f"{handle}.invokeExact({names})"
            call = f"{call};" if result == "void" else f"return ({result}) {call};"
            text += f"\n        private static final MethodHandle {handle} = find(\"{function.name}\",\n                {descriptor});\n"
            text += f"\n        static {result} {function.short}({parameters}) {{\n            try {{\n                {call}\n"
            text += "            } catch (Throwable thrown) {\n                throw unexpected(thrown);\n            }\n        }\n"
        return text

    @staticmethod
    def java_type(c_type):
        return PRIMITIVES.get(c_type, "MemorySegment")

    @staticmethod
    def layout(kind):
        return LAYOUTS.get(kind, "ADDRESS")


def files(abi, root):
    java, used = Java(abi), set()

    def section(match):
        used.add(match[1])
        return getattr(java, match[1])()

    text = f"// {NOTICE}\n// The hand-written parts of this file are in {FOLDER} of the repository.\n"
    text += "\n".join(re.sub(r"^ *// generated: (\w+)\n", section, (root / FOLDER / f"{part}.java").read_text(), flags=re.M) for part in PARTS)
    return {PATH: re.sub(r"\n\n\n+", "\n\n", text)}
