"""Products with records of integer codes, and their embeddings: kernels/blocks.cu."""
from dataclasses import dataclass
from functools import partial

import numpy as np

from lab import FLAT, Case, div_ceil, grid_of_numbers
from ptx.numbers import F32, F64

from .products import LIMIT, Tile, operand, rounded

RECORD = 256
OFFSETS, NESTED = 1, 2
TILES = {"16": Tile(16, 32, 512, 6), "32": Tile(32, 32, 512, 5), "64": Tile(64, 64, 128, 3), "128": Tile(128, 128, 64, 2)}
THREADS = {"16": 128, "32": 128, "64": 128, "128": 256}


@dataclass
class Form:
    """The codes of a matrix, and its flags. Some of them are those of a GGUF type."""
    bits: int
    group: int
    flags: int

    @property
    def name(self):
        return f"codes{self.bits}_by{self.group}"

    @property
    def scales_at(self):
        return self.bits * RECORD // 8

    @property
    def bytes(self):
        groups, each = RECORD // self.group, 1 + (self.flags & OFFSETS)
        return div_ceil(self.scales_at + (4 + each * groups if self.flags & NESTED else 2 * each * groups), 16) * 16

    @property
    def shared_pitch(self):
        return div_ceil(self.bytes, 32) * 32 if self.bits == 8 else self.bytes | 16

    @property
    def zero(self):
        """The code of the number 0, as records have it."""
        return 32 if self.bits == 6 else 8 if self.bits == 4 and not self.flags & OFFSETS else 0


FORMS = [Form(4, 32, 0), Form(4, 32, OFFSETS), Form(4, 32, OFFSETS | NESTED), Form(4, 16, OFFSETS | NESTED), Form(5, 32, OFFSETS),
         Form(5, 32, OFFSETS | NESTED), Form(6, 16, NESTED), Form(8, 32, 0)]


