"""Driver calls that are not launches: the memory of error buffers, waiting, devices."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from burt_numba.target import EVENT_CELLS, SIMULATED


def driver_call(result):
    """The value of a ``cuda.bindings`` driver call, or its error as an exception."""
    error, *values = result
    if error != 0:
        raise RuntimeError(f"CUDA driver error {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


NO_EVENT = 0x7F7F7F7F7F7F7F7F
"""What cell 0 of an error buffer holds before any event: above every place, and every byte the same."""

DEVICE_EVENT_CELLS = 16
"""Cells on the device: the buffer itself, a lock, the address of the mirror (see ``device.events``)."""


class EventMemory:
    """The memory of an error buffer: cells on the device, and their mirror in host memory (``cells``).

    Allocated with the first use of a buffer on a device and kept for the life of the process: a captured graph may
    write to it at any time.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        if SIMULATED:
            import numpy as np

            self.array = np.zeros(EVENT_CELLS, np.int64)
            self.pointer = self.array.ctypes.data
            self.cells = (ctypes.c_int64 * EVENT_CELLS).from_address(self.pointer)
            self.cells[0] = NO_EVENT
            return
        from cuda.bindings import driver

        with device_context(device), allowed_in_capture():
            flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
            host = int(driver_call(driver.cuMemHostAlloc(8 * EVENT_CELLS, flags)))
            self.cells = (ctypes.c_int64 * EVENT_CELLS).from_address(host)
            ctypes.memset(host, 0, 8 * EVENT_CELLS)
            self.cells[0] = NO_EVENT
            mirror = int(driver_call(driver.cuMemHostGetDevicePointer(host, 0)))
            self.pointer = int(driver_call(driver.cuMemAlloc(8 * DEVICE_EVENT_CELLS)))
            start = (ctypes.c_int64 * DEVICE_EVENT_CELLS)(NO_EVENT)
            start[EVENT_CELLS + 1] = mirror
            # A stream of its own: the default stream may not be used while another one is captured.
            stream = driver_call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            driver_call(driver.cuMemcpyHtoDAsync(self.pointer, ctypes.addressof(start), 8 * DEVICE_EVENT_CELLS, stream))
            driver_call(driver.cuStreamSynchronize(stream))
            driver_call(driver.cuStreamDestroy(stream))

    def forget_place(self, stream: int | None) -> None:
        """Reset the lowest place on the device, in the order of a stream; None: now, when nothing is running."""
        if SIMULATED:
            return
        from cuda.bindings import driver

        if stream is None:
            with device_context(self.device):
                driver_call(driver.cuMemsetD8(self.pointer, NO_EVENT & 0xFF, 8))
        else:
            driver_call(driver.cuMemsetD8Async(self.pointer, NO_EVENT & 0xFF, 8, stream))


