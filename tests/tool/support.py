"""The tool as a process, with pipes or on a terminal."""
import contextlib
import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = os.path.abspath(os.environ.get("PAGEDLLM_TOOL", ROOT / "build" / "tool" / "bin" / "pagedllm"))
MODEL = str(ROOT / "examples" / "model")
EXPECTED = json.loads((ROOT / "examples" / "model" / "expected.json").read_text())
ABI = json.loads((ROOT / "bindings" / "abi.json").read_text())
TIMEOUT = 300
# A request that takes seconds, so that a signal arrives before its end.
SLOW = ["--isa", "portable", "--threads", "1", "--weight-format", "f32", "--ignore-eos", "--kv-dtype", "f32"]


def run(*arguments, given="", **options):
    """Runs the tool to its end. `given` is its input, as a text or as bytes."""
    data = given.encode() if isinstance(given, str) else given
    done = subprocess.run([TOOL, *map(str, arguments)], input=data, capture_output=True, timeout=TIMEOUT, **options)
    done.stdout, done.stderr = done.stdout.decode(errors="surrogateescape"), done.stderr.decode(errors="surrogateescape")
    return done


def fields(struct):
    found = next(one for one in ABI["structs"] if one["name"] == struct)["fields"]
    return [field["name"] for field in found if field["role"] not in ("struct_size", "reserved", "length")]


class ToolTest(unittest.TestCase):
    def output(self, *arguments, **options):
        """The output of a run without an error. Nothing is written to standard error."""
        done = run(*arguments, **options)
        self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)
        return done.stdout

    def assert_fails(self, code, message, *arguments, **options):
        """The run ends with a code and one line about the error, and has no output."""
        done = run(*arguments, **options)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        self.assertIn(message, done.stderr)
        self.assertTrue(done.stderr.startswith("pagedllm: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


class Terminal:
    """The tool on a terminal."""

    def __init__(self, *arguments):
        self.seen = ""
        self.process, self.descriptor = pty.fork()
        if self.process == 0:
            os.execv(TOOL, [TOOL, *map(str, arguments)])

    def write(self, text):
        os.write(self.descriptor, text.encode())

    def read(self, limit):
        """Reads once, at most up to the time limit. Returns False at the end."""
        if not select.select([self.descriptor], [], [], max(0, limit - time.monotonic()))[0]:
            raise TimeoutError(f"the terminal has no more than {self.seen!r}")
        try:
            part = os.read(self.descriptor, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            return False
        self.seen += part.decode(errors="replace")
        return bool(part)

    def wait_for(self, text):
        """Reads until a text appears. Returns what came before it."""
        limit = time.monotonic() + TIMEOUT
        while text not in self.seen:
            if not self.read(limit):
                raise AssertionError(f"no {text!r} in {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before

    def end(self):
        """Reads to the end. Returns the rest and the exit code."""
        limit = time.monotonic() + TIMEOUT
        while self.read(limit):
            pass
        os.close(self.descriptor)
        _, status = os.waitpid(self.process, 0)
        return self.seen, os.waitstatus_to_exitcode(status)

    def kill(self):
        """Ends the process of a test that failed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
