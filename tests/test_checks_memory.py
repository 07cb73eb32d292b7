"""Reads of memory that nobody wrote, and indices outside an array, which a checked launch finds."""

from __future__ import annotations

import os
import re
from functools import partial

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from checked_pairs import RAMP, Pairs, ramp, run
from support import poisoned

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import OutOfBoundsError, UninitializedReadError

WEIGHTS = ramp(4)
pairs = Pairs()
unwritten = partial(pairs.wrong, UninitializedReadError)
outside = partial(pairs.wrong, OutOfBoundsError)


# Memory that nobody wrote -------------------------------------------------------------------------------------------


@unwritten("tile[31]", (("a", 31),), expected=RAMP)
def last_cell_left_out(values, out):
    tile = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    if i < 31:
        tile[i] = values[i]
    cuda.syncthreads()
    out[i] = tile[i]  # [a]


@pairs.right
def every_cell_filled(values, out):
    tile = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    if i < 32:
        tile[i] = values[i]
    cuda.syncthreads()
    out[i] = tile[i]


@unwritten("tile[0]", (("a", 0, 1),), grid=2, block=4, shapes=(4, 8), expected=np.tile(ramp(4), 2))
def shared_memory_of_the_block_before(values, out):
    tile = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        tile[i] = values[i]
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[i]  # [a]


@pairs.right
def shared_memory_of_this_block(values, out):
    tile = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[i]


# The thread itself writes the cell afterwards, which makes the read no better.
@unwritten("total[0]", (("a", 0),), expected=[32 * 33 / 2] * 32)
def sum_that_starts_with_nothing(values, out):
    total = cuda.shared.array(1, np.float32)
    i = cuda.threadIdx.x
    if i == 0:
        for j in range(32):
            total[0] += values[j]  # [a]
    cuda.syncthreads()
    out[i] = total[0]


@pairs.right
def sum_that_starts_with_zero(values, out):
    total = cuda.shared.array(1, np.float32)
    i = cuda.threadIdx.x
    if i == 0:
        total[0] = np.float32(0.0)
        for j in range(32):
            total[0] += values[j]
    cuda.syncthreads()
    out[i] = total[0]


@unwritten("counter[0]", (("a", 0),), expected=[32] * 32)
def counter_that_starts_with_nothing(values, out):
    counter = cuda.shared.array(1, np.int32)
    cuda.atomic.add(counter, 0, 1)  # [a]
    cuda.syncthreads()
    out[cuda.threadIdx.x] = counter[0]


