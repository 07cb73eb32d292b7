"""Steps of tensor cores, and the products of tiles that are made of them, or without them."""

import numpy as np
import pytest
from support import normal, to_host, to_target

from burt_numba.backend import cuda
from burt_numba.device import tiles
from burt_numba.device.tensor_cores import cut, halves_beside, multiply_add, pair_of_halves, rounded, split
from burt_numba.device.tiles import (
    DEPTH,
    PLACE_PITCH,
    PRODUCTS,
    ROW_PITCH,
    TILE,
    TILES,
    WARPS,
    add_products,
    leave_products,
    multiply_tiles,
)
from burt_numba.target import GATE_THREADS

_TRUNCATED = 2.0**-10
"""What a factor loses that has more than 11 significant bits, relative."""
_SPLIT = 2.0**-21
_ADDITION = 2.0**-22
"""Of a sum, relative to its largest term: tensor cores cut what float32 would round."""


@cuda.jit
def step_kernel(left, right, sums, results):
    a = cuda.local.array(4, np.float32)
    b = cuda.local.array(2, np.float32)
    own = cuda.local.array(4, np.float32)
    group, turn = cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
    a[0] = left[group, turn]
    a[1] = left[group + 8, turn]
    a[2] = left[group, turn + 4]
    a[3] = left[group + 8, turn + 4]
    b[0] = right[turn, group]
    b[1] = right[turn + 4, group]
    own[0] = sums[group, 2 * turn]
    own[1] = sums[group, 2 * turn + 1]
    own[2] = sums[group + 8, 2 * turn]
    own[3] = sums[group + 8, 2 * turn + 1]
    multiply_add(a, 0, b, 0, own, 0)
    results[group, 2 * turn] = own[0]
    results[group, 2 * turn + 1] = own[1]
    results[group + 8, 2 * turn] = own[2]
    results[group + 8, 2 * turn + 1] = own[3]


@cuda.jit
def step_of_halves_kernel(left, right, sums, results):
    """Words hold two neighbours of the inner axis, of 16 places."""
    a = cuda.local.array(4, np.uint32)
    b = cuda.local.array(2, np.uint32)
    own = cuda.local.array(4, np.float32)
    group, turn = cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
    for cell in range(4):
        row, place = group + (cell & 1) * 8, 2 * turn + (cell >> 1) * 8
        a[cell] = pair_of_halves(left[row, place], left[row, place + 1])
        own[cell] = sums[group + (cell >> 1) * 8, 2 * turn + (cell & 1)]
    for cell in range(2):
        place = 2 * turn + cell * 8
        b[cell] = pair_of_halves(right[place, group], right[place + 1, group])
    multiply_add(a, 0, b, 0, own, 0)
    for cell in range(4):
        results[group + (cell >> 1) * 8, 2 * turn + (cell & 1)] = own[cell]


@cuda.jit
def parts_kernel(values, high, low, nearest, words):
    thread = cuda.threadIdx.x
    own = cuda.local.array(1, np.float32)
    rest = cuda.local.array(1, np.float32)
    own[0] = values[thread]
    nearest[thread] = rounded(own[0])
    cut(own, own, rest, 0)
    high[thread] = own[0]
    low[thread] = rest[0]
    first, second = pair_of_halves(values[thread], np.float32(1.0)), pair_of_halves(np.float32(2.0), values[thread])
    words[thread, 0] = halves_beside(first, second, 0)
    words[thread, 1] = halves_beside(first, second, 1)


@cuda.jit
def split_kernel(values, high, low):
    own = cuda.local.array(1, np.float32)
    rest = cuda.local.array(1, np.float32)
    own[0] = values[cuda.threadIdx.x]
    split(own, own, rest, 0)
    high[cuda.threadIdx.x] = own[0]
    low[cuda.threadIdx.x] = rest[0]


