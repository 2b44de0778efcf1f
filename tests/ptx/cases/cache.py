"""Rotary positions, the KV cache and moves of blocks: kernels/cache.cu."""
from dataclasses import dataclass
from functools import partial

import numpy as np

from lab import FLAT, WARP, Case, Mismatch, div_ceil, row_threads
from ptx.numbers import F32, F64, from_bf16, from_e4m3, to_bf16, to_e4m3, to_f16

LIMIT = 1e-6
HALVES, NEIGHBOURS = range(2)
STORING_WARPS = 4
NO_SLOT = 0xFFFFFFFF
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "int8": 1, "fp8": 1}
# The largest multiple of the scale.
SCALED = {"int8": F32(127), "fp8": F32(448)}


@dataclass
class Stored:
    """K or V of one token and head: the bytes of its numbers, and its scale if the type has one."""
    data: np.ndarray
    scale: F32 | None
    values: np.ndarray


def stored(kind, numbers):
    """Stores numbers as the kernels do."""
    numbers = np.asarray(numbers, F32)
    if kind in SCALED:
        scale = np.abs(numbers).max() / SCALED[kind]
        multiples = numbers / (scale if scale else F32(1))
        codes = np.clip(np.rint(multiples), -127, 127).astype(np.int8) if kind == "int8" else to_e4m3(multiples)
        return Stored(codes.view(np.uint8), scale, (codes if kind == "int8" else from_e4m3(codes)).astype(F64) * scale)
    if kind == "f32":
        return Stored(numbers.view(np.uint8), None, numbers.astype(F64))
    bits = to_bf16(numbers) if kind == "bf16" else to_f16(np.clip(numbers, -65504, 65504))
    values = from_bf16(bits) if kind == "bf16" else bits.view(np.float16)
    return Stored(bits.view(np.uint8), None, values.astype(F64))


