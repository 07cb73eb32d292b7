"""softmax(query · keysᵀ · scale / T) · values, with T so low that the entropy of the weights is within a bound."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burt_numba.reference.common import (
    DIM_MISMATCH,
    ENTROPY_OVERFLOW,
    INF_INPUT,
    NAN_INPUT,
    finite,
    float32_scores,
    non_finite_events,
    require_search_parameters,
    require_shape,
    summarise_events,
)
from burt_numba.reference.constrained_softmax import at_bounded_entropy

NEGLIGIBLE_WEIGHT = 2.0**-40
"""A bad element of the values is an event where a query gave its context more weight than this."""

_PRECISIONS = ("fp32", "tf32")
_NAME = "biencoder_attention"


class BiencoderAttentionResult(NamedTuple):
    """What `biencoder_attention` of the reference returns."""

    output: NDArray[np.float64]
    """[B, H, Q, D]"""
    weights: NDArray[np.float64]
    """[B, H, Q, K]"""
    temperature: NDArray[np.float64]
    """[B, H, Q]"""
    entropy: NDArray[np.float64]
    """[B, H, Q], in nats, of the weights."""
    lse: NDArray[np.float64]
    """[B, H, Q]: ln sum_j exp(score_j / T0), -inf without a context; of use where no bound is."""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event in its own array, with its code."""


