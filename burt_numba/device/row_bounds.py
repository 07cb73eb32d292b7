"""The entropy bound of a row, and what is written and reported about a row whose temperature was searched."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.entropy import UNREACHED_TOLERANCE, temperature_of
from burt_numba.device.events import DIM_MISMATCH, ENTROPY_OVERFLOW, record_event

_ZERO = np.float32(0.0)


@cuda.jit(device=True)
def row_bound(row_bounds, place, entropy_bound, row, reports, errors):
    """The row's own bound where bounds are given; one that is no bound counts as 0 and is reported by one thread."""
    if row_bounds.size == 0:
        return entropy_bound
    bound = row_bounds[place]
    if bound >= _ZERO:
        return bound
    if reports:
        record_event(errors, DIM_MISMATCH, 1, row)
    return _ZERO


@cuda.jit(device=True)
def write_row(row, beta, entropy, temperature_min, temperature_max, temperature_out, entropy_out):
    """One thread writes what is wanted about the row."""
    if temperature_out.size > 0:
        temperature_out[row] = temperature_of(beta, temperature_min, temperature_max)
    if entropy_out.size > 0:
        entropy_out[row] = entropy


@cuda.jit(device=True)
def is_out_of_reach(entropy, bound):
    """Whether the lowest temperature leaves more entropy than the bound allows."""
    return entropy > bound + UNREACHED_TOLERANCE


@cuda.jit(device=True)
def report_row(row, beta, entropy, bound, temperature_min, temperature_max, temperature_out, entropy_out, errors):
    """One thread writes what is wanted about the row, and reports a bound that was out of reach."""
    write_row(row, beta, entropy, temperature_min, temperature_max, temperature_out, entropy_out)
    if is_out_of_reach(entropy, bound):
        record_event(errors, ENTROPY_OVERFLOW, 1, row)
