"""The kernel of biencoder_attention on tensor cores where there are at most FEW contexts: all of them at once.

A warp has two tiles of 16 queries of a head. Their scores with all keys stay in its registers: each lane takes those of
the query that it looks after (device.own_queries), finds its temperature without the others, and what they weigh is
multiplied with the values. Keys and values are on their way to shared memory from the beginning.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import FEW, FRAGMENT, HALF, MOST_TILES_WARPS, ROW_TILES, STRETCH, VALUE_DIMS
from burt_numba.device.async_copies import close_group, shared_address, wait_for_copies, wait_for_older_groups
from burt_numba.device.attention import context_count, report_sum, smallest_weight
from burt_numba.device.entropy import GAP_RANGE, beta_of_two, first_beta, last_beta
from burt_numba.device.numeric import FLOAT32_MAX, NEGATIVE_INFINITY, exp2, maximum, minimum, opaque, whole_quotient
from burt_numba.device.own_queries import (
    PRODUCTS,
    SLOTS,
    TILE_PRODUCTS,
    WARP_QUERIES,
    give,
    report_out_of_reach,
    score_bits,
    search_few,
    take_own,
)
from burt_numba.device.query_tiles import query_tiles
from burt_numba.device.row_bounds import is_out_of_reach, row_bound, write_row
from burt_numba.device.score_tiles import own_place, own_start, score_tiles
from burt_numba.device.staged_rows import PIECES, staged_rows
from burt_numba.device.tile_results import TILE_SUMS, VALUE_SUMS, tile_results
from burt_numba.device.vector import rotate_elements
from burt_numba.device.warp import FULL_MASK, any_lane

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_HALF_OF = np.float32(0.5)


@cuda.jit(device=True)
def _swap(some, others):
    for place in range(PRODUCTS):
        held = some[place]
        some[place] = others[place]
        others[place] = held


@cache
def few_kernel(kind: int, vector: int):
    """The kernel for EXACT, ROUNDED or HALF products and accesses of ``vector`` elements (1: any strides)."""
    half = kind == HALF
    width = 8 if half else 4
    chunk = 4 * width
    # In float16 a weight is lifted, relative to the greatest: below 2**-14 numbers of that type have fewer digits.
    lift = np.float32(15.0 if half else 0.0)
    pieces_words = PIECES * width
    value_pieces = VALUE_DIMS // width
    value_pitch = np.int32(4 * value_pieces + 4)
    value_shift = np.int32(value_pieces.bit_length() - 1)
    fragment_type = np.uint32 if half else np.float32
    add_values = score_tiles(kind, vector).add_values
    put_queries, first_scores, _scores_again, _scores_of_part = query_tiles(kind, vector, 0)
    report_results, store_results = tile_results(kind, vector)
    stage = staged_rows(half, vector, True).stage
    rotate_few = rotate_elements(FEW, STRETCH)

    @cuda.jit(device=True)
    def stage_all(array, place, length, first_dim, dims, pieces, lanes_shift, shared, cell, pitch, staging):
        """The block's threads start to copy all keys or values; as many rows as whole stretches have."""
        start, stride, dim_stride = place
        rows = np.int32(0 if length == 0 else STRETCH if length <= STRETCH else FEW)
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
        words = cuda.local.array(TILE_PRODUCTS, np.uint32)
        numbers = cuda.local.array(TILE_PRODUCTS, np.float32)
        low = cuda.local.array(TILE_PRODUCTS, np.float32)
        left_words = cuda.local.array(8, np.uint32)
        left = cuda.local.array(8, np.float32)
        left_low = cuda.local.array(8, np.float32)
        step_sums = cuda.local.array(4, np.float32)
        right = cuda.local.array(2, np.float32)
        right_words = cuda.local.array(2, np.uint32)
        right_low = cuda.local.array(2, np.float32)
        products = cuda.local.array(PRODUCTS, np.float32)
        other_products = cuda.local.array(PRODUCTS, np.float32)
        few = cuda.local.array(FEW, np.float32)
        half_maxima = cuda.local.array(SLOTS, np.float32)
        factors = cuda.local.array(SLOTS, np.float32)
        shares = cuda.local.array(SLOTS, np.float32)
        results = cuda.local.array(VALUE_SUMS, np.float32)
        stored = cuda.local.array(width, np.float32)
        lane = np.int32(cuda.laneid)
        warp = np.int32(cuda.threadIdx.x >> 5)
        warps = np.int32(cuda.blockDim.x >> 5)
        turn = np.int32(lane & 3)
        own_row = np.int32((turn >> 1) * 16 + (turn & 1) * 8 + (lane >> 2))

        sample_head, first_query = own_place(queries)
        sample = whole_quotient(sample_head, np.int32(heads))
        head = np.int32(sample_head - sample * heads)
        key_head = whole_quotient(head, np.int32(group))
        valid = np.int32(min(queries - first_query, WARP_QUERIES))
        leads = first_query == 0 and lane == 0
        length_place = lengths_origin + np.int64(sample) * length_stride
        length = context_count(
            context_lengths, length_place, length_words, contexts, sample, leads and head == 0, errors
        )
        chunks = np.int32((dims + chunk - 1) // chunk)
        tile_cells = np.int32(chunks * FRAGMENT)
        first_cell = np.int32(warp * ROW_TILES * tile_cells)
        key_pitch = np.int32(16 * (chunks | 1))
        keys_cell = np.int32(warps * ROW_TILES * tile_cells)
        values_cell = np.int32(keys_cell + FEW * key_pitch)
        key_pieces = np.int32(4 * chunks)
        key_shift = np.int32(2)
        while key_shift < 5 and (1 << key_shift) < key_pieces:
            key_shift = np.int32(key_shift + 1)
        staging = (piece_words, piece_numbers, shared_address(shared))
        keys_start = own_start(keys_origin, keys_sample_stride, keys_head_stride, heads, group, queries)
        key_place = (keys_start, key_stride, key_dim_stride)
        values_start = own_start(values_origin, values_sample_stride, values_head_stride, heads, group, queries)
        value_place = (values_start, value_stride, value_dim_stride)
        no_dim = np.int32(0)
        stage_all(keys, key_place, length, no_dim, dims, key_pieces, key_shift, shared, keys_cell, key_pitch, staging)
        stage_all(
            values, value_place, length, no_dim, dims, value_pieces, value_shift, shared, values_cell, value_pitch,
            staging,
        )  # fmt: skip
        bound_place = bounds_origin + np.int64(head) * bound_stride
        bound = row_bound(head_bounds, bound_place, entropy_bound, head, leads and sample == 0, errors)
        row = np.int64(sample_head) * queries + first_query
        query_start = query_origin + sample * query_sample_stride + head * query_head_stride
        query_start += first_query * query_stride
        put_queries(
            query,
            (query_start, query_stride, query_dim_stride),
            valid,
            np.int32(dims),
            shared,
            first_cell,
            tile_cells,
            -_ONE if scale < _ZERO else _ONE,
            (piece_words, piece_numbers),
            row * dims,
            errors,
        )
        key_index = (np.int64(sample) * (heads // group) + key_head) * contexts * dims
        reports_keys = first_query == 0 and head % group == 0
        report = (
            (keys_start, key_stride, key_dim_stride, key_index),
            contexts,
            row * contexts,
            valid,
            dims,
            reports_keys,
        )
        buffers = (words, numbers, low, left_words, left, left_low, step_sums)
        product_limit = FLOAT32_MAX / maximum(abs(scale), _ONE)
        wait_for_older_groups()
        cuda.syncthreads()  # the keys are there

        for each in range(FEW):
            few[each] = NEGATIVE_INFINITY
        for product in range(PRODUCTS):
            other_products[product] = NEGATIVE_INFINITY
        first_key = np.int32(0)
        while first_key < FEW:
            if first_key < length:
                cells = (first_cell, tile_cells, np.int32(keys_cell + first_key * key_pitch), key_pitch)
                first_scores(
                    shared, cells, first_key, length, product_limit, dims, True, buffers, products, keys, report, errors
                )
            else:
                for product in range(PRODUCTS):
                    products[product] = NEGATIVE_INFINITY
            take_own(products, turn, few)
            rotate_few(few)
            _swap(products, other_products)
            first_key = opaque(np.int32(first_key + STRETCH))

        # The temperature of the query that the lane looks after. Numbers that the products do not need are made anew.
        sample_head, first_query = own_place(queries)
        row = np.int64(sample_head) * queries + first_query
        owns = own_row < valid
        lowest_beta = first_beta(temperature_min, temperature_max)
        highest_beta = last_beta(temperature_min, lowest_beta)
        gap_limit = GAP_RANGE / lowest_beta
        bits = score_bits(scale)
        row_max, runner_up = NEGATIVE_INFINITY, NEGATIVE_INFINITY
        for each in range(FEW):
            runner_up = maximum(runner_up, minimum(row_max, few[each]))
            row_max = maximum(row_max, few[each])
        if row_max == NEGATIVE_INFINITY:
            row_max = _ZERO
        # Halves first: two numbers of float32 may lie further apart than its range.
        half_maximum = _HALF_OF * row_max
        for each in range(FEW):
            few[each] = minimum((half_maximum - _HALF_OF * few[each]) * bits, gap_limit)
        beta, total, entropy = lowest_beta, _ONE, _ZERO
        if owns:
            gap = minimum((half_maximum - _HALF_OF * runner_up) * bits, gap_limit)
            start_beta = beta_of_two(gap, bound, lowest_beta, highest_beta)
            beta, total, entropy = search_few(few, True, bound, start_beta, highest_beta, max_iterations)
            write_row(row + own_row, beta, entropy, temperature_min, temperature_max, temperature_out, entropy_out)
            row_top = _TWO * half_maximum * abs(scale)
            report_sum(row + own_row, row_top, total, temperature_min, temperature_max, lse_out, errors)
        is_over = owns and is_out_of_reach(entropy, bound)
        report_out_of_reach(is_over, row - warp * WARP_QUERIES, own_row, counts, errors)
        give(half_maximum, half_maxima)
        give(minimum(beta * bits, FLOAT32_MAX), factors)
        # Where there is no query, no value has weight.
        give(exp2(-lift) / total if total > _ZERO and owns else _ZERO, shares)

        for _stretch in range(2):
            for product in range(PRODUCTS):
                slot = product // TILE_PRODUCTS * 2 + ((product >> 1) & 1)
                t = minimum((half_maxima[slot] - _HALF_OF * products[product]) * factors[slot], GAP_RANGE)
                products[product] = exp2(lift - t) if half else exp2(-t)
            _swap(products, other_products)

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
                first_key = np.int32(0)
                while first_key < FEW:
                    if first_key < length:
                        events_place = (
                            queries, heads, group, contexts, first_key, np.int32(length - 1), first_dim, dims
                        )  # fmt: skip
                        value_cell = np.int32(values_cell + first_key * value_pitch)
                        add_values(shared, value_cell, events_place, products, mends, errors, value_buffers, results)
                    _swap(products, other_products)
                    first_key = opaque(np.int32(first_key + STRETCH))
                bad = False
                for place in range(VALUE_SUMS):
                    results[place] *= shares[place // TILE_SUMS * 2 + ((place >> 1) & 1)]
                    bad |= not (abs(results[place]) <= FLOAT32_MAX)
                bad = any_lane(bad, FULL_MASK)
                adding = bad and not mends
                if adding:
                    # From now on what carries nothing is not looked at, and no sum overflows that the result does not.
                    for _stretch in range(2):
                        for product in range(PRODUCTS):
                            slot = product // TILE_PRODUCTS * 2 + ((product >> 1) & 1)
                            share = products[product] * shares[slot]
                            kept = products[product] if half else share
                            products[product] = kept if share > smallest else _ZERO
                        _swap(products, other_products)
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
