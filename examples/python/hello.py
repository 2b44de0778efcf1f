"""Stream the answers to three prompts at once. The second is aborted after a few tokens.

usage: hello.py MODEL_DIR
PAGEDLLM_LIBRARY: path of libpagedllm.so; default: target/release of this repository.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python"))
from pagedllm import Engine, Error, Sampling  # noqa: E402


def ask(engine: Engine, question: str) -> int:
    prompt = engine.render_chat([{"role": "user", "content": question}])
    # The template has written the special tokens.
    request = engine.add(prompt, Sampling(temperature=0), add_special=False)
    print(f"[{request}] {question}")
    return request


def main(model: str = "examples/model") -> None:
    with Engine(model, host_steps=True) as engine:
        ask(engine, "What is the capital of France?")
        story = ask(engine, "Tell me a short story.")
        ask(engine, "What is 7 + 5?")
        unfinished = 1
        while unfinished:
            unfinished = engine.step().unfinished
            for output in engine.queue.poll(0):
                end = f" ({output.finish_reason.name.lower()})" if output.finish_reason else ""
                print(f"[{output.request}] {output.text}{end}")
                if (
                    output.request == story
                    and output.generated_tokens == 8
                    and not output.finish_reason
                ):
                    engine.abort(story)


try:
    main(*sys.argv[1:])
except Error as error:
    sys.exit(f"error {error.code}: {error}")
