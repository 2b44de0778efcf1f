"""Translates instructions to Python that works on arrays with a number for each thread.

In the translation, R is the list of registers, C the list of constants, t the launch (machine.py), and m
the mask of active threads, or None for all threads.
"""
import re

import numpy as np

from . import numbers
from .parser import PtxError
from .tensor_map import MAP_BYTES, PARAMETERS

TYPES = {"pred": np.bool_, "u8": np.uint8, "b8": np.uint8, "s8": np.int8, "u16": np.uint16, "b16": np.uint16, "s16": np.int16,
         "u32": np.uint32, "b32": np.uint32, "s32": np.int32, "u64": np.uint64, "b64": np.uint64, "s64": np.int64,
         "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
# What a segment waits for before it begins.
WARP_INSTRUCTIONS = ("shfl", "vote", "mma", "ldmatrix", "bar.warp", "bar.arrive", "wgmma", "setmaxnreg.dec")
BLOCK_INSTRUCTIONS = ("bar.sync", "bar.red")
# Instructions that threads of a warp execute together if they can.
JOINED_INSTRUCTIONS = ("fence.proxy",)
# Instructions that a thread executes when a condition is met.
CONDITIONS = ("bar.wait", "mbarrier.try_wait", "setmaxnreg.inc")

INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Translator:
    """Translates the instructions of a kernel. `symbols` are the addresses of its variables."""

    def __init__(self, kernel, symbols):
        self.kernel, self.symbols = kernel, symbols
        self.register = {name: number for number, name in enumerate(kernel.registers)}
        self.constants, self.names, self.masked = [], {}, False
        for name, value in vars(numbers).items():
            if callable(value):
                self.names[name] = value
        self.names.update(np=np, where=np.where, C=self.constants, **{f"T_{name}": of for name, of in TYPES.items()})

    def translate(self, first, end, masked):
        """Returns a function of (t, R, m) that executes instructions."""
        self.masked = masked
        lines = [line for at in range(first, end) for line in self.instruction(at)] or ["pass"]
        text = "def run(t, R, m):\n    " + "\n    ".join(lines)
        names = dict(self.names)
        exec(compile(text, f"{self.kernel.name}[{first}]", "exec"), names)
        return names["run"]

    def condition(self, at):
        """Returns a function of (t, R, m) for the condition that an instruction waits for."""
        self.masked = True
        parts, operands = self.kernel.instructions[at].parts, self.kernel.instructions[at].operands
        if parts[0] == "setmaxnreg":
            expression = f"t.barriers.registers_free({int(operands[0])}, m)"
        elif parts[0] == "bar":
            expression = f"t.barriers.named_ended({self.source(operands[0], 'u32')}, m)"
        else:
            expression = f"t.barriers.phase_ended({self.address(operands[1])}, {self.source(operands[2], 'u32')}, m)"
        names = dict(self.names)
        exec(compile(f"def met(t, R, m):\n    return {expression}", f"{self.kernel.name}[{at}]", "exec"), names)
        return names["met"]

    def product_registers(self):
        """Returns the numbers of the registers that asynchronous products use."""
        products = [instruction for instruction in self.kernel.instructions if instruction.opcode.startswith("wgmma.mma_async")]
        lists = [operand for product in products for operand in product.operands[:2] if operand.startswith("{")]
        return sorted({self.register[name] for operand in lists for name in self.listed(operand)})

    # ---- operands

    def constant(self, value):
        self.constants.append(value)
        return f"C[{len(self.constants) - 1}]"

    def source(self, operand, kind):
        """Returns an expression for an operand that is read as a type."""
        dtype = TYPES[kind]
        if operand in self.register:
            held, expression = TYPES[self.kernel.registers[operand]], f"R[{self.register[operand]}]"
            if held is dtype:
                return expression
            if np.dtype(held).itemsize == np.dtype(dtype).itemsize:
                return f"{expression}.view(T_{kind})"
            return f"{expression}.astype(T_{kind})"
        if operand.startswith("%"):
            return f"t.special[{operand!r}]"
        if operand in self.symbols or operand in self.kernel.variables:
            return f"t.for_all({self.constant(dtype(self.symbols[operand]))})"
        if operand in self.kernel.maps:
            return f"t.for_all({self.constant(np.uint64(PARAMETERS + MAP_BYTES * self.kernel.maps[operand]))})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return self.constant(np.array(int(operand[2:], 16), np.uint32).view(np.float32)[()])
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return self.constant(np.array(int(operand[2:], 16), np.uint64).view(np.float64)[()])
        if re.fullmatch(r"-?(\d+|0x[0-9a-fA-F]+)U?", operand):
            return self.constant(np.array(int(operand.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF, np.uint64).astype(dtype)[()])
        return f"t.for_all(t.tables[{operand!r}])"

    def address(self, operand):
        """Returns an expression for the address in brackets."""
        base, _, offset = operand.strip("[]").replace("+-", "+ -").partition("+")
        held = self.kernel.registers.get(base, "b64")
        expression = self.source(base, held)
        return f"{expression} + {self.source(offset.strip(), held)}" if offset else expression

    def put(self, target, expression, kind):
        """Returns the line that sets a register to an expression of a type."""
        if target == "_":
            return f"{expression}"
        held, dtype, place = TYPES[self.kernel.registers[target]], TYPES[kind], f"R[{self.register[target]}]"
        if held is not dtype:
            same = np.dtype(held).itemsize == np.dtype(dtype).itemsize
            expression = f"({expression}).{'view' if same else 'astype'}(T_{self.kernel.registers[target]})"
        return f"{place} = where(m, {expression}, {place})" if self.masked else f"{place} = {expression}"

    @staticmethod
    def listed(operand):
        """The registers of a list in braces."""
        return [name.strip() for name in operand.strip("{} ").split(",")]

    # ---- instructions

    def instruction(self, at):
        instruction = self.kernel.instructions[at]
        name = instruction.parts[0]
        if name in ("bra", "ret"):
            return []  # the end of a segment
        if instruction.guard:
            raise PtxError(f"unknown PTX: a condition of {instruction.text!r}")
        handler = getattr(self, f"do_{name}", None)
        if handler is None and name in INFIX:
            handler = self.do_infix
        if handler is None:
            raise PtxError(f"unknown PTX: {instruction.text!r}")
        lines = handler(instruction.parts, instruction.operands)
        lines = lines if isinstance(lines, list) else [lines]
        needs_place = any("t." in line for line in lines)
        return [f"t.at = {at}", *lines] if needs_place else lines

    def binary(self, parts, operands, expression, result=None):
        """An instruction with sources of one type."""
        kind = parts[-1]
        sources = [self.source(operand, kind) for operand in operands[1:]]
        return self.put(operands[0], expression.format(*sources), result or kind)

    def do_infix(self, parts, operands):
        if parts[0] == "mul" and parts[1] in ("lo", "wide", "hi"):
            return self.do_integer_mul(parts, operands)
        return self.binary(parts, operands, f"({{}} {INFIX[parts[0]]} {{}})")

    def do_integer_mul(self, parts, operands):
        if parts[1] == "lo":
            return self.binary(parts, operands, "({} * {})")
        if parts[1] == "hi":
            assert parts[2] == "u64", parts
            return self.binary(parts, operands, "multiply_high({}, {})")
        wide = WIDER[parts[2]]
        return self.binary(parts, operands, f"({{}}.astype(T_{wide}) * {{}}.astype(T_{wide}))", wide)

    def do_mad(self, parts, operands):
        kind = parts[-1]
        a, b = (self.source(operand, kind) for operand in operands[1:3])
        if parts[1] == "wide":
            wide = WIDER[kind]
            return self.put(operands[0], f"({a}.astype(T_{wide}) * {b}.astype(T_{wide}) + {self.source(operands[3], wide)})", wide)
        return self.put(operands[0], f"({a} * {b} + {self.source(operands[3], kind)})", kind)

    def do_fma(self, parts, operands):
        if parts[-1] == "bf16x2":
            return self.binary(["b32"], operands, "fma_bf16x2({}, {}, {})")
        return self.binary(parts, operands, ("fma_down" if parts[1] == "rm" else "fma") + "({}, {}, {})")

    def do_div(self, parts, operands):
        return self.binary(parts, operands, "({} / {})" if parts[-1] == "f32" else "divide({}, {})")

    def do_rem(self, parts, operands):
        return self.binary(parts, operands, "remainder({}, {})")

    def do_min(self, parts, operands):
        return self.binary(parts, operands, "minimum({}, {})" if parts[-1][0] == "f" else "np.minimum({}, {})")

    def do_max(self, parts, operands):
        return self.binary(parts, operands, "maximum({}, {})" if parts[-1][0] == "f" else "np.maximum({}, {})")

    def do_abs(self, parts, operands):
        return self.binary(parts, operands, "np.abs({})")

    def do_neg(self, parts, operands):
        return self.binary(parts, operands, "(-{})")

    def do_not(self, parts, operands):
        return self.binary(parts, operands, "(~{})")

    def do_popc(self, parts, operands):
        return self.binary(parts, operands, "np.bitwise_count({}).astype(T_u32)", "u32")

    def do_sqrt(self, parts, operands):
        assert parts[1] == "rn", parts
        return self.binary(parts, operands, "np.sqrt({})")

    def do_rcp(self, parts, operands):
        return self.binary(parts, operands, "(C1 / {})".replace("C1", self.constant(np.float32(1))) if parts[1] == "rn"
                           else "reciprocal_approx({})")

    def do_ex2(self, parts, operands):
        return self.binary(parts, operands, "exp2_approx({})")

    def do_copysign(self, parts, operands):
        return self.binary(parts, operands, "np.copysign({1}, {0})")

    def do_shl(self, parts, operands):
        return self.shift(parts, operands, "shift_left")

    def do_shr(self, parts, operands):
        return self.shift(parts, operands, "shift_right")

    def shift(self, parts, operands, name):
        by = self.source(operands[2], "u32")
        return self.put(operands[0], f"{name}({self.source(operands[1], parts[-1])}, {by})", parts[-1])

    def do_bfi(self, parts, operands):
        inserted, into = (self.source(operand, parts[-1]) for operand in operands[1:3])
        return self.put(operands[0], f"insert_bits({inserted}, {into}, {int(operands[3])}, {int(operands[4])})", parts[-1])

    def do_prmt(self, parts, operands):
        a, b = (self.source(operand, "b32") for operand in operands[1:3])
        selector = int(operands[3], 0)
        if parts != ["prmt", "b32"] or selector & 0x8888:
            raise PtxError(f"unknown PTX: {'.'.join(parts)} with {operands[3]}")
        return self.put(operands[0], f"permute_bytes({a}, {b}, {selector})", "b32")

    def do_selp(self, parts, operands):
        kind = parts[-1]
        a, b = (self.source(operand, kind) for operand in operands[1:3])
        return self.put(operands[0], f"where({self.source(operands[3], 'pred')}, {a}, {b})", kind)

    def do_setp(self, parts, operands):
        kind, name = parts[-1], parts[1]
        a, b = (self.source(operand, kind) for operand in operands[1:3])
        nan = f"(np.isnan({a}) | np.isnan({b}))"
        if name in ("num", "nan"):
            expression = nan if name == "nan" else f"~{nan}"
        elif kind[0] == "f" and name.endswith("u") and name[:-1] in COMPARISONS:
            expression = f"({a} {COMPARISONS[name[:-1]]} {b}) | {nan}"
        elif kind[0] == "f" and name == "ne":
            expression = f"({a} != {b}) & ~{nan}"
        else:
            expression = f"({a} {COMPARISONS[name]} {b})"
        return self.put(operands[0], expression, "pred")

    def do_mov(self, parts, operands):
        target, source = operands
        if target.startswith("{"):
            low, high = self.listed(target)
            whole = self.source(source, "b64")
            return [self.put(name, f"({whole} >> {self.constant(np.uint64(shift))}).astype(T_b32)", "b32")
                    for name, shift in ((low, 0), (high, 32)) if name != "_"]
        if source.startswith("{"):
            low, high = (self.source(name, "b32") for name in self.listed(source))
            shift = self.constant(np.uint64(32))
            return self.put(target, f"{low}.astype(T_b64) | {high}.astype(T_b64) << {shift}", "b64")
        expression = self.source(source, parts[-1])
        return self.put(target, expression if expression[0] in "Rt" else f"t.for_all({expression})", parts[-1])

    def do_cvta(self, parts, operands):
        return self.put(operands[0], self.source(operands[1], parts[-1]), parts[-1])

    def do_cvt(self, parts, operands):
        to, of, how = parts[-2], parts[-1], parts[1:-2]
        if to.endswith("x2"):
            high, low = (self.source(operand, "f32") for operand in operands[1:])
            number = "to_bf16" if to == "bf16x2" else "to_f16"
            return self.put(operands[0], f"pack({number}({high}), {number}({low}))", "b32")
        source = self.source(operands[1], of)
        if to in ("bf16", "f16"):
            return self.put(operands[0], f"to_{to}({source})", "b16")
        for mode, rounding in (("rzi", "np.trunc"), ("rni", "np.rint"), ("rpi", "np.ceil"), ("rmi", "np.floor")):
            source = f"{rounding}({source})" if mode in how else source
        if "sat" in how:
            return self.put(operands[0], f"saturated({source})", to)
        if of[0] == "f" and to[0] != "f":
            return self.put(operands[0], f"to_integer({source}, T_{to})", to)
        return self.put(operands[0], f"{source}.astype(T_{to})", to)

    # ---- memory

    def do_ld(self, parts, operands):
        space = parts[1] if parts[1] in ("param", "global", "shared", "local") else "generic"
        kind, count = parts[-1], next((int(part[1]) for part in parts if part in ("v2", "v4")), 1)
        if space == "param":
            name = operands[1].strip("[]")
            if name.partition("+")[0] in self.kernel.maps:
                raise PtxError(f"a kernel reads the bytes of the tensor map {name}")
            number = int(name.rpartition("_")[2])
            return self.put(operands[0], f"t.for_all(t.parameters[{number}])", kind)
        targets = self.listed(operands[0])
        lines = [f"x = t.load({space!r}, {self.address(operands[1])}, T_{kind}, {count}, m)"]
        return lines + [self.put(target, f"x[{i}]", kind) for i, target in enumerate(targets)]

    def do_st(self, parts, operands):
        space = parts[1] if parts[1] in ("global", "shared", "local") else "generic"
        numbers = ", ".join(f"t.for_all({self.source(name, parts[-1])})" for name in self.listed(operands[1]))
        return f"t.store({space!r}, {self.address(operands[0])}, T_{parts[-1]}, [{numbers}], m)"

    def do_atom(self, parts, operands):
        if parts[1:] == ["global", "inc", "u32"]:
            limit = f"t.for_all({self.source(operands[2], 'u32')})"
            return self.put(operands[0], f"t.count_global({self.address(operands[1])}, {limit}, m)", "u32")
        if parts[1:] != ["shared", "add", "u32"]:
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        number = f"t.for_all({self.source(operands[2], 'u32')})"
        return self.put(operands[0], f"t.add_shared({self.address(operands[1])}, {number}, m)", "u32")

    def do_cp(self, parts, operands):
        if parts[1:3] == ["async", "commit_group"]:
            return "t.commit_copies(m)"
        if parts[1:3] == ["async", "wait_group"]:
            return f"t.wait_for_copies({int(operands[0])}, m)"
        if parts[1:] == ["async", "mbarrier", "arrive", "noinc", "shared::cta", "b64"]:
            return f"t.barriers.arrive_after_copies({self.address(operands[0])}, m)"
        if parts[1:4] == ["async", "bulk", "tensor"]:
            return self.tensor_copy(parts, operands)
        if parts[1] != "async" or parts[3:] != ["shared", "global"]:
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        target, source, size = self.address(operands[0]), self.address(operands[1]), int(operands[2])
        used = f"t.for_all({self.source(operands[3], 'u32')})" if len(operands) > 3 else f"t.for_all(T_u32({size}))"
        return f"t.copy_async({target}, {source}, {size}, {used}, m)"

    def tensor_copy(self, parts, operands):
        hints = ["L2::cache_hint"] if len(operands) == 4 else []
        address, _, coordinates = operands[1].strip("[]").partition(",")
        coordinates = self.listed(coordinates.strip())
        known = [f"{len(coordinates)}d", "shared::cluster", "global", "tile", "mbarrier::complete_tx::bytes", *hints]
        if parts[4:] != known:
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        first = ", ".join(self.source(coordinate, "s32") for coordinate in coordinates)
        return f"t.tensor_copies.begin({self.address(operands[0])}, {self.address(address)}, [{first}], {self.address(operands[2])}, m)"

    def do_prefetch(self, parts, operands):
        if parts[1:] != ["tensormap"]:
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        return f"t.tensor_copies.prefetch({self.address(operands[0])}, m)"

    def do_membar(self, parts, _operands):
        assert parts[1:] == ["gl"], parts
        return "t.fence(m)"

    # ---- warps and blocks

    def do_shfl(self, parts, operands):
        target, _, valid = operands[0].partition("|")
        a, b, c, members = (self.source(operand, "b32") for operand in operands[1:])
        lines = [f"x = t.shuffle({parts[2]!r}, {a}, {b}, {c}, {members}, m)", self.put(target, "x[0]", "b32")]
        return lines + ([self.put(valid, "x[1]", "pred")] if valid else [])

    def do_vote(self, parts, operands):
        if parts[2] == "any":
            return self.put(operands[0], f"t.any_of_warp({self.source(operands[1], 'pred')}, {self.source(operands[2], 'b32')}, m)", "pred")
        assert parts[2] == "ballot", parts
        return self.put(operands[0], f"t.ballot({self.source(operands[1], 'pred')}, {self.source(operands[2], 'b32')}, m)", "b32")

    def do_bar(self, parts, operands):
        if parts[1] == "warp":
            return f"t.warp_barrier({self.source(operands[0], 'b32')}, m)"
        if parts[1] == "arrive":
            return f"t.barriers.arrive_at_named({self.source(operands[0], 'u32')}, {self.source(operands[1], 'u32')}, m)"
        if parts[1] == "wait":
            return f"t.barriers.leave_named({self.source(operands[0], 'u32')}, m)"
        if len(operands) != (1 if parts[1] == "sync" else 3) or operands[1 if parts[1] == "red" else 0] != "0":
            raise PtxError(f"unknown PTX: a barrier of some threads: {operands}")
        if parts[1] == "sync":
            return "t.block_barrier(m)"
        assert parts[2:] == ["popc", "u32"], parts
        return self.put(operands[0], f"t.count_in_block({self.source(operands[2], 'pred')}, m)", "u32")

    def do_mma(self, parts, operands):
        if parts[1:6] != ["sync", "aligned", "m16n8k16", "row", "col"] or parts[7] not in ("bf16", "f16"):
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        d, *sources = (self.listed(operand) for operand in operands)
        lists = [", ".join(f"t.for_all({self.source(name, kind)})" for name in names)
                 for names, kind in zip(sources, ("b32", "b32", "f32"))]
        lines = [f"x = t.mma({parts[7]!r}, " + ", ".join(f"[{text}]" for text in lists) + ")"]
        return lines + [self.put(name, f"x[{i}]", "f32") for i, name in enumerate(d)]

    def do_ldmatrix(self, parts, operands):
        if parts[1:5] != ["sync", "aligned", "m8n8", "x4"] or parts[-2:] != ["shared", "b16"]:
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        lines = [f"x = t.ldmatrix({self.address(operands[1])}, {'trans' in parts}, m)"]
        return lines + [self.put(name, f"x[{i}]", "b32") for i, name in enumerate(self.listed(operands[0]))]

    def do_griddepcontrol(self, parts, _operands):
        return "t.wait_for_previous_kernel(m)" if parts[1] == "wait" else []

    # ---- Hopper

    def do_mbarrier(self, parts, operands):
        what, unknown = parts[1], PtxError(f"unknown PTX: {'.'.join(parts)}")
        if parts[-2:] != ["shared::cta", "b64"]:
            raise unknown
        if what == "init":
            return f"t.barriers.begin({self.address(operands[0])}, {self.source(operands[1], 'u32')}, m)"
        if what == "arrive" and parts[2] == "shared::cta" and len(operands) == 2 and operands[0] == "_":
            return f"t.barriers.arrive({self.address(operands[1])}, m)"
        if parts[1:3] == ["arrive", "expect_tx"] and len(operands) == 3 and operands[0] == "_":
            return f"t.barriers.arrive({self.address(operands[1])}, m, {self.source(operands[2], 'u32')})"
        if parts[1:3] == ["try_wait", "parity"]:
            return self.put(operands[0], f"t.barriers.leave_phase({self.address(operands[1])}, m)", "pred")
        raise unknown

    def do_fence(self, parts, _operands):
        if parts[1:] == ["mbarrier_init", "release", "cluster"]:
            return "t.barriers.fence_initialized(m)"
        if parts[1:] not in (["proxy", "async", "shared::cta"], ["proxy", "async"]):
            raise PtxError(f"unknown PTX: {'.'.join(parts)}")
        return "t.barriers.fence(m)"

    def do_setmaxnreg(self, parts, operands):
        return f"t.barriers.set_registers({int(operands[0])}, {parts[1] == 'inc'}, m)"

    def do_wgmma(self, parts, operands):
        if parts[1] == "fence":
            return "t.products.begin(m)"
        if parts[1] == "commit_group":
            return "t.products.commit(m)"
        if parts[1] == "wait_group":
            return f"t.products.wait({int(operands[0])}, m)"
        unknown = PtxError(f"unknown PTX: {'.'.join(parts)}")
        shape = re.fullmatch(r"m64n(\d+)k16", parts[4])
        if parts[1:4] != ["mma_async", "sync", "aligned"] or not shape or parts[5] != "f32" or parts[6] != parts[7] or parts[6] not in ("bf16", "f16"):
            raise unknown
        d, in_registers = self.listed(operands[0]), operands[1].startswith("{")
        scales, transposed = operands[4:6], operands[6:]
        if scales != ["1", "1"] or len(transposed) != (1 if in_registers else 2) or len(d) != int(shape[1]) // 2:
            raise unknown
        a = str([self.register[name] for name in self.listed(operands[1])]) if in_registers else self.source(operands[1], "b64")
        adds = self.source(operands[3], "pred") if operands[3] in self.register else str(operands[3] != "0")
        transposed = [False] * in_registers + [flag == "1" for flag in transposed]
        return (f"t.products.multiply({parts[6]!r}, {[self.register[name] for name in d]}, {a}, {self.source(operands[2], 'b64')}, {adds}, "
                f"{transposed}, m)")
