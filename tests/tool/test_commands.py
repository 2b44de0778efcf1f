"""Each command of the tool with the demonstration model."""
import json
import re
import tempfile
import unittest

from support import ABI, EXPECTED, MODEL, ToolTest, fields, run

FRANCE = "What is the capital of France?\n"


class Chat(ToolTest):
    def test_each_line_is_a_message_and_the_chat_is_remembered(self):
        given = "My name is Anna.\n\n  \nWhat is my name?\n"
        answers = self.output("chat", MODEL, given=given).splitlines()
        self.assertEqual(len(answers), 2)
        self.assertIn("Anna", answers[1])

    def test_the_answers_are_those_of_transformers(self):
        for chat in EXPECTED:
            messages = chat["messages"]
            if len(messages) == 1 and "\n" not in chat["answer"]:
                self.assertEqual(self.output("chat", MODEL, given=messages[0]["content"]), chat["answer"] + "\n")

    def test_a_backslash_continues_a_message(self):
        one = self.output("chat", MODEL, "--show-messages", given="What is\\\n7 + 5?\n")
        self.assertEqual(one, "> What is\n7 + 5?\n12\n")

    def test_a_system_prompt_and_a_stop_change_the_answer(self):
        self.assertEqual(self.output("chat", MODEL, "--stop", " is", given=FRANCE), "The capital of France\n")
        self.assertEqual(self.output("chat", MODEL, "--max-tokens", 2, given=FRANCE), "The capital\n")
        self.output("chat", MODEL, "--system", "You are a tiny model.", "--max-tokens", 4, given=FRANCE)

    def test_reasoning_is_shown_if_asked_for(self):
        plain = self.output("chat", MODEL, "--format", "deepseek_r1", given=FRANCE)
        shown = self.output("chat", MODEL, "--format", "deepseek_r1", "--show-reasoning", given=FRANCE)
        self.assertEqual((plain, shown.strip()), ("\n", "The capital of France is Paris."))

    def test_no_message_is_no_answer(self):
        self.assertEqual(self.output("chat", MODEL, given=""), "")
        self.assertEqual(self.output("chat", MODEL, given="\n\n"), "")

    def test_timing_is_a_line_of_standard_error(self):
        done = run("chat", MODEL, "--timing", given=FRANCE)
        self.assertEqual(done.stdout, "The capital of France is Paris.\n")
        self.assertRegex(done.stderr, r"^\d+ prompt tokens \(\d+ cached\), first token after [\d.]+ ms, \d+ tokens, [\d.]+ tokens/s\n$")


