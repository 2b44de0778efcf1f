"""The Python module against the library and the bundled model.
usage: python3 tests/python/test_pagedllm.py   (PAGEDLLM_LIBRARY names another library than target/release's)"""

import asyncio
import contextlib
import gc
import json
import math
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = ROOT / "bindings" / "python"
MODEL = ROOT / "examples" / "model"
sys.path.insert(0, str(MODULE))

import pagedllm  # noqa: E402
from pagedllm import Code, DType, Engine, Error, FinishReason, Sampling  # noqa: E402

SMALL = {"threads": 1, "kv_bytes": 16 << 20}
GREEDY = Sampling(temperature=0)
ENDLESS = Sampling(temperature=0, ignore_eos=True)  # until the sequence is as long as the engine allows: 1024 tokens
EXPECTED = json.loads((MODEL / "expected.json").read_text(encoding="utf-8"))
STORY = next(case for case in EXPECTED if len(case["token_ids"]) > 60)


def open_engine(**options):
    return Engine(MODEL, **{**SMALL, **options})


def threads():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class Case(unittest.TestCase):
    def setUp(self):
        self.engine = open_engine()
        self.addCleanup(self.engine.close)

    def assertSoon(self, holds, what):
        """For what another thread does in its own time."""
        end = time.monotonic() + 10
        while not holds():
            self.assertLess(time.monotonic(), end, f"still not after 10 seconds: {what}")
            time.sleep(0.001)

    def assertIdle(self, engine=None):
        def idle():
            stats = (engine or self.engine).stats()
            return stats.waiting == stats.running == stats.blocks_used == 0
        self.assertSoon(idle, "no request, no block in use")

    def assertRefused(self, code, message, call, *arguments, **keywords):
        with self.assertRaises(Error) as caught:
            call(*arguments, **keywords)
        self.assertEqual(caught.exception.code, code, caught.exception)
        self.assertIn(message, str(caught.exception))


