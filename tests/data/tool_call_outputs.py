"""Outputs of models in the formats of their chat templates, for make_tool_calls.py."""


def tool(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city="string", days="integer", metric="boolean"),
    tool("search", query="string", filters="object", tags="array", limit="number"),
    tool("ping"),
]

W = '{"city": "Paris", "days": 3}'
NESTED = '{"query": "a {b} [c]", "filters": {"lang": ["en", "fr"], "deep": {"x": null, "y": [1, 2.5, -3e2]}}, "tags": []}'
UNICODE = r'{"query": "Zürich ☔ \"quoted\" \\ \n tab\t \u00e9 \ud83d\ude00", "limit": 1.5}'


def json_outputs(call, begin, end, separator="", listed=True):
    """The usual cases of a family whose call is a JSON object, written by `call(name, arguments)`."""
    open_list, close_list = ("[", "]") if listed else ("", "")

    def one(name, arguments):
        return begin + open_list + call(name, arguments) + close_list + end

    def several(*calls):
        if listed:
            return begin + open_list + ", ".join(call(*c) for c in calls) + close_list + end
        return separator.join(one(*c) for c in calls)

    return {
        "plain": "It rains in Paris.",
        "empty": "",
        "one": one("get_weather", W),
        "parallel": several(("get_weather", W), ("search", NESTED), ("ping", "{}")),
        "nested": one("search", NESTED),
        "unicode": one("search", UNICODE),
        "text before": "Let me look." + one("get_weather", W),
        "no arguments": one("ping", "{}"),
        "truncated in name": one("get_weather", W)[: len(begin) + len(open_list) + 12],
        "truncated in arguments": one("get_weather", W)[: one("get_weather", W).index("Paris") + 3],
    }


def named(name, arguments):
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def parameters(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


HERMES = json_outputs(named, "<tool_call>\n", "\n</tool_call>", "\n", listed=False)
HERMES_MORE = {
    "text around": "Let me look.\n\n<tool_call>\n" + named("ping", "{}") + "\n</tool_call>\nDone.",
    "one line": "<tool_call>" + named("get_weather", W) + "</tool_call>",
    "arguments first": '<tool_call>{"arguments": ' + W + ', "name": "get_weather"}</tool_call>',
    "no end tag": "<tool_call>" + named("get_weather", W),
    "not JSON": "<tool_call>get_weather(Paris)</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "stray end": "a </tool_call> b",
    "almost a tag": "a <tool_cal b <tool_call",
    "html": "Use <b>bold</b> and 1 < 2.",
    "compact": '<tool_call>{"name":"search","arguments":{"query":"x","limit":1}}</tool_call>',
}

REASONING = {
    "plain": "It rains in Paris.",
    "reasoning": "<think>\nThe user asks.\n</think>\n\nIt rains.",
    "reasoning only": "<think>\nThe user asks.\n</think>",
    "reasoning truncated": "<think>\nThe user as",
    "reasoning empty": "<think>\n\n</think>\n\nIt rains.",
    "reasoning tag later": "In HTML there is no <b>think</b> tag.",
}


def coder(name, *pairs):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name, *pairs):
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{body}</tool_call>"


def tagged_outputs(call):
    return {
        "plain": "It rains in Paris.",
        "one": call("get_weather", ("city", "Paris"), ("days", "3"), ("metric", "true")),
        "parallel": call("get_weather", ("city", "Paris")) + "\n" + call("ping") + "\n" + call("get_weather", ("city", "Rome")),
        "nested": call("search", ("query", "x"), ("filters", '{"a": [1, {"b": null}]}'), ("tags", '["u", "v"]')),
        "unicode": call("search", ("query", 'Zürich ☔ "quoted" \\ <b>x</b>\nsecond line'), ("limit", "1.5")),
        "text before": "Let me look.\n\n" + call("get_weather", ("city", "Paris")),
        "text after": call("ping") + "\nDone.",
        "no arguments": call("ping"),
        "number for a string": call("get_weather", ("city", "75001")),
        "text for a number": call("get_weather", ("city", "Paris"), ("days", "three")),
        "unknown parameter": call("get_weather", ("city", "Paris"), ("unit", "12")),
        "unknown tool": call("other", ("a", "1"), ("b", "text")),
        "truncated in name": call("get_weather", ("city", "Paris"))[:20],
        "truncated in value": call("get_weather", ("city", "Paris in spring"))[: call("get_weather", ("city", "Paris")).index("Paris") + 3],
        "almost a tag": "a <tool_cal b",
    }


