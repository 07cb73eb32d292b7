"""Sums of what several blocks have left in global memory: four columns a thread, four parts at a time.

Waiting for one part after another would take longer than what they are parts of.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.vector import load_vector, unpack_vectors

_load_four = load_vector(4)
_unpack_parts = unpack_vectors(4, 4)


@cuda.jit(device=True)
def load_parts(parts, start, apart, left, words):
    """Four columns of four parts, which begin at ``start`` and are ``apart``; 0 beyond those that are ``left``."""
    for each in range(4):
        if each < left:
            _load_four(parts, start + each * apart, words, each * 4)
        else:
            for element in range(4):
                words[each * 4 + element] = np.uint32(0)


@cuda.jit(device=True)
def add_parts(parts, words, values, totals):
    """Add the columns of the loaded parts to the totals, in their order. ``values``: 16 floats to work with."""
    _unpack_parts(parts, words, values)
    for element in range(4):
        total = totals[element] + values[element]
        total += values[element + 4]
        total += values[element + 8]
        totals[element] = total + values[element + 12]
