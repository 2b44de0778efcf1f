"""Attention on tensor cores: kernels/attention.cu."""
from dataclasses import replace
from functools import partial

import numpy as np

from lab import DTYPE_BF16, DTYPE_F16, DTYPE_F32, WARP, Case, Mismatch, div_ceil
from ptx.numbers import F32

from .attention import (DECODE_QUERIES, TABLE_GROUP, TABLE_GROUPS, Shape, arguments, decode_tiles, prefill_tiles, reference, sequences,
                        token_bytes, without_rows)
from .cache import HALVES, NEIGHBOURS, SCALED, STORING_WARPS

KINDS = ("bf16", "f16", "int8", "fp8")
DIMS = (64, 80, 96, 112, 128, 256)
PREFILL_THREADS = 128


def limit(shape):
    """Queries, weights and values are rounded to f16 with 11 bits, or to bf16 with 8."""
    return 5e-4 if shape.kind == "f16" else 4e-3


def tokens_at_once(dim):
    return 64 if dim <= 128 else 32


def stage_bytes(shape):
    return 2 * tokens_at_once(shape.dim) * token_bytes(shape.kind, shape.dim)


def prefill_shared(shape):
    """Bytes of shared memory: two stages; in 8-bit types one stage, and its tokens in bf16, both with scales."""
    return 2 * tokens_at_once(shape.dim) * (3 * shape.dim + 8) if shape.kind in SCALED else 2 * stage_bytes(shape)


def rounded_in(what, case):
    """Returns the types, other than f32, in which a case writes results. One case of each kernel does."""
    return [DTYPE_F16, DTYPE_BF16] if what == case else []


def prefill(shape, dtypes, lab):
    step = sequences(lab, shape)
    wanted, tiles = reference(shape, step), prefill_tiles(shape, step)
    grid, tiles = (2 * len(tiles), shape.kv_heads, 1), lab.put(tiles)

    def launch(out, dtype):
        lab.launch(f"attention_prefill_{shape.kind}_{shape.dim}", grid, PREFILL_THREADS, *arguments(shape, step, out, dtype, tiles),
                   shared=prefill_shared(shape))

    lab.results(wanted, limit(shape), launch, dtypes)


# The last arguments of decode: angles, slots, rotated dimensions and pairs. Here, the rows are stored.
STORED = 0, 0, 0, 0


