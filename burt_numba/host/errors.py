"""Error codes, exceptions, and the buffers in which kernels report what only they can see."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar

from burt_numba.host.memory import NO_EVENT, EventMemory, synchronize
from burt_numba.target import EVENT_CELLS


class BurtError(IntEnum):
    """Error codes of the BURT-IMMA kernel API."""

    SUCCESS = 0
    NAN_INPUT = 1
    INF_INPUT = 2
    ENTROPY_OVERFLOW = 3
    SPECTRAL_OVERFLOW = 4
    CAPACITY_FULL = 5
    DIM_MISMATCH = 6
    OOM = 7


_UNITS = {
    BurtError.NAN_INPUT: ("NaN element", "NaN elements"),
    BurtError.INF_INPUT: ("Inf element", "Inf elements"),
    BurtError.ENTROPY_OVERFLOW: (
        "row that cannot reach its entropy bound",
        "rows that cannot reach their entropy bounds",
    ),
    BurtError.SPECTRAL_OVERFLOW: (
        "matrix that may be over its spectral bound",
        "matrices that may be over their spectral bounds",
    ),
    BurtError.CAPACITY_FULL: ("dropped token", "dropped tokens"),
    BurtError.DIM_MISMATCH: ("value out of its range", "values out of their range"),
}


class BurtDimensionError(ValueError):
    """An argument's shape, rank, layout or value is not what the function takes (code 6)."""

    code = BurtError.DIM_MISMATCH


class BurtSharedMemoryError(MemoryError):
    """A layout that was asked for needs more shared memory than the device has (code 7)."""

    code = BurtError.OOM


class _Report(Exception):
    """What a warning or an exception says about events on the device."""

    def __init__(self, function: str, counts: dict[BurtError, int], first: int | None) -> None:
        self.function = function
        self.counts = counts
        self.first_index = None if first is None else first >> 3
        self.code = BurtError(first & 7) if first is not None else min(counts, default=BurtError.SUCCESS)
        parts = []
        for code, count in sorted(counts.items()):
            what = _UNITS[code][count != 1]
            parts.append(f"code {int(code)} ({code.name}): {count} {what}")
        where = "" if self.first_index is None else f"; first at flat index {self.first_index} (code {int(self.code)})"
        super().__init__(f"{function}: {', '.join(parts)}{where}")
        self._arguments = (function, counts, first)

    def __reduce__(self) -> tuple[type[_Report], tuple[str, dict[BurtError, int], int | None]]:
        return type(self), self._arguments


class BurtWarning(_Report, RuntimeWarning):
    """Events that kernels recorded. Attributes: function, code, counts, first_index."""


class BurtRuntimeError(_Report, RuntimeError):
    """The same as BurtWarning, raised under the policy "raise"."""


_policy = "warn"
_synchronous_depth = 0
_synchronous_lock = threading.Lock()
_synchronous_environment = os.environ.get("BURT_NUMBA_SYNC", "") not in ("", "0")


def set_error_policy(policy: str) -> None:
    """Choose what becomes of events on the device: ``"warn"`` (the default), ``"raise"`` or ``"ignore"``."""
    global _policy
    if policy not in ("warn", "raise", "ignore"):
        raise ValueError(f"set_error_policy: policy: expected 'warn', 'raise' or 'ignore', got {policy!r}")
    _policy = policy


def is_synchronous() -> bool:
    """True when every call waits for its kernels and reports at once."""
    return _synchronous_environment or _synchronous_depth > 0


@contextmanager
def synchronous() -> Iterator[None]:
    """Within the block, every call waits for its kernels and reports their events at once. For debugging."""
    global _synchronous_depth
    with _synchronous_lock:
        _synchronous_depth += 1
    try:
        yield
    finally:
        with _synchronous_lock:
            _synchronous_depth -= 1


def report(function: str, counts: dict[BurtError, int], first: int | None, stacklevel: int) -> None:
    """Say what happened, by policy."""
    if _policy == "raise":
        raise BurtRuntimeError(function, counts, first)
    if _policy == "warn":
        warnings.warn(BurtWarning(function, counts, first), stacklevel=stacklevel + 1)


