"""States: what attention to some of the keys leaves, so that parts of the keys can be attended to apart and merged.

A state is the greatest score m, the sum l of e^(s - m) over the scores s, and the sums of e^(s - m) v over the values.
As a row of D + 2 floats (a partial), the D sums come first, then m, then l. States of any parts of the keys add up once
all are brought to one m. A result and the logarithm of its sum are a state as well: with m that logarithm, and l 1.
"""

from __future__ import annotations

import numpy as np

from burt_numba import flash_launches as launches
from burt_numba.backend import cuda
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, exp2, maximum
from burt_numba.device.vector import element_at

EMPTY_MAX = -FLOAT32_MAX
"""m of a state of no keys. Differences from the lowest finite number are never NaN."""
DEAD_MAX = np.float32(launches.DEAD_MAX)
_ZERO = np.float32(0.0)


@cuda.jit(device=True)
def rescaling(row_max, common_max):
    """What sums relative to ``row_max`` are multiplied by to be relative to ``common_max``, which is no smaller."""
    return exp2((row_max - common_max) * LOG2_E)


@cuda.jit(device=True)
def counts(row_max, total, dead_max):
    """Whether a state does."""
    return row_max > dead_max and row_max <= FLOAT32_MAX and total > _ZERO and total <= FLOAT32_MAX


@cuda.jit(device=True)
def merged_column(cells, first, apart, states, dims, column):
    """(m, l, one of the D sums) of states together, all of finite numbers, added up in their order.

    They lie ``apart`` in an array from ``first`` on.
    """
    common_max = EMPTY_MAX
    place = np.int32(first + dims)
    for _state in range(states):
        common_max = maximum(common_max, element_at(cells, np.int64(place)))
        place = np.int32(place + apart)
    total = _ZERO
    value = _ZERO
    place = np.int32(first)
    for _state in range(states):
        weight = rescaling(element_at(cells, np.int64(np.int32(place + dims))), common_max)
        total += element_at(cells, np.int64(np.int32(place + dims + 1))) * weight
        value += element_at(cells, np.int64(np.int32(place + column))) * weight
        place = np.int32(place + apart)
    return common_max, total, value
