"""How kernels report what only they can see: counts and the lowest place of an event, in a buffer the host reads.

The buffer is ``int64[8]``: element 0 holds the lowest ``8 * index + code`` of all events (``NO_EVENT`` when there was
none), element ``code`` the number of events of that code. Counts only grow.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.warp import any_lane, warp_min, warp_sum

BUFFER_SIZE = 8
NO_EVENT = np.iinfo(np.int64).max

NAN_INPUT = np.int64(1)
INF_INPUT = np.int64(2)
ENTROPY_OVERFLOW = np.int64(3)
DIM_MISMATCH = np.int64(6)

_NO_INDEX = np.int64(NO_EVENT >> 3)


@cuda.jit(device=True)
def record_event(errors, code, count, index):
    """One thread reports ``count`` events of a code, the lowest of them at the flat ``index``."""
    # The place first: a host that sees the count then finds the place as well.
    cuda.atomic.min(errors, 0, np.int64(index) * np.int64(8) + np.int64(code))
    cuda.threadfence_system()
    cuda.atomic.add(errors, np.int64(code), np.int64(count))


@cuda.jit(device=True)
def record_bad_elements(errors, nans, infinities, first_nan, first_infinity):
    """A warp reports its NaN and Inf elements: one pair of atomics a code and warp, none where nothing is bad.

    ``nans`` and ``infinities`` count those of the lane, ``first_nan`` and ``first_infinity`` are its lowest flat
    indices (anything when the count is 0).
    """
    if any_lane(nans > 0):
        count = warp_sum(nans, 32)
        index = warp_min(first_nan if nans > 0 else _NO_INDEX, 32)
        if cuda.laneid == 0:
            record_event(errors, NAN_INPUT, count, index)
    if any_lane(infinities > 0):
        count = warp_sum(infinities, 32)
        index = warp_min(first_infinity if infinities > 0 else _NO_INDEX, 32)
        if cuda.laneid == 0:
            record_event(errors, INF_INPUT, count, index)
