"""What the tests of the matrix memory share: inputs, guarded calls, and what every result must keep."""

from typing import NamedTuple

import numpy as np
from support import LIMITS, Guarded, events_of, relative_error, to_target

import burt_numba
from burt_numba import cifg, reference

KEEPS, REPLACES = np.float32(40), np.float32(-120)
"""Biases at which the forget gate is exactly 1 and 0 in float32."""


class Inputs(NamedTuple):
    """The first five arguments of either function."""

    C: np.ndarray
    h: np.ndarray
    x: np.ndarray
    W_f: np.ndarray
    b_f: np.ndarray


def random_inputs(d, n, batch=(), *, shared=False, sigma=0.8, hidden=1.0, seed=0):
    """Normal inputs, C with a largest singular value of about ``sigma``: below the bound before, above it after.

    Beyond 64 columns h gets no longer: of a memory hundreds of times above its bound, the rounding of float32 is all
    that a projection leaves (`test_spreads_of_h` in test_cifg.py).
    """
    random = np.random.default_rng(seed)
    hidden *= min(1.0, 8 / max(d, 1) ** 0.5)
    C = random.normal(size=(d, d) if shared else (*batch, d, d)) * (sigma / 2 / max(d, 1) ** 0.5)
    W_f = random.normal(size=(d, d + n)) * (2 / max(d + n, 1) ** 0.5)
    vectors = random.normal(size=(*batch, d)) * hidden, random.normal(size=(*batch, n))
    return Inputs(*(a.astype(np.float32) for a in (C, *vectors, W_f, random.normal(size=d))))


def kept(C, h=None):
    """Inputs of an update that leaves C as it is: with the gate open, all that is left is the projection."""
    C = np.asarray(C, np.float32)
    d = C.shape[-1]
    h = np.zeros(d, np.float32) if h is None else np.asarray(h, np.float32)
    return Inputs(C, h, np.zeros(0, np.float32), np.zeros((d, d), np.float32), np.full(d, KEEPS))


def orthogonal(d, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]


def with_spectrum(values, seed=0):
    """A matrix with these singular values."""
    values = np.asarray(values, np.float64)
    return (orthogonal(len(values), seed) * values) @ orthogonal(len(values), seed + 1)


def sigma_of(C):
    """Largest singular values, of one matrix or several, in float64."""
    C = np.asarray(C, np.float64)
    return np.linalg.norm(C, 2, axis=(-2, -1)) if C.size else np.zeros(C.shape[:-2])


# Layouts of the inputs -----------------------------------------------------------------------------------------------


def between(array, axis):
    """The array as every other element along an axis of a larger one, NaN in between."""
    shape = list(array.shape)
    shape[axis] *= 2
    larger = np.full(shape, np.nan, np.float32)
    place = [slice(None)] * array.ndim
    place[axis] = slice(None, None, 2)
    larger[tuple(place)] = array
    return larger[tuple(place)]


def at_odd_offset(array):
    memory = np.full(array.size + 2, np.nan, np.float32)
    memory[1:-1] = array.ravel()
    return memory[1:-1].reshape(array.shape)


def backwards(array):
    return array[..., ::-1].copy()[..., ::-1]


def in_other_order(array):
    return np.asfortranarray(array)


def padded(array):
    larger = np.full((*array.shape[:-1], array.shape[-1] + 1), np.nan, np.float32)
    larger[..., :-1] = array
    return larger[..., :-1]


LAYOUTS = {
    "every other column": lambda array: between(array, -1),
    "every other row": lambda array: between(array, 0),
    "odd offset": at_odd_offset,
    "backwards": backwards,
    "other order": in_other_order,
    "padded by one": padded,
}


# Calls ---------------------------------------------------------------------------------------------------------------

INPUTS = random_inputs(5, 3)
BATCH = random_inputs(4, 3, (3,))
SHARED = random_inputs(4, 3, (3,), shared=True)
MODES = {None: INPUTS, False: BATCH, True: SHARED}


def forget_calls(monkeypatch):
    """Let the next call of each kind choose its launches anew, until the test is over."""
    for operation in (cifg._SINGLE, cifg._BATCHED):
        monkeypatch.setattr(operation, "_calls", {})


def call(inputs, *args, shared=None, **options):
    """Call the function of a mode on arrays as they are."""
    if shared is None:
        return burt_numba.cifg_update(*inputs, *args, **options)
    return burt_numba.batched_cifg_update(*inputs, *args, shared_memory_mode=shared, **options)


class Updated(NamedTuple):
    """What a call gave, on the host."""

    memory: np.ndarray
    forget_gate: np.ndarray
    sigma: np.ndarray
    power_vector: np.ndarray | None
    sigma_bound: np.ndarray | None
    counts: dict
    first: tuple | None


