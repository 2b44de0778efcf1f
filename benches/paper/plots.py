"""Plots of the evaluation, in one style that is readable on light and dark pages."""

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

# Contrast of at least 4 on white and on black.
INK = "#7a7f87"
COLOURS = {
    "libpagedllm": "#2b83f6",
    "vLLM 0.1.2": "#d2691e",
    "TensorRT-LLM, reserved": "#a58c10",
    "Orca (Oracle)": "#2a9d5c",
    "Orca (Pow2)": "#a565d8",
    "Orca (Max)": "#e0457b",
    "FasterTransformer": INK,
}
MARKERS = dict(zip(COLOURS, "os^DvPX"))
OTHERS = ["#2b83f6", "#d2691e", "#2a9d5c", "#a565d8", "#e0457b", "#a58c10", INK]

pyplot.rcParams.update(
    {
        # The same numbers give the same file.
        "svg.hashsalt": "pagedllm",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "axes.titlecolor": INK,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
        "lines.markersize": 3.5,
        "lines.linewidth": 1.4,
    }
)


def figure(columns, rows=1, width=3.1, height=2.5):
    """Returns a figure and its axes, as a list."""
    drawing, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    return drawing, list(axes.flat)


def save(drawing, path, legend_of=None, creator="benches/paper/report.py", description=None):
    """Writes the SVG. The lines of one panel stand for those of all panels in the legend below."""
    if legend_of is not None:
        handles, labels = legend_of.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
    metadata = {"Date": None, "Creator": creator, "Description": description}
    drawing.savefig(path, transparent=True, metadata=metadata)
    pyplot.close(drawing)


def latency_panel(axes, title, systems, limit=None):
    """Draws normalized latency by request rate, a line per system."""
    for number, system in enumerate(systems):
        name = system["name"]
        colour = COLOURS.get(name, OTHERS[number % len(OTHERS)])
        rates, latencies = zip(*system["curve"])
        axes.plot(rates, latencies, color=colour, marker=MARKERS.get(name, "o"), label=name)
    if limit is not None:
        axes.axhline(limit, color=INK, linewidth=0.7, linestyle=":")
    axes.set(
        title=title,
        xlabel="requests per second",
        ylabel="seconds per token",
        ylim=(0, 0.5),
        xlim=(0, None),
    )


def bars(axes, title, names, values, ylabel):
    """Draws a bar per name, with its value."""
    colours = [COLOURS.get(name, OTHERS[number % len(OTHERS)]) for number, name in enumerate(names)]
    drawn = axes.bar(range(len(names)), values, color=colours)
    axes.bar_label(drawn, [f"{value:g}" for value in values], color=INK, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set(title=title, ylabel=ylabel)


def stacked_bars(axes, names, parts):
    """Draws a bar per name, of parts in percent."""
    base = [0.0] * len(names)
    for colour, (label, values) in zip(
        [OTHERS[0], OTHERS[5], OTHERS[4], "#7a7f8780"], parts.items()
    ):
        axes.bar(range(len(names)), values, bottom=base, color=colour, label=label)
        base = [below + value for below, value in zip(base, values)]
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set(ylabel="share of the KV pool, %", ylim=(0, 100))


def lines(axes, title, xlabel, ylabel, series, log=False):
    """Draws lines by name, each a list of (x, y)."""
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points)
        axes.plot(xs, ys, color=OTHERS[number % len(OTHERS)], marker="o", label=name)
    if log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
