"""Tensor cores that a warpgroup uses asynchronously, with the descriptors and layouts of the PTX ISA."""
from dataclasses import dataclass

import numpy as np

from .parser import PtxError
from .races import WARP
from .tensor_core import decode

WARPS = 4       # of a warpgroup
STEP = 16       # numbers that are summed over
POISON = np.uint32(0x7FC0DEAD)
# Bytes of a row of the pattern by which chunks of 16 bytes are permuted, by the mode in a descriptor.
PATTERN = {0: 16, 1: 128, 2: 64, 3: 32}


@dataclass
class Matrices:
    """What the descriptors of warps have, as arrays [warps, 1, 1]."""
    start: np.ndarray
    leading: np.ndarray  # leading dimension byte offset
    stride: np.ndarray   # stride dimension byte offset
    row: int             # bytes of a row of the pattern

    @classmethod
    def of(cls, descriptors):
        field = lambda first, bits: (descriptors >> np.uint64(first) & np.uint64((1 << bits) - 1)).astype(np.int64)[:, None, None]
        modes = np.unique(descriptors >> np.uint64(62))
        if len(modes) > 1 or field(49, 3).any():
            raise PtxError("unknown PTX: a matrix descriptor with a base offset, or different modes")
        matrices = cls(16 * field(0, 14), 16 * field(16, 14), 16 * field(32, 14), PATTERN[int(modes[0])])
        if (matrices.start & matrices.pattern_rows()).any():
            raise PtxError("a matrix of a product begins inside of the pattern of its chunks, without a base offset")
        return matrices

    def pattern_rows(self):
        """The bits of an address that are the row of the pattern."""
        return 0 if self.row == 16 else (self.row - 16) << 3

    def addresses(self, count, transposed):
        """Returns the addresses of numbers as [warps, count, STEP] or, if rows have the numbers that are
        not summed over, as [warps, STEP, count]."""
        numbers, k = np.arange(count), np.arange(STEP)
        if not transposed:
            numbers, k = numbers[:, None], k[None]
            chunks = k // 8 * (self.leading if self.row == 16 else 16)
            found = self.start + numbers // 8 * self.stride + numbers % 8 * self.row + chunks + k % 8 * 2
        else:
            numbers, k, of_row = numbers[None], k[:, None], self.row // 2  # numbers of a row of the pattern
            of_rows, of_k = (self.stride, self.leading) if self.row == 16 else (self.leading, self.stride)
            found = self.start + numbers // of_row * of_rows + numbers % of_row * 2 + k // 8 * of_k + k % 8 * self.row
        return found ^ (found & self.pattern_rows()) >> 3


@dataclass
class Product:
    """A pending product of some warps."""
    d: list             # numbers of registers
    values: np.ndarray  # [registers, threads]
    active: np.ndarray  # threads
    groups: np.ndarray  # of each thread
    a: list             # registers that the product reads, and their bits
    reads: list         # warps, and the places of shared memory that each of them reads


