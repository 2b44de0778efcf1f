"""Records which texts a pattern matches in Python's `re` and in ECMA-262 (node).

  python3 patterns.py             writes python.json and ecma.json beside this script
  python3 patterns.py random N    prints N new random patterns of each language as one JSON object

Needs python3 and node only. Each entry has the pattern and whether the language supports it. If so, it also has texts that
match and texts that do not: whole matches for Python, searches for ECMA-262. ECMA patterns are in Unicode mode, or without it if
Unicode mode reports a syntax error.
"""

import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import warnings

warnings.simplefilter("ignore")
HERE = pathlib.Path(__file__).parent
TEXTS_OF_A_KIND = 10

# Patterns of both languages.
COMMON = r"""
^[^&&<>]*$
[^[\]]+
[[]
[a-z[]
[!-/:-@[-{-~]
^[!-/:-@[-`{-~]+$
[a--b]
^[a--]$
[a&&b]
^[a&&b]+$
^[^a&&b]+$
^[a~~b]+$
^[~~]+$
^[a-z&&[^m]]$
^[[a-c]]$
^[[:alpha:]]$
^[[:alpha:]]+$
^[^[]$
^[\[\]]+$
^[\\\]]+$
^[\-a]+$
^[a\-z]+$
^[-a]+$
^[a-]+$
^[a\^]+$
^[.]+$
^[$^]+$
^[|(){}*+?]+$
^["'\\]+$
^[\d.]+$
^[\w.-]+$
^[\s,]+$
^[\D]$
^[\W]$
^[\S]$
^[^\d]$
^[^\w]$
^[^\s]$
^\d+$
^\w+$
^\s+$
^\D+$
^\W+$
^\S+$
^.$
^.*$
.
a.c
^a|b$
^(a|b)$
(^a|b$)c
^(?:a|b$)
a$|^b
(?:^|,)x(?:$|,)
(^|[^a])b
^^a$$
a^b
a$b
(?:a$)?
(?:^a)*b
(?:^a|b)+c
(?:a|b$)+
(?:^|a)+$
^(?:a|$)*$
^(?:a$|b)*$
^(?:^a|b){2}$
^(?:^a|b){2,3}$
(?:^a|b|c$){2}
(?:^a$|b){1,2}
^$
$^
^
$

a{2}
^a{2}$
^a{2,}$
^a{2,3}$
^a{0}$
^a{0,1}b$
^(ab){2}$
^(a|bc){1,2}$
^a*?b+?c??$
^a{1,2}?$
^\.$
^\*\+\?\(\)\[\]\{\}\|\/\^\$\\$
^/a/b$
^\/a$
^\t\n\r\f\v$
^\x41$
^\x0a$
^\u0041$
^\u00e9$
^[\x41-\x43]$
^[\u0430-\u044f]+$
^é+$
^[à-ü]+$
^[^\x00-\x1f]*$
^[^"]*$
^[^\\]*$
^[^"\\]*$
^"[^"]*"$
^[\x00-\x1f]+$
^\0$
^(GET|POST) /[a-z]+(\?[a-z=&]*)?$
^[A-Z]{3}-\d{4}$
^#?([a-f0-9]{6}|[a-f0-9]{3})$
^[^@\s]+@[^@\s]+\.[a-z]{2,}$
^(?:[01]\d|2[0-3]):[0-5]\d$
^-?\d+(\.\d+)?([eE][+-]?\d+)?$
^[\b]$
(
)
[
a**
*a
a{3,2}
[b-a]
\
a\
(?:
(?<n
x*+y
""".strip("\n").split("\n")

