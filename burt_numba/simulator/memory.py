"""Shared, local and constant arrays of a kernel.

Fresh memory holds a pattern that shows when it is read before it is written: NaN in floats, 0xAB in every byte of an
integer. Dynamic shared memory has no type of its own and holds 0xFF, a NaN or -1.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import numpy as np
from greenlet import getcurrent

from burt_numba.simulator import checked_array, limits
from burt_numba.simulator.errors import SimulatorError

__tracebackhide__ = True  # pytest shows the kernel and the message

Array = np.ndarray[Any, Any]
# Source file, line, shape, dtype; line 0 is the dynamic shared memory.
Key = tuple[str, int, Any, np.dtype[Any]]

_dtypes: dict[Any, np.dtype[Any]] = {}
_templates: dict[Any, Array] = {}
_TEMPLATES_KEPT = 256


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype for a dtype, a scalar class or a Numba type."""
    try:
        return _dtypes[dtype]
    except (KeyError, TypeError):
        pass
    try:
        converted = np.dtype(dtype)
    except TypeError:
        # Numba's scalar types carry NumPy's names.
        converted = np.dtype(str(dtype))
    _dtypes[dtype] = converted
    return converted


def poisoned(shape: Any, dtype: np.dtype[Any]) -> Array:
    """A new array with the contents of uninitialised memory."""
    key = (shape, dtype)
    template = _templates.get(key)
    if template is None:
        template = np.empty(shape, dtype)
        if dtype.kind in "fc":
            template.fill(np.nan)
        else:
            template.reshape(-1).view(np.uint8).fill(1 if dtype.kind == "b" else 0xAB)
        if len(_templates) < _TEMPLATES_KEPT:
            _templates[key] = template
    return template.copy()


def poison(value: Any) -> Any:
    """A value of the kind of ``value`` that stands for an undefined one."""
    if isinstance(value, (float, np.floating)):
        return type(value)("nan")
    if isinstance(value, np.integer):
        return poisoned(1, value.dtype)[0]
    return -0x54545455


def _check_shape(shape: Any) -> None:
    extents = shape if isinstance(shape, tuple) else (shape,)
    if any(not isinstance(extent, (int, np.integer)) or extent < 1 for extent in extents):
        raise ValueError(f"array: shape: expected positive integers, got {shape!r}")


def _check_alignment(alignment: Any) -> None:
    if alignment is None:
        return
    if not isinstance(alignment, int):
        raise TypeError(f"array: alignment: expected an integer, got {alignment!r}")
    if alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"array: alignment: expected a power of two of at least 8, got {alignment}")


