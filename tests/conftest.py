"""One suite, two targets: the simulator, or the GPU when BURT_NUMBA_TEST_TARGET=gpu."""

import os
import sys

# With --cuda-checks it is set already, and Numba imported.
if os.environ.get("BURT_NUMBA_TEST_TARGET") != "gpu" and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    # Read once, when Numba or a function of this package is first imported.
    assert not {"numba", "burt_numba.target"} & set(sys.modules), "imported before the simulator could be chosen"
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

# Workers of pytest-xdist inherit it: each with as many threads as there are processors, they would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings
from support import ON_GPU

import burt_numba

# Few examples, always the same: an example is a launch, and in the simulator a launch takes milliseconds.
settings.register_profile("burt_numba", max_examples=100 if ON_GPU else 25, derandomize=True, deadline=None)
settings.load_profile("burt_numba")


def pytest_configure(config):
    if ON_GPU:
        # Kernels launched by hand on small grids; the advice is about speed, which no test measures.
        config.addinivalue_line("filterwarnings", "ignore:.*Grid size:numba.cuda.core.errors.NumbaPerformanceWarning")


def pytest_collection_modifyitems(items):
    unwanted = "simulator_only" if ON_GPU else "gpu_only"
    for item in items:
        marker = item.get_closest_marker(unwanted)
        if marker is not None:
            (reason,) = marker.args
            item.add_marker(pytest.mark.skip(reason=f"{unwanted}: {reason}"))


@pytest.fixture(autouse=True)
def no_event_left_over():
    """An event that a test caused and did not expect fails that test, not the next call of the same function."""
    yield
    burt_numba.set_error_policy("warn")
    burt_numba.check()
