"""Where kernels run, known without importing Numba, and limits that do not depend on the device."""

from __future__ import annotations

import os

SIMULATED: bool = os.environ.get("NUMBA_ENABLE_CUDASIM", "0").strip() not in ("", "0")
"""True when NUMBA_ENABLE_CUDASIM was set: kernels run in the simulator."""

EVENT_CELLS = 8
"""int64 cells of an error buffer: the first place, then a count for each code."""

GROUP_BLOCK = 128
"""Threads of a block whose rows take a warp or less each."""

DOCUMENTED_THREADS = 1024
"""Threads of a block that the documented launches may ask for."""

DOCUMENTED_CIFG_THREADS = 256
"""Those of the matrix memory: as many as the documented block has at most. More leave too few registers."""

DOCUMENTED_MOE_THREADS = 512
"""Those of the mixture of experts: twice as many as the documented block has at most."""

DOCUMENTED_BIENCODER_THREADS = 256
"""Those of attention to contexts: twice as many as the documented block has at most."""

DOCUMENTED_FLASH_THREADS = 256
"""Those of flash decoding, whose documented block is a warp."""

COUNTER_STRIDE = 16
"""int64 cells between the counters of two groups of blocks: one cache line each."""

GATE_SAMPLES, GATE_COLUMNS, GATE_THREADS = 32, 32, 256
"""Samples and columns of a block that computes gates, and its threads."""

MAX_CLUSTER_BLOCKS = 8
"""Blocks in a cluster that every device with clusters can place."""

LOWEST_CAPABILITY = (7, 0)
"""The oldest compute capability that kernels are compiled for."""


def has_clusters(capability: tuple[int, int]) -> bool:
    """True for the data-centre parts from Hopper on. Consumer parts of 12.x place no clusters of this size."""
    return (9, 0) <= capability < (12, 0)


FIRST_TENSOR_CORES = (8, 0)
"""The compute capability from which tensor cores take float32."""


def can_overlap_launches(capability: tuple[int, int]) -> bool:
    """True where a launch may begin before the one before it on its stream is complete."""
    return capability >= (9, 0)


_SHARED_KILOBYTES = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163}
_SHARED_KILOBYTES |= {(9, 0): 227, (10, 0): 227, (10, 1): 227, (10, 3): 227, (11, 0): 227}


def most_shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that a block may ask for, opted in (CUDA C++ Programming Guide, "Compute Capabilities")."""
    return _SHARED_KILOBYTES.get(capability, 99) * 1024


SIMULATED_CAPABILITY = (9, 0)
"""The compute capability that the simulator stands for."""

SIMULATED_MULTIPROCESSORS = 4
"""Few, so that matrices are not spread over more blocks than one host thread should run."""
