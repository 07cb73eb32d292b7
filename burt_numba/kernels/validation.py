"""The kernels behind ``validate_output=True``."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.events import ENTROPY_OVERFLOW, record_event
from burt_numba.device.numeric import NEGATIVE_INFINITY, log, maximum
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import is_bad, not_finite, report_bad_elements, report_not_finite, row_offset, row_place
from burt_numba.device.warp import FULL_MASK, any_lane

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TOLERANCE = np.float32(1e-5)
"""Nats: the search's own tolerance and the arithmetic here."""
_block_sum3 = row_reductions(ANY_THREADS).sum3


@cuda.jit
def distribution_check_kernel(
    distribution,
    first_row,
    rows,
    columns,
    entropy_bound,
    rounding,
    smallest_rounding,
    row_bounds,
    size1,
    magic1,
    shift1,
    size2,
    magic2,
    shift2,
    bound_origin,
    bound_stride0,
    bound_stride1,
    bound_stride2,
    errors,
):
    """Block b checks the rows b, b + gridDim.x, ...: what is not finite is recorded, and an entropy over the bound."""
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    phase = 0
    for row in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        offset = (first_row + row) * columns
        bad = False
        entropy = np.float64(0.0)
        # How far rounding to the output's type can have moved the entropy: |dH| <= sum |dp| (1 - ln p).
        slack = np.float64(0.0)
        for column in range(thread, columns, threads):
            probability = np.float32(distribution[offset + column])
            if is_bad(probability) or probability == NEGATIVE_INFINITY:
                bad = True
            elif probability > _ZERO:
                logarithm = log(probability)
                entropy -= np.float64(probability * logarithm)
                slack += np.float64(maximum(probability * rounding, smallest_rounding) * (_ONE - logarithm))
        if any_lane(bad, FULL_MASK):
            report_bad_elements(
                distribution, offset, np.int64(1), thread, 1, columns, threads, offset, errors, 32, FULL_MASK
            )
        total, allowed, _ = _block_sum3(np.float32(entropy), np.float32(slack), _ZERO, scratch, scratch, phase)
        phase ^= 1
        bound = entropy_bound
        if row_bounds.size > 0:
            place = row_place(row, size1, magic1, shift1, size2, magic2, shift2)
            own = row_bounds[bound_origin + row_offset(place, bound_stride0, bound_stride1, bound_stride2)]
            bound = own if own >= _ZERO else _ZERO
        if thread == 0 and total > bound + allowed + _TOLERANCE:
            record_event(errors, ENTROPY_OVERFLOW, 1, first_row + row)


@cuda.jit
def finite_check_kernel(values, groups, rows, columns, counts, errors):
    """Block b checks the rows b, b + gridDim.x, ... of all groups: what is not finite is recorded.

    ``counts``: rows of each group that are looked at; of size 0: all of them.
    """
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    for row in range(cuda.blockIdx.x, groups * rows, cuda.gridDim.x):
        if counts.size == 0 or row % rows < counts[row // rows]:
            offset = np.int64(row) * columns
            bad = False
            for column in range(thread, columns, threads):
                if not_finite(np.float32(values[offset + column])):
                    bad = True
            if any_lane(bad, FULL_MASK):
                report_not_finite(
                    values, offset, np.int64(1), thread, 1, columns, threads, offset, errors, 32, FULL_MASK
                )
