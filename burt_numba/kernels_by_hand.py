"""Documented kernels that no function launches: what they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

from burt_numba.host.compiling import KernelSpec, kernel_in
from burt_numba.target import DOCUMENTED_CIFG_THREADS

_CIFG_TYPES = {
    "cifg_update": (
        *("f4:2C", "f4:1C", "f4:1C", "f4:2C", "f4:1C"),
        *("i8", "i8", "f4"),
        *("f4:1C", "f4:1C", "f4:1C", "i4:1C", "i8:1C"),
    ),
    "cifg_projection": ("f4:3C", "f4:2C", "f4:2C", "f4", "i8", "i8", "f4:2C", "f4:1C", "i4:2C", "f4:3C", "i8:1C"),
    "batched_cifg_update": (
        *("f4:3C", "f4:2C", "f4:2C", "f4:2C", "f4:1C"),
        *("i8", "i8", "i8", "f4", "i8"),
        *("f4:2C", "f4:2C", "f4:2C", "i4:2C", "i8:1C"),
    ),
}


def _documented_cifg(name: str) -> KernelSpec:
    return KernelSpec(name, kernel_in("cifg", f"{name}_kernel"), (), (DOCUMENTED_CIFG_THREADS, 1))


def documented_specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Each documented kernel that stands apart from its function's own, with its argument types."""
    for name, types in _CIFG_TYPES.items():
        yield _documented_cifg(name), types
