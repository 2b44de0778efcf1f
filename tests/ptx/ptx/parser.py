"""Reads PTX text as nvcc writes it: kernels, their registers, memory and instructions."""
import re
from dataclasses import dataclass, field

# The end of a statement, a brace, or a label.
MARK = re.compile(r"[{};]|(?:(?<=[;{}])|(?m:^))\s*\$?\w+:(?!:)")
GUARDED = re.compile(r"(?:@(!?)(%?[\w@]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
VARIABLE = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.[a-z](\d+)\s+(\w+)(?:\[(\d*)\])?")
TABLE = re.compile(r"^\.global \.align (\d+) \.b8 (\w+)\[\d+\] = \{([^}]*)\};", re.M)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?")
MAP = "map"  # the type of a parameter that is a tensor map
NAME = re.compile(r"%?[A-Za-z_$][\w$]*")


class PtxError(Exception):
    """A defect of a kernel, or PTX that the interpreter does not know."""


@dataclass
class Instruction:
    """One instruction. `guard` is a register and whether it is negated, or None."""
    guard: tuple | None
    opcode: str
    operands: list
    text: str

    @property
    def parts(self):
        return self.opcode.split(".")


@dataclass
class Variable:
    """A static array in shared or local memory. A size of None is that of dynamic shared memory."""
    space: str
    align: int
    size: int | None


@dataclass
class Kernel:
    name: str
    parameters: list = field(default_factory=list)    # types
    maps: dict = field(default_factory=dict)          # numbers of the parameters that are tensor maps, by name
    registers: dict = field(default_factory=dict)     # types by name
    variables: dict = field(default_factory=dict)     # those of the kernel and of its module
    instructions: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)        # index of an instruction by label


class Module:
    """A PTX file. Kernels are parsed when they are needed."""

    def __init__(self, text):
        self.texts = {}
        first = text.find(".visible .entry ")
        for part in text[first:].split(".visible .entry ")[1:]:
            self.texts[part[:part.index("(")]] = part
        self.variables = dict(variables(text[:first]))
        self.tables = {name: (int(align), bytes(int(byte) for byte in numbers.split(",")))
                       for align, name, numbers in TABLE.findall(text[:first])}
        self.parsed = {}

    @property
    def names(self):
        return list(self.texts)

    def kernel(self, name):
        if name not in self.parsed:
            if name not in self.texts:
                raise PtxError(f"no kernel {name} in the PTX")
            self.parsed[name] = parse_kernel(name, self.texts[name], self.variables)
        return self.parsed[name]

    def changed(self, name, change):
        """Returns a copy of the module in which `change` has replaced the text of a kernel."""
        copy = Module.__new__(Module)
        copy.__dict__.update(self.__dict__, texts={**self.texts, name: change(self.texts[name])}, parsed={})
        return copy


def variables(text):
    for space, align, bits, name, count in VARIABLE.findall(text):
        dynamic = f"{name}[]" in text
        yield name, Variable(space, int(align), None if dynamic else int(count or 1) * int(bits) // 8)


def operands_of(text):
    """Divides operands at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return found + [last] if last else found


def statements(body):
    """Yields braces, labels and statements. Braces of operands do not end a statement."""
    start = 0
    for piece in MARK.finditer(body):
        text = body[start:piece.start()].strip()
        mark = piece.group().strip()
        if piece.start() < start or (mark in "{}" and text):
            continue  # inside of a statement
        if mark == ";":
            yield text
        else:
            yield mark
        start = piece.end()


class Scopes:
    """The names of registers and labels. Inline assembly declares its own in braces."""

    def __init__(self, kernel):
        self.kernel, self.names, self.count = kernel, [{}], 0

    def open(self):
        self.names.append({})

    def close(self):
        self.names.pop()

    def unique(self, name):
        if len(self.names) > 1:
            self.count += 1
            self.names[-1][name] = f"{name}@{self.count}"
            return self.names[-1][name]
        return name

    def declare(self, name, kind):
        self.kernel.registers[self.unique(name)] = kind

    def resolve(self, text):
        def unique(match):
            for names in reversed(self.names):
                if match.group() in names:
                    return names[match.group()]
            return match.group()
        return NAME.sub(unique, text) if len(self.names) > 1 else text


def declare_parameters(head, kernel):
    for number, (align, kind, name, size) in enumerate(PARAMETER.findall(head)):
        if size and ((kind, size) != ("b8", "128") or int(align) % 64):
            raise PtxError(f"unknown PTX: the parameter {name} of {size} bytes")
        kernel.parameters.append(MAP if size else kind)
        if size:
            kernel.maps[name] = number


def declare_registers(statement, scopes):
    _, kind, rest = statement.split(None, 2)
    for name in rest.split(","):
        several = re.match(r"\s*(%?\w+)<(\d+)>", name)
        if several:
            for number in range(int(several[2])):
                scopes.kernel.registers[f"{several[1]}{number}"] = kind[1:]
        else:
            scopes.declare(name.strip(), kind[1:])


def parse_kernel(name, text, of_module):
    head, body = text[:text.index(")")], text[text.index("{") + 1:text.rindex("}")]
    kernel = Kernel(name)
    declare_parameters(head, kernel)
    body = re.sub(r"//[^\n]*", "", body)
    kernel.variables = {**of_module, **dict(variables(body))}
    scopes = Scopes(kernel)
    for statement in statements(body):
        if statement == "{":
            scopes.open()
        elif statement == "}":
            scopes.close()
        elif statement.endswith(":"):
            kernel.labels[scopes.unique(statement[:-1])] = len(kernel.instructions)
        elif statement.startswith(".reg"):
            declare_registers(statement, scopes)
        elif statement and not statement.startswith((".shared", ".local", ".pragma", ".loc")):
            kernel.instructions += divided(parse_instruction(statement, scopes))
    return kernel


def divided(instruction):
    """A barrier of some warps is an arrival, which no thread waits for, and the wait."""
    if instruction.opcode != "bar.sync" or len(instruction.operands) == 1:
        return [instruction]
    arrival, wait = (Instruction(instruction.guard, opcode, instruction.operands, instruction.text) for opcode in ("bar.arrive", "bar.wait"))
    return [arrival, wait]


def parse_instruction(statement, scopes):
    match = GUARDED.match(scopes.resolve(statement))
    if not match:
        raise PtxError(f"{scopes.kernel.name}: cannot read {statement!r}")
    negated, guard, opcode, rest = match.groups()
    text = " ".join(statement.split())
    return Instruction((guard, negated == "!") if guard else None, opcode, operands_of(rest), text)
