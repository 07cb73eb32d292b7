"""Races that a checked launch finds: between threads, lanes, views, blocks and clusters, with the lines of both."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from checked_pairs import RAMP, Pairs, ramp, run
from support import poisoned

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import RaceError, UninitializedReadError

FULL = 0xFFFFFFFF
pairs = Pairs()
race = partial(pairs.wrong, RaceError)


# Threads of one block -----------------------------------------------------------------------------------------------


# The reader runs before the writer: the fault is the missing barrier, not the cell that is still empty.
@race("partial[1]", (("b", 0), ("a", 1)), shapes=(32, 1), expected=[32 * 33 / 2])
def sum_read_before_the_barrier(values, out):
    partial = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    partial[i] = values[i]  # [a]
    if i == 0:
        total = np.float32(0.0)
        for j in range(32):
            total += partial[j]  # [b]
        out[0] = total


@pairs.right
def sum_read_after_the_barrier(values, out):
    partial = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    partial[i] = values[i]
    cuda.syncthreads()
    if i == 0:
        total = np.float32(0.0)
        for j in range(32):
            total += partial[j]
        out[0] = total


# Threads 0 to 15 read what threads 31 to 16 wrote and go on; thread 16 is the first to read what is written anew.
@race("tile[15]", (("a", 15), ("b", 16)), shapes=((3, 32), 32), expected=ramp(3, 32).sum(axis=0)[::-1])
def tile_reused_too_early(values, out):
    tile = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    total = np.float32(0.0)
    for step in range(3):
        tile[i] = values[step, i]  # [a]
        cuda.syncthreads()
        total += tile[31 - i]  # [b]
    out[i] = total


@pairs.right
def tile_reused_after_a_barrier(values, out):
    tile = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    total = np.float32(0.0)
    for step in range(3):
        tile[i] = values[step, i]
        cuda.syncthreads()
        total += tile[31 - i]
        cuda.syncthreads()
    out[i] = total


# Right in a block of one warp.
@race("partial[63]", (("b", 0), ("a", 63)), block=64, shapes=(64, 64), expected=ramp(64)[::-1])
def warps_synchronised_one_by_one(values, out):
    partial = cuda.shared.array(64, np.float32)
    i, last = cuda.threadIdx.x, cuda.blockDim.x - 1
    partial[i] = values[i]  # [a]
    cuda.syncwarp()
    out[i] = partial[last - i]  # [b]


@pairs.right
def warps_synchronised_together(values, out):
    partial = cuda.shared.array(64, np.float32)
    i, last = cuda.threadIdx.x, cuda.blockDim.x - 1
    partial[i] = values[i]
    cuda.syncthreads()
    out[i] = partial[last - i]


def test_a_race_between_warps_is_hidden_in_one_warp():
    out = poisoned(32)
    with simulator.checks():
        warps_synchronised_one_by_one[1, 32](ramp(32), out)
        np.testing.assert_array_equal(out, RAMP[::-1])
        with pytest.raises(RaceError):
            warps_synchronised_one_by_one[1, 33](ramp(33), poisoned(33))


@race("rows", (("a", 0), ("a", 1)), expected=RAMP)
def rows_that_two_threads_fill(values, out):
    rows = cuda.shared.array((32, 4), np.float32)
    i = cuda.threadIdx.x
    rows[i // 2, :] = values[i]  # [a]
    cuda.syncthreads()
    out[i] = rows[i // 2, i % 4]


@pairs.right
def rows_of_one_thread_each(values, out):
    rows = cuda.shared.array((32, 4), np.float32)
    i = cuda.threadIdx.x
    rows[i, :] = values[i]
    cuda.syncthreads()
    out[i] = rows[i, i % 4]


@cuda.jit(device=True)
def put_in_halves(staging, place, value):
    staging[place // 2] = value  # [a]


@cuda.jit(device=True)
def put(staging, place, value):
    staging[place] = value


@race("buffer[0]", (("a", 0), ("a", 1)), callers="c", functions=(put_in_halves,), expected=RAMP)
def device_function_that_shares_a_cell(values, out):
    buffer = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    put_in_halves(buffer, i, values[i])  # [c]
    cuda.syncthreads()
    out[i] = buffer[i]


@pairs.right
def device_function_of_own_cells(values, out):
    buffer = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    put(buffer, i, values[i])
    cuda.syncthreads()
    out[i] = buffer[i]


# Lanes of one warp --------------------------------------------------------------------------------------------------


@race("buffer[1]", (("a", 0), ("b", 1)), expected=np.roll(RAMP, -1))
def rotation_in_lockstep(values, out):
    buffer = cuda.shared.array(32, np.float32)
    lane = cuda.threadIdx.x
    buffer[lane] = values[lane]
    cuda.syncwarp()
    following = buffer[(lane + 1) % 32]  # [a]
    buffer[lane] = following  # [b]
    out[lane] = buffer[lane]


@pairs.right
def rotation_with_syncwarp(values, out):
    buffer = cuda.shared.array(32, np.float32)
    lane = cuda.threadIdx.x
    buffer[lane] = values[lane]
    cuda.syncwarp()
    following = buffer[(lane + 1) % 32]
    cuda.syncwarp()
    buffer[lane] = following
    out[lane] = buffer[lane]


@race("buffer[31]", (("a", 31), ("b", 0)), shapes=(32, 16), expected=RAMP[:15:-1])
def syncwarp_without_the_writers(values, out):
    buffer = cuda.shared.array(32, np.float32)
    lane = cuda.threadIdx.x
    buffer[lane] = values[lane]  # [a]
    if lane < 16:
        cuda.syncwarp(0x0000FFFF)
        out[lane] = buffer[31 - lane]  # [b]


@pairs.right
def syncwarp_of_both_halves(values, out):
    buffer = cuda.shared.array(32, np.float32)
    lane = cuda.threadIdx.x
    buffer[lane] = values[lane]
    cuda.syncwarp(FULL)
    if lane < 16:
        out[lane] = buffer[31 - lane]


# The third reader counts, whatever is known of the first two.
@race("buffer[0]", (("a", 2), ("b", 0)), block=3, shapes=(2, 3), expected=[1, 1, 1])
def syncwarp_without_a_reader(values, out):
    buffer = cuda.shared.array(1, np.float32)
    lane = cuda.threadIdx.x
    if lane == 0:
        buffer[0] = values[0]
    cuda.syncthreads()
    out[lane] = buffer[0]  # [a]
    if lane < 2:
        cuda.syncwarp(0x00000003)
        if lane == 0:
            buffer[0] = values[1]  # [b]


@pairs.right
def syncwarp_with_every_reader(values, out):
    buffer = cuda.shared.array(1, np.float32)
    lane = cuda.threadIdx.x
    if lane == 0:
        buffer[0] = values[0]
    cuda.syncthreads()
    out[lane] = buffer[0]
    cuda.syncwarp(0x00000007)
    if lane == 0:
        buffer[0] = values[1]


@race("buffer[0]", (("a", 0), ("b", 3)), block=4, shapes=(4, 1), expected=[10])
def tree_of_syncwarps_without_a_branch(values, out):
    buffer = cuda.shared.array(4, np.float32)
    lane = cuda.threadIdx.x
    buffer[lane] = values[lane]  # [a]
    if lane >= 2:
        cuda.syncwarp(0b1100)
    if lane % 2 == 1:
        cuda.syncwarp(0b1010)
    if lane == 3:
        out[0] = buffer[0] + buffer[1] + buffer[2] + buffer[3]  # [b]


@pairs.right
def tree_of_syncwarps(values, out):
    buffer = cuda.shared.array(4, np.float32)
    lane = cuda.threadIdx.x
    buffer[lane] = values[lane]
    cuda.syncwarp(0b1100 if lane >= 2 else 0b0011)
    if lane % 2 == 1:
        cuda.syncwarp(0b1010)
    if lane == 3:
        out[0] = buffer[0] + buffer[1] + buffer[2] + buffer[3]


@pytest.mark.parametrize(
    "operation",
    [
        lambda: cuda.shfl_sync(FULL, 1, 0),
        lambda: cuda.shfl_up_sync(FULL, 1, 1),
        lambda: cuda.shfl_down_sync(FULL, 1, 1),
        lambda: cuda.shfl_xor_sync(FULL, 1, 1),
        lambda: cuda.all_sync(FULL, 1),
        lambda: cuda.any_sync(FULL, 1),
        lambda: cuda.eq_sync(FULL, 1),
        lambda: cuda.ballot_sync(FULL, 1),
        lambda: cuda.match_any_sync(FULL, 1),
        lambda: cuda.match_all_sync(FULL, 1),
        lambda: cuda.activemask(),
        lambda: cuda.threadfence(),
        lambda: cuda.threadfence_block(),
        lambda: cuda.threadfence_system(),
        lambda: cuda.nanosleep(1),
        lambda: cuda.syncwarp(1 << cuda.laneid),
    ],
)
def test_what_orders_no_memory(operation):
    def kernel(values, out):
        buffer = cuda.shared.array(32, np.float32)
        lane = cuda.laneid
        buffer[lane] = values[lane]
        operation()
        out[lane] = buffer[lane ^ 1]

    with pytest.raises(RaceError, match=r"buffer\[1\]"), simulator.checks():
        simulator.launch(kernel, 1, 32, (ramp(32), poisoned(32)))


@pytest.mark.parametrize("barrier", ["syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or"])
def test_every_barrier_of_a_block_orders_memory(barrier):
    arguments = () if barrier == "syncthreads" else (1,)

    def kernel(values, out):
        buffer = cuda.shared.array(64, np.float32)
        i = cuda.threadIdx.x
        buffer[i] = values[i]
        getattr(cuda, barrier)(*arguments)
        out[i] = buffer[63 - i]

    out = poisoned(64)
    with simulator.checks():
        simulator.launch(kernel, 1, 64, (ramp(64), out))
    np.testing.assert_array_equal(out, ramp(64)[::-1])


# Views --------------------------------------------------------------------------------------------------------------


@race(
    "values", (("b", 0), ("a", 16)), says=(r"\[16\]", r"\[0\]"), shapes=(48, 32), expected=[*[0.0] * 16, *range(33, 49)]
)
def two_views_of_one_array(values, out):
    i = cuda.threadIdx.x
    front = values[:32]
    middle = values[16:48]
    front[i] = np.float32(0.0)  # [a]
    out[i] = middle[i]  # [b]


@pairs.right
def two_views_with_a_barrier(values, out):
    i = cuda.threadIdx.x
    front = values[:32]
    middle = values[16:48]
    front[i] = np.float32(0.0)
    cuda.syncthreads()
    out[i] = middle[i]


@race(
    "words|halves|dynamic shared memory",
    (("b", 0), ("a", 1)),
    shared_bytes=128,
    arguments=lambda: (poisoned(32, np.int32),),
    expected=7 * np.roll(np.arange(32), -1),
)
def bytes_of_a_neighbour(out):
    words = cuda.shared.array(0, np.int32)
    halves = cuda.shared.array(0, np.int16)
    i = cuda.threadIdx.x
    words[i] = 7 * i  # [a]
    out[i] = halves[(2 * i + 2) % 64]  # [b]


@pairs.right
def bytes_of_a_neighbour_with_a_barrier(out):
    words = cuda.shared.array(0, np.int32)
    halves = cuda.shared.array(0, np.int16)
    i = cuda.threadIdx.x
    words[i] = 7 * i
    cuda.syncthreads()
    out[i] = halves[(2 * i + 2) % 64]


# Blocks, the grid and clusters --------------------------------------------------------------------------------------


# The simulator runs both blocks with the same threads.
@race("scratch[0]", (("a", 0, 0), ("b", 0, 1)), grid=2, block=4, shapes=(8, 8), expected=np.arange(8))
def cells_of_the_same_thread_of_another_block(scratch, out):
    i = cuda.grid(1)
    scratch[i] = i  # [a]
    cuda.threadfence()
    cuda.syncthreads()
    out[i] = scratch[cuda.threadIdx.x]  # [b]


@pairs.right
def cells_of_the_same_thread(scratch, out):
    i = cuda.grid(1)
    scratch[i] = i
    cuda.threadfence()
    cuda.syncthreads()
    out[i] = scratch[i]


@race(
    "values[4]",
    (("a", 0, 0), ("a", 0, 1)),
    grid=3,
    block=4,
    arguments=lambda: (ramp(30, dtype=np.int64),),
    expected=np.arange(2, 32),
)
def stride_of_a_block(values):
    for i in range(cuda.grid(1), values.size, cuda.blockDim.x):
        values[i] += 1  # [a]


@pairs.right
def stride_of_the_grid(values):
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        values[i] += 1


def test_launches_are_in_order():
    values = ramp(32)
    with simulator.checks():
        for launched in (values, values[::-1], values):
            stride_of_the_grid[4, 8](launched)
    np.testing.assert_array_equal(values, RAMP + 3)


@race(
    "out[0, 0]",
    (("a", 0, (0, 0)), ("a", 0, (0, 1))),
    grid=(2, 3),
    block=(2, 1),
    shapes=((4, 3), (4, 3)),
    expected=ramp(4, 3),
)
def columns_of_blocks_above_each_other(values, out):
    x, y = cuda.grid(2)
    out[x, 0] = values[x, y]  # [a]


@pairs.right
def cells_of_blocks_above_each_other(values, out):
    x, y = cuda.grid(2)
    out[x, y] = values[x, y]


@race("values[4]", (("b", 0, 0), ("a", 0, 1)), grid=3, block=4, shapes=(12, 12), expected=np.roll(np.arange(12), -4))
def block_barrier_for_the_grid(values, out):
    i = cuda.grid(1)
    values[i] = i  # [a]
    cuda.syncthreads()
    out[i] = values[(i + 4) % 12]  # [b]


@pairs.right
def grid_barrier_for_the_grid(values, out):
    i = cuda.grid(1)
    values[i] = i
    cuda.cg.this_grid().sync()
    out[i] = values[(i + 4) % 12]


CLUSTER = {"grid": 4, "block": 4, "cluster": 2, "shapes": (16, 16), "expected": ramp(2, 2, 4)[:, ::-1].ravel()}


# Block 0 meets its barrier, then block 1 stores and meets its own, then block 0 reads what block 1 stored.
@race("inbox[0]", (("a", 0, 1), ("b", 0, 0)), **CLUSTER)
def cluster_store_without_the_cluster(values, out):
    inbox = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    simulator.cluster_barrier()
    simulator.cluster_store(inbox, i, 1 - simulator.cluster_rank(), values[cuda.grid(1)])  # [a]
    cuda.syncthreads()
    out[cuda.grid(1)] = inbox[i]  # [b]


@pairs.right
def cluster_store_with_the_cluster(values, out):
    inbox = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    simulator.cluster_barrier()
    simulator.cluster_store(inbox, i, 1 - simulator.cluster_rank(), values[cuda.grid(1)])
    simulator.cluster_barrier()
    out[cuda.grid(1)] = inbox[i]


@race("outbox[0]", (("a", 0, 1), ("b", 0, 0)), **CLUSTER)
def cluster_load_without_the_cluster(values, out):
    outbox = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    simulator.cluster_barrier()
    outbox[i] = values[cuda.grid(1)]  # [a]
    cuda.syncthreads()
    out[cuda.grid(1)] = simulator.cluster_load(outbox, i, 1 - simulator.cluster_rank())  # [b]
    simulator.cluster_barrier()


@pairs.right
def cluster_load_with_the_cluster(values, out):
    outbox = cuda.shared.array(4, np.float32)
    i = cuda.threadIdx.x
    outbox[i] = values[cuda.grid(1)]
    simulator.cluster_barrier()
    out[cuda.grid(1)] = simulator.cluster_load(outbox, i, 1 - simulator.cluster_rank())
    simulator.cluster_barrier()


# Every pair ---------------------------------------------------------------------------------------------------------


test_wrong_kernel, test_right_kernel = pairs.tests()


@pairs.each()
def test_races_switched_off(pair):
    with simulator.checks(races=False), suppress(UninitializedReadError):
        run(pair, pair.wrong)
