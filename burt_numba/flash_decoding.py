"""Attention of one query a head to a long cache, in chunks of keys that the whole device works on.

For each query q, with scores s_j = q . k_j scale over the keys of its sequence and m the greatest of them, the result
is sum_j e^(s_j - m) v_j / sum_j e^(s_j - m). A first launch leaves both sums of each chunk, relative to its own m; a
second puts them together (flash_decoding_reduce.py). docs/flash_decoding.md has more, kernels/flash_chunk.py the
kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from burt_numba.flash_decoding_reduce import (
    lengths_beside,
    merge_launch_plans,
    refuse_large_dims,
    require_chunk_size,
    require_lengths,
)
from burt_numba.flash_launches import (
    FLASH_DECODE_CHUNK_SIZE,
    LEAST_VALUE_LANES,
    MOST_DIMS,
    MOST_GROUP,
    MOST_SIZE,
    ChunkShape,
    DecodeSizes,
    choose_chunk_size,
    chunk_kernel_spec,
    value_pieces,
)
from burt_numba.flash_merging import Merge, States, lse_argument, merge_launches, merge_workspace
from burt_numba.host.checks import FLOATING, describe, require_dtype, require_number, require_output, require_shape
from burt_numba.host.compiling import KernelSpec, compute_capability, multiprocessors
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer
from burt_numba.host.launching import TYPE_CODES, Array, CallNumber, Errors, Launch, Number, bare
from burt_numba.host.operation import Answer, Operation, Request, Result
from burt_numba.host.plans import MOST_BLOCKS, LaunchPlan, Plan, dimension, dtype_itemsize, refuse_unknown
from burt_numba.softmax_launches import StridedRows, length_arguments, vector_columns
from burt_numba.validation import finite_check_launch

_DECODE, _CHUNK = "flash_decoding", "flash_decoding_chunk"
_DECODE_NAMES = ("query", "k_cache", "v_cache", "seq_lens", "lse_out", "out")
_CHUNK_NAMES = ("query", "k_cache", "v_cache", "seq_lens", "out")
_QUERY, _KEYS, _VALUES, _LENGTHS, _LSE = range(5)
_SCALE = 0


def flash_decoding_chunk(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    seq_lens: Any,
    chunk_size: int = FLASH_DECODE_CHUNK_SIZE,
    scale: float | None = None,
    *,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """The partials of all chunks of a cache, for `flash_decoding_reduce`.

    Parameters
    ----------
    query : array [M, H, D], float32 or float16
        Of any family and any strides (of whole elements), with D from 1 to 256.
    k_cache, v_cache : array [M, Hk, S, D] of the type of ``query``
        H is a multiple of Hk: head h of the queries attends to head h // (H // Hk) of the caches.
    seq_lens : array [M], int32 or int64
        Keys of each sequence; those at or past its length are not read.
    chunk_size : int
        Keys of a chunk, below 2**31. `flash_decoding_reduce` has to be given the same one: partials do not hold it.
    scale : float, optional
        What the dot products are multiplied by: 1 / sqrt(D) by default; any finite number.
    out : array [M, H, N, D + 2], float32, optional
        C-contiguous, with N = ceil(S / chunk_size).
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check in a second pass that the partials are finite.

    Returns
    -------
    array [M, H, N, D + 2]
        ``out``, or a new array of the family of ``query``: of each chunk the sum of e^(s - m) v, then the greatest
        score m, then the sum of e^(s - m). Of a chunk without keys 0, the lowest float32 number, 0.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape, layout or value out of range.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or infinite, -inf as well; they count as 0.
        Each of the queries and of the present keys and values is counted once. Scores, and sums of values, that
        overflow float32 count as 0 too), 6 (lengths outside [0, S], clamped; the index is the sequence).

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> keys = np.array([[[[3], [2], [1]]]], np.float32)
    >>> burt_numba.flash_decoding_chunk(np.ones((1, 1, 1), np.float32), keys, keys, np.array([3]), 2).round(4)
    array([[[[3.7358, 3.    , 1.3679],
             [1.    , 1.    , 1.    ]]]], dtype=float32)
    """
    chunk_size = require_chunk_size(_CHUNK, chunk_size)
    operands = (query, k_cache, v_cache, seq_lens, out)
    numbers = _scale_numbers(_CHUNK, scale)
    return _CHUNK_OPERATION(operands, numbers, (chunk_size, scale is None), stream, errors, validate_output)


def flash_decoding(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    seq_lens: Any,
    scale: float | None = None,
    *,
    chunk_size: int | None = None,
    lse_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Attention of one query a head to the keys of its sequence in a cache.

    Parameters
    ----------
    query, k_cache, v_cache, seq_lens, scale
        As for `flash_decoding_chunk`.
    chunk_size : int, optional
        Keys that are added up together. Given, a sequence has the same result, to the bit, whatever else is in the
        batch. Default: one for which there is work for the whole device.
    lse_out : array [M, H], float32, optional
        Receives ln sum_j e^(s_j), -inf for a sequence without a key.
    out : array [M, H, D] of the type of ``query``, optional
        C-contiguous; may be ``query`` itself.
    stream, errors
        As for `flash_decoding_chunk`.
    validate_output : bool
        Check in a second pass that the result is finite.

    Returns
    -------
    array [M, H, D]
        ``out``, or a new array of the family of ``query``. A sequence without a key gives zeros.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape, layout or value out of range.

    Warns
    -----
    BurtWarning
        As by `flash_decoding_chunk`. Scores of -1e30 and less count as absent where a chunk has no other.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> keys = np.array([[[[3], [2], [1]]]], np.float32)
    >>> burt_numba.flash_decoding(np.ones((1, 1, 1), np.float32), keys, keys, np.array([3])).round(4)
    array([[[2.5752]]], dtype=float32)
    """
    if chunk_size is not None:
        chunk_size = require_chunk_size(_DECODE, chunk_size)
    operands = (query, k_cache, v_cache, seq_lens, lse_out, out)
    numbers = _scale_numbers(_DECODE, scale)
    return _DECODE_OPERATION(operands, numbers, (chunk_size, scale is None), stream, errors, validate_output)


