"""Text generation: one request, streams, asyncio, cancellation."""

import asyncio
import pickle
import signal
import threading
import time
import unittest
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

from support import (
    ENDLESS,
    EXPECTED,
    GREEDY,
    LONG_CASE,
    MODEL,
    SMALL,
    Case,
    descriptors,
    open_engine,
    threads,
)

import pagedllm
from pagedllm import Code, DType, Error, FinishReason, Grammar, OutputKind, Sampling, StopReason


class Generation(Case):
    def test_greedy_answers_match_the_training_data(self):
        for case in EXPECTED:
            prompt = self.engine.render_chat(case["messages"])
            self.assertEqual(prompt, case["prompt"])
            completion = self.engine.generate(prompt, GREEDY, add_special=False)
            self.assertEqual(
                (completion.text, completion.tokens), (case["answer"], case["token_ids"])
            )
            self.assertEqual(completion.finish_reason, FinishReason.STOP)

    def test_a_response_is_separated_in_content_and_tool_calls(self):
        tools = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
        text = "<tool_call>f\n<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>y</arg_key>"
        text += "<arg_value>1</arg_value></tool_call>"
        with pagedllm.ResponseParser(format="glm45", tools=tools) as parser:
            deltas = [delta for character in text for delta in parser.feed(character)]
            deltas += parser.finish()
            self.assertRefused(Code.INVALID_ARGUMENT, "has ended", parser.feed, "x")
        calls = [delta["tool_calls"][0] for delta in deltas]
        self.assertEqual((calls[0]["id"], calls[0]["function"]["name"]), ("call_0", "f"))
        arguments = "".join(call["function"]["arguments"] for call in calls)
        self.assertEqual(arguments, '{"x": 1, "y": "1"}')
        self.assertRefused(Code.CLOSED, "closed", parser.finish)
        self.assertRefused(Code.INVALID_ARGUMENT, "engine", pagedllm.ResponseParser)
        known = pagedllm.build_info()["response_formats"]
        self.assertIn("hermes", known)
        parser = pagedllm.ResponseParser(self.engine)  # the bundled model has no tools
        self.assertEqual(parser.feed("<tool_call>"), [{"content": "<tool_call>"}])

    def test_a_stream_delivers_the_answer_in_pieces(self):
        outputs = list(self.engine.stream(LONG_CASE["prompt"], GREEDY, add_special=False))
        self.assertEqual("".join(output.text for output in outputs), LONG_CASE["answer"])
        self.assertEqual(
            [token for output in outputs for token in output.tokens], LONG_CASE["token_ids"]
        )
        self.assertGreater(len(outputs), 10)
        self.assertEqual({output.finish_reason for output in outputs[:-1]}, {FinishReason.NONE})
        self.assertEqual(outputs[-1].finish_reason, FinishReason.STOP)
        self.assertEqual(outputs[-1].generated_tokens, len(LONG_CASE["token_ids"]))

    def test_token_ids_and_text_give_the_same_answer(self):
        tokens = self.engine.tokenize(LONG_CASE["prompt"])
        self.assertEqual(self.engine.detokenize(tokens), LONG_CASE["prompt"])
        completion = self.engine.generate(tokens, GREEDY)
        self.assertEqual(completion.text, LONG_CASE["answer"])
        self.assertEqual(completion.prompt_tokens, len(tokens))

    def test_a_nul_byte_is_ordinary_text(self):
        tokens = self.engine.tokenize("a\0b")
        self.assertEqual(self.engine.detokenize(tokens), "a\0b")
        self.assertEqual(
            self.engine.generate("a\0b", Sampling(max_tokens=1), add_special=False).prompt_tokens,
            len(tokens),
        )

    def test_flags_control_special_tokens_in_prompt_and_answer(self):
        def prompt_tokens(**flags):
            return self.engine.generate("Hello", Sampling(max_tokens=1), **flags).prompt_tokens

        self.assertEqual(prompt_tokens(), prompt_tokens(add_special=True))
        self.assertEqual(prompt_tokens(add_special=False) + 1, prompt_tokens(add_special=True))
        shown = self.engine.generate(
            LONG_CASE["prompt"], GREEDY, add_special=False, skip_special=False
        )
        self.assertNotEqual(self.engine.detokenize(LONG_CASE["token_ids"]), LONG_CASE["answer"])
        self.assertEqual(
            self.engine.detokenize(LONG_CASE["token_ids"], skip_special=True), LONG_CASE["answer"]
        )
        self.assertTrue(shown.text.startswith(LONG_CASE["answer"]))

    def test_basic_sampling_parameters_have_their_effect(self):
        def ask(**sampling):
            return self.engine.generate(
                LONG_CASE["prompt"], Sampling(**{"temperature": 0, **sampling}), add_special=False
            )

        whole, tokens = LONG_CASE["answer"], LONG_CASE["token_ids"]
        self.assertEqual(ask(stop="village").text, whole[: whole.index("village")])
        self.assertEqual(ask(stop=["never", "Hugo"]).text, whole[: whole.index("Hugo")])
        self.assertEqual(
            ask(stop_token_ids=[tokens[7]]).tokens, tokens[: tokens.index(tokens[7]) + 1]
        )
        short = ask(max_tokens=5)
        self.assertEqual((short.tokens, short.finish_reason), (tokens[:5], FinishReason.LENGTH))
        self.assertGreater(len(ask(min_tokens=len(tokens) + 1).tokens), len(tokens))
        self.assertIsNone(short.logprobs)
        logprobs = ask(max_tokens=5, logprobs=True).logprobs
        self.assertEqual(len(logprobs), 5)
        self.assertTrue(all(-1 < p <= 0 for p in logprobs), logprobs)

    def test_a_seed_makes_samples_repeatable_and_missing_values_have_defaults(self):
        def ask(**sampling):
            return self.engine.generate(
                "Once", Sampling(max_tokens=20, ignore_eos=True, **sampling)
            ).tokens

        self.assertEqual(ask(seed=2**64 - 1), ask(seed=2**64 - 1))
        self.assertNotEqual(ask(seed=1), ask(seed=2))
        self.assertEqual(ask(seed=1), ask(seed=1, temperature=1, top_p=1, min_p=0, top_k=0))
        self.assertNotEqual(ask(seed=1), ask(seed=1, temperature=0))

    def test_concurrent_threads_get_the_same_answers_as_single_requests(self):
        def ask(i):
            case = EXPECTED[i % len(EXPECTED)]
            return (
                self.engine.generate(case["prompt"], GREEDY, add_special=False).text
                == case["answer"]
            )

        with ThreadPoolExecutor(32) as pool:
            self.assertEqual(set(pool.map(ask, range(96))), {True})
        self.assertIdle()

    def test_outputs_in_a_shared_queue_name_their_request(self):
        with self.engine.create_queue(1000) as queue:
            ids = [
                self.engine.add(case["prompt"], GREEDY, queue=queue, user_data=i, add_special=False)
                for i, case in enumerate(EXPECTED)
            ]
            texts = dict.fromkeys(ids, "")
            ended = set()
            while len(ended) < len(ids):
                for output in queue.poll():
                    self.assertEqual(ids[output.user_data], output.request)
                    texts[output.request] += output.text
                    ended |= {output.request} if output.finish_reason else set()
        self.assertEqual(list(texts.values()), [case["answer"] for case in EXPECTED])

    def test_two_engines_run_at_the_same_time(self):
        with open_engine(kv_dtype=DType.F32) as other, ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(engine.generate, case["prompt"], GREEDY, add_special=False)
                for case in EXPECTED
                for engine in (self.engine, other)
            ]
            self.assertEqual(
                [one.result().text for one in futures],
                [case["answer"] for case in EXPECTED for _ in range(2)],
            )
        self.assertEqual(other.close(), None)
        self.assertEqual(
            self.engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
            LONG_CASE["answer"],
        )

    def test_info_plan_and_statistics_describe_the_engine(self):
        info, plan, stats = (
            self.engine.model_info(),
            pagedllm.plan(MODEL, **SMALL),
            self.engine.stats(),
        )
        self.assertEqual(
            (info.architecture, info.vocab_size, info.layers, info.threads),
            ("LlamaForCausalLM", 1024, 4, 1),
        )
        self.assertEqual(info.eos_token_ids, [5, 1])
        self.assertEqual(
            (plan.kv_bytes, plan.block_size, plan.max_model_len), (16 << 20, 16, info.max_model_len)
        )
        self.assertEqual(
            (stats.blocks_total, stats.blocks_free, stats.slot_utilization),
            (plan.blocks, plan.blocks, 1.0),
        )
        self.engine.generate("Hello", Sampling(max_tokens=3, ignore_eos=True))
        self.assertEventually(
            lambda: self.engine.stats().finished_length == 1, "the request is counted"
        )
        self.assertEqual(self.engine.stats().generated_tokens, 3)
        self.assertEqual(pagedllm.build_info()["version"], pagedllm.version())

    def test_the_bytes_of_tokens_are_the_bytes_of_the_text(self):
        for text in (LONG_CASE["answer"], "été, 日本, \U0001f600, a\0b"):
            tokens = self.engine.tokenize(text)
            joined = b"".join(self.engine.token_bytes(token) for token in tokens)
            self.assertEqual(joined, text.encode())
        parts = [self.engine.token_bytes(token) for token in self.engine.tokenize("\U0001f600")]
        self.assertGreater(len(parts), 1, "a token can be a part of a character")
        info = self.engine.model_info()
        for token in info.eos_token_ids:
            name = self.engine.detokenize([token])
            self.assertEqual(self.engine.token_bytes(token), name.encode())
        self.assertIsInstance(self.engine.token_bytes(info.vocab_size - 1), bytes)

    def test_a_working_engine_has_no_health_error(self):
        self.assertIsNone(self.engine.health())
        self.engine.generate("Hello", Sampling(max_tokens=1))
        self.assertIsNone(self.engine.health())

    def test_the_error_of_a_failed_engine_is_returned(self):
        failure = Error(Code.INTERNAL, "internal error: of the test")
        with unittest.mock.patch.object(
            pagedllm._lib, "pllm_engine_health", side_effect=failure
        ) as called:
            error = self.engine.health()
        called.assert_called_once()
        self.assertIs(error, failure)
        self.assertIsNone(error.__traceback__, "it would keep the engine alive")

    def test_errors_can_be_pickled(self):
        error = pickle.loads(pickle.dumps(Error(6, "too much")))
        self.assertEqual((error.code, str(error)), (Code.CAPACITY, "too much"))
        self.assertEqual((error.prompt_tokens, error.max_model_len), (None, None))
        error = pickle.loads(pickle.dumps(Error(1, "too long", 5000, 1024)))
        self.assertEqual((error.prompt_tokens, error.max_model_len), (5000, 1024))
        self.assertEqual(Error(4711, "from a newer library").code, 4711)


