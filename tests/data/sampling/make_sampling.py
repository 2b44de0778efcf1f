"""Makes random sampling cases with the results of transformers or of the published definition.

    python make_sampling.py

cases.json is a list of objects:

    name       subject of the case
    params     the parameters that are not off
    tokens     the sequence so far: prompt and generated tokens
    prompt_len
    eos        the model's end-of-sequence tokens
    logits     one row of the model
    processed  the row after bias, penalties and exclusions; null is minus infinity
    kept       the tokens that can be sampled
    probs      their probabilities
    mu         with mirostat: the state before sampling
    chosen     with mirostat: the sampled token
    surprise   with mirostat: its surprise in bits
    next_mu    with mirostat: the state after sampling

The reference is the processor of transformers if it has one. Presence and frequency penalty, DRY, top-n-sigma, XTC and
mirostat are implemented here from their definitions, in numpy and float64.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

VOCAB = 32
EOS = [2, 5]
SAFE_GAP = 1e-5  # between a threshold and the nearest candidate, so that rounding cannot flip the choice
MIN_PROBABILITY = 1e-30  # smaller probabilities may be rounded to 0
rng = np.random.default_rng(20260917)


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def presence_and_frequency(logits, generated, presence, frequency):
    """As OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence. c counts the output only."""
    count = np.bincount(generated, minlength=VOCAB)
    return logits - count * frequency - (count > 0) * presence


def dry_penalties(tokens, dry, breakers):
    """Counts the repeated tokens before each position, up to a difference, a breaker or the window's start."""
    window = tokens[-dry["penalty_last_n"]:] if dry["penalty_last_n"] else tokens
    end = len(window)

    def ends_breaker(at):
        return any(len(b) <= at and window[at - len(b):at] == b for b in breakers)

    longest = {}
    for before in range(1, end):
        length = 0
        while length < before and not ends_breaker(end - length) and window[before - 1 - length] == window[end - 1 - length]:
            length += 1
        follower = window[before]
        if length >= max(dry["allowed_length"], 1) and [follower] not in breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    return {token: dry["multiplier"] * dry["base"] ** (length - dry["allowed_length"]) for token, length in longest.items()}


def top_n_sigma(logits, n):
    possible = logits[np.isfinite(logits)]
    gap_at = logits.max() - n * possible.std()
    return np.where(logits >= gap_at, logits, -np.inf), np.abs(possible - gap_at).min()


def xtc(logits, threshold):
    probs = softmax(logits)
    top = [int(token) for token in np.argsort(-probs) if probs[token] >= threshold]
    out = logits.copy()
    out[top[:-1]] = -np.inf
    return out, np.abs(probs - threshold).min()


def mirostat(logits, mu):
    """Excludes tokens whose surprise exceeds mu, except the most probable token."""
    probs = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log2(probs)
    order = np.argsort(surprise, kind="stable")
    kept = [order[0]] + [token for token in order[1:] if surprise[token] <= mu]
    out = np.full(VOCAB, -np.inf)
    out[kept] = logits[kept]
    return out, np.abs(surprise - mu).min()


def through(processor, tokens, logits):
    """Applies a processor of transformers in float64."""
    return processor(torch.tensor([tokens]), torch.tensor(logits[None]))[0].numpy()


def process(logits, tokens, prompt_len, params, breakers):
    generated = tokens[prompt_len:]
    steps = []
    if "logit_bias" in params:
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params["logit_bias"]}))
    if "repetition_penalty" in params:
        steps.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    steps.append(None)  # place of the processors that transformers lacks
    if "allowed_token_ids" in params:
        steps.append(PrefixConstrainedLogitsProcessor(lambda *_: params["allowed_token_ids"], 1))
    if "bad_words_ids" in params:
        steps.append(NoBadWordsLogitsProcessor(params["bad_words_ids"]))
    if "no_repeat_ngram_size" in params:
        steps.append(NoRepeatNGramLogitsProcessor(params["no_repeat_ngram_size"]))
    if "min_tokens" in params:
        steps.append(MinNewTokensLengthLogitsProcessor(prompt_len, params["min_tokens"], EOS + params.get("stop_token_ids", [])))
    for step in steps:
        if step is not None:
            logits = through(step, tokens, logits)
            continue
        logits = presence_and_frequency(logits, generated, params.get("presence_penalty", 0), params.get("frequency_penalty", 0))
        for token, penalty in dry_penalties(tokens, params["dry"], breakers).items() if "dry" in params else []:
            logits[token] -= penalty
    return logits


