"""Matrix memory with a coupled input and forget gate, kept within a spectral bound."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from burt_numba.reference.common import INF_INPUT, non_finite_events, require_shape, summarise_events

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_PROJECTIONS = ("clip", "scale")

Matrix = NDArray[np.float64]


class CifgResult(NamedTuple):
    """What the matrix memory functions of the reference return."""

    memory: Matrix
    """[d, d], or [B, d, d] for independent updates of a batch."""
    forget_gate: Matrix
    """[d], or [B, d] for a batch."""
    sigma: Matrix
    """The largest singular value before the projection: [], or [B] for independent updates of a batch."""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event in its own array, with its code."""


def cifg_update(
    C: ArrayLike,
    h: ArrayLike,
    x: ArrayLike,
    W_f: ArrayLike,
    b_f: ArrayLike,
    spectral_bound: float = 0.95,
    *,
    projection: str = "clip",
) -> CifgResult:
    """One update of a matrix memory: forget, write h hᵀ, and project onto a largest singular value.

    f = sigmoid(W_f [h; x] + b_f),   C_ij <- f_i C_ij + (1 - f_i) h_i h_j,   then sigma_max(C) <= spectral_bound.

    Parameters
    ----------
    C : array_like, shape [d, d]
    h : array_like, shape [d]
    x : array_like, shape [n]
    W_f : array_like, shape [d, d + n]
    b_f : array_like, shape [d]
    spectral_bound : float
    projection : "clip" or "scale"
        "scale": C times bound / sigma. "clip": the nearest matrix within the bound, sigma lowered to it, where one
        singular value alone exceeds it (as after an update of a memory within the bound); scaled where several do.

    Returns
    -------
    CifgResult
        A NaN or an infinity in C_ij sets row i and column j to zero before the update; in the other arguments it
        counts as 0. Each is recorded. An entry beyond the range of float32 becomes 0, recorded with code 2.

    Raises
    ------
    ValueError
        For shapes that do not fit together, or another projection.

    Examples
    --------
    >>> gate_shut = [-100.0, -100.0]
    >>> cifg_update([[0.5, 0.0], [0.0, 0.5]], [1.0, 1.0], [0.0], [[0.0] * 3] * 2, gate_shut, 0.5).memory
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """
    memory, hidden = np.asarray(C, np.float64), np.asarray(h, np.float64)
    inputs = np.asarray(x, np.float64)
    require_shape(memory.ndim == 2 and memory.shape[0] == memory.shape[1], "cifg_update", "C", "[d, d]", memory)
    require_shape(hidden.shape == memory.shape[:1], "cifg_update", "h", f"[{len(memory)}]", hidden)
    require_shape(inputs.ndim == 1, "cifg_update", "x", "[n]", inputs)
    result = _update("cifg_update", memory[None], hidden[None], inputs[None], W_f, b_f, spectral_bound, projection)
    return result._replace(memory=result.memory[0], forget_gate=result.forget_gate[0], sigma=result.sigma[0])


def batched_cifg_update(
    C: ArrayLike,
    H: ArrayLike,
    X: ArrayLike,
    W_f: ArrayLike,
    b_f: ArrayLike,
    spectral_bound: float = 0.95,
    shared_memory_mode: bool = False,
    *,
    projection: str = "clip",
) -> CifgResult:
    """Updates of a batch: of a memory for each sample, or the mean of them in one shared memory.

    Parameters
    ----------
    C : array_like, shape [B, d, d]; [d, d] in shared mode
    H : array_like, shape [B, d]
    X : array_like, shape [B, n]
    W_f, b_f, spectral_bound, projection
        As for `cifg_update`. The shared memory is always scaled.
    shared_memory_mode : bool
        C_ij <- mean_b(f_bi) C_ij + mean_b((1 - f_bi) h_bi h_bj), then the projection.

    Returns
    -------
    CifgResult
        As `cifg_update` gives it for each sample.

    Raises
    ------
    ValueError
        For shapes that do not fit together, no sample, or another projection.
    """
    name = "batched_cifg_update"
    memory, hidden, inputs = (np.asarray(array, np.float64) for array in (C, H, X))
    require_shape(hidden.ndim == 2 and len(hidden) > 0, name, "H", "[B, d] with B >= 1", hidden)
    batch, d = hidden.shape
    wanted = (d, d) if shared_memory_mode else (batch, d, d)
    require_shape(memory.shape == wanted, name, "C", str(list(wanted)), memory)
    require_shape(inputs.ndim == 2 and len(inputs) == batch, name, "X", f"[{batch}, n]", inputs)
    if not shared_memory_mode:
        return _update(name, memory, hidden, inputs, W_f, b_f, spectral_bound, projection)
    result = _update(name, memory[None], hidden, inputs, W_f, b_f, spectral_bound, "scale")
    return result._replace(memory=result.memory[0], sigma=result.sigma[0])


def _update(
    name: str,
    memory: Matrix,
    hidden: Matrix,
    inputs: Matrix,
    W_f: ArrayLike,
    b_f: ArrayLike,
    spectral_bound: float,
    projection: str,
) -> CifgResult:
    """[M, d, d], [B, d] and [B, n]: with M = 1 the mean over the samples in one memory, else M = B memories."""
    weights, bias = np.asarray(W_f, np.float64), np.asarray(b_f, np.float64)
    d, width = hidden.shape[1], hidden.shape[1] + inputs.shape[1]
    require_shape(weights.shape == (d, width), name, "W_f", f"[{d}, {width}]", weights)
    require_shape(bias.shape == (d,), name, "b_f", f"[{d}]", bias)
    if projection not in _PROJECTIONS:
        raise ValueError(f"{name}: projection: expected one of {', '.join(_PROJECTIONS)}, got {projection!r}")
    arguments = (memory, hidden, inputs, weights, bias)
    hidden, inputs, weights, bias = (np.where(np.isfinite(a), a, 0.0) for a in arguments[1:])

    bad = ~np.isfinite(memory)
    lost = np.any(bad, axis=2, keepdims=True) | np.any(bad, axis=1, keepdims=True)
    memory = np.where(lost, 0.0, memory)
    with np.errstate(over="ignore", invalid="ignore"):
        activation = np.concatenate([hidden, inputs], axis=1) @ weights.T + bias
        gate = expit(activation)
        # 1 - gate, which would leave few digits of a small one.
        written = (expit(-activation) * hidden)[:, :, None] * hidden[:, None, :]
    kept = gate[:, :, None]
    if len(memory) == 1:
        kept, written = kept.mean(axis=0, keepdims=True), written.mean(axis=0, keepdims=True)
    updated = kept * memory + written
    overflowed = np.abs(updated) > _FLOAT32_MAX
    updated = np.where(overflowed, 0.0, updated)
    projected = [_project(matrix, float(spectral_bound), projection) for matrix in updated]
    counts, first = summarise_events(*map(non_finite_events, arguments), {INF_INPUT: overflowed})
    return CifgResult(np.stack([p[0] for p in projected]), gate, np.array([p[1] for p in projected]), counts, first)


def _project(matrix: Matrix, bound: float, projection: str) -> tuple[Matrix, float]:
    """(the matrix within the bound, its largest singular value before)."""
    left, sigma, right = np.linalg.svd(matrix)
    largest = float(sigma[0]) if len(sigma) else 0.0
    if largest <= bound:
        return matrix, largest
    if projection == "clip" and (len(sigma) == 1 or sigma[1] <= bound):
        return matrix - (largest - bound) * np.outer(left[:, 0], right[0]), largest
    return matrix * (bound / largest), largest
