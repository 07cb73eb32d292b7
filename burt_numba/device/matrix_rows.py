"""Rows of a matrix in a block: a warp or more has a row, a lane keeps up to LANE_COLUMNS of its columns.

    columns of warp k of a row: k * 512 ..; of its lane l: the vectors l, l + 32, ... of these

Sums over a row go through shared memory where it has more than one warp. What the blocks of a group add up for a matrix
goes through the workspace.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from burt_numba.backend import cuda
from burt_numba.cifg_launches import CELLS, LANE_COLUMNS, TILE_ROWS
from burt_numba.device.named_barrier import warps_barrier
from burt_numba.device.numeric import maximum, opaque, whole_quotient
from burt_numba.device.vector import element_at, load_vector, prefetch_line, set_element, store_vector, unpack_vectors
from burt_numba.device.warp import FULL_MASK, warp_max, warp_sum, warp_sum3

ROW_SCRATCH = 144
"""Cells for sums over the warps of rows: three sums of 16 warps, for one call and for two that take turns."""
BLOCK_CELLS = 16 * CELLS
_ZERO = np.float32(0.0)
_LINE = 32
"""Floats of a cache line."""
ROWS_AHEAD = 4
"""Rows of a warp that are on their way from device memory."""
_TOGETHER = 8
"""Loads of a column of z in flight."""


@cuda.jit(device=True)
def row_sums(a, b, c, scratch, base, warps_a_row):
    """Three sums over the warps of a row, in all of them. They meet, where there is more than one."""
    a, b, c = warp_sum3(a, b, c, 32, FULL_MASK)
    if warps_a_row > 1:
        warp = cuda.threadIdx.x >> 5
        if cuda.laneid == 0:
            set_element(scratch, base + warp, a)
            set_element(scratch, base + 16 + warp, b)
            set_element(scratch, base + 32 + warp, c)
        own = whole_quotient(np.int32(warp), warps_a_row)
        warps_barrier(own, warps_a_row)  # the parts of all warps of the row are in scratch
        a, b, c = _ZERO, _ZERO, _ZERO
        start = base + own * warps_a_row
        for other in range(start, start + warps_a_row):
            a += element_at(scratch, other)
            b += element_at(scratch, other + 16)
            c += element_at(scratch, other + 32)
    return a, b, c


@cuda.jit(device=True)
def row_sum(value, scratch, base, warps_a_row):
    """One sum over the warps of a row, in all of them. They meet, where there is more than one."""
    value = warp_sum(value, 32, FULL_MASK)
    if warps_a_row > 1:
        warp = cuda.threadIdx.x >> 5
        if cuda.laneid == 0:
            set_element(scratch, base + warp, value)
        own = whole_quotient(np.int32(warp), warps_a_row)
        warps_barrier(own, warps_a_row)  # the parts of all warps of the row are in scratch
        value = _ZERO
        start = base + own * warps_a_row
        for other in range(start, start + warps_a_row):
            value += element_at(scratch, other)
    return value


@cuda.jit(device=True)
def start_sweep(warps_a_row, vector, warp_columns):
    """(row of those at a time, first column of the lane, columns to its next part, whether it leads the row)."""
    warp = np.int32(cuda.threadIdx.x >> 5)
    own = whole_quotient(warp, warps_a_row)
    sub = np.int32(warp - own * warps_a_row)
    start = np.int32(sub * warp_columns + cuda.laneid * vector)
    return own, start, np.int32(warps_a_row * warp_columns), cuda.laneid == 0 and sub == 0


@cuda.jit(device=True)
def block_cells(cells, a, b, c, d, e, f, g, h, leads):
    """What the leaders of rows have: of six sums and two maxima, one cell each, in thread 0 .. 7 of the block."""
    warp = cuda.threadIdx.x >> 5
    warps = cuda.blockDim.x >> 5
    if cuda.laneid == 0:
        set_element(cells, warp * 8, a if leads else _ZERO)
        set_element(cells, warp * 8 + 1, b if leads else _ZERO)
        set_element(cells, warp * 8 + 2, c if leads else _ZERO)
        set_element(cells, warp * 8 + 3, d if leads else _ZERO)
        set_element(cells, warp * 8 + 4, e if leads else _ZERO)
        set_element(cells, warp * 8 + 5, f)
        set_element(cells, warp * 8 + 6, g if leads else _ZERO)
        set_element(cells, warp * 8 + 7, h if leads else _ZERO)
    cuda.syncthreads()  # the cells of all warps are in place
    result = _ZERO
    if cuda.threadIdx.x < 8:
        for other in range(warps):
            value = element_at(cells, other * 8 + cuda.threadIdx.x)
            result = result + value if cuda.threadIdx.x < 6 else maximum(result, value)
    return result


@cuda.jit(device=True)
def group_sums(work, sums, blocks, first):
    """Three sums over the blocks of a group, in every thread; the same bits everywhere and on every run."""
    a, b, c = _ZERO, _ZERO, _ZERO
    for block in range(cuda.laneid, blocks, 32):
        place = sums + block * CELLS + first
        a += work[place]
        b += work[place + 1]
        c += work[place + 2]
    return warp_sum3(a, b, c, 32, FULL_MASK)


@cuda.jit(device=True)
def group_maximum(work, sums, blocks, cell):
    """The maximum over the blocks of a group of a number that is not negative."""
    value = _ZERO
    for block in range(cuda.laneid, blocks, 32):
        value = maximum(value, work[sums + block * CELLS + cell])
    return warp_max(value, 32, FULL_MASK)


@cuda.jit(device=True)
def group_column(work, parts, blocks, pitch, first_block, step):
    """A lane's part of the sum of a column of z over the blocks of a group."""
    total = _ZERO
    for block in range(first_block, blocks, step * _TOGETHER):
        for other in range(_TOGETHER):
            if block + other * step < blocks:
                total += element_at(work, parts + np.int64(block + other * step) * pitch)
    return total


