"""The check of sums to which products of zero are added: kernels/exactness.cu."""
from functools import partial

import numpy as np

from lab import Case

THREADS, SHARED = 128, 2 * 16 * 128 + 1024


def unchanged(name, shared, lab):
    changed = lab.put(np.zeros(1, np.uint32))
    lab.launch(name, (2, 1, 1), THREADS, changed, shared=shared)
    lab.equal(lab.get(changed, (1,), np.uint32), [0])


def cases():
    yield Case("sums_after_mma", ["sums_after_mma"], partial(unchanged, "sums_after_mma", 0), True)
    yield Case("sums_after_wgmma", ["sums_after_wgmma"], partial(unchanged, "sums_after_wgmma", SHARED), hopper=True)
