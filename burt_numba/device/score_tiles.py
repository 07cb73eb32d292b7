"""Products of tiles of 16 queries with keys, and of their weights with values, on tensor cores.

Vectors are seen as 32-bit words (a float32 number, or two float16 numbers), 16 of them a chunk. A lane (g = lane / 4,
t = lane % 4) has words 4t .. 4t + 3 of query g, of query g + 8 and of one key in 8, by a single 16-byte access each.
Those are two steps of a tensor core,

    words of a chunk     0   1   2   3 | 4   5   6   7 | ...
    lane t               0   0   0   0 | 1   1   1   1 | ...
    step                 0   0   1   1 | 0   0   1   1 | ...

which call words 4t and 4t + 1 (of the first step) t and t + 4. Queries lie in shared memory in the order in which lanes
take them: of 16 queries and a chunk the cells of step 0 and of step 1, 4 for each lane. Keys and values lie there row
by row, so far apart that the lanes of an access meet all banks.

Of the scores of 8 keys a lane has those of keys 2t and 2t + 1, with queries g and g + 8. As weights, these are what it
brings to the product with the values of those keys, whose words 4g .. 4g + 3 of 32 it loads: columns of the product
stand for every fourth word.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import (
    EXACT,
    FRAGMENT,
    HALF,
    KEY_TILES,
    ROW_TILES,
    STRETCH,
    TILE_ROWS,
    VALUE_DIMS,
    stretches_of,
)
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import choose, maximum, minimum, opaque, whole_quotient
from burt_numba.device.rows import finite_or_zero
from burt_numba.device.staged_rows import staged_rows
from burt_numba.device.tensor_cores import cut, halves_beside, multiply_add, pair_of_halves, rounded
from burt_numba.device.vector import load_vector, rotate_elements, set_element, unpack_vectors
from burt_numba.device.warp import FULL_MASK, shuffle_xor

_ZERO = np.float32(0.0)
_WORDS = 16
"""Of values, that a lane has at a time."""
_CUT_MENDED = np.float32(1 + 0.7213 * 2**-11)
"""What cutting a number to 11 bits takes from it in the mean (with a logarithm that is evenly spread).

Tensor cores cut the keys where products are rounded; rounding them would take longer than multiplying. Queries make up
for it. Values are cut too, so that numbers of few bits stay what they are.
"""
_LARGEST_ROUNDED = np.float32(3.4011621e38)
"""Of 11 bits. Numbers above count as this one."""
SIDE_SUMS = 4
"""Of what a lane looks for in a pass, it adds up so many sums side by side: each addition waits for the one before."""
_load_four = load_vector(4)


@cuda.jit(device=True)
def _rounded_query(value):
    return rounded(minimum(maximum(value * _CUT_MENDED, -_LARGEST_ROUNDED), _LARGEST_ROUNDED))


@cuda.jit(device=True)
def own_place(queries):
    """The warp's head, among those of all samples, and its first query there: made anew where it is wanted."""
    block = opaque(np.int32(cuda.blockIdx.x))
    warp = np.int32(cuda.threadIdx.x >> 5)
    block_queries = np.int32((cuda.blockDim.x >> 5) * ROW_TILES * TILE_ROWS)
    blocks = np.int32(whole_quotient(np.int32(queries - 1), block_queries) + 1)
    sample_head = whole_quotient(block, blocks)
    return sample_head, np.int32((block - sample_head * blocks) * block_queries + warp * ROW_TILES * TILE_ROWS)


@cuda.jit(device=True)
def own_start(origin, sample_stride, head_stride, heads, group, queries):
    """Where the keys or values of the warp's head start: made anew for each pass, since all would be kept at once."""
    sample_head, _first_query = own_place(queries)
    sample = whole_quotient(sample_head, np.int32(heads))
    key_head = whole_quotient(np.int32(sample_head - sample * heads), np.int32(group))
    return origin + sample * sample_stride + key_head * head_stride


