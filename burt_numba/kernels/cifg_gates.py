"""The kernels for gates, before the sigmoid: W_f [h; x] + b_f for one sample, and as a tiled product for a batch."""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.coherence import last_arrival
from burt_numba.device.events import rolled
from burt_numba.device.gates import with_bias
from burt_numba.device.launch_order import let_next_begin
from burt_numba.device.numeric import opaque, sigmoid_pair, whole_quotient
from burt_numba.device.parts import add_parts, load_parts
from burt_numba.device.row_reductions import row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.start_vectors import write_start
from burt_numba.device.tiles import (
    DEPTH,
    LANE_CELLS,
    PART,
    PRODUCTS,
    ROW_PITCH,
    TILE,
    TILES,
    WARPS,
    add_products,
    leave_products,
    multiply_tiles,
    result_cell,
)
from burt_numba.device.vector import (
    element_at,
    load_vector,
    prefetch_line,
    store_vector,
    unpack_vectors,
)
from burt_numba.device.warp import FULL_MASK, any_lane, sync_warp, warp_sum
from burt_numba.target import GATE_COLUMNS, GATE_SAMPLES, GATE_THREADS

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOADS = 8
"""Vectors of W_f in flight for a lane, with one sample."""
_block_max = row_reductions(GATE_THREADS).maximum
_store_four = store_vector(4)


@cache
def gate_kernel(vector: int):
    """The kernel for the gate of one sample: a warp a row of W_f, loads of ``vector`` elements.

    Its first block makes the vectors that the search for sigma starts from.
    """
    load = load_vector(vector)
    unpack = unpack_vectors(vector, _LOADS)
    unpack_one = unpack_vectors(vector, 1)
    cells = _LOADS * vector
    stride = 32 * vector

    @cuda.jit(device=True)
    def row_product(weights, offset, weight_stride, operand, width, buffers):
        """A lane's part of the product of a row of W_f with [h; x]."""
        hidden, hidden_origin, hidden_stride, inputs, inputs_origin, inputs_stride, columns = operand
        words, values, few_words, few = buffers
        total = _ZERO
        first = np.int32(cuda.laneid * vector)
        while first < width:
            for part in range(_LOADS):
                column = np.int32(first + part * stride)
                if column < width:
                    load(weights, offset + (column if vector > 1 else column * weight_stride), words, part * vector)
                else:
                    for element in range(vector):
                        words[part * vector + element] = np.uint32(0)
            unpack(weights, words, values)
            for part in range(_LOADS):
                column = np.int32(first + part * stride)
                if column < width:
                    # A vector is in one of the two.
                    is_hidden = column < columns
                    place = column if is_hidden else np.int32(column - columns)
                    if vector == 1:
                        place *= hidden_stride if is_hidden else inputs_stride
                    source = hidden if is_hidden else inputs
                    load(source, (hidden_origin if is_hidden else inputs_origin) + place, few_words, 0)
                    unpack_one(hidden, few_words, few)
                    for element in range(vector):
                        total += values[part * vector + element] * few[element]
            first = opaque(np.int32(first + _LOADS * stride))
        return total

    @cuda.jit(device=True)
    def careful_product(weights, offset, weight_stride, source, origin, source_stride, count):
        """The same, element by element, what is not finite counted as 0."""
        total = _ZERO
        for column in range(cuda.laneid, count, 32):
            weight = finite_or_zero(weights[offset + column * weight_stride])
            total += weight * finite_or_zero(source[origin + column * source_stride])
        return total

    @cuda.jit
    def cifg_gate_kernel(
        hidden,
        hidden_origin,
        hidden_stride,
        inputs,
        inputs_origin,
        inputs_stride,
        weights,
        weights_origin,
        weights_stride0,
        weights_stride1,
        bias,
        bias_origin,
        bias_stride,
        columns,
        width,
        activations,
        forget_gate_out,
        power_vector,
        starts,
        errors,
    ):
        let_next_begin()
        hidden = array_at(hidden)
        inputs = array_at(inputs)
        weights = array_at(weights)
        bias = array_at(bias)
        activations = array_at(activations)
        forget_gate_out = array_at(forget_gate_out)
        power_vector = array_at(power_vector)
        starts = array_at(starts)
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        if cuda.blockIdx.x == 0:
            hidden_place = (hidden_origin, np.int64(0), hidden_stride)
            write_start(0, columns, power_vector, hidden, hidden_place, False, starts, scratch, errors)
        else:
            words = cuda.local.array(cells, np.uint32)
            values = cuda.local.array(cells, np.float32)
            few_words = cuda.local.array(vector, np.uint32)
            few = cuda.local.array(vector, np.float32)
            buffers = (words, values, few_words, few)
            row = np.int64(cuda.blockIdx.x - 1) * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
            rest = width - columns
            if row < columns:
                offset = weights_origin + row * weights_stride0
                second = offset + np.int64(columns) * weights_stride1
                # On its way with the rest.
                own = element_at(bias, bias_origin + row * bias_stride)
                operand = (hidden, hidden_origin, hidden_stride, inputs, inputs_origin, inputs_stride, columns)
                total = row_product(weights, offset, weights_stride1, operand, width, buffers)
                if any_lane(not_finite(total), FULL_MASK):
                    total = careful_product(
                        weights, offset, weights_stride1, hidden, hidden_origin, hidden_stride, columns
                    ) + careful_product(weights, second, weights_stride1, inputs, inputs_origin, inputs_stride, rest)
                    lane = np.int64(cuda.laneid)
                    report_not_finite(
                        weights, offset, weights_stride1, lane, 1, np.int64(width), np.int64(32), row * width, errors,
                        32, FULL_MASK,
                    )  # fmt: skip
                    if row == 0:
                        report_not_finite(
                            inputs, inputs_origin, inputs_stride, lane, 1, np.int64(rest), np.int64(32), np.int64(0),
                            errors, 32, FULL_MASK,
                        )  # fmt: skip
                total = warp_sum(total, 32, FULL_MASK)
                if cuda.laneid == 0:
                    total = with_bias(total, own, row, True, row, True, errors)
                    activations[row] = total
                    if forget_gate_out.size > 0:
                        forget_gate_out[row] = sigmoid_pair(total)[0]

    return cifg_gate_kernel


