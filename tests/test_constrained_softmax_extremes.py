"""Temperatures and bounds at the ends of what float32 holds, and parameters of the wrong kind."""

import copy
import pickle

import numpy as np
import pytest
from support import run_constrained, to_host, to_target

import burt_numba
from burt_numba import BurtDimensionError, BurtError


@pytest.mark.parametrize(("row", "bound"), [([60, 0], 0.0), ([40, 0, 0], 0.0), ([25, 0], 0.0), ([18, 0], 1e-7)])
def test_never_hotter_than_the_start(row, bound):
    """An entropy below what a bound of nothing is searched by was raised instead of left."""
    outcome = run_constrained(np.float32([row]), bound)
    assert outcome.temperature[0] <= 1.0
    assert outcome.entropy[0] <= bound + 1e-6


@pytest.mark.parametrize("temperature", [0.4169231653213501, 0.1, 0.3, 0.7, 1 / 3, 3.3])
def test_temperatures_at_the_ends_are_those_given(temperature):
    """The reciprocal of a reciprocal is another number for one float32 in six."""
    rows = np.float32([[np.nan, -np.inf], [0.0, 0.0], [50.0, 0.0]])
    outcome = run_constrained(rows, 0.2, temperature, temperature)
    assert outcome.temperature.tolist() == [np.float32(temperature)] * 3


@pytest.mark.parametrize(("lowest", "highest"), [(1e-40, 1e-40), (1e-46, 1e-36), (1e36, 1e37), (np.inf, np.inf)])
def test_refuses_starts_that_float32_cannot_invert(lowest, highest):
    with pytest.raises(BurtDimensionError, match="constrained_softmax: temperature_min, temperature_max: expected"):
        burt_numba.constrained_softmax(to_target(np.float32([[3, 2, 1, 0]])), 0.2, lowest, highest)


@pytest.mark.parametrize(("lowest", "highest"), [(1e-35, 1e-35), (1e35, 1e35), (1e-46, 1.0), (0.01, np.inf)])
def test_widest_starts(lowest, highest):
    outcome = run_constrained(np.float32([[3, 2, 1, 0], [1, 1, 1, 1]]), 0.2, lowest, highest)
    assert np.isfinite(outcome.out).all() and np.allclose(outcome.out.sum(-1), 1, atol=1e-6)
    assert outcome.out[1].tolist() == [0.25] * 4
    assert outcome.counts[3] == 1 + (lowest == 1e35)
    assert abs(outcome.entropy[1] - np.log(4)) < 1e-6


def test_one_bound_without_axes_holds_for_all_rows():
    logits = np.float32([[3, 2, 1, 0], [5, 2, 2, 1], [9, 8, 0, 0]])
    one = burt_numba.constrained_softmax(to_target(logits), to_target(np.float32(0.3).reshape(())))
    assert np.array_equal(to_host(one), to_host(burt_numba.constrained_softmax(to_target(logits), 0.3)))


def test_parameters_are_read_anew_from_what_can_change():
    lowest = np.full((), 0.5)
    logits = to_target(np.float32([[3, 2, 1, 0]]))
    errors = burt_numba.ErrorBuffer()
    warm = to_host(burt_numba.constrained_softmax(logits, 0.2, lowest, errors=errors))
    lowest[()] = 0.01
    cold = to_host(burt_numba.constrained_softmax(logits, 0.2, lowest, errors=errors))
    assert cold[0, 0] > 0.95 > warm[0, 0]


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"entropy_bound": "0.2"}, TypeError, "entropy_bound: expected a number, got str"),
        ({"entropy_bound": 10**400}, BurtDimensionError, "entropy_bound: expected a number that a float holds"),
        ({"temperature_min": b"1"}, TypeError, "temperature_min: expected a number, got bytes"),
        ({"max_iterations": np.array([3])}, TypeError, "max_iterations: expected an integer, got ndarray"),
        ({"max_iterations": int}, TypeError, "max_iterations: expected an integer, got type"),
        ({"validate_output": []}, TypeError, "validate_output: expected True or False, got list"),
        ({"validate_output": np.array(True)}, TypeError, "validate_output: expected True or False, got ndarray"),
        ({"stream": "abc"}, TypeError, "stream: expected a stream"),
        ({"errors": "abc"}, TypeError, "errors: expected an ErrorBuffer, got str"),
    ],
)
def test_parameters_of_the_wrong_kind_are_named(parameters, error, message):
    with pytest.raises(error, match=message):
        burt_numba.constrained_softmax(to_target(np.float32([[3, 2, 1, 0]])), **parameters)


@pytest.mark.parametrize("causal", ["no", np.array([1, 2]), None])
def test_causal_is_true_or_false(causal):
    with pytest.raises(TypeError, match="attention_softmax: causal: expected True or False"):
        burt_numba.attention_softmax(to_target(np.zeros((1, 1, 2, 2), np.float32)), causal=causal)


def test_rounding_to_float16_is_no_entropy_of_its_own():
    """Tail weights of one and a half subnormal steps round to two, and their entropy rises by a third."""
    logits = np.zeros((1, 16_384), np.float16)
    logits[0, 0] = 12
    errors = burt_numba.ErrorBuffer()
    burt_numba.constrained_softmax(to_target(logits), 0.0257, validate_output=True, errors=errors)
    assert errors.check() == BurtError.SUCCESS


@pytest.mark.parametrize("kind", [burt_numba.BurtWarning, burt_numba.BurtRuntimeError])
def test_reports_travel_between_processes(kind):
    report = kind("name", {BurtError.NAN_INPUT: 2}, 9)
    for other in (pickle.loads(pickle.dumps(report)), copy.copy(report)):
        assert type(other) is kind and str(other) == str(report)
        assert (other.function, other.counts, other.first_index) == ("name", {BurtError.NAN_INPUT: 2}, 1)
