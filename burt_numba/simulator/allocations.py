"""Device memory that nobody has written yet."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# NumPy 2 moved it.
byte_bounds = np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils") else np.byte_bounds  # type: ignore[attr-defined]


class Allocation:
    """Memory from ``cuda.device_array``."""

    __slots__ = ("__weakref__", "address", "owner", "size", "written")

    def __init__(self, array: Array):
        self.address = array.__array_interface__["data"][0]
        self.size = array.nbytes
        self.owner = weakref.ref(array, self._forget)
        self.written: bytearray | None = None
        """A flag for each byte; None while nobody has written any."""

    def flags(self) -> bytearray:
        if self.written is None:
            self.written = bytearray(self.size)
        return self.written

    def flags_of(self, array: Array) -> Array:
        """The flags of the elements of an array (of the first byte of each), in its shape."""
        offset = array.__array_interface__["data"][0] - self.address
        flags = np.frombuffer(self.flags(), np.uint8)
        return np.lib.stride_tricks.as_strided(flags[offset:], array.shape, array.strides)

    def _forget(self, _reference: Any) -> None:
        _allocations.remove(self)


class Allocations:
    """The device memory of which somebody may ask whether it was written."""

    def __init__(self) -> None:
        self._by_address: dict[int, Allocation] = {}
        self._addresses: list[int] = []
        # Reentrant: the garbage collector may end an array's life in the middle of a method.
        self._lock = threading.RLock()

    def add(self, array: Array) -> None:
        """Remember that nobody has written a new array's memory."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        # Fields of records are written past any check.
        if array.nbytes and array.dtype.names is None:
            allocation = Allocation(array)
            with self._lock:
                if allocation.address not in self._by_address:
                    insort(self._addresses, allocation.address)
                self._by_address[allocation.address] = allocation

    def remove(self, allocation: Allocation) -> None:
        with self._lock:
            if self._by_address.get(allocation.address) is allocation:
                del self._by_address[allocation.address]
                self._addresses.remove(allocation.address)

    def find(self, array: Array) -> Allocation | None:
        """What an array lies in."""
        if not self._addresses or not array.size:
            return None
        address = byte_bounds(array)[0]
        with self._lock:
            place = bisect_right(self._addresses, address) - 1
            found = self._by_address.get(self._addresses[place]) if place >= 0 else None
        return found if found is not None and address < found.address + found.size else None


_allocations = Allocations()


def find_allocation(array: Array) -> Allocation | None:
    """The registered memory that an array lies in."""
    return _allocations.find(array)


def register_allocation(array: Array) -> None:
    """Remember that nobody has written a new array's memory."""
    _allocations.add(array)


def forget_allocation(array: Any) -> None:
    """A launch that is not checked may write any element of an argument."""
    if isinstance(array, np.ndarray):
        allocation = _allocations.find(array)
        if allocation is not None:
            _allocations.remove(allocation)
    elif isinstance(array, tuple):
        for part in array:
            forget_allocation(part)


def mark_written(array: Array) -> None:
    """The host has written every element of an array."""
    allocation = _allocations.find(array)
    if allocation is not None:
        first_bytes = allocation.flags_of(array)
        every_byte = (*array.shape, array.itemsize), (*array.strides, 1)
        np.lib.stride_tricks.as_strided(first_bytes, *every_byte)[...] = 1


def written_so_far(arrays: Iterable[Array]) -> list[tuple[Allocation, bytes]]:
    """What is known to be written of the memory of arrays, for `restore_written`."""
    found = {id(allocation): allocation for allocation in map(_allocations.find, arrays) if allocation is not None}
    return [(allocation, bytes(allocation.flags())) for allocation in found.values()]


def restore_written(known: list[tuple[Allocation, bytes]]) -> None:
    for allocation, flags in known:
        allocation.flags()[:] = flags


def first_unwritten(array: Array) -> tuple[int, ...] | None:
    """The index of an element of an array that nobody has written."""
    allocation = _allocations.find(array)
    if allocation is None:
        return None
    missing = np.argwhere(allocation.flags_of(array) == 0)
    return tuple(map(int, missing[0])) if len(missing) else None
