"""Kernels of attention_softmax: softmax over the last axis of attention scores, with a mask and causality.

visible = mask allows it, and key <= query + causal_offset where causal
output  = exp(score + mask - m) / sum over the visible of the same,    m their maximum
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.cluster import SCRATCH_SIZE as EXCHANGE_SIZE
from burt_numba.device.events import record_bad_elements, rolled
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, NEGATIVE_INFINITY, exp2, maximum
from burt_numba.device.online_softmax import online_softmax
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import clean, is_bad, quotient, row_offset, row_place
from burt_numba.device.vector import fill_vector, load_vector, store_vector, unpack_vectors
from burt_numba.device.warp import FULL_MASK, any_lane, group_mask
from burt_numba.target import DOCUMENTED_THREADS, GROUP_BLOCK

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)

NO_MASK, ADDITIVE_MASK, BOOLEAN_MASK = 0, 1, 2


@cuda.jit(device=True)
def visible_keys(query, num_keys, causal, causal_offset):
    """How many keys, from the first, causality leaves to a query."""
    if causal:
        return min(max(np.int64(query) + causal_offset + 1, np.int64(0)), np.int64(num_keys))
    return np.int64(num_keys)


@cuda.jit(device=True)
def _report_bad_scores(read_pair, source, first, vector, end, step, flat_offset, errors, lanes, mask):
    """A group of lanes reads its visible scores once more and reports those that are NaN or +inf, with their mask.

    Each lane covers ``vector`` columns from ``first``, from ``first + step``, ... below ``end``. What a mask of -inf
    hides is no error, whatever it is.
    """
    nans = np.int32(0)
    infinities = np.int32(0)
    first_nan = np.int64(0)
    first_infinity = np.int64(0)
    for start in range(first, end, step):
        for column in range(start, min(start + rolled(vector, errors), end)):
            score, bias = read_pair(source, column)
            if bias != NEGATIVE_INFINITY and is_bad(score + bias):
                if score != score or bias != bias:
                    if nans == 0:
                        first_nan = flat_offset + column
                    nans += np.int32(1)
                else:
                    if infinities == 0:
                        first_infinity = flat_offset + column
                    infinities += np.int32(1)
    record_bad_elements(errors, nans, infinities, first_nan, first_infinity, lanes, mask)


@cuda.jit(device=True)
def _documented_pair(source, column):
    """(score, additive mask) of the documented kernel's row; a step of -1 stands for no mask."""
    scores, mask, mask_step = source
    score = np.float32(scores[column])
    if mask_step < 0:
        return score, _ZERO
    return score, np.float32(mask[0, 0, 0, column * mask_step])


@cuda.jit(device=True)
def _documented_score(source, column):
    score, mask = _documented_pair(source, column)
    return score + mask


_scan_documented = online_softmax(_documented_score, row_reductions(ANY_THREADS))


@cuda.jit(launch_bounds=DOCUMENTED_THREADS)
def attention_softmax_kernel(scores, output, mask, batch_size, num_heads, seq_len, causal, causal_offset, errors):
    """The documented layout: block (x, y) takes query y of head x % num_heads of batch x // num_heads.

    Grid (batch_size * num_heads, seq_len), block min(Sk, 1024) rounded up to whole warps; thread t takes the keys
    t, t + blockDim.x, ... in two passes, the first with a running maximum.
    A smaller grid strides over both. scores and output [B, H, Sq, Sk], seq_len = Sq; mask an additive array of 4 axes,
    each of full size or 1, or of size 0; errors int64 [8].
    """
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    num_keys = np.int64(scores.shape[3])
    mask_step = -1 if mask.size == 0 else 1 if mask.shape[3] > 1 else 0
    for matrix in range(cuda.blockIdx.x, batch_size * num_heads, cuda.gridDim.x):
        batch = matrix // num_heads
        head = matrix - batch * num_heads
        for query in range(cuda.blockIdx.y, seq_len, cuda.gridDim.y):
            visible = visible_keys(query, num_keys, causal, causal_offset)
            first_batch = batch if mask.shape[0] > 1 else 0
            first_head = head if mask.shape[1] > 1 else 0
            first_query = query if mask.shape[2] > 1 else 0
            # Slices, since a mask of size 0 has no first row.
            mask_row = mask[first_batch : first_batch + 1, first_head : first_head + 1, first_query : first_query + 1]
            source = (scores[batch, head, query], mask_row, mask_step)
            row_max, factor, bad = _scan_documented(source, thread, visible, threads, scratch, 0)
            if any_lane(bad, FULL_MASK):
                flat_offset = (np.int64(matrix) * seq_len + query) * num_keys
                _report_bad_scores(
                    _documented_pair, source, thread, 1, visible, threads, flat_offset, errors, 32, FULL_MASK
                )
            for column in range(thread, num_keys, threads):
                value = _ZERO
                if column < visible:
                    value = exp2((clean(_documented_score(source, column)) - row_max) * LOG2_E) * factor
                output[batch, head, query, column] = value


