"""Renders chat templates as transformers renders them, for src/text/jinja to compare.

usage: make_templates.py                 writes templates.json: hand-written and random templates
       make_templates.py --random N SEED prints N random cases, a JSON object in each line

The reference is the sandboxed Jinja2 environment of transformers 5.5.4; where transformers is not
installed, the same environment is made of jinja2 alone. The clock has a fixed time, in UTC and the C locale.
"""

import copy
import datetime
import json
import os
import random
import re
import sys
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
NOW = datetime.datetime(2024, 11, 21, 8, 25, 5, 123456)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def compiler():
    """Returns the function that compiles a template."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = Clock
        return chat_template_utils._compile_jinja_template
    except ImportError:
        return compile_with_jinja2


def compile_with_jinja2(source):
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_body")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller):
            return caller()

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = NOW.strftime
    return environment.from_string(source)


MESSAGES = [
    {"role": "system", "content": "You are helpful.\n"},
    {"role": "user", "content": "  What's 2 < 3 & \"x\"?  "},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": [1.5, None]}}]},
    {"role": "tool", "content": "é😀\u00a0\u200b"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "items": {"type": "array", "items": {"type": "string"}}},
        "required": ["a"]}}},
]
VARIABLES = {
    "messages": MESSAGES, "tools": TOOLS, "documents": None, "add_generation_prompt": True,
    "bos_token": "<s>", "eos_token": "</s>",
    "s": "Hello, World", "t": " a b\tc\n", "e": "", "u": "Straße ǆ ΑΣ İi", "n": 7, "m": -3, "z": 0, "f": 2.5, "g": 1e-7,
    "h": 1e16, "b": True, "c": False, "o": None, "l": [3, 1, 2], "k": ["b", "A", "c", "a"], "d": {"x": 1, "y": [2, 3], "Z": None},
    "q": [{"a": 1, "b": "x"}, {"a": 2, "b": "Y"}, {"a": 1, "b": "z"}], "w": [[1, 2], [3, 4]], "p": {"items": 5, "keys": "k"},
}  # fmt: skip

# Results that depend on memory addresses or are not supported.
UNSTABLE = re.compile(r" at 0x|<built-in|<bound|<function|<generator|<class")
# The same results with other characters between the letters, as some filters insert them.
UNSTABLE_LETTERS = re.compile(r"ob[a-z]?ject[a-z]?at|iter[a-z]?tor|cycler|joiner|loopcontext")

HAND = r"""
{% if documents is iterable and documents|length > 0 %}x{% else %}y{% endif %}
{% if tools is iterable and tools|length > 0 %}x{% endif %}
{{ none is iterable }} {{ missing is iterable }} {{ missing|length }} {{ 'abc' is sequence }} {{ {} is sequence }}
{{ (l|map('string')) is sequence }} {{ (l|map('string')) is iterable }} {{ l is sequence }} {{ 3 is sequence }} {{ 3 is iterable }}
{% for m in messages %}{{ m.content is iterable and m.content is not string }} {{ m.content is mapping }};{% endfor %}
{{ d.items() is sequence }} {{ d.keys() is iterable }} {{ d.items is callable }} {{ missing is callable }} {{ range is callable }}
{{ 1e-7 }} {{ 1e16 }} {{ 1e15 }} {{ [1e-7, 1e22, 0.1, -0.0] }} {{ {'a': 1e-5} }} {{ (1.0, 2) }} {{ 123456789.123456789 }}
{{ 1e-7 ~ '' }} {{ 1e16|string }} {{ [1e16]|join }} {{ '%s' % 1e16 }} {{ 1e400 }} {{ -1e400 }}
{{ ['\u00a0', '\u200b', '\t', '\x7f', 'é', '😀', "it's", '"', "'\""] }} {{ ['\U0001F600', '\U000e0001'] }}
{% if p.items %}a{% endif %}{% if d.items %}b{% endif %}{{ p['items'] }} {{ d.items is defined }} {{ d.nothing is defined }}
{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %B %-d, %Y %H:%M:%S %p') }}
[{{ strftime_now('%Z') }}|{{ strftime_now('%z') }}|{{ strftime_now('%c|%x|%X|%D|%R|%r|%U|%W|%V|%G|%u|%w|%f|%s|%C|%n|%t|%%|%j|%e|%k|%l|%I|%P|%h|%g|%T|%F|%y') }}]
{{ strftime_now('%Q %E %5Y %_d %-H %^a %#p %03d %Ey %Od') }}
{{ s|e }} {{ '<a href="x">\'&'|e }} {{ '<'|e ~ '<' }} {{ ('<'|e) + '<' }} {{ '<b>'|safe }} {{ ('<'|e)|e }} {{ 'a'|forceescape }}
{{ '\U0001F600' }} {{ '\u00e9' }} {{ '\x41' }} {{ '\101' }} {{ '\q' }} {{ '\a\b\f\v'|length }} {{ 'a\
b' }}
{{ 'a,b,c'.rsplit(',', 1) }} {{ 'a b  c '.rsplit() }} {{ 'a b  c '.rsplit(none, 1) }} {{ ' a b  c '.split(none, 1) }} {{ 'a,b'.split(sep=',') }} {{ 'a,b,c'.split(sep=',', maxsplit=1) }}
{{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'abc'.rpartition('-') }}
{{ 'hello'.index('l') }} {{ 'hello'.rindex('l') }} {{ 'hello'.find('l', 3) }} {{ 'hello'.find('x') }} {{ 'hello'.rfind('l', 0, 3) }} {{ 'hello'.count('l') }} {{ 'é1é2'.find('2') }}
{{ 'hello'.index('x') }}
{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'ab'.ljust(5) }}| {{ 'ab'.rjust(5, '*') }} {{ 'ab'.center(5, '-') }} {{ 'abc'.center(6, '-') }} {{ 'ab'|center(7) }}|
{{ l.copy() }} {{ d.copy() }} {{ l.count(1) }} {{ l.index(2) }} {{ d.get('x') }} {{ d.get('no', 4) }} {{ d.get('no') }}
{{ s|replace('l', 'L', 2) }} {{ s|replace('l', '') }} {{ 'xxhixx'|trim('x') }} {{ 'xxhixx'|trim(chars='x') }} {{ ' a '|trim }}|
{{ '42'|int }} {{ '42.7'|int }} {{ 'x'|int }} {{ 'x'|int(5) }} {{ 'ff'|int(0, 16) }} {{ '0x1f'|int(base=16) }} {{ 3.9|int }} {{ true|int }} {{ none|int(9) }} {{ [] | int }}
{{ '1.5'|float }} {{ 'x'|float }} {{ 'x'|float(2.0) }} {{ 3|float }} {{ none|float }} {{ '1_0.5'|float }} {{ 'inf'|float }}
{{ 'one two, three_four'|wordcount }} {{ 'hello world foo'|truncate(9) }} {{ 'hello world foo'|truncate(9, true) }} {{ 'hello world foo'|truncate(11, false, '..', 0) }}
{{ '<b>a</b>  <i>b</i> &amp; c<!-- x -->'|striptags }} {{ 'a b/c?é'|urlencode }} {{ {'a b': 1, 'c': '/'}|urlencode }} {{ [('a', 1)]|urlencode }}
{{ 'the quick brown fox jumps'|wordwrap(10) }}|{{ 'abcdefghijkl'|wordwrap(5) }}|{{ 'a well-known fact'|wordwrap(8) }}|{{ 'abcdefghijkl mn'|wordwrap(5, false) }}
{{ {'b': 1, 'a': 2, 'B': 0}|dictsort }} {{ {'b': 1, 'a': 2, 'B': 0}|dictsort(true) }} {{ {'b': 1, 'a': 2}|dictsort(false, 'value') }} {{ {'b': 1, 'a': 2}|dictsort(reverse=true) }}
{{ d|tojson }} {{ d|tojson(true) }} {{ 'é'|tojson(True) }} {{ d|tojson(indent=2) }} {{ d|tojson(false, 4) }} {{ d|tojson(sort_keys=true) }} {{ d|tojson(separators=(',', ':')) }} {{ [1e16, 1e-7, 1.0]|tojson }}
{{ {1: 2, none: 3, 1.5: 4}|tojson }} {{ '\u2028</script>'|tojson }} {{ ('a', 1)|tojson }} {{ []|tojson(indent=2) }} {{ d|tojson(indent='--') }}
{{ missing|tojson }}
{{ '%s' % 'x' }} {{ '%s and %s' % ('a', 1) }} {{ '%5.2f|%-6d|%06d|%+d|%x|%#o|%e|%g|%%' % (3.14159, 42, 42, 42, 255, 8, 12345.678, 0.0001) }} {{ '%(a)s' % {'a': 1} }} {{ '%r'|format('a') }} {{ '%c%c' % (65, 'b') }}
{{ '%d' % 3.99 }} {{ '%s' % none }} {{ '%s' % [1] }} {{ '%5s|%-5s|%.2s' % ('ab', 'ab', 'abc') }} {{ '%*d' % (5, 42) }} {{ '%a' % 'é' }} {{ '% d' % 5 }} {{ '%i' % true }}
{{ '%d' % 'x' }}
{{ '%s %s' % 'a' }}
{{ 'a' % 1 }}
{{ '{!r}'.format('a') }} {{ '{} {}'.format(1, 'b') }} {{ '{0} {1} {0}'.format(1, 2) }} {{ '{a}'.format(a=3) }} {{ '{:>5}|{:<5}|{:^5}|{:*^7}'.format(1, 2, 3, 'x') }} {{ '{:05d} {:+d} {:,} {:_} {:x} {:#x} {:b} {:o} {:c}'.format(42, 42, 1234567, 1234567, 255, 255, 5, 8, 65) }}
{{ '{:.2f} {:e} {:g} {:%} {:.1%} {:10.3f}| {:,.2f} {:.3} {:010.2f} {:G}'.format(3.14159, 12345.678, 0.00001, 0.25, 0.256, 2.5, 1234567.891, 3.14159, -2.5, 1e20) }} {{ '{0[x]} {0[y][0]} {1.role}'.format(d, messages[0]) }} {{ '{:{}}|{:{w}.{p}f}'.format('a', 5, 2.5, w=8, p=3) }} {{ '{{}}'.format() }} {{ '{a[b]}'.format_map({'a': {'b': 1}}) }}
{{ '{:d}'.format('x') }}
{{ '{:,}'.format(1234.5) }} {{ '{:.3g} {:.3g} {:#.3g} {:.0f} {:.0e}'.format(1234.5, 0.00012345, 1.0, 2.5, 2.5) }} {{ '{:s}{:10s}|{:.1}'.format('a', 'b', 'cde') }} {{ '{:5}|{:<5}|{}'.format(true, false, none) }} {{ '{!s:>4}{!a}'.format(1, 'é') }}
{{ dict([['a', 1], ['b', 2]]) }} {{ dict(a=1, b=2) }} {{ dict(d, x=9) }} {{ dict() }}
{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }} {{ f(1, 3, 4, 5) }} {{ f(1, c=3) }} {{ f() }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=1) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f.name }} {{ f.arguments }} {{ f is callable }} {{ f }}
{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{{ n }}{% endcall %}
{% macro f(l) %}{% for x in l %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(x, i) f([4, 5]) %}{{ i }}:{{ x }};{% endcall %}
{% macro a() %}{{ caller() }}{% endmacro %}{{ a() }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }} {{ c.current }}{{ c.reset() }}{{ c.current }}
{% set j = joiner() %}{% for x in l %}{{ j() }}{{ x }}{% endfor %} {% set j = joiner('|') %}{{ j() }}{{ j() }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('o', 'e') }}{{ loop.depth }};{% endfor %}
{% for x in l if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% if not loop.last %},{% endif %}{% else %}none{% endfor %}
{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }} {% endfor %}
{% for i in w recursive %}{{ loop.depth }}{% if i is iterable %}[{{ loop(i) }}]{% else %}{{ i }}{% endif %}{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for k, v in d|items %}{{ k }}{% endfor %}
{% for a, b in w %}{{ a }}{{ b }}{% endfor %}{% for a, b in [[1]] %}{{ a }}{% endfor %}
{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}
{% for x in 'añb' %}{{ x }}.{% endfor %}{% for x in none %}{% endfor %}
{% for x in missing %}x{% else %}empty{% endfor %}
{% set ns = namespace(a=1) %}{% set ns.b = 2 %}{% for x in l %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }} {{ ns.b }} {{ ns.c }} {{ ns }}
{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}
{% set x %}a{{ n }}b{% endset %}{{ x }} {% set x | upper | trim %} a {% endset %}{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }} {% set (a, b) = [3, 4] %}{{ a }}{{ b }}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% filter upper %}abc{{ s }}{% endfilter %}{% filter replace('a', 'b') | upper %}abc{% endfilter %}
{% raw %}{{ x }}{% if %}{% endraw %}{# comment #}{{ '{{' }}
{%- raw -%}  a  {%- endraw -%}  b
{% generation %}abc{{ n }}{% endgeneration %}
{% block x %}a{{ n }}{% endblock %}{% block y scoped %}b{% endblock y %}
{% print n, s %}
{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 3 }} {{ 2 ** -1 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 2 ** 0.5 }} {{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 10 ** 20 }}
{{ 1 / 0 }}
{{ 'a' * 3 }} {{ [1] * 2 }} {{ (1, 2) * 2 }} {{ 3 * 'ab' }} {{ 'a' * -1 }}| {{ [1] + [2] }} {{ (1,) + (2,) }} {{ 'a' + 'b' }}
{{ 'a' + 1 }}
{{ [1] + (2,) }}
{{ true + true }} {{ -true }} {{ +true }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 1 != 2 }} {{ none == none }} {{ missing == missing }} {{ missing == none }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ 1 in [1, 2] }} {{ 'x' in d }} {{ 'ell' in 'hello' }} {{ 3 not in l }} {{ 1 in missing }} {{ 2 in range(5) }} {{ [1] in [[1]] }} {{ 2 in d.values() }} {{ ('x', 1) in d.items() }}
{{ 1 in 'abc' }}
{{ 1 in 5 }}
{{ l[0] }} {{ l[-1] }} {{ l[1:] }} {{ l[::-1] }} {{ l[:2] }} {{ l[10:] }} {{ l[-2:] }} {{ 'hello'[1:3] }} {{ 'hello'[::2] }} {{ 'añb'[1] }} {{ (1, 2, 3)[1:] }} {{ range(10)[2:5] }} {{ range(10)[3] }} {{ l[true] }}
{{ l[10] }} {{ l[10] is defined }} {{ l['x'] is defined }} {{ d.x }} {{ d['x'] }} {{ d.no }} {{ l.0 }} {{ w.0.1 }} {{ d['no'] is undefined }} {{ none.x is defined }} {{ n.real }}
{{ d.no.no }}
{{ missing.x }}
{{ missing['x'] }}
{{ missing() }}
{{ missing + 1 }}
{{ missing ~ 'a' }} {{ missing or 'b' }} {{ not missing }} {{ missing|default('c') }} {{ ''|default('d', true) }} {{ none|d('e') }} {{ 0|default('f', boolean=true) }}
{{ none.foo.bar }}
{{ l.append(1) }}
{{ l.append is defined }} {{ d.update is defined }} {{ d.pop is defined }} {{ s.__class__ is defined }} {{ d.__len__ is defined }}
{{ s.__class__ }}
{{ 'a' if false }}|{{ 'a' if true else 'b' }}|{{ 'a' if false else 'b' if false else 'c' }}|{{ ('a' if false) is defined }}
{{ [1, 2,] }} {{ (1,) }} {{ () }} {{ {} }} {{ {'a': 1,} }} {{ 1, 2 }} {{ (1) }} {{ [] }}
{{ 'a' 'b' }} {{ "a" 'b' "c" }} {{ 1_000 }} {{ 0x1f }} {{ 0b11 }} {{ 0o17 }} {{ 1e3 }} {{ 1.5e-3 }} {{ 1_0.5 }}
{{ l|sum }} {{ l|min }} {{ l|max }} {{ []|max }} {{ l|first }} {{ l|last }} {{ []|first }} {{ l|length }} {{ l|count }} {{ l|sort }} {{ l|sort(reverse=true) }} {{ l|reverse|list }} {{ 'abc'|reverse }} {{ k|sort }} {{ k|sort(case_sensitive=true) }} {{ k|min }} {{ k|max(case_sensitive=true) }}
{{ q|sum(attribute='a') }} {{ q|map(attribute='b')|list }} {{ q|map(attribute='no', default='?')|list }} {{ q|selectattr('a', 'equalto', 1)|list }} {{ q|rejectattr('a', 'eq', 1)|list }} {{ q|selectattr('a')|list|length }} {{ l|select('odd')|list }} {{ l|reject('odd')|list }} {{ l|select|list }} {{ l|map('string')|join('-') }} {{ q|sort(attribute='b')|map(attribute='b')|join }} {{ q|sort(attribute='a,b')|map(attribute='b')|join }} {{ q|groupby('a') }} {% for g in q|groupby('a') %}{{ g.grouper }}:{{ g.list|length }};{% endfor %} {{ q|unique(attribute='a')|list }} {{ k|unique|list }} {{ q|max(attribute='a') }}
{{ l|batch(2)|list }} {{ l|batch(2, 'x')|list }} {{ l|slice(2)|list }} {{ l|slice(2, 'x')|list }} {{ range(10)|slice(3)|list }} {{ range(5)|list }} {{ range(1, 10, 3)|list }} {{ range(5, 0, -2)|list }} {{ range(3) }}
{{ 3.7|round }} {{ 2.5|round }} {{ 3.14159|round(2) }} {{ 3|round }} {{ 1234.5|round(-2) }} {{ 2.675|round(2) }} {{ 3.2|round(0, 'ceil') }} {{ 3.7|round(method='floor') }} {{ 3|round(1, 'ceil') }} {{ -3|abs }} {{ -2.5|abs }} {{ 1234|filesizeformat }} {{ 1234567|filesizeformat(true) }} {{ 1|filesizeformat }} {{ 0.5|round }} {{ 1.5|round }} {{ 42.55|round(1, 'floor') }}
{{ 'a\nb\n\nc'|indent }}|{{ 'a\nb\n\nc'|indent(2, true) }}|{{ 'a\nb\n\nc'|indent(width=2, blank=true) }}|{{ 'a\nb'|indent('> ', true) }}|{{ ''|indent }}|
{{ 'hello world-foo (bar'|title }} {{ 'hELLO'|capitalize }} {{ 'AbC'|lower }} {{ 'ß'|upper }} {{ u|title }} {{ u.title() }} {{ u.capitalize() }} {{ u.upper() }} {{ u.lower() }} {{ u.swapcase() }} {{ "it's o'clock".title() }} {{ "it's o'clock"|title }}
{{ 'abc'.isalpha() }} {{ 'ab1'.isalnum() }} {{ '12'.isdigit() }} {{ '²'.isdigit() }} {{ '²'.isdecimal() }} {{ '½'.isnumeric() }} {{ ' \t'.isspace() }} {{ 'Ab Cd'.istitle() }} {{ 'ab'.islower() }} {{ 'AB'.isupper() }} {{ ''.isalpha() }} {{ 'a_1'.isidentifier() }} {{ 'é'.isascii() }} {{ 'a\n'.isprintable() }}
{{ 'a\nb\r\nc\x0bd\u2028e'.splitlines() }} {{ 'a\nb'.splitlines(true) }} {{ ''.splitlines() }} {{ 'a\tb'.expandtabs(4) }} {{ 'abc'.startswith('a') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith('bc', 1) }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ '-'.join(['a', 'b']) }} {{ 'xyx'.strip('x') }} {{ 'xyx'.lstrip('x') }} {{ 'xyx'.rstrip('x') }} {{ 'aXb'.casefold() }} {{ 'abc'.translate({97: 'x', 98: none}) }}
{{ '-'.join([1]) }}
{{ ''.split(',') }} {{ ''.split() }} {{ 'a,b,,c'.split(',') }} {{ 'abc'.split('') }}
{{ 'abc'.replace('', '-') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'abc'.count('') }} {{ 'aXbX'.rfind('X') }}
{{ s is string }} {{ n is number }} {{ b is number }} {{ b is boolean }} {{ n is integer }} {{ b is integer }} {{ f is float }} {{ o is none }} {{ d is mapping }} {{ l is mapping }} {{ n is odd }} {{ n is even }} {{ 9 is divisibleby 3 }} {{ 'a' is lower }} {{ 'A' is upper }} {{ n is sameas n }} {{ b is true }} {{ c is false }} {{ 1 is in l }} {{ 'upper' is filter }} {{ 'x' is filter }} {{ 'odd' is test }} {{ n is eq 7 }} {{ n is gt 3 }} {{ n is not none }} {{ n is not lt 3 }} {{ 2 is ge(2) }} {{ ('<'|e) is escaped }}
{{ l is filter }}
{{ d is test }}
{{ d|xmlattr }} {{ {'class': 'a"b', 'x': none}|xmlattr }} {{ {'a b': 1}|xmlattr }}
{{ d|list }} {{ d.keys()|list }} {{ d.values()|list }} {{ d.items()|list }} {{ d.keys() }} {{ d.values() }} {{ d.items() }} {{ 'abc'|list }} {{ d|length }} {{ d|first }} {{ d|last }} {{ d|join(',') }}
{{ l|attr('count') is callable }} {{ d|attr('x') is defined }} {{ d|attr('items') is defined }}
{{ not true and false }} {{ not (true and false) }} {{ true or false and false }} {{ 1 and 2 }} {{ 0 or 'a' }} {{ '' and 1 }}|{{ not none }} {{ -1|abs }} {{ 1 + 2 * 3 - 4 // 2 ~ 'x' }} {{ 1 ~ 2 + 3 }} {{ 2 * 3 ~ 4 }} {{ 'a' ~ none ~ true ~ 1.0 ~ [1] }}
   {% if true %}   
  a
   {% endif %}   
{%+ if true %} x {%+ endif %}
{% if true -%}
   b   
{%- endif %}
  {#- c -#}  d {{- ' e' -}}  f
{% if n > 5 %}a{% elif n > 3 %}b{% else %}c{% endif %}
{{ lipsum is defined }} {{ namespace is callable }} {{ loop is defined }} {{ caller is defined }} {{ varargs is defined }}
{{ raise_exception('No!') }}
{{ x|nosuch }}
{% if false %}{{ x|nosuch }}{% endif %}ok
{% if false %}{{ x is nosuch }}{% endif %}ok
{% for x in [] %}{{ x|nosuch }}{% endfor %}
{% include 'x' %}
{% if false %}{% include 'x' %}{% endif %}ok
{{ messages|tojson }} {{ tools|tojson(indent=4) }}
{{ messages }} {{ tools }}
{% macro d(s, i=0) %}{{ '  ' * i }}{{ s.type }}{% for k, v in (s.properties or {}).items() %}
{{ k }}: {{ d(v, i + 1) }}{% endfor %}{% endmacro %}{{ d(tools[0].function.parameters) }}
{% macro f(x) %}{{ y }}{% endmacro %}{% set y = 1 %}{{ f(1) }}{% set y = 2 %}{{ f(1) }}
{% for i in l %}{% macro f() %}{{ i }}{% endmacro %}{{ f() }}{% endfor %}
{{ f(*l) if false }}{% macro f(a, b, c) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(*l) }}{{ f(**{'a': 1, 'b': 2, 'c': 3}) }}{{ f(1, *[2, 3]) }}{{ f(1, b=2, **{'c': 9}) }}
{{ '%s' % (l,) }} {{ '%s' % l }} {{ '%(x)s %(Z)s' % d }} {{ '%%' % () }} {{ '%s' % d }}
{{ [1, [2, [3, {'a': (4,)}]]] }} {{ [true, none, 1.5, 'a'] }} {{ {'a': {'b': []}} }} {{ {1: 2, true: 3} }} {{ {1: 2, 1.0: 3, 'a': 4} }}
{{ {[1]: 2} }}
{{ 12345678901234567890 }} {{ 2 ** 100 }} {{ 10 ** 30 // 7 }} {{ 18446744073709551616 % 1000 }}
{{ (1, 2) == [1, 2] }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1.0} }} {{ 'a' == 'a' }} {{ range(3) == range(3) }} {{ d.keys() == d.keys() }}
{% set x = messages | selectattr('role', 'eq', 'user') | map(attribute='content') | first %}{{ x }}
{% set content = messages[1].content | trim %}{{ '[INST] ' + content + ' [/INST]' }}{{ bos_token ~ eos_token }}
{{ messages[-1]['content'] | selectattr('type', 'eq', 'text') | map(attribute='text') | join('\n') }}
{% for message in messages | rejectattr('role', 'in', ['system', 'tool']) %}{{ loop.index }}{{ message.role }}{% endfor %}
{{ [('a\nb<'|e)|indent] }}
{{ [('a'|e)|indent(first=true)] }}
{{ [('a'|e)|indent('<')] }}
{{ [(s|e)|trim] }}
{{ [(s|e)|upper] }}
{{ [(s|e)|title] }}
{{ [(s|e)|capitalize] }}
{{ [(s|e)|center(20)] }}
{{ [(s|e)|truncate(3)] }}
{{ [(s|e)|replace('l','<')] }}
{{ [(s|e)|wordwrap(3)] }}
{{ [(s|e)|striptags] }}
{{ [(s|e)|join] }}
{{ [['a'|e,'<']|join] }}
{{ [[(s|e),'<']|join('<')] }}
{{ [(s|e)|lower] }}
{{ [(s|e)|reverse] }}
{{ [(s|e)|string] }}
{{ [(s|e)|first] }}
{{ [(s|e)|default('x')] }}
{{ [(s|e)[0]] }}
{{ [(s|e)[1:2]] }}
{{ [(s|e)+'<'] }}
{{ ['<'+(s|e)] }}
{{ [(s|e)*2] }}
{{ [(s|e).upper()] }}
{{ [(s|e).split(',')] }}
{{ [(s|e).strip()] }}
{{ [(s|e).format(1)] }}
{{ [(s|e).replace('l','<')] }}
{{ [(s|e).join(['<'])] }}
{{ [(s|e)~'<'] }}
{{ [(s|e).partition(',')] }}
{{ [(s|e).zfill(20)] }}
{{ [(s|e).center(30)] }}
{{ [(s|e).ljust(30)] }}
{{ [(s|e).title()] }}
{{ [(s|e).swapcase()] }}
{{ [(s|e).capitalize()] }}
{{ [(s|e).splitlines()] }}
{{ [(s|e).expandtabs()] }}
{{ [(s|e).casefold()] }}
{{ [(s|e).removeprefix('H')] }}
{{ ['%s'|e % '<'] }}
{{ ['{}'|e] }}
{{ [('{}<'|safe).format('<')] }}
{{ [('%s<'|safe) % '<'] }}
{{ [('%s<'|safe) % ('<'|safe,)] }}
{% for i in range(3) %}{% with a=i %}{% if a==1 %}{% break %}{% endif %}{% endwith %}{{ i }}{% endfor %}
{% for i in range(3) %}{% filter upper %}a{% if i==1 %}{% break %}{% endif %}{% endfilter %}{{ i }}{% endfor %}
{% for i in range(3) %}{% set q %}{% if i==1 %}{% continue %}{% endif %}x{% endset %}{{ i }}{{ q }}{% endfor %}
{{ ['nan'|float, 'nan'|float]|unique|list }} {{ '1İ'|float }} {{ [range(3), range(3), range(4)]|unique|list }}
{% do l %}
{{ 1 if }}
{{ l[ }}
{% if %}x{% endif %}
{% endif %}
{% for x in l %}
{{ 'a
{# a
{{ (1 }}
{{ a b }}
{% set 1 = 2 %}
{% set true = 2 %}
{{ 1 is odd is even }}
{% for loop in l %}{% endfor %}
{% break %}
{% macro f(a=1, b) %}{% endmacro %}
{{ f(a=1, 2) }}
{{ f(a=1, a=2) }}
{{ 'a' is }}
{{ 'abc'|upper() |lower }} {{ ('a', 'b')|join(',') }} {{ {'a': 1}|length }} {{ 5|string|length }} {{ [1,2,3]|map('multiply', 2) is defined }}
{{ s.split(', ')[0].lower().replace('h', 'j')|upper }} {{ (s|lower).split('o')|length }} {{ s[0].lower() + s[1:] }} {{ s[:-1][::-1] }}
{{ ''.join(k) }} {{ k|join(', ', attribute=0) }} {{ w|map('first')|list }} {{ w|map('join', '-')|list }} {{ w|sum(start=[]) }} {{ k|map('upper')|list }}
{{ 1.0 }} {{ 100.0 }} {{ 1.10 }} {{ 5e-324 }} {{ 1.7976931348623157e308 }} {{ 0.1 + 0.2 }} {{ 1 / 3 }} {{ 2 / 3 * 3 }} {{ 1e21 }} {{ 123e18 }} {{ -1e-5 }} {{ 0.0001 }} {{ 0.00001 }}
"""


def hand_written():
    """Returns one template for each entry above. Other lines continue the entry before them."""
    templates, lines = [], HAND.strip("\n").split("\n")
    joined = {"   {% if true %}   ", "  a", "{% if true -%}", "   b   ", "{{ 'a\nb' }}"}
    pending = ""
    for line in lines:
        pending += line
        if line in joined or line.endswith("\\") or line.endswith(".items() %}"):
            pending += "\n"
            continue
        templates.append(pending)
        pending = ""
    return templates


NAMES = ["s", "t", "e", "u", "n", "m", "z", "f", "g", "h", "b", "c", "o", "l", "k", "d", "q", "w", "p", "missing", "messages", "tools"]
LITERALS = ["1", "0", "-2", "2.5", "1e-7", "1e16", "'a'", "'x y'", '"it\'s"', "''", "'é😀'", "none", "true", "false", "[]", "[1, 'b', none]",
            "{}", "{'a': 1, 'b': [2]}", "(1, 2)", "(1,)", "'\\n\\t'", "'\\u00a0'", "'12'", "'-3.5'", "range(4)", "[[1, 2], [3, 4]]"]  # fmt: skip
TESTS = ["odd", "even", "defined", "undefined", "none", "boolean", "false", "true", "integer", "float", "lower", "upper", "string",
         "mapping", "number", "sequence", "iterable", "callable", "escaped", "divisibleby(2)", "eq(1)", "ne('a')", "gt(1)", "ge(2)",
         "lt('b')", "le(3)", "in([1, 'a', none])", "sameas(none)", "filter", "test"]  # fmt: skip
FILTERS = ["abs", "attr('x')", "batch(2)|list", "batch(2, 0)|list", "capitalize", "center(9)", "count", "default('?')", "default('?', true)",
           "dictsort", "dictsort(false, 'value')", "e", "escape", "filesizeformat", "first", "float", "float(1.5)", "forceescape", "groupby('a')|list",
           "indent", "indent(2, true)", "int", "int(7)", "int(0, 8)", "items|list", "join", "join(', ')", "join('-', attribute='a')", "last", "length", "list",
           "lower", "map('string')|list", "map('upper')|list", "map(attribute='a')|list", "map(attribute='a', default=0)|list", "max", "min",
           "reject('odd')|list", "rejectattr('a')|list", "replace('a', 'b')", "replace('', '.')", "reverse", "reverse|list", "round", "round(1)", "round(1, 'floor')", "safe", "select|list",
           "select('string')|list", "selectattr('a', 'eq', 1)|list", "slice(2)|list", "sort", "sort(reverse=true)", "string", "striptags",
           "sum", "title", "tojson", "tojson(indent=1)", "trim", "trim('a')", "truncate(5)", "truncate(5, true, '')", "unique|list", "upper",
           "urlencode", "wordcount", "wordwrap(5)", "xmlattr", "format(1)", "format('a', 2)"]  # fmt: skip
METHODS = ["upper()", "lower()", "title()", "capitalize()", "swapcase()", "strip()", "lstrip('a ')", "rstrip()", "split()", "split('a')",
           "split(' ', 1)", "rsplit(' ', 1)", "rsplit(none, 1)", "splitlines()", "partition(' ')", "rpartition('o')", "find('o')", "rfind('o')", "find('a', 1)", "index('a')",
           "count('a')", "count(1)", "index(1)", "replace('a', 'zz')", "replace('o', '', 1)", "zfill(6)", "ljust(6, '.')", "rjust(6)", "center(7, '-')",
           "startswith('H')", "endswith(('d', 'x'))", "isalpha()", "isdigit()", "isalnum()", "isupper()", "islower()", "isspace()", "istitle()",
           "isnumeric()", "isidentifier()", "isprintable()", "casefold()", "expandtabs(3)", "removeprefix('He')", "removesuffix('d')", "join(['a', 'b'])", "join('ab')",
           "format(1, a=2)", "copy()", "get('x')", "get('no', 1)", "items()", "keys()", "values()", "items()|list", "bit_length()", "is_integer()", "append(1)", "pop()"]  # fmt: skip
FORMATS = ["'{}'.format(%s)", "'{:>8}'.format(%s)", "'{:08.2f}'.format(%s)", "'{!r:^12}'.format(%s)", "'{:,}'.format(%s)", "'{:+.1e}'.format(%s)",
           "'{:#x}'.format(%s)", "'{:_d}'.format(%s)", "'{:.3}'.format(%s)", "'{:g}'.format(%s)", "'{:%%}'.format(%s)", "'{:<6}|'.format(%s)", "'{0!s:*>5}'.format(%s)",
           "'%%s' %% (%s,)", "'%%r' %% (%s,)", "'%%d' %% (%s,)", "'%%5.1f' %% (%s,)", "'%%-6s|' %% (%s,)", "'%%+05d' %% (%s,)", "'%%x' %% (%s,)", "'%%g' %% (%s,)", "'%%e' %% (%s,)", "'%%s' %% %s"]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
SUBSCRIPTS = ["[0]", "[-1]", "[1:]", "[:2]", "[::-1]", "[1:3]", "['x']", "['a']", "[99]", ".x", ".a", ".items", ".0", ".length", "[::2]", "[-2:]", "[none]", "[1.0]", "[true]"]


def expression(rng, depth=3):
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(NAMES if rng.random() < 0.6 else LITERALS)
    inner = lambda: expression(rng, depth - 1)  # noqa: E731
    kind = rng.randrange(13)
    if kind < 3:
        return f"({inner()})|{rng.choice(FILTERS)}"
    if kind < 5:
        return f"({inner()}).{rng.choice(METHODS)}"
    if kind == 5:
        return f"({inner()}) is {rng.choice(['', 'not '])}{rng.choice(TESTS)}"
    if kind < 8:
        return f"({inner()}) {rng.choice(OPERATORS)} ({inner()})"
    if kind == 8:
        # Jinja folds constants. If a constant has no slices, its slice is undefined there, but an error elsewhere.
        subscript = rng.choice(SUBSCRIPTS)
        value = rng.choice(NAMES) if ":" in subscript else inner()
        return f"({value}){subscript}"
    if kind == 9:
        return rng.choice(FORMATS) % inner()
    if kind == 10:
        return f"[{inner()}, {inner()}]"
    if kind == 11:
        return f"({inner()} if {inner()} else {inner()})"
    return rng.choice(["-", "+", "not "]) + f"({inner()})"


SPACES = ["", "", "", " ", "\n", "  \n ", "\n\n", "x", "\t"]


def statement(rng, depth=2):
    a, b = (rng.choice(["", "", "-", "+"]) if True else "" for _ in range(2))
    b = b.replace("+", "")
    space = lambda: rng.choice(SPACES)  # noqa: E731
    body = lambda: space() + (statement(rng, depth - 1) if depth else "{{ %s }}" % expression(rng, 1)) + space()  # noqa: E731
    kind = rng.randrange(8)
    if kind == 0:
        return "{%%%s if %s %s%%}%s{%%%s else %s%%}%s{%%%s endif %s%%}" % (a, expression(rng, 2), b, body(), a, b, body(), a, b)
    if kind == 1:
        inside = rng.choice(["{{ loop.index }}", "{{ loop.last }}", "{{ i }}", "{{ loop.length }}", "{{ loop.nextitem }}", "{{ loop.revindex0 }}"])
        test = rng.choice(["", "", " if i", " if i is string"])
        return "{%%%s for i in %s%s %s%%}%s%s{%%%s else %%}%s{%% endfor %s%%}" % (a, expression(rng, 1), test, b, inside, body(), a, body(), b)
    if kind == 2:
        return "{%%%s set v = %s %s%%}%s{{ v }}" % (a, expression(rng, 2), b, space())
    if kind == 3:
        return "{%%%s set v %s%%}%s{%% endset %%}[{{ v }}]" % (a, b, body())
    if kind == 4:
        return "{%% macro mac(a, b=%s) %s%%}%s{{ a }}{{ b }}{%% endmacro %%}{{ mac(%s) }}" % (expression(rng, 1), b, space(), expression(rng, 1))
    if kind == 5:
        return "{#%s c %s#}%s{{%s %s %s}}%s" % (a, b, space(), a.replace("+", ""), expression(rng, 2), b, space())
    if kind == 6:
        return "{%%%s with v = %s %s%%}%s{{ v }}{%% endwith %%}" % (a, expression(rng, 1), b, body())
    return "{%% filter %s %%}%s{%% endfilter %%}" % (rng.choice(["upper", "trim", "replace('a', 'b')", "indent(2)", "length"]), body())


def random_template(rng):
    if rng.random() < 0.7:
        return "{{ %s }}" % expression(rng)
    return "".join(rng.choice(SPACES) + statement(rng) for _ in range(rng.randrange(1, 4)))


def render(compile_template, template):
    """Returns the case of a template, or None if its output differs between runs."""
    case = {"template": template}
    try:
        case["rendered"] = compile_template(template).render(**copy.deepcopy(VARIABLES))
        case["rendered"].encode()
    except Exception as e:  # noqa: BLE001
        case.pop("rendered", None)
        case["error"] = f"{type(e).__name__}: {e}"[:200]
    letters = re.sub("[^a-z]", "", case.get("rendered", "").lower())
    unstable = UNSTABLE.search(case.get("rendered", "")) or UNSTABLE_LETTERS.search(letters)
    unstable = unstable or re.search(r"reverse.*\|replace\(''", template)
    if unstable or "too large" in case.get("error", "") or "digits" in case.get("error", ""):
        return None
    return case


def random_cases(compile_template, count, seed):
    rng = random.Random(seed)
    while count:
        case = render(compile_template, random_template(rng))
        # Most random templates are errors. Keep only some of them.
        if case and ("rendered" in case or rng.random() < 0.2):
            count -= 1
            yield case


MOMENTS = ["1970-01-01T00:00:00", "2000-02-29T11:59:59.000001", "2024-11-21T08:25:05.123456", "2024-12-31T23:59:59", "2021-01-01T12:00:00",
           "2023-01-01T00:30:00", "2026-12-28T13:05:09", "2100-02-28T23:59:59", "2016-01-03T01:01:01", "2020-12-31T00:00:00"]  # fmt: skip
LETTERS = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%fQLN"


def dates():
    """Yields formats of times in UTC: each letter with each flag and with a width."""
    formats = [f"%{flag}{letter}|" for letter in LETTERS for flag in ["", "-", "_", "0", "^", "#", "5", "E", "O"]]
    formats += ["%A %d %B %Y %H:%M:%S %p %j", "", "%", "a%", "%5", "%-", "é%Yü", "%%Y", "%d %b %Y", "%010Y", "%_5d", "%-5d"]
    cases = []
    for moment in MOMENTS:
        time_ = datetime.datetime.fromisoformat(moment)
        since = time_ - datetime.datetime(1970, 1, 1)
        for format_ in formats:
            cases.append([format_, since.days * 86400 + since.seconds, since.microseconds, time_.strftime(format_)])
    return cases


def main():
    warnings.simplefilter("ignore")
    compile_template = compiler()
    if sys.argv[1:2] == ["--random"]:
        for case in random_cases(compile_template, int(sys.argv[2]), int(sys.argv[3])):
            print(json.dumps(case))
        return
    cases = [case for case in (render(compile_template, template) for template in hand_written()) if case]
    cases = [case for case in cases if "strftime_now" not in case["template"]] + list(random_cases(compile_template, 600, 1))
    with open(os.path.join(HERE, "templates.json"), "w") as file:
        json.dump({"variables": VARIABLES, "cases": cases, "dates": dates()}, file, indent=1, ensure_ascii=False)
        file.write("\n")
    print(f"{len(cases)} cases, {sum('error' in case for case in cases)} errors")


if __name__ == "__main__":
    main()