class ScoreTiles(NamedTuple):
    """Device functions for one type and one way to access memory."""

    start_piece: Any
    """``start_piece(array, offset, stride, dim, dims, words, values, piece)``: starts to load 16 bytes as one of some
    pieces, 0 beyond the last element."""
    finish_pieces: Any
    """``finish_pieces(array, words, values)``: the pieces are there, as numbers."""
    put_piece: Any
    """``put_piece(values, piece, query, dim, fragments, cell)``: one of 16 queries, as tensor cores take them."""
    stage: Any
    """``stage(array, place, dims, pieces, lanes_shift, shared, cell, pitch, buffers)``: a block's threads start to copy
    the stretches of keys or values that it works on at a time to shared memory."""
    stage_tiles: Any
    """As ``stage``: a warp, its tiles of keys."""
    add_products: Any
    """``add_products(shared, cells, dims, mends, buffers, sums)``: sets the sums to products of queries and keys."""
    add_roughly: Any
    """``add_roughly(shared, cells, dims, squares, buffers, sums)``: as ``add_products`` of finite keys, in a third of
    the time where those are exact, and less exact; squares of the keys are added to some sums of the lane."""
    keep_queries: Any
    """``keep_queries(shared, cell, tile_cells, kept)``: the warp's queries in registers, where ``chunks`` is not 0."""
    add_kept: Any
    """``add_kept(shared, cell, pitch, kept, buffers, sums)``: as ``add_products``, of queries that were kept, and of
    finite keys."""
    start_queries: Any
    """``start_queries(query, place, valid, dim, dims, words, numbers)``: starts to load a chunk of the warp's queries,
    each lane what it needs of them."""
    finish_queries: Any
    """``finish_queries(query, mends, words, numbers, buffers)``: the chunk is there, as operands of ``add_own``.
    Whether some cannot be, which their products might not show."""
    add_own: Any
    """``add_own(shared, key_cell, pitch, mends, buffers, sums)``: adds the products of such a chunk; ``key_cell``: of
    the chunk, where the lane's part of the first key begins."""
    add_values: Any
    """``add_values(shared, cell, place, weights, mends, errors, buffers, sums)``: adds weighted values."""
    add_values_in_pairs: Any
    """The same, where products are exact with half as many additions beside them, and more registers."""


def _make_finite(count: int, halves: int):
    """A function that takes what is not finite out of so many words of ``halves`` numbers."""
    infinity = np.uint32(0x7C00 if halves == 2 else 0x7F800000)
    number = np.uint32(0x7FFF if halves == 2 else 0x7FFFFFFF)

    @cuda.jit(device=True)
    def make_finite(words):
        for place in range(count):
            word = words[place]
            for part in range(halves):
                if (word >> np.uint32(16 * part)) & infinity == infinity:
                    word = np.uint32(word & ~(number << np.uint32(16 * part)))
            words[place] = word

    return make_finite


