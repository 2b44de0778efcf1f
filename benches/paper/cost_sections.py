"""Sections on the costs of paging: Figures 18 and 19."""

from page_format import picture, plots, rate, ratio, table


def figure_18a(numbers, folder):
    sizes = [size for size, _ in max((row["ratios"] for row in numbers["rows"]), key=len)]
    rows, at_16 = [], []
    for row in numbers["rows"]:
        ratios = dict(map(tuple, row["ratios"]))
        rows.append(
            [row["batch"], row["context"]]
            + [f"{ratios[size]:.2f}" if size in ratios else "" for size in sizes]
        )
        at_16.append(ratios[16.0])
    low, high = min(at_16), max(at_16)
    summary = [
        [
            "Figure 18a: paged over contiguous attention",
            "1.20 to 1.26",
            f"{low:.2f} to {high:.2f}",
            "",
            "a CPU kernel, blocks of 16; no GPU ran",
        ]
    ]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {
            f"{row['batch']} sequences of {row['context']}": row["ratios"]
            for row in numbers["rows"]
        }
        plots().lines(
            axes, "CPU attention", "block size", "time over contiguous K and V", series, log=True
        )
        plots().save(drawing, folder / "figure-18a.svg", axes)
    text = f"""## Figure 18a: attention kernel

Measured on the CPU: one layer with {numbers["heads"]} heads of {numbers["head_dim"]}, K and V in {numbers["kv_dtype"]}. Time with blocks in random places
over the time with one contiguous block per sequence; medians of pairs. The kernel needs blocks of at
least 8 tokens, so that the paper's sizes 1 to 4 are missing.

"""
    head = ["sequences", "context"] + [f"block size {size:g}" for size in sizes]
    return summary, text + table(head, rows) + "\n" + picture(
        "figure-18a", "Time of paged attention over contiguous attention"
    )


def figure_18b(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        best = min(row["latency"] for row in panel["rows"])
        good = [row["block_size"] for row in panel["rows"] if row["latency"] < 1.15 * best]
        for row in panel["rows"]:
            rows.append(
                [
                    panel["data"],
                    row["block_size"],
                    f"{row['kernel']:.2f}",
                    f"{row['latency']:.3f}",
                    rate(row["sustained"]),
                ]
            )
        published = "16 to 128" if panel["data"] == "ShareGPT" else "16 and 32"
        summary.append(
            [
                f"Figure 18b, {panel['data']}: best block sizes (within 15 %)",
                published,
                ", ".join(map(str, good)),
                "",
                "kernel times are those of the CPU",
            ]
        )
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {
            panel["data"]: [(row["block_size"], row["latency"]) for row in panel["rows"]]
            for panel in numbers["panels"]
        }
        plots().lines(axes, "", "block size", "seconds per token", series, log=True)
        plots().save(drawing, folder / "figure-18b.svg", axes)
    text = """## Figure 18b: block size

OPT-13B, at the rate that blocks of 16 sustain. The time to read K and V is scaled by the measured ratio
of paged to contiguous attention on the CPU (16 sequences of 512 tokens). Larger blocks waste more of the
pool, above all with the short requests of Alpaca. The engine has blocks of 8 to 256.

"""
    head = ["data", "block size", "kernel time", "seconds per token", "sustained requests/s"]
    return summary, text + table(head, rows) + "\n" + picture("figure-18b", "Latency by block size")


def figure_19a(numbers, folder):
    rows = []
    for row in numbers["rows"]:
        swap = row["swap_out_ms"] + row["swap_in_ms"]
        rows.append(
            [
                row["block_size"],
                row["swap_out_ms"],
                row["swap_in_ms"],
                row["recompute_ms"],
                f"{row['recompute_ms'] / swap:.2f}",
            ]
        )
    worst = max(
        row["recompute_ms"] / (row["swap_out_ms"] + row["swap_in_ms"]) for row in numbers["rows"]
    )
    best = [
        row["block_size"]
        for row in numbers["rows"]
        if row["recompute_ms"] < row["swap_out_ms"] + row["swap_in_ms"]
    ]
    summary = [
        [
            "Figure 19a: recomputation is faster up to blocks of",
            "32 or so",
            max(best, default="none"),
            "",
            "5 us per copy and PCIe 4.0 by data sheet",
        ],
        [
            "Figure 19a: most time of recomputation over swapping",
            "1.2",
            f"{worst:.2f}",
            ratio(worst, 1.2),
            "the data sheet's PCIe bandwidth favours swapping",
        ],
    ]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {
            "recompute": [(row["block_size"], row["recompute_ms"]) for row in numbers["rows"]],
            "swap out and in": [
                (row["block_size"], row["swap_out_ms"] + row["swap_in_ms"])
                for row in numbers["rows"]
            ],
        }
        plots().lines(axes, "", "block size", "ms", series, log=True)
        plots().save(drawing, folder / "figure-19a.svg", axes)
    text = f"""## Figure 19a: one sequence swapped or recomputed

{numbers["tokens"]} tokens of OPT-13B on the simulated machine. Each block is two copies per layer, with 5 us each and 32 GB/s.

"""
    head = ["block size", "swap out, ms", "swap in, ms", "recompute, ms", "recompute / swap"]
    return summary, text + table(head, rows) + "\n" + picture(
        "figure-19a", "Time to swap and to recompute"
    )


def figure_19b(numbers, folder):
    rows = [
        [
            row["block_size"],
            f"{row['recompute']:.3f}",
            f"{row['swap']:.3f}",
            f"{row['ratio']:.2f}",
            row["recomputed"],
            row["swapped"],
        ]
        for row in numbers["rows"]
    ]
    worst = max(row["ratio"] for row in numbers["rows"])
    summary = [
        [
            "Figure 19b: most latency of recomputation over swapping",
            "comparable from 16 to 64",
            f"{worst:.2f}",
            "",
            "a preemption takes a small part of a request's time",
        ]
    ]
    if folder:
        drawing, (axes,) = plots().figure(1, width=4.5, height=3.0)
        series = {
            kind: [(row["block_size"], row[kind]) for row in numbers["rows"]]
            for kind in ("recompute", "swap")
        }
        plots().lines(axes, "", "block size", "seconds per token", series, log=True)
        plots().save(drawing, folder / "figure-19b.svg", axes)
    text = f"""## Figure 19b: swapping and recomputation end to end

OPT-13B, ShareGPT, {numbers["rate"]:.2f} requests/s, 2 % above the sustained rate.

"""
    head = [
        "block size",
        "recompute, s per token",
        "swap, s per token",
        "ratio",
        "preemptions (recompute)",
        "preemptions (swap)",
    ]
    return summary, text + table(head, rows) + "\n" + picture(
        "figure-19b", "Latency with swapping and with recomputation"
    )
