"""The kernel that merges states: partials of chunks, or results with the logarithms of their sums.

Of a row, or of a part of it, MERGE_DEPTH states one after another are a round, which a warp adds up at once; round i is
of strand i % STRANDS. A strand is a sum of its own, and the strands of a row are merged in their order. So a row is
added up in an order that depends on the number of its states alone, whether each strand has a warp or one warp takes
all of a row:

    states      0 1 2 3   4 5 6 7   8 9 10 11  ..    32 33 34 35  ..
    strand         0         1          2                 0           warp: strand % the warps of a row

Where states lie one after another a warp has several rounds on their way to shared memory, of one strand and of its
next; else one, in registers.

    lane t      elements t V .. t V + V - 1 of a state, then 32 V further on, ...; V: elements of an access, or 1
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.async_copies import (
    close_group,
    shared_address,
    start_copy_of,
    wait_for_all_but,
    wait_for_copies,
)
from burt_numba.device.attention import HALF_MAX, chunk_count, finite_result, write_log_sum
from burt_numba.device.attention_states import EMPTY_MAX, counts, merged_column, rescaling
from burt_numba.device.events import INF_INPUT, NAN_INPUT, record_event
from burt_numba.device.launch_order import wait_for_previous
from burt_numba.device.numeric import FLOAT32_MAX, maximum, opaque, whole_quotient
from burt_numba.device.rows import not_finite, report_not_finite, row_offset, row_place
from burt_numba.device.vector import element_at, load_vector, rotate_elements, set_element, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane, sync_warp
from burt_numba.flash_launches import MERGE_DEPTH, MERGE_SLOTS, PART, STRANDS, is_staged

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@cuda.jit(device=True)
def _record_number(value, index, errors):
    """One thread reports a maximum or a sum that is not finite."""
    if not_finite(value):
        record_event(errors, INF_INPUT if value == value else NAN_INPUT, 1, index)


@cuda.jit(device=True)
def _rounds_of(states):
    return whole_quotient(np.int32(states + MERGE_DEPTH - 1), np.int32(MERGE_DEPTH))


@cuda.jit(device=True)
def _later(strand, step, rounds, row_warps):
    """(strand, round) of a warp after so many rounds of its strand; STRANDS or more where there is none."""
    step = np.int32(step + STRANDS)
    if step >= rounds:
        strand = np.int32(strand + row_warps)
        step = strand
    return strand, step


@cuda.jit(device=True)
def _is_there(strand, step, rounds):
    return strand < STRANDS and step < rounds


@cache
def merge_kernel(vector: int, elements: int, are_results: int):
    """The kernel for accesses of ``vector`` elements (1: any strides) and so many ``elements`` of a state a lane.

    ``are_results``: states are results, whose logarithms lie apart, not partials.
    """
    staged = is_staged(vector, bool(are_results))
    slots = MERGE_SLOTS if staged else 1
    # Partials in shared memory begin at multiples of 8 bytes.
    width = 2 if staged else vector
    pieces = elements // width
    cells = MERGE_DEPTH * elements
    pair_cells = 2 * MERGE_DEPTH
    load, unpack = load_vector(width), unpack_vectors(width, MERGE_DEPTH * pieces)
    load_pair, unpack_pairs = load_vector(2), unpack_vectors(2, MERGE_DEPTH)
    rotate = rotate_elements(cells, 1)
    turns = -(-MERGE_DEPTH * (32 * elements + 2) // (32 * vector))
    start_copy, wait_for_slot = start_copy_of(4 * vector if staged else 16), wait_for_all_but(slots - 1)
    merge_column, only_column = merged_column(STRANDS), merged_column(1)

    if are_results:

        @cuda.jit(device=True)
        def totals_at(source, offset, column_stride, dims, beside, beside_offset):
            return element_at(beside, beside_offset), _ONE

    else:

        @cuda.jit(device=True)
        def totals_at(source, offset, column_stride, dims, beside, beside_offset):
            place = offset + dims * column_stride
            return element_at(source, place), element_at(source, place + column_stride)

    if staged:

        @cuda.jit(device=True)
        def start_round(source, place, offset, first, dims, slot_cell, buffers):
            """A warp starts to copy a round of states, from the first on, which is at ``offset``."""
            shared, address = buffers[:2]
            column = np.int32(cuda.laneid * vector)
            cell = np.int32(slot_cell + column)
            left = np.int32(min(np.int32(place[6] - first), np.int32(MERGE_DEPTH)) * np.int32(dims + 2) - column)
            offset += column
            for turn in range(turns):
                ahead = turn * 32 * vector
                if left > ahead:
                    start_copy(shared, address, np.int32(cell + ahead), source, offset + ahead)

        @cuda.jit(device=True)
        def take_round(source, left, dims, slot_cell, buffers):
            """The oldest round is there: so many states that are ``left``, or MERGE_DEPTH."""
            shared, _, words, values, pair_words, pairs = buffers
            wait_for_slot()
            sync_warp()  # what each lane has copied is there for all
            pitch = np.int32(dims + 2)
            cell = slot_cell
            for each in range(MERGE_DEPTH):
                load_pair(shared, np.int64(np.int32(cell + dims)), pair_words, 2 * each)
                for piece in range(pieces):
                    # What is beyond the last element goes into sums that nobody reads.
                    column = min(np.int32((cuda.laneid + piece * 32) * width), np.int32(dims - width))
                    load(shared, np.int64(np.int32(cell + column)), words, each * elements + piece * width)
                # Beyond the last state, that one again.
                if each + 1 < left:
                    cell = np.int32(cell + pitch)
            unpack_pairs(shared, pair_words, pairs)
            unpack(shared, words, values)
            sync_warp()  # the slot may be filled again

    else:

        @cuda.jit(device=True)
        def start_round(source, place, offset, first, dims, slot_cell, buffers):
            """A warp starts to load a round of states, from the first on."""
            words, pairs = buffers[2], buffers[5]
            start, stride, column_stride, beside, beside_start, beside_stride, states = place
            for each in range(MERGE_DEPTH):
                # Beyond the last state, that one again.
                chosen = np.int64(min(np.int32(first + each), np.int32(states - 1)))
                offset = start + chosen * stride
                pairs[2 * each], pairs[2 * each + 1] = totals_at(
                    source, offset, column_stride, np.int64(dims), beside, beside_start + chosen * beside_stride
                )
                for piece in range(pieces):
                    column = np.int32((cuda.laneid + piece * 32) * width)
                    cell = each * elements + piece * width
                    if column < dims:
                        load(source, offset + np.int64(column) * column_stride, words, cell)
                    else:
                        for element in range(width):
                            words[cell + element] = np.uint32(0)

        @cuda.jit(device=True)
        def take_round(source, left, dims, slot_cell, buffers):
            """The round is there."""
            unpack(source, buffers[2], buffers[3])

    @cuda.jit(device=True)
    def report_states(source, place, own, end, row_warps, row, rows, dims, dead_max, errors):
        """A warp looks at its states of a row, up to ``end``, once more and reports what is not finite."""
        start, stride, column_stride, beside, beside_start, beside_stride, all_states, first = place
        index = np.int32(own * MERGE_DEPTH)
        while index < end:
            state = np.int64(first) + index
            offset = start + state * stride
            top, total = totals_at(
                source, offset, column_stride, np.int64(dims), beside, beside_start + state * beside_stride
            )
            flat = (state * rows + row) * dims if are_results else (row * all_states + state) * (dims + 2)
            if cuda.laneid == 0 and not (top <= dead_max):
                if are_results:
                    _record_number(top, state * rows + row, errors)
                else:
                    _record_number(top, flat + dims, errors)
                    _record_number(total, flat + dims + 1, errors)
            last = np.int64(dims) if counts(top, total, dead_max) else np.int64(0)
            report_not_finite(
                source, offset, column_stride, np.int64(cuda.laneid), 1, last, np.int64(32), flat, errors, 32,
                FULL_MASK,
            )  # fmt: skip
            index = np.int32(index + 1)
            if index & (MERGE_DEPTH - 1) == 0:
                index = np.int32(index + (row_warps - 1) * MERGE_DEPTH)
            index = opaque(index)

    @cuda.jit(device=True)
    def strands_cell(own_row, slots_a_warp, dims, states_a_row):
        """Where the strands of a row are: behind what the warps of the block have on its way."""
        row_strands = min(_rounds_of(min(np.int32(states_a_row), np.int32(PART))), np.int32(STRANDS))
        before = np.int32((opaque(np.int32(cuda.blockDim.x)) >> 5) * slots_a_warp * MERGE_DEPTH)
        return np.int32((before + own_row * row_strands) * np.int32(dims + 2))

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
        slots_a_warp,
        parts,
        errors,
    ):
        shared = cuda.shared.array(0, np.float32, 16)
        words = cuda.local.array(cells, np.uint32)
        pair_words = cuda.local.array(pair_cells, np.uint32)
        values = cuda.local.array(cells, np.float32)
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
        block = np.int32(cuda.blockIdx.x)
        part = np.int32(0)
        if parts > 1:
            block = whole_quotient(block, parts)
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
        states = (
            origin, state_stride, column_stride, beside, beside_start, np.int64(beside_step), np.int32(states_a_row),
        )  # fmt: skip
        pitch = np.int32(dims + 2)
        slot_cells = np.int32(MERGE_DEPTH * pitch)
        ring = np.int32(warp * slots_a_warp * slot_cells)
        buffers = (shared, shared_address(shared) if staged else np.int32(0), words, values, pair_words, pairs)
        most = min(np.int32(states_a_row - start), np.int32(PART)) if is_row else np.int32(0)
        most_rounds = _rounds_of(most)
        # Before it is known how many states count: what is read too much is not used.
        read = np.int32(0)
        for slot in range(slots):
            step = np.int32(own + slot * STRANDS)
            if step < most_rounds:
                first = np.int32(start + step * MERGE_DEPTH)
                offset = origin + np.int64(first) * pitch
                start_round(source, states, offset, first, dims, np.int32(ring + slot * slot_cells), buffers)
                read = np.int32(slot + 1)
            if staged:
                close_group()
        end = most
        is_written = is_row
        if not are_results and beside.size > 0:
            is_first = part == 0 and own == 0 and cuda.laneid == 0 and is_row
            sample = whole_quotient(np.int32(row), heads)
            reports = reports_lengths and is_first and row == np.int64(sample) * heads
            chunks = chunk_count(beside, beside_start, beside_step, chunk_size, max_chunks, sample, reports, errors)
            counted = whole_quotient(np.int32(chunks + chunks_a_state - 1), chunks_a_state)
            is_written = is_row and (part == 0 or start < counted)
            end = max(min(most, np.int32(counted - start)), np.int32(0))
        rounds = _rounds_of(end)
        strands = min(rounds, np.int32(STRANDS))
        row_max = EMPTY_MAX
        row_total = _ZERO
        bad = False
        mends = False
        adding = True
        while adding:
            adding = False
            used = np.int32(0)
            for slot in range(slots):
                if own + slot * STRANDS < rounds and not mends:
                    used = np.int32(slot + 1)
            if staged and used < read:
                wait_for_copies()
            # The round that comes to its slot next.
            ahead = own
            ahead_step = np.int32(own + used * STRANDS)
            if ahead_step >= rounds:
                ahead = np.int32(own + row_warps)
                ahead_step = ahead
            if used == 0:
                ahead = own
                ahead_step = own
            ahead_offset = origin + np.int64(np.int32(start + ahead_step * MERGE_DEPTH)) * pitch
            for slot in range(slots):
                if slot >= used:
                    if _is_there(ahead, ahead_step, rounds):
                        first = np.int32(start + ahead_step * MERGE_DEPTH)
                        start_round(
                            source, states, ahead_offset, first, dims, np.int32(ring + slot * slot_cells), buffers
                        )
                        ahead, next_step = _later(ahead, ahead_step, rounds, row_warps)
                        ahead_offset += np.int32((next_step - ahead_step) * slot_cells)
                        ahead_step = next_step
                    if staged:
                        close_group()
            for element in range(elements):
                sums[element] = _ZERO
            row_max = EMPTY_MAX
            row_total = _ZERO
            strand = own
            step = own
            slot_cell = ring
            while _is_there(strand, step, rounds):
                left = np.int32(end - step * MERGE_DEPTH)
                take_round(source, left, dims, slot_cell, buffers)
                for each in range(MERGE_DEPTH):
                    tops[each], totals[each] = pairs[2 * each], pairs[2 * each + 1]
                if _is_there(ahead, ahead_step, rounds):
                    first = np.int32(start + ahead_step * MERGE_DEPTH)
                    start_round(source, states, ahead_offset, first, dims, slot_cell, buffers)
                    ahead, next_step = _later(ahead, ahead_step, rounds, row_warps)
                    ahead_offset += np.int32((next_step - ahead_step) * slot_cells)
                    ahead_step = next_step
                if staged:
                    close_group()
                    slot_cell = np.int32(slot_cell + slot_cells)
                    if slot_cell == np.int32(ring + slots * slot_cells):
                        slot_cell = ring
                common_max = row_max
                for each in range(MERGE_DEPTH):
                    top, total = tops[each], totals[each]
                    is_there = (left > each) & (not (top <= dead_max))
                    # Where their sum overflows it is looked for something bad, and not found.
                    bad |= is_there & (not (abs(top) + abs(total) <= FLOAT32_MAX))
                    is_counted = is_there & counts(top, total, dead_max)
                    tops[each] = top if is_counted else EMPTY_MAX
                    totals[each] = total if is_counted else _ZERO
                    common_max = maximum(common_max, tops[each])
                if mends:
                    # A loop: written out, it would be in the way of all that have nothing to mend.
                    turn = np.int32(0)
                    while turn < cells:
                        is_fine = abs(values[0]) <= FLOAT32_MAX
                        bad |= not is_fine
                        values[0] = values[0] if is_fine else _ZERO
                        rotate(values)
                        turn = opaque(np.int32(turn + 1))
                factor = rescaling(row_max, common_max)
                row_max = common_max
                row_total *= factor
                if mends and factor == _ZERO:
                    # What has overflowed without carrying any weight is gone.
                    for element in range(elements):
                        sums[element] = _ZERO
                for element in range(elements):
                    sums[element] *= factor
                for each in range(MERGE_DEPTH):
                    weight = rescaling(tops[each], row_max)
                    is_counted = totals[each] > _ZERO
                    row_total += totals[each] * weight
                    for element in range(elements):
                        value = values[each * elements + element]
                        sums[element] += weight * (value if is_counted else _ZERO)
                next_strand, step = _later(strand, step, rounds, row_warps)
                if next_strand != strand:
                    cell = np.int32(strands_cell(own_row, slots_a_warp, dims, states_a_row) + strand * pitch)
                    for element in range(elements):
                        column = np.int32((cuda.laneid + element // width * 32) * width + element % width)
                        if column < dims:
                            set_element(shared, np.int64(np.int32(cell + column)), sums[element])
                        # One value that is not finite makes a sum that is not: only then are they looked at one by one.
                        adding |= not (abs(sums[element]) <= FLOAT32_MAX)
                        sums[element] = _ZERO
                    if cuda.laneid == 0:
                        set_element(shared, np.int64(np.int32(cell + dims)), row_max)
                        set_element(shared, np.int64(np.int32(cell + dims + 1)), row_total)
                    row_max = EMPTY_MAX
                    row_total = _ZERO
                strand = opaque(next_strand)
            if staged:
                wait_for_copies()
            adding = any_lane(adding, FULL_MASK) and not mends
            mends = adding
        # The strands of each row are there.
        if row_warps > 1:
            cuda.syncthreads()
        else:
            sync_warp()
        # Made anew: kept, these would take registers.
        first_cell = strands_cell(own_row, slots_a_warp, dims, states_a_row)
        row = np.int64(first_row) + opaque(local_row)
        if is_written:
            limit = HALF_MAX if output.itemsize == 2 else FLOAT32_MAX
            column = np.int32(own * 32 + cuda.laneid)
            while column < dims:
                # Rows of few states are many: their strand is not looked for among others.
                if strands == 0:
                    common_max, total, value = EMPTY_MAX, _ZERO, _ZERO
                elif strands == 1:
                    common_max, total, value = only_column(shared, first_cell, pitch, strands, dims, column)
                else:
                    common_max, total, value = merge_column(shared, first_cell, pitch, strands, dims, column)
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
            last_row = min(opaque(local_row), np.int32(rows - 1))
            place = row_place(last_row, size1, magic1, shift1, size2, magic2, shift2)
            origin = source_origin + row_offset(place, source_stride0, source_stride1, source_stride2)
            beside_start = beside_origin + row_offset(place, beside_stride0, beside_stride1, beside_stride2)
            state_place = (
                origin, state_stride, column_stride, beside, beside_start, np.int64(beside_step),
                np.int64(states_a_row), start,
            )  # fmt: skip
            report_states(
                source, state_place, own, end, row_warps, row, np.int64(all_rows), np.int64(dims), dead_max, errors
            )

    return flash_merge_kernel
