"""The kernel that copies tokens to the rows they were given, with their weights, and clears the rows that nobody got.

block b < copy_blocks   groups of lanes, each with a piece of a token (moe_launches.RowPieces): read once, stored to
                        every row of the token
the others              a part of the unused rows of an expert each
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.experts import finite_weight, finite_word
from burt_numba.device.launch_order import wait_for_previous
from burt_numba.device.numeric import opaque, whole_quotient
from burt_numba.device.rows import not_finite, report_not_finite
from burt_numba.device.vector import element_at, load_vector, set_element, store_words
from burt_numba.device.warp import any_lane, group_mask
from burt_numba.moe_launches import COPY_DEPTH

_ZERO = np.float32(0.0)
_NOWHERE = np.int64(1 << 62)


@cuda.jit(device=True)
def _weight_place(indices, index_place, weight_place, token, choice, experts):
    """(expert that a choice names, where its weight lies); a choice that names none has no weight."""
    origin, stride, choice_stride = index_place
    index = np.int64(indices[origin + token * stride + choice * choice_stride])
    origin, stride, expert_stride = weight_place
    return index, origin + token * stride + index * expert_stride if index >= 0 and index < experts else _NOWHERE


@cuda.jit(device=True)
def _guess_weights(
    combine_weights, indices, index_place, weights, weight_place, token, choices, experts, lane, lanes
):  # fmt: skip
    """The weights of a token's choices, as if all had been placed; says whether one is not finite."""
    bad = False
    choice = lane
    while choice < choices:
        _index, place = _weight_place(indices, index_place, weight_place, token, choice, experts)
        weight = _ZERO
        if place != _NOWHERE:
            weight = np.float32(weights[place])
            if not_finite(weight):
                bad = True
                weight = _ZERO
        set_element(combine_weights, np.int64(token) * choices + choice, weight)
        choice = np.int32(choice + lanes)
    return bad


@cuda.jit(device=True)
def _settle_weights(
    combine_weights, dispatch_indices, indices, index_place, weights, weight_place, token, choices, experts, lane,
    lanes, bad, errors,
):  # fmt: skip
    """Take back the weights of choices that were not placed, and report those of the others that are not finite."""
    choice = lane
    while choice < choices:
        flat = np.int64(token) * choices + choice
        if element_at(dispatch_indices, 2 * flat) < 0:
            set_element(combine_weights, flat, _ZERO)
        elif bad:
            index, place = _weight_place(indices, index_place, weight_place, token, choice, experts)
            finite_weight(weights, place, np.int64(token) * experts + index, errors)
        choice = np.int32(choice + lanes)


