"""softmax(z / T) at the highest temperature T <= T0 whose entropy is within the bound."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burt_numba.reference.common import (
    DIM_MISMATCH,
    ENTROPY_OVERFLOW,
    INF_INPUT,
    NAN_INPUT,
    entropy,
    require_search_parameters,
    softmax_of_present,
    summarise_events,
)

ENTROPY_TOLERANCE = 1e-6
"""In nats. A row is over the bound when its entropy exceeds the bound by more than this."""

BISECTION_STEPS = 64
"""Halvings of log T: enough to bring any bracket of float32 temperatures down to neighbouring float64 numbers."""


class ConstrainedSoftmaxResult(NamedTuple):
    """What `constrained_softmax` of the reference returns."""

    probabilities: NDArray[np.float64]
    """[..., C]"""
    temperature: NDArray[np.float64]
    """[...]"""
    entropy: NDArray[np.float64]
    """[...], in nats."""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event, with its code."""


def constrained_softmax(
    logits: ArrayLike,
    entropy_bound: ArrayLike = 0.20,
    temperature_min: float = 0.01,
    temperature_max: float = 10.0,
    max_iterations: int = 20,
    *,
    temperature: ArrayLike | None = None,
) -> ConstrainedSoftmaxResult:
    """Softmax over the last axis, sharpened until its entropy is within a bound.

    Parameters
    ----------
    logits : array_like, shape [..., C]
        -inf is a mask. NaN and +inf are recorded (codes 1 and 2) and taken as absent.
    entropy_bound : array_like, scalar or shape [...]
        In nats. In an array, an entry that is NaN or negative is recorded (code 6) and taken as 0.
    temperature_min, temperature_max : float
        The search starts at T0, which is 1 clipped into [temperature_min, temperature_max], and only goes down.
    max_iterations : int
        Checked, and otherwise without effect: this search is a plain bisection that runs until it has converged,
        so it takes more evaluations than the operation may.
    temperature : array_like, shape [...], optional
        Evaluate the distribution at these temperatures and search for none. An operation has some freedom in T
        (its entropy may lie anywhere in a narrow band), so results are compared at the T that it returned.

    Returns
    -------
    ConstrainedSoftmaxResult
        A row with nothing finite gives zeros, T0 and entropy 0. A row whose entropy at temperature_min is still
        over the bound by more than 1e-6 is returned at temperature_min and recorded (code 3).

    Raises
    ------
    ValueError
        For a parameter out of range, or C = 0.

    Examples
    --------
    >>> result = constrained_softmax([3.0, 2.0, 1.0, 0.0])
    >>> result.temperature.round(6), result.probabilities.round(6)
    (np.float64(0.327817), array([9.52669e-01, 4.50960e-02, 2.13500e-03, 1.01000e-04]))
    """
    z = np.asarray(logits, dtype=np.float64)
    if z.ndim < 1 or z.shape[-1] < 1:
        raise ValueError(f"constrained_softmax: logits: expected at least one class, got shape {z.shape}")
    require_search_parameters("constrained_softmax", temperature_min, temperature_max, max_iterations)
    rows = z.shape[:-1]
    bound, bad_bound = _row_bounds(entropy_bound, rows)

    is_nan, is_inf = np.isnan(z), np.isposinf(z)
    z = np.where(is_nan | is_inf, -np.inf, z)

    searched = at_bounded_entropy(z, bound, temperature_min, temperature_max, temperature)
    counts, first = summarise_events(
        {NAN_INPUT: is_nan, INF_INPUT: is_inf, ENTROPY_OVERFLOW: searched.unreachable, DIM_MISMATCH: bad_bound}
    )
    return ConstrainedSoftmaxResult(searched.probabilities, searched.temperature, searched.entropy, counts, first)


class BoundedSoftmax(NamedTuple):
    """What `at_bounded_entropy` returns; `unreachable` where even temperature_min leaves a row over its bound."""

    probabilities: NDArray[np.float64]
    temperature: NDArray[np.float64]
    entropy: NDArray[np.float64]
    unreachable: NDArray[np.bool_]


def at_bounded_entropy(
    z: NDArray[np.float64],
    bound: NDArray[np.float64],
    temperature_min: float,
    temperature_max: float,
    temperature: ArrayLike | None,
) -> BoundedSoftmax:
    """Softmax over the last axis, -inf being absent, with one bound a row; at given temperatures, if there are any."""
    rows = z.shape[:-1]
    start = np.full(rows, np.clip(1.0, temperature_min, temperature_max))
    coldest = np.full(rows, float(temperature_min))
    unreachable = entropy(_at_temperature(z, coldest)) > bound + ENTROPY_TOLERANCE
    if temperature is None:
        chosen = _bisect(z, bound, coldest, start)
    else:
        chosen = np.broadcast_to(np.asarray(temperature, dtype=np.float64), rows)
    p = _at_temperature(z, chosen)
    return BoundedSoftmax(p, chosen, entropy(p), unreachable)


def _row_bounds(entropy_bound: ArrayLike, rows: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """One bound a row, and where an array held one that is no bound."""
    bound = np.asarray(entropy_bound, dtype=np.float64)
    bad = ~(bound >= 0)
    if bound.ndim == 0:
        if bad:
            raise ValueError(f"constrained_softmax: entropy_bound: expected a number >= 0, got {bound}")
        return np.full(rows, float(bound)), np.zeros(rows, dtype=bool)
    if bound.shape != rows:
        raise ValueError(f"constrained_softmax: entropy_bound: expected a scalar or shape {rows}, got {bound.shape}")
    return np.where(bad, 0.0, bound), bad


def _at_temperature(z: NDArray[np.float64], temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    return softmax_of_present(z / temperature[..., np.newaxis])


def _bisect(
    z: NDArray[np.float64],
    bound: NDArray[np.float64],
    coldest: NDArray[np.float64],
    start: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The highest temperature in [coldest, start] whose entropy is within the bound, else the coldest.

    Entropy rises with temperature, so `feasible` and `infeasible` stay on their sides of the bound.
    """
    within_at_start = entropy(_at_temperature(z, start)) <= bound
    feasible, infeasible = coldest, start
    for _ in range(BISECTION_STEPS):
        middle = np.sqrt(feasible * infeasible)
        within = entropy(_at_temperature(z, middle)) <= bound
        feasible = np.where(within, middle, feasible)
        infeasible = np.where(within, infeasible, middle)
    return np.where(within_at_start, start, feasible)
