"""Driver calls that are not launches: mapped host memory, waiting, devices."""

from __future__ import annotations

import ctypes
from functools import cache

from burt_numba.target import SIMULATED


def driver_call(result):
    """The value of a ``cuda.bindings`` driver call, or its error as an exception."""
    error, *values = result
    if error != 0:
        raise RuntimeError(f"CUDA driver error {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


class MappedCells:
    """int64 cells in pinned host memory that the device reaches at ``pointer``; freed with the process."""

    def __init__(self, device: int, count: int) -> None:
        if SIMULATED:
            import numpy as np

            self.array = np.zeros(count, np.int64)
            self.pointer = self.array.ctypes.data
        else:
            from cuda.bindings import driver

            with device_context(device):
                flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
                host = int(driver_call(driver.cuMemHostAlloc(8 * count, flags)))
                self.pointer = int(driver_call(driver.cuMemHostGetDevicePointer(host, 0)))
        address = self.pointer if SIMULATED else host
        self.cells = (ctypes.c_int64 * count).from_address(address)
        for cell in range(count):
            self.cells[cell] = 0


def mapped_cells(device: int, count: int) -> MappedCells:
    """Fresh cells, all 0."""
    return MappedCells(device, count)


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
