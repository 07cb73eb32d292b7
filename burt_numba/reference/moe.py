"""Mixture of experts: tokens copied to the buffers of their experts, and the experts' answers added up again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burt_numba.reference.common import (
    CAPACITY_FULL,
    DIM_MISMATCH,
    INF_INPUT,
    finite,
    non_finite_events,
    require_shape,
    summarise_events,
)

PADDING = -1
OVERFLOW_EXPERT = 0


class MoeDispatchResult(NamedTuple):
    """What `sparse_moe_dispatch` of the reference returns; `sparse_moe_combine` takes it."""

    expert_inputs: NDArray[np.float64]
    """[E, capacity, d]: the tokens of each expert, and zeros in the rows that none took."""
    dispatch_indices: NDArray[np.int64]
    """[T, k, 2]: (expert, position) of a choice that was placed, (-1, -1) of one that was not."""
    expert_counts: NDArray[np.int64]
    """[E]: rows that hold a token."""
    combine_weights: NDArray[np.float64]
    """[T, k]: routing_weights[t, index] of a choice that was placed, 0 of one that was not."""
    num_dropped: int
    """Tokens with a choice in range of which none was placed."""
    num_overflowed: int
    """Tokens that went to expert 0 because none of their choices had room."""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event in its own array, with its code."""


class MoeCombineResult(NamedTuple):
    """What `sparse_moe_combine` of the reference returns."""

    output: NDArray[np.float64]
    """[T, d]"""
    counts: dict[int, int]
    """Events by error code; only the codes that occurred."""
    first: tuple[int, int] | None
    """Lowest flat index of an event in its own array, with its code."""


def sparse_moe_dispatch(
    input: ArrayLike,
    routing_weights: ArrayLike,
    top_k_indices: ArrayLike,
    expert_capacity: int | None = None,
) -> MoeDispatchResult:
    """Copy each token to those of its k experts that have room.

    Rows are given out to the first choices of all tokens in token order, then to the second choices, and so on, and at
    last to the tokens that none of their choices had room for.

    Parameters
    ----------
    input : array_like, shape [T, d]
    routing_weights : array_like, shape [T, E]
    top_k_indices : array_like of integers, shape [T, k]
        Experts of each token. -1 is padding. Any other number outside [0, E) is recorded (code 6) and skipped. An
        expert that a token names more than once takes it once, for the first of these choices.
    expert_capacity : int, optional
        Rows of each expert. Default: ceil(2 T k / E).

    Returns
    -------
    MoeDispatchResult
        A token that none of its choices had room for goes to expert 0, in the place of its first choice in range and
        with that choice's weight. Where expert 0 is full as well it is dropped and recorded (code 5). A token without
        any choice in range is neither. NaN and infinities, in the tokens and the weights that are placed, are stored
        as 0 and recorded (codes 1 and 2).

    Raises
    ------
    ValueError
        For shapes that do not fit together, no expert, or a negative capacity.

    Examples
    --------
    >>> tokens, weights = [[1.0], [2.0], [3.0]], [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]
    >>> result = sparse_moe_dispatch(tokens, weights, [[0], [0], [1]], expert_capacity=1)
    >>> result.expert_inputs[:, 0, 0], result.num_dropped
    (array([1., 3.]), 1)
    """
    tokens, weights = np.asarray(input, np.float64), np.asarray(routing_weights, np.float64)
    choices = np.asarray(top_k_indices).astype(np.int64, casting="safe")
    name = "sparse_moe_dispatch"
    require_shape(tokens.ndim == 2, name, "input", "[T, d]", tokens)
    T = len(tokens)
    fits = weights.ndim == 2 and len(weights) == T and weights.shape[1] >= 1
    require_shape(fits, name, "routing_weights", f"[{T}, E] with E >= 1", weights)
    require_shape(choices.ndim == 2 and len(choices) == T, name, "top_k_indices", f"[{T}, k]", choices)
    E, k = weights.shape[1], choices.shape[1]
    capacity = math.ceil(2 * T * k / E) if expert_capacity is None else expert_capacity
    if capacity < 0:
        raise ValueError(f"{name}: expert_capacity: expected at least 0, got {capacity}")

    placed = np.full((T, k, 2), -1, np.int64)
    expert_counts = np.zeros(E, np.int64)

    def place(token: int, choice: int, expert: int) -> None:
        if expert_counts[expert] < capacity:
            placed[token, choice] = expert, expert_counts[expert]
            expert_counts[expert] += 1

    in_range = (choices >= 0) & (choices < E)
    for choice in range(k):
        for token in range(T):
            if in_range[token, choice] and choices[token, choice] not in placed[token, :, 0]:
                place(token, choice, int(choices[token, choice]))

    without_room = np.any(in_range, axis=1) & ~np.any(placed[:, :, 0] >= 0, axis=1)
    for token in np.flatnonzero(without_room).tolist():
        place(token, int(np.argmax(in_range[token])), OVERFLOW_EXPERT)
    has_row = np.any(placed[:, :, 0] >= 0, axis=1)
    dropped = without_room & ~has_row

    expert_inputs = np.zeros((E, capacity, tokens.shape[1]))
    combine_weights = np.zeros((T, k))
    weight_used = np.zeros(weights.shape, bool)
    for token, choice in np.argwhere(placed[:, :, 0] >= 0).tolist():
        expert, position = placed[token, choice]
        expert_inputs[expert, position] = finite(tokens[token])
        combine_weights[token, choice] = finite(weights[token, choices[token, choice]])
        weight_used[token, choices[token, choice]] = True

    counts, first = summarise_events(
        non_finite_events(tokens, has_row[:, np.newaxis]),
        non_finite_events(weights, weight_used),
        {CAPACITY_FULL: dropped},
        {DIM_MISMATCH: ~in_range & (choices != PADDING)},
    )
    return MoeDispatchResult(
        expert_inputs,
        placed,
        expert_counts,
        combine_weights,
        int(dropped.sum()),
        int((without_room & has_row).sum()),
        counts,
        first,
    )


