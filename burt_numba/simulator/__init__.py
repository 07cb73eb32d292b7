"""Run Numba CUDA kernels without a GPU: blocks of greenlets with exact barriers and warp operations.

`install` puts it in place of numba-cuda's own simulator; `launch` runs a kernel's Python function directly.
"""

from __future__ import annotations

from burt_numba.simulator.collectives import (
    cluster_barrier,
    cluster_load,
    cluster_rank,
    cluster_size,
    cluster_store,
)
from burt_numba.simulator.errors import DivergenceError, SimulatorError
from burt_numba.simulator.scheduler import launch

_installed = False


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
    global _installed
    if _installed:
        return
    # Numba is imported here, not with the package: `launch` works without it.
    from burt_numba.simulator import numba_bridge

    numba_bridge.install()
    _installed = True


def is_active() -> bool:
    """Whether kernels of ``numba.cuda`` run on this simulator."""
    return _installed


__all__ = [
    "DivergenceError",
    "SimulatorError",
    "cluster_barrier",
    "cluster_load",
    "cluster_rank",
    "cluster_size",
    "cluster_store",
    "install",
    "is_active",
    "launch",
]