class Generating(Case):
    def test_every_answer_is_the_one_the_model_was_trained_to_give(self):
        for case in EXPECTED:
            prompt = self.engine.render_chat(case["messages"])
            self.assertEqual(prompt, case["prompt"])
            completion = self.engine.generate(prompt, GREEDY, add_special=False)
            self.assertEqual((completion.text, completion.tokens), (case["answer"], case["token_ids"]))
            self.assertEqual(completion.finish_reason, FinishReason.STOP)

    def test_a_stream_is_the_same_answer_piece_by_piece(self):
        outputs = list(self.engine.stream(STORY["prompt"], GREEDY, add_special=False))
        self.assertEqual("".join(output.text for output in outputs), STORY["answer"])
        self.assertEqual([token for output in outputs for token in output.tokens], STORY["token_ids"])
        self.assertGreater(len(outputs), 10)
        self.assertEqual({output.finish_reason for output in outputs[:-1]}, {FinishReason.NONE})
        self.assertEqual(outputs[-1].finish_reason, FinishReason.STOP)
        self.assertEqual(outputs[-1].generated_tokens, len(STORY["token_ids"]))

    def test_a_prompt_of_token_ids_is_answered_as_its_text_is(self):
        tokens = self.engine.tokenize(STORY["prompt"])
        self.assertEqual(self.engine.detokenize(tokens), STORY["prompt"])
        completion = self.engine.generate(tokens, GREEDY)
        self.assertEqual(completion.text, STORY["answer"])
        self.assertEqual(completion.prompt_tokens, len(tokens))

    def test_a_nul_byte_is_text_like_any_other(self):
        tokens = self.engine.tokenize("a\0b")
        self.assertEqual(self.engine.detokenize(tokens), "a\0b")
        self.assertEqual(self.engine.generate("a\0b", Sampling(max_tokens=1), add_special=False).prompt_tokens, len(tokens))

    def test_special_tokens_are_added_and_shown_as_asked(self):
        def prompt_tokens(**flags):
            return self.engine.generate("Hello", Sampling(max_tokens=1), **flags).prompt_tokens
        self.assertEqual(prompt_tokens(), prompt_tokens(add_special=True))
        self.assertEqual(prompt_tokens(add_special=False) + 1, prompt_tokens(add_special=True))
        shown = self.engine.generate(STORY["prompt"], GREEDY, add_special=False, skip_special=False)
        self.assertNotEqual(self.engine.detokenize(STORY["token_ids"]), STORY["answer"])
        self.assertEqual(self.engine.detokenize(STORY["token_ids"], skip_special=True), STORY["answer"])
        self.assertTrue(shown.text.startswith(STORY["answer"]))

    def test_sampling_does_what_it_says(self):
        def ask(**sampling):
            return self.engine.generate(STORY["prompt"], Sampling(**{"temperature": 0, **sampling}), add_special=False)
        whole, tokens = STORY["answer"], STORY["token_ids"]
        self.assertEqual(ask(stop="village").text, whole[:whole.index("village")])
        self.assertEqual(ask(stop=["never", "Hugo"]).text, whole[:whole.index("Hugo")])
        self.assertEqual(ask(stop_token_ids=[tokens[7]]).tokens, tokens[:tokens.index(tokens[7]) + 1])
        short = ask(max_tokens=5)
        self.assertEqual((short.tokens, short.finish_reason), (tokens[:5], FinishReason.LENGTH))
        self.assertGreater(len(ask(min_tokens=len(tokens) + 1).tokens), len(tokens))
        self.assertIsNone(short.logprobs)
        logprobs = ask(max_tokens=5, logprobs=True).logprobs
        self.assertEqual(len(logprobs), 5)
        self.assertTrue(all(-1 < p <= 0 for p in logprobs), logprobs)

    def test_a_seed_makes_the_same_choices_and_left_out_values_are_the_librarys(self):
        def ask(**sampling):
            return self.engine.generate("Once", Sampling(max_tokens=20, ignore_eos=True, **sampling)).tokens
        self.assertEqual(ask(seed=2**64 - 1), ask(seed=2**64 - 1))
        self.assertNotEqual(ask(seed=1), ask(seed=2))
        self.assertEqual(ask(seed=1), ask(seed=1, temperature=1, top_p=1, min_p=0, top_k=0))
        self.assertNotEqual(ask(seed=1), ask(seed=1, temperature=0))

    def test_many_threads_at_once_get_what_each_gets_alone(self):
        def ask(i):
            case = EXPECTED[i % len(EXPECTED)]
            return self.engine.generate(case["prompt"], GREEDY, add_special=False).text == case["answer"]
        with ThreadPoolExecutor(32) as pool:
            self.assertEqual(set(pool.map(ask, range(96))), {True})
        self.assertIdle()

    def test_requests_that_share_a_queue_are_told_apart(self):
        with self.engine.create_queue(1000) as queue:
            ids = [self.engine.add(case["prompt"], GREEDY, queue=queue, user_data=i, add_special=False)
                   for i, case in enumerate(EXPECTED)]
            texts = dict.fromkeys(ids, "")
            ended = set()
            while len(ended) < len(ids):
                for output in queue.poll():
                    self.assertEqual(ids[output.user_data], output.request)
                    texts[output.request] += output.text
                    ended |= {output.request} if output.finish_reason else set()
        self.assertEqual(list(texts.values()), [case["answer"] for case in EXPECTED])

    def test_two_engines_answer_at_once(self):
        with open_engine(kv_dtype=DType.F32) as other, ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(engine.generate, case["prompt"], GREEDY, add_special=False)
                     for case in EXPECTED for engine in (self.engine, other)]
            self.assertEqual([one.result().text for one in asked], [case["answer"] for case in EXPECTED for _ in range(2)])
        self.assertEqual(other.close(), None)
        self.assertEqual(self.engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])

    def test_what_is_known_of_engine_and_library_is_told(self):
        info, plan, stats = self.engine.info(), pagedllm.plan(MODEL, **SMALL), self.engine.stats()
        self.assertEqual((info.architecture, info.vocab_size, info.layers, info.threads), ("LlamaForCausalLM", 1024, 4, 1))
        self.assertEqual(info.eos_token_ids, [5, 1])
        self.assertEqual((plan.kv_bytes, plan.block_size, plan.max_model_len), (16 << 20, 16, info.max_model_len))
        self.assertEqual((stats.blocks_total, stats.blocks_free, stats.slot_utilization), (plan.blocks, plan.blocks, 1.0))
        self.engine.generate("Hello", Sampling(max_tokens=3, ignore_eos=True))
        self.assertSoon(lambda: self.engine.stats().finished_length == 1, "the request is counted")
        self.assertEqual(self.engine.stats().generated_tokens, 3)
        self.assertEqual(pagedllm.build_info()["version"], pagedllm.version())

    def test_errors_survive_pickling(self):
        error = pickle.loads(pickle.dumps(Error(6, "too much")))
        self.assertEqual((error.code, str(error)), (Code.CAPACITY, "too much"))
        self.assertEqual(Error(4711, "from a newer library").code, 4711)