@cuda.jit
def tiles_kernel(left, right, row_pitch, place_pitch, results):
    """A block's product of 32 x places by 32 x places; warps take 16 places in turn."""
    staged = cuda.shared.array(TILES, np.float32, 16)
    first = cuda.local.array(8, np.float32)
    first_rest = cuda.local.array(8, np.float32)
    second = cuda.local.array(2, np.float32)
    second_rest = cuda.local.array(2, np.float32)
    step_sums = cuda.local.array(4, np.float32)
    sums = cuda.local.array(PRODUCTS, np.float32)
    words = cuda.local.array(4, np.uint32)
    values = cuda.local.array(4, np.float32)
    totals = cuda.local.array(4, np.float32)
    thread = np.int32(cuda.threadIdx.x)
    warp = np.int32(thread >> 5)
    places = np.int32(left.shape[1])
    for product in range(PRODUCTS):
        sums[product] = np.float32(0.0)
    start = np.int32(warp * DEPTH)
    tile = warp * 2 * TILE
    while start < places:
        cuda.syncwarp()
        for place in range(DEPTH):
            row = cuda.laneid
            at = row * row_pitch + place * place_pitch
            there = start + place < places
            staged[tile + at] = left[row, start + place] if there else np.float32(0.0)
            staged[tile + TILE + at] = right[row, start + place] if there else np.float32(0.0)
        cuda.syncwarp()
        multiply_tiles(
            staged, tile, tile + TILE, row_pitch, place_pitch, np.int32(places - start),
            (first, first_rest, second, second_rest, step_sums, sums),
        )  # fmt: skip
        start = np.int32(start + WARPS * DEPTH)
    leave_products(staged, warp, sums)
    add_products(staged, words, values, totals)
    for element in range(4):
        results[thread >> 3, 4 * (thread & 7) + element] = totals[element]


def numbers(shape, seed):
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * np.exp(random.normal(size=shape))).astype(np.float32)


def test_a_step_of_numbers_that_tensor_cores_take_whole():
    # Whole numbers of up to 11 bits: products and sums are exact.
    random = np.random.default_rng(1)
    left = random.integers(-2047, 2048, (16, 8)).astype(np.float32)
    right = random.integers(-50, 51, (8, 8)).astype(np.float32)
    sums = random.integers(-1000, 1001, (16, 8)).astype(np.float32)
    results = to_target(np.full((16, 8), np.nan, np.float32))
    step_kernel[1, 32](to_target(left), to_target(right), to_target(sums), results)
    assert np.array_equal(to_host(results), sums + left @ right)


def test_a_step_loses_the_lower_bits():
    left, right = numbers((16, 8), 2), numbers((8, 8), 3)
    results = to_target(np.full((16, 8), np.nan, np.float32))
    step_kernel[1, 32](to_target(left), to_target(right), to_target(np.zeros((16, 8), np.float32)), results)
    error = np.abs(to_host(results) - left.astype(np.float64) @ right)
    size = np.abs(left.astype(np.float64)) @ np.abs(right)
    assert (error <= (2 * _TRUNCATED + _ADDITION) * size).all()
    # Those of float32 are not all there: what the split is for.
    assert error.max() > 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_two_parts_of_a_number(seed):
    values = numbers(32, seed)
    values[:8] = [0.0, -0.0, 1.0, -2047.0, 1.5e-30, 3e38, 1 + 2.0**-23, 1 + 2.0**-12]
    high, low = (to_target(np.full(32, np.nan, np.float32)) for _ in range(2))
    split_kernel[1, 32](to_target(values), high, low)
    high, low = to_host(high), to_host(low)
    for part in (high, low):
        assert not (part.view(np.uint32) & 0x1FFF).any()
    assert (np.abs(high.astype(np.float64) + low - values) <= _SPLIT * np.abs(values)).all()
    assert np.array_equal(high[:4], values[:4])
    assert not low[:4].any()


def test_what_is_not_finite_stays_so():
    values = np.full(32, np.nan, np.float32)
    values[::3], values[1::3] = np.inf, -np.inf
    values[5] = np.uint32(0xFFFFFFFF).view(np.float32)
    high, low = (to_target(np.zeros(32, np.float32)) for _ in range(2))
    split_kernel[1, 32](to_target(values), high, low)
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(to_host(high) + to_host(low)).any()


