"""What the cases of attention have in common: sequences in blocks, tiles, and the reference."""
import copy
import itertools
from dataclasses import dataclass, field

import numpy as np

from ptx.numbers import F32, F64

from .cache import BYTES, NO_SLOT, SCALED, Pool, Stored, stored

DECODE_QUERIES, PREFILL_QUERIES = 16, 128


@dataclass
class Shape:
    """Attention over sequences. The last `rows` tokens of each are those of the step."""
    kind: str
    dim: int
    heads: int = 4
    kv_heads: int = 2
    lengths: tuple = (70, 17)
    rows: tuple = (1, 1)
    window: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    block_shift: int = 4
    value_dim: int | None = None  # less than `dim`: the values are parts of the keys
    parts: int = 1

    @property
    def values(self):
        return self.value_dim or self.dim

    @property
    def scale(self):
        return F32(self.dim ** -0.5)

    @property
    def group(self):
        return self.heads // self.kv_heads


@dataclass
class Sequences:
    """The inputs of a step on the device, and the values of K and V as stored."""
    qkv: np.ndarray
    positions: np.ndarray
    keys: list = field(default_factory=list)    # [tokens, kv_heads, dim] of each sequence
    values: list = field(default_factory=list)
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None
    addresses: dict = field(default_factory=dict)
    tables: list = field(default_factory=list)  # index of the first entry of each sequence
    pool: Pool | None = None
    slots: np.ndarray | None = None             # [rows, TABLE_GROUPS]


TABLE_GROUPS, TABLE_GROUP = 2, 1


def sequences(lab, shape):
    """Stores random K and V in blocks in a random order, and puts the inputs on the device."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    rows = sum(shape.rows)
    positions = np.concatenate([np.arange(length - new, length) for length, new in zip(shape.lengths, shape.rows)])
    step = Sequences(lab.normal(rows, width), positions.astype(np.uint32))
    block_size, own = 1 << shape.block_shift, shape.value_dim is None
    counts = [-(-length // block_size) for length in shape.lengths]
    order = lab.random.permutation(sum(counts) + 2)[:sum(counts)]
    pool = Pool(shape.kind, sum(counts) + 2, shape.kv_heads, block_size, shape.dim, halves=2 if own else 1)
    tables = np.full((sum(counts), TABLE_GROUPS), NO_SLOT, np.uint32)
    tables[:, TABLE_GROUP] = order
    first, step.pool, step.slots = 0, pool, np.full((rows, TABLE_GROUPS), NO_SLOT, np.uint32)
    step.slots[:, TABLE_GROUP] = list(slots(shape, order, counts))
    for length, count in zip(shape.lengths, counts):
        step.tables.append(first * TABLE_GROUPS)
        halves = [write_half(lab, pool, shape, order[first:first + count], length, half) for half in range(2 if own else 1)]
        step.keys.append(halves[0])
        step.values.append(halves[-1][..., :shape.values])
        first += count
    if shape.alibi:
        step.slopes = (2.0 ** -np.arange(1, shape.heads + 1)).astype(F32)
    if shape.sinks:
        step.sinks = lab.normal(shape.heads)
    optional = {name: 0 if array is None else lab.put(array) for name, array in (("slopes", step.slopes), ("sinks", step.sinks))}
    step.addresses = {"qkv": lab.put(step.qkv), "kv": lab.put(pool.bytes), "positions": lab.put(step.positions), "tables": lab.put(tables),
                      **optional}
    return step


def slots(shape, order, counts):
    """The slots of the step's rows."""
    for length, rows, first in zip(shape.lengths, shape.rows, np.cumsum([0, *counts])):
        for token in range(length - rows, length):
            block = int(order[first + (token >> shape.block_shift)])
            yield (block << shape.block_shift) + token % (1 << shape.block_shift)


