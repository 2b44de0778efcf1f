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


class Clocks:
    """What orders the warps of a block beside its barriers: barriers of some warps, and phases.

    The accesses of a warp between two releases are an epoch. For each warp, `known` has the last epoch
    of every warp of its block that is ordered before its next access (ORDERED), and the last one whose
    accesses the asynchronous proxy sees, which are tensor cores and copies of boxes (VISIBLE). The lanes
    of a warp count as one.

    Columns after those of the warps are barriers for which copies of boxes count. The epoch of a copy is the
    phase that it completes.
    """
    ORDERED, VISIBLE = 0, 1

    def __init__(self, threads, of_block, copies=0):
        self.threads, self.of_block, self.copies = threads, of_block // WARP, copies
        warps, self.columns = len(threads.number) // WARP, self.of_block + copies
        self.epoch = np.ones(warps, np.int32)
        self.joined = np.zeros(warps, np.int32)  # the last epoch that a barrier of the warp has ended
        self.known = np.zeros((2, warps, self.columns), np.int32)
        self.returned = np.zeros(warps, np.int32)  # the last own epoch that another warp has made known to all lanes

    def none(self):
        return np.zeros((2, self.columns), np.int32)

    def release(self, warps):
        """Ends an epoch of these warps. Returns what their next arrival makes known, [2, warps, columns]."""
        self.known[self.ORDERED, warps, warps % self.of_block] = self.epoch[warps]
        self.epoch[warps] += 1
        return self.known[:, warps].copy()

    def acquire(self, warps, clock):
        """Makes a clock [2, columns] known to warps."""
        self.returned[warps] = np.maximum(self.returned[warps], clock[self.ORDERED, warps % self.of_block])
        self.known[:, warps] = np.maximum(self.known[:, warps], clock[:, None])

    def barrier(self, warps):
        """Orders all warps of blocks."""
        clocks = self.join(warps).reshape(2, -1, self.of_block, self.columns).max(2)
        self.known[:, warps] = np.repeat(clocks, self.of_block, 1)

    def join(self, warps):
        """Orders the lanes of warps."""
        self.joined[warps] = self.epoch[warps]
        return self.release(warps)

    def fence(self, warps, whole):
        """Makes accesses that are ordered before this visible to the asynchronous proxy. If not the `whole` warp
        passes the fence, its own accesses count up to its last barrier."""
        own = np.where(whole, self.epoch[warps], np.maximum(self.joined[warps], self.known[self.VISIBLE, warps, warps % self.of_block]))
        self.release(warps)
        self.known[self.VISIBLE, warps] = self.known[self.ORDERED, warps]
        self.known[self.VISIBLE, warps, warps % self.of_block] = own


