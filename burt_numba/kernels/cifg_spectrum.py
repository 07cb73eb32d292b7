"""The kernel that keeps matrix memories within their spectral bound: certificates, the iteration, the projection.

A group of blocks has a matrix at a time, each block some of its rows and some of its columns. Where the update has
settled that sigma_max is within the bound, the group is done. Else it looks for a certificate, then sweeps over its
rows, in registers, as often as it takes, and in the end projects them. docs/cifg.md has the derivation.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.cifg_launches import CELLS, ROW_PRODUCTS, TOTALS, VECTORS
from burt_numba.device.arguments import array_at
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.cluster import cluster_barrier
from burt_numba.device.coherence import group_barrier
from burt_numba.device.events import INF_INPUT, SPECTRAL_OVERFLOW, record_event
from burt_numba.device.first_step import BEFORE, LOST, MOST_KEPT, PART_V, PART_W, SETTLED, SQUARES, WRITES
from burt_numba.device.launch_order import wait_for_previous
from burt_numba.device.matrix_rows import (
    BLOCK_CELLS,
    ROW_SCRATCH,
    ROWS_AHEAD,
    block_cells,
    group_column,
    group_maximum,
    group_sums,
    lane_columns,
    matrix_rows,
    row_sum,
    start_sweep,
)
from burt_numba.device.numeric import FLOAT32_MAX, maximum, minimum, opaque, sigmoid_pair, whole_quotient
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite
from burt_numba.device.spectrum import (
    CHECK_FACTOR,
    COLD_FACTOR,
    ROUNDING_UP,
    WARM_FACTOR,
    is_in_range,
    pseudo_random,
    top_pair,
    weyl_bound,
)
from burt_numba.device.start_vectors import stage_vectors
from burt_numba.device.vector import element_at, prefetch_line, set_element
from burt_numba.device.warp import FULL_MASK, warp_sum, warp_sum3

_V, _RESIDUAL, _P, _AV, _AP, _FIRST_V = range(VECTORS)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)

_MOST_REDUNDANT = 16_384
"""Cells of z, over the blocks of a group, that each block adds up for itself."""
_COLD_PART = np.float32(0.5)
_KNOWN, _CONVERGED = np.float32(1e-3), np.float32(1e-6)
"""Residuals, relative to sigma², at which sigma is known well enough, and at which the vectors are."""
_POOR = np.float32(2e-2)
"""A residual beyond which v is too poor to cut along, and the memory is scaled by what sigma may be."""
_NOISE = np.float32(1e-5)
"""A residual, relative to sigma², below which one that no longer shrinks is rounding."""
_SECOND_ROUNDING = np.float32(1.0 + 2e-5)
"""On the bound for the second value, which a projection before may have left just there."""
_CHECK_STEPS = 30
"""Steps of a check of the result, at least."""
_ROUNDING = np.float32(1.2e-7)
"""Times sigma, over the root of d: the largest singular value of the rounding of a memory's entries."""
_TOLERANCE = np.float32(1e-3)
"""Over the bound, relative: what is promised of sigma after the projection."""
_block = row_reductions(ANY_THREADS)
_block_sum3, _block_max = _block.sum3, _block.maximum


