"""Reductions over the threads that share one row: lanes of a warp, a block, or the blocks of a cluster."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from burt_numba.backend import cuda
from burt_numba.device.block import MAX_WARPS, block_max, block_sum, block_sum3, power_of_two_at_least
from burt_numba.device.cluster import cluster_arrive, cluster_max, cluster_rank, cluster_sum, cluster_sum3, cluster_wait
from burt_numba.device.warp import group_mask, warp_max, warp_sum, warp_sum3

ANY_THREADS = 0
"""As many threads a row as the block was launched with."""


class RowReductions(NamedTuple):
    """Device functions of values, ``scratch``, ``exchange`` and ``phase``; calls alternate the phase."""

    begin: Any
    """``begin()``: called once, first. The maximum is the first reduction after it."""
    maximum: Any
    sum: Any
    sum3: Any
    rank: Any
    """``rank()``: the number of this block among those of the row."""


@cache
def row_reductions(row_threads: int, blocks: int = 1) -> RowReductions:
    """The reductions for a row shared by ``row_threads`` threads in each of ``blocks`` blocks.

    Up to 32 threads (a power of two) are a group of lanes; more are whole warps, and all of their block.
    ``scratch`` and ``exchange`` are the shared arrays of ``device.block`` and ``device.cluster``.
    """
    if 0 < row_threads <= 32:
        return _group_reductions(row_threads)
    return _block_reductions(row_threads // 32) if blocks == 1 else _cluster_reductions(row_threads // 32, blocks)


@cuda.jit(device=True)
def _only_block():
    return 0


@cuda.jit(device=True)
def _nothing():
    pass


def _group_reductions(lanes: int) -> RowReductions:
    @cuda.jit(device=True)
    def maximum(value, scratch, exchange, phase):
        return warp_max(value, lanes, group_mask(lanes))

    @cuda.jit(device=True)
    def total(value, scratch, exchange, phase):
        return warp_sum(value, lanes, group_mask(lanes))

    @cuda.jit(device=True)
    def total3(a, b, c, scratch, exchange, phase):
        return warp_sum3(a, b, c, lanes, group_mask(lanes))

    return RowReductions(_nothing, maximum, total, total3, _only_block)


def _block_reductions(constant_warps: int) -> RowReductions:
    lanes = power_of_two_at_least(constant_warps) if constant_warps else MAX_WARPS

    @cuda.jit(device=True)
    def warps():
        return constant_warps if constant_warps > 0 else cuda.blockDim.x >> 5

    @cuda.jit(device=True)
    def maximum(value, scratch, exchange, phase):
        return block_max(value, scratch, phase, warps(), lanes)

    @cuda.jit(device=True)
    def total(value, scratch, exchange, phase):
        return block_sum(value, scratch, phase, warps(), lanes)

    @cuda.jit(device=True)
    def total3(a, b, c, scratch, exchange, phase):
        return block_sum3(a, b, c, scratch, phase, warps(), lanes)

    return RowReductions(_nothing, maximum, total, total3, _only_block)


def _cluster_reductions(warps: int, blocks: int) -> RowReductions:
    lanes = power_of_two_at_least(warps)

    @cuda.jit(device=True)
    def begin():
        cluster_arrive()

    @cuda.jit(device=True)
    def maximum(value, scratch, exchange, phase):
        value = block_max(value, scratch, phase, warps, lanes)
        cluster_wait()  # every block runs: until then it may not be written to
        return cluster_max(value, exchange, phase, cluster_rank(), blocks)

    @cuda.jit(device=True)
    def total(value, scratch, exchange, phase):
        value = block_sum(value, scratch, phase, warps, lanes)
        return cluster_sum(value, exchange, phase, cluster_rank(), blocks)

    @cuda.jit(device=True)
    def total3(a, b, c, scratch, exchange, phase):
        a, b, c = block_sum3(a, b, c, scratch, phase, warps, lanes)
        return cluster_sum3(a, b, c, exchange, phase, cluster_rank(), blocks)

    @cuda.jit(device=True)
    def rank():
        return cluster_rank()

    return RowReductions(begin, maximum, total, total3, rank)
