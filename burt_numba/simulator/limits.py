"""The launch limits of a GPU, checked before a kernel runs: of compute capability 9.0, unless another is chosen."""

from __future__ import annotations

import contextvars
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from burt_numba.target import SIMULATED_CAPABILITY, most_shared_bytes

MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER = 16
MAX_STATIC_SHARED_BYTES = 48 * 1024

_AXES = "xyz"

_capability: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar(
    "burt_numba_capability", default=SIMULATED_CAPABILITY
)


@contextmanager
def device(compute_capability: tuple[int, int] | None) -> Iterator[None]:
    """Within the block, launches keep to the limits of a device of this compute capability. None: no change."""
    if compute_capability is None:
        yield
        return
    if not (
        isinstance(compute_capability, tuple)
        and len(compute_capability) == 2
        and all(isinstance(number, int) for number in compute_capability)
    ):
        raise TypeError(f"checks: compute_capability: expected a pair such as (9, 0), got {compute_capability!r}")
    token = _capability.set(compute_capability)
    try:
        yield
    finally:
        _capability.reset(token)


def max_shared_bytes() -> int:
    """Shared memory that a block may have."""
    return most_shared_bytes(_capability.get())


def describe_device() -> str:
    """Whose limits hold."""
    return "a device of compute capability {}.{}".format(*_capability.get())


def extents(value: Any, what: str) -> tuple[int, int, int]:
    """``value``, an int or one to three of them, as three extents."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"launch: {what}: expected 1 to 3 extents, got {value!r}")
    for extent in given:
        if not isinstance(extent, numbers.Integral) or isinstance(extent, bool):
            raise TypeError(f"launch: {what}: expected integers, got {value!r}")
    x, y, z = (*(int(extent) for extent in given), 1, 1)[:3]
    return x, y, z


def check_launch(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, cluster: int, group: int = 1
) -> None:
    """Raise ValueError for a launch that a GPU would refuse."""
    for what, given, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        for axis, extent, limit in zip(_AXES, given, most, strict=True):
            if not 1 <= extent <= limit:
                raise ValueError(f"launch: {what}.{axis}: expected 1 to {limit}, got {extent} in {given}")
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS_PER_BLOCK:
        raise ValueError(f"launch: block: at most {MAX_THREADS_PER_BLOCK} threads, got {threads} in {block}")
    if not isinstance(shared_bytes, numbers.Integral):
        raise TypeError(f"launch: shared_bytes: expected an integer, got {shared_bytes!r}")
    most = max_shared_bytes()
    if not 0 <= shared_bytes <= most:
        raise ValueError(f"launch: shared_bytes: expected 0 to {most} on {describe_device()}, got {shared_bytes}")
    if not 1 <= cluster <= MAX_CLUSTER:
        raise ValueError(f"launch: cluster: expected 1 to {MAX_CLUSTER} blocks, got {cluster}")
    if group > 1 and cluster > 1:
        raise ValueError(f"launch: group: expected 1 beside a cluster of {cluster}, got {group}")
    for what, blocks in (("cluster", cluster), ("group", group)):
        if blocks < 1 or grid[0] % blocks:
            raise ValueError(f"launch: {what}: grid.x must be a multiple of {blocks}, got {grid[0]}")
