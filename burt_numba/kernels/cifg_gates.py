"""The kernels for gates, before the sigmoid: W_f [h; x] + b_f for one sample, and as a tiled product for a batch."""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.events import INF_INPUT, NAN_INPUT, record_event
from burt_numba.device.numeric import sigmoid_pair
from burt_numba.device.row_reductions import row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.vector import load_vector, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane, warp_sum
from burt_numba.target import GATE_COLUMNS, GATE_SAMPLES, GATE_THREADS

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_WARPS = GATE_THREADS // 32
_LOADS = 4
"""Vectors of W_f in flight for a lane."""
_EACH = 4
"""Samples and columns of a lane: 16 products for 8 loads."""
_block_max = row_reductions(GATE_THREADS).maximum


@cuda.jit(device=True)
def _with_bias(total, bias, place, column, reports, flat, errors):
    """A product with its bias; what is not finite is reported and counts as 0."""
    own = bias[place]
    if not_finite(own):
        if reports:
            record_event(errors, NAN_INPUT if own != own else INF_INPUT, 1, column)
        own = _ZERO
    total += own
    if total != total:
        # Products beyond float32 of both signs.
        record_event(errors, INF_INPUT, 1, flat)
        total = _ZERO
    return total


@cache
def gate_kernel(vector: int):
    """The kernel for the gate of one sample: a warp a row of W_f, loads of ``vector`` elements."""
    load = load_vector(vector)
    unpack = unpack_vectors(vector, _LOADS)
    unpack_one = unpack_vectors(vector, 1)
    cells = _LOADS * vector
    stride = 32 * vector

    @cuda.jit(device=True)
    def part_product(weights, offset, weight_stride, source, origin, source_stride, count, buffers):
        """A lane's part of the product of a part of a row of W_f with h or x, which count as 0 where not finite."""
        words, values, few_words, few = buffers
        total = _ZERO
        for first in range(cuda.laneid * vector, count, _LOADS * stride):
            for part in range(_LOADS):
                column = first + part * stride
                if column < count:
                    load(weights, offset + (column if vector > 1 else column * weight_stride), words, part * vector)
                else:
                    for element in range(vector):
                        words[part * vector + element] = np.uint32(0)
            unpack(weights, words, values)
            for part in range(_LOADS):
                column = first + part * stride
                if column < count:
                    load(source, origin + (column if vector > 1 else column * source_stride), few_words, 0)
                    unpack_one(source, few_words, few)
                    for element in range(vector):
                        total += values[part * vector + element] * few[element]
        return total

    @cuda.jit(device=True)
    def careful_product(weights, offset, weight_stride, source, origin, source_stride, count):
        """The same, element by element, what is not finite counted as 0."""
        total = _ZERO
        for column in range(cuda.laneid, count, 32):
            weight = finite_or_zero(weights[offset + column * weight_stride])
            total += weight * finite_or_zero(source[origin + column * source_stride])
        return total

    @cuda.jit
    def cifg_gate_kernel(
        hidden,
        hidden_origin,
        hidden_stride,
        inputs,
        inputs_origin,
        inputs_stride,
        weights,
        weights_origin,
        weights_stride0,
        weights_stride1,
        bias,
        bias_origin,
        bias_stride,
        columns,
        width,
        activations,
        forget_gate_out,
        errors,
    ):
        words = cuda.local.array(cells, np.uint32)
        values = cuda.local.array(cells, np.float32)
        few_words = cuda.local.array(vector, np.uint32)
        few = cuda.local.array(vector, np.float32)
        buffers = (words, values, few_words, few)
        row = np.int64(cuda.blockIdx.x) * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5)
        rest = width - columns
        if row < columns:
            offset = weights_origin + row * weights_stride0
            second = offset + np.int64(columns) * weights_stride1
            total = part_product(
                weights, offset, weights_stride1, hidden, hidden_origin, hidden_stride, columns, buffers
            ) + part_product(weights, second, weights_stride1, inputs, inputs_origin, inputs_stride, rest, buffers)
            if any_lane(not_finite(total), FULL_MASK):
                total = careful_product(
                    weights, offset, weights_stride1, hidden, hidden_origin, hidden_stride, columns
                ) + careful_product(weights, second, weights_stride1, inputs, inputs_origin, inputs_stride, rest)
                lane = np.int64(cuda.laneid)
                report_not_finite(
                    weights, offset, weights_stride1, lane, 1, np.int64(width), np.int64(32), row * width, errors, 32,
                    FULL_MASK,
                )  # fmt: skip
                if row == 0:
                    report_not_finite(
                        inputs, inputs_origin, inputs_stride, lane, 1, np.int64(rest), np.int64(32), np.int64(0),
                        errors, 32, FULL_MASK,
                    )  # fmt: skip
            total = warp_sum(total, 32, FULL_MASK)
            if cuda.laneid == 0:
                total = _with_bias(total, bias, bias_origin + row * bias_stride, row, True, row, errors)
                activations[row] = total
                if forget_gate_out.size > 0:
                    forget_gate_out[row] = sigmoid_pair(total)[0]

    return cifg_gate_kernel


