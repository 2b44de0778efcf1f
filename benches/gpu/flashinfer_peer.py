#!/usr/bin/env python3
"""Attention of FlashInfer for the shapes in files of benches/gpu, as lines of JSON: `flashinfer_peer.py OURS...`.

FlashInfer compiles its kernels when they are first used, which needs nvcc and ninja.
"""

import json
import random
import sys

import torch
from peers import HEAD_DIM, copies, report, seconds, shapes
from peers import random as random_tensor

PART = "flashinfer"
BLOCK_SIZE = 16
WORKSPACE = 256 << 20


def main(*files):
    try:
        import flashinfer
    except ImportError as error:
        print(json.dumps({"part": PART, "case": "all", "skipped": f"flashinfer cannot be imported: {error}"}))
        return
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    for file in files:
        for shape in shapes(file, "paged attention"):
            if shape["block_size"] != shape["context"]:
                time_taken = decode(flashinfer, workspace, shape, lengths_of(shape), shape["block_size"])
                report("paged attention", 1e6 * time_taken, "us", shape=shape, peer="FlashInfer")
        for shape in shapes(file, "decode attention"):
            time_taken = decode(flashinfer, workspace, shape, lengths_of(shape), BLOCK_SIZE)
            report("decode attention", shape["bytes"] / time_taken, "B/s", shape=shape, peer="FlashInfer")
        for shape in shapes(file, "prefill attention"):
            if shape["rows"] == shape["tokens"]:
                report("prefill attention", prefill(flashinfer, shape), "FLOP/s", shape=shape, peer="FlashInfer")


def lengths_of(shape):
    return [shape["context"]] * (shape["batch"] - 1) + [shape.get("longest", shape["context"])]


def tables(lengths, block_size):
    """Returns the first entry of each sequence, the entries in random order, and the tokens in the last blocks."""
    counts = [-(-length // block_size) for length in lengths]
    first = [sum(counts[:i]) for i in range(len(counts) + 1)]
    entries = list(range(first[-1]))
    random.Random(1).shuffle(entries)
    return first, entries, [length - (count - 1) * block_size for length, count in zip(lengths, counts)]


def decode(flashinfer, workspace, shape, lengths, block_size):
    heads, kv_heads = shape["heads"], shape["kv_heads"]
    first, entries, last = (torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in tables(lengths, block_size))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=heads >= 4 * kv_heads)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(first, entries, last, heads, kv_heads, HEAD_DIM, block_size, **types)
    query = random_tensor(len(lengths), heads, HEAD_DIM)
    caches = copies(4 * sum(lengths) * kv_heads * HEAD_DIM, lambda: random_tensor(len(entries), 2, block_size, kv_heads, HEAD_DIM))
    return seconds(lambda call: wrapper.run(query, caches[call % len(caches)]))


def prefill(flashinfer, shape):
    """Returns operations per second, without those that the causal mask removes."""
    tokens, heads, kv_heads = shape["tokens"], shape["heads"], shape["kv_heads"]
    query, key, value = (random_tensor(tokens, count, HEAD_DIM) for count in (heads, kv_heads, kv_heads))
    time_taken = seconds(lambda _: flashinfer.single_prefill_with_kv_cache(query, key, value, causal=True))
    return 4 * heads * HEAD_DIM * tokens * (tokens + 1) / 2 / time_taken


if __name__ == "__main__":
    main(*sys.argv[1:])
