"""Sections on memory, lengths, rates and sharing: Table 1 and Figures 2 to 17."""

from page_format import band, named, picture, plots, rate, ratio, table

# Figure 2: shares of the KV pool in percent: tokens, reserved, internal, external and others.
PAPER_WASTE = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "vLLM 0.1.2": (96.3, 0.0, 3.7, 0.0),
}
# Section 6.2: bands of the ratios of sustained rates on ShareGPT.
PAPER_RATIOS = {
    "Orca (Oracle)": (1.7, 2.7),
    "Orca (Max)": (2.7, 8.0),
    "FasterTransformer": (1.0, 22.0),
}
# Why a model is outside the band.
WHY_RATES = {
    "OPT-175B": "its pool is large for its speed; half the pool, or 20 ms more per step, move it into the band ([ablation](#ablation))",
}
# Figure 13: requests batched at once with OPT-13B.
PAPER_BATCHED = {
    "ShareGPT": {
        "Orca (Max)": 7.00,
        "Orca (Pow2)": 9.81,
        "Orca (Oracle)": 13.62,
        "vLLM 0.1.2": 30.42,
    },
    "Alpaca": {
        "Orca (Max)": 7.00,
        "Orca (Pow2)": 43.24,
        "Orca (Oracle)": 72.75,
        "vLLM 0.1.2": 132.44,
    },
}
# Figure 15: blocks saved with Alpaca in percent, by number of sequences, and the ranges in the text for ShareGPT.
PAPER_SAVED = {"samples": {2: 6.09, 4: 8.53, 6: 9.79}, "beams": {2: 37.56, 4: 53.13, 6: 55.16}}
PAPER_SAVED_SHAREGPT = {"samples": (16.2, 30.5), "beams": (44.3, 66.3)}
# Figures 14, 16 and 17: ratios of sustained rates over Orca (Oracle).
PAPER_SAMPLING = {"one sequence": 1.3, "beam search, width 6": 2.3}
PAPER_PREFIX = {"one shot": 1.67, "five shots": 3.58}
PAPER_CHAT = 2.0


def table_1(numbers, folder):
    rows, summary = [], []
    for row in numbers["rows"]:
        share = ratio(row["slots"], row["paper_slots"])
        rows.append(
            [
                row["model"],
                f"{row['devices']} x {row['device']}",
                row["memory_gb"],
                row["weights_gb"],
                row["pool_gb"],
                f"{row['slots']:,}",
                f"{row['paper_slots']:,}",
                share,
            ]
        )
        summary.append(
            [
                f"Table 1, {row['model']}: KV slots",
                f"{row['paper_slots']:,}",
                f"{row['slots']:,}",
                share,
                "10 % of the memory stays free here",
            ]
        )
    text = "## Table 1: models and memory\n\nThe memory of a machine as `pagedllm-simulate` computes it. All other sections use the paper's number of slots.\n\n"
    head = [
        "model",
        "devices",
        "memory, GB",
        "weights, GB",
        "KV pool, GB",
        "KV slots",
        "paper",
        "ratio",
    ]
    return summary, text + table(head, rows)


