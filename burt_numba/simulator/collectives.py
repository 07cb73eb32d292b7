"""Barriers, warp operations and cluster operations, called from kernels.

Every operation finds its thread with ``getcurrent()``; a thread that must wait switches straight to the next one that
can run. ``Launch.ready`` gets all threads of a full barrier in their order, the caller among them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from sys import _getframe
from typing import Any

import numpy as np
from greenlet import getcurrent

from burt_numba.simulator.checked_array import CheckedArray, read_elements, write_elements
from burt_numba.simulator.errors import SimulatorError
from burt_numba.simulator.memory import poison
from burt_numba.simulator.threads import FULL_MASK, WARP_SIZE, Barrier, Group, Thread

__tracebackhide__ = True  # pytest shows the kernel and the message

_MAX_NAPS = 100_000
_SHUFFLED = frozenset({int, float, np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64})
"""Types that need no closer look."""


class Int32(int):
    """An integer that Numba types with 32 bits, where the width matters to popc, clz, ffs and brev."""

    __slots__ = ()


def _current(operation: str) -> Any:
    thread = getcurrent()
    if not isinstance(thread, Thread):
        raise SimulatorError(f"cuda.{operation}: called outside a kernel")
    return thread


def _wait(thread: Any) -> None:
    """Let the next thread run, and return when this one is ready again."""
    ready = thread.launch.ready
    following = ready.popleft() if ready else thread.launch.hub
    if following is not thread:
        following.switch()


def _arrive(thread: Any, barrier: Barrier, kind: str, frame: Any) -> None:
    if not barrier.arrived:
        barrier.open(kind, frame)
    elif barrier.instruction != frame.f_lasti or barrier.code is not frame.f_code or barrier.kind != kind:
        barrier.check_place(kind, frame)
    barrier.arrived += 1
    if barrier.arrived == barrier.need:
        barrier.arrived = 0
        thread.launch.ready.extend(barrier.threads)
    _wait(thread)


def syncthreads() -> None:
    thread: Any = getcurrent()
    try:
        barrier = thread.barrier
    except AttributeError:
        _current("syncthreads")
        raise
    # The same as _arrive, in one piece: this is the hottest function of the simulator.
    frame = _getframe(1)
    arrived = barrier.arrived
    if not arrived:
        barrier.kind = "syncthreads"
        barrier.code = frame.f_code
        barrier.instruction = frame.f_lasti
    elif barrier.instruction != frame.f_lasti or barrier.code is not frame.f_code or barrier.kind != "syncthreads":
        barrier.check_place("syncthreads", frame)
    launch = thread.launch
    ready = launch.ready
    if arrived + 1 == barrier.need:
        barrier.arrived = 0
        ready.extend(barrier.threads)
    else:
        barrier.arrived = arrived + 1
    following = ready.popleft() if ready else launch.hub
    if following is not thread:
        following.switch()


def _count_trues(kind: str, predicate: Any, frame: Any) -> tuple[int, int]:
    thread = _current(kind)
    barrier = thread.barrier
    if not barrier.arrived:
        barrier.trues = 0
    barrier.trues += 1 if predicate else 0
    if barrier.arrived + 1 == barrier.need:
        barrier.result = barrier.trues
    _arrive(thread, barrier, kind, frame)
    return barrier.result, len(barrier.threads)


def syncthreads_count(predicate: Any) -> int:
    return _count_trues("syncthreads_count", predicate, _getframe(1))[0]


def syncthreads_and(predicate: Any) -> int:
    trues, threads = _count_trues("syncthreads_and", predicate, _getframe(1))
    return int(trues == threads)


def syncthreads_or(predicate: Any) -> int:
    return int(_count_trues("syncthreads_or", predicate, _getframe(1))[0] > 0)


class GridGroup:
    """``cuda.cg.this_grid()``."""

    __slots__ = ()

    def sync(self) -> None:
        thread = _current("cg.this_grid().sync")
        _arrive(thread, thread.launch.waiting_for_grid(), "cg.this_grid().sync", _getframe(1))


class CooperativeGroups:
    """``cuda.cg``."""

    @staticmethod
    def this_grid() -> GridGroup:
        return GridGroup()


def _join(kind: str, mask: int, value: Any) -> tuple[Any, Group]:
    """Bring ``value`` to the warp operation ``kind`` and return when all lanes of ``mask`` have."""
    thread: Any = getcurrent()
    try:
        warp = thread.warp
    except AttributeError:
        _current(kind)
        raise
    if mask != FULL_MASK:
        mask = int(mask) & FULL_MASK
    groups = warp.groups
    group = groups[0] if groups else None
    if group is None or group.mask != mask or group.kind != kind:
        group = warp.group_for(kind, mask, thread.lane)
    group.values[thread.lane] = value
    group.missing -= 1
    launch = thread.launch
    ready = launch.ready
    if not group.missing:
        groups.remove(group)
        ready.extend(group.threads)
    following = ready.popleft() if ready else launch.hub
    if following is not thread:
        following.switch()
    return thread, group


def syncwarp(mask: int = FULL_MASK) -> None:
    _join("syncwarp", mask, None)


def _check_shuffled(kind: str, value: Any) -> None:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"cuda.{kind}: expected a 32- or 64-bit integer or float, got {type(value).__name__}")


def _from_lane(kind: str, lane: int, source: int, group: Group) -> Any:
    value = group.values[source]
    if value is not None:
        return value
    if not group.mask >> source & 1:
        raise SimulatorError(
            f"cuda.{kind}: lane {lane} reads from lane {source}, which is not in the mask 0x{group.mask:08x}"
        )
    # The mask names a lane that the last warp of the block lacks: allowed, but the result is undefined.
    return poison(group.values[lane])


def shfl_sync(mask: int, value: Any, src_lane: int) -> Any:
    if type(value) not in _SHUFFLED:
        _check_shuffled("shfl_sync", value)
    thread, group = _join("shfl_sync", mask, value)
    return _from_lane("shfl_sync", thread.lane, int(src_lane) % WARP_SIZE, group)


def shfl_up_sync(mask: int, value: Any, delta: int) -> Any:
    if type(value) not in _SHUFFLED:
        _check_shuffled("shfl_up_sync", value)
    thread, group = _join("shfl_up_sync", mask, value)
    source = thread.lane - int(delta) % WARP_SIZE
    return value if source < 0 else _from_lane("shfl_up_sync", thread.lane, source, group)


def shfl_down_sync(mask: int, value: Any, delta: int) -> Any:
    if type(value) not in _SHUFFLED:
        _check_shuffled("shfl_down_sync", value)
    thread, group = _join("shfl_down_sync", mask, value)
    source = thread.lane + int(delta) % WARP_SIZE
    return value if source >= WARP_SIZE else _from_lane("shfl_down_sync", thread.lane, source, group)


def shfl_xor_sync(mask: int, value: Any, lane_mask: int) -> Any:
    if type(value) not in _SHUFFLED:
        _check_shuffled("shfl_xor_sync", value)
    thread, group = _join("shfl_xor_sync", mask, value)
    source = thread.lane ^ (int(lane_mask) % WARP_SIZE)
    # The same as in _from_lane: no function of a kernel is called more often.
    found = group.values[source]
    return found if found is not None else _from_lane("shfl_xor_sync", thread.lane, source, group)


def _vote(kind: str, mask: int, predicate: Any, decide: Callable[[list[bool]], bool]) -> bool:
    _, group = _join(kind, mask, bool(predicate))
    if group.result is None:
        group.result = decide([group.values[thread.lane] for thread in group.threads])
    return group.result


def all_sync(mask: int, predicate: Any) -> bool:
    return _vote("all_sync", mask, predicate, all)


def any_sync(mask: int, predicate: Any) -> bool:
    return _vote("any_sync", mask, predicate, any)


def eq_sync(mask: int, predicate: Any) -> bool:
    return _vote("eq_sync", mask, predicate, lambda votes: all(votes) or not any(votes))


def _signed(mask: int) -> Int32:
    """``mask`` as Numba types it: an int32, negative when lane 31 is in it."""
    return Int32(mask - (1 << 32) if mask >> 31 else mask)


def ballot_sync(mask: int, predicate: Any) -> int:
    _, group = _join("ballot_sync", mask, bool(predicate))
    if group.result is None:
        group.result = _signed(sum(1 << thread.lane for thread in group.threads if group.values[thread.lane]))
    return group.result


def _bits(value: Any) -> Any:
    """What match compares: the bits of a value, so that a NaN equals itself and the zeros differ."""
    if isinstance(value, (float, np.floating)):
        return struct.pack("<d", float(value))
    return int(value) & 0xFFFFFFFFFFFFFFFF


def match_any_sync(mask: int, value: Any) -> int:
    bits = _bits(value)
    _, group = _join("match_any_sync", mask, bits)
    if group.result is None:
        masks: dict[Any, int] = {}
        for thread in group.threads:
            theirs = group.values[thread.lane]
            masks[theirs] = masks.get(theirs, 0) | 1 << thread.lane
        group.result = {theirs: _signed(lanes) for theirs, lanes in masks.items()}
    return group.result[bits]


def match_all_sync(mask: int, value: Any) -> tuple[int, bool]:
    bits = _bits(value)
    _, group = _join("match_all_sync", mask, bits)
    if group.result is None:
        equal = all(group.values[thread.lane] == bits for thread in group.threads)
        lanes = sum(1 << thread.lane for thread in group.threads)
        group.result = (_signed(lanes) if equal else Int32(0), equal)
    return group.result


def _places_of_factors(numbers: int) -> tuple[Any, Any]:
    """Where both factors of a tensor core's step lie in what the lanes bring: 10 words of so many numbers each."""
    places = np.arange(WARP_SIZE * 10 * numbers).reshape(8, 4, 10, numbers)
    # Cells [g][t], rows 8 further, words 4 further, both.
    left = places[:, :, :4].reshape(8, 4, 2, 2, -1).transpose(3, 0, 2, 1, 4).reshape(16, -1)
    return left, places[:, :, 4:6].transpose(2, 1, 3, 0).reshape(-1, 8)


