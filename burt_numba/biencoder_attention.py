"""Attention of queries to retrieved contexts, with an upper bound on the entropy of each query's weights.

For each query q, p = softmax(q . k_j scale / T) over its contexts j, with the largest T up to 1 at which
H(p) = -sum p ln p <= entropy_bound, and the result sum_j p_j v_j. docs/biencoder_attention.md has the derivation,
kernels/biencoder_attention.py, biencoder_rows.py, biencoder_few.py and biencoder_tiles.py the kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from burt_numba.biencoder_launches import (
    EXACT,
    HALF,
    LARGEST_TILES_SCALE,
    MOST_DIMS,
    ROUNDED,
    ROWS_ONLY,
    Choice,
    DocumentedTiles,
    Sizes,
    choose,
    few_kernel_spec,
    rows_kernel_spec,
    tiles_chunks,
    tiles_kernel_spec,
)
from burt_numba.host.arrays import family_of
from burt_numba.host.checks import FLOATING, describe, require_dtype, require_number, require_output, require_shape
from burt_numba.host.compiling import KernelSpec, compute_capability, kernel_in
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer
from burt_numba.host.launching import TYPE_CODES, Array, CallNumber, Errors, Launch, Number
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
from burt_numba.host.rows import MOST_ROWS
from burt_numba.softmax_launches import StridedRows, column_arguments, length_arguments, vector_columns
from burt_numba.target import DOCUMENTED_BIENCODER_THREADS, MAX_CLUSTER_BLOCKS
from burt_numba.temperatures import require_search_parameters
from burt_numba.validation import finite_check_launch

_NAME = "biencoder_attention"
_NAMES = (
    "query",
    "context_keys",
    "context_values",
    "entropy_bound",
    "context_lengths",
    "temperature_out",
    "entropy_out",
    "lse_out",
    "out",
)
_QUERY, _KEYS, _VALUES, _BOUNDS, _LENGTHS, _TEMPERATURE, _ENTROPY, _LSE, _OUT = range(9)
_SCALE, _ENTROPY_BOUND, _TEMPERATURE_MIN, _TEMPERATURE_MAX, _MAX_ITERATIONS = range(5)
_PRECISIONS = ("fp32", "tf32")
_MOST_SIZE = 1 << 30
"""Of heads of all samples, queries and contexts: kernels count them with 32 bits."""


def biencoder_attention(
    query: Any,
    context_keys: Any,
    context_values: Any,
    scale: float | None = None,
    entropy_bound: Any = 0.20,
    temperature_min: float = 0.01,
    temperature_max: float = 10.0,
    max_iterations: int = 20,
    *,
    context_lengths: Any = None,
    precision: str = "fp32",
    temperature_out: Any = None,
    entropy_out: Any = None,
    lse_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Attention to the contexts that were retrieved for each sample, with weights of bounded entropy.

    The weights of a query are those of `constrained_softmax` of its scores, the dot products with the keys times
    ``scale``; the result is the sum of the values, weighted. No array of all scores is ever made.

    Parameters
    ----------
    query : array [B, H, Q, D], float32 or float16
        Of any family and any strides (of whole elements), with D from 1 to 256.
    context_keys, context_values : array [B, Hk, K, D] of the type of ``query``
        H is a multiple of Hk: head h of the queries attends to head h // (H // Hk) of the contexts.
    scale : float, optional
        1 / sqrt(D) by default; any finite number.
    entropy_bound : float or array [H], float32, or None
        Nats; one for all heads (a number, or an array of no axes), or one a head. None: no bound, plain attention.
    temperature_min, temperature_max, max_iterations
        As for `constrained_softmax`.
    context_lengths : array [B], int32 or int64, optional
        Contexts of a sample at or past its length are absent, and not read.
    precision : {"fp32", "tf32"}
        How precisely float32 arrays are multiplied: as float32, or with 10 bits after the point, which is faster where
        there are tensor cores. Products of float16 numbers are exact either way.
    temperature_out, entropy_out : array [B, H, Q], float32, optional
        Receive T and the entropy of the weights of each query.
    lse_out : array [B, H, Q], float32, optional
        Only without a bound: receives ln sum_j exp(score_j / T0), -inf for a query without a context.
    out : array [B, H, Q, D] of the type of ``query``, optional
        C-contiguous; may be ``query`` itself.
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check in a second pass that the result is finite. (Its rows are sums of values: they show no entropy.)

    Returns
    -------
    array [B, H, Q, D]
        ``out``, or a new array of the family of ``query``. A query without a context gives zeros (T as at the start,
        entropy 0). An empty B, H or Q gives an empty result.

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
        Each of the queries and of the present keys is counted once, those of values for each query, or tile of
        queries, that read them; values of contexts with a weight below 2**-40 need not be read. Scores that overflow
        float32 count as 0 too), 3 (queries above the bound even at ``temperature_min``: ties at the top), 6 (bounds of
        heads that are NaN or negative, taken as 0; lengths outside [0, K], clamped).

    Notes
    -----
    ``biencoder_attention`` of the BURT-IMMA kernel API.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> query = np.array([[[[1, 0]]]], np.float32)
    >>> keys = np.array([[[[3, 0], [2, 5], [1, 0]]]], np.float32)
    >>> values = np.array([[[[1, 0], [0, 1], [0, 0]]]], np.float32)
    >>> burt_numba.biencoder_attention(query, keys, values, scale=1.0).round(2)
    array([[[[0.95, 0.05]]]], dtype=float32)
    """
    if lse_out is not None and entropy_bound is not None:
        raise BurtDimensionError(f"{_NAME}: lse_out: expected entropy_bound=None with it, got {entropy_bound!r:.60}")
    bounds = None
    if entropy_bound is None:
        entropy_bound = math.inf
    elif not isinstance(entropy_bound, (float, int)) and family_of(entropy_bound) is not None:
        bounds, entropy_bound = entropy_bound, 0.0
    try:
        numbers = _known_numbers.get((scale, entropy_bound, temperature_min, temperature_max, max_iterations))
    except TypeError:  # not hashable: not a number either
        numbers = None
    if numbers is None:
        numbers = _check_numbers(scale, entropy_bound, temperature_min, temperature_max, max_iterations)
    if precision not in _PRECISIONS:
        raise BurtDimensionError(f"{_NAME}: precision: expected {' or '.join(_PRECISIONS)}, got {precision!r:.60}")
    if abs(numbers[0]) > LARGEST_TILES_SCALE:
        precision = ROWS_ONLY
    operands = (
        query, context_keys, context_values, bounds, context_lengths, temperature_out, entropy_out, lse_out, out,
    )  # fmt: skip
    return _OPERATION(operands, numbers, (precision, scale is None), stream, errors, validate_output)


