"""The kernel for what a batch writes to one memory: the mean of ((1 - f) h) hᵀ over the samples, and the mean gate."""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.launch_order import let_next_begin, wait_for_previous
from burt_numba.device.numeric import sigmoid_pair
from burt_numba.device.rows import finite_or_zero
from burt_numba.device.tiles import (
    DEPTH,
    LANE_CELLS,
    PART,
    PITCH,
    PRODUCTS,
    TALL,
    TILE,
    TILES,
    WARPS,
    WIDE,
    leave_products,
    multiply_tiles,
)
from burt_numba.device.vector import element_at, load_vector, set_element, unpack_vectors
from burt_numba.device.warp import sync_warp
from burt_numba.target import GATE_COLUMNS, GATE_SAMPLES, GATE_THREADS

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_EACH = 4
"""Columns of a sample that a lane stages together."""
_STEPS = LANE_CELLS // _EACH
_SAMPLES_A_STEP = DEPTH // _STEPS
_GATES = WARPS * _SAMPLES_A_STEP * GATE_SAMPLES


@cache
def writes_kernel(vector: int):
    """The kernel for loads of ``vector`` elements.

    Block (x, y) has rows 32 x .. 32 x + 31 and columns 32 y .. 32 y + 31 of the write, warp w the samples 16 w .. + 15,
    then those 128 further on, and so on. The order of all sums is fixed: the same bits on every run.
    """
    load = load_vector(vector)
    unpack = unpack_vectors(vector, LANE_CELLS // vector)

    @cuda.jit(device=True)
    def load_cells(source, origin, stride0, stride1, first, columns, start, samples, words):
        """A lane's cells: 4 columns from ``first`` on of each 4th sample from ``start`` on; 0 elsewhere."""
        for step in range(_STEPS):
            sample = np.int32(start + step * _SAMPLES_A_STEP)
            for element in range(0, _EACH, vector):
                column = np.int32(first + element)
                if sample < samples and column < columns:
                    place = column if vector > 1 else column * stride1
                    load(source, origin + sample * stride0 + place, words, step * _EACH + element)
                else:
                    for other in range(vector):
                        words[step * _EACH + element + other] = np.uint32(0)

    @cuda.jit
    def cifg_writes_kernel(
        hidden,
        hidden_origin,
        hidden_stride0,
        hidden_stride1,
        samples,
        columns,
        activations,
        writes,
        mean_gates,
    ):
        let_next_begin()
        hidden = array_at(hidden)
        activations = array_at(activations)
        writes = array_at(writes)
        mean_gates = array_at(mean_gates)
        tiles = cuda.shared.array(TILES, np.float32, 16)
        gates = cuda.shared.array(_GATES, np.float32)
        words = cuda.local.array(LANE_CELLS, np.uint32)
        values = cuda.local.array(LANE_CELLS, np.float32)
        product_words = cuda.local.array(TALL, np.uint32)
        tall = cuda.local.array(TALL, np.float32)
        wide = cuda.local.array(WIDE, np.float32)
        kept = cuda.local.array(_EACH, np.float32)
        weights = cuda.local.array(LANE_CELLS, np.float32)
        sums = cuda.local.array(PRODUCTS, np.float32)
        thread = np.int32(cuda.threadIdx.x)
        warp = np.int32(thread >> 5)
        first_row = np.int32(cuda.blockIdx.x * GATE_SAMPLES)
        first_column = np.int32(cuda.blockIdx.y * GATE_COLUMNS)
        row_tile = np.int32(warp * 2 * TILE)
        column_tile = np.int32(row_tile + TILE)
        own_row = np.int32((cuda.laneid >> 3) * TALL)
        own_column = np.int32((cuda.laneid & 7) * WIDE)
        staged_column = np.int32((cuda.laneid & 7) * _EACH)
        staged_sample = np.int32(cuda.laneid >> 3)
        cell = staged_sample * PITCH + staged_column
        share = _ONE / np.float32(samples)
        for product in range(PRODUCTS):
            sums[product] = _ZERO
        for element in range(_EACH):
            kept[element] = _ZERO
        wait_for_previous()  # the gates are complete
        for start in range(warp * DEPTH, samples, WARPS * DEPTH):
            first_sample = np.int32(start + staged_sample)
            row = np.int32(first_row + staged_column)
            load_cells(activations, np.int64(0), np.int64(columns), 1, row, columns, first_sample, samples, words)
            unpack(activations, words, weights)
            load_cells(
                hidden, hidden_origin, hidden_stride0, hidden_stride1, row, columns, first_sample, samples, words
            )
            unpack(hidden, words, values)
            sync_warp()  # the samples before have been used
            for step in range(_STEPS):
                is_sample = first_sample + step * _SAMPLES_A_STEP < samples
                for element in range(_EACH):
                    forget, weight = sigmoid_pair(weights[step * _EACH + element])
                    kept[element] += forget if is_sample else _ZERO
                    weight *= finite_or_zero(values[step * _EACH + element]) * share
                    set_element(tiles, row_tile + cell + step * _SAMPLES_A_STEP * PITCH + element, weight)
            load_cells(
                hidden, hidden_origin, hidden_stride0, hidden_stride1, np.int32(first_column + staged_column), columns,
                first_sample, samples, words,
            )  # fmt: skip
            unpack(hidden, words, values)
            for step in range(_STEPS):
                for element in range(_EACH):
                    place = column_tile + cell + step * _SAMPLES_A_STEP * PITCH + element
                    set_element(tiles, place, finite_or_zero(values[step * _EACH + element]))
            sync_warp()  # these samples are staged
            multiply_tiles(
                tiles, row_tile + own_row, column_tile + own_column, np.int32(samples - start),
                (product_words, tall, wide, sums),
            )  # fmt: skip
        # No shuffles: lanes may have gone apart in the loop, and come together for each of them at a price.
        for element in range(_EACH):
            set_element(
                gates, (warp * _SAMPLES_A_STEP + staged_sample) * GATE_SAMPLES + staged_column + element, kept[element]
            )
        leave_products(tiles, warp, own_row, own_column, sums)
        for place in range(thread, PART, GATE_THREADS):
            row = np.int64(first_row + (place >> 5))
            column = np.int64(first_column + (place & 31))
            if row < columns and column < columns:
                total = _ZERO
                for other in range(WARPS):
                    total += element_at(tiles, other * PART + place)
                set_element(writes, row * columns + column, total)
        row = np.int32(first_row + thread)
        if first_column == 0 and thread < GATE_SAMPLES and row < columns:
            total = _ZERO
            for other in range(WARPS * _SAMPLES_A_STEP):
                total += element_at(gates, other * GATE_SAMPLES + thread)
            mean_gates[row] = total * share

    return cifg_writes_kernel