class HostStepping(Case):
    def test_the_host_steps_and_polls(self):
        with open_engine(host_steps=True) as engine:
            request = engine.add(STORY["prompt"], GREEDY, add_special=False)
            self.assertEqual(engine.queue.poll(0), [])
            self.assertEqual(engine.queue.poll(0.01), [])
            text, unfinished = "", 1
            while unfinished:
                unfinished = engine.step().unfinished
                for output in engine.queue.poll(0):
                    self.assertEqual(output.request, request)
                    text += output.text
            self.assertEqual(text, STORY["answer"])

    def test_only_one_steps(self):
        self.engine.generate("Hello", Sampling(max_tokens=1))  # so that the library's thread surely steps
        self.assertRefused(Code.BUSY, "one at a time", self.engine.step)
        self.assertRefused(Code.BUSY, "one at a time", self.engine.start)
        self.engine.stop()
        self.engine.stop()
        self.assertEqual(self.engine.step().sequences, 0)
        self.engine.start()
        self.assertEqual(self.engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])


class Loading(Case):
    def test_progress_runs_up_to_the_end(self):
        told = []
        with open_engine(progress=lambda *now: told.append(now)):
            pass
        self.assertEqual(told, sorted(told))
        self.assertEqual(told[-1][0], told[-1][1])
        self.assertEqual(len({total for _, total in told}), 1)
        self.assertGreater(len(told), 2)

    def test_what_progress_raises_stops_the_loading(self):
        calls = []

        def give_up(done, total):
            calls.append(done)
            raise LookupError("enough")

        with self.assertRaisesRegex(LookupError, "enough"):
            open_engine(progress=give_up)
        self.assertEqual(len(calls), 1)

    def test_ctrl_c_stops_the_loading(self):
        interrupted = threading.Event()
        calls = []

        def interrupt(done, total):
            calls.append(done)
            if len(calls) == 1:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                interrupted.wait(10)

        with self.assertRaises(KeyboardInterrupt):
            try:
                open_engine(progress=interrupt)
            finally:
                interrupted.set()
        self.assertSoon(lambda: not any(thread.name.startswith("pagedllm-load") for thread in threading.enumerate()),
                        "the loading has stopped")
        self.assertEqual(len(calls), 1)

    def test_fifty_engines_leave_no_descriptor_and_no_thread(self):
        def live():
            with open_engine() as engine:
                stream = engine.stream(STORY["prompt"], ENDLESS, add_special=False)
                next(stream)
                asyncio.run(engine.agenerate("Hello", Sampling(max_tokens=2)))
        live()
        before = descriptors(), threads()
        for _ in range(50):
            live()
        self.assertLessEqual(descriptors(), before[0])
        self.assertSoon(lambda: threads() <= before[1], "the engines' threads are gone")

    def test_a_forgotten_engine_and_a_forgotten_stream_are_freed(self):
        before = descriptors()
        engine = open_engine()
        next(engine.stream("Hello", ENDLESS))
        engine.queue.fileno()
        self.assertIdle(engine)
        self.assertGreater(descriptors(), before)
        del engine
        gc.collect()
        self.assertEqual(descriptors(), before)

    def test_an_engine_lives_while_somebody_reads_from_it(self):
        def ask_a_local_engine():
            engine = open_engine()
            queue = engine.create_queue(1000)
            engine.add(STORY["prompt"], GREEDY, queue=queue, add_special=False)
            return queue
        queue, text = ask_a_local_engine(), ""
        while not text.endswith("The end."):
            text += "".join(output.text for output in queue.poll())
        self.assertEqual(text, STORY["answer"])
        stream = open_engine().stream(STORY["prompt"], GREEDY, add_special=False)
        self.assertEqual("".join(output.text for output in stream), STORY["answer"])

    def test_a_library_that_is_not_there_is_an_import_error(self):
        done = subprocess.run([sys.executable, "-c", "import pagedllm"], cwd=MODULE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PAGEDLLM_LIBRARY": "/nowhere/libpagedllm.so"})
        self.assertEqual(done.returncode, 1)
        self.assertIn("ImportError: /nowhere/libpagedllm.so", done.stderr)
        self.assertIn("set PAGEDLLM_LIBRARY", done.stderr)

    def test_a_process_may_end_with_a_live_engine(self):
        program = ("import pagedllm, sys, threading\n"
                   f"engine = pagedllm.Engine({str(MODEL)!r}, threads=1, kv_bytes=16 << 20)\n"
                   "stream = engine.stream('Hello', pagedllm.Sampling(ignore_eos=True))\n"
                   "next(stream)\n"
                   "threading.Thread(target=engine.queue.poll, daemon=True).start()\n"
                   "print('alive')")
        done = subprocess.run([sys.executable, "-c", program], cwd=MODULE, capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "alive\n", ""))