def mass_gap(logits, p, order):
    """Returns the smallest distance between p and a cumulative probability in this order."""
    probs = softmax(logits)
    return np.abs(np.cumsum(probs[order]) - p).min()


def narrow(logits, tokens, params, mu):
    """Truncates the logits. Also returns the smallest distance of a value from its threshold."""
    gaps = [1.0]
    logits = through(TemperatureLogitsWarper(params.get("temperature", 1.0)), tokens, logits)
    if mu is not None:
        logits, gap = mirostat(logits, mu)
        return logits, gap
    if "top_n_sigma" in params:
        logits, gap = top_n_sigma(logits, params["top_n_sigma"])
        gaps.append(gap)
    if "min_p" in params:
        probs = softmax(logits)
        gaps.append(np.abs(probs / probs.max() - params["min_p"]).min())
        logits = through(MinPLogitsWarper(params["min_p"]), tokens, logits)
    if "top_k" in params:
        logits = through(TopKLogitsWarper(params["top_k"]), tokens, logits)
    if "typical_p" in params:
        probs = softmax(logits)
        possible = np.flatnonzero(probs)
        surprise = -np.log(probs[possible])
        order = possible[np.argsort(np.abs(surprise - (probs[possible] * surprise).sum()))]
        gaps.append(mass_gap(logits, params["typical_p"], order))
        logits = through(TypicalLogitsWarper(params["typical_p"]), tokens, logits)
    if "top_p" in params:
        gaps.append(mass_gap(logits, params["top_p"], np.argsort(-logits)))
        logits = through(TopPLogitsWarper(params["top_p"]), tokens, logits)
    if "xtc_probability" in params:
        logits, gap = xtc(logits, params["xtc_threshold"])
        gaps.append(gap)
    return logits, min(gaps)


def numbers(values, digits=6):
    return [None if math.isinf(value) else round(float(value), digits) for value in values]


def random_history():
    """Returns few different tokens with a copied range, so that repetitions occur."""
    tokens = rng.integers(0, rng.integers(4, 16), rng.integers(12, 40)).tolist()
    start = int(rng.integers(0, len(tokens) - 6))
    return tokens + tokens[start:start + int(rng.integers(2, 6))]


def make_case(name, make_params):
    """Draws cases until the parameters change the result and no value is close to a threshold."""
    while True:
        tokens = random_history()
        prompt_len = int(rng.integers(1, len(tokens)))
        logits = np.round(rng.normal(0, 2, VOCAB), 3)
        params = make_params(tokens)
        breakers = params.get("dry", {}).get("sequence_breakers", [])
        mu = round(float(rng.uniform(-1, 10)), 3) if "mirostat" in params else None
        processed = process(logits.copy(), tokens, prompt_len, params, breakers)
        left = processed[np.isfinite(processed)]
        if not len(left) or len(np.unique(left)) < len(left):
            continue
        narrowed, gap = narrow(processed, tokens, params, mu)
        kept = np.flatnonzero(np.isfinite(narrowed))
        nothing_happened = len(kept) == VOCAB and np.array_equal(logits, narrowed)
        if softmax(narrowed)[kept].min() < MIN_PROBABILITY:
            continue
        if gap > SAFE_GAP and not nothing_happened and (len(kept) > 1 or rng.random() < 0.1):
            break
    case = dict(name=name, params=params, tokens=tokens, prompt_len=prompt_len, eos=EOS, logits=numbers(logits))
    case |= dict(processed=numbers(processed), kept=kept.tolist(), probs=numbers(softmax(narrowed)[kept], 7))
    if mu is not None:
        chosen = int(rng.choice(kept))
        surprise = float(-np.log2(softmax(narrowed)[chosen]))
        tau, eta = params["mirostat"]["tau"], params["mirostat"]["eta"]
        case |= dict(mu=mu, chosen=chosen, surprise=round(surprise, 6), next_mu=round(mu - eta * (surprise - tau), 6))
    return case