@pairs.right
def counter_that_starts_with_zero(values, out):
    counter = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        counter[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(counter, 0, 1)
    cuda.syncthreads()
    out[cuda.threadIdx.x] = counter[0]


@unwritten("window[3]", (("a", 0),), expected=4 * RAMP)
def short_window(values, out):
    window = cuda.local.array(4, np.float32)
    i = cuda.threadIdx.x
    for k in range(3):
        window[k] = values[i]
    total = np.float32(0.0)
    for value in window:  # [a]
        total += value
    out[i] = total


@pairs.right
def whole_window(values, out):
    window = cuda.local.array(4, np.float32)
    i = cuda.threadIdx.x
    for k in range(4):
        window[k] = values[i]
    total = np.float32(0.0)
    for value in window:
        total += value
    out[i] = total


@unwritten("tile[32]|dynamic shared memory[32]", (("a", 31),), shared_bytes=33 * 4, expected=[*RAMP[1:], 0])
def halo_left_out(values, out):
    tile = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    cuda.syncthreads()
    out[i] = tile[i + 1]  # [a]


@pairs.right
def halo_filled(values, out):
    tile = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    if i == 0:
        tile[32] = np.float32(0.0)
    cuda.syncthreads()
    out[i] = tile[i + 1]


@unwritten(
    "scratch[0]",
    (("a", 0),),
    arguments=lambda: (cuda.device_array(32, np.float32), poisoned(32)),
    expected=np.arange(32),
)
def scratch_that_is_only_read(scratch, out):
    i = cuda.grid(1)
    out[i] = scratch[i]  # [a]


@pairs.right
def scratch_that_is_written_first(scratch, out):
    i = cuda.grid(1)
    scratch[i] = i
    out[i] = scratch[i]


# Indices outside ----------------------------------------------------------------------------------------------------


@outside("values", (("a", 31),), says=("index 32 is outside axis 0 of",), expected=[*RAMP[1:], 32])
def one_past_the_end(values, out):
    i = cuda.threadIdx.x
    out[i] = values[i + 1]  # [a]


@pairs.right
def not_past_the_end(values, out):
    i = cuda.threadIdx.x
    out[i] = values[min(i + 1, values.size - 1)]


@outside("values", (("a", 0),), says=("index -1 is outside axis 0 of",), expected=[0, *[1] * 31])
def one_before_the_start(values, out):
    i = cuda.threadIdx.x
    out[i] = values[i] - values[i - 1]  # [a]


@pairs.right
def not_before_the_start(values, out):
    i = cuda.threadIdx.x
    out[i] = values[i] - values[max(i - 1, 0)]


@outside(
    "out",
    (("a", 5, 2),),
    says=("index 21 is outside axis 0 of",),
    grid=3,
    block=8,
    shapes=(32, 21),
    expected=np.repeat(ramp(11), 2)[:21],
)
def store_past_the_end(values, out):
    i = cuda.grid(1)
    out[i] = values[i // 2]  # [a]


@pairs.right
def store_up_to_the_end(values, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = values[i // 2]


# [0, 8] is [1, 0] in the flat memory.
@outside(
    "matrix",
    (("a", (7, 0)),),
    says=("index 8 is outside axis 1 of",),
    block=(8, 4),
    shapes=((4, 8), (4, 8)),
    expected=np.roll(ramp(4, 8), -1, axis=1),
)
def next_row_by_the_second_index(matrix, out):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    out[y, x] = matrix[y, x + 1]  # [a]


@pairs.right
def same_row_by_the_second_index(matrix, out):
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    out[y, x] = matrix[y, (x + 1) % 8]


# Still within `values`.
@outside("values", (("a", 2),), says=("index 2 is outside axis 0 of",), block=8, shapes=(32, 8), expected=range(9, 17))
def past_a_slice(values, out):
    i = cuda.threadIdx.x
    table = values[8:16].reshape(2, 4)
    out[i] = table[i % 4, i // 4]  # [a]


@pairs.right
def within_a_slice(values, out):
    i = cuda.threadIdx.x
    table = values[8:16].reshape(2, 4)
    out[i] = table[i // 4, i % 4]


@outside(
    "tile",
    (("a", (4, 0)),),
    says=("index 4 is outside axis 0 of",),
    block=(8, 4),
    shapes=((4, 8), (8, 4)),
    expected=ramp(4, 8).T,
)
def shared_axes_swapped(matrix, out):
    tile = cuda.shared.array((4, 8), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile[x, y] = matrix[y, x]  # [a]
    cuda.syncthreads()
    out[x, y] = tile[y, x]


@pairs.right
def shared_axes_kept(matrix, out):
    tile = cuda.shared.array((4, 8), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    tile[y, x] = matrix[y, x]
    cuda.syncthreads()
    out[x, y] = tile[y, x]


@outside(
    "tile|dynamic shared memory",
    (("a", 31),),
    says=("index 32 is outside axis 0 of",),
    shared_bytes=32 * 4,
    expected=RAMP,
)
def past_dynamic_shared_memory(values, out):
    tile = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    tile[i + 1] = values[i]  # [a]
    cuda.syncthreads()
    out[i] = tile[i + 1]


@pairs.right
def within_dynamic_shared_memory(values, out):
    tile = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    cuda.syncthreads()
    out[i] = tile[i]


@outside("window", (("a", 0),), says=("index 3 is outside axis 0 of",), expected=RAMP + 2)
def past_a_local_array(values, out):
    window = cuda.local.array(3, np.float32)
    i = cuda.threadIdx.x
    for k in range(4):
        window[k] = values[i] + k  # [a]
    out[i] = window[2]


@pairs.right
def within_a_local_array(values, out):
    window = cuda.local.array(4, np.float32)
    i = cuda.threadIdx.x
    for k in range(4):
        window[k] = values[i] + k
    out[i] = window[2]


@outside("weights", (("a", 31),), says=("index 4 is outside axis 0 of",), expected=RAMP * np.repeat(WEIGHTS, 8))
def past_a_constant_array(values, out):
    weights = cuda.const.array_like(WEIGHTS)
    i = cuda.threadIdx.x
    out[i] = values[i] * weights[(i + 1) // 8]  # [a]


@pairs.right
def within_a_constant_array(values, out):
    weights = cuda.const.array_like(WEIGHTS)
    i = cuda.threadIdx.x
    out[i] = values[i] * weights[i // 8]


@outside(
    "bins",
    (("a", 31),),
    says=("index 32 is outside axis 0 of",),
    arguments=lambda: (ramp(32, dtype=np.int64), np.zeros(32, np.int32)),
    expected=[1] * 32,
)
def atomic_past_the_bins(values, bins):
    cuda.atomic.add(bins, values[cuda.threadIdx.x], 1)  # [a]


@pairs.right
def atomic_within_the_bins(values, bins):
    cuda.atomic.add(bins, values[cuda.threadIdx.x] - 1, 1)


# Every pair ---------------------------------------------------------------------------------------------------------


test_wrong_kernel, test_right_kernel = pairs.tests()


@pairs.each(UninitializedReadError)
def test_uninitialized_switched_off(pair):
    with simulator.checks(uninitialized=False):
        run(pair, pair.wrong)


def test_bounds_switched_off():
    with simulator.checks(bounds=False):
        out = poisoned(32)
        one_before_the_start[1, 32](ramp(32), out)
        assert out[0] == 1 - 32
        # Past the end it is NumPy that refuses.
        with pytest.raises(IndexError):
            one_past_the_end[1, 32](ramp(32), out)


# Memory of the device -----------------------------------------------------------------------------------------------


@cuda.jit
def copy(source, target):
    i = cuda.grid(1)
    if i < target.size:
        target[i] = source[i]


def test_device_arrays_that_are_written():
    """By a kernel, by the host, by a launch that nobody checked."""
    with simulator.checks():
        by_kernel = cuda.device_array(32, np.float32)
        copy[1, 32](ramp(32), by_kernel)
        by_copy = cuda.device_array(32, np.float32)
        by_copy.copy_to_device(ramp(32))
        by_host = cuda.device_array(32, np.float32)
        by_host[:] = ramp(32)
        by_parts = cuda.device_array(32, np.float32)
        by_parts[:16] = ramp(32)[:16]
        copy[1, 16](ramp(32)[16:], by_parts[16:])
        by_transfer = cuda.to_device(ramp(32))
    unchecked = cuda.device_array(32, np.float32)
    copy[1, 32](ramp(32), unchecked)
    with simulator.checks():
        for array in (by_kernel, by_copy, by_host, by_parts, by_transfer, unchecked):
            out = poisoned(32)
            copy[1, 32](array, out)
            np.testing.assert_array_equal(out, RAMP)
            np.testing.assert_array_equal(array.copy_to_host(), RAMP)


@pytest.mark.parametrize(
    "new", [lambda: cuda.device_array((4, 8), np.float32), lambda: cuda.device_array_like(ramp(4, 8))]
)
@pytest.mark.parametrize("index", [(0, 0), (3, 7), (2, 5)])
def test_device_arrays_with_a_cell_left_out(new, index):
    @cuda.jit
    def all_but_one(array, y, x):
        j, i = cuda.grid(2)
        if j != y or i != x:
            array[j, i] = 1

    @cuda.jit
    def copy_matrix(source, target):
        j, i = cuda.grid(2)
        target[j, i] = source[j, i]

    array = new()
    with simulator.checks():
        all_but_one[1, (4, 8)](array, *index)
        with pytest.raises(UninitializedReadError, match=re.escape(f"{index[0]}, {index[1]}")):
            array.copy_to_host()
        with pytest.raises(UninitializedReadError, match=rf"source\[{index[0]}, {index[1]}\]"):
            copy_matrix[1, (4, 8)](array, poisoned((4, 8)))


def test_memory_that_nobody_wrote_is_copied_without_checks():
    array = cuda.device_array(4, np.float32)
    array.copy_to_host()
    with simulator.checks(uninitialized=False):
        array.copy_to_host()


def test_a_device_array_is_forgotten_with_its_memory():
    """New memory at an old address is not taken for the old one."""
    with simulator.checks():
        for _ in range(20):
            array = cuda.device_array(1024, np.float32)
            del array
            fresh = np.zeros(1024, np.float32)
            copy[8, 128](fresh, fresh)
