"""Tests of the interpreter, with kernels of a few lines."""
import contextlib
import importlib.util
import io
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "build" / "ptx"
if PACKAGES.is_dir():
    sys.path.insert(0, str(PACKAGES))
if importlib.util.find_spec("numpy") is None:
    print("skipped: the tests of the interpreter because numpy is missing; run scripts/setup.sh test")
    sys.exit(0)
sys.path.insert(0, str(HERE))

import numpy as np

import run
from lab import Case, Lab
from ptx import numbers
from ptx.machine import Machine
from ptx.parser import Module, PtxError

HEAD = """
.shared .align 16 .b8 tile[1024];
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .u64 kernel_param_1
)
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .reg .f32 %f<16>;
    ld.param.u64 %rd1, [kernel_param_0];
    ld.param.u64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    mov.u32 %r2, tile;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
"""
# Stores the word of a thread to shared memory, and reads that of another one.
EXCHANGE = "xor.b32 %r5, %r3, {distance}; add.s32 %r6, %r2, %r5; st.shared.u32 [%r4], %r1; {barrier} ld.shared.u32 %r7, [%r6];"
STORE = "st.global.u32 [%rd4], {}; ret;"


class KernelTest(unittest.TestCase):
    def run_kernel(self, body, threads=64, given=None):
        """Returns the u32 that the threads write. `given` is the second buffer."""
        lab = Lab(Machine(Module(HEAD + body + "\n}\n")))
        out = lab.allocate(4 * threads)
        given = np.arange(threads, dtype=np.uint32) if given is None else given
        lab.launch("kernel", (1, 1, 1), threads, out, lab.put(given))
        return lab.get(out, (threads,), np.uint32)

    def assert_found(self, problem, body, **options):
        with self.assertRaisesRegex(PtxError, problem):
            self.run_kernel(body, **options)


