#!/usr/bin/env python3
"""usage: run.py quick|all|list [TEXT]

Compiles the kernels to PTX and executes them without a device. `quick` is the selection of
`make test-kernels`, and `all` has all cases. TEXT selects the cases and mutants with this text in their
names; then no kernel has to be covered.
"""
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build" / "ptx"
CACHE = ROOT / "target" / "ptx"
SEED = 1
HOPPER = "attention_hopper.cu"  # the kernels that exist only in the code for sm_90a
OPTIONS = ["-ptx", "-std=c++17", "-O3"]  # of nvcc in build.rs


def nvcc():
    """Returns the nvcc that build.rs finds. None: there is none, or $NVCC is empty."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"] or None
    home = os.environ.get("CUDA_HOME")
    places = [os.path.join(home, "bin", "nvcc") if home else None, shutil.which("nvcc"), ROOT / "target" / "cuda-toolkit" / "bin" / "nvcc"]
    return next((str(place) for place in places if place and os.path.isfile(place)), None)


def digest(compiler):
    """Returns the FNV-1a hash of the compiler's version and options and of the kernels, as build.rs does."""
    data = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    data += "".join([*OPTIONS, *(os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))]).encode()
    for file in sorted((ROOT / "kernels").iterdir()):
        data += file.name.encode() + file.read_bytes()
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def compiled(architecture, source="all.cu"):
    """Returns the PTX of kernels. It is compiled unless the cache has it."""
    compiler = nvcc()
    path = CACHE / f"{architecture}-{source}-{digest(compiler)}.ptx"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *OPTIONS, f"-arch={architecture}", f"kernels/{source}", "-o", unfinished], cwd=ROOT, check=True)
        unfinished.rename(path)
    return path.read_text()


class Run:
    """The cases of a run, and what failed."""

    def __init__(self, text):
        self.text, self.failures, self.passed = text, [], 0

    def selected(self, name):
        return self.text in name

    def report(self, name, error, note):
        self.passed += error is None
        if error is not None:
            self.failures.append(name)
        print(f"{'ok  ' if error is None else 'FAIL'} {name}: {note if error is None else error}", flush=True)

    def cases(self, module, cases, label=""):
        """Runs cases. Returns the kernels that they launched."""
        from lab import Lab, Mismatch
        from ptx.machine import Machine
        from ptx.parser import PtxError
        machine, launched = Machine(module), set()
        for case in filter(lambda case: self.selected(case.name), cases):
            before, lab, start, error = machine.executed, Lab(machine, SEED), time.process_time(), None
            machine.launched.clear()
            try:
                case.run(lab)
            except (Mismatch, PtxError, AssertionError) as failure:
                error = str(failure)
            if error is None and set(machine.launched) != set(case.kernels):
                error = f"it launched {sorted(set(machine.launched))}, and names {case.kernels}"
            launched.update(machine.launched)
            worst = f"relative difference {lab.worst:.1e}" if lab.worst else "equal"
            seconds = time.process_time() - start
            self.report(label + case.name, error, f"{worst}; {machine.executed - before} instructions of warps, {seconds:.1f} s")
        return launched

    def mutants(self, module, hopper, mutants, cases):
        for mutant in mutants:
            name = f"mutant of {mutant.kernel}, {mutant.name}"
            if self.selected(name):
                found = mutant.run(module if mutant.kernel in module.names else hopper, cases, SEED)
                self.report(name, "the case does not find it" if found is None else None, f"found: {found and found[:150]}")

    def coverage(self, names, launched, label=""):
        """Every kernel is executed."""
        for name in names:
            if not self.text and name not in launched:
                self.report(f"{label}{name}", "no case executes this kernel; add one to tests/ptx/cases", "")


def run_quick(run, cases, mutants):
    from ptx.parser import Module
    module, hopper = Module(compiled("compute_80")), Module(compiled("compute_90a", HOPPER))
    quick = [case for case in cases if case.quick]
    run.cases(module, [case for case in quick if not case.hopper])
    run.cases(hopper, [case for case in quick if case.hopper], "sm_90a: ")
    # The other cases need more time, but each kernel has one.
    run.coverage(module.names + hopper.names, {kernel for case in cases for kernel in case.kernels})
    run.mutants(module, hopper, mutants, cases)


def run_all(run, cases, mutants):
    from ptx.parser import Module
    module, hopper = Module(compiled("compute_80")), Module(compiled("compute_90a"))
    run.coverage(module.names, run.cases(module, [case for case in cases if not case.hopper]))
    run.mutants(module, hopper, mutants, cases)
    # The same kernels, which also wait for the previous kernel, and those for this architecture.
    run.coverage(hopper.names, run.cases(hopper, cases, "sm_90a: "), "sm_90a: ")


def main(what="", text=""):
    if what not in ("quick", "all", "list"):
        sys.exit(__doc__.splitlines()[0])
    if PACKAGES.is_dir():
        sys.path.insert(0, str(PACKAGES))
    if importlib.util.find_spec("numpy") is None:
        print("skipped: the PTX of the kernels because numpy is missing; run scripts/setup.sh test")
        return
    if what != "list" and nvcc() is None:
        print("skipped: the PTX of the kernels because nvcc is missing; run make cuda-toolkit")
        return
    from cases import all_cases
    from mutants import MUTANTS
    cases, run = all_cases(), Run(text)
    if what == "list":
        print("\n".join(case.name for case in cases))
        return
    (run_quick if what == "quick" else run_all)(run, cases, MUTANTS)
    print(f"{run.passed} passed, {len(run.failures)} failed")
    if run.failures or not run.passed:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
