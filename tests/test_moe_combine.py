"""sparse_moe_combine against its reference and its contract: sizes, weights, round trips, degradations."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_support import (
    assert_combined,
    call_dispatch,
    check_combine,
    distinct_routing,
    random_routing,
    routing_of,
    run_combine,
    run_dispatch,
)
from support import LIMITS, cases, normal, relative_error

each_sum = pytest.mark.parametrize("renormalize", [False, True])


def outputs_for(dispatched, d=None, *, dtype=np.float32, seed=0):
    """What experts might answer; NaN in the rows that hold no token, which nobody may read."""
    experts, capacity, columns = dispatched.expert_inputs.shape
    outputs = normal((experts, capacity, columns if d is None else d), dtype=dtype, seed=seed)
    for rows, count in zip(outputs, dispatched.expert_counts, strict=True):
        rows[count:] = np.nan
    return outputs


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "d", cases([1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 127, 128, 129, 255, 256, 257, 520], [1000, 1024, 1025, 4096, 7168])
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@each_sum
def test_columns(d, dtype, renormalize):
    dispatched = run_dispatch(random_routing(5, 1, 3, 2, lowest=-1, seed=d), 3)
    check_combine(outputs_for(dispatched, d, dtype=dtype), dispatched, renormalize)


@pytest.mark.parametrize("T", cases([1, 2, 31, 32, 33, 129, 257], [1023, 1024, 1025, 4097, 10_000]))
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 17])
def test_tokens_and_choices(T, k):
    dispatched = run_dispatch(random_routing(T, 1, 6, k, lowest=-1, seed=T), max(1, T * k // 8))
    check_combine(outputs_for(dispatched, 5), dispatched)


@pytest.mark.parametrize("experts", cases([1, 2, 33, 257], [512, 1500]))
@each_sum
def test_experts(experts, renormalize):
    dispatched = run_dispatch(random_routing(30, 3, experts, 3), 4)
    check_combine(outputs_for(dispatched), dispatched, renormalize)


@pytest.mark.parametrize(
    ("T", "d", "experts", "k"), cases([(64, 16, 4, 2)], [(1024, 512, 4, 2), (4096, 1024, 128, 8), (32, 7168, 128, 8)])
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_documented_sizes(T, d, experts, k, dtype):
    dispatched = run_dispatch(distinct_routing(T, d, experts, k, dtype=dtype))
    check_combine(outputs_for(dispatched, dtype=dtype), dispatched)


@pytest.mark.parametrize(("T", "d", "k", "capacity"), [(0, 4, 2, 3), (3, 0, 2, 3), (3, 4, 0, 3), (3, 4, 2, 0)])
@each_sum
def test_axes_of_size_0(T, d, k, capacity, renormalize):
    dispatched = run_dispatch(random_routing(T, d, 3, k), capacity)
    outcome = check_combine(outputs_for(dispatched), dispatched, renormalize)
    assert outcome.out.shape == (T, d) and (outcome.out == 0).all()


@each_sum
@pytest.mark.parametrize("weight_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_types(dtype, weight_dtype, index_dtype, renormalize):
    """Weights and places have types of their own."""
    dispatched = run_dispatch(distinct_routing(9, 6, 4, 3, weight_dtype=weight_dtype), 5)
    dispatched = dispatched._replace(dispatch_indices=dispatched.dispatch_indices.astype(index_dtype))
    check_combine(outputs_for(dispatched, dtype=dtype), dispatched, renormalize)


# Values --------------------------------------------------------------------------------------------------------------


def test_weights_that_are_powers_of_two_give_known_bits():
    routing = routing_of([[0, 1], [1, -1], [-1, -1]], 2, d=1)
    routing.routing_weights[:] = [[0.5, 0.25], [0, 2], [1, 1]]
    dispatched = run_dispatch(routing)
    outputs = np.zeros(dispatched.expert_inputs.shape, np.float32)
    outputs[0, 0], outputs[1, 0], outputs[1, 1] = 8, 12, 5
    # Expert 1 has token 1 in its first row: a first choice.
    assert run_combine(outputs, dispatched).out[:, 0].tolist() == [4 + 1.25, 24, 0]
    assert run_combine(outputs, dispatched, True).out[:, 0] == pytest.approx([7, 12, 0], rel=1e-6)


@each_sum
def test_dropped_tokens_and_padding_give_zeros(renormalize):
    dispatched = run_dispatch(routing_of([[1], [1], [-1], [1], [7]], 2), 1)
    outcome = check_combine(outputs_for(dispatched), dispatched, renormalize)
    assert (outcome.out[2:] == 0).all() and (outcome.out[:2] != 0).all()


@each_sum
def test_overflow_is_weighted_as_its_choice(renormalize):
    routing = routing_of([[1], [1]], 2)
    dispatched = run_dispatch(routing, 1)
    outputs = outputs_for(dispatched)
    outcome = check_combine(outputs, dispatched, renormalize)
    weight = np.float32(1) if renormalize else routing.routing_weights[1, 1]
    assert outcome.out[1] == pytest.approx(weight * outputs[0, 0], rel=1e-6)


def test_the_order_of_the_terms_is_that_of_the_choices():
    """The same bits wherever the rows lie."""
    routing = distinct_routing(30, 8, 6, 4)
    one, other = run_dispatch(routing, 30), run_dispatch(routing, 30, deterministic=False)
    rows = normal((30, 6, 8), seed=3)
    results = []
    for dispatched in (one, other):
        outputs = np.zeros(dispatched.expert_inputs.shape, np.float32)
        for token, choice in np.argwhere(dispatched.dispatch_indices[..., 0] >= 0):
            expert, position = dispatched.dispatch_indices[token, choice]
            outputs[expert, position] = rows[token, expert]
        results.append(run_combine(outputs, dispatched).out)
    assert results[0].tobytes() == results[1].tobytes()
    for _ in range(3):
        assert run_combine(outputs, other).out.tobytes() == results[1].tobytes()


def test_signed_and_vanishing_weights():
    """Weights that add up to 0 are divided by nothing: zeros."""
    routing = distinct_routing(40, 6, 5, 3)
    routing.routing_weights[:] = normal(routing.routing_weights.shape, 1.0, seed=5)
    routing.routing_weights[::4] = 0
    dispatched = run_dispatch(routing)
    for renormalize in (False, True):
        outcome = run_combine(outputs_for(dispatched), dispatched, renormalize)
        assert (outcome.out[::4] == 0).all() and np.isfinite(outcome.out).all() and outcome.counts == {}
    check_combine(outputs_for(dispatched), dispatched)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
@each_sum
def test_weights_of_any_size(scale, renormalize):
    routing = distinct_routing(20, 6, 5, 3)
    routing.routing_weights[:] *= np.float32(scale)
    dispatched = run_dispatch(routing)
    check_combine(outputs_for(dispatched), dispatched, renormalize)


@pytest.mark.parametrize("scale", [1e-40, 3e38])
def test_renormalised_weights_whose_sum_float32_hardly_holds(scale):
    routing = distinct_routing(20, 6, 5, 3)
    routing.routing_weights[:] *= np.float32(scale)
    dispatched = run_dispatch(routing)
    check_combine(outputs_for(dispatched), dispatched, True)


# Round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("capacity", [None, 9, 3])
def test_dispatch_then_combine_gives_the_tokens_back(dtype, deterministic, capacity):
    routing = random_routing(30, 12, 5, 3, lowest=-1, dtype=dtype)
    dispatched = run_dispatch(routing, capacity, deterministic=deterministic)
    outcome = run_combine(dispatched.expert_inputs, dispatched, renormalize=True)
    has_row = (dispatched.dispatch_indices[..., 0] >= 0).any(axis=1)
    assert relative_error(outcome.out[has_row], routing.input[has_row]) <= LIMITS[np.dtype(dtype).name]
    assert (outcome.out[~has_row] == 0).all() and outcome.counts == {}


@given(
    st.integers(0, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.integers(0, 99)
)
def test_round_trip(T, d, experts, k, capacity, seed):
    routing = random_routing(T, d, experts, k, lowest=-2, more=2, seed=seed)
    dispatched = call_dispatch(routing, capacity)
    outcome = check_combine(dispatched.expert_inputs, dispatched, True)
    has_row = (dispatched.dispatch_indices[..., 0] >= 0).any(axis=1)
    assert outcome.out == pytest.approx(routing.input * has_row[:, np.newaxis], rel=LIMITS["float32"])


def test_experts_may_answer_in_another_width():
    dispatched = run_dispatch(random_routing(9, 4, 3, 2), 5)
    assert check_combine(outputs_for(dispatched, 7), dispatched).out.shape == (9, 7)


# Degradations --------------------------------------------------------------------------------------------------------


@each_sum
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("d", [33, 40, 256])
def test_bad_elements_count_as_zero(d, dtype, renormalize):
    dispatched = run_dispatch(distinct_routing(9, d, 4, 3, dtype=dtype))
    outputs = outputs_for(dispatched, dtype=dtype)
    expert, position = dispatched.dispatch_indices[4, 1]
    outputs[expert, position, [3, 30]], outputs[0, 0] = (np.nan, -np.inf), np.inf
    check_combine(outputs, dispatched, renormalize)


@each_sum
@pytest.mark.parametrize("d", [5, 300, 1000])
def test_bad_weights_count_as_zero(d, renormalize):
    """Recorded once, however many warps have a part of the token."""
    dispatched = run_dispatch(distinct_routing(9, d, 4, 3))
    weights = dispatched.combine_weights.copy()
    weights[3, 1], weights[7] = np.nan, np.inf
    dispatched = dispatched._replace(combine_weights=weights)
    outcome = check_combine(outputs_for(dispatched), dispatched, renormalize)
    assert (outcome.out[7] == 0).all() and outcome.counts == {1: 1, 2: 3}


@pytest.mark.parametrize(
    "place", [[4, 0], [2**31 - 1, 0], [0, 14], [3, 14], [0, 100], [-2, 0], [-1, 0], [0, -1], [1, -(2**31)]]
)
@pytest.mark.parametrize("d", [5, 300, 1000])
def test_places_outside_the_buffers_are_skipped(d, place):
    dispatched = run_dispatch(distinct_routing(9, d, 4, 3))
    assert dispatched.expert_inputs.shape[:2] == (4, 14)
    places = dispatched.dispatch_indices.copy()
    places[4, 2] = place
    dispatched = dispatched._replace(dispatch_indices=places)
    outcome = check_combine(outputs_for(dispatched), dispatched)
    assert (outcome.counts, outcome.first) == ({6: 1}, (14, 6))


@pytest.mark.parametrize(("dtype", "most"), [(np.float32, 3e38), (np.float16, 6e4)])
@pytest.mark.parametrize("d", [5, 8, 40, 300, 1000])
def test_sums_that_their_type_cannot_hold_are_zero_and_recorded(d, dtype, most):
    """In every column in turn, and in several."""
    routing = routing_of([[0, 1], [1, 0]], 2, d=d, dtype=dtype)
    routing.routing_weights[:] = 1
    dispatched = run_dispatch(routing)
    places = dispatched.dispatch_indices.copy()
    places[0], places[1] = [[0, 0], [1, 0]], [[1, 1], [0, 1]]
    for columns in ([0], [3], [d - 1], [d // 2, d - 2], range(1, d)):
        outputs, wanted = np.ones(dispatched.expert_inputs.shape, dtype), np.full((2, d), 2)
        outputs[:, 0, columns], wanted[0, columns] = most, 0
        outcome = run_combine(outputs, dispatched._replace(dispatch_indices=places))
        assert np.array_equal(outcome.out, wanted)
        assert (outcome.counts, outcome.first) == ({2: len(columns)}, (columns[0], 2))


def test_places_of_rows_without_elements_are_looked_at():
    places = np.array([[[-2, 0], [0, 0]], [[0, 5], [-1, -1]]], np.int32)
    weights = np.array([[1, np.nan], [1, 0]], np.float32)
    given = SimpleNamespace(dispatch_indices=places, combine_weights=weights)
    outcome = check_combine(np.ones((2, 3, 0), np.float32), given)
    assert (outcome.counts, outcome.first) == ({1: 1, 6: 2}, (0, 6))


@st.composite
def any_dispatches(draw):
    """Each row belongs to one choice at most; among the choices are ones without a row, and ones that name none."""
    T, k, experts, capacity, d = (
        draw(st.integers(low, high)) for low, high in ((0, 6), (1, 4), (1, 4), (0, 5), (1, 9))
    )
    random = np.random.default_rng(draw(st.integers(0, 999)))
    rows = [(e, p) for e in range(experts) for p in range(capacity)]
    others = [(-1, -1), (-1, -1), (experts, 0), (0, capacity), (-2, 0), (0, -1)]
    # Twice as many others as there are choices, so that few rows do not run out.
    pool = [*random.permutation(np.array(rows).reshape(-1, 2)), *(others[i % 6] for i in range(2 * T * k))]
    order = random.permutation(len(pool))[: T * k]
    places = np.array([pool[i] for i in order], np.int32).reshape(T, k, 2)
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    outputs = normal((experts, capacity, d), dtype=dtype, seed=draw(st.integers(0, 99)))
    weights = random.uniform(0.1, 1, (T, k)).astype(draw(st.sampled_from([np.float32, np.float16])))
    if draw(st.booleans()):
        for array in (outputs, weights):
            array[random.random(array.shape) < 0.2] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return outputs, SimpleNamespace(dispatch_indices=places, combine_weights=weights)


@given(any_dispatches(), st.booleans())
def test_contract_holds_for_anything(given, renormalize):
    check_combine(*given, renormalize)


# A deliberately wrong operation must fail at the same limits ---------------------------------------------------------


def without_weights(outputs, dispatched, outcome):
    ones = dispatched._replace(combine_weights=(dispatched.combine_weights != 0).astype(np.float32))
    return outcome._replace(out=run_combine(outputs, ones).out)


def without_a_choice(outputs, dispatched, outcome):
    weights = dispatched.combine_weights.copy()
    weights[:, -1] = 0
    return outcome._replace(out=run_combine(outputs, dispatched._replace(combine_weights=weights)).out)


def off_by_one(outputs, dispatched, outcome):
    return outcome._replace(out=run_combine(np.roll(np.nan_to_num(outputs), 1, axis=1), dispatched).out)


WRONG = {
    "weights left out": without_weights,
    "the last choice left out": without_a_choice,
    "rows off by one": off_by_one,
    "renormalised": lambda y, s, o: run_combine(y, s, True),
    "neighbouring token": lambda y, s, o: o._replace(out=np.roll(o.out, 1, axis=0)),
    "a dropped token that is not zero": lambda y, s, o: o._replace(
        out=np.where((s.combine_weights == 0).all(axis=1)[:, None], np.float32(1e-3), o.out)
    ),
    "one element off by a ten-thousandth": lambda y, s, o: o._replace(
        out=o.out * np.where(o.out == o.out.max(), np.float32(1 + 1e-4), np.float32(1))
    ),
    "an event too many": lambda y, s, o: o._replace(counts={1: 1}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_are_noticed(fault):
    dispatched = run_dispatch(distinct_routing(20, 6, 4, 2), 5)
    outputs = outputs_for(dispatched)
    outcome = check_combine(outputs, dispatched)
    assert dispatched.num_dropped[0] > 0
    with pytest.raises(AssertionError):
        assert_combined(WRONG[fault](outputs, dispatched, outcome), outputs, dispatched)
