"""The parameters of a temperature search, checked: those that constrained_softmax and biencoder_attention share."""

from __future__ import annotations

from typing import Any

from burt_numba.host.checks import require_count, require_number
from burt_numba.host.errors import BurtDimensionError

_SMALLEST_START, _LARGEST_START = 1e-35, 1e35
"""Between these the search may start: its reciprocal and the range of gaps at it are float32 numbers."""


def require_search_parameters(
    function: str, entropy_bound: Any, temperature_min: Any, temperature_max: Any, max_iterations: Any
) -> tuple[float, float, float, int]:
    """The four as numbers that kernels take."""
    numbers = (
        require_number(function, "entropy_bound", entropy_bound, 0.0),
        require_number(function, "temperature_min", temperature_min, 0.0, strict=True),
        require_number(function, "temperature_max", temperature_max, 0.0, strict=True),
        min(require_count(function, "max_iterations", max_iterations, 1), 2**31 - 1),
    )
    if numbers[1] > _LARGEST_START or numbers[2] < _SMALLEST_START:
        raise BurtDimensionError(
            f"{function}: temperature_min, temperature_max: expected a range that reaches into "
            f"[{_SMALLEST_START:g}, {_LARGEST_START:g}], got {temperature_min!r}, {temperature_max!r}"
        )
    if numbers[1] > numbers[2]:
        raise BurtDimensionError(
            f"{function}: temperature_min: expected at most temperature_max = {temperature_max!r}, "
            f"got {temperature_min!r}"
        )
    return numbers
