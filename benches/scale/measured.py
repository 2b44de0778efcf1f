"""Measurements with which the model is compared."""

import json
import re
from pathlib import Path

import collectives
import layouts
import machine
import model
from step import (
    BLOCK_SIZE,
    COMBINE_BYTES,
    DISPATCH_BYTES,
    Layout,
    Work,
    decode,
    prefill,
    prefill_rate,
    routed_bytes,
)

ROOT = Path(__file__).resolve().parent.parent.parent
GPU_RESULTS = ROOT / "benches" / "results" / "2026-11-27-gpu-h100.txt"
EVALUATION = ROOT / "docs" / "evaluation" / "numbers.json"

# Devices, and microseconds to send 128 tokens of each device to their experts and to send the
# results back (docs/legacy.md of DeepEP: H800, low-latency kernels).
EXPERT_EXCHANGES = [
    (8, 77, 114),
    (16, 118, 195),
    (32, 155, 273),
    (64, 173, 314),
    (128, 192, 369),
    (256, 194, 360),
]
EXCHANGED_TOKENS = 128

# Decoding of DeepSeek-V3 and R1 on nodes of 8 H800, the mean of a day: "DeepSeek-V3/R1 Inference
# System Overview" (deepseek-ai/open-infra-index, February 2025).
SERVED = {"devices": 144, "context": 4989, "rate_per_node": 14800, "rates_of_a_sequence": (20, 22)}

# Context of the sequences in the results: 512 tokens and some generated ones, in whole blocks.
CONTEXT = 35 * BLOCK_SIZE


def numbers_of(pattern):
    """Returns the groups of each line of the GPU results that matches, as numbers."""
    found = re.findall(pattern, GPU_RESULTS.read_text(), re.M)
    return [tuple(float(number.replace(",", "")) for number in line) for line in found]


def gpu_steps():
    """Returns (what, measured ms, the model's ms)."""
    h100, llama = machine.load("h100"), model.load("llama-3-8b")
    rows = []
    for batch, measured in numbers_of(r"^batch (\d+), 32 layers, default +([\d.]+) ms"):
        name = f"{batch:.0f} sequence{'s' if batch > 1 else ''}"
        rows.append((name, measured, 1e3 * decode(llama, h100, Layout(), batch, CONTEXT).seconds))
    for tokens, rate in numbers_of(r"^(\d+) tokens, 32 layers, default +([\d,]+) tokens/s"):
        rows.append(
            (
                f"prompt of {tokens:,.0f}",
                1e3 * tokens / rate,
                1e3 * prefill(llama, h100, Layout(), tokens).seconds,
            )
        )
    return rows


def products_share(kind):
    """Share of the measured ceiling that the products of a layer with 4,096 rows reach."""
    lines = numbers_of(
        rf"^(?:qkv|attention's output|gate and up|down) in {kind}, 4096 rows, default +([\d,.]+) us +([\d,.]+) us"
    )
    return sum(limit for _, limit in lines) / sum(time for time, _ in lines)


def expert_exchanges():
    """Returns (devices, measured and modelled us to the experts, the same of the way back)."""
    h800, deepseek = machine.load("h800"), model.load("deepseek-v3", 1.0)
    rows = []
    for devices, there, back in EXPERT_EXCHANGES:
        work = Work(devices * EXCHANGED_TOKENS, EXCHANGED_TOKENS, 0, 0, EXCHANGED_TOKENS, 0, True)
        near, far = routed_bytes(deepseek, h800, Layout(data=devices), work)
        times = [
            1e6 * collectives.exchange(h800, near * size, far * size)
            for size in (DISPATCH_BYTES, COMBINE_BYTES)
        ]
        rows.append((devices, there, times[0], back, times[1]))
    return rows


def served():
    """DeepSeek's service: returns sequences per device, ms per token, tokens per second and device,
    and the share of communication. The number of sequences is the published rate of a device over
    that of a sequence."""
    h800, deepseek = machine.load("h800"), model.load("deepseek-v3", 1.0)
    rate = SERVED["rate_per_node"] / h800.node
    sequences = round(rate / (sum(SERVED["rates_of_a_sequence"]) / 2))
    devices = SERVED["devices"]
    step = decode(deepseek, h800, Layout(data=devices), sequences * devices, SERVED["context"])
    return sequences, 1e3 * step.seconds, step.rate / devices, step.communication_share()


def evaluation():
    """The machines of the PagedAttention paper. Returns the tokens of a running sequence, and
    for each machine the results of docs/evaluation.md and of the model."""
    numbers = json.loads(EVALUATION.read_text())
    lengths = next(panel for panel in numbers["figure_11"]["panels"] if panel["data"] == "ShareGPT")
    waste = next(
        system for system in numbers["figure_2"]["systems"] if system["name"] == "libpagedllm"
    )
    small = next(row for row in numbers["table_1"]["rows"] if row["model"] == "OPT-13B")
    context = waste["tokens"] / 100 * small["paper_slots"] / waste["running"]
    rows = []
    for name, device in (("OPT-66B", "a100-40gb"), ("OPT-175B", "a100-80gb")):
        table = next(row for row in numbers["table_1"]["rows"] if row["model"] == name)
        panel = next(
            p
            for p in numbers["figure_12"]["panels"]
            if p["model"] == name and p["data"] == "ShareGPT"
        )
        opt, a100, layout = (
            model.load(name.lower()),
            machine.load(device),
            Layout(tensor=table["devices"]),
        )
        sequences = int(table["paper_slots"] / context)
        step = decode(opt, a100, layout, sequences, context)
        prompts = lengths["prompt"]["mean"] / prefill_rate(
            opt, a100, layout, lengths["prompt"]["mean"]
        )
        rows.append(
            {
                "name": name,
                "machine": f"{table['devices']} x {table['device'].removeprefix('NVIDIA ')}",
                "paper_slots": table["paper_slots"],
                "simulated_slots": table["slots"],
                "slots": layouts.capacity(opt, a100, layout),
                "sequences": sequences,
                "ms": 1e3 * step.seconds,
                "simulated_rate": panel["systems"][0]["sustained"],
                "rate": 1 / (lengths["output"]["mean"] / step.rate + prompts),
            }
        )
    return context, rows
