"""Sections beyond the paper: ablation, later policies, and the CPU engine."""

from page_format import named, picture, plots, rate, table


def ablation(numbers, folder):
    keys = ("oracle", "pow2", "max")
    rows = [
        [
            f"{row['model']}, {row['data']}",
            row["factor"],
            rate(row["sustained"]),
            *(f"{row[key]:.2f}" for key in keys),
        ]
        for row in numbers["rows"]
    ]
    text = """## Ablation

Each row changes the experiment of its first row in one way, and the fourth in three (all of the
bandwidth and of the operations of the data sheet, and no overlap). What the rows show:

- Orca (Oracle) is in the band of the paper because its memory is contiguous: if it reserved blocks, the
  ratio would be that of the second row. Contiguous memory costs the rounding up to a power of two, and
  free chunks that are too small.
- The dearer a step is besides reading K and V, the more a large batch is worth.
- The larger the pool, the less paging is worth.
- The wider the distribution of Alpaca's lengths is, the larger is the ratio, since a few long requests
  need large chunks. With 0.7 times the deviation, or 0.2 ms more per token, it is near the paper's 1.3.
- With half the pool, or 20 ms more per step, OPT-175B is in the band of the paper.

"""
    head = [
        "model, data",
        "change",
        "sustained requests/s",
        "over Orca (Oracle)",
        "over Orca (Pow2)",
        "over Orca (Max)",
    ]
    return [], text + table(head, rows)


def today(numbers, folder):
    goodput, conversations, priorities = (
        numbers["goodput"],
        numbers["conversations"],
        numbers["priorities"],
    )
    dashes = lambda values: " / ".join(f"{value:.0f}" for value in values)
    goodput_rows = [
        [
            row["batching"],
            rate(row["goodput"]),
            dashes(row["ttft_ms"]),
            dashes(row["tpot_ms"]),
            f"{row['gap_p99_ms']:.0f}",
        ]
        for row in goodput["rows"]
    ]
    chat_rows = [
        [
            row["name"],
            "on" if row["prefix_cache"] else "off",
            rate(row["sustained"]),
            f"{row['ttft_p50_ms']:.0f}",
        ]
        for row in conversations["rows"]
    ]
    priority_rows = [
        [
            row["order"],
            f"{100 * row['load']:.0f} %",
            f"{row['urgent_ttft_s']:.2f}",
            f"{row['other_ttft_s']:.2f}",
            f"{row['latency']:.3f}",
        ]
        for row in priorities["rows"]
    ]
    if folder:
        drawing, (left, right) = plots().figure(2, width=4.0, height=3.2)
        plots().bars(
            left,
            "goodput",
            [row["batching"].split(" (")[0] for row in goodput["rows"]],
            [round(row["goodput"], 2) for row in goodput["rows"]],
            "requests per second",
        )
        names = [
            f"{row['name']}, cache {'on' if row['prefix_cache'] else 'off'}"
            for row in conversations["rows"]
        ]
        plots().bars(
            right,
            "conversations",
            names,
            [round(row["sustained"], 2) for row in conversations["rows"]],
            "sustained requests per second",
        )
        plots().save(drawing, folder / "today.svg")
    text = f"""## Today: batching, prefix cache, priorities

OPT-13B, ShareGPT. Speculation and the split of prefill and decode are not here, because the engine has
neither yet.

Goodput is the highest rate at which {100 * goodput["share"]:.0f} % of the requests have their first token within
{goodput["ttft_limit_ms"]} ms and a mean time per output token (TPOT) of at most {goodput["tpot_limit_ms"]} ms. Percentiles 50 / 90 / 99 at this
rate:

"""
    text += table(
        [
            "batching",
            "goodput, requests/s",
            "first token, ms",
            "TPOT, ms",
            "gap between tokens p99, ms",
        ],
        goodput_rows,
    )
    text += f"""
Conversations of up to {conversations["turns"]} turns with their whole history. From one question to the next one pass one
to three minutes. The pool is too small to keep many conversations for so long:

"""
    text += table(
        ["system", "prefix cache", "sustained requests/s", "first token p50, ms"], chat_rows
    )
    text += f"""
One request in ten is urgent (priority 5). The load is relative to the sustained {priorities["limit"]:.2f} requests/s. A level
of priority equals 10 s of waiting, so that beyond the limit, urgent requests wait too when others have
waited for 50 s. Mean time to first token:

"""
    text += table(
        ["order", "load", "urgent, s", "others, s", "seconds per token, all"], priority_rows
    )
    return [], text + "\n" + picture(
        "today", "Goodput by batching, and sustained rates of conversations"
    )


def engine(numbers, folder):
    rows, summary = [], []
    for panel in numbers["panels"]:
        for row in panel["rows"]:
            rows.append(
                [
                    f"{panel['pool_tokens']:,}",
                    row["name"],
                    rate(row["requests_per_second"]),
                    f"{row['ratio']:.2f}",
                    f"{row['latency']:.3f}",
                    f"{row['running']:.1f}",
                    row["preemptions"],
                ]
            )
        over = [named(panel["rows"], name)["ratio"] for name in ("Orca (Oracle)", "Orca (Max)")]
        what = f"CPU engine, pool of {panel['pool_sequences']} sequences: rate over Orca (Oracle), (Max)"
        summary.append(
            [
                what,
                "",
                f"{over[0]:.2f}, {over[1]:.2f}",
                "",
                "measured; a CPU gains less from large batches",
            ]
        )
    if folder:
        drawing, all_axes = plots().figure(2, height=3.0)
        for axes, panel in zip(all_axes, numbers["panels"]):
            names = [row["name"] for row in panel["rows"]]
            values = [row["requests_per_second"] for row in panel["rows"]]
            plots().bars(
                axes,
                f"pool of {panel['pool_tokens']:,} tokens",
                names,
                values,
                "requests per second",
            )
        plots().save(drawing, folder / "engine.svg")
    text = f"""## The CPU engine

Measured on two cores, one run per row: model {numbers["model"]}, {numbers["requests"]} requests at once, lengths of ShareGPT
divided by four (at most 512 tokens). The engine computes every token; only the policies differ. The
larger pool has seven sequences of the maximum length, as the paper's. There, batches are beyond the size
from which two cores gain little, so that the order of the policies shows in the smaller pool.

"""
    head = [
        "pool, tokens",
        "system",
        "requests/s",
        "ratio",
        "seconds per token",
        "requests at once",
        "preemptions",
    ]
    return summary, text + table(head, rows) + "\n" + picture(
        "engine", "Rates of the CPU engine by policy"
    )
