"""Documented kernels of cifg_update and batched_cifg_update, for launching by hand.

    C' = f C + (1 - f) h hᵀ  (f = sigmoid(W_f [h; x] + b_f), a number a row),   then sigma_max(C') <= spectral_bound

The update and the projection are launches of their own. The functions launch faster kernels for the same: those of
cifg_gates.py, cifg_update_rows.py and cifg_spectrum.py.
"""

from __future__ import annotations

import math

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.events import (
    DIM_MISMATCH,
    SPECTRAL_OVERFLOW,
    record_bad_elements,
    record_event,
    rolled,
)
from burt_numba.device.numeric import FLOAT32_MAX, maximum, minimum, sigmoid_pair
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.spectrum import pseudo_random
from burt_numba.device.warp import FULL_MASK, any_lane, warp_sum
from burt_numba.target import DOCUMENTED_CIFG_THREADS

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TOLERANCE = np.float32(1.0 + 1e-3)
"""Times the bound: what may be left of sigma after the projection."""
_PSEUDO_RANDOM_PART = np.float32(0.01)
"""Of the start vector: what the given one misses can grow from it."""
_SMALLEST_UNSCALED, _LARGEST_UNSCALED = np.float32(1e-6), np.float32(1e3)
"""Largest entries in between: fourth powers of sigma, which occur, stay well inside float32."""
_SMALLEST_LARGEST = np.float32(1e-37)
"""Its reciprocal is a float32 number."""

_PARTS = 5
_HIDDEN, _INPUTS, _WEIGHTS, _MEMORY, _BIAS = range(_PARTS)
_OPERAND_PARTS = 1 << _HIDDEN | 1 << _INPUTS
_ROW_PARTS = 1 << _WEIGHTS | 1 << _MEMORY | 1 << _BIAS
_NO_OVERFLOW = np.int64(1 << 59)

_V, _CV, _W, _CW = range(4)

_block = row_reductions(ANY_THREADS)
_block_max, _block_sum, _block_sum3 = _block.maximum, _block.sum, _block.sum3


# --- update -------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _element(hidden, inputs, staged, d_model, column):
    """An element of [h; x] in a column of the thread; 0 where it is not finite."""
    if column < staged.size:
        return staged[column]
    return finite_or_zero(hidden[column] if column < d_model else inputs[column - d_model])


@cuda.jit(device=True)
def _report_row(found, hidden, inputs, weights, bias, memory, d_model, input_dim, row, sample, memory_flat, errors):
    """A warp reports what is not finite in the arrays that its lanes found something in."""
    thread = cuda.threadIdx.x
    threads = cuda.blockDim.x
    # One report in a loop: five of them take registers from every launch.
    for part in range(rolled(_PARTS, errors)):
        source, first, last, flat = hidden, thread, d_model, np.int64(sample) * d_model
        if part == _INPUTS:
            source, last = inputs, input_dim - d_model
            first, flat = (thread - d_model) % threads, np.int64(sample) * last
        elif part == _WEIGHTS:
            source, last, flat = weights, input_dim, np.int64(row) * input_dim
        elif part == _MEMORY:
            source, flat = memory, memory_flat
        elif part == _BIAS:
            source, last, flat = bias, row + 1, np.int64(0)
            first = row if thread == 0 else last
        if any_lane(found & (1 << part) != 0, FULL_MASK):
            report_not_finite(source, 0, 1, first, 1, last, threads, flat, errors, 32, FULL_MASK)


