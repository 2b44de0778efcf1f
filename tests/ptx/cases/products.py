"""Products of kernels/matmul.cu, and the conversions before and after those of cuBLASLt."""
from dataclasses import dataclass
from functools import partial

import numpy as np

from lab import Case, div_ceil, grid_of_numbers, row_threads
from ptx.numbers import F32, F64, from_bf16, from_e4m3, to_bf16, to_e4m3, to_f16

THREADS = 128
LIMIT = 1e-6  # the reference rounds the operands as the kernels do


@dataclass
class Tile:
    """`Tile` of src/backend/cuda/kernels.rs: `step` is the bytes of a step of a row of x."""
    rows: int
    outs: int
    step: int
    stages: int

    def shared(self, pitch):
        """Bytes of shared memory. `pitch` is the bytes of a step of a row of w."""
        return self.stages * self.outs * pitch + 2 * self.rows * (self.step + 16)


TILES = {"16": Tile(16, 32, 256, 6), "32": Tile(32, 32, 256, 5), "64": Tile(64, 64, 128, 4), "128": Tile(128, 128, 64, 4)}
BYTES = ("fp8", "int8")  # with a scale for each row
TILES_OF_BYTES = {**TILES, "16": Tile(16, 32, 512, 6), "32": Tile(32, 32, 512, 5)}


def tiles_of(kind):
    """Returns the tiles for matrices of a type."""
    return TILES_OF_BYTES if kind in BYTES else {rows: tile for rows, tile in TILES.items() if (kind, rows) != ("f32", "32")}


def tile_of(kind, rows):
    return tiles_of(kind)[rows]


