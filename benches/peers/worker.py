#!/usr/bin/env python3
"""Measures the rows of one cell with one engine: `worker.py JOB`. JOB is a JSON file that names the file of the answer. It runs in its own
process, with the Python of the engine.

An engine is a module with a class

    class Engine:
        version                 # name and version of the engine
        settings                # settings that matter for its results
        __init__(model, size)   # loads the model
        run(requests)           # [(prompt, tokens)], all together -> the times of each request's tokens (time.perf_counter)

It samples greedily, ignores end-of-sequence tokens, and keeps no state between calls.
"""

import importlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass

import machine

VOCABULARY = 32_000
DECODED = 64  # timed tokens after the first, as in benches/cpu

SINGLES = [  # prompt, tokens, repetitions (the median counts), rows; as in benches/cpu
    (512, 1, 3, {"prefill 512": "prefill"}),
    (128, 1 + DECODED, 1, {"decode at 128": "decode"}),
    (2048, 1 + DECODED, 1, {"prefill 2048": "prefill", "decode at 2048": "decode"}),
]


@dataclass
class Size:
    """Required capacity of an engine."""

    threads: int
    sequences: int
    positions: int  # total of all sequences that run together


def size_of(job):
    batch = sum(prompt + tokens for prompt, tokens in job["batch"])
    single = max(prompt + tokens for prompt, tokens, _, _ in SINGLES)
    return Size(job["threads"], len(job["batch"]), max(batch, single))


class Cell:
    def __init__(self, job):
        self.job, self.wanted, self.rows = job, set(job["rows"]), {}
        self.random = random.Random(job["seed"])

    def measure(self):
        engine = self.load()
        for prompt, tokens, times, rows in SINGLES:
            if self.wanted & set(rows):
                self.attempt(rows, lambda: self.single(engine, prompt, tokens, times, rows))
        if "batch" in self.wanted:
            self.attempt(["batch"], lambda: self.batch(engine))
        self.rows["peak memory"] = {"value": machine.peak_mebibytes(), "bandwidth": None, "noise": {}}
        rows = {name: row for name, row in self.rows.items() if name in self.wanted}
        return {"version": engine.version, "settings": engine.settings, "rows": rows}

    def load(self):
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        module = importlib.import_module(self.job["module"])
        machine.touch_memory_in_child(self.job["memory"])
        with machine.NoiseMonitor() as monitor:
            start = time.perf_counter()
            engine = module.Engine(self.job["model"], size_of(self.job))
            seconds = time.perf_counter() - start
        self.rows["load"] = {"value": seconds, "bandwidth": None, "noise": monitor.noise}
        return engine

    def attempt(self, rows, work):
        """Measures rows. If that fails, the rows contain the error, and the other rows are still measured."""
        try:
            work()
        except Exception as error:
            self.rows.update({row: {"error": f"{type(error).__name__}: {error}"} for row in rows})

    def single(self, engine, prompt, tokens, times, rows):
        engine.run(self.requests([(prompt, 2)]))  # warm-up: compiles and allocates for this length
        runs = [self.alone(engine, prompt, tokens) for _ in range(times)]
        rates, about = sorted(runs, key=lambda run: run[0]["prefill"])[times // 2]
        self.rows.update({row: {"value": rates[rate], **about} for row, rate in rows.items()})

    def alone(self, engine, prompt, tokens):
        start, [times], about = self.timed(engine, [(prompt, tokens)])
        rates = {"prefill": prompt / (times[0] - start)}
        if tokens > 1:
            rates["decode"] = (tokens - 1) / (times[-1] - times[0])
        return rates, about

    def batch(self, engine):
        start, times, about = self.timed(engine, self.job["batch"])
        end = max(token_times[-1] for token_times in times)
        self.rows["batch"] = {"value": sum(map(len, times)) / (end - start), **about}

    def requests(self, lengths):
        return [([self.random.randrange(3, VOCABULARY) for _ in range(prompt)], tokens) for prompt, tokens in lengths]

    def timed(self, engine, lengths):
        requests = self.requests(lengths)
        before = machine.bandwidth(self.job["probe"])
        with machine.NoiseMonitor() as monitor:
            start = time.perf_counter()
            times = engine.run(requests)
        bandwidth = (before + machine.bandwidth(self.job["probe"])) / 2
        counts, expected = [len(token_times) for token_times in times], [tokens for _, tokens in lengths]
        if counts != expected:
            raise ValueError(f"wrong token counts ({counts}, expected {expected})")
        return start, times, {"bandwidth": round(bandwidth, 1), "noise": monitor.noise}


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    answer = Cell(job).measure()
    with open(job["answer"], "w") as file:
        json.dump(answer, file)
    # Skips the shutdown of the engines, because some hang or abort. The answer is already written.
    os._exit(0)


if __name__ == "__main__":
    main()
