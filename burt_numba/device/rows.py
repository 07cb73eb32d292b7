"""Where the rows of a strided array lie, and how their elements are made fit for a softmax."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import FLOAT32_MAX, NEGATIVE_INFINITY, divide_int32


@cuda.jit(device=True)
def row_offset(row, size1, size2, stride0, stride1, stride2):
    """Offset in elements of a row of an array [.., size1, size2, columns]; strides in elements, row below 2**31."""
    if size1 == 1 and size2 == 1:
        return np.int64(row) * stride0
    outer = divide_int32(row, size2)
    index2 = row - outer * size2
    index0 = divide_int32(outer, size1)
    index1 = outer - index0 * size1
    return np.int64(index0) * stride0 + np.int64(index1) * stride1 + np.int64(index2) * stride2


@cuda.jit(device=True)
def is_bad(value):
    """NaN or +inf. (-inf is a mask.)"""
    return not (value <= FLOAT32_MAX)


@cuda.jit(device=True)
def clean(value):
    """The value, or -inf (absent) where it is NaN or +inf."""
    return value if value <= FLOAT32_MAX else NEGATIVE_INFINITY


@cuda.jit(device=True)
def report_bad_elements(source, offset, stride, first, vector, last, step, flat_offset, errors, lanes, mask):
    """A group of lanes (a warp or a part of one) reads its columns of a row once more and reports the NaN and +inf in them.

    Each lane covers ``vector`` columns from ``first``, from ``first + step``, ... below ``last`` of the row at ``offset``,
    whose elements lie ``stride`` apart and are numbered from ``flat_offset``. A rare path: registers hold the values, but
    indexing them with a loop variable would move them to local memory for every row.
    """
    nans = np.int32(0)
    infinities = np.int32(0)
    first_nan = np.int64(0)
    first_infinity = np.int64(0)
    for start in range(first, last, step):
        for column in range(start, start + vector):
            value = np.float32(source[offset + column * stride])
            if is_bad(value):
                if value == value:
                    if infinities == 0:
                        first_infinity = flat_offset + column
                    infinities += np.int32(1)
                else:
                    if nans == 0:
                        first_nan = flat_offset + column
                    nans += np.int32(1)
    record_bad_elements(errors, nans, infinities, first_nan, first_infinity, lanes, mask)
