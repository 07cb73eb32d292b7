"""Checks of arguments, and their messages: ``function: argument: expected ..., got ...``."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from burt_numba.host.arrays import Description, family_of
from burt_numba.host.errors import BurtDimensionError

FLOATING = ("float32", "float16")

_TO_FLOAT = {"float64": "array.astype(np.float32), or tensor.float()", "bfloat16": "tensor.float()"}
_TO_INTEGER = "array.astype(np.int32), or tensor.int()"


def describe(function: str, name: str, array: Any) -> Description:
    """The description of an argument that must be an array."""
    family = family_of(array)
    if family is None:
        raise TypeError(
            f"{function}: {name}: expected an array (Numba, CuPy, PyTorch, NumPy or one with "
            f"__cuda_array_interface__), got {type(array).__name__}"
        )
    try:
        return family.describe(array)
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"{function}: {name}: {problem}") from None


def require_dtype(function: str, name: str, array: Description, accepted: Sequence[str]) -> None:
    """TypeError unless the array's type is among those accepted."""
    if array.dtype not in accepted:
        hint = _TO_FLOAT.get(array.dtype) if "float32" in accepted else None
        if "int32" in accepted and array.dtype != "bool":
            hint = _TO_INTEGER
        convert = f" (convert with {hint})" if hint else ""
        raise TypeError(f"{function}: {name}: expected {' or '.join(accepted)}, got {array}{convert}")


def require_shape(function: str, name: str, array: Description, shape: tuple[int, ...]) -> None:
    """BurtDimensionError unless the array has exactly this shape."""
    if array.shape != shape:
        raise BurtDimensionError(f"{function}: {name}: expected shape {shape}, got {array}")


def require_output(function: str, name: str, array: Description, shape: tuple[int, ...], dtype: str) -> None:
    """An array to write to: type, shape, C-contiguous, writable."""
    require_dtype(function, name, array, (dtype,))
    require_shape(function, name, array, shape)
    if not array.is_contiguous:
        raise BurtDimensionError(
            f"{function}: {name}: expected a C-contiguous array, got {array} with strides of {array.strides} bytes"
        )
    if not array.writable:
        raise BurtDimensionError(f"{function}: {name}: expected a writable array, got a read-only {array}")


def require_number(function: str, name: str, value: Any, lowest: float, strict: bool = False) -> float:
    """A real number not below ``lowest``; infinity is one."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise BurtDimensionError(f"{function}: {name}: expected a number that a float holds, got {value!r}") from None
    except Exception:  # whatever the conversion of another library's object raises
        raise TypeError(f"{function}: {name}: expected a number, got {type(value).__name__}") from None
    if math.isnan(number) or number < lowest or (strict and number == lowest):
        relation = "above" if strict else "of at least"
        raise BurtDimensionError(f"{function}: {name}: expected a number {relation} {lowest:g}, got {value!r}")
    return number


def require_count(function: str, name: str, value: Any, lowest: int) -> int:
    """An integer not below ``lowest``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name}: expected an integer, got {type(value).__name__} {value!r:.60}") from None
    if number < lowest:
        raise BurtDimensionError(f"{function}: {name}: expected an integer of at least {lowest}, got {number}")
    return number


def require_flag(function: str, name: str, value: Any) -> bool:
    """True or False; integers and NumPy's booleans will do."""
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        return bool(value)
    raise TypeError(f"{function}: {name}: expected True or False, got {type(value).__name__}")


def one_device(function: str, arrays: Sequence[tuple[str, Description]]) -> int | None:
    """The device all arrays are on; None for host memory."""
    name, first = arrays[0]
    for other_name, other in arrays[1:]:
        if other.device == first.device:
            continue
        places = [
            f"{n} is a {a.family.name} array " + ("in host memory" if a.device is None else f"on device {a.device}")
            for n, a in ((name, first), (other_name, other))
        ]
        raise BurtDimensionError(
            f"{function}: {other_name}: expected all arrays in one place, but {' and '.join(places)}"
        )
    return first.device