class Cancelling(Case):
    def assertAborted(self, count=1):
        self.assertSoon(lambda: self.engine.stats().finished_abort == count, "the request is aborted")
        self.assertIdle()

    def test_closing_a_stream_aborts_its_request(self):
        stream = self.engine.stream("Hello", ENDLESS)
        next(stream)
        stream.close()
        self.assertAborted()
        self.assertEqual(list(stream), [])

    def test_leaving_a_loop_aborts_its_request(self):
        for output in self.engine.stream("Hello", ENDLESS):
            break
        self.assertAborted()

    def test_a_stream_that_is_never_read_is_aborted_when_it_is_let_go(self):
        self.engine.stream("Hello", ENDLESS)
        self.assertAborted()

    def test_abort_ends_a_stream_and_says_so(self):
        stream = self.engine.stream("Hello", ENDLESS)
        request = next(stream).request
        self.engine.abort(request)
        self.assertEqual(list(stream)[-1].finish_reason, FinishReason.ABORT)
        self.assertAborted()
        self.assertRefused(Code.NOT_FOUND, f"request {request} is unknown or has ended", self.engine.abort, request)

    def test_ctrl_c_ends_a_blocking_generate(self):
        with open_engine(host_steps=True) as engine:  # nobody steps to the end: it would wait for ever
            def press():
                self.assertSoon(lambda: engine.step().unfinished, "there is a request")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            with ThreadPoolExecutor(1) as pool:
                pressed = pool.submit(press)
                with self.assertRaises(KeyboardInterrupt):
                    engine.generate("Hello", ENDLESS)
                pressed.result()
            engine.step()
            self.assertEqual(engine.stats().finished_abort, 1)

    def test_a_signal_handler_may_close_the_engine_that_its_thread_waits_for(self):
        with open_engine(host_steps=True) as engine:
            before = signal.signal(signal.SIGUSR1, lambda *_: engine.close())
            self.addCleanup(signal.signal, signal.SIGUSR1, before)

            def press():
                self.assertSoon(lambda: engine.step().unfinished, "there is a request")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            with ThreadPoolExecutor(1) as pool:
                pressed = pool.submit(press)
                self.assertRefused(Code.CLOSED, "freed", lambda: engine.generate("Hello"))
                pressed.result()
            self.assertRefused(Code.CLOSED, "the engine is closed", engine.stats)

    def test_a_slow_reader_holds_up_nobody_but_itself(self):
        slow = self.engine.stream(STORY["prompt"], GREEDY, capacity=1, add_special=False)
        first = next(slow)
        for case in EXPECTED:
            self.assertEqual(self.engine.generate(case["prompt"], GREEDY, add_special=False).text, case["answer"])
        stats = self.engine.stats()
        self.assertEqual((stats.paused, stats.waiting, stats.finished_stop), (1, 1, len(EXPECTED)))
        self.assertEqual(first.text + "".join(output.text for output in slow), STORY["answer"])

    def test_closing_a_queue_aborts_what_writes_to_it_and_wakes_who_polls_it(self):
        queue = self.engine.create_queue(2)
        self.engine.add("Hello", ENDLESS, queue=queue)
        with self.engine.create_queue(2) as idle, ThreadPoolExecutor(1) as pool:
            polling = pool.submit(idle.poll)
            self.assertSoon(lambda: idle._handle._users == 1, "the other thread polls")
            idle.close()
            self.assertIsInstance(polling.exception(10), Error)
            self.assertEqual(polling.exception().code, Code.CLOSED)
        queue.close()
        queue.close()
        self.assertAborted()
        for call in (queue.poll, queue.fileno, lambda: self.engine.add("Hello", queue=queue)):
            self.assertRefused(Code.CLOSED, "the queue is closed", call)
        self.engine.queue.close()  # its engine's to close
        self.assertEqual(self.engine.queue.poll(0), [])