def run_cifg(
    inputs, bound=0.95, *, shared=None, in_place=False, skew=None, power_vector=None, sigma_bound=None, **options
):
    """Call cifg_update, or with `shared` batched_cifg_update: guarded outputs of NaN, and an error buffer of its own.

    With `skew`, the inputs lie between guard cells of NaN as well, and every array so many elements off alignment.
    """
    if skew is None:
        given = [to_target(array.copy()) for array in inputs]
    else:
        given = [Guarded(array, np.nan, skew).array for array in inputs]
    matrices = inputs.C.shape[:-2] or (1,)

    def guarded(content):
        return None if content is None else Guarded(np.asarray(content, np.float32), 777, skew or 0)

    memory = guarded(inputs.C if in_place else np.full(inputs.C.shape, np.nan))
    if in_place:
        given[0] = memory.array
    sigma, gate = guarded(np.full(matrices, np.nan)), guarded(np.full(inputs.h.shape, np.nan))
    vector, certificate = guarded(power_vector), guarded(sigma_bound)
    errors = burt_numba.ErrorBuffer()
    if shared is not None:
        options["shared_memory_mode"] = shared
    function = burt_numba.cifg_update if shared is None else burt_numba.batched_cifg_update
    returned = function(
        *given,
        bound,
        power_vector=None if vector is None else vector.array,
        sigma_bound=None if certificate is None else certificate.array,
        sigma_out=sigma.array,
        forget_gate_out=gate.array,
        out=None if in_place else memory.array,
        errors=errors,
        **options,
    )
    assert returned is memory.array
    results = [None if output is None else output.result() for output in (memory, gate, sigma, vector, certificate)]
    return Updated(*results, *events_of(errors))


def expected_of(inputs, bound=0.95, *, shared=None, projection="clip"):
    if shared is None:
        return reference.cifg_update(*inputs, bound, projection=projection)
    return reference.batched_cifg_update(*inputs, bound, shared, projection=projection)


def terms_of(inputs, expected, shared):
    """What an update adds up, entry by entry, as magnitudes: their cancellation leaves its rounding behind."""
    C, h = (np.abs(a.astype(np.float64)) for a in inputs[:2])
    forget = expected.forget_gate
    written = ((1 - forget) * h)[..., :, np.newaxis] * h[..., np.newaxis, :]
    if shared:
        return forget.mean(axis=0)[:, np.newaxis] * C + written.mean(axis=0)
    return forget[..., :, np.newaxis] * C + written


def assert_cifg(outcome, inputs, bound=0.95, *, shared=None, projection="clip", together=False, spread=0.0):
    """Everything that either function promises of its outputs, where the power steps have come to an end.

    ``together``: the relative error is that of a whole batch, and a matrix of it is held to the size of what was added
    up: among thousands there are some in which little is left of that.
    """
    expected = expected_of(inputs, bound, shared=shared, projection=projection)
    assert outcome.memory.shape == expected.memory.shape and outcome.memory.dtype == np.float32
    assert np.isfinite(outcome.memory).all() and np.isfinite(outcome.sigma).all()
    d = inputs.C.shape[-1]
    limit = max(LIMITS["float32"], spread)
    sigmas = np.atleast_1d(expected.sigma)
    sizes = expected.memory
    if together:
        error = relative_error(outcome.memory, expected.memory)
        assert error <= limit, f"relative error {error:.3g} over {limit}"
        sizes = terms_of(inputs, expected, shared)
    matrices = (a.reshape(-1, d, d) for a in (outcome.memory, expected.memory, sizes))
    for place, (memory, wanted, size, sigma, wanted_sigma) in enumerate(
        zip(*matrices, outcome.sigma, sigmas, strict=True)
    ):
        error, most = np.linalg.norm(memory - wanted), limit * np.linalg.norm(size)
        assert error <= most, f"matrix {place}: error {error:.3g} over {most:.3g}"
        over = sigma_of(memory) / bound - 1
        assert over <= LIMITS["spectral"], f"matrix {place}: sigma over its bound by {over:.3g}"
        if wanted_sigma <= bound:
            assert (memory[wanted == 0] == 0).all(), f"matrix {place}: an entry that should be exactly 0 is not"
            # An estimate from below, or a certificate from above.
            assert sigma <= bound * (1 + limit), f"matrix {place}: sigma {sigma} is over the bound"
        else:
            assert abs(sigma / wanted_sigma - 1) <= limit, f"matrix {place}: sigma {sigma}, expected {wanted_sigma}"
    gates = zip(outcome.forget_gate.reshape(-1, d), expected.forget_gate.reshape(-1, d), strict=True)
    for gate, wanted in gates:
        # Below the smallest normal number a gate is a multiple of 1e-45, or 0.
        assert np.linalg.norm(gate - wanted) <= limit * np.linalg.norm(wanted) + np.finfo(np.float32).tiny
        assert ((gate >= 0) & (gate <= 1)).all()
    assert (outcome.counts, outcome.first) == (expected.counts, expected.first)


def check_cifg(
    inputs,
    bound=0.95,
    *,
    shared=None,
    projection="clip",
    power_iterations=100,
    together=False,
    spread=0.0,
    **options,
):
    """Run an update and hold it to everything it promises. Returns the outcome."""
    outcome = run_cifg(
        inputs, bound, shared=shared, projection=projection, power_iterations=power_iterations, **options
    )
    assert_cifg(outcome, inputs, bound, shared=shared, projection=projection, together=together, spread=spread)
    return outcome


def same_results(one, other):
    """Every output has the same bits."""
    pairs = zip(one[:5], other[:5], strict=True)
    return all((a is None and b is None) or a.tobytes() == b.tobytes() for a, b in pairs)
