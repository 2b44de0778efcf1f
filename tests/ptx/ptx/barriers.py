"""Barriers between some threads of a block, barriers with phases, and registers of warpgroups."""
import numpy as np

from .memory import AccessError
from .parser import PtxError
from .races import WARP

REGISTERS = 1 << 16  # of a multiprocessor


class Phase:
    """A barrier whose phase ends after `expected` arrivals."""

    def __init__(self, expected, clock):
        self.expected = self.left = expected
        self.ended, self.gathered, self.clock = 0, clock, clock

    def arrive(self, count, clock):
        self.left -= count
        self.gathered = np.maximum(self.gathered, clock)
        if self.left < 0:
            raise AccessError("a barrier has more arrivals than it expects")
        if self.left == 0:
            self.ended, self.left, self.clock = self.ended + 1, self.expected, self.gathered


class Arrivals:
    """Arrivals at barriers that follow when the copies of their threads are complete."""

    def __init__(self, addresses, lanes, clocks, copies):
        self.addresses, self.lanes, self.clocks, self.copies = addresses, lanes, clocks, copies


class Barriers:
    """The barriers of a launch, by block and number or address."""

    def __init__(self, launch):
        self.launch, self.clocks = launch, launch.clocks
        self.named, self.phases, self.later = {}, {}, []
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
            self.phases[key] = Phase(int(self.launch.for_all(counts)[of[0]]), self.clocks.none())

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

    def arrive(self, addresses, mask):
        lanes = self.lanes(mask)
        self.arrive_with(addresses, lanes, self.released(lanes))

    def arrive_with(self, addresses, lanes, clocks):
        for phase, of in self.phases_of(addresses, lanes):
            known = [clocks[warp] for warp in np.unique(of // WARP).tolist()]
            phase.arrive(len(of), np.maximum.reduce(known))

    def arrive_after_copies(self, addresses, mask):
        """The arrivals happen as late as possible: when no thread can run."""
        lanes = self.lanes(mask)
        epochs = self.clocks.epoch[self.launch.threads.warp].copy()
        copies = [(*copy[:3], epochs[copy[0]]) for copy in self.launch.take_copies(lanes)]
        self.later.append(Arrivals(np.array(self.launch.for_all(addresses)), lanes, self.released(lanes), copies))

    def complete_copies(self):
        """Completes the oldest copies that arrivals wait for. Returns False if there are none."""
        if not self.later:
            return False
        arrivals = self.later.pop(0)
        for lanes, offsets, words, epochs in arrivals.copies:
            self.launch.shared.end_copy(offsets, list(words), lanes, epochs)
        self.arrive_with(arrivals.addresses, arrivals.lanes, arrivals.clocks)
        return True

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
        self.clocks.fence(self.launch.whole_warps(mask))

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
