#!/usr/bin/env python3
"""Runs pagedllm and other engines in turn, cell by cell, and prints a comparison. benches/README.md describes it."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import machine
import picture
import report
from engines import CELLS, ENGINES, ROOT, ROWS, RunFailed

RESULTS = ROOT / "target" / "bench-results" / "peers.json"
WORKLOAD = ROOT / "benches" / "cpu" / "workload.json"


def arguments(given):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=some_of(CELLS), default=CELLS, help="of " + ",".join(CELLS))
    parser.add_argument("--engines", type=some_of(ENGINES), default=list(ENGINES), help="of " + ",".join(ENGINES))
    parser.add_argument("--rows", type=some_of(ROWS), default=ROWS, help="of " + ",".join(ROWS) + "; pagedllm runs every row")
    parser.add_argument("--reps", type=int, default=3, help="repetitions; in each, the engines run in turn")
    parser.add_argument("--tries", type=int, default=3, help="maximum number of runs of a noisy row")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--resume", action="store_true", help="continue that file: run only what is missing or has failed")
    parser.add_argument("--report-only", action="store_true", help="run nothing; print the report of that file")
    parser.add_argument("--picture", type=Path, help="draw the table as an SVG file")
    return parser.parse_args(given)


def some_of(known):
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown name {unknown[0]}; use {', '.join(known)}")
        return names

    return parse


class Results:
    """The file of all runs. It is written after each run, so that an interruption loses at most one."""

    def __init__(self, path, about, runs):
        self.path, self.about, self.runs = path, about, runs

    @staticmethod
    def read(path):
        if not path.exists():
            sys.exit(f"{path} does not exist; run without --report-only first")
        saved = json.loads(path.read_text())
        return Results(path, saved["about"], saved["runs"])

    def has(self, cell, engine, repetition):
        return any(same(run, cell, engine, repetition) and not failed(run) for run in self.runs)

    def put(self, run):
        """Adds a run. It replaces an earlier run of the same engine, cell and repetition."""
        key = run["cell"], run["engine"], run["repetition"]
        self.runs = [other for other in self.runs if not same(other, *key)] + [run]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report.as_json(self.about, self.runs), indent=1) + "\n")
        unfinished.replace(self.path)


def same(run, cell, engine, repetition):
    return (run["cell"], run["engine"], run["repetition"]) == (cell, engine, repetition)


def failed(run):
    return "error" in run or any("error" in row for row in run["rows"].values())


def measure(engine, cell, repetition, options, workload):
    """Runs a cell and repeats its noisy rows up to `tries` times. Keeps the sample with the least noise."""
    run = {"cell": cell, "engine": engine.name, "repetition": repetition, "started": time.strftime("%F %T"), "rows": {}}
    wanted = options.rows
    for _ in range(options.tries):
        try:
            now = engine.run(cell, wanted, options.threads, workload, seed=repetition)
        except RunFailed as error:
            return {**run, "error": str(error)}
        rows = {**run["rows"], **{name: quieter(row, run["rows"].get(name)) for name, row in now["rows"].items()}}
        run |= {**now, "rows": rows}
        wanted = [name for name, row in rows.items() if machine.noisy(row)]
        if not wanted:
            break
    return run


def quieter(new, old):
    if old is None:
        return new
    return old if "error" in new or machine.noise(old) < machine.noise(new) else new


def bench(options, results):
    workload = json.loads(WORKLOAD.read_text())
    for repetition in range(1, options.reps + 1):
        for cell in options.cells:
            for engine in map(ENGINES.get, options.engines):
                if not engine.supports(cell) or results.has(cell, engine.name, repetition):
                    continue
                print(f"repetition {repetition} of {options.reps}: {engine.title}, {cell}", file=sys.stderr, flush=True)
                results.put(measure(engine, cell, repetition, options, workload))


def keep_earlier(path):
    """Renames earlier results, because they took hours."""
    if path.exists():
        path.replace(path.with_suffix(".previous.json"))


def about(options):
    return {"cpu": machine.cpu_name(), "vectors": machine.cpu_vectors(), "threads": options.threads, "date": time.strftime("%F")}


def main(given=None):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # also ends a running engine
    options = arguments(given)
    if options.report_only or (options.resume and options.json.exists()):
        results = Results.read(options.json)
    else:
        keep_earlier(options.json)
        results = Results(options.json, about(options), [])
    if not options.report_only:
        bench(options, results)
    print(report.as_text(results.about, results.runs))
    if options.picture:
        options.picture.write_text(picture.draw(results.about, results.runs))
        print(f"saved as {options.picture}")
    return 0 if not any(failed(run) for run in results.runs) else 1


if __name__ == "__main__":
    sys.exit(main())
