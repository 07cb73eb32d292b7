"""Products of two matrices by blocks of 32 x 32 results, to which each warp adds its own stretches of the inner axis.

staged by a warp, for 16 places of the inner axis: 32 rows of each operand    floats: place * PITCH + row
results of lane l: rows 8 (l / 8) .. + 7 of the one, 4 (l % 8) .. + 3 of the other
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.vector import load_vector, store_vector, unpack_vectors
from burt_numba.target import GATE_COLUMNS, GATE_SAMPLES, GATE_THREADS

WARPS = GATE_THREADS // 32
TALL, WIDE = 8, 4
"""Results of a lane: 32 products for 12 values read."""
PRODUCTS = TALL * WIDE
DEPTH = 16
"""Places of the inner axis that a warp stages at a time. (Cells count these first where they are the inner ones.)"""
PITCH = GATE_SAMPLES + 4
"""Of a staged row: vectors of 4 stay aligned, and fewer lanes meet in a bank than with 32."""
TILE = DEPTH * PITCH
TILES = WARPS * 2 * TILE
"""Floats of shared memory, in which the warps' results have room as well."""
LANE_CELLS = DEPTH * GATE_SAMPLES // 32
"""That a lane stages of each operand."""
PART = GATE_SAMPLES * GATE_COLUMNS
_ZERO = np.float32(0.0)
_load_tall, _unpack_tall = load_vector(TALL), unpack_vectors(TALL, 1)
_load_wide, _unpack_wide, _store_wide = load_vector(WIDE), unpack_vectors(WIDE, 1), store_vector(WIDE)


@cuda.jit(device=True)
def multiply_tiles(tiles, tall_tile, wide_tile, left, buffers):
    """Add the products of what a warp has staged to the results of a lane; ``left``: places that are there."""
    words, tall, wide, sums = buffers
    depth = np.int32(0)
    while depth < min(left, np.int32(DEPTH)):
        # Written out by fours: what is staged beyond the last place is zero.
        for step in range(4):
            row = (depth + step) * PITCH
            _load_tall(tiles, tall_tile + row, words, 0)
            _unpack_tall(tiles, words, tall)
            _load_wide(tiles, wide_tile + row, words, 0)
            _unpack_wide(tiles, words, wide)
            for product in range(PRODUCTS):
                sums[product] += tall[product // WIDE] * wide[product % WIDE]
        depth = np.int32(depth + 4)


@cuda.jit(device=True)
def leave_products(tiles, warp, own_row, own_column, sums):
    """The results of all warps take the place of the tiles: 32 x 32 of a warp behind those of the one before."""
    cuda.syncthreads()  # all tiles have been used
    for row in range(TALL):
        _store_wide(tiles, warp * PART + (own_row + row) * GATE_COLUMNS + own_column, sums, row * WIDE)
    cuda.syncthreads()  # the results of all warps are in place


@cuda.jit(device=True)
def add_products(tiles, own, words, values, totals):
    """Four results from a place on, added up over the warps in their order. The others: of 4 cells at least."""
    for element in range(WIDE):
        totals[element] = _ZERO
    for warp in range(WARPS):
        _load_wide(tiles, warp * PART + own, words, 0)
        _unpack_wide(tiles, words, values)
        for element in range(WIDE):
            totals[element] += values[element]
