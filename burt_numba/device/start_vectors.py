"""The vectors that the search for the largest singular value of a memory starts from."""

from __future__ import annotations

import math

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.spectrum import pseudo_random
from burt_numba.device.warp import FULL_MASK, any_lane

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_PSEUDO_RANDOM_PART = np.float32(0.01)
"""Of the start vector: what the carried vector misses can grow from it."""
_block_sum3 = row_reductions(ANY_THREADS).sum3


@cuda.jit(device=True)
def stage_vectors(
    matrix, columns, pitch, area, power_vector, hidden, hidden_place, shared, seed, reports, scratch, errors
):  # fmt: skip
    """v and w to the area of a block, both of length 1, and h behind them: (v was carried, h², length of w or 0).

    v is the carried vector with a pseudo-random part, or pseudo-random; w is h without its part along v. A shared
    memory has no h of its own, and takes a pseudo-random one. ``reports``: what is not finite in h is reported here.
    """
    thread = np.int32(cuda.threadIdx.x)
    threads = np.int32(cuda.blockDim.x)
    origin, stride0, stride1 = hidden_place
    offset = origin + np.int64(matrix) * stride0
    squares_v, squares_h, dot_vh = _ZERO, _ZERO, _ZERO
    squares_g, dot_vg, dot_gh = _ZERO, _ZERO, _ZERO
    bad = False
    for column in range(thread, columns, threads):
        carried = _ZERO
        if power_vector.size > 0:
            carried = finite_or_zero(power_vector[np.int64(matrix) * columns + column])
        area[column] = carried
        if shared:
            element = pseudo_random(column, 2)
        else:
            element = hidden[offset + np.int64(column) * stride1]
            bad |= not_finite(element)
            element = finite_or_zero(element)
        area[2 * pitch + column] = element
        other = pseudo_random(column, seed)
        squares_v += carried * carried
        squares_h += element * element
        dot_vh += carried * element
        squares_g += other * other
        dot_vg += carried * other
        dot_gh += other * element
    if reports and any_lane(bad, FULL_MASK):
        report_not_finite(
            hidden, offset, stride1, np.int64(thread), 1, np.int64(columns), np.int64(threads),
            np.int64(matrix) * columns, errors, 32, FULL_MASK,
        )  # fmt: skip
    squares_v, squares_h, dot_vh = _block_sum3(squares_v, squares_h, dot_vh, scratch, scratch, 0)
    squares_g, dot_vg, dot_gh = _block_sum3(squares_g, dot_vg, dot_gh, scratch, scratch, 1)
    warm = np.float32(1e-30) < squares_v < np.float32(1e30)
    scale = _ONE / math.sqrt(squares_v) if warm else _ZERO
    random_scale = _PSEUDO_RANDOM_PART / math.sqrt(squares_g) if warm else _ONE
    has_hidden = np.float32(1e-30) < squares_h < np.float32(1e30)
    hidden_scale = _ONE / math.sqrt(squares_h) if has_hidden else _ZERO
    length = random_scale * random_scale * squares_g
    along = random_scale * dot_gh
    if warm:
        length += scale * scale * squares_v + _TWO * scale * random_scale * dot_vg
        along += scale * dot_vh
    length = _ONE / math.sqrt(length)
    scale *= length
    random_scale *= length
    along *= length * hidden_scale
    # What is left of h beside v; in one dimension, or along v, nothing.
    rest = _ONE - along * along
    rest_scale = _ONE / math.sqrt(rest) if has_hidden and rest > np.float32(1e-6) else _ZERO
    for column in range(thread, columns, threads):
        element = random_scale * pseudo_random(column, seed)
        if warm:
            element += area[column] * scale
        area[column] = element
        area[pitch + column] = (area[2 * pitch + column] * hidden_scale - along * element) * rest_scale
    cuda.syncthreads()  # the vectors are complete
    return warm, squares_h, rest_scale
