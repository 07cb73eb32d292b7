"""Thread-block clusters (compute capability 9.0 and later): blocks that share one row and read each other's memory.

Only kernels compiled for a cluster call these; their machine code does not exist before compute capability 9.0.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import SIMULATED, cuda
from burt_numba.device.numeric import NEGATIVE_INFINITY, maximum
from burt_numba.target import MAX_CLUSTER_BLOCKS

SCRATCH_SIZE = 2 * 3 * MAX_CLUSTER_BLOCKS
_ZERO = np.float32(0.0)

if SIMULATED:
    from burt_numba import simulator

    cluster_rank = simulator.cluster_rank
    cluster_barrier = simulator.cluster_barrier
    cluster_store = simulator.cluster_store
    cluster_wait = simulator.cluster_barrier

    def cluster_arrive():
        """The waiting is simulated as a whole barrier."""

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, control, element_address

    @intrinsic
    def cluster_rank(typingctx):
        """Number of this block in its cluster."""

        def codegen(context, builder, signature, args):
            return assembly(builder, ir.IntType(32), [], "mov.u32 $0, %cluster_ctarank;", "=r")

        return types.int32(), codegen

    # All threads of all blocks of the cluster; their earlier shared-memory writes are visible afterwards.
    cluster_barrier = control("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
    # The same in two halves, without memory order: that all blocks of the cluster have begun.
    cluster_arrive = control("barrier.cluster.arrive.relaxed.aligned;")
    cluster_wait = control("barrier.cluster.wait.aligned;")

    @intrinsic
    def cluster_store(typingctx, array, index, rank, value):
        """Write one float32 to a shared array of the block ``rank`` of the cluster."""

        def codegen(context, builder, signature, args):
            array_value, index_value, rank_value, number = args
            address = element_address(context, builder, array, array_value, index_value)
            text = "{ .reg .u64 remote; mapa.u64 remote, $0, $1; st.f32 [remote], $2; }"
            assembly(builder, ir.VoidType(), [address, rank_value, number], text, "l,r,f,~{memory}")
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int32, types.float32), codegen


@cuda.jit(device=True)
def cluster_max(value, scratch, phase, rank, blocks):
    """Maximum over the cluster of a value that a block's threads share. Calls alternate the phase, as in a block."""
    base = phase * 24
    if cuda.threadIdx.x < blocks:
        cluster_store(scratch, base + rank, cuda.threadIdx.x, value)
    cluster_barrier()  # every block's value is in every block's scratch
    result = NEGATIVE_INFINITY
    for block in range(blocks):
        result = maximum(result, scratch[base + block])
    return result


@cuda.jit(device=True)
def cluster_sum3(a, b, c, scratch, phase, rank, blocks):
    """Three sums over the cluster, in the order of the blocks: the same bits everywhere and on every run."""
    base = phase * 24
    target = cuda.threadIdx.x
    if target < blocks:
        cluster_store(scratch, base + rank, target, a)
        cluster_store(scratch, base + 8 + rank, target, b)
        cluster_store(scratch, base + 16 + rank, target, c)
    cluster_barrier()  # every block's sums are in every block's scratch
    total_a, total_b, total_c = _ZERO, _ZERO, _ZERO
    for block in range(blocks):
        total_a += scratch[base + block]
        total_b += scratch[base + 8 + block]
        total_c += scratch[base + 16 + block]
    return total_a, total_b, total_c


@cuda.jit(device=True)
def cluster_sum(value, scratch, phase, rank, blocks):
    """One sum over the cluster, in the order of the blocks."""
    base = phase * 24
    if cuda.threadIdx.x < blocks:
        cluster_store(scratch, base + rank, cuda.threadIdx.x, value)
    cluster_barrier()  # every block's sum is in every block's scratch
    total = _ZERO
    for block in range(blocks):
        total += scratch[base + block]
    return total
