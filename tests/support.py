"""What the tests share: arrays on either target, guard cells, runs of the operations, and the limits."""

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import burt_numba
from burt_numba import reference
from burt_numba.backend import cuda

ON_GPU = os.environ.get("BURT_NUMBA_TEST_TARGET", "simulator") == "gpu"

# Every limit of the suite, each with its reason.
LIMITS = {
    # Relative error in norm. An exponential, a sum and a division in float32, each good to a few units in the last
    # place (6e-8), and an exponent of up to 20 that carries its own rounding.
    "float32": 5e-6,
    # Rounding the result to float16 is 4.9e-4 for each element; the rest is room for subnormal ones (below 6e-5).
    "float16": 2e-3,
    # Entropy over the bound, in nats: the rounding of a float32 entropy.
    "entropy_over": 1e-6,
    # Entropy under the bound where the bound is active, relative to the bound and in nats; the larger one holds. The
    # freedom that lets a search stop early.
    "entropy_under_relative": 1e-4,
    "entropy_under": 1e-6,
    # The entropy reported against the entropy of the values returned: float32 sums, so part of it grows with H.
    "entropy_reported": 2e-6,
    "entropy_reported_relative": 1e-5,
    # A row sum of float32 probabilities: each is rounded once, after a division by one broadcast sum.
    "row_sum": 2e-6,
    # Sigma over its bound, relative: what is promised of a memory that is carried along, and after 100 power steps.
    "spectral": 1e-3,
    # The same of a random memory never seen before, at the default number of steps.
    "spectral_cold": 2e-2,
    # A stream of updates against the float64 stream, relative in norm: each step adds at most the limit of float32, and
    # the forget gate takes old errors away again.
    "cifg_drift": 1e-4,
    # Attention, relative error in norm, by the size of the values that are added up: the softmax above, then a sum of
    # products in float32.
    "attention_float32": 1e-5,
    # Weights and results rounded to float16, as above.
    "attention_float16": 2e-3,
    # 10 bits of fraction in queries, keys, weights and values.
    "attention_tf32": 1e-2,
    # The rounding of a score counts 1 / T times. Below this temperature a row's error in norm is taken times T over it:
    # scores in float32 alone, all else exact, bring a row at T = 0.01 to 2e-4.
    "attention_cold": 0.1,
    # Of all contexts together whose values are not read: half a unit in the last place of a sum of 1.
    "weight_left_out": 2**-24,
    # A dot product in float32, relative to the sum of its terms' sizes: rounding is 6e-8 a term, of both signs.
    "score_rounding": 2.5e-7,
    # The same on tensor cores: two parts of 11 bits, both cut, leave out up to 2^-20 of each factor and of the product,
    # 3e-6 in all; float16 numbers are multiplied exactly, and sums of them are cut.
    "score_rounding_tiles": 3e-6,
    # Of terms with a factor cut to 10 bits of fraction, less the mean of that, and another one rounded to them.
    "score_rounding_tf32": 1.2e-3,
    # ln sum exp over the contexts, beside the rounding of the scores: in nats, and relative to it.
    "lse": 2e-6,
    "lse_relative": 1e-6,
}

NO_EVENT = np.iinfo(np.int64).max
"""What the first word of an error buffer holds while nothing happened."""


# Arrays on the target ------------------------------------------------------------------------------------------------


class _DeviceView:
    """An array interface over a part of a device buffer, which it keeps alive."""

    def __init__(self, buffer, offset, host):
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "strides": host.strides,
            "typestr": host.dtype.str,
            "data": (buffer.__cuda_array_interface__["data"][0] + offset, False),
            "version": 3,
        }


def to_target(array):
    """The array itself in the simulator, a copy of it on the GPU: same strides, same alignment within 16 bytes."""
    array = np.asanyarray(array)
    if not ON_GPU:
        return array
    if array.size == 0:
        return cuda.device_array(array.shape, array.dtype)
    first = array.__array_interface__["data"][0]
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    low = first + sum(step for step in reach if step < 0)
    high = first + sum(step for step in reach if step > 0) + array.itemsize
    skew = low % 16
    image = np.zeros(skew + high - low, dtype=np.uint8)
    image[skew:] = _bytes_between(low, high)
    return cuda.as_cuda_array(_DeviceView(cuda.to_device(image), skew + first - low, array))


def _bytes_between(low, high):
    """The host's memory from one address up to another."""
    memory = SimpleNamespace()
    memory.__array_interface__ = {"shape": (high - low,), "typestr": "|u1", "data": (low, True), "version": 3}
    return np.asarray(memory)