@cuda.jit(device=True)
def _read_row(
    hidden, inputs, weights, bias, memory, staged, d_model, input_dim, row, sample, memory_flat, wanted, scratch, phase,
    errors,
):  # fmt: skip
    """Stage [h; x], as much as shared memory holds, and multiply it with a row of weights.

    ``weights`` and ``memory`` are rows. ``wanted``: a bit for each array whose elements that are not finite are
    reported. (f, 1 - f, whether the sum was beyond float32, whether the row of the memory is lost), in every thread.
    """
    thread = cuda.threadIdx.x
    threads = cuda.blockDim.x
    product = _ZERO
    found = 0
    # No barrier: a thread reads back only the columns it wrote.
    for column in range(thread, input_dim, threads):
        value = hidden[column] if column < d_model else inputs[column - d_model]
        weight = weights[column]
        if not_finite(value):
            found |= 1 << (_HIDDEN if column < d_model else _INPUTS)
        if not_finite(weight):
            found |= 1 << _WEIGHTS
        value = finite_or_zero(value)
        if column < staged.size:
            staged[column] = value
        product += finite_or_zero(weight) * value
    if wanted & (1 << _MEMORY) != 0:
        for column in range(thread, d_model, threads):
            if not_finite(memory[column]):
                found |= 1 << _MEMORY
    row_bias = bias[row]
    if not_finite(row_bias) and thread == 0:
        found |= 1 << _BIAS
    found &= wanted
    if any_lane(found != 0, FULL_MASK):
        _report_row(found, hidden, inputs, weights, bias, memory, d_model, input_dim, row, sample, memory_flat, errors)
    lost = _ONE if found & (1 << _MEMORY) != 0 else _ZERO
    product, lost, _unused = _block_sum3(product, lost, _ZERO, scratch, scratch, phase)
    activation = product + finite_or_zero(row_bias)
    # Products beyond float32 of both signs.
    overflow = activation != activation
    forget, kept = sigmoid_pair(_ZERO if overflow else activation)
    return forget, kept, overflow, lost > _ZERO


@cuda.jit(device=True)
def _mark_lost(memory, lost, row, d_model):
    """The row, and the columns of what is not finite in it. Other rows may mark the same columns."""
    for column in range(cuda.threadIdx.x, d_model, cuda.blockDim.x):
        if not_finite(memory[column]):
            cuda.atomic.max(lost, d_model + column, np.int32(1))
    if cuda.threadIdx.x == 0:
        lost[row] = 1


@cuda.jit(device=True)
def _add_write(memory, factor, write, hidden, inputs, staged, d_model):
    """row <- factor row + write h, by each thread for its columns; a factor of 0 forgets what is not finite, too."""
    for column in range(cuda.threadIdx.x, d_model, cuda.blockDim.x):
        value = write * _element(hidden, inputs, staged, d_model, column)
        if factor != _ZERO:
            value += factor * memory[column]
        memory[column] = value


@cuda.jit(device=True)
def _finish_row(memory, d_model, flat, overflows, first_overflow):
    """Entries beyond float32 become 0; they join the thread's overflows."""
    for column in range(cuda.threadIdx.x, d_model, cuda.blockDim.x):
        if not_finite(memory[column]):
            memory[column] = _ZERO
            first_overflow = min(first_overflow, flat + column)
            overflows += np.int32(1)
    return overflows, first_overflow


@cuda.jit(device=True)
def _row_product(memory, vector, d_model, scratch, phase):
    """The new row times a vector, in every thread."""
    total = _ZERO
    for column in range(cuda.threadIdx.x, d_model, cuda.blockDim.x):
        total += memory[column] * finite_or_zero(vector[column])
    return _block_sum(total, scratch, scratch, phase)


@cuda.jit(device=True)
def _report_overflows(overflows, first_overflow, errors):
    if any_lane(overflows > 0, FULL_MASK):
        record_bad_elements(errors, np.int32(0), overflows, np.int64(0), first_overflow, 32, FULL_MASK)


@cuda.jit(device=True)
def _check_bound(spectral_bound, first, errors):
    """The first thread of the grid reports a bound that is not above 0."""
    if first and not (np.float32(spectral_bound) > _ZERO):
        record_event(errors, DIM_MISMATCH, 1, 0)