ONLY_PYTHON = r"""
[]a]
^[]a]+$
^[^]a]+$
^[]-a]+$
[]
[^]
(?P<n>a)b
(?P<n>a)(?P<n>b)
(?<n>a)
(?i)straße
(?i)k
(?i)[k-m]+
(?i)s
(?i)[^s]
(?i)ß
(?i)µ
(?i)i
(?i:a)b
(?i)a(?-i:b)
(?ia)k
(?a)\w+
(?a)\d+
(?a)\s+
(?u)\d+
(?s).
(?s:.)*
(?s)a.b(?-s:.)
(?x) a b # c
(?x)a\ b[ ]c
(?x: a )b
(?#comment)a
a(?#comment)*
a(?#open
\Aab\Z
a\Z
\Aa
a$\n
a$
(?:a$)\n
a$\n?
a$\n\n
(?:a|b$|\n)*
(?:a$|\n)+
^a\n$
(?:a$){2}
\a\b
\a
[\a\b]+
\07
\08
\012
\101
\400
[\101]
[\1]
[\8]
(a)\1
(a)\2
(?P<n>a)(?P=n)
\U0001F600
\U00110000
\N{BULLET}
\u12
\xg
\q
[\q]
\-
\é
\_
[\d-z]
[a-\d]
[z\d-]
{
{}
a{}
a{,}b
a{,2}
a{1
a{1,
a{ 1}
a{1}{2}
(?:a{1}){2}
a{1}?b
a{1}??
a?+
a++
(?>a)
(?=a)a
(?!b)a
(?<=a)b
(?<!a)b
(a)?(?(1)b|c)
^*
(?:^)*a
()*
(?:)+
a|
|
a||b
(|a)
(a|)b
(?i
(?z)
(?L)a
(?au)a
a(?i)b
\bfoo
\Bfoo
\d\D\w\W\s\S
[٠-٩]
[\s\S]
[^\s\S]
[\w\-.]
\]
]
}
a}
[a]]
[[a]
[\]]
[a\]]
""".strip("\n").split("\n")

ONLY_ECMA = r"""
[]
[^]
^[^]$
^[]a]$
[]a]
^[^]a]$
^(?<n>a)b$
(?<n>a)(?<n>b)
(?P<n>a)
(?<1>a)
^\cA$
^\cj$
^\c$
^\c1$
^[\cA-\cC]$
^[\c1]$
^[\c]$
^\u{1F600}$
^\u{61}+$
^\u{110000}$
^\uD83D\uDE00$
^[\uD83D\uDE00]$
^[\uD800-\uDFFF]$
^[^\uD800-\uDFFF]$
^\ud83d$
^[😀-😂]$
^.😀$
^\u12$
^\x1$
^\a$
^\_$
^\-$
^[\-]$
^\@\!$
^\q$
^[\q]$
^\A$
^\Z$
^\é$
^\07$
^[\07]$
^\101$
^\8$
^\08$
^[\8]$
^\1$
(a)\1
(a)\2
\k<n>
(?<n>a)\k<n>
^\k$
{
^{$
^a{$
^a{}$
^a{,2}$
^a{1$
^a{1,$
^a{ 1}$
^a}$
^}$
^]$
^a]$
^[a]]$
a{1}{2}
^(?:a{1}){2}$
a++
a?+
^*
\b
\B
(?=a)a
(?!b)a
(?<=a)b
(?<!a)b
(?>a)
(?#c)a
(?i)a
(?x)a
^[\d-z]+$
^[a-\d]+$
^[\w-.]+$
^[\w-]+$
^[z-\w]+$
^\p{L}+$
^\p{Lu}\p{Ll}*$
^\P{L}+$
^[\p{L}\p{N}_]+$
^[^\p{L}]+$
^\p{Script=Greek}+$
^\p{sc=Cyrillic}+$
^\p{General_Category=Nd}$
^\p{gc=Nd}$
^\p{Alphabetic}+$
^\p{White_Space}$
^\p{Foo}$
^\p{L$
^\pL$
^\p$
^a$\n
^a$
a$
^\d$
^\w$
^\s$
^\S$
^[\s\S]$
^[^\s\S]$
^.$
^[^.]$
^a|
|
^()*$
^(?:)+$
^(|a)b$
^[\b]$
^[\B]$
^[\0]$
^\/[/]$
^[a-z\d\-_]+$
^[\w\-\.]+$
^(?!.*\.\.)[a-z.]+$
(?i:a)b
""".strip("\n").split("\n")

CHARS = ["a", "b", "c", "k", "K", "m", "z", "A", "S", "s", "0", "5", "9", "_", "-", "[", "]", "^", "&", "~", "<", ">", "|", "(", ")", "{",
         "}", "*", "+", "?", ".", ",", "/", "\\", '"', "'", "$", "#", "@", "!", ":", "=", " ", "\t", "\n", "\r", "\x0b", "\x0c", "\0", "\x01",
         "\x07", "\x08", "\x1f", "\x7f", "\x85", "\xa0", "\xe9", "\xc9", "\xdf", "\u1e9e", "\xb5", "\u03bc", "\u0130", "\u0131", "\u017f",
         "\u212a", "\u0430", "\u042f", "\u03b1", "\u0661", "\u0967", "\u1680", "\u2003", "\u2028", "\u2029", "\u3000", "\ufeff", "\u4e2d",
         "\u2160", "\u00bd", "\U0001f600", "\U0001f602", "\U0001d7d8"]
