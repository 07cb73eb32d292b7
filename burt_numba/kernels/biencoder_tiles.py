"""The kernel of biencoder_attention on tensor cores: a warp has two tiles of 16 queries of a head, and all contexts.

    greatest    a first pass over the keys: the greatest score of each query, and a few of the next
    search      from those few, where the temperature may be; then passes that evaluate the entropy of all 32 queries,
                each at its own temperature, until all are found: two or three
    values      a last pass: weights, and their product with the values

Scores are made again in each pass: nothing is kept but sums, whatever the number of contexts. Lane (g = lane / 4,
t = lane % 4) has the scores of queries g, g + 8, g + 16 and g + 24 with two keys in 8, and looks after query g + 8 t.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import FRAGMENT, HALF, KEY_TILES, ROW_TILES, STRETCH, TILE_ROWS, VALUE_DIMS
from burt_numba.device.async_copies import wait_for_copies
from burt_numba.device.attention import HALF_MAX, context_count, report_sum, smallest_weight
from burt_numba.device.entropy import (
    FEW,
    GAP_RANGE,
    accepted_limits,
    entropy_of,
    first_beta,
    last_beta,
    next_beta,
    start_from_few,
    variance_of,
)
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, NEGATIVE_INFINITY, choose, exp2, maximum, minimum, opaque
from burt_numba.device.query_tiles import query_tiles
from burt_numba.device.row_bounds import report_row, row_bound
from burt_numba.device.score_tiles import score_tiles
from burt_numba.device.vector import rotate_elements, store_vector
from burt_numba.device.warp import FULL_MASK, any_lane, shuffle, warp_sum3

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_HALF_OF = np.float32(0.5)
_SLOTS = 2 * ROW_TILES
"""Queries of which a lane has scores; as many lanes share each."""
_WARP_QUERIES = ROW_TILES * TILE_ROWS
_TILE_PRODUCTS = 4 * KEY_TILES
_PRODUCTS = ROW_TILES * _TILE_PRODUCTS
_CLASSES = FEW // 4
_TOPS = _SLOTS * _CLASSES


@cuda.jit(device=True)
def _add_compensated(sums, lost, place, value):
    """What rounding takes from a sum of many parts is kept beside it."""
    total = sums[place] + value
    lost[place] += value - (total - sums[place])
    sums[place] = total


@cuda.jit(device=True)
def _own(values, turn):
    """Of the numbers of a lane's four queries, that of the one it looks after."""
    own = values[0]
    for slot in range(1, _SLOTS):
        own = choose(turn & (_SLOTS - 1) == slot, values[slot], own)
    return own


@cuda.jit(device=True)
def _give(value, values):
    """Every lane gets the numbers of its four queries from the lanes that look after them."""
    first = np.int32(cuda.laneid & 28)
    for slot in range(_SLOTS):
        values[slot] = shuffle(value, np.int32(first + slot), FULL_MASK)


