"""A section of the page for every figure of the paper.

Each function takes the numbers of its figure and a folder for its plots (or None), and returns rows of the summary and the
text. A row has the figure, the paper's number, ours, their ratio and the reason of the difference.
"""

# Figure 2: shares of the KV pool in percent: tokens, reserved, internal, external and others.
PAPER_WASTE = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "vLLM 0.1.2": (96.3, 0.0, 3.7, 0.0),
}
# Section 6.2: bands of the ratios of sustained rates on ShareGPT.
PAPER_RATIOS = {"Orca (Oracle)": (1.7, 2.7), "Orca (Max)": (2.7, 8.0), "FasterTransformer": (1.0, 22.0)}
WHY_RATES = {
    "OPT-13B": "no cost of Python per step here",
    "OPT-66B": "no cost of Python per step here",
    "OPT-175B": "its pool is large for its speed; 50 ms more per step, for Python and eight processes, would move it into the band ([ablation](#ablation))",
}
# Figure 13: requests batched at once with OPT-13B.
PAPER_BATCHED = {
    "ShareGPT": {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "vLLM 0.1.2": 30.42},
    "Alpaca": {"Orca (Max)": 7.00, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "vLLM 0.1.2": 132.44},
}
# Figure 15: blocks saved with Alpaca in percent, by number of sequences, and the ranges in the text for ShareGPT.
PAPER_SAVED = {"samples": {2: 6.09, 4: 8.53, 6: 9.79}, "beams": {2: 37.56, 4: 53.13, 6: 55.16}}
PAPER_SAVED_SHAREGPT = {"samples": (16.2, 30.5), "beams": (44.3, 66.3)}


def plots():
    """Imports the plots late, so that the check of the page needs no matplotlib."""
    import plots

    return plots


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def picture(name, text):
    return f"![{text}](evaluation/{name}.svg)\n"


def named(rows, name):
    """Returns the row of a system."""
    return next(row for row in rows if row["name"] == name)


def ratio(ours, paper):
    return f"{ours / paper:.2f}" if paper else ""


def band(value, low, high):
    return "in the band" if low <= value <= high else "outside the band"


def table_1(numbers, folder):
    rows, summary = [], []
    for row in numbers["rows"]:
        share = ratio(row["slots"], row["paper_slots"])
        rows.append([row["model"], f"{row['devices']} x {row['device']}", row["memory_gb"], row["weights_gb"], row["pool_gb"],
                     f"{row['slots']:,}", f"{row['paper_slots']:,}", share])
        summary.append([f"Table 1, {row['model']}: KV slots", f"{row['paper_slots']:,}", f"{row['slots']:,}", share,
                        "10 % of the memory stay free here"])
    text = "## Table 1: models and memory\n\nThe memory of a machine as `pagedllm-simulate` computes it. All other sections use the paper's number of slots.\n\n"
    head = ["model", "devices", "memory, GB", "weights, GB", "KV pool, GB", "KV slots", "paper", "ratio"]
    return summary, text + table(head, rows)


def figure_2(numbers, folder):
    kinds = ["tokens", "reserved", "internal", "external"]
    rows, summary = [], []
    for system in numbers["systems"]:
        paper = PAPER_WASTE.get(system["name"])
        shares = [f"{system[kind]:.1f}" for kind in kinds]
        rows.append([system["name"], *shares, " / ".join(map(str, paper)) if paper else "", f"{system['running']:.1f}"])
        if paper:
            summary.append([f"Figure 2, {system['name']}: slots with tokens", f"{paper[0]} %", f"{system['tokens']:.1f} %",
                            ratio(system["tokens"], paper[0]), "lengths are fits; here requests always wait"])
    if folder:
        drawing, (axes,) = plots().figure(1, width=5.5, height=3.2)
        labels = ["tokens", "reserved for later tokens", "internal fragmentation", "external fragmentation, free"]
        parts = {label: [system[kind] for system in numbers["systems"]] for label, kind in zip(labels, kinds)}
        plots().stacked_bars(axes, [system["name"] for system in numbers["systems"]], parts)
        plots().save(drawing, folder / "figure-2.svg", axes)
    text = """## Figure 2: waste of the KV pool

OPT-13B, ShareGPT, all requests at once: averages over the steps in which requests wait, in percent of
the pool. *Reserved*: slots that a running request fills later. *Internal*: slots that are reserved
for a request, or in its last block, and that it never fills. *External*: the rest, which is the rounding
up to a power of two and free memory.

"""
    head = ["system", "tokens", "reserved", "internal", "external", "paper (in this order)", "requests at once"]
    return summary, text + table(head, rows) + "\n" + picture("figure-2", "Shares of the KV pool by system")


