"""Attention that was computed in parts, put together: the partials of chunks of keys, or results with their logarithms.

With m_c, l_c and a_c the maximum, the sum of exponentials and the weighted sum of chunk c, and m the greatest m_c,

    l = sum_c l_c e^(m_c - m),    result = sum_c a_c e^(m_c - m) / l,    lse = m + ln l.

A result o of keys with logarithm z is the partial m = z, l = 1, a = o. docs/flash_decoding.md has more,
kernels/flash_decoding_reduce.py and kernels/flash_merge.py the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from burt_numba.flash_launches import FLASH_DECODE_CHUNK_SIZE, MOST_DIMS, MOST_SIZE
from burt_numba.flash_merging import (
    Beside,
    Merge,
    States,
    launch_sizes,
    lse_argument,
    merge_launches,
    merge_specialisations,
    merge_workspace,
)
from burt_numba.host.arrays import Description
from burt_numba.host.checks import FLOATING, describe, require_count, require_dtype, require_output, require_shape
from burt_numba.host.compiling import KernelSpec, kernel_in
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer
from burt_numba.host.launching import TYPE_CODES, Array
from burt_numba.host.operation import Answer, Operation, Request, Result
from burt_numba.host.plans import (
    MOST_BLOCKS,
    LaunchPlan,
    Plan,
    dimension,
    dtype_itemsize,
    refuse_too_many,
    refuse_unknown,
)
from burt_numba.softmax_launches import StridedRows, length_arguments
from burt_numba.target import DOCUMENTED_FLASH_THREADS
from burt_numba.validation import finite_check_launch

_REDUCE, _MERGE = "flash_decoding_reduce", "merge_attention_states"
_REDUCE_NAMES = ("partials", "seq_lens", "lse_out", "out")
_PARTIALS, _LENGTHS, _LSE, _OUT = range(4)
_MERGE_NAMES = ("outs", "lses", "lse_out", "out")
_OUTS, _LSES = _PARTIALS, _LENGTHS
_WORK = len(_REDUCE_NAMES)


def flash_decoding_reduce(
    partials: Any,
    seq_lens: Any,
    chunk_size: int = FLASH_DECODE_CHUNK_SIZE,
    *,
    lse_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Put the partials of all chunks of a sequence together.

    Parameters
    ----------
    partials : array [M, H, N, D + 2], float32
        Of any family and any strides (of whole elements), with D from 1 to 256. Of each chunk of keys: the D sums of
        e^(s - m) v, then m, the greatest score s, then the sum of e^(s - m). Scores are in nats.
    seq_lens : array [M], int32 or int64
        Keys of each sequence. Its first ceil(length / chunk_size) chunks count; others are not read.
    chunk_size : int
        Keys of a chunk, below 2**31. It has to be that of the call that made the partials, which do not hold it: with
        another one too few or too many of them count, and nothing tells.
    lse_out : array [M, H], float32, optional
        Receives ln of the sum of all exponentials, -inf where no chunk counts.
    out : array [M, H, D], float32, optional
        C-contiguous.
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check in a second pass that the result is finite.

    Returns
    -------
    array [M, H, D]
        ``out``, or a new array of the family of ``partials``. A sequence of which no chunk counts gives zeros. The
        same partials give the same bits, whatever else is in the batch.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape, layout or value out of range.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or infinite. A chunk does not count with a
        maximum that is -1e30 or less, which is no error whatever else is in it, with a NaN or an infinity for a
        maximum or sum, or with a sum that is not above 0. Of those that count such an element is 0. A result that
        overflows is 0 too), 6 (lengths that are negative or of more than N chunks, clamped; the index is the sequence).

    Notes
    -----
    ``flash_decoding_reduce`` of aprender-gpu.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> partials = np.array([[[[3, 5, 3], [0, 4, 1]]]], np.float32)  # 3 keys of value 1, score 5; one of 0 and 4
    >>> burt_numba.flash_decoding_reduce(partials, np.array([2]), chunk_size=1).round(4)
    array([[[0.8908]]], dtype=float32)
    """
    chunk_size = require_chunk_size(_REDUCE, chunk_size)
    return _REDUCE_OPERATION((partials, seq_lens, lse_out, out), (), (chunk_size,), stream, errors, validate_output)


