"""What the kernels of the matrix memory share for their gates."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.events import INF_INPUT, NAN_INPUT, record_event
from burt_numba.device.rows import not_finite

_ZERO = np.float32(0.0)


@cuda.jit(device=True)
def with_bias(total, own, column, reports_own, flat, reports, errors):
    """A product with its bias ``own``; what is not finite is reported and counts as 0."""
    if not_finite(own):
        if reports_own:
            record_event(errors, NAN_INPUT if own != own else INF_INPUT, 1, column)
        own = _ZERO
    total += own
    if total != total:
        # Products beyond float32 of both signs.
        if reports:
            record_event(errors, INF_INPUT, 1, flat)
        total = _ZERO
    return total