_PLACES_OF_WORDS, _PLACES_OF_HALVES = _places_of_factors(1), _places_of_factors(2)
_PLACES_OF_SUMS = (
    np.arange(WARP_SIZE * 10).reshape(8, 4, 10)[:, :, 6:].reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
)
_TENSOR_CORE_BITS = np.uint32(0xFFFFE000)


def _step_of_warp(brought: bytes, halves: bool) -> Any:
    """The sums of all lanes, four each, from what they bring: words of the left factor, of the right one, and sums."""
    if halves:
        places, numbers = _PLACES_OF_HALVES, np.frombuffer(brought, np.float16)
    else:
        places, numbers = _PLACES_OF_WORDS, (np.frombuffer(brought, np.uint32) & _TENSOR_CORE_BITS).view(np.float32)
    numbers = numbers.astype(np.float64)
    product = numbers.take(places[0]) @ numbers.take(places[1])
    sums = (np.frombuffer(brought, np.float32).take(_PLACES_OF_SUMS) + product).astype(np.float32)
    return sums.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP_SIZE, 4)


def multiply_add(a: Any, a_first: int, b: Any, b_first: int, sums: Any, first: int) -> None:
    """One step of a tensor core on the cells of three local arrays from a place on; all lanes of a warp call it.

    ``b`` holds float32 numbers, or words of two float16 numbers, and ``a`` the same, or its bits.
    """
    brought = (
        read_elements(a, a_first, 4).tobytes()
        + read_elements(b, b_first, 2).tobytes()
        + read_elements(sums, first, 4).tobytes()
    )
    thread, group = _join("multiply_add", FULL_MASK, brought)
    if group.result is None:
        group.result = _step_of_warp(b"".join(group.values), b.dtype.char != "f")
    write_elements(sums, first, group.result[thread.lane])


