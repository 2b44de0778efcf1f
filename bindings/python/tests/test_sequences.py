"""Kept sequences, forks, export and import, the prefix cache."""

import asyncio
import collections
import dataclasses
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

from support import GREEDY, LONG_CASE, Case, open_engine

import pagedllm
from pagedllm import Code, DType, FinishReason, Grammar, OutputKind, Sampling, SequenceInfo


class Sequences(Case):
    """Operations on sequences. The host steps, so that each test knows the length."""

    DRAWN = Sampling(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)

    def setUp(self):
        self.engine = open_engine(host_steps=True)
        self.addCleanup(self.engine.close)

    def begin(self, steps, prompt=LONG_CASE["prompt"], sampling=GREEDY, **request):
        """Start a request and run `steps` steps. Return the sequence and its tokens."""
        sequence = self.engine.add(prompt, sampling, add_special=False, **request)
        for _ in range(steps):
            self.engine.step()
        return sequence, [token for output in self.engine.queue.poll(0) for token in output.tokens]

    def finish(self):
        """Step until every sequence has finished. Return their tokens."""
        tokens = collections.defaultdict(list)
        while self.engine.step().unfinished:
            pass
        for output in self.engine.queue.poll(0):
            self.assertIsNone(output.error)
            tokens[output.sequence] += output.tokens
        return tokens

    def computed(self, call):
        """Return the result of `call` and the number of prompt tokens it computed."""
        before = self.engine.stats().prompt_tokens
        result = call()
        return result, self.engine.stats().prompt_tokens - before

    def test_forks_continue_like_their_parent(self):
        parent, prefix = self.begin(5)
        children = self.engine.fork(parent, 2, user_data=9)
        length = self.engine.sequence_info(parent).length
        self.assertEqual(
            self.engine.sequence_info(children[1]), SequenceInfo(children[1], length, 0, False)
        )
        tokens, computed = self.computed(self.finish)
        self.assertEqual(computed, 0)
        for sequence in (parent, *children):
            self.assertEqual(prefix + tokens[sequence], LONG_CASE["token_ids"])

    def test_a_fork_at_an_earlier_position_generates_the_same_tokens(self):
        parent, prefix = self.begin(9)
        (child,) = self.engine.fork(parent, at=self.engine.sequence_info(parent).length - 4)
        tokens = self.finish()
        self.assertEqual(prefix + tokens[parent], LONG_CASE["token_ids"])
        self.assertEqual(prefix[:5] + tokens[child], LONG_CASE["token_ids"])

    def test_forks_sample_like_their_parent_unless_they_have_a_seed(self):
        parent, _ = self.begin(3, sampling=self.DRAWN)
        (same,) = self.engine.fork(parent)
        one, other = self.engine.fork(parent, 2, seed=1)
        (again,) = self.engine.fork(parent, seed=1)
        (third,) = self.engine.fork(parent, seed=2)
        tokens = self.finish()
        self.assertEqual(tokens[same], tokens[parent])
        self.assertEqual(tokens[again], tokens[one])
        self.assertEqual(
            len({tuple(tokens[sequence]) for sequence in (parent, one, other, third)}), 4
        )

    def test_idle_forks_generate_nothing_until_they_are_resumed(self):
        parent, prefix = self.begin(5)
        with self.engine.create_queue(100) as queue:
            (child,) = self.engine.fork(parent, idle=True, queue=queue, user_data=4)
            self.finish()
            self.assertEqual(queue.poll(0), [])
            self.assertTrue(self.engine.sequence_info(child).idle)
            self.engine.resume(child, GREEDY, keep=False)
            self.finish()
            outputs = queue.poll(0)
        self.assertEqual(
            [token for output in outputs for token in output.tokens], LONG_CASE["token_ids"][5:]
        )
        self.assertEqual({output.user_data for output in outputs}, {4})
        self.assertRefused(Code.NOT_FOUND, "not kept", self.engine.sequence_info, child)

    def test_resuming_computes_only_appended_tokens(self):
        kept, prefix = self.begin(70, keep=True)
        self.assertEqual(prefix, LONG_CASE["token_ids"])
        self.assertEqual(self.engine.stats().idle, 1)
        question = self.engine.tokenize("\n<|user|>\nWhat is 7 + 5?<|end|>\n<|assistant|>\n")
        self.engine.append(kept, question)
        self.engine.resume(kept, Sampling(temperature=0, max_tokens=30), user_data=5)
        tokens, computed = self.computed(self.finish)
        self.assertEqual(computed, len(question) + 1)  # and the last sampled token
        whole = self.engine.tokenize(LONG_CASE["prompt"]) + LONG_CASE["token_ids"] + question
        with open_engine() as other:
            self.assertEqual(
                tokens[kept], other.generate(whole, Sampling(temperature=0, max_tokens=30)).tokens
            )
        self.engine.free(kept)
        self.engine.step()
        self.assertIdle()
        self.assertEqual(self.engine.stats().idle, 0)

    def test_a_running_sequence_continues_from_appended_tokens(self):
        running, prefix = self.begin(3)
        added = self.engine.tokenize(" cat")
        self.engine.append(running, added)
        tokens = self.finish()[running]
        with open_engine() as other:
            prompt = self.engine.tokenize(LONG_CASE["prompt"]) + prefix + added
            self.assertEqual(tokens, other.generate(prompt, GREEDY).tokens)

    def test_a_rewound_sequence_generates_the_same_tokens(self):
        running, prefix = self.begin(8, sampling=self.DRAWN)
        self.engine.rewind(running, self.engine.sequence_info(running).length - 5)
        tokens = self.finish()[running]
        self.assertEqual(tokens[:5], prefix[3:])
        self.assertEqual(len(tokens), 9)

    def test_a_kept_sequence_can_be_rewound_into_its_prompt(self):
        kept, first = self.begin(12, sampling=self.DRAWN, keep=True)
        prompt = len(self.engine.tokenize(LONG_CASE["prompt"]))
        for length in (prompt + 4, prompt):
            self.engine.rewind(kept, length)
            self.engine.resume(
                kept, dataclasses.replace(self.DRAWN, max_tokens=prompt + 12 - length)
            )
            tokens, computed = self.computed(self.finish)
            self.assertEqual((tokens[kept], computed), (first[length - prompt :], 1))
        self.engine.rewind(kept, 3)
        self.assertEqual(self.engine.sequence_info(kept).length, 3)

    def test_keep_applies_to_every_sample(self):
        first, _ = self.begin(12, sampling=self.DRAWN, n=2, keep=True)
        length = self.engine.sequence_info(first).length
        self.assertEqual(self.engine.sequence_info(first + 1), SequenceInfo(first, length, 1, True))
        self.engine.resume(first + 1, Sampling(temperature=0, max_tokens=2))
        self.engine.step()
        self.engine.step()
        self.assertEqual(
            {(output.request, output.index) for output in self.engine.queue.poll(0)}, {(first, 1)}
        )

    def test_kept_sequences_can_be_resumed_as_streams(self):
        self.engine.start()
        whole = LONG_CASE["token_ids"]
        prefix = self.engine.generate(
            LONG_CASE["prompt"], Sampling(temperature=0, max_tokens=5), keep=True, add_special=False
        )
        again = self.engine.fork(prefix.sequence, 3, queue=self.engine.queue)
        pieces = list(
            self.engine.stream_resumed(prefix.sequence, Sampling(temperature=0, max_tokens=5))
        )
        self.assertEqual([token for output in pieces for token in output.tokens], whole[5:10])
        self.assertEqual(
            self.engine.generate_resumed(prefix.sequence, GREEDY, keep=False).tokens, whole[10:]
        )

        async def resumed():
            return await asyncio.gather(
                *(self.engine.agenerate_resumed(one, GREEDY, keep=False) for one in again)
            )

        self.assertEqual([one.tokens for one in asyncio.run(resumed())], [whole[5:]] * 3)
        self.assertIdle()

    def test_freeing_a_running_sequence_sends_an_abort_output(self):
        running, _ = self.begin(3)
        self.engine.free(running)
        self.engine.step()
        self.assertEqual(
            [output.finish_reason for output in self.engine.queue.poll(0)], [FinishReason.ABORT]
        )
        self.assertIdle()

    def test_evicted_sequences_are_recomputed_when_they_are_resumed(self):
        with open_engine(kv_bytes=1 << 20, max_model_len=128) as engine:  # 32 blocks
            first, second = (
                Sampling(temperature=0, max_tokens=most, ignore_eos=True) for most in (20, 5)
            )
            prompts = [[70 + i] * 20 for i in range(20)]
            kept = [engine.generate(prompt, first, keep=True) for prompt in prompts]
            self.assertEqual(engine.stats().idle, 20)
            for prompt, prefix in zip(prompts, kept):
                more = engine.generate_resumed(prefix.sequence, second)
                self.assertEqual(
                    more.tokens, engine.generate(prompt + prefix.tokens, second).tokens
                )
                engine.free(prefix.sequence)


