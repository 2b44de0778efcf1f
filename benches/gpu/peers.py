#!/usr/bin/env python3
"""Limits of the device and results of other engines, as lines of JSON in the format of main.rs.

    peers.py ceilings ARGUMENTS     rates of a copy and a product; also writes them as arguments for main.rs
    peers.py paged OURS             torch's scaled_dot_product_attention of one query, with contiguous K and V
    peers.py attention OURS         torch's scaled_dot_product_attention, for the shapes in the file OURS
    peers.py products OURS          torch's matrix products, for the shapes in the file OURS
    peers.py weights DIR [LAYERS]   writes a LLaMA-3-8B with random weights
    peers.py generate DIR OURS      prefill, steps and `generate` of transformers with the same shape
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROUNDS, ROUND_SECONDS, MAX_CALLS = 7, 0.03, 500
BEYOND_CACHES = 256 << 20  # bytes; more than the caches of a device hold
COPIED = 4 << 30
SQUARE = 8192
HEAD_DIM = 128
STD = 0.02
NEW_TOKENS = 16
BATCHES = [1, 8, 64]  # more would take too long in transformers
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


def main(what, *arguments):
    torch.manual_seed(0)
    {"ceilings": ceilings, "paged": paged, "attention": attention, "products": products, "weights": weights, "generate": generate}[what](*arguments)


def report(part, value, unit, **more):
    print(json.dumps({"part": part, "value": value, "unit": unit, **more}), flush=True)


def random(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, STD)


def shapes(ours, part):
    """Returns the shapes of one part in the file OURS, each once."""
    lines = (json.loads(line) for line in Path(ours).read_text().splitlines() if line.startswith("{"))
    found = [line["shape"] for line in lines if line["part"] == part and "shape" in line]
    return [shape for i, shape in enumerate(found) if shape not in found[:i]]


def elapsed(work):
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds(queue):
    """Like timing.rs: `queue` gets the index of the call. Returns the median of rounds of many calls."""

    def one_round(calls):
        return elapsed(lambda: [queue(call) for call in range(calls)]) / calls

    one_round(2)
    calls = int(min(max(ROUND_SECONDS / one_round(2), 2), MAX_CALLS))
    return statistics.median(one_round(calls) for _ in range(ROUNDS))


def ceilings(arguments):
    source = torch.randint(-128, 127, (COPIED,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED / seconds(lambda _: target.copy_(source))
    a, b = random(SQUARE, SQUARE), random(SQUARE, SQUARE)
    flops = 2 * SQUARE**3 / seconds(lambda _: torch.mm(a, b))
    report("ceilings", bandwidth, "B/s", case="copy, bytes read and written")
    report("ceilings", flops, "FLOP/s", case=f"product of {SQUARE}x{SQUARE} in bf16")
    Path(arguments).write_text(f"--bandwidth={bandwidth:.6g} --flops={flops:.6g}\n")


def copies(size, make):
    """Returns copies of something of `size` bytes that the caches of the device do not hold together, at most 8."""
    return [make() for _ in range(min(-(-BEYOND_CACHES // size), 8))]


def paged(ours):
    for shape in shapes(ours, "paged attention"):
        batch, heads, kv_heads, tokens = (shape[name] for name in ("batch", "heads", "kv_heads", "context"))
        if shape["block_size"] != tokens:
            continue
        query = random(batch, heads, 1, HEAD_DIM)
        kv = lambda: [random(batch, kv_heads, tokens, HEAD_DIM) for _ in range(2)]
        caches = copies(4 * batch * kv_heads * tokens * HEAD_DIM, kv)
        attend = lambda call: F.scaled_dot_product_attention(query, *caches[call % len(caches)], enable_gqa=True)
        report("paged attention", 1e6 * seconds(attend), "us", shape=shape, peer="torch")


def attention(ours):
    """Measures whole prompts only: torch has no equally fast mask for the last chunk of a prompt."""
    for shape in shapes(ours, "prefill attention"):
        tokens, heads, dim = shape["tokens"], shape["heads"], shape["head_dim"]
        if shape["rows"] != tokens:
            continue
        query = random(1, heads, tokens, dim)
        key, value = (random(1, shape["kv_heads"], tokens, dim) for _ in range(2))
        time_taken = seconds(lambda _: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
        flops = 4 * heads * dim * tokens * (tokens + 1) / 2
        report("prefill attention", flops / time_taken, "FLOP/s", shape=shape, peer="torch")


def products(ours):
    for shape in shapes(ours, "products"):
        rows, outs, cols = shape["rows"], shape["outs"], shape["cols"]
        matrices = copies(2 * outs * cols, lambda: random(outs, cols))
        x = random(rows, cols)
        time_taken = seconds(lambda call: F.linear(x, matrices[call % len(matrices)]))
        report("products", 1e6 * time_taken, "us", shape=shape, peer="torch")


def llama_layer(layer, config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    matrices = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}


def weights(directory, layers=LLAMA_8B["num_hidden_layers"]):
    """Writes one file per layer. The index is last and marks the model as complete."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True)
    config = LLAMA_8B | {"num_hidden_layers": int(layers)}
    table = (config["vocab_size"], config["hidden_size"])
    ends = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": table[1:]}
    files = {}
    for number, tensors in enumerate([ends, *(llama_layer(layer, config) for layer in range(int(layers)))]):
        tensors_of_file = {name: random(*shape).cpu() if len(shape) == 2 else torch.ones(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
        save_file(tensors_of_file, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
        files |= {name: f"model-{number}.safetensors" for name in tensors}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@torch.no_grad()
def generate(directory, ours):
    model = same_shape(Path(directory))
    vocabulary = model.config.vocab_size
    for shape in shapes(ours, "prefill"):
        tokens = torch.randint(vocabulary, (1, shape["tokens"]), device="cuda")
        work = lambda: model(tokens, use_cache=True, logits_to_keep=1)
        work()
        time_taken = statistics.median(elapsed(work) for _ in range(3))
        report("prefill", shape["tokens"] / time_taken, "tokens/s", shape=shape, peer="transformers")
    for shape in shapes(ours, "decode"):
        if shape["batch"] in BATCHES:
            time_taken = step_seconds(model, torch.randint(vocabulary, (shape["batch"], shape["context"]), device="cuda"))
            report("decode", 1e3 * time_taken, "ms", shape=shape, peer="transformers")
    for shape in shapes(ours, "throughput"):
        if shape["batch"] in BATCHES:
            time_taken = generation_seconds(model, torch.randint(vocabulary, (shape["batch"], shape["context"]), device="cuda"), shape["output"])
            report("throughput", shape["batch"] * shape["output"] / time_taken, "tokens/s", shape=shape, peer="transformers")


def same_shape(directory):
    """Returns a model with the same shape and other random weights, because reading the weights takes longer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def step_seconds(model, tokens):
    """Returns the time of one more token."""
    generation_seconds(model, tokens, 2)
    return (generation_seconds(model, tokens, 1 + NEW_TOKENS) - generation_seconds(model, tokens, 1)) / NEW_TOKENS


def generation_seconds(model, tokens, new):
    mask = torch.ones_like(tokens)
    return elapsed(lambda: model.generate(tokens, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