class Complete(ToolTest):
    PROMPT = "The capital of France is"

    def file(self, text):
        file = tempfile.NamedTemporaryFile("w", suffix=".json")
        self.addCleanup(file.close)
        file.write(text)
        file.flush()
        return file.name

    def json(self, *arguments, **options):
        return json.loads(self.output("complete", MODEL, *arguments, "--json", **options))["results"]

    def test_the_prompt_is_an_argument_or_the_input(self):
        expected = " Paris.\n"
        self.assertEqual(self.output("complete", MODEL, self.PROMPT, "--max-tokens", 3), expected)
        self.assertEqual(self.output("complete", MODEL, "--max-tokens", 3, given=self.PROMPT + "\n"), expected)
        self.assertEqual(self.output("complete", MODEL, "--max-tokens", 3, given=self.PROMPT), expected)
        self.assertEqual(self.output("complete", "--max-tokens=3", "--", MODEL, self.PROMPT), expected)

    def test_echo_repeats_the_prompt(self):
        self.assertEqual(self.output("complete", MODEL, self.PROMPT, "--echo", "--max-tokens", 3), self.PROMPT + " Paris.\n")

    def test_results_are_lines_with_their_index(self):
        lines = self.output("complete", MODEL, "Once", "--n", 3, "--temperature", 1.5, "--seed", 3, "--max-tokens", 6).splitlines()
        self.assertEqual([line[:4] for line in lines], ["[0] ", "[1] ", "[2] "])
        best = self.json("Once", "--n", 2, "--best-of", 4, "--temperature", 1.5, "--seed", 3, "--max-tokens", 6)
        self.assertEqual([result["index"] for result in best], [0, 1])
        self.assertGreaterEqual(best[0]["score"], best[1]["score"])
        beams = self.json("Once", "--n", 2, "--beam-width", 3, "--max-tokens", 6)
        self.assertGreaterEqual(beams[0]["score"], beams[1]["score"])

    def test_a_seed_repeats_the_text(self):
        first, again, other = (self.output("complete", MODEL, "Once", "--temperature", 2, "--seed", seed, "--max-tokens", 20)
                               for seed in (5, 5, 6))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_log_probabilities_are_a_table_or_json(self):
        arguments = [self.PROMPT, "--max-tokens", 2, "--logprobs", "--top-logprobs", 2, "--prompt-logprobs"]
        lines = self.output("complete", MODEL, *arguments).splitlines()
        self.assertEqual(lines[0], " Paris")
        self.assertEqual(lines[1].split(), ["token", "id", "log", "probability", "most", "probable"])
        [result] = self.json(*arguments)
        self.assertEqual(len(lines), 2 + len(result["prompt_logprobs"]) + len(result["tokens"]))
        self.assertEqual("".join(token["text"] for token in result["tokens"]), result["text"])
        for token in result["tokens"]:
            self.assertEqual(token["top_logprobs"][0], {"id": token["id"], "text": token["text"], "logprob": token["logprob"]})
        self.assertEqual(len(result["prompt_logprobs"]), result["prompt_tokens"] - 1)

    def test_json_has_the_reason_of_the_end(self):
        [result] = self.json(self.PROMPT, "--stop", "ris")
        self.assertEqual((result["finish_reason"], result["stop_reason"], result["stop_string"]), ("stop", "string", "ris"))
        self.assertEqual(result["text"], " Pa")
        [result] = self.json(self.PROMPT, "--max-tokens", 1)
        self.assertEqual((result["finish_reason"], result["stop_reason"]), ("length", "none"))

    def test_a_grammar_constrains_the_text(self):
        self.assertRegex(self.output("complete", MODEL, "7 + 5 =", "--regex", "[0-9]{2}"), r"^[0-9]{2}\n$")
        self.assertIn(self.output("complete", MODEL, "Yes or no?", "--choice", "yes", "--choice", "no"), ("yes\n", "no\n"))
        schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
                  "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
        for argument in (json.dumps(schema), f"@{self.file(json.dumps(schema))}"):
            text = self.output("complete", MODEL, "JSON:", "--json-schema", argument)
            self.assertEqual(list(json.loads(text)), ["a"])

    def test_token_ids_need_no_tokenizer(self):
        [result] = self.json(self.PROMPT, "--max-tokens", 4)
        ids = ",".join(str(token["id"]) for token in result["tokens"])
        prompt = self.tokens_of(self.PROMPT)
        plain = self.output("complete", MODEL, "--skip-tokenizer", "--prompt-token-ids", ",".join(map(str, prompt)), "--max-tokens", 4)
        self.assertEqual(plain, ids + "\n")

    def tokens_of(self, text):
        """The tokens of a prompt: the echo of a request that generates nothing."""
        [result] = self.json(text, "--echo", "--max-tokens", 0)
        return [token["id"] for token in result["tokens"]]

    def test_an_explicit_default_is_not_replaced_by_the_model(self):
        # generation_config.json of the model selects greedy sampling.
        greedy = self.output("complete", MODEL, "Once", "--max-tokens", 20)
        self.assertEqual(greedy, self.output("complete", MODEL, "Once", "--max-tokens", 20, "--seed", 9))
        sampled = {self.output("complete", MODEL, "Once", "--max-tokens", 20, "--seed", seed, "--temperature", 1) for seed in range(4)}
        plain = {self.output("complete", MODEL, "Once", "--max-tokens", 20, "--seed", seed, "--no-model-defaults") for seed in range(4)}
        self.assertGreater(len(sampled), 1)
        self.assertEqual(sampled, plain)


class Bench(ToolTest):
    def test_the_json_has_all_measurements(self):
        arguments = ["--prompt-tokens", 20, "--output-tokens", 5, "--batch", "1,3", "--repeats", 3]
        result = json.loads(self.output("bench", MODEL, *arguments, "--json"))
        self.assertEqual((result["prompt_tokens"], result["output_tokens"], result["repeats"]), (20, 5, 3))
        self.assertEqual([one["batch"] for one in result["results"]], [1, 3])
        for one in result["results"]:
            for rate in (one["prefill_tokens_per_second"], one["decode_tokens_per_second"]):
                self.assertEqual(len(rate["samples"]), 3)
                self.assertEqual((min(rate["samples"]), sorted(rate["samples"])[1], max(rate["samples"])),
                                 (rate["min"], rate["median"], rate["max"]))
                self.assertGreater(rate["min"], 0)

    def test_the_table_has_a_line_for_each_batch(self):
        lines = self.output("bench", MODEL, "--prompt-tokens", 20, "--output-tokens", 5, "--batch", "2", "--repeats", 1).splitlines()
        self.assertRegex(lines[0], "LlamaForCausalLM, .* threads: prompts of 20 tokens, then 5 decodes")
        self.assertEqual(lines[2].split(), ["batch", "prefill", "decode", "ms", "per", "step"])
        self.assertEqual(lines[3].split()[0], "2")

    def test_a_batch_beyond_the_defaults_runs_together(self):
        result = json.loads(self.output("bench", MODEL, "--prompt-tokens", 1, "--output-tokens", 2, "--batch", 600, "--repeats", 1,
                                        "--warmups", 0, "--json"))
        self.assertEqual(result["results"][0]["batch"], 600)


