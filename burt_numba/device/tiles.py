"""Products of two matrices by blocks of 32 x 32 results, to which each warp adds its own stretches of the inner axis.

staged by a warp, for 16 places of the inner axis: 32 rows of each operand
results of a lane, g = lane / 4, t = lane % 4: rows g, g + 8, .. g + 24 of the one, 2t, 2t + 1, 2t + 8, .. of the other
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.tensor_cores import has_tensor_cores, multiply_add, split
from burt_numba.device.vector import element_at, load_vector, store_vector, unpack_vectors
from burt_numba.target import GATE_COLUMNS, GATE_SAMPLES, GATE_THREADS

WARPS = GATE_THREADS // 32
PRODUCTS = GATE_SAMPLES * GATE_COLUMNS // 32
"""Results of a lane: four for each 16 x 8 of them."""
DEPTH = 16
"""Places of the inner axis that a warp stages at a time."""
ROW_PITCH, PLACE_PITCH = DEPTH + 4, GATE_SAMPLES + 8
"""Floats from a row to the next where the places of one lie together, and from a place to the next where the rows do.

Either way the lanes of a warp read from 32 banks, and vectors of 4 are aligned.
"""
TILE = DEPTH * PLACE_PITCH
"""Floats: GATE_SAMPLES * ROW_PITCH as well."""
TILES = WARPS * 2 * TILE
"""Floats of shared memory, in which the warps' results have room as well."""
LANE_CELLS = DEPTH * GATE_SAMPLES // 32
"""That a lane stages of each operand."""
RESULT_PITCH = GATE_COLUMNS + 8
RESULTS = GATE_SAMPLES * RESULT_PITCH
"""Floats of a warp's results."""
PART = GATE_SAMPLES * GATE_COLUMNS
_STEP = 8
"""Places that a step of a tensor core takes."""
_ZERO = np.float32(0.0)
_store_pair = store_vector(2)
_load_four, _unpack_four = load_vector(4), unpack_vectors(4, 1)


@cuda.jit(device=True)
def multiply_tiles(tiles, first_tile, second_tile, row_pitch, place_pitch, left, buffers):
    """Add the products of what a warp has staged to the results of a lane; ``left``: places that are there.

    What is staged beyond the last place is zero. On tensor cores, products of float32 numbers as sums of three.
    """
    first, first_low, second, second_low, step_sums, sums = buffers
    group, turn = np.int32(cuda.laneid >> 2), np.int32(cuda.laneid & 3)
    first_cell = np.int32(first_tile + group * row_pitch)
    second_cell = second_tile
    place = np.int32(0)
    if has_tensor_cores():
        first_cell = np.int32(first_cell + turn * place_pitch)
        second_cell = np.int32(second_cell + group * row_pitch + turn * place_pitch)
        while place < min(left, np.int32(DEPTH)):
            for cell in range(8):
                # Of each 16 rows: those of the lane, and those of 4 places further.
                row = (cell & 1) * 8 + (cell >> 2) * 16
                at = first_cell + row * row_pitch + ((cell >> 1) & 1) * 4 * place_pitch
                first[cell] = element_at(tiles, at)
                split(first, first, first_low, cell)
            for column in range(0, GATE_COLUMNS, 8):
                for cell in range(2):
                    second[cell] = element_at(tiles, second_cell + column * row_pitch + cell * 4 * place_pitch)
                    split(second, second, second_low, cell)
                for half in range(2):
                    # A tensor core cuts what float32 would round: over many steps that would add up.
                    for cell in range(4):
                        step_sums[cell] = _ZERO
                    multiply_add(first_low, half * 4, second, 0, step_sums, 0)
                    multiply_add(first, half * 4, second_low, 0, step_sums, 0)
                    multiply_add(first, half * 4, second, 0, step_sums, 0)
                    for cell in range(4):
                        sums[half * 16 + column // 2 + cell] += step_sums[cell]
            first_cell = np.int32(first_cell + _STEP * place_pitch)
            second_cell = np.int32(second_cell + _STEP * place_pitch)
            place = np.int32(place + _STEP)
    else:
        second_cell = np.int32(second_cell + 2 * turn * row_pitch)
        while place < min(left, np.int32(DEPTH)):
            for cell in range(4):
                first[cell] = element_at(tiles, first_cell + cell * 8 * row_pitch)
            for column in range(8):
                row = (column >> 1) * 8 + (column & 1)
                first[4 + (column & 3)] = element_at(tiles, second_cell + row * row_pitch)
                for cell in range(4):
                    product = (cell >> 1) * 16 + (column >> 1) * 4 + (cell & 1) * 2 + (column & 1)
                    sums[product] += first[cell] * first[4 + (column & 3)]
            first_cell = np.int32(first_cell + place_pitch)
            second_cell = np.int32(second_cell + place_pitch)
            place = np.int32(place + 1)


@cuda.jit(device=True)
def leave_products(tiles, warp, sums):
    """The results of all warps take the place of the tiles: 32 rows of RESULT_PITCH of a warp behind the one before."""
    cuda.syncthreads()  # all tiles have been used
    own = np.int32(warp * RESULTS + (cuda.laneid >> 2) * RESULT_PITCH + (cuda.laneid & 3) * 2)
    for pair in range(PRODUCTS // 2):
        row = (pair & 1) * 8 + (pair >> 3) * 16
        _store_pair(tiles, own + row * RESULT_PITCH + ((pair >> 1) & 3) * 8, sums, pair * 2)
    cuda.syncthreads()  # the results of all warps are in place


@cuda.jit(device=True)
def result_cell(thread):
    """Where the first of a thread's four results lies behind the start of a warp's: row thread / 8, columns in turn."""
    return np.int32((thread >> 3) * RESULT_PITCH + (thread & 7) * 4)


@cuda.jit(device=True)
def add_products(tiles, words, values, totals):
    """A thread's four results, added up over the warps in their order. ``words``, ``values``: 4 cells to work with."""
    own = result_cell(np.int32(cuda.threadIdx.x))
    for element in range(4):
        totals[element] = _ZERO
    for warp in range(WARPS):
        _load_four(tiles, own + warp * RESULTS, words, 0)
        _unpack_four(tiles, words, values)
        for element in range(4):
            totals[element] += values[element]
