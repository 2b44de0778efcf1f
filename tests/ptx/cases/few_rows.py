"""Products of few rows: kernels/few_rows.cu."""
from functools import partial

from lab import DTYPE_BF16, DTYPE_F16, DTYPE_F32, Case, div_ceil
from ptx.numbers import F32

from .elementwise import gated
from .products import LIMIT, matrix, operand, rounded

OUTS, THREADS = 32, 512


def plain(kind, most, cols, lab):
    rows, outs = most - 1, 41
    x, w, bias, stride = lab.normal(rows, cols), matrix(lab, kind, outs, cols), lab.normal(outs), outs + 4
    results = []
    for is_rounded in (False, True) if cols % 8 == 0 else (False,):
        out = lab.out(rows, stride)
        lab.launch(f"few_rows_{kind}_{most}", (div_ceil(outs, OUTS), 1, 1), THREADS, out, operand(lab, kind, x, is_rounded), w.address,
                   lab.put(bias), rows, outs, cols, stride, is_rounded)
        results.append(lab.get(out, (rows, stride), F32)[:, :outs])
    lab.close(results[0], rounded(kind, x) @ w.numbers.T + bias, LIMIT)
    lab.equal(results[-1], results[0])


def with_gate(kind, most, cols, lab):
    rows, width = most, 23
    x, w = lab.normal(rows, cols) / F32(cols ** 0.5), matrix(lab, kind, 2 * width, cols)
    for act, bias in ((1, lab.normal(2 * width)), (4, None)):
        # Rows in f32 for results in f32, and rounded ones for rounded results.
        def launch(out, dtype):
            is_rounded = dtype != DTYPE_F32 and cols % 8 == 0
            lab.launch(f"few_rows_gated_{kind}_{most}", (div_ceil(2 * width, OUTS), 1, 1), THREADS, out, operand(lab, kind, x, is_rounded),
                       w.address, 0 if bias is None else lab.put(bias), rows, 2 * width, cols, act, 1.702, 7.0, is_rounded, dtype)

        sums = rounded(kind, x) @ w.numbers.T + (0 if bias is None else bias)
        wanted = gated(act, sums[:, :width], sums[:, width:], 1.702, 7.0)
        lab.results(wanted, 10 * LIMIT, launch, [DTYPE_F16 if kind == "f16" else DTYPE_BF16])


def cases():
    for kind in ("bf16", "f16", "fp8", "int8"):
        for most in (8, 16):
            for name, run in ((f"few_rows_{kind}_{most}", plain), (f"few_rows_gated_{kind}_{most}", with_gate)):
                # Each of the 16 warps has several chunks of 64 or 128 numbers.
                yield Case(f"{name}, 2312 columns", [name], partial(run, kind, most, 2312), kind != "f16" and most == 8)
                yield Case(f"{name}, 147 columns", [name], partial(run, kind, most, 147))
