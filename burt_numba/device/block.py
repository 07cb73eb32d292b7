"""Reductions over the threads of a block. Every thread of the block calls them and every thread gets the result.

Each takes ``scratch``, a shared float32 array of ``SCRATCH_SIZE`` elements, and ``phase``, 0 or 1. One barrier stands
between the writes of the warps' partial results and their reads. Calls must alternate the phase: then the next call
writes to the other half, and no second barrier is needed before it. ``lanes`` is ``warps`` rounded up to a power of
two: each aligned group of that many lanes reads all partial results, so that no broadcast follows.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.numeric import NEGATIVE_INFINITY
from burt_numba.device.warp import FULL_MASK, warp_max, warp_sum, warp_sum3

MAX_WARPS = 32
SCRATCH_SIZE = 2 * 3 * MAX_WARPS
_ZERO = np.float32(0.0)


@cuda.jit(device=True)
def block_max(value, scratch, phase, warps, lanes):
    """Maximum over the ``warps`` warps of the block."""
    value = warp_max(value, 32, FULL_MASK)
    if warps > 1:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = phase * 96
        if lane == 0:
            scratch[base + (thread >> 5)] = value
        cuda.syncthreads()  # the partial maxima of all warps are in scratch
        slot = lane & (lanes - 1)
        value = warp_max(scratch[base + slot] if slot < warps else NEGATIVE_INFINITY, lanes, FULL_MASK)
    return value


@cuda.jit(device=True)
def block_sum(value, scratch, phase, warps, lanes):
    """Sum over the block, the same bits in every thread and on every run."""
    value = warp_sum(value, 32, FULL_MASK)
    if warps > 1:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = phase * 96
        if lane == 0:
            scratch[base + (thread >> 5)] = value
        cuda.syncthreads()  # the partial sums of all warps are in scratch
        slot = lane & (lanes - 1)
        value = warp_sum(scratch[base + slot] if slot < warps else _ZERO, lanes, FULL_MASK)
    return value


@cuda.jit(device=True)
def block_sum3(a, b, c, scratch, phase, warps, lanes):
    """Three sums over the block for the price of one barrier."""
    a, b, c = warp_sum3(a, b, c, 32, FULL_MASK)
    if warps > 1:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = phase * 96
        if lane == 0:
            place = base + (thread >> 5)
            scratch[place] = a
            scratch[place + 32] = b
            scratch[place + 64] = c
        cuda.syncthreads()  # the partial sums of all warps are in scratch
        slot = lane & (lanes - 1)
        a = scratch[base + slot] if slot < warps else _ZERO
        b = scratch[base + 32 + slot] if slot < warps else _ZERO
        c = scratch[base + 64 + slot] if slot < warps else _ZERO
        a, b, c = warp_sum3(a, b, c, lanes, FULL_MASK)
    return a, b, c


def power_of_two_at_least(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()
