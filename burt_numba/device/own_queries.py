"""What a lane knows of the query that it looks after, of the 32 of its warp.

Lane (g = lane / 4, t = lane % 4) has scores of queries g, g + 8, g + 16 and g + 24, and looks after query g + 8 t.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import FEW, KEY_TILES, ROW_TILES, TILE_ROWS
from burt_numba.device.entropy import entropy_search
from burt_numba.device.events import ENTROPY_OVERFLOW, record_event
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, choose, exp2, minimum, opaque
from burt_numba.device.warp import FULL_MASK, shuffle, shuffle_xor, warp_min

SLOTS = 2 * ROW_TILES
"""Queries of which a lane has scores; as many lanes share each."""
WARP_QUERIES = ROW_TILES * TILE_ROWS
TILE_PRODUCTS = 4 * KEY_TILES
PRODUCTS = ROW_TILES * TILE_PRODUCTS
"""Scores that a lane has of a stretch."""
_ZERO = np.float32(0.0)
_FEW_A_PART = 16
"""Of them, those whose weights are added up before they join a sum that may be larger."""
_FEW_ITERATIONS = 8


@cuda.jit(device=True)
def own_number(values, turn):
    """Of the numbers of a lane's four queries, that of the one it looks after."""
    own = values[0]
    for slot in range(1, SLOTS):
        own = choose(turn & (SLOTS - 1) == slot, values[slot], own)
    return own


@cuda.jit(device=True)
def give(value, values):
    """Every lane gets the numbers of its four queries from the lanes that look after them."""
    first = np.int32(cuda.laneid & 28)
    for slot in range(SLOTS):
        values[slot] = shuffle(value, np.int32(first + slot), FULL_MASK)


@cuda.jit(device=True)
def own_sum(values, turn):
    """Of the numbers of a lane's four queries, that of the one it looks after, from all lanes that share it."""
    odd = turn & 1 != 0
    first = choose(odd, values[1], values[0]) + shuffle_xor(choose(odd, values[0], values[1]), 1, FULL_MASK)
    second = choose(odd, values[3], values[2]) + shuffle_xor(choose(odd, values[2], values[3]), 1, FULL_MASK)
    upper = turn & 2 != 0
    return choose(upper, second, first) + shuffle_xor(choose(upper, first, second), 2, FULL_MASK)


@cuda.jit(device=True)
def score_bits(scale):
    """Of a product's half, in units of ln 2 of a score: made anew where it is wanted."""
    return minimum(2 * abs(opaque(scale)) * LOG2_E, FLOAT32_MAX)


@cuda.jit(device=True)
def take_own(products, turn, own):
    """Of a stretch, a lane gets all scores of its query from the lanes that share it; in an order of its own."""
    for step in range(SLOTS):
        for key in range(2 * KEY_TILES):
            first = key // 2 * 4 + key % 2
            slot = turn ^ step
            sent = products[first]
            for other in range(1, SLOTS):
                sent = choose(slot == other, products[other // 2 * TILE_PRODUCTS + other % 2 * 2 + first], sent)
            own[step * 2 * KEY_TILES + key] = shuffle_xor(sent, step, FULL_MASK)


@cuda.jit(device=True)
def _sums_of_few(gaps, beta, phase):
    total = _ZERO
    first = _ZERO
    second = _ZERO
    for part in range(FEW // _FEW_A_PART):
        part_total = _ZERO
        part_first = _ZERO
        for element in range(part * _FEW_A_PART, (part + 1) * _FEW_A_PART):
            t = beta * gaps[element]
            weight = exp2(-t)
            weighted = t * weight
            part_total += weight
            part_first += weighted
            second += weighted * t
        total += part_total
        first += part_first
    # In units of ln 2, as t is: a mean counts up to 1.
    return total, minimum(first, total * LOG2_E), second


_search_few = entropy_search(_sums_of_few)


@cuda.jit(device=True)
def search_few(gaps, bound, lowest_beta, highest_beta):
    """(beta, sum of the weights there, entropy) from the gaps of a few elements of a row, and a beta not too high.

    The beta is one to begin with: whatever else is in the row, its entropy is at least
    ``ln(total) + min(1, mean of t)`` of a part of it that has the maximum (docs/biencoder_attention.md). Where that is
    within the bound at the lowest beta, it is that one.
    """
    beta, total, entropy, _phase = _search_few(gaps, bound, lowest_beta, highest_beta, _FEW_ITERATIONS, 0)
    return beta, total, entropy


@cuda.jit(device=True)
def report_out_of_reach(is_one, row, own_row, counts, errors):
    """The block reports its queries of which the bound is out of reach, all at once: one by one, they would queue.

    ``row``: the first of the block; ``counts``: a number of shared memory for each warp, free by now.
    """
    found = cuda.syncthreads_count(np.int32(is_one))
    if found > 0:
        warp = np.int32(cuda.threadIdx.x >> 5)
        lowest = warp_min(own_row if is_one else np.int32(WARP_QUERIES), 32, FULL_MASK)
        if cuda.laneid == 0:
            counts[warp] = lowest
        cuda.syncthreads()  # the lowest of each warp
        if cuda.threadIdx.x == 0:
            while counts[warp] == WARP_QUERIES:
                warp = opaque(np.int32(warp + 1))
            record_event(errors, ENTROPY_OVERFLOW, found, row + warp * WARP_QUERIES + counts[warp])