@cuda.jit(launch_bounds=DOCUMENTED_CIFG_THREADS)
def cifg_update_kernel(
    C,
    h,
    x,
    W_f,
    b_f,
    d_model,
    input_dim,
    spectral_bound,
    power_vector,
    power_product,
    forget_gate_out,
    lost,
    errors,
):
    """Gate and update: block i takes rows i, i + gridDim.x, ...; thread t takes columns t, t + blockDim.x, ...

    Grid (d), block min(d, 256) rounded up to whole warps, shared (d + n) * 4 bytes for [h; x]; what less shared memory
    does not hold is read once more. Any other grid, and any whole number of warps up to 8. The projection is
    ``cifg_projection_kernel``; the bound is only checked.
    C [d, d] in place; h [d]; x [n]; W_f [d, d + n]; b_f [d]; d_model = d; input_dim = d + n.
    power_vector v, power_product C' v and forget_gate_out f [d], or of size 0. lost int32 [2 d], zeros before, or of
    size 0: a row in which something is not finite counts as zero, and it and the columns are marked, for the projection
    to set those columns to zero as well. Events (a gate's sum, an entry or a product beyond float32 is one of code 2):
    errors int64 [8].
    """
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    staged = cuda.shared.array(0, np.float32)
    thread = cuda.threadIdx.x
    phase = 0
    _check_bound(spectral_bound, cuda.blockIdx.x == 0 and thread == 0, errors)
    for row in range(cuda.blockIdx.x, d_model, cuda.gridDim.x):
        memory = C[row]
        flat = np.int64(row) * d_model
        overflows, first_overflow = np.int32(0), _NO_OVERFLOW
        wanted = _ROW_PARTS | (_OPERAND_PARTS if row == 0 else 0)
        forget, kept, overflow, row_lost = _read_row(
            h, x, W_f[row], b_f, memory, staged, d_model, input_dim, row, 0, flat, wanted, scratch, phase, errors
        )
        phase ^= 1
        if overflow and thread == 0:
            overflows, first_overflow = np.int32(1), np.int64(row)
        if row_lost and lost.size > 0:
            _mark_lost(memory, lost, row, d_model)
        _add_write(memory, _ZERO if row_lost else forget, kept * finite_or_zero(h[row]), h, x, staged, d_model)
        overflows, first_overflow = _finish_row(memory, d_model, flat, overflows, first_overflow)
        if forget_gate_out.size > 0 and thread == 0:
            forget_gate_out[row] = forget
        if power_vector.size > 0 and power_product.size > 0:
            product = _row_product(memory, power_vector, d_model, scratch, phase)
            phase ^= 1
            if thread == 0:
                power_product[row] = finite_or_zero(product)
                if not_finite(product):
                    overflows += np.int32(1)
                    first_overflow = min(first_overflow, np.int64(row))
        _report_overflows(overflows, first_overflow, errors)


