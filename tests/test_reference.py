"""The references against values worked out elsewhere: they judge everything else, so nothing else may judge them."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.special import softmax
from support import normal

from burt_numba import reference


def test_reference_needs_no_numba():
    program = "import sys, burt_numba.reference; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# entropy -------------------------------------------------------------------------------------------------------------


def test_entropy_of_a_uniform_row_is_log_of_its_length():
    assert reference.entropy(np.full((2, 7), 1 / 7)) == pytest.approx(np.full(2, np.log(7)), rel=1e-15)


def test_entropy_takes_zero_times_log_zero_as_zero():
    assert reference.entropy([[1.0, 0.0], [0.0, 0.0]]).tolist() == [0.0, 0.0]
    assert reference.entropy([0.5, 0.5, 0.0]) == pytest.approx(np.log(2), rel=1e-15)


def test_entropy_of_float16_is_summed_in_float64():
    assert reference.entropy(np.full(65536, 2.0**-16, np.float16)) == pytest.approx(16 * np.log(2), rel=1e-15)


# constrained_softmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "temperature", "probabilities"),
    [
        ([3.0, 2.0, 1.0, 0.0], 0.327817, [0.952669, 0.045096, 0.002135, 0.000101]),
        ([1.0, 0.0, 0.0, 0.0], 0.229836, [0.962756, 0.012415, 0.012415, 0.012415]),
        ([42.0, 41.99] + [-20.0] * 30, 0.0034079, [0.949495, 0.050505] + [0.0] * 30),
    ],
)
def test_constrained_softmax_known_temperature(logits, temperature, probabilities):
    result = reference.constrained_softmax(logits, 0.2, temperature_min=1e-4)
    assert result.temperature == pytest.approx(temperature, abs=1e-6)
    assert result.probabilities == pytest.approx(probabilities, abs=1e-6)
    assert result.entropy == pytest.approx(0.2, abs=1e-12)
    assert result.counts == {} and result.first is None


def test_constrained_softmax_of_two_classes_against_the_closed_form():
    """Two classes at a gap g have p = 1 / (1 + exp(-g / T)), so a wanted p gives T = g / log(p / (1 - p))."""
    p = np.array([0.99, 0.9, 0.75])
    bound = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    logits = np.stack([np.full(3, 0.5), np.zeros(3)], axis=1)
    result = reference.constrained_softmax(logits, bound)
    assert result.temperature == pytest.approx(0.5 / np.log(p / (1 - p)), rel=1e-12)
    assert result.probabilities[:, 0] == pytest.approx(p, rel=1e-12)


def test_constrained_softmax_within_the_bound_is_scipys_softmax():
    logits = normal((2, 3, 50))
    result = reference.constrained_softmax(logits, 20.0)
    assert result.probabilities == pytest.approx(softmax(logits.astype(np.float64), axis=-1), rel=1e-14)
    assert (result.temperature == 1).all()


def test_constrained_softmax_never_heats():
    result = reference.constrained_softmax([[5.0, 0.0], [0.0, 0.0]], 0.1, temperature_min=0.01, temperature_max=100.0)
    assert (result.temperature <= 1).all()


@pytest.mark.parametrize(("lowest", "highest", "start"), [(0.01, 0.5, 0.5), (0.01, 1.0, 1.0), (2.0, 3.0, 2.0)])
def test_constrained_softmax_starts_at_one_clipped(lowest, highest, start):
    result = reference.constrained_softmax([5.0, 1.0], 9.0, lowest, highest)
    assert result.temperature == start
    assert result.probabilities == pytest.approx(softmax(np.array([5.0, 1.0]) / start), rel=1e-14)


def test_constrained_softmax_at_a_given_temperature_does_not_search():
    logits = normal((4, 9))
    temperature = np.array([0.5, 1.0, 2.0, 0.01])
    result = reference.constrained_softmax(logits, 0.2, temperature=temperature)
    assert (result.temperature == temperature).all()
    assert result.probabilities == pytest.approx(
        softmax(logits.astype(np.float64) / temperature[:, np.newaxis], axis=-1), rel=1e-13
    )


def test_constrained_softmax_ties_cannot_be_sharpened():
    result = reference.constrained_softmax([[1.0, 1.0, 0.0], [9.0, 0.0, 0.0]], 0.2)
    assert result.probabilities[0] == pytest.approx([0.5, 0.5, 0.0], abs=1e-40)
    assert result.temperature[0] == 0.01
    assert result.counts == {3: 1} and result.first == (0, 3)


def test_constrained_softmax_of_numbers_near_the_largest_float32():
    result = reference.constrained_softmax([3e38, 3e38, -3e38], 0.2)
    assert result.probabilities.tolist() == [0.5, 0.5, 0.0]
    assert result.counts == {3: 1}


def test_constrained_softmax_bad_elements_are_absent_and_counted():
    clean = [2.0, 1.0, -np.inf, -np.inf]
    result = reference.constrained_softmax([clean, [2.0, 1.0, np.nan, np.inf], [np.nan, -np.inf, np.inf, np.nan]])
    assert (result.probabilities[0] == result.probabilities[1]).all()
    assert (result.probabilities[2] == 0).all()
    assert result.temperature[2] == 1 and result.entropy[2] == 0
    assert result.counts == {1: 3, 2: 2} and result.first == (6, 1)


def test_constrained_softmax_empty_row_is_not_an_event():
    result = reference.constrained_softmax(np.full((1, 5), -np.inf), temperature_max=0.5)
    assert (result.probabilities == 0).all()
    assert result.temperature == 0.5 and result.entropy == 0
    assert result.counts == {} and result.first is None


def test_constrained_softmax_bad_row_bounds_are_zero_and_counted():
    logits = np.array([[3.0, 0.0]] * 4)
    result = reference.constrained_softmax(logits, [0.1, np.nan, -1.0, 0.0])
    assert (result.probabilities[1:] == result.probabilities[3]).all()
    assert (result.entropy[1:] <= 1e-6).all()
    assert result.counts == {6: 2} and result.first == (1, 6)


def test_constrained_softmax_lowest_index_wins_then_lowest_code():
    logits = np.array([[0.0, 0.0], [np.inf, 0.0]])
    assert reference.constrained_softmax(logits, [0.2, -1.0]).first == (0, 3)
    assert reference.constrained_softmax(logits, [-1.0, 0.2]).first == (0, 3)
    assert reference.constrained_softmax(logits, [9.0, 0.2]).first == (2, 2)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_constrained_softmax_without_rows(shape):
    result = reference.constrained_softmax(np.zeros(shape))
    assert result.probabilities.shape == shape and result.temperature.shape == shape[:-1]
    assert result.counts == {}


@pytest.mark.parametrize(
    ("argument", "logits", "arguments"),
    [
        ("logits", np.zeros((3, 0)), {}),
        ("logits", np.float64(1.0), {}),
        ("entropy_bound", np.zeros(3), {"entropy_bound": -0.1}),
        ("entropy_bound", np.zeros(3), {"entropy_bound": np.nan}),
        ("entropy_bound", np.zeros((2, 3)), {"entropy_bound": np.zeros(3)}),
        ("temperature_min", np.zeros(3), {"temperature_min": 0.0}),
        ("temperature_max", np.zeros(3), {"temperature_min": 2.0, "temperature_max": 1.0}),
        ("max_iterations", np.zeros(3), {"max_iterations": 0}),
    ],
)
def test_constrained_softmax_refusals(argument, logits, arguments):
    with pytest.raises(ValueError, match=f"^constrained_softmax: {argument}: "):
        reference.constrained_softmax(logits, **arguments)


# attention_softmax ---------------------------------------------------------------------------------------------------


def test_attention_softmax_without_mask_is_scipys_softmax():
    scores = normal((2, 3, 4, 5))
    result = reference.attention_softmax(scores)
    assert result.probabilities == pytest.approx(softmax(scores.astype(np.float64), axis=-1), rel=1e-14)


def test_attention_softmax_bool_mask_and_minus_infinity_agree():
    scores = normal((2, 2, 3, 6))
    keep = np.random.default_rng(1).random((2, 1, 3, 6)) < 0.6
    additive = np.where(keep, 0.0, -np.inf)
    with_bool, with_numbers = reference.attention_softmax(scores, keep), reference.attention_softmax(scores, additive)
    assert (with_bool.probabilities == with_numbers.probabilities).all()
    assert (with_bool.probabilities[~np.broadcast_to(keep, scores.shape)] == 0).all()


@pytest.mark.parametrize("offset", [-2, 0, 1, 9])
def test_attention_softmax_causal_is_a_triangular_mask(offset):
    scores = normal((1, 2, 4, 4))
    causal = reference.attention_softmax(scores, causal=True, causal_offset=offset)
    masked = reference.attention_softmax(scores, np.tri(4, k=offset, dtype=bool))
    assert (causal.probabilities == masked.probabilities).all()


def test_attention_softmax_mask_is_added_in_float32():
    """At 1e9 float32 numbers lie 64 apart, so scores of a few units vanish in the sum."""
    result = reference.attention_softmax(np.array([3.0, 0.0, -3.0]).reshape(1, 1, 1, 3), np.float32(-1e9))
    assert result.probabilities.ravel() == pytest.approx([1 / 3] * 3, rel=1e-15)


def test_attention_softmax_hidden_elements_are_not_events():
    scores = np.array([1.0, np.nan, np.inf, 2.0]).reshape(1, 1, 1, 4)
    for mask in ([True, False, False, True], [0.0, -np.inf, -np.inf, 0.0]):
        result = reference.attention_softmax(scores, np.array(mask))
        assert result.probabilities.ravel() == pytest.approx([*softmax([1.0, 2.0])[:1], 0, 0, *softmax([1.0, 2.0])[1:]])
        assert result.counts == {}


def test_attention_softmax_visible_bad_elements_are_absent_and_counted():
    scores = np.array([[1.0, np.nan, np.inf], [1.0, 1.0, 1.0]]).reshape(1, 1, 2, 3)
    mask = np.array([[0.0, 0.0, 0.0], [0.0, np.nan, np.inf]])
    result = reference.attention_softmax(scores, mask)
    assert result.probabilities.reshape(2, 3).tolist() == [[1.0, 0.0, 0.0]] * 2
    assert result.counts == {1: 2, 2: 2} and result.first == (1, 1)


def test_attention_softmax_infinities_that_cancel():
    """-inf hides a score, but the mask's +inf is recorded all the same, as what it is."""
    scores = np.array([-np.inf, 1.0]).reshape(1, 1, 1, 2)
    result = reference.attention_softmax(scores, np.array([np.inf, 0.0]))
    assert result.probabilities.ravel().tolist() == [0.0, 1.0]
    assert result.counts == {2: 1} and result.first == (0, 2)