class Asyncio(Case):
    def run_async(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, 60))

    def test_answers_and_streams_are_the_same_ones(self):
        async def main():
            answers = await asyncio.gather(
                *(self.engine.agenerate(case["prompt"], GREEDY, add_special=False) for case in EXPECTED))
            self.assertEqual([answer.text for answer in answers], [case["answer"] for case in EXPECTED])
            pieces = [output.text async for output in self.engine.astream(STORY["prompt"], GREEDY, add_special=False)]
            self.assertEqual("".join(pieces), STORY["answer"])
            self.assertGreater(len(pieces), 10)
        self.run_async(main())

    def test_two_hundred_streams_wait_without_a_thread(self):
        before, fds = threads(), descriptors()
        most_threads = 0

        async def read(case):
            nonlocal most_threads
            text = ""
            async for output in self.engine.astream(case["prompt"], GREEDY, add_special=False):
                text += output.text
                most_threads = max(most_threads, threads())
            return text == case["answer"]

        async def main():
            self.assertEqual(set(await asyncio.gather(*(read(EXPECTED[i % len(EXPECTED)]) for i in range(200)))), {True})
        self.run_async(main())
        self.assertLessEqual(most_threads, before)
        self.assertSoon(lambda: descriptors() <= fds, "the step under way has let go of the last queue")
        self.assertIdle()

    def test_waiting_costs_no_time_of_the_processor(self):
        async def main():
            with open_engine(host_steps=True) as engine:  # nobody steps
                waiting = [asyncio.create_task(engine.agenerate("Hello")) for _ in range(20)]
                await asyncio.sleep(0)
                before = time.process_time()
                await asyncio.sleep(0.3)
                self.assertLess(time.process_time() - before, 0.1)
            await asyncio.gather(*waiting, return_exceptions=True)
        self.run_async(main())

    def test_the_loop_runs_on_while_a_stream_waits(self):
        with open_engine(host_steps=True) as engine:  # nothing comes unless the test's own task steps
            async def step():
                while engine.step().unfinished:
                    await asyncio.sleep(0)

            async def main():
                answer, _ = await asyncio.gather(engine.agenerate(STORY["prompt"], GREEDY, add_special=False), step())
                self.assertEqual(answer.text, STORY["answer"])
            self.run_async(main())

    def test_cancelling_a_task_aborts_its_request(self):
        async def main():
            started = asyncio.Event()

            async def read():
                async for _ in self.engine.astream("Hello", ENDLESS, capacity=1):
                    started.set()
            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(self.engine.agenerate("Hello", ENDLESS), 0.01)
        self.run_async(main())
        self.assertIdle()
        self.assertEqual(self.engine.stats().finished_abort, 2)

    def test_leaving_an_async_loop_aborts_its_request(self):
        async def main():
            async for _ in self.engine.astream("Hello", ENDLESS):
                break
            while self.engine.stats().finished_abort == 0:
                await asyncio.sleep(0.001)
        self.run_async(main())
        self.assertIdle()

    def test_closing_the_engine_ends_what_waits(self):
        async def main():
            with open_engine(host_steps=True) as engine:
                waiting = [asyncio.create_task(engine.agenerate("Hello", ENDLESS)) for _ in range(20)]
                await asyncio.sleep(0)  # each runs until it waits
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            self.assertEqual({end.code for end in ends}, {Code.CLOSED})
        self.run_async(main())

    def test_a_slow_task_holds_up_nobody_but_itself(self):
        async def main():
            slow = self.engine.astream(STORY["prompt"], GREEDY, capacity=1, add_special=False)
            text = (await slow.__anext__()).text
            answers = await asyncio.gather(
                *(self.engine.agenerate(case["prompt"], GREEDY, add_special=False) for case in EXPECTED))
            self.assertEqual([answer.text for answer in answers], [case["answer"] for case in EXPECTED])
            self.assertEqual(self.engine.stats().paused, 1)
            self.assertEqual(text + "".join([output.text async for output in slow]), STORY["answer"])
        self.run_async(main())

    def test_bad_input_is_refused_before_anything_waits(self):
        async def main():
            with self.assertRaises(Error) as caught:
                await self.engine.agenerate("")
            self.assertEqual(caught.exception.code, Code.INVALID_ARGUMENT)
            with self.assertRaises(Error):
                self.engine.astream("Hello", capacity=0)
        self.run_async(main())


