"""The Python module against the library and the bundled model.
usage: python3 bindings/python/tests/test_pagedllm.py   (PAGEDLLM_LIBRARY names another library than target/release's)"""

import array
import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import math
import multiprocessing
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODULE = ROOT / "bindings" / "python"
MODEL = ROOT / "examples" / "model"
sys.path.insert(0, str(MODULE))

import pagedllm  # noqa: E402
from pagedllm import (Allocation, Budget, Batching, Beam, Code, DType, Dry, Engine, Error, FinishReason, Grammar,  # noqa: E402
                      Order, OutputKind, Preemption, Sampling, SequenceInfo, Weights)

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
        info, plan, stats = self.engine.model_info(), pagedllm.plan(MODEL, **SMALL), self.engine.stats()
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


class Choosing(Case):
    """Sampling parameters, one by one, each where its effect is plain."""

    def ask(self, prompt=STORY["prompt"], **sampling):
        given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling}
        return self.engine.generate(prompt, Sampling(**given), add_special=False)

    def test_only_allowed_tokens_are_chosen_and_no_bad_words(self):
        self.assertLessEqual(set(self.ask(allowed_token_ids=[70, 71, 72]).tokens), {70, 71, 72})
        plain = self.ask()
        self.assertIn("time", plain.text)
        self.assertNotIn("time", self.ask(bad_words=["time", " time"]).text)
        self.assertNotIn(plain.tokens[3], self.ask(bad_words_ids=[[1, 2], plain.tokens[3:4]]).tokens)

    def test_a_bias_moves_a_tokens_logit(self):
        self.assertEqual(self.ask(logit_bias={70: 100.0}).tokens, [70] * 12)
        first = self.ask().tokens[0]
        self.assertNotIn(first, self.ask(logit_bias={first: -100.0, 70: 0.0}).tokens)

    def test_repetition_is_held_back_in_every_way(self):
        def repeats(**sampling):
            tokens = self.ask(logit_bias={70: 90.0}, **sampling).tokens
            return tokens.count(70)
        self.assertEqual(repeats(), 12)
        self.assertEqual(repeats(no_repeat_ngram_size=1), 1)
        for penalty in ({"repetition_penalty": 100.0}, {"dry": Dry(multiplier=100.0, base=4.0, allowed_length=1)}):
            with self.subTest(penalty):
                self.assertLess(repeats(**penalty), 12)
        self.assertEqual(repeats(dry=Dry(multiplier=0.0, penalty_last_n=3, sequence_breakers=["x", "y"])), 12)
        colon, = self.engine.tokenize(":", add_special=False)
        for breakers, punished in ((None, False), ([], True), (["?"], True), (["?", ":"], False)):
            with self.subTest(breakers):
                dry = Dry(multiplier=100.0, base=4.0, allowed_length=1, sequence_breakers=breakers)
                tokens = self.ask(logit_bias={colon: 90.0}, dry=dry).tokens
                self.assertEqual(tokens.count(colon) < 12, punished)
        once = self.ask(allowed_token_ids=[70, 71], logit_bias={70: 1.0, 71: 0.5}, presence_penalty=2.0, frequency_penalty=2.0)
        self.assertEqual(set(once.tokens), {70, 71})

    def test_cutting_the_distribution_to_its_top_leaves_the_greedy_choice(self):
        greedy = self.ask().tokens
        for cut in ({"top_n_sigma": 0.001}, {"mirostat_tau": 0.0001, "mirostat_eta": 1.0}, {"top_k": 1}):
            with self.subTest(cut):
                self.assertEqual(self.ask(temperature=1, seed=1, **cut).tokens, greedy)
        typical = [self.ask(temperature=1, seed=seed, typical_p=0.0001).tokens for seed in range(3)]
        self.assertEqual(typical, typical[:1] * 3)
        without = self.ask(temperature=1, seed=1, xtc_probability=1.0, xtc_threshold=0.0001).tokens
        self.assertNotEqual(without, greedy)

    def test_log_probabilities_have_their_shapes(self):
        prompt = self.engine.tokenize(STORY["prompt"])
        answer = self.ask(max_tokens=5, top_logprobs=3, prompt_top_logprobs=2)
        self.assertEqual((len(answer.logprobs), len(answer.top_logprobs)), (5, 5))
        self.assertEqual((len(answer.prompt_logprobs), len(answer.prompt_top_logprobs)), (len(prompt) - 1, len(prompt) - 1))
        for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.top_logprobs):
            self.assertEqual(top[0], (token, logprob))  # greedy
            self.assertEqual([one.logprob for one in top], sorted((one.logprob for one in top), reverse=True))
            self.assertEqual(len(top), 3)
        self.assertEqual({len(top) for top in answer.prompt_top_logprobs}, {2})
        self.assertTrue(all(own <= top[0].logprob for own, top in zip(answer.prompt_logprobs, answer.prompt_top_logprobs)))
        self.assertAlmostEqual(answer.score, sum(answer.logprobs), places=6)
        plain = self.ask(max_tokens=5, logprobs=True, prompt_logprobs=True)
        self.assertEqual((plain.logprobs, plain.prompt_logprobs), (answer.logprobs, answer.prompt_logprobs))
        self.assertIsNone(plain.top_logprobs)
        self.assertIsNone(plain.prompt_top_logprobs)

    def test_an_echo_is_the_prompt_before_the_answer(self):
        known = EXPECTED[0]
        answer = self.engine.generate("Hello", Sampling(temperature=0, max_tokens=3, echo=True))
        alone = self.engine.generate("Hello", Sampling(temperature=0, max_tokens=3))
        self.assertEqual(answer.text, "Hello" + alone.text)
        self.assertEqual(answer.tokens, self.engine.tokenize("Hello", add_special=True) + alone.tokens)
        shown = self.engine.generate(known["prompt"], Sampling(temperature=0, include_stop=True, echo=True), add_special=False,
                                     skip_special=False)
        self.assertTrue(shown.text.startswith(known["prompt"] + known["answer"] + "<|end|>"), shown.text)

    def test_a_stop_string_stays_in_the_text_where_that_is_asked_for(self):
        whole = STORY["answer"]
        self.assertEqual(self.ask(max_tokens=60, stop="village", include_stop=True).text, whole[:whole.index("village") + 7])

    def test_outputs_hold_what_is_new_or_everything_or_come_once(self):
        def outputs(kind):
            sampling = Sampling(temperature=0, max_tokens=6, top_logprobs=1, prompt_logprobs=True, output_kind=kind)
            return list(self.engine.stream(STORY["prompt"], sampling, add_special=False)), sampling
        news, plain = outputs(OutputKind.DELTA)
        growing, _ = outputs(OutputKind.CUMULATIVE)
        once, _ = outputs(OutputKind.FINAL)
        tokens = STORY["token_ids"][:6]
        self.assertEqual([output.tokens for output in news if output.tokens], [[token] for token in tokens])
        self.assertEqual([output.tokens for output in growing if output.tokens], [tokens[:i + 1] for i in range(6)])
        self.assertEqual([(output.tokens, output.finish_reason) for output in once], [(tokens, FinishReason.LENGTH)])
        self.assertEqual(growing[-1].text, once[0].text)
        self.assertEqual(len(growing[-1].top_logprobs), 6)
        whole = [self.ask(max_tokens=6, top_logprobs=1, prompt_logprobs=True, output_kind=kind) for kind in OutputKind]
        for name in ("text", "tokens", "logprobs", "top_logprobs", "prompt_logprobs", "score"):
            self.assertEqual(*(getattr(answer, name) for answer in whole[:2]), name)
            self.assertEqual(*(getattr(answer, name) for answer in whole[1:]), name)

    def test_a_prompt_is_cut_to_its_last_tokens(self):
        tokens = self.engine.tokenize(STORY["prompt"])
        cut = self.engine.generate(STORY["prompt"], GREEDY, truncate_prompt_tokens=4, add_special=False)
        self.assertEqual(cut.prompt_tokens, 4)
        self.assertEqual(cut.tokens, self.engine.generate(tokens[-4:], GREEDY).tokens)


