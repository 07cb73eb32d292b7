"""The scalar part of the iteration for the largest singular value: Rayleigh-Ritz in three dimensions.

With A = C'ᵀC' and an orthonormal basis (v, w, p) of a subspace, the largest eigenvalue of the 3 x 3 matrix of the
products C'v, C'w, C'p is the best lower bound of sigma² that the subspace holds. docs/cifg.md has the iteration.
"""

from __future__ import annotations

import math

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.numeric import FLOAT32_MAX, maximum, minimum

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_THIRD = np.float32(1.0 / 3.0)
_INFINITY = np.float32(np.inf)

WARM_FACTOR, COLD_FACTOR, CHECK_FACTOR = np.float32(2.0), np.float32(1000.0), np.float32(10.0)
"""1 over the overlap with the top vector that is assumed of a carried vector; of a pseudo-random one, times sqrt(d).

One pseudo-random vector in a thousand has less than the second: what it does not see would stay above the bound. One in
twelve has less than the third, which a check of the result takes: it looks from another start, and must not report what
is within the bound.
"""
ROUNDING_UP = np.float32(1.0 + 1e-5)
"""On a proven bound, for the rounding of what it is made from."""
_SMALLEST_SQUARES, _LARGEST_SQUARES = np.float32(1e-12), np.float32(1e16)


@cuda.jit(device=True)
def is_in_range(squares):
    """True for sums of squares whose own squares, as fourth powers of sigma, stay well inside float32."""
    return _SMALLEST_SQUARES <= squares <= _LARGEST_SQUARES


@cuda.jit(device=True)
def weyl_bound(before, most_kept, writes, hidden_norm):
    """The bound of sigma that one of the memory ``before`` the update proves; infinity where it is none."""
    bound = (most_kept * before + math.sqrt(writes) * hidden_norm) * ROUNDING_UP
    return bound if before >= _ZERO and bound <= FLOAT32_MAX else _INFINITY


@cuda.jit(device=True)
def top_pair_of_two(vv, vw, ww):
    """(largest eigenvalue, its unit eigenvector) of the symmetric matrix [[vv, vw], [vw, ww]]; (1, 0) of v I."""
    half = np.float32(0.5) * (vv - ww)
    root = math.sqrt(half * half + vw * vw)
    x0 = root + abs(half)
    if not (x0 > _ZERO):
        return vv, _ONE, _ZERO
    norm = _ONE / math.sqrt(x0 * x0 + vw * vw)
    theta = np.float32(0.5) * (vv + ww) + root
    if half >= _ZERO:
        return theta, x0 * norm, vw * norm
    return theta, vw * norm, x0 * norm


@cuda.jit(device=True)
def _cross(x0, x1, x2, y0, y1, y2):
    """(the cross product, its squared length)."""
    z0 = x1 * y2 - x2 * y1
    z1 = x2 * y0 - x0 * y2
    z2 = x0 * y1 - x1 * y0
    return z0, z1, z2, z0 * z0 + z1 * z1 + z2 * z2


@cuda.jit(device=True)
def _short_cosine(x):
    """cos on [0, pi / 3] by its series, to float32. (The library's takes local memory to reduce any angle.)"""
    square = x * x
    result = np.float32(-1 / 3628800)
    result = result * square + np.float32(1 / 40320)
    result = result * square - np.float32(1 / 720)
    result = result * square + np.float32(1 / 24)
    result = result * square - np.float32(0.5)
    return result * square + _ONE


@cuda.jit(device=True)
def top_pair(vv, vw, ww, vp, wp, pp):
    """(largest eigenvalue, its unit eigenvector) of the symmetric matrix [[vv, vw, vp], [vw, ww, wp], [vp, wp, pp]].

    The matrix is positive semidefinite. (1, 0, 0) where it is zero, or where nothing tells its eigenvectors apart.
    """
    trace = vv + ww + pp
    if not (trace > _ZERO):
        return _ZERO, _ONE, _ZERO, _ZERO
    scale = _ONE / trace
    vv *= scale
    vw *= scale
    ww *= scale
    vp *= scale
    wp *= scale
    pp *= scale
    # Smith's trigonometric solution, about the mean of the eigenvalues, which is 1/3 now.
    a = vv - _THIRD
    b = ww - _THIRD
    c = pp - _THIRD
    spread = math.sqrt((a * a + b * b + c * c + _TWO * (vw * vw + vp * vp + wp * wp)) / np.float32(6.0))
    if not (spread > np.float32(1e-7)):
        return vv * trace, _ONE, _ZERO, _ZERO
    determinant = a * (b * c - wp * wp) - vw * (vw * c - wp * vp) + vp * (vw * wp - b * vp)
    cosine = minimum(maximum(np.float32(0.5) * determinant / (spread * spread * spread), -_ONE), _ONE)
    top = _THIRD + _TWO * spread * _short_cosine(math.acos(cosine) * _THIRD)
    # The eigenvector is orthogonal to all rows of M - top: the longest of the cross products of two of them.
    r0 = vv - top
    r1 = ww - top
    r2 = pp - top
    x0, x1, x2, longest = _cross(vw, r1, wp, vp, wp, r2)
    y0, y1, y2, length = _cross(r0, vw, vp, vp, wp, r2)
    if length > longest:
        x0, x1, x2, longest = y0, y1, y2, length
    y0, y1, y2, length = _cross(r0, vw, vp, vw, r1, wp)
    if length > longest:
        x0, x1, x2, longest = y0, y1, y2, length
    if not (longest > np.float32(1e-24)):
        if ww > vv and ww >= pp:
            return ww * trace, _ZERO, _ONE, _ZERO
        if pp > vv:
            return pp * trace, _ZERO, _ZERO, _ONE
        return vv * trace, _ONE, _ZERO, _ZERO
    norm = _ONE / math.sqrt(longest)
    return top * trace, x0 * norm, x1 * norm, x2 * norm


@cuda.jit(device=True)
def pseudo_random(index, seed):
    """A fixed number in [-1, 1) for each index: no matrix that was not made for it can hide from such a vector."""
    # Numba widens products of 32-bit integers; each is cut off again, as NumPy's are.
    bits = np.uint32(np.uint32(index) * np.uint32(2654435761) + np.uint32(seed))
    bits = np.uint32((bits ^ (bits >> np.uint32(15))) * np.uint32(2246822519))
    bits = np.uint32((bits ^ (bits >> np.uint32(13))) * np.uint32(3266489917))
    bits = np.uint32(bits ^ (bits >> np.uint32(16)))
    return np.float32(np.int32(bits)) * np.float32(2.0**-31)
