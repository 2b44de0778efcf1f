"""What the cases need: a device, launches, and comparisons."""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptx.machine import Machine
from ptx.memory import Device
from ptx.numbers import F32, to_bf16, to_f16

WARP, FLAT = 32, 256


@dataclass
class Case:
    """A test, which launches the kernels that it names. `make test-kernels` runs the quick ones. Kernels
    for `hopper` exist only in the code for sm_90a."""
    name: str
    kernels: list
    run: Callable
    quick: bool = False
    hopper: bool = False


# The types of rows that kernels write (`Dtype` of common.cuh), and the roundings of f32 to them.
DTYPE_F32, DTYPE_F16, DTYPE_BF16 = range(3)
ROUNDINGS = {DTYPE_F16: to_f16, DTYPE_BF16: to_bf16}


class Mismatch(AssertionError):
    """A result of a kernel that differs from its reference."""


class Lab:
    """A device with empty memory, and the machine that executes the kernels of a module."""

    def __init__(self, machine: Machine, seed=1):
        self.machine, self.device = machine, Device()
        self.random = np.random.default_rng(seed)
        self.put, self.buffer, self.allocate, self.get = self.device.put, self.device.buffer, self.device.allocate, self.device.get
        self.worst = 0.0

    def launch(self, name, grid, threads, *arguments, shared=0):
        self.machine.launch(self.device, name, grid, threads, shared, *arguments)

    def normal(self, *shape):
        return self.random.standard_normal(shape).astype(F32)

    def out(self, *shape):
        """Allocates f32 results, which are NaN until they are written."""
        return self.allocate(4 * int(np.prod(shape)))

    def results(self, wanted, limit, launch, dtypes=(DTYPE_F16, DTYPE_BF16)):
        """Compares the f32 results that launch(out, dtype) writes. In other types, they are rounded."""
        out = self.out(*wanted.shape)
        launch(out, DTYPE_F32)
        exact = self.get(out, wanted.shape, F32)
        self.close(exact, wanted, limit)
        for dtype in dtypes:
            out = self.allocate(2 * wanted.size)
            launch(out, dtype)
            self.equal(self.get(out, wanted.shape, np.uint16), ROUNDINGS[dtype](exact))

    def close(self, got, wanted, limit):
        """Compares by the norm of the difference, relative to that of the reference."""
        wanted = np.asarray(wanted, np.float64)
        difference = np.linalg.norm((got - wanted).ravel()) / max(np.linalg.norm(wanted.ravel()), 1e-30)
        if not difference <= limit:
            raise Mismatch(f"relative difference {difference:.2e}, limit {limit:.0e}, {int(np.isnan(got).sum())} NaN")
        self.worst = max(self.worst, float(difference))

    def equal(self, got, wanted):
        got, wanted = np.asarray(got), np.asarray(wanted)
        if got.shape != wanted.shape or (got != wanted).any():
            first = np.argwhere(got != wanted)[0].tolist() if got.shape == wanted.shape else "the shape"
            raise Mismatch(f"{int((got != wanted).sum())} of {got.size} numbers differ, the first at {first}")


def div_ceil(a, b):
    return -(-a // b)


def row_threads(width):
    """The threads of a block that processes a row (`row_threads` in function.rs)."""
    return min(max(div_ceil(width, WARP) * WARP, WARP), 512)


def grid_of_numbers(rows, width):
    return rows, div_ceil(width, FLAT), 1
