"""Time the block simulator against numba-cuda's own, and under all checks: 4 blocks of 256 threads, one block sum.

Run ``python perf/simulator_speed.py``. Each simulator runs in a process of its own, since ours replaces the other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_CHILD = """
import sys, time
from contextlib import nullcontext
if sys.argv[1] != "numba-cuda":
    from burt_numba import simulator
    from burt_numba.backend import cuda
else:
    from numba import cuda
import numpy as np
from kernel_under_test import block_sum

values = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
sums = np.full(4, np.nan, np.float32)
with simulator.checks() if sys.argv[1] == "checked" else nullcontext():
    for _ in range(int(sys.argv[2])):
        start = time.perf_counter()
        block_sum[4, 256](values, sums)
        print(time.perf_counter() - start)
np.testing.assert_allclose(sums, values.reshape(4, 256).sum(1), atol=1e-4)
assert ("burt_numba" in sys.modules) == (sys.argv[1] != "numba-cuda")
"""

_KERNEL = """
from numba import cuda
from numba.cuda import float32

@cuda.jit
def block_sum(values, sums):
    partial = cuda.shared.array(256, float32)
    lane = cuda.threadIdx.x
    partial[lane] = values[cuda.grid(1)]
    cuda.syncthreads()
    step = 128
    while step > 0:
        if lane < step:
            partial[lane] += partial[lane + step]
        cuda.syncthreads()
        step //= 2
    if lane == 0:
        sums[cuda.blockIdx.x] = partial[0]
"""

_RUNS = {"numba-cuda": 5, "burt_numba": 50, "checked": 20}


def measure(simulator: str, directory: Path) -> list[float]:
    """Seconds of each launch after the first."""
    (directory / "kernel_under_test.py").write_text(_KERNEL)
    root = Path(__file__).resolve().parent.parent
    environment = dict(os.environ, NUMBA_ENABLE_CUDASIM="1", PYTHONPATH=os.pathsep.join((str(directory), str(root))))
    command = [sys.executable, "-c", _CHILD, simulator, str(_RUNS[simulator])]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in output.split()][1:]


def main() -> None:
    medians = {}
    print(f"{'simulator':<12} {'median ms':>10} {'min ms':>10} {'max ms':>10} {'launches':>9}")
    for simulator in _RUNS:
        with tempfile.TemporaryDirectory() as directory:
            seconds = measure(simulator, Path(directory))
        medians[simulator] = statistics.median(seconds)
        row = [1e3 * value for value in (medians[simulator], min(seconds), max(seconds))]
        print(f"{simulator:<12} {row[0]:>10.1f} {row[1]:>10.1f} {row[2]:>10.1f} {len(seconds):>9}")
    print(f"numba-cuda over burt_numba: {medians['numba-cuda'] / medians['burt_numba']:.0f}")
    print(f"checked over burt_numba: {medians['checked'] / medians['burt_numba']:.1f}")


if __name__ == "__main__":
    main()
