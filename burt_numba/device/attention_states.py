"""States: what attention to some of the keys leaves, so that parts of the keys can be attended to apart and merged.

A state is the greatest score m, the sum l of e^(s - m) over the scores s, and the sums of e^(s - m) v over the values.
As a row of D + 2 floats (a partial), the D sums come first, then m, then l. States of any parts of the keys add up once
all are brought to one m. A result and the logarithm of its sum are a state as well: with m that logarithm, and l 1.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba import flash_launches as launches
from burt_numba.backend import cuda
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, exp2, maximum
from burt_numba.device.vector import element_at

EMPTY_MAX = -FLOAT32_MAX
"""m of a state of no keys. Differences from the lowest finite number are never NaN."""
DEAD_MAX = np.float32(launches.DEAD_MAX)
_ZERO = np.float32(0.0)
_INFINITY = np.float32(np.inf)


@cuda.jit(device=True)
def rescaling(row_max, common_max):
    """What sums relative to ``row_max`` are multiplied by to be relative to ``common_max``, which is no smaller."""
    return exp2((row_max - common_max) * LOG2_E)


@cuda.jit(device=True)
def counts(row_max, total, dead_max):
    """Whether a state does."""
    return (row_max > dead_max) & (row_max <= FLOAT32_MAX) & (total > _ZERO) & (total <= FLOAT32_MAX)


@cache
def merged_column(most: int):
    """A device function ``(cells, first, apart, states, dims, column)`` for up to ``most`` states without a NaN.

    It gives (m, l, one of the D sums) of them together, added up in their order. They lie ``apart`` in an array from
    ``first`` on.
    """

    @cuda.jit(device=True)
    def merge(cells, first, apart, states, dims, column):
        weights = cuda.local.array(most, np.float32)
        last = max(np.int32(states - 1), np.int32(0))
        common_max = EMPTY_MAX
        # Written out, the states are read at once: one after another, each would wait for the last.
        for state in range(most):
            place = np.int32(first + min(np.int32(state), last) * apart)
            top = element_at(cells, np.int64(np.int32(place + dims)))
            weights[state] = top if state < states else EMPTY_MAX
            common_max = maximum(common_max, weights[state])
        total = _ZERO
        value = _ZERO
        for state in range(most):
            place = np.int32(first + min(np.int32(state), last) * apart)
            weight = rescaling(weights[state], common_max)
            own_total = element_at(cells, np.int64(np.int32(place + dims + 1)))
            own_value = element_at(cells, np.int64(np.int32(place + column)))
            # A sum that has overflowed may carry no weight.
            if state < states and weight > _ZERO:
                total += own_total * weight
                value += own_value * weight
        # Of sums that have overflowed to either side, there is one that has: nothing here is NaN.
        return common_max, total, value if value == value else _INFINITY

    return merge
