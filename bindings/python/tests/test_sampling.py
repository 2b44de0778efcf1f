"""Sampling parameters, structured output, several results, logits hooks."""

import array
import asyncio
import collections
import dataclasses
import gc
import json
import math
import subprocess
import sys
import unittest

from support import (
    ENDLESS,
    EXPECTED,
    GREEDY,
    LONG_CASE,
    MODEL,
    MODULE,
    Case,
    descriptors,
    open_engine,
    threads,
)

import pagedllm
from pagedllm import Beam, Code, Dry, Error, FinishReason, Grammar, OutputKind, Sampling


class SamplingParameters(Case):
    """Sampling parameters, one at a time."""

    def ask(self, prompt=LONG_CASE["prompt"], **sampling):
        given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **sampling}
        return self.engine.generate(prompt, Sampling(**given), add_special=False)

    def test_allowed_tokens_and_bad_words_restrict_the_choice(self):
        self.assertLessEqual(set(self.ask(allowed_token_ids=[70, 71, 72]).tokens), {70, 71, 72})
        plain = self.ask()
        self.assertIn("time", plain.text)
        self.assertNotIn("time", self.ask(bad_words=["time", " time"]).text)
        self.assertNotIn(
            plain.tokens[3], self.ask(bad_words_ids=[[1, 2], plain.tokens[3:4]]).tokens
        )

    def test_logit_bias_changes_the_choice(self):
        self.assertEqual(self.ask(logit_bias={70: 100.0}).tokens, [70] * 12)
        first = self.ask().tokens[0]
        self.assertNotIn(first, self.ask(logit_bias={first: -100.0, 70: 0.0}).tokens)

    def test_penalties_reduce_repetition(self):
        def repeats(**sampling):
            tokens = self.ask(logit_bias={70: 90.0}, **sampling).tokens
            return tokens.count(70)

        self.assertEqual(repeats(), 12)
        self.assertEqual(repeats(no_repeat_ngram_size=1), 1)
        for penalty in (
            {"repetition_penalty": 100.0},
            {"dry": Dry(multiplier=100.0, base=4.0, allowed_length=1)},
        ):
            with self.subTest(penalty):
                self.assertLess(repeats(**penalty), 12)
        self.assertEqual(
            repeats(dry=Dry(multiplier=0.0, penalty_last_n=3, sequence_breakers=["x", "y"])), 12
        )
        (colon,) = self.engine.tokenize(":", add_special=False)
        for breakers, punished in ((None, False), ([], True), (["?"], True), (["?", ":"], False)):
            with self.subTest(breakers):
                dry = Dry(multiplier=100.0, base=4.0, allowed_length=1, sequence_breakers=breakers)
                tokens = self.ask(logit_bias={colon: 90.0}, dry=dry).tokens
                self.assertEqual(tokens.count(colon) < 12, punished)
        once = self.ask(
            allowed_token_ids=[70, 71],
            logit_bias={70: 1.0, 71: 0.5},
            presence_penalty=2.0,
            frequency_penalty=2.0,
        )
        self.assertEqual(set(once.tokens), {70, 71})

    def test_tight_truncation_leaves_only_the_greedy_token(self):
        greedy = self.ask().tokens
        for cut in (
            {"top_n_sigma": 0.001},
            {"mirostat_tau": 0.0001, "mirostat_eta": 1.0},
            {"top_k": 1},
        ):
            with self.subTest(cut):
                self.assertEqual(self.ask(temperature=1, seed=1, **cut).tokens, greedy)
        typical = [self.ask(temperature=1, seed=seed, typical_p=0.0001).tokens for seed in range(3)]
        self.assertEqual(typical, typical[:1] * 3)
        without = self.ask(temperature=1, seed=1, xtc_probability=1.0, xtc_threshold=0.0001).tokens
        self.assertNotEqual(without, greedy)

    def test_log_probabilities_have_one_entry_per_token(self):
        prompt = self.engine.tokenize(LONG_CASE["prompt"])
        answer = self.ask(max_tokens=5, top_logprobs=3, prompt_top_logprobs=2)
        self.assertEqual((len(answer.logprobs), len(answer.top_logprobs)), (5, 5))
        self.assertEqual(
            (len(answer.prompt_logprobs), len(answer.prompt_top_logprobs)),
            (len(prompt) - 1, len(prompt) - 1),
        )
        for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.top_logprobs):
            self.assertEqual(top[0], (token, logprob))  # greedy
            self.assertEqual(
                [one.logprob for one in top], sorted((one.logprob for one in top), reverse=True)
            )
            self.assertEqual(len(top), 3)
        self.assertEqual({len(top) for top in answer.prompt_top_logprobs}, {2})
        self.assertTrue(
            all(
                own <= top[0].logprob
                for own, top in zip(answer.prompt_logprobs, answer.prompt_top_logprobs)
            )
        )
        self.assertAlmostEqual(answer.score, sum(answer.logprobs), places=6)
        plain = self.ask(max_tokens=5, logprobs=True, prompt_logprobs=True)
        self.assertEqual(
            (plain.logprobs, plain.prompt_logprobs), (answer.logprobs, answer.prompt_logprobs)
        )
        self.assertIsNone(plain.top_logprobs)
        self.assertIsNone(plain.prompt_top_logprobs)

    def test_echoed_tokens_have_log_probabilities_except_the_first(self):
        prompt = self.engine.tokenize(LONG_CASE["prompt"])
        known = self.ask(max_tokens=3, logprobs=True, prompt_logprobs=True)
        echoed = self.ask(max_tokens=3, logprobs=True, echo=True)
        self.assertEqual(echoed.tokens, prompt + known.tokens)
        self.assertEqual(len(echoed.logprobs), len(echoed.tokens))
        self.assertTrue(math.isnan(echoed.logprobs[0]), echoed.logprobs[0])
        self.assertEqual(echoed.logprobs[1:], known.prompt_logprobs + known.logprobs)

    def test_a_prompt_is_scored_without_a_generated_token(self):
        known = self.ask(max_tokens=3, prompt_logprobs=True)
        for start in (0, 5):
            scored = self.ask(max_tokens=0, prompt_logprobs=True, prompt_logprobs_start=start)
            self.assertEqual(scored.finish_reason, FinishReason.LENGTH)
            self.assertEqual((scored.tokens, scored.text), ([], ""))
            self.assertEqual(scored.prompt_logprobs, known.prompt_logprobs[max(start, 1) - 1 :])

    def test_echo_puts_the_prompt_before_the_answer(self):
        known = EXPECTED[0]
        answer = self.engine.generate("Hello", Sampling(temperature=0, max_tokens=3, echo=True))
        alone = self.engine.generate("Hello", Sampling(temperature=0, max_tokens=3))
        self.assertEqual(answer.text, "Hello" + alone.text)
        self.assertEqual(
            answer.tokens, self.engine.tokenize("Hello", add_special=True) + alone.tokens
        )
        shown = self.engine.generate(
            known["prompt"],
            Sampling(temperature=0, include_stop=True, echo=True),
            add_special=False,
            skip_special=False,
        )
        self.assertTrue(
            shown.text.startswith(known["prompt"] + known["answer"] + "<|end|>"), shown.text
        )

    def test_include_stop_keeps_the_stop_string_in_the_text(self):
        whole = LONG_CASE["answer"]
        self.assertEqual(
            self.ask(max_tokens=60, stop="village", include_stop=True).text,
            whole[: whole.index("village") + 7],
        )

    def test_output_kind_selects_delta_cumulative_or_final_outputs(self):
        def outputs(kind):
            sampling = Sampling(
                temperature=0, max_tokens=6, top_logprobs=1, prompt_logprobs=True, output_kind=kind
            )
            return (
                list(self.engine.stream(LONG_CASE["prompt"], sampling, add_special=False)),
                sampling,
            )

        deltas, plain = outputs(OutputKind.DELTA)
        cumulative, _ = outputs(OutputKind.CUMULATIVE)
        final, _ = outputs(OutputKind.FINAL)
        tokens = LONG_CASE["token_ids"][:6]
        self.assertEqual(
            [output.tokens for output in deltas if output.tokens], [[token] for token in tokens]
        )
        self.assertEqual(
            [output.tokens for output in cumulative if output.tokens],
            [tokens[: i + 1] for i in range(6)],
        )
        self.assertEqual(
            [(output.tokens, output.finish_reason) for output in final],
            [(tokens, FinishReason.LENGTH)],
        )
        self.assertEqual(cumulative[-1].text, final[0].text)
        self.assertEqual(len(cumulative[-1].top_logprobs), 6)
        whole = [
            self.ask(max_tokens=6, top_logprobs=1, prompt_logprobs=True, output_kind=kind)
            for kind in OutputKind
        ]
        for name in ("text", "tokens", "logprobs", "top_logprobs", "prompt_logprobs", "score"):
            self.assertEqual(*(getattr(answer, name) for answer in whole[:2]), name)
            self.assertEqual(*(getattr(answer, name) for answer in whole[1:]), name)

    def test_truncate_prompt_tokens_keeps_the_last_tokens(self):
        tokens = self.engine.tokenize(LONG_CASE["prompt"])
        cut = self.engine.generate(
            LONG_CASE["prompt"], GREEDY, truncate_prompt_tokens=4, add_special=False
        )
        self.assertEqual(cut.prompt_tokens, 4)
        self.assertEqual(cut.tokens, self.engine.generate(tokens[-4:], GREEDY).tokens)


