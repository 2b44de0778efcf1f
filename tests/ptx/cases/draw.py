"""Sampling: kernels/draw.cu."""
import struct
from dataclasses import dataclass
from functools import partial

import numpy as np

from lab import Case, Mismatch
from ptx.numbers import F32, F64

THREADS, MAX_TOPS, NONE, PART_BYTES = 512, 20, 0xFFFFFFFF, 8512
TOKEN, NOT_FINITE, EXCLUDED = range(3)
SAMPLE_BYTES = 24 + 8 * MAX_TOPS
UNIT = 2.0 ** 40


@dataclass
class Draw:
    """The parameters of a sample, as in `Draw` of kernels/draw.cu."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    fraction: float = 0.5
    logprobs: int | None = None
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    biases: tuple = ()         # (token, bias)
    counts: tuple = ()         # (token, number of times)
    allowed: object = None     # tokens that a grammar allows


@dataclass
class Sample:
    outcome: int
    token: int
    logit: float
    max_logit: float
    exp_sum: int
    tops: list

    @staticmethod
    def read(data):
        numbers = struct.unpack("<IIffQ", data[:24])
        tops = [struct.unpack_from("<If", data, 24 + 8 * i) for i in range(MAX_TOPS)]
        return Sample(*numbers, tops)


def packed(draws, rows, vocab):
    """Returns the bytes of draws and edits, and the words of masks."""
    of_draws, edits, masks = b"", b"", []
    for row, draw in zip(rows, draws):
        fraction, mask, edit = int(draw.fraction * 2 ** 64), NONE, len(edits) // 12
        for token, bias in draw.biases:
            edits += struct.pack("<Iff", token, bias, 0)
        for token, count in draw.counts:
            edits += struct.pack("<IIf", token, count, 0)
        if draw.allowed is not None:
            mask, bits = len(masks), np.zeros(-(-vocab // 32) * 32, bool)
            bits[list(draw.allowed)] = True
            masks += np.packbits(bits, bitorder="little").view(np.uint32).tolist()
        logprobs = NONE if draw.logprobs is None else draw.logprobs
        of_draws += struct.pack("<3I6f6I", row, logprobs, draw.top_k, draw.temperature, draw.min_p, draw.top_p, draw.repetition,
                                draw.frequency, draw.presence, fraction >> 32, fraction & 0xFFFFFFFF, edit, len(draw.biases),
                                len(draw.counts), mask)
    return of_draws, edits or bytes(12), np.array(masks or [0], np.uint32)


def launch(lab, logits, draws, rows, count=1):
    """Samples rows of logits, each in `count` parts. Returns a sample for each."""
    vocab = logits.shape[1]
    of_draws, edits, masks = packed(draws, rows, vocab)
    out, parts = lab.allocate(SAMPLE_BYTES * len(draws)), lab.allocate(PART_BYTES * len(draws) * count)
    at, of_draws, edits = lab.buffer(logits), lab.put(np.frombuffer(of_draws, np.uint8)), lab.buffer(np.frombuffer(edits, np.uint8))
    grid = (count, len(draws), 1)
    lab.launch("draw_best", grid, THREADS, parts, at, of_draws, vocab)
    lab.launch("draw_edit", grid, THREADS, parts, at, of_draws, edits, lab.put(masks), vocab)
    lab.launch("draw_weigh", grid, THREADS, parts, at, of_draws, vocab)
    lab.launch("draw_choose", (len(draws), 1, 1), THREADS, out, parts, at, of_draws, edits, vocab, count)
    data = lab.get(out, (len(draws), SAMPLE_BYTES), np.uint8)
    return [Sample.read(row.tobytes()) for row in data]


def edited(draw, logits):
    logits = logits.astype(F32).copy()
    for token, bias in draw.biases:
        logits[token] += F32(bias)
    for token, count in draw.counts:
        of = logits[token]
        of = of / F32(draw.repetition) if of > 0 else of * F32(draw.repetition)
        logits[token] = of - (F32(draw.frequency) * F32(count) + F32(draw.presence)) if count else of
    if draw.allowed is not None:
        excluded = np.ones(len(logits), bool)
        excluded[list(draw.allowed)] = False
        logits[excluded] = -np.inf
    return logits


def first_of(weights, order, wanted):
    """Keeps the fewest tokens in an order whose weights reach a sum."""
    count = int(np.searchsorted(np.cumsum(weights[order]), wanted)) + 1
    kept = np.zeros(len(weights), bool)
    kept[order[:count]] = True
    return np.where(kept, weights, 0)


def sampled(draw, logits):
    """Returns the token that the host samples: the one at a fraction of the sum of weights."""
    logits = edited(draw, logits).astype(F64)
    if draw.temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits - logits.max()) / F64(F32(draw.temperature)))
    weights[weights < F32(draw.min_p)] = 0
    order = np.argsort(-logits, kind="stable")
    if draw.top_k:
        weights[order[draw.top_k:]] = 0
    if draw.top_p < 1:
        weights = first_of(weights, order, F64(F32(draw.top_p)) * weights.sum())
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, draw.fraction * sums[-1], side="right"))


def check(draw, logits, sample):
    token = sampled(draw, logits)
    if (sample.outcome, sample.token) != (TOKEN, token):
        raise Mismatch(f"{draw}: outcome {sample.outcome}, token {sample.token}, not {token}")
    if draw.logprobs is None:
        return
    order = np.argsort(-logits.astype(F64), kind="stable")[:draw.logprobs].tolist()
    if [token for token, _ in sample.tops[:draw.logprobs]] != order:
        raise Mismatch(f"{draw}: the most probable tokens are {sample.tops[:draw.logprobs]}, not {order}")
    if [logit for _, logit in sample.tops[:draw.logprobs]] != [float(logits[token]) for token in order]:
        raise Mismatch(f"{draw}: wrong logits of the most probable tokens")
    if sample.logit != float(logits[token]) or sample.max_logit != float(logits.max()):
        raise Mismatch(f"{draw}: the logit is {sample.logit}, the largest one {sample.max_logit}")
    total = np.exp(logits.astype(F64) - logits.max()).sum()
    if abs(sample.exp_sum / UNIT - total) > 1e-5 * total:
        raise Mismatch(f"{draw}: the sum of powers is {sample.exp_sum / UNIT}, not {total}")


def rows(draws, vocab, parts, lab):
    """Each draw has a row of its own, and a row without a draw is between them."""
    logits = lab.normal(len(draws) + 1, vocab) * 3
    of = [row if row < len(draws) // 2 else row + 1 for row in range(len(draws))]
    for draw, row, sample in zip(draws, of, launch(lab, logits, draws, of, parts)):
        check(draw, logits[row], sample)


def equal_logits(parts, lab):
    """More tokens with the same logit than a list holds."""
    logits = np.zeros((4, 1100), F32)
    logits[:, 700] = -0.0
    logits[3, 1000:] = 1.0
    draws = [Draw(logprobs=5), Draw(1.0, top_k=7, fraction=0.99, logprobs=20), Draw(1.0, top_p=0.5, fraction=0.701),
             Draw(1.0, top_k=300, top_p=0.5, fraction=0.6)]
    for draw, row, sample in zip(draws, logits, launch(lab, logits, draws, range(4), parts)):
        check(draw, row, sample)


def no_token(parts, lab):
    """Logits that are not finite, and grammars without a token."""
    logits = lab.normal(4, 77)
    logits[0, 76], logits[1, 3], logits[2, 5] = np.nan, np.inf, -np.inf
    samples = launch(lab, logits, [Draw(), Draw(1.0), Draw(allowed=()), Draw(allowed=(5,))], range(4), parts)
    lab.equal([sample.outcome for sample in samples], [NOT_FINITE, NOT_FINITE, EXCLUDED, TOKEN])
    lab.equal([sample.token for sample in samples[3:]], [5])


def fill_placeholders(lab):
    samples = np.zeros((3, SAMPLE_BYTES // 4), np.uint32)
    samples[:, :2] = [[TOKEN, 70], [NOT_FINITE, 71], [TOKEN, 72]]
    tokens, pairs = np.arange(10, 18, dtype=np.uint32), np.array([[5, 2], [0, 1], [7, 0]], np.uint32)
    out = lab.buffer(tokens)
    lab.launch("fill_placeholders", (1, 1, 1), 128, out, lab.put(pairs), lab.put(samples), len(pairs))
    tokens[[5, 0, 7]] = 72, 0, 70
    lab.equal(lab.get(out, tokens.shape, np.uint32), tokens)


KERNELS = ["draw_best", "draw_choose", "draw_edit", "draw_weigh"]


def cases():
    allowed = tuple(range(5, 700, 3))
    for name, vocab, parts, draws, quick in (
        ("greedy", 1001, 1, [Draw(), Draw(logprobs=5), Draw(logprobs=0), Draw(allowed=allowed), Draw(counts=((8, 2),), repetition=1.3)], True),
        ("temperature", 1001, 4, [Draw(0.8, fraction=fraction) for fraction in (0.0, 0.123, 0.77, 0.999)], True),
        ("small vocabulary", 3, 16, [Draw(), Draw(0.8, fraction=0.7), Draw(1.0, top_k=2, logprobs=3)], True),
        ("top-k and top-p", 1502, 2, [Draw(1.0, top_k=50, top_p=0.9, fraction=0.5), Draw(0.7, top_k=5, fraction=0.6),
                                   Draw(1.0, top_p=0.3, fraction=0.4), Draw(0.7, top_p=0.8, min_p=0.01, fraction=0.2)], True),
        ("the whole vocabulary", 3075, 2, [Draw(5.0, top_k=600, fraction=0.5), Draw(9.0, top_p=0.95, fraction=0.8),
                                        Draw(9.0, top_k=900, top_p=0.9, fraction=0.3)], True),
        ("edits and masks", 777, 4, [
            Draw(0.7, top_p=0.8, min_p=0.01, fraction=0.1, logprobs=3, allowed=allowed, repetition=1.3, frequency=0.2, presence=0.4,
                 biases=((8, 1.5), (9, -2.0)), counts=((8, 2), (11, 1), (20, 0))),
            Draw(1.0, biases=tuple((token, 0.25) for token in range(600)), fraction=0.4, logprobs=20)], True),
        ("many draws", 5003, 2, [Draw(1.0, fraction=i / 12, top_k=40 * (i % 3), top_p=1 - 0.1 * (i % 4), logprobs=i % 5) for i in range(12)],
         False),
    ):
        yield Case(f"draws, {name}", KERNELS, partial(rows, draws, vocab, parts), quick)
    for parts in (1, 8):
        yield Case(f"draws, equal logits, {parts} parts", KERNELS, partial(equal_logits, parts), parts == 8)
        yield Case(f"draws, no token, {parts} parts", KERNELS, partial(no_token, parts), parts == 8)
    yield Case("fill_placeholders", ["fill_placeholders"], fill_placeholders, True)