def sparse_moe_combine(expert_outputs: ArrayLike, dispatch: Any, renormalize: bool = False) -> MoeCombineResult:
    """Add up what the experts made of each token, weighted: out_t = sum over its placed choices of w_tj y_tj.

    Parameters
    ----------
    expert_outputs : array_like, shape [E, capacity, d]
        Row [e, p] is what expert e made of the token in its row p. Rows that hold no token are not looked at.
    dispatch : MoeDispatchResult
        Of which `dispatch_indices` and `combine_weights` are used. A place outside expert_outputs is recorded (code 6)
        and skipped.
    renormalize : bool
        Divide the sum by that of the weights. Where the weights add up to 0, it is 0.

    Returns
    -------
    MoeCombineResult
        Zeros for a token of which no choice was placed. NaN and infinities count as 0 and are recorded. A sum beyond
        the range of the result's type, float16 for expert_outputs of float16 and else float32, is 0 and recorded with
        code 2.

    Raises
    ------
    ValueError
        For shapes that do not fit together.

    Examples
    --------
    >>> dispatch = sparse_moe_dispatch([[1.0], [2.0]], [[0.75, 0.25], [0.5, 0.0]], [[0, 1], [0, -1]])
    >>> sparse_moe_combine(10 * dispatch.expert_inputs, dispatch).output[:, 0]
    array([10., 10.])
    """
    outputs = np.asarray(expert_outputs, np.float64)
    places, weights = np.asarray(dispatch.dispatch_indices), np.asarray(dispatch.combine_weights, np.float64)
    name = "sparse_moe_combine"
    require_shape(outputs.ndim == 3, name, "expert_outputs", "[E, capacity, d]", outputs)
    require_shape(places.ndim == 3 and places.shape[2] == 2, name, "dispatch_indices", "[T, k, 2]", places)
    require_shape(weights.shape == places.shape[:2], name, "combine_weights", str(list(places.shape[:2])), weights)

    is_placed = np.any(places != PADDING, axis=2)
    within = is_placed & np.all((places >= 0) & (places < outputs.shape[:2]), axis=2)
    used = np.where(within, finite(weights), 0.0)
    if renormalize:
        total = used.sum(axis=1, keepdims=True)
        used = np.divide(used, total, out=np.zeros_like(used), where=total != 0)
    output = np.zeros((len(weights), outputs.shape[2]))
    row_used = np.zeros(outputs.shape[:2], bool)
    for token, choice in np.argwhere(within).tolist():
        row = tuple(places[token, choice])
        output[token] += used[token, choice] * finite(outputs[row])
        row_used[row] = True
    with np.errstate(over="ignore"):
        overflowed = np.isinf(output.astype(_storage_of(expert_outputs)))
    output[overflowed] = 0.0

    counts, first = summarise_events(
        non_finite_events(outputs, row_used[..., np.newaxis]),
        non_finite_events(weights, within),
        {INF_INPUT: overflowed},
        {DIM_MISMATCH: is_placed & ~within},
    )
    return MoeCombineResult(output, counts, first)


def _storage_of(array: ArrayLike) -> type[np.floating]:
    return np.float16 if np.asarray(array).dtype == np.float16 else np.float32
