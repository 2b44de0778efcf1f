#!/usr/bin/env python3
"""Logits of random models of every family, compared with transformers in float32 and in bfloat16 on the same device.

    PYTHONPATH=DIR models.py [name ...]     DIR contains the package pagedllm with libpagedllm.so

An error is the median distance of a row from its float32 value: log probabilities for the prompt, logits for
generated tokens. It is the median because a mixture of experts can select another expert of two with nearly equal
scores. Such a row is far from float32, also in transformers.
"""

import json
import sys
import tempfile
import traceback
import zlib
from pathlib import Path

import pagedllm
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "data"))
import make_goldens as goldens  # noqa: E402

PART = "models"
PROMPT, CHUNK, NEW = 300, 130, 48  # more rows per chunk than the library's own products compute
GREEDY = 3  # maximum float32 distance of a token from the best one, in errors of bfloat16 in that row
REROUTED = 5  # minimum error, in median errors, of a row in which another expert was selected
MAX_REROUTED = 0.2  # share of such rows; 7 of 48 occurred on an H100
EAGER, SDPA = {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "attention": "sdpa"}
WIDE = dict(
    vocab_size=1024, hidden_size=256, intermediate_size=448, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=128, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=40,
    n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1,
    n_group=4, topk_group=2,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
POST_NORM = dict(do_layer_norm_before=False, word_embed_proj_dim=128)
FALCON_RW = dict(multi_query=False, parallel_attn=False, bias=True, alibi=True, tie_word_embeddings=False)


def wide(model_type, **changes):
    """Returns a config with heads of 64, unless `changes` has another size."""
    return goldens.decoder(model_type, **(WIDE | changes))


def opt(**changes):
    base = dict(vocab_size=1024, hidden_size=256, ffn_dim=512, max_position_embeddings=1024, word_embed_proj_dim=256)
    return goldens.opt(**(base | changes))


FAMILIES = {
    "gpt2": lambda: goldens.gpt2(vocab_size=1024, n_positions=1024, n_embd=256),
    "opt": opt,
    "opt, post-norm": lambda: opt(**POST_NORM),
    "llama": lambda: wide("llama"),
    "llama, heads of 80": lambda: wide("llama", hidden_size=320),
    "llama, heads of 96": lambda: wide("llama", hidden_size=384),
    "llama, heads of 112": lambda: wide("llama", hidden_size=448),
    "llama, heads of 128": lambda: wide("llama", hidden_size=512),
    "mistral": lambda: wide("mistral", sliding_window=200),
    "qwen2": lambda: wide("qwen2", use_sliding_window=True, sliding_window=150, max_window_layers=1),
    "qwen3": lambda: wide("qwen3", head_dim=128),
    "gemma": lambda: wide("gemma", head_dim=256),
    "gemma2": lambda: wide("gemma2", head_dim=128, sliding_window=150, query_pre_attn_scalar=128),
    "gemma3": lambda: wide(
        "gemma3_text", head_dim=256, sliding_window=150, rope_parameters=goldens.GEMMA3_ROPES,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "phi": lambda: wide("phi", num_key_value_heads=4),
    "phi3": lambda: wide("phi3"),
    "gpt_neox": lambda: wide("gpt_neox"),
    "falcon": lambda: wide("falcon"),
    "falcon, groups of heads": lambda: wide("falcon", num_kv_heads=2, new_decoder_architecture=True),
    "falcon, ALiBi": lambda: wide("falcon", **FALCON_RW),
    "stablelm": lambda: wide("stablelm"),
    "starcoder2": lambda: wide("starcoder2", sliding_window=200),
    "olmo2": lambda: wide("olmo2"),
    "granite": lambda: wide("granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.1),
    "smollm3": lambda: wide("smollm3", no_rope_layer_interval=2),
    "glm4": lambda: wide("glm4", head_dim=64),
    "mixtral": lambda: wide("mixtral", num_local_experts=4, sliding_window=None),
    "qwen2_moe": lambda: wide("qwen2_moe", shared_expert_intermediate_size=96, **EXPERTS),
    "qwen3_moe": lambda: wide("qwen3_moe", head_dim=64, norm_topk_prob=True, **EXPERTS),
    "cohere": lambda: wide("cohere", logit_scale=0.5),
    "cohere2": lambda: wide(
        "cohere2", sliding_window=150, logit_scale=0.7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "gpt_oss": lambda: wide("gpt_oss", head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=150),
    "deepseek_v2": lambda: wide("deepseek_v2", topk_method="group_limited_greedy", **LATENT),
    "deepseek_v3": lambda: wide("deepseek_v3", **LATENT),
}  # fmt: skip


def report(case, **more):
    print(json.dumps({"part": PART, "case": case, **more}), flush=True)


def main(*names):
    for name in names or FAMILIES:
        try:
            check(name)
        except Exception as error:  # the other families still run
            traceback.print_exc()
            report(name, error=f"{type(error).__name__}: {error}")


def check(name):
    seed, saving = zlib.crc32(name.encode()), SDPA if "ALiBi" in name else EAGER
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "model"
        model, _ = goldens.build(FAMILIES[name](), saving, seed)
        goldens.write(directory, model, saving)
        prompt = torch.randint(3, model.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        exact, rounded = (load(directory, saving, dtype) for dtype in (torch.float32, torch.bfloat16))
        for mode in ("default", "batch_invariant"):
            found = ours(directory, prompt, mode == "batch_invariant")
            compare(f"{name}, {mode}", prompt, has_experts(model.config), *found, *(logits_of(model, prompt + found[0]) for model in (exact, rounded)))


def load(directory, saving, dtype):
    """Loads the model in transformers, with fixes for its defects."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=goldens.attention_of(saving), experts_implementation="eager"
    )
    return goldens.mend(model).cuda()


@torch.no_grad()
def logits_of(model, tokens):
    return model(torch.tensor([tokens], device="cuda")).logits[0].float().cpu()


def ours(directory, prompt, batch_invariant):
    """Returns greedy tokens, log probabilities of the prompt except its first token, and the logits of each choice."""
    rows = []

    def keep(_sequence, _tokens, logits):
        rows.append(torch.frombuffer(bytearray(logits), dtype=torch.float32))

    sampling = pagedllm.Sampling(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=True)
    with pagedllm.Engine(
        directory, device="cuda:0", kv_bytes=64 << 20, prefill_chunk=CHUNK, batch_invariant=batch_invariant, skip_tokenizer=True
    ) as engine:
        answer = engine.generate(prompt, sampling, logits_hook=keep)
    return answer.tokens, torch.tensor(answer.prompt_logprobs), torch.stack(rows)


def compare(case, prompt, routed, tokens, logprobs, logits, exact, rounded):
    begin = len(prompt) - 1  # the row that selects the first token
    ends = slice(begin, begin + len(tokens))
    prompt_logprobs = lambda rows: rows[:begin].log_softmax(-1).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
    logits_error = lambda rows: float(((rows - exact[ends]).norm(dim=1) / exact[ends].norm(dim=1)).median())
    logprobs_error = lambda numbers: float((numbers - prompt_logprobs(exact)).abs().median())
    error(f"{case}, prompt", logprobs_error(logprobs), logprobs_error(prompt_logprobs(rounded)))
    error(f"{case}, generated", logits_error(logits), logits_error(rounded[ends]))
    greedy(f"{case}, greedy tokens", torch.tensor(tokens), logits, exact[ends], rounded[ends], routed)


def error(case, ours, theirs):
    shape = {"case": case}
    report(case, shape=shape, value=ours, unit="error")
    report(case, shape=shape, value=theirs, unit="error", peer="transformers in bf16")


def has_experts(config):
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def greedy(case, tokens, ours, exact, rounded, routed):
    """Checks that each token is the best one but for rounding. `routed`: except in rows in which another expert was selected."""
    lost = exact.amax(1) - exact.gather(1, tokens.unsqueeze(1)).squeeze(1)
    distance = (ours - exact).norm(dim=1)
    rerouted = routed & (distance > REROUTED * distance.median())
    wrong = int(((lost > GREEDY * (rounded - exact).abs().amax(1)) & ~rerouted).sum())
    count, others = int(rerouted.sum()), int((lost > 0).sum())
    ok = wrong == 0 and count <= MAX_REROUTED * len(tokens)
    why = f"{wrong} of {len(tokens)} are wrong, {count} rows are far from float32"
    report(case, ok=ok, why=None if ok else why, rerouted=count, not_the_best_in_float32=others)


if __name__ == "__main__":
    main(*sys.argv[1:])
