"""The tables of docs/scale.md, by name."""

import collectives
import layouts
import machine
import measured
import model
from step import (
    LOGIT_BYTES,
    SUM_BYTES,
    Layout,
    capacity,
    decode,
    hop,
    kv_bytes,
    plan_bytes,
    prefill,
    prefill_rate,
    Work,
)

DEVICES = (1, 2, 4, 8, 16, 32, 64)
# Title, bytes of a weight, machines, context in tokens, and the longest time per token in seconds.
WORKLOADS = {
    "opt-66b": ("OPT-66B", 2.0, ["a100-40gb"], 512, 0.1),
    "opt-175b": ("OPT-175B", 2.0, ["a100-80gb"], 512, 0.1),
    "llama-3-70b": ("Llama-3-70B", 2.0, ["h100", "h200"], 4096, 0.05),
    "llama-3.1-405b": ("Llama-3.1-405B", 2.0, ["h100", "h200"], 4096, 0.05),
    "deepseek-v3": ("DeepSeek-V3", 1.0, ["h100", "h200"], 4096, 0.05),
}
MACHINES = {
    "a100-40gb": "A100 40 GB",
    "a100-80gb": "A100 80 GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
}
PAIRS = [(name, device) for name, workload in WORKLOADS.items() for device in workload[2]]
NONE = "does not fit"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def digits(value):
    """Three significant digits, with commas."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.1 else f"{value:.2g}"


def percent(share):
    return f"{100 * share:.0f} %"


def bound(name, device):
    """Returns the model, the machine, the context and the limit of a workload."""
    _, weight_bytes, _, context, limit = WORKLOADS[name]
    return model.load(name, weight_bytes), machine.load(device), context, limit


def machines():
    def row(name, title):
        m = machine.load(name)
        fp8 = digits(m.flops_8bit / 1e12) if m.flops_8bit else "none"
        return [
            title,
            digits(m.memory / 1e9),
            digits(m.bandwidth / 1e12),
            digits(m.flops / 1e12),
            fp8,
            digits(m.link / 1e9),
            digits(m.network / 1e9),
        ]

    head = [
        "device",
        "memory, GB",
        "bandwidth, TB/s",
        "16 bits, TFLOP/s",
        "fp8, TFLOP/s",
        "to the node, GB/s",
        "to other nodes, GB/s",
    ]
    return table(head, [row(*item) for item in MACHINES.items()])


def models():
    def row(name):
        title, weight_bytes, *_ = WORKLOADS[name]
        m = model.load(name, weight_bytes)
        total = sum_of_weights(m)
        heads = f"{m.attention.heads} / {m.attention.kv_heads}"
        kv = m.layers * kv_bytes(m, Layout())
        return [
            title,
            m.layers,
            f"{m.hidden:,}",
            heads,
            digits(m.total() / 1e9),
            digits(m.active() / 1e9),
            digits(total / 1e9),
            digits(kv / 1e3),
        ]

    head = [
        "model",
        "layers",
        "hidden",
        "heads / KV heads",
        "parameters, billions",
        "used by a token",
        "weights, GB",
        "KV of a token, KB",
    ]
    return table(head, [row(name) for name in WORKLOADS])


def sum_of_weights(m):
    tables = m.table * (1 if m.tied else 2)
    return (m.total() - tables) * m.weight_bytes + tables * 2


def calibration():
    rows = [
        [what, digits(ours), digits(theirs), f"{theirs / ours - 1:+.1%}"]
        for what, ours, theirs in measured.gpu_steps()
    ]
    return table(["LLaMA-3-8B on one H100", "measured, ms", "model, ms", "difference"], rows)


def experts_check():
    def row(devices, there, our_there, back, our_back):
        return [
            devices,
            there,
            f"{our_there:.0f}",
            f"{our_there / there - 1:+.0%}",
            back,
            f"{our_back:.0f}",
            f"{our_back / back - 1:+.0%}",
        ]

    head = [
        "devices",
        "to the experts, us",
        "model",
        "difference",
        "back, us",
        "model",
        "difference",
    ]
    return table(head, [row(*line) for line in measured.expert_exchanges()])


def paper():
    _, rows = measured.evaluation()

    def row(r):
        slots = [f"{r[key]:,.0f}" for key in ("paper_slots", "simulated_slots", "slots")]
        return [
            r["name"],
            r["machine"],
            *slots,
            r["sequences"],
            digits(r["ms"]),
            digits(r["simulated_rate"]),
            digits(r["rate"]),
        ]

    head = [
        "model",
        "machine",
        "KV tokens: paper",
        "simulator",
        "model",
        "sequences",
        "ms per token",
        "requests/s: simulator",
        "model",
    ]
    return table(head, [row(r) for r in rows])


def sums():
    """Times of one sum of the hidden states of Llama-3-70B on H100."""
    llama, h100 = model.load("llama-3-70b"), machine.load("h100")

    def row(tokens):
        size = SUM_BYTES * tokens * llama.hidden
        cells = [
            f"{1e6 * form(h100, devices, size):,.0f}"
            for devices in (2, 4, 8, 16)
            for form in (collectives.ordered_sum, collectives.gathered_sum)
        ]
        return [f"{tokens:,}", digits(size / 1e6), *cells]

    head = ["tokens", "MB"] + [
        f"{devices} devices: {form}"
        for devices in (2, 4, 8, 16)
        for form in ("ordered", "gathered")
    ]
    return table(head, [row(tokens) for tokens in (1, 8, 16, 64, 256, 1024, 4096)])


def messages():
    """What a decode step sends: Llama-3-70B, 64 sequences, 8 H100."""
    llama, h100, context, _ = bound("llama-3-70b", "h100")
    sequences, layout = 64, Layout(tensor=8)
    hidden = SUM_BYTES * sequences * llama.hidden
    plan = plan_bytes(sequences, sequences, context)
    logits = LOGIT_BYTES * sequences * llama.vocab
    work = Work(sequences, sequences, 0, 0, sequences, sequences, True)
    within, between = (hop(llama, h100, Layout(tensor, 2), 0, work) for tensor in (4, 8))

    def row(what, count, size, seconds):
        return [
            what,
            count,
            digits(size / 1e3),
            digits(1e6 * seconds),
            digits(1e3 * count * seconds),
        ]

    rows = [
        row("plan of the step, to all", 1, plan, collectives.broadcast(h100, 8, plan)),
        row("sum of the embeddings", 1, hidden, collectives.ordered_sum(h100, 8, hidden)),
        row(
            "sum after attention or MLP, ordered",
            2 * llama.layers,
            hidden,
            collectives.ordered_sum(h100, 8, hidden),
        ),
        row(
            "the same, gathered",
            2 * llama.layers,
            hidden,
            collectives.gathered_sum(h100, 8, hidden),
        ),
        row(
            "the same, ordered, in 16 bits",
            2 * llama.layers,
            hidden / 2,
            collectives.ordered_sum(h100, 8, hidden / 2),
        ),
        row("logits of all devices", 1, logits, collectives.to_all(h100, 8, logits / 8)),
        row(
            "the best token of each device instead",
            1,
            8 * sequences,
            collectives.to_all(h100, 8, 8 * sequences),
        ),
        row("hidden states to a stage in the node", 1, hidden, within),
        row("hidden states to a stage in another node", 1, hidden, between),
    ]
    return table(["message", "per step", "size, KB", "one, us", "all, ms"], rows)


def latency():
    def cell(name, device, devices):
        m, k, context, _ = bound(name, device)
        best = layouts.fastest(m, k, devices, context)
        return f"{digits(1e3 * best[1].seconds)} ({best[0]})" if best else NONE

    rows = [
        [f"{WORKLOADS[name][0]}, {MACHINES[device]}"]
        + [cell(name, device, devices) for devices in DEVICES]
        for name, device in PAIRS
    ]
    return table(
        ["ms per token"]
        + [f"{devices} devices" if devices > 1 else "1 device" for devices in DEVICES],
        rows,
    )


def rates(name, device):
    """The largest rate of each number of devices."""
    m, k, context, limit = bound(name, device)

    found = {devices: layouts.largest_rate(m, k, devices, context, limit) for devices in DEVICES}

    def row(devices):
        layout, sequences, step = found[devices]
        kv = f"{capacity(m, k, layout) / 1e3:,.0f}"
        cells = [
            kv,
            f"{sequences:,}",
            digits(1e3 * step.seconds),
            f"{step.rate:,.0f}",
            f"{step.rate / devices:,.0f}",
        ]
        return [devices, layout, *cells, percent(step.communication_share())]

    head = [
        "devices",
        "layout",
        "KV, thousand tokens",
        "sequences",
        "ms per token",
        "tokens/s",
        "per device",
        "communication",
    ]
    too_few = ", ".join(str(devices) for devices in DEVICES if not found[devices])
    rows = [[too_few, NONE] + [""] * 6] if too_few else []
    return table(head, rows + [row(devices) for devices in DEVICES if found[devices]])


def prompts():
    def cell(name, device, devices):
        m, k, context, _ = bound(name, device)
        best, rate = layouts.fastest_prompt(m, k, devices, context), layouts.largest_prompt_rate(
            m, k, devices, context
        )
        return (
            f"{digits(1e3 * best[1].seconds)} ({best[0]}); {rate[1] / devices:,.0f}"
            if best
            else NONE
        )

    rows = [
        [f"{WORKLOADS[name][0]}, {MACHINES[device]}"]
        + [cell(name, device, devices) for devices in DEVICES]
        for name, device in PAIRS
    ]
    return table(
        ["ms; tokens/s per device"]
        + [f"{devices} devices" if devices > 1 else "1 device" for devices in DEVICES],
        rows,
    )


def choices(m, k, devices, context, limit):
    """All layouts of a number of devices."""

    def row(layout):
        sequences = layouts.most_sequences(m, k, layout, context, limit)
        one = decode(m, k, layout, 1, context).seconds
        kv = f"{capacity(m, k, layout) / 1e3:,.0f}"
        batch = ["none in time", "", ""]
        if sequences:
            step = decode(m, k, layout, sequences, context)
            batch = [
                f"{sequences:,}",
                f"{step.rate / devices:,.0f}",
                percent(step.communication_share()),
            ]
        first = prefill(m, k, layout, context).seconds
        return [
            layout,
            kv,
            digits(1e3 * one),
            *batch,
            digits(1e3 * first),
            f"{prefill_rate(m, k, layout, context) / devices:,.0f}",
        ]

    head = [
        "layout",
        "KV, thousand tokens",
        "one sequence, ms per token",
        f"sequences within {1e3 * limit:.0f} ms",
        "tokens/s per device",
        "communication",
        "first token, ms",
        "prompt tokens/s per device",
    ]
    found = layouts.fitting(m, k, devices, context)
    return table(
        head,
        [
            row(layout)
            for layout in sorted(found, key=lambda layout: (layout.pipeline, layout.data))
        ],
    )


def workload_choices(name, device, devices):
    m, k, context, limit = bound(name, device)
    return choices(m, k, devices, context, limit)


def across_nodes():
    """Tensor parallel devices in one node and in several."""
    rows = []
    for name, device, choice in (
        ("llama-3-70b", "h100", [Layout(8), Layout(8, 2), Layout(16), Layout(8, 4), Layout(32)]),
        ("llama-3.1-405b", "h100", [Layout(8, 2), Layout(16), Layout(8, 4), Layout(32)]),
    ):
        m, k, context, _ = bound(name, device)
        for layout in choice:
            steps = [decode(m, k, layout, sequences, context) for sequences in (1, 16, 64)]
            cells = [
                f"{digits(1e3 * step.seconds)} ({percent(step.communication_share())})"
                for step in steps
            ]
            rows.append(
                [f"{WORKLOADS[name][0]}, {MACHINES[device]}", layout.devices, layout, *cells]
            )
    return table(
        ["model", "devices", "layout", "1 sequence, ms per token", "16 sequences", "64 sequences"],
        rows,
    )


def compared():
    """Eight devices of each kind."""
    rows = []
    for name, weight_bytes in (
        ("llama-3-70b", 2.0),
        ("llama-3-70b", 1.0),
        ("llama-3.1-405b", 2.0),
        ("llama-3.1-405b", 1.0),
        ("deepseek-v3", 1.0),
    ):
        title = WORKLOADS[name][0] + (", fp8" if weight_bytes == 1 else "")
        for device in ("h100", "h200", "b200"):
            _, k, context, limit = bound(name, device)
            m = model.load(name, weight_bytes)
            one, many = layouts.fastest(m, k, 8, context), layouts.largest_rate(
                m, k, 8, context, limit
            )
            cells = [NONE, "", "", ""]
            if one and many:
                cells = [
                    f"{digits(1e3 * one[1].seconds)} ({one[0]})",
                    many[0],
                    f"{many[1]:,}",
                    f"{many[2].rate / 8:,.0f}",
                ]
            rows.append([title, MACHINES[device], *cells])
    return table(
        [
            "model",
            "8 devices",
            "one sequence, ms per token",
            "layout for many",
            "sequences",
            "tokens/s per device",
        ],
        rows,
    )


ALL = {
    "machines": machines,
    "models": models,
    "calibration": calibration,
    "experts-check": experts_check,
    "paper": paper,
    "sums": sums,
    "messages": messages,
    "latency": latency,
    "prompts": prompts,
    "across-nodes": across_nodes,
    "compared": compared,
    "choices-70b": lambda: workload_choices("llama-3-70b", "h100", 8),
    "choices-405b": lambda: workload_choices("llama-3.1-405b", "h100", 16),
    "choices-deepseek": lambda: workload_choices("deepseek-v3", "h200", 16),
}
ALL.update(
    {
        f"rates-{name}-{device}": (lambda name=name, device=device: rates(name, device))
        for name, device in PAIRS
    }
)
