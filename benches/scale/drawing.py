"""The plot of docs/scale.md, in the style of the evaluation's plots."""

import hashlib
import json
import re
import sys
from pathlib import Path

import layouts
from tables import DEVICES, MACHINES, PAIRS, WORKLOADS, bound

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "docs" / "scale.svg"


def series():
    """Returns by name and number of devices: ms per token, and tokens per second and device."""
    latencies, rates = {}, {}
    for name, device in PAIRS:
        m, k, context, limit = bound(name, device)
        title = f"{WORKLOADS[name][0]}, {MACHINES[device]}"
        ones = [(devices, layouts.fastest(m, k, devices, context)) for devices in DEVICES]
        many = [
            (devices, layouts.largest_rate(m, k, devices, context, limit)) for devices in DEVICES
        ]
        latencies[title] = [
            (devices, round(1e3 * best[1].seconds, 2)) for devices, best in ones if best
        ]
        rates[title] = [
            (devices, round(best[2].rate / devices, 1)) for devices, best in many if best
        ]
    return latencies, rates


def digest():
    return hashlib.sha256(json.dumps(series()).encode()).hexdigest()[:16]


def is_stale():
    """Returns whether the plot has other numbers. It contains a digest of its own."""
    found = re.search(r"numbers ([0-9a-f]{16})", FILE.read_text()) if FILE.exists() else None
    return found is None or found[1] != digest()


def draw():
    sys.path.append(str(ROOT / "benches" / "paper"))
    import plots

    drawing, (left, right) = plots.figure(2, width=4.2, height=3.4)
    latencies, rates = series()
    colours = plots.OTHERS + ["#8a5a44"]
    for axes, lines in ((left, latencies), (right, rates)):
        for number, (name, points) in enumerate(lines.items()):
            style = {"color": colours[number], "marker": "os^DvPX*"[number], "label": name}
            axes.plot(*zip(*points), linestyle="-" if number % 2 else "--", **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(DEVICES, [str(devices) for devices in DEVICES])
        axes.set_xlabel("devices")
    left.set(title="one sequence", ylabel="ms per token")
    right.set(title="as many sequences as are in time", ylabel="tokens per second and device")
    for axes, ticks in ((left, (5, 10, 20, 40)), (right, (100, 200, 500, 1000, 2000))):
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    plots.save(
        drawing,
        FILE,
        legend_of=left,
        creator="benches/scale/scale.py",
        description=f"numbers {digest()}",
    )
