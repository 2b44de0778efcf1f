"""Invalid arguments of every call."""

import asyncio
import math
import unittest

from support import ENDLESS, GREEDY, LONG_CASE, MODEL, SMALL, Case, open_engine, threads

import pagedllm
from pagedllm import (
    Beam,
    Code,
    Dry,
    Engine,
    Error,
    FinishReason,
    Grammar,
    Preemption,
    Sampling,
    SequenceInfo,
)


class InvalidArguments(Case):
    def test_invalid_options_are_refused_with_code_and_reason(self):
        for code, message, options in [
            (Code.IO, "does not exist", {"model_path": "/nowhere"}),
            (Code.INVALID_ARGUMENT, "model_path is empty", {"model_path": ""}),
            (Code.INVALID_ARGUMENT, "UTF-8", {"model_path": b"/\xff"}),
            (Code.UNSUPPORTED, '"tpu"', {"device": "tpu"}),
            (Code.UNSUPPORTED, "cuda:99", {"device": "cuda:99"}),
            (Code.UNSUPPORTED, "memory_fraction is 0.5", {"memory_fraction": 0.5}),
            (
                Code.INVALID_ARGUMENT,
                "memory_fraction is 1.5",
                {"device": "cuda", "memory_fraction": 1.5, "kv_bytes": 0},
            ),
            (Code.INVALID_ARGUMENT, "block_size", {"block_size": 7}),
            (Code.CAPACITY, "kv_bytes", {"kv_bytes": 1}),
            (Code.INVALID_ARGUMENT, "threads is -1", {"threads": -1}),
            (
                Code.INVALID_ARGUMENT,
                "threads is 4294967297; must be 0 to 4294967295",
                {"threads": 2**32 + 1},
            ),
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
                    self.assertRefused(
                        code, message, call, **{"model_path": MODEL, **SMALL, **options}
                    )
        for options in (
            {"trace_path": "/nowhere/trace"},
            {"journal_path": "/nowhere/journal"},
            {"swap_path": "/nowhere", "swap_bytes": 1 << 20, "preemption": Preemption.SWAP},
        ):
            self.assertRefused(Code.IO, "/nowhere", open_engine, **options)
        with self.assertRaises(TypeError):
            pagedllm.plan(MODEL, treads=1)

    def test_invalid_requests_are_refused_with_code_and_reason(self):
        for code, message, prompt, sampling, more in [
            (Code.INVALID_ARGUMENT, "the prompt is empty", "", {}, {"add_special": False}),
            (Code.INVALID_ARGUMENT, "the prompt is empty", [], {}, {}),
            (Code.INVALID_ARGUMENT, "5000 tokens", [70] * 5000, {}, {}),
            (Code.INVALID_ARGUMENT, "not UTF-8: byte 2", b"ab\xff", {}, {}),
            (Code.INVALID_ARGUMENT, "not UTF-8: byte 1", "a\ud800", {}, {}),
            (Code.INVALID_ARGUMENT, "70000, beyond the vocabulary of 1024", [70000], {}, {}),
            (
                Code.INVALID_ARGUMENT,
                "a token id of prompt_token_ids does not fit into 32 bits",
                [2**32],
                {},
                {},
            ),
            (Code.INVALID_ARGUMENT, "32 bits", [-1], {}, {}),
            (Code.INVALID_ARGUMENT, "temperature is NaN", "Hello", {"temperature": math.nan}, {}),
            (Code.INVALID_ARGUMENT, "temperature", "Hello", {"temperature": 1e300}, {}),
            (Code.INVALID_ARGUMENT, "top_p", "Hello", {"top_p": -0.5}, {}),
            (Code.INVALID_ARGUMENT, "max_tokens is 4294967296", "Hello", {"max_tokens": 2**32}, {}),
            (Code.INVALID_ARGUMENT, "top_k is -1", "Hello", {"top_k": -1}, {}),
            (Code.INVALID_ARGUMENT, "seed is -1", "Hello", {"seed": -1}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"stop_token_ids": [1024]}, {}),
            (Code.INVALID_ARGUMENT, "stop", "Hello", {"stop": [b"\xff"]}, {}),
            (Code.INVALID_ARGUMENT, "stop is too large (16385 bytes in all, at most 16384)", "Hello", {"stop": ["x" * 16385]}, {}),
            (Code.INVALID_ARGUMENT, "n is 0", "Hello", {}, {"n": 0}),
            (Code.INVALID_ARGUMENT, "n is -1", "Hello", {}, {"n": -1}),
            (Code.INVALID_ARGUMENT, "max_seqs is 64", "Hello", {}, {"n": 2**32 - 1}),
            (Code.INVALID_ARGUMENT, "n is 4294967297", "Hello", {}, {"n": 2**32 + 1}),
            (Code.INVALID_ARGUMENT, "best_of is 1 and n is 2", "Hello", {}, {"n": 2, "best_of": 1}),
            (Code.INVALID_ARGUMENT, "width of pllm_beam is 1", "Hello", {}, {"beam": Beam(width=1)}),
            (Code.INVALID_ARGUMENT, "width of pllm_beam is 2", "Hello", {}, {"beam": Beam(width=2), "n": 3}),
            (Code.INVALID_ARGUMENT, "groups of pllm_beam is 3", "Hello", {}, {"beam": Beam(width=4, groups=3)}),
            (
                Code.INVALID_ARGUMENT,
                "length_penalty is NaN",
                "Hello",
                {},
                {"beam": Beam(length_penalty=math.nan)},
            ),
            (
                Code.INVALID_ARGUMENT,
                "early_stopping is 3",
                "Hello",
                {},
                {"beam": Beam(early_stopping=3)},
            ),
            (Code.INVALID_ARGUMENT, "best_of", "Hello", {}, {"beam": Beam(), "best_of": 2}),
            (Code.INVALID_ARGUMENT, "temperature", "Hello", {"temperature": 0.5}, {"beam": Beam()}),
            (
                Code.INVALID_ARGUMENT,
                "truncate_prompt_tokens is -1",
                "Hello",
                {},
                {"truncate_prompt_tokens": -1},
            ),
            (Code.INVALID_ARGUMENT, "typical_p", "Hello", {"typical_p": 0}, {}),
            (Code.INVALID_ARGUMENT, "top_n_sigma", "Hello", {"top_n_sigma": -1}, {}),
            (Code.INVALID_ARGUMENT, "xtc_probability", "Hello", {"xtc_probability": 2}, {}),
            (Code.INVALID_ARGUMENT, "mirostat", "Hello", {"mirostat_tau": -1}, {}),
            (
                Code.INVALID_ARGUMENT,
                "presence_penalty",
                "Hello",
                {"presence_penalty": math.inf},
                {},
            ),
            (Code.INVALID_ARGUMENT, "repetition_penalty", "Hello", {"repetition_penalty": 0}, {}),
            (
                Code.INVALID_ARGUMENT,
                "no_repeat_ngram_size is -1",
                "Hello",
                {"no_repeat_ngram_size": -1},
                {},
            ),
            (Code.INVALID_ARGUMENT, "top_logprobs is -1", "Hello", {"top_logprobs": -1}, {}),
            (Code.INVALID_ARGUMENT, "5000", "Hello", {"top_logprobs": 5000}, {}),
            (
                Code.INVALID_ARGUMENT,
                "flags has no",
                "Hello",
                {"logprobs": False, "top_logprobs": 2},
                {},
            ),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"logit_bias": {1024: 1.0}}, {}),
            (
                Code.INVALID_ARGUMENT,
                "a token id of logit_bias is -1;",
                "Hello",
                {"logit_bias": {-1: 1.0}},
                {},
            ),
            (Code.INVALID_ARGUMENT, "NaN", "Hello", {"logit_bias": {5: math.nan}}, {}),
            (Code.INVALID_ARGUMENT, "a bad word", "Hello", {"bad_words": ["good", b"\xff"]}, {}),
            (Code.INVALID_ARGUMENT, "an entry of bad_words_ids is empty", "Hello", {"bad_words_ids": [[]]}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"bad_words_ids": [[1], [2, 1024]]}, {}),
            (Code.INVALID_ARGUMENT, "1024", "Hello", {"allowed_token_ids": [1024]}, {}),
            (Code.INVALID_ARGUMENT, "dry", "Hello", {"dry": Dry(base=0.5)}, {}),
            (
                Code.INVALID_ARGUMENT,
                "sequence breaker",
                "Hello",
                {"dry": Dry(sequence_breakers=[""])},
                {},
            ),
            (Code.INVALID_ARGUMENT, "output_kind is 3", "Hello", {"output_kind": 3}, {}),
            (
                Code.INVALID_ARGUMENT,
                "not valid JSON",
                "Hello",
                {"grammar": Grammar.json_schema("{")},
                {},
            ),
            (
                Code.INVALID_ARGUMENT,
                "nonsense",
                "Hello",
                {"grammar": Grammar.json_schema({"type": "nonsense"})},
                {},
            ),
            (
                Code.INVALID_ARGUMENT,
                "UTF-8",
                "Hello",
                {"grammar": Grammar.json_schema(b"\xff")},
                {},
            ),
            (
                Code.INVALID_ARGUMENT,
                "regular expression",
                "Hello",
                {"grammar": Grammar.regex("(")},
                {},
            ),
            (Code.INVALID_ARGUMENT, "choices is empty", "Hello", {"grammar": Grammar.choice([])}, {}),
            (Code.INVALID_ARGUMENT, "nope", "Hello", {"grammar": Grammar.lark("start: nope")}, {}),
            (Code.INVALID_ARGUMENT, "grammar is NULL", "Hello", {"grammar": Grammar(1)}, {}),
            (Code.INVALID_ARGUMENT, "grammar_kind is 7", "Hello", {"grammar": Grammar(7)}, {}),
            (Code.INVALID_ARGUMENT, "capacity is 0", "Hello", {}, {"capacity": 0}),
            (Code.INVALID_ARGUMENT, "capacity is -1", "Hello", {}, {"capacity": -1}),
            (Code.INVALID_ARGUMENT, "deadline is 0", "Hello", {}, {"deadline": 0}),
            (Code.INVALID_ARGUMENT, "deadline is -0.5", "Hello", {}, {"deadline": -0.5}),
            (Code.INVALID_ARGUMENT, "deadline is nan", "Hello", {}, {"deadline": math.nan}),
            (Code.INVALID_ARGUMENT, "deadline is inf", "Hello", {}, {"deadline": math.inf}),
            (Code.INVALID_ARGUMENT, "deadline is 1e+300;", "Hello", {}, {"deadline": 1e300}),
            (Code.INVALID_ARGUMENT, "priority is 101", "Hello", {}, {"priority": 101}),
            (Code.INVALID_ARGUMENT, "priority is -101", "Hello", {}, {"priority": -101}),
            (Code.INVALID_ARGUMENT, "priority is 2147483648", "Hello", {}, {"priority": 2**31}),
        ]:
            with self.subTest(message):
                self.assertRefused(
                    code, message, self.engine.generate, prompt, Sampling(**sampling), **more
                )
        self.assertRefused(
            Code.INVALID_ARGUMENT, "user_data", self.engine.add, "Hello", user_data=2**64
        )
        with open_engine() as other:
            self.assertRefused(
                Code.INVALID_ARGUMENT,
                "queue",
                self.engine.add,
                "Hello",
                queue=other.create_queue(1),
            )
        self.assertIdle()
        self.assertEqual(
            self.engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
            LONG_CASE["answer"],
        )

    def test_the_error_for_a_long_prompt_has_its_length_and_the_limit(self):
        prompt, limit = [70] * 5000, self.engine.model_info().max_model_len
        for call in (
            self.engine.generate,
            self.engine.add,
            self.engine.predict_admission,
            self.engine.pin,
            lambda one: asyncio.run(self.engine.agenerate(one)),
        ):
            with self.assertRaises(Error) as caught:
                call(prompt)
            error = caught.exception
            self.assertEqual(
                (error.code, error.prompt_tokens, error.max_model_len),
                (Code.INVALID_ARGUMENT, 5000, limit),
            )
        with self.assertRaises(Error) as caught:
            self.engine.generate("Hello", Sampling(top_k=-1))
        self.assertEqual(
            (caught.exception.prompt_tokens, caught.exception.max_model_len), (None, None)
        )
        with self.assertRaises(Error) as caught:
            self.engine.abort(4711)
        self.assertEqual(
            (caught.exception.prompt_tokens, caught.exception.max_model_len), (None, None)
        )

    def test_invalid_sequence_calls_are_refused_with_code_and_reason(self):
        engine = self.engine
        calls = (
            engine.fork,
            lambda one: engine.append(one, [1]),
            lambda one: engine.rewind(one, 1),
            engine.resume,
            engine.free,
            engine.sequence_info,
            engine.unpin,
            engine.export_sequence,
            lambda one: engine.resume(one, continue_generation=True),
            lambda one: asyncio.run(engine.aexport_sequence(one)),
        )
        ended = engine.generate("Hello", Sampling(max_tokens=1)).sequence
        for call in calls:
            for unknown in (0, ended, 4711, 2**64 - 1):
                self.assertRefused(Code.NOT_FOUND, str(unknown), call, unknown)
            self.assertRefused(Code.INVALID_ARGUMENT, "is -1", call, -1)
        kept = engine.generate("Hello", Sampling(max_tokens=3, ignore_eos=True), keep=True)
        self.assertEqual(
            engine.sequence_info(kept.sequence), SequenceInfo(kept.request, 5, 0, True)
        )
        for code, message, call, *arguments in [
            (Code.INVALID_ARGUMENT, "n is 0", engine.fork, 0),
            (Code.INVALID_ARGUMENT, "n is -1", engine.fork, -1),
            (Code.CAPACITY, "too many children (4294967295", engine.fork, 2**32 - 1),
            (Code.INVALID_ARGUMENT, "n is 4294967296", engine.fork, 2**32),
            (
                Code.INVALID_ARGUMENT,
                "at is -1",
                lambda one: engine.fork(one, at=-1, queue=engine.queue),
            ),
            (
                Code.INVALID_ARGUMENT,
                "cannot be forked at 0",
                lambda one: engine.fork(one, at=0, queue=engine.queue),
            ),
            (
                Code.INVALID_ARGUMENT,
                "cannot be forked at 6",
                lambda one: engine.fork(one, at=6, queue=engine.queue),
            ),
            (Code.INVALID_ARGUMENT, "queue has been freed", engine.fork),
            (Code.INVALID_ARGUMENT, "queue has been freed", engine.resume),
            (
                Code.INVALID_ARGUMENT,
                "queue has been freed",
                lambda one: engine.resume(one, continue_generation=True),
            ),
            (Code.INVALID_ARGUMENT, "1024", engine.append, [1024]),
            (Code.INVALID_ARGUMENT, "32 bits", engine.append, [-1]),
            (Code.INVALID_ARGUMENT, "2000 more do not fit", engine.append, [70] * 2000),
            (Code.INVALID_ARGUMENT, "rewound to 0 tokens", engine.rewind, 0),
            (Code.INVALID_ARGUMENT, "rewound to 6 tokens", engine.rewind, 6),
            (Code.INVALID_ARGUMENT, "length is -1", engine.rewind, -1),
            (
                Code.INVALID_ARGUMENT,
                "regular expression",
                engine.generate_resumed,
                Sampling(grammar=Grammar.regex("(")),
            ),
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
        for message, prompt, how in [
            ("empty", "", {"add_special": False}),
            ("9999", [9999], {}),
            ("UTF-8", b"\xff", {}),
            ("3000 tokens", [70] * 3000, {}),
            ("priority is -1", "x", {"priority": -1}),
            ("time_to_live_ms is -1", "x", {"time_to_live_ms": -1}),
        ]:
            self.assertRefused(Code.INVALID_ARGUMENT, message, engine.pin, prompt, **how)
        self.assertIdle()
        self.assertEqual(
            engine.generate(LONG_CASE["prompt"], GREEDY, add_special=False).text,
            LONG_CASE["answer"],
        )

    def test_other_calls_refuse_invalid_arguments(self):
        self.assertRefused(Code.NOT_FOUND, "4711", self.engine.abort, 4711)
        self.assertRefused(Code.INVALID_ARGUMENT, "request is -1", self.engine.abort, -1)
        self.assertRefused(Code.INVALID_ARGUMENT, "1024", self.engine.detokenize, [1024])
        for token in (1024, 2**32 - 1):
            message = f"token {token} is beyond the vocabulary of 1024"
            self.assertRefused(Code.INVALID_ARGUMENT, message, self.engine.token_bytes, token)
        for token in (-1, 2**32, 2**64):
            message = f"token is {token}; must be 0 to 4294967295"
            self.assertRefused(Code.INVALID_ARGUMENT, message, self.engine.token_bytes, token)
        for token in (None, "x", 1.0):
            with self.assertRaises(TypeError):
                self.engine.token_bytes(token)
        self.assertRefused(Code.INVALID_ARGUMENT, "UTF-8", self.engine.tokenize, b"\xff")
        self.assertRefused(Code.INVALID_ARGUMENT, "", self.engine.render_chat, 7)
        with open_engine(skip_tokenizer=True) as tokens_only:
            self.assertRefused(Code.UNSUPPORTED, "", tokens_only.tokenize, "Hello")
            self.assertRefused(Code.UNSUPPORTED, "tokenizer", tokens_only.token_bytes, 1)
            self.assertEqual(
                tokens_only.generate([70], Sampling(temperature=0, max_tokens=2)).text, ""
            )
        for arguments in ((1.5,), (None,), ("Hello", 7)):
            with self.assertRaises((TypeError, AttributeError)):
                self.engine.generate(*arguments)
        self.assertIdle()


if __name__ == "__main__":
    unittest.main()
