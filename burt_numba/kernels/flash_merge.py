"""The kernel that merges states: partials of chunks, or results with the logarithms of their sums.

A block has some rows, or a part of the states of one; warp w of a row takes states w, w + MERGE_WARPS, ... of it, a few
at a time. What the warps have is merged in their order. So a row is added up in an order that depends on the number of
its states alone.

    lane t      elements t V .. t V + V - 1 of a state, then 32 V further on, ...; V: elements of an access
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.attention import HALF_MAX, chunk_count, finite_result, write_log_sum
from burt_numba.device.attention_states import EMPTY_MAX, counts, merged_column, rescaling
from burt_numba.device.events import INF_INPUT, NAN_INPUT, record_event
from burt_numba.device.launch_order import wait_for_previous
from burt_numba.device.numeric import FLOAT32_MAX, maximum, opaque, whole_quotient
from burt_numba.device.rows import not_finite, report_not_finite, row_offset, row_place
from burt_numba.device.vector import element_at, load_vector, set_element, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane
from burt_numba.flash_launches import MERGE_DEPTH, MERGE_WARPS, PART

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@cuda.jit(device=True)
def _record_number(value, index, errors):
    """One thread reports a maximum or a sum that is not finite."""
    if not_finite(value):
        record_event(errors, INF_INPUT if value == value else NAN_INPUT, 1, index)


@cache
def merge_kernel(vector: int, elements: int, states: int):
    """The kernel for accesses of ``vector`` elements (1: any strides) and so many ``elements`` of a state a lane.

    ``states``: of results, whose logarithms lie apart, in place of partials.
    """
    pieces = elements // vector
    cells = MERGE_DEPTH * elements
    pair_cells = 2 * MERGE_DEPTH
    load, load_pair = load_vector(vector), load_vector(2)
    unpack, unpack_pairs = unpack_vectors(vector, MERGE_DEPTH * pieces), unpack_vectors(2, MERGE_DEPTH)

    if states:

        @cuda.jit(device=True)
        def load_totals(source, offset, column_stride, dims, beside, beside_offset, words, pairs, state):
            pairs[2 * state] = element_at(beside, beside_offset)
            pairs[2 * state + 1] = _ONE

        @cuda.jit(device=True)
        def finish_totals(source, words, pairs):
            pass

    elif vector > 1:

        @cuda.jit(device=True)
        def load_totals(source, offset, column_stride, dims, beside, beside_offset, words, pairs, state):
            load_pair(source, offset + dims, words, 2 * state)

        @cuda.jit(device=True)
        def finish_totals(source, words, pairs):
            unpack_pairs(source, words, pairs)

    else:

        @cuda.jit(device=True)
        def load_totals(source, offset, column_stride, dims, beside, beside_offset, words, pairs, state):
            pairs[2 * state] = element_at(source, offset + dims * column_stride)
            pairs[2 * state + 1] = element_at(source, offset + (dims + 1) * column_stride)

        @cuda.jit(device=True)
        def finish_totals(source, words, pairs):
            pass

    @cuda.jit(device=True)
    def load_round(source, place, first, first_column, dims, buffers):
        """A warp starts to load so many states of its own from the first on."""
        start, stride, column_stride, beside, beside_start, beside_stride, all_states = place
        words, pair_words, pairs = buffers
        for each in range(MERGE_DEPTH):
            # Beyond the last state, that one again.
            chosen = np.int64(min(np.int32(first + each * MERGE_WARPS), np.int32(all_states - 1)))
            offset = start + chosen * stride
            load_totals(
                source, offset, column_stride, np.int64(dims), beside, beside_start + chosen * beside_stride,
                pair_words, pairs, each,
            )  # fmt: skip
            for piece in range(pieces):
                column = np.int32(first_column + piece * 32 * vector)
                cell = each * elements + piece * vector
                if column < dims:
                    load(source, offset + np.int64(column) * column_stride, words, cell)
                else:
                    for element in range(vector):
                        words[cell + element] = np.uint32(0)

    @cuda.jit(device=True)
    def report_states(source, place, first, end, row, rows, dims, dead_max, words, pairs, errors):
        """A warp looks at its states of a row once more and reports what is not finite."""
        start, stride, column_stride, beside, beside_start, beside_stride, all_states = place
        state = np.int32(first)
        while state < end:
            offset = start + np.int64(state) * stride
            load_totals(
                source, offset, column_stride, np.int64(dims), beside, beside_start + np.int64(state) * beside_stride,
                words, pairs, 0,
            )  # fmt: skip
            finish_totals(source, words, pairs)
            flat = (state * rows + row) * dims if states else (row * all_states + state) * (dims + 2)
            if cuda.laneid == 0 and not (pairs[0] <= dead_max):
                if states:
                    _record_number(pairs[0], state * rows + row, errors)
                else:
                    _record_number(pairs[0], flat + dims, errors)
                    _record_number(pairs[1], flat + dims + 1, errors)
            last = np.int64(dims) if counts(pairs[0], pairs[1], dead_max) else np.int64(0)
            report_not_finite(
                source, offset, column_stride, np.int64(cuda.laneid), 1, last, np.int64(32), flat, errors, 32,
                FULL_MASK,
            )  # fmt: skip
            state = opaque(np.int32(state + MERGE_WARPS))

    @cuda.jit
    def flash_merge_kernel(
        source_pointer,
        source_origin,
        source_stride0,
        source_stride1,
        source_stride2,
        state_stride,
        column_stride,
        beside_pointer,
        beside_origin,
        beside_stride0,
        beside_stride1,
        beside_stride2,
        beside_step,
        output_pointer,
        lse_pointer,
        parts_pointer,
        first_row,
        rows,
        all_rows,
        size1,
        magic1,
        shift1,
        size2,
        magic2,
        shift2,
        heads,
        states_a_row,
        chunks_a_state,
        max_chunks,
        chunk_size,
        reports_lengths,
        dims,
        dead_max,
        warps_shift,
        parts,
        errors,
    ):
        shared = cuda.shared.array(0, np.float32)
        words = cuda.local.array(cells, np.uint32)
        values = cuda.local.array(cells, np.float32)
        pair_words = cuda.local.array(pair_cells, np.uint32)
        pairs = cuda.local.array(pair_cells, np.float32)
        tops = cuda.local.array(MERGE_DEPTH, np.float32)
        totals = cuda.local.array(MERGE_DEPTH, np.float32)
        sums = cuda.local.array(elements, np.float32)
        source = array_at(source_pointer)
        beside = array_at(beside_pointer)
        output = array_at(output_pointer)
        lse_out = array_at(lse_pointer)
        parts_out = array_at(parts_pointer)
        wait_for_previous()
        warp = np.int32(cuda.threadIdx.x >> 5)
        row_warps = np.int32(np.int32(1) << warps_shift)
        own_row = np.int32(warp >> warps_shift)
        own = np.int32(warp & (row_warps - 1))
        block = whole_quotient(np.int32(cuda.blockIdx.x), parts)
        part = np.int32(cuda.blockIdx.x - block * parts)
        local_row = np.int32(block * (cuda.blockDim.x >> (5 + warps_shift)) + own_row)
        is_row = local_row < rows
        place = row_place(min(local_row, np.int32(rows - 1)), size1, magic1, shift1, size2, magic2, shift2)
        row = np.int64(first_row) + local_row
        if vector > 1:
            column_stride = np.int64(1)
        beside_start = beside_origin + row_offset(place, beside_stride0, beside_stride1, beside_stride2)
        start = np.int32(part * PART)
        origin = source_origin + row_offset(place, source_stride0, source_stride1, source_stride2)
        first_column = np.int32(cuda.laneid * vector)
        all_states = (
            origin, state_stride, column_stride, beside, beside_start, np.int64(beside_step), np.int32(states_a_row),
        )  # fmt: skip
        buffers = (words, pair_words, pairs)
        if states_a_row > 0:
            # Before it is known how many of them count: what is read too much is not used.
            load_round(source, all_states, np.int32(start + own), first_column, dims, buffers)
        end = np.int32(states_a_row)
        if not states and beside.size > 0:
            is_first = part == 0 and own == 0 and cuda.laneid == 0 and is_row
            sample = whole_quotient(np.int32(row), heads)
            reports = reports_lengths and is_first and row == np.int64(sample) * heads
            chunks = chunk_count(beside, beside_start, beside_step, chunk_size, max_chunks, sample, reports, errors)
            end = whole_quotient(np.int32(chunks + chunks_a_state - 1), chunks_a_state)
        is_live = start < end
        end = min(end, np.int32(start + PART)) if is_row else np.int32(0)

        row_max = EMPTY_MAX
        row_total = _ZERO
        bad = False
        mends = False
        adding = True
        while adding:
            for element in range(elements):
                sums[element] = _ZERO
            row_max = EMPTY_MAX
            row_total = _ZERO
            state = np.int32(start + own)
            if mends:
                load_round(source, all_states, state, first_column, dims, buffers)
            while state < end:
                finish_totals(source, pair_words, pairs)
                common_max = row_max
                for each in range(MERGE_DEPTH):
                    top, total = pairs[2 * each], pairs[2 * each + 1]
                    is_there = state + each * MERGE_WARPS < end and not (top <= dead_max)
                    bad |= is_there and (not_finite(top) or not_finite(total))
                    is_counted = is_there and counts(top, total, dead_max)
                    tops[each] = top if is_counted else EMPTY_MAX
                    totals[each] = total if is_counted else _ZERO
                    common_max = maximum(common_max, tops[each])
                unpack(source, words, values)
                next_state = np.int32(state + MERGE_DEPTH * MERGE_WARPS)
                if next_state < end:
                    load_round(source, all_states, next_state, first_column, dims, buffers)
                factor = rescaling(row_max, common_max)
                row_max = common_max
                row_total *= factor
                for element in range(elements):
                    sums[element] *= factor
                for each in range(MERGE_DEPTH):
                    weight = rescaling(tops[each], row_max)
                    is_counted = totals[each] > _ZERO
                    row_total += totals[each] * weight
                    for element in range(elements):
                        value = values[each * elements + element]
                        if mends:
                            is_fine = abs(value) <= FLOAT32_MAX
                            bad |= is_counted and not is_fine
                            value = value if is_fine else _ZERO
                        sums[element] += weight * (value if is_counted else _ZERO)
                state = opaque(next_state)
            # One value that is not finite makes a sum that is not: only then are they looked at one by one.
            adding = False
            for element in range(elements):
                adding |= not (abs(sums[element]) <= FLOAT32_MAX)
            adding = any_lane(adding, FULL_MASK) and not mends
            mends = adding
        pitch = np.int32(dims + 2)
        cell = np.int32(warp * pitch)
        for element in range(elements):
            column = np.int32(first_column + element // vector * 32 * vector + element % vector)
            if column < dims:
                set_element(shared, cell + column, sums[element])
        if cuda.laneid == 0:
            set_element(shared, cell + dims, row_max)
            set_element(shared, cell + dims + 1, row_total)
        cuda.syncthreads()  # the states of all warps are there
        if is_row and (is_live or part == 0):
            first = np.int32((warp - own) * pitch)
            limit = HALF_MAX if output.itemsize == 2 else FLOAT32_MAX
            column = np.int32(own * 32 + cuda.laneid)
            while column < dims:
                common_max, total, value = merged_column(shared, first, pitch, row_warps, dims, column)
                if parts_out.size > 0:
                    index = (row * parts + part) * pitch
                    parts_out[index + column] = finite_result(value, FLOAT32_MAX, index + column, errors)
                    if column == 0:
                        parts_out[index + dims] = common_max
                        parts_out[index + dims + 1] = total
                else:
                    index = row * dims + column
                    output[index] = finite_result(value / total if total > _ZERO else _ZERO, limit, index, errors)
                    if column == 0:
                        write_log_sum(row, common_max, total, lse_out, errors)
                column = opaque(np.int32(column + 32 * row_warps))
        if any_lane(bad, FULL_MASK):
            state_place = (
                origin, state_stride, column_stride, beside, beside_start, np.int64(beside_step),
                np.int64(states_a_row),
            )  # fmt: skip
            report_states(
                source, state_place, start + own, end, row, np.int64(all_rows), np.int64(dims), dead_max, pair_words,
                pairs, errors,
            )  # fmt: skip

    return flash_merge_kernel
