"""How events on the device reach the user: policies, buffers, checks, and that none is lost or told twice."""

import linecache
import os
import subprocess
import sys
import traceback
import warnings
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from support import ON_GPU, normal, poisoned, to_host, to_target

import burt_numba
from burt_numba import BurtError, BurtRuntimeError, BurtWarning, ErrorBuffer
from burt_numba.backend import cuda
from burt_numba.host.arrays import NumPyFamily
from burt_numba.host.errors import is_synchronous

CLEAN = normal((3, 10))
NAN_AT_13 = CLEAN.copy()
NAN_AT_13[1, 3] = np.nan
NAN_MESSAGE = "constrained_softmax: code 1 (NAN_INPUT): 1 NaN element; first at flat index 13 (code 1)"


def leave_events(function="constrained_softmax", indices=(13,)):
    """An earlier launch of the function found NaN at these places, and nobody has looked yet."""
    if not ON_GPU:
        # A call in the simulator reports its own events, so only the buffer can show what a GPU leaves behind.
        buffer = import_module(f"burt_numba.{function}")._OPERATION.errors.cells(0).memory.array
        buffer[0] = min(buffer[0], 8 * min(indices) + BurtError.NAN_INPUT)
        buffer[BurtError.NAN_INPUT] += len(indices)
        return
    rows = normal((1, 1, 3, 10))
    rows.flat[list(indices)] = np.nan
    getattr(burt_numba, function)(to_target(rows))
    cuda.synchronize()


