"""The reference of biencoder_attention against values worked out elsewhere."""

import numpy as np
import pytest
from scipy.special import logsumexp, softmax
from support import normal

from burt_numba import reference


def vectors(B=2, H=4, Q=3, K=5, D=8, key_heads=2):
    shapes = ((B, H, Q, D), (B, key_heads, K, D), (B, key_heads, K, D))
    return [normal(shape, 1.5, seed=seed) for seed, shape in enumerate(shapes)]


def attend(*args, **options):
    return reference.biencoder_attention(*args, **options)


def one_query(scores, values, **options):
    """A query of one element, 1, and keys that are the scores."""
    arrays = [np.reshape(array, (1, 1, -1, 1)) for array in ([1.0], scores, values)]
    return attend(*arrays, 1.0, **options)


def test_without_a_bound_it_is_plain_attention():
    query, keys, values = vectors(key_heads=4)
    result = attend(query, keys, values, entropy_bound=None)
    scores = np.einsum("bhqd,bhkd->bhqk", query, keys, dtype=np.float64) * float(np.float32(8**-0.5))
    weights = softmax(scores, axis=3)
    assert result.weights == pytest.approx(weights, rel=1e-12)
    assert result.output == pytest.approx(np.einsum("bhqk,bhkd->bhqd", weights, values), rel=1e-10, abs=1e-12)
    assert result.lse == pytest.approx(logsumexp(scores, axis=3), rel=1e-12)
    assert (result.temperature == 1).all() and result.counts == {} and result.first is None


def test_the_weights_are_those_of_constrained_softmax():
    query, keys, values = vectors(key_heads=4)
    scores = np.einsum("bhqd,bhkd->bhqk", query, keys, dtype=np.float64) * float(np.float32(8**-0.5))
    result, expected = attend(query, keys, values), reference.constrained_softmax(scores)
    assert result.weights == pytest.approx(expected.probabilities, rel=1e-9)
    assert result.temperature == pytest.approx(expected.temperature, rel=1e-12)
    assert result.entropy == pytest.approx(expected.entropy, rel=1e-9)
    assert result.counts == expected.counts


