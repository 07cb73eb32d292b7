"""Where the rows of a strided array lie, and how their elements are made fit for a softmax."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.events import record_bad_elements, rolled
from burt_numba.device.numeric import FLOAT32_MAX, NEGATIVE_INFINITY


@cuda.jit(device=True)
def quotient(number, magic, shift):
    """number // divisor for numbers below 2**28, by the ``host.rows.Divisor`` of the divisor: one multiplication."""
    return np.int32((np.int64(np.int32(number)) * np.int64(np.int32(magic))) >> np.int64(shift))


@cuda.jit(device=True)
def row_place(row, size1, magic1, shift1, size2, magic2, shift2):
    """Where a row lies in an array [.., size1, size2, columns]: the indices of its three leading axes."""
    outer = quotient(row, magic2, shift2)
    index0 = quotient(outer, magic1, shift1)
    # Numba computes with 64-bit integers; narrowed again, they cost one instruction instead of three.
    return index0, np.int32(outer - index0 * size1), np.int32(row - outer * size2)


@cuda.jit(device=True)
def row_offset(place, stride0, stride1, stride2):
    """Offset in elements of the row at a place; strides in elements."""
    index0, index1, index2 = place
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
def not_finite(value):
    """NaN or an infinity of either sign."""
    return not (abs(value) <= FLOAT32_MAX)


@cuda.jit(device=True)
def finite_or_zero(value):
    return np.float32(0.0) if not_finite(value) else value


def element_report(is_reported):
    """A device function by which a group of lanes (a warp or a part of one) reports the bad elements of a row.

    It reads its columns of the row once more. Each lane covers ``vector`` columns from ``first``, from ``first +
    step``, ... below ``last`` of the row at ``offset``, whose elements lie ``stride`` apart and are numbered from
    ``flat_offset``. A rare path: registers hold the values, but indexing them with a loop variable would move them to
    local memory for every row.
    """

    @cuda.jit(device=True)
    def report(source, offset, stride, first, vector, last, step, flat_offset, errors, lanes, mask):
        nans = np.int32(0)
        infinities = np.int32(0)
        first_nan = np.int64(0)
        first_infinity = np.int64(0)
        for start in range(first, last, step):
            for column in range(start, start + rolled(vector, errors)):
                value = np.float32(source[offset + column * stride])
                if is_reported(value):
                    if value == value:
                        if infinities == 0:
                            first_infinity = flat_offset + column
                        infinities += np.int32(1)
                    else:
                        if nans == 0:
                            first_nan = flat_offset + column
                        nans += np.int32(1)
        record_bad_elements(errors, nans, infinities, first_nan, first_infinity, lanes, mask)

    return report


report_bad_elements = element_report(is_bad)
report_not_finite = element_report(not_finite)