def merge_attention_states(
    outs: Any,
    lses: Any,
    *,
    lse_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Put together the results of attention to N parts of the keys.

    Parameters
    ----------
    outs : array [N, ..., D], float32 or float16
        Of any family and any strides (of whole elements), with D from 1 to 256.
    lses : array [N, ...], float32
        The natural logarithms of the sums of exponentials, as ``lse_out`` of the functions has them; -inf for no keys.
    lse_out : array [...], float32, optional
        Receives the logarithm for all parts.
    out : array [..., D] of the type of ``outs``, optional
        C-contiguous.
    stream, errors, validate_output
        As for `flash_decoding_reduce`.

    Returns
    -------
    array [..., D]
        ``out``, or a new array of the family of ``outs``. Zeros where no part has a key.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape or layout out of range.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or infinite. A part with an lse of -inf does
        not count, whatever else is in it; nor does one with another lse that is not finite, which is reported. Of those
        that count an element that is not finite is 0).

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> outs, lses = np.array([[[1]], [[0]]], np.float32), np.log(np.array([[3], [1]], np.float32))
    >>> burt_numba.merge_attention_states(outs, lses)
    array([[0.75]], dtype=float32)
    """
    return _MERGE_OPERATION((outs, lses, lse_out, out), (), (), stream, errors, validate_output)


def require_chunk_size(function: str, chunk_size: Any) -> int:
    """A number of keys that kernels count to."""
    size = require_count(function, "chunk_size", chunk_size, 1)
    if size >= 2**31:
        raise BurtDimensionError(f"{function}: chunk_size: expected less than 2**31, got {size}")
    return size


def require_lengths(function: str, array: Description | None, samples: int) -> None:
    """The lengths of the sequences of a batch."""
    if array is None:
        describe(function, "seq_lens", None)
    assert array is not None
    require_dtype(function, "seq_lens", array, ("int32", "int64"))
    require_shape(function, "seq_lens", array, (samples,))


def lengths_beside(function: str, operand: int, array: Description | None, samples: int) -> Beside:
    """The lengths as merging kernels are given them, for rows [M, H]."""
    argument, origin, stride, words = length_arguments(function, "seq_lens", operand, array, samples)
    return Beside(argument, origin.value, (stride.value, 0), words.value)


# --- launches -----------------------------------------------------------------------------------------------------


def _answer_reduce(request: Request) -> Answer:
    (chunk_size,) = request.options
    partials, lengths, lse_out, out = request.operands
    if partials is None:
        describe(_REDUCE, "partials", None)
    assert partials is not None
    require_dtype(_REDUCE, "partials", partials, ("float32",))
    if len(partials.shape) != 4:
        raise BurtDimensionError(
            f"{_REDUCE}: partials: expected 4 dimensions [M, H, max_chunks, D + 2], got {partials}"
        )
    batch, heads, chunks, row_cells = partials.shape
    dims = row_cells - 2
    if not 1 <= dims <= MOST_DIMS:
        raise BurtDimensionError(
            f"{_REDUCE}: partials: expected D + 2 from 3 to {MOST_DIMS + 2} (last axis), got {partials}"
        )
    require_lengths(_REDUCE, lengths, batch)
    for what, size in (("M H", batch * heads), ("max_chunks", chunks)):
        if size > MOST_SIZE:
            raise BurtDimensionError(f"{_REDUCE}: partials: expected {what} of at most 2**30, got {size}")
    result = Result((batch, heads, dims), "float32")
    _check_outputs(_REDUCE, lse_out, out, result)
    merge = Merge((batch, heads), dims, heads, chunks, chunk_size)
    if merge.rows == 0:
        return Answer((), [result])
    place = StridedRows.of(_REDUCE, "partials", _PARTIALS, partials, partials.shape)
    strides = place.leading_strides
    beside = lengths_beside(_REDUCE, _LENGTHS, lengths, batch)
    states = States(
        place.argument, place.origin, strides[:2], strides[2], place.column_stride, beside, chunks, are_results=False
    )
    return _answer(request, merge, states, result)


def _answer_merge(request: Request) -> Answer:
    outs, lses, lse_out, out = request.operands
    if outs is None:
        describe(_MERGE, "outs", None)
    assert outs is not None
    require_dtype(_MERGE, "outs", outs, FLOATING)
    if len(outs.shape) < 2:
        raise BurtDimensionError(f"{_MERGE}: outs: expected at least 2 dimensions [N, ..., D], got {outs}")
    count, *shape, dims = outs.shape
    if not 1 <= dims <= MOST_DIMS:
        raise BurtDimensionError(f"{_MERGE}: outs: expected D from 1 to {MOST_DIMS} (last axis), got {outs}")
    if lses is None:
        describe(_MERGE, "lses", None)
    assert lses is not None
    require_dtype(_MERGE, "lses", lses, ("float32",))
    require_shape(_MERGE, "lses", lses, outs.shape[:-1])
    if count > MOST_SIZE:
        raise BurtDimensionError(f"{_MERGE}: outs: expected N of at most 2**30, got {outs}")
    result = Result((*shape, dims), outs.dtype)
    _check_outputs(_MERGE, lse_out, out, result)
    merge = Merge(tuple(shape), dims)
    if merge.rows == 0:
        return Answer((), [result])
    place = StridedRows.of(_MERGE, "outs", _OUTS, outs, outs.shape)
    lse_place = StridedRows.of(_MERGE, "lses", _LSES, lses, (*lses.shape, 1))
    beside = Beside(lse_place.argument, lse_place.origin, lse_place.leading_strides[1:], lse_place.leading_strides[0])
    strides = place.leading_strides
    states = States(
        place.argument, place.origin, strides[1:], strides[0], place.column_stride, beside, count, True, -math.inf
    )
    return _answer(request, merge, states, result)


def _check_outputs(function: str, lse_out: Description | None, out: Description | None, result: Result) -> None:
    if lse_out is not None:
        require_output(function, "lse_out", lse_out, result.shape[:-1], "float32")
    if out is not None:
        require_output(function, "out", out, *result)


def _answer(request: Request, merge: Merge, states: States, result: Result) -> Answer:
    dtype = TYPE_CODES[result.dtype]
    output = Array(_OUT, dtype, (merge.rows * merge.dims,))
    lse = lse_argument(_LSE, request.operands[_LSE], merge.rows)
    launches = list(merge_launches(merge, states, request.aligned, output, lse, _WORK))
    if request.validate:
        launches.append(finite_check_launch(_OUT, dtype, 1, merge.rows, merge.dims))
    workspace = merge_workspace(merge, states.count)
    return Answer(launches, [result], (workspace,) if workspace else ())


_REDUCE_OPERATION = Operation(_REDUCE, _REDUCE_NAMES, ("lse_out", "out"), ("partials",), _answer_reduce)
_MERGE_OPERATION = Operation(_MERGE, _MERGE_NAMES, ("lse_out", "out"), ("outs",), _answer_merge)


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the functions can launch, and the documented one, with their argument types."""
    yield from merge_specialisations()
    documented = KernelSpec(_REDUCE, kernel_in(_REDUCE, f"{_REDUCE}_kernel"), (), (DOCUMENTED_FLASH_THREADS, 1))
    for lengths in ("i4", "i8"):
        yield documented, ("f4:4C", "f4:3C", f"{lengths}:1C", "i8", "i8", "f4:1C", "i8:1C")


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(batch: int, heads: int, chunks: int, dims: int) -> int:
    """The fewest bytes a call moves where all chunks count: partials read once, the result written once."""
    return 4 * batch * heads * (chunks * (dims + 2) + dims)


