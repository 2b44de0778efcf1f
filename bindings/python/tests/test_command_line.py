"""`python -m pagedllm`: chat, complete, errors."""

import subprocess
import sys
import unittest

from support import EXPECTED, MODEL, MODULE


def run(*arguments, given=""):
    command = [sys.executable, "-m", "pagedllm", *map(str, arguments)]
    return subprocess.run(command, cwd=MODULE, input=given, capture_output=True, text=True, timeout=300)


class CommandLine(unittest.TestCase):
    def assertFails(self, message, *arguments):
        failed = run(*arguments)
        self.assertEqual((failed.returncode, failed.stdout), (1, ""), failed.stderr)
        self.assertIn(message, failed.stderr)
        self.assertEqual(failed.stderr.count("\n"), 1, failed.stderr)

    def test_chat_answers_each_line_and_remembers_the_chat(self):
        questions = "What is the capital of France?\n\nWhat is 7 + 5?\n"
        chat = run("chat", MODEL, "--temperature", 0, "-o", "kv_bytes=16777216", given=questions)
        self.assertEqual(chat.stdout, "The capital of France is Paris.\n12\n", chat.stderr)

    def test_complete_continues_a_prompt(self):
        prompt = EXPECTED[0]["prompt"]
        complete = run("complete", MODEL, prompt, "--temperature", 0, "--max-tokens", 8)
        piped = run("complete", MODEL, "-", "--temperature", 0, "--max-tokens", 8, given=prompt)
        self.assertEqual(complete.returncode, 0, complete.stderr)
        self.assertTrue(complete.stdout.strip())
        self.assertEqual(complete.stdout, piped.stdout)

    def test_a_seed_repeats_a_completion(self):
        first, again = (run("complete", MODEL, "Once", "--temperature", 2, "--seed", 5, "--max-tokens", 20) for _ in range(2))
        self.assertEqual(first.stdout, again.stdout)
        self.assertNotEqual(first.stdout, run("complete", MODEL, "Once", "--temperature", 2, "--seed", 6, "--max-tokens", 20).stdout)

    def test_wrong_arguments_are_one_line_with_the_remedy(self):
        self.assertFails('"missing" does not exist', "complete", "missing", "Hello")
        self.assertFails("kv_dtype has the value 'f3'; it must be one of auto, f32", "complete", MODEL, "x", "-o", "kv_dtype=f3")
        self.assertFails("threads has the value 'many'; it must be of type int", "complete", MODEL, "x", "-o", "threads=many")
        self.assertFails("with one of the names device, kv_bytes", "complete", MODEL, "x", "-o", "host_steps=1")
        self.assertFails("top_p", "complete", MODEL, "x", "--top-p", "7")
        self.assertFails("nofile", "serve", MODEL, "--api-key-file", "nofile")

    def test_the_version_is_that_of_the_library(self):
        self.assertRegex(run("--version").stdout, r"^libpagedllm \d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    unittest.main()
