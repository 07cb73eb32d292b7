"""The kernel of biencoder_attention on tensor cores where there are at most FEW contexts: all of them at once.

A warp has two tiles of 16 queries of a head. Lane (g = lane / 4, t = lane % 4) has 16 scores of each of queries g,
g + 8, g + 16 and g + 24: they stay in its registers, first as scores, then as gaps, then as weights. All lanes add up
what their scores weigh at the temperatures of their queries; of the sums, lane t of a row takes those of the query that
it looks after, g + 8 t, and makes the next step for it.

Keys and values are on their way to shared memory from the beginning. Queries come from memory as operands, a chunk
ahead of the products.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import (
    FEW,
    FEW_TILES,
    HALF,
    MOST_TILES_WARPS,
    ROW_TILES,
    TILE_ROWS,
    VALUE_DIMS,
)
from burt_numba.device.async_copies import close_group, shared_address, wait_for_copies, wait_for_older_groups
from burt_numba.device.attention import context_count, report_sum, smallest_weight
from burt_numba.device.entropy import GAP_RANGE, beta_of_two, first_beta, lanes_search, last_beta
from burt_numba.device.numeric import (
    FLOAT32_MAX,
    NEGATIVE_INFINITY,
    exp2,
    maximum,
    minimum,
    opaque,
    reciprocal,
    whole_quotient,
)
from burt_numba.device.own_queries import (
    SLOTS,
    WARP_QUERIES,
    give,
    own_number,
    own_sum,
    report_out_of_reach,
    score_bits,
)
from burt_numba.device.query_tiles import (
    largest_product,
    leave_out_absent_of,
    report_queries,
    report_scores_of,
    zero_overflows_of,
)
from burt_numba.device.row_bounds import is_out_of_reach, row_bound, write_row
from burt_numba.device.score_tiles import own_place, own_start, score_tiles
from burt_numba.device.staged_rows import PIECES, staged_rows
from burt_numba.device.tile_results import TILE_SUMS, VALUE_SUMS, largest_result, tile_results
from burt_numba.device.warp import FULL_MASK, any_lane, shuffle_xor

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_HALF_OF = np.float32(0.5)
_TILE_SCORES = FEW // 2
"""Scores that a lane has of 16 queries: of each of two, a fourth."""
_SCORES = ROW_TILES * _TILE_SCORES
_KEY_WORDS = 4 * FEW_TILES
_report_scores = report_scores_of(FEW_TILES)
_zero_overflows = zero_overflows_of(_SCORES)
_leave_out_absent = leave_out_absent_of(FEW_TILES)


@cuda.jit(device=True)
def _slot_of(first_score, each):
    """Of which of its four queries a lane has a score. Loops go over a tile: of twice as many the compiler makes none
    into straight code, without which an array cannot lie in registers."""
    return first_score // _TILE_SCORES * 2 + (each >> 1 & 1)


@cuda.jit(device=True)
def _two_greatest_of_tile(scores, first_score, maxima, runners_up):
    for each in range(_TILE_SCORES):
        slot = _slot_of(first_score, each)
        score = scores[first_score + each]
        runners_up[slot] = maximum(runners_up[slot], minimum(maxima[slot], score))
        maxima[slot] = maximum(maxima[slot], score)


@cuda.jit(device=True)
def _join_two_greatest(maxima, runners_up, step):
    for slot in range(SLOTS):
        other = shuffle_xor(maxima[slot], step, FULL_MASK)
        next_one = maximum(runners_up[slot], shuffle_xor(runners_up[slot], step, FULL_MASK))
        runners_up[slot] = maximum(next_one, minimum(maxima[slot], other))
        maxima[slot] = maximum(maxima[slot], other)


@cuda.jit(device=True)
def _take_two_greatest(scores, maxima, runners_up):
    """Of each query of a lane, the greatest score and the next."""
    for slot in range(SLOTS):
        maxima[slot] = NEGATIVE_INFINITY
        runners_up[slot] = NEGATIVE_INFINITY
    _two_greatest_of_tile(scores, 0, maxima, runners_up)
    _two_greatest_of_tile(scores, _TILE_SCORES, maxima, runners_up)
    _join_two_greatest(maxima, runners_up, 1)
    _join_two_greatest(maxima, runners_up, 2)


@cuda.jit(device=True)
def _set_gaps_of_tile(scores, first_score, half_maxima, bits, gap_limit):
    for each in range(_TILE_SCORES):
        half_maximum = half_maxima[_slot_of(first_score, each)]
        gap = (half_maximum - _HALF_OF * scores[first_score + each]) * bits
        scores[first_score + each] = minimum(gap, gap_limit)


@cuda.jit(device=True)
def _add_sums_of_tile(gaps, first_score, betas, totals, firsts, seconds):
    for each in range(_TILE_SCORES):
        slot = _slot_of(first_score, each)
        t = betas[slot] * gaps[first_score + each]
        weight = exp2(-t)
        weighted = t * weight
        totals[slot] += weight
        firsts[slot] += weighted
        seconds[slot] += weighted * t


@cuda.jit(device=True)
def _sums_of_all(data, beta):
    """Sums at the temperature of each query, those of the query that the lane looks after."""
    gaps, turn, betas, totals, firsts, seconds = data
    give(beta, betas)
    for slot in range(SLOTS):
        totals[slot] = _ZERO
        firsts[slot] = _ZERO
        seconds[slot] = _ZERO
    _add_sums_of_tile(gaps, 0, betas, totals, firsts, seconds)
    _add_sums_of_tile(gaps, _TILE_SCORES, betas, totals, firsts, seconds)
    return own_sum(totals, turn), own_sum(firsts, turn), own_sum(seconds, turn)


@cuda.jit(device=True)
def _set_weights_of_tile(scores, first_score, betas, lift):
    for each in range(_TILE_SCORES):
        t = betas[_slot_of(first_score, each)] * scores[first_score + each]
        scores[first_score + each] = exp2(lift - t)


@cuda.jit(device=True)
def _leave_out_light(weights, first_score, shares, smallest, by_shares):
    """Weights that carry nothing become 0, others parts of their sum where they are looked at ``by_shares``."""
    for each in range(_TILE_SCORES):
        weight = weights[first_score + each]
        share = weight * shares[_slot_of(first_score, each)]
        kept = share if by_shares else weight
        weights[first_score + each] = kept if share > smallest else _ZERO


@cuda.jit(device=True)
def _has_unfit(scores, first_score, product_limit):
    bad = False
    for each in range(_TILE_SCORES):
        bad |= not (abs(scores[first_score + each]) <= product_limit)
    return bad


@cuda.jit(device=True)
def _negate(scores, first_score):
    for each in range(_TILE_SCORES):
        scores[first_score + each] = -scores[first_score + each]


_search_all = lanes_search(_sums_of_all)


@cache
def few_kernel(kind: int, vector: int):
    """The kernel for EXACT, ROUNDED or HALF products and accesses of ``vector`` elements (1: any strides)."""
    half = kind == HALF
    width = 8 if half else 4
    chunk = 4 * width
    # In float16 a weight is lifted, relative to the greatest: below 2**-14 numbers of that type have fewer digits.
    lift = np.float32(15.0 if half else 0.0)
    largest = largest_result(kind)
    pieces_words = PIECES * width
    value_pieces = VALUE_DIMS // width
    value_pitch = np.int32(4 * value_pieces + 4)
    value_shift = np.int32(value_pieces.bit_length() - 1)
    fragment_type = np.uint32 if half else np.float32
    tiles = score_tiles(kind, vector, 0, FEW_TILES)
    start_queries, finish_queries, add_own, add_values = (
        tiles.start_queries,
        tiles.finish_queries,
        tiles.add_own,
        tiles.add_values,
    )
    report_results, store_results = tile_results(kind, vector)
    stage = staged_rows(half, vector, True).stage

    @cuda.jit(device=True)
    def stage_all(array, place, length, first_dim, dims, pieces, lanes_shift, shared, cell, pitch, staging):
        """The block's threads start to copy all keys or values, and the last one again for those that are not there."""
        start, stride, dim_stride = place
        rows = np.int32(0 if length == 0 else FEW)
        rows_place = (start, stride, dim_stride, np.int32(0), np.int32(length - 1), first_dim)
        thread, threads = np.int32(cuda.threadIdx.x), np.int32(cuda.blockDim.x)
        stage(array, rows_place, rows, dims, pieces, lanes_shift, thread, threads, shared, cell, pitch, staging)
        close_group()

    @cuda.jit
    def biencoder_few_kernel(
        query,
        keys,
        values,
        output,
        first_row,
        rows,
        heads,
        group,
        queries,
        contexts,
        dims,
        query_origin,
        query_sample_stride,
        query_head_stride,
        query_stride,
        query_dim_stride,
        keys_origin,
        keys_sample_stride,
        keys_head_stride,
        key_stride,
        key_dim_stride,
        values_origin,
        values_sample_stride,
        values_head_stride,
        value_stride,
        value_dim_stride,
        scale,
        entropy_bound,
        temperature_min,
        temperature_max,
        max_iterations,
        head_bounds,
        bounds_origin,
        bound_stride,
        context_lengths,
        lengths_origin,
        length_stride,
        length_words,
        temperature_out,
        entropy_out,
        lse_out,
        errors,
    ):
        shared = cuda.shared.array(0, fragment_type, 16)
        counts = cuda.shared.array(MOST_TILES_WARPS, np.int32)
        piece_words = cuda.local.array(pieces_words, np.uint32)
        piece_numbers = cuda.local.array(pieces_words, np.float32)
        words = cuda.local.array(_KEY_WORDS, np.uint32)
        numbers = cuda.local.array(_KEY_WORDS, np.float32)
        low = cuda.local.array(_KEY_WORDS, np.float32)
        left_words = cuda.local.array(16, np.uint32)
        left = cuda.local.array(16, np.float32)
        left_low = cuda.local.array(16, np.float32)
        step_sums = cuda.local.array(4, np.float32)
        right = cuda.local.array(2, np.float32)
        right_words = cuda.local.array(2, np.uint32)
        right_low = cuda.local.array(2, np.float32)
        scores = cuda.local.array(_SCORES, np.float32)
        maxima = cuda.local.array(SLOTS, np.float32)
        runners_up = cuda.local.array(SLOTS, np.float32)
        betas = cuda.local.array(SLOTS, np.float32)
        totals = cuda.local.array(SLOTS, np.float32)
        firsts = cuda.local.array(SLOTS, np.float32)
        seconds = cuda.local.array(SLOTS, np.float32)
        shares = cuda.local.array(SLOTS, np.float32)
        results = cuda.local.array(VALUE_SUMS, np.float32)
        stored = cuda.local.array(width, np.float32)
        lane = np.int32(cuda.laneid)
        turn = np.int32(lane & 3)
        own_row = np.int32((turn >> 1) * TILE_ROWS + (turn & 1) * 8 + (lane >> 2))

        sample_head, first_query = own_place(queries)
        sample = whole_quotient(sample_head, np.int32(heads))
        head = np.int32(sample_head - sample * heads)
        valid = np.int32(min(queries - first_query, WARP_QUERIES))
        leads = first_query == 0 and lane == 0
        length_place = lengths_origin + np.int64(sample) * length_stride
        length = context_count(
            context_lengths, length_place, length_words, contexts, sample, leads and head == 0, errors
        )
        chunks = np.int32((dims + chunk - 1) // chunk)
        key_pitch = np.int32(16 * (chunks | 1))
        values_cell = np.int32(FEW * key_pitch)
        key_pieces = np.int32(4 * chunks)
        key_shift = np.int32(2)
        while key_shift < 5 and (1 << key_shift) < key_pieces:
            key_shift = np.int32(key_shift + 1)
        staging = (piece_words, piece_numbers, shared_address(shared))
        key_head = whole_quotient(head, np.int32(group))
        keys_start = keys_origin + sample * keys_sample_stride + key_head * keys_head_stride
        key_place = (keys_start, key_stride, key_dim_stride)
        values_start = values_origin + sample * values_sample_stride + key_head * values_head_stride
        value_place = (values_start, value_stride, value_dim_stride)
        no_dim = np.int32(0)
        stage_all(keys, key_place, length, no_dim, dims, key_pieces, key_shift, shared, no_dim, key_pitch, staging)
        stage_all(
            values, value_place, length, no_dim, dims, value_pieces, value_shift, shared, values_cell, value_pitch,
            staging,
        )  # fmt: skip
        bound_place = bounds_origin + np.int64(head) * bound_stride
        bound = row_bound(head_bounds, bound_place, entropy_bound, head, leads and sample == 0, errors)
        query_start = query_origin + sample * query_sample_stride + head * query_head_stride
        query_start += first_query * query_stride
        query_place = (query_start, query_stride, query_dim_stride)
        buffers = (words, numbers, low, left_words, left, left_low, step_sums)
        product_limit = largest_product(scale)

        # Once more, with reports, where some product is not fit for a score; so it is where a query is not finite.
        mends = False
        scoring = True
        while scoring:
            start_queries(query, query_place, valid, no_dim, np.int32(dims), piece_words, piece_numbers)
            for each in range(_SCORES):
                scores[each] = _ZERO
            if not mends:
                wait_for_older_groups()
                cuda.syncthreads()  # the keys are there
            key_cell = np.int32((lane >> 2) * key_pitch + turn * 4)
            bad = length == 0
            dim = np.int32(0)
            while dim < dims and length > 0:
                if mends:
                    finish_queries(query, True, piece_words, piece_numbers, buffers)
                else:
                    bad |= finish_queries(query, False, piece_words, piece_numbers, buffers)
                dim = opaque(np.int32(dim + chunk))
                start_queries(query, query_place, valid, dim, np.int32(dims), piece_words, piece_numbers)
                if mends:
                    add_own(shared, key_cell, key_pitch, True, buffers, scores)
                else:
                    add_own(shared, key_cell, key_pitch, False, buffers, scores)
                key_cell = np.int32(key_cell + 16)
            bad |= _has_unfit(scores, 0, product_limit)
            bad |= _has_unfit(scores, _TILE_SCORES, product_limit)
            if mends:
                row = np.int64(sample_head) * queries + first_query
                report_queries(query, query_place, valid, dims, row * dims, errors)
                key_index = (np.int64(sample) * (heads // group) + key_head) * contexts * dims
                reports_keys = first_query == 0 and head % group == 0
                own_keys = (keys_start, key_stride, key_dim_stride, key_index)
                report = (own_keys, contexts, row * contexts, valid, dims, reports_keys)
                _report_scores(scores, report, no_dim, length, product_limit, keys, errors)
                _zero_overflows(scores, product_limit)
            scoring = not mends and valid > 0 and any_lane(bad, FULL_MASK)
            mends = True
        if scale < _ZERO:
            _negate(scores, 0)
            _negate(scores, _TILE_SCORES)
        _leave_out_absent(scores, no_dim, length)

        # Numbers that the products do not need are made anew.
        sample_head, first_query = own_place(queries)
        row = np.int64(sample_head) * queries + first_query
        owns = own_row < valid
        lowest_beta = first_beta(temperature_min, temperature_max)
        highest_beta = last_beta(temperature_min, lowest_beta)
        gap_limit = GAP_RANGE / lowest_beta
        bits = score_bits(scale)
        _take_two_greatest(scores, maxima, runners_up)
        for slot in range(SLOTS):
            # Halves first: two numbers of float32 may lie further apart than its range.
            maxima[slot] = _HALF_OF * maxima[slot] if maxima[slot] > NEGATIVE_INFINITY else _ZERO
        _set_gaps_of_tile(scores, 0, maxima, bits, gap_limit)
        _set_gaps_of_tile(scores, _TILE_SCORES, maxima, bits, gap_limit)
        half_maximum = own_number(maxima, turn)
        gap = minimum((half_maximum - _HALF_OF * own_number(runners_up, turn)) * bits, gap_limit)
        start_beta = beta_of_two(gap, bound, lowest_beta, highest_beta)
        data = (scores, turn, betas, totals, firsts, seconds)
        sought = bound if owns else FLOAT32_MAX
        beta, total, entropy = _search_all(data, sought, start_beta, highest_beta, max_iterations)
        if owns:
            write_row(row + own_row, beta, entropy, temperature_min, temperature_max, temperature_out, entropy_out)
            row_top = _TWO * half_maximum * abs(scale)
            report_sum(row + own_row, row_top, total, temperature_min, temperature_max, lse_out, errors)
        is_over = owns and is_out_of_reach(entropy, bound)
        report_out_of_reach(is_over, row - np.int32(cuda.threadIdx.x >> 5) * WARP_QUERIES, own_row, counts, errors)
        give(beta, betas)
        # Where there is no query, no value has weight.
        give(exp2(-lift) * reciprocal(total) if total > _ZERO and owns else _ZERO, shares)
        _set_weights_of_tile(scores, 0, betas, lift)
        _set_weights_of_tile(scores, _TILE_SCORES, betas, lift)

        smallest = smallest_weight(length)
        value_buffers = (words, numbers, left_words, left, left_low, step_sums, right, right_words, right_low)
        mends = False
        first_dim = np.int32(0)
        while first_dim < dims:
            if first_dim > 0:
                cuda.syncthreads()  # no warp needs the values before any more
                values_start = own_start(values_origin, values_sample_stride, values_head_stride, heads, group, queries)
                value_place = (values_start, value_stride, value_dim_stride)
                stage_all(
                    values, value_place, length, first_dim, dims, value_pieces, value_shift, shared, values_cell,
                    value_pitch, staging,
                )  # fmt: skip
            wait_for_copies()
            cuda.syncthreads()  # the values are there
            bad = False
            adding = True
            while adding:
                for place in range(VALUE_SUMS):
                    results[place] = _ZERO
                if length > 0:
                    events_place = (queries, heads, group, contexts, no_dim, np.int32(length - 1), first_dim, dims)
                    add_values(shared, values_cell, events_place, scores, mends, errors, value_buffers, results)
                bad = False
                for place in range(VALUE_SUMS):
                    results[place] *= shares[place // TILE_SUMS * 2 + ((place >> 1) & 1)]
                    bad |= not (abs(results[place]) <= largest)
                bad = any_lane(bad, FULL_MASK)
                adding = bad and not mends
                if adding:
                    # From now on what carries nothing is not looked at, and no sum overflows that the result does not.
                    _leave_out_light(scores, 0, shares, smallest, not half)
                    _leave_out_light(scores, _TILE_SCORES, shares, smallest, not half)
                    for slot in range(SLOTS):
                        shares[slot] = shares[slot] if half else _ONE
                    mends = True
            sample_head, first_query = own_place(queries)
            place = (np.int64(sample_head) * queries + first_query) * dims + first_dim
            dims_left = np.int32(dims - first_dim)
            if bad:
                report_results(results, place, dims, valid, dims_left, errors)
            store_results(output, results, place, dims, valid, dims_left, stored)
            first_dim = opaque(np.int32(first_dim + VALUE_DIMS))

    return biencoder_few_kernel