class BlockOrder:
    """What orders the blocks of a launch: counters in global memory.

    An access is released by a thread that passes a barrier of its block after it, then a fence, and then
    counts. A thread that counts, then passes a fence and then a barrier of its block orders everything
    that was released by earlier counts of the same counter before the next accesses of its block.
    """

    def __init__(self, threads):
        self.threads, blocks = threads, int(threads.block[-1]) + 1
        self.fenced = np.zeros(len(threads.number), np.int32)  # barriers that a thread had passed at its last fence
        self.released, self.counted = {}, {}                   # by counters, and for the next fence of threads: barriers of blocks
        # Accesses of a block (column) that passed fewer barriers than `known` are ordered before those of another
        # (row) that passed more than `since`.
        self.known, self.since = np.zeros((blocks, blocks), np.int32), np.full(blocks, np.iinfo(np.int32).max, np.int32)

    def fence(self, lanes):
        threads = self.threads
        self.fenced[lanes] = threads.block_barriers[lanes]
        for lane in self.counted.keys() & set(lanes.tolist()):
            block = threads.block[lane]
            np.maximum(self.known[block], self.counted.pop(lane), out=self.known[block])
            self.since[block] = threads.block_barriers[lane]

    def count(self, place, lane):
        block = self.threads.block[lane]
        released = self.released.setdefault(place, np.zeros(len(self.since), np.int32))
        released[block] = max(released[block], self.fenced[lane])
        if self.fenced[lane] > self.since[block]:
            np.maximum(released, self.known[block], out=released)
        self.counted[lane] = released.copy()

    def unordered(self, of, barriers, lanes):
        """True where an access of the thread `of` after so many barriers is not ordered before another block's lanes."""
        if not self.known.any():
            return np.ones(of.shape, bool)
        block = self.threads.block[lanes]
        late = (self.threads.block_barriers[lanes] > self.since[block])[:, None]
        return ~(late & (self.known[block[:, None], self.threads.block[of]] > barriers))


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
        across_warps = self.across_warps(places, other, of, since, lanes)
        in_block = np.where(same_warp, since & since_warp, across_warps)
        return ~none & (number != threads.number[lanes][:, None]) & np.where(same_block, in_block, self.across_blocks(of, block_barriers[places], lanes))

    def across_blocks(self, of, _barriers, _lanes):
        """True where the access of a thread `of` another block is not ordered before."""
        return np.ones(of.shape, bool)

    def across_warps(self, _places, _other, _of, since, _lanes):
        """True where the access of another warp `of` the block is not ordered before. `since`: no barrier
        of the block is between them."""
        return since

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

    def set_writer(self, places, lanes, _epochs=None):
        threads = self.threads
        self.writer[places] = threads.number[lanes][:, None]
        self.write_block[places] = threads.block_barriers[lanes][:, None]
        self.write_warp[places] = threads.warp_barriers[lanes][:, None]


class GlobalLog(AccessLog):
    """The last accesses to each place of global memory, and the blocks that have read it."""
    SEVERAL = -1

    def __init__(self, places, threads):
        super().__init__(places, threads)
        self.order = BlockOrder(threads)
        self.reader = np.zeros(places, np.int32)  # the number of the only block that has read a place, or SEVERAL
        self.counters = set()

    def across_blocks(self, of, barriers, lanes):
        return self.order.unordered(of, barriers, lanes)

    def read(self, places, lanes):
        races = super().read(places, lanes)
        block = np.broadcast_to(self.threads.block[lanes][:, None] + 1, places.shape)
        known = self.reader[places]
        self.reader[places] = np.where((known == 0) | (known == block), block, self.SEVERAL)
        self.reader[places[self.reader[places] != block]] = self.SEVERAL
        return races | self.is_counter(places)

    def write(self, places, lanes):
        readers, writers = super().write(places, lanes)
        reader = self.reader[places]
        other_block = (reader != 0) & (reader != self.threads.block[lanes][:, None] + 1)
        return readers | other_block | self.is_counter(places), writers

    def is_counter(self, places):
        return np.isin(places, list(self.counters)) if self.counters else np.zeros(places.shape, bool)

    def count(self, place, lane):
        """Records that a lane counts at a place. True if other accesses are a race."""
        self.counters.add(place)
        self.order.count(place, lane)
        return self.writer[place] != 0 or self.reader[place] != 0