@cache
def copy_kernel(vector: int, half: int):
    """The kernel for accesses of ``vector`` elements, of float16 or of float32."""
    words_each = max(vector // 2, 1) if half else vector
    word_cells = COPY_DEPTH * vector
    load, store = load_vector(vector), store_words(vector)
    finite = finite_word(half)

    @cuda.jit(device=True)
    def load_piece(tokens, source, column_stride, step_columns, left, words):
        """Columns of a token, every ``step_columns`` from ``source`` on, as far as some are ``left``."""
        for step in range(COPY_DEPTH):
            if np.int32(step * step_columns) < left:
                load(tokens, source + np.int64(step * step_columns) * column_stride, words, step * vector)

    @cuda.jit(device=True)
    def store_piece(expert_inputs, row, step_columns, left, words):
        for step in range(COPY_DEPTH):
            if np.int32(step * step_columns) < left:
                store(expert_inputs, row + step * step_columns, words, step * vector)

    @cuda.jit(device=True)
    def read_row(dispatch_indices, cell):
        return element_at(dispatch_indices, cell), element_at(dispatch_indices, cell + 1)

    @cuda.jit(device=True)
    def clean_piece(step_columns, left, words):
        """What is not finite becomes 0; says whether something was not."""
        bad = False
        for step in range(COPY_DEPTH):
            if np.int32(step * step_columns) < left:
                for word in range(step * vector, step * vector + words_each):
                    cleaned = finite(words[word])
                    if cleaned != words[word]:
                        bad = True
                    words[word] = cleaned
        return bad

    @cuda.jit(device=True)
    def clear_part(expert_inputs, expert_counts, expert, part, part_elements, capacity, columns, words):
        """A block clears what an expert has not used of a part of its rows."""
        start = np.int64(expert) * capacity * columns
        first = max(np.int64(part) * part_elements, np.int64(element_at(expert_counts, expert)) * columns)
        last = min((np.int64(part) + 1) * part_elements, capacity * columns)
        for word in range(words_each):
            words[word] = np.uint32(0)
        element = first + np.int64(cuda.threadIdx.x) * vector
        while element < last:
            store(expert_inputs, start + element, words, 0)
            element += np.int64(cuda.blockDim.x) * vector

    @cuda.jit
    def moe_copy_kernel(
        tokens,
        origin,
        token_stride,
        column_stride,
        top_k_indices,
        index_origin,
        index_stride,
        index_choice_stride,
        routing_weights,
        weight_origin,
        weight_stride,
        weight_expert_stride,
        dispatch_indices,
        expert_counts,
        combine_weights,
        expert_inputs,
        num_tokens,
        choices,
        experts,
        capacity,
        columns,
        lanes_shift,
        pieces,
        copy_blocks,
        parts,
        part_elements,
        errors,
    ):
        words = cuda.local.array(word_cells, np.uint32)
        tokens = array_at(tokens)
        dispatch_indices = array_at(dispatch_indices)
        expert_inputs = array_at(expert_inputs)
        indices = array_at(top_k_indices)
        weights = array_at(routing_weights)
        weights_out = array_at(combine_weights)
        index_place = (index_origin, index_stride, index_choice_stride)
        weight_place = (weight_origin, weight_stride, weight_expert_stride)
        block = np.int32(cuda.blockIdx.x)
        lanes = np.int32(1) << lanes_shift
        if block < copy_blocks:
            group = np.int32((np.int64(block) * cuda.blockDim.x + cuda.threadIdx.x) >> lanes_shift)
            token = whole_quotient(group, pieces)
            piece = np.int32(group - token * pieces)
            lane = np.int32(cuda.laneid & (lanes - 1))
            first = np.int32((piece * COPY_DEPTH * lanes + lane) * vector)
            if token < num_tokens:
                step_columns = np.int32(lanes * vector)
                left = np.int32(columns - first)
                if vector > 1:
                    column_stride = np.int64(1)
                offset = origin + np.int64(token) * token_stride
                # Inputs of the call, which no launch still writes, are read before rows have been given out.
                load_piece(tokens, offset + first * column_stride, column_stride, step_columns, left, words)
                bad_weights = False
                if piece == 0:
                    bad_weights = _guess_weights(
                        weights_out, indices, index_place, weights, weight_place, token, choices, experts, lane, lanes
                    )
                wait_for_previous()  # rows have been given out
                bad = clean_piece(step_columns, left, words)
                is_placed = False
                place = np.int64(token) * choices * 2
                next_expert, next_position = np.int32(-1), np.int32(0)
                if choices > 0:
                    next_expert, next_position = read_row(dispatch_indices, place)
                for choice in range(choices):
                    expert, position = next_expert, next_position
                    if choice + 1 < choices:
                        # On its way while the tokens go to the row before.
                        next_expert, next_position = read_row(dispatch_indices, place + 2 * (choice + 1))
                    if expert >= 0:
                        is_placed = True
                        row = (np.int64(expert) * capacity + position) * columns + first
                        store_piece(expert_inputs, row, step_columns, left, words)
                if piece == 0:
                    _settle_weights(
                        weights_out, dispatch_indices, indices, index_place, weights, weight_place, token, choices,
                        experts, lane, lanes, bad_weights, errors,
                    )  # fmt: skip
                mask = group_mask(lanes)
                if is_placed and any_lane(bad, mask):
                    first, token = opaque(first), opaque(token)
                    last = np.int64(min(first - lane * vector + COPY_DEPTH * step_columns, columns))
                    report_not_finite(
                        tokens, offset, column_stride, np.int64(first), vector, last, np.int64(step_columns),
                        np.int64(token) * columns, errors, lanes, mask,
                    )  # fmt: skip
        else:
            wait_for_previous()
            cleared = np.int32(block - copy_blocks)
            expert = whole_quotient(cleared, parts)
            clear_part(
                expert_inputs, array_at(expert_counts), expert, cleared - expert * parts, part_elements, capacity,
                columns, words,
            )  # fmt: skip

    return moe_copy_kernel