class StopReasons(Case):
    def assertStopped(self, end, finish_reason, stop_reason, token=None, string=None):
        self.assertEqual(
            (end.finish_reason, end.stop_reason, end.stop_token, end.stop_string),
            (finish_reason, stop_reason, token, string),
        )

    def ask(self, **sampling):
        return self.engine.generate(
            LONG_CASE["prompt"], Sampling(**{"temperature": 0, **sampling}), add_special=False
        )

    def test_an_end_of_sequence_token_is_named(self):
        answer = self.ask()
        self.assertIn(answer.stop_token, self.engine.model_info().eos_token_ids)
        self.assertStopped(answer, FinishReason.STOP, StopReason.EOS, LONG_CASE["token_ids"][-1])

    def test_a_stop_token_is_named(self):
        token = LONG_CASE["token_ids"][7]
        self.assertStopped(
            self.ask(stop_token_ids=[2, token]), FinishReason.STOP, StopReason.TOKEN, token
        )

    def test_token_0_can_be_the_stop_token(self):
        answer = self.ask(stop_token_ids=[0], allowed_token_ids=[0])
        self.assertStopped(answer, FinishReason.STOP, StopReason.TOKEN, 0)

    def test_a_stop_string_is_named(self):
        for stop, string in (
            ("village", "village"),
            (["never", "Hugo"], "Hugo"),
            (b"Hugo", "Hugo"),
        ):
            for kind in OutputKind:
                with self.subTest(stop=stop, kind=kind):
                    answer = self.ask(stop=stop, output_kind=kind)
                    self.assertStopped(
                        answer, FinishReason.STOP, StopReason.STRING, string=string
                    )

    def test_a_complete_grammar_is_a_stop_reason(self):
        answer = self.ask(grammar=Grammar.regex("[0-9]{3}"), ignore_eos=True)
        self.assertStopped(answer, FinishReason.STOP, StopReason.GRAMMAR)

    def test_other_ends_have_no_stop_reason(self):
        length = self.ask(max_tokens=5, stop="not in the answer", stop_token_ids=[2])
        self.assertStopped(length, FinishReason.LENGTH, StopReason.NONE)
        stream = self.engine.stream("Hello", ENDLESS)
        self.engine.abort(next(stream).request)
        self.assertStopped(list(stream)[-1], FinishReason.ABORT, StopReason.NONE)

    def test_only_the_last_output_of_a_stream_has_a_stop_reason(self):
        *outputs, last = self.engine.stream(
            LONG_CASE["prompt"], Sampling(temperature=0, stop="village"), add_special=False
        )
        self.assertGreater(len(outputs), 5)
        for output in outputs:
            self.assertStopped(output, FinishReason.NONE, StopReason.NONE)
        self.assertStopped(last, FinishReason.STOP, StopReason.STRING, string="village")

    def test_unknown_reasons_of_a_newer_library_are_other(self):
        self.assertEqual(StopReason(4711), StopReason.OTHER)
        self.assertEqual(FinishReason(4711), FinishReason.OTHER)
        c = pagedllm._Output(stop_reason=4711, stop_token=7)
        self.assertStopped(pagedllm._py_output(c), FinishReason.NONE, StopReason.OTHER)


