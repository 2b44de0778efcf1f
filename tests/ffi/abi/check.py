#!/usr/bin/env python3
"""The ABI only grows: compares include/pagedllm.h with the descriptions of earlier releases.

check.py                 every tests/ffi/abi/*.abi against the header, then proof that breaking changes would be found
check.py --write NAME    describes the header as tests/ffi/abi/NAME.abi, for a release

The library is written in Rust, so its debug information speaks of Rust types. What C programs are compiled against is
the header; so that is what is described: a stub with the header's functions is compiled, and libabigail reads it.
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
    """A shared object with the header's functions and constants."""
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
    """The header, its structs ending where they ended then: struct_size says which fields are there, so more may follow.
    Those without it lie in arrays: they stay whole, so that growth is found."""
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
    """What a program built then would trip over now; empty: nothing."""
    now = constants(header)
    found = [f"{name} was {value}, is {now.get(name, 'gone')}\n" for name, value in frozen(description).items() if now.get(name) != value]
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
    """Each of these would break a program, or is growth: the check must tell them apart."""
    breaking = {
        "a field moves": ("  uint64_t kv_bytes;", "  uint64_t added_in_the_middle;\n  uint64_t kv_bytes;"),
        "a field changes its type": ("  uint32_t block_size;", "  uint64_t block_size;"),
        "a function goes": ("void pllm_engine_free(pllm_engine *engine);", ""),
        "a parameter changes": ("int64_t timeout_ms", "int32_t timeout_ms"),
        "a constant changes": ("#define PLLM_E_BUSY 7", "#define PLLM_E_BUSY 12"),
        "a struct without a size grows": ("} pllm_logprob;", "  uint64_t added_at_the_end;\n} pllm_logprob;"),
        "a callback's parameter changes": ("const uint32_t *tokens,\n                                 uint64_t tokens_len,\n                                 float",
                                           "const uint64_t *tokens,\n                                 uint64_t tokens_len,\n                                 float"),
    }
    growing = {
        "a struct grows": ("} pllm_step;", "  uint64_t added_at_the_end;\n} pllm_step;"),
        "a function comes": ("void pllm_engine_free(pllm_engine *engine);", "void pllm_engine_free(pllm_engine *engine);\nvoid pllm_more(void);"),
    }
    for what, (old, new) in breaking.items():
        assert broken_since(description, changed(header, old, new)), f"not found: {what}"
    for what, (old, new) in growing.items():
        report = broken_since(description, changed(header, old, new))
        assert not report, f"taken for a break: {what}\n{report}"
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
            sys.exit(f"a program built against {description.stem} would break (docs/abi.md has the rule):\n{report}")
    with tempfile.TemporaryDirectory() as folder:
        today = pathlib.Path(folder) / "today.abi"
        describe(header, today)
        breaks, growths = prove(today, header)
    names = ", ".join(description.stem for description in descriptions)
    print(f"abi: {len(functions(header))} functions, grown from {names}; {breaks} breaking changes would be found, {growths} growths let pass")


main()