@cuda.jit(launch_bounds=DOCUMENTED_CIFG_THREADS)
def batched_cifg_update_kernel(
    C_batch,
    H,
    X,
    W_f,
    b_f,
    batch_size,
    d_model,
    input_dim,
    spectral_bound,
    shared_memory_mode,
    power_vector,
    power_product,
    forget_gate_out,
    lost,
    errors,
):
    """Gate and update of a batch; threads take columns as in ``cifg_update_kernel``.

        independent: grid (B, d), at most 65,535 in y; block (b, i) takes row i of the memory of sample b
        shared:      grid (d);    block i goes through the samples for row i: twice, for the mean gate comes first

    Smaller grids stride. Block min(d, 256) rounded up to whole warps, shared (d + n) * 4 bytes.
    C_batch [M, d, d] in place, M = B, or 1 in shared mode; H [B, d]; X [B, n]; W_f, b_f and the numbers as there.
    power_vector, power_product [M, d], forget_gate_out [B, d], lost int32 [M, 2 d], of 2 axes also where of size 0.
    errors int64 [8].
    """
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    staged = cuda.shared.array(0, np.float32)
    thread = cuda.threadIdx.x
    block = np.int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
    phase = 0
    _check_bound(spectral_bound, block == 0 and thread == 0, errors)
    # In shared mode all blocks are blocks of rows, whatever the grid.
    first_matrix = 0 if shared_memory_mode else cuda.blockIdx.x
    matrices = 1 if shared_memory_mode else batch_size
    matrix_step = 1 if shared_memory_mode else cuda.gridDim.x
    first_row = block if shared_memory_mode else np.int64(cuda.blockIdx.y)
    row_step = np.int64(cuda.gridDim.y) * (cuda.gridDim.x if shared_memory_mode else 1)
    samples = batch_size if shared_memory_mode else 1
    share = _ONE / np.float32(samples)
    for matrix in range(first_matrix, matrices, matrix_step):
        for row in range(first_row, d_model, row_step):
            memory = C_batch[matrix, row]
            flat = (np.int64(matrix) * d_model + row) * d_model
            overflows, first_overflow = np.int32(0), _NO_OVERFLOW
            mean_gate, forget, kept = _ZERO, _ZERO, _ZERO
            row_lost = False
            for turn in range(2 * samples):
                writes = turn >= samples
                sample = matrix + (turn - samples if writes else turn)
                if not writes or samples > 1:
                    wanted = 0
                    if not writes:
                        wanted = (_OPERAND_PARTS if row == 0 else 0) | (1 << _MEMORY if turn == 0 else 0)
                        wanted |= 1 << _WEIGHTS | 1 << _BIAS if sample == 0 else 0
                    forget, kept, overflow, found_lost = _read_row(
                        H[sample], X[sample], W_f[row], b_f, memory, staged, d_model, input_dim, row, sample, flat,
                        wanted, scratch, phase, errors,
                    )  # fmt: skip
                    phase ^= 1
                    row_lost |= found_lost
                    if overflow and not writes and thread == 0:
                        overflows += np.int32(1)
                        first_overflow = min(first_overflow, np.int64(sample) * d_model + row)
                if writes:
                    factor = _ONE if turn > samples else _ZERO if row_lost else mean_gate
                    write = share * kept * finite_or_zero(H[sample, row])
                    _add_write(memory, factor, write, H[sample], X[sample], staged, d_model)
                else:
                    mean_gate += share * forget
                    if forget_gate_out.size > 0 and thread == 0:
                        forget_gate_out[sample, row] = forget
                    if found_lost and lost.size > 0:
                        _mark_lost(memory, lost[matrix], row, d_model)
            overflows, first_overflow = _finish_row(memory, d_model, flat, overflows, first_overflow)
            if power_vector.size > 0 and power_product.size > 0:
                product = _row_product(memory, power_vector[matrix], d_model, scratch, phase)
                phase ^= 1
                if thread == 0:
                    power_product[matrix, row] = finite_or_zero(product)
                    if not_finite(product):
                        overflows += np.int32(1)
                        first_overflow = min(first_overflow, np.int64(matrix) * d_model + row)
            _report_overflows(overflows, first_overflow, errors)


# --- projection ---------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _repaired(hidden, forget_gate, first_sample, samples, row, column):
    """An entry that the update wrote to a memory of zeros: the mean of (1 - f) h hᵀ over the samples."""
    share = _ONE / np.float32(samples)
    total = _ZERO
    for sample in range(first_sample, first_sample + samples):
        kept = share * (_ONE - forget_gate[sample, row])
        total += kept * finite_or_zero(hidden[sample, row]) * finite_or_zero(hidden[sample, column])
    return finite_or_zero(total)


