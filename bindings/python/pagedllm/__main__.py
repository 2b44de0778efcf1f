"""The command line: chat with a model, complete a prompt, or serve it over HTTP."""

import argparse
import enum
import inspect
import sys
import typing
from typing import Any, Dict, List, Optional

import pagedllm


def main(arguments: Optional[List[str]] = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except (pagedllm.Error, ValueError, OSError) as error:
        print(f"{given.program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagedllm", description="LLM serving inside your own process.")
    parser.add_argument("--version", action="version", version=f"libpagedllm {pagedllm.version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    chat = _command(commands, "chat", _chat, "chat with a model; each line of the input is a message")
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_sampling(chat)

    complete = _command(commands, "complete", _complete, "continue a prompt")
    complete.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from the input")
    _add_sampling(complete)

    serve = _command(commands, "serve", _serve, "serve completions and chat over HTTP, with the API of OpenAI")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="port, or 0 for a free one (default: %(default)s)")
    serve.add_argument("--api-key-file", metavar="FILE", help="file with the key that clients must send")
    return parser


def _command(commands: Any, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("model", metavar="MODEL", help="model directory or GGUF file")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="NAME=VALUE",
                        help="option of pagedllm.Engine, such as weight_format=int8 or kv_bytes=1000000000")
    parser.set_defaults(run=run, program=parser.prog)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, metavar="N", help="largest number of tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 selects the most probable token")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the random numbers")


def _chat(given: argparse.Namespace) -> int:
    messages = [{"role": "system", "content": given.system}] if given.system else []
    interactive = sys.stdin.isatty()
    with _engine(given) as engine:
        if interactive:
            print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
        while True:
            try:
                line = input("> ") if interactive else input()
            except EOFError:
                return 0
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            answer = _print_stream(engine, engine.render_chat(messages), given, add_special=False)
            messages.append({"role": "assistant", "content": answer})


def _complete(given: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    with _engine(given) as engine:
        _print_stream(engine, prompt, given)
    return 0


def _print_stream(engine: pagedllm.Engine, prompt: str, given: argparse.Namespace, **request: Any) -> str:
    """Print an answer and return it. Ctrl-C ends an answer and not the program."""
    sampling = pagedllm.Sampling(max_tokens=given.max_tokens, temperature=given.temperature, top_p=given.top_p, seed=given.seed)
    parts: List[str] = []
    stream = engine.stream(prompt, sampling, **request)
    try:
        for output in stream:
            parts.append(output.text)
            print(output.text, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        stream.close()
        print()
    return "".join(parts)


def _serve(given: argparse.Namespace) -> int:
    from . import _server

    key = None
    if given.api_key_file:
        with open(given.api_key_file, encoding="utf-8") as file:
            key = file.read().strip()
        if not key:
            raise ValueError(f"{given.api_key_file} is empty; it must contain the key that clients send")
    with _engine(given, max_waiting_requests=256) as engine:
        _server.serve(engine, given.model, given.host, given.port, key)
    return 0


def _engine(given: argparse.Namespace, **defaults: Any) -> pagedllm.Engine:
    options = {**defaults, **dict(_engine_option(text) for text in given.option)}
    show = sys.stderr.isatty()
    engine = pagedllm.Engine(given.model, progress=_draw_progress if show else None, **options)
    if show:
        print(file=sys.stderr)
    return engine


def _draw_progress(done: int, total: int) -> None:
    percent = 100 * done // total if total else 100
    print(f"\rloading [{'#' * (percent * 40 // 100):.<40}] {percent:3}%", end="", file=sys.stderr, flush=True)


def _engine_option(text: str) -> Any:
    """Convert NAME=VALUE to the name and the value of an argument of Engine."""
    name, equals, value = text.partition("=")
    types: Dict[str, Any] = typing.get_type_hints(pagedllm.Engine.__init__, vars(pagedllm))
    known = [one for one in inspect.signature(pagedllm.Engine).parameters
             if one not in ("model_path", "progress", "budget", "communicator", "kv_store", "host_steps")]
    if not equals or name not in known:
        raise ValueError(f"--option {text!r} is no NAME=VALUE with one of the names {', '.join(known)}")
    choices = typing.get_args(types[name])
    try:
        return name, _converted(value, choices)
    except (KeyError, ValueError):
        kind = next((one for one in choices if isinstance(one, enum.EnumMeta)), None)
        values = ", ".join(member.name.lower() for member in kind) if kind else " or ".join(
            one.__name__ for one in choices if one is not type(None))
        raise ValueError(f"--option {name} has the value {value!r}; it must be {'one of ' if kind else 'of type '}{values}") from None


def _converted(value: str, types: Any) -> Any:
    kind = types[0]
    if isinstance(kind, enum.EnumMeta):
        return kind[value.upper()]
    if kind is bool:
        return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
    return kind(value) if kind in (int, float) else value


if __name__ == "__main__":
    sys.exit(main())