def pick(low, high, digits=2):
    return round(float(rng.uniform(low, high)), digits)


def some_ids(max_count):
    return sorted(int(token) for token in rng.choice(VOCAB, rng.integers(1, max_count), replace=False))


def bad_words(tokens):
    """Returns bad words whose beginning ends the sequence, words of one token, and other words."""
    begun = [tokens[-n:] + [int(rng.integers(VOCAB))] for n in (1, 2, 3)]
    other = [[int(rng.integers(VOCAB))], [VOCAB - 1, 1], [tokens[-1], VOCAB - 1, 3]]
    return begun + other


def dry(tokens):
    breakers = [[tokens[-3]], tokens[-4:-2], [VOCAB - 1], [tokens[0], VOCAB - 1]]
    count = int(rng.integers(0, 3))
    return dict(
        multiplier=pick(0.2, 2),
        base=pick(1.0, 2.5),
        allowed_length=int(rng.integers(0, 4)),
        penalty_last_n=None if rng.random() < 0.5 else int(rng.integers(4, 30)),
        sequence_breakers=[breakers[i] for i in rng.choice(4, count, replace=False)],
    )


FAMILIES = {
    "logit_bias": lambda _: [[token, pick(-8, 8)] for token in some_ids(6)],
    "repetition_penalty": lambda _: pick(0.6, 1.9),
    "presence_penalty": lambda _: pick(-2, 2),
    "frequency_penalty": lambda _: pick(-2, 2),
    "dry": dry,
    "allowed_token_ids": lambda _: some_ids(20),
    "bad_words_ids": bad_words,
    "no_repeat_ngram_size": lambda _: int(rng.integers(1, 5)),
    "min_tokens": lambda _: int(rng.integers(1, 40)),
    "temperature": lambda _: pick(0.3, 2.5),
    "top_n_sigma": lambda _: pick(0.3, 2.5),
    "min_p": lambda _: pick(0.01, 0.5),
    "top_k": lambda _: int(rng.integers(1, VOCAB + 8)),
    "typical_p": lambda _: pick(0.05, 0.97),
    "top_p": lambda _: pick(0.05, 0.97),
    "xtc_probability": lambda _: 1.0,
    "mirostat": lambda _: dict(tau=pick(1, 6), eta=pick(0.05, 1)),
}
MIROSTAT_REPLACES = {"top_n_sigma", "min_p", "top_k", "typical_p", "top_p", "xtc_probability"}


def with_names(names):
    def make(tokens):
        params = {name: FAMILIES[name](tokens) for name in names}
        if "min_tokens" in params:
            params["stop_token_ids"] = some_ids(4)
        if "xtc_probability" in params:
            params["xtc_threshold"] = pick(0.01, 0.4)
        return params

    return make


def cases():
    for name in FAMILIES:
        for _ in range(8 if name == "dry" else 4):
            yield make_case(name, with_names([name]))
    for _ in range(60):
        names = [name for name in FAMILIES if rng.random() < 0.35]
        if "mirostat" in names:
            names = [name for name in names if name not in MIROSTAT_REPLACES]
        yield make_case("together", with_names(names))


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases())
    (Path(__file__).resolve().parent / "cases.json").write_text(f"[\n{lines}\n]\n")
