"""Defects of kernels, as changes of their PTX. Their cases have to fail."""
import re
from collections.abc import Callable
from dataclasses import dataclass

from lab import Case, Lab, Mismatch
from ptx.machine import Machine
from ptx.parser import PtxError


@dataclass
class Mutant:
    """A change of a kernel, and the name of the case that finds it."""
    kernel: str
    name: str
    case: str
    change: Callable

    def run(self, module, cases, seed):
        """Returns how the case fails. None: it passes."""
        case: Case = next(case for case in cases if case.name == self.case)
        try:
            case.run(Lab(Machine(module.changed(self.kernel, self.change)), seed))
        except (Mismatch, PtxError) as error:
            return str(error)
        return None


def replaced(text, pattern, by, which):
    """Replaces one occurrence of a pattern, or all of them if `which` is None."""
    found = list(re.finditer(pattern, text))
    if not found:
        raise LookupError(f"no {pattern!r} in the PTX")
    chosen = found if which is None else [found[which]]
    for match in reversed(chosen):
        text = text[:match.start()] + match.expand(by) + text[match.end():]
    return text


def longer_wait(text):
    """Waits for one group of asynchronous copies less."""
    return re.sub(r"(cp\.async\.wait_group )(\d+)", lambda match: f"{match[1]}{int(match[2]) + 1}", text)


def without(pattern, which=None, by=""):
    return lambda text: replaced(text, pattern, by, which)


def barriers(kernel, case, *which):
    """Mutants without a barrier of the block. Only some launches need all barriers of a kernel."""
    return [Mutant(kernel, f"without barrier {i}", case, without(r"bar\.sync\s+0;", i)) for i in which]


def warp_barriers(kernel, case, *which):
    return [Mutant(kernel, f"without barrier {i} of a warp", case, without(r"bar\.warp\.sync\s+-1;", i)) for i in which]


# The condition in a wait for a phase.
PHASE = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 done, \[%r\d+\], (%r\d+);"
NAMED = r"bar\.sync\s+%r\d+, %r\d+;"