def launch_decode(lab, shape, step, out, dtype, new_tokens=STORED):
    """Launches decode. Afterwards, its counters are 0 again."""
    tiles, partials = decode_tiles(shape, step)
    counters = np.zeros(max(partials, 1) * shape.kv_heads, np.uint32)
    ended, results = lab.buffer(counters), lab.out(max(partials, 1), shape.kv_heads, min(DECODE_QUERIES, shape.group), shape.dim + 4)
    stage, threads = stage_bytes(shape), tokens_at_once(shape.dim) // 16 * WARP
    lab.launch(f"attention_decode_{shape.kind}_{shape.dim}", (len(tiles), shape.kv_heads, 1), threads,
               *arguments(shape, step, out, dtype, lab.put(tiles)), *new_tokens, ended, results, shared=72 * 1024 // stage * stage)
    lab.equal(lab.get(ended, counters.shape, np.uint32), counters)


def decode(shape, dtypes, lab):
    step = sequences(lab, shape)
    lab.results(reference(shape, step), limit(shape), lambda out, dtype: launch_decode(lab, shape, step, out, dtype), dtypes)


def store_and_decode(shape, rotated, pairs, lab):
    """A kernel that rotates and stores its rows has the bits of two kernels."""
    step = sequences(lab, shape)
    before, rows = without_rows(shape, step), len(step.positions)
    angles, slots = lab.put(lab.random.uniform(-1, 1, (rows, rotated)).astype(F32)), lab.put(step.slots)
    outs, pools = [], []
    for at_once in (False, True):
        kv, qkv, out = lab.buffer(before), (lab.put if at_once else lab.buffer)(step.qkv), lab.out(rows, shape.heads, shape.dim)
        of_case = replace(step, addresses={**step.addresses, "kv": kv, "qkv": qkv})
        if not at_once:
            heads = shape.heads + 2 * shape.kv_heads
            lab.launch(f"store_kv_{shape.kind}", (rows, div_ceil(heads, STORING_WARPS), 1), STORING_WARPS * WARP, kv, qkv, angles, slots,
                       shape.heads, shape.kv_heads, 2, shape.dim, rotated, pairs, shape.block_shift, TABLE_GROUPS, TABLE_GROUP)
        launch_decode(lab, shape, of_case, out, DTYPE_F32, (angles, slots, rotated, pairs) if at_once else STORED)
        outs.append(lab.get(out, (rows, shape.heads, shape.dim), F32))
        pools.append(lab.get(kv, before.shape, np.uint8))
    if not np.isfinite(outs[0]).all():
        raise Mismatch("a result is not finite")
    lab.equal(outs[1].view(np.uint32), outs[0].view(np.uint32))
    lab.equal(pools[1], pools[0])
    if (pools[0] == before).all():
        raise Mismatch("no row was stored")


def decode_shapes(kind, dim):
    yield "3 parts", Shape(kind, dim, lengths=(300, 37, 1), rows=(1, 1, 1), parts=3), dim in (64, 256)
    # More chunks than stages of shared memory.
    yield "340 tokens", Shape(kind, dim, heads=2, kv_heads=1, lengths=(340,), rows=(1,)), False
    yield "20 heads, window", Shape(kind, dim, heads=20, kv_heads=1, lengths=(90,), rows=(1,), window=50), False
    yield "ALiBi, sinks", Shape(kind, dim, lengths=(70, 9), alibi=True, sinks=True, parts=2, block_shift=3), False
    yield "soft cap", Shape(kind, dim, heads=3, kv_heads=3, lengths=(65,), rows=(1,), soft_cap=3.0), False


def storing_shapes(kind, dim):
    quick = (kind, dim) in (("bf16", 64), ("int8", 256))
    # Two rows are the first token of 16 that are processed together.
    yield "stores rows, 3 parts", Shape(kind, dim, lengths=(300, 65, 1), rows=(1, 1, 1), parts=3), dim, HALVES, quick
    yield "stores rows, 20 heads", Shape(kind, dim, heads=20, kv_heads=1, lengths=(90, 16), window=17), 48, NEIGHBOURS, False
    yield "stores rows, no angles", Shape(kind, dim, heads=3, kv_heads=3, lengths=(129,), rows=(1,), parts=2, window=1), 0, HALVES, False


def prefill_shapes(kind, dim):
    quick = dim == 128 or (kind, dim) == ("bf16", 256)
    # More chunks than stages of shared memory.
    yield "four chunks", Shape(kind, dim, heads=2, kv_heads=1, lengths=(200, 17), rows=(33, 17)), quick
    yield "window, soft cap", Shape(kind, dim, heads=2, kv_heads=1, lengths=(150,), rows=(70,), window=33, soft_cap=5.0), False
    yield "ALiBi, sinks", Shape(kind, dim, heads=3, kv_heads=1, lengths=(70,), rows=(9,), alibi=True, sinks=True, block_shift=5), False


def cases():
    for kind in KINDS:
        for dim in DIMS:
            name = f"attention_decode_{kind}_{dim}"
            for what, shape, quick in decode_shapes(kind, dim):
                yield Case(f"{name}, {what}", [name], partial(decode, shape, rounded_in(what, "3 parts")), quick)
            for what, shape, rotated, pairs, quick in storing_shapes(kind, dim):
                yield Case(f"{name}, {what}", [name, f"store_kv_{kind}"], partial(store_and_decode, shape, rotated, pairs), quick)
            name = f"attention_prefill_{kind}_{dim}"
            for what, shape, quick in prefill_shapes(kind, dim):
                yield Case(f"{name}, {what}", [name], partial(prefill, shape, rounded_in(what, "ALiBi, sinks")), quick)
