"""Kernels of ``numba.cuda.jit`` on the block simulator."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import SimulatorError, numba_bridge


@cuda.jit(device=True)
def twice(x):
    return 2 * x


@cuda.jit
def doubled(values, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = twice(values[i])


def test_is_active():
    assert simulator.is_active()
    simulator.install()


def test_jitted_kernel_and_device_function():
    assert twice(4) == 8 and twice.py_func is twice
    values, out = np.arange(10.0), np.full(10, np.nan)
    doubled[2, 8](values, out)
    np.testing.assert_array_equal(out, 2 * values)
    assert doubled.__name__ == "doubled" and callable(doubled.py_func)
    assert doubled.specialize(values, out) is doubled
    assert doubled.overloads[()].max_cooperative_grid_blocks(32) >= 1


def test_settings_are_not_kept_on_the_kernel():
    first, second = doubled[2, 8], doubled[1, 4, 0, 128]
    assert first is not second
    assert (first.grid, second.shared_bytes) == ((2, 1, 1), 128)
    with pytest.raises(ValueError, match=r"kernel doubled: launched without a configuration"):
        doubled(np.zeros(1), np.zeros(1))
    with pytest.raises(ValueError, match=r"kernel doubled: expected kernel\[grid, block"):
        doubled[1]
    with pytest.raises(ValueError, match=r"block\.x"):
        doubled[1, 2000]


@pytest.mark.parametrize("signature", ["void(float64[:], float64[:])", ["void(float64[:], float64[:])"], None])
def test_jit_with_a_signature(signature):
    kernel = cuda.jit(signature, fastmath=True)(doubled.py_func)
    out = np.zeros(3)
    kernel[1, 4](np.ones(3), out)
    assert list(out) == [2, 2, 2]


@pytest.mark.parametrize("options", [{"link": ["a.cu"]}, {"boundscheck": True}])
def test_jit_refuses(options):
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        cuda.jit(**options)


def test_forall():
    for tasks in (0, 1, 7, 300):
        values, out = np.arange(float(tasks)), np.full(tasks, np.nan)
        doubled.forall(tasks)(values, out)
        np.testing.assert_array_equal(out, 2 * values)
    with pytest.raises(ValueError, match="at least 0 tasks, got -1"):
        doubled.forall(-1)


def test_arguments():
    values = np.arange(4.0)
    values.flags.writeable = False
    device = cuda.to_device(np.arange(4.0))
    out = cuda.device_array(4)
    doubled[1, 4](values, out)
    np.testing.assert_array_equal(out.copy_to_host(), 2 * values)
    host = np.zeros(4)
    doubled[1, 4](cuda.In(device), cuda.Out(host))
    np.testing.assert_array_equal(host, 2 * values)
    with pytest.raises(ValueError, match="read-only"):
        doubled[1, 4](host, values)

    @cuda.jit
    def scale(array, factor):
        array[cuda.threadIdx.x] *= factor

    view = host[::2]
    scale[1, 2](cuda.InOut(view), 10)
    np.testing.assert_array_equal(host, [0, 2, 40, 6])


def test_record_fields_are_attributes():
    @cuda.jit
    def kernel(records):
        records[cuda.threadIdx.x].weight += records[cuda.threadIdx.x]["count"]

    records = np.array([(1, 2.0), (3, 4.0)], [("count", "i4"), ("weight", "f4")])
    kernel[1, 2](records)
    assert list(records["weight"]) == [3, 7]


def test_kernel_called_from_a_kernel_is_a_device_function():
    @cuda.jit
    def outer(values, out):
        doubled(values, out)

    out = np.zeros(3)
    outer[1, 3](np.ones(3), out)
    assert list(out) == [2, 2, 2]


def test_kernel_of_another_module_and_alias():
    source = "import numba.cuda as other\n@other.jit\ndef k(a):\n    a[other.grid(1)] = other.threadIdx.x\n"
    names: dict = {}
    exec(source, names)
    a = np.zeros(4, np.int64)
    names["k"][2, 2](a)
    assert list(a) == [0, 1, 0, 1]


def test_host_threads_launch_at_the_same_time():
    @cuda.jit
    def kernel(values, total):
        partial = cuda.shared.array(64, np.int64)
        i = cuda.threadIdx.x
        partial[i] = values[i]
        cuda.syncthreads()
        step = 32
        while step:
            if i < step:
                partial[i] += partial[i + step]
            cuda.syncthreads()
            step //= 2
        if i == 0:
            total[0] += partial[0]
            total[1] += 1

    failures = []

    def work(seed):
        try:
            values, total = np.arange(64) * seed, np.zeros(2, np.int64)
            for _ in range(10):
                kernel[2, 64](values, total)
            assert list(total) == [20 * values.sum(), 20]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_kernels_made_before_the_package_is_imported():
    script = """
import numpy as np
from numba import cuda
@cuda.jit(device=True)
def one(a):
    return cuda.shfl_sync(0xffffffff, a, 1)
@cuda.jit
def kernel(a):
    a[cuda.threadIdx.x] = one(cuda.laneid)
import burt_numba.backend
a = np.zeros(2, np.int32)
kernel[1, 2](a)
assert list(a) == [1, 1], a
"""
    environment = dict(os.environ, NUMBA_ENABLE_CUDASIM="1")
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=os.path.dirname(__file__) + "/..")


def test_install_needs_the_simulator(monkeypatch):
    monkeypatch.setattr("numba.cuda.core.config.ENABLE_CUDASIM", 0)
    with pytest.raises(SimulatorError, match="set NUMBA_ENABLE_CUDASIM=1 before Numba is imported"):
        numba_bridge.install()


def test_an_unknown_numba_cuda_is_refused(monkeypatch):
    monkeypatch.delattr("numba.cuda.simulator.kernel.FakeCUDAKernel")
    with pytest.raises(ImportError, match=r"numba-cuda \d[\d.]+ is installed, expected .*0\.30\.4.*FakeCUDAKernel"):
        numba_bridge.install()
