"""Prefill attention with products of a warpgroup: kernels/attention_hopper.cu."""
from functools import partial

from lab import Case
from ptx.tensor_map import TensorMap

from .attention import PREFILL_QUERIES, Shape, arguments, prefill_tiles, reference, sequences
from .tensor import limit, rounded_in

THREADS, CHUNK, STAGES, ALIGNMENT = 384, 128, 2, 1024
PANEL, MAX_BOX_TOKENS = 64, 32


def shared_bytes(dim):
    """`wgmma_shared` of kernels.rs: matrices in panels, barriers, and a number for each query."""
    return (PREFILL_QUERIES + 2 * STAGES * CHUNK) * dim * 2 + 4 * STAGES * 8 + PREFILL_QUERIES * 4 + ALIGNMENT


def kv_boxes(shape, step):
    """The pool as a tensor [block, K and V of each head, token, number], and the tokens of its boxes (tensor_map.rs)."""
    block_size = 1 << shape.block_shift
    token, tokens = 2 * shape.dim, min(block_size, MAX_BOX_TOKENS)
    block = 2 * shape.kv_heads * block_size * token
    dims = (shape.dim, block_size, 2 * shape.kv_heads, len(step.pool.bytes))
    return TensorMap("u16", step.addresses["kv"], dims, (token, block_size * token, block), (PANEL, tokens, 1, 1), swizzle=2 * PANEL), tokens


def prefill(shape, dtypes, copies_boxes, lab):
    step = sequences(lab, shape)
    map, tokens = kv_boxes(shape, step)
    boxes = (map, tokens if copies_boxes else 0)
    wanted, tiles = reference(shape, step), prefill_tiles(shape, step)
    grid, tiles = (len(tiles) * shape.kv_heads, 1, 1), lab.put(tiles)

    def launch(out, dtype):
        lab.launch(f"attention_wgmma_{shape.kind}_{shape.dim}", grid, THREADS, *arguments(shape, step, out, dtype, tiles), *boxes,
                   shared=shared_bytes(shape.dim))

    lab.results(wanted, limit(shape), launch, dtypes)


def shapes(kind, dim):
    # Each stage is filled twice or more. The second sequence has fewer queries than a warpgroup.
    yield "five chunks", Shape(kind, dim, heads=2, kv_heads=1, lengths=(600, 17), rows=(60, 17)), dim == 64
    yield "window, soft cap", Shape(kind, dim, heads=4, kv_heads=2, lengths=(300,), rows=(70,), window=140, soft_cap=5.0), False
    yield "ALiBi, sinks", Shape(kind, dim, heads=3, kv_heads=1, lengths=(170,), rows=(50,), alibi=True, sinks=True, block_shift=5), False
    yield "one chunk", Shape(kind, dim, lengths=(90, 128), rows=(20, 128)), False
    yield "five chunks, boxes", Shape(kind, dim, heads=2, kv_heads=1, lengths=(600, 17), rows=(60, 17)), dim == 64
    yield "window, boxes of 8", Shape(kind, dim, lengths=(420,), rows=(70,), window=290, block_shift=3), False
    yield "boxes of 32", Shape(kind, dim, heads=3, kv_heads=3, lengths=(300, 128), rows=(40, 128), block_shift=5), False
    yield "several boxes of a block", Shape(kind, dim, heads=2, lengths=(400,), rows=(30,), block_shift=8), False


def cases():
    for kind in ("bf16", "f16"):
        for dim in (64, 128):
            name = f"attention_wgmma_{kind}_{dim}"
            for what, shape, quick in shapes(kind, dim):
                yield Case(f"{name}, {what}", [name], partial(prefill, shape, rounded_in(what, "one chunk"), "boxes" in what), quick, hopper=True)