def deepseek3(*calls):
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek31(*calls):
    body = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def kimi(*calls):
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def mistral(*calls):
    return "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)


def mistral_args(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def function_outputs(calls):
    one = calls(("get_weather", W))
    return {
        "plain": "It rains in Paris.",
        "one": one,
        "parallel": calls(("get_weather", W), ("search", NESTED), ("ping", "{}")),
        "nested": calls(("search", NESTED)),
        "unicode": calls(("search", UNICODE)),
        "text before": "Let me look." + one,
        "no arguments": calls(("ping", "{}")),
        "truncated in name": one[: one.index("weather")],
        "truncated in arguments": one[: one.index("Paris") + 3],
        "arguments are not JSON": calls(("get_weather", '{"city": Paris}')),
    }


PYTHONIC = {
    "plain": "It rains in Paris.",
    "one": '[get_weather(city="Paris", days=3)]',
    "parallel": "[get_weather(city='Paris', days=3, metric=True), ping(), search(query='x', tags=['a', 'b'])]",
    "nested": "[search(query='a (b) [c]', filters={'lang': ['en', 'fr'], 'deep': {'x': None, 'y': [1, 2.5, -3e2]}}, tags=[])]",
    "unicode": r"""[search(query='Zürich ☔ "quoted" it\'s \\ \n tab\t \u00e9 \x41', limit=1.5)]""",
    "no arguments": "[ping()]",
    "list in text": "[1, 2, 3] are numbers.",
    "link": "[link](http://a.b)",
    "truncated in name": "[get_wea",
    "spaces": "[ get_weather( city = 'Paris' , days = 3 ) , ping( ) ]",
}

COMMAND = {
    "plain": "<|START_RESPONSE|>It rains in Paris.<|END_RESPONSE|>",
    "reasoning": "<|START_THINKING|>The user asks.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
    **{
        key: text
        for key, text in json_outputs(
            lambda name, arguments: f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}',
            "<|START_THINKING|>I call.<|END_THINKING|><|START_ACTION|>",
            "<|END_ACTION|>",
        ).items()
        if key not in ("plain", "empty", "text before", "truncated in name")
    },
}

HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
HARMONY = {
    "plain": "<|channel|>final<|message|>It rains.<|return|>",
    "no header": "It rains.",
    "reasoning": "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
    "one": "<|channel|>analysis<|message|>The user asks.<|end|>" + HARMONY_CALL.format("get_weather", W),
    "parallel": "<|channel|>analysis<|message|>Two.<|end|>" + HARMONY_CALL.format("get_weather", W) + HARMONY_CALL.format("search", NESTED),
    "preamble": "<|channel|>commentary<|message|>I look.<|end|>" + HARMONY_CALL.format("ping", "{}"),
    "recipient in the role": "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}<|call|>",
    "truncated in arguments": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Par',
}

MISTRAL_OLD = {
    key: text
    for key, text in json_outputs(named, "[TOOL_CALLS]", "").items()
}

LLAMA = {
    **json_outputs(parameters, "", "", "; ", listed=False),
    "python tag": "<|python_tag|>" + parameters("get_weather", W),
    "JSON answer": '{"name": "Bob", "age": 3}',
    "type first": '{"type": "function", "name": "get_weather", "parameters": ' + W + "}",
    "list": "[1, 2]",
}

