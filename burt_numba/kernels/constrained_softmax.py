"""Kernels of constrained_softmax: softmax under an upper bound on its entropy.

For each row z of logits, p = softmax(z / T) with the largest T <= 1 at which H(p) = -sum p ln p <= entropy_bound.
Scaling the temperature is the projection of softmax(z) on {H <= bound} in KL(p || softmax(z)).
docs/constrained_softmax.md has the derivation and the search.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.block import MAX_WARPS, SCRATCH_SIZE
from burt_numba.device.cluster import SCRATCH_SIZE as EXCHANGE_SIZE
from burt_numba.device.entropy import (
    GAP_RANGE,
    SUMMED_TOGETHER,
    column_sums,
    entropy_search,
    first_beta,
    gap_of,
    last_beta,
)
from burt_numba.device.numeric import NEGATIVE_INFINITY, exp2, maximum
from burt_numba.device.row_bounds import report_row, row_bound
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import clean, is_bad, report_bad_elements, row_offset, row_place
from burt_numba.device.vector import fill_vector, load_vector, store_vector, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane, group_mask
from burt_numba.target import DOCUMENTED_THREADS, GROUP_BLOCK

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@cuda.jit(device=True)
def _scan_row(logits, offset, column_stride, staged, first, end, step, part_start, part_size):
    """A thread reads its columns of a part of a row: (their maximum, whether any is NaN or +inf).

    They are kept in shared memory where that holds the whole part.
    """
    bad = False
    row_max = NEGATIVE_INFINITY
    for column in range(first, end, step):
        value = np.float32(logits[offset + column * column_stride])
        bad |= is_bad(value)
        value = clean(value)
        row_max = maximum(row_max, value)
        if staged.size >= part_size:
            staged[column - part_start] = value
    return row_max, bad


@cuda.jit(device=True)
def _stage_gaps(staged, first, end, step, part_start, part_size, row_max, gap_limit):
    """The staged logits become gaps. No barrier before: a thread reads back only the columns it wrote."""
    if staged.size >= part_size:
        for column in range(first, end, step):
            staged[column - part_start] = gap_of(row_max, staged[column - part_start], gap_limit)


@cuda.jit(device=True)
def _scanned_gap(source, column):
    """A gap of a row that was scanned: from shared memory, or from the row where that is too short."""
    logits, offset, column_stride, staged, part_start, part_size, row_max, gap_limit = source
    if staged.size >= part_size:
        return staged[column - part_start]
    return gap_of(row_max, clean(np.float32(logits[offset + column * column_stride])), gap_limit)


_block = row_reductions(ANY_THREADS)
_block_max = _block.maximum
_search_scanned = entropy_search(column_sums(_scanned_gap, _block.sum3))


@cuda.jit(launch_bounds=DOCUMENTED_THREADS)
def constrained_softmax_kernel(
    logits,
    output,
    batch_size,
    num_classes,
    entropy_bound,
    temperature_min,
    temperature_max,
    max_iterations,
    row_bounds,
    temperature_out,
    entropy_out,
    errors,
):
    """The documented layout: block b takes rows b, b + gridDim.x, ...; thread t takes columns t, t + blockDim.x, ...

    Grid (batch_size), block min(num_classes, 1024) rounded up to whole warps, shared num_classes * 4 bytes. With less
    shared memory each evaluation reads the row again, so that a row may have any length.
    logits [B, C], output [B, C]; row_bounds, temperature_out, entropy_out [B] or of size 0; errors int64 [8].
    """
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    staged = cuda.shared.array(0, np.float32)
    thread = cuda.threadIdx.x
    threads = cuda.blockDim.x
    lowest_beta = first_beta(np.float32(temperature_min), np.float32(temperature_max))
    highest_beta = last_beta(np.float32(temperature_min), lowest_beta)
    gap_limit = GAP_RANGE / lowest_beta
    phase = 0
    for row in range(cuda.blockIdx.x, batch_size, cuda.gridDim.x):
        bound = row_bound(row_bounds, row, np.float32(entropy_bound), row, thread == 0, errors)
        row_logits = logits[row]
        row_max, bad = _scan_row(row_logits, 0, 1, staged, thread, num_classes, threads, 0, num_classes)
        if any_lane(bad, FULL_MASK):
            flat_offset = np.int64(row) * num_classes
            report_bad_elements(row_logits, 0, 1, thread, 1, num_classes, threads, flat_offset, errors, 32, FULL_MASK)
        row_max = _block_max(row_max, scratch, scratch, phase)
        phase ^= 1
        if row_max == NEGATIVE_INFINITY:
            row_max = _ZERO
        _stage_gaps(staged, thread, num_classes, threads, 0, num_classes, row_max, gap_limit)
        source = (row_logits, 0, 1, staged, 0, num_classes, row_max, gap_limit)
        data = (source, np.int64(thread), np.int64(num_classes), np.int64(threads), scratch, scratch)
        beta, total, entropy, phase = _search_scanned(data, bound, lowest_beta, highest_beta, max_iterations, phase)
        scale = _ONE / total if total > _ZERO else _ZERO
        for column in range(thread, num_classes, threads):
            output[row, column] = exp2(-beta * _scanned_gap(source, column)) * scale
        if thread == 0:
            report_row(
                row,
                beta,
                entropy,
                bound,
                np.float32(temperature_min),
                np.float32(temperature_max),
                temperature_out,
                entropy_out,
                errors,
            )


@cache
def rows_kernel(threads: int, per_thread: int, vector: int, blocks: int):
    """The kernel that holds each row in registers.

    ``threads`` threads of each of ``blocks`` blocks (a cluster, if more than 1) share a row, ``per_thread`` columns a
    thread, loaded ``vector`` at a time. Up to 32 threads are lanes of a warp, and a block has several rows:

        threads 8, block 128                  threads >= 64, blocks 1     blocks k
        block b: row 16b    | lanes 0 .. 7    block b: row b              blocks kr .. kr+k-1: row r, block i has part i
                 row 16b+1  | lanes 8 .. 15
                 ...
        columns of thread t: (v * threads + t) * vector + 0 .. vector - 1 for v = 0, 1, ... of its block's part
    """
    shares_warp = threads <= 32
    lanes = min(threads, 32)
    rows_a_block = GROUP_BLOCK // lanes
    lane_bits = lanes.bit_length() - 1
    block_bits = blocks.bit_length() - 1
    vectors = per_thread // vector
    stride = threads * vector
    # Kept through a report of bad elements, a row takes registers from every launch. Element by element, though, the
    # addresses of a second load take more; and where few rows are short the size of the code counts, read from memory.
    reloads = vector > 1 and shares_warp
    load = load_vector(vector)
    fill = fill_vector(vector)
    unpack = unpack_vectors(vector, vectors)
    store = store_vector(vector)
    reductions = row_reductions(threads, blocks)
    begin_row, block_rank = reductions.begin, reductions.rank
    reduce_max, reduce_sum3 = reductions.maximum, reductions.sum3

    @cuda.jit(device=True)
    def evaluate(data, beta, phase):
        registers, scratch, exchange = data
        total = _ZERO
        first = _ZERO
        second = _ZERO
        weights = _ZERO
        for element in range(per_thread):
            t = beta * registers[element]
            weight = exp2(-t)
            weighted = t * weight
            weights += weight
            first += weighted
            second += weighted * t
            if element % SUMMED_TOGETHER == SUMMED_TOGETHER - 1:
                total += weights
                weights = _ZERO
        return reduce_sum3(total, first, second, scratch, exchange, phase)

    search = entropy_search(evaluate)

    @cuda.jit(device=True)
    def load_row(logits, start, column_stride, columns, words, registers):
        """A thread's logits from ``start`` on; -inf beyond the ``columns`` that are left of the row."""
        for part in range(vectors):
            if part * stride < columns:
                step = part * stride if vector > 1 else part * stride * column_stride
                load(logits, start + step, words, part * vector)
            else:
                fill(logits, words, part * vector)
        unpack(logits, words, registers)

    @cuda.jit
    def constrained_softmax_rows_kernel(
        logits,
        output,
        first_row,
        rows,
        num_classes,
        part_size,
        origin,
        size1,
        magic1,
        shift1,
        size2,
        magic2,
        shift2,
        stride0,
        stride1,
        stride2,
        column_stride,
        entropy_bound,
        temperature_min,
        temperature_max,
        max_iterations,
        row_bounds,
        bound_origin,
        bound_stride0,
        bound_stride1,
        bound_stride2,
        temperature_out,
        entropy_out,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        exchange = cuda.shared.array(EXCHANGE_SIZE, np.float32)
        words = cuda.local.array(per_thread, np.uint32)
        registers = cuda.local.array(per_thread, np.float32)
        begin_row()
        if shares_warp:
            thread = np.int32(cuda.threadIdx.x & (threads - 1))
            row = np.int32(cuda.blockIdx.x * rows_a_block + (cuda.threadIdx.x >> lane_bits))
        else:
            thread = np.int32(cuda.threadIdx.x)
            row = np.int32(cuda.blockIdx.x >> block_bits)
        # Only where a block has several rows can a thread be without one; barriers stand where it has one.
        if row < rows:
            mask = group_mask(lanes)
            place = row_place(row, size1, magic1, shift1, size2, magic2, shift2)
            offset = origin + row_offset(place, stride0, stride1, stride2)
            bound_place = bound_origin + row_offset(place, bound_stride0, bound_stride1, bound_stride2)
            output_row = first_row + row
            part_start = np.int32(block_rank() * part_size)
            part_end = np.int32(min(part_start + part_size, num_classes))
            first_column = np.int32(part_start + thread * vector)
            bad = False
            # Counted from the thread's first column, the others are constants, which take no registers.
            columns = np.int32(part_end - first_column)
            start = offset + (first_column if vector > 1 else first_column * column_stride)
            load_row(logits, start, column_stride, columns, words, registers)
            for element in range(per_thread):
                bad |= is_bad(registers[element])
            if any_lane(bad, mask):
                if not reloads:
                    for element in range(per_thread):
                        registers[element] = clean(registers[element])
                report_bad_elements(
                    logits,
                    offset,
                    column_stride,
                    np.int64(first_column),
                    vector,
                    np.int64(part_end),
                    np.int64(stride),
                    output_row * num_classes,
                    errors,
                    lanes,
                    mask,
                )
                if reloads:
                    load_row(logits, start, column_stride, columns, words, registers)
                    for element in range(per_thread):
                        registers[element] = clean(registers[element])
            row_max = NEGATIVE_INFINITY
            for element in range(per_thread):
                row_max = maximum(row_max, registers[element])
            row_max = reduce_max(row_max, scratch, exchange, 0)
            if row_max == NEGATIVE_INFINITY:
                row_max = _ZERO
            reports = thread == 0 and part_start == 0
            bound = row_bound(row_bounds, bound_place, entropy_bound, output_row, reports, errors)
            lowest_beta = first_beta(temperature_min, temperature_max)
            highest_beta = last_beta(temperature_min, lowest_beta)
            gap_limit = GAP_RANGE / lowest_beta
            for element in range(per_thread):
                registers[element] = gap_of(row_max, registers[element], gap_limit)
            data = (registers, scratch, exchange)
            beta, total, entropy, _phase = search(data, bound, lowest_beta, highest_beta, max_iterations, 1)
            # Before the row is written: a report takes its time, and the other warps need not wait for it.
            if reports:
                report_row(
                    output_row,
                    beta,
                    entropy,
                    bound,
                    temperature_min,
                    temperature_max,
                    temperature_out,
                    entropy_out,
                    errors,
                )
            scale = _ONE / total if total > _ZERO else _ZERO
            output_offset = output_row * num_classes
            for element in range(per_thread):
                registers[element] = exp2(-beta * registers[element]) * scale
            for part in range(vectors):
                if part * stride < columns:
                    store(output, output_offset + first_column + part * stride, registers, part * vector)

    return constrained_softmax_rows_kernel


@cache
def streamed_kernel(blocks: int):
    """The kernel for rows that no register file holds: ``blocks`` blocks a row, each with a part of it.

    A part lies in dynamic shared memory, 4 bytes a column; launched with less, a block reads its part again each time.
    Its arguments are those of the kernel from ``rows_kernel``, with 64-bit sizes.
    """
    reductions = row_reductions(MAX_WARPS * 32, blocks)
    begin_row, block_rank, reduce_max = reductions.begin, reductions.rank, reductions.maximum
    search = entropy_search(column_sums(_scanned_gap, reductions.sum3))

    @cuda.jit
    def constrained_softmax_streamed_kernel(
        logits,
        output,
        first_row,
        rows,
        num_classes,
        part_size,
        origin,
        size1,
        magic1,
        shift1,
        size2,
        magic2,
        shift2,
        stride0,
        stride1,
        stride2,
        column_stride,
        entropy_bound,
        temperature_min,
        temperature_max,
        max_iterations,
        row_bounds,
        bound_origin,
        bound_stride0,
        bound_stride1,
        bound_stride2,
        temperature_out,
        entropy_out,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        exchange = cuda.shared.array(EXCHANGE_SIZE, np.float32)
        staged = cuda.shared.array(0, np.float32)
        begin_row()
        row = cuda.blockIdx.x // blocks
        place = row_place(row, size1, magic1, shift1, size2, magic2, shift2)
        offset = origin + row_offset(place, stride0, stride1, stride2)
        output_row = first_row + row
        output_offset = output_row * num_classes
        threads = np.int64(cuda.blockDim.x)
        part_start = np.int64(block_rank()) * part_size
        part_end = min(part_start + part_size, num_classes)
        first_column = part_start + cuda.threadIdx.x
        row_max, bad = _scan_row(
            logits, offset, column_stride, staged, first_column, part_end, threads, part_start, part_size
        )
        if any_lane(bad, FULL_MASK):
            report_bad_elements(
                logits,
                offset,
                column_stride,
                first_column,
                1,
                part_end,
                threads,
                output_offset,
                errors,
                32,
                FULL_MASK,
            )
        row_max = reduce_max(row_max, scratch, exchange, 0)
        if row_max == NEGATIVE_INFINITY:
            row_max = _ZERO
        reports = cuda.threadIdx.x == 0 and part_start == 0
        bound_place = bound_origin + row_offset(place, bound_stride0, bound_stride1, bound_stride2)
        bound = row_bound(row_bounds, bound_place, entropy_bound, output_row, reports, errors)
        lowest_beta = first_beta(temperature_min, temperature_max)
        highest_beta = last_beta(temperature_min, lowest_beta)
        gap_limit = GAP_RANGE / lowest_beta
        _stage_gaps(staged, first_column, part_end, threads, part_start, part_size, row_max, gap_limit)
        source = (logits, offset, column_stride, staged, part_start, part_size, row_max, gap_limit)
        data = (source, first_column, part_end, threads, scratch, exchange)
        beta, total, entropy, _phase = search(data, bound, lowest_beta, highest_beta, max_iterations, 1)
        scale = _ONE / total if total > _ZERO else _ZERO
        for column in range(first_column, part_end, threads):
            output[output_offset + column] = exp2(-beta * _scanned_gap(source, column)) * scale
        if reports:
            report_row(
                output_row, beta, entropy, bound, temperature_min, temperature_max, temperature_out, entropy_out, errors
            )

    return constrained_softmax_streamed_kernel