def flops(batch: int, heads: int, chunks: int, dims: int) -> int:
    """Arithmetic of a call."""
    return 2 * batch * heads * chunks * (dims + 1)


def merge_bytes_moved(states: int, rows: int, dims: int, itemsize: int) -> int:
    """The fewest bytes that `merge_attention_states` moves where all parts count."""
    return rows * (states * (dims * itemsize + 4) + dims * itemsize)


def merge_launch_plans(merge: Merge, states: int, are_results: bool = False) -> list[LaunchPlan]:
    """The launches of `flash_merging.merge_launches`."""
    return [
        LaunchPlan("flash_merge_kernel", (blocks,), threads, shared_bytes)
        for blocks, threads, shared_bytes in launch_sizes(merge, states, are_results)
    ]


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches of `flash_decoding_reduce` for contiguous, aligned arrays."""
    batch = dimension(_REDUCE, dims, "batch_size")
    heads = dimension(_REDUCE, dims, "num_heads")
    chunks = dimension(_REDUCE, dims, "max_chunks")
    head_dim = dimension(_REDUCE, dims, "d_head", lowest=1)
    refuse_unknown(_REDUCE, dims)
    refuse_large_dims(_REDUCE, head_dim)
    for what, size in (("batch_size * num_heads", batch * heads), ("max_chunks", chunks)):
        if size > MOST_SIZE:
            raise BurtDimensionError(f"plan: {_REDUCE}: {what}: expected at most 2**30, got {size}")
    merge = Merge((batch, heads), head_dim, heads, chunks)
    documented = LaunchPlan(f"{_REDUCE}_kernel", (min(heads, MOST_BLOCKS), min(batch, 65535)), 32, 0)
    launches = merge_launch_plans(merge, chunks) if merge.rows else []
    output = 4 * merge.rows * head_dim
    moved = bytes_moved(batch, heads, chunks, head_dim)
    return Plan(_REDUCE, documented, moved - output, output, merge_workspace(merge, chunks), launches)


def plan_merge(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches of `merge_attention_states` for contiguous, aligned arrays."""
    states = dimension(_MERGE, dims, "num_states")
    rows = dimension(_MERGE, dims, "batch_size")
    head_dim = dimension(_MERGE, dims, "d_head", lowest=1)
    itemsize = dtype_itemsize(_MERGE, dims)
    refuse_unknown(_MERGE, dims)
    refuse_large_dims(_MERGE, head_dim)
    refuse_too_many(_MERGE, rows)
    if states > MOST_SIZE:
        raise BurtDimensionError(f"plan: {_MERGE}: num_states: expected at most 2**30, got {states}")
    merge = Merge((rows,), head_dim)
    launches = merge_launch_plans(merge, states, are_results=True) if rows else []
    output = rows * head_dim * itemsize
    moved = merge_bytes_moved(states, rows, head_dim, itemsize)
    return Plan(_MERGE, None, moved - output, output, merge_workspace(merge, states), launches)


def refuse_large_dims(name: str, dims: int) -> None:
    """Raise for more elements of a vector than kernels take."""
    if dims > MOST_DIMS:
        raise BurtDimensionError(f"plan: {name}: d_head: expected at most {MOST_DIMS}, got {dims}")


__all__ = [
    "bytes_moved",
    "flash_decoding_reduce",
    "flops",
    "merge_attention_states",
    "merge_bytes_moved",
    "plan",
    "plan_merge",
    "specialisations",
]
