"""Finds accesses of different threads to one place that no barrier orders."""
import numpy as np

WARP = 32


class Threads:
    """The threads of a launch, and the numbers of barriers that they have passed."""

    def __init__(self, count, of_block):
        self.number = np.arange(1, count + 1, dtype=np.int32)  # 0 stands for no thread
        self.warp = (self.number - 1) // WARP
        self.block = (self.number - 1) // of_block
        self.block_barriers = np.ones(count, np.int32)
        self.warp_barriers = np.ones(count, np.int32)


class AccessLog:
    """The last accesses to each place of a memory. A place is a number of bytes.

    Two accesses are ordered if the threads are the same, or passed a barrier of their block between
    them, or are lanes of a warp and passed a barrier of the warp.
    """
    ATOMIC = -1  # in place of a writer: additions may happen in any order

    def __init__(self, places, threads):
        self.threads = threads
        # The last writer, and the barriers that it had passed.
        self.writer, self.write_block, self.write_warp = (np.zeros(places, np.int32) for _ in range(3))
        # The lowest and the highest reader since the last barrier.
        self.first, self.last, self.read_block, self.read_warp = (np.zeros(places, np.int32) for _ in range(4))

    def unordered(self, places, other, block_barriers, warp_barriers, lanes):
        """True where the access of another thread is not ordered before that of the lanes."""
        threads, number = self.threads, other[places]
        none = number <= 0  # or additions, which `after_atomic` compares
        of = np.maximum(number, 1) - 1
        same_block = threads.block[of] == threads.block[lanes][:, None]
        same_warp = threads.warp[of] == threads.warp[lanes][:, None]
        since = block_barriers[places] == threads.block_barriers[lanes][:, None]
        since_warp = warp_barriers[places] == threads.warp_barriers[lanes][:, None]
        return ~none & (number != threads.number[lanes][:, None]) & (~same_block | (since & (~same_warp | since_warp)))

    def read(self, places, lanes):
        """Records reads by lanes of places, an array [lanes, places of one]. True where a race is."""
        races = self.unordered(places, self.writer, self.write_block, self.write_warp, lanes)
        races |= self.after_atomic(places, lanes)
        threads = self.threads
        number, warp = threads.number[lanes][:, None], threads.warp[lanes][:, None]
        block_barriers, warp_barriers = threads.block_barriers[lanes][:, None], threads.warp_barriers[lanes][:, None]
        only_this_warp = (threads.warp[self.first[places] - 1] == warp) & (threads.warp[self.last[places] - 1] == warp)
        fresh = (self.first[places] == 0) | (self.read_block[places] != block_barriers)
        fresh |= only_this_warp & (self.read_warp[places] != warp_barriers)
        renewed = places[fresh]
        self.first[renewed], self.last[renewed] = np.iinfo(np.int32).max, 0
        self.read_block[places], self.read_warp[places] = block_barriers, warp_barriers
        np.minimum.at(self.first, places, np.broadcast_to(number, places.shape))
        np.maximum.at(self.last, places, np.broadcast_to(number, places.shape))
        return races

    def after_atomic(self, places, lanes):
        return (self.writer[places] == self.ATOMIC) & (self.write_block[places] == self.threads.block_barriers[lanes][:, None])

    def write(self, places, lanes):
        """Records writes. Returns the races with reads, and those with other writes."""
        readers = self.unordered(places, self.first, self.read_block, self.read_warp, lanes)
        readers |= self.unordered(places, self.last, self.read_block, self.read_warp, lanes)
        writers = self.unordered(places, self.writer, self.write_block, self.write_warp, lanes)
        writers |= self.after_atomic(places, lanes)
        self.set_writer(places, lanes)
        return readers, writers

    def add(self, places, lanes):
        """Records atomic additions. True where a race is."""
        atomic = self.after_atomic(places, lanes)
        races = self.unordered(places, self.first, self.read_block, self.read_warp, lanes)
        races |= self.unordered(places, self.last, self.read_block, self.read_warp, lanes)
        races |= self.unordered(places, self.writer, self.write_block, self.write_warp, lanes) & ~atomic
        self.set_writer(places, lanes)
        self.writer[places] = self.ATOMIC
        return races

    def set_writer(self, places, lanes):
        threads = self.threads
        self.writer[places] = threads.number[lanes][:, None]
        self.write_block[places] = threads.block_barriers[lanes][:, None]
        self.write_warp[places] = threads.warp_barriers[lanes][:, None]
