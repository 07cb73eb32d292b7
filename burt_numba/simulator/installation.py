"""Whether kernels of ``numba.cuda`` run on this simulator."""

from __future__ import annotations

import sys

from burt_numba.simulator.errors import SimulatorError
from burt_numba.target import SIMULATED

installed = False


def install() -> None:
    """Put the simulator in place of Numba's; see `burt_numba.simulator.install`."""
    global installed
    if installed:
        return
    # Numba is imported here, not with the package: `launch` works without it.
    from burt_numba.simulator import numba_bridge

    numba_bridge.install()
    installed = True


def require(tool: str) -> None:
    """Before a tool of the simulator is used: it must see the kernels that are launched.

    Where Numba is not imported, functions run by ``simulator.launch`` are all there is.
    """
    if SIMULATED:
        install()
    elif "numba.cuda" in sys.modules:
        raise SimulatorError(
            f"{tool}: kernels of numba.cuda run on a GPU in this process; set NUMBA_ENABLE_CUDASIM=1 before it starts"
        )
