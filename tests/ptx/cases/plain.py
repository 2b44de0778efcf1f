"""Attention for heads of any width: kernels/attention_plain.cu."""
from functools import partial

from lab import Case

from .attention import Shape, arguments, prefill_tiles, reference, sequences

THREADS = 128


def attend(shape, sharing, lab):
    step = sequences(lab, shape)
    wanted, tiles = reference(shape, step), prefill_tiles(shape, step)
    grid, tiles = (len(tiles), shape.kv_heads, sharing), lab.put(tiles)

    def launch(out, dtype):
        lab.launch(f"attention_plain_{shape.kind}", grid, THREADS, *arguments(shape, step, out, dtype, tiles, (shape.dim, shape.values)))

    lab.results(wanted, 1e-6, launch)


def cases():
    for kind in ("f32", "bf16", "f16", "int8", "fp8"):
        for name, shape in {
            "decode, sinks": Shape(kind, 72, lengths=(40, 7), sinks=True),
            "chunk, window, ALiBi": Shape(kind, 40, lengths=(45,), rows=(5,), window=33, alibi=True),
            "chunk, soft cap": Shape(kind, 40, heads=2, kv_heads=1, lengths=(9, 36), rows=(3, 2), soft_cap=2.0),
            "latents": Shape(kind, 96, heads=3, kv_heads=1, lengths=(37,), value_dim=64),
        }.items():
            kernel = [f"attention_plain_{kind}"]
            yield Case(f"{kernel[0]}, {name}", kernel, partial(attend, shape, 3), name == "decode, sinks")
