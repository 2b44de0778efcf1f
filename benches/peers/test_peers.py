"""Tests of the driver, the worker and the report without other engines: `python3 -m unittest discover -s benches/peers`."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import engines
import machine
import picture
import report
import run

ABOUT = {"cpu": "a CPU & more", "vectors": ["avx2"], "threads": 2, "date": "2026-11-22"}

# Returns fixed token times: half a second after the call, then every 10 ms. The batch has one token too few.
SCRIPTED_ENGINE = """
import time
class Engine:
    version, settings = "scripted 1", "none"
    def __init__(self, model, size):
        assert (size.threads, size.sequences, size.positions) == (2, 2, 2048 + 65), size
    def run(self, requests):
        start = time.perf_counter() + 0.5
        short = len(requests) > 1
        assert all(0 <= token < 32000 for prompt, _ in requests for token in prompt)
        return [[start + 0.01 * i for i in range(tokens - short)] for _, tokens in requests]
"""


class Worker(unittest.TestCase):
    def answer(self, rows):
        with tempfile.TemporaryDirectory() as work:
            Path(work, "scripted_engine.py").write_text(SCRIPTED_ENGINE)
            probe, job, answer = (Path(work, name) for name in ("probe", "job", "answer"))
            probe.write_text("#!/bin/sh\necho 20.0\n")
            probe.chmod(0o755)
            about = {"module": "scripted_engine", "model": "m", "threads": 2, "seed": 1, "batch": [[4, 3], [5, 2]], "probe": str(probe), "memory": 1 << 20}
            job.write_text(json.dumps({**about, "rows": rows, "answer": str(answer)}))
            environment = {**os.environ, "PYTHONPATH": work}
            subprocess.run([sys.executable, engines.HERE / "worker.py", job], env=environment, check=True)
            return json.loads(answer.read_text())

    def test_rates_are_computed_from_token_times(self):
        rows = self.answer(engines.ROWS)["rows"]
        self.assertEqual(set(rows), set(engines.ROWS))
        self.assertAlmostEqual(rows["prefill 512"]["value"], 1024, delta=30)
        self.assertAlmostEqual(rows["prefill 2048"]["value"], 4096, delta=120)
        self.assertAlmostEqual(rows["decode at 128"]["value"], 100, places=3)
        self.assertAlmostEqual(rows["decode at 2048"]["value"], 100, places=3)
        self.assertEqual(rows["decode at 2048"]["bandwidth"], 20)
        self.assertGreater(rows["peak memory"]["value"], 1)

    def test_a_wrong_token_count_fails_only_its_row(self):
        rows = self.answer(["batch", "decode at 128"])["rows"]
        self.assertEqual(set(rows), {"batch", "decode at 128"})
        self.assertIn("wrong token counts ([2, 1], expected [3, 2])", rows["batch"]["error"])
        self.assertIn("value", rows["decode at 128"])


class Scripted:
    """An engine with fixed answers. It records its requests."""

    def __init__(self, name, *answers):
        self.name, self.title, self.answers, self.calls = name, name, list(answers), []

    def supports(self, cell):
        return True

    def run(self, cell, rows, threads, workload, seed):
        self.calls.append((cell, rows, seed))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"version": "1", "settings": "", "rows": {row: sample for row, sample in answer.items() if row in rows}}


def sample(value, other=0.0, bandwidth=20.0, **more):
    return {"value": value, "bandwidth": bandwidth, "noise": {"other": other, "steal": 0.0}, **more}


class Driver(unittest.TestCase):
    def run_with(self, scripted, *more):
        with tempfile.TemporaryDirectory() as work, mock.patch.dict(run.ENGINES, {engine.name: engine for engine in scripted}):
            saved = Path(work, "results.json")
            given = ["--cells", "S-int8", "--engines", ",".join(engine.name for engine in scripted), "--json", str(saved), "--reps", "1"]
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
                code = run.main(given + list(more))
                again = run.main(given + ["--resume", *more])
            return code, again, json.loads(saved.read_text()), text.getvalue()

    def test_only_noisy_rows_are_repeated_and_the_quietest_sample_is_kept(self):
        first = {"prefill 512": sample(100), "batch": sample(50, other=0.5), "load": sample(1, other=0.2)}
        engine = Scripted("vllm", first, {"batch": sample(60, other=0.3), "load": sample(2)}, {"batch": sample(70, other=0.4)})
        code, again, saved, text = self.run_with([engine], "--tries", "3")
        self.assertEqual([rows for _, rows, _ in engine.calls[1:]], [["batch", "load"], ["batch"]])
        rows = saved["runs"][0]["rows"]
        self.assertEqual({row: rows[row]["value"] for row in rows}, {"prefill 512": 100, "batch": 60, "load": 2})
        self.assertEqual((code, again), (0, 0))
        self.assertIn("60.0*", text)

    def test_one_row_can_be_selected(self):
        engine = Scripted("vllm", {"load": sample(1), "batch": sample(60)})
        _, _, saved, _ = self.run_with([engine], "--rows", "load")
        self.assertEqual(engine.calls[0][1], ["load"])
        self.assertEqual(list(saved["runs"][0]["rows"]), ["load"])

    def test_a_failed_engine_is_named_and_runs_again_on_resume(self):
        bad = Scripted("openvino", engines.RunFailed("openvino on S-int8 ended with 1: no such thing"), {"batch": sample(9)})
        good = Scripted("vllm", {"batch": sample(8)})
        code, again, saved, text = self.run_with([bad, good])
        self.assertEqual((code, again), (1, 0))
        self.assertIn("no such thing", text)
        self.assertEqual((len(bad.calls), len(good.calls)), (2, 1))
        self.assertEqual({entry["engine"]: entry["rows"]["batch"]["value"] for entry in saved["runs"]}, {"openvino": 9, "vllm": 8})

    def test_only_two_engines_run_cells_of_gguf_files(self):
        supported = {cell: [name for name, engine in engines.ENGINES.items() if engine.supports(cell)] for cell in engines.CELLS}
        self.assertEqual(supported["S-int4"], list(engines.ENGINES))
        self.assertEqual(supported["M-q4_k_m"], ["pagedllm", "llama_cpp"])

    def test_a_new_run_keeps_the_earlier_results(self):
        with tempfile.TemporaryDirectory() as work:
            path = Path(work, "peers.json")
            path.write_text("five hours")
            run.keep_earlier(path)
            self.assertFalse(path.exists())
            self.assertEqual(Path(work, "peers.previous.json").read_text(), "five hours")

    def test_a_failed_program_is_reported_by_its_last_error(self):
        script = "import sys; print('loading'); sys.stderr.write('ValueError: 3 is not 4\\n\\n  bye\\n'); sys.exit(7)"
        with self.assertRaisesRegex(engines.RunFailed, "x ended with 7: ValueError: 3 is not 4"):
            engines.execute([sys.executable, "-c", script], {}, "x")

    def test_results_of_the_cpu_benchmark_have_the_format_of_a_worker(self):
        entry = {"name": "batch", "unit": "tokens/s", "samples": [{"value": 5.0, "limit": 8.0, "bandwidth_gb_s": 21.0, "noise": {"other": 0.0, "steal": 0.0}}]}
        other = {"name": "decode 32", "samples": []}
        saved = {"version": "1.0", "isa": "avx2", "kv_dtype": "bf16", "cells": [{"cell": "S-int8", "rows": [entry, other]}]}
        found = engines.convert_own_results(saved, "S-int8", ["batch"])
        self.assertEqual(found["rows"], {"batch": {"value": 5.0, "limit": 8.0, "bandwidth": 21.0, "noise": {"other": 0.0, "steal": 0.0}}})


def entry(engine, repetition, **rows):
    names = {row.replace(" ", "_"): row for row in engines.ROWS}
    return {"cell": "M-int4", "engine": engine, "repetition": repetition, "version": "1", "settings": "", "rows": {names[row]: of for row, of in rows.items()}}


class Report(unittest.TestCase):
    def line(self, row, runs):
        [found] = [line for line in report.lines(runs) if line.row == row]
        return found

    def test_a_ratio_is_the_median_of_the_ratios_within_repetitions(self):
        ours = [entry("pagedllm", i, decode_at_128=sample(value)) for i, value in enumerate((20, 60, 30))]
        theirs = [entry("llama_cpp", i, decode_at_128=sample(value)) for i, value in enumerate((10, 40, 30))]
        slower = [entry("vllm", 0, decode_at_128=sample(25))]
        found = self.line("decode at 128", ours + theirs + slower)
        self.assertEqual((found.peer, found.values["pagedllm"], found.ratio), ("llama_cpp", 30, 1.5))

    def test_the_ratio_at_even_bandwidth_removes_the_effect_of_faster_memory(self):
        runs = [entry("pagedllm", 1, decode_at_128=sample(20, bandwidth=40)), entry("vllm", 1, decode_at_128=sample(10, bandwidth=20))]
        found = self.line("decode at 128", runs)
        self.assertEqual((found.ratio, found.even), (2, 1))

    def test_lower_load_and_memory_are_better(self):
        runs = [entry("pagedllm", 1, load=sample(2, limit=1.5)), entry("vllm", 1, load=sample(9)), entry("openvino", 1, load=sample(4))]
        found = self.line("load", runs)
        self.assertEqual((found.peer, found.ratio, found.share), ("openvino", 2, 0.75))
        self.assertTrue(found.met)

    def test_a_goal_is_met_by_the_ratio_to_the_best_engine_or_by_the_share_of_the_limit(self):
        for ours, limit, met in ((12, 100, True), (11, 100, False), (9.5, 10, True)):
            runs = [entry("pagedllm", 1, prefill_512=sample(ours, limit=limit)), entry("vllm", 1, prefill_512=sample(10))]
            self.assertEqual(self.line("prefill 512", runs).met, met, (ours, limit))
        batch = [entry("pagedllm", 1, batch=sample(14, limit=100)), entry("vllm", 1, batch=sample(10))]
        self.assertFalse(self.line("batch", batch).met)

    def test_without_own_results_there_is_no_verdict(self):
        runs = [entry("vllm", 1, batch=sample(10))]
        self.assertIsNone(self.line("batch", runs).met)
        self.assertNotIn("goals met", report.as_text(ABOUT, runs))

    def test_the_text_marks_noisy_values_and_names_errors(self):
        failed = {"cell": "M-int4", "engine": "openvino", "repetition": 1, "rows": {}, "error": "it has no wheels"}
        text = report.as_text(ABOUT, [entry("vllm", 1, batch=sample(10, other=0.2), load={"error": "late"}), failed])
        for text_part in ("10.0*", "OpenVINO, M-int4: it has no wheels", "vLLM, M-int4: late"):
            self.assertIn(text_part, text)


class Picture(unittest.TestCase):
    def test_bar_lengths_are_proportional_to_speed_and_numbers_are_printed(self):
        runs = [entry("pagedllm", 1, batch=sample(30)), entry("vllm", 1, batch=sample(20)), entry("llama_cpp", 1, batch=sample(10))]
        svg = ElementTree.fromstring(picture.draw(ABOUT, runs))
        space = "{http://www.w3.org/2000/svg}"
        lengths = {bar.get("class"): float(bar.get("width")) for bar in svg.iter(f"{space}rect") if float(bar.get("y")) > picture.TOP}
        self.assertAlmostEqual(lengths["pagedllm"] / lengths["vllm"], 1.5, places=2)
        self.assertAlmostEqual(lengths["llama_cpp"] / lengths["vllm"], 0.5, places=2)
        texts = [text.text for text in svg.iter(f"{space}text")]
        self.assertLessEqual({"30.0", "20.0", "10.0", "M, int4"}, set(texts))
        self.assertIn("a CPU & more (avx2), 2 threads, 2026-11-22", texts)

    def test_bars_and_numbers_stay_inside_the_picture(self):
        runs = [entry("pagedllm", 1, batch=sample(300)), entry("vllm", 1, batch=sample(20))]
        svg = ElementTree.fromstring(picture.draw(ABOUT, runs))
        for bar in svg.iter("{http://www.w3.org/2000/svg}rect"):
            self.assertLess(float(bar.get("x")) + float(bar.get("width")) + picture.VALUE, float(svg.get("width")))


class Machine(unittest.TestCase):
    def test_ticks_of_an_ended_child_count_as_own_ticks(self):
        before = machine.own_ticks()
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
        self.assertGreaterEqual(machine.own_ticks() - before, 0.25 * os.sysconf("SC_CLK_TCK"))

    def test_more_than_a_tenth_of_the_cores_is_noise(self):
        self.assertTrue(machine.noisy({"noise": {"other": 0.0, "steal": 0.2}}))
        self.assertFalse(machine.noisy({"noise": {"other": 0.1, "steal": 0.0}}))
        self.assertFalse(machine.noisy({"error": "no noise was measured"}))


if __name__ == "__main__":
    unittest.main()
