"""Arrays of every family: Numba device arrays, CuPy, PyTorch, anything with ``__cuda_array_interface__``, and NumPy.

A family answers for one type of array. ``key`` is what a prepared call is remembered by, so it must be cheap and hold
all that a launch depends on but the pointer; ``describe`` is the full account, asked for once a key.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from burt_numba.host.memory import device_count
from burt_numba.target import SIMULATED


class Description(NamedTuple):
    """What an array is, whatever its family."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: str
    """NumPy's name, or the family's own for types NumPy lacks (``bfloat16``)."""
    device: int | None
    """None: host memory."""
    writable: bool
    family: Family

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def is_contiguous(self) -> bool:
        """C-contiguous; the strides of axes of size 1, and of an empty array, do not matter."""
        if 0 in self.shape:
            return True
        expected = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def extent(self) -> tuple[int, int]:
        """(first, one past the last) byte used, from the first element."""
        if 0 in self.shape:
            return 0, 0
        spans = [stride * (size - 1) for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Family:
    """One kind of array. ``on_host``: its memory is host memory (a simulated device reads that as it is)."""

    name = ""
    on_host = False

    def key(self, array: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def describe(self, array: Any) -> Description:
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def inspect(self, array: Any) -> tuple[tuple[Any, ...], int]:
        """Key and pointer in one call, which is made for each operand of each call."""
        return self.key(array), self.pointer(array)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        raise NotImplementedError

    def stream(self, array: Any, device: int) -> int:
        """The handle of the stream to launch on when the caller names none: the library's current one."""
        return 0

    def as_numpy(self, array: Any) -> np.ndarray:
        """The host memory of an array as NumPy sees it (families on the host)."""
        raise TypeError(f"{self.name} arrays are not in host memory")


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides = []
    for size in reversed(shape):
        strides.append(itemsize)
        itemsize *= size
    return tuple(reversed(strides))


def _dtype_name(dtype: np.dtype) -> str:
    """The name of a type in the machine's byte order, or the type string of one in the other."""
    return dtype.name if dtype.isnative else dtype.str


class NumPyFamily(Family):
    name = "NumPy"
    on_host = True

    def key(self, array: np.ndarray) -> tuple[Any, ...]:
        return "numpy", array.dtype, array.shape, array.strides, array.flags.writeable

    def describe(self, array: np.ndarray) -> Description:
        return Description(array.shape, array.strides, _dtype_name(array.dtype), None, array.flags.writeable, self)

    def pointer(self, array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> np.ndarray:
        array = np.empty(shape, dtype)
        if SIMULATED:
            from burt_numba.simulator import register_allocation

            register_allocation(array)
        return array

    def as_numpy(self, array: np.ndarray) -> np.ndarray:
        return array


class SimulatedDeviceFamily(NumPyFamily):
    """Device arrays of Numba's simulator, which wrap NumPy arrays."""

    name = "Numba"

    def __init__(self) -> None:
        from burt_numba.simulator.numba_bridge import host_memory

        self._host_memory = host_memory

    def key(self, array: Any) -> tuple[Any, ...]:
        return "numba", *super().key(self._host_memory(array))

    def describe(self, array: Any) -> Description:
        return super().describe(self._host_memory(array))._replace(family=self)

    def pointer(self, array: Any) -> int:
        return super().pointer(self._host_memory(array))

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        from burt_numba.backend import cuda

        return cuda.device_array(shape, dtype)

    def as_numpy(self, array: Any) -> np.ndarray:
        return self._host_memory(array)


class NumbaFamily(Family):
    name = "Numba"

    def key(self, array: Any) -> tuple[Any, ...]:
        return "numba", array.dtype, array.shape, array.strides, self._device(array)

    @staticmethod
    def _device(array: Any) -> int:
        return 0 if device_count() == 1 else pointer_device(array.device_ctypes_pointer.value or 0)

    def describe(self, array: Any) -> Description:
        return Description(array.shape, array.strides, _dtype_name(array.dtype), self._device(array), True, self)

    def pointer(self, array: Any) -> int:
        return array.device_ctypes_pointer.value or 0

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        from burt_numba.backend import cuda

        with cuda.gpus[device]:
            return cuda.device_array(shape, dtype)

    def stream(self, array: Any, device: int) -> int:
        return _PER_THREAD_STREAM if per_thread_default_stream() else 0


class TorchFamily(Family):
    name = "PyTorch"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._dtypes = {
            getattr(torch, name): name
            for name in (
                "float16",
                "bfloat16",
                "float32",
                "float64",
                "uint8",
                "int8",
                "int16",
                "int32",
                "int64",
                "bool",
            )
        }
        # What torch.compile's own generated code calls: a tenth of the time of current_stream().cuda_stream.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def key(self, array: Any) -> tuple[Any, ...]:
        return self.inspect(array)[0]

    def inspect(self, array: Any) -> tuple[tuple[Any, ...], int]:
        wants_gradient = array.requires_grad and self._wants_gradient(array)
        key = array.dtype, array.shape, array.stride(), array.device, array.is_neg(), wants_gradient
        return key, array.data_ptr()

    def _wants_gradient(self, array: Any) -> bool:
        return array.requires_grad and self._torch.is_grad_enabled()

    def describe(self, array: Any) -> Description:
        if array.layout is not self._torch.strided:
            raise TypeError(f"expected a strided tensor, got {array.layout}")
        if self._wants_gradient(array):
            raise TypeError("a tensor that requires grad, but no gradient is recorded here; pass tensor.detach()")
        if array.is_conj() or array.is_neg():
            raise TypeError("expected a plain tensor, got a lazy conjugate or negative view; call .resolve_neg()")
        if array.device.type not in ("cuda", "cpu"):
            raise TypeError(f"expected a tensor on a CUDA device or the CPU, got one on {array.device}")
        itemsize = array.element_size()
        dtype = self._dtypes.get(array.dtype, str(array.dtype).removeprefix("torch."))
        device = array.device.index if array.device.type == "cuda" else None
        strides = tuple(stride * itemsize for stride in array.stride())
        return Description(
            tuple(array.shape), strides, dtype, device, True, self if device is not None else TORCH_HOST()
        )

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device(device))

    def _device(self, device: int) -> Any:
        return self._torch.device("cuda", device)

    def stream(self, array: Any, device: int) -> int:
        if self._raw_stream is not None:
            return self._raw_stream(device)
        return self._torch.cuda.current_stream(device).cuda_stream


class TorchHostFamily(TorchFamily):
    """PyTorch tensors in host memory: what a simulated device reads as it is, and a real one through a copy."""

    on_host = True

    def stream(self, array: Any, device: int) -> int:
        return 0

    def _device(self, device: int) -> Any:
        return self._torch.device("cpu")

    def as_numpy(self, array: Any) -> np.ndarray:
        return array.detach().numpy()


class CuPyFamily(Family):
    name = "CuPy"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def key(self, array: Any) -> tuple[Any, ...]:
        return "cupy", array.dtype, array.shape, array.strides, array.device.id

    def describe(self, array: Any) -> Description:
        return Description(array.shape, array.strides, _dtype_name(array.dtype), array.device.id, True, self)

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        if self._cupy.cuda.runtime.getDevice() == device:
            return self._cupy.empty(shape, dtype)
        with self._cupy.cuda.Device(device):
            return self._cupy.empty(shape, dtype)

    def stream(self, array: Any, device: int) -> int:
        return self._cupy.cuda.get_current_stream().ptr


class InterfaceFamily(NumbaFamily):
    """Any other object with ``__cuda_array_interface__`` (versions 2 and 3). Results are Numba device arrays."""

    name = "CUDA array interface"

    def key(self, array: Any) -> tuple[Any, ...]:
        interface = array.__cuda_array_interface__
        pointer, read_only = interface["data"]
        strides = interface.get("strides")
        return (
            "interface",
            interface["typestr"],
            tuple(interface["shape"]),
            None if strides is None else tuple(strides),
            read_only,
            0 if device_count() == 1 else pointer_device(pointer),
            interface.get("mask") is None,
            interface.get("stream") == 0,
        )

    def describe(self, array: Any) -> Description:
        interface = array.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError("expected an array without a mask, got one whose __cuda_array_interface__ has a mask")
        if interface.get("stream") == 0:
            raise ValueError("__cuda_array_interface__: stream 0 is ambiguous; the protocol forbids it")
        pointer, read_only = interface["data"]
        dtype = np.dtype(interface["typestr"])
        shape = tuple(interface["shape"])
        strides = interface.get("strides")
        device = 0 if device_count() == 1 else pointer_device(pointer)
        name = _dtype_name(dtype) if dtype.kind != "V" else f"{dtype.str} (bfloat16 is not supported)"
        return Description(
            shape,
            contiguous_strides(shape, dtype.itemsize) if strides is None else tuple(strides),
            name,
            device,
            not read_only,
            self,
        )

    def pointer(self, array: Any) -> int:
        return array.__cuda_array_interface__["data"][0] or 0

    def stream(self, array: Any, device: int) -> int:
        # The protocol asks a consumer to be ordered after the work on this stream; launching there is.
        named = array.__cuda_array_interface__.get("stream")
        return super().stream(array, device) if named is None else named


_PER_THREAD_STREAM = 2
"""The driver's handle for the default stream of the calling thread."""


@cache
def per_thread_default_stream() -> bool:
    """True when Numba was told to use a default stream for each thread."""
    from numba.core import config

    return bool(config.CUDA_PER_THREAD_DEFAULT_STREAM)


def pointer_device(pointer: int) -> int:
    """The device that a pointer belongs to."""
    if pointer == 0:
        return 0
    from cuda.bindings import driver

    from burt_numba.host.memory import driver_call

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(driver_call(driver.cuPointerGetAttribute(attribute, pointer)))


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream of any library, or the integer itself."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if value is not None:
            value = getattr(value, "value", value)
            return int(value or 0)
    if SIMULATED:
        from burt_numba.simulator.numba_bridge import is_stream

        if is_stream(stream):
            return 0
    raise TypeError(f"stream: expected a stream of Numba, CuPy, PyTorch or CUDA Python, or its handle, got {stream!r}")


known_families: dict[type, Family] = {}
"""The families of the types met so far."""
_instances: dict[type[Family], Family] = {}


def _instance(family: type[Family]) -> Family:
    found = _instances.get(family)
    if found is None:
        found = _instances.setdefault(family, family())
    return found


def TORCH_HOST() -> Family:
    return _instance(TorchHostFamily)


def family_of(array: Any) -> Family | None:
    """The family that answers for an object, or None if it is no array."""
    found = known_families.get(type(array))
    if found is not None:
        return found
    found = _find_family(array)
    if found is not None:
        known_families[type(array)] = found
    return found


def _find_family(array: Any) -> Family | None:
    if isinstance(array, np.ndarray):
        # A masked array's mask would be ignored.
        return None if isinstance(array, np.ma.MaskedArray) else _instance(NumPyFamily)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _instance(TorchHostFamily if SIMULATED else TorchFamily)
    if type(array).__module__.startswith("numba.cuda."):
        # Either is loaded, or no array of it could exist.
        if SIMULATED:
            from burt_numba.simulator.numba_bridge import is_device_array

            return _instance(SimulatedDeviceFamily) if is_device_array(array) else None
        from numba.cuda.cudadrv.devicearray import DeviceNDArray

        return _instance(NumbaFamily) if isinstance(array, DeviceNDArray) else None
    if SIMULATED:
        return None
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return _instance(CuPyFamily)
    return _instance(InterfaceFamily) if hasattr(array, "__cuda_array_interface__") else None
