"""The reference of the matrix memory against values worked out elsewhere."""

import numpy as np
import pytest
from scipy.special import expit
from support import normal

from burt_numba import reference

OPEN, SHUT = 100.0, -100.0
"""A bias at which the forget gate is 1 or 0 in float64."""


def update(C, h=0.0, bias=OPEN, bound=0.95, **options):
    """With no input and no weights: the gate is that of the bias alone."""
    C = np.asarray(C, np.float64)
    d = len(C)
    return reference.cifg_update(
        C, np.broadcast_to(h, d), np.zeros(0), np.zeros((d, d)), np.full(d, bias), bound, **options
    )


def random_case(d, n, seed, batch=()):
    rng = np.random.default_rng(seed)
    C, h, x = rng.normal(size=(*batch, d, d)), rng.normal(size=(*batch, d)), rng.normal(size=(*batch, n))
    return C, h, x, rng.normal(size=(d, d + n)), rng.normal(size=d)


def test_gate_and_update_one_element_at_a_time():
    C, h, x, W_f, b_f = random_case(5, 3, 0)
    result = reference.cifg_update(C, h, x, W_f, b_f, 1e9)
    for i in range(5):
        f = expit(sum(W_f[i, k] * value for k, value in enumerate([*h, *x])) + b_f[i])
        assert result.forget_gate[i] == pytest.approx(f, rel=1e-12)
        for j in range(5):
            assert result.memory[i, j] == pytest.approx(f * C[i, j] + (1 - f) * h[i] * h[j], rel=1e-12)
    assert result.sigma == pytest.approx(np.linalg.norm(result.memory, 2), rel=1e-12)
    assert (result.counts, result.first) == ({}, None)


def test_open_gate_keeps_and_shut_gate_replaces():
    C = normal((4, 4), spread=0.1)
    assert np.array_equal(update(C, 1.0, OPEN).memory, C.astype(np.float64))
    assert np.array_equal(update(C, 0.25, SHUT, 9.0).memory, np.full((4, 4), 0.0625))


@pytest.mark.parametrize("bias", [1e4, -1e4, 88.8, -88.8, 104.0, -104.0])
def test_gate_far_from_zero(bias):
    """Outside [-40, 40] a sigmoid gave NaN: ARM-software/ComputeLibrary#779."""
    result = update(np.eye(3), [1.0, 2.0, 3.0], bias, 1e3)
    assert result.memory == pytest.approx(np.eye(3) if bias > 0 else np.outer([1, 2, 3], [1, 2, 3]), abs=1e-30)


@pytest.mark.parametrize(
    ("C", "expected"),
    [
        ([[0.0, 2.0], [0.0, 0.0]], [[0.0, 0.95], [0.0, 0.0]]),
        (2 * np.eye(8), 0.95 * np.eye(8)),
        ([[0.0, -2.0], [2.0, 0.0]], [[0.0, -0.95], [0.95, 0.0]]),
        (np.diag([2.0, -2.0, 2.0, -2.0]), np.diag([0.95, -0.95, 0.95, -0.95])),
        (np.zeros((4, 4)), np.zeros((4, 4))),
        ([[1e-5]], [[1e-5]]),
    ],
)
def test_projection_of_matrices_known_by_heart(C, expected):
    """Zero, nilpotent, with equal and paired top values: pytorch/pytorch#20192,
    odlgroup/odl#495, google-deepmind/optax#1215.
    """
    assert update(C).memory == pytest.approx(np.asarray(expected), abs=1e-15)


def test_clipping_is_the_nearest_matrix_and_scaling_is_proportional():
    rng = np.random.default_rng(1)
    U, _, V = np.linalg.svd(rng.normal(size=(6, 6)))
    C = (U * [1.5, 0.9, 0.5, 0.3, 0.1, 0.0]) @ V
    clipped, scaled = update(C).memory, update(C, projection="scale").memory
    assert np.linalg.svd(clipped)[1] == pytest.approx([0.95, 0.9, 0.5, 0.3, 0.1, 0.0], abs=1e-14)
    assert np.linalg.norm(C - clipped) == pytest.approx(0.55, rel=1e-12)
    assert scaled == pytest.approx(C * (0.95 / 1.5), rel=1e-12)
    # With two singular values over the bound the memory was not within it before, and is scaled.
    C = (U * [1.5, 1.2, 0.5, 0.3, 0.1, 0.0]) @ V
    assert update(C).memory == pytest.approx(C * (0.95 / 1.5), rel=1e-12)


def test_an_update_of_a_memory_within_the_bound_needs_clipping_at_most():
    """Weyl: one singular value alone can come to exceed the bound."""
    for seed in range(20):
        C, h, x, W_f, b_f = random_case(8, 2, seed)
        C *= 0.95 / np.linalg.norm(C, 2)
        before = reference.cifg_update(C, h, x, W_f, b_f, 1e9).memory
        assert np.linalg.svd(before)[1][1] <= 0.95 * (1 + 1e-12)
        after = reference.cifg_update(C, h, x, W_f, b_f).memory
        assert np.linalg.norm(after, 2) <= 0.95 * (1 + 1e-12)