def biencoder_attention(
    query: ArrayLike,
    context_keys: ArrayLike,
    context_values: ArrayLike,
    scale: float | None = None,
    entropy_bound: ArrayLike | None = 0.20,
    temperature_min: float = 0.01,
    temperature_max: float = 10.0,
    max_iterations: int = 20,
    *,
    context_lengths: ArrayLike | None = None,
    precision: str = "fp32",
    temperature: ArrayLike | None = None,
) -> BiencoderAttentionResult:
    """Attend to contexts that were retrieved for each sample, sharply enough that the weights' entropy is bounded.

    Parameters
    ----------
    query : array_like, shape [B, H, Q, D]
    context_keys, context_values : array_like, shape [B, Hk, K, D]
        H is a multiple of Hk; head h of the queries attends to head h // (H // Hk) of the contexts.
    scale : float, optional
        What the dot products are multiplied by, in float32. Default: 1 / sqrt(D).
    entropy_bound : array_like, scalar or shape [H], or None
        In nats. In an array, an entry that is NaN or negative is recorded (code 6, once a head) and taken as 0.
        None: no bound.
    temperature_min, temperature_max, max_iterations
        As for `constrained_softmax`.
    context_lengths : array_like of integers, shape [B], optional
        Contexts of each sample at or past its length are absent. A length outside [0, K] is recorded (code 6) and
        clamped.
    precision : "fp32" or "tf32"
        Checked, and otherwise without effect.
    temperature : array_like, shape [B, H, Q], optional
        Weights at these temperatures, without a search, as in `constrained_softmax`.

    Returns
    -------
    BiencoderAttentionResult
        Zeros, T0 and entropy 0 for a query without a context. NaN and infinities, -inf as well, count as 0 and are
        recorded (codes 1 and 2) with the flat index in their own array: all of the queries, the keys of present
        contexts, and the values of contexts that some query gave a weight over 2⁻⁴⁰. Each such element is counted
        once; an operation may count an element of the values once for each query. A dot product that leaves the range
        of float32, in a term, in the sum or by the scale, makes that score 0 and is recorded with its flat index in
        [B, H, Q, K]: code 2, or 1 where terms of both signs do. A row still over its bound at temperature_min is
        recorded (code 3).

    Raises
    ------
    ValueError
        For shapes that do not fit together, or a parameter out of range.

    Examples
    --------
    >>> query, keys = [[[[1.0, 0.0]]]], [[[[3.0, 0.0], [2.0, 5.0], [1.0, 0.0]]]]
    >>> result = biencoder_attention(query, keys, [[[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]]], scale=1.0)
    >>> result.output.round(4), result.entropy.round(4)
    (array([[[[0.9525, 0.0454]]]]), array([[[0.2]]]))
    """
    q, keys, values = (np.asarray(array, np.float64) for array in (query, context_keys, context_values))
    require_shape(q.ndim == 4 and q.shape[3] >= 1, _NAME, "query", "[B, H, Q, D] with D >= 1", q)
    B, H, Q, D = q.shape
    fits = keys.ndim == 4 and keys.shape[0] == B and keys.shape[3] == D
    require_shape(fits, _NAME, "context_keys", f"[{B}, Hk, K, {D}]", keys)
    Hk, K = keys.shape[1:3]
    divides = (Hk > 0 and H % Hk == 0) or H == Hk == 0
    require_shape(divides, _NAME, "context_keys", f"[{B}, Hk, K, {D}] with Hk a divisor of {H}", keys)
    require_shape(values.shape == keys.shape, _NAME, "context_values", str(list(keys.shape)), values)
    if precision not in _PRECISIONS:
        raise ValueError(f"{_NAME}: precision: expected one of {', '.join(_PRECISIONS)}, got {precision!r}")
    factor = float(np.float32(1 / math.sqrt(D) if scale is None else scale))
    if not math.isfinite(factor):
        raise ValueError(f"{_NAME}: scale: expected a finite number, got {scale}")
    require_search_parameters(_NAME, temperature_min, temperature_max, max_iterations)
    bound, bad_bound = _head_bounds(entropy_bound, H)
    present, bad_length = _present_contexts(context_lengths, B, K)

    # Of an empty result nothing is looked at.
    looked_at = q.size > 0
    events = [
        non_finite_events(q),
        non_finite_events(keys, present[:, None, :, None] & looked_at),
        {DIM_MISMATCH: bad_bound & looked_at},
        {DIM_MISMATCH: bad_length & looked_at},
    ]

    group = H // Hk if Hk else 1
    q, keys = finite(q), finite(keys)
    scores = float32_scores(q, np.repeat(keys, group, axis=1), factor)
    is_present = np.broadcast_to(present[:, None, None, :], scores.shape)
    overflowed = {NAN_INPUT: np.isnan(scores) & is_present, INF_INPUT: np.isinf(scores) & is_present}
    z = np.where(is_present, finite(scores), -np.inf)

    bounds = np.broadcast_to(bound[None, :, None], (B, H, Q))
    softmax = at_bounded_entropy(z, bounds, temperature_min, temperature_max, temperature)
    weights = softmax.probabilities
    output = weights @ np.repeat(finite(values), group, axis=1)
    start = float(np.clip(1.0, temperature_min, temperature_max))
    lse = np.logaddexp.reduce(z / start, axis=3, initial=-np.inf)

    carries_weight = np.any(weights > NEGLIGIBLE_WEIGHT, axis=2).reshape(B, Hk, group, K).any(axis=2)
    events += [
        overflowed,
        {ENTROPY_OVERFLOW: softmax.unreachable},
        non_finite_events(values, carries_weight[..., None]),
    ]
    counts, first = summarise_events(*events)
    return BiencoderAttentionResult(output, weights, softmax.temperature, softmax.entropy, lse, counts, first)


def _head_bounds(entropy_bound: ArrayLike | None, heads: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """One bound a head, and where an array held one that is no bound."""
    bound = np.asarray(np.inf if entropy_bound is None else entropy_bound, np.float64)
    bad = ~(bound >= 0)
    if bound.ndim == 0:
        if bad:
            raise ValueError(f"{_NAME}: entropy_bound: expected a number >= 0, got {bound}")
        return np.full(heads, float(bound)), np.zeros(heads, bool)
    require_shape(bound.shape == (heads,), _NAME, "entropy_bound", f"[{heads}]", bound)
    return np.where(bad, 0.0, bound), bad


def _present_contexts(
    context_lengths: ArrayLike | None, batch: int, contexts: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[B, K] which contexts there are, and [B] where a length was clamped."""
    lengths = np.full(batch, contexts) if context_lengths is None else np.asarray(context_lengths)
    lengths = lengths.astype(np.int64, casting="safe")
    require_shape(lengths.shape == (batch,), _NAME, "context_lengths", f"[{batch}]", lengths)
    return np.arange(contexts) < lengths[:, None], (lengths < 0) | (lengths > contexts)
