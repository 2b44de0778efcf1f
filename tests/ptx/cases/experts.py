"""Routing to experts: kernels/experts.cu."""
from functools import partial

import numpy as np

from lab import Case, row_threads
from ptx.numbers import F32, F64

LIMIT = 1e-6
ROUTE_WARPS, SORT_THREADS = 4, 256
SOFTMAX, SIGMOID = range(2)
NO_GROUPS = (0, 0, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(F64)))


def chosen(scores, top_k, groups):
    """Returns the experts of each row, by descending score and then by ascending number."""
    count, of_these, best_two = groups
    if count:
        by_group = np.sort(scores.reshape(len(scores), count, -1), -1)
        of_groups = by_group[..., -1] + (by_group[..., -2] if best_two else 0)
        allowed = np.argsort(-of_groups, 1, kind="stable")[:, :of_these]
        mask = np.zeros((len(scores), count), bool)
        np.put_along_axis(mask, allowed, True, 1)
        scores = np.where(np.repeat(mask, scores.shape[1] // count, 1), scores, -np.inf)
    return np.argsort(-scores, 1, kind="stable")[:, :top_k]


def route(rows, experts, top_k, kind, normalized, groups, lab):
    logits, correction, scale = lab.normal(rows, experts), lab.normal(experts), 1.25
    logits[0, :] = logits[0, 0]  # equal scores
    if kind == SIGMOID:
        correction = np.abs(correction)
    of, weights = lab.allocate(4 * rows * top_k), lab.out(rows, top_k)
    lab.launch("route", (-(-rows // ROUTE_WARPS), 1, 1), 32 * ROUTE_WARPS, of, weights, lab.put(logits),
               lab.put(correction) if kind == SIGMOID else 0, rows, experts, top_k, kind, normalized, scale, *groups)
    scores = logits.astype(F64) if kind == SOFTMAX else sigmoid(logits) + correction
    wanted = chosen(scores, top_k, groups)
    lab.equal(lab.get(of, wanted.shape, np.uint32), wanted)
    all_weights = np.exp(logits.astype(F64)) if kind == SOFTMAX else sigmoid(logits)
    own = np.take_along_axis(all_weights, wanted, 1)
    divisor = own.sum(1, keepdims=True) if normalized else all_weights.sum(1, keepdims=True) if kind == SOFTMAX else 1
    lab.close(lab.get(weights, own.shape, F32), own / divisor * scale, LIMIT)


def sorted_routes(lab, rows, experts, top_k):
    """Launches sort_routes for random choices. Returns them, and the addresses of the results."""
    choices = np.array([lab.random.permutation(experts)[:top_k] for _ in range(rows)], np.uint32)
    starts, sources, places = (lab.allocate(4 * count) for count in (experts + 1, rows * top_k, rows * top_k))
    lab.launch("sort_routes", (experts, 1, 1), SORT_THREADS, starts, sources, places, lab.put(choices), rows, experts, top_k)
    return choices, starts, sources, places


def sort(rows, lab):
    experts, top_k = 6, 2
    choices, starts, sources, places = sorted_routes(lab, rows, experts, top_k)
    order = np.argsort(choices.ravel(), kind="stable")
    lab.equal(lab.get(sources, order.shape, np.uint32), order // top_k)
    lab.equal(lab.get(places, order.shape, np.uint32)[order], np.arange(len(order)))
    lab.equal(lab.get(starts, (experts + 1,), np.uint32), np.searchsorted(np.sort(choices.ravel()), np.arange(experts + 1)))


def gather_and_combine(width, lab):
    """Experts 1 to 3 of 6 are on this device, so other routes have no rows."""
    rows, experts, top_k, first, count = 9, 6, 2, 1, 3
    choices, starts, sources, places = sorted_routes(lab, rows, experts, top_k)
    x, weights, threads = lab.normal(rows, width), lab.random.random((rows, top_k)).astype(F32), row_threads(width)
    gathered, combined = lab.out(rows * top_k, width), lab.out(rows, width)
    local = starts + 4 * first
    lab.launch("gather_routes", (rows * top_k, 1, 1), threads, gathered, lab.put(x), sources, local, count, width)
    begin, end = lab.get(starts, (experts + 1,), np.uint32)[[first, first + count]]
    rows_of = lab.get(gathered, (rows * top_k, width), F32)
    lab.equal(rows_of[begin:end], x[lab.get(sources, (rows * top_k,), np.uint32)[begin:end]])
    if not (np.isnan(rows_of[:begin]).all() and np.isnan(rows_of[end:]).all()):
        raise AssertionError("a route to another device was written")
    lab.launch("combine_routes", (rows, 1, 1), threads, combined, gathered, places, lab.put(weights), local, count, width, top_k)
    here = (choices >= first) & (choices < first + count)
    lab.close(lab.get(combined, x.shape, F32), x * (weights.astype(F64) * here).sum(1, keepdims=True), LIMIT)


def cases():
    for name, arguments in {
        "softmax, normalized": (9, 64, 6, SOFTMAX, 1, NO_GROUPS),
        "softmax": (3, 60, 4, SOFTMAX, 0, NO_GROUPS),
        "softmax, groups by best": (5, 64, 6, SOFTMAX, 0, (8, 3, 0)),
        "sigmoid, groups by best two": (5, 256, 8, SIGMOID, 1, (8, 4, 1)),
        "sigmoid": (2, 33, 33, SIGMOID, 0, NO_GROUPS),
    }.items():
        yield Case(f"route, {name}", ["route"], partial(route, *arguments), True)
    for rows in (37, 700):
        yield Case(f"sort_routes, {rows} rows", ["sort_routes"], partial(sort, rows), rows == 37)
    for width in (96, 70):
        kernels = ["sort_routes", "gather_routes", "combine_routes"]
        yield Case(f"gather_routes and combine_routes, width {width}", kernels, partial(gather_and_combine, width), True)
