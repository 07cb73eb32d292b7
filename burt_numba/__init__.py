"""Entropy-bounded softmax and matrix-memory kernels in pure Python, on Numba CUDA.

Functions take Numba, CuPy, PyTorch and NumPy arrays alike. With NUMBA_ENABLE_CUDASIM=1 the same kernels run in a
simulator on the CPU. Importing this package imports NumPy, but neither Numba nor another array library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from burt_numba.attention_softmax import attention_softmax
from burt_numba.constrained_softmax import constrained_softmax
from burt_numba.host.errors import (
    BurtDimensionError,
    BurtError,
    BurtRuntimeError,
    BurtSharedMemoryError,
    BurtWarning,
    ErrorBuffer,
    check,
    set_error_policy,
    synchronous,
)
from burt_numba.planning import plan

if TYPE_CHECKING:
    from burt_numba import kernels, reference, simulator

__version__ = "0.1.0"

__all__ = [
    "BurtDimensionError",
    "BurtError",
    "BurtRuntimeError",
    "BurtSharedMemoryError",
    "BurtWarning",
    "ErrorBuffer",
    "attention_softmax",
    "check",
    "constrained_softmax",
    "kernels",
    "plan",
    "reference",
    "set_error_policy",
    "simulator",
    "synchronous",
]


def __getattr__(name: str) -> Any:
    if name in ("kernels", "reference", "simulator"):
        return import_module(f"burt_numba.{name}")
    raise AttributeError(f"module 'burt_numba' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