@cache
def gates_kernel(vector: int, reports_hidden: bool):
    """The kernel for loads of ``vector`` elements; ``reports_hidden``: what is not finite in H is reported here.

    Block (x, y) has samples 32 x .. 32 x + 31 and columns 16 y .. 16 y + 15 of the gates:

        lane l of each warp: samples 4 (l / 4) .. + 3, columns 4 (l % 4) .. + 3
        warp w: the vectors w, w + 16, ... along [h; x]; the warps' parts are added in their order
    """
    sample_cells = _EACH * vector
    sum_cells = _EACH * _EACH
    part_cells = _WARPS * GATE_SAMPLES * GATE_COLUMNS
    load = load_vector(vector)
    unpack = unpack_vectors(vector, 1)

    @cuda.jit
    def cifg_gates_kernel(
        hidden,
        hidden_origin,
        hidden_stride0,
        hidden_stride1,
        inputs,
        inputs_origin,
        inputs_stride0,
        inputs_stride1,
        weights,
        weights_origin,
        weights_stride0,
        weights_stride1,
        bias,
        bias_origin,
        bias_stride,
        samples,
        columns,
        width,
        activations,
        forget_gate_out,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        parts = cuda.shared.array(part_cells, np.float32)
        words = cuda.local.array(vector, np.uint32)
        sample_values = cuda.local.array(sample_cells, np.float32)
        weight_values = cuda.local.array(sample_cells, np.float32)
        values = cuda.local.array(vector, np.float32)
        sums = cuda.local.array(sum_cells, np.float32)
        thread = np.int32(cuda.threadIdx.x)
        warp = thread >> 5
        first_sample = np.int32(cuda.blockIdx.x * GATE_SAMPLES)
        first_column = np.int32(cuda.blockIdx.y * GATE_COLUMNS)
        own_sample = first_sample + (cuda.laneid >> 2) * _EACH
        own_column = first_column + (cuda.laneid & 3) * _EACH
        for cell in range(_EACH * _EACH):
            sums[cell] = _ZERO
        bad = _ZERO
        for place in range(warp * vector, width, _WARPS * vector):
            for sample in range(_EACH):
                row = np.int64(min(own_sample + sample, samples - 1))
                if place < columns:
                    step = place if vector > 1 else place * hidden_stride1
                    load(hidden, hidden_origin + row * hidden_stride0 + step, words, 0)
                else:
                    step = place - columns if vector > 1 else (place - columns) * inputs_stride1
                    load(inputs, inputs_origin + row * inputs_stride0 + step, words, 0)
                unpack(hidden, words, values)
                for element in range(vector):
                    value = values[element]
                    bad = _ONE if not_finite(value) else bad
                    sample_values[sample * vector + element] = finite_or_zero(value)
            for column in range(_EACH):
                row = np.int64(min(own_column + column, columns - 1))
                step = place if vector > 1 else place * weights_stride1
                load(weights, weights_origin + row * weights_stride0 + step, words, 0)
                unpack(weights, words, values)
                for element in range(vector):
                    weight = values[element]
                    bad = _ONE if not_finite(weight) else bad
                    weight_values[column * vector + element] = finite_or_zero(weight)
            for cell in range(sum_cells):
                for element in range(vector):
                    weight = weight_values[cell % _EACH * vector + element]
                    sums[cell] += weight * sample_values[cell // _EACH * vector + element]
        for sample in range(_EACH):
            for column in range(_EACH):
                cell = ((cuda.laneid >> 2) * _EACH + sample) * GATE_COLUMNS + (cuda.laneid & 3) * _EACH + column
                parts[warp * GATE_SAMPLES * GATE_COLUMNS + cell] = sums[sample * _EACH + column]
        bad = _block_max(bad, scratch, scratch, 0)
        cuda.syncthreads()  # the parts of all warps are in place
        sample = first_sample + thread // GATE_COLUMNS
        column = first_column + thread % GATE_COLUMNS
        if sample < samples and column < columns:
            total = _ZERO
            for other in range(_WARPS):
                total += parts[other * GATE_SAMPLES * GATE_COLUMNS + thread]
            flat = np.int64(sample) * columns + column
            place = bias_origin + np.int64(column) * bias_stride
            total = _with_bias(total, bias, place, column, sample == 0, flat, errors)
            activations[flat] = total
            if forget_gate_out.size > 0:
                forget_gate_out[flat] = sigmoid_pair(total)[0]
        if bad > _ZERO:
            # Each array is reported by the first blocks that read it.
            if first_sample == 0 and first_column + warp < columns:
                row = np.int64(first_column + warp)
                report_not_finite(
                    weights, weights_origin + row * weights_stride0, weights_stride1, np.int64(cuda.laneid), 1,
                    np.int64(width), np.int64(32), row * width, errors, 32, FULL_MASK,
                )  # fmt: skip
            if first_column == 0:
                for sample in range(first_sample + warp, min(first_sample + GATE_SAMPLES, samples), _WARPS):
                    row = np.int64(sample)
                    rest = np.int64(width - columns)
                    report_not_finite(
                        inputs, inputs_origin + row * inputs_stride0, inputs_stride1, np.int64(cuda.laneid), 1, rest,
                        np.int64(32), row * rest, errors, 32, FULL_MASK,
                    )  # fmt: skip
                    if reports_hidden:
                        report_not_finite(
                            hidden, hidden_origin + row * hidden_stride0, hidden_stride1, np.int64(cuda.laneid), 1,
                            np.int64(columns), np.int64(32), row * columns, errors, 32, FULL_MASK,
                        )  # fmt: skip

    return cifg_gates_kernel