def to_host(array):
    """A NumPy array with the same values."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    return array.cpu().numpy()


def poisoned(shape, dtype=np.float32):
    """An array for results, filled with NaN (integers: -777777), so that a cell that nobody wrote is seen."""
    dtype = np.dtype(dtype)
    return to_target(np.full(shape, np.nan if dtype.kind == "f" else -777777, dtype))


class Guarded:
    """An array in the middle of a larger buffer of a sentinel, which nobody may touch.

    `skew` shifts it by so many elements, off the 16 bytes that vector loads want.
    """

    MARGIN = 64

    def __init__(self, content, sentinel, skew=0):
        content = np.array(content, order="C")
        start = self.MARGIN + skew
        self.inside = slice(start, start + content.size)
        host = np.full(content.size + 2 * self.MARGIN + skew, sentinel, content.dtype)
        host[self.inside] = content.ravel()
        self.before = host.copy()
        self.buffer = to_target(host)
        if ON_GPU:
            self.array = cuda.as_cuda_array(_DeviceView(self.buffer, start * content.itemsize, content))
        else:
            self.array = self.buffer[self.inside].reshape(content.shape)

    def result(self):
        """The array on the host, once the cells around it were found untouched."""
        self.check()
        return to_host(self.array)

    def check(self):
        after = to_host(self.buffer)
        for part in (slice(None, self.inside.start), slice(self.inside.stop, None)):
            assert after[part].tobytes() == self.before[part].tobytes(), "a guard cell was written"


def cases(simulated, gpu_only):
    """Values of a parameter: the first ones everywhere, the others on the GPU alone."""
    mark = pytest.mark.gpu_only("too slow in the simulator")
    return [
        *simulated,
        *(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in gpu_only),
    ]


# Data ----------------------------------------------------------------------------------------------------------------


def normal(shape, spread=3.0, dtype=np.float32, seed=0):
    """Normal numbers with enough spread for peaked rows."""
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(dtype)


# Running an operation ------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a call gave, on the host."""

    out: np.ndarray
    temperature: np.ndarray | None
    entropy: np.ndarray | None
    counts: dict
    first: tuple | None


def events_of(errors):
    errors.check()
    first = None if errors.first_index is None else (int(errors.first_index), int(errors.code))
    return {int(code): int(count) for code, count in errors.counts.items()}, first


def run_constrained(logits, entropy_bound=0.2, *args, skew=None, **kwargs):
    """Call constrained_softmax with guarded outputs of NaN and an error buffer of its own.

    With `skew`, the logits lie between guard cells of NaN as well, and every array so many elements off alignment.
    """
    inputs = to_target(logits) if skew is None else Guarded(logits, np.nan, skew).array
    if isinstance(entropy_bound, np.ndarray):
        entropy_bound = to_target(entropy_bound)
    rows = logits.shape[:-1]
    out, temperature, entropy = outputs = [
        Guarded(np.full(shape, np.nan, dtype), 777, skew or 0)
        for shape, dtype in ((logits.shape, logits.dtype), (rows, np.float32), (rows, np.float32))
    ]
    errors = burt_numba.ErrorBuffer()
    returned = burt_numba.constrained_softmax(
        inputs,
        entropy_bound,
        *args,
        out=out.array,
        temperature_out=temperature.array,
        entropy_out=entropy.array,
        errors=errors,
        **kwargs,
    )
    assert returned is out.array
    return Outcome(*(output.result() for output in outputs), *events_of(errors))


def run_attention(scores, mask=None, causal=False, *, skew=None, **kwargs):
    """Call attention_softmax with a guarded output of NaN and an error buffer of its own; `skew` as above."""
    inputs = to_target(scores) if skew is None else Guarded(scores, np.nan, skew).array
    if mask is not None:
        mask = (
            to_target(mask) if skew is None else Guarded(mask, np.nan if mask.dtype.kind == "f" else True, skew).array
        )
    out, errors = Guarded(np.full(scores.shape, np.nan, scores.dtype), 777, skew or 0), burt_numba.ErrorBuffer()
    returned = burt_numba.attention_softmax(inputs, mask, causal, out=out.array, errors=errors, **kwargs)
    assert returned is out.array
    return Outcome(out.result(), None, None, *events_of(errors))


@contextmanager
def one_warning(function, counts, first):
    """The block, and the check after it, report these events in one BurtWarning and no other."""
    with pytest.warns(burt_numba.BurtWarning) as record:
        yield
        burt_numba.check()
    (warning,) = [entry.message for entry in record]
    assert warning.function == function
    assert warning.counts == counts
    assert (warning.first_index, warning.code) == first
    assert function in str(warning)
    assert str(first[0]) in str(warning)


# Comparing with the reference ----------------------------------------------------------------------------------------


