"""Engines that several workers compute, and their communicators.

usage of a worker, which the tests start as a process: test_workers.py worker GROUP_FILE BLOCK_SIZE
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import unittest

from support import ENDLESS, EXPECTED, GREEDY, LAST_RESORT, MODEL, SMALL, Case, descriptors, open_engine

import pagedllm
from pagedllm import Code, Communicator, Engine, Error, plan, run_worker

GROUP = f"{'/dev/shm' if os.access('/dev/shm', os.W_OK) else '/tmp'}/pagedllm-python-{os.getpid()}"
OF_TWO = {**SMALL, "tensor_parallel": 2, "worker_timeout_ms": LAST_RESORT * 1000}


def join(rank, size=2):
    return Communicator.shared_memory(GROUP, rank, size, LAST_RESORT)


def worker(group, block_size):
    """Run the worker with rank 1. The exit status is 0, or the code of the error."""
    reports = []
    with Communicator.shared_memory(group, 1, 2, LAST_RESORT) as world:
        try:
            run_worker(MODEL, communicator=world, block_size=int(block_size), **OF_TWO,
                       progress=lambda *report: reports.append(report))
        except Error as error:
            print(f"worker: {error}", file=sys.stderr)
            return error.code
    return 0 if reports and reports[-1][0] == reports[-1][1] else 98


class Workers(Case):
    def start(self, block_size=16):
        run = [sys.executable, __file__, "worker", GROUP, str(block_size)]
        process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def run_code(self, code, rank):
        """Start a process that joins the group and runs the code."""
        start = f"""import sys
sys.path[:0] = {sys.path!r}
from test_workers import *
world = Communicator.shared_memory({GROUP!r}, {rank}, 2)
"""
        process = subprocess.Popen([sys.executable, "-c", start + code], stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def assertAnswers(self, engine):
        """Check that the engine has the tokens of one worker."""
        for case in EXPECTED[:5]:
            answer = engine.generate(case["prompt"], GREEDY, add_special=False)
            self.assertEqual(answer.tokens, self.engine.generate(case["prompt"], GREEDY, add_special=False).tokens)
            self.assertEqual(answer.text, case["answer"])

    def test_two_processes_have_the_tokens_of_one(self):
        process = self.start()
        with join(0) as world:
            self.assertEqual((world.rank, world.size), (0, 2))
            engine = Engine(MODEL, communicator=world, **OF_TWO)
        # The communicator belongs to the engine: closing it has no effect.
        self.assertTrue(os.path.exists(GROUP))
        with engine:
            self.assertAnswers(engine)
        self.assertFalse(os.path.exists(GROUP))
        self.assertEqual(process.wait(LAST_RESORT), 0)

    def test_two_devices_of_one_process_have_the_tokens_of_one(self):
        with open_engine(device="cpu,cpu") as engine:
            self.assertAnswers(engine)
        self.assertRefused(Code.INVALID_ARGUMENT, "tensor_parallel", open_engine, device="cpu,cpu", tensor_parallel=3)

    def test_a_plan_is_that_of_one_worker(self):
        self.assertEqual(2 * plan(MODEL, **OF_TWO).block_bytes, plan(MODEL, **SMALL).block_bytes)

    def test_other_options_are_an_error_of_both_ranks(self):
        process = self.start(block_size=32)
        with join(0) as world:
            self.assertRefused(Code.INVALID_ARGUMENT, "block_size", Engine, MODEL, communicator=world, **OF_TWO)
        self.assertEqual(process.wait(LAST_RESORT), Code.INVALID_ARGUMENT)
        self.assertIn("rank 1 has block_size 32", process.stderr.read())

    def test_a_worker_needs_a_communicator_of_another_rank(self):
        self.assertRefused(Code.INVALID_ARGUMENT, "tensor_parallel", run_worker, MODEL, **SMALL)
        self.assertRefused(Code.INVALID_ARGUMENT, "communicator", run_worker, MODEL, **OF_TWO)
        with join(0, 1) as world:
            self.assertRefused(Code.INVALID_ARGUMENT, "rank 0", run_worker, MODEL, communicator=world, **SMALL)
            # The call has failed, so the communicator still belongs to this process.
            open_engine(communicator=world).close()

    def test_the_end_of_the_engine_is_an_error_of_the_worker(self):
        self.run_code("""
engine = Engine(MODEL, communicator=world, **OF_TWO)
os.kill(os.getpid(), signal.SIGKILL)
""", rank=0)
        with join(1) as world:
            self.assertRefused(Code.INTERNAL, "rank 0", run_worker, MODEL, communicator=world, **OF_TWO)

    def test_an_exception_in_progress_cancels_the_worker(self):
        def cancel(done, total):
            raise LookupError("enough")

        failures = []

        def engine():
            with join(0) as world:
                try:
                    Engine(MODEL, communicator=world, **OF_TWO)
                except Error as error:
                    failures.append(error.code)

        thread = threading.Thread(target=engine)
        thread.start()
        with join(1) as world, self.assertRaisesRegex(LookupError, "enough"):
            run_worker(MODEL, communicator=world, progress=cancel, **OF_TWO)
        thread.join()
        self.assertEqual(failures, [Code.CANCELLED])

    def test_ctrl_c_ends_a_worker_that_serves(self):
        process = self.start()
        with join(0) as world, Engine(MODEL, communicator=world, host_steps=True, **OF_TWO) as engine:
            engine.add("Hello", ENDLESS)
            engine.step()
            process.send_signal(signal.SIGINT)
            # The process ends although its engine has not.
            self.assertEqual(process.wait(LAST_RESORT), -signal.SIGINT)
            self.assertIn("KeyboardInterrupt", process.stderr.read())
            with self.assertRaises(Error):
                for _ in range(500):  # fewer steps than the request has
                    engine.step()
            self.assertEqual(engine.health().code, Code.INTERNAL)

    def test_a_process_ends_after_its_worker_has_stopped_loading(self):
        process = self.run_code("""
