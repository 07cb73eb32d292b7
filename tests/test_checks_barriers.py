"""Threads that do not meet, at barriers of a block, a cluster or the grid and in warp operations."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from checked_pairs import RAMP, Pairs, ramp, run

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import DivergenceError, SimulatorError

FULL = 0xFFFFFFFF
SWAPPED = RAMP[np.arange(32) ^ 1]
HALF_SWAPPED = [*SWAPPED[:16], *RAMP[16:]]
pairs = Pairs()
divergence = partial(pairs.wrong, DivergenceError)


# Barriers of a block ------------------------------------------------------------------------------------------------


@divergence(
    lines="a",
    says=("threads 0-39: waiting in syncthreads at", "threads 40-63: exited"),
    block=64,
    shapes=(40, 40),
    expected=ramp(40)[::-1],
)
def barrier_after_an_early_return(values, out):
    partial = cuda.shared.array(64, np.float32)
    i = cuda.threadIdx.x
    if i >= values.size:
        return
    partial[i] = values[i]
    cuda.syncthreads()  # [a]
    out[i] = partial[values.size - 1 - i]


@pairs.right
def barrier_without_an_early_return(values, out):
    partial = cuda.shared.array(64, np.float32)
    i = cuda.threadIdx.x
    if i < values.size:
        partial[i] = values[i]
    cuda.syncthreads()
    if i < values.size:
        out[i] = partial[values.size - 1 - i]


@divergence(
    lines="ab", says=("in syncthreads",), block=64, shapes=(64, 64), expected=[*range(-64, -32), *range(32, 0, -1)]
)
def barrier_in_either_branch(values, out):
    partial = cuda.shared.array(64, np.float32)
    i = cuda.threadIdx.x
    if i < 32:
        partial[i] = values[i]
        cuda.syncthreads()  # [a]
    else:
        partial[i] = -values[i]
        cuda.syncthreads()  # [b]
    out[i] = partial[63 - i]


@pairs.right
def barrier_after_either_branch(values, out):
    partial = cuda.shared.array(64, np.float32)
    i = cuda.threadIdx.x
    if i < 32:
        partial[i] = values[i]
    else:
        partial[i] = -values[i]
    cuda.syncthreads()
    out[i] = partial[63 - i]


@cuda.jit(device=True)
def meet():
    cuda.syncthreads()  # [c]


@divergence(
    lines="abc",
    says=(r"thread \(0, 0, 0\)", r"thread \(32, 0, 0\)"),
    functions=(meet,),
    block=64,
    shapes=(64, 64),
    expected=[*range(1, 33), *range(-33, -65, -1)],
)
def barrier_called_from_two_lines(values, out):
    i = cuda.threadIdx.x
    if i < 32:
        meet()  # [a]
        out[i] = values[i]
    else:
        meet()  # [b]
        out[i] = -values[i]


@pairs.right
def barrier_called_from_one_line(values, out):
    i = cuda.threadIdx.x
    meet()
    if i < 32:
        out[i] = values[i]
    else:
        out[i] = -values[i]


# Warp operations ----------------------------------------------------------------------------------------------------


@divergence(
    lines="a",
    says=("threads 0-15: waiting in shfl_xor_sync with mask 0xffffffff at", "threads 16-31: exited"),
    expected=HALF_SWAPPED,
)
def shuffle_without_half_its_lanes(values, out):
    lane = cuda.threadIdx.x
    out[lane] = values[lane]
    if lane < 16:
        out[lane] = cuda.shfl_xor_sync(FULL, values[lane], 1)  # [a]


@pairs.right
def shuffle_of_half_the_lanes(values, out):
    lane = cuda.threadIdx.x
    out[lane] = values[lane]
    if lane < 16:
        out[lane] = cuda.shfl_xor_sync(0x0000FFFF, values[lane], 1)


@divergence(
    lines="ab",
    says=("shfl_xor_sync", r"thread \(0, 0, 0\)", r"thread \(16, 0, 0\)"),
    expected=[*range(17, 33), *range(-1, -17, -1)],
)
def shuffle_on_two_lines(values, out):
    lane = cuda.threadIdx.x
    if lane < 16:
        out[lane] = cuda.shfl_xor_sync(FULL, values[lane], 16)  # [a]
    else:
        out[lane] = -cuda.shfl_xor_sync(FULL, values[lane], 16)  # [b]


@pairs.right
def shuffle_on_one_line(values, out):
    lane = cuda.threadIdx.x
    other = cuda.shfl_xor_sync(FULL, values[lane], 16)
    if lane < 16:
        out[lane] = other
    else:
        out[lane] = -other


@divergence(
    lines="a",
    says=("threads 0-15: exited", "threads 16-31: waiting in syncwarp with mask 0xffffffff at"),
    expected=RAMP,
)
def masks_that_disagree(values, out):
    lane = cuda.threadIdx.x
    mask = 0x0000FFFF if lane < 16 else FULL
    cuda.syncwarp(mask)  # [a]
    out[lane] = values[lane]


@pairs.right
def masks_that_agree(values, out):
    lane = cuda.threadIdx.x
    mask = 0x0000FFFF if lane < 16 else 0xFFFF0000
    cuda.syncwarp(mask)
    out[lane] = values[lane]


# Undefined, but nobody waits: no DivergenceError.
@pairs.wrong(SimulatorError, says=("shfl_xor_sync: lane 16 is not in its own mask 0x0000ffff",), expected=SWAPPED)
def lanes_outside_their_mask(values, out):
    lane = cuda.threadIdx.x
    out[lane] = cuda.shfl_xor_sync(0x0000FFFF, values[lane], 1)


@pairs.right
def lanes_inside_their_mask(values, out):
    lane = cuda.threadIdx.x
    out[lane] = cuda.shfl_xor_sync(FULL, values[lane], 1)


@pairs.wrong(
    SimulatorError,
    says=("shfl_xor_sync: lane 0 reads from lane 16, which is not in the mask 0x0000ffff",),
    expected=HALF_SWAPPED,
    right=shuffle_of_half_the_lanes,
)
def lane_that_reads_outside_the_mask(values, out):
    lane = cuda.threadIdx.x
    out[lane] = values[lane]
    if lane < 16:
        out[lane] = cuda.shfl_xor_sync(0x0000FFFF, values[lane], 16)


# The grid and clusters ----------------------------------------------------------------------------------------------


@divergence(
    lines="a",
    says=(r"block \(0, 0, 0\)", r"block \(2, 0, 0\)", "1 of the 3 blocks of the grid have exited"),
    grid=3,
    block=4,
    shapes=(12, 12),
    expected=ramp(12),
)
def grid_barrier_that_a_block_misses(values, out):
    i = cuda.grid(1)
    if cuda.blockIdx.x != 1:
        cuda.cg.this_grid().sync()  # [a]
    out[i] = values[i]


@pairs.right
def grid_barrier_of_every_block(values, out):
    i = cuda.grid(1)
    cuda.cg.this_grid().sync()
    out[i] = values[i]


@divergence(
    lines="a",
    says=(r"block \(0, 0, 0\)", "threads 0-3: waiting in cluster_barrier at"),
    grid=2,
    block=4,
    cluster=2,
    shapes=(8, 8),
    expected=ramp(8),
)
def cluster_barrier_that_a_block_misses(values, out):
    i = cuda.grid(1)
    if simulator.cluster_rank() == 0:
        simulator.cluster_barrier()  # [a]
    out[i] = values[i]


@pairs.right
def cluster_barrier_of_every_block(values, out):
    i = cuda.grid(1)
    simulator.cluster_barrier()
    out[i] = values[i]


# Every pair ---------------------------------------------------------------------------------------------------------


test_wrong_kernel, test_right_kernel = pairs.tests()


@pytest.mark.parametrize("wrong", [shuffle_on_two_lines, barrier_called_from_two_lines])
def test_barriers_switched_off(wrong):
    pair = next(pair for pair in pairs if pair.wrong is wrong)
    with simulator.checks(barriers=False):
        np.testing.assert_array_equal(run(pair, wrong), pair.expected)


@pytest.mark.parametrize("wrong", [barrier_after_an_early_return, barrier_in_either_branch])
def test_threads_that_cannot_go_on_are_an_error_in_any_case(wrong):
    pair = next(pair for pair in pairs if pair.wrong is wrong)
    with pytest.raises(DivergenceError), simulator.checks(barriers=False):
        run(pair, wrong)
