#!/usr/bin/env python3
"""usage: report.py NUMBERS.json FOLDER [--check]

Writes the page evaluation.md, and its plots in FOLDER/evaluation/, from the numbers of `cargo bench --bench paper`.
With --check it writes nothing and fails if the page in FOLDER differs.
"""

import json
import sys
from pathlib import Path

import page_format
import sections

INTRODUCTION = """\
# Evaluation

<!-- Written by benches/paper/report.py from evaluation/numbers.json. Do not edit. -->

The evaluation of the PagedAttention paper (Kwon et al., SOSP 2023), repeated with this library.
`make paper` computes all numbers and writes this page in about {minutes} minutes on two cores;
`make paper-quick` runs a short form of everything into `target/`, as part of `make test`.

The scheduler, the block manager and the policies are the production ones. A simulated machine
replaces the GPU: each step advances a clock by the time to read the weights and K and V, and to
multiply with the weights, from the data sheet of the device, with 80 % of its bandwidth and 60 % of
its operations ([machines](../benches/simulation/machines)). No GPU ran. The exceptions are
[figure 18a](#figure-18a-attention-kernel) and the [CPU engine](#the-cpu-engine), which are measured.

The systems of the paper are policies of the scheduler:

| system | batching | KV memory |
| --- | --- | --- |
| libpagedllm | prompt chunks and decodes in one step | blocks on demand |
| vLLM 0.1.2 | prompts first, in steps of their own; 2,560 tokens, 256 sequences. Unlike it, long prompts are cut | blocks on demand |
| TensorRT-LLM, reserved | as libpagedllm | blocks for the maximum length; its other mode is on demand |
| Orca (Oracle, Pow2, Max) | as libpagedllm | contiguous, from a buddy allocator, for the true length, the next power of two, or the maximum |
| FasterTransformer | static batches | contiguous, for the maximum length |

Requests arrive in a Poisson process, for {seconds:.0f} s and until there are 1,000. A rate is
sustained if the mean normalized latency (end-to-end time over output tokens) is below {limit} s per
token, within 3 %. Ratios compare sustained rates: how many times as much libpagedllm sustains.

## Summary

"""


def page(numbers, folder):
    """Returns the page. Draws the plots into `folder`, unless it is None."""
    summary, parts = [], []
    for section in sections.ALL:
        name = section.__name__
        if name not in numbers:
            continue
        rows, text = section(numbers[name], folder)
        summary += rows
        parts.append(text)
    seconds = sum(values["seconds"] for values in numbers.values() if isinstance(values, dict))
    rates = numbers.get("figure_12", {})
    introduction = INTRODUCTION.format(
        minutes=max(1, round(seconds / 60)),
        seconds=numbers["ablation"]["trace_seconds"],
        limit=rates.get("limit", 0.2),
    )
    head = page_format.table(["", "paper", "here", "ratio", "why they differ"], summary)
    return introduction + head + "\n" + "\n".join(parts)


def main(arguments):
    check = "--check" in arguments
    paths = [argument for argument in arguments if argument != "--check"]
    if len(paths) != 2:
        sys.exit(__doc__)
    numbers, folder = json.loads(Path(paths[0]).read_text()), Path(paths[1])
    missing = [section.__name__ for section in sections.ALL if section.__name__ not in numbers]
    if missing:
        sys.exit(f"{paths[0]} has no {', '.join(missing)}; run cargo bench --bench paper")
    headings = sum(line.startswith("## ") for line in page(numbers, None).splitlines())
    assert headings == len(sections.ALL) + 1, "every section has a heading, and the summary"
    if check:
        if (folder / "evaluation.md").read_text() != page(numbers, None):
            sys.exit(
                f"{folder / 'evaluation.md'} is not the page of {paths[0]}; run benches/paper/report.py {paths[0]} {folder}"
            )
        return
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.md").write_text(page(numbers, folder / "evaluation"))


if __name__ == "__main__":
    main(sys.argv[1:])
