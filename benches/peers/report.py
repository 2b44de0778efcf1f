"""Report of all runs: medians, ratios to the best other engine, and goals."""

from dataclasses import dataclass
from statistics import median

from engines import CELLS, ENGINES, ROWS
from machine import noisy

PAGEDLLM = "pagedllm"
LOWER_IS_BETTER = {"load": "s", "peak memory": "MiB"}
BOUND_BY_MEMORY = {"decode at 128", "decode at 2048"}
GOALS = {"batch": 1.5}  # ratio to the best other engine; the other rows:
GOAL = 1.2
# Minimum share of the limit. It is the only goal of load and memory, and the alternative goal of the other rows.
LIMIT_SHARES = {"load": 1 / 1.5, "peak memory": 1 / 1.1}
LIMIT_SHARE = 0.9


@dataclass
class Line:
    """Result of one row of one cell."""

    cell: str
    row: str
    values: dict  # engine -> median
    errors: dict  # engine -> error message
    noisy: list  # engines with noisy samples
    peer: str = None  # the best other engine
    ratio: float = None  # pagedllm / peer within each repetition; above 1 pagedllm is better in every row
    even: float = None  # the same, with values divided by their bandwidth
    share: float = None  # of the limit

    @property
    def met(self):
        """None if the measured values do not decide it."""
        by_floor = self.share is not None and self.share >= LIMIT_SHARES.get(self.row, LIMIT_SHARE)
        if self.row in LIMIT_SHARES:
            return None if self.share is None else by_floor
        by_peer = self.ratio is not None and self.ratio >= self.goal
        return None if self.share is None and self.ratio is None else by_floor or by_peer

    @property
    def goal(self):
        return GOALS.get(self.row, GOAL)

    @property
    def unit(self):
        return LOWER_IS_BETTER.get(self.row, "tokens/s")


def lines(runs):
    """Returns one line per row of each measured cell, in the order of the table."""
    cells = [cell for cell in CELLS if any(run["cell"] == cell for run in runs)]
    return [line(cell, row, [run for run in runs if run["cell"] == cell]) for cell in cells for row in ROWS]


def line(cell, row, runs):
    samples = {engine: samples_of(row, runs, engine) for engine in ENGINES}
    values = {engine: median(sample["value"] for sample in found.values()) for engine, found in samples.items() if found}
    errors = {run["engine"]: error for run in runs if run["engine"] not in values and (error := error_of(row, run))}
    disturbed = [engine for engine, found in samples.items() if any(map(noisy, found.values()))]
    found = Line(cell, row, values, errors, disturbed)
    peers = {engine: value for engine, value in values.items() if engine != PAGEDLLM}
    if peers:
        found.peer = (min if row in LOWER_IS_BETTER else max)(peers, key=peers.get)
        found.ratio = ratio(row, samples[PAGEDLLM], samples[found.peer], lambda sample: sample["value"])
    if found.peer and row in BOUND_BY_MEMORY:
        found.even = ratio(row, samples[PAGEDLLM], samples[found.peer], lambda sample: sample["value"] / sample["bandwidth"])
    shares = [share(row, sample) for sample in samples[PAGEDLLM].values() if sample.get("limit")]
    found.share = median(shares) if shares else None
    return found


def samples_of(row, runs, engine):
    """Returns repetition -> sample."""
    found = {run["repetition"]: run["rows"].get(row) for run in runs if run["engine"] == engine}
    return {repetition: sample for repetition, sample in found.items() if sample and "value" in sample}


def error_of(row, run):
    return run["rows"].get(row, {}).get("error") or run.get("error")


def ratio(row, own, other, number):
    """Returns the median over repetitions of the ratio within a repetition."""
    both = [number(own[repetition]) / number(other[repetition]) for repetition in own if repetition in other]
    if not both:
        return None
    return 1 / median(both) if row in LOWER_IS_BETTER else median(both)


def share(row, sample):
    part = sample["value"] / sample["limit"]
    return 1 / part if row in LOWER_IS_BETTER else part


def number(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 200 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_text(about, runs):
    table = lines(runs)
    text = [f"{about['cpu']} ({' '.join(about['vectors'])}), {about['threads']} threads, {about['date']}"]
    text += [f"{ENGINES[engine].title}: {what}" for engine, what in sorted(described(runs).items())]
    for cell in dict.fromkeys(line.cell for line in table):
        text += ["", head(cell)] + [one(line) for line in table if line.cell == cell]
    text += [""] + verdict(table)
    text += sorted({f"{ENGINES[engine].title}, {line.cell}: {error}" for line in table for engine, error in line.errors.items()})
    return "\n".join(text)


def described(runs):
    return {run["engine"]: f"{run['version']}; {run['settings']}" for run in runs if "version" in run}


def head(cell):
    engines = "".join(f"{engine.title:>11}" for engine in ENGINES.values())
    return f"{cell:<25}{engines}{'ours/best':>11}{'even':>7}{'of limit':>10}  goal"


def one(line):
    values = "".join(f"{number(line.values.get(engine)) + ('*' if engine in line.noisy else ''):>11}" for engine in ENGINES)
    shares = "-" if line.share is None else f"{100 * line.share:.0f} %"
    met = {True: "met", False: "missed", None: ""}[line.met]
    return f"{line.row:<16}{line.unit:<9}{values}{number(line.ratio):>11}{number(line.even):>7}{shares:>10}  {met}"


def verdict(table):
    judged = [line for line in table if line.met is not None]
    text = ["medians; ours/best: ratio to the best other engine; even: the same, with values divided by the bandwidth measured next to them"]
    if judged:
        text.append(f"goals met: {sum(line.met for line in judged)} of {len(judged)} ({GOAL} times the best other engine, {GOALS['batch']} in a batch, or {LIMIT_SHARE:.0%} of the limit)")
    if any(line.noisy for line in table):
        text.append("*: other processes used more than 10 % of the cores; repeat on an idle machine")
    return text


def as_json(about, runs):
    table = [{**vars(line), "unit": line.unit, "goal": line.goal, "met": line.met} for line in lines(runs)]
    return {"about": about, "table": table, "runs": runs}
