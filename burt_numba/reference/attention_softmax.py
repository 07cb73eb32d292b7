"""softmax(scores + mask) over the keys, with an optional causal limit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burt_numba.reference.common import INF_INPUT, NAN_INPUT, softmax_of_present, summarise_events


class AttentionSoftmaxResult(NamedTuple):
    """What `attention_softmax` of the reference returns."""

    probabilities: NDArray[np.float64]
    """[B, H, Q, K]"""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event in the scores, with its code."""


def attention_softmax(
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    causal: bool = False,
    *,
    causal_offset: int | None = None,
) -> AttentionSoftmaxResult:
    """Attention weights: softmax over the last axis of scores + mask.

    Parameters
    ----------
    scores : array_like, shape [B, H, Q, K]
    mask : array_like, any shape that broadcasts to the scores, optional
        bool (True = attend), or a number that is added in float32, as the operation adds it.
    causal : bool
        Key j is hidden from query i when j > i + causal_offset.
    causal_offset : int, optional
        0 where Q = K; must be given with `causal` where Q and K differ.

    Returns
    -------
    AttentionSoftmaxResult
        A row with no key left gives zeros. What the mask (False or -inf) or the causal limit hides has no influence,
        whatever the scores hold there, and is not recorded. Elsewhere a key is absent whose sum is NaN or +inf. It is
        recorded with code 1 where the score or the mask is NaN, else with code 2 (one of them is +inf, or the sum
        overflows). A sum of -inf, also from an overflow, is a mask.

    Raises
    ------
    ValueError
        For scores that are not 4-D, a mask that does not broadcast, or a causal_offset that is
        missing or has no effect.

    Examples
    --------
    >>> attention_softmax([[[[0.0, 5.0], [1.0, 1.0]]]], causal=True).probabilities[0, 0]
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    # float32 holds every float16, and a sum of two float32 has to overflow here where it does in the operation.
    total = np.asarray(scores, dtype=np.float32)
    if total.ndim != 4:
        raise ValueError(f"attention_softmax: scores: expected 4 dimensions, got shape {total.shape}")
    hidden = np.zeros(total.shape, dtype=bool)
    is_nan = np.isnan(total)

    if mask is not None:
        mask = np.broadcast_to(np.asarray(mask), total.shape)
        if mask.dtype == np.bool_:
            hidden |= ~mask
        else:
            mask = mask.astype(np.float32)
            hidden |= np.isneginf(mask)
            is_nan |= np.isnan(mask)
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + mask

    if causal_offset is not None and not causal:
        raise ValueError(f"attention_softmax: causal_offset: has no effect without causal, got {causal_offset}")
    if causal:
        queries, keys = total.shape[-2:]
        if causal_offset is None:
            if queries != keys:
                raise ValueError(
                    f"attention_softmax: causal_offset: must be given for {queries} queries and {keys} keys"
                )
            causal_offset = 0
        hidden |= np.arange(keys) > np.arange(queries)[:, np.newaxis] + causal_offset

    bad = (np.isnan(total) | np.isposinf(total)) & ~hidden
    z = np.where(hidden | bad, -np.inf, total.astype(np.float64))
    counts, first = summarise_events({NAN_INPUT: bad & is_nan, INF_INPUT: bad & ~is_nan})
    return AttentionSoftmaxResult(softmax_of_present(z), counts, first)
