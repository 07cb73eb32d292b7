"""Launches: described once for a kind of call, then repeated with new pointers.

``cuda.jit``'s own launch converts every argument on every call. Here the arguments of a launch lie ready in one block
of memory, as the driver wants them; a call writes the pointers that may have changed and launches. In the simulator
the same description becomes views of NumPy arrays.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from burt_numba.host.compiling import KernelSpec
from burt_numba.host.memory import DEVICE_EVENT_CELLS
from burt_numba.target import SIMULATED, can_overlap_launches

_ITEM_BYTES = {"f4": 4, "f2": 2, "u1": 1, "i4": 4, "i8": 8}
TYPE_CODES = {"float32": "f4", "float16": "f2", "bool": "u1", "uint8": "u1", "int32": "i4", "int64": "i8"}
"""Element types of arrays as arguments have them, by NumPy's name."""


@dataclass(frozen=True)
class Array:
    """An array argument: a view of the operand with this number (None: an array of size 0)."""

    operand: int | None
    dtype: str
    shape: tuple[int, ...] = (0,)
    strides: tuple[int, ...] | None = None
    """In bytes; None: C-contiguous."""
    offset: int = 0
    """In bytes, from the operand's first element."""
    bare: bool = False
    """The kernel is given the address alone (``device.arguments``): of one axis, C-contiguous."""

    @property
    def type(self) -> str:
        if self.bare:
            return f"{self.dtype}*"
        return f"{self.dtype}:{len(self.shape)}{'C' if self.strides is None else 'A'}"

    def byte_strides(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        strides = []
        stride = _ITEM_BYTES[self.dtype]
        for size in reversed(self.shape):
            strides.append(stride)
            stride *= max(size, 1)
        return tuple(reversed(strides))


@dataclass(frozen=True)
class Number:
    """A scalar argument fixed with the launch."""

    value: float
    type: str


@dataclass(frozen=True)
class CallNumber:
    """A scalar argument that each call gives."""

    index: int
    type: str


class Errors:
    """The error buffer argument."""

    type = "i8:1C"


@dataclass(frozen=True)
class Launch:
    """One kernel launch, for any pointers."""

    kernel: KernelSpec
    grid: tuple[int, int]
    block: int
    arguments: tuple[Any, ...]
    shared_bytes: int = 0
    cluster: int = 1
    group: int = 1
    """More than 1: all blocks are resident at once, and each this many along x meet at ``group_barrier``."""
    follows: bool = False
    """May begin before the launch before it is complete: its kernel waits for that (``device.launch_order``)."""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(argument.type for argument in self.arguments)


class SimulatedLaunch:
    """A launch in the simulator. Operands are NumPy arrays."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __call__(self, operands: Sequence[Any], numbers: Sequence[float], errors: Any, stream: int) -> None:
        from burt_numba import simulator

        arguments = tuple(self._argument(argument, operands, numbers, errors) for argument in self.launch.arguments)
        simulator.launch(
            self.launch.kernel.dispatcher.py_func,
            self.launch.grid,
            self.launch.block,
            arguments,
            shared_bytes=self.launch.shared_bytes,
            cluster=self.launch.cluster,
            group=self.launch.group,
            name=self.launch.kernel.name,
        )

    @staticmethod
    def _argument(argument: Any, operands: Sequence[Any], numbers: Sequence[float], errors: Any) -> Any:
        if isinstance(argument, Array):
            dtype = np.dtype(argument.dtype)
            if argument.operand is None:
                return np.empty(argument.shape, dtype)
            return _view(operands[argument.operand], dtype, argument)
        if isinstance(argument, Errors):
            return errors.memory.array
        value = argument.value if isinstance(argument, Number) else numbers[argument.index]
        return np.dtype(argument.type).type(value)


def _view(operand: np.ndarray, dtype: np.dtype, argument: Array) -> np.ndarray:
    """The memory of ``operand`` seen as the argument describes it; checked to lie inside the operand's own extent."""
    interface = {
        "data": (operand.__array_interface__["data"][0] + argument.offset, not operand.flags.writeable),
        "shape": argument.shape,
        "strides": argument.byte_strides(),
        "typestr": dtype.str,
        "version": 3,
    }
    holder = _Holder(interface, operand)
    return np.asarray(holder)


class _Holder:
    """Keeps the operand alive behind a view made from an address."""

    def __init__(self, interface: dict[str, Any], operand: np.ndarray) -> None:
        self.__array_interface__ = interface
        self._operand = operand


class DeviceLaunch:
    """A launch on one device. Operands are device pointers.

    Arguments lie in 8-byte cells: an array is (0, 0, size, item bytes, pointer, shape..., strides...), as Numba passes
    it, and a bare one its pointer. The driver copies them before the launch call returns, so that a lock around writing
    and launching is enough for any number of threads.
    """

    def __init__(self, launch: Launch, device: int) -> None:
        from cuda.bindings import driver

        from burt_numba.host.compiling import compute_capability, kernel_handle

        values: list[tuple[str, float]] = []
        self._pointers: list[tuple[int, int, int]] = []
        self._errors_cell = -1
        self._numbers: list[tuple[int, int, bool]] = []
        for argument in launch.arguments:
            if isinstance(argument, (Array, Errors)):
                if isinstance(argument, Errors):
                    argument = Array(None, "i8", (DEVICE_EVENT_CELLS,))
                    self._errors_cell = len(values) + 4
                elif argument.operand is not None:
                    place = len(values) + (0 if argument.bare else 4)
                    self._pointers.append((place, argument.operand, argument.offset))
                if argument.bare:
                    values.append(("i8", 0))
                    continue
                size = 1
                for extent in argument.shape:
                    size *= extent
                items = (0, 0, size, _ITEM_BYTES[argument.dtype], 0, *argument.shape, *argument.byte_strides())
                values.extend(("i8", item) for item in items)
            elif isinstance(argument, Number):
                values.append((argument.type, argument.value))
            else:
                self._numbers.append((len(values), argument.index, argument.type == "f4"))
                values.append((argument.type, 0))
        self._cells = (ctypes.c_int64 * len(values))()
        self._floats = (ctypes.c_float * (2 * len(values))).from_buffer(self._cells)
        for place, (kind, value) in enumerate(values):
            if kind == "f4":
                self._floats[2 * place] = value
            else:
                self._cells[place] = int(value)
        start = ctypes.addressof(self._cells)
        self._parameters = (ctypes.c_void_p * len(values))(*(start + 8 * place for place in range(len(values))))
        self._lock = threading.Lock()
        self._written_numbers: Sequence[float] | None = None
        self._written_operands: Sequence[int] | None = None
        handle = kernel_handle(launch.kernel, launch.types, device, launch.shared_bytes)
        self._function = driver.CUfunction(handle)
        self._launch = launch
        self._driver_launch = driver.cuLaunchKernel
        self._success = driver.CUresult.CUDA_SUCCESS
        self._parameters_address = ctypes.addressof(self._parameters)
        self._geometry = (*launch.grid, 1, launch.block, 1, 1, launch.shared_bytes)
        self._config: Any = None
        self._config_stream = 0
        attributes = self._attributes(driver, can_overlap_launches(compute_capability(device)))
        if attributes:
            self._config = self._launch_config(driver, attributes)
            self._driver_launch = driver.cuLaunchKernelEx

    def _attributes(self, driver: Any, overlaps: bool) -> list[Any]:
        kinds = driver.CUlaunchAttributeID
        attributes = []
        if self._launch.cluster > 1:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attributes[-1].value.clusterDim.x = self._launch.cluster
            attributes[-1].value.clusterDim.y = 1
            attributes[-1].value.clusterDim.z = 1
        elif self._launch.group > 1:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attributes[-1].value.cooperative = 1
        if self._launch.follows and overlaps:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        return attributes

    def _launch_config(self, driver: Any, attributes: list[Any]) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *self._launch.grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._launch.block, 1, 1
        config.sharedMemBytes = self._launch.shared_bytes
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def __call__(self, operands: Sequence[int], numbers: Sequence[float], errors: Any, stream: int) -> None:
        cells = self._cells
        with self._lock:
            if operands != self._written_operands:
                for place, operand, offset in self._pointers:
                    cells[place] = operands[operand] + offset
                self._written_operands = operands
            if self._errors_cell >= 0:
                cells[self._errors_cell] = errors.pointer
            if numbers is not self._written_numbers:
                for place, index, is_float in self._numbers:
                    if is_float:
                        self._floats[2 * place] = numbers[index]
                    else:
                        cells[place] = int(numbers[index])
                self._written_numbers = numbers
            if self._config is None:
                (error,) = self._driver_launch(self._function, *self._geometry, stream, self._parameters_address, 0)
            else:
                if stream != self._config_stream:
                    self._config.hStream = stream
                    self._config_stream = stream
                (error,) = self._driver_launch(self._config, self._function, self._parameters_address, 0)
        if error is not self._success:
            raise RuntimeError(f"{self._launch.kernel.name}: launch failed: {error.name}")


def bare(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with all arrays but the error buffer bare."""
    return tuple(replace(each, bare=True) if isinstance(each, Array) else each for each in arguments)


def prepare(launch: Launch, device: int) -> SimulatedLaunch | DeviceLaunch:
    """A launch that is ready to go."""
    return SimulatedLaunch(launch) if SIMULATED else DeviceLaunch(launch, device)