_known_numbers: dict[Any, tuple[float, ...]] = {}
"""Parameters that were checked before, by their values; a training run that lowers its bound fills it slowly."""
_MOST_KNOWN_NUMBERS = 1024


def _check_numbers(
    scale: Any, entropy_bound: Any, temperature_min: Any, temperature_max: Any, max_iterations: Any
) -> tuple[float, ...]:
    factor = 0.0 if scale is None else require_number(_NAME, "scale", scale, -math.inf)
    if not abs(factor) <= float(np.finfo(np.float32).max):
        raise BurtDimensionError(f"{_NAME}: scale: expected a finite float32 number, got {scale!r}")
    search = require_search_parameters(_NAME, entropy_bound, temperature_min, temperature_max, max_iterations)
    numbers = (factor, *search)
    given = scale, entropy_bound, temperature_min, temperature_max, max_iterations
    # A tensor of one element is a number too, but may hold another one the next time.
    if all(value is None or isinstance(value, (float, int, np.generic)) for value in given):
        if len(_known_numbers) >= _MOST_KNOWN_NUMBERS:
            _known_numbers.clear()
        _known_numbers[given] = numbers
    return numbers


# --- launches -----------------------------------------------------------------------------------------------------


def _check(request: Request) -> Sizes:
    query, keys, values = request.operands[: _VALUES + 1]
    for place, axes in ((_QUERY, "[B, H, Q, D]"), (_KEYS, "[B, Hk, K, D]"), (_VALUES, "[B, Hk, K, D]")):
        array = request.operands[place]
        if array is None:
            describe(_NAME, _NAMES[place], None)
        assert array is not None and query is not None
        require_dtype(_NAME, _NAMES[place], array, (query.dtype,) if query.dtype in FLOATING else FLOATING)
        if len(array.shape) != 4:
            raise BurtDimensionError(f"{_NAME}: {_NAMES[place]}: expected 4 dimensions {axes}, got {array}")
    assert query is not None and keys is not None and values is not None
    batch, heads, queries, dims = query.shape
    key_heads, contexts = keys.shape[1:3]
    if not 1 <= dims <= MOST_DIMS:
        raise BurtDimensionError(f"{_NAME}: query: expected D from 1 to {MOST_DIMS} (last axis), got {query}")
    require_shape(_NAME, "context_keys", keys, (batch, key_heads, contexts, dims))
    if heads % key_heads if key_heads else heads:
        raise BurtDimensionError(
            f"{_NAME}: context_keys: expected heads (axis 1) that divide the {heads} of the queries, got {keys}"
        )
    require_shape(_NAME, "context_values", values, keys.shape)
    for place, what, size in ((_QUERY, "B H", batch * heads), (_QUERY, "Q", queries), (_KEYS, "K", contexts)):
        if size > _MOST_SIZE:
            raise BurtDimensionError(f"{_NAME}: {_NAMES[place]}: expected {what} of at most 2**30, got {size}")
    for place, types, size in ((_BOUNDS, ("float32",), heads), (_LENGTHS, ("int32", "int64"), batch)):
        array = request.operands[place]
        if array is not None:
            require_dtype(_NAME, _NAMES[place], array, types)
            if array.shape or place == _LENGTHS:
                require_shape(_NAME, _NAMES[place], array, (size,))
    for place in (_TEMPERATURE, _ENTROPY, _LSE):
        array = request.operands[place]
        if array is not None:
            require_output(_NAME, _NAMES[place], array, query.shape[:-1], "float32")
    out = request.operands[_OUT]
    if out is not None:
        require_output(_NAME, "out", out, query.shape, query.dtype)
    return Sizes(batch, heads, key_heads, queries, contexts, dims)


