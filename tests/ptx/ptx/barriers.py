"""Barriers between some threads of a block, barriers with phases, and registers of warpgroups."""
from dataclasses import dataclass

import numpy as np

from .memory import AccessError
from .parser import PtxError
from .races import WARP

REGISTERS = 1 << 16      # of a multiprocessor
BARRIERS_OF_COPIES = 32  # of a block, for which copies of boxes count
MAX_BYTES = (1 << 20) - 1


class Phase:
    """A barrier whose phase ends after `expected` arrivals, when copies have brought the expected bytes."""

    def __init__(self, expected, clock):
        self.expected = self.left = expected
        self.ended, self.gathered, self.clock = 0, clock, clock
        self.bytes = 0           # that copies have to bring, less those that they have brought
        self.column = None       # of the clocks, for its copies
        self.begun_by = None     # the thread that has initialized the barrier and passed no fence since

    def arrive(self, count, clock, expected_bytes=0):
        self.left -= count
        self.bytes += expected_bytes
        self.gathered = np.maximum(self.gathered, clock)
        if self.left < 0:
            raise AccessError("a barrier has more arrivals than it expects")
        if self.bytes > MAX_BYTES:
            raise AccessError(f"a barrier expects {self.bytes} bytes, the most are {MAX_BYTES}")
        self.end_if_complete()

    def complete_bytes(self, count):
        """A copy has brought bytes."""
        self.bytes -= count
        self.gathered = self.gathered.copy()
        self.gathered[:, self.column] = self.ended + 1
        self.end_if_complete()

    def end_if_complete(self):
        if self.left == 0 and self.bytes < 0:
            raise AccessError(f"copies bring {-self.bytes} bytes more than their barrier expects")
        if self.left == 0 and self.bytes == 0:
            self.ended, self.left, self.clock = self.ended + 1, self.expected, self.gathered


@dataclass
class Arrivals:
    """Arrivals at barriers that follow when the copies of their threads are complete."""
    launch: object
    addresses: np.ndarray
    lanes: np.ndarray
    clocks: dict
    copies: list

    def complete(self):
        for lanes, offsets, words, epochs in self.copies:
            self.launch.shared.end_copy(offsets, list(words), lanes, epochs)
        self.launch.barriers.arrive_with(self.addresses, self.lanes, self.clocks)