def figure_2(numbers, folder):
    kinds = ["tokens", "reserved", "internal", "external"]
    rows, summary = [], []
    for system in numbers["systems"]:
        paper = PAPER_WASTE.get(system["name"])
        shares = [f"{system[kind]:.1f}" for kind in kinds]
        rows.append(
            [
                system["name"],
                *shares,
                " / ".join(map(str, paper)) if paper else "",
                f"{system['running']:.1f}",
            ]
        )
        if paper:
            summary.append(
                [
                    f"Figure 2, {system['name']}: slots with tokens",
                    f"{paper[0]} %",
                    f"{system['tokens']:.1f} %",
                    ratio(system["tokens"], paper[0]),
                    "lengths are fits; here requests always wait",
                ]
            )
    if folder:
        drawing, (axes,) = plots().figure(1, width=5.5, height=3.2)
        labels = [
            "tokens",
            "reserved for later tokens",
            "internal fragmentation",
            "external fragmentation, free",
        ]
        parts = {
            label: [system[kind] for system in numbers["systems"]]
            for label, kind in zip(labels, kinds)
        }
        plots().stacked_bars(axes, [system["name"] for system in numbers["systems"]], parts)
        plots().save(drawing, folder / "figure-2.svg", axes)
    text = """## Figure 2: waste of the KV pool

OPT-13B, ShareGPT, all requests at once: averages over the steps in which requests wait, in percent of
the pool. *Reserved*: slots that a running request fills later. *Internal*: slots that are reserved
for a request, or in its last block, and that it never fills. *External*: the rest, which is the rounding
up to a power of two and free memory.

"""
    head = [
        "system",
        "tokens",
        "reserved",
        "internal",
        "external",
        "paper (in this order)",
        "requests at once",
    ]
    return summary, text + table(head, rows) + "\n" + picture(
        "figure-2", "Shares of the KV pool by system"
    )


def figure_11(numbers, folder):
    rows = []
    for panel in numbers["panels"]:
        for part in ("prompt", "output"):
            rows.append([panel["data"], part, panel[part]["published_mean"], panel[part]["mean"]])
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            width = panel["tokens_per_bar"]
            series = {
                part: [(width * (i + 0.5), share) for i, share in enumerate(panel[part]["shares"])]
                for part in ("prompt", "output")
            }
            plots().lines(axes, panel["data"], "tokens", "share of requests", series)
        plots().save(drawing, folder / "figure-11.svg", all_axes[0])
    text = """## Figure 11: lengths of requests

The data sets are not part of this repository. Lengths are log-normal fits with the published means and a
deviation of 1 in the exponent. Limits (1,024 prompt tokens, 2,048 in total) lower the means of ShareGPT.

"""
    return [], text + table(
        ["data", "part", "published mean", "mean of the fit"], rows
    ) + "\n" + picture("figure-11", "Distributions of lengths")