class BadInput(Case):
    def test_options_are_refused_with_code_and_reason(self):
        for code, message, options in [
            (Code.IO, "does not exist", {"model_path": "/nowhere"}),
            (Code.INVALID_ARGUMENT, "model_path is empty", {"model_path": ""}),
            (Code.INVALID_ARGUMENT, "UTF-8", {"model_path": b"/\xff"}),
            (Code.UNSUPPORTED, '"tpu"', {"device": "tpu"}),
            (Code.INVALID_ARGUMENT, "block_size", {"block_size": 7}),
            (Code.CAPACITY, "kv_bytes", {"kv_bytes": 1}),
            (Code.INVALID_ARGUMENT, "threads is -1", {"threads": -1}),
            (Code.INVALID_ARGUMENT, "threads is 4294967297", {"threads": 2**32 + 1}),
            (Code.INVALID_ARGUMENT, "kv_bytes is 18446744073709551616", {"kv_bytes": 2**64}),
        ]:
            with self.subTest(options):
                for call in (Engine, pagedllm.plan):
                    self.assertRefused(code, message, call, **{"model_path": MODEL, **SMALL, **options})
        with self.assertRaises(TypeError):
            pagedllm.plan(MODEL, treads=1)

    def test_requests_are_refused_with_code_and_reason(self):
        for code, message, prompt, sampling, more in [
            (Code.INVALID_ARGUMENT, "the prompt is empty", "", {}, {"add_special": False}),
            (Code.INVALID_ARGUMENT, "the prompt is empty", [], {}, {}),
            (Code.INVALID_ARGUMENT, "5000 tokens", [70] * 5000, {}, {}),
            (Code.INVALID_ARGUMENT, "not UTF-8: byte 2", b"ab\xff", {}, {}),
            (Code.INVALID_ARGUMENT, "not UTF-8: byte 1", "a\ud800", {}, {}),
            (Code.INVALID_ARGUMENT, "70000, beyond the vocabulary of 1024", [70000], {}, {}),
            (Code.INVALID_ARGUMENT, "32 bits", [2**32], {}, {}),
            (Code.INVALID_ARGUMENT, "32 bits", [-1], {}, {}),
            (Code.INVALID_ARGUMENT, "temperature is NaN", "Hello", {"temperature": math.nan}, {}),
            (Code.INVALID_ARGUMENT, "temperature", "Hello", {"temperature": 1e300}, {}),
            (Code.INVALID_ARGUMENT, "top_p", "Hello", {"top_p": -0.5}, {}),
            (Code.INVALID_ARGUMENT, "max_tokens is 4294967296", "Hello", {"max_tokens": 2**32}, {}),
            (Code.INVALID_ARGUMENT, "top_k is -1", "Hello", {"top_k": -1}, {}),
            (Code.INVALID_ARGUMENT, "seed is -1", "Hello", {"seed": -1}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"stop_token_ids": [1024]}, {}),
            (Code.INVALID_ARGUMENT, "stop", "Hello", {"stop": [b"\xff"]}, {}),
            (Code.INVALID_ARGUMENT, "n is 0", "Hello", {}, {"n": 0}),
            (Code.UNSUPPORTED, "n is 2", "Hello", {}, {"n": 2}),
            (Code.INVALID_ARGUMENT, "n is 4294967297", "Hello", {}, {"n": 2**32 + 1}),
            (Code.INVALID_ARGUMENT, "capacity is 0", "Hello", {}, {"capacity": 0}),
            (Code.INVALID_ARGUMENT, "capacity is -1", "Hello", {}, {"capacity": -1}),
        ]:
            with self.subTest(message):
                self.assertRefused(code, message, self.engine.generate, prompt, Sampling(**sampling), **more)
        self.assertRefused(Code.INVALID_ARGUMENT, "user_data", self.engine.add, "Hello", user_data=2**64)
        with open_engine() as other:
            self.assertRefused(Code.INVALID_ARGUMENT, "queue", self.engine.add, "Hello", queue=other.create_queue(1))
        self.assertIdle()
        self.assertEqual(self.engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])

    def test_the_other_calls_refuse_what_makes_no_sense(self):
        self.assertRefused(Code.NOT_FOUND, "4711", self.engine.abort, 4711)
        self.assertRefused(Code.INVALID_ARGUMENT, "request is -1", self.engine.abort, -1)
        self.assertRefused(Code.INVALID_ARGUMENT, "1024", self.engine.detokenize, [1024])
        self.assertRefused(Code.INVALID_ARGUMENT, "UTF-8", self.engine.tokenize, b"\xff")
        self.assertRefused(Code.INVALID_ARGUMENT, "", self.engine.render_chat, 7)
        with open_engine(skip_tokenizer=True) as tokens_only:
            self.assertRefused(Code.UNSUPPORTED, "", tokens_only.tokenize, "Hello")
            self.assertEqual(tokens_only.generate([70], Sampling(temperature=0, max_tokens=2)).text, "")
        for arguments in ((1.5,), (None,), ("Hello", 7)):
            with self.assertRaises((TypeError, AttributeError)):
                self.engine.generate(*arguments)
        self.assertIdle()