class Barriers:
    """The barriers of a launch, by block and number or address."""

    def __init__(self, launch):
        self.launch, self.clocks = launch, launch.clocks
        self.named, self.phases, self.later = {}, {}, []  # `later` becomes complete when no thread can run
        self.columns = {}   # by block: barriers for which copies of boxes count
        self.awaited = np.zeros(launch.count, np.int64)  # the phase of a named barrier that a thread waits for
        each = REGISTERS // launch.of_block // 8 * 8
        self.registers = np.full(launch.count // WARP, each)

    def lanes(self, mask):
        return self.launch.lanes if mask is None else np.flatnonzero(mask)

    def by_key(self, numbers, lanes):
        """Yields each block and number, with its lanes."""
        numbers = self.launch.for_all(numbers)[lanes].astype(np.int64)
        keys = self.launch.threads.block[lanes].astype(np.int64) << 32 | numbers
        for key in np.unique(keys).tolist():
            yield (key >> 32, key & 0xFFFFFFFF), lanes[keys == key]

    # ---- barriers of some warps, by number

    def arrive_at_named(self, numbers, counts, mask):
        self.launch.whole_warps(mask)
        clocks = self.released(self.lanes(mask))
        for key, lanes in self.by_key(numbers, self.lanes(mask)):
            count = int(self.launch.for_all(counts)[lanes[0]])
            if not 1 <= key[1] <= 15 or count % WARP or (self.launch.for_all(counts)[lanes] != count).any():
                raise PtxError(f"unknown PTX: barrier {key[1]} of {count} threads")
            barrier = self.named.setdefault(key, Phase(count, self.clocks.none()))
            if barrier.left == barrier.expected:
                barrier.expected = barrier.left = count
            if barrier.expected != count:
                raise AccessError(f"barrier {key[1]} counts {barrier.expected} threads and {count} threads")
            self.awaited[lanes] = barrier.ended
            for warp in np.unique(lanes // WARP).tolist():
                barrier.arrive(WARP, clocks[warp])

    def named_ended(self, numbers, mask):
        """True for the threads whose named barrier has ended."""
        ended = np.zeros(self.launch.count, bool)
        for key, lanes in self.by_key(numbers, self.lanes(mask)):
            ended[lanes] = self.named[key].ended > self.awaited[lanes]
        return ended

    def leave_named(self, numbers, mask):
        self.launch.warp_barrier(np.uint32(0xFFFFFFFF), mask)
        for key, lanes in self.by_key(numbers, self.lanes(mask)):
            self.clocks.acquire(np.unique(lanes // WARP), self.named[key].clock)

    # ---- barriers in shared memory

    def begin(self, addresses, counts, mask):
        lanes = self.lanes(mask)
        words = np.zeros(len(lanes), np.uint64)
        self.launch.shared.write(self.launch.for_all(addresses)[lanes], np.uint64, [words], lanes)
        for key, of in self.by_key(addresses, lanes):
            phase = self.phases[key] = Phase(int(self.launch.for_all(counts)[of[0]]), self.clocks.none())
            phase.begun_by = int(of[0])

    def phases_of(self, addresses, lanes):
        self.launch.shared.check_barrier(self.launch.for_all(addresses)[lanes], lanes)
        for key, of in self.by_key(addresses, lanes):
            if key not in self.phases:
                raise AccessError("a barrier is used before it is initialized")
            yield self.phases[key], of

    def released(self, lanes):
        """Ends an epoch of the warps of these lanes. Returns what each warp makes known."""
        warps = np.unique(lanes // WARP)
        return dict(zip(warps.tolist(), self.clocks.release(warps).transpose(1, 0, 2)))

    def arrive(self, addresses, mask, expected_bytes=np.uint32(0)):
        lanes = self.lanes(mask)
        self.arrive_with(addresses, lanes, self.released(lanes), expected_bytes)

    def arrive_with(self, addresses, lanes, clocks, expected_bytes=np.uint32(0)):
        for phase, of in self.phases_of(addresses, lanes):
            known = [clocks[warp] for warp in np.unique(of // WARP).tolist()]
            phase.arrive(len(of), np.maximum.reduce(known), int(self.launch.for_all(expected_bytes)[of].sum(dtype=np.int64)))

    def arrive_after_copies(self, addresses, mask):
        """The arrivals happen as late as possible: when no thread can run."""
        lanes = self.lanes(mask)
        epochs = self.clocks.epoch[self.launch.threads.warp].copy()
        copies = [(*copy[:3], epochs[copy[0]]) for copy in self.launch.take_copies(lanes)]
        self.later.append(Arrivals(self.launch, np.array(self.launch.for_all(addresses)), lanes, self.released(lanes), copies))

    def phase_of_copy(self, addresses, lane):
        """Returns the barrier for which a copy of a box by this thread counts."""
        (phase, _), = self.phases_of(addresses, np.array([lane]))
        if phase.begun_by is not None:
            raise AccessError("a copy of a box uses a barrier that was initialized without a fence between them")
        if phase.column is None:
            block = lane // self.launch.of_block
            self.columns[block] = number = self.columns.get(block, -1) + 1
            if number == BARRIERS_OF_COPIES:
                raise PtxError(f"unknown PTX: more than {BARRIERS_OF_COPIES} barriers of copies")
            phase.column = self.clocks.of_block + number
        return phase

    def complete_copies(self):
        """Completes the oldest copies for which barriers wait. Returns False if there are none."""
        if self.later:
            self.later.pop(0).complete()
            return True
        return False

    def check_complete(self):
        """A block ends after the copies of boxes that its barriers count."""
        for copy in self.later:
            if not isinstance(copy, Arrivals):
                raise PtxError("a block ends before a copy of a box is complete")
        if any(phase.bytes for phase in self.phases.values()):
            raise PtxError("a block ends while a barrier expects bytes of copies")

    def phase_ended(self, addresses, parities, mask):
        """True for the threads whose phase has ended: the phase in progress has the other parity."""
        ended, lanes = np.zeros(self.launch.count, bool), self.lanes(mask)
        parities = self.launch.for_all(parities)
        for phase, of in self.phases_of(addresses, lanes):
            ended[of] = phase.ended % 2 != parities[of] % 2
        return ended

    def leave_phase(self, addresses, mask):
        for phase, of in self.phases_of(addresses, self.lanes(mask)):
            self.clocks.acquire(np.unique(of // WARP), phase.clock)
        return np.ones(self.launch.count, bool)

    def fence(self, mask):
        """Orders the accesses of threads before those of the asynchronous proxy."""
        active = np.ones(self.launch.count, bool) if mask is None else mask
        of_warps = active.reshape(-1, WARP)
        warps = np.flatnonzero(of_warps.any(1))
        self.clocks.fence(warps, of_warps.all(1)[warps])
        self.fence_initialized(mask)

    def fence_initialized(self, mask):
        """Makes the barriers that these threads have initialized visible to copies of boxes."""
        for phase in self.phases.values():
            if phase.begun_by is not None and (mask is None or mask[phase.begun_by]):
                phase.begun_by = None

    # ---- registers

    def registers_free(self, count, mask):
        """True for the threads whose block has enough registers left for all of them."""
        warps, of_block = self.launch.whole_warps(mask), self.clocks.of_block
        wanted = np.zeros(len(self.registers), np.int64)
        wanted[warps] = count - self.registers[warps]
        per_block = (self.registers + wanted).reshape(-1, of_block).sum(1) * WARP
        return np.repeat(per_block <= REGISTERS, of_block * WARP)

    def set_registers(self, count, grows, mask):
        warps = self.launch.whole_warps(mask)
        if count % 8 or not 24 <= count <= 256 or ((self.registers[warps] > count) if grows else (self.registers[warps] < count)).any():
            raise PtxError(f"a warp cannot change its registers from {self.registers[warps[0]]} to {count}")
        self.registers[warps] = count
