"""Loading, closing, process exit and fork."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

from support import (
    ENDLESS,
    GREEDY,
    LONG_CASE,
    MODEL,
    MODULE,
    Case,
    descriptors,
    open_engine,
    threads,
)

from pagedllm import Code, Error, FinishReason, Sampling


class Loading(Case):
    def test_progress_increases_up_to_the_total(self):
        calls = []
        with open_engine(progress=lambda *progress: calls.append(progress)):
            pass
        self.assertEqual(calls, sorted(calls))
        self.assertEqual(calls[-1][0], calls[-1][1])
        self.assertEqual(len({total for _, total in calls}), 1)
        self.assertGreater(len(calls), 2)

    def test_an_exception_in_progress_cancels_loading(self):
        calls = []

        def cancel(done, total):
            calls.append(done)
            raise LookupError("enough")

        with self.assertRaisesRegex(LookupError, "enough"):
            open_engine(progress=cancel)
        self.assertEqual(len(calls), 1)

    def test_ctrl_c_cancels_loading(self):
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
        self.assertEventually(
            lambda: not any(
                thread.name.startswith("pagedllm-load") for thread in threading.enumerate()
            ),
            "loading has stopped",
        )
        self.assertEqual(len(calls), 1)

    def test_fifty_engines_leak_no_descriptor_and_no_thread(self):
        def use_an_engine():
            with open_engine() as engine:
                stream = engine.stream(LONG_CASE["prompt"], ENDLESS, add_special=False)
                next(stream)
                asyncio.run(engine.agenerate("Hello", Sampling(max_tokens=2)))

        use_an_engine()
        before = descriptors(), threads()
        for _ in range(50):
            use_an_engine()
        self.assertLessEqual(descriptors(), before[0])
        self.assertEventually(lambda: threads() <= before[1], "the engines' threads have ended")

    def test_an_unreachable_engine_with_a_stream_is_freed(self):
        before = descriptors()
        engine = open_engine()
        next(engine.stream("Hello", ENDLESS))
        engine.queue.fileno()
        self.assertIdle(engine)
        self.assertGreater(descriptors(), before)
        del engine
        gc.collect()
        self.assertEqual(descriptors(), before)

    def test_a_queue_or_stream_keeps_its_engine_alive(self):
        def add_to_a_local_engine():
            engine = open_engine()
            queue = engine.create_queue(1000)
            engine.add(LONG_CASE["prompt"], GREEDY, queue=queue, add_special=False)
            return queue

        queue, text = add_to_a_local_engine(), ""
        while not text.endswith("The end."):
            text += "".join(output.text for output in queue.poll())
        self.assertEqual(text, LONG_CASE["answer"])
        stream = open_engine().stream(LONG_CASE["prompt"], GREEDY, add_special=False)
        self.assertEqual("".join(output.text for output in stream), LONG_CASE["answer"])

    def test_a_missing_library_raises_an_import_error(self):
        done = subprocess.run(
            [sys.executable, "-c", "import pagedllm"],
            cwd=MODULE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PAGEDLLM_LIBRARY": "/nowhere/libpagedllm.so"},
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("ImportError: /nowhere/libpagedllm.so", done.stderr)
        self.assertIn("set PAGEDLLM_LIBRARY", done.stderr)

    def test_a_process_can_exit_with_a_live_engine(self):
        program = (
            "import pagedllm, sys, threading\n"
            f"engine = pagedllm.Engine({str(MODEL)!r}, threads=1, kv_bytes=16 << 20)\n"
            "stream = engine.stream('Hello', pagedllm.Sampling(ignore_eos=True))\n"
            "next(stream)\n"
            "threading.Thread(target=engine.queue.poll, daemon=True).start()\n"
            "print('alive')"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=MODULE, capture_output=True, text=True, timeout=600
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "alive\n", ""))


class Closing(Case):
    def test_every_call_after_close_is_refused(self):
        queue = self.engine.create_queue(1)
        own = self.engine.queue
        self.engine.close()
        self.engine.close()
        engine = self.engine
        for call in (
            engine.stats,
            engine.model_info,
            engine.step,
            engine.start,
            engine.stop,
            own.poll,
            own.fileno,
            lambda: engine.queue,
            lambda: engine.abort(1),
            lambda: engine.add("x"),
            lambda: engine.generate("x"),
            lambda: engine.stream("x"),
            lambda: engine.astream("x"),
            lambda: engine.create_queue(1),
            lambda: engine.tokenize("x"),
            lambda: engine.detokenize([1]),
            lambda: engine.token_bytes(1),
            lambda: engine.render_chat([]),
            engine.health,
            lambda: asyncio.run(engine.agenerate("x")),
            lambda: engine.fork(1),
            lambda: engine.append(1, [1]),
            lambda: engine.rewind(1, 1),
            lambda: engine.resume(1),
            lambda: engine.free(1),
            lambda: engine.sequence_info(1),
            lambda: engine.generate_resumed(1),
            lambda: engine.astream_resumed(1),
            lambda: engine.pin("x"),
            lambda: engine.unpin(1),
            lambda: engine.export_sequence(1),
            lambda: asyncio.run(engine.aexport_sequence(1)),
            lambda: engine.import_sequence(b"x"),
            lambda: engine.predict_admission("x"),
            engine.metrics,
            lambda: engine.budget,
        ):
            self.assertRefused(Code.CLOSED, "the engine is closed", call)
        self.assertRefused(Code.CLOSED, "", queue.poll)
        queue.close()

    def test_concurrent_close_ends_streams_that_are_being_read(self):
        for _ in range(5):
            engine = open_engine()
            reading = threading.Barrier(6)

            def read():
                stream = engine.stream(LONG_CASE["prompt"], ENDLESS, capacity=1, add_special=False)
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

    def test_a_queue_delivers_its_outputs_after_its_engine_is_closed(self):
        queue = self.engine.create_queue(3)
        self.engine.add(LONG_CASE["prompt"], GREEDY, queue=queue, add_special=False)
        self.assertEventually(lambda: self.engine.stats().paused == 1, "the queue is full")
        self.engine.close()
        outputs = queue.poll()
        self.assertEqual(
            [token for output in outputs for token in output.tokens], LONG_CASE["token_ids"][:3]
        )
        self.assertEqual(outputs[-1].finish_reason, FinishReason.ABORT)
        self.assertRefused(Code.CLOSED, "", queue.poll)


def hold(lock, locked, until):
    with lock:
        locked.set()
        until.wait(10)


def run_child(engine, queue, pipe):
    def code(call):
        try:
            call()
        except Error as error:
            return int(error.code)

    calls = (
        engine.stats,
        engine.step,
        lambda: engine.generate("x"),
        lambda: queue.poll(0),
        lambda: engine.queue.poll(0),
        engine.metrics,
        engine.health,
        lambda: engine.token_bytes(1),
        lambda: engine.predict_admission("x"),
        lambda: engine.budget.info(),
    )
    pipe.send([code(call) for call in calls])
    queue.close()
    engine.close()
    pipe.send([code(engine.stats), code(queue.poll)])


class ProcessFork(Case):
    def test_a_forked_child_process_is_refused_and_the_parent_continues(self):
        with self.engine.create_queue(8) as queue, ThreadPoolExecutor(
            2
        ) as pool, contextlib.ExitStack() as end:
            # Two threads do not exist in the child: one is in a call, one holds the queue's lock.
            polling = pool.submit(self.engine.queue.poll)
            self.assertEventually(
                lambda: self.engine._handle._users == 1, "the other thread is polling"
            )
            locked, forked = threading.Event(), threading.Event()
            pool.submit(hold, queue._handle._lock, locked, forked)
            self.assertTrue(locked.wait(10))
            ours, theirs = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(
                target=run_child, args=(self.engine, queue, theirs)
            )
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
            self.engine.add(LONG_CASE["prompt"], GREEDY, add_special=False)
            self.assertNotEqual(polling.result(10), [])
            self.assertEqual(
                self.engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
                LONG_CASE["answer"],
            )


if __name__ == "__main__":
    unittest.main()
