"""The block simulator: positions, barriers, divergence, exceptions, clusters and launch limits."""

from __future__ import annotations

import gc
import math
import os
import warnings
import weakref

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from hypothesis import given, settings
from hypothesis import strategies as st

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import DivergenceError, SimulatorError, launch
from burt_numba.simulator.threads import Thread

pytestmark = pytest.mark.no_cuda_checks("kernels are wrong on purpose, and show what is seen without the checks")

FULL = 0xFFFFFFFF


def per_lane(function, threads: int = 32) -> list:
    """What ``function(lane)`` returns in each thread of one block."""
    results: list = [None] * threads

    def kernel():
        results[cuda.threadIdx.x] = function(cuda.threadIdx.x)

    launch(kernel, 1, threads, ())
    return results


def notes_and_message(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def divergence(kernel, grid=1, block=64, args=(), **options) -> str:
    with pytest.raises(DivergenceError) as caught:
        launch(kernel, grid, block, args, **options)
    return str(caught.value)


def line_of(function, offset: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("grid", "block"), [(1, 1), (3, 5), ((2, 3), (4, 5)), ((2, 1, 3), (3, 2, 2)), ([2], (33,)), (2, 1024)]
)
def test_every_thread_of_the_grid_runs_once_in_order(grid, block):
    seen = []

    def kernel():
        b, t = cuda.blockIdx, cuda.threadIdx
        assert cuda.grid(3) == tuple(i * d + j for i, d, j in zip(b, cuda.blockDim, t, strict=True))
        assert cuda.grid(2) == cuda.grid(3)[:2]
        assert cuda.grid(1) == cuda.grid(3)[0]
        assert cuda.gridsize(3) == tuple(g * d for g, d in zip(cuda.gridDim, cuda.blockDim, strict=True))
        assert cuda.gridsize(2) == cuda.gridsize(3)[:2]
        assert cuda.gridsize(1) == cuda.gridsize(3)[0]
        linear = t.x + cuda.blockDim.x * (t.y + cuda.blockDim.y * t.z)
        assert cuda.laneid == linear % cuda.warpsize
        seen.append((b.z, b.y, b.x, t.z, t.y, t.x))

    launch(kernel, grid, block, ())
    assert len(seen) == len(set(seen)) == math.prod(np.atleast_1d(grid)) * math.prod(np.atleast_1d(block))
    assert seen == sorted(seen)


def test_grid_refuses_four_dimensions():
    with pytest.raises(ValueError, match=r"cuda\.grid: expected 1, 2 or 3 dimensions, got 4"):
        launch(lambda: cuda.grid(4), 1, 1, ())


def test_host_code_gets_stubs():
    assert repr(cuda.threadIdx) == "<cuda.threadIdx, outside a kernel>"
    with pytest.raises(SimulatorError, match=r"cuda\.blockIdx: read outside a kernel"):
        _ = cuda.blockIdx.x
    with pytest.raises(SimulatorError, match=r"cuda\.laneid: read outside a kernel"):
        range(cuda.laneid)
    assert all(hasattr(cuda, name) for name in ("blockDim", "gridDim"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: cuda.syncthreads(),
        lambda: cuda.syncthreads_or(1),
        lambda: cuda.shfl_sync(FULL, 1, 0),
        lambda: cuda.activemask(),
        lambda: cuda.shared.array(1, np.float32),
        lambda: cuda.grid(1),
        lambda: cuda.gridsize(1),
        lambda: simulator.cluster_rank(),
        lambda: cuda.cg.this_grid().sync(),
    ],
)
def test_device_functions_refuse_host_code(call):
    with pytest.raises(SimulatorError, match="outside a kernel"):
        call()


@pytest.mark.parametrize("threads", [1, 2, 31, 32, 33, 256, 1000, 1024])
def test_block_sum_by_tree(threads):
    size = 1 << (threads - 1).bit_length()

    def kernel(values, sums):
        partial = cuda.shared.array(size, np.float32)
        i = cuda.threadIdx.x
        partial[i] = values[cuda.blockIdx.x, i]
        if i + threads < size:
            partial[i + threads] = 0
        cuda.syncthreads()
        step = size // 2
        while step:
            if i < step:
                partial[i] += partial[i + step]
            cuda.syncthreads()
            step //= 2
        if i == 0:
            sums[cuda.blockIdx.x] = partial[0]

    values = np.random.default_rng(1).integers(-50, 50, (3, threads)).astype(np.float32)
    sums = np.full(3, np.nan, np.float32)
    launch(kernel, 3, threads, (values, sums))
    np.testing.assert_array_equal(sums, values.sum(1))


def test_barrier_orders_the_threads():
    order = []

    def kernel():
        for step in range(3):
            order.append((step, cuda.threadIdx.x))
            cuda.syncthreads()

    launch(kernel, 1, 40, ())
    assert order == [(step, i) for step in range(3) for i in range(40)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_voting_barriers(votes):
    def ask(i):
        return [
            (cuda.syncthreads_count(vote), cuda.syncthreads_and(vote), cuda.syncthreads_or(vote))
            for vote in (votes[i], not votes[i])
        ]

    against = [not vote for vote in votes]
    expected = [(sum(v), int(all(v)), int(any(v))) for v in (votes, against)]
    assert per_lane(ask, len(votes)) == [expected] * len(votes)


def test_grid_barrier_runs_all_blocks_together():
    def kernel(values, sums):
        i = cuda.grid(1)
        group = cuda.cg.this_grid()
        for step in range(3):
            values[i] = i + step
            group.sync()
            total = 0
            for j in range(cuda.gridsize(1)):
                total += values[j]
            sums[step, i] = total
            group.sync()

    values, sums = np.zeros(12, np.int64), np.zeros((3, 12), np.int64)
    launch(kernel, 3, 4, (values, sums))
    np.testing.assert_array_equal(sums, [[66 + 12 * step] * 12 for step in range(3)])


def test_grid_barrier_that_a_block_misses():
    def kernel():
        if cuda.blockIdx.x != 1:
            cuda.cg.this_grid().sync()

    with pytest.raises(DivergenceError, match="1 of the 3 blocks of the grid have exited") as caught:
        launch(kernel, 3, 2, ())
    assert "block (2, 0, 0)" in str(caught.value)


def test_exited_threads_are_named():
    def kernel():
        if cuda.threadIdx.x in (5, 6, 7, 40):
            return
        cuda.syncthreads()

    message = divergence(kernel, grid=2)
    assert "kernel test_exited_threads_are_named.<locals>.kernel" in message
    assert "block (0, 0, 0)" in message
    assert "threads 5-7, 40: exited" in message
    place = line_of(kernel, 3)
    assert f"threads 0-4, 8-39, 41-63: waiting in syncthreads at {place}: cuda.syncthreads()" in message


def test_barriers_on_different_lines():
    def kernel():
        if cuda.threadIdx.x < 32:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    message = divergence(kernel)
    assert f"threads 0-31: waiting in syncthreads at {line_of(kernel, 2)}" in message
    assert f"threads 32-63: waiting in syncthreads at {line_of(kernel, 4)}" in message


def test_different_barriers_on_one_line():
    def kernel():
        cuda.syncthreads() if cuda.threadIdx.x else cuda.syncthreads_or(0)

    message = divergence(kernel)
    assert "thread 0: waiting in syncthreads_or at" in message
    assert "threads 1-63: waiting in syncthreads at" in message


def test_a_barrier_on_one_line_may_be_two_instructions():
    def kernel():
        try:
            if cuda.threadIdx.x == 0:
                return
        finally:
            cuda.syncthreads()

    launch(kernel, 1, 4, ())


def test_barrier_against_collective_in_a_device_function():
    def step():
        cuda.shfl_sync(0xFFFF, 1, 0)

    def kernel():
        if cuda.threadIdx.x == 3:
            cuda.syncthreads()
        elif cuda.threadIdx.x < 16:
            step()

    message = divergence(kernel)
    called_from = f"called from {line_of(kernel, 4)}"
    assert f"threads 0-2, 4-15: waiting in shfl_sync with mask 0x0000ffff at {line_of(step, 1)}" in message
    assert called_from in message
    assert "thread 3: waiting in syncthreads" in message
    assert "threads 16-63: exited" in message


def test_collectives_of_different_kind_or_mask():
    def kinds():
        cuda.any_sync(FULL, 1) if cuda.laneid else cuda.all_sync(FULL, 1)

    def masks():
        cuda.syncwarp(FULL if cuda.laneid else 3)

    assert "thread 0: waiting in all_sync with mask 0xffffffff" in divergence(kinds, block=32)
    assert "thread 0: waiting in syncwarp with mask 0x00000003" in divergence(masks, block=32)


def test_divergence_in_a_second_block_with_two_dimensions():
    def kernel():
        if cuda.blockIdx.y == 1 and cuda.threadIdx.y == 1:
            return
        cuda.syncthreads()

    message = divergence(kernel, grid=(1, 2), block=(4, 2), name="second")
    assert "kernel second: " in message
    assert "block (0, 1, 0)" in message
    assert "x first in a block of (4, 2, 1)" in message
    assert "threads 4-7: exited" in message


def test_exception_keeps_its_type_and_says_where():
    def kernel(values):
        cuda.syncthreads()
        if cuda.blockIdx.x == 1 and cuda.threadIdx.y == 1:
            raise KeyError("missing")
        cuda.syncthreads()

    with pytest.raises(KeyError, match="missing") as caught:
        launch(kernel, 3, (4, 2), (np.zeros(1),), name="raiser")
    assert "kernel raiser, block (1, 0, 0), thread (0, 1, 0)" in notes_and_message(caught.value)


def test_threads_end_after_an_error():
    class Witness:
        pass

    alive = []
    ended = []

    def kernel():
        witness = Witness()
        alive.append(weakref.ref(witness))
        try:
            cuda.syncthreads()
            if cuda.threadIdx.x == 31:
                raise ZeroDivisionError
            cuda.syncwarp()
        finally:
            ended.append(cuda.threadIdx.x)

    with pytest.raises(ZeroDivisionError):
        launch(kernel, 1, 64, ())
    gc.collect()
    assert sorted(ended) == list(range(64))
    assert sum(ref() is not None for ref in alive) == 0


def threads_alive():
    """The identities of all; an error that something else still holds may keep those of its launch."""
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if isinstance(thing, Thread)}


def test_threads_that_wait_while_they_are_ended():
    ended, before = [], threads_alive()

    def kernel():
        try:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                raise ZeroDivisionError
            cuda.syncthreads()
        finally:
            ended.append(cuda.threadIdx.x)
            cuda.syncthreads()
            ended.append("not reached")

    with pytest.raises(DivergenceError):
        launch(kernel, 1, 4, ())
    assert sorted(ended) == [0, 1, 2, 3]
    assert threads_alive() <= before


def test_a_huge_grid_starts_at_once():
    def kernel():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(kernel, 2**31 - 1, 1, ())


def test_no_memory_is_kept_from_launch_to_launch():
    before = threads_alive()
    launch(lambda: cuda.syncthreads(), 2, 64, ())
    assert threads_alive() <= before


def test_a_kernel_must_return_nothing():
    with pytest.raises(TypeError, match="returned a value"):
        launch(lambda: 1, 1, 1, ())


def test_nested_launch_is_an_error():
    def kernel():
        launch(lambda: None, 1, 1, ())

    with pytest.raises(SimulatorError, match="from inside a kernel"):
        launch(kernel, 1, 1, ())


def test_numpy_warnings_stay_quiet():
    def kernel(out):
        cuda.syncthreads()
        out[0] = np.float32(3e38) * np.float32(10) - np.float32(1) / out[1]
        out[1] = np.float32(np.int32(2**31 - 1) + np.int32(1))

    out = np.zeros(2, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(kernel, 1, 1, (out,))
    assert np.isnan(out[0])


def test_deep_calls_in_many_threads():
    def deep(n):
        if n == 0:
            cuda.syncthreads()
        else:
            deep(n - 1)

    launch(lambda: deep(200), 1, 1024, ())


def test_cluster_exchange():
    def kernel(values, out):
        inbox = cuda.shared.array(4, np.float32)
        rank, size = simulator.cluster_rank(), simulator.cluster_size()
        i = cuda.threadIdx.x
        # The next block may not have reached its own array yet.
        simulator.cluster_store(inbox, i, (rank + 1) % size, values[cuda.grid(1)])
        simulator.cluster_barrier()
        out[cuda.grid(1)] = inbox[i] + 1000 * simulator.cluster_load(inbox, i, rank)
        simulator.cluster_barrier()

    values, out = np.arange(32, dtype=np.float32), np.full(32, np.nan, np.float32)
    launch(kernel, 8, 4, (values, out), cluster=4)
    sent = values.reshape(2, 4, 4)[:, [3, 0, 1, 2]].reshape(-1)
    np.testing.assert_array_equal(out, 1001 * sent)


def test_cluster_with_dynamic_memory_and_views():
    def kernel(out):
        inbox = cuda.shared.array(0, np.int32)
        simulator.cluster_store(inbox, 1, 0, 7)
        simulator.cluster_barrier()
        out[cuda.blockIdx.x] = simulator.cluster_load(inbox, 1, 0)
        simulator.cluster_store(inbox[1:], 0, 0, 1)

    out = np.zeros(2, np.int32)
    with pytest.raises(SimulatorError, match="not a view"):
        launch(kernel, 2, 1, (out,), cluster=2, shared_bytes=8)
    assert out[0] == 7


def test_cluster_rank_is_checked():
    def kernel():
        simulator.cluster_load(cuda.shared.array(1, np.int32), 0, 2)

    with pytest.raises(SimulatorError, match="cluster_load: rank: expected 0 to 1, got 2"):
        launch(kernel, 2, 1, (), cluster=2)


def test_cluster_barrier_that_a_block_misses():
    def kernel():
        if cuda.blockIdx.x % 2:
            simulator.cluster_barrier()

    message = divergence(kernel, grid=4, block=2, cluster=2)
    assert "block (1, 0, 0)" in message and "waiting in cluster_barrier" in message


def test_a_launch_without_clusters_has_clusters_of_one():
    def kernel():
        assert (simulator.cluster_rank(), simulator.cluster_size()) == (0, 1)
        simulator.cluster_barrier()

    launch(kernel, 2, 3, ())


@pytest.mark.parametrize(
    ("grid", "block", "options", "message"),
    [
        (0, 1, {}, r"grid\.x: expected 1 to 2147483647, got 0"),
        (1, 0, {}, r"block\.x: expected 1 to 1024, got 0"),
        ((1, 0), 1, {}, r"grid\.y"),
        ((1, 65536), 1, {}, r"grid\.y: expected 1 to 65535, got 65536"),
        ((1, 1, 65536), 1, {}, r"grid\.z"),
        (2**31, 1, {}, r"grid\.x"),
        (1, 1025, {}, r"block\.x"),
        (1, (32, 33), {}, "at most 1024 threads, got 1056"),
        (1, (1, 1, 65), {}, r"block\.z: expected 1 to 64, got 65"),
        (1, 1, {"shared_bytes": 232449}, r"shared_bytes: expected 0 to 232448 on a device of .* 9\.0, got 232449"),
        (1, 1, {"shared_bytes": -1}, "shared_bytes"),
        (3, 1, {"cluster": 2}, r"grid\.x must be a multiple of 2, got 3"),
        (1, 1, {"cluster": 0}, "cluster: expected 1 to 16 blocks, got 0"),
        ((1, 1, 1, 1), 1, {}, "grid: expected 1 to 3 extents"),
    ],
)
def test_launch_limits(grid, block, options, message):
    with pytest.raises(ValueError, match=message):
        launch(lambda: None, grid, block, (), **options)


@pytest.mark.parametrize("grid", [1.0, "1", (1, None), True])
def test_launch_extents_are_integers(grid):
    with pytest.raises(TypeError, match="grid: expected integers"):
        launch(lambda: None, grid, 1, ())
