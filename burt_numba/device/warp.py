"""Warp shuffles, votes and reductions.

The reductions work within aligned groups of ``lanes`` lanes, a power of two up to 32, and leave the same bits in every
lane of a group: at each step both lanes of a pair add the same two values. ``mask`` names the lanes that are sure to
call: those of the group (``group_mask``) where groups may have parted, else all of the warp.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.numeric import choose, maximum

FULL_MASK = 0xFFFFFFFF


@cuda.jit(device=True)
def group_mask(lanes):
    """The lanes of the calling lane's group."""
    if lanes == 32:
        return np.uint32(FULL_MASK)
    return np.uint32(((1 << lanes) - 1) << (cuda.laneid & (32 - lanes)))


@cuda.jit(device=True)
def shuffle_xor(value, lane_mask, mask):
    """The value of the lane whose number differs in the bits of ``lane_mask``."""
    return cuda.shfl_xor_sync(mask, value, lane_mask)


@cuda.jit(device=True)
def shuffle(value, lane, mask):
    """The value of one lane, in every lane."""
    return cuda.shfl_sync(mask, value, lane)


@cuda.jit(device=True)
def any_lane(predicate, mask):
    """True in every lane when the predicate holds in one of them."""
    return cuda.any_sync(mask, predicate)


@cuda.jit(device=True)
def sync_warp():
    """Order the memory accesses of the lanes of a warp before and after."""
    cuda.syncwarp()


@cuda.jit(device=True)
def warp_max(value, lanes, mask):
    """Maximum of float32 values over each group."""
    step = lanes >> 1
    while step > 0:
        value = maximum(value, shuffle_xor(value, step, mask))
        step >>= 1
    return value


@cuda.jit(device=True)
def warp_sum(value, lanes, mask):
    """Sum over each group."""
    step = lanes >> 1
    while step > 0:
        value += shuffle_xor(value, step, mask)
        step >>= 1
    return value


@cuda.jit(device=True)
def warp_min(value, lanes, mask):
    """Minimum over each group, of integers or floats."""
    step = lanes >> 1
    while step > 0:
        other = shuffle_xor(value, step, mask)
        value = other if other < value else value
        step >>= 1
    return value


@cuda.jit(device=True)
def warp_sum3(a, b, c, lanes, mask):
    """Three sums at once: their shuffles overlap."""
    step = lanes >> 1
    while step > 0:
        other_a = shuffle_xor(a, step, mask)
        other_b = shuffle_xor(b, step, mask)
        other_c = shuffle_xor(c, step, mask)
        a += other_a
        b += other_b
        c += other_c
        step >>= 1
    return a, b, c


@cuda.jit(device=True)
def lanes_where(predicate, mask):
    """The lanes in which the predicate holds, as bits."""
    return np.uint32(cuda.ballot_sync(mask, predicate) & FULL_MASK)


@cuda.jit(device=True)
def lanes_alike(value, mask):
    """The lanes that call with the same int32, as bits."""
    return np.uint32(cuda.match_any_sync(mask, value) & FULL_MASK)


@cuda.jit(device=True)
def count_lanes(lanes):
    return np.int32(cuda.popc(lanes))


@cuda.jit(device=True)
def count_lanes_before(lanes):
    """How many of the lanes come before the calling one."""
    return np.int32(cuda.popc(np.uint32(lanes & cuda.lanemask_lt())))


@cuda.jit(device=True)
def _fold(sums, first, step, lane):
    """Half of the sums go to the lane that differs in the bit ``step``, which keeps those; both add what they get."""
    upper = lane & step != 0
    for place in range(first, first + step):
        kept = choose(upper, sums[place + step], sums[place])
        given = choose(upper, sums[place], sums[place + step])
        sums[place] = kept + shuffle_xor(given, step, FULL_MASK)


@cuda.jit(device=True)
def fold_sums(sums, first, lane):
    """Of 8 sums, from ``first`` on, that 8 lanes have parts of, each lane gets one whole, in the first place."""
    _fold(sums, first, 4, lane)
    _fold(sums, first, 2, lane)
    _fold(sums, first, 1, lane)
