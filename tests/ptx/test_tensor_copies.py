"""Tests of copies of boxes of tensors, with kernels of a few lines."""
import unittest

from test_interpreter import WAIT  # first, because it finds numpy

import numpy as np

from lab import Lab
from ptx.machine import Machine
from ptx.parser import Module, PtxError
from ptx.tensor_map import TensorMap

# Thread 0 copies boxes of 1024 bytes to the tile, each at its turn. Warp 1 stores them. Barriers: `full` for the
# bytes of a box, `empty` for the threads of warp 1.
HEAD = """
.shared .align 1024 .b8 tile[4096];
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .align 64 .b8 kernel_param_1[128],
    .param .u32 kernel_param_2
)
{
    .reg .pred %p<4>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<16>;
    .reg .f32 %f<32>;
    ld.param.u64 %rd1, [kernel_param_0];
    mov.b64 %rd2, kernel_param_1;
    ld.param.u32 %r20, [kernel_param_2];
    cvta.param.u64 %rd3, %rd2;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    add.s32 %r8, %r2, 2048;
    add.s32 %r9, %r2, 2056;
    and.b32 %r3, %r1, 31;
    shl.b32 %r3, %r3, 2;
    add.s32 %r4, %r2, %r3;
    cvt.u64.u32 %rd4, %r3;
    add.s64 %rd5, %rd1, %rd4;
    mov.u32 %r21, 0;
"""
INIT = "mbarrier.init.shared::cta.b64 [%r8], 1; mbarrier.init.shared::cta.b64 [%r9], 32;"
INIT_FENCE = "fence.mbarrier_init.release.cluster;"
BEGIN = f"setp.ne.u32 %p1, %r1, 0; @%p1 bra $begun; prefetch.tensormap [%rd3]; {INIT} {INIT_FENCE} $begun: bar.sync 0;"
ROLES = "setp.ge.u32 %p1, %r1, 32; @%p1 bra $consume; setp.ne.u32 %p2, %r1, 0; @%p2 bra $end;"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 1024;"
COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd3, {{{}}}], [%r8];"
FULL, EMPTY = WAIT, WAIT.replace("%r8", "%r9")
RELEASE = "fence.proxy.async.shared::cta; mbarrier.arrive.shared::cta.b64 _, [%r9];"
LOADS = "".join(f"ld.shared.u32 %r{24 + i}, [%r4+{128 * i}];" for i in range(8))


def stores(box):
    return "".join(f"st.global.u32 [%rd5+{1024 * box + 128 * i}], %r{24 + i};" for i in range(8))


def one_box(rank, coordinates):
    copy = COPY.format(rank, ", ".join(coordinates))
    return f"{BEGIN} {ROLES} {EXPECT} {copy} bra.uni $end; $consume: {FULL.format(0)} {LOADS} {stores(0)} $end: ret;"


def two_boxes():
    copies = [COPY.format(2, f"%r21, {row}") for row in ("%r21", "%r20")]
    return f"""{BEGIN} {ROLES} {EXPECT} {copies[0]} {EMPTY.format(0)} {EXPECT} {copies[1]} bra.uni $end;
        $consume: {FULL.format(0)} {LOADS} {stores(0)} {RELEASE} {FULL.format(1)} {LOADS} {stores(1)} $end: ret;"""


