"""The man page of the tool."""
import re
import subprocess
import sys
import unittest

from support import ROOT, TOOL, ToolTest

PAGE = ROOT / "docs" / "pagedllm.1"


class ManPage(ToolTest):
    def options(self, *command):
        """The names of the options in the help of a command."""
        found = re.findall(r"^  (-\S+)", self.output(*command, "--help"), re.MULTILINE)
        return {name for names in found for name in names.split(",")}

    def test_it_has_every_option_of_every_command(self):
        commands = re.findall(r"^  ([a-z]+) ", self.output("--help").partition("Commands:")[2], re.MULTILINE)
        self.assertIn("complete", commands)
        wanted = self.options().union(*map(self.options, commands))
        self.assertLess({"--version", "--help", "-h", "--kv-bytes", "--top-p", "--batch"}, wanted)
        written = re.findall(r"\\fB(-\S+?)\\fR", PAGE.read_text().replace("\\-", "-"))
        self.assertEqual(set(written), wanted)

    def test_it_is_generated_from_this_tool(self):
        subprocess.run([sys.executable, ROOT / "scripts" / "man.py", TOOL, "--check"], check=True)

    def test_groff_formats_it_without_a_warning(self):
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", PAGE], capture_output=True, text=True, check=True)
        self.assertEqual(done.stderr, "")
        self.assertIn("--max-model-len", re.sub("\x1b\\[\\d+m|.\b", "", done.stdout))


if __name__ == "__main__":
    unittest.main()
