"""Copies of boxes of tensors to shared memory by the Tensor Memory Accelerator."""
from dataclasses import dataclass

import numpy as np

from .barriers import Phase
from .memory import AccessError
from .tensor_map import MAP_BYTES, PARAMETERS, TensorMap

ALIGNMENT = 128  # of a box in shared memory


@dataclass
class TensorCopy:
    """A copy that is not complete. Its bytes belong to the phase in progress when it was issued."""
    launch: object
    at: int              # its instruction
    phase: Phase
    number: int          # phases of the barrier that had ended
    offsets: np.ndarray  # of words in shared memory
    words: np.ndarray

    def complete(self):
        self.launch.at = self.at
        if self.phase.ended != self.number:
            raise AccessError("a phase ended before the copy that was issued in it: its barrier does not expect all bytes")
        self.launch.shared.end_tensor_copy(self.offsets, self.words)
        self.phase.complete_bytes(4 * len(self.words))


class TensorCopies:
    """The copies of a launch. Each is complete as late as possible: when no thread can run."""

    def __init__(self, launch):
        self.launch = launch

    def map_at(self, address):
        number, rest = divmod(int(address) - PARAMETERS, MAP_BYTES)
        parameters = self.launch.parameters
        if rest or not 0 <= number < len(parameters) or not isinstance(parameters[number], TensorMap):
            raise AccessError(f"the address {int(address):#x} is not that of a tensor map")
        return parameters[number]

    def prefetch(self, addresses, mask):
        for address in np.unique(self.launch.chosen(addresses, mask)[1]).tolist():
            self.map_at(address)

    def begin(self, targets, maps, coordinates, barriers, mask):
        """Each active thread issues a copy."""
        for_all, barriers_of = self.launch.for_all, self.launch.barriers
        for lane in barriers_of.lanes(mask).tolist():
            tensor, target = self.map_at(for_all(maps)[lane]), int(for_all(targets)[lane])
            first = [int(for_all(coordinate)[lane]) for coordinate in coordinates]
            if len(first) != len(tensor.box):
                raise AccessError(f"a copy has {len(first)} coordinates, and its tensor {len(tensor.box)} dimensions")
            if target % ALIGNMENT:
                raise AccessError(f"the address {target:#x} of a box is not a multiple of {ALIGNMENT}")
            phase = barriers_of.phase_of_copy(barriers, lane)
            words = self.read(tensor, first, lane)
            offsets = self.launch.shared.begin_tensor_copy(tensor.words(target), lane, phase.column, phase.ended + 1)
            barriers_of.later.append(TensorCopy(self.launch, self.launch.at, phase, phase.ended, offsets, words))

    def read(self, tensor, coordinates, lane):
        """Returns the words of a box."""
        if self.launch.program.waits and not self.launch.waited[lane]:
            raise AccessError("a copy of global memory before the wait for the previous kernel")
        addresses, inside = tensor.elements(coordinates)
        numbers = np.zeros(len(addresses), f"u{tensor.size}")
        if inside.any():
            numbers[inside] = self.launch.device.read_by_copy(addresses[inside].astype(np.uint64), numbers.dtype, lane)
        return numbers.view(np.uint32)