class ClockLog(AccessLog):
    """The last accesses to each place of shared memory in kernels whose warps are ordered by clocks."""

    def __init__(self, places, threads, clocks):
        super().__init__(places, threads)
        self.clocks = clocks
        self.write_epoch = np.zeros(places, np.int32)
        self.read_epochs = np.zeros((places, clocks.of_block), np.int32)  # of the last read by each warp
        # The same without reads by tensor cores; and 1 + the number of the barrier of the copy that wrote a place.
        with_copies = places if clocks.copies else 0
        self.read_epochs_of_threads = np.zeros((with_copies, clocks.of_block), np.int32)
        self.copied = np.zeros(with_copies, np.int32)

    def unordered(self, places, other, block_barriers, warp_barriers, lanes):
        found = super().unordered(places, other, block_barriers, warp_barriers, lanes)
        if other is not self.writer or not self.clocks.copies:
            return found
        # Lanes of one warp are also ordered by a phase that one has arrived at and another has waited for.
        warps = self.threads.warp[lanes][:, None]
        of_warp = self.threads.warp[np.maximum(other[places], 1) - 1] == warps
        found &= ~of_warp | (self.write_epoch[places] > self.clocks.returned[warps])
        return np.where(self.copied[places] > 0, self.after_copies(places, self.threads.warp[lanes]), found)

    def after_copies(self, places, warps):
        """True where the copy that wrote a place is not ordered before accesses of warps."""
        columns = self.clocks.of_block + self.copied[places] - 1
        return self.write_epoch[places] > self.clocks.known[Clocks.ORDERED, warps[:, None], columns]

    def across_warps(self, places, other, of, _since, lanes):
        if other is not self.writer:
            return np.zeros(places.shape, bool)  # `write` compares the reads
        known = self.clocks.known[Clocks.ORDERED, self.threads.warp[lanes][:, None], self.threads.warp[of] % self.clocks.of_block]
        return self.write_epoch[places] > known

    def read(self, places, lanes):
        races = super().read(places, lanes)
        warps = self.threads.warp[lanes]
        self.end_reads(places, warps)
        if self.clocks.copies:
            self.read_epochs_of_threads[places, (warps % self.clocks.of_block)[:, None]] = self.clocks.epoch[warps][:, None]
        return races

    def write(self, places, lanes):
        warps = self.threads.warp[lanes]
        late = self.read_epochs[places] > self.clocks.known[Clocks.ORDERED, warps, None, :self.clocks.of_block]
        late[np.arange(len(lanes)), :, warps % self.clocks.of_block] = False
        readers, writers = super().write(places, lanes)
        return readers | late.any(2), writers

    def set_writer(self, places, lanes, epochs=None):
        super().set_writer(places, lanes)
        self.write_epoch[places] = (self.clocks.epoch[self.threads.warp[lanes]] if epochs is None else epochs)[:, None]
        if self.clocks.copies:
            self.copied[places] = 0

    def write_by_copy(self, places, lanes, column, epoch):
        """Records that a copy writes. Returns the races, and where earlier accesses by threads are not visible."""
        visible = self.clocks.known[Clocks.VISIBLE, self.threads.warp[lanes]]
        writer = self.threads.warp[np.maximum(self.writer[places], 1) - 1] % self.clocks.of_block
        by_thread = (self.writer[places] > 0) & (self.copied[places] == 0)
        invisible = by_thread & (self.write_epoch[places] > visible[np.arange(len(lanes))[:, None], writer])
        invisible |= (self.read_epochs_of_threads[places] > visible[:, None, :self.clocks.of_block]).any(2)
        readers, writers = self.write(places, lanes)
        self.copied[places], self.write_epoch[places] = column - self.clocks.of_block + 1, epoch
        return readers | writers, invisible

    def read_by_tensor_cores(self, places, warps):
        """Returns where tensor cores of warps read what is not ordered before, and what they do not see."""
        of = np.maximum(self.writer[places], 1) - 1
        ordered, visible = self.clocks.known[:, warps[:, None], self.threads.warp[of] % self.clocks.of_block]
        own = self.threads.warp[of] == warps[:, None]
        written = (self.writer[places] > 0) & (self.write_epoch[places] > visible)
        unordered = written & ~own & (self.write_epoch[places] > ordered)
        if not self.clocks.copies:
            return unordered, written
        copied = self.copied[places] > 0
        return np.where(copied, self.after_copies(places, warps), unordered), written & ~copied

    def end_reads(self, places, warps):
        """Records that warps have read places, [warps, places of one]."""
        self.read_epochs[places, (warps % self.clocks.of_block)[:, None]] = self.clocks.epoch[warps][:, None]
