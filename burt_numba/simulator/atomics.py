"""``cuda.atomic``: each operation returns the old value and wraps as the dtype of the array does.

Only one thread runs at a time and none is interrupted, so nothing has to be locked. The dtypes accepted are those that
Numba compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from sys import _getframe
from typing import Any

import numpy as np

from burt_numba.simulator.checked_array import CheckedArray

__tracebackhide__ = True  # pytest shows the kernel and the message

_UNSIGNED = frozenset({np.uint32, np.uint64})
_INTEGERS = frozenset({np.int32, np.int64, np.uint32, np.uint64})
_NUMBERS = _INTEGERS | {np.float32, np.float64}


_recorder: Callable[[str, Any, Any, Any, Any], None] | None = None


@contextmanager
def recorded(recorder: Callable[[str, Any, Any, Any, Any], None]) -> Iterator[None]:
    """Call ``recorder(operation, array, index, old value, frame)`` for each operation within the block.

    Of one launch at a time; the scheduler's lock sees to that.
    """
    global _recorder
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None


def _load(operation: str, array: Any, index: Any, accepted: frozenset[Any]) -> Any:
    old = array[index]
    if type(old) not in accepted:
        if isinstance(old, np.ndarray):
            raise TypeError(f"cuda.atomic.{operation}: index {index!r} does not name one element of {array.shape}")
        raise TypeError(f"cuda.atomic.{operation}: dtype {old.dtype} is not supported")
    return old


def _cast(scalar: Any, value: Any) -> Any:
    """``value`` as ``scalar``, a NumPy scalar type; integers wrap."""
    if type(value) is scalar:
        return value
    if scalar in _INTEGERS:
        bits = 8 * np.dtype(scalar).itemsize
        wrapped = int(value) & ((1 << bits) - 1)
        if scalar not in _UNSIGNED and wrapped >> (bits - 1):
            wrapped -= 1 << bits
        return scalar(wrapped)
    return scalar(value)


def _updating(
    operation: str, accepted: frozenset[Any], new_value: Callable[[Any, Any], Any]
) -> Callable[[Any, Any, Any], Any]:
    def update(array: Any, index: Any, value: Any) -> Any:
        if type(array) is CheckedArray:
            array = array.begin_atomic(operation, index, _getframe(1))
        old = _load(operation, array, index, accepted)
        array[index] = new_value(old, _cast(type(old), value))
        if _recorder is not None:
            _recorder(operation, array, index, old, _getframe(1))
        return old

    update.__name__ = update.__qualname__ = operation
    return update


def _max(old: Any, value: Any) -> Any:
    # A NaN on either side leaves the memory as it is, in Numba's code for the GPU too.
    return value if old < value else old


def _min(old: Any, value: Any) -> Any:
    return value if old > value else old


def _nanmax(old: Any, value: Any) -> Any:
    return value if old < value or old != old else old


def _nanmin(old: Any, value: Any) -> Any:
    return value if old > value or old != old else old


def _inc(old: Any, limit: Any) -> Any:
    return type(old)(0) if old >= limit else old + type(old)(1)


def _dec(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - type(old)(1)


def _compare_and_swap(operation: str, array: Any, index: Any, old: Any, value: Any) -> Any:
    if type(array) is CheckedArray:
        array = array.begin_atomic(operation, index, _getframe(2))
    loaded = _load(operation, array, index, _INTEGERS)
    if loaded == _cast(type(loaded), old):
        array[index] = _cast(type(loaded), value)
    if _recorder is not None:
        _recorder(operation, array, index, loaded, _getframe(2))
    return loaded


class Atomic:
    """``cuda.atomic``."""

    add = staticmethod(_updating("add", _NUMBERS, lambda old, value: old + value))
    sub = staticmethod(_updating("sub", _NUMBERS, lambda old, value: old - value))
    and_ = staticmethod(_updating("and_", _INTEGERS, lambda old, value: old & value))
    or_ = staticmethod(_updating("or_", _INTEGERS, lambda old, value: old | value))
    xor = staticmethod(_updating("xor", _INTEGERS, lambda old, value: old ^ value))
    inc = staticmethod(_updating("inc", _UNSIGNED, _inc))
    dec = staticmethod(_updating("dec", _UNSIGNED, _dec))
    exch = staticmethod(_updating("exch", _INTEGERS, lambda old, value: value))
    max = staticmethod(_updating("max", _NUMBERS, _max))
    min = staticmethod(_updating("min", _NUMBERS, _min))
    nanmax = staticmethod(_updating("nanmax", _NUMBERS, _nanmax))
    nanmin = staticmethod(_updating("nanmin", _NUMBERS, _nanmin))

    @staticmethod
    def cas(array: Any, index: Any, old: Any, value: Any) -> Any:
        return _compare_and_swap("cas", array, index, old, value)

    @staticmethod
    def compare_and_swap(array: Any, old: Any, value: Any) -> Any:
        return _compare_and_swap("compare_and_swap", array, 0, old, value)
