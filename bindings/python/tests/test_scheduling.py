"""Scheduling options, admission, memory budgets, telemetry."""

import gc
import json
import os
import pathlib
import re
import tempfile
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

from support import (
    ENDLESS,
    EXPECTED,
    GREEDY,
    LAST_RESORT,
    LONG_CASE,
    MODEL,
    SMALL,
    Case,
    open_engine,
    threads,
)

import pagedllm
from pagedllm import (
    Allocation,
    Batching,
    Budget,
    Code,
    DType,
    Error,
    FinishReason,
    KvEventKind,
    KvMedium,
    Order,
    Preemption,
    Sampling,
    Weights,
)


class Scheduling(Case):
    def first_of(self, waiting, **options):
        """Return the index of the request that runs first. `waiting`: keywords of add()."""
        with open_engine(host_steps=True, max_seqs=1, **options) as engine:
            running = engine.add("Hello", ENDLESS, priority=100)
            ids = []
            for one in waiting:
                ids.append(engine.add("Hello", **{"sampling": ENDLESS, **one}))
                engine.step()
                time.sleep(0.05)
            engine.abort(running)
            for _ in range(2):
                engine.step()
            return next(
                ids.index(output.request)
                for output in engine.queue.poll(0)
                if output.request in ids
            )

    def test_order_determines_the_first_request(self):
        urgent = [{}, {"priority": 1}]
        self.assertEqual(self.first_of(urgent), 0)
        self.assertEqual(self.first_of(urgent, order=Order.PRIORITY), 1)
        self.assertEqual(self.first_of(urgent, order=Order.PRIORITY, ageing_ms=1), 0)
        short = [{}, {"sampling": Sampling(max_tokens=5)}]
        self.assertEqual(self.first_of(short), 0)
        self.assertEqual(self.first_of(short, order=Order.SHORTEST_PREDICTED), 1)

    def test_batching_determines_the_composition_of_a_step(self):
        for options, expected in (
            ({}, (100, 1)),
            ({"batching": Batching.PREFILL_FIRST}, (100, 0)),
            ({"batching": Batching.STATIC}, (0, 1)),
            ({"batching": Batching.DECODE_FIRST, "prefill_budget": 16}, (16, 1)),
        ):
            with self.subTest(options), open_engine(host_steps=True, **options) as engine:
                engine.add("Hello", ENDLESS)
                engine.step()
                engine.add([70] * 100)
                step = engine.step()
                self.assertEqual((step.prefill_tokens, step.decode_tokens), expected)

    def test_allocation_determines_the_reserved_blocks(self):
        for allocation, low, high in (
            (Allocation.ON_DEMAND, 0.1, 1),
            (Allocation.MAX_TOKENS, 0, 0.02),
        ):
            with open_engine(host_steps=True, allocation=allocation) as engine:
                engine.add("Hello", Sampling(max_tokens=200))
                engine.step()
                self.assertTrue(low < engine.stats().slot_utilization < high, engine.stats())

    def test_preempted_requests_are_swapped_and_give_the_same_answer(self):
        block = pagedllm.plan(MODEL, **SMALL).block_bytes
        sampling = Sampling(temperature=0, max_tokens=150, ignore_eos=True)
        alone = self.engine.generate(LONG_CASE["prompt"], sampling, add_special=False)
        with tempfile.TemporaryDirectory() as folder:
            for path in (None, folder, os.fsencode(folder), pathlib.Path(folder)):
                options = {
                    "kv_bytes": 24 * block,
                    "max_model_len": 256,
                    "preemption": Preemption.SWAP,
                    "swap_bytes": 200 * block,
                    "swap_path": path,
                }
                plan = pagedllm.plan(MODEL, **options)
                self.assertEqual((plan.swap_bytes, plan.swap_blocks), (200 * block, 200))
                with open_engine(host_steps=True, **options) as engine, ThreadPoolExecutor(
                    8
                ) as pool:
                    futures = pool.map(
                        lambda salt: engine.generate(
                            LONG_CASE["prompt"], sampling, cache_salt=str(salt), add_special=False
                        ),
                        range(8),
                    )
                    self.assertEventually(
                        lambda: engine.predict_admission("Hello").waiting_requests == 8,
                        "all requests wait",
                    )
                    engine.start()
                    answers = list(futures)
                    self.assertEventually(
                        lambda: engine.stats().finished_length == 8, "all requests are counted"
                    )
                    stats = engine.stats()
                self.assertEqual(
                    {(answer.text, *answer.tokens) for answer in answers},
                    {(alone.text, *alone.tokens)},
                )
                self.assertGreater(stats.preemptions_swapped, 0)
                self.assertEqual(stats.preemptions, sum(answer.preemptions for answer in answers))
                self.assertEqual(
                    (stats.swap_blocks_total, stats.swap_blocks_used, stats.swapped), (200, 0, 0)
                )
                self.assertTrue(
                    stats.blocks_swapped_out >= stats.blocks_swapped_in > stats.swap_failures == 0,
                    stats,
                )

    def test_an_int8_kv_cache_needs_about_half_the_bytes(self):
        int8, bf16 = (
            pagedllm.plan(MODEL, **SMALL, kv_dtype=dtype) for dtype in (DType.INT8, DType.BF16)
        )
        self.assertEqual(int8.kv_dtype, DType.INT8)
        self.assertLess(int8.block_bytes, 0.6 * bf16.block_bytes)
        with open_engine(kv_dtype=DType.INT8) as engine:
            self.assertEqual(engine.stats().blocks_total, int8.blocks)
            self.assertIn(
                "upon a time", engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text
            )

    def test_quantized_weights_need_fewer_bytes(self):
        plans = [
            pagedllm.plan(MODEL, **SMALL, weight_format=weights)
            for weights in (Weights.BF16, Weights.INT8, Weights.INT4)
        ]
        bf16, int8, int4 = (plan.weight_bytes for plan in plans)
        self.assertLess(int8, 0.55 * bf16)
        self.assertLess(int4, int8)
        self.assertRefused(
            Code.INVALID_ARGUMENT,
            "weight_group is 48",
            pagedllm.plan,
            MODEL,
            weight_format=Weights.INT4,
            weight_group=48,
        )
        for weights, group in (
            (Weights.INT8, None),
            (Weights.INT4, 64),
            (Weights.INT4_ASYMMETRIC, 128),
        ):
            with open_engine(weight_format=weights, weight_group=group) as engine:
                self.assertIn(
                    "upon a time",
                    engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
                )

    def test_threads_are_pinned_to_the_given_cpus(self):
        cpus = sorted(os.sched_getaffinity(0))
        with open_engine(threads=None, cpus=",".join(map(str, cpus))) as engine:
            self.assertEqual(engine.model_info().threads, len(cpus))
            self.assertIn(
                "upon a time", engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text
            )
        self.assertEqual(sorted(os.sched_getaffinity(0)), cpus)

    def test_packed_weights_are_saved_and_read_back(self):
        Packed = pagedllm.Packed
        with tempfile.TemporaryDirectory() as path:
            for packed, reason in ((Packed.SAVED, "no packed weights yet"), (Packed.READ, "")):
                with open_engine(packed_path=path) as engine:
                    self.assertEqual(
                        (engine.model_info().packed, engine.model_info().packed_reason),
                        (packed, reason),
                    )
                    self.assertIn(
                        "upon a time",
                        engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
                    )
        with open_engine() as engine:
            self.assertEqual(
                (engine.model_info().packed, engine.model_info().packed_reason), (Packed.UNUSED, "")
            )
        self.assertRefused(
            Code.IO, "does not exist or is not a directory", open_engine, packed_path="/nonexistent"
        )

    def test_a_deadline_ends_a_request_and_keeps_its_tokens(self):
        with open_engine(host_steps=True) as engine:
            # On a busy machine, the second step may begin after a short deadline.
            deadline, outputs = 0.5, []
            while len(outputs) < 3 and deadline < LAST_RESORT:
                request = engine.add("Hello", ENDLESS, deadline=deadline, keep=True)
                for slept in (0, 0.05, deadline):
                    time.sleep(slept)
                    unfinished = engine.step().unfinished
                self.assertEqual(unfinished, 0)
                outputs = engine.queue.poll(0)
                deadline *= 2
            self.assertEqual([len(output.tokens) for output in outputs], [1, 1, 0])
            self.assertEqual(outputs[-1].finish_reason, FinishReason.DEADLINE)
            for continue_generation in (False, True):
                engine.resume(
                    request,
                    None if continue_generation else ENDLESS,
                    deadline=0.1,
                    continue_generation=continue_generation,
                )
                time.sleep(0.11)
                engine.step()
                self.assertEqual(engine.queue.poll(0)[-1].finish_reason, FinishReason.DEADLINE)
            self.assertGreaterEqual(engine.stats().finished_deadline, 3)

    def test_generate_returns_the_answer_at_its_deadline(self):
        slow = open_engine(host_steps=True)  # the first step runs after the deadline
        self.addCleanup(slow.close)
        threading.Timer(0.05, slow.start).start()
        answer = slow.generate("Hello", ENDLESS, deadline=0.02)
        self.assertEqual((answer.text, answer.finish_reason), ("", FinishReason.DEADLINE))
        self.assertEqual(
            (answer.queued_seconds, answer.first_token_seconds, answer.last_token_seconds),
            (0, 0, 0),
        )


