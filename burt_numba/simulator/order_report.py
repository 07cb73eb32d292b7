"""What differs between two orders of a launch, and which atomic operations the order has to do with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent

from burt_numba.simulator.places import describe_place, line_of

Array = np.ndarray[Any, Any]
Position = tuple[int, int, int, int]


def as_bytes(array: Array) -> Array:
    """An array as items of plain bytes, which are copied and compared as they are."""
    return array.view(np.ndarray).view(np.dtype((np.void, array.itemsize)))


def order_name(seed: int | None) -> str:
    return "the usual order" if seed is None else f"the order of simulator.schedule(seed={seed})"


class _Site:
    """The calls of ``cuda.atomic`` by one instruction of a kernel."""

    __slots__ = ("code", "instruction", "operation", "places", "returned")

    def __init__(self, operation: str, code: Any, instruction: int):
        self.operation = operation
        self.code = code
        self.instruction = instruction
        self.places: dict[int, int] = {}
        """By address, the bytes of an element that was operated on."""
        self.returned: dict[Position, list[Any]] = {}
        """By block and thread, the old values in the order of its calls."""

    def touches(self, addresses: Array, itemsize: int) -> bool:
        """Whether an element that was operated on lies over one at these rising addresses."""
        starts = np.fromiter(self.places.keys(), np.int64)
        sizes = np.fromiter(self.places.values(), np.int64)
        # Of the elements that start before the end of each one operated on, the last.
        before = np.searchsorted(addresses, starts + sizes) - 1
        return bool(((before >= 0) & (addresses[before] + itemsize > starts)).any())

    def bits(self) -> dict[Position, list[bytes]]:
        return {thread: [value.tobytes() for value in values] for thread, values in self.returned.items()}


class Recorder:
    """The atomic operations of a launch, by the instruction that called them."""

    def __init__(self) -> None:
        self.sites: dict[tuple[str, int, int], _Site] = {}
        self._array: Any = None
        self._start = 0
        """Where the array of the last operation starts: to ask an array is slow."""

    def __call__(self, operation: str, array: Array, index: Any, old: Any, frame: Any) -> None:
        thread: Any = getcurrent()
        block = getattr(thread, "block", None)
        if block is None:
            # Another thread of the host, outside a kernel.
            return
        if array is not self._array:
            self._array, self._start = array, array.__array_interface__["data"][0]
        code, instruction = frame.f_code, frame.f_lasti
        # The site holds the code object, so that its id stays taken.
        key = (operation, id(code), instruction)
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = _Site(operation, code, instruction)
        place = block.index
        site.returned.setdefault((place.x, place.y, place.z, thread.index), []).append(old)
        indices = index if type(index) is tuple else (index,)
        address = self._start
        for part, size, step in zip(indices, array.shape, array.strides, strict=False):
            address += int(part) % size * step
        site.places[address] = old.itemsize


def _addresses(array: Array) -> Array:
    """Where each element lies, in one dimension."""
    addresses = np.full(array.shape, array.__array_interface__["data"][0], np.int64)
    for axis, (size, step) in enumerate(zip(array.shape, array.strides, strict=True)):
        addresses += (step * np.arange(size, dtype=np.int64)).reshape(-1, *(1,) * (array.ndim - axis - 1))
    return addresses.reshape(-1)


class _Difference(NamedTuple):
    """An array that two orders leave with different bits."""

    name: str
    array: Array
    usual: Array
    """The contents in the usual order."""
    differs: Array
    """Whether each element does, in one dimension."""

    def extent(self) -> str:
        return f"{np.count_nonzero(self.differs)} of {self.array.size} elements differ"


def describe_difference(
    arrays: Sequence[tuple[str, Array]], expected: Sequence[Array], seed: int, usual: Recorder, recorded: Recorder
) -> str | None:
    """What the order of a seed has left otherwise than the usual one, and what may be the reason; None if nothing.

    ``arrays`` are the arrays now and their names, ``expected`` copies by `as_bytes` after the usual order, the others
    what was recorded in the two orders.
    """
    found = []
    for (name, array), values in zip(arrays, expected, strict=True):
        now, then = (np.ascontiguousarray(items).view(np.uint8) for items in (as_bytes(array), values))
        differs = (now != then).reshape(-1, array.itemsize).any(1)
        if differs.any():
            found.append(_Difference(name, array, values.view(array.dtype), differs))
    if not found:
        return None
    first, *others = found
    place = int(first.differs.argmax())
    index = tuple(map(int, np.unravel_index(place, first.array.shape)))
    old, new = _texts(first.usual[index], first.array[index])
    lines = [
        "the result depends on the order of threads",
        f"  array {first.name}[{', '.join(map(str, index))}] is {old} in {order_name(None)}, {new} in "
        f"{order_name(seed)}; {first.extent()}",
        *(f"  array {other.name}: {other.extent()}" for other in others),
        *_describe_atomics(usual, recorded, first.array, place),
    ]
    return "\n".join(lines)


def _texts(old: Any, new: Any) -> tuple[str, str]:
    """Two values as text, with their bytes where it does not tell them apart."""
    if str(old) != str(new):
        return str(old), str(new)
    return f"{old} (bytes {old.tobytes().hex(' ')})", f"{new} (bytes {new.tobytes().hex(' ')})"


_WHERE = ("on this element", "on this array", "elsewhere")


def _describe_atomics(usual: Recorder, recorded: Recorder, array: Array, place: int) -> list[str]:
    """A line for each atomic operation in the source that may be the reason, the likeliest first."""
    addresses = _addresses(array)
    element = addresses[place : place + 1].copy()
    addresses.sort()
    # By line of source: its rank, its text, whether the values returned differ.
    lines: dict[tuple[str, int, str], tuple[int, str, bool]] = {}
    for key in {**usual.sites, **recorded.sites}:
        sites = [recorder.sites[key] for recorder in (usual, recorded) if key in recorder.sites]
        changed = len(sites) < 2 or sites[0].bits() != sites[1].bits()
        if any(site.touches(element, array.itemsize) for site in sites):
            rank = 0
        elif any(site.touches(addresses, array.itemsize) for site in sites):
            rank = 1
        elif changed:
            rank = 2
        else:
            continue
        code, instruction = sites[0].code, sites[0].instruction
        line = (code.co_filename, line_of(code, instruction), key[0])
        known = lines.get(line, (rank, "", False))
        lines[line] = (min(rank, known[0]), describe_place(code, instruction), changed or known[2])
    if not lines:
        return ["  no atomic operation has to do with it; simulator.checks() finds accesses that nothing orders"]
    ranked = sorted(lines.items(), key=lambda item: (item[1][0], item[0]))
    return [
        f"  atomic.{operation} {_WHERE[rank]}{', which returned other values,' if changed else ''} at {described}"
        for (_, _, operation), (rank, described, changed) in ranked
    ]