class Closing(Case):
    def test_every_use_after_close_is_refused(self):
        queue = self.engine.create_queue(1)
        own = self.engine.queue
        self.engine.close()
        self.engine.close()
        engine = self.engine
        for call in (engine.stats, engine.info, engine.step, engine.start, engine.stop, own.poll, own.fileno, lambda: engine.queue,
                     lambda: engine.abort(1), lambda: engine.add("x"), lambda: engine.generate("x"), lambda: engine.stream("x"),
                     lambda: engine.astream("x"), lambda: engine.create_queue(1), lambda: engine.tokenize("x"),
                     lambda: engine.detokenize([1]), lambda: engine.render_chat([]), lambda: asyncio.run(engine.agenerate("x"))):
            self.assertRefused(Code.CLOSED, "the engine is closed", call)
        self.assertRefused(Code.CLOSED, "", queue.poll)
        queue.close()

    def test_closing_from_many_threads_while_streams_are_read_ends_them(self):
        for _ in range(5):
            engine = open_engine()
            reading = threading.Barrier(6)

            def read():
                stream = engine.stream(STORY["prompt"], ENDLESS, capacity=1, add_special=False)
                next(stream)
                reading.wait(10)
                for _ in stream:
                    pass

            def close():
                reading.wait(10)
                engine.close()

            def poll_own():
                while True:
                    engine.queue.poll()

            with ThreadPoolExecutor(8) as pool:
                readers = [pool.submit(read) for _ in range(4)]
                polling = pool.submit(poll_own)
                closers = [pool.submit(close) for _ in range(2)]
                self.assertEqual({reader.exception(10).code for reader in readers}, {Code.CLOSED})
                self.assertEqual(polling.exception(10).code, Code.CLOSED)
                self.assertEqual({closer.result(10) for closer in closers}, {None})

    def test_a_queue_gives_what_it_holds_after_its_engine_is_closed(self):
        queue = self.engine.create_queue(3)
        self.engine.add(STORY["prompt"], GREEDY, queue=queue, add_special=False)
        self.assertSoon(lambda: self.engine.stats().paused == 1, "the queue is full")
        self.engine.close()
        outputs = queue.poll()
        self.assertEqual([token for output in outputs for token in output.tokens], STORY["token_ids"][:3])
        self.assertEqual(outputs[-1].finish_reason, FinishReason.ABORT)
        self.assertRefused(Code.CLOSED, "", queue.poll)