def figure_12(numbers, folder):
    head = ["model, data"] + [system["name"] for system in numbers["panels"][0]["systems"]]
    rates, ratios, summary = [], [], []
    for panel in numbers["panels"]:
        label = f"{panel['model']}, {panel['data']}"
        rates.append([label] + [rate(system["sustained"]) for system in panel["systems"]])
        ratios.append([label] + [f"{system['ratio']:.2f}" for system in panel["systems"]])
        for name, (low, high) in PAPER_RATIOS.items() if panel["data"] == "ShareGPT" else ():
            ours = named(panel["systems"], name)["ratio"]
            published = f"up to {high:g}" if low == 1.0 else f"{low} to {high:g}"
            why = (
                ""
                if low <= ours <= high
                else WHY_RATES.get(panel["model"], "see [ablation](#ablation)")
            )
            what = f"Figure 12, {panel['model']}: rate over {name}"
            summary.append([what, published, f"{ours:.2f}", band(ours, low, high), why])
    if folder:
        columns = min(2, len(numbers["panels"]))
        drawing, all_axes = plots().figure(columns, -(-len(numbers["panels"]) // columns))
        for axes, panel in zip(all_axes, numbers["panels"]):
            title = f"{panel['model']}, {panel['data']}"
            plots().latency_panel(axes, title, panel["systems"], numbers["limit"])
        plots().save(drawing, folder / "figure-12.svg", all_axes[0])
    text = """## Figure 12: normalized latency by request rate

OPT-66B and OPT-175B run on 4 and 8 devices by simulated tensor parallelism. Reserving the maximum in
blocks (TensorRT-LLM) sustains as much as Orca (Max), because the maximum is a power of two.

Sustained requests per second:

"""
    text += (
        table(head, rates)
        + "\nHow many times as much libpagedllm sustains:\n\n"
        + table(head, ratios)
        + "\n"
    )
    return summary, text + picture("figure-12", "Normalized latency by request rate")


def figure_13(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        paper = PAPER_BATCHED[panel["data"]]
        for system in panel["systems"]:
            published = paper.get(system["name"])
            running = f"{system['running']:.1f}"
            rows.append(
                [panel["data"], rate(panel["rate"]), system["name"], running, published or ""]
            )
        running = {system["name"]: system["running"] for system in panel["systems"]}
        ours = running["vLLM 0.1.2"] / running["Orca (Oracle)"]
        published = paper["vLLM 0.1.2"] / paper["Orca (Oracle)"]
        what = f"Figure 13, {panel['data']}: batch of vLLM over Orca (Oracle)"
        why = "" if panel["data"] == "ShareGPT" else "lengths are fits: see [ablation](#ablation)"
        summary.append([what, f"{published:.2f}", f"{ours:.2f}", ratio(ours, published), why])
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            names = [system["name"] for system in panel["systems"]]
            values = [round(system["running"], 1) for system in panel["systems"]]
            plots().bars(axes, panel["data"], names, values, "requests at once")
        plots().save(drawing, folder / "figure-13.svg")
    text = """## Figure 13: requests batched at once

OPT-13B, at the highest rate that the policies of vLLM 0.1.2 sustain. The paper uses 2/s (ShareGPT) and
30/s (Alpaca), which are near the limit of its machine.

"""
    head = ["data", "rate", "system", "requests at once", "paper"]
    return summary, text + table(head, rows) + "\n" + picture("figure-13", "Requests at once")


def figure_14(numbers, folder):
    panels = numbers["panels"]
    names = [system["name"] for system in panels[0]["systems"]]
    cell = lambda system: f"{rate(system['sustained'])} ({system['ratio']:.2f})"
    rows = [
        [panel["branching"]] + [cell(system) for system in panel["systems"]] for panel in panels
    ]
    summary = []
    for panel in panels:
        paper = PAPER_SAMPLING.get(panel["branching"])
        if paper:
            ours = named(panel["systems"], "Orca (Oracle)")["ratio"]
            what = f"Figure 14, {panel['branching']}: rate over Orca (Oracle)"
            why = "lengths are fits, and a token costs less here: see [ablation](#ablation)"
            summary.append([what, paper, f"{ours:.2f}", ratio(ours, paper), why])
    if folder:
        columns = min(3, len(panels))
        drawing, all_axes = plots().figure(columns, -(-len(panels) // columns), width=2.7)
        for axes, panel in zip(all_axes, panels):
            plots().latency_panel(axes, panel["branching"], panel["systems"])
        for axes in all_axes[len(panels) :]:
            axes.remove()
        plots().save(drawing, folder / "figure-14.svg", all_axes[0])
    text = """## Figure 14: parallel sampling and beam search

OPT-13B, Alpaca. All sequences of a request have the same length. The scores of beam search are random
(scale 2.0, see figure 15), and Orca copies beams in no time. Sustained requests per second, and how
many times as much libpagedllm sustains:

"""
    return summary, text + table(["requests", *names], rows) + "\n" + picture(
        "figure-14", "Latency of parallel sampling and beam search"
    )


def figure_15(numbers, folder):
    rows, summary = [], []
    for row in numbers["rows"]:
        kind = "beams" if row["scale"] else "samples"
        if row["data"] == "Alpaca":
            published = f"{PAPER_SAVED[kind][row['width']]} %"
        else:
            published = "{} to {} %".format(*PAPER_SAVED_SHAREGPT[kind])
        rows.append(
            [row["data"], row["branching"], row["scale"] or "", f"{row['saved']:.1f} %", published]
        )
        if row["data"] == "Alpaca" and row["width"] == 6 and row["scale"] in (None, 2.0):
            paper = PAPER_SAVED[kind][6]
            why = "lengths are fits, and all samples of a request have the same length"
            if kind == "beams":
                why = "scores are random (scale 2.0)"
            summary.append(
                [
                    f"Figure 15, Alpaca, {row['branching']}: blocks saved",
                    f"{paper} %",
                    f"{row['saved']:.1f} %",
                    ratio(row["saved"], paper),
                    why,
                ]
            )
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, data in zip(all_axes, ("Alpaca", "ShareGPT")):
            series = {}
            for row in (row for row in numbers["rows"] if row["data"] == data):
                label = (
                    f"beam search, scale {row['scale']:g}" if row["scale"] else "parallel sampling"
                )
                series.setdefault(label, []).append((row["width"], row["saved"]))
            plots().lines(axes, data, "sequences per request", "blocks saved, %", series)
        plots().save(drawing, folder / "figure-15.svg", all_axes[0])
    text = """## Figure 15: blocks saved by sharing

The share of block table entries whose block another sequence of the same step has too. Beam search has
no real model here: scores are random, and their scale decides how much the best token stands out. It has
a mean probability of 0.38, 0.66 and 0.82. This matters little: from the first to the last scale, the
savings fall by a few percent.

"""
    head = ["data", "requests", "scale", "saved", "paper"]
    return summary, text + table(head, rows) + "\n" + picture(
        "figure-15", "Blocks saved by sharing"
    )


def figure_16(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        for system in panel["systems"]:
            rows.append(
                [
                    panel["prefix"],
                    system["name"],
                    rate(system["sustained"]),
                    f"{system['ratio']:.2f}",
                ]
            )
        ours, paper = (
            named(panel["systems"], "Orca (Oracle)")["ratio"],
            PAPER_PREFIX[panel["prefix"]],
        )
        what = f"Figure 16, {panel['prefix']}: rate over Orca (Oracle)"
        summary.append(
            [what, paper, f"{ours:.2f}", ratio(ours, paper), "lengths of WMT16 are estimates"]
        )
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            plots().latency_panel(
                axes, f"{panel['prefix']}, {panel['tokens']} tokens", panel["systems"]
            )
        plots().save(drawing, folder / "figure-16.svg", all_axes[0])
    text = """## Figure 16: shared prefix

LLaMA-13B, translations with one example (80 tokens) and five examples (341 tokens) as a shared prefix.
Sentences have about 35 tokens and translations 40. The paper does not state these lengths.

"""
    head = ["prefix", "system", "sustained requests/s", "ratio"]
    return summary, text + table(head, rows) + "\n" + picture(
        "figure-16", "Latency with a shared prefix"
    )


def figure_17(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        full = f"{100 * panel['full_prompts']:.0f} %"
        for system in panel["systems"]:
            lengths = f"{panel['mean_prompt']:.0f}, {panel['mean_output']:.0f}"
            rows.append(
                [
                    panel["turns"],
                    lengths,
                    full,
                    system["name"],
                    rate(system["sustained"]),
                    f"{system['ratio']:.2f}",
                ]
            )
        ours = named(panel["systems"], "Orca (Oracle)")["ratio"]
        what = f"Figure 17, {panel['turns']:g} turns: rate over Orca (Oracle)"
        summary.append(
            [
                what,
                PAPER_CHAT,
                f"{ours:.2f}",
                ratio(ours, PAPER_CHAT),
                "steps with a larger batch take longer here; see [ablation](#ablation)",
            ]
        )
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            plots().latency_panel(axes, f"{panel['turns']:g} turns on average", panel["systems"])
        plots().save(drawing, folder / "figure-17.svg", all_axes[0])
    text = """## Figure 17: chat

OPT-13B. A prompt is the last 1,024 tokens of a conversation, and an output has at most 1,024. The
number of turns is geometric, with two means. Nothing is kept between turns. For a prompt of 1,024
tokens, the buddy allocator reserves 2,048 tokens whatever the prediction is.

"""
    head = [
        "turns",
        "mean prompt, output",
        "full prompts",
        "system",
        "sustained requests/s",
        "ratio",
    ]
    return summary, text + table(head, rows) + "\n" + picture("figure-17", "Latency of chat")
