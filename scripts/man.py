#!/usr/bin/env python3
"""Writes docs/pagedllm.1, the man page of the command-line tool, from the help of its commands.

usage: man.py TOOL [--check]
With --check, it fails if the page is stale.
"""
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "pagedllm.1"
# Width of the column with the names of options in the help.
COLUMN = 32

HEAD = r""".\" Generated from the help of the tool by `make man`. Do not edit.
.TH PAGEDLLM 1 "" "libpagedllm" "User Commands"
.SH NAME
pagedllm \- chat with a language model, continue texts, and measure the model
.SH SYNOPSIS
.nf
"""
DESCRIPTION = r""".fi
.SH DESCRIPTION
.B pagedllm
runs language models with libpagedllm.
.I MODEL
is a model directory in the layout of Hugging Face, or a GGUF file.
.PP
Sizes are bytes, or have one of the units KiB, MiB, GiB and TiB: 64MiB.
Times are milliseconds.
Lists of token ids have commas: 3,14.
An option whose value ends with ... can be given more than once.
.B \-\-
ends the options, so that a prompt can begin with a hyphen.
.PP
Sampling parameters that are not given have the defaults of the model's generation_config.json.
"""
TAIL = r""".SH EXIT STATUS
.TP
.B 0
Success.
.TP
.B 1
An error of the model, the library, standard input or standard output.
.TP
.B 2
A wrong command line.
.TP
.B 130
Ctrl\-C ended the command.
A second Ctrl\-C ends the tool at once.
.TP
.B 141
The reader of standard output has closed it.
.SH EXAMPLES
.TP
pagedllm chat models/mine \-\-system "Answer in one sentence."
Chat with a model.
Each line is a message, and Ctrl\-D ends the chat.
.TP
pagedllm complete models/mine "Once upon a time" \-\-max\-tokens 100
Continue a text.
.TP
pagedllm complete models/mine "Anna is 31." \-\-json\-schema @person.json
Generate JSON that the schema in the file describes.
.TP
pagedllm bench models/mine \-\-prompt\-tokens 512 \-\-batch 1,8,32
Measure tokens per second.
.TP
pagedllm plan models/mine \-\-kv\-bytes 8GiB \-\-weight\-format int8
Print the memory that a model needs.
"""


class Command:
    """A command of the tool, as its help describes it."""

    def __init__(self, name, text):
        self.name = name
        self.groups = {}  # lists of [name, description] by title
        self.notes = ""
        lines = text.splitlines()
        self.summary = lines[0]
        self.usage = lines[1].removeprefix("Usage: ")
        entries = None
        for line in lines[2:]:
            if not line.strip():
                continue
            if line[0] == " ":
                self.add_line(entries, line)
            elif line.endswith(":") and not self.notes:
                entries = self.groups.setdefault(line[:-1], [])
            else:
                self.notes += line + "\n"

    @staticmethod
    def add_line(entries, line):
        """Adds a line of a group: an entry, or the continuation of one."""
        if not line[:COLUMN].strip():
            entries[-1][1] += " " + line.strip()
        elif line[COLUMN - 1:COLUMN] in ("", " "):
            entries.append([line[:COLUMN].strip(), line[COLUMN:].strip()])
        else:  # the description of a long name begins in the next line
            entries.append([line.strip(), ""])


def help_of(tool, *command):
    return subprocess.run([tool, *command, "--help"], check=True, capture_output=True, text=True).stdout


def commands_of(tool):
    """Returns the tool without a command, and its commands."""
    whole = Command("", help_of(tool))
    return whole, [Command(name, help_of(tool, name)) for name, _ in whole.groups["Commands"]]


def escaped(text):
    """Returns text for a line of roff."""
    text = text.strip().replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def sentences(text):
    """Returns text with one sentence in each line, so that roff can space them."""
    return "".join(escaped(line) + "\n" for line in re.split(r"(?<=[.:]) (?=[A-Z])", text.strip()) if line)


def option_line(name):
    """Returns the names of an option in bold, and its value in italics."""
    names, _, value = name.partition(" ")
    bold = ", ".join(f"\\fB{escaped(one)}\\fR" for one in names.split(","))
    return bold + (f" \\fI{escaped(value)}\\fR" if value else "")


def option(name, text):
    return f".TP\n{option_line(name)}\n{sentences(text)}"


def options(commands):
    """Returns each option once, with the commands that have it if others of its group lack it."""
    users, groups = {}, {}
    for command in commands:
        for title, entries in command.groups.items():
            if title == "Arguments":
                continue
            for name, text in entries:
                groups.setdefault(title, {}).setdefault((name, text), []).append(command.name)
            users.setdefault(title, []).append(command.name)
    page = ""
    for title, entries in groups.items():
        everywhere = len(users[title]) == len(commands)
        page += f".SS {'All commands' if title == 'Options' else escaped(title)}\n"
        if not everywhere:
            page += f"Commands: {', '.join(users[title])}.\n"
        for (name, text), names in entries.items():
            page += option(name, text)
            if names != users[title]:
                page += f"Only {', '.join(names)}.\n"
    return page


def page_of(whole, commands):
    page = HEAD + "".join(escaped(command.usage) + "\n" for command in commands) + DESCRIPTION + ".SH COMMANDS\n"
    for command in commands:
        page += f".TP\n.B {command.name}\n{escaped(command.summary)}.\n"
        for name, text in command.groups["Arguments"][1:]:  # MODEL is described before
            page += f"{name.partition(' ')[0]}: {sentences(text)}"
        page += sentences(" ".join(command.notes.split()))
    page += ".SH OPTIONS\n" + options(commands) + ".SS Without a command\n"
    return page + "".join(option(name, text) for name, text in whole.groups["Options"]) + TAIL


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    page = page_of(*commands_of(sys.argv[1]))
    if "--check" not in sys.argv:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit(f"{PAGE.name}: stale; run `make man` and commit the result")


if __name__ == "__main__":
    main()