THINKING_CALL = "<think>\nI call.\n</think>\n\n"

FAMILIES = {
    "hermes": {"tools": "hermes", "outputs": {**HERMES, **HERMES_MORE}},
    "qwen3": {
        "tools": "hermes",
        "reasoning": "deepseek_r1",
        "outputs": {key: REASONING[key] for key in REASONING if key not in ("plain", "reasoning tag later")}
        | {"reasoning and call": THINKING_CALL + HERMES["one"]},
    },
    "qwen3_coder": {"tools": "qwen3_coder", "outputs": tagged_outputs(coder)},
    "llama3_json": {"tools": "llama3_json", "outputs": LLAMA},
    "pythonic": {"tools": "pythonic", "outputs": PYTHONIC},
    "llama4_pythonic": {"tools": "llama4_pythonic", "outputs": {"tags": "<|python_start|>" + PYTHONIC["one"] + "<|python_end|>"}},
    "mistral": {"tools": "mistral", "outputs": function_outputs(mistral)},
    "mistral_args": {"tools": "mistral", "outputs": function_outputs(mistral_args)},
    "mistral_old": {"tools": "mistral", "outputs": MISTRAL_OLD},
    "deepseek_v3": {"tools": "deepseek_v3", "outputs": function_outputs(deepseek3)},
    "deepseek_v31": {"tools": "deepseek_v31", "outputs": function_outputs(deepseek31)},
    "deepseek_r1": {
        "reasoning": "deepseek_r1",
        "tools": "deepseek_v3",
        "open": True,
        "outputs": {
            "no opening tag": "The user asks.\n</think>\n\nIt rains.",
            "opening tag": "<think>\nThe user asks.\n</think>\n\nIt rains.",
            "truncated": "The user as",
            "reasoning and call": "I call.\n</think>\n\n" + deepseek3(("get_weather", W)),
        },
    },
    "glm45": {"tools": "glm45", "outputs": tagged_outputs(glm)},
    "glm45_reasoning": {
        "tools": "glm45",
        "reasoning": "glm45",
        "outputs": {
            "reasoning": REASONING["reasoning"],
            "reasoning and call": "\n<think>I call.</think>\n" + glm("get_weather", ("city", "Paris"), ("days", "3")),
        },
    },
    "kimi_k2": {"tools": "kimi_k2", "template": {"thinking": False}, "outputs": function_outputs(kimi)},
    "kimi_k2_thinking": {
        "tools": "kimi_k2",
        "reasoning": "kimi_k2",
        "open": True,
        "outputs": {
            "reasoning": "The user asks.\n</think>\n\nIt rains.",
            "reasoning and call": "I call.</think>" + kimi(("get_weather", W)),
            "call ends reasoning": "I call." + kimi(("get_weather", W)),
        },
    },
    "granite": {"tools": "granite", "outputs": json_outputs(named, "<|tool_call|>", "")},
    "granite_reasoning": {
        "reasoning": "granite",
        "outputs": {
            "reasoning": "Here is my thought process: The user asks. Here is my response: It rains.",
            "plain": "It rains.",
        },
    },
    "granite4": {"tools": "granite4", "outputs": HERMES},
    "phi4_mini": {"tools": "phi4_mini_json", "outputs": json_outputs(named, "functools", "")},
    "command_r": {"tools": "cohere_command3", "reasoning": "cohere_command3", "outputs": COMMAND},
    "nemotron": {"outputs": json_outputs(named, "<TOOLCALL>", "</TOOLCALL>")},
    "harmony": {"tools": "openai", "reasoning": "openai_gptoss", "outputs": HARMONY},
    "json": {
        "outputs": {
            **json_outputs(named, "", ""),
            "fence": "```json\n" + named("get_weather", W) + "\n```",
            "function": '{"type": "function", "function": ' + named("get_weather", W) + "}",
            "string arguments": r'{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}',
        }
    },
}