_DEFAULT_SCALE = (0.0,)
"""Each kind of call has its own."""


def _scale_numbers(function: str, scale: Any) -> tuple[float, ...]:
    if scale is None:
        return _DEFAULT_SCALE
    factor = require_number(function, "scale", scale, -math.inf)
    if not abs(factor) <= float(np.finfo(np.float32).max):
        raise BurtDimensionError(f"{function}: scale: expected a finite float32 number, got {scale!r}")
    return (factor,)


# --- launches -----------------------------------------------------------------------------------------------------


class _Outputs(NamedTuple):
    """Where the first launch leaves what: partials, or the result and its logarithm."""

    partials: Array
    output: Array
    lse: Array
    fills: bool
    """Chunks without keys are written too."""


def _check(function: str, request: Request) -> DecodeSizes:
    names = _DECODE_NAMES
    query, keys, values, lengths = request.operands[:_LSE]
    for place, axes in ((_QUERY, "[M, H, D]"), (_KEYS, "[M, Hk, S, D]"), (_VALUES, "[M, Hk, S, D]")):
        array = request.operands[place]
        if array is None:
            describe(function, names[place], None)
        assert array is not None and query is not None
        require_dtype(function, names[place], array, (query.dtype,) if query.dtype in FLOATING else FLOATING)
        wanted = axes.count(",") + 1
        if len(array.shape) != wanted:
            raise BurtDimensionError(f"{function}: {names[place]}: expected {wanted} dimensions {axes}, got {array}")
    assert query is not None and keys is not None and values is not None
    batch, heads, dims = query.shape
    key_heads, cache_size = keys.shape[1:3]
    if not 1 <= dims <= MOST_DIMS:
        raise BurtDimensionError(f"{function}: query: expected D from 1 to {MOST_DIMS} (last axis), got {query}")
    require_shape(function, "k_cache", keys, (batch, key_heads, cache_size, dims))
    if heads % key_heads if key_heads else heads:
        raise BurtDimensionError(
            f"{function}: k_cache: expected heads (axis 1) that divide the {heads} of the queries, got {keys}"
        )
    require_shape(function, "v_cache", values, keys.shape)
    require_lengths(function, lengths, batch)
    for name, what, size in (("query", "M H", batch * heads), ("k_cache", "S", cache_size)):
        if size > MOST_SIZE:
            raise BurtDimensionError(f"{function}: {name}: expected {what} of at most 2**30, got {size}")
    return DecodeSizes(batch, heads, key_heads, cache_size, dims)


