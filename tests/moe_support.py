"""What the tests of the mixture of experts share: routings, guarded calls, and what every result must keep."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from support import LIMITS, Guarded, events_of, normal, to_host, to_target

import burt_numba
from burt_numba import moe, moe_launches, reference
from burt_numba.reference.common import non_finite_events, summarise_events


class Routing(NamedTuple):
    """The first three arguments of sparse_moe_dispatch."""

    input: np.ndarray
    routing_weights: np.ndarray
    top_k_indices: np.ndarray


def routing_of(indices, experts, d=3, *, dtype=np.float32, index_dtype=np.int32, weight_dtype=np.float32, seed=0):
    """Normal tokens and positive weights for given choices."""
    indices = np.asarray(indices)
    random = np.random.default_rng(seed)
    weights = random.uniform(0.1, 1.0, (len(indices), experts)).astype(weight_dtype)
    return Routing(normal((len(indices), d), dtype=dtype, seed=seed), weights, indices.astype(index_dtype))


def random_routing(T, d, experts, k, *, lowest=0, more=0, seed=0, **options):
    """Skewed choices in [lowest, experts + more): a low expert is asked for most, and some are named more than once."""
    uniform = np.random.default_rng(seed + 1).random((T, k))
    indices = lowest + (uniform**2 * (experts + more - lowest)).astype(np.int64)
    return routing_of(indices, experts, d, seed=seed, **options)


def distinct_routing(T, d, experts, k, *, seed=0, **options):
    """Each token names k different experts, as a top-k gives them."""
    indices = np.argsort(np.random.default_rng(seed + 1).random((T, experts)), axis=1)[:, :k]
    return routing_of(indices, experts, d, seed=seed, **options)


def capacity_of(routing, capacity=None):
    """The capacity that a call has: the one given, or the documented default."""
    if capacity is not None:
        return capacity
    T, k = routing.top_k_indices.shape
    return -(-2 * T * k // routing.routing_weights.shape[1])


# Calls ---------------------------------------------------------------------------------------------------------------


def small_blocks(monkeypatch, threads=32, multiprocessors=5, shared_bytes=None):
    """Until the test is over, let blocks of so many threads give out the rows, with so much shared memory in each."""
    monkeypatch.setattr(moe._DISPATCH_OPERATION, "_calls", {})
    monkeypatch.setattr(moe, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(moe_launches, "_ONE_BLOCK", 0)
    monkeypatch.setattr(moe_launches, "POSITIONS_BLOCK", threads)
    if shared_bytes is not None:
        monkeypatch.setattr(moe_launches, "most_shared_bytes", lambda capability: shared_bytes)


OUTPUTS = ("expert_inputs", "dispatch_indices", "expert_counts", "combine_weights", "num_dropped", "num_overflowed")


class Dispatched(NamedTuple):
    """What a dispatch gave, on the host."""

    expert_inputs: np.ndarray
    dispatch_indices: np.ndarray
    expert_counts: np.ndarray
    combine_weights: np.ndarray
    num_dropped: np.ndarray
    num_overflowed: np.ndarray
    counts: dict
    first: tuple | None


def output_contents(routing, capacity=None):
    """An array for each output, in NaN and sentinels."""
    T, d = routing.input.shape
    experts, k = routing.routing_weights.shape[1], routing.top_k_indices.shape[1]
    shapes = {
        "expert_inputs": ((experts, capacity_of(routing, capacity), d), routing.input.dtype),
        "dispatch_indices": ((T, k, 2), np.int32),
        "expert_counts": ((experts,), np.int32),
        "combine_weights": ((T, k), routing.routing_weights.dtype),
        "num_dropped": ((1,), np.int32),
        "num_overflowed": ((1,), np.int32),
    }
    return {
        name: np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -777_777, dtype)
        for name, (shape, dtype) in shapes.items()
    }


def run_dispatch(routing, capacity=None, *, skew=None, **options):
    """Call sparse_moe_dispatch with guarded outputs of NaN and sentinels, and an error buffer of its own.

    With `skew`, the inputs lie between guard cells as well (of NaN, and of an index that would be recorded), and every
    array so many elements off alignment.
    """
    if skew is None:
        inputs = [to_target(array) for array in routing]
    else:
        inputs = [Guarded(array, np.nan if array.dtype.kind == "f" else 10_000, skew).array for array in routing]
    outputs = {name: Guarded(content, 777, skew or 0) for name, content in output_contents(routing, capacity).items()}
    errors = burt_numba.ErrorBuffer()
    returned = burt_numba.sparse_moe_dispatch(
        *inputs, capacity, errors=errors, **{name: output.array for name, output in outputs.items()}, **options
    )
    assert all(getattr(returned, name) is output.array for name, output in outputs.items())
    return Dispatched(*(output.result() for output in outputs.values()), *events_of(errors))


def call_dispatch(routing, *args, **options):
    """Call sparse_moe_dispatch, which allocates what is not given and zeroes the rows of it that hold no token."""
    errors = burt_numba.ErrorBuffer()
    return on_host(burt_numba.sparse_moe_dispatch(*map(to_target, routing), *args, errors=errors, **options), errors)


def on_host(result, errors):
    """A result and its events."""
    events = events_of(errors)
    return Dispatched(*(to_host(getattr(result, name)) for name in OUTPUTS), *events)


def on_target(dispatched):
    """Places and weights as sparse_moe_combine takes them."""
    return SimpleNamespace(
        dispatch_indices=to_target(dispatched.dispatch_indices), combine_weights=to_target(dispatched.combine_weights)
    )


def expected_dispatch(routing, capacity=None):
    """What the reference gives, in the types of a dispatch."""
    expected = reference.sparse_moe_dispatch(*routing, capacity)
    contents = output_contents(routing, capacity)
    outputs = (
        np.reshape(getattr(expected, name), contents[name].shape).astype(contents[name].dtype) for name in OUTPUTS
    )
    return Dispatched(*outputs, expected.counts, expected.first)


# Promises ------------------------------------------------------------------------------------------------------------


def assert_rows(outcome, routing, unused):
    """The rows of the buffers are the tokens placed in them, bit for bit, and the others hold `unused`."""
    wanted = np.full(outcome.expert_inputs.shape, unused, routing.input.dtype)
    tokens = np.where(np.isfinite(routing.input), routing.input, 0).astype(routing.input.dtype)
    for token, choice in np.argwhere(outcome.dispatch_indices[..., 0] >= 0):
        wanted[tuple(outcome.dispatch_indices[token, choice])] = tokens[token]
    assert outcome.expert_inputs.dtype == wanted.dtype
    assert outcome.expert_inputs.tobytes() == wanted.tobytes()


def assert_dispatched(outcome, routing, capacity=None, *, unused=np.nan):
    """Everything that sparse_moe_dispatch promises of its deterministic order."""
    expected = expected_dispatch(routing, capacity)
    for name in OUTPUTS[1:]:
        given, wanted = getattr(outcome, name), getattr(expected, name)
        assert given.dtype == wanted.dtype and np.array_equal(given, wanted), name
    assert_rows(outcome, routing, unused)
    assert (outcome.counts, outcome.first) == (expected.counts, expected.first)


def assert_conserved(outcome, routing, capacity=None, *, unused=np.nan):
    """Everything that sparse_moe_dispatch promises in whatever order rows are given out."""
    tokens, weights, indices = routing
    T, experts = weights.shape
    capacity = capacity_of(routing, capacity)
    places = outcome.dispatch_indices
    is_placed = places[..., 0] >= 0
    assert (places[~is_placed] == -1).all() and (outcome.combine_weights[~is_placed] == 0).all()

    rows = [tuple(row) for row in places[is_placed].tolist()]
    assert len(set(rows)) == len(rows), "a row was given out twice"
    assert sorted(rows) == [(e, p) for e in range(experts) for p in range(outcome.expert_counts[e])]
    assert (outcome.expert_counts <= capacity).all()
    assert_rows(outcome, routing, unused)

    in_range = (indices >= 0) & (indices < experts)
    asked, taken, overflowed, dropped = np.zeros(experts, int), np.zeros(experts, int), [], []
    used = np.zeros(weights.shape, bool)
    for token in range(T):
        wanted = set(indices[token][in_range[token]].tolist())
        placed = places[token, is_placed[token], 0].tolist()
        assert len(set(placed)) == len(placed), "an expert took a token twice"
        asked[list(wanted)] += 1
        if not placed:
            dropped += [token] if wanted else []
            continue
        for choice in np.flatnonzero(is_placed[token]):
            weight = weights[token, indices[token, choice]]
            used[token, indices[token, choice]] = True
            assert outcome.combine_weights[token, choice] == (weight if np.isfinite(weight) else 0)
        if places[token, is_placed[token], 0].tolist() == indices[token, is_placed[token]].tolist():
            taken[placed] += 1
        else:
            assert placed == [0], "a choice lies with an expert that it does not name"
            assert np.flatnonzero(is_placed[token]).tolist() == [np.argmax(in_range[token])]
            overflowed.append(token)
    # A choice has a row unless its expert is full, so only which tokens those are is left to the order.
    assert taken.tolist() == np.minimum(asked, capacity).tolist()
    room = capacity - taken[0]
    assert len(overflowed) == min(room, len(overflowed) + len(dropped))
    assert (int(outcome.num_dropped[0]), int(outcome.num_overflowed[0])) == (len(dropped), len(overflowed))

    expected = summarise_events(
        non_finite_events(tokens, is_placed.any(axis=1)[:, np.newaxis]),
        non_finite_events(weights, used),
        {5: np.isin(np.arange(T), dropped)},
        {6: ~in_range & (indices != -1)},
    )
    assert (outcome.counts, outcome.first) == expected


def check_dispatch(routing, capacity=None, **options):
    """Run a dispatch into given buffers and hold it to everything it promises. Returns the outcome."""
    outcome = run_dispatch(routing, capacity, **options)
    if options.get("deterministic", True):
        assert_dispatched(outcome, routing, capacity)
    assert_conserved(outcome, routing, capacity)
    return outcome


def same_results(one, other):
    """Every output has the same bits, and the events are the same."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one[:6], other[:6], strict=True)) and one[6:] == other[6:]


