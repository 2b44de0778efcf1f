#!/usr/bin/env python3
"""Writes the parts of the wrappers that mirror the C API, from bindings/abi.json. With --check it
fails if one of them is stale."""
import pathlib
import sys

import c_layout
import command_line
import cpp
import go
import java
import node
import python
from abi import Abi

ROOT = pathlib.Path(__file__).resolve().parents[2]
LANGUAGES = [c_layout, command_line, cpp, go, java, node, python]


def main():
    abi = Abi.read(ROOT / "bindings" / "abi.json")
    # The structs of ctypes include those of communicators and KV stores.
    views = [(language, abi if language in (c_layout, python) else abi.without_interfaces()) for language in LANGUAGES]
    files = {path: text for language, view in views for path, text in language.files(view, ROOT).items()}
    stale = [path for path, text in files.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    if "--check" in sys.argv and stale:
        sys.exit(f"{', '.join(stale)}: stale; run `make header` and commit the result")
    for path in stale:
        (ROOT / path).write_text(files[path])


main()
