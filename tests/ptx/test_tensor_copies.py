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

    def launch(self, body, given=None, boxes=1, number=0, **fields):
        """Returns what warp 1 stores, as u16. The tensor is `given`; `fields` are of its map."""
        lab = Lab(Machine(Module(HEAD + body + "\n}\n")))
        given = self.rows if given is None else given
        dims, strides = given.shape[::-1], given.strides[-2::-1]
        fields = {"kind": "bf16", "address": lab.put(given), "dims": dims, "strides": strides, "box": (64, 8), **fields}
        out = lab.allocate(1024 * boxes)
        lab.launch("kernel", (1, 1, 1), 64, out, TensorMap(**fields), number)
        return lab.get(out, (boxes, 8, 64), np.uint16)

    def assert_found(self, problem, body, **fields):
        with self.assertRaisesRegex(PtxError, problem):
            self.launch(body, **fields)

    def test_a_box_arrives_with_the_swizzle(self):
        for span in (0, 32, 64, 128):
            box = (64, 8) if not span else (span // 2, 512 // (span // 2))
            given = np.arange(box[0] * 80, dtype=np.uint16).reshape(80, box[0])
            body = one_box(2, ("%r21", "%r20"))
            got = self.launch(body, given, number=5, box=box, swizzle=span).reshape(64, 8)
            wanted = given[5:5 + box[1]].reshape(64, 8)  # chunks of 16 bytes
            chunk = np.arange(64)
            bits = {0: 0, 32: 1, 64: 3, 128: 7}[span]
            np.testing.assert_array_equal(got[chunk ^ chunk >> 3 & bits], wanted)

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
        for problem, body, old, new in (
            ("pending", one, FULL.format(0), ""),                                    # no wait
            ("a race", two, FULL.format(1), ""),
            ("pending", one, EXPECT, "mbarrier.arrive.shared::cta.b64 _, [%r8];"),  # no expected bytes
            ("a block ends before", one.replace(LOADS, ""), EXPECT, "mbarrier.arrive.shared::cta.b64 _, [%r8];"),
            ("a phase ended", one.replace(LOADS, EMPTY.format(0)), f"{EXPECT} {copy}", f"{copy} mbarrier.arrive.shared::cta.b64 _, [%r8];"),
            ("never arrive", one, EXPECT, ""),
            ("never arrive", one, "1024;", "1040;"),
            ("1008 bytes more", one, "1024;", "16;"),
            ("not a multiple of 128", one, "[%r2], [%rd3", "[%r2+64], [%rd3"),
            ("beyond the 4096 bytes", one, "[%r2], [%rd3", "[%r2+3200], [%rd3"),
            ("pending", two, EMPTY.format(0), FULL.format(0)),                       # the stage is overwritten
            ("more arrivals", two, EMPTY.format(0), ""),
            ("without a fence between", two, "fence.proxy.async.shared::cta; mbarrier.arrive", "mbarrier.arrive"),
            ("a race", two, "RELEASE", ""),
            ("initialized without a fence", one, INIT_FENCE, ""),
            ("before it is initialized", one, "], [%r8];", "], [%r8+16];"),
            ("not that of a tensor map", one, "[%rd3, ", "[%rd3+64, "),
            ("not that of a tensor map", one, "prefetch.tensormap [%rd3]", "prefetch.tensormap [%rd1]"),
            ("1 coordinates, and its tensor 2", one, "2d.shared::cluster", "1d.shared::cluster"),
            ("reads the bytes", one, "$begun:", "ld.param.u64 %rd9, [kernel_param_1+8]; $begun:"),
        ):
            if old == "RELEASE":  # an arrival before the reads
                changed = two.replace(LOADS + " " + stores(0) + " " + RELEASE, RELEASE + LOADS + stores(0))
            else:
                changed = body.replace(old, new)
            if problem.startswith("1 coord"):
                changed = changed.replace("{%r21, %r20}", "{%r21}")
            self.assertNotEqual(changed, body)
            with self.subTest(problem=problem, old=old):
                self.assert_found(problem, changed, boxes=2)

    def test_the_driver_refuses_maps(self):
        fields = {"kind": "bf16", "address": 1 << 40, "dims": (64, 32), "strides": (128,), "box": (64, 8), "swizzle": 128}
        TensorMap(**fields)
        for problem, wrong in (("an address", {"address": 8}), ("a stride", {"strides": (136,)}), ("a stride", {"strides": (1 << 40,)}),
                               ("a dimension", {"dims": (64, 0)}), ("a dimension", {"dims": (64, (1 << 32) + 1)}), ("a box", {"box": (64, 257)}),
                               ("a rank", {"dims": (64,)}), ("a multiple of 16 bytes", {"box": (60, 8)}), ("an unknown swizzle", {"swizzle": 256}),
                               ("longer than the swizzle", {"swizzle": 64})):
            with self.assertRaisesRegex(PtxError, problem):
                TensorMap(**{**fields, **wrong})


if __name__ == "__main__":
    unittest.main()
