"""A barrier for some warps of a block: PTX has 16 for a block, of which Numba knows the one for all of its threads."""

from __future__ import annotations

from burt_numba.backend import SIMULATED, cuda

if SIMULATED:

    def warps_barrier(group, warps):
        """All groups of a block come here equally often, so that they may as well wait for one another."""
        cuda.syncthreads()

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly

    @intrinsic
    def warps_barrier(typingctx, group, warps):
        """Wait for all ``warps`` warps of one of up to 15 groups; what they have written is visible afterwards."""

        def codegen(context, builder, signature, args):
            group_value, warps_value = args
            # The first is the one of all threads.
            number = builder.add(group_value, ir.Constant(group_value.type, 1))
            threads = builder.shl(warps_value, ir.Constant(warps_value.type, 5))
            assembly(builder, ir.VoidType(), [number, threads], "barrier.sync $0, $1;", "r,r,~{memory}")
            return context.get_dummy_value()

        return types.void(types.int32, types.int32), codegen
