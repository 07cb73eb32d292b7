"""The kernel that gives out the rows of experts, the same ones on every run.

    order of choices        first choices of tokens 0, 1, ... T - 1, then their second choices, ...
    warp w of block b       takes ``warp_choices`` of them, from (b * warps + w) * warp_choices on
    row of a choice         choices of its expert before it: in blocks before, in warps before, and in its own warp

    area of a block         counts of warp 0 | of warp 1 | ... | of the blocks before | of all   (a cell an expert)
                            | expert and place of each choice of warp 0 | of warp 1 | ...

Choices are first counted, with their places among those of the warp left in the area; then all blocks meet, and what
others have counted is added. Where some expert was full, tokens that got no row are looked for in the same way, in
token order, and get the rows that expert 0 has left.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.coherence import group_barrier
from burt_numba.device.events import CAPACITY_FULL, DIM_MISMATCH, record_event, rolled
from burt_numba.device.experts import OUT_OF_RANGE, SKIPPED, choice_rules
from burt_numba.device.launch_order import let_next_begin
from burt_numba.device.numeric import whole_quotient
from burt_numba.device.vector import element_at, set_element
from burt_numba.device.warp import (
    FULL_MASK,
    any_lane,
    count_lanes,
    count_lanes_before,
    lanes_alike,
    lanes_where,
    sync_warp,
    warp_min,
    warp_sum,
)

_ROWS_AHEAD = 8
"""Counts of other blocks that a thread has in flight."""
_WARPS_AHEAD = 8
_NONE = np.int32(-1)
_chosen_expert, _first_choice = choice_rules(element_at)


@cuda.jit(device=True)
def _set_row(rows, cell, expert, position):
    set_element(rows, cell, expert)
    set_element(rows, cell + 1, position)


@cuda.jit(device=True)
def _later_choice(token, choice, tokens):
    """(token, choice) 32 places further in the order of choices."""
    token = np.int32(token + 32)
    while token >= tokens:
        token = np.int32(token - tokens)
        choice = np.int32(choice + 1)
    return token, choice


@cuda.jit(device=True)
def _read_choice(indices, index_place, token, choice, is_there):
    """What a choice names; padding where it is not there."""
    origin, stride, choice_stride = index_place
    if is_there:
        return np.int64(element_at(indices, origin + token * stride + choice * choice_stride))
    return np.int64(SKIPPED)


@cuda.jit(device=True)
def _add_up_warps(area, start, warps, experts, expert):
    """Counts of an expert in the warps of a block become those of the warps before; returns those of all."""
    few = cuda.local.array(_WARPS_AHEAD, np.int32)
    total = np.int32(0)
    first = np.int32(0)
    while first < warps:
        for step in range(_WARPS_AHEAD):
            few[step] = np.int32(0)
            if first + step < warps:
                few[step] = element_at(area, start + (first + step) * experts + expert)
        for step in range(_WARPS_AHEAD):
            if first + step < warps:
                set_element(area, start + (first + step) * experts + expert, total)
            total = np.int32(total + few[step])
        first = np.int32(first + _WARPS_AHEAD)
    return total


@cuda.jit(device=True)
def _add_up_blocks(block_counts, blocks, block, experts, area, before_place, total_place):
    """Add to the sums of the area what the blocks before, and all blocks, have counted of each expert."""
    few = cuda.local.array(_ROWS_AHEAD, np.int32)
    thread = np.int32(cuda.threadIdx.x)
    threads = np.int32(cuda.blockDim.x)
    # Where there are more threads than experts, several share the blocks of one.
    sharers = max(whole_quotient(threads, experts), np.int32(1))
    sharer = whole_quotient(thread, experts) if sharers > 1 else np.int32(0)
    expert = np.int32(thread - sharer * experts)
    while sharer < sharers and expert < experts:
        before = np.int32(0)
        total = np.int32(0)
        first = sharer
        while first < blocks:
            for step in range(_ROWS_AHEAD):
                row = np.int32(first + step * sharers)
                few[step] = np.int32(0)
                if row < blocks:
                    few[step] = element_at(block_counts, np.int64(row) * experts + expert)
            for step in range(_ROWS_AHEAD):
                if np.int32(first + step * sharers) < block:
                    before = np.int32(before + few[step])
                total = np.int32(total + few[step])
            first = np.int32(first + _ROWS_AHEAD * sharers)
        cuda.atomic.add(area, before_place + expert, before)
        cuda.atomic.add(area, total_place + expert, total)
        expert = np.int32(expert + threads)


@cuda.jit(device=True)
def _choice_without_room(token, indices, index_place, dispatch_indices, choices, experts):
    """The choice whose expert 0 may take a token of which none was placed; -1 for other tokens."""
    place = np.int64(token) * choices
    for choice in range(choices):
        if element_at(dispatch_indices, 2 * (place + choice)) >= 0:
            return _NONE
    origin, stride, choice_stride = index_place
    return _first_choice(indices, origin + np.int64(token) * stride, choice_stride, choices, experts)


@cache
def positions_kernel(staged: int):
    """The kernel. ``staged``: the area of a block is in dynamic shared memory.

    Else it is in the workspace, but for the choices, which wait in the output.
    """

    # Cells of shared memory are few.
    cell_type = np.int32 if staged else np.int64

    @cuda.jit
    def moe_positions_kernel(
        top_k_indices,
        index_origin,
        index_stride,
        index_choice_stride,
        tokens,
        choices,
        experts,
        capacity,
        warp_choices,
        warp_tokens,
        dispatch_indices,
        expert_counts,
        num_dropped,
        num_overflowed,
        block_counts,
        found_counts,
        areas,
        barriers,
        errors,
    ):
        """``capacity`` is at most tokens * choices."""
        found_by_warp = cuda.shared.array(32, np.int32)
        area = cuda.shared.array(0, np.int32)
        let_next_begin()
        top_k_indices = array_at(top_k_indices)
        dispatch_indices = array_at(dispatch_indices)
        expert_counts = array_at(expert_counts)
        block_counts = array_at(block_counts)
        found_counts = array_at(found_counts)
        barriers = array_at(barriers)
        thread = np.int32(cuda.threadIdx.x)
        threads = np.int32(cuda.blockDim.x)
        block = np.int32(cuda.blockIdx.x)
        blocks = np.int32(cuda.gridDim.x)
        lane = np.int32(thread & 31)
        warp = np.int32(thread >> 5)
        warps = np.int32(threads >> 5)
        start = cell_type(0)
        if not staged:
            area = array_at(areas)
            start = np.int64(block) * (warps + 2) * experts
        own = cell_type(start + cell_type(warp) * experts)
        before_place = cell_type(start + cell_type(warps) * experts)
        total_place = cell_type(before_place + experts)
        waiting = np.int32(total_place + experts + 2 * warp * warp_choices)
        cell = cell_type(start + thread)
        while cell < total_place + experts:
            set_element(area, cell, np.int32(0))
            cell = cell_type(cell + threads)
        cuda.syncthreads()  # all counts are zero

        index_place = (index_origin, index_stride, index_choice_stride)
        end = np.int32(tokens * choices)
        first = np.int32(min((np.int64(block) * warps + warp) * warp_choices, np.int64(end)))
        last = np.int32(min(np.int64(first) + warp_choices, np.int64(end)))
        first_choice_of_lane = np.int32(0)
        if tokens > 0:
            first_choice_of_lane = whole_quotient(np.int32(first + lane), tokens)
        token = np.int32(first + lane - first_choice_of_lane * tokens)
        choice = first_choice_of_lane
        upcoming = _read_choice(top_k_indices, index_place, token, choice, first + lane < last)
        for group in range(first, last, 32):
            index = upcoming
            offset = index_origin + token * index_stride
            place = np.int64(token) * choices + choice
            earlier_choices = choice
            # Under way while this group is counted.
            token, choice = _later_choice(token, choice, tokens)
            upcoming = _read_choice(top_k_indices, index_place, token, choice, group + 32 + lane < last)
            expert = _chosen_expert(index, top_k_indices, offset, index_choice_stride, earlier_choices, experts)
            alike = lanes_alike(expert, FULL_MASK)
            before = np.int32(0)
            if expert >= 0:
                before = element_at(area, own + expert)
            sync_warp()  # all lanes have read
            if expert >= 0 and count_lanes_before(alike) == 0:
                set_element(area, own + expert, before + count_lanes(alike))
            sync_warp()  # the counts hold the group
            wrong = expert == OUT_OF_RANGE
            if any_lane(wrong, FULL_MASK):
                count = count_lanes(lanes_where(wrong, FULL_MASK))
                lowest = warp_min(place if wrong else np.int64(end), 32, FULL_MASK)
                if lane == 0:
                    record_event(errors, DIM_MISMATCH, count, lowest)
            if group + lane < last:
                # Its place among those of the warp, until those before are known.
                before = np.int32(before + count_lanes_before(alike))
                if staged:
                    _set_row(area, waiting + 2 * (group - first + lane), expert, before)
                else:
                    _set_row(dispatch_indices, 2 * place, expert, before)
        cuda.syncthreads()  # the warps have counted

        expert = thread
        while expert < experts:
            total = _add_up_warps(area, start, warps, experts, expert)
            if blocks > 1:
                set_element(block_counts, np.int64(block) * experts + expert, total)
            else:
                set_element(area, total_place + expert, total)
            expert = np.int32(expert + threads)
        group_barrier(barriers, 0, blocks)
        if blocks > 1:
            _add_up_blocks(block_counts, blocks, block, experts, area, before_place, total_place)
            cuda.syncthreads()  # the sums are complete

        choice = first_choice_of_lane
        token = np.int32(first + lane - choice * tokens)
        for group in range(first, last, 32):
            if group + lane < last:
                place = np.int64(token) * choices + choice
                rows, cell = dispatch_indices, 2 * place
                if staged:
                    rows, cell = area, waiting + 2 * (group - first + lane)
                expert, position = element_at(rows, cell), element_at(rows, cell + 1)
                if expert >= 0:
                    before = element_at(area, own + expert) + element_at(area, before_place + expert)
                    position = np.int32(position + before)
                if expert < 0 or position >= capacity:
                    expert, position = SKIPPED, _NONE
                _set_row(dispatch_indices, 2 * place, expert, position)
            token, choice = _later_choice(token, choice, tokens)

        is_full = np.int32(0)
        expert = thread
        while expert < experts:
            total = element_at(area, total_place + expert)
            if total > capacity:
                is_full = np.int32(1)
            if block == 0 and expert > 0:
                set_element(expert_counts, expert, min(total, capacity))
            expert = np.int32(expert + threads)
        own_rows = min(element_at(area, total_place), capacity)
        found = np.int32(0)
        if cuda.syncthreads_or(is_full) != 0:
            group_barrier(barriers, 0, blocks)  # all choices have been given their rows
            first = np.int32(min((np.int64(block) * warps + warp) * warp_tokens, np.int64(tokens)))
            last = np.int32(min(np.int64(first) + warp_tokens, np.int64(tokens)))
            before = np.int32(0)
            for turn in range(rolled(2, errors)):
                for group in range(first, last, 32):
                    token = np.int32(group + lane)
                    choice = _NONE
                    if token < last:
                        choice = _choice_without_room(
                            token, top_k_indices, index_place, dispatch_indices, choices, experts
                        )
                    without = lanes_where(choice >= 0, FULL_MASK)
                    position = np.int32(own_rows + before + count_lanes_before(without))
                    before = np.int32(before + count_lanes(without))
                    if turn == 1 and choice >= 0:
                        if position < capacity:
                            place = np.int64(token) * choices + choice
                            _set_row(dispatch_indices, 2 * place, np.int32(0), position)
                        elif position == capacity:
                            # The first that is dropped, on behalf of all.
                            record_event(errors, CAPACITY_FULL, own_rows + found - capacity, token)
                if turn == 0:
                    if lane == 0:
                        found_by_warp[warp] = before
                    cuda.syncthreads()  # the warps have looked
                    count = found_by_warp[lane] if lane < warps else np.int32(0)
                    before = warp_sum(count if lane < warp else np.int32(0), 32, FULL_MASK)
                    count = warp_sum(count, 32, FULL_MASK)
                    if thread == 0:
                        set_element(found_counts, block, count)
                    group_barrier(barriers, 0, blocks)
                    before_block = np.int32(0)
                    for other in range(lane, blocks, 32):
                        count = element_at(found_counts, other)
                        found = np.int32(found + count)
                        if other < block:
                            before_block = np.int32(before_block + count)
                    found = warp_sum(found, 32, FULL_MASK)
                    before = np.int32(before + warp_sum(before_block, 32, FULL_MASK))
        if block == 0 and thread == 0:
            overflowed = min(found, capacity - own_rows)
            set_element(expert_counts, 0, own_rows + overflowed)
            set_element(array_at(num_overflowed), 0, overflowed)
            set_element(array_at(num_dropped), 0, found - overflowed)

    return moe_positions_kernel