WITHOUT = pytest.mark.simulator_only("only devices without tensor cores compile this half")


@pytest.mark.parametrize("has_tensor_cores", [True, pytest.param(False, marks=WITHOUT)])
@pytest.mark.parametrize(("row_pitch", "place_pitch"), [(ROW_PITCH, 1), (1, PLACE_PITCH)])
@pytest.mark.parametrize("places", [1, 7, 8, 9, 16, 17, 130])
def test_products_of_tiles(monkeypatch, has_tensor_cores, row_pitch, place_pitch, places):
    if not has_tensor_cores:
        monkeypatch.setattr(tiles, "has_tensor_cores", lambda: False)
    left, right = numbers((32, places), places), numbers((32, places), places + 1)
    results = to_target(np.full((32, 32), np.nan, np.float32))
    tiles_kernel[1, GATE_THREADS](to_target(left), to_target(right), row_pitch, place_pitch, results)
    error = np.abs(to_host(results) - left.astype(np.float64) @ right.T)
    size = np.abs(left.astype(np.float64)) @ np.abs(right).T
    assert (error <= (2 * _SPLIT + 2 * _ADDITION) * size).all()
    # The tiles in each other's place, or only the leading bits, would not do.
    assert not (np.abs(to_host(results).T - left.astype(np.float64) @ right.T) <= 1e-4 * size).all()


def test_a_step_of_halves():
    """Products of float16 numbers are exact, and added in float32."""
    left, right, sums = normal((16, 16), seed=1), normal((16, 8), seed=2), normal((16, 8), seed=3)
    left, right = (values.astype(np.float16).astype(np.float32) for values in (left, right))
    results = to_target(np.full((16, 8), np.nan, np.float32))
    step_of_halves_kernel[1, 32](to_target(left), to_target(right), to_target(sums), results)
    expected = sums + left.astype(np.float64) @ right
    largest = np.abs(sums) + np.abs(left).astype(np.float64) @ np.abs(right)
    assert (np.abs(to_host(results) - expected) <= 16 * _ADDITION * largest).all()


def test_parts_of_a_number():
    """Cut parts are exact together, infinities and every NaN stay what is not finite, and halves keep their places."""
    values = np.concatenate([normal((26,), seed=4), [0.0, 1 + 2**-11, np.inf, -np.inf, np.nan, np.nan]]).astype(
        np.float32
    )
    values.view(np.uint32)[-1] = 0x7FFFFFFF
    high, low, nearest = (to_target(np.zeros(32, np.float32)) for _ in range(3))
    words = to_target(np.zeros((32, 2), np.uint32))
    parts_kernel[1, 32](to_target(values), high, low, nearest, words)
    high, low, nearest, words = (to_host(array) for array in (high, low, nearest, words))
    finite = np.isfinite(values)
    assert np.array_equal(high[finite] + low[finite], values[finite])
    assert (high.view(np.uint32)[finite] & 0x1FFF == 0).all()
    # What a tensor core takes of them.
    nearest = (nearest.view(np.uint32) & 0xFFFFE000).view(np.float32)
    assert (np.abs(low)[finite] <= 2.0**-10 * np.abs(values)[finite]).all()
    assert (np.abs(nearest[finite] - values[finite]) <= 2.0**-11 * np.abs(values[finite])).all()
    assert nearest[27] == 1 + 2**-10  # of two as near, the one farther from 0
    assert not np.isfinite(low[~finite]).any()
    halves = words.view(np.float16).reshape(32, 2, 2).astype(np.float32)
    assert np.array_equal(halves[:26, 0, 0], values[:26].astype(np.float16)) and (halves[:, 0, 1] == 2).all()
    assert (halves[:, 1, 0] == 1).all() and np.array_equal(halves[:26, 1, 1], values[:26].astype(np.float16))