@contextmanager
def every_warning():
    """All BurtWarnings of the block, from any thread."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        found = []
        yield found
        found += [entry.message for entry in record if isinstance(entry.message, BurtWarning)]


# What is said --------------------------------------------------------------------------------------------------------

MESSAGES = {
    "one NaN": (NAN_AT_13, 0.2, NAN_MESSAGE),
    "two Inf": (
        np.float32([[1, 2, 3], [np.inf, 0, np.inf]]),
        0.2,
        "constrained_softmax: code 2 (INF_INPUT): 2 Inf elements; first at flat index 3 (code 2)",
    ),
    "one row": (
        np.float32([[9, 0, 0], [1, 1, 1]]),
        0.2,
        "constrained_softmax: code 3 (ENTROPY_OVERFLOW): 1 row that cannot reach its entropy bound; "
        "first at flat index 1 (code 3)",
    ),
    "a bad bound, and rows": (
        np.float32([[1, 1, 1], [1, 1, 1], [9, 0, 0]]),
        np.float32([0.2, 0.2, -1]),
        "constrained_softmax: code 3 (ENTROPY_OVERFLOW): 2 rows that cannot reach their entropy bounds, "
        "code 6 (DIM_MISMATCH): 1 value out of its range; first at flat index 0 (code 3)",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_what_is_said(case, policy):
    logits, bound, message = MESSAGES[case]
    bound = to_target(bound) if isinstance(bound, np.ndarray) else bound
    burt_numba.set_error_policy(policy)
    with burt_numba.synchronous():
        if policy == "warn":
            with pytest.warns(BurtWarning) as record:
                burt_numba.constrained_softmax(to_target(logits), bound)
            (said,) = [entry.message for entry in record]
        else:
            with pytest.raises(BurtRuntimeError) as raised:
                burt_numba.constrained_softmax(to_target(logits), bound)
            said = raised.value
    assert str(said) == message
    assert said.function == "constrained_softmax"
    assert isinstance(said.code, BurtError) and all(isinstance(code, BurtError) for code in said.counts)
    assert f"flat index {said.first_index} (code {int(said.code)})" in message
    assert all(f"code {int(code)} ({code.name}): {count} " in message for code, count in said.counts.items())


def test_classes():
    assert issubclass(BurtWarning, RuntimeWarning) and issubclass(BurtRuntimeError, RuntimeError)
    names = ["SUCCESS", "NAN_INPUT", "INF_INPUT", "ENTROPY_OVERFLOW"]
    names += ["SPECTRAL_OVERFLOW", "CAPACITY_FULL", "DIM_MISMATCH", "OOM"]
    assert [(code.name, int(code)) for code in BurtError] == [(name, code) for code, name in enumerate(names)]
    assert issubclass(burt_numba.BurtDimensionError, ValueError) and burt_numba.BurtDimensionError.code == 6
    assert issubclass(burt_numba.BurtSharedMemoryError, MemoryError) and burt_numba.BurtSharedMemoryError.code == 7


# Policies ------------------------------------------------------------------------------------------------------------


def test_the_result_is_there_when_an_error_is_raised():
    burt_numba.set_error_policy("raise")
    out = poisoned(CLEAN.shape)
    with burt_numba.synchronous(), pytest.raises(BurtRuntimeError):
        burt_numba.constrained_softmax(to_target(NAN_AT_13), out=out)
    assert np.isfinite(to_host(out)).all()


def test_ignored_events_do_not_come_back():
    burt_numba.set_error_policy("ignore")
    leave_events()
    burt_numba.constrained_softmax(to_target(NAN_AT_13))
    burt_numba.check()
    burt_numba.set_error_policy("warn")
    burt_numba.constrained_softmax(to_target(CLEAN))
    burt_numba.check()


@pytest.mark.parametrize("policy", ["Warn", "", None, 1])
def test_refuses_other_policies(policy):
    with pytest.raises(ValueError, match=r"^set_error_policy: policy: expected 'warn', 'raise' or 'ignore', got "):
        burt_numba.set_error_policy(policy)


# When it is said -----------------------------------------------------------------------------------------------------


def test_the_next_call_reports_earlier_launches():
    leave_events(indices=(7, 13))
    with pytest.warns(BurtWarning) as record:
        out = burt_numba.constrained_softmax(to_target(CLEAN))
    (warning,) = [entry.message for entry in record]
    assert (warning.counts, warning.first_index, warning.code) == ({1: 2}, 7, 1)
    assert np.isfinite(to_host(out)).all()
    burt_numba.constrained_softmax(to_target(CLEAN))
    burt_numba.check()


def test_the_next_call_raises_before_its_own_launch():
    burt_numba.set_error_policy("raise")
    leave_events()
    out = poisoned(CLEAN.shape)
    with pytest.raises(BurtRuntimeError) as raised:
        burt_numba.constrained_softmax(to_target(CLEAN), out=out)
    assert str(raised.value) == NAN_MESSAGE
    assert np.isnan(to_host(out)).all()
    burt_numba.constrained_softmax(to_target(CLEAN), out=out)
    assert np.isfinite(to_host(out)).all()


def test_each_function_reports_its_own():
    leave_events("constrained_softmax")
    burt_numba.attention_softmax(to_target(CLEAN[np.newaxis, np.newaxis]))
    with pytest.warns(BurtWarning, match=r"^constrained_softmax: "):
        burt_numba.constrained_softmax(to_target(CLEAN))


@pytest.mark.gpu_only("the simulator has nothing to wait for")
def test_a_call_does_not_wait_for_its_own_events():
    logits = to_target(np.full((64, 500_000), np.nan, np.float32))
    cuda.synchronize()
    burt_numba.constrained_softmax(logits)
    cuda.synchronize()
    with pytest.warns(BurtWarning) as record:
        burt_numba.constrained_softmax(to_target(CLEAN))
    (warning,) = [entry.message for entry in record]
    assert (warning.counts, warning.first_index) == ({1: 32_000_000}, 0)


def test_check_reports_every_function_once():
    leave_events("attention_softmax", (4,))
    leave_events("constrained_softmax", (13,))
    with pytest.warns(BurtWarning) as record:
        burt_numba.check()
    said = [(entry.message.function, entry.message.first_index) for entry in record]
    assert said == [("attention_softmax", 4), ("constrained_softmax", 13)]
    burt_numba.check()


def test_check_raises_for_every_function():
    """No event may be lost: what one exception does not name, a later check does."""
    burt_numba.set_error_policy("raise")
    leave_events("attention_softmax")
    leave_events("constrained_softmax")
    said = ""
    for _ in range(2):
        try:
            burt_numba.check()
        except BurtRuntimeError as raised:
            said += "".join(traceback.format_exception(raised))
    assert "attention_softmax: code 1" in said and "constrained_softmax: code 1" in said
    burt_numba.check()


def test_synchronous_calls_report_their_own_events():
    outside = is_synchronous()
    with burt_numba.synchronous():
        with burt_numba.synchronous():
            pass
        assert is_synchronous()
        with pytest.warns(BurtWarning, match="flat index 13"):
            burt_numba.constrained_softmax(to_target(NAN_AT_13))
    with pytest.raises(KeyError), burt_numba.synchronous():
        raise KeyError
    assert is_synchronous() == outside


# In a process of its own ---------------------------------------------------------------------------------------------


def run_script(script, *options, **environment):
    """Run Python with this module imported; its standard output and error."""
    tests = Path(__file__).parent
    start = f"import sys; sys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}]\nfrom test_errors import *\n"
    done = subprocess.run(
        [sys.executable, *options, "-c", start + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


COUNT_WARNINGS = """
with every_warning() as found:
    burt_numba.constrained_softmax(to_target(NAN_AT_13))
