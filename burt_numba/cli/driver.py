"""What the CUDA driver says about this machine, asked through ctypes so that Numba need not be imported first."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

from burt_numba.cli.errors import UsageError

# Numbers of CUdevice_attribute in cuda.h.
_MAX_THREADS_PER_BLOCK = 1
_MAX_SHARED_BYTES_PER_BLOCK = 8
_WARP_SIZE = 10
_MULTIPROCESSOR_COUNT = 16
_MAX_SHARED_BYTES_PER_MULTIPROCESSOR = 81
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_SHARED_BYTES_OPTIN = 97


@dataclass(frozen=True)
class Device:
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    warp_size: int
    threads_per_block: int
    shared_bytes_default: int
    shared_bytes_optin: int
    shared_bytes_per_multiprocessor: int


def _library() -> ctypes.CDLL | None:
    """Return the initialised driver library, or None when there is no usable driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def _ask(function: ctypes._NamedFuncPointer, *arguments: int) -> int:
    value = ctypes.c_int(0)
    return value.value if function(ctypes.byref(value), *arguments) == 0 else 0


def device_count() -> int:
    library = _library()
    return _ask(library.cuDeviceGetCount) if library else 0


def cuda_version() -> str | None:
    """Return the newest CUDA version that the driver supports, as ``"13.0"``."""
    library = _library()
    if library is None:
        return None
    version = _ask(library.cuDriverGetVersion)
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_version() -> str | None:
    """Return the driver's own version, as ``"580.95.05"``."""
    try:
        management = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    if management.nvmlInit_v2() != 0 or management.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return None
    return text.value.decode()


def devices() -> list[Device]:
    library = _library()
    if library is None:
        return []
    found = []
    for ordinal in range(_ask(library.cuDeviceGetCount)):
        handle = _ask(library.cuDeviceGet, ordinal)
        name = ctypes.create_string_buffer(256)
        library.cuDeviceGetName(name, len(name), handle)
        memory = ctypes.c_size_t(0)
        library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

        def attribute(number: int, handle: int = handle) -> int:
            return _ask(library.cuDeviceGetAttribute, number, handle)

        found.append(
            Device(
                name=name.value.decode(),
                compute_capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
                memory_bytes=memory.value,
                multiprocessors=attribute(_MULTIPROCESSOR_COUNT),
                warp_size=attribute(_WARP_SIZE),
                threads_per_block=attribute(_MAX_THREADS_PER_BLOCK),
                shared_bytes_default=attribute(_MAX_SHARED_BYTES_PER_BLOCK),
                shared_bytes_optin=attribute(_MAX_SHARED_BYTES_OPTIN),
                shared_bytes_per_multiprocessor=attribute(_MAX_SHARED_BYTES_PER_MULTIPROCESSOR),
            )
        )
    return found


def choose_target(needs_simulator: str | None = None) -> bool:
    """Settle before Numba is imported whether this process uses a GPU, and say so when it does not.

    ``needs_simulator`` names what the user asked for that only the simulator can do. Returns True for the simulator.
    """
    setting = os.environ.get("NUMBA_ENABLE_CUDASIM")
    if needs_simulator is not None:
        if setting == "0":
            raise UsageError(f"{needs_simulator}: needs the simulator, which NUMBA_ENABLE_CUDASIM=0 rules out")
        if setting is None:
            os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
            print(f"{needs_simulator}: using the simulator.", file=sys.stderr)
            return True
    if setting is None and device_count() == 0:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
        print("No CUDA device found: using the simulator.", file=sys.stderr)
        return True
    if setting not in (None, "0"):
        print(f"NUMBA_ENABLE_CUDASIM={setting}: using the simulator.", file=sys.stderr)
        return True
    if setting == "0" and device_count() == 0:
        raise UsageError("no CUDA device found, and NUMBA_ENABLE_CUDASIM=0 rules out the simulator")
    return False
