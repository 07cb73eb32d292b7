"""Where the checks of launches hold, their options, and the races that they find against those that there are."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from checked_pairs import RAMP, accesses, facts, ramp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import poisoned

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import RaceError, SimulatorError

# Where checks hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"races": 1}, "races"),
        ({"uninitialized": None}, "uninitialized"),
        ({"bounds": "yes"}, "bounds"),
        ({"barriers": 0}, "barriers"),
        ({"allow_same_value_writes": 0.0}, "allow_same_value_writes"),
        ({"compute_capability": "9.0"}, "compute_capability"),
        ({"compute_capability": 9.0}, "compute_capability"),
        ({"compute_capability": (9,)}, "compute_capability"),
        ({"compute_capability": (9, 0, 0)}, "compute_capability"),
        ({"compute_capability": (9.0, 0)}, "compute_capability"),
    ],
)
def test_parameters_of_the_wrong_type(bad, name):
    with pytest.raises(TypeError, match=rf"checks: {name}: expected .*, got "), simulator.checks(**bad):
        pytest.fail("not reached")
    assert not races_are_reported()


def test_options_are_named():
    with pytest.raises(TypeError):
        simulator.checks(True, True, True, True, True)


@cuda.jit
def sum_by_plain_updates(total):
    total[0] += 1


def races_are_reported() -> bool:
    total = np.zeros(1, np.int32)
    try:
        sum_by_plain_updates[1, 32](total)
    except RaceError:
        return True
    assert total[0] == 32
    return False


@cuda.jit
def reversed_in_dynamic_memory(values, out):
    tile = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    cuda.syncthreads()
    out[i] = tile[31 - i]


def shared_memory_is_refused() -> bool:
    try:
        reversed_in_dynamic_memory[1, 32, 0, 96 * 1024](ramp(32), poisoned(32))
    except ValueError:
        return True
    return False


# What is seen with some options and not with others, nor without checks.
switched = pytest.mark.parametrize(
    ("seen", "on", "off"),
    [
        (races_are_reported, {}, {"races": False}),
        (shared_memory_is_refused, {"compute_capability": (7, 5)}, {"compute_capability": (9, 0)}),
    ],
)


@switched
def test_checks_nest(seen, on, off):
    assert not seen()
    with simulator.checks(**on):
        assert seen()
        with simulator.checks(**off):
            assert not seen()
            with simulator.checks(**on):
                assert seen()
            assert not seen()
        with pytest.raises(ZeroDivisionError), simulator.checks(**off):
            raise ZeroDivisionError
        assert seen()
    assert not seen()


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@switched
def test_checks_hold_for_one_thread(seen, on, off):
    # As Python threads start, whatever the interpreter is told to hand on.
    empty = contextvars.Context()
    with simulator.checks(**on):
        assert not in_a_thread(lambda: empty.run(seen))
        assert seen()
        context = contextvars.copy_context()
    assert in_a_thread(lambda: context.run(seen))

    def checked():
        with simulator.checks(**on):
            return seen()

    assert in_a_thread(checked)
    assert not seen()


def test_checks_of_several_threads_at_the_same_time():
    barrier = threading.Barrier(4)
    results = {}

    def work(number):
        barrier.wait()
        for _ in range(5):
            with simulator.checks(races=number % 2 == 0):
                results.setdefault(number, []).append(races_are_reported())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number % 2 == 0] * 5 for number in range(4)}


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_])
@pytest.mark.parametrize("value", [1, np.float64(1.0), np.int16(1)])
def test_same_value_writes(dtype, value):
    def kernel(found):
        found[0] = value

    found = np.zeros(1, dtype)
    with pytest.raises(RaceError), simulator.checks():
        simulator.launch(kernel, 2, 32, (found,))
    found[0] = 0
    with simulator.checks(allow_same_value_writes=True):
        simulator.launch(kernel, 2, 32, (found,))
    assert found[0] == 1


def test_same_value_writes_of_nan_and_in_shared_memory():
    def kernel(out):
        flag = cuda.shared.array(1, np.float32)
        flag[0] = np.float32("nan")
        cuda.syncthreads()
        out[cuda.threadIdx.x] = flag[0]

    out = np.zeros(32, np.float32)
    with simulator.checks(allow_same_value_writes=True):
        simulator.launch(kernel, 1, 32, (out,))
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_different_values_are_a_race_all_the_same(dtype):
    def kernel(found):
        found[0] = 1 + cuda.threadIdx.x // 3

    with pytest.raises(RaceError, match=r"found\[0\]") as caught, simulator.checks(allow_same_value_writes=True):
        simulator.launch(kernel, 1, 32, (np.zeros(1, dtype),))
    assert ((3, 0, 0), (0, 0, 0)) in {access[1:] for access in accesses(facts(caught.value))}


def test_a_value_that_another_thread_reads_is_a_race_all_the_same():
    def kernel(found, out):
        i = cuda.threadIdx.x
        if i < 2:
            found[0] = 1
        else:
            out[i] = found[0]

    with pytest.raises(RaceError, match=r"found\[0\]"), simulator.checks(allow_same_value_writes=True):
        simulator.launch(kernel, 1, 3, (np.zeros(1, np.int32), np.zeros(3, np.int32)))


@cuda.jit
def reversed_in_both_memories(values, out):
    fixed = cuda.shared.array(8192, np.float32)
    tile = cuda.shared.array(0, np.float32)
    i = cuda.threadIdx.x
    fixed[i] = values[i]
    cuda.syncthreads()
    tile[i] = fixed[31 - i]
    out[i] = tile[i]


# 64 KB a block on 7.5, 227 KB on 9.0. 32 KB of the second kernel's are of fixed size.
@pytest.mark.parametrize(
    ("kernel", "most"), [(reversed_in_dynamic_memory, 64 * 1024), (reversed_in_both_memories, 32 * 1024)]
)
def test_shared_memory_over_the_limit_of_a_device(kernel, most):
    def launch(shared_bytes):
        out = poisoned(32)
        kernel[1, 32, 0, shared_bytes](ramp(32), out)
        np.testing.assert_array_equal(out, RAMP[::-1])

    with simulator.checks(compute_capability=(7, 5)):
        launch(most)
        with pytest.raises((ValueError, SimulatorError), match=r"compute capability 7\.5"):
            launch(most + 4)
    with simulator.checks(compute_capability=(9, 0)):
        launch(most + 4)
    with simulator.checks():
        launch(most + 4)
    launch(most + 4)


# The races there are ------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """What a thread (or a block of one thread) did to an element, at which step of its program."""

    thread: int
    step: int
    kind: str
    place: int
    fenced: bool = False
    """An atomic after a fence of its thread."""


# Few elements, so that what is found or not depends on the order of more than two accesses.
kinds = st.sampled_from("rrwaa")
access = st.tuples(kinds, st.just(0))
access_or_fence = st.one_of(st.tuples(kinds, st.integers(0, 1)), st.just(("fence", -1)))


def perform(cells, kind, place):
    if kind == "r":
        _ = cells[place]
    elif kind == "w":
        cells[place] = cuda.threadIdx.x
    else:
        cuda.atomic.add(cells, place, 1)


def has_race(made: list[Event], happens_before: Callable[[Event, Event], bool]) -> bool:
    """Whether two accesses to one element, not two reads or two atomics, are in no order.

    An access comes after every fenced atomic on the element that was made before an atomic that it comes after.
    """
    for position, event in enumerate(made):
        after_atomics = False
        for earlier in reversed(made[:position]):
            if earlier.place != event.place:
                continue
            if earlier.thread == event.thread or happens_before(earlier, event):
                after_atomics |= earlier.kind == "a"
            elif earlier.kind + event.kind not in ("rr", "aa") and not (earlier.fenced and after_atomics):
                return True
    return False


def assert_races_found(kernel, made, happens_before, threads, blocks=1):
    """The checks end a kernel, which appends to `made` what it did, just where there is a race."""

    def launch():
        made.clear()
        simulator.launch(kernel, blocks, threads, (np.zeros(2, np.int32),))

    launch()
    everything = list(made)
    try:
        with simulator.checks():
            launch()
    except RaceError:
        found = True
    else:
        found = False
    assert made == everything[: len(made)]
    assert found == has_race(everything, happens_before)


ACTORS = (0, 1, 32, 64)


@settings(max_examples=200)
@given(st.lists(st.lists(st.lists(access, max_size=3), min_size=4, max_size=4), min_size=1, max_size=3), st.booleans())
def test_races_between_barriers(phases, shared):
    made: list[Event] = []

    def kernel(cells):
        thread = cuda.threadIdx.x
        if shared:
            cells = cuda.shared.array(1, np.int32)
            if thread == 0:
                cells[0] = 0
            cuda.syncthreads()
        for number, phase in enumerate(phases):
            for kind, place in phase[ACTORS.index(thread)] if thread in ACTORS else ():
                perform(cells, kind, place)
                made.append(Event(thread, number, kind, place))
            cuda.syncthreads()

    assert_races_found(kernel, made, lambda earlier, later: earlier.step < later.step, 96)


LANES = 3
round_of_lanes = st.tuples(
    st.lists(st.lists(access, max_size=1), min_size=LANES, max_size=LANES),
    # Lanes of the same number meet in one syncwarp; those of number 0 do not wait.
    st.lists(st.integers(0, 2), min_size=LANES, max_size=LANES),
)


@settings(max_examples=400)
@given(st.lists(round_of_lanes, min_size=1, max_size=6))
# The second of two reads by lane 0 is the one that races.
@example([([[("r", 0)], [], []], [1, 1, 0]), ([[("r", 0)], [("w", 0)], []], [0, 0, 0])])
def test_races_between_masked_syncwarps(rounds):
    """Against the accesses that each lane can know of: its own, and at a syncwarp what each lane of the mask knows."""
    masks = [
        [0 if group == 0 else sum(1 << i for i in range(LANES) if groups[i] == group) for group in groups]
        for _, groups in rounds
    ]
    made: list[Event] = []

    def kernel(cells):
        lane = cuda.threadIdx.x
        for number, (accesses_of_all, _) in enumerate(rounds):
            for kind, place in accesses_of_all[lane]:
                perform(cells, kind, place)
                made.append(Event(lane, number, kind, place))
            if masks[number][lane]:
                cuda.syncwarp(masks[number][lane])

    # known[r][i][j]: how many rounds of lane j happen before what lane i does in round r.
    known = [[[0] * LANES for _ in range(LANES)]]
    for number, masks_of_all in enumerate(masks):
        known.append([list(lane) for lane in known[-1]])
        for lane, mask in enumerate(masks_of_all):
            for other in range(LANES):
                if mask >> other & 1:
                    known[-1][lane] = [max(pair) for pair in zip(known[-1][lane], known[-2][other], strict=True)]
            for other in range(LANES):
                if mask >> other & 1:
                    known[-1][lane][other] = number + 1

    def happens_before(earlier, later):
        return known[later.step][later.thread][earlier.thread] > earlier.step

    assert_races_found(kernel, made, happens_before, LANES)


@settings(max_examples=400)
@given(st.lists(st.lists(access_or_fence, max_size=5), min_size=2, max_size=4))
def test_races_between_blocks(programs):
    """Blocks of one thread, one after another, against everything that each of them can know of.

    An atomic passes on what its thread knew at its last fence; an atomic on the same element learns it.
    """
    made: list[Event] = []

    def kernel(cells):
        block = cuda.blockIdx.x
        fenced = False
        for number, (kind, place) in enumerate(programs[block]):
            if kind == "fence":
                cuda.threadfence()
                fenced = True
            else:
                perform(cells, kind, place)
                made.append(Event(block, number, kind, place, fenced and kind == "a"))

    known: dict[tuple[int, int], set] = {}
    passed_on: dict[int, set] = {}
    for block, program in enumerate(programs):
        so_far: set[tuple[int, int]] = set()
        fenced: set[tuple[int, int]] = set()
        for number, (kind, place) in enumerate(program):
            if kind == "fence":
                fenced = set(so_far)
            elif kind == "a":
                so_far |= passed_on.get(place, set())
                passed_on[place] = passed_on.get(place, set()) | fenced
            known[block, number] = set(so_far)
            so_far.add((block, number))

    def happens_before(earlier, later):
        return (earlier.thread, earlier.step) in known[later.thread, later.step]

    assert_races_found(kernel, made, happens_before, 1, len(programs))
