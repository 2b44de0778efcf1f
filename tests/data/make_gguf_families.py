"""usage: make_gguf_families.py [NAME ...] (with the packages of requirements.txt)

Writes gguf_NAME/ for the families of FAMILIES: a model of random blocks in the form that llama.cpp gives to the family, and the
logits of transformers with the numbers of the gguf package. make_gguf.py writes the families whose tensors have no form of their own.
"""

import sys

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from make_goldens import HERE, PROMPT, decoder, mend, strong, write_expected
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# The architecture of the file, and the model. Rows use most experts: with rounded activations, they could
# select another one of two nearly equal experts.
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
    "gpt_oss": (
        "gpt-oss",
        config(
            "gpt_oss",
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=4,
            sliding_window=20,
            rope_parameters=YARN | {"truncate": False},
        ),
    ),
    "deepseek_v2": (
        "deepseek2",
        config(
            "deepseek_v2",
            **LATENT | {"q_lora_rank": None},
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.5,
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    ),
    "deepseek_v3": (
        "deepseek2",
        config(
            "deepseek_v3",
            **LATENT | {"num_experts_per_tok": 3},
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.2,
        ),
    ),
}


def heads_of(config):
    """Returns the numbers of query heads and of KV heads, and the dimensions of a head."""
    heads = config.num_attention_heads
    if config.model_type == "gpt_neox":
        return heads, heads, config.hidden_size // heads
    kv_heads = getattr(config, "num_kv_heads", None) or getattr(
        config, "num_key_value_heads", heads
    )
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def parts_in_file(config, names, key, shape):
    """Returns the names and shapes of the tensors that a parameter of transformers becomes."""
    layer, part = layer_and_part(key)
    if part == "mlp.experts.gate_up_proj":
        experts, rows, cols = shape
        if config.model_type == "gpt_oss":
            rows, cols = cols, rows
        half = (experts, rows // 2, cols)
        return [(f"blk.{layer}.ffn_{which}_exps.weight", half) for which in ("gate", "up")]
    if part == "mlp.experts.gate_up_proj_bias":
        half = (shape[0], shape[1] // 2)
        return [(f"blk.{layer}.ffn_{which}_exps.bias", half) for which in ("gate", "up")]
    if part.startswith("mlp.experts.down_proj"):
        suffix = "bias" if part.endswith("bias") else "weight"
        if config.model_type == "gpt_oss" and suffix == "weight":
            shape = (shape[0], shape[2], shape[1])
        return [(f"blk.{layer}.ffn_down_exps.{suffix}", shape)]
    if part == "mlp.gate.e_score_correction_bias":
        return [(f"blk.{layer}.exp_probs_b.bias", shape)]
    if part == "self_attn.sinks":
        return [(f"blk.{layer}.attn_sinks.weight", shape)]
    if part == "self_attn.kv_b_proj.weight" and config.model_type == "deepseek_v3":
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        return [
            (f"blk.{layer}.attn_k_b.weight", (heads, rank, config.qk_nope_head_dim)),
            (f"blk.{layer}.attn_v_b.weight", (heads, config.v_head_dim, rank)),
        ]
    if ".q_layernorm.norms." in key or ".k_layernorm.norms." in key:
        which = part.split(".")[1][0]
        return [(f"blk.{layer}.attn_{which}_norm.weight", shape)]
    if config.model_type == "gpt2" and len(shape) == 2 and ".h." in key:
        shape = shape[::-1]
    return [(names.get_name(key, (".weight", ".bias")), shape)]


def layer_and_part(key):
    """Returns the number of the layer in a key, and what follows it."""
    pieces = key.split(".")
    number = next((i for i, piece in enumerate(pieces) if piece.isdigit()), len(pieces))
    return "".join(pieces[number : number + 1]), ".".join(pieces[number + 1 :])


def in_transformers(architecture, config, key, parts):
    """Returns the parameter of transformers for the numbers of its tensors in a file."""
    heads, kv_heads, dim = heads_of(config)
    _, part = layer_and_part(key)
    numbers = parts[0]
    if architecture == "gpt-oss" and part.startswith("mlp.experts."):
        if not part.endswith("bias"):
            parts = [numbers.swapaxes(1, 2) for numbers in parts]
        # Gate and up alternate.
        return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
    if part == "mlp.experts.gate_up_proj":
        return np.concatenate(parts, axis=1)
    if len(parts) == 2:  # kv_b_proj
        keys, values = parts
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])
    if architecture == "gpt2" and numbers.ndim == 2 and ".h." in key:
        return numbers.T
    if architecture == "granite" and key.split(".")[-2] in ("q_proj", "k_proj"):
        return in_order_of_transformers(numbers, heads if "q_proj" in key else kv_heads)
    if "query_key_value" in key and architecture in ("falcon", "gptneox"):
        rows = np.arange(numbers.shape[0])
        q, k, v = np.split(rows, [heads * dim, (heads + kv_heads) * dim])
        parts = (q.reshape(kv_heads, -1), k.reshape(kv_heads, dim), v.reshape(kv_heads, dim))
        return numbers[np.concatenate(parts, axis=1).reshape(-1)]
    return numbers


