"""The reference of the mixture of experts against values worked out elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import normal

from burt_numba import reference


def dispatch(indices, capacity=None, experts=4, d=2, tokens=None, weights=None):
    """Token t is filled with t + 1, and its weight for expert e is t + 1 + (e + 1) / 16."""
    indices = np.asarray(indices, np.int32)
    if tokens is None:
        tokens = np.tile(np.arange(1.0, len(indices) + 1)[:, None], (1, d))
    if weights is None:
        weights = np.arange(1.0, len(indices) + 1)[:, None] + np.arange(1, experts + 1) / 16
    return reference.sparse_moe_dispatch(tokens, weights, indices, capacity)


def rows_of(result):
    """The tokens of each expert, by number."""
    return [
        [int(row[0]) - 1 for row in rows[:count]]
        for rows, count in zip(result.expert_inputs, result.expert_counts, strict=True)
    ]


def test_choices_are_placed_before_later_choices_and_in_token_order():
    result = dispatch([[0, 1], [1, 0], [0, 2], [3, 0]])
    assert rows_of(result) == [[0, 2, 1, 3], [1, 0], [2], [3]]
    assert result.dispatch_indices.tolist() == [
        [[0, 0], [1, 1]],
        [[1, 0], [0, 2]],
        [[0, 1], [2, 0]],
        [[3, 0], [0, 3]],
    ]
    assert result.combine_weights.tolist() == [[1.0625, 1.125], [2.125, 2.0625], [3.0625, 3.1875], [4.25, 4.0625]]
    assert (result.num_dropped, result.num_overflowed, result.counts, result.first) == (0, 0, {}, None)


@pytest.mark.parametrize(
    ("T", "k", "E", "capacity"),
    [(4, 2, 4, 4), (5, 2, 4, 5), (5, 1, 4, 3), (1024, 2, 4, 1024), (3, 3, 7, 3), (0, 2, 4, 0)],
)
def test_the_default_capacity_is_twice_the_mean_load_rounded_up(T, k, E, capacity):
    result = dispatch(np.full((T, k), -1), experts=E)
    assert result.expert_inputs.shape == (E, capacity, 2)


def test_a_token_without_room_goes_to_expert_0_with_the_weight_of_its_first_choice():
    result = dispatch([[-1, 1, 2], [-1, 1, 2], [-1, 2, 1]], capacity=1)
    assert rows_of(result) == [[1], [0], [2], []]
    assert result.dispatch_indices.tolist() == [
        [[-1, -1], [1, 0], [-1, -1]],
        [[-1, -1], [0, 0], [-1, -1]],
        [[-1, -1], [2, 0], [-1, -1]],
    ]
    assert result.combine_weights[1].tolist() == [0, 2 + 2 / 16, 0]
    assert (result.num_dropped, result.num_overflowed, result.counts) == (0, 1, {})


def test_overflow_comes_after_all_ordinary_placements():
    """Token 1 could have had the one row of expert 0 before token 2 asked for it."""
    result = dispatch([[1, 1], [1, 1], [2, 0]], capacity=1)
    assert rows_of(result) == [[2], [0], [2], []]
    assert (result.num_dropped, result.num_overflowed, result.counts, result.first) == (1, 0, {5: 1}, (1, 5))


@pytest.mark.parametrize(("capacity", "counts", "dropped", "overflowed"), [(3, [3, 3], 4, 3), (5, [5, 5], 0, 5)])
def test_every_token_to_one_expert(capacity, counts, dropped, overflowed):
    """48 rows were written past the allocation: NVIDIA/TransformerEngine#3346."""
    result = dispatch([[1]] * 10, capacity, experts=2)
    assert result.expert_counts.tolist() == counts
    assert (result.num_dropped, result.num_overflowed) == (dropped, overflowed)
    assert rows_of(result) == [list(range(capacity, 2 * capacity)), list(range(capacity))]


def test_the_overflow_expert_may_be_the_full_one():
    """Capacity was enforced in one of two modes alone: deepspeedai/DeepSpeed#1658."""
    result = dispatch([[0]] * 5, capacity=2)
    assert (result.expert_counts.tolist(), result.counts, result.first) == ([2, 0, 0, 0], {5: 3}, (2, 5))
    result = dispatch([[0, 1]] * 5, capacity=2)
    assert (result.expert_counts.tolist(), result.num_dropped) == ([2, 2, 0, 0], 3)
    assert np.count_nonzero(result.dispatch_indices[..., 0] == -1) == 6