def relative_error(out, expected):
    """||out - expected|| / ||expected||, in float64."""
    expected = np.asarray(expected, dtype=np.float64)
    difference = np.linalg.norm(np.asarray(out, dtype=np.float64) - expected)
    return difference / max(np.linalg.norm(expected), np.finfo(np.float64).tiny)


def assert_rows_close(out, expected):
    """Every row within the limit of its type, zeros exactly zero, and nothing that is not finite.

    Row by row, because one wrong row among many is lost in a norm over all of them.
    """
    assert out.shape == expected.shape
    assert np.isfinite(out).all(), f"{np.count_nonzero(~np.isfinite(out))} entries are not finite"
    assert (out[expected == 0] == 0).all(), "an entry that should be exactly 0 is not"
    if out.size == 0:
        return
    difference = np.linalg.norm(out.astype(np.float64) - expected, axis=-1)
    norm = np.linalg.norm(expected, axis=-1)
    error = np.divide(difference, norm, out=np.zeros_like(norm), where=norm > 0)
    worst = np.unravel_index(np.argmax(error), error.shape)
    limit = LIMITS[out.dtype.name]
    assert error[worst] <= limit, f"row {worst}: relative error {error[worst]:.3g} over {limit}"


def assert_constrained(
    outcome, logits, entropy_bound=0.2, temperature_min=0.01, temperature_max=10.0, *, may_run_out=False
):
    """Everything that constrained_softmax promises about its outputs.

    `may_run_out`: max_iterations is small, so the entropy may be lower than the band.
    """
    temperature_min = float(np.float32(temperature_min))
    start = float(np.clip(np.float32(1.0), temperature_min, np.float32(temperature_max)))
    bound = np.asarray(entropy_bound, dtype=np.float64)
    bound = np.where(bound >= 0, bound, 0.0)
    over = LIMITS["entropy_over"]

    def at(temperature):
        return reference.constrained_softmax(
            logits, entropy_bound, temperature_min, max(start, temperature_max), temperature=temperature
        )

    expected = at(outcome.temperature)
    assert outcome.out.dtype == logits.dtype
    assert_rows_close(outcome.out, expected.probabilities)
    assert outcome.counts == expected.counts
    assert outcome.first == expected.first

    # A float16 result is held to the bound before it was rounded, which only the reference can show.
    entropy = reference.entropy(outcome.out) if outcome.out.dtype == np.float32 else expected.entropy
    reported = LIMITS["entropy_reported"] + LIMITS["entropy_reported_relative"] * entropy
    assert (np.abs(outcome.entropy - entropy) <= reported).all()

    temperature, hot, cold = outcome.temperature, at(start).entropy, at(temperature_min).entropy
    assert ((temperature >= np.float32(temperature_min)) & (temperature <= np.float32(start))).all()
    assert (temperature[hot <= bound - over] == np.float32(start)).all(), "searched where the bound held already"
    unreachable = cold > bound + over
    assert (temperature[unreachable] == np.float32(temperature_min)).all(), "gave up above temperature_min"
    assert (entropy <= bound + over)[~unreachable].all(), f"over the bound by {np.max((entropy - bound)[~unreachable])}"
    if not may_run_out:
        under = np.maximum(LIMITS["entropy_under_relative"] * bound, LIMITS["entropy_under"])
        active = (hot > bound + over) & (cold <= bound)
        assert (entropy >= bound - under)[active].all(), f"under by {np.max((bound - entropy)[active])}"


def check_constrained(logits, *args, skew=None):
    """Run constrained_softmax and hold it to everything it promises. Returns the outcome."""
    outcome = run_constrained(logits, *args, skew=skew)
    assert_constrained(outcome, logits, *args)
    return outcome


def assert_attention(outcome, scores, mask=None, causal=False, *, causal_offset=None):
    """Everything that attention_softmax promises about its output."""
    expected = reference.attention_softmax(scores, mask, causal, causal_offset=causal_offset)
    assert outcome.out.dtype == scores.dtype
    assert_rows_close(outcome.out, expected.probabilities)
    assert outcome.counts == expected.counts
    assert outcome.first == expected.first


def check_attention(scores, mask=None, causal=False, *, skew=None, **kwargs):
    """Run attention_softmax and hold it to everything it promises. Returns the outcome."""
    outcome = run_attention(scores, mask, causal, skew=skew, **kwargs)
    assert_attention(outcome, scores, mask, causal, **kwargs)
    return outcome


def run_threads(work, count):
    """Run work(number) in ``count`` host threads that start together, and raise what one of them raised."""
    failures, start = [], threading.Barrier(count)

    def guarded(number):
        try:
            start.wait(60)
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
