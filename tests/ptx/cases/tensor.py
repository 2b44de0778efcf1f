"""Attention on tensor cores: kernels/attention.cu."""
from functools import partial

from lab import DTYPE_BF16, DTYPE_F16, WARP, Case

from .attention import Shape, arguments, decode_tiles, prefill_tiles, reference, sequences, token_bytes

KINDS = ("bf16", "f16", "int8", "fp8")
DIMS = (64, 80, 96, 112, 128, 256)
PREFILL_THREADS, MERGE_THREADS = 128, 128


def limit(shape):
    """Queries, weights and values are rounded to f16 with 11 bits, or to bf16 with 8."""
    return 5e-4 if shape.kind == "f16" else 4e-3


def tokens_at_once(dim):
    return 64 if dim <= 128 else 32


def stage_bytes(shape):
    return 2 * tokens_at_once(shape.dim) * token_bytes(shape.kind, shape.dim)


def rounded_in(what, case):
    """Returns the types, other than f32, in which a case writes results. One case of each kernel does."""
    return [DTYPE_F16, DTYPE_BF16] if what == case else []


def prefill(shape, dtypes, lab):
    step = sequences(lab, shape)
    wanted, tiles = reference(shape, step), prefill_tiles(shape, step)
    grid, tiles = (2 * len(tiles), shape.kv_heads, 1), lab.put(tiles)

    def launch(out, dtype):
        lab.launch(f"attention_prefill_{shape.kind}_{shape.dim}", grid, PREFILL_THREADS, *arguments(shape, step, out, dtype, tiles),
                   shared=2 * stage_bytes(shape))

    lab.results(wanted, limit(shape), launch, dtypes)


def decode(shape, dtypes, lab):
    step = sequences(lab, shape)
    wanted, (whole, parts, partials) = reference(shape, step), decode_tiles(shape, step)
    queries, stage, of_parts, of_rows = min(16, shape.group), stage_bytes(shape), lab.put(parts), lab.put(whole)
    grid, threads = (len(parts), shape.kv_heads, 1), tokens_at_once(shape.dim) // 16 * WARP

    def launch(out, dtype):
        partial_results = lab.out(max(partials, 1), shape.kv_heads, queries, shape.dim + 2)
        lab.launch(f"attention_decode_{shape.kind}_{shape.dim}", grid, threads, *arguments(shape, step, out, dtype, of_parts),
                   partial_results, shared=72 * 1024 // stage * stage)
        lab.launch("attention_merge", (len(whole), shape.kv_heads, queries), MERGE_THREADS, out, partial_results, of_rows,
                   step.addresses["sinks"], shape.heads, shape.kv_heads, shape.dim, dtype)

    lab.results(wanted, limit(shape), launch, dtypes)


def decode_shapes(kind, dim):
    yield "3 parts", Shape(kind, dim, lengths=(300, 37, 1), rows=(1, 1, 1), parts=3), dim in (64, 256)
    # More chunks than stages of shared memory.
    yield "340 tokens", Shape(kind, dim, heads=2, kv_heads=1, lengths=(340,), rows=(1,)), False
    yield "20 heads, window", Shape(kind, dim, heads=20, kv_heads=1, lengths=(90,), rows=(1,), window=50), False
    yield "ALiBi, sinks", Shape(kind, dim, lengths=(70, 9), alibi=True, sinks=True, parts=2, block_shift=3), False
    yield "soft cap", Shape(kind, dim, heads=3, kv_heads=3, lengths=(65,), rows=(1,), soft_cap=3.0), False


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
                yield Case(f"{name}, {what}", [name, "attention_merge"], partial(decode, shape, rounded_in(what, "3 parts")), quick)
            name = f"attention_prefill_{kind}_{dim}"
            for what, shape, quick in prefill_shapes(kind, dim):
                yield Case(f"{name}, {what}", [name], partial(prefill, shape, rounded_in(what, "ALiBi, sinks")), quick)