class TensorCopies(unittest.TestCase):
    rows = np.arange(2048, dtype=np.uint16).reshape(32, 64)

    def launch(self, body, given=None, boxes=1, number=0, in_place=False, argument=None, **fields):
        """Returns what warp 1 stores, as u16. The tensor is `given`, or the output if `in_place`. `fields` are of its map."""
        lab = Lab(Machine(Module(HEAD + body + "\n}\n")))
        given = self.rows if given is None else given
        dims, strides = given.shape[::-1], given.strides[-2::-1]
        out = lab.allocate(1024 * boxes)
        address = out if in_place else lab.put(given)
        fields = {"kind": "bf16", "address": address, "dims": dims, "strides": strides, "box": (64, 8), **fields}
        lab.launch("kernel", (1, 1, 1), 64, out, argument or TensorMap(**fields), number)
        return lab.get(out, (boxes, 8, 64), np.uint16)

    def assert_found(self, problem, body, **fields):
        with self.assertRaisesRegex(PtxError, problem):
            self.launch(body, **fields)

    def test_a_box_arrives_with_the_swizzle(self):
        """At the begin of the pattern, and at its second row."""
        for span, bits, first in ((0, 0, 0), (32, 1, 0), (64, 3, 0), (128, 7, 0), (128, 7, 8)):
            box = (span // 2, 1024 // span) if span else (64, 8)
            given = np.arange(box[0] * 80, dtype=np.uint16).reshape(80, box[0])
            body = one_box(2, ("%r21", "%r20")).replace("[%r2], [%rd3", f"[%r2+{16 * first}], [%rd3")
            body = body.replace(LOADS, f"add.s32 %r4, %r4, {16 * first};" + LOADS)
            got = self.launch(body, given, number=5, box=box, swizzle=span).reshape(64, 8)
            chunk = first + np.arange(64)  # of 16 bytes
            np.testing.assert_array_equal(got[(chunk ^ chunk >> 3 & bits) - first], given[5:5 + box[1]].reshape(64, 8))

    def test_tensors_have_one_to_five_dimensions(self):
        given = np.random.default_rng(1).integers(0, 1 << 16, (3, 4, 5, 6, 512)).astype(np.uint16)
        for rank, box in ((1, (256,)), (2, (128, 4)), (3, (64, 4, 2)), (4, (32, 4, 1, 4)), (5, (16, 4, 2, 2, 2))):
            part = given[(0,) * (5 - rank)]
            first = [8, 1, 2, 0, 1][:rank]
            body = one_box(rank, [f"{number}" for number in first])
            if rank == 1:
                body = body.replace("1024;", "512;")
            wanted = part[tuple(slice(at, at + width) for at, width in zip(first[::-1], box[::-1]))].ravel()
            got = self.launch(body.replace(LOADS, LOADS[:LOADS.index("ld.shared.u32 %r28")]) if rank == 1 else body, part, box=box)
            np.testing.assert_array_equal(got.ravel()[:len(wanted)], wanted)

    def test_elements_outside_of_the_tensor_are_zeros(self):
        padded = np.zeros((64, 192), np.uint16)
        padded[16:48, 64:128] = self.rows
        for row in (-20, -3, 0, 28, 31, 32, 1 << 30, -1 << 30):
            for column in (-64, -5, 0, 63, 64):
                body = one_box(2, (str(column), "%r20"))
                first = min(max(row + 16, 0), 56)
                np.testing.assert_array_equal(self.launch(body, number=row & 0xFFFFFFFF)[0], padded[first:first + 8, column + 64:column + 128])

    def test_a_stage_is_filled_again(self):
        np.testing.assert_array_equal(self.launch(two_boxes(), boxes=2, number=9), [self.rows[:8], self.rows[9:17]])
        release = "fence.proxy.async.shared::cta; mbarrier.arrive"
        fence_of_the_producer = two_boxes().replace(release, "mbarrier.arrive").replace(EMPTY.format(0), EMPTY.format(0) + "fence.proxy.async;")
        np.testing.assert_array_equal(self.launch(fence_of_the_producer, boxes=2, number=9), [self.rows[:8], self.rows[9:17]])

    def test_defects_are_found(self):
        one, two, copy = one_box(2, ("%r21", "%r20")), two_boxes(), COPY.format(2, "%r21, %r20")
        arrive = "mbarrier.arrive.shared::cta.b64 _, [%r8];"
        for problem, body in (
            ("pending", one.replace(FULL.format(0), "")),                                           # no wait
            ("a race", two.replace(FULL.format(1), "")),
            ("pending", two.replace(EMPTY.format(0), FULL.format(0))),                              # the stage is overwritten
            ("a race", two.replace(f"{LOADS} {stores(0)} {RELEASE}", f"{RELEASE} {LOADS} {stores(0)}")),
            ("more arrivals", two.replace(EMPTY.format(0), "")),
            ("without a fence between", two.replace(RELEASE, RELEASE[RELEASE.index("mbarrier"):])),
            ("pending", one.replace(EXPECT, arrive)),                                               # no expected bytes
            ("never arrive", one.replace(EXPECT, "")),
            ("never arrive", one.replace("1024;", "1040;")),
            ("1008 bytes more", one.replace("1024;", "16;")),
            ("1048592 bytes", one.replace("1024;", "1048592;")),
            ("a phase ended", one.replace(LOADS, EMPTY.format(0)).replace(f"{EXPECT} {copy}", f"{copy} {arrive}")),
            ("before a copy of a box is complete", one.replace(LOADS, "").replace(EXPECT, arrive)),
            ("expects bytes", one.replace(copy, "").replace(f"{FULL.format(0)} {LOADS}", "")),
            ("not a multiple of 128", one.replace("[%r2], [%rd3", "[%r2+64], [%rd3")),
            ("beyond the 4096 bytes", one.replace("[%r2], [%rd3", "[%r2+3200], [%rd3")),
            ("initialized without a fence", one.replace(INIT_FENCE, "")),
            ("before it is initialized", one.replace("], [%r8];", "], [%r8+16];")),
            ("not that of a tensor map", one.replace("[%rd3, ", "[%rd3+64, ")),
            ("not that of a tensor map", one.replace("prefetch.tensormap [%rd3]", "prefetch.tensormap [%rd1]")),
            ("reads the bytes", one.replace("$begun:", "ld.param.u64 %rd9, [kernel_param_1+8]; $begun:")),
            ("1 coordinates, and its tensor 2", one_box(1, ("%r21",))),
            ("before the wait for the previous kernel", one.replace("bra.uni $end;", "griddepcontrol.wait; bra.uni $end;")),
            ("that this kernel has written", one.replace("prefetch", "st.global.u32 [%rd1], 0; prefetch")),
        ):
            self.assertNotIn(body, (one, two))
            with self.subTest(problem=problem):
                self.assert_found(problem, body, boxes=2, in_place=problem.startswith("that this kernel"))

    def test_copies_read_allocations_only(self):
        self.assert_found("is not in an allocation", one_box(2, ("%r21", "%r20")), number=25, dims=(64, 33))
        self.assert_found("the argument 7 for a parameter of type map", "ret;", argument=7)

    def test_the_thread_that_initializes_a_barrier_passes_a_fence(self):
        """Either fence counts. The ISA also permits fences of other threads, which kernels here do not use."""
        one = one_box(2, ("%r21", "%r20"))
        np.testing.assert_array_equal(self.launch(one.replace(INIT_FENCE, "fence.proxy.async;"))[0], self.rows[:8])
        other = "setp.ne.u32 %p3, %r1, 33; @%p3 bra $fenced; fence.proxy.async; $fenced: "
        self.assert_found("initialized without", one.replace(INIT_FENCE, "").replace("bar.sync 0;", f"bar.sync 0; {other} bar.sync 0;"))

    def test_writes_by_threads_need_a_fence(self):
        """A fence of each thread before the barrier of the block, or of the thread that copies after it."""
        fence, one = "fence.proxy.async.shared::cta;", one_box(2, ("%r21", "%r20"))
        write = "$begun: shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r2; st.shared.u32 [%r5], %r1;"
        for before, after in (("", ""), (fence, ""), ("", fence)):
            body = one.replace("$begun: bar.sync 0;", f"{write} {before} bar.sync 0;").replace(EXPECT, EXPECT + after)
            if before or after:
                np.testing.assert_array_equal(self.launch(body)[0], self.rows[:8])
            else:
                self.assert_found("without a fence between", body)
        self.assert_found("a race", one.replace("$begun: bar.sync 0;", f"$begun: bar.sync 0; {write[7:]} {fence}"))

    def test_a_fence_of_one_thread_counts_after_a_barrier_of_the_warp(self):
        barrier, write = "bar.warp.sync -1;", "$begun: setp.ge.u32 %p3, %r1, 32; @%p3 bra $fenced; st.shared.u32 [%r4], %r1;"
        fence = "setp.ne.u32 %p3, %r1, 0; @%p3 bra $fenced; fence.proxy.async.shared::cta; $fenced:"
        body = one_box(2, ("%r21", "%r20")).replace("$begun:", f"{write} {barrier} {fence}")
        np.testing.assert_array_equal(self.launch(body)[0], self.rows[:8])
        self.assert_found("without a fence between", body.replace(barrier, ""))

    def test_threads_may_write_to_a_box(self):
        barrier = "bar.warp.sync -1;"
        exchange = f"{barrier} st.shared.u32 [%r4], %r24; {barrier} xor.b32 %r6, %r3, 4; add.s32 %r6, %r6, %r2; ld.shared.u32 %r24, [%r6];"
        body = one_box(2, ("%r21", "%r20")).replace(LOADS, LOADS + exchange)
        np.testing.assert_array_equal(self.launch(body)[0, 0], self.rows[0].reshape(16, 2, 2)[:, ::-1].ravel())
        self.assert_found("a race", body.replace(f"%r24; {barrier}", "%r24;"))

    def test_each_barrier_orders_its_copies_only(self):
        """The tile has a box for each of two barriers. That of the second barrier arrives later."""
        other = "add.s32 %r10, %r8, 16; mbarrier.init.shared::cta.b64 [%r10], 1;"
        second = (EXPECT + COPY.format(2, "%r21, %r20")).replace("%r8", "%r10").replace("[%r2]", "[%r2+1024]")
        body = one_box(2, ("%r21", "%r20")).replace(INIT, INIT + other).replace("bra.uni $end;", second + "bra.uni $end;")
        body = body.replace("$begun:", "$begun: add.s32 %r10, %r8, 16;")
        wait = FULL.replace("%r8", "%r10").format(0)
        np.testing.assert_array_equal(self.launch(body.replace(LOADS, wait + LOADS), number=4)[0], self.rows[4:12])
        self.assert_found("a race", body.replace(FULL.format(0), wait))

    def test_the_driver_refuses_maps(self):
        fields = {"kind": "bf16", "address": 1 << 40, "dims": (64, 32), "strides": (128,), "box": (64, 8), "swizzle": 128}
        TensorMap(**fields)
        for problem, wrong in (("an address", {"address": 8}), ("a stride", {"strides": (136,)}), ("a stride", {"strides": (1 << 40,)}),
                               ("a dimension", {"dims": (64, 0)}), ("a dimension", {"dims": (64, (1 << 32) + 1)}), ("a box", {"box": (64, 257)}),
                               ("a rank", {"dims": (64,)}), ("a multiple of 16 bytes", {"box": (60, 8)}), ("an unknown swizzle", {"swizzle": 256}),
                               ("longer than the swizzle", {"swizzle": 64})):
            with self.assertRaisesRegex(PtxError, problem):
                TensorMap(**{**fields, **wrong})


class ProductsOfBoxes(unittest.TestCase):
    """d = a * a' + b * b' by 128 threads: a and b are boxes of 64 rows, of which 16 columns count. A warp copies
    one box after the other to the same place."""
    PRODUCT = """wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{0}}}, %rd6, %rd6, 1, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;""".format(", ".join(f"%f{i}" for i in range(32)))
    RELEASE = RELEASE.replace("fence.proxy.async.shared::cta; ", "")  # products need no fence

    def multiply(self, change=lambda body: body):
        """Returns d and the right result."""
        head = HEAD.replace("[4096]", "[32768]").replace("2048;", "8192;").replace("2056;", "8200;")
        expect, begin = EXPECT.replace("1024", "8192"), BEGIN.replace("[%r9], 32;", "[%r9], 128;")
        copies = [expect + COPY.format(2, f"%r21, {row}") for row in ("0", "64")]
        body = f"""{begin} setp.lt.u32 %p1, %r1, 128; @%p1 bra $consume; setp.ne.u32 %p2, %r1, 128; @%p2 bra $end;
            {copies[0]} {EMPTY.format(0)} {copies[1]} bra.uni $end;
            $consume: {"".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(32))} shr.u32 %r5, %r2, 4; cvt.u64.u32 %rd6, %r5;
            add.s64 %rd6, %rd6, {1 << 62 | 64 << 32}; {FULL.format(0)} {self.PRODUCT} {self.RELEASE} {FULL.format(1)} {self.PRODUCT}
            mul.wide.u32 %rd7, %r1, 128; add.s64 %rd8, %rd1, %rd7; {"".join(f"st.global.f32 [%rd8+{4 * i}], %f{i};" for i in range(32))} $end: ret;"""
        rows = np.random.default_rng(1).integers(-4, 5, (128, 64)).astype(np.float16)
        lab = Lab(Machine(Module(head + change(body) + "\n}\n")))
        out = lab.out(128, 32)
        lab.launch("kernel", (1, 1, 1), 160, out, TensorMap("f16", lab.put(rows), (64, 128), (128,), (64, 64), 128), 0)
        a, b = rows[:, :16].astype(float).reshape(2, 64, 16)
        thread, i = np.arange(128)[:, None], np.arange(32)[None]
        places = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
        return lab.get(out, (128, 32), np.float32), (a @ a.T + b @ b.T)[places]

    def test_products_read_boxes_without_a_fence(self):
        np.testing.assert_array_equal(*self.multiply())

    def test_products_wait_for_the_barrier_of_their_box(self):
        """The barrier of another box does not order them, even if its phase ends later."""
        begin, wait = "add.s32 %r10, %r8, 16;", FULL.replace("%r8", "%r10").format(0)
        copy = (EXPECT.replace("1024", "8192") + COPY.format(2, "%r21, 0")).replace("%r8", "%r10").replace("[%r2]", "[%r2+16384]")

        def change(body):
            body = body.replace("[%r9], 128;", "[%r9], 128; mbarrier.init.shared::cta.b64 [%r10], 1;")
            return begin + body.replace(EMPTY.format(0), copy + EMPTY.format(0)).replace(FULL.format(0), wait)

        with self.assertRaisesRegex(PtxError, "a race: another thread writes"):
            self.multiply(change)

    def test_defects_are_found(self):
        wait = "wgmma.wait_group.sync.aligned 0;"
        for problem, old, new in (
            ("pending asynchronous copy", FULL.format(0), ""),
            ("a product reads .* pending|a race", FULL.format(1), ""),
            ("pending asynchronous copy", EMPTY.format(0), FULL.format(0)),
            ("pending products read", f"{wait} {self.RELEASE}", f"{self.RELEASE} {EMPTY.format(0)} {wait}"),
            ("pending asynchronous copy|a race", f"{self.PRODUCT} {self.RELEASE}", f"{self.RELEASE} {self.PRODUCT}"),
            ("accessed without a fence", self.RELEASE, f"ld.shared.u32 %r5, [%r2]; {self.RELEASE}"),
        ):
            with self.subTest(problem=problem, old=old), self.assertRaisesRegex(PtxError, problem):
                self.multiply(lambda body: body.replace(old, new))


if __name__ == "__main__":
    unittest.main()