# Combine -------------------------------------------------------------------------------------------------------------


class Combined(NamedTuple):
    """What a combine gave, on the host."""

    out: np.ndarray
    counts: dict
    first: tuple | None


def run_combine(expert_outputs, dispatched, renormalize=False, *, skew=None, **options):
    """Call sparse_moe_combine with a guarded output of NaN and an error buffer of its own; `skew` as above."""
    outputs = to_target(expert_outputs) if skew is None else Guarded(expert_outputs, np.nan, skew).array
    T, d = len(dispatched.combine_weights), expert_outputs.shape[2]
    out = Guarded(np.full((T, d), np.nan, expert_outputs.dtype), 777, skew or 0)
    errors = burt_numba.ErrorBuffer()
    returned = burt_numba.sparse_moe_combine(
        outputs, on_target(dispatched), renormalize, out=out.array, errors=errors, **options
    )
    assert returned is out.array
    return Combined(out.result(), *events_of(errors))


def assert_combined(outcome, expert_outputs, dispatched, renormalize=False):
    """Everything that sparse_moe_combine promises: each token within the limit of its type, by the size of its terms.

    Terms of both signs cancel, and leave their rounding behind.
    """
    expected = reference.sparse_moe_combine(expert_outputs, dispatched, renormalize)
    weights = np.where(np.isfinite(dispatched.combine_weights), dispatched.combine_weights, 0).astype(np.float64)
    if renormalize:
        total = weights.sum(axis=1, keepdims=True)
        weights = np.divide(weights, total, out=weights, where=total != 0)
    magnitudes = SimpleNamespace(dispatch_indices=dispatched.dispatch_indices, combine_weights=np.abs(weights))
    terms = reference.sparse_moe_combine(np.abs(expert_outputs), magnitudes).output
    assert outcome.out.dtype == expert_outputs.dtype and np.isfinite(outcome.out).all()
    error = np.linalg.norm(outcome.out - expected.output, axis=1)
    most = LIMITS[outcome.out.dtype.name] * np.linalg.norm(terms, axis=1)
    assert (error <= most).all(), f"token {np.argmax(error - most)}: error {np.max(error - most):.3g} over its limit"
    assert (outcome.counts, outcome.first) == (expected.counts, expected.first)


def check_combine(expert_outputs, dispatched, renormalize=False, **options):
    """Run a combine and hold it to everything it promises. Returns the outcome."""
    outcome = run_combine(expert_outputs, dispatched, renormalize, **options)
    assert_combined(outcome, expert_outputs, dispatched, renormalize)
    return outcome
