"""Maximum and sum of exponentials of a long row in one pass over it."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, exp2, maximum
from burt_numba.device.rows import clean, is_bad

_ZERO = np.float32(0.0)
_COLUMNS_A_PART = 64
"""Columns a thread sums in float32 before it adds to float64, so that rounding does not grow with the row."""


def online_softmax(read, reductions):
    """A device function ``(source, column, end, step, scratch, phase)`` -> (row maximum, 1 / sum, found a bad value).

    ``read(source, column)`` gives a score, possibly NaN or +inf, which then counts as absent. Each thread takes the
    columns from ``column`` by ``step``. It makes two reductions. A row with nothing finite gets a factor of 0.
    """
    reduce_max, reduce_sum = reductions.maximum, reductions.sum

    @cuda.jit(device=True)
    def scan(source, column, end, step, scratch, phase):
        # The lowest finite number instead of -inf: differences from it are never NaN.
        highest = -FLOAT32_MAX
        total = np.float64(0.0)
        bad = False
        while column < end:
            part_end = min(column + _COLUMNS_A_PART * step, end)
            part_highest = highest
            part = _ZERO
            while column < part_end:
                value = read(source, column)
                bad |= is_bad(value)
                value = clean(value)
                now = maximum(part_highest, value)
                part = part * exp2((part_highest - now) * LOG2_E) + exp2((value - now) * LOG2_E)
                part_highest = now
                column += step
            total = total * np.float64(exp2((highest - part_highest) * LOG2_E)) + np.float64(part)
            highest = part_highest
        row_max = reduce_max(highest, scratch, scratch, phase)
        row_total = reduce_sum(np.float32(total) * exp2((highest - row_max) * LOG2_E), scratch, scratch, phase ^ 1)
        return row_max, np.float32(1.0) / row_total if row_total > _ZERO else _ZERO, bad

    return scan