TEXTS = ["", "ab", "abc", "aab", "ba", "a,x", ",x,", "xa", "a\n", "\na", "ab\n", "a\nb", "\n\n", "a\n\n", "bb", "aa", "aaa", "aaaa", "aba", "bab",
         "bc", "bcbc", "abab", "ababab", "ac", "a.c", "axc", "<script>&", "x&y", "[x]", "[]", "a[", "a]", "]a", "b]", "-a", "a-z", "a-b", "&&", "--", "~~",
         "[:alpha:]", "a:]", ":]", "l]", "*+?()[]{}|/^$\\", "/a/b", "/a", "\t\n\r\f\v", "éé", "абв", '"x"', '"', 'a"b', "a\\b", "\\\\", "GET /a?b=c",
         "POST /", "ABC-1234", "#ff00aa", "fff", "me@x.org", "me@@x.org", "23:59", "24:00", "-1.5e+3", "1.", "strasse", "straße", "STRASSE", "STRAẞE",
         "Straße", "12", "١٢", "१", "foo", "foo bar", "Ab", "ABc", "αβγ", "κόσμος", "привет", "a_1", "é1", "word", "a b", "a b c", "abx", "u" * 61,
         "a{", "a{}", "a{,2}", "a{1", "a{1,", "a{ 1}", "a}", "{", "}", "p{L}", "p{Foo}", "pL", "p", "p{L", "cA", "\\c", "\\c1", "c", "\\", "\x11", "q", "@!", "@", "u12", "x1",
         "A", "Z", "08", "\x008", "7", "8", "k", "!@#", ":::", "a.b", "a..b", "\U0001f600x", "x\U0001f600", "A1", "\x07\x08", "\x07b", "•", "ab1"]


def in_python(pattern, texts):
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return {"error": str(error)}
    return {"matches": [compiled.fullmatch(text) is not None for text in texts]}


NODE = r"""
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
const compiled = pattern => {
  for (const flags of ["u", ""]) { try { return [new RegExp(pattern, flags), flags] } catch (error) { if (!flags) return [null, String(error)] } }
};
process.stdout.write(JSON.stringify(cases.map(([pattern, texts]) => {
  const [regexp, mode] = compiled(pattern);
  return regexp ? { mode, matches: texts.map(text => regexp.test(text)) } : { error: mode };
})));
"""