def test_attention_softmax_overflow_of_the_sum():
    scores = np.array([3e38, -3e38, 0.0], np.float32).reshape(1, 1, 1, 3)
    result = reference.attention_softmax(scores, np.array([3e38, -3e38, 0.0], np.float32))
    assert result.probabilities.ravel().tolist() == [0.0, 0.0, 1.0]
    assert result.counts == {2: 1} and result.first == (0, 2)


def test_attention_softmax_rows_with_nothing_left_are_zeros():
    scores = normal((1, 1, 3, 3))
    assert (reference.attention_softmax(scores, np.zeros((1, 1, 1, 3), bool)).probabilities == 0).all()
    result = reference.attention_softmax(scores, causal=True, causal_offset=-1).probabilities[0, 0]
    assert (result[0] == 0).all() and result[1].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_attention_softmax_of_nothing(shape):
    assert reference.attention_softmax(np.zeros(shape)).probabilities.shape == shape


def test_attention_softmax_refusals():
    with pytest.raises(ValueError, match=r"^attention_softmax: scores: expected 4 dimensions"):
        reference.attention_softmax(np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"^attention_softmax: causal_offset: must be given for 2 queries and 3 keys"):
        reference.attention_softmax(np.zeros((1, 1, 2, 3)), causal=True)
    with pytest.raises(ValueError):
        reference.attention_softmax(np.zeros((1, 1, 2, 3)), np.zeros(4))