class StructuredOutput(Case):
    def ask(self, grammar, **sampling):
        given = {"temperature": 0, "max_tokens": 100, "grammar": grammar, **sampling}
        return self.engine.generate("Give JSON for Anna, 31, Paris.", Sampling(**given))

    def test_json_output_conforms_to_its_schema(self):
        schema = {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "age", "home"],
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "home": {"enum": ["Paris", "Rome"]},
            },
        }
        for given in (schema, json.dumps(schema), json.dumps(schema).encode()):
            answer = self.ask(Grammar.json_schema(given))
            person = json.loads(answer.text)
            self.assertEqual(
                (list(person), answer.finish_reason), (["name", "age", "home"], FinishReason.STOP)
            )
            self.assertTrue(
                0 <= person["age"] <= 120 and person["home"] in ("Paris", "Rome"), person
            )
        for seed in range(5):
            json.loads(self.ask(Grammar.json_schema(schema), temperature=1.5, seed=seed).text)

    def test_json_object_accepts_any_object(self):
        self.assertIsInstance(json.loads(self.ask(Grammar.json_object()).text), dict)

    def test_output_matches_regex_choice_and_lark_grammars(self):
        for seed in range(5):
            drawn = {"temperature": 1.5, "seed": seed}
            self.assertRegex(
                self.ask(Grammar.regex("[0-9]{3}-[a-c]x"), **drawn).text, r"\A[0-9]{3}-[a-c]x\Z"
            )
            self.assertIn(
                self.ask(Grammar.choice(["cow", "a dog", "été".encode()]), **drawn).text,
                ("cow", "a dog", "été"),
            )
            self.assertRegex(
                self.ask(Grammar.lark('start: "a" NUMBER\nNUMBER: /[0-9]{2}/'), **drawn).text,
                r"\Aa[0-9]{2}\Z",
            )

    def test_forks_inherit_the_grammar_state_of_their_parent(self):
        with open_engine(host_steps=True) as engine:
            digits = Sampling(temperature=1, seed=1, grammar=Grammar.regex("[0-9]{12}"))
            parent = engine.add("Count from 1 to 10.", digits)
            for _ in range(4):
                engine.step()
            prefix = "".join(output.text for output in engine.queue.poll(0))
            children = engine.fork(parent, 3, seed=5)
            texts = collections.defaultdict(str, {child: prefix for child in children})
            while engine.step().unfinished:
                pass
            for output in engine.queue.poll(0):
                texts[output.sequence] += output.text
            for child in children:
                self.assertRegex(texts[child], r"\A[0-9]{12}\Z")