def on_hopper():
    """Mutants of attention by products of warpgroups."""
    wgmma, wide = "attention_wgmma_bf16_64", "attention_wgmma_bf16_128"
    case, case_wide = f"{wgmma}, five chunks", f"{wide}, one chunk"
    swizzled, others = str(1 << 62 | 64 << 32), {"no": 64 << 32, "another": 2 << 62 | 64 << 32}
    panel, queries = 128 * 128 // 16 << 16, lambda text: without(NAMED, 0)(without(NAMED, 0)(text))  # for two kinds of scores
    yield Mutant(wgmma, "wgmma.wait_group + 1", case, lambda text: re.sub(r"(wgmma\.wait_group\.sync\.aligned )(\d+)",
                                                                          lambda match: f"{match[1]}{int(match[2]) + 1}", text))
    for name, descriptor in others.items():
        yield Mutant(wgmma, f"{name} swizzle", case, without(swizzled, None, str(descriptor)))
    yield Mutant(wgmma, "another distance of rows", case, without(swizzled, None, str(1 << 62 | 32 << 32)))
    yield Mutant(wide, "another distance of panels", case_wide, without(str(panel), None, str(panel // 2)))
    yield Mutant(wgmma, "values not transposed", case, without(r"1, 1, 1, 1;", None, "1, 1, 1, 0;"))
    yield Mutant(wgmma, "without barrier 0", case, without(r"bar\.sync\s+0;", 0))
    yield Mutant(wgmma, "without the barrier of queries", case, queries)
    yield Mutant(wgmma, "without fence.proxy.async", case, without(r"fence\.proxy\.async\.shared::cta;"))
    yield Mutant(wgmma, "without wgmma.fence", case, without(r"wgmma\.fence\.sync\.aligned;"))
    yield Mutant(wgmma, "an arrival before the copies", case, without(r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta\.b64 ", None,
                                                                     "mbarrier.arrive.shared::cta.b64 _, "))
    boxes, wide_boxes = f"{case}, boxes", f"{wide}, boxes of 32"
    for of, waits in ((case, (2, 3)), (boxes, (8, 9))):
        for i in waits:
            yield Mutant(wgmma, f"without the wait for an empty stage, {i}", of, without(PHASE, i, r"setp.eq.u32 done, \1, \1;"))
    yield Mutant(wgmma, "without the fence of barriers", boxes, without(r"fence\.mbarrier_init\.release\.cluster;"))
    yield Mutant(wgmma, "a barrier that expects no bytes", boxes, without(r"expect_tx(.*), %r\d+;", None, r"expect_tx\1, 0;"))
    yield Mutant(wgmma, "a box that another barrier waits for", boxes, without(r"(bulk\.tensor.*\[)(%r\d+)(\], \[.*, \[)%r\d+", None, r"\1\2\3\2"))
    yield Mutant(wide, "a box of another head", wide_boxes, without(r"(bulk\.tensor.*, )(%r\d+)(, %r\d+\}\])", None, r"\g<1>0\3"))
    yield Mutant(wgmma, "too many registers", case, without(r"setmaxnreg\.inc\.sync\.aligned\.u32 232", None, "setmaxnreg.inc.sync.aligned.u32 240"))


DECODE, PREFILL, LATENT = "attention_decode_bf16_64", "attention_prefill_bf16_128", "attention_latent_bf16_64"
WIDENING = "attention_prefill_int8_128"
COUNT = r"atom\.global\.inc\.u32\s+(%r\d+), \[[^]]+\], (%r\d+);"


def of_decode():
    """Mutants of the merge of parts, and of the storage of rows."""
    parts, stores = f"{DECODE}, 3 parts", f"{DECODE}, stores rows, 3 parts"
    for i in (0, 1):
        yield Mutant(DECODE, f"without fence {i}", parts, without(r"membar\.gl;", i))
    yield Mutant(DECODE, "a merge by the first block", parts, without(COUNT, 0, r"\g<0> sub.s32 \1, \2, \1;"))
    yield from barriers(DECODE, parts, 0, 2, 3, 4, 5)
    yield from barriers(DECODE, f"{DECODE}, 340 tokens", 1)
    yield from barriers(DECODE, stores, 0, 1)
    yield from warp_barriers(DECODE, stores, 2)
MUTANTS = [
    *(Mutant(kernel, "wait_group + 1", case, longer_wait) for kernel, case in (
        ("matmul_bf16_16", "matmul_bf16_16, 9 x 40 x 1048"),
        ("matmul_f16_64", "matmul_f16_64, 9 x 40 x 1048"),
        ("matmul_fp8_128", "matmul_fp8_128, 9 x 40 x 1048"),
        ("matmul_codes8_by32_64", "matmul_codes8_by32_64, 7 x 37 x 300"),
        ("matmul_codes5_by32_128", "matmul_codes5_by32_128, offsets, 7 x 37 x 300"),
        (DECODE, f"{DECODE}, 3 parts"),
        ("attention_decode_int8_256", "attention_decode_int8_256, 3 parts"),
        (PREFILL, f"{PREFILL}, four chunks"),
        ("attention_prefill_fp8_80", "attention_prefill_fp8_80, four chunks"),
        (LATENT, f"{LATENT}, prompts"),
        ("attention_latent_f16_32", "attention_latent_f16_32, prompts"),
    )),
    *(Mutant(kernel, "ldmatrix without .trans", case, without(r"\.trans", which)) for kernel, case, which in (
        (DECODE, f"{DECODE}, 3 parts", 0),
        ("attention_decode_fp8_64", "attention_decode_fp8_64, 3 parts", None),
        (PREFILL, f"{PREFILL}, four chunks", -1),
        (LATENT, f"{LATENT}, prompts", 0),
    )),
    Mutant("matmul_bf16_64", "ldmatrix with .trans", "matmul_bf16_64, 13 x 70 x 203", without(r"\.x4\.shared", 0, ".x4.trans.shared")),
    *barriers("matmul_bf16_16", "matmul_bf16_16, 9 x 40 x 1048", 0),
    *barriers("matmul_f32_64", "matmul_f32_64, 13 x 70 x 203", 0),
    *barriers("matmul_codes4_by32_64", "matmul_codes4_by32_64, 7 x 37 x 300", 0),
    *barriers("matmul_codes4_by32_128", "matmul_codes4_by32_128, 7 x 37 x 300", 0),
    *barriers("few_rows_bf16_8", "few_rows_bf16_8, 2312 columns", 0),
    *of_decode(),
    *barriers(PREFILL, f"{PREFILL}, four chunks", 0, 1),
    # The first is before bytes are widened to where warps have read, the second before warps read.
    *barriers(WIDENING, f"{WIDENING}, four chunks", 0, 1),
    *barriers(LATENT, f"{LATENT}, prompts", 0, 1, 2, 3, 4),
    *barriers("attention_plain_bf16", "attention_plain_bf16, chunk, soft cap", 0, 1),
    *barriers("norm_rows", "norms of 700 numbers", 1, 2, 3),
    *barriers("sort_routes", "sort_routes, 37 rows", 0),
    *barriers("draw_choose", "draws, top-k and top-p", 3),
    *barriers("draw_edit", "draws, edits and masks", 0, 7),
    *barriers("draw_weigh", "draws, top-k and top-p", 1),
    *warp_barriers(DECODE, f"{DECODE}, 340 tokens", 0, 1),
    *warp_barriers("store_kv_bf16", "store_kv_bf16", 0),
    *warp_barriers("route", "route, softmax, normalized", 2, 3),
    Mutant("matmul_bf16_16", "a copy to the next chunk", "matmul_bf16_16, 9 x 40 x 1048",
           without(r"(cp\.async\.cg\.shared\.global \[%r\d+)\]", 0, r"\1+16]")),
    # The squares of a row are in four lanes.
    *(Mutant("few_rows_bf16_8", f"without shuffle {i}", "few_rows_bf16_8 with a norm, 2312 columns",
             without(r"shfl\.sync\.bfly\.b32\s+(%r\d+)\|%p\d+, (%r\d+), [^;]*;", i, r"mov.b32 \1, \2;")) for i in (0, 1)),
    *on_hopper(),
]
