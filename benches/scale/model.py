"""Models: numbers of weights and of KV, from a config.json."""

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = [HERE / "models", HERE.parent / "paper" / "models"]


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    split: float  # numbers of weights that are divided by heads
    per_kv_head: float  # numbers of weights of one KV head
    kv_width: float  # numbers of the cache per token, layer and KV head
    decode_flops: float  # per pair of a token and a visible position, all heads
    prefill_flops: float


@dataclass(frozen=True)
class Experts:
    count: int
    active: int  # per token
    size: float  # numbers of weights of one
    shared: float  # numbers of weights of those that every token uses
    router: float
    max_nodes: int  # groups of experts that a token uses


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    plain_layers: int  # the first layers, which have an MLP without experts
    hidden: int
    mlp_width: int
    vocab: int
    attention: Attention
    mlp: float  # numbers of weights of the MLP of a plain layer
    experts: Experts  # None: all layers are plain
    tied: bool  # the head is the embedding
    weight_bytes: float  # of the weights of layers; embedding, head and KV have 2

    @property
    def table(self):
        """Numbers of the embedding, or of the head."""
        return self.vocab * self.hidden

    def attention_numbers(self):
        return self.attention.split + self.attention.per_kv_head * self.attention.kv_heads

    def _numbers(self, experts):
        """Numbers of weights of all layers, with this number of experts."""
        numbers = self.layers * self.attention_numbers() + self.plain_layers * self.mlp
        if self.experts:
            each = experts * self.experts.size + self.experts.shared + self.experts.router
            numbers += (self.layers - self.plain_layers) * each
        return numbers

    def total(self):
        """Parameters, without norms and biases."""
        return self._numbers(self.experts.count if self.experts else 0) + self.table * (
            1 if self.tied else 2
        )

    def active(self):
        """Numbers with which a token is multiplied."""
        return self._numbers(self.experts.active if self.experts else 0) + self.table

    def kv_numbers(self):
        """Numbers of the cache per token in all layers, on one device."""
        return self.layers * self.attention.kv_width * self.attention.kv_heads


def _grouped(config):
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    width = hidden // heads
    pair = 4.0 * heads * width
    return Attention(
        heads, kv_heads, 2.0 * hidden * heads * width, 2.0 * hidden * width, 2 * width, pair, pair
    )


def _latent(config):
    """All heads share the latent, which is the only KV head. Decode steps attend to latents."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotary, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    split = heads * (query * (plain + rotary) + latent * (plain + value) + value * hidden)
    return Attention(
        heads=heads,
        kv_heads=1,
        split=split,
        per_kv_head=hidden * (query + latent + rotary),
        kv_width=latent + rotary,
        decode_flops=2.0 * heads * (2 * latent + rotary),
        prefill_flops=2.0 * heads * (plain + rotary + value),
    )


def _experts(config):
    hidden, count = config["hidden_size"], config["n_routed_experts"]
    size = 3.0 * hidden * config["moe_intermediate_size"]
    return Experts(
        count=count,
        active=config["num_experts_per_tok"],
        size=size,
        shared=size * config["n_shared_experts"],
        router=hidden * count,
        max_nodes=config["topk_group"],
    )


def load(name, weight_bytes=2.0):
    path = next(
        (folder / f"{name}.json" for folder in FOLDERS if (folder / f"{name}.json").exists()), None
    )
    if path is None:
        raise ValueError(f"model {name} is unknown; add benches/scale/models/{name}.json")
    config = json.loads(path.read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    has_experts = "n_routed_experts" in config
    # OPT has no gate.
    width, matrices = config.get("ffn_dim"), 2
    if width is None:
        width, matrices = config["intermediate_size"], 3
    return Model(
        name=name,
        layers=layers,
        plain_layers=config["first_k_dense_replace"] if has_experts else layers,
        hidden=hidden,
        mlp_width=width,
        vocab=config["vocab_size"],
        attention=_latent(config) if "kv_lora_rank" in config else _grouped(config),
        mlp=float(matrices * hidden * width),
        experts=_experts(config) if has_experts else None,
        tied=config["tie_word_embeddings"],
        weight_bytes=weight_bytes,
    )
