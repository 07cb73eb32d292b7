"""Put the simulator in place of numba-cuda's: the one module that knows how numba-cuda's simulator is built."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from greenlet import getcurrent

from burt_numba.simulator import allocations, checking, cuda_api, limits, scheduler
from burt_numba.simulator.errors import SimulatorError, UninitializedReadError
from burt_numba.simulator.threads import Thread

__tracebackhide__ = True  # pytest shows the kernel and the message

# Module, name: what is used below and not documented by numba-cuda.
_PRIVATE_NAMES = (
    ("numba.cuda.core.config", "ENABLE_CUDASIM"),
    ("numba.cuda.core.sigutils", "is_signature"),
    ("numba.cuda.simulator.api", "jit"),
    ("numba.cuda.simulator.args", "ArgHint"),
    ("numba.cuda.simulator.cudadrv.devicearray", "FakeCUDAArray"),
    ("numba.cuda.simulator.kernel", "FakeCUDAKernel"),
)
_KNOWN_VERSION = "0.30.4"

# A cooperative grid must fit the GPU at once. Here it takes one greenlet a thread, and a few blocks show what many do.
_COOPERATIVE_BLOCKS = 4
_FORALL_THREADS = 128


def _private_names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    missing = []
    for module_name, name in _PRIVATE_NAMES:
        try:
            found[name] = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError):
            missing.append(f"{module_name}.{name}")
    if not missing and not hasattr(found["FakeCUDAArray"](np.zeros(1)), "_ary"):
        missing.append("numba.cuda.simulator.cudadrv.devicearray.FakeCUDAArray._ary")
    if missing:
        try:
            version = importlib.metadata.version("numba-cuda")
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        raise ImportError(
            f"burt_numba.simulator: numba-cuda {version} is installed, expected one laid out like {_KNOWN_VERSION}; "
            f"it lacks {', '.join(missing)}"
        )
    return found


class Overload:
    """The little of a compiled kernel that makes sense here."""

    def max_cooperative_grid_blocks(self, blockdim: Any, dynsmemsize: int = 0) -> int:
        return _COOPERATIVE_BLOCKS


class Overloads(dict):
    """One `Overload` for any signature: nothing is compiled."""

    def __missing__(self, signature: Any) -> Overload:
        return Overload()


class ConfiguredKernel:
    """A kernel with its launch settings: what ``kernel[grid, block, stream, shared]`` gives."""

    __slots__ = ("block", "dispatcher", "grid", "shared_bytes", "stream")

    def __init__(self, dispatcher: SimulatedKernel, grid: Any, block: Any, stream: Any = 0, shared_bytes: int = 0):
        self.dispatcher = dispatcher
        self.grid = limits.extents(grid, "grid")
        self.block = limits.extents(block, "block")
        self.stream = stream
        self.shared_bytes = shared_bytes
        limits.check_launch(self.grid, self.block, shared_bytes, 1)

    @property
    def py_func(self) -> Callable[..., None]:
        return self.dispatcher.py_func

    def __call__(self, *args: Any) -> None:
        after: list[Callable[[], Any]] = []
        converted = tuple(self._argument(arg, after) for arg in args)
        scheduler.launch(
            self.dispatcher.py_func,
            self.grid,
            self.block,
            converted,
            shared_bytes=self.shared_bytes,
            name=self.dispatcher.__name__,
        )
        for write_back in after:
            write_back()

    def _argument(self, arg: Any, after: list[Callable[[], Any]]) -> Any:
        """What the kernel sees of an argument: arrays themselves, without a copy, and scalars as they are."""
        for extension in self.dispatcher.extensions:
            _, arg = extension.prepare_args(None, arg, stream=self.stream, retr=after)
        if isinstance(arg, _names["ArgHint"]):
            arg = arg.value
        if isinstance(arg, _names["FakeCUDAArray"]):
            arg = arg._ary
        elif isinstance(arg, tuple):
            parts = [self._argument(part, after) for part in arg]
            return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
        if type(arg) is np.ndarray and arg.dtype.names:
            # Numba reads a field of a record as an attribute.
            arg = arg.view(np.recarray)
        return arg


class SimulatedKernel:
    """A kernel made by ``cuda.jit``. Launch settings never live on it."""

    __name__: str

    def __init__(self, function: Callable[..., None], extensions: Any = ()):
        self.py_func = function
        self.extensions = list(extensions)
        functools.update_wrapper(self, function)

    def __getitem__(self, configuration: Any) -> ConfiguredKernel:
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            raise ValueError(
                f"kernel {self.__name__}: expected kernel[grid, block, stream, shared_bytes], "
                f"the last two optional, got [{configuration!r}]"
            )
        return ConfiguredKernel(self, *configuration)

    def __call__(self, *args: Any) -> Any:
        # A kernel called from device code is a device function.
        if isinstance(getcurrent(), Thread):
            return self.py_func(*args)
        raise ValueError(f"kernel {self.__name__}: launched without a configuration; use kernel[grid, block](...)")

    def __repr__(self) -> str:
        return f"<simulated kernel {self.__name__}>"

    def forall(self, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> Callable[..., None]:
        if ntasks < 0:
            raise ValueError(f"kernel {self.__name__}: forall: expected at least 0 tasks, got {ntasks}")
        if ntasks == 0:
            return lambda *args: None
        threads = tpb or min(ntasks, _FORALL_THREADS)
        return self[-(-ntasks // threads), threads, stream, sharedmem]

    def specialize(self, *args: Any) -> SimulatedKernel:
        return self

    def compile(self, signature: Any) -> Overload:
        return Overload()

    def bind(self) -> None:
        pass

    @property
    def overloads(self) -> Overloads:
        return Overloads()


def jit(func_or_sig: Any = None, device: bool = False, **options: Any) -> Any:
    """``cuda.jit``: a kernel, or the function itself for ``device=True``, whose calls then cost nothing extra."""
    if options.get("link"):
        raise NotImplementedError("cuda.jit: link: compiled code cannot be called in the simulator")
    if options.get("boundscheck"):
        raise NotImplementedError("cuda.jit: boundscheck is not supported for CUDA")

    def decorate(function: Any) -> Any:
        function = getattr(function, "py_func", function)
        if device:
            function.py_func = function
            return function
        return SimulatedKernel(function, options.get("extensions", ()))

    if func_or_sig is None or isinstance(func_or_sig, list) or _names["is_signature"](func_or_sig):
        return decorate
    return decorate(func_or_sig)


def _configure_earlier(kernel: Any, configuration: Any) -> ConfiguredKernel:
    return SimulatedKernel(kernel.fn, kernel.extensions)[configuration]


def _call_earlier(kernel: Any, *args: Any) -> Any:
    if kernel._device:
        return kernel.fn(*args)
    return SimulatedKernel(kernel.fn, kernel.extensions)(*args)


# --- device arrays --------------------------------------------------------------------------------------------------


def is_device_array(thing: Any) -> bool:
    """Whether this is what ``cuda.device_array`` and its like give in the simulator."""
    return isinstance(thing, _private_names()["FakeCUDAArray"])


def host_memory(array: Any) -> np.ndarray:
    """What such an array wraps."""
    return array._ary


def is_stream(thing: Any) -> bool:
    """Whether this is a stream of the simulator, where all work is done at once."""
    return type(thing).__module__.startswith("numba.cuda.simulator")


def _fresh(create: Callable[..., Any]) -> Callable[..., Any]:
    """``cuda.device_array`` and its like, whose memory nobody has written."""

    @functools.wraps(create)
    def created(*args: Any, **options: Any) -> Any:
        array = create(*args, **options)
        allocations.register_allocation(array._ary)
        return array

    return created


def _require_written(array: Any, operation: str) -> None:
    chosen = checking.current()
    if chosen is not None and chosen.uninitialized:
        missing = allocations.first_unwritten(array)
        if missing is not None:
            if not missing:
                raise UninitializedReadError(f"{operation}: read by the host, and never written")
            raise UninitializedReadError(
                f"{operation}: element [{', '.join(map(str, missing))}] of a device array of shape {array.shape} "
                "was never written"
            )


def _part(array: Any, index: Any) -> Any:
    """What an index names as an array on the same memory, also where it names one element."""
    part = array[index]
    if isinstance(part, np.ndarray):
        return part
    return array[(*index, ...) if isinstance(index, tuple) else (index, ...)]


def _watch_host_accesses(device_array: Any) -> None:
    """What the host reads of device memory was written, and what it writes is."""
    copy_to_host, copy_to_device = device_array.copy_to_host, device_array.copy_to_device
    get, put = device_array.__getitem__, device_array.__setitem__

    @functools.wraps(copy_to_host)
    def checked_copy_to_host(self: Any, *args: Any, **options: Any) -> Any:
        _require_written(self._ary, "copy_to_host")
        return copy_to_host(self, *args, **options)

    @functools.wraps(copy_to_device)
    def noted_copy_to_device(self: Any, *args: Any, **options: Any) -> Any:
        result = copy_to_device(self, *args, **options)
        allocations.mark_written(self._ary)
        return result

    @functools.wraps(get)
    def checked_get(self: Any, index: Any) -> Any:
        result = get(self, index)
        if not isinstance(result, device_array):
            _require_written(_part(self._ary, index), f"device array[{index}]")
        return result

    @functools.wraps(put)
    def noted_put(self: Any, index: Any, value: Any) -> None:
        put(self, index, value)
        allocations.mark_written(_part(self._ary, index))

    device_array.copy_to_host, device_array.copy_to_device = checked_copy_to_host, noted_copy_to_device
    device_array.__getitem__, device_array.__setitem__ = checked_get, noted_put


_names: dict[str, Any] = {}


def install() -> None:
    """Give ``numba.cuda`` the simulator's names, and run kernels of its own simulator, made before, here too."""
    names = _private_names()
    if not names["ENABLE_CUDASIM"]:
        raise SimulatorError("install: set NUMBA_ENABLE_CUDASIM=1 before Numba is imported")
    _names.update(names)
    cuda: Any = sys.modules["numba.cuda"]
    for name, value in cuda_api.ATTRIBUTES.items():
        setattr(cuda, name, value)
    cuda.jit = jit
    for name in ("device_array", "device_array_like"):
        setattr(cuda, name, _fresh(getattr(cuda, name)))
    _watch_host_accesses(names["FakeCUDAArray"])
    # Properties are data descriptors, which come before the module's own attributes.
    cuda.__class__ = type("SimulatedCudaModule", (ModuleType,), dict(cuda_api.PROPERTIES))
    earlier = names["FakeCUDAKernel"]
    earlier.__getitem__ = _configure_earlier
    earlier.__call__ = _call_earlier