@cache
def gates_kernel(vector: int, is_shared: bool):
    """The kernel for loads of ``vector`` elements; ``is_shared``: the samples have one memory.

    The last blocks, one for each memory, make the vectors that the search for sigma starts from. Of the others, block
    (x, y, part) has samples 32 x .. 32 x + 31 and columns 32 y .. 32 y + 31 of the gates, and every ``split``-th
    stretch of 16 along [h; x] from its warps on:

    A warp stages its stretches in shared memory, the next one on its way while it multiplies. The parts of
    a block's warps, then those of the ``split`` blocks of a tile, are added in their order; the last block to finish
    does that. What is not finite shows in the totals, which are then made again with care.
    """
    load, store = load_vector(vector), store_vector(vector)
    unpack = unpack_vectors(vector, LANE_CELLS // vector)
    parts = LANE_CELLS // vector
    rows_a_part = 32 * vector // DEPTH

    @cuda.jit(device=True)
    def tile_of(block, split, columns):
        """(tile, its first sample, its first column) of a block."""
        tile = whole_quotient(block, split)
        tiles_down = np.int32((columns + GATE_COLUMNS - 1) >> 5)
        tile_x = whole_quotient(tile, tiles_down)
        return tile, np.int32(tile_x * GATE_SAMPLES), np.int32((tile - tile_x * tiles_down) * GATE_COLUMNS)

    @cuda.jit(device=True)
    def load_stretch(first, first_place, first_columns, second, second_place, width, row, rows, start, words):
        """A lane's cells of 16 columns of 32 rows: of ``first`` up to its columns, then of ``second``; 0 elsewhere."""
        origin, stride0, stride1 = first_place
        second_origin, second_stride0, second_stride1 = second_place
        # All of a lane's cells are in one column of its rows, and one of the two.
        place = np.int32(start + (cuda.laneid * vector & 15))
        is_first = place < first_columns
        step = place if is_first else place - first_columns
        if vector == 1:
            step *= stride1 if is_first else second_stride1
        source = first if is_first else second
        row_stride = stride0 if is_first else second_stride0
        offset = (origin if is_first else second_origin) + step + row * row_stride
        for part in range(parts):
            if row + part * rows_a_part < rows and place < width:
                load(source, offset + part * rows_a_part * row_stride, words, part * vector)
            else:
                for element in range(vector):
                    words[part * vector + element] = np.uint32(0)

    @cuda.jit(device=True)
    def stage(values, tiles, cell):
        """A lane's cells to the tile of its warp."""
        for part in range(parts):
            store(tiles, cell + part * rows_a_part * ROW_PITCH, values, part * vector)

    @cuda.jit(device=True)
    def careful_total(
        hidden, hidden_place, inputs, inputs_place, weights, weights_place, sample, column, columns, width
    ):
        """A gate's product, element by element, what is not finite counted as 0."""
        total = _ZERO
        hidden_start = hidden_place[0] + sample * hidden_place[1]
        inputs_start = inputs_place[0] + sample * inputs_place[1]
        weights_start = weights_place[0] + column * weights_place[1]
        for place in range(width):
            if place < columns:
                element = hidden[hidden_start + place * hidden_place[2]]
            else:
                element = inputs[inputs_start + (place - columns) * inputs_place[2]]
            total += finite_or_zero(weights[weights_start + place * weights_place[2]]) * finite_or_zero(element)
        return total

    @cuda.jit(device=True)
    def report_tile(
        hidden, hidden_place, inputs, inputs_place, weights, weights_place, first_sample, samples, first_column,
        columns, width, errors,
    ):  # fmt: skip
        """A block reports what is not finite in what it has read; each array is reported by the first blocks to."""
        warp = np.int32(cuda.threadIdx.x >> 5)
        lane = np.int64(cuda.laneid)
        if first_sample == 0:
            for column in range(first_column + warp, min(first_column + GATE_COLUMNS, columns), WARPS):
                row = np.int64(column)
                report_not_finite(
                    weights, weights_place[0] + row * weights_place[1], weights_place[2], lane, 1, np.int64(width),
                    np.int64(32), row * width, errors, 32, FULL_MASK,
                )  # fmt: skip
        if first_column == 0:
            for sample in range(first_sample + warp, min(first_sample + GATE_SAMPLES, samples), WARPS):
                row = np.int64(sample)
                rest = np.int64(width - columns)
                report_not_finite(
                    inputs, inputs_place[0] + row * inputs_place[1], inputs_place[2], lane, 1, rest, np.int64(32),
                    row * rest, errors, 32, FULL_MASK,
                )  # fmt: skip
                if is_shared:
                    report_not_finite(
                        hidden, hidden_place[0] + row * hidden_place[1], hidden_place[2], lane, 1, np.int64(columns),
                        np.int64(32), row * columns, errors, 32, FULL_MASK,
                    )  # fmt: skip

    @cuda.jit
    def cifg_gates_kernel(
        hidden,
        hidden_origin,
        hidden_stride0,
        hidden_stride1,
        inputs,
        inputs_origin,
        inputs_stride0,
        inputs_stride1,
        weights,
        weights_origin,
        weights_stride0,
        weights_stride1,
        bias,
        bias_origin,
        bias_stride,
        samples,
        columns,
        width,
        split,
        activations,
        forget_gate_out,
        power_vector,
        starts,
        tile_parts,
        counters,
        errors,
    ):
        let_next_begin()
        hidden = array_at(hidden)
        inputs = array_at(inputs)
        weights = array_at(weights)
        bias = array_at(bias)
        activations = array_at(activations)
        forget_gate_out = array_at(forget_gate_out)
        power_vector = array_at(power_vector)
        starts = array_at(starts)
        tile_parts = array_at(tile_parts)
        counters = array_at(counters)
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        tiles = cuda.shared.array(TILES, np.float32, 16)
        biases = cuda.shared.array(GATE_COLUMNS, np.float32)
        shared_flag = cuda.shared.array(1, np.int32)
        sample_words = cuda.local.array(LANE_CELLS, np.uint32)
        weight_words = cuda.local.array(LANE_CELLS, np.uint32)
        values = cuda.local.array(LANE_CELLS, np.float32)
        sums = cuda.local.array(PRODUCTS, np.float32)
        totals = cuda.local.array(4, np.float32)
        first_values = cuda.local.array(8, np.float32)
        first_rest = cuda.local.array(8, np.float32)
        second_values = cuda.local.array(2, np.float32)
        second_rest = cuda.local.array(2, np.float32)
        step_sums = cuda.local.array(4, np.float32)
        product_buffers = (first_values, first_rest, second_values, second_rest, step_sums, sums)
        hidden_place = (hidden_origin, hidden_stride0, hidden_stride1)
        inputs_place = (inputs_origin, inputs_stride0, inputs_stride1)
        weights_place = (weights_origin, weights_stride0, weights_stride1)
        matrices = np.int32(1 if is_shared else samples)
        block = np.int32(cuda.blockIdx.x)
        tile_blocks = np.int32(cuda.gridDim.x - matrices)
        if block >= tile_blocks:
            matrix = np.int32(block - tile_blocks)
            write_start(matrix, columns, power_vector, hidden, hidden_place, is_shared, starts, scratch, errors)
        else:
            thread = np.int32(cuda.threadIdx.x)
            warp = np.int32(thread >> 5)
            tile, first_sample, first_column = tile_of(block, split, columns)
            part = np.int32(block - tile * split)
            sample_tile = np.int32(warp * 2 * TILE)
            weight_tile = np.int32(sample_tile + TILE)
            own_row = np.int32(cuda.laneid * vector >> 4)
            if vector > 1:
                # Lanes that store together have rows 4 apart, which lie in different banks.
                own_row = np.int32((own_row & 1) * 4 + (own_row >> 1))
            cell = np.int32(own_row * ROW_PITCH + (cuda.laneid * vector & 15))
            sample_row = np.int32(first_sample + own_row)
            weight_row = np.int32(first_column + own_row)
            step = np.int32(split * WARPS * DEPTH)
            for product in range(PRODUCTS):
                sums[product] = _ZERO
            start = np.int32((part * WARPS + warp) * DEPTH)
            following = np.int32(start + step)
            if following < width and first_column + cuda.laneid < columns:
                # W_f may be far away, and as a rule is read once.
                row = np.int64(first_column + cuda.laneid)
                prefetch_line(weights, weights_origin + row * weights_stride0 + following * weights_stride1)
            load_stretch(
                hidden, hidden_place, columns, inputs, inputs_place, width, sample_row, samples, start, sample_words
            )
            load_stretch(
                weights, weights_place, width, weights, weights_place, width, weight_row, columns, start, weight_words
            )
            column = np.int32(first_column + thread)
            if thread < GATE_COLUMNS:
                biases[thread] = _ZERO if column >= columns else element_at(bias, bias_origin + column * bias_stride)
            while start < width:
                sync_warp()  # the stretch before has been used
                unpack(hidden, sample_words, values)
                stage(values, tiles, sample_tile + cell)
                unpack(weights, weight_words, values)
                stage(values, tiles, weight_tile + cell)
                left = np.int32(width - start)
                start = np.int32(start + step)
                load_stretch(
                    hidden, hidden_place, columns, inputs, inputs_place, width, sample_row, samples, start, sample_words
                )
                load_stretch(
                    weights,
                    weights_place,
                    width,
                    weights,
                    weights_place,
                    width,
                    weight_row,
                    columns,
                    start,
                    weight_words,
                )
                sync_warp()  # the stretch is staged
                multiply_tiles(tiles, sample_tile, weight_tile, ROW_PITCH, 1, left, product_buffers)
            # Once more, rather than kept in registers all along.
            block = opaque(block)
            leave_products(tiles, warp, sums)
            tile, first_sample, first_column = tile_of(block, split, columns)
            own = np.int32(4 * thread)
            add_products(tiles, sample_words, values, totals)
            if split > 1:
                _store_four(tile_parts, np.int64(block) * PART + own, totals, 0)
            if split == 1 or last_arrival(counters, np.int64(tile), split, shared_flag):
                if split > 1:
                    for element in range(4):
                        totals[element] = _ZERO
                    left = split
                    parts_start = np.int64(tile) * split * PART + own
                    while left > 0:
                        load_parts(tile_parts, parts_start, PART, left, sample_words)
                        load_parts(tile_parts, parts_start + 4 * PART, PART, left - 4, weight_words)
                        add_parts(tile_parts, sample_words, values, totals)
                        add_parts(tile_parts, weight_words, values, totals)
                        left = opaque(np.int32(left - 8))
                        parts_start += 8 * PART
                own_cell = result_cell(thread)
                _store_four(tiles, own_cell, totals, 0)
                bad = _ZERO
                for element in range(rolled(4, errors)):
                    place = own + element
                    sample = np.int64(first_sample + (place >> 5))
                    column = np.int64(first_column + (place & 31))
                    total = element_at(tiles, own_cell + element)
                    if sample < samples and column < columns:
                        if not_finite(total):
                            bad = _ONE
                            total = careful_total(
                                hidden, hidden_place, inputs, inputs_place, weights, weights_place, sample, column,
                                columns, width,
                            )  # fmt: skip
                        flat = sample * columns + column
                        total = with_bias(total, biases[place & 31], column, sample == 0, flat, True, errors)
                        activations[flat] = total
                        if forget_gate_out.size > 0:
                            forget_gate_out[flat] = sigmoid_pair(total)[0]
                if _block_max(bad, scratch, scratch, 0) > _ZERO:
                    report_tile(
                        hidden, hidden_place, inputs, inputs_place, weights, weights_place, first_sample, samples,
                        first_column, columns, width, errors,
                    )  # fmt: skip

    return cifg_gates_kernel
