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
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, from_capability

    def _control(text: str):
        @intrinsic
        def control(typingctx):
            def codegen(context, builder, signature, args):
                with from_capability(builder, 9, 0):
                    assembly(builder, ir.VoidType(), [], text, "~{memory}")
                return context.get_dummy_value()

            return types.void(), codegen

        return control

    # Once every block has called this or is done, the blocks of a launch that follows take what room there is.
    let_next_begin = _control("griddepcontrol.launch_dependents;")
    # Until all earlier launches are complete, and what they wrote is visible.
    wait_for_previous = _control("griddepcontrol.wait;")