@cache
def spectrum_kernel(vector: int, staged: bool, clustered: bool):
    """The kernel for loads of ``vector`` elements, and groups that are clusters or not.

    ``staged``: the area of a block is in dynamic shared memory, and a lane's part of a row in its registers. Else the
    area is in the workspace, a row takes all warps of a block, and is read once more from memory for z.
    """
    lanes_columns = lane_columns(staged)
    parts = lanes_columns // vector
    warp_columns = 32 * lanes_columns
    stride = 32 * vector
    load, unpack, area_vector, store, flush, add_long, fetch = matrix_rows(vector, staged)

    @cuda.jit(device=True)
    def barrier(counters, group, blocks):
        if clustered:
            cluster_barrier()  # all blocks of the group have written what the others read
        else:
            group_barrier(counters, group, blocks)

    @cuda.jit(device=True)
    def repair_rows(output, shape, place, area, hidden, hidden_place, shared_samples, activations, flags, errors):
        """Rows and columns that held something not finite become those of an update of zero. The thread's C'²."""
        matrix, columns, pitch, first_row, end_row, _tile_rows, _warps_a_row = shape
        origin, stride0, stride1 = hidden_place
        squares = _ZERO
        for row in range(first_row, end_row):
            lost = flags[row] > 0
            offset = place[0] + np.int64(row) * columns
            for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
                value = output[offset + column]
                if lost or flags[columns + column] > 0:
                    value = _ZERO
                    if shared_samples > 0:
                        share = _ONE / np.float32(shared_samples)
                        for sample in range(shared_samples):
                            at = origin + np.int64(sample) * stride0
                            kept = sigmoid_pair(activations[np.int64(sample) * columns + row])[1] * share
                            value += (
                                kept
                                * finite_or_zero(hidden[at + np.int64(row) * stride1])
                                * finite_or_zero(hidden[at + np.int64(column) * stride1])
                            )
                    else:
                        kept = sigmoid_pair(activations[np.int64(matrix) * columns + row])[1]
                        value = kept * area[2 * pitch + row] * area[2 * pitch + column]
                    if not_finite(value):
                        record_event(errors, INF_INPUT, 1, offset + column)
                        value = _ZERO
                    output[offset + column] = value
                squares += value * value
        return squares

    @cuda.jit(device=True)
    def norm_rows(output, shape, place, area):
        """The largest sum of magnitudes of a row; those of columns go to z in the area."""
        _matrix, columns, _pitch, first_row, end_row, _tile_rows, _warps_a_row = shape
        columns, first_row, end_row = opaque(columns), opaque(first_row), opaque(end_row)
        row_largest = _ZERO
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            total = _ZERO
            for row in range(first_row, end_row):
                value = abs(output[place[0] + np.int64(row) * columns + column])
                total += value
            area[place[2] + column] = total
        for row in range(first_row + (cuda.threadIdx.x >> 5), end_row, cuda.blockDim.x >> 5):
            total = _ZERO
            for column in range(cuda.laneid, columns, 32):
                total += abs(output[place[0] + np.int64(row) * columns + column])
            row_largest = maximum(row_largest, warp_sum(total, 32, FULL_MASK))
        return row_largest

    @cuda.jit(device=True)
    def part_product(area, place, left, values, few_words, few, unit):
        """The product of a lane's part of a row with a vector of the area; the part becomes ``unit`` times itself."""
        y = _ZERO
        for part in range(parts):
            if part * stride < left:
                area_vector(area, place + part * stride, few_words, few)
                for element in range(vector):
                    values[part * vector + element] *= unit
                    y += values[part * vector + element] * few[element]
        return y

    @cuda.jit(device=True)
    def multiply_rows(output, shape, place, area, work, scratch, buffers, unit):
        """Products of the rows, times ``unit``, with w at pitch in the area.

        Returns, in the first lanes of warps, the sums of y_v y_w, y_w y_w, y_w y_p and y_w y_1, all but y_w from the
        workspace.
        """
        _matrix, columns, pitch, first_row, end_row, tile_rows, warps_a_row = shape
        matrix_offset, row_products, tile, own_part = place
        words, values, few_words, few, z = buffers
        own, start, span, leads = start_sweep(warps_a_row, vector, warp_columns)
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
            load(output, offset + start, 1, left, words)
            fetch(output, offset, row, end_row, columns, tile_rows, start, 2, ROWS_AHEAD)
        for _tile_row in range(first_row, end_row, tile_rows):
            works = row < end_row
            next_row = np.int32(row + tile_rows)
            next_offset = offset + np.int64(tile_rows) * columns
            next_left = np.int32((columns if next_row < end_row else 0) - start)
            y = _ZERO
            if staged:
                unpack(output, words, values)
                # The next row is on its way while this one is worked on.
                load(output, next_offset + start, 1, next_left, words)
                fetch(output, offset, row, end_row, columns, tile_rows, start, ROWS_AHEAD, ROWS_AHEAD + 1)
                y = part_product(area, pitch + start, left, values, few_words, few, unit)
            else:
                for first in range(start, columns, span):
                    part_left = np.int32((columns if works else 0) - first)
                    load(output, offset + first, 1, part_left, words)
                    unpack(output, words, values)
                    y += part_product(area, pitch + first, part_left, values, few_words, few, unit)
            y = row_sum(y, scratch, 48 + 48 * parity, warps_a_row)
            parity ^= 1
            if staged:
                for element in range(lanes_columns):
                    z[element] += y * values[element]
            else:
                end = columns if works else np.int32(0)
                add_long(output, offset, end, area, tile, start, span, words, values, y, unit)
            if leads and works:
                set_element(work, row_products + columns + row, y)
            row, offset, left = next_row, next_offset, next_left
        flush(area, tile, pitch, columns, tile_rows, start, own, z, work, own_part)
        cuda.syncthreads()  # the products of all rows of the block are in the workspace
        vw, ww, wp, w1 = _ZERO, _ZERO, _ZERO, _ZERO
        row = np.int32(first_row + cuda.threadIdx.x)
        while row < end_row:
            at = row_products + row
            y = element_at(work, at + columns)
            vw += y * element_at(work, at)
            ww += y * y
            wp += y * element_at(work, at + 2 * columns)
            w1 += y * element_at(work, at + 3 * columns)
            row = np.int32(row + cuda.blockDim.x)
        vw, ww, wp = warp_sum3(vw, ww, wp, 32, FULL_MASK)
        return vw, ww, wp, warp_sum(w1, 32, FULL_MASK)

    @cuda.jit(device=True)
    def largest_rows(output, shape, place):
        """The largest magnitude in a thread's share of the rows of a block."""
        _matrix, columns, _pitch, first_row, end_row, _tile_rows, _warps_a_row = shape
        result = _ZERO
        offset = place[0] + np.int64(first_row) * columns
        cells = (np.int64(end_row) - first_row) * columns
        for cell in range(np.int64(cuda.threadIdx.x), cells, np.int64(cuda.blockDim.x)):
            result = maximum(result, abs(output[offset + cell]))
        return result

    @cuda.jit(device=True)
    def project_rows(output, shape, place, area, scratch, buffers, factor, cuts, kept):
        """Each row becomes ``factor`` times itself or, with ``cuts``, loses all but ``kept`` of its part along v.

        v is the unit vector at 0 in the area. A row may be thousands of times longer than what is left of it: the part
        along v is taken away whole, as exactly as can be, before what is kept of it is put back.
        """
        _matrix, columns, _pitch, first_row, end_row, tile_rows, warps_a_row = shape
        words, values, few_words, few, _z = buffers
        own, start, span, _leads = start_sweep(warps_a_row, vector, warp_columns)
        parity = 0
        for tile_row in range(first_row, end_row, tile_rows):
            row = np.int32(tile_row + own)
            end = columns if row < end_row else np.int32(0)
            offset = place[0] + np.int64(row) * columns
            product, again = _ZERO, _ZERO
            load(output, offset + start, 1, np.int32(end - start), words)
            fetch(output, offset, row, end_row, columns, tile_rows, start, 1, ROWS_AHEAD)
            if cuts:
                for turn in range(2):
                    total = _ZERO
                    for first in range(start, columns if not staged else start + 1, span):
                        left = np.int32(end - first)
                        if not staged:
                            load(output, offset + first, 1, left, words)
                        unpack(output, words, values)
                        for part in range(parts):
                            if part * stride < left:
                                area_vector(area, first + part * stride, few_words, few)
                                for element in range(vector):
                                    value = values[part * vector + element] - product * few[element]
                                    total += value * few[element]
                    total = row_sum(total, scratch, 48 + 48 * parity, warps_a_row)
                    parity ^= 1
                    if turn == 0:
                        product = total
                    else:
                        again = total
            back = again - (product + again) * kept
            for first in range(start, columns if not staged else start + 1, span):
                left = np.int32(end - first)
                if not staged:
                    load(output, offset + first, 1, left, words)
                unpack(output, words, values)
                for part in range(parts):
                    if part * stride < left:
                        column = first + part * stride
                        area_vector(area, column, few_words, few)
                        for element in range(vector):
                            value = values[part * vector + element] - product * few[element]
                            values[part * vector + element] = finite_or_zero((value - back * few[element]) * factor)
                        store(output, offset + column, values, part * vector)

    @cuda.jit(device=True)
    def next_open(matrix, matrices, groups, totals, only_checks):
        """The first of a group's matrices, from this one on, that the update has not settled."""
        while only_checks == 0 and matrix < matrices:
            if not element_at(totals, np.int64(matrix) * TOTALS + SETTLED) > _ZERO:
                break
            matrix = opaque(np.int32(matrix + groups))
        return matrix

    @cuda.jit(device=True)
    def search(
        first_open, group, groups,
        output, matrices, columns, pitch, tile, blocks, block_rows, tile_rows, warps_a_row, group_floats,
        area_floats, hidden, hidden_origin, hidden_stride0, hidden_stride1, shared_samples, activations,
        power_vector, sigma_bound, sigma_out, totals, work, flags, counters, spectral_bound,
        power_iterations, clips, only_checks, errors,
    ):  # fmt: skip
        """All that there is to do for the matrices of a group from ``first_open`` on. The arguments of the kernel."""
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        row_scratch = cuda.shared.array(ROW_SCRATCH, np.float32)
        cells = cuda.shared.array(BLOCK_CELLS, np.float32)
        words = cuda.local.array(lanes_columns, np.uint32)
        values = cuda.local.array(lanes_columns, np.float32)
        few_words = cuda.local.array(vector, np.uint32)
        few = cuda.local.array(vector, np.float32)
        z = cuda.local.array(lanes_columns, np.float32)
        buffers = (words, values, few_words, few, z)
        thread = np.int32(cuda.threadIdx.x)
        threads = np.int32(cuda.blockDim.x)
        rank = np.int32(cuda.blockIdx.x - group * blocks)
        group_work = group * group_floats
        half = np.int64(blocks) * pitch
        # Where a group is small each of its blocks adds up all of z for itself, and no second barrier is needed.
        redundant = blocks * columns <= _MOST_REDUNDANT
        vectors = group_work + 2 * half + (rank * VECTORS * np.int64(pitch) if redundant else 0)
        row_products = group_work + 2 * half + blocks * VECTORS * np.int64(pitch)
        sums = row_products + ROW_PRODUCTS * np.int64(columns)
        area = cuda.shared.array(0, np.float32, 16)
        if not staged:
            area_start = sums + 2 * CELLS * np.int64(blocks) + rank * area_floats
            area = work[area_start : area_start + area_floats]
        first_row = np.int32(min(rank * block_rows, columns))
        end_row = np.int32(min(first_row + block_rows, columns))
        slice_size = whole_quotient(np.int32(columns + blocks - 1), blocks)
        slice_start = min(rank * slice_size, columns)
        slice_end = min(slice_start + slice_size, columns)
        z_start, z_end = (np.int32(0), columns) if redundant else (slice_start, slice_end)
        z_shift = np.int32(0 if redundant else 5)
        z_lanes = 1 if redundant else 32
        z_lane = cuda.laneid & (z_lanes - 1)
        hidden_place = (hidden_origin, hidden_stride0, hidden_stride1)
        certifies = sigma_bound.size > 0 and only_checks == 0
        phase = 0
        parity = 0
        matrix = first_open
        while matrix < matrices:
            matrix_offset = np.int64(matrix) * columns * columns
            shape = (np.int64(matrix), columns, pitch, first_row, end_row, tile_rows, warps_a_row)
            place = (matrix_offset, row_products, tile, group_work)
            totals_place = np.int64(matrix) * TOTALS
            cuda.syncthreads()  # the matrix before no longer needs the area
            # A check starts elsewhere than what it checks.
            warm, squares_h, rest_scale = stage_vectors(
                matrix, columns, pitch, area, power_vector, hidden, hidden_place, shared_samples > 0,
                1 if only_checks == 0 else 4, False, scratch, errors,
            )  # fmt: skip
            warm = warm and only_checks == 0
            matrix_flags = flags[np.int64(matrix) * 2 * columns : (np.int64(matrix) + 1) * 2 * columns]

            # --- what the update has left
            squares, writes = totals[totals_place + SQUARES], totals[totals_place + WRITES]
            lost, most_kept = totals[totals_place + LOST], totals[totals_place + MOST_KEPT]
            stepped = only_checks == 0
            if lost > _ZERO or not stepped:
                # The products are of no use; sums of squares are made anew.
                stepped = False
                squares = repair_rows(
                    output,
                    shape,
                    place,
                    area,
                    hidden,
                    hidden_place,
                    shared_samples,
                    activations,
                    matrix_flags,
                    errors,
                )
                squares, _unused, _unused2 = _block_sum3(squares, _ZERO, _ZERO, scratch, scratch, phase)
                phase ^= 1
                if thread == 0:
                    work[sums + (parity * blocks + rank) * CELLS] = squares
                barrier(counters, group, blocks)
                squares, _unused, _unused2 = group_sums(work, sums + parity * blocks * CELLS, blocks, 0)
                parity ^= 1
                for row in range(first_row + thread, end_row, threads):
                    matrix_flags[row] = 0
                for column in range(slice_start + thread, slice_end, threads):
                    matrix_flags[columns + column] = 0

            # --- is it within the bound for certain?
            unit = _ONE
            upper = math.sqrt(squares) * ROUNDING_UP
            if not is_in_range(squares):
                # Fourth powers of sigma would leave float32: the iteration works on multiples of the rows.
                largest = _block_max(largest_rows(output, shape, place), scratch, scratch, phase)
                phase ^= 1
                if thread == 0:
                    work[sums + (parity * blocks + rank) * CELLS] = largest
                barrier(counters, group, blocks)
                largest = group_maximum(work, sums + parity * blocks * CELLS, blocks, 0)
                parity ^= 1
                unit = _ONE / maximum(largest, np.float32(1e-37))
                upper = largest * np.float32(columns) * ROUNDING_UP
            bound = spectral_bound * unit
            if certifies:
                before = element_at(totals, totals_place + BEFORE)
                hidden_norm = _ONE if shared_samples > 0 else math.sqrt(squares_h)
                upper = minimum(upper, weyl_bound(before, most_kept, writes, hidden_norm))
                if upper > spectral_bound:
                    row_largest = norm_rows(output, shape, place, area)
                    row_largest = _block_max(row_largest, scratch, scratch, phase)
                    phase ^= 1
                    for column in range(thread, columns, threads):
                        work[group_work + parity * half + np.int64(rank) * pitch + column] = area[tile + column]
                    if thread == 0:
                        work[sums + (parity * blocks + rank) * CELLS] = row_largest
                    barrier(counters, group, blocks)
                    row_largest = group_maximum(work, sums + parity * blocks * CELLS, blocks, 0)
                    norm_parts = group_work + parity * half
                    parity ^= 1
                    column_largest = _ZERO
                    for column in range(slice_start + thread, slice_end, threads):
                        column_largest = maximum(
                            column_largest, group_column(work, norm_parts + column, blocks, pitch, 0, 1)
                        )
                    column_largest = _block_max(column_largest, scratch, scratch, phase)
                    phase ^= 1
                    if thread == 0:
                        work[sums + (parity * blocks + rank) * CELLS] = column_largest
                    barrier(counters, group, blocks)
                    column_largest = group_maximum(work, sums + parity * blocks * CELLS, blocks, 0)
                    parity ^= 1
                    upper = minimum(upper, math.sqrt(column_largest) * math.sqrt(row_largest) * ROUNDING_UP)
            settled = upper <= spectral_bound
            estimate = upper
            unseen = (COLD_FACTOR if only_checks == 0 else CHECK_FACTOR) * math.sqrt(np.float32(columns))
            factor = WARM_FACTOR if warm else unseen
            a, b = _ONE, _ZERO
            # The first step has been made already, and says where to begin.
            stepped = stepped and not certifies and unit == _ONE
            if stepped:
                a, b = totals[totals_place + PART_V], totals[totals_place + PART_W]
            if not settled:
                # --- the largest singular value, and the second where the first alone may not be cut
                cuda.syncthreads()  # the vectors of the area have been used
                if not warm:
                    # h may be a singular vector, in which the others hide: a good part stays pseudo-random.
                    a += _COLD_PART if a >= _ZERO else -_COLD_PART
                length = _ONE / math.sqrt(a * a + b * b)
                for column in range(thread, columns, threads):
                    v = area[column]
                    w = area[pitch + column]
                    area[pitch + column] = (a * v + b * w) * length
                    area[column] = w
                cuda.syncthreads()  # the start vector is complete
                fresh = True
                scale_v = _ONE
                stage = 0
                step = 0
                theta, residual, theta_first, residual_first = _ZERO, _ZERO, _ZERO, _ZERO
                factor_first = factor
                residual_before = FLOAT32_MAX
                steps = power_iterations if only_checks == 0 else max(power_iterations, _CHECK_STEPS)
                pp = _ZERO
                running = True
                while running:
                    place = (matrix_offset, row_products, tile, group_work + parity * half + np.int64(rank) * pitch)
                    vw, ww, wp, w1 = multiply_rows(output, shape, place, area, work, row_scratch, buffers, unit)
                    own_cell = block_cells(cells, vw, ww, wp, w1, _ZERO, _ZERO, _ZERO, _ZERO, cuda.laneid == 0)
                    if thread < 8:
                        work[sums + (parity * blocks + rank) * CELLS + thread] = own_cell
                    barrier(counters, group, blocks)
                    vw, ww, wp = group_sums(work, sums + parity * blocks * CELLS, blocks, 0)
                    if stage == 1:
                        w1, _unused, _unused2 = group_sums(work, sums + parity * blocks * CELLS, blocks, 3)
                    vw *= scale_v
                    z_parts = group_work + parity * half
                    parity ^= 1
                    vv = theta
                    if fresh:
                        # The products of v and p are left from another start.
                        vv, vw, wp, pp = _ZERO, _ZERO, _ZERO, _ZERO
                    vp = _ZERO
                    theta, a, b, c = top_pair(vv, vw, ww, vp, wp, pp)
                    away = math.sqrt(b * b + c * c)
                    qa, qb, qc = _ZERO, _ZERO, _ZERO
                    if away > np.float32(1e-12):
                        qa, qb, qc = -away, a * b / away, a * c / away
                    pp = (
                        qa * qa * vv + qb * qb * ww + qc * qc * pp + _TWO * (qa * qb * vw + qa * qc * vp + qb * qc * wp)
                    )
                    rr, rv, rp, r1, squares_v = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
                    for column in range(z_start + (thread >> z_shift), z_end, threads >> z_shift):
                        at = vectors + column
                        aw = group_column(work, z_parts + column, blocks, pitch, z_lane, z_lanes)
                        if not redundant:
                            aw = warp_sum(aw, 32, FULL_MASK)
                        if z_lane == 0:
                            if stage == 1:
                                # Rounding of w, times sigma_1: far more than the rest of A w where sigma_1 is large.
                                aw -= w1 * work[at + _FIRST_V * pitch]
                            v, p, av, ap = _ZERO, _ZERO, _ZERO, _ZERO
                            w = area[pitch + column]
                            if not fresh:
                                v = work[at + _V * pitch] * scale_v
                                p = work[at + _P * pitch]
                                av = work[at + _AV * pitch] * scale_v
                                ap = work[at + _AP * pitch]
                            new_v = a * v + b * w + c * p
                            new_p = qa * v + qb * w + qc * p
                            new_av = a * av + b * aw + c * ap
                            work[at + _V * pitch] = new_v
                            work[at + _P * pitch] = new_p
                            work[at + _AV * pitch] = new_av
                            work[at + _AP * pitch] = qa * av + qb * aw + qc * ap
                            difference = new_av - theta * new_v
                            work[at + _RESIDUAL * pitch] = difference
                            rr += difference * difference
                            rv += difference * new_v
                            rp += difference * new_p
                            squares_v += new_v * new_v
                            if stage == 1:
                                r1 += difference * work[at + _FIRST_V * pitch]
                    for row in range(first_row + thread, end_row, threads):
                        at = row_products + row
                        y_w = work[at + columns]
                        y_v, y_p = _ZERO, _ZERO
                        if not fresh:
                            y_v = work[at] * scale_v
                            y_p = work[at + 2 * columns]
                        work[at] = a * y_v + b * y_w + c * y_p
                        work[at + 2 * columns] = qa * y_v + qb * y_w + qc * y_p
                    fresh = False
                    rr, rv, rp = _block_sum3(rr, rv, rp, scratch, scratch, phase)
                    phase ^= 1
                    r1, squares_v, _unused = _block_sum3(r1, squares_v, _ZERO, scratch, scratch, phase)
                    phase ^= 1
                    if not redundant:
                        if thread == 0:
                            cell = sums + (parity * blocks + rank) * CELLS
                            work[cell] = rr
                            work[cell + 1] = rv
                            work[cell + 2] = rp
                            work[cell + 3] = r1
                            work[cell + 4] = squares_v
                        barrier(counters, group, blocks)
                        group_cells = sums + parity * blocks * CELLS
                        parity ^= 1
                        rr, rv, rp = group_sums(work, group_cells, blocks, 0)
                        r1, squares_v, _unused = group_sums(work, group_cells, blocks, 3)
                    # Rounding wears the length of v: sigma² and the residual are those of v at length 1.
                    along_v = rv / squares_v if squares_v > _ZERO else _ZERO
                    theta += along_v
                    scale_v = _ONE / math.sqrt(squares_v) if squares_v > _ZERO else _ONE
                    residual = math.sqrt(maximum(rr - rv * along_v - r1 * r1, _ZERO)) * scale_v
                    length = rr - rv * along_v - rp * rp - r1 * r1
                    limit = bound if stage == 0 else bound * _SECOND_ROUNDING
                    # sigma² is at least theta + |r|² / theta.
                    nearer = theta + residual * (residual / theta) if theta > _ZERO else _ZERO
                    within = maximum(theta + factor * residual, nearer) <= limit * limit
                    known = _CONVERGED if stage == 0 and theta > bound * bound else _KNOWN
                    stands = residual <= _NOISE * theta and residual > np.float32(0.5) * residual_before
                    residual_before = residual
                    # Nothing is left of the residual but rounding, which says nothing of what was not seen.
                    ends = stands or not (length > np.float32(1e-12) * theta * theta)
                    # What a vector may not have seen yet is to decide nothing that further steps would show.
                    knows = residual <= known * theta and (factor <= WARM_FACTOR or theta > limit * limit)
                    stops = within or knows or ends or step >= steps
                    if ends:
                        factor = WARM_FACTOR
                    if stage == 1 and theta > limit * limit:
                        stops = True
                    if stage == 1 and stops and not within:
                        # The second value is not known to be within the bound: what it may be decides.
                        theta += residual
                    along_hidden = stage == 0 and step == 0 and not stepped and rest_scale > _ZERO
                    if along_hidden:
                        # What the update has added lies along h: w before any residual.
                        step += 1
                        for column in range(thread, columns, threads):
                            area[pitch + column] = area[column]
                        cuda.syncthreads()  # w is complete
                    elif not stops:
                        step += 1
                        factor = maximum(WARM_FACTOR, factor * np.float32(0.125))
                        scale = _ONE / math.sqrt(length)
                        for column in range(thread, columns, threads):
                            at = vectors + column
                            w = (
                                work[at + _RESIDUAL * pitch]
                                - along_v * work[at + _V * pitch]
                                - rp * work[at + _P * pitch]
                            )
                            if stage == 1:
                                w -= r1 * work[at + _FIRST_V * pitch]
                            area[pitch + column] = w * scale
                        cuda.syncthreads()  # w is complete
                    elif stage == 0:
                        theta_first, residual_first, factor_first = theta, residual, factor
                        settled = within
                        # Weyl: the update leaves at most one singular value above the bound if there was none before.
                        over = not within and theta > bound * bound
                        alone = unit == _ONE and squares * ROUNDING_UP - theta <= bound * bound
                        if certifies:
                            alone = alone or (before >= _ZERO and most_kept * before <= spectral_bound)
                        elif warm and shared_samples == 0:
                            grown = bound + math.sqrt(writes) * math.sqrt(squares_h) * unit
                            alone = alone or math.sqrt(theta) <= grown * (_ONE + _TWO * _TOLERANCE)
                        running = over and clips != 0 and not alone and only_checks == 0
                        if running:
                            stage = 1
                            step = 0
                            residual_before = FLOAT32_MAX
                            factor = unseen
                            dot, length, _unused = _ZERO, _ZERO, _ZERO
                            for column in range(thread, columns, threads):
                                v = work[vectors + _V * pitch + column]
                                dot += v * pseudo_random(column, 3)
                                length += v * v
                            dot, length, _unused = _block_sum3(dot, length, _ZERO, scratch, scratch, phase)
                            phase ^= 1
                            dot /= length
                            length = _ZERO
                            for column in range(thread, columns, threads):
                                v = work[vectors + _V * pitch + column]
                                w = pseudo_random(column, 3) - dot * v
                                area[pitch + column] = w
                                length += w * w
                            length, _unused, _unused2 = _block_sum3(length, _ZERO, _ZERO, scratch, scratch, phase)
                            phase ^= 1
                            scale = _ONE / math.sqrt(length) if length > np.float32(1e-6) else _ZERO
                            for column in range(thread, columns, threads):
                                area[pitch + column] *= scale
                            for column in range(z_start + thread, z_end, threads):
                                work[vectors + _FIRST_V * pitch + column] = work[vectors + _AV * pitch + column] / theta
                            for row in range(first_row + thread, end_row, threads):
                                work[row_products + 3 * columns + row] = work[row_products + row] * scale_v
                            fresh = True
                            cuda.syncthreads()  # w is complete
                    else:
                        running = False
                estimate = math.sqrt(theta_first)
                if theta_first > _ZERO:
                    estimate = math.sqrt(theta_first + residual_first * (residual_first / theta_first))
                over = not settled and estimate > bound * np.float32(1.0 + 2e-6)
                # A power step further than the combination: A v, of length sigma² or 1.
                first = _FIRST_V if stage == 1 else _AV
                if over and only_checks == 0:
                    target = bound
                    if certifies:
                        # Sigma exceeds its estimate by what the residual allows.
                        target *= np.float32(1.0 - 1e-5) * math.sqrt(theta_first / (theta_first + residual_first))
                    # What the entries of C' were rounded by stays behind when nearly all of them is cut.
                    rounding = _ROUNDING * estimate / math.sqrt(np.float32(columns))
                    cuts = clips != 0 and residual_first <= _POOR * theta_first
                    if stage == 1:
                        cuts = cuts and theta <= bound * bound * _SECOND_ROUNDING * _SECOND_ROUNDING
                    if not cuts and residual_first > _KNOWN * theta_first:
                        estimate_used = math.sqrt(theta_first + residual_first)
                    else:
                        estimate_used = estimate
                    length = _ZERO
                    for column in range(thread, columns, threads):
                        v = work[vectors + first * pitch + column]
                        area[column] = v
                        length += v * v
                    length, _unused, _unused2 = _block_sum3(length, _ZERO, _ZERO, scratch, scratch, phase)
                    phase ^= 1
                    scale = _ONE / math.sqrt(length) if length > _ZERO else _ZERO
                    for column in range(thread, columns, threads):
                        area[column] *= scale
                    cuda.syncthreads()  # v is complete
                    if not cuts:
                        rounding = _ZERO
                    elif certifies and rounding <= _TOLERANCE * bound:
                        target -= rounding
                    kept = target / math.sqrt(theta_first)
                    factor = _ONE if cuts else target / estimate_used
                    project_rows(output, shape, place, area, row_scratch, buffers, factor, cuts, kept)
                    # Sigma may exceed its estimate by what the residual allows, and the second value its own.
                    after = target * math.sqrt((theta_first + residual_first) / theta_first)
                    if cuts and stage == 1:
                        after = maximum(after, math.sqrt(maximum(theta, _ZERO)))
                    after += rounding
                    if rank == 0 and thread == 0:
                        if after > bound * (_ONE + _TOLERANCE):
                            record_event(errors, SPECTRAL_OVERFLOW, 1, matrix)
                        if certifies:
                            proven = residual_first <= _KNOWN * theta_first and after <= bound * (_ONE + _TOLERANCE)
                            sigma_bound[matrix] = spectral_bound if proven else upper
                elif not settled and rank == 0 and thread == 0:
                    # Not over as far as seen, but not known to be within either.
                    may_be = math.sqrt(theta_first + factor_first * residual_first)
                    if may_be > bound * (_ONE + _TOLERANCE):
                        record_event(errors, SPECTRAL_OVERFLOW, 1, matrix)
                if certifies and not over and rank == 0 and thread == 0:
                    sigma_bound[matrix] = upper
                if power_vector.size > 0 and only_checks == 0:
                    # A full power step further.
                    scale = _ONE / math.sqrt(theta * theta + residual * residual) if theta > _ZERO else _ZERO
                    for column in range(slice_start + thread, slice_end, threads):
                        at = vectors + column
                        v = work[at + _FIRST_V * pitch] if stage == 1 else work[at + _AV * pitch] * scale
                        power_vector[np.int64(matrix) * columns + column] = v
                estimate /= unit
            elif certifies and rank == 0 and thread == 0:
                sigma_bound[matrix] = upper
            if sigma_out.size > 0 and only_checks == 0 and rank == 0 and thread == 0:
                sigma_out[matrix] = estimate
            matrix = next_open(np.int32(matrix + groups), matrices, groups, totals, only_checks)

    @cuda.jit
    def cifg_spectrum_kernel(
        output,
        matrices,
        columns,
        pitch,
        tile,
        blocks,
        block_rows,
        tile_rows,
        warps_a_row,
        group_floats,
        area_floats,
        hidden,
        hidden_origin,
        hidden_stride0,
        hidden_stride1,
        shared_samples,
        activations,
        power_vector,
        sigma_bound,
        sigma_out,
        totals,
        work,
        flags,
        counters,
        spectral_bound,
        power_iterations,
        clips,
        only_checks,
        errors,
    ):
        output = array_at(output)
        hidden = array_at(hidden)
        activations = array_at(activations)
        power_vector = array_at(power_vector)
        sigma_bound = array_at(sigma_bound)
        sigma_out = array_at(sigma_out)
        totals = array_at(totals)
        work = array_at(work)
        flags = array_at(flags)
        counters = array_at(counters)
        group = opaque(whole_quotient(np.int32(cuda.blockIdx.x), blocks))
        groups = opaque(whole_quotient(np.int32(cuda.gridDim.x), blocks))
        # The arguments are read while the launch before is at work.
        prefetch_line(totals, np.int64(group) * TOTALS)
        wait_for_previous()  # the update is complete
        # As a rule all is settled, and this is all there is to do.
        first_open = next_open(group, matrices, groups, totals, only_checks)
        if first_open < matrices:
            search(
                first_open, group, groups,
                output, matrices, columns, pitch, tile, blocks, block_rows, tile_rows, warps_a_row,
                group_floats, area_floats, hidden, hidden_origin, hidden_stride0, hidden_stride1,
                shared_samples, activations, power_vector, sigma_bound, sigma_out, totals, work, flags,
                counters, spectral_bound, power_iterations, clips, only_checks, errors,
            )  # fmt: skip

    return cifg_spectrum_kernel
