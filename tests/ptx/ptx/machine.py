"""Executes kernels: all threads of a grid at once, as arrays with a number for each thread."""
import numpy as np

from .barriers import BARRIERS_OF_COPIES, Barriers
from .instructions import BLOCK_INSTRUCTIONS, CONDITIONS, JOINED_INSTRUCTIONS, TYPES, WARP_INSTRUCTIONS, Translator
from .memory import AccessError, Bytes, Shared, check_aligned
from .parser import MAP, PtxError
from .races import WARP, Clocks, Threads
from .tensor_copies import TensorCopies
from .tensor_core import ldmatrix_x4, mma_m16n8k16
from .tensor_map import TensorMap
from .warpgroup import Products

ENDED = 1 << 30
LANES = np.arange(WARP, dtype=np.uint32)
TENSOR_COPY = "cp.async.bulk.tensor"
# A kernel with one of these has barriers that do not order all warps of a block, or warpgroups.
ORDERED_BY_CLOCKS = ("bar.arrive", "mbarrier", "wgmma", "setmaxnreg", TENSOR_COPY)


class Segment:
    """Instructions that are executed together, and the branch at their end: a guard, and the number
    of a segment or ENDED.

    A segment that begins with an instruction of a warp or of a block `waits_for` all its threads.
    Those that follow in the segment have the same threads. "joined" threads are those of a warp, until no
    other thread can run. A segment may also wait for a condition.
    """

    def __init__(self, first, end, waits_for, branch):
        self.first, self.end, self.waits_for, self.branch = first, end, waits_for, branch
        self.code = [None, None]  # for all threads, and for some
        self.condition = None     # a function that returns the threads for which the condition is met


