"""Run Numba CUDA kernels without a GPU: blocks of greenlets with exact barriers and warp operations.

`install` puts it in place of numba-cuda's own simulator; `launch` runs a kernel's Python function directly.
"""

from __future__ import annotations

from burt_numba.simulator import installation
from burt_numba.simulator.allocations import register_allocation
from burt_numba.simulator.checked_array import read_elements, write_elements
from burt_numba.simulator.checking import checks
from burt_numba.simulator.collectives import (
    cluster_barrier,
    cluster_load,
    cluster_rank,
    cluster_size,
    cluster_store,
    group_barrier,
    multiply_add,
)
from burt_numba.simulator.errors import (
    DivergenceError,
    OrderError,
    OutOfBoundsError,
    RaceError,
    SimulatorError,
    UninitializedReadError,
)
from burt_numba.simulator.scheduler import launch
from burt_numba.simulator.schedules import explore, schedule
from burt_numba.simulator.stepping import break_at


def install() -> None:
    """Make ``numba.cuda`` run kernels on this simulator.

    ``NUMBA_ENABLE_CUDASIM`` must be set before Numba is imported. Calling it again changes nothing.

    Raises
    ------
    ImportError
        When the installed numba-cuda is not laid out as this module expects.
    SimulatorError
        When Numba was imported without ``NUMBA_ENABLE_CUDASIM``.
    """
    installation.install()


def is_active() -> bool:
    """Whether kernels of ``numba.cuda`` run on this simulator."""
    return installation.installed


__all__ = [
    "DivergenceError",
    "OrderError",
    "OutOfBoundsError",
    "RaceError",
    "SimulatorError",
    "UninitializedReadError",
    "break_at",
    "checks",
    "cluster_barrier",
    "cluster_load",
    "cluster_rank",
    "cluster_size",
    "cluster_store",
    "explore",
    "group_barrier",
    "install",
    "is_active",
    "launch",
    "multiply_add",
    "read_elements",
    "register_allocation",
    "schedule",
    "write_elements",
]