class Structure(Case):
    def ask(self, grammar, **sampling):
        given = {"temperature": 0, "max_tokens": 100, "grammar": grammar, **sampling}
        return self.engine.generate("Give JSON for Anna, 31, Paris.", Sampling(**given))

    def test_json_is_as_its_schema_says(self):
        schema = {"type": "object", "additionalProperties": False, "required": ["name", "age", "home"], "properties": {
            "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "home": {"enum": ["Paris", "Rome"]}}}
        for given in (schema, json.dumps(schema), json.dumps(schema).encode()):
            answer = self.ask(Grammar.json_schema(given))
            person = json.loads(answer.text)
            self.assertEqual((list(person), answer.finish_reason), (["name", "age", "home"], FinishReason.STOP))
            self.assertTrue(0 <= person["age"] <= 120 and person["home"] in ("Paris", "Rome"), person)
        for seed in range(5):
            json.loads(self.ask(Grammar.json_schema(schema), temperature=1.5, seed=seed).text)

    def test_any_json_object_will_do(self):
        self.assertIsInstance(json.loads(self.ask(Grammar.json_object()).text), dict)

    def test_a_regular_expression_a_choice_and_a_lark_grammar_hold(self):
        for seed in range(5):
            drawn = {"temperature": 1.5, "seed": seed}
            self.assertRegex(self.ask(Grammar.regex("[0-9]{3}-[a-c]x"), **drawn).text, r"\A[0-9]{3}-[a-c]x\Z")
            self.assertIn(self.ask(Grammar.choice(["cow", "a dog", "été".encode()]), **drawn).text, ("cow", "a dog", "été"))
            self.assertRegex(self.ask(Grammar.lark('start: "a" NUMBER\nNUMBER: /[0-9]{2}/'), **drawn).text, r"\Aa[0-9]{2}\Z")

    def test_forks_go_on_in_the_grammar_where_their_parent_is(self):
        with open_engine(host_steps=True) as engine:
            digits = Sampling(temperature=1, seed=1, grammar=Grammar.regex("[0-9]{12}"))
            parent = engine.add("Count from 1 to 10.", digits)
            for _ in range(4):
                engine.step()
            begun = "".join(output.text for output in engine.queue.poll(0))
            children = engine.fork(parent, 3, seed=5)
            texts = collections.defaultdict(str, {child: begun for child in children})
            while engine.step().unfinished:
                pass
            for output in engine.queue.poll(0):
                texts[output.sequence] += output.text
            for child in children:
                self.assertRegex(texts[child], r"\A[0-9]{12}\Z")


class Several(Case):
    """Several results of one prompt."""
    DRAWN = Sampling(temperature=1.5, seed=3, max_tokens=8, ignore_eos=True, logprobs=True)

    def test_each_sample_has_its_index_and_its_end(self):
        outputs = list(self.engine.stream("Hello", self.DRAWN, n=3))
        self.assertEqual(sorted(output.index for output in outputs if output.finish_reason), [0, 1, 2])
        self.assertTrue(all(output.sequence == output.request + output.index for output in outputs))
        samples = self.engine.generate_all("Hello", self.DRAWN, n=3)
        self.assertEqual([sample.index for sample in samples], [0, 1, 2])
        self.assertEqual({len(sample.tokens) for sample in samples}, {8})
        self.assertEqual(len({tuple(sample.tokens) for sample in samples}), 3)
        for sample in samples:
            streamed = [output.tokens for output in outputs if output.index == sample.index]
            self.assertEqual(sample.tokens, sum(streamed, []))
            self.assertAlmostEqual(sample.score, sum(sample.logprobs), places=5)
        self.assertEqual(samples[0].tokens, self.engine.generate("Hello", self.DRAWN, n=3).tokens)
        self.assertEqual(samples, [dataclasses.replace(sample, request=samples[0].request, sequence=samples[0].request + i)
                                   for i, sample in enumerate(asyncio.run(
                                       self.engine.agenerate_all("Hello", self.DRAWN, n=3)))])
        self.assertIdle()

    def test_the_prompt_of_several_samples_is_computed_once(self):
        before = self.engine.stats().prompt_tokens
        self.engine.generate_all(STORY["prompt"], self.DRAWN, n=8, add_special=False)
        self.assertEqual(self.engine.stats().prompt_tokens - before, len(self.engine.tokenize(STORY["prompt"])))

    def test_the_best_samples_come_first(self):
        drawn = self.engine.generate_all("Hello", self.DRAWN, n=5)
        best = self.engine.generate_all("Hello", self.DRAWN, n=2, best_of=5)
        self.assertEqual([one.index for one in best], [0, 1])
        self.assertEqual([one.tokens for one in best],
                         [one.tokens for one in sorted(drawn, key=lambda one: -one.score)[:2]])
        self.assertGreaterEqual(best[0].score, best[1].score)

    def test_beams_come_by_their_scores(self):
        search = Sampling(max_tokens=10)
        beams = self.engine.generate_all("Hello", search, n=3, beam=Beam(width=4))
        self.assertEqual([beam.index for beam in beams], [0, 1, 2])
        scores = [beam.score for beam in beams]
        self.assertEqual(scores, sorted(scores, reverse=True))
        self.assertEqual(len({tuple(beam.tokens) for beam in beams}), 3)
        greedy = self.engine.generate("Hello", Sampling(temperature=0, max_tokens=10, logprobs=True))
        self.assertGreaterEqual(scores[0], greedy.score / len(greedy.tokens) - 1e-5)
        for how in (Beam(width=4, groups=2, diversity_penalty=1.0), Beam(width=2, length_penalty=0.0),
                    *(Beam(early_stopping=early) for early in pagedllm.EarlyStopping)):
            self.assertEqual(self.engine.generate("Hello", search, beam=how).index, 0)
        self.assertIdle()

    def test_as_many_results_as_there_are_beams_come_at_the_end_too(self):
        alone = self.engine.generate("Hello", Sampling(max_tokens=4), beam=Beam(width=2))
        both = self.engine.generate_all("Hello", Sampling(max_tokens=4), n=2, beam=Beam(width=2))
        self.assertEqual(both[0].tokens, alone.tokens)

    def test_every_sample_begins_with_the_prompt_that_is_echoed(self):
        for sample in self.engine.generate_all("Hello", dataclasses.replace(self.DRAWN, echo=True), n=3):
            self.assertTrue(sample.text.startswith("Hello"), sample.text)

    def test_beams_that_were_not_returned_are_forgotten(self):
        request = self.engine.generate("Hello", Sampling(max_tokens=4), beam=Beam(width=4)).request
        self.assertIdle()
        for sequence in range(request, request + 4):
            self.assertRefused(Code.NOT_FOUND, "unknown", self.engine.sequence_info, sequence)

    def test_beams_cannot_be_freed_one_by_one(self):
        with open_engine(host_steps=True) as engine:
            request = engine.add("Hello", Sampling(max_tokens=4), beam=Beam(width=2))
            engine.step()
            self.assertRefused(Code.NOT_FOUND, "unknown", engine.free, request + 1)

    def test_a_grammar_that_has_ended_ends_the_sequence_whatever_comes_of_ignore_eos(self):
        digits = Sampling(temperature=0, max_tokens=9, ignore_eos=True, grammar=Grammar.regex("[0-9]{2}"))
        self.assertRegex(self.engine.generate("Hello", digits).text, r"\A[0-9]{2}\Z")

    def test_samples_that_are_aborted_before_they_begin_are_kept_too_or_gone(self):
        with open_engine(host_steps=True) as engine:
            request = engine.add("Hello", n=2, keep=True)
            engine.abort(request)
            engine.step()
            self.assertEqual(engine.stats().idle == 0, self.is_unknown(engine, request))

    def is_unknown(self, engine, sequence):
        try:
            return not engine.sequence_info(sequence)
        except Error:
            return True

    def test_closing_a_stream_of_several_aborts_them_all(self):
        stream = self.engine.stream("Hello", ENDLESS, n=4)
        next(stream)
        stream.close()
        self.assertIdle()
        stream = self.engine.stream("Hello", ENDLESS, n=4)
        self.engine.abort(next(stream).request)
        ends = [output for output in stream if output.finish_reason]
        self.assertEqual({(output.index, output.finish_reason) for output in ends}, {(i, FinishReason.ABORT) for i in range(4)})


class Sequences(Case):
    """What can be done with a sequence. The host steps, so that every token is where the test says."""
    DRAWN = Sampling(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)

    def setUp(self):
        self.engine = open_engine(host_steps=True)
        self.addCleanup(self.engine.close)

    def begin(self, steps, prompt=STORY["prompt"], sampling=GREEDY, **request):
        """A sequence after so many tokens."""
        sequence = self.engine.add(prompt, sampling, add_special=False, **request)
        for _ in range(steps):
            self.engine.step()
        return sequence, [token for output in self.engine.queue.poll(0) for token in output.tokens]

    def finish(self):
        """All tokens that come, by sequence, once every sequence has ended well."""
        tokens = collections.defaultdict(list)
        while self.engine.step().unfinished:
            pass
        for output in self.engine.queue.poll(0):
            self.assertIsNone(output.error)
            tokens[output.sequence] += output.tokens
        return tokens

    def computed(self, call):
        """What it returns, and the prompt tokens that it made the engine compute."""
        before = self.engine.stats().prompt_tokens
        result = call()
        return result, self.engine.stats().prompt_tokens - before

    def test_forks_go_on_as_their_parent_does(self):
        parent, begun = self.begin(5)
        children = self.engine.fork(parent, 2, user_data=9)
        length = self.engine.sequence_info(parent).length
        self.assertEqual(self.engine.sequence_info(children[1]), SequenceInfo(children[1], length, 0, False))
        tokens, computed = self.computed(self.finish)
        self.assertEqual(computed, 0)
        for sequence in (parent, *children):
            self.assertEqual(begun + tokens[sequence], STORY["token_ids"])

    def test_a_fork_at_an_earlier_place_says_again_what_came_after(self):
        parent, begun = self.begin(9)
        child, = self.engine.fork(parent, at=self.engine.sequence_info(parent).length - 4)
        tokens = self.finish()
        self.assertEqual(begun + tokens[parent], STORY["token_ids"])
        self.assertEqual(begun[:5] + tokens[child], STORY["token_ids"])

    def test_forks_draw_as_their_parent_unless_they_have_a_seed(self):
        parent, _ = self.begin(3, sampling=self.DRAWN)
        same, = self.engine.fork(parent)
        one, other = self.engine.fork(parent, 2, seed=1)
        again, = self.engine.fork(parent, seed=1)
        third, = self.engine.fork(parent, seed=2)
        tokens = self.finish()
        self.assertEqual(tokens[same], tokens[parent])
        self.assertEqual(tokens[again], tokens[one])
        self.assertEqual(len({tuple(tokens[sequence]) for sequence in (parent, one, other, third)}), 4)

    def test_idle_forks_wait_to_be_resumed(self):
        parent, begun = self.begin(5)
        with self.engine.create_queue(100) as queue:
            child, = self.engine.fork(parent, idle=True, queue=queue, user_data=4)
            self.finish()
            self.assertEqual(queue.poll(0), [])
            self.assertTrue(self.engine.sequence_info(child).idle)
            self.engine.resume(child, GREEDY, keep=False)
            self.finish()
            outputs = queue.poll(0)
        self.assertEqual([token for output in outputs for token in output.tokens], STORY["token_ids"][5:])
        self.assertEqual({output.user_data for output in outputs}, {4})
        self.assertRefused(Code.NOT_FOUND, "not kept", self.engine.sequence_info, child)

    def test_a_kept_sequence_computes_only_what_was_appended(self):
        kept, begun = self.begin(70, keep=True)
        self.assertEqual(begun, STORY["token_ids"])
        self.assertEqual(self.engine.stats().idle, 1)
        question = self.engine.tokenize("\n<|user|>\nWhat is 7 + 5?<|end|>\n<|assistant|>\n")
        self.engine.append(kept, question)
        self.engine.resume(kept, Sampling(temperature=0, max_tokens=30), user_data=5)
        tokens, computed = self.computed(self.finish)
        self.assertEqual(computed, len(question) + 1)  # and the last token that was chosen, which nothing came after yet
        whole = self.engine.tokenize(STORY["prompt"]) + STORY["token_ids"] + question
        with open_engine() as other:
            self.assertEqual(tokens[kept], other.generate(whole, Sampling(temperature=0, max_tokens=30)).tokens)
        self.engine.free(kept)
        self.engine.step()
        self.assertIdle()
        self.assertEqual(self.engine.stats().idle, 0)

    def test_what_is_appended_to_a_running_sequence_is_gone_on_from(self):
        running, begun = self.begin(3)
        added = self.engine.tokenize(" cat")
        self.engine.append(running, added)
        tokens = self.finish()[running]
        with open_engine() as other:
            prompt = self.engine.tokenize(STORY["prompt"]) + begun + added
            self.assertEqual(tokens, other.generate(prompt, GREEDY).tokens)

    def test_rewinding_says_the_same_again(self):
        running, begun = self.begin(8, sampling=self.DRAWN)
        self.engine.rewind(running, self.engine.sequence_info(running).length - 5)
        tokens = self.finish()[running]
        self.assertEqual(tokens[:5], begun[3:])
        self.assertEqual(len(tokens), 9)

    def test_a_kept_sequence_can_be_rewound_into_its_prompt_and_say_the_same_again(self):
        kept, first = self.begin(12, sampling=self.DRAWN, keep=True)
        prompt = len(self.engine.tokenize(STORY["prompt"]))
        for length in (prompt + 4, prompt):
            self.engine.rewind(kept, length)
            self.engine.resume(kept, dataclasses.replace(self.DRAWN, max_tokens=prompt + 12 - length))
            tokens, computed = self.computed(self.finish)
            self.assertEqual((tokens[kept], computed), (first[length - prompt:], 1))
        self.engine.rewind(kept, 3)
        self.assertEqual(self.engine.sequence_info(kept).length, 3)

    def test_samples_are_kept_too(self):
        first, _ = self.begin(12, sampling=self.DRAWN, n=2, keep=True)
        length = self.engine.sequence_info(first).length
        self.assertEqual(self.engine.sequence_info(first + 1), SequenceInfo(first, length, 1, True))
        self.engine.resume(first + 1, Sampling(temperature=0, max_tokens=2))
        self.engine.step()
        self.engine.step()
        self.assertEqual({(output.request, output.index) for output in self.engine.queue.poll(0)}, {(first, 1)})

    def test_kept_sequences_of_streams_go_on_in_streams(self):
        self.engine.start()
        whole = STORY["token_ids"]
        begun = self.engine.generate(STORY["prompt"], Sampling(temperature=0, max_tokens=5), keep=True, add_special=False)
        again = self.engine.fork(begun.sequence, 3, queue=self.engine.queue)
        pieces = list(self.engine.stream_resumed(begun.sequence, Sampling(temperature=0, max_tokens=5)))
        self.assertEqual([token for output in pieces for token in output.tokens], whole[5:10])
        self.assertEqual(self.engine.generate_resumed(begun.sequence, GREEDY, keep=False).tokens, whole[10:])

        async def resumed():
            return await asyncio.gather(*(self.engine.agenerate_resumed(one, GREEDY, keep=False) for one in again))
        self.assertEqual([one.tokens for one in asyncio.run(resumed())], [whole[5:]] * 3)
        self.assertIdle()

    def test_a_running_sequence_that_is_freed_says_so(self):
        running, _ = self.begin(3)
        self.engine.free(running)
        self.engine.step()
        self.assertEqual([output.finish_reason for output in self.engine.queue.poll(0)], [FinishReason.ABORT])
        self.assertIdle()

    def test_more_kept_sequences_than_the_pool_holds_are_computed_again_when_they_go_on(self):
        with open_engine(kv_bytes=1 << 20, max_model_len=128) as engine:  # 32 blocks
            first, second = (Sampling(temperature=0, max_tokens=most, ignore_eos=True) for most in (20, 5))
            prompts = [[70 + i] * 20 for i in range(20)]
            kept = [engine.generate(prompt, first, keep=True) for prompt in prompts]
            self.assertEqual(engine.stats().idle, 20)
            for prompt, begun in zip(prompts, kept):
                more = engine.generate_resumed(begun.sequence, second)
                self.assertEqual(more.tokens, engine.generate(prompt + begun.tokens, second).tokens)
                engine.free(begun.sequence)


class Moving(Case):
    """Sequences that are written down, and go on in another engine."""
    DRAWN = Sampling(temperature=1.2, seed=7, max_tokens=200, ignore_eos=True)

    def setUp(self):
        super().setUp()
        self.other = open_engine()
        self.addCleanup(self.other.close)
        self.whole = self.other.generate(STORY["prompt"], self.DRAWN, add_special=False)

    def begin(self, tokens, **request):
        """A stream after so many tokens, the sequence, and what was read of it."""
        stream = self.engine.stream(STORY["prompt"], self.DRAWN, capacity=1, add_special=False, **request)
        begun = [next(stream) for _ in range(tokens)]
        return stream, begun[0].sequence, begun

    def export_at_the_next_step(self, engine, sequence):
        async def export():
            exporting = asyncio.create_task(engine.aexport_sequence(sequence))
            await asyncio.sleep(0)
            engine.step()
            return await exporting
        return asyncio.run(export())

    def moved(self, state):
        """A stream of what it says in the other engine."""
        return self.other.stream_resumed(self.other.import_sequence(state), continue_generation=True, keep=False)

    def assertTheRest(self, outputs, of=None):
        """What never moved said it too, from some place on to its end."""
        whole, outputs = of or self.whole, list(outputs)
        tokens = [token for output in outputs for token in output.tokens]
        self.assertIn(len(tokens), range(1, len(whole.tokens) + 1))
        self.assertEqual(tokens, whole.tokens[-len(tokens):])
        self.assertTrue(whole.text.endswith("".join(output.text for output in outputs)))
        self.assertEqual((outputs[-1].finish_reason, outputs[-1].generated_tokens), (FinishReason.LENGTH, len(whole.tokens)))

    def test_a_sequence_that_moves_goes_on_with_the_same_tokens(self):
        stream, sequence, _ = self.begin(20)
        state = self.engine.export_sequence(sequence)
        stream.close()
        self.assertIdle()
        for kind in (bytes, bytearray, memoryview):
            self.assertTheRest(self.moved(kind(state)))
        self.assertSoon(lambda: self.other.stats().idle == 0, "none of them stays")
        self.assertIdle(self.other)

    def test_who_is_read_meanwhile_notices_nothing(self):
        stream, sequence, begun = self.begin(5)
        states = [self.engine.export_sequence(sequence) for _ in range(3)]
        outputs = begun + list(stream)
        self.assertEqual([token for output in outputs for token in output.tokens], self.whole.tokens)
        self.assertEqual("".join(output.text for output in outputs), self.whole.text)
        self.assertEqual({len(output.tokens) for output in outputs}, {1})
        for state in states:
            self.assertTheRest(self.moved(state))
        self.assertIdle()
        stats = self.engine.stats()
        self.assertEqual((stats.finished_abort, stats.finished_error), (0, 0))

    def test_asyncio_moves_many_at_once(self):
        async def move():
            stream = self.engine.astream(STORY["prompt"], self.DRAWN, capacity=1, add_special=False)
            sequence = (await stream.__anext__()).sequence
            state = await self.engine.aexport_sequence(sequence)
            await stream.aclose()
            return [output async for output in self.other.astream_resumed(self.other.import_sequence(state), continue_generation=True)]

        async def main():
            return await asyncio.gather(*(move() for _ in range(8)))
        for outputs in asyncio.run(main()):
            self.assertTheRest(outputs)
        self.assertIdle()

    def test_a_sequence_may_move_with_a_grammar_and_log_probabilities_half_told(self):
        sampling = dataclasses.replace(self.DRAWN, grammar=Grammar.regex("[a-f0-9 ]{60}"), top_logprobs=2)
        whole = self.other.generate("Hello", sampling)
        stream = self.engine.stream("Hello", sampling, capacity=1)
        state = self.engine.export_sequence(next(stream).sequence)
        rest = list(self.moved(state))
        tokens = [token for output in rest for token in output.tokens]
        self.assertEqual(tokens, whole.tokens[-len(tokens):])
        self.assertEqual([top for output in rest for top in output.top_logprobs or []], whole.top_logprobs[-len(tokens):])
        self.assertEqual((rest[-1].score, rest[-1].finish_reason), (whole.score, FinishReason.STOP))

    def test_a_kept_sequence_moves_when_its_stream_has_ended(self):
        kept = self.engine.generate(STORY["prompt"], Sampling(temperature=0, max_tokens=9), keep=True, add_special=False)
        state = self.engine.export_sequence(kept.sequence)
        self.assertEqual(self.engine.export_sequence(kept.sequence), state)
        self.assertSoon(lambda: self.engine.stats().idle == 1, "nothing stays of the exports")
        moved = self.other.import_sequence(state)
        length = kept.prompt_tokens + 9
        self.assertEqual(self.other.sequence_info(moved), SequenceInfo(moved, length, 0, True, False))
        before = self.other.stats().prompt_tokens
        rest = self.other.generate_resumed(moved, GREEDY, keep=False)
        self.assertEqual(kept.tokens + rest.tokens, STORY["token_ids"])
        self.assertEqual(self.other.stats().prompt_tokens - before, 1)  # the last token, which nothing came after yet
        self.assertRefused(Code.INVALID_ARGUMENT, "rewind", list, self.moved(state))  # it may not become longer

    def test_what_goes_on_is_kept_unless_that_is_not_wanted(self):
        stream, sequence, _ = self.begin(5)
        state = self.engine.export_sequence(sequence)
        moved = self.other.import_sequence(state)
        self.assertTheRest(self.other.stream_resumed(moved, continue_generation=True))
        self.assertTrue(self.other.sequence_info(moved).idle)
        self.other.free(moved)
        self.assertTheRest(self.other.stream_resumed(self.other.import_sequence(state), continue_generation=True, keep=False))
        self.assertSoon(lambda: self.other.stats().idle == 0, "both are gone")

    def test_an_idle_fork_goes_on_as_if_it_had_never_been_idle(self):
        stream, sequence, _ = self.begin(5, user_data=3)
        for how, user_data in (({}, 3), ({"user_data": 4}, 4)):
            fork, = self.engine.fork(sequence, idle=True, queue=self.engine.queue)
            going_on = self.engine.stream_resumed(fork, continue_generation=True, keep=False, **how)
            begun = next(going_on)
            self.assertRefused(Code.INVALID_ARGUMENT, "runs already", self.engine.resume, fork, continue_generation=True)
            outputs = [begun, *going_on]
            self.assertTheRest(outputs)
            self.assertEqual({output.user_data for output in outputs}, {user_data})
        self.assertEqual(self.engine.queue.poll(0), [])

    def test_what_goes_on_writes_to_the_queue_that_is_named_or_to_its_own(self):
        stream, sequence, _ = self.begin(5)
        state = self.engine.export_sequence(sequence)
        with self.other.create_queue(1000) as own, self.other.create_queue(1000) as named:
            for queue, to in ((None, own), (named, named)):
                self.other.resume(self.other.import_sequence(state, queue=own), continue_generation=True, keep=False, queue=queue)
                outputs = []
                while not outputs or not outputs[-1].finish_reason:
                    outputs += to.poll()
                self.assertTheRest(outputs)

    def test_what_goes_on_has_its_own_sampling(self):
        stream, sequence, _ = self.begin(5)
        moved = self.other.import_sequence(self.engine.export_sequence(sequence))
        for wrong in ({"sampling": GREEDY}, {"skip_special": True}, {"logits_hook": print}):
            with self.assertRaisesRegex(TypeError, "the sequence's own"):
                self.other.resume(moved, continue_generation=True, **wrong)
        for generate in (self.other.generate_resumed, lambda *how, **more: asyncio.run(self.other.agenerate_resumed(*how, **more))):
            with self.assertRaisesRegex(TypeError, "continue_generation"):
                generate(moved, continue_generation=True)
        self.assertTheRest(self.other.stream_resumed(moved, continue_generation=True))

    def test_an_export_that_nobody_waits_for_any_more_disturbs_nobody(self):
        async def give_up(engine, sequence):
            await asyncio.wait_for(engine.aexport_sequence(sequence), 0.01)
        with open_engine(host_steps=True) as engine:
            sequence = engine.add(STORY["prompt"], self.DRAWN, add_special=False)
            for _ in range(3):
                engine.step()
                with self.assertRaises(asyncio.TimeoutError):
                    asyncio.run(give_up(engine, sequence))
            while engine.step().unfinished:
                pass
            outputs = engine.queue.poll(0)
            self.assertEqual([token for output in outputs for token in output.tokens], self.whole.tokens)
            self.assertIdle(engine)

    def test_what_was_said_of_the_prompt_moves_and_what_was_still_to_be_said_of_it(self):
        for kind in OutputKind:
            sampling = dataclasses.replace(self.DRAWN, max_tokens=9, prompt_top_logprobs=1, output_kind=kind)
            whole = self.other.generate(STORY["prompt"], sampling, add_special=False)
            self.assertEqual(len(whole.prompt_logprobs), whole.prompt_tokens - 1)
            for steps in (0, 2, 5):
                with self.subTest(kind=kind, steps=steps), open_engine(host_steps=True, prefill_chunk=8) as engine:
                    sequence = engine.add(STORY["prompt"], sampling, add_special=False)
                    for _ in range(steps):
                        engine.step()
                    before = engine.queue.poll(0)
                    after = list(self.moved(self.export_at_the_next_step(engine, sequence)))
                    said = after[-1:] if kind else [*before, *after]
                    for name in ("tokens", "prompt_logprobs", "prompt_top_logprobs"):
                        lists = [getattr(output, name) or [] for output in said]
                        self.assertEqual(sum(lists, []), getattr(whole, name))

    def test_a_sequence_of_another_instruction_path_goes_on_and_says_that_it_is_inexact(self):
        stream, sequence, _ = self.begin(5)
        state = self.engine.export_sequence(sequence)
        with open_engine(isa=pagedllm.Isa.PORTABLE) as portable:
            moved = portable.import_sequence(state)
            self.assertEqual(portable.sequence_info(moved).inexact, portable.model_info().isa != self.engine.model_info().isa)
            self.assertEqual(portable.generate_resumed(moved, Sampling(max_tokens=3, ignore_eos=True)).finish_reason,
                             FinishReason.LENGTH)

    def test_where_the_host_steps_the_next_step_writes_it_down(self):
        with open_engine(host_steps=True) as engine, ThreadPoolExecutor(1) as pool:
            sequence = engine.add(STORY["prompt"], self.DRAWN, add_special=False)  # which no step has seen yet
            for _ in range(2):
                exported = pool.submit(engine.export_sequence, sequence)
                while not exported.done():
                    engine.step()
                self.assertTheRest(self.moved(exported.result()))
            for end, message in ((engine.abort, "has ended before it could be exported"), (engine.free, "is unknown")):
                sequence = engine.add(STORY["prompt"], self.DRAWN, add_special=False)
                engine.step()
                end(sequence)
                self.assertRefused(Code.NOT_FOUND, message, self.export_at_the_next_step, engine, sequence)
            exported = pool.submit(engine.export_sequence, engine.add("Hello"))
            time.sleep(0.01)
            engine.close()
            self.assertRefused(Code.CLOSED, "", exported.result)

    def test_a_damaged_state_is_refused_and_the_engine_goes_on(self):
        stream, sequence, _ = self.begin(3)
        state = self.engine.export_sequence(sequence)
        damaged = [b"", b"\0", state[:-1], state[:len(state) // 2], state[1:], state + b"\0", bytes(len(state))]
        for at in (0, 12, 20, 100, len(state) // 2, len(state) - 1):
            damaged.append(state[:at] + bytes([state[at] ^ 1]) + state[at + 1:])
        for bad in damaged:
            self.assertRefused(Code.INVALID_ARGUMENT, f"not an exported sequence ({len(bad)} bytes)",
                               self.other.import_sequence, bad)
        newer = state[:8] + b"\x09" + state[9:]
        self.assertRefused(Code.UNSUPPORTED, "format 9", self.other.import_sequence, newer)
        for wrong in (None, 7, "state", [1, 2]):
            with self.assertRaises(TypeError):
                self.other.import_sequence(wrong)
        for options in ({"block_size": 32}, {"kv_dtype": DType.F32}):
            with open_engine(**options) as different:
                self.assertRefused(Code.INVALID_ARGUMENT, "block_size and kv_dtype", different.import_sequence, state)
        with open_engine(max_model_len=64) as short:
            self.assertRefused(Code.INVALID_ARGUMENT, "max_model_len is 64", short.import_sequence, state)
        self.assertRefused(Code.INVALID_ARGUMENT, "another engine", self.other.import_sequence, state, queue=self.engine.queue)
        self.assertEqual(self.other.stats().idle, 0)
        self.assertIdle(self.other)
        self.assertTheRest(self.moved(state))


class Prefixes(Case):
    PROMPT = "The quick brown fox jumps over the lazy dog. " * 8

    def cost(self, prompt=PROMPT, engine=None, **request):
        """Prompt tokens computed, and found."""
        engine = engine or self.engine
        before = engine.stats()
        engine.generate(prompt, Sampling(temperature=0, max_tokens=1), **request)
        after = engine.stats()
        return after.prompt_tokens - before.prompt_tokens, after.prefix_hits - before.prefix_hits

    def test_what_was_computed_is_found_by_those_with_the_same_salt(self):
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

    def test_a_pinned_prompt_is_there_before_it_is_asked_for(self):
        pin = self.engine.pin(self.PROMPT, priority=1, cache_salt="mine")
        self.assertSoon(lambda: self.engine.stats().blocks_used > 5, "the prompt is computed")
        self.assertGreater(self.cost(cache_salt="mine")[1], 100)
        self.assertEqual(self.cost(cache_salt="not mine")[1], 0)
        self.engine.unpin(pin)
        self.assertRefused(Code.NOT_FOUND, "pin", self.engine.unpin, pin)
        self.assertIdle()

    def test_a_pin_expires(self):
        pin = self.engine.pin(self.engine.tokenize(self.PROMPT), time_to_live_ms=20)
        time.sleep(0.03)
        self.engine.generate("Hello", Sampling(max_tokens=1))
        self.assertRefused(Code.NOT_FOUND, "expired", self.engine.unpin, pin)
        self.assertIdle()


class Hooks(Case):
    def ask(self, hook, **more):
        return self.engine.generate("Hello", Sampling(temperature=0, max_tokens=3), logits_hook=hook, **more)

    def test_a_hook_sees_the_tokens_and_edits_the_logits(self):
        calls = []

        def choose_the_next_letter(sequence, tokens, logits):
            calls.append((sequence, list(tokens), len(logits)))
            logits[70 + len(calls)] = 1000.0
        answer = self.ask(choose_the_next_letter)
        prompt = self.engine.tokenize("Hello", add_special=True)
        self.assertEqual(answer.tokens, [71, 72, 73])
        self.assertEqual(calls, [(answer.sequence, prompt + answer.tokens[:i], 1024) for i in range(3)])

    def test_forks_have_their_parents_hook_and_a_resumed_sequence_the_one_it_is_given(self):
        with open_engine(host_steps=True) as engine:
            def always(token):
                def hook(sequence, tokens, logits):
                    logits[token] = 1000.0
                return hook
            parent = engine.add("Hello", Sampling(max_tokens=4), keep=True, logits_hook=always(70))
            engine.step()
            child, = engine.fork(parent)
            gc.collect()
            tokens = collections.defaultdict(list)
            while engine.step().unfinished:
                pass
            engine.resume(parent, Sampling(temperature=0, max_tokens=2), logits_hook=always(71))
            while engine.step().unfinished:
                pass
            for output in engine.queue.poll(0):
                tokens[output.sequence] += output.tokens
            self.assertEqual((tokens[parent], tokens[child]), ([70] * 4 + [71] * 2, [70] * 3))

    def test_what_a_hook_raises_is_reported_and_the_request_goes_on(self):
        reported = []
        before, sys.unraisablehook = sys.unraisablehook, lambda what: reported.append(str(what.exc_value))
        self.addCleanup(setattr, sys, "unraisablehook", before)

        def fail(sequence, tokens, logits):
            raise LookupError("no such token")
        self.assertEqual(self.ask(fail).tokens, self.ask(None).tokens)
        self.assertEqual(reported, ["no such token"] * 3)

    def test_logits_that_were_kept_are_not_read_after_the_call(self):
        kept = []
        self.ask(lambda sequence, tokens, logits: kept.extend((tokens, logits)))
        for view in kept:
            with self.assertRaises(ValueError):
                view[0]

    def test_the_tokens_are_not_the_hooks_to_change(self):
        raised = []

        def change(sequence, tokens, logits):
            try:
                tokens[0] = 1
            except TypeError as error:
                raised.append(error)
        self.ask(change)
        self.assertEqual(len(raised), 3)

    def test_logits_that_are_no_numbers_end_the_request_and_nothing_else(self):
        def spoil(value):
            def hook(sequence, tokens, logits):
                logits[:] = array.array("f", [value] * len(logits))
            return hook
        for value in (math.nan, math.inf, -math.inf):
            with self.assertRaises(Error):
                self.ask(spoil(value))
        self.assertIdle()
        self.assertEqual(self.engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])

    def test_a_hook_may_call_what_any_thread_may(self):
        lengths, refused = [], []

        def look(sequence, tokens, logits):
            lengths.append(self.engine.sequence_info(sequence).length)
            self.engine.abort(sequence)
            try:
                self.engine.step()
            except Error as error:
                refused.append(error.code)
        self.assertEqual(self.ask(look).finish_reason, FinishReason.ABORT)
        self.assertEqual((lengths, refused), ([2], [Code.BUSY]))

    def test_a_hook_may_close_the_engine(self):
        self.assertRefused(Code.CLOSED, "", self.engine.generate, "Hello", ENDLESS, logits_hook=lambda *_: self.engine.close())
        with open_engine(host_steps=True) as engine:
            engine.add("Hello", logits_hook=lambda *_: engine.close())
            self.assertEqual(engine.step().sequences, 1)
            self.assertRefused(Code.CLOSED, "closed", engine.step)

    def test_a_forgotten_engine_with_a_hook_is_freed(self):
        def forget():
            engine = open_engine()
            next(engine.stream("Hello", ENDLESS, logits_hook=lambda *_: engine.model_info()))
        before = descriptors()
        forget()
        self.assertSoon(lambda: gc.collect() >= 0 and descriptors() <= before, "the engine is gone")

    def test_a_process_may_end_in_the_middle_of_a_hook(self):
        program = ("import pagedllm\n"
                   f"engine = pagedllm.Engine({str(MODEL)!r}, threads=1, kv_bytes=16 << 20)\n"
                   "stream = engine.stream('Hello', pagedllm.Sampling(ignore_eos=True), logits_hook=lambda *_: None)\n"
                   "next(stream)\n"
                   "print('alive')")
        for _ in range(5):
            done = subprocess.run([sys.executable, "-c", program], cwd=MODULE, capture_output=True, text=True, timeout=30)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "alive\n", ""))


class Scheduling(Case):
    def first_of(self, waiting, **options):
        """Whose tokens come first: the index into `waiting`, keywords of add() each, all of which wait for one place."""
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
            return next(ids.index(output.request) for output in engine.queue.poll(0) if output.request in ids)

    def test_the_order_says_who_comes_first(self):
        urgent = [{}, {"priority": 1}]
        self.assertEqual(self.first_of(urgent), 0)
        self.assertEqual(self.first_of(urgent, order=Order.PRIORITY), 1)
        self.assertEqual(self.first_of(urgent, order=Order.PRIORITY, ageing_ms=1), 0)
        short = [{}, {"sampling": Sampling(max_tokens=5)}]
        self.assertEqual(self.first_of(short), 0)
        self.assertEqual(self.first_of(short, order=Order.SHORTEST_PREDICTED), 1)

    def test_the_batching_says_what_a_step_is_made_of(self):
        for options, expected in (
                ({}, (100, 1)), ({"batching": Batching.PREFILL_FIRST}, (100, 0)), ({"batching": Batching.STATIC}, (0, 1)),
                ({"batching": Batching.DECODE_FIRST, "prefill_budget": 16}, (16, 1))):
            with self.subTest(options), open_engine(host_steps=True, **options) as engine:
                engine.add("Hello", ENDLESS)
                engine.step()
                engine.add([70] * 100)
                step = engine.step()
                self.assertEqual((step.prefill_tokens, step.decode_tokens), expected)

    def test_the_allocation_says_what_is_set_aside(self):
        for allocation, least, most in ((Allocation.ON_DEMAND, 0.1, 1), (Allocation.MAX_TOKENS, 0, 0.02)):
            with open_engine(host_steps=True, allocation=allocation) as engine:
                engine.add("Hello", Sampling(max_tokens=200))
                engine.step()
                self.assertTrue(least < engine.stats().slot_utilization < most, engine.stats())

    def test_who_has_to_give_way_waits_in_the_host_tier_and_says_the_same(self):
        block = pagedllm.plan(MODEL, **SMALL).block_bytes
        sampling = Sampling(temperature=0, max_tokens=150, ignore_eos=True)
        alone = self.engine.generate(STORY["prompt"], sampling, add_special=False)
        with tempfile.TemporaryDirectory() as folder:
            for path in (None, folder, os.fsencode(folder), pathlib.Path(folder)):
                options = {"kv_bytes": 24 * block, "max_model_len": 256, "preemption": Preemption.SWAP, "swap_bytes": 200 * block,
                           "swap_path": path}
                plan = pagedllm.plan(MODEL, **options)
                self.assertEqual((plan.swap_bytes, plan.swap_blocks), (200 * block, 200))
                with open_engine(host_steps=True, **options) as engine, ThreadPoolExecutor(8) as pool:
                    asked = pool.map(lambda salt: engine.generate(
                        STORY["prompt"], sampling, cache_salt=str(salt), add_special=False), range(8))
                    self.assertSoon(lambda: engine.predict_admission("Hello").waiting_requests == 8, "all wait")
                    engine.start()
                    answers = list(asked)
                    self.assertSoon(lambda: engine.stats().finished_length == 8, "all are counted")
                    stats = engine.stats()
                self.assertEqual({(answer.text, *answer.tokens) for answer in answers}, {(alone.text, *alone.tokens)})
                self.assertGreater(stats.preemptions_swapped, 0)
                self.assertEqual(stats.preemptions, sum(answer.preemptions for answer in answers))
                self.assertEqual((stats.swap_blocks_total, stats.swap_blocks_used, stats.swapped), (200, 0, 0))
                self.assertTrue(stats.blocks_swapped_out >= stats.blocks_swapped_in > stats.swap_failures == 0, stats)

    def test_k_and_v_in_int8_take_about_half_the_bytes(self):
        int8, bf16 = (pagedllm.plan(MODEL, **SMALL, kv_dtype=dtype) for dtype in (DType.INT8, DType.BF16))
        self.assertEqual(int8.kv_dtype, DType.INT8)
        self.assertLess(int8.block_bytes, 0.6 * bf16.block_bytes)
        with open_engine(kv_dtype=DType.INT8) as engine:
            self.assertEqual(engine.stats().blocks_total, int8.blocks)
            self.assertIn("upon a time", engine.generate(STORY["prompt"], GREEDY, add_special=False).text)

    def test_weights_in_whole_numbers_take_fewer_bytes(self):
        plans = [pagedllm.plan(MODEL, **SMALL, weight_format=weights) for weights in (Weights.BF16, Weights.INT8, Weights.INT4)]
        bf16, int8, int4 = (plan.weight_bytes for plan in plans)
        self.assertLess(int8, 0.55 * bf16)
        self.assertLess(int4, int8)
        self.assertRefused(Code.INVALID_ARGUMENT, "weight_group is 48", pagedllm.plan, MODEL, weight_format=Weights.INT4, weight_group=48)
        for weights, group in ((Weights.INT8, None), (Weights.INT4, 64), (Weights.INT4_ASYMMETRIC, 128)):
            with open_engine(weight_format=weights, weight_group=group) as engine:
                self.assertIn("upon a time", engine.generate(STORY["prompt"], GREEDY, add_special=False).text)

    def test_threads_are_pinned_where_they_are_asked_to(self):
        cpus = sorted(os.sched_getaffinity(0))
        with open_engine(threads=None, cpus=",".join(map(str, cpus))) as engine:
            self.assertEqual(engine.model_info().threads, len(cpus))
            self.assertIn("upon a time", engine.generate(STORY["prompt"], GREEDY, add_special=False).text)
        self.assertEqual(sorted(os.sched_getaffinity(0)), cpus)

    def test_packed_weights_are_kept_and_read_again(self):
        Packed = pagedllm.Packed
        with tempfile.TemporaryDirectory() as path:
            for packed, reason in ((Packed.SAVED, "there was none yet"), (Packed.READ, "")):
                with open_engine(packed_path=path) as engine:
                    self.assertEqual((engine.model_info().packed, engine.model_info().packed_reason), (packed, reason))
                    self.assertIn("upon a time", engine.generate(STORY["prompt"], GREEDY, add_special=False).text)
        with open_engine() as engine:
            self.assertEqual((engine.model_info().packed, engine.model_info().packed_reason), (Packed.UNUSED, ""))
        self.assertRefused(Code.IO, "does not exist or is not a directory", open_engine, packed_path="/nonexistent")

    def test_a_deadline_ends_a_request_with_what_it_has(self):
        with open_engine(host_steps=True) as engine:
            request = engine.add("Hello", ENDLESS, deadline=0.5, keep=True)
            for slept, unfinished in ((0, 1), (0.05, 1), (0.5, 0)):
                time.sleep(slept)
                self.assertEqual(engine.step().unfinished, unfinished)
            outputs = engine.queue.poll(0)
            self.assertEqual([len(output.tokens) for output in outputs], [1, 1, 0])
            self.assertEqual(outputs[-1].finish_reason, FinishReason.DEADLINE)
            for continue_generation in (False, True):
                engine.resume(request, None if continue_generation else ENDLESS, deadline=0.1, continue_generation=continue_generation)
                time.sleep(0.11)
                engine.step()
                self.assertEqual(engine.queue.poll(0)[-1].finish_reason, FinishReason.DEADLINE)
            self.assertEqual(engine.stats().finished_deadline, 3)

    def test_an_answer_that_its_deadline_cuts_short_is_an_answer(self):
        slow = open_engine(host_steps=True)  # nobody steps it until the deadline has passed
        self.addCleanup(slow.close)
        threading.Timer(0.05, slow.start).start()
        answer = slow.generate("Hello", ENDLESS, deadline=0.02)
        self.assertEqual((answer.text, answer.finish_reason), ("", FinishReason.DEADLINE))
        self.assertEqual((answer.queued_seconds, answer.first_token_seconds, answer.last_token_seconds), (0, 0, 0))


class Admitting(Case):
    def test_texts_beyond_max_prompt_bytes_are_refused(self):
        with open_engine(host_steps=True, max_prompt_bytes=100) as engine:
            chat = [{"role": "user", "content": "x" * 100}]
            for call in (lambda: engine.tokenize("x" * 101), lambda: engine.add("x" * 101, ENDLESS), lambda: engine.render_chat(chat)):
                self.assertRefused(Code.INVALID_ARGUMENT, "max_prompt_bytes 100", call)
            engine.tokenize("x" * 100)

    def test_what_would_only_wait_is_refused(self):
        for limit, waits in (({"max_waiting_requests": 1}, "1 requests wait"), ({"max_waiting_tokens": 5}, "2 tokens wait")):
            with self.subTest(limit), open_engine(host_steps=True, **limit) as engine:
                engine.add("Hello", ENDLESS)
                self.assertRefused(Code.CAPACITY, waits, engine.add, [70] * 4)
                self.assertEqual(engine.stats().admission_rejections, 1)
                engine.step()
                engine.add([70] * 4)

    def test_what_would_become_of_a_request_is_told_without_adding_it(self):
        with open_engine(host_steps=True, max_seqs=1, max_waiting_requests=1) as engine:
            self.assertEqual(engine.predict_admission("Hello"), (True, True, None, 0, 0))
            engine.add("Hello", ENDLESS)
            self.assertEqual(engine.predict_admission("Hello", ENDLESS, user_data=1, keep=True), (False, False, None, 1, 2))
            for _ in range(3):
                engine.step()
            told = engine.predict_admission("Hello", GREEDY)
            self.assertEqual((told.admits, told.fits_now), (True, False))
            self.assertGreater(told.first_token_seconds, 0)
            self.assertEqual((engine.stats().waiting, engine.stats().admission_rejections), (0, 0))
            self.assertRefused(Code.INVALID_ARGUMENT, "5000 tokens", engine.predict_admission, [70] * 5000)
            with open_engine() as other:
                self.assertRefused(Code.INVALID_ARGUMENT, "queue", engine.predict_admission, "Hello", queue=other.create_queue(1))
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
        self.assertEqual((plan.blocks, plan.max_blocks, plan.kv_bytes), (200, 400, 200 * self.block))
        self.assertEqual(self.budget.info(), (200 * self.block, 0, 400 * self.block, 0, 0))
        engines = [self.open(), self.open()]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(engine.generate, case["prompt"], GREEDY, add_special=False)
                     for case in EXPECTED for engine in engines]
            self.assertEqual([one.result().text for one in asked], [case["answer"] for case in EXPECTED for _ in engines])
        state = self.budget.info()
        self.assertEqual((state.engines, state.min_bytes), (2, 128 * self.block))
        self.assertEqual(engines[0].budget.info(), state)
        engines[0].close()
        self.assertEqual(self.budget.info().engines, 1)
        self.assertRefused(Code.CLOSED, "the engine is closed", lambda: engines[0].budget)

    def test_a_budget_that_changes_while_answers_are_made_changes_none(self):
        engine = self.open()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(engine.generate, case["prompt"], GREEDY, add_special=False) for case in EXPECTED * 5]
            for blocks in (64, 400, 100, 64, 300):
                self.budget.resize(blocks * self.block)
                time.sleep(0.02)
            self.assertEqual([one.result().text for one in asked], [case["answer"] for case in EXPECTED * 5])
        self.assertEqual(self.budget.info().bytes, 300 * self.block)
        self.assertSoon(lambda: engine.stats().blocks_total == 300, "the engine has what there is")

    def test_an_engine_has_a_budget_of_its_own_too(self):
        budget = self.engine.budget
        self.assertEqual(budget.info()[0::2], (SMALL["kv_bytes"], SMALL["kv_bytes"], 1))
        budget.close()
        budget.resize(SMALL["kv_bytes"] // 2)
        self.assertSoon(lambda: self.engine.stats().blocks_total == 256, "the pool has become smaller")
        with self.open(budget) as other:
            self.assertEqual(other.budget.info().engines, 2)
        self.engine.close()
        self.assertRefused(Code.CLOSED, "the engine is closed", budget.info)
        self.assertRefused(Code.CLOSED, "the engine is closed", self.open, budget)

    def test_a_closed_or_forgotten_budget_lives_on_in_its_engines(self):
        with Budget(64 * self.block) as budget:
            engine = self.open(budget)
        for call in (budget.info, lambda: budget.resize(1), lambda: self.open(budget), lambda: pagedllm.plan(MODEL, budget=budget)):
            self.assertRefused(Code.CLOSED, "the budget is closed", call)
        forgotten = self.open(Budget(64 * self.block))
        gc.collect()
        for one in (engine, forgotten):
            self.assertEqual(one.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])
            self.assertEqual(one.budget.info().bytes, 64 * self.block)

    def test_budgets_that_cannot_be_are_refused(self):
        self.open()
        for code, message, call in [
            (Code.INVALID_ARGUMENT, "0 bytes", lambda: Budget(0)),
            (Code.INVALID_ARGUMENT, "may have up to 4", lambda: Budget(5, 4)),
            (Code.INVALID_ARGUMENT, "bytes is -1", lambda: Budget(-1)),
            (Code.INVALID_ARGUMENT, "max_bytes is", lambda: Budget(1, 2**64)),
            (Code.CAPACITY, "made for up to", lambda: self.budget.resize(401 * self.block)),
            (Code.CAPACITY, f"need {64 * self.block} bytes to go on", lambda: self.budget.resize(63 * self.block)),
            (Code.INVALID_ARGUMENT, "bytes is -1", lambda: self.budget.resize(-1)),
            (Code.INVALID_ARGUMENT, "both given", lambda: open_engine(budget=self.budget)),
        ]:
            with self.subTest(message):
                self.assertRefused(code, message, call)
        self.assertEqual(self.budget.info()[0::4], (200 * self.block, 1))


