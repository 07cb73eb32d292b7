"""Attention of one query a head to a long cache, in chunks: softmax(q · keysᵀ · scale) · values, put together in parts.

A chunk of keys leaves a partial: sum_j e^(s_j - m) v_j, its maximum m and its sum of exponentials l. Partials of any
chunks add up once they are brought to one maximum; so do results o with their log-sum-exp, which are the partial
(o, lse, 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burt_numba.reference.common import (
    DIM_MISMATCH,
    FLOAT32_MAX,
    INF_INPUT,
    NAN_INPUT,
    finite,
    float32_scores,
    non_finite_events,
    require_shape,
    summarise_events,
)

CHUNK_SIZE = 32
"""`FLASH_DECODE_CHUNK_SIZE` of the seed."""
DEAD_MAX = -1e30
"""A chunk whose maximum is not above this does not count."""

_REDUCE, _CHUNK, _MERGE = "flash_decoding_reduce", "flash_decoding_chunk", "merge_attention_states"


class FlashDecodingResult(NamedTuple):
    """What `flash_decoding` and `flash_decoding_reduce` of the reference return."""

    output: NDArray[np.float64]
    """[M, H, D]"""
    lse: NDArray[np.float64]
    """[M, H]: the logarithm of the sum of all exponentials, -inf where there is none."""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event in its own array, with its code."""


class FlashDecodingChunkResult(NamedTuple):
    """What `flash_decoding_chunk` of the reference returns."""

    partials: NDArray[np.float64]
    """[M, H, N, D + 2]; a chunk without keys is zeros with a maximum of -inf."""
    counts: dict[int, int]
    first: tuple[int, int] | None


class MergeResult(NamedTuple):
    """What `merge_attention_states` of the reference returns."""

    output: NDArray[np.float64]
    """[..., D]"""
    lse: NDArray[np.float64]
    """[...]"""
    counts: dict[int, int]
    first: tuple[int, int] | None


