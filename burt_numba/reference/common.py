"""What the references share: entropy, a softmax that knows absent elements, and the record of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NAN_INPUT = 1
INF_INPUT = 2
ENTROPY_OVERFLOW = 3
CAPACITY_FULL = 5
DIM_MISMATCH = 6

FLOAT32_MAX = float(np.finfo(np.float32).max)


def entropy(p: ArrayLike) -> NDArray[np.float64]:
    """Entropy over the last axis, in nats, in float64, with 0 log 0 = 0.

    Parameters
    ----------
    p : array_like, shape [..., C]
        Probabilities. They are taken as they are, not normalised first.

    Returns
    -------
    ndarray of float64, shape [...]

    Examples
    --------
    >>> float(entropy([0.5, 0.5, 0.0]))
    0.6931471805599453
    """
    p = np.asarray(p, dtype=np.float64)
    positive = p > 0
    return 0.0 - np.sum(p * np.log(p, out=np.zeros_like(p), where=positive), axis=-1)


def softmax_of_present(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Softmax over the last axis where -inf is absent; a row with nothing present gives zeros."""
    present = z > -np.inf
    row_max = np.max(z, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(np.subtract(z, row_max, out=np.full_like(z, -np.inf), where=present))
    total = np.sum(weights, axis=-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def summarise_events(*arrays: Mapping[int, NDArray[np.bool_]]) -> tuple[dict[int, int], tuple[int, int] | None]:
    """Count the events of each code, and find the lowest flat index with its code.

    Parameters
    ----------
    *arrays : mappings of code to a bool array
        One for each array in which events are looked for. True where the event took place: the bool array has one entry
        for each unit that the code counts, an element for codes 1 and 2, a row for code 3, a token for code 5.

    Returns
    -------
    counts : dict of code to int
        Only the codes that occurred, over all arrays together.
    first : (index, code) or None
        The lowest index that one of the arrays has; of two codes at one index, the lower code.
    """
    counts: dict[int, int] = {}
    firsts = []
    for events in arrays:
        for code, where in events.items():
            count = int(np.count_nonzero(where))
            if count:
                counts[code] = counts.get(code, 0) + count
                firsts.append((int(np.argmax(where)), code))
    return counts, min(firsts, default=None)


def non_finite_events(array: NDArray[np.float64], used: ArrayLike = True) -> dict[int, NDArray[np.bool_]]:
    """NaN and infinities as events, of the elements that are used."""
    return {NAN_INPUT: np.isnan(array) & used, INF_INPUT: np.isinf(array) & used}


def require_shape(holds: bool, function: str, name: str, expected: str, array: NDArray[Any]) -> None:
    """ValueError with the shape that was expected, unless it holds."""
    if not holds:
        raise ValueError(f"{function}: {name}: expected shape {expected}, got {list(array.shape)}")


def require_search_parameters(
    function: str, temperature_min: float, temperature_max: float, max_iterations: int
) -> None:
    """ValueError where there are no temperatures or no steps to search with."""
    if not temperature_min > 0:
        raise ValueError(f"{function}: temperature_min: expected a positive number, got {temperature_min}")
    if not temperature_min <= temperature_max:
        raise ValueError(f"{function}: temperature_max: expected at least {temperature_min}, got {temperature_max}")
    if max_iterations < 1:
        raise ValueError(f"{function}: max_iterations: expected at least 1, got {max_iterations}")


def finite(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """The array with 0 in place of NaN and infinities."""
    return np.where(np.isfinite(array), array, 0.0)


def float32_scores(q: NDArray[np.float64], keys: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """(q · k) scale, [..., Q, K] of [..., Q, D] and [..., K, D]; an infinity or NaN where float32 would hold one."""
    with np.errstate(over="ignore", invalid="ignore"):
        dots = q @ keys.swapaxes(-2, -1)
        if _largest(q) * _largest(keys) > FLOAT32_MAX:
            dots = sum(
                (in_float32(q[..., d, None] * keys[..., None, :, d]) for d in range(q.shape[-1])), np.zeros(dots.shape)
            )
        return in_float32(in_float32(dots) * scale)


def _largest(array: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(array), initial=0.0))


def in_float32(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """The array with infinities beyond the range of float32; not rounded."""
    return np.where(np.abs(array) > FLOAT32_MAX, np.copysign(np.inf, array), array)