def _choices(
    sizes: Sizes, vector: int, dtype: str, precision: str, capability: tuple[int, int]
) -> Iterator[tuple[int, int, Choice]]:
    """(first row, rows, launch) until all rows are taken."""
    for first_row in range(0, sizes.rows, MOST_ROWS):
        rows = min(MOST_ROWS, sizes.rows - first_row)
        choice = choose(sizes, rows, vector, dtype, precision, capability)
        yield first_row, rows, choice
        if choice.takes_all:
            return


def _answer(request: Request) -> Answer:
    precision, default_scale = request.options
    sizes = _check(request)
    query = request.operands[_QUERY]
    assert query is not None
    result = Result(query.shape, query.dtype)
    if sizes.rows == 0:
        return Answer((), [result])
    vectors = []
    for place in (_QUERY, _KEYS, _VALUES):
        array = request.operands[place]
        assert array is not None
        vectors.append(StridedRows.of(_NAME, _NAMES[place], place, array, array.shape))
    vector = vector_columns(request.aligned, sizes.dims, query.dtype, vectors)
    capability = compute_capability(request.device)
    dtype = TYPE_CODES[query.dtype]
    rows_out = (sizes.rows,)
    scale = Number(1.0 / math.sqrt(sizes.dims), "f4") if default_scale else CallNumber(_SCALE, "f4")
    launches = []
    for first_row, rows, choice in _choices(sizes, vector, dtype, precision, capability):
        arguments = (
            *(each.argument for each in vectors),
            Array(_OUT, dtype, (sizes.rows * sizes.dims,)),
            Number(first_row, "i8"),
            Number(rows, "i4"),
            Number(sizes.heads, "i4"),
            Number(sizes.heads // sizes.key_heads, "i4"),
            Number(sizes.queries, "i4"),
            Number(sizes.contexts, "i4"),
            Number(sizes.dims, "i4"),
            *(number for each in vectors for number in each.place),
            scale,
            CallNumber(_ENTROPY_BOUND, "f4"),
            CallNumber(_TEMPERATURE_MIN, "f4"),
            CallNumber(_TEMPERATURE_MAX, "f4"),
            CallNumber(_MAX_ITERATIONS, "i4"),
            *column_arguments(_NAME, "entropy_bound", _BOUNDS, request.operands[_BOUNDS], sizes.heads, "f4"),
            *length_arguments(_NAME, "context_lengths", _LENGTHS, request.operands[_LENGTHS], sizes.batch),
            *(
                Array(place, "f4", rows_out) if request.operands[place] else Array(None, "f4")
                for place in (_TEMPERATURE, _ENTROPY, _LSE)
            ),
            Errors(),
        )
        launches.append(
            Launch(choice.kernel, (choice.grid, 1), choice.threads, arguments, choice.shared_bytes, choice.cluster)
        )
    if request.validate:
        launches.append(finite_check_launch(_OUT, dtype, 1, sizes.rows, sizes.dims))
    return Answer(launches, [result])


_OPERATION = Operation(
    _NAME,
    _NAMES,
    ("temperature_out", "entropy_out", "lse_out", "out"),
    ("query", "context_keys", "context_values", "out"),
    _answer,
)


def _documented() -> KernelSpec:
    return KernelSpec(_NAME, kernel_in(_NAME, f"{_NAME}_kernel"), (), (DOCUMENTED_BIENCODER_THREADS, 1))


def _types(dtype: str) -> tuple[str, ...]:
    sizes = ("i8", *("i4",) * 6)
    numbers = ("f4", "f4", "f4", "f4", "i4")
    columns = ("f4:1C", "i8", "i8", "i4:1C", "i8", "i8", "i4")
    return (*(f"{dtype}:1C",) * 4, *sizes, *("i8",) * 15, *numbers, *columns, *("f4:1C",) * 3, "i8:1C")


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the function can launch, and the documented one, with their argument types."""
    for dtype, widest in (("f4", 4), ("f2", 8)):
        for vector, blocks, resident in itertools.product((widest, 1), (1, MAX_CLUSTER_BLOCKS), (True, False)):
            yield rows_kernel_spec(vector, dtype, blocks, resident), _types(dtype)
        for kind, vector in itertools.product((HALF,) if dtype == "f2" else (EXACT, ROUNDED), (widest, 1)):
            yield few_kernel_spec(kind, vector), _types(dtype)
            for chunks in (0, *tiles_chunks(kind, vector)):
                yield tiles_kernel_spec(kind, vector, chunks), _types(dtype)
        arrays = (f"{dtype}:4C",) * 4
        numbers = (*("i8",) * 5, "f4", "f4", "f4", "f4", "i8")
        yield _documented(), (*arrays, *numbers, "f4:1C", "i4:1C", *("f4:1C",) * 3, "i8:1C")


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(
    batch: int, heads: int, queries: int, contexts: int, dims: int, itemsize: int, key_heads: int | None = None
) -> int:
    """The fewest bytes a call moves: queries, keys and values read once, the result written once."""
    vectors = 2 * heads * queries + 2 * (heads if key_heads is None else key_heads) * contexts
    return batch * vectors * dims * itemsize


def flops(batch: int, heads: int, queries: int, contexts: int, dims: int) -> int:
    """Arithmetic of a call: both products. What the search adds does not grow with D."""
    return 4 * batch * heads * queries * contexts * dims


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches for contiguous, aligned arrays."""
    batch = dimension(_NAME, dims, "batch_size")
    heads = dimension(_NAME, dims, "num_heads")
    sizes = Sizes(
        batch,
        heads,
        dimension(_NAME, dims, "key_heads", default=heads),
        dimension(_NAME, dims, "query_len"),
        dimension(_NAME, dims, "context_len"),
        dimension(_NAME, dims, "d_head", lowest=1),
    )
    precision = dims.pop("precision", "fp32")
    itemsize = dtype_itemsize(_NAME, dims)
    refuse_unknown(_NAME, dims)
    if precision not in _PRECISIONS:
        raise BurtDimensionError(f"plan: {_NAME}: precision: expected {' or '.join(_PRECISIONS)}, got {precision!r}")
    if sizes.dims > MOST_DIMS:
        raise BurtDimensionError(f"plan: {_NAME}: d_head: expected at most {MOST_DIMS}, got {sizes.dims}")
    if sizes.heads % sizes.key_heads if sizes.key_heads else sizes.heads:
        raise BurtDimensionError(f"plan: {_NAME}: key_heads: expected a divisor of {heads}, got {sizes.key_heads}")
    for what, size in (
        ("batch_size * num_heads", batch * heads),
        ("query_len", sizes.queries),
        ("context_len", sizes.contexts),
    ):
        if size > _MOST_SIZE:
            raise BurtDimensionError(f"plan: {_NAME}: {what}: expected at most 2**30, got {size}")
    refuse_too_many(_NAME, sizes.rows)
    tiles = DocumentedTiles.of(sizes.dims)
    documented = LaunchPlan(
        f"{_NAME}_kernel",
        (min(batch * heads, MOST_BLOCKS), min(-(-sizes.queries // tiles.queries), 65535)),
        tiles.contexts,
        tiles.shared_bytes(sizes.dims),
    )
    launches = []
    vector = 16 // itemsize if sizes.dims % (16 // itemsize) == 0 else 1
    dtype = "f2" if itemsize == 2 else "f4"
    for _first_row, _rows, choice in _choices(sizes, vector, dtype, precision, compute_capability):
        launches.append(
            LaunchPlan(
                f"{choice.kernel.name}_kernel", (choice.grid,), choice.threads, choice.shared_bytes, choice.cluster
            )
        )
    output = sizes.rows * sizes.dims * itemsize
    moved = bytes_moved(batch, heads, sizes.queries, sizes.contexts, sizes.dims, itemsize, sizes.key_heads)
    return Plan(_NAME, documented, moved - output, output, documented.shared_bytes, launches)


__all__ = ["biencoder_attention", "bytes_moved", "flops", "plan", "specialisations"]