def flash_decoding_reduce(
    partials: ArrayLike, seq_lens: ArrayLike, chunk_size: int = CHUNK_SIZE
) -> FlashDecodingResult:
    """Put the partials of all chunks of a sequence together.

    Parameters
    ----------
    partials : array_like, shape [M, H, N, D + 2]
        Of each chunk the sum of e^(s_j - m) v_j, then m, the largest score s_j, then the sum of e^(s_j - m).
    seq_lens : array_like of integers, shape [M]
        Keys of each sequence. Its first ceil(seq_len / chunk_size) chunks count; a negative length, or one of more
        than N chunks, is recorded (code 6, once a sequence) and clamped.
    chunk_size : int
        Keys of a chunk.

    Returns
    -------
    FlashDecodingResult
        Zeros and -inf where no chunk counts. A chunk at or past the length, or with a maximum of -1e30 and below, does
        not count, whatever else it holds. Of the others a maximum or sum that is NaN or infinite is recorded (codes 1
        and 2, with the flat index in the partials), and the chunk does not count; nor does one whose sum is not above
        0. An element that is NaN or infinite is 0, and recorded likewise. A result beyond the range of float32 is 0 and
        recorded (code 2, with its flat index).

    Raises
    ------
    ValueError
        For shapes that do not fit together, or a chunk_size below 1.

    Examples
    --------
    >>> partials = [[[[3.0, 5.0, 3.0], [0.0, 4.0, 1.0]]]]  # three keys of value 1 at a score of 5, one of value 0 at 4
    >>> result = flash_decoding_reduce(partials, [2], chunk_size=1)
    >>> result.output.round(4), result.lse.round(4)
    (array([[[0.8908]]]), array([[6.2143]]))
    """
    partials = np.asarray(partials, np.float64)
    require_shape(partials.ndim == 4 and partials.shape[3] >= 3, _REDUCE, "partials", "[M, H, N, D + 2]", partials)
    M, H, N = partials.shape[:3]
    lengths = _lengths(_REDUCE, seq_lens, M)
    _require_chunk_size(_REDUCE, chunk_size)
    chunks = -(-lengths // chunk_size)
    looked_at = partials.size > 0
    bad_length = ((lengths < 0) | (chunks > N)) & (M * H > 0)

    elements, top, total = partials[..., :-2], partials[..., -2], partials[..., -1]
    candidate = (np.arange(N) < chunks[:, None])[:, None, :] & ~(top <= DEAD_MAX) & looked_at
    live = candidate & np.isfinite(top) & np.isfinite(total) & (total > 0)
    used = np.concatenate(
        [np.broadcast_to(live[..., None], elements.shape), candidate[..., None], candidate[..., None]], 3
    )
    output, lse = _merge(finite(elements), np.where(live, top, -np.inf), np.where(live, total, 0.0), axis=2)
    output, overflowed = _within_float32(output)
    events = summarise_events(non_finite_events(partials, used), {DIM_MISMATCH: bad_length}, overflowed)
    return FlashDecodingResult(output, lse, *events)


def flash_decoding_chunk(
    query: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    seq_lens: ArrayLike,
    chunk_size: int = CHUNK_SIZE,
    scale: float | None = None,
) -> FlashDecodingChunkResult:
    """The partials of all chunks of a cache, for `flash_decoding_reduce`.

    Parameters
    ----------
    query : array_like, shape [M, H, D]
    k_cache, v_cache : array_like, shape [M, Hk, S, D]
        H is a multiple of Hk; head h of the queries attends to head h // (H // Hk) of the caches.
    seq_lens : array_like of integers, shape [M]
        Keys of each sequence; a length outside [0, S] is recorded (code 6, once a sequence) and clamped.
    chunk_size : int
        Keys of a chunk.
    scale : float, optional
        What the dot products are multiplied by, in float32. Default: 1 / sqrt(D).

    Returns
    -------
    FlashDecodingChunkResult
        NaN and infinities, -inf as well, count as 0 and are recorded (codes 1 and 2) with the flat index in their own
        array: of the queries of sequences with a key, and of keys and values within the length. Each such element is
        counted once, however many heads read it. A score that leaves the range of float32 is 0 and recorded with its
        flat index in [M, H, S]: code 2, or 1 where terms of both signs do.
        A sum of values that does is 0 and recorded with its flat index in the partials (code 2).

    Raises
    ------
    ValueError
        For shapes that do not fit together, or a parameter out of range.

    Examples
    --------
    >>> keys = [[[[3.0], [2.0], [1.0]]]]
    >>> flash_decoding_chunk([[[1.0]]], keys, keys, [3], chunk_size=2).partials.round(4)
    array([[[[3.7358, 3.    , 1.3679],
             [1.    , 1.    , 1.    ]]]])
    """
    q, keys, values = (np.asarray(array, np.float64) for array in (query, k_cache, v_cache))
    require_shape(q.ndim == 3 and q.shape[2] >= 1, _CHUNK, "query", "[M, H, D] with D >= 1", q)
    M, H, D = q.shape
    fits = keys.ndim == 4 and keys.shape[0] == M and keys.shape[3] == D
    require_shape(fits, _CHUNK, "k_cache", f"[{M}, Hk, S, {D}]", keys)
    Hk, S = keys.shape[1:3]
    divides = (Hk > 0 and H % Hk == 0) or H == Hk == 0
    require_shape(divides, _CHUNK, "k_cache", f"[{M}, Hk, S, {D}] with Hk a divisor of {H}", keys)
    require_shape(values.shape == keys.shape, _CHUNK, "v_cache", str(list(keys.shape)), values)
    lengths = _lengths(_CHUNK, seq_lens, M)
    _require_chunk_size(_CHUNK, chunk_size)
    factor = float(np.float32(1 / math.sqrt(D) if scale is None else scale))
    if not math.isfinite(factor):
        raise ValueError(f"{_CHUNK}: scale: expected a finite number, got {scale}")

    looked_at = M * H > 0
    present = np.arange(S) < lengths[:, None]
    in_cache = present[:, None, :, None] & looked_at
    events = [
        non_finite_events(q, np.any(present, axis=1, keepdims=True)[..., None]),
        non_finite_events(keys, in_cache),
        non_finite_events(values, in_cache),
        {DIM_MISMATCH: ((lengths < 0) | (lengths > S)) & looked_at},
    ]

    group = H // Hk if Hk else 1
    q, keys, values = finite(q), *(np.repeat(finite(array), group, axis=1) for array in (keys, values))
    scores = float32_scores(q[:, :, None, :], keys, factor)[:, :, 0]
    is_present = np.broadcast_to(present[:, None, :], scores.shape)
    events.append({NAN_INPUT: np.isnan(scores) & is_present, INF_INPUT: np.isinf(scores) & is_present})

    N = -(-S // chunk_size)
    width = min(chunk_size, max(S, 1))
    padding = [(0, 0), (0, 0), (0, N * width - S)]
    scores = np.pad(np.where(is_present, finite(scores), -np.inf), padding, constant_values=-np.inf)
    scores = scores.reshape(M, H, N, width)
    values = np.pad(values, [*padding, (0, 0)]).reshape(M, H, N, width, D)
    top = scores.max(axis=3, initial=-np.inf)
    weights = np.exp(np.subtract(scores, top[..., None], out=np.full_like(scores, -np.inf), where=scores > -np.inf))
    partials = np.concatenate(
        [np.einsum("mhnj,mhnjd->mhnd", weights, values), top[..., None], weights.sum(axis=3)[..., None]], axis=3
    )
    elements, overflowed = _within_float32(partials[..., :D])
    partials[..., :D] = elements
    overflowed = {code: np.pad(where, [*[(0, 0)] * 3, (0, 2)]) for code, where in overflowed.items()}
    return FlashDecodingChunkResult(partials, *summarise_events(*events, overflowed))


def flash_decoding(
    query: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    seq_lens: ArrayLike,
    scale: float | None = None,
    *,
    chunk_size: int | None = None,
) -> FlashDecodingResult:
    """Attention of one query a head to a cache: the partials of its chunks, and these put together.

    Parameters
    ----------
    query, k_cache, v_cache, seq_lens, scale
        As for `flash_decoding_chunk`.
    chunk_size : int, optional
        Keys of a chunk, without effect beyond rounding. Default: `CHUNK_SIZE`.

    Returns
    -------
    FlashDecodingResult
        With the events of both. Zeros and -inf for a sequence without a key.

    Raises
    ------
    ValueError
        As `flash_decoding_chunk`.

    Examples
    --------
    >>> keys = [[[[3.0], [2.0], [1.0]]]]
    >>> result = flash_decoding([[[1.0]]], keys, keys, [3], chunk_size=2)
    >>> result.output.round(4), result.lse.round(4)
    (array([[[2.5752]]]), array([[3.4076]]))
    """
    chunk_size = CHUNK_SIZE if chunk_size is None else chunk_size
    parts = flash_decoding_chunk(query, k_cache, v_cache, seq_lens, chunk_size, scale)
    M, _, N, _ = parts.partials.shape
    whole = flash_decoding_reduce(parts.partials, np.full(M, N * chunk_size), chunk_size)
    counts = {
        code: parts.counts.get(code, 0) + whole.counts.get(code, 0) for code in sorted({*parts.counts, *whole.counts})
    }
    first = min((each for each in (parts.first, whole.first) if each is not None), default=None)
    return whole._replace(counts=counts, first=first)


def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> MergeResult:
    """Put together what attention gave over parts of the keys.

    Parameters
    ----------
    outs : array_like, shape [N, ..., D]
        The results over each of N parts.
    lses : array_like, shape [N, ...]
        ln sum e^(s_j) over each part, in nats; -inf where a part had no key.

    Returns
    -------
    MergeResult
        The result over all parts and its log-sum-exp; zeros and -inf where no part has a key. Of a part with an lse of
        -inf nothing else is looked at. An lse that is NaN or +inf is recorded (codes 1 and 2, with its flat index), and
        the part does not count. An element of the others that is NaN or infinite is 0, and recorded likewise with its
        flat index in ``outs``.

    Raises
    ------
    ValueError
        For shapes that do not fit together.

    Examples
    --------
    >>> result = merge_attention_states([[[1.0]], [[0.0]]], [[np.log(3)], [np.log(1)]])
    >>> result.output.round(4), result.lse.round(4)
    (array([[0.75]]), array([1.3863]))
    """
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    require_shape(outs.ndim >= 2 and outs.shape[-1] >= 1, _MERGE, "outs", "[N, ..., D] with D >= 1", outs)
    require_shape(lses.shape == outs.shape[:-1], _MERGE, "lses", str(list(outs.shape[:-1])), lses)
    live = np.isfinite(lses)
    output, lse = _merge(finite(outs), np.where(live, lses, -np.inf), live.astype(np.float64), axis=0)
    events = summarise_events(non_finite_events(lses, ~np.isneginf(lses)), non_finite_events(outs, live[..., None]))
    return MergeResult(output, lse, *events)


def _merge(
    elements: NDArray[np.float64], top: NDArray[np.float64], total: NDArray[np.float64], axis: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The result and the log-sum-exp over an axis of partials; one with a maximum of -inf does not count."""
    highest = top.max(axis=axis, keepdims=True, initial=-np.inf)
    weight = np.exp(np.subtract(top, highest, out=np.full_like(top, -np.inf), where=top > -np.inf))
    sums = (weight * total).sum(axis=axis)
    weighted = (weight[..., None] * elements).sum(axis=axis)
    output = np.divide(weighted, sums[..., None], out=np.zeros_like(weighted), where=sums[..., None] > 0)
    lse = np.log(sums, out=np.full_like(sums, -np.inf), where=sums > 0) + np.squeeze(highest, axis)
    return output, np.asarray(lse)


def _within_float32(array: NDArray[np.float64]) -> tuple[NDArray[np.float64], dict[int, NDArray[np.bool_]]]:
    """The array with 0 beyond the range of float32, and where that is."""
    beyond = np.abs(array) > FLOAT32_MAX
    return np.where(beyond, 0.0, array), {INF_INPUT: beyond}


def _lengths(function: str, seq_lens: ArrayLike, sequences: int) -> NDArray[np.int64]:
    lengths = np.asarray(seq_lens)
    # An empty list is of floats.
    lengths = lengths.astype(np.int64, casting="safe" if lengths.size else "unsafe")
    require_shape(lengths.shape == (sequences,), function, "seq_lens", f"[{sequences}]", lengths)
    return lengths


def _require_chunk_size(function: str, chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"{function}: chunk_size: expected at least 1, got {chunk_size}")