class Products:
    """The pending products of a launch. Their results are poison until the wait for their group."""

    def __init__(self, launch, registers):
        """`registers` are those that products of the kernel use."""
        self.launch, self.used, self.pending = launch, registers, []
        self.groups = np.zeros(launch.count, np.int64)  # committed by each thread
        self.fenced = {}  # the bits of registers at the last fence of each thread

    def bits(self, register):
        return np.ascontiguousarray(self.launch.registers[register]).view(np.uint32)

    def begin(self, mask):
        """A fence: products may use registers as they are now."""
        for register in self.used:
            now, before = self.bits(register), self.fenced.get(register)
            if before is None:
                before = np.full(self.launch.count, ~POISON)
            self.fenced[register] = now.copy() if mask is None else np.where(mask, now, before)

    def commit(self, mask):
        self.groups[self.launch.lanes if mask is None else mask] += 1

    def of_warps(self, numbers, first):
        """Returns the operand of each warp, which all its threads have."""
        lanes = np.broadcast_to(numbers, (self.launch.count,)).reshape(-1, WARP)[first // WARP]
        if (lanes != lanes[:, :1]).any():
            raise PtxError("threads of a warp have different operands of a product")
        return np.ascontiguousarray(lanes[:, 0])

    def check_fenced(self, registers, active):
        """Products follow a fence after the last change of a register, except by products."""
        for register in registers:
            own = active.copy()
            for product in self.pending:
                if register in product.d:
                    own &= ~product.active
            if register not in self.fenced or (self.bits(register) != self.fenced[register])[own].any():
                raise PtxError("a product uses a register that was changed after the last wgmma.fence")

    def multiply(self, kind, d, a, b, adds, transposed, mask):
        """d = a * b, or d += a * b. `a` is a list of registers, or descriptors; `b` are descriptors.
        `transposed` says whether rows of a and of b have the numbers that are not summed over."""
        warps = self.launch.whole_warps(mask)
        first = warps * WARP  # threads
        active = np.ones(self.launch.count, bool) if mask is None else mask
        in_registers, reads = isinstance(a, list), []
        self.check_fenced(d + (a if in_registers else []), active)
        if in_registers:
            left, held = self.fragments(kind, a, warps), [(register, self.bits(register)) for register in a]
        else:
            left, held = self.matrix(kind, a, 64, transposed[0], warps, first, reads), []
            left = left.reshape(len(warps), WARPS, 16, STEP)[np.arange(len(warps)), warps % WARPS]
        right = self.matrix(kind, b, len(d) * 2, transposed[1], warps, first, reads)
        adds = self.of_warps(adds, first)[:, None, None]
        sums = np.matmul(left, right.transpose(0, 2, 1)) + np.where(adds, self.accumulators(d, warps), 0.0)
        values = np.zeros((len(d), self.launch.count // WARP, WARP), np.float32)
        values[:, warps] = registers_of(sums.astype(np.float32))
        values = values.reshape(len(d), -1)
        self.pending.append(Product(d, values, active.copy(), self.groups.copy(), held, reads))
        self.poison(self.pending[-1])

    def poison(self, product):
        registers = self.launch.registers
        for register in product.d:
            registers[register] = np.where(product.active, POISON, self.bits(register)).view(np.float32)

    def matrix(self, kind, descriptors, count, transposed, warps, first, reads):
        """Reads a matrix in shared memory. Returns [warps, count, STEP]."""
        addresses = Matrices.of(self.of_warps(descriptors, first)).addresses(count, transposed)
        numbers, places = self.launch.shared.begin_products(addresses.reshape(len(warps), -1), warps, first)
        reads.append((warps, places))
        numbers = decode(numbers.reshape(addresses.shape), kind)
        return numbers.transpose(0, 2, 1) if transposed else numbers

    def fragments(self, kind, registers, warps):
        """Returns the rows of a that warps have in registers, as [warps, 16, STEP]."""
        halves = np.stack([self.bits(register).view(np.uint16).reshape(-1, 8, 4, 2)[warps] for register in registers])
        numbers = halves.reshape(2, 2, len(warps), 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
        return decode(np.ascontiguousarray(numbers), kind).reshape(len(warps), 16, STEP)

    def accumulators(self, d, warps):
        """Returns the sums that warps add to, as [warps, 16, columns], also those that are pending."""
        found = [np.array(self.launch.registers[register]) for register in d]
        for product in self.pending:
            places = {register: i for i, register in enumerate(product.d)}
            if any(register in places for register in d) and product.d != d:
                raise PtxError("a product adds to registers of a pending product of another shape")
            for i, register in enumerate(d):
                if register in places:
                    found[i] = np.where(product.active, product.values[places[register]], found[i])
        numbers = np.stack(found).reshape(len(d), -1, WARP)[:, warps].astype(np.float64)
        blocks = numbers.reshape(len(d) // 4, 2, 2, len(warps), 8, 4)      # [columns / 8, rows / 8, column, warps, g, t]
        return blocks.transpose(3, 1, 4, 0, 5, 2).reshape(len(warps), 16, -1)

    def wait(self, count, mask):
        """Completes the groups of each active thread but its last `count`."""
        active = np.ones(self.launch.count, bool) if mask is None else mask
        left = []
        for product in self.pending:
            done = product.active & active & (product.groups < self.groups - count)
            if done.any():
                self.complete(product, done)
            if product.active.any():
                left.append(product)
        self.pending = left
        for product in left:
            self.poison(product)

    def complete(self, product, done):
        for register, bits in product.a:
            if (self.bits(register) != bits)[done].any():
                raise PtxError("a register was changed before the wait for the product that reads it")
        for register, values in zip(product.d, product.values):
            number = np.where(done, values, self.launch.registers[register])
            self.launch.registers[register] = number
            self.fenced[register] = np.where(done, number.view(np.uint32), self.fenced[register])
        product.active = product.active & ~done
        of_warps = done.reshape(-1, WARP).any(1)
        for i, (warps, places) in enumerate(product.reads):
            ended = of_warps[warps]
            self.launch.shared.end_products(places[ended], warps[ended])
            product.reads[i] = (warps[~ended], places[~ended])

    def check_complete(self):
        if self.pending:
            raise PtxError("a thread ended before the wait for its products")


def registers_of(sums):
    """Returns [registers, warps, lanes] of rows [warps, 16, columns], in the layout of mma."""
    warps, _, columns = sums.shape
    blocks = sums.reshape(warps, 2, 8, columns // 8, 4, 2)                 # [warps, rows / 8, g, columns / 8, t, column]
    return blocks.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, warps, WARP)
