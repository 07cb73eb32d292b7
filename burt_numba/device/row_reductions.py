"""Reductions over the threads that share one row: a warp, a block, or the blocks of a cluster."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from burt_numba.backend import cuda
from burt_numba.device.block import MAX_WARPS, block_max, block_sum, block_sum3, power_of_two_at_least
from burt_numba.device.cluster import cluster_max, cluster_rank, cluster_sum3
from burt_numba.device.warp import warp_max, warp_sum, warp_sum3

ANY_WARPS = 0


class RowReductions(NamedTuple):
    """Device functions; each takes ``(value(s), scratch, exchange, phase)`` and alternates the phase from call to call."""

    maximum: object
    sum: object
    sum3: object
    rank: object
    """``rank()``: the number of this block among those of the row."""


@cache
def row_reductions(row_warps: int, blocks: int = 1) -> RowReductions:
    """The reductions for ``row_warps`` warps (``ANY_WARPS``: as launched) in each of ``blocks`` blocks a row.

    ``scratch`` and ``exchange`` are the shared arrays of ``device.block`` and ``device.cluster``.
    """
    lanes = power_of_two_at_least(row_warps)

    if row_warps == ANY_WARPS:

        @cuda.jit(device=True)
        def maximum(value, scratch, exchange, phase):
            return block_max(value, scratch, phase, cuda.blockDim.x >> 5, MAX_WARPS)

        @cuda.jit(device=True)
        def total(value, scratch, exchange, phase):
            return block_sum(value, scratch, phase, cuda.blockDim.x >> 5, MAX_WARPS)

        @cuda.jit(device=True)
        def total3(a, b, c, scratch, exchange, phase):
            return block_sum3(a, b, c, scratch, phase, cuda.blockDim.x >> 5, MAX_WARPS)

    elif row_warps == 1:

        @cuda.jit(device=True)
        def maximum(value, scratch, exchange, phase):
            return warp_max(value, 32)

        @cuda.jit(device=True)
        def total(value, scratch, exchange, phase):
            return warp_sum(value, 32)

        @cuda.jit(device=True)
        def total3(a, b, c, scratch, exchange, phase):
            return warp_sum3(a, b, c, 32)

    elif blocks == 1:

        @cuda.jit(device=True)
        def maximum(value, scratch, exchange, phase):
            return block_max(value, scratch, phase, row_warps, lanes)

        @cuda.jit(device=True)
        def total(value, scratch, exchange, phase):
            return block_sum(value, scratch, phase, row_warps, lanes)

        @cuda.jit(device=True)
        def total3(a, b, c, scratch, exchange, phase):
            return block_sum3(a, b, c, scratch, phase, row_warps, lanes)

    else:

        @cuda.jit(device=True)
        def maximum(value, scratch, exchange, phase):
            value = block_max(value, scratch, phase, row_warps, lanes)
            return cluster_max(value, exchange, phase, cluster_rank(), blocks)

        total = None

        @cuda.jit(device=True)
        def total3(a, b, c, scratch, exchange, phase):
            a, b, c = block_sum3(a, b, c, scratch, phase, row_warps, lanes)
            return cluster_sum3(a, b, c, exchange, phase, cluster_rank(), blocks)

    if blocks == 1:

        @cuda.jit(device=True)
        def rank():
            return 0

    else:

        @cuda.jit(device=True)
        def rank():
            return cluster_rank()

    return RowReductions(maximum, total, total3, rank)
