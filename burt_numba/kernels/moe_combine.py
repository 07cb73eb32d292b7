"""The kernel that adds up the rows of each token's experts, weighted.

A group of lanes has a piece of a token (moe_launches.RowPieces) and adds its rows up in the order of the choices, a few
of them in flight.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.events import DIM_MISMATCH, INF_INPUT, NAN_INPUT, record_event, rolled
from burt_numba.device.experts import OUT_OF_RANGE, SKIPPED, finite_weight
from burt_numba.device.numeric import FLOAT32_MAX, whole_quotient
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.vector import load_vector, set_element, store_vector, unpack_vectors
from burt_numba.device.warp import any_lane, group_mask
from burt_numba.moe_launches import COMBINE_BLOCK, COMBINE_DEPTH, COMBINE_ROWS

_ZERO = np.float32(0.0)
_HALF_MAX = np.float32(65519.996)
"""The largest float32 number that is rounded to a finite float16."""


@cuda.jit(device=True)
def _row_of(indices, indices_place, token, choice, experts, capacity):
    """(expert, position) of a choice; SKIPPED where it was not placed, OUT_OF_RANGE where there is no such row."""
    origin, token_stride, choice_stride, pair_stride = indices_place
    offset = origin + token * token_stride + choice * choice_stride
    expert = np.int64(indices[offset])
    position = np.int64(indices[offset + pair_stride])
    if expert >= 0 and expert < experts and position >= 0 and position < capacity:
        return expert, position
    return np.int64(SKIPPED if expert == -1 and position == -1 else OUT_OF_RANGE), position


@cuda.jit(device=True)
def _weight_of(weights, weights_place, token, choice):
    origin, token_stride, choice_stride = weights_place
    return np.float32(weights[origin + token * token_stride + choice * choice_stride])


@cuda.jit(device=True)
def _sum_of_weights(entries, token, choices, experts, capacity):
    """Over the placed choices of a token."""
    indices, indices_place, weights, weights_place = entries
    total = _ZERO
    for choice in range(choices):
        expert, _position = _row_of(indices, indices_place, token, choice, experts, capacity)
        if expert >= 0:
            total += finite_or_zero(_weight_of(weights, weights_place, token, choice))
    return total


@cuda.jit(device=True)
def _share(weight, total, renormalize):
    """A weight, in proportion to the sum of the token's where they are renormalised."""
    weight = finite_or_zero(weight)
    if renormalize:
        weight = weight / total if total != _ZERO else _ZERO
    return weight


@cuda.jit(device=True)
def _report_entries(entries, token, choices, experts, capacity, errors):
    """One thread reports the entries of a token that name no row, and the weights that are not finite."""
    indices, indices_place, weights, weights_place = entries
    for choice in range(choices):
        expert, _position = _row_of(indices, indices_place, token, choice, experts, capacity)
        flat = token * choices + choice
        if expert == OUT_OF_RANGE:
            record_event(errors, DIM_MISMATCH, 1, flat)
        if expert >= 0:
            origin, token_stride, choice_stride = weights_place
            finite_weight(weights, origin + token * token_stride + choice * choice_stride, flat, errors)


