"""bindings/abi.json as objects, and what the generators of all languages share."""
import dataclasses
import json
import re
import textwrap
from typing import Dict, List, Optional

NOTICE = "Generated from src/ffi by `make header`. Do not edit."
# Options of KV stores, which the wrappers of C++, Go and Python have.
KV_STORE_OPTIONS = {"kv_store", "kv_store_max_bytes", "kv_store_max_operations", "kv_store_timeout_ms", "kv_store_secret"}


@dataclasses.dataclass(frozen=True)
class Constant:
    name: str
    set: Optional[str]  # "PLLM_DTYPE" for PLLM_DTYPE_F32
    type: str
    value: int
    doc: str
    since: str

    @property
    def short(self):
        """The name within its set: F32."""
        return self.name.removeprefix(f"{self.set}_" if self.set else "PLLM_")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a struct. Its role is number, choice (one constant of `set`), flags (of `set`),
    text or array (with the field `len`), texts (with `lens` and `count`), pointer, callback,
    user_data, length (of another field), struct_size or reserved."""
    name: str
    type: str  # "u32", "const char *", "const pllm_dry *"...
    offset: int
    role: str
    doc: str
    since: str
    set: Optional[str] = None
    len: Optional[str] = None
    lens: Optional[str] = None
    count: Optional[str] = None
    default: object = None
    unit: Optional[str] = None
    range: Optional[List[float]] = None
    excludes_low: bool = False  # whether the range lacks its lower end

    @property
    def target(self):
        """What a pointer points to: "u32", "pllm_dry"..."""
        return re.sub(r"^const | \*$", "", self.type)

    @property
    def is_flags(self):
        """Whether the field takes flags, also those of several sets, which have the role number."""
        return self.name == "flags" or self.name.endswith("_flags")

    @property
    def is_bool(self):
        return self.doc.startswith("1 if ")

    @property
    def is_data(self):
        return self.role not in ("struct_size", "reserved", "length")


@dataclasses.dataclass(frozen=True)
class Struct:
    name: str
    doc: str
    since: str
    opaque: bool = False
    size: int = 0
    init: bool = False  # whether there is a function NAME_init
    fields: List[Field] = dataclasses.field(default_factory=list)

    @property
    def short(self):
        return self.name.removeprefix("pllm_")

    def field(self, name):
        return next(field for field in self.fields if field.name == name)


@dataclasses.dataclass(frozen=True)
class Argument:
    name: str
    type: str


@dataclasses.dataclass(frozen=True)
class Function:
    """A function, or the type of a callback."""
    name: str
    arguments: List[Argument]
    returns: str
    doc: str
    since: str

    @property
    def short(self):
        return self.name.removeprefix("pllm_")


@dataclasses.dataclass(frozen=True)
class Abi:
    constants: List[Constant]
    callbacks: List[Function]
    structs: List[Struct]
    functions: List[Function]

    @classmethod
    def read(cls, path):
        data = json.loads(path.read_text())
        function = lambda item: Function(**{**item, "arguments": [Argument(**argument) for argument in item["arguments"]]})
        struct = lambda item: Struct(**{**item, "fields": [Field(**field) for field in item.get("fields", [])]})
        return cls(
            constants=[Constant(**item) for item in data["constants"]],
            callbacks=[function(item) for item in data["callbacks"]],
            structs=[struct(item) for item in data["structs"]],
            functions=[function(item) for item in data["functions"]],
        )

    def struct(self, name):
        return next(struct for struct in self.structs if struct.name == name)

    def flags(self, field):
        """Returns the flags that a field takes: its doc names their set, as PLLM_SET_*, or each."""
        names = re.findall(r"PLLM_\w+\*?", field.doc) if field.is_flags else []
        return [constant for constant in self.constants if constant.name in names or f"{constant.set}_*" in names]

    def without_interfaces(self):
        """The API without KV stores and communicators, whose functions are written in C."""
        pattern = r"pllm_kv_(?!event|medium)|pllm_communicator"
        keep = lambda items: [item for item in items if not re.match(pattern, item.name.lower())]
        return Abi(keep(self.constants), keep(self.callbacks), keep(self.structs), keep(self.functions))

    @property
    def records(self):
        """The structs with fields."""
        return [struct for struct in self.structs if not struct.opaque]

    @property
    def sets(self) -> Dict[str, List[Constant]]:
        """The constants of each set, by its name."""
        sets: Dict[str, List[Constant]] = {}
        for constant in self.constants:
            if constant.set:
                sets.setdefault(constant.set, []).append(constant)
        return sets


def camel(name):
    """max_tokens -> maxTokens"""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def wrapped(text, prefix, width=100):
    """Returns lines of at most `width` columns, each after `prefix`. Paragraphs stay apart."""
    lines = []
    for paragraph in text.split("\n"):
        hanging = "  " if paragraph.startswith("- ") else ""
        lines += textwrap.wrap(paragraph, width - len(prefix), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False) or [""]
    return "".join(f"{prefix}{line}".rstrip() + "\n" for line in lines)
