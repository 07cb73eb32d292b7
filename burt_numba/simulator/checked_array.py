"""Arrays as a checked launch sees them: every access by index is looked at before it is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index as as_integer
from operator import itemgetter
from sys import _getframe
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from burt_numba.simulator.allocations import byte_bounds, find_allocation
from burt_numba.simulator.checking import Monitor
from burt_numba.simulator.errors import OutOfBoundsError
from burt_numba.simulator.ordering import Cell
from burt_numba.simulator.places import assigned_name, describe_place

if TYPE_CHECKING:
    from burt_numba.simulator.threads import Thread

__tracebackhide__ = True  # pytest shows the kernel and the message

Array = np.ndarray[Any, Any]

_INTEGERS = frozenset({int, np.int32, np.int64, np.uint32, np.uint64})


class Region:
    """A stretch of memory that arrays are views of. Places in it are offsets in bytes."""

    __slots__ = ("address", "cells", "granule", "written")

    def __init__(self, address: int, granule: int):
        self.address = address
        self.granule = granule
        """Bytes of the smallest element that any view has."""
        self.cells: dict[int, Cell] | None = {}
        """By place, one a granule; None for memory that one thread alone has."""
        self.written: bytearray | None = None
        """A flag for each byte; None where everything counts as written."""

    def split(self, granule: int) -> None:
        """Take smaller granules, for a view of smaller elements."""
        if self.cells:
            steps = range(0, self.granule, granule)
            self.cells = {place + step: cell.copied() for place, cell in self.cells.items() for step in steps}
        self.granule = granule


class CheckedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """What a kernel gets for an array in a checked launch: indexing, the attributes of an array, and views."""

    __slots__ = (
        "_bound",
        "_bytes",
        "_columns",
        "_monitor",
        "_raw",
        "_region",
        "_row_step",
        "_rows",
        "_start",
        "_step",
        "_steps",
        "name",
    )

    def __init__(self, name: str, raw: Array, region: Region, monitor: Monitor):
        self.name = name
        """What messages call it and its views."""
        self._raw = raw
        self._region = region
        self._monitor = monitor
        if raw.itemsize < region.granule:
            region.split(raw.itemsize)
        self._start = raw.__array_interface__["data"][0] - region.address
        self._steps = raw.strides
        self._bytes = raw.itemsize
        # Of a vector, and of a matrix; no index is within those of the other.
        self._bound = raw.shape[0] if raw.ndim == 1 else -1
        self._rows: int = raw.shape[0] if raw.ndim == 2 else 0
        self._columns: int = raw.shape[1] if raw.ndim == 2 else 0
        self._row_step = raw.strides[0] if raw.ndim == 2 else 0
        self._step = raw.strides[-1] if raw.ndim else 0

    # --- one element ----------------------------------------------------------------------------------------------

    # The hottest functions of a checked launch: the common cases stand here in one piece.
    def __getitem__(self, index: Any) -> Any:
        kind = type(index)
        place = -1
        if kind in _INTEGERS:
            index = as_integer(index)
            if 0 <= index < self._bound:
                place = self._start + index * self._step
        elif kind is tuple and len(index) == 2:
            row, column = index
            if type(row) is type(column) is int and 0 <= row < self._rows and 0 <= column < self._columns:
                place = self._start + row * self._row_step + column * self._step
        if place < 0:
            found = self._place(index, _getframe(1))
            if found is None:
                return self._view(self._raw[index])
            place, index = found
        region = self._region
        written = region.written
        if region.granule == self._bytes and (written is None or written[place]):
            cells = region.cells
            if cells is None:
                return self._raw[index]
            cell = cells.get(place)
            if cell is not None:
                thread: Any = getcurrent()
                if cell.quiet is not thread.block.epoch:
                    self._monitor.read(self.name, cell, thread, _getframe(1), index)
                return self._raw[index]
        self._read(place, index, _getframe(1))
        return self._raw[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        place = -1
        if type(index) in _INTEGERS:
            index = as_integer(index)
            if 0 <= index < self._bound:
                place = self._start + index * self._step
        if place < 0:
            found = self._place(index, _getframe(1))
            if found is None:
                self._view(self._raw[index]).write_all(value, _getframe(1))
                return
            place, index = found
        if self._region.cells is None:
            self._note_written(place, self._bytes)
        else:
            self._write(place, index, value, _getframe(1))
        self._raw[index] = value

    def load(self, index: Any, frame: Any) -> Any:
        """An element, on behalf of the line at which a frame stands."""
        place, index = self._element(index, frame)
        self._read(place, index, frame)
        return self._raw[index]

    def store(self, index: Any, value: Any, frame: Any) -> None:
        """Store in an element, on behalf of the line at which a frame stands."""
        place, index = self._element(index, frame)
        self._write(place, index, value, frame)
        self._raw[index] = value

    def begin_atomic(self, operation: str, index: Any, frame: Any) -> Array:
        """Note an atomic operation on an element, which is made on the array returned."""
        place, index = self._element(index, frame)
        region = self._region
        thread: Any = getcurrent()
        if region.written is not None:
            self._require_written(place, index, thread, frame)
        if region.cells is not None and self._monitor.checks.races:
            for part in range(place, place + self._bytes, region.granule):
                self._monitor.atomic(self.name, self._cell(part), thread, frame, index, operation)
        return self._raw

    def _element(self, index: Any, frame: Any) -> tuple[int, Any]:
        found = self._place(index, frame)
        if found is None:
            raise TypeError(f"index {index!r} does not name one element of an array of shape {self._raw.shape}")
        return found

    def _place(self, index: Any, frame: Any) -> tuple[int, Any] | None:
        """(place, index as plain integers) of an element; None for a view."""
        raw = self._raw
        indices = index if type(index) is tuple else (index,)
        if len(indices) == 2:
            # Most often two plain integers within a matrix.
            row, column = indices
            if type(row) is type(column) is int and 0 <= row < self._rows and 0 <= column < self._columns:
                return self._start + row * self._row_step + column * self._step, index
        if len(indices) != raw.ndim:
            self._check_view(indices, frame)
            return None
        place = self._start
        plain = []
        for axis, (part, size, step) in enumerate(zip(indices, raw.shape, self._steps, strict=True)):
            if part is None or part is Ellipsis or type(part) is slice:
                self._check_view(indices, frame)
                return None
            part = as_integer(part)
            if not 0 <= part < size:
                self._outside(axis, part, frame)
                part %= size or 1
            place += part * step
            plain.append(part)
        return place, plain[0] if type(index) is not tuple else tuple(plain)

    def _check_view(self, indices: Sequence[Any], frame: Any) -> None:
        axis = 0
        for part in indices:
            if part is None:
                continue
            if part is Ellipsis:
                axis = self._raw.ndim - (len(indices) - list(indices).index(Ellipsis) - 1)
                continue
            if hasattr(part, "__index__") and axis < self._raw.ndim and not 0 <= part < self._raw.shape[axis]:
                self._outside(axis, int(part), frame)
            axis += 1

    def _outside(self, axis: int, index: int, frame: Any) -> None:
        if not self._monitor.checks.bounds and index < 0:
            return
        monitor, thread, raw = self._monitor, getcurrent(), self._raw
        raise OutOfBoundsError(
            f"kernel {monitor.launch.name}, block {thread.block.index}, thread {thread.threadIdx}: index {index} is "
            f"outside axis {axis} of {self.name}, of shape {raw.shape}, at "
            f"{describe_place(frame.f_code, frame.f_lasti)}"
        )

    def _cell(self, place: int) -> Cell:
        cells = self._region.cells
        assert cells is not None
        cell = cells.get(place)
        if cell is None:
            cell = cells[place] = Cell()
        return cell

    def _read(self, place: int, index: Any, frame: Any) -> None:
        region = self._region
        thread: Any = getcurrent()
        written = region.written
        if written is not None and (not written[place] or region.granule != self._bytes):
            self._require_written(place, index, thread, frame)
        cells = region.cells
        if cells is not None:
            cell = cells.get(place)
            if cell is None:
                cell = cells[place] = Cell()
            if cell.quiet is not thread.block.epoch:
                self._monitor.read(self.name, cell, thread, frame, index)
            if region.granule != self._bytes:
                for part in range(place + region.granule, place + self._bytes, region.granule):
                    self._monitor.read(self.name, self._cell(part), thread, frame, index)

    def _write(self, place: int, index: Any, value: Any, frame: Any) -> None:
        region = self._region
        cells = region.cells
        if cells is not None:
            thread: Any = getcurrent()
            same = self._monitor.checks.allow_same_value_writes and _same_bits(self._raw, index, value)
            if region.granule == self._bytes:
                self._monitor.write(self.name, self._cell(place), thread, frame, index, same)
            else:
                for part in range(place, place + self._bytes, region.granule):
                    self._monitor.write(self.name, self._cell(part), thread, frame, index, same)
        self._note_written(place, self._bytes)

    def _is_written(self, place: int, size: int) -> bool:
        written = self._region.written
        return written is None or 0 not in written[place : place + size]

    def _note_written(self, place: int, size: int) -> None:
        written = self._region.written
        if written is not None:
            written[place : place + size] = b"\x01" * size

    def _require_written(self, place: int, index: Any, thread: Thread, frame: Any) -> None:
        if not self._is_written(place, self._bytes):
            self._monitor.report_unwritten(self.name, self._region.cells is None, thread, frame, index)
            if self._raw.dtype.kind in "iu":
                # The report waits for the next barrier, and a loop to this number must come to it.
                self._raw[index] = 0

    # --- several elements -----------------------------------------------------------------------------------------

    def _is_own_run(self) -> bool:
        """Whether one thread alone has the elements, and they lie one behind the other."""
        return self._region.cells is None and self._raw.flags.c_contiguous

    def load_run(self, start: int, count: int, frame: Any) -> Array:
        """Consecutive elements of a vector, all of them there."""
        step = self._step
        if not (self._is_own_run() and self._is_written(self._start + start * step, count * step)):
            for index in range(start, start + count):
                self._read(self._start + index * step, index, frame)
        return self._raw[start : start + count]

    def store_run(self, start: int, values: Array, frame: Any) -> None:
        """Store in consecutive elements of a vector, all of them there."""
        step = self._step
        if self._is_own_run():
            self._note_written(self._start + start * step, len(values) * step)
        else:
            for place in range(len(values)):
                self._write(self._start + (start + place) * step, start + place, values[place], frame)
        self._raw[start : start + len(values)] = values

    def _view(self, raw: Any) -> CheckedArray:
        return CheckedArray(self.name, raw, self._region, self._monitor)

    def _elements(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        if self._raw.ndim == 1:
            for place in range(len(self._raw)):
                yield self._start + place * self._step, (place,)
            return
        for index in np.ndindex(self._raw.shape):
            yield self._start + sum(i * step for i, step in zip(index, self._steps, strict=True)), index

    def read_all(self, frame: Any) -> Array:
        """The elements, each noted as read, in a new array."""
        if not (self._is_own_run() and self._is_written(self._start, self._raw.nbytes)):
            for place, index in self._elements():
                self._read(place, index, frame)
        return self._raw.copy()

    def write_all(self, value: Any, frame: Any) -> None:
        """Store in every element; ``value`` is broadcast."""
        if isinstance(value, CheckedArray):
            value = value.read_all(frame)
        if self._is_own_run():
            self._note_written(self._start, self._raw.nbytes)
        else:
            values = np.broadcast_to(value, self._raw.shape)
            for place, index in self._elements():
                self._write(place, index, values[index], frame)
        self._raw[...] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        values = self.read_all(_getframe(1))
        return values if dtype is None else values.astype(dtype)

    def __iter__(self) -> Iterator[Any]:
        for place in range(len(self._raw)):
            # The frame that asked this generator for the next element.
            yield self.load(place, _getframe(1)) if self._raw.ndim == 1 else self[place]

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        # The values, for `print` in a kernel and for the debugger: to look is no access.
        return repr(self._raw)

    # --- what a kernel may ask of an array ------------------------------------------------------------------------

    shape = property(lambda self: self._raw.shape)
    size = property(lambda self: self._raw.size)
    ndim = property(lambda self: self._raw.ndim)
    dtype = property(lambda self: self._raw.dtype)
    strides = property(lambda self: self._raw.strides)
    itemsize = property(lambda self: self._raw.itemsize)
    nbytes = property(lambda self: self._raw.nbytes)
    T = property(lambda self: self._view(self._raw.T))

    def fill(self, value: Any) -> None:
        self.write_all(value, _getframe(1))

    def __getattr__(self, name: str) -> Any:
        # What else NumPy has is asked of a copy, for which every element is read.
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"an array of a kernel has no attribute {name!r}")
        return getattr(self.read_all(_getframe(1)), name)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        frame = _getframe(1)
        values = [value.read_all(frame) if isinstance(value, CheckedArray) else value for value in inputs]
        result = getattr(function, method)(*values, **options)
        if not out:
            return result
        for target, part in zip(out, result if isinstance(result, tuple) else (result,), strict=True):
            if isinstance(target, CheckedArray):
                target.write_all(part, frame)
            else:
                target[...] = part
        return out[0] if len(out) == 1 else out

    def view(self, dtype: Any) -> CheckedArray:
        return self._view(self._raw.view(dtype))

    def reshape(self, *shape: Any) -> CheckedArray:
        raw = self._raw.view()
        # Assigning the shape fails where reshape() would silently copy.
        raw.shape = self._raw.reshape(*shape).shape
        return self._view(raw)

    def ravel(self) -> CheckedArray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> CheckedArray:
        return self._view(self._raw.transpose(*axes))


def _same_bits(array: Array, index: Any, value: Any) -> bool:
    return array[index].tobytes() == array.dtype.type(value).tobytes()


def _outside_vector(array: Any, start: int, count: int) -> OutOfBoundsError:
    error = OutOfBoundsError(f"vector of {count} elements at {start} of an array of {array.size}")
    error.names_its_place = False
    return error


def read_elements(array: Any, start: int, count: int) -> Array:
    """Consecutive elements of a one-dimensional array, as the vector load of a kernel reads them."""
    if start < 0 or start + count > array.size:
        raise _outside_vector(array, start, count)
    if type(array) is CheckedArray:
        return array.load_run(as_integer(start), count, _getframe(2))
    return array[start : start + count]


def write_elements(array: Any, start: int, values: Array) -> None:
    """Store in consecutive elements of a one-dimensional array, as the vector store of a kernel does."""
    end = start + len(values)
    if start < 0 or end > array.size:
        raise _outside_vector(array, start, len(values))
    if type(array) is CheckedArray:
        array.store_run(as_integer(start), values, _getframe(2))
    else:
        array[start:end] = values


# --- arrays of a launch ---------------------------------------------------------------------------------------------


def _region(raw: Array, monitor: Monitor, granule: int, *, private: bool) -> Region:
    """New memory that nobody has written, of a block or (private) of one thread."""
    region = Region(raw.__array_interface__["data"][0], granule)
    if private or not monitor.checks.races:
        region.cells = None
    if monitor.checks.uninitialized:
        region.written = bytearray(raw.nbytes)
    return region


def shared_array(raw: Array, monitor: Monitor, filename: str, line: int) -> Any:
    """A block's array from a line of source. Records are left alone: their fields are reached past any check."""
    if raw.dtype.names is not None:
        return raw
    name = assigned_name(filename, line) or f"of {filename}:{line}"
    return CheckedArray(f"shared array {name}", raw, _region(raw, monitor, raw.itemsize, private=False), monitor)