def lane_columns(staged: bool) -> int:
    """Columns that a lane takes at a time: all of its part of a row, or few where that is too long anyway."""
    return LANE_COLUMNS if staged else LANE_COLUMNS // 2


class MatrixRows(NamedTuple):
    """Device functions for rows that are read in vectors of one length."""

    load: Any
    """``load(source, start, column_stride, left, words)``: a lane's part of a row, 0 beyond the ``left`` columns."""
    unpack: Any
    """``unpack(source, words, values)``: that part as float32."""
    area: Any
    """``area(area, place, few_words, few)``: one vector of a block's area."""
    store: Any
    """``store(target, index, values, first)``: one vector."""
    flush: Any
    """``flush(area, tile, pitch, columns, tile_rows, start, own, z, work, own_part)``: a block's z to the workspace."""
    add_long: Any
    """``add_long(output, offset, columns, area, tile, start, span, words, values, y, unit)``: z += y row, unstaged."""
    fetch: Any
    """``fetch(source, offset, row, end_row, columns, tile_rows, start, first, last)``: rows ahead, into the cache."""


@cache
def matrix_rows(vector: int, staged: bool) -> MatrixRows:
    """``staged``: a lane's part of a row stays in its registers; else z is in the area, and rows are read again."""
    parts = lane_columns(staged) // vector
    stride = 32 * vector
    lanes_lines = 32 * lane_columns(staged) // _LINE
    load = load_vector(vector)
    unpack = unpack_vectors(vector, parts)
    unpack_one = unpack_vectors(vector, 1)
    store = store_vector(vector)

    @cuda.jit(device=True)
    def load_part(source, start, column_stride, left, words):
        """A lane's part of a row, from the element ``start`` on; 0 beyond the ``left`` columns of the row."""
        for part in range(parts):
            if part * stride < left:
                step = part * stride if vector > 1 else part * stride * column_stride
                load(source, start + step, words, part * vector)
            else:
                for element in range(vector):
                    words[part * vector + element] = np.uint32(0)

    @cuda.jit(device=True)
    def area_vector(area, place, few_words, values):
        """A vector of the block's area."""
        load(area, place, few_words, 0)
        unpack_one(area, few_words, values)

    @cuda.jit(device=True)
    def flush_products(area, tile, pitch, columns, tile_rows, start, own, z, work, own_part):
        """The z of a block, added up over the rows that it takes at a time, to the workspace for the group.

        It is behind ``tile`` in the area as well, each column where the thread wrote it.
        """
        if staged:
            for part in range(parts):
                if part * stride < columns - start:
                    store(area, tile + own * pitch + start + part * stride, z, part * vector)
            cuda.syncthreads()  # the z of all warps are in the area
            column = np.int32(cuda.threadIdx.x)
            while column < columns:
                total = _ZERO
                for row in range(TILE_ROWS):
                    if row < tile_rows:
                        total += element_at(area, tile + row * pitch + column)
                set_element(area, tile + column, total)
                set_element(work, own_part + column, total)
                column = opaque(np.int32(column + cuda.blockDim.x))
        else:
            cuda.syncthreads()  # z is complete
            for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
                work[own_part + column] = area[tile + column]

    @cuda.jit(device=True)
    def add_long_products(output, offset, columns, area, tile, start, span, words, values, y, unit):
        """z += y row, where registers do not hold the row: each thread for its own columns of the area."""
        for first in range(start, columns, span):
            left = np.int32(columns - first)
            load_part(output, offset + first, 1, left, words)
            unpack(output, words, values)
            for part in range(parts):
                if part * stride < left:
                    for element in range(vector):
                        value = values[part * vector + element] * unit
                        place = tile + first + part * stride + element
                        area[place] += y * value

    @cuda.jit(device=True)
    def fetch_rows(source, offset, row, end_row, columns, tile_rows, start, first, last):
        """A warp's parts of its rows ``first`` .. ``last`` - 1 from here, a line a lane. They take no registers."""
        line = np.int32(start - cuda.laneid * vector + cuda.laneid * _LINE)
        if staged and line < columns and cuda.laneid < lanes_lines:
            for ahead in range(first, last):
                if row + ahead * tile_rows < end_row:
                    prefetch_line(source, offset + np.int64(ahead * tile_rows) * columns + line)

    return MatrixRows(load_part, unpack, area_vector, store, flush_products, add_long_products, fetch_rows)