class Plan(ToolTest):
    def test_the_json_has_each_field_of_the_plan(self):
        plan = json.loads(self.output("plan", MODEL, "--kv-bytes", "16MiB", "--json"))
        self.assertEqual(sorted(plan), sorted(fields("pllm_plan")))
        self.assertEqual((plan["kv_bytes"], plan["blocks"] * plan["block_bytes"]), (16 << 20, 16 << 20))
        self.assertEqual(plan["kv_dtype"], "bf16")

    def test_the_table_has_the_same_numbers(self):
        table = self.output("plan", MODEL, "--kv-bytes", "16MiB", "--max-model-len", 100)
        self.assertRegex(table, r"(?m)^KV pool +16\.0 MiB$")
        self.assertRegex(table, r"(?m)^longest sequence +100 tokens$")
        table = self.output("plan", MODEL, "--swap-bytes", "1MiB", "--preemption", "swap", "--kv-dtype", "f32")
        self.assertRegex(table, r"(?m)^host tier +1\.0 MiB, 16 blocks$")


class Inspect(ToolTest):
    def test_the_json_has_each_field_of_the_model(self):
        model = json.loads(self.output("inspect", MODEL, "--json"))
        self.assertEqual(set(fields("pllm_model_info")) - set(model), set())
        self.assertEqual((model["architecture"], model["layers"], model["vocab_size"]), ("LlamaForCausalLM", 4, 1024))
        self.assertEqual([token["text"] for token in model["eos_token_ids"]], ["<|end|>", "</s>"])
        self.assertTrue(model["has_chat_template"] and model["has_tokenizer"])
        self.assertEqual(model["prompt_token_ids"], [{"id": 0, "text": "<s>"}])
        self.assertIn("LlamaForCausalLM", model["library"]["architectures"])
        self.assertIsNone(model["blas_library"])  # the CPU uses none

    def test_a_model_without_tokenizer_is_described(self):
        table = self.output("inspect", MODEL, "--skip-tokenizer")
        self.assertRegex(table, r"(?m)^tokenizer +no$")
        self.assertRegex(table, r"(?m)^end-of-sequence tokens +5, 1$")


class Help(ToolTest):
    COMMANDS = ["chat", "complete", "bench", "plan", "inspect"]
    # Fields whose options have other names, or that the tool sets itself: scripts/bindings/command_line.py has the reasons.
    WITHOUT = {"pllm_engine_options": {"model_path", "seed", "model_name", "queue_capacity", "progress", "progress_data", "budget", "kv_store",
                                       "kv_store_max_bytes", "kv_store_max_operations", "kv_store_timeout_ms", "kv_store_secret",
                                       "kv_events_capacity", "communicator", "tensor_parallel", "pipeline_parallel",
                                       "worker_timeout_ms", "flags"},
               "pllm_sampling": {"output_kind", "grammar_kind", "grammar", "choices", "dry", "flags"}}

    WITHOUT_FLAGS = {"PLLM_SAMPLING_PREFILL_PROGRESS"}

    def test_each_option_of_the_library_has_an_option(self):
        for command in self.COMMANDS:
            options = set(re.findall(r"--([a-z-]+)", self.output(command, "--help")))
            for name in set(fields("pllm_engine_options")) - self.WITHOUT["pllm_engine_options"]:
                self.assertIn(name.replace("_", "-"), options, command)
        options = set(re.findall(r"--([a-z-]+)", self.output("complete", "--help")))
        for name in set(fields("pllm_sampling")) - self.WITHOUT["pllm_sampling"]:
            self.assertIn(name.replace("_", "-"), options)
        flags = [one["name"] for one in ABI["constants"] if one.get("set") in ("PLLM_ENGINE", "PLLM_SAMPLING")]
        for flag in set(flags) - self.WITHOUT_FLAGS:
            name = re.sub(r"PLLM_(ENGINE|SAMPLING)_", "", flag).lower().replace("_", "-")
            self.assertTrue({name, f"no-{name}"} & options, flag)

    def test_the_help_fits_in_100_columns_and_names_no_constant(self):
        for command in [[], *[[one] for one in self.COMMANDS]]:
            text = self.output(*command, "--help")
            self.assertEqual([line for line in text.splitlines() if len(line) > 100], [])
            self.assertNotRegex(text, r"PLLM_|pllm_|NULL|\n\n\n")

    def test_the_version_is_that_of_the_library(self):
        self.assertRegex(self.output("--version"), r"^pagedllm \d+\.\d+\.\d+ \(ABI \d+\)\n$")


if __name__ == "__main__":
    unittest.main()
