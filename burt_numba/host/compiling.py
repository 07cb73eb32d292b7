"""From a kernel and its argument types to machine code on a device: once a process, and once a machine.

Machine code is kept on disk under a key of everything it depends on: the sources of this package, the versions of
Numba and of the compiler's parts, the compute capability, the kernel, its constants and its argument types. A warm
start compiles nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from burt_numba.host.memory import allowed_in_capture, device_attribute, device_context, driver_call
from burt_numba.target import (
    LOWEST_CAPABILITY,
    SIMULATED,
    SIMULATED_CAPABILITY,
    SIMULATED_MULTIPROCESSORS,
    has_clusters,
)

_DTYPES = {"f4": "float32", "f2": "float16", "u1": "uint8", "i4": "int32", "i8": "int64"}


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel: how to build it, and with which constants."""

    name: str
    build: Callable[..., Any] = field(compare=False)
    constants: tuple[int, ...] = ()
    launch_bounds: tuple[int, int] | None = None
    """(most threads a block, least blocks a multiprocessor): the compiler's register limit."""
    clusters: bool = False
    """Launched in clusters of blocks, which not every device has."""
    lowest_capability: tuple[int, int] = LOWEST_CAPABILITY

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """True for the compute capabilities that this is launched on."""
        return capability >= self.lowest_capability and (has_clusters(capability) or not self.clusters)

    @property
    def dispatcher(self) -> Any:
        """The ``cuda.jit`` kernel."""
        return self.build(*self.constants)


def kernel_in(module: str, name: str) -> Callable[..., Any]:
    """What builds a kernel of a module of ``burt_numba.kernels``, which is imported only then.

    ``name`` is the kernel or, where a `KernelSpec` has constants, the function that makes it from them.
    """

    def build(*constants: int) -> Any:
        found = getattr(import_module(f"burt_numba.kernels.{module}"), name)
        return found(*constants) if constants else found

    return build


@dataclass(frozen=True)
class Specialisation:
    """A kernel with its argument types: what is compiled."""

    kernel: KernelSpec
    types: tuple[str, ...]
    """``f4 i4 i8`` for scalars; ``f4:1C`` for an array of float32 of one dimension, C-contiguous (``A``: strided).

    ``f4*``: for a pointer alone.
    """
    capability: tuple[int, int]

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def key(self) -> str:
        constants = "x".join(map(str, self.kernel.constants))
        return f"{self.kernel.name}[{constants}]({','.join(self.types)})"

    def ptx(self) -> str:
        """Compile to PTX; needs no GPU."""
        return compile_specialisation(self.kernel, self.types, (self.capability,))[0]


def lower_specialisation(kernel: KernelSpec, types: tuple[str, ...], capability: tuple[int, int]) -> Any:
    """Numba's code library of the kernel, for this compute capability and later ones: most of the time."""
    from burt_numba.backend import lower

    return lower(kernel.dispatcher, _numba_signature(types), capability, kernel.launch_bounds)


def compile_specialisation(
    kernel: KernelSpec, types: tuple[str, ...], capabilities: Sequence[tuple[int, int]]
) -> list[str]:
    """PTX for each compute capability."""
    from burt_numba.backend import to_ptx

    return to_ptx(lower_specialisation(kernel, types, min(capabilities)), capabilities)


def _numba_signature(names: Iterable[str]) -> Any:
    from burt_numba.backend import types

    def numba_type(name: str) -> Any:
        if name.endswith("*"):
            return types.CPointer(getattr(types, _DTYPES[name[:-1]]))
        scalar, _, layout = name.partition(":")
        element = getattr(types, _DTYPES[scalar])
        return types.Array(element, int(layout[:-1]), layout[-1]) if layout else element

    return types.void(*map(numba_type, names))


