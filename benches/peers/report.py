"""What the runs say: medians, how many times the best peer ours is, and whether that meets the goal."""

from dataclasses import dataclass
from statistics import median

from engines import CELLS, ENGINES, ROWS
from machine import noisy

OURS = "pagedllm"
LESS_IS_BETTER = {"load": "s", "peak memory": "MiB"}
BOUND_BY_MEMORY = {"decode at 128", "decode at 2048"}
GOALS = {"batch": 1.5}  # times the best peer; elsewhere:
GOAL = 1.2
# The share of the floor that is as good as the goal, and what load and memory are judged by alone.
FLOORS = {"load": 1 / 1.5, "peak memory": 1 / 1.1}
FLOOR = 0.9


@dataclass
class Line:
    """One row of one cell."""

    cell: str
    row: str
    values: dict  # engine -> median
    errors: dict  # engine -> why there is no value
    noisy: list  # engines that others disturbed
    peer: str = None  # the best
    ratio: float = None  # ours over it, within each repetition; over 1 is better, also where less is
    even: float = None  # the same, each divided by the bandwidth beside it
    share: float = None  # of the floor

    @property
    def met(self):
        """None where nothing was measured that could tell."""
        by_floor = self.share is not None and self.share >= FLOORS.get(self.row, FLOOR)
        if self.row in FLOORS:
            return None if self.share is None else by_floor
        by_peer = self.ratio is not None and self.ratio >= self.goal
        return None if self.share is None and self.ratio is None else by_floor or by_peer

    @property
    def goal(self):
        return GOALS.get(self.row, GOAL)

    @property
    def unit(self):
        return LESS_IS_BETTER.get(self.row, "tokens/s")


def lines(runs):
    """One for each row of each cell that was run, in the table's order."""
    cells = [cell for cell in CELLS if any(run["cell"] == cell for run in runs)]
    return [line(cell, row, [run for run in runs if run["cell"] == cell]) for cell in cells for row in ROWS]


def line(cell, row, runs):
    samples = {engine: samples_of(row, runs, engine) for engine in ENGINES}
    values = {engine: median(sample["value"] for sample in of.values()) for engine, of in samples.items() if of}
    errors = {run["engine"]: why for run in runs if run["engine"] not in values and (why := error_of(row, run))}
    disturbed = [engine for engine, of in samples.items() if any(map(noisy, of.values()))]
    found = Line(cell, row, values, errors, disturbed)
    peers = {engine: value for engine, value in values.items() if engine != OURS}
    if peers:
        found.peer = (min if row in LESS_IS_BETTER else max)(peers, key=peers.get)
        found.ratio = ratio(row, samples[OURS], samples[found.peer], lambda sample: sample["value"])
    if found.peer and row in BOUND_BY_MEMORY:
        found.even = ratio(row, samples[OURS], samples[found.peer], lambda sample: sample["value"] / sample["bandwidth"])
    shares = [share(row, sample) for sample in samples[OURS].values() if sample.get("limit")]
    found.share = median(shares) if shares else None
    return found


def samples_of(row, runs, engine):
    """repetition -> sample"""
    found = {run["repetition"]: run["rows"].get(row) for run in runs if run["engine"] == engine}
    return {repetition: sample for repetition, sample in found.items() if sample and "value" in sample}


def error_of(row, run):
    return run["rows"].get(row, {}).get("error") or run.get("error")


def ratio(row, ours, theirs, number):
    """Of what ran beside each other; the median of the repetitions."""
    both = [number(ours[repetition]) / number(theirs[repetition]) for repetition in ours if repetition in theirs]
    if not both:
        return None
    return 1 / median(both) if row in LESS_IS_BETTER else median(both)


def share(row, sample):
    part = sample["value"] / sample["limit"]
    return 1 / part if row in LESS_IS_BETTER else part


def number(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 200 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_text(about, runs):
    table = lines(runs)
    text = [f"{about['cpu']} ({' '.join(about['vectors'])}), {about['threads']} threads, {about['date']}"]
    text += [f"{ENGINES[engine].title}: {what}" for engine, what in sorted(described(runs).items())]
    for cell in dict.fromkeys(line.cell for line in table):
        text += ["", head(cell)] + [one(line) for line in table if line.cell == cell]
    text += [""] + verdict(table)
    text += sorted({f"{ENGINES[engine].title}, {line.cell}: {why}" for line in table for engine, why in line.errors.items()})
    return "\n".join(text)


def described(runs):
    return {run["engine"]: f"{run['version']}; {run['settings']}" for run in runs if "version" in run}


def head(cell):
    engines = "".join(f"{engine.title:>11}" for engine in ENGINES.values())
    return f"{cell:<25}{engines}{'ours/best':>11}{'even':>7}{'of floor':>10}  goal"


def one(line):
    values = "".join(f"{number(line.values.get(engine)) + ('*' if engine in line.noisy else ''):>11}" for engine in ENGINES)
    shares = "-" if line.share is None else f"{100 * line.share:.0f} %"
    met = {True: "met", False: "missed", None: ""}[line.met]
    return f"{line.row:<16}{line.unit:<9}{values}{number(line.ratio):>11}{number(line.even):>7}{shares:>10}  {met}"


def verdict(table):
    judged = [line for line in table if line.met is not None]
    said = ["medians; best: the best peer; even: the same where both are divided by the bandwidth probed beside them"]
    if judged:
        said.append(f"goals met: {sum(line.met for line in judged)} of {len(judged)} ({GOAL} times the best peer, {GOALS['batch']} in a batch, or {FLOOR:.0%} of the floor)")
    if any(line.noisy for line in table):
        said.append("*: others used more than a tenth of the cores; measure again on a quiet machine")
    return said


def as_json(about, runs):
    table = [{**vars(line), "unit": line.unit, "goal": line.goal, "met": line.met} for line in lines(runs)]
    return {"about": about, "table": table, "runs": runs}
