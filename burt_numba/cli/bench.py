"""``burt-numba bench``: hands over to the runner in ``perf``, which is part of a checkout and not of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import burt_numba
from burt_numba.cli import driver
from burt_numba.cli.errors import UsageError


def _checkout() -> Path:
    """Return the checkout in or above the working folder, or the one that an editable install points to."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(burt_numba.__file__).resolve().parents[1]):
        if (folder / "perf" / "__main__.py").is_file() and (folder / "burt_numba").is_dir():
            return folder
    raise UsageError("no perf folder here: benchmarks run from a checkout, as `python -m perf` in its root")


def bench(operation: str | None) -> int:
    folder = _checkout()
    if driver.device_count() == 0:
        raise UsageError("no CUDA device found: times in the simulator say nothing about a GPU")
    chosen = ["--op", operation] if operation else []
    return subprocess.run([sys.executable, "-m", "perf", *chosen], cwd=folder, check=False).returncode
