"""Wrong arguments, wrong models, wrong input, closed pipes, Ctrl-C."""
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from support import MODEL, SLOW, TIMEOUT, TOOL, Terminal, ToolTest, run


class WrongArguments(ToolTest):
    def test_the_command_line_is_checked_before_the_model(self):
        for message, *arguments in [
            ("the command is \"\"; must be one of chat, complete, bench, plan, inspect",),
            ("the command is \"--nothing\"; must be", "--nothing"),
            ("MODEL is required; see pagedllm chat --help", "chat"),
            ("--nothing; see pagedllm plan --help", "plan", MODEL, "--nothing"),
            ("the command is \"nothing\"; must be one of chat", "nothing", MODEL),
            ("--threads is \"many\"; must be a whole number from 0 to 4294967295", "plan", MODEL, "--threads", "many"),
            ("--threads is \"-1\"; must be a whole number", "plan", MODEL, "--threads", "-1"),
            ("--threads is \"4294967296\"; must be", "plan", MODEL, "--threads", "4294967296"),
            ("--threads is \"1 \"; must be", "plan", MODEL, "--threads", "1 "),
            ("--threads is \"\"; must be", "plan", MODEL, "--threads", ""),
            ("--threads is given 2 times; give it once", "plan", MODEL, "--threads", "1", "--threads", "2"),
            ("--threads", "plan", MODEL, "--threads"),
            ("--kv-bytes is \"4GB\"; must be a number of bytes", "plan", MODEL, "--kv-bytes", "4GB"),
            ("--kv-bytes is \"99999999TiB\"; must be a number of bytes below", "plan", MODEL, "--kv-bytes", "99999999TiB"),
            ("--kv-dtype is \"f3\"; must be one of auto, f32", "plan", MODEL, "--kv-dtype", "f3"),
            ("--top-p is \"most\"; must be a number", "complete", MODEL, "x", "--top-p", "most"),
            ("--stop-token-ids is \"1,,2\"", "complete", MODEL, "x", "--stop-token-ids", "1,,2"),
            ("--prompt-token-ids is \"\"; must be", "complete", MODEL, "--prompt-token-ids", ""),
            ("both PROMPT and --prompt-token-ids are given", "complete", MODEL, "x", "--prompt-token-ids", "1"),
            ("--logit-bias is \"3\"; must be a token id and a number", "complete", MODEL, "x", "--logit-bias", "3"),
            ("--choice and --regex are given; give one of them", "complete", MODEL, "x", "--choice", "a", "--choice", "b", "--regex", "c"),
            ("--json-schema names the file \"missing\", which cannot be read", "complete", MODEL, "x", "--json-schema", "@missing"),
            ("--system names the file \"/\", which cannot be read", "chat", MODEL, "--system", "@/"),
            ("--batch is \"0\"; must be at least 1", "bench", MODEL, "--batch", "0"),
            ("--repeats is \"0\"; must be at least 1", "bench", MODEL, "--repeats", "0"),
            ("--batch is 8, of which a step ran", "bench", MODEL, "--batch", "8", "--kv-bytes", "2MiB"),
            ("need sequences of", "bench", MODEL, "--prompt-tokens", "2000000"),
        ]:
            self.assert_fails(2, message, *arguments)

    def test_an_empty_prompt_is_an_error(self):
        self.assert_fails(2, "the prompt is empty (0 bytes of standard input); give PROMPT", "complete", MODEL)
        self.assert_fails(2, "the prompt is empty", "complete", MODEL, given="\n")

    def test_the_errors_of_the_library_are_passed_on(self):
        for message, *arguments in [
            ("top_p is 7", "complete", MODEL, "x", "--top-p", "7"),
            ("temperature is ", "complete", MODEL, "x", "--temperature", "nan"),
            ("block_size is 7", "plan", MODEL, "--block-size", "7"),
            ("needs 4000000000 sequences at once", "complete", MODEL, "x", "--n", "4000000000"),
            ("n is 0", "complete", MODEL, "x", "--n", "0"),
            ("cpus", "plan", MODEL, "--cpus", "0-"),
            ("nothing", "chat", MODEL, "--format", "nothing"),
        ]:
            self.assert_fails(1, message, *arguments, given="Hello\n")


