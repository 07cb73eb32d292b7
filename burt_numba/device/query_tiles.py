"""The queries of a warp, and their scores with a stretch of keys: what is not finite counts as 0 and is reported."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import EXACT, HALF, KEY_TILES, ROW_TILES, TILE_ROWS, stretches_of
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import FLOAT32_MAX, NEGATIVE_INFINITY, opaque, reciprocal
from burt_numba.device.own_queries import PRODUCTS, WARP_QUERIES
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.score_tiles import score_tiles
from burt_numba.device.staged_rows import PIECES
from burt_numba.device.vector import rotate_elements
from burt_numba.device.warp import FULL_MASK, any_lane, sync_warp

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_BELOW_ONE = np.float32(1 - 2**-22)
LARGEST_TAME = np.float32(2.0**29)
"""Products of 256 such numbers, times any scale that this kernel takes, are finite, and their sums in any order."""


class QueryTiles(NamedTuple):
    """Device functions for one type and one way to access memory."""

    put_queries: Any
    """``put_queries(query, place, valid, dims, shared, first_cell, tile_cells, sign, buffers, flat, errors)``: whether
    some are large, where products are exact."""
    first_scores: Any
    """``first_scores(shared, cells, first_key, length, product_limit, dims, mends, buffers, sums, keys, report,
    errors)``"""
    scores_again: Any
    """``scores_again(shared, cells, first_key, length, product_limit, dims, flawed, buffers, sums)``"""
    scores_of_part: Any
    """As ``scores_again``, of a fourth of the keys that a block works on at a time, from ``first_key`` on."""


@cuda.jit(device=True)
def largest_product(scale):
    """Of which a score is finite. (An exact quotient of so large a number takes a subroutine.)"""
    size = abs(scale)
    return FLOAT32_MAX if size <= _ONE else FLOAT32_MAX * _BELOW_ONE * reciprocal(size)


@cuda.jit(device=True)
def report_queries(query, place, valid, dims, flat, errors):
    """The warp reports what is not finite in its queries."""
    start, stride, dim_stride = place
    row = np.int32(0)
    while row < valid:
        own = np.int64(row)
        report_not_finite(
            query,
            start + own * stride,
            dim_stride,
            np.int64(cuda.laneid),
            1,
            np.int64(dims),
            np.int64(32),
            flat + own * dims,
            errors,
            32,
            FULL_MASK,
        )
        row = np.int32(row + 1)


@cache
def report_scores_of(key_tiles: int):
    """A function for the scores of so many tiles of keys."""
    rotate_products = rotate_elements(4 * ROW_TILES * key_tiles, 4)

    @cuda.jit(device=True)
    def report_scores(sums, place, first_key, length, product_limit, keys, errors):
        """Scores that finite numbers overflow to count as 0; they and bad elements of the keys are reported."""
        key_place, contexts, score_place, valid, dims, reports_keys = place
        key_start, key_stride, key_dim_stride, key_index = key_place
        group, turn = np.int32(cuda.laneid >> 2), np.int32(cuda.laneid & 3)
        nans = np.int32(0)
        infinities = np.int32(0)
        first_nan = np.int64(0)
        first_infinity = np.int64(0)
        tile = np.int32(0)
        while tile < ROW_TILES * key_tiles:
            for each in range(4):
                value = sums[each]
                row = np.int32(tile // key_tiles * TILE_ROWS + (each >> 1) * 8 + group)
                key = np.int32(first_key + (tile & (key_tiles - 1)) * 8 + turn * 2 + (each & 1))
                if not (abs(value) <= product_limit) and key < length and row < valid:
                    index = score_place + np.int64(row) * contexts + key
                    if value == value:
                        first_infinity = index if infinities == 0 else min(first_infinity, index)
                        infinities += np.int32(1)
                    else:
                        first_nan = index if nans == 0 else min(first_nan, index)
                        nans += np.int32(1)
            rotate_products(sums)
            tile = opaque(np.int32(tile + 1))
        record_bad_elements(errors, nans, infinities, first_nan, first_infinity, 32, FULL_MASK)
        if reports_keys:
            for part in range(key_tiles * 8 // 32):
                own = np.int64(first_key + part * 32 + cuda.laneid)
                report_not_finite(
                    keys,
                    key_start + own * key_stride,
                    key_dim_stride,
                    np.int64(0),
                    1,
                    np.int64(dims if own < length else 0),
                    np.int64(1),
                    key_index + own * dims,
                    errors,
                    32,
                    FULL_MASK,
                )

    return report_scores


@cache
def zero_overflows_of(products: int):
    """A function for so many scores of a lane."""

    @cuda.jit(device=True)
    def zero_overflows(sums, product_limit):
        for product in range(products):
            if not (abs(sums[product]) <= product_limit):
                sums[product] = _ZERO

    return zero_overflows


@cache
def leave_out_absent_of(key_tiles: int):
    """A function for the scores of so many tiles of keys: -inf for what stands beyond the last key."""
    tile_products = 4 * key_tiles

    @cuda.jit(device=True)
    def leave_out_absent(sums, first_key, length):
        if first_key + 8 * key_tiles > length:
            for product in range(ROW_TILES * tile_products):
                key = first_key + (product % tile_products) // 4 * 8 + (cuda.laneid & 3) * 2 + (product & 1)
                if key >= length:
                    sums[product] = NEGATIVE_INFINITY

    return leave_out_absent


def _scores_again(add_products, key_tiles: int):
    zero_overflows = zero_overflows_of(4 * ROW_TILES * key_tiles)
    leave_out_absent = leave_out_absent_of(key_tiles)

    @cuda.jit(device=True)
    def scores_again(shared, cells, first_key, length, product_limit, dims, flawed, buffers, sums):
        add_products(shared, cells, dims, flawed, buffers, sums)
        if flawed:
            zero_overflows(sums, product_limit)
        leave_out_absent(sums, first_key, length)

    return scores_again


@cache
def query_tiles(kind: int, vector: int, chunks: int) -> QueryTiles:
    """For EXACT, ROUNDED or HALF products, accesses of ``vector`` elements (1: any strides), ``chunks`` (0: any)."""
    exact = kind == EXACT
    width = 8 if kind == HALF else 4
    chunk = 4 * width
    tiles = score_tiles(kind, vector, chunks)
    start_piece, finish_pieces, put_piece = tiles.start_piece, tiles.finish_pieces, tiles.put_piece
    add_products = tiles.add_products
    zero_overflows, leave_out_absent = zero_overflows_of(PRODUCTS), leave_out_absent_of(KEY_TILES)
    report_scores = report_scores_of(KEY_TILES)
    scores_again = _scores_again(add_products, KEY_TILES)
    part_tiles = stretches_of(kind, chunks)
    scores_of_part = _scores_again(score_tiles(kind, vector, chunks, part_tiles).add_products, part_tiles)

    @cuda.jit(device=True)
    def put_queries(query, place, valid, dims, shared, first_cell, tile_cells, sign, buffers, flat, errors):
        """A warp's queries as tensor cores take them, made finite and reported where they are not; zero beyond.

        Whether some are larger than LARGEST_TAME, or were not finite.
        """
        start, stride, dim_stride = place
        words, values = buffers
        bad = False
        large = False
        padded = np.int32((dims + chunk - 1) // chunk * chunk)
        lanes_a_query = np.int32(4)
        while lanes_a_query < 32 and lanes_a_query * width < padded:
            lanes_a_query = np.int32(lanes_a_query << 1)
        lane = np.int32(cuda.laneid)
        step = np.int32(32 // lanes_a_query)
        row = np.int32(lane // lanes_a_query)
        while row < WARP_QUERIES:
            dim = np.int32((lane & (lanes_a_query - 1)) * width)
            while dim < padded:
                for piece in range(PIECES):
                    own = np.int32(row + piece * step)
                    last = dims if own < valid else np.int32(0)
                    start_piece(query, start + own * stride, dim_stride, np.int64(dim), last, words, values, piece)
                finish_pieces(query, words, values)
                for element in range(PIECES * width):
                    if exact:
                        large |= not (abs(values[element]) <= LARGEST_TAME)
                    bad |= not_finite(values[element])
                    values[element] = finite_or_zero(values[element]) * sign
                for piece in range(PIECES):
                    own = np.int32(row + piece * step)
                    if own < WARP_QUERIES:
                        put_piece(values, piece, own & 15, dim, shared, np.int32(first_cell + (own >> 4) * tile_cells))
                dim = opaque(np.int32(dim + 32 * width))
            row = opaque(np.int32(row + PIECES * step))
        if any_lane(bad, FULL_MASK):
            report_queries(query, place, valid, dims, flat, errors)
        sync_warp()  # the queries are in place
        return large

    @cuda.jit(device=True)
    def first_scores(shared, cells, first_key, length, product_limit, dims, mends, buffers, sums, keys, report, errors):
        """A stretch's products, and whether some were not finite; where it ``mends``, bad elements count as 0 then, and
        are reported."""
        add_products(shared, cells, dims, False, buffers, sums)
        bad = False
        for product in range(PRODUCTS):
            bad |= not (abs(sums[product]) <= product_limit)
        flawed = any_lane(bad, FULL_MASK)
        if flawed and mends:
            add_products(shared, cells, dims, True, buffers, sums)
            report_scores(sums, report, first_key, length, product_limit, keys, errors)
            zero_overflows(sums, product_limit)
        leave_out_absent(sums, first_key, length)
        return flawed

    return QueryTiles(put_queries, first_scores, scores_again, scores_of_part)