def test_a_repeated_expert_takes_a_token_once():
    """The second slot was left unwritten: flashinfer-ai/flashinfer#3011."""
    result = dispatch([[5, 8, 8, 6]] * 3, experts=16)
    assert result.dispatch_indices[1].tolist() == [[5, 1], [8, 1], [-1, -1], [6, 1]]
    assert result.combine_weights[1].tolist() == [2.375, 2.5625, 0, 2.4375]
    # Of a repeated choice that had no room the first goes to expert 0.
    result = dispatch([[1, 2], [1, 1]], capacity=1)
    assert result.dispatch_indices[1].tolist() == [[0, 0], [-1, -1]]


def test_padding_and_indices_out_of_range():
    indices = [[-1, -1], [-1, 2], [4, 1], [-2, -1], [2**31 - 1, -(2**31)]]
    result = dispatch(indices)
    assert rows_of(result) == [[], [2], [1], []]
    assert (result.dispatch_indices[[0, 3, 4]] == -1).all()
    assert (result.num_dropped, result.counts, result.first) == (0, {6: 4}, (4, 6))


@pytest.mark.parametrize("indices", [[[0, 1], [2, 3]], [[0, -1], [-1, -1]]])
def test_without_capacity_every_token_with_a_choice_is_dropped(indices):
    result = dispatch(indices, capacity=0)
    dropped = sum(any(index >= 0 for index in row) for row in indices)
    assert result.expert_inputs.shape == (4, 0, 2) and (result.dispatch_indices == -1).all()
    assert (result.num_dropped, result.counts, result.first) == (dropped, {5: dropped}, (0, 5))


def test_bad_elements_of_placed_tokens_and_weights():
    tokens, weights = normal((3, 2)), np.ones((3, 4))
    tokens[0, 1], tokens[1, 0], tokens[2, 0] = np.nan, -np.inf, np.nan
    weights[0, 2], weights[1, 3] = np.inf, np.nan
    # Token 2 is dropped, and no choice takes weights[1, 3]: neither is looked at.
    result = dispatch([[2, 3], [2, 0], [2, 0]], capacity=1, tokens=tokens, weights=weights)
    assert result.expert_inputs[2, 0].tolist() == [tokens[0, 0], 0]
    assert result.expert_inputs[0, 0].tolist() == [0, tokens[1, 1]]
    assert result.combine_weights.tolist() == [[0, 1], [0, 1], [0, 0]]
    assert (result.counts, result.first) == ({1: 1, 2: 2, 5: 1}, (1, 1))


def test_combine_one_element_at_a_time():
    result = dispatch([[0, 1], [1, 3], [2, -1], [-1, -1]])
    outputs = normal(result.expert_inputs.shape)
    combined = reference.sparse_moe_combine(outputs, result).output
    for t in range(4):
        wanted = np.zeros(2)
        for (expert, position), weight in zip(result.dispatch_indices[t], result.combine_weights[t], strict=True):
            if expert >= 0:
                wanted += weight * outputs[expert, position].astype(np.float64)
        assert combined[t] == pytest.approx(wanted, rel=1e-14)
    assert (combined[3] == 0).all()
    sums = result.combine_weights.sum(axis=1, keepdims=True)
    renormalised = reference.sparse_moe_combine(outputs, result, True).output
    assert renormalised[:3] == pytest.approx(combined[:3] / sums[:3], rel=1e-14)


def test_combine_does_not_look_at_rows_without_a_token():
    result = dispatch([[0], [1]])
    outputs = np.full(result.expert_inputs.shape, np.nan)
    outputs[0, 0], outputs[1, 0] = 1, 2
    combined = reference.sparse_moe_combine(outputs, result)
    assert combined.output[:, 0].tolist() == [1.0625, 4.25] and combined.counts == {}


def test_combine_counts_bad_elements_as_zero():
    result = dispatch([[0, 1], [2, 3]])
    outputs = np.ones(result.expert_inputs.shape)
    outputs[0, 0, 1], outputs[3, 0] = np.nan, np.inf
    result.combine_weights[1, 0] = np.nan
    combined = reference.sparse_moe_combine(outputs, result)
    assert combined.output.tolist() == [[2.1875, 1.125], [0, 0]]
    assert (combined.counts, combined.first) == ({1: 2, 2: 2}, (1, 1))