class Pool:
    """Blocks of K and V of one layer, as bytes: [block][K, V][kv_head], of each the numbers of all tokens
    and then the scales of all tokens. With `halves` 1, there are only keys."""

    def __init__(self, kind, blocks, kv_heads, block_size, dim, halves=2):
        self.kind, self.block_size, self.token_bytes = kind, block_size, dim * BYTES[kind]
        self.head_bytes = block_size * (self.token_bytes + (4 if kind in SCALED else 0))
        self.bytes = np.full((blocks, halves, kv_heads, self.head_bytes), 0xFF, np.uint8)

    def write(self, slot, half, head, token):
        of_head, place = self.bytes[slot // self.block_size, half, head], slot % self.block_size
        of_head[place * self.token_bytes:][:self.token_bytes] = token.data
        if token.scale is not None:
            of_head[self.block_size * self.token_bytes:].view(F32)[place] = token.scale


def rotated(heads, angles, pairs):
    """Rotates the first numbers of heads [..., dim] by [cosines, sines]."""
    count, out = angles.shape[-1] // 2, heads.astype(F64)
    first = np.arange(count) * (1 if pairs == HALVES else 2)
    second = first + (count if pairs == HALVES else 1)
    cosines, sines = angles[..., :count].astype(F64), angles[..., count:].astype(F64)
    a, b = out[..., first], out[..., second]
    out[..., first], out[..., second] = a * cosines - b * sines, b * cosines + a * sines
    return out


def angles(lab):
    """Large positions need the reduction in local memory."""
    positions, count = np.array([0, 1, 77, 131071, 1000000], np.uint32), 40
    frequencies = (10000.0 ** (-np.arange(count) / count)).astype(F32)
    out = lab.out(len(positions), 2 * count)
    lab.launch("angles", (len(positions), 1, 1), row_threads(count), out, lab.put(positions), lab.put(frequencies), count, 1.5)
    turns = (positions.astype(F32)[:, None] * frequencies).astype(F64)
    wanted = 1.5 * np.concatenate([np.cos(turns), np.sin(turns)], 1)
    lab.close(lab.get(out, wanted.shape, F32), wanted, LIMIT)


def rope(lab):
    rows, heads, dim, first, stride, turned = 3, 4, 80, 8, 344, 48
    x = lab.normal(rows, stride)
    by = lab.random.uniform(-1, 1, (rows, turned)).astype(F32)
    for pairs in (HALVES, NEIGHBOURS):
        out = lab.buffer(x)
        lab.launch("rope", (rows, heads, 1), WARP, out, lab.put(by), first, dim, stride, turned, pairs)
        wanted = x.astype(F64)
        of_heads = x[:, first:first + heads * dim].reshape(rows, heads, dim)
        wanted[:, first:first + heads * dim] = rotated(of_heads, by[:, None], pairs).reshape(rows, -1)
        lab.close(lab.get(out, x.shape, F32), wanted, LIMIT)


def store_kv(kind, with_angles, lab):
    rows, heads, kv_heads, dim, block_size, groups, group = 5, 4, 2, 72, 16, 2, 1
    qkv, by = lab.normal(rows, heads + 2 * kv_heads, dim), lab.random.uniform(-1, 1, (rows, 48)).astype(F32)
    qkv[3, heads] = 0  # a key whose scale is 0
    slots = np.full((rows, groups), 1, np.uint32)
    slots[:, group] = 3, 17, NO_SLOT, 40, 63
    pool = Pool(kind, 4, kv_heads, block_size, dim)
    kv, out = lab.buffer(pool.bytes), lab.buffer(qkv)
    grid = rows, div_ceil(heads + 2 * kv_heads, STORING_WARPS), 1
    lab.launch(f"store_kv_{kind}", grid, STORING_WARPS * WARP, kv, out, lab.put(by) if with_angles else 0, lab.put(slots), heads,
               kv_heads, 2, dim, 48 if with_angles else 0, NEIGHBOURS, 4, groups, group)
    got = lab.get(out, qkv.shape, F32)
    wanted = qkv.astype(F64)
    if with_angles:
        wanted[:, :heads + kv_heads] = rotated(qkv[:, :heads + kv_heads], by[:, None], NEIGHBOURS)
    lab.close(got, wanted, LIMIT)
    for row, slot in enumerate(slots[:, group].tolist()):
        for number in range(2 * kv_heads if slot != NO_SLOT else 0):
            pool.write(slot, number // kv_heads, number % kv_heads, stored(kind, got[row, heads + number]))
    lab.equal(lab.get(kv, pool.bytes.shape, np.uint8), pool.bytes)


def store_latents(kind, lab):
    """Latents have no queries beside them, and values are parts of keys."""
    rows, dim = 3, 96
    latents, slots = lab.normal(rows, 1, dim), np.array([5, 0, 9], np.uint32)
    pool = Pool(kind, 3, 1, 4, dim, halves=1)
    kv, out = lab.buffer(pool.bytes), lab.buffer(latents)
    lab.launch(f"store_kv_{kind}", (rows, 1, 1), STORING_WARPS * WARP, kv, out, 0, lab.put(slots), 0, 1, 1, dim, 0, 0, 2, 1, 0)
    for row, slot in enumerate(slots.tolist()):
        pool.write(slot, 0, 0, stored(kind, latents[row, 0]))
    lab.equal(lab.get(kv, pool.bytes.shape, np.uint8), pool.bytes)


def move_blocks(lab):
    """Moves of three levels between tiers. The second has sizes that are no multiples of 16."""
    sizes, blocks = [2048, 1036, 48], 6
    moves = np.array([[4, 0], [1, 5], [2, 2]], np.uint32)
    pitch = [size + 32 for size in sizes]
    contents = [lab.random.integers(0, 256, (blocks, size), np.uint8) for size in pitch]
    targets = [np.full((blocks, size), 7, np.uint8) for size in sizes]
    sources, buffers = [lab.put(data) for data in contents], [lab.buffer(data) for data in targets]
    lists = [lab.put(np.array(numbers, np.uint64)) for numbers in (buffers, sizes, sources, pitch, sizes)]
    lab.launch("move_blocks", (len(moves), len(sizes), 1), FLAT, *lists, lab.put(moves))
    for of, target, buffer, size in zip(contents, targets, buffers, sizes):
        for source, to in moves:
            target[to] = of[source, :size]
        got = lab.get(buffer, target.shape, np.uint8)
        if (got != target).any():
            raise Mismatch(f"a level of {size} bytes has {int((got != target).sum())} wrong bytes")


def cases():
    yield Case("angles", ["angles"], angles, True)
    yield Case("rope", ["rope"], rope, True)
    for kind in BYTES:
        kernel = [f"store_kv_{kind}"]
        for with_angles in (True, False):
            yield Case(f"store_kv_{kind}{'' if with_angles else ', no angles'}", kernel, partial(store_kv, kind, with_angles), with_angles)
        yield Case(f"store_kv_{kind}, latents", kernel, partial(store_latents, kind))
    yield Case("move_blocks", ["move_blocks"], move_blocks, True)
