"""What the kernels of attention share: lengths, products of a query with keys, and what becomes of those out of range.

A dot product with a NaN or an infinity in it is never finite again. So kernels look at sums alone, and only where one
is not finite at the elements: they then count as 0 and are reported.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.entropy import first_beta
from burt_numba.device.events import DIM_MISMATCH, INF_INPUT, NAN_INPUT, record_bad_elements, record_event
from burt_numba.device.numeric import FLOAT32_MAX, NEGATIVE_INFINITY, log, minimum, opaque, whole_quotient
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.warp import FULL_MASK, any_lane

HALF_MAX = np.float32(65519.996)
"""The largest float32 number that is rounded to a finite float16."""
_MOST_INT32 = 2**31 - 1
_ZERO = np.float32(0.0)
_NEGLIGIBLE_WEIGHT = np.float32(2.0**-40)
_NEGLIGIBLE_SUM = np.float32(2.0**-24)


@cuda.jit(device=True)
def length_at(lengths, place, words):
    """A length: an int32 number, or an int64 as two ``words`` of 32 bits, the lower first."""
    length = np.int64(lengths[place])
    if words == 2:
        length = (np.int64(lengths[place + 1]) << 32) | (length & np.int64(0xFFFFFFFF))
    return length


@cuda.jit(device=True)
def context_count(context_lengths, place, words, contexts, sample, reports, errors):
    """How many contexts a sample has; a length that cannot be is clamped and reported by one thread."""
    if context_lengths.size == 0:
        return np.int32(contexts)
    length = length_at(context_lengths, place, words)
    if length >= 0 and length <= contexts:
        return np.int32(length)
    if reports:
        record_event(errors, DIM_MISMATCH, 1, sample)
    return np.int32(0) if length < 0 else np.int32(contexts)


@cuda.jit(device=True)
def chunk_count(seq_lens, place, words, chunk_size, max_chunks, sample, reports, errors):
    """How many chunks a sequence has; a length that is negative or has more is clamped and reported by one thread.

    ``chunk_size`` is below 2**31, ``max_chunks`` at most 2**30.
    """
    length = length_at(seq_lens, place, words)
    if length < 0 or length > np.int64(max_chunks) * chunk_size:
        if reports:
            record_event(errors, DIM_MISMATCH, 1, sample)
        return np.int32(0) if length < 0 else np.int32(max_chunks)
    padded = length + chunk_size - 1
    if padded < _MOST_INT32:
        return whole_quotient(np.int32(padded), np.int32(chunk_size))
    return np.int32(padded // chunk_size)


@cuda.jit(device=True)
def smallest_weight(contexts):
    """Weights up to this one carry nothing: all of them together stay below 2**-24, which rounds off beside a sum of 1.

    The values of such contexts need not be read.
    """
    return minimum(_NEGLIGIBLE_WEIGHT, _NEGLIGIBLE_SUM / np.float32(max(contexts, 1)))


@cuda.jit(device=True)
def load_query(query, offset, stride, dims, staged, first_cell, flat, reports, errors):
    """The threads of a block put a query into shared memory, as finite float32 numbers.

    ``flat``: the index of its first element in the queries; ``reports``: whether this block reports what is not finite.
    """
    bad = False
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    for dim in range(thread, dims, threads):
        value = np.float32(query[offset + dim * stride])
        bad |= not_finite(value)
        staged[first_cell + dim] = finite_or_zero(value)
    if reports and any_lane(bad, FULL_MASK):
        report_not_finite(query, offset, stride, thread, 1, np.int64(dims), threads, flat, errors, 32, FULL_MASK)


@cuda.jit(device=True)
def mended_score(
    score, is_present, query, first_cell, keys, offset, stride, dims, scale, key_place, score_place, reports_key,
    reports_score, errors,
):  # fmt: skip
    """A lane's score, where any of its warp is not finite: bad elements of the key as 0, an overflow as 0.

    All lanes of the warp call it, each with the key of its own context; ``query`` holds the query from ``first_cell``
    on. ``key_place`` and ``score_place`` are the indices of the key's first element and of the score, for reports.
    """
    bad = is_present and not_finite(score)
    if reports_key:
        last = np.int64(dims) if bad else np.int64(0)
        report_not_finite(keys, offset, stride, np.int64(0), 1, last, np.int64(1), key_place, errors, 32, FULL_MASK)
    nans = np.int32(0)
    infinities = np.int32(0)
    if bad:
        product = _ZERO
        dim = np.int32(0)
        while dim < dims:
            product += query[first_cell + dim] * finite_or_zero(np.float32(keys[offset + dim * stride]))
            # Unrolled, a rare path would take registers from all others.
            dim = opaque(np.int32(dim + 1))
        score = product * scale
        if score != score:
            nans = np.int32(1)
        elif not_finite(score):
            infinities = np.int32(1)
        score = finite_or_zero(score)
    if reports_score:
        record_bad_elements(errors, nans, infinities, score_place, score_place, 32, FULL_MASK)
    return score


@cuda.jit(device=True)
def finite_result(value, limit, place, errors):
    """An element of the result; one that its type does not hold counts as 0 and is reported."""
    if abs(value) <= limit:
        return value
    record_event(errors, INF_INPUT if value == value else NAN_INPUT, 1, place)
    return _ZERO


@cuda.jit(device=True)
def write_log_sum(row, row_max, total, lse_out, errors):
    """One thread writes ln sum exp(score) of a row, whose weights relative to the largest score add up to total."""
    if lse_out.size > 0:
        logarithm = NEGATIVE_INFINITY
        if total > _ZERO:
            logarithm = finite_result(row_max + log(total), FLOAT32_MAX, row, errors)
        lse_out[row] = logarithm


@cuda.jit(device=True)
def report_sum(row, row_max, total, temperature_min, temperature_max, lse_out, errors):
    """One thread writes ln sum exp(score / T0) of a row, whose weights at T0 relative to the largest add up to total.

    -inf where there is no context; 0, and reported, where it overflows.
    """
    write_log_sum(row, row_max * first_beta(temperature_min, temperature_max), total, lse_out, errors)
