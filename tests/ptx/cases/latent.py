"""Attention over latents on tensor cores: kernels/attention_latent.cu."""
from functools import partial

from lab import Case

from .attention import PREFILL_QUERIES, Shape, arguments, decode_tiles, prefill_tiles, reference, sequences
from .tensor import limit, rounded_in

KEY_DIM, VALUE_DIM = 576, 512
DECODE_QUERIES, MERGE_THREADS = 64, 128


def shared_bytes(queries):
    """The bytes of LatentShared."""
    tokens, stages = queries // 2, 2 if queries == 64 else 3
    return ((queries + stages * tokens) * (KEY_DIM + 8) + queries * (tokens + 8)) * 2 + 7 * queries * 4


def attend(lab, shape, step, queries, tiles, tile_queries, partial_results, out, dtype):
    blocks = -(-tile_queries // queries)
    lab.launch(f"attention_latent_{shape.kind}_{queries}", (blocks * len(tiles), 1, 1), 4 * queries,
               *arguments(shape, step, out, dtype, lab.put(tiles), (blocks,)), partial_results, shared=shared_bytes(queries))


def prefill(shape, queries, dtypes, lab):
    step = sequences(lab, shape)
    wanted, tiles = reference(shape, step), prefill_tiles(shape, step)
    lab.results(wanted, limit(shape), lambda out, dtype: attend(lab, shape, step, queries, tiles, PREFILL_QUERIES, 0, out, dtype), dtypes)


def decode(shape, queries, dtypes, lab):
    step = sequences(lab, shape)
    wanted, (tiles, partials) = reference(shape, step), decode_tiles(shape, step, DECODE_QUERIES)
    tile_queries, to_merge = min(DECODE_QUERIES, shape.group), lab.put(tiles)

    def launch(out, dtype):
        partial_results = lab.out(max(partials, 1), tile_queries, VALUE_DIM + 2)
        attend(lab, shape, step, queries, tiles, tile_queries, partial_results, out, dtype)
        lab.launch("attention_latent_merge", (len(tiles), 1, 7), MERGE_THREADS, out, partial_results, to_merge, shape.heads, 1, dtype)

    lab.results(wanted, limit(shape), launch, dtypes)


def cases():
    for kind in ("bf16", "f16"):
        for queries in (64, 32):
            name = f"attention_latent_{kind}_{queries}"
            latents = partial(Shape, kind, KEY_DIM, kv_heads=1, value_dim=VALUE_DIM)
            # More steps than stages of shared memory, and tiles with rows of different lengths.
            shape = latents(heads=5, lengths=(100, 17), rows=(20, 17))
            yield Case(f"{name}, prompts", [name], partial(prefill, shape, queries, rounded_in(kind, "bf16")), queries == 64)
            shape = latents(heads=66, lengths=(300, 37, 1), rows=(1, 1, 1), parts=3, block_shift=3)
            yield Case(f"{name}, 3 parts", [name, "attention_latent_merge"], partial(decode, shape, queries, rounded_in(kind, "bf16")), kind == "f16")
            shape = latents(heads=16, lengths=(70, 9), block_shift=5)
            yield Case(f"{name}, 16 heads", [name, "attention_latent_merge"], partial(decode, shape, queries, []))
