"""The one place that imports the CUDA target of Numba.

Every module of the package takes ``cuda`` from here, so that another backend can follow, and so that the
simulator is in place before the first kernel is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import numpy as np

from burt_numba.target import SIMULATED


def _refuse_known_bad_pairs() -> None:
    """Raise before Numba fails in the middle of an import with an unrelated message.

    numba-cuda registers ``numpy.row_stack``, which NumPy 2.5 removed (NVIDIA/numba-cuda#907, closed as not planned).
    """
    if not hasattr(np, "row_stack"):
        raise ImportError(
            f"burt_numba: NumPy {np.__version__} has no numpy.row_stack, which numba-cuda "
            f"{metadata.version('numba-cuda')} needs; install 'numpy<2.5'"
        )


_refuse_known_bad_pairs()

from numba import cuda  # noqa: E402
from numba.cuda import types  # noqa: E402
from numba.cuda.core import config as _config  # noqa: E402

if bool(_config.ENABLE_CUDASIM) != SIMULATED:
    raise ImportError(
        "burt_numba: NUMBA_ENABLE_CUDASIM was changed after Numba or burt_numba was imported; set it before either"
    )

if SIMULATED:
    from burt_numba.simulator import install as _install_simulator

    _install_simulator()


def lower(kernel, signature, capability: tuple[int, int], launch_bounds: tuple[int, int] | None = None):
    """Type and lower a ``cuda.jit`` kernel, with or without a GPU in the machine, to what `to_ptx` takes.

    It serves every compute capability from this one on. Numba asks the current device for the capability of a device
    function even when the kernel's was given, so that without a GPU it cannot compile one; here it is told. numba-cuda
    is pinned to the line this was written against.
    """
    from types import SimpleNamespace

    from numba.cuda import compiler, dispatcher
    from numba.cuda.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        ask_device = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        try:
            library, _ = compiler._compile_pyfunc_with_fixup(
                kernel.py_func, signature, device=False, abi="numba", cc=capability, launch_bounds=launch_bounds
            )
        finally:
            dispatcher.get_current_device = ask_device
        # A device function that several others call is listed, printed and parsed for each of them.
        library._llvm_strs = [str(module) for module in dict.fromkeys(library.modules)]
    return library


def to_ptx(library, capabilities: Sequence[tuple[int, int]]) -> list[str]:
    """Compile what `lower` made to PTX for compute capabilities."""
    from numba.cuda.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        return [_one(library.get_asm_strs(cc=capability)) for capability in capabilities]


def _one(sources: list[str]) -> str:
    if len(sources) != 1:
        raise RuntimeError(f"expected the PTX of a kernel in one piece, got {len(sources)}")
    return sources[0]


__all__ = ["SIMULATED", "cuda", "lower", "to_ptx", "types"]