def store_codes(form, record, codes):
    """Writes 256 codes in the order that the kernels read."""
    high_bits = form.bits - 4
    for k, code in enumerate(codes.tolist()):
        place, pair, second = k // 32 * 4 + k % 16 // 4, k % 32 // 16 * 2 + k % 4 // 2, k % 2
        if form.bits == 8:
            record[place * 8 + pair // 2 * 4 + pair % 2 + 2 * second] = code & 255
            continue
        low_bit, high_bit = 4 * pair + 16 * second, high_bits * (pair + 4 * second)
        record[place * 4 + low_bit // 8] |= (code & 15) << low_bit % 8
        if high_bits:
            record[RECORD // 2 + place * high_bits + high_bit // 8] |= code >> 4 << high_bit % 8


def store_scales(form, record, random):
    """Writes random scales. Returns the scale and the offset of each group."""
    groups, part = RECORD // form.group, record[form.scales_at:]
    if form.flags & NESTED:
        whole = random.uniform(0.5, 1, 2).astype(np.float16)
        of_groups = random.integers(-32, 32, (2, groups)).astype(np.int8)
        part[:4] = whole.view(np.uint8)
        part[4:4 + groups] = of_groups[0].view(np.uint8)
        if form.flags & OFFSETS:
            part[4 + groups:4 + 2 * groups] = of_groups[1].view(np.uint8)
        scales = whole.astype(F64)[:, None] * of_groups
    else:
        own = random.standard_normal((groups, 2)).astype(np.float16)
        stored = own if form.flags & OFFSETS else own[:, :1]
        part[:stored.nbytes] = np.frombuffer(stored.tobytes(), np.uint8)
        scales = own.T.astype(F64)
    return scales[0], scales[1] * (form.flags & OFFSETS)


def matrix(lab, form, outs, cols):
    """Returns the address of random records, and their numbers."""
    count = div_ceil(cols, RECORD)
    records, numbers = np.zeros((outs, count, form.bytes), np.uint8), np.zeros((outs, count * RECORD))
    low = -128 if form.bits == 8 else 0
    codes = lab.random.integers(low, low + (1 << form.bits), (outs, count, RECORD))
    for out in range(outs):
        for i in range(count):
            store_codes(form, records[out, i], codes[out, i])
            scales, offsets = (np.repeat(numbers_of, form.group) for numbers_of in store_scales(form, records[out, i], lab.random))
            numbers[out, i * RECORD:][:RECORD] = scales * (codes[out, i] - form.zero) + offsets
    return lab.put(records), numbers[:, :cols]


def multiply(lab, form, tile, x, w, bias, is_rounded=False):
    """Launches a product with a matrix of as many rows as there are biases. Returns the rows."""
    (rows, cols), outs, shape = x.shape, len(bias), TILES[tile]
    out, grid = lab.out(rows, outs), (div_ceil(outs, shape.outs), div_ceil(rows, shape.rows), 1)
    lab.launch(f"matmul_{form.name}_{tile}", grid, THREADS[tile], out, operand(lab, "bf16", x, is_rounded), w, lab.put(bias), 0, 0, 0, rows,
               outs, cols, outs, form.bytes, form.flags, is_rounded, shared=shape.shared(form.shared_pitch))
    return lab.get(out, (rows, outs), F32)


def product(form, tile, rows, outs, cols, lab):
    x = lab.normal(rows, cols)
    (w, numbers), bias = matrix(lab, form, outs, cols), lab.normal(outs)
    got = multiply(lab, form, tile, x, w, bias)
    lab.close(got, rounded("bf16", x) @ numbers.T + bias, LIMIT)
    if cols % 8 == 0:
        lab.equal(multiply(lab, form, tile, x, w, bias, True).view(np.uint32), got.view(np.uint32))


def same_bits(form, lab):
    """A row has the same bits, whatever the tile."""
    x, (w, _), bias = lab.normal(5, 600), matrix(lab, form, 20, 600), lab.normal(20)
    first, *others = (multiply(lab, form, tile, x, w, bias).view(np.uint32) for tile in TILES)
    for other in others:
        lab.equal(other, first)


def experts(form, tile, lab):
    outs, cols, shape, starts = 40, 256, TILES[tile], np.array([0, 2, 2, 9], np.uint32)
    x, matrices = lab.normal(9, cols), [matrix(lab, form, outs, cols) for _ in starts[1:]]
    out, grid = lab.out(9, outs), (div_ceil(outs, shape.outs), div_ceil(9, shape.rows), len(matrices))
    listed = lab.put(np.array([w for w, _ in matrices], np.uint64))
    lab.launch(f"matmul_{form.name}_{tile}", grid, THREADS[tile], out, lab.put(x), 0, 0, listed, 0, lab.put(starts), 9, outs, cols, outs,
               form.bytes, form.flags, False, shared=shape.shared(form.shared_pitch))
    wanted = np.concatenate([rounded("bf16", x[first:end]) @ numbers.T
                             for first, end, (_, numbers) in zip(starts, starts[1:], matrices)])
    lab.close(lab.get(out, wanted.shape, F32), wanted, LIMIT)


def embed(form, lab):
    cols, first = 300, 10
    table, numbers = matrix(lab, form, 5, cols)
    tokens = np.array([11, 9, 14, 15], np.uint32)
    out = lab.out(4, cols)
    lab.launch(f"embed_{form.name}", grid_of_numbers(4, cols), FLAT, out, table, lab.put(tokens), first, 5, cols, 0.5, form.bytes,
               form.flags)
    inside = (tokens >= first) & (tokens < first + 5)
    wanted = np.where(inside[:, None], numbers[np.where(inside, tokens - first, 0)] * 0.5, 0)
    lab.close(lab.get(out, wanted.shape, F32), wanted, LIMIT)


def cases():
    for form in FORMS:
        flags = ", offsets" * (form.flags & OFFSETS) + ", nested" * (form.flags >> 1)
        for tile in TILES:
            name = f"matmul_{form.name}_{tile}"
            quick = (tile == "16") == (form.bits != 8)
            yield Case(f"{name}{flags}, 7 x 37 x 300", [name], partial(product, form, tile, 7, 37, 300), quick)
            yield Case(f"{name}{flags}, experts", [name], partial(experts, form, tile))
            # More records than stages.
            yield Case(f"{name}{flags}, 3 x 9 x 2000", [name], partial(product, form, tile, 3, 9, 2000))
            rows = 140 if tile == "128" else 70
            yield Case(f"{name}{flags}, {rows} x {rows} x 256", [name], partial(product, form, tile, rows, rows, 256))
        yield Case(f"matmul_{form.name}{flags}, same bits in all tiles", [f"matmul_{form.name}_{tile}" for tile in TILES],
                   partial(same_bits, form), form.bits == 4 and form.group == 32 and not form.flags)
        yield Case(f"embed_{form.name}{flags}", [f"embed_{form.name}"], partial(embed, form), True)