def test_combine_skips_places_outside_the_buffers():
    result = dispatch([[0, 1], [2, 3]])
    for place in ([4, 0], [0, 2], [-1, 0], [0, -2]):
        result.dispatch_indices[1, 0] = place
        combined = reference.sparse_moe_combine(np.ones(result.expert_inputs.shape), result)
        assert combined.output[1].tolist() == [2.25, 2.25]
        assert (combined.counts, combined.first) == ({6: 1}, (2, 6)), place


def test_combine_records_what_its_type_cannot_hold():
    result = dispatch([[0, 1]], weights=np.ones((1, 4)))
    for dtype, most in ((np.float32, 3e38), (np.float16, 6e4)):
        combined = reference.sparse_moe_combine(np.full(result.expert_inputs.shape, most, dtype), result)
        assert (combined.output == 0).all() and (combined.counts, combined.first) == ({2: 2}, (0, 2))


def test_combine_divides_by_no_sum_of_zero():
    result = dispatch([[0, 1]], weights=np.array([[1.0, -1.0, 0.0, 0.0]]))
    outputs = np.ones(result.expert_inputs.shape)
    outputs[1] = 3
    assert reference.sparse_moe_combine(outputs, result, False).output.tolist() == [[-2, -2]]
    assert reference.sparse_moe_combine(outputs, result, True).output.tolist() == [[0, 0]]


@given(st.integers(0, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_nothing_is_lost(T, E, k, capacity, seed):
    random = np.random.default_rng(seed)
    indices = random.integers(-2, E + 1, (T, k))
    tokens, weights = normal((T, 3), seed=seed), random.uniform(0.5, 1, (T, E))
    result = reference.sparse_moe_dispatch(tokens, weights, indices, capacity)
    is_placed = result.dispatch_indices[..., 0] >= 0
    rows = [tuple(row) for row in result.dispatch_indices[is_placed]]
    assert len(set(rows)) == len(rows)
    assert sorted(rows) == [(e, p) for e in range(E) for p in range(result.expert_counts[e])]
    assert (result.expert_counts <= capacity).all()
    in_range = (indices >= 0) & (indices < E)
    assert result.num_dropped == np.count_nonzero(in_range.any(axis=1) & ~is_placed.any(axis=1))
    back = reference.sparse_moe_combine(result.expert_inputs, result, True).output
    assert back == pytest.approx(tokens * is_placed.any(axis=1)[:, None], rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": np.zeros(3)}, r"input: expected shape \[T, d\], got \[3\]"),
        ({"routing_weights": np.zeros((2, 4))}, r"routing_weights: expected shape \[3, E\] with E >= 1, got \[2, 4\]"),
        ({"routing_weights": np.zeros((3, 0))}, r"routing_weights: expected shape \[3, E\] with E >= 1, got \[3, 0\]"),
        ({"top_k_indices": np.zeros(3, int)}, r"top_k_indices: expected shape \[3, k\], got \[3\]"),
        ({"expert_capacity": -1}, "expert_capacity: expected at least 0, got -1"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "input": np.zeros((3, 2)),
        "routing_weights": np.zeros((3, 4)),
        "top_k_indices": np.zeros((3, 2), np.int64),
    }
    with pytest.raises(ValueError, match="sparse_moe_dispatch: " + message):
        reference.sparse_moe_dispatch(**(arguments | change))
    with pytest.raises(TypeError):
        reference.sparse_moe_dispatch(**(arguments | {"top_k_indices": np.zeros((3, 2))}))


@pytest.mark.parametrize(
    ("outputs", "change", "message"),
    [
        (np.zeros((4, 2)), {}, r"expert_outputs: expected shape \[E, capacity, d\], got \[4, 2\]"),
        (np.zeros((4, 2, 2)), {"dispatch_indices": np.zeros((2, 2), int)}, r"dispatch_indices: expected shape"),
        (np.zeros((4, 2, 2)), {"combine_weights": np.zeros((2, 3))}, r"combine_weights: expected shape \[2, 2\]"),
    ],
)
def test_combine_refusals(outputs, change, message):
    with pytest.raises(ValueError, match="sparse_moe_combine: " + message):
        reference.sparse_moe_combine(outputs, dispatch([[0, 1], [2, 3]])._replace(**change))