class HostStepping(Case):
    def test_a_host_can_step_and_poll_in_one_thread(self):
        with open_engine(host_steps=True) as engine:
            request = engine.add(LONG_CASE["prompt"], GREEDY, add_special=False)
            self.assertEqual(engine.queue.poll(0), [])
            self.assertEqual(engine.queue.poll(0.01), [])
            text, unfinished = "", 1
            while unfinished:
                unfinished = engine.step().unfinished
                for output in engine.queue.poll(0):
                    self.assertEqual(output.request, request)
                    text += output.text
            self.assertEqual(text, LONG_CASE["answer"])

    def test_a_second_stepping_thread_is_refused(self):
        self.engine.generate("Hello", Sampling(max_tokens=1))  # now the library's thread steps
        self.assertRefused(Code.BUSY, "one thread at a time", self.engine.step)
        self.assertRefused(Code.BUSY, "one thread at a time", self.engine.start)
        self.engine.stop()
        self.engine.stop()
        self.assertEqual(self.engine.step().sequences, 0)
        self.engine.start()
        self.assertEqual(
            self.engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
            LONG_CASE["answer"],
        )


class Cancellation(Case):
    def assertAborted(self, count=1):
        self.assertEventually(
            lambda: self.engine.stats().finished_abort == count, "the request is aborted"
        )
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

    def test_an_unreachable_stream_aborts_its_request(self):
        self.engine.stream("Hello", ENDLESS)
        self.assertAborted()

    def test_abort_ends_a_stream_with_its_finish_reason(self):
        stream = self.engine.stream("Hello", ENDLESS)
        request = next(stream).request
        self.engine.abort(request)
        self.assertEqual(list(stream)[-1].finish_reason, FinishReason.ABORT)
        self.assertAborted()
        self.assertRefused(
            Code.NOT_FOUND, f"request {request} is unknown or has ended", self.engine.abort, request
        )

    def test_ctrl_c_ends_a_blocking_generate(self):
        with open_engine(host_steps=True) as engine:  # without more steps, generate() waits forever

            def interrupt():
                self.assertEventually(lambda: engine.step().unfinished, "a request is unfinished")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            with ThreadPoolExecutor(1) as pool:
                interrupted = pool.submit(interrupt)
                with self.assertRaises(KeyboardInterrupt):
                    engine.generate("Hello", ENDLESS)
                interrupted.result()
            engine.step()
            self.assertEqual(engine.stats().finished_abort, 1)

    def test_a_signal_handler_can_close_the_engine_during_generate(self):
        with open_engine(host_steps=True) as engine:
            before = signal.signal(signal.SIGUSR1, lambda *_: engine.close())
            self.addCleanup(signal.signal, signal.SIGUSR1, before)

            def interrupt():
                self.assertEventually(lambda: engine.step().unfinished, "a request is unfinished")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

            with ThreadPoolExecutor(1) as pool:
                interrupted = pool.submit(interrupt)
                self.assertRefused(Code.CLOSED, "freed", lambda: engine.generate("Hello"))
                interrupted.result()
            self.assertRefused(Code.CLOSED, "the engine is closed", engine.stats)

    def test_a_slow_reader_delays_no_other_request(self):
        slow = self.engine.stream(LONG_CASE["prompt"], GREEDY, capacity=1, add_special=False)
        first = next(slow)
        for case in EXPECTED:
            self.assertEqual(
                self.engine.generate(case["prompt"], GREEDY, add_special=False).text, case["answer"]
            )
        stats = self.engine.stats()
        self.assertEqual((stats.paused, stats.waiting, stats.finished_stop), (1, 1, len(EXPECTED)))
        self.assertEqual(first.text + "".join(output.text for output in slow), LONG_CASE["answer"])

    def test_closing_a_queue_aborts_its_requests_and_ends_a_blocked_poll(self):
        queue = self.engine.create_queue(2)
        self.engine.add("Hello", ENDLESS, queue=queue)
        with self.engine.create_queue(2) as idle, ThreadPoolExecutor(1) as pool:
            polling = pool.submit(idle.poll)
            self.assertEventually(lambda: idle._handle._users == 1, "the other thread is polling")
            idle.close()
            self.assertIsInstance(polling.exception(10), Error)
            self.assertEqual(polling.exception().code, Code.CLOSED)
        queue.close()
        queue.close()
        self.assertAborted()
        for call in (queue.poll, queue.fileno, lambda: self.engine.add("Hello", queue=queue)):
            self.assertRefused(Code.CLOSED, "the queue is closed", call)
        self.engine.queue.close()  # no effect: the engine closes its own queue
        self.assertEqual(self.engine.queue.poll(0), [])


