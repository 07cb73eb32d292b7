"""The kernel of biencoder_attention on tensor cores: a warp has two tiles of 16 queries of a head, and all contexts.

    greatest    a first pass over the keys: of each query the two greatest scores of each class of keys, FEW in all
                (in float32, where a search follows, of products of 11 bits)
    search      from those few, where the temperature may be; then passes that evaluate the entropy of all 32 queries,
                each at its own temperature, until all are found or near: one or two
    values      a last pass: weights, their sum and entropy, and their product with the values; back to the search
                where a query that was only near has missed its band

Once at most 32 queries of a block are still searching, those are gathered as two tiles of their own, and all warps
evaluate them together, each warp a part of the keys; sums of the warps are added in their order.

Scores are made again in each pass: nothing is kept but sums, whatever the number of contexts. Lane (g = lane / 4,
t = lane % 4) has the scores of queries g, g + 8, g + 16 and g + 24 with two keys in 8, and looks after query g + 8 t.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import (
    EXACT,
    FEW,
    FRAGMENT,
    HALF,
    KEY_TILES,
    MOST_TILES_WARPS,
    ROW_TILES,
    STRETCH,
    VALUE_DIMS,
    stretches_of,
)
from burt_numba.device.async_copies import close_group, shared_address, wait_for_copies, wait_for_older_groups
from burt_numba.device.attention import context_count, report_sum, smallest_weight
from burt_numba.device.entropy import (
    GAP_RANGE,
    NEAR_ROUGH_SHARE,
    NEAR_SHARE,
    accepted_limits,
    bend_of,
    beta_of_two,
    entropy_of,
    first_beta,
    is_near,
    last_beta,
    next_beta,
    variance_of,
)
from burt_numba.device.numeric import (
    FLOAT32_MAX,
    NEGATIVE_INFINITY,
    exp2,
    maximum,
    minimum,
    opaque,
    whole_quotient,
)
from burt_numba.device.own_queries import (
    PRODUCTS,
    SLOTS,
    TILE_PRODUCTS,
    WARP_QUERIES,
    give,
    own_number,
    report_out_of_reach,
    score_bits,
    search_few,
    take_own,
)
from burt_numba.device.query_tiles import LARGEST_TAME, largest_product, query_tiles
from burt_numba.device.row_bounds import is_out_of_reach, row_bound, write_row
from burt_numba.device.score_tiles import SIDE_SUMS, own_place, own_start, score_tiles
from burt_numba.device.staged_rows import PIECES
from burt_numba.device.tensor_cores import pair_of_halves
from burt_numba.device.tile_results import TILE_SUMS, VALUE_SUMS, largest_result, tile_results
from burt_numba.device.vector import element_at, rotate_elements, set_element
from burt_numba.device.warp import (
    FULL_MASK,
    any_lane,
    count_lanes,
    count_lanes_before,
    lanes_where,
    shuffle,
    sync_warp,
    warp_max,
    warp_sum,
    warp_sum3,
)

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_HALF_OF = np.float32(0.5)
_MOST_THREADS = 32 * MOST_TILES_WARPS
_OWN_NUMBERS = 5 * _MOST_THREADS
"""Of each query: sums of gathered ones by each warp, or what its lane does not need while it multiplies values, which
takes all registers."""
_FARTHEST_MAXIMUM = np.float32(16.0)
"""From the one of the first pass, in units of t: from there on the sums are made again."""
_BELOW = np.float32(1 - 2**-10)
"""Of the lowest beta: so far a step below it is looked at, before it is taken to that one."""
_LARGEST_SQUARES = LARGEST_TAME * LARGEST_TAME
_LARGEST_OFFSET = np.float32(2.0**20)
_LARGEST_FACTOR = np.float32(2.0**80)
"""Up to these t may be a line of the products: see ``_is_steep``."""


@cuda.jit(device=True)
def _add_compensated(sums, lost, place, value):
    """What rounding takes from a sum of many parts is kept beside it."""
    total = sums[place] + value
    lost[place] += value - (total - sums[place])
    sums[place] = total


@cuda.jit(device=True)
def _cell_of(row, word, tile_cells):
    """Where one of the 16 words of a chunk of a query lies among the tiles of a warp."""
    cell = (row >> 4) * tile_cells + ((row & 7) * 4 + (word >> 2)) * 4 + ((row >> 3) & 1)
    return np.int32(cell + ((word >> 1) & 1) * (FRAGMENT // 2) + (word & 1) * 2)


@cuda.jit(device=True)
def _gather(searching, own_row, half_maximum, factor, cells, shared, counts, maxima, factors):
    """The block's queries that are still searching, as tiles of their own; a lane gets the place of its query there.

    ``cells``: the first of the warp's tiles, the first of those, cells of a tile, chunks of a query.
    """
    first_cell, gathered_cell, tile_cells, chunks = cells
    lane = np.int32(cuda.laneid)
    warp = np.int32(cuda.threadIdx.x >> 5)
    lanes = lanes_where(searching, FULL_MASK)
    if lane == 0:
        counts[warp] = count_lanes(lanes)
    cuda.syncthreads()  # how many each warp has
    place = count_lanes_before(lanes)
    before = np.int32(0)
    while before < warp:
        place += counts[before]
        before = opaque(np.int32(before + 1))
    if searching:
        maxima[place] = half_maximum
        factors[place] = factor
    word = np.int32(lane & 15)
    source = np.int32(0)
    while source < 32:
        if (lanes >> np.uint32(source)) & np.uint32(1) != 0:
            origin = np.int32(first_cell + _cell_of(shuffle(own_row, source, FULL_MASK), word, tile_cells))
            target = np.int32(gathered_cell + _cell_of(shuffle(place, source, FULL_MASK), word, tile_cells))
            chunk = np.int32(lane >> 4)
            while chunk < chunks:
                copied = element_at(shared, np.int64(origin + chunk * FRAGMENT))
                set_element(shared, np.int64(target + chunk * FRAGMENT), copied)
                chunk = opaque(np.int32(chunk + 2))
        source = opaque(np.int32(source + 1))
    cuda.syncthreads()  # the tiles are complete
    return place


@cuda.jit(device=True)
def _take_gathered(gathered, half_maxima, factors):
    """Half the maximum and the factor of each gathered query of a lane."""
    gathered_maxima, gathered_factors = gathered
    for slot in range(SLOTS):
        row = np.int32((slot >> 1) * 16 + (slot & 1) * 8 + (cuda.laneid >> 2))
        half_maxima[slot] = gathered_maxima[row]
        factors[slot] = gathered_factors[row]


def _add_weights(key_tiles: int, lift: float | None = None, clips: bool = True, by_lines: bool = False):
    """A function that adds to the sums of a lane's queries what so many tiles of keys weigh.

    With ``lift``, weights times ``2**lift`` take the place of the products, and the higher moments are left out. There
    are half the maximum, the factor and the shift of each query or, ``by_lines``, a slope and an offset: t is a product
    times the slope, and the offset. It is at most GAP_RANGE, if it ``clips``. ``starts``: these are the first weights
    of a part.
    """
    keeps = lift is not None
    lift_by = np.float32(lift or 0.0)
    tile_products = 4 * key_tiles

    @cuda.jit(device=True)
    def add_weights(products, queries, starts, parts, seconds, thirds):
        part_totals, part_firsts = parts
        for product in range(ROW_TILES * tile_products):
            slot = product // tile_products * 2 + ((product >> 1) & 1)
            if by_lines:
                slopes, offsets = queries
                t = cuda.fma(products[product], slopes[slot], offsets[slot])
            else:
                half_maxima, factors, shifts = queries
                t = cuda.fma(half_maxima[slot] - _HALF_OF * products[product], factors[slot], shifts[slot])
            if clips:
                t = minimum(t, GAP_RANGE)
            weight = exp2(lift_by - t) if lift else exp2(-t)
            weighted = t * weight
            if starts and product % tile_products < 4 and product & 1 == 0:
                part_totals[slot] = weight
                part_firsts[slot] = weighted
            else:
                part_totals[slot] += weight
                part_firsts[slot] += weighted
            if keeps:
                products[product] = weight
            else:
                weighted *= t
                seconds[slot] += weighted
                thirds[slot] += weighted * t

    return add_weights


@cuda.jit(device=True)
def _add_parts(parts, sums):
    part_totals, part_firsts = parts
    totals, lost_totals, firsts, lost_firsts = sums
    for slot in range(SLOTS):
        _add_compensated(totals, lost_totals, slot, part_totals[slot])
        _add_compensated(firsts, lost_firsts, slot, part_firsts[slot])


@cuda.jit(device=True)
def _is_steep(half_maximum, factor):
    """Whether t may not be a line of the products: where its offset is rounded by more than a thirty-second, or t might
    leave the range of float32.

    The offset is the same for all keys, which the entropy does not notice, but a large one would move all weights.
    """
    return not (abs(half_maximum * factor) <= _LARGEST_OFFSET and factor <= _LARGEST_FACTOR)


@cuda.jit(device=True)
def _shift_of(half_maximum, factor):
    """What rounding adds to the offset of a line: t of all keys of a query is to be moved by the same."""
    return -cuda.fma(half_maximum, factor, -(half_maximum * factor))


@cuda.jit(device=True)
def _take_shifts(half_maxima, factors, steep, shifts):
    """The shift of each query of a lane, where other keys have t by lines."""
    for slot in range(SLOTS):
        moved = _shift_of(half_maxima[slot], factors[slot])
        shifts[slot] = moved if opaque(steep) == 0 else _ZERO


@cuda.jit(device=True)
def _take_tops(products, tops, next_tops):
    """Of each class of keys, the two greatest products so far."""
    for product in range(PRODUCTS):
        beaten = minimum(tops[product], products[product])
        tops[product] = maximum(tops[product], products[product])
        next_tops[product] = maximum(next_tops[product], beaten)


def _take_peaks_of(key_tiles: int):
    """A function for the greatest product of each query of a lane, with so many tiles of keys at a time."""

    @cuda.jit(device=True)
    def take_peaks(products, peaks):
        for product in range(4 * ROW_TILES * key_tiles):
            slot = product // (4 * key_tiles) * 2 + ((product >> 1) & 1)
            peaks[slot] = maximum(peaks[slot], products[product])

    return take_peaks


_take_peaks = _take_peaks_of(KEY_TILES)
_add_all_weights = _add_weights(KEY_TILES)


@cache
def tiles_kernel(kind: int, vector: int, chunks_made_for: int):
    """The kernel for EXACT, ROUNDED or HALF products and accesses of ``vector`` elements (1: any strides).

    ``chunks_made_for``: of a vector, 0 where it may have any number.
    """
    half, exact = kind == HALF, kind == EXACT
    width = 8 if half else 4
    chunk = 4 * width
    pieces_words = PIECES * width
    # In float16 a weight is lifted, relative to the greatest: below 2**-14 numbers of that type have fewer digits.
    lift = np.float32(15.0 if half else 0.0)
    value_pieces = VALUE_DIMS // width
    value_pitch = 4 * value_pieces + 4
    value_shift = value_pieces.bit_length() - 1
    fragment_type = np.uint32 if half else np.float32
    stretches = stretches_of(kind, chunks_made_for)
    span = stretches * STRETCH
    tiles = score_tiles(kind, vector, chunks_made_for)
    stage, add_products, add_values = tiles.stage, tiles.add_products, tiles.add_values_in_pairs
    put_queries, first_scores, scores_again, scores_of_part = query_tiles(kind, vector, chunks_made_for)
    report_results, store_results = tile_results(kind, vector)
    largest = largest_result(kind)
    rotate_few = rotate_elements(FEW, STRETCH)
    # Exact products are worth an exact difference.
    by_lines = kind != EXACT
    near_share = NEAR_ROUGH_SHARE if exact else NEAR_SHARE
    # Products of float16 numbers are below 2**41, so that t is a number.
    clips = not half
    weigh, weigh_by_lines = _add_weights(KEY_TILES, float(lift)), _add_weights(KEY_TILES, float(lift), clips, by_lines)
    add_all_by_lines = _add_weights(KEY_TILES, None, clips, by_lines)
    add_weights_of_part = _add_weights(stretches)
    add_part_by_lines = _add_weights(stretches, None, clips, by_lines)
    part_tiles = score_tiles(kind, vector, chunks_made_for, stretches)
    # Where the number of chunks is known, a warp has its queries in registers: shared memory would be the limit.
    keeps = chunks_made_for > 0
    kept_words = ROW_TILES * chunks_made_for * 8 if keeps else 1
    keep_queries, add_kept = tiles.keep_queries, tiles.add_kept
    add_part, add_kept_part, stage_tiles = part_tiles.add_products, part_tiles.add_kept, part_tiles.stage_tiles
    part_keys = 8 * stretches
    add_roughly = tiles.add_roughly
    take_part_peaks = _take_peaks_of(stretches)

    @cuda.jit(device=True)
    def make_stretch(shared, cells, dims, kept, buffers, products):
        """Products with the keys of a stretch, present and finite ones."""
        _queries_cell, _tile_cells, stretch_cell, pitch = cells
        if keeps:
            add_kept(shared, stretch_cell, pitch, kept, buffers, products)
        else:
            add_products(shared, cells, dims, False, buffers, products)

    @cuda.jit(device=True)
    def make_whole(shared, cells, dims, kept, buffers, products, more_products):
        """Products with all keys between two barriers: no branch keeps latencies apart."""
        _queries_cell, _tile_cells, stretch_cell, pitch = cells
        make_stretch(shared, cells, dims, kept, buffers, products)
        if stretches > 1:
            add_kept(shared, np.int32(stretch_cell + STRETCH * pitch), pitch, kept, buffers, more_products)

    @cuda.jit(device=True)
    def add_flaws(products, product_limit, flaws):
        """Whether some products are not finite, or too large for scores; or it leaves a flaw that is not 0."""
        bad = False
        if half:
            # Finite ones are never too large, and these instructions do not wait for those of the maxima.
            for product in range(PRODUCTS):
                part = product % SIDE_SUMS
                flaws[part] = cuda.fma(products[product], _ZERO, flaws[part])
        else:
            for product in range(PRODUCTS):
                bad |= not (abs(products[product]) <= product_limit)
        return bad

    @cuda.jit(device=True)
    def make_first(shared, cells, dims, product_limit, kept, flaws, buffers, products, more_products):
        """Products for the first pass, and whether some are not fit for scores; or it leaves a flaw."""
        bad = False
        if exact:
            add_roughly(shared, cells, dims, flaws, buffers, products)
        else:
            make_whole(shared, cells, dims, kept, buffers, products, more_products)
            bad |= add_flaws(products, product_limit, flaws)
            if stretches > 1:
                bad |= add_flaws(more_products, product_limit, flaws)
        return bad

    @cuda.jit(device=True)
    def evaluate_gathered(
        keys, key_place, length, dims, shared, layout, gathered_cell, tile_cells, product_limit, flawed, steep,
        gathered, kept, buffers, products, queries_by_lines, queries_exactly, moments, peaks, staging,
    ):  # fmt: skip
        """The sums of the gathered queries with the warp's part of the keys.

        Each warp copies its keys by itself and waits for no other: there is too little to do for them to meet for it.
        Of the space for keys and values it has its share, for two or three of its parts.
        """
        start, stride, dim_stride = key_place
        keys_cell, pitch, pieces, lanes_shift = layout
        half_maxima, factors, shifts = queries_exactly
        parts, sums, seconds, thirds = moments
        places = np.int32(3 if pitch <= 2 * value_pitch else 2)
        part_cells = np.int32(part_keys * pitch)
        own_cell = np.int32(keys_cell + (cuda.threadIdx.x >> 5) * places * part_cells)
        step = np.int32((cuda.blockDim.x >> 5) * part_keys)
        next_key = np.int32((cuda.threadIdx.x >> 5) * part_keys)
        place = np.int32(0)
        first_key = np.int32(next_key - (places - 1) * step)
        while first_key < length:
            if places > 2:
                wait_for_older_groups()
            else:
                wait_for_copies()
            sync_warp()  # keys are there, and those before are not needed any more
            next_key = np.int32(first_key + (places - 1) * step)
            if next_key < length:
                part_place = (start, stride, dim_stride, next_key, np.int32(length - 1), np.int32(0))
                next_cell = np.int32(own_cell + place * part_cells)
                stage_tiles(keys, part_place, dims, pieces, lanes_shift, shared, next_cell, pitch, staging)
            close_group()
            place = np.int32(place + 1 if place + 1 < places else 0)
            if first_key >= 0:
                key_cell = np.int32(own_cell + place * part_cells)
                cells = (gathered_cell, tile_cells, key_cell, pitch)
                whole = first_key + part_keys <= length and opaque(steep) == 0
                if whole and keeps:
                    add_kept_part(shared, key_cell, pitch, kept, buffers, products)
                elif whole:
                    add_part(shared, cells, dims, False, buffers, products)
                else:
                    scores_of_part(shared, cells, first_key, length, product_limit, dims, flawed, buffers, products)
                if exact:
                    take_part_peaks(products, peaks)
                if whole:
                    add_part_by_lines(products, queries_by_lines, True, parts, seconds, thirds)
                else:
                    if by_lines:
                        _take_gathered(gathered, half_maxima, factors)
                        _take_shifts(half_maxima, factors, steep, shifts)
                    add_weights_of_part(products, queries_exactly, True, parts, seconds, thirds)
                _add_parts(parts, sums)
            first_key = opaque(np.int32(first_key + step))

    @cuda.jit(device=True)
    def carries_any(weights, shares, smallest, mends):
        """Whether some of a lane's weights are to be multiplied with values."""
        carries = False
        if half and not mends:
            # As float16 numbers, weights of up to 2**-40 of the greatest are 0.
            bits = np.uint32(0)
            for product in range(0, PRODUCTS, 2):
                bits |= pair_of_halves(weights[product], weights[product + 1])
            carries = bits != 0
        else:
            for slot in range(SLOTS):
                heaviest = _ZERO
                for product in range(slot // 2 * TILE_PRODUCTS, (slot // 2 + 1) * TILE_PRODUCTS):
                    if (product >> 1) & 1 == slot & 1:
                        heaviest = maximum(heaviest, weights[product])
                carries |= heaviest * shares[slot] > smallest
        return carries

    @cuda.jit(device=True)
    def add_stretch(shared, cell, place, weights, shares, smallest, mends, errors, buffers, results):
        carries = carries_any(weights, shares, smallest, mends)
        if mends:
            # What carries nothing is not looked at, and no sum overflows that the result does not.
            for product in range(PRODUCTS):
                slot = product // TILE_PRODUCTS * 2 + ((product >> 1) & 1)
                share = weights[product] * shares[slot]
                kept = weights[product] if half else share
                weights[product] = kept if share > smallest else _ZERO
        if any_lane(carries, FULL_MASK):
            add_values(shared, cell, place, weights, mends, errors, buffers, results)

    @cuda.jit(device=True)
    def stage_keys(keys, place, first_key, length, dims, shared, layout, buffer, staging):
        start, stride, dim_stride = place
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
        gathered_counts = cuda.shared.array(MOST_TILES_WARPS, np.int32)
        gathered_maxima = cuda.shared.array(WARP_QUERIES, np.float32)
        gathered_factors = cuda.shared.array(WARP_QUERIES, np.float32)
        own_numbers = cuda.shared.array(_OWN_NUMBERS, np.float32)
        piece_words = cuda.local.array(pieces_words, np.uint32)
        piece_numbers = cuda.local.array(pieces_words, np.float32)
        words = cuda.local.array(TILE_PRODUCTS, np.uint32)
        numbers = cuda.local.array(TILE_PRODUCTS, np.float32)
        low = cuda.local.array(TILE_PRODUCTS, np.float32)
        left_words = cuda.local.array(8, np.uint32)
        left = cuda.local.array(16, np.float32)
        left_low = cuda.local.array(16, np.float32)
        step_sums = cuda.local.array(4, np.float32)
        flaws = cuda.local.array(SIDE_SUMS, np.float32)
        kept = cuda.local.array(kept_words, np.uint32)
        products = cuda.local.array(PRODUCTS, np.float32)
        more_products = cuda.local.array(PRODUCTS, np.float32)
        tops = cuda.local.array(PRODUCTS, np.float32)
        next_tops = cuda.local.array(PRODUCTS, np.float32)
        few = cuda.local.array(FEW, np.float32)
        half_maxima = cuda.local.array(SLOTS, np.float32)
        factors = cuda.local.array(SLOTS, np.float32)
        slopes = cuda.local.array(SLOTS, np.float32)
        offsets = cuda.local.array(SLOTS, np.float32)
        part_totals = cuda.local.array(SLOTS, np.float32)
        part_firsts = cuda.local.array(SLOTS, np.float32)
        totals = cuda.local.array(SLOTS, np.float32)
        firsts = cuda.local.array(SLOTS, np.float32)
        seconds = cuda.local.array(SLOTS, np.float32)
        thirds = cuda.local.array(SLOTS, np.float32)
        peaks = cuda.local.array(SLOTS, np.float32)
        lost_totals = cuda.local.array(SLOTS, np.float32)
        lost_firsts = cuda.local.array(SLOTS, np.float32)
        shares = cuda.local.array(SLOTS, np.float32)
        finals = cuda.local.array(SLOTS, np.float32)
        shifts = cuda.local.array(SLOTS, np.float32)
        right = cuda.local.array(4, np.float32)
        right_words = cuda.local.array(2, np.uint32)
        right_low = cuda.local.array(4, np.float32)
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
        bound_place = bounds_origin + np.int64(head) * bound_stride
        bound = row_bound(head_bounds, bound_place, entropy_bound, head, leads and sample == 0, errors)
        chunks = np.int32(chunks_made_for if chunks_made_for > 0 else (dims + chunk - 1) // chunk)
        tile_cells = np.int32(chunks * FRAGMENT)
        first_cell = np.int32(warp * ROW_TILES * tile_cells)
        key_pitch = np.int32(16 * (chunks | 1))
        gathered_cell = np.int32(warps * ROW_TILES * tile_cells)
        keys_cell = np.int32(gathered_cell + ROW_TILES * tile_cells if warps > 1 else gathered_cell)
        values_cell = np.int32(keys_cell + 2 * span * key_pitch)
        key_pieces = np.int32(4 * chunks)
        key_shift = np.int32(2)
        while key_shift < 5 and (1 << key_shift) < key_pieces:
            key_shift = np.int32(key_shift + 1)
        # A place among the stretches in shared memory.
        buffer = np.int32(stretches)
        product_limit = largest_product(scale)
        owns = turn < SLOTS and own_row < valid
        row = np.int64(sample_head) * queries + first_query
        query_start = query_origin + sample * query_sample_stride + head * query_head_stride
        query_start += first_query * query_stride
        layout = (keys_cell, key_pitch, key_pieces, key_shift)
        staging = (piece_words, piece_numbers, shared_address(shared))
        keys_start = own_start(keys_origin, keys_sample_stride, keys_head_stride, heads, group, queries)
        key_place = (keys_start, key_stride, key_dim_stride)
        large = put_queries(
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
        parts = (part_totals, part_firsts)
        queries_exactly = (half_maxima, factors, shifts)
        queries_by_lines = (slopes, offsets) if by_lines else queries_exactly
        for slot in range(SLOTS):
            shifts[slot] = _ZERO
        sums = (totals, lost_totals, firsts, lost_firsts)
        moments = (parts, sums, seconds, thirds)

        # Of each query, the two greatest products of each class of keys: of those at the same place of a stretch.
        for each in range(FEW):
            few[each] = NEGATIVE_INFINITY
        if keeps:
            keep_queries(shared, first_cell, tile_cells, kept)
        flawed = False
        # Where a search follows, a start by fewer bits will do: it finds the exact maximum.
        is_rough = exact and bound <= FLOAT32_MAX
        passes = True
        while passes:
            # A second pass, where the first has met what is not finite, or too large to be sure of.
            mends = flawed
            bad = is_rough and large
            for product in range(PRODUCTS):
                tops[product] = NEGATIVE_INFINITY
                next_tops[product] = NEGATIVE_INFINITY
            for part in range(SIDE_SUMS):
                flaws[part] = _ZERO
            # A round before the first stretch only asks for it, in each pass.
            first_key = np.int32(-span)
            while first_key < length:
                wait_for_copies()
                cuda.syncthreads()  # keys are there, and those before are not needed any more
                stretch_cell = np.int32(keys_cell + buffer * STRETCH * key_pitch)
                buffer ^= np.int32(stretches)
                next_key = np.int32(first_key + span)
                stage_keys(keys, key_place, next_key, length, dims, shared, layout, buffer, staging)
                if valid > 0 and first_key >= 0:
                    if next_key <= length and not mends and (is_rough or not exact):
                        cells = (first_cell, tile_cells, stretch_cell, key_pitch)
                        bad |= make_first(
                            shared, cells, dims, product_limit, kept, flaws, buffers, products, more_products
                        )
                        if stretches > 1:
                            _take_tops(more_products, tops, next_tops)
                        _take_tops(products, tops, next_tops)
                        first_key = next_key
                    while first_key < min(next_key, length):
                        cells = (first_cell, tile_cells, stretch_cell, key_pitch)
                        bad |= first_scores(
                            shared, cells, first_key, length, product_limit, dims, mends, buffers, products, keys,
                            report, errors,
                        )  # fmt: skip
                        _take_tops(products, tops, next_tops)
                        first_key = opaque(np.int32(first_key + STRETCH))
                        stretch_cell = np.int32(stretch_cell + STRETCH * key_pitch)
                first_key = opaque(next_key)
            for part in range(SIDE_SUMS):
                bad |= not (flaws[part] <= _LARGEST_SQUARES)
            flawed = cuda.syncthreads_or(np.int32(bad)) != 0
            passes = flawed and not mends
        lowest_beta = first_beta(temperature_min, temperature_max)
        highest_beta = last_beta(temperature_min, lowest_beta)
        gap_limit = GAP_RANGE / lowest_beta
        bits = score_bits(scale)
        high_beta = highest_beta
        row_max = NEGATIVE_INFINITY
        turned = np.int32(0)
        while turned < 2:
            take_own(tops, turn, few)
            rotate_few(few)
            for product in range(PRODUCTS):
                tops[product] = next_tops[product]
            turned = opaque(np.int32(turned + 1))
        runner_up = NEGATIVE_INFINITY
        for each in range(STRETCH):
            runner_up = maximum(runner_up, minimum(row_max, few[each]))
            row_max = maximum(row_max, few[each])
        for each in range(STRETCH, FEW):
            runner_up = maximum(runner_up, few[each])
        if row_max == NEGATIVE_INFINITY:
            row_max = _ZERO
        # Halves first: two numbers of float32 may lie further apart than its range.
        half_maximum = _HALF_OF * row_max
        for each in range(FEW):
            few[each] = minimum((half_maximum - _HALF_OF * few[each]) * bits, gap_limit)
        beta, total, low_beta = lowest_beta, _ONE, lowest_beta
        if owns:
            gap = minimum((half_maximum - _HALF_OF * runner_up) * bits, gap_limit)
            low_beta = beta_of_two(gap, bound, lowest_beta, highest_beta)
            beta, total, _entropy = search_few(few, bound, low_beta, highest_beta)
            if is_rough and not flawed:
                low_beta = _BELOW * lowest_beta
        # Without a bound nothing is searched for.
        searching = owns and bound <= FLOAT32_MAX
        if not searching:
            high_beta = lowest_beta
        if warps > 1:
            thread = np.int32(cuda.threadIdx.x)
            if thread < WARP_QUERIES:
                gathered_maxima[thread] = _ZERO
                gathered_factors[thread] = _ZERO
            while thread < ROW_TILES * tile_cells:
                set_element(shared, np.int64(gathered_cell + thread), 0)
                thread = opaque(np.int32(thread + cuda.blockDim.x))

        # The loop of device.entropy, of all queries of the warp at a time.
        step = np.int32(0)
        bracketed = False
        # Near the aim a step needs no evaluation of its own: the pass for the values makes it. Where it has missed, the
        # query is searched for on, and takes no such step again.
        trusts = True
        untried = False
        remaining = cuda.syncthreads_count(np.int32(searching))
        smallest = _HALF_OF * smallest_weight(length)
        value_buffers = (words, numbers, left_words, left, left_low, step_sums, right, right_words, right_low)
        first_dim = np.int32(0)
        while first_dim < dims:
            while remaining != 0:
                # Once they are few, all warps work on the same queries, each with its part of the keys.
                gathers = remaining <= WARP_QUERIES and opaque(np.int32(cuda.blockDim.x)) > 32
                place = np.int32(0)
                evaluates = any_lane(searching, FULL_MASK)
                factor = minimum(beta * score_bits(scale), FLOAT32_MAX)
                if gathers:
                    gather_cells = (first_cell, gathered_cell, tile_cells, chunks)
                    place = _gather(
                        searching,
                        own_row,
                        half_maximum,
                        factor,
                        gather_cells,
                        shared,
                        gathered_counts,
                        gathered_maxima,
                        gathered_factors,
                    )
                gathered = (gathered_maxima, gathered_factors)
                if gathers:
                    _take_gathered(gathered, half_maxima, factors)
                else:
                    give(half_maximum, half_maxima)
                    give(factor, factors)
                steep = False
                for slot in range(SLOTS if by_lines else 0):
                    slopes[slot] = -_HALF_OF * factors[slot]
                    offsets[slot] = half_maxima[slot] * factors[slot]
                    steep |= _is_steep(half_maxima[slot], factors[slot])
                steep = np.int32(any_lane(steep, FULL_MASK) or flawed)
                if keeps:
                    keep_queries(shared, gathered_cell if gathers else first_cell, tile_cells, kept)
                for slot in range(SLOTS):
                    totals[slot] = _ZERO
                    lost_totals[slot] = _ZERO
                    firsts[slot] = _ZERO
                    lost_firsts[slot] = _ZERO
                    seconds[slot] = _ZERO
                    thirds[slot] = _ZERO
                keys_start = own_start(keys_origin, keys_sample_stride, keys_head_stride, heads, group, queries)
                key_place = (keys_start, key_stride, key_dim_stride)
                if exact:
                    for slot in range(SLOTS):
                        peaks[slot] = NEGATIVE_INFINITY
                if gathers:
                    evaluate_gathered(
                        keys, key_place, length, dims, shared, layout, gathered_cell, tile_cells, product_limit, flawed,
                        steep, gathered, kept, buffers, products, queries_by_lines, queries_exactly, moments, peaks,
                        staging,
                    )  # fmt: skip
                first_key = np.int32(length if gathers else -span)
                while first_key < length:
                    stretch_cell = np.int32(keys_cell + buffer * STRETCH * key_pitch)
                    buffer ^= np.int32(stretches)
                    next_key = np.int32(first_key + span)
                    wait_for_copies()
                    cuda.syncthreads()  # keys are there, and those before are not needed any more
                    stage_keys(keys, key_place, next_key, length, dims, shared, layout, buffer, staging)
                    whole = next_key <= length and opaque(steep) == 0
                    if by_lines and not whole:
                        # Made anew: kept all along, they would take registers.
                        give(opaque(half_maximum), half_maxima)
                        give(factor, factors)
                        _take_shifts(half_maxima, factors, steep, shifts)
                    if first_key >= 0 and evaluates:
                        if whole:
                            cells = (first_cell, tile_cells, stretch_cell, key_pitch)
                            make_whole(shared, cells, dims, kept, buffers, products, more_products)
                            if exact:
                                _take_peaks(products, peaks)
                            add_all_by_lines(products, queries_by_lines, True, parts, seconds, thirds)
                            if stretches > 1:
                                add_all_by_lines(more_products, queries_by_lines, False, parts, seconds, thirds)
                            _add_parts(parts, sums)
                            first_key = next_key
                        while first_key < min(next_key, length):
                            cells = (first_cell, tile_cells, stretch_cell, key_pitch)
                            scores_again(
                                shared, cells, first_key, length, product_limit, dims, flawed, buffers, products
                            )
                            if exact:
                                _take_peaks(products, peaks)
                            _add_all_weights(products, queries_exactly, True, parts, seconds, thirds)
                            _add_parts(parts, sums)
                            first_key = opaque(np.int32(first_key + STRETCH))
                            stretch_cell = np.int32(stretch_cell + STRETCH * key_pitch)
                    first_key = opaque(next_key)
                for slot in range(SLOTS):
                    totals[slot], firsts[slot], seconds[slot] = warp_sum3(
                        totals[slot] + lost_totals[slot], firsts[slot] + lost_firsts[slot], seconds[slot], 4, FULL_MASK
                    )
                    thirds[slot] = warp_sum(thirds[slot], 4, FULL_MASK)
                new_total, first = own_number(totals, turn), own_number(firsts, turn)
                second, third = own_number(seconds, turn), own_number(thirds, turn)
                peak = NEGATIVE_INFINITY
                if exact:
                    for slot in range(SLOTS):
                        peaks[slot] = warp_max(peaks[slot], 4, FULL_MASK)
                    peak = own_number(peaks, turn)
                if gathers:
                    part = np.int32(warp * WARP_QUERIES + opaque(own_row))
                    if turn < SLOTS:
                        set_element(own_numbers, np.int64(part), new_total)
                        set_element(own_numbers, np.int64(part + _MOST_THREADS), first)
                        set_element(own_numbers, np.int64(part + 2 * _MOST_THREADS), second)
                        set_element(own_numbers, np.int64(part + 3 * _MOST_THREADS), third)
                        if exact:
                            set_element(own_numbers, np.int64(part + 4 * _MOST_THREADS), peak)
                    cuda.syncthreads()  # the sums of all warps are there
                    new_total, first, second, third, peak = _ZERO, _ZERO, _ZERO, _ZERO, NEGATIVE_INFINITY
                    part = place
                    while searching and part < warps * WARP_QUERIES:
                        new_total += element_at(own_numbers, np.int64(part))
                        first += element_at(own_numbers, np.int64(part + _MOST_THREADS))
                        second += element_at(own_numbers, np.int64(part + 2 * _MOST_THREADS))
                        third += element_at(own_numbers, np.int64(part + 3 * _MOST_THREADS))
                        if exact:
                            peak = maximum(peak, element_at(own_numbers, np.int64(part + 4 * _MOST_THREADS)))
                        part = opaque(np.int32(part + WARP_QUERIES))
                resolved = True
                rescaled = _ONE
                if exact and searching and peak > NEGATIVE_INFINITY:
                    # Only now the maximum is exact. Where the one before was so far off that sums may have overflowed
                    # or vanished, they are made once more.
                    moved = (_HALF_OF * peak - half_maximum) * factor
                    half_maximum = _HALF_OF * peak
                    resolved = not (abs(moved) > _FARTHEST_MAXIMUM)
                    rescaled = exp2(-moved)
                if searching and resolved:
                    # Made again from little: a number kept over a pass over the keys is a register less for it.
                    bound_limit, lowest_accepted, aim = accepted_limits(opaque(bound))
                    lowest_beta = first_beta(opaque(temperature_min), temperature_max)
                    highest_beta = last_beta(opaque(temperature_min), lowest_beta)
                    new_entropy = entropy_of(new_total, first)
                    if new_entropy <= bound_limit:
                        high_beta, total = beta, new_total * rescaled
                        bracketed = True
                        searching = new_entropy < lowest_accepted and beta > lowest_beta
                    else:
                        low_beta = beta
                        if beta >= highest_beta:
                            total = new_total * rescaled
                            searching = False
                    if step >= max_iterations:
                        searching = False
                    if searching:
                        if step == max_iterations - 1 and not bracketed:
                            beta = highest_beta
                        else:
                            variance = variance_of(new_total, first, second)
                            bend = bend_of(new_total, first, second, third, variance, new_entropy, aim)
                            beta = next_beta(
                                step, beta, new_entropy, variance, bend, low_beta, high_beta, bracketed, aim
                            )
                            # A start that is no proof may have been too high.
                            beta = maximum(beta, lowest_beta)
                            # The highest one ends the search, whatever the entropy there.
                            is_last = beta >= highest_beta
                            untried = (
                                trusts
                                and step < max_iterations - 1
                                and (is_last or is_near(new_entropy, aim, near_share))
                            )
                            if untried:
                                total = new_total * rescaled
                                searching = False
                    step = np.int32(step + 1)
                remaining = cuda.syncthreads_count(np.int32(searching))

            if first_dim == 0:
                tried_beta = beta if untried else high_beta
                factor = minimum(tried_beta * score_bits(scale), FLOAT32_MAX)
                if by_lines:
                    give(-_HALF_OF * factor, slopes)
                    give(half_maximum * factor, offsets)
                else:
                    give(half_maximum, half_maxima)
                    give(factor, factors)
                steep = np.int32(any_lane(by_lines and _is_steep(half_maximum, factor), FULL_MASK) or flawed)
                # Where there is no query, no value has weight.
                give(_HALF_OF * exp2(-lift) / total if total > _ZERO and owns else _ZERO, shares)
            own_cell = np.int64(cuda.threadIdx.x)
            set_element(own_numbers, own_cell, half_maximum)
            set_element(own_numbers, own_cell + _MOST_THREADS, beta)
            set_element(own_numbers, own_cell + 2 * _MOST_THREADS, low_beta)
            set_element(own_numbers, own_cell + 3 * _MOST_THREADS, high_beta)
            set_element(own_numbers, own_cell + 4 * _MOST_THREADS, bound)
            mends = False
            adding = True
            while adding:
                for place in range(VALUE_SUMS):
                    results[place] = _ZERO
                for slot in range(SLOTS):
                    totals[slot] = _ZERO
                    lost_totals[slot] = _ZERO
                    firsts[slot] = _ZERO
                    lost_firsts[slot] = _ZERO
                keys_start = own_start(keys_origin, keys_sample_stride, keys_head_stride, heads, group, queries)
                key_place = (keys_start, key_stride, key_dim_stride)
                values_start = own_start(values_origin, values_sample_stride, values_head_stride, heads, group, queries)
                value_place = (values_start, value_stride, value_dim_stride)
                first_key = np.int32(-span)
                while first_key < length:
                    wait_for_copies()
                    cuda.syncthreads()  # keys are there, and those before are not needed any more
                    stretch_cell = np.int32(keys_cell + buffer * STRETCH * key_pitch)
                    value_cell = np.int32(values_cell + buffer * STRETCH * value_pitch)
                    buffer ^= np.int32(stretches)
                    next_key = np.int32(first_key + span)
                    stage_keys(keys, key_place, next_key, length, dims, shared, layout, buffer, staging)
                    stage_values(
                        values, value_place, next_key, length, first_dim, dims, shared, values_cell, buffer, staging
                    )
                    last_key = np.int32(length - 1)
                    whole = by_lines and next_key <= length and not mends and opaque(steep) == 0
                    while 0 <= first_key < min(next_key, length) and valid > 0:
                        cells = (first_cell, tile_cells, stretch_cell, key_pitch)
                        place = (queries, heads, group, contexts, first_key, last_key, first_dim, dims)
                        if whole:
                            if keeps:
                                # Beside the results there are no registers to keep them in all along.
                                keep_queries(shared, first_cell, tile_cells, kept)
                            make_stretch(shared, cells, dims, kept, buffers, products)
                            weigh_by_lines(products, queries_by_lines, True, parts, seconds, thirds)
                            _add_parts(parts, sums)
                            add_stretch(
                                shared, value_cell, place, products, shares, smallest, False, errors, value_buffers,
                                results,
                            )  # fmt: skip
                        else:
                            scores_again(
                                shared, cells, first_key, length, product_limit, dims, flawed, buffers, products
                            )
                            if by_lines:
                                for slot in range(SLOTS):
                                    half_maxima[slot] = element_at(
                                        own_numbers, np.int64((cuda.threadIdx.x & ~3) + slot)
                                    )
                                    factors[slot] = -_TWO * slopes[slot]
                                    is_moved = opaque(steep) == 0 and not mends
                                    shifts[slot] = _shift_of(half_maxima[slot], factors[slot]) if is_moved else _ZERO
                            weigh(products, queries_exactly, True, parts, seconds, thirds)
                            _add_parts(parts, sums)
                            add_stretch(
                                shared, value_cell, place, products, shares, smallest, mends, errors, value_buffers,
                                results,
                            )  # fmt: skip
                        first_key = opaque(np.int32(first_key + STRETCH))
                        stretch_cell = np.int32(stretch_cell + STRETCH * key_pitch)
                        value_cell = np.int32(value_cell + STRETCH * value_pitch)
                    first_key = opaque(next_key)
                for slot in range(SLOTS):
                    totals[slot] = warp_sum(totals[slot] + lost_totals[slot], 4, FULL_MASK)
                    firsts[slot] = warp_sum(firsts[slot] + lost_firsts[slot], 4, FULL_MASK)
                    share = _ONE / totals[slot] if totals[slot] > _ZERO else _ZERO
                    finals[slot] = share / shares[slot] if mends and not half and share > _ZERO else share
                bad = False
                for place in range(VALUE_SUMS):
                    results[place] *= finals[place // TILE_SUMS * 2 + ((place >> 1) & 1)]
                    bad |= not (abs(results[place]) <= largest)
                bad = cuda.syncthreads_or(np.int32(bad)) != 0
                own_cell = np.int64(opaque(np.int32(cuda.threadIdx.x)))
                half_maximum = element_at(own_numbers, own_cell)
                beta = element_at(own_numbers, own_cell + _MOST_THREADS)
                low_beta = element_at(own_numbers, own_cell + 2 * _MOST_THREADS)
                high_beta = element_at(own_numbers, own_cell + 3 * _MOST_THREADS)
                bound = element_at(own_numbers, own_cell + 4 * _MOST_THREADS)
                total, first = exp2(-lift) * own_number(totals, turn), exp2(-lift) * own_number(firsts, turn)
                entropy = entropy_of(total, first)
                if first_dim == 0:
                    bound_limit, lowest_accepted, _aim = accepted_limits(opaque(bound))
                    ends = beta >= last_beta(opaque(temperature_min), first_beta(temperature_min, temperature_max))
                    if untried and not (entropy >= lowest_accepted and (ends or entropy <= bound_limit)):
                        searching, trusts, untried = True, False, False
                    remaining = cuda.syncthreads_count(np.int32(searching))
                adding = bad and remaining == 0 and not mends
                if adding:
                    # The sum of a query whose last step this pass has made was another when the pass began.
                    for slot in range(SLOTS):
                        if shares[slot] > _ZERO and totals[slot] > _ZERO:
                            shares[slot] = _HALF_OF / totals[slot]
                mends = True
            if remaining == 0:
                sample_head, first_query = own_place(queries)
                row = np.int64(sample_head) * queries + first_query
                if first_dim == 0:
                    if owns:
                        own_beta = beta if untried else high_beta
                        write_row(
                            row + own_row, own_beta, entropy, opaque(temperature_min), temperature_max, temperature_out,
                            entropy_out,
                        )  # fmt: skip
                        row_top = _TWO * opaque(half_maximum) * abs(opaque(scale))
                        report_sum(
                            row + own_row, row_top, total, opaque(temperature_min), temperature_max, lse_out, errors
                        )
                    is_over = owns and is_out_of_reach(entropy, opaque(bound))
                    report_out_of_reach(is_over, row - warp * WARP_QUERIES, own_row, gathered_counts, errors)
                place = row * dims + opaque(first_dim)
                dims_left = np.int32(dims - first_dim)
                if bad:
                    report_results(results, place, dims, valid, dims_left, errors)
                store_results(output, results, place, dims, valid, dims_left, stored)
                first_dim = opaque(np.int32(first_dim + VALUE_DIMS))

    return biencoder_tiles_kernel