class WrongModels(ToolTest):
    def test_a_missing_model_is_an_error_of_each_command(self):
        for command in ("chat", "complete", "bench", "plan", "inspect"):
            self.assert_fails(1, "\"missing\" does not exist", command, "missing", given="Hello\n")

    def test_damaged_models_are_errors(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assert_fails(1, "config.json", "plan", folder)
            shutil.copytree(MODEL, folder, dirs_exist_ok=True)
            os.truncate(f"{folder}/model.safetensors", 1000)
            self.assert_fails(1, "model.safetensors", "inspect", folder)
            for name in ("chat_template.jinja", "tokenizer_config.json"):
                os.remove(f"{folder}/{name}")
            shutil.copy(f"{MODEL}/model.safetensors", folder)
            self.assertRegex(self.output("inspect", folder), r"(?m)^chat template +no$")
            self.assert_fails(1, "template", "chat", folder, given="Hello\n")


class Input(ToolTest):
    def test_text_that_is_not_utf8_is_an_error(self):
        self.assert_fails(1, "UTF-8", "complete", MODEL, given=b"caf\xe9")
        self.assert_fails(1, "UTF-8", "chat", MODEL, given=b"caf\xe9\n")
        self.assert_fails(1, "UTF-8", "complete", MODEL, b"caf\xe9".decode(errors="surrogateescape"))

    def test_a_prompt_that_is_too_long_has_the_limit(self):
        self.assert_fails(1, "max_model_len", "complete", MODEL, given="Hello " * 2000)
        self.assert_fails(1, "max_model_len", "chat", MODEL, given="Hello " * 2000 + "\n")
        self.assert_fails(1, "max_prompt_bytes", "complete", MODEL, "--max-prompt-bytes", 100, given="Hello " * 100)

    def test_input_that_cannot_be_read_is_an_error(self):
        directory = os.open("/", os.O_RDONLY)
        self.addCleanup(os.close, directory)
        done = subprocess.run([TOOL, "complete", MODEL], stdin=directory, capture_output=True, timeout=TIMEOUT, text=True)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("standard input cannot be read (Is a directory)", done.stderr)

    def test_a_closed_input_is_empty(self):
        done = subprocess.run(f"exec '{TOOL}' chat '{MODEL}' <&-", shell=True, capture_output=True, timeout=TIMEOUT)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b""))

    def test_an_answer_comes_before_the_next_message(self):
        with subprocess.Popen([TOOL, "chat", MODEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as chat:
            for question, answer in [("What is 7 + 5?", "12"), ("What is the capital of France?", "The capital of France is Paris.")]:
                chat.stdin.write(question + "\n")
                chat.stdin.flush()
                self.assertEqual(chat.stdout.readline(), answer + "\n")
            chat.stdin.close()
            self.assertEqual(chat.wait(TIMEOUT), 0)


class Output(ToolTest):
    def test_a_reader_that_leaves_ends_the_tool_quietly(self):
        command = f"'{TOOL}' complete '{MODEL}' Once --ignore-eos | head -c 20"
        done = subprocess.run(["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}} >&2"], capture_output=True, timeout=TIMEOUT, text=True)
        self.assertEqual((len(done.stdout), done.stderr), (20, "141\n"))

    def test_a_closed_or_full_output_is_an_error(self):
        for redirection, reason in [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")]:
            for command in (f"plan '{MODEL}'", f"complete '{MODEL}' Once --max-tokens 3", "--help", "--version"):
                done = subprocess.run(f"exec '{TOOL}' {command} {redirection}", shell=True, capture_output=True, timeout=TIMEOUT, text=True)
                self.assertEqual(done.returncode, 1, command)
                self.assertEqual(done.stderr, f"pagedllm: standard output cannot be written ({reason}); redirect it to another file\n")

    def test_closed_standard_error_changes_nothing(self):
        done = subprocess.run(f"exec '{TOOL}' complete '{MODEL}' 'The capital of France is' --max-tokens 3 --timing 2>&-", shell=True,
                              stdout=subprocess.PIPE, timeout=TIMEOUT, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, " Paris.\n"))

    def test_a_slow_reader_gets_the_whole_text(self):
        arguments = [TOOL, "complete", MODEL, "Once", "--ignore-eos", "--max-tokens", "900"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as tool:
            time.sleep(1)
            slow = tool.stdout.read()
        self.assertEqual((tool.returncode, slow.decode()), (0, self.output(*arguments[1:])))


def wait_for_handler(process):
    """Waits until a process handles SIGINT."""
    handled = 0
    while not handled & 1 << (signal.SIGINT - 1):
        with open(f"/proc/{process}/status") as status:
            handled = int(next(line for line in status if line.startswith("SigCgt")).split()[1], 16)


class Interrupts(ToolTest):
    def interrupt(self, *arguments, given=None):
        """Interrupts the tool when it has written something. Returns its output and its exit code."""
        stdin = subprocess.PIPE if given else subprocess.DEVNULL
        # Without a buffer, from which communicate() would not read.
        with subprocess.Popen([TOOL, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as tool:
            if given:
                tool.stdin.write(given)
                tool.stdin.flush()
            first = tool.stdout.read(1)
            tool.send_signal(signal.SIGINT)
            rest, errors = tool.communicate(timeout=TIMEOUT)
        self.assertEqual(errors, b"")
        return (first + rest).decode(), tool.returncode

    def test_ctrl_c_ends_a_completion_with_what_it_has(self):
        whole = self.output("complete", MODEL, "Once", *SLOW)
        text, code = self.interrupt("complete", MODEL, "Once", *SLOW)
        self.assertEqual(code, 130)
        self.assertLess(len(text), len(whole))
        self.assertTrue(whole.startswith(text.rstrip("\n")), text)

    def test_ctrl_c_ends_a_chat_over_a_pipe(self):
        text, code = self.interrupt("chat", MODEL, *SLOW, given=b"Tell me a short story.\nWhat is 7 + 5?\n")
        self.assertEqual((code, text.count("\n")), (130, 1))

    def test_ctrl_c_ends_a_measurement(self):
        for seconds in (0, 1):  # while the model is loaded, and later
            tool = subprocess.Popen([TOOL, "bench", MODEL, "--repeats", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            wait_for_handler(tool.pid)
            time.sleep(seconds)
            tool.send_signal(signal.SIGINT)
            self.assertEqual((*tool.communicate(timeout=TIMEOUT), tool.returncode), (b"", b"", 130))

    def test_ctrl_c_on_a_terminal_ends_the_answer_and_not_the_chat(self):
        chat = Terminal("chat", MODEL, *SLOW, "--max-tokens", 900)
        self.addCleanup(chat.kill)
        self.assertIn("Ctrl-C ends an answer", chat.wait_for("> "))
        chat.write("Tell me a short story.\n")
        chat.wait_for("Once")
        chat.write("\x03")
        answer = chat.wait_for("\n> ")
        self.assertLess(len(answer), 2000, "the answer was not ended")
        chat.write("half a mess\x03")  # at the prompt, it drops the line
        chat.wait_for("\n> ")
        chat.write("What is 7 + 5?\n")
        chat.wait_for("12")
        chat.write("\x03")
        chat.wait_for("\n> ")
        chat.write("\x04")
        rest, code = chat.end()
        self.assertEqual(code, 0, rest)

    def test_an_error_on_a_terminal_does_not_end_the_chat(self):
        chat = Terminal("chat", MODEL, "--max-model-len", 64)
        self.addCleanup(chat.kill)
        chat.wait_for("> ")
        chat.write("Hello " * 100 + "\n")
        self.assertIn("pagedllm: prompt is 305 tokens", chat.wait_for("\n> "))
        chat.write("What is 7 + 5?\n")
        chat.wait_for("12")
        chat.wait_for("> ")
        chat.write("\x04")
        self.assertEqual(chat.end()[1], 0)

    def test_loading_has_a_progress_bar_on_a_terminal_only(self):
        tool = Terminal("plan", MODEL)
        self.assertNotIn("loading", tool.end()[0])
        tool = Terminal("inspect", MODEL)
        seen, code = tool.end()
        self.assertRegex(seen, r"loading \[#{40}\] 100%\r\x1b\[K")
        self.assertEqual(code, 0)
        self.assertNotIn("loading", run("inspect", MODEL).stderr)


if __name__ == "__main__":
    unittest.main()
