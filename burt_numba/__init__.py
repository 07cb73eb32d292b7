"""Entropy-bounded softmax and attention, decoding, gated memories and mixtures of experts, in Python on Numba CUDA.

Functions take Numba, CuPy, PyTorch and NumPy arrays alike. With NUMBA_ENABLE_CUDASIM=1 the same kernels run in a
simulator on the CPU. Importing the package imports nothing else; functions import what they need.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from burt_numba import kernels, reference, simulator
    from burt_numba.attention_softmax import attention_softmax
    from burt_numba.biencoder_attention import biencoder_attention
    from burt_numba.cifg import batched_cifg_update, cifg_update
    from burt_numba.constrained_softmax import constrained_softmax
    from burt_numba.flash_decoding import flash_decoding, flash_decoding_chunk
    from burt_numba.flash_decoding_reduce import flash_decoding_reduce, merge_attention_states
    from burt_numba.flash_launches import FLASH_DECODE_CHUNK_SIZE
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
    from burt_numba.moe import MoeDispatch, sparse_moe_combine, sparse_moe_dispatch
    from burt_numba.planning import plan

_FUNCTIONS = (
    "attention_softmax",
    "biencoder_attention",
    "constrained_softmax",
    "flash_decoding",
    "flash_decoding_reduce",
)
_ERRORS = (
    "BurtDimensionError",
    "BurtError",
    "BurtRuntimeError",
    "BurtSharedMemoryError",
    "BurtWarning",
    "ErrorBuffer",
    "check",
    "set_error_policy",
    "synchronous",
)
_HOMES = {
    **{name: f"burt_numba.{name}" for name in _FUNCTIONS},
    **dict.fromkeys(("batched_cifg_update", "cifg_update"), "burt_numba.cifg"),
    **dict.fromkeys(("MoeDispatch", "sparse_moe_combine", "sparse_moe_dispatch"), "burt_numba.moe"),
    **dict.fromkeys(_ERRORS, "burt_numba.host.errors"),
    "FLASH_DECODE_CHUNK_SIZE": "burt_numba.flash_launches",
    "flash_decoding_chunk": "burt_numba.flash_decoding",
    "merge_attention_states": "burt_numba.flash_decoding_reduce",
    "plan": "burt_numba.planning",
}

__all__ = [
    "FLASH_DECODE_CHUNK_SIZE",
    "BurtDimensionError",
    "BurtError",
    "BurtRuntimeError",
    "BurtSharedMemoryError",
    "BurtWarning",
    "ErrorBuffer",
    "MoeDispatch",
    "attention_softmax",
    "batched_cifg_update",
    "biencoder_attention",
    "check",
    "cifg_update",
    "constrained_softmax",
    "flash_decoding",
    "flash_decoding_chunk",
    "flash_decoding_reduce",
    "kernels",
    "merge_attention_states",
    "plan",
    "reference",
    "set_error_policy",
    "simulator",
    "sparse_moe_combine",
    "sparse_moe_dispatch",
    "synchronous",
]


class _Package(ModuleType):
    """The package, whose functions have the names of the modules they live in."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a module of the package sets it as an attribute here; the function of its name comes first.
        if name in _FUNCTIONS and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("kernels", "reference", "simulator"):
        return import_module(f"burt_numba.{name}")
    raise AttributeError(f"module 'burt_numba' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Without what the package itself imports, and with what it has not imported yet.
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