def test_batch_is_as_many_updates_and_shared_is_their_mean():
    C, H, X, W_f, b_f = random_case(6, 4, 2, (3,))
    batch = reference.batched_cifg_update(C, H, X, W_f, b_f)
    singles = [reference.cifg_update(C[b], H[b], X[b], W_f, b_f) for b in range(3)]
    for name in ("memory", "forget_gate", "sigma"):
        expected = np.stack([getattr(single, name) for single in singles])
        assert getattr(batch, name) == pytest.approx(expected, rel=1e-12, abs=1e-14)
    shared = reference.batched_cifg_update(C[0], H, X, W_f, b_f, 1e9, True)
    mean = np.mean([reference.cifg_update(C[0], H[b], X[b], W_f, b_f, 1e9).memory for b in range(3)], axis=0)
    assert shared.memory == pytest.approx(mean, rel=1e-12)
    assert shared.forget_gate == pytest.approx(batch.forget_gate, rel=1e-12)
    tight = reference.batched_cifg_update(C[0], H, X, W_f, b_f, 0.1, True)
    assert tight.memory == pytest.approx(mean * (0.1 / np.linalg.norm(mean, 2)), rel=1e-12)


def test_a_shared_memory_of_one_sample_is_a_single_update():
    C, H, X, W_f, b_f = random_case(4, 2, 5, (1,))
    shared = reference.batched_cifg_update(C[0], H, X, W_f, b_f, 1e9, True)
    assert shared.memory == pytest.approx(reference.cifg_update(C[0], H[0], X[0], W_f, b_f, 1e9).memory, rel=1e-14)


def test_bad_elements_of_the_memory_take_their_row_and_column_with_them():
    C = np.ones((4, 4)) / 8
    C[1, 2], C[3, 0], C[3, 1] = np.nan, -np.inf, np.inf
    result = update(C)
    expected = np.ones((4, 4)) / 8
    expected[[1, 3], :] = expected[:, [0, 1, 2]] = 0
    assert np.array_equal(result.memory, expected)
    assert (result.counts, result.first) == ({1: 1, 2: 2}, (6, 1))


def test_bad_elements_of_vectors_and_weights_count_as_zero():
    C, h, x, W_f, b_f = random_case(3, 2, 3)
    clean = [h.copy(), x.copy(), W_f.copy(), b_f.copy()]
    for array, place, value in ((h, 1, np.nan), (x, 0, -np.inf), (W_f, (2, 4), np.inf), (b_f, 2, np.nan)):
        array[place] = value
    for array, place in zip(clean, (1, 0, (2, 4), 2), strict=True):
        array[place] = 0
    result, expected = reference.cifg_update(C, h, x, W_f, b_f), reference.cifg_update(C, *clean)
    assert np.array_equal(result.memory, expected.memory)
    assert (result.counts, result.first) == ({1: 2, 2: 2}, (0, 2))


def test_what_float32_cannot_hold_is_lost_and_recorded():
    result = update(np.zeros((2, 2)), [1e20, 1.0], SHUT, 1e38)
    assert result.memory == pytest.approx(np.array([[0.0, 1e20], [1e20, 1.0]]), rel=1e-12)
    assert (result.counts, result.first) == ({2: 1}, (0, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": np.zeros((3, 4))}, r"cifg_update: C: expected shape \[d, d\], got \[3, 4\]"),
        ({"h": np.zeros(4)}, r"cifg_update: h: expected shape \[3\], got \[4\]"),
        ({"x": np.zeros((2, 1))}, r"cifg_update: x: expected shape \[n\]"),
        ({"W_f": np.zeros((3, 4))}, r"cifg_update: W_f: expected shape \[3, 5\], got \[3, 4\]"),
        ({"b_f": np.zeros(5)}, r"cifg_update: b_f: expected shape \[3\], got \[5\]"),
        ({"projection": "fold"}, "cifg_update: projection: expected one of clip, scale, got 'fold'"),
    ],
)
def test_refusals(change, message):
    arguments = dict(zip(("C", "h", "x", "W_f", "b_f"), random_case(3, 2, 4), strict=True))
    with pytest.raises(ValueError, match=message):
        reference.cifg_update(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"H": np.zeros((0, 3))}, r"H: expected shape \[B, d\] with B >= 1, got \[0, 3\]"),
        ({"C": np.zeros((3, 3))}, r"C: expected shape \[2, 3, 3\], got \[3, 3\]"),
        ({"X": np.zeros((3, 2))}, r"X: expected shape \[2, n\], got \[3, 2\]"),
        ({"shared_memory_mode": True}, r"C: expected shape \[3, 3\], got \[2, 3, 3\]"),
    ],
)
def test_batch_refusals(change, message):
    arguments = dict(zip(("C", "H", "X", "W_f", "b_f"), random_case(3, 2, 4, (2,)), strict=True))
    with pytest.raises(ValueError, match="batched_cifg_update: " + message):
        reference.batched_cifg_update(**(arguments | change))
