"""Grow a tree of continuations of one prompt and keep the most probable branches.

In each round, every branch is forked into several children, which generate a few tokens. The least
probable branches are freed. At the end, the best branch is rewound to the start and continued with
greedy sampling.

usage: researcher.py MODEL_DIR
PAGEDLLM_LIBRARY: path of libpagedllm.so; default: target/release of this repository.
"""

import pathlib
import sys
from typing import Dict, List, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python"))
from pagedllm import Engine, Error, Output, Sampling  # noqa: E402

QUESTION = "Tell me a story about a dog."
DEPTH, CHILDREN, KEPT, TOKENS = 4, 3, 2, 8


def text_of(outputs: List[Output]) -> str:
    return "".join(output.text for output in outputs)


class Branch(NamedTuple):
    sequence: int
    score: float  # sum of the log probabilities of its tokens
    text: str


def run(engine: Engine) -> Dict[int, List[Output]]:
    """Step until no request is unfinished. Return the outputs of each sequence."""
    outputs: Dict[int, List[Output]] = {}
    unfinished = 1
    while unfinished:
        unfinished = engine.step().unfinished
        for output in engine.queue.poll(0):
            outputs.setdefault(output.sequence, []).append(output)
    return outputs


def expand(engine: Engine, branch: Branch, seed: int) -> List[Branch]:
    """Fork a branch into children with different seeds. They share the KV blocks of the branch."""
    children = engine.fork(branch.sequence, CHILDREN, idle=True)
    for i, child in enumerate(children):
        engine.resume(
            child,
            Sampling(
                temperature=1.6, max_tokens=TOKENS, logprobs=True, ignore_eos=True, seed=seed + i
            ),
        )
    outputs = run(engine)
    engine.free(branch.sequence)
    return [
        Branch(
            child, branch.score + outputs[child][-1].score, branch.text + text_of(outputs[child])
        )
        for child in children
    ]


def main(model: str = "examples/model") -> None:
    with Engine(model, host_steps=True) as engine:
        prompt = engine.render_chat([{"role": "user", "content": QUESTION}])
        root = engine.add(
            prompt, Sampling(temperature=0, max_tokens=TOKENS), add_special=False, keep=True
        )
        first = run(engine)[root]
        branches = [Branch(root, 0.0, text_of(first))]
        trunk = engine.sequence_info(root).length
        print(f"{QUESTION}\n{branches[0].text}")
        for depth in range(1, DEPTH + 1):
            tree = [
                child
                for i, branch in enumerate(branches)
                for child in expand(engine, branch, 100 * depth + 10 * i)
            ]
            tree.sort(key=lambda branch: -branch.score)
            branches = tree[:KEPT]
            print(f"\nafter {depth * TOKENS} more tokens")
            for branch in tree:
                print(
                    f"{'+' if branch in branches else '-'} {branch.score:7.2f}  {branch.text[-40:]!r}"
                )
                if branch not in branches:
                    engine.free(branch.sequence)
        best = branches[0]
        print(f"\nmost probable branch, log probability {best.score:.2f}:\n{best.text}")
        engine.rewind(best.sequence, trunk)
        engine.resume(
            best.sequence, Sampling(temperature=0, max_tokens=DEPTH * TOKENS, logprobs=True)
        )
        greedy = run(engine)[best.sequence]
        print(f"\ngreedy continuation after a rewind, log probability {greedy[-1].score:.2f}:")
        print(text_of([*first, *greedy]))
        stats = engine.stats()
        print(
            f"\ngenerated tokens: {stats.generated_tokens}, computed prompt tokens: {stats.prompt_tokens}"
        )


try:
    main(*sys.argv[1:])
except Error as error:
    sys.exit(f"error {error.code}: {error}")
