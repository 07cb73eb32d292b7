"""The kernel that updates the rows of matrix memories, with the first products of the new rows and what they settle.

    C' = f C + (1 - f) h hᵀ  (f a number a row),    y_v = C' v,  y_w = C' w,  z = C'ᵀ y_v

    matrix m (3 blocks, 10 rows)        row of a block (2 warps a row)        area of a block (floats)
    rows 0 .. 3   block 3m              warp 0 | columns   0 .. 511           v | w | h | z of the rows in work
    rows 4 .. 7   block 3m + 1          warp 1 | columns 512 .. 1023          (the tile)
    rows 8 .. 9   block 3m + 2

C is read and written once. The last block of a matrix to finish adds up what all of them have left, and looks whether
the memory is within its bound; where that is not settled, the kernel of kernels/cifg_spectrum.py takes it from here.
docs/cifg.md has the derivation.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.cifg_launches import (
    CELLS,
    CELLS_SHIFT,
    START_CELLS,
)
from burt_numba.device.arguments import array_at
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.coherence import last_arrival
from burt_numba.device.events import INF_INPUT, record_event, rolled
from burt_numba.device.first_step import settle_matrix
from burt_numba.device.launch_order import let_next_begin, wait_for_previous
from burt_numba.device.matrix_rows import (
    BLOCK_CELLS,
    ROW_SCRATCH,
    ROWS_AHEAD,
    block_cells,
    lane_columns,
    matrix_rows,
    row_sum,
    row_sums,
    start_sweep,
)
from burt_numba.device.numeric import maximum, opaque, sigmoid_pair, whole_quotient
from burt_numba.device.parts import add_parts, load_parts
from burt_numba.device.rows import not_finite, report_not_finite
from burt_numba.device.start_vectors import SQUARES_H, WARM
from burt_numba.device.vector import element_at, load_vector, prefetch_line, set_element, store_vector, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane, shuffle_xor

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
load_four, store_four = load_vector(4), store_vector(4)
unpack_three = unpack_vectors(4, 3)


@cache
def update_kernel(is_shared: bool, vector: int, staged: bool):
    """The kernel for a memory for each sample or one for all, and loads of ``vector`` elements.

    ``gates`` are those of a sample before the sigmoid, or the mean gates of a shared memory, whose mean ``writes`` are
    there as well.
    ``staged``: the area of a block is in dynamic shared memory, and a lane's part of a row in its registers. Else the
    area is in the workspace, a row takes all warps of a block, and is read once more from memory for z.
    """
    lanes_columns = lane_columns(staged)
    parts = lanes_columns // vector
    warp_columns = 32 * lanes_columns
    stride = 32 * vector
    load, unpack, area_vector, store, flush, add_long, fetch = matrix_rows(vector, staged)

    @cuda.jit(device=True)
    def report_row(source, offset, row, columns, first, flags, errors):
        """A warp reports what is not finite in its part of an old row, marks row and columns, and says if there was."""
        row, first, columns = opaque(row), opaque(first), opaque(columns)
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
        source, output, row_place, columns, pitch, first, writes, gate, area, flags, values, few_words, few, errors,
    ):  # fmt: skip
        """Update a lane's part of a row, in ``values``, from column ``first`` on.

        Returns (y_v, y_w, C'², written², something was lost).
        """
        row, offset, left = row_place
        forget, write = gate
        y_v, y_w, squares, written, lost = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        for part in range(parts):
            if part * stride < left:
                if is_shared:
                    area_vector(writes, np.int64(row) * columns + first + part * stride, few_words, few)
                else:
                    area_vector(area, 2 * pitch + first + part * stride, few_words, few)
                for element in range(vector):
                    term = few[element]
                    if is_shared:
                        written += term * term
                    else:
                        term *= write
                    term += forget * values[part * vector + element]
                    values[part * vector + element] = term
                    squares += term * term
        if any_lane(not_finite(squares), FULL_MASK):
            row, first = opaque(row), opaque(first)
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
                        if overflows == 0:
                            overflow = offset + first + part * stride + element
                        overflows += np.int32(1)
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
        return y_v, y_w, squares, written, lost

    @cuda.jit(device=True)
    def update_rows(
        source, output, shape, place, area, writes, gates, work, flags, scratch, buffers, gate, errors
    ):  # fmt: skip
        """Update the rows of a block, with the products of the new rows; z goes to the workspace.

        The first row has been loaded, and its ``gate``. Returns, in the leaders of rows, sums of y_v y_v, y_v y_w,
        y_w y_w, C'², ((1 - f) h)², rows with something not finite, and the maximum of f.
        """
        matrix, columns, pitch, first_row, end_row, tile_rows, warps_a_row = shape
        matrix_offset, tile, own_part = place
        words, values, few_words, few, z = buffers
        own, start, span, _leads = start_sweep(warps_a_row, vector, warp_columns)
        vv, vw, ww, squares, written, lost = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        most_kept, squares_lost, written_lost = _ZERO, _ZERO, _ZERO
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
        fetch(source, offset, row, end_row, columns, tile_rows, start, 2, ROWS_AHEAD)
        for _tile_row in range(first_row, end_row, tile_rows):
            works = row < end_row
            following = np.int32(row + tile_rows)
            forget, write = _ZERO, _ZERO
            if is_shared:
                forget = gate
            elif works:
                forget, write = sigmoid_pair(gate)
                write *= element_at(area, 2 * pitch + row)
            y_v, y_w, row_squares, row_written = _ZERO, _ZERO, _ZERO, _ZERO
            row_offset = offset
            next_offset = offset + np.int64(tile_rows) * columns
            next_left = np.int32((columns if following < end_row else 0) - start)
            if staged:
                unpack(source, words, values)
                # The next row is on its way while this one is worked on.
                load(source, next_offset + start, 1, next_left, words)
                fetch(source, offset, row, end_row, columns, tile_rows, start, ROWS_AHEAD, ROWS_AHEAD + 1)
            if following < end_row:
                gate = element_at(gates, np.int64(matrix) * columns + following)
            if staged:
                y_v, y_w, row_squares, row_written, row_lost = update_part(
                    source, output, (row, offset, left), columns, pitch, start, writes, (forget, write), area, flags,
                    values, few_words, few, errors,
                )  # fmt: skip
                lost = maximum(lost, row_lost)
            else:
                lane_start = np.int32(cuda.laneid * vector)
                for base in range(start - lane_start, columns, span):
                    first = np.int32(base + lane_start)
                    part_left = np.int32((columns if works else 0) - first)
                    load(source, offset + first, 1, part_left, words)
                    unpack(source, words, values)
                    part_v, part_w, part_squares, part_written, row_lost = update_part(
                        source, output, (row, offset, part_left), columns, pitch, first, writes, (forget, write),
                        area, flags, values, few_words, few, errors,
                    )  # fmt: skip
                    y_v += part_v
                    y_w += part_w
                    row_squares += part_squares
                    row_written += part_written
                    lost = maximum(lost, row_lost)
            y_v, y_w, row_squares = row_sums(y_v, y_w, row_squares, scratch, 48 + 48 * parity, warps_a_row)
            parity ^= 1
            if is_shared:
                row_written = row_sum(row_written, scratch, 48 + 48 * parity, warps_a_row)
                parity ^= 1
            else:
                row_written = write * write
            if staged:
                for element in range(lanes_columns):
                    z[element] += y_v * values[element]
            else:
                add_long(output, row_offset, columns, area, tile, start, span, words, values, y_v, _ONE)
            if works:
                # Thousands of rows: what an addition loses is made up for at the next.
                addend = row_squares - squares_lost
                total = squares + addend
                squares_lost = (total - squares) - addend
                squares = total
                addend = row_written - written_lost
                total = written + addend
                written_lost = (total - written) - addend
                written = total
                most_kept = maximum(most_kept, forget)
                vv += y_v * y_v
                vw += y_v * y_w
                ww += y_w * y_w
            row, offset, left = following, next_offset, next_left
        flush(area, tile, pitch, columns, tile_rows, start, own, z, work, own_part)
        return vv, vw, ww, squares, written, lost, most_kept

    @cuda.jit(device=True)
    def together(
        z_parts, sums, first, step, blocks, group_shift, pitch, area, tile, cells, scratch, buffers
    ):  # fmt: skip
        """The parts of the blocks of a set, added up in a fixed order, take the place of those of the first.

        They lie ``step`` blocks apart. The sums are in the area and in the cells as well. Where four columns a thread
        leave threads over, 2 ** group_shift groups of threads take turns at the parts. 16 loads of a thread are on
        their way together: waiting for one after another would take longer than the rows.
        """
        words0, words1, words2, words3, values, totals = buffers
        thread = np.int32(cuda.threadIdx.x)
        threads = np.int32(cuda.blockDim.x)
        # Lane l has cell l % 8 of a block: six sums and two maxima.
        cell = np.int32(thread & (CELLS - 1))
        part = np.int32(thread >> CELLS_SHIFT)
        value = _ZERO
        while part < blocks:
            other = element_at(sums, (np.int64(first) + part * step) * CELLS + cell)
            value = value + other if cell < 6 else maximum(value, other)
            part = opaque(np.int32(part + (threads >> CELLS_SHIFT)))
        for distance in (CELLS, 2 * CELLS):
            other = shuffle_xor(value, distance, FULL_MASK)
            value = value + other if cell < 6 else maximum(value, other)
        if cuda.laneid < CELLS:
            set_element(scratch, (thread >> 5) * CELLS + cell, value)
        groups = np.int32(1 << group_shift)
        group_threads = np.int32(threads >> group_shift)
        group = whole_quotient(thread, group_threads)
        apart = np.int64(step << group_shift) * pitch
        place = np.int32(4 * (thread - group * group_threads))
        while place < pitch:
            for element in range(4):
                totals[element] = _ZERO
            left = np.int32((blocks - group + groups - 1) >> group_shift)
            start = (np.int64(first) + group * step) * pitch + place
            while left > 0:
                load_parts(z_parts, start, apart, left, words0)
                load_parts(z_parts, start + 4 * apart, apart, left - 4, words1)
                load_parts(z_parts, start + 8 * apart, apart, left - 8, words2)
                load_parts(z_parts, start + 12 * apart, apart, left - 12, words3)
                add_parts(z_parts, words0, values, totals)
                add_parts(z_parts, words1, values, totals)
                add_parts(z_parts, words2, values, totals)
                add_parts(z_parts, words3, values, totals)
                left = opaque(np.int32(left - 16))
                start += 16 * apart
            store_four(area, tile + group * pitch + place, totals, 0)
            if group_shift == 0:
                store_four(z_parts, np.int64(first) * pitch + place, totals, 0)
            place = opaque(np.int32(place + 4 * group_threads))
        cuda.syncthreads()  # the cells of all warps are in scratch, the sums of all groups in the area
        if group_shift > 0:
            column = thread
            while column < pitch:
                total = element_at(area, tile + column)
                for other in range(1, groups):
                    total += element_at(area, tile + other * pitch + column)
                set_element(area, tile + column, total)
                set_element(z_parts, np.int64(first) * pitch + column, total)
                column = opaque(np.int32(column + threads))
        if thread < CELLS:
            total = _ZERO
            for warp in range(threads >> 5):
                value = element_at(scratch, warp * CELLS + thread)
                total = total + value if thread < 6 else maximum(total, value)
            set_element(sums, np.int64(first) * CELLS + thread, total)
            cells[thread] = total

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
        set_shift,
        group_shift,
        writes,
        gates,
        starts,
        power_vector,
        sigma_bound,
        sigma_out,
        z_parts,
        sums,
        totals,
        areas,
        flags,
        counters,
        spectral_bound,
        errors,
    ):
        let_next_begin()
        memory = array_at(memory)
        output = array_at(output)
        writes = array_at(writes)
        gates = array_at(gates)
        starts = array_at(starts)
        power_vector = array_at(power_vector)
        sigma_bound = array_at(sigma_bound)
        sigma_out = array_at(sigma_out)
        z_parts = array_at(z_parts)
        sums = array_at(sums)
        totals = array_at(totals)
        areas = array_at(areas)
        flags = array_at(flags)
        counters = array_at(counters)
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        row_scratch = cuda.shared.array(ROW_SCRATCH, np.float32)
        cells = cuda.shared.array(BLOCK_CELLS, np.float32)
        shared_flag = cuda.shared.array(1, np.int32)
        words = cuda.local.array(lanes_columns, np.uint32)
        values = cuda.local.array(lanes_columns, np.float32)
        few_words = cuda.local.array(vector, np.uint32)
        few = cuda.local.array(vector, np.float32)
        z = cuda.local.array(lanes_columns, np.float32)
        part_words0 = cuda.local.array(16, np.uint32)
        part_words1 = cuda.local.array(16, np.uint32)
        part_words2 = cuda.local.array(16, np.uint32)
        part_words3 = cuda.local.array(16, np.uint32)
        part_values = cuda.local.array(16, np.float32)
        totals_of_parts = cuda.local.array(4, np.float32)
        start_words = cuda.local.array(12, np.uint32)
        start_values = cuda.local.array(12, np.float32)
        area = cuda.shared.array(0, np.float32, 16)
        if not staged:
            area_start = np.int64(cuda.blockIdx.x) * area_floats
            area = areas[area_start : area_start + area_floats]
        thread = np.int32(cuda.threadIdx.x)
        matrix = whole_quotient(np.int32(cuda.blockIdx.x), blocks)
        rank = np.int32(cuda.blockIdx.x - matrix * blocks)
        first_row = np.int32(min(rank * block_rows, columns))
        end_row = np.int32(min(first_row + block_rows, columns))
        matrix_offset = np.int64(matrix) * columns * columns
        own, start, _span, leads = start_sweep(warps_a_row, vector, warp_columns)
        # The first row is on its way while the vectors are copied.
        row = np.int32(first_row + own)
        gate = _ZERO
        if staged:
            left = np.int32((columns if row < end_row else 0) - start)
            load(memory, matrix_offset + np.int64(row) * columns + start, 1, left, words)
        start_floats = np.int32(3 * pitch)
        start_place = np.int64(matrix) * (start_floats + START_CELLS)
        # The other arguments are read while the launch before is at work.
        prefetch_line(gates, np.int64(matrix) * columns + min(row, columns - 1))
        prefetch_line(sums, np.int64(cuda.blockIdx.x) * CELLS)
        wait_for_previous()  # gates and start vectors are complete
        if row < end_row:
            gate = element_at(gates, np.int64(matrix) * columns + row)
        place = np.int32(4 * thread)
        while place < pitch:
            for vectors in range(3):
                load_four(starts, start_place + vectors * pitch + place, start_words, vectors * 4)
            unpack_three(starts, start_words, start_values)
            for vectors in range(3):
                store_four(area, vectors * pitch + place, start_values, vectors * 4)
            place = np.int32(place + 4 * cuda.blockDim.x)
        cuda.syncthreads()  # the vectors are in the area
        shape = (matrix, columns, pitch, first_row, end_row, tile_rows, warps_a_row)
        place = (matrix_offset, tile, np.int64(cuda.blockIdx.x) * pitch)
        matrix_flags = flags[np.int64(matrix) * 2 * columns : (np.int64(matrix) + 1) * 2 * columns]
        vv, vw, ww, squares, written, lost, most_kept = update_rows(
            memory, output, shape, place, area, writes, gates, z_parts, matrix_flags, row_scratch,
            (words, values, few_words, few, z), gate, errors,
        )  # fmt: skip
        cell = block_cells(cells, vv, vw, ww, squares, written, lost, most_kept, _ZERO, leads)
        if thread < CELLS:
            set_element(sums, np.int64(cuda.blockIdx.x) * CELLS + thread, cell)
        # The last block to finish adds up for its set, and the last of those for theirs, until one has the matrix.
        first_block = np.int32(matrix * blocks)
        set_size = np.int32(1 << set_shift)
        counter = np.int32(matrix * 2 * ((blocks + set_size - 1) >> set_shift))
        own_part, count, step = rank, blocks, np.int32(1)
        is_last = blocks == 1
        goes_on = not is_last
        if is_last and thread < CELLS:
            cells[thread] = cell
        while goes_on:
            own_set = np.int32(own_part >> set_shift)
            members = np.int32(min(set_size, count - (own_set << set_shift)))
            goes_on = last_arrival(counters, np.int64(counter + own_set), members, shared_flag)
            if goes_on:
                first = np.int32(first_block + (own_set << set_shift) * step)
                together(
                    z_parts, sums, first, step, members, group_shift, pitch, area, tile, cells, row_scratch,
                    (part_words0, part_words1, part_words2, part_words3, part_values, totals_of_parts),
                )  # fmt: skip
                is_last = count <= set_size
                goes_on = not is_last
                own_part = own_set
                count = np.int32((count + set_size - 1) >> set_shift)
                counter = np.int32(counter + count)
                step = np.int32(step << set_shift)
        if is_last:
            warm = element_at(starts, start_place + start_floats + WARM) > _ZERO
            squares_h = element_at(starts, start_place + start_floats + SQUARES_H)
            cuda.syncthreads()  # the sums of the matrix are in the cells
            settle_matrix(
                matrix, columns, pitch, tile, area, cells, power_vector, sigma_bound, sigma_out, totals,
                spectral_bound, warm, _ONE if is_shared else math.sqrt(squares_h), scratch,
            )  # fmt: skip

    return cifg_update_rows_kernel