@cuda.jit(device=True)
def _prepare(C, matrix, hidden, forget_gate, lost, scratch, phase, errors):
    """Repair what was lost, make the rest finite; returns the largest magnitude in the matrix, in every thread."""
    columns = C.shape[1]
    samples = hidden.shape[0] // C.shape[0]
    repairs = lost.size > 0
    largest = _ZERO
    nans, infinities = np.int32(0), np.int32(0)
    first_nan, first_infinity = np.int64(0), np.int64(0)
    for row in range(columns):
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            value = C[matrix, row, column]
            if repairs and (lost[matrix, row] > 0 or lost[matrix, columns + column] > 0):
                # Beyond float32 it is 0 without a record here: the update has recorded it.
                value = _repaired(hidden, forget_gate, matrix * samples, samples, row, column)
                C[matrix, row, column] = value
            elif not_finite(value):
                flat = (np.int64(matrix) * columns + row) * columns + column
                if value != value:
                    if nans == 0:
                        first_nan = flat
                    nans += np.int32(1)
                else:
                    if infinities == 0:
                        first_infinity = flat
                    infinities += np.int32(1)
                value = _ZERO
                C[matrix, row, column] = value
            largest = maximum(largest, abs(value))
    record_bad_elements(errors, nans, infinities, first_nan, first_infinity, 32, FULL_MASK)
    return _block_max(largest, scratch, scratch, phase)


@cuda.jit(device=True)
def _start(vector, power_vector, matrix, scratch, phase):
    """The given vector and a little of every other direction; pseudo-random where it is absent or zero.

    Two reductions, so that the phase is the same afterwards.
    """
    columns = vector.size
    given = power_vector.size > 0
    largest = _ZERO
    length = _ZERO
    if given:
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            largest = maximum(largest, abs(finite_or_zero(power_vector[matrix, column])))
    largest = maximum(_block_max(largest, scratch, scratch, phase), _SMALLEST_LARGEST)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        value = _ZERO
        if given:
            value = finite_or_zero(power_vector[matrix, column]) / largest
        vector[column] = value
        length += value * value
    length = _block_sum(length, scratch, scratch, phase ^ 1)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        value = pseudo_random(column, 1)
        if length > _ZERO:
            value = vector[column] / math.sqrt(length) + _PSEUDO_RANDOM_PART * value / math.sqrt(np.float32(columns))
        vector[column] = value


@cuda.jit(device=True)
def _make_unit(vectors, place, scratch, phase):
    """A thread's columns of vectors[place], of length 1; of w, the part orthogonal to v. Two reductions."""
    columns = vectors.shape[1]
    along, length = _ZERO, _ZERO
    if place == _W:
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            along += vectors[_W, column] * vectors[_V, column]
    along = _block_sum(along, scratch, scratch, phase)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        value = vectors[place, column]
        if place == _W:
            value -= along * vectors[_V, column]
            vectors[_W, column] = value
        length += value * value
    length = _block_sum(length, scratch, scratch, phase ^ 1)
    scale = _ONE / math.sqrt(length) if length > _ZERO else _ZERO
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        vectors[place, column] *= scale


@cuda.jit(device=True)
def _power_iteration(memory, vectors, place, steps, unit, scratch, phase):
    """(sigma, phase) after steps v <- CᵀC v / |CᵀC v|, for w within the complement of v.

    Leaves the unit vector in vectors[place] and its product with C in vectors[place + 1], all of it times ``unit``.
    """
    columns = vectors.shape[1]
    sigma = _ZERO
    for step in range(steps + 1):
        _make_unit(vectors, place, scratch, phase)
        cuda.syncthreads()  # the unit vector is complete, and the product before was read
        squares = _ZERO
        for row in range(cuda.threadIdx.x >> 5, columns, cuda.blockDim.x >> 5):
            total = _ZERO
            for column in range(cuda.laneid, columns, 32):
                total += memory[row, column] * unit * vectors[place, column]
            total = warp_sum(total, 32, FULL_MASK)
            if cuda.laneid == 0:
                vectors[place + 1, row] = total
                squares += total * total
        sigma = math.sqrt(_block_sum(squares, scratch, scratch, phase))
        phase ^= 1
        cuda.syncthreads()  # the product is complete, and the vector was read
        if step < steps:
            for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
                total = _ZERO
                for row in range(columns):
                    total += memory[row, column] * unit * vectors[place + 1, row]
                vectors[place, column] = total
    return sigma, phase


