"""The vectors that the search for the largest singular value of a memory starts from."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.cifg_launches import START_CELLS
from burt_numba.device.block import MAX_WARPS
from burt_numba.device.numeric import opaque, reciprocal, square_root
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.spectrum import pseudo_random
from burt_numba.device.vector import element_at, set_element
from burt_numba.device.warp import FULL_MASK, any_lane, warp_sum3

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
WARM, SQUARES_H = range(2)
"""Cells behind the vectors of a start."""
_COLUMNS = 4
"""Columns that a thread has in hand."""
_PSEUDO_RANDOM_PART = np.float32(0.01)
"""Of the start vector: what the carried vector misses can grow from it."""


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
    carried = cuda.local.array(_COLUMNS, np.float32)
    elements = cuda.local.array(_COLUMNS, np.float32)
    others = cuda.local.array(_COLUMNS, np.float32)
    # Few columns stay in registers, the loads of several on their way together.
    stay = columns <= _COLUMNS * threads
    first = thread
    while first < columns:
        for part in range(_COLUMNS):
            column = np.int32(first + part * threads)
            carried[part], elements[part], others[part] = _ZERO, _ZERO, _ZERO
            if column < columns:
                if power_vector.size > 0:
                    carried[part] = element_at(power_vector, np.int64(matrix) * columns + column)
                if shared:
                    elements[part] = pseudo_random(column, 2)
                else:
                    elements[part] = element_at(hidden, offset + column * stride1)
                others[part] = pseudo_random(column, seed)
        for part in range(_COLUMNS):
            column = np.int32(first + part * threads)
            bad |= not_finite(elements[part])
            carried[part] = finite_or_zero(carried[part])
            elements[part] = finite_or_zero(elements[part])
            if column < columns:
                set_element(area, 2 * pitch + column, elements[part])
                if not stay:
                    set_element(area, column, carried[part])
            squares_v += carried[part] * carried[part]
            squares_h += elements[part] * elements[part]
            dot_vh += carried[part] * elements[part]
            squares_g += others[part] * others[part]
            dot_vg += carried[part] * others[part]
            dot_gh += others[part] * elements[part]
        first = opaque(np.int32(first + _COLUMNS * threads))
    if reports and any_lane(bad, FULL_MASK):
        report_not_finite(
            hidden, offset, stride1, np.int64(thread), 1, np.int64(columns), np.int64(threads),
            np.int64(matrix) * columns, errors, 32, FULL_MASK,
        )  # fmt: skip
    # Six sums for the price of one barrier.
    squares_v, squares_h, dot_vh = warp_sum3(squares_v, squares_h, dot_vh, 32, FULL_MASK)
    squares_g, dot_vg, dot_gh = warp_sum3(squares_g, dot_vg, dot_gh, 32, FULL_MASK)
    if cuda.laneid == 0:
        warp = thread >> 5
        scratch[warp] = squares_v
        scratch[warp + MAX_WARPS] = squares_h
        scratch[warp + 2 * MAX_WARPS] = dot_vh
        scratch[warp + 3 * MAX_WARPS] = squares_g
        scratch[warp + 4 * MAX_WARPS] = dot_vg
        scratch[warp + 5 * MAX_WARPS] = dot_gh
    cuda.syncthreads()  # the sums of all warps are in scratch
    squares_v, squares_h, dot_vh = _ZERO, _ZERO, _ZERO
    squares_g, dot_vg, dot_gh = _ZERO, _ZERO, _ZERO
    warp = np.int32(0)
    while warp < threads >> 5:
        squares_v += element_at(scratch, warp)
        squares_h += element_at(scratch, warp + MAX_WARPS)
        dot_vh += element_at(scratch, warp + 2 * MAX_WARPS)
        squares_g += element_at(scratch, warp + 3 * MAX_WARPS)
        dot_vg += element_at(scratch, warp + 4 * MAX_WARPS)
        dot_gh += element_at(scratch, warp + 5 * MAX_WARPS)
        warp = opaque(np.int32(warp + 1))
    warm = np.float32(1e-30) < squares_v < np.float32(1e30)
    scale = reciprocal(square_root(squares_v)) if warm else _ZERO
    random_scale = _PSEUDO_RANDOM_PART * reciprocal(square_root(squares_g)) if warm else _ONE
    has_hidden = np.float32(1e-30) < squares_h < np.float32(1e30)
    hidden_scale = reciprocal(square_root(squares_h)) if has_hidden else _ZERO
    length = random_scale * random_scale * squares_g
    # Without a length of h that is in range its products may be beyond float32, and there is no w.
    along = random_scale * dot_gh if has_hidden else _ZERO
    if warm:
        length += scale * scale * squares_v + _TWO * scale * random_scale * dot_vg
        if has_hidden:
            along += scale * dot_vh
    length = reciprocal(square_root(length))
    scale *= length
    random_scale *= length
    along *= length * hidden_scale
    # What is left of h beside v; in one dimension, or along v, nothing.
    rest = _ONE - along * along
    rest_scale = reciprocal(square_root(rest)) if has_hidden and rest > np.float32(1e-6) else _ZERO
    first = thread
    while first < columns:
        for part in range(_COLUMNS):
            column = np.int32(first + part * threads)
            if column < columns:
                if not stay:
                    carried[part] = element_at(area, column)
                    elements[part] = element_at(area, 2 * pitch + column)
                    others[part] = pseudo_random(column, seed)
                element = random_scale * others[part]
                if warm:
                    element += carried[part] * scale
                set_element(area, column, element)
                rest_of_h = (elements[part] * hidden_scale - along * element) * rest_scale
                set_element(area, pitch + column, rest_of_h)
        first = opaque(np.int32(first + _COLUMNS * threads))
    cuda.syncthreads()  # the vectors are complete
    return warm, squares_h, rest_scale


@cuda.jit(device=True)
def write_start(matrix, columns, power_vector, hidden, hidden_place, shared, starts, scratch, errors):
    """A block leaves v, w and h of a matrix in the workspace, and whether v was carried, and h²; reports h."""
    pitch = np.int32((columns + 3) & -4)
    size = np.int64(3 * pitch + START_CELLS)
    start = starts[matrix * size : (matrix + 1) * size]
    warm, squares_h, _rest = stage_vectors(
        matrix, columns, pitch, start, power_vector, hidden, hidden_place, shared, 1, not shared, scratch, errors
    )
    if cuda.threadIdx.x == 0:
        start[3 * pitch + WARM] = _ONE if warm else _ZERO
        start[3 * pitch + SQUARES_H] = squares_h
