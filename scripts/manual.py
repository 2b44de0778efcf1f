#!/usr/bin/env python3
"""Writes docs/manual.md from the comments of the header. With --check it fails if that page is stale."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "manual.md"
HEAD = """# The manual

Made from the comments of [include/pagedllm.h](../include/pagedllm.h) by `scripts/manual.py`.

"""
SECTIONS = [
    ("The library", r"pllm_(abi_version|version|build_info)|PLLM_ABI|PLLM_NUL"),
    ("Errors", r"pllm_error|PLLM_E_"),
    ("Engines", r"pllm_engine_(options|plan|create|free|health|snapshot$|get_(?!token))|pllm_engine\b|pllm_(plan|model_info|stats|progress)\b|pllm_kv_(?!event)|PLLM_(DTYPE|ISA|ENGINE|ORDER|BATCHING|ALLOCATION|PREEMPTION|WEIGHTS|PACKED|KV)_(?!EVENT|MEDIUM)"),
    ("Workers", r"pllm_communicator|pllm_worker"),
    ("Memory", r"pllm_(budget|engine_budget)"),
    ("Requests", r"pllm_(request|beam|logits_hook|admission)|pllm_engine_(add_request|predict_admission|abort)|PLLM_(REQUEST|EARLY_STOPPING)_"),
    ("Sampling", r"pllm_(sampling|dry|logit_bias|token_list)|PLLM_(SAMPLING|OUTPUT|GRAMMAR|UNLIMITED)_"),
    ("Sequences", r"pllm_(sequence|fork|resume|prefix|pin)|PLLM_(FORK_|RESUME_)"),
    ("Stepping", r"pllm_step\b|pllm_engine_(step|start|stop)"),
    ("Queues and outputs", r"pllm_(queue|outputs?|logprob)\b|pllm_(queue|outputs)_|pllm_engine_queue|PLLM_(FINISH|STOP|QUEUE)_"),
    ("Responses", r"pllm_response_parser"),
    ("KV events", r"pllm_kv_events?(_|\b)|pllm_engine_(poll_kv_events|snapshot_kv_events|hash_prompt)|PLLM_KV_(EVENT|MEDIUM)_"),
    ("Text", r"pllm_(tokens|bytes)|pllm_engine_(tokenize|detokenize|get_token_bytes|render_chat)|PLLM_TEXT_"),
]


def parts(header):
    """Returns the introduction, and (name, comment, code) of each constant, struct and function."""
    opening = re.search(r"/\*\n \* (libpagedllm.*?)\n \*/", header, re.S)[1]
    body = header[header.index("#define PLLM_NODISCARD\n#endif") :]
    item = re.compile(
        r"((?:^//[^\n]*\n)*)^(#define (PLLM_\w+) [^\n]*|typedef struct \{.*?^\} (\w+);|typedef struct (\w+) \w+;|"
        r"typedef [^\n{]*\(\*(\w+)\)[^;]*;|(?:PLLM_NODISCARD\n?)?[\w ]+[\s*]+(pllm_\w+)\([^;{}]*\);)",
        re.M | re.S,
    )
    found = []
    for match in item.finditer(body):
        name = next(group for group in match.groups()[2:] if group)
        comment = re.sub(r"^// ?", "", match[1], flags=re.M).strip()
        found.append((name, comment, match[2]))
    return re.sub(r"^ \* ?", "", opening, flags=re.M), found


def entry(name, comment, code):
    if name.startswith("PLLM_"):
        value = f"**`{code.removeprefix('#define ')}`**"
        return f"\n{value}: {comment}\n" if comment else f"\n{value}\n"
    return f"\n### `{name}`\n\n{comment}\n\n```c\n{code}\n```\n"


def page(header):
    opening, items = parts(header)
    opening = re.sub(r"((?:^    [^\n]*\n)+)", lambda code: "```c\n" + re.sub(r"^    ", "", code[1], flags=re.M) + "```\n", opening, flags=re.M)
    text = HEAD + re.sub(r"^([A-Z]\w+)\. ", r"**\1.** ", opening, flags=re.M) + "\n"
    for title, names in SECTIONS:
        mine = [item for item in items if re.match(names, item[0])]
        items = [item for item in items if item not in mine]
        text += f"\n## {title}\n" + "".join(entry(*item) for item in mine)
    assert not items, f"no section for {[name for name, _, _ in items]}; add a pattern to SECTIONS"
    return text


def main():
    text = page((ROOT / "include" / "pagedllm.h").read_text())
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit("docs/manual.md is stale: run scripts/manual.py")


main()
