"""Time to the first result in a fresh process: with an empty kernel cache, and from the cache on disk.

    cold    BURT_NUMBA_CACHE_DIR is a new, empty folder (Numba's and the driver's caches too)
    disk    the same folder once more, in another process

Each process times, one after the other: importing NumPy, importing burt_numba, reading the function's name, what is
left of importing Numba, making the context and the arrays, the first call until its result is there, a second call,
and the first call at another size, which may need another kernel. The sum up to the first result, without NumPy and
with the context, is what a user waits.

    python -m perf --first-call
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from perf.case import BASE_NAMES, is_of

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from perf.record import CsvFile, Record

OPERATIONS = (
    *("constrained_softmax", "attention_softmax", "biencoder_attention", "cifg_update", "batched_cifg_update"),
    *("sparse_moe_dispatch", "sparse_moe_combine"),
    *("flash_decoding_reduce", "flash_decoding_chunk", "flash_decoding", "merge_attention_states"),
)
SHAPES = {
    "constrained_softmax": ((32, 1_000), (32, 5_000)),
    "attention_softmax": ((2, 4, 64, 64), (2, 4, 512, 512)),
    "biencoder_attention": ((2, 4, 64, 64), (2, 4, 512, 100)),
    "cifg_update": ((32, 32), (512, 512)),
    "batched_cifg_update": ((4, 64, 64), (200, 64, 64)),
    "sparse_moe_dispatch": ((64, 64), (1_024, 511)),
    "sparse_moe_combine": ((4, 32, 64), (4, 512, 511)),
    "flash_decoding_reduce": ((4, 8, 6, 66), (2, 8, 200, 129)),
    "flash_decoding_chunk": ((4, 8, 64), (2, 8, 127)),
    "flash_decoding": ((4, 8, 64), (2, 8, 127)),
    "merge_attention_states": ((3, 4, 8, 64), (20, 4, 8, 127)),
}
"""Of the first input."""
STAGES = (
    "import numpy",
    "import burt_numba",
    "read the name",
    "import numba",
    "context and arrays",
    "first call",
    "second call",
    "first call, another size",
)
SUM = "import burt_numba to first result"
ROUNDS, QUICK_ROUNDS = 3, 1
ROOT = Path(__file__).resolve().parents[1]


def child(op: str) -> None:
    """Print the seconds of each stage as JSON; up to here the process has imported the standard library alone."""
    clock = time.perf_counter
    times = [clock()]
    import numpy as np

    times.append(clock())
    import burt_numba

    times.append(clock())
    function = getattr(burt_numba, op)
    times.append(clock())
    from burt_numba.backend import cuda

    times.append(clock())
    pairs = []
    for shape in SHAPES[op]:
        values = np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)
        if op in BASE_NAMES["moe"]:
            pairs.append(expert_arguments(op, values))
            continue
        if op in BASE_NAMES["flash"]:
            pairs.append(([cuda.to_device(array) for array in flash_arrays(op, values)], {}))
            continue
        if op in BASE_NAMES["cifg"]:
            batch, d = shape[:-2], shape[-1]
            shapes = ((*batch, d), (*batch, d), (d, 2 * d), (d,))  # h, x, W_f, b_f
            arrays = [values / 1000, *(np.ones(other, np.float32) for other in shapes)]
        elif op == "biencoder_attention":
            arrays = [values] * 3  # a query is its own nearest key: no row records an event
        else:
            values[..., 0] += 40  # a clear leader: no row records an event
            arrays = [values]
        pairs.append(([cuda.to_device(array) for array in arrays], {"out": cuda.device_array(shape, np.float32)}))
    small, large = pairs
    cuda.synchronize()
    times.append(clock())
    for arguments, options in (small, small, large):
        function(*arguments, **options)
        cuda.synchronize()
        times.append(clock())
    seconds = dict(zip(STAGES, (after - before for before, after in itertools.pairwise(times)), strict=True))
    seconds[SUM] = times[STAGES.index("first call") + 1] - times[1]
    print(json.dumps(seconds))


def flash_arrays(op: str, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Partials of equal sums, caches of 100 keys, or states beside a log-sum-exp of 0."""
    import numpy as np

    if op == "merge_attention_states":
        return values, np.zeros(values.shape[:-1], np.float32)
    lengths = np.full(len(values), 100, np.int32)
    if op == "flash_decoding_reduce":
        values[..., -1] = 1
        return values, lengths
    cache = np.repeat(values[:, :, None], 100, axis=2)
    return values, cache, cache.copy(), lengths


def expert_arguments(op: str, values: np.ndarray) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and options of a dispatch that allocates, or of a combine of rows that each have one token."""
    import numpy as np

    from burt_numba.backend import cuda

    if op == "sparse_moe_dispatch":
        T = len(values)
        indices = np.stack([np.arange(T) % 4, (np.arange(T) + 1) % 4], axis=1).astype(np.int32)
        arrays = (values, np.full((T, 4), 0.25, np.float32), indices)
        return [cuda.to_device(array) for array in arrays], {}
    experts, capacity, d = values.shape
    places = np.stack(np.divmod(np.arange(experts * capacity, dtype=np.int32), np.int32(capacity)), axis=1)[:, None]
    weights = np.ones(places.shape[:2], np.float32)
    dispatch = SimpleNamespace(dispatch_indices=cuda.to_device(places), combine_weights=cuda.to_device(weights))
    out = cuda.device_array((len(weights), d), np.float32)
    return [cuda.to_device(values), dispatch], {"out": out}


def run_child(op: str, cache: Path) -> dict[str, float]:
    """Seconds of each stage in a fresh process that keeps every cache in `cache`."""
    environment = {
        **os.environ,
        "BURT_NUMBA_CACHE_DIR": str(cache / "burt_numba"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "CUDA_CACHE_PATH": str(cache / "driver"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "perf.first_call", op],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"first_call: {op}: the process ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(console: Console, csv: CsvFile, op: str | None = None, quick: bool = False) -> list[Record]:
    """Time both caches for each operation; medians over a few fresh folders."""
    import numpy as np

    from perf.record import Record

    records = []
    for name in (operation for operation in OPERATIONS if is_of(operation, op)):
        seconds: dict[tuple[str, str], list[float]] = {}
        try:
            with tempfile.TemporaryDirectory() as folder:
                run_child(name, Path(folder))  # not counted: byte code and the file cache
            for _ in range(QUICK_ROUNDS if quick else ROUNDS):
                with tempfile.TemporaryDirectory() as folder:
                    for cache in ("cold", "disk"):
                        for stage, value in run_child(name, Path(folder)).items():
                            seconds.setdefault((cache, stage), []).append(value)
        except RuntimeError as error:
            record = Record("first_call", name, "", "float32", "", within="FAILED", note=" ".join(str(error).split()))
            csv.append(record)
            records.append(record)
            continue
        for (cache, stage), values in seconds.items():
            p10, median, p90 = (1e6 * float(v) for v in np.percentile(values, [10, 50, 90]))
            record = Record("first_call", name, stage, "float32", cache, "", median, p10, p90, repeats=len(values))
            csv.append(record)
            records.append(record)
        console.print(f"first call: {name}: done", markup=False)
    return records


if __name__ == "__main__":
    child(sys.argv[1])
