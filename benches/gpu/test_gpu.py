"""Tests of the scripts and the report without a GPU: `python3 -m unittest discover -s benches/gpu`."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
SCRIPTS = ["works", "kernels", "sanitizers", "end_to_end"]
LIMIT = 540  # seconds of all parts of a script; a machine may end it after 600
PART = re.compile(r"^(?:with_model )?(part|ours|peer|sanitized) ([\w-]+) (\d+)( .*)?$")
PROGRAMS = ["gpu", "cpu", "cuda", "cuda_blocks", "cuda_engine"]
NUMBER = '{"part": "decode attention", "case": "a case", "shape": {"bytes": 1}, "value": 2.0, "unit": "B/s", "limit": 4.0}'


def seconds_of(script):
    """Returns the sum of the limits. Parts that end in & run beside those up to `wait`."""
    total, end_of_background = 0, 0
    for line in script.splitlines():
        if found := PART.match(line):
            if (found[4] or "").split(" #")[0].endswith("&"):
                end_of_background = max(end_of_background, total + int(found[3]))
            else:
                total += int(found[3])
        elif line == "wait":
            total = max(total, end_of_background)
    return max(total, end_of_background)


class Limits(unittest.TestCase):
    def test_the_limits_of_a_script_add_up_to_nine_minutes(self):
        for script in SCRIPTS:
            self.assertIn(seconds_of((HERE / f"{script}.sh").read_text()), range(200, LIMIT + 1), script)

    def test_parts_in_the_background_run_beside_later_ones(self):
        self.assertEqual(seconds_of("part a 10 x\npeer b 50 y & # why\nours c 60\nsanitized d 70 z &\nwait\nwith_model ours e 5 z\n"), 145)

    def test_every_part_has_its_own_lines(self):
        for script in SCRIPTS:
            text = (HERE / f"{script}.sh").read_text()
            names = [(found[2], found[4].split()[0] if found[1] == "sanitized" else "") for found in map(PART.match, text.splitlines()) if found]
            self.assertEqual(len(names), len(set(names)), script)

    def test_selected_tests_exist(self):
        for script, array, program in [("works", "ON_DEVICE", "engine"), ("sanitizers", "SOME", "ops")]:
            names = re.search(rf"^{array}=\(([^)]*)\)", (HERE / f"{script}.sh").read_text(), re.M)[1].split()
            tests = re.findall(r"#\[test\]\nfn (\w+)", (HERE.parents[1] / "tests" / "cuda" / f"{program}.rs").read_text())
            unknown = [name for name in names if not any(name in test for test in tests)]
            self.assertEqual((unknown, len(names) > 5), ([], True))

    def test_scripts_have_no_syntax_errors(self):
        for script in [*SCRIPTS, "common", "build"]:
            subprocess.run(["bash", "-n", HERE / f"{script}.sh"], check=True)


class Machine(unittest.TestCase):
    """A folder with an archive of programs that print fixed lines, and python3 without packages."""

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.folder / "path"
        self.path.mkdir()
        self.program(self.path / "python3", f'exec {sys.executable} -S "$@"')
        self.programs = {name: "echo 'test one ... ok'" for name in PROGRAMS} | {"gpu": f"echo '{NUMBER}'", "cpu": "true"}

    def program(self, path, text):
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def environment(self, **more):
        path = f"{self.path}:{os.environ['PATH']}"
        return os.environ | {"CARGO_TARGET_DIR": str(self.folder), "OUT": str(self.folder / "out"), "PATH": path, "PARTS": ""} | more

    def run_script(self, script, **more):
        built = self.folder / "built"
        built.mkdir()
        (built / "commit").write_text("abc\n")
        for name, text in self.programs.items():
            self.program(built / name, text)
        (self.folder / "gpu").mkdir()
        with tarfile.open(self.folder / "gpu" / "built.tar.xz", "w:xz") as archive:
            archive.add(built, ".")
        done = subprocess.run([HERE / f"{script}.sh"], env=self.environment(**more), capture_output=True, text=True, timeout=60)
        out = self.folder / "out"
        results = json.loads((out / f"{script}.json").read_text())
        self.assertEqual(results["about"]["commit"], "abc")
        self.assertTrue((out / f"{script}.txt").read_text().rstrip().endswith(done.stdout.rstrip().splitlines()[-1]))
        return done.returncode, results, (out / f"{script}.log").read_text()

    def verdicts(self, results, kind):
        return {line["part"]: line[kind] for line in results["verdicts"] if kind in line}

    def test_a_failed_part_does_not_end_the_script(self):
        self.program(self.path / "nvidia-smi", "echo a device")
        self.programs["cuda"] = "echo 'test two ... FAILED'; echo why >&2; exit 7"
        status, results, log = self.run_script("works")
        self.assertEqual(status, 1)
        self.assertEqual(self.verdicts(results, "ok"), {"kernels": False, "block_kernels": True, "engine_tests": True})
        self.assertRegex(self.verdicts(results, "error")["kernels"], "exit status 7 after 0 of 120 s; see works.log")
        self.assertEqual(self.verdicts(results, "skipped"), {"models": "python3 has no torch and no transformers"})
        self.assertIn("why", log)
        self.assertIn("a device", log)

    def test_only_selected_parts_run(self):
        status, results, log = self.run_script("kernels", PARTS="thresholds", SMALL="1")
        self.assertEqual((status, len(results["rows"]), results["rows"][0]["share"]), (0, 1, 0.5))
        self.assertEqual(results["verdicts"], [])
        self.assertRegex(log, "== thresholds: .*/gpu thresholds --models=.* --small\n")

    def test_the_name_of_no_part_is_an_error(self):
        status, results, _ = self.run_script("kernels", PARTS="thresholds treshold", SMALL="1")
        self.assertEqual((status, len(results["rows"])), (1, 1))
        self.assertEqual(self.verdicts(results, "error"), {"treshold": "kernels.sh has no part of this name"})

    def test_only_parts_that_need_transformers_are_skipped_without_it(self):
        packages = self.folder / "packages"
        packages.mkdir()
        (packages / "torch.py").write_text("")
        self.program(self.path / "python3", f'PYTHONPATH={packages} exec {sys.executable} -S "$@"')
        status, results, _ = self.run_script("works")
        self.assertEqual(self.verdicts(results, "skipped"), {"models": "python3 has no transformers"})
        shutil.rmtree(self.folder / "built")
        shutil.rmtree(self.folder / "gpu")
        _, results, _ = self.run_script("kernels", PARTS="ceilings")
        self.assertEqual((self.verdicts(results, "skipped"), set(self.verdicts(results, "error"))), ({}, {"ceilings"}))

    def test_sanitizers_run_side_by_side_and_their_reports_are_kept(self):
        # Each waits until all five run.
        running = self.folder / "running"
        running.mkdir()
        waits = f'touch {running}/$$; for i in $(seq 200); do [ $(ls {running} | wc -l) = 5 ] && break; sleep 0.1; done; [ $(ls {running} | wc -l) = 5 ] || exit 3'
        self.program(self.path / "compute-sanitizer", waits + '; echo "report of $2"; shift 6; "$@"')
        status, results, log = self.run_script("sanitizers")
        parts = ["initcheck-cuda", "memcheck-cuda", "memcheck-cuda_blocks", "racecheck-cuda", "synccheck-cuda"]
        self.assertEqual((status, self.verdicts(results, "ok")), (0, dict.fromkeys(parts, True)))
        for part in parts:
            self.assertRegex(log, f"== {part}: .*\nreport of {part.split('-')[0]}\ntest one ... ok\n")

    def test_a_machine_without_sanitizers_skips_them(self):
        if shutil.which("compute-sanitizer"):
            self.skipTest("this machine has compute-sanitizer")
        status, results, _ = self.run_script("sanitizers")
        self.assertEqual((status, len(self.verdicts(results, "skipped"))), (0, 5))

    def test_a_machine_without_torch_measures_the_rest(self):
        status, results, _ = self.run_script("end_to_end")
        self.assertEqual(status, 0)
        self.assertEqual(set(self.verdicts(results, "skipped")), {"ceilings", "weights", "engine", "serving", "generate"})
        self.assertEqual(len(results["rows"]), 1)

    def build(self, **more):
        """Runs build.sh with a cargo that makes small programs."""
        release = self.folder / "release"
        kernels = release / "build" / "pagedllm-1" / "out"
        kernels.mkdir(parents=True, exist_ok=True)
        (kernels / "kernels.rs").write_text("Image {")
        for name in PROGRAMS:
            shutil.copy("/bin/true", release / f"{name}-0123")
        shutil.copy("/bin/true", release / "libpagedllm.so")
        lines = "".join(f'{{"executable":"{release}/{name}-0123"}}\\n' for name in PROGRAMS)
        self.program(self.path / "cargo", f"[ \"$1\" = build ] || printf '{lines}'")
        return subprocess.run([HERE / "build.sh"], env=self.environment(NVCC="nvcc", **more), capture_output=True, text=True, timeout=60)

    def test_the_archive_has_all_programs_and_wheels(self):
        wheels = self.folder / "wheels"
        wheels.mkdir()
        (wheels / "one.whl").write_text("")
        done = self.build(WHEELS=str(wheels))
        self.assertEqual(done.returncode, 0, done.stderr)
        with tarfile.open(self.folder / "gpu" / "built.tar.xz") as archive:
            names = set(archive.getnames())
        needed = {f"./{name}" for name in [*PROGRAMS, "libpagedllm.so", "pagedllm/__init__.py", "pagedllm/libpagedllm.so", "commit", "wheels/one.whl"]}
        self.assertLessEqual(needed, names)

    def test_an_archive_beyond_the_limit_is_an_error_with_the_number(self):
        done = self.build(MAX_BYTES="1000")
        self.assertEqual(done.returncode, 1)
        total = sum(map(int, re.findall(r"(?:built.tar.xz|tracked files): (\d+) bytes", done.stdout)))
        self.assertIn(f"they exceed the limit by {total - 1000} bytes", done.stderr)


class Report(unittest.TestCase):
    def run_report(self, **files):
        """Returns the exit status, the results and the printed table."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                (Path(folder) / f"{name}.jsonl").write_text(text)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = report.main("kernels", folder, folder)
            self.assertEqual((Path(folder) / "kernels.txt").read_text(), printed.getvalue())
            return status, json.loads((Path(folder) / "kernels.json").read_text()), printed.getvalue()

    def test_a_number_has_a_row_for_each_other_engine(self):
        own = '{"part": "paged attention", "case": "blocks of 16", "shape": {"a": 1, "b": 2}, "value": 10.0, "unit": "us", "limit": 8.0}'
        others = [
            '{"part": "paged attention", "shape": {"b": 2, "a": 1}, "value": 9.0, "unit": "us", "peer": "contiguous"}',
            '{"part": "paged attention", "shape": {"a": 1, "b": 2}, "value": 20.0, "unit": "us", "peer": "FlashInfer"}',
            '{"part": "paged attention", "shape": {"a": 1, "b": 3}, "value": 20.0, "unit": "us", "peer": "of another shape"}',
        ]
        status, results, text = self.run_report(own=own, others="\n".join(others))
        self.assertEqual(status, 0)
        found = [(row["peer"], row["ratio"], row["share"]) for row in results["rows"]]
        self.assertEqual(sorted(found), [("FlashInfer", 2.0, 0.8), ("contiguous", 0.9, 0.8)])
        self.assertRegex(text, r"blocks of 16 +10 us +8 us +80% +9 us +0.90  contiguous\n")

    def test_rates_are_better_if_they_are_higher(self):
        own = '{"part": "serving", "case": "output", "shape": {}, "value": 30.0, "unit": "tokens/s", "limit": null}'
        other = '{"part": "serving", "shape": {}, "value": 20.0, "unit": "tokens/s", "peer": "other"}'
        _, results, _ = self.run_report(own=own, other=other)
        self.assertEqual((results["rows"][0]["ratio"], results["rows"][0]["share"]), (1.5, None))

    def test_goals_are_those_of_the_readme(self):
        case = lambda part, name, value, shape: json.dumps(
            {"part": part, "case": name, "shape": shape, "value": value, "unit": "ms" if part == "decode" else "B/s", "limit": 100.0}
        )
        lines = [
            case("decode attention", "met", 90.0, {"bytes": 256 << 20}), case("decode attention", "missed", 89.0, {"bytes": 256 << 20}),
            case("decode attention", "too few bytes", 10.0, {"bytes": 255 << 20}), case("decode", "batch 64, default", 114.0, {"batch": 64}),
            case("decode", "batch 64, batch_invariant", 300.0, {"batch": 64}), case("decode", "batch 128, default", 300.0, {"batch": 128}),
            case("decode", "batch 256, default", 300.0, {"batch": 256}),
        ]  # fmt: skip
        _, results, text = self.run_report(own="\n".join(lines))
        self.assertEqual([row["met"] for row in results["rows"]], [True, False, None, True, None, False, None])
        self.assertIn("goals met: 2 of 4; failures: 0", text)

    def test_a_damaged_line_is_an_error_of_its_part(self):
        status, results, text = self.run_report(own='{"part": "draws", "case": "gre\n{"no": "part"}\n')
        self.assertEqual((status, len(results["verdicts"])), (1, 2))
        self.assertIn("own: 0 passed, 2 failed", text)

    def test_tests_and_errors_are_verdicts_and_other_output_is_ignored(self):
        status, results, text = self.run_report(
            kernels="running 2 tests\ntest a ... ok\ntest b ... FAILED\n", run='{"part": "probe", "error": "exit status 1"}\n'
        )
        self.assertEqual((status, len(results["verdicts"])), (1, 3))
        self.assertIn("kernels: 1 passed, 1 failed\n  FAILED: b\n", text)
        self.assertIn("probe: 0 passed, 1 failed\n  FAILED: exit status 1\n", text)


if __name__ == "__main__":
    unittest.main()
