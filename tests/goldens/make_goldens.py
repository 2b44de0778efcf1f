"""Makes tiny random models and what transformers computes for them.

    python make_goldens.py [name ...]

Every directory beside this file that is listed in GOLDENS is a model as it
lies on a Hugging Face hub (config.json, model.safetensors, ...) plus
expected.safetensors:

    tokens      int64 [prompt + 32]         a random prompt, then 32 greedily generated tokens
    prompt_len  int64 [1]
    logits      f32   [prompt + 32, vocab]  row i: the logits after reading tokens[0..=i]

The logits are float32 math on the weights as stored, whatever type they are stored in.
"""

import json
import shutil
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).resolve().parent
PROMPT = 37  # two blocks of 16 and a bit
NEW = 32
SAFE_GAP = 5e-3  # between the best and the second logit, so rounding cannot flip a greedy token
MIN_DISTINCT = 8
MIN_EFFECT = 0.1  # of the logits' spread: what changing the first tokens does to the last row
MAX_BYTES = 300_000


# --- the models ---------------------------------------------------------------


def gpt2(**changes):
    base = dict(
        vocab_size=128, n_positions=96, n_embd=32, n_layer=3, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel, GPT2Config(**(base | changes))


def opt(**changes):
    base = dict(
        vocab_size=120, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=72,
        max_position_embeddings=96, word_embed_proj_dim=32,
    )  # fmt: skip
    return OPTForCausalLM, OPTConfig(**(base | changes))


def llama(**changes):
    base = dict(
        vocab_size=128, hidden_size=32, intermediate_size=72, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM, LlamaConfig(**(base | changes))


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA3_HEAD_DIM = 24


def regimes(rope, head_dim):
    """Which of the llama3 rules (keep, blend, divide) the frequencies of a head fall under."""
    found = set()
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (
            2 * torch.pi * rope["rope_theta"] ** (i / head_dim)
        )
        keep, blend = turns > rope["high_freq_factor"], turns >= rope["low_freq_factor"]
        found.add("keep" if keep else "blend" if blend else "divide")
    return found


assert regimes(LLAMA3, LLAMA3_HEAD_DIM) == {"keep", "blend", "divide"}


# --- what a directory looked like when other versions wrote it ------------------


def edit_config(directory, edit):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def as_version_4(scaling, drop=()):
    """transformers 4 kept theta at the top level, and called the dtype torch_dtype."""

    def edit(config):
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = scaling
        config["torch_dtype"] = config.pop("dtype")
        config["pretraining_tp"] = 1
        config["transformers_version"] = "4.46.0"
        for key in drop:
            del config[key]

    return lambda directory: edit_config(directory, edit)


def as_gpt2_on_the_hub(directory):
    """The first GPT-2 files: no prefix, and each layer's causal mask among the weights."""
    path = directory / "model.safetensors"
    config = json.loads((directory / "config.json").read_text())
    n = config["n_positions"]
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    for layer in range(config["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(n, n).tril().view(1, 1, n, n)
    save_file(tensors, path, metadata={"format": "pt"})


def nothing(directory):
    pass


# name: (model class, config), how it is saved, what is done to the saved directory
GOLDENS = {
    "gpt2": (gpt2(), {}, nothing),
    "gpt2_odd": (
        gpt2(vocab_size=101, n_positions=72, n_embd=30, n_head=3, n_inner=70,
             scale_attn_by_inverse_layer_idx=True),
        {}, as_gpt2_on_the_hub,
    ),
    "opt": (opt(), {}, nothing),
    "opt_350m": (
        opt(do_layer_norm_before=False, hidden_size=40, word_embed_proj_dim=24), {}, nothing,
    ),
    "llama": (llama(), {}, nothing),
    "llama_v4": (
        llama(tie_word_embeddings=True), {},
        as_version_4(None, drop=["head_dim", "attention_bias", "mlp_bias", "attention_dropout"]),
    ),
    "llama_odd": (
        llama(vocab_size=113, hidden_size=36, num_attention_heads=3, num_key_value_heads=1,
              head_dim=20, intermediate_size=50, attention_bias=True, mlp_bias=True),
        {}, nothing,
    ),
    "llama_linear": (
        llama(rope_parameters=LINEAR), {},
        as_version_4({"type": "linear", "factor": LINEAR["factor"]}),
    ),
    "llama3_rope": (
        llama(rope_parameters=LLAMA3, num_attention_heads=2, num_key_value_heads=1,
              head_dim=LLAMA3_HEAD_DIM),
        {}, as_version_4({k: v for k, v in LLAMA3.items() if k != "rope_theta"}),
    ),
    "llama_bf16": (llama(), {"dtype": torch.bfloat16}, nothing),
    "llama_f16": (llama(), {"dtype": torch.float16}, nothing),
    "llama_sharded": (llama(), {"max_shard_size": "50KB"}, nothing),
}  # fmt: skip


# --- weights that do not hide mistakes ------------------------------------------


def fill(model, rng, dtype):
    """Default weights hide bugs: biases are 0, norms are 1, and attention is nearly uniform."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=rng)
        if name.endswith("bias"):
            value = 0.3 * noise
        elif weight.dim() == 1:
            value = 1 + 0.3 * noise
        elif any(part in name for part in ("embed", "wte", "wpe")):
            value = 0.5 * noise
        else:
            fan_in = weight.shape[0 if "transformer.h." in name else 1]  # Conv1D is transposed
            value = 1.5 * noise / fan_in**0.5
        weight.data.copy_(value.to(dtype))  # rounded as storing it will round it


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def generate(model, prompt):
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens


def effect_of_start(model, tokens, logits):
    """How much the last row moves, in spreads of the logits, when the first tokens change."""
    vocab = model.config.vocab_size
    changed = [(t + vocab // 2) % vocab for t in tokens[:3]] + tokens[3:]
    return float((logits_of(model, changed)[-1] - logits[-1]).abs().mean() / logits[-1].std())


def weakness(model, tokens, logits):
    """Why this golden would be a poor test, or None."""
    generated = tokens[PROMPT:]
    rows = logits[PROMPT - 1 : -1]
    assert rows.argmax(-1).tolist() == generated
    best = rows.topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if gap <= SAFE_GAP:
        return f"gap {gap:.4f}"
    if len(set(generated)) < MIN_DISTINCT:
        return f"{len(set(generated))} distinct tokens"
    if model.config.eos_token_id in generated:
        return "an end token"
    effect = effect_of_start(model, tokens, logits)
    return f"effect {effect:.3f}" if effect < MIN_EFFECT else None


# --- one golden -------------------------------------------------------------------


def load(directory):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def build(recipe, dtype, seed):
    cls, config = recipe
    config._attn_implementation = "eager"
    rng = torch.Generator().manual_seed(seed)
    model = cls(config).eval()
    fill(model, rng, dtype)
    prompt = torch.randint(3, config.vocab_size, (PROMPT,), generator=rng).tolist()
    return model, prompt


def write(directory, model, saving):
    shutil.rmtree(directory, ignore_errors=True)
    rest = {k: v for k, v in saving.items() if k != "dtype"}
    model.to(saving.get("dtype", torch.float32)).save_pretrained(directory, **rest)


def check_reload(directory, tokens, logits):
    """What we wrote, by hand in places, is what transformers reads."""
    again = logits_of(load(directory), tokens)
    assert torch.allclose(again, logits, rtol=0, atol=1e-5), (again - logits).abs().max()


def make(name):
    recipe, saving, finish = GOLDENS[name]
    seed = zlib.crc32(name.encode())
    while True:
        model, prompt = build(recipe, saving.get("dtype", torch.float32), seed)
        tokens = generate(model, prompt)
        logits = logits_of(model, tokens)
        reason = weakness(model, tokens, logits)
        if reason is None:
            break
        seed += 1
    directory = HERE / name
    effect = effect_of_start(model, tokens, logits)
    write(directory, model, saving)
    finish(directory)
    check_reload(directory, tokens, logits)
    expected = {
        "tokens": torch.tensor(tokens),
        "prompt_len": torch.tensor([PROMPT]),
        "logits": logits.contiguous(),
    }
    save_file(expected, directory / "expected.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors writes them for the owner alone
    size = sum(f.stat().st_size for f in directory.iterdir())
    assert size < MAX_BYTES, (name, size)
    distinct = len(set(tokens[PROMPT:]))
    print(f"{name:14} {size:7} bytes, {distinct} distinct tokens, effect {effect:.2f}, seed {seed}")


def main():
    torch.set_num_threads(1)
    disable_progress_bar()
    for name in sys.argv[1:] or GOLDENS:
        make(name)


if __name__ == "__main__":
    main()
