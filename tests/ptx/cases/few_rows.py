"""Products of few rows: kernels/few_rows.cu."""
from functools import partial

import numpy as np

from lab import DTYPE_BF16, DTYPE_F16, DTYPE_F32, Case, div_ceil
from ptx.numbers import F32, F64

from .elementwise import gated
from .products import LIMIT, matrix, operand, rounded

OUTS, THREADS, EPS = 32, 512, 1e-3


def launch_plain(lab, kind, most, out, x, w, bias, stride, is_rounded=False, norm=0, offset=0.0, adds=False, scale=1.0):
    """Launches a product, of which `norm` is the address of the weights of a norm or 0."""
    rows, cols = x.shape
    outs = len(w.numbers)
    lab.launch(f"few_rows_{kind}_{most}", (div_ceil(outs, OUTS), 1, 1), THREADS, out, operand(lab, kind, x, is_rounded), w.address,
               lab.put(bias), norm, rows, outs, cols, stride, is_rounded, offset, EPS, adds, scale)


def launch_gated(lab, kind, most, out, x, w, bias, act, dtype, is_rounded=False, norm=0, offset=0.0):
    rows, cols = x.shape
    outs = len(w.numbers)
    lab.launch(f"few_rows_gated_{kind}_{most}", (div_ceil(outs, OUTS), 1, 1), THREADS, out, operand(lab, kind, x, is_rounded), w.address,
               0 if bias is None else lab.put(bias), norm, rows, outs, cols, is_rounded, offset, EPS, act, 1.702, 7.0, dtype)


def plain(kind, most, cols, lab):
    rows, outs = most - 1, 41
    x, w, bias, stride = lab.normal(rows, cols), matrix(lab, kind, outs, cols), lab.normal(outs), outs + 4
    results, wanted = [], rounded(kind, x) @ w.numbers.T + bias
    for is_rounded in (False, True) if cols % 8 == 0 else (False,):
        out = lab.out(rows, stride)
        launch_plain(lab, kind, most, out, x, w, bias, stride, is_rounded)
        results.append(lab.get(out, (rows, stride), F32)[:, :outs])
    lab.close(results[0], wanted, LIMIT)
    lab.equal(results[-1], results[0])
    before = lab.normal(rows, stride)
    stream = lab.buffer(before)
    launch_plain(lab, kind, most, stream, x, w, bias, stride, adds=True, scale=0.3)
    sums = lab.get(stream, (rows, stride), F32)
    lab.close(sums[:, :outs], before[:, :outs] + F64(F32(0.3)) * wanted, LIMIT)
    lab.equal(sums[:, outs:], before[:, outs:])


def with_gate(kind, most, cols, lab):
    rows, width = most, 23
    x, w = lab.normal(rows, cols) / F32(cols ** 0.5), matrix(lab, kind, 2 * width, cols)
    for act, bias in ((1, lab.normal(2 * width)), (4, None)):
        # Rows in f32 for results in f32, and rounded ones for rounded results.
        def launch(out, dtype):
            launch_gated(lab, kind, most, out, x, w, bias, act, dtype, dtype != DTYPE_F32 and cols % 8 == 0)

        sums = rounded(kind, x) @ w.numbers.T + (0 if bias is None else bias)
        wanted = gated(act, sums[:, :width], sums[:, width:], 1.702, 7.0)
        lab.results(wanted, 10 * LIMIT, launch, [DTYPE_F16 if kind == "f16" else DTYPE_BF16])


def normed(kind, cols, lab):
    """Products that begin with a norm. The rows differ in size, and exceed the range of f16."""
    rows, width = 4, 23
    x = lab.normal(rows, cols) * np.array([[1e-2], [1], [1e6], [1e15]], F32)
    weight, w, bias = lab.normal(cols), matrix(lab, kind, 2 * width, cols), lab.normal(2 * width)
    factor = 1 / np.sqrt((x.astype(F64) ** 2).mean(-1, keepdims=True) + EPS)
    for offset in (0.0, 1.0):
        sums = rounded(kind, x * (weight + F32(offset))) @ w.numbers.T * factor + bias
        out = lab.out(rows, 2 * width)
        launch_plain(lab, kind, 8, out, x, w, bias, 2 * width, norm=lab.put(weight), offset=offset)
        lab.close(lab.get(out, sums.shape, F32), sums, LIMIT)
        out = lab.out(rows, width)
        launch_gated(lab, kind, 8, out, x, w, bias, 1, DTYPE_F32, norm=lab.put(weight), offset=offset)
        with np.errstate(over="ignore"):  # some gates are very negative
            wanted = gated(1, sums[:, :width], sums[:, width:], 0, 0)
        lab.close(lab.get(out, (rows, width), F32), wanted, 10 * LIMIT)


def cases():
    for kind in ("bf16", "f16", "fp8", "int8"):
        for most in (8, 16):
            for name, run in ((f"few_rows_{kind}_{most}", plain), (f"few_rows_gated_{kind}_{most}", with_gate)):
                # Each of the 16 warps has several chunks of 64 or 128 numbers.
                yield Case(f"{name}, 2312 columns", [name], partial(run, kind, most, 2312), kind != "f16" and most == 8)
                yield Case(f"{name}, 147 columns", [name], partial(run, kind, most, 147))
    for kind in ("bf16", "fp8", "int8"):
        names = [f"few_rows_{kind}_8", f"few_rows_gated_{kind}_8"]
        for cols in (2312, 147):
            yield Case(f"few_rows_{kind}_8 with a norm, {cols} columns", names, partial(normed, kind, cols), (kind, cols) == ("bf16", 2312))
