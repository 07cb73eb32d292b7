"""The documented kernel of flash_decoding_reduce, for launching by hand.

A block takes a head of a sample, a thread every blockDim.x-th column, and each thread all chunks, one after another:
first their maxima, then their sums.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.attention import chunk_count, finite_result, write_log_sum
from burt_numba.device.attention_states import DEAD_MAX, EMPTY_MAX, counts, rescaling
from burt_numba.device.events import record_bad_elements
from burt_numba.device.numeric import FLOAT32_MAX, maximum
from burt_numba.device.rows import finite_or_zero, not_finite
from burt_numba.device.warp import FULL_MASK, any_lane, warp_max
from burt_numba.target import DOCUMENTED_FLASH_THREADS

_ZERO = np.float32(0.0)


@cuda.jit(device=True)
def _take_bad(value, index, found):
    """``found`` with one more element: NaNs and infinities of a thread, and the first of each."""
    nans, infinities, first_nan, first_infinity = found
    if value == value:
        first_infinity = index if infinities == 0 else min(first_infinity, index)
        infinities += np.int32(1)
    else:
        first_nan = index if nans == 0 else min(first_nan, index)
        nans += np.int32(1)
    return nans, infinities, first_nan, first_infinity


@cuda.jit(launch_bounds=DOCUMENTED_FLASH_THREADS)
def flash_decoding_reduce_kernel(partials, output, seq_lens, max_chunks, chunk_size, lse_out, errors):
    """The documented layout: grid (H, M), block 32, no shared memory. Smaller grids stride over the rest.

    partials [M, H, max_chunks, D + 2], output [M, H, D], seq_lens [M]; lse_out float32 [M * H], or of size 0; errors
    int64 [8]. A result is the sum of the chunks' sums over that of their exponentials, both relative to the greatest of
    the maxima.
    """
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    batch, heads, dims = output.shape
    for sample in range(cuda.blockIdx.y, batch, cuda.gridDim.y):
        for head in range(cuda.blockIdx.x, heads, cuda.gridDim.x):
            chunks = chunk_count(
                seq_lens, sample, 1, np.int64(chunk_size), max_chunks, sample, thread == 0 and head == 0, errors
            )
            row = np.int64(sample) * heads + head
            states = partials[sample, head]
            found = (np.int32(0), np.int32(0), np.int64(0), np.int64(0))
            # Each warp looks at all maxima, so that warps need not meet.
            row_max = EMPTY_MAX
            for chunk in range(cuda.laneid, chunks, 32):
                chunk_max, chunk_sum = states[chunk, dims], states[chunk, dims + 1]
                if counts(chunk_max, chunk_sum, DEAD_MAX):
                    row_max = maximum(row_max, chunk_max)
                elif not (chunk_max <= DEAD_MAX) and thread < 32:
                    index = (row * max_chunks + chunk) * (dims + 2) + dims
                    if not_finite(chunk_max):
                        found = _take_bad(chunk_max, index, found)
                    if not_finite(chunk_sum):
                        found = _take_bad(chunk_sum, index + 1, found)
            row_max = warp_max(row_max, 32, FULL_MASK)
            row_sum = _ZERO
            for chunk in range(chunks):
                chunk_max, chunk_sum = states[chunk, dims], states[chunk, dims + 1]
                if counts(chunk_max, chunk_sum, DEAD_MAX):
                    row_sum += chunk_sum * rescaling(chunk_max, row_max)
            for column in range(thread, dims, threads):
                total = _ZERO
                for chunk in range(chunks):
                    chunk_max = states[chunk, dims]
                    if counts(chunk_max, states[chunk, dims + 1], DEAD_MAX):
                        value = states[chunk, column]
                        if not_finite(value):
                            found = _take_bad(value, (row * max_chunks + chunk) * (dims + 2) + column, found)
                        total += finite_or_zero(value) * rescaling(chunk_max, row_max)
                place = row * dims + column
                result = total / row_sum if row_sum > _ZERO else _ZERO
                output[sample, head, column] = finite_result(result, FLOAT32_MAX, place, errors)
            if thread == 0:
                write_log_sum(row, row_max, row_sum, lse_out, errors)
            if any_lane(found[0] + found[1] > 0, FULL_MASK):
                record_bad_elements(errors, *found, 32, FULL_MASK)
