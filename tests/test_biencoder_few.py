"""The kernel of up to 64 contexts: queries that come as operands, scores that are made once, searches side by side."""

import numpy as np
import pytest
from biencoder_support import FEW, Inputs, check_biencoder, inputs_of, kernel_of, run_biencoder
from support import cases

KINDS = {"float32": (np.float32, "fp32"), "tf32": (np.float32, "tf32"), "float16": (np.float16, "fp32")}
each_kind = pytest.mark.parametrize("kind", KINDS)
NANS = {"plain": 0x7FC00000, "all bits": 0x7FFFFFFF, "negative": 0xFFFFFFFF, "one more bit": 0x7FC00001}


def check(inputs, *args, kind, **options):
    assert kernel_of(inputs, KINDS[kind][1]) == FEW
    return check_biencoder(inputs, *args, precision=KINDS[kind][1], **options)


@each_kind
@pytest.mark.parametrize("D", cases([1, 31, 64, 68], [16, 96, 130, 256]))
@pytest.mark.parametrize(("Q", "K"), cases([(4, 1), (17, 33), (33, 64)], [(16, 8), (32, 32), (64, 31), (129, 63)]))
def test_shapes(Q, K, D, kind):
    """Each side of tiles and warps of queries, of 32 keys, of a chunk of a vector, and of what a pass has of values."""
    check(inputs_of(1, 2, Q, K, D, key_heads=1, dtype=KINDS[kind][0]), kind=kind)


@each_kind
@pytest.mark.parametrize("row", [3, 20, 35])
@pytest.mark.parametrize("nan", NANS)
def test_every_nan_of_a_query_is_seen(nan, row, kind):
    """A sum of all bits of a NaN and half a unit is a small number. The warp's other queries keep their results."""
    dtype = KINDS[kind][0]
    inputs = inputs_of(1, 1, 36, 40, 8, dtype=dtype)
    inputs.query[0, 0, row, 5] = 0
    clean = run_biencoder(inputs, None, 5.0, precision=KINDS[kind][1])
    bits = NANS[nan] if dtype == np.float32 else NANS[nan] >> 16
    inputs.query.view(np.uint32 if dtype == np.float32 else np.uint16)[0, 0, row, 5] = bits
    assert np.isnan(inputs.query[0, 0, row, 5])
    outcome = check(inputs, None, 5.0, kind=kind)
    assert (outcome.counts, outcome.first) == ({1: 1}, (row * 8 + 5, 1))
    np.testing.assert_array_equal(outcome.out, clean.out)


@each_kind
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_bad_query_is_reported_without_a_context(value, kind):
    """No product shows it."""
    inputs = inputs_of(2, 1, 18, 12, 8, dtype=KINDS[kind][0])
    inputs.query[1, 0, 17, 2] = value
    outcome = check(inputs, None, 5.0, kind=kind, context_lengths=np.int32([12, 0]))
    assert not outcome.out[1].any()
    code = 1 if np.isnan(value) else 2
    assert (outcome.counts, outcome.first) == ({code: 1}, ((18 + 17) * 8 + 2, code))


@each_kind
def test_bad_elements_of_both_tiles_and_of_every_warp(kind):
    inputs = inputs_of(1, 2, 70, 50, 20, key_heads=1, dtype=KINDS[kind][0])
    for place, (head, row) in enumerate([(0, 0), (0, 15), (0, 16), (0, 33), (1, 69), (1, 31)]):
        inputs.query[0, head, row, place * 3] = (np.nan, np.inf, -np.inf)[place % 3]
    inputs.context_keys[0, 0, 33, 19] = np.inf
    inputs.context_values[0, 0, 12, 7] = np.nan
    check(inputs, None, 5.0, kind=kind)


@pytest.mark.parametrize("kind", ["float32", "tf32"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("D", [8, 5])
def test_queries_as_large_as_their_type(D, sign, kind):
    """Rounded to 11 bits, or with what mends the cut of the keys, they would be infinite."""
    inputs = inputs_of(1, 1, 20, 30, D, spread=0.5)
    inputs.query[0, 0, 18, 1] = sign * np.finfo(np.float32).max
    inputs.query[0, 0, 2] = sign * np.float32(3.402e38)
    inputs.context_keys[..., 1] *= np.float32(1e-38)
    inputs.context_keys[0, 0, :, 2:] *= np.float32(1e-38)
    inputs.context_keys[..., 0] *= np.float32(1e-38)
    inputs.query[0, 0, 3:18] = 0
    outcome = run_biencoder(inputs, None, 5.0, precision=KINDS[kind][1])
    expected = run_biencoder(inputs, None, 5.0)
    assert outcome.counts == {}
    np.testing.assert_allclose(outcome.out, expected.out, atol=1e-2 if kind == "tf32" else 1e-5)


@each_kind
def test_a_scale_below_zero_beside_bad_elements(kind):
    inputs = inputs_of(1, 1, 40, 40, 8, dtype=KINDS[kind][0])
    inputs.query[0, 0, 21, 0] = np.nan
    inputs.context_keys[0, 0, 39, 1] = -np.inf
    check(inputs, -0.4, 0.2, kind=kind)


def test_means_of_the_largest_halves():
    """Each of 63 weights lies just above the middle of two halves: rounded, their mean is more than float16 holds."""
    inputs = Inputs(*(np.zeros((1, 2, n, 8), np.float16) for n in (40, 64, 64)))
    inputs.query[..., 0] = 1
    inputs.context_keys[:, :, 1:, 0] = -1
    inputs.context_values[:, 0] = 65504
    inputs.context_values[:, 1] = -65504
    outcome = run_biencoder(inputs, np.log(2) - np.log1p(8.1 / 16384), None)
    assert (outcome.out[:, 0] == 65504).all() and (outcome.out[:, 1] == -65504).all() and outcome.counts == {}


@each_kind
def test_a_single_step_is_the_sure_one(kind):
    """To the lowest temperature; without it, a query could be left above its bound."""
    inputs = inputs_of(1, 1, 40, 40, 8, dtype=KINDS[kind][0])
    outcome = run_biencoder(inputs, None, 0.2, 1e-4, 10.0, 1, precision=KINDS[kind][1])
    assert set(np.unique(outcome.temperature)) <= {np.float32(1e-4), np.float32(1)} and outcome.counts == {}
    assert (outcome.entropy <= 0.2).all() and (outcome.temperature < 1).sum() > 20
