"""Norms: kernels/norm.cu."""
from functools import partial

import numpy as np

from lab import Case, row_threads
from ptx.numbers import F32, F64

RMS, RMS_UNIT_OFFSET, LAYER = range(3)
EPS, LIMIT = 1e-3, 2e-6


def norm_of(x, kind, weight, bias):
    x = x.astype(F64)
    mean = x.mean(-1, keepdims=True) if kind == LAYER else 0
    scaled = (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPS)
    return scaled * (weight + F64(kind == RMS_UNIT_OFFSET)) + bias


def rows(width, lab):
    x, y, weight, bias = lab.normal(3, width), lab.normal(3, width), lab.normal(width), lab.normal(width)
    for kind, has_bias in ((RMS, False), (RMS_UNIT_OFFSET, False), (LAYER, True)):
        biases = lab.put(bias) if has_bias else 0
        grid, threads = (3, 1, 1), row_threads(width)

        def norm_rows(out, dtype):
            lab.launch("norm_rows", grid, threads, out, lab.put(x), lab.put(weight), biases, width, kind, EPS, dtype)

        def add_norm(out, dtype):
            sums = lab.buffer(x)
            lab.launch("add_norm", grid, threads, out, sums, lab.put(y), lab.put(weight), biases, width, kind, EPS, 0.5, dtype)
            lab.equal(lab.get(sums, x.shape, F32), x + F32(0.5) * y)

        lab.results(norm_of(x, kind, weight, bias * has_bias), LIMIT, norm_rows)
        lab.results(norm_of(x + F32(0.5) * y, kind, weight, bias * has_bias), LIMIT, add_norm)


def heads(lab):
    count, dim, first, stride = 3, 80, 16, 300
    x = lab.normal(4, stride)
    for own, has_bias in ((1, False), (count, True)):
        weight, bias, out = lab.normal(own, dim), lab.normal(own, dim), lab.buffer(x)
        lab.launch("norm_heads", (4, count, 1), row_threads(dim), out, lab.put(weight), lab.put(bias) if has_bias else 0, first, dim,
                   stride, own, LAYER, EPS)
        wanted = x.astype(F64)
        of_heads = x[:, first:first + count * dim].reshape(4, count, dim)
        wanted[:, first:first + count * dim] = norm_of(of_heads, LAYER, weight, bias * has_bias).reshape(4, -1)
        lab.close(lab.get(out, x.shape, F32), wanted, LIMIT)


def cases():
    yield Case("norms of 700 numbers", ["norm_rows", "add_norm"], partial(rows, 700), True)
    # More numbers than the registers of 512 threads hold.
    yield Case("norms of 5000 numbers", ["norm_rows", "add_norm"], partial(rows, 5000))
    yield Case("norm_heads", ["norm_heads"], heads, True)