class Program:
    """A kernel divided into segments, with the addresses of its static arrays. Dynamic shared memory
    follows them."""

    def __init__(self, kernel):
        self.kernel = kernel
        used = {name: variable for name, variable in kernel.variables.items()
                if any(name in instruction.text for instruction in kernel.instructions)}
        self.symbols, self.static, self.local = {}, 0, 0
        for name, variable in used.items():
            if variable.space == "local":
                self.symbols[name], self.local = self.local, self.local + -(-variable.size // 16) * 16
            elif variable.size is not None:
                self.static = -(-self.static // variable.align) * variable.align
                self.symbols[name], self.static = self.static, self.static + variable.size
        self.static = -(-self.static // 16) * 16
        self.symbols.update({name: self.static for name, variable in used.items() if variable.size is None})
        self.translator = Translator(kernel, self.symbols)
        self.waits = any(instruction.opcode == "griddepcontrol.wait" for instruction in kernel.instructions)
        self.by_clocks = any(instruction.opcode.startswith(ORDERED_BY_CLOCKS) for instruction in kernel.instructions)
        self.copies_tensors = any(instruction.opcode.startswith(TENSOR_COPY) for instruction in kernel.instructions)
        self.divide()

    def divide(self):
        instructions, starts, synchronized = self.kernel.instructions, {0, len(self.kernel.instructions)}, False
        targets = set(self.kernel.labels.values())
        for at, instruction in enumerate(instructions):
            synchronized = synchronized and at not in targets
            if instruction.parts[0] in ("bra", "ret"):
                starts.add(at + 1)
                synchronized = False
            elif instruction.opcode.startswith((*BLOCK_INSTRUCTIONS, *CONDITIONS)):
                starts.add(at)
                synchronized = instruction.opcode.startswith(BLOCK_INSTRUCTIONS)
            elif instruction.opcode.startswith(JOINED_INSTRUCTIONS) and not synchronized:
                starts.add(at)
            elif instruction.opcode.startswith(WARP_INSTRUCTIONS) and not synchronized:
                starts.add(at)
                synchronized = True
        starts = sorted(starts | targets)
        number = {start: i for i, start in enumerate(starts)}
        self.segments = [self.segment(first, end, number) for first, end in zip(starts, starts[1:])]

    def segment(self, first, end, number):
        opcode, last = self.kernel.instructions[first].opcode, self.kernel.instructions[end - 1]
        kinds = (("block", BLOCK_INSTRUCTIONS), ("warp", WARP_INSTRUCTIONS), ("joined", JOINED_INSTRUCTIONS))
        waits_for = next((kind for kind, opcodes in kinds if opcode.startswith(opcodes)), None)
        branch = None
        if last.parts[0] in ("bra", "ret"):
            target = ENDED if last.parts[0] == "ret" else number[self.kernel.labels[last.operands[0]]]
            branch = (last.guard, target)
        found = Segment(first, end, waits_for, branch)
        if opcode.startswith(CONDITIONS):
            found.condition = self.translator.condition(first)
        return found

    def code(self, segment, masked):
        if segment.code[masked] is None:
            segment.code[masked] = self.translator.translate(segment.first, segment.end, masked)
        return segment.code[masked]


class Launch:
    """A launch of a kernel, until all threads have ended."""

    def __init__(self, program, device, tables, grid, threads, dynamic, arguments):
        kernel = program.kernel
        if len(arguments) != len(kernel.parameters):
            raise PtxError(f"{kernel.name} has {len(kernel.parameters)} parameters, not {len(arguments)}")
        if threads % WARP:
            raise PtxError(f"{threads} threads are not whole warps")
        self.program, self.device, self.tables, self.of_block = program, device, tables, threads
        self.blocks = int(np.prod(grid))
        self.count = self.blocks * threads
        self.threads = Threads(self.count, threads)
        self.lanes = np.arange(self.count)
        self.parameters = [self.parameter(kind, argument) for kind, argument in zip(kernel.parameters, arguments)]
        self.registers = [np.zeros(self.count, TYPES[kind]) for kind in kernel.registers.values()]
        copies = BARRIERS_OF_COPIES if program.copies_tensors else 0
        self.clocks = Clocks(self.threads, threads, copies) if program.by_clocks else None
        self.shared = Shared(program.static + dynamic, self.threads.block, self.threads, self.clocks)
        self.local = Bytes(program.local * self.count)
        self.special = self.special_registers(grid)
        self.copies, self.groups = [], np.zeros(self.count, np.int64)  # pending copies; committed groups of each thread
        self.waited = np.zeros(self.count, bool)
        self.barriers = Barriers(self) if self.clocks else None
        self.tensor_copies = TensorCopies(self)
        self.products = Products(self, program.translator.product_registers()) if self.clocks else None
        self.pc, self.uniform, self.at, self.executed = np.zeros(self.count, np.int64), 0, 0, 0
        device.begin(self.threads)

    def parameter(self, kind, argument):
        if (kind == MAP) != isinstance(argument, TensorMap):
            raise PtxError(f"{self.program.kernel.name}: the argument {argument} for a parameter of type {kind}")
        return argument if kind == MAP else TYPES[kind](argument)

    def special_registers(self, grid):
        block = self.threads.block.astype(np.uint32)
        x, y = np.uint32(grid[0]), np.uint32(grid[1])
        found = {"%tid.x": (self.lanes % self.of_block).astype(np.uint32), "%ntid.x": self.for_all(np.uint32(self.of_block)),
                 "%ctaid.x": block % x, "%ctaid.y": block // x % y, "%ctaid.z": block // (x * y)}
        found.update({f"%nctaid.{axis}": self.for_all(np.uint32(size)) for axis, size in zip("xyz", grid)})
        return found

    def for_all(self, number):
        """Returns a number of each thread."""
        return number if np.ndim(number) else np.broadcast_to(number, (self.count,))

    # ---- scheduling

    def run(self):
        with np.errstate(all="ignore"):
            try:
                while self.step():
                    pass
            except AccessError as error:
                instruction = self.program.kernel.instructions[self.at]
                raise AccessError(f"{self.program.kernel.name}: {error}, at instruction {self.at}: {instruction.text}") from None
        if self.program.waits and not self.waited.all():
            raise PtxError(f"{self.program.kernel.name}: a thread ended without waiting for the previous kernel")
        if self.clocks:
            self.products.check_complete()
            self.barriers.check_complete()
        return self.executed

    def step(self):
        """Executes a segment. Returns False if all threads have ended."""
        if self.uniform == ENDED:
            return False
        if self.uniform is not None and not self.program.segments[self.uniform].condition:
            number, mask, active = self.uniform, None, self.count
        else:
            if self.uniform is not None:
                self.pc = np.full(self.count, self.uniform)
            number, mask = self.next_segment()
            active = np.count_nonzero(mask)
        segment = self.program.segments[number]
        self.executed += (segment.end - segment.first) * -(-active // WARP)
        self.program.code(segment, mask is not None)(self, self.registers, mask)
        self.branch(segment.branch, number, mask)
        return True

    def next_segment(self):
        """Returns the first segment in which threads can run, and a mask of them."""
        found = self.ready_segment() or self.ready_segment(joined=False)
        while found is None and self.barriers and self.barriers.complete_copies():
            found = self.ready_segment()
        if found is not None:
            return found
        number = int(self.pc.min())
        at = self.program.segments[number].first
        raise PtxError(f"{self.program.kernel.name}: threads wait for others that never arrive, "
                       f"at instruction {at}: {self.program.kernel.instructions[at].text}")

    def ready_segment(self, joined=True):
        for number in np.unique(self.pc).tolist():
            if number == ENDED:
                break
            mask, segment = self.pc == number, self.program.segments[number]
            waits_for = segment.waits_for
            if segment.condition:
                self.at = segment.first
                mask &= segment.condition(self, self.registers, mask)
            if waits_for and (joined or waits_for != "joined"):
                group = self.of_block if waits_for == "block" else WARP
                mask = np.repeat(mask.reshape(-1, group).all(1), group)
            if mask.any():
                return number, mask
        return None

    def branch(self, branch, number, mask):
        guard, target = branch if branch else (None, number + 1)
        if guard is None:
            after = target
        else:
            taken = self.registers[self.program.translator.register[guard[0]]]
            taken = ~taken if guard[1] else taken
            if mask is None and taken.all():
                after = target
            elif mask is None and not taken.any():
                after = number + 1
            else:
                after = np.where(taken, target, number + 1)
        if mask is None and np.ndim(after) == 0:
            self.uniform = after
            return
        self.pc = np.where(mask, after, self.pc) if mask is not None else after
        self.uniform = int(self.pc[0]) if (self.pc == self.pc[0]).all() else None

    # ---- instructions

    def chosen(self, addresses, mask):
        """Returns the active lanes and their addresses."""
        addresses = self.for_all(addresses)
        return (self.lanes, addresses) if mask is None else (np.flatnonzero(mask), addresses[mask])

    def spread(self, numbers, lanes, mask):
        """Returns arrays of all threads from those of the active lanes."""
        if mask is None:
            return numbers
        found = [np.zeros(self.count, number.dtype) for number in numbers]
        for whole, number in zip(found, numbers):
            whole[lanes] = number
        return found

    def load(self, space, addresses, dtype, count, mask):
        lanes, addresses = self.chosen(addresses, mask)
        if space == "shared":
            numbers = self.shared.read(addresses, dtype, count, lanes)
        elif space == "local":
            numbers = self.local.load(self.local_offsets(addresses, np.dtype(dtype).itemsize * count, lanes), dtype, count)
        else:
            numbers = self.device.read(addresses, dtype, count, lanes)
        return self.spread(numbers, lanes, mask)

    def store(self, space, addresses, dtype, numbers, mask):
        lanes, addresses = self.chosen(addresses, mask)
        numbers = [np.ascontiguousarray(number[lanes]) for number in numbers]
        if space == "shared":
            self.shared.write(addresses, dtype, numbers, lanes)
        elif space == "local":
            self.local.store(self.local_offsets(addresses, np.dtype(dtype).itemsize * len(numbers), lanes), dtype, numbers)
        else:
            if self.program.waits and not self.waited[lanes].all():
                raise AccessError("a write to global memory before the wait for the previous kernel")
            self.device.write(addresses, dtype, numbers, lanes)

    def local_offsets(self, addresses, size, lanes):
        check_aligned(addresses, size)
        if (addresses > self.program.local - size).any():
            raise AccessError("an address beyond local memory")
        return addresses.astype(np.int64) + lanes * self.program.local

    def add_shared(self, addresses, numbers, mask):
        lanes, addresses = self.chosen(addresses, mask)
        return self.spread([self.shared.add(addresses, numbers[lanes], lanes)], lanes, mask)[0]

    def count_global(self, addresses, limits, mask):
        lanes, addresses = self.chosen(addresses, mask)
        return self.spread([self.device.count(addresses, limits[lanes], lanes)], lanes, mask)[0]

    def fence(self, mask):
        self.device.log.order.fence(self.lanes if mask is None else np.flatnonzero(mask))

    def copy_async(self, targets, sources, size, used, mask):
        lanes, targets = self.chosen(targets, mask)
        used, sources = used[lanes], self.for_all(sources)[lanes]
        check_aligned(sources, size)
        words = np.zeros((size // 4, len(lanes)), np.uint32)
        if not np.isin(used, (0, size)).all():
            raise PtxError("unknown PTX: an asynchronous copy of a part")
        whole = used == size
        if whole.any():
            words[:, whole] = self.device.read(sources[whole], np.uint32, size // 4, lanes[whole])
        self.copies.append((lanes, self.shared.begin_copy(targets, size, lanes), words, self.groups[lanes]))

    def commit_copies(self, mask):
        self.groups[self.lanes if mask is None else mask] += 1

    def wait_for_copies(self, pending, mask):
        """Completes the copies of each active thread but those of its last `pending` groups."""
        active = np.ones(self.count, bool) if mask is None else mask
        for lanes, offsets, words, _ in self.take(lambda lanes, groups: active[lanes] & (groups < self.groups[lanes] - pending)):
            self.shared.end_copy(offsets, list(words), lanes)

    def take_copies(self, lanes):
        """Returns the pending copies of these threads, which no `wait_group` completes from now on."""
        active = np.zeros(self.count, bool)
        active[lanes] = True
        return self.take(lambda lanes, _: active[lanes])

    def take(self, chosen):
        """Removes some of the pending copies, and returns them."""
        left, taken = [], []
        for copies in self.copies:
            some = chosen(copies[0], copies[3])
            for where, chosen_here in ((taken, some), (left, ~some)):
                if chosen_here.any():
                    where.append(tuple(numbers[..., chosen_here] for numbers in copies))
        self.copies = left
        return taken

    def whole_warps(self, mask):
        """Returns the active warps, all lanes of which are active."""
        active = np.ones(self.count, bool) if mask is None else mask
        lanes = active.reshape(-1, WARP)
        if (lanes.any(1) != lanes.all(1)).any():
            raise PtxError("unknown PTX: an instruction of some lanes of a warp")
        return np.flatnonzero(lanes.all(1))

    def check_members(self, members, mask):
        active = members if mask is None or not np.ndim(members) else members[mask]
        if not np.all(active == np.uint32(0xFFFFFFFF)):
            raise PtxError("unknown PTX: an instruction of some lanes of a warp")

    def shuffle(self, how, a, b, c, members, mask):
        self.check_members(members, mask)
        lane, clamp = (self.lanes % WARP).astype(np.uint32), c & np.uint32(31)
        segment = c >> np.uint32(8) & np.uint32(31)
        last = (lane & segment) | (clamp & ~segment)
        by = b & np.uint32(31)
        source = {"bfly": lane ^ by, "idx": (lane & segment) | (by & ~segment)}[how]
        valid = source <= last
        source = np.where(valid, source, lane)
        return a[self.lanes // WARP * WARP + source], self.for_all(valid)

    def ballot(self, predicate, members, mask):
        self.check_members(members, mask)
        bits = (predicate.reshape(-1, WARP).astype(np.uint32) << LANES).sum(1, dtype=np.uint32)
        return np.repeat(bits, WARP)

    def mma(self, kind, a, b, c):
        return mma_m16n8k16(kind, *([np.ascontiguousarray(register) for register in registers] for registers in (a, b)), c)

    def ldmatrix(self, addresses, transposed, mask):
        lanes, addresses = self.chosen(addresses, mask)
        words = np.stack(self.shared.read(addresses, np.uint32, 4, lanes), 1)
        return self.spread(ldmatrix_x4(words, transposed), lanes, mask)

    def warp_barrier(self, members, mask):
        self.check_members(members, mask)
        self.threads.warp_barriers[self.lanes if mask is None else mask] += 1
        if self.clocks:
            self.clocks.join(self.whole_warps(mask))

    def any_of_warp(self, predicate, members, mask):
        self.check_members(members, mask)
        return np.repeat(predicate.reshape(-1, WARP).any(1), WARP)

    def block_barrier(self, mask):
        self.threads.block_barriers[self.lanes if mask is None else mask] += 1
        if self.clocks:
            self.clocks.barrier(self.whole_warps(mask))

    def count_in_block(self, predicate, mask):
        self.block_barrier(mask)
        return np.repeat(predicate.reshape(-1, self.of_block).sum(1, dtype=np.uint32), self.of_block)

    def wait_for_previous_kernel(self, mask):
        self.waited[self.lanes if mask is None else mask] = True


class Machine:
    """Launches the kernels of a module on a device. Counts executed instructions, one for each warp."""

    def __init__(self, module):
        self.module, self.programs, self.executed, self.launched = module, {}, 0, []

    def launch(self, device, name, grid, threads, dynamic, *arguments):
        if name not in self.programs:
            self.programs[name] = Program(self.module.kernel(name))
        tables = {table: np.uint64(device.put(np.frombuffer(data, np.uint8))) for table, (_, data) in self.module.tables.items()}
        launch = Launch(self.programs[name], device, tables, grid, threads, dynamic, arguments)
        self.launched.append(name)
        self.executed += launch.run()