class ExportAndImport(Case):
    """Sequences that are exported and continue in another engine."""

    DRAWN = Sampling(temperature=1.2, seed=7, max_tokens=200, ignore_eos=True)

    def setUp(self):
        super().setUp()
        self.other = open_engine()
        self.addCleanup(self.other.close)
        self.whole = self.other.generate(LONG_CASE["prompt"], self.DRAWN, add_special=False)

    def begin(self, tokens, **request):
        """Read `tokens` outputs. Return the stream, the sequence and the outputs."""
        stream = self.engine.stream(
            LONG_CASE["prompt"], self.DRAWN, capacity=1, add_special=False, **request
        )
        prefix = [next(stream) for _ in range(tokens)]
        return stream, prefix[0].sequence, prefix

    def export_at_the_next_step(self, engine, sequence):
        async def export():
            exporting = asyncio.create_task(engine.aexport_sequence(sequence))
            await asyncio.sleep(0)
            engine.step()
            return await exporting

        return asyncio.run(export())

    def moved(self, state):
        """Import a state into the other engine and stream its continuation."""
        return self.other.stream_resumed(
            self.other.import_sequence(state), continue_generation=True, keep=False
        )

    def assertIsSuffix(self, outputs, of=None):
        """The outputs are a suffix of the answer of an uninterrupted request."""
        whole, outputs = of or self.whole, list(outputs)
        tokens = [token for output in outputs for token in output.tokens]
        self.assertIn(len(tokens), range(1, len(whole.tokens) + 1))
        self.assertEqual(tokens, whole.tokens[-len(tokens) :])
        self.assertTrue(whole.text.endswith("".join(output.text for output in outputs)))
        self.assertEqual(
            (outputs[-1].finish_reason, outputs[-1].generated_tokens),
            (FinishReason.LENGTH, len(whole.tokens)),
        )

    def test_an_imported_sequence_continues_with_the_same_tokens(self):
        stream, sequence, _ = self.begin(20)
        state = self.engine.export_sequence(sequence)
        stream.close()
        self.assertIdle()
        for kind in (bytes, bytearray, memoryview):
            self.assertIsSuffix(self.moved(kind(state)))
        self.assertEventually(lambda: self.other.stats().idle == 0, "no imported sequence is left")
        self.assertIdle(self.other)

    def test_an_export_does_not_change_the_outputs_of_its_stream(self):
        stream, sequence, prefix = self.begin(5)
        states = [self.engine.export_sequence(sequence) for _ in range(3)]
        outputs = prefix + list(stream)
        self.assertEqual(
            [token for output in outputs for token in output.tokens], self.whole.tokens
        )
        self.assertEqual("".join(output.text for output in outputs), self.whole.text)
        self.assertEqual({len(output.tokens) for output in outputs}, {1})
        for state in states:
            self.assertIsSuffix(self.moved(state))
        self.assertIdle()
        stats = self.engine.stats()
        self.assertEqual((stats.finished_abort, stats.finished_error), (0, 0))

    def test_asyncio_tasks_export_and_import_concurrently(self):
        async def move():
            stream = self.engine.astream(
                LONG_CASE["prompt"], self.DRAWN, capacity=1, add_special=False
            )
            sequence = (await stream.__anext__()).sequence
            state = await self.engine.aexport_sequence(sequence)
            await stream.aclose()
            return [
                output
                async for output in self.other.astream_resumed(
                    self.other.import_sequence(state), continue_generation=True
                )
            ]

        async def main():
            return await asyncio.gather(*(move() for _ in range(8)))

        for outputs in asyncio.run(main()):
            self.assertIsSuffix(outputs)
        self.assertIdle()

    def test_grammar_state_and_log_probabilities_are_exported(self):
        sampling = dataclasses.replace(
            self.DRAWN, grammar=Grammar.regex("[a-f0-9 ]{60}"), top_logprobs=2
        )
        whole = self.other.generate("Hello", sampling)
        stream = self.engine.stream("Hello", sampling, capacity=1)
        state = self.engine.export_sequence(next(stream).sequence)
        rest = list(self.moved(state))
        tokens = [token for output in rest for token in output.tokens]
        self.assertEqual(tokens, whole.tokens[-len(tokens) :])
        self.assertEqual(
            [top for output in rest for top in output.top_logprobs or []],
            whole.top_logprobs[-len(tokens) :],
        )
        self.assertEqual((rest[-1].score, rest[-1].finish_reason), (whole.score, FinishReason.STOP))

    def test_an_idle_sequence_can_be_exported(self):
        kept = self.engine.generate(
            LONG_CASE["prompt"], Sampling(temperature=0, max_tokens=9), keep=True, add_special=False
        )
        state = self.engine.export_sequence(kept.sequence)
        self.assertEqual(self.engine.export_sequence(kept.sequence), state)
        self.assertEventually(
            lambda: self.engine.stats().idle == 1, "only the kept sequence is left"
        )
        moved = self.other.import_sequence(state)
        length = kept.prompt_tokens + 9
        self.assertEqual(
            self.other.sequence_info(moved), SequenceInfo(moved, length, 0, True, False)
        )
        before = self.other.stats().prompt_tokens
        rest = self.other.generate_resumed(moved, GREEDY, keep=False)
        self.assertEqual(kept.tokens + rest.tokens, LONG_CASE["token_ids"])
        self.assertEqual(self.other.stats().prompt_tokens - before, 1)  # the last sampled token
        self.assertRefused(
            Code.INVALID_ARGUMENT, "rewind", list, self.moved(state)
        )  # at max_tokens

    def test_keep_controls_whether_a_continued_sequence_stays(self):
        stream, sequence, _ = self.begin(5)
        state = self.engine.export_sequence(sequence)
        moved = self.other.import_sequence(state)
        self.assertIsSuffix(self.other.stream_resumed(moved, continue_generation=True))
        self.assertTrue(self.other.sequence_info(moved).idle)
        self.other.free(moved)
        self.assertIsSuffix(
            self.other.stream_resumed(
                self.other.import_sequence(state), continue_generation=True, keep=False
            )
        )
        self.assertEventually(lambda: self.other.stats().idle == 0, "both sequences are freed")

    def test_an_idle_fork_continues_as_if_it_had_never_been_idle(self):
        stream, sequence, _ = self.begin(5, user_data=3)
        for how, user_data in (({}, 3), ({"user_data": 4}, 4)):
            (fork,) = self.engine.fork(sequence, idle=True, queue=self.engine.queue)
            continued = self.engine.stream_resumed(
                fork, continue_generation=True, keep=False, **how
            )
            first = next(continued)
            self.assertRefused(
                Code.INVALID_ARGUMENT,
                "runs already",
                self.engine.resume,
                fork,
                continue_generation=True,
            )
            outputs = [first, *continued]
            self.assertIsSuffix(outputs)
            self.assertEqual({output.user_data for output in outputs}, {user_data})
        self.assertEqual(self.engine.queue.poll(0), [])

    def test_a_continued_sequence_writes_to_the_given_queue_or_its_own(self):
        stream, sequence, _ = self.begin(5)
        state = self.engine.export_sequence(sequence)
        with self.other.create_queue(1000) as own, self.other.create_queue(1000) as named:
            for queue, to in ((None, own), (named, named)):
                self.other.resume(
                    self.other.import_sequence(state, queue=own),
                    continue_generation=True,
                    keep=False,
                    queue=queue,
                )
                outputs = []
                while not outputs or not outputs[-1].finish_reason:
                    outputs += to.poll()
                self.assertIsSuffix(outputs)

    def test_a_continued_sequence_keeps_its_sampling(self):
        stream, sequence, _ = self.begin(5)
        moved = self.other.import_sequence(self.engine.export_sequence(sequence))
        for wrong in ({"sampling": GREEDY}, {"skip_special": True}, {"logits_hook": print}):
            with self.assertRaisesRegex(
                TypeError, "leave out sampling, skip_special and logits_hook"
            ):
                self.other.resume(moved, continue_generation=True, **wrong)
        for generate in (
            self.other.generate_resumed,
            lambda *how, **more: asyncio.run(self.other.agenerate_resumed(*how, **more)),
        ):
            with self.assertRaisesRegex(
                TypeError, r"^continue_generation needs stream_resumed\(\) or astream_resumed\(\)$"
            ):
                generate(moved, continue_generation=True)
        self.assertIsSuffix(self.other.stream_resumed(moved, continue_generation=True))

    def test_a_cancelled_export_does_not_affect_the_sequence(self):
        async def export_with_timeout(engine, sequence):
            await asyncio.wait_for(engine.aexport_sequence(sequence), 0.01)

        with open_engine(host_steps=True) as engine:
            sequence = engine.add(LONG_CASE["prompt"], self.DRAWN, add_special=False)
            for _ in range(3):
                engine.step()
                with self.assertRaises(asyncio.TimeoutError):
                    asyncio.run(export_with_timeout(engine, sequence))
            while engine.step().unfinished:
                pass
            outputs = engine.queue.poll(0)
            self.assertEqual(
                [token for output in outputs for token in output.tokens], self.whole.tokens
            )
            self.assertIdle(engine)

    def test_log_probabilities_of_the_prompt_are_exported(self):
        for kind in OutputKind:
            sampling = dataclasses.replace(
                self.DRAWN, max_tokens=9, prompt_top_logprobs=1, output_kind=kind
            )
            whole = self.other.generate(LONG_CASE["prompt"], sampling, add_special=False)
            self.assertEqual(len(whole.prompt_logprobs), whole.prompt_tokens - 1)
            for steps in (0, 2, 5):
                with self.subTest(kind=kind, steps=steps), open_engine(
                    host_steps=True, prefill_chunk=8
                ) as engine:
                    sequence = engine.add(LONG_CASE["prompt"], sampling, add_special=False)
                    for _ in range(steps):
                        engine.step()
                    before = engine.queue.poll(0)
                    after = list(self.moved(self.export_at_the_next_step(engine, sequence)))
                    outputs = after[-1:] if kind else [*before, *after]
                    for name in ("tokens", "prompt_logprobs", "prompt_top_logprobs"):
                        lists = [getattr(output, name) or [] for output in outputs]
                        self.assertEqual(sum(lists, []), getattr(whole, name))

    def test_a_state_of_another_instruction_path_is_marked_inexact(self):
        stream, sequence, _ = self.begin(5)
        state = self.engine.export_sequence(sequence)
        with open_engine(isa=pagedllm.Isa.PORTABLE) as portable:
            moved = portable.import_sequence(state)
            self.assertEqual(
                portable.sequence_info(moved).inexact,
                portable.model_info().isa != self.engine.model_info().isa,
            )
            self.assertEqual(
                portable.generate_resumed(
                    moved, Sampling(max_tokens=3, ignore_eos=True)
                ).finish_reason,
                FinishReason.LENGTH,
            )

    def test_with_host_steps_the_next_step_exports(self):
        with open_engine(host_steps=True) as engine, ThreadPoolExecutor(1) as pool:
            sequence = engine.add(
                LONG_CASE["prompt"], self.DRAWN, add_special=False
            )  # before its first step
            for _ in range(2):
                exported = pool.submit(engine.export_sequence, sequence)
                while not exported.done():
                    engine.step()
                self.assertIsSuffix(self.moved(exported.result()))
            for end, message in (
                (engine.abort, "ended before the export"),
                (engine.free, "is unknown"),
            ):
                sequence = engine.add(LONG_CASE["prompt"], self.DRAWN, add_special=False)
                engine.step()
                end(sequence)
                self.assertRefused(
                    Code.NOT_FOUND, message, self.export_at_the_next_step, engine, sequence
                )
            exported = pool.submit(engine.export_sequence, engine.add("Hello"))
            time.sleep(0.01)
            engine.close()
            self.assertRefused(Code.CLOSED, "", exported.result)

    def test_a_damaged_state_is_refused_and_the_engine_continues(self):
        stream, sequence, _ = self.begin(3)
        state = self.engine.export_sequence(sequence)
        damaged = [
            b"",
            b"\0",
            state[:-1],
            state[: len(state) // 2],
            state[1:],
            state + b"\0",
            bytes(len(state)),
        ]
        for at in (0, 12, 20, 100, len(state) // 2, len(state) - 1):
            damaged.append(state[:at] + bytes([state[at] ^ 1]) + state[at + 1 :])
        for bad in damaged:
            self.assertRefused(
                Code.INVALID_ARGUMENT,
                f"not an exported sequence ({len(bad)} bytes)",
                self.other.import_sequence,
                bad,
            )
        newer = state[:8] + b"\x09" + state[9:]
        self.assertRefused(Code.UNSUPPORTED, "format 9", self.other.import_sequence, newer)
        for wrong in (None, 7, "state", [1, 2]):
            with self.assertRaises(TypeError):
                self.other.import_sequence(wrong)
        for options in ({"block_size": 32}, {"kv_dtype": DType.F32}):
            with open_engine(**options) as different:
                self.assertRefused(
                    Code.INVALID_ARGUMENT,
                    "block_size and kv_dtype",
                    different.import_sequence,
                    state,
                )
        with open_engine(max_model_len=64) as short:
            self.assertRefused(
                Code.INVALID_ARGUMENT, "max_model_len is 64", short.import_sequence, state
            )
        self.assertRefused(
            Code.INVALID_ARGUMENT,
            "another engine",
            self.other.import_sequence,
            state,
            queue=self.engine.queue,
        )
        self.assertEqual(self.other.stats().idle, 0)
        self.assertIdle(self.other)
        self.assertIsSuffix(self.moved(state))


class PrefixCache(Case):
    PROMPT = "The quick brown fox jumps over the lazy dog. " * 8

    def cost(self, prompt=PROMPT, engine=None, **request):
        """Return the numbers of computed and of cached prompt tokens."""
        engine = engine or self.engine
        before = engine.stats()
        engine.generate(prompt, Sampling(temperature=0, max_tokens=1), **request)
        after = engine.stats()
        return after.prompt_tokens - before.prompt_tokens, after.prefix_hits - before.prefix_hits

    def test_requests_with_the_same_salt_share_cached_blocks(self):
        length = len(self.engine.tokenize(self.PROMPT, add_special=True))
        self.assertEqual(self.cost(), (length, 0))
        computed, found = self.cost()
        self.assertEqual(computed + found, length)
        self.assertGreater(found, length - 17)
        for salt in ("one", b"other\0"):
            self.assertEqual(self.cost(cache_salt=salt), (length, 0))
            self.assertEqual(self.cost(cache_salt=salt), (computed, found))
        with open_engine(prefix_cache=False) as without:
            self.assertEqual([self.cost(engine=without) for _ in range(2)], [(length, 0)] * 2)
            self.assertRefused(Code.UNSUPPORTED, "prefix cache", without.pin, "Hello")

    def test_a_pinned_prompt_is_computed_before_the_first_request(self):
        pin = self.engine.pin(self.PROMPT, priority=1, cache_salt="mine")
        self.assertEventually(lambda: self.engine.stats().blocks_used > 5, "the prompt is computed")
        self.assertGreater(self.cost(cache_salt="mine")[1], 100)
        self.assertEqual(self.cost(cache_salt="not mine")[1], 0)
        self.engine.unpin(pin)
        self.assertRefused(Code.NOT_FOUND, "pin", self.engine.unpin, pin)
        self.assertIdle()

    def test_a_pin_expires_after_its_time_to_live(self):
        pin = self.engine.pin(self.engine.tokenize(self.PROMPT), time_to_live_ms=20)
        time.sleep(0.03)
        self.engine.generate("Hello", Sampling(max_tokens=1))
        self.assertRefused(Code.NOT_FOUND, "expired", self.engine.unpin, pin)
        self.assertIdle()


if __name__ == "__main__":
    unittest.main()
