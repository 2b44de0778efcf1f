"""Kernels of kernels/elementwise.cu."""
from functools import partial
from math import erf

import numpy as np

from lab import FLAT, Case, div_ceil, grid_of_numbers
from ptx.numbers import F32, F64, from_bf16, to_bf16

LIMIT = 1e-6
RELU, SILU, GELU, GELU_TANH, CLAMPED = range(5)


def activated(act, x):
    x = x.astype(F64)
    if act == RELU:
        return np.maximum(x, 0)
    if act == SILU:
        return x / (1 + np.exp(-x))
    if act == GELU:
        return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def gated(act, gate, up, alpha, limit):
    if act != CLAMPED:
        return activated(act, gate) * up
    gate, up = np.minimum(gate, limit).astype(F64), np.clip(up, -limit, limit).astype(F64)
    return gate / (1 + np.exp(-alpha * gate)) * (up + 1)


def activate(lab):
    x = lab.normal(3, 301) * 3
    for act in range(4):
        out = lab.buffer(x)
        lab.launch("activate", (2, 1, 1), FLAT, out, x.size, act)
        lab.close(lab.get(out, x.shape, F32), activated(act, x), LIMIT)


def gate(lab):
    rows, width = 3, 301
    x = lab.normal(rows, 2, width) * 4
    for act in range(5):
        def launch(out, dtype):
            lab.launch("gate", grid_of_numbers(rows, width), FLAT, out, lab.put(x), width, act, 1.702, 7.0, dtype)

        lab.results(gated(act, x[:, 0], x[:, 1], 1.702, 7.0), LIMIT, launch)


def add(lab):
    x, y = lab.normal(1030), lab.normal(1030)
    out = lab.buffer(x)
    lab.launch("add", (2, 1, 1), FLAT, out, lab.put(y), x.size, 0.3)
    lab.close(lab.get(out, x.shape, F32), x + F64(F32(0.3)) * y, LIMIT)


def sum_ranks(lab):
    """The numbers are added in the order of ranks, which their bits show."""
    ranks, count, pitch = 4, 700, 704
    numbers = lab.normal(ranks, count) * np.array([[1e4], [1], [-1e4], [1e-3]], F32)
    for own in range(ranks):
        received = np.full((ranks, pitch), np.nan, F32)
        received[:, :count] = numbers
        received[own] = np.nan
        x = lab.buffer(numbers[own])
        lab.launch("sum_ranks", (2, 1, 1), FLAT, x, lab.put(received), count, pitch, ranks, own)
        wanted = ((numbers[0] + numbers[1]) + numbers[2]) + numbers[3]
        lab.equal(lab.get(x, (count,), F32), wanted)


def add_gated(lab):
    rows, width = 3, 301
    x, y, gates = lab.normal(rows, width), lab.normal(rows, width), lab.normal(rows)
    out = lab.buffer(x)
    lab.launch("add_gated", grid_of_numbers(rows, width), FLAT, out, lab.put(y), lab.put(gates), width)
    lab.close(lab.get(out, x.shape, F32), x + y / (1 + np.exp(-gates.astype(F64)))[:, None], LIMIT)


def scale_and_cap(lab):
    x = lab.normal(1030) * 30
    for cap, wanted in ((0.0, x * F64(0.25)), (5.0, 5 * np.tanh(x.astype(F64) * 0.25 / 5))):
        out = lab.buffer(x)
        lab.launch("scale_and_cap", (2, 1, 1), FLAT, out, x.size, 0.25, cap)
        lab.close(lab.get(out, x.shape, F32), wanted, LIMIT)


def copy_strips(lab):
    rows, count, dim, first, pitch, stride = 3, 4, 40, 5, 48, 210
    x = lab.normal(rows, stride)
    places = first + np.arange(count)[:, None] * pitch + np.arange(dim)
    out, grid = lab.out(count, rows, dim), (count * rows, 1, 1)
    lab.launch("split_strips", grid, FLAT, out, lab.put(x), rows, first, dim, pitch, stride)
    strips = lab.get(out, (count, rows, dim), F32)
    lab.equal(strips, x[:, places].transpose(1, 0, 2))
    joined = np.zeros_like(x)
    back = lab.buffer(joined)
    lab.launch("join_strips", grid, FLAT, back, lab.put(strips), rows, first, dim, pitch, stride)
    joined[:, places] = x[:, places]
    lab.equal(lab.get(back, x.shape, F32), joined)


def gather(lab):
    x, wanted, width = lab.normal(6, 301), np.array([5, 0, 0, 3], np.uint32), 301
    out = lab.out(4, width)
    lab.launch("gather", grid_of_numbers(4, width), FLAT, out, lab.put(x), lab.put(wanted), width)
    lab.equal(lab.get(out, (4, width), F32), x[wanted])


def stored(kind, numbers):
    """Returns numbers in a format, and their values."""
    if kind == "bf16":
        return to_bf16(numbers), from_bf16(to_bf16(numbers))
    of = numbers.astype(np.float16 if kind == "f16" else F32)
    return of, of.astype(F32)


def tables(kind, lab):
    """Rows of a table of which a part is on this device, and rows of positions."""
    count, first, cols, pitch = 7, 100, 301, 304
    table, values = stored(kind, lab.normal(count, pitch))
    tokens = np.array([103, 99, 106, 107, 100], np.uint32)
    out = lab.out(5, cols)
    lab.launch(f"embed_{kind}", grid_of_numbers(5, cols), FLAT, out, lab.put(table), lab.put(tokens), first, count, cols, pitch, 1.5)
    inside = (tokens >= first) & (tokens < first + count)
    wanted = np.where(inside[:, None], values[np.where(inside, tokens - first, 0), :cols] * F32(1.5), F32(0))
    lab.equal(lab.get(out, wanted.shape, F32), wanted)
    x, positions, offset = lab.normal(3, cols), np.array([0, 4, 2], np.uint32), 2
    sums = lab.buffer(x)
    lab.launch(f"add_positions_{kind}", grid_of_numbers(3, cols), FLAT, sums, lab.put(table), lab.put(positions), cols, pitch, offset)
    lab.equal(lab.get(sums, x.shape, F32), x + values[positions + offset, :cols])


def table_in_int8(lab):
    """A table whose rows are followed by their scales."""
    count, first, cols, pitch = 7, 100, 301, 304
    codes, scales = lab.random.integers(-127, 128, (count, pitch)).astype(np.int8), lab.random.random(count).astype(F32)
    table = np.frombuffer(codes.tobytes() + scales.tobytes(), np.uint8)
    tokens = np.array([103, 99, 106, 107, 100], np.uint32)
    out = lab.out(5, cols)
    lab.launch("embed_int8", grid_of_numbers(5, cols), FLAT, out, lab.put(table), lab.put(tokens), first, count, cols, pitch, 1.5)
    inside = (tokens >= first) & (tokens < first + count)
    values = (codes[:, :cols] * scales[:, None]).astype(F32) * F32(1.5)
    lab.equal(lab.get(out, (5, cols), F32), np.where(inside[:, None], values[np.where(inside, tokens - first, 0)], F32(0)))


def cases():
    for run in (activate, gate, add, sum_ranks, add_gated, scale_and_cap, gather):
        yield Case(run.__name__, [run.__name__], run, True)
    yield Case("split_strips and join_strips", ["split_strips", "join_strips"], copy_strips, True)
    for kind in ("f32", "f16", "bf16"):
        yield Case(f"tables in {kind}", [f"embed_{kind}", f"add_positions_{kind}"], partial(tables, kind), True)
    yield Case("table in int8", ["embed_int8"], table_in_int8, True)