def write_half(lab, pool, shape, blocks, length, half):
    """Writes K or V of a sequence. Returns its values."""
    numbers, values = lab.normal(length, shape.kv_heads, shape.dim), np.zeros((length, shape.kv_heads, shape.dim))
    for token in range(length):
        slot = int(blocks[token >> shape.block_shift]) * pool.block_size + token % pool.block_size
        for head in range(shape.kv_heads):
            one = stored(shape.kind, numbers[token, head])
            pool.write(slot, half, head, one)
            values[token, head] = one.values
    return values


def reference(shape, step):
    """Returns attention in f64, as [rows, heads, dim of values]."""
    out, row = np.zeros((len(step.positions), shape.heads, shape.values)), 0
    for keys, values, rows in zip(step.keys, step.values, shape.rows):
        for _ in range(rows):
            last = int(step.positions[row])
            first = max(0, last + 1 - shape.window) if shape.window else 0
            for head in range(shape.heads):
                query = step.qkv[row, head * shape.dim:(head + 1) * shape.dim].astype(F64)
                scores = keys[first:last + 1, head // shape.group] @ query * F64(shape.scale)
                if shape.alibi:
                    scores -= F64(step.slopes[head]) * (last - np.arange(first, last + 1))
                if shape.soft_cap:
                    scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
                out[row, head] = softmax(scores, step.sinks[head] if shape.sinks else None) @ values[first:last + 1, head // shape.group]
            row += 1
    return out


def softmax(scores, sink):
    """Returns the weights. The sink has a weight, but no value."""
    most = max(scores.max(), -np.inf if sink is None else sink)
    weights = np.exp(scores - most)
    return weights / (weights.sum() + (0 if sink is None else np.exp(F64(sink) - most)))


def arguments(shape, step, out, dtype, tiles, dims=()):
    """The arguments that all attention kernels have. Plain kernels have `dims` in the middle."""
    at = step.addresses
    return (out, at["qkv"], at["kv"], tiles, at["positions"], at["tables"], at["slopes"], at["sinks"], step.qkv.shape[1], shape.heads,
            shape.kv_heads, *dims, shape.block_shift, TABLE_GROUPS, TABLE_GROUP, shape.window, shape.scale, shape.soft_cap, dtype)


def prefill_tiles(shape, step):
    """Tiles of 128 queries: [first row, rows, table, first query, and four numbers for decode]."""
    tiles, row = [], 0
    for rows, table in zip(shape.rows, step.tables):
        tiles += [[row, rows, table, query, 0, 0, 0, 0] for query in range(0, rows * shape.group, PREFILL_QUERIES)]
        row += rows
    return np.array(tiles + [[0] * 8], np.uint32)  # the last one is that of a padding row


def decode_tiles(shape, step, queries=DECODE_QUERIES):
    """Returns the tiles of parts, and the number of partial results."""
    tiles, partial = [], 0
    for row, (length, table) in enumerate(zip(shape.lengths, step.tables)):
        part_len = -(-length // shape.parts // 64) * 64 if shape.parts > 1 else length
        count = -(-length // part_len)
        for query in range(0, shape.group, queries):
            tiles += [[row, 1, table, query, part_len, part, count, partial] for part in range(count)]
            partial += count if count > 1 else 0
    return np.array(tiles + [[0] * 8], np.uint32), partial


def without_rows(shape, step):
    """Returns the bytes of the pool in which K and V of the step's rows are NaN."""
    pool = copy.deepcopy(step.pool)
    scale = F32(np.nan) if shape.kind in SCALED else None
    unwritten = Stored(np.full(shape.dim * BYTES[shape.kind], 0xFF, np.uint8), scale, None)
    for slot, half, head in itertools.product(step.slots[:, TABLE_GROUP].tolist(), range(2), range(shape.kv_heads)):
        pool.write(slot, half, head, unwritten)
    return pool.bytes


def token_bytes(kind, dim):
    """Bytes of a token of K or V in shared memory (`stage_bytes` of kernels.rs)."""
    return (dim * BYTES[kind] // 16 | 1) * 16 + (4 if kind in SCALED else 0)