import time
def interrupt(done, total):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # the main thread ends meanwhile
run_worker(MODEL, communicator=world, progress=interrupt, **OF_TWO)
""", rank=1)
        with join(0) as world:
            self.assertRefused(Code.CANCELLED, "rank 1", Engine, MODEL, communicator=world, **OF_TWO)
        self.assertEqual(process.wait(LAST_RESORT), -signal.SIGINT)
        self.assertIn("KeyboardInterrupt", process.stderr.read())

    def assertEnds(self, code):
        """Run the code in a process. It must end with status 0."""
        start = f"import sys\nsys.path[:0] = {sys.path!r}\nfrom test_workers import *\n"
        ended = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=LAST_RESORT)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_a_process_ends_if_no_thread_can_be_started(self):
        self.assertEnds("""
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
errors = []  # they refer to the loads
for load in (lambda: Engine(MODEL), lambda: run_worker(MODEL)):
    try:
        load()
    except RuntimeError as error:
        errors.append(error)
if len(errors) != 2:
    sys.exit("not refused")
""")

    def test_a_forked_child_ends_while_its_parent_loads(self):
        self.assertEnds("""
loads, forked = threading.Event(), threading.Event()
def wait(done, total):
    loads.set()
    forked.wait()
thread = threading.Thread(target=open_engine, kwargs={"progress": wait})
thread.start()
loads.wait()
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    forked.set()
    thread.join()
    sys.exit(status)
""")

    def test_a_load_that_is_cancelled_before_it_starts_makes_no_call(self):
        loading = pagedllm._Loading(None)
        loading.cancel()
        self.assertRefused(Code.CANCELLED, "cancelled", loading.load, self.fail, pagedllm._EngineOptions(), None, None, None)
        self.assertTrue(loading._finished.is_set())

    def test_a_worker_releases_the_gil(self):
        failures = []

        def run():
            with join(1) as world:
                try:
                    run_worker(MODEL, communicator=world, **OF_TWO)
                except Error as error:
                    failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        with join(0) as world, Engine(MODEL, communicator=world, **OF_TWO) as engine:
            self.assertAnswers(engine)
        thread.join()
        self.assertEqual(failures, [])


class Communicators(Case):
    def test_one_that_an_engine_has_taken_is_refused(self):
        taken = "the communicator is closed, or belongs to an engine or a worker; create another one"
        world = join(0, 1)
        with open_engine(communicator=world):
            self.assertRefused(Code.INVALID_ARGUMENT, taken, open_engine, communicator=world)
        self.assertRefused(Code.INVALID_ARGUMENT, taken, open_engine, communicator=world)
        self.assertRefused(Code.INVALID_ARGUMENT, taken, run_worker, MODEL, communicator=world, **SMALL)
        world.close()
        self.assertRefused(Code.CLOSED, "the communicator is closed", open_engine, communicator=world)

    def test_one_that_is_not_used_is_closed(self):
        before = descriptors()
        for _ in range(20):
            with join(0, 1):
                self.assertTrue(os.path.exists(GROUP))
            self.assertFalse(os.path.exists(GROUP))
        self.assertEqual(descriptors(), before)

    def test_one_that_is_unreachable_is_closed(self):
        gc.disable()
        self.addCleanup(gc.enable)
        world = join(0, 1)
        self.assertTrue(os.path.exists(GROUP))
        del world
        self.assertFalse(os.path.exists(GROUP))

    def test_ctrl_c_ends_the_wait_for_other_ranks(self):
        def interrupt():
            self.assertEventually(lambda: os.path.exists(GROUP), "rank 0 waits")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with self.assertRaises(KeyboardInterrupt):
            join(0)
        thread.join()
        # The rank leaves the group when the wait has ended.
        self.assertTrue(os.path.exists(GROUP))
        with join(1):
            self.assertEventually(lambda: not os.path.exists(GROUP), "the rank has left the group")

    def test_errors_are_those_of_the_library(self):
        refused = self.assertRefused
        refused(Code.INVALID_ARGUMENT, "rank", Communicator.shared_memory, GROUP, 2, 2)
        refused(Code.INVALID_ARGUMENT, "rank is -1", Communicator.shared_memory, GROUP, -1, 2)
        refused(Code.IO, "rank 1 has not joined", Communicator.shared_memory, GROUP, 0, 2, 0)
        refused(Code.IO, "/nowhere/group", Communicator.shared_memory, "/nowhere/group", 0, 1)
        refused(Code.INVALID_ARGUMENT, "NUL", Communicator.shared_memory, GROUP + "\0x", 0, 1)
        self.assertFalse(os.path.exists(GROUP))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        sys.exit(worker(*sys.argv[2:]))
    unittest.main()
