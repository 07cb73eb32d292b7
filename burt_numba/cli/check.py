"""``burt-numba check``: every function against its float64 reference, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from burt_numba.cli import driver
from burt_numba.cli.output import progress, table

# Relative error in norm, for each type of the inputs.
_ERROR_LIMITS = {"float32": 5e-6, "float16": 2e-3}

# In nats. An entropy may exceed its bound by the tolerance, and stay below it by the band.
_ENTROPY_BOUND = 0.20
_ENTROPY_TOLERANCE = 1e-6
_ENTROPY_BAND = max(1e-4 * _ENTROPY_BOUND, 1e-6)
_TEMPERATURE_MIN = 0.01

# One element, around a warp, around a block, odd; on a GPU also sizes of real use.
_SOFTMAX_SIZES: tuple[tuple[int, ...], ...] = ((3, 1), (4, 33), (5, 129), (3, 1000), (2, 1025))
_SOFTMAX_SIZES_GPU = ((32, 1000), (32, 50_000), (4096, 4096), (64, 128_256))
_ATTENTION_SIZES: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1), (2, 2, 5, 5), (1, 2, 7, 33), (1, 1, 3, 129))
_ATTENTION_SIZES_GPU = ((8, 8, 512, 512), (1, 8, 2048, 2048), (2, 3, 500, 1025))
_ATTENTION_VARIANTS = ("plain", "mask", "causal")


@dataclass(frozen=True)
class Outcome:
    error: float
    """Relative error in norm."""
    bound_held: bool | None
    """None where the function has no bound."""
    events: int
    """What the function recorded."""
    events_expected: bool
    """Whether the reference recorded the same."""
    seconds: float


@dataclass(frozen=True)
class Case:
    operation: str
    size: str
    dtype: str
    compute: Callable[[], Outcome]


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """‖result − expected‖ / ‖expected‖; a value that is not finite gives infinity."""
    if not np.isfinite(result).all():
        return float("inf")
    distance = float(np.linalg.norm((result - expected).ravel()))
    return distance / float(np.linalg.norm(expected.ravel())) if distance else 0.0


def _timed(function: Callable[..., Any], simulated: bool, *arguments: Any, **options: Any) -> tuple[Any, Any, float]:
    """Call the function with an error buffer of its own: returns its result, the buffer and the seconds.

    On a GPU it is called once before, so that the time holds no compilation.
    """
    import burt_numba

    if not simulated:
        function(*arguments, errors=burt_numba.ErrorBuffer(), **options)
    errors = burt_numba.ErrorBuffer()
    start = time.perf_counter()
    result = function(*arguments, errors=errors, **options)
    return result, errors, time.perf_counter() - start


def _same_events(errors: Any, expected: Mapping[int, int]) -> bool:
    return {int(code): count for code, count in errors.counts.items()} == expected


def _constrained_softmax(shape: tuple[int, ...], dtype: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    rng = np.random.default_rng(shape[-1])
    logits = (4 * rng.standard_normal(shape)).astype(dtype)
    # NaN, so that a row nobody wrote fails.
    temperature = np.full(shape[:-1], np.nan, dtype=np.float32)
    entropy = np.full(shape[:-1], np.nan, dtype=np.float32)
    result, errors, seconds = _timed(
        burt_numba.constrained_softmax,
        simulated,
        logits,
        _ENTROPY_BOUND,
        _TEMPERATURE_MIN,
        temperature_out=temperature,
        entropy_out=entropy,
    )
    # The band leaves the temperature a little freedom, so the reference is taken at the one that was returned.
    expected = reference.constrained_softmax(logits, _ENTROPY_BOUND, _TEMPERATURE_MIN, temperature=temperature)

    # The bound is promised before the rounding to float16.
    reached = entropy if dtype == "float16" else reference.entropy(result)
    held = reached <= _ENTROPY_BOUND + _ENTROPY_TOLERANCE
    # At the lowest temperature ties may keep the entropy above the bound: the events tell whether they do.
    held |= temperature == np.float32(_TEMPERATURE_MIN)
    near = (temperature == 1) | (reached >= _ENTROPY_BOUND - _ENTROPY_BAND)
    return Outcome(
        error=relative_error(result, expected.probabilities),
        bound_held=bool((held & near).all()),
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _attention_softmax(shape: tuple[int, ...], dtype: str, variant: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    rng = np.random.default_rng(shape[-1])
    scores = (4 * rng.standard_normal(shape)).astype(dtype)
    mask = None
    if variant == "mask":
        mask = np.where(rng.random((shape[0], 1, 1, shape[-1])) < 0.25, -np.inf, 0.0).astype(np.float32)
    causal = variant == "causal"
    offset = shape[3] - shape[2] if causal else None
    result, errors, seconds = _timed(
        burt_numba.attention_softmax, simulated, scores, mask, causal, causal_offset=offset
    )
    expected = reference.attention_softmax(scores, mask, causal, causal_offset=offset)
    return Outcome(
        error=relative_error(result, expected.probabilities),
        bound_held=None,
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _size(shape: Sequence[int]) -> str:
    return " × ".join(str(length) for length in shape)


def _constrained_softmax_cases(simulated: bool) -> Iterator[Case]:
    for shape in _SOFTMAX_SIZES + (() if simulated else _SOFTMAX_SIZES_GPU):
        for dtype in _ERROR_LIMITS:
            compute = partial(_constrained_softmax, shape, dtype, simulated)
            yield Case("constrained_softmax", _size(shape), dtype, compute)


def _attention_softmax_cases(simulated: bool) -> Iterator[Case]:
    for shape in _ATTENTION_SIZES + (() if simulated else _ATTENTION_SIZES_GPU):
        for dtype in _ERROR_LIMITS:
            for variant in _ATTENTION_VARIANTS:
                compute = partial(_attention_softmax, shape, dtype, variant, simulated)
                yield Case("attention_softmax", f"{_size(shape)} {variant}", dtype, compute)


_CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "constrained_softmax": _constrained_softmax_cases,
    "attention_softmax": _attention_softmax_cases,
}


def _row(case: Case, outcome: Outcome) -> tuple[bool, list[str]]:
    limit = _ERROR_LIMITS[case.dtype]
    passed = outcome.error <= limit and outcome.bound_held is not False and outcome.events_expected
    bound = {None: "–", True: "yes", False: "no"}[outcome.bound_held]
    return passed, [
        case.operation,
        case.size,
        case.dtype,
        f"{outcome.error:.1e}",
        f"{limit:.0e}",
        bound,
        f"{outcome.events}" if outcome.events_expected else f"{outcome.events}, not as expected",
        f"{outcome.seconds * 1e3:.1f} ms",
        "pass" if passed else "FAIL",
    ]


def _failed_row(case: Case, finding: str) -> list[str]:
    return [case.operation, case.size, case.dtype, *["–"] * 5, f"FAIL: {finding}"]


def check(operations: Iterable[str], *, sanitize: bool = False) -> int:
    simulated = driver.choose_target("--sanitize" if sanitize else None)
    from burt_numba.simulator import SimulatorError, checks

    cases = [case for operation in operations for case in _CASES[operation](simulated)]
    rows, findings, failures = [], [], 0
    with progress() as display, checks() if sanitize else nullcontext():
        task = display.add_task("check", total=len(cases))
        for case in cases:
            display.update(task, description=f"{case.operation} {case.size} {case.dtype}")
            try:
                passed, row = _row(case, case.compute())
            except SimulatorError as error:
                passed, row = False, _failed_row(case, type(error).__name__)
                findings.append(f"{case.operation} {case.size} {case.dtype}: {error}")
            failures += not passed
            rows.append(row)
            display.advance(task)
    title = "Simulator" if simulated else "GPU"
    table(
        f"{title}, checked for races, reads of unwritten memory, bounds and barriers" if sanitize else title,
        ["function", "size", "type", "relative error", "limit", "bound held", "events", "time", "result"],
        rows,
    )
    for finding in findings:
        print(f"\n{finding}")
    print(f"{len(rows) - failures} passed, {failures} failed")
    return 1 if failures else 0
