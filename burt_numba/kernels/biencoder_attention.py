"""The documented kernel of biencoder_attention, for launching by hand.

A block takes a tile of queries of a head, and one tile of keys after another, a thread a key:

    block (b H + h, i)    queries 16 i .. 16 i + 15 of head h of sample b
    thread t              keys t, t + blockDim.x, ...; columns t, t + blockDim.x, ... of the result
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import DOCUMENTED_QUERIES
from burt_numba.device.attention import (
    HALF_MAX,
    context_count,
    finite_result,
    load_query,
    mended_score,
    report_sum,
    smallest_weight,
)
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.entropy import GAP_RANGE, column_sums, entropy_search, first_beta, gap_of, last_beta
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import FLOAT32_MAX, NEGATIVE_INFINITY, exp2, maximum
from burt_numba.device.row_bounds import report_row, row_bound
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite
from burt_numba.device.warp import FULL_MASK, any_lane
from burt_numba.target import DOCUMENTED_BIENCODER_THREADS

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@cuda.jit(device=True)
def _load_keys(source, context):
    """The block puts the keys of a tile into shared memory, all elements 0 first, then all 1, ...

    ``context``: the thread's own of the tile.
    """
    keys, shared, tile_cell, length, dims, _scale, _errors = source
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    tile_start = context - thread
    cuda.syncthreads()  # the tile before has been read
    for cell in range(thread, min(threads, length - tile_start) * dims, threads):
        key = cell // dims
        dim = cell - key * dims
        shared[tile_cell + dim * threads + key] = np.float32(keys[tile_start + key, dim])
    cuda.syncthreads()  # the tile is there


@cuda.jit(device=True)
def _score(source, place, context, reports):
    """The score of a thread's own key of the tile in shared memory; -inf where there is none."""
    keys, shared, tile_cell, length, dims, scale, errors = source
    query_cell, key_index, score_index, reports_keys = place
    product = _ZERO
    is_present = context < length
    if is_present:
        cell = tile_cell + np.int64(cuda.threadIdx.x)
        for dim in range(dims):
            product += shared[query_cell + dim] * shared[cell]
            cell += cuda.blockDim.x
    score = product * scale
    if any_lane(is_present and not_finite(score), FULL_MASK):
        own = min(context, length - 1)
        score = mended_score(
            score,
            is_present,
            shared,
            query_cell,
            keys[own],
            np.int64(0),
            np.int64(1),
            dims,
            scale,
            key_index + own * dims,
            score_index + own,
            reports and reports_keys,
            reports,
            errors,
        )
    return score if is_present else NEGATIVE_INFINITY


@cuda.jit(device=True)
def _read_gap(source, context):
    """A gap from shared memory, or computed again where that holds no more than a tile of scores."""
    scores, place, score_cell, is_resident, row_max, gap_limit = source
    if is_resident:
        gap = scores[1][score_cell + context]
    else:
        _load_keys(scores, context)
        gap = gap_of(row_max, _score(scores, place, context, False), gap_limit)
    return gap


_block = row_reductions(ANY_THREADS)
_block_max = _block.maximum
_search = entropy_search(column_sums(_read_gap, _block.sum3))


@cuda.jit(device=True)
def _add_values(values, shared, weights_cell, pitch, first_context, end, dim, sums, found):
    """Add the weighted values of some contexts to a thread's column of all queries.

    ``found``, and what comes back with more in it: NaNs and infinities that had weight, and the first context of each.
    """
    nans, infinities, first_nan, first_infinity = found
    for context in range(first_context, end):
        value = np.float32(values[context, dim])
        is_read = False
        for query in range(DOCUMENTED_QUERIES):
            weight = shared[weights_cell + query * pitch + context - first_context]
            is_read |= weight > _ZERO
            sums[query] += weight * finite_or_zero(value)
        if is_read and not_finite(value):
            if value == value:
                if infinities == 0:
                    first_infinity = np.int64(context)
                infinities += np.int32(1)
            else:
                if nans == 0:
                    first_nan = np.int64(context)
                nans += np.int32(1)
    return nans, infinities, first_nan, first_infinity


