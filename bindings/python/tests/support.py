"""What the tests share: the model, expected answers, and assertions.

usage: python3 -m unittest discover -s bindings/python/tests
PAGEDLLM_LIBRARY: path of libpagedllm.so; default: target/release of this repository.
"""

import json
import os
import pathlib
import signal
import sys
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODULE = ROOT / "bindings" / "python"
MODEL = ROOT / "examples" / "model"
sys.path.insert(0, str(MODULE))
# A process in the background inherits SIGINT as ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

from pagedllm import Engine, Error, Sampling  # noqa: E402

SMALL = {"threads": 1, "kv_bytes": 16 << 20}
GREEDY = Sampling(temperature=0)
# Ends at max_model_len, 1024 tokens.
ENDLESS = Sampling(temperature=0, ignore_eos=True)
EXPECTED = json.loads((MODEL / "expected.json").read_text(encoding="utf-8"))
LONG_CASE = next(case for case in EXPECTED if len(case["token_ids"]) > 60)


def open_engine(**options):
    return Engine(MODEL, **{**SMALL, **options})


def threads():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# Seconds that bound a test that fails. A busy machine may take long.
LAST_RESORT = 300


class Case(unittest.TestCase):
    def setUp(self):
        self.engine = open_engine()
        self.addCleanup(self.engine.close)

    def assertEventually(self, holds, what):
        """Wait until `holds()` is true."""
        end = time.monotonic() + LAST_RESORT
        while not holds():
            self.assertLess(time.monotonic(), end, f"still not after {LAST_RESORT} seconds: {what}")
            time.sleep(0.001)

    def assertIdle(self, engine=None):
        def idle():
            stats = (engine or self.engine).stats()
            return stats.waiting == stats.running == stats.blocks_used == 0

        self.assertEventually(idle, "no request is left and no block is in use")

    def assertRefused(self, code, message, call, *arguments, **keywords):
        with self.assertRaises(Error) as caught:
            call(*arguments, **keywords)
        self.assertEqual(caught.exception.code, code, caught.exception)
        self.assertIn(message, str(caught.exception))