class SharedMemory:
    """What one block has allocated in shared memory."""

    __slots__ = (
        "by_instruction",
        "by_line",
        "dynamic",
        "dynamic_bytes",
        "dynamic_region",
        "instructions",
        "keys",
        "monitor",
        "static_bytes",
    )

    def __init__(self, dynamic_bytes: int, monitor: Any = None):
        self.monitor = monitor
        # The fast way to an array: (id of the code object, instruction) -> (array, code object, shape, dtype). The
        # entry holds the code object, so that its id stays taken; hashing a code object itself is slow.
        self.by_instruction: dict[tuple[int, int], tuple[Any, CodeType, Any, Any]] = {}
        self.by_line: dict[Key, Any] = {}
        self.instructions: dict[Key, tuple[CodeType, int]] = {}
        self.keys: dict[int, tuple[Key, Any]] = {}
        self.static_bytes = 0
        self.dynamic_bytes = dynamic_bytes
        self.dynamic: Array | None = None

    def allocate(self, frame: FrameType, shape: Any, dtype: Any) -> Any:
        """The array for a call of ``cuda.shared.array`` that this block has not seen yet."""
        code = frame.f_code
        converted = as_dtype(dtype)
        if shape in (0, (0,)):
            array = self.dynamic_view(converted)
        else:
            key = (code.co_filename, frame.f_lineno, shape, converted)
            here = (code, frame.f_lasti)
            first = self.instructions.setdefault(key, here)
            if first[0] is code and first[1] != frame.f_lasti:
                raise SimulatorError(
                    f"cuda.shared.array: two arrays of one shape and dtype on one source line, "
                    f"{code.co_filename}:{frame.f_lineno}; give each its own line"
                )
            array = self.at(key)
        self.by_instruction[id(code), frame.f_lasti] = (array, code, shape, dtype)
        return array

    def at(self, key: Key) -> Any:
        """The array of a source line, shape and dtype, allocated on first use."""
        found = self.by_line.get(key)
        if found is not None:
            return found
        _, _, shape, dtype = key
        array: Any = poisoned(shape, dtype)
        self.static_bytes += array.nbytes
        if self.static_bytes > limits.MAX_STATIC_SHARED_BYTES:
            raise SimulatorError(
                f"cuda.shared.array: {self.static_bytes} bytes in arrays of fixed size, the limit of a block is "
                f"{limits.MAX_STATIC_SHARED_BYTES}"
            )
        if self.static_bytes + self.dynamic_bytes > limits.max_shared_bytes():
            raise SimulatorError(
                f"cuda.shared.array: {self.static_bytes} + {self.dynamic_bytes} dynamic bytes, the limit of a block is "
                f"{limits.max_shared_bytes()} on {limits.describe_device()}"
            )
        if self.monitor is not None:
            array = checked_array.shared_array(array, self.monitor, key[0], key[1])
        self.by_line[key] = array
        self.keys[id(array)] = (key, array)
        return array

    def dynamic_view(self, dtype: np.dtype[Any]) -> Any:
        """The whole of the dynamic shared memory as an array of ``dtype``."""
        key: Key = ("", 0, 0, dtype)
        view: Any = self.by_line.get(key)
        if view is None:
            if self.dynamic is None:
                self.dynamic = np.full(self.dynamic_bytes, 0xFF, np.uint8)
                if self.monitor is not None:
                    self.dynamic_region = checked_array.dynamic_region(self.dynamic, self.monitor)
            count = self.dynamic_bytes // dtype.itemsize
            view = self.dynamic[: count * dtype.itemsize].view(dtype)
            if self.monitor is not None:
                view = checked_array.dynamic_array(view, self.dynamic_region, self.monitor)
            self.by_line[key] = view
            self.keys[id(view)] = (key, view)
        return view

    def key_of(self, array: Any) -> Key:
        """What names ``array`` in every block of a cluster."""
        entry = self.keys.get(id(array))
        if entry is None:
            raise SimulatorError("cluster: expected an array from cuda.shared.array itself, not a view of one")
        return entry[0]

    def counterpart(self, key: Key) -> Any:
        """This block's array under a key that another block of its cluster got from ``key_of``."""
        return self.at(key) if key[1] else self.dynamic_view(key[3])


class Shared:
    """``cuda.shared``."""

    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        thread: Any = getcurrent()
        try:
            shared = thread.block.shared
        except AttributeError:
            raise SimulatorError("cuda.shared.array: called outside a kernel") from None
        frame = sys._getframe(1)
        entry = shared.by_instruction.get((id(frame.f_code), frame.f_lasti))
        # The shape is compared because closures of one factory share their code object.
        if entry is not None and entry[2] == shape and entry[3] is dtype:
            return entry[0]
        if shape not in (0, (0,)):
            _check_shape(shape)
        _check_alignment(alignment)
        return shared.allocate(frame, shape, dtype)


def _monitor() -> Any:
    """The checks of the calling thread's launch."""
    thread: Any = getcurrent()
    try:
        return thread.launch.monitor
    except AttributeError:
        return None


class Local:
    """``cuda.local``."""

    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        converted = as_dtype(dtype)
        template = _templates.get((shape, converted))
        if template is not None and alignment is None:
            array = template.copy()
        else:
            _check_shape(shape)
            _check_alignment(alignment)
            array = poisoned(shape, converted)
        monitor = _monitor()
        return array if monitor is None else checked_array.local_array(array, monitor, sys._getframe(1))


class Const:
    """``cuda.const``."""

    @staticmethod
    def array_like(ndarray: Any) -> Any:
        view = np.asarray(ndarray).view()
        view.flags.writeable = False
        monitor = _monitor()
        return view if monitor is None else checked_array.constant_array(view, monitor, sys._getframe(1))