class Admission(Case):
    def test_texts_longer_than_max_prompt_bytes_are_refused(self):
        with open_engine(host_steps=True, max_prompt_bytes=100) as engine:
            chat = [{"role": "user", "content": "x" * 100}]
            for call in (
                lambda: engine.tokenize("x" * 101),
                lambda: engine.add("x" * 101, ENDLESS),
                lambda: engine.render_chat(chat),
            ):
                self.assertRefused(Code.INVALID_ARGUMENT, "max_prompt_bytes 100", call)
            engine.tokenize("x" * 100)

    def test_requests_above_the_waiting_limits_are_refused(self):
        for limit, waits in (
            ({"max_waiting_requests": 1}, "full (1 requests, 1 more"),
            ({"max_waiting_tokens": 5}, "full (2 tokens, "),
        ):
            with self.subTest(limit), open_engine(host_steps=True, **limit) as engine:
                engine.add("Hello", ENDLESS)
                with self.assertRaisesRegex(Error, re.escape(waits)) as caught:
                    engine.add([70] * 4)
                self.assertEqual((caught.exception.code, caught.exception.is_temporary), (Code.CAPACITY, True))
                self.assertEqual(engine.stats().admission_rejections, 1)
                engine.step()
                engine.add([70] * 4)

    def test_predict_admission_adds_no_request(self):
        with open_engine(host_steps=True, max_seqs=1, max_waiting_requests=1) as engine:
            self.assertEqual(engine.predict_admission("Hello"), (True, True, None, 0, 0))
            engine.add("Hello", ENDLESS)
            self.assertEqual(
                engine.predict_admission("Hello", ENDLESS, user_data=1, keep=True),
                (False, False, None, 1, 2),
            )
            for _ in range(3):
                engine.step()
            admission = engine.predict_admission("Hello", GREEDY)
            self.assertEqual((admission.admits, admission.fits_now), (True, False))
            self.assertGreater(admission.first_token_seconds, 0)
            self.assertEqual((engine.stats().waiting, engine.stats().admission_rejections), (0, 0))
            self.assertRefused(
                Code.INVALID_ARGUMENT, "5000 tokens", engine.predict_admission, [70] * 5000
            )
            with open_engine() as other:
                self.assertRefused(
                    Code.INVALID_ARGUMENT,
                    "queue",
                    engine.predict_admission,
                    "Hello",
                    queue=other.create_queue(1),
                )
            with self.assertRaises(TypeError):
                engine.predict_admission("Hello", dead_line=1)


