"""The names that a kernel finds in ``numba.cuda`` while the simulator is installed."""

from __future__ import annotations

from typing import Any

from greenlet import getcurrent

from burt_numba.simulator import arithmetic, collectives, memory
from burt_numba.simulator.atomics import Atomic
from burt_numba.simulator.errors import SimulatorError
from burt_numba.simulator.threads import WARP_SIZE


class _OutsideKernel:
    """What host code gets for ``cuda.threadIdx`` and the like, as it gets a stub where there is a GPU."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        self._name = name

    def _refuse(self) -> Any:
        raise SimulatorError(f"cuda.{self._name}: read outside a kernel")

    x = property(_refuse)
    y = property(_refuse)
    z = property(_refuse)

    def __index__(self) -> int:
        return self._refuse()

    def __repr__(self) -> str:
        return f"<cuda.{self._name}, outside a kernel>"


_OUTSIDE = {name: _OutsideKernel(name) for name in ("threadIdx", "blockIdx", "blockDim", "gridDim", "laneid")}


def _thread_index(_module: Any) -> Any:
    thread: Any = getcurrent()
    try:
        return thread.threadIdx
    except AttributeError:
        return _OUTSIDE["threadIdx"]


def _block_index(_module: Any) -> Any:
    thread: Any = getcurrent()
    try:
        return thread.block.index
    except AttributeError:
        return _OUTSIDE["blockIdx"]


def _block_dim(_module: Any) -> Any:
    thread: Any = getcurrent()
    try:
        return thread.launch.block_dim
    except AttributeError:
        return _OUTSIDE["blockDim"]


def _grid_dim(_module: Any) -> Any:
    thread: Any = getcurrent()
    try:
        return thread.launch.grid_dim
    except AttributeError:
        return _OUTSIDE["gridDim"]


def _lane(_module: Any) -> Any:
    thread: Any = getcurrent()
    try:
        return thread.lane
    except AttributeError:
        return _OUTSIDE["laneid"]


def _per_axis(operation: str, count: int, x: int, y: int, z: int) -> Any:
    if count == 1:
        return x
    if count == 2:
        return x, y
    if count == 3:
        return x, y, z
    raise ValueError(f"cuda.{operation}: expected 1, 2 or 3 dimensions, got {count!r}")


def grid(ndim: int) -> Any:
    """The position of this thread in the whole grid, in ``ndim`` dimensions."""
    thread: Any = getcurrent()
    try:
        size, block, position = thread.launch.block_dim, thread.block.index, thread.threadIdx
    except AttributeError:
        raise SimulatorError("cuda.grid: called outside a kernel") from None
    x = block.x * size.x + position.x
    if ndim == 1:
        return x
    return _per_axis("grid", ndim, x, block.y * size.y + position.y, block.z * size.z + position.z)


def gridsize(ndim: int) -> Any:
    """The threads of the whole grid along ``ndim`` dimensions."""
    thread: Any = getcurrent()
    try:
        blocks, size = thread.launch.grid_dim, thread.launch.block_dim
    except AttributeError:
        raise SimulatorError("cuda.gridsize: called outside a kernel") from None
    return _per_axis("gridsize", ndim, blocks.x * size.x, blocks.y * size.y, blocks.z * size.z)


# Read through the class of the module object, so that they hold in any module and under any alias of `cuda`.
PROPERTIES: dict[str, property] = {
    "threadIdx": property(_thread_index),
    "blockIdx": property(_block_index),
    "blockDim": property(_block_dim),
    "gridDim": property(_grid_dim),
    "laneid": property(_lane),
}

ATTRIBUTES: dict[str, Any] = {
    "warpsize": WARP_SIZE,
    "grid": grid,
    "gridsize": gridsize,
    "shared": memory.Shared,
    "local": memory.Local,
    "const": memory.Const,
    "atomic": Atomic,
    "fp16": arithmetic.Fp16,
    "cg": collectives.CooperativeGroups,
    **{name: getattr(arithmetic, name) for name in ("popc", "clz", "brev", "ffs", "fma", "cbrt", "selp")},
    **{
        name: getattr(collectives, name)
        for name in (
            "syncthreads",
            "syncthreads_count",
            "syncthreads_and",
            "syncthreads_or",
            "syncwarp",
            "shfl_sync",
            "shfl_up_sync",
            "shfl_down_sync",
            "shfl_xor_sync",
            "all_sync",
            "any_sync",
            "eq_sync",
            "ballot_sync",
            "match_any_sync",
            "match_all_sync",
            "activemask",
            "lanemask_lt",
            "nanosleep",
            "threadfence",
            "threadfence_block",
            "threadfence_system",
        )
    },
}
