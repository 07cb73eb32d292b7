"""The kernel that updates the rows of matrix memories, with the first products of the new rows.

    C' = f C + (1 - f) h hᵀ  (f a number a row),    y_v = C' v,  y_w = C' w,  z = C'ᵀ y_v

    matrix m (3 blocks, 10 rows)        row of a block (2 warps a row)        area of a block (floats)
    rows 0 .. 3   block 3m              warp 0 | columns   0 .. 511           v | w | h | z of the rows in work
    rows 4 .. 7   block 3m + 1          warp 1 | columns 512 .. 1023          (the tile)
    rows 8 .. 9   block 3m + 2

C is read and written once. The kernel of kernels/cifg_spectrum.py takes it from here. docs/cifg.md has the derivation.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.cifg_launches import (
    CELLS,
    SHARED_SAMPLES,
    TILE_ROWS,
)
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.events import INF_INPUT, record_event, rolled
from burt_numba.device.matrix_rows import (
    BLOCK_CELLS,
    ROW_SCRATCH,
    block_cells,
    lane_columns,
    matrix_rows,
    row_sums,
    start_sweep,
)
from burt_numba.device.numeric import maximum, sigmoid_pair
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.start_vectors import stage_vectors
from burt_numba.device.vector import load_vector, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
load_four, unpack_tile = load_vector(4), unpack_vectors(4, TILE_ROWS // 4)


@cache
def update_kernel(is_shared: bool, vector: int, staged: bool):
    """The kernel for a memory for each sample or one for all, and loads of ``vector`` elements.

    ``staged``: the area of a block is in dynamic shared memory, and a lane's part of a row in its registers. Else the
    area is in the workspace, a row takes all warps of a block, and is read once more from memory for z.
    """
    lanes_columns = lane_columns(staged)
    parts = lanes_columns // vector
    warp_columns = 32 * lanes_columns
    stride = 32 * vector
    batch_cells = 2 * SHARED_SAMPLES * TILE_ROWS if is_shared else 4
    load, unpack, area_vector, store, flush, add_long = matrix_rows(vector, staged)

    @cuda.jit(device=True)
    def written_by_batch(hidden, place, activations, samples, columns, tile_row, tile_rows, area, tile, pitch, batch):
        """Shared memory: the tile becomes the mean of (1 - f) h hᵀ for its rows; ``batch`` keeps their mean gates."""
        origin, stride0, stride1 = place
        sums = cuda.local.array(TILE_ROWS, np.float32)
        weight_words = cuda.local.array(TILE_ROWS, np.uint32)
        weights = cuda.local.array(TILE_ROWS, np.float32)
        thread = cuda.threadIdx.x
        share = _ONE / np.float32(samples)
        gate_sum = _ZERO
        for column_start in range(0, columns, cuda.blockDim.x):
            column = column_start + thread
            for row in range(TILE_ROWS):
                sums[row] = _ZERO
            for first in range(0, samples, SHARED_SAMPLES):
                count = min(SHARED_SAMPLES, samples - first)
                cuda.syncthreads()  # the samples before have been used
                for cell in range(thread, SHARED_SAMPLES * TILE_ROWS, cuda.blockDim.x):
                    sample = first + cell // TILE_ROWS
                    row = tile_row + cell % TILE_ROWS
                    forget, weight = _ZERO, _ZERO
                    if sample < samples and cell % TILE_ROWS < tile_rows and row < columns:
                        activation = activations[np.int64(sample) * columns + row]
                        forget, kept = sigmoid_pair(activation)
                        element = hidden[origin + np.int64(sample) * stride0 + np.int64(row) * stride1]
                        weight = kept * finite_or_zero(element) * share
                    batch[cell] = weight
                    batch[SHARED_SAMPLES * TILE_ROWS + cell] = forget
                cuda.syncthreads()  # weights and gates of these samples are in place
                if column_start == 0 and thread < TILE_ROWS:
                    for sample in range(count):
                        gate_sum += batch[SHARED_SAMPLES * TILE_ROWS + sample * TILE_ROWS + thread]
                if column < columns:
                    for sample in range(count):
                        offset = origin + np.int64(first + sample) * stride0
                        element = finite_or_zero(hidden[offset + np.int64(column) * stride1])
                        for half in range(2):
                            load_four(batch, sample * TILE_ROWS + half * 4, weight_words, half * 4)
                        unpack_tile(batch, weight_words, weights)
                        for row in range(TILE_ROWS):
                            sums[row] += weights[row] * element
            if column < columns:
                for row in range(TILE_ROWS):
                    if row < tile_rows:
                        area[tile + row * pitch + column] = sums[row]
        cuda.syncthreads()  # the samples' cells are free
        if thread < TILE_ROWS:
            batch[thread] = gate_sum * share
        cuda.syncthreads()  # tile and mean gates are complete

    @cuda.jit(device=True)
    def report_row(source, offset, row, columns, first, flags, errors):
        """A warp reports what is not finite in its part of an old row, marks row and columns, and says if there was."""
        last = np.int32(min(first - cuda.laneid * vector + warp_columns, columns))
        bad = False
        for column in range(first, last, stride):
            for element in range(column, column + rolled(vector, errors)):
                if not_finite(source[offset + element]):
                    bad = True
                    cuda.atomic.max(flags, row, 1)
                    cuda.atomic.max(flags, columns + element, 1)
        bad = any_lane(bad, FULL_MASK)
        if bad:
            report_not_finite(
                source, offset, np.int64(1), np.int64(first), vector, np.int64(last), np.int64(stride), offset, errors,
                32, FULL_MASK,
            )  # fmt: skip
        return bad

    @cuda.jit(device=True)
    def update_part(
        source, output, row_place, columns, pitch, first, written, gate, area, flags, words, values, few_words, few,
        errors,
    ):  # fmt: skip
        """Update a lane's part of a row, from column ``first`` on: (y_v, y_w, C'², written², something was lost)."""
        row, offset, left = row_place
        forget, write = gate
        y_v, y_w, squares, writes, lost = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        unpack(source, words, values)
        for part in range(parts):
            if part * stride < left:
                area_vector(area, written + first + part * stride, few_words, few)
                for element in range(vector):
                    term = few[element]
                    if is_shared:
                        writes += term * term
                    else:
                        term *= write
                    term += forget * values[part * vector + element]
                    values[part * vector + element] = term
                    squares += term * term
        if any_lane(not_finite(squares), FULL_MASK):
            # Something not finite in the old row or in the new one, or squares beyond float32.
            if report_row(source, offset, row, columns if left > 0 else np.int32(0), first, flags, errors):
                lost = _ONE
            squares = _ZERO
            overflows = np.int32(0)
            overflow = offset
            for part in range(parts):
                for element in range(vector):
                    value = values[part * vector + element]
                    if not_finite(value):
                        values[part * vector + element] = _ZERO
                        overflows += np.int32(1)
                        overflow = offset + first + part * stride + element
                    else:
                        squares += value * value
            if overflows > 0 and lost == _ZERO:
                record_event(errors, INF_INPUT, overflows, overflow)
        for part in range(parts):
            if part * stride < left:
                column = first + part * stride
                store(output, offset + column, values, part * vector)
                area_vector(area, column, few_words, few)
                for element in range(vector):
                    y_v += values[part * vector + element] * few[element]
                area_vector(area, pitch + column, few_words, few)
                for element in range(vector):
                    y_w += values[part * vector + element] * few[element]
        return y_v, y_w, squares, writes, lost

    @cuda.jit(device=True)
    def update_rows(
        source, output, shape, place, area, hidden, hidden_place, samples, activations, work, flags, scratch, batch,
        buffers, errors,
    ):  # fmt: skip
        """Update the rows of a block, with the products of the new rows; z goes to the workspace.

        Returns, in the leaders of rows, sums of y_v y_v, y_v y_w, y_w y_w, C'², ((1 - f) h)², rows with something not
        finite, and the maximum of f.
        """
        matrix, columns, pitch, first_row, end_row, tile_rows, warps_a_row = shape
        matrix_offset, tile, own_part = place
        words, values, few_words, few, z = buffers
        own, start, span, _leads = start_sweep(warps_a_row, vector, warp_columns)
        vv, vw, ww, squares, writes, lost = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        most_kept = _ZERO
        parity = 0
        for element in range(lanes_columns):
            z[element] = _ZERO
        if not staged:
            for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
                area[tile + column] = _ZERO
            cuda.syncthreads()  # z is zero
        row = np.int32(first_row + own)
        offset = matrix_offset + np.int64(row) * columns
        left = np.int32((columns if row < end_row else 0) - start)
        if staged:
            load(source, offset + start, 1, left, words)
        for tile_row in range(first_row, end_row, tile_rows):
            forget, write = _ZERO, _ZERO
            written = 2 * pitch
            if is_shared:
                written_by_batch(
                    hidden, hidden_place, activations, samples, columns, tile_row, tile_rows, area, tile, pitch, batch
                )
                forget = batch[own]
                written = tile + own * pitch
            elif row < end_row:
                forget, write = sigmoid_pair(activations[np.int64(matrix) * columns + row])
                write *= area[2 * pitch + row]
            y_v, y_w, row_squares, row_writes = _ZERO, _ZERO, _ZERO, _ZERO
            if staged:
                y_v, y_w, row_squares, row_writes, row_lost = update_part(
                    source, output, (row, offset, left), columns, pitch, start, written, (forget, write), area, flags,
                    words, values, few_words, few, errors,
                )  # fmt: skip
                lost = maximum(lost, row_lost)
            else:
                lane_start = np.int32(cuda.laneid * vector)
                for base in range(start - lane_start, columns, span):
                    first = np.int32(base + lane_start)
                    left = np.int32(columns - first)
                    load(source, offset + first, 1, left, words)
                    part_v, part_w, part_squares, part_writes, row_lost = update_part(
                        source, output, (row, offset, left), columns, pitch, first, written, (forget, write), area,
                        flags, words, values, few_words, few, errors,
                    )  # fmt: skip
                    y_v += part_v
                    y_w += part_w
                    row_squares += part_squares
                    row_writes += part_writes
                    lost = maximum(lost, row_lost)
            row_offset = offset
            works = row < end_row
            row = np.int32(row + tile_rows)
            offset += np.int64(tile_rows) * columns
            if staged:
                # The next row is on its way while the products of this one are added up.
                left = np.int32((columns if row < end_row else 0) - start)
                load(source, offset + start, 1, left, words)
            y_v, y_w, row_squares = row_sums(y_v, y_w, row_squares, scratch, 48 + 48 * parity, warps_a_row)
            parity ^= 1
            if is_shared:
                row_writes, _unused, _unused2 = row_sums(
                    row_writes, _ZERO, _ZERO, scratch, 48 + 48 * parity, warps_a_row
                )
                parity ^= 1
            else:
                row_writes = write * write
            if staged:
                for element in range(lanes_columns):
                    z[element] += y_v * values[element]
            else:
                add_long(output, row_offset, columns, area, tile, start, span, words, values, y_v, _ONE)
            if works:
                squares += row_squares
                writes += row_writes
                most_kept = maximum(most_kept, forget)
                vv += y_v * y_v
                vw += y_v * y_w
                ww += y_w * y_w
        flush(area, tile, pitch, columns, tile_rows, start, own, z, work, own_part)
        return vv, vw, ww, squares, writes, lost, most_kept

    @cuda.jit
    def cifg_update_rows_kernel(
        memory,
        output,
        columns,
        pitch,
        tile,
        blocks,
        block_rows,
        tile_rows,
        warps_a_row,
        area_floats,
        hidden,
        hidden_origin,
        hidden_stride0,
        hidden_stride1,
        samples,
        activations,
        power_vector,
        z_parts,
        sums,
        areas,
        flags,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        row_scratch = cuda.shared.array(ROW_SCRATCH, np.float32)
        cells = cuda.shared.array(BLOCK_CELLS, np.float32)
        batch = cuda.shared.array(batch_cells, np.float32)
        words = cuda.local.array(lanes_columns, np.uint32)
        values = cuda.local.array(lanes_columns, np.float32)
        few_words = cuda.local.array(vector, np.uint32)
        few = cuda.local.array(vector, np.float32)
        z = cuda.local.array(lanes_columns, np.float32)
        area = cuda.shared.array(0, np.float32, 16)
        if not staged:
            area_start = np.int64(cuda.blockIdx.x) * area_floats
            area = areas[area_start : area_start + area_floats]
        thread = np.int32(cuda.threadIdx.x)
        matrix = np.int32(cuda.blockIdx.x // blocks)
        rank = np.int32(cuda.blockIdx.x - matrix * blocks)
        first_row = np.int32(min(rank * block_rows, columns))
        end_row = np.int32(min(first_row + block_rows, columns))
        hidden_place = (hidden_origin, hidden_stride0, hidden_stride1)
        stage_vectors(
            matrix, columns, pitch, area, power_vector, hidden, hidden_place, is_shared, 1,
            not is_shared and rank == 0, scratch, errors,
        )  # fmt: skip
        shape = (matrix, columns, pitch, first_row, end_row, tile_rows, warps_a_row)
        place = (np.int64(matrix) * columns * columns, tile, np.int64(cuda.blockIdx.x) * pitch)
        matrix_flags = flags[np.int64(matrix) * 2 * columns : (np.int64(matrix) + 1) * 2 * columns]
        vv, vw, ww, squares, writes, lost, most_kept = update_rows(
            memory, output, shape, place, area, hidden, hidden_place, samples, activations, z_parts, matrix_flags,
            row_scratch, batch, (words, values, few_words, few, z), errors,
        )  # fmt: skip
        leads = start_sweep(warps_a_row, vector, warp_columns)[3]
        cell = block_cells(cells, vv, vw, ww, squares, writes, lost, most_kept, _ZERO, leads)
        if thread < CELLS:
            sums[np.int64(cuda.blockIdx.x) * CELLS + thread] = cell

    return cifg_update_rows_kernel