def test_a_head_of_the_keys_serves_neighbouring_heads_of_the_queries():
    query, keys, values = vectors(H=6)
    result = attend(query, keys, values)
    for head in range(6):
        alone = attend(query[:, [head]], keys[:, [head // 3]], values[:, [head // 3]])
        assert result.output[:, [head]] == pytest.approx(alone.output, rel=1e-12)


def test_one_bound_a_head():
    query, keys, values = vectors()
    result = attend(query, keys, values, entropy_bound=[0.1, np.nan, 9.0, -1.0])
    assert (result.entropy[:, 0] <= 0.1 + 1e-12).all() and (result.temperature[:, 2] == 1).all()
    assert (result.temperature[:, [1, 3]] < 0.2).all()
    assert result.counts[6] == 2 and result.first in ((1, 6), (0, 3))


def test_lengths():
    query, keys, values = vectors(B=4)
    result = attend(query, keys, values, context_lengths=[0, 2, 9, -3])
    assert (result.output[[0, 3]] == 0).all() and (result.weights[[0, 3]] == 0).all()
    assert (result.temperature[0] == 1).all() and (result.entropy[0] == 0).all() and np.isneginf(result.lse[0]).all()
    alone = attend(query[[1]], keys[[1], :, :2], values[[1], :, :2])
    assert result.output[[1]] == pytest.approx(alone.output, rel=1e-12)
    assert (result.counts[6], result.first) == (2, (2, 6))


def test_nothing_past_a_length_is_looked_at():
    query, keys, values = vectors()
    clean = attend(query, keys, values, context_lengths=[3, 5])
    keys[0, :, 3:], values[0, :, 4] = np.nan, np.inf
    result = attend(query, keys, values, context_lengths=[3, 5])
    assert (result.output == clean.output).all() and result.counts == clean.counts


def test_bad_elements_count_as_zero():
    query, keys, values = vectors()
    arrays = [array.copy() for array in (query, keys, values)]
    arrays[0][1, 2, 1, 3], arrays[1][0, 1, 4, 0], arrays[2][1, 1, 0, 7] = np.nan, np.inf, -np.inf
    query[1, 2, 1, 3], keys[0, 1, 4, 0], values[1, 1, 0, 7] = 0, 0, 0
    result, clean = (attend(*a, entropy_bound=9.0) for a in (arrays, (query, keys, values)))
    assert (result.output == clean.output).all()
    assert (result.counts, result.first) == ({1: 1, 2: 2}, (int(np.ravel_multi_index((0, 1, 4, 0), keys.shape)), 2))


def test_values_of_no_weight_are_not_looked_at():
    assert one_query([100.0, 0.0], [1.0, np.nan]).counts == {}
    assert one_query([20.0, 0.0], [1.0, np.nan], entropy_bound=9.0).counts == {1: 1}


@pytest.mark.parametrize(
    ("query", "key", "scale", "counts"),
    [
        ([3e38, 0], [2, 0], 1.0, {2: 1}),
        ([3e38, 3e38], [1, 1], 1.0, {2: 1}),
        ([3e38, 3e38], [2, -2], 1.0, {1: 1}),
        ([3e38, 0], [1, 0], 2.0, {2: 1}),
        ([3e38, 3e38], [1, 1], 0.0, {1: 1}),
        ([3e38, 3e38], [1, -1], 1.0, {}),
    ],
)
def test_scores_that_overflow_are_zero(query, key, scale, counts):
    arrays = [np.reshape(array, (1, 1, -1, 2)) for array in (query, [key, [0, 0]], [[1, 0], [0, 1]])]
    result = attend(*arrays, scale)
    assert result.output.ravel().tolist() == pytest.approx([0.5, 0.5]) and result.counts == counts | {3: 1}


def test_ties_cannot_be_sharpened():
    result = one_query([2.0, 2.0, 1.0], [4.0, 2.0, 9.0])
    assert result.output.item() == pytest.approx(3.0, rel=1e-12)
    assert result.temperature.item() == 0.01 and (result.counts, result.first) == ({3: 1}, (0, 3))


def test_at_a_given_temperature_it_does_not_search():
    query, keys, values = vectors()
    temperature = np.random.default_rng(0).uniform(0.5, 2, (2, 4, 3))
    result = attend(query, keys, values, temperature=temperature)
    expected = attend(query / temperature[..., None], keys, values, entropy_bound=None)
    assert result.output == pytest.approx(expected.output, rel=1e-6)
    assert (result.temperature == temperature).all()


@pytest.mark.parametrize(("lowest", "highest", "start"), [(0.01, 0.5, 0.5), (2.0, 3.0, 2.0)])
def test_the_start_is_one_clipped(lowest, highest, start):
    query, keys, values = vectors(key_heads=4)
    result = attend(query, keys, values, None, None, lowest, highest)
    assert (result.temperature == start).all()
    assert result.output == pytest.approx(attend(query / start, keys, values, None, None).output, rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_without_rows_nothing_is_looked_at(shape):
    B, H, Q, K = shape
    bad = [np.full((B, H, n, 8), np.nan) for n in (Q, K, K)]
    result = attend(*bad, entropy_bound=[-1.0] * H, context_lengths=np.full(B, -1))
    assert result.output.shape == (B, H, Q, 8) and result.counts == {}


def test_without_contexts():
    result = attend(np.ones((1, 2, 3, 4)), np.ones((1, 1, 0, 4)), np.ones((1, 1, 0, 4)))
    assert (result.output == 0).all() and result.output.shape == (1, 2, 3, 4)
    assert result.counts == {} and np.isneginf(result.lse).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": np.zeros((2, 4, 8))}, "query: expected shape"),
        ({"query": np.zeros((2, 4, 3, 0))}, "query: expected shape"),
        ({"context_keys": np.zeros((2, 2, 5, 7))}, "context_keys: expected shape"),
        ({"context_keys": np.zeros((3, 2, 5, 8))}, "context_keys: expected shape"),
        ({"context_keys": np.zeros((2, 3, 5, 8))}, "context_keys: expected shape"),
        ({"context_keys": np.zeros((2, 0, 5, 8))}, "context_keys: expected shape"),
        ({"context_values": np.zeros((2, 2, 6, 8))}, "context_values: expected shape"),
        ({"scale": np.inf}, "scale: expected a finite number"),
        ({"entropy_bound": -0.1}, "entropy_bound: expected a number >= 0"),
        ({"entropy_bound": np.zeros(2)}, "entropy_bound: expected shape"),
        ({"temperature_min": 0.0}, "temperature_min: expected a positive number"),
        ({"temperature_max": 0.001}, "temperature_max: expected at least"),
        ({"max_iterations": 0}, "max_iterations: expected at least 1"),
        ({"context_lengths": np.zeros(3, int)}, "context_lengths: expected shape"),
        ({"precision": "bf16"}, "precision: expected one of fp32, tf32"),
    ],
)
def test_refusals(change, message):
    arguments = dict(zip(("query", "context_keys", "context_values"), vectors(), strict=True))
    with pytest.raises(ValueError, match=f"^biencoder_attention: {message}"):
        attend(**(arguments | change))


def test_refuses_lengths_that_are_no_integers():
    with pytest.raises(TypeError):
        attend(*vectors(), context_lengths=[1.0, 2.0])


# A lower bound from a part of the contexts (docs/biencoder_attention.md) ----------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_part_of_the_contexts_bounds_the_entropy_from_below(seed):
    """H(all) >= ln Z_S + min(1, mean_S) for every part S that holds the maximum; equality where S is all of them."""
    random = np.random.default_rng(seed)
    for _ in range(200):
        gaps = random.exponential(random.choice([0.1, 1, 5, 30]), random.integers(1, 60))
        gaps[0] = 0
        part = np.r_[True, random.random(len(gaps) - 1) < random.random()]
        weights = np.exp(-gaps)
        entropy = reference.entropy(weights / weights.sum())
        total = weights[part].sum()
        mean = (gaps * weights)[part].sum() / total
        assert entropy >= np.log(total) + min(1, mean) - 1e-12


def test_the_entropy_of_a_part_is_no_lower_bound():
    """A crowd at a gap of 5 has more entropy than the same crowd beside a hundred contexts at the maximum."""
    gaps = np.r_[np.zeros(101), np.full(1000, 5.0)]
    weights, part = np.exp(-gaps), slice(100, None)
    total = weights[part].sum()
    mean = (gaps * weights)[part].sum() / total
    entropy = reference.entropy(weights / weights.sum())
    assert np.log(total) + 1 <= entropy < np.log(total) + mean


@pytest.mark.parametrize("K", [10, 1000, 100_000])
@pytest.mark.parametrize("spread", [0.5, 3.0, 30.0])
def test_weights_below_the_threshold_add_up_to_nothing(K, spread):
    """What is skipped is at most K · 2^-40 of the weight."""
    z = normal((K,), spread).astype(np.float64)
    p = softmax(z)
    assert p[p < 2.0**-40].sum() <= K * 2.0**-40 <= 1e-7
