"""Writes tool_calls/cases.json: outputs of models, and what the parsers of vLLM find in them.

    python -m venv ENV && ENV/bin/pip install vllm==0.33.0
    ENV/bin/python tests/data/make_tool_calls.py

The parsers need no GPU and no model. The tokenizer below has the special tokens of all families, and
otherwise one token per character. tool_calls/differences.json lists the cases in which the library
differs on purpose, with the reason; src/text/response/tests.rs reads both files.
"""

import json
import logging
import pathlib
import re

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from tool_call_outputs import FAMILIES, TOOLS

logging.disable(logging.CRITICAL)
HERE = pathlib.Path(__file__).parent / "tool_calls"

SPECIAL = """<think> </think> <tool_call> </tool_call> <|im_start|> <|im_end|> <|python_tag|> [TOOL_CALLS] [ARGS]
[CALL_ID] [THINK] [/THINK] <|tool_call|> <|tool_calls_section_begin|> <|tool_calls_section_end|>
<|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <|START_THINKING|> <|END_THINKING|> <|START_ACTION|>
<|END_ACTION|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_TEXT|> <|END_TEXT|> <|python_start|> <|python_end|>
<arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response> <response> </response>
<|user|> <|assistant|> <|system|> <|observation|> <|endoftext|> <|start_of_role|> <|end_of_role|> <|end_of_text|>
<|CHATBOT_TOKEN|> <|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|>""".split()


class Tokenizer:
    """Special tokens, and one token per other character."""

    chat_template = ""
    eos_token_id = 0
    is_fast = True
    version = 11
    all_special_tokens = SPECIAL

    def __init__(self):
        self.vocab = {token: i + 1 for i, token in enumerate(SPECIAL)}
        self.names = {i: token for token, i in self.vocab.items()}
        self.pattern = re.compile("|".join(map(re.escape, SPECIAL)) + "|.", re.DOTALL)

    def get_vocab(self):
        return self.vocab

    def encode(self, text, **_):
        return [self.vocab.get(part) or 1000 + ord(part) for part in self.pattern.findall(text)]

    def decode(self, ids, **_):
        return "".join(self.convert_ids_to_tokens([ids] if isinstance(ids, int) else ids))

    def convert_ids_to_tokens(self, ids, **_):
        return [self.names.get(i) or chr(i - 1000) for i in ids]

    def convert_tokens_to_ids(self, tokens):
        return [self.vocab.get(token) for token in tokens] if isinstance(tokens, list) else self.vocab.get(tokens)


def parse(family, text):
    """Returns reasoning, content and calls, or the error of the parser."""
    tokenizer = Tokenizer()
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice="auto")
    reasoning, content = None, text
    kwargs = {"chat_template_kwargs": family["template"]} if "template" in family else {}
    if family.get("reasoning"):
        parser = ReasoningParserManager.get_reasoning_parser(family["reasoning"])(tokenizer, **kwargs)
        reasoning, content = parser.extract_reasoning(text, request)
    calls = []
    if content and family.get("tools"):
        parser = ToolParserManager.get_tool_parser(family["tools"])(tokenizer, request.tools)
        found = parser.extract_tool_calls(content, request)
        content = found.content
        calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in found.tool_calls]
    return {"reasoning": reasoning or None, "content": content or None, "calls": calls}


def main():
    cases = []
    for name, family in FAMILIES.items():
        for case, text in family["outputs"].items():
            try:
                vllm_parse = parse(family, text)
            except Exception as error:
                vllm_parse = {"error": f"{type(error).__name__}: {error}"[:100]}
            cases.append({"family": name, "case": case, "open": family.get("open", False), "text": text, "vllm": vllm_parse})
    HERE.mkdir(exist_ok=True)
    table = {"vllm": vllm.__version__, "tools": TOOLS, "cases": cases}
    HERE.joinpath("cases.json").write_text(json.dumps(table, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases")


main()
