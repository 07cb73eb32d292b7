"""What the references share: entropy, a softmax that knows absent elements, and the record of events."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

NAN_INPUT = 1
INF_INPUT = 2
ENTROPY_OVERFLOW = 3
DIM_MISMATCH = 6


def entropy(p: ArrayLike) -> NDArray[np.float64]:
    """Entropy over the last axis, in nats, in float64, with 0 log 0 = 0.

    Parameters
    ----------
    p : array_like, shape [..., C]
        Probabilities. They are taken as they are, not normalised first.

    Returns
    -------
    ndarray of float64, shape [...]

    Examples
    --------
    >>> float(entropy([0.5, 0.5, 0.0]))
    0.6931471805599453
    """
    p = np.asarray(p, dtype=np.float64)
    positive = p > 0
    return 0.0 - np.sum(p * np.log(p, out=np.zeros_like(p), where=positive), axis=-1)


def softmax_of_present(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Softmax over the last axis where -inf is absent; a row with nothing present gives zeros."""
    present = z > -np.inf
    row_max = np.max(z, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(np.subtract(z, row_max, out=np.full_like(z, -np.inf), where=present))
    total = np.sum(weights, axis=-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def summarise_events(events: Mapping[int, NDArray[np.bool_]]) -> tuple[dict[int, int], tuple[int, int] | None]:
    """Count the events of each code, and find the lowest flat index with its code.

    Parameters
    ----------
    events : mapping of code to a bool array
        True where the event took place. The array has one entry for each unit that the code counts: an element for
        codes 1 and 2, a row for codes 3 and 6.

    Returns
    -------
    counts : dict of code to int
        Only the codes that occurred.
    first : (index, code) or None
        The lowest index; of two codes at one index, the lower code.
    """
    counts = {code: int(np.count_nonzero(where)) for code, where in events.items()}
    counts = {code: count for code, count in counts.items() if count}
    firsts = [(int(np.argmax(events[code])), code) for code in counts]
    return counts, min(firsts, default=None)