with every_warning() as later:
    burt_numba.check()
print(is_synchronous(), len(found), len(later))
"""


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_makes_calls_synchronous(value, on):
    now = on or not ON_GPU
    assert run_script(COUNT_WARNINGS, BURT_NUMBA_SYNC=value)[0].split() == [str(on), str(int(now)), str(int(not now))]


@pytest.mark.parametrize("policy", ["warn", "raise", "ignore"])
def test_what_is_left_at_exit_is_reported(policy):
    _, said = run_script(f"burt_numba.set_error_policy({policy!r})\nleave_events()")
    assert said.count(NAN_MESSAGE) == (policy != "ignore")
    if policy == "warn":
        assert "BurtWarning" in said
    if policy == "raise":
        assert said.strip() == f"burt_numba, at exit: {NAN_MESSAGE}"


@pytest.mark.parametrize(
    ("policy", "options"), [("warn", ()), ("raise", ()), ("warn", ("-W", "error::RuntimeWarning"))]
)
def test_every_function_is_reported_at_exit(policy, options):
    script = f"burt_numba.set_error_policy({policy!r})\nleave_events('attention_softmax')\nleave_events()"
    _, said = run_script(script, *options)
    assert said.count(NAN_MESSAGE) == 1 and said.count(NAN_MESSAGE.replace("constrained", "attention")) == 1


def test_nothing_is_said_at_exit_without_events():
    assert run_script("burt_numba.constrained_softmax(to_target(CLEAN))") == ("", "")


# The caller's own buffer ---------------------------------------------------------------------------------------------


def test_error_buffer_shared_by_two_functions():
    errors = ErrorBuffer()
    assert (errors.check(), errors.counts, errors.first_index) == (BurtError.SUCCESS, {}, None)
    burt_numba.constrained_softmax(to_target(NAN_AT_13), errors=errors)
    scores = normal((1, 1, 2, 5))
    scores[0, 0, 0, 3] = np.inf
    burt_numba.attention_softmax(to_target(scores), errors=errors)
    assert errors.check() is BurtError.INF_INPUT
    assert (errors.code, errors.counts, errors.first_index) == (BurtError.INF_INPUT, {1: 1, 2: 1}, 3)
    assert errors.check() is BurtError.INF_INPUT, "looking is not taking"
    errors.reset()
    assert (errors.check(), errors.code, errors.counts, errors.first_index) == (0, 0, {}, None)
    burt_numba.constrained_softmax(to_target(NAN_AT_13), errors=errors)
    assert (errors.check(), errors.counts, errors.first_index) == (1, {1: 1}, 13)
    burt_numba.check()


def test_refusals_leave_the_buffer_alone():
    errors = ErrorBuffer()
    with pytest.raises(ValueError):
        burt_numba.constrained_softmax(to_target(NAN_AT_13), -1.0, errors=errors)
    assert errors.check() is BurtError.SUCCESS


# Which event, and how many -------------------------------------------------------------------------------------------


def test_the_first_index_is_the_lowest_on_every_run():
    rows = 100_000 if ON_GPU else 60
    logits = normal((rows, 12))
    bad = np.random.default_rng(0).choice(np.arange(40, logits.size), logits.size // 8, replace=False)
    logits.flat[bad] = np.nan
    array, errors = to_target(logits), ErrorBuffer()
    for _ in range(200 if ON_GPU else 3):
        burt_numba.constrained_softmax(array, errors=errors)
        errors.check()
        assert (errors.first_index, errors.code, errors.counts[1]) == (bad.min(), 1, bad.size)
        errors.reset()


def test_a_report_forgets_its_first_index():
    """Later events lie at a higher index than the ones reported before, and say so."""
    for index in (13, 29, 5, 29):
        logits = CLEAN.copy()
        logits.flat[index] = np.nan
        with every_warning() as found:
            burt_numba.constrained_softmax(to_target(logits))
            burt_numba.check()
        assert [(warning.first_index, warning.counts) for warning in found] == [(index, {1: 1})]


@pytest.mark.parametrize("num_classes", [4, 40, 300])
def test_every_row_is_counted(num_classes):
    rows = 1_000_000 // num_classes * 4 if ON_GPU else 2400 // num_classes
    errors = ErrorBuffer()
    burt_numba.constrained_softmax(to_target(np.ones((rows, num_classes), np.float32)), errors=errors)
    assert (errors.check(), errors.counts, errors.first_index) == (3, {3: rows}, 0)
    errors.reset()
    logits = to_target(np.full((rows, num_classes), np.nan, np.float32))
    burt_numba.constrained_softmax(logits, errors=errors)
    assert (errors.check(), errors.counts, errors.first_index) == (1, {1: rows * num_classes}, 0)


# Where it is said ----------------------------------------------------------------------------------------------------


def line_of(record):
    """The source line that the one warning points at, in this file."""
    (entry,) = record
    assert entry.filename == __file__
    return linecache.getline(entry.filename, entry.lineno).strip()


@pytest.mark.parametrize("on_host", [False, True])
def test_warnings_point_at_the_call(on_host):
    logits = NAN_AT_13 if on_host else to_target(NAN_AT_13)
    scores = NAN_AT_13.reshape(1, 1, 3, 10) if on_host else to_target(NAN_AT_13.reshape(1, 1, 3, 10))
    with burt_numba.synchronous():
        with pytest.warns(BurtWarning) as record:
            burt_numba.constrained_softmax(logits)  # here
        assert line_of(record) == "burt_numba.constrained_softmax(logits)  # here"
        with pytest.warns(BurtWarning) as record:
            burt_numba.attention_softmax(scores)  # here
        assert line_of(record) == "burt_numba.attention_softmax(scores)  # here"
    leave_events()
    with pytest.warns(BurtWarning) as record:
        burt_numba.constrained_softmax(CLEAN if on_host else to_target(CLEAN))  # the next call
    assert line_of(record) == "burt_numba.constrained_softmax(CLEAN if on_host else to_target(CLEAN))  # the next call"
    leave_events()
    with pytest.warns(BurtWarning) as record:
        burt_numba.check()  # here
    assert line_of(record) == "burt_numba.check()  # here"


@pytest.mark.simulator_only("allocators of devices align to 256 bytes")
def test_warnings_point_at_the_call_when_the_result_is_not_aligned(monkeypatch):
    def unaligned(self, shape, dtype, device):
        memory = np.empty(16 + int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
        start = (4 - memory.ctypes.data) % 16
        return memory[start : start + memory.size - 16].view(dtype).reshape(shape)

    monkeypatch.setattr(NumPyFamily, "empty", unaligned)
    logits = to_target(np.full((2, 8), np.nan, np.float32))
    with pytest.warns(BurtWarning) as record:
        burt_numba.constrained_softmax(logits)  # here
    assert line_of(record) == "burt_numba.constrained_softmax(logits)  # here"
