"""examples/disaggregated: the tokens, and what remains when its processes end.

PAGEDLLM_LIBRARY: path of libpagedllm.so; default: target/release of this repository.
CONNECTORS: folder of the connectors; default: build/connectors of this repository.
"""

import concurrent.futures
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import unittest
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE, MODEL = ROOT / "examples" / "disaggregated", ROOT / "examples" / "model"
CONNECTORS = os.environ.get("CONNECTORS", str(ROOT / "build" / "connectors"))
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(EXAMPLE)]
import router  # noqa: E402
import web  # noqa: E402
from pagedllm import Engine, Sampling  # noqa: E402

# Seconds that bound a test that fails. A busy machine may take long.
LAST_RESORT = 300
TOKENS = 12


def prompt(seed, length=300):
    return random.Random(seed).choices(range(3, 250), k=length)


def request(seed, length=300, **changes):
    return {"prompt": prompt(seed, length), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **changes}


def fetch(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=LAST_RESORT) as answer:
        return json.load(answer)


def eventually(holds, what):
    end = time.monotonic() + LAST_RESORT
    while not holds():
        assert time.monotonic() < end, f"still not after {LAST_RESORT} seconds: {what}"
        time.sleep(0.001)


class Example(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = Engine(MODEL, threads=1, kv_bytes=16 << 20)
        cls.addClassCleanup(cls.engine.close)

    @classmethod
    def start(cls, store, add_cleanup):
        command = [sys.executable, EXAMPLE, MODEL, "--port", "0", "--store", store, "--threads", "1", "--connectors", CONNECTORS,
                   "--store-timeout-ms", str(LAST_RESORT * 1000), "--prefill-wait-ms", str(LAST_RESORT * 1000)]
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        add_cleanup(cls.stop, process)
        lines = iter(process.stdout.readline, "")
        cls.url = next(line.split()[1] for line in lines if line.startswith("router:"))

    @classmethod
    def stop(cls, process):
        """End the example, and check that it ends its processes."""
        pids = [one["pid"] for one in cls.instances().values()]
        process.terminate()
        assert process.wait(LAST_RESORT) == 0
        process.stdout.close()
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    @classmethod
    def instances(cls):
        return {one["name"]: one for one in fetch(f"{cls.url}/instances")["instances"]}

    def served(self, role):
        return sum(one["served"] for one in self.instances().values() if one["role"] == role)

    def stats(self, name):
        return fetch(f"{self.instances()[name]['url']}/stats")

    def complete(self, seed, length=300, **changes):
        """Check the tokens of a request. Return how many of its prompt were cached."""
        answer = fetch(f"{self.url}/v1/completions", request(seed, length, **changes))
        expected = self.engine.generate(prompt(seed, length), Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        self.assertEqual(answer["choices"][0]["token_ids"], expected.tokens)
        self.assertEqual(answer["choices"][0]["text"], expected.text)
        self.assertEqual(answer["usage"]["completion_tokens"], TOKENS)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def refusal(self, body, status):
        with self.assertRaises(urllib.error.HTTPError) as caught:
            fetch(f"{self.url}/v1/completions", body)
        with caught.exception as answer:
            self.assertEqual(answer.code, status)
            return json.load(answer)["error"]["message"]


class Whole(Example):
    """Each test starts the example."""

    def assertCarried(self, store):
        """Check that prompts are computed by the prefill engines only."""
        self.start(store, self.addCleanup)
        # Each prompt has 18 full blocks and 12 tokens. An engine without measured times comes first,
        # so all engines take part.
        self.assertEqual([self.complete(seed) for seed in range(2)], [288, 288])
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            self.assertEqual(list(pool.map(self.complete, range(2, 8))), [288] * 6)
        instances = self.instances()
        for role in ("prefill", "decode"):
            stats = [self.stats(f"{role}-{i}") for i in range(2)]
            served = [instances[f"{role}-{i}"]["served"] for i in range(2)]
            self.assertEqual(sum(served), 8)
            self.assertGreater(min(served), 0)
            # Each block was computed by one prefill engine, and read by one decode engine.
            self.assertEqual(sum(one["kv_store_hits"] for one in stats), 8 * 18 if role == "decode" else 0)
            self.assertEqual(sum(one["kv_store_failures"] for one in stats), 0)
        self.assertEqual({(one["load"], one["failures"]) for one in instances.values()}, {(0, 0)})

    def test_a_server_carries_the_blocks(self):
        self.assertCarried("valkey")

    def test_files_carry_the_blocks(self):
        self.assertCarried("files")

    def test_requests_survive_a_prefill_engine_that_is_killed(self):
        self.start("valkey", self.addCleanup)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(self.complete, seed, 900) for seed in range(8)]
            busy = lambda: [one for one in self.instances().values() if one["role"] == "prefill" and one["load"]]
            eventually(busy, "a prefill engine has a request")
            killed = busy()[0] if busy() else self.instances()["prefill-0"]
            os.kill(killed["pid"], signal.SIGKILL)
            for answer in answers:
                self.assertEqual(answer.result(), 896)
        self.assertEqual(self.complete(100), 288)
        instances = self.instances()
        self.assertGreater(instances[killed["name"]]["failures"], 0)
        other = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[killed["name"]]
        self.assertGreater(instances[other]["served"], 0)
        # Without prefill engines, the decode engines compute the prompts.
        os.kill(instances[other]["pid"], signal.SIGKILL)
        self.assertEqual([self.complete(seed) for seed in (101, 102)], [0, 0])

    def test_requests_survive_the_end_of_the_store(self):
        self.start("valkey", self.addCleanup)
        self.assertEqual(self.complete(1), 288)
        store = fetch(f"{self.url}/instances")["store"]
        os.kill(store["pid"], signal.SIGKILL)
        self.assertEqual([self.complete(seed) for seed in (2, 3, 4)], [0, 0, 0])
        failures = [self.stats(f"{role}-{i}")["kv_store_failures"] for role in ("prefill", "decode") for i in range(2)]
        self.assertGreater(sum(failures), 0)
        # It is a failure of the store, and of no engine.
        self.assertEqual({one["failures"] for one in self.instances().values()}, {0})

    def test_requests_survive_a_decode_engine_that_is_killed(self):
        self.start("files", self.addCleanup)
        os.kill(self.instances()["decode-0"]["pid"], signal.SIGKILL)
        self.assertEqual([self.complete(seed) for seed in range(2)], [288, 288])
        os.kill(self.instances()["decode-1"]["pid"], signal.SIGKILL)
        self.assertEqual(self.refusal(request(3), 503), "no decode engine answers; start the example again")


class Shared(Example):
    """The tests share one example, and each has prompts of its own."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.start("files", cls.addClassCleanup)

    def test_a_score_has_the_blocks_that_events_report(self):
        self.complete(1)

        def scores(tokens):
            """Return the scores of both prefill engines, one of which has computed the prompt."""
            urls = [self.instances()[f"prefill-{i}"]["url"] for i in range(2)]
            return sorted((fetch(f"{url}/score", {"prompt": tokens}) for url in urls), key=lambda score: score["cached"])

        for tokens, cached, blocks in ((prompt(1), 18, 18), (prompt(1)[:100] + prompt(9), 6, 24), (prompt(9), 0, 18)):
            self.assertEqual([(one["cached"], one["blocks"]) for one in scores(tokens)], [(0, blocks), (cached, blocks)])

    def test_a_prompt_that_a_decode_engine_has_needs_no_prefill(self):
        before = self.served("prefill")
        for _ in range(2):
            self.assertEqual(self.complete(2), 288)
        self.assertEqual(self.complete(3, length=15), 0)  # it has no full block
        self.assertEqual(self.served("prefill"), before + 1)

    def test_a_stream_has_the_same_text(self):
        body = json.dumps(request(4, stream=True)).encode()
        with urllib.request.urlopen(f"{self.url}/v1/completions", body, timeout=LAST_RESORT) as answer:
            events = [line[6:] for line in answer.read().decode().split("\n\n") if line]
        self.assertEqual(events.pop(), "[DONE]")
        parts = [json.loads(event) for event in events]
        expected = self.engine.generate(prompt(4), Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        self.assertEqual("".join(part["choices"][0]["text"] for part in parts), expected.text)
        self.assertEqual([token for part in parts for token in part["choices"][0]["token_ids"]], expected.tokens)
        self.assertEqual(parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"], 288)
        self.assertEqual({(one["load"], one["failures"]) for one in self.instances().values()}, {(0, 0)})

    def test_wrong_requests_are_errors(self):
        for body, message in [
                ({"prompt": 5}, "prompt must be"), ({"prompt": "a", "max_tokens": "b"}, "wrong type"), ([], "send one JSON object"),
                ({"prompt": "a", "n": 2}, "n is not supported"), ({"prompt": prompt(1, 2000)}, "2000"),
                ({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, "leave it out")]:
            self.assertIn(message, self.refusal(body, 400))
        self.assertEqual({(one["load"], one["failures"]) for one in self.instances().values()}, {(0, 0)})

    def test_an_instance_knows_the_parameters_of_vllm(self):
        url = f"{self.instances()['prefill-1']['url']}/v1/completions"
        answer = fetch(url, request(5, kv_transfer_params=router.PREFILL))
        self.assertEqual(answer["usage"]["completion_tokens"], 1)
        transfer = answer["kv_transfer_params"]
        self.assertEqual((transfer["do_remote_prefill"], transfer["do_remote_decode"], transfer["remote_engine_id"]),
                         (True, False, "prefill-1"))
        # All blocks are in the store when the answer is there.
        url = f"{self.instances()['decode-1']['url']}/v1/completions"
        answer = fetch(url, request(5, kv_transfer_params=transfer))
        self.assertEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 288)
        with self.assertRaises(urllib.error.HTTPError) as caught:
            fetch(url, request(6, kv_transfer_params={**transfer, "wait_ms": "long"}))
        with caught.exception as refused:
            self.assertEqual(refused.code, 400)

    def test_a_decode_engine_reads_the_blocks_while_the_prefill_engine_computes_the_others(self):
        urls = [self.instances()[name]["url"] + "/v1/completions" for name in ("prefill-0", "decode-0")]
        before = self.stats("decode-0")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = {**router.PREFILL, "do_remote_decode": False, "do_remote_prefill": True, "wait_ms": LAST_RESORT * 1000}
            answer = pool.submit(fetch, urls[1], request(7, kv_transfer_params=waiting))
            # The store gets the blocks of the first half of the prompt, and later the others.
            fetch(urls[0], {**request(7, kv_transfer_params=router.PREFILL), "prompt": prompt(7)[:160]})
            eventually(lambda: self.stats("decode-0")["kv_store_hits"] == before["kv_store_hits"] + 10, "it has read 10 blocks")
            self.assertEqual(self.stats("decode-0")["prompt_tokens"], before["prompt_tokens"])
            fetch(urls[0], request(7, kv_transfer_params=router.PREFILL))
            answer = answer.result()
        self.assertEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 288)
        expected = self.engine.generate(prompt(7), Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        self.assertEqual(answer["choices"][0]["token_ids"], expected.tokens)


class Engines(web.Handler):
    """A decode engine that ends within an answer."""
    routes = {"POST /score": lambda _: {"blocks": 0, "cached": 0, "seconds": 0, "admits": True}}

    def answer(self):
        if self.path == "/score":
            return super().answer()
        self.start_events()
        self.send_event('{"part": 1}')

    do_POST = answer


class Routing(unittest.TestCase):
    def best(self, *scores, loads=(0, 0)):
        instances = [router.Instance(f"prefill-{i}", "", 0) for i in range(len(scores))]
        for instance, load in zip(instances, loads):
            instance.load = load
        scored = [(one, {"admits": True, "seconds": 0.0, "cached": 0, **score}) for one, score in zip(instances, scores)]
        return router.Router(instances).call_best(scored, lambda one: one.name)

    def test_the_engine_with_the_shortest_time_is_the_best(self):
        self.assertEqual(self.best({"seconds": 2}, {"seconds": 1}), "prefill-1")
        self.assertEqual(self.best({"seconds": 2}, {"seconds": 1}, loads=(0, 2)), "prefill-0")
        self.assertEqual(self.best({"cached": 1}, {"cached": 2}, loads=(0, 1)), "prefill-1")
        self.assertEqual(self.best({}, {}, loads=(1, 0)), "prefill-1")
        self.assertEqual(self.best({"admits": False}, {"seconds": 9}), "prefill-1")

    def broken(self):
        server = web.Server(("127.0.0.1", 0), Engines)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever).start()
        instance = router.Instance("decode-0", f"http://127.0.0.1:{server.server_port}", 0)
        return router.Router([instance]), instance

    def test_an_engine_that_ends_within_a_stream_is_an_error(self):
        routing, instance = self.broken()
        lines = []
        with self.assertRaisesRegex(web.Refused, "decode-0 has ended within the answer; send the request again"):
            routing.completions({"prompt": "a", "stream": True}, lines.append)
        self.assertEqual(lines[0], b'data: {"part": 1}\n')
        self.assertEqual((instance.load, instance.failures), (0, 1))

    def test_a_client_that_disconnects_is_no_failure_of_an_engine(self):
        routing, instance = self.broken()

        def send(_line):
            raise BrokenPipeError("the client has disconnected")

        with self.assertRaises(BrokenPipeError):
            routing.completions({"prompt": "a", "stream": True}, send)
        self.assertEqual((instance.load, instance.failures), (0, 0))


if __name__ == "__main__":
    unittest.main()
