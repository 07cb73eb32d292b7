"""The arithmetic functions of ``numba.cuda``: bit counts, fma, cbrt, selp and half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from burt_numba.simulator.collectives import Int32


def _width(value: Any) -> int:
    """The bits of the type that Numba gives an integer: a plain Python int is an int64."""
    if isinstance(value, np.integer):
        return 8 * value.dtype.itemsize
    return 32 if isinstance(value, Int32) else 64


def _unsigned(value: Any) -> tuple[int, int]:
    width = _width(value)
    return int(value) & ((1 << width) - 1), width


def popc(value: Any) -> int:
    return bin(_unsigned(value)[0]).count("1")


def clz(value: Any) -> int:
    bits, width = _unsigned(value)
    return width - bits.bit_length()


def brev(value: Any) -> int:
    bits, width = _unsigned(value)
    width = max(width, 32)
    return int(f"{bits:0{width}b}"[::-1], 2)


def ffs(value: Any) -> int:
    bits, _ = _unsigned(value)
    return (bits & -bits).bit_length()


def selp(test: Any, if_true: Any, if_false: Any) -> Any:
    return if_true if test else if_false


def cbrt(value: Any) -> Any:
    # In float64 whatever the type: NumPy's vectorised float32 routine is an ulp off on some processors.
    root = np.cbrt(np.float64(value))
    return type(value)(root) if isinstance(value, np.floating) else float(root)


def _odd_sum(product: float, addend: float) -> float:
    """``product + addend`` rounded to odd, from which a shorter format is rounded correctly.

    Rounding to nearest twice could go to the wrong side of a tie; the last bit of an odd sum says that it is not exact.
    """
    total = product + addend
    if not math.isfinite(total):
        return total
    part = total - product
    error = (product - (total - part)) + (addend - part)
    if error and not int(math.frexp(total)[0] * 2**53) & 1:
        total = math.nextafter(total, math.inf if error > 0 else -math.inf)
    return total


def _fma64(a: float, b: float, c: float) -> float:
    if hasattr(math, "fma") and math.isfinite(a) and math.isfinite(b) and math.isfinite(c):
        try:
            return math.fma(a, b, c)
        except OverflowError:
            return a * b + c
    plain = a * b + c
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return plain
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return plain
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once."""
    for scalar in (np.float32, np.float16):
        if type(a) is type(b) is type(c) is scalar:
            # The product of two float32 is exact in float64.
            return scalar(_odd_sum(float(a) * float(b), float(c)))
    return _fma64(float(a), float(b), float(c))


def _half(function: Callable[..., Any]) -> Any:
    """``function`` in float32, rounded to float16 once, as the hardware does."""

    def rounded(*values: Any) -> Any:
        return np.float16(function(*(np.float32(value) for value in values)))

    return staticmethod(rounded)


def _half_test(function: Callable[[Any, Any], Any]) -> Any:
    def test(a: Any, b: Any) -> bool:
        return bool(function(np.float16(a), np.float16(b)))

    return staticmethod(test)


class Fp16:
    """``cuda.fp16``: the functions of Numba's module that its documentation lists."""

    hadd = _half(lambda a, b: a + b)
    hsub = _half(lambda a, b: a - b)
    hmul = _half(lambda a, b: a * b)
    hdiv = _half(lambda a, b: a / b)
    hneg = _half(lambda a: -a)
    habs = _half(abs)
    hmax = _half(np.fmax)
    hmin = _half(np.fmin)
    hsin = _half(np.sin)
    hcos = _half(np.cos)
    hlog = _half(np.log)
    hlog2 = _half(np.log2)
    hlog10 = _half(np.log10)
    hexp = _half(np.exp)
    hexp2 = _half(np.exp2)
    hexp10 = _half(lambda a: np.float32(10) ** a)
    hsqrt = _half(np.sqrt)
    hrsqrt = _half(lambda a: 1 / np.sqrt(a))
    hrcp = _half(lambda a: 1 / a)
    hceil = _half(np.ceil)
    hfloor = _half(np.floor)
    htrunc = _half(np.trunc)
    hrint = _half(np.rint)
    htanh = _half(np.tanh)
    htanh_approx = _half(np.tanh)
    heq = _half_test(lambda a, b: a == b)
    hne = _half_test(lambda a, b: a != b)
    hge = _half_test(lambda a, b: a >= b)
    hgt = _half_test(lambda a, b: a > b)
    hle = _half_test(lambda a, b: a <= b)
    hlt = _half_test(lambda a, b: a < b)

    @staticmethod
    def hfma(a: Any, b: Any, c: Any) -> Any:
        return fma(np.float16(a), np.float16(b), np.float16(c))