class Budgets(Case):
    def setUp(self):
        super().setUp()
        self.block = pagedllm.plan(MODEL, **SMALL).block_bytes
        self.budget = Budget(200 * self.block, 400 * self.block)
        self.addCleanup(self.budget.close)

    def open(self, budget=None, **options):
        engine = open_engine(kv_bytes=None, budget=budget or self.budget, **options)
        self.addCleanup(engine.close)
        return engine

    def test_engines_share_a_budget(self):
        plan = pagedllm.plan(MODEL, budget=self.budget)
        self.assertEqual(
            (plan.blocks, plan.max_blocks, plan.kv_bytes), (200, 400, 200 * self.block)
        )
        self.assertEqual(self.budget.info(), (200 * self.block, 0, 400 * self.block, 0, 0))
        engines = [self.open(), self.open()]
        with ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(engine.generate, case["prompt"], GREEDY, add_special=False)
                for case in EXPECTED
                for engine in engines
            ]
            self.assertEqual(
                [one.result().text for one in futures],
                [case["answer"] for case in EXPECTED for _ in engines],
            )
        state = self.budget.info()
        self.assertEqual((state.engines, state.min_bytes), (2, 128 * self.block))
        self.assertEqual(engines[0].budget.info(), state)
        engines[0].close()
        self.assertEqual(self.budget.info().engines, 1)
        self.assertRefused(Code.CLOSED, "the engine is closed", lambda: engines[0].budget)

    def test_resizing_a_budget_changes_no_answer(self):
        engine = self.open()
        with ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(engine.generate, case["prompt"], GREEDY, add_special=False)
                for case in EXPECTED * 5
            ]
            for blocks in (64, 400, 100, 64, 300):
                self.budget.resize(blocks * self.block)
                time.sleep(0.02)
            self.assertEqual(
                [one.result().text for one in futures], [case["answer"] for case in EXPECTED * 5]
            )
        self.assertEqual(self.budget.info().bytes, 300 * self.block)
        self.assertEventually(
            lambda: engine.stats().blocks_total == 300, "the engine uses the whole budget"
        )

    def test_an_engine_without_a_budget_option_has_its_own_budget(self):
        budget = self.engine.budget
        self.assertEqual(budget.info()[0::2], (SMALL["kv_bytes"], SMALL["kv_bytes"], 1))
        budget.close()
        budget.resize(SMALL["kv_bytes"] // 2)
        self.assertEventually(
            lambda: self.engine.stats().blocks_total == 256, "the pool is smaller"
        )
        with self.open(budget) as other:
            self.assertEqual(other.budget.info().engines, 2)
        self.engine.close()
        self.assertRefused(Code.CLOSED, "the engine is closed", budget.info)
        self.assertRefused(Code.CLOSED, "the engine is closed", self.open, budget)

    def test_engines_keep_a_budget_after_its_handle_is_closed(self):
        with Budget(64 * self.block) as budget:
            engine = self.open(budget)
        for call in (
            budget.info,
            lambda: budget.resize(1),
            lambda: self.open(budget),
            lambda: pagedllm.plan(MODEL, budget=budget),
        ):
            self.assertRefused(Code.CLOSED, "the budget is closed", call)
        unreachable = self.open(Budget(64 * self.block))
        gc.collect()
        for one in (engine, unreachable):
            self.assertEqual(
                one.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
                LONG_CASE["answer"],
            )
            self.assertEqual(one.budget.info().bytes, 64 * self.block)

    def test_invalid_budgets_are_refused(self):
        self.open()
        for code, message, call in [
            (Code.INVALID_ARGUMENT, "bytes is 0", lambda: Budget(0)),
            (Code.INVALID_ARGUMENT, "bytes is 5; must be 1 to 4", lambda: Budget(5, 4)),
            (Code.INVALID_ARGUMENT, "bytes is -1", lambda: Budget(-1)),
            (Code.INVALID_ARGUMENT, "max_bytes is", lambda: Budget(1, 2**64)),
            (Code.CAPACITY, "created with max_bytes", lambda: self.budget.resize(401 * self.block)),
            (
                Code.CAPACITY,
                f"need {64 * self.block} bytes for their longest sequences",
                lambda: self.budget.resize(63 * self.block),
            ),
            (Code.INVALID_ARGUMENT, "bytes is -1", lambda: self.budget.resize(-1)),
            (Code.INVALID_ARGUMENT, "both set", lambda: open_engine(budget=self.budget)),
        ]:
            with self.subTest(message):
                self.assertRefused(code, message, call)
        self.assertEqual(self.budget.info()[0::4], (200 * self.block, 1))


class Telemetry(Case):
    def test_the_last_output_has_the_times_of_its_request(self):
        start = time.monotonic()
        outputs = list(self.engine.stream("Hello", Sampling(max_tokens=20, ignore_eos=True)))
        elapsed = time.monotonic() - start
        last = outputs.pop()
        self.assertTrue(
            0 < last.queued_seconds < last.first_token_seconds < last.last_token_seconds < elapsed,
            last,
        )
        self.assertEqual(
            {
                (output.queued_seconds, output.first_token_seconds, output.last_token_seconds)
                for output in outputs
            },
            {(0, 0, 0)},
        )
        prompt = [70] * 40
        self.assertEqual(
            [self.engine.generate(prompt, Sampling(max_tokens=1)).cached_tokens for _ in range(2)],
            [0, 32],
        )
        self.assertEventually(
            lambda: self.engine.stats().prompt_tokens_cached == 32, "the cached tokens are counted"
        )

    def test_a_snapshot_has_the_blocks_and_the_steps(self):
        self.engine.generate("Hello " * 20, Sampling(max_tokens=3, ignore_eos=True))
        self.assertEventually(lambda: self.engine.stats().running == 0, "the request has ended")
        snapshot = self.engine.snapshot()
        pool = snapshot["pool"]
        self.assertEqual(pool["free"] + pool["cached"] + pool["used"], pool["blocks"])
        self.assertEqual(sum(run[0] for run in pool["runs"]), pool["blocks"])
        self.assertIn("cached", [run[1] for run in pool["runs"]])
        self.assertEqual(snapshot["steps"][-1]["decode_tokens"], 1)
        self.assertEqual(self.engine.snapshot(max_blocks=0)["pool"]["runs"], [])

    def test_metrics_have_the_prometheus_text_format(self):
        self.engine.generate("Hello", Sampling(max_tokens=3, ignore_eos=True))
        self.assertEventually(
            lambda: self.engine.stats().finished_length == 1, "the request is counted"
        )
        text = self.engine.metrics()
        self.assertTrue(text.endswith("\n# EOF\n"), text[-20:])
        kinds, values = {}, {}
        for line in text.splitlines()[:-1]:
            if line.startswith("#"):
                declared = re.fullmatch(
                    r"# (TYPE (pagedllm_\w+) (gauge|counter|histogram|info)|(HELP|UNIT) pagedllm_\w+ .+)",
                    line,
                )
                kinds[declared[2]] = declared[3]
            else:
                name, labels, value = re.fullmatch(
                    r'(pagedllm_\w+)\{model_name="model"((?:,\w+="[^"]*")*)\} (\S+)', line
                ).groups()
                values[name + labels] = float(value)
        self.assertEqual(
            (
                kinds["pagedllm_num_requests_running"],
                kinds["pagedllm_generation_tokens"],
                kinds["pagedllm_time_to_first_token_seconds"],
            ),
            ("gauge", "counter", "histogram"),
        )
        for name, value in {
            'request_success_total,finished_reason="length"': 1,
            "generation_tokens_total": 3,
            "request_generation_tokens_sum": 3,
            'request_generation_tokens_bucket,le="2.0"': 0,
            'request_generation_tokens_bucket,le="4.0"': 1,
            "kv_cache_usage_perc": 0,
        }.items():
            self.assertEqual(values["pagedllm_" + name], value, name)

    def test_trace_and_journal_are_written_to_files(self):
        with tempfile.TemporaryDirectory() as folder:
            trace, journal = pathlib.Path(folder, "trace.json"), os.fsencode(
                os.path.join(folder, "journal")
            )
            with open_engine(trace_path=trace, journal_path=journal, host_steps=True) as engine:
                engine.add("Hello", Sampling(max_tokens=3, ignore_eos=True))
                while engine.step().unfinished:
                    pass
                self.assertEqual(
                    (engine.stats().traces_stopped, engine.stats().journals_stopped), (0, 0)
                )
            events = json.loads(trace.read_text(encoding="utf-8"))
            self.assertEqual(sum(event["name"] == "step" for event in events), 3)
            self.assertTrue(pathlib.Path(os.fsdecode(journal)).read_bytes().startswith(b"PLLMJRNL"))


class KvEvents(Case):
    def test_events_give_the_blocks_of_a_prompt_with_the_hashes_of_hash_prompt(self):
        tokens = list(range(10, 58))
        with open_engine(host_steps=True, kv_events_capacity=1000) as engine:
            hashes = engine.hash_prompt(tokens)
            self.assertEqual([len(one) for one in hashes], [32] * 3)
            engine.add(tokens, Sampling(max_tokens=2))
            while engine.step().unfinished:
                pass
            events = engine.poll_kv_events(1.0)
            self.assertEqual([event.kind for event in events], [KvEventKind.STORED] * 3)
            self.assertEqual([event.hash for event in events], hashes)
            self.assertEqual([event.parent_hash for event in events[1:]], hashes[:2])
            self.assertEqual([event.first_token for event in events], [0, 16, 32])
            self.assertEqual(sum((event.tokens for event in events), []), tokens)
            self.assertLess(abs(time.time() - events[0].time_seconds), 3600)
            self.assertEqual(events[0].medium, KvMedium.POOL)
            self.assertEqual(engine.poll_kv_events(), [])
            first, *blocks = engine.snapshot_kv_events()
            self.assertEqual((first.kind, first.hash, first.parent_hash, first.tokens), (KvEventKind.CLEARED, None, None, []))
            self.assertEqual({event.hash for event in blocks}, set(hashes))
            self.assertFalse(set(engine.hash_prompt(tokens, cache_salt="tenant")) & set(hashes))
            self.assertRefused(Code.INVALID_ARGUMENT, "group", engine.hash_prompt, tokens, group=1)
            self.assertRefused(Code.INVALID_ARGUMENT, "timeout", engine.poll_kv_events, -1)

    def test_calls_without_events_are_refused(self):
        with open_engine() as engine:
            self.assertRefused(Code.UNSUPPORTED, "kv_events_capacity", engine.poll_kv_events)
            self.assertRefused(Code.UNSUPPORTED, "kv_events_capacity", engine.snapshot_kv_events)


if __name__ == "__main__":
    unittest.main()