@cache
def score_tiles(kind: int, vector: int, chunks: int = 0, key_tiles: int = KEY_TILES) -> ScoreTiles:
    """For EXACT, ROUNDED or HALF products, and accesses of ``vector`` elements (1: any strides).

    ``chunks``: of a vector, where it has as many in every call (0: any number). ``key_tiles``: of 8 keys each, of which
    a warp makes products at a time.
    """
    half, exact = kind == HALF, kind == EXACT
    width = 8 if half else 4
    halves = 2 if half else 1
    """Elements of a word."""
    tile_weights = 4 * key_tiles
    chunk = 4 * width
    step_weights = 4 * halves
    value_words = VALUE_DIMS // halves
    value_pitch = value_words + 4
    infinity = np.uint32(0x7C00 if half else 0x7F800000)
    number = np.uint32(0x7FFF if half else 0x7FFFFFFF)
    rotate_words = rotate_elements(_WORDS, 4)
    rotate_weights = rotate_elements(tile_weights, step_weights, ROW_TILES)
    rotate_two_steps = rotate_elements(tile_weights, 2 * step_weights, ROW_TILES)
    unpack_left, unpack_right = unpack_vectors(4, 2), unpack_vectors(4, key_tiles)
    unpack_values = unpack_vectors(4, 4)
    make_keys_finite, make_values_finite = _make_finite(4 * key_tiles, halves), _make_finite(_WORDS, halves)
    start_piece, finish_pieces, stage_rows = staged_rows(half, vector, True)
    staged = STRETCH * stretches_of(kind, chunks)

    @cuda.jit(device=True)
    def stage(array, place, dims, pieces, lanes_shift, shared, cell, pitch, buffers):
        thread, threads = np.int32(cuda.threadIdx.x), np.int32(cuda.blockDim.x)
        stage_rows(array, place, staged, dims, pieces, lanes_shift, thread, threads, shared, cell, pitch, buffers)

    @cuda.jit(device=True)
    def stage_tiles(array, place, dims, pieces, lanes_shift, shared, cell, pitch, buffers):
        lane, lanes = np.int32(cuda.laneid), np.int32(32)
        stage_rows(array, place, 8 * key_tiles, dims, pieces, lanes_shift, lane, lanes, shared, cell, pitch, buffers)

    @cuda.jit(device=True)
    def put_piece(values, piece, query, dim, fragments, cell):
        word = np.int32(dim // halves)
        cell = np.int32(cell + (word >> 4) * FRAGMENT + ((query & 7) * 4 + ((word >> 2) & 3)) * 4 + (query >> 3))
        first = piece * width
        for place in range(4):
            at = np.int64(cell + (place >> 1) * (FRAGMENT // 2) + (place & 1) * 2)
            if half:
                pair = pair_of_halves(values[first + 2 * place], values[first + 2 * place + 1])
                set_element(fragments, at, pair)
            else:
                value = values[first + place]
                set_element(fragments, at, value if exact else _rounded_query(value))

    def tile_of(exact: bool):
        @cuda.jit(device=True)
        def add_tile(first_left, first_right, product, buffers, sums):
            """What two steps of 16 queries and 8 keys add, from ``first_left`` and ``first_right`` of the operands."""
            words, values, low, left_words, left, left_low, step_sums = buffers
            if exact:
                # A tensor core cuts what float32 would round: over many steps that would add up.
                for place in range(4):
                    step_sums[place] = _ZERO
                for step in range(2):
                    right = first_right + step * 2
                    multiply_add(left_low, first_left + step * 4, values, right, step_sums, 0)
                    multiply_add(left, first_left + step * 4, low, right, step_sums, 0)
                for step in range(2):
                    multiply_add(left, first_left + step * 4, values, first_right + step * 2, step_sums, 0)
                for place in range(4):
                    sums[product + place] += step_sums[place]
            else:
                for step in range(2):
                    if half:
                        multiply_add(left_words, first_left + step * 4, words, first_right + step * 2, sums, product)
                    else:
                        multiply_add(left, first_left + step * 4, values, first_right + step * 2, sums, product)

        return add_tile

    @cuda.jit(device=True)
    def load_keys(shared, key_cell, pitch, mends, words, values):
        for tile in range(key_tiles):
            _load_four(shared, np.int64(key_cell + 8 * tile * pitch), words, tile * 4)
        if mends:
            make_keys_finite(words)
        if not half:
            unpack_right(shared, words, values)

    def chunk_of(exact: bool, add_tile):
        @cuda.jit(device=True)
        def add_chunk(shared, query_cell, key_cell, tile_cells, pitch, mends, buffers, sums):
            words, values, low, left_words, left, left_low, _step_sums = buffers
            load_keys(shared, key_cell, pitch, mends, words, values)
            if exact:
                for place in range(4 * key_tiles):
                    cut(values, values, low, place)
            for row_tile in range(ROW_TILES):
                for step in range(2):
                    at = np.int64(query_cell + row_tile * tile_cells + step * (FRAGMENT // 2))
                    _load_four(shared, at, left_words, step * 4)
                if not half:
                    unpack_left(shared, left_words, left)
                    if exact:
                        for place in range(8):
                            cut(left, left, left_low, place)
                for tile in range(key_tiles):
                    add_tile(0, tile * 4, (row_tile * key_tiles + tile) * 4, buffers, sums)

        return add_chunk

    add_tile = tile_of(exact)
    add_chunk, add_rounded_chunk = chunk_of(exact, add_tile), chunk_of(False, tile_of(False))

    @cuda.jit(device=True)
    def add_chunk_roughly(shared, query_cell, key_cell, tile_cells, pitch, squares, buffers, sums):
        add_rounded_chunk(shared, query_cell, key_cell, tile_cells, pitch, False, buffers, sums)
        values = buffers[1]
        for place in range(4 * key_tiles):
            part = place % SIDE_SUMS
            squares[part] = cuda.fma(values[place], values[place], squares[part])

    own_pieces = 2 * ROW_TILES
    load_word, unpack_own = load_vector(halves), unpack_vectors(halves, 4 * own_pieces)
    make_queries_finite = _make_finite(4 * own_pieces, halves)
    # Written out, the steps of many keys leave no array to be turned.
    writes_out = not exact and (chunks > 0 or key_tiles > KEY_TILES)

    @cuda.jit(device=True)
    def start_queries(query, place, valid, dim, dims, words, numbers):
        start, stride, dim_stride = place
        first = np.int64(dim + (cuda.laneid & 3) * width)
        for piece in range(own_pieces):
            row = np.int32(piece * 8 + (cuda.laneid >> 2))
            last = dims if row < valid else np.int32(0)
            offset = start + row * stride
            if vector == 1:
                start_piece(query, offset, dim_stride, first, last, words, numbers, piece)
            elif first < last:
                # Word by word: an operand has words of two queries side by side, and such loads let them be there.
                for word in range(4):
                    load_word(query, offset + first + word * halves, words, piece * width + word * halves)
            else:
                for word in range(width):
                    words[piece * width + word] = np.uint32(0)

    @cuda.jit(device=True)
    def finish_queries(query, mends, words, numbers, buffers):
        left_words, left = buffers[3], buffers[4]
        bad = False
        if vector > 1:
            unpack_own(query, words, numbers)
        for place in range(4 * own_pieces):
            piece, word = place // 4, place % 4
            at = ((piece // 2 * 2 + word // 2) * 2 + word % 2) * 2 + piece % 2
            first = piece * width + word * halves
            if half:
                left_words[at] = pair_of_halves(numbers[first], numbers[first + 1])
            else:
                number = numbers[first]
                if mends:
                    number = finite_or_zero(number)
                if not exact:
                    number *= _CUT_MENDED
                    bad |= not (abs(number) <= _LARGEST_ROUNDED)
                    if mends:
                        number = minimum(maximum(number, -_LARGEST_ROUNDED), _LARGEST_ROUNDED)
                    number = rounded(number)
                left[at] = number
        if half and mends:
            make_queries_finite(left_words)
        return bad

    @cuda.jit(device=True)
    def add_own(shared, key_cell, pitch, mends, buffers, sums):
        words, values, low, _left_words, left, left_low, _step_sums = buffers
        if exact:
            for place in range(4 * own_pieces):
                cut(left, left, left_low, place)
        load_keys(shared, key_cell, pitch, mends, words, values)
        for tile in range(key_tiles):
            if exact:
                for place in range(tile * 4, tile * 4 + 4):
                    cut(values, values, low, place)
            for row_tile in range(ROW_TILES):
                add_tile(row_tile * 8, tile * 4, (row_tile * key_tiles + tile) * 4, buffers, sums)

    @cuda.jit(device=True)
    def keep_queries(shared, cell, tile_cells, kept):
        cell = np.int32(cell + cuda.laneid * 4)
        for part in range(ROW_TILES * chunks * 2):
            at = np.int64(cell + part // (2 * chunks) * tile_cells + part % (2 * chunks) * (FRAGMENT // 2))
            _load_four(shared, at, kept, part * 4)

    @cuda.jit(device=True)
    def add_kept_tile(kept, first, words, values, right, sums, product):
        if half:
            multiply_add(kept, first, words, right, sums, product)
        else:
            multiply_add(kept, first, values, right, sums, product)

    def add_kept_steps(count: int):
        """Written out: so many instructions the compiler would leave a loop, and a chunk could not be on its way from
        shared memory while another is multiplied."""
        chunk_of_step, step_of_chunk = divmod(count - 1, 2 * ROW_TILES)
        row_tile, step = divmod(step_of_chunk, 2)
        first = ((row_tile * chunks + chunk_of_step) * 2 + step) * 4
        product = 4 * row_tile * key_tiles
        add_before = add_kept_steps(count - 1) if count > 1 else None

        @cuda.jit(device=True)
        def add(shared, key_cell, pitch, kept, buffers, sums):
            if add_before is not None:
                add_before(shared, key_cell, pitch, kept, buffers, sums)
            words, values = buffers[0], buffers[1]
            if step_of_chunk == 0:
                for tile in range(key_tiles):
                    _load_four(shared, np.int64(key_cell + chunk_of_step * 16 + 8 * tile * pitch), words, tile * 4)
                if not half:
                    unpack_right(shared, words, values)
            add_kept_tile(kept, first, words, values, step * 2, sums, product)
            if key_tiles > 1:
                add_kept_tile(kept, first, words, values, 4 + step * 2, sums, product + 4)
            if key_tiles > 2:
                add_kept_tile(kept, first, words, values, 8 + step * 2, sums, product + 8)
                add_kept_tile(kept, first, words, values, 12 + step * 2, sums, product + 12)

        return add

    add_all_kept = add_kept_steps(2 * ROW_TILES * max(chunks, 1))

    @cuda.jit(device=True)
    def add_kept(shared, cell, pitch, kept, buffers, sums):
        for product in range(4 * ROW_TILES * key_tiles):
            sums[product] = _ZERO
        key_cell = np.int32(cell + (cuda.laneid >> 2) * pitch + (cuda.laneid & 3) * 4)
        add_all_kept(shared, key_cell, pitch, kept, buffers, sums)

    def products_of(add_chunk):
        @cuda.jit(device=True)
        def add_products(shared, cells, dims, option, buffers, sums):
            queries, tile_cells, keys, pitch = cells
            for product in range(4 * ROW_TILES * key_tiles):
                sums[product] = _ZERO
            query_cell = np.int32(queries + cuda.laneid * 4)
            key_cell = np.int32(keys + (cuda.laneid >> 2) * pitch + (cuda.laneid & 3) * 4)
            dim = np.int32(0)
            while dim < dims:
                add_chunk(shared, query_cell, key_cell, tile_cells, pitch, option, buffers, sums)
                query_cell = np.int32(query_cell + FRAGMENT)
                key_cell = np.int32(key_cell + 16)
                # Unrolled, the loop would keep more in flight than there are registers for.
                dim = opaque(np.int32(dim + chunk))

        return add_products

    add_products, add_roughly = products_of(add_chunk), products_of(add_chunk_roughly)

    @cuda.jit(device=True)
    def report_values(words, place, first_key, weights, errors):
        """The warp reports what is not finite in the values that it has loaded, of keys with weight for a query."""
        queries, heads, group, contexts, last_key, first_dim, dims = place
        head_elements = np.int64(contexts) * dims
        value_index = own_start(np.int64(0), heads // group * head_elements, head_elements, heads, group, queries)
        turn = np.int32(cuda.laneid & 3)
        nans = np.int32(0)
        infinities = np.int32(0)
        first_nan = np.int64(0)
        first_infinity = np.int64(0)
        each = np.int32(0)
        while each < 4:
            tile, odd, column = (each >> 1, each & 1, 0) if half else (0, each >> 1, (each & 1) * 32)
            heaviest = _ZERO
            for tile_of_weights in range(ROW_TILES * halves):
                first = tile_of_weights // halves * tile_weights + tile_of_weights % halves * 4
                below = choose(odd != 0, weights[first + 1], weights[first])
                above = choose(odd != 0, weights[first + 3], weights[first + 2])
                is_own = tile_of_weights % halves == tile
                heaviest = maximum(heaviest, choose(is_own, maximum(below, above), _ZERO))
            for step in (4, 8, 16):
                heaviest = maximum(heaviest, shuffle_xor(heaviest, step, FULL_MASK))
            key = np.int32(first_key + 8 * tile + 2 * turn + odd)
            dim = np.int32(opaque(first_dim) + column + (cuda.laneid >> 2) * width)
            for element in range(width):
                bits = (words[element // halves] >> np.uint32(16 * (element % halves))) & number
                if bits >= infinity and heaviest > _ZERO and key <= last_key and dim + element < dims:
                    index = value_index + np.int64(key) * dims + dim + element
                    if bits == infinity:
                        first_infinity = index if infinities == 0 else min(first_infinity, index)
                        infinities += np.int32(1)
                    else:
                        first_nan = index if nans == 0 else min(first_nan, index)
                        nans += np.int32(1)
            rotate_words(words)
            each = opaque(np.int32(each + 1))
        record_bad_elements(errors, nans, infinities, first_nan, first_infinity, 32, FULL_MASK)

    @cuda.jit(device=True)
    def load_values(shared, lane_cell, words):
        for each in range(4):
            row, column = (8 * (each >> 1) + (each & 1), 0) if half else (each >> 1, (each & 1) * 32)
            _load_four(shared, np.int64(lane_cell + row * value_pitch + column), words, each * 4)

    @cuda.jit(device=True)
    def add_step(shared, weights, first_weight, buffers, sums):
        words, values, left_words, left, left_low, step_sums, right, right_words, right_low = buffers
        if not half:
            unpack_values(shared, words, values)
        for row_tile in range(ROW_TILES):
            for cell_of_tile in range(4):
                at = row_tile * 4 + cell_of_tile
                if half:
                    first = row_tile * tile_weights + first_weight + cell_of_tile * 2
                    left_words[at] = pair_of_halves(weights[first], weights[first + 1])
                else:
                    place = row_tile * tile_weights + first_weight + (cell_of_tile & 1) * 2 + (cell_of_tile >> 1)
                    weight = weights[place]
                    left[at] = weight if exact else rounded(weight)
                    if exact:
                        cut(left, left, left_low, at)
        for column in range(8):
            for pair in range(2):
                if half:
                    first = 8 * pair + (column >> 1)
                    right_words[pair] = halves_beside(words[first], words[first + 4], column & 1)
                else:
                    value = values[(pair * 2 + (column >> 2)) * 4 + (column & 3)]
                    right[pair] = value
                    if exact:
                        cut(right, right, right_low, pair)
            for row_tile in range(ROW_TILES):
                first = (row_tile * 8 + column) * 4
                if half:
                    multiply_add(left_words, row_tile * 4, right_words, 0, sums, first)
                elif exact:
                    for place_of_sum in range(4):
                        step_sums[place_of_sum] = _ZERO
                    multiply_add(left_low, row_tile * 4, right, 0, step_sums, 0)
                    multiply_add(left, row_tile * 4, right_low, 0, step_sums, 0)
                    multiply_add(left, row_tile * 4, right, 0, step_sums, 0)
                    for place_of_sum in range(4):
                        sums[first + place_of_sum] += step_sums[place_of_sum]
                else:
                    multiply_add(left, row_tile * 4, right, 0, sums, first)

    @cuda.jit(device=True)
    def add_two_steps(shared, lane_cell, weights, buffers, sums):
        """Exactly, so that half as many sums are added up where they round."""
        words, values, _left_words, left, left_low, step_sums, right, _right_words, right_low = buffers
        for row_tile in range(ROW_TILES):
            for cell_of_step in range(8):
                at = row_tile * 8 + cell_of_step
                first = row_tile * tile_weights + (cell_of_step & 4)
                left[at] = weights[first + (cell_of_step & 1) * 2 + (cell_of_step >> 1 & 1)]
                cut(left, left, left_low, at)
        for columns in range(2):
            for row in range(4):
                at = np.int64(lane_cell + ((row >> 1) * 8 + (row & 1)) * value_pitch + columns * 32)
                _load_four(shared, at, words, row * 4)
            unpack_values(shared, words, values)
            for column in range(4):
                for row in range(4):
                    right[row] = values[row * 4 + column]
                    cut(right, right, right_low, row)
                for row_tile in range(ROW_TILES):
                    for place in range(4):
                        step_sums[place] = _ZERO
                    for step in range(2):
                        at = (row_tile * 2 + step) * 4
                        multiply_add(left_low, at, right, step * 2, step_sums, 0)
                        multiply_add(left, at, right_low, step * 2, step_sums, 0)
                    for step in range(2):
                        multiply_add(left, (row_tile * 2 + step) * 4, right, step * 2, step_sums, 0)
                    first = (row_tile * 8 + columns * 4 + column) * 4
                    for place in range(4):
                        sums[first + place] += step_sums[place]

    def values_of(in_pairs: bool):
        @cuda.jit(device=True)
        def add_values(shared, cell, place, weights, mends, errors, buffers, sums):
            queries, heads, group, contexts, first_key, last_key, first_dim, dims = place
            words = buffers[0]
            lane_cell = np.int32(cell + (cuda.laneid & 3) * 2 * value_pitch + (cuda.laneid >> 2) * 4)
            if writes_out and not mends:
                for step in range(tile_weights // step_weights):
                    load_values(shared, np.int32(lane_cell + step * 2 * step_weights * value_pitch), words)
                    add_step(shared, weights, step * step_weights, buffers, sums)
            elif in_pairs and not mends:
                step = np.int32(0)
                while step < tile_weights // (2 * step_weights):
                    add_two_steps(shared, lane_cell, weights, buffers, sums)
                    rotate_two_steps(weights)
                    lane_cell = np.int32(lane_cell + 4 * step_weights * value_pitch)
                    step = opaque(np.int32(step + 1))
            else:
                step = np.int32(0)
                while step < tile_weights // step_weights:
                    load_values(shared, lane_cell, words)
                    if mends:
                        step_key = np.int32(first_key + step * 2 * step_weights)
                        own = (queries, heads, group, contexts, last_key, first_dim, dims)
                        report_values(words, own, step_key, weights, errors)
                        make_values_finite(words)
                    add_step(shared, weights, 0, buffers, sums)
                    rotate_weights(weights)
                    lane_cell = np.int32(lane_cell + 2 * step_weights * value_pitch)
                    step = opaque(np.int32(step + 1))

        return add_values

    add_values, add_values_in_pairs = values_of(False), values_of(exact)

    return ScoreTiles(
        start_piece, finish_pieces, put_piece, stage, stage_tiles, add_products, add_roughly, keep_queries, add_kept,
        start_queries, finish_queries, add_own, add_values, add_values_in_pairs,
    )  # fmt: skip