def activemask() -> int:
    thread = _current("activemask")
    frame = _getframe(1)
    thread.warp.gathering.setdefault((id(frame.f_code), frame.f_lasti), []).append(thread)
    _wait(thread)
    return Int32(thread.active_mask)


def lanemask_lt() -> int:
    return Int32((1 << _current("lanemask_lt").lane) - 1)


def nanosleep(ns: int) -> None:
    """Let all other threads run first. A thread that sleeps for ever waits for something that cannot happen."""
    thread = _current("nanosleep")
    thread.naps += 1
    if thread.naps > _MAX_NAPS:
        raise SimulatorError(
            f"cuda.nanosleep: slept {_MAX_NAPS} times, and what the thread waits for did not happen (blocks run one "
            "after another, unless they are of a cluster or meet in cuda.cg.this_grid().sync())"
        )
    thread.launch.ready.append(thread)
    _wait(thread)


def _fence(in_block: bool) -> None:
    thread: Any = getcurrent()
    if isinstance(thread, Thread) and thread.launch.monitor is not None:
        thread.launch.monitor.fence(thread, in_block)


def threadfence() -> None:
    """Threads see each other's writes at once; in a checked launch, what a following atomic publishes is noted."""
    _fence(in_block=False)


def threadfence_block() -> None:
    """The same, for the threads of the block."""
    _fence(in_block=True)


threadfence_system = threadfence


def cluster_rank() -> int:
    """The rank of this block in its cluster."""
    return _current("cluster_rank").block.rank


def cluster_size() -> int:
    """Blocks in this block's cluster."""
    return _current("cluster_size").launch.cluster_size


def cluster_barrier() -> None:
    """Wait for every thread of every block of the cluster."""
    thread = _current("cluster_barrier")
    _arrive(thread, thread.block.cluster.barrier, "cluster_barrier", _getframe(1))


def group_barrier() -> None:
    """Wait for every thread of the blocks that were launched as one group."""
    thread = _current("group_barrier")
    _arrive(thread, thread.block.cluster.barrier, "group_barrier", _getframe(1))


def _in_block(operation: str, shared_array: Any, rank: int) -> Any:
    thread = _current(operation)
    blocks = thread.block.cluster.blocks
    if not 0 <= rank < len(blocks):
        raise SimulatorError(f"{operation}: rank: expected 0 to {len(blocks) - 1}, got {rank}")
    if thread.launch.monitor is not None and blocks[rank] is not thread.block:
        thread.launch.monitor.reach(operation, blocks[rank], thread, _getframe(2))
    return blocks[rank].shared.counterpart(thread.block.shared.key_of(shared_array))


def cluster_store(shared_array: Any, index: Any, rank: int, value: Any) -> None:
    """Store in the array that block ``rank`` of the cluster has for the source line of ``shared_array``."""
    array = _in_block("cluster_store", shared_array, rank)
    if type(array) is CheckedArray:
        array.store(index, value, _getframe(1))
    else:
        array[index] = value


def cluster_load(shared_array: Any, index: Any, rank: int) -> Any:
    """Load from the array that block ``rank`` of the cluster has for the source line of ``shared_array``."""
    array = _in_block("cluster_load", shared_array, rank)
    return array.load(index, _getframe(1)) if type(array) is CheckedArray else array[index]