# --- the disk cache -----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """``BURT_NUMBA_CACHE_DIR``, else ``burt_numba`` in the user's cache folder."""
    chosen = os.environ.get("BURT_NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "burt_numba"


_COMPILER_PARTS = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-core",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)
"""Distributions that machine code depends on; with CUDA 12, NVVM comes in the compiler's own."""


def sources_key() -> str:
    """A hash of the package's own sources."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def _environment_key() -> str:
    """A hash of the package's own sources and of the versions that machine code depends on."""
    digest = hashlib.sha256(sources_key().encode())
    for distribution in _COMPILER_PARTS:
        try:
            digest.update(f"{distribution} {metadata.version(distribution)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{distribution} none".encode())
    return digest.hexdigest()


def _cache_file(specialisation: Specialisation) -> Path:
    text = (
        f"{_environment_key()} {specialisation.capability} {specialisation.key} {specialisation.kernel.launch_bounds}"
    )
    return cache_folder() / f"{specialisation.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"


def _read_cache(file: Path) -> tuple[str, bytes] | None:
    """(entry name, machine code), or None; a damaged file counts as missing."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    header, _, code = content.partition(b"\n")
    fields = header.split(b" ")
    if len(fields) != 2 or _checksum(fields[0], code) != fields[1]:
        return None
    return fields[0].decode(), code


def _checksum(entry: bytes, code: bytes) -> bytes:
    return hashlib.sha256(entry + b"\n" + code).hexdigest().encode()


def _write_cache(file: Path, entry: str, code: bytes) -> None:
    """Other processes see the whole file or none; a folder that cannot be written is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(entry.encode() + b" " + _checksum(entry.encode(), code) + b"\n" + code)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)
    except OSError:
        pass


# --- machine code on a device -------------------------------------------------------------------------------------


def machine_code(specialisation: Specialisation) -> tuple[str, bytes]:
    """(entry name, cubin), from the disk cache or compiled now."""
    file = _cache_file(specialisation)
    found = _read_cache(file)
    if found is not None:
        return found
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx = specialisation.ptx()
    match = re.search(r"\.visible \.entry\s+([\w$]+)", ptx)
    if match is None:
        raise RuntimeError(f"{specialisation.key}: no kernel in the compiled PTX")
    major, minor = specialisation.capability
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=f"sm_{major}{minor}"))
    code = linker.link("cubin").code
    _write_cache(file, match[1], code)
    return match[1], code


@cache
def compute_capability(device: int) -> tuple[int, int]:
    """(major, minor) of a device."""
    if SIMULATED:
        return SIMULATED_CAPABILITY
    return (
        device_attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
        device_attribute(device, "COMPUTE_CAPABILITY_MINOR"),
    )


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return SIMULATED_MULTIPROCESSORS if SIMULATED else device_attribute(device, "MULTIPROCESSOR_COUNT")


_loaded: dict[tuple[Specialisation, int], tuple[int, int]] = {}
"""Of a kernel on a device, its CUfunction and the bytes of its static shared memory."""
_load_lock = threading.Lock()
_DEFAULT_SHARED_BYTES = 48 * 1024


def kernel_handle(kernel: KernelSpec, types: tuple[str, ...], device: int, shared_bytes: int) -> int:
    """The CUfunction of a kernel on a device, ready for ``shared_bytes`` of dynamic shared memory.

    The opt-in above 48 KB, of which static shared memory takes a part, is raised to the device's limit once, never
    lowered: another thread may be about to launch.
    """
    from cuda.bindings import driver

    specialisation = Specialisation(kernel, types, compute_capability(device))
    attributes = driver.CUfunction_attribute
    # The first call may be inside a graph capture, and a lazily loaded function would be loaded by its launch.
    with _load_lock, device_context(device), allowed_in_capture():
        loaded = _loaded.get((specialisation, device))
        if loaded is None:
            entry, code = machine_code(specialisation)
            library = driver_call(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
            kernel_object = driver_call(driver.cuLibraryGetKernel(library, entry.encode()))
            function = driver_call(driver.cuKernelGetFunction(kernel_object))
            driver_call(driver.cuFuncLoad(function))
            static = driver_call(driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
            loaded = _loaded[specialisation, device] = (int(function), static)
        handle, static = loaded
        if shared_bytes + static > _DEFAULT_SHARED_BYTES:
            function = driver.CUfunction(handle)
            dynamic = device_attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") - static
            driver_call(
                driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic)
            )
    return handle


def all_specialisations(capability: tuple[int, int]) -> Iterable[Specialisation]:
    """Every kernel that runs on a device of this capability: what the functions launch, and the documented ones."""
    from burt_numba.planning import SPECIALISATIONS

    for specialisations in SPECIALISATIONS:
        for kernel, types in specialisations():
            if kernel.runs_on(capability):
                yield Specialisation(kernel, types, capability)