class SeveralResults(Case):
    """Several results of one prompt."""

    DRAWN = Sampling(temperature=1.5, seed=3, max_tokens=8, ignore_eos=True, logprobs=True)

    def test_each_sample_has_an_index_and_a_finish_reason(self):
        outputs = list(self.engine.stream("Hello", self.DRAWN, n=3))
        self.assertEqual(
            sorted(output.index for output in outputs if output.finish_reason), [0, 1, 2]
        )
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
        self.assertEqual(
            samples,
            [
                dataclasses.replace(
                    sample, request=samples[0].request, sequence=samples[0].request + i
                )
                for i, sample in enumerate(
                    asyncio.run(self.engine.agenerate_all("Hello", self.DRAWN, n=3))
                )
            ],
        )
        self.assertIdle()

    def test_samples_share_the_computed_prompt(self):
        before = self.engine.stats().prompt_tokens
        self.engine.generate_all(LONG_CASE["prompt"], self.DRAWN, n=8, add_special=False)
        self.assertEqual(
            self.engine.stats().prompt_tokens - before,
            len(self.engine.tokenize(LONG_CASE["prompt"])),
        )

    def test_best_of_returns_the_samples_with_the_highest_scores(self):
        drawn = self.engine.generate_all("Hello", self.DRAWN, n=5)
        best = self.engine.generate_all("Hello", self.DRAWN, n=2, best_of=5)
        self.assertEqual([one.index for one in best], [0, 1])
        self.assertEqual(
            [one.tokens for one in best],
            [one.tokens for one in sorted(drawn, key=lambda one: -one.score)[:2]],
        )
        self.assertGreaterEqual(best[0].score, best[1].score)

    def test_beams_are_sorted_by_score(self):
        search = Sampling(max_tokens=10)
        beams = self.engine.generate_all("Hello", search, n=3, beam=Beam(width=4))
        self.assertEqual([beam.index for beam in beams], [0, 1, 2])
        scores = [beam.score for beam in beams]
        self.assertEqual(scores, sorted(scores, reverse=True))
        self.assertEqual(len({tuple(beam.tokens) for beam in beams}), 3)
        greedy = self.engine.generate(
            "Hello", Sampling(temperature=0, max_tokens=10, logprobs=True)
        )
        self.assertGreaterEqual(scores[0], greedy.score / len(greedy.tokens) - 1e-5)
        for how in (
            Beam(width=4, groups=2, diversity_penalty=1.0),
            Beam(width=2, length_penalty=0.0),
            *(Beam(early_stopping=early) for early in pagedllm.EarlyStopping),
        ):
            self.assertEqual(self.engine.generate("Hello", search, beam=how).index, 0)
        self.assertIdle()

    def test_beam_search_can_return_every_beam(self):
        alone = self.engine.generate("Hello", Sampling(max_tokens=4), beam=Beam(width=2))
        both = self.engine.generate_all("Hello", Sampling(max_tokens=4), n=2, beam=Beam(width=2))
        self.assertEqual(both[0].tokens, alone.tokens)

    def test_echo_applies_to_every_sample(self):
        for sample in self.engine.generate_all(
            "Hello", dataclasses.replace(self.DRAWN, echo=True), n=3
        ):
            self.assertTrue(sample.text.startswith("Hello"), sample.text)

    def test_beams_that_are_not_returned_are_freed(self):
        request = self.engine.generate("Hello", Sampling(max_tokens=4), beam=Beam(width=4)).request
        self.assertIdle()
        for sequence in range(request, request + 4):
            self.assertRefused(Code.NOT_FOUND, "unknown", self.engine.sequence_info, sequence)

    def test_a_single_beam_cannot_be_freed(self):
        with open_engine(host_steps=True) as engine:
            request = engine.add("Hello", Sampling(max_tokens=4), beam=Beam(width=2))
            engine.step()
            self.assertRefused(Code.NOT_FOUND, "unknown", engine.free, request + 1)

    def test_a_complete_grammar_ends_the_sequence_despite_ignore_eos(self):
        digits = Sampling(
            temperature=0, max_tokens=9, ignore_eos=True, grammar=Grammar.regex("[0-9]{2}")
        )
        self.assertRegex(self.engine.generate("Hello", digits).text, r"\A[0-9]{2}\Z")

    def test_samples_aborted_before_the_first_step_are_all_kept_or_all_freed(self):
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

    def test_closing_a_stream_of_samples_aborts_every_sample(self):
        stream = self.engine.stream("Hello", ENDLESS, n=4)
        next(stream)
        stream.close()
        self.assertIdle()
        stream = self.engine.stream("Hello", ENDLESS, n=4)
        self.engine.abort(next(stream).request)
        ends = [output for output in stream if output.finish_reason]
        self.assertEqual(
            {(output.index, output.finish_reason) for output in ends},
            {(i, FinishReason.ABORT) for i in range(4)},
        )