def pitch_of(tile, kind):
    return (tile.step // 2 if kind in BYTES else tile.step) + 16


def rounded(kind, x):
    """Returns x as a product with a matrix of a type reads it."""
    if kind == "f32":
        return x.astype(F64)
    return (x.astype(np.float16) if kind == "f16" else from_bf16(to_bf16(x))).astype(F64)


def operand(lab, kind, x, is_rounded):
    """Returns the address of x as a product with a matrix of a type reads it: in f32, or rounded."""
    return lab.put(x if not is_rounded else to_f16(x) if kind == "f16" else to_bf16(x))


@dataclass
class Matrix:
    address: int
    numbers: np.ndarray  # [outs, cols]


def matrix(lab, kind, outs, cols):
    """Stores random numbers as matrix.rs does: rows are padded to 16 bytes, and scales follow them."""
    each = 16 if kind in BYTES else 8
    padded = np.zeros((outs, div_ceil(cols, each) * each), F32)
    padded[:, :cols] = lab.normal(outs, cols)
    if kind == "fp8":
        codes, scales = to_e4m3(padded * 16), (lab.random.random(outs) / 16).astype(F32)
        data = np.frombuffer(codes.tobytes() + scales.tobytes(), np.uint8)
        return Matrix(lab.put(data), from_e4m3(codes[:, :cols]) * scales[:, None].astype(F64))
    if kind == "int8":
        codes, scales = np.zeros(padded.shape, np.int8), lab.random.random(outs).astype(F32)
        codes[:, :cols] = lab.random.integers(-127, 128, (outs, cols))
        data = np.frombuffer(codes.tobytes() + scales.tobytes(), np.uint8)
        return Matrix(lab.put(data), codes[:, :cols] * scales[:, None].astype(F64))
    data = {"f32": lambda x: x, "f16": to_f16, "bf16": to_bf16}[kind](padded)
    return Matrix(lab.put(data), rounded(kind, padded)[:, :cols])


def multiply(lab, kind, tile, x, w, bias=None, stride=None, at=0, is_rounded=False):
    """Launches a product, into rows of `stride` numbers from column `at` on. Returns the rows."""
    (rows, cols), outs, shape = x.shape, len(w.numbers), tile_of(kind, tile)
    stride = stride or outs
    out = lab.out(rows, stride)
    grid = div_ceil(outs, shape.outs), div_ceil(rows, shape.rows), 1
    lab.launch(f"matmul_{kind}_{tile}", grid, THREADS, out + 4 * at, operand(lab, kind, x, is_rounded), w.address,
               0 if bias is None else lab.put(bias), 0, 0, 0, rows, outs, cols, stride, is_rounded, shared=shape.shared(pitch_of(shape, kind)))
    return lab.get(out, (rows, stride), F32)


def product(kind, tile, rows, outs, cols, lab):
    x, w, bias = lab.normal(rows, cols), matrix(lab, kind, outs, cols), lab.normal(outs)
    wanted = rounded(kind, x) @ w.numbers.T
    lab.close(multiply(lab, kind, tile, x, w, bias), wanted + bias, LIMIT)
    got = multiply(lab, kind, tile, x[:5], w, stride=outs + 3, at=1)
    lab.close(got[:, 1:-2], wanted[:5], LIMIT)
    if not np.isnan(got[:, [0, -2, -1]]).all():
        raise AssertionError("columns beyond the matrix were written")


def same_bits(kind, lab):
    """A row has the same bits, whatever the tile."""
    x, w, bias = lab.normal(20, 330), matrix(lab, kind, 40, 330), lab.normal(40)
    first, *others = (multiply(lab, kind, tile, x, w, bias).view(np.uint32) for tile in tiles_of(kind))
    for other in others:
        lab.equal(other, first)


def same_bits_of_rounded_rows(kind, tile, lab):
    """Rows that were rounded before have the products of rows in f32."""
    x, w, bias = lab.normal(20, 1048), matrix(lab, kind, 40, 1048), lab.normal(40)
    first, other = (multiply(lab, kind, tile, x, w, bias, is_rounded=rounded).view(np.uint32) for rounded in (False, True))
    lab.equal(other, first)


def strips(kind, tile, lab):
    """One product for each strip of x, with its own matrix and bias."""
    count, rows, outs, cols, shape = 3, 5, 37, 72, tile_of(kind, tile)
    x, matrices = lab.normal(count, rows, cols), [matrix(lab, kind, outs, cols) for _ in range(count)]
    biases = lab.normal(count, outs)
    lists = [np.array(addresses, np.uint64) for addresses in ([w.address for w in matrices], [lab.put(bias) for bias in biases])]
    out = lab.out(count, rows, outs)
    grid = div_ceil(outs, shape.outs), div_ceil(rows, shape.rows), count
    lab.launch(f"matmul_{kind}_{tile}", grid, THREADS, out, lab.put(x), 0, 0, lab.put(lists[0]), lab.put(lists[1]), 0, rows, outs, cols,
               outs, False, shared=shape.shared(pitch_of(shape, kind)))
    wanted = np.stack([rounded(kind, part) @ w.numbers.T + bias for part, w, bias in zip(x, matrices, biases)])
    lab.close(lab.get(out, wanted.shape, F32), wanted, LIMIT)


def experts(kind, tile, lab):
    """The rows of each expert with its matrix. One has no rows, and one has more than a tile."""
    rows, outs, cols, shape = 24, 40, 72, tile_of(kind, tile)
    starts = np.array([0, 3, 3, 20, 24], np.uint32)
    x, matrices = lab.normal(int(starts[-1]), cols), [matrix(lab, kind, outs, cols) for _ in starts[1:]]
    out, listed = lab.out(len(x), outs), lab.put(np.array([w.address for w in matrices], np.uint64))
    grid = div_ceil(outs, shape.outs), div_ceil(rows, shape.rows), len(matrices)
    lab.launch(f"matmul_{kind}_{tile}", grid, THREADS, out, operand(lab, kind, x, kind != "f32"), 0, 0, listed, 0, lab.put(starts), rows, outs,
               cols, outs, kind != "f32", shared=shape.shared(pitch_of(shape, kind)))
    wanted = np.zeros((len(x), outs))
    for first, end, w in zip(starts, starts[1:], matrices):
        wanted[first:end] = rounded(kind, x[first:end]) @ w.numbers.T
    lab.close(lab.get(out, wanted.shape, F32), wanted, LIMIT)


def to_stored(kind, lab):
    rows, cols = 3, 77
    x, pitch = lab.normal(rows, cols), div_ceil(cols, 8) * 8
    out = lab.allocate(2 * rows * pitch)
    lab.launch(f"to_{kind}", (rows, 1, 1), row_threads(cols), out, lab.put(x), cols)
    wanted = np.zeros((rows, pitch), np.uint16)
    wanted[:, :cols] = (to_bf16 if kind == "bf16" else to_f16)(x)
    lab.equal(lab.get(out, wanted.shape, np.uint16), wanted)


def to_fp8(lab):
    rows, cols = 4, 77
    x, pitch = lab.normal(rows, cols), div_ceil(cols, 16) * 16
    x[2] = 0
    out, scales = lab.allocate(rows * pitch), lab.out(rows)
    lab.launch("to_fp8", (rows, 1, 1), row_threads(cols), out, scales, lab.put(x), cols)
    size = np.abs(x).max(1, keepdims=True)
    inverse = np.where(size > 0, F32(448) / np.maximum(size, F32(1e-30)), F32(0))
    wanted = np.zeros((rows, pitch), np.uint8)
    wanted[:, :cols] = to_e4m3(x * inverse)
    lab.equal(lab.get(out, wanted.shape, np.uint8), wanted)
    lab.close(lab.get(scales, (rows,), F32), size[:, 0] / 448, LIMIT)


def scale_product(lab):
    rows, outs = 3, 300
    x, of_rows, of_outs, bias = lab.normal(rows, outs), lab.normal(rows), lab.normal(outs), lab.normal(outs)
    for scales, biases in ((of_rows, bias), (None, bias), (of_rows, None)):
        out = lab.buffer(x)
        lab.launch("scale_product", grid_of_numbers(rows, outs), 256, out, 0 if scales is None else lab.put(scales), lab.put(of_outs),
                   0 if biases is None else lab.put(biases), outs)
        wanted = x.astype(F64) * (1 if scales is None else scales[:, None] * of_outs.astype(F64)) + (0 if biases is None else biases)
        lab.close(lab.get(out, x.shape, F32), wanted, LIMIT)


def cases():
    kinds = ("bf16", "f16", "f32", "fp8", "int8")
    for kind in kinds:
        for tile in tiles_of(kind):
            kernel, quick = [f"matmul_{kind}_{tile}"], kind in ("bf16", "fp8") and tile != "128" or (kind, tile) == ("f16", "16")
            yield Case(f"{kernel[0]}, 13 x 70 x 203", kernel, partial(product, kind, tile, 13, 70, 203))
            # More steps than there are stages of shared memory.
            yield Case(f"{kernel[0]}, 9 x 40 x 1048", kernel, partial(product, kind, tile, 9, 40, 1048), quick)
            yield Case(f"{kernel[0]}, 140 x 136 x 72", kernel, partial(product, kind, tile, 140, 136, 72))
            yield Case(f"{kernel[0]}, strips", kernel, partial(strips, kind, tile))
            if kind != "f32":
                yield Case(f"{kernel[0]}, rounded rows", kernel, partial(same_bits_of_rounded_rows, kind, tile), quick)
            yield Case(f"{kernel[0]}, experts", kernel, partial(experts, kind, tile), (kind, tile) == ("bf16", "16"))
        yield Case(f"matmul_{kind}, same bits in all tiles", [f"matmul_{kind}_{tile}" for tile in tiles_of(kind)], partial(same_bits, kind))
    for kind in ("bf16", "f16"):
        yield Case(f"to_{kind}", [f"to_{kind}"], partial(to_stored, kind), True)
    yield Case("to_fp8", ["to_fp8"], to_fp8, True)
    yield Case("scale_product", ["scale_product"], scale_product, True)