@cuda.jit(device=True)
def _apply_additive(score, mask):
    return score + mask


@cuda.jit(device=True)
def _apply_boolean(score, mask):
    return score if mask != _ZERO else NEGATIVE_INFINITY


@cuda.jit(device=True)
def _additive_value(mask):
    return mask


@cuda.jit(device=True)
def _boolean_value(mask):
    return _ZERO if mask != _ZERO else NEGATIVE_INFINITY


def _pair_reader(mask_kind: int):
    """(score, additive mask) at a column of a row given by flat arrays, offsets and strides."""
    mask_value = _boolean_value if mask_kind == BOOLEAN_MASK else _additive_value

    @cuda.jit(device=True)
    def read_pair(source, column):
        scores, offset, column_stride, mask, mask_offset, mask_column_stride = source
        score = np.float32(scores[offset + column * column_stride])
        if mask_kind == NO_MASK:
            return score, _ZERO
        return score, mask_value(np.float32(mask[mask_offset + column * mask_column_stride]))

    return read_pair


@cache
def rows_kernel(threads: int, per_thread: int, vector: int, blocks: int, mask_kind: int):
    """The kernel that holds each row in registers, ``per_thread`` keys in each of ``threads * blocks`` threads.

    Rows, lanes, blocks and columns lie as in the kernel of the same name of constrained_softmax.
    """
    shares_warp = threads <= 32
    lanes = min(threads, 32)
    rows_a_block = GROUP_BLOCK // lanes
    lane_bits = lanes.bit_length() - 1
    block_bits = blocks.bit_length() - 1
    vectors = per_thread // vector
    stride = threads * vector
    # Kept through a report of bad elements, a row takes registers from every launch. Element by element, though, the
    # addresses of a second load take more.
    reloads = vector > 1
    load = load_vector(vector)
    fill = fill_vector(vector)
    unpack = unpack_vectors(vector, vectors)
    store = store_vector(vector)
    reductions = row_reductions(threads, blocks)
    begin_row, block_rank = reductions.begin, reductions.rank
    reduce_max, reduce_sum = reductions.maximum, reductions.sum
    read_pair = _pair_reader(mask_kind)
    apply_mask = _apply_boolean if mask_kind == BOOLEAN_MASK else _apply_additive

    @cuda.jit(device=True)
    def load_row(source, start, mask_start, columns, causal, words, mask_words, registers, mask_registers):
        """A thread's scores from ``start`` on, with their mask; -inf beyond the ``columns`` that it sees of the row."""
        scores, _offset, column_stride, mask, _mask_offset, mask_column_stride = source
        for part in range(vectors):
            if part * stride < columns:
                step = part * stride if vector > 1 else part * stride * column_stride
                load(scores, start + step, words, part * vector)
                if mask_kind != NO_MASK:
                    mask_step = part * stride if vector > 1 else part * stride * mask_column_stride
                    load(mask, mask_start + mask_step, mask_words, part * vector)
            else:
                fill(scores, words, part * vector)
                if mask_kind != NO_MASK:
                    fill(mask, mask_words, part * vector)
        unpack(scores, words, registers)
        if mask_kind != NO_MASK:
            unpack(mask, mask_words, mask_registers)
            for element in range(per_thread):
                registers[element] = apply_mask(registers[element], mask_registers[element])
        if vector > 1 and causal:
            # A vector across the diagonal holds keys that the query must not see.
            for element in range(per_thread):
                if (element // vector) * stride + element % vector >= columns:
                    registers[element] = NEGATIVE_INFINITY

    @cuda.jit
    def attention_softmax_rows_kernel(
        scores,
        output,
        mask,
        first_row,
        rows,
        num_keys,
        part_size,
        num_queries,
        queries_magic,
        queries_shift,
        first_query,
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
        mask_origin,
        mask_stride0,
        mask_stride1,
        mask_stride2,
        mask_column_stride,
        causal,
        causal_offset,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        exchange = cuda.shared.array(EXCHANGE_SIZE, np.float32)
        words = cuda.local.array(per_thread, np.uint32)
        mask_words = cuda.local.array(per_thread, np.uint32)
        registers = cuda.local.array(per_thread, np.float32)
        mask_registers = cuda.local.array(per_thread, np.float32)
        begin_row()
        if shares_warp:
            thread = np.int32(cuda.threadIdx.x & (threads - 1))
            row = np.int32(cuda.blockIdx.x * rows_a_block + (cuda.threadIdx.x >> lane_bits))
        else:
            thread = np.int32(cuda.threadIdx.x)
            row = np.int32(cuda.blockIdx.x >> block_bits)
        # Only where a block has several rows can a thread be without one; barriers stand where it has one.
        if row < rows:
            lane_mask = group_mask(lanes)
            place = row_place(row, size1, magic1, shift1, size2, magic2, shift2)
            offset = origin + row_offset(place, stride0, stride1, stride2)
            mask_offset = mask_origin + row_offset(place, mask_stride0, mask_stride1, mask_stride2)
            output_row = first_row + row
            output_offset = output_row * num_keys
            part_start = np.int32(block_rank() * part_size)
            part_end = np.int32(min(part_start + part_size, num_keys))
            visible = part_end
            if causal:
                now = np.int32(first_query + row)
                query = np.int32(now - quotient(now, queries_magic, queries_shift) * num_queries)
                visible = np.int32(min(max(query + causal_offset + 1, 0), part_end))
            first_column = np.int32(part_start + thread * vector)
            source = (scores, offset, column_stride, mask, mask_offset, mask_column_stride)
            # Counted from the thread's first column, the others are constants, which take no registers.
            columns = np.int32(visible - first_column)
            start = offset + (first_column if vector > 1 else first_column * column_stride)
            mask_start = mask_offset + (first_column if vector > 1 else first_column * mask_column_stride)
            load_row(source, start, mask_start, columns, causal, words, mask_words, registers, mask_registers)
            bad = False
            for element in range(per_thread):
                bad |= is_bad(registers[element])
            if any_lane(bad, lane_mask):
                if not reloads:
                    for element in range(per_thread):
                        registers[element] = clean(registers[element])
                _report_bad_scores(
                    read_pair,
                    source,
                    first_column,
                    vector,
                    visible,
                    np.int32(stride),
                    output_offset,
                    errors,
                    lanes,
                    lane_mask,
                )
                if reloads:
                    load_row(source, start, mask_start, columns, causal, words, mask_words, registers, mask_registers)
                    for element in range(per_thread):
                        registers[element] = clean(registers[element])
            row_max = -FLOAT32_MAX
            for element in range(per_thread):
                row_max = maximum(row_max, registers[element])
            row_max = reduce_max(row_max, scratch, exchange, 0)
            total = _ZERO
            for element in range(per_thread):
                registers[element] = exp2((registers[element] - row_max) * LOG2_E)
                total += registers[element]
            total = reduce_sum(total, scratch, exchange, 1)
            factor = _ONE / total if total > _ZERO else _ZERO
            for element in range(per_thread):
                registers[element] *= factor
            columns = np.int32(part_end - first_column)
            for part in range(vectors):
                if part * stride < columns:
                    store(output, output_offset + first_column + part * stride, registers, part * vector)

    return attention_softmax_rows_kernel


@cache
def streamed_kernel(mask_kind: int):
    """The kernel for rows that no register file holds: a block a row, which reads it twice.

    Its arguments are those of the kernel from ``rows_kernel``, with a 64-bit number of keys.
    """
    read_pair = _pair_reader(mask_kind)

    @cuda.jit(device=True)
    def read_score(source, column):
        score, mask = read_pair(source, column)
        return score + mask

    scan = online_softmax(read_score, row_reductions(ANY_THREADS))

    @cuda.jit
    def attention_softmax_streamed_kernel(
        scores,
        output,
        mask,
        first_row,
        rows,
        num_keys,
        part_size,
        num_queries,
        queries_magic,
        queries_shift,
        first_query,
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
        mask_origin,
        mask_stride0,
        mask_stride1,
        mask_stride2,
        mask_column_stride,
        causal,
        causal_offset,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        row = cuda.blockIdx.x
        thread = np.int64(cuda.threadIdx.x)
        threads = np.int64(cuda.blockDim.x)
        place = row_place(row, size1, magic1, shift1, size2, magic2, shift2)
        offset = origin + row_offset(place, stride0, stride1, stride2)
        mask_offset = mask_origin + row_offset(place, mask_stride0, mask_stride1, mask_stride2)
        output_row = first_row + row
        output_offset = output_row * num_keys
        now = np.int32(first_query + row)
        query = now - quotient(now, queries_magic, queries_shift) * num_queries
        visible = visible_keys(query, num_keys, causal, causal_offset)
        source = (scores, offset, column_stride, mask, mask_offset, mask_column_stride)
        row_max, factor, bad = scan(source, thread, visible, threads, scratch, 0)
        if any_lane(bad, FULL_MASK):
            _report_bad_scores(read_pair, source, thread, 1, visible, threads, output_offset, errors, 32, FULL_MASK)
        for column in range(thread, num_keys, threads):
            value = _ZERO
            if column < visible:
                value = exp2((clean(read_score(source, column)) - row_max) * LOG2_E) * factor
            output[output_offset + column] = value

    return attention_softmax_streamed_kernel