class LogitsHooks(Case):
    def ask(self, hook, **more):
        return self.engine.generate(
            "Hello", Sampling(temperature=0, max_tokens=3), logits_hook=hook, **more
        )

    def test_a_hook_reads_tokens_and_edits_logits(self):
        calls = []

        def choose_the_next_letter(sequence, tokens, logits):
            calls.append((sequence, list(tokens), len(logits)))
            logits[70 + len(calls)] = 1000.0

        answer = self.ask(choose_the_next_letter)
        prompt = self.engine.tokenize("Hello", add_special=True)
        self.assertEqual(answer.tokens, [71, 72, 73])
        self.assertEqual(
            calls, [(answer.sequence, prompt + answer.tokens[:i], 1024) for i in range(3)]
        )

    def test_forks_inherit_the_hook_and_resume_sets_a_new_hook(self):
        with open_engine(host_steps=True) as engine:

            def always(token):
                def hook(sequence, tokens, logits):
                    logits[token] = 1000.0

                return hook

            parent = engine.add("Hello", Sampling(max_tokens=4), keep=True, logits_hook=always(70))
            engine.step()
            (child,) = engine.fork(parent)
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

    def test_an_exception_in_a_hook_is_reported_and_the_request_continues(self):
        reported = []
        before, sys.unraisablehook = sys.unraisablehook, lambda what: reported.append(
            str(what.exc_value)
        )
        self.addCleanup(setattr, sys, "unraisablehook", before)

        def fail(sequence, tokens, logits):
            raise LookupError("no such token")

        self.assertEqual(self.ask(fail).tokens, self.ask(None).tokens)
        self.assertEqual(reported, ["no such token"] * 3)

    def test_views_of_a_hook_are_invalid_after_the_call(self):
        kept = []
        self.ask(lambda sequence, tokens, logits: kept.extend((tokens, logits)))
        for view in kept:
            with self.assertRaises(ValueError):
                view[0]

    def test_the_tokens_of_a_hook_are_read_only(self):
        raised = []

        def change(sequence, tokens, logits):
            try:
                tokens[0] = 1
            except TypeError as error:
                raised.append(error)

        self.ask(change)
        self.assertEqual(len(raised), 3)

    def test_non_finite_logits_end_only_their_request(self):
        def fill(value):
            def hook(sequence, tokens, logits):
                logits[:] = array.array("f", [value] * len(logits))

            return hook

        for value in (math.nan, math.inf, -math.inf):
            with self.assertRaises(Error):
                self.ask(fill(value))
        self.assertIdle()
        self.assertEqual(
            self.engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
            LONG_CASE["answer"],
        )

    def test_a_hook_can_call_the_thread_safe_methods(self):
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

    def test_a_hook_can_close_the_engine(self):
        self.assertRefused(
            Code.CLOSED,
            "",
            self.engine.generate,
            "Hello",
            ENDLESS,
            logits_hook=lambda *_: self.engine.close(),
        )
        with open_engine(host_steps=True) as engine:
            engine.add("Hello", logits_hook=lambda *_: engine.close())
            self.assertEqual(engine.step().sequences, 1)
            self.assertRefused(Code.CLOSED, "closed", engine.step)

    def test_an_unreachable_engine_with_a_hook_is_freed(self):
        def forget():
            engine = open_engine()
            next(engine.stream("Hello", ENDLESS, logits_hook=lambda *_: engine.model_info()))

        before = descriptors()
        forget()
        self.assertEventually(
            lambda: gc.collect() >= 0 and descriptors() <= before, "the engine is freed"
        )

    def test_a_process_can_exit_during_a_hook(self):
        program = (
            "import pagedllm\n"
            f"engine = pagedllm.Engine({str(MODEL)!r}, threads=1, kv_bytes=16 << 20)\n"
            "stream = engine.stream('Hello', pagedllm.Sampling(ignore_eos=True), logits_hook=lambda *_: None)\n"
            "next(stream)\n"
            "print('alive')"
        )
        for _ in range(5):
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=MODULE,
                capture_output=True,
                text=True,
                timeout=600,
            )
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "alive\n", ""))


if __name__ == "__main__":
    unittest.main()
