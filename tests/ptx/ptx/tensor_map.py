"""Descriptions of tensors in global memory, of which a kernel copies boxes to shared memory."""
from dataclasses import dataclass

import numpy as np

from .parser import PtxError

# Addresses of the maps among the parameters of a kernel. A kernel does not read their bytes.
PARAMETERS, MAP_BYTES = 1 << 44, 128
BYTES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "f32": 4}  # of an element
CHUNK = 16
SWIZZLES = (0, 32, 64, 128)  # bytes within which chunks are permuted


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled: `strides` in bytes, without that of the first dimension,
    which is the innermost one. Elements outside of the tensor are zeros; nothing is interleaved."""
    kind: str
    address: int
    dims: tuple
    strides: tuple
    box: tuple
    swizzle: int = 0

    def __post_init__(self):
        """Checks what the driver checks."""
        inner = self.box[0] * self.size
        for problem, wrong in (
            ("a rank that is not 1 to 5, or differs", not 1 <= len(self.dims) <= 5 or not len(self.box) == len(self.dims) == len(self.strides) + 1),
            ("an address that is not a multiple of 16", self.address % 16),
            ("a dimension that is not 1 to 2^32", any(not 1 <= dim <= 1 << 32 for dim in self.dims)),
            ("a stride that is not a multiple of 16 below 2^40", any(not 0 <= stride < 1 << 40 or stride % 16 for stride in self.strides)),
            ("a box that is not 1 to 256 wide", any(not 1 <= width <= 256 for width in self.box)),
            ("rows of the box that are not a multiple of 16 bytes", inner % CHUNK),
            ("an unknown swizzle", self.swizzle not in SWIZZLES),
            ("rows of the box that are longer than the swizzle", self.swizzle and inner > self.swizzle),
        ):
            if wrong:
                raise PtxError(f"the driver refuses a tensor map with {problem}: {self}")
        if self.swizzle and inner != self.swizzle:
            raise PtxError(f"unknown: a tensor map whose box has shorter rows than its swizzle: {self}")

    @property
    def size(self):
        return BYTES[self.kind]

    def elements(self, coordinates):
        """Returns the addresses of the elements of a box, innermost dimension last, and which of them are in
        the tensor."""
        inside, addresses = np.ones(self.box[::-1], bool), np.full(self.box[::-1], self.address, np.int64)
        for axis, (first, width, dim, stride) in enumerate(zip(coordinates, self.box, self.dims, (self.size, *self.strides))):
            index = (first + np.arange(width, dtype=np.int64)).reshape(-1, *[1] * axis)
            inside &= (index >= 0) & (index < dim)
            addresses += index * stride
        return addresses.ravel(), inside.ravel()

    def words(self, target):
        """Returns the addresses in shared memory of the words of a box. The pattern of a swizzle begins at
        multiples of its size, also if the box begins elsewhere."""
        found = target + 4 * np.arange(int(np.prod(self.box)) * self.size // 4)
        rows = max(self.swizzle - CHUNK, 0) << 3  # the bits of an address that are a row of the pattern
        return found ^ (found & rows) >> 3
