"""Other orders of blocks, warps and threads, and the search for results that depend on the order."""

from __future__ import annotations

import itertools
import math
import os
import re
import threading

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from support import normal

import burt_numba
from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import (
    DivergenceError,
    OrderError,
    SimulatorError,
    UninitializedReadError,
    launch,
    schedules,
)
from burt_numba.simulator.schedules import Order

FULL = 0xFFFFFFFF
SEEDS = range(6)


def arrivals(grid=1, block=64, seed=None, **options) -> list:
    """(block, thread) of every thread, both numbered x first, in the order in which an atomic counter lets them in."""
    blocks, threads = math.prod(np.atleast_1d(grid)), math.prod(np.atleast_1d(block))
    places = np.full((blocks * threads, 2), -1)

    def kernel(places, counter):
        b, t, grid, block = cuda.blockIdx, cuda.threadIdx, cuda.gridDim, cuda.blockDim
        place = cuda.atomic.add(counter, 0, 1)
        places[place, 0] = b.x + grid.x * (b.y + grid.y * b.z)
        places[place, 1] = t.x + block.x * (t.y + block.y * t.z)

    def run():
        launch(kernel, grid, block, (places, np.zeros(1, np.int64)), **options)

    if seed is None:
        run()
    else:
        with simulator.schedule(seed=seed):
            run()
    return [tuple(map(int, place)) for place in places]


def order_error(kernel, grid, block, args, orders=4, seed=0, **options) -> str:
    with pytest.raises(OrderError) as caught, simulator.explore(orders, seed=seed):
        launch(kernel, grid, block, args, **options)
    return str(caught.value)


def place_of(function, offset: int, text: str) -> str:
    code = function.__code__
    return f"at {code.co_filename}:{code.co_firstlineno + offset}: {text}"


# Orders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "cluster"),
    [(1, 64, 1), (7, 5, 1), ((2, 3, 2), (4, 5, 2), 1), ((8, 2), 40, 4), (2, 1024, 1), (1, 1, 1)],
)
def test_every_thread_runs_once_and_a_seed_names_the_order(grid, block, cluster):
    usual = arrivals(grid, block, cluster=cluster)
    orders = [arrivals(grid, block, seed, cluster=cluster) for seed in SEEDS]
    for seed, order in zip(SEEDS, orders, strict=True):
        assert sorted(order) == sorted(usual)
        assert arrivals(grid, block, seed, cluster=cluster) == order
    if len(usual) > 1:
        assert len({tuple(order) for order in (usual, *orders)}) == 1 + len(SEEDS)


def test_launches_within_one_schedule_have_the_same_order():
    seen = []
    with simulator.schedule(seed=3):
        for _ in range(2):
            order = []
            launch(lambda order=order: order.append(cuda.grid(1)), 3, 40, ())
            seen.append(order)
    assert seen[0] == seen[1] != list(range(120))


