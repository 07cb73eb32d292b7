"""Results that a warp has added up for its 32 queries: what their type does not hold, and their way to memory."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import HALF, ROW_TILES, TILE_ROWS, VALUE_DIMS
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import FLOAT32_MAX, maximum, minimum, opaque
from burt_numba.device.vector import rotate_elements, store_vector
from burt_numba.device.warp import FULL_MASK

_ZERO = np.float32(0.0)
TILE_SUMS = VALUE_DIMS // 8 * 4
"""Sums that a lane has of a tile of queries."""
VALUE_SUMS = ROW_TILES * TILE_SUMS


def largest_result(kind: int) -> np.float32:
    """The largest that the output's type holds."""
    return np.float32(65504.0) if kind == HALF else FLOAT32_MAX


class TileResults(NamedTuple):
    """Device functions for one type and one way to access memory."""

    report_results: Any
    """``report_results(results, place, dims, rows_left, dims_left, errors)``, where some exceed ``largest_result``."""
    store_results: Any
    """``store_results(output, results, place, dims, rows_left, dims_left, stored)``; ``stored``: an array for a vector.
    """


@cache
def tile_results(kind: int, vector: int) -> TileResults:
    """For EXACT, ROUNDED or HALF products, and accesses of ``vector`` elements (1: any strides)."""
    width = 8 if kind == HALF else 4
    largest = largest_result(kind)
    tile_columns = VALUE_DIMS // (8 * width)
    store = store_vector(width)
    rotate_results = rotate_elements(VALUE_SUMS, 8)

    @cuda.jit(device=True)
    def report_results(results, place, dims, rows_left, dims_left, errors):
        """Results that are not finite become 0. A mean of float16 numbers is one: what exceeds them is rounding."""
        nans = np.int32(0)
        infinities = np.int32(0)
        first_nan = np.int64(0)
        first_infinity = np.int64(0)
        first = np.int32(0)
        while first < VALUE_SUMS:
            for each in range(8):
                cell = np.int32(first + each)
                column = np.int32((cell & (TILE_SUMS - 1)) >> 2)
                row = np.int32(cell // TILE_SUMS * TILE_ROWS + (cell >> 1 & 1) * 8 + (cuda.laneid >> 2))
                step = np.int32(column // width * 8 + (cell & 1) + (cuda.laneid & 3) * 2)
                dim = np.int32(step * width + (column & (width - 1)))
                value = results[each]
                if not (abs(value) <= FLOAT32_MAX):
                    if row < rows_left and dim < dims_left:
                        index = place + np.int64(row) * dims + dim
                        if value == value:
                            first_infinity = index if infinities == 0 else min(first_infinity, index)
                            infinities += np.int32(1)
                        else:
                            first_nan = index if nans == 0 else min(first_nan, index)
                            nans += np.int32(1)
                    value = _ZERO
                results[each] = minimum(maximum(value, -largest), largest)
            rotate_results(results)
            first = opaque(np.int32(first + 8))
        record_bad_elements(errors, nans, infinities, first_nan, first_infinity, 32, FULL_MASK)

    @cuda.jit(device=True)
    def store_some(output, results, place, dims, rows_left, dims_left, stored, are_all_there):
        # Made anew: the places of all rows would else be kept over the passes.
        lane = opaque(np.int32(cuda.laneid))
        for vector_place in range(VALUE_SUMS // width):
            below, odd, column = vector_place & 1, (vector_place >> 1) & 1, (vector_place >> 2) % tile_columns
            row_tile = (vector_place >> 2) // tile_columns
            row = np.int32(row_tile * TILE_ROWS + below * 8 + (lane >> 2))
            dim = np.int32((column * 8 + (lane & 3) * 2 + odd) * width)
            first = row_tile * TILE_SUMS + column * width * 4 + below * 2 + odd
            for element in range(width):
                stored[element] = results[first + element * 4]
            if are_all_there or (row < rows_left and dim < dims_left):
                at = place + np.int64(row) * dims + dim
                if vector > 1:
                    store(output, at, stored, 0)
                else:
                    for element in range(width):
                        if dim + element < dims_left:
                            output[at + element] = stored[element]

    @cuda.jit(device=True)
    def store_results(output, results, place, dims, rows_left, dims_left, stored):
        # Without a branch for each store, none waits for the registers of the one before.
        if vector > 1 and rows_left >= ROW_TILES * TILE_ROWS and dims_left >= VALUE_DIMS:
            store_some(output, results, place, dims, rows_left, dims_left, stored, True)
        else:
            store_some(output, results, place, dims, rows_left, dims_left, stored, False)

    return TileResults(report_results, store_results)
