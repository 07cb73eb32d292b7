"""Checked launches as they are used: whatever the arguments, from any process, with what NumPy has."""

import os
import subprocess
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import OutOfBoundsError, RaceError, UninitializedReadError
from burt_numba.simulator.checking import Checks, checks_everywhere


@cuda.jit
def add_one(pair):
    pair[0][0] += 1


class Named(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize("kind", [tuple, Named._make])
@pytest.mark.parametrize("move", [np.asarray, cuda.to_device])
def test_arrays_in_tuples(kind, move):
    arrays = kind([move(np.zeros(4, np.float32)), move(np.zeros(4, np.float32))])
    with pytest.raises(RaceError, match=r"pair\[0\]\[0\]"), simulator.checks():
        add_one[1, 4](arrays)
    with simulator.checks():
        add_one[1, 1](arrays)
    with simulator.explore(3):
        add_one[1, 1](arrays)
    assert np.asarray(arrays[0].copy_to_host() if hasattr(arrays[0], "copy_to_host") else arrays[0])[0] >= 2


def test_array_of_a_subclass(tmp_path):
    @cuda.jit
    def same_element(values):
        values[0] = cuda.threadIdx.x

    values = np.memmap(tmp_path / "values", np.int32, "w+", shape=(4,))
    with pytest.raises(RaceError, match=r"values\[0\]"), simulator.checks():
        same_element[1, 4](values)


def test_names_of_further_arguments_and_of_closures():
    @cuda.jit
    def kernel(*arrays):
        i = cuda.threadIdx.x
        arrays[1][0] = i

    with pytest.raises(RaceError, match=r"array argument 1\[0\]"), simulator.checks():
        kernel[1, 4](np.zeros(4), np.zeros(4))


RECORD = np.dtype([("a", np.int32), ("b", np.float32)])


def test_records_are_left_alone():
    @cuda.jit
    def fill(records, out):
        mine = cuda.shared.array(8, RECORD)
        own = cuda.local.array(2, RECORD)
        i = cuda.threadIdx.x
        mine[i]["a"] = i
        own[0]["b"] = 0.5
        records[i].a = mine[i]["a"]
        out[i] = own[0]["b"]

    records, out = cuda.device_array(8, RECORD), np.zeros(8, np.float32)
    with simulator.checks():
        fill[1, 8](records, out)
        assert records.copy_to_host()["a"].tolist() == list(range(8))
    assert (out == 0.5).all()


@cuda.jit
def last_block_sum(values, partials, count, result):
    is_last = cuda.shared.array(1, np.int32)
    i, b = cuda.threadIdx.x, cuda.blockIdx.x
    partials[b, i] = values[b * cuda.blockDim.x + i]
    # Each thread fences its own element, the barrier collects them, and one thread counts for all.
    cuda.threadfence()
    cuda.syncthreads()
    if i == 0:
        is_last[0] = cuda.atomic.add(count, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0] and i == 0:
        total = np.float32(0.0)
        for row in range(partials.shape[0]):
            for column in range(partials.shape[1]):
                total += partials[row, column]
        result[0] = total
        count[0] = 0


def test_fences_of_all_threads_and_the_atomic_of_one():
    result, count = np.zeros(1, np.float32), np.zeros(1, np.int32)
    with simulator.checks():
        last_block_sum[4, 8](np.arange(32, dtype=np.float32), np.zeros((4, 8), np.float32), count, result)
    assert (result[0], count[0]) == (496, 0)


def test_a_loop_to_a_bound_that_nobody_wrote_ends():
    @cuda.jit
    def loop(out):
        steps = cuda.shared.array(1, np.uint32)
        for _ in range(steps[0]):
            out[0] += 1

    with pytest.raises(UninitializedReadError, match=r"shared array steps\[0\]"), simulator.checks():
        loop[1, 1](np.zeros(1))


def test_more_readers_than_are_kept():
    """Of two warps at least, so that a writer of either races with one that is kept."""

    @cuda.jit
    def read_then_write(values, out, writer):
        i = cuda.threadIdx.x
        out[i] = values[0]
        cuda.syncwarp()
        if i == writer:
            values[0] = 1

    for writer in (0, 40, 127):
        with pytest.raises(RaceError, match=r"values\[0\]"), simulator.checks():
            read_then_write[1, 128](np.zeros(1), np.zeros(128), writer)


def test_readers_of_earlier_epochs_are_dropped_but_not_those_of_other_blocks():
    @cuda.jit
    def rounds(values, out, late):
        i = cuda.threadIdx.x
        for _ in range(3):
            out[cuda.grid(1)] = values[0]
            cuda.syncthreads()
        if late and i == 0 and cuda.blockIdx.x == 1:
            values[0] = 1

    with simulator.checks():
        rounds[2, 64](np.zeros(1), np.zeros(128), False)
        rounds[1, 64](np.zeros(1), np.zeros(128), True)
    with pytest.raises(RaceError, match=r"different blocks"), simulator.checks():
        rounds[2, 64](np.zeros(1), np.zeros(128), True)


def test_cluster_blocks_must_have_begun_and_not_ended():
    def kernel(out, before, after):
        inbox = cuda.shared.array(4, np.float32)
        i = cuda.threadIdx.x
        inbox[i] = i
        if before:
            simulator.cluster_barrier()
        out[cuda.grid(1)] = simulator.cluster_load(inbox, i, 1 - simulator.cluster_rank())
        if after:
            simulator.cluster_barrier()

    def launch(before, after):
        with simulator.checks():
            simulator.launch(kernel, 4, 4, (np.zeros(16, np.float32), before, after), cluster=2)

    launch(True, True)
    with pytest.raises(RaceError, match=r"cluster_load reaches into block \(1, 0, 0\), which may not have begun"):
        launch(False, True)
    with pytest.raises(RaceError, match="which may have ended: no cluster barrier comes after"):
        launch(True, False)


def test_what_numpy_has_works_on_a_checked_array():
    @cuda.jit
    def kernel(values, out):
        out.fill(np.float32(2.0))
        np.multiply(values, values, out)
        assert (values + 1).tolist() == [2, 3, 4] and values.max() == 3 and values.flat[1] == 2

    out = np.zeros(3, np.float32)
    with simulator.checks():
        kernel[1, 1](np.array([1, 2, 3], np.float32), out)
    assert out.tolist() == [1, 4, 9]

    @cuda.jit
    def everyone(values, out):
        np.multiply(values, values, out)

    with pytest.raises(RaceError, match=r"out\[0\]"), simulator.checks():
        everyone[1, 2](np.ones(3), np.zeros(3))


def test_checks_of_a_thread_and_of_the_process():
    @cuda.jit
    def outside(values):
        values[-1] = 0

    def launch_in_a_thread():
        failures = []

        def work():
            try:
                outside[1, 1](np.zeros(4))
            except OutOfBoundsError as error:
                failures.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        return len(failures)

    with simulator.checks():
        assert launch_in_a_thread() == 0
    with checks_everywhere(Checks()):
        assert launch_in_a_thread() == 1
        # What the thread has chosen itself holds.
        with simulator.checks(bounds=False):
            outside[1, 1](np.zeros(4))
    assert launch_in_a_thread() == 0


PROGRAM = """
import numpy as np
from numba import cuda
from burt_numba import simulator
@cuda.jit
def racy(result):
    result[0] += 1
try:
    with {tool}:
        racy[1, 4](np.zeros(1))
except (simulator.SimulatorError, KeyboardInterrupt) as error:
    print(type(error).__name__, str(error).splitlines()[0])
"""


@pytest.mark.parametrize(
    ("tool", "simulated", "answer"),
    [
        ("simulator.checks()", "1", "RaceError kernel racy: race on array result[0]"),
        ("simulator.checks()", "0", "SimulatorError checks: kernels of numba.cuda run on a GPU in this process; set"),
        ("simulator.explore(3)", "0", "SimulatorError explore: kernels of numba.cuda run on a GPU"),
        ("simulator.schedule(seed=1)", "0", "SimulatorError schedule: kernels of numba.cuda run on a GPU"),
        ("simulator.break_at(thread=1)", "0", "SimulatorError break_at: kernels of numba.cuda run on a GPU"),
    ],
)
def test_tools_put_the_simulator_in_place_or_say_that_they_cannot(tool, simulated, answer):
    """Numba's own simulator ran instead, and nothing was checked."""
    environment = dict(os.environ, NUMBA_ENABLE_CUDASIM=simulated)
    command = [sys.executable, "-c", PROGRAM.format(tool=tool)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(answer), done.stdout + done.stderr