def embedding_deviation(config):
    """Larger embeddings would dominate the logits of the same token if they are also the head."""
    if not config.tie_word_embeddings:
        return 0.3
    return 0.05 if "gemma" in config.model_type else 0.15


def vector(in_file, key, shape, random):
    """Returns numbers of a norm, a bias or a router, which files have in F32."""
    center = 1 if ("norm" in key or ".ln_" in key) and not key.endswith("bias") else 0
    if "exp_probs_b" in in_file:
        center = 1  # transformers would prefer experts of other groups to those with scores below 0
    deviation = 1.0 / shape[-1] ** 0.5 if "gate_inp.weight" in in_file else 0.3
    return (center + deviation * random.standard_normal(shape)).astype(np.float32)


def build(name, seed):
    """Returns the model, a prompt, and the tensors for the file."""
    architecture, config = FAMILIES[name]
    number = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    random = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = mend(model.float())
    state, tensors, used = model.state_dict(), {}, 0
    for key in state:
        if key in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        parts = []
        for in_file, shape in parts_in_file(config, names, key, tuple(state[key].shape)):
            if (
                len(shape) == 1
                or in_file.endswith("bias")
                or "norm" in key
                or "gate_inp" in in_file
            ):
                numbers = vector(in_file, key, shape, random)
                if architecture.startswith("gemma"):  # files have weights plus 1
                    tensors[in_file] = (numbers, F32)
                    numbers = numbers - np.float32(1)
                elif ".norms." in key:  # one tensor for all heads
                    rows = [*tensors[in_file][0], numbers] if in_file in tensors else [numbers]
                    tensors[in_file] = (np.stack(rows), F32)
                else:
                    tensors[in_file] = (numbers, F32)
            else:
                kind = SHORT[used % len(SHORT)]
                used += 1
                deviation = (
                    embedding_deviation(config)
                    if "token_embd" in in_file
                    else 2.0 / shape[-1] ** 0.5
                )
                rows = weights(kind, (int(np.prod(shape[:-1])), shape[-1]), deviation, random)
                numbers = dequantize(kind, rows).reshape(shape)
                rows = rows.reshape(*shape[:-1], -1)
                tensors[in_file] = (rows, gguf.GGMLQuantizationType[kind])
            parts.append(numbers)
        numbers = in_transformers(architecture, config, key, parts)
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
    # Latents are those of all heads, unless the file has the expanded form.
    writer.add_head_count_kv(1 if config.model_type == "deepseek_v3" else kv_heads)
    if architecture == "deepseek2":
        write_latent(writer, config)
    elif getattr(config, "head_dim", None):
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
        "num_experts_per_tok": writer.add_expert_used_count,
    }
    for field, add in numbers.items():
        if getattr(config, field, None) is not None:
            add(getattr(config, field))
    if architecture == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)


def write_latent(writer, config):
    rotated, values = config.qk_rope_head_dim, config.v_head_dim
    length = config.qk_nope_head_dim + rotated
    sigmoid = config.model_type == "deepseek_v3"
    if sigmoid:  # the form with kv_b_proj in two tensors
        writer.add_key_length(config.kv_lora_rank + rotated)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(length)
        writer.add_value_length_mla(values)
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    else:
        writer.add_key_length(length)
        writer.add_value_length(values)
    kind = gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    writer.add_expert_gating_func(kind)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)


def write_rope(writer, config, dim):
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    if not hasattr(config, "kv_lora_rank"):
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
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
