"""How kernels report what only they can see: counts and the lowest place of an event, in a buffer.

Cells of the buffer (int64): 0 holds the lowest ``8 * index + code`` of all events, ``code`` the number of events of
that code, which only grows. A buffer of 8 cells is all there is to it. The public functions pass a longer one, in
device memory where atomics are cheap, that names a mirror in host memory; the host reads the mirror without waiting:

    0          1 .. 7    8                 9                           10
    first      counts    lock (0 or 1)     address of the mirror:      version: reports
                                           cells 0 .. 7, in mapped     so far
                                           host memory
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.coherence import load_now, store_at
from burt_numba.device.warp import warp_min, warp_sum
from burt_numba.target import EVENT_CELLS

NAN_INPUT = np.int64(1)
INF_INPUT = np.int64(2)
ENTROPY_OVERFLOW = np.int64(3)
SPECTRAL_OVERFLOW = np.int64(4)
CAPACITY_FULL = np.int64(5)
DIM_MISMATCH = np.int64(6)

_NO_INDEX = np.int64(1 << 59)
_LOCK = 8
_MIRROR = 9
_VERSION = 10


@cuda.jit(device=True)
def rolled(count, errors):
    """``count``, as a number the compiler does not know: a loop to it stays a loop.

    Reports are rare; unrolled into every kernel they would cost it registers.
    """
    return min(count, errors.size)


@cuda.jit(device=True)
def _publish(errors):
    """Copy the buffer to its mirror, on behalf of every thread that is reporting meanwhile.

    Host memory is microseconds away, so one thread at a time writes there and the others leave. Who holds the lock
    looks at the version again after letting it go: whoever was turned away had raised it before that.
    """
    while cuda.atomic.cas(errors, _LOCK, np.int64(0), np.int64(1)) == 0:
        version = load_now(errors, _VERSION)
        mirror = errors[_MIRROR]
        for cell in range(EVENT_CELLS):
            store_at(mirror + np.int64(8 * cell), load_now(errors, cell))
        cuda.threadfence_system()  # a later holder's values reach the host after these
        cuda.atomic.exch(errors, _LOCK, np.int64(0))
        cuda.threadfence()
        if load_now(errors, _VERSION) == version:
            break


@cuda.jit(device=True)
def record_event(errors, code, count, index):
    """One thread reports ``count`` events of a code, the lowest of them at the flat ``index``."""
    # The place first: whoever sees the count then finds the place as well.
    cuda.atomic.min(errors, 0, np.int64(index) * np.int64(8) + np.int64(code))
    cuda.atomic.add(errors, np.int64(code), np.int64(count))
    if errors.size > EVENT_CELLS:
        cuda.threadfence()
        cuda.atomic.add(errors, _VERSION, np.int64(1))
        _publish(errors)


@cuda.jit(device=True)
def record_bad_elements(errors, nans, infinities, first_nan, first_infinity, lanes, mask):
    """A group of lanes reports its NaN and Inf elements: one report a code, none where nothing is bad.

    ``nans`` and ``infinities`` count those of the lane, ``first_nan`` and ``first_infinity`` are its lowest flat
    indices (anything when the count is 0).
    """
    leads = cuda.laneid & (lanes - 1) == 0
    for code in range(NAN_INPUT, rolled(INF_INPUT + 1, errors)):
        found = nans if code == NAN_INPUT else infinities
        count = warp_sum(found, lanes, mask)
        first = first_nan if code == NAN_INPUT else first_infinity
        index = warp_min(first if found > 0 else _NO_INDEX, lanes, mask)
        if leads and count > 0:
            record_event(errors, code, count, index)
