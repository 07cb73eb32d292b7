"""The kernel that copies tokens to the rows they were given, and clears the rows that nobody got.

block b < copy_blocks   groups of lanes, each with a piece of a token (moe_launches.RowPieces): read once, stored to
                        every row of the token
the others              a part of the unused rows of an expert each
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.experts import finite_word
from burt_numba.device.launch_order import wait_for_previous
from burt_numba.device.numeric import opaque, whole_quotient
from burt_numba.device.rows import report_not_finite
from burt_numba.device.vector import element_at, load_vector, store_words
from burt_numba.device.warp import any_lane, group_mask
from burt_numba.moe_launches import COPY_BLOCK, COPY_DEPTH


@cache
def copy_kernel(vector: int, half: int):
    """The kernel for accesses of ``vector`` elements, of float16 or of float32."""
    words_each = max(vector // 2, 1) if half else vector
    word_cells = COPY_DEPTH * vector
    load, store = load_vector(vector), store_words(vector)
    finite = finite_word(half)

    @cuda.jit(device=True)
    def copy_piece(
        tokens, origin, token_stride, column_stride, dispatch_indices, expert_inputs, token, choices, capacity, columns,
        first, lanes, words, errors,
    ):  # fmt: skip
        """A group of lanes copies columns of a token: each lane its own, ``first`` and every so many on."""
        step_columns = lanes * vector
        offset = origin + np.int64(token) * token_stride
        for step in range(COPY_DEPTH):
            column = first + step * step_columns
            if column < columns:
                load(tokens, offset + column * column_stride, words, step * vector)
        # The token is an input, which no earlier launch of the call writes.
        wait_for_previous()
        bad = False
        for step in range(COPY_DEPTH):
            if first + step * step_columns < columns:
                for word in range(step * vector, step * vector + words_each):
                    cleaned = finite(words[word])
                    if cleaned != words[word]:
                        bad = True
                    words[word] = cleaned
        is_placed = False
        place = np.int64(token) * choices * 2
        for choice in range(choices):
            expert = element_at(dispatch_indices, place + 2 * choice)
            position = element_at(dispatch_indices, place + 2 * choice + 1)
            if expert >= 0:
                is_placed = True
                row = (np.int64(expert) * capacity + position) * columns + first
                for step in range(COPY_DEPTH):
                    if first + step * step_columns < columns:
                        store(expert_inputs, row + step * step_columns, words, step * vector)
        mask = group_mask(lanes)
        if is_placed and any_lane(bad, mask):
            first, token = opaque(first), opaque(token)
            last = np.int64(min(first - cuda.laneid % lanes * vector + COPY_DEPTH * step_columns, columns))
            report_not_finite(
                tokens, origin + np.int64(token) * token_stride, column_stride, np.int64(first), vector, last,
                np.int64(step_columns), np.int64(token) * columns, errors, lanes, mask,
            )  # fmt: skip

    @cuda.jit(device=True)
    def clear_part(expert_inputs, expert_counts, expert, part, part_elements, capacity, columns, words):
        """A block clears what an expert has not used of a part of its rows."""
        start = np.int64(expert) * capacity * columns
        first = max(np.int64(part) * part_elements, np.int64(element_at(expert_counts, expert)) * columns)
        last = min((np.int64(part) + 1) * part_elements, capacity * columns)
        for word in range(words_each):
            words[word] = np.uint32(0)
        for element in range(first + np.int64(cuda.threadIdx.x) * vector, last, np.int64(COPY_BLOCK * vector)):
            store(expert_inputs, start + element, words, 0)

    @cuda.jit
    def moe_copy_kernel(
        tokens,
        origin,
        token_stride,
        column_stride,
        dispatch_indices,
        expert_counts,
        expert_inputs,
        num_tokens,
        choices,
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
        block = np.int32(cuda.blockIdx.x)
        lanes = np.int32(1) << lanes_shift
        if block < copy_blocks:
            group = np.int32((np.int64(block) * COPY_BLOCK + cuda.threadIdx.x) >> lanes_shift)
            token = whole_quotient(group, pieces)
            piece = np.int32(group - token * pieces)
            first = np.int32((piece * COPY_DEPTH * lanes + (cuda.laneid & (lanes - 1))) * vector)
            if token < num_tokens:
                copy_piece(
                    tokens, origin, token_stride, column_stride, dispatch_indices, expert_inputs, token, choices,
                    capacity, columns, first, lanes, words, errors,
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
