"""The kernel that adds up the rows of each token's experts, weighted.

A group of lanes has a piece of a token (moe_launches.RowPieces) and adds its rows up in the order of the choices, a few
of them in flight.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.events import DIM_MISMATCH, record_bad_elements, record_event
from burt_numba.device.experts import OUT_OF_RANGE, SKIPPED, finite_weight
from burt_numba.device.numeric import FLOAT32_MAX, opaque, whole_quotient
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.vector import element_at, load_vector, store_vector, unpack_vectors
from burt_numba.device.warp import any_lane, group_mask
from burt_numba.moe_launches import COMBINE_DEPTH, COMBINE_ROWS

_ZERO = np.float32(0.0)
_HALF_MAX = np.float32(65519.996)
"""The largest float32 number that is rounded to a finite float16."""


@cuda.jit(device=True)
def _entry(indices, place, choice):
    """(expert, position) as they are in the array."""
    start, choice_stride, pair_stride = place
    offset = start + choice * choice_stride
    return np.int64(element_at(indices, offset)), np.int64(element_at(indices, offset + pair_stride))


@cuda.jit(device=True)
def _checked(expert, position, experts, capacity):
    """The expert; SKIPPED where the choice was not placed, OUT_OF_RANGE where there is no such row."""
    if expert >= 0 and expert < experts and position >= 0 and position < capacity:
        return expert
    return np.int64(SKIPPED if expert == -1 and position == -1 else OUT_OF_RANGE)


@cuda.jit(device=True)
def _row_of(indices, place, choice, experts, capacity):
    expert, position = _entry(indices, place, choice)
    return _checked(expert, position, experts, capacity), position


@cuda.jit(device=True)
def _normaliser(indices, place, weights, weights_start, weights_stride, choices, experts, capacity):
    """1 over the sum of the weights of a token's placed choices; 0 where that is 0.

    In float64, since neither a sum of float32 numbers nor its reciprocal need be one.
    """
    total = np.float64(0.0)
    for choice in range(choices):
        expert, _position = _row_of(indices, place, choice, experts, capacity)
        if expert >= 0:
            total += np.float64(finite_or_zero(np.float32(weights[weights_start + choice * weights_stride])))
    return np.float64(1.0) / total if total != 0 else total


@cuda.jit(device=True)
def _report_entries(indices, place, weights, weights_start, weights_stride, token, choices, experts, capacity, errors):
    """One thread reports the entries of a token that name no row, and the weights that are not finite."""
    for choice in range(choices):
        expert, _position = _row_of(indices, place, choice, experts, capacity)
        flat = token * choices + choice
        if expert == OUT_OF_RANGE:
            record_event(errors, DIM_MISMATCH, 1, flat)
        elif expert >= 0:
            finite_weight(weights, weights_start + choice * weights_stride, flat, errors)


@cache
def combine_kernel(vector: int, half: int):
    """The kernel for accesses of ``vector`` elements, of float16 or of float32."""
    elements = COMBINE_DEPTH * vector
    row_elements = COMBINE_ROWS * elements
    entry_cells = 2 * COMBINE_ROWS
    load, store = load_vector(vector), store_vector(vector)
    unpack = unpack_vectors(vector, COMBINE_ROWS * COMBINE_DEPTH)
    limit = _HALF_MAX if half else FLOAT32_MAX

    @cuda.jit(device=True)
    def read_entries(indices, place, start, choices, entries):
        """Where the rows of some choices are, all on their way together; SKIPPED beyond the last."""
        for row in range(COMBINE_ROWS):
            entries[2 * row], entries[2 * row + 1] = np.int64(SKIPPED), np.int64(SKIPPED)
            if start + row < choices:
                entries[2 * row], entries[2 * row + 1] = _entry(indices, place, start + row)

    @cuda.jit(device=True)
    def flat_place(bits, flat, step_columns):
        """Where in the result the lowest of the elements is that a lane's bits name."""
        element = max(cuda.ffs(bits) - 1, 0)
        return flat + element // vector * step_columns + element % vector

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
        entries = cuda.local.array(entry_cells, np.int64)
        shares = cuda.local.array(COMBINE_ROWS, np.float32)
        sums = cuda.local.array(elements, np.float32)
        source = array_at(expert_outputs)
        indices = array_at(dispatch_indices)
        weights = array_at(combine_weights)
        lanes = np.int32(np.int32(1) << lanes_shift)
        lane = np.int32(cuda.laneid & (lanes - 1))
        group = np.int32((np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) >> lanes_shift)
        token = whole_quotient(group, pieces)
        piece = np.int32(group - token * pieces)
        step_columns = np.int32(lanes * vector)
        first = np.int32(piece * COMBINE_DEPTH * step_columns + lane * vector)
        left = np.int32(columns - first)
        if vector > 1:
            column_stride = np.int64(1)
        place = (indices_origin + token * indices_token_stride, indices_choice_stride, pair_stride)
        weights_start = weights_origin + token * weights_token_stride
        if token < tokens:
            for element in range(elements):
                sums[element] = _ZERO
            factor = np.float64(1.0)
            if renormalize:
                factor = _normaliser(
                    indices, place, weights, weights_start, weights_choice_stride, choices, experts, capacity
                )
            bad = False
            bad_entries = False
            read_entries(indices, place, 0, choices, entries)
            for start in range(0, choices, COMBINE_ROWS):
                for row in range(COMBINE_ROWS):
                    shares[row] = _ZERO
                    for word in range(row * elements, (row + 1) * elements):
                        words[word] = np.uint32(0)
                    position = entries[2 * row + 1]
                    expert = _checked(entries[2 * row], position, experts, capacity)
                    if expert == OUT_OF_RANGE:
                        bad_entries = True
                    if expert >= 0:
                        weight_place = weights_start + (start + row) * weights_choice_stride
                        shares[row] = np.float32(element_at(weights, weight_place))
                        offset = source_origin + expert * expert_stride + position * row_stride
                        offset += first * column_stride
                        for step in range(COMBINE_DEPTH):
                            if np.int32(step * step_columns) < left:
                                load(
                                    source,
                                    offset + np.int64(step * step_columns) * column_stride,
                                    words,
                                    row * elements + step * vector,
                                )
                # The next ones are on their way with the rows.
                read_entries(indices, place, start + COMBINE_ROWS, choices, entries)
                for row in range(COMBINE_ROWS):
                    if not_finite(shares[row]):
                        bad_entries = True
                        shares[row] = _ZERO
                    if renormalize:
                        shares[row] = np.float32(shares[row] * factor)
                unpack(source, words, values)
                for row in range(COMBINE_ROWS):
                    for element in range(elements):
                        value = values[row * elements + element]
                        if not_finite(value):
                            bad = True
                        sums[element] += shares[row] * finite_or_zero(value)
            nans = np.int64(0)
            infinities = np.int64(0)
            for element in range(elements):
                if not (abs(sums[element]) <= limit):
                    if sums[element] == sums[element]:
                        infinities |= np.int64(1) << element
                    else:
                        nans |= np.int64(1) << element
                    sums[element] = _ZERO
            flat = np.int64(token) * columns + first
            result = array_at(out)
            for step in range(COMBINE_DEPTH):
                if np.int32(step * step_columns) < left:
                    store(result, flat + step * step_columns, sums, step * vector)

            mask = group_mask(lanes)
            if any_lane(nans | infinities != 0, mask):
                record_bad_elements(
                    errors,
                    np.int32(cuda.popc(nans)),
                    np.int32(cuda.popc(infinities)),
                    flat_place(nans, flat, step_columns),
                    flat_place(infinities, flat, step_columns),
                    lanes,
                    mask,
                )
            if any_lane(bad, mask):
                first = np.int64(opaque(first))
                last = min(first - lane * vector + COMBINE_DEPTH * np.int64(step_columns), np.int64(columns))
                for choice in range(choices):
                    expert, position = _row_of(indices, place, choice, experts, capacity)
                    if expert >= 0:
                        offset = source_origin + expert * expert_stride + position * row_stride
                        flat = (expert * capacity + position) * columns
                        report_not_finite(
                            source, offset, column_stride, first, vector, last, np.int64(step_columns), flat, errors,
                            lanes, mask,
                        )  # fmt: skip
            if bad_entries and lane == 0 and piece == 0:
                _report_entries(
                    indices, place, weights, weights_start, weights_choice_stride, token, choices, experts, capacity,
                    errors,
                )  # fmt: skip

    return moe_combine_kernel