def figure_11(numbers, folder):
    rows = []
    for panel in numbers["panels"]:
        for part in ("prompt", "output"):
            rows.append([panel["data"], part, panel[part]["published_mean"], panel[part]["mean"]])
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            width = panel["tokens_per_bar"]
            series = {part: [(width * (i + 0.5), share) for i, share in enumerate(panel[part]["shares"])] for part in ("prompt", "output")}
            plots().lines(axes, panel["data"], "tokens", "share of requests", series)
        plots().save(drawing, folder / "figure-11.svg", all_axes[0])
    text = """## Figure 11: lengths of requests

The data sets are not part of this repository. Lengths are log-normal fits with the published means and a
deviation of 1 in the exponent. Limits (1,024 prompt tokens, 2,048 in total) lower the means of ShareGPT.

"""
    return [], text + table(["data", "part", "published mean", "mean of the fit"], rows) + "\n" + picture("figure-11", "Distributions of lengths")


def figure_12(numbers, folder):
    head = ["model, data"] + [system["name"] for system in numbers["panels"][0]["systems"]]
    rates, ratios, summary = [], [], []
    for panel in numbers["panels"]:
        label = f"{panel['model']}, {panel['data']}"
        rates.append([label] + [system["sustained"] for system in panel["systems"]])
        ratios.append([label] + [f"{system['ratio']:.2f}" for system in panel["systems"]])
        for name, (low, high) in PAPER_RATIOS.items() if panel["data"] == "ShareGPT" else ():
            ours = named(panel["systems"], name)["ratio"]
            published = f"up to {high:g}" if low == 1.0 else f"{low} to {high:g}"
            summary.append([f"Figure 12, {panel['model']}: rate over {name}", published, f"{ours:.2f}", band(ours, low, high), WHY_RATES[panel["model"]]])
    if folder:
        columns = min(2, len(numbers["panels"]))
        drawing, all_axes = plots().figure(columns, -(-len(numbers["panels"]) // columns))
        for axes, panel in zip(all_axes, numbers["panels"]):
            plots().latency_panel(axes, f"{panel['model']}, {panel['data']}", panel["systems"], numbers["limit"])
        plots().save(drawing, folder / "figure-12.svg", all_axes[0])
    text = """## Figure 12: normalized latency by request rate

OPT-66B and OPT-175B run on 4 and 8 devices by simulated tensor parallelism. Reserving the maximum in
blocks (TensorRT-LLM) sustains as much as Orca (Max), because the maximum is a power of two.

Sustained requests per second:

"""
    text += table(head, rates) + "\nHow many times as much libpagedllm sustains:\n\n" + table(head, ratios) + "\n"
    return summary, text + picture("figure-12", "Normalized latency by request rate")


def figure_13(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        paper = PAPER_BATCHED[panel["data"]]
        for system in panel["systems"]:
            published = paper.get(system["name"])
            rows.append([panel["data"], f"{panel['rate']:.2f}", system["name"], f"{system['running']:.1f}", published or ""])
        ours = named(panel["systems"], "vLLM 0.1.2")["running"] / named(panel["systems"], "Orca (Oracle)")["running"]
        published = paper["vLLM 0.1.2"] / paper["Orca (Oracle)"]
        summary.append([f"Figure 13, {panel['data']}: batch of vLLM over Orca (Oracle)", f"{published:.2f}", f"{ours:.2f}",
                        ratio(ours, published), "rate relative to the limit of the simulated machine; Alpaca's lengths are fits"])
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            systems = panel["systems"]
            plots().bars(axes, panel["data"], [s["name"] for s in systems], [round(s["running"], 1) for s in systems], "requests at once")
        plots().save(drawing, folder / "figure-13.svg")
    text = """#WHY_RATES = {
    "OPT-13B": "no cost of Python per step here",
    "OPT-66B": "no cost of Python per step here",
    "OPT-175B": "its pool is large for its speed; 50 ms more per step, for Python and eight processes, would move it into the band ([ablation](#ablation))",
}
# Figure 13: requests batched at once

OPT-13B, at the highest rate that the policies of vLLM 0.1.2 sustain. The paper uses 2/s (ShareGPT) and
30/s (Alpaca).

"""
    return summary, text + table(["data", "rate", "system", "requests at once", "paper"], rows) + "\n" + picture("figure-13", "Requests at once")


def figure_14(numbers, folder):
    names = [system["name"] for system in numbers["panels"][0]["systems"]]
    rows = [[panel["branching"]] + [f"{s['sustained']:g} ({s['ratio']:.2f})" for s in panel["systems"]] for panel in numbers["panels"]]
    of = lambda panel: named(panel["systems"], "Orca (Oracle)")["ratio"]
    first, last = numbers["panels"][0], numbers["panels"][-1]
    summary = [
        ["Figure 14, one sequence: rate over Orca (Oracle)", "1.3", f"{of(first):.2f}", ratio(of(first), 1.3), "here memory limits the batch of short requests; in 2023 the cost of Python per sequence did"],
        [f"Figure 14, {last['branching']}: rate over Orca (Oracle)", "2.3", f"{of(last):.2f}", ratio(of(last), 2.3),
         "random scores decide which beams survive; copies of contiguous beams are free here"],
    ]
    if folder:
        panels = numbers["panels"]
        columns = min(3, len(panels))
        drawing, all_axes = plots().figure(columns, -(-len(panels) // columns), width=2.7)
        for axes, panel in zip(all_axes, panels):
            plots().latency_panel(axes, panel["branching"], panel["systems"])
        for axes in all_axes[len(panels):]:
            axes.remove()
        plots().save(drawing, folder / "figure-14.svg", all_axes[0])
    text = """## Figure 14: parallel sampling and beam search

OPT-13B, Alpaca. All sequences of a request have the same length.
Sustained requests per second, and how many times as much libpagedllm sustains:

"""
    return summary, text + table(["requests", *names], rows) + "\n" + picture("figure-14", "Latency of parallel sampling and beam search")


def figure_15(numbers, folder):
    rows, summary = [], []
    scales = sorted({row["scale"] for row in numbers["rows"] if row["scale"]})
    for row in numbers["rows"]:
        kind = "beams" if row["scale"] else "samples"
        if row["data"] == "Alpaca":
            published = f"{PAPER_SAVED[kind][row['width']]} %"
        else:
            published = "{} to {} %".format(*PAPER_SAVED_SHAREGPT[kind])
        rows.append([row["data"], row["branching"], row["scale"] or "", f"{row['saved']:.1f} %", published])
        if row["data"] == "Alpaca" and row["width"] == 6 and row["scale"] in (None, scales[-1]):
            paper = PAPER_SAVED[kind][6]
            why = "lengths are fits, and all samples of a request are as long" if kind == "samples" else f"random scores (scale {row['scale']:g}), by which beams have common ancestors sooner"
            summary.append([f"Figure 15, Alpaca, {row['branching']}: blocks saved", f"{paper} %", f"{row['saved']:.1f} %", ratio(row["saved"], paper), why])
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, data in zip(all_axes, ("Alpaca", "ShareGPT")):
            series = {}
            for row in (row for row in numbers["rows"] if row["data"] == data):
                label = f"beam search, scale {row['scale']:g}" if row["scale"] else "parallel sampling"
                series.setdefault(label, []).append((row["width"], row["saved"]))
            plots().lines(axes, data, "sequences per request", "blocks saved, %", series)
        plots().save(drawing, folder / "figure-15.svg", all_axes[0])
    text = """## Figure 15: blocks saved by sharing

The share of block table entries whose block another sequence of the same step has too. Beam search has
no real model here: scores are random, and their scale decides how much the best token stands out (it has
a mean probability of 0.38, 0.66 and 0.82). The more it stands out, the sooner all beams descend from one.

"""
    head = ["data", "requests", "scale", "saved", "paper"]
    return summary, text + table(head, rows) + "\n" + picture("figure-15", "Blocks saved by sharing")


def figure_16(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        for system in panel["systems"]:
            rows.append([panel["prefix"], system["name"], system["sustained"], f"{system['ratio']:.2f}"])
        ours = named(panel["systems"], "Orca (Oracle)")["ratio"]
        summary.append([f"Figure 16, {panel['prefix']}: rate over Orca (Oracle)", panel["paper_ratio"], f"{ours:.2f}",
                        ratio(ours, panel["paper_ratio"]), "lengths of WMT16 are estimates: the shorter an output, the more the prefix matters"])
    if folder:
        drawing, all_axes = plots().figure(2)
        for axes, panel in zip(all_axes, numbers["panels"]):
            plots().latency_panel(axes, f"{panel['prefix']}, {panel['tokens']} tokens", panel["systems"])
        plots().save(drawing, folder / "figure-16.svg", all_axes[0])
    text = f"""## Figure 16: shared prefix

LLaMA-13B, translations with one example (80 tokens) and five examples (341 tokens) as a shared prefix,
traces of {numbers['trace_seconds']:.0f} s. Sentences have about 35 tokens and translations 40.

"""
    return summary, text + table(["prefix", "system", "sustained requests/s", "ratio"], rows) + "\n" + picture("figure-16", "Latency with a shared prefix")


def figure_17(numbers, folder):
    rows = [[system["name"], system["sustained"], f"{system['ratio']:.2f}"] for system in numbers["systems"]]
    ours = named(numbers["systems"], "Orca (Oracle)")["ratio"]
    summary = [["Figure 17: rate over Orca (Oracle)", "2", f"{ours:.2f}", ratio(ours, 2), f"{100 * numbers['full_prompts']:.0f} % of the prompts have 1,024 tokens here, most have in the paper"]]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        plots().latency_panel(axes, "chat", numbers["systems"])
        plots().save(drawing, folder / "figure-17.svg", axes)
    text = f"""## Figure 17: chat

OPT-13B. A prompt is the last 1,024 tokens of a conversation with 3.5 turns on average, and an output has
at most 1,024: {numbers['mean_prompt']:.0f} and {numbers['mean_output']:.0f} on average, and {100 * numbers['full_prompts']:.0f} % of the
prompts have 1,024. Nothing is kept between turns. With such prompts, the buddy allocator reserves
2,048 tokens for nearly any prediction, so that the three variants of Orca are close.

"""
    return summary, text + table(["system", "sustained requests/s", "ratio"], rows) + "\n" + picture("figure-17", "Latency of chat")


def figure_18a(numbers, folder):
    sizes = [size for size, _ in max((row["ratios"] for row in numbers["rows"]), key=len)]
    rows, at_16 = [], []
    for row in numbers["rows"]:
        ratios = dict(map(tuple, row["ratios"]))
        rows.append([row["batch"], row["context"]] + [f"{ratios[size]:.2f}" if size in ratios else "" for size in sizes])
        at_16.append(ratios[16.0])
    low, high = min(at_16), max(at_16)
    summary = [["Figure 18a: paged over contiguous attention", "1.20 to 1.26", f"{low:.2f} to {high:.2f}", "", "a CPU kernel, blocks of 16; no GPU ran"]]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {f"{row['batch']} sequences of {row['context']}": row["ratios"] for row in numbers["rows"]}
        plots().lines(axes, "CPU attention", "block size", "time over contiguous K and V", series, log=True)
        plots().save(drawing, folder / "figure-18a.svg", axes)
    text = f"""## Figure 18a: attention kernel

Measured on the CPU: one layer with {numbers['heads']} heads of {numbers['head_dim']}, K and V in {numbers['kv_dtype']}. Time with blocks in random places
over the time with one contiguous block per sequence; medians of pairs. The kernel needs blocks of at
least 8 tokens, so that the paper's sizes 1 to 4 are missing.

"""
    head = ["sequences", "context"] + [f"block size {size:g}" for size in sizes]
    return summary, text + table(head, rows) + "\n" + picture("figure-18a", "Time of paged attention over contiguous attention")


def figure_18b(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        best = min(row["latency"] for row in panel["rows"])
        good = [row["block_size"] for row in panel["rows"] if row["latency"] < 1.15 * best]
        for row in panel["rows"]:
            rows.append([panel["data"], row["block_size"], f"{row['kernel']:.2f}", f"{row['latency']:.3f}", row["sustained"]])
        published = "16 to 128" if panel["data"] == "ShareGPT" else "16 and 32"
        summary.append([f"Figure 18b, {panel['data']}: best block sizes (within 15 %)", published, f"{good[0]} to {good[-1]}", "", "kernel times are those of the CPU"])
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {panel["data"]: [(row["block_size"], row["latency"]) for row in panel["rows"]] for panel in numbers["panels"]}
        plots().lines(axes, "", "block size", "seconds per token", series, log=True)
        plots().save(drawing, folder / "figure-18b.svg", axes)
    text = """## Figure 18b: block size

OPT-13B, at the rate that blocks of 16 sustain. The time to read K and V is multiplied by that of the CPU
kernel with this block size over contiguous K and V (16 sequences of 512 tokens). Larger blocks waste
more of the pool, above all with the short requests of Alpaca. The engine has blocks of 8 to 256.

"""
    head = ["data", "block size", "kernel time", "seconds per token", "sustained requests/s"]
    return summary, text + table(head, rows) + "\n" + picture("figure-18b", "Latency by block size")


def figure_19a(numbers, folder):
    rows = []
    for row in numbers["rows"]:
        swap = row["swap_out_ms"] + row["swap_in_ms"]
        rows.append([row["block_size"], row["swap_out_ms"], row["swap_in_ms"], row["recompute_ms"], f"{row['recompute_ms'] / swap:.2f}"])
    worst = max(row["recompute_ms"] / (row["swap_out_ms"] + row["swap_in_ms"]) for row in numbers["rows"])
    best = [row["block_size"] for row in numbers["rows"] if row["recompute_ms"] < row["swap_out_ms"] + row["swap_in_ms"]]
    summary = [["Figure 19a: recomputation is faster up to blocks of", "32 or so", max(best, default="none"), "", "5 us per copy and PCIe 4.0 by data sheet"],
               ["Figure 19a: most time of recomputation over swapping", "1.2", f"{worst:.2f}", ratio(worst, 1.2), "the data sheet's PCIe bandwidth favours swapping"]]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {
            "recompute": [(row["block_size"], row["recompute_ms"]) for row in numbers["rows"]],
            "swap out and in": [(row["block_size"], row["swap_out_ms"] + row["swap_in_ms"]) for row in numbers["rows"]],
        }
        plots().lines(axes, "", "block size", "ms", series, log=True)
        plots().save(drawing, folder / "figure-19a.svg", axes)
    text = f"""## Figure 19a: one sequence swapped or recomputed

{numbers['tokens']} tokens of OPT-13B on the simulated machine. Each block is two copies per layer, with 5 us each and 32 GB/s.

"""
    head = ["block size", "swap out, ms", "swap in, ms", "recompute, ms", "recompute / swap"]
    return summary, text + table(head, rows) + "\n" + picture("figure-19a", "Time to swap and to recompute")


def figure_19b(numbers, folder):
    rows = [[row["block_size"], f"{row['recompute']:.3f}", f"{row['swap']:.3f}", f"{row['ratio']:.2f}", row["recomputed"], row["swapped"]] for row in numbers["rows"]]
    worst = max(row["ratio"] for row in numbers["rows"])
    summary = [["Figure 19b: most latency of recomputation over swapping", "comparable from 16 to 64", f"{worst:.2f}", "", "a preemption takes a small part of a request's time"]]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {kind: [(row["block_size"], row[kind]) for row in numbers["rows"]] for kind in ("recompute", "swap")}
        plots().lines(axes, "", "block size", "seconds per token", series, log=True)
        plots().save(drawing, folder / "figure-19b.svg", axes)
    text = f"""## Figure 19b: swapping and recomputation end to end

OPT-13B, ShareGPT, {numbers['rate']:.2f} requests/s, 2 % above the sustained rate.

"""
    head = ["block size", "recompute, s per token", "swap, s per token", "ratio", "preemptions (recompute)", "preemptions (swap)"]
    return summary, text + table(head, rows) + "\n" + picture("figure-19b", "Latency with swapping and with recomputation")


def ablation(numbers, folder):
    rows = [[row["model"], row["factor"], row["sustained"], *(f"{row[key]:.2f}" for key in ("oracle", "pow2", "max"))] for row in numbers["rows"]]
    text = """## Ablation

ShareGPT, one change at a time. "Reserved in blocks" shows what contiguity costs Orca: with the length
known, the difference to the first row is the rounding up to a power of two, and it moves the ratio over
Orca (Oracle) into the band of the paper. What a step costs besides memory reads moves all ratios: a
constant cost makes large batches worth more, and K and V make them worth less.

"""
    return [], text + table(["model", "change", "sustained requests/s", "over Orca (Oracle)", "over Orca (Pow2)", "over Orca (Max)"], rows)


def today(numbers, folder):
    goodput, conversations, priorities = numbers["goodput"], numbers["conversations"], numbers["priorities"]
    dashes = lambda values: " / ".join(f"{value:.0f}" for value in values)
    goodput_rows = [[row["batching"], row["goodput"], dashes(row["ttft_ms"]), dashes(row["tpot_ms"]), f"{row['gap_p99_ms']:.0f}"] for row in goodput["rows"]]
    chat_rows = [[row["name"], "on" if row["prefix_cache"] else "off", row["sustained"], f"{row['ttft_p50_ms']:.0f}"] for row in conversations["rows"]]
    priority_rows = [[row["order"], f"{100 * row['load']:.0f} %", f"{row['urgent_ttft_s']:.2f}", f"{row['other_ttft_s']:.2f}", f"{row['latency']:.3f}"] for row in priorities["rows"]]
    if folder:
        drawing, (left, right) = plots().figure(2, width=4.0, height=3.2)
        plots().bars(left, "goodput", [row["batching"].split(" (")[0] for row in goodput["rows"]], [round(row["goodput"], 2) for row in goodput["rows"]], "requests per second")
        names = [f"{row['name']}, cache {'on' if row['prefix_cache'] else 'off'}" for row in conversations["rows"]]
        plots().bars(right, "conversations", names, [round(row["sustained"], 2) for row in conversations["rows"]], "sustained requests per second")
        plots().save(drawing, folder / "today.svg")
    text = f"""## Today: batching, prefix cache, priorities

OPT-13B, ShareGPT. Speculation and the split of prefill and decode are not here, because the engine has
neither yet.

Goodput is the highest rate at which {100 * goodput['share']:.0f} % of the requests have their first token within
{goodput['ttft_limit_ms']} ms and a mean time per output token (TPOT) of at most {goodput['tpot_limit_ms']} ms. Percentiles 50 / 90 / 99 at this
rate:

"""
    text += table(["batching", "goodput, requests/s", "first token, ms", "TPOT, ms", "gap between tokens p99, ms"], goodput_rows)
    text += f"""
Conversations of up to {conversations['turns']} turns with their whole history, and 30 s between turns on average:

"""
    text += table(["system", "prefix cache", "sustained requests/s", "first token p50, ms"], chat_rows)
    text += f"""
One request in ten is urgent (priority 5). The load is relative to the sustained {priorities['limit']:.2f} requests/s; mean time to
first token:

"""
    text += table(["order", "load", "urgent, s", "others, s", "seconds per token, all"], priority_rows)
    return [], text + "\n" + picture("today", "Goodput by batching, and sustained rates of conversations")


def engine(numbers, folder):
    rows = [[row["name"], row["requests_per_second"], f"{row['ratio']:.2f}", f"{row['latency']:.3f}", f"{row['running']:.1f}", row["preemptions"]] for row in numbers["rows"]]
    over = named(numbers["rows"], "Orca (Oracle)")["ratio"], named(numbers["rows"], "Orca (Max)")["ratio"]
    summary = [["CPU engine: rate over Orca (Oracle), (Max)", "", f"{over[0]:.2f}, {over[1]:.2f}", "",
                "a smaller pool, and a CPU gains less from large batches"]]
    if folder:
        drawing, (axes,) = plots().figure(1, width=5.0, height=3.2)
        plots().bars(axes, "CPU engine", [row["name"] for row in numbers["rows"]], [row["requests_per_second"] for row in numbers["rows"]], "requests per second")
        plots().save(drawing, folder / "engine.svg")
    text = f"""## The CPU engine

Measured: model {numbers['model']}, {numbers['requests']} requests at once, lengths of ShareGPT divided by four (at most 512
tokens), a pool of {numbers['pool_tokens']:,} tokens. The engine computes every token; only the policies differ.
The pool has two sequences of the maximum length: two cores gain little from a batch above 15, so that
with the pool of the paper (7 sequences) no policy is faster than another.

"""
    head = ["system", "requests/s", "ratio", "seconds per token", "requests at once", "preemptions"]
    return summary, text + table(head, rows) + "\n" + picture("engine", "Rates of the CPU engine by policy")


ALL = [table_1, figure_2, figure_11, figure_12, figure_13, figure_14, figure_15, figure_16, figure_17, figure_18a, figure_18b,
       figure_19a, figure_19b, ablation, today, engine]
