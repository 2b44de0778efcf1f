"""Chat templates in the style of popular model families, and the chats to render with them."""

USER = {"role": "user", "content": "Hello, who are you?"}
PADDED = {"role": "user", "content": "  Hello, \n who are you?\n\n"}
REPLY = {"role": "assistant", "content": 'I am a "model" <b>&amp;</b> 😀.'}
AGAIN = {"role": "user", "content": "Et après ?"}
SYSTEM = {"role": "system", "content": "You answer\nbriefly."}
LONG = [SYSTEM, USER, REPLY, AGAIN]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, in °C",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "name": "weather", "content": '{"t": 21.5}'}

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

LLAMA31 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message is pulled out, so that the tools can be put into it. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

CHATML = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The template has line breaks between the tags, which trim_blocks must remove.
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

INDENTED = """{{ bos_token }}
{% for message in messages %}
    {% if loop.first %}
        First of {{ loop.length }}:
    {% elif loop.last %}
        Last ({{ loop.revindex0 }} left):
    {% else %}
        {{- "" }} {{ loop.index }}/{{ loop.length }}
    {%- endif %}
    {{ message.role | upper | replace("S", "Z") }}: {{ message.content }}
    {# a comment on its own line #}
    {%+ if not loop.last %}---{% endif +%}
{% endfor %}
{{ "done" if not add_generation_prompt else "your turn" }}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nfunction signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
        {%- if message == user_messages[-1] %}{{ "(last)" }}{% endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""

# Uses break and continue, which need an extension, a macro, a map and joins.
CONTROLS = """{%- macro turn(role, text, mark='#') -%}
{{ mark }}{{ role.title() }}: {{ text }}
{% endmacro -%}
{%- set names = messages | map(attribute='role') | list -%}
{{ names | join(',') }} {{ names | unique | sort | join('+') }} {{ names | first }} {{ names | last }}
{% for message in messages if message.role != 'tool' -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {{- turn(message.role, message.content, mark='> ') if loop.index is odd else turn(message.role, message['content']) -}}
    {%- if 'STOP' in message.content -%}{%- break -%}{%- endif -%}
{%- else -%}
nothing
{%- endfor -%}
{%- set first = messages[0] -%}
{%- for key, value in first.items() %}[{{ key }}={{ value | length }}]{% endfor %}
{%- if add_generation_prompt and messages[-1].role not in ['assistant', 'tool'] %} {{ bos_token or 'no bos' }}{% endif %}"""

METHODS = """{% set first = messages[0] -%}
{{ first.get('name', 'anonymous') }} {{ first.content.split(' ')[0].lower() }}
{{ (first.missing | default('x')).replace('x', 'y') }} {{ first['content'][:5] }}
{{ first.content[-3:] }} {{ messages[-1]['role'][0] | capitalize }}
{{ first.content.upper().startswith('HE') }} {{ ' a b '.lstrip() }}|{{ ' a b '.rstrip() }}|
{{ 'a,b,c'.split(',', 1) | join(';') }} {{ 'ab' in 'cabd' }} {{ 'x'.join(['1', '2']) }}"""

# Python renders True and None, not true and none.
VALUES = """{{ 7 // 2 }} {{ 2 ** 3 }} {{ -7 % 3 }} {{ 1.0 }} {{ 3 / 2 }} {{ 'a' ~ 1 }}
{{ true }} {{ none }} {{ [1, 'a', none] }} {{ {'k': false} }} {{ '%s-%d' | format('a', 7) }}"""

PARTS = """{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>' }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}
{% endif %}"""
PARTED = {
    "role": "user",
    "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}],
}

TOJSON = "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ tools | tojson }}"
ESCAPES = {
    "role": "user",
    "content": "<a href='x'>&\"\\ \n\t é 😀 \u2028 \u007f \u0001",
    "n": [1, -2.5, True, None, {}, []],
}
NUMBERS = {"role": "user", "content": "n", "n": [1e20, 1e-7, 0.1, -0.0, 100.0, 2**53]}

CASES = [
    dict(name="llama2", template=LLAMA2, messages=[USER]),
    dict(name="llama2_system", template=LLAMA2, messages=LONG),
    dict(name="llama2_padded", template=LLAMA2, messages=[SYSTEM, PADDED]),
    dict(name="llama2_done", template=LLAMA2, messages=[USER, REPLY], generate=False),
    dict(name="llama2_order_error", template=LLAMA2, messages=[USER, AGAIN]),
    dict(name="llama3", template=LLAMA3, messages=LONG, bos="<|begin_of_text|>"),
    dict(name="llama3_padded", template=LLAMA3, messages=[PADDED, REPLY], generate=False),
    dict(name="llama31", template=LLAMA31, messages=LONG),
    dict(name="llama31_tools", template=LLAMA31, messages=[USER, CALL, RESULT], tools=TOOLS),
    dict(name="chatml", template=CHATML, messages=LONG, eos="<|im_end|>"),
    dict(name="chatml_done", template=CHATML, messages=[USER, REPLY], generate=False),
    dict(name="zephyr", template=ZEPHYR, messages=LONG),
    dict(name="zephyr_done", template=ZEPHYR, messages=LONG[:3], generate=False),
    dict(name="indented", template=INDENTED, messages=LONG),
    dict(name="indented_one", template=INDENTED, messages=[USER], generate=False),
    dict(name="qwen", template=QWEN, messages=LONG),
    dict(name="qwen_tools", template=QWEN, messages=[SYSTEM, USER, CALL, RESULT], tools=TOOLS),
    dict(
        name="qwen_think",
        template=QWEN,
        messages=[
            USER,
            {"role": "assistant", "content": "<think>\nOld.\n</think>\n\nA."},
            AGAIN,
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nB."},
        ],
        generate=False,
    ),
    dict(name="gemma", template=GEMMA, messages=[USER, REPLY, AGAIN], bos="<bos>"),
    dict(name="gemma_system_error", template=GEMMA, messages=[SYSTEM, USER], bos="<bos>"),
    dict(name="mistral", template=MISTRAL, messages=LONG),
    dict(name="mistral_plain", template=MISTRAL, messages=[USER, REPLY, AGAIN]),
    dict(name="controls", template=CONTROLS, messages=LONG),
    dict(
        name="controls_stop",
        template=CONTROLS,
        messages=[USER, {"role": "assistant", "content": "STOP"}, AGAIN],
        bos=None,
    ),
    dict(name="methods", template=METHODS, messages=LONG),
    dict(name="values", template=VALUES, messages=LONG),
    dict(name="parts", template=PARTS, messages=[SYSTEM, PARTED]),
    dict(name="tojson", template=TOJSON, messages=[ESCAPES], tools=TOOLS),
    dict(name="tojson_no_tools", template=TOJSON, messages=[ESCAPES]),
    dict(name="tojson_numbers", template="{{ messages | tojson }}", messages=[NUMBERS]),
    dict(name="no_bos", template="{{ bos_token }}|{{ messages[0].content }}", messages=[USER],
         bos=None, eos=None),
]  # fmt: skip
