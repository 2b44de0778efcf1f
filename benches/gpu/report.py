#!/usr/bin/env python3
"""Makes a table and a JSON file of the results of a script: `report.py SCRIPT LINES_DIR RESULTS_DIR`.

Writes SCRIPT.txt and SCRIPT.json. A line of JSON is a number (part, case, unit, value, limit, shape), a number of
another engine for the same part and shape, or a verdict (ok, skipped, error). Lines of Rust test programs are verdicts,
too. A number with several other engines has a row for each of them.
"""

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ORDER = [
    "ceilings", "paged attention", "decode attention", "prefill attention", "latent attention", "thresholds", "products", "fusions",
    "draws", "prefill", "decode", "throughput", "serving", "CPU scaling", "models",
]  # fmt: skip
LESS_IS_BETTER = {"us", "ms", "error"}
TEST = re.compile(r"^test (\S+) \.\.\. (ok|FAILED)$")
FULL_LOAD = 256 << 20  # bytes of K and V


@dataclass
class Row:
    part: str
    case: str
    unit: str
    value: float
    limit: float = None
    share: float = None  # of the limit
    peer: str = None
    peer_value: float = None
    ratio: float = None  # above 1: pagedllm is better
    goal: str = ""
    met: bool = None


def main(script, lines_dir, results_dir):
    lines = [line for file in sorted(Path(lines_dir).glob("*.jsonl")) for line in read(file)]
    rows, verdicts = table(lines), [line for line in lines if {"ok", "skipped", "error"} & line.keys()]
    results, facts = Path(results_dir), about(Path(lines_dir))
    text = "\n".join([*heading({"script": script} | facts), *as_text(rows), *verdict_lines(verdicts), *summary(rows, verdicts)])
    (results / f"{script}.txt").write_text(text + "\n")
    (results / f"{script}.json").write_text(json.dumps({"about": {"script": script} | facts, "rows": [asdict(row) for row in rows], "verdicts": verdicts}, indent=1))
    print(text)
    return 1 if any(map(failed, verdicts)) else 0


def read(file):
    for line in file.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            yield parsed(line, file.stem)
        elif found := TEST.match(line):
            yield {"part": file.stem, "case": found[1], "ok": found[2] == "ok"}


def parsed(line, part):
    """Returns a line of JSON. One that is damaged, such as the last one of a part that exceeded its limit, is an error of the part."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) and "part" in found else {"part": part, "error": f"a damaged line: {line[:80]}"}


def about(lines_dir):
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        device = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        device = f"unknown: {error}"
    commit = lines_dir / "commit"
    facts = {"date": time.strftime("%F"), "device": device, "commit": commit.read_text().strip() if commit.exists() else "unknown"}
    return facts | {name: package_version(name) for name in ("torch", "transformers", "flashinfer-python")}


def package_version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def table(lines):
    peers = defaultdict(list)
    for line in lines:
        if "peer" in line:
            peers[key(line)].append(line)
    numbers = [line for line in lines if "value" in line and "peer" not in line]
    rows = [row_of(line, peer) for line in numbers for peer in peers.get(key(line), [None])]
    return sorted(rows, key=lambda row: ORDER.index(row.part) if row.part in ORDER else len(ORDER))


def key(line):
    return line["part"], json.dumps(line.get("shape"), sort_keys=True)


def row_of(line, peer):
    row = Row(line["part"], line["case"], line["unit"], line["value"], line.get("limit"))
    better = (lambda ours, other: other / ours) if row.unit in LESS_IS_BETTER else (lambda ours, other: ours / other)
    if row.limit:
        row.share = better(row.value, row.limit)
    if peer:
        row.peer, row.peer_value = peer["peer"], peer["value"]
        row.ratio = better(row.value, row.peer_value)
    row.goal, row.met = goal(row, line.get("shape") or {})
    return row


def goal(row, shape):
    """Returns the goal and whether it is met."""
    if row.part == "decode attention" and row.peer == "FlashInfer":
        return "as fast as FlashInfer", row.ratio >= 1
    if row.part == "decode attention" and row.share and shape["bytes"] >= FULL_LOAD:
        return "90 % of the limit", row.share >= 0.9
    if row.part == "decode" and row.share and shape["batch"] <= 128 and row.case.endswith("default"):
        return "1.15 times the limit", row.share >= 1 / 1.15
    if row.part == "prefill attention" and row.peer == "torch":
        return "as fast as torch", row.ratio >= 1
    if row.part == "models" and row.ratio:
        return "1.5 times bf16's error", row.ratio >= 1 / 1.5
    return "", None


def show(value, unit):
    if value is None:
        return "-"
    if unit in ("B/s", "FLOP/s"):
        return f"{value / 1e12:.2f} T{unit}"
    return f"{value:.1e}" if unit == "error" else f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def heading(facts):
    return [", ".join(f"{name} {value}" for name, value in facts.items())]


def as_text(rows):
    text = []
    for part in dict.fromkeys(row.part for row in rows):
        text += ["", f"{part:<48}{'value':>16}{'limit':>16}{'share':>8}{'peer':>16}{'ratio':>8}  peer, goal"]
        text += [one(row) for row in rows if row.part == part]
    return text


def one(row):
    share = "-" if row.share is None else f"{row.share:.0%}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    met = {True: "met", False: f"missed: {row.goal}", None: ""}[row.met]
    numbers = f"{show(row.value, row.unit):>16}{show(row.limit, row.unit):>16}{share:>8}{show(row.peer_value, row.unit):>16}{ratio:>8}"
    notes = ", ".join(filter(None, [row.peer, met]))
    return f"{row.case:<48}{numbers}  {notes}".rstrip()


def verdict_lines(verdicts):
    """Counts the properties that hold and names the others."""
    text = [""]
    for part in dict.fromkeys(line["part"] for line in verdicts):
        own = [line for line in verdicts if line["part"] == part]
        text.append(f"{part}: {sum(line.get('ok') is True for line in own)} passed, {sum(failed(line) for line in own)} failed")
        text += [f"  {problem(line)}" for line in own if line.get("ok") is not True]
    return text


def failed(line):
    return "error" in line or line.get("ok") is False


def problem(line):
    what = "skipped" if "skipped" in line else "FAILED"
    why = line.get("skipped") or line.get("error") or line.get("why") or ""
    return ": ".join(filter(None, [what, line.get("case"), why]))


def summary(rows, verdicts):
    goals = [row for row in rows if row.met is not None]
    failures = sum(map(failed, verdicts))
    text = ["", "limit: from the copy or the product of the same run; ratio: above 1 if pagedllm is better"]
    return text + [f"goals met: {sum(row.met for row in goals)} of {len(goals)}; failures: {failures}"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
