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
    PLACE_PITCH,
    PRODUCTS,
    TILE,
    TILES,
    WARPS,
    add_products,
    leave_products,
    multiply_tiles,
)
from burt_numba.device.vector import element_at, load_vector, store_vector, unpack_vectors
from burt_numba.device.warp import sync_warp
from burt_numba.target import GATE_COLUMNS, GATE_SAMPLES

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_EACH = 4
"""Columns of a sample that a lane stages together."""
_STEPS = LANE_CELLS // _EACH
_SAMPLES_A_STEP = DEPTH // _STEPS
_store = store_vector(_EACH)
_GATES = WARPS * _SAMPLES_A_STEP * GATE_SAMPLES


@cache
def writes_kernel(vector: int):
    """The kernel for loads of ``vector`` elements.

    Block (x, y) has rows 32 x .. 32 x + 31 and columns 32 y .. 32 y + 31 of the write, warp w the samples 16 w .. + 15
    (fewer where there are fewer than 128), then those 128 further on, and so on. The order of all sums is fixed: the
    same bits on every run.
    """
    load, store = load_vector(vector), store_vector(vector)
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
        gates = cuda.shared.array(_GATES, np.float32, 16)
        gate_words = cuda.local.array(LANE_CELLS, np.uint32)
        row_words = cuda.local.array(LANE_CELLS, np.uint32)
        column_words = cuda.local.array(LANE_CELLS, np.uint32)
        weights = cuda.local.array(LANE_CELLS, np.float32)
        values = cuda.local.array(LANE_CELLS, np.float32)
        first_values = cuda.local.array(8, np.float32)
        first_rest = cuda.local.array(8, np.float32)
        second_values = cuda.local.array(2, np.float32)
        second_rest = cuda.local.array(2, np.float32)
        step_sums = cuda.local.array(4, np.float32)
        kept = cuda.local.array(_EACH, np.float32)
        sums = cuda.local.array(PRODUCTS, np.float32)
        product_buffers = (first_values, first_rest, second_values, second_rest, step_sums, sums)
        totals = cuda.local.array(4, np.float32)
        thread = np.int32(cuda.threadIdx.x)
        warp = np.int32(thread >> 5)
        first_row = np.int32(cuda.blockIdx.x * GATE_SAMPLES)
        first_column = np.int32(cuda.blockIdx.y * GATE_COLUMNS)
        row_tile = np.int32(warp * 2 * TILE)
        column_tile = np.int32(row_tile + TILE)
        staged_column = np.int32((cuda.laneid & 7) * _EACH)
        staged_sample = np.int32(cuda.laneid >> 3)
        cell = staged_sample * PLACE_PITCH + staged_column
        row = np.int32(first_row + staged_column)
        column = np.int32(first_column + staged_column)
        share = _ONE / np.float32(samples)
        for product in range(PRODUCTS):
            sums[product] = _ZERO
        for element in range(_EACH):
            kept[element] = _ZERO
        # Few samples are spread over all warps.
        depth = np.int32(min(DEPTH, (samples + GATE_SAMPLES - 1) // GATE_SAMPLES * _SAMPLES_A_STEP))
        start = np.int32(warp * depth)
        first_sample = np.int32(start + staged_sample)
        end = np.int32(min(start + depth, samples))
        load_cells(hidden, hidden_origin, hidden_stride0, hidden_stride1, row, columns, first_sample, end, row_words)
        load_cells(
            hidden, hidden_origin, hidden_stride0, hidden_stride1, column, columns, first_sample, end, column_words
        )
        wait_for_previous()  # the gates are complete
        load_cells(activations, np.int64(0), np.int64(columns), 1, row, columns, first_sample, end, gate_words)
        while start < samples:
            unpack(activations, gate_words, weights)
            unpack(hidden, row_words, values)
            sync_warp()  # the samples before have been used
            for step in range(_STEPS):
                if start + step * _SAMPLES_A_STEP < end:
                    is_counted = first_column == 0 and first_sample + step * _SAMPLES_A_STEP < end
                    for element in range(_EACH):
                        forget, weight = sigmoid_pair(weights[step * _EACH + element])
                        if is_counted:
                            kept[element] += forget
                        weight *= finite_or_zero(values[step * _EACH + element]) * share
                        weights[step * _EACH + element] = weight
                _store(tiles, row_tile + cell + step * _SAMPLES_A_STEP * PLACE_PITCH, weights, step * _EACH)
            unpack(hidden, column_words, values)
            for step in range(_STEPS):
                for element in range(_EACH):
                    values[step * _EACH + element] = finite_or_zero(values[step * _EACH + element])
                _store(tiles, column_tile + cell + step * _SAMPLES_A_STEP * PLACE_PITCH, values, step * _EACH)
            sync_warp()  # these samples are staged
            left = np.int32(end - start)
            multiply_tiles(tiles, row_tile, column_tile, 1, PLACE_PITCH, left, product_buffers)
            start = np.int32(start + WARPS * depth)
            first_sample = np.int32(start + staged_sample)
            end = np.int32(min(start + depth, samples))
            load_cells(
                hidden, hidden_origin, hidden_stride0, hidden_stride1, row, columns, first_sample, end, row_words
            )
            load_cells(
                hidden, hidden_origin, hidden_stride0, hidden_stride1, column, columns, first_sample, end, column_words
            )
            load_cells(activations, np.int64(0), np.int64(columns), 1, row, columns, first_sample, end, gate_words)
        # No shuffles: lanes may have gone apart in the loop, and come together for each of them at a price.
        _store(gates, (warp * _SAMPLES_A_STEP + staged_sample) * GATE_SAMPLES + staged_column, kept, 0)
        leave_products(tiles, warp, sums)
        add_products(tiles, gate_words, values, totals)
        row = np.int32(first_row + (thread >> 3))
        column = np.int32(first_column + 4 * (thread & 7))
        if row < columns:
            for element in range(0, 4, vector):
                if column + element < columns:
                    store(writes, np.int64(row) * columns + column + element, totals, element)
        row = np.int32(first_row + thread)
        if first_column == 0 and thread < GATE_SAMPLES and row < columns:
            total = _ZERO
            for other in range(WARPS * _SAMPLES_A_STEP):
                total += element_at(gates, other * GATE_SAMPLES + thread)
            mean_gates[row] = total * share

    return cifg_writes_kernel
