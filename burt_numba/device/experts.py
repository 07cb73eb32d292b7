"""What the kernels of a mixture of experts share: which expert a choice stands for, and words that are finite."""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.events import INF_INPUT, NAN_INPUT, record_event
from burt_numba.device.numeric import opaque
from burt_numba.device.rows import not_finite

SKIPPED, OUT_OF_RANGE = np.int32(-1), np.int32(-2)
_PADDING = np.int64(-1)
_ZERO = np.float32(0.0)


def choice_rules(read):
    """(chosen_expert, first_choice) for indices whose elements ``read(indices, place)`` gives."""

    @cuda.jit(device=True)
    def chosen_expert(index, indices, place, stride, choice, experts):
        """The expert that takes a token for one of its choices, which start at ``place`` and lie ``stride`` apart.

        ``index`` is what this choice names. SKIPPED where that is padding or the expert of an earlier choice,
        OUT_OF_RANGE where there is no such expert.
        """
        if index < 0 or index >= experts:
            return SKIPPED if index == _PADDING else OUT_OF_RANGE
        repeated = False
        earlier = np.int32(0)
        while earlier < choice:
            if np.int64(read(indices, place)) == index:
                repeated = True
            place += stride
            # Unrolled, the loop would take more registers than all else in a kernel.
            earlier = opaque(np.int32(earlier + 1))
        return SKIPPED if repeated else np.int32(index)

    @cuda.jit(device=True)
    def first_choice(indices, place, stride, choices, experts):
        """The first of a token's choices that is in range; -1 where none is."""
        for choice in range(choices):
            index = np.int64(read(indices, place + choice * stride))
            if index >= 0 and index < experts:
                return np.int32(choice)
        return np.int32(-1)

    return chosen_expert, first_choice


@cuda.jit(device=True)
def finite_weight(weights, place, flat, errors):
    """A weight as float32; one that is not finite is reported as element ``flat`` and counts as 0."""
    weight = np.float32(weights[place])
    if not_finite(weight):
        record_event(errors, NAN_INPUT if weight != weight else INF_INPUT, 1, flat)
        weight = _ZERO
    return weight


@cache
def finite_word(half: int):
    """A device function for a word of one float32, or of two float16: NaN and infinities in it become 0."""
    if half:

        @cuda.jit(device=True)
        def finite(word):
            if word & np.uint32(0x7C00) == np.uint32(0x7C00):
                word = np.uint32(word & np.uint32(0xFFFF0000))
            if word & np.uint32(0x7C000000) == np.uint32(0x7C000000):
                word = np.uint32(word & np.uint32(0x0000FFFF))
            return word

    else:

        @cuda.jit(device=True)
        def finite(word):
            return np.uint32(0) if word & np.uint32(0x7F800000) == np.uint32(0x7F800000) else word

    return finite
