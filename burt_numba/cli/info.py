"""``burt-numba info``: what a report of a fault should contain."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from burt_numba import __version__
from burt_numba.cli import driver
from burt_numba.cli.output import pairs

# Distributions. The optional ones are shown where they are installed.
_REQUIRED = ("numpy", "numba", "numba-cuda")
_OPTIONAL = ("cuda-bindings", "cuda-core", "cuda-toolkit", "torch", "cupy-cuda12x", "cupy-cuda13x")


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _versions() -> list[tuple[str, str]]:
    rows = [("burt_numba", __version__), ("Python", platform.python_version()), ("platform", platform.platform())]
    rows += [(name, _installed(name) or "not installed") for name in _REQUIRED]
    rows += [(name, found) for name in _OPTIONAL if (found := _installed(name)) is not None]
    return rows


def _driver(simulated: bool) -> list[tuple[str, str]]:
    return [
        ("driver", driver.driver_version() or "none found"),
        ("CUDA supported", driver.cuda_version() or "–"),
        ("target", "simulator" if simulated else "GPU"),
    ]


def _simulated_device() -> list[tuple[str, str]]:
    from burt_numba.simulator import limits

    return [
        ("launch limits", "those of compute capability 9.0"),
        ("threads a block", str(limits.MAX_THREADS_PER_BLOCK)),
        ("shared memory a block", f"{limits.max_shared_bytes()} bytes"),
    ]


def _device(device: driver.Device) -> list[tuple[str, str]]:
    major, minor = device.compute_capability
    shared = f"{device.shared_bytes_default} bytes, {device.shared_bytes_optin} when asked for"
    return [
        ("name", device.name),
        ("compute capability", f"{major}.{minor}"),
        ("memory", f"{device.memory_bytes / 2**30:.1f} GiB"),
        ("multiprocessors", str(device.multiprocessors)),
        ("threads a block", f"{device.threads_per_block}, in warps of {device.warp_size}"),
        ("shared memory a block", shared),
        ("shared memory a multiprocessor", f"{device.shared_bytes_per_multiprocessor} bytes"),
    ]


_LIMITS = [
    ("types", "float32, float16; memories float32; the mask of attention_softmax also bool"),
    ("offsets", "64-bit: arrays of more than 2^31 elements"),
    ("grid", "folded past 65,535 blocks in y and z"),
]


def info() -> int:
    simulated = driver.choose_target()
    sections = [("Versions", _versions()), ("CUDA driver", _driver(simulated))]
    if simulated:
        sections.append(("Simulated device", _simulated_device()))
    sections += [(f"Device {ordinal}", _device(device)) for ordinal, device in enumerate(driver.devices())]
    sections.append(("Limits of this package", _LIMITS))
    for number, (title, rows) in enumerate(sections):
        if number:
            print()
        pairs(title, rows)
    return 0