class EventCells:
    """One error buffer on one device, as the host sees it.

    Counts only grow. What was reported is remembered here and subtracted, so that nothing the device adds meanwhile is
    lost.
    """

    def __init__(self, device: int) -> None:
        self.memory = EventMemory(device)
        self.pointer = self.memory.pointer
        self.place_is_old = False
        """The device still holds a lowest place that was reported; the next launch must reset it first."""
        self._cells = self.memory.cells
        self._lock = threading.Lock()
        self._reported = list(self._cells)
        # The same memory as bytes, which are compared faster than numbers.
        self._bytes = (ctypes.c_char * ctypes.sizeof(self._cells)).from_buffer(self._cells)
        self._reported_bytes = self._bytes.raw

    def changed(self) -> bool:
        """True when there is anything to report; costs well under a microsecond."""
        return self._bytes.raw != self._reported_bytes

    def peek(self) -> tuple[dict[BurtError, int], int | None]:
        """Counts since the last report and the lowest ``8 * index + code``, without marking them as reported."""
        return self._events(self._look())

    def _look(self) -> list[int]:
        """The cells as they are now. The place is read last: the device writes it before the count it belongs to."""
        counts = self._cells[1:]
        return [self._cells[0], *counts]

    def _events(self, now: list[int]) -> tuple[dict[BurtError, int], int | None]:
        counts = {
            BurtError(code): now[code] - self._reported[code]
            for code in range(1, EVENT_CELLS)
            if now[code] != self._reported[code]
        }
        return counts, now[0] if counts and now[0] != NO_EVENT else None

    def take(self) -> tuple[dict[BurtError, int], int | None]:
        """The same, marked as reported."""
        with self._lock:
            now = self._look()
            counts, first = self._events(now)
            # A place without a count is left: its count is on the way, and a later look finds both.
            if counts:
                self._cells[0] = NO_EVENT
                self._reported = [NO_EVENT, *now[1:]]
                self._reported_bytes = bytes((ctypes.c_int64 * EVENT_CELLS)(*self._reported))
                self.place_is_old = True
            return counts, first

    def renew(self, stream: int | None) -> None:
        """Let the device look for a lowest place again; see ``EventMemory.forget_place``."""
        self.place_is_old = False
        self.memory.forget_place(stream)


class _DeviceBuffers:
    """Error buffers, one a device, made with the first use there."""

    def __init__(self) -> None:
        self._cells: dict[int, EventCells] = {}
        self._lock = threading.Lock()

    def cells(self, device: int) -> EventCells:
        """The cells that kernels on this device write to."""
        found = self._cells.get(device)
        if found is None:
            with self._lock:
                found = self._cells.get(device)
                if found is None:
                    found = self._cells[device] = EventCells(device)
        return found


class ErrorBuffer(_DeviceBuffers):
    """Collects the events of the calls it is given to (``errors=buffer``), instead of warnings.

    Reading ``code``, ``counts`` and ``first_index`` never waits: they hold what the device has written so far.
    ``check()`` waits. Safe to use inside CUDA graph capture.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> events = burt_numba.ErrorBuffer()
    >>> p = burt_numba.constrained_softmax(np.zeros((2, 3), np.float32), errors=events)
    >>> events.check().name, events.counts, events.first_index
    ('ENTROPY_OVERFLOW', {<BurtError.ENTROPY_OVERFLOW: 3>: 2}, 0)
    """

    @property
    def counts(self) -> dict[BurtError, int]:
        """Events so far, by code; codes without an event are left out."""
        total: dict[BurtError, int] = {}
        for cells in self._cells.values():
            for code, count in cells.peek()[0].items():
                total[code] = total.get(code, 0) + count
        return total

    def _first(self) -> int | None:
        places = [first for cells in self._cells.values() if (first := cells.peek()[1]) is not None]
        return min(places, default=None)

    @property
    def first_index(self) -> int | None:
        """The lowest flat index of an event (an element or a row, as its code counts); None when there was none."""
        first = self._first()
        return None if first is None else first >> 3

    @property
    def code(self) -> BurtError:
        """The code of the event at ``first_index``; SUCCESS when there was none."""
        first = self._first()
        if first is not None:
            return BurtError(first & 7)
        return min(self.counts, default=BurtError.SUCCESS)

    def check(self) -> BurtError:
        """Wait for the devices that use this buffer and return ``code``."""
        for device in list(self._cells):
            synchronize(device)
        return self.code

    def reset(self) -> None:
        """Wait for the devices that use this buffer, and forget the events so far."""
        for device, cells in list(self._cells.items()):
            synchronize(device)
            cells.take()
            cells.renew(None)


class FunctionErrors(_DeviceBuffers):
    """The default buffers of one public function, one a device."""

    _all: ClassVar[weakref.WeakSet[FunctionErrors]] = weakref.WeakSet()

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        FunctionErrors._all.add(self)

    def report(self, cells: EventCells, stacklevel: int) -> None:
        """Report by policy what the cells hold and nobody has reported."""
        counts, first = cells.take()
        if counts:
            report(self.function, counts, first, stacklevel + 1)

    @classmethod
    def report_all(cls, stacklevel: int) -> None:
        found = sorted(cls._all, key=lambda errors: errors.function)
        for device in sorted({device for errors in found for device in errors._cells}):
            synchronize(device)
        for errors in found:
            for cells in errors._cells.values():
                # A report that raises leaves those after it for the next time.
                try:
                    errors.report(cells, stacklevel + 1)
                finally:
                    if cells.place_is_old:
                        cells.renew(None)


def check() -> None:
    """Wait for all devices in use and report the events that no call has reported yet, by policy."""
    FunctionErrors.report_all(stacklevel=2)


def _report_at_exit() -> None:
    while True:
        try:
            FunctionErrors.report_all(stacklevel=2)
        except (BurtRuntimeError, BurtWarning) as raised:
            print(f"burt_numba, at exit: {raised}", file=sys.stderr)
            continue
        except RuntimeError as problem:  # the driver's: a device that failed, or is gone by now
            print(f"burt_numba, at exit: events could not be read: {problem}", file=sys.stderr)
        return


atexit.register(_report_at_exit)