def in_node(cases):
    answer = subprocess.run(["node", "-e", NODE], input=json.dumps(cases), capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def texts_for(pattern, draw, longest=100):
    """The texts of the list, and random ones of the pattern's own characters and of odd ones. Backtracking takes exponential time in
    the length of a text."""
    own = [c for c in pattern if c not in "^$"] + ["a", "b", "c"]
    texts = list(TEXTS) + CHARS
    for _ in range(120):
        chars = own if draw.random() < 0.7 else CHARS + own
        texts.append("".join(draw.choice(chars) for _ in range(draw.randint(1, 5))))
    return [text for text in dict.fromkeys(texts) if len(text) <= longest]


def entry(pattern, texts, answer, draw):
    if "error" in answer:
        return {"pattern": pattern, "valid": False, "yes": [], "no": []}
    yes = [text for text, matches in zip(texts, answer["matches"]) if matches]
    no = [text for text, matches in zip(texts, answer["matches"]) if not matches]
    # Without Unicode mode, a character beyond U+FFFF counts as two, and this library never splits it.
    if answer.get("mode") == "":
        yes, no = ([text for text in some if max(map(ord, text), default=0) <= 0xFFFF] for some in (yes, no))
    few = lambda some: sorted(draw.sample(some, min(len(some), TEXTS_OF_A_KIND)))
    return {"pattern": pattern, "valid": True, "yes": few(yes), "no": few(no)}


def entries(language, patterns, draw, longest=100):
    cases = [(pattern, texts_for(pattern, draw, longest)) for pattern in patterns]
    if language == "python":
        answers = [in_python(pattern, texts) for pattern, texts in cases]
    else:
        answers = in_node(cases)
    return [entry(pattern, texts, answer, draw) for (pattern, texts), answer in zip(cases, answers)]


class Drawn:
    """Draws patterns that are mostly valid."""

    def __init__(self, language, draw):
        self.python = language == "python"
        self.draw = draw

    def char(self):
        return self.draw.choice("abckmz059_-&~<>,/\"' @!:=#") if self.draw.random() < 0.85 else self.draw.choice("éßαя中]}{")

    def escape(self):
        both = ["\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\n", "\\t", "\\\\", "\\.", "\\[", "\\]", "\\-", "\\x41", "\\u00e9", "\\^", "\\$", "\\/", "\\(", "\\|"]
        own = ["\\a", "\\101", "\\Z", "\\A", '\\"', "\\_", "\\&"] if self.python else ["\\cA", "\\0", "\\u{62}", "\\p{L}", "\\P{Lu}", "\\@", "\\&", "\\a"]
        return self.draw.choice(both if self.draw.random() < 0.85 else own)

    def member(self):
        kind = self.draw.random()
        if kind < 0.35:
            return self.draw.choice(["a-c", "k-z", "A-Z", "0-9", "!-/", "[-{", "&-~", "à-ü", "--a", "+--", " -~"])
        if kind < 0.55:
            return self.draw.choice(["[", "&&", "--", "~~", "||", "[:alpha:]", "^", "-", ".", "$", "(", "*", '"'])
        if kind < 0.75:
            escape = self.escape()
            return escape if escape not in ("\\Z", "\\A") else "\\b"
        return self.char().replace("]", "\\]")

    def set(self):
        members = "".join(self.member() for _ in range(self.draw.randint(1, 4)))
        first = self.draw.choice(["", "", "", "^", "]", "^]"]) if self.python else self.draw.choice(["", "", "", "^"])
        return "[" + first + members + "]"

    def atom(self, depth):
        kind = self.draw.random()
        if kind < 0.4:
            return self.char()
        if kind < 0.6:
            return self.set()
        if kind < 0.72:
            return self.escape()
        if kind < 0.77:
            return "."
        if kind < 0.85:
            return self.draw.choice("^$")
        if depth == 0:
            return "a"
        opening = ["(", "(?:"] + (["(?P<n%d>" % self.draw.randint(0, 99), "(?i:", "(?s:", "(?a:"] if self.python else ["(?<n%d>" % self.draw.randint(0, 99)])
        return self.draw.choice(opening) + self.alternatives(depth - 1) + ")"

    def term(self, depth):
        quantifier = self.draw.choice(["", "", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,3}", "*?", "{2,}", "{,2}", "{"])
        return self.atom(depth) + quantifier

    def alternatives(self, depth):
        count = self.draw.choice([1, 1, 1, 2, 3])
        return "|".join("".join(self.term(depth) for _ in range(self.draw.randint(0, 4))) for _ in range(count))

    def pattern(self):
        flags = self.draw.choice(["", "", "", "(?i)", "(?s)", "(?x)", "(?a)"]) if self.python else ""
        ends = self.draw.choice([("", ""), ("^", "$"), ("^", ""), ("", "$"), ("^(?:", ")$")])
        return flags + ends[0] + self.alternatives(2) + ends[1]


def drawn(language, count, draw):
    pattern = Drawn(language, draw)
    return list(dict.fromkeys(pattern.pattern() for _ in range(count)))


class Slow(Exception):
    """Backtracking takes exponential time for one of the patterns."""


# Seconds for all patterns of a language, which usually take one or two.
LIMIT = 60


def fresh_entries(language, count):
    """Returns entries for new random patterns. Other patterns are drawn if a reference takes too long for these."""

    def stop(*_):
        raise Slow

    signal.signal(signal.SIGALRM, stop)
    while True:
        draw = random.Random()
        signal.alarm(LIMIT)
        try:
            return entries(language, drawn(language, count, draw), draw, 6)
        except Slow:
            continue
        finally:
            signal.alarm(0)


def main():
    own = {"python": ONLY_PYTHON, "ecma": ONLY_ECMA}
    if sys.argv[1:2] == ["random"]:
        print(json.dumps({language: fresh_entries(language, int(sys.argv[2])) for language in own}))
        return
    for language in own:
        draw = random.Random(7)
        found = entries(language, COMMON + own[language], draw) + entries(language, drawn(language, 200, draw), draw, 6)
        lines = ",\n".join(json.dumps(each, ensure_ascii=True) for each in found)
        (HERE / f"{language}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