@cuda.jit(launch_bounds=DOCUMENTED_BIENCODER_THREADS)
def biencoder_attention_kernel(
    query,
    context_keys,
    context_values,
    output,
    batch_size,
    query_len,
    context_len,
    d_head,
    num_heads,
    scale,
    entropy_bound,
    temperature_min,
    temperature_max,
    max_iterations,
    head_bounds,
    context_lengths,
    temperature_out,
    entropy_out,
    lse_out,
    errors,
):
    """The documented layout: grid (batch_size * num_heads, ceil(query_len / 16)), block TILE_K, 64 or 128.

    Smaller grids do: a block takes every gridDim-th head and tile. Shared (16 d_head + TILE_K d_head + 16 TILE_K) * 4
    bytes; with more, 16 context_len (rounded up to whole tiles) in place of 16 TILE_K, scores are computed once. With
    fewer, each evaluation of the entropy computes them again.
    query, output [B, H, Q, D]; context_keys, context_values [B, Hk, K, D]; head_bounds float32 [H], context_lengths
    [B], temperature_out, entropy_out, lse_out float32 [B * H * Q], or of size 0; errors int64 [8].
    """
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    betas = cuda.shared.array(DOCUMENTED_QUERIES, np.float32)
    factors = cuda.shared.array(DOCUMENTED_QUERIES, np.float32)
    maxima = cuda.shared.array(DOCUMENTED_QUERIES, np.float32)
    shared = cuda.shared.array(0, np.float32)
    sums = cuda.local.array(DOCUMENTED_QUERIES, np.float32)
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    dims = np.int64(d_head)
    group = num_heads // max(context_keys.shape[1], 1)
    scale = np.float32(scale)
    temperature_min = np.float32(temperature_min)
    temperature_max = np.float32(temperature_max)
    lowest_beta = first_beta(temperature_min, temperature_max)
    highest_beta = last_beta(temperature_min, lowest_beta)
    gap_limit = GAP_RANGE / lowest_beta
    limit = HALF_MAX if output.itemsize == 2 else FLOAT32_MAX
    tile_cell = DOCUMENTED_QUERIES * dims
    scores_cell = tile_cell + threads * dims
    padded_len = (context_len + threads - 1) // threads * threads
    is_resident = shared.size >= scores_cell + DOCUMENTED_QUERIES * padded_len
    pitch = padded_len if is_resident else threads
    phase = 0
    for sample_head in range(cuda.blockIdx.x, batch_size * num_heads, cuda.gridDim.x):
        sample = sample_head // num_heads
        head = sample_head - sample * num_heads
        key_head = head // group
        keys = context_keys[sample, key_head]
        values = context_values[sample, key_head]
        key_index = (sample * (num_heads // group) + key_head) * context_len * dims
        reports_length = thread == 0 and head == 0 and cuda.blockIdx.y == 0
        length = np.int64(context_count(context_lengths, sample, 1, context_len, sample, reports_length, errors))
        padded = (length + threads - 1) // threads * threads
        source = (keys, shared, tile_cell, length, dims, scale, errors)
        for tile in range(cuda.blockIdx.y, (query_len + DOCUMENTED_QUERIES - 1) // DOCUMENTED_QUERIES, cuda.gridDim.y):
            first_query = tile * DOCUMENTED_QUERIES
            first_row = np.int64(sample_head) * query_len + first_query
            tile_queries = min(DOCUMENTED_QUERIES, query_len - first_query)
            reports_keys = head == key_head * group and first_query == 0
            cuda.syncthreads()  # the tile of queries before has been read
            for each in range(tile_queries):
                flat = (first_row + each) * dims
                row = query[sample, head, first_query + each]
                load_query(row, np.int64(0), np.int64(1), dims, shared, each * dims, flat, True, errors)
            cuda.syncthreads()  # the queries are there
            if is_resident:
                for context in range(thread, padded, threads):
                    _load_keys(source, context)
                    for each in range(tile_queries):
                        score_index = (first_row + each) * context_len
                        place = (each * dims, key_index, score_index, reports_keys and each == 0)
                        shared[scores_cell + each * pitch + context] = _score(source, place, context, True)
            for each in range(tile_queries):
                row = first_row + each
                place = (each * dims, key_index, row * context_len, reports_keys and each == 0)
                score_cell = scores_cell + each * pitch
                row_max = NEGATIVE_INFINITY
                for context in range(thread, padded, threads):
                    if is_resident:
                        score = shared[score_cell + context]
                    else:
                        _load_keys(source, context)
                        score = _score(source, place, context, True)
                    row_max = maximum(row_max, score)
                row_max = _block_max(row_max, scratch, scratch, phase)
                phase ^= 1
                if row_max == NEGATIVE_INFINITY:
                    row_max = _ZERO
                if is_resident:
                    # No barrier before: a thread reads back only the scores it wrote.
                    for context in range(thread, padded, threads):
                        shared[score_cell + context] = gap_of(row_max, shared[score_cell + context], gap_limit)
                reports_bound = thread == 0 and sample == 0 and first_query + each == 0
                bound = row_bound(head_bounds, head, np.float32(entropy_bound), head, reports_bound, errors)
                gaps = (source, place, score_cell, is_resident, row_max, gap_limit)
                data = (gaps, thread, padded, threads, scratch, scratch)
                beta, total, entropy, phase = _search(data, bound, lowest_beta, highest_beta, max_iterations, phase)
                if thread == 0:
                    report_row(
                        row, beta, entropy, bound, temperature_min, temperature_max, temperature_out, entropy_out,
                        errors,
                    )  # fmt: skip
                    report_sum(row, row_max, total, temperature_min, temperature_max, lse_out, errors)
                    betas[each] = beta
                    factors[each] = _ONE / total if total > _ZERO else _ZERO
                    maxima[each] = row_max
            cuda.syncthreads()  # the temperatures of all queries are there

            smallest = smallest_weight(length)
            for first_dim in range(0, dims, threads):
                dim = first_dim + thread
                for each in range(DOCUMENTED_QUERIES):
                    sums[each] = _ZERO
                found = (np.int32(0), np.int32(0), np.int64(0), np.int64(0))
                for tile_start in range(0, padded, threads):
                    context = tile_start + thread
                    weights_cell = scores_cell + (tile_start if is_resident else 0)
                    # Of all columns of the result the first finds gaps where they are kept, and leaves weights.
                    if first_dim == 0 or not is_resident:
                        if not is_resident:
                            _load_keys(source, context)
                        for each in range(DOCUMENTED_QUERIES):
                            weight = _ZERO
                            if each < tile_queries:
                                cell = weights_cell + each * pitch + thread
                                if is_resident:
                                    gap = shared[cell]
                                else:
                                    place = (each * dims, np.int64(0), np.int64(0), False)
                                    gap = gap_of(maxima[each], _score(source, place, context, False), gap_limit)
                                weight = exp2(-betas[each] * gap) * factors[each]
                            shared[weights_cell + each * pitch + thread] = weight if weight > smallest else _ZERO
                    cuda.syncthreads()  # the weights of the tile are there
                    if dim < dims:
                        end = min(tile_start + threads, length)
                        found = _add_values(values, shared, weights_cell, pitch, tile_start, end, dim, sums, found)
                if dim < dims:
                    for each in range(DOCUMENTED_QUERIES):
                        if each < tile_queries:
                            flat = (first_row + each) * dims + dim
                            result = finite_result(sums[each], limit, flat, errors)
                            output[sample, head, first_query + each, dim] = result
                if any_lane(found[0] + found[1] > 0, FULL_MASK):
                    record_bad_elements(
                        errors,
                        found[0],
                        found[1],
                        key_index + found[2] * dims + dim,
                        key_index + found[3] * dims + dim,
                        32,
                        FULL_MASK,
                    )