def _take_tops(slot: int):
    """A function by which the lanes that look after a slot's query, and those before, get what all have seen of it."""
    take_others = _take_tops(slot - 1) if slot > 0 else None

    @cuda.jit(device=True)
    def take(tops, few, own_slot):
        if slot > 0:
            take_others(tops, few, own_slot)
        first = np.int32(cuda.laneid & 28)
        for each in range(FEW):
            top = shuffle(tops[slot * _CLASSES + each % _CLASSES], np.int32(first + each // _CLASSES), FULL_MASK)
            few[each] = choose(own_slot == slot, top, few[each])

    return take


@cache
def tiles_kernel(kind: int, vector: int):
    """The kernel for EXACT, ROUNDED or HALF products and accesses of ``vector`` elements (1: any strides)."""
    half = kind == HALF
    width = 8 if half else 4
    chunk = 4 * width
    limit = HALF_MAX if half else FLOAT32_MAX
    # In float16 a weight is lifted, relative to the greatest: below 2**-14 numbers of that type have fewer digits.
    lift = np.float32(15.0 if half else 0.0)
    value_pieces = VALUE_DIMS // width
    value_pitch = 4 * value_pieces + 4
    value_shift = value_pieces.bit_length() - 1
    fragment_type = np.uint32 if half else np.float32
    tile_sums = VALUE_DIMS // 8 * 4
    tile_columns = VALUE_DIMS // (8 * width)
    value_sums = ROW_TILES * tile_sums
    tiles = score_tiles(kind, vector)
    stage, add_values = tiles.stage, tiles.add_values
    put_queries, first_scores, scores_again = query_tiles(kind, vector)
    store = store_vector(width)
    rotate_results = rotate_elements(value_sums, 8)
    take_tops = _take_tops(_SLOTS - 1)

    @cuda.jit(device=True)
    def stage_keys(keys, place, first_key, length, dims, shared, layout, buffer, staging):
        start, stride, dim_stride, _key_index = place
        cell, pitch, pieces, lanes_shift = layout
        stretch_place = (start, stride, dim_stride, first_key, np.int32(length - 1), np.int32(0))
        cell = np.int32(cell + buffer * STRETCH * pitch)
        if first_key < length:
            stage(keys, stretch_place, dims, pieces, lanes_shift, shared, cell, pitch, staging)

    @cuda.jit(device=True)
    def stage_values(values, place, first_key, length, first_dim, dims, shared, cell, buffer, staging):
        start, stride, dim_stride = place
        stretch_place = (start, stride, dim_stride, first_key, np.int32(length - 1), first_dim)
        cell = np.int32(cell + buffer * STRETCH * value_pitch)
        if first_key < length:
            stage(values, stretch_place, dims, value_pieces, value_shift, shared, cell, np.int32(value_pitch), staging)

    @cuda.jit(device=True)
    def report_results(results, place, dims, rows_left, dims_left, errors):
        """Results that their type does not hold become 0."""
        nans = np.int32(0)
        infinities = np.int32(0)
        first_nan = np.int64(0)
        first_infinity = np.int64(0)
        first = np.int32(0)
        while first < value_sums:
            for each in range(8):
                cell = np.int32(first + each)
                column = np.int32((cell & (tile_sums - 1)) >> 2)
                row = np.int32(cell // tile_sums * TILE_ROWS + (cell >> 1 & 1) * 8 + (cuda.laneid >> 2))
                step = np.int32(column // width * 8 + (cell & 1) + (cuda.laneid & 3) * 2)
                dim = np.int32(step * width + (column & (width - 1)))
                value = results[each]
                if not (abs(value) <= limit):
                    if row < rows_left and dim < dims_left:
                        index = place + np.int64(row) * dims + dim
                        if value == value:
                            first_infinity = index if infinities == 0 else min(first_infinity, index)
                            infinities += np.int32(1)
                        else:
                            first_nan = index if nans == 0 else min(first_nan, index)
                            nans += np.int32(1)
                    results[each] = _ZERO
            rotate_results(results)
            first = opaque(np.int32(first + 8))
        record_bad_elements(errors, nans, infinities, first_nan, first_infinity, 32, FULL_MASK)

    @cuda.jit(device=True)
    def store_results(output, results, place, dims, rows_left, dims_left, stored):
        for vector_place in range(value_sums // width):
            below, odd, column = vector_place & 1, (vector_place >> 1) & 1, (vector_place >> 2) % tile_columns
            row_tile = (vector_place >> 2) // tile_columns
            row = np.int32(row_tile * TILE_ROWS + below * 8 + (cuda.laneid >> 2))
            dim = np.int32((column * 8 + (cuda.laneid & 3) * 2 + odd) * width)
            first = row_tile * tile_sums + column * width * 4 + below * 2 + odd
            for element in range(width):
                stored[element] = results[first + element * 4]
            if row < rows_left and dim < dims_left:
                at = place + np.int64(row) * dims + dim
                if vector > 1:
                    store(output, at, stored, 0)
                else:
                    for element in range(width):
                        if dim + element < dims_left:
                            output[at + element] = stored[element]

    @cuda.jit
    def biencoder_tiles_kernel(
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
        piece_words = cuda.local.array(width, np.uint32)
        piece_numbers = cuda.local.array(width, np.float32)
        words = cuda.local.array(_TILE_PRODUCTS, np.uint32)
        numbers = cuda.local.array(_TILE_PRODUCTS, np.float32)
        low = cuda.local.array(_TILE_PRODUCTS, np.float32)
        left_words = cuda.local.array(8, np.uint32)
        left = cuda.local.array(8, np.float32)
        left_low = cuda.local.array(8, np.float32)
        step_sums = cuda.local.array(4, np.float32)
        products = cuda.local.array(_PRODUCTS, np.float32)
        tops = cuda.local.array(_TOPS, np.float32)
        few = cuda.local.array(FEW, np.float32)
        half_maxima = cuda.local.array(_SLOTS, np.float32)
        factors = cuda.local.array(_SLOTS, np.float32)
        part_totals = cuda.local.array(_SLOTS, np.float32)
        part_firsts = cuda.local.array(_SLOTS, np.float32)
        totals = cuda.local.array(_SLOTS, np.float32)
        firsts = cuda.local.array(_SLOTS, np.float32)
        seconds = cuda.local.array(_SLOTS, np.float32)
        lost_totals = cuda.local.array(_SLOTS, np.float32)
        lost_firsts = cuda.local.array(_SLOTS, np.float32)
        shares = cuda.local.array(_SLOTS, np.float32)
        right = cuda.local.array(2, np.float32)
        right_words = cuda.local.array(2, np.uint32)
        right_low = cuda.local.array(2, np.float32)
        results = cuda.local.array(value_sums, np.float32)
        stored = cuda.local.array(width, np.float32)
        lane = np.int32(cuda.laneid)
        warp = np.int32(cuda.threadIdx.x >> 5)
        turn = np.int32(lane & 3)

        block_queries = np.int32((cuda.blockDim.x >> 5) * _WARP_QUERIES)
        blocks = np.int32((queries + block_queries - 1) // block_queries)
        sample_head = np.int32(cuda.blockIdx.x // blocks)
        first_query = np.int32((cuda.blockIdx.x - sample_head * blocks) * block_queries + warp * _WARP_QUERIES)
        sample = np.int32(sample_head // heads)
        head = np.int32(sample_head - sample * heads)
        key_head = np.int32(head // group)
        valid = np.int32(min(queries - first_query, _WARP_QUERIES))
        leads = first_query == 0 and lane == 0
        length_place = lengths_origin + np.int64(sample) * length_stride
        length = context_count(
            context_lengths, length_place, length_words, contexts, sample, leads and head == 0, errors
        )
        bound_place = bounds_origin + np.int64(head) * bound_stride
        bound = row_bound(head_bounds, bound_place, entropy_bound, head, leads and sample == 0, errors)
        chunks = np.int32((dims + chunk - 1) // chunk)
        tile_cells = np.int32(chunks * FRAGMENT)
        first_cell = np.int32(warp * ROW_TILES * tile_cells)
        key_pitch = np.int32(16 * (chunks | 1))
        keys_cell = np.int32((cuda.blockDim.x >> 5) * ROW_TILES * tile_cells)
        values_cell = np.int32(keys_cell + 2 * STRETCH * key_pitch)
        key_pieces = np.int32(4 * chunks)
        key_shift = np.int32(2)
        while key_shift < 5 and (1 << key_shift) < key_pieces:
            key_shift = np.int32(key_shift + 1)
        buffer = np.int32(0)
        magnitude = abs(scale)
        product_limit = FLOAT32_MAX / maximum(magnitude, _ONE)
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
        key_place = (
            keys_origin + sample * keys_sample_stride + key_head * keys_head_stride,
            key_stride,
            key_dim_stride,
            key_index,
        )
        reports_keys = first_query == 0 and head % group == 0
        report = (key_place, contexts, row * contexts, valid, dims, reports_keys)
        buffers = (words, numbers, low, left_words, left, left_low, step_sums)
        staging = (piece_words, piece_numbers)
        layout = (keys_cell, key_pitch, key_pieces, key_shift)

        # The greatest product of each query, and of each class of keys: by lane, column of the lane, and tile.
        for top in range(_TOPS):
            tops[top] = NEGATIVE_INFINITY
        for each in range(FEW):
            few[each] = NEGATIVE_INFINITY
        flawed = False
        stage_keys(keys, key_place, np.int32(0), length, dims, shared, layout, buffer, staging)
        first_key = np.int32(0)
        while first_key < length:
            wait_for_copies()
            cuda.syncthreads()  # a stretch is there, and the one before is not needed any more
            cells = (first_cell, tile_cells, np.int32(keys_cell + buffer * STRETCH * key_pitch), key_pitch)
            buffer ^= np.int32(1)
            next_key = np.int32(first_key + STRETCH)
            stage_keys(keys, key_place, next_key, length, dims, shared, layout, buffer, staging)
            if valid > 0:
                flawed |= first_scores(
                    shared, cells, first_key, length, product_limit, dims, buffers, products, keys, report, errors
                )
                for product in range(_PRODUCTS):
                    slot = product // _TILE_PRODUCTS * 2 + ((product >> 1) & 1)
                    top = slot * _CLASSES + ((product >> 2) & (_CLASSES // 2 - 1)) * 2 + (product & 1)
                    tops[top] = maximum(tops[top], products[product])
            first_key = opaque(next_key)
        take_tops(tops, few, np.int32(turn & (_SLOTS - 1)))
        row_max = few[0]
        for each in range(1, FEW):
            row_max = maximum(row_max, few[each])
        if row_max == NEGATIVE_INFINITY:
            row_max = _ZERO
        lowest_beta = first_beta(temperature_min, temperature_max)
        highest_beta = last_beta(temperature_min, lowest_beta)
        gap_limit = GAP_RANGE / lowest_beta
        bits = minimum(2 * magnitude * LOG2_E, FLOAT32_MAX)
        for each in range(FEW):
            # Halves first: two numbers of float32 may lie further apart than its range.
            few[each] = minimum((_HALF_OF * row_max - _HALF_OF * few[each]) * bits, gap_limit)
        beta, low_beta = start_from_few(few, bound, lowest_beta, highest_beta)
        _give(_HALF_OF * row_max, half_maxima)

        # The loop of device.entropy, of all queries of the warp at a time.
        bound_limit, lowest_accepted, aim = accepted_limits(bound)
        high_beta = highest_beta
        best_beta = lowest_beta
        total = _ZERO
        entropy = _ZERO
        step = np.int32(0)
        bracketed = False
        searching = valid > 0
        while cuda.syncthreads_or(np.int32(searching)) != 0:
            evaluates = any_lane(searching, FULL_MASK)
            _give(minimum(beta * bits, FLOAT32_MAX), factors)
            for slot in range(_SLOTS):
                totals[slot] = _ZERO
                lost_totals[slot] = _ZERO
                firsts[slot] = _ZERO
                lost_firsts[slot] = _ZERO
                seconds[slot] = _ZERO
            stage_keys(keys, key_place, np.int32(0), length, dims, shared, layout, buffer, staging)
            first_key = np.int32(0)
            while first_key < length:
                wait_for_copies()
                cuda.syncthreads()  # a stretch is there, and the one before is not needed any more
                cells = (first_cell, tile_cells, np.int32(keys_cell + buffer * STRETCH * key_pitch), key_pitch)
                buffer ^= np.int32(1)
                next_key = np.int32(first_key + STRETCH)
                stage_keys(keys, key_place, next_key, length, dims, shared, layout, buffer, staging)
                if evaluates:
                    scores_again(shared, cells, first_key, length, product_limit, dims, flawed, buffers, products)
                    for slot in range(_SLOTS):
                        part_totals[slot] = _ZERO
                        part_firsts[slot] = _ZERO
                    for product in range(_PRODUCTS):
                        slot = product // _TILE_PRODUCTS * 2 + ((product >> 1) & 1)
                        t = minimum((half_maxima[slot] - _HALF_OF * products[product]) * factors[slot], GAP_RANGE)
                        weight = exp2(-t)
                        weighted = t * weight
                        part_totals[slot] += weight
                        part_firsts[slot] += weighted
                        seconds[slot] += weighted * t
                    for slot in range(_SLOTS):
                        _add_compensated(totals, lost_totals, slot, part_totals[slot])
                        _add_compensated(firsts, lost_firsts, slot, part_firsts[slot])
                first_key = opaque(next_key)
            for slot in range(_SLOTS):
                totals[slot], firsts[slot], seconds[slot] = warp_sum3(
                    totals[slot] + lost_totals[slot], firsts[slot] + lost_firsts[slot], seconds[slot], 4, FULL_MASK
                )
            new_total, first, second = _own(totals, turn), _own(firsts, turn), _own(seconds, turn)
            if searching:
                new_entropy = entropy_of(new_total, first)
                if new_entropy <= bound_limit:
                    best_beta, total, entropy = beta, new_total, new_entropy
                    high_beta = beta
                    bracketed = True
                    searching = new_entropy < lowest_accepted and beta > lowest_beta
                else:
                    low_beta = beta
                    if beta >= highest_beta:
                        best_beta, total, entropy = beta, new_total, new_entropy
                        searching = False
                if step >= max_iterations:
                    searching = False
                if searching:
                    if step == max_iterations - 1 and not bracketed:
                        beta = highest_beta
                    else:
                        variance = variance_of(new_total, first, second)
                        beta = next_beta(step, beta, new_entropy, variance, low_beta, high_beta, bracketed, aim)
                step = np.int32(step + 1)

        own_row = np.int32((turn >> 1) * 16 + (turn & 1) * 8 + (lane >> 2))
        if turn < _SLOTS and own_row < valid:
            report_row(
                row + own_row,
                best_beta,
                entropy,
                bound,
                temperature_min,
                temperature_max,
                temperature_out,
                entropy_out,
                errors,
            )
            report_sum(row + own_row, row_max * magnitude, total, temperature_min, temperature_max, lse_out, errors)

        _give(minimum(best_beta * bits, FLOAT32_MAX), factors)
        # Where there is no query, no value has weight.
        _give(exp2(-lift) / total if total > _ZERO and own_row < valid else _ZERO, shares)
        smallest = smallest_weight(length)
        value_place = (
            values_origin + sample * values_sample_stride + key_head * values_head_stride,
            value_stride,
            value_dim_stride,
        )
        value_buffers = (words, numbers, left_words, left, left_low, step_sums, right, right_words, right_low)
        first_dim = np.int32(0)
        while first_dim < dims:
            mends = False
            adding = True
            while adding:
                for place in range(value_sums):
                    results[place] = _ZERO
                stage_keys(keys, key_place, np.int32(0), length, dims, shared, layout, buffer, staging)
                stage_values(
                    values, value_place, np.int32(0), length, first_dim, dims, shared, values_cell, buffer, staging
                )
                first_key = np.int32(0)
                while first_key < length:
                    wait_for_copies()
                    cuda.syncthreads()  # a stretch is there, and the one before is not needed any more
                    cells = (first_cell, tile_cells, np.int32(keys_cell + buffer * STRETCH * key_pitch), key_pitch)
                    value_cell = np.int32(values_cell + buffer * STRETCH * value_pitch)
                    buffer ^= np.int32(1)
                    next_key = np.int32(first_key + STRETCH)
                    stage_keys(keys, key_place, next_key, length, dims, shared, layout, buffer, staging)
                    stage_values(
                        values, value_place, next_key, length, first_dim, dims, shared, values_cell, buffer, staging
                    )
                    if valid > 0:
                        scores_again(shared, cells, first_key, length, product_limit, dims, flawed, buffers, products)
                        carries = False
                        for product in range(_PRODUCTS):
                            slot = product // _TILE_PRODUCTS * 2 + ((product >> 1) & 1)
                            t = minimum((half_maxima[slot] - _HALF_OF * products[product]) * factors[slot], GAP_RANGE)
                            weight = exp2(lift - t)
                            share = weight * shares[slot]
                            carries |= share > smallest
                            products[product] = (weight if half else share) if share > smallest else _ZERO
                        if any_lane(carries, FULL_MASK):
                            events_place = (key_index, first_key, np.int32(length - 1), first_dim, dims)
                            add_values(
                                shared, value_cell, events_place, products, mends, errors, value_buffers, results
                            )
                    first_key = opaque(next_key)
                bad = False
                for place in range(value_sums):
                    if half:
                        results[place] *= shares[place // tile_sums * 2 + ((place >> 1) & 1)]
                    bad |= not (abs(results[place]) <= limit)
                bad = cuda.syncthreads_or(np.int32(bad)) != 0
                adding = bad and not mends
                mends = True
            place = row * dims + first_dim
            dims_left = np.int32(dims - first_dim)
            if bad:
                report_results(results, place, dims, valid, dims_left, errors)
            store_results(output, results, place, dims, valid, dims_left, stored)
            first_dim = opaque(np.int32(first_dim + VALUE_DIMS))

    return biencoder_tiles_kernel
