"""Memory whose accesses are checked: bounds, alignment, pending copies and races."""
import numpy as np

from .parser import PtxError
from .races import AccessLog, ClockLog, GlobalLog

GLOBAL_BASE = 1 << 40
GAP = 256          # bytes between allocations, more than an access
POISON = 0xFF      # NaN as f32, f16 and bf16
FREE, READABLE, WRITABLE = 0, 1, 2


class AccessError(PtxError):
    """An access that a device would not execute, or whose result it would not define."""


class Bytes:
    """An array of bytes with views as numbers of other types."""

    def __init__(self, count):
        self.bytes = np.full(-(-count // 16) * 16, POISON, np.uint8)
        self.views = {}

    def as_type(self, dtype):
        if dtype not in self.views:
            self.views[dtype] = self.bytes.view(dtype)
        return self.views[dtype]

    def load(self, places, dtype, count):
        """Returns [count] arrays of numbers from the bytes at `places`."""
        view, first = self.as_type(dtype), places // np.dtype(dtype).itemsize
        return [view[first + i] for i in range(count)]

    def store(self, places, dtype, numbers):
        view, first = self.as_type(dtype), places // np.dtype(dtype).itemsize
        for i, number in enumerate(numbers):
            view[first + i] = number

    def store_checked(self, offsets, dtype, numbers, readers, writers):
        """Stores numbers. `readers` and `writers` are races, [accesses, places]. Threads may write the
        same number to one place."""
        if readers.any():
            raise AccessError(f"a race: another thread reads the {self.NAME} memory that this one writes")
        others = writers.any(1)
        before = self.load(offsets[others], dtype, len(numbers))
        self.store(offsets, dtype, numbers)
        after = self.load(offsets, dtype, len(numbers))
        if differ(before, [number[others] for number in numbers]) or differ(after, numbers):
            raise AccessError(f"a race: two threads write different numbers to one place of {self.NAME} memory")


def differ(stored, numbers):
    """True if the bits are not the same."""
    return any(a.tobytes() != b.tobytes() for a, b in zip(stored, numbers))


def check_aligned(addresses, size):
    wrong = addresses % np.uint64(size) != 0
    if wrong.any():
        raise AccessError(f"the address {addresses[wrong.argmax()]:#x} is not a multiple of {size}")


def places_of(offsets, size, granule):
    """Returns the places [accesses, places of one] of an access log."""
    count = max(1, size // granule)
    return offsets[:, None] // granule + np.arange(count)


class Device(Bytes):
    """Global memory. The contents of an allocation are poison or given."""
    NAME = "global"

    def __init__(self, size=4 << 20):
        super().__init__(size)
        self.state = np.zeros(size, np.uint8)
        self.end, self.log = GAP, None

    def allocate(self, size, state=WRITABLE):
        address = self.end
        self.end = -(-(address + size + GAP) // 256) * 256
        if self.end > len(self.state):
            raise MemoryError(f"{size} bytes do not fit")
        self.state[address:address + size] = state
        return GLOBAL_BASE + address

    def put(self, array, state=READABLE):
        """Allocates memory with these contents, which kernels only read unless they are WRITABLE."""
        data = np.ascontiguousarray(array)
        address = self.allocate(max(data.nbytes, 1), state)
        first = address - GLOBAL_BASE
        self.bytes[first:first + data.nbytes] = data.reshape(-1).view(np.uint8)
        return address

    def buffer(self, array):
        return self.put(array, WRITABLE)

    def get(self, address, shape, dtype):
        first, count = address - GLOBAL_BASE, int(np.prod(shape))
        return self.bytes[first:first + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape).copy()

    def begin(self, threads):
        self.log = GlobalLog(len(self.state), threads)

    def offsets(self, addresses, size, needed):
        check_aligned(addresses, size)
        outside = (addresses < GLOBAL_BASE) | (addresses > GLOBAL_BASE + len(self.state) - size)
        offsets = np.where(outside, 0, addresses - np.uint64(GLOBAL_BASE)).astype(np.int64)
        allowed = np.minimum(self.state[offsets], self.state[offsets + size - 1])
        wrong = outside | (allowed < needed)
        if wrong.any():
            first = wrong.argmax()
            problem = "is read-only" if allowed[first] == READABLE else "is not in an allocation"
            raise AccessError(f"the address {addresses[first]:#x} {problem} ({size} bytes)")
        return offsets

    def read(self, addresses, dtype, count, lanes):
        size = np.dtype(dtype).itemsize * count
        offsets = self.offsets(addresses, size, READABLE)
        writable = self.state[offsets] == WRITABLE
        if writable.any() and self.log.read(places_of(offsets[writable], size, 1), lanes[writable]).any():
            raise AccessError("a race: another thread writes the global memory that this one reads")
        return self.load(offsets, dtype, count)

    def read_by_copy(self, addresses, dtype, lane):
        """Reads numbers for a copy that this thread has issued."""
        written = self.log.writer[self.offsets(addresses, dtype.itemsize, READABLE)] != 0
        if written.any():
            raise AccessError("a copy of a box reads global memory that this kernel has written")
        return self.read(addresses, dtype, 1, np.full(len(addresses), lane))[0]

    def write(self, addresses, dtype, numbers, lanes):
        size = np.dtype(dtype).itemsize * len(numbers)
        offsets = self.offsets(addresses, size, WRITABLE)
        self.store_checked(offsets, dtype, numbers, *self.log.write(places_of(offsets, size, 1), lanes))

    def count(self, addresses, limits, lanes):
        """Counts up to a limit, and then from 0 again, in the order of the lanes. Returns the numbers before."""
        offsets, before = self.offsets(addresses, 4, WRITABLE), np.empty(len(lanes), np.uint32)
        view = self.as_type(np.uint32)
        for i, (offset, limit, lane) in enumerate(zip(offsets.tolist(), limits, lanes.tolist())):
            if self.log.count(offset, lane):
                raise AccessError("a race: another thread accesses the global memory of a counter")
            before[i] = view[offset // 4]
            view[offset // 4] = 0 if before[i] >= limit else before[i] + 1
        return before


class Shared(Bytes):
    """The shared memory of all blocks of a launch, one after the other."""
    NAME = "shared"
    GRANULE = 4  # bytes of a place

    def __init__(self, size, of_thread, threads, clocks=None):
        """`of_thread` is the block of each thread. Clocks order its warps beside barriers of the block."""
        self.size = -(-size // 16) * 16 + 16
        self.limit = size
        blocks = int(of_thread[-1]) + 1
        super().__init__(self.size * blocks)
        self.start = of_thread.astype(np.int64) * self.size
        places = len(self.bytes) // self.GRANULE
        self.log = ClockLog(places, threads, clocks) if clocks else AccessLog(places, threads)
        self.pending = np.zeros(places, bool)
        self.reading = np.zeros(places, np.int32)  # pending products that read the place

    def offsets(self, addresses, size, lanes):
        addresses = addresses.astype(np.uint64)
        check_aligned(addresses, size)
        wrong = addresses > np.uint64(max(self.limit - size, 0))
        if wrong.any() or self.limit < size:
            raise AccessError(f"the address {addresses[wrong.argmax()]} is beyond the {self.limit} bytes of shared memory ({size} bytes)")
        return addresses.astype(np.int64) + self.start[lanes]

    def places(self, offsets, size):
        places = places_of(offsets, size, self.GRANULE)
        if self.pending[places].any():
            raise AccessError("an access to shared memory that a pending asynchronous copy will write")
        return places

    def read_offsets(self, addresses, size, lanes):
        offsets = self.offsets(addresses, size, lanes)
        if self.log.read(self.places(offsets, size), lanes).any():
            raise AccessError("a race: another thread writes the shared memory that this one reads")
        return offsets

    def read(self, addresses, dtype, count, lanes):
        return self.load(self.read_offsets(addresses, np.dtype(dtype).itemsize * count, lanes), dtype, count)

    def write(self, addresses, dtype, numbers, lanes):
        size = np.dtype(dtype).itemsize * len(numbers)
        offsets = self.offsets(addresses, size, lanes)
        self.store_checked(offsets, dtype, numbers, *self.log.write(self.places_to_write(offsets, size), lanes))

    def places_to_write(self, offsets, size):
        places = self.places(offsets, size)
        if self.reading[places].any():
            raise AccessError("a race: pending products read the shared memory that this thread writes")
        return places

    def begin_copy(self, addresses, size, lanes):
        """Reserves the target of an asynchronous copy. It holds poison until the copy is complete."""
        offsets = self.offsets(addresses, size, lanes)
        places = self.places_to_write(offsets, size)
        readers, writers = self.log.write(places, lanes)
        if readers.any() or writers.any():
            raise AccessError("a race: an asynchronous copy writes shared memory that another thread uses")
        self.store(offsets, np.uint32, [np.uint32(0xFFFFFFFF)] * (size // 4))
        self.pending[places] = True
        return offsets

    def end_copy(self, offsets, words, lanes, epochs=None):
        """Completes copies, which are accesses of these epochs of their warps."""
        places = places_of(offsets, 4 * len(words), self.GRANULE)
        self.pending[places] = False
        self.log.set_writer(places, lanes, epochs)
        self.store(offsets, np.uint32, words)

    def begin_tensor_copy(self, addresses, lane, column, epoch):
        """Reserves the words that a copy of a box writes, which is an access of this column of the clocks."""
        lanes = np.array([lane])
        offsets = self.offsets(addresses, 4, lanes)
        places = self.places_to_write(offsets, 4).reshape(1, -1)
        unordered, invisible = self.log.write_by_copy(places, lanes, column, epoch)
        if unordered.any():
            raise AccessError("a race: the copy of a box writes shared memory that another thread uses")
        if invisible.any():
            raise AccessError("the copy of a box writes shared memory that was accessed without a fence between them")
        self.store(offsets, np.uint32, [np.uint32(0xFFFFFFFF)])
        self.pending[places] = True
        return offsets

    def end_tensor_copy(self, offsets, words):
        self.pending[offsets // self.GRANULE] = False
        self.store(offsets, np.uint32, [words])

    def begin_products(self, addresses, warps, first_lanes):
        """Reads 16-bit numbers by tensor cores, [warps, numbers of one], each two of which are a word.
        Returns the numbers, and the places that are read until `end_products`."""
        if (addresses > self.limit - 2).any():
            raise AccessError(f"a matrix of a product is beyond the {self.limit} bytes of shared memory")
        offsets = addresses + self.start[first_lanes][:, None]
        places = offsets[:, ::2] // self.GRANULE
        if self.pending[places].any():
            raise AccessError("a product reads shared memory that a pending asynchronous copy will write")
        unordered, invisible = self.log.read_by_tensor_cores(places, warps)
        if unordered.any():
            raise AccessError("a race: another thread writes the shared memory that a product reads")
        if invisible.any():
            raise AccessError("a product reads shared memory that was written without a fence between them")
        np.add.at(self.reading, places, 1)
        return self.as_type(np.uint16)[offsets // 2], places

    def end_products(self, places, warps):
        np.subtract.at(self.reading, places, 1)
        self.log.end_reads(places, warps)

    def check_barrier(self, addresses, lanes):
        """A barrier in shared memory is used after the write that initialized it."""
        log = self.log
        places = self.places(self.offsets(addresses, 8, lanes), 8)
        if log.unordered(places, log.writer, log.write_block, log.write_warp, lanes).any():
            raise AccessError("a race: a barrier is used before another thread has initialized it")

    def add(self, addresses, numbers, lanes):
        """Adds u32 numbers in the order of the lanes. Returns the numbers before each addition."""
        offsets = self.offsets(addresses, 4, lanes)
        if self.log.add(self.places_to_write(offsets, 4), lanes).any():
            raise AccessError("a race: another thread accesses the shared memory of an atomic addition")
        view, before = self.as_type(np.uint32), np.empty(len(lanes), np.uint32)
        for i, (place, number) in enumerate(zip((offsets // 4).tolist(), numbers)):
            before[i] = view[place]
            view[place] = before[i] + number
        return before