@cache
def combine_kernel(vector: int, half: int):
    """The kernel for accesses of ``vector`` elements, of float16 or of float32."""
    elements = COMBINE_DEPTH * vector
    row_elements = COMBINE_ROWS * elements
    load, store = load_vector(vector), store_vector(vector)
    unpack = unpack_vectors(vector, COMBINE_ROWS * COMBINE_DEPTH)
    limit = _HALF_MAX if half else FLOAT32_MAX

    @cuda.jit(device=True)
    def add_slowly(
        source, source_place, entries, out, token, choices, experts, capacity, columns, first, lanes, total,
        renormalize, errors, mask,
    ):  # fmt: skip
        """What a group of lanes does where sums are not finite: look at each element, and add up those that are."""
        origin, expert_stride, row_stride, column_stride = source_place
        indices, indices_place, weights, weights_place = entries
        step_columns = np.int64(lanes * vector)
        last = min(first - cuda.laneid % lanes * vector + COMBINE_DEPTH * step_columns, np.int64(columns))
        for choice in range(choices):
            expert, position = _row_of(indices, indices_place, token, choice, experts, capacity)
            if expert >= 0:
                report_not_finite(
                    source, origin + expert * expert_stride + position * row_stride, column_stride, first, vector, last,
                    step_columns, (expert * capacity + position) * columns, errors, lanes, mask,
                )  # fmt: skip
        for start in range(first, last, step_columns):
            for column in range(start, start + rolled(vector, errors)):
                result = _ZERO
                for choice in range(choices):
                    expert, position = _row_of(indices, indices_place, token, choice, experts, capacity)
                    if expert >= 0:
                        place = origin + expert * expert_stride + position * row_stride + column * column_stride
                        weight = _share(_weight_of(weights, weights_place, token, choice), total, renormalize)
                        result += weight * finite_or_zero(np.float32(source[place]))
                flat = token * columns + column
                if not (abs(result) <= limit):
                    record_event(errors, NAN_INPUT if result != result else INF_INPUT, 1, flat)
                    result = _ZERO
                set_element(out, flat, result)

    @cuda.jit
    def moe_combine_kernel(
        expert_outputs,
        source_origin,
        expert_stride,
        row_stride,
        column_stride,
        dispatch_indices,
        indices_origin,
        indices_token_stride,
        indices_choice_stride,
        pair_stride,
        combine_weights,
        weights_origin,
        weights_token_stride,
        weights_choice_stride,
        out,
        tokens,
        choices,
        experts,
        capacity,
        columns,
        renormalize,
        lanes_shift,
        pieces,
        errors,
    ):
        words = cuda.local.array(row_elements, np.uint32)
        values = cuda.local.array(row_elements, np.float32)
        shares = cuda.local.array(COMBINE_ROWS, np.float32)
        sums = cuda.local.array(elements, np.float32)
        source = array_at(expert_outputs)
        out = array_at(out)
        indices_place = (indices_origin, indices_token_stride, indices_choice_stride, pair_stride)
        weights_place = (weights_origin, weights_token_stride, weights_choice_stride)
        indices = array_at(dispatch_indices)
        weights = array_at(combine_weights)
        entries = (indices, indices_place, weights, weights_place)
        lanes = np.int32(1) << lanes_shift
        lane = np.int32(cuda.laneid & (lanes - 1))
        group = np.int32((np.int64(cuda.blockIdx.x) * COMBINE_BLOCK + cuda.threadIdx.x) >> lanes_shift)
        token = np.int64(whole_quotient(group, pieces))
        piece = np.int32(group - token * pieces)
        step_columns = lanes * vector
        first = np.int64(piece) * COMBINE_DEPTH * step_columns + lane * vector
        if token < tokens:
            for element in range(elements):
                sums[element] = _ZERO
            total = _ZERO
            if renormalize:
                total = _sum_of_weights(entries, token, choices, experts, capacity)
            is_odd = False
            for start in range(0, choices, COMBINE_ROWS):
                for row in range(COMBINE_ROWS):
                    shares[row] = _ZERO
                    for word in range(row * elements, (row + 1) * elements):
                        words[word] = np.uint32(0)
                    if start + row < choices:
                        expert, position = _row_of(indices, indices_place, token, start + row, experts, capacity)
                        if expert == OUT_OF_RANGE:
                            is_odd = True
                        if expert >= 0:
                            weight = _weight_of(weights, weights_place, token, start + row)
                            if not_finite(weight):
                                is_odd = True
                            shares[row] = _share(weight, total, renormalize)
                            offset = source_origin + expert * expert_stride + position * row_stride
                            for step in range(COMBINE_DEPTH):
                                column = first + step * step_columns
                                if column < columns:
                                    load(source, offset + column * column_stride, words, row * elements + step * vector)
                unpack(source, words, values)
                for row in range(COMBINE_ROWS):
                    for element in range(elements):
                        sums[element] += shares[row] * values[row * elements + element]
            is_bad = False
            for element in range(elements):
                if not (abs(sums[element]) <= limit):
                    is_bad = True
            mask = group_mask(lanes)
            if any_lane(is_bad, mask):
                add_slowly(
                    source, (source_origin, expert_stride, row_stride, column_stride), entries, out, token, choices,
                    experts, capacity, columns, first, lanes, total, renormalize, errors, mask,
                )  # fmt: skip
            else:
                for step in range(COMBINE_DEPTH):
                    column = first + step * step_columns
                    if column < columns:
                        store(out, token * columns + column, sums, step * vector)
            if is_odd and lane == 0 and piece == 0:
                _report_entries(entries, token, choices, experts, capacity, errors)

    return moe_combine_kernel
