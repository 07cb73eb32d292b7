"""What the products of an update settle: proofs that a memory is within its bound, and the first power step."""

from __future__ import annotations

import math

import numpy as np

from burt_numba.backend import cuda
from burt_numba.cifg_launches import TOTALS
from burt_numba.device.numeric import maximum, minimum, opaque, reciprocal, square_root
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.spectrum import (
    COLD_FACTOR,
    ROUNDING_UP,
    WARM_FACTOR,
    is_in_range,
    top_pair_of_two,
    weyl_bound,
)
from burt_numba.device.vector import element_at, set_element

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_SMALL_TURN = np.float32(0.3)
"""Part of w in the best combination of v and w up to which the residual of v says enough."""
SETTLED, SQUARES, WRITES, LOST, MOST_KEPT, PART_V, PART_W, BEFORE = range(8)
"""Cells of the totals of a matrix: whether it is within its bound, and what the search goes on from if not."""

_block_sum3 = row_reductions(ANY_THREADS).sum3


@cuda.jit(device=True)
def settle_matrix(
    matrix, columns, pitch, tile, area, cells, power_vector, sigma_bound, sigma_out, totals, spectral_bound, warm,
    hidden_norm, scratch,
):  # fmt: skip
    """A block looks whether a memory is within its bound, from the sums of what its update has left in ``cells``.

    v and w are in the area, as they were for the products, and z behind ``tile``. Where the memory is within its bound,
    its outputs are written: the power vector, sigma, its proven bound.
    """
    thread = np.int32(cuda.threadIdx.x)
    vv, vw, ww = cells[0], cells[1], cells[2]
    squares, writes, lost, most_kept = cells[3], cells[4], cells[5], cells[6]
    a, b = _ONE, _ZERO
    settled = False
    estimate = _ZERO
    before = sigma_bound[matrix] if sigma_bound.size > 0 else _ZERO
    if lost == _ZERO and is_in_range(squares):
        estimate = math.sqrt(squares) * ROUNDING_UP
        if sigma_bound.size > 0:
            estimate = minimum(estimate, weyl_bound(before, most_kept, writes, hidden_norm))
        settled = estimate <= spectral_bound
        if power_vector.size > 0 or (not settled and sigma_bound.size == 0):
            # One power step with v, beside w. A carried vector takes it even where a proof has settled all: it says to
            # the next call that it has followed this memory.
            theta, a, b = top_pair_of_two(vv, vw, ww)
            rr, length = _ZERO, _ZERO
            column = thread
            while column < columns:
                av = element_at(area, tile + column)
                difference = av - vv * element_at(area, column)
                rr += difference * difference
                step_v = a * av + b * theta * element_at(area, pitch + column)
                length += step_v * step_v
                set_element(area, tile + column, step_v)
                column = opaque(np.int32(column + cuda.blockDim.x))
            rr, length, _unused = _block_sum3(rr, length, _ZERO, scratch, scratch, 0)
            if not settled and sigma_bound.size == 0:
                # Of the residual of v, the part along w is no news.
                rest = math.sqrt(maximum(rr - vw * vw, _ZERO))
                factor = WARM_FACTOR if warm else COLD_FACTOR * math.sqrt(np.float32(columns))
                estimate = math.sqrt(maximum(theta, vv + rr / vv if vv > _ZERO else _ZERO))
                settled = abs(b) <= _SMALL_TURN and theta + factor * rest <= spectral_bound * spectral_bound
                # The estimate is a lower bound of sigma.
                settled = settled and estimate <= spectral_bound
            if settled and power_vector.size > 0:
                scale = reciprocal(square_root(length)) if length > _ZERO else _ZERO
                column = thread
                while column < columns:
                    value = element_at(area, tile + column) * scale
                    set_element(power_vector, np.int64(matrix) * columns + column, value)
                    column = opaque(np.int32(column + cuda.blockDim.x))
    cuda.syncthreads()  # every thread has read what was proved before
    if thread == 0:
        if settled and sigma_bound.size > 0:
            sigma_bound[matrix] = estimate
        if settled and sigma_out.size > 0:
            sigma_out[matrix] = estimate
        place = np.int64(matrix) * TOTALS
        set_element(totals, place + SETTLED, _ONE if settled else _ZERO)
        set_element(totals, place + SQUARES, squares)
        set_element(totals, place + WRITES, writes)
        set_element(totals, place + LOST, lost)
        set_element(totals, place + MOST_KEPT, most_kept)
        set_element(totals, place + PART_V, a)
        set_element(totals, place + PART_W, b)
        set_element(totals, place + BEFORE, before)
