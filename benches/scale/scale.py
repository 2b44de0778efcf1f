#!/usr/bin/env python3
"""Writes the tables and the plot of docs/scale.md. With --check it fails if they are stale.

With --model it prints the layouts of a number of devices instead.
"""

import argparse
import re
import sys
from pathlib import Path

import drawing
import layouts
import machine
import model
import step
import tables

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "scale.md"
MARK = r"(<!-- table: ([\w.-]+) -->\n)(.*?)(<!-- end -->)"


def filled(page):
    """Returns the page with new tables between its marks."""
    names = [name for _, name, _, _ in re.findall(MARK, page, re.S)]
    assert sorted(names) == sorted(
        tables.ALL
    ), f"docs/scale.md has each table once: {sorted(set(names) ^ set(tables.ALL))}"
    return re.sub(
        MARK, lambda found: f"{found[1]}\n{tables.ALL[found[2]]()}\n{found[4]}", page, flags=re.S
    )


def options(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if the page is stale"
    )
    parser.add_argument("--model", help="a name in benches/scale/models or benches/paper/models")
    parser.add_argument(
        "--machine", default="h100", help="a name in benches/scale/machines.json (default: h100)"
    )
    parser.add_argument("--devices", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--context", type=int, default=4096, help="mean tokens of a sequence (default: 4096)"
    )
    parser.add_argument(
        "--limit-ms", type=float, default=50, help="longest time per token (default: 50)"
    )
    parser.add_argument("--fp8", action="store_true", help="weights of layers in 8 bits")
    given = parser.parse_args(arguments)
    for name, value, least in (
        ("--devices", given.devices, 1),
        ("--context", given.context, 1),
        ("--limit-ms", given.limit_ms, 0.1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value:g}; must be at least {least:g}")
    return given


def choices(given):
    """Returns the layouts of the case of the command line."""
    chosen, device = model.load(given.model, 1.0 if given.fp8 else 2.0), machine.load(given.machine)
    if not layouts.fitting(chosen, device, given.devices, given.context):
        weights, memory = (
            tables.sum_of_weights(chosen) / 1e9,
            device.memory * step.MEMORY_SHARE * given.devices / 1e9,
        )
        raise ValueError(
            f"{given.model} does not fit into --devices {given.devices} ({weights:.0f} GB of weights, {memory:.0f} GB of memory, "
            f"{given.context} tokens); raise --devices or pass --fp8"
        )
    return tables.choices(chosen, device, given.devices, given.context, given.limit_ms / 1e3)


def main(arguments):
    given = options(arguments)
    if given.model:
        print(choices(given), end="")
        return
    page = PAGE.read_text()
    text = filled(page)
    if given.check:
        if text != page:
            sys.exit("docs/scale.md is stale: run benches/scale/scale.py")
        if drawing.is_stale():
            sys.exit("docs/scale.svg is stale: run make scale")
        return
    PAGE.write_text(text)
    if drawing.is_stale():
        try:
            drawing.draw()
        except ModuleNotFoundError as error:
            sys.exit(f"docs/scale.svg is stale, and {error.name} is missing: run make scale")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
