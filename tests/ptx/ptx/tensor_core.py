"""Tensor core instructions, with the layouts of fragments of the PTX ISA.

Registers are arrays [threads]. Within a warp, `g` is the lane divided by 4, and `t` the remainder.
"""
import numpy as np


def halves(register):
    """Returns the two 16-bit numbers of a register as [warps, g, t, 2]."""
    return register.view(np.uint16).reshape(-1, 8, 4, 2)


def decode(numbers, kind):
    if kind == "bf16":
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return numbers.view(np.float16).astype(np.float64)


def mma_m16n8k16(kind, a, b, c):
    """Returns the four registers of d = a * b + c. Products are summed in f64 and rounded once.

    Registers of a: rows g and g + 8 of columns 2t and 2t + 1, then the same of columns 2t + 8 and 2t + 9.
    Registers of b: rows 2t and 2t + 1 of column g, then rows 2t + 8 and 2t + 9.
    Registers of c: columns 2t and 2t + 1 of row g, then those of row g + 8.
    """
    warps = len(c[0]) // 32
    left = decode(np.stack([halves(register) for register in a]), kind)    # [columns / 8 and rows / 8, warps, g, t, 2]
    left = left.reshape(2, 2, warps, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, 16)
    right = decode(np.stack([halves(register) for register in b]), kind)   # [rows / 8, warps, g, t, 2]
    right = right.transpose(1, 0, 3, 4, 2).reshape(warps, 16, 8)
    added = np.stack(c).reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)
    with np.errstate(all="ignore"):
        sums = (np.matmul(left, right) + added).astype(np.float32)
    rows = sums.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return [np.ascontiguousarray(rows[i // 2, i % 2]).reshape(-1) for i in range(4)]


def ldmatrix_x4(rows, transposed):
    """Returns the four registers of an ldmatrix. `rows` has the four words at the address of each lane,
    as [threads, 4]: lane l has row l % 8 of matrix l / 8.

    A lane receives numbers 2t and 2t + 1 of row g of each matrix or, transposed, number g of rows 2t and
    2t + 1.
    """
    matrices = rows.reshape(-1, 4, 8, 4)                                  # [warps, matrix, row, word]
    if transposed:
        numbers = matrices.view(np.uint16).reshape(-1, 4, 4, 2, 8)         # [warps, matrix, t, 2, column]
        matrices = np.ascontiguousarray(numbers.transpose(0, 1, 4, 2, 3)).view(np.uint32)
    return [np.ascontiguousarray(matrices[:, i]).reshape(-1) for i in range(4)]
