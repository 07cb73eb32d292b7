"""Copies from global to shared memory that a thread starts and waits for later (8.0 and later)."""

from __future__ import annotations

from burt_numba.backend import SIMULATED

if SIMULATED:
    from burt_numba.simulator import read_elements, write_elements

    def start_copy(target, index, source, first):
        """16 bytes of a global array from ``first`` on to a shared array from ``index`` on; both places are aligned."""
        values = read_elements(source, first, 16 // source.dtype.itemsize)
        write_elements(target, index, values.view(target.dtype))

    def wait_for_copies():
        """All copies that this thread has started are there; other threads see them after a barrier."""

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, control, element_address

    @intrinsic
    def start_copy(typingctx, target, index, source, first):
        def codegen(context, builder, signature, args):
            target_value, index_value, source_value, first_value = args
            place = element_address(context, builder, target, target_value, index_value)
            origin = element_address(context, builder, source, source_value, first_value)
            text = "{ .reg .u64 place; cvta.to.shared.u64 place, $0; cp.async.cg.shared.global [place], [$1], 16; }"
            assembly(builder, ir.VoidType(), [place, origin], text, "l,l,~{memory}")
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), codegen

    wait_for_copies = control("cp.async.wait_all;")