class Workspace:
    """Memory that launches of one stream share, one call after another: floats, flags, counters and barriers.

    Kernels leave flags and counters as they found them, zero. Barriers of groups keep the number of their turns, so
    that they have memory of their own. What was outgrown is kept: work in flight may use it.
    """

    KINDS = ("f4", "i4", "i8", "i8")
    """Type of the cells of each kind."""

    def __init__(self, device: int) -> None:
        self.lock = threading.Lock()
        """Held while the launches of a call are made: they pass data on through the workspace."""
        self._device = device
        self._bytes = [0] * len(self.KINDS)
        self.operands: list[Any] = [None] * len(self.KINDS)
        """Device pointers; arrays in the simulator."""

    def fit(self, needed: tuple[int, ...]) -> None:
        """Grow to this many bytes of each kind."""
        for kind, size in enumerate(needed):
            if size > self._bytes[kind]:
                self._bytes[kind] = size = max(size, 2 * self._bytes[kind])
                self.operands[kind] = self._allocate(size, self.KINDS[kind])

    def renew(self) -> None:
        """Take other memory from now on: a call that broke off may have left flags or counters that are not zero."""
        self._bytes = [0] * len(self.KINDS)

    def _allocate(self, size: int, dtype: str) -> Any:
        if SIMULATED:
            import numpy as np

            return np.zeros(size // np.dtype(dtype).itemsize, dtype)
        from cuda.bindings import driver

        with device_context(self._device), allowed_in_capture():
            pointer = int(driver_call(driver.cuMemAlloc(size)))
            stream = driver_call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            driver_call(driver.cuMemsetD8Async(pointer, 0, size, stream))
            driver_call(driver.cuStreamSynchronize(stream))
            driver_call(driver.cuStreamDestroy(stream))
        return pointer


_PER_THREAD = 2
"""CU_STREAM_PER_THREAD."""
_workspaces: dict[tuple[int, ...], Workspace] = {}


def workspace(device: int, stream: int) -> Workspace:
    """The workspace of a stream; of each graph that is being captured, its own, since the graph may run beside it.

    One handle stands for the default streams of all threads.
    """
    thread = threading.get_ident() if SIMULATED or stream == _PER_THREAD else 0
    key = (device, thread) if SIMULATED else (device, stream, thread, _capture(stream))
    found = _workspaces.get(key)
    return found if found is not None else _workspaces.setdefault(key, Workspace(device))


def _capture(stream: int) -> int:
    """The number of the capture that a stream takes part in; 0 for none."""
    if not is_capturing(stream):
        return 0
    from cuda.bindings import driver

    status, number, *_rest = driver_call(driver.cuStreamGetCaptureInfo(stream))
    return int(number) if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE else 0


@cache
def _capture_question() -> tuple[Any, Any]:
    """The driver's function, and its answer for none: looked up once, since calls ask each time."""
    from cuda.bindings import driver

    return driver.cuStreamIsCapturing, driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def is_capturing(stream: int) -> bool:
    """True while what is launched on the stream goes into a graph."""
    question, none = _capture_question()
    return driver_call(question(stream)) != none


@contextmanager
def allowed_in_capture() -> Iterator[None]:
    """Allow calls that wait or allocate while this thread captures a graph on some stream: they touch none of it."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver_call(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        driver_call(driver.cuThreadExchangeStreamCaptureMode(before))


@cache
def device_count() -> int:
    """CUDA devices in this process; 1 in the simulator."""
    if SIMULATED:
        return 1
    from cuda.bindings import driver

    try:
        driver_call(driver.cuInit(0))
        return driver_call(driver.cuDeviceGetCount())
    except Exception as problem:
        raise RuntimeError(
            "burt_numba found no CUDA device; set NUMBA_ENABLE_CUDASIM=1 before Python starts to run in the simulator "
            f"({problem})"
        ) from None


@cache
def device_attribute(device: int, name: str) -> int:
    """A ``CU_DEVICE_ATTRIBUTE_<name>``."""
    from cuda.bindings import driver

    device_count()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return driver_call(driver.cuDeviceGetAttribute(attribute, device))


@cache
def primary_context(device: int):
    """The primary context, which Numba, CuPy and PyTorch share."""
    from cuda.bindings import driver

    device_count()
    return driver_call(driver.cuDevicePrimaryCtxRetain(device))


def current_device() -> int | None:
    """The device of the calling thread's context; None when it has none."""
    from cuda.bindings import driver

    error, device = driver.cuCtxGetDevice()
    return int(device) if error == 0 else None


_thread = threading.local()


def is_current(device: int) -> bool:
    """True when a launch from this thread goes to the device.

    With one device in the machine a thread that had its context once keeps it, and the driver is not asked again.
    """
    if device_count() == 1 and getattr(_thread, "has_context", False):
        return True
    _thread.has_context = current_device() == device
    return _thread.has_context


class device_context:
    """Make a device current for a block of code, and put back what was."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        from cuda.bindings import driver

        driver_call(driver.cuCtxPushCurrent(primary_context(self.device)))

    def __exit__(self, *exception: object) -> None:
        from cuda.bindings import driver

        driver_call(driver.cuCtxPopCurrent())


def synchronize(device: int) -> None:
    """Wait for everything on the device."""
    if SIMULATED:
        return
    from cuda.bindings import driver

    with device_context(device):
        driver_call(driver.cuCtxSynchronize())
