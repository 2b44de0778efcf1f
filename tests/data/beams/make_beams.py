"""Runs beam searches of the tiny models in the parent folder with `generate` of transformers.

    python make_beams.py    # with ../requirements.txt: beams.json
    python make_beams.py    # with requirements-groups.txt: groups.json

Only transformers 4 has diverse groups of beams. Each file names its versions and has one case per line:

    model, prompt, width, groups, diversity_penalty, length_penalty, early_stopping,
    eos, min_tokens, max_tokens    parameters of the search
    repetition_penalty, no_repeat_ngram_size, bad_words_ids, logit_bias    parameters of some cases; each changes the results
    sequences                      the generated tokens of all `width` results, best first, the end token included
    scores                         their sequences_scores

A case is kept if small noise on the log probabilities does not change its sequences, so that they do not depend
on rounding. Cases with end tokens are stored with each value of early_stopping; most results differ.
"""

import itertools
import json
import zlib
from collections import Counter
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

HERE = Path(__file__).resolve().parent
PROMPT = 6
NOISE = 2e-4
NOISY_RUNS = 4
FORMS = {"yes": True, "no": False, "never": "never"}
LENGTH_PENALTIES = [1.0, 2.0, 0.0, -1.0, 0.5]
GROUPED = transformers.__version__.startswith("4.")
MODELS = ["gpt2", "opt", "llama_v4"] if GROUPED else ["gpt2", "opt", "llama"]
PROCESSORS = ["repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "logit_bias"]
WIDTHS = [(4, 2), (4, 4), (6, 3), (8, 2), (8, 4)] if GROUPED else [(2, 1), (3, 1), (4, 1), (8, 1)]


class Noise(LogitsProcessor):
    def __init__(self, seed):
        self.rng = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids, scores):
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self.rng) - 1)


def load(name):
    directory = HERE.parent / name
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32, attn_implementation="eager").eval()
    expected = load_file(directory / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["tokens"][None]).logits[0]
    assert torch.allclose(logits, expected["logits"], rtol=0, atol=1e-4), name
    # The defaults of the model must not affect the cases.
    model.generation_config = GenerationConfig()
    return model