@cuda.jit(launch_bounds=DOCUMENTED_CIFG_THREADS)
def cifg_projection_kernel(
    C,
    H,
    forget_gate,
    spectral_bound,
    power_iterations,
    clip,
    power_vector,
    sigma_out,
    lost,
    work,
    errors,
):
    """After an update: repair what was lost, estimate sigma_max, project. Block b takes matrices b, b + gridDim.x, ...

    Any grid and any whole number of warps up to 8; no dynamic shared memory. Thread t takes columns t, t + blockDim.x,
    ...; of products with the matrix warp w takes rows w, w + warps, ...
    C [M, d, d] in place. H and forget_gate [S, d]: S = M, or in shared mode M = 1 and S = B; read where a row or column
    was lost, which becomes what the update writes to a memory of zeros. lost int32 [M, 2 d], zeros afterwards.
    power_iterations: steps after the first. clip: lower one singular value to the bound; C times bound / sigma where
    that is false, or where a second one is above the bound.
    power_vector [M, d], in and out: where to start, and the right singular vector found. sigma_out [M]: sigma before
    the projection. These and lost may be of size 0, with as many axes. work float32 [M, 4, d]: anything before; v, C v,
    w, C w. errors int64 [8]: code 4 where another power iteration finds sigma above the bound by a part in 1,000; with
    code 6, a bound that is not above 0, nothing is projected.
    """
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    thread = cuda.threadIdx.x
    threads = cuda.blockDim.x
    columns = C.shape[1]
    steps = max(power_iterations, 0) + 1
    phase = 0
    _check_bound(spectral_bound, cuda.blockIdx.x == 0 and thread == 0, errors)
    for matrix in range(cuda.blockIdx.x, C.shape[0], cuda.gridDim.x):
        memory = C[matrix]
        vectors = work[matrix]
        largest = _prepare(C, matrix, H, forget_gate, lost, scratch, phase, errors)
        phase ^= 1
        cuda.syncthreads()  # the matrix is repaired, and its marks were read
        if lost.size > 0:
            for cell in range(thread, 2 * columns, threads):
                lost[matrix, cell] = 0
        unit = _ONE
        if largest < _SMALLEST_UNSCALED or largest > _LARGEST_UNSCALED:
            unit = _ONE / maximum(largest, _SMALLEST_LARGEST)
        bound = np.float32(spectral_bound) * unit
        _start(vectors[_V], power_vector, matrix, scratch, phase)
        sigma, phase = _power_iteration(memory, vectors, _V, steps, unit, scratch, phase)
        if power_vector.size > 0:
            for column in range(thread, columns, threads):
                power_vector[matrix, column] = vectors[_V, column]
        if sigma_out.size > 0 and thread == 0:
            sigma_out[matrix] = minimum(sigma / unit, FLOAT32_MAX)
        if sigma > bound and bound > _ZERO:
            factor, cut = bound / sigma, _ZERO
            if clip:
                for column in range(thread, columns, threads):
                    vectors[_W, column] = pseudo_random(column, 3)
                second, phase = _power_iteration(memory, vectors, _W, steps, unit, scratch, phase)
                if second <= bound * _TOLERANCE:
                    factor, cut = _ONE, _ONE - factor
            for row in range(columns):
                for column in range(thread, columns, threads):
                    write = cut * vectors[_CV, row] * vectors[_V, column]
                    memory[row, column] = (memory[row, column] * unit * factor - write) / unit
            cuda.syncthreads()  # the matrix is projected, and C v was read
            if cut > _ZERO:
                for column in range(thread, columns, threads):
                    vectors[_V, column] += vectors[_W, column]
            left, phase = _power_iteration(memory, vectors, _V, steps, unit, scratch, phase)
            if left > bound * _TOLERANCE and thread == 0:
                record_event(errors, SPECTRAL_OVERFLOW, 1, matrix)
        cuda.syncthreads()  # before another matrix takes scratch