class Insight(Case):
    def test_the_last_output_says_how_long_what_took(self):
        begun = time.monotonic()
        outputs = list(self.engine.stream("Hello", Sampling(max_tokens=20, ignore_eos=True)))
        took = time.monotonic() - begun
        last = outputs.pop()
        self.assertTrue(0 < last.queued_seconds < last.first_token_seconds < last.last_token_seconds < took, last)
        self.assertEqual({(output.queued_seconds, output.first_token_seconds, output.last_token_seconds) for output in outputs},
                         {(0, 0, 0)})
        prompt = [70] * 40
        self.assertEqual([self.engine.generate(prompt, Sampling(max_tokens=1)).cached_tokens for _ in range(2)], [0, 32])
        self.assertSoon(lambda: self.engine.stats().prompt_tokens_cached == 32, "they are counted")

    def test_metrics_are_in_the_format_that_prometheus_scrapes(self):
        self.engine.generate("Hello", Sampling(max_tokens=3, ignore_eos=True))
        self.assertSoon(lambda: self.engine.stats().finished_length == 1, "the request is counted")
        text = self.engine.metrics()
        self.assertTrue(text.endswith("\n# EOF\n"), text[-20:])
        kinds, values = {}, {}
        for line in text.splitlines()[:-1]:
            if line.startswith("#"):
                declared = re.fullmatch(r"# (TYPE (pagedllm_\w+) (gauge|counter|histogram|info)|(HELP|UNIT) pagedllm_\w+ .+)", line)
                kinds[declared[2]] = declared[3]
            else:
                name, labels, value = re.fullmatch(r'(pagedllm_\w+)\{model_name="model"((?:,\w+="[^"]*")*)\} (\S+)', line).groups()
                values[name + labels] = float(value)
        self.assertEqual((kinds["pagedllm_num_requests_running"], kinds["pagedllm_generation_tokens"],
                          kinds["pagedllm_time_to_first_token_seconds"]), ("gauge", "counter", "histogram"))
        for name, value in {'request_success_total,finished_reason="length"': 1, "generation_tokens_total": 3,
                            "request_generation_tokens_sum": 3, 'request_generation_tokens_bucket,le="2.0"': 0,
                            'request_generation_tokens_bucket,le="4.0"': 1, "kv_cache_usage_perc": 0}.items():
            self.assertEqual(values["pagedllm_" + name], value, name)

    def test_a_trace_and_a_journal_are_files(self):
        with tempfile.TemporaryDirectory() as folder:
            trace, journal = pathlib.Path(folder, "trace.json"), os.fsencode(os.path.join(folder, "journal"))
            with open_engine(trace_path=trace, journal_path=journal, host_steps=True) as engine:
                engine.add("Hello", Sampling(max_tokens=3, ignore_eos=True))
                while engine.step().unfinished:
                    pass
                self.assertEqual((engine.stats().traces_stopped, engine.stats().journals_stopped), (0, 0))
            events = json.loads(trace.read_text(encoding="utf-8"))
            self.assertEqual(sum(event["name"] == "step" for event in events), 3)
            self.assertTrue(pathlib.Path(os.fsdecode(journal)).read_bytes().startswith(b"PLLMJRNL"))


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
        max_threads = 0

        async def read(case):
            nonlocal max_threads
            text = ""
            async for output in self.engine.astream(case["prompt"], GREEDY, add_special=False):
                text += output.text
                max_threads = max(max_threads, threads())
            return text == case["answer"]

        async def main():
            self.assertEqual(set(await asyncio.gather(*(read(EXPECTED[i % len(EXPECTED)]) for i in range(200)))), {True})
        self.run_async(main())
        self.assertLessEqual(max_threads, before)
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
            (Code.UNSUPPORTED, "cuda:99", {"device": "cuda:99"}),
            (Code.UNSUPPORTED, "memory_fraction is 0.5", {"memory_fraction": 0.5}),
            (Code.INVALID_ARGUMENT, "memory_fraction is 1.5", {"device": "cuda", "memory_fraction": 1.5, "kv_bytes": 0}),
            (Code.INVALID_ARGUMENT, "block_size", {"block_size": 7}),
            (Code.CAPACITY, "kv_bytes", {"kv_bytes": 1}),
            (Code.INVALID_ARGUMENT, "threads is -1", {"threads": -1}),
            (Code.INVALID_ARGUMENT, "threads is 4294967297", {"threads": 2**32 + 1}),
            (Code.INVALID_ARGUMENT, "threads is 10000", {"threads": 10000}),
            (Code.INVALID_ARGUMENT, 'cpus is "x"', {"cpus": "x"}),
            (Code.INVALID_ARGUMENT, "kv_bytes is 18446744073709551616", {"kv_bytes": 2**64}),
            (Code.INVALID_ARGUMENT, "order is 3", {"order": 3}),
            (Code.INVALID_ARGUMENT, "batching is 4", {"batching": 4}),
            (Code.INVALID_ARGUMENT, "allocation is 2", {"allocation": 2}),
            (Code.INVALID_ARGUMENT, "preemption is 3", {"preemption": 3}),
            (Code.INVALID_ARGUMENT, "swap_bytes is 0", {"preemption": Preemption.AUTO}),
            (Code.INVALID_ARGUMENT, "nothing would be swapped", {"swap_bytes": 1 << 20}),
            (Code.INVALID_ARGUMENT, "swap_path is /tmp", {"swap_path": "/tmp"}),
            (Code.INVALID_ARGUMENT, "trace_path is empty", {"trace_path": ""}),
            (Code.INVALID_ARGUMENT, "journal_path is empty", {"journal_path": b""}),
            (Code.INVALID_ARGUMENT, "ageing_ms is -1", {"ageing_ms": -1}),
        ]:
            with self.subTest(options):
                for call in (Engine, pagedllm.plan):
                    self.assertRefused(code, message, call, **{"model_path": MODEL, **SMALL, **options})
        for options in ({"trace_path": "/nowhere/trace"}, {"journal_path": "/nowhere/journal"},
                        {"swap_path": "/nowhere", "swap_bytes": 1 << 20, "preemption": Preemption.SWAP}):
            self.assertRefused(Code.IO, "/nowhere", open_engine, **options)
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
            (Code.INVALID_ARGUMENT, "n is -1", "Hello", {}, {"n": -1}),
            (Code.INVALID_ARGUMENT, "max_seqs is 64", "Hello", {}, {"n": 2**32 - 1}),
            (Code.INVALID_ARGUMENT, "n is 4294967297", "Hello", {}, {"n": 2**32 + 1}),
            (Code.INVALID_ARGUMENT, "best_of is 1 and n is 2", "Hello", {}, {"n": 2, "best_of": 1}),
            (Code.INVALID_ARGUMENT, "width is 1", "Hello", {}, {"beam": Beam(width=1)}),
            (Code.INVALID_ARGUMENT, "width 2", "Hello", {}, {"beam": Beam(width=2), "n": 3}),
            (Code.INVALID_ARGUMENT, "3 groups", "Hello", {}, {"beam": Beam(width=4, groups=3)}),
            (Code.INVALID_ARGUMENT, "length_penalty is NaN", "Hello", {}, {"beam": Beam(length_penalty=math.nan)}),
            (Code.INVALID_ARGUMENT, "early_stopping is 3", "Hello", {}, {"beam": Beam(early_stopping=3)}),
            (Code.INVALID_ARGUMENT, "best_of", "Hello", {}, {"beam": Beam(), "best_of": 2}),
            (Code.INVALID_ARGUMENT, "temperature", "Hello", {"temperature": 0.5}, {"beam": Beam()}),
            (Code.INVALID_ARGUMENT, "truncate_prompt_tokens is -1", "Hello", {}, {"truncate_prompt_tokens": -1}),
            (Code.INVALID_ARGUMENT, "typical_p", "Hello", {"typical_p": 0}, {}),
            (Code.INVALID_ARGUMENT, "top_n_sigma", "Hello", {"top_n_sigma": -1}, {}),
            (Code.INVALID_ARGUMENT, "xtc_probability", "Hello", {"xtc_probability": 2}, {}),
            (Code.INVALID_ARGUMENT, "mirostat", "Hello", {"mirostat_tau": -1}, {}),
            (Code.INVALID_ARGUMENT, "presence_penalty", "Hello", {"presence_penalty": math.inf}, {}),
            (Code.INVALID_ARGUMENT, "repetition_penalty", "Hello", {"repetition_penalty": 0}, {}),
            (Code.INVALID_ARGUMENT, "no_repeat_ngram_size is -1", "Hello", {"no_repeat_ngram_size": -1}, {}),
            (Code.INVALID_ARGUMENT, "top_logprobs is -1", "Hello", {"top_logprobs": -1}, {}),
            (Code.INVALID_ARGUMENT, "5000", "Hello", {"top_logprobs": 5000}, {}),
            (Code.INVALID_ARGUMENT, "flags lacks", "Hello", {"logprobs": False, "top_logprobs": 2}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"logit_bias": {1024: 1.0}}, {}),
            (Code.INVALID_ARGUMENT, "token is -1", "Hello", {"logit_bias": {-1: 1.0}}, {}),
            (Code.INVALID_ARGUMENT, "NaN", "Hello", {"logit_bias": {5: math.nan}}, {}),
            (Code.INVALID_ARGUMENT, "a bad word", "Hello", {"bad_words": ["good", b"\xff"]}, {}),
            (Code.INVALID_ARGUMENT, "a bad word is empty", "Hello", {"bad_words_ids": [[]]}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"bad_words_ids": [[1], [2, 1024]]}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"allowed_token_ids": [1024]}, {}),
            (Code.INVALID_ARGUMENT, "dry", "Hello", {"dry": Dry(base=0.5)}, {}),
            (Code.INVALID_ARGUMENT, "sequence breaker", "Hello", {"dry": Dry(sequence_breakers=[""])}, {}),
            (Code.INVALID_ARGUMENT, "output_kind is 3", "Hello", {"output_kind": 3}, {}),
            (Code.INVALID_ARGUMENT, "not valid JSON", "Hello", {"grammar": Grammar.json_schema("{")}, {}),
            (Code.INVALID_ARGUMENT, "nonsense", "Hello", {"grammar": Grammar.json_schema({"type": "nonsense"})}, {}),
            (Code.INVALID_ARGUMENT, "UTF-8", "Hello", {"grammar": Grammar.json_schema(b"\xff")}, {}),
            (Code.INVALID_ARGUMENT, "regular expression", "Hello", {"grammar": Grammar.regex("(")}, {}),
            (Code.INVALID_ARGUMENT, "0 texts", "Hello", {"grammar": Grammar.choice([])}, {}),
            (Code.INVALID_ARGUMENT, "nope", "Hello", {"grammar": Grammar.lark("start: nope")}, {}),
            (Code.INVALID_ARGUMENT, "grammar is NULL", "Hello", {"grammar": Grammar(1)}, {}),
            (Code.INVALID_ARGUMENT, "grammar_kind is 7", "Hello", {"grammar": Grammar(7)}, {}),
            (Code.INVALID_ARGUMENT, "capacity is 0", "Hello", {}, {"capacity": 0}),
            (Code.INVALID_ARGUMENT, "capacity is -1", "Hello", {}, {"capacity": -1}),
            (Code.INVALID_ARGUMENT, "deadline is 0", "Hello", {}, {"deadline": 0}),
            (Code.INVALID_ARGUMENT, "deadline is -0.5", "Hello", {}, {"deadline": -0.5}),
            (Code.INVALID_ARGUMENT, "deadline is nan", "Hello", {}, {"deadline": math.nan}),
            (Code.INVALID_ARGUMENT, "deadline is inf", "Hello", {}, {"deadline": math.inf}),
            (Code.INVALID_ARGUMENT, "deadline_ms is 10000", "Hello", {}, {"deadline": 1e300}),
            (Code.INVALID_ARGUMENT, "priority is 101", "Hello", {}, {"priority": 101}),
            (Code.INVALID_ARGUMENT, "priority is -101", "Hello", {}, {"priority": -101}),
            (Code.INVALID_ARGUMENT, "priority is 2147483648", "Hello", {}, {"priority": 2**31}),
        ]:
            with self.subTest(message):
                self.assertRefused(code, message, self.engine.generate, prompt, Sampling(**sampling), **more)
        self.assertRefused(Code.INVALID_ARGUMENT, "user_data", self.engine.add, "Hello", user_data=2**64)
        with open_engine() as other:
            self.assertRefused(Code.INVALID_ARGUMENT, "queue", self.engine.add, "Hello", queue=other.create_queue(1))
        self.assertIdle()
        self.assertEqual(self.engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])

    def test_calls_on_sequences_are_refused_with_code_and_reason(self):
        engine = self.engine
        calls = (engine.fork, lambda one: engine.append(one, [1]), lambda one: engine.rewind(one, 1), engine.resume, engine.free,
                 engine.sequence_info, engine.unpin, engine.export_sequence,
                 lambda one: engine.resume(one, continue_generation=True), lambda one: asyncio.run(engine.aexport_sequence(one)))
        ended = engine.generate("Hello", Sampling(max_tokens=1)).sequence
        for call in calls:
            for unknown in (0, ended, 4711, 2**64 - 1):
                self.assertRefused(Code.NOT_FOUND, str(unknown), call, unknown)
            self.assertRefused(Code.INVALID_ARGUMENT, "is -1", call, -1)
        kept = engine.generate("Hello", Sampling(max_tokens=3, ignore_eos=True), keep=True)
        self.assertEqual(engine.sequence_info(kept.sequence), SequenceInfo(kept.request, 5, 0, True))
        for code, message, call, *arguments in [
            (Code.INVALID_ARGUMENT, "n is 0", engine.fork, 0),
            (Code.INVALID_ARGUMENT, "n is -1", engine.fork, -1),
            (Code.CAPACITY, "4294967295 children", engine.fork, 2**32 - 1),
            (Code.INVALID_ARGUMENT, "n is 4294967296", engine.fork, 2**32),
            (Code.INVALID_ARGUMENT, "at is -1", lambda one: engine.fork(one, at=-1, queue=engine.queue)),
            (Code.INVALID_ARGUMENT, "cannot fork at 0", lambda one: engine.fork(one, at=0, queue=engine.queue)),
            (Code.INVALID_ARGUMENT, "cannot fork at 6", lambda one: engine.fork(one, at=6, queue=engine.queue)),
            (Code.INVALID_ARGUMENT, "queue has been freed", engine.fork),
            (Code.INVALID_ARGUMENT, "queue has been freed", engine.resume),
            (Code.INVALID_ARGUMENT, "queue has been freed", lambda one: engine.resume(one, continue_generation=True)),
            (Code.INVALID_ARGUMENT, "1024", engine.append, [1024]),
            (Code.INVALID_ARGUMENT, "32 bits", engine.append, [-1]),
            (Code.INVALID_ARGUMENT, "2000 more do not fit", engine.append, [70] * 2000),
            (Code.INVALID_ARGUMENT, "not to 0", engine.rewind, 0),
            (Code.INVALID_ARGUMENT, "not to 6", engine.rewind, 6),
            (Code.INVALID_ARGUMENT, "length is -1", engine.rewind, -1),
            (Code.INVALID_ARGUMENT, "regular expression", engine.generate_resumed, Sampling(grammar=Grammar.regex("("))),
            (Code.INVALID_ARGUMENT, "echo", engine.generate_resumed, Sampling(echo=True)),
        ]:
            with self.subTest(message):
                self.assertRefused(code, message, call, kept.sequence, *arguments)
        stream = engine.stream("Hello", ENDLESS, keep=True)
        running = next(stream).sequence
        self.assertRefused(Code.INVALID_ARGUMENT, "runs already", engine.generate_resumed, running)
        for sequence in (kept.sequence, running):
            engine.free(sequence)
            self.assertRefused(Code.NOT_FOUND, str(sequence), engine.free, sequence)
        self.assertEqual(list(stream)[-1].finish_reason, FinishReason.ABORT)
        for message, prompt, how in [("empty", "", {"add_special": False}), ("9999", [9999], {}), ("UTF-8", b"\xff", {}),
                                     ("3000 tokens", [70] * 3000, {}), ("priority is -1", "x", {"priority": -1}),
                                     ("time_to_live_ms is -1", "x", {"time_to_live_ms": -1})]:
            self.assertRefused(Code.INVALID_ARGUMENT, message, engine.pin, prompt, **how)
        self.assertIdle()
        self.assertEqual(engine.generate(STORY["prompt"], GREEDY, add_special=False).text, STORY["answer"])

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
        for call in (engine.stats, engine.model_info, engine.step, engine.start, engine.stop, own.poll, own.fileno, lambda: engine.queue,
                     lambda: engine.abort(1), lambda: engine.add("x"), lambda: engine.generate("x"), lambda: engine.stream("x"),
                     lambda: engine.astream("x"), lambda: engine.create_queue(1), lambda: engine.tokenize("x"),
                     lambda: engine.detokenize([1]), lambda: engine.render_chat([]), lambda: asyncio.run(engine.agenerate("x")),
                     lambda: engine.fork(1), lambda: engine.append(1, [1]), lambda: engine.rewind(1, 1), lambda: engine.resume(1),
                     lambda: engine.free(1), lambda: engine.sequence_info(1), lambda: engine.generate_resumed(1),
                     lambda: engine.astream_resumed(1), lambda: engine.pin("x"), lambda: engine.unpin(1),
                     lambda: engine.export_sequence(1), lambda: asyncio.run(engine.aexport_sequence(1)),
                     lambda: engine.import_sequence(b"x"), lambda: engine.predict_admission("x"), engine.metrics, lambda: engine.budget):
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
    calls = (engine.stats, engine.step, lambda: engine.generate("x"), lambda: queue.poll(0), lambda: engine.queue.poll(0),
             engine.metrics, lambda: engine.predict_admission("x"), lambda: engine.budget.info())
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where this runs in the background, it may be ignored
    unittest.main()