class Interpreter(KernelTest):
    def test_barriers_order_accesses(self):
        for distance, barrier in ((4, "bar.warp.sync -1;"), (128, "bar.sync 0;")):
            got = self.run_kernel(EXCHANGE.format(distance=distance, barrier=barrier) + STORE.format("%r7"))
            np.testing.assert_array_equal(got, np.arange(64) ^ distance // 4)

    def test_missing_barriers_are_races(self):
        for distance, barrier in ((4, ""), (128, ""), (128, "bar.warp.sync -1;")):
            self.assert_found("race", EXCHANGE.format(distance=distance, barrier=barrier) + STORE.format("%r7"))

    def test_a_write_after_a_read_without_a_barrier_is_a_race(self):
        body = EXCHANGE.format(distance=128, barrier="bar.sync 0;") + "st.shared.u32 [%r4], 7; ret;"
        self.assert_found("another thread reads", body)

    def test_threads_may_write_the_same_number_only(self):
        self.run_kernel("st.shared.u32 [%r2], 7; ret;")
        self.assert_found("different numbers", "st.shared.u32 [%r2], %r1; ret;")
        self.assert_found("different numbers", "st.global.u32 [%rd1], %r1; ret;")

    def test_atomic_additions_are_no_race(self):
        body = """st.shared.u32 [%r2], 0; bar.sync 0; atom.shared.add.u32 %r5, [%r2], 1;
                  atom.shared.add.u32 %r5, [%r2], 2; bar.sync 0; ld.shared.u32 %r6, [%r2];""" + STORE.format("%r6")
        self.assertEqual(set(self.run_kernel(body)), {192})
        self.assert_found("atomic addition", body.replace("bar.sync 0;", "", 1))
        self.assert_found("race", body.replace("add.u32 %r5, [%r2], 2; bar.sync 0;", "add.u32 %r5, [%r2], 2;"))

    def test_bounds_alignment_and_inputs_are_checked(self):
        for problem, body in (
            ("is not in an allocation", "ld.global.u32 %r5, [%rd4+4];"),
            ("is not in an allocation", "st.global.u32 [%rd4+256], %r1;"),
            ("not a multiple of 4", "ld.global.u32 %r5, [%rd4+2];"),
            ("not a multiple of 16", "ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r4];"),
            ("is read-only", "st.global.u32 [%rd5], %r1;"),
            ("beyond the 1024 bytes", "st.shared.u32 [%r4+1000], %r1;"),
        ):
            self.assert_found(problem, body + "ret;")

    def test_copies_write_at_their_wait(self):
        body = """cp.async.ca.shared.global [%r4], [%rd5], 4, {size}; cp.async.commit_group; cp.async.commit_group;
                  cp.async.wait_group {pending}; ld.shared.u32 %r7, [%r4];""" + STORE.format("%r7")
        np.testing.assert_array_equal(self.run_kernel(body.format(size=4, pending=1)), np.arange(64))
        np.testing.assert_array_equal(self.run_kernel(body.format(size=0, pending=0)), np.zeros(64))
        self.assert_found("pending", body.format(size=4, pending=2))

    def test_memory_that_was_not_written_is_nan(self):
        got = self.run_kernel("ld.shared.f32 %f1, [%r4]; add.f32 %f2, %f1, 0f3F800000; st.global.f32 [%rd4], %f2; ret;")
        self.assertTrue(np.isnan(got.view(np.float32)).all())

    def test_threads_diverge_and_join(self):
        body = """and.b32 %r5, %r1, 3; mov.u32 %r6, 0;
            $loop: add.s32 %r6, %r6, %r5; setp.eq.u32 %p1, %r5, 0; @%p1 bra $end; sub.s32 %r5, %r5, 1; bra.uni $loop;
            $end: setp.lt.u32 %p2, %r6, 6; vote.sync.ballot.b32 %r7, %p2, -1;
            add.s32 %r8, %r6, %r7;""" + STORE.format("%r8")
        sums = np.array([0, 1, 3, 6])[np.arange(64) % 4]
        np.testing.assert_array_equal(self.run_kernel(body), (sums + 0x77777777).astype(np.uint32))

    def test_threads_that_never_arrive_are_found(self):
        skipping = "setp.lt.u32 %p1, %r1, 5; @%p1 bra $end; {} $end: ret;"
        self.assert_found("never arrive", skipping.format("bar.sync 0;"))
        self.assert_found("never arrive", skipping.format("shfl.sync.bfly.b32 %r5|%p2, %r1, 1, 31, -1;"))
        self.assert_found("never arrive", "setp.lt.u32 %p1, %r1, 32; @%p1 bra $other; bar.sync 0; ret; $other: bar.sync 0; ret;")

    def test_the_previous_kernel_is_waited_for(self):
        self.run_kernel("griddepcontrol.wait; st.global.u32 [%rd4], %r1; ret;")
        self.assert_found("before the wait", "st.global.u32 [%rd4], %r1; griddepcontrol.wait; ret;")
        self.assert_found("without waiting", "setp.lt.u32 %p1, %r1, 5; @%p1 bra $end; griddepcontrol.wait; $end: ret;")

    def test_registers_of_inline_assembly_are_its_own(self):
        body = """setp.lt.u32 %p1, %r1, 5; { .reg .pred %p1; setp.ge.u32 %p1, %r1, 60; bar.red.popc.u32 %r5, 0, %p1; }
                  selp.b32 %r6, %r5, 9, %p1;""" + STORE.format("%r6")
        np.testing.assert_array_equal(self.run_kernel(body), [4] * 5 + [9] * 59)

    def test_unknown_instructions_are_errors(self):
        for body in ("frobnicate.u32 %r1, %r2;", "bar.sync 16, 32;", "bar.sync 1, 33;", "@%p1 add.s32 %r1, %r1, 1;", "atom.shared.max.u32 %r5, [%r2], 1;"):
            self.assert_found("unknown PTX", body + "ret;")

    def test_ldmatrix_and_mma_multiply_matrices(self):
        """Rows of a and of b transposed are in shared memory. The result has the registers of d."""
        random = np.random.default_rng(1)
        a, b = random.integers(-4, 5, (16, 16)).astype(np.float16), random.integers(-4, 5, (16, 8)).astype(np.float16)
        lab = Lab(Machine(Module(MULTIPLY)))
        out = lab.out(4, 32)
        lab.launch("multiply", (1, 1, 1), 32, out, lab.put(np.concatenate([a.ravel(), b.T.ravel()])))
        d = lab.get(out, (4, 32), np.float32)
        lane = np.arange(32)
        for register in range(4):
            rows, columns = lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2
            np.testing.assert_array_equal(d[register], (a.astype(float) @ b.astype(float))[rows, columns])


MULTIPLY = """
.shared .align 16 .b8 tile[1024];
.visible .entry multiply(
    .param .u64 multiply_param_0,
    .param .u64 multiply_param_1
)
{
    .reg .b32 %r<32>;
    .reg .b64 %rd<8>;
    .reg .f32 %f<8>;
    ld.param.u64 %rd1, [multiply_param_0];
    ld.param.u64 %rd2, [multiply_param_1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd4, %rd2, %rd3;
    shl.b32 %r3, %r1, 4;
    add.s32 %r4, %r2, %r3;
    cp.async.cg.shared.global [%r4], [%rd4], 16, 16;
    and.b32 %r5, %r1, 15;
    mul.wide.u32 %rd3, %r5, 16;
    add.s64 %rd4, %rd2, %rd3;
    shl.b32 %r6, %r5, 4;
    add.s32 %r7, %r2, %r6;
    cp.async.cg.shared.global [%r7+512], [%rd4+512], 16, 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    shl.b32 %r8, %r5, 5;
    shr.u32 %r9, %r1, 4;
    shl.b32 %r10, %r9, 4;
    add.s32 %r11, %r8, %r10;
    add.s32 %r12, %r2, %r11;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r13,%r14,%r15,%r16}, [%r12];
    and.b32 %r5, %r1, 7;
    shl.b32 %r8, %r5, 5;
    shr.u32 %r9, %r1, 3;
    and.b32 %r9, %r9, 1;
    shl.b32 %r10, %r9, 4;
    add.s32 %r11, %r8, %r10;
    add.s32 %r12, %r2, %r11;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r17,%r18,%r19,%r20}, [%r12+512];
    mov.f32 %f1, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2,%f3,%f4,%f5}, {%r13,%r14,%r15,%r16}, {%r17,%r18}, {%f1,%f1,%f1,%f1};
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    st.global.f32 [%rd4], %f2;
    st.global.f32 [%rd4+128], %f3;
    st.global.f32 [%rd4+256], %f4;
    st.global.f32 [%rd4+384], %f5;
    ret;
}
"""


# Warp 0 stores the numbers that warp 1 reads.
PASS_ON = """setp.ge.u32 %p1, %r1, 32; @%p1 bra $read; st.shared.u32 [%r4], %r1; {arrive} bra.uni $end;
    $read: {wait} sub.s32 %r5, %r4, 128; ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd4], %r6; $end: ret;"""
BARRIER = """add.s32 %r8, %r2, 512; setp.ne.u32 %p2, %r1, 0; @%p2 bra $begun; mbarrier.init.shared::cta.b64 [%r8], 32;
    $begun: {barrier}"""
WAIT = "{{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r8], {}; @!done bra again; }}"


class BarriersOfSomeWarps(KernelTest):
    def test_named_barriers_order_warps(self):
        body = PASS_ON.format(arrive="bar.arrive 1, 64;", wait="bar.sync 1, 64;")
        np.testing.assert_array_equal(self.run_kernel(body)[32:], np.arange(32))
        self.assert_found("a race", PASS_ON.format(arrive="", wait=""))
        self.assert_found("a race", PASS_ON.format(arrive="bar.arrive 1, 64; st.shared.u32 [%r4], 7;", wait="bar.sync 1, 64;"))
        self.assert_found("never arrive", PASS_ON.format(arrive="bar.arrive 2, 64;", wait="bar.sync 1, 64;"))
        self.assert_found("counts 64 threads and 96", PASS_ON.format(arrive="bar.arrive 1, 64;", wait="bar.sync 1, 96;"))

    def test_phases_order_warps(self):
        arrive, begin = "mbarrier.arrive.shared::cta.b64 _, [%r8];", BARRIER.format(barrier="bar.sync 0;")
        body = begin + PASS_ON.format(arrive=arrive, wait=WAIT.format(0))
        np.testing.assert_array_equal(self.run_kernel(body)[32:], np.arange(32))
        self.assert_found("a race", begin + PASS_ON.format(arrive=arrive + " st.shared.u32 [%r4], 7;", wait=WAIT.format(0)))
        self.assert_found("never arrive", begin + PASS_ON.format(arrive=arrive, wait=WAIT.format(1)))
        self.assert_found("never arrive", begin + PASS_ON.format(arrive="", wait=WAIT.format(0)))
        self.assert_found("more arrivals", begin.replace("32;", "31;") + PASS_ON.format(arrive=arrive, wait=WAIT.format(0)))
        self.assert_found("initialized", BARRIER.format(barrier="") + PASS_ON.format(arrive=arrive, wait=WAIT.format(0)))

    def test_arrivals_follow_copies(self):
        copy = "cp.async.ca.shared.global [%r4], [%rd5], 4; {}"
        arrive = copy.format("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];")
        begin, body = BARRIER.format(barrier="bar.sync 0;"), PASS_ON.replace("st.shared.u32 [%r4], %r1;", "")
        np.testing.assert_array_equal(self.run_kernel(begin + body.format(arrive=arrive, wait=WAIT.format(0)))[32:], np.arange(32))
        early = copy.format("mbarrier.arrive.shared::cta.b64 _, [%r8];")
        self.assert_found("pending", begin + body.format(arrive=early, wait=WAIT.format(0)))

    def test_registers_are_taken_from_other_warps(self):
        body = """setp.lt.u32 %p1, %r1, 128; @%p1 bra $give; setmaxnreg.inc.sync.aligned.u32 {}; bra.uni $end;
                  $give: setmaxnreg.dec.sync.aligned.u32 40; $end: ret;"""
        self.run_kernel(body.format(232), threads=384)
        self.assert_found("never arrive", body.format(240), threads=384)


# Three blocks write 32 numbers each. The last one that counts adds them.
COUNT = """mov.u32 %r8, %ctaid.x; shl.b32 %r9, %r8, 7; cvt.u64.u32 %rd6, %r9; add.s64 %rd6, %rd4, %rd6; st.global.u32 [%rd6], %r1;
    bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra $counted; membar.gl; atom.global.inc.u32 %r5, [%rd2], 2; membar.gl;
    st.shared.u32 [%r2], %r5; $counted: bar.sync 0; ld.shared.u32 %r5, [%r2]; setp.ne.u32 %p2, %r5, 2; @%p2 bra $end;
    ld.global.u32 %r6, [%rd4]; ld.global.u32 %r7, [%rd4+128]; add.s32 %r6, %r6, %r7; ld.global.u32 %r7, [%rd4+256];
    add.s32 %r6, %r6, %r7; st.global.u32 [%rd4+384], %r6; $end: ret;"""


class OrderOfBlocks(unittest.TestCase):
    def count(self, change=lambda body: body):
        lab = Lab(Machine(Module(HEAD + change(COUNT) + "\n}\n")))
        out, counter = lab.allocate(4 * 128), lab.buffer(np.zeros(1, np.uint32))
        lab.launch("kernel", (3, 1, 1), 32, out, counter)
        return lab.get(out, (4, 32), np.uint32)[3], lab.get(counter, (1,), np.uint32)[0]

    def test_counters_order_blocks(self):
        sums, counter = self.count()
        np.testing.assert_array_equal(sums, 3 * np.arange(32))
        self.assertEqual(counter, 0)

    def test_defects_are_found(self):
        """A missing fence or barrier before or after a count, a block that is not the last, and other accesses."""
        barrier, fence, first = "bar.sync 0;", "membar.gl;", "setp.ne.u32 %p2, %r5, {};"
        for old, new, places in ((fence, "", (0, 1)), (barrier, "", (0, 1)), (first.format(2), first.format(0), (0,)), (first.format(2), first.format(1), (0,)),
                                 (fence, "ld.global.u32 %r6, [%rd2]; membar.gl;", (0, 1)), ("ret;", "st.global.u32 [%rd2], 0; ret;", (0,)),
                                 (barrier, "ld.global.u32 %r6, [%rd4]; bar.sync 0;", (0,))):
            for place in places:
                parts = COUNT.split(old)
                body = old.join(parts[:place + 1]) + new + old.join(parts[place + 1:])
                with self.assertRaisesRegex(PtxError, "a race", msg=f"{old}, {place}: {new}"):
                    self.count(lambda _: body)


MATRICES = 8192  # bytes between a and b


class ProductsOfWarpgroups(unittest.TestCase):
    """d = a * b + 1 by 128 threads: a is [64, 16], b is [16, 64], both in shared memory."""

    @staticmethod
    def place(row, number, k, transposed):
        """The offset of a number of a matrix of 64 rows, with patterns of this many bytes per row."""
        across, down = (number, k) if transposed else (k, number)
        chunk, chunks = across // 8 % (row // 16), row // 16
        pattern = {16: 0, 32: down % 8 // 4, 64: down % 8 // 2, 128: down % 8}[row]
        within = down % 8 * row + (chunk ^ pattern) * 16 + across % 8 * 2
        return within + down // 8 * 8 * row + across // 8 // chunks * 1024 * chunks

    def descriptor(self, row, transposed, first):
        """Groups of 8 rows follow each other, and blocks of `row` bytes are 1024 times their chunks apart."""
        groups, blocks = 8 * row, 1024 * row // 16
        leading, stride = (groups, blocks) if transposed and row == 16 else (blocks, groups)
        return {16: 0, 128: 1, 64: 2, 32: 3}[row] << 62 | stride // 16 << 32 | leading // 16 << 16 | first // 16

    def multiply(self, row=128, transposed=(0, 0), change=lambda body: body):
        random = np.random.default_rng(1)
        matrices, memory = random.integers(-4, 5, (2, 64, 16)).astype(np.float16), np.zeros(MATRICES, np.float16)
        for i, (matrix, flag) in enumerate(zip(matrices, transposed)):
            for (number, k), x in np.ndenumerate(matrix):
                memory[(i * MATRICES + self.place(row, number, k, flag)) // 2] = x
        descriptors = [self.descriptor(row, flag, i * MATRICES) for i, flag in enumerate(transposed)]
        d, numbers = ", ".join(f"%f{i}" for i in range(32)), range(32)
        copies = "".join(f"ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd6+{2048 * i}]; st.shared.v4.u32 [%r6+{2048 * i}], {{%r8, %r9, %r10, %r11}};"
                         for i in range(8))
        body = f"""mul.wide.u32 %rd3, %r1, 16; add.s64 %rd6, %rd2, %rd3; shl.b32 %r5, %r1, 4; add.s32 %r6, %r2, %r5; {copies}
            {"".join(f"mov.f32 %f{i}, 0f3F800000;" for i in numbers)} mov.u64 %rd7, {descriptors[0]}; mov.u64 %rd0, {descriptors[1]};
            fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{d}}}, %rd7, %rd0, 1, 1, 1, {transposed[0]}, {transposed[1]};
            wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
            mul.wide.u32 %rd3, %r1, 128; add.s64 %rd4, %rd1, %rd3;
            {"".join(f"st.global.f32 [%rd4+{4 * i}], %f{i};" for i in numbers)} ret;"""
        head = HEAD.replace(".align 16 .b8 tile[1024]", ".align 1024 .b8 tile[16384]").replace("%f<16>", "%f<32>")
        lab = Lab(Machine(Module(head + change(body) + "\n}\n")))
        out = lab.out(128, 32)
        lab.launch("kernel", (1, 1, 1), 128, out, lab.put(memory))
        wanted = matrices[0].astype(float) @ matrices[1].T.astype(float) + 1
        thread, i = np.arange(128)[:, None], np.arange(32)[None]
        rows, columns = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
        return lab.get(out, (128, 32), np.float32), wanted[rows, columns]

    def test_matrices_have_the_layouts_of_descriptors(self):
        for row in (16, 32, 64, 128):
            for transposed in ((0, 0), (0, 1), (1, 0)):
                np.testing.assert_array_equal(*self.multiply(row, transposed))

    def test_defects_are_found(self):
        for problem, old, new in (
            ("written without a fence", "fence.proxy.async.shared::cta;", ""),
            ("a race", "bar.sync 0;", ""),
            ("after the last wgmma.fence", "wgmma.fence.sync.aligned;", ""),
            ("after the last wgmma.fence", "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.f32 %f3, 0f00000000;"),
            ("before the wait", "wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;"),
            ("before the wait", "wgmma.commit_group.sync.aligned;", ""),
            ("pending products read", "wgmma.wait", "st.shared.u32 [%r6], 0; wgmma.wait"),
            ("pending products read", "wgmma.wait", "atom.shared.add.u32 %r5, [%r6], 1; wgmma.wait"),
        ):
            with self.assertRaisesRegex(PtxError, problem):
                self.multiply(change=lambda body: body.replace(old, new))

    def test_results_are_poison_until_the_wait(self):
        wait = "wgmma.wait_group.sync.aligned 0;"
        got, wanted = self.multiply(change=lambda body: body.replace(wait, "").replace("ret;", wait + "ret;"))
        self.assertTrue(np.isnan(got).all() and not np.isnan(wanted).any())


class Numbers(unittest.TestCase):
    def test_bf16_is_rounded_once(self):
        """1 + 2^-8 is between two numbers. A part that f32 cannot hold beside it decides."""
        one, tie = 0x3F80, 0x3B80  # 1, 2^-8
        packed = [np.array([number], np.uint32) for number in (tie, one, one)]
        self.assertEqual(numbers.fma_bf16x2(*packed)[0] & 0xFFFF, 0x3F80)
        for more, rounded in ((0, 0x3F80), (2.0 ** -40, 0x3F81), (-2.0 ** -40, 0x3F80)):
            exact = np.array([1 + 2.0 ** -8 + more])
            self.assertEqual(numbers.to_bf16(numbers.rounded_to_odd(exact))[0], rounded)

    def test_e4m3_rounds_to_even_and_saturates(self):
        for number, code in ((448.0, 0x7E), (1e9, 0x7E), (-1.0, 0xB8), (17.0, 0x58), (19.0, 0x5A), (2.0 ** -10, 0), (3 * 2.0 ** -10, 2)):
            self.assertEqual(numbers.to_e4m3(np.array([number]))[0], code, number)
        np.testing.assert_array_equal(numbers.to_e4m3(numbers.from_e4m3(np.arange(127))), np.arange(127))

    def test_bytes_are_permuted_by_digits(self):
        a, b = (np.array([number], np.uint32) for number in (0x33221100, 0x77665544))
        for selector, wanted in ((0x3210, a[0]), (0x5410, 0x55441100), (0x7632, 0x77663322), (0x0747, 0x00774477)):
            self.assertEqual(numbers.permute_bytes(a, b, selector)[0], wanted)

    def test_products_of_64_bits_have_an_upper_half(self):
        random = np.random.default_rng(2)
        a, b = random.integers(0, 1 << 64, (2, 50), np.uint64)
        wanted = [int(x) * int(y) >> 64 for x, y in zip(a, b)]
        self.assertEqual(numbers.multiply_high(a, b).tolist(), wanted)


class Runner(unittest.TestCase):
    def setUp(self):
        self.enterContext(contextlib.redirect_stdout(io.StringIO()))

    def test_a_kernel_without_a_case_is_a_failure(self):
        checked = run.Run("")
        checked.coverage(["norm_rows", "invented"], {"norm_rows"})
        self.assertEqual(checked.failures, ["invented"])

    def test_a_case_launches_the_kernels_that_it_names(self):
        module = Module(HEAD + "ret;\n}\n")
        checked = run.Run("")
        launch = lambda lab: lab.launch("kernel", (1, 1, 1), 32, 0, 0)
        checked.cases(module, [Case("right", ["kernel"], launch), Case("wrong", ["kernel", "other"], launch)])
        self.assertEqual((checked.passed, checked.failures), (1, ["wrong"]))


if __name__ == "__main__":
    unittest.main()
