"""Many host threads in one process: every result is right, and no event is lost or told twice."""

import warnings

import numpy as np
import pytest
from support import ON_GPU, assert_rows_close, check_constrained, normal, run_threads, to_host, to_target

import burt_numba
from burt_numba import BurtError, BurtWarning, ErrorBuffer, reference
from burt_numba.host import memory

THREADS = 8
ROUNDS = 10 if ON_GPU else 2
CALLS = 300 if ON_GPU else 4


def columns_of(number):
    """A row length of the thread's own: groups of lanes, blocks, and on the GPU clusters and streamed rows too."""
    lengths = [5, 16, 33, 70, 100, 130, 200, 301]
    return [*lengths[:4], 1030, 5000, 50_001, 300_000][number] if ON_GPU else lengths[number]


@pytest.mark.parametrize("on_host", [False, True])
def test_every_result_is_right(on_host):
    """Threads share kernels, prepared calls and one argument block a launch; none may see the other's."""

    def work(number):
        columns = columns_of(number)
        dtype = (np.float32, np.float16)[number % 2]
        for turn in range(ROUNDS):
            scores = normal((1, 2, 2 + turn % 3, columns), dtype=dtype, seed=100 * number + turn)
            array = scores if on_host else to_target(scores)
            weights = to_host(burt_numba.attention_softmax(array, None, True, causal_offset=columns // 2))
            expected = reference.attention_softmax(scores, None, True, causal_offset=columns // 2)
            assert_rows_close(weights, expected.probabilities)
            # Each thread's own bound, which is high enough for no search: nothing is left to chance in T.
            plain = to_host(burt_numba.constrained_softmax(array, 20.0 + number))
            assert_rows_close(plain, reference.constrained_softmax(scores, 20.0 + number).probabilities)
            check_constrained(scores[0, 0], 0.1 * (number + 1))

    run_threads(work, THREADS)


def test_one_shape_with_other_numbers():
    """All threads launch the very same prepared call, which differs in pointers and in the bound alone."""
    logits = normal((4, 60))
    wanted = [to_host(burt_numba.constrained_softmax(to_target(logits), 0.1 + 0.2 * n)) for n in range(THREADS)]
    assert len({out.tobytes() for out in wanted}) == THREADS

    def work(number):
        array = to_target(logits)
        for _ in range(CALLS):
            out = burt_numba.constrained_softmax(array, 0.1 + 0.2 * number)
            assert to_host(out).tobytes() == wanted[number].tobytes()

    run_threads(work, THREADS)


def test_no_event_is_lost():
    """Each call also reports what the others left, so every event must be told exactly once."""

    def work(number):
        logits = normal((3, 10), seed=number)
        logits.flat[: number + 1] = np.nan
        array = to_target(logits)
        for _ in range(CALLS):
            burt_numba.constrained_softmax(array)
            if number == 0:
                burt_numba.check()

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        run_threads(work, THREADS)
        burt_numba.check()
    reports = [entry.message for entry in record]
    assert all(isinstance(report, BurtWarning) and set(report.counts) == {1} for report in reports)
    assert sum(report.counts[BurtError.NAN_INPUT] for report in reports) == CALLS * sum(range(1, THREADS + 1))


def test_no_event_is_lost_in_a_shared_buffer():
    errors = ErrorBuffer()

    def work(number):
        logits = normal((3, 10), seed=number)
        logits.flat[[number, 20 + number]] = np.nan, np.inf
        array, scores = to_target(logits), to_target(logits.reshape(1, 1, 3, 10))
        for _ in range(CALLS):
            burt_numba.constrained_softmax(array, errors=errors)
            burt_numba.attention_softmax(scores, errors=errors)

    run_threads(work, THREADS)
    assert errors.check() is BurtError.NAN_INPUT
    assert (errors.counts, errors.first_index) == ({1: 2 * THREADS * CALLS, 2: 2 * THREADS * CALLS}, 0)


def test_default_streams_of_threads_have_a_workspace_each(monkeypatch):
    """One handle, 2, names the default stream of whichever thread asks: their kernels may run at the same time."""
    monkeypatch.setattr(memory, "SIMULATED", False)
    monkeypatch.setattr(memory, "_capture", lambda stream: 0)
    monkeypatch.setattr(memory, "_workspaces", {})
    found = {stream: [None] * THREADS for stream in (2, 7)}

    def work(number):
        for stream, spaces in found.items():
            spaces[number] = memory.workspace(0, stream)

    run_threads(work, THREADS)
    assert len(set(map(id, found[2]))) == THREADS
    assert len(set(map(id, found[7]))) == 1