def test_blocks_warps_and_lanes_change_places():
    order = arrivals(5, 128, seed=0)
    blocks = [next(group)[0] for _, group in itertools.groupby(order, key=lambda place: place[0])]
    assert sorted(blocks) == list(range(5)) != blocks
    warps, lanes = set(), set()
    for block in range(5):
        threads = [thread for b, thread in order if b == block]
        of_block = [warp for warp, _ in itertools.groupby(thread // 32 for thread in threads)]
        assert sorted(of_block) == list(range(4))
        warps.add(tuple(of_block))
        lanes |= {tuple(thread % 32 for thread in threads if thread // 32 == warp) for warp in range(4)}
    assert len(warps) > 1
    assert len(lanes) == 20


@pytest.mark.parametrize("seed", [-4, 0, 2, 10**30])
def test_an_odd_seed_reverses_the_even_one_before_it(seed):
    assert arrivals((3, 2), 70, seed + 1) == arrivals((3, 2), 70, seed)[::-1]


def test_seeds_of_either_sign_differ():
    assert len({tuple(arrivals(seed=seed)) for seed in range(-6, 6)}) == 12


def test_order_at_a_barrier_changes_from_one_to_the_next():
    order = []

    def kernel():
        for step in range(4):
            order.append((step, cuda.threadIdx.x))
            cuda.syncthreads()

    with simulator.schedule(seed=1):
        launch(kernel, 1, 96, ())
    assert [step for step, _ in order] == [step for step in range(4) for _ in range(96)]
    rounds = [tuple(thread for s, thread in order if s == step) for step in range(4)]
    assert all(sorted(threads) == list(range(96)) for threads in rounds)
    assert len(set(rounds)) == 4


@pytest.mark.parametrize("count", [101, 1024, 2310])
@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_of_a_large_grid_each_run_once(count, seed, monkeypatch):
    monkeypatch.setattr(schedules, "_MOST_SHUFFLED", 100)
    order = list(Order(seed).places(count))
    assert sorted(order) == list(range(count)) != order
    assert order == list(Order(seed ^ 1).places(count))[::-1]


@pytest.mark.parametrize("grid", [2**31 - 1, (2**31 - 1, 65535, 65535)])
def test_a_huge_grid_starts_at_once(grid):
    seen = []

    def kernel():
        seen.append(tuple(cuda.blockIdx))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), simulator.schedule(seed=1):
        launch(kernel, grid, 1, ())
    assert seen[0][0] > 65_536


def test_the_innermost_setting_holds_and_ends_with_its_block():
    usual = arrivals()
    with simulator.schedule(seed=0):
        outer = arrivals()
        with simulator.schedule(seed=2):
            assert arrivals() == arrivals(seed=2) != outer
        with simulator.explore(2) as report:
            launch(lambda: None, 1, 1, ())
            assert arrivals(seed=2) == arrivals(seed=2)
        assert report.launches == 1
        assert arrivals() == outer != usual
    assert arrivals() == usual
    with pytest.raises(ZeroDivisionError), simulator.schedule(seed=0):
        raise ZeroDivisionError
    assert arrivals() == usual


def test_other_host_threads_keep_the_usual_order():
    found = []
    with simulator.schedule(seed=0):
        other = threading.Thread(target=lambda: found.append(arrivals()))
        other.start()
        other.join()
    assert found == [arrivals()]


# Barriers and warp operations in any order ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", [33, 256])
def test_block_sum(threads, seed):
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

    values, sums = normal((3, threads)), np.full(3, np.nan, np.float32)
    usual = sums.copy()
    launch(kernel, 3, threads, (values, usual))
    with simulator.schedule(seed=seed):
        launch(kernel, 3, threads, (values, sums))
    np.testing.assert_array_equal(sums, usual)
    np.testing.assert_allclose(sums, values.sum(1), atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_operations(seed):
    threads = 70
    results: list = [None] * threads

    def kernel():
        i = cuda.threadIdx.x
        lane = cuda.laneid
        mask = 0x0000FFFF if lane < 16 else 0xFFFF0000
        found = []
        for _ in range(3):
            found.append(cuda.shfl_xor_sync(mask, i, 1))
            cuda.syncwarp()
            found.append(cuda.shfl_up_sync(FULL, i, 2))
            found.append(cuda.ballot_sync(FULL, lane % 3 == 0) & FULL)
            found.append(cuda.all_sync(mask, lane < 16))
            found.append(cuda.match_any_sync(FULL, lane // 8) & FULL)
            found.append((cuda.syncthreads_count(i % 2), cuda.syncthreads_or(i == 69), cuda.syncthreads_and(i < 69)))
        if lane < 5:
            found.append(cuda.activemask())
        results[i] = found

    launch(kernel, 1, threads, ())
    usual, results[:] = list(results), [None] * threads
    with simulator.schedule(seed=seed):
        launch(kernel, 1, threads, ())
    assert results == usual


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster_barriers(seed):
    def kernel(out):
        mine = cuda.shared.array(4, np.int32)
        i, rank = cuda.threadIdx.x, simulator.cluster_rank()
        for step in range(3):
            mine[i] = 100 * step + 10 * rank + i
            simulator.cluster_barrier()
            other = (rank + 1) % simulator.cluster_size()
            out[step, cuda.blockIdx.x, i] = simulator.cluster_load(mine, 3 - i, other)
            simulator.cluster_barrier()

    out = np.full((3, 6, 4), -1)
    with simulator.schedule(seed=seed):
        launch(kernel, 6, 4, (out,), cluster=3)
    step, block, i = np.ogrid[:3, :6, :4]
    np.testing.assert_array_equal(out, 100 * step + 10 * ((block + 1) % 3) + 3 - i)


@pytest.mark.parametrize("seed", SEEDS)
def test_grid_barriers(seed):
    def kernel(values, sums):
        i = cuda.grid(1)
        group = cuda.cg.this_grid()
        for step in range(3):
            values[i] = i + step
            group.sync()
            sums[step, i] = values.sum()
            group.sync()

    values, sums = np.zeros(160, np.int64), np.zeros((3, 160), np.int64)
    with simulator.schedule(seed=seed):
        launch(kernel, 4, 40, (values, sums))
    np.testing.assert_array_equal(sums, [[12720 + 160 * step] * 160 for step in range(3)])


@pytest.mark.parametrize("seed", SEEDS)
def test_sleepers_are_not_starved(seed):
    def kernel(flags):
        # Every thread waits for the one after it.
        i = cuda.threadIdx.x
        while i < 99 and flags[i + 1] == 0:
            cuda.nanosleep(10)
        flags[i] = 1

    flags = np.zeros(100, np.int32)
    with simulator.schedule(seed=seed):
        launch(kernel, 1, 100, (flags,))
    assert flags.all()


def test_divergence_is_found_in_any_order():
    def kernel():
        if cuda.threadIdx.x % 3:
            cuda.syncthreads()

    for seed in SEEDS:
        with pytest.raises(DivergenceError, match="exited"), simulator.schedule(seed=seed):
            launch(kernel, 2, 64, ())


# Results that depend on the order -------------------------------------------------------------------------------------


def test_rounding_of_a_float_sum_names_the_atomic():
    def kernel(values, calls, result):
        i = cuda.grid(1)
        cuda.atomic.add(calls, 0, 1)
        cuda.atomic.add(result, 0, values[i])
        cuda.atomic.max(result, 1, values[i])

    values = normal(128)
    calls, result = np.zeros(1, np.int32), np.zeros(3, np.float32)
    result[1] = -np.inf
    message = order_error(kernel, 4, 32, (values, calls, result), name="total")
    lines = message.splitlines()
    assert lines[0] == "kernel total: the result depends on the order of threads"
    usual, other, seed = _parsed(lines[1], "result[0]", "1 of 3")
    add, largest, count = lines[2:]
    changed = "which returned other values, "
    assert add == f"  atomic.add on this element, {changed}" + place_of(
        kernel, 3, "cuda.atomic.add(result, 0, values[i])"
    )
    assert largest == f"  atomic.max on this array, {changed}" + place_of(
        kernel, 4, "cuda.atomic.max(result, 1, values[i])"
    )
    assert count == f"  atomic.add elsewhere, {changed}" + place_of(kernel, 2, "cuda.atomic.add(calls, 0, 1)")
    # Both values are those of the orders named.
    assert usual == str(result[0])
    assert (calls[0], result[1], result[2]) == (128, values.max(), 0)
    again = np.array([0, -np.inf, 0], np.float32)
    with simulator.schedule(seed=seed):
        launch(kernel, 4, 32, (values, calls, again))
    assert other == str(again[0])


def _parsed(line: str, element: str, extent: str) -> tuple[str, str, int]:
    """The two values and the seed of a line of an OrderError."""
    start, middle, end = f"  array {element} is ", " in the usual order, ", " in the order of simulator.schedule(seed="
    assert line.startswith(start)
    assert line.endswith(f"); {extent} elements differ")
    usual, rest = line[len(start) :].split(middle)
    other, rest = rest.split(end)
    return usual, other, int(rest.split(")")[0])


def test_tickets():
    def kernel(counter, tickets):
        tickets[cuda.grid(1)] = cuda.atomic.add(counter, 0, 1)

    counter, tickets = np.zeros(1, np.int32), np.full((1, 64), -1)[0]
    message = order_error(kernel, 2, 32, (counter, tickets))
    assert "array tickets[0] is 0 in the usual order, " in message
    assert (
        "atomic.add elsewhere, which returned other values, "
        + place_of(kernel, 1, "tickets[cuda.grid(1)] = cuda.atomic.add(counter, 0, 1)")
        in message
    )
    np.testing.assert_array_equal(tickets, np.arange(64))
    assert counter[0] == 64


def test_exchange():
    def kernel(cell, previous):
        i = cuda.grid(1)
        previous[i] = cuda.atomic.exch(cell, 0, i)

    cell, previous = np.full(1, -1), np.zeros(8, np.int64)
    lines = order_error(kernel, 8, 1, (cell, previous), seed=1).splitlines()
    assert lines[1].startswith("  array cell[0] is 7 in the usual order, ")
    assert lines[2].startswith("  array previous: ")
    assert lines[3].startswith("  atomic.exch on this element, which returned other values, at ")


@pytest.mark.parametrize("operation", ["cas", "compare_and_swap"])
def test_the_first_to_swap(operation):
    def kernel(cell):
        if operation == "cas":
            cuda.atomic.cas(cell, 0, 0, cuda.grid(1) + 1)
        else:
            cuda.atomic.compare_and_swap(cell, 0, cuda.grid(1) + 1)

    lines = order_error(kernel, 2, 1, (np.zeros(1, np.int64),), orders=3).splitlines()
    assert "array cell[0] is 1 in the usual order, 2 in" in lines[1]
    assert lines[2].startswith(f"  atomic.{operation} on this element, which returned other values, at {__file__}:")


def test_last_writer_wins_is_found_for_every_two_blocks():
    def kernel(out, first, second):
        if cuda.blockIdx.x in (first, second):
            out[1, 2] = cuda.blockIdx.x

    for first, second in itertools.combinations(range(5), 2):
        message = order_error(kernel, 5, 1, (np.zeros((2, 3), np.int16), first, second), orders=3)
        assert f"array out[1, 2] is {second} in the usual order, {first} in " in message
        assert message.endswith(
            "1 of 6 elements differ\n"
            "  no atomic operation has to do with it; simulator.checks() finds accesses that nothing orders"
        )


def test_missing_barrier_that_the_usual_order_hides():
    def kernel(values, out):
        staged = cuda.shared.array(64, np.float32)
        i = cuda.threadIdx.x
        staged[i] = values[i]
        out[i] = staged[i - 1] if i else np.float32(0)

    values = normal(64)
    out = np.full(64, np.nan, np.float32)
    launch(kernel, 1, 64, (values, out))
    np.testing.assert_array_equal(out[1:], values[:-1])
    assert " in the usual order, nan in " in order_error(kernel, 1, 64, (values, out), orders=2)


def test_locked_updates_that_do_not_commute():
    def kernel(lock, value):
        while cuda.atomic.cas(lock, 0, 0, 1):
            cuda.nanosleep(10)
        value[0] = value[0] * 3 + cuda.grid(1)
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)

    message = order_error(kernel, 2, 4, (np.zeros(1, np.int32), np.ones(1, np.int64)))
    assert "array value[0] is " in message
    assert "atomic" in message


def test_values_that_look_alike_are_shown_as_bytes():
    def kernel(out):
        if cuda.threadIdx.x == 0:
            out[0] = 0x7FC00001
        else:
            out[0] = 0x7FC00002

    out = np.zeros(1, np.uint32)
    message = order_error(lambda floats: kernel(floats.view(np.uint32)), 1, 2, (out.view(np.float32),), orders=3)
    assert "array floats[0] is nan (bytes 02 00 c0 7f) in the usual order, nan (bytes 01 00 c0 7f) in" in message


def test_signed_zeros_differ():
    def kernel(out):
        out[()] = np.float64(0.0) * (-1 if cuda.threadIdx.x else 1)

    assert "array out[] is -0.0 in the usual order, 0.0 in" in order_error(kernel, 1, 2, (np.ones(()),), orders=3)


def test_atomics_on_neighbours_are_told_from_those_on_the_array():
    def kernel(left, right):
        i = cuda.threadIdx.x
        cuda.atomic.add(left, i % 2, 1)
        cuda.atomic.max(right, -1, i)
        right[0] = i

    # Columns of one matrix: their memory interleaves.
    matrix = np.zeros((2, 2), np.int32)
    lines = order_error(kernel, 1, 4, (matrix[:, 0], matrix[:, 1]), orders=3).splitlines()
    assert lines[1].startswith("  array right[0] is 3 in the usual order, ")
    assert lines[2].startswith("  atomic.max on this array, which returned other values, ")
    assert lines[3].startswith("  atomic.add elsewhere, which returned other values, ")
    np.testing.assert_array_equal(matrix, [[2, 3], [2, 3]])


def test_an_atomic_through_a_view_of_other_elements_is_on_the_element():
    def kernel(bytes_):
        cuda.atomic.exch(bytes_.view(np.int32), 1, cuda.threadIdx.x)

    lines = order_error(kernel, 1, 2, (np.zeros(16, np.uint8),), orders=3).splitlines()
    assert lines[1].startswith("  array bytes_[4] is 1 in the usual order, 0 in")
    assert lines[2].startswith("  atomic.exch on this element")


def test_one_line_in_a_loop_is_named_once_and_an_atomic_that_changes_nothing_is_not():
    def kernel(out, own):
        i = cuda.threadIdx.x
        cuda.atomic.add(own, i, 1)
        for step in range(3):
            cuda.atomic.exch(out, step, i)

    lines = order_error(kernel, 1, 8, (np.zeros(3, np.int32), np.zeros(8, np.int32)), orders=3).splitlines()
    assert len(lines) == 3
    assert "atomic.exch" in lines[2]


def test_one_line_with_several_atomics_is_named_once_for_the_likeliest():
    def kernel(out, other):
        i = cuda.threadIdx.x
        _ = cuda.atomic.exch(out, 0, i), cuda.atomic.exch(other, 0, i), cuda.atomic.exch(out, 1 + i, 1)

    lines = order_error(kernel, 1, 2, (np.zeros(3, np.int32), np.zeros(1, np.int32)), orders=3).splitlines()
    assert lines[2] == "  array other: 1 of 1 elements differ"
    (line,) = lines[3:]
    assert line.startswith("  atomic.exch on this element, which returned other values, at ")


def test_an_atomic_that_only_one_order_reaches():
    def kernel(cell):
        scratch = cuda.shared.array(1, np.int32)
        if cuda.atomic.exch(cell, 0, cuda.threadIdx.x) == -1 and cuda.threadIdx.x == 0:
            scratch[0] = 0
            cuda.atomic.max(scratch, 0, 1)

    lines = order_error(kernel, 1, 2, (np.full(1, -1, np.int32),), orders=3).splitlines()
    assert lines[3].startswith("  atomic.max elsewhere, which returned other values, at ")


def test_atomics_on_a_reversed_array():
    def kernel(out):
        i = cuda.threadIdx.x
        out[2] = i
        cuda.atomic.add(out, i, 1)

    lines = order_error(kernel, 1, 2, (np.zeros(4, np.int32)[::-1],), orders=3).splitlines()
    assert lines[1].startswith("  array out[2] is 1 in the usual order, 0 in ")
    assert lines[2].startswith("  atomic.add on this array at ")


def test_atomics_of_other_host_threads_are_not_recorded():
    def kernel(out, elsewhere):
        if cuda.threadIdx.x == 0:
            host = threading.Thread(target=cuda.atomic.add, args=(elsewhere, 0, 1))
            host.start()
            host.join()
        out[0] = cuda.threadIdx.x

    elsewhere = np.zeros(1, np.int32)
    message = order_error(lambda out: kernel(out, elsewhere), 1, 2, (np.zeros(1),), orders=3)
    assert "no atomic operation has to do with it" in message
    assert elsewhere[0] >= 2


def test_names_of_arguments():
    def pair(out, *rest):
        last = cuda.threadIdx.x
        rest[1][0][0] = last

    args = (np.zeros(1), np.zeros(1), (np.zeros(1), 5))
    assert "array argument 2[0][0] is 1.0" in order_error(pair, 1, 2, args, orders=3)


# Results that do not --------------------------------------------------------------------------------------------------


def test_right_kernels_pass():
    @cuda.jit
    def histogram(values, counts, largest):
        i = cuda.grid(1)
        if i < values.size:
            cuda.atomic.add(counts, values[i], 1)
            cuda.atomic.max(largest, 0, values[i])

    values = np.random.default_rng(0).integers(0, 10, 150)
    counts, largest = np.zeros(10, np.int64), np.zeros(1, np.int64)
    with simulator.explore(5, seed=-3) as report:
        for _ in range(2):
            histogram[3, 64](values, counts, largest)
    assert (report.launches, report.orders) == (2, 5)
    np.testing.assert_array_equal(counts, 2 * np.bincount(values, minlength=10))
    assert largest[0] == values.max()


@pytest.mark.parametrize("checked", [False, True])
def test_own_functions_give_the_same_bits(checked):
    logits, scores = normal((5, 130)), normal((1, 2, 6, 70))
    logits[1, 3], logits[2] = np.nan, 0.0
    errors = [burt_numba.ErrorBuffer() for _ in range(2)]

    def run(errors):
        return [
            burt_numba.constrained_softmax(logits, errors=errors, validate_output=True),
            burt_numba.attention_softmax(scores, causal=True, causal_offset=64, errors=errors),
        ]

    expected = run(errors[0])
    with simulator.explore(4) as report:
        if checked:
            with simulator.checks():
                found = run(errors[1])
        else:
            found = run(errors[1])
    assert report.launches >= 3
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]
    for buffer in errors:
        buffer.check()
    assert errors[0].counts == errors[1].counts != {}


def test_random_numbers_of_a_kernel_stand_for_one_state_of_memory():
    def kernel(state, out):
        state[cuda.grid(1)] = state[cuda.grid(1)] * 1103515245 + 12345
        out[cuda.grid(1)] = state[cuda.grid(1)]

    state, out = np.arange(40, dtype=np.uint32), np.zeros(40, np.uint32)
    with simulator.explore(4):
        launch(kernel, 2, 20, (state, out))
    np.testing.assert_array_equal(out, np.arange(40, dtype=np.uint32) * np.uint32(1103515245) + np.uint32(12345))


# Memory ---------------------------------------------------------------------------------------------------------------


def test_each_order_starts_from_the_same_memory_which_overlapping_arguments_share():
    def kernel(whole, reversed_, half, record):
        i = cuda.threadIdx.x
        reversed_[i] += whole[15 - i]
        cuda.syncthreads()
        if i < 8:
            half[i] += 1
        record[0].x += 1 if i == 0 else 0
        seen.append(int(whole[0])) if i == 0 else None

    seen: list[int] = []
    memory = np.arange(48, dtype=np.int32)
    whole = memory[:48:3]
    fields = np.zeros(1, [("x", np.int32), ("y", np.float64)]).view(np.recarray)
    with simulator.explore(3) as report:
        launch(kernel, 1, 16, (whole, whole[::-1], memory[:24:3], fields))
    assert report.launches == 1
    expected = np.arange(48)
    expected[::3] *= 2
    expected[:24:3] += 1
    np.testing.assert_array_equal(memory, expected)
    assert fields.x[0] == 1


def test_memory_between_the_elements_of_an_argument_is_left_alone():
    matrix = np.zeros((4, 2), np.int32)

    def kernel(column):
        # Somebody else's, who runs on.
        matrix[0, 1] += 1
        column[cuda.threadIdx.x] += 1

    with simulator.explore(3):
        launch(kernel, 1, 4, (matrix[:, 0],))
    np.testing.assert_array_equal(matrix, [[1, 12], [1, 0], [1, 0], [1, 0]])


def test_memory_is_that_of_the_usual_order_whatever_happens_later():
    def kernel(out, calls):
        out[0] = cuda.threadIdx.x
        cuda.atomic.add(calls, 0, 1)

    out, calls = np.zeros(1, np.int32), np.zeros(1, np.int32)
    order_error(kernel, 1, 8, (out, calls))
    assert (out[0], calls[0]) == (7, 8)

    def failing(out):
        if cuda.threadIdx.x == 0:
            assert out[0] == 0
        out[0] = cuda.threadIdx.x

    out[0] = 0
    with pytest.raises(AssertionError), simulator.explore(3):
        launch(failing, 1, 8, (out,))
    assert out[0] == 7


def test_read_only_and_empty_arguments():
    def kernel(values, nothing, number, out):
        out[cuda.threadIdx.x] = values[cuda.threadIdx.x] + number

    values, out = np.arange(4), np.zeros(4, np.int64)
    values.flags.writeable = False
    with simulator.explore(2):
        launch(kernel, 1, 4, (values, np.empty((0, 3)), 1, out))
    np.testing.assert_array_equal(out, values + 1)


# Errors of a kernel ---------------------------------------------------------------------------------------------------


def notes_and_message(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_an_error_says_in_which_order_it_was_raised():
    def kernel(fails_in_usual):
        order.append(cuda.threadIdx.x)
        if fails_in_usual or order[0] != 0:
            raise ZeroDivisionError("nothing to divide")
        if len(order) == 8:
            order.clear()

    order: list[int] = []
    with pytest.raises(ZeroDivisionError) as caught, simulator.explore(3):
        launch(kernel, 1, 8, (True,))
    assert "in the usual order, one of 3 explored" in notes_and_message(caught.value)
    order.clear()
    with pytest.raises(ZeroDivisionError) as caught, simulator.explore(3, seed=6) as report:
        launch(kernel, 1, 8, (False,))
    text = notes_and_message(caught.value)
    assert re.search(r"in the order of simulator\.schedule\(seed=[67]\), one of 3 explored", text)
    assert "block (0, 0, 0), thread (" in text
    assert report.launches == 1


def test_a_block_that_waits_for_an_earlier_one():
    def kernel(flags):
        while cuda.blockIdx.x and flags[cuda.blockIdx.x - 1] == 0:
            cuda.nanosleep(10)
        flags[cuda.blockIdx.x] = 1

    flags = np.zeros(2, np.int32)
    launch(kernel, 2, 1, (flags,))
    flags[:] = 0
    with pytest.raises(SimulatorError, match="did not happen"), simulator.explore(3):
        launch(kernel, 2, 1, (flags,))


def test_checks_look_at_every_order_from_the_same_knowledge():
    """What nobody had written before the launch counts as such in each order."""

    def kernel(staged, out):
        i = cuda.threadIdx.x
        if i < 2:
            staged[i] = i
        if i == 1:
            out[0] = staged[0]

    out = np.zeros(1, np.int64)
    staged = cuda.device_array(2, np.int64)
    raw = staged if isinstance(staged, np.ndarray) else staged._ary
    with pytest.raises(UninitializedReadError), simulator.checks(races=False), simulator.explore(3) as report:
        launch(kernel, 1, 2, (raw, out))
    assert report.launches == 1
    assert out[0] == 0
    # Written in the usual order.
    np.testing.assert_array_equal(staged.copy_to_host(), [0, 1])


def test_checks_and_orders_find_the_same_kernel_either_way():
    def kernel(out):
        out[0] = cuda.threadIdx.x

    with pytest.raises(simulator.RaceError), simulator.explore(3), simulator.checks():
        launch(kernel, 1, 2, (np.zeros(1),))
    with simulator.checks(races=False):
        assert "array out[0] is 1.0 in the usual order, 0.0 in" in order_error(kernel, 1, 2, (np.zeros(1),), orders=3)


def test_atomics_are_named_in_a_checked_launch():
    def kernel(cell):
        cuda.atomic.exch(cell, 0, cuda.threadIdx.x)

    with simulator.checks():
        message = order_error(kernel, 1, 2, (np.zeros(1, np.int32),), orders=3)
    assert (
        "atomic.exch on this element, which returned other values, "
        + place_of(kernel, 1, "cuda.atomic.exch(cell, 0, cuda.threadIdx.x)")
        in message
    )


# Arguments of schedule and explore ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1.0, "1", True])
def test_seeds_are_integers(seed):
    with pytest.raises(TypeError, match=r"schedule: seed: expected an integer, got"), simulator.schedule(seed):
        pass
    with pytest.raises(TypeError, match=r"explore: seed: expected an integer, got"), simulator.explore(2, seed=seed):
        pass


def test_numpy_integers_are_seeds():
    assert arrivals(seed=np.int64(5)) == arrivals(seed=5)


def test_a_seed_is_required():
    with pytest.raises(TypeError):
        simulator.schedule()
    with pytest.raises(TypeError):
        simulator.explore()


@pytest.mark.parametrize("orders", [2.0, None, "3", True])
def test_orders_are_an_integer(orders):
    with pytest.raises(TypeError, match=r"explore: n: expected an integer, got"), simulator.explore(orders):
        pass


@pytest.mark.parametrize("orders", [1, 0, -2])
def test_at_least_two_orders(orders):
    message = f"explore: n: expected at least 2 orders, got {orders}"
    with pytest.raises(ValueError, match=message), simulator.explore(orders):
        pass
