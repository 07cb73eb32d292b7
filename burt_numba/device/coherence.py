"""Memory that other blocks or the host look at while a kernel runs: single accesses, and a barrier for several blocks.

A plain load may be served from a multiprocessor's own cache, or be moved out of a loop that waits for it to change.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import SIMULATED, cuda
from burt_numba.target import COUNTER_STRIDE

if SIMULATED:
    from burt_numba import simulator

    def store_at(address, value):
        raise RuntimeError("buffers of the simulator lie in host memory and have no mirror")

    def load_now(array, cell):
        return array[cell]

    def arrive(counters, cell, last):
        """As on the GPU."""
        cuda.threadfence()
        before = cuda.atomic.add(counters, cell, np.int64(1))
        if before == last:
            cuda.atomic.exch(counters, cell, np.int64(0))
        cuda.threadfence()
        return before

    def group_barrier(counters, group, blocks):
        """As on the GPU; the simulator knows the group from the launch."""
        simulator.group_barrier()

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, element_address

    @intrinsic
    def store_at(typingctx, address, value):
        """Write an int64 to an address: a posted write across the bus where that is host memory."""

        def codegen(context, builder, signature, args):
            assembly(builder, ir.VoidType(), args, "st.volatile.u64 [$0], $1;", "l,l,~{memory}")
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    def _load(instruction: str):
        @intrinsic
        def load(typingctx, array, cell):
            def codegen(context, builder, signature, args):
                address = element_address(context, builder, array, *args)
                return assembly(builder, ir.IntType(64), [address], f"{instruction} $0, [$1];", "=l,l,~{memory}")

            return types.int64(array, types.int64), codegen

        return load

    # Read an int64 as other multiprocessors have left it.
    load_now = _load("ld.volatile.u64")
    # The same, and see all that was written before it was.
    _load_acquiring = _load("ld.acquire.gpu.u64")

    @intrinsic
    def _add_releasing(typingctx, array, cell, value):
        """Add to an int64, of which who reads it sees all that was written before."""

        def codegen(context, builder, signature, args):
            array_value, cell_value, number = args
            address = element_address(context, builder, array, array_value, cell_value)
            text = "{ .reg .u64 place; cvta.to.global.u64 place, $0; red.release.gpu.global.add.u64 [place], $1; }"
            assembly(builder, ir.VoidType(), [address, number], text, "l,l,~{memory}")
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), codegen

    @intrinsic
    def arrive(typingctx, counters, cell, last):
        """Count up a cell, from ``last`` on back to 0; how many had arrived before.

        What they have written is visible afterwards, and what this thread (its block, after a barrier) has, to those
        that arrive later. One instruction for what takes three with full fences, each as long as a load from memory.
        """

        def codegen(context, builder, signature, args):
            array_value, cell_value, most = args
            address = element_address(context, builder, counters, array_value, cell_value)
            most = builder.trunc(most, ir.IntType(32)) if most.type.width > 32 else most
            # The lower half of the cell: there is no such instruction for 64 bits.
            text = "{ .reg .u64 place; cvta.to.global.u64 place, $1; atom.acq_rel.gpu.global.inc.u32 $0, [place], $2; }"
            return assembly(builder, ir.IntType(32), [address, most], text, "=r,l,r,~{memory}")

        return types.int32(counters, types.int64, last), codegen

    @cuda.jit(device=True)
    def group_barrier(counters, group, blocks):
        """Wait for every thread of the ``blocks`` blocks of a group, all of which must be resident (``Launch.group``).

        ``counters`` (int64, COUNTER_STRIDE cells a group): how many have arrived, 0 between barriers, and the number of
        barriers so far. Global memory written before is visible afterwards.
        """
        cuda.syncthreads()  # the block has written what the others will read
        if blocks > 1:
            if cuda.threadIdx.x == 0:
                cell = np.int64(group) * COUNTER_STRIDE
                turn = load_now(counters, cell + 1)
                if arrive(counters, cell, blocks - 1) == blocks - 1:
                    _add_releasing(counters, cell + 1, np.int64(1))
                else:
                    while _load_acquiring(counters, cell + 1) == turn:
                        pass
            cuda.syncthreads()  # the other blocks have arrived


@cuda.jit(device=True)
def last_arrival(counters, cell, blocks, shared_flag):
    """True in every thread of the last of ``blocks`` blocks to call this for a counter, which is 0 before and after.

    What the others have written before is visible there. ``shared_flag``: a shared int32 array of one cell.
    """
    cuda.syncthreads()  # the block has written what the last one will read
    if cuda.threadIdx.x == 0:
        shared_flag[0] = np.int32(1 if arrive(counters, cell, blocks - 1) == blocks - 1 else 0)
    cuda.syncthreads()  # every thread knows
    return shared_flag[0] != 0
