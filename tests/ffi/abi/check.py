#!/usr/bin/env python3
"""Compares include/pagedllm.h with the descriptions of earlier releases: the ABI may only grow.

check.py                 compares the header with every tests/ffi/abi/*.abi, and proves that it
                         detects breaking changes
check.py --write NAME    writes the description tests/ffi/abi/NAME.abi of a release

The debug information of the library describes Rust types, but C programs use the header. So the
script compiles a stub with the functions of the header, and libabigail reads the stub.
"""
import pathlib
import re
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parents[2] / "include" / "pagedllm.h"


def functions(header):
    """(result, name, parameters) of each prototype."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.S)
    code = re.sub(r"^\s*#[^\n]*", "", code, flags=re.M).replace("PLLM_NODISCARD", "")
    found = re.findall(r"^\s*([\w ]+?[\s*]+)(pllm_\w+)\(([^;{}]*?)\);", code, flags=re.M | re.S)
    return list({name: (result, name, parameters) for result, name, parameters in found}.values())


def constants(header):
    return dict(re.findall(r"^#define (PLLM_\w+) (\(?-?\w+\)?)$", header, flags=re.M))


def stub(header, folder):
    """Compiles a shared object with the functions of the header."""
    bodies = "".join(f"{result} {name}({parameters}) {{ __builtin_trap(); }}\n" for result, name, parameters in functions(header))
    (folder / "pagedllm.h").write_text(header)
    (folder / "stub.c").write_text('#include "pagedllm.h"\n' + bodies)
    library = folder / f"libpagedllm.so.{constants(header)['PLLM_ABI_VERSION']}"
    command = ["cc", "-g", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "stub.c", "-o", str(library)]
    subprocess.run(command, cwd=folder, check=True)
    return library


def describe(header, out):
    with tempfile.TemporaryDirectory() as folder:
        library = stub(header, pathlib.Path(folder))
        command = ["abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--out-file", str(out), str(library)]
        subprocess.run(command, check=True)
    names = "".join(f"<!-- {name} {value} -->\n" for name, value in sorted(constants(header).items()))
    out.write_text(out.read_text() + names)


def frozen(description):
    return dict(re.findall(r"^<!-- (PLLM_\w+) (\S+) -->$", description.read_text(), flags=re.M))


def without_growth(header, description):
    """Returns the header without fields that structs gained after the description was written.

    struct_size gives the number of bytes that exist, so such a struct may grow. Structs without struct_size
    are elements of arrays: they are not cut, so that their growth is detected.
    """
    known = {}
    for declaration in ElementTree.parse(description).iter("class-decl"):
        known[declaration.get("name")] = [variable.get("name") for variable in declaration.iter("var-decl")]

    def cut(match):
        fields, name = re.findall(r"^  \w[^;]*;", match[1], flags=re.M), match[2]
        sized = fields[0].strip() == "uint64_t struct_size;"
        while sized and name in known and re.search(r"(\w+);", fields[-1])[1] not in known[name]:
            fields.pop()
        return "typedef struct {\n" + "\n".join(fields) + f"\n}} {name};"

    return re.sub(r"typedef struct \{([^}]*)\} (\w+);", cut, header)


def broken_since(description, header):
    """Returns the differences that break a program of that release, or an empty string."""
    now = constants(header)
    found = [f"{name} was {value}, is {now.get(name, 'removed')}\n" for name, value in frozen(description).items() if now.get(name) != value]
    with tempfile.TemporaryDirectory() as folder:
        described = pathlib.Path(folder) / "now.abi"
        describe(without_growth(header, description), described)
        command = ["abidiff", "--no-added-syms", "--no-default-suppression", str(description), str(described)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        found.append(result.stdout + result.stderr)
    return "".join(found)


def changed(header, old, new):
    assert old in header, old
    return header.replace(old, new, 1)


def prove(description, header):
    """Checks that each breaking change is detected, and that growth is allowed."""
    breaking = {
        "a field moves": ("  uint64_t kv_bytes;", "  uint64_t added_in_the_middle;\n  uint64_t kv_bytes;"),
        "a field changes its type": ("  uint32_t block_size;", "  uint64_t block_size;"),
        "a function is removed": ("void pllm_engine_free(pllm_engine *engine);", ""),
        "a parameter changes": ("int64_t timeout_ms", "int32_t timeout_ms"),
        "a constant changes": ("#define PLLM_E_BUSY 7", "#define PLLM_E_BUSY 12"),
        "a struct without a size grows": ("} pllm_logprob;", "  uint64_t added_at_the_end;\n} pllm_logprob;"),
        "a parameter of a callback changes": ("const uint32_t *tokens,\n                                 uint64_t tokens_len,\n                                 float",
                                           "const uint64_t *tokens,\n                                 uint64_t tokens_len,\n                                 float"),
    }
    growing = {
        "a struct grows": ("} pllm_step;", "  uint64_t added_at_the_end;\n} pllm_step;"),
        "a function is added": ("void pllm_engine_free(pllm_engine *engine);", "void pllm_engine_free(pllm_engine *engine);\nvoid pllm_more(void);"),
    }
    for what, (old, new) in breaking.items():
        assert broken_since(description, changed(header, old, new)), f"not detected: {what}"
    for what, (old, new) in growing.items():
        report = broken_since(description, changed(header, old, new))
        assert not report, f"wrongly reported: {what}\n{report}"
    return len(breaking), len(growing)


def main():
    header = HEADER.read_text()
    if sys.argv[1:2] == ["--write"]:
        return describe(header, HERE / f"{sys.argv[2]}.abi")
    descriptions = sorted(HERE.glob("*.abi"))
    assert descriptions, "no description of an earlier release"
    for description in descriptions:
        report = broken_since(description, header)
        if report:
            sys.exit(f"programs built against {description.stem} would break, see docs/abi.md:\n{report}")
    with tempfile.TemporaryDirectory() as folder:
        today = pathlib.Path(folder) / "today.abi"
        describe(header, today)
        breaks, growths = prove(today, header)
    names = ", ".join(description.stem for description in descriptions)
    print(f"abi: {len(functions(header))} functions, compatible with {names}; "
          f"{breaks} breaking changes detected, {growths} growths allowed")


main()
