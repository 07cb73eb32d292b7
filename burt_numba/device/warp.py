"""Warp shuffles, votes and reductions. Every lane of the warp calls them.

The butterfly reductions leave the same bits in every lane: at each step both lanes of a pair add the same two values.
"""

from __future__ import annotations

from burt_numba.backend import cuda
from burt_numba.device.numeric import maximum

FULL_MASK = 0xFFFFFFFF
WARP_SIZE = 32


@cuda.jit(device=True)
def shuffle_xor(value, lane_mask):
    """The value of the lane whose number differs in the bits of ``lane_mask``."""
    return cuda.shfl_xor_sync(FULL_MASK, value, lane_mask)


@cuda.jit(device=True)
def shuffle(value, lane):
    """The value of one lane, in every lane."""
    return cuda.shfl_sync(FULL_MASK, value, lane)


@cuda.jit(device=True)
def any_lane(predicate):
    """True in every lane when the predicate holds in one of them."""
    return cuda.any_sync(FULL_MASK, predicate)


@cuda.jit(device=True)
def sync_warp():
    """Order the memory accesses of the lanes of a warp before and after."""
    cuda.syncwarp()


@cuda.jit(device=True)
def warp_max(value, lanes):
    """Maximum over each aligned group of ``lanes`` (a power of two up to 32) lanes, in every lane of it."""
    step = lanes >> 1
    while step > 0:
        value = maximum(value, shuffle_xor(value, step))
        step >>= 1
    return value


@cuda.jit(device=True)
def warp_sum(value, lanes):
    """Sum over each aligned group of ``lanes`` (a power of two up to 32) lanes, the same bits in every lane of it."""
    step = lanes >> 1
    while step > 0:
        value += shuffle_xor(value, step)
        step >>= 1
    return value


@cuda.jit(device=True)
def warp_min(value, lanes):
    """Minimum over each aligned group of ``lanes`` lanes, for integers and floats alike."""
    step = lanes >> 1
    while step > 0:
        other = shuffle_xor(value, step)
        value = other if other < value else value
        step >>= 1
    return value


@cuda.jit(device=True)
def warp_sum3(a, b, c, lanes):
    """Three sums at once: their shuffles overlap."""
    step = lanes >> 1
    while step > 0:
        other_a = shuffle_xor(a, step)
        other_b = shuffle_xor(b, step)
        other_c = shuffle_xor(c, step)
        a += other_a
        b += other_b
        c += other_c
        step >>= 1
    return a, b, c