_LARGEST_ITEM = 16


def dynamic_region(raw: Array, monitor: Monitor) -> Region:
    """The dynamic shared memory of a block, which arrays of any type view."""
    return _region(raw, monitor, _LARGEST_ITEM, private=False)


def dynamic_array(raw: Array, region: Region, monitor: Monitor) -> CheckedArray:
    """All of it as an array of one type."""
    return CheckedArray("dynamic shared memory", raw, region, monitor)


def local_array(raw: Array, monitor: Monitor, frame: Any) -> Any:
    """A thread's own array."""
    if raw.dtype.names is not None:
        return raw
    name = assigned_name(frame.f_code.co_filename, frame.f_lineno) or ""
    return CheckedArray(f"local array {name}", raw, _region(raw, monitor, raw.itemsize, private=True), monitor)


def constant_array(raw: Array, monitor: Monitor, frame: Any) -> CheckedArray:
    """An array that is only read: nothing but its bounds matters."""
    name = assigned_name(frame.f_code.co_filename, frame.f_lineno) or ""
    region = Region(raw.__array_interface__["data"][0], raw.itemsize)
    region.cells = None
    return CheckedArray(f"constant array {name}", raw, region, monitor)


def global_arrays(arguments: Sequence[Any], names: Sequence[str], monitor: Monitor) -> tuple[Any, ...]:
    """Arguments of a kernel with their arrays checked; those that share memory share what is known of it."""
    spans = [(*byte_bounds(array), array) for argument in arguments for array in _arrays_in(argument)]
    regions: dict[int, Region] = {}
    end = 0
    region = None
    for low, high, array in sorted(spans, key=itemgetter(0, 1)):
        allocation = find_allocation(array)
        if region is None or low >= end:
            region = Region(low, array.itemsize)
            if not monitor.checks.races:
                region.cells = None
            if allocation is not None and monitor.checks.uninitialized:
                region.address = allocation.address
                region.written = allocation.flags()
            end = high
        else:
            end = max(end, high)
            if array.itemsize < region.granule:
                region.split(array.itemsize)
        regions[id(array)] = region
    return tuple(
        _checked(argument, names[place] if place < len(names) else f"argument {place}", regions, monitor)
        for place, argument in enumerate(arguments)
    )


def _arrays_in(argument: Any) -> Iterator[Array]:
    # A field of a record is read as an attribute, past any check.
    if isinstance(argument, np.ndarray) and argument.dtype.names is None:
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _arrays_in(part)


def _checked(argument: Any, name: str, regions: dict[int, Region], monitor: Monitor) -> Any:
    if id(argument) in regions:
        return CheckedArray(f"array {name}", np.asarray(argument), regions[id(argument)], monitor)
    if isinstance(argument, tuple):
        parts = [_checked(part, f"{name}[{place}]", regions, monitor) for place, part in enumerate(argument)]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return argument