def hold(lock, locked, until):
    with lock:
        locked.set()
        until.wait(10)


def in_the_child(engine, queue, pipe):
    def code(call):
        try:
            call()
        except Error as error:
            return int(error.code)
    calls = (engine.stats, engine.step, lambda: engine.generate("x"), lambda: queue.poll(0), lambda: engine.queue.poll(0))
    pipe.send([code(call) for call in calls])
    queue.close()
    engine.close()
    pipe.send([code(engine.stats), code(queue.poll)])


class Forking(Case):
    def test_a_forked_child_is_refused_and_the_parent_goes_on(self):
        with self.engine.create_queue(8) as queue, ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as end:
            # Two threads that the child does not have: one in the middle of a call, one that holds the queue's lock.
            polling = pool.submit(self.engine.queue.poll)
            self.assertSoon(lambda: self.engine._handle._users == 1, "the other thread polls")
            locked, forked = threading.Event(), threading.Event()
            pool.submit(hold, queue._handle._lock, locked, forked)
            self.assertTrue(locked.wait(10))
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(target=in_the_child, args=(self.engine, queue, theirs))
            child.start()
            forked.set()
            end.callback(self.engine.close)
            end.callback(child.kill)
            self.assertTrue(ours.poll(20), "the child hangs")
            self.assertEqual(set(ours.recv()), {Code.UNSUPPORTED})
            self.assertTrue(ours.poll(20), "the child hangs while it closes")
            self.assertEqual(set(ours.recv()), {Code.CLOSED})
            child.join(20)
            self.assertEqual(child.exitcode, 0)
            self.engine.add(STORY["prompt"], GREEDY, add_special=False)
            self.assertNotEqual(polling.result(10), [])
            self.assertEqual(self.engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])


if __name__ == "__main__":
    unittest.main()
