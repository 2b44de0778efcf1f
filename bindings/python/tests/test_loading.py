"""Errors of the import: a library that is missing, damaged, of another machine or of another version."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import MODULE

import pagedllm

# A library without most functions, and one with another ABI.
OTHER_VERSIONS = """
#include <stdint.h>
uint32_t pllm_abi_version(void) { return ABI; }
const char *pllm_version(void) { return "0.0.1"; }
"""


class Loading(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.library = self.folder / "libpagedllm.so"

    def assertNotImported(self, *words, library=None):
        environment = {**os.environ, "PAGEDLLM_LIBRARY": str(library or self.library)}
        run = [sys.executable, "-c", "import pagedllm"]
        failed = subprocess.run(run, cwd=MODULE, env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual(failed.returncode, 1)
        last = failed.stderr.strip().splitlines()[-1]
        for word in ("ImportError", *words):
            self.assertIn(word, last)

    def compile(self, abi):
        compiler = ["cc", "-shared", "-x", "c", "-", f"-DABI={abi}", "-o", str(self.library)]
        subprocess.run(compiler, input=OTHER_VERSIONS, text=True, check=True, timeout=60)

    def test_a_missing_library_is_named(self):
        self.assertNotImported(str(self.library), "set PAGEDLLM_LIBRARY")

    def test_a_file_that_is_no_library_is_named(self):
        self.library.write_text("text")
        self.assertNotImported(f"{self.library} is no shared library", "set PAGEDLLM_LIBRARY")

    def test_a_library_for_another_machine_is_named_with_both_machines(self):
        machine = {62: 183, 183: 62}
        header = bytearray(pathlib.Path("/proc/self/exe").read_bytes()[:4096])
        header[18] = machine.get(header[18], 62)
        self.library.write_bytes(header)
        names = pagedllm._machine(header), pagedllm._machine(pathlib.Path("/proc/self/exe").read_bytes()[:20])
        self.assertNotImported(f"for another machine ({names[0]}, this process: {names[1]})", "install the package")

    def test_a_library_with_another_abi_is_named_with_both_versions(self):
        self.compile(abi=999)
        self.assertNotImported("has ABI version 999", "the module and the library of one release")

    def test_a_library_without_a_function_is_named_with_its_version(self):
        self.compile(abi=1)
        self.assertNotImported("is version 0.0.1, which has no pllm_", "the module and the library of one release")

    def test_the_library_in_the_folder_of_the_package_comes_first(self):
        package = self.folder / "pagedllm"
        shutil.copytree(MODULE / "pagedllm", package)
        (package / "libpagedllm.so").symlink_to(os.environ.get("PAGEDLLM_LIBRARY", MODULE.parents[1] / "target/release/libpagedllm.so"))
        environment = {name: value for name, value in os.environ.items() if name != "PAGEDLLM_LIBRARY"}
        program = "import pagedllm; print(pagedllm._lib._name)"
        run = subprocess.run([sys.executable, "-c", program], cwd=self.folder, env=environment, capture_output=True, text=True, check=True)
        self.assertEqual(run.stdout.strip(), str(package.resolve() / "libpagedllm.so"))


if __name__ == "__main__":
    unittest.main()