class Asyncio(Case):
    def run_async(self, coroutine):
        return asyncio.run(asyncio.wait_for(coroutine, 60))

    def test_asyncio_gives_the_same_answers(self):
        async def main():
            answers = await asyncio.gather(
                *(
                    self.engine.agenerate(case["prompt"], GREEDY, add_special=False)
                    for case in EXPECTED
                )
            )
            self.assertEqual(
                [answer.text for answer in answers], [case["answer"] for case in EXPECTED]
            )
            pieces = [
                output.text
                async for output in self.engine.astream(
                    LONG_CASE["prompt"], GREEDY, add_special=False
                )
            ]
            self.assertEqual("".join(pieces), LONG_CASE["answer"])
            self.assertGreater(len(pieces), 10)

        self.run_async(main())

    def test_two_hundred_streams_start_no_thread(self):
        before, fds = threads(), descriptors()
        max_threads = 0

        async def read(case):
            nonlocal max_threads
            text = ""
            async for output in self.engine.astream(case["prompt"], GREEDY, add_special=False):
                text += output.text
                max_threads = max(max_threads, threads())
            return text == case["answer"]

        async def main():
            self.assertEqual(
                set(await asyncio.gather(*(read(EXPECTED[i % len(EXPECTED)]) for i in range(200)))),
                {True},
            )

        self.run_async(main())
        self.assertLessEqual(max_threads, before)
        self.assertEventually(
            lambda: descriptors() <= fds, "the current step has released the last queue"
        )
        self.assertIdle()

    def test_waiting_tasks_use_no_cpu_time(self):
        async def main():
            with open_engine(host_steps=True) as engine:  # no step runs
                waiting = [asyncio.create_task(engine.agenerate("Hello")) for _ in range(20)]
                await asyncio.sleep(0)
                before = time.process_time()
                await asyncio.sleep(0.3)
                self.assertLess(time.process_time() - before, 0.1)
            await asyncio.gather(*waiting, return_exceptions=True)

        self.run_async(main())

    def test_a_waiting_stream_does_not_block_the_event_loop(self):
        with open_engine(host_steps=True) as engine:  # only the step() task steps

            async def step():
                while engine.step().unfinished:
                    await asyncio.sleep(0)

            async def main():
                answer, _ = await asyncio.gather(
                    engine.agenerate(LONG_CASE["prompt"], GREEDY, add_special=False), step()
                )
                self.assertEqual(answer.text, LONG_CASE["answer"])

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

    def test_closing_the_engine_ends_waiting_tasks(self):
        async def main():
            with open_engine(host_steps=True) as engine:
                waiting = [
                    asyncio.create_task(engine.agenerate("Hello", ENDLESS)) for _ in range(20)
                ]
                await asyncio.sleep(0)  # each task runs until it waits
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            self.assertEqual({end.code for end in ends}, {Code.CLOSED})

        self.run_async(main())

    def test_a_slow_task_delays_no_other_task(self):
        async def main():
            slow = self.engine.astream(LONG_CASE["prompt"], GREEDY, capacity=1, add_special=False)
            text = (await slow.__anext__()).text
            answers = await asyncio.gather(
                *(
                    self.engine.agenerate(case["prompt"], GREEDY, add_special=False)
                    for case in EXPECTED
                )
            )
            self.assertEqual(
                [answer.text for answer in answers], [case["answer"] for case in EXPECTED]
            )
            self.assertEqual(self.engine.stats().paused, 1)
            self.assertEqual(
                text + "".join([output.text async for output in slow]), LONG_CASE["answer"]
            )

        self.run_async(main())

    def test_invalid_arguments_raise_before_the_first_await(self):
        async def main():
            with self.assertRaises(Error) as caught:
                await self.engine.agenerate("")
            self.assertEqual(caught.exception.code, Code.INVALID_ARGUMENT)
            with self.assertRaises(Error):
                self.engine.astream("Hello", capacity=0)

        self.run_async(main())


if __name__ == "__main__":
    unittest.main()
