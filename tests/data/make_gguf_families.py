"""usage: make_gguf_families.py [NAME ...] (with the packages of requirements.txt)

Writes gguf_NAME/ for the families of FAMILIES: a model of random blocks in the form that llama.cpp gives to the family, and the
logits of transformers with the numbers of the gguf package. make_gguf.py writes the families whose tensors have no form of their own.
"""

import sys

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from make_goldens import HERE, PROMPT, decoder, strong, write_expected
from make_gguf import SHORT, dequantize, finish, in_order_of_transformers, weights

F32 = gguf.GGMLQuantizationType.F32


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config(model_type, **changes):
    return decoder(model_type, **(SIZES | changes))[1]


GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 32,
}
# The architecture of the file, and the model.
FAMILIES = {
    "gemma": ("gemma", config("gemma", head_dim=24)),
    "gemma2": (
        "gemma2",
        config("gemma2", head_dim=16, sliding_window=20, query_pre_attn_scalar=16),
    ),
    "gemma3": (
        "gemma3",
        config(
            "gemma3_text",
            head_dim=16,
            num_hidden_layers=6,
            sliding_window=20,
            query_pre_attn_scalar=16,
            rope_parameters=GEMMA3_ROPES,
        ),
    ),
    "phi2": ("phi2", config("phi", num_key_value_heads=4)),
    "phi3": ("phi3", config("phi3", rope_parameters=LONG, original_max_position_embeddings=32)),
    "falcon": (
        "falcon",
        config(
            "falcon",
            num_kv_heads=2,
            new_decoder_architecture=True,
            ffn_hidden_size=96,
            bias=True,
        ),
    ),
    "falcon_mqa": ("falcon", config("falcon", num_kv_heads=1, ffn_hidden_size=96)),
    "starcoder2": ("starcoder2", config("starcoder2", sliding_window=24)),
    "stablelm": ("stablelm", config("stablelm", use_qkv_bias=True)),
    "stablelm_parallel": (
        "stablelm",
        config("stablelm", use_parallel_residual=True, qk_layernorm=True),
    ),
    "gpt2": (
        "gpt2",
        CONFIG_MAPPING["gpt2"](
            vocab_size=96,
            n_positions=96,
            n_embd=64,
            n_inner=96,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "gptneox": ("gptneox", config("gpt_neox")),
    "gptneox_sequential": ("gptneox", config("gpt_neox", use_parallel_residual=False)),
    "command_r": ("command-r", config("cohere", logit_scale=0.5, use_qk_norm=True)),
    "cohere2": (
        "cohere2",
        config("cohere2", sliding_window=20, logit_scale=0.7, num_hidden_layers=4),
    ),
    "glm4": ("glm4", config("glm4", head_dim=16, attention_bias=True)),
    "granite": (
        "granite",
        config(
            "granite",
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
        ),
    ),
    "olmo2": ("olmo2", config("olmo2")),
}


def heads_of(config):
    """Returns the numbers of query heads and of KV heads, and the dimensions of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_kv_heads", None) or getattr(
        config, "num_key_value_heads", heads
    )
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def in_transformers(architecture, config, key, numbers):
    """Returns the parameter of transformers for the numbers of a file."""
    heads, kv_heads, dim = heads_of(config)
    if architecture == "gpt2" and numbers.ndim == 2 and ".h." in key:
        return numbers.T
    if architecture == "granite" and key.split(".")[-2] in ("q_proj", "k_proj"):
        return in_order_of_transformers(numbers, heads if "q_proj" in key else kv_heads)
    if "query_key_value" in key and architecture in ("falcon", "gptneox"):
        if architecture == "gptneox":
            kv_heads = heads
        rows = np.arange(numbers.shape[0])
        q, k, v = np.split(rows, [heads * dim, (heads + kv_heads) * dim])
        parts = (q.reshape(kv_heads, -1), k.reshape(kv_heads, dim), v.reshape(kv_heads, dim))
        return numbers[np.concatenate(parts, axis=1).reshape(-1)]
    return numbers


def name_in_file(names, key):
    if ".q_layernorm.norms." in key or ".k_layernorm.norms." in key:
        _, _, layer, _, which, *_ = key.split(".")
        return f"blk.{layer}.attn_{which[0]}_norm.weight"
    return names.get_name(key, (".weight", ".bias"))


def embedding_deviation(config):
    """Larger embeddings would dominate the logits of the same token if they are also the head."""
    if not config.tie_word_embeddings:
        return 0.3
    return 0.05 if "gemma" in config.model_type else 0.15


def build(name, seed):
    """Returns the model, a prompt, and the tensors for the file."""
    architecture, config = FAMILIES[name]
    number = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    random = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state, tensors, used = model.state_dict(), {}, 0
    for key in state:
        if key in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        shape = tuple(state[key].shape)
        if architecture == "gpt2" and len(shape) == 2 and ".h." in key:
            shape = shape[::-1]
        in_file = name_in_file(names, key)
        if len(shape) == 1 or "norm" in key:
            center = 1 if "norm" in key or ".ln_" in key else 0
            numbers = (0 if key.endswith("bias") else center) + 0.3 * random.standard_normal(shape)
            numbers = numbers.astype(np.float32)
            if architecture.startswith("gemma"):  # files have weights plus 1
                numbers -= 1
                tensors[in_file] = (numbers + np.float32(1), F32)
            elif ".norms." in key:  # one tensor for all heads
                rows = [*tensors[in_file][0], numbers] if in_file in tensors else [numbers]
                tensors[in_file] = (np.stack(rows), F32)
            else:
                tensors[in_file] = (numbers, F32)
        else:
            kind = SHORT[used % len(SHORT)]
            used += 1
            deviation = (
                embedding_deviation(config) if "token_embd" in in_file else 2.0 / shape[-1] ** 0.5
            )
            rows = weights(kind, shape, deviation, random)
            numbers = dequantize(kind, rows).reshape(shape)
            tensors[in_file] = (rows, gguf.GGMLQuantizationType[kind])
        numbers = in_transformers(architecture, config, key, numbers)
        state[key].copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
    model.tie_weights()
    prompt = np.random.default_rng(seed + 1).integers(3, config.vocab_size, size=PROMPT).tolist()
    return model, prompt, tensors


def write_parameters(writer, architecture, config):
    heads, kv_heads, dim = heads_of(config)
    inner = next(
        value
        for field in ("n_inner", "ffn_hidden_size", "intermediate_size")
        if (value := getattr(config, field, None))
    )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for field in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, field):
            writer.add_layer_norm_eps(getattr(config, field))
    writer.add_eos_token_id(config.eos_token_id)
    write_rope(writer, config, dim)
    numbers = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "sliding_window": writer.add_sliding_window,
    }
    for field, add in numbers.items():
        if getattr(config, field, None) is not None:
            add(getattr(config, field))
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)


def write_rope(writer, config, dim):
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = np.log(config.max_position_embeddings / original) / np.log(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + stretch)))
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)


def write(name):
    architecture, config = FAMILIES[name]
    golden = f"gguf_{name}"
    (_, _, tensors), tokens, logits, seed = strong(golden, lambda seed: build(name, seed))
    directory = HERE / golden
    directory.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    write_parameters(writer, architecture, config)
    for tensor, (rows, kind) in tensors.items():
        writer.add_tensor(tensor, rows, raw_dtype=kind)
    finish(writer)
    print(golden, write_expected(directory, tokens, logits), "bytes, seed", seed, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or FAMILIES:
        write(name)