def cut(tokens, eos):
    """Removes the padding after the first end token."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0]] if ends else tokens


def processors(case):
    """Returns the arguments of generate for the processors of the case."""
    parameters = {name: case[name] for name in PROCESSORS if name in case}
    if "logit_bias" in parameters:
        parameters["sequence_bias"] = {(token,): bias for token, bias in parameters.pop("logit_bias")}
    if case["min_tokens"]:
        parameters["min_new_tokens"] = case["min_tokens"]
    return parameters


def generate(model, case, n, noise):
    prompt = torch.tensor([case["prompt"]])
    grouped = {"num_beam_groups": case["groups"], "diversity_penalty": case["diversity_penalty"]}
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=case["width"],
        num_return_sequences=n,
        length_penalty=case["length_penalty"],
        early_stopping=FORMS[case["early_stopping"]],
        eos_token_id=case["eos"] or None,
        max_new_tokens=case["max_tokens"],
        logits_processor=[Noise(noise)] if noise is not None else [],
        return_dict_in_generate=True,
        output_scores=True,
        **(grouped if case["groups"] > 1 else {}),
        **processors(case),
    )


def search(model, case, n=None, noise=None):
    """Returns (sequences, scores) of the n best results, or of all."""
    result = generate(model, case, n or case["width"], noise)
    rows = [row[PROMPT:].tolist() for row in result.sequences]
    return [cut(row, case["eos"]) for row in rows], [round(x, 6) for x in result.sequences_scores.tolist()]


def is_steady(model, case, sequences):
    return all(search(model, case, noise=seed)[0] == sequences for seed in range(NOISY_RUNS))


def finished(model, case):
    """Returns the case with its results, or None if noise changes them."""
    sequences, scores = search(model, case)
    if not is_steady(model, case, sequences):
        return None
    assert search(model, case, n=1) == (sequences[:1], scores[:1])
    return case | {"sequences": sequences, "scores": scores}


def common_tokens(model, case, count):
    """Returns tokens from the middle of the beams. As end tokens, they end some of the beams."""
    sequences, _ = search(model, case | {"eos": [], "min_tokens": 0})
    middle = Counter(token for row in sequences for token in row[2:])
    return [token for token, _ in middle.most_common(count)]


def random_prompt(model, rng):
    return torch.randint(3, model.config.vocab_size, (PROMPT,), generator=rng).tolist()


def begun(model, case, rng, eos_count):
    """Returns the case with a prompt and with end tokens that occur in some beams."""
    case = case | {"prompt": random_prompt(model, rng)}
    return case | {"eos": common_tokens(model, case, eos_count)}


def differing(cases):
    return len({json.dumps(case["sequences"]) for case in cases})


def all_forms(model, case, rng, eos_count):
    """Returns cases that differ only in early_stopping. Most of their results differ, too."""
    for attempt in itertools.count():
        case = begun(model, case, rng, eos_count)
        drafts = [case | {"early_stopping": form} for form in FORMS]
        drafts = [draft | {"sequences": search(model, draft)[0]} for draft in drafts]
        # Without a bonus for length, "never" equals False. If a group has one beam, False equals True.
        wanted = 3 if case["length_penalty"] > 0 and attempt < 25 else 2 if attempt < 50 else 1
        done = differing(drafts) >= wanted and [finished(model, draft) for draft in drafts]
        if done and all(done):
            return done


def cut_short(model, case):
    """Returns the search with max_tokens at its last step: unfinished beams become results."""
    steps = len(generate(model, case, 1, None).scores)
    return finished(model, case | {"max_tokens": steps}) if steps < case["max_tokens"] else None


def one(model, case, rng, eos_count=0):
    while True:
        case = begun(model, case, rng, eos_count)
        done = finished(model, case)
        ends = done and any(row[-1] in case["eos"] for row in done["sequences"])
        if done and (ends or not eos_count):
            return done


def against(model, case, rng, names):
    """Returns processors that change the beams. transformers ignores bad words that are end tokens."""
    tokens = common_tokens(model, case, 3) + random_prompt(model, rng)
    common, other, third = [token for token in dict.fromkeys(tokens) if token not in case["eos"]][:3]
    best = search(model, case | {"eos": []})[0][0]
    values = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[common], best[2:4]],
        "logit_bias": [[other, -1.5], [third, 2.0]],
    }
    return {name: values[name] for name in names}


def processed(model, case, rng, names, eos_count):
    """Returns a case in which each of these processors changes the results."""
    while True:
        case = begun(model, case, rng, eos_count)
        draft = case | against(model, case, rng, names)
        done = finished(model, draft)
        ends = done and any(row[-1] in case["eos"] for row in done["sequences"])
        without = ({key: value for key, value in draft.items() if key != name} for name in names)
        if done and (ends or not eos_count) and all(search(model, less)[0] != done["sequences"] for less in without):
            return done


def case_of(name, width, groups):
    """Returns the parameters of a case of this shape, without optional ones."""
    diversity_penalty = 0.0 if groups == 1 else 0.5 if width == 4 else 1.25
    return {
        "model": name, "prompt": [], "width": width, "groups": groups, "diversity_penalty": diversity_penalty,
        "length_penalty": 1.0, "early_stopping": "no", "eos": [], "min_tokens": 0, "max_tokens": 20,
    }  # fmt: skip


def processed_cases_of(name):
    model = load(name)
    rng = torch.Generator().manual_seed(zlib.crc32(f"{name} processed".encode()))
    widths = itertools.cycle(WIDTHS)
    for names in [[name] for name in PROCESSORS] + [PROCESSORS]:
        for eos_count in [0, 1]:
            yield processed(model, case_of(name, *next(widths)), rng, names, eos_count)


def cases_of(name, penalties):
    model = load(name)
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for width, groups in WIDTHS:
        case = case_of(name, width, groups)
        yield one(model, case | {"length_penalty": next(penalties)}, rng)
        yield one(model, case | {"min_tokens": 8, "early_stopping": "yes"}, rng, eos_count=1)
        # transformers 4 always writes the first end token, so cases with groups have only one.
        for eos_count in [1] if GROUPED else [1, 3]:
            forms = all_forms(model, case | {"length_penalty": next(penalties)}, rng, eos_count)
            yield from forms
            yield from filter(None, [cut_short(model, forms[0])])
    yield one(model, case | {"max_tokens": 1}, rng)


def main():
    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    penalties = itertools.cycle(LENGTH_PENALTIES)
    cases = []
    for some in [*(cases_of(name, penalties) for name in MODELS), *(processed_cases_of(name) for name in MODELS[::2])]:
        for case in some:
            print(*(f"{key} {case[key]}" for key in list(case)[:10]), "lengths", *map(len, case["sequences"]), flush=True)
            cases.append(case)
    searches = itertools.groupby(cases, key=lambda case: (case["prompt"], case["max_tokens"]))
    differences = Counter(differing(list(forms)) for _, forms in searches)
    print("prompts by how many results the forms have", dict(differences))
    assert differences[3] >= 5 and differences[3] + differences[2] >= 10
    lines = ",\n".join(json.dumps(case) for case in cases)
    versions = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]})
    file = HERE / ("groups.json" if GROUPED else "beams.json")
    file.write_text(f'{{"versions": {versions},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
