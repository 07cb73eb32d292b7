"""Launches that overlap the one before them on their stream, where the device can (compute capability 9.0 and later).

A kernel of a launch that ``follows`` another (``host.launching.Launch``) may run while that one still does: it waits
before it reads what earlier launches write, or writes what they read. On other devices it begins after them anyway.
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

from __future__ import annotations

from burt_numba.backend import SIMULATED

if SIMULATED:

    def let_next_begin():
        """Launches run one after another."""

    def wait_for_previous():
        """They are complete."""

else:
    from burt_numba.device.assembly import control

    # Once every block has called this or is done, the blocks of a launch that follows take what room there is.
    let_next_begin = control("griddepcontrol.launch_dependents;", since=(9, 0))
    # Until all earlier launches are complete, and what they wrote is visible.
    wait_for_previous = control("griddepcontrol.wait;", since=(9, 0))