def _value_lanes_shift(dims: int, itemsize: int) -> int:
    """Of the lanes that share a value, the base-2 logarithm."""
    pieces = -(-dims * itemsize // 16)
    return min(max((pieces - 1).bit_length(), (LEAST_VALUE_LANES - 1).bit_length()), 5)


def _row_ranges(sizes: DecodeSizes, chunk_blocks: int) -> Iterator[tuple[int, int]]:
    """(first, count) of those rows of blocks that a launch takes, ``chunk_blocks`` blocks each."""
    most_rows = max(MOST_BLOCKS // chunk_blocks, 1)
    for first_row in range(0, sizes.block_rows, most_rows):
        yield first_row, min(most_rows, sizes.block_rows - first_row)


def _chunk_launches(
    function: str, request: Request, sizes: DecodeSizes, chunk_size: int, default_scale: bool, outputs: _Outputs
) -> Iterator[Launch]:
    query = request.operands[_QUERY]
    assert query is not None
    vectors = []
    for place in (_QUERY, _KEYS, _VALUES):
        array = request.operands[place]
        assert array is not None
        vectors.append(StridedRows.of(function, _DECODE_NAMES[place], place, array, array.shape))
    vector = vector_columns(request.aligned, sizes.dims, query.dtype, vectors[_KEYS:])
    dtype = TYPE_CODES[query.dtype]
    capability = compute_capability(request.device)
    shape = ChunkShape.of(sizes, query.itemsize, chunk_size, capability)
    kernel = chunk_kernel_spec(vector, dtype, sizes.block_heads, value_pieces(sizes.dims, query.itemsize))
    chunks = max(-(-sizes.keys // chunk_size), 1)
    chunk_blocks = -(-chunks // shape.teams)
    lengths = length_arguments(function, "seq_lens", _LENGTHS, request.operands[_LENGTHS], sizes.batch)
    for first_row, rows in _row_ranges(sizes, chunk_blocks):
        arguments = (
            *(each.argument for each in vectors),
            outputs.partials,
            outputs.output,
            outputs.lse,
            Number(first_row, "i4"),
            Number(sizes.key_heads, "i4"),
            Number(sizes.group, "i4"),
            Number(-(-sizes.group // sizes.block_heads), "i4"),
            Number(sizes.keys, "i4"),
            Number(sizes.dims, "i4"),
            Number(chunk_size, "i4"),
            Number(chunks, "i4"),
            Number(chunk_blocks, "i4"),
            Number(shape.team.bit_length() - 1, "i4"),
            Number(_value_lanes_shift(sizes.dims, query.itemsize), "i4"),
            Number(shape.alternates, "i4"),
            Number(outputs.fills, "i4"),
            *(number for each in vectors for number in each.place),
            Number(1.0 / math.sqrt(sizes.dims), "f4") if default_scale else CallNumber(_SCALE, "f4"),
            *lengths,
            Errors(),
        )
        yield Launch(kernel, (rows * chunk_blocks, 1), 32 * shape.warps, bare(arguments), shape.shared_bytes)


def _answer_chunk(request: Request) -> Answer:
    chunk_size, default_scale = request.options
    sizes = _check(_CHUNK, request)
    out = request.operands[_LSE]
    chunks = -(-sizes.keys // chunk_size)
    result = Result((sizes.batch, sizes.heads, chunks, sizes.dims + 2), "float32")
    if out is not None:
        require_output(_CHUNK, "out", out, *result)
    if sizes.rows == 0 or chunks == 0:
        return Answer((), [result])
    query = request.operands[_QUERY]
    assert query is not None
    partials = Array(_LSE, "f4", (sizes.rows * chunks * (sizes.dims + 2),))
    outputs = _Outputs(partials, Array(None, TYPE_CODES[query.dtype]), Array(None, "f4"), fills=True)
    launches = list(_chunk_launches(_CHUNK, request, sizes, min(chunk_size, sizes.keys), default_scale, outputs))
    if request.validate:
        launches.append(finite_check_launch(_LSE, "f4", 1, sizes.rows * chunks, sizes.dims + 2))
    return Answer(launches, [result])


def _answer_decode(request: Request) -> Answer:
    chunk_size, default_scale = request.options
    sizes = _check(_DECODE, request)
    query, _keys, _values, lengths, lse_out, out = request.operands
    assert query is not None
    result = Result(query.shape, query.dtype)
    if lse_out is not None:
        require_output(_DECODE, "lse_out", lse_out, query.shape[:-1], "float32")
    if out is not None:
        require_output(_DECODE, "out", out, *result)
    if sizes.rows == 0:
        return Answer((), [result])
    if chunk_size is None:
        capability, processors = compute_capability(request.device), multiprocessors(request.device)
        chunk_size = choose_chunk_size(sizes, query.itemsize, capability, processors)
    chunk_size = min(chunk_size, max(sizes.keys, 1))
    chunks = -(-sizes.keys // chunk_size)
    place, work = len(_DECODE_NAMES) - 1, len(_DECODE_NAMES)
    dtype = TYPE_CODES[query.dtype]
    output = Array(place, dtype, (sizes.rows * sizes.dims,))
    lse = lse_argument(_LSE, lse_out, sizes.rows)
    needed = 0
    if chunks <= 1:
        direct = _Outputs(Array(None, "f4"), output, lse, fills=True)
        launches = list(_chunk_launches(_DECODE, request, sizes, chunk_size, default_scale, direct))
    else:
        row_cells = sizes.dims + 2
        partials = Array(work, "f4", (sizes.rows * chunks * row_cells,))
        left = _Outputs(partials, Array(None, dtype), Array(None, "f4"), fills=False)
        launches = list(_chunk_launches(_DECODE, request, sizes, chunk_size, default_scale, left))
        # The launch before reports lengths.
        merge = Merge((sizes.batch, sizes.heads), sizes.dims, sizes.heads, chunks, chunk_size, reports_lengths=False)
        beside = lengths_beside(_DECODE, _LENGTHS, lengths, sizes.batch)
        strides = (sizes.heads * chunks * row_cells, chunks * row_cells)
        states = States(partials, 0, strides, row_cells, 1, beside, chunks, are_results=False)
        needed = 4 * sizes.rows * chunks * row_cells
        launches += merge_launches(merge, states, True, output, lse, work, needed, follows=True)
        needed += merge_workspace(merge, chunks)
    if request.validate:
        launches.append(finite_check_launch(place, dtype, 1, sizes.rows, sizes.dims))
    return Answer(launches, [result], (needed,) if needed else ())


_CHUNK_OPERATION = Operation(_CHUNK, _CHUNK_NAMES, ("out",), ("k_cache", "v_cache"), _answer_chunk)
_DECODE_OPERATION = Operation(_DECODE, _DECODE_NAMES, ("lse_out", "out"), ("k_cache", "v_cache"), _answer_decode)


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the functions can launch besides those that merge, with their argument types."""
    for (dtype, widest), heads in itertools.product((("f4", 4), ("f2", 8)), (1, 2, MOST_GROUP)):
        operands = (*(f"{dtype}*",) * 3, "f4*", f"{dtype}*", "f4*")
        lengths = ("i4*", "i8", "i8", "i4")
        types = (*operands, *("i4",) * 13, *("i8",) * 14, "f4", *lengths, "i8:1C")
        for vector, pieces in itertools.product((widest, 1), (1,) if dtype == "f2" else (1, 2)):
            yield chunk_kernel_spec(vector, dtype, heads, pieces), types


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(batch: int, heads: int, keys: int, dims: int, itemsize: int, key_heads: int | None = None) -> int:
    """The fewest bytes that `flash_decoding` moves where all caches are full: keys and values read once."""
    vectors = 2 * heads + 2 * (heads if key_heads is None else key_heads) * keys
    return batch * vectors * dims * itemsize


def flops(batch: int, heads: int, keys: int, dims: int) -> int:
    """Arithmetic of a call: both products."""
    return 4 * batch * heads * keys * dims


_MULTIPROCESSORS = 132
"""Of the device that a plan is for, where nothing else is said: an H100 or H200."""


def _planned_sizes(name: str, dims: dict[str, Any]) -> DecodeSizes:
    batch = dimension(name, dims, "batch_size")
    heads = dimension(name, dims, "num_heads")
    sizes = DecodeSizes(
        batch,
        heads,
        dimension(name, dims, "key_heads", default=heads),
        dimension(name, dims, "seq_len"),
        dimension(name, dims, "d_head", lowest=1),
    )
    refuse_large_dims(name, sizes.dims)
    if sizes.heads % sizes.key_heads if sizes.key_heads else sizes.heads:
        raise BurtDimensionError(f"plan: {name}: key_heads: expected a divisor of {heads}, got {sizes.key_heads}")
    for what, size in (("batch_size * num_heads", batch * heads), ("seq_len", sizes.keys)):
        if size > MOST_SIZE:
            raise BurtDimensionError(f"plan: {name}: {what}: expected at most 2**30, got {size}")
    return sizes


def _chunk_plans(
    sizes: DecodeSizes, itemsize: int, chunk_size: int, capability: tuple[int, int]
) -> Iterator[LaunchPlan]:
    shape = ChunkShape.of(sizes, itemsize, chunk_size, capability)
    chunk_blocks = -(-max(-(-sizes.keys // chunk_size), 1) // shape.teams)
    for _first_row, rows in _row_ranges(sizes, chunk_blocks):
        yield LaunchPlan("flash_chunk_kernel", (rows * chunk_blocks,), 32 * shape.warps, shape.shared_bytes)


def plan_chunk(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launch of `flash_decoding_chunk` for contiguous, aligned arrays."""
    chunk_size = require_chunk_size(f"plan: {_CHUNK}", dims.pop("chunk_size", FLASH_DECODE_CHUNK_SIZE))
    sizes = _planned_sizes(_CHUNK, dims)
    itemsize = dtype_itemsize(_CHUNK, dims)
    refuse_unknown(_CHUNK, dims)
    chunks = -(-sizes.keys // chunk_size)
    output = 4 * sizes.rows * chunks * (sizes.dims + 2)
    launches: list[LaunchPlan] = []
    if output:
        launches += _chunk_plans(sizes, itemsize, min(chunk_size, sizes.keys), compute_capability)
    read = bytes_moved(*sizes[:2], sizes.keys, sizes.dims, itemsize, sizes.key_heads)
    return Plan(_CHUNK, None, read - sizes.rows * sizes.dims * itemsize, output, 0, launches)


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches of `flash_decoding` for contiguous, aligned arrays."""
    chunk_size = dims.pop("chunk_size", None)
    processors = dimension(_DECODE, dims, "multiprocessors", lowest=1, default=_MULTIPROCESSORS)
    sizes = _planned_sizes(_DECODE, dims)
    itemsize = dtype_itemsize(_DECODE, dims)
    refuse_unknown(_DECODE, dims)
    if chunk_size is None:
        chunk_size = choose_chunk_size(sizes, itemsize, compute_capability, processors)
    chunk_size = min(require_chunk_size(f"plan: {_DECODE}", chunk_size), max(sizes.keys, 1))
    chunks = -(-sizes.keys // chunk_size)
    launches: list[LaunchPlan] = []
    temporary = 0
    if sizes.rows:
        launches += _chunk_plans(sizes, itemsize, chunk_size, compute_capability)
        if chunks > 1:
            merge = Merge((sizes.batch, sizes.heads), sizes.dims, sizes.heads, chunks, chunk_size)
            launches += merge_launch_plans(merge, chunks)
            temporary = 4 * sizes.rows * chunks * (sizes.dims + 2) + merge_workspace(merge, chunks)
    output = sizes.rows * sizes.dims * itemsize
    moved = bytes_moved(*sizes[:2], sizes.keys, sizes.dims, itemsize, sizes.key_heads)
    return Plan(_DECODE, None, moved - output, output, temporary, launches)


__all__ = [
    "bytes_moved",
    "flash_decoding",
    "flash_decoding_chunk",
    "flops",
    "plan",
    "plan_chunk",
    "specialisations",
]
